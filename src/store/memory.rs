//! Records in the memory of this process: for tests, and as the plainest reading of the
//! [`Store`] contract. It outlives nothing, so it protects nothing.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::{BoxFuture, ClaimOutcome, FencedOutcome, Store, StoreError};
use crate::record::{self, Claim, ClaimRequest, Completion, Parking, Record, RecordId, Released};
use crate::time::Lease;

/// The same limit as a DynamoDB item's, so that tests meet it too.
const MAX_RESULT_BYTES: usize = 392 * 1024;

/// Records in a map.
#[derive(Debug, Default)]
pub struct MemoryStore {
    records: Mutex<HashMap<RecordId, Record>>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes a record as it is, whatever stood there: to set a test's scene.
    pub fn insert(&self, record: Record) {
        self.with(|records| records.insert(record.id.clone(), record));
    }

    fn with<T>(&self, change: impl FnOnce(&mut HashMap<RecordId, Record>) -> T) -> T {
        // A panic elsewhere can't leave a map half written.
        change(&mut self.records.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn write_claim(
        &self,
        request: &ClaimRequest,
        next: impl FnOnce(Option<&Record>) -> Option<Record>,
    ) -> ClaimOutcome {
        self.with(|records| {
            let current = records.get(&request.id);
            match (next(current), current) {
                (Some(record), _) => {
                    let claim = request.to_claim(record.attempt);
                    records.insert(record.id.clone(), record);
                    ClaimOutcome::Won(claim)
                }
                (None, Some(current)) => ClaimOutcome::Lost(Box::new(current.clone())),
                (None, None) => ClaimOutcome::Gone,
            }
        })
    }

    fn write_fenced(&self, id: &RecordId, next: impl FnOnce(Option<&Record>) -> Option<Record>) -> FencedOutcome {
        self.with(|records| match next(records.get(id)) {
            Some(record) => {
                records.insert(id.clone(), record);
                FencedOutcome::Applied
            }
            None => FencedOutcome::Fenced,
        })
    }
}

fn ready<'a, T: Send + 'a>(value: T) -> BoxFuture<'a, Result<T, StoreError>> {
    Box::pin(std::future::ready(Ok(value)))
}

impl Store for MemoryStore {
    fn claim<'a>(&'a self, request: &'a ClaimRequest) -> BoxFuture<'a, Result<ClaimOutcome, StoreError>> {
        ready(self.write_claim(request, |current| record::claim(current, request)))
    }

    fn take_over<'a>(
        &'a self,
        seen: &'a Record,
        request: &'a ClaimRequest,
    ) -> BoxFuture<'a, Result<ClaimOutcome, StoreError>> {
        ready(self.write_claim(request, |current| record::take_over(current, seen, request)))
    }

    fn complete<'a>(
        &'a self,
        claim: &'a Claim,
        completion: &'a Completion,
    ) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        ready(self.write_fenced(&claim.id, |current| record::complete(current, claim, completion)))
    }

    fn park<'a>(&'a self, claim: &'a Claim, parking: &'a Parking) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        ready(self.write_fenced(&claim.id, |current| record::park(current, claim, parking)))
    }

    fn set_lease<'a>(&'a self, claim: &'a Claim, lease: Lease) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        ready(self.write_fenced(&claim.id, |current| record::set_lease(current, claim, lease)))
    }

    fn release<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<FencedOutcome, StoreError>> {
        ready(self.with(|records| match record::release(records.get(&claim.id), claim) {
            Some(Released::Removed) => {
                records.remove(&claim.id);
                FencedOutcome::Applied
            }
            Some(Released::Kept(record)) => {
                records.insert(claim.id.clone(), record);
                FencedOutcome::Applied
            }
            None => FencedOutcome::Fenced,
        }))
    }

    fn load<'a>(&'a self, id: &'a RecordId) -> BoxFuture<'a, Result<Option<Record>, StoreError>> {
        ready(self.with(|records| records.get(id).cloned()))
    }

    fn warm_up(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        ready(())
    }

    fn holds(&self, result: &str) -> bool {
        result.len() <= MAX_RESULT_BYTES
    }
}
