//! Envelopes: what SNS and EventBridge put around a message on its way to a queue.
//!
//! Which one to open is said by a [`BodyFormat`], and nothing is guessed unless it says
//! [`Auto`](BodyFormat::Auto). What is inside becomes the message's
//! [`body`](Message::body): key, fingerprint and effect go by it, so that one message is
//! the same with an envelope and without. [`Message::delivered_body`] keeps the whole.
//! What stands on the envelope becomes attributes, within reach of a key expression:
//!
//! | attribute | is |
//! | --- | --- |
//! | `sns.message-id` | the notification's `MessageId`, one for each call of `Publish` |
//! | `sns.topic-arn` | its `TopicArn` |
//! | `sns.subject` | its `Subject`, if it has one |
//! | any other name | the `MessageAttributes` of that name, unless it is binary |
//! | `eventbridge.id` | the event's `id` |
//! | `eventbridge.detail-type` | its `detail-type` |
//! | `eventbridge.source` | its `source` |
//!
//! The first three and the last three names belong to the envelope: unless the format is
//! `raw`, an attribute that a sender gave such a name is dropped, whether the message has
//! an envelope or not. Otherwise an attribute of the envelope goes before one of the
//! queue's message, because the queue's sender is the service and the envelope's is whoever
//! wrote the message.
//!
//! Only the outermost envelope is opened.
//!
//! # What an envelope is
//!
//! The body must have the whole shape, and be JSON without duplicate members:
//!
//! * SNS: an object with the strings `Type`, which is `Notification`, `MessageId`,
//!   `TopicArn`, which is the ARN of an SNS topic, and `Message`.
//! * EventBridge: an object with the strings `version`, `id`, `detail-type`, `source`,
//!   `account`, `time` and `region`, the array `resources` and the object `detail`. The
//!   body is `detail` as it is written there.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::ErrorChain;
use crate::json::Json;
use crate::message::Message;

/// Attributes that say what stands on an envelope.
const RESERVED: [&str; 6] = [
    "sns.message-id",
    "sns.topic-arn",
    "sns.subject",
    "eventbridge.id",
    "eventbridge.detail-type",
    "eventbridge.source",
];

/// What a body is as the queue delivers it; the setting `BODY`.
///
/// ```
/// use idempotent_consumer::message::Message;
/// use idempotent_consumer::source::envelope::BodyFormat;
///
/// let notification = r#"{"Type": "Notification", "MessageId": "n-1", "Subject": "paid",
///     "TopicArn": "arn:aws:sns:eu-central-1:123456789012:orders", "Message": "{\"orderId\": 7}"}"#;
/// let message = BodyFormat::Sns.open(Message::new("m-1", notification));
/// assert_eq!(message.body, r#"{"orderId": 7}"#);
/// assert_eq!(message.attributes["sns.subject"], "paid");
/// assert_eq!(message.delivered_body(), notification);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BodyFormat {
    /// The message itself: from a queue without SNS or EventBridge before it, from a
    /// subscription with raw message delivery, or from a rule whose target has an input
    /// path or transformer. Written `raw`.
    #[default]
    Raw,
    /// An SNS notification. Anything else is rejected. Written `sns`.
    Sns,
    /// An EventBridge event. Anything else is rejected. Written `eventbridge`.
    EventBridge,
    /// An SNS notification or an EventBridge event if it has the whole shape of one, else
    /// the message itself. Written `auto`.
    ///
    /// For a queue that gets messages both ways, say while raw delivery is being turned on.
    /// It believes the shape: a message *about* notifications, which carries a whole one
    /// as its body, is opened too, and then two that differ only in their envelope are
    /// duplicates. And whoever may send to the queue may write `sns.topic-arn`.
    Auto,
}

impl BodyFormat {
    /// The message with its envelope opened, or rejected if it doesn't have the one that
    /// it must have.
    #[must_use]
    pub fn open(self, mut message: Message) -> Message {
        if self == Self::Raw {
            return message;
        }
        message.attributes.retain(|name, _| !RESERVED.contains(&name.as_str()));
        let json = Json::parse(&message.body);
        let members = match &json {
            Ok(Json::Object(members)) => Ok(members),
            Ok(_) => Err(Mismatch::Shape("it is no JSON object".to_owned())),
            Err(error) => Err(Mismatch::Shape(ErrorChain(error).to_string())),
        };
        let contents = members.and_then(|members| match self {
            Self::Sns => sns(members),
            Self::EventBridge => eventbridge(members, &message.body),
            Self::Raw | Self::Auto => match sns(members) {
                Err(Mismatch::Shape(_)) => eventbridge(members, &message.body),
                sns => sns,
            },
        });
        match (contents, self) {
            (Ok(Contents { body, attributes }), _) => message.opened(body, attributes),
            (Err(Mismatch::Confirmation(kind)), _) => message.rejected(format!(
                "the body is SNS's own `{kind}`, and no notification: a person must decide about its subscription"
            )),
            (Err(Mismatch::Shape(why)), Self::Sns) => message.rejected(format!(
                "the body is no SNS notification: {why}; for raw message delivery set BODY to `raw` or `auto`"
            )),
            (Err(Mismatch::Shape(why)), Self::EventBridge) => message.rejected(format!(
                "the body is no EventBridge event: {why}; for messages that come as they are set BODY to `raw` or \
                 `auto`"
            )),
            (Err(Mismatch::Shape(_)), Self::Raw | Self::Auto) => message,
        }
    }
}

/// What is in an envelope, and what stands on it.
struct Contents {
    body: String,
    attributes: BTreeMap<String, String>,
}

enum Mismatch {
    /// Not this kind of envelope, and why not.
    Shape(String),
    /// Sent by SNS about the subscription.
    Confirmation(&'static str),
}

type Members = BTreeMap<String, Json>;

fn sns(members: &Members) -> Result<Contents, Mismatch> {
    let kind = text(members, "Type")?;
    let topic = text(members, "TopicArn")?;
    if !is_topic(topic) {
        return Err(Mismatch::Shape("its `TopicArn` is not the ARN of an SNS topic".to_owned()));
    }
    let (id, body) = (text(members, "MessageId")?, text(members, "Message")?);
    match kind {
        "Notification" => {}
        "SubscriptionConfirmation" => return Err(Mismatch::Confirmation("SubscriptionConfirmation")),
        "UnsubscribeConfirmation" => return Err(Mismatch::Confirmation("UnsubscribeConfirmation")),
        _ => return Err(Mismatch::Shape("its `Type` is not `Notification`".to_owned())),
    }
    let mut attributes = BTreeMap::new();
    if let Some(Json::Object(named)) = members.get("MessageAttributes") {
        attributes.extend(named.iter().filter_map(|(name, attribute)| {
            let Json::Object(attribute) = attribute else {
                return None;
            };
            match (attribute.get("Type"), attribute.get("Value")) {
                (Some(Json::String(kind)), Some(Json::String(value))) if kind != "Binary" => {
                    Some((name.clone(), value.clone()))
                }
                _ => None,
            }
        }));
        attributes.retain(|name, _| !RESERVED.contains(&name.as_str()));
    }
    attributes.insert("sns.message-id".to_owned(), id.to_owned());
    attributes.insert("sns.topic-arn".to_owned(), topic.to_owned());
    if let Ok(subject) = text(members, "Subject") {
        attributes.insert("sns.subject".to_owned(), subject.to_owned());
    }
    Ok(Contents { body: body.to_owned(), attributes })
}

/// `arn:PARTITION:sns:REGION:ACCOUNT:NAME`
fn is_topic(arn: &str) -> bool {
    let mut parts = arn.split(':');
    parts.next() == Some("arn") && parts.nth(1) == Some("sns") && parts.count() == 3
}

fn eventbridge(members: &Members, body: &str) -> Result<Contents, Mismatch> {
    /// The detail as it is written: to read it and write it again would change numbers.
    #[derive(Deserialize)]
    struct Event<'a> {
        #[serde(borrow)]
        detail: &'a RawValue,
    }

    for name in ["version", "account", "time", "region"] {
        text(members, name)?;
    }
    let attributes = ["id", "detail-type", "source"]
        .into_iter()
        .map(|name| Ok((format!("eventbridge.{name}"), text(members, name)?.to_owned())))
        .collect::<Result<_, Mismatch>>()?;
    match (members.get("resources"), members.get("detail")) {
        (Some(Json::Array(_)), Some(Json::Object(_))) => {}
        (Some(Json::Array(_)), _) => return Err(Mismatch::Shape("its `detail` is no object".to_owned())),
        _ => return Err(Mismatch::Shape("its `resources` is no array".to_owned())),
    }
    let event: Event<'_> =
        serde_json::from_str(body).map_err(|_| Mismatch::Shape("its `detail` can't be read".to_owned()))?;
    Ok(Contents { body: event.detail.get().to_owned(), attributes })
}

fn text<'a>(members: &'a Members, name: &str) -> Result<&'a str, Mismatch> {
    match members.get(name) {
        Some(Json::String(text)) => Ok(text),
        Some(_) => Err(Mismatch::Shape(format!("its `{name}` is no string"))),
        None => Err(Mismatch::Shape(format!("it has no `{name}`"))),
    }
}

impl FromStr for BodyFormat {
    type Err = InvalidBodyFormat;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "raw" => Ok(Self::Raw),
            "sns" => Ok(Self::Sns),
            "eventbridge" => Ok(Self::EventBridge),
            "auto" => Ok(Self::Auto),
            _ => Err(InvalidBodyFormat),
        }
    }
}

impl fmt::Display for BodyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Sns => "sns",
            Self::EventBridge => "eventbridge",
            Self::Auto => "auto",
        })
    }
}

/// A body format by no such name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such format: there are `raw`, `sns`, `eventbridge` and `auto`")]
pub struct InvalidBodyFormat;
