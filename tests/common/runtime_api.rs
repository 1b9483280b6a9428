//! Lambda's Runtime API, for one function process.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use idempotent_consumer::time::{Clock, EpochMillis, SystemClock};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use super::wait::{eventually, soon, until};

/// How an invocation ended.
#[derive(Debug, Clone)]
pub struct Answer {
    pub result: InvocationResult,
    /// What was left until the deadline when the answer came; zero if it was late.
    pub time_left: Duration,
}

#[derive(Debug, Clone, PartialEq)]
pub enum InvocationResult {
    Response(Value),
    Error { error_type: String, message: String },
}

impl Answer {
    /// The ids of the messages that are reported as failed.
    pub fn failures(&self) -> Vec<String> {
        let InvocationResult::Response(response) = &self.result else {
            panic!("the invocation failed: {:?}", self.result);
        };
        let ids = |failures: &Value| -> Option<Vec<String>> {
            failures.as_array()?.iter().map(|failure| Some(failure["itemIdentifier"].as_str()?.to_owned())).collect()
        };
        ids(&response["batchItemFailures"]).unwrap_or_else(|| panic!("not a partial batch response: {response}"))
    }

    /// The type and the text of an invocation error.
    pub fn error(&self) -> (&str, &str) {
        match &self.result {
            InvocationResult::Error { error_type, message } => (error_type, message),
            InvocationResult::Response(response) => {
                panic!("the invocation should have failed, and answered {response}")
            }
        }
    }
}

/// Why a function could not start.
#[derive(Debug, Clone)]
pub struct InitFailure {
    /// The header `Lambda-Runtime-Function-Error-Type`.
    pub header: String,
    pub error_type: String,
    pub message: String,
}

struct Invocation {
    id: String,
    event: Value,
    time: Duration,
    answer: oneshot::Sender<Answer>,
}

struct Handed {
    deadline: EpochMillis,
    answer: oneshot::Sender<Answer>,
}

struct Shared {
    next: tokio::sync::Mutex<mpsc::UnboundedReceiver<Invocation>>,
    handed: Mutex<HashMap<String, Handed>>,
    polling: AtomicUsize,
    polled: AtomicUsize,
    taken: AtomicUsize,
    keeps_answers: std::sync::atomic::AtomicBool,
    kept: AtomicUsize,
    init_failures: Mutex<Vec<InitFailure>>,
}

/// A Runtime API on a loopback port.
pub struct RuntimeApi {
    /// `host:port`, for `AWS_LAMBDA_RUNTIME_API`.
    pub address: String,
    queue: mpsc::UnboundedSender<Invocation>,
    invoked: AtomicUsize,
    shared: Arc<Shared>,
}

impl RuntimeApi {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (queue, next) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            next: tokio::sync::Mutex::new(next),
            handed: Mutex::default(),
            polling: AtomicUsize::new(0),
            polled: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
            keeps_answers: false.into(),
            kept: AtomicUsize::new(0),
            init_failures: Mutex::default(),
        });
        let router = Router::new()
            .route("/2018-06-01/runtime/invocation/next", get(next_invocation))
            .route("/2018-06-01/runtime/invocation/{id}/response", post(response))
            .route("/2018-06-01/runtime/invocation/{id}/error", post(error))
            .route("/2018-06-01/runtime/init/error", post(init_error))
            .with_state(Arc::clone(&shared));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, queue, invoked: AtomicUsize::new(0), shared }
    }

    /// Queues an invocation; its time counts from when it is handed out. The future is the
    /// answer, and need not be awaited for the invocation to run.
    pub fn invoke(&self, event: Value, time: Duration) -> impl Future<Output = Answer> + use<> {
        let number = self.invoked.fetch_add(1, Ordering::SeqCst);
        let (answer, answered) = oneshot::channel();
        let id = format!("8476a536-e9f4-11e8-9739-{number:012}");
        self.queue.send(Invocation { id, event, time, answer }).unwrap();
        async move { soon("the answer to an invocation", answered).await.unwrap() }
    }

    /// How many requests for the next invocation are waiting at this moment.
    pub fn polling(&self) -> usize {
        self.shared.polling.load(Ordering::SeqCst)
    }

    /// Waits until the function has asked for its first invocation.
    pub async fn first_poll(&self) {
        until("the function to ask for its first invocation", || self.shared.polled.load(Ordering::SeqCst) > 0).await;
    }

    /// How many invocations were handed out.
    pub fn taken(&self) -> usize {
        self.shared.taken.load(Ordering::SeqCst)
    }

    /// From now on answers arrive, and are neither acknowledged nor passed on.
    pub fn keep_answers(&self) {
        self.shared.keeps_answers.store(true, Ordering::SeqCst);
    }

    /// Waits for an answer that was kept.
    pub async fn kept_answer(&self) {
        until("the function to send its answer", || self.shared.kept.load(Ordering::SeqCst) > 0).await;
    }

    /// All init errors so far, once there is one.
    pub async fn init_failures(&self) -> Vec<InitFailure> {
        eventually("an init error", async || {
            let failures = self.shared.init_failures.lock().unwrap();
            (!failures.is_empty()).then(|| failures.clone())
        })
        .await
    }
}

struct Polling(Arc<Shared>);

impl Drop for Polling {
    fn drop(&mut self) {
        self.0.polling.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn next_invocation(State(shared): State<Arc<Shared>>) -> Response {
    shared.polling.fetch_add(1, Ordering::SeqCst);
    shared.polled.fetch_add(1, Ordering::SeqCst);
    let polling = Polling(Arc::clone(&shared));
    let Some(Invocation { id, event, time, answer }) = shared.next.lock().await.recv().await else {
        return StatusCode::GONE.into_response();
    };
    drop(polling);
    let deadline = SystemClock.now().plus(time);
    shared.taken.fetch_add(1, Ordering::SeqCst);
    shared.handed.lock().unwrap().insert(id.clone(), Handed { deadline, answer });
    let headers = [
        ("lambda-runtime-aws-request-id", id),
        ("lambda-runtime-deadline-ms", deadline.get().to_string()),
        (
            "lambda-runtime-invoked-function-arn",
            "arn:aws:lambda:eu-central-1:123456789012:function:consumer".to_owned(),
        ),
        ("lambda-runtime-trace-id", "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700;Sampled=0".to_owned()),
    ];
    (headers, Json(event)).into_response()
}

async fn answered(shared: &Shared, id: &str, result: InvocationResult) -> Response {
    if shared.keeps_answers.load(Ordering::SeqCst) {
        shared.kept.fetch_add(1, Ordering::SeqCst);
        std::future::pending::<()>().await;
    }
    let Some(Handed { deadline, answer }) = shared.handed.lock().unwrap().remove(id) else {
        return (StatusCode::BAD_REQUEST, Json(json!({ "errorType": "InvalidRequestID" }))).into_response();
    };
    // A test that does not wait for the answer has dropped its end.
    let _ = answer.send(Answer { result, time_left: deadline.since(SystemClock.now()) });
    (StatusCode::ACCEPTED, Json(json!({ "status": "OK" }))).into_response()
}

async fn response(State(shared): State<Arc<Shared>>, Path(id): Path<String>, body: String) -> Response {
    // The runtime says no content type.
    answered(&shared, &id, InvocationResult::Response(serde_json::from_str(&body).unwrap())).await
}

async fn error(State(shared): State<Arc<Shared>>, Path(id): Path<String>, body: String) -> Response {
    let (error_type, message) = type_and_message(&body);
    answered(&shared, &id, InvocationResult::Error { error_type, message }).await
}

async fn init_error(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: String) -> Response {
    let header = headers.get("lambda-runtime-function-error-type").map_or("", |value| value.to_str().unwrap());
    let (error_type, message) = type_and_message(&body);
    shared.init_failures.lock().unwrap().push(InitFailure { header: header.to_owned(), error_type, message });
    (StatusCode::ACCEPTED, Json(json!({ "status": "OK" }))).into_response()
}

fn type_and_message(body: &str) -> (String, String) {
    let body: Value = serde_json::from_str(body).unwrap();
    let text = |name: &str| body[name].as_str().unwrap_or_else(|| panic!("no {name} in {body}")).to_owned();
    (text("errorType"), text("errorMessage"))
}
