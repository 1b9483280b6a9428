//! The record and a user's writes in one `TransactWriteItems`.

use std::collections::HashMap;

use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;
use aws_sdk_dynamodb::types::{AttributeValue, CancellationReason, Put, TransactWriteItem};

use super::item::{name, number};
use super::{DynamoDbStore, failure, item};
use crate::record::{ClaimRequest, Record};
use crate::store::{StoreError, StoreErrorKind};

/// DynamoDB's limits for one transaction, and for one item in it.
const MAX_ITEMS: usize = 100;
const MAX_TRANSACTION_BYTES: usize = 4 * 1024 * 1024;
const MAX_ITEM_BYTES: usize = 400 * 1024;

/// The answer to a transaction.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum CommitOutcome {
    /// Record and writes stand.
    Committed,
    /// A record stands there already; nothing was written.
    Exists(Box<Record>),
    /// Conditions of the user's writes did not hold; nothing was written.
    Refused(Vec<Refusal>),
    /// Another transaction is at one of the items, or DynamoDB is throttling; nothing was
    /// written, and a later try may go through.
    Busy(String),
}

/// A write whose condition did not hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// Which write, counted from 0 in the order given.
    pub write: usize,
    /// The item that stood there, if the write asked for it with
    /// `ReturnValuesOnConditionCheckFailure::AllOld`.
    pub item: Option<HashMap<String, AttributeValue>>,
}

/// Why a list of writes can't be one transaction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteRefusal {
    /// More writes than a transaction takes.
    #[error("{writes} writes, and with the record's own a transaction takes at most {}", MAX_ITEMS - 1)]
    TooMany {
        /// How many there were.
        writes: usize,
    },
    /// One item is over the size limit.
    #[error("write {write} is about {bytes} bytes, over DynamoDB's limit of {MAX_ITEM_BYTES} for one item")]
    ItemTooLarge {
        /// Which write, counted from 0.
        write: usize,
        /// Its size, by DynamoDB's way of counting.
        bytes: usize,
    },
    /// All items together are over the size limit.
    #[error("the writes are about {bytes} bytes, over DynamoDB's limit of {MAX_TRANSACTION_BYTES} for one transaction")]
    TooLarge {
        /// Their size, by DynamoDB's way of counting.
        bytes: usize,
    },
}

impl DynamoDbStore {
    /// Checks what DynamoDB would refuse the whole transaction for, before it is sent.
    pub fn check_writes(writes: &[TransactWriteItem]) -> Result<(), WriteRefusal> {
        if writes.len() >= MAX_ITEMS {
            return Err(WriteRefusal::TooMany { writes: writes.len() });
        }
        let mut total = 0;
        for (write, item) in writes.iter().enumerate() {
            let bytes = size_of_write(item);
            if bytes > MAX_ITEM_BYTES {
                return Err(WriteRefusal::ItemTooLarge { write, bytes });
            }
            total += bytes;
        }
        // Room for the record, its result at its largest.
        if total > MAX_TRANSACTION_BYTES - MAX_ITEM_BYTES {
            return Err(WriteRefusal::TooLarge { bytes: total });
        }
        Ok(())
    }

    /// Writes `record` if its key is free, and the user's `writes`: all or nothing. Called
    /// again with the same arguments after a lost answer it gives that answer: DynamoDB
    /// keeps the request's token for ten minutes.
    pub async fn commit(
        &self,
        record: &Record,
        request: &ClaimRequest,
        writes: Vec<TransactWriteItem>,
    ) -> Result<CommitOutcome, StoreError> {
        let put = Put::builder()
            .table_name(&self.table)
            .set_item(Some(item::from_record(record)))
            .condition_expression("attribute_not_exists(#id) OR #expiration < :now")
            .expression_attribute_names("#id", name::ID)
            .expression_attribute_names("#expiration", name::EXPIRATION)
            .expression_attribute_values(":now", number(request.now.to_seconds().get()))
            .return_values_on_condition_check_failure(AllOld)
            .build()
            .map_err(|error| StoreError::new(StoreErrorKind::Invalid, "the record is incomplete").with_source(error))?;
        let mut items = Vec::with_capacity(writes.len() + 1);
        items.push(TransactWriteItem::builder().put(put).build());
        items.extend(writes);
        let sent = self
            .client
            .transact_write_items()
            .client_request_token(request.owner.as_str())
            .set_transact_items(Some(items))
            .send()
            .await;
        let Err(error) = sent else { return Ok(CommitOutcome::Committed) };
        match error.as_service_error() {
            Some(TransactWriteItemsError::TransactionCanceledException(cancelled)) => {
                judge(cancelled.cancellation_reasons())
            }
            Some(TransactWriteItemsError::TransactionInProgressException(_)) => {
                Ok(CommitOutcome::Busy("the same transaction is still being committed".to_owned()))
            }
            _ => Err(failure("commit the transaction", error)),
        }
    }
}

/// Reads the reasons one by one: one per write, in order, the record's first.
fn judge(reasons: &[CancellationReason]) -> Result<CommitOutcome, StoreError> {
    const CONDITION: &str = "ConditionalCheckFailed";
    let code = |reason: &CancellationReason| reason.code().unwrap_or("None").to_owned();

    if let Some(first) = reasons.first().filter(|first| first.code() == Some(CONDITION)) {
        let found = first.item().map(item::to_record).transpose()?;
        return match found {
            Some(found) => Ok(CommitOutcome::Exists(Box::new(found))),
            None => Err(StoreError::new(
                StoreErrorKind::Invalid,
                "DynamoDB did not return the record that stands in the way: does the endpoint support \
                 ReturnValuesOnConditionCheckFailure?",
            )),
        };
    }
    let busy = reasons.iter().find(|reason| {
        matches!(
            reason.code(),
            Some("TransactionConflict" | "ProvisionedThroughputExceeded" | "ThrottlingError" | "RequestLimitExceeded")
        )
    });
    if let Some(busy) = busy {
        return Ok(CommitOutcome::Busy(code(busy)));
    }
    // The record's own reason is not among them: counted from 0 they are the user's writes.
    let user = reasons.iter().skip(1).enumerate();
    let other = user.clone().find(|(_, reason)| !matches!(reason.code(), None | Some("None" | CONDITION)));
    if let Some((write, reason)) = other {
        return Err(StoreError::new(
            StoreErrorKind::Invalid,
            format!("DynamoDB refused write {write}: {}: {}", code(reason), reason.message().unwrap_or("no message")),
        ));
    }
    let refusals: Vec<_> = user
        .filter(|(_, reason)| reason.code() == Some(CONDITION))
        .map(|(write, reason)| Refusal { write, item: reason.item().cloned() })
        .collect();
    if refusals.is_empty() {
        return Err(StoreError::new(
            StoreErrorKind::Unavailable,
            "DynamoDB cancelled the transaction and did not say why",
        ));
    }
    Ok(CommitOutcome::Refused(refusals))
}

/// About how large a write is, by DynamoDB's way of counting.
fn size_of_write(write: &TransactWriteItem) -> usize {
    let map = |map: Option<&HashMap<String, AttributeValue>>| map.map_or(0, size_of_map);
    let text = |text: Option<&str>| text.map_or(0, str::len);
    let put = write.put().map_or(0, |put| size_of_map(put.item()) + map(put.expression_attribute_values()));
    let update = write.update().map_or(0, |update| {
        size_of_map(update.key()) + text(Some(update.update_expression())) + map(update.expression_attribute_values())
    });
    let delete =
        write.delete().map_or(0, |delete| size_of_map(delete.key()) + map(delete.expression_attribute_values()));
    let check =
        write.condition_check().map_or(0, |check| size_of_map(check.key()) + map(check.expression_attribute_values()));
    put + update + delete + check
}

fn size_of_map(map: &HashMap<String, AttributeValue>) -> usize {
    map.iter().map(|(name, value)| name.len() + size_of_value(value)).sum()
}

fn size_of_value(value: &AttributeValue) -> usize {
    match value {
        AttributeValue::S(text) | AttributeValue::N(text) => text.len(),
        AttributeValue::B(bytes) => bytes.as_ref().len(),
        AttributeValue::Ss(texts) | AttributeValue::Ns(texts) => texts.iter().map(String::len).sum(),
        AttributeValue::Bs(bytes) => bytes.iter().map(|bytes| bytes.as_ref().len()).sum(),
        AttributeValue::L(values) => 3 + values.iter().map(|value| 1 + size_of_value(value)).sum::<usize>(),
        AttributeValue::M(members) => 3 + members.len() + size_of_map(members),
        _ => 1,
    }
}
