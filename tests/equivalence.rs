//! What DynamoDB answers to the store's condition expressions is what the transitions in
//! `record` say, for records of every kind and clocks on either side of every limit.
//!
//! That every *history* through the trait follows the rules, on every store, is
//! `conformance::follows_the_rules`; here are also the records that no history of ours
//! makes, written by other software.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use idempotent_consumer::record::{
    self, Claim, ClaimRequest, Completion, Owner, Parking, Record, RecordId, Released, State, StoredResult,
};
use idempotent_consumer::store::dynamodb::{CommitOutcome, DynamoDbStore};
use idempotent_consumer::store::{ClaimOutcome, FencedOutcome, Store};
use idempotent_consumer::time::{EpochMillis, EpochSeconds, Lease};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::common::dynamo::{Dynamo, TABLE};
use crate::common::proof;

const CASES: u32 = 150;

/// In the middle of a second.
const NOW: EpochMillis = EpochMillis::new(1_900_000_000_500);

/// Everything that the seven calls need. Values come from pools so small that they often
/// match, and as often nearly.
#[derive(Debug, Clone)]
struct Case {
    current: Option<Record>,
    /// What a claimant saw before.
    seen: Record,
    request: ClaimRequest,
    claim: Claim,
    completion: Completion,
    parking: Parking,
    lease: Lease,
}

fn moment() -> impl Strategy<Value = EpochMillis> {
    (0..8_u64).prop_map(|step| NOW.minus(Duration::from_secs(1)).plus(Duration::from_millis(250 * step)))
}

fn expiry() -> impl Strategy<Value = EpochSeconds> {
    prop_oneof![moment().prop_map(EpochMillis::to_seconds), Just(EpochSeconds::FAR_FUTURE)]
}

fn owner() -> impl Strategy<Value = Owner> {
    (0..3_u8).prop_map(|number| Owner::new(format!("owner {number}")))
}

fn lease() -> impl Strategy<Value = Lease> {
    prop_oneof![Just(Lease::GIVEN_UP), moment().prop_map(Lease::until)]
}

fn result() -> impl Strategy<Value = StoredResult> {
    (0..2_u8, any::<bool>()).prop_map(|(json, reduced)| StoredResult { json: json.to_string(), reduced })
}

fn reason() -> impl Strategy<Value = String> {
    (0..2_u8).prop_map(|number| format!("reason {number}"))
}

fn state() -> impl Strategy<Value = State> {
    prop_oneof![
        4 => (proptest::option::weighted(0.8, owner()), proptest::option::weighted(0.8, lease()))
            .prop_map(|(owner, lease)| State::InProgress { owner, lease }),
        2 => (result(), proptest::option::of(moment()))
            .prop_map(|(result, completed_at)| State::Completed { result, completed_at }),
        1 => reason().prop_map(|reason| State::Parked { reason }),
        1 => Just(State::Unknown { status: "EXPIRED".into() }),
    ]
}

fn record() -> impl Strategy<Value = Record> {
    let fingerprint = proptest::option::of((0..2_u8).prop_map(|number| format!("sha256:{number}")));
    (state(), 1..4_u64, expiry(), fingerprint, proptest::option::of(moment())).prop_map(
        |(state, attempt, expires, fingerprint, claimed_at)| {
            // Software that knows no owners counts no attempts.
            let attempt = if matches!(state, State::InProgress { owner: None, .. }) { 1 } else { attempt };
            let message_id = claimed_at.map(|_| "message".to_owned());
            Record { id: RecordId::new("-"), state, attempt, expires, fingerprint, message_id, claimed_at }
        },
    )
}

fn request() -> impl Strategy<Value = ClaimRequest> {
    (owner(), proptest::option::of(lease()), expiry(), moment()).prop_map(|(owner, lease, expires, now)| ClaimRequest {
        id: RecordId::new("-"),
        owner,
        lease,
        expires,
        fingerprint: Some("sha256:0".into()),
        message_id: "another message".into(),
        now,
    })
}

fn case() -> impl Strategy<Value = Case> {
    // A takeover is asked for only of a claim with a lease.
    let lapsed = (record(), proptest::option::weighted(0.8, owner()), lease()).prop_map(|(record, owner, lease)| {
        let attempt = if owner.is_none() { 1 } else { record.attempt };
        Record { state: State::InProgress { owner, lease: Some(lease) }, attempt, ..record }
    });
    let ends = (result(), moment(), expiry(), reason(), lease());
    (proptest::option::weighted(0.9, record()), lapsed, any::<bool>(), request(), owner(), 1..4_u64, ends).prop_map(
        |(current, other, unchanged, request, owner, attempt, (result, completed_at, expires, reason, lease))| {
            let seen = match &current {
                Some(current) if unchanged && matches!(current.state, State::InProgress { lease: Some(_), .. }) => {
                    current.clone()
                }
                _ => other,
            };
            // Nobody takes over from itself: every request has an owner of its own.
            let owned = seen.owner() == Some(&request.owner);
            let request = ClaimRequest { owner: if owned { Owner::new("owner 3") } else { request.owner }, ..request };
            Case {
                current,
                seen,
                request,
                claim: Claim { id: RecordId::new("-"), owner, attempt, lease: None },
                completion: Completion { result, completed_at, expires },
                parking: Parking { reason, expires },
                lease,
            }
        },
    )
}

impl Case {
    /// The same about the record of that name.
    fn named(&self, id: &str) -> Self {
        let id = RecordId::new(id);
        let record = |record: &Record| Record { id: id.clone(), ..record.clone() };
        Self {
            current: self.current.as_ref().map(record),
            seen: record(&self.seen),
            request: ClaimRequest { id: id.clone(), ..self.request.clone() },
            claim: Claim { id: id.clone(), ..self.claim.clone() },
            ..self.clone()
        }
    }
}

/// The item of a record as the module's documentation has it, not as the store writes it.
fn item(record: &Record) -> HashMap<String, AttributeValue> {
    let text = |text: &str| AttributeValue::S(text.to_owned());
    let number = |number: u64| AttributeValue::N(number.to_string());
    let mut item = HashMap::from([
        ("id".to_owned(), text(record.id.as_str())),
        ("expiration".to_owned(), number(record.expires.get())),
    ]);
    let mut set = |name: &str, value| drop(item.insert(name.to_owned(), value));
    match &record.state {
        State::InProgress { owner, lease } => {
            set("status", text("INPROGRESS"));
            if let Some(owner) = owner {
                set("owner", text(owner.as_str()));
            }
            if let Some(lease) = lease {
                set("in_progress_expiration", number(lease.end().get()));
            }
        }
        State::Completed { result, completed_at } => {
            set("status", text("COMPLETED"));
            set("data", text(&result.json));
            if result.reduced {
                set("data_reduced", AttributeValue::Bool(true));
            }
            if let Some(at) = completed_at {
                set("completed_at", number(at.get()));
            }
        }
        State::Parked { reason } => {
            set("status", text("PARKED"));
            set("reason", text(reason));
        }
        State::Unknown { status } => set("status", text(status)),
        other => panic!("a state without an item: {other:?}"),
    }
    if !matches!(record.state, State::InProgress { owner: None, .. }) {
        set("attempt", number(record.attempt));
    }
    if let Some(fingerprint) = &record.fingerprint {
        set("validation", text(fingerprint));
    }
    if let (Some(message_id), Some(at)) = (&record.message_id, record.claimed_at) {
        set("message_id", text(message_id));
        set("claimed_at", number(at.get()));
    }
    item
}

/// A table with one record under trial at a time.
struct Trial {
    dynamo: Dynamo,
    store: DynamoDbStore,
    records: std::cell::Cell<u64>,
}

impl Trial {
    /// The case with a record of its own, which stands in the table.
    async fn set(&self, case: &Case) -> Case {
        self.records.set(self.records.get() + 1);
        let case = case.named(&format!("key#{}", self.records.get()));
        if let Some(current) = &case.current {
            self.dynamo.client.put_item().table_name(TABLE).set_item(Some(item(current))).send().await.unwrap();
            let read = self.store.load(&current.id).await.unwrap();
            assert_eq!(read.as_ref(), Some(current), "what was written by hand is read for what it means");
        }
        case
    }

    async fn check(&self, case: &Case) {
        self.claims(case).await;
        self.fenced_writes(case).await;
        self.commit(case).await;
    }

    async fn stands(&self, case: &Case, expected: Option<Record>, call: &str) {
        let found = self.store.load(&case.request.id).await.unwrap();
        assert_eq!(found, expected, "the record after {call}: {case:#?}");
    }

    async fn claims(&self, case: &Case) {
        for call in ["claim", "take over"] {
            let case = self.set(case).await;
            let current = case.current.as_ref();
            let (next, answer) = if call == "claim" {
                (record::claim(current, &case.request), self.store.claim(&case.request).await)
            } else {
                let next = record::take_over(current, &case.seen, &case.request);
                (next, self.store.take_over(&case.seen, &case.request).await)
            };
            let expected = match (&next, current) {
                (Some(next), _) => ClaimOutcome::Won(case.request.to_claim(next.attempt)),
                (None, Some(current)) => ClaimOutcome::Lost(Box::new(current.clone())),
                (None, None) => ClaimOutcome::Gone,
            };
            assert_eq!(answer.unwrap(), expected, "{call}: {case:#?}");
            self.stands(&case, next.or(case.current.clone()), call).await;
        }
    }

    async fn fenced_writes(&self, case: &Case) {
        for call in ["complete", "park", "set lease", "release"] {
            let case = self.set(case).await;
            let (current, claim) = (case.current.as_ref(), &case.claim);
            let (next, answer) = match call {
                "complete" => {
                    let next = record::complete(current, claim, &case.completion).map(Released::Kept);
                    (next, self.store.complete(claim, &case.completion).await)
                }
                "park" => {
                    let next = record::park(current, claim, &case.parking).map(Released::Kept);
                    (next, self.store.park(claim, &case.parking).await)
                }
                "set lease" => {
                    let next = record::set_lease(current, claim, case.lease).map(Released::Kept);
                    (next, self.store.set_lease(claim, case.lease).await)
                }
                _ => (record::release(current, claim), self.store.release(claim).await),
            };
            let expected = if next.is_some() { FencedOutcome::Applied } else { FencedOutcome::Fenced };
            assert_eq!(answer.unwrap(), expected, "{call}: {case:#?}");
            let stands = match next {
                Some(Released::Kept(record)) => Some(record),
                Some(Released::Removed) => None,
                None => case.current.clone(),
            };
            self.stands(&case, stands, call).await;
        }
    }

    /// A transaction's condition is that of a claim.
    async fn commit(&self, case: &Case) {
        let case = self.set(case).await;
        // No claim is ever made with the token of a transaction.
        let request = ClaimRequest { owner: Owner::random(), ..case.request.clone() };
        let state = State::Completed { result: case.completion.result.clone(), completed_at: Some(request.now) };
        let finished = Record { state, ..request.to_record(1) };
        let expected = match (record::claim(case.current.as_ref(), &request), &case.current) {
            (None, Some(current)) => CommitOutcome::Exists(Box::new(current.clone())),
            _ => CommitOutcome::Committed,
        };
        let answer = self.store.commit(&finished, &request, Vec::new()).await.unwrap();
        assert_eq!(answer, expected, "commit: {case:#?}");
        let stands = if answer == CommitOutcome::Committed { Some(finished) } else { case.current.clone() };
        self.stands(&case, stands, "commit").await;
    }
}

#[test]
fn dynamodb_answers_what_the_transitions_say() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let dynamo = runtime.block_on(Dynamo::start());
    let trial = Trial { store: dynamo.store(), dynamo, records: 0.into() };
    let mut runner = TestRunner::new(Config { cases: CASES, failure_persistence: None, ..Config::default() });
    let check = |case| {
        runtime.block_on(trial.check(&case));
        Ok(())
    };
    runner.run(&case(), check).unwrap_or_else(|failure| panic!("{failure}"));
    let extent = format!("{CASES} random records, 7 calls each");
    proof::note("equivalence", &extent, "DynamoDB's answers are those of the transitions");
}
