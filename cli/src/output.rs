//! What is printed. Keys, ids and results come from messages and may hold anything, so
//! nothing of them reaches the terminal that would move its cursor.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use aws_lambda_events::event::sqs::SqsBatchResponse;
use idempotent_consumer::key::{Key, Scope};
use idempotent_consumer::outcome::{Disposition, Outcome, Report};
use serde_json::{Value, json};

use crate::effect::Application;

const HEADER: [&str; 6] = ["message", "group", "key", "attempt", "outcome", "result or reason"];
/// Wider cells are cut. The last column ends the line, so it may be long.
const WIDTHS: [usize; 6] = [12, 20, 32, 7, 12, 400];
/// More keys than these are counted, not listed.
const MAX_KEYS: usize = 20;

/// An invocation and what became of it.
pub(crate) struct Invocation<'a> {
    pub(crate) store: &'a Path,
    pub(crate) scope: &'a Scope,
    pub(crate) reports: Vec<Report>,
    pub(crate) applications: Vec<Application>,
    pub(crate) response: SqsBatchResponse,
}

impl Invocation<'_> {
    /// For people.
    pub(crate) fn to_text(&self) -> String {
        let mut text = table(self.reports.iter().map(row));
        let _ = writeln!(text, "\neffects that ran: {}", self.effects_in_words());
        let _ = writeln!(text, "response to Lambda: {}\n", escape_json(&json!(self.response).to_string()));
        let _ = writeln!(text, "{}", self.hint());
        text
    }

    /// For programs.
    pub(crate) fn to_json(&self) -> String {
        let messages: Vec<Value> = self
            .reports
            .iter()
            .map(|report| {
                json!({
                    "messageId": report.message_id,
                    "group": report.group,
                    "key": report.key.as_ref().map(Key::value),
                    "attempt": report.attempt,
                    "outcome": report.outcome.name(),
                    "disposition": match report.disposition() {
                        Disposition::Ack => "ack",
                        Disposition::Retry => "retry",
                        Disposition::DeadLetter => "dead-letter",
                    },
                    "result": report.outcome.result().map(|result| {
                        serde_json::from_str(&result.json).unwrap_or_else(|_| Value::from(result.json.as_str()))
                    }),
                    "reason": report.outcome.reason(),
                })
            })
            .collect();
        let document = json!({
            "store": self.store.to_string_lossy(),
            "scope": self.scope.as_str(),
            "messages": messages,
            "effects": self.effects(),
            "response": self.response,
        });
        escape_json(&format!("{document:#}\n"))
    }

    /// The keys whose effect ran, in the order of the messages.
    fn effects(&self) -> Vec<&str> {
        let ids = self.reports.iter().map(|report| report.message_id.as_str());
        let places: HashMap<&str, usize> = ids.zip(0..).collect();
        let mut applications: Vec<&Application> = self.applications.iter().collect();
        applications.sort_by_key(|application| places.get(application.message_id.as_str()));
        applications.into_iter().map(|application| application.key.as_str()).collect()
    }

    fn effects_in_words(&self) -> String {
        let keys = self.effects();
        if keys.is_empty() {
            return "none".to_owned();
        }
        let mut listed: Vec<String> = keys.iter().take(MAX_KEYS).map(|key| cell(key, 32)).collect();
        if keys.len() > MAX_KEYS {
            listed.push(format!("and {} more", keys.len() - MAX_KEYS));
        }
        format!("{} ({})", keys.len(), listed.join(", "))
    }

    fn hint(&self) -> String {
        let (failed, all) = (self.response.batch_item_failures.len(), self.reports.len());
        if all == 0 {
            return "The event has no messages.".to_owned();
        }
        if failed > 0 {
            return format!(
                "{failed} of {all} messages are reported failed: the queue delivers them again, until it has done so \
                 maxReceiveCount times and moves them to its dead-letter queue. `invoke --forget` starts over."
            );
        }
        if self.reports.iter().all(|report| matches!(report.outcome, Outcome::Replayed { .. })) {
            return "Every message was answered from the store, and no effect ran. `invoke --forget` starts over."
                .to_owned();
        }
        "Run it again: every message is replayed and no effect runs. `invoke --forget` starts over.".to_owned()
    }
}

fn row(report: &Report) -> [String; 6] {
    let result = report.outcome.result().map(|result| result.json.clone());
    [
        report.message_id.clone(),
        report.group.clone().unwrap_or_else(|| "-".to_owned()),
        report.key.as_ref().map_or("-", Key::value).to_owned(),
        report.attempt.map_or_else(|| "-".to_owned(), |attempt| attempt.to_string()),
        report.outcome.name().to_owned(),
        result.or_else(|| report.outcome.reason()).unwrap_or_default(),
    ]
}

/// Columns as wide as their widest cell.
fn table(rows: impl Iterator<Item = [String; 6]>) -> String {
    let mut lines = vec![HEADER.map(str::to_owned)];
    lines.extend(rows.map(|row| {
        let mut widths = WIDTHS.into_iter();
        row.map(|text| cell(&text, widths.next().unwrap_or(usize::MAX)))
    }));
    let mut widths = [0; 6];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<String> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A text for one line: what can't be seen is escaped, and what is too long is cut.
fn cell(text: &str, width: usize) -> String {
    let mut cell = String::new();
    for c in text.chars() {
        match c {
            // JSON and paths stay as they are.
            '"' | '\'' | '\\' => cell.push(c),
            _ => cell.extend(c.escape_debug()),
        }
    }
    match cell.char_indices().nth(width) {
        None => cell,
        Some(_) => cell.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
    }
}

/// The same JSON, with `\u....` for what can't be seen.
fn escape_json(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c == '\n' || c == '"' || c == '\'' || c == '\\' || c.escape_debug().len() == 1 {
            text.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        }
    }
    text
}

/// Prints to standard output. That nobody reads to the end is no failure.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Says what went wrong on standard error.
pub(crate) fn failure(text: &str, code: u8) -> ExitCode {
    let lines: Vec<String> = text.lines().map(|line| cell(line, usize::MAX)).collect();
    let _ = writeln!(io::stderr(), "error: {}", lines.join("\n"));
    ExitCode::from(code)
}
