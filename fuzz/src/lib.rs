//! What must hold for any input, as functions that panic if it does not.
//!
//! `cargo fuzz` calls them with inputs of its own making; `tests/fuzz_corpus.rs` includes
//! this file and calls them with the corpus, with bombs and with random bytes. So what is
//! fuzzed is what is replayed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(unreachable_pub, missing_docs, dead_code)]

mod canonical_json;
pub mod dice;
mod envelope;
mod event;
mod key_expression;
pub mod model;
mod stored_record;

pub use self::canonical_json::canonical_json;
pub use self::envelope::envelope;
pub use self::event::{event, payload, splice};
pub use self::key_expression::{key_expression, key_of};
pub use self::stored_record::stored_record;

/// libFuzzer takes every panic for a crash, also one that is caught, as those of effects and
/// of the JMESPath evaluator are. With the standard hook only one that leaves a property is.
pub fn keep_caught_panics() {
    drop(std::panic::take_hook());
}
