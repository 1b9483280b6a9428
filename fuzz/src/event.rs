//! SQS events: bad input costs one message, never the batch.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use idempotent_consumer::batch::{Batch, BatchSettings};
use idempotent_consumer::consumer::{Consumer, ConsumerSettings};
use idempotent_consumer::dead_letter::{DeadLetter, DeadLetterError, DeadLetterQueue};
use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery};
use idempotent_consumer::key::{Key, Scope};
use idempotent_consumer::outcome::Disposition;
use idempotent_consumer::record::{RecordId, State};
use idempotent_consumer::source::SourceSettings;
use idempotent_consumer::source::envelope::BodyFormat;
use idempotent_consumer::source::sqs_lambda::{self, InvocationError};
use idempotent_consumer::store::memory::MemoryStore;
use idempotent_consumer::store::{BoxFuture, Store};
use idempotent_consumer::time::{EpochMillis, ManualClock, Retention};
use lambda_runtime::{Context, LambdaEvent};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::dice;

/// The input is an event's payload, and the body of a message between two good ones.
pub fn event(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    payload(&text);
    splice(&text);
}

/// What has happened: message ids and keys of effects applied, bodies of dead letters.
#[derive(Default)]
struct Seen {
    applied: Mutex<Vec<(String, String)>>,
    letters: Mutex<Vec<DeadLetter>>,
}

struct Note(Arc<Seen>);

impl Effect for Note {
    type Input = Value;
    type Output = Value;

    fn recovery(&self) -> Recovery {
        Recovery::Rerun
    }

    async fn apply(&self, input: &Value, attempt: &Attempt<'_>) -> Result<Value, EffectError> {
        let applied = (attempt.message().id.clone(), attempt.key().id().to_owned());
        self.0.applied.lock().unwrap().push(applied);
        Ok(input.clone())
    }
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seen").finish_non_exhaustive()
    }
}

impl DeadLetterQueue for Seen {
    fn send<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        self.letters.lock().unwrap().push(letter.clone());
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A function with an empty store, and what it has seen.
struct Function {
    batch: Batch<Consumer<Note>>,
    store: Arc<MemoryStore>,
    seen: Arc<Seen>,
}

impl Function {
    fn new(dead_letters: bool) -> Self {
        let (store, seen) = (Arc::new(MemoryStore::new()), Arc::new(Seen::default()));
        let settings = ConsumerSettings::new(Scope::new("fuzzed").unwrap(), Retention::from_seconds(3600).unwrap());
        let clock = Arc::new(ManualClock::new(EpochMillis::new(1_900_000_000_000)));
        let consumer = Consumer::new(Note(Arc::clone(&seen)), Arc::clone(&store) as Arc<dyn Store>, settings);
        let mut batch = Batch::new(consumer.with_clock(clock), BatchSettings::default());
        if dead_letters {
            batch = batch.with_dead_letters(Arc::clone(&seen) as Arc<dyn DeadLetterQueue>);
        }
        Self { batch, store, seen }
    }

    /// The ids in the answer of the real handler.
    fn handle(&self, payload: &str, settings: &SourceSettings) -> Result<Vec<String>, InvocationError> {
        let payload = RawValue::from_string(payload.to_owned()).expect("checked by the caller");
        let event = LambdaEvent::new(payload, context());
        let answer = block_on(sqs_lambda::handle(&self.batch, settings, None, event))?;
        Ok(answer.batch_item_failures.into_iter().map(|failure| failure.item_identifier).collect())
    }

    fn is_completed(&self, id: &str) -> bool {
        let record = block_on(self.store.load(&RecordId::new(id))).unwrap();
        matches!(record.map(|record| record.state), Some(State::Completed { .. }))
    }

    fn applied(&self) -> Vec<(String, String)> {
        self.seen.applied.lock().unwrap().clone()
    }
}

fn context() -> Context {
    // A length of time, as `cargo lambda watch` has it.
    let mut context = Context::default();
    context.deadline = 600_000;
    context
}

fn block_on<F: Future>(future: F) -> F::Output {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    }
    RUNTIME.with(|runtime| runtime.block_on(future))
}

/// Any payload: an answer only to what is an SQS event, about the messages in it.
pub fn payload(text: &str) {
    let settings = SourceSettings::default();
    let function = Function::new(false);
    let ids = sqs_records(text);
    let reports = block_on(sqs_lambda::process(&function.batch, &settings, None, text, &context()));
    let Ok(reports) = reports else {
        assert!(function.applied().is_empty(), "an invocation that failed has run something");
        if serde_json::from_str::<&RawValue>(text).is_ok() {
            assert!(Function::new(false).handle(text, &settings).is_err());
        }
        return;
    };
    let ids = ids.unwrap_or_else(|| panic!("answered, and no SQS event: {text}"));
    let reported: Vec<_> = reports.iter().map(|report| report.message_id.as_str()).collect();
    assert_eq!(reported, ids, "not one report for each record, in their order");
    assert!(ids.iter().all(|id| !id.is_empty()));
    for (id, key) in function.applied() {
        assert!(ids.contains(&id), "{id} is none of {ids:?}");
        assert!(function.is_completed(&key), "{key} was applied and has no result");
    }
    let mut failed: Vec<_> = reports
        .iter()
        .filter(|report| {
            let acked = report.disposition() == Disposition::Ack;
            let key = report.key.as_ref().map(Key::id);
            assert!(!acked || key.is_some_and(|key| function.is_completed(key)), "acked without a result: {report:?}");
            !acked
        })
        .map(|report| report.message_id.clone())
        .collect();
    // The handler, on a store of its own, answers what the reports say.
    let mut answered = Function::new(false).handle(text, &settings).unwrap();
    assert_eq!(failed.len(), answered.len());
    failed.sort();
    answered.sort();
    assert_eq!(failed, answered);
}

/// The ids of the records, if this is an SQS event: read apart from the code under test.
fn sqs_records(text: &str) -> Option<Vec<String>> {
    let event: HashMap<String, &RawValue> = serde_json::from_str(text).ok()?;
    let records: Vec<HashMap<String, &RawValue>> = serde_json::from_str(event.get("Records")?.get()).ok()?;
    records
        .iter()
        .map(|record| {
            let text = |name: &str| serde_json::from_str::<String>(record.get(name)?.get()).ok();
            text("messageId").filter(|_| text("eventSource").as_deref() == Some("aws:sqs"))
        })
        .collect()
}

/// A body between two good ones costs at most itself, whatever envelope is expected.
pub fn splice(body: &str) {
    // Of the body, so that the body can't have it in it.
    let mark = dice::hash(body.as_bytes());
    let cases = [
        (BodyFormat::Raw, false),
        (BodyFormat::Raw, true),
        (BodyFormat::Sns, false),
        (BodyFormat::EventBridge, true),
        (BodyFormat::Auto, true),
    ];
    for (format, dead_letters) in cases {
        let mut settings = SourceSettings::default();
        settings.body = format;
        let good = |name: &str| (format!("{name}-{mark:x}"), in_envelope(format, &format!("{name}-{mark:x}")));
        let [(first, first_body), (last, last_body)] = ["first", "last"].map(good);
        let payload = json!({
            "Records": [record(&first, &first_body, &first), record("fuzzed", body, body), record(&last, &last_body, &last)],
        });
        let function = Function::new(dead_letters);
        let failed = function.handle(&payload.to_string(), &settings).unwrap();

        let applied = function.applied();
        let times = |id: &str| applied.iter().filter(|(applied, _)| applied == id).count();
        assert_eq!((times(&first), times(&last)), (1, 1), "{format}: a good message was lost to its neighbour");
        let letters = function.seen.letters.lock().unwrap();
        let given_up = letters.iter().map(|letter| &letter.message_id);
        let not_applied: Vec<_> = failed.iter().chain(given_up).collect();
        if times("fuzzed") == 0 {
            assert_eq!(not_applied, ["fuzzed"], "{format}");
            assert_eq!(letters.len(), usize::from(dead_letters));
            assert!(letters.iter().all(|letter| letter.body == body));
        } else {
            assert_eq!((times("fuzzed"), not_applied.len()), (1, 0), "{format}");
        }
        assert_eq!(applied.len() + not_applied.len(), 3);
        for (_, key) in &applied {
            assert!(function.is_completed(key), "{format}: acked without a result");
        }
    }
}

fn record(id: &str, body: &str, noise: &str) -> Value {
    let noise: String = noise.chars().take(128).collect();
    json!({
        "messageId": id,
        "receiptHandle": "AQEB",
        "body": body,
        "attributes": {
            "ApproximateReceiveCount": noise,
            "ApproximateFirstReceiveTimestamp": noise,
            "MessageGroupId": noise,
            "MessageDeduplicationId": noise,
        },
        "messageAttributes": {
            &noise: { "stringValue": noise, "stringListValues": [], "binaryListValues": [], "dataType": "String" },
        },
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:eu-central-1:123456789012:orders.fifo",
    })
}

fn in_envelope(format: BodyFormat, order: &str) -> String {
    let order = json!({ "orderId": order });
    match format {
        BodyFormat::Sns => json!({
            "Type": "Notification",
            "MessageId": "n-1",
            "TopicArn": "arn:aws:sns:eu-central-1:123456789012:orders",
            "Message": order.to_string(),
        }),
        BodyFormat::EventBridge => json!({
            "version": "0", "id": "e-1", "detail-type": "OrderPlaced", "source": "shop", "account": "123456789012",
            "time": "2026-01-05T08:30:00Z", "region": "eu-central-1", "resources": [], "detail": order,
        }),
        _ => order,
    }
    .to_string()
}
