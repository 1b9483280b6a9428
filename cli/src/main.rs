//! The operator's command.

mod effect;
mod embedded;
mod invoke;
mod output;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use idempotent_consumer::telemetry::one_line::{Escapes, OneLine};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Exit codes, the same for every subcommand. `--help` lists them.
mod exit {
    /// The command line, or what it names, can't be used. clap's own code for that.
    pub(crate) const INPUT: u8 = 2;
    /// Some messages were reported failed, or the outcome could not be printed.
    pub(crate) const SOME_FAILED: u8 = 1;
    /// The store can't be used.
    pub(crate) const STORE: u8 = 3;
}

const EXIT_CODES: &str = "\
Exit codes:
  0  every message was acknowledged
  1  some messages were reported failed, or the outcome could not be printed
  2  the command line or the event can't be used; no effect ran
  3  the store can't be used; no effect ran";

/// Try an idempotent consumer, and look after one.
#[derive(Debug, Parser)]
#[command(name = "idempotent-consumer", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Invoke(invoke::Args),
}

fn main() -> ExitCode {
    let Command::Invoke(args) = Cli::parse().command;
    if args.verbose {
        log_to_stderr();
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        // The embedded database blocks one while it writes.
        .worker_threads(4)
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return output::failure(&format!("the async runtime can't start: {error}"), exit::INPUT),
    };
    match runtime.block_on(invoke::run(&args)) {
        Ok(code) => code,
        Err(failure) => output::failure(&failure.to_string(), failure.exit_code()),
    }
}

/// What the deployed function logs, as text on standard error.
fn log_to_stderr() {
    let targets = Targets::new()
        .with_default(LevelFilter::WARN)
        .with_target("idempotent_consumer", LevelFilter::DEBUG)
        // Warns of every refused condition, and those are the protocol.
        .with_target("dynoxide", LevelFilter::ERROR);
    let stderr = OneLine::new(std::io::stderr, Escapes::Text);
    let lines = tracing_subscriber::fmt::layer().with_writer(stderr).with_ansi(false).without_time();
    tracing_subscriber::registry().with(targets).with(lines).init();
}
