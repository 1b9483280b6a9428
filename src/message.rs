//! A delivered message, whatever broker it came from.

use std::collections::BTreeMap;

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
    /// The body as it was delivered, byte for byte.
    pub body: String,
    /// The ordering key: messages of one group take effect in the order delivered.
    /// `None` on queues without order; then every message is its own group.
    pub group: Option<String>,
    /// The sender's deduplication id (SQS FIFO).
    pub deduplication_id: Option<String>,
    /// Message attributes that are text (strings and numbers), by name.
    pub attributes: BTreeMap<String, String>,
    /// How often the broker has handed this message out, this time included; 1 is the
    /// first delivery. `None` if the broker doesn't count.
    pub receive_count: Option<u32>,
    /// When the broker first handed this message out.
    pub first_received_at: Option<EpochMillis>,
    /// Where the message came from, e.g. the ARN of the queue.
    pub source: Option<String>,
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
        }
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
