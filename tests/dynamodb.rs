//! What only the DynamoDB store has: the requests it makes, the items of other software,
//! and what it makes of DynamoDB's errors.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::interceptors::BeforeTransmitInterceptorContextRef;
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use aws_sdk_dynamodb::types::AttributeValue;
use idempotent_consumer::consumer::Consume;
use idempotent_consumer::effect::Recovery;
use idempotent_consumer::record::{ClaimRequest, Completion, Owner, RecordId, State, StoredResult};
use idempotent_consumer::store::dynamodb::DynamoDbStore;
use idempotent_consumer::store::{ClaimOutcome, FencedOutcome, Store, StoreErrorKind};
use idempotent_consumer::time::{Deadline, EpochMillis, Lease, SystemClock};
use serde_json::{Value, json};

use crate::common::dynamo::{Dynamo, TABLE, client};
use crate::common::effects::{PATIENCE, START, Scripted, clock, consumer, order};

/// Writes down each request's operation and body.
#[derive(Debug, Clone, Default)]
struct Requests(Arc<Mutex<Vec<(String, Value)>>>);

impl Intercept for Requests {
    fn name(&self) -> &'static str {
        "requests"
    }

    fn read_before_transmit(
        &self,
        context: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let request = context.request();
        let target = request.headers().get("x-amz-target").unwrap_or_default();
        let operation = target.rsplit('.').next().unwrap_or_default().to_owned();
        let body = serde_json::from_slice(request.body().bytes().unwrap_or_default())?;
        self.0.lock().unwrap().push((operation, body));
        Ok(())
    }
}

impl Requests {
    fn take(&self) -> Vec<(String, Value)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    fn operations(&self) -> Vec<String> {
        self.take().into_iter().map(|(operation, _)| operation).collect()
    }
}

async fn watched_store() -> (Dynamo, Arc<DynamoDbStore>, Requests) {
    let dynamo = Dynamo::start().await;
    let requests = Requests::default();
    let config = dynamo.client.config().to_builder().interceptor(requests.clone()).build();
    let store = Arc::new(DynamoDbStore::new(Client::from_conf(config), TABLE));
    (dynamo, store, requests)
}

#[tokio::test]
async fn one_put_per_first_claim_one_update_per_completion_and_no_read() {
    let (_dynamo, store, requests) = watched_store().await;
    let clock = clock();
    let consumer = consumer(Scripted::new(Recovery::Rerun), &store, &clock);
    let deliver = async |id| consumer.process(&order(id, "A-1"), Deadline::after(PATIENCE, &SystemClock)).await;

    assert_eq!(deliver("m-1").await.outcome.name(), "executed");
    let sent = requests.take();
    assert_eq!(sent.iter().map(|(operation, _)| operation.as_str()).collect::<Vec<_>>(), ["PutItem", "UpdateItem"]);
    let put = &sent[0].1;
    assert_eq!(put["ConditionExpression"], "attribute_not_exists(#id) OR #expiration < :now");
    assert_eq!(put["ReturnValuesOnConditionCheckFailure"], "ALL_OLD");
    assert_eq!(put["Item"]["expiration"]["N"], (START.get() / 1000 + 3600).to_string(), "the TTL, in seconds");
    assert_eq!(put["Item"]["in_progress_expiration"]["N"].as_str().unwrap().len(), 13, "the lease, in milliseconds");
    let update = &sent[1].1;
    assert_eq!(update["ConditionExpression"], "#owner = :owner AND #attempt = :attempt AND #status = :in_progress");

    assert_eq!(deliver("m-2").await.outcome.name(), "replayed");
    assert_eq!(requests.operations(), ["PutItem"]);
}

#[tokio::test]
async fn a_read_for_operators_is_consistent() {
    let (_dynamo, store, requests) = watched_store().await;
    assert_eq!(store.load(&RecordId::new("nobody#1")).await.unwrap(), None);
    assert_eq!(requests.take()[0].1["ConsistentRead"], true);
}

fn request(id: &str) -> ClaimRequest {
    ClaimRequest {
        id: RecordId::new(id),
        owner: Owner::random(),
        lease: Some(Lease::until(START.plus(PATIENCE))),
        expires: START.plus(Duration::from_hours(1)).to_seconds(),
        fingerprint: Some("sha256:00".into()),
        message_id: "m-1".into(),
        now: START,
    }
}

async fn put(dynamo: &Dynamo, item: Value) {
    let item: HashMap<String, AttributeValue> =
        item.as_object().unwrap().iter().map(|(name, value)| (name.clone(), attribute(value))).collect();
    dynamo.client.put_item().table_name(TABLE).set_item(Some(item)).send().await.unwrap();
}

/// DynamoDB's own JSON.
fn attribute(value: &Value) -> AttributeValue {
    let (kind, value) = value.as_object().unwrap().iter().next().unwrap();
    match kind.as_str() {
        "S" => AttributeValue::S(value.as_str().unwrap().into()),
        "N" => AttributeValue::N(value.as_str().unwrap().into()),
        "BOOL" => AttributeValue::Bool(value.as_bool().unwrap()),
        "NULL" => AttributeValue::Null(true),
        "L" => AttributeValue::L(value.as_array().unwrap().iter().map(attribute).collect()),
        "M" => AttributeValue::M(
            value.as_object().unwrap().iter().map(|(name, value)| (name.clone(), attribute(value))).collect(),
        ),
        other => panic!("no such type: {other}"),
    }
}

#[tokio::test]
async fn items_of_other_software_are_read_for_what_they_mean() {
    let dynamo = Dynamo::start().await;
    let store = dynamo.store();
    let later = json!({ "N": "1900003600" });
    let completed = |json: &str| State::Completed { result: StoredResult::whole(json), completed_at: None };
    let lapsed = |lease| State::InProgress { owner: None, lease };
    let cases = [
        // Powertools for Python: a JSON text, an md5, a lease in milliseconds.
        (
            json!({ "id": { "S": "1" }, "status": { "S": "COMPLETED" }, "expiration": later, "data": { "S": "{\"a\": 1}" },
                    "validation": { "S": "0cc175b9c0f1b6a831c399e269772661" } }),
            completed("{\"a\": 1}"),
        ),
        (
            json!({ "id": { "S": "2" }, "status": { "S": "INPROGRESS" }, "expiration": later,
                    "in_progress_expiration": { "N": "1900000000123" } }),
            lapsed(Some(Lease::until(EpochMillis::new(1_900_000_000_123)))),
        ),
        (json!({ "id": { "S": "3" }, "status": { "S": "INPROGRESS" }, "expiration": later }), lapsed(None)),
        // Powertools for TypeScript: a native value, or none.
        (
            json!({ "id": { "S": "4" }, "status": { "S": "COMPLETED" }, "expiration": later,
                    "data": { "M": { "n": { "N": "12.5" }, "l": { "L": [{ "BOOL": true }, { "NULL": true }] } } } }),
            // By name, so that every replay is the same text.
            completed(r#"{"l":[true,null],"n":12.5}"#),
        ),
        (
            json!({ "id": { "S": "9" }, "status": { "S": "COMPLETED" }, "expiration": later,
                    "data": { "L": [{ "N": "12345678901234567890123456789012345678" }, { "S": "\"" }] } }),
            completed(r#"[12345678901234567890123456789012345678,"\""]"#),
        ),
        (json!({ "id": { "S": "5" }, "status": { "S": "COMPLETED" }, "expiration": later }), completed("null")),
        // A text that is no JSON.
        (
            json!({ "id": { "S": "6" }, "status": { "S": "COMPLETED" }, "expiration": later, "data": { "S": "plain" } }),
            completed("\"plain\""),
        ),
        (
            json!({ "id": { "S": "7" }, "status": { "S": "EXPIRED" }, "expiration": later }),
            State::Unknown { status: "EXPIRED".into() },
        ),
        (json!({ "id": { "S": "8" }, "expiration": later }), State::Unknown { status: "(none)".into() }),
    ];
    for (item, expected) in cases {
        let id = item["id"]["S"].as_str().unwrap().to_owned();
        put(&dynamo, item.clone()).await;
        let ClaimOutcome::Lost(record) = store.claim(&request(&id)).await.unwrap() else { panic!("{item}") };
        assert_eq!(record.state, expected, "{item}");
        assert_eq!(record.attempt, 1);
    }
}

#[tokio::test]
async fn a_result_over_the_item_limit_is_compressed_and_only_then_described() {
    let dynamo = Dynamo::start().await;
    let (store, clock) = (Arc::new(dynamo.store()), clock());
    let noise: String = (0..40_000).map(|_| Owner::random().as_str().to_owned()).collect();
    for (key, output, whole) in [("letters", "x".repeat(3_000_000), true), ("noise", noise, false)] {
        let value = json!(output);
        let effect = Scripted::new(Recovery::Park).applying(move |_| Ok(value.clone()));
        let consumer = consumer(effect, &store, &clock);
        for outcome in ["executed", "replayed"] {
            let report = consumer.process(&order("m", key), Deadline::after(PATIENCE, &SystemClock)).await;
            assert_eq!(report.outcome.name(), outcome);
            let result = report.outcome.result().unwrap();
            assert_eq!(result.reduced, !whole, "{key}");
            assert_eq!(result.json == format!("\"{output}\""), whole, "{key}");
        }
    }
}

#[tokio::test]
async fn binary_data_of_somebody_else_costs_its_key_only() {
    let dynamo = Dynamo::start().await;
    let store = dynamo.store();
    // A bomb: 64 MiB of zeros.
    let bomb = zstd::stream::encode_all(&vec![b'0'; 64 << 20][..], 3).unwrap();
    // A frame of one digit, and of a window of 128 MiB to look back over.
    let window = vec![0x28, 0xb5, 0x2f, 0xfd, 0, 17 << 3, 1 << 3 | 1, 0, 0, b'0'];
    for (id, bytes) in [("1", b"not zstd".to_vec()), ("2", bomb), ("3", window)] {
        dynamo
            .client
            .put_item()
            .table_name(TABLE)
            .item("id", AttributeValue::S(id.into()))
            .item("status", AttributeValue::S("COMPLETED".into()))
            .item("expiration", AttributeValue::N("1900003600".into()))
            .item("data", AttributeValue::B(aws_sdk_dynamodb::primitives::Blob::new(bytes)))
            .send()
            .await
            .unwrap();
        assert_eq!(store.claim(&request(id)).await.unwrap_err().kind(), StoreErrorKind::Unreadable);
    }
}

#[tokio::test]
async fn a_lapsed_claim_of_other_software_is_taken_over_by_one() {
    let dynamo = Dynamo::start().await;
    let store = dynamo.store();
    let item = json!({ "id": { "S": "1" }, "status": { "S": "INPROGRESS" }, "expiration": { "N": "1900003600" },
                       "in_progress_expiration": { "N": "1899999999000" } });
    put(&dynamo, item).await;
    let (mine, rival) = (request("1"), request("1"));
    let ClaimOutcome::Lost(seen) = store.claim(&mine).await.unwrap() else { panic!() };
    let ClaimOutcome::Won(claim) = store.take_over(&seen, &mine).await.unwrap() else { panic!() };
    assert_eq!(claim.attempt, 2);
    assert!(matches!(store.take_over(&seen, &rival).await.unwrap(), ClaimOutcome::Lost(_)));
}

#[tokio::test]
async fn an_expiration_that_is_no_number_or_missing_never_passes() {
    // For DynamoDB nothing is smaller than a missing number or one of another type; the
    // record must read the same.
    let dynamo = Dynamo::start().await;
    let store = dynamo.store();
    for (id, expiration) in [("1", None), ("2", Some(json!({ "S": "0" })))] {
        let mut item = json!({ "id": { "S": id }, "status": { "S": "COMPLETED" } });
        if let Some(expiration) = expiration {
            item["expiration"] = expiration;
        }
        put(&dynamo, item).await;
        let ClaimOutcome::Lost(record) = store.claim(&request(id)).await.unwrap() else { panic!() };
        assert!(!record.has_expired(START));
    }
    // A fraction is compared as one, and a negative number is long past.
    let numbers = [
        ("3", "1899999999.5", true),
        ("4", "1900000000.5", false),
        ("5", "-1", true),
        // As a double it would be 1900000000.
        ("6", "1899999999.9999999999", true),
    ];
    for (id, expiration, free) in numbers {
        put(&dynamo, json!({ "id": { "S": id }, "status": { "S": "COMPLETED" }, "expiration": { "N": expiration } }))
            .await;
        let record = store.load(&RecordId::new(id)).await.unwrap().unwrap();
        assert_eq!(record.has_expired(START), free, "{expiration}");
        let won = matches!(store.claim(&request(id)).await.unwrap(), ClaimOutcome::Won(_));
        assert_eq!(won, free, "{expiration}");
    }
}

/// A DynamoDB that answers every request so.
async fn answering(status: u16, code: &'static str) -> DynamoDbStore {
    let app = axum::Router::new().fallback(move || async move {
        let body = json!({ "__type": format!("com.amazonaws.dynamodb.v20120810#{code}"), "message": "as told" });
        (axum::http::StatusCode::from_u16(status).unwrap(), axum::Json(body))
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    DynamoDbStore::new(client(&url), TABLE)
}

#[tokio::test]
async fn errors_say_whether_another_try_helps_and_what_to_do() {
    let cases = [
        (400, "ProvisionedThroughputExceededException", StoreErrorKind::Unavailable, ""),
        (400, "ThrottlingException", StoreErrorKind::Unavailable, ""),
        (400, "RequestLimitExceeded", StoreErrorKind::Unavailable, ""),
        (500, "InternalServerError", StoreErrorKind::Unavailable, ""),
        (503, "ServiceUnavailable", StoreErrorKind::Unavailable, ""),
        (400, "ResourceNotFoundException", StoreErrorKind::Refused, "TABLE_NAME"),
        (400, "AccessDeniedException", StoreErrorKind::Refused, "role"),
        (400, "ValidationException", StoreErrorKind::Invalid, ""),
        (400, "ItemCollectionSizeLimitExceededException", StoreErrorKind::Refused, ""),
    ];
    let answers = cases.map(|(status, code, kind, advice)| async move {
        let error = answering(status, code).await.claim(&request("1")).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{code}: {error:?}");
        assert!(error.to_string().contains(advice), "{code}: {error}");
        assert!(std::error::Error::source(&error).is_some(), "the SDK's error is kept");
    });
    futures_util::future::join_all(answers).await;
}

#[tokio::test]
async fn a_dead_endpoint_is_given_up_on_within_seconds() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let store = DynamoDbStore::new(client(&format!("http://{}", silent.local_addr().unwrap())), TABLE);
    // The store's own limit is 5 s; the SDK alone would wait for ever.
    let answer = tokio::time::timeout(Duration::from_secs(20), store.claim(&request("1"))).await;
    assert_eq!(answer.expect("the store did not give up").unwrap_err().kind(), StoreErrorKind::Unavailable);

    let closed = silent.local_addr().unwrap();
    drop(silent);
    let store = DynamoDbStore::new(client(&format!("http://{closed}")), TABLE);
    assert_eq!(store.claim(&request("1")).await.unwrap_err().kind(), StoreErrorKind::Unavailable);
}

#[tokio::test]
async fn a_record_finished_by_hand_is_not_changed_by_the_owner_that_still_stands_in_it() {
    let dynamo = Dynamo::start().await;
    let store = dynamo.store();
    let first = request("1");
    let ClaimOutcome::Won(claim) = store.claim(&first).await.unwrap() else { panic!() };
    dynamo
        .client
        .update_item()
        .table_name(TABLE)
        .key("id", AttributeValue::S("1".into()))
        .update_expression("SET #status = :completed, #data = :data")
        .expression_attribute_names("#status", "status")
        .expression_attribute_names("#data", "data")
        .expression_attribute_values(":completed", AttributeValue::S("COMPLETED".into()))
        .expression_attribute_values(":data", AttributeValue::S("\"by hand\"".into()))
        .send()
        .await
        .unwrap();
    let completion =
        Completion { result: StoredResult::whole("\"ours\""), completed_at: START, expires: first.expires };
    assert_eq!(store.complete(&claim, &completion).await.unwrap(), FencedOutcome::Fenced);
    assert_eq!(store.set_lease(&claim, Lease::GIVEN_UP).await.unwrap(), FencedOutcome::Fenced);
    assert_eq!(store.release(&claim).await.unwrap(), FencedOutcome::Fenced);
    let record = store.load(&first.id).await.unwrap().unwrap();
    assert!(matches!(record.state, State::Completed { result, .. } if result.json == "\"by hand\""));
}

#[tokio::test]
async fn a_former_holder_can_not_release_a_key_claimed_anew() {
    let dynamo = Dynamo::start().await;
    let store = dynamo.store();
    let first = request("1");
    let ClaimOutcome::Won(old) = store.claim(&first).await.unwrap() else { panic!() };
    assert_eq!(store.release(&old).await.unwrap(), FencedOutcome::Applied);
    let second = request("1");
    let ClaimOutcome::Won(_) = store.claim(&second).await.unwrap() else { panic!() };
    assert_eq!(store.release(&old).await.unwrap(), FencedOutcome::Fenced);
    assert_eq!(store.load(&second.id).await.unwrap(), Some(second.to_record(1)));
}
