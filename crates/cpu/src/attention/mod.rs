//! Attention by tiles: what the reference in `ops` computes, as products of packed panels. Sums run over
//! other groups of terms than there, in an order that the shapes alone decide. Knows dense f32 operands only;
//! the caller widens and rounds.

mod backward;
mod block;
mod forward;

use std::ops::Range;

use ops::{Call, Input};
use program::TensorRef;

use crate::simd::{Matrix, Tiles, WIDTH, pack};

/// Memory that an operation uses while it runs: 32-bit units of packed panels, and f32 numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    pub packed: usize,
    pub partial: usize,
}

/// An operation that is computed here instead of by its reference.
#[derive(Clone, Copy)]
pub struct Own {
    /// What it needs for operands of these shapes.
    pub room: fn(&[TensorRef]) -> Room,
    pub run: fn(&mut Call<'_, f32>, &mut [u32], &mut [f32]),
}

/// `None` for other operations, and on a processor without the instructions.
pub fn find(op: &str) -> Option<Own> {
    Tiles::<f32>::here()?;
    match op {
        "attention" => Some(Own { room: forward::room, run: forward::run }),
        "attention_backward" => Some(Own { room: backward::room, run: backward::run }),
        _ => None,
    }
}

/// What the calls share.
#[derive(Clone, Copy)]
struct Extents {
    batch: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
    window: Option<usize>,
}

impl Extents {
    fn of(call: &Call<'_, f32>) -> Extents {
        let number = call.attrs.float("scale").expect("checked by the shape rule");
        let window = call.attrs.optional_int("window").expect("checked by the shape rule");
        let shape = |index: usize| call.inputs[index].shape;
        let mut extents = Extents::of_shapes(shape(0), shape(1));
        (extents.scale, extents.window) = (number as f32, window.map(|window| window as usize));
        extents
    }

    fn of_shapes(q: &[usize], k: &[usize]) -> Extents {
        let (batch, tokens, heads, head_dim) = (q[0], q[1], q[2], q[3]);
        Extents { batch, tokens, heads, kv_heads: k[2], head_dim, scale: 1.0, window: None }
    }

    /// Query heads that share one key head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Units of [`by_token`] for one head.
    fn by_token(&self) -> usize {
        self.tokens.div_ceil(WIDTH) * WIDTH * self.head_dim
    }

    /// Units of [`by_column`] for one head.
    fn by_column(&self) -> usize {
        self.tokens * self.column_panels().map(|(_, width)| width).sum::<usize>()
    }

    /// First column and width of the panels of a head's columns.
    fn column_panels(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let head_dim = self.head_dim;
        (0..head_dim).step_by(WIDTH).map(move |first| (first, Tiles::<f32>::panel_width(head_dim - first)))
    }

    /// The keys that query `i` sees.
    fn visible(&self, i: usize, starts: &[i32]) -> Range<usize> {
        let first = starts[i] as usize;
        first.max(self.window.map_or(0, |window| (i + 1).saturating_sub(window)))..i + 1
    }
}

/// One head of a tensor [B, T, heads, D]: tokens by columns.
fn head<'a>(tensor: &Input<'a, f32>, b: usize, head: usize) -> Matrix<'a> {
    let [_, tokens, heads, head_dim] = tensor.shape[..] else { unreachable!("the shape rule asks for four axes") };
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
fn by_column(head: Matrix<'_>, extents: &Extents, mut out: &mut [u32]) {
    for (first, width) in extents.column_panels() {
        let columns = first..(first + width).min(extents.head_dim);
        let (panel, rest) = out.split_at_mut(extents.tokens * width);
        pack(head.block(0..extents.tokens, columns).transposed_if(true), panel);
        out = rest;
    }
}
