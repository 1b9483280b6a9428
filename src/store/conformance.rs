//! One suite that every [`Store`] runs: the contract, checked through the trait alone.
//!
//! ```no_run
//! # async fn example() {
//! use std::sync::Arc;
//! use idempotent_consumer::store::{conformance, memory::MemoryStore};
//!
//! let store: Arc<dyn idempotent_consumer::store::Store> = Arc::new(MemoryStore::new());
//! conformance::run_all(&store).await;
//! # }
//! ```
//!
//! Each check panics with what it expected and what it got. Keys are random, so that a
//! store may be shared between runs; times lie in the past or future of a fixed point and
//! never wait for a clock. What only a store's own tests can set up (a lost answer on the
//! wire, a record that other software wrote) is not here.
// A test suite: failing loudly is its job.
#![allow(clippy::panic, clippy::unwrap_used, clippy::missing_panics_doc)]

mod rules;

pub use self::rules::follows_the_rules;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use super::{ClaimOutcome, FencedOutcome, Store, StoreError, StoreErrorKind};
use crate::record::{Claim, ClaimRequest, Completion, Owner, Parking, Record, RecordId, State, StoredResult};
use crate::time::{EpochMillis, Lease, Retention};

const NOW: EpochMillis = EpochMillis::new(1_900_000_000_000);
const LEASE: Duration = Duration::from_secs(30);

/// Runs every check.
pub async fn run_all(store: &Arc<dyn Store>) {
    first_claim(store).await;
    duplicate_of_a_completed_key(store).await;
    duplicate_in_flight(store).await;
    take_over_of_exactly_the_record_seen(store).await;
    take_over_of_a_changed_record_is_refused(store).await;
    a_record_without_a_lease_is_never_taken_over(store).await;
    two_rivals_have_one_winner(store).await;
    only_the_holder_writes(store).await;
    release_forgets_a_first_claim_and_keeps_a_later_one(store).await;
    lease_is_extended_and_given_up(store).await;
    park_keeps_the_reason(store).await;
    expired_records_count_as_absent(store).await;
    repeated_calls_get_the_lost_answer(store).await;
    results_round_trip(store).await;
    results_up_to_the_limit_fit(store).await;
    ids_at_the_size_limit(store).await;
    warm_up_answers(store).await;
    for seed in 0..8 {
        follows_the_rules(store, seed, 100).await;
    }
}

/// A key nobody has is claimed as attempt 1, and the record says by whom.
pub async fn first_claim(store: &Arc<dyn Store>) {
    let request = request();
    let claim = won(store.claim(&request).await, 1);
    assert_eq!(claim, request.to_claim(1));
    assert_eq!(load(store, &request.id).await.unwrap(), request.to_record(1), "the record of a first claim");
}

/// A claim of a finished key is refused with the finished record.
pub async fn duplicate_of_a_completed_key(store: &Arc<dyn Store>) {
    let first = request();
    let claim = won(store.claim(&first).await, 1);
    let completion = completion(r#"{"charge":"ch_1"}"#);
    applied(store.complete(&claim, &completion).await);
    let record = lost(store.claim(&rival_of(&first)).await);
    assert_eq!(
        record.state,
        State::Completed { result: completion.result, completed_at: Some(completion.completed_at) },
        "a duplicate gets the result"
    );
    assert_eq!(record.expires, completion.expires, "retention restarts at completion");
    assert_eq!(record.fingerprint, first.fingerprint, "completion keeps the fingerprint");
    assert_eq!(record.message_id.as_deref(), Some(first.message_id.as_str()));
    assert_eq!(record.attempt, 1);
}

/// A claim of a key in flight is refused with the holder's record, and changes nothing.
pub async fn duplicate_in_flight(store: &Arc<dyn Store>) {
    let first = request();
    won(store.claim(&first).await, 1);
    assert_eq!(lost(store.claim(&rival_of(&first)).await), first.to_record(1));
    assert_eq!(load(store, &first.id).await, Some(first.to_record(1)), "a refusal changes nothing");
}

/// A takeover of the record seen wins and counts the attempt up.
pub async fn take_over_of_exactly_the_record_seen(store: &Arc<dyn Store>) {
    let first = request();
    let dead = won(store.claim(&first).await, 1);
    let second = rival_of(&first);
    let seen = lost(store.claim(&second).await);
    let claim = won(store.take_over(&seen, &second).await, 2);
    assert_eq!(load(store, &first.id).await, Some(second.to_record(2)));
    fenced(store.complete(&dead, &completion("1")).await);
    applied(store.complete(&claim, &completion("2")).await);
}

/// A takeover of a record that has changed since it was seen is refused: by another
/// takeover, by a longer lease, by an end.
pub async fn take_over_of_a_changed_record_is_refused(store: &Arc<dyn Store>) {
    let first = request();
    let claim = won(store.claim(&first).await, 1);
    let seen = load(store, &first.id).await.unwrap();

    applied(store.set_lease(&claim, Lease::until(NOW.plus(LEASE * 2))).await);
    lost(store.take_over(&seen, &rival_of(&first)).await);

    let extended = load(store, &first.id).await.unwrap();
    let faster = rival_of(&first);
    let claim = won(store.take_over(&extended, &faster).await, 2);
    assert_eq!(lost(store.take_over(&extended, &rival_of(&first)).await), faster.to_record(2));

    let seen = load(store, &first.id).await.unwrap();
    applied(store.complete(&claim, &completion("3")).await);
    let record = lost(store.take_over(&seen, &rival_of(&first)).await);
    assert!(matches!(record.state, State::Completed { .. }), "a result is never taken over: {record:?}");
}

/// A claim without a lease holds for as long as its record is kept: it is refused to
/// everybody, can't be taken over, and is free only when the record has expired.
pub async fn a_record_without_a_lease_is_never_taken_over(store: &Arc<dyn Store>) {
    let first = ClaimRequest { lease: None, ..request() };
    let claim = won(store.claim(&first).await, 1);
    let seen = lost(store.claim(&rival_of(&first)).await);
    assert_eq!(seen.state, State::InProgress { owner: Some(first.owner.clone()), lease: None });
    assert_eq!(lost(store.take_over(&seen, &rival_of(&first)).await), seen);
    let later = ClaimRequest { now: seen.expires.to_millis().plus(Duration::from_secs(1)), ..rival_of(&first) };
    won(store.claim(&later).await, 1);
    fenced(store.complete(&claim, &completion("1")).await);
}

/// Of many who claim, and of many who take over at the same time, one wins each.
pub async fn two_rivals_have_one_winner(store: &Arc<dyn Store>) {
    let first = request();
    let requests: Vec<_> = (0..8).map(|_| rival_of(&first)).collect();
    let answers = futures_util::future::join_all(requests.iter().map(|request| store.claim(request))).await;
    assert_eq!(winners(&answers), 1, "of the claims: {answers:?}");

    let seen = load(store, &first.id).await.unwrap();
    let requests: Vec<_> = (0..8).map(|_| rival_of(&first)).collect();
    let answers = futures_util::future::join_all(requests.iter().map(|request| store.take_over(&seen, request))).await;
    assert_eq!(winners(&answers), 1, "of the takeovers: {answers:?}");
    assert_eq!(load(store, &first.id).await.unwrap().attempt, 2);
}

/// Complete, park, extend and release by one who lost the claim change nothing; neither
/// does a wrong attempt under the right owner, nor anything after the end.
pub async fn only_the_holder_writes(store: &Arc<dyn Store>) {
    let first = request();
    let dead = won(store.claim(&first).await, 1);
    let second = rival_of(&first);
    let holder = won(store.take_over(&first.to_record(1), &second).await, 2);
    let stands = load(store, &first.id).await;
    for outsider in [dead, Claim { attempt: 1, ..holder.clone() }, Claim { owner: Owner::random(), ..holder.clone() }] {
        fenced(store.complete(&outsider, &completion("0")).await);
        fenced(store.park(&outsider, &parking()).await);
        fenced(store.set_lease(&outsider, Lease::GIVEN_UP).await);
        fenced(store.release(&outsider).await);
        assert_eq!(load(store, &first.id).await, stands, "a fenced write changes nothing");
    }
    applied(store.complete(&holder, &completion("1")).await);
    let stands = load(store, &first.id).await;
    fenced(store.complete(&holder, &completion("2")).await);
    fenced(store.park(&holder, &parking()).await);
    fenced(store.set_lease(&holder, Lease::until(NOW.plus(LEASE))).await);
    fenced(store.release(&holder).await);
    assert_eq!(load(store, &first.id).await, stands, "a finished record is not changed by its former holder");
}

/// Releasing a first claim removes the record. Releasing a later one keeps it, lapsed:
/// an earlier attempt may have been applied.
pub async fn release_forgets_a_first_claim_and_keeps_a_later_one(store: &Arc<dyn Store>) {
    let first = request();
    let claim = won(store.claim(&first).await, 1);
    applied(store.release(&claim).await);
    assert_eq!(load(store, &first.id).await, None);

    let again = rival_of(&first);
    won(store.claim(&again).await, 1);
    let later = rival_of(&first);
    let claim = won(store.take_over(&again.to_record(1), &later).await, 2);
    applied(store.release(&claim).await);
    let record = lost(store.claim(&rival_of(&first)).await);
    assert_eq!(record.attempt, 2, "the attempts are not forgotten");
    assert_eq!(
        record.state,
        State::InProgress { owner: Some(later.owner), lease: Some(Lease::GIVEN_UP) },
        "the next claimant goes through recovery, at once"
    );
}

/// The holder can move the end of its lease, further away or to now.
pub async fn lease_is_extended_and_given_up(store: &Arc<dyn Store>) {
    let first = request();
    let claim = won(store.claim(&first).await, 1);
    for lease in [Lease::until(NOW.plus(LEASE * 3)), Lease::GIVEN_UP] {
        applied(store.set_lease(&claim, lease).await);
        let record = load(store, &first.id).await.unwrap();
        assert_eq!(record.state, State::InProgress { owner: Some(first.owner.clone()), lease: Some(lease) });
        assert_eq!(record.expires, first.expires);
    }
}

/// A parked key is refused to everybody, with its reason.
pub async fn park_keeps_the_reason(store: &Arc<dyn Store>) {
    let first = request();
    let claim = won(store.claim(&first).await, 1);
    let parking = parking();
    applied(store.park(&claim, &parking).await);
    let record = lost(store.claim(&rival_of(&first)).await);
    assert_eq!(record.state, State::Parked { reason: parking.reason });
    assert_eq!(record.expires, parking.expires);
    fenced(store.complete(&claim, &completion("1")).await);
}

/// An expired record, whatever its state, is claimed as if it were absent, though the
/// store has not deleted it; in its very last second it still stands.
pub async fn expired_records_count_as_absent(store: &Arc<dyn Store>) {
    for ending in ["in progress", "completed", "parked"] {
        let first = request();
        let claim = won(store.claim(&first).await, 1);
        match ending {
            "completed" => applied(store.complete(&claim, &completion("1")).await),
            "parked" => applied(store.park(&claim, &parking()).await),
            _ => {}
        }
        let expires = load(store, &first.id).await.unwrap().expires;
        let last_moment =
            ClaimRequest { now: expires.to_millis().plus(Duration::from_millis(999)), ..rival_of(&first) };
        lost(store.claim(&last_moment).await);
        let later = ClaimRequest { now: expires.to_millis().plus(Duration::from_secs(1)), ..rival_of(&first) };
        won(store.claim(&later).await, 1);
        assert_eq!(load(store, &first.id).await, Some(later.to_record(1)), "nothing of the {ending} record is left");
    }
}

/// A call whose answer was lost is made again with the same arguments, and gets the
/// answer that the first one gave.
pub async fn repeated_calls_get_the_lost_answer(store: &Arc<dyn Store>) {
    let first = request();
    won(store.claim(&first).await, 1);
    let claim = won(store.claim(&first).await, 1);
    applied(store.set_lease(&claim, Lease::GIVEN_UP).await);
    applied(store.set_lease(&claim, Lease::GIVEN_UP).await);

    let second = rival_of(&first);
    let seen = load(store, &first.id).await.unwrap();
    won(store.take_over(&seen, &second).await, 2);
    let claim = won(store.take_over(&seen, &second).await, 2);
    let done = completion("1");
    applied(store.complete(&claim, &done).await);
    applied(store.complete(&claim, &done).await);

    let parked = request();
    let claim = won(store.claim(&parked).await, 1);
    applied(store.park(&claim, &parking()).await);
    applied(store.park(&claim, &parking()).await);

    let released = request();
    let claim = won(store.claim(&released).await, 1);
    applied(store.release(&claim).await);
    applied(store.release(&claim).await);
}

/// Unit, null, zero, false, empty text, list and object, and text of every kind come back
/// as they were, whole or reduced.
pub async fn results_round_trip(store: &Arc<dyn Store>) {
    let texts = ["null", "0", "false", r#""""#, "[]", "{}", "9007199254740993", r#""é e\u0301 🦀 \u0000""#];
    for result in texts.map(StoredResult::whole).into_iter().chain([StoredResult::reduced(r#"{"bytes":9}"#)]) {
        let first = request();
        let claim = won(store.claim(&first).await, 1);
        applied(store.complete(&claim, &Completion { result: result.clone(), ..completion("") }).await);
        match lost(store.claim(&rival_of(&first)).await).state {
            State::Completed { result: stored, .. } => assert_eq!(stored, result),
            other => panic!("expected a completed record, got {other:?}"),
        }
    }
}

/// Every result that the store says it holds it does hold, beside the longest id; one that
/// it does not hold is refused, and the claim is still held.
pub async fn results_up_to_the_limit_fit(store: &Arc<dyn Store>) {
    // Text of one letter, and text that can't be compressed.
    let noise: String = (0..40_000).map(|_| Owner::random().as_str().to_owned()).collect();
    for (kibibytes, text) in [1, 390, 391, 392, 393, 400, 1000, 17_000]
        .into_iter()
        .flat_map(|size| [(size, "x".repeat(size * 1024)), (size, noise.chars().take(size * 1024).collect())])
    {
        let first = ClaimRequest { id: longest_id(), ..request() };
        let claim = won(store.claim(&first).await, 1);
        let result = StoredResult::whole(format!("\"{text}\""));
        let answer = store.complete(&claim, &Completion { result: result.clone(), ..completion("") }).await;
        if store.holds(&result.json) {
            applied(answer);
            match load(store, &first.id).await.unwrap().state {
                State::Completed { result: stored, .. } => {
                    assert!(stored == result, "a result of {kibibytes} KiB was changed");
                }
                other => panic!("expected a completed record, got {other:?}"),
            }
        } else if let Err(error) = answer {
            assert_eq!(error.kind(), StoreErrorKind::Invalid, "{kibibytes} KiB: {error:?}");
            let description = StoredResult::reduced(r#"{"bytes":1}"#);
            applied(store.complete(&claim, &Completion { result: description, ..completion("") }).await);
        }
    }
}

/// Ids of 2,048 bytes work, and differ in their last byte.
pub async fn ids_at_the_size_limit(store: &Arc<dyn Store>) {
    let id = longest_id();
    let mut other = id.as_str().to_owned();
    other.pop();
    other.push('y');
    let first = ClaimRequest { id, ..request() };
    let second = ClaimRequest { id: RecordId::new(other), ..request() };
    won(store.claim(&first).await, 1);
    won(store.claim(&second).await, 1);
    assert_eq!(load(store, &first.id).await, Some(first.to_record(1)));
}

/// A store that is there says so.
pub async fn warm_up_answers(store: &Arc<dyn Store>) {
    store.warm_up().await.unwrap();
}

fn request() -> ClaimRequest {
    let key = Owner::random();
    ClaimRequest {
        id: RecordId::new(format!("conformance#{}", key.as_str())),
        owner: Owner::random(),
        lease: Some(Lease::until(NOW.plus(LEASE))),
        expires: retention().expiry(NOW),
        fingerprint: Some("sha256:00ff".to_owned()),
        message_id: format!("message-{}", key.as_str()),
        now: NOW,
    }
}

/// Another consumer's request for the same key.
fn rival_of(request: &ClaimRequest) -> ClaimRequest {
    ClaimRequest { owner: Owner::random(), message_id: "another message".to_owned(), ..request.clone() }
}

fn longest_id() -> RecordId {
    let head = format!("conformance#{}", Owner::random().as_str());
    let tail = "x".repeat(crate::key::MAX_ID_BYTES - head.len());
    RecordId::new(head + &tail)
}

fn retention() -> Retention {
    Retention::from_seconds(3600).unwrap()
}

fn completion(json: &str) -> Completion {
    let completed_at = NOW.plus(Duration::from_millis(1234));
    Completion {
        result: StoredResult::whole(json),
        completed_at,
        expires: retention().expiry(completed_at.plus(Duration::from_mins(1))),
    }
}

fn parking() -> Parking {
    Parking { reason: "nobody knows".to_owned(), expires: retention().expiry(NOW.plus(Duration::from_mins(1))) }
}

async fn load(store: &Arc<dyn Store>, id: &RecordId) -> Option<Record> {
    store.load(id).await.unwrap()
}

fn won(answer: Result<ClaimOutcome, StoreError>, attempt: u64) -> Claim {
    match answer.unwrap() {
        ClaimOutcome::Won(claim) if claim.attempt == attempt => claim,
        other => panic!("expected to win attempt {attempt}, got {other:?}"),
    }
}

fn lost(answer: Result<ClaimOutcome, StoreError>) -> Record {
    match answer.unwrap() {
        ClaimOutcome::Lost(record) => *record,
        other => panic!("expected to lose to a record, got {other:?}"),
    }
}

fn applied(answer: Result<FencedOutcome, StoreError>) {
    assert_eq!(answer.unwrap(), FencedOutcome::Applied);
}

fn fenced(answer: Result<FencedOutcome, StoreError>) {
    assert_eq!(answer.unwrap(), FencedOutcome::Fenced);
}

fn winners<E: Debug>(answers: &[Result<ClaimOutcome, E>]) -> usize {
    answers.iter().filter(|answer| matches!(answer, Ok(ClaimOutcome::Won(_)))).count()
}
