//! Effects that are writes to DynamoDB, committed in one transaction with the record
//! (feature `dynamodb`).
//!
//! There is no window between "applied" and "recorded", so there is nothing to recover:
//! exactly once, in one round trip. Use it wherever the effect *is* a change of data in the
//! same account and region: a ledger entry, a stock count, a state of an order.

use aws_sdk_dynamodb::types::TransactWriteItem;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Attempt, EffectError, InvalidInput};
use crate::error::BoxError;
use crate::message::Message;
pub use crate::store::dynamodb::Refusal;

/// An effect that is a list of writes.
///
/// ```
/// use std::collections::HashMap;
///
/// use aws_sdk_dynamodb::types::{AttributeValue, TransactWriteItem, Update};
/// use idempotent_consumer::effect::transactional::{Refusal, Refused, Transaction, TransactionalEffect};
/// use idempotent_consumer::effect::{Attempt, EffectError};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Deserialize)]
/// struct Order { item: String, quantity: u64 }
///
/// #[derive(Serialize)]
/// enum Answer { Reserved, OutOfStock }
///
/// struct Reserve;
///
/// impl TransactionalEffect for Reserve {
///     type Input = Order;
///     type Output = Answer;
///
///     async fn transaction(
///         &self,
///         order: &Order,
///         _: &Attempt<'_>,
///     ) -> Result<Transaction<Answer>, EffectError> {
///         let update = Update::builder()
///             .table_name("stock")
///             .key("item", AttributeValue::S(order.item.clone()))
///             .update_expression("SET quantity = quantity - :n")
///             .condition_expression("quantity >= :n")
///             .expression_attribute_values(":n", AttributeValue::N(order.quantity.to_string()))
///             .build()?;
///         Ok(Transaction::new(Answer::Reserved).write(TransactWriteItem::builder().update(update).build()))
///     }
///
///     // The only condition is that there is enough.
///     fn refused(&self, _: &Order, _: &[Refusal]) -> Refused<Answer> {
///         Refused::Answer(Answer::OutOfStock)
///     }
/// }
/// ```
pub trait TransactionalEffect: Send + Sync + 'static {
    /// What the message body holds.
    type Input: DeserializeOwned + Send + Sync;
    /// The result that is stored with the writes, and replayed to every duplicate.
    type Output: Serialize + Send;

    /// The writes and the result. Nothing may happen here but reading and thinking: the
    /// writes are the effect, and until they are committed every error means *not applied*
    /// ([`EffectError::permanent`] apart).
    fn transaction(
        &self,
        input: &Self::Input,
        attempt: &Attempt<'_>,
    ) -> impl Future<Output = Result<Transaction<Self::Output>, EffectError>> + Send;

    /// Says what it means that conditions of the writes did not hold. Nothing was written.
    fn refused(&self, input: &Self::Input, refusals: &[Refusal]) -> Refused<Self::Output>;

    /// Reads the input from the message: by default its body as JSON. An error rejects the
    /// message.
    fn input(&self, message: &Message) -> Result<Self::Input, BoxError> {
        serde_json::from_str(&message.body).map_err(|error| InvalidInput::from(&error).into())
    }
}

/// Writes that are committed together with the record, and the result it keeps.
#[derive(Debug, Clone)]
#[must_use]
pub struct Transaction<T> {
    pub(crate) writes: Vec<TransactWriteItem>,
    pub(crate) output: T,
}

impl<T> Transaction<T> {
    /// DynamoDB takes 100 writes in one transaction, and one is the record.
    pub const MAX_WRITES: usize = 99;

    /// A transaction with that result, and no writes yet.
    pub fn new(output: T) -> Self {
        Self { writes: Vec::new(), output }
    }

    /// The same transaction with one more write, at most [`MAX_WRITES`](Self::MAX_WRITES)
    /// in all and to different items.
    pub fn write(mut self, write: TransactWriteItem) -> Self {
        self.writes.push(write);
        self
    }
}

/// What a refused transaction means.
#[derive(Debug)]
pub enum Refused<T> {
    /// A business answer ("out of stock"): stored as the result, and replayed to every
    /// duplicate.
    Answer(T),
    /// The message can never be processed; a person must mend it.
    Permanent(BoxError),
    /// Not now: the message is retried, with a new transaction.
    Retry(BoxError),
}
