//! Each guard of the protocol is needed: without it the model finds the promise that
//! breaks. So is each assumption that the promises rest on.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod common;

use std::collections::BTreeSet;
use std::fmt::Write;

use idempotent_consumer_model::promises::{
    BAD_INPUT, ENDS, FENCED, ONCE, ORDER, SAME_RESULT, STORED_BEFORE_ACK, TOKENS,
};
use idempotent_consumer_model::setting::{Fault, Guard, Payload, Sent, Setting, sent};
use idempotent_consumer_model::story;
use stateright::{Checker, HasDiscoveries, Model};

use crate::common::{RERUN, VERIFY, leaseless};

struct Case {
    removed: &'static str,
    breaks: &'static str,
    setting: Setting,
}

fn guards() -> Vec<(Guard, Case)> {
    let one = [sent(0, 0)];
    let duplicate = [sent(0, 0), sent(0, 1)];
    let group = [sent(0, 0), sent(1, 0)];
    let crossed = [sent(0, 0), sent(1, 0), sent(1, 1)];
    let case = |guard: Guard, removed, breaks, setting: Setting| {
        (guard, Case { removed, breaks, setting: setting.without(guard) })
    };
    vec![
        case(
            Guard::Fence,
            "`owner = me AND attempt = mine` on every write after the claim",
            FENCED,
            Setting::new(RERUN, &one, 1).kinds(&[Fault::Sleep]),
        ),
        case(
            Guard::Fence,
            "the same, and what that leads to",
            ONCE,
            Setting::new(VERIFY, &one, 3).kinds(&[Fault::Sleep, Fault::EffectRefused, Fault::EffectAnswerLost]),
        ),
        case(
            Guard::CompareAndSet,
            "a takeover writes over exactly the claim that was seen",
            ONCE,
            Setting::new(VERIFY, &duplicate, 1).kinds(&[Fault::Crash]),
        ),
        case(Guard::Lease, "a running lease is left alone", ONCE, Setting::new(VERIFY, &duplicate, 0)),
        case(
            Guard::SkewMargin,
            "a takeover waits longer by the clock skew",
            ONCE,
            Setting::new(VERIFY, &duplicate, 1).clocks(&[0, 1]).kinds(&[Fault::EffectLate]),
        ),
        case(
            Guard::Expiry,
            "every condition compares `expiration` itself",
            ENDS,
            Setting::new(RERUN, &one, 0).records(&[leaseless(2)]),
        ),
        case(
            Guard::RetentionFloor,
            "retention is at least visibility timeout × max receives",
            ONCE,
            Setting::new(VERIFY, &one, 1).kinds(&[Fault::Crash]),
        ),
        case(
            Guard::InFlightNotAcked,
            "what is in flight is not acked",
            STORED_BEFORE_ACK,
            Setting::new(RERUN, &duplicate, 0),
        ),
        case(
            Guard::ResultBeforeAck,
            "a result is stored before its message is acked",
            STORED_BEFORE_ACK,
            Setting::new(RERUN, &one, 1).kinds(&[Fault::RequestLost]),
        ),
        case(
            Guard::GroupStop,
            "the first message that is not acked stops its group",
            ORDER,
            Setting::new(RERUN, &group, 1).kinds(&[Fault::EffectRefused]),
        ),
        case(
            Guard::ReleaseKeepsLaterClaims,
            "only a key's first claim is deleted when it is given back",
            ONCE,
            Setting::new(VERIFY, &crossed, 2).kinds(&[Fault::Crash, Fault::EffectRefused, Fault::EffectAnswerLost]),
        ),
        case(
            Guard::VerifyKeepsLease,
            "with `verify` the lease of an attempt whose outcome is unknown runs its course",
            ONCE,
            Setting::new(VERIFY, &duplicate, 1).kinds(&[Fault::EffectLate]),
        ),
        case(
            Guard::RetentionFloor,
            "retention is at least visibility timeout × max receives (with a duplicate)",
            SAME_RESULT,
            Setting::new(VERIFY, &duplicate, 0),
        ),
        case(
            Guard::ReleaseKeepsLaterClaims,
            "only a key's first claim is deleted when it is given back (the fencing token)",
            TOKENS,
            Setting::new(RERUN, &one, 2).kinds(&[Fault::EffectLate, Fault::EffectRefused]).with_effects_of_any_age(),
        ),
        case(
            Guard::ReadAlone,
            "each message of a batch is read on its own",
            BAD_INPUT,
            Setting::new(RERUN, &[Sent { key: 0, group: 0, payload: Payload::Poison }, sent(1, 0)], 0),
        ),
    ]
}

fn assumptions() -> Vec<Case> {
    let one = [sent(0, 0)];
    let duplicate = [sent(0, 0), sent(0, 1)];
    vec![
        Case {
            removed: "`verify`: clocks differ by no more than the margin",
            breaks: ONCE,
            setting: Setting::new(VERIFY, &duplicate, 0).clocks(&[0, 4]),
        },
        Case {
            removed: "`verify`: a request reaches the target before its lease ends, or not at all",
            breaks: ONCE,
            setting: Setting::new(VERIFY, &one, 1).kinds(&[Fault::Sleep]).with_effects_of_any_age(),
        },
        Case {
            removed: "no message waits in its queue for longer than its key is remembered",
            breaks: ONCE,
            setting: Setting::new(VERIFY, &one, 1).kinds(&[Fault::Crash]).unread_until(40),
        },
        Case {
            removed: "the queue gives a message as many receives as faults may cost",
            breaks: ENDS,
            setting: Setting { max_receives: 1, ..Setting::new(RERUN, &one, 1).kinds(&[Fault::Crash]) },
        },
    ]
}

/// A short way to break the promise, up to where it breaks.
fn counterexample(case: &Case) -> Vec<String> {
    let wanted = HasDiscoveries::AllOf(BTreeSet::from([case.breaks]));
    // One thread: breadth first and nothing else finds the shortest.
    let checker = case.setting.clone().checker().threads(1).finish_when(wanted).spawn_bfs().join();
    let Some(path) = checker.discovery(case.breaks) else {
        panic!("not missed: {} ({} states)", case.removed, checker.unique_state_count());
    };
    let mut steps = path.into_vec();
    let promise = case.setting.property(case.breaks);
    let breaks = steps.iter().position(|(world, _)| !(promise.condition)(&case.setting, world)).unwrap();
    steps.truncate(breaks + 1);
    story::tell(&case.setting, steps)
}

#[test]
fn without_any_one_of_its_guards_a_promise_breaks() {
    let guards = guards();
    let mut page = String::new();
    for (_, case) in &guards {
        write_story(&mut page, case);
    }
    common::compare("model/tests/guards.rs", &page);
    let removed: BTreeSet<_> = guards.iter().map(|(guard, _)| format!("{guard:?}")).collect();
    let extent = format!("{} guards removed, one at a time", removed.len());
    common::proof::note("model without a guard", &extent, "each missed: a promise breaks");
}

#[test]
fn without_any_one_of_its_assumptions_a_promise_breaks() {
    let mut page = String::new();
    for case in assumptions() {
        write_story(&mut page, &case);
    }
    common::compare("model/tests/guards.rs, about assumptions", &page);
}

fn write_story(page: &mut String, case: &Case) {
    writeln!(page, "**Without: {}**\\\nbroken: *{}*\n", case.removed, case.breaks).unwrap();
    for (number, line) in counterexample(case).into_iter().enumerate() {
        writeln!(page, "{}. {line}", number + 1).unwrap();
    }
    page.push('\n');
}
