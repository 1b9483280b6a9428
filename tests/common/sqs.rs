//! Just enough of Amazon SQS: takes requests, answers them as told, and remembers them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

pub const QUEUE: &str = "https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo";
pub const LETTERS: &str = "https://sqs.eu-central-1.amazonaws.com/123456789012/letters.fifo";

#[derive(Debug, Clone)]
pub enum Answer {
    /// Does it, after so long.
    Late(Duration),
    /// A refusal: status and error type.
    Error(u16, &'static str),
    /// This body.
    Body(Value),
}

/// Is told operation and body of what is done, before the answer is sent.
type Watch = Arc<dyn Fn(&str, &Value) + Send + Sync>;

#[derive(Default)]
struct Shared {
    requests: Mutex<Vec<(String, Value)>>,
    answers: Mutex<VecDeque<Answer>>,
    watch: Mutex<Option<Watch>>,
}

/// An SQS on a loopback port.
pub struct Sqs {
    pub url: String,
    shared: Arc<Shared>,
}

impl Sqs {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared::default());
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, shared }
    }

    /// A client of it, with the settings of the function's.
    pub fn client(&self) -> Client {
        let config = aws_sdk_sqs::Config::builder()
            .behavior_version(BehaviorVersion::v2026_01_12())
            .region(Region::new("eu-central-1"))
            .credentials_provider(Credentials::new("key", "secret", None, None, "test"))
            .endpoint_url(&self.url);
        Client::from_conf(idempotent_consumer::sqs::tune(config).build())
    }

    /// The next requests are answered so, one after the other.
    pub fn answer(&self, answers: impl IntoIterator<Item = Answer>) {
        self.shared.answers.lock().unwrap().extend(answers);
    }

    /// From now on `watch` is told of what is done.
    pub fn watch(&self, watch: impl Fn(&str, &Value) + Send + Sync + 'static) {
        *self.shared.watch.lock().unwrap() = Some(Arc::new(watch));
    }

    /// Operation and body of each request so far.
    pub fn requests(&self) -> Vec<(String, Value)> {
        self.shared.requests.lock().unwrap().clone()
    }

    pub fn operations(&self) -> Vec<String> {
        self.requests().into_iter().map(|(operation, _)| operation).collect()
    }
}

async fn answer(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: String) -> Response {
    let target = headers["x-amz-target"].to_str().unwrap().to_owned();
    let operation = target.rsplit('.').next().unwrap().to_owned();
    let body: Value = serde_json::from_str(&body).unwrap();
    shared.requests.lock().unwrap().push((operation.clone(), body.clone()));
    let next = shared.answers.lock().unwrap().pop_front();
    let watch = shared.watch.lock().unwrap().clone();
    if let Some(watch) = watch.filter(|_| !matches!(next, Some(Answer::Error(..)))) {
        watch(&operation, &body);
    }
    let done = match operation.as_str() {
        "SendMessage" => json!({ "MessageId": "sent" }),
        "ChangeMessageVisibilityBatch" => {
            let ids: Vec<_> =
                body["Entries"].as_array().unwrap().iter().map(|entry| json!({ "Id": entry["Id"] })).collect();
            json!({ "Successful": ids, "Failed": [] })
        }
        other => json!({ "__type": format!("InvalidAction {other}") }),
    };
    let (status, body) = match next {
        None => (200, done),
        Some(Answer::Late(time)) => {
            tokio::time::sleep(time).await;
            (200, done)
        }
        Some(Answer::Error(status, kind)) => {
            (status, json!({ "__type": format!("com.amazonaws.sqs#{kind}"), "message": "made to fail" }))
        }
        Some(Answer::Body(body)) => (200, body),
    };
    (StatusCode::from_u16(status).unwrap(), [("content-type", "application/x-amz-json-1.0")], body.to_string())
        .into_response()
}
