//! What the judge knows of a process: its clock, and the invocation that it is at.

use std::collections::BTreeMap;

use idempotent_consumer::time::EpochMillis;

/// With the least time and the fastest clock there is so much more than a message needs, in
/// milliseconds, and a bit.
const TIME_TO_SPARE: u64 = 200;

/// A process, through all its lives.
///
/// One invocation follows another: all that was delivered, then what the log says, then
/// what the queue is told. Lines that are found after the process was killed are of its
/// last invocation as well, as no other begins before they are read.
#[derive(Debug, Default)]
pub struct Process {
    /// How far its clock is ahead, in milliseconds.
    pub ahead: i64,
    is_frozen: bool,
    /// When it last went on after it was frozen: a place in the history.
    thawed: Option<usize>,
    /// The batch is being handed over.
    is_receiving: bool,
    began: EpochMillis,
    /// There were faults as the invocation began.
    faults: bool,
    /// What was delivered, and which receive it was.
    receives: BTreeMap<String, u32>,
    /// Outcome, and whether a dead letter was sent.
    reports: BTreeMap<String, (String, bool)>,
}

impl Process {
    pub fn started(&mut self, ahead: i64) {
        (self.ahead, self.is_frozen) = (ahead, false);
    }

    /// The first message of a batch begins an invocation, and nothing that was logged
    /// before counts any more.
    pub fn delivered(&mut self, message: &str, receive: u32, now: EpochMillis, faults: bool) {
        if !self.is_receiving {
            self.receives.clear();
            self.reports.clear();
            (self.is_receiving, self.began, self.faults) = (true, now, faults);
        }
        self.receives.insert(message.to_owned(), receive);
    }

    /// A line of its log about a message; which receive of the message it is about.
    pub fn reported(&mut self, message: &str, outcome: &str, dead_lettered: bool) -> u32 {
        self.is_receiving = false;
        self.reports.insert(message.to_owned(), (outcome.to_owned(), dead_lettered));
        self.receives.get(message).copied().unwrap_or_default()
    }

    /// The queue was told of a message.
    pub fn is_done(&mut self) {
        self.is_receiving = false;
    }

    /// It was stopped, in one way or another. If that was its end: the messages that it leaves
    /// behind, and which receive of each it was.
    pub fn stopped(&mut self, at: usize, how: &str) -> BTreeMap<String, u32> {
        self.is_receiving = false;
        match how {
            "stopped" => self.is_frozen = true,
            "went on" => (self.is_frozen, self.thawed) = (false, Some(at)),
            "answered, and the answer was lost" | "died in part: a panic" => {}
            _ => {
                let mut left = self.receives.clone();
                left.retain(|message, _| !self.reports.contains_key(message));
                return left;
            }
        }
        BTreeMap::new()
    }

    /// What the log says of the message in this invocation.
    pub fn report(&self, message: &str) -> Option<&(String, bool)> {
        self.reports.get(message)
    }

    /// Whether it was frozen at that place of the history or later.
    pub fn was_frozen_since(&self, at: usize) -> bool {
        self.is_frozen || self.thawed.is_some_and(|thawed| thawed > at)
    }

    /// What time it is by its own clock, in milliseconds.
    pub fn clock(&self, now: EpochMillis) -> u64 {
        now.get().saturating_add_signed(self.ahead)
    }

    /// Whether its invocation may fail as a whole, now and for that.
    pub fn may_fail_with(&mut self, error_type: &str, now: EpochMillis) -> bool {
        self.is_receiving = false;
        match error_type {
            "StoreAway" => self.faults,
            // It says so at once; if that took long it was this machine that was slow.
            "TooLittleTime" => self.faults || now.get() > self.began.get() + TIME_TO_SPARE,
            _ => false,
        }
    }
}
