//! What is of one invocation, and what is not.

use super::*;

fn stopped(how: &'static str) -> Event {
    Event::Stopped { process: 0, how }
}

fn lost() -> Event {
    stopped("answered, and the answer was lost")
}

fn failed(message: &str) -> Event {
    Event::Failed { process: 0, message: message.into() }
}

#[test]
fn an_ack_by_the_log_of_an_earlier_invocation() {
    let mut events = story([vec![sent("m1", "k", "g"), delivered("m1", 1)], processed("m1", "k", "o1")]);
    events.pop();
    events.extend([lost(), delivered("m1", 2), acked("m1")]);
    assert_eq!(rules(Mode::Rerun, events.clone(), &[completed("k", 1)]), [Rule::AckNotLogged]);
    events.insert(events.len() - 1, reported("m1", "replayed"));
    assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), []);
}

#[test]
fn an_ack_by_the_dead_letter_of_an_earlier_invocation() {
    let start = vec![sent("m1", "", "g"), delivered("m1", 1)];
    let mut events = story([start, lettered("m1", "rejected").into(), vec![lost(), delivered("m1", 2), acked("m1")]]);
    assert_eq!(rules(Mode::Rerun, events.clone(), &[]), [Rule::AckedWithoutResult, Rule::AckNotLogged]);
    let again = events.len() - 1;
    events.splice(again..again, lettered("m1", "rejected"));
    assert_eq!(rules(Mode::Rerun, events, &[]), []);
}

#[test]
fn a_line_that_is_read_after_the_end_of_its_process() {
    let start = || vec![sent("m1", "k", "g"), delivered("m1", 1), claim("k", "o1", "m1")];
    let killed = vec![stopped("killed"), reported("m1", "unknown"), Event::Started { process: 0, ahead: 0 }];
    // It counts for its own invocation, and for no other.
    let events = story([start(), killed, vec![delivered("m1", 2), complete("k", "o1", 1), acked("m1")]]);
    let found = rules(Mode::Rerun, events, &[completed("k", 1)]);
    assert!(found.starts_with(&[Rule::AckNotLogged]), "{found:?}");
}

#[test]
fn a_message_held_back_by_what_failed_in_an_earlier_invocation() {
    let both = || vec![sent("m1", "k", "g"), sent("m2", "l", "g"), delivered("m1", 1), delivered("m2", 1)];
    let first = || vec![reported("m1", "unknown"), held_back("m2"), failed("m1"), failed("m2")];
    let second = || story([vec![delivered("m1", 2)], processed("m1", "k", "o1")]);
    let rest = || vec![delivered("m2", 3), exhausted("m2")];
    let table = [completed("k", 1)];
    assert_eq!(rules(Mode::Rerun, story([both(), first(), second(), rest()]), &table), []);
    let third = vec![delivered("m2", 2), held_back("m2"), failed("m2")];
    let events = story([both(), first(), second(), third, rest()]);
    assert_eq!(rules(Mode::Rerun, events, &table), [Rule::HeldByAnother]);
    // Nor does it count that it had failed with the same batch.
    let again = vec![delivered("m1", 2), delivered("m2", 2), held_back("m2")];
    let events = story([both(), first(), again, processed("m1", "k", "o1"), rest()]);
    assert_eq!(rules(Mode::Rerun, events, &table), [Rule::HeldByAnother]);
}

#[test]
fn a_letter_without_a_cause_of_a_process_that_did_not_live_to_log_it() {
    for reason in ["permanent: no", "rejected: no", "conflict: no", "parked: no", "executed: no", "unknown: no"] {
        let letter = Event::Letter { original: "m1".into(), reason: reason.into() };
        let events = vec![sent("m1", "k", "g"), letter, stopped("killed"), delivered("m1", 3), exhausted("m1")];
        assert_eq!(rules(Mode::Rerun, events, &[]), [Rule::UnfoundedDeadLetter], "{reason}");
    }
    // It has cause, and does not say which.
    for (reason, expected) in [("rejected: no key", vec![]), ("rejected", vec![Rule::UnfoundedDeadLetter])] {
        let letter = Event::Letter { original: "m1".into(), reason: reason.into() };
        let events = vec![sent("m1", "", "g"), letter, stopped("killed"), delivered("m1", 3), exhausted("m1")];
        assert_eq!(rules(Mode::Rerun, events, &[]), expected, "{reason}");
    }
}

#[test]
fn a_dead_letter_for_what_was_executed() {
    let mut events = story([vec![sent("m1", "k", "g")], processed("m1", "k", "o1")]);
    if let Event::Reported { dead_lettered, .. } = &mut events[6] {
        *dead_lettered = true;
    }
    assert_eq!(rules(Mode::Rerun, events.clone(), &[completed("k", 1)]), [Rule::UnfoundedDeadLetter]);
    events.insert(6, Event::Letter { original: "m1".into(), reason: "executed: no".into() });
    assert_eq!(rules(Mode::Rerun, events, &[completed("k", 1)]), [Rule::UnfoundedDeadLetter; 2]);
}

#[test]
fn two_messages_of_a_group_at_once_on_the_last_receive() {
    let both = || vec![sent("m1", "k", "g"), sent("m2", "l", "g"), delivered("m1", 3), delivered("m2", 3)];
    let table = [completed("l", 1)];
    let first = || vec![claim("k", "o1", "m1"), arrived("k", 1, "m1"), answered("k", "m1", Meaning::NotApplied)];
    let end = || vec![release("k", "o1", 1), exhausted("m1")];
    for (between, expected) in [
        (vec![], vec![Rule::OutOfOrder]),
        (vec![stopped("stopped"), stopped("went on")], vec![Rule::OutOfOrder]),
        (vec![reported("m1", "not-applied")], vec![]),
        (vec![stopped("killed")], vec![]),
    ] {
        let events = story([both(), first(), between.clone(), processed("m2", "l", "o2"), end()]);
        assert_eq!(rules(Mode::Rerun, events, &table), expected, "{between:?}");
    }
    // The end of a process that had it before, and has it no more.
    let elsewhere = Event::Delivered { process: 1, message: "m1".into(), receive: 3 };
    let start = vec![both()[0].clone(), both()[1].clone(), delivered("m1", 2), elsewhere, stopped("killed")];
    let events = story([start, first(), processed("m2", "l", "o2"), end()]);
    assert_eq!(rules(Mode::Rerun, events, &table), [Rule::OutOfOrder]);
    // A failure before the last receive settles nothing.
    let early = story([both()[..2].to_vec(), vec![delivered("m1", 2), delivered("m2", 2)]]);
    let rest =
        story([vec![reported("m1", "not-applied")], processed("m2", "l", "o2"), vec![delivered("m1", 3)], end()]);
    assert_eq!(rules(Mode::Rerun, story([early, first(), rest]), &table), [Rule::OutOfOrder]);
}

#[test]
fn an_invocation_that_fails_without_faults() {
    let over = || vec![Event::World { what: FAULTS_ARE_OVER }];
    let fails = |error_type: &str| {
        vec![Event::InvocationFailed { process: 0, error_type: error_type.into(), text: String::new() }]
    };
    for error_type in ["StoreAway", "TooLittleTime"] {
        for (events, expected) in [
            (story([vec![delivered("m1", 3)], fails(error_type), over()]), vec![]),
            // It began while there were faults.
            (story([vec![delivered("m1", 3)], over(), fails(error_type)]), vec![]),
            (story([over(), vec![delivered("m1", 3)], fails(error_type)]), vec![Rule::InvocationFailed]),
            (
                story([
                    vec![delivered("m1", 2)],
                    fails(error_type),
                    over(),
                    vec![delivered("m1", 3)],
                    fails(error_type),
                ]),
                vec![Rule::InvocationFailed],
            ),
        ] {
            let events = story([vec![sent("m1", "k", "g")], events, vec![exhausted("m1")]]);
            assert_eq!(rules(Mode::Rerun, events, &[]), expected, "{error_type}");
        }
    }
}
