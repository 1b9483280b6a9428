//! One message through the protocol: what each ending does to the record, and what the
//! next delivery makes of it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotent_consumer::consumer::{Consume, Consumer, StoreOutage};
use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery, Verification};
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Disposition, Outcome, Report};
use idempotent_consumer::record::{Owner, Record, RecordId, State, StoredResult};
use idempotent_consumer::store::memory::MemoryStore;
use idempotent_consumer::store::{Store, StoreErrorKind};
use idempotent_consumer::time::{Deadline, Lease, ManualClock};
use serde_json::{Value, json};

use crate::common::effects::{PATIENCE, START, Scripted, clock, consumer, order, record, settings};
use crate::common::faulty_store::{Call, Fault, FaultyStore};
use crate::common::log::Log;

async fn deliver<E: Effect>(consumer: &Consumer<E>, message: &Message) -> Report {
    consumer.process(message, Deadline::after(PATIENCE, consumer.clock())).await
}

/// A clock, a store with the record of a consumer that died on attempt 1, and the time
/// after its lease.
async fn after_a_crash() -> (Arc<ManualClock>, Arc<FaultyStore>) {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let dying = consumer(Scripted::new(Recovery::Rerun).applying_async(|_| std::future::pending()), &store, &clock);
    // Dropped in the middle of the effect: as good as killed.
    let message = order("first", "A-1");
    let delivery = deliver(&dying, &message);
    assert!(tokio::time::timeout(Duration::from_secs(1), delivery).await.is_err());
    assert!(matches!(record(&*store, "A-1").await.unwrap().state, State::InProgress { .. }));
    clock.advance(PATIENCE + Duration::from_secs(3));
    (clock, store)
}

#[tokio::test]
async fn a_message_is_executed_once_and_its_duplicate_gets_the_same_result() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let consumer = consumer(Scripted::new(Recovery::Park), &store, &clock);

    let first = deliver(&consumer, &order("m-1", "A-1")).await;
    let result = StoredResult::whole(r#""A-1 by attempt 1""#);
    assert!(matches!(&first.outcome, Outcome::Executed { result: r } if *r == result), "{first:?}");
    assert_eq!((first.attempt, first.outcome.disposition()), (Some(1), Disposition::Ack));

    // Under another message id: the key is the order's.
    let second = deliver(&consumer, &order("m-2", "A-1")).await;
    assert!(matches!(&second.outcome, Outcome::Replayed { result: r } if *r == result), "{second:?}");
    assert_eq!(consumer.effect().applied.lock().unwrap().len(), 1);

    let record = record(&*store, "A-1").await.unwrap();
    assert_eq!((record.id.as_str(), record.id.to_string()), ("test#A-1", "test#A-1".to_owned()));
    assert_eq!(record.state, State::Completed { result, completed_at: Some(START) });
    assert_eq!(record.expires.get(), START.to_seconds().get() + 3600);
}

#[tokio::test]
async fn a_business_answer_is_a_result_like_any_other() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Rerun).applying(|_| Ok(json!("declined")));
    let consumer = consumer(effect, &store, &clock);
    for _ in 0..2 {
        let report = deliver(&consumer, &order("m-1", "A-1")).await;
        assert_eq!(report.outcome.result().unwrap().json, r#""declined""#);
    }
    assert_eq!(consumer.effect().applied.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn what_was_not_applied_is_forgotten_and_can_be_retried_at_once() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Park)
        .applying(|_| Err(EffectError::not_applied("refused").retry_after(Duration::from_secs(7))));
    let consumer = consumer(effect, &store, &clock);
    for _ in 0..3 {
        let report = deliver(&consumer, &order("m-1", "A-1")).await;
        let Outcome::NotApplied { reason, retry_after } = &report.outcome else { panic!("{report:?}") };
        assert_eq!((reason.as_str(), *retry_after), ("refused", Some(Duration::from_secs(7))));
        assert_eq!((report.attempt, report.outcome.disposition()), (Some(1), Disposition::Retry));
        assert_eq!(record(&*store, "A-1").await, None);
    }
}

#[tokio::test]
async fn a_permanent_failure_goes_to_a_person_and_runs_again_after_the_mend() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Park).applying(|_| Err(EffectError::permanent("no such customer")));
    let report = deliver(&consumer(effect, &store, &clock), &order("m-1", "A-1")).await;
    assert_eq!(report.outcome.disposition(), Disposition::DeadLetter);
    assert_eq!(report.outcome.reason().unwrap(), "no such customer");

    let mended = consumer(Scripted::new(Recovery::Park), &store, &clock);
    assert_eq!(deliver(&mended, &order("redriven", "A-1")).await.outcome.name(), "executed");
}

#[tokio::test]
async fn a_permanent_failure_after_an_attempt_without_an_outcome_says_so() {
    let (clock, store) = after_a_crash().await;
    let effect = Scripted::new(Recovery::Rerun).applying(|_| Err(EffectError::permanent("no such customer")));
    let report = deliver(&consumer(effect, &store, &clock), &order("m-1", "A-1")).await;
    assert_eq!(
        report.outcome.reason().unwrap(),
        "no such customer (an earlier attempt under this key ended without an outcome)"
    );
}

#[tokio::test]
async fn an_unknown_outcome_ends_the_lease_at_once_and_keeps_the_record() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Rerun).applying(|seen| match seen.attempt {
        1 => Err(std::io::Error::other("reset by peer").into()),
        n => Ok(json!(n)),
    });
    let consumer = consumer(effect, &store, &clock);
    let report = deliver(&consumer, &order("m-1", "A-1")).await;
    assert_eq!((report.outcome.name(), report.outcome.disposition()), ("unknown", Disposition::Retry));
    let State::InProgress { lease, .. } = record(&*store, "A-1").await.unwrap().state else { panic!() };
    assert_eq!(lease, Some(Lease::GIVEN_UP));

    let report = deliver(&consumer, &order("m-1", "A-1")).await;
    assert_eq!((report.outcome.name(), report.attempt), ("executed", Some(2)), "no waiting for a lease");
}

#[tokio::test]
async fn a_panic_is_an_unknown_outcome() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let consumer = consumer(Scripted::new(Recovery::Park).applying(|_| panic!("at the disco")), &store, &clock);
    let report = deliver(&consumer, &order("m-1", "A-1")).await;
    assert_eq!(report.outcome.name(), "unknown");
    assert!(report.outcome.reason().unwrap().contains("at the disco"));
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.outcome.name(), "parked");
}

#[tokio::test(start_paused = true)]
async fn an_effect_that_does_not_end_is_cancelled_before_the_deadline() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let effect = Scripted::new(Recovery::Park).applying_async(|_| std::future::pending());
    let consumer = consumer(effect, &store, &clock);
    let deadline = Deadline::after(Duration::from_secs(3), &*clock);
    let report = consumer.process(&order("m-1", "A-1"), deadline).await;
    assert_eq!(report.outcome.name(), "unknown");
    assert!(deadline.remaining() > Duration::ZERO, "there is time left to answer");
    let State::InProgress { lease, .. } = record(&*store, "A-1").await.unwrap().state else { panic!() };
    assert_eq!(lease, Some(Lease::GIVEN_UP), "and to write");
}

#[tokio::test(start_paused = true)]
async fn a_key_in_flight_is_left_alone_until_its_lease_and_the_clock_skew_are_over() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let (entered, wait) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let effect = {
        let (entered, wait) = (Arc::clone(&entered), Arc::clone(&wait));
        Scripted::new(Recovery::Rerun).applying_async(move |seen| {
            let (entered, wait) = (Arc::clone(&entered), Arc::clone(&wait));
            async move {
                if seen.attempt == 1 {
                    entered.notify_one();
                    wait.notified().await;
                }
                Ok(json!(seen.attempt))
            }
        })
    };
    let slow = consumer(effect, &store, &clock);
    let (message, rival) = (order("m-1", "A-1"), consumer(Scripted::new(Recovery::Rerun), &store, &clock));
    let work = deliver(&slow, &message);
    let meanwhile = async {
        tokio::time::timeout(PATIENCE, entered.notified()).await.unwrap();
        // The lease is the deadline and one second; the clocks may differ by one more.
        for wait in [Duration::ZERO, PATIENCE, Duration::from_secs(2)] {
            clock.advance(wait);
            let report = deliver(&rival, &order("m-2", "A-1")).await;
            assert_eq!((report.outcome.name(), report.outcome.disposition()), ("in-flight", Disposition::Retry));
        }
        clock.advance(Duration::from_millis(1));
        assert_eq!(deliver(&rival, &order("m-2", "A-1")).await.attempt, Some(2));
        wait.notify_one();
    };
    let (late, ()) = futures_util::future::join(work, meanwhile).await;
    assert_eq!((late.outcome.name(), late.outcome.disposition()), ("fenced", Disposition::Retry));
    let State::Completed { result, .. } = record(&*store, "A-1").await.unwrap().state else { panic!() };
    assert_eq!(result.json, r#""A-1 by attempt 2""#, "the loser overwrote nothing");
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_rerun_applies_again_with_the_next_attempt() {
    let (clock, store) = after_a_crash().await;
    let consumer = consumer(Scripted::new(Recovery::Rerun), &store, &clock);
    let report = deliver(&consumer, &order("second", "A-1")).await;
    assert_eq!((report.outcome.name(), report.attempt), ("executed", Some(2)));
    assert_eq!(deliver(&consumer, &order("third", "A-1")).await.outcome.name(), "replayed");
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_verify_goes_by_the_answer() {
    type Answer = fn() -> Result<Verification<Value>, EffectError>;
    let cases: [(Answer, &str, usize); 4] = [
        (|| Ok(Verification::Done(json!("found"))), "recovered", 0),
        (|| Ok(Verification::NotDone), "executed", 1),
        (|| Ok(Verification::Unknown("the bank is not sure".into())), "parked", 0),
        (|| Err("the bank does not answer".into()), "unknown", 0),
    ];
    for (answer, outcome, applications) in cases {
        let (clock, store) = after_a_crash().await;
        let consumer = consumer(Scripted::new(Recovery::Verify).verifying(move |_| answer()), &store, &clock);
        let report = deliver(&consumer, &order("second", "A-1")).await;
        assert_eq!((report.outcome.name(), report.attempt), (outcome, Some(2)), "{report:?}");
        assert_eq!(consumer.effect().verified.lock().unwrap().len(), 1);
        assert_eq!(consumer.effect().applied.lock().unwrap().len(), applications);
    }
}

#[tokio::test(start_paused = true)]
async fn a_verification_that_failed_is_asked_again_and_nothing_is_applied_in_between() {
    let (clock, store) = after_a_crash().await;
    let effect = Scripted::new(Recovery::Verify).verifying(|seen| match seen.attempt {
        2 => panic!("bug in verify"),
        3 => Err(EffectError::not_applied("no connection").retry_after(Duration::from_secs(9))),
        _ => Ok(Verification::Done(json!("found"))),
    });
    let consumer = consumer(effect, &store, &clock);
    let outcomes = [
        deliver(&consumer, &order("m", "A-1")).await,
        deliver(&consumer, &order("m", "A-1")).await,
        deliver(&consumer, &order("m", "A-1")).await,
    ]
    .map(|report| report.outcome.name());
    assert_eq!(outcomes, ["unknown", "unknown", "recovered"]);
    assert_eq!(consumer.effect().applied.lock().unwrap().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_park_never_runs_it_again() {
    let (clock, store) = after_a_crash().await;
    let consumer = consumer(Scripted::new(Recovery::Park), &store, &clock);
    for _ in 0..2 {
        let report = deliver(&consumer, &order("second", "A-1")).await;
        assert_eq!((report.outcome.name(), report.outcome.disposition()), ("parked", Disposition::DeadLetter));
        assert!(report.outcome.reason().unwrap().contains("attempt 1 ended without an outcome"));
    }
    assert_eq!(consumer.effect().applied.lock().unwrap().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_later_attempt_that_was_not_applied_does_not_forget_the_earlier_one() {
    // Attempt 1 may have been applied. Attempt 2 asks, is told "not done", and then can't
    // connect. If that deleted the record, attempt 3 would apply without asking.
    let (clock, store) = after_a_crash().await;
    let effect = Scripted::new(Recovery::Verify).applying(|_| Err(EffectError::not_applied("refused")));
    let unlucky = consumer(effect, &store, &clock);
    assert_eq!(deliver(&unlucky, &order("m", "A-1")).await.outcome.name(), "not-applied");

    let effect = Scripted::new(Recovery::Verify).verifying(|_| Ok(Verification::Done(json!("found late"))));
    let consumer = consumer(effect, &store, &clock);
    let report = deliver(&consumer, &order("m", "A-1")).await;
    assert_eq!((report.outcome.name(), report.attempt), ("recovered", Some(3)));
    assert_eq!(consumer.effect().applied.lock().unwrap().len(), 0);
}

#[tokio::test]
async fn another_payload_under_the_same_key_is_a_conflict_in_every_state() {
    let other = Message::new("m-2", json!({ "orderId": "A-1", "amount": 13 }).to_string());
    for state in ["completed", "in progress", "lapsed", "parked"] {
        let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
        let consumer = consumer(Scripted::new(Recovery::Rerun), &store, &clock);
        deliver(&consumer, &order("m-1", "A-1")).await;
        let mut stored = record(&*store, "A-1").await.unwrap();
        stored.state = match state {
            "completed" => stored.state,
            "parked" => State::Parked { reason: "why".into() },
            _ => State::InProgress {
                owner: Some(Owner::random()),
                lease: Some(if state == "lapsed" { Lease::GIVEN_UP } else { Lease::until(START.plus(PATIENCE)) }),
            },
        };
        store.insert(stored.clone());
        let report = deliver(&consumer, &other).await;
        let Outcome::Conflict { stored: shown } = &report.outcome else { panic!("{state}: {report:?}") };
        assert_eq!(**shown, stored);
        assert_eq!(report.outcome.disposition(), Disposition::DeadLetter);
        assert!(report.outcome.reason().unwrap().contains("m-1"), "it names the message that was first");
        assert_eq!(consumer.effect().applied.lock().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn the_same_payload_written_another_way_is_a_duplicate() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let consumer = consumer(Scripted::new(Recovery::Rerun), &store, &clock);
    deliver(&consumer, &order("m-1", "A-1")).await;
    let respelled = Message::new("m-2", "{ \"amount\" : 12.0, \"orderId\" : \"\\u0041-1\" }");
    assert_eq!(deliver(&consumer, &respelled).await.outcome.name(), "replayed");
}

#[tokio::test]
async fn records_of_other_software_are_respected() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let consumer = consumer(Scripted::new(Recovery::Rerun), &store, &clock);
    let foreign = |state| Record {
        id: RecordId::new("test#A-1"),
        state,
        attempt: 1,
        expires: START.plus(Duration::from_hours(1)).to_seconds(),
        // An md5 without an algorithm in front, as Powertools writes it.
        fingerprint: Some("0cc175b9c0f1b6a831c399e269772661".into()),
        message_id: None,
        claimed_at: None,
    };
    let cases = [
        (State::InProgress { owner: None, lease: None }, "in-flight"),
        (State::Unknown { status: "EXPIRED?".into() }, "locked"),
        (State::Completed { result: StoredResult::whole("1"), completed_at: None }, "replayed"),
        (State::InProgress { owner: None, lease: Some(Lease::until(START.plus(PATIENCE))) }, "in-flight"),
        (State::InProgress { owner: None, lease: Some(Lease::until(START.minus(PATIENCE))) }, "executed"),
    ];
    for (state, outcome) in cases {
        store.insert(foreign(state.clone()));
        let report = deliver(&consumer, &order("m-1", "A-1")).await;
        assert_eq!(report.outcome.name(), outcome, "{state:?}");
    }
    // The last one was taken over, as the second claim of the key.
    assert_eq!(record(&*store, "A-1").await.unwrap().attempt, 2);
    store.insert(foreign(State::InProgress { owner: None, lease: None }));
    clock.advance(Duration::from_hours(1) + Duration::from_secs(1));
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.outcome.name(), "executed", "locked until it expires");
}

#[tokio::test]
async fn a_message_without_a_usable_key_or_input_is_rejected_before_anything_is_claimed() {
    struct Strict;
    impl Effect for Strict {
        type Input = std::collections::BTreeMap<String, u64>;
        type Output = ();
        fn recovery(&self) -> Recovery {
            Recovery::Park
        }
        async fn apply(&self, _: &Self::Input, _: &Attempt<'_>) -> Result<(), EffectError> {
            Ok(())
        }
    }
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let consumer = consumer(Strict, &store, &clock);
    for body in ["", "no json", "{}", r#"{"orderId":null}"#, r#"{"orderId":"  "}"#, r#"{"orderId":"4111-1111-secret"}"#]
    {
        let report = deliver(&consumer, &Message::new("m-1", body)).await;
        assert_eq!(
            (report.outcome.name(), report.outcome.disposition()),
            ("rejected", Disposition::DeadLetter),
            "{body}"
        );
        assert!(!report.outcome.reason().unwrap().contains("secret"), "{:?}", report.outcome.reason());
    }
    assert_eq!(store.calls(), 0);
}

#[tokio::test]
async fn a_panic_while_reading_the_input_rejects_the_message() {
    struct Panicky;
    impl Effect for Panicky {
        type Input = ();
        type Output = ();
        fn recovery(&self) -> Recovery {
            Recovery::Park
        }
        async fn apply(&self, (): &(), _: &Attempt<'_>) -> Result<(), EffectError> {
            Ok(())
        }
        fn input(&self, _: &Message) -> Result<(), idempotent_consumer::error::BoxError> {
            panic!("unreadable")
        }
    }
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let report = deliver(&consumer(Panicky, &store, &clock), &order("m-1", "A-1")).await;
    assert_eq!(report.outcome.name(), "rejected");
}

#[tokio::test(start_paused = true)]
async fn a_result_is_stored_in_the_end_though_the_store_stumbles() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    let away = Fault::NotSent(StoreErrorKind::Unavailable);
    store.fail(Call::Complete, [away, Fault::AnswerLost, away]);
    let consumer = consumer(Scripted::new(Recovery::Park), &store, &clock);
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.outcome.name(), "executed");
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.outcome.name(), "replayed");
}

#[tokio::test(start_paused = true)]
async fn an_applied_effect_whose_result_can_not_be_stored_is_not_acked_and_goes_through_recovery() {
    for fault in [Fault::NotSent(StoreErrorKind::Unavailable), Fault::Hangs] {
        let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
        store.fail(Call::Complete, std::iter::repeat_n(fault, 1000));
        let first = consumer(Scripted::new(Recovery::Verify), &store, &clock);
        let deadline = Deadline::after(PATIENCE, &*clock);
        let report = first.process(&order("m-1", "A-1"), deadline).await;
        assert_eq!((report.outcome.name(), report.outcome.disposition()), ("not-recorded", Disposition::Retry));
        assert!(deadline.remaining() >= Duration::from_millis(125), "there is time left to answer");

        clock.advance(PATIENCE + Duration::from_secs(3));
        let healthy = Arc::new(MemoryStore::new());
        healthy.insert(record(&*store, "A-1").await.unwrap());
        let effect = Scripted::new(Recovery::Verify).verifying(|_| Ok(Verification::Done(json!(1))));
        let next = consumer(effect, &healthy, &clock);
        assert_eq!(deliver(&next, &order("m-1", "A-1")).await.outcome.name(), "recovered");
    }
}

#[tokio::test]
async fn a_result_too_large_for_the_record_is_described_and_the_message_is_acked() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Park).applying(|_| Ok(json!("x".repeat(500_000))));
    let consumer = consumer(effect, &store, &clock);
    for outcome in ["executed", "replayed"] {
        let report = deliver(&consumer, &order("m-1", "A-1")).await;
        assert_eq!(report.outcome.name(), outcome);
        let result = report.outcome.result().unwrap();
        assert!(result.reduced);
        let description: Value = serde_json::from_str(&result.json).unwrap();
        assert_eq!(description["bytes"], 500_002);
        assert_eq!(description["sha256"].as_str().unwrap().len(), 64);
    }
}

#[tokio::test]
async fn a_result_that_the_store_refuses_is_described_too() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    store.fail(Call::Complete, [Fault::NotSent(StoreErrorKind::Invalid)]);
    let consumer = consumer(Scripted::new(Recovery::Park), &store, &clock);
    let report = deliver(&consumer, &order("m-1", "A-1")).await;
    assert!(matches!(&report.outcome, Outcome::Executed { result } if result.reduced), "{report:?}");

    // The description as well: asking again would not help.
    store.fail(Call::Complete, [Fault::NotSent(StoreErrorKind::Invalid); 2]);
    assert_eq!(deliver(&consumer, &order("m-2", "A-2")).await.outcome.name(), "not-recorded");
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_may_pass_does_not_cost_the_result() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    store.fail(Call::Complete, [Fault::NotSent(StoreErrorKind::Refused), Fault::NotSent(StoreErrorKind::Refused)]);
    let consumer = consumer(Scripted::new(Recovery::Park), &store, &clock);
    let report = deliver(&consumer, &order("m-1", "A-1")).await;
    assert!(matches!(&report.outcome, Outcome::Executed { result } if !result.reduced), "{report:?}");
}

#[tokio::test]
async fn a_result_that_is_no_json_is_described_too() {
    struct Odd;
    impl Effect for Odd {
        type Input = Value;
        type Output = std::collections::BTreeMap<Vec<u8>, u8>;
        fn recovery(&self) -> Recovery {
            Recovery::Park
        }
        async fn apply(&self, _: &Value, _: &Attempt<'_>) -> Result<Self::Output, EffectError> {
            Ok(std::iter::once((vec![1], 1)).collect())
        }
    }
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let report = deliver(&consumer(Odd, &store, &clock), &order("m-1", "A-1")).await;
    assert!(matches!(&report.outcome, Outcome::Executed { result } if result.reduced), "{report:?}");
}

#[tokio::test]
async fn a_store_that_is_away_runs_nothing_unless_told_to() {
    for (policy, outcome, applications) in
        [(StoreOutage::Reject, "store-failed", 0), (StoreOutage::Process, "unprotected", 1)]
    {
        let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
        store.fail_always(Some(Fault::NotSent(StoreErrorKind::Unavailable)));
        let mut settings = settings();
        settings.store_outage = policy;
        let consumer = Consumer::new(Scripted::new(Recovery::Park), Arc::clone(&store) as Arc<dyn Store>, settings)
            .with_clock(clock);
        let report = deliver(&consumer, &order("m-1", "A-1")).await;
        assert_eq!((report.outcome.name(), report.attempt), (outcome, None));
        let applied = consumer.effect().applied.lock().unwrap();
        assert_eq!(applied.len(), applications);
        assert!(applied.iter().all(|seen| seen.attempt == 0), "no claim, no fencing token");
    }
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_for_good_waits_for_its_lease() {
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    store.fail(Call::Claim, [Fault::AnswerLost]);
    let consumer = consumer(Scripted::new(Recovery::Rerun), &store, &clock);
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.outcome.name(), "store-failed");
    // A later claim must not take it for its own, though the process is the same.
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.outcome.name(), "in-flight");
    clock.advance(PATIENCE + Duration::from_secs(3));
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.attempt, Some(2));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_costs_the_deadline_and_no_effect() {
    for recovery in [Recovery::Rerun, Recovery::Verify, Recovery::Park] {
        let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
        store.fail_always(Some(Fault::Hangs));
        let consumer = consumer(Scripted::new(recovery), &store, &clock);
        let deadline = Deadline::after(Duration::from_secs(3), &*clock);
        let report = consumer.process(&order("m-1", "A-1"), deadline).await;
        assert!(
            matches!(report.outcome, Outcome::StoreFailed { .. }),
            "no answer is a failure, not a lack of time: {report:?}"
        );
        assert!(!deadline.remaining().is_zero());
        assert_eq!(consumer.effect().applied.lock().unwrap().len(), 0);
    }
}

#[tokio::test]
async fn with_park_a_claim_whose_answer_was_lost_is_taken_back() {
    // Nothing was begun; the next delivery must not bother a person.
    let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
    store.fail(Call::Claim, [Fault::AnswerLost]);
    let consumer = consumer(Scripted::new(Recovery::Park), &store, &clock);
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.outcome.name(), "store-failed");
    let report = deliver(&consumer, &order("m-1", "A-1")).await;
    assert_eq!((report.outcome.name(), report.attempt), ("executed", Some(1)));
}

#[tokio::test(start_paused = true)]
async fn without_its_store_a_takeover_still_goes_through_recovery() {
    // What can't be put on record as parked waits for the store.
    for (recovery, outcome) in [(Recovery::Park, "store-failed"), (Recovery::Verify, "unprotected")] {
        let (clock, store) = after_a_crash().await;
        store.fail(Call::TakeOver, [Fault::NotSent(StoreErrorKind::Unavailable)]);
        let mut settings = settings();
        settings.store_outage = StoreOutage::Process;
        let effect = Scripted::new(recovery).verifying(|_| Ok(Verification::Done(json!("found"))));
        let consumer = Consumer::new(effect, Arc::clone(&store) as Arc<dyn Store>, settings).with_clock(clock);
        assert_eq!(deliver(&consumer, &order("m", "A-1")).await.outcome.name(), outcome);
        assert_eq!(consumer.effect().applied.lock().unwrap().len(), 0);
    }
}

#[tokio::test]
async fn a_verification_waits_out_the_lease_of_an_attempt_that_may_still_be_on_its_way() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Verify).applying(|_| Err("timed out".into()));
    let consumer = consumer(effect, &store, &clock);
    assert_eq!(deliver(&consumer, &order("m-1", "A-1")).await.outcome.name(), "unknown");
    assert_eq!(deliver(&consumer, &order("m-2", "A-1")).await.outcome.name(), "in-flight");
    assert_eq!(consumer.effect().verified.lock().unwrap().len(), 0);
    clock.advance(PATIENCE + Duration::from_secs(3));
    deliver(&consumer, &order("m-1", "A-1")).await;
    assert_eq!(consumer.effect().verified.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_parked_key_is_not_forgotten_while_its_message_waits_in_a_dead_letter_queue() {
    let (clock, store) = after_a_crash().await;
    let consumer = consumer(Scripted::new(Recovery::Park), &store, &clock);
    assert_eq!(deliver(&consumer, &order("m", "A-1")).await.outcome.name(), "parked");
    clock.advance(Duration::from_hours(24 * 365));
    assert_eq!(deliver(&consumer, &order("redriven", "A-1")).await.outcome.name(), "parked");
}

#[tokio::test]
async fn a_record_outlives_its_claim_however_short_the_retention() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let mut settings = settings();
    settings.retention = idempotent_consumer::time::Retention::from_seconds(1).unwrap();
    let first = Consumer::new(
        Scripted::new(Recovery::Park).applying_async(|_| std::future::pending()),
        Arc::clone(&store) as Arc<dyn Store>,
        settings.clone(),
    )
    .with_clock(Arc::clone(&clock) as Arc<_>);
    let message = order("m-1", "A-1");
    let work = deliver(&first, &message);
    assert!(tokio::time::timeout(Duration::from_millis(1), work).await.is_err());
    clock.advance(PATIENCE);
    let second =
        Consumer::new(Scripted::new(Recovery::Park), Arc::clone(&store) as Arc<dyn Store>, settings).with_clock(clock);
    assert_eq!(deliver(&second, &order("m-2", "A-1")).await.outcome.name(), "in-flight");
}

#[tokio::test]
async fn a_claim_that_can_not_be_given_back_is_logged() {
    let not_applied = || EffectError::not_applied("refused");
    let unknown = || EffectError::unknown("cut off");
    let endings = [
        (Call::Release, not_applied as fn() -> EffectError, "giving back the claim"),
        (Call::SetLease, unknown, "giving up the lease"),
    ];
    for (call, ending, doing) in endings {
        let (clock, store) = (clock(), Arc::new(FaultyStore::default()));
        store.fail(call, [Fault::NotSent(StoreErrorKind::Refused)]);
        let consumer = consumer(Scripted::new(Recovery::Rerun).applying(move |_| Err(ending())), &store, &clock);
        for (key, stays) in [("A-1", true), ("A-2", false)] {
            let log = Log::start();
            deliver(&consumer, &order("m-1", key)).await;
            let said = |line: &String| line.starts_with("WARN") && line.contains(doing) && line.contains(key);
            assert_eq!(log.lines().iter().any(said), stays, "{key}: {:?}", log.lines());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_effect_is_not_begun_after_a_verification_that_took_its_time() {
    struct SlowToVerify(Mutex<usize>);
    impl Effect for SlowToVerify {
        type Input = Value;
        type Output = ();
        fn recovery(&self) -> Recovery {
            Recovery::Verify
        }
        fn time_limit(&self) -> Option<Duration> {
            Some(Duration::from_secs(20))
        }
        async fn apply(&self, _: &Value, _: &Attempt<'_>) -> Result<(), EffectError> {
            *self.0.lock().unwrap() += 1;
            Ok(())
        }
        async fn verify(&self, _: &Value, _: &Attempt<'_>) -> Result<Verification<()>, EffectError> {
            tokio::time::sleep(Duration::from_secs(15)).await;
            Ok(Verification::NotDone)
        }
    }
    let (clock, store) = after_a_crash().await;
    let consumer = consumer(SlowToVerify(Mutex::default()), &store, &clock);
    assert_eq!(deliver(&consumer, &order("m", "A-1")).await.outcome.name(), "unstarted");
    assert_eq!(*consumer.effect().0.lock().unwrap(), 0);
}

/// Panics where the compiler lets it: in the call, in a destructor.
struct Clumsy {
    recovery: Recovery,
    how: &'static str,
}

struct PanicsInDrop(bool);

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        if self.0 {
            std::panic::resume_unwind(Box::new("in drop"));
        }
    }
}

impl serde::Serialize for PanicsInDrop {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str("whole")
    }
}

impl Effect for Clumsy {
    type Input = Value;
    type Output = PanicsInDrop;

    fn recovery(&self) -> Recovery {
        self.recovery
    }

    #[allow(clippy::manual_async_fn)] // the panic is in the call, before there is a future
    fn apply(&self, _: &Value, _: &Attempt<'_>) -> impl Future<Output = Result<PanicsInDrop, EffectError>> + Send {
        if self.how == "call" {
            std::panic::resume_unwind(Box::new("in the call"));
        }
        async move {
            if self.how == "cancelled" {
                let _bomb = PanicsInDrop(true);
                std::future::pending::<()>().await;
            }
            Ok(PanicsInDrop(self.how == "output"))
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_call_or_a_destructor_costs_its_message_only() {
    for (how, outcome) in [("call", "unknown"), ("cancelled", "unknown"), ("output", "executed")] {
        let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
        let consumer = consumer(Clumsy { recovery: Recovery::Rerun, how }, &store, &clock);
        let report = deliver(&consumer, &order("m-1", "A-1")).await;
        assert_eq!(report.outcome.name(), outcome, "{how}: {report:?}");
    }
}

#[tokio::test]
async fn nothing_an_effect_does_changes_which_record_is_completed() {
    struct Mutating(Mutex<Vec<String>>);
    impl Effect for Mutating {
        type Input = Mutex<Value>;
        type Output = ();
        fn recovery(&self) -> Recovery {
            Recovery::Park
        }
        async fn apply(&self, input: &Mutex<Value>, attempt: &Attempt<'_>) -> Result<(), EffectError> {
            input.lock().unwrap()["orderId"] = json!("B-2");
            self.0.lock().unwrap().push(attempt.key().value().to_owned());
            Ok(())
        }
    }
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let consumer = consumer(Mutating(Mutex::default()), &store, &clock);
    for _ in 0..2 {
        deliver(&consumer, &order("m-1", "A-1")).await;
    }
    assert_eq!(*consumer.effect().0.lock().unwrap(), ["A-1"]);
    assert_eq!(record(&*store, "B-2").await, None);
}
