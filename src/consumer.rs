//! One message through the protocol: key, claim, effect, result.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use crate::effect::{Attempt, Effect, EffectError, EffectErrorKind, Recovery, Verification};
use crate::error::ErrorChain;
use crate::fingerprint::{Coverage, sha256_hex};
use crate::json::{Json, JsonError};
use crate::key::{Key, KeyError, KeyExpression, Scope};
use crate::message::Message;
use crate::outcome::{Outcome, Report, Unstarted};
use crate::record::{self, Claim, ClaimRequest, Completion, Owner, Parking, Record, RecordId, Standing, StoredResult};
use crate::store::{ClaimOutcome, FencedOutcome, Store, StoreError, StoreErrorKind};
use crate::time::{Clock, Deadline, EpochSeconds, Lease, Retention, SystemClock};

/// A reason kept on a record is for reading; longer ones are cut.
const MAX_REASON_CHARS: usize = 1000;

/// Pauses between tries to store a result, doubling; the store has retries of its own.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// An effect that sets itself no limit is not begun with less time than this.
const SHORTEST_TURN: Duration = Duration::from_millis(1);

/// What to do with a message while the store is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StoreOutage {
    /// Run nothing without a claim. The messages wait in their queue.
    #[default]
    Reject,
    /// Run the effect without protection: for effects where late is worse than twice.
    Process,
}

/// How a [`Consumer`] tells messages apart and how long it remembers them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConsumerSettings {
    /// First part of every record's id.
    pub scope: Scope,
    /// Where in a message its key is.
    pub key: KeyExpression,
    /// What of the payload must be equal under one key.
    pub fingerprint: Coverage,
    /// How long finished records are remembered.
    pub retention: Retention,
    /// How far the clocks of two consumers may differ. A takeover waits that much longer.
    /// Default 1 s.
    pub clock_skew: Duration,
    /// How much longer than its deadline a consumer holds its claims. Default 1 s.
    pub lease_margin: Duration,
    /// How long before the deadline effects are cancelled, to leave time to record what
    /// happened and to answer. Default 500 ms.
    pub answer_reserve: Duration,
    /// What to do while the store is away.
    pub store_outage: StoreOutage,
}

impl ConsumerSettings {
    /// The defaults: key `/idempotencyKey | /orderId`, the whole body fingerprinted.
    #[must_use]
    pub fn new(scope: Scope, retention: Retention) -> Self {
        Self {
            scope,
            key: KeyExpression::default(),
            fingerprint: Coverage::default(),
            retention,
            clock_skew: Duration::from_secs(1),
            lease_margin: Duration::from_secs(1),
            answer_reserve: Duration::from_millis(500),
            store_outage: StoreOutage::default(),
        }
    }
}

/// Takes one message at a time through the protocol. Cheap to share behind an `Arc`; it
/// keeps nothing between messages.
#[derive(Debug)]
pub struct Consumer<E> {
    effect: E,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    settings: ConsumerSettings,
}

/// A message whose key and input have been read.
pub(crate) struct Prepared<I> {
    pub(crate) key: Key,
    fingerprint: Option<String>,
    input: I,
}

/// What came of asking for the claim.
pub(crate) enum Admission {
    /// The effect may run.
    Held(Held),
    /// The message is settled without it.
    Settled(Outcome),
}

/// The right to run the effect.
pub(crate) struct Held {
    /// `None` while the store is away and the effect runs all the same.
    claim: Option<Claim>,
    taken_over: bool,
}

impl Held {
    pub(crate) fn attempt(&self) -> Option<u64> {
        self.claim.as_ref().map(|claim| claim.attempt)
    }
}

impl<E: Effect> Consumer<E> {
    /// A consumer that remembers in `store` and reads the machine's clock.
    pub fn new(effect: E, store: Arc<dyn Store>, settings: ConsumerSettings) -> Self {
        Self { effect, store, clock: Arc::new(SystemClock), settings }
    }

    /// The same consumer by another clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The clock it goes by.
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// The effect it applies.
    pub fn effect(&self) -> &E {
        &self.effect
    }

    pub(crate) fn settings(&self) -> &ConsumerSettings {
        &self.settings
    }

    /// Takes one message through the protocol, to be over by `deadline`. Messages that
    /// must keep an order, or may share a key, go through a
    /// [`Batch`](crate::batch::Batch) instead.
    pub async fn process(&self, message: &Message, deadline: Deadline) -> Report {
        let prepared = match self.prepare(message) {
            Ok(prepared) => prepared,
            Err(outcome) => return Report::new(message, None, None, outcome),
        };
        match self.admit(message, &prepared, deadline).await {
            Admission::Settled(outcome) => Report::new(message, Some(prepared.key), None, outcome),
            Admission::Held(held) => {
                let attempt = held.attempt();
                let outcome = self.run(message, &prepared, held, deadline).await;
                Report::new(message, Some(prepared.key), attempt, outcome)
            }
        }
    }

    /// The key of a message, or why it has none.
    pub fn key(&self, message: &Message) -> Result<Key, KeyError> {
        self.key_in(message, Json::parse(&message.body).as_ref())
    }

    fn key_in(&self, message: &Message, body: Result<&Json, &JsonError>) -> Result<Key, KeyError> {
        Ok(Key::new(&self.settings.scope, &self.settings.key.extract(message, body)?))
    }

    /// Reads key, fingerprint and input. The key is computed here, once: nothing that
    /// happens later changes which record is meant.
    pub(crate) fn prepare(&self, message: &Message) -> Result<Prepared<E::Input>, Outcome> {
        let rejected =
            |error: &(dyn std::error::Error + 'static)| Outcome::Rejected { reason: ErrorChain(error).to_string() };
        let body = Json::parse(&message.body);
        let key = self.key_in(message, body.as_ref()).map_err(|error| rejected(&error))?;
        let input = catch(|| self.effect.input(message))
            .unwrap_or_else(|panic| Err(format!("reading the input panicked: {panic}").into()))
            .map_err(|error| rejected(&*error))?;
        let fingerprint = self.settings.fingerprint.fingerprint(&message.body, body.as_ref().ok());
        Ok(Prepared { key, fingerprint: fingerprint.map(|fingerprint| fingerprint.as_str().to_owned()), input })
    }

    /// Asks for the claim, and judges what stands in the way of it.
    pub(crate) async fn admit(
        &self,
        message: &Message,
        prepared: &Prepared<E::Input>,
        deadline: Deadline,
    ) -> Admission {
        let request = self.request(message, prepared, deadline);
        let effects_end = deadline.earlier(self.settings.answer_reserve);
        let patience = match self.settings.store_outage {
            StoreOutage::Reject => effects_end,
            // Leave time to go on without the store.
            StoreOutage::Process => effects_end.earlier(effects_end.remaining() / 2),
        };
        let held = |claim, taken_over| Admission::Held(Held { claim: Some(claim), taken_over });

        let seen = match patience.limit(self.store.claim(&request)).await.unwrap_or_else(no_answer) {
            Ok(ClaimOutcome::Won(claim)) => return held(claim, false),
            Ok(ClaimOutcome::Lost(record)) => record,
            Ok(ClaimOutcome::Gone) => return Admission::Settled(Outcome::InFlight { until: request.now }),
            Err(error) => {
                self.forget_doubtful_claim(&request, &error).await;
                return self.without_store(error, false);
            }
        };
        if let Some(outcome) = self.settle(&seen, &request) {
            return Admission::Settled(outcome);
        }
        match patience.limit(self.store.take_over(&seen, &request)).await.unwrap_or_else(no_answer) {
            Ok(ClaimOutcome::Won(claim)) => held(claim, true),
            // A rival was faster. If its claim is over already, the next delivery sees to it.
            Ok(ClaimOutcome::Lost(record)) => {
                Admission::Settled(self.settle(&record, &request).unwrap_or(Outcome::InFlight { until: request.now }))
            }
            Ok(ClaimOutcome::Gone) => Admission::Settled(Outcome::InFlight { until: request.now }),
            Err(error) => self.without_store(error, true),
        }
    }

    fn request(&self, message: &Message, prepared: &Prepared<E::Input>, deadline: Deadline) -> ClaimRequest {
        let now = self.clock.now();
        let lease = Lease::until(deadline.wall().plus(self.settings.lease_margin));
        // A record must not be forgotten while its claim is held, however short the retention.
        let held_until = lease.end().plus(self.settings.clock_skew).to_seconds();
        ClaimRequest {
            id: RecordId::new(prepared.key.id()),
            owner: Owner::random(),
            lease,
            expires: self.settings.retention.expiry(now).max(held_until),
            fingerprint: prepared.fingerprint.clone(),
            message_id: message.id.clone(),
            now,
        }
    }

    /// A first claim without an answer may stand all the same. Its lease ends by itself,
    /// and rerun and verify shrug it off; with park it would trouble a person about an
    /// effect that was never begun, so it is taken back if the store can be reached again.
    async fn forget_doubtful_claim(&self, request: &ClaimRequest, error: &StoreError) {
        if self.effect.recovery() == Recovery::Park
            && self.settings.store_outage == StoreOutage::Reject
            && error.kind() == StoreErrorKind::Unavailable
        {
            let end = Deadline::after(self.settings.answer_reserve / 2, &*self.clock);
            let claim = request.to_claim(1);
            // Nothing hangs on it: an error, or no answer, leaves things as they are.
            let _ = end.limit(self.store.release(&claim)).await;
        }
    }

    /// The outcome that a record in the way means; `None` if it may be taken over.
    fn settle(&self, record: &Record, request: &ClaimRequest) -> Option<Outcome> {
        match record::judge(record, request, self.settings.clock_skew) {
            Standing::Conflict => Some(Outcome::Conflict { stored: Box::new(record.clone()) }),
            Standing::Completed(result) => Some(Outcome::Replayed { result }),
            Standing::Parked(reason) => Some(Outcome::Parked { reason }),
            Standing::Held { until } => Some(Outcome::InFlight { until }),
            Standing::Locked { status, until } => Some(Outcome::Locked { status, until }),
            Standing::Lapsed => None,
        }
    }

    /// `taken_over`: an earlier attempt was seen before the store went away, so recovery
    /// has its say all the same.
    fn without_store(&self, error: StoreError, taken_over: bool) -> Admission {
        if self.settings.store_outage == StoreOutage::Process && error.kind() == StoreErrorKind::Unavailable {
            tracing::error!(error = %ErrorChain(&error), "the store is away; the effect runs without protection");
            return Admission::Held(Held { claim: None, taken_over });
        }
        Admission::Settled(Outcome::StoreFailed { error })
    }

    /// Runs the effect under the claim, and records what came of it.
    pub(crate) async fn run(
        &self,
        message: &Message,
        prepared: &Prepared<E::Input>,
        held: Held,
        deadline: Deadline,
    ) -> Outcome {
        let effects_end = deadline.earlier(self.settings.answer_reserve);
        let attempt = Attempt::new(&prepared.key, held.attempt().unwrap_or(0), message, effects_end);
        let writes = Writes {
            consumer: self,
            claim: held.claim.clone(),
            end: deadline.earlier(self.settings.answer_reserve / 4),
        };

        if held.taken_over {
            match self.effect.recovery() {
                Recovery::Rerun => {}
                Recovery::Park => {
                    let which = held
                        .attempt()
                        .map_or("an earlier attempt".to_owned(), |n| format!("attempt {}", n.saturating_sub(1)));
                    let reason = format!(
                        "{which} ended without an outcome, and this effect's recovery is `park`: find out whether it \
                         was applied"
                    );
                    return writes.park(reason).await;
                }
                Recovery::Verify => {
                    match guarded(effects_end, || self.effect.verify(&prepared.input, &attempt)).await {
                        Ok(Verification::Done(output)) => {
                            return writes.complete(self.stored(output), |result| Outcome::Recovered { result }).await;
                        }
                        Ok(Verification::NotDone) => {}
                        Ok(Verification::Unknown(reason)) => return writes.park(reason).await,
                        Err(error) => {
                            writes.give_up().await;
                            return Outcome::Unknown {
                                reason: format!("could not verify an earlier attempt: {error}"),
                                retry_after: error.retry_wait(),
                            };
                        }
                    }
                }
            }
        }
        // Verifying takes time too.
        if effects_end.remaining() < self.effect.time_limit().unwrap_or(SHORTEST_TURN) {
            writes.release().await;
            return Outcome::Unstarted { why: Unstarted::Deadline };
        }

        let error = match guarded(effects_end, || self.effect.apply(&prepared.input, &attempt)).await {
            Ok(output) => return writes.complete(self.stored(output), |result| Outcome::Executed { result }).await,
            Err(error) => error,
        };
        let (reason, retry_after) = (error.to_string(), error.retry_wait());
        match error.kind() {
            EffectErrorKind::NotApplied => {
                writes.release().await;
                Outcome::NotApplied { reason, retry_after }
            }
            EffectErrorKind::Permanent if attempt.number() > 1 => {
                writes.release().await;
                Outcome::Permanent {
                    reason: format!("{reason} (an earlier attempt under this key ended without an outcome)"),
                }
            }
            EffectErrorKind::Permanent => {
                writes.release().await;
                Outcome::Permanent { reason }
            }
            EffectErrorKind::Unknown => {
                // A request may still be on its way. Who reruns or parks needn't wait for it;
                // "not done" from a verification now would be true for a moment only, so then
                // the lease runs its course.
                if self.effect.recovery() != Recovery::Verify {
                    writes.give_up().await;
                }
                Outcome::Unknown { reason, retry_after }
            }
        }
    }

    /// Gives back a claim that was taken ahead and whose effect was not begun.
    pub(crate) async fn release(&self, held: Held, deadline: Deadline) {
        let end = deadline.earlier(self.settings.answer_reserve / 4);
        Writes { consumer: self, claim: held.claim, end }.release().await;
    }

    fn stored(&self, output: E::Output) -> StoredResult {
        let limit = self.store.max_result_bytes();
        let json = catch(|| serde_json::to_string(&output));
        if let Err(panic) = catch(|| drop(output)) {
            tracing::error!(panic, "dropping the effect's output panicked");
        }
        let description = match json {
            Ok(Ok(json)) if json.len() <= limit => return StoredResult::whole(json),
            Ok(Ok(json)) => describe(&json),
            Ok(Err(error)) => serde_json::json!({ "unserializable": error.to_string() }),
            Err(panic) => serde_json::json!({ "unserializable": panic }),
        };
        tracing::warn!(%description, limit, "the result can't be stored whole; duplicates will get this description");
        StoredResult::reduced(description.to_string())
    }
}

/// What stands for an answer that did not come before the deadline.
fn no_answer<T>() -> Result<T, StoreError> {
    Err(StoreError::new(StoreErrorKind::Unavailable, "the store did not answer before the deadline"))
}

/// What is kept of a result that does not fit.
fn describe(json: &str) -> serde_json::Value {
    serde_json::json!({ "bytes": json.len(), "sha256": sha256_hex(json) })
}

/// The writes that a claim's holder makes at the end of its turn.
struct Writes<'a, E> {
    consumer: &'a Consumer<E>,
    claim: Option<Claim>,
    end: Deadline,
}

impl<E: Effect> Writes<'_, E> {
    /// Stores the result. Tries again while there is time: the effect has been applied,
    /// and a result that is not stored leaves its outcome to recovery.
    async fn complete(self, result: StoredResult, outcome: impl FnOnce(StoredResult) -> Outcome) -> Outcome {
        let Self { consumer, claim, end } = self;
        let Some(claim) = claim else { return Outcome::Unprotected { result } };
        let completed_at = consumer.clock.now();
        // Made once: a repeated try must be recognised as the same write.
        let mut completion =
            Completion { result, completed_at, expires: consumer.settings.retention.expiry(completed_at) };
        let mut pause = FIRST_PAUSE;
        let mut error = StoreError::new(StoreErrorKind::Unavailable, "no time was left to store the result");
        loop {
            match end.limit(consumer.store.complete(&claim, &completion)).await {
                Some(Ok(FencedOutcome::Applied)) => return outcome(completion.result),
                Some(Ok(FencedOutcome::Fenced)) => return Outcome::Fenced,
                // Whatever it dislikes, a description is small and plain.
                Some(Err(refusal)) if refusal.kind() == StoreErrorKind::Invalid && !completion.result.reduced => {
                    tracing::warn!(error = %ErrorChain(&refusal), "the store refused the result; storing a description");
                    completion.result = StoredResult::reduced(describe(&completion.result.json).to_string());
                    error = refusal;
                }
                // A refusal may pass as well: credentials that are being renewed.
                Some(Err(away)) if away.kind() != StoreErrorKind::Invalid && end.remaining() > pause => {
                    error = away;
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Some(Err(last)) => return Outcome::NotRecorded { error: last },
                None => return Outcome::NotRecorded { error },
            }
        }
    }

    async fn park(self, reason: String) -> Outcome {
        let reason: String = reason.chars().take(MAX_REASON_CHARS).collect();
        let Some(claim) = self.claim else { return Outcome::Parked { reason } };
        // A person ends this, not time: the message may lie in a dead-letter queue for weeks.
        let parking = Parking { reason, expires: EpochSeconds::FAR_FUTURE };
        match self.end.limit(self.consumer.store.park(&claim, &parking)).await {
            Some(Ok(FencedOutcome::Applied)) => Outcome::Parked { reason: parking.reason },
            Some(Ok(FencedOutcome::Fenced)) => Outcome::Fenced,
            // The claim's lease ends by itself; the next attempt parks.
            Some(Err(error)) => Outcome::StoreFailed { error },
            None => Outcome::Unstarted { why: Unstarted::Deadline },
        }
    }

    /// Ends the lease now and keeps the record: the next attempt goes through recovery.
    async fn give_up(self) {
        let Some(claim) = self.claim else { return };
        let answer = self.end.limit(self.consumer.store.set_lease(&claim, Lease::GIVEN_UP)).await;
        warn_unless_applied(answer, &claim, "giving up the lease");
    }

    async fn release(self) {
        let Some(claim) = self.claim else { return };
        let answer = self.end.limit(self.consumer.store.release(&claim)).await;
        warn_unless_applied(answer, &claim, "giving back the claim");
    }
}

/// A claim that can't be given back only costs time: nobody can take the key over before
/// its lease ends.
fn warn_unless_applied(answer: Option<Result<FencedOutcome, StoreError>>, claim: &Claim, doing: &str) {
    let why = match answer {
        Some(Ok(FencedOutcome::Applied)) => return,
        Some(Ok(FencedOutcome::Fenced)) => "another consumer took over".to_owned(),
        Some(Err(error)) => ErrorChain(&error).to_string(),
        None => "no time was left".to_owned(),
    };
    tracing::warn!(
        key = claim.id.as_str(),
        attempt = claim.attempt,
        doing,
        why,
        "the key stays claimed until its lease ends"
    );
}

/// Runs a piece of user code: its panic and its overrun are failures with an unknown
/// outcome. The call itself and the destructor of what was cut off are within the net too.
async fn guarded<T, F>(end: Deadline, work: impl FnOnce() -> F) -> Result<T, EffectError>
where
    F: Future<Output = Result<T, EffectError>>,
{
    match AssertUnwindSafe(async { end.limit(work()).await }).catch_unwind().await {
        Ok(Some(result)) => result,
        Ok(None) => Err(EffectError::unknown("the effect did not end in time and was cancelled")),
        Err(panic) => Err(EffectError::unknown(format!("the effect panicked: {}", panic_text(&*panic)))),
    }
}

fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panic_text(&*panic))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(no message)".to_owned())
}
