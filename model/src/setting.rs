//! What is in a world, and what may go wrong in it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use idempotent_consumer::effect::Recovery;
use idempotent_consumer::record::Record;

/// A batch must be over so many seconds after it was delivered.
pub const TIME_LIMIT: u64 = 1;
/// A lease ends so long after that.
pub const LEASE_MARGIN: u64 = 1;
/// Clocks may differ by so much.
pub const CLOCK_SKEW: u64 = 1;
/// A delivered message is hidden for so long: enough for its claim to have lapsed by then,
/// whatever the clocks. (A real queue's is six times the function's time limit.)
pub const VISIBILITY_TIMEOUT: u64 = TIME_LIMIT + LEASE_MARGIN + 2 * CLOCK_SKEW + 1;

/// How an effect is made safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// It is claimed, applied at a target, and its result stored.
    Claimed(Recovery),
    /// It is committed in one transaction with its record.
    Transaction,
}

/// What a message carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Payload {
    /// What belongs to the key.
    Usual,
    /// Something else under the same key.
    Another,
    /// Nothing that a key could be read from.
    Poison,
}

/// A message that a producer sent, before the model begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sent {
    /// Its business key, by number.
    pub key: usize,
    /// Its group, by number.
    pub group: usize,
    /// What it carries.
    pub payload: Payload,
}

/// A message with what belongs to its key.
#[must_use]
pub const fn sent(key: usize, group: usize) -> Sent {
    Sent { key, group, payload: Payload::Usual }
}

/// What may go wrong. Each costs one of [`Setting::faults`] each time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A consumer dies, with or without a request of its own still on its way.
    Crash,
    /// A second passes while a consumer is at work.
    Slow,
    /// A consumer is frozen, as by a pause of its machine, and goes on at any later time.
    Sleep,
    /// A message is delivered although another consumer has it.
    EarlyDelivery,
    /// A write of a store is made and its answer lost.
    AnswerLost,
    /// A request to the store is lost, or refused as too many.
    RequestLost,
    /// A request to the store counts as lost, and arrives later.
    RequestLate,
    /// The effect fails before anything could have happened.
    EffectRefused,
    /// The effect says that it can never succeed.
    EffectPermanent,
    /// The effect is applied, and its answer lost.
    EffectAnswerLost,
    /// The effect is not applied, and nobody knows.
    EffectLost,
    /// The effect counts as failed, and is applied later.
    EffectLate,
    /// The target can't tell whether the effect was applied.
    VerifyUnsure,
    /// The target does not answer whether the effect was applied.
    VerifyFailed,
    /// A dead letter can't be sent.
    LetterLost,
}

/// Every kind of fault.
pub const EVERY_FAULT: &[Fault] = &[
    Fault::Crash,
    Fault::Slow,
    Fault::Sleep,
    Fault::EarlyDelivery,
    Fault::AnswerLost,
    Fault::RequestLost,
    Fault::RequestLate,
    Fault::EffectRefused,
    Fault::EffectPermanent,
    Fault::EffectAnswerLost,
    Fault::EffectLost,
    Fault::EffectLate,
    Fault::VerifyUnsure,
    Fault::VerifyFailed,
    Fault::LetterLost,
];

/// The guards of the protocol. Each can be removed, to see what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Guard {
    /// A write after the claim carries `owner = me AND attempt = mine`.
    Fence,
    /// A takeover writes only over exactly the claim that was seen.
    CompareAndSet,
    /// A running lease is left alone.
    Lease,
    /// A takeover waits longer by the clock skew.
    SkewMargin,
    /// An expired record counts as absent, deleted or not.
    Expiry,
    /// A record is remembered for as long as the queue may deliver its message.
    RetentionFloor,
    /// What is in flight is not acked.
    InFlightNotAcked,
    /// A message is acked only once its result is stored.
    ResultBeforeAck,
    /// The first message of a group that is not acked stops the group.
    GroupStop,
    /// Only a key's first claim is deleted when it is given back.
    ReleaseKeepsLaterClaims,
    /// With `verify` the lease of an attempt whose outcome is unknown runs its course.
    VerifyKeepsLease,
    /// Each message of a batch is read on its own.
    ReadAlone,
}

/// One world to explore.
#[derive(Debug, Clone)]
pub struct Setting {
    /// How the effect is made safe.
    pub path: Path,
    /// The messages in their queue, in the order sent.
    pub messages: Vec<Sent>,
    /// One consumer each, and the seconds by which its clock is ahead of the true time.
    pub clocks: Vec<u64>,
    /// Which faults may happen.
    pub kinds: &'static [Fault],
    /// How many of them may happen altogether.
    pub faults: u8,
    /// The queue's `maxReceiveCount`.
    pub max_receives: u8,
    /// Whether a request to the effect's target has arrived, if it ever does, by the end of
    /// the lease it was sent under. `verify` needs that; it is what `EFFECT_TIMEOUT_SECONDS`
    /// and the lease's margin are for.
    pub effects_end_with_their_lease: bool,
    /// Whether the target notes the attempt of whatever it is sent or asked, and refuses
    /// lower ones from then on.
    pub target_refuses_lower_attempts: bool,
    /// Records that stand in the store at the start.
    pub records: Vec<Record>,
    /// An operator resolves what was parked, by the truth, and has it delivered again.
    pub operator: bool,
    /// How often a message that was received too often is put back into its queue. If it is
    /// at all, being received too often is no failure.
    pub redrives: u8,
    /// Until when nobody may read the queue, as with a trigger that is disabled; 0 if
    /// somebody always does.
    pub unread_until: u64,
    /// The one guard that is removed.
    pub without: Option<Guard>,
    /// The outcomes that were reached, by name: a model that reaches none says nothing.
    pub reached: Reached,
}

/// Names, noted by whoever explores the model.
#[derive(Debug, Clone, Default)]
pub struct Reached(Arc<Mutex<BTreeSet<&'static str>>>);

impl Reached {
    /// Notes a name.
    pub fn note(&self, name: &'static str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name);
    }

    /// The names noted.
    #[must_use]
    pub fn names(&self) -> BTreeSet<&'static str> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Setting {
    /// A world with two consumers whose clocks agree, every kind of fault, and as many
    /// receives as so many faults may cost.
    #[must_use]
    pub fn new(path: Path, messages: &[Sent], faults: u8) -> Self {
        Self {
            path,
            messages: messages.to_vec(),
            clocks: vec![0, 0],
            kinds: EVERY_FAULT,
            faults,
            max_receives: 2 * faults + 2,
            effects_end_with_their_lease: true,
            target_refuses_lower_attempts: false,
            records: Vec::new(),
            operator: false,
            redrives: 0,
            unread_until: 0,
            without: None,
            reached: Reached::default(),
        }
    }

    /// The same with other clocks.
    #[must_use]
    pub fn clocks(mut self, ahead: &[u64]) -> Self {
        self.clocks = ahead.to_vec();
        self
    }

    /// The same with these records in the store.
    #[must_use]
    pub fn records(mut self, records: &[Record]) -> Self {
        self.records = records.to_vec();
        self
    }

    /// The same with a network that may keep an effect's request for longer than its lease.
    #[must_use]
    pub fn with_effects_of_any_age(mut self) -> Self {
        self.effects_end_with_their_lease = false;
        self
    }

    /// The same with a target that refuses lower attempts than it has seen.
    #[must_use]
    pub fn with_a_target_that_fences(mut self) -> Self {
        self.target_refuses_lower_attempts = true;
        self
    }

    /// The same with an operator.
    #[must_use]
    pub fn with_operator(mut self) -> Self {
        self.operator = true;
        self
    }

    /// The same with no more receives than these, and what was received too often put back.
    #[must_use]
    pub fn with_few_receives(mut self, receives: u8, redrives: u8) -> Self {
        self.max_receives = receives;
        self.redrives = redrives;
        self
    }

    /// The same with a queue that may go unread for so long.
    #[must_use]
    pub fn unread_until(mut self, seconds: u64) -> Self {
        self.unread_until = seconds;
        self
    }

    /// The same with no other faults than these.
    #[must_use]
    pub fn kinds(mut self, kinds: &'static [Fault]) -> Self {
        self.kinds = kinds;
        self
    }

    /// The same without one guard.
    #[must_use]
    pub fn without(mut self, guard: Guard) -> Self {
        self.without = Some(guard);
        self
    }

    /// Whether a guard is in place.
    #[must_use]
    pub fn has(&self, guard: Guard) -> bool {
        self.without != Some(guard)
    }

    /// How many keys there are.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.messages.iter().map(|message| message.key + 1).max().unwrap_or_default()
    }

    /// How long a finished record is remembered, in seconds.
    #[must_use]
    pub fn retention(&self) -> u64 {
        if self.has(Guard::RetentionFloor) {
            VISIBILITY_TIMEOUT * u64::from(self.max_receives) + 2
        } else {
            VISIBILITY_TIMEOUT / 2
        }
    }
}
