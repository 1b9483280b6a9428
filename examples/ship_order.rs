//! A whole function: an effect that ships an order, and a `main` of one line.

use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Order {
    order_id: String,
    items: Vec<String>,
}

#[derive(Serialize)]
struct Shipment {
    label: String,
}

struct ShipOrder;

impl Effect for ShipOrder {
    type Input = Order;
    type Output = Shipment;

    // The carrier's interface takes a reference and refuses a second parcel for it.
    fn recovery(&self) -> Recovery {
        Recovery::Rerun
    }

    async fn apply(&self, order: &Order, attempt: &Attempt<'_>) -> Result<Shipment, EffectError> {
        if order.items.is_empty() {
            return Err(EffectError::permanent(format!("order {} has no items", order.order_id)));
        }
        // Here you would call the carrier; `?` on its error means "outcome unknown".
        Ok(Shipment { label: format!("label-for-{}", attempt.key().value()) })
    }
}

fn main() -> std::process::ExitCode {
    idempotent_consumer::block_on(idempotent_consumer::run(ShipOrder))
}
