//! GEMM of two f32 or two bf16 operands by tiles. A block of rows of op(A) is packed once for all threads; a task packs
//! one panel of columns of op(B) and processes the rows tile by tile. Low-rank addends and bias are added to a tile in
//! f32 before its single rounding.
//!
//! An element of D is summed in chunks of k that depend only on k. The assignment of tiles to tasks does not change the
//! bits, so it may depend on the number of threads.

use std::cell::RefCell;
use std::ops::Range;

use program::{Gemm, TensorRef};
use rayon::prelude::*;
use tensor::DType;

use crate::arena::{Memory, Plain, overlap};
use crate::scratch::Scratch;
use crate::simd::{HEIGHT, Matrix, MatrixMut, Tile, Tiles, Unit, WIDTH, pack, units_of};
use crate::storage::Stored;

/// Rows of op(A) that are packed at once.
const ROWS: usize = 1024;
/// Units of k in one chunk: a panel of op(B), 288 KiB at most, stays in the L2 cache.
const UNITS: usize = 1536;
/// Number of tasks for each thread, if there are enough tiles.
const TASKS: usize = 4;

thread_local! {
    /// The panels of op(B) of one task: the product's, then the addends'.
    static PANELS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// A product that is ready to run.
pub struct TiledGemm {
    gemm: Gemm,
    narrow: bool,
    /// Elements of k in one chunk.
    chunk: usize,
}

/// The matrices that a product reads.
struct Sources<'a, T> {
    /// The factors op(A) and op(B).
    a: Matrix<'a, T>,
    b: Matrix<'a, T>,
    /// T and op(B) of each low-rank addend.
    addends: Vec<(Matrix<'a, T>, Matrix<'a, T>)>,
    bias: Option<&'a [f32]>,
}

/// The part of the work that one pass over D does.
#[derive(Clone)]
struct Pass {
    k: Range<usize>,
    first: bool,
    last: bool,
}

impl TiledGemm {
    /// `None` where tiles do not apply: other types, operands that share memory with the result, or a
    /// processor without the instructions.
    pub fn new(gemm: &Gemm) -> Option<TiledGemm> {
        let factors = gemm.low_rank.iter().flat_map(|r| [&r.t, &r.b]);
        let factors: Vec<&TensorRef> = [&gemm.a, &gemm.b].into_iter().chain(factors).collect();
        let narrow = gemm.a.dtype == DType::BF16;
        let (depth, here) = match narrow {
            true => (u16::DEPTH, Tiles::<u16>::here().is_some()),
            false => (f32::DEPTH, gemm.a.dtype == DType::F32 && Tiles::<f32>::here().is_some()),
        };
        let fits = factors.iter().all(|at| at.dtype == gemm.a.dtype && !overlap(at, &gemm.d))
            && matches!(gemm.d.dtype, DType::F32 | DType::BF16)
            && gemm.scales.is_none()
            && gemm.k > 0;
        let chunks = gemm.k.div_ceil(UNITS * depth);
        let chunk = gemm.k.div_ceil(chunks.max(1)).next_multiple_of(8 * depth);
        (here && fits).then(|| TiledGemm { gemm: gemm.clone(), narrow, chunk })
    }

    /// Makes room for packed operands and for sums that wait for their rounding.
    pub fn reserve(&self, scratch: &mut Scratch) {
        let depth = if self.narrow { u16::DEPTH } else { f32::DEPTH };
        let rows = self.gemm.m.min(ROWS).next_multiple_of(HEIGHT);
        let addends: usize = self.gemm.low_rank.iter().map(|r| rank(&r.t).div_ceil(depth)).sum();
        scratch.reserve_packed(rows * (self.chunk.min(self.gemm.k).div_ceil(depth) + addends));
        if self.waits() {
            scratch.reserve_partial(self.gemm.m.min(ROWS) * self.gemm.n);
        }
        if let Some(bias) = &self.gemm.bias {
            scratch.reserve(0, bias);
        }
    }

    /// True if sums are kept in f32 from chunk to chunk outside of D.
    fn waits(&self) -> bool {
        self.gemm.d.dtype != DType::F32 && self.chunk < self.gemm.k
    }

    pub fn run(&self, memory: &mut Memory, scratch: &mut Scratch) {
        match (self.narrow, self.gemm.d.dtype) {
            (true, DType::F32) => self.multiply::<u16, f32>(memory, scratch),
            (true, _) => self.multiply::<u16, u16>(memory, scratch),
            (false, DType::F32) => self.multiply::<f32, f32>(memory, scratch),
            (false, _) => self.multiply::<f32, u16>(memory, scratch),
        }
    }

    fn multiply<T: Unit + Plain, D: Stored>(&self, memory: &mut Memory, scratch: &mut Scratch) {
        let g = &self.gemm;
        let Scratch { buffers, packed, partial } = scratch;
        if let Some(bias) = &g.bias {
            buffers[0].load(memory, bias);
        }
        let factors = g.low_rank.iter().flat_map(|r| [&r.t, &r.b]);
        let read: Vec<&TensorRef> = [&g.a, &g.b].into_iter().chain(factors).collect();
        let (spans, mut written) = memory.lend(&read, &[&g.d]);
        let matrices: Vec<Matrix<'_, T>> = read
            .iter()
            .zip(&spans)
            .map(|(at, span)| {
                let (rows, columns, row_stride) = at.as_matrix().expect("checked when the program is loaded");
                Matrix::new(span.slice(), rows, columns, row_stride)
            })
            .collect();
        let addends = matrices[2..].chunks(2).zip(&g.low_rank);
        let sources = Sources {
            a: matrices[0].transposed_if(g.transpose_a),
            b: matrices[1].transposed_if(g.transpose_b),
            addends: addends.map(|(pair, r)| (pair[0], pair[1].transposed_if(r.transpose_b))).collect(),
            bias: g.bias.as_ref().map(|bias| buffers[0].real(bias.len())),
        };
        let d = written.pop().expect("one result").slice::<D>();
        let (_, _, row_stride) = g.d.as_matrix().expect("checked when the program is loaded");
        for first in (0..g.m).step_by(ROWS) {
            let rows = first..(first + ROWS).min(g.m);
            let d = &mut d[first * row_stride..];
            for k in (0..g.k).step_by(self.chunk) {
                let pass = Pass { k: k..(k + self.chunk).min(g.k), first: k == 0, last: k + self.chunk >= g.k };
                let d = MatrixMut::new(&mut *d, rows.len(), g.n, row_stride);
                let partial = self.waits().then(|| MatrixMut::new(&mut *partial, rows.len(), g.n, g.n));
                self.pass(&sources, rows.clone(), &pass, packed, d, partial);
            }
        }
    }

    /// One chunk of k for one block of rows.
    fn pass<T: Unit, D: Stored>(
        &self,
        sources: &Sources<'_, T>,
        rows: Range<usize>,
        pass: &Pass,
        packed: &mut [u32],
        d: MatrixMut<'_, D>,
        partial: Option<MatrixMut<'_, f32>>,
    ) {
        let packed = self.pack_rows(sources, &rows, pass, packed);
        let width = WIDTH.min(self.gemm.n.max(1));
        let panels = self.gemm.n.div_ceil(width).max(1);
        let parts = (TASKS * rayon::current_num_threads()).div_ceil(panels);
        let height = rows.len().div_ceil(HEIGHT).div_ceil(parts).max(1) * HEIGHT;
        let d = d.tiles(height, width);
        let partial: Vec<Option<MatrixMut<'_, f32>>> = match partial {
            Some(partial) => partial.tiles(height, width).into_iter().map(|(_, _, tile)| Some(tile)).collect(),
            None => d.iter().map(|_| None).collect(),
        };
        d.into_par_iter().zip(partial).for_each(|((row, column, d), partial)| {
            PANELS.with_borrow_mut(|panels| self.task(sources, pass, &packed, (row, column), panels, d, partial));
        });
    }

    /// Packs the block of op(A), and after the last chunk those of the addends: [panels][units][HEIGHT] each.
    fn pack_rows<'p, T: Unit>(
        &self,
        sources: &Sources<'_, T>,
        rows: &Range<usize>,
        pass: &Pass,
        mut packed: &'p mut [u32],
    ) -> Vec<(usize, &'p [u32])> {
        let left = [(sources.a, pass.k.clone())].into_iter();
        let addends = sources.addends.iter().filter(|_| pass.last).map(|(t, _)| (*t, 0..t.width()));
        let mut blocks = Vec::with_capacity(1 + sources.addends.len());
        for (matrix, k) in left.chain(addends) {
            let line = units_of::<T>(k.len()) * HEIGHT;
            let (block, rest) = packed.split_at_mut(rows.len().div_ceil(HEIGHT) * line);
            packed = rest;
            block.par_chunks_mut(line.max(1)).enumerate().for_each(|(panel, out)| {
                let first = rows.start + panel * HEIGHT;
                pack(matrix.block(first..(first + HEIGHT).min(rows.end), k.clone()), out);
            });
            blocks.push((line, &*block));
        }
        blocks
    }

    /// The tiles of one task: `at` is its first row in the block of rows and its first column in D.
    #[allow(clippy::too_many_arguments)]
    fn task<T: Unit, D: Stored>(
        &self,
        sources: &Sources<'_, T>,
        pass: &Pass,
        packed: &[(usize, &[u32])],
        at: (usize, usize),
        panels: &mut Vec<u32>,
        mut d: MatrixMut<'_, D>,
        mut partial: Option<MatrixMut<'_, f32>>,
    ) {
        let tiles = Tiles::<T>::here().expect("looked for when the program is loaded");
        let columns = at.1..at.1 + d.width();
        let width = Tiles::<T>::panel_width(d.width());
        let right = self.pack_columns(sources, pass, &columns, width, panels);
        let kept = if pass.first { self.gemm.accumulate } else { true };
        let mut tile = Tile::default();
        for row in (0..d.rows()).step_by(HEIGHT) {
            let height = HEIGHT.min(d.rows() - row);
            tile.0.fill(0.0);
            for (i, line) in tile.0.chunks_mut(WIDTH).take(if kept { height } else { 0 }).enumerate() {
                match &mut partial {
                    Some(partial) if !pass.first => line[..columns.len()].copy_from_slice(partial.row(row + i)),
                    _ => D::widen(d.row(row + i), &mut line[..columns.len()]),
                }
            }
            for (index, (scale, b)) in right.iter().enumerate() {
                let (line, a) = packed[index];
                let a = &a[(at.0 + row) / HEIGHT * line..][..line];
                if !b.is_empty() {
                    tiles.multiply(a, b, width, *scale, &mut tile);
                }
            }
            for (i, line) in tile.0.chunks_mut(WIDTH).take(height).enumerate() {
                let line = &mut line[..columns.len()];
                if let Some(bias) = sources.bias.filter(|_| pass.last) {
                    line.iter_mut().zip(&bias[columns.clone()]).for_each(|(x, bias)| *x += bias);
                }
                match &mut partial {
                    Some(partial) if !pass.last => partial.row(row + i).copy_from_slice(line),
                    _ => D::round(line, d.row(row + i)),
                }
            }
        }
    }

    /// Packs the columns of op(B) and of the addends, each with its factor; an addend that has none of them
    /// is empty.
    fn pack_columns<'p, T: Unit>(
        &self,
        sources: &Sources<'_, T>,
        pass: &Pass,
        columns: &Range<usize>,
        width: usize,
        panels: &'p mut Vec<u32>,
    ) -> Vec<(f32, &'p [u32])> {
        let addends = sources.addends.iter().zip(&self.gemm.low_rank).filter(|_| pass.last);
        let rows: usize = addends.clone().map(|((_, b), _)| units_of::<T>(b.height())).sum();
        let needed = (units_of::<T>(pass.k.len()) + rows) * width;
        if panels.len() < needed {
            panels.resize(needed, 0);
        }
        let (product, mut rest) = panels.split_at_mut(units_of::<T>(pass.k.len()) * width);
        pack(sources.b.block(pass.k.clone(), columns.clone()).transposed_if(true), product);
        let mut packed = vec![(self.gemm.scale, &*product)];
        for ((_, b), addend) in addends {
            let (first, count) = addend.columns;
            let (start, end) = (first.max(columns.start), (first + count).min(columns.end));
            let (panel, later) = rest.split_at_mut(units_of::<T>(b.height()) * width);
            rest = later;
            if start >= end {
                packed.push((addend.scale, &[]));
                continue;
            }
            let part = b.block(0..b.height(), start - first..end - first).transposed_if(true);
            pack_behind(part, start - columns.start, width, panel);
            packed.push((addend.scale, &*panel));
        }
        packed
    }
}

/// Packs lines after `before` empty lines.
fn pack_behind<T: Unit>(lines: Matrix<'_, T>, before: usize, width: usize, panel: &mut [u32]) {
    if before == 0 {
        return pack(lines, panel);
    }
    let mut alone = vec![0; panel.len()];
    pack(lines, &mut alone);
    for (to, from) in panel.chunks_mut(width).zip(alone.chunks(width)) {
        to[..before].fill(0);
        to[before..].copy_from_slice(&from[..width - before]);
    }
}

fn rank(t: &TensorRef) -> usize {
    t.shape.last().copied().unwrap_or(1)
}
