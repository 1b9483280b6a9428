//! What a run did, in numbers, and as a page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::checker::Verdict;
use super::history::{Entry, Event, FAULTS_ARE_OVER, Meaning, Write};
use super::plan::Round;
use crate::common::dynamo_proxy::Passage;

/// Numbers of one or many rounds.
#[derive(Debug, Default)]
pub struct Summary {
    pub rounds: BTreeMap<&'static str, u64>,
    pub counts: BTreeMap<&'static str, u64>,
    pub outcomes: BTreeMap<String, u64>,
    pub letters: BTreeMap<String, u64>,
    pub processes: BTreeMap<&'static str, u64>,
    pub store_faults: BTreeMap<&'static str, u64>,
    pub target_faults: BTreeMap<&'static str, u64>,
    pub world: BTreeMap<&'static str, u64>,
    pub clocks: BTreeSet<i64>,
}

impl Summary {
    pub fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or_default()
    }

    pub fn kills(&self) -> u64 {
        self.processes.iter().filter(|(how, _)| how.starts_with("killed")).map(|(_, count)| count).sum()
    }

    pub fn faults(&self) -> u64 {
        self.store_faults.values().chain(self.target_faults.values()).sum()
    }

    pub fn add(&mut self, round: &Round, entries: &[Entry], verdict: &Verdict) {
        *self.counts.entry("writes refused: by who had lost the claim").or_default() += verdict.fenced;
        *self.rounds.entry(round.mode.name()).or_default() += 1;
        if round.beyond_skew {
            *self.rounds.entry("of these, clocks further apart than allowed").or_default() += 1;
        }
        self.clocks.extend(&round.clocks);
        let calm = |entry: &Entry| matches!(entry.event, Event::World { what: FAULTS_ARE_OVER });
        let faults = entries.iter().position(calm).unwrap_or(entries.len());
        for (position, entry) in entries.iter().enumerate() {
            self.event(&entry.event);
            if position < faults && matches!(entry.event, Event::Arrived { .. }) {
                *self.counts.entry("effects arrived: while there were faults").or_default() += 1;
            }
        }
        let keys: BTreeSet<&str> =
            entries.iter().filter_map(|entry| entry.event.key()).filter(|key| !key.is_empty()).collect();
        *self.counts.entry("keys").or_default() += keys.len() as u64;
    }

    fn event(&mut self, event: &Event) {
        let mut counted = |name| *self.counts.entry(name).or_default() += 1;
        match event {
            Event::Sent { message, .. } => {
                counted("messages sent");
                if message.ends_with('\'') {
                    counted("messages sent: back from the dead-letter queue");
                }
            }
            Event::Delivered { receive, .. } => {
                counted("deliveries");
                if *receive > 1 {
                    counted("deliveries: again");
                }
            }
            Event::Acked { taken: true, .. } => counted("acks"),
            Event::Acked { taken: false, .. } => counted("acks that came too late"),
            Event::Failed { .. } => counted("failures reported"),
            Event::InvocationFailed { .. } => counted("invocations failed"),
            Event::Exhausted { .. } => *self.letters.entry("received too often".to_owned()).or_default() += 1,
            Event::Letter { reason, .. } => {
                let kind = reason.split(':').next().unwrap_or_default().to_owned();
                *self.letters.entry(kind).or_default() += 1;
            }
            Event::Reported { outcome, .. } => *self.outcomes.entry(outcome.clone()).or_default() += 1,
            Event::Stopped { how, .. } => *self.processes.entry(how).or_default() += 1,
            Event::World { what } if *what != FAULTS_ARE_OVER => *self.world.entry(what).or_default() += 1,
            Event::Arrived { .. } => counted("effects arrived"),
            Event::Applied { .. } => counted("effects applied"),
            Event::Asked { .. } => counted("verifications asked"),
            Event::Answered { fate, meaning, .. } if *meaning != Meaning::Applied => {
                *self.target_faults.entry(fate).or_default() += 1;
            }
            Event::Store { write, passage, accepted, .. } => {
                counted("requests to the store");
                if let Some(kind) = fault(*passage) {
                    *self.store_faults.entry(kind).or_default() += 1;
                }
                match (write, accepted) {
                    (Some(Write::Claim { attempt, .. }), Some(true)) if *attempt > 1 => counted("takeovers"),
                    (Some(Write::Claim { .. }), Some(true)) => counted("first claims"),
                    (Some(Write::Commit { .. }), Some(true)) => counted("transactions committed"),
                    (Some(write), Some(false)) if write.fence().is_some() => counted("writes refused"),
                    _ => {}
                }
            }
            _ => {}
        }
    }

    /// The page.
    pub fn page(&self, seed: u64, time: Duration, violations: &[String]) -> String {
        let mut page = format!(
            "# Crash and chaos\n\n- seed {seed}, {} s, {} rounds\n- violations: **{}**\n",
            time.as_secs(),
            self.rounds.iter().filter(|(name, _)| !name.starts_with("of these")).map(|(_, count)| count).sum::<u64>(),
            violations.len()
        );
        if let (Some(least), Some(most)) = (self.clocks.first(), self.clocks.last()) {
            let _ = writeln!(page, "- {} clocks, from {least} to {most} ms ahead", self.clocks.len());
        }
        let owned = |counts: &BTreeMap<&'static str, u64>| counts.iter().map(|(n, c)| ((*n).to_owned(), *c)).collect();
        let tables: [(&str, BTreeMap<String, u64>); 8] = [
            ("Rounds", owned(&self.rounds)),
            ("What happened", owned(&self.counts)),
            ("Outcomes logged", self.outcomes.clone()),
            ("Dead letters", self.letters.clone()),
            ("Processes", owned(&self.processes)),
            ("Faults of the store", owned(&self.store_faults)),
            ("Faults of the target", owned(&self.target_faults)),
            ("Outages", owned(&self.world)),
        ];
        for (title, counts) in tables {
            let _ = write!(page, "\n## {title}\n\n| | |\n| --- | ---: |\n");
            for (name, count) in counts {
                let _ = writeln!(page, "| {name} | {count} |");
            }
        }
        for violation in violations {
            let _ = write!(page, "\n```text\n{violation}\n```\n");
        }
        page
    }
}

fn fault(passage: Passage) -> Option<&'static str> {
    Some(match passage {
        Passage::Free => return None,
        Passage::HoldRequest | Passage::HoldAnswer => "no answer at all",
        Passage::LoseAnswer => "reset after it was applied",
        Passage::TruncateAnswer => "answer cut short",
        Passage::LoseRequest => "reset before it was applied",
        Passage::Refuse => "500",
        Passage::Throttle => "throttled",
        Passage::Late(time) if time < Duration::from_millis(500) => "slow",
        Passage::Late(_) => "arrives late",
        Passage::Unfenced(_) | Passage::Granted | Passage::Forgotten => "lies",
    })
}

/// Writes the page into the target folder; where it is.
pub fn write(page: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("soak-report.md");
    std::fs::write(&path, page).unwrap();
    path
}

/// Writes down everything that happened in a round; where it is.
pub fn write_history(seed: u64, round: &Round, entries: &[Entry]) -> PathBuf {
    let name = format!("chaos-{seed}-{}.txt", round.number);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let lines = entries.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    std::fs::write(&path, lines).unwrap();
    path
}
