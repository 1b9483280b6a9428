//! Runs what users wrote (effects, serializers, destructors): their panics and overruns
//! are failures of one message.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use serde::Serialize;

use crate::effect::EffectError;
use crate::fingerprint::sha256_hex;
use crate::record::StoredResult;
use crate::time::Deadline;

/// Runs a piece of user code: its panic and its overrun are failures with an unknown
/// outcome. The call itself and the destructor of what was cut off are within the net too.
pub(super) async fn guarded<T, F>(end: Deadline, work: impl FnOnce() -> F) -> Result<T, EffectError>
where
    F: Future<Output = Result<T, EffectError>>,
{
    match AssertUnwindSafe(async { end.limit(work()).await }).catch_unwind().await {
        Ok(Some(result)) => result,
        Ok(None) => Err(EffectError::unknown("the effect did not end in time and was cancelled")),
        Err(panic) => Err(EffectError::unknown(format!("the effect panicked: {}", panic_text(&*panic)))),
    }
}

pub(super) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panic_text(&*panic))
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "(no message)".to_owned())
}

/// An output as its record keeps it: whole if the store `holds` it.
pub(super) fn stored<T: Serialize>(output: T, holds: impl Fn(&str) -> bool) -> StoredResult {
    let json = catch(|| serde_json::to_string(&output));
    if let Err(panic) = catch(|| drop(output)) {
        tracing::error!(panic, "dropping the effect's output panicked");
    }
    let description = match json {
        Ok(Ok(json)) if holds(&json) => return StoredResult::whole(json),
        Ok(Ok(json)) => describe(&json),
        Ok(Err(error)) => serde_json::json!({ "unserializable": error.to_string() }),
        Err(panic) => serde_json::json!({ "unserializable": panic }),
    };
    tracing::warn!(%description, "the result can't be stored whole; duplicates will get this description");
    StoredResult::reduced(description.to_string())
}

/// What is kept of a result that does not fit.
pub(super) fn describe(json: &str) -> serde_json::Value {
    serde_json::json!({ "bytes": json.len(), "sha256": sha256_hex(json) })
}
