//! Why a message has no key.

use crate::json::{Json, JsonError};

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
    /// A JMESPath expression can't be evaluated for this message.
    #[error("`{part}` can't be evaluated: {problem}")]
    Evaluation {
        /// The part of the key expression.
        part: String,
        /// What is wrong.
        problem: String,
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
    pub(super) fn around(body: &Json) -> Option<Self> {
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
                 set BODY=sns, or turn on raw message delivery on the subscription"
            }
            Some(Self::EventBridge) => {
                "; it looks like an EventBridge event with the message inside: \
                 set BODY=eventbridge, or use a key expression such as `/detail/orderId`"
            }
        }
    }
}
