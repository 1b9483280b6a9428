//! Results as attributes: JSON text, or zstd of it where the text is over the item limit.

use std::io::Read;

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use serde_json::Value;

use crate::store::{StoreError, StoreErrorKind};

/// DynamoDB's item limit is 400 KiB, names and all other attributes included; those stay
/// well under the 8 KiB left for them.
const MAX_BYTES: usize = 392 * 1024;

/// Nothing longer than this is compressed, or decompressed: a result is an answer, not an
/// archive, and a record may have been written by anybody.
const MAX_TEXT_BYTES: usize = 16 * 1024 * 1024;

/// The attribute for a result; `None` if an item can't hold it even compressed.
pub(super) fn to_attribute(json: &str) -> Option<AttributeValue> {
    if json.len() <= MAX_BYTES {
        return Some(AttributeValue::S(json.to_owned()));
    }
    if json.len() > MAX_TEXT_BYTES {
        return None;
    }
    let compressed = zstd::stream::encode_all(json.as_bytes(), zstd::DEFAULT_COMPRESSION_LEVEL).ok()?;
    (compressed.len() <= MAX_BYTES).then(|| AttributeValue::B(Blob::new(compressed)))
}

pub(super) fn too_large(json: &str) -> StoreError {
    let message = format!("a result of {} bytes does not fit into an item, compressed or not", json.len());
    StoreError::new(StoreErrorKind::Invalid, message)
}

/// The result that an attribute holds, as JSON text. Powertools for TypeScript stores a
/// native value.
pub(super) fn from_attribute(value: &AttributeValue) -> Result<String, StoreError> {
    match value {
        AttributeValue::S(text) if serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok() => Ok(text.clone()),
        AttributeValue::B(compressed) => decompress(compressed.as_ref()),
        other => Ok(to_json(other).to_string()),
    }
}

fn decompress(compressed: &[u8]) -> Result<String, StoreError> {
    let unreadable =
        || StoreError::new(StoreErrorKind::Unreadable, "the record's `data` is binary, and not a result of ours");
    let mut text = String::new();
    let limit = MAX_TEXT_BYTES as u64 + 1;
    zstd::stream::read::Decoder::new(compressed)
        .and_then(|decoder| decoder.take(limit).read_to_string(&mut text))
        .map_err(|error| unreadable().with_source(error))?;
    if text.len() > MAX_TEXT_BYTES || serde_json::from_str::<serde::de::IgnoredAny>(&text).is_err() {
        return Err(unreadable());
    }
    Ok(text)
}

fn to_json(value: &AttributeValue) -> Value {
    match value {
        AttributeValue::S(text) => Value::String(text.clone()),
        AttributeValue::N(text) => serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.clone())),
        AttributeValue::Bool(value) => Value::Bool(*value),
        AttributeValue::L(values) => values.iter().map(to_json).collect(),
        AttributeValue::M(members) => members.iter().map(|(name, value)| (name.clone(), to_json(value))).collect(),
        AttributeValue::Ss(values) | AttributeValue::Ns(values) => {
            values.iter().map(|text| Value::String(text.clone())).collect()
        }
        _ => Value::Null,
    }
}
