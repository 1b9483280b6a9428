//! Waiting for conditions, never for a length of time.
#![allow(clippy::panic)]

use std::time::Duration;

use idempotent_consumer::time::{Clock, EpochMillis, SystemClock};

/// How long anything may take before a test gives up on it: far longer than it takes on a
/// slow and busy machine.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// The future's output, or a failure that names what was waited for.
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("waited {PATIENCE:?} in vain for {what}"))
}

/// Waits until `found` is `Some`.
pub async fn eventually<T>(what: &str, mut found: impl AsyncFnMut() -> Option<T>) -> T {
    soon(what, async {
        loop {
            if let Some(found) = found().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
}

/// Waits until `holds`.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(what, async || holds().then_some(())).await;
}

/// Waits until the wall clock shows more than `point`.
pub async fn until_after(point: EpochMillis) {
    loop {
        let now = SystemClock.now();
        if now > point {
            return;
        }
        tokio::time::sleep(point.since(now) + Duration::from_millis(1)).await;
    }
}
