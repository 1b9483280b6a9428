//! The queues that the function calls itself, and when.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::{Environment, positive};
use crate::source::back_off::BackOffSettings;
use crate::time::Retention;

const DEAD_LETTERS: &str = "DEAD_LETTER_QUEUE_URL";
const QUEUE: &str = "QUEUE_URL";
const BACK_OFF: &str = "RETRY_BACK_OFF";
const BASE: &str = "RETRY_BACK_OFF_BASE_SECONDS";

const URL: &str = "a queue's URL, such as https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo";

const DEFAULT_BASE: Duration = Duration::from_secs(10);

/// The queues that the function calls itself. Lambda's own work, receiving and deleting, is
/// not among it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Queues {
    /// `DEAD_LETTER_QUEUE_URL`: where to send what a person must look at.
    pub dead_letters: Option<QueueUrl>,
    /// With `RETRY_BACK_OFF=on`: the queue of `QUEUE_URL`, and how long its failed messages
    /// wait.
    pub back_off: Option<(QueueUrl, BackOffSettings)>,
}

impl Queues {
    /// Reads the settings; what is wrong with them `env` then knows.
    pub(super) fn from_env(
        env: &mut Environment<'_>,
        visibility: Duration,
        retention: Option<Retention>,
        max_receives: u32,
    ) -> Self {
        let dead_letters = queue_url(env, DEAD_LETTERS);
        let queue = queue_url(env, QUEUE);
        let switch = env.optional::<Switch>(BACK_OFF, "`on` or `off`, the default").unwrap_or(Switch::Off);
        let base = positive::<u64>(env, BASE, false, "a number of seconds, 1 or more, 10 if not set");
        let base = base.map_or_else(|| DEFAULT_BASE.min(visibility), Duration::from_secs);
        if let (Some(letters), Some(queue)) = (&dead_letters, &queue) {
            if letters == queue {
                env.problem(DEAD_LETTERS, "is the function's own queue: what is given up would come back for ever");
            } else if letters.is_fifo() != queue.is_fifo() {
                env.problem(
                    DEAD_LETTERS,
                    "is not of the same kind as QUEUE_URL: the dead-letter queue of a FIFO queue is FIFO, and that of a \
                     standard queue is standard",
                );
            }
        }
        if base > visibility {
            env.problem(BASE, "is more than VISIBILITY_TIMEOUT_SECONDS, which no back-off exceeds");
        }
        let on = switch == Switch::On;
        if on && env.get(QUEUE).is_none() {
            env.problem(QUEUE, format!("RETRY_BACK_OFF=on needs it: {URL}"));
        }
        for (variable, used) in [(DEAD_LETTERS, dead_letters.is_some()), (BACK_OFF, on)] {
            if used && cfg!(not(feature = "sqs")) {
                env.problem(variable, "needs calls to SQS: build the function with the feature `sqs`, or leave it out");
            }
        }
        let back_off = queue
            .zip(retention)
            .filter(|_| on)
            .map(|(queue, retention)| (queue, BackOffSettings::for_queue(base, visibility, retention, max_receives)));
        Self { dead_letters, back_off }
    }
}

/// The variable's value if it is set. One that can't be read is shown, unless it looks as if
/// somebody had put a password or a token into it.
fn queue_url(env: &mut Environment<'_>, name: &'static str) -> Option<QueueUrl> {
    let text = env.get(name)?;
    if text.contains(['@', '?']) {
        env.secret_problem(name, format!("has an `@` or a `?` in it, which no queue's URL has: {URL}"));
        return None;
    }
    env.optional(name, URL)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Switch {
    On,
    Off,
}

#[derive(Debug, thiserror::Error)]
#[error("neither on nor off")]
struct InvalidSwitch;

impl FromStr for Switch {
    type Err = InvalidSwitch;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err(InvalidSwitch),
        }
    }
}

/// The URL of a queue, as `GetQueueUrl` and `!Ref` of a template give it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueUrl(String);

/// A text that is no queue's URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no queue's URL")]
pub struct InvalidQueueUrl;

impl QueueUrl {
    /// The URL.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the queue keeps an order.
    #[must_use]
    pub fn is_fifo(&self) -> bool {
        self.0.rsplit('.').next() == Some("fifo")
    }
}

/// `https`, or `http` as emulators have it: the URL only names the queue, and requests go to
/// the client's endpoint. A host, and then account and name.
impl FromStr for QueueUrl {
    type Err = InvalidQueueUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).ok_or(InvalidQueueUrl)?;
        let parts: Vec<&str> = rest.split('/').collect();
        let plain = |part: &&str| {
            !part.is_empty() && part.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '?' | '#' | '@' | '\\'))
        };
        if parts.len() >= 3 && parts.iter().all(plain) { Ok(Self(text.to_owned())) } else { Err(InvalidQueueUrl) }
    }
}

impl fmt::Display for QueueUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_url_has_a_host_an_account_and_a_name() {
        for (text, fifo) in [
            ("https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo", Some(true)),
            ("https://sqs.eu-central-1.amazonaws.com/123456789012/orders", Some(false)),
            ("http://127.0.0.1:4566/000000000000/orders-dlq.fifo", Some(true)),
            ("http://sqs.us-east-1.localhost.localstack.cloud:4566/000000000000/orders.fifo", Some(true)),
            ("https://localhost:4566/queue/us-east-1/000000000000/orders", Some(false)),
            ("arn:aws:sqs:eu-central-1:123456789012:orders.fifo", None),
            ("orders.fifo", None),
            ("https://sqs.eu-central-1.amazonaws.com/123456789012/", None),
            ("https://sqs.eu-central-1.amazonaws.com", None),
            ("https:///123456789012/orders", None),
            ("https://user@example.com/123456789012/orders", None),
            ("https://example.com/123456789012/orders?a=b", None),
            ("https://example.com/123456789012/or ders", None),
            ("ftp://example.com/123456789012/orders", None),
            ("", None),
        ] {
            assert_eq!(text.parse::<QueueUrl>().ok().map(|url| url.is_fifo()), fifo, "{text}");
        }
    }
}
