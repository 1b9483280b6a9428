//! What happened, in the order in which it happened.
//!
//! Everything that is written down happens in this process, under one lock: the queue, the
//! target and the proxies are here, and the proxies let one request at a time through to
//! the store. So the order is not a guess from clocks.

use std::fmt;
use std::sync::{Arc, Mutex};

use idempotent_consumer::time::{Clock, EpochMillis, SystemClock};
use serde_json::Value;

use crate::common::dynamo_proxy::Passage;

/// What the target's answer says to the consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    Applied,
    NotApplied,
    Never,
    /// Or there is none.
    Unclear,
}

/// A write to the store, as its request asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    Claim {
        owner: String,
        attempt: u64,
        lease: u64,
        claimed_at: u64,
        message: String,
    },
    Complete {
        owner: String,
        attempt: u64,
        data: String,
    },
    Park {
        owner: String,
        attempt: u64,
    },
    SetLease {
        owner: String,
        attempt: u64,
        lease: u64,
    },
    Release {
        owner: String,
        attempt: u64,
    },
    /// Record and effect at once; `takes` is how much of which item.
    Commit {
        token: String,
        message: String,
        data: String,
        takes: Option<(String, u64)>,
    },
}

#[derive(Debug, Clone)]
pub enum Event {
    Sent {
        message: String,
        key: Option<String>,
        group: String,
        payload: String,
        original: Option<String>,
    },
    Delivered {
        process: usize,
        message: String,
        receive: u32,
    },
    /// A line of a process's log.
    Reported {
        process: usize,
        message: String,
        outcome: String,
        dead_lettered: bool,
        reason: Option<String>,
    },
    /// `taken`: by the queue, which does not if it is too late.
    Acked {
        process: usize,
        message: String,
        taken: bool,
    },
    Failed {
        process: usize,
        message: String,
    },
    InvocationFailed {
        process: usize,
        error_type: String,
        text: String,
    },
    /// The queue has put it into the dead-letter queue.
    Exhausted {
        message: String,
    },
    /// The function has sent a dead letter for what was this message at first.
    Letter {
        original: String,
        reason: String,
    },
    Started {
        process: usize,
        ahead: i64,
    },
    Stopped {
        process: usize,
        how: &'static str,
    },
    /// `accepted` is what the store said, if the request reached it: not what the consumer
    /// was told.
    Store {
        process: usize,
        operation: String,
        key: String,
        write: Option<Write>,
        passage: Passage,
        accepted: Option<bool>,
    },
    Arrived {
        key: String,
        attempt: u64,
        message: String,
    },
    Applied {
        key: String,
        message: String,
        answer: Value,
    },
    Answered {
        key: String,
        message: String,
        fate: &'static str,
        meaning: Meaning,
    },
    Asked {
        key: String,
        answer: u16,
    },
    /// Something that has no key: an outage begins, say.
    World {
        what: &'static str,
    },
}

/// From then on everything works.
pub const FAULTS_ARE_OVER: &str = "faults are over";

/// One event, and when it was.
#[derive(Debug, Clone)]
pub struct Entry {
    pub at: EpochMillis,
    pub event: Event,
}

/// A list that only grows.
#[derive(Debug, Clone, Default)]
pub struct History(Arc<Mutex<Vec<Entry>>>);

impl History {
    pub fn record(&self, event: Event) {
        let mut entries = self.0.lock().unwrap();
        entries.push(Entry { at: SystemClock.now(), event });
    }

    pub fn entries(&self) -> Vec<Entry> {
        self.0.lock().unwrap().clone()
    }

    /// How many effects have arrived.
    pub fn arrivals(&self) -> usize {
        self.0.lock().unwrap().iter().filter(|entry| matches!(entry.event, Event::Arrived { .. })).count()
    }
}

impl Write {
    /// The key that a request to the store writes to, and what.
    pub fn parse(operation: &str, body: &str) -> Option<(String, Self)> {
        let body: Value = serde_json::from_str(body).ok()?;
        let (id, write) = match operation {
            "PutItem" => {
                let item = &body["Item"];
                (text(&item["id"]), Self::claim(item))
            }
            "UpdateItem" => (text(&body["Key"]["id"]), Self::update(&body["ExpressionAttributeValues"])),
            "DeleteItem" => {
                let (owner, attempt) = fence(&body["ExpressionAttributeValues"]);
                (text(&body["Key"]["id"]), Self::Release { owner, attempt })
            }
            "TransactWriteItems" => {
                let items = body["TransactItems"].as_array()?;
                let item = &items.first()?["Put"]["Item"];
                let takes = items.get(1).map(|write| {
                    let update = &write["Update"];
                    (text(&update["Key"]["item"]), number(&update["ExpressionAttributeValues"][":n"]))
                });
                let token = body["ClientRequestToken"].as_str()?.to_owned();
                let (message, data) = (text(&item["message_id"]), text(&item["data"]));
                (text(&item["id"]), Self::Commit { token, message, data, takes })
            }
            _ => return None,
        };
        Some((id.split_once('#')?.1.to_owned(), write))
    }

    /// Owner and attempt that the write is to be made by, if it needs a claim.
    pub fn fence(&self) -> Option<(&str, u64)> {
        match self {
            Self::Complete { owner, attempt, .. }
            | Self::Park { owner, attempt }
            | Self::SetLease { owner, attempt, .. }
            | Self::Release { owner, attempt } => Some((owner, *attempt)),
            Self::Claim { .. } | Self::Commit { .. } => None,
        }
    }

    fn claim(item: &Value) -> Self {
        Self::Claim {
            owner: text(&item["owner"]),
            attempt: number(&item["attempt"]),
            lease: number(&item["in_progress_expiration"]),
            claimed_at: number(&item["claimed_at"]),
            message: text(&item["message_id"]),
        }
    }

    fn update(values: &Value) -> Self {
        let (owner, attempt) = fence(values);
        match values[":status"]["S"].as_str() {
            Some("COMPLETED") => Self::Complete { owner, attempt, data: text(&values[":data"]) },
            Some(_) => Self::Park { owner, attempt },
            None => Self::SetLease { owner, attempt, lease: number(&values[":lease"]) },
        }
    }
}

fn fence(values: &Value) -> (String, u64) {
    (text(&values[":owner"]), number(&values[":attempt"]))
}

fn text(value: &Value) -> String {
    value["S"].as_str().unwrap_or_else(|| panic!("no string: {value}")).to_owned()
}

fn number(value: &Value) -> u64 {
    value["N"].as_str().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no number: {value}"))
}

impl Event {
    /// The key that it is about.
    pub fn key(&self) -> Option<&str> {
        match self {
            Self::Sent { key, .. } => key.as_deref(),
            Self::Store { key, .. }
            | Self::Arrived { key, .. }
            | Self::Applied { key, .. }
            | Self::Answered { key, .. }
            | Self::Asked { key, .. } => Some(key),
            _ => None,
        }
    }

    /// The message that it is about.
    pub fn message(&self) -> Option<&str> {
        match self {
            Self::Sent { message, .. }
            | Self::Delivered { message, .. }
            | Self::Reported { message, .. }
            | Self::Acked { message, .. }
            | Self::Failed { message, .. }
            | Self::Exhausted { message }
            | Self::Letter { original: message, .. }
            | Self::Arrived { message, .. }
            | Self::Applied { message, .. }
            | Self::Answered { message, .. } => Some(message),
            _ => None,
        }
    }

    /// A write that stands.
    pub fn accepted_write(&self) -> Option<&Write> {
        match self {
            Self::Store { write, accepted: Some(true), .. } => write.as_ref(),
            _ => None,
        }
    }
}

/// The start of an owner's token, enough to tell it from others.
fn short(owner: &str) -> &str {
    owner.get(..6).unwrap_or(owner)
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim { owner, attempt, lease, message, .. } => {
                write!(
                    f,
                    "claim by {} as attempt {attempt} for {message}, lease until {}",
                    short(owner),
                    EpochMillis::new(*lease)
                )
            }
            Self::Complete { owner, attempt, data } => {
                write!(f, "complete by {}, attempt {attempt}: {data}", short(owner))
            }
            Self::Park { owner, attempt } => write!(f, "park by {}, attempt {attempt}", short(owner)),
            Self::SetLease { owner, attempt, lease } => {
                write!(f, "lease of {}, attempt {attempt}, set to {lease}", short(owner))
            }
            Self::Release { owner, attempt } => write!(f, "release by {}, attempt {attempt}", short(owner)),
            Self::Commit { token, message, data, .. } => write!(f, "commit {} for {message}: {data}", short(token)),
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.at)?;
        match &self.event {
            Event::Sent { message, key, group, payload, .. } => {
                write!(f, "{message} sent to group {group}, key {}: {payload}", key.as_deref().unwrap_or("(none)"))
            }
            Event::Delivered { process, message, receive } => {
                write!(f, "{message} delivered to process {process}, receive {receive}")
            }
            Event::Reported { process, message, outcome, dead_lettered, reason } => {
                let letter = if *dead_lettered { ", dead letter sent" } else { "" };
                let reason = reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
                write!(f, "{message} logged by process {process}: {outcome}{letter}{reason}")
            }
            Event::Acked { process, message, taken } => {
                write!(f, "{message} acked by process {process}{}", if *taken { "" } else { ", too late" })
            }
            Event::Failed { process, message } => write!(f, "{message} reported as failed by process {process}"),
            Event::InvocationFailed { process, error_type, text } => {
                write!(f, "invocation of process {process} failed: {error_type}: {text}")
            }
            Event::Exhausted { message } => write!(f, "{message} received too often, put into the dead-letter queue"),
            Event::Letter { original, reason } => write!(f, "dead letter for {original}: {reason}"),
            Event::Started { process, ahead } => write!(f, "process {process} started, its clock {ahead} ms ahead"),
            Event::Stopped { process, how } => write!(f, "process {process} {how}"),
            Event::Store { process, operation, key, write, passage, accepted } => {
                let what = write.as_ref().map_or_else(|| operation.clone(), ToString::to_string);
                let fate = match accepted {
                    Some(true) => "accepted",
                    Some(false) => "refused",
                    None => "never reached the store",
                };
                write!(f, "{key}: {what} (process {process}): {fate}")?;
                if *passage == Passage::Free { Ok(()) } else { write!(f, " [{passage:?}]") }
            }
            Event::Arrived { key, attempt, message } => {
                write!(f, "{key}: the target gets it as attempt {attempt} for {message}")
            }
            Event::Applied { key, message, answer } => write!(f, "{key}: applied for {message}: {answer}"),
            Event::Answered { key, message, fate, meaning } => {
                write!(f, "{key}: the target to {message}: {fate}, which means {meaning:?}")
            }
            Event::Asked { key, answer } => write!(f, "{key}: the target is asked, and answers {answer}"),
            Event::World { what } => f.write_str(what),
        }
    }
}
