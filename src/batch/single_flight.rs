//! One message per key at a time within this process.
//!
//! The store would keep two apart as well, but by refusing the second; here it waits and
//! then replays the first one's result.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// The keys that somebody in this process is at work on, or waits for.
#[derive(Debug, Default)]
pub(super) struct SingleFlight {
    keys: Mutex<HashMap<String, Arc<AsyncMutex<()>>>>,
}

impl SingleFlight {
    /// Waits until nobody else is at work on the key. First come, first served.
    pub(super) async fn enter(this: &Arc<Self>, key: &str) -> KeyGuard {
        let lock = {
            let mut keys = this.keys.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(keys.entry(key.to_owned()).or_default())
        };
        // Made before waiting: a wait that is cut off must clean up too.
        let mut guard = KeyGuard { flight: Arc::clone(this), key: key.to_owned(), held: None };
        guard.held = Some(lock.lock_owned().await);
        guard
    }
}

/// Being the one at work on a key.
#[derive(Debug)]
pub(super) struct KeyGuard {
    flight: Arc<SingleFlight>,
    key: String,
    held: Option<OwnedMutexGuard<()>>,
}

impl Drop for KeyGuard {
    fn drop(&mut self) {
        let mut keys = self.flight.keys.lock().unwrap_or_else(PoisonError::into_inner);
        self.held = None;
        // Only the map itself still knows it: nobody holds it or waits for it.
        if keys.get(&self.key).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            keys.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test]
    async fn the_second_waits_for_the_first_and_nothing_is_left_behind() {
        let flight = Arc::new(SingleFlight::default());
        let first = SingleFlight::enter(&flight, "a").await;
        let _other = SingleFlight::enter(&flight, "b").await;
        let mut second = Box::pin(SingleFlight::enter(&flight, "a"));
        assert!((&mut second).now_or_never().is_none());
        drop(first);
        drop(second.await);
        assert_eq!(flight.keys.lock().unwrap().keys().collect::<Vec<_>>(), ["b"]);
    }

    #[tokio::test]
    async fn a_third_waits_for_the_second_though_the_first_has_left() {
        let flight = Arc::new(SingleFlight::default());
        let first = SingleFlight::enter(&flight, "a").await;
        let mut second = Box::pin(SingleFlight::enter(&flight, "a"));
        assert!((&mut second).now_or_never().is_none());
        drop(first);
        let mut third = Box::pin(SingleFlight::enter(&flight, "a"));
        assert!((&mut third).now_or_never().is_none());
        drop(second.await);
        drop(third.await);
        assert!(flight.keys.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_wait_that_is_given_up_leaves_nothing_behind() {
        let flight = Arc::new(SingleFlight::default());
        let first = SingleFlight::enter(&flight, "a").await;
        let mut second = Box::pin(SingleFlight::enter(&flight, "a"));
        assert!((&mut second).now_or_never().is_none());
        drop(second);
        drop(first);
        assert!(flight.keys.lock().unwrap().is_empty());
    }
}
