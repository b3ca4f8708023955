//! The backward pass through rotation and normalization of the heads, with the weight gradient or without.

use graph::{Element, OpId, ValueType};
use program::{Arg, TensorRef};
use tensor::Attrs;

use super::{
    Deal, INVERSE, OFFSET, RESIDENT, RESIDENT_WITH_SUMS, Side, between as stored_between, check, half, head_shape,
    tables,
};
use crate::call::{Call, Data, Input, Output};
use crate::evaluate::Evaluate;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::norm::{RMSNORM_BACKWARD, RMSNORM_GRADIENTS};
use crate::op::{Attribute, Class, Example, ExampleInput, Fusion, Keeps, Op};
use crate::registry::id;
use crate::rope::rotation::{INTERLEAVED, Rope};
use crate::rowwise::sum_partials;

const INPUTS: &str = "dy [B, T, heads, D], positions i32 [B, T], inv_freq f32 [R/2], attention_scaling f32 [1], x like \
                      dy, w [D], r f32 [B, T, heads]";

/// Multiprocessors that are filled once where each block leaves a part of the weight gradient.
const MULTIPROCESSORS: usize = 132;

fn infer(inputs: &[ValueType], attrs: &Attrs) -> Result<ValueType, String> {
    let [dy, positions, inv_freq, scaling, x, w, r] = inputs else { return Err(format!("takes {INPUTS}")) };
    check(x, w, [positions, inv_freq, scaling])?;
    if dy.shape != x.shape || r.shape != head_shape(x) {
        return Err("dy must be shaped like x, r like its heads".into());
    }
    ["offset", "inverse", "accumulate", "interleaved"]
        .iter()
        .try_for_each(|name| attrs.flag(name).map(|_| ()).map_err(|e| e.0))?;
    Ok(x.clone())
}

/// Runs the rotation, then `second` on its result.
fn pair<T: Evaluate>(second: &dyn Op, call: &mut Call<'_, T>) {
    let (attrs, inputs) = (call.attrs, call.inputs);
    let turned = stored_between(inputs[0].shape, call.outputs[0].storage(), |turned| {
        T::call(&Rope, &mut Call { attrs, inputs: &inputs[..4], outputs: &mut [turned] });
    });
    let dy = Input { shape: inputs[0].shape, data: Data::Real(&turned) };
    let inputs = [inputs[4], inputs[5], inputs[6], dy];
    let mut outputs: Vec<Output<'_, T>> = call.outputs.iter_mut().map(Output::lend).collect();
    T::call(second, &mut Call { attrs, inputs: &inputs, outputs: &mut outputs });
}

fn backward<T: Evaluate>(call: &mut Call<'_, T>) {
    pair(&RMSNORM_BACKWARD, call);
}

fn gradients<T: Evaluate>(call: &mut Call<'_, T>) {
    pair(&RMSNORM_GRADIENTS, call);
}

/// Returns the rotation into scratch memory, then `second` from there, with its own scratch memory after that.
fn apart(call: &LowerCall<'_>, second: &dyn Op) -> Vec<KernelSpec> {
    let between = between(call);
    let input = |index: usize| (&call.inputs[index], Arg::Input(index));
    let turned = (&between, Arg::Scratch(0));
    let results: Vec<(&TensorRef, Arg)> = call.outputs.iter().enumerate().map(|(i, t)| (t, Arg::Output(i))).collect();
    let mut kernels = half(&Rope, call, &[0, 1, 2, 3].map(input), std::slice::from_ref(&turned), 0);
    let inputs = [input(4), input(5), input(6), turned];
    kernels.append(&mut half(second, call, &inputs, &results, between.bytes()));
    kernels
}

/// The rotated gradient, dense in scratch memory.
fn between(call: &LowerCall<'_>) -> TensorRef {
    let dy = &call.inputs[0];
    TensorRef::dense(dy.arena, 0, dy.dtype, dy.shape.clone())
}

/// The places of one side's operands among the inputs, and of its results among the results.
pub(super) struct Places {
    pub dy: usize,
    pub x: usize,
    pub w: usize,
    pub r: usize,
    pub dx: usize,
    /// The weight gradient, where it is wanted.
    pub dw: Option<usize>,
}

/// The one side of the operations here.
fn alone(dw: Option<usize>) -> [Places; 1] {
    [Places { dy: 0, x: 4, w: 5, r: 6, dx: 0, dw }]
}

/// Positions, frequencies and scaling among their inputs.
const TABLES: [usize; 3] = [1, 2, 3];

/// Returns the kernels of the backward pass over one side or two, with sums of the weight gradients, and their scratch
/// memory.
pub(super) fn kernels(call: &LowerCall<'_>, sides: &[Places], tables: [usize; 3]) -> Option<(Vec<KernelSpec>, usize)> {
    if call.attrs.flag("interleaved").expect("checked by the shape rule") {
        return None;
    }
    let tensors: Vec<Side<'_>> = sides
        .iter()
        .map(|at| vec![("DY", &call.inputs[at.dy]), ("X", &call.inputs[at.x]), ("DX", &call.outputs[at.dx])])
        .collect();
    if sides.iter().any(|at| call.inputs[at.w].dtype != call.inputs[sides[0].w].dtype) {
        return None;
    }
    let deal = Deal::new(&tensors, &call.inputs[tables[1]], 1)?;
    let sums: Vec<usize> = sides.iter().filter_map(|at| at.dw).collect();
    let resident = if sums.is_empty() { RESIDENT } else { RESIDENT_WITH_SUMS };
    let mut kernel = deal.spec("rope_rmsnorm_backward", call.attrs, &tensors, &call.inputs[sides[0].w], resident);
    kernel.defines.push(("PARTIAL".to_owned(), u32::from(!sums.is_empty()).to_string()));
    let read = sides.iter().flat_map(|at| [at.dy, at.x, at.w, at.r]).chain(tables).map(Arg::Input);
    kernel.args = read.chain(sides.iter().map(|at| Arg::Output(at.dx))).collect();
    if sums.is_empty() {
        return Some((vec![kernel], 0));
    }
    let parts = deal.blocks().min(MULTIPROCESSORS * deal.resident(RESIDENT_WITH_SUMS));
    kernel.grid[0] = parts as u32;
    kernel.args.push(Arg::Scratch(0));
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let bytes = parts * 2 * deal.pairs * 4;
    let summed = sums.iter().enumerate().map(|(side, dw)| {
        sum_partials(2 * deal.pairs, parts, accumulate, Arg::Scratch(side * bytes), Arg::Output(*dw))
    });
    let count = sums.len();
    Some(([kernel].into_iter().chain(summed).collect(), count * bytes))
}

fn examples(accumulate: &[bool]) -> Vec<Example> {
    let example = |x: [usize; 4], pairs: usize, offset: bool, accumulate: bool| {
        let normal = |shape: Vec<usize>| ExampleInput::Normal { shape, scale: 1.0 };
        let mut inputs = vec![normal(x.to_vec())];
        inputs.extend(tables(&x, pairs));
        let r = ExampleInput::UniformF32 { shape: x[..3].to_vec(), low: 0.5, high: 1.5 };
        inputs.extend([normal(x.to_vec()), normal(vec![x[3]]), r]);
        let attrs = Attrs::new().with("inverse", true).with("offset", offset);
        Example::new(inputs, if accumulate { attrs.with("accumulate", true) } else { attrs })
    };
    let shapes = [([2, 3, 4, 16], 8, false), ([1, 700, 6, 128], 64, true), ([1, 3, 2, 24], 8, false)];
    let all = accumulate.iter().flat_map(|a| shapes.map(|(x, pairs, offset)| example(x, pairs, offset, *a)));
    let mut interleaved = example([1, 3, 2, 16], 8, false, false);
    interleaved.attrs = interleaved.attrs.with("interleaved", true);
    all.chain([interleaved]).collect()
}

/// dx = rmsnorm_backward(x, w, r, rope(dy))
pub(super) struct RopeRmsNormBackward;

impl Op for RopeRmsNormBackward {
    fn id(&self) -> OpId {
        id::ROPE_RMSNORM_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`rope` of dy, rounded as it would be stored, then `rmsnorm_backward`: the gradient through normalised and \
         rotated heads. dy [B, T, heads, D], positions i32 [B, T], inv_freq f32 [R/2], attention_scaling f32 [1], x \
         like dy, w [D], r f32 [B, T, heads] → dx like x. Of two tensors at the same positions: dy, x, w, r, dy2, x2, w2, \
         r2, then the shared inputs → dx, dx2."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[INVERSE, OFFSET, INTERLEAVED]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        Ok(vec![infer(inputs, attrs)?])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        kernels(call, &alone(None), TABLES).map_or_else(|| between(call).bytes(), |(_, scratch)| scratch)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(match kernels(call, &alone(None), TABLES) {
            Some((kernels, _)) => kernels,
            None => apart(call, &RMSNORM_BACKWARD),
        })
    }

    crate::reference!(backward);

    fn examples(&self) -> Vec<Example> {
        examples(&[false])
    }

    fn fusions(&self) -> Vec<Fusion> {
        vec![Fusion { first: id::ROPE, second: id::RMSNORM_BACKWARD, operand: 3, keeps: Keeps::Nothing }]
    }
}

/// dx, dw = rmsnorm_gradients(x, w, r, rope(dy))
pub(super) struct RopeRmsNormGradients;

impl Op for RopeRmsNormGradients {
    fn id(&self) -> OpId {
        id::ROPE_RMSNORM_GRADIENTS
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "As `rope_rmsnorm_backward`, with the weight gradient from the same reading. dy [B, T, heads, D], positions \
         i32 [B, T], inv_freq f32 [R/2], attention_scaling f32 [1], x like dy, w [D], r f32 [B, T, heads] → dx like \
         x, dw f32 [D]. With `accumulate`, dw is added to. Two tensors as there → dx, dw, dx2, dw2."
    }

    fn attributes(&self) -> &'static [Attribute] {
        const ACCUMULATE: Attribute =
            Attribute { name: "accumulate", kind: "bool?", doc: "add to dw instead of overwriting it" };
        &[INVERSE, OFFSET, INTERLEAVED, ACCUMULATE]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let dx = infer(inputs, attrs)?;
        let dw = ValueType::new(Element::F32, inputs[5].shape.clone());
        Ok(vec![dx, dw])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        if let Some((_, scratch)) = kernels(call, &alone(Some(1)), TABLES) {
            return scratch;
        }
        let between = between(call);
        let (ins, outs) = ([&call.inputs[4], &call.inputs[5], &call.inputs[6], &between], call.outputs);
        let ins: Vec<TensorRef> = ins.map(TensorRef::clone).into();
        between.bytes() + RMSNORM_GRADIENTS.scratch(&LowerCall { inputs: &ins, outputs: outs, ..*call })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(match kernels(call, &alone(Some(1)), TABLES) {
            Some((kernels, _)) => kernels,
            None => apart(call, &RMSNORM_GRADIENTS),
        })
    }

    crate::reference!(gradients);

    fn examples(&self) -> Vec<Example> {
        let mut examples = examples(&[false, true]);
        for example in &mut examples {
            let ExampleInput::Normal { shape, scale } = example.inputs[0].clone() else { continue };
            let dw = ExampleInput::NormalF32 { shape: vec![shape[3]], scale: 1.0 };
            example.state = vec![ExampleInput::Normal { shape, scale }, dw];
        }
        examples
    }

    fn fusions(&self) -> Vec<Fusion> {
        vec![Fusion { first: id::ROPE, second: id::RMSNORM_GRADIENTS, operand: 3, keeps: Keeps::Nothing }]
    }
}
