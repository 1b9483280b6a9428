//! The events that show what is wrong, and no others.

use super::history::{Entry, Event, Meaning, Write};

/// Which events show what is wrong with a key, with messages, or both.
pub struct Trace<'a> {
    /// The event at which it is seen.
    until: usize,
    key: Option<&'a str>,
    messages: Vec<&'a str>,
    shows: fn(&Event) -> bool,
}

impl<'a> Trace<'a> {
    /// Only the event itself.
    pub fn of_event(until: usize) -> Self {
        Self { until, key: None, messages: Vec::new(), shows: |_| false }
    }

    /// What happened to a message.
    pub fn of_message(until: usize, message: &'a str) -> Self {
        Self { until, key: None, messages: vec![message], shows: |event| !is_without_effect(event) }
    }

    /// And to another.
    pub fn and(mut self, message: &'a str) -> Self {
        self.messages.push(message);
        self
    }

    /// And to a key.
    pub fn with_key(mut self, key: Option<&'a str>) -> Self {
        self.key = key;
        self
    }

    /// The writes that made a record what it is.
    pub fn of_writes(until: usize, key: &'a str) -> Self {
        let shows = |event: &Event| event.accepted_write().is_some();
        Self { until, key: Some(key), messages: Vec::new(), shows }
    }

    /// The claims of a key, and what came of them at the target.
    pub fn of_effects(until: usize, key: &'a str) -> Self {
        let shows = |event: &Event| !is_without_effect(event) && !matches!(event, Event::Sent { .. });
        Self { until, key: Some(key), messages: Vec::new(), shows }
    }

    /// The events, as text.
    pub fn lines(&self, entries: &[Entry]) -> Vec<String> {
        let of_message = |event: &Event| event.message().is_some_and(|message| self.messages.contains(&message));
        let of_key = |event: &Event| self.key.is_some() && event.key() == self.key;
        let shown = entries.iter().enumerate().filter(|(position, entry)| {
            let event = &entry.event;
            *position == self.until
                || *position < self.until && (of_key(event) || of_message(event)) && (self.shows)(event)
        });
        let shown = shown.map(|(position, _)| position).collect();
        without_detours(entries, shown, self.until).into_iter().map(|position| entries[position].to_string()).collect()
    }
}

/// A request to the store that wrote nothing.
fn is_without_effect(event: &Event) -> bool {
    matches!(event, Event::Store { .. }) && event.accepted_write().is_none()
}

/// The events without claims that were given back, if nothing came of them: what then
/// happens to the key is as if they had never been.
fn without_detours(entries: &[Entry], shown: Vec<usize>, until: usize) -> Vec<usize> {
    let mut kept: Vec<usize> = Vec::new();
    let mut claimed = None;
    for position in shown {
        kept.push(position);
        match entries[position].event.accepted_write() {
            Some(Write::Claim { attempt: 1, .. }) => claimed = Some(kept.len() - 1),
            Some(Write::Release { attempt: 1, .. }) if position != until => {
                if let Some(claimed) = claimed.take()
                    && is_detour(entries, &kept[claimed..])
                {
                    kept.truncate(claimed);
                }
            }
            _ => {}
        }
    }
    kept
}

/// Whether all of it is of one key, and whatever was sent was plainly not applied.
fn is_detour(entries: &[Entry], positions: &[usize]) -> bool {
    let events = || positions.iter().map(|position| &entries[*position].event);
    let key = events().next().and_then(Event::key);
    let arrived = events().filter(|event| matches!(event, Event::Arrived { .. })).count();
    let refused =
        |event: &&Event| matches!(event, Event::Answered { meaning: Meaning::NotApplied | Meaning::Never, .. });
    let others = |event: &Event| matches!(event, Event::Applied { .. } | Event::Sent { .. });
    events().all(|event| event.key() == key && !others(event)) && events().filter(refused).count() == arrived
}
