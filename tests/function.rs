//! The function's binary, driven over Lambda's Runtime API: what an emulator of queues
//! can't produce, as it delivers one batch at a time and kills nobody.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::dynamo::Dynamo;
use crate::common::dynamo_proxy::{DynamoProxy, Passage};
use crate::common::events::{QUEUE_ARN, Record, event};
use crate::common::item::Item;
use crate::common::process::{AMPLE, FUNCTION_NAME, Function, SECRET_KEY, Setup};
use crate::common::sink::{Behaviour, Sink};
use crate::common::sqs::{Answer as SqsAnswer, LETTERS, QUEUE, Sqs};
use crate::common::wait::until;

/// A table, a target, and the settings of a function between them.
struct World {
    dynamo: Dynamo,
    sink: Sink,
    setup: Setup,
}

impl World {
    async fn new() -> Self {
        let (dynamo, sink) = (Dynamo::start().await, Sink::start().await);
        let setup = Setup::new(&dynamo.url, &sink.url);
        Self { dynamo, sink, setup }
    }

    async fn item(&self, key: &str) -> Item {
        Item::of(&self.dynamo, key).await.unwrap_or_else(|| panic!("no record of {key}"))
    }

    async fn has_no_item(&self, key: &str) -> bool {
        Item::of(&self.dynamo, key).await.is_none()
    }
}

const NOTHING: [&str; 0] = [];

// ---- batches ---------------------------------------------------------------------------

#[tokio::test]
async fn a_batch_takes_effect_once_and_is_replayed_ever_after() {
    let world = World::new().await;
    let function = world.setup.start().await;
    let (first, second) = (Record::order("a"), Record::order("b").in_group("h"));

    let answer = function.invoke(event([&first, &second]), AMPLE).await;
    assert_eq!(answer.failures(), NOTHING);
    let posts = world.sink.posts();
    assert_eq!(BTreeSet::from_iter(world.sink.keys()), BTreeSet::from(["a".to_owned(), "b".to_owned()]));
    let post = posts.iter().find(|post| post.key == "a").unwrap();
    assert_eq!((post.attempt, post.message_id.as_str()), (1, "message-a"));
    assert_eq!(post.body, r#"{"orderId":"a", "amount":1990.0}"#, "byte for byte");

    let item = world.item("a").await;
    assert_eq!((item.status(), item.attempt(), item.text("message_id")), ("COMPLETED", 1, "message-a"));
    assert_eq!(item.data(), json!({ "status": 200, "body": world.sink.answer_of("a") }));
    assert!(!item.has("owner") && !item.has("in_progress_expiration"), "{item:?}");

    // The queue delivers them again, and a producer sends one of them anew.
    let anew = Record::order("b").with_id("message-b-anew").in_group("h");
    let again = function.invoke(event([&first.received(2), &second.received(2), &anew]), AMPLE).await;
    assert_eq!(again.failures(), NOTHING);
    assert_eq!(world.sink.posts(), posts, "nothing was sent");
    assert_eq!(world.item("a").await, item, "the record stands as it was");
    assert_eq!(function.outcomes("message-a"), ["executed", "replayed"]);
    assert_eq!(function.outcomes("message-b-anew"), ["replayed"]);
}

#[tokio::test]
async fn every_sample_event_is_answered_as_documented() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("events");
    let read = |path: PathBuf| -> Value { serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap() };
    let expected: BTreeMap<String, Value> = serde_json::from_value(read(folder.join("expected.json"))).unwrap();
    let there: BTreeSet<String> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .filter(|name| name != "expected.json")
        .collect();
    assert_eq!(there, expected.keys().cloned().collect(), "the files in events/, and those in expected.json");

    for (file, expected) in expected {
        // Each is told for an empty table.
        let world = World::new().await;
        let function = world.setup.start().await;
        let answer = function.invoke(read(folder.join(&file)), AMPLE).await;
        if let Some(error) = expected.get("error") {
            let (_, message) = answer.error();
            assert!(message.contains(error.as_str().unwrap()), "{file}: {message}");
            assert_eq!((world.sink.posts(), Item::count(&world.dynamo).await), (vec![], 0), "{file}");
        } else {
            assert_eq!(json!(answer.failures()), expected["failures"], "{file}");
            assert_eq!(json!(world.sink.posts().len()), expected["effects"], "{file}");
        }
    }
}

#[tokio::test]
async fn a_poison_body_fails_itself_and_the_rest_of_its_group_only() {
    let world = World::new().await;
    let function = world.setup.start().await;
    let records = [
        Record::order("g1"),
        Record::order("h1").in_group("h"),
        Record::new("poison", r#"{"orderId":"g2","#),
        Record::order("g3"),
        Record::order("h2").in_group("h"),
        Record::order("g4"),
    ];

    let answer = function.invoke(event(&records), AMPLE).await;

    assert_eq!(answer.failures(), ["poison", "message-g3", "message-g4"]);
    assert_eq!(world.sink.applied(), ["g1", "h1", "h2"]);
    for key in ["g2", "g3", "g4"] {
        assert!(world.has_no_item(key).await, "{key} left a record");
    }
    assert_eq!(function.outcomes("poison"), ["rejected"]);
    assert_eq!(function.outcomes("message-g3"), ["unstarted"]);
}

#[tokio::test]
async fn a_permanent_refusal_stops_its_group_until_its_last_receive() {
    let world = World::new().await;
    world.sink.behave_for("bad", Behaviour::Answer(422, "no such article".to_owned()));
    let function = world.setup.start().await;
    let records = |count| {
        [Record::order("first"), Record::order("bad"), Record::order("mate"), Record::order("other").in_group("h")]
            .map(|record| record.received(count))
    };

    for count in [1, 2] {
        let answer = function.invoke(event(&records(count)), AMPLE).await;
        assert_eq!(answer.failures(), ["message-bad", "message-mate"], "receive {count}");
        assert_eq!(world.sink.applied(), ["first", "other"]);
        assert!(world.has_no_item("bad").await, "nothing happened, and after a mend it shall run");
    }
    // `MAX_RECEIVE_COUNT` is 3: the queue now moves whatever fails.
    let answer = function.invoke(event(&records(3)), AMPLE).await;
    assert_eq!(answer.failures(), ["message-bad"]);
    assert_eq!(world.sink.applied(), ["first", "mate", "other"]);
    assert_eq!(function.outcomes("message-bad"), ["permanent"; 3]);
    let reason = function.log_of("message-bad")[0]["reason"].clone();
    assert!(reason.as_str().unwrap().contains("422"), "{reason}");
}

// ---- dead letters and back-off ------------------------------------------------------------

#[tokio::test]
async fn dead_letters_are_sent_at_once_and_their_messages_acked() {
    let (world, sqs) = (World::new().await, Sqs::start().await);
    world.sink.behave_for("bad", Behaviour::Answer(422, "no such article".to_owned()));
    let setup = world.setup.set("AWS_ENDPOINT_URL_SQS", &sqs.url).set("DEAD_LETTER_QUEUE_URL", LETTERS);
    let function = setup.start().await;
    let records = [
        Record::order("first"),
        Record::order("bad").with_attribute("tenant", "acme"),
        Record::new("poison", r#"{"orderId":"#),
        Record::order("mate"),
    ];

    let answer = function.invoke(event(&records), AMPLE).await;

    assert_eq!(answer.failures(), NOTHING);
    assert_eq!(world.sink.applied(), ["first", "mate"]);
    let requests = sqs.requests();
    let reasons: Vec<_> = requests
        .iter()
        .map(|(_, body)| body["MessageAttributes"]["dead-letter-reason"]["StringValue"].as_str().unwrap())
        .collect();
    assert!(reasons[0].starts_with("permanent: ") && reasons[0].contains("422"), "{reasons:?}");
    assert!(reasons[1].starts_with("rejected: "), "{reasons:?}");
    let letter = &requests[0].1;
    assert_eq!(letter["MessageBody"], r#"{"orderId":"bad", "amount":1990.0}"#, "byte for byte");
    assert_eq!((&letter["QueueUrl"], &letter["MessageGroupId"]), (&json!(LETTERS), &json!("g")));
    let attribute = |name: &str| letter["MessageAttributes"][name]["StringValue"].as_str().unwrap_or_default();
    assert_eq!(attribute("idempotency-key"), "consumer#bad");
    assert_eq!(attribute("idempotency-attempt"), "1");
    assert_eq!(attribute("original-message-id"), "message-bad");
    assert_eq!(attribute("original-source-arn"), QUEUE_ARN);
    assert_eq!(attribute("first-received-at"), "2026-01-09T18:52:37.959Z");
    assert_eq!(attribute("tenant"), "acme");
    assert_eq!(function.log_of("message-bad")[0]["dead_lettered"], true);
    assert!(function.log_of("message-mate")[0].get("dead_lettered").is_none());
}

#[tokio::test]
async fn a_dead_letter_that_is_refused_or_hangs_leaves_its_message_in_the_queue() {
    let (world, sqs) = (World::new().await, Sqs::start().await);
    let setup = world.setup.set("AWS_ENDPOINT_URL_SQS", &sqs.url).set("DEAD_LETTER_QUEUE_URL", LETTERS);
    // Or too little time is left for an effect to begin.
    let function = setup.set("EFFECT_TIMEOUT_SECONDS", "1").start().await;
    let records = [Record::new("poison", "no JSON"), Record::order("mate"), Record::order("other").in_group("h")];

    sqs.answer([SqsAnswer::Error(403, "AccessDeniedException")]);
    let answer = function.invoke(event(&records), AMPLE).await;
    assert_eq!(answer.failures(), ["poison", "message-mate"]);
    let complaint = function.log().into_iter().find(|line| line.get("error").is_some()).unwrap();
    assert_eq!((&complaint["message_id"], &complaint["level"]), (&json!("poison"), &json!("ERROR")));
    assert!(complaint["error"].as_str().unwrap().contains("role must allow it"), "{complaint}");

    sqs.answer(vec![SqsAnswer::Late(Duration::from_mins(1)); 4]);
    let answer = function.invoke(event(&records), Duration::from_secs(4)).await;
    assert_eq!(answer.failures(), ["poison", "message-mate"]);
    assert!(answer.time_left > Duration::ZERO, "the answer was late");

    assert_eq!(function.invoke(event(&records), AMPLE).await.failures(), NOTHING);
    assert_eq!(world.sink.applied(), ["mate", "other"]);
}

#[tokio::test]
async fn failed_messages_get_their_visibility_by_receive_count_and_group() {
    let (world, sqs) = (World::new().await, Sqs::start().await);
    world.sink.behave_for("busy", Behaviour::Answer(503, String::new()));
    let setup = world
        .setup
        .set("AWS_ENDPOINT_URL_SQS", &sqs.url)
        .set("QUEUE_URL", QUEUE)
        .set("RETRY_BACK_OFF", "on")
        .set("RETRY_BACK_OFF_BASE_SECONDS", "8");
    let function = setup.start().await;
    let records = [Record::order("busy"), Record::order("mate"), Record::order("other").in_group("h")];

    for (count, waits) in [(1, 4..=8), (2, 8..=16)] {
        let before = sqs.requests().len();
        let answer = function.invoke(event(&records.clone().map(|record| record.received(count))), AMPLE).await;
        assert_eq!(answer.failures(), ["message-busy", "message-mate"], "still reported failed");
        let requests = sqs.requests().split_off(before);
        let entries: Vec<_> = requests.iter().map(|(_, body)| body["Entries"].as_array().unwrap().clone()).collect();
        assert_eq!(entries.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1], "the first of the group, then the rest");
        assert_eq!(entries[0][0]["ReceiptHandle"], "receipt-message-busy");
        assert_eq!(entries[1][0]["ReceiptHandle"], "receipt-message-mate");
        let wait = |request: usize| entries[request][0]["VisibilityTimeout"].as_u64().unwrap();
        assert!(waits.contains(&wait(0)), "receive {count}: {}", wait(0));
        assert_eq!(wait(0), wait(1));
    }
    assert!(sqs.operations().iter().all(|operation| operation == "ChangeMessageVisibilityBatch"));
}

#[tokio::test]
async fn back_off_that_is_not_allowed_is_said_once_and_changes_nothing_else() {
    let (world, sqs) = (World::new().await, Sqs::start().await);
    world.sink.behave_for("busy", Behaviour::Answer(503, String::new()));
    let setup = world.setup.set("AWS_ENDPOINT_URL_SQS", &sqs.url).set("QUEUE_URL", QUEUE).set("RETRY_BACK_OFF", "on");
    let function = setup.start().await;
    sqs.answer([SqsAnswer::Error(403, "AccessDenied")]);
    for count in [1, 2] {
        let answer = function.invoke(event([&Record::order("busy").received(count)]), AMPLE).await;
        assert_eq!(answer.failures(), ["message-busy"]);
    }
    assert_eq!(sqs.requests().len(), 1);
    let lines = function.lines();
    assert_eq!(lines.iter().filter(|line| line.contains("sqs:ChangeMessageVisibility")).count(), 1, "{lines:?}");
}

// ---- side by side ----------------------------------------------------------------------

#[tokio::test]
async fn of_two_consumers_with_one_batch_the_later_fails_what_is_in_flight() {
    let world = World::new().await;
    world.sink.behave(Behaviour::Hold);
    let (winner, loser) = tokio::join!(world.setup.start(), world.setup.start());
    let records = [Record::order("a"), Record::order("b").in_group("h"), Record::order("c").in_group("i")];
    let ids = records.each_ref().map(|record| record.id.clone());

    let won = winner.invoke(event(&records), AMPLE);
    world.sink.wait_for_posts(3).await;
    let lost = loser.invoke(event(&records), AMPLE).await;
    assert_eq!(lost.failures(), ids, "an ack would lose them, should the other die");
    for id in &ids {
        assert_eq!(loser.outcomes(id), ["in-flight"]);
    }

    world.sink.open_gate();
    assert_eq!(won.await.failures(), NOTHING);
    let again = loser.invoke(event(&records), AMPLE).await;
    assert_eq!(again.failures(), NOTHING);
    assert_eq!(loser.outcomes("message-a"), ["in-flight", "replayed"]);
    assert_eq!(world.sink.posts().len(), 3, "each once");
}

#[tokio::test]
async fn two_consumers_that_race_for_a_batch_apply_each_message_once() {
    let world = World::new().await;
    world.sink.behave(Behaviour::Hold);
    let (one, other) = tokio::join!(world.setup.start(), world.setup.start());
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let records = names.map(|name| Record::order(name).in_group(name));

    let answers = (one.invoke(event(&records), AMPLE), other.invoke(event(&records), AMPLE));
    world.sink.wait_for_posts(names.len()).await;
    // Whoever lost a message must have seen it held, not done.
    until("each message to be in flight for one of the two", || {
        records.iter().all(|record| [&one, &other].iter().any(|f| f.outcomes(&record.id) == ["in-flight"]))
    })
    .await;
    world.sink.open_gate();
    let (one_failed, other_failed) = (answers.0.await.failures(), answers.1.await.failures());

    for record in &records {
        assert_ne!(one_failed.contains(&record.id), other_failed.contains(&record.id), "{}: one acks it", record.id);
    }
    let mut keys = world.sink.keys();
    keys.sort();
    assert_eq!(keys, names, "each once");
}

#[tokio::test]
async fn groups_run_side_by_side_up_to_the_bound_and_in_order_within() {
    let world = World::new().await;
    world.sink.behave(Behaviour::Hold);
    let function = world.setup.clone().set("MAX_CONCURRENCY", "3").start().await;
    // Five groups of two: g0-0, g0-1, ... g4-1, interleaved.
    let name = |group: usize, position: usize| format!("g{group}-{position}");
    let records: Vec<Record> = (0..2)
        .flat_map(|position| (0..5).map(move |group| (group, position)))
        .map(|(group, position)| Record::order(&name(group, position)).in_group(&format!("g{group}")))
        .collect();

    let answer = function.invoke(event(&records), AMPLE);
    world.sink.wait_for_posts(3).await;
    assert_eq!(BTreeSet::from_iter(world.sink.keys()), BTreeSet::from([name(0, 0), name(1, 0), name(2, 0)]));
    // One place falls free when a group is over, and not before.
    world.sink.release(&name(0, 0));
    world.sink.wait_for_posts(4).await;
    assert_eq!(world.sink.keys()[3], name(0, 1));
    world.sink.release(&name(0, 1));
    world.sink.wait_for_posts(5).await;
    assert_eq!(world.sink.keys()[4], name(3, 0));
    world.sink.open_gate();

    assert_eq!(answer.await.failures(), NOTHING);
    assert_eq!(world.sink.high_water(), 3);
    let group_of = |key: &str| key.split('-').next().unwrap().to_owned();
    for post in world.sink.posts() {
        let beside = post.beside.iter().find(|key| group_of(key) == group_of(&post.key));
        assert_eq!(beside, None, "beside {}", post.key);
    }
    for group in 0..5 {
        let of_group: Vec<String> =
            world.sink.keys().into_iter().filter(|key| group_of(key) == format!("g{group}")).collect();
        assert_eq!(of_group, [name(group, 0), name(group, 1)]);
    }
}

#[tokio::test]
async fn the_next_claim_of_a_group_is_under_way_while_an_effect_runs() {
    let world = World::new().await;
    world.sink.behave(Behaviour::Hold);
    let function = world.setup.start().await;
    let answer = function.invoke(event([&Record::order("a"), &Record::order("b"), &Record::order("c")]), AMPLE);
    world.sink.wait_for_posts(1).await;
    common::wait::eventually("the claim of b", async || Item::of(&world.dynamo, "b").await).await;
    assert_eq!(world.item("a").await.status(), "INPROGRESS");
    assert!(world.has_no_item("c").await, "one ahead, not two");
    assert_eq!(world.sink.keys(), ["a"]);
    world.sink.open_gate();
    assert_eq!(answer.await.failures(), NOTHING);
    assert_eq!(world.sink.keys(), ["a", "b", "c"]);
    assert_eq!(world.sink.high_water(), 1);
}

#[tokio::test]
async fn with_park_nothing_is_claimed_ahead() {
    let world = World::new().await;
    world.sink.behave(Behaviour::Hold);
    let proxy = DynamoProxy::start(&world.dynamo.url);
    let function = Setup::new(&proxy.url, &world.sink.url).set("EFFECT_RECOVERY", "park").start().await;
    let answer = function.invoke(event([&Record::order("a"), &Record::order("b")]), AMPLE);
    world.sink.wait_for_posts(1).await;
    world.sink.open_gate();
    assert_eq!(answer.await.failures(), NOTHING);
    // In the order in which the proxy was asked: claim, result, claim, result.
    assert_eq!(proxy.operations(), ["GetItem", "PutItem", "UpdateItem", "PutItem", "UpdateItem"]);
}

#[tokio::test]
async fn concurrent_invocations_of_one_process_wait_for_each_others_keys() {
    let world = World::new().await;
    world.sink.behave(Behaviour::Hold);
    let function = world.setup.clone().set("AWS_LAMBDA_MAX_CONCURRENCY", "4").start().await;
    until("four requests for an invocation", || function.api.polling() == 4).await;

    let first = function.invoke(event([&Record::order("a")]), AMPLE);
    world.sink.wait_for_posts(1).await;
    // The same order under another message id, next to one that shows that the second
    // invocation is at work.
    let same = Record::order("a").with_id("message-a-anew").in_group("h");
    let second = function.invoke(event([&same, &Record::order("b").in_group("i")]), AMPLE);
    world.sink.wait_for_posts(2).await;
    assert_eq!((function.api.taken(), world.sink.keys()), (2, vec!["a".to_owned(), "b".to_owned()]));
    world.sink.open_gate();

    let (first, second) = tokio::join!(first, second);
    assert_eq!((first.failures(), second.failures()), (vec![], vec![]));
    assert_eq!(world.sink.posts().len(), 2);
    assert_eq!(function.outcomes("message-a"), ["executed"]);
    assert_eq!(function.outcomes("message-a-anew"), ["replayed"]);
}

// ---- time ------------------------------------------------------------------------------

#[tokio::test]
async fn an_effect_that_hangs_is_cut_off_in_time_to_answer_and_recovered_later() {
    let world = World::new().await;
    world.sink.behave(Behaviour::Hold);
    let function = world.setup.clone().set("EFFECT_TIMEOUT_SECONDS", "2").set("MAX_CONCURRENCY", "1").start().await;
    let records = [Record::order("hangs"), Record::order("mate"), Record::order("other").in_group("h")];

    let answer = function.invoke(event(&records), Duration::from_secs(3)).await;

    assert!(answer.time_left > Duration::ZERO, "the answer was late");
    assert_eq!(answer.failures(), ["message-hangs", "message-mate", "message-other"]);
    assert_eq!(function.outcomes("message-hangs"), ["unknown"]);
    assert_eq!(function.outcomes("message-mate"), ["unstarted"]);
    assert_eq!(function.outcomes("message-other"), ["unstarted"]);
    assert_eq!(world.sink.keys(), ["hangs"]);
    let item = world.item("hangs").await;
    assert_eq!((item.status(), item.attempt(), item.lease().get()), ("INPROGRESS", 1, 0), "given up, not forgotten");
    assert!(world.has_no_item("mate").await, "its claim, taken ahead, was given back");
    assert!(world.has_no_item("other").await, "there was no time to begin it");

    world.sink.open_gate();
    let again = function.invoke(event(&records), AMPLE).await;
    assert_eq!(again.failures(), NOTHING);
    let attempts = [("hangs", 1), ("hangs", 2), ("mate", 1), ("other", 1)].map(|(key, n)| (key.to_owned(), n));
    assert_eq!(world.sink.attempts(), attempts);
    assert_eq!(world.item("hangs").await.status(), "COMPLETED");
}

#[tokio::test]
async fn an_invocation_without_time_for_one_message_fails_and_says_so() {
    let world = World::new().await;
    let function = world.setup.clone().set("EFFECT_TIMEOUT_SECONDS", "2").start().await;
    let answer = function.invoke(event([&Record::order("a")]), Duration::from_secs(2)).await;
    let (error_type, message) = answer.error();
    assert_eq!(error_type, "TooLittleTime");
    assert!(message.contains("2.5s"), "{message}");
    assert_eq!((world.sink.posts(), Item::count(&world.dynamo).await), (vec![], 0));
}

// ---- start -----------------------------------------------------------------------------

#[tokio::test]
async fn all_that_is_wrong_with_the_settings_is_said_at_once() {
    let mut function = Setup::bare().spawn().await;
    assert!(!function.exit().await.success());
    let failures = function.api.init_failures().await;
    assert_eq!(failures.len(), 1, "{failures:?}");
    let failure = &failures[0];
    assert_eq!(failure.error_type, "InvalidConfiguration");
    assert_eq!(failure.header, "Runtime.InvalidConfiguration");
    for variable in ["TABLE_NAME", "VISIBILITY_TIMEOUT_SECONDS", "MAX_RECEIVE_COUNT", "EFFECT_URL", "EFFECT_RECOVERY"] {
        assert_eq!(failure.message.matches(variable).count().min(1), 1, "{variable} in {}", failure.message);
    }
    assert!(failure.message.starts_with("5 things are wrong"), "{}", failure.message);
    assert_eq!(function.api.polling(), 0);
    let log = function.log();
    assert_eq!((log.len(), &log[0]["level"]), (1, &json!("ERROR")), "{log:?}");
}

#[tokio::test]
async fn values_that_are_wrong_are_named_with_what_would_be_right() {
    let mut function = Setup::new("http://127.0.0.1:1", "ftp://example.com/")
        .set("VISIBILITY_TIMEOUT_SECONDS", "3 minutes")
        .set("MAX_RECEIVE_COUNT", "0")
        .set("EFFECT_RECOVERY", "hope")
        .set("STORE_OUTAGE", "panic")
        .spawn()
        .await;
    assert!(!function.exit().await.success());
    let failures = function.api.init_failures().await;
    let [failure] = &failures[..] else { panic!("{failures:?}") };
    for said in ["`3 minutes`", "MAX_RECEIVE_COUNT", "`rerun`", "`park`", "EFFECT_URL", "`https`", "STORE_OUTAGE"] {
        assert!(failure.message.contains(said), "{said} in {}", failure.message);
    }
}

#[tokio::test]
async fn a_table_that_is_not_there_is_an_init_error_that_names_the_setting() {
    let world = World::new().await;
    let mut function = world.setup.clone().set("TABLE_NAME", "no-such-table").spawn().await;
    assert!(!function.exit().await.success());
    let failures = function.api.init_failures().await;
    let [failure] = &failures[..] else { panic!("{failures:?}") };
    assert_eq!(failure.error_type, "TableUnusable");
    assert!(failure.message.contains("TABLE_NAME"), "{}", failure.message);
    assert!(failure.message.contains("no-such-table"), "{}", failure.message);
}

#[tokio::test]
async fn outside_lambda_it_says_what_it_is_and_ends() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_consumer")).env_clear().output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("AWS_LAMBDA_RUNTIME_API is not set"), "{text}");
    assert!(!text.contains("panicked") && output.stderr.is_empty(), "{text} {:?}", output.stderr);
}

// ---- the store away --------------------------------------------------------------------

#[tokio::test]
async fn without_its_table_nothing_runs_and_the_invocation_fails_until_it_is_back() {
    let world = World::new().await;
    let absent = DynamoProxy::away(&world.dynamo.url);
    let function = Setup::new(&absent.url, &world.sink.url).start().await;
    let records = [Record::order("a"), Record::order("b").in_group("h")];
    let away = |answer: common::runtime_api::Answer| {
        let (error_type, message) = answer.error();
        assert_eq!(error_type, "StoreAway", "{message}");
    };

    // Connections are refused from the start: it starts all the same, and says so.
    assert!(function.output().contains("the table does not answer yet"), "{}", function.output());
    away(function.invoke(event(&records), AMPLE).await);
    assert_eq!(world.sink.posts(), []);

    let proxy = absent.appear();
    assert_eq!(function.invoke(event(&records[..1]), AMPLE).await.failures(), NOTHING);

    // Connections break in the middle of its life.
    proxy.cut();
    away(function.invoke(event(&records), AMPLE).await);
    assert_eq!(world.sink.keys(), ["a"]);

    proxy.mend();
    assert_eq!(function.invoke(event(&records), AMPLE).await.failures(), NOTHING);
    assert_eq!(world.sink.keys(), ["a", "b"]);
    assert_eq!(function.outcomes("message-a").last().unwrap(), "replayed");
}

#[tokio::test]
async fn a_store_that_fails_in_the_middle_of_a_batch_fails_only_what_it_was_needed_for() {
    let world = World::new().await;
    let proxy = DynamoProxy::start(&world.dynamo.url);
    world.sink.behave(Behaviour::Hold);
    let function = Setup::new(&proxy.url, &world.sink.url).set("MAX_CONCURRENCY", "1").start().await;
    let records = [Record::order("a"), Record::order("b").in_group("h")];

    let answer = function.invoke(event(&records), AMPLE);
    world.sink.wait_for_posts(1).await;
    proxy.on("PutItem", Passage::Refuse);
    world.sink.open_gate();

    assert_eq!(answer.await.failures(), ["message-b"], "an answer in parts: `a` is done");
    assert_eq!(world.sink.keys(), ["a"]);
    assert_eq!(function.outcomes("message-b"), ["store-failed"]);
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_is_known_again_as_ones_own() {
    let world = World::new().await;
    let proxy = DynamoProxy::start(&world.dynamo.url);
    let function = Setup::new(&proxy.url, &world.sink.url).set("EFFECT_RECOVERY", "park").start().await;
    // The SDK sends each again, and DynamoDB refuses what stands there already.
    proxy.once("PutItem", Passage::LoseAnswer);
    proxy.once("UpdateItem", Passage::LoseAnswer);

    let answer = function.invoke(event([&Record::order("a")]), AMPLE).await;

    assert_eq!(answer.failures(), NOTHING, "{}", function.output());
    let statuses = |operation| proxy.exchanges(operation).iter().map(|e| e.status).collect::<Vec<_>>();
    assert_eq!(statuses("PutItem"), [Some(200), Some(400)]);
    assert_eq!(statuses("UpdateItem"), [Some(200), Some(400)]);
    assert_eq!(function.outcomes("message-a"), ["executed"]);
    let item = world.item("a").await;
    assert_eq!((item.status(), item.attempt(), world.sink.posts().len()), ("COMPLETED", 1, 1));
}

// ---- logs ------------------------------------------------------------------------------

/// Text that must not be seen, wherever it comes by.
const CANARIES: [&str; 6] =
    ["body-canary", "attribute-canary", "answer-canary", "query-canary", "session-token-canary", SECRET_KEY];

/// Sends messages of all kinds, full of canaries, through a function with that level.
async fn chatter(world: &World, level: &str, format: &str) -> Function {
    world.sink.behave(Behaviour::Answer(200, r#"{"receipt":"answer-canary"}"#.to_owned()));
    world.sink.behave_for("gone", Behaviour::Close);
    world.sink.behave_for("busy", Behaviour::Answer(503, String::new()));
    world.sink.behave_for("refused", Behaviour::Answer(422, "answer-canary".to_owned()));
    let function = world
        .setup
        .clone()
        .set("EFFECT_URL", &format!("{}?token=query-canary", world.sink.url))
        .set("AWS_LAMBDA_LOG_LEVEL", level)
        .set("AWS_LAMBDA_LOG_FORMAT", format)
        .start()
        .await;
    let order = |id: &str| {
        Record::new(&format!("message-{id}"), json!({ "orderId": id, "note": "body-canary" }).to_string())
            .in_group(id)
            .with_attribute("trace", "attribute-canary")
    };
    let poison = |id: &str, body: &str| Record::new(id, body).in_group(id).with_attribute("trace", "attribute-canary");
    let mut records = ["good", "gone", "busy", "refused"].map(order).to_vec();
    records.extend([
        Record::new("conflict", r#"{"orderId":"good","note":"another body-canary"}"#).in_group("good"),
        poison("cut", r#"{"orderId":"x","note":"body-canary"#),
        poison("text", "body-canary"),
        poison("no-key", r#"{"note":"body-canary"}"#),
        poison("null-key", r#"{"orderId":null,"note":"body-canary"}"#),
        poison("object-key", r#"{"orderId":{"note":"body-canary"}}"#),
        poison("twice", r#"{"orderId":"body-canary","orderId":"body-canary"}"#),
        poison("member-twice", r#"{"orderId":"y","note":"body-canary","note":"body-canary"}"#),
    ]);
    function.invoke(event(&records), AMPLE).await.failures();
    // The same again: replays, recoveries, conflicts.
    function.invoke(event(&records), AMPLE).await.failures();
    for broken in [
        json!({ "note": "body-canary" }),
        json!({ "Records": "body-canary" }),
        json!({ "Records": [{ "eventSource": "aws:sqs", "body": "body-canary" }] }),
        json!({ "Records": [{ "eventSource": "aws:sqs", "messageId": 1, "body": { "body-canary": 1 } }] }),
    ] {
        function.invoke(broken, AMPLE).await.error();
    }
    function
}

fn assert_no_canary(output: &str) {
    for canary in CANARIES {
        let line = output.lines().find(|line| line.contains(canary));
        assert_eq!(line, None, "{canary} was logged");
    }
}

#[tokio::test]
async fn every_line_is_json_with_time_and_level_and_holds_no_payload() {
    let world = World::new().await;
    let function = chatter(&world, "TRACE", "JSON").await;
    let log = function.log();
    for line in &log {
        assert!(is_rfc_3339(line["timestamp"].as_str().unwrap()), "{line}");
        let level = line["level"].as_str().unwrap();
        assert!(["TRACE", "DEBUG", "INFO", "WARN", "ERROR"].contains(&level), "{line}");
        assert!(line["message"].is_string(), "{line}");
    }
    assert_eq!(function.error_lines(), NOTHING);
    assert_no_canary(&function.output());
}

#[tokio::test]
async fn each_message_has_one_line_that_tells_what_became_of_it() {
    let world = World::new().await;
    let function = chatter(&world, "INFO", "JSON").await;
    let told = |id: &str| {
        let lines = function.log_of(id);
        assert_eq!(lines.len(), 2, "one a delivery: {lines:?}");
        let both: Vec<Value> = lines
            .iter()
            .map(|line| json!([line["key"], line["group"], line["attempt"], line["outcome"], line["level"]]))
            .collect();
        both
    };
    let key = |key: &str| format!("{FUNCTION_NAME}#{key}");
    assert_eq!(told("message-good")[0], json!([key("good"), "good", 1, "executed", "INFO"]));
    assert_eq!(told("message-good")[1], json!([key("good"), "good", null, "replayed", "INFO"]));
    assert_eq!(told("message-gone")[0], json!([key("gone"), "gone", 1, "unknown", "WARN"]));
    assert_eq!(told("message-gone")[1], json!([key("gone"), "gone", 2, "unknown", "WARN"]));
    assert_eq!(told("message-refused")[0], json!([key("refused"), "refused", 1, "permanent", "ERROR"]));
    assert_eq!(told("conflict")[0], json!([key("good"), "good", null, "conflict", "ERROR"]));
    for poison in ["cut", "text", "no-key", "null-key", "object-key", "twice", "member-twice"] {
        assert_eq!(told(poison)[0], json!([null, poison, null, "rejected", "ERROR"]));
        assert!(function.log_of(poison)[0]["reason"].is_string(), "{poison}");
    }
}

#[tokio::test]
async fn a_level_leaves_out_what_is_below_it() {
    let world = World::new().await;
    let function = chatter(&world, "WARN", "JSON").await;
    let levels: BTreeSet<String> =
        function.log().iter().map(|line| line["level"].as_str().unwrap().to_owned()).collect();
    assert_eq!(levels, BTreeSet::from(["ERROR".to_owned(), "WARN".to_owned()]));
    assert_eq!(function.log_of("message-good"), [] as [Value; 0], "done: INFO");
    assert_eq!(function.log_of("message-gone").len(), 2);
    assert_no_canary(&function.output());
}

#[tokio::test]
async fn text_format_is_text_and_holds_no_payload_either() {
    let world = World::new().await;
    let function = chatter(&world, "TRACE", "Text").await;
    let lines = function.lines();
    let line = lines.iter().find(|line| line.contains("message-good")).unwrap();
    assert!(is_rfc_3339(line.split(' ').next().unwrap()), "{line}");
    assert!(line.contains(" INFO ") && line.contains("executed"), "{line}");
    assert!(serde_json::from_str::<Value>(line).is_err(), "{line}");
    assert!(!function.output().contains('\u{1b}'), "colours");
    assert_no_canary(&function.output());
}

#[tokio::test]
async fn the_effects_url_is_not_shown_when_the_target_is_away_or_the_setting_wrong() {
    let world = World::new().await;
    // Nobody listens on a port that is merely bound.
    let absent = DynamoProxy::away("http://127.0.0.1:1");
    let url = format!("{}/?token=query-canary", absent.url);
    let function = world.setup.clone().set("EFFECT_URL", &url).set("AWS_LAMBDA_LOG_LEVEL", "TRACE").start().await;
    let answer = function.invoke(event([&Record::order("a")]), AMPLE).await;
    assert_eq!(answer.failures(), ["message-a"]);
    assert_eq!(function.outcomes("message-a"), ["not-applied"]);
    assert!(world.has_no_item("a").await, "nothing was sent: a retry is safe at once");
    assert_no_canary(&function.output());

    let mut wrong = world.setup.clone().set("EFFECT_URL", "http://example.com/?token=query-canary").spawn().await;
    assert!(!wrong.exit().await.success());
    let failures = wrong.api.init_failures().await;
    assert!(failures[0].message.contains("EFFECT_URL"), "{failures:?}");
    assert_no_canary(&failures[0].message);
    assert_no_canary(&wrong.output());
}

#[tokio::test]
async fn no_message_can_forge_a_line() {
    // What a forger would like to see on a line of its own.
    const FORGED: &str = r#"{"timestamp":"2026-01-01T00:00:00Z","level":"ERROR","message":"forged"}"#;
    for format in ["JSON", "Text"] {
        let world = World::new().await;
        let setup = world.setup.clone().set("AWS_LAMBDA_LOG_FORMAT", format).set("EFFECT_QUOTE_ANSWERS", "true");
        let function = setup.start().await;
        for ending in [
            "\n",
            "\r\n",
            "\r",
            "\u{b}",
            "\u{c}",
            "\u{85}",
            "\u{2028}",
            "\u{2029}",
            "\0",
            "\u{8}",
            "\"",
            "\u{1b}[2K\u{1b}[1G",
            "\u{9b}2K",
            "\u{202e}",
            "\u{2066}",
        ] {
            let forged = format!("x{ending}{FORGED}{ending}");
            let records = [
                Record::new("key", json!({ "orderId": forged }).to_string()).in_group("1"),
                Record::new("body", forged.as_str()).in_group("2"),
                Record::new("name", json!({ "orderId": "y", forged.as_str(): 1 }).to_string()).in_group("3"),
                Record::new("id", json!({ "orderId": "z" }).to_string()).in_group("4").with_id(&forged),
                Record::new("group", "no key").in_group(&forged),
            ];
            world.sink.behave_for("y", Behaviour::Answer(422, forged.clone()));
            function.invoke(event(&records), AMPLE).await.failures();
            let mut elsewhere = event(&records[..1]);
            elsewhere["Records"][0]["eventSource"] = json!(forged);
            function.invoke(elsewhere, AMPLE).await.error();
            if format == "JSON" {
                let [line] = &function.log_of(&forged)[..] else { panic!("{forged:?} has not its line") };
                assert_eq!(line["key"], format!("{FUNCTION_NAME}#z"), "the id keeps its value");
                assert_eq!(function.log_of("group").last().unwrap()["group"], forged, "and so does the group");
            }
        }
        let output = function.output();
        assert!(output.contains("forged"), "the forgeries came by");
        for line in output.split(['\n', '\r']).filter(|line| !line.is_empty()) {
            let genuine = match format {
                "JSON" => serde_json::from_str::<Value>(line).is_ok_and(|line| line["message"] != "forged"),
                _ => is_rfc_3339(line.split(' ').next().unwrap()),
            };
            assert!(genuine, "{format}: {line:?}");
        }
        let moves = |c: char| c != '\n' && (c.is_control() || "\u{2028}\u{2029}\u{202e}\u{2066}".contains(c));
        assert!(!output.contains(moves), "{format}: something that is not shown as it is");
    }
}

/// Such as `2026-01-31T12:00:00.000000Z`.
fn is_rfc_3339(text: &str) -> bool {
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    let (seconds, fraction) = shape.split_at(shape.len().min(19));
    let fraction = fraction.strip_suffix('Z').unwrap_or("no zone");
    seconds == "0000-00-00T00:00:00" && (fraction.is_empty() || fraction.starts_with('.')) && {
        fraction.trim_start_matches('.').chars().all(|c| c == '0')
    }
}

#[tokio::test]
async fn a_key_may_be_in_jmespath() {
    let world = World::new().await;
    let function =
        world.setup.clone().set("IDEMPOTENCY_KEY", "jmespath:[tenant, powertools_json(order).id]").start().await;
    let record = |id: &str, tenant: &str| {
        Record::new(id, json!({ "tenant": tenant, "order": "{\"id\":9007199254740993}" }).to_string()).in_group(id)
    };
    let records = [record("m-1", "acme"), record("m-2", "acme"), record("m-3", "other"), record("m-4", "")];
    let answer = function.invoke(event(&records), AMPLE).await;
    assert_eq!(answer.failures(), ["m-4"]);
    assert_eq!(world.sink.posts().len(), 2);
    assert_eq!(world.item("acme,=9007199254740993").await.status(), "COMPLETED");
}

#[tokio::test]
async fn envelopes_are_opened_and_noise_is_acked_when_that_is_configured() {
    let world = World::new().await;
    let function = world.setup.clone().set("BODY", "auto").set("IGNORE_MESSAGES", "s3:TestEvent").start().await;
    let read = |file: &str| -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("events").join(file);
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    };

    let answer = function.invoke(read("sns-wrapped-and-raw.json"), AMPLE).await;
    assert_eq!(answer.failures(), NOTHING);
    let bodies: Vec<_> = world.sink.posts().into_iter().map(|post| post.body).collect();
    assert!(
        bodies.contains(&r#"{"orderId":"order-6001","customer":"customer-17","amount":1990}"#.to_owned()),
        "{bodies:?}"
    );

    let answer = function.invoke(read("s3-test-event.json"), AMPLE).await;
    assert_eq!(answer.failures(), NOTHING);
    assert_eq!(world.sink.posts().len(), 3, "the test had no effect");
    assert_eq!(function.outcomes("3e0b1c52-9d1e-4f43-8a3e-0d6a6f2b7c11"), ["ignored"]);
}
