//! Claim, effect, result: the protocol for effects outside of the store.

use std::sync::Arc;
use std::time::Duration;

use super::user_code::{describe, guarded, stored};
use super::{Consume, ConsumerSettings, Prepared, StoreOutage};
use crate::effect::{Attempt, Effect, EffectErrorKind, Recovery, Verification};
use crate::error::ErrorChain;
use crate::key::Key;
use crate::message::Message;
use crate::outcome::{Outcome, Unstarted};
use crate::record::{Claim, ClaimRequest, Completion, Owner, Parking, RecordId, StoredResult};
use crate::store::{ClaimOutcome, FencedOutcome, Store, StoreError, StoreErrorKind};
use crate::time::{Clock, Deadline, EpochSeconds, Lease, SystemClock};

/// A reason kept on a record is for reading; longer ones are cut.
const MAX_REASON_CHARS: usize = 1000;

/// Pauses between tries to store a result, doubling; the store has retries of its own.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(400);

/// An effect that sets itself no limit is not begun with less time than this.
const SHORTEST_TURN: Duration = Duration::from_millis(1);

/// Takes one message at a time through the protocol. Cheap to share behind an `Arc`; it
/// keeps nothing between messages.
#[derive(Debug)]
pub struct Consumer<E> {
    effect: E,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    settings: ConsumerSettings,
}

/// The right to run an effect.
#[derive(Debug)]
pub struct Held {
    /// `None` while the store is away and the effect runs all the same.
    claim: Option<Claim>,
    taken_over: bool,
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

    /// The effect it applies.
    pub fn effect(&self) -> &E {
        &self.effect
    }

    fn request(&self, message: &Message, key: &Key, prepared: &Prepared<E::Input>, deadline: Deadline) -> ClaimRequest {
        let now = self.clock.now();
        let lease = Lease::until(deadline.wall().plus(self.settings.lease_margin));
        // A record must not be forgotten while its claim is held, however short the retention.
        let held_until = lease.end().plus(self.settings.clock_skew).to_seconds();
        ClaimRequest {
            id: RecordId::new(key.id()),
            owner: Owner::random(),
            lease: Some(lease),
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

    /// `taken_over`: an earlier attempt was seen before the store went away, so recovery
    /// has its say all the same.
    fn without_store(&self, error: StoreError, taken_over: bool) -> Result<Held, Outcome> {
        if self.settings.store_outage == StoreOutage::Process && error.kind() == StoreErrorKind::Unavailable {
            tracing::error!(error = %ErrorChain(&error), "the store is away; the effect runs without protection");
            return Ok(Held { claim: None, taken_over });
        }
        Err(Outcome::StoreFailed { error })
    }
}

impl<E: Effect> Consume for Consumer<E> {
    type Prepared = Prepared<E::Input>;
    type Held = Held;

    fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    fn time_needed(&self) -> Duration {
        self.effect.time_limit().unwrap_or_default().saturating_add(self.settings.answer_reserve)
    }

    fn key_attributes(&self) -> Vec<&str> {
        self.settings.key.attributes().collect()
    }

    fn claims_ahead(&self) -> bool {
        // A claim taken ahead by a consumer that dies looks like an attempt without an
        // outcome. Rerun and verify shrug that off; park would trouble a person with it.
        self.effect.recovery() != Recovery::Park
    }

    fn prepare(&self, message: &Message) -> Result<(Key, Self::Prepared), Outcome> {
        self.settings.read(message, |message| self.effect.input(message))
    }

    async fn admit(
        &self,
        message: &Message,
        key: &Key,
        prepared: &Self::Prepared,
        deadline: Deadline,
    ) -> Result<Held, Outcome> {
        if self.effect.is_natural() {
            return Ok(Held { claim: None, taken_over: false });
        }
        let request = self.request(message, key, prepared, deadline);
        let effects_end = deadline.earlier(self.settings.answer_reserve);
        let patience = match self.settings.store_outage {
            StoreOutage::Reject => effects_end,
            // Leave time to go on without the store.
            StoreOutage::Process => effects_end.earlier(effects_end.remaining() / 2),
        };
        let held = |claim, taken_over| Ok(Held { claim: Some(claim), taken_over });

        let seen = match patience.limit(self.store.claim(&request)).await.unwrap_or_else(no_answer) {
            Ok(ClaimOutcome::Won(claim)) => return held(claim, false),
            Ok(ClaimOutcome::Lost(record)) => record,
            Ok(ClaimOutcome::Gone) => return Err(Outcome::InFlight { until: request.now }),
            Err(error) => {
                self.forget_doubtful_claim(&request, &error).await;
                return self.without_store(error, false);
            }
        };
        if let Some(outcome) = Outcome::of_record(&seen, &request, self.settings.clock_skew) {
            return Err(outcome);
        }
        match patience.limit(self.store.take_over(&seen, &request)).await.unwrap_or_else(no_answer) {
            Ok(ClaimOutcome::Won(claim)) => held(claim, true),
            // A rival was faster. If its claim is over already, the next delivery sees to it.
            Ok(ClaimOutcome::Lost(record)) => Err(Outcome::of_record(&record, &request, self.settings.clock_skew)
                .unwrap_or(Outcome::InFlight { until: request.now })),
            Ok(ClaimOutcome::Gone) => Err(Outcome::InFlight { until: request.now }),
            Err(error) => self.without_store(error, true),
        }
    }

    async fn run(
        &self,
        message: &Message,
        key: &Key,
        prepared: &Self::Prepared,
        held: Held,
        deadline: Deadline,
    ) -> Outcome {
        let effects_end = deadline.earlier(self.settings.answer_reserve);
        let attempt = Attempt::new(key, Self::attempt(&held).unwrap_or(0), message, effects_end);
        let writes = Writes {
            consumer: self,
            claim: held.claim.clone(),
            end: deadline.earlier(self.settings.answer_reserve / 4),
        };

        if held.taken_over {
            match self.effect.recovery() {
                Recovery::Rerun => {}
                Recovery::Park => {
                    let which = Self::attempt(&held)
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
                            return writes
                                .complete(stored(output, |json| self.store.holds(json)), |result| Outcome::Recovered {
                                    result,
                                })
                                .await;
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
            Ok(output) => {
                return writes
                    .complete(stored(output, |json| self.store.holds(json)), |result| Outcome::Executed { result })
                    .await;
            }
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

    async fn release(&self, held: Held, deadline: Deadline) {
        let end = deadline.earlier(self.settings.answer_reserve / 4);
        Writes { consumer: self, claim: held.claim, end }.release().await;
    }

    fn unprotected(&self) -> Option<Held> {
        // A natural effect never asks the store, so it can't find it away.
        (self.settings.store_outage == StoreOutage::Process && !self.effect.is_natural())
            .then_some(Held { claim: None, taken_over: false })
    }

    fn attempt(held: &Held) -> Option<u64> {
        held.claim.as_ref().map(|claim| claim.attempt)
    }
}

/// What stands for an answer that did not come before the deadline.
fn no_answer<T>() -> Result<T, StoreError> {
    Err(StoreError::new(StoreErrorKind::Unavailable, "the store did not answer before the deadline"))
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
        let Some(claim) = claim else {
            return if consumer.effect.is_natural() {
                Outcome::Applied { result }
            } else {
                Outcome::Unprotected { result }
            };
        };
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
        let Some(claim) = self.claim else {
            // What is not on record as parked would be applied again after its dead letter is
            // put back.
            let error = format!("the store is away, and without it a message can't be parked: {reason}");
            return Outcome::StoreFailed { error: StoreError::new(StoreErrorKind::Unavailable, error) };
        };
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
