//! An SQS FIFO queue, as far as consumers can tell: groups, visibility timeouts, receive
//! counts, a dead-letter queue. It does nothing by itself; who calls it says what time it is.

use std::collections::BTreeSet;
use std::time::Duration;

use idempotent_consumer::time::EpochMillis;

use super::plan::Random;
use crate::common::events::Record;

/// Where a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Waiting,
    /// Handed out, and invisible until then.
    Away(EpochMillis),
    Deleted,
    Dead,
}

#[derive(Debug)]
struct Kept {
    record: Record,
    group: String,
    receives: u32,
    place: Place,
}

impl Kept {
    fn is_away(&self, now: EpochMillis) -> bool {
        matches!(self.place, Place::Away(until) if until > now)
    }

    fn is_gone(&self) -> bool {
        matches!(self.place, Place::Deleted | Place::Dead)
    }
}

/// What a consumer got: a message, and how often it was handed out by then, which is its
/// receipt.
#[derive(Debug, Clone)]
pub struct Delivery {
    pub record: Record,
    pub receive: u32,
}

#[derive(Debug)]
pub struct Queue {
    visibility: Duration,
    max_receives: u32,
    kept: Vec<Kept>,
}

impl Queue {
    pub fn new(visibility: Duration, max_receives: u32) -> Self {
        Self { visibility, max_receives, kept: Vec::new() }
    }

    pub fn send(&mut self, record: Record) {
        let group = record.group().unwrap().to_owned();
        self.kept.push(Kept { record, group, receives: 0, place: Place::Waiting });
    }

    /// A batch of at most that many messages, from groups of which no message is away, and
    /// the messages that were received too often instead.
    pub fn receive(&mut self, now: EpochMillis, most: usize, random: &mut Random) -> (Vec<Delivery>, Vec<Record>) {
        let away: BTreeSet<String> =
            self.kept.iter().filter(|kept| kept.is_away(now)).map(|kept| kept.group.clone()).collect();
        let free = self.kept.iter().filter(|kept| !kept.is_gone() && !away.contains(&kept.group));
        let mut groups: Vec<String> =
            free.map(|kept| kept.group.clone()).collect::<BTreeSet<_>>().into_iter().collect();
        let (mut batch, mut dead) = (Vec::new(), Vec::new());
        while !groups.is_empty() && batch.len() < most {
            let group = groups.swap_remove(random.index(groups.len()));
            // Sometimes not all that there is.
            let share = 1 + random.index(most);
            let mut taken = 0;
            for kept in self.kept.iter_mut().filter(|kept| kept.group == group && !kept.is_gone()) {
                if taken == share || batch.len() == most {
                    break;
                }
                if kept.receives >= self.max_receives {
                    kept.place = Place::Dead;
                    dead.push(kept.record.clone());
                    continue;
                }
                kept.receives += 1;
                kept.place = Place::Away(now.plus(self.visibility));
                let record = kept.record.clone().received(kept.receives);
                batch.push(Delivery { record, receive: kept.receives });
                taken += 1;
            }
        }
        (batch, dead)
    }

    /// The message, if the receipt is its latest and its visibility timeout not over.
    fn held(&mut self, delivery: &Delivery, now: EpochMillis) -> Option<&mut Kept> {
        let kept = self.kept.iter_mut().find(|kept| kept.record.id == delivery.record.id)?;
        (kept.receives == delivery.receive && kept.is_away(now)).then_some(kept)
    }

    /// Deletes it; false if it is too late for that.
    pub fn ack(&mut self, delivery: &Delivery, now: EpochMillis) -> bool {
        self.held(delivery, now).map(|kept| kept.place = Place::Deleted).is_some()
    }

    /// Makes it visible after `wait`, if that is sooner than it would be.
    pub fn fail(&mut self, delivery: &Delivery, now: EpochMillis, wait: Duration) {
        if let Some(kept) = self.held(delivery, now)
            && let Place::Away(until) = kept.place
        {
            kept.place = Place::Away(until.min(now.plus(wait)));
        }
    }

    /// Ends the visibility timeout of a group that is away: what happens to a consumer that
    /// is slower than that.
    pub fn lapse(&mut self, now: EpochMillis, random: &mut Random) {
        let away: Vec<String> =
            self.kept.iter().filter(|kept| kept.is_away(now)).map(|kept| kept.group.clone()).collect();
        if away.is_empty() {
            return;
        }
        let group = away[random.index(away.len())].clone();
        for kept in self.kept.iter_mut().filter(|kept| kept.group == group && kept.is_away(now)) {
            kept.place = Place::Away(now);
        }
    }

    /// The messages that are still in it.
    pub fn left(&self) -> Vec<String> {
        self.kept.iter().filter(|kept| !kept.is_gone()).map(|kept| kept.record.id.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> EpochMillis {
        EpochMillis::new(1_900_000_000_000 + millis)
    }

    fn ids(batch: &[Delivery]) -> Vec<(&str, u32)> {
        batch.iter().map(|delivery| (delivery.record.id.as_str(), delivery.receive)).collect()
    }

    fn queue(messages: &[(&str, &str)]) -> Queue {
        let mut queue = Queue::new(Duration::from_secs(1), 2);
        for (id, group) in messages {
            queue.send(Record::new(id, "{}").in_group(group));
        }
        queue
    }

    /// Receives whatever a single group has.
    fn receive(queue: &mut Queue, millis: u64) -> (Vec<Delivery>, Vec<Record>) {
        // A seed for which the whole group is taken.
        queue.receive(at(millis), 10, &mut Random::new(2))
    }

    #[test]
    fn a_group_is_with_one_consumer_until_its_visibility_timeout_ends() {
        let mut queue = queue(&[("a1", "a"), ("a2", "a")]);
        let (first, _) = receive(&mut queue, 0);
        assert_eq!(ids(&first), [("a1", 1), ("a2", 1)]);
        assert!(receive(&mut queue, 999).0.is_empty());
        assert!(queue.ack(&first[0], at(999)));
        let (second, _) = receive(&mut queue, 1000);
        assert_eq!(ids(&second), [("a2", 2)]);
        assert!(!queue.ack(&first[1], at(1001)), "the receipt is an old one");
        assert!(queue.ack(&second[0], at(1001)));
        assert!(queue.left().is_empty());
    }

    #[test]
    fn an_ack_after_the_visibility_timeout_is_refused() {
        let mut queue = queue(&[("a1", "a")]);
        let (first, _) = receive(&mut queue, 0);
        assert!(!queue.ack(&first[0], at(1000)));
        assert_eq!(queue.left(), ["a1"]);
    }

    #[test]
    fn a_message_received_too_often_is_dead_and_its_group_goes_on() {
        let mut queue = queue(&[("a1", "a"), ("a2", "a")]);
        for millis in [0, 10] {
            let (batch, dead) = receive(&mut queue, millis);
            assert_eq!((batch.len(), dead.len()), (2, 0));
            queue.fail(&batch[0], at(millis), Duration::ZERO);
            queue.fail(&batch[1], at(millis), Duration::from_millis(5));
        }
        assert!(receive(&mut queue, 12).0.is_empty(), "the second holds the group");
        let (batch, dead) = receive(&mut queue, 20);
        assert_eq!((batch.len(), dead.len()), (0, 2));
        assert!(queue.left().is_empty());
    }

    #[test]
    fn a_group_that_lapses_is_handed_out_again_at_once() {
        let mut queue = queue(&[("a1", "a")]);
        let (first, _) = receive(&mut queue, 0);
        queue.lapse(at(1), &mut Random::new(1));
        assert_eq!(ids(&receive(&mut queue, 1).0), [("a1", 2)]);
        assert!(!queue.ack(&first[0], at(2)));
    }
}
