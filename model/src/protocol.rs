//! What may happen next.

use std::collections::BTreeSet;

use idempotent_consumer::effect::Recovery;
use idempotent_consumer::record::Record;
use stateright::{Model, Property};

use crate::promises;
use crate::setting::{Fault, Path, Sent, Setting};
use crate::store::{Request, at};
use crate::turn::{Step, Turn};
use crate::world::{Place, Queued, Target, World};

/// Something that happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// A second passes.
    Tick,
    /// A consumer gets what waits in a group.
    Deliver {
        /// To whom.
        consumer: usize,
        /// Of which group.
        group: usize,
        /// Though it is hidden.
        early: bool,
    },
    /// A consumer's request meets the store.
    Exchange {
        /// Whose.
        consumer: usize,
        /// Whether it is the one made ahead.
        ahead: bool,
        /// What becomes of it.
        fate: Fate,
    },
    /// A consumer starts on the claim of the next message.
    WorkAhead(usize),
    /// The target is asked by a consumer about an earlier attempt.
    Verify(usize, Option<Fault>),
    /// A consumer applies its effect.
    Apply(usize, Option<Fault>),
    /// A consumer sends a dead letter, or fails to.
    HandOver(usize, bool),
    /// A consumer tells the queue about its batch.
    Tell(usize),
    /// A consumer dies.
    Crash(usize, Left),
    /// A consumer is frozen.
    Sleep(usize),
    /// A late request arrives at the store.
    LateRequest(usize),
    /// A late effect arrives at the target, or never does.
    LateEffect(usize, bool),
    /// The store deletes an expired record.
    Sweep(usize),
    /// An operator resolves a parked message, by the truth, and has it delivered again.
    Resolve(usize),
    /// A message that was received too often is put back into its queue.
    Redrive(usize),
}

/// A second passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tick {
    /// Nobody is at work.
    Quiet,
    /// Somebody is: a fault.
    Slow,
}

/// What becomes of a request to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is answered.
    Answered,
    /// It is carried out, its answer is lost; whether the consumer tries again.
    AnswerLost(bool),
    /// It is lost, and the consumer gives up.
    Lost,
    /// It counts as lost, and arrives later; whether the consumer tries again.
    Late(bool),
}

/// What a dead consumer has left on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// Its request to the store, or its effect.
    Current,
    /// The request that it had made ahead.
    Ahead,
    /// Either.
    Both,
}

impl Setting {
    fn allows(&self, world: &World, fault: Fault) -> bool {
        world.faults_left > 0 && self.kinds.contains(&fault)
    }

    /// Whether the target applies a key once, however often it is asked.
    pub(crate) fn deduplicates(&self) -> bool {
        self.path == Path::Claimed(Recovery::Rerun)
    }

    fn deliveries(&self, world: &World, actions: &mut Vec<Action>) {
        // Consumers whose clocks agree are the same, and so are groups with the same messages
        // that nobody has received: one of them stands for all.
        let mut tried = Vec::new();
        let content = |group| {
            let of_group = |(sent, _): &(&Sent, &Queued)| sent.group == group;
            let content = |(sent, message): (&Sent, &Queued)| (sent.key, sent.payload, message.receives);
            self.messages.iter().zip(&world.queue).filter(of_group).map(content).collect::<Vec<_>>()
        };
        let stands_for_another = |group: usize| {
            let mine = content(group);
            mine.iter().all(|(_, _, receives)| *receives == 0) && (0..group).any(|other| content(other) == mine)
        };
        for (consumer, (turn, clock)) in world.consumers.iter().zip(&self.clocks).enumerate() {
            if turn.is_some() || tried.contains(clock) {
                continue;
            }
            tried.push(*clock);
            for group in 0..=self.messages.iter().map(|sent| sent.group).max().unwrap_or_default() {
                let mut waiting = self
                    .messages
                    .iter()
                    .zip(&world.queue)
                    .filter(|(sent, message)| sent.group == group && message.place == Place::Waiting)
                    .map(|(_, message)| message)
                    .peekable();
                if waiting.peek().is_none() || stands_for_another(group) {
                    continue;
                }
                if waiting.all(|message| message.hidden_until <= world.now) {
                    actions.push(Action::Deliver { consumer, group, early: false });
                } else if self.allows(world, Fault::EarlyDelivery) {
                    actions.push(Action::Deliver { consumer, group, early: true });
                }
            }
        }
    }

    fn exchanges(&self, world: &World, consumer: usize, ahead: bool, request: &Request, actions: &mut Vec<Action>) {
        let mut exchange = |fate| actions.push(Action::Exchange { consumer, ahead, fate });
        exchange(Fate::Answered);
        let writes = || {
            let mut after = world.clone();
            after.serve(self, request);
            after.records != world.records
        };
        if self.allows(world, Fault::AnswerLost) && writes() {
            exchange(Fate::AnswerLost(true));
            exchange(Fate::AnswerLost(false));
        }
        if self.allows(world, Fault::RequestLost) {
            exchange(Fate::Lost);
        }
        if self.allows(world, Fault::RequestLate) {
            exchange(Fate::Late(true));
            exchange(Fate::Late(false));
        }
    }

    fn turn(&self, world: &World, consumer: usize, turn: &Turn, actions: &mut Vec<Action>) {
        if let Step::Store(request, _) = &turn.current {
            self.exchanges(world, consumer, false, request, actions);
        }
        if let Some(Step::Store(request, _)) = &turn.next {
            self.exchanges(world, consumer, true, request, actions);
        }
        if turn.can_work_ahead(self) {
            actions.push(Action::WorkAhead(consumer));
        }
        let stuck = self.is_stuck(world.now, turn);
        match &turn.current {
            Step::Verify(_) => {
                actions.push(Action::Verify(consumer, None));
                for fault in [Fault::VerifyUnsure, Fault::VerifyFailed] {
                    if self.allows(world, fault) {
                        actions.push(Action::Verify(consumer, Some(fault)));
                    }
                }
            }
            Step::Apply(_) if !stuck => {
                actions.push(Action::Apply(consumer, None));
                let faults = [
                    Fault::EffectRefused,
                    Fault::EffectPermanent,
                    Fault::EffectAnswerLost,
                    Fault::EffectLost,
                    Fault::EffectLate,
                ];
                let possible = faults.into_iter().filter(|fault| self.allows(world, *fault));
                actions.extend(possible.map(|fault| Action::Apply(consumer, Some(fault))));
            }
            Step::HandOver(_) => {
                actions.push(Action::HandOver(consumer, true));
                if self.allows(world, Fault::LetterLost) {
                    actions.push(Action::HandOver(consumer, false));
                }
            }
            Step::Tell => actions.push(Action::Tell(consumer)),
            Step::Store(..) | Step::Apply(_) | Step::Ready { .. } | Step::Ended(_) => {}
        }
        // Lambda ends what runs over its time.
        if self.allows(world, Fault::Crash) || turn.is_overdue(world.now) || stuck {
            actions.push(Action::Crash(consumer, Left::Nothing));
            if matches!(turn.current, Step::Store(..)) || (matches!(turn.current, Step::Apply(_)) && !stuck) {
                actions.push(Action::Crash(consumer, Left::Current));
            }
            if matches!(turn.next, Some(Step::Store(..))) {
                actions.push(Action::Crash(consumer, Left::Ahead));
                if actions.contains(&Action::Crash(consumer, Left::Current)) {
                    actions.push(Action::Crash(consumer, Left::Both));
                }
            }
        }
        if self.allows(world, Fault::Sleep) && !turn.asleep {
            actions.push(Action::Sleep(consumer));
        }
    }

    /// Whether a consumer can't go on: what it is about to send would arrive after its lease.
    pub(crate) fn is_stuck(&self, now: u64, turn: &Turn) -> bool {
        match &turn.current {
            Step::Apply(claim) => self.effects_end_with_their_lease && now > turn.effect(claim).lease_end,
            _ => false,
        }
    }

    /// Whether a second may pass, and what that is.
    pub(crate) fn tick(&self, world: &World) -> Option<Tick> {
        let something_to_wait_for = world.now < self.unread_until
            || world.queue.iter().any(|message| message.place == Place::Waiting && message.hidden_until > world.now);
        let awake = || world.consumers.iter().flatten().filter(|turn| !turn.asleep);
        let in_time = awake().all(|turn| world.now < turn.deadline());
        let landed =
            !self.effects_end_with_their_lease || world.late_effects.iter().all(|effect| world.now < effect.lease_end);
        let slow = awake().next().is_some();
        let tick = if slow { Tick::Slow } else { Tick::Quiet };
        (something_to_wait_for && in_time && landed && (!slow || self.allows(world, Fault::Slow))).then_some(tick)
    }
}

impl Model for Setting {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let queued = Queued {
            place: Place::Waiting,
            receives: 0,
            receives_before: 0,
            hidden_until: 0,
            redrives: 0,
            letter: None,
        };
        let record = |key: usize| self.records.iter().find(|record| record.id.as_str() == key.to_string()).cloned();
        vec![World {
            now: 0,
            records: (0..self.keys()).map(record).collect(),
            committed: Vec::new(),
            queue: vec![queued; self.messages.len()],
            consumers: vec![None; self.clocks.len()],
            target: vec![Target::default(); self.keys()],
            applied_order: Vec::new(),
            late_requests: Vec::new(),
            late_effects: Vec::new(),
            faults_left: self.faults,
            acks: BTreeSet::new(),
            foreign_write: false,
            token_clash: false,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        self.deliveries(world, actions);
        for (consumer, turn) in world.consumers.iter().enumerate() {
            if let Some(turn) = turn {
                self.turn(world, consumer, turn, actions);
            }
        }
        actions.extend((0..world.late_requests.len()).map(Action::LateRequest));
        for effect in 0..world.late_effects.len() {
            actions.push(Action::LateEffect(effect, true));
            actions.push(Action::LateEffect(effect, false));
        }
        let expired = |record: &Record| record.has_expired(at(world.now));
        actions.extend((0..self.keys()).filter(|key| world.record(*key).is_some_and(expired)).map(Action::Sweep));
        if self.operator {
            let numbers = 0..self.messages.len();
            actions.extend(numbers.filter(|message| world.can_resolve(*message)).map(Action::Resolve));
        }
        let exhausted =
            |(_, message): &(usize, &Queued)| message.place == Place::Exhausted && message.redrives < self.redrives;
        actions.extend(world.queue.iter().enumerate().filter(exhausted).map(|(number, _)| Action::Redrive(number)));
        if self.tick(world).is_some() {
            actions.push(Action::Tick);
        }
    }

    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        let mut world = last.clone();
        world.happen(self, &action)?;
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        promises::all()
    }
}
