//! A natural effect: "the address of customer 7 is ...". Applied any number of times it
//! leaves the same address, so nothing is claimed and no result is stored.
//!
//! What it sets carries a version, and an older one changes nothing: a message that is
//! delivered again must not set back what a later one has set.
//!
//! Beside what every function needs it reads `ADDRESS_TABLE_NAME`: a table with the string
//! partition key `customer`. Its role needs `dynamodb:PutItem` on it.

use std::process::ExitCode;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::operation::put_item::PutItemError;
use aws_sdk_dynamodb::types::AttributeValue;
use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery};
use idempotent_consumer::store::dynamodb::DynamoDbStore;
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Change {
    customer: String,
    address: String,
    version: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Set,
    Outdated,
}

struct SetAddress {
    client: Client,
    table: String,
}

impl Effect for SetAddress {
    type Input = Change;
    type Output = Answer;

    fn is_natural(&self) -> bool {
        true
    }

    // Never asked for: a natural effect is simply applied again.
    fn recovery(&self) -> Recovery {
        Recovery::Rerun
    }

    async fn apply(&self, change: &Change, _: &Attempt<'_>) -> Result<Answer, EffectError> {
        let put = self
            .client
            .put_item()
            .table_name(&self.table)
            .item("customer", AttributeValue::S(change.customer.clone()))
            .item("address", AttributeValue::S(change.address.clone()))
            .item("version", AttributeValue::N(change.version.to_string()))
            .condition_expression("attribute_not_exists(version) OR version <= :version")
            .expression_attribute_values(":version", AttributeValue::N(change.version.to_string()));
        match put.send().await {
            Ok(_) => Ok(Answer::Set),
            Err(error) => match error.as_service_error() {
                Some(PutItemError::ConditionalCheckFailedException(_)) => Ok(Answer::Outdated),
                _ => Err(error.into()),
            },
        }
    }
}

fn main() -> ExitCode {
    idempotent_consumer::block_on(async {
        let client = DynamoDbStore::client_from_env().await;
        idempotent_consumer::run_with(|env| {
            let table = env.required("ADDRESS_TABLE_NAME", "the table that holds the addresses")?;
            Some(SetAddress { client, table })
        })
        .await
    })
}
