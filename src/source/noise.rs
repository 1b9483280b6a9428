//! Noise: messages that a service sends to a queue on its own account, and that are none
//! of the sender's.
//!
//! They have no key, so they are rejected like anything without one, and end in the
//! dead-letter queue, where someone sees them. Whoever knows them better names them in an
//! [`IgnoreList`]; then they are acked, with a line in the log. Only the exact shape that
//! the service documents counts: nothing else is lost by it.

use std::fmt::{self, Write as _};
use std::str::FromStr;

use crate::json::Json;

/// A kind of noise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Noise {
    /// `s3:TestEvent`: S3 tries the queue (or the topic before it) when a bucket's
    /// notifications are set up. An object of exactly the strings `Service`, which is
    /// `Amazon S3`, `Event`, which is `s3:TestEvent`, `Time`, `Bucket`, `RequestId` and
    /// `HostId`.
    S3TestEvent,
}

impl Noise {
    const ALL: [Self; 1] = [Self::S3TestEvent];

    /// Its name in an [`IgnoreList`].
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::S3TestEvent => "s3:TestEvent",
        }
    }

    fn is(self, body: &str) -> bool {
        match self {
            Self::S3TestEvent => is_s3_test_event(body),
        }
    }
}

fn is_s3_test_event(body: &str) -> bool {
    const MEMBERS: [&str; 6] = ["Bucket", "Event", "HostId", "RequestId", "Service", "Time"];
    // Nearly every body is something else, and need not be read for this.
    if !body.contains("s3:TestEvent") {
        return false;
    }
    let Ok(Json::Object(members)) = Json::parse(body) else {
        return false;
    };
    let is = |name: &str, text: &str| matches!(members.get(name), Some(Json::String(found)) if found == text);
    members.keys().eq(MEMBERS)
        && members.values().all(|value| matches!(value, Json::String(_)))
        && is("Service", "Amazon S3")
        && is("Event", "s3:TestEvent")
}

/// Noise that is to be acked; the setting `IGNORE_MESSAGES`. Written as names with commas
/// between them, such as `s3:TestEvent`; nothing is ignored by default.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct IgnoreList(Vec<Noise>);

impl IgnoreList {
    /// The noise that a body is, if it is to be ignored.
    #[must_use]
    pub fn find(&self, body: &str) -> Option<Noise> {
        self.0.iter().copied().find(|noise| noise.is(body))
    }
}

impl FromIterator<Noise> for IgnoreList {
    fn from_iter<T: IntoIterator<Item = Noise>>(noise: T) -> Self {
        Self(noise.into_iter().collect())
    }
}

impl FromStr for IgnoreList {
    type Err = UnknownNoise;

    fn from_str(text: &str) -> Result<Self, UnknownNoise> {
        text.split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(|name| {
                Noise::ALL.into_iter().find(|noise| noise.name() == name).ok_or_else(|| UnknownNoise(name.to_owned()))
            })
            .collect()
    }
}

impl fmt::Display for IgnoreList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, noise) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_char(',')?;
            }
            f.write_str(noise.name())?;
        }
        Ok(())
    }
}

/// Noise by no such name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no known noise: there is `s3:TestEvent`")]
pub struct UnknownNoise(pub String);
