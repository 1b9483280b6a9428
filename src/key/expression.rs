//! Which parts of a message make its key.

use std::fmt::{self, Write as _};
use std::str::FromStr;

#[cfg(feature = "jmespath")]
use super::jmespath::Query;
use super::value::{EMPTY, from_json, from_text, is_blank};
use super::{Envelope, KeyError, KeyValue};
use crate::fingerprint::{content_hash, split_escaped, write_escaped};
use crate::json::{InvalidPointer, Json, JsonError, Pointer};
use crate::message::Message;

/// Which parts of a message make its key.
///
/// ```text
/// /idempotencyKey | /orderId              the first that is there
/// /customer/id, /orderId                  both together
/// attribute:tenant, /orderId              a message attribute and a part of the body
/// deduplication-id | content-hash
/// jmespath:[order.tenant, order.id]       both together, in JMESPath
/// ```
///
/// | part | is |
/// | --- | --- |
/// | `/orderId` | a JSON Pointer into the body |
/// | `attribute:NAME` | a message attribute |
/// | `deduplication-id` | the sender's deduplication id (SQS FIFO) |
/// | `content-hash` | the hash of the whole body: a body that differs at all is another event |
/// | `message-id` | the broker's id. **It stops only redeliveries**: a message sent twice, or moved to a dead-letter queue by the queue itself and put back from there, has a new id and takes effect again |
/// | `jmespath:EXPRESSION` | what a [JMESPath](https://jmespath.org) expression selects in the body (feature `jmespath`) |
///
/// Spaces around parts don't count, and `\` takes the next character as it is: `\,` and
/// `\|` are a comma and a bar in a name.
///
/// # JMESPath
///
/// `jmespath:` comes last and takes the rest of the text as it is, with its commas, bars and
/// backslashes; alternatives are JMESPath's own (`id || orderId`). It selects a string, an
/// integer or a boolean, or a list of those, which is the same key as of as many parts with
/// commas between them. Null and an empty list are rejected, and so is a list with a null in
/// it. To the functions of JMESPath come two of AWS Powertools: `powertools_json` reads a
/// text as JSON, and `powertools_base64` and `powertools_base64_gzip` decode one.
///
/// Four things to know:
///
/// * JMESPath can't tell null from nothing, and its `||` passes over an empty string and
///   `false` as well. `/id | /orderId` rejects a message whose `id` is null or empty, and
///   `jmespath:id || orderId` goes on to its `orderId`.
/// * It computes, compares and sorts with doubles. Integers that don't fit into 64 bits,
///   and whatever was computed, are refused as a key; but a filter such as
///   ``[?id == `9007199254740993`]`` takes the neighbours too.
/// * A projection (`items[*].sku`) is refused if an element has nothing there.
/// * An expression has at most 64 brackets and operators.
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
    /// Always the last part of the last alternative.
    #[cfg(feature = "jmespath")]
    Jmespath(Query),
}

impl KeyExpression {
    /// Whether the body must be read as JSON to find the key.
    #[must_use]
    pub fn needs_body(&self) -> bool {
        let mut parts = self.alternatives.iter().flatten();
        parts.any(|part| part.is_in_body() || *part == Part::ContentHash)
    }

    /// The message attributes that the expression names.
    pub fn attributes(&self) -> impl Iterator<Item = &str> {
        self.alternatives.iter().flatten().filter_map(|part| match part {
            Part::Attribute(name) => Some(name.as_str()),
            _ => None,
        })
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
                (Some(part), Err(error)) if part.is_in_body() => return Err(self.unreadable(error)),
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
    fn is_in_body(&self) -> bool {
        match self {
            Self::Body(_) => true,
            #[cfg(feature = "jmespath")]
            Self::Jmespath(_) => true,
            _ => false,
        }
    }

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
        let json = match body {
            Err(JsonError::Syntax { .. }) => None,
            Err(error) if self.is_in_body() => {
                return Err(KeyError::Body { expression: self.to_string(), source: error.clone() });
            }
            body => body.ok(),
        };
        let found = match self {
            Self::Body(pointer) => json.and_then(|json| json.pointer(pointer)).map(from_json),
            #[cfg(feature = "jmespath")]
            Self::Jmespath(query) => return json.map_or(Ok(None), |json| query.find(json)),
            Self::Attribute(name) => message.attributes.get(name).map(|text| from_text(text)),
            Self::DeduplicationId => message.original_deduplication_id().map(from_text),
            Self::MessageId => Some(from_text(message.original_id())),
            Self::ContentHash if is_blank(&message.body) => Some(Err(EMPTY)),
            Self::ContentHash => {
                let hash = content_hash(&message.body, json);
                Some(Ok(format!("sha256.{hash}")))
            }
        };
        found.transpose().map_err(|found| KeyError::Unusable { part: self.to_string(), found })
    }
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
        let (text, query) = split_query(text);
        let mut items = split_escaped(text, &SEPARATORS).ok_or(InvalidKeyExpression::DanglingEscape)?;
        if query.is_some() {
            // The nothing between the last separator and the query.
            items.pop();
        }
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
        if let Some(query) = query {
            #[cfg(feature = "jmespath")]
            alternative.push(Part::Jmespath(Query::parse(query)?));
            #[cfg(not(feature = "jmespath"))]
            return Err(InvalidKeyExpression::NoJmespath { expression: query.trim().to_owned() });
            #[cfg(feature = "jmespath")]
            alternatives.push(alternative);
        }
        Ok(Self { alternatives })
    }
}

const QUERY: &str = "jmespath:";

/// What stands before a part that is in JMESPath, and the JMESPath.
fn split_query(text: &str) -> (&str, Option<&str>) {
    let (mut part_begins, mut escaped) = (true, false);
    for (index, c) in text.char_indices() {
        if part_begins
            && let Some((before, part)) = text.split_at_checked(index)
            && let Some(query) = part.strip_prefix(QUERY)
        {
            return (before, Some(query));
        }
        part_begins = !escaped && (SEPARATORS.contains(&c) || (part_begins && c.is_whitespace()));
        escaped = !escaped && c == '\\';
    }
    (text, None)
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
            #[cfg(feature = "jmespath")]
            Self::Jmespath(query) => write!(f, "{QUERY}{}", query.as_str()),
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
        "`{part}` is no part of a key: write a JSON Pointer such as `/orderId`, `attribute:NAME`, `deduplication-id`, `content-hash`, `message-id` or `jmespath:EXPRESSION`"
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
    /// A JMESPath expression that isn't one, or that can't be a key.
    #[error("the JMESPath expression `{expression}` is wrong at character {position}: {problem}")]
    Jmespath {
        /// The expression.
        expression: String,
        /// Where, counted from 1.
        position: usize,
        /// What is wrong.
        problem: String,
    },
    /// JMESPath was left out when this was compiled.
    #[error("the JMESPath expression `{expression}` can't be read: this was built without the feature `jmespath`")]
    NoJmespath {
        /// The expression.
        expression: String,
    },
    /// The text ends in a single backslash.
    #[error("`\\` at the end of the key expression: it must have a character after it, and `\\\\` is a backslash")]
    DanglingEscape,
}
