//! JSON as the properties know it, read and written apart from the code under test.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::de::IgnoredAny;

use super::dice::Dice;

/// How deep a body may be nested.
pub const MAX_DEPTH: usize = 128;

/// A value. Two are equal if they stand for the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Model {
    Null,
    Bool(bool),
    Number(Decimal),
    Text(String),
    Array(Vec<Model>),
    Object(BTreeMap<String, Model>),
}

/// `digits` x 10^`exponent`; zero has no digits, and no others start or end in `0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decimal {
    pub negative: bool,
    pub digits: Vec<u8>,
    pub exponent: i128,
}

/// Why a text has no model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    NotJson,
    NotText,
    DuplicateMember,
    TooDeep,
    /// An exponent near the end of 64 bits or beyond.
    HugeExponent,
}

impl Model {
    pub fn read(text: &str) -> Result<Self, Refusal> {
        Self::scan(text, false)
    }

    /// Reads a canonical text. Panics at white space, at a string that is escaped more than
    /// it must be, and at members that are not in ascending order of their code points.
    pub fn read_canonical(text: &str) -> Result<Self, Refusal> {
        Self::scan(text, true)
    }

    fn scan(text: &str, canonical: bool) -> Result<Self, Refusal> {
        if serde_json::from_str::<IgnoredAny>(text).is_err() {
            return Err(Refusal::NotJson);
        }
        Scan { text, at: 0, canonical }.value(0)
    }

    /// One of many spellings, chosen by the dice.
    pub fn spell(&self, dice: &mut impl FnMut(usize) -> usize) -> String {
        let mut out = String::new();
        self.write(dice, &mut out);
        out
    }

    fn write(&self, dice: &mut impl FnMut(usize) -> usize, out: &mut String) {
        space(dice, out);
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(value) => write!(out, "{value}").unwrap(),
            Self::Number(number) => number.write(dice, out),
            Self::Text(text) => write_text(text, dice, out),
            Self::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    item.write(dice, out);
                }
                space(dice, out);
                out.push(']');
            }
            Self::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                for index in (1..members.len()).rev() {
                    members.swap(index, dice(index + 1));
                }
                out.push('{');
                for (index, (name, value)) in members.into_iter().enumerate() {
                    if index > 0 {
                        out.push(',');
                    }
                    space(dice, out);
                    write_text(name, dice, out);
                    space(dice, out);
                    out.push(':');
                    value.write(dice, out);
                }
                space(dice, out);
                out.push('}');
            }
        }
        space(dice, out);
    }

    /// A value built from bytes.
    pub fn roll(dice: &mut Dice<'_>, depth: usize) -> Self {
        let kinds = if depth == 0 || dice.is_empty() { 4 } else { 6 };
        match dice.below(kinds) {
            0 => Self::Null,
            1 => Self::Bool(dice.one_in(2)),
            2 => Self::Number(Decimal::roll(dice)),
            3 => Self::Text(roll_text(dice)),
            4 => Self::Array((0..dice.below(4)).map(|_| Self::roll(dice, depth - 1)).collect()),
            _ => Self::Object((0..dice.below(4)).map(|_| (roll_text(dice), Self::roll(dice, depth - 1))).collect()),
        }
    }

    /// The same value with one thing changed, so that it is another.
    pub fn changed(&self, dice: &mut Dice<'_>) -> Self {
        match self {
            Self::Null => dice.pick(&[Some(false), Some(true), None]).map_or(Self::Text("null".to_owned()), Self::Bool),
            Self::Bool(value) if dice.one_in(2) => Self::Text(value.to_string()),
            Self::Bool(value) => Self::Bool(!value),
            Self::Number(number) => Self::Number(number.changed(dice)),
            Self::Text(text) => {
                let mut changed = text.clone();
                if changed.is_empty() || dice.one_in(2) {
                    changed.push(dice.pick(&['\0', ' ', '"', '\\', 'n', '0', '\u{301}', '\u{1f600}']));
                } else {
                    changed.pop();
                }
                Self::Text(changed)
            }
            Self::Array(items) => {
                let mut items = items.clone();
                match items.len() {
                    0 => items.push(Self::Null),
                    _ if dice.one_in(4) => drop(items.pop()),
                    // The same items, one level down.
                    _ if dice.one_in(4) => items = vec![Self::Array(items)],
                    count => {
                        let index = dice.below(count);
                        items[index] = items[index].changed(dice);
                    }
                }
                Self::Array(items)
            }
            Self::Object(members) => {
                let mut members = members.clone();
                let Some(name) = members.keys().nth(dice.below(members.len())).cloned() else {
                    return Self::Array(Vec::new());
                };
                let value = members.remove(&name).unwrap();
                match dice.below(3) {
                    0 => {}
                    1 => {
                        // A name that is not there yet: longer than any.
                        let longest = members.keys().map(String::len).max().unwrap_or(0).max(name.len());
                        members.insert(format!("{name}{}", "x".repeat(longest + 1 - name.len())), value);
                    }
                    _ => drop(members.insert(name, value.changed(dice))),
                }
                Self::Object(members)
            }
        }
    }

    /// The same shape with every string, number and boolean replaced.
    pub fn with_leaves(&self, leaf: &Self) -> Self {
        match self {
            Self::Array(items) => Self::Array(items.iter().map(|item| item.with_leaves(leaf)).collect()),
            Self::Object(members) => {
                Self::Object(members.iter().map(|(name, value)| (name.clone(), value.with_leaves(leaf))).collect())
            }
            _ => leaf.clone(),
        }
    }
}

impl Decimal {
    fn new(negative: bool, digits: &[u8], exponent: i128) -> Self {
        let zeros = digits.iter().rev().take_while(|digit| **digit == b'0').count();
        let digits = &digits[..digits.len() - zeros];
        let leading = digits.iter().take_while(|digit| **digit == b'0').count();
        let digits = digits[leading..].to_vec();
        if digits.is_empty() {
            return Self { negative: false, digits, exponent: 0 };
        }
        Self { negative, digits, exponent: exponent + i128::try_from(zeros).unwrap() }
    }

    /// Reads a number in JSON's grammar, or `None` if its exponent is huge. DynamoDB writes
    /// in the same grammar.
    pub fn read(text: &str) -> Option<Self> {
        let negative = text.starts_with('-');
        let text = text.trim_start_matches(['-', '+']);
        let (mantissa, exponent) = text.find(['e', 'E']).map_or((text, ""), |at| (&text[..at], &text[at + 1..]));
        let decimals = mantissa.find('.').map_or(0, |point| mantissa.len() - point - 1);
        let digits: Vec<u8> = mantissa.bytes().filter(u8::is_ascii_digit).collect();
        let decimals = i128::try_from(decimals).unwrap();
        let number = Self::new(negative, &digits, -decimals);
        if number.digits.is_empty() {
            return Some(number);
        }
        let exponent: i128 = if exponent.is_empty() { 0 } else { exponent.parse().ok()? };
        let near_the_end = i128::from(i64::MAX) - 10_000_000;
        (exponent.abs() < near_the_end).then(|| Self { exponent: number.exponent + exponent, ..number })
    }

    fn roll(dice: &mut Dice<'_>) -> Self {
        let digits: Vec<_> = match dice.below(4) {
            0 => vec![b'0' + dice.pick(&[0, 1, 2, 9])],
            // Around 2^53, where doubles end.
            1 => format!("900719925474099{}", dice.below(10)).into_bytes(),
            _ => {
                let count = dice.pick(&[1, 3, 20, 70]);
                dice.bytes(count).iter().map(|byte| b'0' + byte % 10).collect()
            }
        };
        let exponent = match dice.below(4) {
            0 => 0,
            1 => i128::from(dice.byte()) - 128,
            2 => i128::from(dice.pick(&[i64::MAX / 2, i64::MIN / 2, 400, -400, 63, 64, 65])),
            _ => 1,
        };
        Self::new(dice.one_in(3), &digits, exponent)
    }

    fn changed(&self, dice: &mut Dice<'_>) -> Self {
        if self.digits.is_empty() {
            return Self { negative: dice.one_in(2), digits: vec![b'1'], exponent: i128::from(dice.byte()) - 200 };
        }
        match dice.below(4) {
            0 => Self { negative: !self.negative, ..self.clone() },
            1 => Self { exponent: self.exponent + 1, ..self.clone() },
            2 => {
                let mut digits = self.digits.clone();
                digits.push(b'1');
                Self { digits, exponent: self.exponent - 1, ..self.clone() }
            }
            _ => Self { negative: false, digits: Vec::new(), exponent: 0 },
        }
    }

    /// Whether the value is below an integer, exactly.
    pub fn is_below(&self, integer: u64) -> bool {
        let positive = !self.negative && !self.digits.is_empty();
        if !positive || integer == 0 {
            return self.negative || (self.digits.is_empty() && integer > 0);
        }
        let other = Self::new(false, integer.to_string().as_bytes(), 0);
        // 0.d1d2d3... x 10^magnitude
        let magnitude = |number: &Self| i128::try_from(number.digits.len()).unwrap() + number.exponent;
        // Without trailing zeros, the order of digits is that of their texts.
        (magnitude(self), &self.digits) < (magnitude(&other), &other.digits)
    }

    fn write(&self, dice: &mut impl FnMut(usize) -> usize, out: &mut String) {
        // Zeros after the digits, then a point somewhere in them.
        let zeros = dice(4);
        let mut digits = String::from_utf8(self.digits.clone()).unwrap();
        let zero = digits.is_empty();
        if zero {
            digits.push('0');
        }
        if self.negative || (zero && dice(2) == 0) {
            out.push('-');
        }
        let mut exponent = if zero { i128::try_from(dice(9)).unwrap() - 4 } else { self.exponent };
        if zero {
            digits.push_str(&".0".repeat(dice(2)));
        } else {
            digits.push_str(&"0".repeat(zeros));
            exponent -= i128::try_from(zeros).unwrap();
            let point = 1 + dice(digits.len());
            if point < digits.len() {
                exponent += i128::try_from(digits.len() - point).unwrap();
                digits.insert(point, '.');
            }
        }
        out.push_str(&digits);
        if exponent != 0 || dice(2) == 0 {
            out.push_str(["e", "E"][dice(2)]);
            if exponent >= 0 {
                out.push_str(["", "+"][dice(2)]);
            }
            write!(out, "{exponent}").unwrap();
        }
    }
}

/// A place in a text that is known to be JSON.
struct Scan<'a> {
    text: &'a str,
    at: usize,
    canonical: bool,
}

impl Scan<'_> {
    /// The next byte that is no white space.
    fn next(&mut self) -> u8 {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.text.as_bytes().get(self.at) {
            assert!(!self.canonical, "white space in {}", self.text);
            self.at += 1;
        }
        self.text.as_bytes()[self.at]
    }

    /// Steps over that byte if it is next.
    fn passes(&mut self, byte: u8) -> bool {
        let passes = self.next() == byte;
        self.at += usize::from(passes);
        passes
    }

    /// What stands from here to the end of a string, a number or a word.
    fn word(&mut self) -> &str {
        let rest = &self.text[self.at..];
        let mut escaped = false;
        let closes = |c| {
            let closes = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            closes
        };
        let end = match rest.strip_prefix('"') {
            Some(inside) => inside.find(closes).unwrap() + 2,
            None => rest.find(|c: char| !c.is_ascii_alphanumeric() && !"+-.".contains(c)).unwrap_or(rest.len()),
        };
        self.at += end;
        &rest[..end]
    }

    fn string(&mut self) -> Result<String, Refusal> {
        let canonical = self.canonical;
        let quoted = self.word();
        let text: String = serde_json::from_str(quoted).map_err(|_| Refusal::NotText)?;
        assert!(!canonical || quoted.len() == shortest(&text), "{quoted} is escaped too much");
        Ok(text)
    }

    fn value(&mut self, depth: usize) -> Result<Model, Refusal> {
        match self.next() {
            b'{' | b'[' if depth == MAX_DEPTH => Err(Refusal::TooDeep),
            b'{' => {
                self.at += 1;
                let mut object = BTreeMap::new();
                let mut last: Option<String> = None;
                while !self.passes(b'}') {
                    self.passes(b',');
                    self.next();
                    let name = self.string()?;
                    self.passes(b':');
                    let ascends = last.is_none_or(|last| last.chars().lt(name.chars()));
                    assert!(ascends || !self.canonical, "members out of order: {}", self.text);
                    last = Some(name.clone());
                    let value = self.value(depth + 1)?;
                    if object.insert(name, value).is_some() {
                        return Err(Refusal::DuplicateMember);
                    }
                }
                Ok(Model::Object(object))
            }
            b'[' => {
                self.at += 1;
                let mut items = Vec::new();
                while !self.passes(b']') {
                    self.passes(b',');
                    items.push(self.value(depth + 1)?);
                }
                Ok(Model::Array(items))
            }
            b'"' => self.string().map(Model::Text),
            _ => match self.word() {
                "null" => Ok(Model::Null),
                "true" => Ok(Model::Bool(true)),
                "false" => Ok(Model::Bool(false)),
                number => Decimal::read(number).map(Model::Number).ok_or(Refusal::HugeExponent),
            },
        }
    }
}

/// How long a string is as JSON, escaped no more than it must be.
fn shortest(text: &str) -> usize {
    let escaped = |c| match c {
        '"' | '\\' | '\u{8}' | '\t' | '\n' | '\u{c}' | '\r' => 2,
        c if c < ' ' => 6,
        c => c.len_utf8(),
    };
    2 + text.chars().map(escaped).sum::<usize>()
}

fn space(dice: &mut impl FnMut(usize) -> usize, out: &mut String) {
    out.push_str(["", "", "", " ", "\n\t", "\r"][dice(6)]);
}

fn write_text(text: &str, dice: &mut impl FnMut(usize) -> usize, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        if c < ' ' || matches!(c, '"' | '\\') || dice(4) == 0 {
            for unit in c.encode_utf16(&mut [0; 2]) {
                if dice(2) == 0 {
                    write!(out, "\\u{unit:04x}").unwrap();
                } else {
                    write!(out, "\\u{unit:04X}").unwrap();
                }
            }
        } else {
            out.push(c);
        }
    }
    out.push('"');
}

/// Few different characters, so that clashes and escapes are common.
fn roll_text(dice: &mut Dice<'_>) -> String {
    const CHARS: [char; 12] =
        ['a', 'b', '"', '\\', '/', '\n', '\u{1}', '\u{e9}', '\u{ffff}', '\u{1f600}', '\u{301}', '1'];
    (0..dice.below(4)).map(|_| dice.pick(&CHARS)).collect()
}
