//! The text of a key.

use std::fmt;

use crate::json::Json;

/// The text of a message's key, different for different keys.
///
/// A string is itself, an integer is `=42`, a boolean is `=true`, and a comma stands
/// between parts; so the string `42` and the number 42 are two keys. In a string, `\` goes
/// before `\`, `,`, `~` and a leading `=`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyValue(pub(super) String);

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

pub(super) const EMPTY: &str = "empty";

/// A value of the body as a part of a key, or what it is instead.
pub(super) fn from_json(value: &Json) -> Result<String, &'static str> {
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
pub(super) fn from_text(text: &str) -> Result<String, &'static str> {
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

pub(super) fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}
