//! What the function asks of AWS, and what the role in `template.yaml` allows: the same.
//!
//! The calls are those of the real binary, through proxies that write them down. That the run
//! leaves none out is checked against the sources, which name every operation they can send.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use aws_sdk_dynamodb::types::AttributeValue;
use serde_json::{Value, json};

use crate::common::dynamo::{Dynamo, TABLE, create_table_with_key};
use crate::common::dynamo_proxy::DynamoProxy;
use crate::common::events::{Record, event};
use crate::common::item::Item;
use crate::common::process::{AMPLE, Function, Setup};
use crate::common::sink::{Behaviour, Sink};
use crate::common::sqs::{LETTERS, QUEUE, Sqs};

/// A resource of the template, and an action on it.
type Permission = (String, String);

/// Actions that the function never asks for itself.
const OF_LAMBDA: [(&str, &str, &str); 5] = [
    ("Queue", "sqs:ReceiveMessage", "the event source mapping polls with the function's role"),
    ("Queue", "sqs:DeleteMessage", "the mapping deletes what was acked"),
    ("Queue", "sqs:GetQueueAttributes", "the mapping reads the queue's settings"),
    ("LogGroup", "logs:CreateLogStream", "Lambda writes the log with the function's role"),
    ("LogGroup", "logs:PutLogEvents", "as above"),
];

/// The table of the example's own effect, which is no part of the template.
const STOCK: &str = "stock";

#[tokio::test]
async fn the_role_allows_exactly_what_is_called() {
    let mut calls = calls_of_the_function().await;
    calls.extend(calls_of_a_transaction().await);

    let permissions = calls.iter().map(Call::permission).collect::<BTreeSet<_>>();
    let of_lambda: BTreeSet<Permission> =
        OF_LAMBDA.map(|(resource, action, _)| (resource.to_owned(), action.to_owned())).into();
    assert!(permissions.is_disjoint(&of_lambda), "the function calls one of these itself: {of_lambda:?}");
    let needed: BTreeSet<_> = permissions.union(&of_lambda).cloned().collect();
    assert_eq!(role(), needed, "what the template allows (left), and what is needed");

    let called: BTreeSet<_> = calls.iter().map(|call| snake_case(&call.operation)).collect();
    assert_eq!(called, operations_in_the_sources(), "what the run called (left), and what the code can call");
}

/// One request to AWS.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    operation: String,
    /// What IAM checks. A transaction is checked as the writes that it is made of.
    action: String,
    resource: &'static str,
}

impl Call {
    fn permission(&self) -> Permission {
        (self.resource.to_owned(), self.action.clone())
    }
}

/// Every kind of call that the deployed function makes: each ending of a message, dead letters
/// and back-off.
async fn calls_of_the_function() -> BTreeSet<Call> {
    let (dynamo, sink, sqs) = (Dynamo::start().await, Sink::start().await, Sqs::start().await);
    let proxy = DynamoProxy::start(&dynamo.url);
    let setup = Setup::new(&proxy.url, &sink.url)
        .set("AWS_ENDPOINT_URL_SQS", &sqs.url)
        .set("DEAD_LETTER_QUEUE_URL", LETTERS)
        .set("QUEUE_URL", QUEUE)
        .set("RETRY_BACK_OFF", "on");
    sink.behave_for("not-now", Behaviour::Answer(429, String::new()));
    sink.behave_for("unclear", Behaviour::Answer(503, String::new()));
    sink.behave_for("refused", Behaviour::Answer(422, String::new()));
    let keys = ["fine", "not-now", "unclear", "refused"];
    let records = keys.map(|key| Record::order(key).in_group(key));

    let rerun = setup.start().await;
    let park = setup.clone().set("EFFECT_RECOVERY", "park").set("IDEMPOTENCY_SCOPE", "park").start().await;
    for function in [&rerun, &park] {
        // The second delivery replays, takes over, parks.
        for _ in 0..2 {
            function.invoke(event(&records), AMPLE).await.failures();
        }
    }
    // Back-off has lines of its own, which tell no outcome.
    let outcomes = |function: &Function, key: &str| -> Vec<String> {
        let outcomes = function.outcomes(&format!("message-{key}"));
        outcomes.into_iter().filter(|outcome| outcome != "(none)").collect()
    };
    assert_eq!(outcomes(&rerun, "fine"), ["executed", "replayed"]);
    assert_eq!(outcomes(&rerun, "unclear"), ["unknown", "unknown"]);
    assert_eq!(outcomes(&rerun, "not-now"), ["not-applied", "not-applied"]);
    assert_eq!(outcomes(&rerun, "refused"), ["permanent", "permanent"]);
    assert_eq!(outcomes(&park, "unclear"), ["unknown", "parked"]);
    assert_eq!(Item::of(&dynamo, "unclear").await.unwrap().attempt(), 2, "taken over");

    let letters = sqs.requests().into_iter().map(|(operation, body)| sqs_call(&operation, &body));
    dynamo_calls(&proxy).into_iter().chain(letters).collect()
}

/// The calls of a function whose effect is a transaction.
async fn calls_of_a_transaction() -> BTreeSet<Call> {
    let (dynamo, sink) = (Dynamo::start().await, Sink::start().await);
    create_table_with_key(&dynamo.client, STOCK, "item").await;
    let stock = [("item", AttributeValue::S("tea".into())), ("quantity", AttributeValue::N("10".into()))];
    let item = stock.map(|(name, value)| (name.to_owned(), value)).into();
    dynamo.client.put_item().table_name(STOCK).set_item(Some(item)).send().await.unwrap();
    let proxy = DynamoProxy::start(&dynamo.url);
    let setup = Setup::new(&proxy.url, &sink.url).set("STOCK_TABLE_NAME", STOCK).of_example("stock_ledger");
    let function = setup.start().await;
    let body = json!({ "orderId": "a", "item": "tea", "quantity": 3 }).to_string();
    for outcome in ["executed", "replayed"] {
        function.invoke(event([&Record::new("m-1", body.as_str())]), AMPLE).await.failures();
        assert_eq!(function.outcomes("m-1").last().unwrap(), outcome);
    }
    dynamo_calls(&proxy)
}

fn dynamo_calls(proxy: &DynamoProxy) -> BTreeSet<Call> {
    let mut calls = BTreeSet::new();
    for operation in proxy.operations() {
        for exchange in proxy.exchanges(&operation) {
            let body: Value = serde_json::from_str(&exchange.body).unwrap();
            let mut add = |item: &str, request: &Value| match request["TableName"].as_str() {
                Some(TABLE) => {
                    let (operation, action) = (operation.clone(), format!("dynamodb:{item}"));
                    calls.insert(Call { operation, action, resource: "Table" });
                }
                Some(STOCK) => {}
                table => panic!("{operation} on {table:?}"),
            };
            let Some(writes) = body.get("TransactItems") else {
                add(&operation, &body);
                continue;
            };
            for (kind, request) in writes.as_array().unwrap().iter().flat_map(|write| write.as_object().unwrap()) {
                let item =
                    if kind == "ConditionCheck" { "ConditionCheckItem".to_owned() } else { format!("{kind}Item") };
                add(&item, request);
            }
        }
    }
    calls
}

fn sqs_call(operation: &str, body: &Value) -> Call {
    let resource = match body["QueueUrl"].as_str() {
        Some(QUEUE) => "Queue",
        Some(LETTERS) => "DeadLetterQueue",
        url => panic!("{operation} on {url:?}"),
    };
    // IAM knows the single one only.
    let action = format!("sqs:{}", operation.trim_end_matches("Batch"));
    Call { operation: operation.to_owned(), action, resource }
}

/// What the template's role allows, whatever the conditions.
fn role() -> BTreeSet<Permission> {
    let template = std::fs::read_to_string(root().join("template.yaml")).unwrap();
    let (_, role) = template.split_once("\n  FunctionRole:\n").unwrap();
    // Up to the next resource.
    let role: Vec<&str> = role.lines().take_while(|line| line.is_empty() || line.starts_with("   ")).collect();
    let text = role.join("\n");
    let (_, policy) = text.split_once("Policies:\n").unwrap();
    assert!(!text.contains("ManagedPolicyArns") && !policy.contains('*') && !policy.contains("NotAction"), "{text}");

    let values = |name: &str| -> Vec<String> {
        let line =
            |line: &str| line.trim_start_matches([' ', '-']).strip_prefix(name).map(|value| value.trim().to_owned());
        policy.lines().filter_map(line).collect()
    };
    let (statements, effects, actions, resources) =
        (values("Sid:"), values("Effect:"), values("Action:"), values("Resource:"));
    assert!(!statements.is_empty() && effects.iter().all(|effect| effect == "Allow"), "{policy}");
    assert_eq!((effects.len(), actions.len(), resources.len()), (statements.len(), statements.len(), statements.len()));
    let permissions = actions.iter().zip(&resources).flat_map(|(actions, resource)| {
        let resource = resource.strip_prefix("!GetAtt ").and_then(|name| name.strip_suffix(".Arn"));
        let resource = resource.unwrap_or_else(|| panic!("not one resource's ARN: {resource:?}")).to_owned();
        let actions = actions.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap();
        actions.split(',').map(move |action| (resource.clone(), action.trim().to_owned()))
    });
    permissions.collect()
}

/// All operations of the two services, as their clients call them.
const OPERATIONS: &str = "batch_execute_statement batch_get_item batch_write_item create_backup create_global_table \
    create_table delete_backup delete_item delete_resource_policy delete_table describe_backup \
    describe_continuous_backups describe_contributor_insights describe_endpoints describe_export \
    describe_global_table describe_global_table_settings describe_import describe_kinesis_streaming_destination \
    describe_limits describe_table describe_table_replica_auto_scaling describe_time_to_live \
    disable_kinesis_streaming_destination enable_kinesis_streaming_destination execute_statement execute_transaction \
    export_table_to_point_in_time get_item get_resource_policy import_table list_backups list_contributor_insights \
    list_exports list_global_tables list_imports list_tables list_tags_of_resource put_item put_resource_policy query \
    restore_table_from_backup restore_table_to_point_in_time scan tag_resource transact_get_items \
    transact_write_items untag_resource update_continuous_backups update_contributor_insights update_global_table \
    update_global_table_settings update_item update_kinesis_streaming_destination update_table \
    update_table_replica_auto_scaling update_time_to_live \
    add_permission cancel_message_move_task change_message_visibility change_message_visibility_batch create_queue \
    delete_message delete_message_batch delete_queue get_queue_attributes get_queue_url \
    list_dead_letter_source_queues list_message_move_tasks list_queue_tags list_queues purge_queue receive_message \
    remove_permission send_message send_message_batch set_queue_attributes start_message_move_task tag_queue \
    untag_queue";

/// The operations that the sources call.
fn operations_in_the_sources() -> BTreeSet<String> {
    let mut sources = Vec::new();
    read_folder(&root().join("src"), &mut sources);
    let text = sources.concat();
    for service in text.split("aws_sdk_").skip(1) {
        assert!(
            service.starts_with("dynamodb") || service.starts_with("sqs"),
            "a service that this test does not know"
        );
    }
    let called = |operation: &&str| text.contains(&format!(".{operation}()"));
    OPERATIONS.split_whitespace().filter(called).map(str::to_owned).collect()
}

fn read_folder(folder: &Path, sources: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_folder(&path, sources);
        } else {
            sources.push(std::fs::read_to_string(path).unwrap());
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// `PutItem` as `put_item`.
fn snake_case(operation: &str) -> String {
    let mut name = String::new();
    for c in operation.chars() {
        if c.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(c.to_ascii_lowercase());
    }
    name
}
