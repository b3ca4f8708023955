//! Programs that were compiled for a plan, kept for the run that follows it: both compile the same model with the same options for
//! the same machine.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use compiler::{CompileError, CompileOptions};
use graph::Model;
use program::{Machine, Program};

use crate::files::digest;

/// Programs that are kept: the splits of a step that a plan compares, and their ways to fit.
const MOST: usize = 6;

/// Programs by the digest of everything that they follow from, the longest unused first.
static KNOWN: Mutex<VecDeque<(String, Arc<Program>)>> = Mutex::new(VecDeque::new());

/// Compiles, or returns the program that was compiled from the same before.
pub(crate) fn compiled(
    model: &Model,
    options: &CompileOptions,
    machine: &Machine,
) -> Result<Arc<Program>, CompileError> {
    let key = key(model, options, machine);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = known.iter().position(|(of, _)| *of == key).and_then(|index| known.remove(index)) {
        let program = found.1.clone();
        known.push_back(found);
        return Ok(program);
    }
    drop(known);
    let program = Arc::new(compiler::compile(model, options, machine)?);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if known.len() == MOST {
        known.pop_front();
    }
    known.push_back((key, program.clone()));
    Ok(program)
}

/// Drops all programs: the run that they were kept for has its own.
pub(crate) fn forget() {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

fn key(model: &Model, options: &CompileOptions, machine: &Machine) -> String {
    digest::of_bytes(format!("{model:?}\n{options:?}\n{machine:?}").as_bytes())
}
