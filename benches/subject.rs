//! A function with next to no effect, to measure what the protocol itself costs. With
//! `EFFECT_URL` it is the deployed function, so that a checker can count its POSTs.

use std::process::ExitCode;

use idempotent_consumer::effect::http::HttpEffect;
use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Order {
    order_id: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Receipt {
    order_id: String,
    bytes: usize,
}

struct Trivial;

impl Effect for Trivial {
    type Input = Order;
    type Output = Receipt;

    fn recovery(&self) -> Recovery {
        Recovery::Rerun
    }

    async fn apply(&self, order: &Order, attempt: &Attempt<'_>) -> Result<Receipt, EffectError> {
        Ok(Receipt { order_id: order.order_id.clone(), bytes: attempt.message().body.len() })
    }
}

fn main() -> ExitCode {
    idempotent_consumer::block_on(async {
        if std::env::var_os("EFFECT_URL").is_some_and(|url| !url.is_empty()) {
            idempotent_consumer::run_with(HttpEffect::from_env).await
        } else {
            idempotent_consumer::run(Trivial).await
        }
    })
}
