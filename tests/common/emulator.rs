//! DynamoDB as a process of its own, on a file, so that it can be killed and come back with
//! what it had.
//!
//! There is no program for it: the test program starts itself, and runs the one "test"
//! [`serve`] is called from.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::dynamo::{Dynamo, client, create_table};
use super::wait::eventually;

/// Where the process that serves finds its files; absent in any other.
const FOLDER: &str = "EMULATOR_FOLDER";

/// A DynamoDB that can be killed.
pub struct Emulator {
    folder: TempDir,
    test: &'static str,
    child: Option<Child>,
}

impl Emulator {
    /// Starts it, with an empty table. `test` is the name of the test that calls [`serve`].
    pub async fn start(test: &'static str) -> (Self, Dynamo) {
        let mut emulator = Self { folder: TempDir::new().unwrap(), test, child: None };
        let dynamo = emulator.restart().await;
        create_table(&dynamo.client).await;
        (emulator, dynamo)
    }

    /// Starts it again, at another address.
    pub async fn restart(&mut self) -> Dynamo {
        let address = self.folder.path().join("address");
        let _ = std::fs::remove_file(&address);
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", self.test])
            .env(FOLDER, self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.child = Some(child);
        let url = eventually("the emulator", async || std::fs::read_to_string(&address).ok()).await;
        Dynamo { client: client(&url), url }
    }

    /// Kills it, as SIGKILL does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Serves until it is killed, if this process was started for that.
pub async fn serve() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let database = dynoxide::Database::new(folder.join("tables").to_str().unwrap()).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    // Renamed: it is there whole, or not at all.
    std::fs::write(folder.join("address.part"), format!("http://{}", listener.local_addr().unwrap())).unwrap();
    std::fs::rename(folder.join("address.part"), folder.join("address")).unwrap();
    dynoxide::server::serve_on(listener, database).await;
}
