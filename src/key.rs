//! Idempotency keys: which part of a message says what business event it is about.
//!
//! A [`KeyExpression`] names the parts, [`KeyExpression::extract`] reads them from a
//! message, and a [`Key`] is the result under a [`Scope`], as the store knows it.
//!
//! Messages that have nothing to do with each other must never share a record. So a part
//! that is null, empty, incomplete or of the wrong type is an error, not a key.

mod error;
mod expression;
#[cfg(feature = "jmespath")]
mod jmespath;
mod value;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use self::error::{Envelope, KeyError};
pub use self::expression::{InvalidKeyExpression, KeyExpression};
pub use self::value::KeyValue;
use self::value::is_blank;
use crate::fingerprint::sha256_hex;

/// The longest id of a record in bytes: DynamoDB's limit for a partition key.
pub const MAX_ID_BYTES: usize = 2048;

/// The longest scope in bytes, so that an id has room for a readable key.
pub const MAX_SCOPE_BYTES: usize = 256;

/// The first half of every record's id: keeps the keys of one consumer apart from those of
/// the others in the same table. Cheap to clone.
///
/// It must not change while its records matter, not even when a function is renamed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scope(Arc<str>);

impl Scope {
    /// Checks and keeps a scope.
    pub fn new(text: &str) -> Result<Self, InvalidScope> {
        if is_blank(text) {
            Err(InvalidScope::Blank)
        } else if text.len() > MAX_SCOPE_BYTES {
            Err(InvalidScope::TooLong { bytes: text.len() })
        } else if text.contains('#') {
            Err(InvalidScope::Separator)
        } else if text.contains(char::is_control) {
            Err(InvalidScope::ControlCharacter)
        } else {
            Ok(Self(text.into()))
        }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Scope {
    type Err = InvalidScope;

    fn from_str(text: &str) -> Result<Self, InvalidScope> {
        Self::new(text)
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a text is no [`Scope`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidScope {
    /// Nothing, or only white space.
    #[error("the scope is empty: give it a name, such as the function's")]
    Blank,
    /// It has a `#`, which stands between scope and key.
    #[error("the scope has a `#` in it: use another character, such as `-`")]
    Separator,
    /// It has a control character.
    #[error("the scope has a control character in it: use printable ones")]
    ControlCharacter,
    /// It is too long.
    #[error("the scope has {bytes} bytes: use at most {MAX_SCOPE_BYTES}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
}

/// An idempotency key: a scope and a value. Cheap to clone.
///
/// ```
/// use idempotent_consumer::key::{Key, KeyValue, Scope};
///
/// let value = KeyValue::from_string("A-1001").ok_or("blank")?;
/// let key = Key::new(&Scope::new("charge-orders")?, &value);
/// assert_eq!(key.id(), "charge-orders#A-1001");
/// assert_eq!(key.value(), "A-1001");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    id: Arc<str>,
    scope_bytes: usize,
}

impl Key {
    /// A key. An id over [`MAX_ID_BYTES`] keeps the start of the value and ends in
    /// `~sha256.` and the hash of the whole value; no value has a bare `~` in it, so a
    /// short key never looks like a long one.
    #[must_use]
    pub fn new(scope: &Scope, value: &KeyValue) -> Self {
        let scope_bytes = scope.0.len();
        let room = MAX_ID_BYTES.saturating_sub(scope_bytes + 1);
        let id = if value.0.len() <= room {
            format!("{scope}#{value}")
        } else {
            let mark = format!("~sha256.{}", sha256_hex(&value.0));
            let end = value.0.floor_char_boundary(room.saturating_sub(mark.len()));
            // A backslash at the cut would escape the mark.
            let start = value.0.get(..end).unwrap_or("").trim_end_matches('\\');
            format!("{scope}#{start}{mark}")
        };
        Self { id: id.into(), scope_bytes }
    }

    /// `scope#value`: the record's id in the store, at most [`MAX_ID_BYTES`] long.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The scope.
    #[must_use]
    pub fn scope(&self) -> &str {
        self.id.get(..self.scope_bytes).unwrap_or("")
    }

    /// The value, shortened as in the id: what the target of an effect gets as its
    /// idempotency key.
    #[must_use]
    pub fn value(&self) -> &str {
        self.id.get(self.scope_bytes + 1..).unwrap_or("")
    }
}

/// The id.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)
    }
}
