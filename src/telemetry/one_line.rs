//! Lines that no logged text can break, forge or repaint.
//!
//! Keys, ids and reasons hold whatever a message held. A formatter quotes most of it and not
//! all: an error shown with `Display` brings its line ends along, and JSON leaves U+2028, U+0085 and
//! the characters that turn the direction of text as they are. So every line passes here last.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

use tracing_subscriber::fmt::MakeWriter;

/// How a character that is not written as it is stands in its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Escapes {
    /// `\u2028`: within a JSON string, where alone it can stand, it means the same.
    Json,
    /// `\n`, `\u{2028}`.
    Text,
}

/// Writers to which every event is one line, whatever its fields hold.
#[derive(Debug, Clone)]
pub struct OneLine<M> {
    writers: M,
    escapes: Escapes,
}

impl<M> OneLine<M> {
    /// The same writers, each event one line.
    pub fn new(writers: M, escapes: Escapes) -> Self {
        Self { writers, escapes }
    }
}

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for OneLine<M> {
    type Writer = Line<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        Line { writer: self.writers.make_writer(), escapes: self.escapes }
    }

    fn make_writer_for(&'a self, event: &tracing::Metadata<'_>) -> Self::Writer {
        Line { writer: self.writers.make_writer_for(event), escapes: self.escapes }
    }
}

/// The writer of one event: the formatter writes it whole, at once.
#[derive(Debug)]
pub struct Line<W> {
    writer: W,
    escapes: Escapes,
}

impl<W: Write> Write for Line<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write_all(escape(&String::from_utf8_lossy(bytes), self.escapes).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// The event without what moves a cursor, its own line end apart.
fn escape(event: &str, escapes: Escapes) -> Cow<'_, str> {
    let (text, end) = event.strip_suffix('\n').map_or((event, ""), |text| (text, "\n"));
    if !text.contains(is_active) {
        return Cow::Borrowed(event);
    }
    let mut line = String::with_capacity(event.len() + 16);
    for c in text.chars() {
        match escapes {
            _ if !is_active(c) => line.push(c),
            Escapes::Text => line.extend(c.escape_default()),
            Escapes::Json => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(line, "\\u{unit:04x}").unwrap_or_default();
                }
            }
        }
    }
    line.push_str(end);
    Cow::Owned(line)
}

/// Whether a terminal or a viewer would do something about the character instead of showing
/// it: control characters, separators of lines, marks that turn the direction of text.
fn is_active(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
