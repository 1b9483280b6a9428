//! SQS FIFO events as Lambda delivers them.
#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};

pub const QUEUE_ARN: &str = "arn:aws:sqs:eu-central-1:123456789012:orders.fifo";

/// One message of an event.
#[derive(Debug, Clone)]
pub struct Record {
    pub id: String,
    body: String,
    group: Option<String>,
    receive_count: u32,
    attributes: Vec<(String, String)>,
}

impl Record {
    /// A message with that body in the group `g`, on its first delivery.
    pub fn new(id: &str, body: impl Into<String>) -> Self {
        Self {
            id: id.to_owned(),
            body: body.into(),
            group: Some("g".to_owned()),
            receive_count: 1,
            attributes: Vec::new(),
        }
    }

    /// An order; its message has the id `message-` and the order's id.
    pub fn order(id: &str) -> Self {
        Self::new(&format!("message-{id}"), format!(r#"{{"orderId":"{id}", "amount":1990.0}}"#))
    }

    pub fn with_id(mut self, id: &str) -> Self {
        id.clone_into(&mut self.id);
        self
    }

    pub fn in_group(mut self, group: &str) -> Self {
        self.group = Some(group.to_owned());
        self
    }

    pub fn group(&self) -> Option<&str> {
        self.group.as_deref()
    }

    pub fn body(&self) -> &str {
        &self.body
    }

    /// The message's `count`-th delivery.
    pub fn received(mut self, count: u32) -> Self {
        self.receive_count = count;
        self
    }

    /// The message attribute of that name.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// One more message attribute.
    pub fn with_attribute(mut self, name: &str, value: &str) -> Self {
        self.attributes.push((name.to_owned(), value.to_owned()));
        self
    }

    fn to_json(&self) -> Value {
        let mut attributes = json!({
            "ApproximateReceiveCount": self.receive_count.to_string(),
            "SentTimestamp": "1767984756777",
            "SequenceNumber": "18887900936295007418",
            "SenderId": "AIDAIENQZJOLO23YVJ4VO",
            "MessageDeduplicationId": format!("deduplication-{}", self.id),
            "ApproximateFirstReceiveTimestamp": "1767984757959",
        });
        if let Some(group) = &self.group {
            attributes.as_object_mut().unwrap().insert("MessageGroupId".to_owned(), json!(group));
        }
        let message_attributes: serde_json::Map<String, Value> = self
            .attributes
            .iter()
            .map(|(name, value)| {
                let value = json!({
                    "stringValue": value,
                    "stringListValues": [],
                    "binaryListValues": [],
                    "dataType": "String",
                });
                (name.clone(), value)
            })
            .collect();
        json!({
            "messageId": self.id,
            "receiptHandle": format!("receipt-{}", self.id),
            "body": self.body,
            "attributes": attributes,
            "messageAttributes": message_attributes,
            "md5OfBody": "7b270e59b47ff90a553787216d55d91d",
            "eventSource": "aws:sqs",
            "eventSourceARN": QUEUE_ARN,
            "awsRegion": "eu-central-1",
        })
    }
}

/// An event of these messages.
pub fn event<'a>(records: impl IntoIterator<Item = &'a Record>) -> Value {
    json!({ "Records": records.into_iter().map(Record::to_json).collect::<Vec<_>>() })
}
