//! A record, as the writes make it that the store has accepted: the rules of `src/record.rs`
//! told a second time, from the design.

use super::checker::Row;
use super::history::Write;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Record {
    #[default]
    Absent,
    Held {
        owner: String,
        attempt: u64,
        lease: u64,
        message: String,
    },
    Completed {
        attempt: u64,
        data: String,
        message: String,
        /// Of the transaction that wrote it.
        token: Option<String>,
    },
    Parked {
        attempt: u64,
    },
}

/// What an accepted write makes of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    To(Record),
    /// It was taken over, and its lease was not over by the taker's own clock.
    Early(Record),
    /// The same transaction again, for which the store only repeats its answer.
    Repeated,
    /// It should have been refused.
    Wrong,
}

impl Record {
    /// A takeover waits until the lease is over by `skew` milliseconds.
    pub fn step(&self, write: &Write, skew: u64) -> Step {
        let held = |by: &str, as_attempt: u64| matches!(self, Self::Held { owner, attempt, .. } if owner == by && *attempt == as_attempt);
        match (write, self) {
            (Write::Claim { owner, attempt: 1, lease, message, .. }, Self::Absent) => {
                Step::To(Self::held(owner, 1, *lease, message))
            }
            (
                Write::Claim { owner, attempt, lease, message, claimed_at },
                Self::Held { attempt: before, lease: end, .. },
            ) if *attempt == before + 1 => {
                let taken = Self::held(owner, *attempt, *lease, message);
                if *claimed_at > end + skew { Step::To(taken) } else { Step::Early(taken) }
            }
            (Write::Complete { owner, attempt, data }, Self::Held { message, .. }) if held(owner, *attempt) => {
                let (data, message) = (data.clone(), message.clone());
                Step::To(Self::Completed { attempt: *attempt, data, message, token: None })
            }
            (Write::Park { owner, attempt }, _) if held(owner, *attempt) => {
                Step::To(Self::Parked { attempt: *attempt })
            }
            (Write::SetLease { owner, attempt, lease }, Self::Held { message, .. }) if held(owner, *attempt) => {
                Step::To(Self::held(owner, *attempt, *lease, message))
            }
            // To remove what is not there changes nothing.
            (Write::Release { .. }, Self::Absent) => Step::To(Self::Absent),
            // Only a first claim is removed: a later one stands for an attempt of unknown outcome.
            (Write::Release { owner, attempt: 1 }, _) if held(owner, 1) => Step::To(Self::Absent),
            (Write::Commit { token, message, data, .. }, Self::Absent) => {
                let (data, message, token) = (data.clone(), message.clone(), Some(token.clone()));
                Step::To(Self::Completed { attempt: 1, data, message, token })
            }
            (Write::Commit { token, .. }, Self::Completed { token: Some(before), .. }) if token == before => {
                Step::Repeated
            }
            _ => Step::Wrong,
        }
    }

    fn held(owner: &str, attempt: u64, lease: u64, message: &str) -> Self {
        Self::Held { owner: owner.to_owned(), attempt, lease, message: message.to_owned() }
    }

    /// How it lies in the table.
    pub fn row(&self) -> Option<Row> {
        let (status, attempt, data) = match self {
            Self::Absent => return None,
            Self::Held { attempt, .. } => ("INPROGRESS", attempt, None),
            Self::Completed { attempt, data, .. } => ("COMPLETED", attempt, Some(data.clone())),
            Self::Parked { attempt } => ("PARKED", attempt, None),
        };
        Some(Row { status: status.to_owned(), attempt: *attempt, data })
    }
}
