//! Where messages go that a person must look at: rejected, in conflict, permanently refused
//! or parked.
//!
//! A [`Batch`](crate::batch::Batch) that has a [`DeadLetterQueue`] sends each of them there
//! at once and acks the message only then. A send that fails, or does not end in time,
//! leaves the message in its own queue: it comes again, and its letter is sent then. Nothing
//! is lost that way, and a letter whose answer was lost is there twice.
//!
//! # The letter
//!
//! The body as it was delivered, byte for byte, in its envelope if it had one, and in the same
//! group. The deduplication id is fresh: SQS drops what it has seen in the last five minutes,
//! and a message that was mended too little and failed again must not be dropped. What
//! happened stands in attributes:
//!
//! | attribute | value |
//! | --- | --- |
//! | `dead-letter-reason` | outcome and reason, `permanent: ...`, at most [`MAX_REASON_BYTES`] |
//! | `idempotency-key` | the id of the record, `scope#key`, as in the log; none if the message has no key |
//! | `idempotency-attempt` | which claim of the key this was, counted from 1; none if it was not claimed |
//! | `original-message-id` | the id of the message when it was first given up |
//! | `original-deduplication-id` | its deduplication id then, if it had one |
//! | `original-source-arn` | the queue it came from |
//! | `first-received-at` | when that queue first handed it out, RFC 3339 |
//!
//! The message's own attributes follow as far as there is room, those first that its key is
//! made of: SQS allows ten, and 1 MiB together with the body. They are sent as text; binary
//! ones are not kept. Those of an envelope are in the body.
//!
//! # The way back
//!
//! Put the letter back into the queue, attributes and all (as a redrive does). Its key is
//! that of the message it was, even if that is made of the message id or the deduplication
//! id: those are then [taken from the attributes](Message::original_id). It goes through
//! the same claim as any message. Any sender can write such attributes, just as it can choose
//! a deduplication id.

#[cfg(feature = "sqs")]
pub mod sqs;

use std::fmt;

use uuid::Uuid;

use crate::error::BoxError;
use crate::message::Message;
use crate::outcome::Report;
use crate::store::BoxFuture;

/// Names of a letter's attributes.
pub mod attribute {
    /// Outcome and reason.
    pub const REASON: &str = "dead-letter-reason";
    /// The id of the record.
    pub const KEY: &str = "idempotency-key";
    /// Which claim of the key it was, counted from 1.
    pub const ATTEMPT: &str = "idempotency-attempt";
    /// The id of the message that was first given up.
    pub const MESSAGE_ID: &str = "original-message-id";
    /// The deduplication id of the message that was first given up.
    pub const DEDUPLICATION_ID: &str = "original-deduplication-id";
    /// The queue that it came from.
    pub const SOURCE: &str = "original-source-arn";
    /// When that queue first handed it out.
    pub const FIRST_RECEIVED: &str = "first-received-at";
    /// All of them.
    pub const ALL: [&str; 7] = [REASON, KEY, ATTEMPT, MESSAGE_ID, DEDUPLICATION_ID, SOURCE, FIRST_RECEIVED];
}

/// The longest reason that a letter carries: 1 KiB. A longer one is cut.
pub const MAX_REASON_BYTES: usize = 1024;

/// SQS's limit of attributes to a message.
pub const MAX_ATTRIBUTES: usize = 10;

/// SQS's limit for body and attributes (names, types and values) together: 1 MiB.
pub const MAX_LETTER_BYTES: usize = 1024 * 1024;

/// The data type of every attribute of a letter.
const DATA_TYPE: &str = "String";

/// Where dead letters are sent.
pub trait DeadLetterQueue: fmt::Debug + Send + Sync + 'static {
    /// Sends one. `Ok` MUST mean that it can't be lost any more: the message is deleted from
    /// its own queue then.
    fn send<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>>;
}

/// A letter was not sent, or nobody knows whether it was.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct DeadLetterError {
    message: String,
    #[source]
    source: Option<BoxError>,
}

impl DeadLetterError {
    /// An error; `message` says what would help.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), source: None }
    }

    /// The same error with its cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(source.into());
        self
    }
}

/// A message that was given up, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The body as it was delivered.
    pub body: String,
    /// The message's group.
    pub group: Option<String>,
    /// The id of the message that is given up.
    pub message_id: String,
    /// Fresh for every letter, and the same however often the letter is sent.
    pub deduplication_id: String,
    /// Names and values, in the order of their importance. They fit.
    pub attributes: Vec<(String, String)>,
}

impl DeadLetter {
    /// The letter for a message that ended so. Attributes of the message that `keep` names
    /// are kept before others.
    #[must_use]
    #[allow(clippy::disallowed_methods)] // a random id, and no owner's token
    pub fn new(message: &Message, report: &Report, keep: &[&str]) -> Self {
        let mut letter = Self {
            body: message.delivered_body().to_owned(),
            group: message.group.clone(),
            message_id: message.id.clone(),
            deduplication_id: Uuid::new_v4().to_string(),
            attributes: Vec::new(),
        };
        let mut room = MAX_LETTER_BYTES.saturating_sub(message.delivered_body().len());
        let reason = match report.outcome.reason() {
            Some(reason) => format!("{}: {reason}", report.outcome.name()),
            None => report.outcome.name().to_owned(),
        };
        let ours = [
            (attribute::MESSAGE_ID, Some(message.original_id().to_owned())),
            (attribute::DEDUPLICATION_ID, message.original_deduplication_id().map(str::to_owned)),
            (attribute::REASON, Some(cut(&sendable(&reason), MAX_REASON_BYTES).to_owned())),
            (attribute::KEY, report.key.as_ref().map(|key| key.id().to_owned())),
            (attribute::ATTEMPT, report.attempt.map(|attempt| attempt.to_string())),
            (attribute::SOURCE, message.source.clone()),
            (attribute::FIRST_RECEIVED, message.first_received_at.map(|time| time.to_string())),
        ];
        for (name, value) in ours {
            if let Some(value) = value {
                letter.add(name, sendable(&value), &mut room);
            }
        }
        let theirs =
            || message.delivered_attributes().iter().filter(|(name, _)| !attribute::ALL.contains(&name.as_str()));
        let (first, rest): (Vec<_>, Vec<_>) = theirs().partition(|(name, _)| keep.contains(&name.as_str()));
        for (name, value) in first.into_iter().chain(rest) {
            letter.add(name, sendable(value), &mut room);
        }
        letter
    }

    /// The value of an attribute.
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Adds an attribute if it fits. SQS refuses empty ones.
    fn add(&mut self, name: &str, value: String, room: &mut usize) {
        let bytes = name.len() + DATA_TYPE.len() + value.len();
        if value.is_empty() || self.attributes.len() >= MAX_ATTRIBUTES || bytes > *room {
            return;
        }
        *room -= bytes;
        self.attributes.push((name.to_owned(), value));
    }
}

/// What a message's attribute says of the message it was before it became a letter.
pub(crate) fn original<'a>(message: &'a Message, name: &str) -> Option<&'a str> {
    // Without a reason it is no letter of ours, whatever else is called so.
    let attributes = message.delivered_attributes();
    attributes.get(attribute::REASON)?;
    attributes.get(name).map(String::as_str).filter(|value| !value.is_empty())
}

/// The text with `\u{..}` for what SQS refuses: control characters other than tab and line
/// ends, and the two that are no characters.
fn sendable(text: &str) -> String {
    let mut sendable = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' | '\n' | '\r' => sendable.push(c),
            '\0'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => sendable.extend(c.escape_unicode()),
            _ => sendable.push(c),
        }
    }
    sendable
}

/// As much of the text as `bytes` hold.
fn cut(text: &str, bytes: usize) -> &str {
    text.get(..text.floor_char_boundary(bytes)).unwrap_or(text)
}
