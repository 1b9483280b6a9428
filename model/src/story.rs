//! A path through the model in words.

use idempotent_consumer::record::State;

use crate::protocol::{Action, Fate, Left};
use crate::setting::{Fault, Setting};
use crate::store::Request;
use crate::turn::Step;
use crate::world::{Place, World};

/// One line for everything that happened on a path; seconds in which nothing else does are
/// told together.
#[must_use]
pub fn tell(setting: &Setting, path: Vec<(World, Option<Action>)>) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut worlds = path.into_iter().peekable();
    while let Some((before, action)) = worlds.next() {
        let (Some(action), Some((after, _))) = (action, worlds.peek()) else { break };
        if action == Action::Tick {
            if lines.last().is_some_and(|line| line.starts_with("time passes")) {
                lines.pop();
            }
            lines.push(format!("time passes, it is second {}", after.now));
            continue;
        }
        lines.push(line(setting, &before, &action, after));
    }
    lines
}

fn line(setting: &Setting, before: &World, action: &Action, after: &World) -> String {
    match action {
        Action::Tick => "a second passes".to_owned(),
        Action::Deliver { consumer, group, early } => {
            let messages = after.consumers.get(*consumer).and_then(Option::as_ref).map(|turn| turn.messages.clone());
            let Some(messages) = messages else {
                return format!("group {group} has been received too often, and is moved away");
            };
            let messages = messages.into_iter().map(message).collect::<Vec<_>>().join(" and ");
            let early = if *early { ", though it is still being worked on" } else { "" };
            format!("{} gets {messages}{early}", consumer_name(*consumer))
        }
        Action::Exchange { consumer, ahead, fate } => {
            let turn = before.consumers.get(*consumer).and_then(Option::as_ref);
            let step = turn.and_then(|turn| if *ahead { turn.next.as_ref() } else { Some(&turn.current) });
            let what = match step {
                Some(Step::Store(asked, _)) => request(asked),
                _ => String::new(),
            };
            let result = match fate {
                Fate::Answered => result(setting, before, after, step),
                Fate::AnswerLost(true) => "done, but the answer is lost; it tries again".to_owned(),
                Fate::AnswerLost(false) => "done, but the answer is lost; it gives up".to_owned(),
                Fate::Lost => "the request is lost; it gives up".to_owned(),
                Fate::Late(true) => "the request is delayed; it tries again".to_owned(),
                Fate::Late(false) => "the request is delayed; it gives up".to_owned(),
            };
            let ahead = if *ahead { ", ahead of its turn" } else { "" };
            format!("{} {what}{ahead}: {result}", consumer_name(*consumer))
        }
        Action::WorkAhead(consumer) => format!("{} turns to the next message's claim", consumer_name(*consumer)),
        Action::Verify(consumer, fault) => {
            let key = key_at_work(before, *consumer);
            let answer = match fault {
                None if before.target.get(key).is_some_and(|target| target.result.is_some()) => "it was",
                None => "it was not",
                Some(Fault::VerifyUnsure) => "it can't tell",
                Some(_) => "no answer",
            };
            format!("{} asks the target whether {} was applied: {answer}", consumer_name(*consumer), name_of_key(key))
        }
        Action::Apply(consumer, fault) => {
            let key = name_of_key(key_at_work(before, *consumer));
            let applied = |world: &World| world.target.iter().map(|target| u32::from(target.applied)).sum::<u32>();
            let ending = match fault {
                None if applied(after) > applied(before) => "applied",
                None => "answered, and not applied again",
                Some(Fault::EffectRefused) => "refused before anything happened",
                Some(Fault::EffectPermanent) => "refused for good",
                Some(Fault::EffectAnswerLost) => "applied, but the answer is lost",
                Some(Fault::EffectLate) => "no answer in time; the request is still on its way",
                Some(_) => "no answer; it was not applied",
            };
            format!("{} sends the effect of {key}: {ending}", consumer_name(*consumer))
        }
        Action::HandOver(consumer, true) => format!("{} sends the dead letter", consumer_name(*consumer)),
        Action::HandOver(consumer, false) => format!("{} can't send the dead letter", consumer_name(*consumer)),
        Action::Tell(consumer) => {
            let changed =
                before.queue.iter().zip(&after.queue).enumerate().filter(|(_, (was, is))| was.place != is.place);
            let told: Vec<_> =
                changed.map(|(number, (_, is))| format!("{} {}", message(number), place(&is.place))).collect();
            let told = if told.is_empty() { "nothing is done".to_owned() } else { told.join(", ") };
            let unstored = after.acks.difference(&before.acks).any(|(_, _, stored)| !stored);
            let unstored = if unstored { ", and no such result is stored" } else { "" };
            format!("{} answers the queue: {told}{unstored}", consumer_name(*consumer))
        }
        Action::Crash(consumer, left) => {
            let left = match left {
                Left::Nothing => "",
                Left::Current => ", its last request still on its way",
                Left::Ahead => ", the request it made ahead still on its way",
                Left::Both => ", its last request and the one it made ahead still on their way",
            };
            format!("{} dies{left}", consumer_name(*consumer))
        }
        Action::Sleep(consumer) => format!("{} is frozen", consumer_name(*consumer)),
        Action::LateRequest(index) => {
            let what = before.late_requests.get(*index).map(request).unwrap_or_default();
            format!("a delayed request arrives, from one that {what}")
        }
        Action::LateEffect(_, true) => "a delayed effect arrives at the target".to_owned(),
        Action::LateEffect(_, false) => "a delayed effect is lost".to_owned(),
        Action::Sweep(key) => format!("the store deletes the expired record of {}", name_of_key(*key)),
        Action::Redrive(number) => format!("{} is put back into its queue", message(*number)),
        Action::Resolve(number) => {
            format!("an operator resolves {} by the truth, and sends it again", message(*number))
        }
    }
}

fn result(setting: &Setting, before: &World, after: &World, step: Option<&Step>) -> String {
    let Some(Step::Store(request, _)) = step else { return String::new() };
    let mut served = before.clone();
    match served.serve(setting, request) {
        crate::store::Answer::Won(claim) => format!("won, attempt {}", claim.attempt),
        crate::store::Answer::Lost(record) => {
            let record = match &record.state {
                State::InProgress { owner: Some(_), .. } => format!("attempt {} stands there", record.attempt),
                State::InProgress { .. } => "somebody's claim without a lease stands there".to_owned(),
                State::Completed { .. } => "it is completed".to_owned(),
                State::Parked { .. } => "it is parked".to_owned(),
                _ => "a record stands there".to_owned(),
            };
            let goes_on = after.consumers.iter().flatten().any(|turn| {
                [Some(&turn.current), turn.next.as_ref()]
                    .into_iter()
                    .flatten()
                    .any(|step| matches!(step, Step::Store(Request::TakeOver { .. }, _)))
            });
            if goes_on && matches!(request, Request::Claim(_)) {
                format!("{record}, and may be taken over")
            } else {
                record
            }
        }
        crate::store::Answer::Gone => "the record is gone".to_owned(),
        crate::store::Answer::Applied | crate::store::Answer::Committed(_) => "done".to_owned(),
        crate::store::Answer::Fenced => "refused, the claim is not held any more".to_owned(),
    }
}

fn request(request: &Request) -> String {
    match request {
        Request::Claim(request) => format!("claims {}", name_of(request.id.as_str())),
        Request::TakeOver { request, .. } => format!("takes {} over", name_of(request.id.as_str())),
        Request::Complete(claim, _) => format!("stores the result of {}", name_of(claim.id.as_str())),
        Request::Park(claim, _) => format!("parks {}", name_of(claim.id.as_str())),
        Request::GiveUp(claim) => format!("ends its lease of {}", name_of(claim.id.as_str())),
        Request::Release(claim) => format!("gives its claim of {} back", name_of(claim.id.as_str())),
        Request::Commit(request) => format!("commits record and effect of {}", name_of(request.id.as_str())),
    }
}

fn key_at_work(world: &World, consumer: usize) -> usize {
    match world.consumers.get(consumer).and_then(Option::as_ref).map(|turn| &turn.current) {
        Some(Step::Verify(claim) | Step::Apply(claim)) => claim.id.as_str().parse().unwrap_or_default(),
        _ => 0,
    }
}

fn consumer_name(number: usize) -> String {
    format!("consumer {}", number + 1)
}

fn message(number: usize) -> String {
    format!("message {}", number + 1)
}

fn name_of(id: &str) -> String {
    name_of_key(id.parse().unwrap_or_default())
}

/// Keys are told by letters.
fn name_of_key(key: usize) -> String {
    let letter = u8::try_from(key).ok().and_then(|key| b'A'.checked_add(key)).map_or('?', char::from);
    format!("key {letter}")
}

fn place(place: &Place) -> String {
    match place {
        Place::Waiting => "waits".to_owned(),
        Place::Acked => "is acked".to_owned(),
        Place::DeadLettered(reason) => format!("is dead-lettered as {reason}"),
        Place::Exhausted => "was received too often".to_owned(),
        Place::Lost => "is acked, and nobody has applied it".to_owned(),
    }
}
