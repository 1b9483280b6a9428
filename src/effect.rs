//! The side effect that a user writes, what it may say about itself, and how a key is
//! recovered whose effect nobody saw the end of.

#[cfg(feature = "http")]
pub mod http;
#[cfg(feature = "dynamodb")]
pub mod transactional;

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{BoxError, ErrorChain};
use crate::key::Key;
use crate::message::Message;
use crate::time::Deadline;

/// A side effect: charge a card, ship a parcel, send a mail.
///
/// ```
/// use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Deserialize)]
/// struct Order { amount: u64 }
///
/// #[derive(Serialize)]
/// struct Receipt { charge: String }
///
/// struct Charge;
///
/// impl Effect for Charge {
///     type Input = Order;
///     type Output = Receipt;
///
///     // The bank deduplicates by the key we send, so running again is safe.
///     fn recovery(&self) -> Recovery { Recovery::Rerun }
///
///     async fn apply(&self, order: &Order, attempt: &Attempt<'_>) -> Result<Receipt, EffectError> {
///         if order.amount == 0 {
///             return Err(EffectError::permanent("an order of nothing"));
///         }
///         // ... call the bank with attempt.key().value() as its idempotency key ...
///         Ok(Receipt { charge: format!("ch_{}", attempt.key().value()) })
///     }
/// }
/// ```
///
/// A definite business answer ("card declined") is an *output*, not an error: it is
/// stored and replayed, so that a duplicate hears the same no.
pub trait Effect: Send + Sync + 'static {
    /// What the message body holds.
    type Input: DeserializeOwned + Send + Sync;
    /// What the effect returns. Stored as JSON and replayed to every duplicate.
    type Output: Serialize + Send;

    /// What a takeover may do after an attempt whose outcome nobody knows. There is no
    /// default: it is the one thing about an effect that no library can decide.
    fn recovery(&self) -> Recovery;

    /// Applies the effect. Called while this consumer holds the claim of the key; the
    /// future is dropped at [`Attempt::deadline`], which counts as outcome unknown.
    ///
    /// `?` on any error says *outcome unknown*; see [`EffectError`] for more exact words.
    fn apply(
        &self,
        input: &Self::Input,
        attempt: &Attempt<'_>,
    ) -> impl Future<Output = Result<Self::Output, EffectError>> + Send;

    /// Finds out whether an earlier attempt was applied. Called instead of
    /// [`apply`](Self::apply) at a takeover if [`recovery`](Self::recovery) is
    /// [`Recovery::Verify`]. An error means that nothing was found out: the message is
    /// retried and verified again.
    fn verify(
        &self,
        input: &Self::Input,
        attempt: &Attempt<'_>,
    ) -> impl Future<Output = Result<Verification<Self::Output>, EffectError>> + Send {
        let _ = (input, attempt);
        std::future::ready(Ok(Verification::Unknown("this effect does not implement `verify`".into())))
    }

    /// Whether applying the effect any number of times, in any overlap, leaves the world as
    /// applying it once does, because it only *sets* something: "the address of customer 7
    /// is ...". Then nothing is claimed or stored, and every delivery applies it.
    ///
    /// It is not enough that the target deduplicates. Beware of old values: where a later
    /// message may set the same thing, a redelivered earlier one sets it back, unless the
    /// target compares versions.
    fn is_natural(&self) -> bool {
        false
    }

    /// Reads the input from the message: by default its body as JSON. An error rejects
    /// the message before anything is claimed.
    ///
    /// What the error says is logged, so it should not quote the body.
    fn input(&self, message: &Message) -> Result<Self::Input, BoxError> {
        serde_json::from_str(&message.body).map_err(|error| InvalidInput::from(&error).into())
    }

    /// The longest the effect takes, if it limits itself: messages are not started with
    /// less time left.
    fn time_limit(&self) -> Option<Duration> {
        None
    }
}

/// The body is not what the effect reads. Says where and what kind of thing is wrong, and
/// not what stands there: serde quotes values, and bodies are not for logs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the body does not fit the effect's input: {problem} at line {line}, column {column}")]
pub struct InvalidInput {
    problem: String,
    line: usize,
    column: usize,
}

impl From<&serde_json::Error> for InvalidInput {
    fn from(error: &serde_json::Error) -> Self {
        use serde_json::error::Category;

        let text = error.to_string();
        let problem = match error.classify() {
            Category::Eof => "it ends too early",
            Category::Syntax | Category::Io => "it is not JSON",
            // A field's name is the effect's own word.
            Category::Data if text.starts_with("missing field `") => {
                text.rsplit_once(" at line ").map_or(text.as_str(), |(problem, _)| problem)
            }
            Category::Data => "a value of another type or out of range",
        };
        Self { problem: problem.to_owned(), line: error.line(), column: error.column() }
    }
}

/// What a takeover may do about an attempt whose outcome nobody knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Apply again: the target deduplicates by the key. Exactly once if it does.
    Rerun,
    /// Ask the target with [`Effect::verify`] and go by its answer. Exactly once if the
    /// answer is true. An attempt that failed with its outcome unknown keeps its lease, so
    /// that nobody asks while its request may still be on its way.
    Verify,
    /// Never again by itself: put the message aside for a person. At most once.
    Park,
}

impl std::str::FromStr for Recovery {
    type Err = InvalidRecovery;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "rerun" => Ok(Self::Rerun),
            "verify" => Ok(Self::Verify),
            "park" => Ok(Self::Park),
            _ => Err(InvalidRecovery),
        }
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rerun => "rerun",
            Self::Verify => "verify",
            Self::Park => "park",
        })
    }
}

/// A recovery by no such name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be `rerun` (the target deduplicates by key), `verify` (the target can be asked) or `park` (a person decides)"
)]
pub struct InvalidRecovery;

/// What [`Effect::verify`] found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verification<T> {
    /// The effect was applied, and this is its output.
    Done(T),
    /// The effect was certainly not applied; it is applied now.
    NotDone,
    /// It can't be told, for this reason: the message is parked.
    Unknown(String),
}

/// One attempt at an effect: what it needs to know beside its input.
#[derive(Debug, Clone, Copy)]
pub struct Attempt<'a> {
    key: &'a Key,
    number: u64,
    message: &'a Message,
    deadline: Deadline,
}

impl<'a> Attempt<'a> {
    pub(crate) fn new(key: &'a Key, number: u64, message: &'a Message, deadline: Deadline) -> Self {
        Self { key, number, message, deadline }
    }

    /// The idempotency key: hand [`Key::value`] to the target.
    #[must_use]
    pub fn key(&self) -> &'a Key {
        self.key
    }

    /// Which claim of the key this is, counted from 1. It grows with each takeover for as
    /// long as the key is remembered, so a target that remembers the highest number it saw
    /// can refuse a consumer that lost its claim (a fencing token). The first claim's number
    /// comes again if that was given back with nothing done. 0 if the effect runs without a
    /// claim ([natural](Effect::is_natural), or
    /// [`StoreOutage::Process`](crate::consumer::StoreOutage::Process)).
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The message, its envelope opened if the source was told to.
    #[must_use]
    pub fn message(&self) -> &'a Message {
        self.message
    }

    /// When the effect is cancelled.
    #[must_use]
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }
}

/// How an effect failed, as far as the effect can tell.
///
/// Any error converts into *outcome unknown*, the safe reading; the constructors say
/// more. This type is not itself a [`std::error::Error`], so that `?` can convert.
#[derive(Debug)]
pub struct EffectError {
    kind: EffectErrorKind,
    source: BoxError,
    retry_after: Option<Duration>,
}

/// What a failed effect did to the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EffectErrorKind {
    /// Certainly nothing: it failed before anything could have happened. The claim is
    /// given back and a retry is safe at once.
    NotApplied,
    /// Nothing, and never will: a person must mend the message. Goes to the dead-letter
    /// queue.
    Permanent,
    /// Perhaps everything. The next attempt goes through recovery.
    Unknown,
}

impl EffectError {
    /// Failed before anything could have happened, e.g. the connection was refused.
    pub fn not_applied(source: impl Into<BoxError>) -> Self {
        Self { kind: EffectErrorKind::NotApplied, source: source.into(), retry_after: None }
    }

    /// This message can never be processed, and nothing has happened.
    pub fn permanent(source: impl Into<BoxError>) -> Self {
        Self { kind: EffectErrorKind::Permanent, source: source.into(), retry_after: None }
    }

    /// May have been applied, or not.
    pub fn unknown(source: impl Into<BoxError>) -> Self {
        Self { kind: EffectErrorKind::Unknown, source: source.into(), retry_after: None }
    }

    /// The target asked to be left alone for that long.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// What the failure did to the world.
    #[must_use]
    pub fn kind(&self) -> EffectErrorKind {
        self.kind
    }

    /// How long the target asked to be left alone, if it did.
    #[must_use]
    pub fn retry_wait(&self) -> Option<Duration> {
        self.retry_after
    }

    /// The error itself.
    #[must_use]
    pub fn source(&self) -> &(dyn StdError + Send + Sync + 'static) {
        &*self.source
    }
}

impl<E: Into<BoxError>> From<E> for EffectError {
    fn from(source: E) -> Self {
        Self::unknown(source)
    }
}

impl fmt::Display for EffectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", ErrorChain(&*self.source))
    }
}
