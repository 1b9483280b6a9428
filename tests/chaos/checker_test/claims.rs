//! What is sent under a claim that is over.

use super::*;

/// Each event at its time.
fn rules_at(events: Vec<(u64, Event)>, table: &[(&str, Row)]) -> Vec<Rule> {
    let entry = |(at, event)| Entry { at: EpochMillis::new(at), event };
    let entries: Vec<Entry> = events.into_iter().map(entry).collect();
    check(&facts(Mode::Rerun, table), &entries).violations.into_iter().map(|violation| violation.rule).collect()
}

fn of_process(process: usize, event: Event) -> Event {
    match event {
        Event::Store { operation, key, write, passage, accepted, .. } => {
            Event::Store { process, operation, key, write, passage, accepted }
        }
        other => panic!("{other:?}"),
    }
}

fn started(process: usize, ahead: i64) -> Event {
    Event::Started { process, ahead }
}

fn give_up(owner: &str, attempt: u64) -> Event {
    write("k", Write::SetLease { owner: owner.into(), attempt, lease: 0 })
}

/// It is sent under the claim of process 0 after that; what is found, and nothing else is.
fn sent_after(clocks: [i64; 2], between: Vec<(u64, Event)>, arrives: u64) -> bool {
    let clocks = [(0, started(0, clocks[0])), (0, started(1, clocks[1]))];
    let start = [(0, sent("m1", "k", "g")), (0, claim("k", "o1", "m1"))];
    let end = [
        (arrives, arrived("k", 1, "m1")),
        (arrives, answered("k", "m1", Meaning::NotApplied)),
        (arrives, delivered("m1", 3)),
        (arrives, exhausted("m1")),
    ];
    let events: Vec<(u64, Event)> = clocks.into_iter().chain(start).chain(between).chain(end).collect();
    // The table is of no account here.
    let found = rules_at(events, &[]);
    let found: Vec<Rule> = found.into_iter().filter(|rule| *rule != Rule::TableDiffers).collect();
    assert!(found.is_empty() || found == [Rule::SentUnderDeadClaim], "{found:?}");
    !found.is_empty()
}

#[test]
fn something_sent_after_its_lease() {
    assert!(!sent_after([0, 0], vec![], LEASE + 500));
    assert!(sent_after([0, 0], vec![], LEASE + 501));
    // By its own clock.
    assert!(sent_after([400, 0], vec![], LEASE + 101));
    assert!(!sent_after([-400, 0], vec![], LEASE + 900));
}

#[test]
fn something_sent_under_a_claim_that_was_taken_over() {
    // Under each of these the holder's lease still runs by its own clock.
    let taken = || vec![(5000, of_process(1, claim_at("k", "o2", 2, "m1", LEASE + 1001)))];
    assert!(!sent_after([0, 900], taken(), 5500), "it may have been on its way");
    assert!(sent_after([0, 900], taken(), 5501));
    assert!(sent_after([-1000, 0], taken(), 5501));
    assert!(!sent_after([-1001, 0], taken(), 5501), "the clocks differ too much");
}

#[test]
fn something_sent_under_a_claim_that_was_given_up_or_back() {
    assert!(!sent_after([0, 0], vec![(1000, give_up("o1", 1))], 1500));
    assert!(sent_after([0, 0], vec![(1000, give_up("o1", 1))], 1501));
    // To have taken it over at once is no excuse.
    let taken = (1600, of_process(1, claim_at("k", "o2", 2, "m1", LEASE)));
    assert!(sent_after([0, 5000], vec![(1000, give_up("o1", 1)), taken], 1700));
    // Whoever gives it back, or ends it, has sent nothing or has its answer.
    assert!(sent_after([0, 0], vec![(1000, release("k", "o1", 1))], 1000));
    assert!(sent_after([0, 0], vec![(1000, park("k", "o1", 1))], 1000));
}

#[test]
fn a_process_that_was_frozen_may_send_late() {
    let stopped = |process, how| Event::Stopped { process, how };
    let late = LEASE + 5000;
    assert!(!sent_after([0, 0], vec![(1, stopped(0, "stopped")), (late, stopped(0, "went on"))], late + 1));
    assert!(!sent_after([0, 0], vec![(1, stopped(0, "stopped"))], late));
    // Another one, or in another way.
    assert!(sent_after([0, 0], vec![(1, stopped(1, "stopped")), (late, stopped(1, "went on"))], late + 1));
    assert!(sent_after([0, 0], vec![(1, stopped(0, "answered, and the answer was lost"))], late));
}

#[test]
fn a_process_that_was_frozen_before_its_claim_is_as_any() {
    let stopped = |how| Event::Stopped { process: 0, how };
    let events = vec![
        (0, sent("m1", "k", "g")),
        (0, stopped("stopped")),
        (1, stopped("went on")),
        (2, claim("k", "o1", "m1")),
        (LEASE + 501, arrived("k", 1, "m1")),
        (LEASE + 501, answered("k", "m1", Meaning::NotApplied)),
        (LEASE + 501, release("k", "o1", 1)),
        (LEASE + 501, delivered("m1", 3)),
        (LEASE + 501, exhausted("m1")),
    ];
    assert_eq!(rules_at(events, &[]), [Rule::SentUnderDeadClaim]);
}
