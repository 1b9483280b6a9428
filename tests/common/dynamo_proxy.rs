//! What stands between a function and its table when a test wants the network to fail.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;

use super::wait::until;
use super::wire::Connection;

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passage {
    /// It is forwarded, and so is the answer.
    Free,
    /// It is not forwarded until [`DynamoProxy::release`], and then even if its sender is
    /// gone.
    HoldRequest,
    /// It is forwarded, and the answer never comes.
    HoldAnswer,
    /// It is forwarded, and the connection is reset instead of answered.
    LoseAnswer,
    /// It is forwarded, and the connection ends before the last byte of the answer.
    TruncateAnswer,
    /// It is not forwarded, and the connection is reset.
    LoseRequest,
    /// It is not forwarded, and answered with an internal error.
    Refuse,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Exchange {
    /// `PutItem` and the like.
    pub operation: String,
    pub body: String,
    pub passage: Passage,
    /// The status of DynamoDB's answer, once there is one.
    pub status: Option<u16>,
}

struct Rule {
    operation: &'static str,
    passage: Passage,
    once: bool,
}

/// What counts as one where every n-th fares differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// Each request. A client that tries again has its answer, mostly.
    Requests,
    /// Each call with all its tries, told by the id that the SDK sends along: the caller
    /// never has its answer.
    Calls,
}

/// Every n-th request or call, whatever the operation.
struct Periodic {
    period: usize,
    counted: Counted,
    passage: Passage,
    seen: usize,
    /// The calls that it was applied to.
    calls: HashSet<String>,
    /// And those that it was not.
    spared: HashSet<String>,
}

impl Periodic {
    fn passage_of(&mut self, call: &str) -> Option<Passage> {
        if self.counted == Counted::Calls {
            if self.calls.contains(call) {
                return Some(self.passage);
            }
            if self.spared.contains(call) {
                return None;
            }
        }
        self.seen += 1;
        if self.seen.is_multiple_of(self.period) {
            self.calls.insert(call.to_owned());
            Some(self.passage)
        } else {
            self.spared.insert(call.to_owned());
            None
        }
    }
}

struct Shared {
    upstream: Mutex<String>,
    periodic: Mutex<Option<Periodic>>,
    rules: Mutex<Vec<Rule>>,
    exchanges: Mutex<Vec<Exchange>>,
    /// How often the held requests were let go.
    releases: watch::Sender<usize>,
    cut: watch::Sender<bool>,
}

impl Shared {
    /// The latest rule decides.
    fn passage_of(&self, operation: &str, call: &str) -> Passage {
        if let Some(passage) = self.periodic.lock().unwrap().as_mut().and_then(|rule| rule.passage_of(call)) {
            return passage;
        }
        let mut rules = self.rules.lock().unwrap();
        let Some(position) = rules.iter().rposition(|rule| rule.operation == operation) else { return Passage::Free };
        let (passage, once) = (rules[position].passage, rules[position].once);
        if once {
            rules.remove(position);
        }
        passage
    }
}

/// A proxy on a loopback port.
pub struct DynamoProxy {
    pub url: String,
    shared: Arc<Shared>,
}

impl DynamoProxy {
    /// A proxy to the DynamoDB at that URL.
    pub fn start(upstream: &str) -> Self {
        Self::away(upstream).appear()
    }

    /// The place of a proxy: until it [appears](Absent::appear), connections are refused.
    pub fn away(upstream: &str) -> Absent {
        // A port that is bound and not listened on refuses connections, and is nobody
        // else's.
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        Absent { url: format!("http://{}", socket.local_addr().unwrap()), socket, upstream: authority(upstream) }
    }

    /// From now on these requests pass like this.
    pub fn on(&self, operation: &'static str, passage: Passage) {
        self.shared.rules.lock().unwrap().push(Rule { operation, passage, once: false });
    }

    /// The next of these requests passes like this.
    pub fn once(&self, operation: &'static str, passage: Passage) {
        self.shared.rules.lock().unwrap().push(Rule { operation, passage, once: true });
    }

    /// From now on every `period`-th passes like this, whatever the operation.
    pub fn every(&self, period: usize, counted: Counted, passage: Passage) {
        let (calls, spared) = (HashSet::new(), HashSet::new());
        let rule = Periodic { period, counted, passage, seen: 0, calls, spared };
        *self.shared.periodic.lock().unwrap() = Some(rule);
    }

    /// Ends [`every`](Self::every).
    pub fn spare_all(&self) {
        *self.shared.periodic.lock().unwrap() = None;
    }

    /// From now on requests are forwarded to another place.
    pub fn redirect(&self, upstream: &str) {
        *self.shared.upstream.lock().unwrap() = authority(upstream);
    }

    /// Forwards all requests that are held, and holds none any more.
    pub fn release(&self) {
        self.shared.rules.lock().unwrap().clear();
        self.shared.releases.send_modify(|releases| *releases += 1);
    }

    /// Resets all connections, and all that come.
    pub fn cut(&self) {
        self.shared.cut.send_replace(true);
    }

    /// Ends [`cut`](Self::cut).
    pub fn mend(&self) {
        self.shared.cut.send_replace(false);
    }

    /// The requests of one kind so far.
    pub fn exchanges(&self, operation: &str) -> Vec<Exchange> {
        let exchanges = self.shared.exchanges.lock().unwrap();
        exchanges.iter().filter(|exchange| exchange.operation == operation).cloned().collect()
    }

    /// How many answers never reached whoever had asked.
    pub fn lost(&self) -> usize {
        let lost = |exchange: &&Exchange| {
            matches!(exchange.passage, Passage::HoldAnswer | Passage::LoseAnswer | Passage::TruncateAnswer)
        };
        self.shared.exchanges.lock().unwrap().iter().filter(lost).count()
    }

    /// The operations of all requests so far.
    pub fn operations(&self) -> Vec<String> {
        self.shared.exchanges.lock().unwrap().iter().map(|exchange| exchange.operation.clone()).collect()
    }

    /// Waits for a request that is held.
    pub async fn wait_for_held(&self, operation: &str) {
        until(&format!("a {operation} to be held"), || {
            self.exchanges(operation).iter().any(|exchange| match exchange.passage {
                Passage::HoldRequest => exchange.status.is_none(),
                Passage::HoldAnswer => exchange.status.is_some(),
                _ => false,
            })
        })
        .await;
    }

    /// Waits until DynamoDB has answered every request that was forwarded.
    pub async fn wait_for_answers(&self, operation: &str) {
        until(&format!("all answers to {operation}"), || {
            self.exchanges(operation).iter().all(|exchange| exchange.status.is_some())
        })
        .await;
    }
}

fn authority(url: &str) -> String {
    url.trim_start_matches("http://").to_owned()
}

/// A proxy that is not there yet.
pub struct Absent {
    pub url: String,
    socket: TcpSocket,
    upstream: String,
}

impl Absent {
    pub fn appear(self) -> DynamoProxy {
        let listener = self.socket.listen(64).unwrap();
        let shared = Arc::new(Shared {
            upstream: Mutex::new(self.upstream),
            periodic: Mutex::default(),
            rules: Mutex::default(),
            exchanges: Mutex::default(),
            releases: watch::Sender::new(0),
            cut: watch::Sender::new(false),
        });
        tokio::spawn(accept(listener, Arc::clone(&shared)));
        DynamoProxy { url: self.url, shared }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        // Dropping it unread resets the connection.
        stream.set_zero_linger().unwrap();
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let mut cut = shared.cut.subscribe();
            tokio::select! {
                _ = cut.wait_for(|cut| *cut) => {}
                () = forward(Connection::new(stream), &shared) => {}
            }
        });
    }
}

async fn forward(mut client: Connection, shared: &Arc<Shared>) {
    while let Some(request) = client.read().await {
        let operation = request.header("x-amz-target").and_then(|target| target.split('.').next_back()).unwrap_or("?");
        let mut releases = shared.releases.subscribe();
        let passage = shared.passage_of(operation, request.header("amz-sdk-invocation-id").unwrap_or_default());
        let position = {
            let mut exchanges = shared.exchanges.lock().unwrap();
            exchanges.push(Exchange {
                operation: operation.to_owned(),
                body: request.body.clone(),
                passage,
                status: None,
            });
            exchanges.len() - 1
        };
        match passage {
            Passage::Free | Passage::HoldAnswer | Passage::LoseAnswer | Passage::TruncateAnswer => {}
            Passage::LoseRequest => return,
            Passage::HoldRequest => releases.changed().await.unwrap(),
            Passage::Refuse => {
                client.answer(500, r#"{"__type":"com.amazonaws.dynamodb.v20120810#InternalServerError"}"#).await;
                continue;
            }
        }
        let upstream = shared.upstream.lock().unwrap().clone();
        let Ok(mut upstream) = Connection::connect(&upstream).await else { return };
        upstream.write(&request.bytes).await;
        let Some(answer) = upstream.read().await else { return };
        shared.exchanges.lock().unwrap()[position].status = Some(answer.status());
        match passage {
            Passage::HoldAnswer => return client.closed().await,
            Passage::LoseAnswer => return,
            Passage::TruncateAnswer => return client.write_and_close(&answer.bytes[..answer.bytes.len() - 1]).await,
            _ => client.write(&answer.bytes).await,
        }
    }
}
