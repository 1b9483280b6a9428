//! Many messages: order, parallelism, group stop, claims taken ahead, single flight,
//! store outage, deadline.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotent_consumer::batch::{Batch, BatchError, BatchSettings};
use idempotent_consumer::consumer::{Consumer, StoreOutage};
use idempotent_consumer::effect::{EffectError, Recovery, Verification};
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Disposition, Report};
use idempotent_consumer::record::{Owner, Record, RecordId, State, StoredResult};
use idempotent_consumer::store::memory::MemoryStore;
use idempotent_consumer::store::{Store, StoreErrorKind};
use idempotent_consumer::time::{Clock, Deadline, Lease, ManualClock};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::common::effects::{PATIENCE, START, Scripted, clock, consumer, order, record, settings};
use crate::common::faulty_store::{Call, Fault, FaultyStore};

fn batch<S: Store>(effect: Scripted, store: &Arc<S>, clock: &Arc<ManualClock>) -> Batch<Consumer<Scripted>> {
    batch_with(effect, store, clock, |_| {})
}

fn batch_with<S: Store>(
    effect: Scripted,
    store: &Arc<S>,
    clock: &Arc<ManualClock>,
    change: impl FnOnce(&mut BatchSettings),
) -> Batch<Consumer<Scripted>> {
    let mut settings = BatchSettings::default();
    change(&mut settings);
    Batch::new(consumer(effect, store, clock), settings)
}

async fn process(batch: &Batch<Consumer<Scripted>>, messages: &[Message], clock: &dyn Clock) -> Vec<Report> {
    batch.process(messages, Deadline::after(PATIENCE, clock)).await.unwrap()
}

fn outcomes(reports: &[Report]) -> Vec<&'static str> {
    reports.iter().map(|report| report.outcome.name()).collect()
}

fn applied(batch: &Batch<Consumer<Scripted>>) -> Vec<String> {
    batch.consumer().effect().applied.lock().unwrap().iter().map(|seen| seen.key.clone()).collect()
}

/// An effect that fails for some keys and lets others run in between.
fn failing(recovery: Recovery, keys: &'static [&'static str]) -> Scripted {
    Scripted::new(recovery).applying_async(move |seen| async move {
        tokio::task::yield_now().await;
        if keys.contains(&seen.key.as_str()) { Err(EffectError::not_applied("refused")) } else { Ok(Value::Null) }
    })
}

fn in_group(group: &str, key: &str) -> Message {
    order(&format!("message of {key}"), key).with_group(group)
}

#[tokio::test]
async fn the_first_message_that_is_not_acked_stops_its_group_and_no_other() {
    for recovery in [Recovery::Rerun, Recovery::Park] {
        let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
        let batch = batch(failing(recovery, &["a2"]), &store, &clock);
        let messages = ["a1", "b1", "a2", "c1", "a3", "b2", "a4"].map(|key| in_group(&key[..1], key));
        let reports = process(&batch, &messages, &*clock).await;
        assert_eq!(
            outcomes(&reports),
            ["executed", "executed", "not-applied", "executed", "unstarted", "executed", "unstarted"]
        );
        let applied = applied(&batch);
        assert!(!applied.contains(&"a3".to_owned()));
        for key in ["a2", "a3", "a4"] {
            assert_eq!(record(&*store, key).await, None, "{key} holds no claim");
        }
        assert!(reports.iter().zip(&messages).all(|(report, message)| report.message_id == message.id));
    }
}

#[tokio::test]
async fn a_poison_body_costs_its_group_and_no_other() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch = batch(Scripted::new(Recovery::Rerun), &store, &clock);
    let messages = [
        in_group("a", "a1"),
        Message::new("poison", "{\"orderId\": ").with_group("a"),
        in_group("a", "a3"),
        in_group("b", "b1"),
    ];
    let reports = process(&batch, &messages, &*clock).await;
    assert_eq!(outcomes(&reports), ["executed", "rejected", "unstarted", "executed"]);
}

#[tokio::test]
async fn a_message_failing_on_its_last_receive_does_not_take_its_group_along() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch =
        batch_with(failing(Recovery::Rerun, &["a1"]), &store, &clock, |settings| settings.max_receive_count = Some(5));
    for (receives, mate) in [(4, "unstarted"), (5, "executed")] {
        let messages = ["a1", "a2"].map(|key| in_group("a", key).with_receive_count(receives));
        assert_eq!(outcomes(&process(&batch, &messages, &*clock).await), ["not-applied", mate]);
    }
}

#[tokio::test]
async fn a_head_in_flight_elsewhere_holds_its_group_even_on_its_last_receive() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    store.insert(in_progress("a1", Lease::until(START.plus(PATIENCE)), 1));
    let batch =
        batch_with(Scripted::new(Recovery::Rerun), &store, &clock, |settings| settings.max_receive_count = Some(5));
    let messages = ["a1", "a2"].map(|key| in_group("a", key).with_receive_count(5));
    assert_eq!(outcomes(&process(&batch, &messages, &*clock).await), ["in-flight", "unstarted"]);
}

#[tokio::test]
async fn messages_without_a_group_are_each_their_own() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch = batch(failing(Recovery::Rerun, &["1"]), &store, &clock);
    let messages = ["1", "2", "3"].map(|key| order(key, key));
    assert_eq!(outcomes(&process(&batch, &messages, &*clock).await), ["not-applied", "executed", "executed"]);
}

#[tokio::test]
async fn groups_run_side_by_side_up_to_the_limit_and_one_message_of_a_group_at_a_time() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let running = Arc::new(Mutex::new((BTreeSet::new(), 0)));
    let effect = {
        let running = Arc::clone(&running);
        Scripted::new(Recovery::Rerun).applying_async(move |seen| {
            let running = Arc::clone(&running);
            async move {
                {
                    let mut running = running.lock().unwrap();
                    assert!(running.0.insert(seen.key[..1].to_owned()), "two of one group at a time");
                    running.1 = running.1.max(running.0.len());
                }
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                running.lock().unwrap().0.remove(&seen.key[..1]);
                Ok(Value::Null)
            }
        })
    };
    let batch = batch_with(effect, &store, &clock, |settings| settings.max_concurrency = 3);
    let messages: Vec<_> =
        ["a1", "b1", "c1", "d1", "e1", "a2", "b2", "c2", "d2", "e2"].map(|key| in_group(&key[..1], key)).to_vec();
    let reports = process(&batch, &messages, &*clock).await;
    assert!(outcomes(&reports).iter().all(|outcome| *outcome == "executed"), "{reports:?}");
    assert_eq!(running.lock().unwrap().1, 3);
}

/// How far the claim of the second message is when the first one's effect runs.
async fn claims_while_the_first_runs(recovery: Recovery) -> usize {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let claims = Arc::new(AtomicUsize::new(0));
    let effect = {
        let (store, claims) = (Arc::clone(&store), Arc::clone(&claims));
        Scripted::new(recovery).applying_async(move |seen| {
            let (store, claims) = (Arc::clone(&store), Arc::clone(&claims));
            async move {
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                if seen.key == "a1" {
                    claims.store(store.calls(), Ordering::SeqCst);
                }
                Ok(Value::Null)
            }
        })
    };
    let batch = batch(effect, &store, &clock);
    let messages = ["a1", "a2"].map(|key| in_group("a", key));
    process(&batch, &messages, &*clock).await;
    assert_eq!(applied(&batch), ["a1", "a2"]);
    claims.load(Ordering::SeqCst)
}

#[tokio::test]
async fn the_next_claim_of_a_group_is_taken_while_the_effect_runs_unless_a_crash_would_park_it() {
    assert_eq!(claims_while_the_first_runs(Recovery::Rerun).await, 2);
    assert_eq!(claims_while_the_first_runs(Recovery::Verify).await, 2);
    assert_eq!(claims_while_the_first_runs(Recovery::Park).await, 1);
}

#[tokio::test]
async fn no_effect_starts_before_the_result_of_the_one_before_it_is_stored() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let effect = {
        let store = Arc::clone(&store);
        Scripted::new(Recovery::Rerun).applying_async(move |seen| {
            let store = Arc::clone(&store);
            async move {
                if seen.key == "a2" {
                    let first = store.memory.load(&RecordId::new("test#a1")).await.unwrap().unwrap();
                    assert!(matches!(first.state, State::Completed { .. }), "{first:?}");
                }
                Ok(Value::Null)
            }
        })
    };
    let batch = batch(effect, &store, &clock);
    let reports = process(&batch, &["a1", "a2"].map(|key| in_group("a", key)), &*clock).await;
    assert_eq!(outcomes(&reports), ["executed", "executed"]);
}

#[tokio::test]
async fn a_takeover_made_ahead_and_not_begun_does_not_forget_the_attempt_before_it() {
    // a2 was begun by a consumer that died. a1 fails, so the takeover of a2 that was made
    // ahead is given back; the next delivery must still verify a2 before applying it.
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    store.insert(in_progress("a2", Lease::GIVEN_UP, 1));
    let messages = ["a1", "a2"].map(|key| in_group("a", key));
    let first = batch(failing(Recovery::Verify, &["a1"]), &store, &clock);
    assert_eq!(outcomes(&process(&first, &messages, &*clock).await), ["not-applied", "unstarted"]);
    assert_eq!(record(&*store, "a2").await.unwrap().attempt, 2);

    let effect = Scripted::new(Recovery::Verify).verifying(|_| Ok(Verification::Done(json!("it was applied"))));
    let second = batch(effect, &store, &clock);
    assert_eq!(outcomes(&process(&second, &messages, &*clock).await), ["executed", "recovered"]);
    assert_eq!(applied(&second), ["a1"]);
}

#[tokio::test]
async fn one_key_under_two_messages_is_applied_once_in_a_batch() {
    let clock = clock();
    // In one group, in another, and in none.
    let messages = [
        order("m-1", "k").with_group("a"),
        order("m-2", "k").with_group("a"),
        order("m-3", "k").with_group("b"),
        order("m-4", "k"),
    ];
    for recovery in [Recovery::Rerun, Recovery::Park] {
        let store = Arc::new(MemoryStore::new());
        let batch = batch(failing(recovery, &[]), &store, &clock);
        let mut names = outcomes(&process(&batch, &messages, &*clock).await);
        names.sort_unstable();
        assert_eq!(names, ["executed", "replayed", "replayed", "replayed"]);
        assert_eq!(applied(&batch), ["k"]);
    }
}

#[tokio::test]
async fn one_key_in_two_batches_of_one_process_is_applied_once() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch = batch(failing(Recovery::Park, &[]), &store, &clock);
    let (first, second) = ([order("m-1", "k")], [order("m-2", "k")]);
    let (first, second) =
        futures_util::future::join(process(&batch, &first, &*clock), process(&batch, &second, &*clock)).await;
    assert_eq!((outcomes(&first), outcomes(&second)), (vec!["executed"], vec!["replayed"]));
}

#[tokio::test]
async fn crossed_keys_in_two_groups_do_not_wait_for_each_other_for_ever() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch = batch(failing(Recovery::Rerun, &[]), &store, &clock);
    let messages = [("a", "1"), ("b", "2"), ("a", "2"), ("b", "1"), ("a", "3"), ("b", "3")]
        .map(|(group, key)| order(&format!("{group}{key}"), key).with_group(group));
    let reports = process(&batch, &messages, &*clock).await;
    assert!(reports.iter().all(|report| report.outcome.disposition() == Disposition::Ack), "{reports:?}");
    assert_eq!(applied(&batch).len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_a_key_leaves_time_to_answer() {
    // Another batch of this process holds the key for longer than this one has.
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Rerun).applying_async(|seen| async move {
        if seen.key == "k" {
            tokio::time::sleep(Duration::from_secs(20)).await;
        }
        Ok(Value::Null)
    });
    let batch = batch(effect, &store, &clock);
    let (holder, waiter) = ([order("m-1", "k")], [order("m-2", "k"), order("m-3", "free")]);
    let deadline = Deadline::after(Duration::from_secs(5), &*clock);
    let short = async {
        let reports = batch.process(&waiter, deadline).await.unwrap();
        (reports, deadline.remaining())
    };
    let (_, (reports, left)) = futures_util::future::join(process(&batch, &holder, &*clock), short).await;
    assert_eq!(outcomes(&reports), ["unstarted", "executed"]);
    assert!(!left.is_zero());
}

#[tokio::test(start_paused = true)]
async fn a_group_that_has_stopped_does_not_wait_for_a_key_any_more() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Rerun).applying_async(|seen| async move {
        tokio::time::sleep(Duration::from_secs(if seen.key == "k" { 20 } else { 1 })).await;
        if seen.key == "fails" { Err(EffectError::not_applied("refused")) } else { Ok(Value::Null) }
    });
    let batch = batch(effect, &store, &clock);
    let (holder, waiter) = ([order("m-1", "k")], [in_group("a", "fails"), in_group("a", "k")]);
    let start = Deadline::after(PATIENCE, &*clock);
    let short = async {
        let reports = process(&batch, &waiter, &*clock).await;
        (reports, PATIENCE.saturating_sub(start.remaining()))
    };
    let (_, (reports, took)) = futures_util::future::join(process(&batch, &holder, &*clock), short).await;
    assert_eq!(outcomes(&reports), ["not-applied", "unstarted"]);
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_claim_taken_ahead_does_not_keep_a_key_from_another_group() {
    for recovery in [Recovery::Rerun, Recovery::Park] {
        let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
        let effect = Scripted::new(recovery).applying_async(|seen| async move {
            if seen.key == "hangs" { std::future::pending().await } else { Ok(Value::Null) }
        });
        let batch = batch(effect, &store, &clock);
        let messages = [in_group("a", "hangs"), order("m-2", "k").with_group("a"), order("m-3", "k").with_group("b")];
        assert_eq!(outcomes(&process(&batch, &messages, &*clock).await), ["unknown", "unstarted", "executed"]);
    }
}

#[tokio::test]
async fn what_was_in_flight_when_looked_at_ahead_is_looked_at_again_at_its_turn() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let elsewhere = in_progress("a2", Lease::until(START.plus(PATIENCE)), 1);
    store.insert(elsewhere.clone());
    let effect = {
        let store = Arc::clone(&store);
        Scripted::new(Recovery::Rerun).applying_async(move |_| {
            let (store, mut done) = (Arc::clone(&store), elsewhere.clone());
            async move {
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                // The other consumer ends while the first message's effect runs.
                done.state = State::Completed { result: StoredResult::whole("1"), completed_at: Some(START) };
                store.insert(done);
                Ok(Value::Null)
            }
        })
    };
    let batch = batch(effect, &store, &clock);
    let messages = ["a1", "a2"].map(|key| in_group("a", key));
    assert_eq!(outcomes(&process(&batch, &messages, &*clock).await), ["executed", "replayed"]);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_fails_the_batch() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    store.fail_always(Some(Fault::Hangs));
    let batch = batch(Scripted::new(Recovery::Rerun), &store, &clock);
    let deadline = Deadline::after(Duration::from_secs(3), &*clock);
    let error = batch.process(&["1", "2"].map(|key| order(key, key)), deadline).await.unwrap_err();
    assert!(matches!(error, BatchError::StoreAway(_)), "{error:?}");
    assert!(!deadline.remaining().is_zero(), "there is time to say so");
}

#[tokio::test]
async fn a_failed_duplicate_further_down_its_group_is_not_claimed_for_nothing() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let batch = batch(failing(Recovery::Rerun, &["k"]), &store, &clock);
    let messages = [order("m-1", "k").with_group("a"), order("m-2", "k").with_group("a")];
    assert_eq!(outcomes(&process(&batch, &messages, &*clock).await), ["not-applied", "unstarted"]);
    assert_eq!(store.log().iter().filter(|(call, _)| *call == Call::Claim).count(), 1);
}

#[tokio::test]
async fn a_store_that_is_away_fails_the_batch_and_is_not_asked_for_ever() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    store.fail_always(Some(Fault::NotSent(StoreErrorKind::Unavailable)));
    let batch = batch_with(Scripted::new(Recovery::Rerun), &store, &clock, |settings| settings.max_concurrency = 1);
    let messages: Vec<_> = (0..10).map(|n| order(&n.to_string(), &n.to_string())).collect();
    let error = batch.process(&messages, Deadline::after(PATIENCE, &*clock)).await.unwrap_err();
    assert!(matches!(error, BatchError::StoreAway(_)), "{error:?}");
    assert_eq!(store.calls(), 3);
    assert!(applied(&batch).is_empty());

    // Back again: nothing is remembered against it.
    store.fail_always(None);
    assert_eq!(outcomes(&process(&batch, &messages, &*clock).await), ["executed"; 10]);
}

#[tokio::test]
async fn a_store_that_answered_once_makes_a_partial_failure() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    store.fail(Call::Claim, [Fault::NotSent(StoreErrorKind::Unavailable)]);
    let batch = batch_with(Scripted::new(Recovery::Rerun), &store, &clock, |settings| settings.max_concurrency = 1);
    let reports = process(&batch, &["1", "2"].map(|key| order(key, key)), &*clock).await;
    assert_eq!(outcomes(&reports), ["store-failed", "executed"]);
}

/// A batch whose effects run although the store is away, one after the other.
fn one_at_a_time_even_unprotected(store: &Arc<FaultyStore>, clock: &Arc<ManualClock>) -> Batch<Consumer<Scripted>> {
    let mut settings = settings();
    settings.store_outage = StoreOutage::Process;
    let consumer = Consumer::new(Scripted::new(Recovery::Rerun), Arc::clone(store) as Arc<_>, settings);
    let mut one_at_a_time = BatchSettings::default();
    one_at_a_time.max_concurrency = 1;
    Batch::new(consumer.with_clock(Arc::clone(clock) as Arc<_>), one_at_a_time)
}

#[tokio::test]
async fn a_store_that_is_away_is_not_asked_for_ever_if_effects_run_all_the_same() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    store.fail_always(Some(Fault::NotSent(StoreErrorKind::Unavailable)));
    let batch = one_at_a_time_even_unprotected(&store, &clock);
    let messages: Vec<_> = (0..10).map(|n| order(&n.to_string(), &n.to_string())).collect();
    assert_eq!(outcomes(&process(&batch, &messages, &*clock).await), ["unprotected"; 10]);
    assert_eq!(store.calls(), 3);
}

#[tokio::test]
async fn what_ran_without_the_store_is_acked_though_the_rest_of_its_batch_could_not() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let [away, refused] = [StoreErrorKind::Unavailable, StoreErrorKind::Refused].map(Fault::NotSent);
    store.fail(Call::Claim, [away, refused]);
    let batch = one_at_a_time_even_unprotected(&store, &clock);
    let reports = process(&batch, &["1", "2"].map(|key| order(key, key)), &*clock).await;
    assert_eq!(outcomes(&reports), ["unprotected", "store-failed"], "a failed invocation would bring both again");
}

#[tokio::test]
async fn trouble_with_single_records_does_not_mean_that_the_store_is_away() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let batch = batch_with(Scripted::new(Recovery::Rerun), &store, &clock, |settings| settings.max_concurrency = 1);
    let [unreadable, invalid] = [StoreErrorKind::Unreadable, StoreErrorKind::Invalid].map(Fault::NotSent);
    store.fail(Call::Claim, [unreadable, invalid, unreadable]);
    let messages = ["1", "2", "3", "4"].map(|key| order(key, key));
    let reports = process(&batch, &messages, &*clock).await;
    assert_eq!(outcomes(&reports), ["store-failed", "store-failed", "store-failed", "executed"]);

    // Not even if there is nothing else.
    store.fail(Call::Claim, [unreadable]);
    assert_eq!(outcomes(&process(&batch, &[order("5", "5")], &*clock).await), ["store-failed"]);
}

#[tokio::test(start_paused = true)]
async fn messages_are_not_begun_without_time_to_end() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let effect = Scripted::new(Recovery::Rerun).applying_async(|_| async {
        tokio::time::sleep(Duration::from_millis(800)).await;
        Ok(Value::Null)
    });
    let batch = batch(effect, &store, &clock);
    let messages: Vec<_> = (1..=5).map(|n| in_group("a", &format!("a{n}"))).collect();
    let deadline = Deadline::after(Duration::from_secs(3), &*clock);
    let reports = batch.process(&messages, deadline).await.unwrap();
    assert_eq!(outcomes(&reports), ["executed", "executed", "executed", "unstarted", "unstarted"]);
    assert!(!deadline.remaining().is_zero());
    assert_eq!(record(&*store, "a4").await, None, "the claim taken ahead was given back");
}

#[tokio::test(start_paused = true)]
async fn the_time_that_a_message_needs_is_enough() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch = batch(Scripted::new(Recovery::Rerun), &store, &clock);
    let deadline = Deadline::after(BatchSettings::default().min_time_per_message, &*clock);
    assert_eq!(outcomes(&batch.process(&[order("m", "k")], deadline).await.unwrap()), ["executed"]);
}

#[tokio::test(start_paused = true)]
async fn too_little_time_for_any_message_is_an_error_and_not_a_silent_loop() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let batch = batch(Scripted::new(Recovery::Rerun), &store, &clock);
    let deadline = Deadline::after(Duration::from_millis(400), &*clock);
    let error = batch.process(&[order("m", "k")], deadline).await.unwrap_err();
    assert!(matches!(error, BatchError::TooLittleTime { .. }), "{error:?}");
    assert!(batch.process(&[], deadline).await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_limit_of_an_effect_is_time_that_its_message_needs() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let limit = Duration::from_secs(5);
    let batch = batch(Scripted::new(Recovery::Rerun).limited_to(limit), &store, &clock);
    let reserve = settings().answer_reserve;
    let enough = Deadline::after(limit + reserve, &*clock);
    let short = enough.earlier(Duration::from_millis(1));
    let error = batch.process(&[order("m", "k")], short).await.unwrap_err();
    assert!(matches!(error, BatchError::TooLittleTime { needed, .. } if needed == limit + reserve), "{error:?}");
    assert_eq!(outcomes(&batch.process(&[order("m", "k")], enough).await.unwrap()), ["executed"]);
}

fn in_progress(key: &str, lease: Lease, attempt: u64) -> Record {
    let key = idempotent_consumer::key::KeyValue::from_string(key).unwrap();
    Record {
        id: RecordId::new(format!("test#{}", key.as_str())),
        state: State::InProgress { owner: Some(Owner::random()), lease: Some(lease) },
        attempt,
        expires: START.plus(Duration::from_hours(1)).to_seconds(),
        fingerprint: None,
        message_id: Some("of another consumer".into()),
        claimed_at: Some(START),
    }
}

/// How an application of a key ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ending {
    Applied,
    NotApplied,
    Unknown,
    Panics,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever the groups, keys, endings and store faults: deliveries repeated until all
    /// is acked apply each key's effect successfully once (rerun: the target here counts
    /// only successes), in order within each group, and every ack has a stored result.
    #[test]
    fn the_promises_hold_for_any_batch(
        messages in prop::collection::vec((0_usize..3, 0_usize..8), 1..10),
        endings in prop::collection::vec(
            prop_oneof![Just(Ending::Applied), Just(Ending::NotApplied), Just(Ending::Unknown), Just(Ending::Panics)],
            0..12,
        ),
        lost in prop::collection::vec(any::<bool>(), 0..12),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async move {
            let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
            let faults = lost.into_iter().map(|lost| {
                if lost { Fault::AnswerLost } else { Fault::NotSent(StoreErrorKind::Unavailable) }
            });
            store.fail(Call::Complete, faults.clone().take(4));
            store.fail(Call::Claim, faults.clone().skip(4).take(4));
            store.fail(Call::Release, faults.clone().skip(8).take(2));
            store.fail(Call::SetLease, faults.skip(10));
            let endings = Mutex::new(endings.into_iter());
            let target: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
            let effect = {
                let target = Arc::clone(&target);
                Scripted::new(Recovery::Rerun).applying(move |seen| {
                    let ending = endings.lock().unwrap().next().unwrap_or(Ending::Applied);
                    let mut target = target.lock().unwrap();
                    // The target deduplicates by key, as rerun demands.
                    let mut apply = || {
                        target.entry(seen.key.clone()).or_insert(1);
                    };
                    match ending {
                        Ending::Applied => { apply(); Ok(json!(seen.key)) }
                        Ending::NotApplied => Err(EffectError::not_applied("refused")),
                        Ending::Unknown => { apply(); Err("cut off".into()) }
                        Ending::Panics => {
                            drop(target);
                            // A panic without the hook's noise.
                            std::panic::resume_unwind(Box::new("in an effect"))
                        }
                    }
                })
            };
            let batch = batch(effect, &store, &clock);
            let mut left: Vec<Message> = messages
                .iter()
                .enumerate()
                .map(|(n, (group, key))| order(&n.to_string(), &format!("k{key}")).with_group(group.to_string()))
                .collect();
            for _delivery in 0..40 {
                if let Ok(reports) = batch.process(&left, Deadline::after(PATIENCE, &*clock)).await {
                    for report in &reports {
                        if report.outcome.disposition() == Disposition::Ack {
                            let key = report.key.as_ref().unwrap().value();
                            let record = record(&*store, key).await.expect("acked without a record");
                            let State::Completed { result, .. } = record.state else { panic!("acked while {record:?}") };
                            assert_eq!(report.outcome.result(), Some(&result), "every ack reports the stored result");
                        }
                    }
                    // A group's messages are acked from the front.
                    let mut failed_groups = BTreeSet::new();
                    for report in &reports {
                        let acked = report.outcome.disposition() == Disposition::Ack;
                        assert!(!acked || !failed_groups.contains(&report.group), "overtaken: {reports:?}");
                        if !acked {
                            failed_groups.insert(report.group.clone());
                        }
                    }
                    left = left.into_iter().zip(&reports)
                        .filter(|(_, report)| report.outcome.disposition() != Disposition::Ack)
                        .map(|(message, _)| message)
                        .collect();
                }
                if left.is_empty() {
                    break;
                }
                clock.advance(PATIENCE + Duration::from_secs(3));
            }
            assert!(left.is_empty(), "never acked: {left:?}");
            let keys: BTreeSet<_> = messages.iter().map(|(_, key)| format!("k{key}")).collect();
            assert_eq!(target.lock().unwrap().keys().cloned().collect::<BTreeSet<_>>(), keys);
        });
    }
}
