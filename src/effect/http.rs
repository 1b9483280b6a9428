//! The HTTP effect (feature `http`): POSTs each message to a URL, once.
//!
//! The message's [body](Message::body) is sent byte for byte (of an SNS or EventBridge
//! envelope that the source has opened, what is inside), with three headers that no message
//! can change or add to:
//!
//! | header | value |
//! | --- | --- |
//! | `Idempotency-Key` | [`Key::value`](crate::key::Key::value): the target deduplicates by it |
//! | `Idempotency-Attempt` | [`Attempt::number`]: it grows with each takeover, so a target can refuse lower ones than it saw |
//! | `Message-Id` | the broker's id of the message |
//!
//! Key and message id go through [`header_text`]: what is plain ASCII without spaces and
//! `%` stays exactly itself. `Content-Type` is `application/json` if the body is JSON, else
//! `text/plain; charset=utf-8`.
//!
//! # What an answer means
//!
//! | what happened | the effect says | then |
//! | --- | --- | --- |
//! | 2xx, and a complete body or one over [`MAX_RESULT_BODY_BYTES`] | `Ok`([`HttpResult`]) | stored, acked |
//! | no connection: DNS, TCP, TLS, or none in time | not applied | retried |
//! | 425, 429 | not applied: it was not processed, `Retry-After` kept | retried |
//! | 408, 409, 5xx | unknown: it may have been (proxies answer 408 for a handler they cut off), `Retry-After` kept | retried through recovery |
//! | 301, 307, 308 | permanent: it was not processed, and the URL is wrong | dead-letter |
//! | other 4xx | permanent | dead-letter |
//! | other 3xx, and what is no final HTTP status | unknown: a 303 often follows a POST that was processed | retried through recovery |
//! | sent, and no complete answer: connection lost, time over, body cut short | unknown | retried through recovery |
//!
//! The status line decides. Only a 2xx needs its body, which is the result. Of any other
//! answer the reason tells status and media type: its body may repeat what was sent, and
//! reasons are logged. [`quote_answers`](HttpEffectSettings::quote_answers) has the first 200
//! characters quoted, as far as they can be had at once. Redirects are never followed:
//! a POST that is sent on could take effect twice.
//!
//! # Recovery
//!
//! * `rerun`: the target remembers `Idempotency-Key` and answers a repeated POST as it did
//!   the first.
//! * `verify`: the target answers a GET of the same URL with the same `Idempotency-Key`:
//!   200 with the result if it was applied, 404 if it certainly was not *and will not be*,
//!   e.g. by a request still on its way: the GET carries the `Idempotency-Attempt` under
//!   which it is asked, and a target that answers 409 to lower ones from then on can be
//!   sure. No answer, or one that says "not now" (408, 425, 429, 5xx), changes nothing: it
//!   is asked again at the next delivery. Any other answer parks the message. The GET says
//!   `Cache-Control: no-cache`, as caches go by the URL and not by the key.
//! * `park`: nothing is asked of the target.
//!
//! # Connections
//!
//! They are kept for [`POOL_IDLE_TIMEOUT`] at most. A Lambda function is frozen between
//! invocations, and a connection that the target closed meanwhile may look alive until a
//! request was written to it; then nobody knows whether that arrived. With `park`, where
//! each such case costs a person's time, connections are not reused at all.
//!
//! Nothing is sent twice by the client: it retries nothing, save a request of which not
//! one byte was written because the connection it was meant for had just closed. Proxy
//! variables and cookies are ignored. TLS is rustls with aws-lc and the platform's root
//! certificates, as in the AWS SDK; `SSL_CERT_FILE` names others in their place.

mod answer;
mod settings;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use reqwest::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use reqwest::{Client, RequestBuilder, Response, Url};
use rustls_platform_verifier::BuilderVerifierExt;
use serde::de::IgnoredAny;

pub use self::answer::{HttpBody, HttpResult};
pub use self::settings::{HttpEffectError, HttpEffectSettings, InvalidSetting};
use super::{Attempt, Effect, EffectError, Recovery, Verification};
use crate::config::Environment;
use crate::error::{BoxError, ErrorChain};
use crate::message::Message;

/// The header with the idempotency key, as [`header_text`].
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// The header with the attempt's number, in decimal.
pub const IDEMPOTENCY_ATTEMPT: &str = "idempotency-attempt";

/// The header with the message's id, as [`header_text`].
pub const MESSAGE_ID: &str = "message-id";

/// The longest answer that is kept as a result: 64 KiB. Of a longer one only the status
/// is ([`HttpBody::TooLong`]), and the rest is not read.
pub const MAX_RESULT_BODY_BYTES: usize = 64 * 1024;

/// The longest wait that a target can ask for with `Retry-After`: 12 hours, SQS's longest
/// visibility timeout.
pub const MAX_RETRY_AFTER: Duration = Duration::from_hours(12);

/// How long an unused connection is kept.
pub const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest time for a connection, DNS and TLS included; half the time limit if that is
/// less, so that a slow connection is never taken for a slow answer.
pub const MAX_CONNECT_TIME: Duration = Duration::from_secs(3);

/// What a header value can't hold as it is, and `%`, which then is never ambiguous.
/// Whatever isn't ASCII is encoded in any case.
const NOT_PLAIN: &AsciiSet = &CONTROLS.add(b' ').add(b'%');

/// Any text as a header value: bytes other than visible ASCII, and `%`, as `%XX` of its
/// UTF-8. No two texts give the same value, and decoding `%XX` gives back the text.
///
/// ```
/// use idempotent_consumer::effect::http::header_text;
/// assert_eq!(header_text("A-1001"), "A-1001");
/// assert_eq!(header_text("100% naïve"), "100%25%20na%C3%AFve");
/// ```
#[must_use]
pub fn header_text(text: &str) -> String {
    utf8_percent_encode(text, NOT_PLAIN).to_string()
}

/// POSTs each message to a URL; see the [module](self) for what its answers mean.
pub struct HttpEffect {
    client: Client,
    url: Url,
    timeout: Duration,
    recovery: Recovery,
    quote_answers: bool,
}

/// Without the URL's path and query, which may hold secrets.
impl fmt::Debug for HttpEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpEffect")
            .field("origin", &self.url.origin().ascii_serialization())
            .field("timeout", &self.timeout)
            .field("recovery", &self.recovery)
            .field("quote_answers", &self.quote_answers)
            .finish_non_exhaustive()
    }
}

impl HttpEffect {
    /// Checks the settings and makes the client. Connects to nothing yet.
    pub fn new(settings: HttpEffectSettings) -> Result<Self, HttpEffectError> {
        let HttpEffectSettings { url, timeout, recovery, allow_http, quote_answers } = settings;
        let url = settings::check(&url, timeout, allow_http)?;
        let client = client(&url, timeout, recovery).map_err(HttpEffectError::Client)?;
        Ok(Self { client, url, timeout, recovery, quote_answers })
    }

    /// The effect that the environment describes; `None` if something is wrong, which
    /// `env` then knows.
    ///
    /// | variable | default | meaning |
    /// | --- | --- | --- |
    /// | `EFFECT_URL` | required | where to POST: `https`, without user and password |
    /// | `EFFECT_TIMEOUT_SECONDS` | 10 | time for a whole request; less than a sixth of `VISIBILITY_TIMEOUT_SECONDS` |
    /// | `EFFECT_RECOVERY` | required | `rerun`, `verify` or `park` |
    /// | `EFFECT_ALLOW_HTTP` | `false` | `true` allows plain `http` to other hosts than this one |
    /// | `EFFECT_QUOTE_ANSWERS` | `false` | `true` quotes the start of an answer that is no result in the reason |
    pub fn from_env(env: &mut Environment<'_>) -> Option<Self> {
        let settings = HttpEffectSettings::from_env(env)?;
        Self::new(settings)
            .map_err(|error| settings::note(env, format!("can't be called: {}", ErrorChain(&error))))
            .ok()
    }

    fn for_attempt(request: RequestBuilder, attempt: &Attempt<'_>) -> RequestBuilder {
        request
            .header(IDEMPOTENCY_KEY, header_text(attempt.key().value()))
            .header(IDEMPOTENCY_ATTEMPT, HeaderValue::from(attempt.number()))
    }

    /// Sends a request. Once this is `Ok` the target has answered with a status.
    async fn send(&self, request: RequestBuilder) -> Result<Response, EffectError> {
        request.send().await.map_err(|error| {
            // The URL's query may hold a secret, and reasons go into logs and records.
            let error = error.without_url();
            if error.is_connect() || error.is_builder() {
                EffectError::not_applied(format!("nothing was sent: {}", ErrorChain(&error)))
            } else if error.is_timeout() {
                EffectError::unknown(format!("no answer within {:?}", self.timeout))
            } else {
                EffectError::unknown(format!("sent, but not answered: {}", ErrorChain(&error)))
            }
        })
    }
}

impl Effect for HttpEffect {
    /// Nothing: the body is sent as it is, JSON or not.
    type Input = ();
    type Output = HttpResult;

    fn recovery(&self) -> Recovery {
        self.recovery
    }

    fn input(&self, _: &Message) -> Result<(), BoxError> {
        Ok(())
    }

    fn time_limit(&self) -> Option<Duration> {
        Some(self.timeout)
    }

    async fn apply(&self, (): &(), attempt: &Attempt<'_>) -> Result<HttpResult, EffectError> {
        let message = attempt.message();
        let request = Self::for_attempt(self.client.post(self.url.clone()), attempt)
            .header(MESSAGE_ID, header_text(&message.id))
            .header(CONTENT_TYPE, content_type(&message.body))
            .body(message.body.clone());
        answer::to_post(self.send(request).await?, self.quote_answers).await
    }

    async fn verify(&self, (): &(), attempt: &Attempt<'_>) -> Result<Verification<HttpResult>, EffectError> {
        let request = Self::for_attempt(self.client.get(self.url.clone()), attempt)
            .header(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        answer::to_get(self.send(request).await?, self.quote_answers).await
    }
}

fn content_type(body: &str) -> HeaderValue {
    HeaderValue::from_static(match serde_json::from_str::<IgnoredAny>(body) {
        Ok(_) => "application/json",
        Err(_) => "text/plain; charset=utf-8",
    })
}

fn client(url: &Url, timeout: Duration, recovery: Recovery) -> Result<Client, BoxError> {
    let builder = Client::builder()
        .tls_backend_preconfigured(tls(url)?)
        .user_agent(concat!("idempotent-consumer/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .referer(false)
        .retry(reqwest::retry::never())
        .no_proxy()
        .timeout(timeout)
        .connect_timeout(MAX_CONNECT_TIME.min(timeout / 2))
        .pool_idle_timeout(POOL_IDLE_TIMEOUT);
    let builder = if recovery == Recovery::Park { builder.pool_max_idle_per_host(0) } else { builder };
    Ok(builder.build()?)
}

/// The TLS settings, by the SDK's provider. Given to the client, as it would otherwise
/// look for one that is installed for the whole process.
fn tls(url: &Url) -> Result<rustls::ClientConfig, BoxError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let builder = if url.scheme() == "https" {
        // Reads the root certificates: now, as a function starts at full speed, and a
        // machine without any is told at once.
        builder.with_platform_verifier()?
    } else {
        builder.with_root_certificates(rustls::RootCertStore::empty())
    };
    let mut tls = builder.with_no_client_auth();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(tls)
}
