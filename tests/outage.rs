//! DynamoDB killed in the middle of a batch, and back: what `STORE_OUTAGE` says happens.
//!
//! Here DynamoDB is a process that gets SIGKILL and starts again on the file it had. In
//! front of it stands a proxy that counts who asks it while it is away.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;

use crate::common::dynamo::Dynamo;
use crate::common::dynamo_proxy::{DynamoProxy, Passage};
use crate::common::emulator::{self, Emulator};
use crate::common::events::{Record, event};
use crate::common::item::Item;
use crate::common::process::{AMPLE, Setup};
use crate::common::sink::{Behaviour, Sink};
use crate::common::wait::{until, until_after};

/// Time of an invocation that the outage spoils: results are tried to be stored until it
/// is nearly over.
const TIME: Duration = Duration::from_secs(5);

/// A takeover allows for clocks that differ by so much.
const CLOCK_SKEW: Duration = Duration::from_secs(1);

const NOTHING: [&str; 0] = [];

struct World {
    emulator: Emulator,
    dynamo: Dynamo,
    proxy: DynamoProxy,
    sink: Sink,
    setup: Setup,
}

impl World {
    async fn new() -> Self {
        let (emulator, dynamo) = Emulator::start("serve_dynamodb").await;
        let (proxy, sink) = (DynamoProxy::start(&dynamo.url), Sink::start().await);
        let setup = Setup::new(&proxy.url, &sink.url).set("EFFECT_TIMEOUT_SECONDS", "2").set("MAX_RECEIVE_COUNT", "99");
        Self { emulator, dynamo, proxy, sink, setup }
    }

    async fn bring_back(&mut self) {
        self.dynamo = self.emulator.restart().await;
        self.proxy.redirect(&self.dynamo.url);
    }

    async fn item(&self, key: &str) -> Item {
        Item::of(&self.dynamo, key).await.unwrap_or_else(|| panic!("no record of {key}"))
    }

    /// The keys that the proxy was asked to claim since it had seen so many claims.
    fn keys_asked_for(&self, since: usize) -> BTreeSet<String> {
        let claims = &self.proxy.exchanges("PutItem")[since..];
        claims
            .iter()
            .map(|claim| {
                let body: Value = serde_json::from_str(&claim.body).unwrap();
                body["Item"]["id"]["S"].as_str().unwrap().split_once('#').unwrap().1.to_owned()
            })
            .collect()
    }

    fn claims(&self) -> usize {
        self.proxy.exchanges("PutItem").len()
    }
}

/// Orders `a0`, `a1`, ..., each in a group of its own.
fn orders(name: &str, count: usize) -> Vec<Record> {
    (0..count).map(|n| Record::order(&format!("{name}{n}")).in_group(&format!("{name}{n}"))).collect()
}

fn ids(records: &[Record]) -> Vec<String> {
    records.iter().map(|record| record.id.clone()).collect()
}

/// Not a test: the process that the tests kill.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "the other tests start it, as a process"]
async fn serve_dynamodb() {
    emulator::serve().await;
}

#[tokio::test]
async fn with_reject_nothing_runs_without_a_claim_and_all_is_done_once_after_the_outage() {
    let mut world = World::new().await;
    world.sink.behave(Behaviour::Hold);
    let function = world.setup.clone().set("EFFECT_RECOVERY", "verify").set("MAX_CONCURRENCY", "2").start().await;
    let mut records = orders("a", 6);
    // One more behind the first: claimed ahead while that one's effect runs.
    records.push(Record::order("mate").in_group("a0"));

    // The middle of a batch: two effects run, four messages have not had their turn.
    let answer = function.invoke(event(&records), TIME);
    world.sink.wait_for_posts(2).await;
    until("the claim ahead", || world.proxy.exchanges("PutItem").iter().filter(|e| e.status == Some(200)).count() == 3)
        .await;
    world.emulator.kill();
    world.sink.open_gate();
    let answer = answer.await;
    assert_eq!(answer.failures(), ids(&records), "no result was stored, so none is acked");
    let begun = |world: &World| BTreeSet::from_iter(world.sink.keys());
    assert_eq!(begun(&world), BTreeSet::from(["a0", "a1"].map(str::to_owned)), "and nothing else was begun");
    for id in ["message-a0", "message-a1"] {
        assert_eq!(function.outcomes(id), ["not-recorded"]);
    }
    assert_eq!(function.outcomes("message-mate"), ["unstarted"], "it had its claim, and not its turn");

    // Nothing can be claimed: the whole invocation fails, so that Lambda backs off.
    for _ in 0..2 {
        let answer = function.invoke(event(&records), AMPLE).await;
        assert_eq!(answer.error().0, "StoreAway", "{answer:?}");
    }
    assert_eq!((begun(&world).len(), world.sink.posts().len()), (2, 2), "nothing runs without a claim");

    world.bring_back().await;
    let lease = world.item("a0").await.lease().max(world.item("mate").await.lease());
    until_after(lease.plus(CLOCK_SKEW)).await;
    let answer = function.invoke(event(&records), AMPLE).await;
    assert_eq!(answer.failures(), NOTHING);
    for id in ["message-a0", "message-a1"] {
        assert_eq!(function.outcomes(id).last().unwrap(), "recovered");
    }
    let mut sent = world.sink.keys();
    sent.sort();
    assert_eq!(sent, ["a0", "a1", "a2", "a3", "a4", "a5", "mate"], "each once");
    for key in sent {
        let item = world.item(&key).await;
        assert_eq!(item.status(), "COMPLETED");
        assert_eq!(item.data()["body"], world.sink.answer_of(&key));
    }
    let again = function.invoke(event(&records), AMPLE).await;
    assert_eq!((again.failures(), world.sink.posts().len()), (vec![], 7), "remembered");
}

#[tokio::test]
async fn with_reject_the_store_is_not_asked_for_every_message_of_a_batch() {
    let mut world = World::new().await;
    let function = world.setup.clone().set("MAX_CONCURRENCY", "1").start().await;
    world.emulator.kill();
    let answer = function.invoke(event(&orders("a", 10)), AMPLE).await;
    assert_eq!(answer.error().0, "StoreAway");
    assert_eq!(world.keys_asked_for(0), ["a0", "a1", "a2"].map(str::to_owned).into());
    assert_eq!((world.sink.posts(), function.outcomes("message-a3")), (vec![], vec!["unstarted".to_owned()]));
}

#[tokio::test]
async fn with_process_effects_run_unprotected_and_the_store_is_left_alone_after_three_failures() {
    let mut world = World::new().await;
    let function = world.setup.clone().set("STORE_OUTAGE", "process").set("MAX_CONCURRENCY", "1").start().await;
    let before = orders("before", 1);
    assert_eq!(function.invoke(event(&before), AMPLE).await.failures(), NOTHING);

    let records = orders("a", 10);
    world.emulator.kill();
    let asked = world.claims();
    let answer = function.invoke(event(&records), AMPLE).await;
    assert_eq!(answer.failures(), NOTHING, "late is worse than twice: all are acked");
    for record in &records {
        assert_eq!(function.outcomes(&record.id), ["unprotected"]);
    }
    assert_eq!(world.keys_asked_for(asked), ["a0", "a1", "a2"].map(str::to_owned).into(), "and then no more");
    // 0: no claim, so no fencing token either.
    let sent: Vec<(String, u64)> = world.sink.attempts().split_off(1);
    assert_eq!(sent, (0..10).map(|n| (format!("a{n}"), 0)).collect::<Vec<_>>());

    // The next batch asks again.
    let asked = world.claims();
    assert_eq!(function.invoke(event(&orders("b", 4)), AMPLE).await.failures(), NOTHING);
    assert_eq!(world.keys_asked_for(asked), ["b0", "b1", "b2"].map(str::to_owned).into());

    // Back: what was done before is known, what was done meanwhile is not.
    world.bring_back().await;
    assert_eq!(function.invoke(event(&before), AMPLE).await.failures(), NOTHING);
    assert_eq!(function.outcomes(&before[0].id), ["executed", "replayed"]);
    assert_eq!(function.invoke(event(&records), AMPLE).await.failures(), NOTHING);
    assert_eq!(function.outcomes("message-a1"), ["unprotected", "executed"], "its duplicate runs again");
    assert_eq!(world.sink.keys().iter().filter(|key| *key == "a1").count(), 2);
    assert_eq!(function.invoke(event(&records), AMPLE).await.failures(), NOTHING);
    assert_eq!(function.outcomes("message-a1"), ["unprotected", "executed", "replayed"]);
}

#[tokio::test]
async fn with_process_a_claim_that_was_won_before_the_outage_is_not_given_up_for_it() {
    let mut world = World::new().await;
    world.sink.behave_for("a0", Behaviour::Hold);
    let setup = world.setup.clone().set("STORE_OUTAGE", "process").set("EFFECT_RECOVERY", "verify");
    let function = setup.set("MAX_CONCURRENCY", "2").start().await;
    let records = orders("a", 8);
    let answer = function.invoke(event(&records[..1]), TIME);
    world.sink.wait_for_posts(1).await;
    world.emulator.kill();
    world.sink.open_gate();
    // Its result can't be stored, and it is not acked as if nobody had asked for one.
    assert_eq!(answer.await.failures(), ["message-a0"]);
    assert_eq!(function.outcomes("message-a0"), ["not-recorded"]);

    world.bring_back().await;
    until_after(world.item("a0").await.lease().plus(CLOCK_SKEW)).await;
    assert_eq!(function.invoke(event(&records), AMPLE).await.failures(), NOTHING);
    assert_eq!(function.outcomes("message-a0"), ["not-recorded", "recovered"]);
    assert_eq!(world.sink.posts().len(), 8, "each once");
}

#[tokio::test]
async fn with_process_an_attempt_seen_before_the_store_went_away_still_goes_through_recovery() {
    // What can't be put on record as parked waits for the store.
    for (recovery, outcome) in [("park", "store-failed"), ("verify", "unprotected")] {
        let world = World::new().await;
        let setup = world.setup.clone().set("STORE_OUTAGE", "process").set("EFFECT_RECOVERY", recovery);
        // A victim that dies with its effect applied.
        let mut victim = setup.start().await;
        world.sink.behave(Behaviour::ApplyAndHold);
        let record = Record::order("a");
        drop(victim.invoke(event([&record]), TIME));
        world.sink.wait_for_posts(1).await;
        victim.kill();
        until_after(world.item("a").await.lease().plus(CLOCK_SKEW)).await;

        // The heir is told of the dead one's claim, and then DynamoDB is gone for it.
        let heir = setup.start().await;
        world.proxy.on("PutItem", Passage::LoseRequest);
        world.proxy.once("PutItem", Passage::Free);
        let answer = heir.invoke(event([&record]), AMPLE).await;
        if recovery == "park" {
            assert_eq!(answer.error().0, "StoreAway");
        } else {
            assert!(answer.failures().is_empty());
        }
        assert_eq!(heir.outcomes(&record.id), [outcome], "{recovery}");
        assert_eq!(world.sink.posts().len(), 1, "{recovery}: not applied again");
        assert_eq!(world.sink.gets().len(), usize::from(recovery == "verify"));
    }
}
