//! A stock ledger: an order decrements the stock of an item, and is refused when there is
//! not enough. Stock, refusal and record change in one transaction, so every order counts
//! exactly once, wherever the consumer is killed.
//!
//! Beside what every function needs it reads `STOCK_TABLE_NAME`: a table with the string
//! partition key `item` and a number `quantity`. Its role needs `dynamodb:UpdateItem` on
//! that table too.

use std::process::ExitCode;

use aws_sdk_dynamodb::types::{AttributeValue, TransactWriteItem, Update};
use idempotent_consumer::effect::transactional::{Refusal, Refused, Transaction, TransactionalEffect};
use idempotent_consumer::effect::{Attempt, EffectError};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Order {
    item: String,
    quantity: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Reserved,
    OutOfStock,
}

struct Reserve {
    stock_table: String,
}

impl TransactionalEffect for Reserve {
    type Input = Order;
    type Output = Answer;

    async fn transaction(&self, order: &Order, _: &Attempt<'_>) -> Result<Transaction<Answer>, EffectError> {
        let take = Update::builder()
            .table_name(&self.stock_table)
            .key("item", AttributeValue::S(order.item.clone()))
            .update_expression("SET quantity = quantity - :n")
            .condition_expression("quantity >= :n")
            .expression_attribute_values(":n", AttributeValue::N(order.quantity.to_string()))
            .build()?;
        Ok(Transaction::new(Answer::Reserved).write(TransactWriteItem::builder().update(take).build()))
    }

    // The one condition is that there is enough. "Out of stock" is an answer like any other:
    // stored, and the same for every duplicate, even if the stock is filled up meanwhile.
    fn refused(&self, _: &Order, _: &[Refusal]) -> Refused<Answer> {
        Refused::Answer(Answer::OutOfStock)
    }
}

fn main() -> ExitCode {
    idempotent_consumer::block_on(idempotent_consumer::run_transactional_with(|env| {
        let stock_table = env.required("STOCK_TABLE_NAME", "the table that holds the stock")?;
        Some(Reserve { stock_table })
    }))
}
