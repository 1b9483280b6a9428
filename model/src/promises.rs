//! What must hold in every state, and what must be reachable in some.

use stateright::{Model, Property};

use crate::setting::{Payload, Setting};
use crate::world::{Place, World};

/// Promise 1.
pub const STORED_BEFORE_ACK: &str = "1 no message is acked without a stored result, or a dead letter with a reason";
/// Promise 2.
pub const ONCE: &str = "2 the effect is applied exactly once; with park at most once";
/// Promise 3.
pub const SAME_RESULT: &str = "3 every ack of a key reports the same result";
/// Promise 4.
pub const ORDER: &str = "4 within a group effects happen in order";
/// Promise 5.
pub const FENCED: &str = "5 no write by a consumer that lost its claim changes a record";
/// Promise 6, as far as it is not about time.
pub const BAD_INPUT: &str = "6 bad input costs one message, and leaves a reason";
/// What fairness gives.
pub const ENDS: &str = "every message ends acked, or dead-lettered with a reason";
/// The fencing token of the attempts.
pub const TOKENS: &str = "the effects of two claims of a key never arrive under one attempt";

/// All of them.
#[must_use]
pub fn all() -> Vec<Property<Setting>> {
    vec![
        Property::always(STORED_BEFORE_ACK, |_, world: &World| {
            let lost = world.queue.iter().any(|message| message.place == Place::Lost);
            !lost && world.acks.iter().all(|(_, _, stored)| *stored)
        }),
        Property::always(ONCE, once),
        Property::always(SAME_RESULT, same_result),
        Property::always(ORDER, in_order),
        Property::always(FENCED, |_, world: &World| !world.foreign_write),
        Property::always(BAD_INPUT, bad_input),
        Property::always(ENDS, ends),
        Property::always(TOKENS, |_, world: &World| !world.token_clash),
    ]
}

/// Never twice, and not without the effect if acked. A target that deduplicates may be
/// sent it as often as it takes; what counts is what it did.
fn once(setting: &Setting, world: &World) -> bool {
    let at_most_once = world.target.iter().all(|target| target.applied <= 1);
    let acked_without = setting.messages.iter().zip(&world.queue).any(|(sent, message)| {
        matches!(message.place, Place::Acked)
            && world.target.get(sent.key).is_some_and(|target| target.applied == 0)
            && !setting.records.iter().any(|record| record.id.as_str() == sent.key.to_string())
    });
    at_most_once && !acked_without
}

/// Whoever acks, and whether or not the queue still listens.
fn same_result(_: &Setting, world: &World) -> bool {
    let results = |key| world.acks.iter().filter(move |ack| ack.0 == key).map(|ack| &ack.1);
    world.acks.iter().all(|(key, result, _)| results(*key).all(|other| other == result))
}

/// Of two messages of a group that were both acked, the key of the first was applied
/// first. Keys that another group has too have no order, and a message whose dead letter
/// was sent, or that was put back from the dead-letter queue, has left it.
fn in_order(setting: &Setting, world: &World) -> bool {
    let place = |key: usize| world.applied_order.iter().position(|applied| *applied == key);
    let acked: Vec<_> = setting
        .messages
        .iter()
        .zip(&world.queue)
        .filter(|(sent, message)| {
            let elsewhere = setting.messages.iter().any(|other| other.key == sent.key && other.group != sent.group);
            message.place == Place::Acked && message.letter.is_none() && message.receives_before == 0 && !elsewhere
        })
        .map(|(sent, _)| sent)
        .collect();
    acked.iter().enumerate().all(|(position, first)| {
        acked.iter().skip(position + 1).all(|second| {
            let applied = place(first.key).zip(place(second.key));
            first.group != second.group
                || first.key == second.key
                || applied.is_some_and(|(first, second)| first < second)
        })
    })
}

fn bad_input(setting: &Setting, world: &World) -> bool {
    let only_dead_lettered = setting
        .messages
        .iter()
        .zip(&world.queue)
        .filter(|(sent, _)| sent.payload == Payload::Poison)
        .all(|(_, message)| matches!(message.place, Place::Waiting | Place::DeadLettered("rejected")));
    let others = setting
        .messages
        .iter()
        .zip(&world.queue)
        .filter(|(sent, _)| sent.payload == Payload::Usual)
        .all(|(_, message)| !matches!(message.place, Place::DeadLettered("rejected")));
    only_dead_lettered && others
}

/// Every path comes to an end: faults are counted, and so are receives. Nowhere on it is a
/// message lost or received too often, and where nothing can happen any more all have ended.
fn ends(setting: &Setting, world: &World) -> bool {
    let broken = |place: &Place| match place {
        Place::Lost => true,
        Place::Exhausted => setting.redrives == 0,
        Place::Waiting | Place::Acked | Place::DeadLettered(_) => false,
    };
    if world.queue.iter().any(|message| broken(&message.place)) {
        return false;
    }
    let waiting = world.queue.iter().any(|message| message.place == Place::Waiting);
    let idle = world.consumers.iter().all(Option::is_none);
    !waiting || !idle || !nothing_can_happen(setting, world)
}

fn nothing_can_happen(setting: &Setting, world: &World) -> bool {
    let mut actions = Vec::new();
    setting.actions(world, &mut actions);
    actions.is_empty()
}
