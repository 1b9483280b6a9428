//! The HTTP effect's settings, and what can be wrong with them.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use reqwest::Url;

use crate::config::{Environment, seconds};
use crate::effect::Recovery;
use crate::error::BoxError;

const URL: &str = "EFFECT_URL";
const TIMEOUT: &str = "EFFECT_TIMEOUT_SECONDS";
const RECOVERY: &str = "EFFECT_RECOVERY";
const ALLOW_HTTP: &str = "EFFECT_ALLOW_HTTP";
const QUOTE_ANSWERS: &str = "EFFECT_QUOTE_ANSWERS";
const VISIBILITY: &str = "VISIBILITY_TIMEOUT_SECONDS";

const DEFAULT_TIMEOUT_SECONDS: u64 = 10;

/// AWS asks for a visibility timeout of at least six function timeouts.
const VISIBILITY_PER_TIMEOUT: u64 = 6;

/// What an [`HttpEffect`](super::HttpEffect) is made from.
#[derive(Clone)]
#[non_exhaustive]
pub struct HttpEffectSettings {
    /// Where to POST. `https`, unless the host is this one; without user, password and
    /// fragment. Its path and query are never logged.
    pub url: String,
    /// Time for a whole request, from the connection to the end of the answer. Default
    /// 10 s.
    pub timeout: Duration,
    /// What a takeover may do.
    pub recovery: Recovery,
    /// Allows plain `http` to any host. Default false.
    pub allow_http: bool,
    /// Quotes the first 200 characters of an answer that is no result in the reason, and so
    /// in the log, the record and the dead letter. For targets that never repeat what they
    /// were sent. Default false.
    pub quote_answers: bool,
}

/// Without the URL, which may hold secrets.
impl fmt::Debug for HttpEffectSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpEffectSettings")
            .field("timeout", &self.timeout)
            .field("recovery", &self.recovery)
            .field("allow_http", &self.allow_http)
            .field("quote_answers", &self.quote_answers)
            .finish_non_exhaustive()
    }
}

/// An [`HttpEffect`](super::HttpEffect) can't be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpEffectError {
    /// Its settings are wrong, in all these ways.
    #[error("the HTTP effect's settings are wrong: {}", list(.0))]
    Settings(Vec<InvalidSetting>),
    /// The client can't be made, e.g. because this machine has no root certificates.
    #[error("the HTTP client can't be made")]
    Client(#[source] BoxError),
}

fn list(problems: &[InvalidSetting]) -> String {
    let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
    problems.join("; ")
}

/// One thing that is wrong with the HTTP effect's settings. Never quotes the URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSetting {
    /// The URL can't be read.
    #[error("the URL can't be read: it should look like `https://example.com/orders`")]
    NotUrl,
    /// The URL is neither `https` nor `http`.
    #[error("the URL's scheme must be `https`")]
    Scheme,
    /// The URL is plain `http` to another host.
    #[error(
        "the URL is plain `http`, so anyone on the way could read and change messages: use `https`, or set \
         EFFECT_ALLOW_HTTP=true if the network between is your own"
    )]
    PlainHttp,
    /// The URL has a user or a password in it.
    #[error("the URL has a user or password in it, which would not be sent: leave them out")]
    UserInfo,
    /// The URL has a fragment.
    #[error("the URL has a fragment (`#...`), which would not be sent: leave it out, or write `%23` for a `#`")]
    Fragment,
    /// The time limit is zero.
    #[error("the time limit is zero: give it a second or more")]
    ZeroTimeout,
}

impl HttpEffectSettings {
    /// The defaults for a URL and the recovery that its target supports.
    #[must_use]
    pub fn new(url: impl Into<String>, recovery: Recovery) -> Self {
        let timeout = Duration::from_secs(DEFAULT_TIMEOUT_SECONDS);
        Self { url: url.into(), timeout, recovery, allow_http: false, quote_answers: false }
    }

    /// Reads all variables before giving up on any.
    pub(super) fn from_env(env: &mut Environment<'_>) -> Option<Self> {
        let url = env.required::<String>(URL, "where to POST each message, such as `https://example.com/orders`");
        let allow_http = env.optional::<bool>(ALLOW_HTTP, "`true` or `false`");
        let url = url.filter(|url| {
            let (_, problems) = check_url(url, allow_http.unwrap_or_default());
            for problem in &problems {
                note(env, problem.to_string());
            }
            problems.is_empty()
        });
        let quote_answers = env.optional::<bool>(QUOTE_ANSWERS, "`true` or `false`");
        let timeout = seconds(env, TIMEOUT, DEFAULT_TIMEOUT_SECONDS).filter(|timeout| fits(env, *timeout));
        let recovery = env.required::<Recovery>(
            RECOVERY,
            "`rerun` if the target deduplicates by Idempotency-Key, `verify` if it can be asked with a GET, else `park`",
        );
        let mut settings = Self::new(url?, recovery?);
        settings.timeout = timeout?;
        settings.allow_http = allow_http.unwrap_or_default();
        settings.quote_answers = quote_answers.unwrap_or_default();
        Some(settings)
    }
}

/// The URL, if nothing is wrong.
pub(super) fn check(url: &str, timeout: Duration, allow_http: bool) -> Result<Url, HttpEffectError> {
    let (url, mut problems) = check_url(url, allow_http);
    if timeout.is_zero() {
        problems.push(InvalidSetting::ZeroTimeout);
    }
    match url {
        Some(url) if problems.is_empty() => Ok(url),
        _ => Err(HttpEffectError::Settings(problems)),
    }
}

/// Notes something wrong with the URL.
pub(super) fn note(env: &mut Environment<'_>, advice: String) {
    env.secret_problem(URL, advice);
}

/// Whether the effect's time limit is less than a sixth of the visibility timeout: the
/// function's timeout is at most that, and must leave time to record the outcome.
fn fits(env: &mut Environment<'_>, timeout: Duration) -> bool {
    let visibility = env.get(VISIBILITY).and_then(|text| text.trim().parse::<u64>().ok());
    let Some(visibility) = visibility else { return true };
    let most = visibility.saturating_sub(1) / VISIBILITY_PER_TIMEOUT;
    if timeout.as_secs() <= most {
        return true;
    }
    let right = match most {
        0 => format!("raise {VISIBILITY}"),
        most => format!("at most {most}, or raise {VISIBILITY}"),
    };
    let advice = format!(
        "{} s is not less than a sixth of {VISIBILITY} ({visibility}), and the function's own timeout may not be \
         more than that: {right}",
        timeout.as_secs()
    );
    env.problem(TIMEOUT, advice);
    false
}

/// The URL if it can be read, and all that is wrong with it.
fn check_url(text: &str, allow_http: bool) -> (Option<Url>, Vec<InvalidSetting>) {
    let Ok(url) = Url::parse(text) else { return (None, vec![InvalidSetting::NotUrl]) };
    let mut problems = Vec::new();
    match url.scheme() {
        "https" => {}
        "http" if allow_http || is_this_host(&url) => {}
        "http" => problems.push(InvalidSetting::PlainHttp),
        _ => problems.push(InvalidSetting::Scheme),
    }
    if !url.username().is_empty() || url.password().is_some() {
        problems.push(InvalidSetting::UserInfo);
    }
    if url.fragment().is_some() {
        problems.push(InvalidSetting::Fragment);
    }
    (Some(url), problems)
}

fn is_this_host(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    host == "localhost"
        || host.parse().is_ok_and(|ip: Ipv4Addr| ip.is_loopback())
        || v6.is_some_and(|v6| v6.parse().is_ok_and(|ip: Ipv6Addr| ip.is_loopback()))
}
