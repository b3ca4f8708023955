//! The convolution and the gated delta rule of new tokens, which continue their sequences: how a model generates text.
//!
//! What a sequence keeps does not grow with it: the last tokens of the convolution's window, and the states of the heads. Each
//! sequence has a slot of both, and a row of the batch names its own. A token at position 0 begins again, whatever the slot
//! holds. Does not know who gives slots out.

mod conv;
mod rule;

use graph::{Dim, Element, ValueType};

use crate::op::{Attribute, ExampleInput};

pub use conv::CachedConv;
pub use rule::CachedDelta;

const SLOTS: Attribute = Attribute { name: "slots", kind: "int", doc: "sequences that are kept at a time" };

/// Checks positions i32 [B, T] and slots i32 \[B\] of an operand [B, T, …].
fn check_places(of: &ValueType, positions: &ValueType, slots: &ValueType) -> Result<(), String> {
    let rows = &of.shape[..2];
    if positions.dtype != Element::I32 || positions.shape != rows {
        return Err(format!("the positions must be i32 [{}, {}]", rows[0], rows[1]));
    }
    if slots.dtype != Element::I32 || slots.shape != rows[..1] {
        return Err(format!("the slots must be i32 [{}]", rows[0]));
    }
    Ok(())
}

/// The number of slots of an attribute.
fn checked_slots(count: usize) -> Result<Dim, String> {
    if count == 0 { Err("`slots` must be 1 or more".into()) } else { Ok(Dim::Fixed(count)) }
}

/// The slot of a row.
fn slot_of(slots: &[i32], row: usize, count: usize) -> usize {
    let slot = usize::try_from(slots[row]).ok().filter(|slot| *slot < count);
    slot.unwrap_or_else(|| panic!("row {row} has the slot {} of {count}", slots[row]))
}

/// Returns positions and slots of an example's rows of `tokens` tokens, from the place where each begins in its
/// sequence and the number of its tokens that are no padding. Slots are given from the last one down, and one is
/// unused.
fn places(tokens: usize, rows: &[(usize, usize)]) -> ([ExampleInput; 2], usize) {
    let position = |at: usize| {
        let ((first, count), t) = (rows[at / tokens], at % tokens);
        if t < count { (first + t) as i32 } else { -1 }
    };
    let positions = (0..rows.len() * tokens).map(position).collect();
    let slots = (1..=rows.len() as i32).rev().collect();
    let inputs = [
        ExampleInput::Ints { shape: vec![rows.len(), tokens], values: positions },
        ExampleInput::Ints { shape: vec![rows.len()], values: slots },
    ];
    (inputs, rows.len() + 1)
}
