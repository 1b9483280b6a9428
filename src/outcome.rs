//! What happened to one message, and what the broker is told about it.

use std::time::Duration;

use crate::error::ErrorChain;
use crate::key::Key;
use crate::message::{Message, Verdict};
use crate::record::{self, ClaimRequest, Record, Standing, StoredResult};
use crate::store::StoreError;
use crate::time::EpochMillis;

/// What happened to one message.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Outcome {
    /// The effect was applied, and its result is stored.
    Executed {
        /// What it returned.
        result: StoredResult,
    },
    /// A duplicate: the effect was applied before, and this is the result of then.
    Replayed {
        /// What it returned then.
        result: StoredResult,
    },
    /// An earlier attempt turned out to have been applied; its result is stored now.
    Recovered {
        /// What [`Effect::verify`](crate::effect::Effect::verify) found.
        result: StoredResult,
    },
    /// The effect was applied while the store was away, as
    /// [`StoreOutage::Process`](crate::consumer::StoreOutage::Process) demands: nothing
    /// remembers it.
    Unprotected {
        /// What it returned.
        result: StoredResult,
    },
    /// The effect was applied, and nothing remembers it: it is
    /// [natural](crate::effect::Effect::is_natural), so a duplicate applies it again.
    Applied {
        /// What it returned.
        result: StoredResult,
    },
    /// The message is known noise that the source was told to drop
    /// ([`Message::ignored`]). Nothing was claimed or run.
    Ignored {
        /// What it is, such as `s3:TestEvent`.
        what: String,
    },
    /// The message has no usable key or no usable body. Nothing was claimed.
    Rejected {
        /// What is wrong with it.
        reason: String,
    },
    /// Another payload was seen under the same key.
    Conflict {
        /// The record that stands there.
        stored: Box<Record>,
    },
    /// The effect says that this message can never be processed.
    Permanent {
        /// What is wrong with it.
        reason: String,
    },
    /// Nobody can tell whether the effect was applied: a person decides.
    Parked {
        /// Why it can't be told.
        reason: String,
    },
    /// Somebody else is at work on the key.
    InFlight {
        /// When to look again.
        until: EpochMillis,
    },
    /// The record has a status that this version doesn't know; it is left alone.
    Locked {
        /// The status as found.
        status: String,
        /// When the record expires.
        until: EpochMillis,
    },
    /// The effect failed before anything could have happened.
    NotApplied {
        /// How.
        reason: String,
        /// How long the target asked to be left alone.
        retry_after: Option<Duration>,
    },
    /// The effect failed, and may have been applied. The next attempt goes through
    /// recovery.
    Unknown {
        /// How.
        reason: String,
        /// How long the target asked to be left alone.
        retry_after: Option<Duration>,
    },
    /// The effect was applied, and its result could not be stored. The next attempt goes
    /// through recovery.
    NotRecorded {
        /// What kept it from being stored.
        error: StoreError,
    },
    /// We outlived our lease and somebody took the key over; nothing was overwritten.
    Fenced,
    /// The store could not be asked. Nothing was run.
    StoreFailed {
        /// What it said.
        error: StoreError,
    },
    /// The effect was not begun.
    Unstarted {
        /// Why not.
        why: Unstarted,
    },
}

/// Why a message was not begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unstarted {
    /// An earlier message of its group must come first.
    GroupStopped,
    /// Too little time was left.
    Deadline,
    /// The store failed several times in a row and is not asked again in this batch.
    StoreAway,
}

/// What the broker is told about a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Disposition {
    /// Done with: never deliver it again.
    Ack,
    /// Deliver it again.
    Retry,
    /// A person must look at it.
    DeadLetter,
}

impl Outcome {
    /// What the message's source has settled already.
    pub(crate) fn of_source(message: &Message) -> Option<Self> {
        message.verdict().map(|verdict| match verdict {
            Verdict::Reject { reason } => Self::Rejected { reason: reason.clone() },
            Verdict::Ignore { what } => Self::Ignored { what: what.clone() },
        })
    }

    /// What a record that stands in a claim's way means for its message; `None` if it may be
    /// taken over.
    #[must_use]
    pub fn of_record(record: &Record, request: &ClaimRequest, clock_skew: Duration) -> Option<Self> {
        match record::judge(record, request, clock_skew) {
            Standing::Conflict => Some(Self::Conflict { stored: Box::new(record.clone()) }),
            Standing::Completed(result) => Some(Self::Replayed { result }),
            Standing::Parked(reason) => Some(Self::Parked { reason }),
            Standing::Held { until } => Some(Self::InFlight { until }),
            Standing::Locked { status, until } => Some(Self::Locked { status, until }),
            Standing::Lapsed => None,
        }
    }

    /// What the broker is to be told.
    #[must_use]
    pub fn disposition(&self) -> Disposition {
        match self {
            Self::Executed { .. }
            | Self::Replayed { .. }
            | Self::Recovered { .. }
            | Self::Applied { .. }
            | Self::Unprotected { .. }
            | Self::Ignored { .. } => Disposition::Ack,
            Self::Rejected { .. } | Self::Conflict { .. } | Self::Permanent { .. } | Self::Parked { .. } => {
                Disposition::DeadLetter
            }
            Self::InFlight { .. }
            | Self::Locked { .. }
            | Self::NotApplied { .. }
            | Self::Unknown { .. }
            | Self::NotRecorded { .. }
            | Self::Fenced
            | Self::StoreFailed { .. }
            | Self::Unstarted { .. } => Disposition::Retry,
        }
    }

    /// Whether this ended the message's turn for good or bad, as opposed to its turn not
    /// having come: held by another, taken over by another, not begun, or the store away.
    #[must_use]
    pub fn was_tried(&self) -> bool {
        !matches!(
            self,
            Self::InFlight { .. }
                | Self::Locked { .. }
                | Self::Fenced
                | Self::StoreFailed { .. }
                | Self::Unstarted { .. }
        )
    }

    /// The outcome's name in logs and metrics.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Executed { .. } => "executed",
            Self::Replayed { .. } => "replayed",
            Self::Recovered { .. } => "recovered",
            Self::Applied { .. } => "applied",
            Self::Unprotected { .. } => "unprotected",
            Self::Ignored { .. } => "ignored",
            Self::Rejected { .. } => "rejected",
            Self::Conflict { .. } => "conflict",
            Self::Permanent { .. } => "permanent",
            Self::Parked { .. } => "parked",
            Self::InFlight { .. } => "in-flight",
            Self::Locked { .. } => "locked",
            Self::NotApplied { .. } => "not-applied",
            Self::Unknown { .. } => "unknown",
            Self::NotRecorded { .. } => "not-recorded",
            Self::Fenced => "fenced",
            Self::StoreFailed { .. } => "store-failed",
            Self::Unstarted { .. } => "unstarted",
        }
    }

    /// The result that the key has, if it has one.
    #[must_use]
    pub fn result(&self) -> Option<&StoredResult> {
        match self {
            Self::Executed { result }
            | Self::Replayed { result }
            | Self::Recovered { result }
            | Self::Applied { result }
            | Self::Unprotected { result } => Some(result),
            _ => None,
        }
    }

    /// Why the message was not acked, or acked without an effect, in words; `None` if its
    /// key has a result.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Executed { .. }
            | Self::Replayed { .. }
            | Self::Recovered { .. }
            | Self::Applied { .. }
            | Self::Unprotected { .. } => None,
            Self::Ignored { what } => Some(format!("it is known noise, `{what}`")),
            Self::Rejected { reason }
            | Self::Permanent { reason }
            | Self::Parked { reason }
            | Self::NotApplied { reason, .. }
            | Self::Unknown { reason, .. } => Some(reason.clone()),
            Self::Conflict { stored } => Some(format!(
                "another payload was seen under this key, in message {}; if both are meant, give them different keys",
                stored.message_id.as_deref().unwrap_or("(unknown)")
            )),
            Self::InFlight { until } => Some(format!(
                "the key is claimed, by a consumer at work or by an attempt that may still be on its way; it may be taken over \
                 from {until} on"
            )),
            Self::Locked { status, until } => Some(format!(
                "the record has a status that this version does not know, `{}`; it is left alone until {until}",
                status.escape_debug()
            )),
            Self::NotRecorded { error } => {
                Some(format!("the effect was applied, but its result could not be stored: {error}"))
            }
            Self::Fenced => Some(
                "the lease ended before the work did: another consumer took over, or the record was deleted".to_owned(),
            ),
            Self::StoreFailed { error } => Some(ErrorChain(error).to_string()),
            Self::Unstarted { why } => Some(
                match why {
                    Unstarted::GroupStopped => "an earlier message of its group was not acknowledged",
                    Unstarted::Deadline => "too little time was left",
                    Unstarted::StoreAway => "the store failed several times in a row",
                }
                .to_owned(),
            ),
        }
    }
}

/// One message and what happened to it.
#[derive(Debug, Clone)]
pub struct Report {
    /// The broker's id of the message.
    pub message_id: String,
    /// Its group.
    pub group: Option<String>,
    /// Its key, once it could be told.
    pub key: Option<Key>,
    /// Which claim of the key was ours, counted from 1, if we held it.
    pub attempt: Option<u64>,
    /// What happened.
    pub outcome: Outcome,
    /// The message has reached the dead-letter queue, so its own queue can let it go.
    pub dead_lettered: bool,
}

impl Report {
    pub(crate) fn new(message: &Message, key: Option<Key>, attempt: Option<u64>, outcome: Outcome) -> Self {
        Self {
            message_id: message.id.clone(),
            group: message.group.clone(),
            key,
            attempt,
            outcome,
            dead_lettered: false,
        }
    }

    /// What the broker is to be told: what the outcome says, and "done with" once the message
    /// has reached the dead-letter queue.
    #[must_use]
    pub fn disposition(&self) -> Disposition {
        if self.dead_lettered { Disposition::Ack } else { self.outcome.disposition() }
    }

    /// Whether the rest of the message's group must wait for it: what is not acked comes
    /// again, and first.
    ///
    /// Not if it has failed on its `last_receive`: then the queue takes it away, and its
    /// mates, received as often as it was, would go with it without ever having run.
    #[must_use]
    pub fn stops_its_group(&self, last_receive: bool) -> bool {
        self.disposition() != Disposition::Ack && !(last_receive && self.outcome.was_tried())
    }
}
