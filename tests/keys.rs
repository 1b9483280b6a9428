//! Key expressions, keys and scopes: the vectors in `vectors/keys.json`, and properties.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use idempotent_consumer::json::{Json, JsonError};
use idempotent_consumer::key::{
    Envelope, InvalidKeyExpression, InvalidScope, Key, KeyError, KeyExpression, KeyValue, MAX_ID_BYTES, Scope,
};
use idempotent_consumer::message::Message;
use proptest::prelude::*;

#[derive(serde::Deserialize)]
struct Vectors {
    keys: Vec<KeyVector>,
    invalid_expressions: Vec<InvalidVector>,
    scopes: Vec<ScopeVector>,
}

#[derive(serde::Deserialize)]
struct KeyVector {
    name: String,
    expression: String,
    message: MessageVector,
    value: Option<String>,
    error: Option<String>,
    /// The error's text.
    text: Option<String>,
    /// The kind of the error's source.
    source: Option<String>,
}

#[derive(serde::Deserialize)]
struct MessageVector {
    body: String,
    #[serde(default)]
    attributes: BTreeMap<String, String>,
    deduplication_id: Option<String>,
}

#[derive(serde::Deserialize)]
struct InvalidVector {
    expression: String,
    error: String,
    /// Where a JMESPath expression is wrong, and what the problem is.
    position: Option<usize>,
    text: Option<String>,
}

#[derive(serde::Deserialize)]
struct ScopeVector {
    scope: String,
    valid: bool,
}

fn vectors() -> Vectors {
    serde_json::from_str(include_str!("vectors/keys.json")).unwrap()
}

fn extract(expression: &str, message: &Message) -> Result<KeyValue, KeyError> {
    let expression: KeyExpression = expression.parse().expect(expression);
    expression.extract(message, Json::parse(&message.body).as_ref())
}

#[test]
fn keys() {
    for vector in vectors().keys {
        let name = &vector.name;
        let mut message = Message::new("id-1", vector.message.body);
        message.attributes = vector.message.attributes;
        message.deduplication_id = vector.message.deduplication_id;
        match extract(&vector.expression, &message) {
            Ok(value) => {
                assert_eq!((Some(value.as_str()), None), (vector.value.as_deref(), vector.error), "{name}");
            }
            Err(error) => {
                let (kind, source) = match &error {
                    KeyError::Missing { .. } => ("missing", None),
                    KeyError::Unusable { .. } => ("unusable", None),
                    KeyError::Partial { .. } => ("partial", None),
                    KeyError::Evaluation { .. } => ("evaluation", None),
                    KeyError::Body { source, .. } => ("body", Some(source)),
                    error => panic!("{name}: {error}"),
                };
                let source = source.map(|source| match source {
                    JsonError::Syntax { .. } => "syntax",
                    JsonError::DuplicateMember { .. } => "duplicate",
                    JsonError::NumberOutOfRange { .. } => "number",
                    JsonError::TooDeep => "depth",
                    JsonError::Text { .. } => "text",
                    error => panic!("{name}: {error}"),
                });
                assert_eq!(Some(kind), vector.error.as_deref(), "{name}");
                assert_eq!(source, vector.source.as_deref(), "{name}");
                if let Some(text) = vector.text {
                    assert_eq!(error.to_string(), text, "{name}");
                }
            }
        }
    }
}

#[test]
fn expressions_read_back() {
    for vector in vectors().keys {
        let expression: KeyExpression = vector.expression.parse().unwrap();
        assert_eq!(expression.to_string().parse(), Ok(expression), "{}", vector.name);
    }
    let [one, other] = ["jmespath:a", "jmespath:b"].map(|text| text.parse::<KeyExpression>().unwrap());
    assert_ne!(one, other);
}

#[test]
fn an_expression_knows_its_attributes() {
    let expression: KeyExpression = "attribute:tenant, /orderId | deduplication-id, attribute:region".parse().unwrap();
    assert_eq!(expression.attributes().collect::<Vec<_>>(), ["tenant", "region"]);
}

#[test]
fn invalid_expressions() {
    for InvalidVector { expression, error, position, text } in vectors().invalid_expressions {
        let kind = match expression.parse::<KeyExpression>().expect_err(&expression) {
            InvalidKeyExpression::EmptyPart { .. } => "empty",
            InvalidKeyExpression::UnknownPart { .. } => "unknown",
            InvalidKeyExpression::Pointer(_) => "pointer",
            InvalidKeyExpression::AttributeName => "attribute",
            InvalidKeyExpression::DanglingEscape => "escape",
            InvalidKeyExpression::Jmespath { position: found, problem, .. } => {
                assert_eq!(Some(found), position, "{expression}: {problem}");
                assert!(text.is_none_or(|text| text == problem), "{expression}: {problem}");
                "jmespath"
            }
            error => panic!("{expression}: {error}"),
        };
        assert_eq!(kind, error, "{expression}");
    }
    let error = "/a | orderId".parse::<KeyExpression>().unwrap_err().to_string();
    assert!(error.starts_with("`orderId` is no part of a key: write a JSON Pointer"), "{error}");
    let error = "/a | , /b".parse::<KeyExpression>().unwrap_err();
    assert_eq!(error, InvalidKeyExpression::EmptyPart { position: 2 });
}

#[test]
fn the_default_expression() {
    let default = KeyExpression::default();
    assert_eq!(default.to_string(), "/idempotencyKey | /orderId");
    assert_eq!(default.to_string().parse(), Ok(default.clone()));
    assert!(default.needs_body());
    let needs_body = |text: &str| text.parse::<KeyExpression>().unwrap().needs_body();
    assert!(needs_body("content-hash"));
    assert!(needs_body("message-id | attribute:a,/b"));
    assert!(needs_body("jmespath:a"));
    assert!(!needs_body("attribute:a | deduplication-id | message-id"));
}

#[test]
fn envelopes_are_recognised() {
    let body = r#"{"Type":"Notification","TopicArn":"arn","Message":"{}"}"#;
    let error = extract("/orderId", &Message::new("id-1", body)).unwrap_err();
    assert!(matches!(error, KeyError::Missing { envelope: Some(Envelope::Sns), .. }));
}

#[test]
fn errors_do_not_tell_values() {
    let secret = "4111111111111111";
    for body in [
        format!(r#"{{"a":["{secret}"],"b":"{secret}"}}"#),
        format!(r#"{{"b":"{secret}"}}"#),
        format!(r#"{{"c":"{secret}"}}"#),
        format!(r#"{{"a":{secret}.5,"b":1}}"#),
        format!(r#"{{"a":"{secret}"#),
    ] {
        for expression in ["/a,/b", "jmespath:[a, powertools_json(b).x]", "jmespath:sort_by(a, &b)", "jmespath:abs(b)"]
        {
            let error = extract(expression, &Message::new("id-1", body.as_str())).unwrap_err();
            assert!(!format!("{error} {error:?}").contains(secret), "{error:?}");
        }
    }
}

#[test]
fn what_is_decompressed_for_a_key_is_at_most_a_mebibyte() {
    use std::io::Write as _;

    use base64::Engine as _;

    let decompressed = |bytes: usize| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&vec![b'x'; bytes]).unwrap();
        let data = base64::engine::general_purpose::STANDARD.encode(gzip.finish().unwrap());
        extract("jmespath:powertools_base64_gzip(data)", &Message::new("id-1", format!(r#"{{"data":"{data}"}}"#)))
    };
    let limit = 1024 * 1024;
    assert_eq!(decompressed(limit).unwrap().as_str().len(), limit);
    assert!(matches!(decompressed(limit + 1), Err(KeyError::Evaluation { .. })));
}

#[test]
fn scopes() {
    for ScopeVector { scope, valid } in vectors().scopes {
        let result = Scope::new(&scope);
        assert_eq!(result.is_ok(), valid, "{scope:?}");
        if let Ok(valid) = result {
            assert_eq!(valid.as_str(), scope);
            assert_eq!(scope.parse(), Ok(valid));
        }
    }
    assert_eq!(Scope::new("a#b"), Err(InvalidScope::Separator));
    assert!(Scope::new(&"x".repeat(256)).is_ok());
    assert_eq!(Scope::new(&"x".repeat(257)), Err(InvalidScope::TooLong { bytes: 257 }));
}

fn key(scope: &str, text: &str) -> Key {
    Key::new(&Scope::new(scope).unwrap(), &KeyValue::from_string(text).expect(text))
}

#[test]
fn short_keys_are_themselves() {
    let key = key("charge", "A-1001");
    assert_eq!(key.id(), "charge#A-1001");
    assert_eq!(key.to_string(), "charge#A-1001");
    assert_eq!((key.scope(), key.value()), ("charge", "A-1001"));
    assert_eq!(KeyValue::from_string(" "), None);
}

#[test]
fn long_keys_are_shortened() {
    // `s#` and 2,046 bytes fit.
    let fits = "x".repeat(MAX_ID_BYTES - 2);
    assert_eq!(key("s", &fits).id(), format!("s#{fits}"));

    let long = "x".repeat(MAX_ID_BYTES - 1);
    let shortened = key("s", &long);
    // python3 -c 'import hashlib; print(hashlib.sha256(b"x" * 2047).hexdigest())'
    let mark = "~sha256.bce5e0f46e87f470eefade45dc62117878a3bbda0dda50c889a56debeaeb3bda";
    assert_eq!(shortened.id(), format!("s#{}{mark}", "x".repeat(MAX_ID_BYTES - 2 - mark.len())));
    assert_eq!(shortened.value(), shortened.id().strip_prefix("s#").unwrap());

    // The end of a long key counts.
    assert_ne!(key("s", &format!("{long}y")), key("s", &format!("{long}z")));
    // A text that looks like a shortened key is another key.
    assert_ne!(key("s", shortened.value()).id(), shortened.id());
    assert_ne!(key("s", shortened.value()).value(), shortened.value());
}

#[test]
fn a_cut_never_splits_a_character_or_an_escape() {
    for pad in 0..4 {
        for unit in ["é", "😀", "\\", "~", ","] {
            let key = key("s", &format!("{}{}", "x".repeat(pad), unit.repeat(2048)));
            assert!(key.id().len() <= MAX_ID_BYTES);
            let (start, hash) = key.value().rsplit_once("~sha256.").unwrap();
            assert_eq!(hash.len(), 64);
            assert!(!start.ends_with('\\'), "{unit}");
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Part {
    Text(String),
    Integer(i128),
    Bool(bool),
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        // Few different characters, so that escapes are common.
        "[a=,\\\\~#1]{1,4}".prop_map(Part::Text),
        "(1|=1|true|=true|\\\\=1|sha256)".prop_map(Part::Text),
        any::<String>().prop_filter("blank", |text| !text.trim().is_empty()).prop_map(Part::Text),
        (-2..12_i128).prop_map(Part::Integer),
        any::<i128>().prop_map(Part::Integer),
        any::<bool>().prop_map(Part::Bool),
    ]
}

fn value(parts: &[Part]) -> KeyValue {
    let body: Vec<_> = parts
        .iter()
        .map(|part| match part {
            Part::Text(text) => serde_json::to_string(text).unwrap(),
            Part::Integer(integer) => integer.to_string(),
            Part::Bool(value) => value.to_string(),
        })
        .collect();
    let expression: Vec<_> = (0..parts.len()).map(|index| format!("/{index}")).collect();
    let message = Message::new("id-1", format!("[{}]", body.join(",")));
    extract(&expression.join(","), &message).unwrap()
}

/// The way back: that there is one proves that different keys have different texts.
fn read_back(value: &KeyValue) -> Vec<Part> {
    // Characters, and whether a backslash stood before them.
    let mut parts: Vec<Vec<(char, bool)>> = vec![vec![]];
    let mut chars = value.as_str().chars();
    while let Some(c) = chars.next() {
        match c {
            ',' => parts.push(vec![]),
            '~' => panic!("a bare tilde in {value}"),
            '\\' => parts.last_mut().unwrap().push((chars.next().unwrap(), true)),
            c => parts.last_mut().unwrap().push((c, false)),
        }
    }
    let parts = parts.into_iter().map(|part| {
        let text: String = part.iter().map(|(c, _)| c).collect();
        match text.strip_prefix('=') {
            Some(rest) if part.first() == Some(&('=', false)) => match rest {
                "true" => Part::Bool(true),
                "false" => Part::Bool(false),
                digits => Part::Integer(digits.parse().unwrap()),
            },
            _ => Part::Text(text),
        }
    });
    parts.collect()
}

proptest! {
    #[test]
    fn different_keys_have_different_texts(parts in prop::collection::vec(part(), 1..4)) {
        prop_assert_eq!(read_back(&value(&parts)), parts);
    }

    #[test]
    fn ids_are_bounded_and_different(
        scopes in ("[ab-]{1,3}|x{200,256}", "[ab-]{1,3}"),
        stem in "[a\\\\~,é]{1,3}",
        times in (1..1200_usize, 1..1200_usize),
    ) {
        let texts = (stem.repeat(times.0), stem.repeat(times.1));
        let keys = (key(&scopes.0, &texts.0), key(&scopes.1, &texts.1));
        prop_assert!(keys.0.id().len() <= MAX_ID_BYTES);
        prop_assert_eq!(keys.0.id(), format!("{}#{}", keys.0.scope(), keys.0.value()));
        prop_assert_eq!(keys.0.scope(), &scopes.0);
        prop_assert_eq!(keys.0.id() == keys.1.id(), scopes.0 == scopes.1 && texts.0 == texts.1);
    }

    #[test]
    fn any_expression_is_read_or_refused(text in prop_oneof![
        any::<String>(),
        "[/ab,|\\\\ ~01]{0,12}",
        "(attribute:|message-id|content-hash|deduplication-id|/a|[|, \\\\x]){0,6}",
        "(jmespath:|/a|a|[|, \\\\.'`\"()\\[\\]*?@&]){0,8}",
    ]) {
        if let Ok(expression) = text.parse::<KeyExpression>() {
            prop_assert_eq!(expression.to_string().parse(), Ok(expression));
        }
    }

    #[test]
    fn any_body_has_a_key_or_a_reason(body: String) {
        let message = Message::new("id-1", body);
        let _ = extract("/a/0 | /b,attribute:c | /", &message);
        let _ = extract("jmespath:[a[0], to_string(b), powertools_json(c).*, @]", &message);
    }
}
