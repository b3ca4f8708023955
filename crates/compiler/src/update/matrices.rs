//! The update of matrices by NorMuon: momentum of all, then its orthogonalisation by Newton-Schulz, matrices of
//! equal extents together, and the step. Products are Gemm instructions on values in the activation arena, which
//! the other entries do not need then.

use program::{OptimizerState, Step, TensorRef, scalar};
use tensor::{Attrs, DType};

use super::{push, push_behind};
use crate::lower::{Lowering, arena, scalar_ref};
use crate::memory::{ALIGNMENT_BYTES, Matrices, Run, align};
use crate::options::{OptimizerKind, OptimizerOptions};

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
    optimizer: &OptimizerOptions,
    seed: u64,
    streams: &mut impl Iterator<Item = usize>,
) {
    let OptimizerKind::NorMuon { momentum, beta2, cautious } = optimizer.kind else {
        panic!("only NorMuon keeps states of matrices");
    };
    let Some(OptimizerState::Matrices { first, .. }) = &run.state else {
        panic!("a run of matrices keeps their momentum");
    };
    let mut inputs = vec![run.gradient.clone()];
    inputs.extend([scalar::GRADIENT_SCALE, scalar::UPDATE_APPLIED].map(scalar_ref));
    push(steps, lowering, "momentum", Attrs::new().with("momentum", momentum), inputs, vec![first.clone()]);
    // Products in the type in which the model multiplies the weights.
    let dtype = run.weight.dtype;
    for batch in batches(&run.matrices, dtype) {
        let work = Work::new(&batch, dtype);
        lowering.update_workspace(work.end);
        let mut from = 0;
        for part in &batch {
            let attrs = Attrs::new().with("epsilon", NORM_EPSILON);
            let to = matrices_of(&work.x, from, part.count());
            push_behind(steps, lowering, work.end, "unit_matrices", attrs, vec![part.first.clone()], vec![to]);
            from += part.count();
        }
        let direction = work.orthogonalise(steps, lowering);
        let mut from = 0;
        for part in batch {
            let attrs = Attrs::new()
                .with("beta2", beta2)
                .with("epsilon", ROW_EPSILON)
                .with("scale", STEP_SIZE)
                .with("weight_decay", if run.decay { optimizer.weight_decay } else { 0.0 })
                .with("cautious", cautious)
                .with("stochastic_rounding", part.weight.dtype == DType::BF16)
                .with("seed", seed)
                .with("stream", streams.next().expect("there is always a further number") as u64);
            let mut inputs = vec![matrices_of(&direction, from, part.count())];
            inputs.extend([scalar::LEARNING_RATE, scalar::UPDATE_APPLIED, scalar::STEP].map(scalar_ref));
            from += part.count();
            push_behind(steps, lowering, work.end, "normuon", attrs, inputs, vec![part.weight, part.rows]);
        }
    }
}

/// Rows of matrices cut and put together so that each batch has equal extents and fits.
fn batches(rows: &[Matrices], dtype: DType) -> Vec<Vec<Matrices>> {
    let mut batches: Vec<Vec<Matrices>> = Vec::new();
    for row in rows {
        let most = (BATCH_BYTES / Work::new(&[row.part(0, 1)], dtype).end).max(1);
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
    batches
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
    /// First byte behind them.
    end: usize,
}

impl Work {
    fn new(batch: &[Matrices], dtype: DType) -> Work {
        let count = batch.iter().map(Matrices::count).sum();
        let [m, n] = batch[0].extents();
        let small = m.min(n);
        let mut end = 0;
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
            let mut emit = |op: &str, attrs: &Attrs, inputs: [&TensorRef; 2], output: &TensorRef| {
                let inputs = inputs.map(Clone::clone).to_vec();
                push_behind(steps, lowering, self.end, op, attrs.clone(), inputs, vec![output.clone()]);
            };
            emit("batched_matmul", &gram, [&x, &x], &self.gram);
            emit("batched_matmul", &Attrs::new().with("f32", true), [&self.gram, &self.gram], &self.square);
            emit("newton_schulz_polynomial", &polynomial, [&self.gram, &self.square], &self.polynomial);
            let factors = if wide { [&self.polynomial, &x] } else { [&x, &self.polynomial] };
            emit("batched_matmul", &Attrs::new(), factors, &next);
            std::mem::swap(&mut x, &mut next);
        }
        x
    }
}
