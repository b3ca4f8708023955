//! Debug check: no instruction may write NaN or infinity.

use program::{Instruction, TensorRef};

use crate::arena::Memory;
use crate::storage::{Kind, widen};

/// The first value that is not finite, in words; `None` when all are.
pub fn find_bad(memory: &Memory, instruction: &Instruction) -> Option<String> {
    instruction.writes().into_iter().find_map(|at| in_tensor(memory, at))
}

fn in_tensor(memory: &Memory, at: &TensorRef) -> Option<String> {
    if Kind::of(at.dtype) != Some(Kind::Real) {
        return None;
    }
    let mut values = vec![0.0; at.len()];
    widen(memory, at, &mut values);
    let place = values.iter().position(|x| !x.is_finite())?;
    let bad = values.iter().filter(|x| !x.is_finite()).count();
    Some(format!("{} at element {place} of {at}; {bad} of {} are not finite", values[place], values.len()))
}
