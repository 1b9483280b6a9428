//! The whole function: settings, table, warm-up, and the runtime's loop.

use std::process::ExitCode;
use std::sync::Arc;

use lambda_runtime::{LambdaEvent, service_fn};
use serde_json::value::RawValue;

use crate::batch::Batch;
use crate::config::{ConfigError, Environment, FunctionConfig, Queues};
use crate::consumer::{Consume, Consumer, TransactionalConsumer};
use crate::effect::Effect;
use crate::effect::transactional::TransactionalEffect;
use crate::error::ErrorChain;
use crate::source::back_off::BackOff;
use crate::source::{SourceSettings, sqs_lambda};
use crate::store::dynamodb::DynamoDbStore;
use crate::store::{Store, StoreError, StoreErrorKind};
use crate::telemetry;

/// The function could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// Its settings are wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its table refuses it: no such table, or no permission.
    #[error("the table can't be used")]
    Table(#[source] StoreError),
    /// This is not a Lambda execution environment.
    #[error(
        "AWS_LAMBDA_RUNTIME_API is not set: this program is a Lambda function's bootstrap; to try it on a machine of \
         your own use `cargo lambda watch`"
    )]
    NotLambda,
}

/// Runs a function's future on a Tokio runtime that suits where it runs: one thread on an
/// ordinary function, which has about one core and one invocation at a time; a thread per
/// core where Lambda Managed Instances send several invocations at once
/// (`AWS_LAMBDA_MAX_CONCURRENCY`).
pub fn block_on(function: impl Future<Output = ExitCode>) -> ExitCode {
    let invocations: usize =
        std::env::var("AWS_LAMBDA_MAX_CONCURRENCY").ok().and_then(|number| number.parse().ok()).unwrap_or(1);
    let mut runtime = if invocations > 1 {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    match runtime.enable_all().build() {
        Ok(runtime) => runtime.block_on(function),
        Err(error) => {
            telemetry::init(|name| std::env::var(name).ok());
            tracing::error!(error = %ErrorChain(&error), "no threads or no file handles for the Tokio runtime");
            ExitCode::FAILURE
        }
    }
}

/// Runs an effect as a Lambda function that an SQS queue triggers: a program's whole
/// `main`.
///
/// ```no_run
/// # use idempotent_consumer::effect::{Attempt, Effect, EffectError, Recovery};
/// # struct Ship;
/// # impl Effect for Ship {
/// #     type Input = ();
/// #     type Output = ();
/// #     fn recovery(&self) -> Recovery { Recovery::Park }
/// #     async fn apply(&self, _: &(), _: &Attempt<'_>) -> Result<(), EffectError> { Ok(()) }
/// # }
/// fn main() -> std::process::ExitCode {
///     idempotent_consumer::block_on(idempotent_consumer::run(Ship))
/// }
/// ```
///
/// Settings come from the environment ([`FunctionConfig::from_env`]). What is wrong with
/// them is reported through the runtime's init error, so that it stands in the function's
/// log and in the answer to whoever invokes it.
pub async fn run<E: Effect>(effect: E) -> ExitCode {
    run_with(|_| Some(effect)).await
}

/// Like [`run`], for an effect that reads settings of its own. What it finds wrong it
/// notes in the [`Environment`], and returns `None`.
pub async fn run_with<E: Effect>(effect: impl FnOnce(&mut Environment<'_>) -> Option<E>) -> ExitCode {
    // Boxed, here and below: some twenty kilobytes that whoever awaits this need not carry.
    Box::pin(serve(async {
        let (config, effect) = settings(effect)?;
        let store = Arc::new(table(&config).await?);
        let batch = Batch::new(Consumer::new(effect, store, config.consumer), config.batch);
        Ok(with_queues(batch, config.source, config.queues).await)
    }))
    .await
}

/// Like [`run`], for an effect that is a list of writes to DynamoDB, committed together
/// with the record.
pub async fn run_transactional<E: TransactionalEffect>(effect: E) -> ExitCode {
    run_transactional_with(|_| Some(effect)).await
}

/// Like [`run_transactional`], for an effect that reads settings of its own.
pub async fn run_transactional_with<E: TransactionalEffect>(
    effect: impl FnOnce(&mut Environment<'_>) -> Option<E>,
) -> ExitCode {
    Box::pin(serve(async {
        let (config, effect) = settings(effect)?;
        let store = table(&config).await?;
        let batch = Batch::new(TransactionalConsumer::new(effect, store, config.consumer), config.batch);
        Ok(with_queues(batch, config.source, config.queues).await)
    }))
    .await
}

/// How messages are read, processed, and brought back when they failed.
struct Work<C> {
    source: SourceSettings,
    batch: Batch<C>,
    back_off: Option<BackOff>,
}

/// Adds what calls SQS. The client is made only if it is needed.
#[cfg(feature = "sqs")]
async fn with_queues<C: Consume>(batch: Batch<C>, source: SourceSettings, queues: Queues) -> Work<C> {
    use crate::dead_letter::sqs::SqsDeadLetterQueue;
    use crate::source::back_off::sqs::SqsVisibility;

    if queues == Queues::default() {
        return Work { source, batch, back_off: None };
    }
    let client = crate::sqs::client_from_env().await;
    let back_off = queues
        .back_off
        .map(|(url, settings)| BackOff::new(settings, Arc::new(SqsVisibility::new(client.clone(), url))));
    let batch = match queues.dead_letters {
        Some(url) => batch.with_dead_letters(Arc::new(SqsDeadLetterQueue::new(client, url))),
        None => batch,
    };
    Work { source, batch, back_off }
}

/// Without the feature their settings are refused.
#[cfg(not(feature = "sqs"))]
#[allow(clippy::unused_async)] // as the one with the feature
async fn with_queues<C: Consume>(batch: Batch<C>, source: SourceSettings, _: Queues) -> Work<C> {
    Work { source, batch, back_off: None }
}

/// Starts, and then handles invocations for as long as there are any.
async fn serve<C: Consume>(init: impl Future<Output = Result<Work<C>, InitError>>) -> ExitCode {
    telemetry::init(|name| std::env::var(name).ok());
    // A panic in an effect is caught and costs one message; its text belongs in the log,
    // as a line like any other.
    if cfg!(panic = "abort") {
        tracing::warn!(
            "built with `panic = \"abort\"`: a panic in an effect ends the process and with it its whole batch"
        );
    }
    std::panic::set_hook(Box::new(|panic| tracing::error!(panic = %panic, "a panic")));
    let work = match init.await {
        Ok(work) => Arc::new(work),
        Err(error) => {
            tracing::error!(error = %ErrorChain(&error), "the function can't start");
            report(&error).await;
            return ExitCode::FAILURE;
        }
    };
    let handler = service_fn(move |event: LambdaEvent<Box<RawValue>>| {
        let work = Arc::clone(&work);
        async move { sqs_lambda::handle(&work.batch, &work.source, work.back_off.as_ref(), event).await }
    });
    // One invocation at a time on ordinary functions, several on Managed Instances.
    match lambda_runtime::run_concurrent(handler).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = %ErrorChain(&*error), "the runtime stopped");
            ExitCode::FAILURE
        }
    }
}

fn settings<E>(effect: impl FnOnce(&mut Environment<'_>) -> Option<E>) -> Result<(FunctionConfig, E), InitError> {
    if std::env::var_os("AWS_LAMBDA_RUNTIME_API").is_none() {
        return Err(InitError::NotLambda);
    }
    let mut env = Environment::of_process();
    let config = FunctionConfig::from_env(&mut env);
    let effect = effect(&mut env);
    Ok(env.finish(config.zip(effect))?)
}

async fn table(config: &FunctionConfig) -> Result<DynamoDbStore, InitError> {
    let store = DynamoDbStore::new(DynamoDbStore::client_from_env().await, config.table.clone());
    match store.warm_up().await {
        Ok(()) => {}
        Err(error) if error.kind() == StoreErrorKind::Unavailable => {
            tracing::warn!(error = %ErrorChain(&error), "the table does not answer yet");
        }
        Err(error) => return Err(InitError::Table(error)),
    }
    Ok(store)
}

/// Tells Lambda why the function can't start.
async fn report(error: &InitError) {
    if matches!(error, InitError::NotLambda) {
        return;
    }
    let error_type = match error {
        InitError::Config(_) => "InvalidConfiguration",
        _ => "TableUnusable",
    };
    let body = serde_json::json!({
        "errorType": error_type,
        "errorMessage": ErrorChain(error).to_string(),
        "stackTrace": [],
    });
    let request = http::Request::post("/2018-06-01/runtime/init/error")
        .header("content-type", "application/json")
        .header("lambda-runtime-function-error-type", format!("Runtime.{error_type}"))
        .body(lambda_runtime_api_client::body::Body::from(body.to_string()));
    let answer = match request {
        Ok(request) => lambda_runtime_api_client::PooledClient::builder().build().call(request).await.map(drop),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = answer {
        tracing::error!(error = %ErrorChain(&*error), "Lambda could not be told");
    }
}
