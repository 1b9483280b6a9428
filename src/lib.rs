//! An **idempotent consumer** for AWS, in Rust: every message takes effect once.
//!
//! Brokers deliver at least once. A consumer that crashed between charging a customer and
//! acknowledging the message gets it again, and charges twice. What prevents that is a
//! memory outside the consumer, asked *before* the effect and holding its *result* after
//! it.
//!
//! You write an [`Effect`](effect::Effect); the crate claims each message's key in a
//! [`Store`](store::Store) under a lease, runs the effect, stores its result, and answers
//! duplicates from there. A whole Lambda function is one effect and a `main` of one line:
//! see [`run`].
//!
//! | module | what it is about |
//! | --- | --- |
//! | [`message`], [`key`], [`fingerprint`], [`json`] | what was delivered, and what tells two messages apart |
//! | [`effect`] | the side effect, how it may fail, how it is recovered |
//! | [`record`], [`time`] | the protocol: pure transitions, leases, retention |
//! | [`store`] | where records are kept: the contract, in memory, DynamoDB |
//! | [`consumer`], [`batch`], [`outcome`] | one message, many messages, what became of them |
//! | [`dead_letter`] | where messages go that a person must look at |
//! | [`source`], [`config`], [`telemetry`] | Lambda's SQS events, envelopes, settings, logs |
//!
//! # What is promised
//!
//! 1. No message is acknowledged without a stored result, or having reached the
//!    [dead-letter queue](dead_letter); save noise that you chose to ignore
//!    ([`source::noise`]).
//! 2. An effect whose target deduplicates by key, or that can verify, is applied exactly
//!    once, wherever the consumer is killed; with [`Recovery::Park`](effect::Recovery),
//!    at most once.
//! 3. Every acknowledgement of a key reports the same result.
//! 4. Within a group effects happen in order; one group's failure holds no other.
//! 5. No write by a consumer that lost its claim changes a record.
//! 6. Bad input costs one message, never the batch, and leaves a reason.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

#[cfg(any(feature = "dynamodb", feature = "sqs"))]
mod aws;
pub mod batch;
pub mod config;
pub mod consumer;
pub mod dead_letter;
pub mod effect;
pub mod error;
pub mod fingerprint;
pub mod json;
pub mod key;
pub mod message;
pub mod outcome;
pub mod record;
pub mod source;
#[cfg(feature = "sqs")]
pub mod sqs;
pub mod store;
pub mod telemetry;
pub mod time;

#[cfg(all(feature = "dynamodb", feature = "lambda"))]
mod function;

#[cfg(all(feature = "dynamodb", feature = "lambda"))]
pub use function::{InitError, block_on, run, run_transactional, run_transactional_with, run_with};

// The README's example compiles with the tests.
#[cfg(all(doctest, feature = "dynamodb", feature = "lambda"))]
#[doc = include_str!("../README.md")]
mod readme {}
