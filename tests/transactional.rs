//! Record and effect in one transaction: what each answer of DynamoDB means, and the real
//! ledger under kill -9.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aws_sdk_dynamodb::types::{
    AttributeValue, ConditionCheck, Put, ReturnValuesOnConditionCheckFailure, TransactWriteItem, Update,
};
use idempotent_consumer::batch::{Batch, BatchError, BatchSettings};
use idempotent_consumer::consumer::{Consume, TransactionalConsumer};
use idempotent_consumer::effect::transactional::{Refusal, Refused, Transaction, TransactionalEffect};
use idempotent_consumer::effect::{Attempt, EffectError};
use idempotent_consumer::message::Message;
use idempotent_consumer::outcome::{Disposition, Outcome, Report};
use idempotent_consumer::record::{Owner, Record, RecordId, State};
use idempotent_consumer::store::Store;
use idempotent_consumer::store::dynamodb::DynamoDbStore;
use idempotent_consumer::time::{Deadline, Lease, SystemClock};
use serde_json::{Value, json};

use crate::common::dynamo::{Dynamo, TABLE, client};
use crate::common::dynamo_proxy::{DynamoProxy, Passage};
use crate::common::effects::{PATIENCE, START, clock, settings};

/// The stock lies in the same table, under ids that no scope has.
const STOCK: &str = "#stock";

/// Takes `quantity` from the stock, unless told otherwise by the message.
#[derive(Default)]
struct Take {
    planned: AtomicUsize,
    refusals: Mutex<Vec<Vec<Refusal>>>,
}

impl TransactionalEffect for Take {
    type Input = Value;
    type Output = Value;

    async fn transaction(&self, order: &Value, attempt: &Attempt<'_>) -> Result<Transaction<Value>, EffectError> {
        self.planned.fetch_add(1, Ordering::SeqCst);
        let output = json!(format!("{} reserved", attempt.key().value()));
        match order["plan"].as_str() {
            Some("fails") => return Err("the plan failed".into()),
            Some("permanent") => return Err(EffectError::permanent("no such item")),
            Some("panics") => std::panic::resume_unwind(Box::new("in the plan")),
            Some("many") => {
                return Ok(
                    (0..100).fold(Transaction::new(output), |transaction, n| transaction.write(put(&n.to_string(), 1)))
                );
            }
            Some("large") => return Ok(Transaction::new(output).write(put("large", 500_000))),
            Some("heavy") => {
                return Ok((0..12)
                    .fold(Transaction::new(output), |transaction, n| transaction.write(put(&n.to_string(), 390_000))));
            }
            Some("twice") => return Ok(Transaction::new(output).write(take(1)).write(take(1))),
            Some("checked") => {
                let check = ConditionCheck::builder()
                    .table_name(TABLE)
                    .key("id", AttributeValue::S("#no-such-item".into()))
                    .condition_expression("attribute_exists(id)")
                    .build()?;
                let check = TransactWriteItem::builder().condition_check(check).build();
                return Ok(Transaction::new(output).write(take(1)).write(check));
            }
            _ => {}
        }
        Ok(Transaction::new(output).write(take(order["quantity"].as_u64().unwrap_or(1))))
    }

    fn refused(&self, order: &Value, refusals: &[Refusal]) -> Refused<Value> {
        self.refusals.lock().unwrap().push(refusals.to_vec());
        match order["refused"].as_str() {
            Some("permanent") => Refused::Permanent("never in stock".into()),
            Some("retry") => Refused::Retry("not yet in stock".into()),
            Some("panics") => std::panic::resume_unwind(Box::new("in refused")),
            _ => Refused::Answer(json!("out of stock")),
        }
    }
}

fn take(quantity: u64) -> TransactWriteItem {
    let update = Update::builder()
        .table_name(TABLE)
        .key("id", AttributeValue::S(STOCK.into()))
        .update_expression("SET quantity = quantity - :n")
        .condition_expression("quantity >= :n")
        .expression_attribute_values(":n", AttributeValue::N(quantity.to_string()))
        .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld)
        .build()
        .unwrap();
    TransactWriteItem::builder().update(update).build()
}

fn put(id: &str, bytes: usize) -> TransactWriteItem {
    let put = Put::builder()
        .table_name(TABLE)
        .item("id", AttributeValue::S(format!("#{id}")))
        .item("filler", AttributeValue::S("x".repeat(bytes)))
        .build()
        .unwrap();
    TransactWriteItem::builder().put(put).build()
}

struct Ledger {
    dynamo: Dynamo,
    consumer: TransactionalConsumer<Take>,
}

impl Ledger {
    async fn with_stock(quantity: u64) -> Self {
        let dynamo = Dynamo::start().await;
        dynamo
            .client
            .put_item()
            .table_name(TABLE)
            .item("id", AttributeValue::S(STOCK.into()))
            .item("quantity", AttributeValue::N(quantity.to_string()))
            .send()
            .await
            .unwrap();
        let consumer = TransactionalConsumer::new(Take::default(), dynamo.store(), settings()).with_clock(clock());
        Self { dynamo, consumer }
    }

    async fn deliver(&self, message: &Message) -> Report {
        self.consumer.process(message, Deadline::after(PATIENCE, self.consumer.clock())).await
    }

    async fn stock(&self) -> u64 {
        let item = self
            .dynamo
            .client
            .get_item()
            .table_name(TABLE)
            .key("id", AttributeValue::S(STOCK.into()))
            .send()
            .await
            .unwrap();
        item.item().unwrap()["quantity"].as_n().unwrap().parse().unwrap()
    }

    async fn record(&self, key: &str) -> Option<Record> {
        self.dynamo.store().load(&RecordId::new(format!("test#{key}"))).await.unwrap()
    }
}

fn order(id: &str, mut body: Value) -> Message {
    body["orderId"] = json!(id);
    Message::new(format!("message of {id}"), body.to_string())
}

#[tokio::test]
async fn stock_and_record_change_together_and_once() {
    let ledger = Ledger::with_stock(10).await;
    let first = ledger.deliver(&order("A", json!({ "quantity": 3 }))).await;
    assert_eq!((first.outcome.name(), ledger.stock().await), ("executed", 7));
    let second = ledger.deliver(&order("A", json!({ "quantity": 3 }))).await;
    assert_eq!((second.outcome.name(), ledger.stock().await), ("replayed", 7));
    assert_eq!(second.outcome.result(), first.outcome.result());
    assert_eq!(ledger.deliver(&order("A", json!({ "quantity": 4 }))).await.outcome.name(), "conflict");

    let record = ledger.record("A").await.unwrap();
    assert!(matches!(record.state, State::Completed { .. }));
    assert_eq!(record.expires.get(), START.get() / 1000 + 3600);
}

#[tokio::test]
async fn nothing_is_held_before_the_commit() {
    let ledger = Ledger::with_stock(1).await;
    let report = ledger.deliver(&order("A", json!({}))).await;
    assert_eq!((report.outcome.name(), report.attempt), ("executed", None));
    assert!(!ledger.consumer.claims_ahead(), "there is nothing to claim");
    assert_eq!(ledger.consumer.unprotected(), None, "without the table there is no effect either");

    let mut settings = settings();
    settings.key = "attribute:tenant, /orderId".parse().unwrap();
    settings.answer_reserve = Duration::from_millis(700);
    let consumer = TransactionalConsumer::new(Take::default(), ledger.dynamo.store(), settings);
    assert_eq!(consumer.key_attributes(), ["tenant"]);
    assert_eq!(consumer.time_needed(), Duration::from_millis(700));
}

#[tokio::test]
async fn a_condition_of_the_user_s_that_fails_means_what_the_user_says() {
    let ledger = Ledger::with_stock(1).await;
    let cases = [
        (json!({}), "executed", Disposition::Ack),
        (json!({ "refused": "permanent" }), "permanent", Disposition::DeadLetter),
        (json!({ "refused": "retry" }), "not-applied", Disposition::Retry),
        (json!({ "refused": "panics" }), "not-applied", Disposition::Retry),
    ];
    for (n, (mut body, outcome, disposition)) in cases.into_iter().enumerate() {
        body["quantity"] = json!(5);
        let id = format!("order-{n}");
        let report = ledger.deliver(&order(&id, body)).await;
        assert_eq!((report.outcome.name(), report.outcome.disposition()), (outcome, disposition), "{report:?}");
        // Only the answer leaves a record.
        assert_eq!(ledger.record(&id).await.is_some(), disposition == Disposition::Ack);
    }
    assert_eq!(ledger.stock().await, 1);
    let refusals = ledger.consumer.effect().refusals.lock().unwrap();
    assert_eq!(refusals[0][0].write, 0);
    assert_eq!(refusals[0][0].item.as_ref().unwrap()["quantity"].as_n().unwrap(), "1", "the item that stood there");
}

#[tokio::test]
async fn a_business_answer_is_the_same_for_every_duplicate() {
    let ledger = Ledger::with_stock(1).await;
    let first = ledger.deliver(&order("A", json!({ "quantity": 5 }))).await;
    assert_eq!(first.outcome.result().unwrap().json, "\"out of stock\"");
    // The stock is filled up; this order has had its answer.
    ledger
        .dynamo
        .client
        .put_item()
        .table_name(TABLE)
        .item("id", AttributeValue::S(STOCK.into()))
        .item("quantity", AttributeValue::N("100".into()))
        .send()
        .await
        .unwrap();
    let second = ledger.deliver(&order("A", json!({ "quantity": 5 }))).await;
    assert_eq!((second.outcome.name(), second.outcome.result()), ("replayed", first.outcome.result()));
    assert_eq!(ledger.stock().await, 100);
}

#[tokio::test]
async fn of_several_conditions_the_one_that_failed_is_named() {
    let ledger = Ledger::with_stock(5).await;
    ledger.deliver(&order("A", json!({ "plan": "checked" }))).await;
    let refusals = ledger.consumer.effect().refusals.lock().unwrap();
    assert_eq!(refusals[0].iter().map(|refusal| refusal.write).collect::<Vec<_>>(), [1]);
}

#[tokio::test]
async fn before_the_commit_nothing_has_happened_whatever_the_error() {
    let ledger = Ledger::with_stock(5).await;
    for (plan, outcome) in [("fails", "not-applied"), ("panics", "not-applied"), ("permanent", "permanent")] {
        let report = ledger.deliver(&order(plan, json!({ "plan": plan }))).await;
        assert_eq!(report.outcome.name(), outcome, "{report:?}");
        assert_eq!(ledger.record(plan).await, None);
    }
    assert_eq!(ledger.stock().await, 5);
}

#[tokio::test]
async fn what_can_be_no_transaction_is_refused_with_the_reason_before_it_is_sent() {
    let ledger = Ledger::with_stock(5).await;
    let cases = [
        ("many", "at most 99"),
        ("large", "limit of 409600 for one item"),
        ("heavy", "limit of 4194304 for one transaction"),
    ];
    for (plan, text) in cases {
        let report = ledger.deliver(&order(plan, json!({ "plan": plan }))).await;
        assert_eq!(report.outcome.name(), "permanent");
        assert!(report.outcome.reason().unwrap().contains(text), "{report:?}");
    }
    // Two writes to one item: only DynamoDB knows.
    let report = ledger.deliver(&order("twice", json!({ "plan": "twice" }))).await;
    assert_eq!(report.outcome.name(), "permanent", "{report:?}");
    assert_eq!(ledger.stock().await, 5);
}

#[tokio::test]
async fn a_claim_of_another_kind_of_effect_is_left_alone() {
    let ledger = Ledger::with_stock(5).await;
    let store = ledger.dynamo.store();
    let request = idempotent_consumer::record::ClaimRequest {
        id: RecordId::new("test#A"),
        owner: Owner::random(),
        lease: Some(Lease::GIVEN_UP),
        expires: START.plus(Duration::from_hours(1)).to_seconds(),
        fingerprint: None,
        message_id: "m".into(),
        now: START,
    };
    store.claim(&request).await.unwrap();
    let report = ledger.deliver(&order("A", json!({}))).await;
    assert_eq!((report.outcome.name(), ledger.stock().await), ("in-flight", 5));
}

/// A DynamoDB that cancels the first `times` transactions for that reason.
async fn cancelling(codes: &'static [&'static str], times: usize, upstream: String) -> DynamoDbStore {
    cancelling_at(codes, times, upstream, Arc::default()).await
}

/// The same; how much of [`PATIENCE`] was left at each request is noted.
async fn cancelling_at(
    codes: &'static [&'static str],
    times: usize,
    upstream: String,
    requests: Arc<Mutex<Vec<Duration>>>,
) -> DynamoDbStore {
    let left = Arc::new(AtomicUsize::new(times));
    let watch = Deadline::after(PATIENCE, &SystemClock);
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let forward = reqwest::Client::builder().no_proxy().build().unwrap();
    let app = axum::Router::new().fallback(move |headers: axum::http::HeaderMap, body: axum::body::Bytes| {
        requests.lock().unwrap().push(watch.remaining());
        let (left, forward, upstream) = (Arc::clone(&left), forward.clone(), upstream.clone());
        async move {
            let cancelled = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
            if cancelled {
                let reasons: Vec<_> = codes.iter().map(|code| json!({ "Code": code, "Message": "as told" })).collect();
                let body = json!({
                    "__type": "com.amazonaws.dynamodb.v20120810#TransactionCanceledException",
                    "Message": "cancelled", "CancellationReasons": reasons
                });
                return (axum::http::StatusCode::BAD_REQUEST, body.to_string());
            }
            let mut request = forward.post(&upstream).body(body);
            for name in ["x-amz-target", "content-type", "authorization", "x-amz-date"] {
                if let Some(value) = headers.get(name) {
                    request = request.header(name, value);
                }
            }
            let answer = request.send().await.unwrap();
            let status = answer.status();
            (status, answer.text().await.unwrap())
        }
    });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    DynamoDbStore::new(client(&url), TABLE)
}

#[tokio::test]
async fn other_transactions_in_the_way_and_throttling_are_waited_out() {
    for code in ["TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"] {
        let ledger = Ledger::with_stock(5).await;
        let codes: &'static [&'static str] = match code {
            "TransactionConflict" => &["None", "TransactionConflict"],
            "ThrottlingError" => &["ThrottlingError", "None"],
            _ => &["ProvisionedThroughputExceeded", "ConditionalCheckFailed"],
        };
        let store = cancelling(codes, 3, ledger.dynamo.url.clone()).await;
        let consumer = TransactionalConsumer::new(Take::default(), store, settings()).with_clock(clock());
        let report = consumer.process(&order("A", json!({})), Deadline::after(PATIENCE, consumer.clock())).await;
        assert_eq!((report.outcome.name(), ledger.stock().await), ("executed", 4), "{code}: {report:?}");
        assert_eq!(consumer.effect().planned.load(Ordering::SeqCst), 1, "the same transaction is sent again");
    }
}

#[tokio::test]
async fn a_table_that_is_away_for_a_moment_is_asked_again() {
    let ledger = Ledger::with_stock(5).await;
    let proxy = DynamoProxy::start(&ledger.dynamo.url);
    // One more than the SDK tries in one call.
    for _ in 0..5 {
        proxy.once("TransactWriteItems", Passage::Refuse);
    }
    let store = DynamoDbStore::new(client(&proxy.url), TABLE);
    let consumer = TransactionalConsumer::new(Take::default(), store, settings()).with_clock(clock());
    let report = consumer.process(&order("A", json!({})), Deadline::after(PATIENCE, consumer.clock())).await;
    assert_eq!((report.outcome.name(), ledger.stock().await), ("executed", 4), "{report:?}");
    assert_eq!(proxy.exchanges("TransactWriteItems").len(), 6);
    assert_eq!(consumer.effect().planned.load(Ordering::SeqCst), 1, "the same transaction is sent again");
}

#[tokio::test]
async fn a_conflict_that_does_not_end_is_a_retry_before_the_deadline() {
    let ledger = Ledger::with_stock(5).await;
    let requests = Arc::default();
    let upstream = ledger.dynamo.url.clone();
    let store = cancelling_at(&["None", "TransactionConflict"], usize::MAX, upstream, Arc::clone(&requests)).await;
    let consumer = TransactionalConsumer::new(Take::default(), store, settings()).with_clock(clock());
    let deadline = Deadline::after(Duration::from_secs(2), consumer.clock());
    let report = consumer.process(&order("A", json!({})), deadline).await;
    assert_eq!((report.outcome.name(), report.outcome.disposition()), ("not-applied", Disposition::Retry));
    assert!(report.outcome.reason().unwrap().contains("TransactionConflict"));
    assert!(!deadline.remaining().is_zero());

    // Each pause is at least twice the one before it, up to half a second.
    let requests = requests.lock().unwrap();
    let pauses: Vec<_> = requests.windows(2).map(|pair| pair[0].saturating_sub(pair[1])).collect();
    assert!(pauses.len() > 2, "{pauses:?}");
    for (pause, least) in pauses.iter().zip([20, 40, 80, 160, 320].into_iter().chain(std::iter::repeat(500))) {
        assert!(*pause >= Duration::from_millis(least), "{pauses:?}");
    }
}

#[tokio::test]
async fn a_refusal_that_is_nobody_s_business_is_permanent_with_dynamodb_s_words() {
    let ledger = Ledger::with_stock(5).await;
    let store = cancelling(&["None", "ItemCollectionSizeLimitExceeded"], 1, ledger.dynamo.url.clone()).await;
    let consumer = TransactionalConsumer::new(Take::default(), store, settings()).with_clock(clock());
    let report = consumer.process(&order("A", json!({})), Deadline::after(PATIENCE, consumer.clock())).await;
    assert_eq!(report.outcome.name(), "permanent");
    assert!(report.outcome.reason().unwrap().contains("write 0: ItemCollectionSizeLimitExceeded"), "{report:?}");
}

#[tokio::test]
async fn without_its_store_the_batch_fails() {
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", nobody.local_addr().unwrap());
    drop(nobody);
    let store = DynamoDbStore::new(client(&url), TABLE);
    let consumer = TransactionalConsumer::new(Take::default(), store, settings()).with_clock(clock());
    let batch = Batch::new(consumer, BatchSettings::default());
    let deadline = Deadline::after(Duration::from_secs(3), batch.consumer().clock());
    let error = batch.process(&[order("A", json!({}))], deadline).await.unwrap_err();
    assert!(matches!(error, BatchError::StoreAway(_)), "{error:?}");
}

#[tokio::test]
async fn rivals_in_two_processes_worth_of_clients_count_each_order_once() {
    let ledger = Ledger::with_stock(1000).await;
    // Two consumers that share nothing but the table, each order at both, some of them twice.
    let other =
        TransactionalConsumer::new(Take::default(), DynamoDbStore::new(client(&ledger.dynamo.url), TABLE), settings())
            .with_clock(clock());
    let messages: Vec<_> = (0..60).map(|n| order(&format!("order-{}", n % 40), json!({ "quantity": 2 }))).collect();
    let deadline = Deadline::after(PATIENCE, ledger.consumer.clock());
    let work = messages
        .iter()
        .flat_map(|message| [&ledger.consumer, &other].map(|consumer| Box::pin(consumer.process(message, deadline))));
    let reports: Vec<Report> = futures_util::future::join_all(work).await;
    let mut outcomes: HashMap<&str, usize> = HashMap::new();
    for report in &reports {
        *outcomes.entry(report.outcome.name()).or_default() += 1;
        assert!(matches!(report.outcome, Outcome::Executed { .. } | Outcome::Replayed { .. }), "{report:?}");
    }
    assert_eq!(outcomes["executed"], 40);
    assert_eq!(ledger.stock().await, 1000 - 80);
}
