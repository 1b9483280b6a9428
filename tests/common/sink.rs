//! The target of the HTTP effect: remembers what it was sent, and answers as a test says.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::wait::until;
use super::wire::{Connection, HttpMessage};

/// What the sink does with a POST.
#[derive(Debug, Clone, PartialEq)]
pub enum Behaviour {
    /// Applies it, and answers 200 with the key and which POST of this key it was.
    Apply,
    /// Applies it once the gate is open, then answers.
    Hold,
    /// Applies it at once, and answers once the gate is open.
    ApplyAndHold,
    /// Answers with this status and body. 2xx applies.
    Answer(u16, String),
    /// Applies it, and closes the connection instead of answering.
    ApplyAndClose,
    /// Closes the connection; nothing is applied.
    Close,
}

/// A POST as it arrived.
#[derive(Debug, Clone, PartialEq)]
pub struct Post {
    pub key: String,
    pub attempt: u64,
    pub message_id: String,
    pub body: String,
    /// Keys of the POSTs that were not answered yet when this one came.
    pub beside: Vec<String>,
}

#[derive(Default)]
struct Known {
    posts: Vec<Post>,
    gets: Vec<String>,
    /// Keys that were applied, with the answer: a second POST changes nothing.
    applied: BTreeMap<String, String>,
    in_flight: Vec<String>,
    high_water: usize,
    behaviours: HashMap<String, Behaviour>,
    verify: Option<(u16, String)>,
    released: BTreeSet<String>,
}

/// A target on a loopback port.
pub struct Sink {
    pub url: String,
    shared: Arc<Shared>,
}

struct Shared {
    known: Mutex<Known>,
    default: Mutex<Behaviour>,
    gate: watch::Sender<bool>,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap()
    }
}

impl Sink {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/effects", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            known: Mutex::default(),
            default: Mutex::new(Behaviour::Apply),
            gate: watch::Sender::new(false),
        });
        let serving = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(Connection::new(stream), Arc::clone(&serving)));
            }
        });
        Self { url, shared }
    }

    /// What happens to every POST that nothing else is said about.
    pub fn behave(&self, behaviour: Behaviour) {
        *self.shared.default.lock().unwrap() = behaviour;
    }

    /// What happens to POSTs with this key.
    pub fn behave_for(&self, key: &str, behaviour: Behaviour) {
        self.shared.known().behaviours.insert(key.to_owned(), behaviour);
    }

    /// What is answered to every GET, instead of whether the key was applied.
    pub fn verify_with(&self, status: u16, body: &str) {
        self.shared.known().verify = Some((status, body.to_owned()));
    }

    /// Lets go what is held, and holds nothing any more.
    pub fn open_gate(&self) {
        self.shared.gate.send_replace(true);
    }

    /// Lets go what is held of one key.
    pub fn release(&self, key: &str) {
        self.shared.known().released.insert(key.to_owned());
        self.shared.gate.send_modify(|_| {});
    }

    /// All POSTs, in the order of their arrival.
    pub fn posts(&self) -> Vec<Post> {
        self.shared.known().posts.clone()
    }

    pub fn keys(&self) -> Vec<String> {
        self.shared.known().posts.iter().map(|post| post.key.clone()).collect()
    }

    /// Keys and attempts of all POSTs.
    pub fn attempts(&self) -> Vec<(String, u64)> {
        self.shared.known().posts.iter().map(|post| (post.key.clone(), post.attempt)).collect()
    }

    /// Keys of all GETs, in the order of their arrival.
    pub fn gets(&self) -> Vec<String> {
        self.shared.known().gets.clone()
    }

    /// Keys that were applied.
    pub fn applied(&self) -> Vec<String> {
        self.shared.known().applied.keys().cloned().collect()
    }

    /// What was answered when the key was applied.
    pub fn answer_of(&self, key: &str) -> Value {
        let known = self.shared.known();
        serde_json::from_str(known.applied.get(key).unwrap_or_else(|| panic!("{key} was not applied"))).unwrap()
    }

    /// Most POSTs that were there unanswered at one moment.
    pub fn high_water(&self) -> usize {
        self.shared.known().high_water
    }

    /// Waits until there were so many POSTs in all.
    pub async fn wait_for_posts(&self, count: usize) {
        until(&format!("POST number {count}"), || self.posts().len() >= count).await;
    }

    /// Waits until nobody waits for an answer.
    pub async fn wait_for_quiet(&self) {
        until("all POSTs to be over", || self.shared.known().in_flight.is_empty()).await;
    }
}

async fn serve(mut connection: Connection, shared: Arc<Shared>) {
    while let Some(request) = connection.read().await {
        let key = request.header("idempotency-key").unwrap_or_else(|| panic!("no key in {request:?}")).to_owned();
        let goes_on = if request.start.starts_with("GET ") {
            let (status, body) = verify(&shared, &key);
            connection.answer(status, &body).await;
            true
        } else {
            apply(&mut connection, &shared, &request, &key).await
        };
        if !goes_on {
            return;
        }
    }
}

fn verify(shared: &Shared, key: &str) -> (u16, String) {
    let mut known = shared.known();
    known.gets.push(key.to_owned());
    match (&known.verify, known.applied.get(key)) {
        (Some(answer), _) => answer.clone(),
        (None, Some(body)) => (200, body.clone()),
        (None, None) => (404, String::new()),
    }
}

/// Keeps a POST on the list of those that are not answered.
struct InFlight<'a>(&'a Shared, &'a str);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let mut known = self.0.known();
        let position = known.in_flight.iter().position(|key| key == self.1).unwrap();
        known.in_flight.remove(position);
    }
}

/// False once the connection is to be closed.
async fn apply(connection: &mut Connection, shared: &Shared, request: &HttpMessage, key: &str) -> bool {
    let behaviour = arrive(shared, request, key);
    let in_flight = InFlight(shared, key);
    match behaviour {
        Behaviour::Apply => {}
        Behaviour::Hold => {
            if !released(connection, shared, key).await {
                return false;
            }
        }
        Behaviour::ApplyAndHold => {
            done(shared, key);
            if !released(connection, shared, key).await {
                return false;
            }
        }
        Behaviour::Answer(status, body) => {
            if (200..300).contains(&status) {
                shared.known().applied.entry(key.to_owned()).or_insert_with(|| body.clone());
            }
            drop(in_flight);
            connection.answer(status, &body).await;
            return true;
        }
        Behaviour::ApplyAndClose => {
            done(shared, key);
            return false;
        }
        Behaviour::Close => return false,
    }
    let body = done(shared, key);
    // Before the answer: whoever has it may send the next at once.
    drop(in_flight);
    connection.answer(200, &body).await;
    true
}

fn arrive(shared: &Shared, request: &HttpMessage, key: &str) -> Behaviour {
    assert!(request.start.starts_with("POST /effects"), "{}", request.start);
    let header = |name: &str| request.header(name).unwrap_or_else(|| panic!("no {name} in {request:?}")).to_owned();
    let mut known = shared.known();
    let post = Post {
        key: key.to_owned(),
        attempt: header("idempotency-attempt").parse().unwrap(),
        message_id: header("message-id"),
        body: request.body.clone(),
        beside: known.in_flight.clone(),
    };
    known.posts.push(post);
    known.in_flight.push(key.to_owned());
    known.high_water = known.high_water.max(known.in_flight.len());
    known.behaviours.get(key).cloned().unwrap_or_else(|| shared.default.lock().unwrap().clone())
}

/// Applies a key, unless it is already; the answer is the same each time.
fn done(shared: &Shared, key: &str) -> String {
    let mut known = shared.known();
    let number = known.posts.iter().filter(|post| post.key == key).count();
    known.applied.entry(key.to_owned()).or_insert_with(|| json!({ "key": key, "post": number }).to_string()).clone()
}

/// Waits for the gate; false if the sender is gone before.
async fn released(connection: &mut Connection, shared: &Shared, key: &str) -> bool {
    let mut gate = shared.gate.subscribe();
    let opened = async {
        loop {
            if *gate.borrow_and_update() || shared.known().released.contains(key) {
                return;
            }
            gate.changed().await.unwrap();
        }
    };
    tokio::select! {
        () = opened => true,
        () = connection.closed() => false,
    }
}
