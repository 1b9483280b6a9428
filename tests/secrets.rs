//! What must not be in the log is not in it, at any level and in either format: credentials,
//! bodies, attributes, results, the target's answers, the secret parts of URLs. Each is marked
//! with a canary, and the real binary is led through all that can go wrong.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use serde_json::{Value, json};

use crate::common::dynamo::{Dynamo, TABLE};
use crate::common::dynamo_proxy::{DynamoProxy, Passage};
use crate::common::events::{Record, event};
use crate::common::item::Item;
use crate::common::process::{AMPLE, FUNCTION_NAME, Function, SECRET_KEY, Setup};
use crate::common::runtime_api::InvocationResult;
use crate::common::sink::{Behaviour, Sink};
use crate::common::sqs::{Answer as SqsAnswer, QUEUE, Sqs};

const CANARIES: [&str; 11] = [
    SECRET_KEY,
    "session-token-canary",
    "body-canary",
    "attribute-canary",
    "answer-canary",
    "path-canary",
    "query-canary",
    "user-canary",
    "letters-canary",
    "table-canary",
    // Whoever has a message's receipt can delete it.
    "receipt-",
];

const LETTERS: &str = "https://sqs.eu-central-1.amazonaws.com/123456789012/letters-canary.fifo";

/// Both formats, with everything that the function has to say.
const FORMATS: [&str; 2] = ["JSON", "Text"];

struct World {
    dynamo: Dynamo,
    proxy: DynamoProxy,
    sink: Sink,
    sqs: Sqs,
}

impl World {
    async fn new() -> Self {
        let (dynamo, sink, sqs) = (Dynamo::start().await, Sink::start().await, Sqs::start().await);
        let proxy = DynamoProxy::start(&dynamo.url);
        Self { dynamo, proxy, sink, sqs }
    }

    fn setup(&self, format: &str) -> Setup {
        Setup::new(&self.proxy.url, &format!("{}/path-canary?token=query-canary", self.sink.url))
            .set("AWS_LAMBDA_LOG_LEVEL", "TRACE")
            .set("AWS_LAMBDA_LOG_FORMAT", format)
            .set("AWS_ENDPOINT_URL_SQS", &self.sqs.url)
            .set("DEAD_LETTER_QUEUE_URL", LETTERS)
            .set("QUEUE_URL", QUEUE)
            .set("RETRY_BACK_OFF", "on")
    }
}

/// An order in a group of its own, with canaries wherever it can hold them.
fn order(id: &str) -> Record {
    poison(&format!("message-{id}"), &json!({ "orderId": id, "note": "body-canary" }).to_string())
}

fn poison(id: &str, body: &str) -> Record {
    Record::new(id, body).in_group(id).with_attribute("trace", "attribute-canary")
}

fn assert_no_canary(text: &str) {
    for canary in CANARIES {
        let line = text.lines().find(|line| line.contains(canary));
        assert_eq!(line, None, "{canary}");
    }
}

/// Nothing in the log, and nothing in what Lambda is told.
async fn deliver(function: &Function, event: Value) -> InvocationResult {
    let answer = function.invoke(event, AMPLE).await.result;
    let told = match &answer {
        InvocationResult::Response(response) => response.to_string(),
        InvocationResult::Error { error_type, message } => format!("{error_type}: {message}"),
    };
    assert_no_canary(&told);
    answer
}

fn assert_silent(function: &Function, said: &[&str]) {
    let output = function.output();
    for outcome in said {
        assert!(output.contains(outcome), "nothing was said of `{outcome}`: the test does not do what it says");
    }
    assert_no_canary(&output);
}

#[tokio::test]
async fn whatever_the_target_says_and_the_queues_refuse() {
    for format in FORMATS {
        let world = World::new().await;
        world.sink.behave(Behaviour::Answer(200, r#"{"receipt":"answer-canary"}"#.to_owned()));
        // Answers that repeat what was sent.
        for (key, status) in [("refused", 422), ("busy", 503), ("later", 429), ("moved", 307), ("odd", 302)] {
            world.sink.behave_for(key, Behaviour::Answer(status, r#"{"got":"body-canary answer-canary"}"#.to_owned()));
        }
        world.sink.behave_for("gone", Behaviour::Close);
        world.sink.verify_with(500, "answer-canary");
        let records: Vec<Record> = ["good", "refused", "busy", "later", "moved", "odd", "gone"].map(order).into();
        for recovery in ["rerun", "verify", "park"] {
            let setup = world.setup(format).set("EFFECT_RECOVERY", recovery).set("IDEMPOTENCY_SCOPE", recovery);
            let function = setup.start().await;
            // Replays, takeovers, what is parked; and queues that refuse.
            for answers in [
                vec![],
                vec![SqsAnswer::Error(403, "AccessDenied"), SqsAnswer::Error(500, "InternalError")],
                vec![SqsAnswer::Body(json!({ "Successful": [], "Failed": [] })); 3],
            ] {
                world.sqs.answer(answers);
                deliver(&function, event(&records)).await;
            }
            assert_silent(&function, &["executed", "replayed", "permanent", "unknown", "not-applied", "SQS"]);
        }
        // Neither the target nor the queues are there.
        let away = DynamoProxy::away(&world.dynamo.url);
        let function = world
            .setup(format)
            .set("EFFECT_URL", &format!("{}/path-canary?token=query-canary", away.url))
            .set("AWS_ENDPOINT_URL_SQS", &away.url)
            .set("IDEMPOTENCY_SCOPE", "away")
            .start()
            .await;
        deliver(&function, event(&[order("good"), poison("text", "body-canary")])).await;
        assert_silent(&function, &["not-applied", "nothing was sent", "rejected", "SQS"]);
        assert!(world.sink.posts().iter().all(|post| post.body.contains("body-canary")), "canaries came by");
        let sent = world.sqs.requests();
        assert!(sent.iter().any(|(_, body)| body["MessageBody"].to_string().contains("body-canary")), "in letters too");
    }
}

#[tokio::test]
async fn whatever_a_sender_sends() {
    for format in FORMATS {
        let world = World::new().await;
        let function = world.setup(format).start().await;
        let records = [
            order("good"),
            Record::new("conflict", r#"{"orderId":"good","note":"another body-canary"}"#).in_group("message-good"),
            poison("empty", ""),
            poison("text", "body-canary"),
            poison("cut", r#"{"orderId":"x","note":"body-canary"#),
            poison("control", "{\"orderId\":\"x\",\"note\":\"body-canary\n\"}"),
            poison("half-a-pair", r#"{"orderId":"x","note":"body-canary\ud800"}"#),
            poison("no-key", r#"{"note":"body-canary"}"#),
            poison("null-key", r#"{"orderId":null,"note":"body-canary"}"#),
            poison("list-key", r#"{"orderId":["body-canary"]}"#),
            poison("object-key", r#"{"orderId":{"note":"body-canary"}}"#),
            poison("fraction-key", r#"{"orderId":1.5,"note":"body-canary"}"#),
            poison("twice", r#"{"orderId":"body-canary","orderId":"body-canary"}"#),
            poison("member-twice", r#"{"orderId":"y","note":"body-canary","note":"body-canary"}"#),
            poison("number", r#"{"orderId":"y","note":"body-canary","n":1e99999999999999999999}"#),
            poison("deep", &format!("{}\"body-canary\"{}", "[".repeat(200), "]".repeat(200))),
            poison("sns", r#"{"Type":"Notification","MessageId":"m","TopicArn":"a","Message":"body-canary"}"#),
        ];
        for _ in 0..2 {
            deliver(&function, event(&records)).await;
        }
        for broken in [
            json!("body-canary"),
            json!({ "note": "body-canary" }),
            json!({ "Records": "body-canary" }),
            json!({ "Records": [{ "eventSource": "aws:sqs", "body": "body-canary" }] }),
            json!({ "Records": [{ "eventSource": "aws:sqs", "messageId": 1, "body": { "body-canary": 1 } }] }),
            json!({ "Records": [{ "eventSource": "aws:sqs", "messageId": "m", "attributes": ["body-canary"] }] }),
        ] {
            assert!(matches!(deliver(&function, broken).await, InvocationResult::Error { .. }));
        }
        assert_silent(&function, &["executed", "conflict", "rejected", "not an SQS event"]);

        // With envelopes opened, and with a key that is computed.
        for (variable, value) in [
            ("BODY", "auto"),
            ("BODY", "sns"),
            ("BODY", "eventbridge"),
            ("IDEMPOTENCY_KEY", "jmespath:powertools_json(note).x"),
        ] {
            let function = world.setup(format).set(variable, value).set("IDEMPOTENCY_SCOPE", "other").start().await;
            deliver(&function, event(&records)).await;
            assert_silent(&function, &["rejected"]);
        }
    }
}

#[tokio::test]
async fn whatever_becomes_of_the_store() {
    for format in FORMATS {
        let world = World::new().await;
        world.sink.behave(Behaviour::Answer(200, r#"{"receipt":"answer-canary"}"#.to_owned()));
        // A result is stored again and again until the time is over, so that is short.
        let (setup, time) = (world.setup(format).set("EFFECT_TIMEOUT_SECONDS", "1"), Duration::from_secs(4));
        let function = setup.start().await;
        let records = |round: &str| ["a", "b", "c"].map(|key| order(&format!("{round}-{key}")));
        for (round, passage) in [
            ("refuse", Passage::Refuse),
            ("lose-request", Passage::LoseRequest),
            ("lose-answer", Passage::LoseAnswer),
            ("truncate", Passage::TruncateAnswer),
        ] {
            for operation in ["PutItem", "UpdateItem"] {
                world.proxy.on(operation, passage);
                function.invoke(event(&records(&format!("{round}-{operation}"))), time).await;
                world.proxy.release();
            }
        }
        world.proxy.cut();
        deliver(&function, event(&records("cut"))).await;
        world.proxy.mend();
        assert_silent(&function, &["store-failed", "not-recorded", "StoreAway"]);

        let unprotected = world.setup(format).set("STORE_OUTAGE", "process").start().await;
        world.proxy.cut();
        deliver(&unprotected, event(&records("process"))).await;
        assert_silent(&unprotected, &["unprotected"]);
        // It starts although its table is away, and says so.
        let late = world.setup(format).start().await;
        assert_silent(&late, &["the table does not answer yet"]);
        world.proxy.mend();
    }
}

/// Items that whoever can write to the table may have put there.
#[tokio::test]
async fn whatever_lies_in_the_table() {
    for format in FORMATS {
        let world = World::new().await;
        let put = async |key: &str, attributes: &[(&str, AttributeValue)]| {
            let mut item: HashMap<String, AttributeValue> =
                attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            item.insert("id".to_owned(), AttributeValue::S(format!("{FUNCTION_NAME}#{key}")));
            item.entry("expiration".to_owned()).or_insert(AttributeValue::N("9999999999".to_owned()));
            world.dynamo.client.put_item().table_name(TABLE).set_item(Some(item)).send().await.unwrap();
        };
        let text = |text: &str| AttributeValue::S(text.to_owned());
        let canary = || text("table-canary");
        let bytes = || AttributeValue::B(Blob::new(*b"table-canary"));
        put("result", &[("status", text("COMPLETED")), ("data", text(r#""table-canary""#))]).await;
        put("no-json", &[("status", text("COMPLETED")), ("data", canary())]).await;
        put("no-zstd", &[("status", text("COMPLETED")), ("data", bytes())]).await;
        put("no-data", &[("status", text("COMPLETED")), ("owner", canary())]).await;
        put("no-status", &[("owner", canary())]).await;
        put("odd-status", &[("status", bytes()), ("data", canary())]).await;
        put("odd-lease", &[("status", text("INPROGRESS")), ("in_progress_expiration", canary())]).await;
        put("odd-attempt", &[("status", text("INPROGRESS")), ("attempt", canary()), ("owner", canary())]).await;
        put("held", &[("status", text("INPROGRESS")), ("owner", canary()), ("data", canary())]).await;
        put("odd-expiration", &[("status", text("COMPLETED")), ("expiration", canary()), ("data", canary())]).await;
        put("other-payload", &[("status", text("COMPLETED")), ("validation", text("sha256:table-canary"))]).await;
        let keys = [
            "result",
            "no-json",
            "no-zstd",
            "no-data",
            "no-status",
            "odd-status",
            "odd-lease",
            "odd-attempt",
            "held",
            "odd-expiration",
            "other-payload",
        ];
        let function = world.setup(format).start().await;
        for _ in 0..2 {
            deliver(&function, event(&keys.map(order))).await;
        }
        assert_silent(&function, &["replayed", "in-flight", "conflict", "store-failed"]);
        assert!(Item::of(&world.dynamo, "result").await.unwrap().has("data"));
    }
}

#[tokio::test]
async fn whatever_is_wrong_with_the_settings() {
    let world = World::new().await;
    let wrong = [
        ("EFFECT_URL", "http://example.com/path-canary?token=query-canary"),
        ("EFFECT_URL", "https://user-canary:query-canary@example.com/path-canary"),
        ("EFFECT_URL", "query-canary"),
        ("DEAD_LETTER_QUEUE_URL", "https://user-canary@sqs.example.com/1/letters.fifo"),
        ("DEAD_LETTER_QUEUE_URL", "https://sqs.example.com/1/letters.fifo?token=query-canary"),
        ("TABLE_NAME", "not-there"),
        ("IDEMPOTENCY_KEY", "no key"),
        ("EFFECT_QUOTE_ANSWERS", "maybe"),
    ];
    for format in FORMATS {
        for (variable, value) in wrong {
            let mut function = world.setup(format).set(variable, value).spawn().await;
            assert!(!function.exit().await.success(), "{variable}={value}");
            let failures = function.api.init_failures().await;
            assert!(failures[0].message.contains(variable), "{failures:?}");
            assert_no_canary(&failures[0].message);
            assert_silent(&function, &[variable]);
            let lines = function.lines();
            assert_eq!(lines.len(), 1, "{format}: one event is one line: {lines:?}");
        }
    }
}
