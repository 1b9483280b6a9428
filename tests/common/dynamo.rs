//! DynamoDB in this process: dynoxide behind a loopback port, one database per test.

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_dynamodb::types::{AttributeDefinition, BillingMode, KeySchemaElement, KeyType, ScalarAttributeType};
use idempotent_consumer::store::dynamodb::DynamoDbStore;

pub const TABLE: &str = "idempotency";

/// A running DynamoDB with an empty table.
pub struct Dynamo {
    pub url: String,
    pub client: Client,
}

impl Dynamo {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let database = dynoxide::Database::memory().unwrap();
        tokio::spawn(dynoxide::server::serve_on(listener, database));
        let client = client(&url);
        create_table(&client).await;
        Self { url, client }
    }

    pub fn store(&self) -> DynamoDbStore {
        DynamoDbStore::new(self.client.clone(), TABLE)
    }
}

/// A client for a local endpoint, tuned as in production.
pub fn client(url: &str) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .region(Region::new("eu-central-1"))
        .credentials_provider(Credentials::new("test", "test", None, None, "test"))
        .endpoint_url(url);
    Client::from_conf(DynamoDbStore::tune(config).build())
}

pub async fn create_table(client: &Client) {
    create_table_with_key(client, TABLE, "id").await;
}

/// A table with that string for a partition key.
pub async fn create_table_with_key(client: &Client, table: &str, key: &str) {
    let attribute =
        AttributeDefinition::builder().attribute_name(key).attribute_type(ScalarAttributeType::S).build().unwrap();
    client
        .create_table()
        .table_name(table)
        .billing_mode(BillingMode::PayPerRequest)
        .attribute_definitions(attribute)
        .key_schema(KeySchemaElement::builder().attribute_name(key).key_type(KeyType::Hash).build().unwrap())
        .send()
        .await
        .unwrap();
}
