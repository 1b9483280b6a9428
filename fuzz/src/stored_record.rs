//! Items read back: a table shared with other writers can hold anything.

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use idempotent_consumer::record::{
    self, Claim, ClaimRequest, Completion, Owner, Parking, Record, RecordId, Standing, State, StoredResult,
};
use idempotent_consumer::store::StoreErrorKind;
use idempotent_consumer::store::dynamodb::{item_of_record, record_of_item};
use idempotent_consumer::time::{EpochMillis, EpochSeconds, Lease};
use serde::de::IgnoredAny;
use serde_json::Value;

use super::dice::Dice;
use super::model::{Decimal, Model, Refusal};

type Item = HashMap<String, AttributeValue>;

/// Results are never longer than this.
const MAX_RESULT_BYTES: usize = 16 * 1024 * 1024;

const NAMES: [&str; 14] = [
    "id",
    "status",
    "expiration",
    "in_progress_expiration",
    "data",
    "data_reduced",
    "validation",
    "owner",
    "attempt",
    "message_id",
    "claimed_at",
    "completed_at",
    "reason",
    "sort",
];

/// An item as DynamoDB's JSON (`{"id": {"S": "orders#1"}}`), else one built from the bytes.
pub fn stored_record(data: &[u8]) {
    let item = if data.first() == Some(&b'{') {
        let Some(item) = serde_json::from_slice(data).ok().and_then(|json| from_json(&json)) else {
            return;
        };
        item
    } else {
        roll_item(&mut Dice::new(data))
    };
    check(&item);
    check_writer(&mut Dice::new(data));
}

/// What must hold for any item.
pub fn check(item: &Item) {
    let record = match record_of_item(item) {
        Ok(record) => record,
        Err(error) => {
            assert_eq!(error.kind(), StoreErrorKind::Unreadable);
            let without_id = !matches!(item.get("id"), Some(AttributeValue::S(_)));
            let binary = matches!(item.get("data"), Some(AttributeValue::B(_)));
            assert!(without_id || (binary && status(item) == Some("COMPLETED")), "{error}: {item:?}");
            return;
        }
    };
    // Of another map, whose order is another.
    let shuffled: Item = item.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    assert_eq!(record_of_item(&shuffled).unwrap(), record, "an item is read in two ways");
    assert_eq!(Some(&AttributeValue::S(record.id.as_str().to_owned())), item.get("id"));
    let matches = match (&record.state, status(item)) {
        (State::InProgress { owner, .. }, Some("INPROGRESS")) => {
            owner.as_ref().map(Owner::as_str)
                == item.get("owner").and_then(|owner| owner.as_s().ok()).map(String::as_str)
        }
        (State::Completed { result, .. }, Some("COMPLETED")) => {
            assert!(result.json.len() <= MAX_RESULT_BYTES || matches!(item.get("data"), Some(AttributeValue::S(_))));
            check_result(item.get("data"), &result.json);
            serde_json::from_str::<IgnoredAny>(&result.json).is_ok()
        }
        (State::Parked { .. }, Some("PARKED")) => true,
        (State::Unknown { .. }, status) => !matches!(status, Some("INPROGRESS" | "COMPLETED" | "PARKED")),
        _ => false,
    };
    assert!(matches, "{:?} of {item:?}", record.state);
    check_expiry(item, &record);
    check_rules(&record);
    let again = record_of_item(&item_of_record(&record)).unwrap();
    assert_eq!(again, record, "not the record that was written");
}

/// A result that was not stored as JSON is read as the JSON value that it is, every digit
/// of it.
fn check_result(data: Option<&AttributeValue>, json: &str) {
    let expected = match data {
        None => Model::Null,
        Some(AttributeValue::B(_)) => return,
        Some(AttributeValue::S(text)) if serde_json::from_str::<IgnoredAny>(text).is_ok() => {
            return assert_eq!(text, json);
        }
        Some(value) => as_json(value),
    };
    match Model::read(json) {
        Ok(read) => assert_eq!(read, expected, "{data:?}"),
        Err(refusal) => assert_eq!(refusal, Refusal::HugeExponent, "{data:?}"),
    }
}

fn as_json(value: &AttributeValue) -> Model {
    match value {
        AttributeValue::S(text) => Model::Text(text.clone()),
        AttributeValue::N(text) => Model::read(text).unwrap_or_else(|_| Model::Text(text.clone())),
        AttributeValue::Bool(value) => Model::Bool(*value),
        AttributeValue::L(items) => Model::Array(items.iter().map(as_json).collect()),
        AttributeValue::M(members) => {
            Model::Object(members.iter().map(|(name, value)| (name.clone(), as_json(value))).collect())
        }
        AttributeValue::Ss(texts) | AttributeValue::Ns(texts) => {
            Model::Array(texts.iter().cloned().map(Model::Text).collect())
        }
        _ => Model::Null,
    }
}

fn status(item: &Item) -> Option<&str> {
    item.get("status").and_then(|status| status.as_s().ok()).map(String::as_str)
}

/// `has_expired` says what DynamoDB says to `expiration < :now`.
fn check_expiry(item: &Item, record: &Record) {
    let number = match item.get("expiration") {
        Some(AttributeValue::N(text)) if is_dynamodb_number(text) => Decimal::read(text),
        Some(AttributeValue::N(_)) => return,
        // A missing number, or one of another type, is below nothing.
        _ => None,
    };
    let near = record.expires.get().min(u64::MAX / 1000 - 2);
    for now in [1, near.saturating_sub(1), near, near + 1, near + 2, 1_900_000_000, u64::MAX / 1000] {
        let expired = now > 0 && number.as_ref().is_some_and(|number| number.is_below(now));
        let read = record.has_expired(EpochSeconds::new(now).to_millis());
        assert!(now == 0 || read == expired, "at {now}: {read}, and DynamoDB would say {expired}: {item:?}");
    }
}

/// At most 38 digits, and not beyond 10^126: all that DynamoDB keeps.
fn is_dynamodb_number(text: &str) -> bool {
    let digits = text.bytes().filter(u8::is_ascii_digit).count();
    digits <= 38 && matches!(Model::read(text), Ok(Model::Number(number)) if (-200..126).contains(&number.exponent))
}

/// The protocol's rules take any record.
fn check_rules(record: &Record) {
    let now = EpochMillis::new(1_900_000_000_000);
    let request = ClaimRequest {
        id: record.id.clone(),
        owner: Owner::new("us"),
        lease: Some(Lease::until(now.plus(Duration::from_secs(30)))),
        expires: EpochSeconds::new(1_900_003_600),
        fingerprint: Some("sha256:00".to_owned()),
        message_id: "m-1".to_owned(),
        now,
    };
    let standing = record::judge(record, &request, Duration::from_secs(1));
    match (&record.state, standing) {
        (_, Standing::Conflict) => assert!(record.fingerprint.is_some()),
        (State::InProgress { lease: Some(_), .. }, Standing::Lapsed | Standing::Held { .. })
        | (State::InProgress { lease: None, .. }, Standing::Held { .. })
        | (State::Completed { .. }, Standing::Completed(_))
        | (State::Parked { .. }, Standing::Parked(_))
        | (State::Unknown { .. }, Standing::Locked { .. }) => {}
        (state, standing) => panic!("{state:?} is judged {standing:?}"),
    }
    assert!(!record.expires.to_millis().to_string().is_empty());
    let claimed = record::claim(Some(record), &request);
    assert_eq!(claimed.is_some(), record.has_expired(now) || record.owner() == Some(&request.owner));
    let taken = record::take_over(Some(record), record, &request);
    assert!(taken.is_none_or(|taken| taken.attempt >= record.attempt));
    // Of what another owner holds, or nobody, nothing is changed.
    let claim =
        Claim { id: record.id.clone(), owner: Owner::new("nobody has this"), attempt: record.attempt, lease: None };
    let completion = Completion {
        result: StoredResult::whole("0"),
        completed_at: EpochMillis::new(1),
        expires: EpochSeconds::new(1),
    };
    let parking = Parking { reason: "0".to_owned(), expires: EpochSeconds::new(1) };
    assert!(record::set_lease(Some(record), &claim, Lease::GIVEN_UP).is_none());
    assert!(record::release(Some(record), &claim).is_none());
    if matches!(record.state, State::InProgress { .. }) {
        assert!(record::complete(Some(record), &claim, &completion).is_none());
        assert!(record::park(Some(record), &claim, &parking).is_none());
    }
}

/// What our own writer wrote is read back as it was.
fn check_writer(dice: &mut Dice<'_>) {
    let point = |dice: &mut Dice<'_>| {
        let value = u64::from_le_bytes(std::array::from_fn(|_| dice.byte()));
        dice.pick(&[value, value % 2_000_000_000_000, 0, u64::MAX])
    };
    let optional = |dice: &mut Dice<'_>| dice.one_in(2).then(|| dice.text(20));
    let state = match dice.below(3) {
        0 => State::InProgress {
            owner: optional(dice).map(Owner::new),
            lease: dice.one_in(2).then(|| Lease::until(EpochMillis::new(point(dice)))),
        },
        1 => {
            let json = Model::roll(dice, 4).spell(&mut super::dice::endless(b""));
            // Over the item limit, so that it is compressed.
            let json = if dice.one_in(200) { format!("[{json},{:?}]", "x".repeat(400 * 1024)) } else { json };
            State::Completed {
                result: StoredResult { json, reduced: dice.one_in(2) },
                completed_at: dice.one_in(2).then(|| EpochMillis::new(point(dice))),
            }
        }
        _ => State::Parked { reason: dice.text(40) },
    };
    let record = Record {
        id: RecordId::new(dice.text(20)),
        state,
        attempt: point(dice),
        expires: EpochSeconds::new(point(dice)),
        fingerprint: optional(dice),
        message_id: optional(dice),
        claimed_at: dice.one_in(2).then(|| EpochMillis::new(point(dice))),
    };
    let read = record_of_item(&item_of_record(&record)).unwrap_or_else(|error| panic!("{error}: {record:?}"));
    assert_eq!(read, record);
}

fn roll_item(dice: &mut Dice<'_>) -> Item {
    let mut item = Item::new();
    // Usually one that has the attributes it needs, at least.
    if !dice.one_in(8) {
        item.insert("id".to_owned(), AttributeValue::S("orders#1".to_owned()));
        let status = dice.pick(&["INPROGRESS", "COMPLETED", "PARKED", "EXPIRED"]);
        item.insert("status".to_owned(), AttributeValue::S(status.to_owned()));
    }
    while !dice.is_empty() {
        let name = if dice.one_in(16) { dice.text(4) } else { dice.pick(&NAMES).to_owned() };
        item.insert(name, roll_value(dice, 8));
    }
    item
}

fn roll_value(dice: &mut Dice<'_>, depth: usize) -> AttributeValue {
    let kinds = if depth == 0 || dice.is_empty() { 8 } else { 10 };
    match dice.below(kinds) {
        0 => AttributeValue::S(dice.text(12)),
        1 => AttributeValue::S(Model::roll(dice, 3).spell(&mut super::dice::endless(b""))),
        2 => AttributeValue::N(roll_number(dice)),
        3 => AttributeValue::B(Blob::new(dice.bytes(40))),
        4 => AttributeValue::Bool(dice.one_in(2)),
        5 => AttributeValue::Null(true),
        6 => AttributeValue::Ss((0..dice.below(3)).map(|_| dice.text(4)).collect()),
        7 => AttributeValue::Ns((0..dice.below(3)).map(|_| roll_number(dice)).collect()),
        8 => AttributeValue::L((0..dice.below(4)).map(|_| roll_value(dice, depth - 1)).collect()),
        _ => AttributeValue::M((0..dice.below(4)).map(|_| (dice.text(4), roll_value(dice, depth - 1))).collect()),
    }
}

/// A number as DynamoDB writes it, around the times that matter; now and then any text.
fn roll_number(dice: &mut Dice<'_>) -> String {
    let near = ["1899999999", "1900000000", "1900000001", "0", "9", "18446744073709551615", "9007199254740993"];
    let whole = dice.pick(&near);
    match dice.below(8) {
        0 | 1 => whole.to_owned(),
        2 => format!("-{whole}"),
        3 => format!("{whole}.{}", dice.pick(&["0", "5", "99999999999999999", "00000000000000001"])),
        4 => format!("{whole}E{}", i32::from(dice.byte()) - 128),
        5 => dice.bytes(38).iter().map(|byte| char::from(b'0' + byte % 10)).collect(),
        6 => format!("{}e+{}", dice.below(10), dice.below(126)),
        _ => dice.text(8),
    }
}

fn from_json(json: &Value) -> Option<Item> {
    json.as_object()?.iter().map(|(name, value)| Some((name.clone(), value_from_json(value)?))).collect()
}

/// A value in DynamoDB's JSON; bytes are written in hex.
fn value_from_json(json: &Value) -> Option<AttributeValue> {
    let (kind, value) = json.as_object()?.iter().next()?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let texts = || value.as_array()?.iter().map(text).collect::<Option<Vec<_>>>();
    Some(match kind.as_str() {
        "S" => AttributeValue::S(text(value)?),
        "N" => AttributeValue::N(text(value)?),
        "BOOL" => AttributeValue::Bool(value.as_bool()?),
        "NULL" => AttributeValue::Null(true),
        "SS" => AttributeValue::Ss(texts()?),
        "NS" => AttributeValue::Ns(texts()?),
        "L" => AttributeValue::L(value.as_array()?.iter().map(value_from_json).collect::<Option<_>>()?),
        "M" => AttributeValue::M(from_json(value)?),
        "B" => {
            let digits: Vec<_> = value.as_str()?.chars().map(|c| c.to_digit(16)).collect::<Option<_>>()?;
            let byte = |pair: &[u32]| pair.iter().fold(0, |byte, digit| byte << 4 | u8::try_from(*digit).unwrap());
            AttributeValue::B(Blob::new(digits.chunks(2).map(byte).collect::<Vec<u8>>()))
        }
        _ => return None,
    })
}
