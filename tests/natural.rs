//! Effects that only set something: nothing is claimed or stored, every delivery applies,
//! and a store that is away is not missed.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotent_consumer::batch::{Batch, BatchSettings};
use idempotent_consumer::consumer::{Consumer, StoreOutage};
use idempotent_consumer::effect::{EffectError, Recovery};
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Disposition, Outcome, Report};
use idempotent_consumer::store::{Store, StoreErrorKind};
use idempotent_consumer::time::Deadline;
use serde_json::{Value, json};

use crate::common::effects::{PATIENCE, Scripted, clock, order, settings};
use crate::common::faulty_store::{Fault, FaultyStore};

/// What the recovery of a natural effect is does not matter: nothing is ever recovered.
const RECOVERIES: [Recovery; 3] = [Recovery::Rerun, Recovery::Verify, Recovery::Park];

struct World {
    store: Arc<FaultyStore>,
    batch: Batch<Consumer<Scripted>>,
}

impl World {
    fn new(effect: Scripted, outage: StoreOutage) -> Self {
        let store = Arc::new(FaultyStore::default());
        let mut settings = settings();
        settings.store_outage = outage;
        let consumer =
            Consumer::new(effect.natural(), Arc::clone(&store) as Arc<dyn Store>, settings).with_clock(clock());
        Self { store, batch: Batch::new(consumer, BatchSettings::default()) }
    }

    async fn deliver(&self, messages: &[Message]) -> Vec<Report> {
        let deadline = Deadline::after(PATIENCE, &*clock());
        self.batch.process(messages, deadline).await.unwrap()
    }

    fn applied(&self) -> Vec<(String, u64)> {
        let applied = self.batch.consumer().effect().applied.lock().unwrap();
        applied.iter().map(|seen| (seen.key.clone(), seen.attempt)).collect()
    }
}

fn outcomes(reports: &[Report]) -> Vec<&'static str> {
    reports.iter().map(|report| report.outcome.name()).collect()
}

#[tokio::test]
async fn every_delivery_applies_it_and_the_store_is_never_asked() {
    for recovery in RECOVERIES {
        let world = World::new(Scripted::new(recovery), StoreOutage::Reject);
        for delivery in 1..=3 {
            let reports = world.deliver(&[order("m-1", "A-1"), order("m-2", "B-2")]).await;
            assert_eq!(outcomes(&reports), ["applied"; 2], "{recovery}, delivery {delivery}");
            for report in &reports {
                assert_eq!((report.outcome.disposition(), report.attempt), (Disposition::Ack, None));
            }
            assert_eq!(reports[0].outcome.result().unwrap().json, r#""A-1 by attempt 0""#);
            assert_eq!(world.applied().len(), 2 * delivery);
        }
        assert!(world.applied().iter().all(|(_, attempt)| *attempt == 0), "no claim, no fencing token");
        assert_eq!(world.batch.consumer().effect().verified.lock().unwrap().len(), 0, "{recovery}");
        assert_eq!(world.store.calls(), 0, "{recovery}");
    }
}

#[tokio::test]
async fn another_payload_under_the_same_key_is_no_conflict() {
    let world = World::new(Scripted::new(Recovery::Rerun), StoreOutage::Reject);
    let other = Message::new("m-2", json!({ "orderId": "A-1", "amount": 13 }).to_string());
    assert_eq!(outcomes(&world.deliver(&[order("m-1", "A-1"), other]).await), ["applied"; 2]);
}

#[tokio::test]
async fn a_message_without_a_key_is_rejected_all_the_same() {
    let world = World::new(Scripted::new(Recovery::Rerun), StoreOutage::Reject);
    let reports = world.deliver(&[Message::new("m-1", "{}"), order("m-2", "A-1")]).await;
    assert_eq!(outcomes(&reports), ["rejected", "applied"]);
    assert_eq!(world.applied(), [("A-1".to_owned(), 0)]);
}

#[tokio::test(start_paused = true)]
async fn its_failures_mean_what_they_mean_of_any_effect_and_leave_nothing_behind() {
    type Failure = fn() -> Result<Value, EffectError>;
    let cases: [(Failure, &str, Disposition); 4] = [
        (
            || Err(EffectError::not_applied("refused").retry_after(Duration::from_secs(7))),
            "not-applied",
            Disposition::Retry,
        ),
        (|| Err(EffectError::permanent("no such customer")), "permanent", Disposition::DeadLetter),
        (|| Err("reset by peer".into()), "unknown", Disposition::Retry),
        (|| std::panic::resume_unwind(Box::new("in an effect")), "unknown", Disposition::Retry),
    ];
    for recovery in RECOVERIES {
        for (failure, name, disposition) in cases {
            let deliveries = Arc::new(Mutex::new(0));
            let effect = Scripted::new(recovery).applying(move |_| {
                let mut deliveries = deliveries.lock().unwrap();
                *deliveries += 1;
                if *deliveries == 1 {
                    drop(deliveries);
                    failure()
                } else {
                    Ok(Value::Null)
                }
            });
            let world = World::new(effect, StoreOutage::Reject);
            let [report] = &world.deliver(&[order("m-1", "A-1")]).await[..] else { panic!() };
            assert_eq!((report.outcome.name(), report.outcome.disposition()), (name, disposition), "{recovery}");
            if let Outcome::NotApplied { retry_after, .. } = report.outcome {
                assert_eq!(retry_after, Some(Duration::from_secs(7)));
            }
            // Whatever it was: the next delivery simply applies it, with no lease to wait
            // for and nothing to recover.
            assert_eq!(outcomes(&world.deliver(&[order("m-1", "A-1")]).await), ["applied"], "{recovery} after {name}");
            assert_eq!(world.store.calls(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn it_is_cancelled_before_the_deadline_like_any_other() {
    let effect = Scripted::new(Recovery::Park).applying_async(|_| std::future::pending());
    let world = World::new(effect, StoreOutage::Reject);
    assert_eq!(outcomes(&world.deliver(&[order("m-1", "A-1")]).await), ["unknown"]);
    assert_eq!(world.store.calls(), 0);
}

#[tokio::test]
async fn groups_keep_their_order_and_stop_at_the_first_failure() {
    for recovery in RECOVERIES {
        let effect = Scripted::new(recovery).applying_async(|seen| async move {
            tokio::task::yield_now().await;
            if seen.key == "b2" { Err(EffectError::not_applied("refused")) } else { Ok(Value::Null) }
        });
        let world = World::new(effect, StoreOutage::Reject);
        let keys = ["a1", "b1", "a2", "b2", "a3", "b3"];
        let messages = keys.map(|key| order(&format!("message of {key}"), key).with_group(&key[..1]));
        let reports = world.deliver(&messages).await;
        assert_eq!(
            outcomes(&reports),
            ["applied", "applied", "applied", "not-applied", "applied", "unstarted"],
            "{recovery}"
        );
        let mut by_group: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (key, _) in world.applied() {
            by_group.entry(key[..1].to_owned()).or_default().push(key);
        }
        assert_eq!(by_group["a"], ["a1", "a2", "a3"]);
        assert_eq!(by_group["b"], ["b1", "b2"]);
        assert_eq!(world.store.calls(), 0);
    }
}

#[tokio::test]
async fn messages_with_one_key_do_not_overlap() {
    let running: Arc<Mutex<usize>> = Arc::default();
    let effect = Scripted::new(Recovery::Rerun).applying_async(move |_| {
        let running = Arc::clone(&running);
        async move {
            *running.lock().unwrap() += 1;
            tokio::task::yield_now().await;
            let mut running = running.lock().unwrap();
            assert_eq!(*running, 1);
            *running -= 1;
            Ok(Value::Null)
        }
    });
    let world = World::new(effect, StoreOutage::Reject);
    let messages: Vec<Message> = (0..5).map(|n| order(&format!("m-{n}"), "A-1").with_group(format!("g-{n}"))).collect();
    assert_eq!(outcomes(&world.deliver(&messages).await), ["applied"; 5]);
}

#[tokio::test]
async fn a_store_that_is_away_is_not_missed() {
    for outage in [StoreOutage::Reject, StoreOutage::Process] {
        let world = World::new(Scripted::new(Recovery::Park), outage);
        world.store.fail_always(Some(Fault::NotSent(StoreErrorKind::Unavailable)));
        // More than after how many failures in a row the store would not be asked again.
        let messages: Vec<Message> = (0..10).map(|n| order(&format!("m-{n}"), &format!("A-{n}"))).collect();
        assert_eq!(outcomes(&world.deliver(&messages).await), ["applied"; 10], "{outage:?}");
        assert_eq!(world.store.calls(), 0);
    }
}
