//! Claims, and what is sent and written under them.

use idempotent_consumer::time::EpochMillis;

use super::{Judge, Rule};
use crate::chaos::history::Write;
use crate::chaos::plan::Mode;
use crate::chaos::replay::Step;
use crate::chaos::trace::Trace;

/// How long a request may be on its way to the target, in milliseconds.
const TRANSPORT: u64 = 500;

/// A claim that the store has accepted.
#[derive(Debug)]
pub struct Claim {
    pub owner: String,
    pub attempt: u64,
    message: String,
    process: usize,
    /// When it was accepted: a place in the history.
    at: usize,
    lease: u64,
    /// It has sent its request.
    sent: bool,
    end: Option<End>,
}

/// How a claim ended.
#[derive(Debug, Clone, Copy)]
enum End {
    /// Its holder gave up its lease: after the answer, or after having waited for it in vain.
    GivenUp(EpochMillis),
    TakenOver {
        at: EpochMillis,
        by: usize,
    },
    /// Its holder completed, parked or removed the record, which it does only after the
    /// answer or instead of a request.
    Over,
}

impl Judge<'_> {
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

    pub(super) fn arrived(&mut self, at: usize, key: &str, attempt: u64, message: &str) {
        self.begins(at, key, message);
        let park = self.facts.mode == Mode::Park;
        let here = self.key(key);
        let unclear = std::mem::replace(&mut here.unclear, true);
        let of_it = |claim: &Claim| claim.attempt == attempt && claim.message == message && !claim.sent;
        let claim = here.claims.iter().rposition(of_it);
        if let Some(claim) = claim {
            here.claims[claim].sent = true;
            if !self.may_send(at, &self.keys[key].claims[claim]) {
                let what = format!("{key} was sent as attempt {attempt} for {message}, whose claim was over");
                self.found(Rule::SentUnderDeadClaim, what, &Trace::of_effects(at, key));
            }
        } else {
            let what = format!("{key} was sent as attempt {attempt} for {message}, which no claim allows");
            self.found(Rule::SentWithoutClaim, what, &Trace::of_effects(at, key));
        }
        if park && unclear {
            let what = format!("{key} was sent again after a request of unknown outcome");
            self.found(Rule::SentAfterUnclear, what, &Trace::of_effects(at, key));
        }
    }

    /// Whether a request under that claim may arrive now: while its lease runs by its
    /// holder's own clock, and it is the record's. Two cases can't be judged:
    ///
    /// * A process that was frozen since it made the claim goes on where it was when it
    ///   wakes, and that may be just before it sends.
    /// * If the clocks of the holder and of who took over differ by more than is allowed
    ///   for, the holder's lease still runs by its own clock as the other takes over.
    ///
    /// A request may have been on its way for a moment as the lease ended, was given up or
    /// taken over.
    fn may_send(&self, at: usize, claim: &Claim) -> bool {
        let holder = &self.processes[&claim.process];
        if holder.was_frozen_since(claim.at) {
            return true;
        }
        let now = self.now(at);
        let soon_after = |end: EpochMillis| now.get() <= end.get() + TRANSPORT;
        let is_held = match claim.end {
            None => true,
            Some(End::Over) => false,
            Some(End::GivenUp(at)) => soon_after(at),
            Some(End::TakenOver { at, by }) => {
                soon_after(at) || holder.ahead.abs_diff(self.processes[&by].ahead) > self.facts.skew
            }
        };
        is_held && holder.clock(now) <= claim.lease + TRANSPORT
    }

    /// One accepted write.
    pub(super) fn write(&mut self, at: usize, process: usize, key: &str, write: &Write) {
        let (skew, now) = (self.facts.skew, self.now(at));
        // Makes sure that it is known.
        self.process(process);
        let here = self.key(key);
        let (before, step) = (here.record.clone(), here.record.step(write, skew));
        if step == Step::Repeated {
            return;
        }
        if let (Step::To(next) | Step::Early(next), held) = (&step, here.claims.last_mut()) {
            here.record = next.clone();
            if let Some(claim) = held {
                match write {
                    Write::Claim { .. } => claim.end = claim.end.or(Some(End::TakenOver { at: now, by: process })),
                    Write::SetLease { lease: 0, .. } => claim.end = claim.end.or(Some(End::GivenUp(now))),
                    Write::SetLease { lease, .. } => claim.lease = *lease,
                    Write::Complete { .. } | Write::Park { .. } | Write::Release { .. } => claim.end = Some(End::Over),
                    Write::Commit { .. } => {}
                }
            }
        }
        match write {
            Write::Claim { owner, attempt, message, lease, .. } => {
                let (owner, message, attempt, lease) = (owner.clone(), message.clone(), *attempt, *lease);
                here.claims.push(Claim { owner, attempt, message, process, at, lease, sent: false, end: None });
            }
            Write::Commit { takes, .. } => here.takes.clone_from(takes),
            _ => {}
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
