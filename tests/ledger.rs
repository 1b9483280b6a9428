//! The example of a stock ledger as a process, killed at every step and at random: every
//! order is counted once.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use aws_sdk_dynamodb::types::AttributeValue;
use serde_json::json;

use crate::common::dynamo::{Dynamo, TABLE, create_table_with_key};
use crate::common::dynamo_proxy::{Counted, DynamoProxy, Passage};
use crate::common::events::{Record, event};
use crate::common::item::Item;
use crate::common::process::{AMPLE, Function, Setup};
use crate::common::wait::until;

const COMMIT: &str = "TransactWriteItems";

/// A ledger's table, which holds the records too: the stock lies under `item`, so it gets
/// a table of its own.
const STOCK_TABLE: &str = "stock";

struct Shop {
    dynamo: Dynamo,
}

impl Shop {
    async fn with_stock(stock: &[(&str, u64)]) -> Self {
        let dynamo = Dynamo::start().await;
        create_table_with_key(&dynamo.client, STOCK_TABLE, "item").await;
        for (item, quantity) in stock {
            dynamo
                .client
                .put_item()
                .table_name(STOCK_TABLE)
                .item("item", AttributeValue::S((*item).into()))
                .item("quantity", AttributeValue::N(quantity.to_string()))
                .send()
                .await
                .unwrap();
        }
        Self { dynamo }
    }

    async fn stock(&self, item: &str) -> u64 {
        let answer = self
            .dynamo
            .client
            .get_item()
            .table_name(STOCK_TABLE)
            .key("item", AttributeValue::S(item.into()))
            .consistent_read(true)
            .send()
            .await
            .unwrap();
        answer.item().unwrap()["quantity"].as_n().unwrap().parse().unwrap()
    }
}

/// The ledger on the tables behind that endpoint.
fn setup(url: &str) -> Setup {
    Setup::new(url, "").set("EFFECT_URL", "").set("STOCK_TABLE_NAME", STOCK_TABLE).of_example("stock_ledger")
}

fn order(id: &str, item: &str, quantity: u64) -> Record {
    Record::new(&format!("message of {id}"), json!({ "orderId": id, "item": item, "quantity": quantity }).to_string())
        .in_group(item)
}

/// Hands the message over, and waits for the answer: the outcome that the log tells.
async fn deliver(function: &Function, record: &Record) -> String {
    let answer = function.invoke(event([record]), AMPLE).await;
    assert!(answer.failures().is_empty(), "{answer:?}");
    function.outcomes(&record.id).last().unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_step_an_order_counts_once() {
    // Where the victim's commit is when it is killed, and what the heir finds.
    for (passage, found) in [(Passage::HoldRequest, "executed"), (Passage::HoldAnswer, "replayed")] {
        let shop = Shop::with_stock(&[("tea", 10)]).await;
        let proxy = DynamoProxy::start(&shop.dynamo.url);
        let mut victim = setup(&proxy.url).start().await;
        let heir = setup(&shop.dynamo.url).start().await;
        proxy.on(COMMIT, passage);
        drop(victim.invoke(event([&order("A", "tea", 3)]), AMPLE));
        if passage == Passage::HoldRequest {
            proxy.wait_for_held(COMMIT).await;
        } else {
            let answered = || proxy.exchanges(COMMIT).first().is_some_and(|commit| commit.status.is_some());
            until("the commit to be applied", answered).await;
        }
        victim.kill();
        assert_eq!(deliver(&heir, &order("A", "tea", 3)).await, found, "{passage:?}");
        assert_eq!(shop.stock("tea").await, 7);
        if passage == Passage::HoldRequest {
            // The dead one's commit arrives late, and is refused.
            proxy.release();
            proxy.wait_for_answers(COMMIT).await;
            assert_eq!(proxy.exchanges(COMMIT)[0].status, Some(400));
        }
        assert_eq!(deliver(&heir, &order("A", "tea", 3)).await, "replayed");
        assert_eq!(shop.stock("tea").await, 7);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_before_it_answers_and_with_its_answer_lost_an_order_counts_once() {
    let shop = Shop::with_stock(&[("tea", 10)]).await;
    let proxy = DynamoProxy::start(&shop.dynamo.url);
    let mut function = setup(&proxy.url).start().await;
    proxy.once(COMMIT, Passage::LoseAnswer);
    assert_eq!(deliver(&function, &order("A", "tea", 3)).await, "executed", "the token tells DynamoDB that it is one");
    assert_eq!((proxy.exchanges(COMMIT).len(), shop.stock("tea").await), (2, 7));

    function.api.keep_answers();
    drop(function.invoke(event([&order("B", "tea", 2)]), AMPLE));
    function.api.kept_answer().await;
    function.kill();
    let heir = setup(&proxy.url).start().await;
    assert_eq!(deliver(&heir, &order("B", "tea", 2)).await, "replayed");
    assert_eq!(shop.stock("tea").await, 5);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_answer_of_every_nth_commit_lost_every_order_counts_once() {
    const ORDERS: u64 = 200;
    let cases = [
        (2, Counted::Requests, Passage::LoseAnswer),
        (3, Counted::Requests, Passage::LoseAnswer),
        (5, Counted::Requests, Passage::LoseAnswer),
        (2, Counted::Requests, Passage::TruncateAnswer),
        (3, Counted::Requests, Passage::TruncateAnswer),
        (5, Counted::Requests, Passage::TruncateAnswer),
        // However often the SDK tries: only a further call can tell.
        (3, Counted::Calls, Passage::LoseAnswer),
    ];
    for (period, counted, passage) in cases {
        let context = format!("{passage:?} of every {period} {counted:?}");
        // 100 of the 200 orders find nothing left.
        let shop = Shop::with_stock(&[("tea", 1000), ("figs", 0)]).await;
        let proxy = DynamoProxy::start(&shop.dynamo.url);
        let function = setup(&proxy.url).start().await;
        let orders: Vec<Record> = (0..ORDERS)
            .map(|n| {
                let item = if n % 2 == 0 { "tea" } else { "figs" };
                order(&format!("order-{n}"), item, 3).in_group(&format!("group {}", n % 20))
            })
            .collect();
        proxy.every(period, counted, passage);
        for batch in orders.chunks(10) {
            let mut left: Vec<Record> = batch.to_vec();
            for delivery in 1.. {
                let failed = function.invoke(event(&left), AMPLE).await.failures();
                left.retain(|record| failed.contains(&record.id));
                if left.is_empty() {
                    break;
                }
                assert!(delivery < 20, "{context}: {failed:?}");
            }
        }
        assert!(proxy.lost() >= 40, "{context}: only {} answers were lost", proxy.lost());
        assert_eq!((shop.stock("tea").await, shop.stock("figs").await), (1000 - 300, 0), "{context}");
        let records = Item::all(&shop.dynamo).await;
        assert_eq!(records.len(), 200, "{context}: a record of each");
        for record in records {
            let number: u64 = record.key().trim_start_matches("order-").parse().unwrap();
            let answer = if number.is_multiple_of(2) { "reserved" } else { "out-of-stock" };
            assert_eq!((record.status(), record.data()), ("COMPLETED", json!(answer)), "{context}: {number}");
        }
    }
}

/// Numbers that are the same in every run with the same seed (Knuth's MMIX constants).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_messages_two_processes_and_random_kills_leave_the_stock_exact() {
    const ITEMS: [(&str, u64); 5] =
        [("tea", 10_000), ("salt", 10_000), ("rice", 10_000), ("figs", 50), ("saffron", 20)];
    const ORDERS: u64 = 667;
    const MESSAGES: u64 = 1000;
    let seed = 20_261_129;
    let mut random = Random(seed);
    let shop = Arc::new(Shop::with_stock(&ITEMS).await);

    let orders: Vec<(String, &str, u64)> = (0..ORDERS)
        .map(|n| (format!("order-{n}"), ITEMS[usize::try_from(random.below(5)).unwrap()].0, 1 + random.below(3)))
        .collect();
    let mut messages: Vec<Record> = (0..MESSAGES)
        .map(|n| {
            // Every order once, and then duplicates under ids of their own.
            let which = if n < ORDERS { n } else { random.below(ORDERS) };
            let (id, item, quantity) = &orders[usize::try_from(which).unwrap()];
            order(id, item, *quantity).with_id(&format!("message-{n}"))
        })
        .collect();
    for n in (1..messages.len()).rev() {
        messages.swap(n, usize::try_from(random.below(n as u64 + 1)).unwrap());
    }
    let queue: Arc<Mutex<VecDeque<Record>>> = Arc::new(Mutex::new(messages.into()));

    let workers = [1, 2].map(|worker| {
        let (shop, queue) = (Arc::clone(&shop), Arc::clone(&queue));
        let mut random = Random(seed + worker);
        async move {
            let proxy = DynamoProxy::start(&shop.dynamo.url);
            let ledger = setup(&proxy.url);
            let mut function = ledger.start().await;
            let mut kills = 0;
            loop {
                let batch: Vec<Record> = {
                    let mut queue = queue.lock().unwrap();
                    let size = queue.len().min(10);
                    queue.drain(..size).collect()
                };
                if batch.is_empty() {
                    return kills;
                }
                let answer = function.invoke(event(&batch), AMPLE);
                if random.below(5) == 0 {
                    // Killed somewhere in the middle: after so many commits of this batch
                    // have been sent, whatever became of them.
                    let sent =
                        proxy.exchanges(COMMIT).len() + usize::try_from(random.below(batch.len() as u64)).unwrap();
                    until("commits of the batch", || proxy.exchanges(COMMIT).len() >= sent).await;
                    function.kill();
                    kills += 1;
                    queue.lock().unwrap().extend(batch);
                    function = ledger.start().await;
                    continue;
                }
                let failed = answer.await.failures();
                queue.lock().unwrap().extend(batch.into_iter().filter(|record| failed.contains(&record.id)));
            }
        }
    });
    let kills: usize = futures_util::future::join_all(workers).await.into_iter().sum();
    assert!(kills >= 5, "seed {seed}: only {kills} kills");

    let mut taken: HashMap<&str, u64> = HashMap::new();
    let mut answers: BTreeMap<String, u64> = BTreeMap::new();
    for (id, item, quantity) in &orders {
        let record = Item::of(&shop.dynamo, id).await.unwrap_or_else(|| panic!("seed {seed}: {id} was missed"));
        assert_eq!(record.status(), "COMPLETED", "seed {seed}: {id}");
        let answer = record.data().as_str().unwrap().to_owned();
        if answer == "reserved" {
            *taken.entry(item).or_default() += quantity;
        }
        *answers.entry(answer).or_default() += 1;
    }
    for (item, initial) in ITEMS {
        let expected = initial - taken.get(item).copied().unwrap_or_default();
        assert_eq!(shop.stock(item).await, expected, "seed {seed}, {kills} kills: {item}");
    }
    assert_eq!(answers.values().sum::<u64>(), ORDERS);
    assert!(answers["out-of-stock"] > 0, "seed {seed}: {answers:?}");
    // The table holds the records and nothing else.
    assert_eq!(Item::count(&shop.dynamo).await, usize::try_from(ORDERS).unwrap(), "{TABLE}");
}
