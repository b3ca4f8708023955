//! Tiled attention: the same computation as the reference in `ops`, as products of packed panels. Terms are summed in
//! another order than in the reference, which depends only on the shapes. Handles dense f32 operands only; the caller
//! widens and rounds.

mod backward;
mod block;
mod cached;
mod forward;
mod packed;
mod softmax;

use ops::{Call, OpId, id};
use program::TensorRef;

use crate::simd::Tiles;

pub use packed::Room;

/// An operation that is computed here instead of by its reference.
#[derive(Clone, Copy)]
pub struct Own {
    /// The memory that it needs for operands of these shapes.
    pub room: fn(&[TensorRef]) -> Room,
    pub run: fn(&mut Call<'_, f32>, &mut [u32], &mut [f32]),
}

/// `None` for other operations, and on a processor without the instructions.
pub fn find(op: OpId) -> Option<Own> {
    Tiles::<f32>::here()?;
    match () {
        () if op == id::ATTENTION => Some(Own { room: forward::room, run: forward::run }),
        () if op == id::CACHED_ATTENTION => Some(Own { room: cached::room, run: cached::run }),
        () if op == id::ATTENTION_BACKWARD => Some(Own { room: backward::room, run: backward::run }),
        () => None,
    }
}
