//! How calls to AWS are limited: they end before a function's deadline does.

use std::time::Duration;

use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;

/// One request, connecting included. Between a slow first TLS handshake on a small
/// function and a hanging connection.
const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(1500);
/// One call with all its retries. The SDK's own back-off can sleep for 20 s, past the
/// function's deadline.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn timeouts() -> TimeoutConfig {
    TimeoutConfig::builder()
        .connect_timeout(ATTEMPT_TIMEOUT)
        .operation_attempt_timeout(ATTEMPT_TIMEOUT)
        .operation_timeout(OPERATION_TIMEOUT)
        .build()
}

pub(crate) fn retries() -> RetryConfig {
    RetryConfig::standard()
        .with_max_attempts(4)
        .with_initial_backoff(Duration::from_millis(50))
        .with_max_backoff(Duration::from_millis(500))
}

/// The environment's settings, with credentials straight from it if they are there.
pub(crate) async fn settings_from_env() -> aws_config::SdkConfig {
    let mut loader = aws_config::defaults(aws_config::BehaviorVersion::v2026_01_12());
    // A Lambda function has its credentials in its environment. Making the whole chain of
    // other providers ready is a third of the function's start.
    if std::env::var_os("AWS_ACCESS_KEY_ID").is_some() {
        loader = loader.credentials_provider(aws_config::environment::EnvironmentVariableCredentialsProvider::new());
    }
    loader.load().await
}
