//! Calls to Amazon SQS (feature `sqs`): the client.

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::StalledStreamProtectionConfig;

use crate::aws;

/// A client with region, credentials and endpoint from the environment, tight time-outs, and
/// short back-off between retries. It reaches queues of its own region only.
pub async fn client_from_env() -> Client {
    let shared = aws::settings_from_env().await;
    Client::from_conf(tune(aws_sdk_sqs::config::Builder::from(&shared)).build())
}

/// Sets time-outs and retries that end before a function's deadline does.
#[must_use]
pub fn tune(config: aws_sdk_sqs::config::Builder) -> aws_sdk_sqs::config::Builder {
    config
        .timeout_config(aws::timeouts())
        .retry_config(aws::retries())
        // For streams of megabytes; answers here are one small JSON text.
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
}

/// What a refusal by SQS asks of a person.
pub(crate) fn advice(code: Option<&str>) -> &'static str {
    match code {
        Some("AccessDenied" | "AccessDeniedException") => ": the function's role must allow it",
        Some("AWS.SimpleQueueService.NonExistentQueue" | "QueueDoesNotExist") => {
            ": check the queue's URL and the region"
        }
        _ => "",
    }
}
