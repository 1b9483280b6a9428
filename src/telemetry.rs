//! What is logged, and how.
//!
//! One line per message, with the fields `message_id`, `key`, `group`, `attempt`,
//! `outcome` and, if the effect has no result, `reason`; `dead_lettered` is true once the
//! message has reached the dead-letter queue, `reduced` if the result could not be kept whole. Bodies, results and attributes are never
//! logged. Renaming a field is a breaking change.

use crate::outcome::{Outcome, Report};

/// Logs what happened to one message.
pub fn log_report(report: &Report) {
    macro_rules! log {
        ($level:ident, $text:literal) => {
            tracing::$level!(
                message_id = report.message_id.as_str(),
                key = report.key.as_ref().map(crate::key::Key::id),
                group = report.group.as_deref(),
                attempt = report.attempt,
                outcome = report.outcome.name(),
                reason = report.outcome.reason().as_deref(),
                dead_lettered = report.dead_lettered.then_some(true),
                reduced = report.outcome.result().filter(|result| result.reduced).map(|_| true),
                $text
            )
        };
    }
    match &report.outcome {
        Outcome::Executed { .. } | Outcome::Replayed { .. } | Outcome::Recovered { .. } | Outcome::Applied { .. } => {
            log!(info, "message done");
        }
        Outcome::Ignored { .. } => log!(info, "message ignored"),
        Outcome::InFlight { .. } | Outcome::Unstarted { .. } => log!(info, "message left for later"),
        Outcome::NotApplied { .. } | Outcome::Unknown { .. } | Outcome::Fenced | Outcome::Unprotected { .. } => {
            log!(warn, "message needs attention if this goes on");
        }
        // Rejected, conflict, permanent, parked, locked, not recorded, store failed.
        _ => log!(error, "message needs attention"),
    }
}

/// Sends log lines to standard output as Lambda wants them: `AWS_LAMBDA_LOG_FORMAT`
/// `JSON` (default here) or `Text`, from `AWS_LAMBDA_LOG_LEVEL` (default `INFO`) up.
///
/// Every JSON line has an RFC 3339 `timestamp` and a `level`: without them Lambda's own
/// filter takes any line for INFO. Libraries below are held at WARN, whatever the level,
/// because their finer lines hold requests and with them bodies.
///
/// Does nothing if the program has set a subscriber of its own.
#[cfg(feature = "lambda")]
pub fn init(variable: impl Fn(&str) -> Option<String>) {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::fmt;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;

    let level = match variable("AWS_LAMBDA_LOG_LEVEL").unwrap_or_default().to_ascii_uppercase().as_str() {
        "TRACE" => LevelFilter::TRACE,
        "DEBUG" => LevelFilter::DEBUG,
        "WARN" => LevelFilter::WARN,
        "ERROR" | "FATAL" => LevelFilter::ERROR,
        _ => LevelFilter::INFO,
    };
    let below = level.min(LevelFilter::WARN);
    let targets = Targets::new()
        .with_default(level)
        .with_targets(["aws_", "h2", "hyper", "lambda_runtime", "reqwest", "rustls"].map(|library| (library, below)));
    let registry = tracing_subscriber::registry().with(targets);
    let text = variable("AWS_LAMBDA_LOG_FORMAT").is_some_and(|format| format.eq_ignore_ascii_case("text"));
    // A second call finds a subscriber set, which is as good.
    let _ = if text {
        registry.with(fmt::layer().with_ansi(false)).try_init()
    } else {
        registry.with(fmt::layer().json().flatten_event(true).with_current_span(false).with_span_list(false)).try_init()
    };
}
