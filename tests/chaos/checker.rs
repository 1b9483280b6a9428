//! Judges a history: was everything kept that is promised? A pure function, which trusts
//! neither the consumers nor the store.
//!
//! It plays all writes that the store has accepted through a small model of a record, and
//! says of every event whether it may have happened when it did:
//!
//! 1. Nothing is acked without a result that stands in its record, or a dead letter that was
//!    sent, and the log says which. A dead letter has its reason: the payload has no key, another payload came under
//!    the key, the target has refused it for good, or the record is parked.
//! 2. Of a key that was acked the effect was applied exactly once; of any other at most once.
//!    With `rerun` it is the target that sees to the "at most", so a repeated application is
//!    the target's fault; that it was applied at all is the consumers'. With `park` moreover
//!    nothing is sent for a key after a request whose outcome was not plain: one that was
//!    applied, not answered, or answered with anything but "not now" (425, 429) or "never"
//!    (other 4xx). After such an answer the claim is given back, and the next may send again.
//!    With transactions the stock is what it was minus what the records say was taken.
//! 3. Every duplicate hears one result: a record's result never changes, it is what the
//!    target answered when it applied the effect, and it stands when the ack is made.
//! 4. In a group an effect is begun only once every message sent before it is settled: has
//!    its result, or its dead letter, or was delivered for the last time (such a message may
//!    fail and leave without holding its group). None is held back unless one before it in
//!    its own group has failed, and everything ends settled once faults stop.
//! 5. A write is accepted only from the owner of the key's latest claim; a takeover only of
//!    a lease that is over, beyond the skew, by the claimant's own clock. Attempts count up
//!    by one and belong to one owner each; each claim sends at most one request to the
//!    target, with its attempt. In the end the table holds what the accepted writes make.
//! 6. What has no key costs no more than itself: it is rejected, with a reason, no invocation
//!    fails for it, and no process dies.

mod ending;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::Value;

use super::history::{Entry, Event, Meaning, Write};
use super::plan::Mode;
use super::replay::{Record, Step};
use super::trace::Trace;

/// What the judge knows beside the history.
#[derive(Debug, Clone)]
pub struct Facts {
    pub mode: Mode,
    pub max_receives: u32,
    /// By how much a takeover waits for the end of a lease, in milliseconds.
    pub skew: u64,
    /// What was still in the queue when it should have been empty.
    pub left: Vec<String>,
    /// The table in the end.
    pub table: BTreeMap<String, Row>,
    /// Of each item how much there was and how much there is.
    pub stock: BTreeMap<String, (u64, u64)>,
}

/// An item of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub status: String,
    pub attempt: u64,
    pub data: Option<String>,
}

/// Outcomes that are acked.
const ACKED: [&str; 3] = ["executed", "replayed", "recovered"];

/// What the log says of a message whose group was stopped.
const GROUP_STOPPED: &str = "an earlier message of its group was not acknowledged";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    AckedWithoutResult,
    AckNotLogged,
    UnfoundedDeadLetter,
    AppliedTwice,
    NeverApplied,
    SentAfterUnclear,
    StockWrong,
    ResultDiffers,
    OutOfOrder,
    HeldByAnother,
    NotDrained,
    WriteWithoutClaim,
    EarlyTakeover,
    SentWithoutClaim,
    TableDiffers,
    PoisonNotRejected,
    InvocationFailed,
    Died,
}

/// A promise that was not kept, and the events that show it.
#[derive(Debug, Clone)]
pub struct Violation {
    pub rule: Rule,
    pub what: String,
    pub trace: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)?;
        self.trace.iter().try_for_each(|line| write!(f, "\n    {line}"))
    }
}

/// What the judge says.
#[derive(Debug)]
pub struct Verdict {
    /// All promises that were not kept.
    pub violations: Vec<Violation>,
    /// Writes that were refused as their claim had been taken over, released or finished.
    pub fenced: u64,
}

/// Judges a history.
pub fn check(facts: &Facts, entries: &[Entry]) -> Verdict {
    let mut judge = Judge {
        facts,
        entries,
        messages: BTreeMap::new(),
        keys: BTreeMap::new(),
        groups: BTreeMap::new(),
        verdict: Verdict { violations: Vec::new(), fenced: 0 },
    };
    for (position, entry) in entries.iter().enumerate() {
        judge.event(position, &entry.event);
    }
    judge.end();
    judge.verdict
}

/// A claim that the store has accepted, and whether it has sent its request.
#[derive(Debug)]
struct Claim {
    owner: String,
    attempt: u64,
    message: String,
    sent: bool,
}

#[derive(Debug, Default)]
struct Key {
    record: Record,
    claims: Vec<Claim>,
    payloads: BTreeSet<String>,
    answers: Vec<Value>,
    /// Something was sent, and its outcome is not plain.
    unclear: bool,
    acked: bool,
    takes: Option<(String, u64)>,
}

#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // facts about a message, each by itself
struct Message {
    key: Option<String>,
    payload: String,
    /// What it was before it went through the dead-letter queue.
    original: String,
    receives: u32,
    letter: bool,
    exhausted: bool,
    acked: bool,
    refused: bool,
    /// The latest line of each process's log: the outcome, and whether a dead letter was sent.
    reported: BTreeMap<usize, (String, bool)>,
}

struct Judge<'a> {
    facts: &'a Facts,
    entries: &'a [Entry],
    messages: BTreeMap<String, Message>,
    keys: BTreeMap<String, Key>,
    /// The messages of each group, as they were sent.
    groups: BTreeMap<String, Vec<String>>,
    verdict: Verdict,
}

impl Judge<'_> {
    fn found(&mut self, rule: Rule, what: String, trace: &Trace<'_>) {
        let trace = trace.lines(self.entries);
        self.verdict.violations.push(Violation { rule, what, trace });
    }

    /// Something that is wrong with a message, and what happened to its key.
    fn found_of(&mut self, rule: Rule, at: usize, message: &str, what: String) {
        let key = self.keyed(message);
        self.found(rule, what, &Trace::of_message(at, message).with_key(key.as_deref()));
    }

    fn event(&mut self, at: usize, event: &Event) {
        match event {
            Event::Sent { message, key, group, payload, original } => {
                self.groups.entry(group.clone()).or_default().push(message.clone());
                if let Some(key) = key {
                    self.keys.entry(key.clone()).or_default().payloads.insert(payload.clone());
                }
                let sent = Message {
                    key: key.clone(),
                    payload: payload.clone(),
                    original: original.clone().unwrap_or_else(|| message.clone()),
                    receives: 0,
                    letter: false,
                    exhausted: false,
                    acked: false,
                    refused: false,
                    reported: BTreeMap::new(),
                };
                self.messages.insert(message.clone(), sent);
            }
            Event::Delivered { message, receive, .. } => self.message(message).receives = *receive,
            Event::Reported { process, message, outcome, dead_lettered, reason } => {
                self.reported(at, message, outcome, *dead_lettered, reason.as_deref());
                if outcome == "unstarted" && reason.as_deref() == Some(GROUP_STOPPED) {
                    self.held_back(at, *process, message);
                }
                self.message(message).reported.insert(*process, (outcome.clone(), *dead_lettered));
            }
            Event::Acked { process, message, taken } => self.acked(at, *process, message, *taken),
            Event::Exhausted { message } => {
                self.message(message).exhausted = true;
                if self.messages[message].receives < self.facts.max_receives {
                    let what = format!("{message} is dead after {} receives", self.messages[message].receives);
                    self.found(Rule::UnfoundedDeadLetter, what, &Trace::of_message(at, message));
                }
            }
            Event::Letter { original, .. } => {
                // A message that came back from there and is given up again tells of the
                // first; what was sent before the letter is settled by it.
                self.messages
                    .values_mut()
                    .filter(|message| message.original == *original)
                    .for_each(|m| m.letter = true);
            }
            Event::InvocationFailed { error_type, text, .. }
                if !["StoreAway", "TooLittleTime"].contains(&error_type.as_str()) =>
            {
                let trace = Trace::of_event(at);
                self.found(Rule::InvocationFailed, format!("{error_type}: {text}"), &trace);
            }
            Event::Stopped { how, process } if how.starts_with("died") => {
                let trace = Trace::of_event(at);
                self.found(Rule::Died, format!("process {process} {how}"), &trace);
            }
            Event::Store { key, write: Some(write), accepted: Some(true), .. } => self.write(at, key, write),
            Event::Store { key, write: Some(write), accepted: Some(false), .. } => {
                if let Some((owner, attempt)) = write.fence() {
                    let latest = self.keys.get(key).and_then(|key| key.claims.last());
                    let is_latest = latest.is_some_and(|claim| claim.owner == owner && claim.attempt == attempt);
                    self.verdict.fenced += u64::from(!is_latest);
                }
            }
            Event::Arrived { key, attempt, message } => self.arrived(at, key, *attempt, message),
            Event::Applied { key, answer, .. } => {
                self.key(key).answers.push(answer.clone());
                if self.keys[key].answers.len() > 1 {
                    self.found(Rule::AppliedTwice, format!("{key} was applied again"), &Trace::of_effects(at, key));
                }
            }
            Event::Answered { key, message, meaning, .. } => {
                self.key(key).unclear = !matches!(meaning, Meaning::NotApplied | Meaning::Never);
                self.message(message).refused |= *meaning == Meaning::Never;
            }
            _ => {}
        }
    }

    fn message(&mut self, message: &str) -> &mut Message {
        self.messages.get_mut(message).unwrap_or_else(|| panic!("{message} was never sent"))
    }

    fn key(&mut self, key: &str) -> &mut Key {
        self.keys.entry(key.to_owned()).or_default()
    }

    fn key_of(&self, message: &str) -> Option<&Key> {
        self.messages[message].key.as_ref().map(|key| &self.keys[key])
    }

    /// Whether the effect of just this payload has a result that stands.
    fn has_result(&self, message: &str) -> bool {
        self.key_of(message).is_some_and(|key| match &key.record {
            Record::Completed { message: by, .. } => {
                self.messages.get(by).is_some_and(|by| by.payload == self.messages[message].payload)
            }
            _ => false,
        })
    }

    fn reported(&mut self, at: usize, message: &str, outcome: &str, dead_lettered: bool, reason: Option<&str>) {
        let has_result = self.has_result(message);
        let record = self.key_of(message).map(|key| key.record.clone()).unwrap_or_default();
        let payloads = self.key_of(message).map_or(0, |key| key.payloads.len());
        let here = &self.messages[message];
        let founded = match outcome {
            "executed" | "replayed" | "recovered" => {
                if !has_result {
                    let what = format!("{message} is said to be {outcome}, and the record has no result of it");
                    self.found_of(Rule::AckedWithoutResult, at, message, what);
                }
                true
            }
            "rejected" => here.key.is_none(),
            "conflict" => payloads > 1,
            "permanent" => here.refused,
            "parked" => matches!(record, Record::Parked { .. }),
            _ => !dead_lettered,
        };
        let given_up = matches!(outcome, "rejected" | "conflict" | "permanent" | "parked");
        if !founded || given_up && reason.is_none_or(str::is_empty) {
            let what = format!("{message} is said to be {outcome}, reason: {reason:?}");
            self.found_of(Rule::UnfoundedDeadLetter, at, message, what);
        }
        if self.messages[message].key.is_none() && !["rejected", "unstarted"].contains(&outcome) {
            let what = format!("{message} has no key, and is said to be {outcome}");
            self.found_of(Rule::PoisonNotRejected, at, message, what);
        }
    }

    /// A message that was not begun because of its group: one before it must have failed.
    fn held_back(&mut self, at: usize, process: usize, message: &str) {
        let failed = |member: &&String| {
            let reported = self.messages[*member].reported.get(&process);
            reported.is_some_and(|(outcome, dead_lettered)| !ACKED.contains(&outcome.as_str()) && !dead_lettered)
        };
        let group = self.groups.values().find(|group| group.iter().any(|member| member == message));
        let mut before = group.into_iter().flatten().take_while(|member| *member != message);
        if !before.any(|member| failed(&member)) {
            let what = format!("{message} was held back, and no message before it in its group had failed");
            self.found(Rule::HeldByAnother, what, &Trace::of_message(at, message));
        }
    }

    fn keyed(&self, message: &str) -> Option<String> {
        self.messages[message].key.clone()
    }

    fn acked(&mut self, at: usize, process: usize, message: &str, taken: bool) {
        let here = &self.messages[message];
        let lettered = here.letter && here.reported.get(&process).is_some_and(|(_, dead_lettered)| *dead_lettered);
        let has_result = self.has_result(message);
        if !lettered && !has_result {
            let what = format!("{message} was acked without a result and without a dead letter");
            self.found_of(Rule::AckedWithoutResult, at, message, what);
        }
        let logged = self.messages[message].reported.get(&process);
        if !logged.is_some_and(|(outcome, dead_lettered)| *dead_lettered || ACKED.contains(&outcome.as_str())) {
            let what = format!("{message} was acked, and the log says {logged:?}");
            self.found_of(Rule::AckNotLogged, at, message, what);
        }
        self.message(message).acked |= taken;
        if has_result
            && !lettered
            && let Some(key) = self.keyed(message)
        {
            self.key(&key).acked = true;
        }
    }

    /// Whether the messages after it in its group may go on.
    fn is_settled(&self, message: &str) -> bool {
        let here = &self.messages[message];
        here.letter || here.exhausted || here.receives >= self.facts.max_receives || self.has_result(message)
    }

    fn begins(&mut self, at: usize, key: &str, message: &str) {
        let group = self.groups.values().find(|group| group.iter().any(|member| member == message));
        let mut before = group.into_iter().flatten().take_while(|member| *member != message);
        if let Some(unsettled) = before.find(|member| !self.is_settled(member)).cloned() {
            let what = format!("{message} began before {unsettled} was settled");
            // The key of the one, the message of the other.
            let before = self.keyed(&unsettled);
            let trace = Trace::of_message(at, message).and(&unsettled).with_key(before.as_deref());
            self.found(Rule::OutOfOrder, format!("{what} ({key})"), &trace);
        }
    }

    fn arrived(&mut self, at: usize, key: &str, attempt: u64, message: &str) {
        self.begins(at, key, message);
        let park = self.facts.mode == Mode::Park;
        let here = self.key(key);
        let claim = here.claims.iter_mut().rev().find(|claim| claim.attempt == attempt && claim.message == message);
        let claimed = claim.filter(|claim| !claim.sent).map(|claim| claim.sent = true).is_some();
        let unclear = std::mem::replace(&mut here.unclear, true);
        if !claimed {
            let what = format!("{key} was sent as attempt {attempt} for {message}, which no claim allows");
            self.found(Rule::SentWithoutClaim, what, &Trace::of_effects(at, key));
        }
        if park && unclear {
            let what = format!("{key} was sent again after a request of unknown outcome");
            self.found(Rule::SentAfterUnclear, what, &Trace::of_effects(at, key));
        }
    }

    /// One accepted write.
    fn write(&mut self, at: usize, key: &str, write: &Write) {
        let skew = self.facts.skew;
        let here = self.key(key);
        let (before, step) = (here.record.clone(), here.record.step(write, skew));
        if step == Step::Repeated {
            return;
        }
        match write {
            Write::Claim { owner, attempt, message, .. } => {
                let (owner, message) = (owner.clone(), message.clone());
                here.claims.push(Claim { owner, attempt: *attempt, message, sent: false });
            }
            Write::Commit { takes, .. } => here.takes.clone_from(takes),
            _ => {}
        }
        if let Step::To(next) | Step::Early(next) = &step {
            here.record = next.clone();
        }
        match (&step, write) {
            (Step::Wrong, _) => {
                let what = format!("{key}: accepted by the store, although the record was {before:?}: {write}");
                self.found(Rule::WriteWithoutClaim, what, &Trace::of_writes(at, key));
            }
            (Step::Early(_), _) => {
                let what = format!("{key}: taken over before its lease was over: {write}");
                self.found(Rule::EarlyTakeover, what, &Trace::of_writes(at, key));
            }
            (_, Write::Commit { message, .. }) => self.begins(at, key, message),
            _ => {}
        }
    }
}
