//! Dead letters in an Amazon SQS queue.

use aws_sdk_sqs::Client;
use aws_sdk_sqs::error::ProvideErrorMetadata;
use aws_sdk_sqs::types::MessageAttributeValue;

use super::{DATA_TYPE, DeadLetter, DeadLetterError, DeadLetterQueue};
use crate::config::QueueUrl;
use crate::sqs::advice;
use crate::store::BoxFuture;

/// A dead-letter queue on SQS.
///
/// A FIFO queue gets each letter in its message's group; one without a group is a group of
/// its own there. A standard queue is told of no group.
#[derive(Debug, Clone)]
pub struct SqsDeadLetterQueue {
    client: Client,
    url: QueueUrl,
}

impl SqsDeadLetterQueue {
    /// That queue. The client must be of the queue's region; see
    /// [`client_from_env`](crate::sqs::client_from_env) for the settings that matter.
    #[must_use]
    pub fn new(client: Client, url: QueueUrl) -> Self {
        Self { client, url }
    }
}

impl DeadLetterQueue for SqsDeadLetterQueue {
    fn send<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            let mut request = self.client.send_message().queue_url(self.url.as_str()).message_body(&letter.body);
            if self.url.is_fifo() {
                request = request
                    .message_group_id(letter.group.as_ref().unwrap_or(&letter.message_id))
                    .message_deduplication_id(&letter.deduplication_id);
            }
            for (name, value) in &letter.attributes {
                let value = MessageAttributeValue::builder().data_type(DATA_TYPE).string_value(value).build();
                let value =
                    value.map_err(|error| DeadLetterError::new("the letter can't be made").with_source(error))?;
                request = request.message_attributes(name, value);
            }
            match request.send().await {
                Ok(_) => Ok(()),
                Err(error) => {
                    let advice = advice(error.code());
                    Err(DeadLetterError::new(format!("SQS did not take the dead letter{advice}")).with_source(error))
                }
            }
        })
    }
}
