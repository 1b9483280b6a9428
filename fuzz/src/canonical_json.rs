//! Canonical JSON: one text per value.

use idempotent_consumer::fingerprint::{Coverage, content_hash};
use idempotent_consumer::json::{Json, JsonError};

use super::dice::{self, Dice};
use super::model::{Model, Refusal};

/// Read as texts: the whole input, and each of its lines. Read as dice: a value, and
/// another that is equal or not.
pub fn canonical_json(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        read(text);
        let lines: Vec<_> = text.lines().take(4).filter_map(read).collect();
        for (index, one) in lines.iter().enumerate() {
            for two in &lines[index + 1..] {
                compare(one, two);
            }
        }
    }
    let mut dice = Dice::new(data);
    let model = Model::roll(&mut dice, 5);
    let other = if dice.one_in(2) { model.changed(&mut dice) } else { model.clone() };
    let mut spelling = dice::endless(data);
    let [one, two] = [&model, &other].map(|model| {
        let text = model.spell(&mut spelling);
        let read = read(&text).unwrap_or_else(|| panic!("refused: {text}"));
        assert_eq!(read.model, *model, "the oracle has read {text} as something else");
        read
    });
    compare(&one, &two);
}

struct Read {
    json: Json,
    model: Model,
    canonical: String,
    hash: String,
}

/// Reads one text in both ways, which must agree on whether it can be read, and takes its
/// canonical form there and back.
fn read(text: &str) -> Option<Read> {
    let (json, model) = match (Json::parse(text), Model::read(text)) {
        (Ok(json), Ok(model)) => (json, model),
        (Err(error), Err(refusal)) => {
            assert_eq!(matches!(error, JsonError::Syntax { .. }), refusal == Refusal::NotJson, "{text}");
            return None;
        }
        // Between what certainly fits into 64 bits and what certainly does not.
        (Ok(_), Err(Refusal::HugeExponent)) => return None,
        (json, model) => panic!("{json:?} but {model:?}: {text}"),
    };
    let canonical = json.canonical();
    let again = Json::parse(&canonical).unwrap_or_else(|error| panic!("{error}: canonical {canonical}"));
    assert_eq!(again, json, "the canonical text {canonical} stands for something else");
    assert_eq!(again.canonical(), canonical, "not a fixed point");
    assert_eq!(Model::read_canonical(&canonical).as_ref(), Ok(&model), "the canonical text {canonical} of {text}");
    let hash = content_hash(text, Some(&json));
    assert_eq!(hash, content_hash(&canonical, Some(&again)));
    Some(Read { json, model, canonical, hash })
}

fn compare(one: &Read, two: &Read) {
    let equal = one.model == two.model;
    let texts = [&one.canonical, &two.canonical];
    assert_eq!(one.json == two.json, equal, "the values of {texts:?}");
    assert_eq!(one.canonical == two.canonical, equal, "{texts:?}");
    assert_eq!(one.hash == two.hash, equal, "the hashes of {texts:?}");
    let fingerprints = [one, two].map(|read| Coverage::Body.fingerprint("", Some(&read.json)));
    assert_eq!(fingerprints[0] == fingerprints[1], equal, "the fingerprints of {texts:?}");
}
