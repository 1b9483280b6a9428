//! Strict JSON: exact numbers, no duplicate members, one canonical text per value.
//!
//! Two messages are "the same" if their canonical texts are, so nothing may be lost on
//! the way there. RFC 8785 (JCS) reads numbers as doubles, and two order numbers above
//! 2^53 become one; most parsers keep the last of two members with one name. Here
//! numbers are exact at any size and a duplicate member is an error.
//!
//! # The canonical text
//!
//! * No white space. Members sorted by name, in code point order.
//! * Strings as they are, without Unicode normalisation. Escaped are only `"` and `\`
//!   (with a backslash) and the characters below U+0020: `\b`, `\t`, `\n`, `\f`, `\r`,
//!   the others as `\u00` and two lower-case hex digits.
//! * A number by its value: 1, 1.0 and 1e0 are `1`, and -0 is `0`. An integer of at most
//!   64 digits is written plainly. Any other number is its digits without a point,
//!   leading or trailing zeros, then `e` and the exponent: 1.5 is `15e-1`, 10^100 is `1e100`.
//!
//! The canonical text is JSON too, and stands for the same value.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::sync::Arc;

use serde::de::IgnoredAny;

/// How many arrays and objects may be nested in each other.
///
/// Keeps the recursion here, and that of whoever walks the value, far from the end of
/// the stack. The usual limit of JSON libraries.
pub const MAX_DEPTH: usize = 128;

/// An integer of more digits than this is written with an exponent, so that `1e1000000000`
/// is short.
const MAX_PLAIN_DIGITS: u64 = 64;

/// Names from the body are cut to this many characters in error texts.
const MAX_SHOWN_NAME: usize = 64;

/// A JSON value.
///
/// ```
/// use idempotent_consumer::json::Json;
///
/// let json = Json::parse(r#"{ "b": 1.50, "a": 9007199254740993 }"#)?;
/// assert_eq!(json.canonical(), r#"{"a":9007199254740993,"b":15e-1}"#);
/// # Ok::<(), idempotent_consumer::json::JsonError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number, exact.
    Number(Number),
    /// A string, without its escapes.
    String(String),
    /// An array.
    Array(Vec<Json>),
    /// An object. The order of a `BTreeMap<String, _>` is code point order.
    Object(BTreeMap<String, Json>),
}

impl Json {
    /// Reads one JSON value.
    pub fn parse(text: &str) -> Result<Self, JsonError> {
        // Finds every error of syntax, and without recursion.
        serde_json::from_str::<IgnoredAny>(text).map_err(|source| JsonError::Syntax { source: Arc::new(source) })?;
        Reader { rest: text }.value(0)
    }

    /// The value that a pointer names, if there is one.
    #[must_use]
    pub fn pointer(&self, pointer: &Pointer) -> Option<&Self> {
        pointer.tokens.iter().try_fold(self, |value, token| match value {
            Self::Object(members) => members.get(token),
            Self::Array(items) => items.get(array_index(token)?),
            _ => None,
        })
    }

    /// The canonical text: equal for equal values, different for different ones.
    #[must_use]
    pub fn canonical(&self) -> String {
        let mut out = String::new();
        self.write_canonical(&mut out);
        out
    }

    pub(crate) fn write_canonical(&self, out: &mut String) {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(true) => out.push_str("true"),
            Self::Bool(false) => out.push_str("false"),
            Self::Number(number) => number.write(out),
            Self::String(text) => write_string(out, text),
            Self::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    item.write_canonical(out);
                }
                out.push(']');
            }
            Self::Object(members) => {
                out.push('{');
                for (index, (name, value)) in members.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    write_string(out, name);
                    out.push(':');
                    value.write_canonical(out);
                }
                out.push('}');
            }
        }
    }
}

impl FromStr for Json {
    type Err = JsonError;

    fn from_str(text: &str) -> Result<Self, JsonError> {
        Self::parse(text)
    }
}

/// Builds a value from text that is known to follow JSON's grammar, in one pass.
///
/// Not `serde_json::Value`, which reads large numbers as doubles, nor its `RawValue` at
/// each level, which reads a nested body once per level.
struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        match self.peek() {
            Some('{') => self.object(depth),
            Some('[') => self.array(depth),
            Some('"') => self.string().map(Json::String),
            _ => self.word(),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, JsonError> {
        check_depth(depth)?;
        let mut object = BTreeMap::new();
        self.skip('{');
        while !self.skip('}') {
            self.skip(',');
            match object.entry(self.string()?) {
                Entry::Occupied(taken) => {
                    return Err(JsonError::DuplicateMember { member: shorten(taken.key()), object: String::new() });
                }
                Entry::Vacant(free) => {
                    self.skip(':');
                    let value = self.value(depth + 1);
                    let value = value.map_err(|error| error.inside(free.key()))?;
                    free.insert(value);
                }
            }
        }
        Ok(Json::Object(object))
    }

    fn array(&mut self, depth: usize) -> Result<Json, JsonError> {
        check_depth(depth)?;
        let mut items = Vec::new();
        self.skip('[');
        while !self.skip(']') {
            self.skip(',');
            let item = self.value(depth + 1);
            items.push(item.map_err(|error| error.inside(&items.len().to_string()))?);
        }
        Ok(Json::Array(items))
    }

    fn string(&mut self) -> Result<String, JsonError> {
        self.peek();
        let mut escaped = true; // The opening quote doesn't close.
        let end = self.rest.bytes().position(|byte| {
            let closes = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            closes
        });
        let quoted = self.take(end.map(|quote| quote + 1));
        if quoted.contains('\\') {
            serde_json::from_str(quoted)
                .map_err(|source| JsonError::Text { pointer: String::new(), source: Arc::new(source) })
        } else {
            Ok(quoted.trim_matches('"').to_owned())
        }
    }

    /// A value without a beginning and an end of its own.
    fn word(&mut self) -> Result<Json, JsonError> {
        let end = self.rest.find([',', ']', '}', ' ', '\t', '\n', '\r']);
        match self.take(end) {
            "null" => Ok(Json::Null),
            "true" => Ok(Json::Bool(true)),
            "false" => Ok(Json::Bool(false)),
            number => Number::read(number)
                .map(Json::Number)
                .ok_or_else(|| JsonError::NumberOutOfRange { pointer: String::new() }),
        }
    }

    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_ascii_start();
        self.rest.chars().next()
    }

    /// Steps over a character if it is next.
    fn skip(&mut self, expected: char) -> bool {
        let next = self.peek() == Some(expected);
        if next {
            self.take(Some(expected.len_utf8()));
        }
        next
    }

    /// Steps over so many bytes, or all, and returns them.
    fn take(&mut self, bytes: Option<usize>) -> &'a str {
        let split = bytes.and_then(|bytes| self.rest.split_at_checked(bytes));
        let (taken, rest) = split.unwrap_or((self.rest, ""));
        self.rest = rest;
        taken
    }
}

fn check_depth(depth: usize) -> Result<(), JsonError> {
    if depth < MAX_DEPTH { Ok(()) } else { Err(JsonError::TooDeep) }
}

fn write_string(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\t' => out.push_str("\\t"),
            '\n' => out.push_str("\\n"),
            '\u{c}' => out.push_str("\\f"),
            '\r' => out.push_str("\\r"),
            c if c < ' ' => append(out, format_args!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Formats to the end of a string, which cannot fail.
fn append(out: &mut String, text: fmt::Arguments<'_>) {
    out.write_fmt(text).unwrap_or_default();
}

/// An exact decimal number: a sign, digits and an exponent of ten.
///
/// Equal if the values are: 1, 1.0, 1e0 and 10e-1 are one number, and -0 is 0. Displayed
/// as in the [canonical text](self#the-canonical-text).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Number {
    negative: bool,
    /// Without leading or trailing zeros; zero is `0` with the exponent 0.
    digits: String,
    exponent: i64,
}

impl Number {
    /// Whether the value is an integer, however it was written: 1.0 is one.
    #[must_use]
    pub fn is_integer(&self) -> bool {
        self.exponent >= 0
    }

    /// Reads a number that is known to follow JSON's grammar; `None` if the exponent
    /// doesn't fit.
    fn read(text: &str) -> Option<Self> {
        let (negative, text) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let mut digits = [integer, fraction].concat();
        if digits.is_empty() {
            return None;
        }

        let significant = digits.trim_end_matches('0').len();
        if significant == 0 {
            // Zero at any exponent.
            return Some(Self { negative: false, digits: "0".into(), exponent: 0 });
        }
        let zeros = i64::try_from(digits.len() - significant).ok()?;
        let decimals = i64::try_from(fraction.len()).ok()?;
        let exponent = exponent.parse::<i64>().ok()?.checked_add(zeros - decimals)?;
        digits.truncate(significant);
        let leading = digits.len() - digits.trim_start_matches('0').len();
        digits.drain(..leading);
        Some(Self { negative, digits, exponent })
    }

    fn write(&self, out: &mut String) {
        if self.negative {
            out.push('-');
        }
        out.push_str(&self.digits);
        match usize::try_from(self.exponent) {
            Ok(zeros) if self.has_plain_form() => out.extend(std::iter::repeat_n('0', zeros)),
            _ => append(out, format_args!("e{}", self.exponent)),
        }
    }

    fn has_plain_form(&self) -> bool {
        u64::try_from(self.exponent).is_ok_and(|zeros| {
            u64::try_from(self.digits.len()).is_ok_and(|digits| digits.saturating_add(zeros) <= MAX_PLAIN_DIGITS)
        })
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.write(&mut text);
        f.write_str(&text)
    }
}

/// A JSON Pointer (RFC 6901): `/orderId`, `/items/0/sku`, or the empty text for the whole
/// document. In a name, `~` is written `~0` and `/` is written `~1`.
///
/// ```
/// use idempotent_consumer::json::{Json, Pointer};
///
/// let order = Json::parse(r#"{"lines": [{"sku": "A-1"}]}"#)?;
/// let sku: Pointer = "/lines/0/sku".parse()?;
/// assert_eq!(order.pointer(&sku), Some(&Json::String("A-1".into())));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pointer {
    text: String,
    tokens: Vec<String>,
}

impl Pointer {
    /// Reads a pointer.
    pub fn parse(text: &str) -> Result<Self, InvalidPointer> {
        let mut tokens = text.split('/');
        if tokens.next().is_some_and(|before| !before.is_empty()) {
            return Err(InvalidPointer::NoSlash(text.into()));
        }
        let tokens = tokens
            .map(|token| unescape(token).ok_or_else(|| InvalidPointer::Tilde(text.into())))
            .collect::<Result<_, _>>()?;
        Ok(Self { text: text.into(), tokens })
    }

    /// The pointer as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for Pointer {
    type Err = InvalidPointer;

    fn from_str(text: &str) -> Result<Self, InvalidPointer> {
        Self::parse(text)
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn unescape(token: &str) -> Option<String> {
    let mut pieces = token.split('~');
    let mut name = pieces.next()?.to_owned();
    for piece in pieces {
        if let Some(rest) = piece.strip_prefix('0') {
            name.push('~');
            name.push_str(rest);
        } else {
            name.push('/');
            name.push_str(piece.strip_prefix('1')?);
        }
    }
    Some(name)
}

fn array_index(token: &str) -> Option<usize> {
    let digits_only = token.bytes().all(|byte| byte.is_ascii_digit());
    let leading_zero = token.len() > 1 && token.starts_with('0');
    if digits_only && !leading_zero { token.parse().ok() } else { None }
}

/// Why a text is no JSON Pointer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidPointer {
    /// It has no `/` in front.
    #[error("`{0}` is not a JSON Pointer: it must start with `/`, as in `/orderId`")]
    NoSlash(String),
    /// A `~` that is no escape.
    #[error("`{0}` is not a JSON Pointer: in a name, write `~0` for `~` and `~1` for `/`")]
    Tilde(String),
}

/// Why a text was refused as JSON.
///
/// Names the place and at most one member, never a value: errors end up in logs.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// Not JSON at all.
    #[error("not valid JSON")]
    Syntax {
        /// What is wrong, with line and column.
        source: Arc<serde_json::Error>,
    },
    /// A string or a name with an escape that stands for no character, such as half of
    /// a surrogate pair.
    #[error("a string at `{pointer}` is not valid text")]
    Text {
        /// The string, or the object for the name of a member.
        pointer: String,
        /// What is wrong; line and column count from the start of the string.
        source: Arc<serde_json::Error>,
    },
    /// An object has two members with one name. Readers disagree on which one counts.
    #[error("the object at `{object}` has more than one member `{member}`")]
    DuplicateMember {
        /// The name, cut if it is long.
        member: String,
        /// The pointer of the object, empty for the document itself.
        object: String,
    },
    /// More than [`MAX_DEPTH`] arrays and objects in each other.
    #[error("nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// A number whose exponent does not fit in 64 bits.
    #[error("the number at `{pointer}` has an exponent that is out of range")]
    NumberOutOfRange {
        /// The number's place.
        pointer: String,
    },
}

impl JsonError {
    /// The same error, seen from the value around.
    fn inside(mut self, name: &str) -> Self {
        if let Self::Text { pointer, .. }
        | Self::NumberOutOfRange { pointer }
        | Self::DuplicateMember { object: pointer, .. } = &mut self
        {
            let token = shorten(name).replace('~', "~0").replace('/', "~1");
            *pointer = format!("/{token}{pointer}");
        }
        self
    }
}

fn shorten(name: &str) -> String {
    match name.char_indices().nth(MAX_SHOWN_NAME) {
        Some(_) => name.chars().take(MAX_SHOWN_NAME).chain(['…']).collect(),
        None => name.to_owned(),
    }
}

const _: () = {
    const fn send_sync<T: Send + Sync + 'static>() {}
    send_sync::<JsonError>();
};
