//! DynamoDB items to records and back.
//!
//! Reading is forgiving where the meaning is clear, and on the safe side where it is not:
//! a table shared with other writers can hold anything. What a condition expression would
//! say of a value of the wrong type (nothing is smaller than a missing number) is what is
//! read here too.

use std::collections::HashMap;

use super::result;
use crate::record::{Owner, Record, RecordId, State, StoredResult};
use crate::store::{StoreError, StoreErrorKind};
use crate::time::{EpochMillis, EpochSeconds, Lease};
use aws_sdk_dynamodb::types::AttributeValue;

type Item = HashMap<String, AttributeValue>;

/// Attribute names.
pub(super) mod name {
    pub(crate) const ID: &str = "id";
    pub(crate) const STATUS: &str = "status";
    pub(crate) const EXPIRATION: &str = "expiration";
    pub(crate) const LEASE: &str = "in_progress_expiration";
    pub(crate) const DATA: &str = "data";
    pub(crate) const DATA_REDUCED: &str = "data_reduced";
    pub(crate) const VALIDATION: &str = "validation";
    pub(crate) const OWNER: &str = "owner";
    pub(crate) const ATTEMPT: &str = "attempt";
    pub(crate) const MESSAGE_ID: &str = "message_id";
    pub(crate) const CLAIMED_AT: &str = "claimed_at";
    pub(crate) const COMPLETED_AT: &str = "completed_at";
    pub(crate) const REASON: &str = "reason";
}

/// Values of `status`.
pub(super) mod status {
    pub(crate) const IN_PROGRESS: &str = "INPROGRESS";
    pub(crate) const COMPLETED: &str = "COMPLETED";
    pub(crate) const PARKED: &str = "PARKED";
}

pub(super) fn string(value: &str) -> AttributeValue {
    AttributeValue::S(value.to_owned())
}

pub(super) fn number(value: u64) -> AttributeValue {
    AttributeValue::N(value.to_string())
}

/// The item for a record.
pub(super) fn from_record(record: &Record) -> Item {
    let mut item = HashMap::with_capacity(12);
    let mut set = |name: &str, value| item.insert(name.to_owned(), value);
    set(name::ID, string(record.id.as_str()));
    set(name::EXPIRATION, number(record.expires.get()));
    set(name::ATTEMPT, number(record.attempt));
    if let Some(fingerprint) = &record.fingerprint {
        set(name::VALIDATION, string(fingerprint));
    }
    if let Some(message_id) = &record.message_id {
        set(name::MESSAGE_ID, string(message_id));
    }
    if let Some(at) = record.claimed_at {
        set(name::CLAIMED_AT, number(at.get()));
    }
    match &record.state {
        State::InProgress { owner, lease } => {
            set(name::STATUS, string(status::IN_PROGRESS));
            if let Some(owner) = owner {
                set(name::OWNER, string(owner.as_str()));
            }
            if let Some(lease) = lease {
                set(name::LEASE, number(lease.end().get()));
            }
        }
        State::Completed { result, completed_at } => {
            set(name::STATUS, string(status::COMPLETED));
            // What can't be held has been reduced before; if not, DynamoDB refuses the item.
            let data = result::to_attribute(&result.json).unwrap_or_else(|| string(&result.json));
            set(name::DATA, data);
            if result.reduced {
                set(name::DATA_REDUCED, AttributeValue::Bool(true));
            }
            if let Some(at) = completed_at {
                set(name::COMPLETED_AT, number(at.get()));
            }
        }
        State::Parked { reason } => {
            set(name::STATUS, string(status::PARKED));
            set(name::REASON, string(reason));
        }
        State::Unknown { status } => {
            set(name::STATUS, string(status));
        }
    }
    item
}

/// The record that an item holds.
pub(super) fn to_record(item: &Item) -> Result<Record, StoreError> {
    let text = |name: &str| item.get(name).and_then(|value| value.as_s().ok());
    let whole = |name: &str| item.get(name).and_then(whole_number);
    let id = text(name::ID).ok_or_else(|| {
        StoreError::new(
            StoreErrorKind::Unreadable,
            "the record has no string `id`: is the table's partition key `id` of type S?",
        )
    })?;
    let state = match text(name::STATUS).map(String::as_str) {
        Some(status::IN_PROGRESS) => State::InProgress {
            owner: text(name::OWNER).map(Owner::new),
            lease: whole(name::LEASE).map(|end| Lease::until(EpochMillis::new(end))),
        },
        Some(status::COMPLETED) => State::Completed {
            result: StoredResult {
                json: item.get(name::DATA).map_or_else(|| Ok("null".to_owned()), result::from_attribute)?,
                reduced: matches!(item.get(name::DATA_REDUCED), Some(AttributeValue::Bool(true))),
            },
            completed_at: whole(name::COMPLETED_AT).map(EpochMillis::new),
        },
        Some(status::PARKED) => {
            State::Parked { reason: text(name::REASON).cloned().unwrap_or_else(|| "no reason was recorded".to_owned()) }
        }
        other => State::Unknown { status: other.unwrap_or("(none)").to_owned() },
    };
    Ok(Record {
        id: RecordId::new(id),
        state,
        // Other software doesn't count; that it wrote the record means one claim.
        attempt: whole(name::ATTEMPT).unwrap_or(1),
        // Without a number here `expiration < :now` is never true.
        expires: EpochSeconds::new(whole(name::EXPIRATION).unwrap_or(u64::MAX)),
        fingerprint: text(name::VALIDATION).cloned(),
        message_id: text(name::MESSAGE_ID).cloned(),
        claimed_at: whole(name::CLAIMED_AT).map(EpochMillis::new),
    })
}

/// A DynamoDB number, its fraction dropped; negative ones count as zero. Exact, because a
/// condition expression is: through a double, 1899999999.999999999 would be 1900000000.
fn whole_number(value: &AttributeValue) -> Option<u64> {
    /// DynamoDB has no number of more digits before the point.
    const MOST_DIGITS: i64 = 126;

    let text = value.as_n().ok()?;
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (mantissa, negative) = match mantissa.strip_prefix('-') {
        Some(mantissa) => (mantissa, true),
        None => (mantissa, false),
    };
    let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let places = exponent.parse::<i64>().ok()?.checked_add(i64::try_from(integer.len()).ok()?)?;
    let digits = [integer, fraction].concat();
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    if negative {
        return Some(0);
    }
    let mut digits = digits.bytes().map(|digit| u64::from(digit - b'0')).chain(std::iter::repeat(0));
    let whole = (0..places.min(MOST_DIGITS))
        .fold(0_u64, |whole, _| whole.saturating_mul(10).saturating_add(digits.next().unwrap_or(0)));
    Some(whole)
}
