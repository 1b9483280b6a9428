//! The target of the effect: fails in every way that a target can, and writes down what it
//! got and what it did.
//!
//! With `rerun` it deduplicates by key. With `verify` and `park` it does not: each request
//! that it applies counts. Asked whether a key was applied it tells the truth: "not now"
//! while a request for it is being worked on, or, if it fences, "no", and from then on it
//! refuses the attempts before the one that has asked.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;

use super::history::{Event, History, Meaning};
use super::logs::Logs;
use super::plan::{Mode, Random, Round, Sabotage};
use crate::common::wire::{Connection, HttpMessage};

/// The effect's time limit.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// What it does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Apply,
    Slow(Duration),
    /// An answer; `.1` whether it is applied all the same, `.2` a `Retry-After`.
    Answer(u16, bool, Option<u64>),
    /// The connection is closed without an answer.
    Close(bool),
    /// The answer comes too late.
    TooSlow(Duration, Applied),
}

/// When something is applied that is not answered in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Applied {
    AtOnce,
    AtTheEnd,
    Never,
}

impl Fate {
    fn name(self) -> &'static str {
        match self {
            Self::Apply => "200",
            Self::Slow(_) => "200, slowly",
            Self::Answer(400 | 422, ..) => "400 or 422",
            Self::Answer(425 | 429, ..) => "425 or 429",
            Self::Answer(408, ..) => "408",
            Self::Answer(503, ..) => "503",
            Self::Answer(_, true, _) => "500, applied",
            Self::Answer(..) => "500, not applied",
            Self::Close(true) => "connection closed, applied",
            Self::Close(false) => "connection closed, not applied",
            Self::TooSlow(_, Applied::AtOnce) => "no answer in time, applied at once",
            Self::TooSlow(_, Applied::AtTheEnd) => "no answer in time, applied late",
            Self::TooSlow(_, Applied::Never) => "no answer in time, not applied",
        }
    }

    fn meaning(self) -> Meaning {
        match self {
            Self::Apply | Self::Slow(_) => Meaning::Applied,
            Self::Answer(400 | 422, ..) => Meaning::Never,
            Self::Answer(425 | 429, ..) => Meaning::NotApplied,
            _ => Meaning::Unclear,
        }
    }

    fn drawn(random: &mut Random) -> Self {
        let slow = Self::Slow(random.millis(20, 700));
        let beyond = TIMEOUT + random.millis(200, 1500);
        let wait = random.chance(500).then(|| random.below(30));
        let applied = random.chance(500);
        random.weighted(&[
            (6, slow),
            (3, Self::Answer(503, false, wait)),
            (3, Self::Answer(429, false, wait)),
            (1, Self::Answer(425, false, None)),
            (1, Self::Answer(400, false, None)),
            (1, Self::Answer(422, false, None)),
            (2, Self::Answer(408, applied, None)),
            (4, Self::Answer(500, applied, None)),
            (4, Self::Close(true)),
            (3, Self::Close(false)),
            (2, Self::TooSlow(beyond, Applied::AtOnce)),
            (2, Self::TooSlow(beyond, Applied::AtTheEnd)),
            (2, Self::TooSlow(beyond, Applied::Never)),
        ])
    }
}

struct Known {
    random: Random,
    faults: u64,
    /// What was answered as a key was applied, the first time.
    applied: HashMap<String, Value>,
    applications: u64,
    /// Requests that may yet be applied.
    underway: HashMap<String, usize>,
    /// The highest attempt that has asked about a key.
    asked: HashMap<String, u64>,
}

struct Shared {
    history: History,
    logs: Logs,
    known: Mutex<Known>,
    deduplicates: bool,
    fences: bool,
    refuses: watch::Sender<bool>,
}

/// A target on a loopback port.
pub struct Target {
    pub url: String,
    shared: Arc<Shared>,
    /// Keeps the port while nothing listens on it.
    _place: TcpSocket,
}

fn socket(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseport(true).unwrap();
    socket.bind(address).unwrap();
    socket
}

impl Target {
    pub fn start(round: &Round, history: &History, logs: &Logs) -> Self {
        let place = socket(SocketAddr::from(([127, 0, 0, 1], 0)));
        let address = place.local_addr().unwrap();
        let known = Known {
            random: round.random.fork(2),
            faults: round.target_faults,
            applied: HashMap::new(),
            applications: 0,
            underway: HashMap::new(),
            asked: HashMap::new(),
        };
        let shared = Arc::new(Shared {
            history: history.clone(),
            logs: logs.clone(),
            known: Mutex::new(known),
            deduplicates: round.mode == Mode::Rerun && round.sabotage != Some(Sabotage::TargetForgets),
            fences: round.fences(),
            refuses: watch::Sender::new(false),
        });
        tokio::spawn(listen(address, Arc::clone(&shared)));
        Self { url: format!("http://{address}/effects"), shared, _place: place }
    }

    /// Whether connections are refused from now on.
    pub fn refuse(&self, refuse: bool) {
        self.shared.refuses.send_replace(refuse);
    }

    /// From now on everything is applied, and answered.
    pub fn calm(&self) {
        self.refuse(false);
        self.shared.known.lock().unwrap().faults = 0;
    }

    /// How many requests may yet be applied.
    pub fn underway(&self) -> usize {
        self.shared.known.lock().unwrap().underway.values().sum()
    }
}

async fn listen(address: SocketAddr, shared: Arc<Shared>) {
    let mut refuses = shared.refuses.subscribe();
    loop {
        refuses.wait_for(|refuses| !refuses).await.unwrap();
        let listener: TcpListener = socket(address).listen(1024).unwrap();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let (stream, _) = accepted.unwrap();
                    tokio::spawn(serve(Connection::new(stream), Arc::clone(&shared)));
                }
                _ = refuses.wait_for(|refuses| *refuses) => break,
            }
        }
    }
}

async fn serve(mut connection: Connection, shared: Arc<Shared>) {
    while let Some(request) = connection.read().await {
        let goes_on = if request.start.starts_with("GET ") {
            verify(&mut connection, &shared, &request).await
        } else {
            post(&mut connection, &shared, &request).await
        };
        if !goes_on {
            return;
        }
    }
}

fn header(request: &HttpMessage, name: &str) -> String {
    request.header(name).unwrap_or_else(|| panic!("no {name} in {request:?}")).to_owned()
}

fn attempt(request: &HttpMessage) -> u64 {
    header(request, "idempotency-attempt").parse().unwrap()
}

/// The answer to whether a key was applied; false once the connection is to be closed.
async fn verify(connection: &mut Connection, shared: &Shared, request: &HttpMessage) -> bool {
    let key = header(request, "idempotency-key");
    let (status, body) = {
        let mut known = shared.known.lock().unwrap();
        let faults = known.faults / 2;
        let fault = known.random.chance(faults).then(|| known.random.weighted(&[(4, 503), (2, 429), (2, 0), (1, 403)]));
        let asked = known.asked.entry(key.clone()).or_default();
        *asked = attempt(request).max(*asked);
        let truth = match known.applied.get(&key) {
            _ if known.underway.contains_key(&key) && !shared.fences => (425, String::new()),
            Some(answer) => (200, answer.to_string()),
            None => (404, String::new()),
        };
        let answer = fault.map_or(truth, |status| (status, String::new()));
        shared.history.record(Event::Asked { key, answer: answer.0 });
        answer
    };
    if status == 0 {
        return false;
    }
    connection.answer(status, &body).await;
    true
}

/// Takes a request; false once the connection is to be closed.
async fn post(connection: &mut Connection, shared: &Arc<Shared>, request: &HttpMessage) -> bool {
    let (key, message) = (header(request, "idempotency-key"), header(request, "message-id"));
    let fate = arrive(shared, request, &key, &message);
    let apply = || apply(shared, &key, attempt(request), &message);
    let answer = match fate {
        Fate::Apply => Some(apply()),
        Fate::Slow(time) => {
            tokio::time::sleep(time).await;
            Some(apply())
        }
        Fate::TooSlow(time, applied) => {
            let early = (applied == Applied::AtOnce).then(apply);
            tokio::time::sleep(time).await;
            early.or_else(|| (applied == Applied::AtTheEnd).then(apply))
        }
        Fate::Answer(_, true, _) | Fate::Close(true) => apply().is_none().then_some(None),
        Fate::Answer(..) | Fate::Close(_) => None,
    };
    let refused = answer == Some(None);
    let (name, meaning) =
        if refused { ("409, a later attempt has asked", Meaning::Unclear) } else { (fate.name(), fate.meaning()) };
    {
        let mut known = shared.known.lock().unwrap();
        let count = known.underway.get_mut(&key).unwrap();
        *count -= 1;
        if *count == 0 {
            known.underway.remove(&key);
        }
        shared.history.record(Event::Answered { key, message, fate: name, meaning });
    }
    match (fate, answer.flatten()) {
        _ if refused => connection.answer(409, "").await,
        (Fate::Answer(status, _, wait), _) => {
            let wait = wait.map(|seconds| format!("retry-after: {seconds}\r\n")).unwrap_or_default();
            let head = format!("HTTP/1.1 {status} -\r\n{wait}content-length: 0\r\n\r\n");
            connection.write(head.as_bytes()).await;
        }
        (Fate::Close(_), _) | (_, None) => return false,
        (_, Some(answer)) => connection.answer(200, &answer.to_string()).await,
    }
    true
}

fn arrive(shared: &Shared, request: &HttpMessage, key: &str, message: &str) -> Fate {
    let attempt = attempt(request);
    shared.logs.read_all();
    let mut known = shared.known.lock().unwrap();
    *known.underway.entry(key.to_owned()).or_default() += 1;
    shared.history.record(Event::Arrived { key: key.to_owned(), attempt, message: message.to_owned() });
    let faults = known.faults;
    match known.random.below(1000) {
        chance if chance < faults => Fate::drawn(&mut known.random),
        // Work takes a while, so that there is time to be killed in.
        chance if chance < 700 && faults > 0 => Fate::Slow(known.random.millis(5, 150)),
        _ => Fate::Apply,
    }
}

/// Applies a key; the answer, `None` if the attempt is refused.
fn apply(shared: &Shared, key: &str, attempt: u64, message: &str) -> Option<Value> {
    let mut known = shared.known.lock().unwrap();
    if shared.fences && known.asked.get(key).is_some_and(|asked| attempt < *asked) {
        return None;
    }
    if shared.deduplicates
        && let Some(answer) = known.applied.get(key)
    {
        return Some(answer.clone());
    }
    known.applications += 1;
    let answer = json!({ "key": key, "application": known.applications });
    known.applied.entry(key.to_owned()).or_insert_with(|| answer.clone());
    shared.history.record(Event::Applied { key: key.to_owned(), message: message.to_owned(), answer: answer.clone() });
    Some(answer)
}
