//! Settings: what is read, and how everything that is wrong is said at once.
#![allow(clippy::unwrap_used)]

use idempotent_consumer::config::{ConfigError, Environment, FunctionConfig};
use idempotent_consumer::consumer::StoreOutage;
use idempotent_consumer::fingerprint::Coverage;
use idempotent_consumer::source::SourceSettings;
use idempotent_consumer::source::envelope::BodyFormat;

const COMPLETE: [(&str, &str); 4] = [
    ("TABLE_NAME", "idempotency"),
    ("VISIBILITY_TIMEOUT_SECONDS", "180"),
    ("MAX_RECEIVE_COUNT", "5"),
    ("AWS_LAMBDA_FUNCTION_NAME", "charge"),
];

/// Reads the complete settings with some changed; an empty value unsets one.
fn read(changes: &[(&str, &str)]) -> Result<FunctionConfig, ConfigError> {
    let mut env = Environment::new(|name| {
        changes.iter().chain(&COMPLETE).find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
    });
    let config = FunctionConfig::from_env(&mut env);
    env.finish(config)
}

#[test]
fn defaults_are_those_of_the_readme() {
    let config = read(&[]).unwrap();
    assert_eq!(config.table, "idempotency");
    assert_eq!(config.consumer.retention.seconds(), 180 * 5 + 86_400);
    assert_eq!(config.consumer.scope.as_str(), "charge");
    assert_eq!(config.consumer.key.to_string(), "/idempotencyKey | /orderId");
    assert_eq!(config.consumer.fingerprint, Coverage::Body);
    assert_eq!(config.consumer.store_outage, StoreOutage::Reject);
    assert_eq!(config.source, SourceSettings::default());
    assert_eq!(config.source.body, BodyFormat::Raw);
    assert_eq!(config.batch.max_concurrency, 10);
    assert_eq!(config.batch.max_receive_count, Some(5));
}

#[test]
fn everything_can_be_set() {
    let config = read(&[
        ("RETENTION_BUFFER_SECONDS", "100"),
        ("IDEMPOTENCY_KEY", "attribute:order,/tenant | content-hash"),
        ("IDEMPOTENCY_SCOPE", "payments"),
        ("IDEMPOTENCY_FINGERPRINT", "/amount,/currency"),
        ("MAX_CONCURRENCY", "3"),
        ("STORE_OUTAGE", "process"),
        ("BODY", "eventbridge"),
        ("IGNORE_MESSAGES", "s3:TestEvent"),
    ])
    .unwrap();
    assert_eq!(config.consumer.retention.seconds(), 180 * 5 + 100);
    assert_eq!(config.consumer.key.to_string(), "attribute:order,/tenant | content-hash");
    assert_eq!(config.consumer.scope.as_str(), "payments");
    assert_eq!(config.consumer.fingerprint.to_string(), "/amount,/currency");
    assert_eq!(config.consumer.store_outage, StoreOutage::Process);
    assert_eq!(config.batch.max_concurrency, 3);
    assert_eq!(config.source.body, BodyFormat::EventBridge);
    assert_eq!(config.source.ignore.to_string(), "s3:TestEvent");
}

#[test]
fn a_buffer_of_zero_is_a_value() {
    assert_eq!(read(&[("RETENTION_BUFFER_SECONDS", "0")]).unwrap().consumer.retention.seconds(), 900);
}

#[test]
fn each_mistake_names_its_variable_its_value_and_what_would_be_right() {
    let cases = [
        ("TABLE_NAME", "", "the name of the DynamoDB table"),
        ("TABLE_NAME", "   ", "the name of the DynamoDB table"),
        ("VISIBILITY_TIMEOUT_SECONDS", "", "in seconds"),
        ("VISIBILITY_TIMEOUT_SECONDS", "3m", "in seconds"),
        ("VISIBILITY_TIMEOUT_SECONDS", "-1", "in seconds"),
        ("VISIBILITY_TIMEOUT_SECONDS", "1.5", "in seconds"),
        ("VISIBILITY_TIMEOUT_SECONDS", "18446744073709551615", "are the values in seconds?"),
        ("VISIBILITY_TIMEOUT_SECONDS", "18446744073709551616", "in seconds"),
        ("VISIBILITY_TIMEOUT_SECONDS", "180000000000", "are the values in seconds?"),
        ("MAX_RECEIVE_COUNT", "", "maxReceiveCount"),
        ("MAX_RECEIVE_COUNT", "0", "1 or more"),
        ("MAX_RECEIVE_COUNT", "4294967296", "1 or more"),
        ("RETENTION_BUFFER_SECONDS", "1 day", "a number of seconds"),
        ("IDEMPOTENCY_KEY", "orderId", "/idempotencyKey | /orderId"),
        ("IDEMPOTENCY_KEY", "/a,,/b", "/idempotencyKey | /orderId"),
        ("IDEMPOTENCY_KEY", "jmespath:[tenant, order.]", "wrong at character 16: "),
        ("IDEMPOTENCY_KEY", "jmespath:md5(id)", "there is no function `md5`"),
        ("IDEMPOTENCY_SCOPE", "a#b", "without `#`"),
        ("IDEMPOTENCY_FINGERPRINT", "amount", "/amount,/currency"),
        ("BODY", "SNS", "there are `raw`, `sns`, `eventbridge` and `auto`"),
        ("IGNORE_MESSAGES", "s3:ObjectCreated", "there is `s3:TestEvent`"),
        ("MAX_CONCURRENCY", "0", "1 or more"),
        ("MAX_CONCURRENCY", "many", "1 or more"),
        ("STORE_OUTAGE", "ignore", "`reject` or `process`"),
        ("DEAD_LETTER_QUEUE_URL", "orders-dlq.fifo", "a queue's URL"),
        ("DEAD_LETTER_QUEUE_URL", "arn:aws:sqs:eu-central-1:123456789012:dlq.fifo", "a queue's URL"),
        ("QUEUE_URL", "https://sqs.example/orders", "a queue's URL"),
        ("RETRY_BACK_OFF", "true", "`on` or `off`"),
        ("RETRY_BACK_OFF_BASE_SECONDS", "0", "1 or more"),
        ("RETRY_BACK_OFF_BASE_SECONDS", "181", "more than VISIBILITY_TIMEOUT_SECONDS"),
    ];
    for (variable, value, advice) in cases {
        let error = read(&[(variable, value)]).unwrap_err();
        assert_eq!(error.problems().len(), 1, "{variable}={value}: {error}");
        assert_eq!(error.problems()[0].variable, variable);
        let text = error.to_string();
        assert!(text.contains(advice), "{variable}={value}: {text}");
        if !value.trim().is_empty() {
            assert!(text.contains(&format!("`{value}`")), "{variable}={value}: {text}");
        }
    }
}

#[test]
fn all_mistakes_are_said_at_once() {
    let mut env = Environment::new(|name| match name {
        "MAX_RECEIVE_COUNT" => Some("five".to_owned()),
        "STORE_OUTAGE" => Some("maybe\nnot".to_owned()),
        _ => None,
    });
    let config = FunctionConfig::from_env(&mut env);
    let error = env.finish(config).unwrap_err();
    let variables: Vec<_> = error.problems().iter().map(|problem| problem.variable).collect();
    assert_eq!(
        variables,
        ["TABLE_NAME", "VISIBILITY_TIMEOUT_SECONDS", "MAX_RECEIVE_COUNT", "IDEMPOTENCY_SCOPE", "STORE_OUTAGE"]
    );
    let text = error.to_string();
    assert!(text.starts_with("5 things are wrong with the function's configuration:\n"), "{text}");
    assert!(!text.contains("maybe\nnot"), "a value can't forge a line");
}

const QUEUE: &str = "https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo";
const LETTERS: &str = "https://sqs.eu-central-1.amazonaws.com/123456789012/letters.fifo";

#[test]
#[cfg(feature = "sqs")]
fn queues_are_called_only_if_they_are_named() {
    use std::time::Duration;

    assert_eq!(read(&[]).unwrap().queues, read(&[("QUEUE_URL", QUEUE)]).unwrap().queues, "no back-off unless on");
    let queues =
        read(&[("DEAD_LETTER_QUEUE_URL", LETTERS), ("QUEUE_URL", QUEUE), ("RETRY_BACK_OFF", "on")]).unwrap().queues;
    assert_eq!(queues.dead_letters.unwrap().as_str(), LETTERS);
    let (queue, settings) = queues.back_off.unwrap();
    assert_eq!(queue.as_str(), QUEUE);
    assert_eq!((settings.base, settings.cap), (Duration::from_secs(10), Duration::from_mins(3)));
    // (180 x 5 + 86400) / 5: five waits of that length are within the retention.
    assert_eq!(settings.longest, Duration::from_mins(291));
    let short = [("VISIBILITY_TIMEOUT_SECONDS", "6"), ("QUEUE_URL", QUEUE), ("RETRY_BACK_OFF", "on")];
    assert_eq!(read(&short).unwrap().queues.back_off.unwrap().1.base, Duration::from_secs(6), "the default fits");
}

#[test]
#[cfg(feature = "sqs")]
fn queues_that_do_not_fit_together_are_refused() {
    let cases = [
        (vec![("DEAD_LETTER_QUEUE_URL", QUEUE), ("QUEUE_URL", QUEUE)], "DEAD_LETTER_QUEUE_URL", "come back for ever"),
        (
            vec![("DEAD_LETTER_QUEUE_URL", "https://sqs.example/1/letters"), ("QUEUE_URL", QUEUE)],
            "DEAD_LETTER_QUEUE_URL",
            "not of the same kind",
        ),
        (vec![("RETRY_BACK_OFF", "on")], "QUEUE_URL", "RETRY_BACK_OFF=on needs it"),
    ];
    for (changes, variable, advice) in cases {
        let error = read(&changes).unwrap_err();
        assert_eq!(error.problems().iter().map(|problem| problem.variable).collect::<Vec<_>>(), [variable]);
        assert!(error.to_string().contains(advice), "{error}");
    }
}

#[test]
#[cfg(not(feature = "sqs"))]
fn a_build_that_can_not_call_sqs_says_so() {
    let error =
        read(&[("DEAD_LETTER_QUEUE_URL", LETTERS), ("QUEUE_URL", QUEUE), ("RETRY_BACK_OFF", "on")]).unwrap_err();
    assert_eq!(error.problems().len(), 2, "{error}");
    assert!(error.to_string().contains("feature `sqs`"), "{error}");
}

#[test]
fn an_effect_that_says_nothing_is_still_an_error() {
    let error = Environment::new(|_| None).finish::<()>(None).unwrap_err();
    assert!(error.to_string().contains("did not say why"));
}

#[test]
fn a_queues_url_with_a_secret_in_it_is_not_shown() {
    for variable in ["DEAD_LETTER_QUEUE_URL", "QUEUE_URL"] {
        for value in
            ["https://user:s3cret@example.com/1/letters.fifo", "https://example.com/1/letters.fifo?token=s3cret"]
        {
            let text = read(&[(variable, value)]).unwrap_err().to_string();
            assert!(text.contains(variable) && text.contains("no queue's URL has"), "{text}");
            assert!(!text.contains("s3cret"), "{text}");
        }
    }
}

#[cfg(feature = "http")]
#[test]
fn a_url_that_is_refused_is_not_shown() {
    use idempotent_consumer::effect::http::HttpEffect;

    let mut env = Environment::new(|name| match name {
        "EFFECT_URL" => Some("ftp://user:s3cret@example.com/?token=t0ken".to_owned()),
        "EFFECT_RECOVERY" => Some("park".to_owned()),
        _ => None,
    });
    let effect = HttpEffect::from_env(&mut env);
    let text = env.finish(effect).unwrap_err().to_string();
    assert!(text.contains("EFFECT_URL"), "{text}");
    assert!(!text.contains("s3cret") && !text.contains("t0ken"), "{text}");
}
