//! One consumer with one batch: the order of its steps, as the crate's `Batch` and
//! `Consumer` take them.

use idempotent_consumer::effect::Recovery;
use idempotent_consumer::outcome::{Disposition, Outcome, Unstarted};
use idempotent_consumer::record::{Claim, ClaimRequest, Completion, Owner, Parking, RecordId, StoredResult};
use idempotent_consumer::store::{StoreError, StoreErrorKind};
use idempotent_consumer::time::{EpochSeconds, Lease};

use crate::setting::{CLOCK_SKEW, Guard, LEASE_MARGIN, Path, Payload, Setting, TIME_LIMIT};
use crate::store::{self, Answer, Request, at};
use crate::world::{EffectRequest, End};

/// A consumer at work.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Turn {
    /// The messages of its batch, by number, all of one group.
    pub messages: Vec<usize>,
    /// How often each had been received, this time included.
    pub receives: Vec<u8>,
    /// Whether this was the last time for each.
    pub last_receive: Vec<bool>,
    /// By how much its clock is ahead.
    pub ahead_of_time: u64,
    /// When it was given the batch, true time.
    pub began: u64,
    /// Which message's turn it is.
    pub position: usize,
    /// What is being done for that message.
    pub current: Step,
    /// What is being done for the next one meanwhile.
    pub next: Option<Step>,
    /// What is to be told about the messages before.
    pub reports: Vec<Told>,
    /// It is frozen: time passes it by.
    pub asleep: bool,
}

/// A message in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Delivered {
    /// Its number.
    pub message: usize,
    /// How often it was received, this time included.
    pub receives: u8,
    /// Whether this is the last time.
    pub last: bool,
}

/// What the queue is told about a message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Told {
    /// The outcome's name.
    pub name: &'static str,
    /// Done with, as opposed to: to be delivered again.
    pub done: bool,
    /// The key's result, if it has one.
    pub result: Option<String>,
}

/// What is being done for a message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(clippy::large_enum_variant)] // there is one of the large kind mostly
pub enum Step {
    /// A request to the store is out.
    Store(Request, Then),
    /// The claim is held, and the message's turn has not come.
    Ready {
        /// The claim.
        claim: Claim,
        /// Whether an earlier attempt ended without an outcome.
        taken_over: bool,
    },
    /// The target is asked whether it was done before.
    Verify(Claim),
    /// The effect is about to be applied.
    Apply(Claim),
    /// A dead letter is about to be sent.
    HandOver(End),
    /// It is over.
    Ended(End),
    /// The whole batch is over, and the queue about to be told.
    Tell,
}

/// What a write leads to once it is made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Then {
    /// A claim: to what follows from it.
    Go,
    /// The end of the message, if the write is made.
    End(End),
    /// The end of the message, whatever becomes of the write.
    EndAnyway(End),
    /// The end of the group: the message that the claim was made for is not begun.
    Stop,
}

fn reason() -> String {
    "because".to_owned()
}

fn unavailable() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "lost")
}

impl Turn {
    /// A consumer that was just given a batch.
    #[must_use]
    pub fn begin(setting: &Setting, batch: &[Delivered], ahead_of_time: u64, now: u64) -> Self {
        let mut turn = Self {
            messages: batch.iter().map(|delivered| delivered.message).collect(),
            receives: batch.iter().map(|delivered| delivered.receives).collect(),
            last_receive: batch.iter().map(|delivered| delivered.last).collect(),
            ahead_of_time,
            began: now,
            position: 0,
            current: Step::Tell,
            next: None,
            reports: Vec::new(),
            asleep: false,
        };
        turn.current = turn.first_step(setting, 0, now, "");
        turn.settle(setting, now);
        turn
    }

    /// When it must be over.
    #[must_use]
    pub fn deadline(&self) -> u64 {
        self.began + TIME_LIMIT
    }

    /// Whether Lambda ends it now.
    #[must_use]
    pub fn is_overdue(&self, now: u64) -> bool {
        !self.asleep && self.deadline() <= now
    }

    /// The message at a place of the batch.
    #[must_use]
    pub fn message(&self, position: usize) -> Option<usize> {
        self.messages.get(position).copied()
    }

    fn first_step(&self, setting: &Setting, position: usize, now: u64, again: &str) -> Step {
        let sent = self.message(position).and_then(|message| Some((message, setting.messages.get(message)?)));
        let Some((message, sent)) = sent else { return Step::Tell };
        let is_poison =
            |number: &usize| setting.messages.get(*number).is_some_and(|sent| sent.payload == Payload::Poison);
        let beside_poison = !setting.has(Guard::ReadAlone) && self.messages.iter().any(is_poison);
        if sent.payload == Payload::Poison || beside_poison {
            return over(Outcome::Rejected { reason: reason() });
        }
        let receives = self.receives.get(position).copied().unwrap_or_default();
        let clock = now + self.ahead_of_time;
        let lease_end = self.deadline() + self.ahead_of_time + LEASE_MARGIN;
        let lease = matches!(setting.path, Path::Claimed(_)).then(|| Lease::until(at(lease_end)));
        let request = ClaimRequest {
            id: RecordId::new(sent.key.to_string()),
            // Unique, and the same in whatever order things happened.
            owner: Owner::new(format!("m{message}r{receives}{again}")),
            lease,
            expires: EpochSeconds::new((clock + setting.retention()).max(lease_end + CLOCK_SKEW)),
            fingerprint: Some(format!("sha256:{:?}", sent.payload)),
            message_id: message.to_string(),
            now: at(clock),
        };
        match setting.path {
            Path::Claimed(_) => Step::Store(Request::Claim(request), Then::Go),
            Path::Transaction => Step::Store(Request::Commit(request), Then::Go),
        }
    }

    /// Whether the claim of the next message may be made now.
    #[must_use]
    pub fn can_work_ahead(&self, setting: &Setting) -> bool {
        let running = match &self.current {
            Step::Verify(_) | Step::Apply(_) => true,
            Step::Store(request, _) => {
                matches!(request, Request::Complete(..) | Request::Release(_) | Request::GiveUp(_))
            }
            _ => false,
        };
        let key = |position| Some(setting.messages.get(self.message(position)?)?.key);
        let other_key = key(self.position + 1).is_some_and(|next| Some(next) != key(self.position));
        running && other_key && self.next.is_none() && setting.path != Path::Claimed(Recovery::Park)
    }

    /// Starts on the claim of the next message.
    pub fn work_ahead(&mut self, setting: &Setting, now: u64) {
        self.next = Some(self.first_step(setting, self.position + 1, now, ""));
    }

    /// Whether what is done ahead has come to its end.
    fn next_waits(&self) -> bool {
        !matches!(self.next, Some(Step::Store(..)))
    }

    /// Goes on from what has ended by itself.
    pub fn settle(&mut self, setting: &Setting, now: u64) {
        while let Step::Ended(end) = &self.current
            && self.next_waits()
        {
            let last = self.last_receive.get(self.position).copied().unwrap_or_default();
            let mut stops = if last { end.then.stops_on_last_receive } else { end.then.stops };
            let done = end.then.disposition == Disposition::Ack;
            let mut told = Told { name: end.name, done, result: end.result.clone() };
            if (end.name == "in-flight" && !setting.has(Guard::InFlightNotAcked))
                || (end.name == "not-recorded" && !setting.has(Guard::ResultBeforeAck))
            {
                told.done = true;
                stops = false;
            }
            stops &= setting.has(Guard::GroupStop);
            self.reports.push(told);
            self.position += 1;
            match self.next.take() {
                Some(Step::Ready { claim, .. }) if stops => {
                    self.current = Step::Store(Request::Release(claim), Then::Stop);
                    return;
                }
                _ if stops => return self.stop(),
                Some(Step::Ready { claim, taken_over }) => self.current = enter(setting, claim, taken_over),
                // What was in flight while the message before it ran may be done by now.
                Some(Step::Ended(end)) if end.name == "in-flight" => {
                    self.current = self.first_step(setting, self.position, now, "'");
                }
                Some(step) => self.current = step,
                None => self.current = self.first_step(setting, self.position, now, ""),
            }
        }
    }

    /// The rest of the batch is not begun.
    fn stop(&mut self) {
        let not_begun = End::of(Outcome::Unstarted { why: Unstarted::GroupStopped });
        let told = Told { name: not_begun.name, done: not_begun.then.disposition == Disposition::Ack, result: None };
        self.reports.resize(self.messages.len(), told);
        self.position = self.messages.len();
        self.current = Step::Tell;
    }

    /// The store has answered a request.
    pub fn answered(
        &mut self,
        setting: &Setting,
        ahead: bool,
        request: &Request,
        then: Then,
        answer: Answer,
        now: u64,
    ) {
        let step = match (request, answer) {
            (Request::Claim(_) | Request::TakeOver { .. }, Answer::Won(claim)) => {
                let taken_over = matches!(request, Request::TakeOver { .. });
                if ahead { Step::Ready { claim, taken_over } } else { enter(setting, claim, taken_over) }
            }
            (Request::Claim(request), Answer::Lost(seen)) => match store::judge(setting, &seen, request) {
                Some(outcome) => over(outcome),
                None => Step::Store(Request::TakeOver { seen: *seen, request: request.clone() }, Then::Go),
            },
            // A rival was faster, or, since no transaction leaves a claim behind, it is another
            // kind of effect's.
            (Request::TakeOver { request, .. } | Request::Commit(request), Answer::Lost(seen)) => {
                over(store::judge(setting, &seen, request).unwrap_or(Outcome::InFlight { until: request.now }))
            }
            (Request::Claim(request) | Request::TakeOver { request, .. }, Answer::Gone) => {
                over(Outcome::InFlight { until: request.now })
            }
            (Request::Commit(_), Answer::Committed(result)) => {
                over(Outcome::Executed { result: StoredResult::whole(result) })
            }
            (Request::Complete(..) | Request::Park(..), Answer::Fenced) => over(Outcome::Fenced),
            (_, _) => match then {
                Then::End(end) | Then::EndAnyway(end) => after(end),
                Then::Stop | Then::Go => {
                    self.stop();
                    return;
                }
            },
        };
        self.put(setting, ahead, step, now);
    }

    /// The store has not answered a request, and is not asked again.
    pub fn gave_up(&mut self, setting: &Setting, ahead: bool, request: &Request, then: Then, now: u64) {
        let step = match (request, then) {
            (_, Then::EndAnyway(end)) => after(end),
            (Request::Complete(..), Then::End(end)) => {
                // Kept for the world in which it is acked all the same.
                Step::Ended(End { result: end.result, ..End::of(Outcome::NotRecorded { error: unavailable() }) })
            }
            (_, Then::Stop) => {
                self.stop();
                return;
            }
            // The claim may stand all the same, and would trouble a person.
            (Request::Claim(request), _) if setting.path == Path::Claimed(Recovery::Park) => {
                let end = End::of(Outcome::StoreFailed { error: unavailable() });
                Step::Store(Request::Release(request.to_claim(1)), Then::EndAnyway(end))
            }
            _ => over(Outcome::StoreFailed { error: unavailable() }),
        };
        self.put(setting, ahead, step, now);
    }

    /// The target has answered whether the effect was applied; `None` for no answer.
    pub fn verified(&mut self, setting: &Setting, claim: Claim, answer: Option<Verified>, now: u64) {
        let step = match answer {
            Some(Verified::Done(result)) => {
                let outcome = Outcome::Recovered { result: StoredResult::whole(result.clone()) };
                complete(setting, self, claim, result, outcome, now)
            }
            Some(Verified::NotDone) => Step::Apply(claim),
            Some(Verified::Unsure) => park(claim),
            None => Step::Store(Request::GiveUp(claim), Then::EndAnyway(End::of(unknown()))),
        };
        self.put(setting, false, step, now);
    }

    /// The effect has ended, as far as the consumer can tell.
    pub fn applied(&mut self, setting: &Setting, claim: Claim, ending: Ending, now: u64) {
        let step = match ending {
            Ending::Applied(result) => {
                let outcome = Outcome::Executed { result: StoredResult::whole(result.clone()) };
                complete(setting, self, claim, result, outcome, now)
            }
            Ending::NotApplied => {
                let end = End::of(Outcome::NotApplied { reason: reason(), retry_after: None });
                Step::Store(Request::Release(claim), Then::EndAnyway(end))
            }
            Ending::Permanent => {
                let end = End::of(Outcome::Permanent { reason: reason() });
                Step::Store(Request::Release(claim), Then::EndAnyway(end))
            }
            Ending::Unknown => {
                let keeps = setting.path == Path::Claimed(Recovery::Verify) && setting.has(Guard::VerifyKeepsLease);
                if keeps {
                    over(unknown())
                } else {
                    Step::Store(Request::GiveUp(claim), Then::EndAnyway(End::of(unknown())))
                }
            }
        };
        self.put(setting, false, step, now);
    }

    /// A dead letter was sent, or could not be.
    pub fn handed_over(&mut self, setting: &Setting, end: End, sent: bool, now: u64) {
        self.put(setting, false, Step::Ended(if sent { end.dead_lettered() } else { end }), now);
    }

    fn put(&mut self, setting: &Setting, ahead: bool, step: Step, now: u64) {
        if ahead {
            self.next = Some(step);
        } else {
            self.current = step;
        }
        self.settle(setting, now);
    }

    /// The request that the effect is, under a claim.
    #[must_use]
    pub fn effect(&self, claim: &Claim) -> EffectRequest {
        let lease_end = claim.lease.map_or(u64::MAX, |lease| lease.end().to_seconds().get());
        EffectRequest {
            key: claim.id.as_str().parse().unwrap_or_default(),
            owner: claim.owner.as_str().to_owned(),
            attempt: claim.attempt,
            lease_end: lease_end.saturating_sub(self.ahead_of_time),
        }
    }
}

/// What the target says of an earlier attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verified {
    /// Applied, with this result.
    Done(String),
    /// Not applied.
    NotDone,
    /// It can't tell.
    Unsure,
}

/// How the effect ended, as far as the consumer can tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// With this result.
    Applied(String),
    /// It failed before anything could have happened.
    NotApplied,
    /// It can never succeed.
    Permanent,
    /// Somehow.
    Unknown,
}

fn unknown() -> Outcome {
    Outcome::Unknown { reason: reason(), retry_after: None }
}

/// The message's turn is over, but for its dead letter.
fn over(outcome: Outcome) -> Step {
    after(End::of(outcome))
}

fn after(end: End) -> Step {
    if end.then.disposition == Disposition::DeadLetter { Step::HandOver(end) } else { Step::Ended(end) }
}

fn enter(setting: &Setting, claim: Claim, taken_over: bool) -> Step {
    match setting.path {
        Path::Claimed(Recovery::Verify) if taken_over => Step::Verify(claim),
        Path::Claimed(Recovery::Park) if taken_over => park(claim),
        _ => Step::Apply(claim),
    }
}

fn complete(setting: &Setting, turn: &Turn, claim: Claim, result: String, outcome: Outcome, now: u64) -> Step {
    let completed_at = at(now + turn.ahead_of_time);
    let completion = Completion {
        result: StoredResult::whole(result),
        completed_at,
        expires: EpochSeconds::new(completed_at.to_seconds().get() + setting.retention()),
    };
    Step::Store(Request::Complete(claim, completion), Then::End(End::of(outcome)))
}

fn park(claim: Claim) -> Step {
    let parking = Parking { reason: reason(), expires: EpochSeconds::FAR_FUTURE };
    Step::Store(Request::Park(claim, parking), Then::End(End::of(Outcome::Parked { reason: reason() })))
}
