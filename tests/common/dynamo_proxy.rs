//! What stands between a function and its table when a test wants the network to fail.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod exchange;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;

use self::exchange::exchange;
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
    /// It is not forwarded, and answered with a throttling error.
    Throttle,
    /// It is forwarded that much later, even if its sender is gone by then.
    Late(Duration),
    /// A lie: it is forwarded that much later, its condition as one that always holds.
    Unfenced(Duration),
    /// A lie: a refusal is answered as a success.
    Granted,
    /// A lie: it is not forwarded, and answered as a success.
    Forgotten,
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

/// Says what becomes of a request, by its operation and body.
type Decide = Box<dyn FnMut(&str, &str) -> Passage + Send>;

/// Is told of each request once its fate is known: before its sender is.
type Watch = Arc<dyn Fn(&Exchange) + Send + Sync>;

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
    decide: Mutex<Option<Decide>>,
    watch: Mutex<Option<Watch>>,
    order: Mutex<Option<Arc<tokio::sync::Mutex<()>>>>,
    /// Requests that were taken and are not with DynamoDB yet.
    underway: AtomicUsize,
    /// How often the held requests were let go.
    releases: watch::Sender<usize>,
    cut: watch::Sender<bool>,
}

impl Shared {
    /// The latest rule decides.
    fn passage_of(&self, operation: &str, call: &str, body: &str) -> Passage {
        if let Some(decide) = self.decide.lock().unwrap().as_mut() {
            return decide(operation, body);
        }
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

    /// The request's fate is known.
    fn settle(&self, position: usize, status: Option<u16>) {
        let exchange = {
            let mut exchanges = self.exchanges.lock().unwrap();
            exchanges[position].status = status;
            exchanges[position].clone()
        };
        let watch = self.watch.lock().unwrap().clone();
        if let Some(watch) = watch {
            watch(&exchange);
        }
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

    /// From now on `decide` says how each request passes, and no rule does.
    pub fn decide(&self, decide: impl FnMut(&str, &str) -> Passage + Send + 'static) {
        *self.shared.decide.lock().unwrap() = Some(Box::new(decide));
    }

    /// From now on `watch` is told of each request once its fate is known, and its sender is
    /// told after that.
    pub fn watch(&self, watch: impl Fn(&Exchange) + Send + Sync + 'static) {
        *self.shared.watch.lock().unwrap() = Some(Arc::new(watch));
    }

    /// From now on no two requests of proxies that share `order` are at DynamoDB at once, so
    /// that what they [watch](Self::watch) comes in the order in which it was done.
    pub fn in_turn(&self, order: &Arc<tokio::sync::Mutex<()>>) {
        *self.shared.order.lock().unwrap() = Some(Arc::clone(order));
    }

    /// How many requests may yet reach DynamoDB.
    pub fn underway(&self) -> usize {
        self.shared.underway.load(Ordering::SeqCst)
    }

    /// How many requests came so far.
    pub fn count(&self) -> usize {
        self.shared.exchanges.lock().unwrap().len()
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
            decide: Mutex::default(),
            watch: Mutex::default(),
            order: Mutex::default(),
            underway: AtomicUsize::new(0),
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
                // First: once cut, nothing more is taken.
                biased;
                _ = cut.wait_for(|cut| *cut) => {}
                () = forward(Connection::new(stream), &shared) => {}
            }
        });
    }
}

async fn forward(mut client: Connection, shared: &Arc<Shared>) {
    while let Some(request) = client.read().await {
        let operation = request.header("x-amz-target").and_then(|target| target.split('.').next_back()).unwrap_or("?");
        let call = request.header("amz-sdk-invocation-id").unwrap_or_default();
        let mut releases = shared.releases.subscribe();
        let passage = shared.passage_of(operation, call, &request.body);
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
        let error = |kind: &str| format!(r#"{{"__type":"com.amazonaws.dynamodb.v20120810#{kind}"}}"#);
        let instead = match passage {
            Passage::HoldRequest => {
                releases.changed().await.unwrap();
                None
            }
            Passage::LoseRequest => return shared.settle(position, None),
            Passage::Refuse => Some((500, error("InternalServerError"))),
            Passage::Throttle => Some((400, error("ProvisionedThroughputExceededException"))),
            Passage::Forgotten => Some((200, "{}".to_owned())),
            _ => None,
        };
        if let Some((status, body)) = instead {
            shared.settle(position, None);
            client.answer(status, &body).await;
            continue;
        }
        // A task of its own: what is sent is seen to its end, though the client be cut off.
        let exchange = tokio::spawn(exchange(Arc::clone(shared), request, position, passage));
        let Some(answer) = exchange.await.unwrap() else { return };
        match passage {
            Passage::HoldAnswer => return client.closed().await,
            Passage::LoseAnswer => return,
            Passage::TruncateAnswer => return client.write_and_close(&answer.bytes[..answer.bytes.len() - 1]).await,
            Passage::Granted if answer.status() == 400 => client.answer(200, "{}").await,
            _ => client.write(&answer.bytes).await,
        }
    }
}
