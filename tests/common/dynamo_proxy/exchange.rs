//! A request that the proxy forwards, seen to its end.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use super::{Passage, Shared};
use crate::common::wire::{Connection, HttpMessage};

/// One request to DynamoDB, and its answer.
pub(super) async fn exchange(
    shared: Arc<Shared>,
    request: HttpMessage,
    position: usize,
    passage: Passage,
) -> Option<HttpMessage> {
    let _underway = Underway::new(&shared);
    if let Passage::Late(time) | Passage::Unfenced(time) = passage {
        tokio::time::sleep(time).await;
    }
    let bytes = if matches!(passage, Passage::Unfenced(_)) { unfenced(&request) } else { request.bytes };
    let order = shared.order.lock().unwrap().clone();
    let _turn = match &order {
        Some(order) => Some(order.lock().await),
        None => None,
    };
    let upstream = shared.upstream.lock().unwrap().clone();
    let mut upstream = Connection::connect(&upstream).await.ok()?;
    upstream.write(&bytes).await;
    let answer = upstream.read().await?;
    shared.settle(position, Some(answer.status()));
    Some(answer)
}

/// Keeps a request counted.
struct Underway<'a>(&'a AtomicUsize);

impl<'a> Underway<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.underway.fetch_add(1, Ordering::SeqCst);
        Self(&shared.underway)
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The same request with a condition that always holds.
fn unfenced(request: &HttpMessage) -> Vec<u8> {
    let mut body: Value = serde_json::from_str(&request.body).unwrap();
    if let Some(Value::String(condition)) = body.get_mut("ConditionExpression") {
        *condition = format!("({condition}) OR attribute_not_exists(not_there)");
    }
    let body = body.to_string();
    let head = String::from_utf8_lossy(&request.bytes[..request.bytes.len() - request.body.len()]).into_owned();
    let head: String = head
        .split_inclusive("\r\n")
        .map(|line| match line.split_once(':') {
            Some((name, _)) if name.eq_ignore_ascii_case("content-length") => format!("{name}: {}\r\n", body.len()),
            _ => line.to_owned(),
        })
        .collect();
    format!("{head}{body}").into_bytes()
}
