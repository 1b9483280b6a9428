#![no_main]

libfuzzer_sys::fuzz_target!(init: idempotent_consumer_fuzz::keep_caught_panics(), |data: &[u8]| {
    idempotent_consumer_fuzz::envelope(data);
});
