//! The protocol of idempotent-consumer as a model, for [stateright] to explore.
//!
//! What is *not* modelled is what matters: the rules. The store of the model changes its
//! records by calling [`record`](idempotent_consumer::record), its consumers judge what
//! stands in their way by [`Outcome::of_record`](idempotent_consumer::outcome::Outcome),
//! tell the queue what [`Outcome::disposition`](idempotent_consumer::outcome::Outcome)
//! says, and stop a group when
//! [`Report::stops_its_group`](idempotent_consumer::outcome::Report) does: the code that
//! runs in production, not a copy. Around it the model puts a world: consumers whose clocks
//! differ and that die, stall and sleep at every step, a queue that redelivers, a network
//! that loses and delays, and an effect's target that may or may not have done it.
//!
//! * [`setting`]: what is in a world, and which faults may happen how often
//! * [`world`]: its state
//! * [`store`]: the rules, each with the switch that removes one guard of it
//! * [`turn`]: one consumer with one batch
//! * [`protocol`]: what may happen next
//! * [`consequences`]: what becomes of it
//! * [`promises`]: what must hold in every state
//! * [`story`]: a counterexample in words

pub mod consequences;
pub mod promises;
pub mod protocol;
pub mod setting;
pub mod store;
pub mod story;
pub mod turn;
pub mod world;
