//! The library and the tests of its rules as one crate.
//!
//! A mutant is then one small compilation and no linking of the AWS SDK: seconds, where the
//! crate with all its test programs takes minutes. Everything here is included by path;
//! nothing is tested here that is not tested by `cargo test`.
#![allow(
    dead_code,
    unreachable_patterns,
    unreachable_pub,
    clippy::duplicate_mod,
    clippy::unwrap_used,
    clippy::expect_used
)]

extern crate self as idempotent_consumer;

pub use self::library::*;

#[path = "../../src"]
mod library {
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
    pub mod store;
    pub mod telemetry;
    pub mod time;
}

#[path = "../common/mod.rs"]
mod common;

#[path = "../batch.rs"]
mod batch_tests;
#[path = "../canonical_json.rs"]
mod canonical_json_tests;
#[path = "../consumer.rs"]
mod consumer_tests;
#[path = "../dead_letters.rs"]
mod dead_letters_tests;
#[path = "../envelopes.rs"]
mod envelopes_tests;
#[path = "../keys.rs"]
mod keys_tests;
#[path = "../natural.rs"]
mod natural_tests;
#[path = "../store_conformance.rs"]
mod store_conformance_tests;
