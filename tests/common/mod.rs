//! What the test programs share.
#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod dynamo;
pub mod effects;
pub mod faulty_store;
