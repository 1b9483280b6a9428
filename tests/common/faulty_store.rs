//! A store in memory whose calls can be made to fail, with or without having worked.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use idempotent_consumer::record::{Claim, ClaimRequest, Completion, Parking, Record, RecordId};
use idempotent_consumer::store::memory::MemoryStore;
use idempotent_consumer::store::{BoxFuture, ClaimOutcome, FencedOutcome, Store, StoreError, StoreErrorKind};
use idempotent_consumer::time::Lease;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Claim,
    TakeOver,
    Complete,
    Park,
    SetLease,
    Release,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The call never arrives.
    NotSent(StoreErrorKind),
    /// The call works, and its answer is lost.
    AnswerLost,
    /// The call never ends.
    Hangs,
}

#[derive(Debug, Default)]
pub struct FaultyStore {
    pub memory: MemoryStore,
    faults: Mutex<Vec<(Call, VecDeque<Fault>)>>,
    always: Mutex<Option<Fault>>,
    calls: AtomicUsize,
    log: Mutex<Vec<(Call, String)>>,
}

impl FaultyStore {
    /// The next calls of that kind fail so, one after the other.
    pub fn fail(&self, call: Call, faults: impl IntoIterator<Item = Fault>) {
        self.faults.lock().unwrap().push((call, faults.into_iter().collect()));
    }

    /// From now on every call fails so, or none.
    pub fn fail_always(&self, fault: Option<Fault>) {
        *self.always.lock().unwrap() = fault;
    }

    /// How many calls were made.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// The calls made, with the id each was about.
    pub fn log(&self) -> Vec<(Call, String)> {
        self.log.lock().unwrap().clone()
    }

    fn next_fault(&self, call: Call) -> Option<Fault> {
        if let Some(fault) = *self.always.lock().unwrap() {
            return Some(fault);
        }
        let mut faults = self.faults.lock().unwrap();
        faults.iter_mut().find_map(|(kind, queue)| if *kind == call { queue.pop_front() } else { None })
    }

    async fn through<T>(
        &self,
        call: Call,
        id: &RecordId,
        inner: BoxFuture<'_, Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.log.lock().unwrap().push((call, id.as_str().to_owned()));
        // One turn of the executor, as any network call takes at least.
        tokio::task::yield_now().await;
        match self.next_fault(call) {
            None => inner.await,
            Some(Fault::NotSent(kind)) => Err(StoreError::new(kind, "made to fail")),
            Some(Fault::AnswerLost) => {
                inner.await?;
                Err(StoreError::new(StoreErrorKind::Unavailable, "the answer was lost"))
            }
            Some(Fault::Hangs) => std::future::pending().await,
        }
    }
}

impl Store for FaultyStore {
    fn claim<'a>(&'a self, request: &'a ClaimRequest) -> BoxFuture<'a, Result<ClaimOutcome, StoreError>> {
        Box::pin(self.through(Call::Claim, &request.id, lazy(|| self.memory.claim(request))))
    }

    fn take_over<'a>(
        &'a self,
        seen: &'a Record,
        request: &'a ClaimRequest,
    ) -> BoxFuture<'a, Result<ClaimOutcome, StoreError>> {
        Box::pin(self.through(Call::TakeOver, &request.id, lazy(|| self.memory.take_over(seen, request))))
    }

    fn complete<'a>(
        &'a self,
        claim: &'a Claim,
        completion: &'a Completion,
    ) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        Box::pin(self.through(Call::Complete, &claim.id, lazy(|| self.memory.complete(claim, completion))))
    }

    fn park<'a>(&'a self, claim: &'a Claim, parking: &'a Parking) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        Box::pin(self.through(Call::Park, &claim.id, lazy(|| self.memory.park(claim, parking))))
    }

    fn set_lease<'a>(&'a self, claim: &'a Claim, lease: Lease) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        Box::pin(self.through(Call::SetLease, &claim.id, lazy(move || self.memory.set_lease(claim, lease))))
    }

    fn release<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        Box::pin(self.through(Call::Release, &claim.id, lazy(|| self.memory.release(claim))))
    }

    fn load<'a>(&'a self, id: &'a RecordId) -> BoxFuture<'a, Result<Option<Record>, StoreError>> {
        self.memory.load(id)
    }

    fn warm_up(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        self.memory.warm_up()
    }

    fn holds(&self, result: &str) -> bool {
        self.memory.holds(result)
    }
}

/// The memory store works when it is called; this puts the call off until it is awaited.
fn lazy<'a, T: Send + 'a>(
    call: impl FnOnce() -> BoxFuture<'a, Result<T, StoreError>> + Send + 'a,
) -> BoxFuture<'a, Result<T, StoreError>> {
    Box::pin(async move { call().await })
}
