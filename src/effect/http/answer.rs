//! What the target's answers mean.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use reqwest::header::{CONTENT_TYPE, DATE, HeaderMap, HeaderName, LOCATION, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use serde::ser::{Serialize, SerializeStruct, Serializer};
use serde_json::value::RawValue;

use super::{MAX_RESULT_BODY_BYTES, MAX_RETRY_AFTER};
use crate::effect::{EffectError, Verification};
use crate::error::ErrorChain;
use crate::time::{Clock, SystemClock};

/// How much of an answer that is no result is read, and for how long: a connection can be
/// used again once its answer was read to the end, and the reason may quote the start.
const READ_BYTES: usize = 2 * 1024;
const READING_TIME: Duration = Duration::from_secs(1);
const QUOTED_CHARS: usize = 200;

/// A media type that is longer is none.
const MAX_MEDIA_TYPE: usize = 64;

/// The target's answer, stored and replayed to every duplicate.
///
/// As JSON it is `{"status": 200, "body": ...}`. An answer that was too long to keep is
/// `{"status": 200, "body": null, "truncated": true}`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HttpResult {
    /// The status, 200 to 299.
    pub status: u16,
    /// The body.
    pub body: HttpBody,
}

/// The body of an [`HttpResult`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum HttpBody {
    /// JSON, exactly as it was received: numbers keep all their digits.
    Json(Box<RawValue>),
    /// Anything else, as a string; what isn't UTF-8 in it is replaced by U+FFFD.
    Text(String),
    /// More than [`MAX_RESULT_BODY_BYTES`], of which nothing is kept: half a JSON text
    /// could be taken for a whole one.
    TooLong,
}

impl Serialize for HttpResult {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let truncated = matches!(self.body, HttpBody::TooLong);
        let mut result = serializer.serialize_struct("HttpResult", if truncated { 3 } else { 2 })?;
        result.serialize_field("status", &self.status)?;
        match &self.body {
            HttpBody::Json(json) => result.serialize_field("body", json)?,
            HttpBody::Text(text) => result.serialize_field("body", text)?,
            HttpBody::TooLong => {
                result.serialize_field("body", &())?;
                result.serialize_field("truncated", &true)?;
            }
        }
        result.end()
    }
}

/// What a status says about a POST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    Applied,
    /// Not processed; later it may be.
    NotNow,
    /// Not processed, and never will be.
    Never,
    Unclear,
}

impl Meaning {
    fn of(status: StatusCode) -> Self {
        match status.as_u16() {
            200..=299 => Self::Applied,
            425 | 429 => Self::NotNow,
            // 408 should mean that the request never arrived whole; servers and proxies also
            // send it when they cut off a handler in the middle.
            408 | 409 => Self::Unclear,
            // The same request should have been sent elsewhere. A 302 or 303 may as well
            // follow a POST that was processed.
            301 | 307 | 308 | 400..=499 => Self::Never,
            _ => Self::Unclear,
        }
    }
}

/// The meaning of an answer to the POST that applies the effect.
pub(super) async fn to_post(mut response: Response, quotes: bool) -> Result<HttpResult, EffectError> {
    let status = response.status();
    let meaning = Meaning::of(status);
    if meaning == Meaning::Applied {
        return result(response).await;
    }
    let wait = retry_after(response.headers());
    let reason = describe(&mut response, quotes).await;
    let error = match meaning {
        Meaning::NotNow => EffectError::not_applied(reason),
        Meaning::Never => EffectError::permanent(reason),
        Meaning::Applied | Meaning::Unclear => EffectError::unknown(reason),
    };
    Err(waiting(error, wait))
}

fn waiting(error: EffectError, wait: Option<Duration>) -> EffectError {
    match wait {
        Some(wait) => error.retry_after(wait),
        None => error,
    }
}

/// The meaning of an answer to the GET that verifies an earlier attempt.
pub(super) async fn to_get(mut response: Response, quotes: bool) -> Result<Verification<HttpResult>, EffectError> {
    let status = response.status();
    match status.as_u16() {
        200 => Ok(Verification::Done(result(response).await?)),
        404 => Ok(Verification::NotDone),
        // "Not now" is no verdict. An outage of the target is what makes outcomes unknown in
        // the first place; it must not park every one of them.
        408 | 425 | 429 | 500..=599 => {
            let wait = retry_after(response.headers());
            Err(waiting(EffectError::unknown(describe(&mut response, quotes).await), wait))
        }
        _ => {
            let answer = describe(&mut response, quotes).await;
            Ok(Verification::Unknown(format!("asked whether an earlier attempt was applied, {answer}")))
        }
    }
}

async fn result(mut response: Response) -> Result<HttpResult, EffectError> {
    let status = response.status().as_u16();
    if response.content_length().is_some_and(|length| length > MAX_RESULT_BODY_BYTES as u64) {
        return Ok(HttpResult { status, body: HttpBody::TooLong });
    }
    let mut bytes = Vec::new();
    let end = read(&mut response, &mut bytes, MAX_RESULT_BODY_BYTES).await.map_err(|error| {
        let error = error.without_url();
        EffectError::unknown(format!("the answer {status} did not come to its end: {}", ErrorChain(&error)))
    })?;
    let body = match end {
        End::OverLimit => HttpBody::TooLong,
        End::Reached => {
            let text = String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned());
            match serde_json::from_str::<&RawValue>(&text) {
                Ok(json) => HttpBody::Json(json.to_owned()),
                Err(_) => HttpBody::Text(text),
            }
        }
    };
    Ok(HttpResult { status, body })
}

enum End {
    Reached,
    /// There is more than the limit, and perhaps much more: it isn't read.
    OverLimit,
}

async fn read(response: &mut Response, bytes: &mut Vec<u8>, limit: usize) -> reqwest::Result<End> {
    while let Some(chunk) = response.chunk().await? {
        let room = limit.saturating_sub(bytes.len());
        bytes.extend(chunk.iter().take(room));
        if chunk.len() > room {
            return Ok(End::OverLimit);
        }
    }
    Ok(End::Reached)
}

/// An answer in words: the status and the media type, or how the body begins if `quotes`
/// allows that and it comes at once. A target that refuses a request likes to repeat what it
/// was sent, and reasons go where bodies must not: into the log.
async fn describe(response: &mut Response, quotes: bool) -> String {
    let status = response.status();
    let reason = status.canonical_reason().map(|reason| format!(" {reason}")).unwrap_or_default();
    let redirect = match status.is_redirection() {
        // Where to is not said: the address may hold secrets.
        true if response.headers().contains_key(LOCATION) => " with another address (redirects are not followed)",
        true => " without another address",
        false => "",
    };
    let media_type = media_type(response.headers()).map(|media_type| format!(" ({media_type})"));
    let mut bytes = Vec::new();
    // How this ends does not matter: what was read is quoted.
    let _ = tokio::time::timeout(READING_TIME, read(response, &mut bytes, READ_BYTES)).await;
    let body = match quote(&bytes) {
        quote if quotes && !quote.is_empty() => format!(": {quote}"),
        _ => media_type.unwrap_or_default(),
    };
    let code = status.as_u16();
    format!("the target answered {code}{reason}{redirect}{body}")
}

/// What kind of body an answer has, if it says so in the characters of a media type.
/// Parameters are left out: they can hold anything.
fn media_type(headers: &HeaderMap) -> Option<&str> {
    let media_type = text(headers, CONTENT_TYPE)?.split(';').next()?.trim();
    let (kind, subtype) = media_type.split_once('/')?;
    let plain = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-'))
    };
    (media_type.len() <= MAX_MEDIA_TYPE && plain(kind) && plain(subtype)).then_some(media_type)
}

/// The start of a body, safe to print.
fn quote(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim();
    let mut quote = String::new();
    for c in text.chars().take(QUOTED_CHARS) {
        match c {
            '"' | '\'' => quote.push(c),
            c => quote.extend(c.escape_debug()),
        }
    }
    if text.chars().nth(QUOTED_CHARS).is_some() {
        quote.push_str("...");
    }
    quote
}

/// How long the target asks to be left alone: seconds, or a date by its own clock.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = text(headers, RETRY_AFTER)?;
    let wait = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than a number holds are a long time.
        text.parse().map_or(Duration::MAX, Duration::from_secs)
    } else {
        let until = httpdate::parse_http_date(text).ok()?;
        let now = self::text(headers, DATE).and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or_else(now);
        until.duration_since(now).unwrap_or_default()
    };
    Some(wait.min(MAX_RETRY_AFTER))
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(SystemClock.now().get())
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    fn wait(retry_after: &str, date: Option<&str>) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_str(retry_after).unwrap());
        if let Some(date) = date {
            headers.insert(DATE, HeaderValue::from_str(date).unwrap());
        }
        super::retry_after(&headers).map(|wait| wait.as_secs())
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_by_the_targets_clock() {
        let date = Some("Wed, 21 Oct 2015 07:28:00 GMT");
        assert_eq!(wait("120", None), Some(120));
        assert_eq!(wait(" 0 ", None), Some(0));
        assert_eq!(wait("Wed, 21 Oct 2015 07:30:30 GMT", date), Some(150));
        assert_eq!(wait("Wed, 21 Oct 2015 07:00:00 GMT", date), Some(0), "over already");
        assert_eq!(wait("Wed, 21 Oct 2015 07:30:30 GMT", None), Some(0), "over by our clock");
        let soon = httpdate::fmt_http_date(now() + Duration::from_secs(100));
        assert!(matches!(wait(&soon, Some("no date")), Some(98..=100)));
    }

    #[test]
    fn absurd_waits_are_capped_and_nonsense_is_ignored() {
        let most = Some(MAX_RETRY_AFTER.as_secs());
        assert_eq!(wait("43201", None), most);
        assert_eq!(wait("99999999999999999999999999", None), most);
        assert_eq!(wait("Fri, 31 Dec 9999 23:59:59 GMT", None), most);
        for nonsense in ["", "-5", "1.5", "soon", "1e3", "+3"] {
            assert_eq!(wait(nonsense, None), None, "{nonsense:?}");
        }
    }

    #[test]
    fn a_media_type_is_one_or_is_not_shown() {
        let shown = |text: &str| {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_str(text).unwrap())]);
            super::media_type(&headers).map(str::to_owned)
        };
        assert_eq!(shown("application/problem+json; charset=utf-8").as_deref(), Some("application/problem+json"));
        assert_eq!(shown("text/html").as_deref(), Some("text/html"));
        let long = format!("text/{}", "x".repeat(60));
        for odd in ["", "json", "text/", "/x", "text/html?card=4111", "text/4111", "a/b/c", "x y/z", long.as_str()] {
            assert_eq!(shown(odd), None, "{odd}");
        }
    }

    #[test]
    fn quotes_are_short_and_printable() {
        assert_eq!(quote(b" {\"error\": \"no\"}\r\n"), "{\"error\": \"no\"}");
        assert_eq!(quote(b"a\nb\x1b[31m\xff"), "a\\nb\\u{1b}[31m\u{fffd}");
        assert_eq!(quote("\u{202e}".as_bytes()), "\\u{202e}");
        assert_eq!(quote("é".repeat(201).as_bytes()), format!("{}...", "é".repeat(200)));
    }
}
