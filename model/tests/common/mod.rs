//! What the tests share.
#![allow(dead_code, unreachable_pub, missing_docs)]

#[path = "../../../tests/common/page.rs"]
mod page;
#[path = "../../../tests/common/proof.rs"]
pub mod proof;

/// Compares what a test found with the page about the protocol.
pub fn compare(author: &str, found: &str) {
    page::compare("../docs/protocol.md", author, found);
}
