//! Visibility in an Amazon SQS queue.

use aws_sdk_sqs::Client;
use aws_sdk_sqs::error::ProvideErrorMetadata;
use aws_sdk_sqs::types::ChangeMessageVisibilityBatchRequestEntry as Entry;

use super::{Change, Refusal, Visibility, VisibilityError};
use crate::config::QueueUrl;
use futures_util::future::BoxFuture;

/// A queue on SQS.
#[derive(Debug, Clone)]
pub struct SqsVisibility {
    client: Client,
    url: QueueUrl,
}

impl SqsVisibility {
    /// That queue. The client must be of the queue's region; see
    /// [`client_from_env`](crate::sqs::client_from_env) for the settings that matter.
    #[must_use]
    pub fn new(client: Client, url: QueueUrl) -> Self {
        Self { client, url }
    }
}

impl Visibility for SqsVisibility {
    fn change<'a>(&'a self, changes: &'a [Change]) -> BoxFuture<'a, Result<Vec<Refusal>, VisibilityError>> {
        Box::pin(async move {
            let mut request = self.client.change_message_visibility_batch().queue_url(self.url.as_str());
            for (number, change) in changes.iter().enumerate() {
                let seconds = i32::try_from(change.visibility.as_secs()).unwrap_or(i32::MAX);
                let entry = Entry::builder()
                    .id(number.to_string())
                    .receipt_handle(&change.receipt)
                    .visibility_timeout(seconds)
                    .build()
                    .map_err(|error| VisibilityError::Failed(error.into()))?;
                request = request.entries(entry);
            }
            let answer = request.send().await.map_err(|error| match error.code() {
                Some("AccessDenied" | "AccessDeniedException") => VisibilityError::Denied(error.into()),
                _ => VisibilityError::Failed(error.into()),
            })?;
            let refusal = |(number, change): (usize, &Change)| {
                let id = number.to_string();
                let reason = match answer.failed().iter().find(|failed| failed.id() == id) {
                    Some(failed) => format!("{}: {}", failed.code(), failed.message().unwrap_or("(no message)")),
                    None if answer.successful().iter().any(|changed| changed.id() == id) => return None,
                    None => "SQS did not say what became of it".to_owned(),
                };
                Some(Refusal { message_id: change.message_id.clone(), reason })
            };
            Ok(changes.iter().enumerate().filter_map(refusal).collect())
        })
    }
}
