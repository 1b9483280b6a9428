//! Records in an Amazon DynamoDB table.
//!
//! One `PutItem` per first claim, one `UpdateItem` per completion, no read: a refused
//! condition brings the item that stood in the way
//! (`ReturnValuesOnConditionCheckFailure`).
//!
//! The table has one string partition key, `id`, and its TTL on `expiration`. Attribute
//! names follow AWS Powertools, so a table can be shared with Powertools functions:
//!
//! | attribute | type | meaning |
//! | --- | --- | --- |
//! | `id` | S | `scope#key` |
//! | `status` | S | `INPROGRESS`, `COMPLETED`, `PARKED` |
//! | `expiration` | N | when the record is forgotten, epoch seconds |
//! | `in_progress_expiration` | N | end of the lease, epoch milliseconds; 0 = given up |
//! | `data` | S | the result, JSON; B, zstd of it, if it is over the item limit |
//! | `validation` | S | fingerprint, `sha256:...` |
//! | `owner` | S | who holds the claim |
//! | `attempt` | N | how many claims were made: the fencing token |
//! | `message_id` | S | the message of the latest claim |
//! | `claimed_at`, `completed_at` | N | epoch milliseconds |
//! | `data_reduced` | BOOL | the result was too large; `data` only describes it |
//! | `reason` | S | why the record is parked |

mod item;
mod result;
mod transaction;

use std::collections::HashMap;

pub use self::transaction::{CommitOutcome, Refusal, WriteRefusal};
use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::StalledStreamProtectionConfig;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::delete_item::DeleteItemError;
use aws_sdk_dynamodb::operation::put_item::PutItemError;
use aws_sdk_dynamodb::operation::put_item::builders::PutItemFluentBuilder;
use aws_sdk_dynamodb::operation::update_item::UpdateItemError;
use aws_sdk_dynamodb::operation::update_item::builders::UpdateItemFluentBuilder;
use aws_sdk_dynamodb::types::AttributeValue;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;

use self::item::{name, number, status, string};
use super::{BoxFuture, ClaimOutcome, FencedOutcome, Store, StoreError, StoreErrorKind};
use crate::aws;
use crate::record::{self, Claim, ClaimRequest, Completion, Parking, Record, RecordId, State};
use crate::time::Lease;

/// The record that an item of the table holds, whoever wrote it: how every item is read
/// here. For tools that scan a table, and for tests.
///
/// An error is a [`StoreErrorKind::Unreadable`]: no string `id`, or a binary result that is
/// none of ours.
#[allow(clippy::implicit_hasher)] // the SDK's own type
pub fn record_of_item(item: &HashMap<String, AttributeValue>) -> Result<Record, StoreError> {
    item::to_record(item)
}

/// The item that holds a record: how every record is written here.
#[must_use]
pub fn item_of_record(record: &Record) -> HashMap<String, AttributeValue> {
    item::from_record(record)
}

/// The item that [`DynamoDbStore::warm_up`] asks for. No scope is empty, so no key has it.
const WARM_UP_ID: &str = "#warm-up";

/// Records in a DynamoDB table.
#[derive(Debug, Clone)]
pub struct DynamoDbStore {
    client: Client,
    table: String,
}

impl DynamoDbStore {
    /// A store on that table, with a client of your own making. See
    /// [`client_from_env`](Self::client_from_env) for the settings that matter.
    #[must_use]
    pub fn new(client: Client, table: impl Into<String>) -> Self {
        Self { client, table: table.into() }
    }

    /// A client as this store wants it: region, credentials and endpoint from the
    /// environment, tight time-outs, and short back-off between retries.
    pub async fn client_from_env() -> Client {
        let shared = aws::settings_from_env().await;
        Client::from_conf(Self::tune(aws_sdk_dynamodb::config::Builder::from(&shared)).build())
    }

    /// Sets time-outs and retries that end before a function's deadline does.
    #[must_use]
    pub fn tune(config: aws_sdk_dynamodb::config::Builder) -> aws_sdk_dynamodb::config::Builder {
        config
            .timeout_config(aws::timeouts())
            .retry_config(aws::retries())
            // For streams of megabytes; answers here are one small JSON text.
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
    }

    fn put(&self, record: &Record) -> PutItemFluentBuilder {
        self.client
            .put_item()
            .table_name(&self.table)
            .set_item(Some(item::from_record(record)))
            .return_values_on_condition_check_failure(AllOld)
    }

    async fn send_claim(
        put: PutItemFluentBuilder,
        request: &ClaimRequest,
        attempt: u64,
    ) -> Result<ClaimOutcome, StoreError> {
        let Err(refusal) = put.send().await else {
            return Ok(ClaimOutcome::Won(request.to_claim(attempt)));
        };
        let Some(PutItemError::ConditionalCheckFailedException(refused)) = refusal.as_service_error() else {
            return Err(failure("claim the key", refusal));
        };
        let Some(item) = refused.item() else {
            return Ok(ClaimOutcome::Gone);
        };
        let record = item::to_record(item)?;
        if record.owner() == Some(&request.owner) {
            // Our own write, made by a try whose answer was lost.
            return Ok(ClaimOutcome::Won(request.to_claim(record.attempt)));
        }
        Ok(ClaimOutcome::Lost(Box::new(record)))
    }

    /// An update that only the holder of the claim may make.
    fn update(&self, claim: &Claim) -> UpdateItemFluentBuilder {
        self.client
            .update_item()
            .table_name(&self.table)
            .key(name::ID, string(claim.id.as_str()))
            .condition_expression(HELD)
            .expression_attribute_names("#owner", name::OWNER)
            .expression_attribute_names("#attempt", name::ATTEMPT)
            .expression_attribute_names("#status", name::STATUS)
            .expression_attribute_values(":owner", string(claim.owner.as_str()))
            .expression_attribute_values(":attempt", number(claim.attempt))
            .expression_attribute_values(":in_progress", string(status::IN_PROGRESS))
            .return_values_on_condition_check_failure(AllOld)
    }

    /// Sends an update. Refused, it counts as applied all the same if the record found
    /// there is what it wanted to write: the work of a try whose answer was lost.
    async fn send_update(
        update: UpdateItemFluentBuilder,
        doing: &str,
        own_write: impl Fn(&Record) -> bool,
    ) -> Result<FencedOutcome, StoreError> {
        let Err(refusal) = update.send().await else {
            return Ok(FencedOutcome::Applied);
        };
        let Some(UpdateItemError::ConditionalCheckFailedException(refused)) = refusal.as_service_error() else {
            return Err(failure(doing, refusal));
        };
        let found = refused.item().map(item::to_record).transpose()?;
        Ok(if found.is_some_and(|record| own_write(&record)) { FencedOutcome::Applied } else { FencedOutcome::Fenced })
    }
}

/// The fence: `owner = me AND attempt = mine`, on a record in progress. Ours have no owner
/// otherwise, but an operator or other software may have finished one by hand.
const HELD: &str = "#owner = :owner AND #attempt = :attempt AND #status = :in_progress";

impl Store for DynamoDbStore {
    fn claim<'a>(&'a self, request: &'a ClaimRequest) -> BoxFuture<'a, Result<ClaimOutcome, StoreError>> {
        let put = self
            .put(&request.to_record(1))
            .condition_expression("attribute_not_exists(#id) OR #expiration < :now")
            .expression_attribute_names("#id", name::ID)
            .expression_attribute_names("#expiration", name::EXPIRATION)
            .expression_attribute_values(":now", number(request.now.to_seconds().get()));
        Box::pin(Self::send_claim(put, request, 1))
    }

    fn take_over<'a>(
        &'a self,
        seen: &'a Record,
        request: &'a ClaimRequest,
    ) -> BoxFuture<'a, Result<ClaimOutcome, StoreError>> {
        let attempt = seen.attempt.saturating_add(1);
        let (owner, lease) = match &seen.state {
            State::InProgress { owner, lease: Some(lease) } => (owner.as_ref(), *lease),
            // Nothing else is ever lapsed.
            _ => return Box::pin(std::future::ready(Ok(ClaimOutcome::Lost(Box::new(seen.clone()))))),
        };
        let put = self
            .put(&request.to_record(attempt))
            .expression_attribute_names("#status", name::STATUS)
            .expression_attribute_names("#owner", name::OWNER)
            .expression_attribute_names("#lease", name::LEASE)
            .expression_attribute_values(":in_progress", string(status::IN_PROGRESS))
            .expression_attribute_values(":lease", number(lease.end().get()));
        let put = match owner {
            Some(owner) => put
                .condition_expression(
                    "#status = :in_progress AND #lease = :lease AND #owner = :owner AND #attempt = :attempt",
                )
                .expression_attribute_names("#attempt", name::ATTEMPT)
                .expression_attribute_values(":owner", string(owner.as_str()))
                .expression_attribute_values(":attempt", number(seen.attempt)),
            // Written by other software, which knows neither owners nor attempts.
            None => {
                put.condition_expression("#status = :in_progress AND #lease = :lease AND attribute_not_exists(#owner)")
            }
        };
        Box::pin(Self::send_claim(put, request, attempt))
    }

    fn complete<'a>(
        &'a self,
        claim: &'a Claim,
        completion: &'a Completion,
    ) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        let Some(data) = result::to_attribute(&completion.result.json) else {
            return Box::pin(std::future::ready(Err(result::too_large(&completion.result.json))));
        };
        let update = self
            .update(claim)
            .expression_attribute_names("#data", name::DATA)
            .expression_attribute_names("#completed_at", name::COMPLETED_AT)
            .expression_attribute_names("#expiration", name::EXPIRATION)
            .expression_attribute_names("#lease", name::LEASE)
            .expression_attribute_values(":status", string(status::COMPLETED))
            .expression_attribute_values(":data", data)
            .expression_attribute_values(":completed_at", number(completion.completed_at.get()))
            .expression_attribute_values(":expiration", number(completion.expires.get()));
        let update = if completion.result.reduced {
            update
                .update_expression(
                    "SET #status = :status, #data = :data, #completed_at = :completed_at, \
                     #expiration = :expiration, #reduced = :reduced REMOVE #owner, #lease",
                )
                .expression_attribute_names("#reduced", name::DATA_REDUCED)
                .expression_attribute_values(":reduced", AttributeValue::Bool(true))
        } else {
            update.update_expression(
                "SET #status = :status, #data = :data, #completed_at = :completed_at, \
                 #expiration = :expiration REMOVE #owner, #lease",
            )
        };
        Box::pin(Self::send_update(update, "record the result", move |found| {
            record::complete(Some(found), claim, completion).is_some()
        }))
    }

    fn park<'a>(&'a self, claim: &'a Claim, parking: &'a Parking) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        let update = self
            .update(claim)
            .update_expression(
                "SET #status = :status, #reason = :reason, #expiration = :expiration REMOVE #owner, #lease",
            )
            .expression_attribute_names("#reason", name::REASON)
            .expression_attribute_names("#expiration", name::EXPIRATION)
            .expression_attribute_names("#lease", name::LEASE)
            .expression_attribute_values(":status", string(status::PARKED))
            .expression_attribute_values(":reason", string(&parking.reason))
            .expression_attribute_values(":expiration", number(parking.expires.get()));
        Box::pin(Self::send_update(update, "park the key", move |found| {
            record::park(Some(found), claim, parking).is_some()
        }))
    }

    fn set_lease<'a>(&'a self, claim: &'a Claim, lease: Lease) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        let update = self
            .update(claim)
            .update_expression("SET #lease = :lease")
            .expression_attribute_names("#lease", name::LEASE)
            .expression_attribute_values(":lease", number(lease.end().get()));
        // The claim stays held, so a repeated try is simply applied again.
        Box::pin(Self::send_update(update, "change the lease", |_| false))
    }

    fn release<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        if claim.attempt > 1 {
            return self.set_lease(claim, Lease::GIVEN_UP);
        }
        let delete = self
            .client
            .delete_item()
            .table_name(&self.table)
            .key(name::ID, string(claim.id.as_str()))
            .condition_expression(format!("attribute_not_exists(#id) OR ({HELD})"))
            .expression_attribute_names("#id", name::ID)
            .expression_attribute_names("#owner", name::OWNER)
            .expression_attribute_names("#attempt", name::ATTEMPT)
            .expression_attribute_names("#status", name::STATUS)
            .expression_attribute_values(":owner", string(claim.owner.as_str()))
            .expression_attribute_values(":attempt", number(claim.attempt))
            .expression_attribute_values(":in_progress", string(status::IN_PROGRESS));
        Box::pin(async move {
            match delete.send().await {
                Ok(_) => Ok(FencedOutcome::Applied),
                Err(error) => match error.as_service_error() {
                    Some(DeleteItemError::ConditionalCheckFailedException(_)) => Ok(FencedOutcome::Fenced),
                    _ => Err(failure("give the claim back", error)),
                },
            }
        })
    }

    fn load<'a>(&'a self, id: &'a RecordId) -> BoxFuture<'a, Result<Option<Record>, StoreError>> {
        Box::pin(async move {
            let answer = self
                .client
                .get_item()
                .table_name(&self.table)
                .key(name::ID, string(id.as_str()))
                .consistent_read(true)
                .send()
                .await
                .map_err(|error| failure("read the record", error))?;
            answer.item().map(item::to_record).transpose()
        })
    }

    fn warm_up(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.client
                .get_item()
                .table_name(&self.table)
                .key(name::ID, string(WARM_UP_ID))
                .send()
                .await
                .map(drop)
                .map_err(|error| failure(&format!("reach the table `{}`", self.table), error))
        })
    }

    fn holds(&self, result: &str) -> bool {
        result::to_attribute(result).is_some()
    }
}

fn failure<E>(doing: &str, error: SdkError<E>) -> StoreError
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    let code = error.code().map(str::to_owned);
    let kind = match &error {
        SdkError::ConstructionFailure(_) => StoreErrorKind::Refused,
        SdkError::ServiceError(_) if code.as_deref() == Some("ValidationException") => StoreErrorKind::Invalid,
        SdkError::ServiceError(answer) => {
            // Throttling and transaction conflicts come as 400 too.
            let passing = matches!(
                code.as_deref(),
                Some(
                    "ProvisionedThroughputExceededException"
                        | "RequestLimitExceeded"
                        | "ThrottlingException"
                        | "TransactionConflictException"
                        | "TransactionInProgressException"
                        | "ReplicatedWriteConflictException"
                )
            );
            if passing || answer.raw().status().is_server_error() {
                StoreErrorKind::Unavailable
            } else {
                StoreErrorKind::Refused
            }
        }
        _ => StoreErrorKind::Unavailable,
    };
    let advice = match code.as_deref() {
        Some("ResourceNotFoundException") => ": check TABLE_NAME and the region",
        Some("AccessDeniedException") => ": the function's role must allow it",
        _ => "",
    };
    StoreError::new(kind, format!("DynamoDB could not {doing}{advice}")).with_source(error)
}
