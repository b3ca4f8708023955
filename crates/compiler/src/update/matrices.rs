//! The update of matrices by NorMuon: momentum of all, then its orthogonalisation by Newton-Schulz, matrices of
//! equal extents together, and the step. Products are Gemm instructions on values in the activation arena, which
//! the other entries do not need then.

use ops::{OpId, id};
use program::{Step, TensorRef, scalar};
use tensor::{Attrs, DType};

use super::steps::push_behind;
use crate::lowering::Lowering;
use crate::memory::{ALIGNMENT_BYTES, Matrices, Run, align, arena, scalar_ref};
use crate::options::{OptimizerKind, OptimizerOptions};
use crate::rule::{Pace, Rule};

/// Bytes of the values of one batch, unless a single matrix needs more. Fixed, because the number of matrices of a
/// batch may decide how a product is summed.
const BATCH_BYTES: usize = 256 << 20;

/// Rounds of Newton-Schulz, and the factors of its polynomial (Jordan et al. 2024).
const ROUNDS: usize = 5;
const FACTORS: [f64; 3] = [3.4445, -4.775, 2.0315];

/// Added to the norm that matrices are divided by.
const NORM_EPSILON: f64 = 1e-7;

/// Added to the root of the mean square of a row.
const ROW_EPSILON: f64 = 1e-8;

/// Root mean square of a step in learning rates: what AdamW's steps have, so that one rate serves both.
const STEP_SIZE: f64 = 0.2;

pub(super) fn update(
    steps: &mut Vec<Step>,
    lowering: &mut Lowering<'_>,
    run: &Run,
    taken: usize,
    optimizer: &OptimizerOptions,
    seed: u64,
    number: usize,
) {
    let first = &run.states[0].at;
    let batches = batches(&run.matrices, run.weight.dtype);
    let mut orthogonal = Orthogonal::new(&batches, taken, optimizer, seed, run.start.is_some());
    orthogonal.mean(steps, lowering, taken, &run.gradient, first);
    let mut numbers = number..;
    for (number, batch) in batches.iter().enumerate() {
        let mut from = 0;
        for part in &batch.parts {
            orthogonal.unit(steps, lowering, (number, from), &part.first);
            from += part.count();
        }
        let mut from = 0;
        for (part, stream) in batch.parts.iter().zip(numbers.by_ref()) {
            orthogonal.step(steps, lowering, (number, from), part, run.pace, stream);
            from += part.count();
        }
    }
}

/// Batches of matrices between momentum and step.
pub(super) struct Orthogonal<'a> {
    batches: &'a [Batch],
    /// First bytes of the activation arena, which others occupy.
    taken: usize,
    optimizer: &'a OptimizerOptions,
    seed: u64,
    /// True if every rank has matrices of its own.
    sharded: bool,
    /// The step direction of the batch whose matrices were complete last.
    direction: Option<TensorRef>,
}

impl<'a> Orthogonal<'a> {
    pub fn new(batches: &'a [Batch], taken: usize, optimizer: &'a OptimizerOptions, seed: u64, sharded: bool) -> Self {
        Orthogonal { batches, taken, optimizer, seed, sharded, direction: None }
    }

    fn work(&self, batch: usize) -> Work {
        let Batch { parts, dtype } = &self.batches[batch];
        Work::new(parts, *dtype, self.taken)
    }

    /// Returns the first byte after the values of a batch.
    pub fn end(&self, batch: usize) -> usize {
        self.work(batch).end
    }

    fn rule(&self) -> [f64; 2] {
        let OptimizerKind::NorMuon { momentum, beta2, .. } = self.optimizer.kind else {
            panic!("only NorMuon keeps states of matrices");
        };
        [momentum, beta2]
    }

    fn mean(
        &self,
        steps: &mut Vec<Step>,
        lowering: &mut Lowering<'_>,
        taken: usize,
        gradient: &TensorRef,
        first: &TensorRef,
    ) {
        let mut inputs = vec![gradient.clone()];
        inputs.extend([scalar::GRADIENT_SCALE, scalar::UPDATE_APPLIED].map(scalar_ref));
        let attrs = Attrs::new().with("momentum", self.rule()[0]);
        push_behind(steps, lowering, taken, id::MOMENTUM, attrs, inputs, vec![first.clone()]);
    }

    /// The momentum of one matrix, and its place in the batch.
    pub fn momentum(
        &mut self,
        steps: &mut Vec<Step>,
        lowering: &mut Lowering<'_>,
        (batch, index): (usize, usize),
        gradient: &TensorRef,
        first: &TensorRef,
    ) {
        self.mean(steps, lowering, self.end(batch), gradient, first);
        let [rows, columns] = self.batches[batch].parts[0].extents();
        let matrix = first.reshape(&[1, rows, columns]).expect("a matrix lies densely");
        self.unit(steps, lowering, (batch, index), &matrix);
    }

    /// Writes matrices, divided by their norms, into the batch from an index on. With the last of them the batch is
    /// made orthogonal.
    fn unit(
        &mut self,
        steps: &mut Vec<Step>,
        lowering: &mut Lowering<'_>,
        (batch, from): (usize, usize),
        first: &TensorRef,
    ) {
        let work = self.work(batch);
        lowering.update_workspace(work.end);
        let count = first.shape[0];
        let to = matrices_of(&work.x, from, count);
        let attrs = Attrs::new().with("epsilon", NORM_EPSILON);
        push_behind(steps, lowering, work.end, id::UNIT_MATRICES, attrs, vec![first.clone()], vec![to]);
        if from + count == work.x.shape[0] {
            self.direction = Some(work.orthogonalise(steps, lowering));
        }
    }

    /// The step of some matrices of the batch that was complete last.
    pub fn step(
        &self,
        steps: &mut Vec<Step>,
        lowering: &mut Lowering<'_>,
        (batch, from): (usize, usize),
        part: &Matrices,
        pace: Pace,
        stream: usize,
    ) {
        let OptimizerKind::NorMuon { cautious, .. } = self.optimizer.kind else {
            panic!("only NorMuon keeps states of matrices");
        };
        let direction = self.direction.as_ref().expect("a batch is made orthogonal before its steps");
        let attrs = Attrs::new()
            .with("beta2", self.rule()[1])
            .with("epsilon", ROW_EPSILON)
            .with("scale", STEP_SIZE)
            .with("cautious", cautious)
            .with("stochastic_rounding", part.weight.dtype == DType::BF16)
            .with("seed", self.seed)
            .with("stream", stream as u64);
        let attrs = pace.on(attrs, self.optimizer);
        let [rows, columns] = part.extents();
        let numbers = part.count() * (rows * columns).next_multiple_of(4);
        let attrs = if self.sharded { attrs.with("start_per_rank", numbers as u64) } else { attrs };
        let mut inputs = vec![matrices_of(direction, from, part.count())];
        inputs.extend([scalar::LEARNING_RATE, scalar::UPDATE_APPLIED, scalar::STEP].map(scalar_ref));
        let outputs = vec![part.weight.clone(), part.rows.clone()];
        push_behind(steps, lowering, self.end(batch), Rule::NorMuon.operation(), attrs, inputs, outputs);
    }
}

/// Matrices of equal extents that are made orthogonal together.
pub(crate) struct Batch {
    pub parts: Vec<Matrices>,
    /// The type in which the matrices are multiplied: the one in which the model multiplies the weights.
    dtype: DType,
}

/// Rows of matrices cut and put together so that each batch has equal extents and fits.
pub(crate) fn batches(rows: &[Matrices], dtype: DType) -> Vec<Batch> {
    let mut batches: Vec<Vec<Matrices>> = Vec::new();
    for row in rows {
        let most = (BATCH_BYTES / Work::new(&[row.part(0, 1)], dtype, 0).end).max(1);
        let mut from = 0;
        while from < row.count() {
            let open = batches.iter_mut().find(|batch| {
                batch[0].extents() == row.extents() && batch.iter().map(Matrices::count).sum::<usize>() < most
            });
            let taken = open.as_ref().map_or(0, |batch| batch.iter().map(Matrices::count).sum());
            let part = row.part(from, (row.count() - from).min(most - taken));
            from += part.count();
            match open {
                Some(batch) => batch.push(part),
                None => batches.push(vec![part]),
            }
        }
    }
    batches.into_iter().map(|parts| Batch { parts, dtype }).collect()
}

/// Some matrices of a batch.
fn matrices_of(batch: &TensorRef, from: usize, count: usize) -> TensorRef {
    let shape = [&[count], &batch.shape[1..]].concat();
    let offset = batch.offset + from * batch.strides[0] * batch.dtype.size();
    TensorRef { offset, shape, ..batch.clone() }
}

/// Values of a batch in the activation arena. With r the smaller extent of its matrices [m, n]:
struct Work {
    /// [count, m, n] twice: a round reads one and writes the other.
    x: TensorRef,
    next: TensorRef,
    /// [count, r, r]: X·Xᵀ or Xᵀ·X, its square in f32, and the polynomial.
    gram: TensorRef,
    square: TensorRef,
    polynomial: TensorRef,
    /// The first byte after them.
    end: usize,
}

impl Work {
    /// Places the values of a batch after the first `start` bytes of the arena.
    fn new(batch: &[Matrices], dtype: DType, start: usize) -> Work {
        let count = batch.iter().map(Matrices::count).sum();
        let [m, n] = batch[0].extents();
        let small = m.min(n);
        let mut end = align(start, ALIGNMENT_BYTES);
        let mut take = |dtype: DType, rows: usize, columns: usize| {
            let tensor = TensorRef::dense(arena::ACTIVATIONS, end, dtype, [count, rows, columns]);
            end = align(end + tensor.bytes(), ALIGNMENT_BYTES);
            tensor
        };
        let (x, next) = (take(dtype, m, n), take(dtype, m, n));
        let (gram, square) = (take(dtype, small, small), take(DType::F32, small, small));
        let polynomial = take(dtype, small, small);
        Work { x, next, gram, square, polynomial, end }
    }

    /// Rounds of X ← (a·I + b·A + c·A²)·X with A = X·Xᵀ, or from the right where that is smaller. Gives the place of
    /// the result.
    fn orthogonalise(&self, steps: &mut Vec<Step>, lowering: &mut Lowering<'_>) -> TensorRef {
        let wide = self.x.shape[1] <= self.x.shape[2];
        let gram = Attrs::new().with(if wide { "transpose_b" } else { "transpose_a" }, true);
        let [a, b, c] = FACTORS;
        let polynomial = Attrs::new().with("a", a).with("b", b).with("c", c);
        let (mut x, mut next) = (self.x.clone(), self.next.clone());
        for _ in 0..ROUNDS {
            let mut emit = |op: OpId, attrs: &Attrs, inputs: [&TensorRef; 2], output: &TensorRef| {
                let inputs = inputs.map(Clone::clone).to_vec();
                push_behind(steps, lowering, self.end, op, attrs.clone(), inputs, vec![output.clone()]);
            };
            emit(id::BATCHED_MATMUL, &gram, [&x, &x], &self.gram);
            emit(id::BATCHED_MATMUL, &Attrs::new().with("f32", true), [&self.gram, &self.gram], &self.square);
            emit(id::NEWTON_SCHULZ_POLYNOMIAL, &polynomial, [&self.gram, &self.square], &self.polynomial);
            let factors = if wide { [&self.polynomial, &x] } else { [&x, &self.polynomial] };
            emit(id::BATCHED_MATMUL, &Attrs::new(), factors, &next);
            std::mem::swap(&mut x, &mut next);
        }
        x
    }
}
