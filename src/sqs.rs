//! Calls to Amazon SQS (feature `sqs`): the client.

use std::time::Duration;

use aws_config::BehaviorVersion;
use aws_config::environment::EnvironmentVariableCredentialsProvider;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::StalledStreamProtectionConfig;

/// One request, connecting included.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(1500);
/// One call with all its retries. The SDK's own back-off can sleep for 20 s, past the
/// function's deadline.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(5);

/// A client with region, credentials and endpoint from the environment, tight time-outs, and
/// short back-off between retries. It reaches queues of its own region only.
pub async fn client_from_env() -> Client {
    let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12());
    // A Lambda function has its credentials in its environment.
    if std::env::var_os("AWS_ACCESS_KEY_ID").is_some() {
        loader = loader.credentials_provider(EnvironmentVariableCredentialsProvider::new());
    }
    let shared = loader.load().await;
    Client::from_conf(tune(aws_sdk_sqs::config::Builder::from(&shared)).build())
}

/// Sets time-outs and retries that end before a function's deadline does.
#[must_use]
pub fn tune(config: aws_sdk_sqs::config::Builder) -> aws_sdk_sqs::config::Builder {
    config
        .timeout_config(
            TimeoutConfig::builder()
                .connect_timeout(ATTEMPT_TIMEOUT)
                .operation_attempt_timeout(ATTEMPT_TIMEOUT)
                .operation_timeout(OPERATION_TIMEOUT)
                .build(),
        )
        .retry_config(
            RetryConfig::standard()
                .with_max_attempts(4)
                .with_initial_backoff(Duration::from_millis(50))
                .with_max_backoff(Duration::from_millis(500)),
        )
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
