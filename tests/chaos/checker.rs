//! Judges a history: was everything kept that is promised? A pure function, which trusts
//! neither the consumers nor the store.
//!
//! It plays all writes that the store has accepted through a small model of a record, and
//! says of every event whether it may have happened when it did:
//!
//! 1. Nothing is acked without a result that stands in its record, or a dead letter that was
//!    sent, and the log of the same invocation says which. A dead letter has its reason, both
//!    as it is sent and as it is logged: the payload has no key, another payload came under
//!    the key, the target has refused it for good, or the record is parked.
//! 2. Of a key that was acked the effect was applied exactly once; of any other at most once.
//!    With `rerun` it is the target that sees to the "at most", so a repeated application is
//!    the target's fault; that it was applied at all is the consumers'. With `park` moreover
//!    nothing is sent for a key after a request whose outcome was not plain: one that was
//!    applied, not answered, or answered with anything but "not now" (425, 429) or "never"
//!    (other 4xx). After such an answer the claim is given back, and the next may send again.
//!    With transactions the stock is what it was minus what the records say was taken.
//! 3. Every duplicate hears one result. That is judged by the records and by the target's
//!    answers, and not by the log, which names outcomes and has no results: a record's result
//!    never changes, it is what the target answered when it applied the effect, and it stands
//!    when the ack is made.
//! 4. In a group an effect is begun only once every message sent before it is settled: has
//!    its result, or its dead letter, or has failed on its last receive, or its process has
//!    ended in it (such a message leaves without holding its group). None is held back unless
//!    one before it in its own group has failed in the same invocation, and everything ends
//!    settled once faults stop.
//! 5. A write is accepted only from the owner of the key's latest claim; a takeover only of
//!    a lease that is over, beyond the skew, by the claimant's own clock. Attempts count up
//!    by one and belong to one owner each; each claim sends at most one request to the
//!    target, with its attempt, and while it stands. In the end the table holds what the
//!    accepted writes make.
//! 6. What has no key costs no more than itself: it is rejected, with a reason, no invocation
//!    fails for it, and no process dies. An invocation may fail as a whole for want of the
//!    store or of time, and only while there are faults.
//!
//! No record expires in a round, which lasts minutes: retention is a day and more. So what
//! happens to a key that was forgotten is not judged here.

mod claims;
mod ending;
mod messages;
mod process;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use idempotent_consumer::time::EpochMillis;
use serde_json::Value;

use self::claims::Claim;
use self::messages::{GROUP_STOPPED, has_failed};
use self::process::Process;
use super::history::{Entry, Event, FAULTS_ARE_OVER, Meaning};
use super::plan::Mode;
use super::replay::Record;
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
    SentUnderDeadClaim,
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
        processes: BTreeMap::new(),
        faults: true,
        verdict: Verdict { violations: Vec::new(), fenced: 0 },
    };
    for (position, entry) in entries.iter().enumerate() {
        judge.event(position, &entry.event);
    }
    judge.end();
    judge.verdict
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
    /// It has failed on its last receive, or its process has ended in it.
    has_failed_for_good: bool,
}

struct Judge<'a> {
    facts: &'a Facts,
    entries: &'a [Entry],
    messages: BTreeMap<String, Message>,
    keys: BTreeMap<String, Key>,
    /// The messages of each group, as they were sent.
    groups: BTreeMap<String, Vec<String>>,
    processes: BTreeMap<usize, Process>,
    /// Until the history says that they are over.
    faults: bool,
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
                    has_failed_for_good: false,
                };
                self.messages.insert(message.clone(), sent);
            }
            Event::Delivered { process, message, receive } => {
                let (now, faults) = (self.now(at), self.faults);
                self.process(*process).delivered(message, *receive, now, faults);
                self.message(message).receives = *receive;
            }
            Event::Reported { process, message, outcome, dead_lettered, reason } => {
                self.reported(at, message, outcome, *dead_lettered, reason.as_deref());
                if outcome == "unstarted" && reason.as_deref() == Some(GROUP_STOPPED) {
                    self.held_back(at, *process, message);
                }
                let is_last =
                    self.process(*process).reported(message, outcome, *dead_lettered) >= self.facts.max_receives;
                self.message(message).has_failed_for_good |= is_last && has_failed(outcome, *dead_lettered);
            }
            Event::Acked { process, message, taken } => {
                self.acked(at, *process, message, *taken);
                self.process(*process).is_done();
            }
            Event::Failed { process, .. } => self.process(*process).is_done(),
            Event::Exhausted { message } => {
                self.message(message).exhausted = true;
                if self.messages[message].receives < self.facts.max_receives {
                    let what = format!("{message} is dead after {} receives", self.messages[message].receives);
                    self.found(Rule::UnfoundedDeadLetter, what, &Trace::of_message(at, message));
                }
            }
            Event::Letter { original, reason } => self.letter(at, original, reason),
            Event::InvocationFailed { process, error_type, text } => {
                let now = self.now(at);
                let process = self.process(*process);
                if !process.may_fail_with(error_type, now) {
                    self.found(Rule::InvocationFailed, format!("{error_type}: {text}"), &Trace::of_event(at));
                }
            }
            Event::Started { process, ahead } => self.process(*process).started(*ahead),
            Event::Stopped { how, process } => self.stopped(at, *process, how),
            Event::World { what: FAULTS_ARE_OVER } => self.faults = false,
            Event::Store { process, key, write: Some(write), accepted: Some(true), .. } => {
                self.write(at, *process, key, write);
            }
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

    fn now(&self, at: usize) -> EpochMillis {
        self.entries[at].at
    }

    fn process(&mut self, process: usize) -> &mut Process {
        self.processes.entry(process).or_default()
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

    fn keyed(&self, message: &str) -> Option<String> {
        self.messages[message].key.clone()
    }
}
