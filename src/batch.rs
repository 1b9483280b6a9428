//! Many messages: groups in order and side by side, within a deadline.

mod single_flight;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join;
use futures_util::stream::{self, StreamExt};

use self::single_flight::{KeyGuard, SingleFlight};
use crate::consumer::{Admission, Consumer, Held, Prepared};
use crate::effect::{Effect, Recovery};
use crate::key::Key;
use crate::message::Message;
use crate::outcome::{Disposition, Outcome, Report, Unstarted};
use crate::store::{StoreError, StoreErrorKind};
use crate::time::Deadline;

/// After so many failures in a row the store is not asked again in the same batch.
const STORE_FAILURES_IN_A_ROW: usize = 3;

/// How a [`Batch`] is run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BatchSettings {
    /// Groups in flight at once. Default 10, an SQS FIFO batch.
    pub max_concurrency: usize,
    /// No message is begun with less time left than this *and* the effect's own
    /// [time limit](Effect::time_limit). Default 1 s.
    pub min_time_per_message: Duration,
    /// The queue's `maxReceiveCount`: a message that fails on its last receive leaves for
    /// the dead-letter queue, so its group need not wait for it. `None` if there is no
    /// such count.
    pub max_receive_count: Option<u32>,
}

impl Default for BatchSettings {
    fn default() -> Self {
        Self { max_concurrency: 10, min_time_per_message: Duration::from_secs(1), max_receive_count: None }
    }
}

/// A batch could not be processed at all. Nothing was run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// No message could be claimed.
    #[error("nothing was processed: the store could not be asked for a single claim")]
    StoreAway(#[source] StoreError),
    /// Not one message fits into the time given.
    #[error(
        "nothing was processed: {remaining:?} were left, and no message is begun with less than {needed:?}; \
         raise the function's timeout or lower the effect's"
    )]
    TooLittleTime {
        /// Time left at the start.
        remaining: Duration,
        /// Time that one message needs.
        needed: Duration,
    },
}

/// Runs batches of messages through a [`Consumer`].
///
/// * Messages of one group run in the order given. The first that is not acked stops its
///   group: the rest of it is reported [`Unstarted`] and comes again.
/// * Groups run side by side; a message without a group is its own group.
/// * While one message's effect runs, the claim of the next of its group is already under
///   way, so that one store round trip per message is on the critical path.
/// * Messages with one key wait for each other, across groups and across batches that run
///   at the same time in this process.
#[derive(Debug)]
pub struct Batch<E> {
    consumer: Consumer<E>,
    settings: BatchSettings,
    keys: Arc<SingleFlight>,
}

/// A message that holds its claim and waits for its turn.
struct Ready<I> {
    prepared: Prepared<I>,
    held: Held,
    /// Others with this key in this process wait until it is dropped.
    _key: KeyGuard,
}

enum Turn<I> {
    Ready(Ready<I>),
    Settled(Option<Key>, Outcome),
}

/// What the groups of one batch share.
struct Run {
    deadline: Deadline,
    store_failures_in_a_row: AtomicUsize,
    store_answered: AtomicBool,
}

impl Run {
    fn note(&self, admission: &Admission) {
        let Admission::Settled(Outcome::StoreFailed { error }) = admission else {
            self.store_answered.store(true, Ordering::Relaxed);
            self.store_failures_in_a_row.store(0, Ordering::Relaxed);
            return;
        };
        // An unreadable record is one key's trouble, and an answer.
        if error.kind() == StoreErrorKind::Unreadable {
            self.store_answered.store(true, Ordering::Relaxed);
        } else {
            self.store_failures_in_a_row.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn store_is_away(&self) -> bool {
        self.store_failures_in_a_row.load(Ordering::Relaxed) >= STORE_FAILURES_IN_A_ROW
    }
}

impl<E: Effect> Batch<E> {
    /// Batches for that consumer.
    pub fn new(consumer: Consumer<E>, settings: BatchSettings) -> Self {
        Self { consumer, settings, keys: Arc::default() }
    }

    /// The consumer that each message goes through.
    pub fn consumer(&self) -> &Consumer<E> {
        &self.consumer
    }

    /// Processes the messages; the reports come in the order of the messages.
    pub async fn process(&self, messages: &[Message], deadline: Deadline) -> Result<Vec<Report>, BatchError> {
        let (remaining, needed) = (deadline.remaining(), self.time_per_message());
        if remaining < needed && !messages.is_empty() {
            return Err(BatchError::TooLittleTime { remaining, needed });
        }
        let run =
            Run { deadline, store_failures_in_a_row: AtomicUsize::new(0), store_answered: AtomicBool::new(false) };
        let run = &run;
        // Futures in a list, not a mapped stream: a closure over borrowed messages inside the
        // stream would make this future's `Send` undecidable to the compiler.
        let groups: Vec<_> = groups(messages).into_iter().map(|group| self.process_group(group, run)).collect();
        let mut reports: Vec<(usize, Report)> = stream::iter(groups)
            .buffer_unordered(self.settings.max_concurrency.max(1))
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .flatten()
            .collect();
        reports.sort_by_key(|(position, _)| *position);
        let reports: Vec<Report> = reports.into_iter().map(|(_, report)| report).collect();
        if !run.store_answered.load(Ordering::Relaxed)
            && let Some(error) = reports.iter().find_map(|report| match &report.outcome {
                Outcome::StoreFailed { error } => Some(error.clone()),
                _ => None,
            })
        {
            return Err(BatchError::StoreAway(error));
        }
        Ok(reports)
    }

    fn time_per_message(&self) -> Duration {
        let effect = self.consumer.effect().time_limit().unwrap_or_default();
        self.settings.min_time_per_message.max(effect + self.consumer.settings().answer_reserve)
    }

    async fn process_group(&self, group: Vec<(usize, &Message)>, run: &Run) -> Vec<(usize, Report)> {
        // A claim taken ahead by a consumer that dies looks like an attempt without an
        // outcome. Rerun and verify shrug that off; park would trouble a person with it.
        let claims_ahead = self.consumer.effect().recovery() != Recovery::Park;
        let stopped = AtomicBool::new(false);
        let mut reports = Vec::with_capacity(group.len());
        let mut ahead = None;
        let mut messages = group.into_iter().peekable();
        while let Some((position, message)) = messages.next() {
            let turn = match ahead.take() {
                Some(turn) => turn,
                None => self.turn(message, run, &stopped).await,
            };
            let report = match turn {
                Turn::Settled(key, outcome) => {
                    stopped.store(self.stops_its_group(message, &outcome), Ordering::Relaxed);
                    Report::new(message, key, None, outcome)
                }
                Turn::Ready(ready) => {
                    let this = self.take_turn(message, ready, run, &stopped);
                    match messages.peek().filter(|_| claims_ahead) {
                        Some((_, next)) => {
                            let (report, next) = join(this, self.turn(next, run, &stopped)).await;
                            ahead = Some(next);
                            report
                        }
                        None => this.await,
                    }
                }
            };
            crate::telemetry::log_report(&report);
            reports.push((position, report));
            if stopped.load(Ordering::Relaxed) {
                break;
            }
        }
        if let Some(Turn::Ready(ready)) = ahead {
            self.consumer.release(ready.held, run.deadline).await;
        }
        for (position, message) in messages {
            let key = self.consumer.key(message).ok();
            let report = Report::new(message, key, None, Outcome::Unstarted { why: Unstarted::GroupStopped });
            crate::telemetry::log_report(&report);
            reports.push((position, report));
        }
        reports
    }

    /// Gets a message as far as holding its claim.
    async fn turn(&self, message: &Message, run: &Run, stopped: &AtomicBool) -> Turn<E::Input> {
        let prepared = match self.consumer.prepare(message) {
            Ok(prepared) => prepared,
            Err(outcome) => return Turn::Settled(None, outcome),
        };
        let unstarted = |why| Outcome::Unstarted { why };
        let Some(guard) = run.deadline.limit(SingleFlight::enter(&self.keys, prepared.key.id())).await else {
            return Turn::Settled(Some(prepared.key), unstarted(Unstarted::Deadline));
        };
        let why_not = if stopped.load(Ordering::Relaxed) {
            Some(Unstarted::GroupStopped)
        } else if run.deadline.remaining() < self.time_per_message() {
            Some(Unstarted::Deadline)
        } else if run.store_is_away() {
            Some(Unstarted::StoreAway)
        } else {
            None
        };
        if let Some(why) = why_not {
            return Turn::Settled(Some(prepared.key), unstarted(why));
        }
        let admission = self.consumer.admit(message, &prepared, run.deadline).await;
        run.note(&admission);
        match admission {
            Admission::Held(held) => Turn::Ready(Ready { prepared, held, _key: guard }),
            Admission::Settled(outcome) => Turn::Settled(Some(prepared.key), outcome),
        }
    }

    /// Runs a message's effect. Says whether the group stops *before* the key is let go,
    /// so that a duplicate further down the group does not claim it for nothing.
    async fn take_turn(&self, message: &Message, ready: Ready<E::Input>, run: &Run, stopped: &AtomicBool) -> Report {
        let Ready { prepared, held, _key } = ready;
        let attempt = held.attempt();
        let outcome = if run.deadline.remaining() < self.time_per_message() {
            self.consumer.release(held, run.deadline).await;
            Outcome::Unstarted { why: Unstarted::Deadline }
        } else {
            self.consumer.run(message, &prepared, held, run.deadline).await
        };
        stopped.store(self.stops_its_group(message, &outcome), Ordering::Relaxed);
        Report::new(message, Some(prepared.key), attempt, outcome)
    }

    /// A message that is not acked stops its group, unless it has failed on its last
    /// receive: then the queue takes it away, and its mates, received as often as it was,
    /// would go with it without ever having run.
    fn stops_its_group(&self, message: &Message, outcome: &Outcome) -> bool {
        if outcome.disposition() == Disposition::Ack {
            return false;
        }
        let last_receive = match (message.receive_count, self.settings.max_receive_count) {
            (Some(count), Some(max)) => count >= max,
            _ => false,
        };
        !(last_receive && outcome.was_tried())
    }
}

/// The messages with their positions, by group, in the order of each group's first
/// message.
fn groups(messages: &[Message]) -> Vec<Vec<(usize, &Message)>> {
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut groups: Vec<Vec<(usize, &Message)>> = Vec::new();
    for (position, message) in messages.iter().enumerate() {
        let place = message.group.as_deref().and_then(|group| {
            let place = *places.entry(group).or_insert(groups.len());
            (place < groups.len()).then_some(place)
        });
        match place.and_then(|place| groups.get_mut(place)) {
            Some(group) => group.push((position, message)),
            None => groups.push(vec![(position, message)]),
        }
    }
    groups
}
