//! Heads as packed panels, by token and by column, and the room that they take.

use ops::Input;

use crate::simd::{Matrix, Tiles, WIDTH, pack};

/// The memory that an operation uses while it runs: 32-bit units of packed panels, and f32 numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    pub packed: usize,
    pub partial: usize,
}

/// Units of [`by_token`] for one head of `columns`.
pub fn by_token_units(tokens: usize, columns: usize) -> usize {
    tokens.div_ceil(WIDTH) * WIDTH * columns
}

/// Units of [`by_column`] for one head of `columns`.
pub fn by_column_units(tokens: usize, columns: usize) -> usize {
    tokens * column_panels(columns).map(|(_, width)| width).sum::<usize>()
}

/// First column and width of the panels of a head's columns.
pub fn column_panels(columns: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..columns).step_by(WIDTH).map(move |first| (first, Tiles::<f32>::panel_width(columns - first)))
}

/// One head of a tensor [B, T, heads, D]: tokens by columns.
pub fn head<'a>(tensor: &Input<'a, f32>, b: usize, head: usize) -> Matrix<'a> {
    let [_, tokens, heads, head_dim] = tensor.shape[..] else { unreachable!("the shape rule requires four axes") };
    let start = b * tokens * heads * head_dim + head * head_dim;
    Matrix::new(&tensor.real()[start..], tokens, head_dim, heads * head_dim)
}

/// Panels whose lines are tokens, summed over columns: for the product with every token.
pub fn by_token(head: Matrix<'_>, out: &mut [u32]) {
    let columns = head.width();
    for (panel, out) in out.chunks_mut(WIDTH * columns).enumerate() {
        let tokens = panel * WIDTH..((panel + 1) * WIDTH).min(head.height());
        pack(head.block(tokens, 0..columns), out);
    }
}

/// Panels whose lines are columns, summed over tokens: for weighted sums of tokens.
pub fn by_column(head: Matrix<'_>, mut out: &mut [u32]) {
    for (first, width) in column_panels(head.width()) {
        let columns = first..(first + width).min(head.width());
        let (panel, rest) = out.split_at_mut(head.height() * width);
        pack(head.block(0..head.height(), columns).transposed_if(true), panel);
        out = rest;
    }
}
