//! The gated delta rule, whose states continue those of earlier batches.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arch, Arg, Arithmetic, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::{SLOTS, check_places, checked_slots, places, slot_of};
use crate::call::Call;
use crate::delta::cpu::{Head, write};
use crate::delta::examples::Given;
use crate::delta::{ATTRIBUTES, Extents, additive, check_rows, launch, scale, tensor_cores};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

/// o, states ← cached_delta(q, k, v, g, beta, positions, slots)
pub struct CachedDelta;

impl Op for CachedDelta {
    fn id(&self) -> OpId {
        id::CACHED_DELTA
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "`gated_delta` of new tokens, whose sequences' states are kept: rows go on from the state of their slot, and leave \
         there that after their last token. It is zero before position 0. Tokens of a row follow one another; a \
         position below 0, after them, is padding, and its result 0. q, k [B, T, key_heads, DK], v [B, T, heads, DV], g and \
         beta [B, T, heads], positions i32 [B, T], slots i32 [B], each another one → o like v, states f32 [slots, heads, DK, \
         DV]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        const OWN: &[Attribute] = &[ATTRIBUTES[0], ATTRIBUTES[1], SLOTS];
        OWN
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [q, k, v, g, beta, positions, slots] = inputs else {
            return Err("takes q, k, v, g, beta, positions and slots".into());
        };
        let o = check_rows([q, k, v, g, beta], attrs)?;
        check_places(k, positions, slots)?;
        let state = [v.shape[2].clone(), k.shape[3].clone(), v.shape[3].clone()];
        let states: Vec<Dim> = [checked_slots(attrs.size("slots")?)?].into_iter().chain(state).collect();
        Ok(vec![o, ValueType::new(Element::F32, states)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("only what generates text goes on where sequences were")
    }

    /// Returns the cost, which counts only the states of the rows, read and written.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let e = Extents::of(&inputs[1].shape, &inputs[2].shape);
        let operands = inputs.iter().chain(&outputs[..1]).map(TensorRef::bytes).sum::<usize>();
        let states = e.batch * e.heads * e.key_dim * e.value_dim * 4;
        Cost { flops: e.flops(7.0), bytes: (operands + 2 * states) as f64 }
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        if launch::cached_in_chunks(call) { tensor_cores::scratch(call, false) } else { 0 }
    }

    fn rounds_between(&self) -> bool {
        true
    }

    fn arithmetic(&self, call: &LowerCall<'_>) -> Arithmetic {
        if launch::cached_in_chunks(call) { Arithmetic::OfOperands } else { Arithmetic::Single }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        for tensor in [&call.inputs[6], &call.outputs[1]] {
            assert!(tensor.is_dense(), "slots and states lie densely: {tensor}");
        }
        if launch::cached_in_chunks(call) {
            return Lowered::Kernels(tensor_cores::cached(call));
        }
        let mut tensors = launch::operands(call);
        tensors.push(("O", &call.outputs[0]));
        let args = (0..7).map(Arg::Input).chain([0, 1].map(Arg::Output)).collect();
        let mut kernel = launch::kernel("cached_delta", "CACHED", launch::RECURRENCE, call, &tensors);
        (kernel.args, kernel.headers) = (args, [&kernel.headers[..], &[device::DEPENDENT_LAUNCH]].concat());
        Lowered::Kernels(if call.machine.arch == Arch::Cpu { vec![] } else { vec![kernel] })
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |heads: [usize; 4], tokens: usize, rows: &[(usize, usize)], attrs: Attrs| {
            let (where_, slots) = places(tokens, rows);
            let [key_heads, heads, key_dim, value_dim] = heads;
            let shape = [rows.len(), tokens, key_heads, heads, key_dim, value_dim];
            let given = Given { shape, starts: Vec::new(), least: -2.0, attrs: attrs.with("slots", slots) };
            let state = vec![
                ExampleInput::Normal { shape: vec![rows.len(), tokens, heads, value_dim], scale: 1.0 },
                ExampleInput::NormalF32 { shape: vec![slots, heads, key_dim, value_dim], scale: 1.0 },
            ];
            Example::new(given.tensors().into_iter().chain(where_).collect(), given.attrs).with_state(state)
        };
        vec![
            example([2, 4, 8, 8], 1, &[(0, 1), (9, 1), (3, 0)], Attrs::new()),
            example([1, 2, 5, 7], 3, &[(2, 2), (0, 3)], Attrs::new()),
            example([1, 2, 128, 128], 1, &[(70, 1), (1, 1)], Attrs::new()),
            example([2, 2, 16, 40], 70, &[(0, 70), (5, 33), (2, 0)], Attrs::new().with("scale", 0.3)),
            example([1, 3, 66, 33], 40, &[(1, 17)], Attrs::new()),
            example([2, 4, 16, 40], 70, &[(0, 70), (5, 33), (2, 0)], Attrs::new().with("additive", true)),
            example([1, 8, 128, 64], 1, &[(70, 1), (0, 1)], Attrs::new().with("additive", true).with("scale", 1.0)),
            // In chunks: rows that begin and that go on, which end within a chunk, at its end, and before it.
            example([1, 2, 128, 64], 150, &[(0, 150), (9, 64), (3, 70), (5, 1), (2, 0)], Attrs::new()),
            example([2, 4, 64, 128], 64, &[(1000, 64), (0, 63)], Attrs::new().with("scale", 0.3)),
            example(
                [1, 4, 128, 64],
                130,
                &[(0, 128), (7, 129)],
                Attrs::new().with("additive", true).with("scale", 1.0),
            ),
        ]
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let e = Extents::of(call.inputs[1].shape, call.inputs[2].shape);
    let scale = T::from_f64(scale(call.attrs, e.key_dim).expect("checked by the shape rule"));
    let additive = additive(call.attrs);
    let (inputs, positions, slots) = (call.inputs, call.inputs[5].int(), call.inputs[6].int());
    let [o, states] = call.outputs_mut();
    let (count, size) = (states.shape()[0], e.key_dim * e.value_dim);
    let states = states.real();
    let place = |at: usize| (slot_of(slots, at / e.heads, count) * e.heads + at % e.heads) * size;
    let tokens_of = |row: usize| positions[row * e.tokens..][..e.tokens].iter().take_while(|p| **p >= 0).count();
    let of_head = |at: usize| {
        let (row, tokens) = (at / e.heads, tokens_of(at / e.heads));
        let head = Head::of(inputs, &e, [row, at % e.heads], |_, position| position == 0, (scale, additive));
        let mut state = if tokens == 0 { Vec::new() } else { states[place(at)..][..size].to_vec() };
        let mut o = head.forward(tokens, &mut state);
        o.resize(e.tokens * e.value_dim, T::default());
        (o, state)
    };
    let heads: Vec<(Vec<T>, Vec<T>)> = (0..e.batch * e.heads).into_par_iter().map(of_head).collect();
    for (at, (_, state)) in heads.iter().enumerate().filter(|(_, (_, state))| !state.is_empty()) {
        states[place(at)..][..size].copy_from_slice(state);
    }
    write(o.real(), |at| heads[at].0.as_slice(), e.heads, e.tokens, e.value_dim);
}
