//! The function's binary as a process of its own, with a Runtime API of its own.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::NamedTempFile;

use super::dynamo::TABLE;
use super::runtime_api::{Answer, RuntimeApi};
use super::wait::eventually;

/// Also the first part of every record's id.
pub const FUNCTION_NAME: &str = "consumer";

/// The function's secret access key: must never be seen again.
pub const SECRET_KEY: &str = "secret-access-key-canary";

/// Time of an invocation that is not about time.
pub const AMPLE: Duration = Duration::from_secs(50);

/// The environment of a function to be started.
#[derive(Debug, Clone)]
pub struct Setup {
    program: PathBuf,
    environment: BTreeMap<String, String>,
}

impl Setup {
    /// What Lambda sets by itself, and nothing else.
    pub fn bare() -> Self {
        Self { program: env!("CARGO_BIN_EXE_consumer").into(), environment: BTreeMap::new() }
            .set("AWS_LAMBDA_FUNCTION_NAME", FUNCTION_NAME)
            .set("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", "256")
            .set("AWS_LAMBDA_FUNCTION_VERSION", "$LATEST")
            .set("AWS_REGION", "eu-central-1")
            .set("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
            .set("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
            .set("AWS_SESSION_TOKEN", "session-token-canary")
    }

    /// A function on the table behind that endpoint, with its effect at that URL.
    pub fn new(dynamo: &str, effect: &str) -> Self {
        Self::bare()
            .set("AWS_ENDPOINT_URL_DYNAMODB", dynamo)
            .set("TABLE_NAME", TABLE)
            .set("VISIBILITY_TIMEOUT_SECONDS", "360")
            .set("MAX_RECEIVE_COUNT", "3")
            .set("EFFECT_URL", effect)
            .set("EFFECT_TIMEOUT_SECONDS", "40")
            .set("EFFECT_RECOVERY", "rerun")
    }

    /// The same environment for one of the programs under `examples/`.
    pub fn of_example(mut self, name: &str) -> Self {
        let mut path = std::env::current_exe().unwrap();
        // target/debug/deps/THIS to target/debug/examples/NAME
        path.pop();
        path.pop();
        path.extend(["examples", name]);
        assert!(path.exists(), "{} is not there: `cargo build --examples --all-features`", path.display());
        self.program = path;
        self
    }

    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Starts the function.
    pub async fn spawn(&self) -> Function {
        let api = RuntimeApi::start().await;
        let (stdout, stderr) = (Output::new(), Output::new());
        let child = Command::new(&self.program)
            .env_clear()
            .envs(&self.environment)
            .env("AWS_LAMBDA_RUNTIME_API", &api.address)
            .stdin(Stdio::null())
            .stdout(stdout.pipe())
            .stderr(stderr.pipe())
            .spawn()
            .unwrap();
        Function { api, child, stdout, stderr }
    }

    /// Starts the function, and waits until it asks for an invocation.
    pub async fn start(&self) -> Function {
        let mut function = self.spawn().await;
        tokio::select! {
            () = function.api.first_poll() => {}
            status = exit_status(&mut function.child) => {
                panic!("the function ended ({status}) instead of starting:\n{}", function.stdout.text());
            }
        }
        function
    }
}

/// What a process writes. To a file, where it stands as soon as it is written: what was
/// logged before an answer can be read after it, and no thread must catch up first.
struct Output(NamedTempFile);

impl Output {
    fn new() -> Self {
        Self(NamedTempFile::new().unwrap())
    }

    fn pipe(&self) -> Stdio {
        self.0.reopen().unwrap().into()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.0.path()).unwrap()).into_owned()
    }

    fn lines(&self) -> Vec<String> {
        // Whole lines: one may be in the middle of being written.
        self.text().split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')).map(str::to_owned).collect()
    }
}

/// A function that runs. Dropping it kills it.
pub struct Function {
    pub api: RuntimeApi,
    child: Child,
    stdout: Output,
    stderr: Output,
}

impl Function {
    /// Invokes it; the answer may be awaited later.
    pub fn invoke(&self, event: Value, time: Duration) -> impl Future<Output = Answer> + use<> {
        self.api.invoke(event, time)
    }

    /// Kills it, as SIGKILL does: nothing is finished, flushed or given back.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends it a signal, such as `STOP`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.id().to_string()]).status().unwrap();
        assert!(sent.success(), "kill -{name}: {sent}");
    }

    /// The process's number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until it has ended by itself.
    pub async fn exit(&mut self) -> ExitStatus {
        exit_status(&mut self.child).await
    }

    /// Everything it has written so far.
    pub fn output(&self) -> String {
        format!("{}\n{}", self.stdout.text(), self.stderr.text())
    }

    /// The lines of its standard output.
    pub fn lines(&self) -> Vec<String> {
        self.stdout.lines()
    }

    /// The lines of its standard error.
    pub fn error_lines(&self) -> Vec<String> {
        self.stderr.lines()
    }

    /// Its log, every line of which must be a JSON object.
    pub fn log(&self) -> Vec<Value> {
        let parse = |line: &String| match serde_json::from_str(line) {
            Ok(Value::Object(line)) => Value::Object(line),
            _ => panic!("not a JSON object: {line}"),
        };
        self.lines().iter().map(parse).collect()
    }

    /// The log's lines about one message.
    pub fn log_of(&self, message_id: &str) -> Vec<Value> {
        self.log().into_iter().filter(|line| line.get("message_id").is_some_and(|id| id == message_id)).collect()
    }

    /// The outcomes that the log tells of one message.
    pub fn outcomes(&self, message_id: &str) -> Vec<String> {
        let outcome = |line: &Value| line.get("outcome").and_then(Value::as_str).unwrap_or("(none)").to_owned();
        self.log_of(message_id).iter().map(outcome).collect()
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // Both fail if it has ended already, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            // Shown by the test harness, as the test fails.
            print(&self.output());
        }
    }
}

#[allow(clippy::print_stderr)]
fn print(output: &str) {
    eprintln!("---- output of the function\n{output}\n----");
}

async fn exit_status(child: &mut Child) -> ExitStatus {
    eventually("the function to end", async || child.try_wait().unwrap()).await
}
