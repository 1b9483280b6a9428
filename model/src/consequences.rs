//! What becomes of a world by what happens.

use idempotent_consumer::record::{Record, State, StoredResult};
use idempotent_consumer::time::EpochSeconds;

use crate::protocol::{Action, Fate, Left, Tick};
use crate::setting::{Fault, Setting, VISIBILITY_TIMEOUT};
use crate::store::at;
use crate::turn::{Delivered, Ending, Step, Turn, Verified};
use crate::world::{Place, World};

impl World {
    fn fault(&mut self, happens: bool) {
        self.faults_left -= u8::from(happens);
    }

    /// Changes the world as the action says; `None` if it can't happen.
    pub(crate) fn happen(&mut self, setting: &Setting, action: &Action) -> Option<()> {
        let now = self.now;
        match *action {
            Action::Tick => {
                let tick = setting.tick(self)?;
                self.fault(tick == Tick::Slow);
                self.now += 1;
            }
            Action::Deliver { consumer, group, early } => {
                self.fault(early);
                self.deliver(setting, consumer, group)?;
            }
            Action::Exchange { consumer, ahead, fate } => self.exchange(setting, consumer, ahead, fate)?,
            Action::WorkAhead(consumer) => self.turn_mut(consumer)?.work_ahead(setting, now),
            Action::Verify(consumer, fault) => {
                self.fault(fault.is_some());
                let Step::Verify(claim) = self.turn_mut(consumer)?.current.clone() else { return None };
                let key: usize = claim.id.as_str().parse().ok()?;
                let answer = match fault {
                    None => Some(match self.ask(key, claim.attempt) {
                        Some(result) => Verified::Done(result),
                        None => Verified::NotDone,
                    }),
                    Some(Fault::VerifyUnsure) => Some(Verified::Unsure),
                    Some(_) => None,
                };
                self.turn_mut(consumer)?.verified(setting, claim, answer, now);
            }
            Action::Apply(consumer, fault) => {
                self.fault(fault.is_some());
                let turn = self.turn_mut(consumer)?;
                let Step::Apply(claim) = turn.current.clone() else { return None };
                let request = turn.effect(&claim);
                let ending = match fault {
                    // A refusal of an earlier attempt is a 409, which says nothing for certain.
                    None => self.apply(setting, &request).map_or(Ending::Unknown, Ending::Applied),
                    Some(Fault::EffectRefused) => Ending::NotApplied,
                    Some(Fault::EffectPermanent) => Ending::Permanent,
                    Some(Fault::EffectAnswerLost) => {
                        self.apply(setting, &request);
                        Ending::Unknown
                    }
                    Some(Fault::EffectLate) => {
                        self.late_effects.push(request);
                        Ending::Unknown
                    }
                    Some(_) => Ending::Unknown,
                };
                self.turn_mut(consumer)?.applied(setting, claim, ending, now);
            }
            Action::HandOver(consumer, sent) => {
                self.fault(!sent);
                let turn = self.turn_mut(consumer)?;
                let message = turn.message(turn.position)?;
                let Step::HandOver(end) = turn.current.clone() else { return None };
                turn.handed_over(setting, end.clone(), sent, now);
                if sent {
                    self.queue.get_mut(message)?.letter = Some(end.name);
                }
            }
            Action::Tell(consumer) => self.tell(setting, consumer)?,
            Action::Crash(consumer, left) => {
                let turn = self.consumers.get_mut(consumer)?.take()?;
                self.fault(!turn.is_overdue(now) && !setting.is_stuck(now, &turn));
                let current = matches!(left, Left::Current | Left::Both).then_some(&turn.current);
                let ahead = turn.next.as_ref().filter(|_| matches!(left, Left::Ahead | Left::Both));
                for step in current.into_iter().chain(ahead) {
                    match step {
                        Step::Apply(claim) => self.late_effects.push(turn.effect(claim)),
                        Step::Store(request, _) => self.late_requests.push(request.clone()),
                        _ => {}
                    }
                }
            }
            Action::Sleep(consumer) => {
                self.fault(true);
                self.turn_mut(consumer)?.asleep = true;
            }
            Action::LateRequest(index) => {
                let request = self.late_requests.remove(index);
                self.serve(setting, &request);
            }
            Action::LateEffect(index, arrives) => {
                let request = self.late_effects.remove(index);
                if arrives {
                    self.apply(setting, &request);
                }
            }
            Action::Sweep(key) => self.set(key, None),
            Action::Resolve(message) => self.resolve(setting, message)?,
            Action::Redrive(message) => {
                let message = self.queue.get_mut(message)?;
                message.redrives += 1;
                message.put_back(now);
            }
        }
        Some(())
    }

    fn turn_mut(&mut self, consumer: usize) -> Option<&mut Turn> {
        self.consumers.get_mut(consumer)?.as_mut()
    }

    fn deliver(&mut self, setting: &Setting, consumer: usize, group: usize) -> Option<()> {
        let mut batch = Vec::new();
        for (number, (sent, message)) in setting.messages.iter().zip(&mut self.queue).enumerate() {
            if sent.group != group || message.place != Place::Waiting {
                continue;
            }
            let most = message.receives_before + setting.max_receives;
            if message.receives >= most {
                message.place = Place::Exhausted;
                continue;
            }
            message.receives += 1;
            message.hidden_until = self.now + VISIBILITY_TIMEOUT;
            batch.push(Delivered { message: number, receives: message.receives, last: message.receives == most });
        }
        if !batch.is_empty() {
            let turn = Turn::begin(setting, &batch, *setting.clocks.get(consumer)?, self.now);
            *self.consumers.get_mut(consumer)? = Some(turn);
        }
        Some(())
    }

    fn exchange(&mut self, setting: &Setting, consumer: usize, ahead: bool, fate: Fate) -> Option<()> {
        self.fault(fate != Fate::Answered);
        let now = self.now;
        let turn = self.turn_mut(consumer)?;
        let step = if ahead { turn.next.clone()? } else { turn.current.clone() };
        let Step::Store(request, then) = step else { return None };
        let tries_again = match fate {
            Fate::Answered => {
                let answer = self.serve(setting, &request);
                self.turn_mut(consumer)?.answered(setting, ahead, &request, then, answer, now);
                return Some(());
            }
            Fate::AnswerLost(again) => {
                self.serve(setting, &request);
                again
            }
            Fate::Lost => false,
            Fate::Late(again) => {
                self.late_requests.push(request.clone());
                again
            }
        };
        if !tries_again {
            self.turn_mut(consumer)?.gave_up(setting, ahead, &request, then, now);
        }
        Some(())
    }

    fn tell(&mut self, setting: &Setting, consumer: usize) -> Option<()> {
        let turn = self.consumers.get_mut(consumer)?.take()?;
        for ((number, receives), told) in turn.messages.iter().zip(turn.receives).zip(turn.reports) {
            setting.reached.note(told.name);
            if !told.done {
                continue;
            }
            let key = setting.messages.get(*number)?.key;
            let place = match (told.result, self.queue.get(*number)?.letter) {
                (Some(result), _) => {
                    let stored = self.holds(key, &result);
                    self.acks.insert((key, result, stored));
                    Place::Acked
                }
                (None, Some(reason)) => Place::DeadLettered(reason),
                (None, None) => Place::Lost,
            };
            // Of what was delivered again as a new message the queue takes no answer.
            let message = self.queue.get(*number)?;
            if message.place != Place::Waiting || receives <= message.receives_before {
                continue;
            }
            self.queue.get_mut(*number)?.place = place;
        }
        Some(())
    }

    /// Whether the store holds that result of a key.
    fn holds(&self, key: usize, result: &str) -> bool {
        self.record(key).is_some_and(|record| {
            !record.has_expired(at(self.now))
                && matches!(&record.state, State::Completed { result: stored, .. } if stored.json == result)
        })
    }

    /// Whether a parked message lies in the dead-letter queue, and no request of any attempt
    /// can be under way any more: an operator who looks earlier may see "not applied" too soon.
    pub(crate) fn can_resolve(&self, message: usize) -> bool {
        let parked = self.queue.get(message).is_some_and(|queued| queued.place == Place::DeadLettered("parked"));
        let sending = self.consumers.iter().flatten().any(|turn| matches!(turn.current, Step::Apply(_)));
        parked && self.late_effects.is_empty() && !sending
    }

    fn resolve(&mut self, setting: &Setting, number: usize) -> Option<()> {
        let key = setting.messages.get(number)?.key;
        let result = self.target.get(key)?.result.clone();
        let record = self.record(key).filter(|record| matches!(record.state, State::Parked { .. })).cloned();
        if let Some(record) = record {
            let next = result.map(|result| Record {
                state: State::Completed { result: StoredResult::whole(result), completed_at: None },
                expires: EpochSeconds::new(self.now + setting.retention()),
                ..record
            });
            self.set(key, next);
        }
        let now = self.now;
        self.queue.get_mut(number)?.put_back(now);
        Some(())
    }
}
