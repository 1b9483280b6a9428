//! The processes that run, and what their logs say, as soon as it matters.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::Value;

use super::history::{Event, History};
use crate::common::process::Function;

/// A process, and how much of its log was read.
struct Running {
    function: Function,
    read: usize,
}

/// All processes of a round.
///
/// A process writes a line before it begins with the next message of the group. So whoever
/// reads the logs as an effect begins has the lines of everything that ended before it, and
/// takes them down before the effect.
#[derive(Clone)]
pub struct Logs {
    history: History,
    running: Arc<Mutex<BTreeMap<usize, Running>>>,
}

impl Logs {
    pub fn new(history: &History) -> Self {
        Self { history: history.clone(), running: Arc::default() }
    }

    /// A process runs, in place of the one before it.
    pub fn started(&self, process: usize, function: Function) {
        self.running.lock().unwrap().insert(process, Running { function, read: 0 });
    }

    /// A process has ended, and none comes after it.
    pub fn ended(&self, process: usize) {
        self.running.lock().unwrap().remove(&process);
    }

    /// Does something with a process.
    pub fn with<T>(&self, process: usize, act: impl FnOnce(&mut Function) -> T) -> T {
        act(&mut self.running.lock().unwrap().get_mut(&process).unwrap().function)
    }

    /// Takes down what a process has logged of messages since its log was last read.
    pub fn read(&self, process: usize) {
        self.take_down(process, self.running.lock().unwrap().get_mut(&process).unwrap());
    }

    /// The same of all processes.
    pub fn read_all(&self) {
        for (process, running) in self.running.lock().unwrap().iter_mut() {
            self.take_down(*process, running);
        }
    }

    fn take_down(&self, process: usize, running: &mut Running) {
        let lines = running.function.lines();
        for line in &lines[running.read..] {
            let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
            let text = |name: &str| line.get(name).and_then(Value::as_str).map(str::to_owned);
            if line.get("panic").is_some() {
                self.history.record(Event::Stopped { process, how: "died in part: a panic" });
            }
            if let (Some(message), Some(outcome)) = (text("message_id"), text("outcome")) {
                let dead_lettered = line.get("dead_lettered") == Some(&Value::Bool(true));
                let reason = text("reason");
                self.history.record(Event::Reported { process, message, outcome, dead_lettered, reason });
            }
        }
        running.read = lines.len();
    }
}
