//! The store: the rules of [`record`], and what they would be without one of their guards.

use std::time::Duration;

use idempotent_consumer::outcome::Outcome;
use idempotent_consumer::record::{self, Claim, ClaimRequest, Completion, Parking, Record, Released, State};
use idempotent_consumer::time::{EpochMillis, EpochSeconds, Lease};

use crate::setting::{CLOCK_SKEW, Guard, Setting};
use crate::world::{EffectRequest, World, key_of};

/// What a consumer may ask the store for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Request {
    /// To claim a key.
    Claim(ClaimRequest),
    /// To take one over.
    TakeOver {
        /// The record seen.
        seen: Record,
        /// The claim to be made.
        request: ClaimRequest,
    },
    /// To store a result.
    Complete(Claim, Completion),
    /// To put a key aside.
    Park(Claim, Parking),
    /// To end a lease.
    GiveUp(Claim),
    /// To give a claim back.
    Release(Claim),
    /// To commit record and effect together.
    Commit(ClaimRequest),
}

/// What it answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The key is claimed.
    Won(Claim),
    /// A record stands there.
    Lost(Box<Record>),
    /// None does any more.
    Gone,
    /// The write of the holder of a claim is made.
    Applied,
    /// It is refused.
    Fenced,
    /// Record and effect are committed, with this result.
    Committed(String),
}

/// What a record that stands in the way means: [`Outcome::of_record`].
#[must_use]
pub fn judge(setting: &Setting, record: &Record, request: &ClaimRequest) -> Option<Outcome> {
    let skew = Duration::from_secs(if setting.has(Guard::SkewMargin) { CLOCK_SKEW } else { 0 });
    if setting.has(Guard::Lease) {
        return Outcome::of_record(record, request, skew);
    }
    Outcome::of_record(record, &ClaimRequest { now: EpochSeconds::FAR_FUTURE.to_millis(), ..request.clone() }, skew)
}

/// The record that a transaction writes.
#[must_use]
pub fn committed(request: &ClaimRequest) -> Record {
    let result = record::StoredResult::whole(format!("\"{}\"", request.owner.as_str()));
    Record { state: State::Completed { result, completed_at: Some(request.now) }, ..request.to_record(1) }
}

impl World {
    /// The store carries out a request.
    pub fn serve(&mut self, setting: &Setting, request: &Request) -> Answer {
        match request {
            Request::Claim(request) => self.claim(request, |current| {
                if setting.has(Guard::Expiry) {
                    return record::claim(current, request);
                }
                let unending = current.map(|record| Record { expires: EpochSeconds::FAR_FUTURE, ..record.clone() });
                record::claim(unending.as_ref(), request)
            }),
            Request::TakeOver { seen, request } => {
                let current = self.record(key_of(request)).cloned();
                let overwrites = current.as_ref().is_some_and(|current| {
                    current.owner() != Some(&request.owner)
                        && (&current.state, current.attempt) != (&seen.state, seen.attempt)
                });
                let answer = self.claim(request, |current| {
                    if setting.has(Guard::CompareAndSet) {
                        return record::take_over(current, seen, request);
                    }
                    Some(request.to_record(seen.attempt + 1))
                });
                self.foreign_write |= overwrites && matches!(answer, Answer::Won(_));
                answer
            }
            Request::Complete(claim, completion) => {
                self.write(setting, claim, |current| record::complete(current, claim, completion).map(Released::Kept))
            }
            Request::Park(claim, parking) => {
                self.write(setting, claim, |current| record::park(current, claim, parking).map(Released::Kept))
            }
            Request::GiveUp(claim) => self.write(setting, claim, |current| {
                record::set_lease(current, claim, Lease::GIVEN_UP).map(Released::Kept)
            }),
            Request::Release(claim) => self.write(setting, claim, |current| {
                let released = record::release(current, claim);
                match released {
                    Some(Released::Kept(_)) if !setting.has(Guard::ReleaseKeepsLaterClaims) => Some(Released::Removed),
                    released => released,
                }
            }),
            Request::Commit(request) => self.commit(setting, request),
        }
    }

    fn claim(&mut self, request: &ClaimRequest, rule: impl FnOnce(Option<&Record>) -> Option<Record>) -> Answer {
        let key = key_of(request);
        let current = self.record(key).cloned();
        match (rule(current.as_ref()), current) {
            (Some(record), _) => {
                let claim = request.to_claim(record.attempt);
                self.set(key, Some(record));
                Answer::Won(claim)
            }
            (None, Some(current)) => Answer::Lost(Box::new(current)),
            (None, None) => Answer::Gone,
        }
    }

    fn write(
        &mut self,
        setting: &Setting,
        claim: &Claim,
        rule: impl FnOnce(Option<&Record>) -> Option<Released>,
    ) -> Answer {
        let key = claim.id.as_str().parse().unwrap_or_default();
        let current = self.record(key).cloned();
        let held = |record: &Record| record.owner() == Some(&claim.owner) && record.attempt == claim.attempt;
        let mut seen = current.clone();
        if !setting.has(Guard::Fence) {
            // No condition: whatever stands there is taken for the claim.
            if let Some(record) = &mut seen {
                record.state = State::InProgress { owner: Some(claim.owner.clone()), lease: claim.lease };
                record.attempt = claim.attempt;
            }
        }
        let next = match rule(seen.as_ref()) {
            None => return Answer::Fenced,
            Some(Released::Removed) => None,
            Some(Released::Kept(record)) => Some(record),
        };
        self.foreign_write |= next != current && !current.as_ref().is_some_and(held);
        self.set(key, next);
        Answer::Applied
    }

    /// One transaction: [`record::claim`] is its condition, the finished record and the
    /// effect are its writes, and the request's token makes it one however often it comes.
    fn commit(&mut self, setting: &Setting, request: &ClaimRequest) -> Answer {
        let key = key_of(request);
        let token = request.owner.as_str().to_owned();
        let result = format!("\"{token}\"");
        if self.committed.contains(&token) {
            return Answer::Committed(result);
        }
        let current = self.record(key).cloned();
        let unending = current.clone().map(|record| Record { expires: EpochSeconds::FAR_FUTURE, ..record });
        let condition = if setting.has(Guard::Expiry) { &current } else { &unending };
        if record::claim(condition.as_ref(), request).is_none() {
            return current.map_or(Answer::Gone, |current| Answer::Lost(Box::new(current)));
        }
        self.set(key, Some(committed(request)));
        self.committed.push(token.clone());
        self.committed.sort();
        self.apply(setting, &EffectRequest { key, owner: token, attempt: 1, lease_end: u64::MAX });
        Answer::Committed(result)
    }

    /// An operator or a sweep of the table writes a record, or deletes it.
    pub fn set(&mut self, key: usize, record: Option<Record>) {
        if let Some(place) = self.records.get_mut(key) {
            *place = record;
        }
    }
}

/// A point in true time, or by a clock, as the rules have it.
#[must_use]
pub fn at(seconds: u64) -> EpochMillis {
    EpochSeconds::new(seconds).to_millis()
}
