//! Time: typed seconds and milliseconds, the clock, leases, retention, deadlines.
//!
//! The only file that reads a clock. Everything that decides takes `now` as an argument,
//! so that tests and the model choose it.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A point in time, whole seconds since the Unix epoch. DynamoDB's TTL counts in these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct EpochSeconds(u64);

impl EpochSeconds {
    /// The point `seconds` after the epoch.
    #[must_use]
    pub const fn new(seconds: u64) -> Self {
        Self(seconds)
    }

    /// Seconds since the epoch.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The end of the year 9999: for records that only a person may end.
    pub const FAR_FUTURE: Self = Self(253_402_300_799);

    /// The same point in milliseconds.
    #[must_use]
    pub const fn to_millis(self) -> EpochMillis {
        EpochMillis(self.0.saturating_mul(1000))
    }
}

/// A point in time, milliseconds since the Unix epoch. Leases count in these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct EpochMillis(u64);

impl EpochMillis {
    /// The point `millis` milliseconds after the epoch.
    #[must_use]
    pub const fn new(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the epoch.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The second this point lies in.
    #[must_use]
    pub const fn to_seconds(self) -> EpochSeconds {
        EpochSeconds(self.0 / 1000)
    }

    /// This point, `duration` later.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(whole_millis(duration)))
    }

    /// This point, `duration` earlier; never before the epoch.
    #[must_use]
    pub fn minus(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(whole_millis(duration)))
    }

    /// How long after `earlier` this is; zero if it is not.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

fn whole_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// As RFC 3339 in UTC, `2030-03-17T17:46:40.000Z`.
impl fmt::Display for EpochMillis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self > EpochSeconds::FAR_FUTURE.to_millis() {
            return f.write_str("(never)");
        }
        let (days, of_day) = (self.0 / 86_400_000, self.0 % 86_400_000);
        let (year, month, day) = civil_date(days);
        let (hour, minute, second, milli) =
            (of_day / 3_600_000, of_day / 60_000 % 60, of_day / 1000 % 60, of_day % 1000);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
    }
}

/// Year, month and day of the `days`-th day since 1970-01-01, in the Gregorian calendar.
///
/// Counts from 0000-03-01, so that the leap day is the last of a year, in cycles of 400
/// years, which all have the same number of days.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (cycle, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (cycle * 400 + year + next_year, month, day_of_month)
}

/// Where "now" comes from.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The wall clock.
    fn now(&self) -> EpochMillis;
}

/// The machine's wall clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[allow(clippy::disallowed_methods)] // the one place that may
    fn now(&self) -> EpochMillis {
        // A clock before 1970 counts as 1970: leases then look alive, which is the safe side.
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        EpochMillis(whole_millis(since_epoch))
    }
}

/// A clock that only moves when told to.
#[cfg(any(test, feature = "test-util"))]
#[derive(Debug)]
pub struct ManualClock(std::sync::atomic::AtomicU64);

#[cfg(any(test, feature = "test-util"))]
impl ManualClock {
    /// A clock that stands at `now`.
    #[must_use]
    pub const fn new(now: EpochMillis) -> Self {
        Self(std::sync::atomic::AtomicU64::new(now.0))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(whole_millis(by), std::sync::atomic::Ordering::SeqCst);
    }
}

#[cfg(any(test, feature = "test-util"))]
impl Clock for ManualClock {
    fn now(&self) -> EpochMillis {
        EpochMillis(self.0.load(std::sync::atomic::Ordering::SeqCst))
    }
}

/// How long a claim holds: until then nobody else may take the key over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease(EpochMillis);

impl Lease {
    /// A lease that its owner gave up. It lies at the epoch, so it has lapsed by
    /// anybody's clock.
    pub const GIVEN_UP: Self = Self(EpochMillis(0));

    /// A lease that ends at `end`.
    #[must_use]
    pub const fn until(end: EpochMillis) -> Self {
        Self(end)
    }

    /// When the lease ends.
    #[must_use]
    pub const fn end(self) -> EpochMillis {
        self.0
    }

    /// Whether the lease is over beyond doubt: `margin` is how far two clocks may
    /// differ.
    #[must_use]
    pub fn has_lapsed(self, now: EpochMillis, margin: Duration) -> bool {
        self.0.plus(margin) < now
    }
}

/// How long a finished record is remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Retention(u64);

/// The longest retention accepted, a hundred years of seconds: more is a mistake in the
/// unit.
const MAX_RETENTION_SECONDS: u64 = 100 * 366 * 24 * 60 * 60;

/// A retention that can't be meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetentionError {
    /// Zero: a duplicate would never be recognised.
    #[error("a retention of zero seconds recognises no duplicate: give a positive number of seconds")]
    Zero,
    /// More than a hundred years, or beyond what a number holds.
    #[error("a retention of more than 100 years can't be meant: are the values in seconds?")]
    TooLong,
}

impl Retention {
    /// A retention of that many seconds.
    pub const fn from_seconds(seconds: u64) -> Result<Self, RetentionError> {
        match seconds {
            0 => Err(RetentionError::Zero),
            s if s > MAX_RETENTION_SECONDS => Err(RetentionError::TooLong),
            s => Ok(Self(s)),
        }
    }

    /// The floor for a queue, `visibility timeout x max receives + buffer`: as long as
    /// the queue may still hand the message out, and the buffer longer.
    pub fn for_queue(
        visibility_timeout_seconds: u64,
        max_receive_count: u32,
        buffer_seconds: u64,
    ) -> Result<Self, RetentionError> {
        visibility_timeout_seconds
            .checked_mul(u64::from(max_receive_count))
            .and_then(|window| window.checked_add(buffer_seconds))
            .ok_or(RetentionError::TooLong)
            .and_then(Self::from_seconds)
    }

    /// The length in seconds.
    #[must_use]
    pub const fn seconds(self) -> u64 {
        self.0
    }

    /// When a record written at `now` is forgotten.
    #[must_use]
    pub const fn expiry(self, now: EpochMillis) -> EpochSeconds {
        EpochSeconds(now.to_seconds().0.saturating_add(self.0))
    }
}

/// A deadline further away than a year is waited for as long as one in a year: timers end
/// somewhere.
const LONGEST_WAIT: Duration = Duration::from_hours(8_760);

/// When the work at hand must be over, on the wall clock (for leases) and on the
/// runtime's timer (for waiting).
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    wall: EpochMillis,
    timer: tokio::time::Instant,
}

impl Deadline {
    /// The deadline at `wall`, by that clock.
    #[must_use]
    #[allow(clippy::disallowed_methods)] // the timer half of the clock
    pub fn at(wall: EpochMillis, clock: &dyn Clock) -> Self {
        let remaining = wall.since(clock.now()).min(LONGEST_WAIT);
        Self { wall, timer: tokio::time::Instant::now() + remaining }
    }

    /// The deadline `duration` from now.
    #[must_use]
    pub fn after(duration: Duration, clock: &dyn Clock) -> Self {
        Self::at(clock.now().plus(duration), clock)
    }

    /// This deadline, `duration` earlier.
    #[must_use]
    pub fn earlier(self, duration: Duration) -> Self {
        Self { wall: self.wall.minus(duration), timer: self.timer.checked_sub(duration).unwrap_or(self.timer) }
    }

    /// The point on the wall clock.
    #[must_use]
    pub const fn wall(self) -> EpochMillis {
        self.wall
    }

    /// Time left; zero once it has passed.
    #[must_use]
    #[allow(clippy::disallowed_methods)]
    pub fn remaining(self) -> Duration {
        self.timer.saturating_duration_since(tokio::time::Instant::now())
    }

    /// Runs `future` to its end, or drops it at the deadline (`None`).
    pub async fn limit<F: Future>(self, future: F) -> Option<F::Output> {
        tokio::time::timeout_at(self.timer, future).await.ok()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn retention_is_the_window_plus_the_buffer() {
        assert_eq!(Retention::for_queue(180, 5, 86_400).unwrap().seconds(), 87_300);
    }

    #[test]
    fn retention_refuses_zero_and_overflow() {
        assert_eq!(Retention::for_queue(0, 5, 0), Err(RetentionError::Zero));
        assert_eq!(Retention::for_queue(u64::MAX, 2, 0), Err(RetentionError::TooLong));
        assert_eq!(Retention::for_queue(u64::MAX, 1, 1), Err(RetentionError::TooLong));
        // Milliseconds given for seconds.
        assert_eq!(Retention::for_queue(180_000_000_000, 5, 0), Err(RetentionError::TooLong));
    }

    #[test]
    fn a_retention_is_at_most_a_hundred_years() {
        let longest = 3_162_240_000;
        assert_eq!(Retention::from_seconds(longest).unwrap().seconds(), longest);
        assert_eq!(Retention::from_seconds(longest + 1), Err(RetentionError::TooLong));
    }

    #[test]
    fn a_lease_lapses_only_after_the_margin() {
        let lease = Lease::until(EpochMillis::new(10_000));
        let margin = Duration::from_secs(1);
        assert!(!lease.has_lapsed(EpochMillis::new(10_500), margin));
        assert!(!lease.has_lapsed(EpochMillis::new(11_000), margin));
        assert!(lease.has_lapsed(EpochMillis::new(11_001), margin));
    }

    #[test]
    fn a_lease_given_up_has_lapsed_whatever_the_margin() {
        assert!(Lease::GIVEN_UP.has_lapsed(SystemClock.now(), Duration::from_hours(1)));
    }

    #[test]
    fn points_in_time_are_shown_as_dates() {
        // From `date -u -d @SECONDS +%FT%T`.
        let cases = [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_800_000, "2000-03-01T00:00:00.000Z"),
            (1_900_000_000_123, "2030-03-17T17:46:40.123Z"),
            (4_107_542_399_999, "2100-02-28T23:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
            (1_709_251_199_000, "2024-02-29T23:59:59.000Z"),
            (1_735_689_599_000, "2024-12-31T23:59:59.000Z"),
            (253_402_300_799_000, "9999-12-31T23:59:59.000Z"),
            (u64::MAX, "(never)"),
        ];
        for (millis, text) in cases {
            assert_eq!(EpochMillis::new(millis).to_string(), text);
        }
    }

    #[test]
    fn every_day_of_the_next_centuries_is_shown_as_the_calendar_has_it() {
        let mut day = 0;
        for year in 1970..2110 {
            let february = 28 + u64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
            for (month, days) in (1..).zip([31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]) {
                for day_of_month in 1..=days {
                    let shown = EpochMillis::new(day * 86_400_000).to_string();
                    assert_eq!(shown, format!("{year}-{month:02}-{day_of_month:02}T00:00:00.000Z"));
                    day += 1;
                }
            }
        }
    }

    #[test]
    fn seconds_and_milliseconds_convert_without_wrapping() {
        assert_eq!(EpochSeconds::new(u64::MAX).to_millis().get(), u64::MAX);
        assert_eq!(EpochMillis::new(1_999).to_seconds().get(), 1);
        assert_eq!(EpochMillis::new(1_999).minus(Duration::from_secs(1)).get(), 999);
        assert_eq!(EpochMillis::new(5).minus(Duration::from_secs(1)).get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_drops_what_runs_over_it() {
        let clock = ManualClock::new(EpochMillis::new(1_000_000));
        let deadline = Deadline::after(Duration::from_secs(2), &clock);
        assert_eq!(deadline.wall().get(), 1_002_000);
        assert_eq!(deadline.limit(std::future::pending::<()>()).await, None);
        assert_eq!(deadline.remaining(), Duration::ZERO);
        assert_eq!(deadline.limit(std::future::ready(7)).await, Some(7), "what is ready counts");
    }

    #[tokio::test(start_paused = true)]
    async fn a_deadline_may_be_as_far_away_as_can_be_written() {
        let clock = ManualClock::new(EpochMillis::new(1_000_000));
        let deadline = Deadline::at(EpochMillis::new(u64::MAX), &clock);
        assert_eq!(deadline.wall().get(), u64::MAX);
        assert_eq!(deadline.remaining(), LONGEST_WAIT);
        assert_eq!(deadline.earlier(LONGEST_WAIT).limit(std::future::pending::<()>()).await, None);
    }
}
