//! The way back through rotation and normalisation of the heads, with the weight gradient or without.

use graph::{Element, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use super::{Deal, INVERSE, OFFSET, check, half, head_shape, tables};
use crate::call::{Call, Input};
use crate::elementwise::round_to;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::norm::{RmsNormBackward, RmsNormGradients, backward_row, sum_partials, write_weight_gradient};
use crate::op::{Attribute, Class, Example, ExampleInput, Fusion, Keeps, Op};
use crate::real::Real;
use crate::rope::rotation::{Rope, Turns};

const INPUTS: &str = "dy [B, T, heads, D], positions i32 [B, T], inv_freq f32 [R/2], attention_scaling f32 [1], x like \
                      dy, w [D], r f32 [B, T, heads]";

/// Thread blocks at most where each leaves a part of the weight gradient.
const MOST_PARTS: usize = 264;

fn infer(inputs: &[ValueType], attrs: &Attrs) -> Result<ValueType, String> {
    let [dy, positions, inv_freq, scaling, x, w, r] = inputs else { return Err(format!("takes {INPUTS}")) };
    check(x, w, [positions, inv_freq, scaling])?;
    if dy.shape != x.shape || r.shape != head_shape(x) {
        return Err("dy must be shaped like x, r like its heads".into());
    }
    ["offset", "inverse", "accumulate"].iter().try_for_each(|name| attrs.flag(name).map(|_| ()).map_err(|e| e.0))?;
    Ok(x.clone())
}

/// The gradient of the normalised heads, rounded to `storage`: what lies between the two operations.
fn turned<T: Real>(inputs: &[Input<'_, T>], inverse: bool, storage: DType) -> Vec<T> {
    let (dy, positions, inv_freq, scaling) = (inputs[0], inputs[1].int(), inputs[2].real(), inputs[3].real()[0]);
    let (columns, heads) = (dy.columns(), dy.shape[2]);
    let mut between = vec![T::default(); dy.real().len()];
    let tokens = between.par_chunks_mut(heads * columns).zip(dy.real().par_chunks(heads * columns));
    tokens.zip(positions).for_each(|((to, dy), position)| {
        let turns = Turns::new(*position, inv_freq, scaling, inverse);
        for (to, dy) in to.chunks_mut(columns).zip(dy.chunks(columns)) {
            turns.turn(dy, to);
        }
        to.iter_mut().for_each(|v| *v = round_to(storage, *v));
    });
    between
}

/// dx into the first result; gives the gradient between the operations.
fn input_gradient<T: Real>(call: &mut Call<'_, T>) -> Vec<T> {
    let flag = |name: &str| call.attrs.flag(name).expect("checked by the shape rule");
    let (offset, inverse) = (flag("offset"), flag("inverse"));
    let between = turned(call.inputs, inverse, call.outputs[0].storage());
    let [.., x, w, r] = call.inputs else { unreachable!("the shape rule asks for seven inputs") };
    let (x, w, r, columns) = (x.real(), w.real(), r.real(), x.columns());
    let rows = call.outputs[0].real().par_chunks_mut(columns).zip(x.par_chunks(columns));
    rows.zip(between.par_chunks(columns)).zip(r).for_each(|(((dx, x), dy), r)| backward_row(x, w, *r, dy, offset, dx));
    between
}

fn backward<T: Real>(call: &mut Call<'_, T>) {
    input_gradient(call);
}

fn gradients<T: Real>(call: &mut Call<'_, T>) {
    let between = input_gradient(call);
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let (x, r) = (call.inputs[4].real(), call.inputs[6].real());
    let [_, dw] = call.outputs_mut();
    write_weight_gradient(x, r, &between, dw.real(), accumulate);
}

/// The rotation into scratch memory, then `second` from there, with its own scratch memory behind.
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

fn deal(call: &LowerCall<'_>) -> Option<Deal> {
    Deal::new(&[&call.inputs[0], &call.inputs[4], &call.outputs[0]], &call.inputs[2])
}

fn kernel(call: &LowerCall<'_>, deal: &Deal, partial: bool) -> KernelSpec {
    let tensors = [("DY", &call.inputs[0]), ("X", &call.inputs[4]), ("DX", &call.outputs[0])];
    let mut kernel =
        deal.spec("rope_rmsnorm_backward", call.attrs, &tensors, &call.inputs[5], if partial { 2 } else { 4 });
    kernel.defines.push(("PARTIAL".to_owned(), (partial as u32).to_string()));
    kernel.args = (0..7).map(Arg::Input).chain([Arg::Output(0)]).collect();
    kernel
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
    all.collect()
}

/// dx = rmsnorm_backward(x, w, r, rope(dy))
pub struct RopeRmsNormBackward;

impl Op for RopeRmsNormBackward {
    fn name(&self) -> &'static str {
        "rope_rmsnorm_backward"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "`rope` of dy, rounded as it would be stored, then `rmsnorm_backward`: the gradient through normalised and \
         rotated heads. dy [B, T, heads, D], positions i32 [B, T], inv_freq f32 [R/2], attention_scaling f32 [1], x \
         like dy, w [D], r f32 [B, T, heads] → dx like x."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[INVERSE, OFFSET]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        Ok(vec![infer(inputs, attrs)?])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not taken")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        if deal(call).is_some() { 0 } else { between(call).bytes() }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        Lowered::Kernels(match deal(call) {
            Some(deal) => vec![kernel(call, &deal, false)],
            None => apart(call, &RmsNormBackward),
        })
    }

    crate::reference!(backward);

    fn examples(&self) -> Vec<Example> {
        examples(&[false])
    }

    fn fusions(&self) -> Vec<Fusion> {
        vec![Fusion { first: "rope", first_inputs: 4, second: "rmsnorm_backward", operand: 3, keeps: Keeps::Nothing }]
    }
}

/// dx, dw = rmsnorm_gradients(x, w, r, rope(dy))
pub struct RopeRmsNormGradients;

impl Op for RopeRmsNormGradients {
    fn name(&self) -> &'static str {
        "rope_rmsnorm_gradients"
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "As `rope_rmsnorm_backward`, with the weight gradient from the same reading. dy [B, T, heads, D], positions \
         i32 [B, T], inv_freq f32 [R/2], attention_scaling f32 [1], x like dy, w [D], r f32 [B, T, heads] → dx like \
         x, dw f32 [D]. With `accumulate`, dw is added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[INVERSE, OFFSET, Attribute { name: "accumulate", kind: "bool?", doc: "add to dw instead of overwriting it" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let dx = infer(inputs, attrs)?;
        let dw = ValueType::new(Element::F32, inputs[5].shape.clone());
        Ok(vec![dx, dw])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not taken")
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        match deal(call) {
            Some(deal) => deal.blocks().min(MOST_PARTS) * call.outputs[1].bytes(),
            None => {
                let between = between(call);
                let (ins, outs) = ([&call.inputs[4], &call.inputs[5], &call.inputs[6], &between], call.outputs);
                let ins: Vec<TensorRef> = ins.map(TensorRef::clone).into();
                between.bytes() + RmsNormGradients.scratch(&LowerCall { inputs: &ins, outputs: outs, ..*call })
            }
        }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let Some(deal) = deal(call) else { return Lowered::Kernels(apart(call, &RmsNormGradients)) };
        let mut both = kernel(call, &deal, true);
        let parts = deal.blocks().min(MOST_PARTS);
        both.grid[0] = parts as u32;
        both.args.push(Arg::Scratch(0));
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
        let columns = call.outputs[1].len();
        Lowered::Kernels(vec![both, sum_partials(columns, parts, accumulate, Arg::Scratch(0), Arg::Output(1))])
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
        vec![Fusion { first: "rope", first_inputs: 4, second: "rmsnorm_gradients", operand: 3, keeps: Keeps::Nothing }]
    }
}
