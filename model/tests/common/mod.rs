//! What the tests share.
#![allow(dead_code, unreachable_pub, missing_docs)]

#[path = "../../../tests/common/page.rs"]
mod page;
#[path = "../../../tests/common/proof.rs"]
pub mod proof;

use idempotent_consumer::effect::Recovery;
use idempotent_consumer::record::{Record, RecordId, State};
use idempotent_consumer::time::EpochSeconds;
use idempotent_consumer_model::setting::Path;

pub const RERUN: Path = Path::Claimed(Recovery::Rerun);
pub const VERIFY: Path = Path::Claimed(Recovery::Verify);
pub const PARK: Path = Path::Claimed(Recovery::Park);

/// A claim without a lease, written by other software whose process died.
pub fn leaseless(expires: u64) -> Record {
    Record {
        id: RecordId::new("0"),
        state: State::InProgress { owner: None, lease: None },
        attempt: 1,
        expires: EpochSeconds::new(expires),
        fingerprint: None,
        message_id: None,
        claimed_at: None,
    }
}

/// Compares what a test found with the page about the protocol.
pub fn compare(author: &str, found: &str) {
    page::compare("../docs/protocol.md", author, found);
}
