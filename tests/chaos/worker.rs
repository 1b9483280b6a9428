//! One process of the function, with whoever invokes it: takes batches from the queue,
//! hands them over, does to the queue what the answers say, and kills the process now and
//! then.

use std::sync::Arc;
use std::time::Duration;

use idempotent_consumer::time::{Clock, SystemClock};
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

impl Worker {
    /// Works until the round is over.
    pub async fn work(mut self) {
        self.start().await;
        while !self.world.is_over() {
            let batch = self.receive();
            if batch.is_empty() {
                sleep(Duration::from_millis(20)).await;
                continue;
            }
            if !self.invoke(batch).await {
                self.read_log();
                FakeTime::clean(self.with(|function| function.id()));
                self.start().await;
            }
        }
        self.end("ended with the round");
        FakeTime::clean(self.with(|function| function.id()));
        self.world.logs.ended(self.process);
    }

    fn with<T>(&self, act: impl FnOnce(&mut Function) -> T) -> T {
        self.world.logs.with(self.process, act)
    }

    fn read_log(&self) {
        self.world.logs.read(self.process);
    }

    fn record(&self, event: Event) {
        self.world.history.record(event);
    }

    async fn start(&self) {
        let function = self.setup.start().await;
        self.record(Event::Started { process: self.process, ahead: self.ahead });
        self.world.logs.started(self.process, function);
    }

    fn receive(&mut self) -> Vec<Delivery> {
        let most = 1 + self.random.index(10);
        let (batch, dead) = self.world.queue.lock().unwrap().receive(SystemClock.now(), most, &mut self.random);
        for record in dead {
            self.world.bury(record);
        }
        batch
    }

    /// Has a batch processed; false if the process is no more. Its log is read to the end
    /// before the queue is told anything, and before the next batch.
    async fn invoke(&mut self, batch: Vec<Delivery>) -> bool {
        for Delivery { record, receive } in &batch {
            let (process, message) = (self.process, record.id.clone());
            self.record(Event::Delivered { process, message, receive: *receive });
        }
        let time = self.world.round.time;
        let mishap = if self.world.is_calm() { Mishap::None } else { self.world.round.mishap(&mut self.random) };
        let event = event(batch.iter().map(|delivery| &delivery.record));
        let answer = self.with(|function| function.invoke(event, time));
        tokio::pin!(answer);
        let answered = tokio::select! {
            answer = &mut answer => Some(answer),
            () = self.strike(mishap) => None,
            () = sleep(time + GRACE) => {
                self.end("killed at its deadline");
                return false;
            }
        };
        let answer = match (answered, mishap) {
            (Some(_), Mishap::LoseAnswer) => {
                self.record(Event::Stopped { process: self.process, how: "answered, and the answer was lost" });
                self.read_log();
                return true;
            }
            (Some(answer), _) => answer,
            (None, Mishap::Pause(_, length)) => {
                self.with(|function| function.signal("STOP"));
                self.record(Event::Stopped { process: self.process, how: "stopped" });
                sleep(length).await;
                self.with(|function| function.signal("CONT"));
                self.record(Event::Stopped { process: self.process, how: "went on" });
                let Ok(answer) = tokio::time::timeout(GRACE * 3, answer).await else {
                    self.end("killed after it went on");
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
                self.end(how);
                return false;
            }
        };
        self.read_log();
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

    fn end(&self, how: &'static str) {
        let had_ended = self.with(|function| {
            let had_ended = function.has_ended();
            function.kill();
            had_ended
        });
        let how = if had_ended { "died by itself" } else { how };
        self.record(Event::Stopped { process: self.process, how });
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
