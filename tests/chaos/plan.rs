//! What a round will do, all of it drawn from a seed.

use std::time::Duration;

use serde_json::json;

use crate::common::dynamo_proxy::Passage;
use crate::common::events::Record;

/// Numbers that are the same in every run with the same seed (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Another source, which does not depend on how far this one is used.
    pub fn fork(&self, number: u64) -> Self {
        let mut fork = Self(self.0 ^ number.wrapping_add(1).wrapping_mul(0xd134_2543_de82_ef95));
        fork.next();
        fork
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap()
    }

    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    pub fn millis(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.between(least, most))
    }

    /// True in so many of a thousand cases.
    pub fn chance(&mut self, in_thousand: u64) -> bool {
        self.below(1000) < in_thousand
    }

    /// One of them, each as likely as its weight says.
    pub fn weighted<T: Clone>(&mut self, choices: &[(u64, T)]) -> T {
        let mut left = self.below(choices.iter().map(|(weight, _)| weight).sum());
        let found = choices.iter().find(|(weight, _)| {
            let here = left < *weight;
            left = left.saturating_sub(*weight);
            here
        });
        found.unwrap().1.clone()
    }
}

/// What the consumers' effect is, and what a takeover may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    Rerun,
    Verify,
    Park,
    Transactional,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Rerun => "rerun",
            Self::Verify => "verify",
            Self::Park => "park",
            Self::Transactional => "transactional",
        }
    }
}

/// What a proxy does to prove that the checker would notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// Conditions of updates always hold.
    NoFence,
    /// Whoever claims a key is told that it is his.
    ClaimsGranted,
    /// Some results are not stored, and said to be.
    ResultsForgotten,
    /// The target applies a repeated key again.
    TargetForgets,
}

/// After so many rounds there was each kind.
pub const ROUNDS_OF_ALL_KINDS: u64 = 7;

/// One round: some processes on one queue, for some seconds of faults, and then without.
#[derive(Debug, Clone)]
pub struct Round {
    pub number: u64,
    pub random: Random,
    pub mode: Mode,
    /// How far each process's clock is ahead, in milliseconds.
    pub clocks: Vec<i64>,
    /// Whether that is more than the consumers allow for.
    pub beyond_skew: bool,
    /// The time of an invocation.
    pub time: Duration,
    pub visibility: Duration,
    pub max_receives: u32,
    /// Whether the function sends dead letters itself.
    pub letters: bool,
    pub groups: u64,
    pub orders: u64,
    /// How long there are faults.
    pub faults: Duration,
    /// Of a thousand requests to the store, so many fare badly.
    pub store_faults: u64,
    /// Of a thousand effects, so many.
    pub target_faults: u64,
    /// Of a thousand invocations, so many have a mishap.
    pub mishaps: u64,
    /// Whether processes are stopped for longer than their lease, and go on.
    pub pauses: bool,
    /// How long the queue may take to get empty once there are no faults.
    pub patience: Duration,
    pub sabotage: Option<Sabotage>,
}

impl Round {
    /// The `number`-th round of the run with that seed.
    pub fn new(seed: u64, number: u64) -> Self {
        let mut random = Random::new(seed).fork(number);
        // All modes in turn, so that a short run has each.
        let (mode, beyond_skew) = match number % ROUNDS_OF_ALL_KINDS {
            0 => (Mode::Rerun, false),
            1 => (Mode::Park, false),
            2 => (Mode::Transactional, false),
            3 => (Mode::Verify, false),
            4 => (Mode::Rerun, true),
            5 => (Mode::Park, true),
            _ => (Mode::Verify, true),
        };
        let processes = random.between(2, 4);
        let clocks = match (beyond_skew, processes) {
            // One takes over while the deadline of the holder is still to come, one works on
            // when its own has long passed.
            (true, _) => vec![2800, -1500, 0],
            (false, n) => (0..n).map(|_| i64::try_from(random.between(0, 800)).unwrap() - 400).collect(),
        };
        let letters = random.chance(700);
        let time = if beyond_skew { Duration::from_secs(5) } else { random.millis(2200, 3800) };
        Self {
            number,
            mode,
            clocks,
            beyond_skew,
            time,
            visibility: random.millis(1500, 4500),
            // What can't be sent to the dead-letter queue holds its group until it gets there.
            max_receives: if letters { 10 } else { 5 },
            letters,
            groups: random.between(6, 12),
            orders: if letters { random.between(80, 150) } else { random.between(40, 70) },
            faults: random.millis(9000, 13000),
            store_faults: random.between(50, 400),
            target_faults: random.between(50, 500),
            mishaps: random.between(60, 300),
            // A process that is stopped between its claim and its effect goes on with the
            // effect when it wakes.
            pauses: (mode != Mode::Verify || beyond_skew) && random.chance(800),
            // Far longer than the longest lease and all receives together.
            patience: Duration::from_mins(2),
            sabotage: None,
            random: random.fork(99),
        }
    }

    /// Whether the target refuses attempts lower than the one that has asked: with clocks
    /// further apart, or a holder that is frozen, `verify` relies on that.
    pub fn fences(&self) -> bool {
        self.mode == Mode::Verify && self.beyond_skew
    }

    pub fn title(&self) -> String {
        let clocks = if self.beyond_skew { ", clocks apart" } else { "" };
        let fences = if self.fences() { ", a target that fences" } else { "" };
        format!("round {} ({}{clocks}{fences})", self.number, self.mode.name())
    }

    /// What becomes of a request to the store.
    pub fn passage(&self, random: &mut Random, operation: &str) -> Passage {
        // Reading only warms up.
        let faults = if operation == "GetItem" { self.store_faults / 8 } else { self.store_faults };
        if !random.chance(faults) {
            return Passage::Free;
        }
        let (slow, late) = (random.millis(30, 500), random.millis(500, 6000));
        random.weighted(&[
            (5, Passage::Throttle),
            (4, Passage::Refuse),
            (4, Passage::LoseRequest),
            (6, Passage::LoseAnswer),
            (3, Passage::TruncateAnswer),
            (1, Passage::HoldAnswer),
            (4, Passage::Late(slow)),
            (6, Passage::Late(late)),
        ])
    }

    /// What the store does on top if it is sabotaged.
    pub fn lie(&self, random: &mut Random, operation: &str, body: &str) -> Option<Passage> {
        match (self.sabotage?, operation) {
            (Sabotage::NoFence, "UpdateItem" | "DeleteItem") => {
                let late = if random.chance(300) { random.millis(1000, 6000) } else { Duration::ZERO };
                Some(Passage::Unfenced(late))
            }
            (Sabotage::ClaimsGranted, "PutItem") => Some(Passage::Granted),
            (Sabotage::ResultsForgotten, "UpdateItem") if body.contains("COMPLETED") && random.chance(300) => {
                Some(Passage::Forgotten)
            }
            _ => None,
        }
    }

    /// What happens to a process while it works on a batch.
    pub fn mishap(&self, random: &mut Random) -> Mishap {
        if !random.chance(self.mishaps) {
            return Mishap::None;
        }
        let when = self.when(random);
        // Mostly until another has taken over.
        let least = self.time + Duration::from_millis(if random.chance(700) { 3300 } else { 0 });
        let pause = least + random.millis(0, 2500);
        random.weighted(&[
            (10, Mishap::Kill(when)),
            (1, Mishap::LoseAnswer),
            (if self.pauses { 4 } else { 0 }, Mishap::Pause(when, pause)),
        ])
    }

    fn when(&self, random: &mut Random) -> When {
        // Most batches are done soon.
        let soon = if random.chance(700) { 150 } else { u64::try_from(self.time.as_millis()).unwrap() };
        let (after, requests, posts) = (random.millis(0, soon), 1 + random.index(6), 1 + random.index(2));
        let has_posts = u64::from(self.mode != Mode::Transactional);
        random.weighted(&[
            (5, When::After(after)),
            (5, When::AtRequest(requests)),
            (4 * has_posts, When::AtPost(posts)),
        ])
    }

    /// All messages of the round, in the order in which they are sent.
    pub fn messages(&self) -> Vec<Record> {
        let mut random = self.random.fork(1);
        let mut messages: Vec<Record> = Vec::new();
        let mut orders: Vec<(String, String, String)> = Vec::new();
        let mut number = 0;
        while (orders.len() as u64) < self.orders {
            number += 1;
            let id = format!("m{number:03}");
            let group = format!("g{}", random.below(self.groups));
            let known = (!orders.is_empty()).then(|| orders[random.index(orders.len())].clone());
            let record = match (random.below(100), known) {
                // The sender sends it again: another id, sometimes another group.
                (0..=15, Some((_, body, own))) => {
                    Record::new(&id, body).in_group(if random.chance(600) { &own } else { &group })
                }
                // One key for two things.
                (16..=18, Some((key, _, own))) => Record::new(&id, Self::body(&key, &mut random, true))
                    .in_group(if random.chance(500) { &own } else { &group }),
                (19..=21, _) => {
                    let bodies = [r#"{"amount":1}"#, r#"{"orderId":""#, "no JSON at all", r#"{"orderId":""}"#, "[]"];
                    Record::new(&id, bodies[random.index(bodies.len())]).in_group(&group)
                }
                _ => {
                    let key = format!("k{:03}", orders.len());
                    let body = Self::body(&key, &mut random, false);
                    orders.push((key, body.clone(), group.clone()));
                    Record::new(&id, body).in_group(&group)
                }
            };
            messages.push(record);
        }
        messages
    }

    fn body(key: &str, random: &mut Random, other: bool) -> String {
        let quantity = random.between(1, 3) + if other { 10 } else { 0 };
        let item = ITEMS[random.index(ITEMS.len())].0;
        json!({ "orderId": key, "item": item, "quantity": quantity }).to_string()
    }
}

/// What a stock ledger has at the start.
pub const ITEMS: [(&str, u64); 4] = [("tea", 1000), ("salt", 1000), ("figs", 12), ("saffron", 5)];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mishap {
    None,
    Kill(When),
    /// Its answer does not reach the queue.
    LoseAnswer,
    /// It is stopped for so long, and goes on.
    Pause(When, Duration),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    After(Duration),
    /// Once it has sent so many requests to the store.
    AtRequest(usize),
    /// Once the target got so many requests from anyone.
    AtPost(usize),
}
