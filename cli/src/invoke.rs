//! `invoke`: one event through the deployed function's own handler.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use idempotent_consumer::batch::{Batch, BatchError, BatchSettings};
use idempotent_consumer::consumer::{Consumer, ConsumerSettings};
use idempotent_consumer::effect::Recovery;
use idempotent_consumer::error::ErrorChain;
use idempotent_consumer::fingerprint::Coverage;
use idempotent_consumer::key::{KeyExpression, Scope};
use idempotent_consumer::source::SourceSettings;
use idempotent_consumer::source::envelope::BodyFormat;
use idempotent_consumer::source::noise::IgnoreList;
use idempotent_consumer::source::sqs_lambda::{self, InvocationError};
use idempotent_consumer::store::dynamodb::DynamoDbStore;
use idempotent_consumer::time::{Clock, Retention, RetentionError, SystemClock};
use lambda_runtime::{Context, Diagnostic};
use serde_json::value::RawValue;

use crate::effect::{self, Ledger, LedgerEffect};
use crate::embedded::{Embedded, StoreTrouble};
use crate::exit;
use crate::output::{self, Invocation};

/// The queue that template.yaml deploys by default.
const VISIBILITY_TIMEOUT_SECONDS: u64 = 180;
const MAX_RECEIVE_COUNT: u32 = 5;
const RETENTION_BUFFER_SECONDS: u64 = 86_400;

/// Run an SQS event through the function, here, without AWS.
///
/// Handler, protocol, store and AWS SDK are those that are deployed; the DynamoDB behind
/// them is embedded and keeps its tables in a file. Run an event twice, and the second
/// time every message is answered from there.
#[derive(Debug, clap::Args)]
#[command(after_help = crate::EXIT_CODES, after_long_help = format!("{}\n\n{}", effect::HELP, crate::EXIT_CODES))]
pub(crate) struct Args {
    /// The event as Lambda delivers it: `{"Records": [{"messageId": ..., "eventSource": "aws:sqs", "body": ...}]}`.
    event: PathBuf,
    /// The file that remembers.
    ///
    /// Created if need be, and its directory with it. Two commands may use it at the same
    /// time: then they are two consumers of one table.
    #[arg(long, value_name = "FILE", default_value = "target/demo.db")]
    store: PathBuf,
    /// Forget everything first: delete that file.
    #[arg(long)]
    forget: bool,
    /// What a body is: `raw` (the message itself), `sns` or `eventbridge` (an envelope around it), or `auto`.
    #[arg(long, value_name = "FORMAT", default_value_t)]
    body: BodyFormat,
    /// Acknowledge known noise: names with commas between them, such as `s3:TestEvent`.
    #[arg(long, value_name = "NAMES", default_value_t, hide_default_value = true)]
    ignore: IgnoreList,
    /// Which part of a message is its key.
    #[arg(long, value_name = "EXPRESSION", default_value_t)]
    key: KeyExpression,
    /// First part of every record's id.
    ///
    /// The deployed function uses its name.
    #[arg(long, value_name = "NAME", default_value = "demo")]
    scope: Scope,
    /// What must be equal under one key: `body`, `off`, or pointers such as `/amount,/currency`.
    #[arg(long, value_name = "PARTS", default_value_t)]
    fingerprint: Coverage,
    /// What to do about an attempt without an outcome: `rerun`, `verify` or `park`.
    ///
    /// A deployed effect has no default for this; here it is a demonstration.
    #[arg(long, value_name = "WHAT", default_value_t = Recovery::Rerun)]
    recovery: Recovery,
    /// The function's timeout, from 1 to 900.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=900))]
    timeout_seconds: u64,
    /// Print one JSON document instead of the table.
    #[arg(long)]
    json: bool,
    /// Log to standard error what the deployed function logs.
    #[arg(long, short)]
    pub(crate) verbose: bool,
}

/// The event was not processed, or nobody can be told.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("the event `{}` can't be read: {error}", file.display())]
    Unreadable { file: PathBuf, error: std::io::Error },
    #[error("the event `{}` is not JSON: {error}. {SAMPLE}", file.display())]
    NotJson { file: PathBuf, error: serde_json::Error },
    #[error("the event `{}` is {error}. {SAMPLE}", file.display())]
    NotSqs { file: PathBuf, error: InvocationError },
    #[error(
        "the event `{}` fails its invocation, and Lambda keeps the messages in the queue. {}: {}",
        file.display(), .diagnostic.error_type, .diagnostic.error_message
    )]
    Invocation { file: PathBuf, diagnostic: Diagnostic },
    #[error(transparent)]
    Store(#[from] StoreTrouble),
    #[error(transparent)]
    Retention(#[from] RetentionError),
    #[error("the outcome can't be printed: {0}")]
    Output(#[from] std::io::Error),
}

const SAMPLE: &str = "Give it a batch as Lambda delivers it; events/one-order.json is one";

impl Failure {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Store(_) => exit::STORE,
            Self::Output(_) => exit::SOME_FAILED,
            _ => exit::INPUT,
        }
    }

    fn of_invocation(args: &Args, error: InvocationError) -> Self {
        let file = args.event.clone();
        match error {
            InvocationError::NotSqs(_) => Self::NotSqs { file, error },
            InvocationError::Batch(BatchError::StoreAway(error)) => {
                StoreTrouble::new(&args.store, format!("gave no answer: {}", ErrorChain(&error))).into()
            }
            error => Self::Invocation { file, diagnostic: error.into() },
        }
    }
}

/// Runs the event and prints what became of it.
pub(crate) async fn run(args: &Args) -> Result<ExitCode, Failure> {
    let event = read(&args.event)?;
    let mut source = SourceSettings::default();
    source.body = args.body;
    source.ignore = args.ignore.clone();
    // Before the store is touched: a wrong file must not make it forget.
    sqs_lambda::messages(event.get(), &source).map_err(|error| Failure::of_invocation(args, error))?;

    let embedded = Embedded::open(&args.store, args.forget).await?;
    let batch = batch(args, &embedded).await?;
    let timeout = Duration::from_secs(args.timeout_seconds);
    let mut context = Context::default();
    "invoke".clone_into(&mut context.request_id);
    context.deadline = SystemClock.now().plus(timeout).get();
    let reports = sqs_lambda::process(&batch, &source, None, event.get(), &context)
        .await
        .map_err(|error| Failure::of_invocation(args, error))?;

    let invocation = Invocation {
        store: &args.store,
        scope: &args.scope,
        response: sqs_lambda::response(&reports),
        applications: batch.consumer().effect().applications(),
        reports,
    };
    output::print(&if args.json { invocation.to_json() } else { invocation.to_text() })?;
    Ok(if invocation.response.batch_item_failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(exit::SOME_FAILED)
    })
}

fn read(file: &Path) -> Result<Box<RawValue>, Failure> {
    let text = std::fs::read(file).map_err(|error| Failure::Unreadable { file: file.to_owned(), error })?;
    serde_json::from_slice(&text).map_err(|error| Failure::NotJson { file: file.to_owned(), error })
}

/// The deployed function's parts, put together as it puts them together.
async fn batch(args: &Args, embedded: &Embedded) -> Result<Batch<Consumer<LedgerEffect>>, Failure> {
    let records = embedded.table("records").await?;
    let ledger = Ledger { client: embedded.client.clone(), table: embedded.table("ledger").await? };

    let retention = Retention::for_queue(VISIBILITY_TIMEOUT_SECONDS, MAX_RECEIVE_COUNT, RETENTION_BUFFER_SECONDS)?;
    let mut consumer = ConsumerSettings::new(args.scope.clone(), retention);
    consumer.key = args.key.clone();
    consumer.fingerprint = args.fingerprint.clone();
    let mut settings = BatchSettings::default();
    settings.max_receive_count = Some(MAX_RECEIVE_COUNT);

    let store = DynamoDbStore::new(embedded.client.clone(), records);
    let consumer = Consumer::new(LedgerEffect::new(ledger, args.recovery), Arc::new(store), consumer);
    Ok(Batch::new(consumer, settings))
}
