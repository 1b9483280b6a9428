//! How long a failed message stays invisible in its SQS queue.
//!
//! Left alone it comes again after the queue's visibility timeout, which must be six function
//! timeouts long: minutes, for a fault that may be over in seconds, and in a FIFO queue its
//! group waits with it. [`BackOff`] sets each failed message's visibility instead:
//!
//! * by its receive count: [`base`](BackOffSettings::base), doubled at each receive, up to
//!   [`cap`](BackOffSettings::cap), and with *equal jitter*: between half of that and all
//!   of it. (Full jitter would make some waits next to nothing, and every receive that is
//!   used up too early is one less until the dead-letter queue.)
//! * no earlier than the target asked for with `Retry-After`;
//! * in flight: at the end of the other consumer's lease;
//! * the rest of a FIFO group: no earlier than its first message that failed, and only if
//!   that one's was changed.
//!
//! Neither of the middle two exceeds [`longest`](BackOffSettings::longest). A change that
//! fails is logged, and leaves the visibility as it was.
//!
//! **It makes receives come faster, and with them the dead-letter queue.** With the defaults
//! (10 s, 5 receives, 180 s) the last receive comes 75 to 150 s after the first, where the
//! visibility timeout alone takes 720 s. Raise the queue's `maxReceiveCount` to ride out
//! longer outages: with 10 it comes 515 to 1030 s after the first.

#[cfg(feature = "sqs")]
pub mod sqs;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use uuid::Uuid;

use crate::error::{BoxError, ErrorChain};
use crate::message::Message;
use crate::outcome::{Disposition, Outcome, Report};
use crate::time::{Deadline, EpochMillis, Retention};
use futures_util::future::BoxFuture;

/// SQS's limit: 12 hours.
pub const MAX_VISIBILITY: Duration = Duration::from_hours(12);

/// SQS's limit of entries to a request.
pub const MAX_ENTRIES: usize = 10;

/// Requests at once. A FIFO batch fits into one.
const CONCURRENCY: usize = 8;

/// How long before the deadline all must be changed, so that the answer is in time.
const ANSWER_RESERVE: Duration = Duration::from_millis(125);

/// How long failed messages wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackOffSettings {
    /// The wait after the first receive, before jitter.
    pub base: Duration,
    /// The longest wait that is due to the receive count.
    pub cap: Duration,
    /// The longest wait of all: `Retry-After` and leases reach no further.
    pub longest: Duration,
}

impl BackOffSettings {
    /// The settings for a queue.
    ///
    /// Records must outlive the redelivery of their messages: that is what the retention is
    /// for, visibility timeout x max receives + buffer. No back-off exceeds the visibility
    /// timeout, and no wait its share of the retention, so it stays enough.
    #[must_use]
    pub fn for_queue(
        base: Duration,
        visibility_timeout: Duration,
        retention: Retention,
        max_receive_count: u32,
    ) -> Self {
        let cap = visibility_timeout.min(MAX_VISIBILITY);
        let share = Duration::from_secs(retention.seconds() / u64::from(max_receive_count.max(1)));
        Self { base, cap, longest: share.min(MAX_VISIBILITY) }
    }

    /// How long a message is invisible after its `receive_count`-th receive; `jitter` is at
    /// least 0 and below 1. Whole seconds, as SQS counts, and at least one.
    #[must_use]
    pub fn visibility(&self, receive_count: u32, retry_after: Option<Duration>, jitter: f64) -> Duration {
        let doublings = receive_count.saturating_sub(1);
        let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
        let wait = self.base.saturating_mul(factor).min(self.cap);
        let wait = wait / 2 + (wait / 2).mul_f64(jitter.clamp(0.0, 1.0));
        whole_seconds(wait.max(retry_after.unwrap_or_default().min(self.longest)))
    }
}

/// Rounded up, and within what SQS takes.
fn whole_seconds(wait: Duration) -> Duration {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    Duration::from_secs(seconds.max(1)).min(MAX_VISIBILITY)
}

/// The new visibility of one message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// The message's id.
    pub message_id: String,
    /// Its receipt handle.
    pub receipt: String,
    /// From now on; whole seconds.
    pub visibility: Duration,
    /// The id of the message that it must not overtake.
    pub behind: Option<String>,
}

/// What to change after a batch; `reports` are those of the messages, one for one. `jitter`
/// gives numbers of at least 0 and below 1.
#[must_use]
pub fn plan(
    messages: &[Message],
    reports: &[Report],
    settings: &BackOffSettings,
    now: EpochMillis,
    mut jitter: impl FnMut() -> f64,
) -> Vec<Change> {
    // By group: the first that failed, and the longest wait so far.
    let mut groups: HashMap<&str, (&str, Duration)> = HashMap::new();
    let mut changes = Vec::new();
    for (message, report) in messages.iter().zip(reports) {
        if report.disposition() == Disposition::Ack {
            continue;
        }
        let ahead = message.group.as_deref().and_then(|group| groups.get(group).copied());
        let visibility = match (&report.outcome, ahead) {
            (Outcome::Unstarted { .. }, Some((_, wait))) => wait,
            (Outcome::InFlight { until }, _) => {
                // One millisecond more: it may be taken over after that point, not at it.
                whole_seconds((until.since(now) + Duration::from_millis(1)).min(settings.longest))
            }
            (outcome, _) => {
                let retry_after = match outcome {
                    Outcome::NotApplied { retry_after, .. } | Outcome::Unknown { retry_after, .. } => *retry_after,
                    _ => None,
                };
                settings.visibility(message.receive_count.unwrap_or(1), retry_after, jitter())
            }
        };
        let visibility = ahead.map_or(visibility, |(_, wait)| wait.max(visibility));
        if let Some(group) = message.group.as_deref() {
            groups.entry(group).or_insert((&message.id, visibility)).1 = visibility;
        }
        if let Some(receipt) = &message.receipt {
            changes.push(Change {
                message_id: message.id.clone(),
                receipt: receipt.clone(),
                visibility,
                behind: ahead.map(|(first, _)| first.to_owned()),
            });
        }
    }
    changes
}

/// A queue whose messages' visibility can be changed.
pub trait Visibility: fmt::Debug + Send + Sync + 'static {
    /// Makes up to [`MAX_ENTRIES`] changes; returns those that were refused.
    fn change<'a>(&'a self, changes: &'a [Change]) -> BoxFuture<'a, Result<Vec<Refusal>, VisibilityError>>;
}

/// One change that was not made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The message's id.
    pub message_id: String,
    /// What the queue says.
    pub reason: String,
}

/// None of the changes was made, as far as is known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisibilityError {
    /// The function has not the permission.
    #[error("the function's role does not allow it")]
    Denied(#[source] BoxError),
    /// Anything else.
    #[error("the queue did not do it")]
    Failed(#[source] BoxError),
}

/// Sets the visibility of failed messages.
#[derive(Debug)]
pub struct BackOff {
    settings: BackOffSettings,
    queue: Arc<dyn Visibility>,
    denied: AtomicBool,
}

impl BackOff {
    /// For the messages of that queue.
    #[must_use]
    pub fn new(settings: BackOffSettings, queue: Arc<dyn Visibility>) -> Self {
        Self { settings, queue, denied: AtomicBool::new(false) }
    }

    /// Changes what is to be changed after a batch, as far as there is time.
    pub async fn apply(&self, messages: &[Message], reports: &[Report], now: EpochMillis, deadline: Deadline) {
        let changes = plan(messages, reports, &self.settings, now, jitter);
        let (rest, first): (Vec<_>, Vec<_>) = changes.into_iter().partition(|change| change.behind.is_some());
        let all = async {
            let made = self.change(first).await;
            // After their first, so none is visible before it; and not at all if it is
            // still invisible for as long as the queue says.
            let rest = rest.into_iter().filter(|change| change.behind.as_ref().is_some_and(|id| made.contains(id)));
            self.change(rest.collect()).await;
        };
        if deadline.earlier(ANSWER_RESERVE).limit(all).await.is_none() {
            tracing::warn!("the time was over before every failed message had its visibility changed");
        }
    }

    /// Makes the changes; returns the messages whose change was made.
    async fn change(&self, changes: Vec<Change>) -> HashSet<String> {
        let mut made = HashSet::new();
        // Futures in a list, not a mapped stream: see `Batch::process`.
        let requests: Vec<_> = changes.chunks(MAX_ENTRIES).map(|chunk| self.request(chunk)).collect();
        let mut answers = stream::iter(requests).buffer_unordered(CONCURRENCY);
        while let Some(ids) = answers.next().await {
            made.extend(ids);
        }
        made
    }

    async fn request(&self, changes: &[Change]) -> Vec<String> {
        if self.denied.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let refused: HashMap<String, String> = match self.queue.change(changes).await {
            Ok(refusals) => refusals.into_iter().map(|refusal| (refusal.message_id, refusal.reason)).collect(),
            Err(error @ VisibilityError::Denied(_)) => {
                if !self.denied.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        error = %ErrorChain(&error),
                        "back-off is off from now on: grant sqs:ChangeMessageVisibility on the queue, or set RETRY_BACK_OFF=off"
                    );
                }
                return Vec::new();
            }
            Err(error) => {
                tracing::warn!(
                    error = %ErrorChain(&error),
                    messages = changes.len(),
                    "the visibility of failed messages was not changed; they come again after the queue's own time"
                );
                return Vec::new();
            }
        };
        let mut made = Vec::new();
        for change in changes {
            let message_id = change.message_id.as_str();
            if let Some(reason) = refused.get(message_id) {
                tracing::warn!(
                    message_id,
                    reason,
                    "the visibility of a failed message was not changed; it comes again after the queue's own time"
                );
            } else {
                tracing::info!(message_id, seconds = change.visibility.as_secs(), "message comes again");
                made.push(change.message_id.clone());
            }
        }
        made
    }
}

/// A random number of at least 0 and below 1.
#[allow(clippy::disallowed_methods)] // random bytes, and no owner's token
fn jitter() -> f64 {
    let [a, b, c, d, ..] = Uuid::new_v4().into_bytes();
    f64::from(u32::from_be_bytes([a, b, c, d])) / (f64::from(u32::MAX) + 1.0)
}
