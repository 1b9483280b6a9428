//! What is logged, and how.
//!
//! One line per message, with the fields `message_id`, `key`, `group`, `attempt`,
//! `outcome` and, if the effect has no result, `reason`; `dead_lettered` is true once the
//! message has reached the dead-letter queue, `reduced` if the result could not be kept whole. Bodies, results and attributes are never
//! logged. Renaming a field is a breaking change.

#[cfg(feature = "lambda")]
pub mod one_line;

use crate::outcome::{Outcome, Report};

/// Logs what happened to one message.
pub fn log_report(report: &Report) {
    macro_rules! log {
        ($level:ident, $text:literal) => {
            tracing::$level!(
                message_id = report.message_id.as_str(),
                key = report.key.as_ref().map(crate::key::Key::id),
                group = report.group.as_deref(),
                attempt = report.attempt,
                outcome = report.outcome.name(),
                reason = report.outcome.reason().as_deref(),
                dead_lettered = report.dead_lettered.then_some(true),
                reduced = report.outcome.result().filter(|result| result.reduced).map(|_| true),
                $text
            )
        };
    }
    match &report.outcome {
        Outcome::Executed { .. } | Outcome::Replayed { .. } | Outcome::Recovered { .. } | Outcome::Applied { .. } => {
            log!(info, "message done");
        }
        Outcome::Ignored { .. } => log!(info, "message ignored"),
        Outcome::InFlight { .. } | Outcome::Unstarted { .. } => log!(info, "message left for later"),
        Outcome::NotApplied { .. } | Outcome::Unknown { .. } | Outcome::Fenced | Outcome::Unprotected { .. } => {
            log!(warn, "message needs attention if this goes on");
        }
        // Rejected, conflict, permanent, parked, locked, not recorded, store failed.
        _ => log!(error, "message needs attention"),
    }
}

/// Sends log lines to standard output as Lambda wants them: `AWS_LAMBDA_LOG_FORMAT`
/// `JSON` (default here) or `Text`, from `AWS_LAMBDA_LOG_LEVEL` (default `INFO`) up.
///
/// Every JSON line has an RFC 3339 `timestamp` and a `level`: without them Lambda's own
/// filter takes any line for INFO. Every event is [one line](one_line), whatever its fields
/// hold. Libraries below are held at WARN, whatever the level, because their finer lines hold
/// requests and with them bodies.
///
/// Does nothing if the program has set a subscriber of its own.
#[cfg(feature = "lambda")]
pub fn init(variable: impl Fn(&str) -> Option<String>) {
    use tracing_subscriber::util::SubscriberInitExt;

    // A second call finds a subscriber set, which is as good.
    let _ = subscriber(variable, std::io::stdout).try_init();
}

#[cfg(feature = "lambda")]
fn subscriber<W>(variable: impl Fn(&str) -> Option<String>, writers: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> tracing_subscriber::fmt::MakeWriter<'a> + Send + Sync + 'static,
{
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::{Layer, fmt};

    use self::one_line::{Escapes, OneLine};

    let level = match variable("AWS_LAMBDA_LOG_LEVEL").unwrap_or_default().to_ascii_uppercase().as_str() {
        "TRACE" => LevelFilter::TRACE,
        "DEBUG" => LevelFilter::DEBUG,
        "WARN" => LevelFilter::WARN,
        "ERROR" | "FATAL" => LevelFilter::ERROR,
        _ => LevelFilter::INFO,
    };
    let below = level.min(LevelFilter::WARN);
    let targets = Targets::new()
        .with_default(level)
        .with_targets(["aws_", "h2", "hyper", "lambda_runtime", "reqwest", "rustls"].map(|library| (library, below)));
    let text = variable("AWS_LAMBDA_LOG_FORMAT").is_some_and(|format| format.eq_ignore_ascii_case("text"));
    let layer = fmt::layer().with_ansi(false);
    let layer = if text {
        layer.with_writer(OneLine::new(writers, Escapes::Text)).boxed()
    } else {
        let layer = layer.json().flatten_event(true).with_current_span(false).with_span_list(false);
        layer.with_writer(OneLine::new(writers, Escapes::Json)).boxed()
    };
    tracing_subscriber::registry().with(targets).with(layer)
}

#[cfg(all(test, feature = "lambda"))]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use serde_json::Value;

    use super::*;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What is written while `work` logs.
    fn logged(format: &'static str, work: impl FnOnce()) -> String {
        let output = Output::default();
        let variable = |name: &str| (name == "AWS_LAMBDA_LOG_FORMAT").then(|| format.to_owned());
        let writers = {
            let output = output.clone();
            move || output.clone()
        };
        tracing::subscriber::with_default(subscriber(variable, writers), work);
        String::from_utf8(output.0.lock().unwrap().clone()).unwrap()
    }

    /// Everything that moves a cursor, ends a line or a string, or turns text around.
    fn hostile() -> String {
        let controls = ('\0'..='\u{9f}').filter(|c| c.is_control()).collect::<String>();
        format!(
            "{controls}\"'`\\ {{\"level\":\"INFO\"}}\r\n\u{1b}[2K\u{9b}31m\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202b}\
             \u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}\n2026-01-01T00:00:00Z ERROR forged: \u{e9}\u{1f980}"
        )
    }

    fn log_hostile(hostile: &str) {
        // By each way that a value takes: as text, as an error, as a panic, in a reason.
        let error = std::io::Error::other(hostile.to_owned());
        tracing::error!(text = hostile, error = %error, debug = ?hostile, panic = %hostile, "a line");
        tracing::error!("{hostile}");
        let mut message = crate::message::Message::new(hostile, "{}").with_group(hostile);
        message = message.rejected(hostile);
        let key = crate::key::KeyValue::from_string(hostile).unwrap();
        let key = crate::key::Key::new(&crate::key::Scope::new("s").unwrap(), &key);
        let outcome = Outcome::Rejected { reason: hostile.to_owned() };
        log_report(&Report::new(&message, Some(key), Some(1), outcome));
    }

    #[test]
    fn an_event_is_one_json_object_on_one_line_and_its_fields_keep_their_values() {
        let hostile = hostile();
        let output = logged("JSON", || log_hostile(&hostile));
        assert!(!output.contains(|c: char| c != '\n' && c.is_control()), "{output:?}");
        let lines: Vec<&str> = output.lines().collect();
        assert_eq!((lines.len(), output.matches('\n').count()), (3, 3), "{output}");
        let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        for field in ["text", "error", "panic"] {
            assert_eq!(lines[0][field], hostile.as_str(), "{field}");
        }
        assert_eq!(lines[0]["debug"], format!("{hostile:?}"));
        assert_eq!((&lines[0]["message"], &lines[0]["level"]), (&"a line".into(), &"ERROR".into()));
        assert_eq!(lines[1]["message"], hostile.as_str());
        for field in ["message_id", "group", "reason"] {
            assert_eq!(lines[2][field], hostile.as_str(), "{field}");
        }
        assert!(lines[2]["key"].as_str().unwrap().starts_with("s#\0"));
    }

    #[test]
    fn an_event_in_text_is_one_line_that_moves_no_cursor() {
        let hostile = hostile();
        let output = logged("Text", || log_hostile(&hostile));
        let lines: Vec<&str> = output.split('\n').collect();
        assert_eq!(lines.len(), 4, "three, and the end: {output}");
        for line in &lines[..3] {
            assert!(line.contains(" ERROR idempotent_consumer::telemetry") && line.contains("forged"), "{line}");
            for c in hostile.chars().filter(|c| !c.is_ascii_graphic() && !matches!(c, ' ' | '\u{e9}' | '\u{1f980}')) {
                assert!(!line.contains(c), "{c:?} in {line:?}");
            }
        }
        assert!(lines[1].contains(r"\u{202e}") && lines[1].contains(r"\r\n"), "{output}");
    }
}
