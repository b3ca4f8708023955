//! An operation with independent rows, executed on a few rows at a time: the data that a task widens, computes and
//! rounds stays in the cache, and no operand is copied as a whole. The bits are those of a single call. Does not know
//! what the operation computes.

use std::cell::RefCell;

use ops::{Call, Data, Input, Op, Output};
use program::{Launch, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use crate::arena::{Memory, Plain, Span, SpanMut, overlap};
use crate::scratch::Scratch;
use crate::simd::MatrixMut;
use crate::storage::{Kind, Stored, is_native};

/// Number of elements of all operands that one task has at once.
const ELEMENTS: usize = 1 << 16;

thread_local! {
    /// One dense copy for each operand that cannot be used where it lies.
    static BLOCKS: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// The way in which an input reaches the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    /// A few rows at a time.
    Divided,
    /// The whole input, for every task.
    Whole,
    /// Divided, and in the memory of the result with this index, which is written later.
    Overwritten(usize),
}

/// A tensor as a matrix whose rows are those of the operation.
struct Operand {
    at: TensorRef,
    columns: usize,
    row_stride: usize,
}

/// A row-wise call that is ready to run.
pub struct RowwiseCall {
    op: &'static dyn Op,
    attrs: Attrs,
    inputs: Vec<(Operand, Source)>,
    outputs: Vec<Operand>,
    rows: usize,
    /// Leading axes that are folded into rows.
    axes: usize,
    /// Number of rows of one task.
    height: usize,
}

/// The rows of a result that one task writes.
enum RowsMut<'a> {
    Wide(MatrixMut<'a, f32>),
    Narrow(MatrixMut<'a, u16>),
}

impl RowsMut<'_> {
    /// Widens the rows to dense f32 memory.
    fn widen(&mut self, out: &mut [f32]) {
        match self {
            RowsMut::Wide(part) => each_row(part, out, |stored, wide| <f32 as Stored>::widen(stored, wide)),
            RowsMut::Narrow(part) => each_row(part, out, |stored, wide| u16::widen(stored, wide)),
        }
    }

    fn round(&mut self, values: &mut [f32]) {
        match self {
            RowsMut::Wide(part) => each_row(part, values, |stored, wide| <f32 as Stored>::round(wide, stored)),
            RowsMut::Narrow(part) => each_row(part, values, |stored, wide| u16::round(wide, stored)),
        }
    }
}

fn each_row<T>(part: &mut MatrixMut<'_, T>, dense: &mut [f32], change: impl Fn(&mut [T], &mut [f32])) {
    let columns = part.width();
    for (i, dense) in dense.chunks_mut(columns.max(1)).enumerate() {
        change(part.row(i), dense);
    }
}

impl RowwiseCall {
    /// `None` where the operation or its operands' places do not allow it.
    pub fn launch(launch: &Launch) -> Option<RowwiseCall> {
        let op = ops::find(&launch.op).ok()?;
        let form = op.row_by_row(&launch.inputs, &launch.attrs)?;
        let rows = launch.outputs.first()?.shape.get(..form.axes)?.iter().product::<usize>();
        let inputs: Option<Vec<(Operand, Source)>> = launch
            .inputs
            .iter()
            .enumerate()
            .map(|(index, at)| {
                if form.whole.contains(&index) {
                    let usable = at.is_dense() && Kind::of(at.dtype).is_some() && at.dtype != DType::F16;
                    let apart = launch.outputs.iter().all(|out| !overlap(at, out));
                    let whole = Operand { at: at.clone(), columns: at.len(), row_stride: at.len() };
                    return (usable && apart).then_some((whole, Source::Whole));
                }
                let source = match launch.outputs.iter().position(|out| overlap(at, out)) {
                    None => Source::Divided,
                    Some(out) if launch.outputs[out] == *at => Source::Overwritten(out),
                    Some(_) => return None,
                };
                Some((operand(at, form.axes, rows)?, source))
            })
            .collect();
        let inputs = inputs?;
        let outputs: Vec<Operand> = launch
            .outputs
            .iter()
            .map(|at| operand(at, form.axes, rows).filter(|_| matches!(at.dtype, DType::F32 | DType::BF16)))
            .collect::<Option<_>>()?;
        let apart = |i: usize| outputs[..i].iter().all(|other| !overlap(&other.at, &outputs[i].at));
        if rows == 0 || !(0..outputs.len()).all(apart) {
            return None;
        }
        let divided = inputs.iter().filter(|(_, source)| *source != Source::Whole).map(|(operand, _)| operand);
        let columns: usize = divided.chain(&outputs).map(|operand| operand.columns).sum();
        let height = (ELEMENTS / columns.max(1)).clamp(1, rows);
        Some(RowwiseCall { op, attrs: launch.attrs.clone(), inputs, outputs, rows, axes: form.axes, height })
    }

    /// Makes room for inputs that every task reads as a whole.
    pub fn reserve(&self, scratch: &mut Scratch) {
        for (index, operand) in self.copied() {
            scratch.reserve(index, &operand.at);
        }
    }

    fn copied(&self) -> impl Iterator<Item = (usize, &Operand)> {
        let whole = self.inputs.iter().enumerate().filter(|(_, (_, source))| *source == Source::Whole);
        whole.map(|(index, (operand, _))| (index, operand)).filter(|(_, operand)| !is_native(operand.at.dtype))
    }

    pub fn run(&self, memory: &mut Memory, scratch: &mut Scratch) {
        for (index, operand) in self.copied() {
            scratch.buffers[index].load(memory, &operand.at);
        }
        let lent: Vec<&TensorRef> = self
            .inputs
            .iter()
            .filter(|(_, source)| !matches!(source, Source::Overwritten(_)))
            .map(|i| &i.0.at)
            .collect();
        let written: Vec<&TensorRef> = self.outputs.iter().map(|operand| &operand.at).collect();
        let (spans, spans_mut) = memory.lend(&lent, &written);
        let mut spans = spans.into_iter();
        let spans: Vec<Option<Span<'_>>> = self
            .inputs
            .iter()
            .map(|(_, source)| (!matches!(source, Source::Overwritten(_))).then(|| spans.next().expect("one for each")))
            .collect();
        let whole: Vec<Option<&[f32]>> = self
            .inputs
            .iter()
            .enumerate()
            .map(|(index, (operand, source))| {
                let copied = *source == Source::Whole && !is_native(operand.at.dtype);
                copied.then(|| scratch.buffers[index].real(operand.at.len()))
            })
            .collect();
        let mut tasks: Vec<Vec<RowsMut<'_>>> = (0..self.rows.div_ceil(self.height)).map(|_| Vec::new()).collect();
        for (operand, span) in self.outputs.iter().zip(spans_mut) {
            for (task, part) in tasks.iter_mut().zip(self.parts(operand, span)) {
                task.push(part);
            }
        }
        tasks.into_par_iter().enumerate().for_each(|(index, parts)| {
            let first = index * self.height;
            let rows = self.height.min(self.rows - first);
            // Taken, not borrowed: the reference may run another task of this loop while it waits.
            let mut blocks = BLOCKS.take();
            self.task(first, rows, &spans, &whole, parts, &mut blocks);
            BLOCKS.set(blocks);
        });
    }

    fn parts<'a>(&self, operand: &Operand, span: SpanMut<'a>) -> Vec<RowsMut<'a>> {
        let (rows, columns, stride, height) = (self.rows, operand.columns, operand.row_stride, self.height);
        fn cut<T: Plain>(
            span: SpanMut<'_>,
            rows: usize,
            columns: usize,
            stride: usize,
            height: usize,
        ) -> Vec<MatrixMut<'_, T>> {
            let tiles = MatrixMut::new(span.slice::<T>(), rows, columns, stride).tiles(height, columns.max(1));
            tiles.into_iter().map(|(_, _, tile)| tile).collect()
        }
        match operand.at.dtype {
            DType::F32 => cut(span, rows, columns, stride, height).into_iter().map(RowsMut::Wide).collect(),
            DType::BF16 => cut(span, rows, columns, stride, height).into_iter().map(RowsMut::Narrow).collect(),
            other => panic!("rows of {other} are refused when the program is loaded"),
        }
    }

    fn task(
        &self,
        first: usize,
        rows: usize,
        spans: &[Option<Span<'_>>],
        whole: &[Option<&[f32]>],
        mut parts: Vec<RowsMut<'_>>,
        blocks: &mut Vec<Vec<f32>>,
    ) {
        let count = self.inputs.len() + self.outputs.len();
        if blocks.len() < count {
            blocks.resize_with(count, Vec::new);
        }
        let (for_inputs, for_outputs) = blocks.split_at_mut(self.inputs.len());
        let shapes: Vec<Vec<usize>> = self.inputs.iter().map(|(operand, _)| self.shape(operand, rows)).collect();
        let mut inputs = Vec::with_capacity(self.inputs.len());
        for (index, block) in for_inputs.iter_mut().enumerate() {
            let (operand, source) = &self.inputs[index];
            let shape = if *source == Source::Whole { &operand.at.shape } else { &shapes[index] };
            let data = match (source, &spans[index]) {
                (Source::Overwritten(out), _) => {
                    let block = room(block, rows * operand.columns);
                    parts[*out].widen(block);
                    Data::Real(block)
                }
                (Source::Whole, Some(span)) => match whole[index] {
                    Some(copy) => Data::Real(copy),
                    None => native(span, operand.at.dtype, 0, operand.columns),
                },
                (_, Some(span)) => divided(operand, span, first, rows, block),
                (_, None) => unreachable!("an input that is not overwritten was lent"),
            };
            inputs.push(Input { shape, data });
        }
        let out_shapes: Vec<Vec<usize>> = self.outputs.iter().map(|operand| self.shape(operand, rows)).collect();
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for ((operand, block), shape) in self.outputs.iter().zip(for_outputs.iter_mut()).zip(&out_shapes) {
            let data = room(block, rows * operand.columns);
            outputs.push(Output::Real { shape, data, storage: operand.at.dtype });
        }
        self.op.reference_f32(&mut Call { attrs: &self.attrs, inputs: &inputs, outputs: &mut outputs });
        for ((operand, part), block) in self.outputs.iter().zip(&mut parts).zip(for_outputs) {
            part.round(&mut block[..rows * operand.columns]);
        }
    }

    /// The shape of some rows: leading axes folded into the last of them.
    fn shape(&self, operand: &Operand, rows: usize) -> Vec<usize> {
        let mut shape = operand.at.shape.clone();
        for (axis, extent) in shape.iter_mut().take(self.axes).enumerate() {
            *extent = if axis + 1 == self.axes { rows } else { 1 };
        }
        shape
    }
}

/// A tensor whose first `axes` axes are `rows` evenly spaced rows, each without gaps.
fn operand(at: &TensorRef, axes: usize, rows: usize) -> Option<Operand> {
    let leading: usize = at.shape.get(..axes)?.iter().product();
    let supported = matches!(at.dtype, DType::F32 | DType::BF16 | DType::I32);
    if leading != rows || !supported || at.is_empty() {
        return None;
    }
    let (_, columns, row_stride) = at.reshape(&[rows, at.len() / rows])?.as_matrix()?;
    let dense = at.dtype != DType::I32 || row_stride == columns || rows == 1;
    (dense && (rows == 1 || row_stride >= columns)).then(|| Operand { at: at.clone(), columns, row_stride })
}

/// Some elements of a dense tensor where it lies.
fn native<'a>(span: &Span<'a>, dtype: DType, first: usize, count: usize) -> Data<'a, f32> {
    match dtype {
        DType::I32 => Data::Int(&span.slice()[first..first + count]),
        DType::U8 => Data::Byte(&span.slice()[first..first + count]),
        DType::F32 => Data::Real(&span.slice()[first..first + count]),
        DType::F64 | DType::BF16 | DType::F16 | DType::I64 | DType::E4M3 | DType::E5M2 => {
            panic!("{dtype} is not used where it lies")
        }
    }
}

/// Some rows of an input: where they lie if they can be used there, otherwise in `block`.
fn divided<'a>(
    operand: &Operand,
    span: &Span<'a>,
    first: usize,
    rows: usize,
    block: &'a mut Vec<f32>,
) -> Data<'a, f32> {
    let (columns, stride) = (operand.columns, operand.row_stride);
    if is_native(operand.at.dtype) && (stride == columns || rows == 1) {
        return native(span, operand.at.dtype, first * stride, rows * columns);
    }
    let block = room(block, rows * columns);
    for (i, out) in block.chunks_mut(columns).enumerate() {
        let start = (first + i) * stride;
        match operand.at.dtype {
            DType::F32 => f32::widen(&span.slice()[start..start + columns], out),
            DType::BF16 => u16::widen(&span.slice()[start..start + columns], out),
            other => panic!("rows of {other} are refused when the program is loaded"),
        }
    }
    Data::Real(block)
}

/// The first `len` elements of a buffer that grows and never shrinks.
fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}
