//! Results as attributes: JSON text, or zstd of it where the text is over the item limit.

use std::collections::BTreeMap;
use std::io::Read;

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::store::{StoreError, StoreErrorKind};

/// DynamoDB's item limit is 400 KiB, names and all other attributes included; those stay
/// well under the 8 KiB left for them.
const MAX_BYTES: usize = 392 * 1024;

/// Nothing longer than this is compressed, or decompressed: a result is an answer, not an
/// archive, and a record may have been written by anybody.
const MAX_TEXT_BYTES: usize = 16 * 1024 * 1024;

/// No decoder needs to look back over more than the longest text. What asks for more is not
/// ours, and would be given the memory before its first byte.
const MAX_WINDOW_LOG: u32 = MAX_TEXT_BYTES.ilog2();

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
        AttributeValue::S(text) if is_json(text) => Ok(text.clone()),
        AttributeValue::B(compressed) => decompress(compressed.as_ref()),
        other => {
            let mut json = String::new();
            write_json(&mut json, other);
            Ok(json)
        }
    }
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

fn decompress(compressed: &[u8]) -> Result<String, StoreError> {
    let unreadable =
        || StoreError::new(StoreErrorKind::Unreadable, "the record's `data` is binary, and not a result of ours");
    let mut text = String::new();
    let limit = MAX_TEXT_BYTES as u64 + 1;
    zstd::stream::read::Decoder::new(compressed)
        .and_then(|mut decoder| {
            decoder.window_log_max(MAX_WINDOW_LOG)?;
            decoder.take(limit).read_to_string(&mut text)
        })
        .map_err(|error| unreadable().with_source(error))?;
    if text.len() > MAX_TEXT_BYTES || !is_json(&text) {
        return Err(unreadable());
    }
    Ok(text)
}

/// A native value as JSON text: numbers with all their digits, members in the order of their
/// names, so that every replay has the same text.
fn write_json(out: &mut String, value: &AttributeValue) {
    match value {
        // Every number of DynamoDB's is one of JSON's.
        AttributeValue::N(text) if is_json(text) => out.push_str(text),
        AttributeValue::S(text) | AttributeValue::N(text) => write_string(out, text),
        AttributeValue::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        AttributeValue::L(values) => write_list(out, '[', ']', values, write_json),
        AttributeValue::M(members) => {
            write_list(out, '{', '}', members.iter().collect::<BTreeMap<_, _>>(), |out, (name, value)| {
                write_string(out, name);
                out.push(':');
                write_json(out, value);
            });
        }
        AttributeValue::Ss(values) | AttributeValue::Ns(values) => {
            write_list(out, '[', ']', values, |out, text| write_string(out, text));
        }
        _ => out.push_str("null"),
    }
}

fn write_list<T>(
    out: &mut String,
    open: char,
    close: char,
    values: impl IntoIterator<Item = T>,
    write: impl Fn(&mut String, T),
) {
    out.push(open);
    for (index, value) in values.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        write(out, value);
    }
    out.push(close);
}

fn write_string(out: &mut String, text: &str) {
    out.push_str(&Value::from(text).to_string());
}
