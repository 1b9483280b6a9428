//! What the test programs share.
#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod dynamo;
pub mod dynamo_proxy;
pub mod effects;
pub mod emulator;
pub mod events;
pub mod faulty_store;
pub mod item;
pub mod page;
pub mod process;
pub mod proof;
pub mod runtime_api;
pub mod sink;
pub mod sqs;
pub mod wait;
pub mod wire;
