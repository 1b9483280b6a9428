//! The promises hold in every state of every world, and the worlds are as large as they
//! were.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod common;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use idempotent_consumer_model::setting::{Path, Payload, Sent, Setting, sent};
use idempotent_consumer_model::story;
use stateright::{Checker, HasDiscoveries, Model};

use crate::common::{PARK, RERUN, VERIFY, leaseless};

const PATHS: [(Path, &str); 4] =
    [(RERUN, "rerun"), (VERIFY, "verify"), (PARK, "park"), (Path::Transaction, "transaction")];

/// The outcomes that a path can have while the store is there or comes back, of the statuses that
/// every version knows.
fn outcomes(path: Path) -> Vec<&'static str> {
    let of_all = ["conflict", "executed", "rejected", "replayed", "store-failed", "unstarted"];
    let of_claims = ["fenced", "in-flight", "not-applied", "not-recorded", "permanent", "unknown"];
    let own: &[&str] = match path {
        RERUN => &of_claims,
        VERIFY => &[&of_claims[..], &["parked", "recovered"]].concat(),
        PARK => &[&of_claims[..], &["parked"]].concat(),
        Path::Transaction => &["in-flight"],
    };
    let mut outcomes = [&of_all[..], own].concat();
    outcomes.sort_unstable();
    outcomes
}

fn other(key: usize, group: usize, payload: Payload) -> Sent {
    Sent { key, group, payload }
}

/// What is in the worlds, and who explores them.
fn worlds() -> Vec<(&'static str, Vec<(&'static str, Setting)>)> {
    let all = |make: &dyn Fn(Path) -> Setting| PATHS.map(|(path, name)| (name, make(path))).to_vec();
    let some = |paths: &[Path], make: &dyn Fn(Path) -> Setting| {
        all(make).into_iter().filter(|(_, setting)| paths.contains(&setting.path)).collect::<Vec<_>>()
    };
    let one = [sent(0, 0)];
    let duplicate = [sent(0, 0), sent(0, 1)];
    let group = [sent(0, 0), sent(1, 0)];
    let crossed = [sent(0, 0), sent(1, 0), sent(1, 1)];
    let bad = [other(0, 0, Payload::Poison), sent(1, 0), other(1, 1, Payload::Another)];
    vec![
        ("one message, 3 faults", all(&|path| Setting::new(path, &one, 3))),
        ("a duplicate in another group, 2 faults", all(&|path| Setting::new(path, &duplicate, 2))),
        ("a group of two, 2 faults", all(&|path| Setting::new(path, &group, 2))),
        ("a group of two, one of them also in another, 1 fault", all(&|path| Setting::new(path, &crossed, 1))),
        (
            "clocks 1 s apart, as allowed; a duplicate, 1 fault",
            all(&|path| Setting::new(path, &duplicate, 1).clocks(&[0, 1])),
        ),
        ("clocks 1 s apart, one message, 2 faults", all(&|path| Setting::new(path, &one, 2).clocks(&[1, 0]))),
        (
            "clocks 4 s apart, more than allowed; a duplicate, 1 fault",
            some(&[RERUN, PARK, Path::Transaction], &|path| Setting::new(path, &duplicate, 1).clocks(&[0, 4])),
        ),
        (
            "requests to the target arrive however late; one message, 2 faults",
            some(&[RERUN, PARK], &|path| Setting::new(path, &one, 2).with_effects_of_any_age()),
        ),
        (
            "the same with clocks 4 s apart and a target that refuses lower attempts; a duplicate, 1 fault",
            some(&[VERIFY], &|path| {
                let worst = Setting::new(path, &duplicate, 1).clocks(&[0, 4]).with_effects_of_any_age();
                worst.with_a_target_that_fences()
            }),
        ),
        ("a poison message first, a conflict in another group, 1 fault", all(&|path| Setting::new(path, &bad, 1))),
        (
            "two receives at most, and put back twice; a group of two, 1 fault",
            all(&|path| Setting::new(path, &group, 1).with_few_receives(2, 2)),
        ),
        (
            "an operator resolves what was parked; one message, 2 faults",
            some(&[VERIFY, PARK], &|path| Setting::new(path, &one, 2).with_operator()),
        ),
        (
            "a claim without a lease stands there, and expires; 1 fault",
            all(&|path| Setting::new(path, &one, 1).records(&[leaseless(7)])),
        ),
    ]
}

/// Explores a world to its end: how many states it has.
fn explore(name: &str, path: &str, setting: &Setting) -> usize {
    let checker = setting.clone().checker().finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    if let Some((promise, trace)) = checker.discoveries().into_iter().next() {
        let story = story::tell(setting, trace.into_vec()).join("\n  ");
        panic!("{name}, {path}: broken: {promise}\n  {story}");
    }
    checker.unique_state_count()
}

#[test]
fn the_promises_hold_in_every_state() {
    let worlds = worlds();
    let queue: Vec<_> = worlds
        .iter()
        .flat_map(|(name, settings)| settings.iter().map(move |(path, setting)| (*name, *path, setting)))
        .collect();
    let (next, counts) = (AtomicUsize::new(0), Mutex::new(HashMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((name, path, setting)) = queue.get(next.fetch_add(1, Ordering::SeqCst)) {
                    let states = explore(name, path, setting);
                    counts.lock().unwrap().insert((*name, *path), states);
                }
            });
        }
    });
    let counts = counts.into_inner().unwrap();
    for (path, name) in PATHS {
        let of_path = queue.iter().filter(|(_, _, setting)| setting.path == path);
        let reached: BTreeSet<_> = of_path.flat_map(|(_, _, setting)| setting.reached.names()).collect();
        assert_eq!(reached.into_iter().collect::<Vec<_>>(), outcomes(path), "the outcomes that {name} reached");
    }

    let mut table =
        String::from("| world | `rerun` | `verify` | `park` | transaction |\n| --- | --- | --- | --- | --- |\n");
    for (name, _) in &worlds {
        write!(table, "| {name} |").unwrap();
        for (_, path) in PATHS {
            let count = counts.get(&(*name, path)).map_or("–".to_owned(), |states| grouped(*states));
            write!(table, " {count} |").unwrap();
        }
        table.push('\n');
    }
    let extent = format!("{} states in {} worlds", grouped(counts.values().sum()), counts.len());
    write!(table, "\n{extent}.\n").unwrap();
    common::compare("model/tests/promises.rs", &table);
    common::proof::note("model", &extent, "no promise is broken in any");
}

/// A number with its thousands apart.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}
