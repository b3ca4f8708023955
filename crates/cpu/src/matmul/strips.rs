//! GEMM by strips: D is split into strips along its longer side, depending only on its shape, and each strip is
//! computed by one thread. 16-bit operands are widened to f32: the split operand strip by strip, the other one once.
//! 8-bit operands are widened once, and their scales are a factor of the product: they are powers of two, so the sums
//! have the bits of those of the scaled numbers. 4-bit operands are widened once, times the scales of their blocks.
//! Addends are added in f32 before the single rounding.

use std::cell::RefCell;
use std::ops::Range;

use program::{Gemm, TensorRef};
use rayon::prelude::*;
use tensor::DType;
use tensor::packed::operand as packed;

use crate::arena::{Memory, Plain, Span, SpanMut, overlap};
use crate::scratch::Scratch;
use crate::simd::{Matrix, MatrixMut, product};
use crate::storage::{BF16, F16, Narrow};

/// Number of rows or columns of one strip.
const STRIP: usize = 128;

thread_local! {
    /// The strip of the divided operand in f32, and the strip of the result before rounding.
    static STRIPS: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// The way in which an operand is read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Access {
    /// f32, read without a copy.
    InPlace,
    /// Widened to a dense copy before the product.
    Copied,
    /// Four-bit elements, widened to a dense copy with the scales of their blocks, by the operand's number.
    Blocks(usize),
    /// 16 bits, widened strip by strip.
    Strips,
}

struct Operand {
    at: TensorRef,
    access: Access,
    rows: usize,
    columns: usize,
    row_stride: usize,
}

/// A product that is ready to run.
pub struct StripGemm {
    gemm: Gemm,
    /// A, B, then T and B of every low-rank addend, then the bias.
    operands: Vec<Operand>,
    /// True if strips are rows of D; otherwise they are columns.
    by_rows: bool,
}

/// An operand while the product runs.
#[derive(Clone, Copy)]
enum Source<'a> {
    Wide(Matrix<'a>),
    Narrow { data: &'a [u16], dtype: DType, row_stride: usize },
}

/// The operands of a running product.
struct Sources<'a> {
    operands: Vec<Source<'a>>,
    /// The factor of the product of A and B.
    scale: f32,
}

impl StripGemm {
    pub fn new(gemm: &Gemm) -> Result<StripGemm, String> {
        let by_rows = gemm.m >= gemm.n;
        let low_rank = gemm.low_rank.iter().flat_map(|r| [(&r.t, false), (&r.b, false)]);
        let all = [(&gemm.a, by_rows), (&gemm.b, !by_rows)].into_iter().chain(low_rank);
        let all = all.chain(gemm.bias.iter().map(|b| (b, false)));
        let mut operands = all.map(|(at, divided)| operand(at, divided, &gemm.d)).collect::<Result<Vec<_>, _>>()?;
        if gemm.has_blocks() {
            operands[..2].iter_mut().enumerate().try_for_each(|(number, of)| of.read_blocks(gemm, number))?;
        } else if let Some(of) = operands.iter().find(|of| of.at.dtype == DType::U8) {
            return Err(format!("{}: products of bytes are not run on the CPU", of.at));
        }
        let product = StripGemm { gemm: gemm.clone(), operands, by_rows };
        product.check()?;
        Ok(product)
    }

    /// Checks the extents of the operands against those of the instruction.
    fn check(&self) -> Result<(), String> {
        let g = &self.gemm;
        let fits = |o: &Operand, rows: usize, columns: usize, transposed: bool| {
            if transposed { (o.columns, o.rows) == (rows, columns) } else { (o.rows, o.columns) == (rows, columns) }
        };
        let d = operand(&g.d, false, &g.d)?;
        let mut ok = fits(&self.operands[0], g.m, g.k, g.transpose_a)
            && fits(&self.operands[1], g.k, g.n, g.transpose_b)
            && fits(&d, g.m, g.n, false);
        for (pair, r) in self.operands[2..].chunks(2).zip(&g.low_rank) {
            let rank = pair[0].columns;
            ok &= pair[0].rows == g.m && fits(&pair[1], rank, r.columns.1, r.transpose_b);
            ok &= r.columns.0 + r.columns.1 <= g.n;
        }
        ok &= g.bias.as_ref().is_none_or(|b| b.len() == g.n);
        if ok { Ok(()) } else { Err(format!("the operands do not fit a product of {}×{}×{}", g.m, g.n, g.k)) }
    }

    /// Makes room for the copies: one buffer for each operand, in order.
    pub fn reserve(&self, scratch: &mut Scratch) {
        scratch.reserve_buffers(self.operands.len());
        for (index, operand) in self.operands.iter().enumerate() {
            match operand.access {
                Access::Copied => scratch.reserve(index, &operand.at),
                Access::Blocks(_) => scratch.buffers[index].reserve_real(operand.rows * operand.columns),
                Access::InPlace | Access::Strips => {}
            }
        }
    }

    pub fn run(&self, memory: &mut Memory, scratch: &mut Scratch) {
        let scales = self.gemm.scales.iter().flat_map(|scales| &scales.of);
        let scale = scales.fold(self.gemm.scale, |scale, at| scale * memory.read::<f32>(at)[0]);
        let buffers = scratch.buffers.as_mut_slice();
        for (operand, buffer) in self.operands.iter().zip(&mut *buffers) {
            match operand.access {
                Access::Copied => buffer.load(memory, &operand.at),
                Access::Blocks(number) => {
                    let blocks = self.gemm.scales.as_ref().and_then(|scales| scales.blocks.as_ref());
                    let scales = &blocks.expect("checked when the program is loaded")[number];
                    buffer.load_operand(memory, &operand.at, scales);
                }
                Access::InPlace | Access::Strips => {}
            }
        }
        let lent: Vec<&TensorRef> = self.operands.iter().filter(|o| !o.is_copied()).map(|o| &o.at).collect();
        let (spans, mut written) = memory.lend(&lent, &[&self.gemm.d]);
        let mut spans = spans.into_iter();
        let sources: Vec<Source<'_>> = self
            .operands
            .iter()
            .zip(buffers.iter())
            .map(|(operand, buffer)| match operand.access {
                Access::Copied | Access::Blocks(_) => {
                    let copy = buffer.real(operand.rows * operand.columns);
                    Source::Wide(Matrix::new(copy, operand.rows, operand.columns, operand.columns))
                }
                Access::InPlace | Access::Strips => source(operand, &spans.next().expect("one span for each")),
            })
            .collect();
        let d = written.pop().expect("one result");
        let sources = &Sources { operands: sources, scale };
        match self.gemm.d.dtype {
            DType::F32 => self.write_f32(d, sources),
            DType::BF16 => self.write_narrow::<BF16>(d, sources),
            DType::F16 => self.write_narrow::<F16>(d, sources),
            other => panic!("a product is not stored as {other}: refused when the program is loaded"),
        }
    }

    fn strips<'a, T: Plain>(&self, d: SpanMut<'a>) -> Vec<(usize, usize, MatrixMut<'a, T>)> {
        let (rows, columns, row_stride) = self.gemm.d.as_matrix().expect("checked when the program is loaded");
        let matrix = MatrixMut::new(d.slice::<T>(), rows, columns, row_stride);
        if self.by_rows { matrix.tiles(STRIP, columns.max(1)) } else { matrix.tiles(rows.max(1), STRIP) }
    }

    fn write_f32(&self, d: SpanMut<'_>, sources: &Sources<'_>) {
        self.strips::<f32>(d).into_par_iter().for_each(|(row, column, mut strip)| {
            STRIPS.with_borrow_mut(|(widened, _)| {
                self.strip(row, column, &mut strip, self.gemm.accumulate, sources, widened)
            });
        });
    }

    fn write_narrow<N: Narrow>(&self, d: SpanMut<'_>, sources: &Sources<'_>) {
        self.strips::<u16>(d).into_par_iter().for_each(|(row, column, mut strip)| {
            STRIPS.with_borrow_mut(|(widened, result)| {
                let (rows, columns) = (strip.rows(), strip.width());
                let result = room(result, rows * columns);
                if self.gemm.accumulate {
                    for (i, result) in result.chunks_mut(columns).enumerate() {
                        N::widen(strip.row(i), result);
                    }
                }
                let mut matrix = MatrixMut::new(result, rows, columns, columns);
                self.strip(row, column, &mut matrix, self.gemm.accumulate, sources, widened);
                for i in 0..rows {
                    N::round(matrix.row(i), strip.row(i));
                }
            });
        });
    }

    /// Computes the part of D that starts at (row, column).
    fn strip(
        &self,
        row: usize,
        column: usize,
        d: &mut MatrixMut<'_, f32>,
        accumulate: bool,
        sources: &Sources<'_>,
        widened: &mut Vec<f32>,
    ) {
        let g = &self.gemm;
        let (rows, columns) = (row..row + d.rows(), column..column + d.width());
        let (a_rows, b_columns) = (rows.clone(), columns.clone());
        let (a, b) = match self.by_rows {
            true => {
                let a = part(sources.operands[0], g.transpose_a, a_rows, 0..g.k, widened);
                (a, wide(sources.operands[1]).transposed_if(g.transpose_b).block(0..g.k, b_columns))
            }
            false => {
                let b = part(sources.operands[1], g.transpose_b, 0..g.k, b_columns, widened);
                (wide(sources.operands[0]).transposed_if(g.transpose_a).block(a_rows, 0..g.k), b)
            }
        };
        product(d, accumulate, a, b, sources.scale);
        self.add_low_rank(&rows, &columns, d, sources);
        if g.bias.is_some() {
            let bias = wide(sources.operands[sources.operands.len() - 1]).values();
            for i in 0..d.rows() {
                for (d, bias) in d.row(i).iter_mut().zip(&bias[columns.clone()]) {
                    *d += bias;
                }
            }
        }
    }

    fn add_low_rank(
        &self,
        rows: &Range<usize>,
        columns: &Range<usize>,
        d: &mut MatrixMut<'_, f32>,
        sources: &Sources<'_>,
    ) {
        for (index, addend) in self.gemm.low_rank.iter().enumerate() {
            let (first, count) = addend.columns;
            let (start, end) = (first.max(columns.start), (first + count).min(columns.end));
            if start >= end {
                continue;
            }
            let t = wide(sources.operands[2 + 2 * index]);
            let b = wide(sources.operands[3 + 2 * index]).transposed_if(addend.transpose_b);
            let t = t.block(rows.clone(), 0..t.width());
            let b = b.block(0..t.width(), start - first..end - first);
            product(&mut d.columns(start - columns.start..end - columns.start), true, t, b, addend.scale);
        }
    }
}

impl Operand {
    fn is_copied(&self) -> bool {
        matches!(self.access, Access::Copied | Access::Blocks(_))
    }

    /// Reads an operand of two four-bit elements in a byte, adjacent along the sum.
    fn read_blocks(&mut self, gemm: &Gemm, number: usize) -> Result<(), String> {
        let scales = &gemm.scales.as_ref().and_then(|scales| scales.blocks.as_ref()).expect("it has blocks")[number];
        self.columns *= 2;
        let bytes = packed::scale_bytes(self.rows, self.columns / packed::BLOCK);
        let whole = self.at.dtype == DType::U8 && self.columns.is_multiple_of(packed::WIDTH);
        let fits = whole && scales.dtype == DType::U8 && scales.is_dense() && scales.len() == bytes;
        if !fits || gemm.transpose_a || !gemm.transpose_b {
            return Err(format!("{} with {scales} is no operand of four bits along the sum", self.at));
        }
        self.access = Access::Blocks(number);
        Ok(())
    }
}

fn operand(at: &TensorRef, divided: bool, d: &TensorRef) -> Result<Operand, String> {
    let (rows, columns, row_stride) = at.as_matrix().ok_or_else(|| format!("{at} is no matrix"))?;
    let access = match at.dtype {
        _ if !std::ptr::eq(at, d) && overlap(at, d) => Access::Copied,
        DType::F32 => Access::InPlace,
        DType::BF16 | DType::F16 if divided => Access::Strips,
        DType::BF16 | DType::F16 | DType::E4M3 | DType::E5M2 | DType::U8 => Access::Copied,
        other => return Err(format!("{at}: products of {other} are not run on the CPU")),
    };
    Ok(Operand { at: at.clone(), access, rows, columns, row_stride })
}

fn source<'a>(operand: &Operand, span: &Span<'a>) -> Source<'a> {
    let (rows, columns, row_stride) = (operand.rows, operand.columns, operand.row_stride);
    match operand.access {
        Access::Strips => Source::Narrow { data: span.slice(), dtype: operand.at.dtype, row_stride },
        _ => Source::Wide(Matrix::new(span.slice(), rows, columns, row_stride)),
    }
}

fn wide<'a>(source: Source<'a>) -> Matrix<'a> {
    match source {
        Source::Wide(matrix) => matrix,
        Source::Narrow { .. } => panic!("only the divided operand is widened strip by strip"),
    }
}

/// A block of op(X), widened into `widened` where X is stored in 16 bits.
fn part<'a>(
    source: Source<'a>,
    transpose: bool,
    rows: Range<usize>,
    columns: Range<usize>,
    widened: &'a mut Vec<f32>,
) -> Matrix<'a> {
    let (data, dtype, row_stride) = match source {
        Source::Wide(matrix) => return matrix.transposed_if(transpose).block(rows, columns),
        Source::Narrow { data, dtype, row_stride } => (data, dtype, row_stride),
    };
    let (stored_rows, stored_columns) = if transpose { (columns, rows) } else { (rows, columns) };
    let (height, width) = (stored_rows.len(), stored_columns.len());
    let widened = room(widened, height * width);
    for (row, out) in stored_rows.zip(widened.chunks_mut(width.max(1))) {
        let start = row * row_stride + stored_columns.start;
        match dtype {
            DType::BF16 => BF16::widen(&data[start..], out),
            DType::F16 => F16::widen(&data[start..], out),
            other => panic!("products of {other} are refused when the program is loaded"),
        }
    }
    Matrix::new(widened, height, width, width).transposed_if(transpose)
}

/// The first `len` elements of a buffer that grows and never shrinks.
fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}
