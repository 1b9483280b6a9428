//! Lambda's SQS events as messages, and the answer to them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Outcome, Report, Unstarted};
use idempotent_consumer::record::StoredResult;
use idempotent_consumer::source::SourceSettings;
use idempotent_consumer::source::sqs_lambda::{self, InvocationError, response};
use serde_json::{Value, json};

#[allow(clippy::needless_pass_by_value)] // reads better where it is called
fn messages(event: Value) -> Result<Vec<Message>, InvocationError> {
    sqs_lambda::messages(&event.to_string(), &SourceSettings::default())
}

fn record(change: impl FnOnce(&mut Value)) -> Value {
    let mut record = json!({
        "messageId": "m-1",
        "receiptHandle": "AQEB",
        "body": "{\"orderId\":\"A-1\"}",
        "attributes": {
            "ApproximateReceiveCount": "2",
            "SentTimestamp": "1900000000000",
            "SequenceNumber": "18849496460467696128",
            "MessageGroupId": "customer-7",
            "SenderId": "AIDA",
            "MessageDeduplicationId": "dedup-1",
            "ApproximateFirstReceiveTimestamp": "1900000000123"
        },
        "messageAttributes": {
            "source": { "stringValue": "shop", "stringListValues": [], "binaryListValues": [], "dataType": "String" },
            "version": { "stringValue": "3", "stringListValues": [], "binaryListValues": [], "dataType": "Number" },
            "blob": { "binaryValue": "AAEC", "stringListValues": [], "binaryListValues": [], "dataType": "Binary" }
        },
        "md5OfBody": "00",
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:eu-central-1:123456789012:orders.fifo",
        "awsRegion": "eu-central-1"
    });
    change(&mut record);
    record
}

#[test]
fn every_fact_of_the_delivery_is_kept() {
    let messages = messages(json!({ "Records": [record(|_| {})] })).unwrap();
    let message = &messages[0];
    assert_eq!(message.id, "m-1");
    assert_eq!(message.body, r#"{"orderId":"A-1"}"#);
    assert_eq!(message.group.as_deref(), Some("customer-7"));
    assert_eq!(message.deduplication_id.as_deref(), Some("dedup-1"));
    assert_eq!(message.receive_count, Some(2));
    assert_eq!(message.first_received_at.unwrap().get(), 1_900_000_000_123);
    assert_eq!(message.source.as_deref(), Some("arn:aws:sqs:eu-central-1:123456789012:orders.fifo"));
    let attributes: Vec<_> = message.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(attributes, [("source", "shop"), ("version", "3")]);
}

#[test]
fn a_standard_queue_has_no_group_and_a_missing_body_is_an_empty_one() {
    let bare = record(|record| {
        record["attributes"] = json!({ "ApproximateReceiveCount": "1" });
        record["messageAttributes"] = json!({});
        record["body"] = Value::Null;
    });
    let messages = messages(json!({ "Records": [bare] })).unwrap();
    assert_eq!((messages[0].group.as_deref(), messages[0].body.as_str()), (None, ""));
}

#[test]
fn the_group_of_a_standard_queue_is_about_fairness_and_not_order() {
    let fair = record(|record| record["eventSourceARN"] = json!("arn:aws:sqs:eu-central-1:123456789012:orders"));
    let messages = messages(json!({ "Records": [fair] })).unwrap();
    assert_eq!(messages[0].group, None);
}

#[test]
fn what_is_no_sqs_event_is_an_error_and_never_an_empty_list() {
    let other_service = |source: Value| json!({ "Records": [record(|_| {}), record(|r| r["eventSource"] = source)] });
    let cases = [
        (json!({}), "no `Records`"),
        (json!(null), "no `Records`"),
        (json!([]), "no `Records`"),
        (json!("Records"), "no `Records`"),
        (json!({ "records": [] }), "no `Records`"),
        (json!({ "Records": null }), "`Records` is no list"),
        (json!({ "Records": {} }), "`Records` is no list"),
        (json!({ "Records": ["m-1"] }), "record 0 has a member of another type"),
        // Serde would take a list of the members for the object that has them.
        (json!([[]]), "no `Records`"),
        (json!([[record(|_| {})]]), "no `Records`"),
        (
            json!({ "Records": [["m-1", "AQEB", "{}", null, null, {}, {}, null, "aws:sqs", null]] }),
            "record 0 has a member of another type",
        ),
        (
            json!({ "Records": [record(|r| r["body"] = json!({ "secret": 1 }))] }),
            "record 0 has a member of another type",
        ),
        (other_service(json!("aws:s3")), "record 1 comes from `aws:s3`"),
        (other_service(json!("x\ny")), "record 1 comes from `x\\ny`"),
        (other_service(Value::Null), "record 1 has no `eventSource`"),
    ];
    for (event, text) in cases {
        let error = messages(event.clone()).unwrap_err().to_string();
        assert!(error.starts_with("not an SQS event") && error.contains(text), "{event}: {error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[test]
fn a_record_without_an_id_fails_the_invocation_before_anything_runs() {
    for id in [Value::Null, json!("")] {
        let error = messages(json!({ "Records": [record(|_| {}), record(|r| r["messageId"] = id)] })).unwrap_err();
        assert!(error.to_string().contains("record 1 of the SQS event has no messageId"), "{error}");
    }
}

#[test]
fn the_answer_names_every_message_that_was_not_acked() {
    let records = ["1", "2", "3"].map(|id| record(|record| record["messageId"] = json!(id)));
    let messages = messages(json!({ "Records": records })).unwrap();
    let outcomes = [
        Outcome::Unstarted { why: Unstarted::GroupStopped },
        Outcome::Executed { result: StoredResult::whole("null") },
        Outcome::Rejected { reason: "no key".into() },
    ];
    let reports: Vec<_> = messages
        .iter()
        .zip(outcomes)
        .map(|(message, outcome)| Report {
            message_id: message.id.clone(),
            group: None,
            key: None,
            attempt: None,
            outcome,
            dead_lettered: false,
        })
        .collect();
    assert_eq!(
        serde_json::to_value(response(&reports)).unwrap(),
        json!({ "batchItemFailures": [{ "itemIdentifier": "1" }, { "itemIdentifier": "3" }] })
    );
    assert_eq!(serde_json::to_value(response(&[])).unwrap(), json!({ "batchItemFailures": [] }));
}
