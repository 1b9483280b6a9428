//! The real binary killed with SIGKILL at each step, with each recovery and each kind of
//! effect: what happened then is the table in `docs/crash-matrix.md`.
//!
//! The table is written from what was observed, and each cell is checked against what is
//! promised. `UPDATE_DOCS=1 cargo test --test crash_matrix` writes it anew.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::fmt::Write as _;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use futures_util::stream::{self, StreamExt};
use idempotent_consumer::effect::Recovery;
use serde_json::json;

use crate::common::dynamo::{Dynamo, create_table_with_key};
use crate::common::dynamo_proxy::{DynamoProxy, Passage};
use crate::common::events::{Record, event};
use crate::common::item::Item;
use crate::common::process::{AMPLE, Function, Setup};
use crate::common::sink::{Behaviour, Sink};
use crate::common::wait::{eventually, until, until_after};
use crate::common::{page, proof};

const KEY: &str = "order-1";

/// The message before it in its group, where there is one.
const BEFORE: &str = "order-0";

/// The victims' time: their leases end a second later.
const TIME: Duration = Duration::from_secs(5);

/// The victims' effect may take so long: a victim must be dead before.
const EFFECT_SECONDS: &str = "2";

/// A takeover allows for clocks that differ by so much.
const CLOCK_SKEW: Duration = Duration::from_secs(1);

/// Cells that are played at once: nearly all of their time is waiting for leases.
const SIDE_BY_SIDE: usize = 6;

/// Tables of the effects that are writes to DynamoDB.
const STOCK: &str = "stock";
const ADDRESSES: &str = "addresses";

// ---- rows and columns ------------------------------------------------------------------

/// Where the victim is when it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    ClaimSent,
    ClaimStands,
    EffectSent,
    EffectApplied,
    GivingBack,
    ResultSent,
    ResultStands,
    Answering,
    Recovering,
    ClaimedAhead,
}

const STEPS: [Step; 10] = [
    Step::ClaimSent,
    Step::ClaimStands,
    Step::EffectSent,
    Step::EffectApplied,
    Step::GivingBack,
    Step::ResultSent,
    Step::ResultStands,
    Step::Answering,
    Step::Recovering,
    Step::ClaimedAhead,
];

impl Step {
    fn title(self) -> &'static str {
        match self {
            Self::ClaimSent => "its claim is on its way",
            Self::ClaimStands => "its claim stands, the effect is not begun",
            Self::EffectSent => "the effect is sent, and not applied",
            Self::EffectApplied => "the effect is applied, the answer is on its way",
            Self::GivingBack => "the target said \"not now\", the claim is being given back",
            Self::ResultSent => "the result is on its way to the store",
            Self::ResultStands => "the result is stored, the confirmation is on its way",
            Self::Answering => "its answer to Lambda is on its way",
            Self::Recovering => "a second time: after the takeover, before what it found is stored",
            Self::ClaimedAhead => "the effect of the message before it in its group runs",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Http(Recovery),
    Transaction,
    Natural,
}

const KINDS: [Kind; 5] = [
    Kind::Http(Recovery::Rerun),
    Kind::Http(Recovery::Verify),
    Kind::Http(Recovery::Park),
    Kind::Transaction,
    Kind::Natural,
];

impl Kind {
    fn title(self) -> String {
        match self {
            Self::Http(recovery) => format!("`{recovery}`"),
            Self::Transaction => "transaction".to_owned(),
            Self::Natural => "natural".to_owned(),
        }
    }

    fn promise(self) -> &'static str {
        match self {
            Self::Http(Recovery::Rerun) => "exactly once, as the target deduplicates",
            Self::Http(Recovery::Verify) => "exactly once, as the answer is true",
            Self::Http(Recovery::Park) => "at most once",
            Self::Transaction => "exactly once",
            Self::Natural => "as if once",
        }
    }

    /// Transactions and natural effects are one request, and hold nothing before or after.
    fn has(self, step: Step) -> bool {
        matches!(self, Self::Http(_)) || matches!(step, Step::EffectSent | Step::EffectApplied | Step::Answering)
    }

    /// The operation that is the effect.
    fn write(self) -> &'static str {
        match self {
            Self::Http(_) => panic!("a POST"),
            Self::Transaction => "TransactWriteItems",
            Self::Natural => "PutItem",
        }
    }
}

// ---- one cell --------------------------------------------------------------------------

struct Stage {
    step: Step,
    kind: Kind,
    dynamo: Dynamo,
    proxy: DynamoProxy,
    heirs_proxy: DynamoProxy,
    sink: Sink,
    victims: Setup,
    victim: Function,
    heir: Function,
    deliveries: u32,
}

/// What was seen of the message after the crash.
#[derive(Debug)]
struct Observed {
    /// Requests that the target had got from the victim.
    sent_before: usize,
    /// Whether the delivery right after the crash was refused as in flight.
    waited: bool,
    /// The delivery that settled it.
    acked: bool,
    outcome: String,
    /// The attempt that the record tells.
    attempt: Option<u64>,
    status: Option<String>,
    asked: usize,
    sent: usize,
    effects: usize,
    /// One more delivery.
    again: (bool, String),
}

impl Stage {
    async fn new(step: Step, kind: Kind) -> Self {
        let (dynamo, sink) = (Dynamo::start().await, Sink::start().await);
        create_table_with_key(&dynamo.client, STOCK, "item").await;
        create_table_with_key(&dynamo.client, ADDRESSES, "customer").await;
        let stock = [("item", AttributeValue::S("tea".into())), ("quantity", AttributeValue::N("10".into()))];
        let item = stock.map(|(name, value)| (name.to_owned(), value)).into();
        dynamo.client.put_item().table_name(STOCK).set_item(Some(item)).send().await.unwrap();

        let (proxy, heirs_proxy) = (DynamoProxy::start(&dynamo.url), DynamoProxy::start(&dynamo.url));
        let setup = |url: &str| {
            let setup = Setup::new(url, &sink.url).set("MAX_RECEIVE_COUNT", "9");
            match kind {
                Kind::Http(recovery) => {
                    setup.set("EFFECT_TIMEOUT_SECONDS", EFFECT_SECONDS).set("EFFECT_RECOVERY", &recovery.to_string())
                }
                Kind::Transaction => setup.set("STOCK_TABLE_NAME", STOCK).of_example("stock_ledger"),
                Kind::Natural => setup.set("ADDRESS_TABLE_NAME", ADDRESSES).of_example("set_address"),
            }
        };
        let (victims, heirs) = (setup(&proxy.url), setup(&heirs_proxy.url));
        let (victim, heir) = tokio::join!(victims.start(), heirs.start());
        Self { step, kind, dynamo, proxy, heirs_proxy, sink, victims, victim, heir, deliveries: 0 }
    }

    /// The message's next delivery.
    fn record(&mut self) -> Record {
        self.deliveries += 1;
        let body = json!({
            "orderId": KEY, "item": "tea", "quantity": 3,
            "customer": "7", "address": "Fleet Street 4", "version": 2,
        });
        Record::new(&format!("message-{KEY}"), body.to_string()).received(self.deliveries)
    }

    fn deliver_to_victim(&mut self) {
        let record = self.record();
        drop(self.victim.invoke(event([&record]), TIME));
    }

    async fn deliver_to_heir(&mut self) -> (bool, String) {
        let record = self.record();
        let failures = self.heir.invoke(event([&record]), AMPLE).await.failures();
        (failures.is_empty(), self.heir.outcomes(&record.id).last().unwrap().clone())
    }

    async fn item(&self) -> Option<Item> {
        Item::of(&self.dynamo, KEY).await
    }

    async fn until_the_lease_is_over(&self) {
        until_after(self.item().await.unwrap().lease().plus(CLOCK_SKEW)).await;
    }

    /// Requests that the target has got: POSTs; or writes that reached DynamoDB, one for each
    /// process that made any, as the SDK tries again by itself.
    fn sent(&self) -> usize {
        match self.kind {
            Kind::Http(_) => self.sink.keys().iter().filter(|key| *key == KEY).count(),
            kind => {
                let wrote =
                    |proxy: &&&DynamoProxy| proxy.exchanges(kind.write()).iter().any(|write| write.status.is_some());
                [&self.proxy, &self.heirs_proxy].iter().filter(wrote).count()
            }
        }
    }

    async fn effects(&self) -> usize {
        let item = async |table: &str, name: &str, value: &str| {
            let get = self.dynamo.client.get_item().table_name(table).key(name, AttributeValue::S(value.into()));
            get.consistent_read(true).send().await.unwrap().item
        };
        match self.kind {
            Kind::Http(_) => self.sink.applied().iter().filter(|key| *key == KEY).count(),
            Kind::Transaction => {
                let left: usize =
                    item(STOCK, "item", "tea").await.unwrap()["quantity"].as_n().unwrap().parse().unwrap();
                assert_eq!((10 - left) % 3, 0);
                (10 - left) / 3
            }
            Kind::Natural => {
                let set = item(ADDRESSES, "customer", "7").await;
                usize::from(set.is_some_and(|item| item["address"] == AttributeValue::S("Fleet Street 4".into())))
            }
        }
    }

    /// Brings the victim to the step, and kills it there.
    async fn kill_victim(&mut self) {
        match (self.step, self.kind) {
            (Step::ClaimSent, _) => self.kill_with_held("PutItem", Passage::HoldRequest).await,
            (Step::ClaimStands, _) => self.kill_with_held("PutItem", Passage::HoldAnswer).await,
            (Step::ResultSent, _) => self.kill_with_held("UpdateItem", Passage::HoldRequest).await,
            (Step::ResultStands, _) => self.kill_with_held("UpdateItem", Passage::HoldAnswer).await,
            (Step::EffectSent, Kind::Http(_)) => self.kill_while_sink(Behaviour::Hold).await,
            (Step::EffectApplied, Kind::Http(_)) => self.kill_while_sink(Behaviour::ApplyAndHold).await,
            (Step::EffectSent, kind) => self.kill_with_held(kind.write(), Passage::HoldRequest).await,
            (Step::EffectApplied, kind) => self.kill_with_held(kind.write(), Passage::HoldAnswer).await,
            (Step::GivingBack, _) => {
                self.sink.behave(Behaviour::Answer(429, String::new()));
                self.kill_with_held("DeleteItem", Passage::HoldRequest).await;
                self.sink.behave(Behaviour::Apply);
            }
            (Step::Answering, _) => {
                self.victim.api.keep_answers();
                self.deliver_to_victim();
                self.victim.api.kept_answer().await;
                self.victim.kill();
            }
            (Step::Recovering, _) => {
                self.kill_while_sink(Behaviour::ApplyAndHold).await;
                self.until_the_lease_is_over().await;
                self.victim = self.victims.start().await;
                self.kill_with_held("UpdateItem", Passage::HoldRequest).await;
            }
            (Step::ClaimedAhead, kind) => {
                self.sink.behave(Behaviour::Hold);
                let records = [Record::order(BEFORE), self.record()];
                drop(self.victim.invoke(event(&records), TIME));
                self.sink.wait_for_posts(1).await;
                if kind != Kind::Http(Recovery::Park) {
                    eventually("the claim taken ahead", async || self.item().await).await;
                }
                self.victim.kill();
                self.sink.wait_for_quiet().await;
                self.sink.open_gate();
            }
        }
    }

    async fn kill_with_held(&mut self, operation: &'static str, passage: Passage) {
        self.proxy.on(operation, passage);
        self.deliver_to_victim();
        self.proxy.wait_for_held(operation).await;
        self.victim.kill();
    }

    async fn kill_while_sink(&mut self, behaviour: Behaviour) {
        self.sink.behave(behaviour);
        self.deliver_to_victim();
        self.sink.wait_for_posts(1).await;
        self.victim.kill();
        self.sink.wait_for_quiet().await;
        self.sink.open_gate();
    }

    async fn play(mut self) -> Observed {
        self.kill_victim().await;
        let sent_before = self.sent();

        let before = self.item().await;
        let mut settled = self.deliver_to_heir().await;
        let waited = settled == (false, "in-flight".to_owned());
        if waited {
            assert_eq!((self.item().await, self.sent()), (before, sent_before), "the record stands as it was");
            self.until_the_lease_is_over().await;
            settled = self.deliver_to_heir().await;
        }
        let (sent, item) = (self.sent(), self.item().await);

        // What the dead one had sent arrives late.
        self.proxy.release();
        let all_answered = || {
            let held =
                |operation: &String| self.proxy.exchanges(operation).iter().any(|exchange| exchange.status.is_none());
            !self.proxy.operations().iter().any(held)
        };
        until("everything to have arrived", all_answered).await;
        assert_eq!(self.item().await, item, "a late write changed the record");

        let again = self.deliver_to_heir().await;
        if self.kind != Kind::Natural {
            assert_eq!(self.item().await, item, "a duplicate changed the record");
            assert_eq!(self.sink.keys().iter().filter(|key| *key == KEY).count(), self.posts(sent));
        }
        Observed {
            sent_before,
            waited,
            acked: settled.0,
            outcome: settled.1,
            attempt: item.as_ref().map(Item::attempt),
            status: item.as_ref().map(|item| item.status().to_owned()),
            asked: self.sink.gets().iter().filter(|key| *key == KEY).count(),
            sent,
            effects: self.effects().await,
            again,
        }
    }

    /// So many of the requests as are POSTs.
    fn posts(&self, sent: usize) -> usize {
        if matches!(self.kind, Kind::Http(_)) { sent } else { 0 }
    }
}

// ---- what a cell says, and what it must not --------------------------------------------

/// One cell's text.
fn told(kind: Kind, seen: &Observed) -> String {
    let waits = if seen.waited { "waits; " } else { "" };
    let again = if seen.sent_before > 0 { " again" } else { "" };
    let attempt = seen.attempt.unwrap_or_default();
    let asked = if seen.asked > 0 { "asked, not found, " } else { "" };
    let what = match (kind, seen.outcome.as_str()) {
        (Kind::Http(_), "executed") => format!("{asked}sent{again} as attempt {attempt}"),
        (Kind::Http(_), "recovered") => "asked, found, not sent again".to_owned(),
        (Kind::Transaction, "executed") => format!("committed{again}"),
        (Kind::Natural, "applied") => format!("applied{again}"),
        (_, other) => other.to_owned(),
    };
    let (unit, result) = match kind {
        Kind::Http(_) => ("POST", "effect"),
        Kind::Transaction => ("commit", "effect"),
        Kind::Natural => ("write", "address"),
    };
    let count = |n: usize, of: &str| format!("{n} {of}{}", if n == 1 { "" } else { "s" });
    let effects = count(seen.effects, result).replace("addresss", "addresses");
    match kind {
        // A commit that is refused because the record stands there is no second one.
        Kind::Transaction => format!("{waits}{what}; {effects}"),
        _ => format!("{waits}{what}; {}, {effects}", count(seen.sent, unit)),
    }
}

fn check(step: Step, kind: Kind, seen: &Observed) {
    let context = format!("{step:?}, {kind:?}: {seen:?}");
    match kind {
        Kind::Http(Recovery::Park) => {
            assert!(seen.effects <= 1 && seen.sent <= 1, "at most once: {context}");
            // Acked with a result, or put aside.
            let status = if seen.acked { "COMPLETED" } else { "PARKED" };
            assert_eq!(seen.status.as_deref(), Some(status), "{context}");
            assert!(!seen.acked || seen.effects == 1, "acked without an effect: {context}");
        }
        Kind::Http(_) | Kind::Transaction => {
            assert!(seen.acked, "{context}");
            assert_eq!(seen.effects, 1, "exactly once: {context}");
            assert_eq!(seen.status.as_deref(), Some("COMPLETED"), "{context}");
        }
        Kind::Natural => {
            assert!(seen.acked && seen.effects == 1, "{context}");
            assert_eq!(seen.status, None, "nothing is stored: {context}");
        }
    }
    if kind == Kind::Http(Recovery::Verify) {
        let first_was_applied = matches!(seen.outcome.as_str(), "recovered" | "replayed");
        assert!(!first_was_applied || seen.sent == 1, "found, so not sent again: {context}");
    }
    let again = match (kind, seen.acked) {
        (Kind::Natural, _) => (true, "applied"),
        (_, true) => (true, "replayed"),
        (_, false) => (false, "parked"),
    };
    assert_eq!((seen.again.0, seen.again.1.as_str()), again, "the same answer ever after: {context}");
}

// ---- the table -------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread")]
async fn the_table_in_the_docs_is_what_happens() {
    let cells: Vec<(Step, Kind)> = STEPS
        .into_iter()
        .flat_map(|step| KINDS.map(|kind| (step, kind)))
        .filter(|(step, kind)| kind.has(*step))
        .collect();
    let play = |(step, kind)| async move {
        let seen = Stage::new(step, kind).await.play().await;
        check(step, kind, &seen);
        (step, kind, told(kind, &seen))
    };
    let played: Vec<(Step, Kind, String)> =
        stream::iter(cells.into_iter().map(play)).buffer_unordered(SIDE_BY_SIDE).collect().await;

    let mut table = String::from("\n| killed when |");
    for kind in KINDS {
        write!(table, " {} |", kind.title()).unwrap();
    }
    write!(table, "\n|{}\n| *promised* |", " --- |".repeat(KINDS.len() + 1)).unwrap();
    for kind in KINDS {
        write!(table, " *{}* |", kind.promise()).unwrap();
    }
    table.push('\n');
    for step in STEPS {
        write!(table, "| {} |", step.title()).unwrap();
        for kind in KINDS {
            let cell = played.iter().find(|cell| (cell.0, cell.1) == (step, kind));
            write!(table, " {} |", cell.map_or("–", |(_, _, told)| told)).unwrap();
        }
        table.push('\n');
    }

    page::compare("docs/crash-matrix.md", "tests/crash_matrix.rs", &table);
    proof::note(
        "crash matrix",
        &format!("{} kills, one at each step", played.len()),
        "what follows is what is promised",
    );
}
