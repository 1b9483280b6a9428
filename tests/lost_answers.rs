//! The answer of every n-th store call lost on the wire: the write stands, and the one who
//! made it does not know. No effect twice, none missing.
//!
//! Lost of each *request*, the SDK's next try mostly tells: what stands there is recognised
//! as one's own. Lost of a *call* with all its tries, the consumer never knows, and
//! recovery has to see to it once the lease is over.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use futures_util::future::join_all;
use idempotent_consumer::effect::Recovery;
use serde_json::json;

use crate::common::dynamo::Dynamo;
use crate::common::dynamo_proxy::{Counted, DynamoProxy, Passage};
use crate::common::events::{Record, event};
use crate::common::item::Item;
use crate::common::process::{Function, Setup};
use crate::common::runtime_api::InvocationResult;
use crate::common::sink::Sink;
use crate::common::wait::until_after;

/// An invocation's time: leases end a second later.
const TIME: Duration = Duration::from_secs(6);

/// A takeover allows for clocks that differ by so much.
const CLOCK_SKEW: Duration = Duration::from_secs(1);

/// Processes, each with its share of the groups, as a queue hands a group to one consumer
/// at a time.
const WORKERS: usize = 2;

/// After so many rounds the wire is mended. It must be in the end: the SDK tries again only
/// as long as its quota of retries lasts, which a refused condition after a lost answer
/// does not fill up; and where exactly every second answer is lost, it may then be that of
/// the same call in every round.
const BAD_ROUNDS: usize = 2;

/// More rounds than this, and something does not get on.
const MOST_ROUNDS: usize = 6;

struct World {
    dynamo: Dynamo,
    proxy: DynamoProxy,
    sink: Sink,
    functions: Vec<Function>,
    title: String,
}

/// What came of it all.
struct Verdict {
    /// Orders whose message was acked.
    acked: BTreeSet<String>,
    parked: BTreeSet<String>,
}

impl World {
    async fn new(recovery: Recovery, title: String) -> Self {
        let (dynamo, sink) = (Dynamo::start().await, Sink::start().await);
        let proxy = DynamoProxy::start(&dynamo.url);
        let setup = Setup::new(&proxy.url, &sink.url)
            .set("EFFECT_TIMEOUT_SECONDS", "2")
            .set("EFFECT_RECOVERY", &recovery.to_string())
            .set("MAX_RECEIVE_COUNT", "1000");
        let functions = join_all((0..WORKERS).map(|_| setup.start())).await;
        Self { dynamo, proxy, sink, functions, title }
    }

    /// Delivers the messages until each is acked or parked, ten at a time and as a FIFO
    /// queue does: none of a group after one that failed and may yet succeed.
    async fn deliver_all(&self, groups: Vec<Vec<Record>>) -> Verdict {
        let mut result = Verdict { acked: BTreeSet::new(), parked: BTreeSet::new() };
        let mut shares: Vec<Vec<Record>> = vec![Vec::new(); WORKERS];
        for (n, group) in groups.into_iter().enumerate() {
            shares[n % WORKERS].extend(group);
        }
        for round in 1.. {
            if round == BAD_ROUNDS + 1 {
                self.proxy.spare_all();
            }
            assert!(round <= MOST_ROUNDS, "{}: {} left after {MOST_ROUNDS} rounds", self.title, shares.concat().len());
            let work = self.functions.iter().zip(std::mem::take(&mut shares)).map(async |(function, share)| {
                let mut left: Vec<Record> = Vec::new();
                let (mut acked, mut parked) = (Vec::new(), Vec::new());
                for batch in share.chunks(10) {
                    let stopped: HashSet<String> = left.iter().map(group_of).collect();
                    let (batch, held): (Vec<Record>, Vec<Record>) =
                        batch.iter().cloned().partition(|record| !stopped.contains(&group_of(record)));
                    left.extend(held);
                    if batch.is_empty() {
                        continue;
                    }
                    let answer = function.invoke(event(&batch), TIME).await;
                    // An invocation that failed as a whole acks nothing.
                    let failed = match answer.result {
                        InvocationResult::Response(_) => answer.failures(),
                        InvocationResult::Error { .. } => batch.iter().map(|record| record.id.clone()).collect(),
                    };
                    for record in batch {
                        if !failed.contains(&record.id) {
                            acked.push(order_of(&record));
                        } else if function.outcomes(&record.id).last().is_some_and(|outcome| outcome == "parked") {
                            // To the dead-letter queue; its group goes on.
                            parked.push(order_of(&record));
                        } else {
                            left.push(record);
                        }
                    }
                }
                (left, acked, parked)
            });
            for (left, acked, parked) in join_all(work).await {
                shares.push(left);
                result.acked.extend(acked);
                result.parked.extend(parked);
            }
            if shares.iter().all(Vec::is_empty) {
                return result;
            }
            self.until_all_leases_are_over().await;
        }
        unreachable!()
    }

    async fn until_all_leases_are_over(&self) {
        let leases = Item::all(&self.dynamo).await.into_iter().filter(|item| item.status() == "INPROGRESS");
        if let Some(last) = leases.map(|item| item.lease()).max() {
            until_after(last.plus(CLOCK_SKEW)).await;
        }
    }
}

fn group_of(record: &Record) -> String {
    record.group().unwrap().to_owned()
}

fn order_of(record: &Record) -> String {
    record.id.trim_start_matches("message-").to_owned()
}

/// So many orders in groups of five, named by group and position.
fn orders(count: usize) -> Vec<Vec<Record>> {
    let order = |group, n| Record::order(&format!("{group:02}-{n}")).in_group(&format!("group {group}"));
    (0..count / 5).map(|group| (0..5).map(|n| order(group, n)).collect()).collect()
}

async fn no_effect_twice_and_none_missing(count: usize, period: usize, counted: Counted, passage: Passage) {
    let played = [Recovery::Rerun, Recovery::Verify, Recovery::Park]
        .map(|recovery| Box::pin(with_recovery(recovery, count, period, counted, passage)));
    join_all(played).await;
}

async fn with_recovery(recovery: Recovery, count: usize, period: usize, counted: Counted, passage: Passage) {
    let title = format!("{recovery}, {passage:?} of every {period}th of {counted:?}");
    let world = World::new(recovery, title.clone()).await;
    let groups = orders(count);
    let all: BTreeSet<String> = groups.iter().flatten().map(order_of).collect();
    world.proxy.every(period, counted, passage);
    let result = world.deliver_all(groups).await;

    let mut sent: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut first_sent: Vec<String> = Vec::new();
    for (key, attempt) in world.sink.attempts() {
        let attempts = sent.entry(key.clone()).or_default();
        if attempts.is_empty() {
            first_sent.push(key);
        }
        attempts.push(attempt);
    }
    let applied: BTreeSet<String> = world.sink.applied().into_iter().collect();

    match recovery {
        // The target, which knows the key, applies once; each POST says that it is
        // another attempt.
        Recovery::Rerun => {
            assert_eq!((&applied, &result.acked), (&all, &all), "{title}");
            for (key, attempts) in &sent {
                assert!(attempts.is_sorted_by(|a, b| a < b), "{title}: {key} was sent as {attempts:?}");
            }
        }
        // And when it is asked, it is not even sent twice.
        Recovery::Verify => {
            assert_eq!((&applied, &result.acked), (&all, &all), "{title}");
            assert_eq!(world.sink.posts().len(), all.len(), "{title}: {sent:?}");
        }
        // Never twice, and what may be missing has been put aside for a person.
        Recovery::Park => {
            assert_eq!(world.sink.posts().len(), sent.len(), "{title}: {sent:?}");
            assert!(result.acked.is_disjoint(&result.parked), "{title}");
            assert_eq!(result.acked.union(&result.parked).cloned().collect::<BTreeSet<_>>(), all, "{title}");
            assert!(result.acked.is_subset(&applied), "{title}");
        }
    }
    let items: BTreeMap<String, Item> = Item::all(&world.dynamo).await.into_iter().map(|i| (i.key(), i)).collect();
    assert_eq!(items.keys().cloned().collect::<BTreeSet<_>>(), all, "{title}: a record of each, and no other");
    for (key, item) in &items {
        if result.parked.contains(key) {
            assert_eq!(item.status(), "PARKED", "{title}: {key}");
        } else {
            assert_eq!(item.status(), "COMPLETED", "{title}: {key}");
            let answer = world.sink.answer_of(key);
            assert_eq!(item.data(), json!({ "status": 200, "body": answer }), "{title}: {key}");
        }
    }
    for group in 0..count / 5 {
        let prefix = format!("{group:02}-");
        let of_group: Vec<&String> = first_sent.iter().filter(|key| key.starts_with(&prefix)).collect();
        assert!(of_group.is_sorted(), "{title}: {of_group:?}");
    }
    let lost = world.proxy.lost();
    assert!(lost >= count / period, "{title}: only {lost} answers were lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_every_second_request_lost() {
    no_effect_twice_and_none_missing(200, 2, Counted::Requests, Passage::LoseAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_every_third_request_lost() {
    no_effect_twice_and_none_missing(200, 3, Counted::Requests, Passage::LoseAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_every_fifth_request_lost() {
    no_effect_twice_and_none_missing(200, 5, Counted::Requests, Passage::LoseAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_every_second_request_cut_short() {
    no_effect_twice_and_none_missing(200, 2, Counted::Requests, Passage::TruncateAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_every_third_request_cut_short() {
    no_effect_twice_and_none_missing(200, 3, Counted::Requests, Passage::TruncateAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_every_fifth_request_cut_short() {
    no_effect_twice_and_none_missing(200, 5, Counted::Requests, Passage::TruncateAnswer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_every_fifth_call_lost_for_good() {
    no_effect_twice_and_none_missing(50, 5, Counted::Calls, Passage::LoseAnswer).await;
}
