//! Where messages come from.

#[cfg(feature = "lambda")]
pub mod sqs_lambda;
