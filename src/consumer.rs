//! One message through the protocol.
//!
//! There is a protocol for each kind of effect, and a consumer for each protocol:
//! [`Consumer`] claims a key, applies an [`Effect`](crate::effect::Effect) and stores its
//! result. What a [`Batch`](crate::batch::Batch) needs of either is [`Consume`].

mod claimed;
#[cfg(feature = "dynamodb")]
mod transactional;
mod user_code;

use std::time::Duration;

pub use self::claimed::{Consumer, Held};
#[cfg(feature = "dynamodb")]
pub use self::transactional::TransactionalConsumer;
use crate::error::{BoxError, ErrorChain};
use crate::fingerprint::Coverage;
use crate::json::Json;
use crate::key::{Key, KeyExpression, Scope};
use crate::message::Message;
use crate::outcome::{Outcome, Report};
use crate::time::{Clock, Deadline, Retention};

/// What a [`Batch`](crate::batch::Batch) asks of a protocol: to take one message through
/// it, in steps that can be told apart.
pub trait Consume: Send + Sync + 'static {
    /// What was read from a message before anything is done.
    type Prepared: Send + Sync;
    /// The right to go on with a message.
    type Held: Send;

    /// The clock it goes by.
    fn clock(&self) -> &dyn Clock;

    /// The least time in which a message can be begun and ended.
    fn time_needed(&self) -> Duration;

    /// The message attributes that keys are made of: what a message needs to have its key
    /// again after it came back from the dead-letter queue.
    fn key_attributes(&self) -> Vec<&str>;

    /// Whether the next message of a group may be [admitted](Self::admit) while the one
    /// before it [runs](Self::run).
    fn claims_ahead(&self) -> bool;

    /// Reads a message. The key is computed here, once: nothing that happens later changes
    /// which record is meant.
    fn prepare(&self, message: &Message) -> Result<(Key, Self::Prepared), Outcome>;

    /// Asks for the right to go on; `Err` settles the message without it.
    fn admit(
        &self,
        message: &Message,
        key: &Key,
        prepared: &Self::Prepared,
        deadline: Deadline,
    ) -> impl Future<Output = Result<Self::Held, Outcome>> + Send;

    /// Applies the effect, and records what came of it.
    fn run(
        &self,
        message: &Message,
        key: &Key,
        prepared: &Self::Prepared,
        held: Self::Held,
        deadline: Deadline,
    ) -> impl Future<Output = Outcome> + Send;

    /// The right to go on although the store is away, if that is allowed.
    fn unprotected(&self) -> Option<Self::Held>;

    /// Gives back a right that is not used.
    fn release(&self, held: Self::Held, deadline: Deadline) -> impl Future<Output = ()> + Send;

    /// Which claim of the key is held, counted from 1, if one is.
    fn attempt(held: &Self::Held) -> Option<u64>;

    /// Takes one message through the protocol, to be over by `deadline`. Messages that
    /// must keep an order, or may share a key, go through a
    /// [`Batch`](crate::batch::Batch) instead.
    fn process(&self, message: &Message, deadline: Deadline) -> impl Future<Output = Report> + Send {
        async move {
            let (key, prepared) = match self.prepare(message) {
                Ok(prepared) => prepared,
                Err(outcome) => return Report::new(message, None, None, outcome),
            };
            match self.admit(message, &key, &prepared, deadline).await {
                Err(outcome) => Report::new(message, Some(key), None, outcome),
                Ok(held) => {
                    let attempt = Self::attempt(&held);
                    let outcome = self.run(message, &key, &prepared, held, deadline).await;
                    Report::new(message, Some(key), attempt, outcome)
                }
            }
        }
    }
}

/// Key, fingerprint and input of a message.
pub struct Prepared<I> {
    fingerprint: Option<String>,
    input: I,
}

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

impl ConsumerSettings {
    /// Reads key, fingerprint and input of a message; `input` is the effect's own reading.
    fn read<I>(
        &self,
        message: &Message,
        input: impl FnOnce(&Message) -> Result<I, BoxError>,
    ) -> Result<(Key, Prepared<I>), Outcome> {
        let rejected =
            |error: &(dyn std::error::Error + 'static)| Outcome::Rejected { reason: ErrorChain(error).to_string() };
        if let Some(outcome) = Outcome::of_source(message) {
            return Err(outcome);
        }
        let body = Json::parse(&message.body);
        let value = self.key.extract(message, body.as_ref()).map_err(|error| rejected(&error))?;
        let input = user_code::catch(|| input(message))
            .unwrap_or_else(|panic| Err(format!("reading the input panicked: {panic}").into()))
            .map_err(|error| rejected(&*error))?;
        let fingerprint = self.fingerprint.fingerprint(&message.body, body.as_ref().ok());
        let fingerprint = fingerprint.map(|fingerprint| fingerprint.as_str().to_owned());
        Ok((Key::new(&self.scope, &value), Prepared { fingerprint, input }))
    }
}
