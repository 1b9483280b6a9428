//! The properties that are fuzzed, on a stable compiler: the corpus of each target, bombs
//! between good messages, and random bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, clippy::print_stdout)]

#[path = "common/proof.rs"]
#[allow(unreachable_pub)]
mod proof;
#[path = "../fuzz/src/lib.rs"]
mod properties;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use idempotent_consumer::store::StoreErrorKind;
use idempotent_consumer::store::dynamodb::record_of_item;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::json;

type Property = fn(&[u8]);

const TARGETS: [(&str, Property); 5] = [
    ("canonical_json", properties::canonical_json),
    ("envelope", properties::envelope),
    ("event", properties::event),
    ("key_expression", properties::key_expression),
    ("stored_record", properties::stored_record),
];

/// How long one bomb may keep a consumer that was compiled without optimisation on a busy
/// machine. What grows faster than its input takes hours.
const PATIENCE: Duration = Duration::from_mins(1);

const KIB: usize = 1024;

fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<_> = folder.read_dir().unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "{} is empty", folder.display());
    files
}

#[test]
fn the_corpus_holds() {
    let mut inputs = 0;
    for (target, property) in TARGETS {
        let files = corpus(target);
        for file in &files {
            // The last one named is the one that failed.
            println!("{}", file.display());
            property(&std::fs::read(file).unwrap());
        }
        inputs += files.len();
    }
    proof::note("fuzz corpus", &format!("{inputs} inputs, {} targets", TARGETS.len()), "every property holds for each");
}

/// Bodies that are deep, big or both, of about that many bytes.
fn bombs(size: usize) -> Vec<(&'static str, String)> {
    let order = |member: &str| format!(r#"{{"orderId":"A-1","bomb":{member}}}"#);
    let nested = |open: &str, inside: &str, close: &str, depth: usize| {
        format!("{}{inside}{}", open.repeat(depth), close.repeat(depth))
    };
    let members = |count: usize, name: &dyn Fn(usize) -> String| {
        let members: Vec<_> = (0..count).map(|index| format!("{:?}:1", name(index))).collect();
        format!("{{{}}}", members.join(","))
    };
    let digits = |digit: &str| digit.repeat(size);
    let mut notification = r#"{"orderId":"A-1"}"#.to_owned();
    while notification.len() < size / 2 {
        notification = json!({
            "Type": "Notification", "MessageId": "n", "TopicArn": "arn:aws:sns:eu-central-1:1:t", "Message": notification,
        })
        .to_string();
    }
    let event = r#"{"version":"0","id":"e","detail-type":"d","source":"s","account":"1","time":"t","region":"r","resources":[],"detail":"#;
    vec![
        ("deep arrays", nested("[", "1", "]", size / 2)),
        ("deep arrays in an order", order(&nested("[", "1", "]", size / 2))),
        ("deep objects", nested(r#"{"a":"#, "1", "}", size / 6)),
        ("arrays that don't end", "[".repeat(size)),
        ("objects that don't end", r#"{"a":"#.repeat(size / 5)),
        ("as deep as allowed, and full", order(&nested("[", &format!("{}1", "1,".repeat(size / 2)), "]", 127))),
        ("many digits", order(&digits("7"))),
        ("a key of many digits", format!(r#"{{"orderId":{}}}"#, digits("7"))),
        ("a key with many zeros", format!(r#"{{"orderId":1{}}}"#, digits("0"))),
        ("many decimals", order(&format!("0.{}1", digits("0")))),
        ("a huge exponent", order("1e999999999")),
        ("a huge exponent as the key", r#"{"orderId":1e999999999}"#.to_owned()),
        ("a huge negative exponent", order("-1e-999999999")),
        ("an exponent of many digits", order(&format!("1e{}", digits("9")))),
        ("zero with such an exponent", order(&format!("0e{}", digits("9")))),
        ("a long string", order(&format!("{:?}", "x".repeat(size)))),
        ("a long key", json!({ "orderId": "\\,~=".repeat(size / 4) }).to_string()),
        ("a long blank key", json!({ "orderId": " ".repeat(size) }).to_string()),
        ("a string of escapes", order(&format!("\"{}\"", r"\u0041".repeat(size / 6)))),
        ("a string of backslashes", order(&format!("\"{}\"", r"\\".repeat(size / 2)))),
        ("half a pair after many characters", order(&format!("\"{}\\ud800\"", "x".repeat(size)))),
        ("many members", order(&members(size / 10, &|index| index.to_string()))),
        ("one member many times", order(&members(size / 6, &|_| "a".to_owned()))),
        ("many members, the last one twice", order(&members(size / 10, &|index| index.min(size / 10 - 2).to_string()))),
        ("many long names that differ late", order(&members(40, &|index| format!("{}{index}", "x".repeat(size / 40))))),
        ("many empty arrays", order(&format!("[{}[]]", "[],".repeat(size / 3)))),
        ("white space", format!("{}{}", " ".repeat(size), order("1"))),
        ("notifications in notifications", notification),
        ("an event in an event, 8 times", nested(event, "{}", "}", 8)),
        ("an event in an event, many times", nested(event, "{}", "}", size / 120)),
        ("nothing but quotes", "\"".repeat(size)),
        ("NUL", "\0".repeat(size)),
    ]
}

#[allow(clippy::disallowed_methods)] // the time that work takes, and not the time of day
fn in_time(name: &str, work: impl FnOnce()) {
    println!("{name}");
    let start = Instant::now();
    work();
    let took = start.elapsed();
    assert!(took < PATIENCE, "{name} took {took:?}");
}

#[test]
fn a_bomb_between_good_messages_costs_one_message() {
    let mut bombs = bombs(200_000);
    bombs.push(("a number of a million digits", format!(r#"{{"orderId":"A-1","bomb":{}}}"#, "7".repeat(1_000_000))));
    for (name, body) in &bombs {
        in_time(name, || properties::splice(body));
    }
    proof::note(
        "bombs in bodies",
        &format!("{} bodies of up to a million bytes, 5 settings", bombs.len()),
        "each cost at most its own message",
    );
}

#[test]
fn bombs_hold_the_other_properties_too() {
    for (name, body) in bombs(50_000) {
        in_time(name, || {
            properties::envelope(body.as_bytes());
            properties::canonical_json(body.as_bytes());
            for expression in ["content-hash", "jmespath:[orderId, bomb][]"] {
                properties::key_of(expression, &body, true);
            }
        });
    }
}

#[test]
fn a_bomb_beside_the_messages_does_no_harm() {
    for (name, text) in bombs(200_000) {
        let member = format!(r#"{{"Records":[],"more":{text}}}"#);
        let record = format!(r#"{{"Records":[{{"messageId":"m-1","eventSource":"aws:sqs","more":{text}}}]}}"#);
        in_time(name, || [text, member, record].iter().for_each(|text| properties::payload(text)));
    }
}

/// Whoever writes such a setting hears what is wrong with it.
#[test]
fn a_bomb_as_a_setting_is_read_or_refused() {
    let settings = ["/a|", "/a,", "\\", "/", "/~1", "attribute:a|", "content-hash,", " ", "|"];
    let queries = [
        "(",
        "[",
        "{a:",
        "!",
        "&",
        "a.",
        "a|",
        "a||",
        "a&&",
        "[]",
        "[*]",
        "[?",
        "[0]",
        "*.",
        "not_null(",
        "a==",
        "`[",
        "'",
        "\"",
        "9",
        "-1",
    ];
    let closed = |text: &str| {
        let close = |c| "([{".find(c).map(|at| [')', ']', '}'][at]);
        format!("{text}a{}", text.chars().rev().filter_map(close).collect::<String>())
    };
    for length in [60, 64, 128, 192, 300, 1_000, 200_000] {
        let queries = queries.iter().flat_map(|query| {
            let query = query.repeat(length / query.len());
            [format!("jmespath:{}", closed(&query)), format!("jmespath:{query}")]
        });
        for setting in settings.iter().map(|setting| setting.repeat(length / setting.len())).chain(queries) {
            let name: String = setting.chars().take(24).collect();
            in_time(&format!("{name}... of {} bytes", setting.len()), || {
                properties::key_of(&setting, r#"{"a":{"a":1}}"#, true);
            });
        }
    }
}

/// A frame of zstd with that window and so many blocks of 128 KiB of white space.
fn zstd_frame(window_log: u8, blocks: usize) -> Vec<u8> {
    // Magic number; no checksum, size or dictionary; the window.
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0, (window_log - 10) << 3];
    for block in 1..=blocks {
        // One byte, repeated; the last block says so.
        let header = (128 * 1024) << 3 | 1 << 1 | u32::from(block == blocks);
        frame.extend(&header.to_le_bytes()[..3]);
        frame.push(b' ');
    }
    frame
}

fn completed(data: Vec<u8>) -> HashMap<String, AttributeValue> {
    HashMap::from([
        ("id".to_owned(), AttributeValue::S("orders#1".to_owned())),
        ("status".to_owned(), AttributeValue::S("COMPLETED".to_owned())),
        ("data".to_owned(), AttributeValue::B(Blob::new(data))),
    ])
}

#[test]
fn a_bomb_in_the_table_is_unreadable_and_takes_no_memory() {
    let bombs = [
        ("12 GiB", zstd_frame(17, 98_000)),
        ("12 GiB in a window of 128 MiB", zstd_frame(27, 98_000)),
        ("a window of 2 GiB", zstd_frame(31, 1)),
        ("a window of 128 MiB", zstd_frame(27, 1)),
        ("many frames", zstd_frame(17, 1).repeat(30_000)),
        ("empty frames", [0x28, 0xb5, 0x2f, 0xfd, 0x20, 0, 1, 0, 0].repeat(40_000)),
        ("nothing", Vec::new()),
    ];
    for (name, bomb) in bombs {
        assert!(bomb.len() <= 400 * KIB, "{name} is no item");
        let before = peak_memory();
        in_time(name, || {
            let error = record_of_item(&completed(bomb)).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unreadable, "{name}");
        });
        let grown = peak_memory() - before;
        assert!(grown < 256 * KIB * KIB, "{name} took {grown} bytes");
    }
}

/// The most memory that this process had, in bytes; 0 where the system does not say.
fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    peak.map_or(0, |kilobytes| kilobytes.parse::<usize>().unwrap() * 1024)
}

/// Random bytes, or an input of the corpus with some of its bytes changed.
fn input(target: &'static str) -> impl Strategy<Value = Vec<u8>> {
    let inputs: Vec<_> = corpus(target).iter().map(|file| std::fs::read(file).unwrap()).collect();
    let change = (any::<Index>(), any::<u8>(), 0..3_u8);
    let damaged =
        (prop::sample::select(inputs), prop::collection::vec(change, 1..4)).prop_map(|(mut input, changes)| {
            for (at, byte, how) in changes {
                let at = at.index(input.len() + 1);
                match how {
                    0 => input.insert(at, byte),
                    1 if at < input.len() => input[at] = byte,
                    _ => input.truncate(at.max(input.len() / 2)),
                }
            }
            input
        });
    prop_oneof![prop::collection::vec(any::<u8>(), 0..300), damaged]
}

fn explore(target: &'static str) {
    let (_, property) = TARGETS.into_iter().find(|(name, _)| *name == target).unwrap();
    // What fails is printed, and belongs into the corpus.
    let config = ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = prop::test_runner::TestRunner::new(config);
    runner
        .run(&input(target), |input| {
            property(&input);
            Ok(())
        })
        .unwrap();
}

#[test]
fn random_json_holds() {
    explore("canonical_json");
}

#[test]
fn random_envelopes_hold() {
    explore("envelope");
}

#[test]
fn random_events_hold() {
    explore("event");
}

#[test]
fn random_key_expressions_hold() {
    explore("key_expression");
}

#[test]
fn random_items_hold() {
    explore("stored_record");
}
