//! Many messages: groups in order and side by side, within a deadline.

mod single_flight;

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join;
use futures_util::stream::{self, StreamExt};
use tokio::sync::Notify;

use self::single_flight::{KeyGuard, SingleFlight};
use crate::consumer::Consume;
use crate::dead_letter::{DeadLetter, DeadLetterQueue};
use crate::error::ErrorChain;
use crate::key::Key;
use crate::message::Message;
use crate::outcome::{Disposition, Outcome, Report, Unstarted};
use crate::store::{StoreError, StoreErrorKind};
use crate::time::Deadline;

/// How long before the deadline a dead letter must be sent, so that the answer is in time.
const ANSWER_RESERVE: Duration = Duration::from_millis(125);

/// After so many failures in a row the store is not asked again in the same batch.
const STORE_FAILURES_IN_A_ROW: usize = 3;

/// How a [`Batch`] is run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BatchSettings {
    /// Groups in flight at once. Default 10, an SQS FIFO batch.
    pub max_concurrency: usize,
    /// No message is begun with less time left than this *and* the effect's own
    /// [time limit](crate::effect::Effect::time_limit). Default 1 s.
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

/// A batch could not be processed at all. No message is done with.
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

/// Runs batches of messages through a [`Consumer`](crate::consumer::Consumer), or whatever
/// else can [`Consume`] them.
///
/// * Messages of one group run in the order given. The first that is not acked stops its
///   group: the rest of it is reported [`Unstarted`] and comes again.
/// * Groups run side by side; a message without a group is its own group.
/// * While one message's effect runs, the claim of the next of its group is already under
///   way, so that one store round trip per message is on the critical path.
/// * Messages with one key wait for each other, across groups and across batches that run
///   at the same time in this process.
/// * With a [`DeadLetterQueue`], what a person must look at is sent there at once, and its
///   group goes on. Without one, or if it could not be sent, it stops its group.
#[derive(Debug)]
pub struct Batch<C> {
    consumer: C,
    settings: BatchSettings,
    dead_letters: Option<Arc<dyn DeadLetterQueue>>,
    keys: Arc<SingleFlight>,
}

/// A message of a batch, its key and input read.
struct Entry<'a, P> {
    position: usize,
    message: &'a Message,
    prepared: Result<(Key, P), Outcome>,
    /// Another group of the batch has a message with the same key.
    shares_its_key: bool,
}

impl<P> Entry<'_, P> {
    fn key(&self) -> Option<&Key> {
        self.prepared.as_ref().ok().map(|(key, _)| key)
    }

    fn report(&self, attempt: Option<u64>, outcome: Outcome) -> Report {
        Report::new(self.message, self.key().cloned(), attempt, outcome)
    }
}

/// How far a message has got before its effect.
enum Turn<H> {
    /// It holds its claim, and others with its key in this process wait for the guard.
    Ready(H, KeyGuard),
    Settled(Outcome),
}

/// Says to whoever works ahead in a group that the group goes no further.
#[derive(Default)]
struct Stop {
    stopped: AtomicBool,
    changed: Notify,
}

impl Stop {
    fn set_if(&self, stop: bool) {
        if stop {
            self.stopped.store(true, Ordering::Relaxed);
            self.changed.notify_one();
        }
    }

    fn is_set(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    async fn wait(&self) {
        while !self.is_set() {
            self.changed.notified().await;
        }
    }
}

/// What the groups of one batch share.
struct Run {
    deadline: Deadline,
    store_failures_in_a_row: AtomicUsize,
    store_answered: AtomicBool,
}

impl Run {
    /// Notes what an outcome says about the store: that it is away, that it is there, or
    /// nothing.
    fn note(&self, outcome: &Outcome) {
        match outcome {
            // An unreadable record, or a request that is refused as it stands, is one key's
            // trouble, and an answer.
            Outcome::StoreFailed { error }
                if matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Refused) =>
            {
                self.note_failure();
            }
            Outcome::Rejected { .. }
            | Outcome::Unstarted { .. }
            | Outcome::NotRecorded { .. }
            | Outcome::Applied { .. }
            | Outcome::Unprotected { .. }
            | Outcome::NotApplied { .. }
            | Outcome::Permanent { .. }
            | Outcome::Unknown { .. } => {}
            _ => self.note_answer(),
        }
    }

    fn note_answer(&self) {
        self.store_answered.store(true, Ordering::Relaxed);
        self.store_failures_in_a_row.store(0, Ordering::Relaxed);
    }

    fn note_failure(&self) {
        self.store_failures_in_a_row.fetch_add(1, Ordering::Relaxed);
    }

    fn store_is_away(&self) -> bool {
        self.store_failures_in_a_row.load(Ordering::Relaxed) >= STORE_FAILURES_IN_A_ROW
    }
}

impl<C: Consume> Batch<C> {
    /// Batches for that consumer.
    pub fn new(consumer: C, settings: BatchSettings) -> Self {
        Self { consumer, settings, dead_letters: None, keys: Arc::default() }
    }

    /// The same batches, with a queue for what a person must look at.
    #[must_use]
    pub fn with_dead_letters(mut self, queue: Arc<dyn DeadLetterQueue>) -> Self {
        self.dead_letters = Some(queue);
        self
    }

    /// The consumer that each message goes through.
    pub fn consumer(&self) -> &C {
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
        let groups: Vec<_> =
            self.entries(messages).into_iter().map(|group| self.process_group_or_catch(group, run)).collect();
        let mut reports: Vec<(usize, Report)> = stream::iter(groups)
            .buffer_unordered(self.settings.max_concurrency.max(1))
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .flatten()
            .collect();
        reports.sort_by_key(|(position, _)| *position);
        let reports: Vec<Report> = reports.into_iter().map(|(_, report)| report).collect();
        // What is done with must be acked, or it is done again: dead letters that were sent,
        // effects that ran without the store.
        if !run.store_answered.load(Ordering::Relaxed)
            && !reports.iter().any(|report| report.disposition() == Disposition::Ack)
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
        self.settings.min_time_per_message.max(self.consumer.time_needed())
    }

    /// The messages by group, in the order of each group's first message.
    fn entries<'a>(&self, messages: &'a [Message]) -> Vec<Vec<Entry<'a, C::Prepared>>> {
        let mut groups = groups(messages)
            .into_iter()
            .map(|group| {
                let entry = |(position, message)| {
                    let prepared = self.consumer.prepare(message);
                    Entry { position, message, prepared, shares_its_key: false }
                };
                group.into_iter().map(entry).collect::<Vec<_>>()
            })
            .collect::<Vec<_>>();
        let mut group_of_key: HashMap<Key, Option<usize>> = HashMap::new();
        for (number, group) in groups.iter().enumerate() {
            for key in group.iter().filter_map(Entry::key) {
                let group = group_of_key.entry(key.clone()).or_insert(Some(number));
                if *group != Some(number) {
                    *group = None;
                }
            }
        }
        for entry in groups.iter_mut().flatten() {
            entry.shares_its_key = entry.key().is_some_and(|key| group_of_key.get(key) == Some(&None));
        }
        groups
    }

    /// A last net: what user code can do in a destructor, or a bug of ours, must cost one
    /// group and not the batch. Nothing of the group is acked, so all of it comes again.
    async fn process_group_or_catch(&self, group: Vec<Entry<'_, C::Prepared>>, run: &Run) -> Vec<(usize, Report)> {
        let messages: Vec<_> = group.iter().map(|entry| (entry.position, entry.message)).collect();
        let work = AssertUnwindSafe(self.process_group(group, run)).catch_unwind();
        work.await.unwrap_or_else(|_| {
            messages
                .into_iter()
                .map(|(position, message)| {
                    let reason = "a panic outside of the effect; see the log".to_owned();
                    let report = Report::new(message, None, None, Outcome::Unknown { reason, retry_after: None });
                    crate::telemetry::log_report(&report);
                    (position, report)
                })
                .collect()
        })
    }

    async fn process_group(&self, group: Vec<Entry<'_, C::Prepared>>, run: &Run) -> Vec<(usize, Report)> {
        let stop = Stop::default();
        let mut reports = Vec::with_capacity(group.len());
        let mut ahead = None;
        let mut entries = group.iter().peekable();
        while let Some(entry) = entries.next() {
            let turn = match ahead.take() {
                // What was in flight while the message before it ran may be done by now.
                None | Some(Turn::Settled(Outcome::InFlight { .. })) => self.turn(entry, run, &stop).await,
                Some(turn) => turn,
            };
            let report = match turn {
                Turn::Settled(outcome) => {
                    let report = self.hand_over(entry, entry.report(None, outcome), run).await;
                    stop.set_if(self.stops_its_group(entry.message, &report));
                    report
                }
                Turn::Ready(held, guard) => {
                    let work = self.take_turn(entry, held, guard, run, &stop);
                    // A key that another group waits for is not held longer than its turn.
                    match entries.peek().filter(|next| self.consumer.claims_ahead() && !next.shares_its_key) {
                        Some(next) => {
                            let (report, next) = join(work, self.turn(next, run, &stop)).await;
                            ahead = Some(next);
                            report
                        }
                        None => work.await,
                    }
                }
            };
            crate::telemetry::log_report(&report);
            reports.push((entry.position, report));
            if stop.is_set() {
                break;
            }
        }
        if let Some(Turn::Ready(held, _guard)) = ahead {
            self.consumer.release(held, run.deadline).await;
        }
        reports.extend(entries.map(|entry| {
            let report = entry.report(None, Outcome::Unstarted { why: Unstarted::GroupStopped });
            crate::telemetry::log_report(&report);
            (entry.position, report)
        }));
        reports
    }

    /// Gets a message as far as holding its claim.
    async fn turn(&self, entry: &Entry<'_, C::Prepared>, run: &Run, stop: &Stop) -> Turn<C::Held> {
        let (key, prepared) = match &entry.prepared {
            Ok(prepared) => prepared,
            Err(outcome) => return Turn::Settled(outcome.clone()),
        };
        let unstarted = |why| Turn::Settled(Outcome::Unstarted { why });
        // Whoever has the key longer than this leaves no time for the effect.
        let latest = run.deadline.earlier(self.time_per_message());
        let guard = tokio::select! {
            biased;
            guard = latest.limit(SingleFlight::enter(&self.keys, key.id())) => guard,
            () = stop.wait() => None,
        };
        if stop.is_set() {
            return unstarted(Unstarted::GroupStopped);
        }
        let Some(guard) = guard.filter(|_| run.deadline.remaining() >= self.time_per_message()) else {
            return unstarted(Unstarted::Deadline);
        };
        if run.store_is_away() {
            return match self.consumer.unprotected() {
                Some(held) => Turn::Ready(held, guard),
                None => unstarted(Unstarted::StoreAway),
            };
        }
        match self.consumer.admit(entry.message, key, prepared, run.deadline).await {
            Ok(held) => {
                if C::attempt(&held).is_some() {
                    run.note_answer();
                } else if self.consumer.unprotected().is_some() {
                    run.note_failure();
                }
                Turn::Ready(held, guard)
            }
            Err(outcome) => {
                run.note(&outcome);
                Turn::Settled(outcome)
            }
        }
    }

    /// Runs a message's effect. Says whether the group stops *before* the key is let go,
    /// so that a duplicate further down the group does not claim it for nothing.
    async fn take_turn(
        &self,
        entry: &Entry<'_, C::Prepared>,
        held: C::Held,
        guard: KeyGuard,
        run: &Run,
        stop: &Stop,
    ) -> Report {
        let attempt = C::attempt(&held);
        let outcome = match &entry.prepared {
            Ok((key, prepared)) if run.deadline.remaining() >= self.time_per_message() => {
                self.consumer.run(entry.message, key, prepared, held, run.deadline).await
            }
            _ => {
                self.consumer.release(held, run.deadline).await;
                Outcome::Unstarted { why: Unstarted::Deadline }
            }
        };
        run.note(&outcome);
        let report = self.hand_over(entry, entry.report(attempt, outcome), run).await;
        stop.set_if(self.stops_its_group(entry.message, &report));
        drop(guard);
        report
    }

    /// Sends what a person must look at to the dead-letter queue, if there is one.
    async fn hand_over(&self, entry: &Entry<'_, C::Prepared>, mut report: Report, run: &Run) -> Report {
        let Some(queue) = self.dead_letters.as_ref().filter(|_| report.disposition() == Disposition::DeadLetter) else {
            return report;
        };
        let letter = DeadLetter::new(entry.message, &report, &self.consumer.key_attributes());
        let sending = AssertUnwindSafe(async { queue.send(&letter).await }).catch_unwind();
        let error = match run.deadline.earlier(ANSWER_RESERVE).limit(sending).await {
            Some(Ok(Ok(()))) => {
                report.dead_lettered = true;
                return report;
            }
            Some(Ok(Err(error))) => ErrorChain(&error).to_string(),
            Some(Err(_)) => "sending it panicked; see the log".to_owned(),
            None => "the time was over".to_owned(),
        };
        tracing::error!(
            message_id = report.message_id.as_str(),
            error,
            "no dead letter was sent for the message; it stays in its queue"
        );
        report
    }

    fn stops_its_group(&self, message: &Message, report: &Report) -> bool {
        let last_receive = match (message.receive_count, self.settings.max_receive_count) {
            (Some(count), Some(max)) => count >= max,
            _ => false,
        };
        report.stops_its_group(last_receive)
    }
}

/// The messages with their positions, by group, in the order of each group's first
/// message.
fn groups(messages: &[Message]) -> Vec<Vec<(usize, &Message)>> {
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut groups: Vec<Vec<(usize, &Message)>> = Vec::new();
    for (position, message) in messages.iter().enumerate() {
        let place = message.group.as_deref().map(|group| *places.entry(group).or_insert(groups.len()));
        match place.and_then(|place| groups.get_mut(place)) {
            Some(group) => group.push((position, message)),
            None => groups.push(vec![(position, message)]),
        }
    }
    groups
}
