//! Fingerprints: hashes that tell a duplicate from a different message under the same key.
//!
//! Equal bodies have equal fingerprints however they are spelled: a JSON body is hashed in
//! its [canonical text](crate::json#the-canonical-text), any other body as it is.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use crate::json::{InvalidPointer, Json, Pointer};

/// The hash of a message's payload, with the algorithm in front: `sha256:<64 hex digits>`,
/// or `sha256[/amount,/currency]:<64 hex digits>` if only those parts are covered.
///
/// Only fingerprints of one [algorithm](Self::algorithm) may be compared. After a change
/// of the covered parts, old records are "not comparable", not conflicts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// The text that a record keeps.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What stands in front of the hash: `sha256` or `sha256[/amount,/currency]`.
    #[must_use]
    pub fn algorithm(&self) -> &str {
        self.0.rsplit_once(':').map_or("", |(algorithm, _)| algorithm)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a fingerprint covers; the setting `IDEMPOTENCY_FINGERPRINT`.
///
/// ```
/// use idempotent_consumer::fingerprint::Coverage;
/// use idempotent_consumer::json::Json;
///
/// let coverage: Coverage = "/amount, /currency".parse()?;
/// let first = Json::parse(r#"{"amount": 5, "currency": "EUR", "sentAt": 1}"#)?;
/// let again = Json::parse(r#"{"sentAt": 2, "currency": "EUR", "amount": 5.0}"#)?;
/// assert_eq!(coverage.fingerprint("", Some(&first)), coverage.fingerprint("", Some(&again)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Coverage {
    /// The whole body. Written `body`, or nothing.
    #[default]
    Body,
    /// Only these parts of a JSON body. Written as JSON Pointers with commas between them;
    /// `\` takes the next character as it is, so `\,` is a comma in a name.
    ///
    /// A message with none of the parts (no JSON, say) is covered whole, as is every
    /// message if there are no pointers: a choice that picks nothing must not make all
    /// messages equal.
    Parts(Vec<Pointer>),
    /// Nothing: every message under a key counts as the same. Written `off`.
    Off,
}

impl Coverage {
    /// The fingerprint of a body, given also as JSON if it is JSON; `None` if off.
    #[must_use]
    pub fn fingerprint(&self, body: &str, json: Option<&Json>) -> Option<Fingerprint> {
        match self {
            Self::Off => None,
            Self::Parts(pointers) => {
                let hash = json.and_then(|json| parts_hash(pointers, json)).unwrap_or_else(|| content_hash(body, json));
                Some(Fingerprint(format!("sha256[{self}]:{hash}")))
            }
            Self::Body => Some(Fingerprint(format!("sha256:{}", content_hash(body, json)))),
        }
    }
}

impl FromStr for Coverage {
    type Err = InvalidCoverage;

    fn from_str(text: &str) -> Result<Self, InvalidCoverage> {
        match text.trim() {
            "" | "body" => return Ok(Self::Body),
            "off" => return Ok(Self::Off),
            _ => {}
        }
        split_escaped(text, &[','])
            .ok_or(InvalidCoverage::DanglingEscape)?
            .iter()
            .map(|(item, _)| {
                if item.is_empty() {
                    return Err(InvalidCoverage::EmptyPart);
                }
                Pointer::parse(item).map_err(InvalidCoverage::Pointer)
            })
            .collect::<Result<_, _>>()
            .map(Self::Parts)
    }
}

/// The setting's text.
impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Body => f.write_str("body"),
            Self::Off => f.write_str("off"),
            Self::Parts(pointers) => {
                for (index, pointer) in pointers.iter().enumerate() {
                    if index > 0 {
                        f.write_char(',')?;
                    }
                    write_escaped(f, pointer.as_str(), &[','])?;
                }
                Ok(())
            }
        }
    }
}

/// Why a text is no [`Coverage`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidCoverage {
    /// Two commas in a row, or one at an end.
    #[error("a pointer is missing beside a comma: write them as in `/amount,/currency`")]
    EmptyPart,
    /// Neither a word of ours nor a pointer.
    #[error("expected `body`, `off` or JSON Pointers such as `/amount,/currency`")]
    Pointer(#[source] InvalidPointer),
    /// The text ends in a single backslash.
    #[error("`\\` at the end: it must have a character after it, and `\\\\` is a backslash")]
    DanglingEscape,
}

/// SHA-256 of a body in hex; equal for equal JSON values.
///
/// Hashed is `json:` and the canonical text, or `text:` and the body if it isn't JSON.
#[must_use]
pub fn content_hash(body: &str, json: Option<&Json>) -> String {
    match json {
        Some(json) => {
            let mut text = String::from("json:");
            json.write_canonical(&mut text);
            sha256_hex(&text)
        }
        None => sha256_hex(&format!("text:{body}")),
    }
}

/// SHA-256 of `parts:` and the canonical array of the parts. A missing part is the bare
/// word `missing`, which no JSON value is written like. `None` if all are missing.
fn parts_hash(pointers: &[Pointer], json: &Json) -> Option<String> {
    let mut text = String::from("parts:[");
    let mut found = false;
    for (index, pointer) in pointers.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        match json.pointer(pointer) {
            Some(part) => {
                part.write_canonical(&mut text);
                found = true;
            }
            None => text.push_str("missing"),
        }
    }
    text.push(']');
    found.then(|| sha256_hex(&text))
}

pub(crate) fn sha256_hex(text: &str) -> String {
    Sha256::digest(text)
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

/// Splits a setting at its separators; each item comes with the separator after it.
/// `\` takes the next character as it is, and white space around an item doesn't count.
/// `None` if the text ends in a single backslash.
pub(crate) fn split_escaped(text: &str, separators: &[char]) -> Option<Vec<(String, Option<char>)>> {
    let mut items = Vec::new();
    let mut item = String::new();
    // The item's length up to its last character that is no white space.
    let mut end = 0;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if separators.contains(&c) {
            item.truncate(end);
            items.push((std::mem::take(&mut item), Some(c)));
            end = 0;
        } else if !c.is_whitespace() {
            item.push(if c == '\\' { chars.next()? } else { c });
            end = item.len();
        } else if end > 0 {
            item.push(c);
        }
    }
    item.truncate(end);
    items.push((item, None));
    Some(items)
}

/// Writes an item so that [`split_escaped`] reads it back.
pub(crate) fn write_escaped(f: &mut fmt::Formatter<'_>, item: &str, separators: &[char]) -> fmt::Result {
    for c in item.chars() {
        if c == '\\' || c.is_whitespace() || separators.contains(&c) {
            f.write_char('\\')?;
        }
        f.write_char(c)?;
    }
    Ok(())
}
