//! The memory of a run: planned compared with allocated bytes.

use std::fmt::Display;

use program::{MemoryClass, MemoryLine};
use serde_json::{Value, json};

use crate::error::Result;
use crate::trainer::Trainer;
use crate::words::size;

/// One class of the plan.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassMemory {
    pub class: MemoryClass,
    pub planned: usize,
    pub allocated: usize,
    pub note: &'static str,
}

impl Trainer {
    /// Every class that was planned or allocated, and what the whole device has in use.
    pub(crate) fn memory_breakdown(&mut self) -> Result<(Vec<ClassMemory>, Option<usize>)> {
        let engine = self.engine()?;
        let planned = engine.program().memory.clone();
        let mut allocated = engine.session().allocated();
        let in_use = engine.session().memory_in_use()?;
        for other in self.reference.iter_mut().chain(&mut self.teacher) {
            let own = other.session().allocated();
            let bytes = own.iter().filter(|line| line.class.is_per_program()).map(|line| line.bytes).sum();
            allocated.push(MemoryLine { class: MemoryClass::Reference, bytes, note: "" });
        }
        Ok((compare(&planned, &allocated), in_use))
    }
}

fn compare(planned: &[MemoryLine], allocated: &[MemoryLine]) -> Vec<ClassMemory> {
    let mut classes: Vec<ClassMemory> = Vec::new();
    let mut add = |line: &MemoryLine, planned: usize, allocated: usize| {
        let found = classes.iter().position(|of| of.class == line.class);
        let index = found.unwrap_or_else(|| {
            classes.push(ClassMemory { class: line.class, planned: 0, allocated: 0, note: line.note });
            classes.len() - 1
        });
        classes[index].planned += planned;
        classes[index].allocated += allocated;
    };
    planned.iter().for_each(|line| add(line, line.bytes, 0));
    allocated.iter().for_each(|line| add(line, 0, line.bytes));
    classes
}

/// The classes as a table.
pub fn table(classes: &[ClassMemory], in_use: Option<usize>) -> Vec<String> {
    let row = |planned: usize, allocated: usize, name: &dyn Display, note: &str| {
        let text = format!("{:>12} {:>12}  {name:<14} {note}", size(planned), size(allocated));
        text.trim_end().to_owned()
    };
    let sum = |of: fn(&ClassMemory) -> usize| classes.iter().map(of).sum::<usize>();
    let mut lines = vec![format!("Memory: {:>4} {:>12}", "planned", "allocated")];
    lines.extend(classes.iter().map(|of| row(of.planned, of.allocated, &of.class, of.note)));
    lines.push(row(sum(|of| of.planned), sum(|of| of.allocated), &"in all", ""));
    lines.extend(in_use.map(|bytes| format!("{:>25}  in use on the device, by all processes", size(bytes))));
    lines
}

/// Converts the classes to JSON.
pub fn to_json(classes: &[ClassMemory], in_use: Option<usize>) -> Value {
    let row =
        |of: &ClassMemory| json!({"class": of.class.to_string(), "planned": of.planned, "allocated": of.allocated});
    json!({"classes": classes.iter().map(row).collect::<Vec<_>>(), "in_use": in_use})
}

#[cfg(test)]
mod tests {
    use program::ArenaKind;

    use super::*;

    #[test]
    fn lines_of_one_class_stand_together() {
        let (a, b, c) = (MemoryClass::Arena(ArenaKind::Batch), MemoryClass::Context, MemoryClass::Workspace);
        let line = |class, bytes| MemoryLine { class, bytes, note: "" };
        let found = compare(&[line(a, 1 << 20), line(a, 1 << 20), line(b, 5)], &[line(a, 3 << 20), line(c, 7)]);
        let rows: Vec<_> = found.iter().map(|of| (of.class, of.planned, of.allocated)).collect();
        assert_eq!(rows, [(a, 2 << 20, 3 << 20), (b, 5, 0), (c, 0, 7)]);
        let text = table(&found, Some(1 << 30)).join("\n");
        assert!(text.contains("    2.00 MiB     3.00 MiB  batch") && text.contains("1.00 GiB  in use"), "{text}");
    }
}
