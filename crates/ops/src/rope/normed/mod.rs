//! Heads normalised and rotated in one pass over memory, as models with query and key norms have it:
//! `rmsnorm` then `rope` forward, `rope` then `rmsnorm_backward` or `rmsnorm_gradients` backward. The
//! value between the two is rounded as it would have been stored, so that fusing never changes bits.
//!
//! Shapes that the joint kernels do not cover, and interleaved pairs, become the kernels of the two.

mod backward;
mod heads;

use backward::{RopeRmsNormBackward, RopeRmsNormGradients};
use graph::{Dim, Element, OpId, ValueType};
pub use heads::{RMSNORM_ROPE, ROPE_RMSNORM_BACKWARD, ROPE_RMSNORM_GRADIENTS};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use super::rotation::{INTERLEAVED, Rope, axes_of};
use crate::call::{Call, Data, Input, Output};
use crate::elementwise::round_to;
use crate::evaluate::Evaluate;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type, follows};
use crate::layout::row_width;
use crate::norm::RMSNORM;
use crate::op::{Attribute, Class, Example, ExampleInput, Fusion, Keeps, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("normed.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../../cuda/types.cuh")), ("pack.cuh", include_str!("../../cuda/pack.cuh"))];

/// The kernel of the forward pass.
const FORWARD: &str = "rmsnorm_rope";

const EPS: Attribute = Attribute { name: "eps", kind: "float", doc: "added to the mean of squares" };
const OFFSET: Attribute = Attribute { name: "offset", kind: "bool?", doc: "multiply with 1 + w instead of w" };
const INVERSE: Attribute = Attribute { name: "inverse", kind: "bool?", doc: "rotate by −angle" };

/// Heads that a group of lanes takes forward, where it keeps few of each.
const HEADS_OF_A_GROUP: usize = 2;
/// The smallest number of threads in a block, where there are enough tokens, and the largest.
const FEWEST_THREADS: usize = 128;
const MOST_THREADS: usize = 1024;
/// Threads that a multiprocessor holds at once, for the compiler of the device code: what lanes keep in registers
/// fits. Less where each block also keeps sums for the weight gradient.
const RESIDENT: usize = 1152;
const RESIDENT_WITH_SUMS: usize = 640;

/// The tensors of one side: for every name in the kernel's text its place.
type Side<'a> = Vec<(&'static str, &'a TensorRef)>;

/// The partition of the heads of one tensor, or of two, over threads: a block takes some tokens with all their heads.
struct Deal {
    batch: usize,
    tokens: usize,
    /// Heads of each side; none for a side that is not there.
    heads: [usize; 2],
    pairs: usize,
    /// The definition of several positions a token.
    axes: Option<(String, String)>,
    /// Number of tokens in a block.
    together: usize,
    threads: usize,
}

impl Deal {
    /// Returns the partition; `None` for shapes that the joint kernels do not cover: heads are rotated whole, in packs
    /// of eight elements, and half a head fills 1, 2, 4, 8 or 16 lanes. A group of lanes takes `each` heads.
    fn new(sides: &[Side<'_>], inv_freq: &TensorRef, each: usize) -> Option<Deal> {
        let [batch, tokens, _, columns] = sides[0][0].1.shape[..] else { return None };
        let pairs = *inv_freq.shape.last()?;
        let lanes = pairs / 8;
        let all: Vec<&TensorRef> = sides.iter().flatten().map(|(_, tensor)| *tensor).collect();
        let alike = sides.iter().all(|side| side.iter().zip(&sides[0]).all(|(a, b)| a.1.dtype == b.1.dtype));
        let whole = all.iter().all(|t| t.shape[3] == columns) && 2 * pairs == columns && pairs.is_multiple_of(8);
        if !alike || !whole || !lanes.is_power_of_two() || lanes > 16 || row_width(&all) != 8 {
            return None;
        }
        let heads = [sides[0][0].1.shape[2], sides.get(1).map_or(0, |side| side[0].1.shape[2])];
        let of_token = heads.iter().sum::<usize>() * lanes;
        let fills = |lanes: usize| lanes.is_multiple_of(32 * each) && lanes >= FEWEST_THREADS * each;
        let together = (1..=FEWEST_THREADS * each).find(|n| fills(n * of_token))?;
        let threads = together * of_token / each;
        (threads <= MOST_THREADS).then_some(Deal {
            batch,
            tokens,
            heads,
            pairs,
            axes: axes_of(inv_freq),
            together,
            threads,
        })
    }

    /// Blocks of which a multiprocessor holds `resident` threads.
    fn resident(&self, resident: usize) -> usize {
        (resident / self.threads).max(1)
    }

    /// Blocks that take every token once.
    fn blocks(&self) -> usize {
        (self.batch * self.tokens).div_ceil(self.together)
    }

    /// The kernel over the sides' strided tensors of four axes; `w` is dense. `resident` threads are to fit.
    fn spec(
        &self,
        entry: &'static str,
        attrs: &Attrs,
        sides: &[Side<'_>],
        w: &TensorRef,
        resident: usize,
    ) -> KernelSpec {
        let flag = |name: &str| attrs.flag(name).expect("checked by the shape rule") as usize;
        let follows = entry == FORWARD && follows(self.blocks());
        let numbers = [
            ("FOLLOWS", follows as usize),
            ("BATCH", self.batch),
            ("TOKENS", self.tokens),
            ("HEADS_1", self.heads[0]),
            ("HEADS_2", self.heads[1]),
            ("PAIRS", self.pairs),
            ("TOGETHER", self.together),
            ("OFFSET", flag("offset")),
            ("INVERSE", flag("inverse")),
            ("THREADS", self.threads),
            ("BLOCKS", self.resident(resident)),
        ];
        let mut defines: Vec<(String, String)> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.extend(self.axes.clone());
        defines.push(("W_T".to_owned(), device_type(w.dtype).to_owned()));
        for (name, tensor) in &sides[0] {
            defines.push((format!("{name}_T"), device_type(tensor.dtype).to_owned()));
        }
        for (number, (name, tensor)) in sides.iter().enumerate().flat_map(|(i, s)| s.iter().map(move |t| (i + 1, t))) {
            for (axis, stride) in ["B", "S", "H"].iter().zip(&tensor.strides) {
                defines.push((format!("{name}_{axis}{number}"), stride.to_string()));
            }
        }
        KernelSpec {
            entry,
            source: SOURCE.to_owned(),
            headers: HEADERS.iter().copied().chain(follows.then_some(device::DEPENDENT_LAUNCH)).collect(),
            defines,
            grid: [self.blocks() as u32, 1, 1],
            block: [self.threads as u32, 1, 1],
            shared_bytes: 0,
            args: Vec::new(),
        }
    }
}

/// The heads of a forward pass: `x` to `y` on each side.
fn forward_kernel(call: &LowerCall<'_>, sides: &[[usize; 4]], tables: [usize; 3]) -> Option<KernelSpec> {
    if call.attrs.flag("interleaved").expect("checked by the shape rule") {
        return None;
    }
    let tensors: Vec<Side<'_>> =
        sides.iter().map(|[x, _, _, y]| vec![("X", &call.inputs[*x]), ("Y", &call.outputs[*y])]).collect();
    if sides.iter().any(|[_, w, ..]| call.inputs[*w].dtype != call.inputs[sides[0][1]].dtype) {
        return None;
    }
    let deal = Deal::new(&tensors, &call.inputs[tables[1]], HEADS_OF_A_GROUP)?;
    let mut kernel = deal.spec(FORWARD, call.attrs, &tensors, &call.inputs[sides[0][1]], RESIDENT);
    let eps = call.attrs.float("eps").expect("checked by the shape rule");
    kernel.defines.push(("EPS".to_owned(), format!("{eps:e}f")));
    let read = sides.iter().flat_map(|[x, w, ..]| [*x, *w]).chain(tables).map(Arg::Input);
    kernel.args = read.chain(sides.iter().flat_map(|[_, _, r, y]| [*r, *y]).map(Arg::Output)).collect();
    Some(kernel)
}

/// The kernels of an operation with other tensors: one half of a pair. `args` names for each of its
/// tensors the argument of the whole; its scratch memory begins at `scratch`.
fn half(
    op: &dyn Op,
    call: &LowerCall<'_>,
    inputs: &[(&TensorRef, Arg)],
    outputs: &[(&TensorRef, Arg)],
    scratch: usize,
) -> Vec<KernelSpec> {
    let tensors = |list: &[(&TensorRef, Arg)]| list.iter().map(|(t, _)| (*t).clone()).collect::<Vec<_>>();
    let (ins, outs) = (tensors(inputs), tensors(outputs));
    let known = |name: &String| op.attributes().iter().any(|a| a.name == name);
    let attrs = call.attrs.iter().filter(|(name, _)| known(name)).map(|(n, v)| (n.clone(), v.clone())).collect();
    let part =
        LowerCall { inputs: &ins, outputs: &outs, attrs: &attrs, machine: call.machine, documents: call.documents };
    let Lowered::Kernels(mut specs) = op.lower(&part) else { unreachable!("norms and rotations are kernels") };
    for arg in specs.iter_mut().flat_map(|spec| &mut spec.args) {
        *arg = match *arg {
            Arg::Input(i) => inputs[i].1.clone(),
            Arg::Output(i) => outputs[i].1.clone(),
            Arg::Scratch(offset) => Arg::Scratch(scratch + offset),
            ref other => (*other).clone(),
        };
    }
    specs
}

/// Shapes of the rotation's tables and of one head's weight, against x [B, T, heads, D].
fn check(x: &ValueType, w: &ValueType, tables: [&ValueType; 3]) -> Result<(), String> {
    let [positions, inv_freq, scaling] = tables;
    if w.shape.len() != 1 || w.last() != x.last() {
        return Err("the weight must have the columns of a head".into());
    }
    let rotation = [x, positions, inv_freq, scaling].map(ValueType::clone);
    Rope.infer(&rotation, &Attrs::new()).map(|_| ())
}

/// The shape of one statistic for each head.
fn head_shape(x: &ValueType) -> Vec<Dim> {
    x.shape[..x.shape.len() - 1].to_vec()
}

/// r, y = rmsnorm_rope(x, w, positions, inv_freq, attention_scaling)
struct RmsNormRope;

fn forward<T: Evaluate>(call: &mut Call<'_, T>) {
    let [x, w, tables @ ..] = call.inputs else { unreachable!("the shape rule asks for five inputs") };
    let attrs = call.attrs;
    let [r, y] = call.outputs_mut();
    let normed = between(x.shape, y.storage(), |normed| {
        T::call(&RMSNORM, &mut Call { attrs, inputs: &[*x, *w], outputs: &mut [normed, r.lend()] });
    });
    let inputs = [&[Input { shape: x.shape, data: Data::Real(&normed) }], tables].concat();
    T::call(&Rope, &mut Call { attrs, inputs: &inputs, outputs: &mut [y.lend()] });
}

/// Returns the value between the operations of a pair, as it would be stored.
fn between<T: Real>(shape: &[usize], storage: DType, make: impl FnOnce(Output<'_, T>)) -> Vec<T> {
    let mut data = vec![T::default(); shape.iter().product()];
    make(Output::Real { shape, data: &mut data, storage });
    data.par_iter_mut().for_each(|v| *v = round_to(storage, *v));
    data
}

impl Op for RmsNormRope {
    fn id(&self) -> OpId {
        id::RMSNORM_ROPE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`rmsnorm` of each head, rounded as it would be stored, then `rope`. x [B, T, heads, D], w [D], positions i32 \
         [B, T], inv_freq f32 [R/2], attention_scaling f32 [1] → r f32 [B, T, heads], y like x. Of two tensors at the same positions: x, w, x2, w2, then the shared \
         inputs → r, y, r2, y2."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[EPS, OFFSET, INVERSE, INTERLEAVED]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, w, positions, inv_freq, scaling] = inputs else {
            return Err("takes x, the weight, positions, inv_freq and attention_scaling".into());
        };
        check(x, w, [positions, inv_freq, scaling])?;
        attrs.float("eps")?;
        ["offset", "inverse", "interleaved"]
            .iter()
            .try_for_each(|name| attrs.flag(name).map(|_| ()).map_err(|e| e.0))?;
        Ok(vec![ValueType::new(Element::F32, head_shape(x)), x.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("operations are fused after differentiation")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let ([x, w, positions, inv_freq, scaling], [r, y]) = (call.inputs, call.outputs) else {
            unreachable!("the shape rule requires five inputs and gives two results")
        };
        let Some(kernel) = forward_kernel(call, &[[0, 1, 0, 1]], [2, 3, 4]) else {
            // The rotation reads and writes the same place.
            let mut kernels = half(
                &RMSNORM,
                call,
                &[(x, Arg::Input(0)), (w, Arg::Input(1))],
                &[(y, Arg::Output(1)), (r, Arg::Output(0))],
                0,
            );
            let tables = [(positions, Arg::Input(2)), (inv_freq, Arg::Input(3)), (scaling, Arg::Input(4))];
            let inputs = [&[(y, Arg::Output(1))], &tables[..]].concat();
            kernels.extend(half(&Rope, call, &inputs, &[(y, Arg::Output(1))], 0));
            return Lowered::Kernels(kernels);
        };
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(forward);

    fn examples(&self) -> Vec<Example> {
        let example = |x: [usize; 4], pairs: usize, offset: bool| {
            let normal = |shape: Vec<usize>| ExampleInput::Normal { shape, scale: 1.0 };
            let inputs = [vec![normal(x.to_vec()), normal(vec![x[3]])], tables(&x, pairs)].concat();
            Example::new(inputs, Attrs::new().with("eps", 1e-6).with("offset", offset))
        };
        let mut interleaved = example([1, 3, 2, 16], 8, false);
        interleaved.attrs = interleaved.attrs.with("interleaved", true);
        vec![
            example([2, 3, 4, 16], 8, false),
            example([1, 37, 6, 128], 64, true),
            // Columns that are not rotated; halves that fill no power of two of lanes.
            example([1, 3, 2, 24], 8, false),
            example([2, 2, 3, 48], 24, false),
            interleaved,
        ]
    }

    fn fusions(&self) -> Vec<Fusion> {
        vec![Fusion { first: id::RMSNORM, second: id::ROPE, operand: 0, keeps: Keeps::Others }]
    }
}

/// Positions, frequencies and scaling of an example.
fn tables(x: &[usize; 4], pairs: usize) -> Vec<ExampleInput> {
    let positions = (0..x[0] * x[1]).map(|i| (i * i * 7 % 3000) as i32).collect();
    vec![
        ExampleInput::Ints { shape: x[..2].to_vec(), values: positions },
        ExampleInput::F32 {
            shape: vec![pairs],
            values: (0..pairs).map(|i| 10000f32.powf(-(i as f32) / pairs as f32)).collect(),
        },
        ExampleInput::F32 { shape: vec![1], values: vec![1.25] },
    ]
}
