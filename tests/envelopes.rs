//! Envelopes and noise: what is opened, what is rejected, and what is left as it is.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod common;

use std::sync::Arc;

use idempotent_consumer::batch::{Batch, BatchSettings};
use idempotent_consumer::consumer::Consume as _;
use idempotent_consumer::dead_letter::DeadLetter;
use idempotent_consumer::effect::Recovery;
use idempotent_consumer::json::Json;
use idempotent_consumer::key::KeyExpression;
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Disposition, Outcome};
use idempotent_consumer::source::SourceSettings;
use idempotent_consumer::source::envelope::BodyFormat;
use idempotent_consumer::source::noise::{IgnoreList, Noise};
use idempotent_consumer::store::memory::MemoryStore;
use idempotent_consumer::time::Deadline;
use serde_json::{Value, json};

use crate::common::effects::{PATIENCE, Scripted, clock, consumer, report};

const FORMATS: [BodyFormat; 4] = [BodyFormat::Raw, BodyFormat::Sns, BodyFormat::EventBridge, BodyFormat::Auto];

/// Spaces, a number above 2^53 and a trailing zero: nothing of it may change.
const ORDER: &str = r#"{"orderId" :9007199254740993, "amount": 19.90}"#;

fn notification(change: impl FnOnce(&mut Value)) -> String {
    let mut notification = json!({
        "Type": "Notification",
        "MessageId": "0c2ca3a5-3f5e-5c9b-9a55-c2f3a8f5d6d1",
        "TopicArn": "arn:aws:sns:us-east-1:123456789012:orders.fifo",
        "Subject": "an order",
        "Message": ORDER,
        "Timestamp": "2026-01-05T08:30:00.123Z",
        "SignatureVersion": "1",
        "Signature": "c2ln",
        "SigningCertURL": "https://sns.us-east-1.amazonaws.com/cert.pem",
        "UnsubscribeURL": "https://sns.us-east-1.amazonaws.com/?Action=Unsubscribe",
        "MessageAttributes": {
            "tenant": { "Type": "String", "Value": "acme" },
            "priority": { "Type": "Number", "Value": "3" },
            "tags": { "Type": "String.Array", "Value": "[\"a\"]" },
            "blob": { "Type": "Binary", "Value": "AAEC" },
        },
    });
    change(&mut notification);
    notification.to_string()
}

fn event(change: impl FnOnce(&mut Value)) -> String {
    let mut event = json!({
        "version": "0",
        "id": "6a7e8feb-b491-4cf7-a9f1-bf3703467718",
        "detail-type": "OrderPlaced",
        "source": "shop.orders",
        "account": "123456789012",
        "time": "2026-01-05T08:30:00Z",
        "region": "us-east-1",
        "resources": [],
        "detail": { "detail": 0 },
    });
    change(&mut event);
    event.to_string().replace(r#"{"detail":0}"#, ORDER)
}

fn opened(format: BodyFormat, body: &str) -> Message {
    format.open(Message::new("m-1", body))
}

fn attributes(message: &Message) -> Vec<(&str, &str)> {
    message.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

fn key(expression: &str, message: &Message) -> String {
    let expression: KeyExpression = expression.parse().unwrap();
    expression.extract(message, Json::parse(&message.body).as_ref()).unwrap().as_str().to_owned()
}

#[test]
fn a_notification_is_opened() {
    let body = notification(|_| {});
    for format in [BodyFormat::Sns, BodyFormat::Auto] {
        let message = opened(format, &body);
        assert_eq!((message.body.as_str(), message.delivered_body()), (ORDER, body.as_str()));
        let expected = [
            ("priority", "3"),
            ("sns.message-id", "0c2ca3a5-3f5e-5c9b-9a55-c2f3a8f5d6d1"),
            ("sns.subject", "an order"),
            ("sns.topic-arn", "arn:aws:sns:us-east-1:123456789012:orders.fifo"),
            ("tags", "[\"a\"]"),
            ("tenant", "acme"),
        ];
        assert_eq!(attributes(&message), expected);
        assert_eq!(key("attribute:tenant,attribute:sns.subject,/orderId", &message), "acme,an order,=9007199254740993");
    }
}

#[test]
fn an_event_is_opened() {
    let body = event(|_| {});
    for format in [BodyFormat::EventBridge, BodyFormat::Auto] {
        let message = opened(format, &body);
        assert_eq!((message.body.as_str(), message.delivered_body()), (ORDER, body.as_str()));
        let expected = [
            ("eventbridge.detail-type", "OrderPlaced"),
            ("eventbridge.id", "6a7e8feb-b491-4cf7-a9f1-bf3703467718"),
            ("eventbridge.source", "shop.orders"),
        ];
        assert_eq!(attributes(&message), expected);
        assert_eq!(key("attribute:eventbridge.detail-type,/orderId", &message), "OrderPlaced,=9007199254740993");
    }
}

#[test]
fn a_message_without_envelope_is_left_as_it_is_or_rejected() {
    let cases = [
        ORDER,
        "",
        "hello",
        "null",
        "[]",
        r#"["Notification","n-1","arn:aws:sns:us-east-1:123456789012:orders",null,"{}"]"#,
        r#"{"Type":"Notification"}"#,
        r#"{"Type":"Notification","Type":"Notification"}"#,
    ];
    for body in cases {
        for format in [BodyFormat::Raw, BodyFormat::Auto] {
            assert_eq!(opened(format, body), Message::new("m-1", body), "{format}: {body}");
        }
        for (format, start) in [
            (BodyFormat::Sns, "the body is no SNS notification: "),
            (BodyFormat::EventBridge, "the body is no EventBridge event: "),
        ] {
            let (message, reason) = rejection(format, body);
            assert_eq!((message.body.as_str(), message.delivered_body()), (body, body));
            assert!(reason.starts_with(start) && reason.ends_with("set BODY to `raw` or `auto`"), "{body}: {reason}");
        }
    }
    // Each is the other's stranger.
    assert!(rejection(BodyFormat::Sns, &event(|_| {})).1.contains("it has no `Type`"));
    assert!(rejection(BodyFormat::EventBridge, &notification(|_| {})).1.contains("it has no `version`"));
    // Raw opens nothing.
    for body in [notification(|_| {}), event(|_| {})] {
        assert_eq!(opened(BodyFormat::Raw, &body), Message::new("m-1", &body));
    }
}

/// The message, and why the source rejected it.
fn rejection(format: BodyFormat, body: &str) -> (Message, String) {
    let message = opened(format, body);
    let outcome = run(std::slice::from_ref(&message)).remove(0);
    assert!(matches!(&outcome, Outcome::Rejected { .. }), "{format}: {body}: {outcome:?}");
    (message, outcome.reason().unwrap())
}

/// Outcomes of a batch.
fn run(messages: &[Message]) -> Vec<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch = Batch::new(consumer(Scripted::new(Recovery::Park), &store, &clock), BatchSettings::default());
    let deadline = Deadline::after(PATIENCE, batch.consumer().clock());
    let reports = runtime.block_on(batch.process(messages, deadline)).unwrap();
    reports.into_iter().map(|report| report.outcome).collect()
}

#[test]
fn the_whole_shape_decides() {
    type Change = fn(&mut Value);
    let sns: [(Change, &str); 8] = [
        (|body| body["Type"] = json!("notification"), "its `Type` is not `Notification`"),
        (|body| body["Type"] = Value::Null, "its `Type` is no string"),
        (|body| body["MessageId"] = json!(1), "its `MessageId` is no string"),
        (|body| body["TopicArn"] = json!("orders"), "its `TopicArn` is not the ARN of an SNS topic"),
        (|body| body["TopicArn"] = json!("arn:aws:sqs:us-east-1:1:orders"), "is not the ARN of an SNS topic"),
        (|body| body["TopicArn"] = json!("arn:aws:sns:us-east-1:orders"), "is not the ARN of an SNS topic"),
        (|body| body["Message"] = json!({ "orderId": "secret" }), "its `Message` is no string"),
        (|body| drop(body.as_object_mut().unwrap().remove("Message")), "it has no `Message`"),
    ];
    let eventbridge: [(Change, &str); 5] = [
        (|body| body["version"] = json!(0), "its `version` is no string"),
        (|body| drop(body.as_object_mut().unwrap().remove("detail-type")), "it has no `detail-type`"),
        (|body| body["resources"] = Value::Null, "its `resources` is no array"),
        (|body| body["detail"] = json!("{}"), "its `detail` is no object"),
        (|body| drop(body.as_object_mut().unwrap().remove("detail")), "its `detail` is no object"),
    ];
    let sns = sns.map(|(change, why)| (BodyFormat::Sns, notification(change), why));
    let eventbridge = eventbridge.map(|(change, why)| (BodyFormat::EventBridge, event(change), why));
    for (format, body, why) in sns.into_iter().chain(eventbridge) {
        let (_, reason) = rejection(format, &body);
        assert!(reason.contains(why) && !reason.contains("secret"), "{body}: {reason}");
        assert_eq!(opened(BodyFormat::Auto, &body), Message::new("m-1", &body), "{body}");
    }
}

#[test]
fn what_an_envelope_may_lack() {
    let bare = |name: &str| {
        let body = notification(|body| {
            body.as_object_mut()
                .unwrap()
                .retain(|name, _| ["Type", "MessageId", "TopicArn", "Message"].contains(&name.as_str()));
            body["Message"] = json!("hello");
            if !name.is_empty() {
                body[name] = Value::Null;
            }
        });
        opened(BodyFormat::Sns, &body)
    };
    for null in ["", "Subject", "MessageAttributes"] {
        let message = bare(null);
        assert_eq!(message.body, "hello", "it need not be JSON");
        let names: Vec<_> = message.attributes.keys().map(String::as_str).collect();
        assert_eq!(names, ["sns.message-id", "sns.topic-arn"]);
    }
    let partition = notification(|body| body["TopicArn"] = json!("arn:aws-us-gov:sns:us-gov-east-1:1:orders"));
    assert_eq!(opened(BodyFormat::Auto, &partition).body, ORDER);
}

#[test]
fn what_sns_sends_about_a_subscription_is_rejected() {
    for kind in ["SubscriptionConfirmation", "UnsubscribeConfirmation"] {
        let body = notification(|body| body["Type"] = json!(kind));
        for format in [BodyFormat::Sns, BodyFormat::Auto] {
            let (_, reason) = rejection(format, &body);
            assert!(reason.contains(&format!("SNS's own `{kind}`")), "{format}: {reason}");
        }
    }
}

#[test]
fn one_layer_is_opened() {
    let inner = event(|_| {});
    let body = notification(|body| body["Message"] = json!(inner));
    for format in [BodyFormat::Sns, BodyFormat::Auto] {
        assert_eq!(opened(format, &body).body, inner);
    }
}

#[test]
fn nobody_forges_what_stands_on_an_envelope() {
    let forged = |body: &str| {
        Message::new("m-1", body)
            .with_attribute("sns.subject", "forged")
            .with_attribute("eventbridge.source", "forged")
            .with_attribute("tenant", "of the queue's message")
            .with_attribute("sns.other", "free")
    };
    let body = notification(|body| {
        body["Subject"] = Value::Null;
        body["MessageAttributes"]["sns.subject"] = json!({ "Type": "String", "Value": "forged" });
        body["MessageAttributes"]["sns.topic-arn"] = json!({ "Type": "String", "Value": "forged" });
    });
    let message = BodyFormat::Sns.open(forged(&body));
    assert!(!attributes(&message).iter().any(|(_, value)| *value == "forged"), "{message:?}");
    // Otherwise the sender's own go before those of the queue's message.
    assert_eq!(message.attributes["tenant"], "acme");
    assert_eq!(message.attributes["sns.other"], "free");

    // Neither does a message without an envelope, unless nothing is said of envelopes.
    for format in FORMATS {
        let names: Vec<_> = format.open(forged(ORDER)).attributes.into_keys().collect();
        let forged = ["eventbridge.source", "sns.other", "sns.subject", "tenant"];
        assert_eq!(names, if format == BodyFormat::Raw { &forged[..] } else { &["sns.other", "tenant"] }, "{format}");
    }
}

#[test]
fn a_message_is_the_same_with_an_envelope_and_without() {
    let order = r#"{"orderId":"A-1","amount":5}"#;
    let messages = [
        Message::new("raw", order),
        opened(BodyFormat::Auto, &notification(|body| body["Message"] = json!(order))),
        opened(BodyFormat::Auto, &event(|body| body["detail"] = json!({ "amount": 5, "orderId": "A-1" }))),
        opened(BodyFormat::Auto, &notification(|body| body["Message"] = json!(r#"{"orderId":"A-1","amount":6}"#))),
    ];
    let names: Vec<_> = run(&messages).iter().map(Outcome::name).collect();
    assert_eq!(names, ["executed", "replayed", "replayed", "conflict"]);
}

#[test]
fn formats_read_back() {
    for format in FORMATS {
        assert_eq!(format.to_string().parse(), Ok(format));
    }
    for text in ["", "SNS", "sqs", "event-bridge"] {
        assert!(text.parse::<BodyFormat>().is_err(), "{text}");
    }
}

const TEST_EVENT: &str = r#"{"Service":"Amazon S3","Event":"s3:TestEvent","Time":"2014-10-13T15:57:02.089Z","Bucket":"b","RequestId":"5582815E1AEA5ADF","HostId":"8cLeGAmw098X5cv4Zkwcmo8vvZa3eH3eKxsPzbB9wrR"}"#;

fn source(ignore: &str, body: BodyFormat) -> SourceSettings {
    let mut settings = SourceSettings::default();
    settings.ignore = ignore.parse().unwrap();
    settings.body = body;
    settings
}

#[test]
fn noise_is_acked_when_that_is_asked_for_and_else_rejected() {
    let through_sns = notification(|body| body["Message"] = json!(TEST_EVENT));
    for (format, body) in [
        (BodyFormat::Raw, TEST_EVENT),
        (BodyFormat::Sns, TEST_EVENT),
        (BodyFormat::Sns, &through_sns),
        (BodyFormat::Auto, &through_sns),
    ] {
        let message = Message::new("m-1", body).with_group("g");
        let behind = Message::new("m-2", r#"{"orderId":"A-1"}"#).with_group("g");
        let ignoring = run(&[source("s3:TestEvent", format).read(message.clone()), behind.clone()]);
        assert_eq!((ignoring[0].name(), ignoring[0].disposition()), ("ignored", Disposition::Ack));
        assert_eq!(ignoring[0].reason().as_deref(), Some("it is known noise, `s3:TestEvent`"));
        assert_eq!(ignoring[1].name(), "executed", "its group goes on");
        let strict = run(&[source("", format).read(message), behind]);
        assert_eq!(strict.iter().map(Outcome::name).collect::<Vec<_>>(), ["rejected", "unstarted"]);
    }
}

#[test]
fn what_resembles_noise_is_none() {
    let settings = source("s3:TestEvent", BodyFormat::Raw);
    let mut bodies = vec![
        r#""s3:TestEvent""#.to_owned(),
        TEST_EVENT.replace("\"b\"", "null"),
        TEST_EVENT.replace("Amazon S3", "Amazon SQS"),
        TEST_EVENT.replace("s3:TestEvent", "s3:testEvent"),
        TEST_EVENT.replace("HostId", "Host"),
        TEST_EVENT.replace("\"Time\"", "\"Bucket\":\"c\",\"Time\""),
        TEST_EVENT.replace("\"Time\"", "\"orderId\":\"A-1\",\"Time\""),
        format!("[{TEST_EVENT}]"),
    ];
    for member in ["Service", "Event", "Time", "Bucket", "RequestId", "HostId"] {
        let mut body: Value = serde_json::from_str(TEST_EVENT).unwrap();
        body.as_object_mut().unwrap().remove(member);
        bodies.push(body.to_string());
    }
    for body in bodies {
        assert_eq!(settings.read(Message::new("m-1", &body)), Message::new("m-1", &body), "{body}");
    }
    let spaced = TEST_EVENT.replace(',', " ,\n");
    assert_ne!(settings.read(Message::new("m-1", &spaced)), Message::new("m-1", &spaced));
}

#[test]
fn ignore_lists_read_back() {
    let list: IgnoreList = " s3:TestEvent , ".parse().unwrap();
    assert_eq!(list, [Noise::S3TestEvent].into_iter().collect());
    assert_eq!(list.to_string(), "s3:TestEvent");
    assert_eq!("".parse(), Ok(IgnoreList::default()));
    let error = "s3:TestEvent,s3:ObjectCreated".parse::<IgnoreList>().unwrap_err();
    assert_eq!(error.to_string(), "`s3:ObjectCreated` is no known noise: there is `s3:TestEvent`");
}

#[test]
fn a_dead_letter_goes_out_as_it_came() {
    let body = notification(|_| {});
    let delivered = Message::new("m-1", &body)
        .with_group("g")
        .with_attribute("of-the-queue", "yes")
        .with_attribute("tenant", "of the queue's message");
    let message = BodyFormat::Sns.open(delivered);
    let outcome = Outcome::Rejected { reason: "a reason".into() };
    let report = report(&message, outcome);
    let letter = DeadLetter::new(&message, &report, &["tenant"]);
    assert_eq!(letter.body, body, "in its envelope");
    assert_eq!(letter.attribute("tenant"), Some("of the queue's message"));
    assert_eq!(letter.attribute("of-the-queue"), Some("yes"));
    assert_eq!(letter.attribute("sns.subject"), None, "that stands on the envelope");

    // Put back, it is the message that it was.
    let mut back = Message::new("m-2", letter.body).with_group("g");
    back.attributes.extend(letter.attributes);
    let back = BodyFormat::Sns.open(back);
    assert_eq!((back.body.as_str(), back.original_id()), (ORDER, "m-1"));
    assert_eq!(back.attributes["sns.subject"], "an order");

    // Whoever publishes to the topic can't pass for a letter.
    let forged = notification(|body| {
        for name in ["dead-letter-reason", "original-message-id"] {
            body["MessageAttributes"][name] = json!({ "Type": "String", "Value": "forged" });
        }
    });
    assert_eq!(opened(BodyFormat::Sns, &forged).original_id(), "m-1");
}
