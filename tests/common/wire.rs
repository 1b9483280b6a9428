//! Just enough HTTP/1.1 to stand in for a server, and to break off where no server would.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// One request or answer, with all its bytes.
#[derive(Debug, Clone)]
pub struct HttpMessage {
    /// The request line or the status line.
    pub start: String,
    headers: Vec<(String, String)>,
    pub body: String,
    pub bytes: Vec<u8>,
}

impl HttpMessage {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The status of an answer.
    pub fn status(&self) -> u16 {
        self.start.split(' ').nth(1).unwrap().parse().unwrap()
    }
}

/// A connection, and what was read from it beyond the last message.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    unread: Vec<u8>,
}

impl Connection {
    pub fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self { stream, unread: Vec::new() }
    }

    pub async fn connect(address: &str) -> std::io::Result<Self> {
        Ok(Self::new(TcpStream::connect(address).await?))
    }

    /// The next message; `None` if the other side is gone.
    pub async fn read(&mut self) -> Option<HttpMessage> {
        let head_end = loop {
            match self.unread.windows(4).position(|window| window == b"\r\n\r\n") {
                Some(position) => break position + 4,
                None => self.more().await?,
            }
        };
        let head = String::from_utf8(self.unread[..head_end].to_vec()).unwrap();
        let mut lines = head.lines();
        let start = lines.next().unwrap_or_default().to_owned();
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect();
        let mut message = HttpMessage { start, headers, body: String::new(), bytes: Vec::new() };
        assert!(message.header("transfer-encoding").is_none(), "a body in chunks: {head}");
        let length: usize = message.header("content-length").map_or(0, |length| length.parse().unwrap());
        while self.unread.len() < head_end + length {
            self.more().await?;
        }
        message.bytes = self.unread.drain(..head_end + length).collect();
        message.body = String::from_utf8_lossy(&message.bytes[head_end..]).into_owned();
        Some(message)
    }

    async fn more(&mut self) -> Option<()> {
        match self.stream.read_buf(&mut self.unread).await {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(()),
        }
    }

    /// Waits until the other side is gone.
    pub async fn closed(&mut self) {
        while self.more().await.is_some() {}
    }

    /// Sends; that the other side is gone shows at the next read.
    pub async fn write(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).await;
    }

    /// Sends, and says that there is no more. Not a reset, which would take back what the
    /// other side has not read yet.
    pub async fn write_and_close(&mut self, bytes: &[u8]) {
        self.write(bytes).await;
        let _ = self.stream.shutdown().await;
        self.closed().await;
    }

    pub async fn answer(&mut self, status: u16, body: &str) {
        let length = body.len();
        let head = format!("HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n");
        self.write(format!("{head}{body}").as_bytes()).await;
    }
}
