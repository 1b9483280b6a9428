//! The deployed function: every message is POSTed to `EFFECT_URL`, once.

use std::process::ExitCode;

use idempotent_consumer::effect::http::HttpEffect;

// With `panic = "abort"` one panicking effect would take its whole batch along.
// cargo-lambda sets that for every profile that does not say otherwise.
const _: () = assert!(cfg!(panic = "unwind"), "build with `panic = \"unwind\"`");

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    idempotent_consumer::run_with(HttpEffect::from_env).await
}
