//! Random histories: whatever is asked, in whatever order, the store answers and holds what
//! the transitions in [`record`](crate::record) say.

use std::sync::Arc;
use std::time::Duration;

use super::{NOW, request};
use crate::record::{Claim, ClaimRequest, Completion, Owner, Parking, Record, RecordId, State, StoredResult};
use crate::store::memory::MemoryStore;
use crate::store::{ClaimOutcome, FencedOutcome, Store};
use crate::time::{EpochMillis, Lease};

/// Runs a random history of so many calls, the same for the same seed, on the store and on
/// a [`MemoryStore`], which is the transitions and nothing else, and compares each answer
/// and each record.
///
/// Few owners, attempts, leases and results take part, and clocks on both sides of every
/// expiry, so that what should match often does and what should not nearly does.
pub async fn follows_the_rules(store: &Arc<dyn Store>, seed: u64, calls: usize) {
    let rules = MemoryStore::new();
    let mut history = History { random: Random(seed), base: request(), seen: Vec::new(), claims: Vec::new() };
    for number in 0..calls {
        let call = history.next();
        let context = format!("seed {seed}, call {number}: {call:?}");
        let (expected, found) = (call.make(&rules).await, call.make(&**store).await);
        assert_eq!(found, expected, "{context}");
        let (expected, found) = (rules.load(call.id()).await.unwrap(), store.load(call.id()).await.unwrap());
        assert_eq!(found, expected, "the record after {context}");
        history.remember(expected);
    }
}

/// Numbers that are the same in every run with the same seed (Knuth's MMIX constants).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        let index = self.below(from.len().max(1) as u64);
        from.get(usize::try_from(index).unwrap_or_default())
    }
}

/// One call, with its arguments.
#[derive(Debug)]
enum Call {
    Claim(ClaimRequest),
    TakeOver(Record, ClaimRequest),
    Complete(Claim, Completion),
    Park(Claim, Parking),
    SetLease(Claim, Lease),
    Release(Claim),
}

/// Either kind of answer.
#[derive(Debug, PartialEq)]
enum Answer {
    Claim(ClaimOutcome),
    Fenced(FencedOutcome),
}

impl Call {
    fn id(&self) -> &RecordId {
        match self {
            Self::Claim(request) | Self::TakeOver(_, request) => &request.id,
            Self::Complete(claim, _) | Self::Park(claim, _) | Self::SetLease(claim, _) | Self::Release(claim) => {
                &claim.id
            }
        }
    }

    async fn make(&self, store: &dyn Store) -> Answer {
        match self {
            Self::Claim(request) => Answer::Claim(store.claim(request).await.unwrap()),
            Self::TakeOver(seen, request) => Answer::Claim(store.take_over(seen, request).await.unwrap()),
            Self::Complete(claim, completion) => Answer::Fenced(store.complete(claim, completion).await.unwrap()),
            Self::Park(claim, parking) => Answer::Fenced(store.park(claim, parking).await.unwrap()),
            Self::SetLease(claim, lease) => Answer::Fenced(store.set_lease(claim, *lease).await.unwrap()),
            Self::Release(claim) => Answer::Fenced(store.release(claim).await.unwrap()),
        }
    }
}

struct History {
    random: Random,
    /// What all requests have in common.
    base: ClaimRequest,
    /// Records as they stood at some time.
    seen: Vec<Record>,
    /// Claims that were held at some time.
    claims: Vec<Claim>,
}

impl History {
    fn next(&mut self) -> Call {
        let lapsing: Vec<Record> = self
            .seen
            .iter()
            .filter(|record| matches!(record.state, State::InProgress { lease: Some(_), .. }))
            .cloned()
            .collect();
        let claim = self.random.pick(&self.claims).cloned();
        let seen = self.random.pick(&lapsing).cloned();
        match (self.random.below(10), claim, seen) {
            (0..=2, _, Some(seen)) => {
                let request = ClaimRequest { id: seen.id.clone(), ..self.request() };
                // Nobody takes over from itself: every request has an owner of its own.
                let own = seen.owner() == Some(&request.owner);
                let owner = if own { Owner::new("owner 4") } else { request.owner };
                Call::TakeOver(seen, ClaimRequest { owner, ..request })
            }
            (3..=4, Some(claim), _) => {
                let completion = self.completion();
                Call::Complete(self.altered(claim), completion)
            }
            (5, Some(claim), _) => {
                let (number, expires) = (self.random.below(2), self.now().to_seconds());
                Call::Park(self.altered(claim), Parking { reason: format!("reason {number}"), expires })
            }
            (6, Some(claim), _) => {
                let lease = self.lease().unwrap_or(Lease::GIVEN_UP);
                Call::SetLease(self.altered(claim), lease)
            }
            (7, Some(claim), _) => Call::Release(self.altered(claim)),
            _ => Call::Claim(self.request()),
        }
    }

    fn remember(&mut self, record: Option<Record>) {
        let Some(record) = record else { return };
        if let State::InProgress { owner: Some(owner), lease } = &record.state {
            let claim = Claim { id: record.id.clone(), owner: owner.clone(), attempt: record.attempt, lease: *lease };
            self.claims.push(claim);
        }
        self.seen.push(record);
        // What is long gone is not worth asking for.
        self.claims.drain(..self.claims.len().saturating_sub(8));
        self.seen.drain(..self.seen.len().saturating_sub(8));
    }

    /// A moment within three seconds, whose whole seconds are those of every expiry too.
    fn now(&mut self) -> EpochMillis {
        NOW.plus(Duration::from_millis(250 * self.random.below(12)))
    }

    fn lease(&mut self) -> Option<Lease> {
        match self.random.below(4) {
            0 => None,
            1 => Some(Lease::GIVEN_UP),
            _ => Some(Lease::until(self.now())),
        }
    }

    fn owner(&mut self) -> Owner {
        Owner::new(format!("owner {}", self.random.below(4)))
    }

    fn request(&mut self) -> ClaimRequest {
        let key = self.random.below(2);
        ClaimRequest {
            id: RecordId::new(format!("{}-{key}", self.base.id)),
            owner: self.owner(),
            lease: self.lease(),
            expires: self.now().to_seconds(),
            fingerprint: (self.random.below(3) > 0).then(|| format!("sha256:{}", self.random.below(2))),
            message_id: format!("message {}", self.random.below(3)),
            now: self.now(),
        }
    }

    fn completion(&mut self) -> Completion {
        let json = format!("{}", self.random.below(2));
        let result = if self.random.below(4) == 0 { StoredResult::reduced(json) } else { StoredResult::whole(json) };
        Completion { result, completed_at: self.now(), expires: self.now().to_seconds() }
    }

    /// Mostly as it was; sometimes it is another's, or of another attempt.
    fn altered(&mut self, claim: Claim) -> Claim {
        match self.random.below(6) {
            0 => Claim { owner: self.owner(), ..claim },
            1 => Claim { attempt: claim.attempt.saturating_sub(1), ..claim },
            2 => Claim { attempt: claim.attempt + 1, ..claim },
            _ => claim,
        }
    }
}
