//! SQS events that Lambda delivers: [`SqsEvent`](aws_lambda_events::event::sqs::SqsEvent) in, [`SqsBatchResponse`] out.
//!
//! What Lambda makes of the answer decides what the queue keeps, so it is checked here:
//! an identifier that is empty or unknown fails the whole batch, and one that is left out
//! deletes its message. The mapping must have `ReportBatchItemFailures`, or the answer is
//! ignored.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use aws_lambda_events::event::sqs::{SqsBatchResponse, SqsMessage};
use lambda_runtime::{Context, Diagnostic, LambdaEvent};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::batch::{Batch, BatchError};
use crate::consumer::Consume;
use crate::error::ErrorChain;
use crate::message::Message;
use crate::outcome::{Disposition, Report};
use crate::source::SourceSettings;
use crate::source::back_off::BackOff;
use crate::time::{Clock, Deadline, EpochMillis};

/// An invocation failed as a whole. Lambda keeps every message in its queue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvocationError {
    /// The payload is something else. Answering "no failures" would delete messages that
    /// nobody has looked at.
    #[error("not an SQS event: {0}; this function's one trigger must be an SQS queue")]
    NotSqs(String),
    /// A record can't be named in the answer, so its batch can't be answered in parts.
    #[error(
        "record {position} of the SQS event has no messageId, so its failure could not be reported; nothing was run"
    )]
    NoMessageId {
        /// Which record, counted from 0.
        position: usize,
    },
    /// Nothing could be processed.
    #[error(transparent)]
    Batch(#[from] BatchError),
}

impl From<InvocationError> for Diagnostic {
    fn from(error: InvocationError) -> Self {
        let error_type = match &error {
            InvocationError::NotSqs(_) => "NotAnSqsEvent",
            InvocationError::NoMessageId { .. } => "NoMessageId",
            InvocationError::Batch(BatchError::StoreAway(_)) => "StoreAway",
            InvocationError::Batch(BatchError::TooLittleTime { .. }) => "TooLittleTime",
        };
        Self { error_type: error_type.to_owned(), error_message: ErrorChain(&error).to_string() }
    }
}

/// Handles one invocation.
pub async fn handle<C: Consume>(
    batch: &Batch<C>,
    settings: &SourceSettings,
    back_off: Option<&BackOff>,
    event: LambdaEvent<Box<RawValue>>,
) -> Result<SqsBatchResponse, InvocationError> {
    let work = process(batch, settings, back_off, event.payload.get(), &event.context);
    let reports = work.await.inspect_err(|error| {
        tracing::error!(
            request_id = event.context.request_id,
            error = %ErrorChain(error),
            "the invocation failed; its messages stay in the queue"
        );
    })?;
    Ok(response(&reports))
}

/// Processes the messages of an SQS event, given as JSON, to be over by the invocation's deadline.
pub async fn process<C: Consume>(
    batch: &Batch<C>,
    settings: &SourceSettings,
    back_off: Option<&BackOff>,
    payload: &str,
    context: &Context,
) -> Result<Vec<Report>, InvocationError> {
    let messages = messages(payload, settings)?;
    let clock = batch.consumer().clock();
    let deadline = deadline(context.deadline, clock);
    let reports = batch.process(&messages, deadline).await?;
    if let Some(back_off) = back_off {
        back_off.apply(&messages, &reports, clock.now(), deadline).await;
    }
    Ok(reports)
}

/// The longest that a function may run.
const LONGEST_TIMEOUT: Duration = Duration::from_mins(15);

/// When the invocation has to be over. Lambda gives a point in time; `cargo lambda watch`
/// gives how long from now, which as a point in time would be minutes after 1970.
fn deadline(millis: u64, clock: &dyn Clock) -> Deadline {
    let length = Duration::from_millis(millis);
    if length <= LONGEST_TIMEOUT {
        Deadline::after(length, clock)
    } else {
        Deadline::at(EpochMillis::new(millis), clock)
    }
}

/// The messages of an SQS event, given as JSON.
pub fn messages(payload: &str, settings: &SourceSettings) -> Result<Vec<Message>, InvocationError> {
    let Object(event): Object<Event> =
        serde_json::from_str(payload).map_err(|_| InvocationError::NotSqs(what_is_wrong(payload)))?;
    let records = event.records.into_iter().enumerate();
    let messages = records.map(|(position, Object(record))| message(position, record));
    messages.map(|message| Ok(settings.read(message?))).collect()
}

/// An SQS event.
#[derive(serde::Deserialize)]
struct Event {
    #[serde(rename = "Records")]
    records: Vec<Object<SqsMessage>>,
}

/// What is read from an object and nothing else. Of itself serde takes a list of a struct's
/// members too: `[[]]` for an event without messages, which would be answered "no failures".
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(members)).map(Object)
            }
        }

        deserializer.deserialize_map(Members(PhantomData))
    }
}

/// Why a payload can't be read as an SQS event. Serde would say so too, and quote values
/// that may come from a body.
fn what_is_wrong(payload: &str) -> String {
    let Ok(mut payload) = serde_json::from_str::<Value>(payload) else {
        return "it is no JSON".to_owned();
    };
    match payload.get_mut("Records").map(Value::take) {
        None => "it has no `Records`".to_owned(),
        Some(Value::Array(records)) => {
            let unreadable =
                records.into_iter().position(|record| serde_json::from_value::<Object<SqsMessage>>(record).is_err());
            match unreadable {
                Some(position) => format!("record {position} has a member of another type than SQS gives it"),
                None => "it can't be read".to_owned(),
            }
        }
        Some(_) => "its `Records` is no list".to_owned(),
    }
}

fn message(position: usize, mut record: SqsMessage) -> Result<Message, InvocationError> {
    match record.event_source.as_deref() {
        Some("aws:sqs") => {}
        Some(other) => {
            return Err(InvocationError::NotSqs(format!("record {position} comes from `{}`", other.escape_debug())));
        }
        None => return Err(InvocationError::NotSqs(format!("record {position} has no `eventSource`"))),
    }
    let id = record.message_id.filter(|id| !id.is_empty()).ok_or(InvocationError::NoMessageId { position })?;
    let mut system = |name: &str| record.attributes.remove(name);
    let mut message = Message::new(id, record.body.unwrap_or_default());
    // On a standard queue the group id serves fairness between tenants, and promises no order.
    let ordered = record.event_source_arn.as_deref().is_none_or(|arn| arn.rsplit('.').next() == Some("fifo"));
    message.group = system("MessageGroupId").filter(|_| ordered);
    message.deduplication_id = system("MessageDeduplicationId");
    message.receive_count = system("ApproximateReceiveCount").and_then(|count| count.parse().ok());
    message.first_received_at =
        system("ApproximateFirstReceiveTimestamp").and_then(|millis| millis.parse().ok()).map(EpochMillis::new);
    message.source = record.event_source_arn;
    message.receipt = record.receipt_handle;
    message.attributes = record
        .message_attributes
        .into_iter()
        .filter_map(|(name, attribute)| Some((name, attribute.string_value?)))
        .collect::<BTreeMap<_, _>>();
    Ok(message)
}

/// The answer: every message that is not acked, by its id.
///
/// What a person must look at is acked once it has reached the dead-letter queue. Without a
/// [`DeadLetterQueue`](crate::dead_letter::DeadLetterQueue) it is reported as failed, and the
/// queue's redrive policy moves it.
#[must_use]
pub fn response(reports: &[Report]) -> SqsBatchResponse {
    let mut response = SqsBatchResponse::default();
    response.set_failures(
        reports
            .iter()
            .filter(|report| report.disposition() != Disposition::Ack)
            .map(|report| report.message_id.clone()),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::ManualClock;

    #[tokio::test(start_paused = true)]
    async fn a_deadline_is_a_point_in_time_or_with_cargo_lambda_a_length() {
        let clock = ManualClock::new(EpochMillis::new(1_900_000_000_000));
        for (millis, seconds) in [(1_900_000_030_000, 30), (600_000, 600), (1_899_999_999_000, 0), (900_001, 0)] {
            assert_eq!(deadline(millis, &clock).remaining(), Duration::from_secs(seconds), "{millis}");
        }
    }
}
