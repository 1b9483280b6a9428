//! Crash and chaos: several real processes on one queue, with everything failing that can
//! fail, and a judge who reads what happened.
//!
//! A run is made of rounds, each with a fresh table and queue: some seconds of faults, then
//! none until the queue is empty. Its seed and length are `CHAOS_SEED` and `CHAOS_SECONDS`.
//! A seed draws the same faults again, not the same interleaving of processes: what matters
//! of a violation is its trace. `make soak` runs it for long, and writes a page.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, clippy::print_stderr)]

mod common;

/// The harness, part by part.
mod chaos {
    #![allow(unreachable_pub, missing_docs)]

    pub mod checker;
    pub mod checker_test;
    pub mod faketime;
    pub mod history;
    pub mod logs;
    pub mod plan;
    pub mod queue;
    pub mod replay;
    pub mod report;
    pub mod round;
    pub mod target;
    pub mod trace;
    pub mod worker;
}

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idempotent_consumer::time::{Clock, SystemClock};

use crate::chaos::checker::{Rule, Violation, check};
use crate::chaos::faketime::FakeTime;
use crate::chaos::plan::{Mode, ROUNDS_OF_ALL_KINDS, Round, Sabotage};
use crate::chaos::report::Summary;
use crate::chaos::round::play;
use crate::common::proof;

/// Rounds that are played at the same time: each waits for most of its own.
const LANES: usize = 4;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.trim().parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

#[test]
fn whatever_fails_every_promise_is_kept() {
    let faketime = FakeTime::find();
    let (seed, seconds) = (setting("CHAOS_SEED", 20_261_130), setting("CHAOS_SECONDS", 35));
    eprintln!("chaos: CHAOS_SEED={seed} CHAOS_SECONDS={seconds}");
    let start = SystemClock.now();
    let next = AtomicU64::new(0);
    let (summary, violations) = (Mutex::new(Summary::default()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                // Each kind at least once, however little time there is.
                while next.load(Ordering::SeqCst) < ROUNDS_OF_ALL_KINDS
                    || SystemClock.now().since(start) < Duration::from_secs(seconds)
                {
                    let round = Round::new(seed, next.fetch_add(1, Ordering::SeqCst));
                    let (facts, entries) = play(&round, &faketime);
                    let length = entries.last().unwrap().at.since(entries[0].at);
                    eprintln!("chaos: {}: {} events in {length:?}", round.title(), entries.len());
                    let verdict = check(&facts, &entries);
                    summary.lock().unwrap().add(&round, &entries, &verdict);
                    let mut title = round.title();
                    if !verdict.violations.is_empty() {
                        let path = chaos::report::write_history(seed, &round, &entries);
                        title = format!("{title}, all of it in {}", path.display());
                    }
                    let of_round = |violation| (title.clone(), violation);
                    violations.lock().unwrap().extend(verdict.violations.into_iter().map(of_round));
                }
            });
        }
    });
    let (summary, violations) = (summary.into_inner().unwrap(), shortest(seed, violations.into_inner().unwrap()));
    let page = summary.page(seed, SystemClock.now().since(start), &violations);
    if std::env::var_os("CHAOS_REPORT").is_some() {
        let path = chaos::report::write(&page);
        eprintln!("{page}\nwritten to {}", path.display());
    }
    assert!(violations.is_empty(), "{}", violations.join("\n\n"));
    // A run in which nothing happened proves nothing.
    assert!(summary.kills() >= 10 && summary.count("takeovers") >= 5 && summary.faults() >= 100, "{page}");
    proof::note(
        "crash and chaos",
        &format!(
            "{} messages, {} kills, {} faults, {} takeovers",
            summary.count("messages sent"),
            summary.kills(),
            summary.faults(),
            summary.count("takeovers"),
        ),
        &format!("every promise kept (seed {seed})"),
    );
}

/// Of each promise that was broken the case that takes the fewest events to show.
fn shortest(seed: u64, violations: Vec<(String, Violation)>) -> Vec<String> {
    let mut cases: BTreeMap<Rule, Vec<(String, Violation)>> = BTreeMap::new();
    for (round, violation) in violations {
        cases.entry(violation.rule).or_default().push((round, violation));
    }
    let text = |cases: Vec<(String, Violation)>| {
        let count = cases.len();
        let (round, violation) = cases.into_iter().min_by_key(|(_, violation)| violation.trace.len()).unwrap();
        format!("CHAOS_SEED={seed}, {round}, one of {count}: {violation}")
    };
    cases.into_values().map(text).collect()
}

/// Plays rounds with a lie in them until the judge says what is expected, at most so many.
fn must_be_found(sabotage: Sabotage, mode: Mode, expected: &[Rule], prepare: impl Fn(&mut Round)) {
    const SEED: u64 = 7;
    const ROUNDS: u64 = 4;
    let faketime = FakeTime::find();
    let mut seen = Vec::new();
    for number in 0..ROUNDS {
        let mut round = Round::new(SEED, number);
        (round.mode, round.sabotage, round.beyond_skew) = (mode, Some(sabotage), false);
        (round.clocks, round.time, round.orders) = (vec![0, 0, 0], Duration::from_millis(2500), 40);
        (round.faults, round.letters, round.pauses) = (Duration::from_secs(5), true, mode != Mode::Verify);
        // It lies to the end: who knows whether that comes.
        round.patience = Duration::from_secs(3);
        prepare(&mut round);
        let (facts, entries) = play(&round, &faketime);
        let found = check(&facts, &entries).violations;
        if let Some(violation) = found.iter().find(|violation| expected.contains(&violation.rule)) {
            assert!(!violation.trace.is_empty());
            eprintln!("{sabotage:?} was found in round {number} of seed {SEED}:\n{violation}");
            return;
        }
        seen.extend(found.into_iter().map(|violation| violation.rule));
    }
    panic!("{sabotage:?} was not found in {ROUNDS} rounds of seed {SEED}, only {seen:?}");
}

#[test]
fn a_store_without_a_fence_is_found_out() {
    must_be_found(Sabotage::NoFence, Mode::Rerun, &[Rule::WriteWithoutClaim], |round| {
        (round.mishaps, round.target_faults, round.store_faults) = (500, 300, 200);
    });
}

#[test]
fn a_store_that_grants_every_claim_is_found_out() {
    must_be_found(Sabotage::ClaimsGranted, Mode::Verify, &[Rule::AppliedTwice, Rule::SentWithoutClaim], |_| {});
}

#[test]
fn a_store_that_forgets_results_is_found_out() {
    must_be_found(Sabotage::ResultsForgotten, Mode::Rerun, &[Rule::AckedWithoutResult], |_| {});
}

#[test]
fn a_target_that_does_not_deduplicate_is_found_out() {
    must_be_found(Sabotage::TargetForgets, Mode::Rerun, &[Rule::AppliedTwice], |round| round.target_faults = 400);
}
