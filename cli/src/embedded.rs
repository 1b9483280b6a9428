//! A DynamoDB of our own: in this process, on a loopback port, kept in one file.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_dynamodb::error::BuildError;
use aws_sdk_dynamodb::types::{AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType};
use dynoxide::Database;
use idempotent_consumer::error::ErrorChain;
use idempotent_consumer::store::dynamodb::DynamoDbStore;
use tokio::net::TcpListener;

/// How long to wait for a file that another program has locked.
const PATIENCE: Duration = Duration::from_secs(5);

/// What every database file starts with.
const MAGIC: &[u8; 16] = b"SQLite format 3\0";

/// The store can't be used.
#[derive(Debug, thiserror::Error)]
#[error("the store `{}` {problem}", file.display())]
pub(crate) struct StoreTrouble {
    file: PathBuf,
    problem: String,
}

impl StoreTrouble {
    /// `problem` goes on from the file's name.
    pub(crate) fn new(file: &Path, problem: impl Into<String>) -> Self {
        Self { file: file.to_owned(), problem: problem.into() }
    }
}

/// A running DynamoDB. It ends with the runtime.
#[derive(Debug)]
pub(crate) struct Embedded {
    pub(crate) client: Client,
    file: PathBuf,
}

impl Embedded {
    /// Opens the file, creating it if need be, after deleting it if it shall `forget`.
    pub(crate) async fn open(file: &Path, forget: bool) -> Result<Self, StoreTrouble> {
        let trouble = |problem: String| StoreTrouble::new(file, problem);
        // Absolute, or SQLite would take `:memory:` and `file:...` for something else.
        let path = std::path::absolute(file).map_err(|error| trouble(format!("is no usable path: {error}")))?;
        let text = path.to_str().ok_or_else(|| trouble("is not UTF-8: name another file with --store".to_owned()))?;
        // Held to the end of the process, which is when the database is closed: nobody
        // deletes the file under us.
        std::mem::forget(prepare(&path, forget).map_err(trouble)?);
        let database = open_database(text.to_owned()).map_err(trouble)?;
        let client = serve(database).await.map_err(|error| trouble(format!("can't be served: {error}")))?;
        Ok(Self { client, file: file.to_owned() })
    }

    /// Creates a table with a string key `id` unless it is there.
    pub(crate) async fn table(&self, name: &str) -> Result<String, StoreTrouble> {
        let trouble = |problem: String| StoreTrouble::new(&self.file, problem);
        let (attribute, key) = id_key().map_err(|error| trouble(format!("can't have a table: {error}")))?;
        let created = self
            .client
            .create_table()
            .table_name(name)
            .billing_mode(BillingMode::PayPerRequest)
            .attribute_definitions(attribute)
            .key_schema(key)
            .send()
            .await;
        match created.map_err(aws_sdk_dynamodb::Error::from) {
            Ok(_) | Err(aws_sdk_dynamodb::Error::ResourceInUseException(_)) => Ok(name.to_owned()),
            Err(error) => Err(trouble(format!("refuses the table `{name}`: {}. {BROKEN}", ErrorChain(&error)))),
        }
    }
}

fn id_key() -> Result<(AttributeDefinition, KeySchemaElement), BuildError> {
    Ok((
        AttributeDefinition::builder().attribute_name("id").attribute_type(ScalarAttributeType::S).build()?,
        KeySchemaElement::builder().attribute_name("id").key_type(KeyType::Hash).build()?,
    ))
}

const BROKEN: &str = "If it is damaged, start over with --forget, or name another file with --store";

/// Makes sure of the file before the database sees it. Returns a lock to be held while it is
/// open.
fn prepare(path: &Path, forget: bool) -> Result<File, String> {
    if path.is_dir() {
        return Err("is a directory: name a file in it with --store".to_owned());
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)
            .map_err(|error| format!("needs the directory `{}`, which can't be created: {error}", parent.display()))?;
    }
    if !is_sqlite_or_new(path).map_err(|error| format!("can't be read: {error}"))? {
        return Err("is something else, not an SQLite database; it was not changed. \
                    Name another file with --store"
            .to_owned());
    }
    let lock_file = beside(path, ".lock");
    let lock =
        OpenOptions::new().create(true).append(true).open(&lock_file).map_err(|error| {
            format!("needs the lock file `{}`, which can't be written: {error}", lock_file.display())
        })?;
    if forget {
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err("is in use by another `invoke`, so it can't be deleted: wait for that to end".to_owned());
            }
            Err(TryLockError::Error(error)) => return Err(format!("can't be locked: {error}")),
        }
        delete(path).map_err(|error| format!("can't be deleted: {error}"))?;
        lock.unlock().map_err(|error| format!("can't be unlocked: {error}"))?;
    }
    // Waits for one that deletes, which takes no time.
    lock.lock_shared().map_err(|error| format!("can't be locked: {error}"))?;
    Ok(lock)
}

fn is_sqlite_or_new(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    let mut start = Vec::new();
    file.take(MAGIC.len() as u64).read_to_end(&mut start)?;
    Ok(start.is_empty() || start == MAGIC)
}

/// The write-ahead log first: alone it would be taken for the log of the next file.
fn delete(path: &Path) -> io::Result<()> {
    for file in [beside(path, "-wal"), beside(path, "-shm"), path.to_owned()] {
        match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Opens the database in a thread of its own: it would wait half a minute for a lock, and
/// can't be interrupted.
fn open_database(path: String) -> Result<Database, String> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(Database::new(&path)));
    match receive.recv_timeout(PATIENCE) {
        Ok(Ok(database)) => Ok(database),
        Ok(Err(error)) => Err(format!("can't be opened: {error}. {BROKEN}")),
        Err(RecvTimeoutError::Timeout) => {
            Err(format!("has been locked by another program for {PATIENCE:?}: wait for it, or end it"))
        }
        Err(RecvTimeoutError::Disconnected) => Err(format!("can't be opened: the database panicked. {BROKEN}")),
    }
}

async fn serve(database: Database) -> io::Result<Client> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(dynoxide::server::serve_on(listener, database));
    // Nothing from the environment: no profile, no proxy, nobody's account.
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .region(Region::from_static("local"))
        .credentials_provider(Credentials::new("local", "local", None, None, "embedded"))
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .endpoint_url(url);
    Ok(Client::from_conf(DynamoDbStore::tune(config).build()))
}
