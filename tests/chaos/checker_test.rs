//! The judge judged: histories by hand, one promise broken in each.

mod claims;
mod invocations;

use std::collections::BTreeMap;

use idempotent_consumer::time::EpochMillis;
use serde_json::json;

use super::checker::{Facts, Row, Rule, Violation, check};
use super::history::{Entry, Event, FAULTS_ARE_OVER, Meaning, Write};
use super::plan::Mode;
use crate::common::dynamo_proxy::Passage;

const LEASE: u64 = 10_000;

fn sent(message: &str, key: &str, group: &str) -> Event {
    Event::Sent {
        message: message.into(),
        key: (!key.is_empty()).then(|| key.into()),
        group: group.into(),
        payload: format!("payload of {key}"),
        original: None,
    }
}

fn delivered(message: &str, receive: u32) -> Event {
    Event::Delivered { process: 0, message: message.into(), receive }
}

fn write(key: &str, write: Write) -> Event {
    let (process, operation, key) = (0, String::new(), key.into());
    Event::Store { process, operation, key, write: Some(write), passage: Passage::Free, accepted: Some(true) }
}

/// Not accepted, so nothing that counts.
fn refused(event: Event) -> Event {
    match event {
        Event::Store { process, operation, key, write, passage, .. } => {
            Event::Store { process, operation, key, write, passage, accepted: Some(false) }
        }
        other => panic!("{other:?}"),
    }
}

fn claim_at(key: &str, owner: &str, attempt: u64, message: &str, claimed_at: u64) -> Event {
    let (owner, message) = (owner.into(), message.into());
    write(key, Write::Claim { owner, attempt, lease: claimed_at + LEASE, claimed_at, message })
}

fn claim(key: &str, owner: &str, message: &str) -> Event {
    claim_at(key, owner, 1, message, 0)
}

/// A second claim, of a lease that is over.
fn takeover(key: &str, owner: &str, message: &str) -> Event {
    claim_at(key, owner, 2, message, LEASE + 1001)
}

fn answer(key: &str) -> serde_json::Value {
    json!({ "of": key })
}

fn data(key: &str) -> String {
    json!({ "status": 200, "body": answer(key) }).to_string()
}

fn complete(key: &str, owner: &str, attempt: u64) -> Event {
    write(key, Write::Complete { owner: owner.into(), attempt, data: data(key) })
}

fn release(key: &str, owner: &str, attempt: u64) -> Event {
    write(key, Write::Release { owner: owner.into(), attempt })
}

fn park(key: &str, owner: &str, attempt: u64) -> Event {
    write(key, Write::Park { owner: owner.into(), attempt })
}

fn arrived(key: &str, attempt: u64, message: &str) -> Event {
    Event::Arrived { key: key.into(), attempt, message: message.into() }
}

fn applied(key: &str, message: &str) -> Event {
    Event::Applied { key: key.into(), message: message.into(), answer: answer(key) }
}

fn answered(key: &str, message: &str, meaning: Meaning) -> Event {
    Event::Answered { key: key.into(), message: message.into(), fate: "", meaning }
}

fn reported(message: &str, outcome: &str) -> Event {
    let (dead_lettered, reason) = (false, Some("a reason".into()));
    Event::Reported { process: 0, message: message.into(), outcome: outcome.into(), dead_lettered, reason }
}

/// Not begun because of its group.
fn held_back(message: &str) -> Event {
    let reason = Some("an earlier message of its group was not acknowledged".into());
    Event::Reported { process: 0, message: message.into(), outcome: "unstarted".into(), dead_lettered: false, reason }
}

/// Given up, and the letter sent.
fn lettered(message: &str, outcome: &str) -> [Event; 2] {
    let letter = Event::Letter { original: message.into(), reason: format!("{outcome}: a reason") };
    let (dead_lettered, reason) = (true, Some("a reason".into()));
    let (message, outcome) = (message.into(), outcome.into());
    [letter, Event::Reported { process: 0, message, outcome, dead_lettered, reason }]
}

fn acked(message: &str) -> Event {
    Event::Acked { process: 0, message: message.into(), taken: true }
}

fn exhausted(message: &str) -> Event {
    Event::Exhausted { message: message.into() }
}

/// A message sent, processed and acked as it should be: its events from the claim on.
fn processed(message: &str, key: &str, owner: &str) -> Vec<Event> {
    vec![
        claim(key, owner, message),
        arrived(key, 1, message),
        applied(key, message),
        answered(key, message, Meaning::Applied),
        complete(key, owner, 1),
        reported(message, "executed"),
        acked(message),
    ]
}

fn completed(key: &str, attempt: u64) -> (&str, Row) {
    (key, Row { status: "COMPLETED".into(), attempt, data: Some(data(key)) })
}

fn facts(mode: Mode, table: &[(&str, Row)]) -> Facts {
    Facts {
        mode,
        max_receives: 3,
        skew: 1000,
        left: Vec::new(),
        table: table.iter().map(|(key, row)| ((*key).to_owned(), row.clone())).collect(),
        stock: BTreeMap::new(),
    }
}

fn judged(mode: Mode, events: Vec<Event>, table: &[(&str, Row)]) -> Vec<Violation> {
    let entry = |(number, event)| Entry { at: EpochMillis::new(number), event };
    check(&facts(mode, table), &(0..).zip(events).map(entry).collect::<Vec<_>>()).violations
}

fn rules(mode: Mode, events: Vec<Event>, table: &[(&str, Row)]) -> Vec<Rule> {
    judged(mode, events, table).into_iter().map(|violation| violation.rule).collect()
}

fn story(parts: impl IntoIterator<Item = Vec<Event>>) -> Vec<Event> {
    parts.into_iter().flatten().collect()
}

#[test]
fn what_is_as_it_should_be_is_not_found_fault_with() {
    for mode in [Mode::Rerun, Mode::Verify, Mode::Park] {
        let start = vec![sent("m1", "k", "g"), sent("m2", "k", "g"), sent("m3", "l", "g"), delivered("m1", 1)];
        let replayed = vec![refused(claim("k", "o2", "m2")), reported("m2", "replayed"), acked("m2")];
        let events = story([start, processed("m1", "k", "o1"), replayed, processed("m3", "l", "o3")]);
        assert_eq!(rules(mode, events, &[completed("k", 1), completed("l", 1)]), [], "{mode:?}");
    }
}

#[test]
fn an_ack_without_a_result() {
    let events = vec![sent("m1", "k", "g"), claim("k", "o1", "m1"), release("k", "o1", 1), acked("m1")];
    let found = judged(Mode::Rerun, events, &[]);
    assert_eq!(found[0].rule, Rule::AckedWithoutResult);
    // The claim that was given back is of no account.
    assert_eq!(found[0].trace.len(), 2, "{found:?}");
}

#[test]
fn an_ack_that_the_log_does_not_know_of() {
    let mut events = story([vec![sent("m1", "k", "g")], processed("m1", "k", "o1")]);
    events.remove(6);
    assert_eq!(rules(Mode::Rerun, events.clone(), &[completed("k", 1)]), [Rule::AckNotLogged]);
    events.insert(6, reported("m1", "in-flight"));
    assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), [Rule::AckNotLogged]);
}

#[test]
fn an_ack_before_its_result_stands() {
    let mut events = story([vec![sent("m1", "k", "g")], processed("m1", "k", "o1")]);
    let result = events.remove(5);
    events.push(result);
    assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), [Rule::AckedWithoutResult; 2]);
}

#[test]
fn a_message_with_another_payload_taken_for_a_duplicate() {
    let other = Event::Sent {
        message: "m2".into(),
        key: Some("k".into()),
        group: "g".into(),
        payload: "another".into(),
        original: None,
    };
    let replayed = vec![reported("m2", "replayed"), acked("m2")];
    let events = story([vec![sent("m1", "k", "g"), other], processed("m1", "k", "o1"), replayed]);
    assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), [Rule::AckedWithoutResult; 2]);
}

#[test]
fn dead_letters_without_a_cause() {
    for outcome in ["rejected", "conflict", "permanent", "parked"] {
        let events = story([vec![sent("m1", "k", "g")], lettered("m1", outcome).into(), vec![acked("m1")]]);
        // The letter, and what the log says of it.
        assert_eq!(rules(Mode::Rerun, events, &[]), [Rule::UnfoundedDeadLetter; 2], "{outcome}");
    }
    let early = vec![sent("m1", "k", "g"), delivered("m1", 2), exhausted("m1")];
    assert_eq!(rules(Mode::Rerun, early, &[]), [Rule::UnfoundedDeadLetter]);
}

#[test]
fn a_letter_that_is_logged_and_was_not_sent() {
    let [_, log] = lettered("m1", "rejected");
    let events = vec![sent("m1", "", "g"), log, acked("m1")];
    assert_eq!(rules(Mode::Rerun, events, &[]), [Rule::AckedWithoutResult]);
}

#[test]
fn an_effect_applied_twice() {
    let again = vec![
        takeover("k", "o2", "m1"),
        arrived("k", 2, "m1"),
        applied("k", "m1"),
        answered("k", "m1", Meaning::Applied),
        complete("k", "o2", 2),
        reported("m1", "executed"),
        acked("m1"),
    ];
    let first = processed("m1", "k", "o1")[..4].to_vec();
    let found = judged(Mode::Verify, story([vec![sent("m1", "k", "g")], first, again]), &[completed("k", 2)]);
    assert_eq!(found.iter().map(|violation| violation.rule).collect::<Vec<_>>(), [Rule::AppliedTwice]);
    // Both claims, and what they sent: nothing of acks and deliveries.
    assert_eq!(found[0].trace.len(), 7, "{found:?}");
}

#[test]
fn an_effect_acked_and_never_applied() {
    let mut events = story([vec![sent("m1", "k", "g")], processed("m1", "k", "o1")]);
    events.remove(3);
    assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), [Rule::NeverApplied]);
}

#[test]
fn with_park_something_sent_after_an_unclear_answer() {
    for (meaning, expected) in [
        (Some(Meaning::Unclear), vec![Rule::SentAfterUnclear]),
        (Some(Meaning::Applied), vec![Rule::SentAfterUnclear]),
        (None, vec![Rule::SentAfterUnclear]),
        (Some(Meaning::NotApplied), vec![]),
        (Some(Meaning::Never), vec![]),
    ] {
        let mut first = vec![sent("m1", "k", "g"), claim("k", "o1", "m1"), arrived("k", 1, "m1")];
        first.extend(meaning.map(|meaning| answered("k", "m1", meaning)));
        first.push(release("k", "o1", 1));
        let events = story([first, processed("m1", "k", "o2")]);
        assert_eq!(rules(Mode::Park, events.clone(), &[completed("k", 1)]), expected, "{meaning:?}");
        assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), [], "{meaning:?}");
    }
}

#[test]
fn stock_that_is_wrong() {
    let commit = Write::Commit {
        token: "t".into(),
        message: "m1".into(),
        data: r#""reserved""#.into(),
        takes: Some(("tea".into(), 3)),
    };
    let events = [sent("m1", "k", "g"), write("k", commit), reported("m1", "executed"), acked("m1")];
    for (after, expected) in [(7, vec![]), (4, vec![Rule::StockWrong])] {
        let facts = Facts {
            mode: Mode::Transactional,
            max_receives: 3,
            skew: 1000,
            left: Vec::new(),
            table: [(
                "k".to_owned(),
                Row { status: "COMPLETED".into(), attempt: 1, data: Some(r#""reserved""#.into()) },
            )]
            .into(),
            stock: [("tea".to_owned(), (10, after))].into(),
        };
        let entries: Vec<Entry> =
            events.iter().map(|event| Entry { at: EpochMillis::new(0), event: event.clone() }).collect();
        let found: Vec<Rule> = check(&facts, &entries).violations.into_iter().map(|violation| violation.rule).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn a_result_that_is_not_what_the_target_answered() {
    let mut events = story([vec![sent("m1", "k", "g")], processed("m1", "k", "o1")]);
    events[3] = Event::Applied { key: "k".into(), message: "m1".into(), answer: json!("another") };
    assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), [Rule::ResultDiffers]);
}

#[test]
fn a_result_that_changes() {
    let first = processed("m1", "k", "o1");
    let events = story([vec![sent("m1", "k", "g")], first, vec![complete("k", "o1", 1)]]);
    assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), [Rule::WriteWithoutClaim]);
}

#[test]
fn an_effect_begun_before_the_one_sent_before_it() {
    let both = || vec![sent("m1", "k", "g"), sent("m2", "l", "g"), delivered("m1", 1)];
    let table = [completed("k", 1), completed("l", 1)];
    let late = story([both(), processed("m2", "l", "o2"), processed("m1", "k", "o1")]);
    assert_eq!(rules(Mode::Rerun, late.clone(), &table), [Rule::OutOfOrder]);
    // Each of these settles the first.
    let failed = vec![delivered("m1", 3), reported("m1", "unknown")];
    let last_receive = story([both(), failed, late[3..].to_vec()]);
    assert_eq!(rules(Mode::Rerun, last_receive, &table), []);
    let letter = Event::Letter { original: "m1".into(), reason: "permanent: no".into() };
    let given_up = vec![answered("k", "m1", Meaning::Never), letter];
    assert_eq!(rules(Mode::Rerun, story([both(), given_up, late[3..].to_vec()]), &table), []);
    // In another group it may be as it likes.
    let apart = story([vec![sent("m1", "k", "g"), sent("m2", "l", "h")], late[3..].to_vec()]);
    assert_eq!(rules(Mode::Rerun, apart, &table), []);
}

#[test]
fn a_message_held_back_by_another_group() {
    let gone = || vec![delivered("m1", 3), exhausted("m1"), delivered("m2", 3), exhausted("m2")];
    for (group, expected) in [("g", vec![]), ("h", vec![Rule::HeldByAnother])] {
        let start = vec![sent("m1", "k", "g"), sent("m2", "l", group), reported("m1", "unknown"), held_back("m2")];
        assert_eq!(rules(Mode::Rerun, story([start, gone()]), &[]), expected, "{group}");
    }
}

#[test]
fn a_message_that_never_ends() {
    assert_eq!(rules(Mode::Rerun, vec![sent("m1", "k", "g"), delivered("m1", 1)], &[]), [Rule::NotDrained]);
}

#[test]
fn writes_of_those_who_have_lost_their_claim() {
    let start = || vec![sent("m1", "k", "g"), claim("k", "o1", "m1"), takeover("k", "o2", "m1")];
    let end = || vec![complete("k", "o2", 2), exhausted("m1")];
    for late in [
        complete("k", "o1", 1),
        park("k", "o1", 1),
        release("k", "o1", 1),
        // Not even the owner's, if it says another attempt.
        complete("k", "o2", 1),
        write("k", Write::SetLease { owner: "o1".into(), attempt: 1, lease: 0 }),
        // Nor may anybody claim what is held.
        claim("k", "o3", "m1"),
        claim_at("k", "o3", 2, "m1", 99_999),
    ] {
        let events = story([start(), vec![delivered("m1", 3), late.clone()], end()]);
        let found = rules(Mode::Rerun, events, &[completed("k", 2)]);
        assert!(found.starts_with(&[Rule::WriteWithoutClaim]), "{late:?}: {found:?}");
        // The store refused it: all is well.
        let events = story([start(), vec![delivered("m1", 3), refused(late.clone())], end()]);
        let found = rules(Mode::Rerun, events, &[completed("k", 2)]);
        assert!(!found.contains(&Rule::WriteWithoutClaim), "{late:?}: {found:?}");
    }
}

#[test]
fn a_takeover_before_the_lease_is_over() {
    for (claimed_at, expected) in [(LEASE + 1000, vec![Rule::EarlyTakeover]), (LEASE + 1001, vec![])] {
        let second = claim_at("k", "o2", 2, "m1", claimed_at);
        let rest = vec![park("k", "o2", 2), delivered("m1", 3), exhausted("m1")];
        let events = story([vec![sent("m1", "k", "g"), claim("k", "o1", "m1"), second], rest]);
        let parked = ("k", Row { status: "PARKED".into(), attempt: 2, data: None });
        assert_eq!(rules(Mode::Park, events, &[parked]), expected, "{claimed_at}");
    }
}

#[test]
fn something_sent_without_a_claim() {
    let start = || vec![sent("m1", "k", "g"), claim("k", "o1", "m1"), delivered("m1", 3)];
    let end = || vec![release("k", "o1", 1), exhausted("m1")];
    let not_now = || answered("k", "m1", Meaning::NotApplied);
    for (sent, expected) in [
        (vec![arrived("k", 1, "m1"), not_now()], vec![]),
        // Another attempt than the claim's.
        (vec![arrived("k", 2, "m1"), not_now()], vec![Rule::SentWithoutClaim]),
        // Twice for one claim.
        (vec![arrived("k", 1, "m1"), not_now(), arrived("k", 1, "m1"), not_now()], vec![Rule::SentWithoutClaim]),
    ] {
        assert_eq!(rules(Mode::Rerun, story([start(), sent, end()]), &[]), expected);
    }
}

#[test]
fn a_table_that_is_not_what_was_written() {
    let events = || story([vec![sent("m1", "k", "g")], processed("m1", "k", "o1")]);
    assert_eq!(rules(Mode::Rerun, events(), &[]), [Rule::TableDiffers]);
    assert_eq!(rules(Mode::Rerun, events(), &[completed("k", 2)]), [Rule::TableDiffers]);
    assert_eq!(rules(Mode::Rerun, events(), &[completed("k", 1), completed("x", 1)]), [Rule::TableDiffers]);
}

#[test]
fn poison_that_costs_more_than_itself_or_goes_in_silence() {
    let failed = Event::InvocationFailed { process: 0, error_type: "NotAnSqsEvent".into(), text: String::new() };
    assert_eq!(rules(Mode::Rerun, vec![failed], &[]), [Rule::InvocationFailed]);
    let died = Event::Stopped { process: 0, how: "died by itself" };
    assert_eq!(rules(Mode::Rerun, vec![died], &[]), [Rule::Died]);

    let kept = vec![sent("m1", "", "g"), reported("m1", "store-failed"), delivered("m1", 3), exhausted("m1")];
    assert_eq!(rules(Mode::Rerun, kept, &[]), [Rule::PoisonNotRejected]);

    let [letter, log] = lettered("m1", "rejected");
    let well = vec![sent("m1", "", "g"), letter, log, acked("m1")];
    assert_eq!(rules(Mode::Rerun, well.clone(), &[]), []);
    let mut silent = well;
    if let Event::Reported { reason, .. } = &mut silent[2] {
        *reason = None;
    }
    assert_eq!(rules(Mode::Rerun, silent, &[]), [Rule::UnfoundedDeadLetter]);
}
