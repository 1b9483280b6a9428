//! Where messages come from.

pub mod back_off;
pub mod envelope;
pub mod noise;
#[cfg(feature = "lambda")]
pub mod sqs_lambda;

use self::envelope::BodyFormat;
use self::noise::IgnoreList;
use crate::message::Message;

/// How a source reads what it is delivered.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SourceSettings {
    /// What a body is. Default: the message itself.
    pub body: BodyFormat,
    /// Messages that are acked and take no effect. Default: none.
    pub ignore: IgnoreList,
}

impl SourceSettings {
    /// The message as these settings read it: opened, rejected, ignored, or as it is. Noise
    /// to be ignored need not have the envelope that other messages must have.
    #[must_use]
    pub fn read(&self, message: Message) -> Message {
        let message = self.body.open(message);
        match self.ignore.find(&message.body) {
            Some(noise) => message.ignored(noise.name()),
            None => message,
        }
    }
}
