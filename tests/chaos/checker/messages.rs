//! What is said of messages: by the log, in dead letters, to the queue.

use super::{Judge, Rule};
use crate::chaos::replay::Record;
use crate::chaos::trace::Trace;

/// Outcomes that are acked.
const ACKED: [&str; 3] = ["executed", "replayed", "recovered"];

/// Outcomes of which a person is told.
const GIVEN_UP: [&str; 4] = ["rejected", "conflict", "permanent", "parked"];

/// Whether a message that is logged so comes again.
pub fn has_failed(outcome: &str, dead_lettered: bool) -> bool {
    !dead_lettered && !ACKED.contains(&outcome)
}

/// What the log says of a message whose group was stopped.
pub const GROUP_STOPPED: &str = "an earlier message of its group was not acknowledged";

impl Judge<'_> {
    pub(super) fn reported(
        &mut self,
        at: usize,
        message: &str,
        outcome: &str,
        dead_lettered: bool,
        reason: Option<&str>,
    ) {
        if ACKED.contains(&outcome) && !self.has_result(message) {
            let what = format!("{message} is said to be {outcome}, and the record has no result of it");
            self.found_of(Rule::AckedWithoutResult, at, message, what);
        }
        let given_up = GIVEN_UP.contains(&outcome);
        let founded = if given_up { self.is_founded(message, outcome) } else { !dead_lettered };
        if !founded || given_up && reason.is_none_or(str::is_empty) {
            let what = format!("{message} is said to be {outcome}, reason: {reason:?}");
            self.found_of(Rule::UnfoundedDeadLetter, at, message, what);
        }
        if self.messages[message].key.is_none() && !["rejected", "unstarted"].contains(&outcome) {
            let what = format!("{message} has no key, and is said to be {outcome}");
            self.found_of(Rule::PoisonNotRejected, at, message, what);
        }
    }

    /// Whether there is cause to give a message up so.
    fn is_founded(&self, message: &str, outcome: &str) -> bool {
        let (here, key) = (&self.messages[message], self.key_of(message));
        match outcome {
            "rejected" => here.key.is_none(),
            "conflict" => key.is_some_and(|key| key.payloads.len() > 1),
            "permanent" => here.refused,
            "parked" => key.is_some_and(|key| matches!(key.record, Record::Parked { .. })),
            _ => false,
        }
    }

    /// A dead letter, whether or not its process lives to log it. It tells of the message
    /// that was first given up, also if that came back and this is the second time.
    pub(super) fn letter(&mut self, at: usize, original: &str, reason: &str) {
        let of_it: Vec<String> =
            self.messages.iter().filter(|(_, here)| here.original == original).map(|(name, _)| name.clone()).collect();
        let (outcome, why) = reason.split_once(": ").unwrap_or((reason, ""));
        if why.is_empty() || !of_it.iter().any(|message| self.is_founded(message, outcome)) {
            let what = format!("a dead letter for {original}, without a cause: {reason}");
            let key = of_it.first().and_then(|message| self.keyed(message));
            self.found(Rule::UnfoundedDeadLetter, what, &Trace::of_message(at, original).with_key(key.as_deref()));
        }
        // What was sent before the letter is settled by it.
        for message in of_it {
            self.message(&message).letter = true;
        }
    }

    pub(super) fn stopped(&mut self, at: usize, process: usize, how: &str) {
        if how.starts_with("died") {
            self.found(Rule::Died, format!("process {process} {how}"), &Trace::of_event(at));
        }
        let max_receives = self.facts.max_receives;
        for (message, receive) in self.process(process).stopped(at, how) {
            self.message(&message).has_failed_for_good |= receive >= max_receives;
        }
    }

    /// A message that was not begun because of its group: one before it must have failed.
    pub(super) fn held_back(&mut self, at: usize, process: usize, message: &str) {
        let failed = |member: &String| {
            let reported = self.processes.get(&process).and_then(|process| process.report(member));
            reported.is_some_and(|(outcome, dead_lettered)| has_failed(outcome, *dead_lettered))
        };
        let group = self.groups.values().find(|group| group.iter().any(|member| member == message));
        let mut before = group.into_iter().flatten().take_while(|member| *member != message);
        if !before.any(failed) {
            let what = format!("{message} was held back, and no message before it in its group had failed");
            self.found(Rule::HeldByAnother, what, &Trace::of_message(at, message));
        }
    }

    pub(super) fn acked(&mut self, at: usize, process: usize, message: &str, taken: bool) {
        let logged = self.process(process).report(message).cloned();
        let lettered =
            self.messages[message].letter && logged.as_ref().is_some_and(|(_, dead_lettered)| *dead_lettered);
        let has_result = self.has_result(message);
        if !lettered && !has_result {
            let what = format!("{message} was acked without a result and without a dead letter");
            self.found_of(Rule::AckedWithoutResult, at, message, what);
        }
        if logged.as_ref().is_none_or(|(outcome, dead_lettered)| has_failed(outcome, *dead_lettered)) {
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
    pub(super) fn is_settled(&self, message: &str) -> bool {
        let here = &self.messages[message];
        here.letter || here.exhausted || here.has_failed_for_good || self.has_result(message)
    }
}
