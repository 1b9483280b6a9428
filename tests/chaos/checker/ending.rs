//! What must hold once the queue is empty and nothing is under way.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Judge, Rule};
use crate::chaos::plan::Mode;
use crate::chaos::replay::Record;
use crate::chaos::trace::Trace;

impl Judge<'_> {
    pub(super) fn end(&mut self) {
        let end = self.entries.len();
        let left = self.facts.left.clone();
        if !left.is_empty() {
            let names: Vec<&str> = left.iter().map(String::as_str).collect();
            let trace = Trace::of_message(end, names[0]);
            self.found(Rule::NotDrained, format!("left in the queue without any fault: {names:?}"), &trace);
        }
        let messages: Vec<String> = self.messages.keys().cloned().collect();
        for name in &messages {
            let message = &self.messages[name];
            if !message.acked && !message.exhausted && !left.contains(name) {
                self.found(
                    Rule::NotDrained,
                    format!("{name} is neither acked nor dead"),
                    &Trace::of_message(end, name),
                );
            }
        }
        let keys: Vec<String> = self.keys.keys().cloned().collect();
        for key in &keys {
            self.key_at_the_end(end, key);
        }
        for key in self.facts.table.keys().filter(|key| !keys.contains(key)) {
            self.found(
                Rule::TableDiffers,
                format!("a record of {key}, which was never sent"),
                &Trace::of_writes(end, key),
            );
        }
        self.stock();
    }

    fn key_at_the_end(&mut self, end: usize, key: &str) {
        let here = &self.keys[key];
        let is = self.facts.table.get(key);
        let should = here.record.row();
        let (acked, applied) = (here.acked, here.answers.len());
        let result = match &here.record {
            Record::Completed { data, .. } => serde_json::from_str::<Value>(data).ok(),
            _ => None,
        };
        let answer = here.answers.first().map(|answer| json!({ "status": 200, "body": answer }));
        if is != should.as_ref() {
            let what = format!("{key} is {is:?} in the table, and should be {should:?}");
            self.found(Rule::TableDiffers, what, &Trace::of_writes(end, key));
        }
        if self.facts.mode == Mode::Transactional {
            return;
        }
        if acked && applied == 0 {
            self.found(Rule::NeverApplied, format!("{key} was acked, and never applied"), &Trace::of_effects(end, key));
        } else if result.is_some() && result != answer {
            let what = format!("{key} has the result {result:?}, and the target's was {answer:?}");
            self.found(Rule::ResultDiffers, what, &Trace::of_effects(end, key));
        }
    }

    fn stock(&mut self) {
        let mut taken: BTreeMap<&str, u64> = BTreeMap::new();
        for key in self.keys.values() {
            if let (Record::Completed { data, .. }, Some((item, quantity))) = (&key.record, &key.takes)
                && data == r#""reserved""#
            {
                *taken.entry(item).or_default() += quantity;
            }
        }
        let wrong: Vec<String> = self
            .facts
            .stock
            .iter()
            .filter_map(|(item, (before, after))| {
                let taken = taken.get(item.as_str()).copied().unwrap_or_default();
                (*before != *after + taken).then(|| format!("{item}: {before} - {taken} is not {after}"))
            })
            .collect();
        if !wrong.is_empty() {
            let trace = Trace::of_event(self.entries.len());
            self.found(Rule::StockWrong, wrong.join(", "), &trace);
        }
    }
}
