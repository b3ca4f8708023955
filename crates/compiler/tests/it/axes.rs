//! Sizes that happen to be equal mean nothing: what belongs to the batch is known by the names of axes.

use std::collections::HashSet;

use crate::support::{HIDDEN, TASK, VARIANT, adapter, bits, model, options};
use compiler::{AdapterOptions, CompileOptions, EntryOptions, PlanOptions, RecomputeOptions, compile};
use graph::{Axis, ValueId};
use program::{Machine, Program, Variant};
use tensor::DType;

fn machine() -> Machine {
    Machine::cpu(1 << 30, 2)
}

/// A batch whose rows have `HIDDEN` tokens: two axes of the hidden state have the same extent.
const SQUARE: Variant = Variant { seq_len: HIDDEN, ..VARIANT };

fn steps(program: &Program) -> Vec<(String, &'static str)> {
    program.entries[0].steps.iter().map(|s| (s.provenance.op.clone(), s.provenance.phase.name())).collect()
}

/// A is [rank, inputs], and the batch [rank, inputs] too: A is still no activation, which could be recomputed.
#[test]
fn a_matrix_of_an_adapter_with_the_sizes_of_a_batch_is_none() {
    let compiled = |rank: usize| {
        let recompute = RecomputeOptions { block: Some(true), ..Default::default() };
        let options = CompileOptions {
            variants: vec![SQUARE],
            adapter: Some(AdapterOptions { rank, ..adapter() }),
            entries: vec![EntryOptions::train(TASK)],
            weights: DType::BF16,
            compute: DType::BF16,
            plan: PlanOptions { recompute, ..options().plan },
            ..options()
        };
        compile(&model(), &options, &machine()).unwrap()
    };
    let (alike, other) = (compiled(SQUARE.batch), compiled(2 * SQUARE.batch));
    let a = alike.layout.parameters.iter().find(|slot| slot.name.contains("lora_A")).unwrap();
    assert_eq!(a.weight.shape, [SQUARE.batch, SQUARE.seq_len], "the test is about equal sizes");
    assert_eq!(steps(&alike), steps(&other));
}

/// The head in parts, where its width is that of the hidden states, of a row, or of both.
#[test]
fn a_head_as_wide_as_something_else_is_done_in_parts() {
    let plain = include_str!("../fixtures/gated.json");
    let wide = plain.replace(" 32", " 40");
    assert_ne!(plain, wide);
    let tokens = |seq_len: usize| Variant { seq_len, ..VARIANT };
    for (text, variant) in [(plain, SQUARE), (plain, tokens(40)), (&wide, VARIANT), (&wide, tokens(40))] {
        let model = graph::from_json(text).unwrap();
        let compiled = |parts: usize| {
            let plan = PlanOptions { head_chunks: Some(parts), ..options().plan };
            let entries = vec![EntryOptions::train(TASK)];
            let options = CompileOptions { variants: vec![variant], adapter: None, entries, plan, ..options() };
            compile(&model, &options, &machine()).unwrap()
        };
        let (whole, parts) = (compiled(1), compiled(4));
        assert!(parts.entries[0].steps.len() > whole.entries[0].steps.len(), "{variant:?}: nothing is in parts");
        for ((name, whole), (_, parts)) in bits(whole).iter().zip(&bits(parts)) {
            // The gradient of a trained head is summed part by part.
            assert!(close(whole, parts), "{name} with {variant:?}");
        }
    }
}

fn close(a: &[u8], b: &[u8]) -> bool {
    let floats = |bytes: &[u8]| bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>();
    let (a, b) = (floats(a), floats(b));
    let error: f32 = a.iter().zip(&b).map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f32 = a.iter().map(|a| a * a).sum();
    size.is_finite() && error <= 1e-10 * size
}

#[test]
fn names_go_through_the_model_and_its_gradients() {
    let options = CompileOptions { variants: vec![SQUARE], ..options() };
    let machine = machine();
    let entry = &options.entries[0];
    let graph = compiler::entry_graph(&model(), &options, &machine, entry, SQUARE, &mut Default::default()).unwrap();
    // Gradients of weights, and what they are views of.
    let mut gradients: HashSet<_> = graph.gradients.iter().map(|(_, id)| *id).collect();
    for node in graph.nodes.iter().rev().filter(|node| [ops::id::STACK, ops::id::UNSTACK].contains(&node.op)) {
        if node.outputs.iter().any(|id| gradients.contains(id)) {
            gradients.extend(&node.inputs);
        }
    }
    let of_batch = |id: &ValueId| {
        let value = graph.value(*id);
        value.axis(Axis::Rows).is_some() && value.axis(Axis::Tokens).is_some()
    };
    for node in &graph.nodes {
        for id in &node.outputs {
            // Sums and gradients of weights have no rows, whatever their sizes are.
            let reduced = gradients.contains(id) || graph.value(*id).shape == [1];
            let expected = node.inputs.iter().any(of_batch) && !reduced;
            assert_eq!(of_batch(id), expected, "{}: {:?}", graph.node_text(node), graph.value(*id));
        }
    }
}
