//! Envelopes: whatever a body looks like, nothing of it is lost.

use idempotent_consumer::json::Json;
use idempotent_consumer::message::Message;
use idempotent_consumer::source::envelope::BodyFormat;

use super::dice;
use super::model::Model;

const FORMATS: [BodyFormat; 4] = [BodyFormat::Raw, BodyFormat::Sns, BodyFormat::EventBridge, BodyFormat::Auto];

/// The input is a body.
pub fn envelope(data: &[u8]) {
    let body = String::from_utf8_lossy(data).into_owned();
    let delivered = Message::new("m-1", body.clone()).with_attribute("sns.topic-arn", "forged");
    let members = match Model::read(&body) {
        Ok(Model::Object(members)) => Some(members),
        _ => None,
    };
    for format in FORMATS {
        let opened = format.open(delivered.clone());
        assert_eq!(opened.delivered_body(), body, "{format}");
        assert_eq!(format.open(delivered.clone()), opened, "{format}");
        let attribute = |name: &str| opened.attributes.get(name).map(String::as_str);
        if format == BodyFormat::Raw {
            assert_eq!(opened, delivered);
            continue;
        }
        assert_ne!(attribute("sns.topic-arn"), Some("forged"), "{format}");
        let text = |name: &str| match members.as_ref().and_then(|members| members.get(name)) {
            Some(Model::Text(text)) => Some(text.as_str()),
            _ => None,
        };
        if let Some(id) = attribute("sns.message-id") {
            assert!(matches!(format, BodyFormat::Sns | BodyFormat::Auto));
            assert_eq!(Some(id), text("MessageId"));
            assert_eq!(Some("Notification"), text("Type"));
            assert_eq!(Some(opened.body.as_str()), text("Message"));
            assert_eq!(attribute("sns.topic-arn"), text("TopicArn"));
        } else if let Some(id) = attribute("eventbridge.id") {
            assert!(matches!(format, BodyFormat::EventBridge | BodyFormat::Auto));
            assert_eq!(Some(id), text("id"));
            let detail = members.as_ref().and_then(|members| members.get("detail"));
            assert_eq!(Model::read(&opened.body).as_ref().ok(), detail);
            assert!(body.contains(&opened.body), "the detail is not as it was written");
        } else {
            assert_eq!(opened.body, body, "{format}");
        }
        // Only the outermost is opened: what is inside stays what it is, whatever it is.
        same_when_respelled(format, &delivered, &opened);
    }
}

/// An envelope is one however it is spelled.
fn same_when_respelled(format: BodyFormat, delivered: &Message, opened: &Message) {
    let Ok(model) = Model::read(&delivered.body) else {
        return;
    };
    let mut again = delivered.clone();
    again.body = model.spell(&mut dice::endless(delivered.body.as_bytes()));
    let again = format.open(again);
    assert_eq!(again.attributes, opened.attributes, "{format}");
    let canonical = |message: &Message| Json::parse(&message.body).map(|json| json.canonical()).ok();
    assert_eq!(canonical(&again), canonical(opened), "{format}");
}
