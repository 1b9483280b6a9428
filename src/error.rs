//! Errors of any kind, and how to show one with its causes.

use std::error::Error as StdError;
use std::fmt;

/// A boxed error of any kind.
pub type BoxError = Box<dyn StdError + Send + Sync + 'static>;

/// An error with all that caused it, on one line.
#[derive(Debug, Clone, Copy)]
pub struct ErrorChain<'a>(pub &'a (dyn StdError + 'static));

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = self.0.to_string();
        f.write_str(&last)?;
        let mut next = self.0.source();
        while let Some(error) = next {
            let text = error.to_string();
            // Many errors repeat their source in their own text.
            if !last.contains(&text) {
                write!(f, ": {text}")?;
            }
            last = text;
            next = error.source();
        }
        Ok(())
    }
}
