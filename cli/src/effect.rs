//! The effect of `invoke`: it hands out receipts and keeps a ledger of them.

use std::sync::{Mutex, PoisonError};

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::types::{AttributeValue, ReturnValue};
use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery, Verification};
use idempotent_consumer::error::BoxError;
use idempotent_consumer::key::Key;
use serde::Serialize;
use serde_json::{Map, Value};

/// Part of `--help`.
pub(crate) const HELP: &str = "\
The effect writes a receipt into a ledger: ORDER-1 the first time it is applied to a key, ORDER-2 the second. \
A receipt that ends in 2 is an order charged twice. A message can make it fail, by a member of its body:
  \"fail\": \"not-applied\"  before anything has happened
  \"fail\": \"permanent\"    it will never take this message
  \"fail\": \"unknown\"      the ledger is written, and the answer is lost
  \"fail\": \"panic\"        the ledger is written, and the effect panics
  \"fail\": \"hang\"         the ledger is written, and the effect never returns
The last three fail the first time only: run the event again to see what --recovery does.
The receipts are not deduplicated, so that `rerun` shows what it does to such an effect; \
`verify` looks the key up in the ledger.";

/// The outside world that the effect changes: how often it was applied to each key.
/// Kept beside the records, so that it outlives the process as they do.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) client: Client,
    pub(crate) table: String,
}

impl Ledger {
    /// Applies the effect: no check, no condition. Returns how often it has been now.
    async fn apply(&self, key: &Key) -> Result<u64, BoxError> {
        let answer = self
            .client
            .update_item()
            .table_name(&self.table)
            .key("id", AttributeValue::S(key.id().to_owned()))
            .update_expression("ADD times :one")
            .expression_attribute_values(":one", AttributeValue::N("1".to_owned()))
            .return_values(ReturnValue::UpdatedNew)
            .send()
            .await?;
        let times = answer.attributes().and_then(|attributes| attributes.get("times"));
        times.and_then(number).ok_or_else(|| "the ledger's answer has no number".into())
    }

    /// How often the effect was applied.
    async fn times(&self, key: &Key) -> Result<Option<u64>, BoxError> {
        let answer = self
            .client
            .get_item()
            .table_name(&self.table)
            .key("id", AttributeValue::S(key.id().to_owned()))
            .consistent_read(true)
            .send()
            .await?;
        Ok(answer.item().and_then(|item| item.get("times")).and_then(number))
    }
}

fn number(value: &AttributeValue) -> Option<u64> {
    value.as_n().ok()?.parse().ok()
}

/// One application of the effect.
#[derive(Debug, Clone)]
pub(crate) struct Application {
    pub(crate) message_id: String,
    pub(crate) key: String,
}

/// What the effect returns.
#[derive(Debug, Serialize)]
pub(crate) struct Receipt {
    receipt: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    amount: Option<Value>,
}

impl Receipt {
    fn new(key: &Key, times: u64, order: &Map<String, Value>) -> Self {
        Self { receipt: format!("{}-{times}", key.value()), amount: order.get("amount").cloned() }
    }
}

#[derive(Debug)]
pub(crate) struct LedgerEffect {
    recovery: Recovery,
    ledger: Ledger,
    applications: Mutex<Vec<Application>>,
}

impl LedgerEffect {
    pub(crate) fn new(ledger: Ledger, recovery: Recovery) -> Self {
        Self { recovery, ledger, applications: Mutex::default() }
    }

    /// What this process has applied.
    pub(crate) fn applications(&self) -> Vec<Application> {
        self.applications.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, attempt: &Attempt<'_>) {
        let application =
            Application { message_id: attempt.message().id.clone(), key: attempt.key().value().to_owned() };
        self.applications.lock().unwrap_or_else(PoisonError::into_inner).push(application);
    }
}

impl Effect for LedgerEffect {
    type Input = Map<String, Value>;
    type Output = Receipt;

    fn recovery(&self) -> Recovery {
        self.recovery
    }

    async fn apply(&self, order: &Self::Input, attempt: &Attempt<'_>) -> Result<Receipt, EffectError> {
        let fail = order.get("fail").and_then(Value::as_str).unwrap_or_default();
        match fail {
            "not-applied" => return Err(EffectError::not_applied(asked_for(fail))),
            "permanent" => return Err(EffectError::permanent(asked_for(fail))),
            _ => {}
        }
        let times = self.ledger.apply(attempt.key()).await?;
        self.note(attempt);
        match fail {
            "unknown" if times == 1 => Err(EffectError::unknown(asked_for(fail))),
            // A panic, without the hook's backtrace.
            "panic" if times == 1 => std::panic::resume_unwind(Box::new(asked_for(fail))),
            "hang" if times == 1 => std::future::pending().await,
            _ => Ok(Receipt::new(attempt.key(), times, order)),
        }
    }

    async fn verify(&self, order: &Self::Input, attempt: &Attempt<'_>) -> Result<Verification<Receipt>, EffectError> {
        Ok(match self.ledger.times(attempt.key()).await? {
            Some(times) => Verification::Done(Receipt::new(attempt.key(), times, order)),
            None => Verification::NotDone,
        })
    }
}

fn asked_for(fail: &str) -> String {
    format!("the message asks for it: \"fail\": \"{fail}\"")
}
