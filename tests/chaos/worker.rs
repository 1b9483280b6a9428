//! One process of the function, with whoever invokes it: takes batches from the queue,
//! hands them over, does to the queue what the answers say, and kills the process now and
//! then.

use std::sync::Arc;
use std::time::Duration;

use idempotent_consumer::time::{Clock, SystemClock};
use serde_json::Value;
use tokio::time::sleep;

use super::faketime::FakeTime;
use super::history::Event;
use super::plan::{Mishap, Random, When};
use super::queue::Delivery;
use super::round::World;
use crate::common::dynamo_proxy::DynamoProxy;
use crate::common::events::event;
use crate::common::process::{Function, Setup};
use crate::common::runtime_api::{Answer, InvocationResult};

/// Lambda ends a process that is not done at its deadline. A little is added for this
/// machine, which has other work to do.
const GRACE: Duration = Duration::from_millis(500);

pub struct Worker {
    pub process: usize,
    pub ahead: i64,
    pub world: Arc<World>,
    pub setup: Setup,
    pub proxy: Arc<DynamoProxy>,
    pub random: Random,
}

/// A process, and how much of its log was read.
struct Running {
    function: Function,
    read: usize,
}

impl Worker {
    /// Works until the round is over.
    pub async fn work(mut self) {
        let mut running = self.start().await;
        while !self.world.is_over() {
            let batch = self.receive();
            if batch.is_empty() {
                sleep(Duration::from_millis(20)).await;
                continue;
            }
            if !self.invoke(&mut running, batch).await {
                self.read_log(&mut running);
                FakeTime::clean(running.function.id());
                running = self.start().await;
            }
        }
        self.end(&mut running.function, "ended with the round");
        FakeTime::clean(running.function.id());
    }

    fn record(&self, event: Event) {
        self.world.history.record(event);
    }

    async fn start(&self) -> Running {
        let function = self.setup.start().await;
        self.record(Event::Started { process: self.process, ahead: self.ahead });
        Running { function, read: 0 }
    }

    fn receive(&mut self) -> Vec<Delivery> {
        let most = 1 + self.random.index(10);
        let (batch, dead) = self.world.queue.lock().unwrap().receive(SystemClock.now(), most, &mut self.random);
        for record in dead {
            self.world.bury(record);
        }
        batch
    }

    /// Has a batch processed; false if the process is no more.
    async fn invoke(&mut self, running: &mut Running, batch: Vec<Delivery>) -> bool {
        for Delivery { record, receive } in &batch {
            let (process, message) = (self.process, record.id.clone());
            self.record(Event::Delivered { process, message, receive: *receive });
        }
        let time = self.world.round.time;
        let mishap = if self.world.is_calm() { Mishap::None } else { self.world.round.mishap(&mut self.random) };
        let answer = running.function.invoke(event(batch.iter().map(|delivery| &delivery.record)), time);
        tokio::pin!(answer);
        let answered = tokio::select! {
            answer = &mut answer => Some(answer),
            () = self.strike(mishap) => None,
            () = sleep(time + GRACE) => {
                self.end(&mut running.function, "killed at its deadline");
                return false;
            }
        };
        let answer = match (answered, mishap) {
            (Some(_), Mishap::LoseAnswer) => {
                self.record(Event::Stopped { process: self.process, how: "answered, and the answer was lost" });
                self.read_log(running);
                return true;
            }
            (Some(answer), _) => answer,
            (None, Mishap::Pause(_, length)) => {
                running.function.signal("STOP");
                self.record(Event::Stopped { process: self.process, how: "stopped" });
                sleep(length).await;
                running.function.signal("CONT");
                self.record(Event::Stopped { process: self.process, how: "went on" });
                let Ok(answer) = tokio::time::timeout(GRACE * 3, answer).await else {
                    self.end(&mut running.function, "killed after it went on");
                    return false;
                };
                answer
            }
            (None, mishap) => {
                let how = match mishap {
                    Mishap::Kill(When::AtRequest(_)) => "killed at a request to the store",
                    Mishap::Kill(When::AtPost(_)) => "killed at an effect",
                    _ => "killed",
                };
                self.end(&mut running.function, how);
                return false;
            }
        };
        self.read_log(running);
        self.settle(&answer, &batch);
        true
    }

    /// Ends when the mishap is to happen.
    async fn strike(&self, mishap: Mishap) {
        const SOON: Duration = Duration::from_millis(1);
        let when = match mishap {
            Mishap::None | Mishap::LoseAnswer => return std::future::pending().await,
            Mishap::Kill(when) | Mishap::Pause(when, _) => when,
        };
        match when {
            When::After(time) => sleep(time).await,
            When::AtRequest(number) => {
                let count = self.proxy.count() + number;
                while self.proxy.count() < count {
                    sleep(SOON).await;
                }
            }
            When::AtPost(number) => {
                let count = self.world.history.arrivals() + number;
                while self.world.history.arrivals() < count {
                    sleep(SOON).await;
                }
            }
        }
    }

    fn end(&self, function: &mut Function, how: &'static str) {
        let how = if function.has_ended() { "died by itself" } else { how };
        function.kill();
        self.record(Event::Stopped { process: self.process, how });
    }

    /// Takes down what the log says of messages since it was last read.
    fn read_log(&self, running: &mut Running) {
        let lines = running.function.lines();
        for line in &lines[running.read..] {
            let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
            let text = |name: &str| line.get(name).and_then(Value::as_str).map(str::to_owned);
            if line.get("panic").is_some() {
                self.record(Event::Stopped { process: self.process, how: "died in part: a panic" });
            }
            if let (Some(message), Some(outcome)) = (text("message_id"), text("outcome")) {
                let dead_lettered = line.get("dead_lettered") == Some(&Value::Bool(true));
                let reason = text("reason");
                self.record(Event::Reported { process: self.process, message, outcome, dead_lettered, reason });
            }
        }
        running.read = lines.len();
    }

    /// Does to the queue what the answer says.
    fn settle(&mut self, answer: &Answer, batch: &[Delivery]) {
        let process = self.process;
        let failures = match &answer.result {
            InvocationResult::Response(_) => answer.failures(),
            InvocationResult::Error { error_type, message } => {
                let (error_type, text) = (error_type.clone(), message.clone());
                self.record(Event::InvocationFailed { process, error_type, text });
                batch.iter().map(|delivery| delivery.record.id.clone()).collect()
            }
        };
        for delivery in batch {
            let (now, message) = (SystemClock.now(), delivery.record.id.clone());
            let mut queue = self.world.queue.lock().unwrap();
            if failures.contains(&message) {
                queue.fail(delivery, now, self.random.millis(200, 1200));
                self.record(Event::Failed { process, message });
            } else {
                let taken = queue.ack(delivery, now);
                self.record(Event::Acked { process, message, taken });
            }
        }
    }
}
