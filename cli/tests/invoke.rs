//! `invoke` as people run it: the built command, its exit code and what it prints.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

const EVENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../events");
const TEN_ORDERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../events/ten-orders-three-groups.json");

/// A directory to run the command in.
struct Place(TempDir);

struct Run {
    code: i32,
    out: String,
    err: String,
}

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), content).unwrap();
        name.to_owned()
    }

    /// An event of these bodies, each without a group and so a group of its own.
    fn event(&self, name: &str, bodies: &[Value]) -> String {
        let records = bodies.iter().enumerate().map(|(index, body)| record(&format!("message-{index}"), body));
        self.write(name, json!({ "Records": records.collect::<Vec<_>>() }).to_string())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_idempotent-consumer"));
        command.arg("invoke").args(args).current_dir(self.0.path());
        command
    }

    fn invoke(&self, args: &[&str]) -> Run {
        finish(&mut self.command(args))
    }

    /// Runs with `--json`, which must work out.
    fn json(&self, args: &[&str]) -> Value {
        self.invoke(&[args, &["--json"]].concat()).json()
    }
}

fn finish(command: &mut Command) -> Run {
    let output = command.output().unwrap();
    Run {
        code: output.status.code().unwrap(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

impl Run {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {} {}", self.out, self.err))
    }

    /// Nothing on standard output, the code, and all the words on standard error.
    #[track_caller]
    fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!((self.code, self.out.as_str()), (code, ""), "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "no `{word}` in: {}", self.err);
        }
    }
}

fn record(id: &str, body: &Value) -> Value {
    json!({ "messageId": id, "body": body.to_string(), "eventSource": "aws:sqs", "attributes": {}, "messageAttributes": {} })
}

fn outcomes(document: &Value) -> Vec<&str> {
    document["messages"].as_array().unwrap().iter().map(|message| message["outcome"].as_str().unwrap()).collect()
}

fn failures(document: &Value) -> Vec<&str> {
    let failures = document["response"]["batchItemFailures"].as_array().unwrap();
    failures.iter().map(|failure| failure["itemIdentifier"].as_str().unwrap()).collect()
}

fn count(list: &Value) -> usize {
    list.as_array().unwrap().len()
}

#[test]
fn the_second_run_replays_every_message_and_applies_nothing() {
    let place = Place::new();
    let first = place.invoke(&[TEN_ORDERS]);
    assert_eq!((first.code, first.err.as_str()), (0, ""));
    assert!(first.out.contains("effects that ran: 9 (order-2001, "), "{}", first.out);
    assert!(first.out.contains("Run it again"), "{}", first.out);
    assert!(place.path("target/demo.db").exists());

    let second = place.invoke(&[TEN_ORDERS]);
    assert_eq!((second.code, second.err.as_str()), (0, ""));
    assert!(second.out.contains("effects that ran: none\n"), "{}", second.out);
    assert!(second.out.contains(r#"response to Lambda: {"batchItemFailures":[]}"#), "{}", second.out);
    assert_eq!(second.out.matches("  replayed  ").count(), 10, "{}", second.out);
    // The receipts of the first run.
    assert_eq!(second.out.matches("-1\",\"amount\"").count(), 10, "{}", second.out);

    let after = place.json(&[TEN_ORDERS, "--forget"]);
    assert_eq!(count(&after["effects"]), 9);
}

#[test]
fn columns_are_aligned() {
    let place = Place::new();
    let out = place.invoke(&[TEN_ORDERS]).out;
    let header = out.lines().next().unwrap();
    let column = |name: &str| header.find(name).unwrap();
    for line in out.lines().skip(1).take(10) {
        let text = |from: usize| line.chars().skip(from).collect::<String>();
        assert!(text(column("group")).starts_with("customer-"), "{line}");
        assert!(text(column("key")).starts_with("order-"), "{line}");
        assert!(text(column("result")).starts_with("{\"receipt\""), "{line}");
    }
}

#[test]
fn every_event_gives_what_expected_json_says() {
    let expected: Value =
        serde_json::from_str(&fs::read_to_string(Path::new(EVENTS).join("expected.json")).unwrap()).unwrap();
    let expected = expected.as_object().unwrap();
    assert!(!expected.is_empty());
    for (name, expected) in expected {
        let place = Place::new();
        let run = place.invoke(&[Path::new(EVENTS).join(name).to_str().unwrap(), "--json"]);
        if let Some(error) = expected["error"].as_str() {
            run.fails(2, &[name, error]);
            assert!(!place.path("target").exists(), "{name}: nothing is touched");
            continue;
        }
        let document = run.json();
        let failed: Vec<&str> =
            expected["failures"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
        assert_eq!(failures(&document), failed, "{name}");
        assert_eq!(Some(count(&document["effects"]) as u64), expected["effects"].as_u64(), "{name}");
        assert_eq!(run.code, i32::from(!failed.is_empty()), "{name}");
    }
    for file in fs::read_dir(EVENTS).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        let event =
            Path::new(&name).extension().is_some_and(|extension| extension == "json") && name != "expected.json";
        assert!(!event || expected.contains_key(&name), "{name} is not in expected.json");
    }
}

#[test]
fn envelopes_and_noise_are_read_as_told() {
    let place = Place::new();
    let event = |name: &str| Path::new(EVENTS).join(name).to_str().unwrap().to_owned();
    let wrapped = place.json(&[event("sns-wrapped-and-raw.json").as_str(), "--body", "auto"]);
    assert_eq!(outcomes(&wrapped), ["executed", "executed"]);
    let strict = place.json(&[event("sns-wrapped-and-raw.json").as_str(), "--body", "sns"]);
    assert_eq!(outcomes(&strict), ["replayed", "rejected"]);
    let noise = place.json(&[event("s3-test-event.json").as_str(), "--ignore", "s3:TestEvent"]);
    assert_eq!(outcomes(&noise), ["ignored", "executed"]);
}

#[test]
fn a_message_can_make_the_effect_fail_and_recovery_does_as_told() {
    let words = ["not-applied", "permanent", "unknown", "panic", "hang", "no-such-word"];
    let bodies = words.map(|word| json!({ "orderId": word, "amount": 5, "fail": word }));
    for (recovery, then, receipt, applied_again) in
        [("rerun", "executed", Some(2), 3), ("verify", "recovered", Some(1), 0), ("park", "parked", None, 0)]
    {
        let place = Place::new();
        let event = place.event("fail.json", &bodies);
        let args = [event.as_str(), "--recovery", recovery, "--timeout-seconds", "3"];
        let first = place.json(&args);
        assert_eq!(outcomes(&first), ["not-applied", "permanent", "unknown", "unknown", "unknown", "executed"]);
        assert_eq!(first["effects"], json!(["unknown", "panic", "hang", "no-such-word"]));

        // Each message's first outcome other than in flight: with verify the leases of
        // attempts that may still be on their way run out first.
        let mut second: Vec<Option<Value>> = vec![None; words.len()];
        let mut effects = 0;
        let mut runs = 0;
        while second.iter().any(Option::is_none) {
            let document = place.json(&args);
            effects += count(&document["effects"]);
            for (message, seen) in second.iter_mut().zip(document["messages"].as_array().unwrap()) {
                if message.is_none() && seen["outcome"] != "in-flight" {
                    *message = Some(seen.clone());
                }
            }
            runs += 1;
            assert!(runs == 1 || (recovery == "verify" && runs < 1000), "{document}");
        }
        let second = json!({ "messages": second });
        assert_eq!(outcomes(&second), ["not-applied", "permanent", then, then, then, "replayed"], "{recovery}");
        assert_eq!(effects, applied_again, "{recovery}");
        let recovered = &second["messages"][2];
        assert_eq!(recovered["attempt"], 2, "{recovery}");
        let receipt = receipt.map_or(Value::Null, |n| json!({ "receipt": format!("unknown-{n}"), "amount": 5 }));
        assert_eq!(recovered["result"], receipt, "{recovery}");
    }
}

#[test]
fn key_scope_and_fingerprint_are_settings() {
    let place = Place::new();
    let event = place.event("two.json", &[json!({ "id": 1, "at": 1 }), json!({ "id": 1, "at": 2 })]);
    let run = |args: &[&str]| place.json(&[&[event.as_str(), "--key", "/id"], args].concat());
    assert_eq!(outcomes(&run(&["--scope", "a"])), ["executed", "conflict"]);
    let document = run(&["--scope", "b", "--fingerprint", "off"]);
    assert_eq!(outcomes(&document), ["executed", "replayed"]);
    assert_eq!((&document["scope"], &document["messages"][0]["key"]), (&json!("b"), &json!("=1")));
    assert_eq!(outcomes(&run(&["--scope", "c", "--fingerprint", "/id"])), ["executed", "replayed"]);
}

#[test]
fn several_commands_at_once_apply_each_effect_once() {
    let place = Place::new();
    let rivals: Vec<_> = (0..4)
        .map(|_| {
            let mut command = place.command(&[TEN_ORDERS, "--json"]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut documents: Vec<Value> = rivals
        .into_iter()
        .map(|rival| {
            let output = rival.wait_with_output().unwrap();
            assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
            serde_json::from_slice(&output.stdout).unwrap()
        })
        .collect();
    // What one found in flight, a later delivery finds done.
    let last = place.invoke(&[TEN_ORDERS, "--json"]);
    assert_eq!(last.code, 0, "{}", last.out);
    documents.push(last.json());

    let mut applied: Vec<&Value> =
        documents.iter().flat_map(|document| document["effects"].as_array().unwrap()).collect();
    applied.sort_by_key(ToString::to_string);
    let all = applied.len();
    applied.dedup();
    assert_eq!((applied.len(), all), (9, 9));
}

#[test]
fn nothing_that_a_message_holds_moves_the_cursor() {
    let place = Place::new();
    let nasty = "a\nb\r\u{1b}[2J\u{7f}\u{9b}31m\u{85}\u{2028}\u{202e}z\t";
    let mut bad = record(&format!("id{nasty}"), &json!({ "orderId": nasty, "fail": "permanent" }));
    bad["attributes"] = json!({ "MessageGroupId": nasty });
    let good = record("good", &json!({ "orderId": format!("{nasty}2"), "amount": nasty }));
    let event = place.write("nasty.json", json!({ "Records": [bad, good] }).to_string());

    let table = place.invoke(&[&event]);
    let document = place.invoke(&[&event, "--json"]);
    let other = place.write("other\u{1b}[2J.json", "{}");
    for text in [&table.out, &document.out, &place.invoke(&[&other]).err, &place.invoke(&[&event, "-v"]).err] {
        let seen = text.chars().find(|c| (c.is_control() && *c != '\n') || ['\u{2028}', '\u{202e}'].contains(c));
        assert_eq!(seen, None, "{text:?}");
    }
    assert_eq!(table.out.lines().count(), 1 + 2 + 5, "{}", table.out);
    let document = document.json();
    assert_eq!(document["messages"][0]["messageId"], format!("id{nasty}"));
    assert_eq!(document["messages"][1]["result"]["amount"], nasty);
    assert_eq!(failures(&document), [format!("id{nasty}")]);
}

#[test]
fn logs_come_when_asked_for_and_on_standard_error() {
    let place = Place::new();
    let run = place.invoke(&[TEN_ORDERS, "--json", "--verbose"]);
    assert_eq!(count(&run.json()["messages"]), 10);
    assert!(run.err.contains("outcome=\"executed\""), "{}", run.err);
    assert!(!run.err.contains("amount"), "no bodies: {}", run.err);
}

#[test]
fn an_event_that_can_t_be_used_is_named_and_changes_nothing() {
    let place = Place::new();
    place.invoke(&["missing.json"]).fails(2, &["`missing.json` can't be read", "No such file"]);
    place.invoke(&["."]).fails(2, &["can't be read"]);
    let text = place.write("text.json", "{\"Records\": [\n  oops\n]}");
    place.invoke(&[&text]).fails(2, &["`text.json` is not JSON", "line 2 column 3", "one-order.json"]);
    let empty = place.write("empty.json", "");
    place.invoke(&[&empty]).fails(2, &["`empty.json` is not JSON"]);
    for other in ["[]", "7", "{}", r#"{"Records": 7}"#, r#"{"Records": [{"body": 7}]}"#] {
        let other = place.write("other.json", other);
        place.invoke(&[&other]).fails(2, &["`other.json` is not an SQS event", "one-order.json"]);
    }
    assert!(!place.path("target").exists());

    let none = place.write("none.json", r#"{"Records": []}"#);
    let run = place.invoke(&[&none]);
    assert_eq!(run.code, 0);
    assert!(run.out.contains("The event has no messages."), "{}", run.out);
}

#[test]
fn an_event_that_can_t_be_used_does_not_make_the_store_forget() {
    let place = Place::new();
    assert_eq!(place.invoke(&[TEN_ORDERS]).code, 0);
    let other = place.write("other.json", "{}");
    place.invoke(&[&other, "--forget"]).fails(2, &["not an SQS event"]);
    assert_eq!(count(&place.json(&[TEN_ORDERS])["effects"]), 0);
}

#[test]
fn arguments_are_checked_before_anything_is_done() {
    let place = Place::new();
    place.invoke(&[]).fails(2, &["<EVENT>"]);
    place.invoke(&[TEN_ORDERS, "--key", "orderId"]).fails(2, &["--key", "`/orderId`"]);
    place.invoke(&[TEN_ORDERS, "--scope", "a#b"]).fails(2, &["--scope", "`#`"]);
    place.invoke(&[TEN_ORDERS, "--fingerprint", "amount"]).fails(2, &["--fingerprint", "`/amount,/currency`"]);
    place.invoke(&[TEN_ORDERS, "--recovery", "hope"]).fails(2, &["--recovery", "`park`"]);
    place.invoke(&[TEN_ORDERS, "--timeout-seconds", "901"]).fails(2, &["1..=900"]);
    // Less than one message is given.
    place.invoke(&[TEN_ORDERS, "--timeout-seconds", "1"]).fails(2, &["TooLittleTime"]);
    let help = finish(&mut place.command(&["--help"]));
    assert!(help.out.contains("Exit codes:") && help.out.contains("\"fail\": \"panic\""), "{}", help.out);
}

#[test]
fn a_store_that_can_t_be_used_is_named_with_a_way_out() {
    let place = Place::new();
    place.invoke(&[TEN_ORDERS, "--store", "."]).fails(3, &["`.` is a directory", "--store"]);

    let text = place.write("notes.txt", "my notes");
    place.invoke(&[TEN_ORDERS, "--store", &text, "--forget"]).fails(3, &["`notes.txt`", "not changed", "--store"]);
    assert_eq!(fs::read_to_string(place.path("notes.txt")).unwrap(), "my notes");
    place.invoke(&[TEN_ORDERS, "--store", "notes.txt/a.db"]).fails(3, &["can't be", "notes.txt"]);

    assert_eq!(place.invoke(&[TEN_ORDERS, "--store", "torn.db"]).code, 0);
    let whole = fs::read(place.path("torn.db")).unwrap();
    let torn = place.write("torn.db", &whole[..9000]);
    place.invoke(&[TEN_ORDERS, "--store", &torn]).fails(3, &["`torn.db`", "malformed", "--forget"]);
    assert_eq!(place.invoke(&[TEN_ORDERS, "--store", &torn, "--forget"]).code, 0);
}

#[test]
#[cfg(unix)]
fn a_store_that_can_t_be_written_is_named() {
    use std::os::unix::fs::PermissionsExt;

    let place = Place::new();
    let locked = place.path("locked");
    fs::create_dir(&locked).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o555)).unwrap();
    // Root may write everywhere.
    if fs::write(locked.join("probe"), "").is_err() {
        place.invoke(&[TEN_ORDERS, "--store", "locked/a.db"]).fails(3, &["`locked/a.db`", "Permission denied"]);
        place.invoke(&[TEN_ORDERS, "--store", "locked/b/a.db"]).fails(3, &["`locked/b/a.db`", "Permission denied"]);
    }
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_store_in_use_is_not_deleted() {
    let place = Place::new();
    assert_eq!(place.invoke(&[TEN_ORDERS, "--store", "a.db"]).code, 0);
    let lock = fs::File::open(place.path("a.db.lock")).unwrap();
    lock.lock_shared().unwrap();
    place.invoke(&[TEN_ORDERS, "--store", "a.db", "--forget"]).fails(3, &["`a.db` is in use", "wait"]);
    assert_eq!(count(&place.json(&[TEN_ORDERS, "--store", "a.db"])["effects"]), 0, "using it is fine");
}

#[test]
fn the_embedded_database_is_asked_directly_whatever_the_environment() {
    let place = Place::new();
    let mut command = place.command(&[TEN_ORDERS]);
    for proxy in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "AWS_ENDPOINT_URL"] {
        command.env(proxy, "http://127.0.0.1:9");
    }
    let run = finish(command.env("AWS_PROFILE", "nobody"));
    assert_eq!(run.code, 0, "{}", run.err);
}

#[test]
fn names_that_mean_something_to_sqlite_are_files_all_the_same() {
    let place = Place::new();
    for name in [":memory:", "file:x?mode=memory"] {
        assert_eq!(count(&place.json(&[TEN_ORDERS, "--store", name])["effects"]), 9, "{name}");
        assert_eq!(count(&place.json(&[TEN_ORDERS, "--store", name])["effects"]), 0, "{name}");
        assert!(place.path(name).exists(), "{name}");
    }
}
