//! The requests that are made of SQS, and what is made of its answers.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use idempotent_consumer::dead_letter::sqs::SqsDeadLetterQueue;
use idempotent_consumer::dead_letter::{DeadLetter, DeadLetterQueue};
use idempotent_consumer::error::ErrorChain;
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Outcome, Report};
use idempotent_consumer::source::back_off::sqs::SqsVisibility;
use idempotent_consumer::source::back_off::{BackOff, BackOffSettings, Change, Visibility, VisibilityError, plan};
use idempotent_consumer::time::{Deadline, ManualClock, Retention};
use serde_json::{Value, json};

use crate::common::effects::{START, order, report};
use crate::common::sqs::{Answer, LETTERS, QUEUE, Sqs};

fn letter(message: &Message) -> DeadLetter {
    DeadLetter::new(message, &report(message, Outcome::Permanent { reason: "no such article".into() }), &[])
}

fn letters(sqs: &Sqs, url: &str) -> SqsDeadLetterQueue {
    SqsDeadLetterQueue::new(sqs.client(), url.parse().unwrap())
}

#[tokio::test]
async fn a_letter_is_one_message_with_group_fresh_deduplication_id_and_attributes() {
    let sqs = Sqs::start().await;
    let body = "{ \"orderId\":\t\"Ä-1\", \"amount\": 1990.0 }\n";
    let message =
        Message::new("m-1", body).with_group("g").with_deduplication_id("d-1").with_attribute("tenant", "acme");
    let letter = letter(&message);
    letters(&sqs, LETTERS).send(&letter).await.unwrap();
    let text = |value: &str| json!({ "DataType": "String", "StringValue": value });
    assert_eq!(
        sqs.requests(),
        [(
            "SendMessage".to_owned(),
            json!({
                "QueueUrl": LETTERS,
                "MessageBody": body,
                "MessageGroupId": "g",
                "MessageDeduplicationId": letter.deduplication_id,
                "MessageAttributes": {
                    "dead-letter-reason": text("permanent: no such article"),
                    "original-message-id": text("m-1"),
                    "original-deduplication-id": text("d-1"),
                    "tenant": text("acme"),
                },
            })
        )]
    );
}

#[tokio::test]
async fn without_a_group_a_letter_is_a_group_of_its_own_and_a_standard_queue_has_none() {
    let sqs = Sqs::start().await;
    letters(&sqs, LETTERS).send(&letter(&order("m-1", "A-1"))).await.unwrap();
    letters(&sqs, "https://sqs.example/123456789012/letters")
        .send(&letter(&order("m-2", "A-1").with_group("g")))
        .await
        .unwrap();
    let requests = sqs.requests();
    assert_eq!(requests[0].1["MessageGroupId"], "m-1");
    assert_eq!(
        (&requests[1].1["MessageGroupId"], &requests[1].1["MessageDeduplicationId"]),
        (&Value::Null, &Value::Null)
    );
}

#[tokio::test]
async fn a_send_is_tried_again_with_the_same_deduplication_id() {
    let sqs = Sqs::start().await;
    sqs.answer([Answer::Error(500, "InternalFailure"), Answer::Late(Duration::from_secs(4))]);
    letters(&sqs, LETTERS).send(&letter(&order("m-1", "A-1").with_group("g"))).await.unwrap();
    let requests = sqs.requests();
    assert_eq!(requests.len(), 3);
    assert!(requests.iter().all(|request| request == &requests[0]));
}

#[tokio::test]
async fn a_refusal_says_what_would_help() {
    let sqs = Sqs::start().await;
    for (kind, advice) in [
        ("AccessDeniedException", "role must allow it"),
        ("QueueDoesNotExist", "check the queue's URL"),
        ("InvalidMessageContents", "InvalidMessageContents"),
    ] {
        sqs.answer([Answer::Error(400, kind)]);
        let error = letters(&sqs, LETTERS).send(&letter(&order("m-1", "A-1"))).await.unwrap_err();
        let text = ErrorChain(&error).to_string();
        assert!(text.contains(advice), "{kind}: {text}");
    }
}

fn settings() -> BackOffSettings {
    let (base, visibility) = (Duration::from_secs(10), Duration::from_mins(3));
    BackOffSettings::for_queue(base, visibility, Retention::for_queue(180, 5, 86_400).unwrap(), 5)
}

fn failures(count: usize) -> (Vec<Message>, Vec<Report>) {
    let messages: Vec<_> = (0..count)
        .map(|number| {
            let mut message = order(&format!("m-{number}"), "A-1").with_receive_count(2);
            message.receipt = Some(format!("receipt-{number}"));
            message
        })
        .collect();
    let failed = Outcome::NotApplied { reason: "busy".into(), retry_after: None };
    let reports = messages.iter().map(|message| report(message, failed.clone())).collect();
    (messages, reports)
}

fn changes(count: usize) -> Vec<Change> {
    let (messages, reports) = failures(count);
    plan(&messages, &reports, &settings(), START, || 0.5)
}

fn visibility(sqs: &Sqs) -> SqsVisibility {
    SqsVisibility::new(sqs.client(), QUEUE.parse().unwrap())
}

#[tokio::test]
async fn visibilities_go_in_one_request_and_each_entry_is_checked() {
    let sqs = Sqs::start().await;
    let failed = |id: &str, code: &str, message: Value| json!({ "Id": id, "SenderFault": true, "Code": code, "Message": message });
    sqs.answer([Answer::Body(json!({
        "Successful": [{ "Id": "0" }],
        "Failed": [failed("1", "ReceiptHandleIsInvalid", json!("expired")), failed("2", "InternalError", Value::Null)],
    }))]);
    // The answer has nothing to say of the fourth.
    let refusals = visibility(&sqs).change(&changes(4)).await.unwrap();
    let refusals: Vec<_> =
        refusals.iter().map(|refusal| (refusal.message_id.as_str(), refusal.reason.as_str())).collect();
    assert_eq!(
        refusals,
        [
            ("m-1", "ReceiptHandleIsInvalid: expired"),
            ("m-2", "InternalError: (no message)"),
            ("m-3", "SQS did not say what became of it")
        ]
    );
    let (operation, body) = &sqs.requests()[0];
    assert_eq!((operation.as_str(), &body["QueueUrl"]), ("ChangeMessageVisibilityBatch", &json!(QUEUE)));
    assert_eq!(body["Entries"][3], json!({ "Id": "3", "ReceiptHandle": "receipt-3", "VisibilityTimeout": 15 }));
    assert_eq!(body["Entries"].as_array().unwrap().len(), 4);
}

#[tokio::test]
async fn a_denial_is_told_from_a_failure() {
    let sqs = Sqs::start().await;
    for kind in ["AccessDenied", "AccessDeniedException"] {
        sqs.answer([Answer::Error(403, kind)]);
        let error = visibility(&sqs).change(&changes(1)).await.unwrap_err();
        assert!(matches!(error, VisibilityError::Denied(_)), "{error:?}");
    }
    sqs.answer([Answer::Error(400, "QueueDoesNotExist")]);
    let error = visibility(&sqs).change(&changes(1)).await.unwrap_err();
    assert!(matches!(error, VisibilityError::Failed(_)), "{error:?}");
}

#[tokio::test]
async fn an_endpoint_that_does_not_answer_is_given_up_before_the_deadline() {
    let sqs = Sqs::start().await;
    sqs.answer(vec![Answer::Late(Duration::from_secs(20)); 8]);
    let back_off = BackOff::new(settings(), Arc::new(visibility(&sqs)));
    let (messages, reports) = failures(2);
    let clock = ManualClock::new(START);
    let time = Duration::from_secs(1);
    let work = back_off.apply(&messages, &reports, START, Deadline::after(time, &clock));
    tokio::time::timeout(time, work).await.unwrap();
}
