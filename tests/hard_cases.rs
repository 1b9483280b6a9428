//! `docs/hard-cases.md`: that the tests it names exist, and those of them that belong nowhere
//! else.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use idempotent_consumer::batch::{Batch, BatchSettings};
use idempotent_consumer::consumer::{Consume, Consumer};
use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery};
use idempotent_consumer::key::Scope;
use idempotent_consumer::outcome::{Disposition, Outcome};
use idempotent_consumer::record::{RecordId, State};
use idempotent_consumer::store::Store;
use idempotent_consumer::store::memory::MemoryStore;
use idempotent_consumer::time::Deadline;
use serde_json::{Value, json};

use crate::common::dynamo::Dynamo;
use crate::common::effects::{PATIENCE, Scripted, clock, consumer, order, record, settings};
use crate::common::events::{Record, event};
use crate::common::process::{AMPLE, Function, Setup};
use crate::common::sink::{Behaviour, Sink};

// ---- the page --------------------------------------------------------------------------

/// The rows of the page's tables, cell by cell.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let cells = |line| -> Option<Vec<&str>> {
        let line: &str = str::strip_prefix(line, "| ")?.strip_suffix(" |")?;
        Some(line.split(" | ").collect())
    };
    let rows = page.lines().filter_map(cells);
    rows.filter(|row| row[0] != "report" && row[0] != "---").collect()
}

/// What stands in backticks.
fn code(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Whether a test by that name is in the file, and would be run.
fn is_run(file: &str, text: &str, name: &str) -> bool {
    if Path::new(file).extension().is_some_and(|extension| extension == "py") {
        let is_check = name.starts_with("check_") && text.matches(&format!("{name},")).count() > 0;
        return text.contains(&format!("def {name}(")) && (is_check || name.starts_with("test_"));
    }
    let Some((before, _)) = text.split_once(&format!("fn {name}(")) else { return false };
    if file == "src/store/conformance.rs" {
        // `tests/store_conformance.rs` runs what `run_all` does.
        return text.contains(&format!("    {name}(store).await;"));
    }
    // The attributes of the function, which stand right before it.
    let attributes = before.rsplit("\n\n").next().unwrap();
    let is_test = attributes.lines().any(|line| {
        let line = line.trim();
        line == "#[test]" || line.starts_with("#[tokio::test")
    });
    is_test && !attributes.contains("#[ignore")
}

#[test]
fn every_test_that_the_page_names_exists_and_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("docs/hard-cases.md")).unwrap();
    let rows = rows(&page);
    assert_eq!(rows.len(), 76, "a row was added or lost");
    let mut seen = BTreeSet::new();
    for row in rows {
        let [report, symptom, prevention, test] = row[..] else { panic!("not four cells: {row:?}") };
        assert!(seen.insert(report), "{report} twice");
        assert!(!symptom.is_empty() && !prevention.is_empty(), "{report}");
        let mut named = 0;
        for (file, name) in code(test).filter_map(|words| words.split_once("::")) {
            named += 1;
            let source = std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{report}: {file}: {e}"));
            assert!(is_run(file, &source, name), "{report}: {name} is no test in {file}");
        }
        let excused = test.starts_with("can't happen: ") || test.starts_with("not built yet: ");
        assert!(excused || named > 0, "{report} has no test, and says no reason");
        assert!(excused || prevention != "–", "{report}: what prevents it?");
    }
}

#[test]
fn a_test_that_is_not_there_or_does_not_run_is_noticed() {
    let text = "#[test]\nfn runs() {}\n\n#[tokio::test(start_paused = true)]\nasync fn waits() {}\n\nfn helps() {}\n\n\
                #[test]\n#[ignore = \"slow\"]\nfn sleeps() {}\n";
    let run: Vec<_> = ["runs", "waits", "helps", "sleeps", "gone"]
        .into_iter()
        .filter(|name| is_run("tests/x.rs", text, name))
        .collect();
    assert_eq!(run, ["runs", "waits"]);
    let text = "def check_used(template):\n    pass\n\n\ndef check_unused(template):\n    pass\n\nALL = [\n    check_used,\n]\n";
    let run: Vec<_> =
        ["check_used", "check_unused", "gone"].into_iter().filter(|name| is_run("tests/x.py", text, name)).collect();
    assert_eq!(run, ["check_used"]);
}

// ---- ownership -------------------------------------------------------------------------

/// An effect that sends its message through another consumer, as one that calls a function
/// that is idempotent itself.
struct Outer {
    inner: Consumer<Scripted>,
}

impl Effect for Outer {
    type Input = Value;
    type Output = String;

    fn recovery(&self) -> Recovery {
        Recovery::Park
    }

    async fn apply(&self, _: &Value, attempt: &Attempt<'_>) -> Result<String, EffectError> {
        let report = self.inner.process(attempt.message(), attempt.deadline()).await;
        Ok(format!("outer, and inside {}", report.outcome.name()))
    }
}

/// ts#5707: the inner call's prefix became the outer one's.
#[tokio::test]
async fn a_call_inside_another_has_a_record_of_its_own() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let mut inner = settings();
    inner.scope = Scope::new("inner").unwrap();
    let inner = Consumer::new(Scripted::new(Recovery::Park), Arc::clone(&store) as Arc<dyn Store>, inner)
        .with_clock(Arc::clone(&clock) as Arc<_>);
    let outer = consumer(Outer { inner }, &store, &clock);
    for expected in ["executed", "replayed"] {
        let report = outer.process(&order("m-1", "A-1"), Deadline::after(PATIENCE, &*clock)).await;
        assert_eq!(report.outcome.name(), expected);
        assert_eq!(report.outcome.result().unwrap().json, r#""outer, and inside executed""#);
        assert_eq!(report.key.unwrap().id(), "test#A-1");
    }
    let result = |record: Option<idempotent_consumer::record::Record>| match record.unwrap().state {
        State::Completed { result, .. } => result.json,
        state => panic!("{state:?}"),
    };
    assert_eq!(result(record(&*store, "A-1").await), r#""outer, and inside executed""#);
    assert_eq!(result(store.load(&RecordId::new("inner#A-1")).await.unwrap()), r#""A-1 by attempt 1""#);
}

// ---- keys ------------------------------------------------------------------------------

/// py#5897, ts#3515, dn#703: a new name of the function was a new name of every record.
#[tokio::test]
async fn a_function_that_is_renamed_knows_what_it_did() {
    let (dynamo, sink) = (Dynamo::start().await, Sink::start().await);
    let setup = Setup::new(&dynamo.url, &sink.url);
    let orders = [Record::order("a")];
    let unnamed = setup.start().await;
    assert_eq!(unnamed.invoke(event(&orders), AMPLE).await.failures(), [] as [&str; 0]);
    let renamed = setup.clone().set("AWS_LAMBDA_FUNCTION_NAME", "renamed");
    // The scope is the first function's name, which it took for want of a setting.
    let kept = renamed.clone().set("IDEMPOTENCY_SCOPE", "consumer").start().await;
    kept.invoke(event(&orders), AMPLE).await;
    assert_eq!(kept.outcomes("message-a"), ["replayed"]);
    // What would happen without: that there is something to keep.
    let lost = renamed.start().await;
    lost.invoke(event(&orders), AMPLE).await;
    assert_eq!(lost.outcomes("message-a"), ["executed"]);
}

// ---- batches ---------------------------------------------------------------------------

/// py#824: more than ten at once. A standard queue gives up to ten thousand.
#[tokio::test(start_paused = true)]
async fn a_large_batch_of_a_standard_queue_is_answered_message_by_message() {
    let (clock, store) = (clock(), Arc::new(MemoryStore::new()));
    let effect = Scripted::new(Recovery::Rerun).applying_async(|seen| async move {
        let number: u64 = seen.key.parse().unwrap();
        // They end in another order than they began.
        tokio::time::sleep(Duration::from_millis(number * 37 % 11)).await;
        match number % 7 {
            0 => Err(EffectError::not_applied("refused")),
            n => Ok(json!(n)),
        }
    });
    let batch = Batch::new(consumer(effect, &store, &clock), BatchSettings::default());
    let messages: Vec<_> = (0..2000).map(|n| order(&format!("m-{n}"), &n.to_string())).collect();
    let reports = batch.process(&messages, Deadline::after(PATIENCE, &*clock)).await.unwrap();
    assert_eq!(reports.len(), 2000);
    for (n, (message, report)) in messages.iter().zip(&reports).enumerate() {
        assert_eq!(report.message_id, message.id);
        let failed = matches!(report.outcome, Outcome::NotApplied { .. });
        assert_eq!((failed, report.disposition() == Disposition::Retry), (n % 7 == 0, n % 7 == 0), "{report:?}");
    }
}

/// py#1021: what an invocation leaves in the process changed the next one.
#[tokio::test]
async fn a_warm_process_answers_as_a_cold_one() {
    let poison = Record::new("poison", "no JSON").in_group("p");
    let conflict = Record::new("conflict", r#"{"orderId":"good"}"#).in_group("c");
    let orders = ["good", "busy", "refused", "gone"].map(|id| Record::order(id).in_group(id));
    let deliveries: Vec<Vec<Record>> = vec![
        orders.to_vec(),
        vec![conflict, poison.clone(), orders[1].clone().received(2)],
        vec![poison],
        [orders.to_vec(), vec![Record::order("new")]].concat(),
    ];
    let mut told = Vec::new();
    for warm in [true, false] {
        let (dynamo, sink) = (Dynamo::start().await, Sink::start().await);
        sink.behave_for("busy", Behaviour::Answer(503, String::new()));
        sink.behave_for("refused", Behaviour::Answer(422, String::new()));
        sink.behave_for("gone", Behaviour::Close);
        let setup = Setup::new(&dynamo.url, &sink.url);
        let mut function = setup.start().await;
        let mut answers = Vec::new();
        for records in &deliveries {
            if !warm {
                function = setup.start().await;
            }
            let before = function.log().len();
            let failures = function.invoke(event(records), AMPLE).await.failures();
            answers.push((failures, outcomes_since(&function, before)));
        }
        told.push((answers, sink.attempts().into_iter().collect::<BTreeSet<_>>()));
    }
    assert_eq!(told[0], told[1]);
    assert!(told[0].0.iter().flat_map(|(_, outcomes)| outcomes).any(|(_, outcome)| outcome == "replayed"));
}

/// Message and outcome of each line after the first so many.
fn outcomes_since(function: &Function, lines: usize) -> BTreeSet<(String, String)> {
    let text = |line: &Value, name: &str| line[name].as_str().map(str::to_owned);
    let log = function.log().split_off(lines);
    log.iter().filter_map(|line| Some((text(line, "message_id")?, text(line, "outcome")?))).collect()
}
