//! The conformance suite on every store.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use idempotent_consumer::store::{Store, conformance, memory::MemoryStore};

#[cfg(feature = "dynamodb")]
use crate::common::{dynamo::Dynamo, proof};

#[tokio::test]
async fn memory() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    conformance::run_all(&store).await;
}

#[cfg(feature = "dynamodb")]
#[tokio::test]
async fn dynamodb() {
    let dynamo = Dynamo::start().await;
    let store: Arc<dyn Store> = Arc::new(dynamo.store());
    conformance::run_all(&store).await;
    proof::note(
        "conformance",
        "2 stores, among it 8 random histories of 100 calls",
        "every store keeps the same rules",
    );
}
