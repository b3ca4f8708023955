//! Keeps the named results that an entry is for, so that nothing else is computed or stored.

use graph::Graph;
use program::{EntryKind, scalar};

use crate::{CompileError, EntryOptions};

pub fn run(graph: &mut Graph, entry: &EntryOptions) -> Result<(), CompileError> {
    let sums = [scalar::LOSS_SUM, scalar::WEIGHT_SUM];
    if entry.kind != EntryKind::Forward {
        for name in sums {
            if graph.output(name).is_none() {
                return Err(CompileError::Model(format!("{}: the model has no output `{name}`", graph.name)));
            }
        }
    }
    for wanted in &entry.outputs {
        let prefix = wanted.strip_suffix('*');
        let found = graph.outputs.iter().any(|(name, _)| match prefix {
            Some(prefix) => name.starts_with(prefix),
            None => name == wanted,
        });
        if !found {
            return Err(CompileError::Options(format!("{}: the model has no output `{wanted}`", graph.name)));
        }
    }
    graph.outputs.retain(|(name, _)| {
        let needed = entry.kind != EntryKind::Forward && sums.contains(&name.as_str());
        let reported = match entry.kind {
            EntryKind::FirstMicroStep => scalar::REPORTS.contains(&name.as_str()),
            EntryKind::Evaluate => name == scalar::TASK_REPORT,
            _ => false,
        };
        needed || reported || entry.keeps(name)
    });
    Ok(())
}
