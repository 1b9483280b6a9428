//! Key expressions, and the keys that they give.

use idempotent_consumer::fingerprint::Coverage;
use idempotent_consumer::json::Json;
use idempotent_consumer::key::{Key, KeyError, KeyExpression, KeyValue, MAX_ID_BYTES, Scope};
use idempotent_consumer::message::Message;

use super::dice;
use super::model::Model;

/// Longer expressions are only read: JMESPath can be told to compute for hours, and
/// whoever writes the setting is not the one who sends messages.
const MAX_EVALUATED_BYTES: usize = 120;

/// The first line is an expression, the rest a body.
pub fn key_expression(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (setting, body) = text.split_once('\n').unwrap_or((&text, r#"{"orderId":"A-1"}"#));
    key_of(setting, body, setting.len() <= MAX_EVALUATED_BYTES);
}

/// What must hold for a setting, and for its key of a body if that is to be looked for.
pub fn key_of(setting: &str, body: &str, evaluate: bool) {
    read_coverage(setting);
    let expression = match setting.parse::<KeyExpression>() {
        Ok(expression) => expression,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let printed = expression.to_string();
    let again: KeyExpression =
        printed.parse().unwrap_or_else(|error| panic!("{printed:?} does not read back: {error}"));
    assert_eq!(again, expression, "{printed:?}");
    assert_eq!(again.to_string(), printed);
    if !evaluate {
        return;
    }
    let message = Message::new("m-1", body)
        .with_attribute("tenant", "acme")
        .with_attribute("blank", " ")
        .with_deduplication_id("d-1");
    let key = extract(&expression, &message);
    assert_eq!(text_of(&extract(&again, &message)), text_of(&key), "{printed:?} is another expression");
    if let Ok(value) = &key {
        check(value);
    }
    if let Ok(model) = Model::read(body) {
        // Another order of members, other white space, other spellings of the numbers.
        let mut respelled = message.clone();
        respelled.body = model.spell(&mut dice::endless(body.as_bytes()));
        assert_eq!(text_of(&extract(&expression, &respelled)), text_of(&key), "{printed:?} of {}", respelled.body);
        no_key_of_nothing(&expression, &printed, &model);
    }
}

fn extract(expression: &KeyExpression, message: &Message) -> Result<KeyValue, KeyError> {
    expression.extract(message, Json::parse(&message.body).as_ref())
}

fn text_of(key: &Result<KeyValue, KeyError>) -> Result<&str, String> {
    key.as_ref().map(KeyValue::as_str).map_err(ToString::to_string)
}

/// A key has a text, and a record's id of it fits, says its scope and is the same again.
fn check(value: &KeyValue) {
    assert!(!value.as_str().trim().is_empty(), "a blank key");
    let scope = Scope::new("charge-orders").unwrap();
    let key = Key::new(&scope, value);
    assert!(key.id().len() <= MAX_ID_BYTES);
    assert_eq!(key.scope(), scope.as_str());
    assert_eq!(key.id(), format!("{scope}#{}", key.value()));
    assert_eq!(key.value() == value.as_str(), value.as_str().len() < MAX_ID_BYTES - scope.as_str().len());
    assert_eq!(Key::new(&scope, value), key);
}

/// Messages that have nothing of a key, or null, or an empty text, must not share one.
fn no_key_of_nothing(expression: &KeyExpression, printed: &str, body: &Model) {
    // Of what every message has, and of what is computed, there may be a key.
    let selects = |c: char| c.is_ascii_alphanumeric() || "_./*|,[]: ".contains(c);
    let computed = printed.contains("jmespath:") && !printed.chars().all(selects);
    if computed || printed.contains("message-id") || printed.contains("content-hash") {
        return;
    }
    let with = |body: String| Message::new("m-1", body).with_attribute("tenant", "");
    let nothing = ["", "null", "{}", "[]", "no JSON"].map(str::to_owned);
    let mut plain = dice::endless(b"");
    let leaves = [Model::Null, Model::Text(String::new()), Model::Text(" \t".to_owned())];
    let replaced = leaves.map(|leaf| body.with_leaves(&leaf).spell(&mut plain));
    for message in nothing.into_iter().chain(replaced).map(with) {
        let key = extract(expression, &message);
        assert!(key.is_err(), "{printed:?} gives {key:?} of {}", message.body);
    }
}

/// The setting of fingerprints is read by the same splitting.
fn read_coverage(setting: &str) {
    if let Ok(coverage) = setting.parse::<Coverage>() {
        assert_eq!(coverage.to_string().parse(), Ok(coverage), "{setting:?}");
    }
}
