//! The function's binary killed with SIGKILL between any two of its steps, and what the
//! next delivery then does.
//!
//! A *victim* reaches the table through a proxy that stops it at a chosen point, and is
//! killed there. An *heir*, another process, is given the same message: at once, while
//! the victim's lease runs, and again when it is over.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::time::Duration;

use idempotent_consumer::effect::Recovery;
use serde_json::json;

use crate::common::dynamo::Dynamo;
use crate::common::dynamo_proxy::{DynamoProxy, Passage};
use crate::common::events::{Record, event};
use crate::common::item::Item;
use crate::common::process::{AMPLE, Function, Setup};
use crate::common::sink::{Behaviour, Sink};
use crate::common::wait::{eventually, until_after};

const KEY: &str = "order-1";

/// The victims' time: their leases end a second later.
const TIME: Duration = Duration::from_secs(4);

/// The victims' effect may take so long: a victim must be dead before.
const EFFECT_SECONDS: &str = "2";

/// A takeover allows for clocks that differ by so much.
const CLOCK_SKEW: Duration = Duration::from_secs(1);

const NOTHING: [&str; 0] = [];

struct Scene {
    recovery: Recovery,
    dynamo: Dynamo,
    proxy: DynamoProxy,
    sink: Sink,
    victims: Setup,
    victim: Function,
    heir: Function,
    deliveries: u32,
}

impl Scene {
    async fn new(recovery: Recovery) -> Self {
        let (dynamo, sink) = (Dynamo::start().await, Sink::start().await);
        let proxy = DynamoProxy::start(&dynamo.url);
        let setup = |url: &str| {
            Setup::new(url, &sink.url)
                .set("EFFECT_TIMEOUT_SECONDS", EFFECT_SECONDS)
                .set("EFFECT_RECOVERY", &recovery.to_string())
                .set("MAX_RECEIVE_COUNT", "9")
        };
        let (victims, heirs) = (setup(&proxy.url), setup(&dynamo.url));
        let (victim, heir) = tokio::join!(victims.start(), heirs.start());
        Self { recovery, dynamo, proxy, sink, victims, victim, heir, deliveries: 1 }
    }

    /// Hands the message to the victim, which is not expected to answer.
    fn deliver_to_victim(&mut self) {
        let record = Record::order(KEY).received(self.deliveries);
        self.deliveries += 1;
        drop(self.victim.invoke(event([&record]), TIME));
    }

    /// Hands the message to the heir; whether it acks, and the outcome it logs.
    async fn deliver_to_heir(&mut self) -> (bool, String) {
        let record = Record::order(KEY).received(self.deliveries);
        self.deliveries += 1;
        let failures = self.heir.invoke(event([&record]), AMPLE).await.failures();
        assert!(failures.is_empty() || failures == [record.id.as_str()], "{failures:?}");
        (failures.is_empty(), self.heir.outcomes(&record.id).last().unwrap().clone())
    }

    async fn item(&self) -> Item {
        Item::of(&self.dynamo, KEY).await.unwrap_or_else(|| panic!("{}: no record", self.recovery))
    }

    /// While the dead victim's lease runs, the heir touches nothing and acks nothing.
    async fn while_the_lease_runs(&mut self, attempt: u64) {
        let recovery = self.recovery;
        let (item, posts) = (self.item().await, self.sink.posts());
        assert_eq!((item.status(), item.attempt()), ("INPROGRESS", attempt), "{recovery}");
        assert_eq!(self.deliver_to_heir().await, (false, "in-flight".to_owned()), "{recovery}");
        assert_eq!(self.item().await, item, "{recovery}: the record stands as it was");
        assert_eq!((self.sink.posts(), self.sink.gets()), (posts, vec![]), "{recovery}");
    }

    async fn until_the_lease_is_over(&self) {
        until_after(self.item().await.lease().plus(CLOCK_SKEW)).await;
    }

    /// The heir applies the message, as the key's `attempt`-th claim, and `posts` were
    /// sent by then.
    async fn heir_executes(&mut self, attempt: u64, posts: &[u64]) {
        assert_eq!(self.deliver_to_heir().await, (true, "executed".to_owned()), "{}", self.recovery);
        self.has_completed(attempt, posts).await;
    }

    /// The heir finds out that the message was applied.
    async fn heir_recovers(&mut self, attempt: u64, posts: &[u64]) {
        assert_eq!(self.deliver_to_heir().await, (true, "recovered".to_owned()), "{}", self.recovery);
        self.has_completed(attempt, posts).await;
    }

    /// The record holds the target's answer, POSTs were sent by these attempts, and
    /// further deliveries are replayed.
    async fn has_completed(&mut self, attempt: u64, posts: &[u64]) {
        let recovery = self.recovery;
        let item = self.item().await;
        assert_eq!((item.status(), item.attempt()), ("COMPLETED", attempt), "{recovery}");
        assert_eq!(item.data(), json!({ "status": 200, "body": self.sink.answer_of(KEY) }), "{recovery}");
        assert!(!item.has("owner") && !item.has("in_progress_expiration"), "{recovery}: {item:?}");
        let sent: Vec<_> = posts.iter().map(|attempt| (KEY.to_owned(), *attempt)).collect();
        assert_eq!(self.sink.attempts(), sent, "{recovery}");
        assert_eq!(self.sink.applied(), [KEY], "{recovery}");

        assert_eq!(self.deliver_to_heir().await, (true, "replayed".to_owned()), "{recovery}");
        assert_eq!((self.sink.attempts(), self.item().await), (sent, item), "{recovery}");
    }

    /// The heir puts the message aside, and leaves it there.
    async fn heir_parks(&mut self, attempt: u64, posts: &[u64]) {
        let recovery = self.recovery;
        assert_eq!(self.deliver_to_heir().await, (false, "parked".to_owned()), "{recovery}");
        let item = self.item().await;
        assert_eq!((item.status(), item.attempt()), ("PARKED", attempt), "{recovery}");
        assert!(item.text("reason").contains(&format!("attempt {} ", attempt - 1)), "{item:?}");
        assert!(!item.has("owner") && !item.has("in_progress_expiration") && !item.has("data"), "{item:?}");

        assert_eq!(self.deliver_to_heir().await, (false, "parked".to_owned()), "{recovery}");
        assert_eq!(self.item().await, item, "{recovery}");
        let sent: Vec<_> = posts.iter().map(|attempt| (KEY.to_owned(), *attempt)).collect();
        assert_eq!((self.sink.attempts(), self.sink.gets()), (sent, vec![]), "{recovery}");
    }
}

const RECOVERIES: [Recovery; 3] = [Recovery::Rerun, Recovery::Verify, Recovery::Park];

/// Plays a scene with each recovery, side by side.
async fn with_each_recovery(scene: impl AsyncFn(Scene)) {
    let scene = &scene;
    let [rerun, verify, park] =
        RECOVERIES.map(|recovery| Box::pin(async move { scene(Scene::new(recovery).await).await }));
    tokio::join!(rerun, verify, park);
}

// ---- between claim and effect ----------------------------------------------------------

#[tokio::test]
async fn killed_between_claim_and_effect() {
    with_each_recovery(async |mut scene| {
        // The claim is written, and the victim never hears of it.
        scene.proxy.on("PutItem", Passage::HoldAnswer);
        scene.deliver_to_victim();
        scene.proxy.wait_for_held("PutItem").await;
        scene.victim.kill();

        scene.while_the_lease_runs(1).await;
        scene.until_the_lease_is_over().await;
        match scene.recovery {
            Recovery::Rerun => scene.heir_executes(2, &[2]).await,
            Recovery::Verify => {
                scene.heir_executes(2, &[2]).await;
                assert_eq!(scene.sink.gets(), [KEY], "asked first");
            }
            Recovery::Park => scene.heir_parks(2, &[]).await,
        }
    })
    .await;
}

#[tokio::test]
async fn killed_while_the_claim_is_on_its_way_leaves_nothing_and_its_late_claim_is_refused() {
    with_each_recovery(async |mut scene| {
        scene.proxy.on("PutItem", Passage::HoldRequest);
        scene.deliver_to_victim();
        scene.proxy.wait_for_held("PutItem").await;
        scene.victim.kill();
        assert_eq!(Item::count(&scene.dynamo).await, 0);

        scene.heir_executes(1, &[1]).await;
        let item = scene.item().await;
        scene.proxy.release();
        scene.proxy.wait_for_answers("PutItem").await;
        assert!(scene.proxy.exchanges("PutItem").iter().all(|claim| claim.status == Some(400)));
        assert_eq!(scene.item().await, item, "{}", scene.recovery);
    })
    .await;
}

// ---- while the effect runs -------------------------------------------------------------

#[tokio::test]
async fn killed_while_the_effect_runs_that_is_not_applied() {
    with_each_recovery(async |mut scene| {
        scene.sink.behave(Behaviour::Hold);
        scene.deliver_to_victim();
        scene.sink.wait_for_posts(1).await;
        scene.victim.kill();
        scene.sink.wait_for_quiet().await;
        scene.sink.open_gate();

        scene.while_the_lease_runs(1).await;
        scene.until_the_lease_is_over().await;
        match scene.recovery {
            Recovery::Rerun => scene.heir_executes(2, &[1, 2]).await,
            Recovery::Verify => {
                scene.heir_executes(2, &[1, 2]).await;
                assert_eq!(scene.sink.gets(), [KEY]);
            }
            Recovery::Park => scene.heir_parks(2, &[1]).await,
        }
    })
    .await;
}

#[tokio::test]
async fn killed_while_the_effect_runs_that_is_applied() {
    with_each_recovery(async |mut scene| {
        scene.sink.behave(Behaviour::ApplyAndHold);
        scene.deliver_to_victim();
        scene.sink.wait_for_posts(1).await;
        scene.victim.kill();
        scene.sink.wait_for_quiet().await;
        scene.sink.open_gate();

        scene.while_the_lease_runs(1).await;
        scene.until_the_lease_is_over().await;
        match scene.recovery {
            Recovery::Rerun => scene.heir_executes(2, &[1, 2]).await,
            Recovery::Verify => {
                scene.heir_recovers(2, &[1]).await;
                assert_eq!(scene.sink.gets(), [KEY]);
            }
            Recovery::Park => scene.heir_parks(2, &[1]).await,
        }
        if scene.recovery != Recovery::Park {
            assert_eq!(scene.sink.answer_of(KEY)["post"], 1, "what the first POST was answered is kept");
        }
    })
    .await;
}

// ---- between effect and result ---------------------------------------------------------

#[tokio::test]
async fn killed_between_effect_and_result_and_the_late_result_is_fenced() {
    with_each_recovery(async |mut scene| {
        scene.proxy.on("UpdateItem", Passage::HoldRequest);
        scene.deliver_to_victim();
        scene.proxy.wait_for_held("UpdateItem").await;
        scene.victim.kill();
        assert_eq!(scene.sink.applied(), [KEY]);

        scene.while_the_lease_runs(1).await;
        scene.until_the_lease_is_over().await;
        match scene.recovery {
            Recovery::Rerun => scene.heir_executes(2, &[1, 2]).await,
            Recovery::Verify => {
                scene.heir_recovers(2, &[1]).await;
                assert_eq!(scene.sink.gets(), [KEY]);
            }
            Recovery::Park => scene.heir_parks(2, &[1]).await,
        }

        // The victim's write was on its way all the time.
        let item = scene.item().await;
        scene.proxy.release();
        scene.proxy.wait_for_answers("UpdateItem").await;
        assert!(scene.proxy.exchanges("UpdateItem").iter().all(|write| write.status == Some(400)));
        assert_eq!(scene.item().await, item, "{}", scene.recovery);
    })
    .await;
}

// ---- between result and answer ---------------------------------------------------------

#[tokio::test]
async fn killed_before_it_hears_that_the_result_is_stored() {
    with_each_recovery(async |mut scene| {
        scene.proxy.on("UpdateItem", Passage::HoldAnswer);
        scene.deliver_to_victim();
        scene.proxy.wait_for_held("UpdateItem").await;
        scene.victim.kill();
        scene.has_completed(1, &[1]).await;
        assert_eq!(scene.sink.gets(), NOTHING);
    })
    .await;
}

#[tokio::test]
async fn killed_between_result_and_answer() {
    with_each_recovery(async |mut scene| {
        scene.victim.api.keep_answers();
        scene.deliver_to_victim();
        scene.victim.api.kept_answer().await;
        scene.victim.kill();
        scene.has_completed(1, &[1]).await;
        assert_eq!(scene.sink.gets(), NOTHING);
    })
    .await;
}

// ---- more than once, and more than one message -----------------------------------------

#[tokio::test]
async fn killed_again_while_recovering() {
    with_each_recovery(async |mut scene| {
        scene.sink.behave(Behaviour::ApplyAndHold);
        scene.deliver_to_victim();
        scene.sink.wait_for_posts(1).await;
        scene.victim.kill();
        scene.until_the_lease_is_over().await;

        // The second victim takes over, and dies before it can say what it found.
        scene.sink.open_gate();
        scene.victim = scene.victims.start().await;
        scene.proxy.on("UpdateItem", Passage::HoldRequest);
        scene.deliver_to_victim();
        scene.proxy.wait_for_held("UpdateItem").await;
        scene.victim.kill();
        let item = scene.item().await;
        assert_eq!((item.status(), item.attempt()), ("INPROGRESS", 2), "{}", scene.recovery);
        scene.until_the_lease_is_over().await;
        match scene.recovery {
            Recovery::Rerun => scene.heir_executes(3, &[1, 2, 3]).await,
            Recovery::Verify => {
                scene.heir_recovers(3, &[1]).await;
                assert_eq!(scene.sink.gets(), [KEY, KEY]);
            }
            Recovery::Park => scene.heir_parks(3, &[1]).await,
        }
    })
    .await;
}

#[tokio::test]
async fn killed_in_a_group_of_which_the_next_is_claimed_ahead() {
    with_each_recovery(async |mut scene| {
        let records = [Record::order("a"), Record::order("b"), Record::order("c")];
        scene.sink.behave(Behaviour::Hold);
        drop(scene.victim.invoke(event(&records), TIME));
        scene.sink.wait_for_posts(1).await;
        let parks = scene.recovery == Recovery::Park;
        if !parks {
            eventually("the claim of b", async || Item::of(&scene.dynamo, "b").await).await;
        }
        scene.victim.kill();
        scene.sink.wait_for_quiet().await;
        scene.sink.open_gate();
        assert_eq!(Item::of(&scene.dynamo, "b").await.is_some(), !parks);
        assert_eq!(Item::of(&scene.dynamo, "c").await, None);
        let lease = Item::of(&scene.dynamo, "a").await.unwrap().lease();
        until_after(lease.plus(CLOCK_SKEW)).await;

        let failures = scene.heir.invoke(event(&records), AMPLE).await.failures();
        let attempts = |of: &[(&str, u64)]| -> Vec<_> { of.iter().map(|(key, n)| ((*key).to_owned(), *n)).collect() };
        match scene.recovery {
            Recovery::Rerun | Recovery::Verify => {
                assert_eq!(failures, NOTHING);
                assert_eq!(scene.sink.attempts(), attempts(&[("a", 1), ("a", 2), ("b", 2), ("c", 1)]));
            }
            Recovery::Park => {
                assert_eq!(failures, ["message-a", "message-b", "message-c"], "the group waits behind a");
                // On its last receive `a` leaves for the dead-letter queue, and the
                // others need nobody's help: they were never begun.
                let last = records.map(|record| record.received(9));
                let failures = scene.heir.invoke(event(&last), AMPLE).await.failures();
                assert_eq!(failures, ["message-a"]);
                assert_eq!(scene.sink.attempts(), attempts(&[("a", 1), ("b", 1), ("c", 1)]));
            }
        }
        let gets = if scene.recovery == Recovery::Verify { vec!["a", "b"] } else { vec![] };
        assert_eq!(scene.sink.gets(), gets);
    })
    .await;
}
