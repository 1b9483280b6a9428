//! The deployed function's settings, from environment variables.
//!
//! All of them are read before anything is said, and then everything that is wrong is
//! said at once: which variable, which value, and what would be right.

mod queues;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

pub use self::queues::{InvalidQueueUrl, QueueUrl, Queues};
use crate::batch::BatchSettings;
use crate::consumer::{ConsumerSettings, StoreOutage};
use crate::fingerprint::Coverage;
use crate::key::{KeyExpression, Scope};
use crate::source::SourceSettings;
use crate::source::envelope::BodyFormat;
use crate::source::noise::IgnoreList;
use crate::time::Retention;

/// Everything that is wrong with the settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} wrong with the function's configuration:{}", count(.problems), List(.problems))]
pub struct ConfigError {
    problems: Vec<Problem>,
}

fn count(problems: &[Problem]) -> String {
    if problems.len() == 1 { "1 thing is".to_owned() } else { format!("{} things are", problems.len()) }
}

struct List<'a>(&'a [Problem]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|problem| write!(f, "\n  - {problem}"))
    }
}

impl ConfigError {
    /// What is wrong, one entry per variable or rule.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

/// One thing that is wrong with the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The environment variable.
    pub variable: &'static str,
    /// Its value; `None` if it is not set.
    pub value: Option<String>,
    /// What is wrong and what would be right.
    pub advice: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{}=`{}` {}", self.variable, value.escape_debug(), self.advice),
            None => write!(f, "{} is not set: {}", self.variable, self.advice),
        }
    }
}

type Lookup<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Reads settings and gathers what is wrong with them.
pub struct Environment<'a> {
    variable: Box<Lookup<'a>>,
    problems: Vec<Problem>,
}

impl fmt::Debug for Environment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Environment").field("problems", &self.problems).finish_non_exhaustive()
    }
}

impl Environment<'static> {
    /// The process's environment.
    #[must_use]
    pub fn of_process() -> Self {
        Self::new(|name| std::env::var(name).ok())
    }
}

impl<'a> Environment<'a> {
    /// Settings from anywhere. An empty value counts as not set.
    pub fn new(variable: impl Fn(&str) -> Option<String> + 'a) -> Self {
        Self { variable: Box::new(variable), problems: Vec::new() }
    }

    /// The variable's value, if it is set and not empty.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.trim().is_empty())
    }

    /// The variable's value; `right` tells what it should be when it is missing or can't
    /// be read.
    pub fn required<T>(&mut self, name: &'static str, right: &str) -> Option<T>
    where
        T: FromStr<Err: fmt::Display>,
    {
        if self.get(name).is_none() {
            self.problem(name, right);
            return None;
        }
        self.optional(name, right)
    }

    /// The variable's value if it is set.
    pub fn optional<T>(&mut self, name: &'static str, right: &str) -> Option<T>
    where
        T: FromStr<Err: fmt::Display>,
    {
        match self.get(name)?.trim().parse() {
            Ok(value) => Some(value),
            Err(error) => {
                self.problem(name, format!("can't be read ({error}): {right}"));
                None
            }
        }
    }

    /// Notes something wrong with a variable.
    pub fn problem(&mut self, variable: &'static str, advice: impl Into<String>) {
        let value = self.get(variable);
        self.problems.push(Problem { variable, value, advice: advice.into() });
    }

    /// Notes something wrong with a variable whose value may hold a secret (a URL with a
    /// token in it), and does not show it.
    pub fn secret_problem(&mut self, variable: &'static str, advice: impl Into<String>) {
        let value = self.get(variable).map(|_| "(not shown)".to_owned());
        self.problems.push(Problem { variable, value, advice: advice.into() });
    }

    /// What was read, if nothing was wrong with it.
    pub fn finish<T>(mut self, read: Option<T>) -> Result<T, ConfigError> {
        if read.is_none() && self.problems.is_empty() {
            self.problem("(effect)", "the effect could not be made from its settings, and did not say why");
        }
        match read {
            Some(read) if self.problems.is_empty() => Ok(read),
            _ => Err(ConfigError { problems: self.problems }),
        }
    }
}

/// The settings of the deployed function, its effect's own apart.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FunctionConfig {
    /// `TABLE_NAME`.
    pub table: String,
    /// How what the queue delivers is read.
    pub source: SourceSettings,
    /// How messages are told apart and how long they are remembered.
    pub consumer: ConsumerSettings,
    /// How batches are run.
    pub batch: BatchSettings,
    /// The queues that the function calls itself.
    pub queues: Queues,
}

impl FunctionConfig {
    /// Reads the settings; `None` if something is wrong, which `env` then knows.
    ///
    /// | variable | default | meaning |
    /// | --- | --- | --- |
    /// | `TABLE_NAME` | required | the DynamoDB table |
    /// | `VISIBILITY_TIMEOUT_SECONDS` | required | the queue's |
    /// | `MAX_RECEIVE_COUNT` | required | the queue's redrive policy's |
    /// | `RETENTION_BUFFER_SECONDS` | 86400 | remembered longer than the queue redelivers by |
    /// | `BODY` | `raw` | [what a body is](BodyFormat): `raw`, `sns`, `eventbridge` or `auto` |
    /// | `IGNORE_MESSAGES` | none | [noise](IgnoreList) to be acked, such as `s3:TestEvent` |
    /// | `IDEMPOTENCY_KEY` | `/idempotencyKey \| /orderId` | [key expression](crate::key) |
    /// | `IDEMPOTENCY_SCOPE` | `AWS_LAMBDA_FUNCTION_NAME` | first part of every record's id |
    /// | `IDEMPOTENCY_FINGERPRINT` | whole body | pointers, or `off` |
    /// | `MAX_CONCURRENCY` | 10 | groups in flight at once |
    /// | `STORE_OUTAGE` | `reject` | or `process` |
    /// | `DEAD_LETTER_QUEUE_URL` | none | where what a person must look at is [sent at once](crate::dead_letter) |
    /// | `RETRY_BACK_OFF` | `off` | `on`: failed messages wait [as long as they should](crate::source::back_off) |
    /// | `QUEUE_URL` | none | the queue itself; needed for back-off |
    /// | `RETRY_BACK_OFF_BASE_SECONDS` | 10 | the wait after the first receive |
    pub fn from_env(env: &mut Environment<'_>) -> Option<Self> {
        let table = env.required::<String>("TABLE_NAME", "the name of the DynamoDB table");
        let visibility =
            env.required::<u64>("VISIBILITY_TIMEOUT_SECONDS", "the queue's visibility timeout, in seconds");
        let max_receives = positive::<u32>(env, "MAX_RECEIVE_COUNT", true, "the queue's maxReceiveCount, 1 or more");
        let buffer =
            env.optional::<u64>("RETENTION_BUFFER_SECONDS", "a number of seconds, 86400 if not set").unwrap_or(86_400);
        let source = SourceSettings {
            body: env.optional::<BodyFormat>("BODY", "`raw` if not set").unwrap_or_default(),
            ignore: env.optional::<IgnoreList>("IGNORE_MESSAGES", "names with commas between them").unwrap_or_default(),
        };
        let key = env
            .optional::<KeyExpression>("IDEMPOTENCY_KEY", "such as `/idempotencyKey | /orderId`, the default")
            .unwrap_or_default();
        let scope = scope(env);
        let fingerprint = env
            .optional::<Coverage>("IDEMPOTENCY_FINGERPRINT", "`body`, `off`, or pointers such as `/amount,/currency`")
            .unwrap_or_default();
        let max_concurrency =
            positive::<usize>(env, "MAX_CONCURRENCY", false, "how many groups may be in flight, 1 or more");
        let store_outage = env.optional::<StoreOutage>("STORE_OUTAGE", "`reject` or `process`").unwrap_or_default();
        let retention = visibility.zip(max_receives).map(|(visibility, max_receives)| {
            Retention::for_queue(visibility, max_receives, buffer)
                .map_err(|error| {
                    env.problem(
                        "VISIBILITY_TIMEOUT_SECONDS",
                        format!("x MAX_RECEIVE_COUNT + RETENTION_BUFFER_SECONDS can't be the retention: {error}"),
                    );
                })
                .ok()
        });
        let retention = retention.flatten();
        let queues = Queues::from_env(
            env,
            visibility.map_or(Duration::MAX, Duration::from_secs),
            retention,
            max_receives.unwrap_or(1),
        );
        let (max_receives, retention) = (max_receives?, retention?);
        let mut consumer = ConsumerSettings::new(scope?, retention);
        consumer.key = key;
        consumer.fingerprint = fingerprint;
        consumer.store_outage = store_outage;
        let mut batch = BatchSettings { max_receive_count: Some(max_receives), ..BatchSettings::default() };
        batch.max_concurrency = max_concurrency.unwrap_or(batch.max_concurrency);
        Some(Self { table: table?, source, consumer, batch, queues })
    }
}

fn scope(env: &mut Environment<'_>) -> Option<Scope> {
    const RIGHT: &str = "a short name without `#`, the same for as long as the records should be found";
    if env.get("IDEMPOTENCY_SCOPE").is_some() {
        return env.optional("IDEMPOTENCY_SCOPE", RIGHT);
    }
    let Some(function) = env.get("AWS_LAMBDA_FUNCTION_NAME") else {
        env.problem("IDEMPOTENCY_SCOPE", RIGHT);
        return None;
    };
    function.parse().map_err(|error| env.problem("IDEMPOTENCY_SCOPE", format!("{RIGHT} ({error})"))).ok()
}

/// A number that must not be zero.
fn positive<T>(env: &mut Environment<'_>, name: &'static str, required: bool, right: &str) -> Option<T>
where
    T: FromStr<Err: fmt::Display> + Default + PartialEq,
{
    let value = if required { env.required::<T>(name, right) } else { env.optional::<T>(name, right) }?;
    if value == T::default() {
        env.problem(name, format!("is zero: {right}"));
        return None;
    }
    Some(value)
}

/// A number of seconds above zero, or the default.
#[cfg(feature = "http")]
pub(crate) fn seconds(env: &mut Environment<'_>, name: &'static str, default: u64) -> Option<Duration> {
    if env.get(name).is_none() {
        return Some(Duration::from_secs(default));
    }
    positive::<u64>(env, name, true, "a number of seconds, 1 or more").map(Duration::from_secs)
}

impl FromStr for StoreOutage {
    type Err = InvalidStoreOutage;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "reject" => Ok(Self::Reject),
            "process" => Ok(Self::Process),
            _ => Err(InvalidStoreOutage),
        }
    }
}

/// A policy by no such name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such policy")]
pub struct InvalidStoreOutage;
