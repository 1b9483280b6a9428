//! What the test programs share.
#![allow(dead_code, unreachable_pub, missing_docs)]

#[cfg(feature = "dynamodb")]
pub mod dynamo;
#[cfg(feature = "dynamodb")]
pub mod dynamo_proxy;
pub mod effects;
#[cfg(feature = "dynamodb")]
pub mod emulator;
pub mod events;
pub mod faulty_store;
#[cfg(feature = "dynamodb")]
pub mod item;
pub mod log;
pub mod page;
#[cfg(feature = "dynamodb")]
pub mod process;
pub mod proof;
#[cfg(feature = "lambda")]
pub mod runtime_api;
pub mod sink;
#[cfg(feature = "sqs")]
pub mod sqs;
pub mod wait;
pub mod wire;
