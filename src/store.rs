//! The memory outside the consumer: the [`Store`] trait, which is its contract.

#[cfg(feature = "test-util")]
pub mod conformance;
#[cfg(feature = "dynamodb")]
pub mod dynamodb;
pub mod memory;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use crate::error::BoxError;
use crate::record::{Claim, ClaimRequest, Completion, Parking, Record, RecordId};
use crate::time::Lease;

/// A boxed future, so that the trait stays object-safe. One allocation is nothing beside
/// a round trip to a database.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where records are kept.
///
/// # Contract
///
/// Each method applies the transition of the same name in [`record`](crate::record) to
/// one record, **atomically**: no other write of that record happens between its
/// condition and its effect, whoever makes it, from whatever process.
///
/// * A call that answers `Ok` is durable: it survives a crash of the store.
/// * A refusal is an outcome, not an error. After a refusal nothing has changed.
/// * After an `Err` the write **may or may not** have happened. Calling again with the
///   same arguments must then give the answer that the lost one gave: a claim that finds
///   its own [`Owner`](crate::record::Owner) is won, a completion that finds itself is
///   applied. Stores retry by themselves only within this rule.
/// * Reads and conditions see every write that was answered before (no eventual
///   consistency), and count an expired record as absent whether or not it was deleted.
/// * No call waits longer than a few seconds; a store that can't answer says so with
///   [`StoreErrorKind::Unavailable`].
///
/// [`conformance`](crate::store) (feature `test-util`) checks all of this; run it on any
/// store of your own.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Claims the key if it is free ([`record::claim`](crate::record::claim)). One round
    /// trip: the record that stands in the way comes back with the refusal.
    fn claim<'a>(&'a self, request: &'a ClaimRequest) -> BoxFuture<'a, Result<ClaimOutcome, StoreError>>;

    /// Takes the key over from exactly the claim that was `seen`
    /// ([`record::take_over`](crate::record::take_over)). Of several rivals one wins.
    fn take_over<'a>(
        &'a self,
        seen: &'a Record,
        request: &'a ClaimRequest,
    ) -> BoxFuture<'a, Result<ClaimOutcome, StoreError>>;

    /// Writes the result and ends the claim ([`record::complete`](crate::record::complete)).
    fn complete<'a>(
        &'a self,
        claim: &'a Claim,
        completion: &'a Completion,
    ) -> BoxFuture<'a, Result<FencedOutcome, StoreError>>;

    /// Puts the key aside for a person and ends the claim ([`record::park`](crate::record::park)).
    fn park<'a>(&'a self, claim: &'a Claim, parking: &'a Parking) -> BoxFuture<'a, Result<FencedOutcome, StoreError>>;

    /// Moves the end of the claim's lease ([`record::set_lease`](crate::record::set_lease)):
    /// further away, or to [`Lease::GIVEN_UP`].
    fn set_lease<'a>(&'a self, claim: &'a Claim, lease: Lease) -> BoxFuture<'a, Result<FencedOutcome, StoreError>>;

    /// Gives back a claim under which nothing has happened
    /// ([`record::release`](crate::record::release)).
    fn release<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<FencedOutcome, StoreError>>;

    /// Reads a record as it stands, expired or not. For operators and tests; processing a
    /// message never needs it.
    fn load<'a>(&'a self, id: &'a RecordId) -> BoxFuture<'a, Result<Option<Record>, StoreError>>;

    /// Opens connections and checks that the store answers, before the first message.
    fn warm_up(&self) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Whether a record can hold this result, a JSON text, whole.
    fn holds(&self, result: &str) -> bool;
}

/// The answer to a claim or a takeover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// The key is ours.
    Won(Claim),
    /// Somebody else's record stands there.
    Lost(Box<Record>),
    /// At a takeover: the record seen is gone (released or deleted meanwhile).
    Gone,
}

/// The answer to a write by the holder of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a fenced write has changed nothing"]
pub enum FencedOutcome {
    /// Written.
    Applied,
    /// The claim is not held any more; nothing was written.
    Fenced,
}

/// What kind of trouble a store is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// It does not answer, or asks to be left alone: throttled, timed out, no connection,
    /// an error of its own. Worth another try.
    Unavailable,
    /// It answered that it will not do this: no such table, no permission. Needs a person.
    Refused,
    /// It can't take the request as it is, e.g. a record over its size limit.
    Invalid,
    /// The record is there and can't be read. Concerns one key.
    Unreadable,
}

/// A store could not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    #[source]
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl StoreError {
    /// An error of that kind; `message` says what was being done and what would help.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// The same error with its cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// What kind of trouble this is.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}
