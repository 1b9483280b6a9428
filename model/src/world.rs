//! The state of a world.

use std::collections::{BTreeMap, BTreeSet};

use idempotent_consumer::outcome::{Disposition, Outcome, Report};
use idempotent_consumer::record::{ClaimRequest, Record};

use crate::setting::Setting;
use crate::store::Request;
use crate::turn::Turn;

/// Everything there is at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    /// True time, in seconds.
    pub now: u64,
    /// The store: what it keeps for each key.
    pub records: Vec<Option<Record>>,
    /// The transactions that were committed, by the tokens of their requests. DynamoDB
    /// remembers these for ten minutes.
    pub committed: Vec<String>,
    /// The queue.
    pub queue: Vec<Queued>,
    /// What each consumer is at; `None` if it waits for a batch.
    pub consumers: Vec<Option<Turn>>,
    /// What the effect's target has done for each key.
    pub target: Vec<Target>,
    /// The keys in the order in which they were first applied.
    pub applied_order: Vec<usize>,
    /// Requests to the store that count as lost, and will arrive.
    pub late_requests: Vec<Request>,
    /// Requests to the target that count as failed, and may arrive.
    pub late_effects: Vec<EffectRequest>,
    /// How many more faults may happen.
    pub faults_left: u8,
    /// What was told of keys as done with: the key, its result, and whether the store held
    /// that result at the moment.
    pub acks: BTreeSet<(usize, String, bool)>,
    /// A write by a consumer that had lost its claim, or over something that it had not
    /// seen, changed a record.
    pub foreign_write: bool,
    /// The effects of two claims of one key arrived under the same fencing token.
    pub token_clash: bool,
}

/// A message in its queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Queued {
    /// Where it is.
    pub place: Place,
    /// How often it was received.
    pub receives: u8,
    /// How often it had been when it was last sent back from the dead-letter queue, as a new
    /// message: what was delivered before can't be answered any more.
    pub receives_before: u8,
    /// Until when it is hidden, true time.
    pub hidden_until: u64,
    /// How often it was put back after it had been received too often.
    pub redrives: u8,
    /// A dead letter with a reason was sent for it.
    pub letter: Option<&'static str>,
}

impl Queued {
    /// It comes back from the dead-letter queue, as a new message.
    pub fn put_back(&mut self, now: u64) {
        self.place = Place::Waiting;
        self.receives_before = self.receives;
        self.hidden_until = now;
        self.letter = None;
    }
}

/// Where a message is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Place {
    /// In its queue.
    Waiting,
    /// Gone from it as done with.
    Acked,
    /// Gone from it after a dead letter was sent for this reason.
    DeadLettered(&'static str),
    /// Moved to the dead-letter queue by its own, received too often.
    Exhausted,
    /// Acked without a result, though nobody has heard of it.
    Lost,
}

/// What the target knows of a key.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Target {
    /// How often the effect was applied.
    pub applied: u8,
    /// What it answered the first time.
    pub result: Option<String>,
    /// The highest attempt it was sent or asked under.
    pub highest: u64,
    /// Whose effects it was sent under which attempt.
    pub tokens: BTreeMap<u64, String>,
}

/// A request to the target.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EffectRequest {
    /// The key.
    pub key: usize,
    /// Whose claim it was sent under.
    pub owner: String,
    /// The fencing token.
    pub attempt: u64,
    /// The end of that claim's lease, in true time.
    pub lease_end: u64,
}

/// How a message's turn ended: what the model keeps of an [`Outcome`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct End {
    /// The outcome's name.
    pub name: &'static str,
    /// The key's result, if it has one.
    pub result: Option<String>,
    /// What follows from it.
    pub then: Consequence,
    /// What follows once a dead letter was sent.
    pub after_its_letter: Consequence,
}

/// What follows from the end of a message's turn, as its [`Report`] has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Consequence {
    /// What the queue is to be told.
    pub disposition: Disposition,
    /// Whether it stops its group.
    pub stops: bool,
    /// The same, if this was the last receive.
    pub stops_on_last_receive: bool,
}

impl End {
    /// What is to be kept of an outcome.
    #[must_use]
    pub fn of(outcome: Outcome) -> Self {
        let name = outcome.name();
        let result = outcome.result().map(|result| result.json.clone());
        let mut report =
            Report { message_id: String::new(), group: None, key: None, attempt: None, outcome, dead_lettered: false };
        let then = Consequence::of(&report);
        report.dead_lettered = true;
        Self { name, result, then, after_its_letter: Consequence::of(&report) }
    }

    /// The same after a dead letter was sent.
    #[must_use]
    pub fn dead_lettered(self) -> Self {
        Self { then: self.after_its_letter, ..self }
    }
}

impl Consequence {
    fn of(report: &Report) -> Self {
        Self {
            disposition: report.disposition(),
            stops: report.stops_its_group(false),
            stops_on_last_receive: report.stops_its_group(true),
        }
    }
}

impl World {
    /// The record of a key.
    #[must_use]
    pub fn record(&self, key: usize) -> Option<&Record> {
        self.records.get(key).and_then(Option::as_ref)
    }

    /// The target is sent an effect: its answer, which is what a duplicate gets too if it
    /// deduplicates; `None` if it refuses.
    pub fn apply(&mut self, setting: &Setting, request: &EffectRequest) -> Option<String> {
        let result = format!("\"{}\"", request.owner);
        let target = self.target.get_mut(request.key)?;
        if request.attempt < target.highest && setting.target_refuses_lower_attempts {
            return None;
        }
        target.highest = target.highest.max(request.attempt);
        let whose = target.tokens.entry(request.attempt).or_insert_with(|| request.owner.clone());
        self.token_clash |= *whose != request.owner;
        if let (Some(first), true) = (&target.result, setting.deduplicates()) {
            return Some(first.clone());
        }
        target.applied += 1;
        if target.result.is_none() {
            target.result = Some(result.clone());
            self.applied_order.push(request.key);
        }
        Some(result)
    }

    /// The target is asked under an attempt whether the key was applied: the result, if it
    /// was.
    pub fn ask(&mut self, key: usize, attempt: u64) -> Option<String> {
        let target = self.target.get_mut(key)?;
        target.highest = target.highest.max(attempt);
        target.result.clone()
    }
}

/// The number of the key that a request is for.
#[must_use]
pub fn key_of(request: &ClaimRequest) -> usize {
    request.id.as_str().parse().unwrap_or_default()
}
