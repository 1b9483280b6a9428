//! Record and effect in one transaction: nothing is ever in progress.

use std::sync::Arc;
use std::time::Duration;

use super::user_code::{catch, guarded, stored};
use super::{Consume, ConsumerSettings, Prepared};
use crate::effect::transactional::{Refused, Transaction, TransactionalEffect};
use crate::effect::{Attempt, EffectErrorKind};
use crate::error::ErrorChain;
use crate::key::Key;
use crate::message::Message;
use crate::outcome::{Outcome, Unstarted};
use crate::record::{ClaimRequest, Owner, Record, RecordId, State, StoredResult};
use crate::store::dynamodb::{CommitOutcome, DynamoDbStore};
use crate::store::{Store, StoreError, StoreErrorKind};
use crate::time::{Clock, Deadline, SystemClock};

/// Pauses between tries of a transaction that met another, doubling, each with up to as
/// much again at random: two that met should not meet again.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Takes messages whose effects are writes to DynamoDB through their protocol.
#[derive(Debug)]
pub struct TransactionalConsumer<E> {
    effect: E,
    store: DynamoDbStore,
    clock: Arc<dyn Clock>,
    settings: ConsumerSettings,
}

impl<E: TransactionalEffect> TransactionalConsumer<E> {
    /// A consumer that commits through `store` and reads the machine's clock.
    pub fn new(effect: E, store: DynamoDbStore, settings: ConsumerSettings) -> Self {
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

    /// A finished record with that result, and the request that would claim its key.
    fn finished(
        &self,
        message: &Message,
        key: &Key,
        prepared: &Prepared<E::Input>,
        result: StoredResult,
    ) -> (Record, ClaimRequest) {
        let now = self.clock.now();
        let request = ClaimRequest {
            id: RecordId::new(key.id()),
            owner: Owner::random(),
            lease: None,
            expires: self.settings.retention.expiry(now),
            fingerprint: prepared.fingerprint.clone(),
            message_id: message.id.clone(),
            now,
        };
        let state = State::Completed { result, completed_at: Some(now) };
        (Record { state, ..request.to_record(1) }, request)
    }

    /// Commits, again and again while others are in the way and there is time.
    async fn commit(
        &self,
        record: &Record,
        request: &ClaimRequest,
        transaction: &[aws_sdk_dynamodb::types::TransactWriteItem],
        end: Deadline,
    ) -> Result<CommitOutcome, StoreError> {
        let mut pause = FIRST_PAUSE;
        let mut last = Err(StoreError::new(StoreErrorKind::Unavailable, "no time was left to commit"));
        loop {
            let Some(answer) = end.limit(self.store.commit(record, request, transaction.to_vec())).await else {
                return last;
            };
            match &answer {
                Ok(CommitOutcome::Busy(_)) => {}
                Err(error) if error.kind() == StoreErrorKind::Unavailable => {}
                _ => return answer,
            }
            let wait = pause + jitter(pause);
            if end.remaining() <= wait {
                return answer;
            }
            last = answer;
            tokio::time::sleep(wait).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// What a record that stands in the way means. No transaction leaves a claim behind, so
    /// a claim was made by another kind of effect under the same scope; it is left alone.
    fn settle(&self, record: &Record, request: &ClaimRequest) -> Outcome {
        Outcome::of_record(record, request, self.settings.clock_skew)
            .unwrap_or(Outcome::InFlight { until: record.expires.to_millis() })
    }
}

/// A random part of `pause`.
fn jitter(pause: Duration) -> Duration {
    // A token's randomness is good enough, and there already.
    let random =
        Owner::random().as_str().bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    pause.mul_f64(f64::from(random % 1000) / 1000.0)
}

impl<E: TransactionalEffect> Consume for TransactionalConsumer<E> {
    type Prepared = Prepared<E::Input>;
    /// There is nothing to hold: the commit decides.
    type Held = ();

    fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    fn time_needed(&self) -> Duration {
        self.settings.answer_reserve
    }

    fn key_attributes(&self) -> Vec<&str> {
        self.settings.key.attributes().collect()
    }

    fn claims_ahead(&self) -> bool {
        false
    }

    fn prepare(&self, message: &Message) -> Result<(Key, Self::Prepared), Outcome> {
        self.settings.read(message, |message| self.effect.input(message))
    }

    async fn admit(&self, _: &Message, _: &Key, _: &Self::Prepared, _: Deadline) -> Result<(), Outcome> {
        Ok(())
    }

    async fn run(
        &self,
        message: &Message,
        key: &Key,
        prepared: &Self::Prepared,
        (): (),
        deadline: Deadline,
    ) -> Outcome {
        let end = deadline.earlier(self.settings.answer_reserve);
        let attempt = Attempt::new(key, 1, message, end);
        // Until the commit nothing has happened, whatever the error.
        let planned = guarded(end, || self.effect.transaction(&prepared.input, &attempt)).await;
        let Transaction { writes, output } = match planned {
            Ok(transaction) => transaction,
            Err(error) if error.kind() == EffectErrorKind::Permanent => {
                return Outcome::Permanent { reason: error.to_string() };
            }
            Err(error) => {
                return Outcome::NotApplied { reason: error.to_string(), retry_after: error.retry_wait() };
            }
        };
        if let Err(error) = DynamoDbStore::check_writes(&writes) {
            return Outcome::Permanent { reason: error.to_string() };
        }
        if end.remaining().is_zero() {
            return Outcome::Unstarted { why: Unstarted::Deadline };
        }

        let holds = |json: &str| self.store.holds(json);
        let (record, request) = self.finished(message, key, prepared, stored(output, holds));
        let refusals = match self.commit(&record, &request, &writes, end).await {
            Ok(CommitOutcome::Refused(refusals)) => refusals,
            answer => return self.outcome(answer, &record, &request),
        };
        let refused = catch(|| self.effect.refused(&prepared.input, &refusals))
            .unwrap_or_else(|panic| Refused::Retry(format!("the effect panicked: {panic}").into()));
        match refused {
            Refused::Permanent(error) => Outcome::Permanent { reason: ErrorChain(&*error).to_string() },
            Refused::Retry(error) => Outcome::NotApplied { reason: ErrorChain(&*error).to_string(), retry_after: None },
            Refused::Answer(answer) => {
                let (record, request) = self.finished(message, key, prepared, stored(answer, holds));
                let committed = self.commit(&record, &request, &[], end).await;
                self.outcome(committed, &record, &request)
            }
        }
    }

    /// The store is where the effect is.
    fn unprotected(&self) -> Option<()> {
        None
    }

    async fn release(&self, (): (), _: Deadline) {}

    fn attempt((): &()) -> Option<u64> {
        None
    }
}

impl<E: TransactionalEffect> TransactionalConsumer<E> {
    fn outcome(&self, answer: Result<CommitOutcome, StoreError>, record: &Record, request: &ClaimRequest) -> Outcome {
        match answer {
            Ok(CommitOutcome::Committed) => match &record.state {
                State::Completed { result, .. } => Outcome::Executed { result: result.clone() },
                _ => Outcome::Fenced,
            },
            Ok(CommitOutcome::Exists(found)) => self.settle(&found, request),
            Ok(CommitOutcome::Busy(why)) => {
                Outcome::NotApplied { reason: format!("other transactions were in the way: {why}"), retry_after: None }
            }
            Ok(CommitOutcome::Refused(_)) => {
                Outcome::NotApplied { reason: "a condition of the record did not hold".to_owned(), retry_after: None }
            }
            // What it can't take as it is it will never take.
            Err(error) if error.kind() == StoreErrorKind::Invalid => {
                Outcome::Permanent { reason: ErrorChain(&error).to_string() }
            }
            // Perhaps it was committed all the same: then the next delivery finds the record.
            Err(error) => Outcome::StoreFailed { error },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_longer_by_a_part_of_themselves_and_not_always_the_same() {
        let pause = Duration::from_secs(1000);
        let jitters: Vec<_> = (0..20).map(|_| jitter(pause)).collect();
        assert!(jitters.iter().all(|jitter| *jitter < pause), "{jitters:?}");
        assert!(jitters.iter().any(|jitter| *jitter != jitters[0]), "{jitters:?}");
    }
}
