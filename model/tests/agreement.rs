//! The model's consumer takes the steps that the crate's takes: whatever store and target
//! answer, both make the same calls in the same order and come to the same outcome.
//!
//! Every combination of answers is tried, for one message that is claimed. The order of a
//! batch and the transactional path are not compared here.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod common;

use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotent_consumer::consumer::{Consume, Consumer, ConsumerSettings};
use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery, Verification};
use idempotent_consumer::key::Scope;
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::Disposition;
use idempotent_consumer::record::{Claim, ClaimRequest, Completion, Parking, Record, RecordId, State, StoredResult};
use idempotent_consumer::store::{BoxFuture, ClaimOutcome, FencedOutcome, Store, StoreError, StoreErrorKind};
use idempotent_consumer::time::{Deadline, EpochMillis, EpochSeconds, Lease, ManualClock, Retention};
use idempotent_consumer_model::setting::{Path, Setting, sent};
use idempotent_consumer_model::store::{Answer, Request};
use idempotent_consumer_model::turn::{Delivered, Ending, Step, Turn, Verified};

/// What stands in a claim's way.
#[derive(Debug, Clone, Copy)]
enum Standing {
    Running,
    Lapsed,
    Leaseless,
    Completed,
    OfAnotherPayload,
    Parked,
    OfAnUnknownStatus,
}

impl Standing {
    fn record(self, request: &ClaimRequest) -> Record {
        let in_progress = |lease| State::InProgress { owner: None, lease };
        let state = match self {
            Self::Running | Self::OfAnotherPayload => in_progress(Some(Lease::until(request.now))),
            Self::Lapsed => in_progress(Some(Lease::GIVEN_UP)),
            Self::Leaseless => in_progress(None),
            Self::Completed => State::Completed { result: StoredResult::whole("1"), completed_at: None },
            Self::Parked => State::Parked { reason: "because".into() },
            Self::OfAnUnknownStatus => State::Unknown { status: "?".into() },
        };
        let fingerprint = matches!(self, Self::OfAnotherPayload).then(|| {
            // By the same algorithm as the claimant's.
            request.fingerprint.as_ref().map(|ours| format!("{}:another", ours.rsplit_once(':').unwrap().0))
        });
        Record { state, fingerprint: fingerprint.flatten(), expires: EpochSeconds::FAR_FUTURE, ..request.to_record(4) }
    }
}

#[derive(Debug, Clone, Copy)]
enum ClaimAnswer {
    Won,
    Lost(Standing),
    Gone,
    Away,
}

#[derive(Debug, Clone, Copy)]
enum WriteAnswer {
    Applied,
    Fenced,
    Away,
}

#[derive(Debug, Clone, Copy)]
enum VerifyAnswer {
    Done,
    NotDone,
    Unsure,
    Failed,
}

#[derive(Debug, Clone, Copy)]
enum ApplyAnswer {
    Applied,
    NotApplied,
    Permanent,
    Unknown,
}

/// What store and target will answer, however often they are asked.
#[derive(Debug, Clone, Copy)]
struct Script {
    recovery: Recovery,
    claim: ClaimAnswer,
    take_over: ClaimAnswer,
    verify: VerifyAnswer,
    apply: ApplyAnswer,
    write: WriteAnswer,
}

fn scripts() -> Vec<Script> {
    use Standing::{Completed, Lapsed, Leaseless, OfAnUnknownStatus, OfAnotherPayload, Parked, Running};
    let standings = [Running, Lapsed, Leaseless, Completed, OfAnotherPayload, Parked, OfAnUnknownStatus];
    let claims = [ClaimAnswer::Won, ClaimAnswer::Gone, ClaimAnswer::Away].into_iter();
    let claims: Vec<_> = claims.chain(standings.map(ClaimAnswer::Lost)).collect();
    let mut scripts = Vec::new();
    for recovery in [Recovery::Rerun, Recovery::Verify, Recovery::Park] {
        for claim in &claims {
            for take_over in &claims {
                for verify in [VerifyAnswer::Done, VerifyAnswer::NotDone, VerifyAnswer::Unsure, VerifyAnswer::Failed] {
                    for apply in
                        [ApplyAnswer::Applied, ApplyAnswer::NotApplied, ApplyAnswer::Permanent, ApplyAnswer::Unknown]
                    {
                        for write in [WriteAnswer::Applied, WriteAnswer::Fenced, WriteAnswer::Away] {
                            let (claim, take_over) = (*claim, *take_over);
                            scripts.push(Script { recovery, claim, take_over, verify, apply, write });
                        }
                    }
                }
            }
        }
    }
    scripts
}

/// What was done, and how it ended.
#[derive(Debug, PartialEq)]
struct Trace {
    /// The calls, each with the attempt it is made under; storing a result, which is tried
    /// again and again until the time is over, counts as one.
    calls: Vec<String>,
    outcome: &'static str,
    acked: bool,
}

// ---- the crate's consumer --------------------------------------------------------------

#[derive(Debug, Clone)]
struct Scripted {
    script: Script,
    calls: Arc<Mutex<Vec<String>>>,
}

impl Scripted {
    fn called(&self, call: &str, attempt: u64) {
        let mut calls = self.calls.lock().unwrap();
        let call = format!("{call} {attempt}");
        if !(call.starts_with("complete") && calls.last() == Some(&call)) {
            calls.push(call);
        }
    }

    fn claim(&self, call: &str, answer: ClaimAnswer, request: &ClaimRequest, attempt: u64) -> Claimed {
        self.called(call, attempt);
        match answer {
            ClaimAnswer::Won => Ok(ClaimOutcome::Won(request.to_claim(attempt))),
            ClaimAnswer::Lost(standing) => Ok(ClaimOutcome::Lost(Box::new(standing.record(request)))),
            ClaimAnswer::Gone => Ok(ClaimOutcome::Gone),
            ClaimAnswer::Away => Err(away()),
        }
    }

    fn write(&self, call: &str, claim: &Claim) -> Ready<FencedOutcome> {
        self.called(call, claim.attempt);
        ready(match self.script.write {
            WriteAnswer::Applied => Ok(FencedOutcome::Applied),
            WriteAnswer::Fenced => Ok(FencedOutcome::Fenced),
            WriteAnswer::Away => Err(away()),
        })
    }
}

type Claimed = Result<ClaimOutcome, StoreError>;
type Ready<T> = BoxFuture<'static, Result<T, StoreError>>;

fn ready<T: Send + 'static>(answer: Result<T, StoreError>) -> Ready<T> {
    Box::pin(std::future::ready(answer))
}

fn away() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "away")
}

impl Store for Scripted {
    fn claim<'a>(&'a self, request: &'a ClaimRequest) -> BoxFuture<'a, Claimed> {
        ready(Scripted::claim(self, "claim", self.script.claim, request, 1))
    }

    fn take_over<'a>(&'a self, seen: &'a Record, request: &'a ClaimRequest) -> BoxFuture<'a, Claimed> {
        ready(Scripted::claim(self, "take over", self.script.take_over, request, seen.attempt + 1))
    }

    fn complete<'a>(&'a self, claim: &'a Claim, _: &'a Completion) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        self.write("complete", claim)
    }

    fn park<'a>(&'a self, claim: &'a Claim, _: &'a Parking) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        self.write("park", claim)
    }

    fn set_lease<'a>(&'a self, claim: &'a Claim, _: Lease) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        self.write("give up", claim)
    }

    fn release<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        self.write("release", claim)
    }

    fn load<'a>(&'a self, _: &'a RecordId) -> BoxFuture<'a, Result<Option<Record>, StoreError>> {
        panic!("processing a message reads nothing")
    }

    fn warm_up(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        ready(Ok(()))
    }

    fn holds(&self, _: &str) -> bool {
        true
    }
}

impl Effect for Scripted {
    type Input = ();
    type Output = u8;

    fn recovery(&self) -> Recovery {
        self.script.recovery
    }

    fn input(&self, _: &Message) -> Result<(), idempotent_consumer::error::BoxError> {
        Ok(())
    }

    async fn apply(&self, (): &(), attempt: &Attempt<'_>) -> Result<u8, EffectError> {
        self.called("apply", attempt.number());
        match self.script.apply {
            ApplyAnswer::Applied => Ok(1),
            ApplyAnswer::NotApplied => Err(EffectError::not_applied("no")),
            ApplyAnswer::Permanent => Err(EffectError::permanent("never")),
            ApplyAnswer::Unknown => Err(EffectError::unknown("who knows")),
        }
    }

    async fn verify(&self, (): &(), attempt: &Attempt<'_>) -> Result<Verification<u8>, EffectError> {
        self.called("verify", attempt.number());
        match self.script.verify {
            VerifyAnswer::Done => Ok(Verification::Done(1)),
            VerifyAnswer::NotDone => Ok(Verification::NotDone),
            VerifyAnswer::Unsure => Ok(Verification::Unknown("can't tell".into())),
            VerifyAnswer::Failed => Err(EffectError::unknown("no answer")),
        }
    }
}

async fn of_the_crate(script: Script) -> Trace {
    let scripted = Scripted { script, calls: Arc::default() };
    let clock = Arc::new(ManualClock::new(EpochMillis::new(1_900_000_000_000)));
    let settings = ConsumerSettings::new(Scope::new("test").unwrap(), Retention::from_seconds(3600).unwrap());
    let consumer = Consumer::new(scripted.clone(), Arc::new(scripted.clone()), settings).with_clock(clock.clone());
    let message = Message::new("m-1", r#"{"orderId":"A-1"}"#);
    let report = consumer.process(&message, Deadline::after(Duration::from_secs(5), &*clock)).await;
    let calls = scripted.calls.lock().unwrap().clone();
    Trace { calls, outcome: report.outcome.name(), acked: report.disposition() == Disposition::Ack }
}

// ---- the model's -----------------------------------------------------------------------

fn of_the_model(script: Script) -> Trace {
    let setting = Setting::new(Path::Claimed(script.recovery), &[sent(0, 0)], 0);
    let now = 100;
    let mut turn = Turn::begin(&setting, &[Delivered { message: 0, receives: 1, last: false }], 0, now);
    let mut calls = Vec::new();
    loop {
        match turn.current.clone() {
            Step::Store(request, then) => {
                let (call, answer) = served(script, &request);
                calls.push(call);
                match answer {
                    Some(answer) => turn.answered(&setting, false, &request, then, answer, now),
                    None => turn.gave_up(&setting, false, &request, then, now),
                }
            }
            Step::Verify(claim) => {
                calls.push(format!("verify {}", claim.attempt));
                let answer = match script.verify {
                    VerifyAnswer::Done => Some(Verified::Done("1".into())),
                    VerifyAnswer::NotDone => Some(Verified::NotDone),
                    VerifyAnswer::Unsure => Some(Verified::Unsure),
                    VerifyAnswer::Failed => None,
                };
                turn.verified(&setting, claim, answer, now);
            }
            Step::Apply(claim) => {
                calls.push(format!("apply {}", claim.attempt));
                let ending = match script.apply {
                    ApplyAnswer::Applied => Ending::Applied("1".into()),
                    ApplyAnswer::NotApplied => Ending::NotApplied,
                    ApplyAnswer::Permanent => Ending::Permanent,
                    ApplyAnswer::Unknown => Ending::Unknown,
                };
                turn.applied(&setting, claim, ending, now);
            }
            // Without a dead-letter queue of its own.
            Step::HandOver(end) => turn.handed_over(&setting, end, false, now),
            Step::Tell => break,
            step @ (Step::Ready { .. } | Step::Ended(_)) => panic!("{step:?} does not end by itself"),
        }
    }
    let [told] = &turn.reports[..] else { panic!("{:?}", turn.reports) };
    Trace { calls, outcome: told.name, acked: told.done }
}

/// A request's name and attempt, and the script's answer to it; `None` for none.
fn served(script: Script, request: &Request) -> (String, Option<Answer>) {
    let claimed = |answer: ClaimAnswer, request: &ClaimRequest, attempt| match answer {
        ClaimAnswer::Won => Some(Answer::Won(request.to_claim(attempt))),
        ClaimAnswer::Lost(standing) => Some(Answer::Lost(Box::new(standing.record(request)))),
        ClaimAnswer::Gone => Some(Answer::Gone),
        ClaimAnswer::Away => None,
    };
    let written = match script.write {
        WriteAnswer::Applied => Some(Answer::Applied),
        WriteAnswer::Fenced => Some(Answer::Fenced),
        WriteAnswer::Away => None,
    };
    match request {
        Request::Claim(request) => ("claim 1".to_owned(), claimed(script.claim, request, 1)),
        Request::TakeOver { seen, request } => {
            let attempt = seen.attempt + 1;
            (format!("take over {attempt}"), claimed(script.take_over, request, attempt))
        }
        Request::Complete(claim, _) => (format!("complete {}", claim.attempt), written),
        Request::Park(claim, _) => (format!("park {}", claim.attempt), written),
        Request::GiveUp(claim) => (format!("give up {}", claim.attempt), written),
        Request::Release(claim) => (format!("release {}", claim.attempt), written),
        Request::Commit(_) => panic!("no transaction"),
    }
}

#[tokio::test(start_paused = true)]
async fn the_models_consumer_does_what_the_crates_does() {
    let scripts = scripts();
    for script in &scripts {
        assert_eq!(of_the_model(*script), of_the_crate(*script).await, "the model's, and the crate's: {script:?}");
    }
    let extent = format!("{} scripts of answers", scripts.len());
    common::proof::note("model and crate", &extent, "the same calls, the same outcomes");
}
