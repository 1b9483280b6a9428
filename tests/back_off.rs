//! How long failed messages stay invisible, and what is done to make it so.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Outcome, Unstarted};
use idempotent_consumer::record::StoredResult;
use idempotent_consumer::source::back_off::{
    BackOff, BackOffSettings, Change, MAX_VISIBILITY, Refusal, Visibility, VisibilityError, plan,
};
use idempotent_consumer::store::BoxFuture;
use idempotent_consumer::time::{Deadline, ManualClock, Retention};
use proptest::prelude::*;

use crate::common::effects::{PATIENCE, START, report};

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The template's defaults.
fn settings() -> BackOffSettings {
    BackOffSettings::for_queue(seconds(10), seconds(180), Retention::for_queue(180, 5, 86_400).unwrap(), 5)
}

#[test]
fn the_wait_doubles_from_the_base_to_the_visibility_timeout_and_jitter_takes_up_to_half() {
    let at = |jitter: f64| [1, 2, 3, 4, 5, 6, 40, u32::MAX].map(|n| settings().visibility(n, None, jitter).as_secs());
    assert_eq!(at(0.999_999), [10, 20, 40, 80, 160, 180, 180, 180]);
    assert_eq!(at(0.0), [5, 10, 20, 40, 80, 90, 90, 90]);
    assert_eq!(settings().visibility(0, None, 0.0), seconds(5), "a broker that does not count");
}

#[test]
fn the_schedule_of_the_documentation() {
    let sum = |receives: u32, jitter| -> u64 {
        (1..receives).map(|n| settings().visibility(n, None, jitter).as_secs()).sum()
    };
    assert_eq!((sum(5, 0.0), sum(5, 0.999_999)), (75, 150));
    assert_eq!((sum(10, 0.0), sum(10, 0.999_999)), (515, 1030));
}

#[test]
fn retry_after_is_waited_for_as_long_as_the_retention_allows() {
    let wait = |retry_after| settings().visibility(1, Some(retry_after), 0.0).as_secs();
    assert_eq!(wait(seconds(3)), 5, "the back-off is longer");
    assert_eq!(wait(seconds(60)), 60);
    assert_eq!(wait(Duration::from_millis(60_001)), 61, "rounded up");
    assert_eq!(wait(seconds(3600)), 3600, "beyond the visibility timeout");
    assert_eq!(wait(seconds(100_000)), 17_460);
    let long = BackOffSettings::for_queue(seconds(10), seconds(180), Retention::from_seconds(10_000_000).unwrap(), 5);
    assert_eq!(long.visibility(1, Some(seconds(100_000)), 0.0), MAX_VISIBILITY);
}

fn message(id: &str, group: Option<&str>, receives: u32) -> Message {
    let mut message = Message::new(id, "{}").with_receive_count(receives);
    message.group = group.map(str::to_owned);
    message.receipt = Some(format!("receipt of {id}"));
    message
}

fn failed(retry_after: Option<u64>) -> Outcome {
    Outcome::NotApplied { reason: "busy".into(), retry_after: retry_after.map(seconds) }
}

fn done() -> Outcome {
    Outcome::Executed { result: StoredResult::whole("null") }
}

fn behind() -> Outcome {
    Outcome::Unstarted { why: Unstarted::GroupStopped }
}

/// Ids, waits without jitter, and the message not to be overtaken.
fn planned(batch: &[(Message, Outcome)]) -> Vec<(String, u64, Option<String>)> {
    let messages: Vec<_> = batch.iter().map(|(message, _)| message.clone()).collect();
    let reports: Vec<_> = batch.iter().map(|(message, outcome)| report(message, outcome.clone())).collect();
    let changes = plan(&messages, &reports, &settings(), START, || 0.999_999);
    changes.into_iter().map(|change| (change.message_id, change.visibility.as_secs(), change.behind)).collect()
}

fn change(id: &str, seconds: u64, behind: Option<&str>) -> (String, u64, Option<String>) {
    (id.to_owned(), seconds, behind.map(str::to_owned))
}

#[test]
fn each_failed_message_has_its_own_wait_and_the_rest_of_its_group_that_of_its_first() {
    let in_flight = |millis| Outcome::InFlight { until: START.plus(Duration::from_millis(millis)) };
    assert_eq!(
        planned(&[
            (message("a1", Some("a"), 2), done()),
            (message("a2", Some("a"), 3), failed(None)),
            (message("b1", Some("b"), 1), failed(Some(33))),
            (message("a3", Some("a"), 1), behind()),
            (message("b2", Some("b"), 9), behind()),
            (message("c1", Some("c"), 1), in_flight(25_000)),
            (message("c2", Some("c"), 1), behind()),
            (message("d1", Some("d"), 1), in_flight(999_999_999_999)),
            (message("s1", None, 1), failed(None)),
            (message("s2", None, 2), Outcome::Unstarted { why: Unstarted::Deadline }),
        ]),
        [
            change("a2", 40, None),
            change("b1", 33, None),
            change("a3", 40, Some("a2")),
            change("b2", 33, Some("b1")),
            change("c1", 26, None),
            change("c2", 26, Some("c1")),
            change("d1", 17_460, None),
            change("s1", 10, None),
            change("s2", 20, None),
        ]
    );
}

#[test]
fn a_later_failure_of_a_group_that_went_on_is_never_visible_before_an_earlier_one() {
    assert_eq!(
        planned(&[
            (message("a1", Some("a"), 5), failed(None)),
            (message("a2", Some("a"), 1), failed(None)),
            (message("a3", Some("a"), 5), failed(Some(1000))),
            (message("a4", Some("a"), 1), behind()),
        ]),
        [
            change("a1", 160, None),
            change("a2", 160, Some("a1")),
            change("a3", 1000, Some("a1")),
            change("a4", 1000, Some("a1")),
        ]
    );
}

#[test]
fn what_was_acked_or_sent_to_the_dead_letter_queue_is_left_alone() {
    let messages = [message("a1", Some("a"), 1), message("a2", Some("a"), 1)];
    let mut reports =
        vec![report(&messages[0], Outcome::Rejected { reason: "no key".into() }), report(&messages[1], failed(None))];
    reports[0].dead_lettered = true;
    let changes = plan(&messages, &reports, &settings(), START, || 0.0);
    assert_eq!(changes.len(), 1);
    assert_eq!((changes[0].message_id.as_str(), changes[0].receipt.as_str()), ("a2", "receipt of a2"));
    assert_eq!(changes[0].behind, None);
}

#[test]
fn without_a_receipt_nothing_can_be_changed_and_nothing_behind_it_is() {
    let mut first = message("a1", Some("a"), 1);
    first.receipt = None;
    assert_eq!(
        planned(&[(first, failed(None)), (message("a2", Some("a"), 1), behind())]),
        [change("a2", 10, Some("a1"))]
    );
}

#[derive(Debug, Clone, Copy)]
enum Answer {
    Refuses(&'static str),
    Denied,
    Fails,
    Hangs,
}

#[derive(Debug, Default)]
struct Queue {
    answers: Mutex<Vec<Answer>>,
    requests: Mutex<Vec<Vec<String>>>,
}

impl Queue {
    fn new(answers: &[Answer]) -> Arc<Self> {
        Arc::new(Self { answers: Mutex::new(answers.iter().rev().copied().collect()), ..Self::default() })
    }

    fn requests(&self) -> Vec<Vec<String>> {
        std::mem::take(&mut *self.requests.lock().unwrap())
    }
}

impl Visibility for Queue {
    fn change<'a>(&'a self, changes: &'a [Change]) -> BoxFuture<'a, Result<Vec<Refusal>, VisibilityError>> {
        Box::pin(async move {
            let ids = changes.iter().map(|change| change.message_id.clone()).collect();
            self.requests.lock().unwrap().push(ids);
            let answer = self.answers.lock().unwrap().pop();
            match answer {
                None => Ok(Vec::new()),
                Some(Answer::Refuses(id)) => {
                    Ok(vec![Refusal { message_id: id.to_owned(), reason: "ReceiptHandleIsInvalid".to_owned() }])
                }
                Some(Answer::Denied) => Err(VisibilityError::Denied("not authorized".into())),
                Some(Answer::Fails) => Err(VisibilityError::Failed("no connection".into())),
                Some(Answer::Hangs) => std::future::pending().await,
            }
        })
    }
}

async fn apply(back_off: &BackOff, batch: &[(Message, Outcome)]) {
    let messages: Vec<_> = batch.iter().map(|(message, _)| message.clone()).collect();
    let reports: Vec<_> = batch.iter().map(|(message, outcome)| report(message, outcome.clone())).collect();
    let clock = ManualClock::new(START);
    back_off.apply(&messages, &reports, START, Deadline::after(PATIENCE, &clock)).await;
}

fn two_groups() -> Vec<(Message, Outcome)> {
    vec![
        (message("a1", Some("a"), 1), failed(None)),
        (message("a2", Some("a"), 1), behind()),
        (message("b1", Some("b"), 1), failed(None)),
        (message("b2", Some("b"), 1), behind()),
    ]
}

#[tokio::test]
async fn the_rest_of_a_group_is_changed_after_its_first_and_only_if_that_was() {
    let cases: [(&[Answer], &[&[&str]]); 3] = [
        (&[], &[&["a1", "b1"], &["a2", "b2"]]),
        (&[Answer::Refuses("a1")], &[&["a1", "b1"], &["b2"]]),
        (&[Answer::Fails], &[&["a1", "b1"]]),
    ];
    for (answers, requests) in cases {
        let queue = Queue::new(answers);
        apply(&BackOff::new(settings(), Arc::clone(&queue) as Arc<_>), &two_groups()).await;
        assert_eq!(queue.requests(), requests);
    }
}

#[tokio::test]
async fn nothing_failed_is_nothing_asked() {
    let queue = Queue::new(&[]);
    apply(&BackOff::new(settings(), Arc::clone(&queue) as Arc<_>), &[(message("a1", None, 1), done())]).await;
    assert_eq!(queue.requests(), Vec::<Vec<String>>::new());
}

#[tokio::test]
async fn a_missing_permission_switches_it_off_and_a_failure_does_not() {
    let queue = Queue::new(&[Answer::Fails, Answer::Denied]);
    let back_off = BackOff::new(settings(), Arc::clone(&queue) as Arc<_>);
    for requests in [1, 1, 0, 0] {
        apply(&back_off, &two_groups()).await;
        assert_eq!(queue.requests().len(), requests);
    }
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_hangs_does_not_make_the_answer_late() {
    let back_off = BackOff::new(settings(), Queue::new(&[Answer::Hangs]));
    tokio::time::timeout(PATIENCE, apply(&back_off, &two_groups())).await.unwrap();
}

#[tokio::test]
async fn a_standard_queues_large_batch_goes_in_tens() {
    let queue = Queue::new(&[]);
    let batch: Vec<_> = (0..25).map(|number| (message(&number.to_string(), None, 1), failed(None))).collect();
    apply(&BackOff::new(settings(), Arc::clone(&queue) as Arc<_>), &batch).await;
    let mut sizes: Vec<_> = queue.requests().iter().map(Vec::len).collect();
    sizes.sort_unstable();
    assert_eq!(sizes, [5, 10, 10]);
}

fn any_outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![
        Just(done()),
        Just(behind()),
        proptest::option::of(0_u64..100_000).prop_map(failed),
        (0_u64..100_000_000).prop_map(|ms| Outcome::InFlight { until: START.plus(Duration::from_millis(ms)) }),
        Just(Outcome::Fenced),
    ]
}

proptest! {
    #[test]
    fn waits_are_within_limits_and_never_shrink_within_a_group(
        batch in proptest::collection::vec((proptest::option::of(0_u8..3), 0_u32..50, any_outcome()), 0..20),
        visibility in 1_u64..43_200,
        base in 1_u64..100,
        buffer in 0_u64..1_000_000,
        receives in 1_u32..50,
        jitters in proptest::collection::vec(0.0_f64..1.0, 20),
    ) {
        let retention = Retention::for_queue(visibility, receives, buffer).unwrap();
        let settings =
            BackOffSettings::for_queue(seconds(base.min(visibility)), seconds(visibility), retention, receives);
        let messages: Vec<_> = batch
            .iter()
            .enumerate()
            .map(|(n, (group, count, _))| message(&n.to_string(), group.map(|g| g.to_string()).as_deref(), *count))
            .collect();
        let reports: Vec<_> =
            messages.iter().zip(&batch).map(|(message, (_, _, outcome))| report(message, outcome.clone())).collect();
        let mut jitters = jitters.into_iter().cycle();
        let changes = plan(&messages, &reports, &settings, START, || jitters.next().unwrap());
        let failed = reports.iter().filter(|report| !matches!(report.outcome, Outcome::Executed { .. }));
        prop_assert_eq!(changes.len(), failed.count());
        let group_of: HashMap<_, _> = messages.iter().map(|message| (&message.id, &message.group)).collect();
        let mut longest: HashMap<&String, (Duration, String)> = HashMap::new();
        for change in &changes {
            prop_assert!(change.visibility >= seconds(1) && change.visibility <= MAX_VISIBILITY);
            prop_assert_eq!(change.visibility.subsec_nanos(), 0);
            // Every wait at its longest, receive after receive, is within the retention.
            prop_assert!(change.visibility.as_secs() * u64::from(receives) <= retention.seconds());
            match group_of[&change.message_id] {
                None => prop_assert_eq!(&change.behind, &None),
                Some(group) => {
                    let first = longest.get(group).map(|(_, first)| first.clone());
                    prop_assert_eq!(&change.behind, &first);
                    if let Some((before, _)) = longest.get(group) {
                        prop_assert!(change.visibility >= *before);
                    }
                    let first = first.unwrap_or_else(|| change.message_id.clone());
                    longest.insert(group, (change.visibility, first));
                }
            }
        }
    }
}
