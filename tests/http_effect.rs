//! The HTTP effect against real servers on the loopback interface, driven as a consumer
//! drives it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![cfg(feature = "http")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotent_consumer::config::{ConfigError, Environment};
use idempotent_consumer::consumer::{Consume, Consumer, ConsumerSettings};
use idempotent_consumer::effect::http::{
    HttpEffect, HttpEffectError, HttpEffectSettings, InvalidSetting, MAX_RESULT_BODY_BYTES, MAX_RETRY_AFTER,
};
use idempotent_consumer::effect::{Effect, Recovery};
use idempotent_consumer::key::Scope;
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Outcome, Report};
use idempotent_consumer::record::{Record, RecordId, State};
use idempotent_consumer::store::Store;
use idempotent_consumer::store::memory::MemoryStore;
use idempotent_consumer::time::{Deadline, EpochMillis, Lease, ManualClock, Retention};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A request as it came over the wire.
#[derive(Debug, Clone)]
struct Request {
    connection: usize,
    line: String,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

/// What the target does with a request.
enum Reply {
    /// Sends these bytes, and waits for the next request on the connection.
    Send(String),
    /// Sends these bytes and closes the connection.
    Close(String),
    /// Sends these bytes and then nothing more.
    Hang(String),
    /// Sends these bytes and then a body without end.
    Flood(String),
}

use Reply::{Close, Flood, Hang, Send as Answer};

/// An HTTP server that says exactly what a test tells it to.
struct Target {
    url: String,
    requests: Arc<Mutex<Vec<Request>>>,
    /// How many connections are over: closed here, and then by the client too.
    closed: watch::Sender<usize>,
}

impl Target {
    async fn start(reply: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/orders?token=s3cret", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        let closed = watch::Sender::new(0);
        let over = closed.clone();
        let reply = Arc::new(reply);
        tokio::spawn(async move {
            for connection in 0.. {
                let (stream, _) = listener.accept().await.unwrap();
                let (seen, reply, over) = (Arc::clone(&seen), Arc::clone(&reply), over.clone());
                tokio::spawn(async move {
                    serve(stream, connection, seen, reply).await;
                    over.send_modify(|closed| *closed += 1);
                });
            }
        });
        Self { url, requests, closed }
    }

    /// Waits until so many connections are over, and the client knows.
    async fn wait_for_closed(&self, count: usize) {
        let mut closed = self.closed.subscribe();
        let over = closed.wait_for(|closed| *closed >= count);
        let _ = tokio::time::timeout(Duration::from_mins(1), over).await.expect("the connection to be closed").unwrap();
    }

    async fn answering(answer: impl Into<String>) -> Self {
        let answer = answer.into();
        Self::start(move |_| Answer(answer.clone())).await
    }

    /// Hangs up on POSTs, so that their outcome is unknown, and answers GETs.
    async fn verifying(get: impl Fn() -> Reply + Send + Sync + 'static) -> Self {
        Self::start(move |request| if request.line.starts_with("GET") { get() } else { Close(String::new()) }).await
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    fn settings(&self) -> HttpEffectSettings {
        HttpEffectSettings::new(&self.url, Recovery::Rerun)
    }
}

async fn serve(
    mut stream: TcpStream,
    connection: usize,
    seen: Arc<Mutex<Vec<Request>>>,
    reply: Arc<impl Fn(&Request) -> Reply>,
) {
    let mut buffer = Vec::new();
    while let Some(request) = read_request(&mut stream, &mut buffer, connection).await {
        seen.lock().unwrap().push(request.clone());
        let reply = reply(&request);
        let (Answer(bytes) | Close(bytes) | Hang(bytes) | Flood(bytes)) = &reply;
        stream.write_all(bytes.as_bytes()).await.unwrap();
        match reply {
            Answer(_) => {}
            Close(_) => {
                // Over when the client has closed its end too; what it sends until then is
                // for nobody.
                let _ = stream.shutdown().await;
                while stream.read_buf(&mut buffer).await.is_ok_and(|bytes| bytes > 0) {}
                return;
            }
            Hang(_) => std::future::pending().await,
            Flood(_) => while stream.write_all(&[b'x'; 1000]).await.is_ok() {},
        }
    }
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>, connection: usize) -> Option<Request> {
    loop {
        if let Some(end) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let head = String::from_utf8(buffer[..end].to_vec()).unwrap();
            let mut lines = head.lines();
            let line = lines.next().unwrap().to_owned();
            let mut headers = HashMap::new();
            for (name, value) in lines.map(|line| line.split_once(": ").unwrap()) {
                assert!(headers.insert(name.to_owned(), value.to_owned()).is_none(), "{name} twice: {head}");
            }
            let length: usize = headers.get("content-length").map_or(0, |text| text.parse().unwrap());
            if buffer.len() >= end + 4 + length {
                let body = buffer[end + 4..end + 4 + length].to_vec();
                buffer.drain(..end + 4 + length);
                return Some(Request { connection, line, headers, body });
            }
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}

fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len())
}

/// A consumer with an HTTP effect and a memory of its own.
struct Subject {
    consumer: Consumer<HttpEffect>,
    store: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
}

impl Subject {
    fn new(effect: HttpEffectSettings) -> Self {
        let store = Arc::new(MemoryStore::new());
        let mut settings = ConsumerSettings::new(Scope::new("test").unwrap(), Retention::from_seconds(86_400).unwrap());
        settings.key = "attribute:key | /orderId".parse().unwrap();
        let effect = HttpEffect::new(effect).unwrap();
        let clock = Arc::new(ManualClock::new(EpochMillis::new(1_900_000_000_000)));
        let consumer = Consumer::new(effect, Arc::clone(&store) as Arc<dyn Store>, settings)
            .with_clock(Arc::clone(&clock) as Arc<_>);
        Self { consumer, store, clock }
    }

    async fn process(&self, message: &Message) -> Report {
        self.consumer.process(message, Deadline::after(Duration::from_secs(30), self.consumer.clock())).await
    }

    async fn record(&self, report: &Report) -> Option<Record> {
        self.store.load(&RecordId::new(report.key.as_ref().unwrap().id())).await.unwrap()
    }
}

fn order() -> Message {
    Message::new("message-1", r#"{"orderId":"A-1001"}"#)
}

async fn process(settings: HttpEffectSettings) -> Report {
    Subject::new(settings).process(&order()).await
}

fn result(report: &Report) -> &str {
    &report.outcome.result().unwrap_or_else(|| panic!("{report:?}")).json
}

fn reason(report: &Report) -> String {
    report.outcome.reason().unwrap_or_else(|| panic!("{report:?}"))
}

fn wait(report: &Report) -> Option<u64> {
    match &report.outcome {
        Outcome::NotApplied { retry_after, .. } | Outcome::Unknown { retry_after, .. } => {
            retry_after.map(|wait| wait.as_secs())
        }
        outcome => panic!("{outcome:?}"),
    }
}

#[tokio::test]
async fn every_status_has_its_outcome() {
    let cases = [
        ("200 OK", "executed"),
        ("201 Created", "executed"),
        ("204 No Content", "executed"),
        ("299 Odd", "executed"),
        ("300 Multiple Choices", "unknown"),
        ("301 Moved Permanently", "permanent"),
        ("302 Found", "unknown"),
        ("303 See Other", "unknown"),
        ("304 Not Modified", "unknown"),
        ("307 Temporary Redirect", "permanent"),
        ("308 Permanent Redirect", "permanent"),
        ("400 Bad Request", "permanent"),
        ("401 Unauthorized", "permanent"),
        ("404 Not Found", "permanent"),
        ("408 Request Timeout", "unknown"),
        ("409 Conflict", "unknown"),
        ("410 Gone", "permanent"),
        ("422 Unprocessable Entity", "permanent"),
        ("425 Too Early", "not-applied"),
        ("429 Too Many Requests", "not-applied"),
        ("499 Odd", "permanent"),
        ("500 Internal Server Error", "unknown"),
        ("502 Bad Gateway", "unknown"),
        ("503 Service Unavailable", "unknown"),
        ("504 Gateway Timeout", "unknown"),
        ("599 Odd", "unknown"),
        ("600 Odd", "unknown"),
        ("999 Odd", "unknown"),
    ];
    for (status, expected) in cases {
        let bodiless = status.starts_with("204") || status.starts_with("304");
        let headers = "retry-after: 7\r\ncontent-type: text/html; note=why\r\n";
        let (headers, body) = if bodiless { ("retry-after: 7\r\n", "") } else { (headers, "why") };
        let target = Target::answering(answer(status, headers, body)).await;
        let subject = Subject::new(target.settings());
        let report = subject.process(&order()).await;
        assert_eq!(report.outcome.name(), expected, "{status}: {report:?}");
        assert_eq!(target.requests().len(), 1, "{status}: sent once, whatever the answer");
        let record = subject.record(&report).await;
        match expected {
            "executed" => assert!(matches!(record.unwrap().state, State::Completed { .. }), "{status}"),
            "unknown" => {
                assert_eq!(wait(&report), Some(7), "{status}");
                let state = record.unwrap().state;
                assert!(matches!(state, State::InProgress { lease: Some(Lease::GIVEN_UP), .. }), "{status}: {state:?}");
            }
            "not-applied" => {
                assert_eq!(wait(&report), Some(7), "{status}");
                assert_eq!(record, None, "{status}");
            }
            _ => assert_eq!(record, None, "{status}"),
        }
        if let Some(reason) = report.outcome.reason() {
            assert!(reason.starts_with(&format!("the target answered {}", &status[..3])), "{reason}");
            assert!(!reason.contains("Odd") && !reason.contains("why"), "{reason}");
            assert_eq!(reason.contains(" (text/html)"), !bodiless, "{reason}");
        }
    }
}

#[tokio::test]
async fn retry_after_is_kept_as_seconds_or_as_a_date_and_capped() {
    let date = "date: Wed, 21 Oct 2015 07:28:00 GMT\r\n";
    let cases = [
        (String::new(), None),
        ("retry-after: 120\r\n".to_owned(), Some(120)),
        (format!("{date}retry-after: Wed, 21 Oct 2015 07:30:30 GMT\r\n"), Some(150)),
        ("retry-after: Wed, 21 Oct 2015 07:30:30 GMT\r\n".to_owned(), Some(0)),
        ("retry-after: 99999999999999999999999\r\n".to_owned(), Some(MAX_RETRY_AFTER.as_secs())),
        ("retry-after: whenever\r\n".to_owned(), None),
    ];
    for (headers, expected) in cases {
        for status in ["429 Too Many Requests", "503 Service Unavailable"] {
            let target = Target::answering(answer(status, &headers, "")).await;
            assert_eq!(wait(&process(target.settings()).await), expected, "{status} {headers}");
        }
    }
}

#[tokio::test]
async fn the_request_is_the_message_and_three_headers() {
    let target = Target::answering(answer("200 OK", "", "{}")).await;
    let subject = Subject::new(target.settings());
    let body = "{ \"orderId\" : \"A-1001\",\n \"amount\": 12345678901234567890123, \"name\": \"Zo\u{eb}\" }\r\n";
    let mut message = Message::new("message-1", body)
        .with_group("x-group: 1\r\nx-evil: 1")
        .with_deduplication_id("x-evil: 1\r\nx-evil: 1");
    // Whatever a sender calls an attribute: none of them is a header.
    for name in [
        "authorization",
        "Idempotency-Key",
        "idempotency-attempt",
        "Message-Id",
        "Content-Type",
        "content-length",
        "transfer-encoding",
        "Host",
        "Cookie",
        "X-Forwarded-For",
        "Connection",
        "x-evil\r\nx-evil",
    ] {
        message = message.with_attribute(name, "stolen\r\nx-evil: 1");
    }
    assert_eq!(subject.process(&message).await.outcome.name(), "executed");

    let [request] = &target.requests()[..] else { panic!() };
    assert_eq!(request.line, "POST /orders?token=s3cret HTTP/1.1");
    assert_eq!(request.body, body.as_bytes(), "byte for byte");
    let mut names: Vec<_> = request.headers.keys().map(String::as_str).collect();
    names.sort_unstable();
    let expected = [
        "accept",
        "content-length",
        "content-type",
        "host",
        "idempotency-attempt",
        "idempotency-key",
        "message-id",
        "user-agent",
    ];
    assert_eq!(names, expected, "nothing from the message");
    assert_eq!(request.headers["idempotency-key"], "A-1001");
    assert_eq!(request.headers["idempotency-attempt"], "1");
    assert_eq!(request.headers["message-id"], "message-1");
    assert_eq!(request.headers["content-type"], "application/json");
    assert!(request.headers["user-agent"].starts_with("idempotent-consumer/"));
}

#[tokio::test]
async fn a_body_that_is_not_json_is_sent_as_text() {
    let target = Target::answering(answer("200 OK", "", "")).await;
    let subject = Subject::new(target.settings());
    for (n, body) in ["", "hello\r\nIdempotency-Key: x", "{\"a\":", "[1,2]"].into_iter().enumerate() {
        let message = Message::new("m", body).with_attribute("key", n.to_string());
        assert_eq!(subject.process(&message).await.outcome.name(), "executed");
        let request = target.requests().pop().unwrap();
        assert_eq!(request.body, body.as_bytes());
        let expected = if body == "[1,2]" { "application/json" } else { "text/plain; charset=utf-8" };
        assert_eq!(request.headers["content-type"], expected, "{body}");
    }
}

#[tokio::test]
async fn any_key_and_any_message_id_fit_into_a_header() {
    let target = Target::answering(answer("200 OK", "", "")).await;
    let subject = Subject::new(target.settings());
    let cases = [
        ("order:2024/05#7!", "order:2024/05#7!"),
        ("two words", "two%20words"),
        ("100%", "100%25"),
        ("%20", "%2520"),
        ("a\r\nEvil: yes", "a%0D%0AEvil:%20yes"),
        ("Zo\u{eb} \u{1f600}", "Zo%C3%AB%20%F0%9F%98%80"),
        ("nul\0tab\tdel\u{7f}", "nul%00tab%09del%7F"),
        ("a\nEvil: yes\n\n{\"orderId\":1}", "a%0AEvil:%20yes%0A%0A{\"orderId\":1}"),
        ("a\r\n\r\nPOST /evil HTTP/1.1\r\nhost: x", "a%0D%0A%0D%0APOST%20/evil%20HTTP/1.1%0D%0Ahost:%20x"),
        ("\u{85}\u{2028}\u{202e}\u{1b}[2K", "%C2%85%E2%80%A8%E2%80%AE%1B[2K"),
        // Half of a line end in Latin-1's eyes: U+560D and U+560A end in the bytes of CR and LF.
        ("\u{560d}\u{560a}Evil: yes", "%E5%98%8D%E5%98%8AEvil:%20yes"),
    ];
    for (text, expected) in cases {
        let message = Message::new(text, "{}").with_attribute("key", text);
        assert_eq!(subject.process(&message).await.outcome.name(), "executed", "{text:?}");
        let request = target.requests().pop().unwrap();
        assert_eq!(request.headers["idempotency-key"], expected);
        assert_eq!(request.headers["message-id"], expected);
        assert!(!request.headers.keys().any(|name| name.eq_ignore_ascii_case("evil")), "{request:?}");
    }
    assert_eq!(target.requests().len(), cases.len(), "none of them was two");
}

#[tokio::test]
async fn the_longest_key_arrives() {
    let target = Target::answering(answer("200 OK", "", "")).await;
    let message = Message::new("m", "{}").with_attribute("key", "\u{1f600}".repeat(5_000));
    assert_eq!(Subject::new(target.settings()).process(&message).await.outcome.name(), "executed");
    assert!(target.requests()[0].headers["idempotency-key"].len() > 2_000);
}

#[tokio::test]
async fn the_attempt_grows_and_the_key_stays() {
    let target = Target::answering(answer("500 Internal Server Error", "", "")).await;
    let subject = Subject::new(target.settings());
    for _ in 0..3 {
        subject.process(&order()).await;
    }
    let sent: Vec<_> = target.requests().into_iter().map(|request| request.headers).collect();
    assert_eq!(sent.iter().map(|headers| &headers["idempotency-attempt"][..]).collect::<Vec<_>>(), ["1", "2", "3"]);
    assert!(sent.iter().all(|headers| headers["idempotency-key"] == "A-1001"));
}

#[tokio::test]
async fn the_result_is_status_and_body() {
    let cases = [
        (r#"{"id": 12345678901234567890.10, "n": 1e999}"#, r#"{"id": 12345678901234567890.10, "n": 1e999}"#),
        ("null", "null"),
        ("plain \"text\"\n", r#""plain \"text\"\n""#),
        ("", "\"\""),
        ("{\"cut", r#""{\"cut""#),
    ];
    for (body, expected) in cases {
        let target = Target::answering(answer("201 Created", "", body)).await;
        let subject = Subject::new(target.settings());
        let report = subject.process(&order()).await;
        assert_eq!(result(&report), format!(r#"{{"status":201,"body":{expected}}}"#));
        let again = subject.process(&order()).await;
        assert_eq!((again.outcome.name(), result(&again)), ("replayed", result(&report)));
        assert_eq!(target.requests().len(), 1);
    }
}

#[tokio::test]
async fn a_chunked_answer_is_read_to_its_end() {
    let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n{\"a\"\r\n3\r\n:1}\r\n0\r\n\r\n";
    let target = Target::answering(chunked).await;
    assert_eq!(result(&process(target.settings()).await), r#"{"status":200,"body":{"a":1}}"#);
}

#[tokio::test]
async fn of_an_answer_over_the_limit_only_the_status_is_kept() {
    let cut = r#"{"status":200,"body":null,"truncated":true}"#;
    let full = "1".repeat(MAX_RESULT_BODY_BYTES);

    let target = Target::answering(answer("200 OK", "", &full)).await;
    assert_eq!(result(&process(target.settings()).await), format!(r#"{{"status":200,"body":{full}}}"#), "just fits");

    let target = Target::answering(answer("200 OK", "", &format!("{full}1"))).await;
    assert_eq!(result(&process(target.settings()).await), cut, "one byte more");

    // Neither waits for an end that does not come.
    let target = Target::start(|_| Hang("HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n".into())).await;
    assert_eq!(result(&process(target.settings()).await), cut, "declared");
    let target = Target::start(|_| Flood("HTTP/1.1 200 OK\r\n\r\n".into())).await;
    assert_eq!(result(&process(target.settings()).await), cut, "endless");
}

#[tokio::test]
async fn what_cannot_be_sent_is_not_applied() {
    // A port that nobody listens on.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refused = format!("http://{}/?token=s3cret", listener.local_addr().unwrap());
    drop(listener);
    // A server that does not speak TLS.
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let no_tls = format!("https://{}/?token=s3cret", plain.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = plain.accept().await.unwrap();
        stream.write_all(answer("400 Bad Request", "", "what is this?").as_bytes()).await.unwrap();
        std::future::pending::<()>().await;
    });
    // One that says nothing at all.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let no_handshake = format!("https://{}/?token=s3cret", silent.local_addr().unwrap());

    for url in [&refused, "http://nonexistent.invalid/?token=s3cret", &no_tls, &no_handshake] {
        let mut settings = HttpEffectSettings::new(url, Recovery::Park);
        settings.allow_http = true;
        settings.timeout = Duration::from_secs(2);
        let subject = Subject::new(settings);
        let report = subject.process(&order()).await;
        assert_eq!(report.outcome.name(), "not-applied", "{url}: {report:?}");
        assert_eq!(subject.record(&report).await, None, "{url}: the claim is given back");
        assert!(reason(&report).starts_with("nothing was sent: "), "{report:?}");
        assert!(!reason(&report).contains("s3cret"), "{report:?}");
    }
}

/// What the target does, in words and in deed.
type Case = (&'static str, fn() -> Reply);

#[tokio::test]
async fn sent_without_a_complete_answer_is_unknown() {
    let cases: [Case; 6] = [
        ("hung up", || Close(String::new())),
        ("half a head", || Close("HTTP/1.1 200 OK\r\ncontent-le".into())),
        ("no HTTP", || Close("SSH-2.0-OpenSSH_9.6\r\n\r\n".into())),
        ("half a body", || Close("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"id\":1}".into())),
        ("half a chunked body", || Close("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{}\n\r\n".into())),
        ("half a body, then nothing", || Hang("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}".into())),
    ];
    for (what, reply) in cases {
        let target = Target::start(move |_| reply()).await;
        let mut settings = target.settings();
        settings.timeout = Duration::from_secs(1);
        let subject = Subject::new(settings);
        let report = subject.process(&order()).await;
        assert_eq!(report.outcome.name(), "unknown", "{what}: {report:?}");
        let state = subject.record(&report).await.unwrap().state;
        assert!(matches!(state, State::InProgress { lease: Some(Lease::GIVEN_UP), .. }), "{what}: {state:?}");
        assert_eq!(target.requests().len(), 1, "{what}: not sent again");
        assert!(!reason(&report).contains("s3cret"), "{report:?}");
    }
}

#[tokio::test]
async fn a_slow_target_is_unknown_at_the_time_limit() {
    let target = Target::start(|_| Hang(String::new())).await;
    let mut settings = target.settings();
    settings.timeout = Duration::from_millis(300);
    assert_eq!(HttpEffect::new(settings.clone()).unwrap().time_limit(), Some(Duration::from_millis(300)));
    let report = process(settings).await;
    assert_eq!(report.outcome.name(), "unknown");
    assert_eq!(reason(&report), "no answer within 300ms");
}

#[tokio::test]
async fn a_refusal_is_one_even_if_its_body_never_ends() {
    let head = "HTTP/1.1 400 Bad Request\r\ncontent-length: 100000\r\n\r\n";
    let replies: [fn(&str) -> Reply; 3] = [
        |head| Hang(format!("{head}no")),
        |head| Close(format!("{head}no")),
        |_| Flood("HTTP/1.1 400 Bad Request\r\n\r\nno".into()),
    ];
    for reply in replies {
        let target = Target::start(move |_| reply(head)).await;
        for (quote_answers, expected) in [(false, ""), (true, ": no")] {
            let mut settings = target.settings();
            settings.quote_answers = quote_answers;
            let report = process(settings).await;
            assert_eq!(report.outcome.name(), "permanent", "{report:?}");
            assert!(
                reason(&report).starts_with(&format!("the target answered 400 Bad Request{expected}")),
                "{report:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_refusal_that_repeats_what_it_was_sent_is_not_quoted() {
    // Anything that a target may say, and where: none of it is for a log.
    let card = "4111111111111111";
    let echoes: [(String, String, String); 4] = [
        ("422 Unprocessable Entity".into(), String::new(), format!("{{\"card\":\"{card}\"}}")),
        (format!("422 {card}"), String::new(), String::new()),
        ("422 No".into(), format!("content-type: text/{card}\r\n"), card.to_owned()),
        ("500 No".into(), format!("content-type: text/plain; card={card}\r\nx-card: {card}\r\n"), card.to_owned()),
    ];
    for (status, headers, body) in echoes {
        for recovery in [Recovery::Rerun, Recovery::Park] {
            let target = Target::answering(answer(&status, &headers, &body)).await;
            let subject = Subject::new(HttpEffectSettings::new(&target.url, recovery));
            let report = subject.process(&order()).await;
            let record = subject.record(&report).await;
            let again = subject.process(&order()).await;
            let parked = subject.record(&again).await;
            assert!(!format!("{report:?} {record:?} {again:?} {parked:?}").contains(card), "{report:?} {again:?}");
        }
    }
    for reply in [format!("400 {card}"), "400 No".to_owned()] {
        let target = Target::verifying(move || Answer(answer(&reply, "", card))).await;
        let (subject, report) = verify(&target).await;
        assert_eq!(report.outcome.name(), "parked");
        assert!(!format!("{report:?} {:?}", subject.record(&report).await).contains(card), "{report:?}");
    }
}

#[tokio::test]
async fn if_asked_to_a_reason_quotes_the_start_of_the_answer_in_print() {
    let body = format!("{{\"error\": \"no such\u{1b}[31m\n\u{202e}product\"}}{}", "x".repeat(5000));
    let target = Target::answering(answer("422 Unprocessable Entity", "", &body)).await;
    let mut settings = target.settings();
    settings.quote_answers = true;
    let reason = reason(&process(settings).await);
    let start =
        "the target answered 422 Unprocessable Entity: {\"error\": \"no such\\u{1b}[31m\\n\\u{202e}product\"}xx";
    assert!(reason.starts_with(start), "{reason}");
    assert!(reason.ends_with("xxx...") && reason.len() < 400, "{reason}");
    assert!(!reason.contains(char::is_control));
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let elsewhere = Target::answering(answer("200 OK", "", "")).await;
    for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary Redirect", "308 Permanent Redirect"] {
        let target = Target::answering(answer(status, &format!("location: {}\r\n", elsewhere.url), "")).await;
        let report = process(target.settings()).await;
        assert!(reason(&report).contains("with another address (redirects are not followed)"), "{report:?}");
        assert!(!reason(&report).contains("s3cret"));
        assert_eq!(target.requests().len(), 1);

        // Nor when it is asked what became of an earlier attempt.
        let location = format!("location: {}\r\n", elsewhere.url);
        let target = Target::verifying(move || Answer(answer(status, &location, ""))).await;
        assert_eq!(verify(&target).await.1.outcome.name(), "parked", "{status}");
        assert_eq!(target.requests().len(), 2, "{status}");
    }
    assert!(elsewhere.requests().is_empty());
}

/// Processes a message whose first attempt is cut off, and then again: once its lease is
/// over, since until then the first request may still be on its way.
async fn verify(target: &Target) -> (Subject, Report) {
    let subject = Subject::new(HttpEffectSettings::new(&target.url, Recovery::Verify));
    assert_eq!(subject.process(&order()).await.outcome.name(), "unknown");
    assert_eq!(subject.process(&order()).await.outcome.name(), "in-flight");
    subject.clock.advance(Duration::from_mins(1));
    let report = subject.process(&order()).await;
    (subject, report)
}

#[tokio::test]
async fn verify_takes_the_result_of_an_earlier_attempt() {
    let target = Target::verifying(|| Answer(answer("200 OK", "", "{\"charge\":\"ch_1\"}"))).await;
    let (_, report) = verify(&target).await;
    assert_eq!(report.outcome.name(), "recovered");
    assert_eq!(result(&report), r#"{"status":200,"body":{"charge":"ch_1"}}"#);
    let [post, get] = &target.requests()[..] else { panic!() };
    assert_eq!(
        (&post.line[..], &get.line[..]),
        ("POST /orders?token=s3cret HTTP/1.1", "GET /orders?token=s3cret HTTP/1.1")
    );
    assert_eq!(get.headers["idempotency-key"], post.headers["idempotency-key"]);
    assert_eq!(get.headers["cache-control"], "no-cache");
    let attempts = [post, get].map(|request| request.headers["idempotency-attempt"].as_str());
    assert_eq!(attempts, ["1", "2"], "a target that is asked can refuse the earlier attempt from then on");
    assert!(get.body.is_empty());
}

#[tokio::test]
async fn verify_applies_what_was_not_done() {
    let target = Target::verifying(|| Answer(answer("404 Not Found", "", ""))).await;
    let (_, report) = verify(&target).await;
    assert_eq!((report.outcome.name(), report.attempt), ("unknown", Some(2)), "this target hangs up on every POST");
    let methods: Vec<_> = target.requests().iter().map(|request| request.line[..4].to_owned()).collect();
    assert_eq!(methods, ["POST", "GET ", "POST"]);
}

#[tokio::test]
async fn verify_parks_what_cannot_be_told() {
    for status in ["201 Created", "204 No Content", "302 Found", "400 Bad Request", "410 Gone"] {
        let target = Target::verifying(move || Answer(answer(status, "location: /\r\n", ""))).await;
        let (subject, report) = verify(&target).await;
        assert_eq!(report.outcome.name(), "parked", "{status}");
        assert!(reason(&report).contains(&status[..3]), "{report:?}");
        assert!(matches!(subject.record(&report).await.unwrap().state, State::Parked { .. }));
        assert_eq!(target.requests().len(), 2, "{status}: asked once");
    }
}

#[tokio::test]
async fn verify_asks_again_if_there_was_no_answer_or_only_a_not_now() {
    let replies: [fn() -> Reply; 5] = [
        || Close(String::new()),
        || Close("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{".into()),
        || Answer(answer("429 Slow Down", "retry-after: 7\r\n", "")),
        || Answer(answer("500 Oops", "", "")),
        || Answer(answer("503 Unavailable", "", "")),
    ];
    for reply in replies {
        let target = Target::verifying(reply).await;
        let (subject, report) = verify(&target).await;
        assert_eq!(report.outcome.name(), "unknown", "{report:?}");
        assert!(reason(&report).starts_with("could not verify an earlier attempt"), "{report:?}");
        let report = subject.process(&order()).await;
        assert_eq!(report.attempt, Some(3));
        let methods: Vec<_> = target.requests().iter().map(|request| request.line[..4].to_owned()).collect();
        assert_eq!(methods, ["POST", "GET ", "GET "], "asked again, and not applied");
    }
}

#[tokio::test]
async fn connections_are_reused_except_where_an_unknown_outcome_costs_most() {
    for (recovery, connections) in [(Recovery::Rerun, 1), (Recovery::Verify, 1), (Recovery::Park, 3)] {
        let target = Target::answering(answer("200 OK", "", "{}")).await;
        let subject = Subject::new(HttpEffectSettings::new(&target.url, recovery));
        for n in 0..3 {
            let message = Message::new("m", "{}").with_attribute("key", n.to_string());
            assert_eq!(subject.process(&message).await.outcome.name(), "executed");
        }
        let last = target.requests().pop().unwrap().connection;
        assert_eq!(last + 1, connections, "{recovery}");
    }
}

#[tokio::test]
async fn a_connection_that_the_target_closed_costs_no_message() {
    let target = Target::start(|_| Close(answer("200 OK", "", "{}"))).await;
    let subject = Subject::new(target.settings());
    for n in 0..3 {
        let message = Message::new("m", "{}").with_attribute("key", n.to_string());
        assert_eq!(subject.process(&message).await.outcome.name(), "executed");
        target.wait_for_closed(n + 1).await;
    }
    assert_eq!(target.requests().len(), 3);
}

#[test]
fn settings_are_checked_all_at_once_and_never_quoted() {
    use InvalidSetting::{Fragment, NotUrl, PlainHttp, Scheme, UserInfo, ZeroTimeout};
    let cases: [(&str, &[InvalidSetting]); 38] = [
        ("https://example.com/orders?token=s3cret", &[]),
        ("http://localhost:8080/", &[]),
        ("http://127.1.2.3/", &[]),
        ("http://[::1]:80/", &[]),
        ("", &[NotUrl]),
        ("/orders", &[NotUrl]),
        ("https://", &[NotUrl]),
        ("example.com:443/s3cret", &[Scheme]),
        ("ftp://example.com/", &[Scheme]),
        ("http://example.com/", &[PlainHttp]),
        ("http://localhost.example.com/", &[PlainHttp]),
        ("http://[::ffff:10.0.0.1]/", &[PlainHttp]),
        // This machine, in the spellings that a browser reads as such.
        ("http://127.1/", &[]),
        ("http://0x7f.0.0.1/", &[]),
        ("http://2130706433/", &[]),
        ("http://0177.0.0.1/", &[]),
        ("http://LOCALHOST/", &[]),
        ("http://127.0.0.1./", &[]),
        ("http://[0:0:0:0:0:0:0:1]/", &[]),
        ("HTTP://127.0.0.1:80/", &[]),
        // Another one that is made to look like it, or nearly it: refused rather than guessed.
        ("http://localhost./", &[PlainHttp]),
        ("http://127.0.0.1.evil.com/", &[PlainHttp]),
        ("http://127.1.evil.com/", &[PlainHttp]),
        ("http://localhost.evil.com/", &[PlainHttp]),
        ("http://evillocalhost/", &[PlainHttp]),
        ("http://localhost@evil.com/", &[PlainHttp, UserInfo]),
        ("http://127.0.0.1:80@evil.com/", &[PlainHttp, UserInfo]),
        ("http://evil.com\\@127.0.0.1/", &[PlainHttp]),
        ("http://evil.com#@127.0.0.1/", &[PlainHttp, Fragment]),
        ("http://evil.com?@127.0.0.1/", &[PlainHttp]),
        ("http://0.0.0.0/", &[PlainHttp]),
        ("http://[::]/", &[PlainHttp]),
        ("http://[::ffff:127.0.0.1]/", &[PlainHttp]),
        ("http://128.0.0.1/", &[PlainHttp]),
        ("http:/evil.com/", &[PlainHttp]),
        ("http://127.0.0.1\u{ff0e}evil.com/", &[PlainHttp]),
        ("https://s3cret@example.com/", &[UserInfo]),
        ("http://user:s3cret@10.0.0.1/#part", &[PlainHttp, UserInfo, Fragment]),
    ];
    for (url, expected) in cases {
        let settings = HttpEffectSettings::new(url, Recovery::Rerun);
        assert!(!format!("{settings:?}").contains("s3cret"));
        match HttpEffect::new(settings) {
            Ok(effect) => {
                assert!(expected.is_empty(), "{url}");
                assert!(!format!("{effect:?}").contains("s3cret"));
            }
            Err(HttpEffectError::Settings(problems)) => assert_eq!(problems, expected, "{url}"),
            Err(error) => panic!("{url}: {error}"),
        }
    }
    let mut settings = HttpEffectSettings::new("nowhere s3cret", Recovery::Rerun);
    settings.timeout = Duration::ZERO;
    let error = HttpEffect::new(settings).unwrap_err();
    assert!(matches!(&error, HttpEffectError::Settings(problems) if problems[..] == [NotUrl, ZeroTimeout]));
    assert!(!error.to_string().contains("s3cret"), "{error}");

    let mut settings = HttpEffectSettings::new("http://10.0.0.1/", Recovery::Rerun);
    settings.allow_http = true;
    assert!(HttpEffect::new(settings).is_ok());
}

fn from_env(variables: &[(&str, &str)]) -> Result<HttpEffect, ConfigError> {
    let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
    let mut env = Environment::new(find);
    let effect = HttpEffect::from_env(&mut env);
    env.finish(effect)
}

/// What is wrong, as `(variable, advice)`.
fn problems(variables: &[(&str, &str)]) -> Vec<(&'static str, String)> {
    let error = from_env(variables).unwrap_err();
    error.problems().iter().map(|problem| (problem.variable, problem.advice.clone())).collect()
}

#[test]
fn the_environment_describes_the_effect() {
    let effect = from_env(&[("EFFECT_URL", " https://example.com/orders "), ("EFFECT_RECOVERY", "verify")]).unwrap();
    assert_eq!(effect.time_limit(), Some(Duration::from_secs(10)));
    assert_eq!(effect.recovery(), Recovery::Verify);

    let effect = from_env(&[
        ("EFFECT_URL", "http://10.0.0.1/"),
        ("EFFECT_ALLOW_HTTP", "true"),
        ("EFFECT_TIMEOUT_SECONDS", "29"),
        ("EFFECT_RECOVERY", "park"),
        ("VISIBILITY_TIMEOUT_SECONDS", "180"),
    ])
    .unwrap();
    assert_eq!(effect.time_limit(), Some(Duration::from_secs(29)));
    assert_eq!(effect.recovery(), Recovery::Park);
}

#[test]
fn all_that_is_wrong_with_the_environment_is_said_at_once() {
    let variables: Vec<_> = problems(&[]).into_iter().map(|(variable, _)| variable).collect();
    assert_eq!(variables, ["EFFECT_URL", "EFFECT_RECOVERY"]);

    let found = problems(&[
        ("EFFECT_URL", "http://example.com/#x"),
        ("EFFECT_ALLOW_HTTP", "yes"),
        ("EFFECT_TIMEOUT_SECONDS", "0"),
        ("EFFECT_RECOVERY", "retry"),
    ]);
    let variables: Vec<_> = found.iter().map(|(variable, _)| *variable).collect();
    let expected = ["EFFECT_ALLOW_HTTP", "EFFECT_URL", "EFFECT_URL", "EFFECT_TIMEOUT_SECONDS", "EFFECT_RECOVERY"];
    assert_eq!(variables, expected, "{found:?}");
    assert!(found[1].1.contains("EFFECT_ALLOW_HTTP=true"), "{found:?}");
}

#[test]
fn the_time_limit_must_fit_into_a_function_that_fits_the_queue() {
    let base = [("EFFECT_URL", "https://example.com/"), ("EFFECT_RECOVERY", "rerun")];
    let with = |visibility, timeout| {
        let mut variables = base.to_vec();
        variables.push(("VISIBILITY_TIMEOUT_SECONDS", visibility));
        variables.extend(Option::map(timeout, |timeout| ("EFFECT_TIMEOUT_SECONDS", timeout)));
        variables
    };
    for (visibility, timeout) in [("61", None), ("180", Some("29")), ("7", Some("1")), ("not a number", None)] {
        assert!(from_env(&with(visibility, timeout)).is_ok(), "{visibility} {timeout:?}");
    }
    for (visibility, timeout, right) in [
        ("60", None, "at most 9"),
        ("180", Some("30"), "at most 29"),
        ("180", Some("18446744073709551615"), "at most 29"),
        ("6", Some("1"), "raise VISIBILITY_TIMEOUT_SECONDS"),
        ("0", Some("1"), "raise VISIBILITY_TIMEOUT_SECONDS"),
    ] {
        let found = problems(&with(visibility, timeout));
        assert!(matches!(&found[..], [("EFFECT_TIMEOUT_SECONDS", advice)] if advice.contains(right)), "{found:?}");
    }
}
