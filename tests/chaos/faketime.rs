//! Clocks that are ahead or behind: libfaketime, which `make tools` brings.

use std::path::{Path, PathBuf};
use std::process::Command;

use idempotent_consumer::time::{Clock, SystemClock};

use crate::common::process::Setup;

/// The library.
#[derive(Debug, Clone)]
pub struct FakeTime(String);

impl FakeTime {
    /// Finds it, and sees that it works here.
    pub fn find() -> Self {
        let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join(".tools/venv/lib");
        let pythons = std::fs::read_dir(&environment).into_iter().flatten().map(|entry| entry.unwrap().path());
        let library =
            |python: PathBuf| python.join("site-packages/libfaketime/vendor/libfaketime/src/libfaketime.so.1");
        let found = pythons.map(library).find(|library| library.exists()).unwrap_or_else(|| {
            panic!("libfaketime is not in {}: run `make tools`, and then the tests again", environment.display())
        });
        let found = Self(found.to_str().unwrap().to_owned());
        let ahead = found.measured(100_000);
        assert!((99_000..=101_000).contains(&ahead), "{found:?} sets clocks {ahead} ms ahead instead of 100000");
        found
    }

    /// How far ahead a process's clock is, in milliseconds.
    fn measured(&self, ahead: i64) -> i64 {
        let mut date = Command::new("date");
        let output = date.arg("+%s%3N").envs(self.variables(ahead)).output().unwrap();
        let shown: i64 = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        shown - i64::try_from(SystemClock.now().get()).unwrap()
    }

    fn variables(&self, ahead: i64) -> [(&'static str, String); 3] {
        let sign = if ahead < 0 { '-' } else { '+' };
        let (seconds, millis) = (ahead.unsigned_abs() / 1000, ahead.unsigned_abs() % 1000);
        [
            ("LD_PRELOAD", self.0.clone()),
            ("FAKETIME", format!("{sign}{seconds}.{millis:03}")),
            // Only the wall clock: timers measure as they do.
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
        ]
    }

    /// The same function by a clock that is so many milliseconds ahead.
    pub fn set(&self, setup: Setup, ahead: i64) -> Setup {
        self.variables(ahead).into_iter().fold(setup, |setup, (name, value)| setup.set(name, &value))
    }

    /// Removes what the library leaves behind of a process that was killed.
    pub fn clean(process: u32) {
        for name in [format!("sem.faketime_sem_{process}"), format!("faketime_shm_{process}")] {
            // Not there if the process had no library.
            let _ = std::fs::remove_file(Path::new("/dev/shm").join(name));
        }
    }
}
