//! What a person must look at: sent to the dead-letter queue once, then acked; and what its
//! letter says.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod common;

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotent_consumer::batch::{Batch, BatchError, BatchSettings};
use idempotent_consumer::consumer::Consumer;
use idempotent_consumer::dead_letter::{
    DeadLetter, DeadLetterError, DeadLetterQueue, MAX_ATTRIBUTES, MAX_LETTER_BYTES, MAX_REASON_BYTES, attribute,
};
use idempotent_consumer::effect::{EffectError, Recovery};
use idempotent_consumer::json::Json;
use idempotent_consumer::key::KeyExpression;
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Disposition, Outcome};
use idempotent_consumer::store::memory::MemoryStore;
use idempotent_consumer::store::{BoxFuture, Store, StoreErrorKind};
use idempotent_consumer::time::{Deadline, ManualClock};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::common::effects::{PATIENCE, START, Scripted, clock, consumer, order, record, report, settings};
use crate::common::faulty_store::{Fault, FaultyStore};

/// What becomes of a send.
#[derive(Debug, Clone, Copy)]
enum Send {
    Refused,
    Hangs,
    Panics,
    AnswerLost,
}

/// Keeps letters; the next sends can be made to fail.
#[derive(Debug, Default)]
struct Letters {
    kept: Mutex<Vec<DeadLetter>>,
    faults: Mutex<VecDeque<Send>>,
}

impl Letters {
    fn failing(faults: impl IntoIterator<Item = Send>) -> Arc<Self> {
        Arc::new(Self { faults: Mutex::new(faults.into_iter().collect()), ..Self::default() })
    }

    fn ids(&self) -> Vec<String> {
        self.kept.lock().unwrap().iter().map(|letter| letter.message_id.clone()).collect()
    }

    fn reasons(&self) -> Vec<String> {
        let kept = self.kept.lock().unwrap();
        kept.iter().map(|letter| letter.attribute(attribute::REASON).unwrap().to_owned()).collect()
    }
}

impl DeadLetterQueue for Letters {
    fn send<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            let fault = self.faults.lock().unwrap().pop_front();
            match fault {
                Some(Send::Refused) => return Err(DeadLetterError::new("refused")),
                Some(Send::Hangs) => return std::future::pending().await,
                Some(Send::Panics) => panic!("made to panic"),
                Some(Send::AnswerLost) | None => self.kept.lock().unwrap().push(letter.clone()),
            }
            if fault.is_some() { Err(DeadLetterError::new("the answer was lost")) } else { Ok(()) }
        })
    }
}

fn batch<S: Store>(
    effect: Scripted,
    store: &Arc<S>,
    clock: &Arc<ManualClock>,
    letters: &Arc<Letters>,
) -> Batch<Consumer<Scripted>> {
    let mut settings = BatchSettings::default();
    settings.max_receive_count = Some(5);
    Batch::new(consumer(effect, store, clock), settings).with_dead_letters(Arc::clone(letters) as Arc<_>)
}

async fn process(
    batch: &Batch<Consumer<Scripted>>,
    messages: &[Message],
    clock: &ManualClock,
) -> Vec<(&'static str, Disposition)> {
    let reports = batch.process(messages, Deadline::after(PATIENCE, clock)).await.unwrap();
    reports.iter().map(|report| (report.outcome.name(), report.disposition())).collect()
}

fn applied(batch: &Batch<Consumer<Scripted>>) -> Vec<String> {
    batch.consumer().effect().applied.lock().unwrap().iter().map(|seen| seen.key.clone()).collect()
}

fn in_group(group: &str, key: &str) -> Message {
    order(&format!("message of {key}"), key).with_group(group)
}

/// Refuses keys that start with `bad` for good.
fn picky() -> Scripted {
    Scripted::new(Recovery::Rerun).applying(|seen| {
        if seen.key.starts_with("bad") { Err(EffectError::permanent("no such article")) } else { Ok(Value::Null) }
    })
}

use Disposition::{Ack, DeadLetter as Given, Retry};

#[tokio::test]
async fn what_can_never_succeed_is_sent_at_once_acked_and_does_not_hold_its_group() {
    let (clock, store, letters) = (clock(), Arc::new(MemoryStore::new()), Arc::new(Letters::default()));
    let batch = batch(picky(), &store, &clock, &letters);
    let conflicting = Message::new("conflict", json!({ "orderId": "a1", "amount": 13 }).to_string()).with_group("a");
    let messages = [
        in_group("a", "a1"),
        Message::new("rejected", "{\"orderId\": ").with_group("a"),
        in_group("a", "bad"),
        conflicting,
        in_group("a", "a5"),
        in_group("b", "b1"),
    ];
    assert_eq!(
        process(&batch, &messages, &clock).await,
        [
            ("executed", Ack),
            ("rejected", Ack),
            ("permanent", Ack),
            ("conflict", Ack),
            ("executed", Ack),
            ("executed", Ack)
        ]
    );
    assert_eq!(letters.ids(), ["rejected", "message of bad", "conflict"], "in the group's order");
    let reasons = letters.reasons();
    assert!(reasons[0].starts_with("rejected: "), "{reasons:?}");
    assert_eq!(reasons[1], "permanent: no such article");
    assert!(reasons[2].contains("in message message of a1"), "{reasons:?}");
    let kept = letters.kept.lock().unwrap().clone();
    let deduplication: BTreeSet<_> = kept.iter().map(|letter| &letter.deduplication_id).collect();
    assert_eq!(deduplication.len(), 3);
    for (letter, message) in kept.iter().zip(&messages[1..]) {
        assert_eq!((&letter.body, &letter.group), (&message.body, &message.group));
    }
    assert_eq!(kept[1].attribute(attribute::KEY), Some("test#bad"));
    assert_eq!(kept[1].attribute(attribute::ATTEMPT), Some("1"));
    assert_eq!((kept[0].attribute(attribute::KEY), kept[0].attribute(attribute::ATTEMPT)), (None, None));
    assert_eq!(record(&*store, "bad").await, None, "after a mend it shall run");
}

#[tokio::test(start_paused = true)]
async fn a_letter_that_is_not_sent_leaves_its_message_and_group_in_the_queue() {
    for fault in [Send::Refused, Send::Hangs, Send::Panics, Send::AnswerLost] {
        for bad in [in_group("a", "bad"), Message::new("message of bad", "no key").with_group("a")] {
            let (clock, store, letters) = (clock(), Arc::new(MemoryStore::new()), Letters::failing([fault]));
            let batch = batch(picky(), &store, &clock, &letters);
            let messages = [in_group("a", "a1"), bad, in_group("a", "a3"), in_group("b", "b1")];
            // In time, even if the send never ends.
            let ended = tokio::time::timeout(PATIENCE, process(&batch, &messages, &clock)).await.unwrap();
            assert_eq!(ended.iter().map(|(_, told)| *told).collect::<Vec<_>>(), [Ack, Given, Retry, Ack], "{fault:?}");
            assert_eq!(applied(&batch).iter().filter(|key| *key == "a3").count(), 0);
            // It comes again, and this time the letter is sent.
            let ended = process(&batch, &messages, &clock).await;
            assert!(ended.iter().all(|(_, told)| *told == Ack), "{fault:?}: {ended:?}");
            let copies = if matches!(fault, Send::AnswerLost) { 2 } else { 1 };
            assert_eq!(letters.ids(), vec!["message of bad"; copies], "{fault:?}");
            assert_eq!(applied(&batch).last().unwrap(), "a3");
        }
    }
}

#[tokio::test]
async fn on_its_last_receive_a_message_that_could_not_be_sent_is_left_to_the_queue_and_its_mates_go_on() {
    let (clock, store, letters) = (clock(), Arc::new(MemoryStore::new()), Letters::failing([Send::Refused]));
    let batch = batch(picky(), &store, &clock, &letters);
    let messages = ["bad", "a2"].map(|key| in_group("a", key).with_receive_count(5));
    assert_eq!(process(&batch, &messages, &clock).await, [("permanent", Given), ("executed", Ack)]);
}

#[tokio::test]
async fn a_parked_message_reaches_the_queue_once() {
    let (clock, store, letters) = (clock(), Arc::new(MemoryStore::new()), Arc::new(Letters::default()));
    let effect = Scripted::new(Recovery::Park).applying(|_| Err(EffectError::unknown("connection lost")));
    let batch = batch(effect, &store, &clock, &letters);
    let messages = ["a1", "a2"].map(|key| in_group("a", key));
    assert_eq!(process(&batch, &messages, &clock).await, [("unknown", Retry), ("unstarted", Retry)]);
    assert_eq!(letters.ids(), [""; 0]);
    clock.advance(Duration::from_mins(1));
    // The takeover parks it; it is acked, so there is no third receive.
    assert_eq!(process(&batch, &messages, &clock).await, [("parked", Ack), ("unknown", Retry)]);
    assert_eq!(letters.ids(), ["message of a1"]);
    let letter = letters.kept.lock().unwrap()[0].clone();
    assert_eq!(letter.attribute(attribute::ATTEMPT), Some("2"));
    assert!(letter.attribute(attribute::REASON).unwrap().starts_with("parked: "));
    assert_eq!(applied(&batch), ["a1", "a2"]);
}

#[tokio::test]
async fn a_retry_is_no_dead_letter() {
    let (clock, store, letters) = (clock(), Arc::new(MemoryStore::new()), Arc::new(Letters::default()));
    let effect = Scripted::new(Recovery::Rerun).applying(|_| Err(EffectError::not_applied("busy")));
    let batch = batch(effect, &store, &clock, &letters);
    let message = in_group("a", "a1").with_receive_count(5);
    assert_eq!(process(&batch, &[message], &clock).await, [("not-applied", Retry)]);
    assert_eq!(letters.ids(), [""; 0], "its queue moves it");
}

#[tokio::test]
async fn a_letter_sent_is_acked_even_if_nothing_else_could_be_claimed() {
    let (clock, store, letters) = (clock(), Arc::new(FaultyStore::default()), Arc::new(Letters::default()));
    store.fail_always(Some(Fault::NotSent(StoreErrorKind::Unavailable)));
    let batch = batch(picky(), &store, &clock, &letters);
    let messages = [Message::new("rejected", "no key"), in_group("b", "b1")];
    assert_eq!(process(&batch, &messages, &clock).await, [("rejected", Ack), ("store-failed", Retry)]);
    // Without a letter the whole invocation fails, as ever.
    let error = batch.process(&messages[1..], Deadline::after(PATIENCE, &*clock)).await.unwrap_err();
    assert!(matches!(error, BatchError::StoreAway(_)), "{error}");
}

#[tokio::test]
async fn without_a_queue_the_message_is_reported_failed() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch = Batch::new(consumer(picky(), &store, &clock), BatchSettings::default());
    let messages = ["bad", "a2"].map(|key| in_group("a", key));
    assert_eq!(process(&batch, &messages, &clock).await, [("permanent", Given), ("unstarted", Retry)]);
}

#[tokio::test]
async fn a_letter_is_sent_before_a_duplicate_in_its_group_has_its_turn() {
    let (clock, store, letters) = (clock(), Arc::new(MemoryStore::new()), Arc::new(Letters::default()));
    let calls = Arc::new(AtomicUsize::new(0));
    let effect = {
        let calls = Arc::clone(&calls);
        Scripted::new(Recovery::Rerun).applying(move |_| match calls.fetch_add(1, Ordering::SeqCst) {
            0 => Err(EffectError::permanent("not yet")),
            _ => Ok(Value::Null),
        })
    };
    let batch = batch(effect, &store, &clock, &letters);
    let messages = [order("first", "a").with_group("g"), order("second", "a").with_group("g")];
    assert_eq!(process(&batch, &messages, &clock).await, [("permanent", Ack), ("executed", Ack)]);
    assert_eq!(letters.ids(), ["first"]);
}

// ---- the letter ------------------------------------------------------------------------

fn letter(message: &Message, reason: &str, keep: &[&str]) -> DeadLetter {
    DeadLetter::new(message, &report(message, Outcome::Permanent { reason: reason.to_owned() }), keep)
}

/// What SQS lets into a text.
fn sendable(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | ' '..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
}

fn fits(letter: &DeadLetter) -> bool {
    let attributes: usize =
        letter.attributes.iter().map(|(name, value)| name.len() + "String".len() + value.len()).sum();
    letter.attributes.len() <= MAX_ATTRIBUTES && letter.body.len() + attributes <= MAX_LETTER_BYTES
}

#[test]
fn every_fact_of_the_message_is_in_its_letter() {
    let mut message = order("m-1", "A-1").with_group("g").with_deduplication_id("d-1").with_attribute("tenant", "acme");
    message.source = Some("arn:aws:sqs:eu-central-1:123456789012:orders.fifo".to_owned());
    message.first_received_at = Some(START);
    let letter = letter(&message, "no", &[]);
    let attributes: Vec<_> = letter.attributes.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(
        attributes,
        [
            ("original-message-id", "m-1"),
            ("original-deduplication-id", "d-1"),
            ("dead-letter-reason", "permanent: no"),
            ("original-source-arn", "arn:aws:sqs:eu-central-1:123456789012:orders.fifo"),
            ("first-received-at", "2030-03-17T17:46:40.000Z"),
            ("tenant", "acme"),
        ]
    );
    assert_ne!(letter.deduplication_id, "d-1");
}

#[test]
fn a_reason_is_cut_between_characters_and_holds_nothing_that_sqs_refuses() {
    let message = order("m-1", "A-1");
    let text = |reason: &str| letter(&message, reason, &[]).attribute(attribute::REASON).unwrap().to_owned();
    assert_eq!(text("a\0b\u{b}c\td\u{ffff}e\u{7f}"), "permanent: a\\u{0}b\\u{b}c\td\\u{ffff}e\u{7f}");
    let long = text(&"ä".repeat(MAX_REASON_BYTES));
    assert!((MAX_REASON_BYTES - 1..=MAX_REASON_BYTES).contains(&long.len()), "{}", long.len());
}

#[test]
fn of_ten_attributes_those_of_the_key_are_kept_first() {
    let mut message = order("m-1", "A-1").with_deduplication_id("d-1");
    for number in 0..10 {
        message = message.with_attribute(format!("a{number}"), "x");
    }
    let letter = letter(&message, "no", &["a8", "a9"]);
    assert!(fits(&letter));
    let theirs: Vec<_> =
        letter.attributes.iter().map(|(name, _)| name.as_str()).filter(|name| name.starts_with('a')).collect();
    assert_eq!(theirs[..2], ["a8", "a9"]);
    assert_eq!(letter.attributes.len(), MAX_ATTRIBUTES);
}

#[tokio::test]
async fn the_attributes_that_the_key_is_made_of_are_among_them() {
    let (clock, store, letters) = (clock(), Arc::new(MemoryStore::new()), Arc::new(Letters::default()));
    let mut settings = settings();
    settings.key = "attribute:z-tenant, /orderId".parse().unwrap();
    let consumer = Consumer::new(picky(), Arc::clone(&store) as Arc<_>, settings);
    let batch = Batch::new(consumer.with_clock(Arc::clone(&clock) as Arc<_>), BatchSettings::default())
        .with_dead_letters(Arc::clone(&letters) as Arc<_>);
    let mut message = order("m-1", "A-1").with_attribute("z-tenant", "bad");
    for number in 0..10 {
        message = message.with_attribute(format!("a{number}"), "x");
    }
    assert_eq!(process(&batch, &[message], &clock).await, [("permanent", Disposition::Ack)]);
    assert_eq!(letters.kept.lock().unwrap()[0].attribute("z-tenant"), Some("bad"));
}

#[test]
fn a_body_that_leaves_no_room_goes_without_attributes() {
    for room in [0, 1, 40, 200, 5000] {
        let message = Message::new("m-1", "x".repeat(MAX_LETTER_BYTES - room)).with_attribute("tenant", "acme");
        assert!(fits(&letter(&message, &"r".repeat(3000), &[])), "{room}");
    }
}

/// The message as it comes back from the dead-letter queue.
fn redriven(letter: &DeadLetter, id: &str) -> Message {
    let mut message = Message::new(id, letter.body.clone()).with_deduplication_id(letter.deduplication_id.clone());
    message.group.clone_from(&letter.group);
    message.attributes.extend(letter.attributes.iter().cloned());
    message
}

#[test]
fn a_redriven_message_keeps_its_key_however_often_and_whatever_the_key_is_made_of() {
    for expression in ["/orderId", "attribute:tenant,/orderId", "deduplication-id", "message-id", "content-hash"] {
        let expression: KeyExpression = expression.parse().unwrap();
        let keep: Vec<_> = expression.attributes().collect();
        let key = |message: &Message| expression.extract(message, Json::parse(&message.body).as_ref()).unwrap();
        let mut message = order("m-1", "A-1").with_deduplication_id("d-1").with_attribute("tenant", "acme");
        for number in 0..9 {
            message = message.with_attribute(format!("a{number}"), "x");
        }
        let first = key(&message);
        for round in 0..3 {
            message = redriven(&letter(&message, "no", &keep), &format!("redriven-{round}"));
            assert_eq!(key(&message), first, "{expression} in round {round}");
        }
        let letter = letter(&message, "still no", &keep);
        assert_eq!(letter.attribute(attribute::REASON), Some("permanent: still no"));
        assert_eq!(letter.attribute(attribute::MESSAGE_ID), Some("m-1"), "the first");
        assert_eq!(letter.message_id, "redriven-2", "the last");
    }
}

#[test]
fn an_attribute_by_such_a_name_alone_makes_no_letter() {
    let message = order("m-1", "A-1").with_attribute(attribute::MESSAGE_ID, "other");
    assert_eq!(message.original_id(), "m-1");
}

#[tokio::test]
async fn a_mended_message_runs_once_under_the_key_it_had() {
    let (clock, store, letters) = (clock(), Arc::new(MemoryStore::new()), Arc::new(Letters::default()));
    let mended = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let effect = {
        let mended = Arc::clone(&mended);
        Scripted::new(Recovery::Rerun).applying(move |_| {
            if mended.load(Ordering::SeqCst) { Ok(Value::Null) } else { Err(EffectError::permanent("no")) }
        })
    };
    let mut settings = settings();
    settings.key = "message-id".parse().unwrap();
    let consumer =
        Consumer::new(effect, Arc::clone(&store) as Arc<_>, settings).with_clock(Arc::clone(&clock) as Arc<_>);
    let batch = Batch::new(consumer, BatchSettings::default()).with_dead_letters(Arc::clone(&letters) as Arc<_>);
    assert_eq!(process(&batch, &[in_group("a", "a1")], &clock).await, [("permanent", Ack)]);
    mended.store(true, Ordering::SeqCst);
    let letter = letters.kept.lock().unwrap()[0].clone();
    for (id, outcome) in [("redriven", "executed"), ("redriven again", "replayed")] {
        assert_eq!(process(&batch, &[redriven(&letter, id)], &clock).await, [(outcome, Ack)]);
    }
    assert!(record(&*store, "message of a1").await.is_some());
}

proptest! {
    #[test]
    fn any_letter_fits_and_can_be_sent(
        body in ".{0,40}",
        filler in prop_oneof![Just(0), MAX_LETTER_BYTES - 3000..MAX_LETTER_BYTES - 200],
        reason in proptest::collection::vec(any::<char>(), 0..600),
        attributes in proptest::collection::btree_map("[a-z-]{1,12}", proptest::collection::vec(any::<char>(), 0..60), 0..14),
        deduplication in proptest::option::of("[ -~]{1,128}"),
    ) {
        let mut message = Message::new("m-1", body + &"x".repeat(filler)).with_group("g");
        message.deduplication_id = deduplication;
        for (name, value) in attributes {
            message = message.with_attribute(name, value.into_iter().collect::<String>());
        }
        let letter = letter(&message, &reason.into_iter().collect::<String>(), &["a"]);
        prop_assert_eq!(&letter.body, &message.body);
        prop_assert!(fits(&letter));
        prop_assert!(letter.attributes.iter().all(|(_, value)| !value.is_empty() && value.chars().all(sendable)));
        let names: BTreeSet<_> = letter.attributes.iter().map(|(name, _)| name).collect();
        prop_assert_eq!(names.len(), letter.attributes.len(), "each once");
    }
}
