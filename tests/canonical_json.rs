//! Strict JSON, its canonical text and fingerprints: the vectors in
//! `vectors/canonical-json.json`, and properties.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fmt::Write as _;

use idempotent_consumer::fingerprint::{Coverage, Fingerprint, InvalidCoverage, content_hash};
use idempotent_consumer::json::{InvalidPointer, Json, JsonError, Pointer};
use proptest::prelude::*;

#[derive(serde::Deserialize)]
struct Vector {
    name: String,
    input: String,
    canonical: Option<String>,
    sha256: Option<String>,
    error: Option<String>,
    at: Option<String>,
    member: Option<String>,
}

#[test]
fn vectors() {
    let text = include_str!("vectors/canonical-json.json");
    let vectors: Vec<Vector> = serde_json::from_str(text).unwrap();
    for vector in vectors {
        let name = &vector.name;
        match Json::parse(&vector.input) {
            Ok(json) => {
                assert_eq!(Some(json.canonical()), vector.canonical, "{name}");
                let hash = vector.sha256.expect(name);
                assert_eq!(content_hash("", Some(&json)), hash, "{name}");
                let fingerprint = Coverage::Body.fingerprint(&vector.input, Some(&json));
                assert_eq!(fingerprint.unwrap().as_str(), format!("sha256:{hash}"), "{name}");
            }
            Err(error) => {
                let (kind, at, member) = match &error {
                    JsonError::Syntax { .. } => ("syntax", None, None),
                    JsonError::Text { pointer, .. } => ("text", Some(pointer), None),
                    JsonError::DuplicateMember { member, object } => ("duplicate", Some(object), Some(member)),
                    JsonError::TooDeep => ("depth", None, None),
                    JsonError::NumberOutOfRange { pointer } => ("number", Some(pointer), None),
                    error => panic!("{name}: {error}"),
                };
                assert_eq!(Some(kind), vector.error.as_deref(), "{name}");
                assert_eq!(at, vector.at.as_ref(), "{name}");
                assert_eq!(member, vector.member.as_ref(), "{name}");
            }
        }
    }
}

#[test]
fn hostile_bodies_end_quickly() {
    let mib = 1 << 20;
    let nested = |inner: String| format!("{}{inner}{}", "[".repeat(127), "]".repeat(127));
    assert!(Json::parse(&"[".repeat(mib)).is_err());
    assert!(Json::parse(&(r#"{"a":"#.repeat(mib / 6) + "1" + &"}".repeat(mib / 6))).is_err());
    assert!(Json::parse(&("[".repeat(mib / 2) + &"]".repeat(mib / 2))).is_err());
    assert!(Json::parse(&format!("1e{}", "9".repeat(mib))).is_err());
    assert!(Json::parse(&nested(format!("[{}1]", "1,".repeat(mib / 2)))).is_ok());
    assert!(Json::parse(&nested(format!("{:?}", "\\".repeat(mib / 2)))).is_ok());
    assert!(Json::parse(&nested("1".repeat(mib))).is_ok());
}

#[test]
fn errors_do_not_tell_values() {
    use std::error::Error as _;
    let secret = "4111111111111111";
    for body in [
        format!(r#"{{"card":"{secret}""#),
        format!(r#"{{"card":"{secret}\ud800"}}"#),
        format!(r#"{{"card":"{secret}","card":"{secret}"}}"#),
        format!(r#"{{"card":{secret}e99999999999999999999}}"#),
        format!("{secret}x"),
    ] {
        let error = Json::parse(&body).unwrap_err();
        let source = error.source().map(ToString::to_string).unwrap_or_default();
        assert!(!format!("{error} {source} {error:?}").contains(secret), "{error:?}");
    }
}

#[test]
fn pointers() {
    // The examples of RFC 6901, section 5.
    let json =
        Json::parse(r#"{"foo":["bar","baz"],"":0,"a/b":1,"c%d":2,"e^f":3,"g|h":4,"i\\j":5,"k\"l":6," ":7,"m~n":8}"#)
            .unwrap();
    for (text, expected) in [
        ("/foo", r#"["bar","baz"]"#),
        ("/foo/0", r#""bar""#),
        ("/", "0"),
        ("/a~1b", "1"),
        ("/c%d", "2"),
        ("/e^f", "3"),
        ("/g|h", "4"),
        ("/i\\j", "5"),
        ("/k\"l", "6"),
        ("/ ", "7"),
        ("/m~0n", "8"),
    ] {
        let pointer = Pointer::parse(text).unwrap();
        assert_eq!(json.pointer(&pointer).unwrap().canonical(), expected, "{text}");
        assert_eq!(pointer.to_string(), text);
    }
    assert_eq!(json.pointer(&Pointer::parse("").unwrap()), Some(&json));
    for absent in ["/foo/2", "/foo/01", "/foo/-", "/foo/", "/foo/+1", "/foo/0/0", "/x", "/foo/99999999999999999999"] {
        assert_eq!(json.pointer(&Pointer::parse(absent).unwrap()), None, "{absent}");
    }
    let twelve = Json::parse("[0,1,2,3,4,5,6,7,8,9,10,11]").unwrap();
    assert_eq!(twelve.pointer(&Pointer::parse("/10").unwrap()).unwrap().canonical(), "10");
    assert!(matches!(Pointer::parse("foo"), Err(InvalidPointer::NoSlash(_))));
    for wrong in ["/~", "/a~", "/~2", "/~~1"] {
        assert!(matches!(Pointer::parse(wrong), Err(InvalidPointer::Tilde(_))), "{wrong}");
    }
}

fn fingerprint(coverage: &str, body: &str) -> Option<Fingerprint> {
    let coverage: Coverage = coverage.parse().unwrap();
    coverage.fingerprint(body, Json::parse(body).ok().as_ref())
}

#[test]
fn parts_ignore_the_rest_of_the_body() {
    let first = fingerprint("/amount,/currency", r#"{"amount":5,"currency":"EUR","at":1}"#);
    let again = fingerprint("/amount,/currency", r#"{"currency":"EUR","at":2,"amount":5.0}"#);
    assert_eq!(first, again);
    let first = first.unwrap();
    assert_eq!(first.algorithm(), "sha256[/amount,/currency]");
    // printf 'parts:[5,"EUR"]' | sha256sum
    let hash = "ed3576316278065a5a0d348744f2fc5b5415a63867feba9e3de1e4abef28d284";
    assert_eq!(first.as_str(), format!("sha256[/amount,/currency]:{hash}"));
    assert_eq!(first.to_string(), first.as_str());
}

#[test]
fn different_bodies_never_look_equal() {
    let bodies = [
        r#"{"a":1,"b":2}"#,
        r#"{"a":2,"b":1}"#,
        r#"{"a":1}"#,
        r#"{"a":1,"b":null}"#,
        r#"{"b":1}"#,
        r#"{"a":"missing"}"#,
        r#"{"a":"1,2"}"#,
        // Without any of the parts: covered whole.
        r#"{"c":1}"#,
        r#"{"c":2}"#,
        "[1,2]",
        "null",
        "text",
        "Text",
        "",
        r#"{"a":1,"a":1}"#,
        r#"{"a":1, "a":1}"#,
        "json:[1,2]",
        "parts:[1,2]",
    ];
    for coverage in ["body", "/a,/b"] {
        let mut seen = BTreeMap::new();
        for body in bodies {
            let fingerprint = fingerprint(coverage, body).unwrap();
            if let Some(other) = seen.insert(fingerprint.as_str().to_owned(), body) {
                panic!("{coverage}: {body} and {other}");
            }
        }
    }
    // No pointers at all must not make all messages equal.
    let [one, two] = ["1", "2"].map(|body| {
        let json = Json::parse(body).unwrap();
        Coverage::Parts(vec![]).fingerprint(body, Some(&json))
    });
    assert_ne!(one, two);
}

#[test]
fn coverage_settings() {
    let parse = |text: &str| text.parse::<Coverage>();
    let pointers =
        |texts: &[&str]| Ok(Coverage::Parts(texts.iter().map(|text| Pointer::parse(text).unwrap()).collect()));
    assert_eq!(Coverage::default(), Coverage::Body);
    for (text, expected) in [
        ("", Ok(Coverage::Body)),
        (" body ", Ok(Coverage::Body)),
        ("off", Ok(Coverage::Off)),
        (" /a , /b/c ", pointers(&["/a", "/b/c"])),
        ("/a\\,b", pointers(&["/a,b"])),
        ("/a b,/c\\ ", pointers(&["/a b", "/c "])),
        ("/a,", Err(InvalidCoverage::EmptyPart)),
        (",", Err(InvalidCoverage::EmptyPart)),
        ("/a\\", Err(InvalidCoverage::DanglingEscape)),
        ("amount", Err(InvalidCoverage::Pointer(InvalidPointer::NoSlash("amount".into())))),
        ("Off", Err(InvalidCoverage::Pointer(InvalidPointer::NoSlash("Off".into())))),
        ("off,/a", Err(InvalidCoverage::Pointer(InvalidPointer::NoSlash("off".into())))),
        ("/a~", Err(InvalidCoverage::Pointer(InvalidPointer::Tilde("/a~".into())))),
    ] {
        assert_eq!(parse(text), expected, "{text}");
        if let Ok(coverage) = expected {
            assert_eq!(parse(&coverage.to_string()), Ok(coverage), "{text}");
        }
    }
    assert_eq!(fingerprint("off", "{}"), None);
    let escaped = fingerprint("/a\\,b", r#"{"a,b":1}"#).unwrap();
    assert_eq!(escaped.algorithm(), "sha256[/a\\,b]");
}

/// A value as the tests know it, apart from the code under test.
#[derive(Debug, Clone, PartialEq)]
enum Model {
    Null,
    Bool(bool),
    /// A mantissa that ends in no zero, and an exponent; zero has the exponent 0.
    Number(i128, i32),
    String(String),
    Array(Vec<Model>),
    Object(BTreeMap<String, Model>),
}

fn number() -> impl Strategy<Value = Model> {
    let mantissa = prop_oneof![-20..20_i128, any::<i64>().prop_map(i128::from), any::<i128>()];
    let exponent = prop_oneof![Just(0), -3..3, -90..90];
    (mantissa, exponent).prop_map(|(mut mantissa, mut exponent)| {
        while mantissa != 0 && mantissa % 10 == 0 {
            mantissa /= 10;
            exponent += 1;
        }
        Model::Number(mantissa, if mantissa == 0 { 0 } else { exponent })
    })
}

/// Few different characters, so that clashes and escapes are common.
fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[ab\"\\\\/\n\u{1}é😀\u{301}]{0,3}", any::<String>()]
}

fn model() -> impl Strategy<Value = Model> {
    let leaf =
        prop_oneof![Just(Model::Null), any::<bool>().prop_map(Model::Bool), number(), text().prop_map(Model::String),];
    leaf.prop_recursive(4, 32, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Model::Array),
            prop::collection::btree_map(text(), inner, 0..5).prop_map(Model::Object),
        ]
    })
}

/// Writes a model in one of many spellings, chosen by `dice`.
fn spell(model: &Model, dice: &mut impl FnMut(usize) -> usize, out: &mut String) {
    let space = |out: &mut String, n: usize| out.push_str(["", "", " ", "\n\t"].get(n).unwrap());
    space(out, dice(4));
    match model {
        Model::Null => out.push_str("null"),
        Model::Bool(value) => write!(out, "{value}").unwrap(),
        Model::Number(mantissa, exponent) => {
            // Zeros after the digits, then a point somewhere in them.
            let zeros = dice(4);
            let sign = if *mantissa < 0 || (*mantissa == 0 && dice(2) == 0) { "-" } else { "" };
            let digits = format!("{}{}", mantissa.unsigned_abs(), "0".repeat(zeros));
            let point = if *mantissa == 0 { 1 } else { 1 + dice(digits.len()) };
            let (integer, fraction) = digits.split_at(point.min(digits.len()));
            let exponent =
                i64::from(*exponent) + i64::try_from(fraction.len()).unwrap() - i64::try_from(zeros).unwrap();
            out.push_str(sign);
            out.push_str(integer);
            if !fraction.is_empty() {
                write!(out, ".{fraction}").unwrap();
            }
            if exponent != 0 || dice(2) == 0 {
                let plus = if exponent >= 0 { ["", "+"] } else { ["", ""] };
                let e = ["e", "E"].get(dice(2)).unwrap();
                write!(out, "{e}{}{exponent}", plus.get(dice(2)).unwrap()).unwrap();
            }
        }
        Model::String(text) => spell_text(text, dice, out),
        Model::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                spell(item, dice, out);
            }
            out.push(']');
        }
        Model::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            for index in (1..members.len()).rev() {
                members.swap(index, dice(index + 1));
            }
            out.push('{');
            for (index, (name, value)) in members.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                space(out, dice(4));
                spell_text(name, dice, out);
                space(out, dice(4));
                out.push(':');
                spell(value, dice, out);
            }
            space(out, dice(4));
            out.push('}');
        }
    }
    space(out, dice(4));
}

fn spell_text(text: &str, dice: &mut impl FnMut(usize) -> usize, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        if c < ' ' || matches!(c, '"' | '\\') || dice(4) == 0 {
            for unit in c.encode_utf16(&mut [0; 2]) {
                if dice(2) == 0 {
                    write!(out, "\\u{unit:04x}").unwrap();
                } else {
                    write!(out, "\\u{unit:04X}").unwrap();
                }
            }
        } else {
            out.push(c);
        }
    }
    out.push('"');
}

fn spelled(model: &Model, mut seed: u64) -> String {
    let mut out = String::new();
    // A linear congruential generator is dice enough.
    let mut dice = |sides: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % sides
    };
    spell(model, &mut dice, &mut out);
    out
}

fn canonical(text: &str) -> String {
    Json::parse(text).expect(text).canonical()
}

proptest! {
    #[test]
    fn one_value_has_one_text(model in model(), one: u64, two: u64) {
        prop_assert_eq!(canonical(&spelled(&model, one)), canonical(&spelled(&model, two)));
    }

    #[test]
    fn canonical_text_is_the_same_value(model in model(), seed: u64) {
        let json = Json::parse(&spelled(&model, seed)).unwrap();
        let text = json.canonical();
        let again = Json::parse(&text).unwrap();
        prop_assert_eq!(&again, &json);
        prop_assert_eq!(again.canonical(), text);
    }

    #[test]
    fn different_values_have_different_texts(one in model(), two in model(), seed: u64) {
        let same = canonical(&spelled(&one, seed)) == canonical(&spelled(&two, seed));
        prop_assert_eq!(same, one == two);
    }

    #[test]
    fn no_digit_of_a_number_is_lost(model in number(), seed: u64) {
        let text = canonical(&spelled(&model, seed));
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let significant = if digits == "0" { "0" } else { digits.trim_end_matches('0') };
        let zeros = i32::try_from(digits.len() - significant.len()).unwrap();
        let exponent = exponent.parse::<i32>().unwrap() + zeros;
        prop_assert_eq!(Model::Number(significant.parse().unwrap(), exponent), model);
    }

    #[test]
    fn numbers_know_integers(model in number(), seed: u64) {
        let Json::Number(number) = Json::parse(&spelled(&model, seed)).unwrap() else {
            panic!("not a number");
        };
        let Model::Number(_, exponent) = model else { panic!("not a number") };
        prop_assert_eq!(number.is_integer(), exponent >= 0);
    }

    /// We accept a body if and only if `serde_json` finds its syntax right, the refusals
    /// of our own apart.
    #[test]
    fn any_text_is_read_or_refused(text in prop_oneof![
        any::<String>(),
        "[\\[\\]{}:,\"\\\\ae0-9.+\\-u dtrunlfs]{0,24}",
    ]) {
        let valid = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
        match Json::parse(&text) {
            Ok(json) => {
                prop_assert!(valid);
                prop_assert_eq!(Json::parse(&json.canonical()).unwrap(), json);
            }
            Err(JsonError::Syntax { .. }) => prop_assert!(!valid),
            Err(_) => prop_assert!(valid),
        }
    }

    /// Nearly valid JSON, with one character changed.
    #[test]
    fn damaged_json_is_never_a_panic(model in model(), seed: u64, at: prop::sample::Index, c: char) {
        let mut chars: Vec<_> = spelled(&model, seed).chars().collect();
        let index = at.index(chars.len());
        *chars.get_mut(index).unwrap() = c;
        let text: String = chars.into_iter().collect();
        if let Ok(json) = Json::parse(&text) {
            prop_assert_eq!(canonical(&json.canonical()), json.canonical());
        }
    }
}
