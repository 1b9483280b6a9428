//! Records as they lie in the table.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;
use idempotent_consumer::time::EpochMillis;
use serde_json::Value;

use super::dynamo::{Dynamo, TABLE};

/// One item of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Item(HashMap<String, AttributeValue>);

impl Item {
    /// The item of a key in the scope of the function under test.
    pub async fn of(dynamo: &Dynamo, key: &str) -> Option<Self> {
        let id = AttributeValue::S(format!("{}#{key}", super::process::FUNCTION_NAME));
        let answer = dynamo.client.get_item().table_name(TABLE).key("id", id).consistent_read(true).send().await;
        answer.unwrap().item.map(Self)
    }

    /// All items of the table.
    pub async fn all(dynamo: &Dynamo) -> Vec<Self> {
        let mut pages = dynamo.client.scan().table_name(TABLE).into_paginator().items().send();
        let mut items = Vec::new();
        while let Some(item) = pages.next().await {
            items.push(Self(item.unwrap()));
        }
        items
    }

    /// The number of items in the table.
    pub async fn count(dynamo: &Dynamo) -> usize {
        dynamo.client.scan().table_name(TABLE).send().await.unwrap().items().len()
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn text(&self, name: &str) -> &str {
        match self.0.get(name) {
            Some(AttributeValue::S(text)) => text,
            other => panic!("{name} is {other:?} in {self:?}"),
        }
    }

    pub fn number(&self, name: &str) -> u64 {
        match self.0.get(name) {
            Some(AttributeValue::N(number)) => number.parse().unwrap(),
            other => panic!("{name} is {other:?} in {self:?}"),
        }
    }

    /// The key, without its scope.
    pub fn key(&self) -> String {
        self.text("id").split_once('#').unwrap().1.to_owned()
    }

    pub fn status(&self) -> &str {
        self.text("status")
    }

    pub fn attempt(&self) -> u64 {
        self.number("attempt")
    }

    /// The end of the lease.
    pub fn lease(&self) -> EpochMillis {
        EpochMillis::new(self.number("in_progress_expiration"))
    }

    /// The result.
    pub fn data(&self) -> Value {
        serde_json::from_str(self.text("data")).unwrap()
    }
}
