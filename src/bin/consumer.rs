//! The deployed function: sends every message to `EFFECT_URL`, once.

use std::process::ExitCode;

use idempotent_consumer::effect::http::HttpEffect;

// With `panic = "abort"` one panicking effect would take its whole batch along.
// cargo-lambda sets that for every profile that does not say otherwise.
const _: () = assert!(cfg!(panic = "unwind"), "build with `panic = \"unwind\"`");

fn main() -> ExitCode {
    idempotent_consumer::block_on(idempotent_consumer::run_with(HttpEffect::from_env))
}
