//! Idempotency keys: which part of a message says what business event it is about.
//!
//! A [`KeyExpression`] names the parts, [`KeyExpression::extract`] reads them from a
//! message, and a [`Key`] is the result under a [`Scope`], as the store knows it.
//!
//! Messages that have nothing to do with each other must never share a record. So a part
//! that is null, empty, incomplete or of the wrong type is an error, not a key.

use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::sync::Arc;

use crate::fingerprint::{content_hash, sha256_hex, split_escaped, write_escaped};
use crate::json::{InvalidPointer, Json, JsonError, Pointer};
use crate::message::Message;

/// The longest id of a record in bytes: DynamoDB's limit for a partition key.
pub const MAX_ID_BYTES: usize = 2048;

/// The longest scope in bytes, so that an id has room for a readable key.
pub const MAX_SCOPE_BYTES: usize = 256;

/// Which parts of a message make its key.
///
/// ```text
/// /idempotencyKey | /orderId              the first that is there
/// /customer/id, /orderId                  both together
/// attribute:tenant, /orderId              a message attribute and a part of the body
/// deduplication-id | content-hash
/// ```
///
/// | part | is |
/// | --- | --- |
/// | `/orderId` | a JSON Pointer into the body |
/// | `attribute:NAME` | a message attribute |
/// | `deduplication-id` | the sender's deduplication id (SQS FIFO) |
/// | `content-hash` | the hash of the whole body: a body that differs at all is another event |
/// | `message-id` | the broker's id. **It stops only redeliveries**: a message sent twice, or put back from a dead-letter queue, has a new id and takes effect again |
///
/// Spaces around parts don't count, and `\` takes the next character as it is: `\,` and
/// `\|` are a comma and a bar in a name.
///
/// ```
/// use idempotent_consumer::json::Json;
/// use idempotent_consumer::key::KeyExpression;
/// use idempotent_consumer::message::Message;
///
/// let expression: KeyExpression = "attribute:tenant, /orderId".parse()?;
/// let message = Message::new("id-1", r#"{"orderId": 42}"#).with_attribute("tenant", "acme");
/// let body = Json::parse(&message.body);
/// let key = expression.extract(&message, body.as_ref())?;
/// assert_eq!(key.as_str(), "acme,=42");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyExpression {
    /// In order of preference; none is empty.
    alternatives: Vec<Vec<Part>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Body(Pointer),
    Attribute(String),
    DeduplicationId,
    MessageId,
    ContentHash,
}

impl KeyExpression {
    /// Whether the body must be read as JSON to find the key.
    #[must_use]
    pub fn needs_body(&self) -> bool {
        let mut parts = self.alternatives.iter().flatten();
        parts.any(|part| matches!(part, Part::Body(_) | Part::ContentHash))
    }

    /// The key of a message; `body` is what [`Json::parse`] made of its body.
    ///
    /// The first alternative whose parts are all there wins. Only one that is absent as a
    /// whole is passed over: a sender of `"idempotencyKey": null`, or of one half of a
    /// key, has a mistake that another key would hide. For the same reason a body that is
    /// JSON but ambiguous (a duplicate member, say) is refused at once, while one that
    /// isn't JSON merely has no parts to point at.
    pub fn extract(&self, message: &Message, body: Result<&Json, &JsonError>) -> Result<KeyValue, KeyError> {
        for alternative in &self.alternatives {
            let mut value = String::new();
            let mut missing = None;
            for part in alternative {
                match part.find(message, body)? {
                    Some(text) if value.is_empty() => value = text,
                    Some(text) => {
                        value.push(',');
                        value.push_str(&text);
                    }
                    None => missing = missing.or(Some(part)),
                }
            }
            match (missing, body) {
                (None, _) => return Ok(KeyValue(value)),
                (Some(_), _) if value.is_empty() => {}
                (Some(Part::Body(_)), Err(error)) => return Err(self.unreadable(error)),
                (Some(part), _) => {
                    return Err(KeyError::Partial {
                        alternative: Alternative(alternative).to_string(),
                        missing: part.to_string(),
                    });
                }
            }
        }
        match body {
            Err(error) if self.needs_body() => Err(self.unreadable(error)),
            body => {
                Err(KeyError::Missing { expression: self.to_string(), envelope: body.ok().and_then(Envelope::around) })
            }
        }
    }

    fn unreadable(&self, error: &JsonError) -> KeyError {
        KeyError::Body { expression: self.to_string(), source: error.clone() }
    }
}

impl Part {
    fn parse(text: String) -> Result<Self, InvalidKeyExpression> {
        if text.starts_with('/') {
            return Ok(Self::Body(Pointer::parse(&text)?));
        }
        if let Some(name) = text.strip_prefix("attribute:") {
            if name.is_empty() || name.starts_with(char::is_whitespace) {
                return Err(InvalidKeyExpression::AttributeName);
            }
            return Ok(Self::Attribute(name.into()));
        }
        match text.as_str() {
            "deduplication-id" => Ok(Self::DeduplicationId),
            "message-id" => Ok(Self::MessageId),
            "content-hash" => Ok(Self::ContentHash),
            _ => Err(InvalidKeyExpression::UnknownPart { part: text }),
        }
    }

    /// The part's text in a key, never empty; `None` if the message doesn't have it.
    fn find(&self, message: &Message, body: Result<&Json, &JsonError>) -> Result<Option<String>, KeyError> {
        let found = match self {
            Self::Body(pointer) => match body {
                Ok(json) => json.pointer(pointer).map(from_json),
                Err(JsonError::Syntax { .. }) => None,
                Err(error) => {
                    return Err(KeyError::Body { expression: self.to_string(), source: error.clone() });
                }
            },
            Self::Attribute(name) => message.attributes.get(name).map(|text| from_text(text)),
            Self::DeduplicationId => message.deduplication_id.as_deref().map(from_text),
            Self::MessageId => Some(from_text(&message.id)),
            Self::ContentHash if is_blank(&message.body) => Some(Err(EMPTY)),
            Self::ContentHash => {
                let hash = content_hash(&message.body, body.ok());
                Some(Ok(format!("sha256.{hash}")))
            }
        };
        found.transpose().map_err(|found| KeyError::Unusable { part: self.to_string(), found })
    }
}

const EMPTY: &str = "empty";

/// A value of the body as a part of a key, or what it is instead.
fn from_json(value: &Json) -> Result<String, &'static str> {
    match value {
        Json::String(text) => from_text(text),
        Json::Number(number) if number.is_integer() => Ok(format!("={number}")),
        Json::Bool(value) => Ok(format!("={value}")),
        Json::Number(_) => Err("a number with a fraction"),
        Json::Null => Err("null"),
        Json::Array(_) => Err("an array"),
        Json::Object(_) => Err("an object"),
    }
}

/// A string as a part of a key. No part then has an unescaped comma or tilde, and only
/// numbers and booleans start with `=`.
fn from_text(text: &str) -> Result<String, &'static str> {
    if is_blank(text) {
        return Err(EMPTY);
    }
    let mut part = String::with_capacity(text.len());
    for (index, c) in text.char_indices() {
        if matches!(c, '\\' | ',' | '~') || (index == 0 && c == '=') {
            part.push('\\');
        }
        part.push(c);
    }
    Ok(part)
}

fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// `/idempotencyKey | /orderId`
impl Default for KeyExpression {
    fn default() -> Self {
        let pointers = ["/idempotencyKey", "/orderId"].map(Pointer::parse);
        let parts = pointers.into_iter().flatten().map(Part::Body);
        Self { alternatives: parts.map(|part| vec![part]).collect() }
    }
}

impl FromStr for KeyExpression {
    type Err = InvalidKeyExpression;

    fn from_str(text: &str) -> Result<Self, InvalidKeyExpression> {
        let items = split_escaped(text, &SEPARATORS).ok_or(InvalidKeyExpression::DanglingEscape)?;
        let mut alternatives = Vec::new();
        let mut alternative = Vec::new();
        for (index, (item, separator)) in items.into_iter().enumerate() {
            if item.is_empty() {
                return Err(InvalidKeyExpression::EmptyPart { position: index + 1 });
            }
            alternative.push(Part::parse(item)?);
            if separator != Some(',') {
                alternatives.push(std::mem::take(&mut alternative));
            }
        }
        Ok(Self { alternatives })
    }
}

const SEPARATORS: [char; 2] = [',', '|'];

/// The expression's text, which reads back as an equal expression.
impl fmt::Display for KeyExpression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, alternative) in self.alternatives.iter().enumerate() {
            if index > 0 {
                f.write_str(" | ")?;
            }
            Alternative(alternative).fmt(f)?;
        }
        Ok(())
    }
}

struct Alternative<'a>(&'a [Part]);

impl fmt::Display for Alternative<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, part) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_char(',')?;
            }
            part.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Body(pointer) => write_escaped(f, pointer.as_str(), &SEPARATORS),
            Self::Attribute(name) => {
                f.write_str("attribute:")?;
                write_escaped(f, name, &SEPARATORS)
            }
            Self::DeduplicationId => f.write_str("deduplication-id"),
            Self::MessageId => f.write_str("message-id"),
            Self::ContentHash => f.write_str("content-hash"),
        }
    }
}

/// Why a text is no [`KeyExpression`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidKeyExpression {
    /// Nothing between two separators, or nothing at all.
    #[error(
        "part {position} of the key expression is empty: write it as in `/orderId` or `/idempotencyKey | /orderId`"
    )]
    EmptyPart {
        /// Which part, counted from 1.
        position: usize,
    },
    /// A word that is no part.
    #[error(
        "`{part}` is no part of a key: write a JSON Pointer such as `/orderId`, `attribute:NAME`, `deduplication-id`, `content-hash` or `message-id`"
    )]
    UnknownPart {
        /// The word.
        part: String,
    },
    /// A JSON Pointer that isn't one.
    #[error(transparent)]
    Pointer(#[from] InvalidPointer),
    /// `attribute:` without a name.
    #[error("`attribute:` must have the attribute's name right after it, as in `attribute:tenant`")]
    AttributeName,
    /// The text ends in a single backslash.
    #[error("`\\` at the end of the key expression: it must have a character after it, and `\\\\` is a backslash")]
    DanglingEscape,
}

/// Why a message has no key. Sending the same message again gives the same error.
///
/// Names parts of the key expression, never values from the message.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The message has no part of any alternative.
    #[error("the message has nothing of the key `{expression}`{}", Envelope::hint(*.envelope))]
    Missing {
        /// All alternatives tried.
        expression: String,
        /// What the message seems to be wrapped in.
        envelope: Option<Envelope>,
    },
    /// A part is there, but it isn't a non-empty string, an integer or a boolean.
    #[error("`{part}` is {found}: a key needs a non-empty string, an integer or a boolean")]
    Unusable {
        /// The part of the key expression.
        part: String,
        /// What it is instead, such as `null` or `an array`.
        found: &'static str,
    },
    /// Some parts of an alternative are there and some are not.
    #[error("the key `{alternative}` is incomplete: `{missing}` is missing")]
    Partial {
        /// The alternative.
        alternative: String,
        /// The first part that is missing.
        missing: String,
    },
    /// The key is in the body, and the body was refused as JSON.
    #[error("the key `{expression}` can't be read from the body")]
    Body {
        /// The expression, or the part of it that needed the body.
        expression: String,
        /// What is wrong with the body.
        source: JsonError,
    },
}

/// A service's wrapping around the message that the sender meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Envelope {
    /// A notification of Amazon SNS.
    Sns,
    /// An event of Amazon EventBridge.
    EventBridge,
}

impl Envelope {
    fn around(body: &Json) -> Option<Self> {
        let Json::Object(members) = body else {
            return None;
        };
        let has = |names: [&str; 2]| names.iter().all(|name| members.contains_key(*name));
        let notification = matches!(members.get("Type"), Some(Json::String(kind)) if kind == "Notification");
        if notification && has(["Message", "TopicArn"]) {
            Some(Self::Sns)
        } else if has(["detail", "detail-type"]) && members.contains_key("source") {
            Some(Self::EventBridge)
        } else {
            None
        }
    }

    fn hint(envelope: Option<Self>) -> &'static str {
        match envelope {
            None => "",
            Some(Self::Sns) => {
                "; it looks like an SNS notification with the message inside: \
                 turn on raw message delivery on the subscription"
            }
            Some(Self::EventBridge) => {
                "; it looks like an EventBridge event with the message inside: \
                 use a key expression such as `/detail/orderId`"
            }
        }
    }
}

/// The text of a message's key, different for different keys.
///
/// A string is itself, an integer is `=42`, a boolean is `=true`, and a comma stands
/// between parts; so the string `42` and the number 42 are two keys. In a string, `\` goes
/// before `\`, `,`, `~` and a leading `=`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyValue(String);

impl KeyValue {
    /// The key of one string, for those who have it without an expression; `None` if it
    /// is empty or blank.
    #[must_use]
    pub fn from_string(text: &str) -> Option<Self> {
        from_text(text).ok().map(Self)
    }

    /// The text, in full.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

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
