//! Cross entropy and its gradient at once, as training wants them: the gradient of the sum of losses is known
//! before the sum is. Where a kernel holds a row of logits in shared memory, it is read once.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use super::{HEADERS, IGNORED, check, cost_of, cpu, example_inputs, row_values, spec};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Class, Example, Op, Rows};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("with_gradient.cu");

/// Threads of one block of the kernel that reads a row once, and blocks that share a multiprocessor. On an H200,
/// 4096 rows of 151,936: 646 µs, 3.85 TB/s; the two kernels one after the other 970 µs. More threads are slower.
const THREADS: usize = 256;
const BLOCKS: usize = 2;
/// Bytes of a row in one block, so that two blocks fit the 227 KiB of a multiprocessor.
const MOST_BYTES: usize = 104 << 10;
/// Blocks of a cluster, at most, on any device that has clusters.
const MOST_CLUSTER: usize = 8;
/// Pieces in which a warp's part of a row arrives, and rows that a cluster takes one after the other.
const PIECES: usize = 2;
const ROWS_EACH: usize = 2;

/// token_loss, d_logits = cross_entropy and its gradient
pub struct CrossEntropyWithGradient;

/// The partition of a row of logits over a cluster.
struct Deal {
    cluster: usize,
    /// Packs of eight logits in the region of a warp.
    region: usize,
}

impl Deal {
    /// Returns the partition; `None` where two kernels one after the other do the work: on other GPUs than Hopper, in
    /// other types, for rows that are not read in packs of eight or are longer than the shared memory of a cluster.
    fn new(call: &LowerCall<'_>) -> Option<Deal> {
        let matrices = [&call.inputs[0], &call.outputs[1]];
        if !call.machine.arch.is_hopper()
            || matrices.iter().any(|t| t.dtype != DType::BF16)
            || row_width(&matrices) != 8
        {
            return None;
        }
        let packs = *call.inputs[0].shape.last().expect("the shape rule requires an axis") / 8;
        let region = |cluster: usize| packs.div_ceil(cluster * THREADS / 32);
        let fits = |cluster: &usize| region(*cluster) * (THREADS / 32) * 16 <= MOST_BYTES;
        let cluster = std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|n| *n <= MOST_CLUSTER).find(fits)?;
        Some(Deal { cluster, region: region(cluster) })
    }

    fn kernel(&self, call: &LowerCall<'_>) -> KernelSpec {
        let (logits, d_logits) = (&call.inputs[0], &call.outputs[1]);
        let columns = *logits.shape.last().expect("the shape rule requires an axis");
        let rows = logits.len() / columns;
        let numbers = [
            ("COLUMNS", columns),
            ("ROWS", rows),
            ("ROWS_EACH", ROWS_EACH),
            ("THREADS", THREADS),
            ("BLOCKS", BLOCKS),
            ("CLUSTER", self.cluster),
            ("REGION", self.region),
            ("PIECES", PIECES),
        ];
        let mut defines: Vec<(String, String)> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.push(("IGNORED".to_owned(), format!("({IGNORED})")));
        defines.extend(defines_for("LOGITS", logits));
        defines.extend(defines_for("D_LOGITS", d_logits));
        KernelSpec {
            entry: "cross_entropy_with_gradient",
            source: SOURCE.to_owned(),
            headers: HEADERS.iter().copied().chain([device::HANDOFF]).collect(),
            defines,
            grid: [(rows.div_ceil(ROWS_EACH) * self.cluster) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: (self.region * (THREADS / 32) * 16) as u32,
            args: (0..3).map(Arg::Input).chain((0..2).map(Arg::Output)).collect(),
        }
    }
}

/// The log of the sum of exponentials of each row, in scratch memory.
fn lse(call: &LowerCall<'_>) -> TensorRef {
    let targets = &call.inputs[1];
    TensorRef::dense(targets.arena, 0, DType::F32, targets.shape.clone())
}

/// Both operations one after the other.
fn apart(call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let ([logits, targets, d], [token_loss, d_logits]) = (call.inputs, call.outputs) else {
        unreachable!("the shape rule requires three inputs and gives two results")
    };
    let (lse, between) = (lse(call), Arg::Scratch(0));
    let part = |inputs: &[&TensorRef], outputs: &[&TensorRef], args: Vec<Arg>, backward: bool| {
        let own = |list: &[&TensorRef]| list.iter().map(|t| (*t).clone()).collect::<Vec<_>>();
        let (inputs, outputs) = (own(inputs), own(outputs));
        let part = LowerCall { inputs: &inputs, outputs: &outputs, ..*call };
        let kernel = match backward {
            false => spec("cross_entropy", "FORWARD", &part, &[("LOGITS", logits)]),
            true => {
                let tensors = [("LOGITS", logits), ("D_LOGITS", d_logits)];
                spec("cross_entropy_backward", "BACKWARD", &part, &tensors)
            }
        };
        KernelSpec { args, ..kernel }
    };
    let (logits_arg, targets_arg) = (Arg::Input(0), Arg::Input(1));
    let forward = vec![logits_arg.clone(), targets_arg.clone(), Arg::Output(0), between.clone()];
    let backward = vec![logits_arg, targets_arg, between, Arg::Input(2), Arg::Output(1)];
    vec![
        part(&[logits, targets], &[token_loss, &lse], forward, false),
        part(&[logits, targets, &lse, d], &[d_logits], backward, true),
    ]
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let [logits, targets, d] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let (columns, logits, targets) = (logits.columns(), logits.real(), targets.int());
    let [token_loss, d_logits] = call.outputs_mut();
    let mut lse = vec![T::default(); targets.len()];
    cpu::losses(columns, logits, targets, token_loss.real(), &mut lse);
    cpu::gradient(columns, logits, targets, &lse, d.real(), d_logits.real());
}

impl Op for CrossEntropyWithGradient {
    fn id(&self) -> OpId {
        id::CROSS_ENTROPY_WITH_GRADIENT
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "`cross_entropy` and `cross_entropy_backward` in one. logits […, V], targets i32 […], d_token_loss f32 […] → \
         token_loss f32 […], d_logits like logits. d_logits may take the place of the logits."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, targets, d] = inputs else { return Err("takes logits, targets and d_token_loss".into()) };
        check(logits, targets)?;
        if d.shape != targets.shape || d.dtype != Element::F32 {
            return Err("d_token_loss must be f32, shaped like the targets".into());
        }
        Ok(vec![ValueType::new(Element::F32, targets.shape.clone()), logits.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("operations are fused after differentiation")
    }

    fn in_place(&self) -> Option<(usize, usize)> {
        Some((0, 1))
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        cost_of(inputs, outputs, 7)
    }

    fn row_by_row(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: inputs[1].shape.len(), whole: Vec::new() })
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        if Deal::new(call).is_some() { 0 } else { lse(call).bytes() }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(match Deal::new(call) {
            Some(deal) => vec![deal.kernel(call)],
            None => apart(call),
        })
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        // The last one fills a cluster of four, as the largest vocabularies do.
        let of = |columns| {
            let inputs = example_inputs(columns).into_iter().chain([row_values(-0.5, 1.5)]);
            Example::new(inputs.collect(), Attrs::new())
        };
        vec![of(64), of(37), of(32_000), of(151_936)]
    }
}

#[cfg(test)]
mod tests {
    use tensor::HostTensor;

    use super::super::{CrossEntropy, CrossEntropyBackward};
    use super::*;
    use crate::examples::{Instance, instantiate};

    /// One operation on the inputs of the pair, its results stored in `dtype`.
    fn run(op: &'static dyn Op, inputs: Vec<HostTensor>, outputs: Vec<HostTensor>) -> Vec<HostTensor> {
        Instance { op, attrs: Attrs::new(), inputs, outputs }.expected()
    }

    #[test]
    fn it_gives_the_bits_of_both_operations() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for example in CrossEntropyWithGradient.examples() {
                let joint = instantiate(&example, &CrossEntropyWithGradient, dtype, 5);
                let [logits, targets, d] = joint.inputs.clone().try_into().expect("three inputs");
                let rows = || HostTensor::zeros(DType::F32, targets.shape.clone());
                let made = run(&CrossEntropy, vec![logits.clone(), targets.clone()], vec![rows(), rows()]);
                let [loss, lse] = made.try_into().expect("two results");
                let like_logits = vec![HostTensor::zeros(dtype, logits.shape.clone())];
                let gradient = run(&CrossEntropyBackward, vec![logits, targets, lse, d], like_logits);
                assert_eq!(joint.expected(), [loss, gradient[0].clone()], "{dtype}");
            }
        }
    }
}
