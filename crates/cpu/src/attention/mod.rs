//! Tiled attention: the same computation as the reference in `ops`, as products of packed panels. Terms are summed in
//! another order than in the reference, which depends only on the shapes. Handles dense f32 operands only; the caller
//! widens and rounds.

mod backward;
mod block;
mod cached;
mod forward;

use ops::{Call, Input, Loop, OpId, Real, id};
use program::TensorRef;

use crate::simd::{Matrix, Tiles, WIDTH, pack};

/// The memory that an operation uses while it runs: 32-bit units of packed panels, and f32 numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    pub packed: usize,
    pub partial: usize,
}

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

/// Units of [`by_token`] for one head of `columns`.
fn by_token_units(tokens: usize, columns: usize) -> usize {
    tokens.div_ceil(WIDTH) * WIDTH * columns
}

/// Units of [`by_column`] for one head of `columns`.
fn by_column_units(tokens: usize, columns: usize) -> usize {
    tokens * column_panels(columns).map(|(_, width)| width).sum::<usize>()
}

/// First column and width of the panels of a head's columns.
fn column_panels(columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..columns).step_by(WIDTH).map(move |first| (first, Tiles::<f32>::panel_width(columns - first)))
}

/// One head of a tensor [B, T, heads, D]: tokens by columns.
fn head<'a>(tensor: &Input<'a, f32>, b: usize, head: usize) -> Matrix<'a> {
    let [_, tokens, heads, head_dim] = tensor.shape[..] else { unreachable!("the shape rule requires four axes") };
    let start = b * tokens * heads * head_dim + head * head_dim;
    Matrix::new(&tensor.real()[start..], tokens, head_dim, heads * head_dim)
}

/// Panels whose lines are tokens, summed over columns: for the product with every token.
fn by_token(head: Matrix<'_>, out: &mut [u32]) {
    let columns = head.width();
    for (panel, out) in out.chunks_mut(WIDTH * columns).enumerate() {
        let tokens = panel * WIDTH..((panel + 1) * WIDTH).min(head.height());
        pack(head.block(tokens, 0..columns), out);
    }
}

/// Panels whose lines are columns, summed over tokens: for weighted sums of tokens.
fn by_column(head: Matrix<'_>, mut out: &mut [u32]) {
    for (first, width) in column_panels(head.width()) {
        let columns = first..(first + width).min(head.width());
        let (panel, rest) = out.split_at_mut(head.height() * width);
        pack(head.block(0..head.height(), columns).transposed_if(true), panel);
        out = rest;
    }
}

/// The step from raw scores to capped ones, c·tanh(s/c); gives their slopes, 1 − tanh².
struct Capped;

impl<'a> Loop<(&'a mut [f32], f32, &'a mut [f32])> for Capped {
    type Output = ();

    #[inline(always)]
    fn run((scores, cap, slopes): (&'a mut [f32], f32, &'a mut [f32])) {
        for (s, slope) in scores.iter_mut().zip(slopes) {
            let t = Real::tanh(*s / cap);
            (*s, *slope) = (cap * t, 1.0 - t * t);
        }
    }
}
