//! What is compiled into the deployed function, and what is not.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Name and versions of every crate in the binary `consumer`.
fn crates_of_the_function() -> BTreeMap<String, BTreeSet<String>> {
    let crates = tree(&[]);
    assert!(crates.contains_key("aws-sdk-dynamodb") && crates.contains_key("lambda_runtime"), "not a tree: {crates:?}");
    crates
}

/// What `cargo tree` says of it.
fn tree(arguments: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--offline", "--locked", "--quiet", "--edges", "normal", "--prefix", "none"])
        .args(arguments)
        .args(["--package", "idempotent-consumer", "--no-default-features"])
        .args(["--features", "dynamodb,lambda,http,sqs,jmespath"])
        .args(["--target", "x86_64-unknown-linux-gnu", "--target", "aarch64-unknown-linux-gnu"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut crates: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let mut words = line.split(' ');
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            crates.entry(name.to_owned()).or_default().insert(version.trim_start_matches('v').to_owned());
        }
    }
    crates
}

#[test]
fn the_function_holds_one_http_and_one_tls_stack() {
    let crates = crates_of_the_function();
    // The AWS SDK and the HTTP effect share rustls with aws-lc. A second provider would be
    // megabytes, and a default to be chosen at run time; an older stack has advisories.
    for (name, version) in [
        ("hyper", "1."),
        ("h2", "0.4."),
        ("http", "1."),
        ("http-body", "1."),
        ("rustls", "0.23."),
        ("rustls-webpki", "0.103."),
        ("tokio-rustls", "0.26."),
        ("hyper-rustls", "0.27."),
        ("aws-lc-rs", "1."),
    ] {
        let Some(versions) = crates.get(name) else { panic!("no {name}: is another stack in use?") };
        assert!(versions.len() == 1 && versions.iter().all(|v| v.starts_with(version)), "{name}: {versions:?}");
    }
    for other in ["ring", "openssl", "openssl-sys", "native-tls"] {
        assert_eq!(crates.get(other), None, "{other}");
    }
}

#[test]
fn the_function_holds_nothing_that_only_tools_and_tests_need() {
    let crates = crates_of_the_function();
    let unwanted = [
        "clap",
        "dynoxide-rs",
        "rusqlite",
        "libsqlite3-sys",
        "regex",
        "regex-automata",
        "axum",
        "proptest",
        "tempfile",
        "redis",
        "tokio-postgres",
        "rdkafka",
        "lapin",
        "aws-sdk-sso",
        "aws-sdk-ssooidc",
    ];
    let found: Vec<_> = unwanted.into_iter().filter(|name| crates.contains_key(*name)).collect();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn every_library_that_logs_is_held_at_warn() {
    // Their finer lines hold requests. A new one must be put on the list.
    let telemetry = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/telemetry.rs")).unwrap();
    let (_, list) = telemetry.split_once("with_targets([").unwrap();
    let (list, _) = list.split_once(']').unwrap();
    let held: Vec<&str> = list.split(',').map(|name| name.trim().trim_matches('"')).collect();
    let mut logging = tree(&["--invert", "tracing", "--depth", "1"]);
    logging.extend(tree(&["--invert", "log", "--depth", "1"]));
    for ours in ["tracing", "log", "idempotent-consumer"] {
        assert!(logging.remove(ours).is_some(), "not a tree: {logging:?}");
    }
    assert!(logging.len() > 10, "not a tree: {logging:?}");
    for name in logging.keys().map(|name| name.replace('-', "_")) {
        assert!(held.iter().any(|library| name.starts_with(library)), "{name} logs, and is held by none of {held:?}");
    }
}
