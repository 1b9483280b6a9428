//! Plays one round: the world around the consumers, and what goes wrong in it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use idempotent_consumer::dead_letter::attribute;
use idempotent_consumer::time::{Clock, SystemClock};
use serde_json::Value;
use tokio::time::sleep;

use super::checker::{Facts, Row};
use super::faketime::FakeTime;
use super::history::{Entry, Event, FAULTS_ARE_OVER, History, Write};
use super::logs::Logs;
use super::plan::{ITEMS, Mode, Random, Round};
use super::queue::Queue;
use super::target::{TIMEOUT, Target};
use super::worker::Worker;
use crate::common::dynamo::{Dynamo, create_table_with_key};
use crate::common::dynamo_proxy::{DynamoProxy, Passage};
use crate::common::events::Record;
use crate::common::item::Item;
use crate::common::process::Setup;
use crate::common::sqs::{Answer, LETTERS, Sqs};
use crate::common::wait::until;

/// By how much the consumers let a takeover wait.
const SKEW: u64 = 1000;

const STOCK_TABLE: &str = "stock";

/// What the parts of a round share.
pub struct World {
    pub round: Round,
    pub history: History,
    pub logs: Logs,
    pub queue: Mutex<Queue>,
    pub target: Target,
    /// No more faults.
    calm: AtomicBool,
    /// The round is over.
    over: AtomicBool,
    /// Messages that may be put back into the queue, and those that were.
    dead: Mutex<(Vec<Record>, BTreeSet<String>)>,
}

impl World {
    pub fn is_calm(&self) -> bool {
        self.calm.load(Ordering::SeqCst)
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub fn bury(&self, record: Record) {
        self.history.record(Event::Exhausted { message: record.id.clone() });
        self.dead.lock().unwrap().0.push(record);
    }

    fn send(&self, record: Record, original: Option<String>) {
        let body = serde_json::from_str::<Value>(record.body()).ok();
        let key = body.and_then(|body| body.get("orderId")?.as_str().filter(|key| !key.is_empty()).map(str::to_owned));
        self.history.record(Event::Sent {
            message: record.id.clone(),
            key,
            group: record.group().unwrap().to_owned(),
            payload: record.body().to_owned(),
            original,
        });
        self.queue.lock().unwrap().send(record);
    }

    /// Puts some of the dead messages back into the queue, each under a new id, and none a
    /// second time.
    fn redrive(&self, random: &mut Random) {
        let chosen: Vec<Record> = {
            let mut dead = self.dead.lock().unwrap();
            let (waiting, redriven) = &mut *dead;
            let chosen = std::mem::take(waiting).into_iter().filter(|_| random.chance(500));
            chosen.filter(|record| !record.id.ends_with('\'') && redriven.insert(record.id.clone())).collect()
        };
        for record in chosen {
            let again = format!("{}'", record.id);
            let original = record.attribute(attribute::MESSAGE_ID).map(str::to_owned);
            self.send(record.with_id(&again), original);
        }
    }
}

/// Plays the round in a runtime of its own, which takes all its servers along at the end.
pub fn play(round: &Round, faketime: &FakeTime) -> (Facts, Vec<Entry>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let played = runtime.block_on(played(round.clone(), faketime.clone()));
    runtime.shutdown_background();
    played
}

async fn played(round: Round, faketime: FakeTime) -> (Facts, Vec<Entry>) {
    let dynamo = Dynamo::start().await;
    let transactional = round.mode == Mode::Transactional;
    if transactional {
        fill_stock(&dynamo).await;
    }
    let history = History::default();
    let logs = Logs::new(&history);
    let target = Target::start(&round, &history, &logs);
    let sqs = Sqs::start().await;
    let queue = Mutex::new(Queue::new(round.visibility, round.max_receives));
    let (calm, over, dead) = (AtomicBool::new(false), AtomicBool::new(false), Mutex::default());
    let world = Arc::new(World { round, history, logs, queue, target, calm, over, dead });
    watch_letters(&world, &sqs);

    let order = Arc::default();
    let mut proxies = Vec::new();
    let mut workers = Vec::new();
    for (process, ahead) in world.round.clocks.iter().copied().enumerate() {
        let proxy = Arc::new(proxy(&world, process, &dynamo, &order));
        let setup = setup(&world, &proxy.url, &sqs.url);
        let setup = if ahead == 0 { setup } else { faketime.set(setup, ahead) };
        let random = world.round.random.fork(100 + process as u64);
        let worker = Worker { process, ahead, world: Arc::clone(&world), setup, proxy: Arc::clone(&proxy), random };
        workers.push(worker.work());
        proxies.push(proxy);
    }

    tokio::join!(conduct(&world, &proxies, &sqs), futures_util::future::join_all(workers));
    // What is still on its way must arrive before the books are closed.
    until("what is on its way to arrive", || {
        proxies.iter().all(|proxy| proxy.underway() == 0) && world.target.underway() == 0
    })
    .await;
    let entries = world.history.entries();
    clocks_are_as_set(&world.round, &entries);
    (facts(&world, &dynamo).await, entries)
}

/// Sees in what the processes have written that they went by the clocks they were given:
/// the quickest claim of each shows it.
fn clocks_are_as_set(round: &Round, entries: &[Entry]) {
    let mut seen: BTreeMap<usize, Vec<i64>> = BTreeMap::new();
    for entry in entries {
        if let Event::Store { process, write: Some(Write::Claim { claimed_at, .. }), .. } = &entry.event {
            let ahead = i64::try_from(*claimed_at).unwrap() - i64::try_from(entry.at.get()).unwrap();
            seen.entry(*process).or_default().push(ahead);
        }
    }
    for (process, seen) in seen.into_iter().filter(|(_, seen)| seen.len() >= 10) {
        let (ahead, most) = (round.clocks[process], seen.into_iter().max().unwrap());
        let title = round.title();
        assert!(
            (ahead - 300..=ahead + 5).contains(&most),
            "{title}: process {process} was {most} ms ahead, not {ahead}"
        );
    }
}

/// From the first message to the last.
async fn conduct(world: &World, proxies: &[Arc<DynamoProxy>], sqs: &Sqs) {
    tokio::join!(trouble(world, proxies, sqs), producer(world));
    world.calm.store(true, Ordering::SeqCst);
    for_all(proxies, DynamoProxy::mend);
    world.target.calm();
    world.history.record(Event::World { what: FAULTS_ARE_OVER });
    drain(world).await;
    world.redrive(&mut world.round.random.fork(3));
    drain(world).await;
    world.over.store(true, Ordering::SeqCst);
}

/// Waits until the queue is empty, or has had time enough.
async fn drain(world: &World) {
    let end = SystemClock.now().plus(world.round.patience);
    while !world.queue.lock().unwrap().left().is_empty() && SystemClock.now() < end {
        sleep(Duration::from_millis(20)).await;
    }
}

fn setup(world: &World, dynamo: &str, sqs: &str) -> Setup {
    let round = &world.round;
    let setup = Setup::new(dynamo, &world.target.url)
        .set("EFFECT_TIMEOUT_SECONDS", &TIMEOUT.as_secs().to_string())
        .set("MAX_RECEIVE_COUNT", &round.max_receives.to_string());
    let setup = match round.mode {
        Mode::Transactional => {
            setup.set("EFFECT_URL", "").set("STOCK_TABLE_NAME", STOCK_TABLE).of_example("stock_ledger")
        }
        mode => setup.set("EFFECT_RECOVERY", mode.name()),
    };
    if round.letters { setup.set("AWS_ENDPOINT_URL_SQS", sqs).set("DEAD_LETTER_QUEUE_URL", LETTERS) } else { setup }
}

/// A process's way to the store, which writes down what comes along.
fn proxy(world: &Arc<World>, process: usize, dynamo: &Dynamo, order: &Arc<tokio::sync::Mutex<()>>) -> DynamoProxy {
    let proxy = DynamoProxy::start(&dynamo.url);
    proxy.in_turn(order);
    let (plan, mut random) = (Arc::clone(world), world.round.random.fork(200 + process as u64));
    proxy.decide(move |operation, body| {
        if operation == "TransactWriteItems" {
            // An effect begins.
            plan.logs.read_all();
        }
        if let Some(lie) = plan.round.lie(&mut random, operation, body) {
            return lie;
        }
        if plan.is_calm() { Passage::Free } else { plan.round.passage(&mut random, operation) }
    });
    let history = world.history.clone();
    proxy.watch(move |exchange| {
        let parsed = Write::parse(&exchange.operation, &exchange.body);
        let (key, write) = parsed.map_or((String::new(), None), |(key, write)| (key, Some(write)));
        history.record(Event::Store {
            process,
            operation: exchange.operation.clone(),
            key,
            write,
            passage: exchange.passage,
            accepted: exchange.status.map(|status| status == 200),
        });
    });
    proxy
}

/// Takes down each dead letter, for the history and for the way back.
fn watch_letters(world: &Arc<World>, sqs: &Sqs) {
    let world = Arc::clone(world);
    sqs.watch(move |operation, body| {
        if operation != "SendMessage" {
            return;
        }
        let attributes = body["MessageAttributes"].as_object().unwrap();
        let text = |name: &str| attributes[name]["StringValue"].as_str().unwrap().to_owned();
        let original = text(attribute::MESSAGE_ID);
        world.history.record(Event::Letter { original: original.clone(), reason: text(attribute::REASON) });
        let letter = Record::new(&original, body["MessageBody"].as_str().unwrap())
            .in_group(body["MessageGroupId"].as_str().unwrap());
        let letter = attributes.keys().fold(letter, |letter, name| letter.with_attribute(name, &text(name)));
        world.dead.lock().unwrap().0.push(letter);
    });
}

/// Sends everything, spread over the time in which there are faults.
async fn producer(world: &World) {
    let mut random = world.round.random.fork(4);
    let messages = world.round.messages();
    let pause = world.round.faults.mul_f64(0.85) / u32::try_from(messages.len()).unwrap();
    for record in messages {
        world.send(record, None);
        sleep(random.millis(0, 2 * u64::try_from(pause.as_millis()).unwrap())).await;
    }
}

fn for_all(proxies: &[Arc<DynamoProxy>], what: fn(&DynamoProxy)) {
    for proxy in proxies {
        what(proxy);
    }
}

/// What befalls all processes alike.
async fn trouble(world: &World, proxies: &[Arc<DynamoProxy>], sqs: &Sqs) {
    let mut random = world.round.random.fork(5);
    let end = SystemClock.now().plus(world.round.faults);
    while SystemClock.now() < end {
        sleep(random.millis(50, 500)).await;
        match random.below(100) {
            0..=24 => world.queue.lock().unwrap().lapse(SystemClock.now(), &mut random),
            25..=30 => {
                world.history.record(Event::World { what: "the store goes away" });
                for_all(proxies, DynamoProxy::cut);
                sleep(random.millis(200, 1500)).await;
                for_all(proxies, DynamoProxy::mend);
            }
            31..=36 => {
                world.history.record(Event::World { what: "the target goes away" });
                world.target.refuse(true);
                sleep(random.millis(200, 1500)).await;
                world.target.refuse(false);
            }
            37..=45 => {
                let late = Answer::Late(random.millis(50, 1000));
                sqs.answer([random.weighted(&[(2, Answer::Error(500, "InternalError")), (1, late)])]);
            }
            46..=55 => world.redrive(&mut random),
            _ => {}
        }
    }
}

async fn fill_stock(dynamo: &Dynamo) {
    create_table_with_key(&dynamo.client, STOCK_TABLE, "item").await;
    for (item, quantity) in ITEMS {
        let put = dynamo.client.put_item().table_name(STOCK_TABLE).item("item", AttributeValue::S(item.into()));
        put.item("quantity", AttributeValue::N(quantity.to_string())).send().await.unwrap();
    }
}

async fn facts(world: &World, dynamo: &Dynamo) -> Facts {
    let rows = Item::all(dynamo).await.into_iter().map(|item| {
        // Where a fence is missing there can be anything.
        let text = |name| item.has(name).then(|| item.text(name).to_owned());
        let attempt = if item.has("attempt") { item.attempt() } else { 0 };
        (item.key(), Row { status: text("status").unwrap_or_default(), attempt, data: text("data") })
    });
    let mut stock = BTreeMap::new();
    if world.round.mode == Mode::Transactional {
        for (item, before) in ITEMS {
            let get = dynamo.client.get_item().table_name(STOCK_TABLE).key("item", AttributeValue::S(item.into()));
            let found = get.consistent_read(true).send().await.unwrap();
            let after = found.item().unwrap()["quantity"].as_n().unwrap().parse().unwrap();
            stock.insert(item.to_owned(), (before, after));
        }
    }
    Facts {
        mode: world.round.mode,
        max_receives: world.round.max_receives,
        skew: SKEW,
        left: world.queue.lock().unwrap().left(),
        table: rows.collect(),
        stock,
    }
}
