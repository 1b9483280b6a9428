//! A delivered message, whatever broker it came from.

use std::collections::BTreeMap;

use crate::dead_letter::{self, attribute};
use crate::time::EpochMillis;

/// One delivery of one message.
///
/// The same message may be delivered many times, and the same *business event* may
/// come in messages with different ids; telling those apart is the work of the
/// [key](crate::key), so nothing here is used as an identity unless a key expression
/// names it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message {
    /// The broker's id for this message, never empty. A redrive from a dead-letter queue
    /// gives a new one.
    pub id: String,
    /// The message that the sender meant: the body as it was delivered, byte for byte, or
    /// what its [envelope](crate::source::envelope) holds, if the source was told to open
    /// it.
    pub body: String,
    /// The ordering key: messages of one group take effect in the order delivered.
    /// `None` on queues without order; then every message is its own group.
    pub group: Option<String>,
    /// The sender's deduplication id (SQS FIFO).
    pub deduplication_id: Option<String>,
    /// Message attributes that are text (strings and numbers), by name. Those of an
    /// opened envelope are among them.
    pub attributes: BTreeMap<String, String>,
    /// How often the broker has handed this message out, this time included; 1 is the
    /// first delivery. `None` if the broker doesn't count.
    pub receive_count: Option<u32>,
    /// When the broker first handed this message out.
    pub first_received_at: Option<EpochMillis>,
    /// Where the message came from, e.g. the ARN of the queue.
    pub source: Option<String>,
    /// What the broker wants to hear to change this delivery (SQS: the receipt handle). It
    /// lets whoever has it delete the message, so it is not logged.
    pub receipt: Option<String>,
    /// What was delivered, if an envelope was opened.
    delivered: Option<Box<Delivered>>,
    verdict: Option<Verdict>,
}

/// A message with its envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Delivered {
    body: String,
    attributes: BTreeMap<String, String>,
}

/// What a source has found out about a message: it is settled, and no key is looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Reject { reason: String },
    Ignore { what: String },
}

impl Message {
    /// A message with an id and a body, and nothing else known about it.
    #[must_use]
    pub fn new(id: impl Into<String>, body: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            body: body.into(),
            group: None,
            deduplication_id: None,
            attributes: BTreeMap::new(),
            receive_count: None,
            first_received_at: None,
            source: None,
            receipt: None,
            delivered: None,
            verdict: None,
        }
    }

    /// The id that the message had before it went through the dead-letter queue; its own if
    /// it never did.
    #[must_use]
    pub fn original_id(&self) -> &str {
        dead_letter::original(self, attribute::MESSAGE_ID).unwrap_or(&self.id)
    }

    /// The deduplication id that the message had before it went through the dead-letter
    /// queue; its own if it never did.
    #[must_use]
    pub fn original_deduplication_id(&self) -> Option<&str> {
        dead_letter::original(self, attribute::DEDUPLICATION_ID).or(self.deduplication_id.as_deref())
    }

    /// The body as it was delivered, byte for byte, with its envelope: what whoever passes
    /// the message on (to a dead-letter queue, say) must send.
    #[must_use]
    pub fn delivered_body(&self) -> &str {
        self.delivered.as_ref().map_or(&self.body, |delivered| &delivered.body)
    }

    /// The attributes that came with the delivered body, without those of an envelope.
    #[must_use]
    pub fn delivered_attributes(&self) -> &BTreeMap<String, String> {
        self.delivered.as_ref().map_or(&self.attributes, |delivered| &delivered.attributes)
    }

    /// The same message with its envelope opened: what is inside is its body, and what stands
    /// on it goes before attributes of the same name. What was
    /// [delivered](Self::delivered_body) is kept.
    #[must_use]
    pub fn opened(mut self, body: impl Into<String>, attributes: BTreeMap<String, String>) -> Self {
        let delivered =
            Delivered { body: std::mem::replace(&mut self.body, body.into()), attributes: self.attributes.clone() };
        self.delivered.get_or_insert_with(|| Box::new(delivered));
        self.attributes.extend(attributes);
        self
    }

    /// The same message, rejected by its source: for a body that can't be what the sender
    /// meant. It is reported as [`Outcome::Rejected`](crate::outcome::Outcome::Rejected)
    /// in its turn. The reason is logged, so it should not quote the body.
    #[must_use]
    pub fn rejected(mut self, reason: impl Into<String>) -> Self {
        self.verdict = Some(Verdict::Reject { reason: reason.into() });
        self
    }

    /// The same message, known to its source as noise that nobody wants an effect of. It is
    /// acked as [`Outcome::Ignored`](crate::outcome::Outcome::Ignored) in its turn.
    #[must_use]
    pub fn ignored(mut self, what: impl Into<String>) -> Self {
        self.verdict = Some(Verdict::Ignore { what: what.into() });
        self
    }

    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref()
    }

    /// The same message in a group.
    #[must_use]
    pub fn with_group(mut self, group: impl Into<String>) -> Self {
        self.group = Some(group.into());
        self
    }

    /// The same message with one more attribute.
    #[must_use]
    pub fn with_attribute(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.attributes.insert(name.into(), value.into());
        self
    }

    /// The same message with a deduplication id.
    #[must_use]
    pub fn with_deduplication_id(mut self, id: impl Into<String>) -> Self {
        self.deduplication_id = Some(id.into());
        self
    }

    /// The same message on its `count`-th delivery.
    #[must_use]
    pub fn with_receive_count(mut self, count: u32) -> Self {
        self.receive_count = Some(count);
        self
    }
}
