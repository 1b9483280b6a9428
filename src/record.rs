//! The record and its transitions: what the store keeps for a key, and how it may change.
//!
//! Pure functions over values, no I/O and no clock: stores apply exactly these rules (a
//! database as condition expressions, [`memory`](crate::store::memory) by calling them),
//! and the same functions can be checked by a model.
//!
//! ```text
//!            claim                      complete
//!  (absent) ───────▶ INPROGRESS, n=1 ───────────▶ COMPLETED
//!      ▲                │   │   ▲                     (until it expires)
//!      │ release, n=1   │   │   │ take over, n+1
//!      └────────────────┘   │   │                park
//!                give up,   ▼   │           ───────────▶ PARKED
//!         release n>1:  lease over
//! ```

use std::fmt;
use std::time::Duration;

use crate::time::{EpochMillis, EpochSeconds, Lease};

/// The name of a record in its store, `scope#key`; at most 2,048 bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId(String);

impl RecordId {
    /// The id with that text.
    #[must_use]
    pub fn new(id: impl Into<String>) -> Self {
        Self(id.into())
    }

    /// The id's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Who holds a claim: a random token, new for every claim.
///
/// One per *claim* and not per process: a later delivery in the same process must not
/// take an earlier one's claim for its own.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner(String);

impl Owner {
    /// A token nobody else has.
    #[must_use]
    #[allow(clippy::disallowed_methods)] // the one source of tokens
    pub fn random() -> Self {
        Self(uuid::Uuid::new_v4().simple().to_string())
    }

    /// The owner with that token, as read back from a store.
    #[must_use]
    pub fn new(token: impl Into<String>) -> Self {
        Self(token.into())
    }

    /// The token.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What an effect returned, as kept in the record: a JSON text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StoredResult {
    /// JSON: the output itself, or what is left of it.
    pub json: String,
    /// True if the output could not be kept whole and `json` only describes it.
    pub reduced: bool,
}

impl StoredResult {
    /// A result kept whole.
    #[must_use]
    pub fn whole(json: impl Into<String>) -> Self {
        Self { json: json.into(), reduced: false }
    }

    /// A description of a result that could not be kept.
    #[must_use]
    pub fn reduced(description: impl Into<String>) -> Self {
        Self { json: description.into(), reduced: true }
    }
}

/// Where a key stands.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Somebody has claimed the key and not finished.
    InProgress {
        /// Who; `None` on records that were written by other software.
        owner: Option<Owner>,
        /// Until when the claim holds; `None` means until the record expires.
        lease: Option<Lease>,
    },
    /// The effect was applied, and this is its result.
    Completed {
        /// What the effect returned.
        result: StoredResult,
        /// When it was recorded; `None` on records written by other software.
        completed_at: Option<EpochMillis>,
    },
    /// Nobody can tell whether the effect was applied; a person decides.
    Parked {
        /// Why, for that person.
        reason: String,
    },
    /// A status that this version doesn't know: left alone until the record expires.
    Unknown {
        /// The status as found.
        status: String,
    },
}

/// What a store keeps for a key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Record {
    /// The record's name.
    pub id: RecordId,
    /// Where the key stands.
    pub state: State,
    /// Number of claims made for this key so far, 1 for the first: the fencing token.
    pub attempt: u64,
    /// When the record is forgotten, whether or not the store has deleted it by then.
    pub expires: EpochSeconds,
    /// Fingerprint of the payload, `algorithm:hash`.
    pub fingerprint: Option<String>,
    /// The message that the latest claim was made for.
    pub message_id: Option<String>,
    /// When the latest claim was made.
    pub claimed_at: Option<EpochMillis>,
}

impl Record {
    /// Whether the record counts as gone. Stores delete late (DynamoDB: days), so every
    /// reader compares for itself.
    #[must_use]
    pub fn has_expired(&self, now: EpochMillis) -> bool {
        self.expires < now.to_seconds()
    }

    fn is_held_by(&self, claim: &Claim) -> bool {
        self.attempt == claim.attempt && self.owner() == Some(&claim.owner)
    }

    /// Who holds the key, if anybody does.
    #[must_use]
    pub fn owner(&self) -> Option<&Owner> {
        match &self.state {
            State::InProgress { owner, .. } => owner.as_ref(),
            _ => None,
        }
    }
}

/// What a consumer asks for when it claims a key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClaimRequest {
    /// The record to claim.
    pub id: RecordId,
    /// Who will hold it: a token of this request's own.
    pub owner: Owner,
    /// Until when; `None` for as long as the record is kept: nobody ever takes it over.
    pub lease: Option<Lease>,
    /// When the record is forgotten if nobody finishes it.
    pub expires: EpochSeconds,
    /// Fingerprint of the payload, if payloads are compared.
    pub fingerprint: Option<String>,
    /// The message the claim is for.
    pub message_id: String,
    /// The claimant's clock.
    pub now: EpochMillis,
}

impl ClaimRequest {
    /// The record that this request writes as the key's `attempt`-th claim.
    #[must_use]
    pub fn to_record(&self, attempt: u64) -> Record {
        Record {
            id: self.id.clone(),
            state: State::InProgress { owner: Some(self.owner.clone()), lease: self.lease },
            attempt,
            expires: self.expires,
            fingerprint: self.fingerprint.clone(),
            message_id: Some(self.message_id.clone()),
            claimed_at: Some(self.now),
        }
    }

    /// The claim that this request holds once its record stands in the store.
    #[must_use]
    pub fn to_claim(&self, attempt: u64) -> Claim {
        Claim { id: self.id.clone(), owner: self.owner.clone(), attempt, lease: self.lease }
    }
}

/// The right to run the effect for a key, and the fence that every later write carries.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The record claimed.
    pub id: RecordId,
    /// Who holds it.
    pub owner: Owner,
    /// Which claim of the key this is, counted from 1.
    pub attempt: u64,
    /// Until when it holds; `None` for as long as the record is kept.
    pub lease: Option<Lease>,
}

/// A key's final result, to be written by the holder of its claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Completion {
    /// What the effect returned.
    pub result: StoredResult,
    /// The holder's clock.
    pub completed_at: EpochMillis,
    /// When the result is forgotten: retention, counted anew from completion.
    pub expires: EpochSeconds,
}

/// A key put aside for a person, to be written by the holder of its claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Parking {
    /// Why, in words for that person.
    pub reason: String,
    /// When the record is forgotten: retention, counted anew.
    pub expires: EpochSeconds,
}

// ---- transitions ---------------------------------------------------------------------

/// Claims a key: the record to write if it is free (absent or expired), or if it is this
/// very request's own write coming back; `None` if it is taken.
#[must_use]
pub fn claim(existing: Option<&Record>, request: &ClaimRequest) -> Option<Record> {
    match existing {
        None => Some(request.to_record(1)),
        Some(record) if record.has_expired(request.now) => Some(request.to_record(1)),
        Some(record) if record.owner() == Some(&request.owner) => Some(record.clone()),
        Some(_) => None,
    }
}

/// Where a claimant stands with a record that it could not simply claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Standing {
    /// Another payload was seen under the same key.
    Conflict,
    /// Finished: the result to replay.
    Completed(StoredResult),
    /// Put aside for a person, for this reason.
    Parked(String),
    /// Held by somebody, and by our clock not lapsed.
    Held {
        /// When it may be taken over at the earliest.
        until: EpochMillis,
    },
    /// In a status that this version doesn't know, so it is left alone.
    Locked {
        /// The status as found.
        status: String,
        /// When the record expires.
        until: EpochMillis,
    },
    /// The holder's lease is over and there is no outcome: may be taken over.
    Lapsed,
}

/// Judges a record at the claimant's `now`. `clock_skew` is how far two clocks may
/// differ; a lease is lapsed only beyond it.
#[must_use]
pub fn judge(record: &Record, request: &ClaimRequest, clock_skew: Duration) -> Standing {
    if conflicts(record.fingerprint.as_deref(), request.fingerprint.as_deref()) {
        return Standing::Conflict;
    }
    match &record.state {
        State::Completed { result, .. } => Standing::Completed(result.clone()),
        State::Parked { reason } => Standing::Parked(reason.clone()),
        State::InProgress { lease: Some(lease), .. } if lease.has_lapsed(request.now, clock_skew) => Standing::Lapsed,
        State::InProgress { lease: Some(lease), .. } => Standing::Held { until: lease.end().plus(clock_skew) },
        State::InProgress { lease: None, .. } => Standing::Held { until: record.expires.to_millis() },
        State::Unknown { status } => Standing::Locked { status: status.clone(), until: record.expires.to_millis() },
    }
}

/// Whether two fingerprints tell different payloads: only if both were made by the same
/// algorithm (the part before the last `:`). One without an algorithm was written by
/// other software and says nothing to us.
fn conflicts(stored: Option<&str>, ours: Option<&str>) -> bool {
    let algorithm = |fingerprint: &str| fingerprint.rsplit_once(':').map(|(algorithm, _)| algorithm.to_owned());
    match (stored, ours) {
        (Some(stored), Some(ours)) => {
            let (theirs, mine) = (algorithm(stored), algorithm(ours));
            theirs.is_some() && theirs == mine && stored != ours
        }
        _ => false,
    }
}

/// Takes a lapsed key over: the record to write if the store still holds exactly the
/// claim that was `seen`, another's, or already this request's own; `None` if somebody was
/// faster.
#[must_use]
pub fn take_over(current: Option<&Record>, seen: &Record, request: &ClaimRequest) -> Option<Record> {
    let current = current?;
    if current.owner() == Some(&request.owner) {
        return Some(current.clone());
    }
    // Without a lease there is nothing to lapse.
    let unchanged = matches!(current.state, State::InProgress { lease: Some(_), .. })
        && current.state == seen.state
        && current.attempt == seen.attempt;
    unchanged.then(|| request.to_record(seen.attempt.saturating_add(1)))
}

/// Records the result: the record to write, or `None` if the claim is not held any more.
#[must_use]
pub fn complete(current: Option<&Record>, claim: &Claim, completion: &Completion) -> Option<Record> {
    let state = State::Completed { result: completion.result.clone(), completed_at: Some(completion.completed_at) };
    end(current, claim, state, completion.expires)
}

/// Puts the key aside: the record to write, or `None` if the claim is not held any more.
#[must_use]
pub fn park(current: Option<&Record>, claim: &Claim, parking: &Parking) -> Option<Record> {
    end(current, claim, State::Parked { reason: parking.reason.clone() }, parking.expires)
}

fn end(current: Option<&Record>, claim: &Claim, state: State, expires: EpochSeconds) -> Option<Record> {
    let current = current?;
    let ended = Record { state, expires, ..current.clone() };
    let own_write_came_back = current.attempt == claim.attempt && *current == ended;
    (current.is_held_by(claim) || own_write_came_back).then_some(ended)
}

/// Changes the lease of a claim (a heartbeat, or [`Lease::GIVEN_UP`]): the record to
/// write, or `None` if the claim is not held any more.
#[must_use]
pub fn set_lease(current: Option<&Record>, claim: &Claim, lease: Lease) -> Option<Record> {
    let current = current?;
    current.is_held_by(claim).then(|| Record {
        state: State::InProgress { owner: Some(claim.owner.clone()), lease: Some(lease) },
        ..current.clone()
    })
}

/// What becomes of a record whose claim is given back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Released {
    /// Nothing ever happened under this key: the record goes.
    Removed,
    /// An earlier attempt may have been applied: the record stays, its lease over, and
    /// the next claimant takes over and goes through recovery.
    Kept(Record),
}

/// Gives a claim back under which nothing has happened; `None` if it is not held any
/// more.
///
/// Only the key's *first* claim is forgotten altogether. After a takeover the record
/// still stands for an earlier attempt whose outcome nobody knows: deleting it would let
/// the next delivery run the effect as if that attempt had never been, and would start
/// the fencing token over at 1.
#[must_use]
pub fn release(current: Option<&Record>, claim: &Claim) -> Option<Released> {
    if claim.attempt > 1 {
        return set_lease(current, claim, Lease::GIVEN_UP).map(Released::Kept);
    }
    // Nothing there is what an earlier try of this release leaves behind.
    current.is_none_or(|current| current.is_held_by(claim)).then_some(Released::Removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_are_compared_only_within_one_algorithm() {
        let cases = [
            (Some("sha256:aa"), Some("sha256:aa"), false),
            (Some("sha256:aa"), Some("sha256:bb"), true),
            // Another selection of parts, since the settings changed.
            (Some("sha256[/amount]:aa"), Some("sha256:bb"), false),
            (Some("sha256[/a:b]:aa"), Some("sha256[/a:b]:bb"), true),
            // Written by other software: no algorithm in front.
            (Some("0cc175b9"), Some("sha256:bb"), false),
            (Some("0cc175b9"), Some("deadbeef"), false),
            (None, Some("sha256:bb"), false),
            (Some("sha256:aa"), None, false),
        ];
        for (stored, ours, conflict) in cases {
            assert_eq!(conflicts(stored, ours), conflict, "{stored:?} and {ours:?}");
        }
    }

    #[test]
    fn an_owner_is_never_the_same_twice() {
        assert_ne!(Owner::random(), Owner::random());
    }
}
