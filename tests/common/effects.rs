//! An effect whose behaviour a test writes, and what surrounds it.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotent_consumer::consumer::{Consumer, ConsumerSettings};
use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery, Verification};
use idempotent_consumer::key::Scope;
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Outcome, Report};
use idempotent_consumer::record::{Record, RecordId};
use idempotent_consumer::store::BoxFuture;
use idempotent_consumer::store::Store;
use idempotent_consumer::time::{EpochMillis, ManualClock, Retention};
use serde_json::{Value, json};

pub const SCOPE: &str = "test";
pub const START: EpochMillis = EpochMillis::new(1_900_000_000_000);

/// One application or verification as the effect saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub key: String,
    pub attempt: u64,
    pub message_id: String,
}

type Applied = Result<Value, EffectError>;
type Verified = Result<Verification<Value>, EffectError>;

/// An effect that does what the test says.
pub struct Scripted {
    recovery: Recovery,
    natural: bool,
    limit: Option<Duration>,
    apply: Box<dyn Fn(Seen) -> BoxFuture<'static, Applied> + Send + Sync>,
    verify: Box<dyn Fn(Seen) -> Verified + Send + Sync>,
    pub applied: Arc<Mutex<Vec<Seen>>>,
    pub verified: Arc<Mutex<Vec<Seen>>>,
}

impl fmt::Debug for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scripted").finish_non_exhaustive()
    }
}

impl Scripted {
    /// Applies at once, and returns a text of key and attempt.
    pub fn new(recovery: Recovery) -> Self {
        Self {
            recovery,
            natural: false,
            limit: None,
            apply: Box::new(|seen| {
                Box::pin(std::future::ready(Ok(json!(format!("{} by attempt {}", seen.key, seen.attempt)))))
            }),
            verify: Box::new(|_| Ok(Verification::NotDone)),
            applied: Arc::default(),
            verified: Arc::default(),
        }
    }

    /// Only sets something.
    pub fn natural(mut self) -> Self {
        self.natural = true;
        self
    }

    /// Sets itself a limit.
    pub fn limited_to(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Applying ends so.
    pub fn applying(mut self, apply: impl Fn(Seen) -> Applied + Send + Sync + 'static) -> Self {
        self.apply = Box::new(move |seen| Box::pin(std::future::ready(apply(seen))));
        self
    }

    /// Applying goes so, and may wait.
    pub fn applying_async<F>(mut self, apply: impl Fn(Seen) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Applied> + Send + 'static,
    {
        self.apply = Box::new(move |seen| Box::pin(apply(seen)));
        self
    }

    /// Verifying ends so.
    pub fn verifying(mut self, verify: impl Fn(Seen) -> Verified + Send + Sync + 'static) -> Self {
        self.verify = Box::new(verify);
        self
    }
}

impl Effect for Scripted {
    type Input = Value;
    type Output = Value;

    fn recovery(&self) -> Recovery {
        self.recovery
    }

    fn is_natural(&self) -> bool {
        self.natural
    }

    fn time_limit(&self) -> Option<Duration> {
        self.limit
    }

    async fn apply(&self, _: &Value, attempt: &Attempt<'_>) -> Applied {
        let seen = seen(attempt);
        self.applied.lock().unwrap().push(seen.clone());
        (self.apply)(seen).await
    }

    async fn verify(&self, _: &Value, attempt: &Attempt<'_>) -> Verified {
        let seen = seen(attempt);
        self.verified.lock().unwrap().push(seen.clone());
        (self.verify)(seen)
    }
}

fn seen(attempt: &Attempt<'_>) -> Seen {
    Seen { key: attempt.key().value().to_owned(), attempt: attempt.number(), message_id: attempt.message().id.clone() }
}

pub fn settings() -> ConsumerSettings {
    ConsumerSettings::new(Scope::new(SCOPE).unwrap(), Retention::from_seconds(3600).unwrap())
}

pub fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(START))
}

pub fn consumer<E: Effect>(effect: E, store: &Arc<impl Store>, clock: &Arc<ManualClock>) -> Consumer<E> {
    let store: Arc<dyn Store> = Arc::clone(store) as Arc<dyn Store>;
    Consumer::new(effect, store, settings()).with_clock(Arc::clone(clock) as Arc<_>)
}

/// The order with that id, in a message of its own.
pub fn order(message_id: &str, order_id: &str) -> Message {
    Message::new(message_id, json!({ "orderId": order_id, "amount": 12 }).to_string())
}

/// What a batch reports of a message that had that outcome.
pub fn report(message: &Message, outcome: Outcome) -> Report {
    Report {
        message_id: message.id.clone(),
        group: message.group.clone(),
        key: None,
        attempt: None,
        outcome,
        dead_lettered: false,
    }
}

pub async fn record(store: &impl Store, key: &str) -> Option<Record> {
    store.load(&RecordId::new(format!("{SCOPE}#{key}"))).await.unwrap()
}

/// How long the tests' deadlines are away.
pub const PATIENCE: Duration = Duration::from_secs(30);
