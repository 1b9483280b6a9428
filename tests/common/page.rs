//! Pages under `docs/` of which tests write a part, and are held to it ever after.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

const END: &str = "<!-- The end of what is written. -->";

/// Compares what the test `author` found with what a page says; `UPDATE_DOCS=1` writes it
/// there. The page's path is from the package's own folder.
pub fn compare(page: &str, author: &str, found: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(&path).unwrap().replace("\r\n", "\n");
    let begin = format!("<!-- Written by {author}. -->\n");
    let (head, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("{page} has no place for {author}"));
    let (written, tail) = rest.split_once(END).unwrap();
    let found = format!("\n{}\n\n", found.trim());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{head}{begin}{found}{END}{tail}")).unwrap();
    } else {
        assert!(
            written == found,
            "{page} says something else than what happened. If what happened is right, run {author} again with \
             UPDATE_DOCS=1. It was:\n{found}\nand the page says:\n{written}"
        );
    }
}
