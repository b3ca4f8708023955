//! Adapters on experts: what they add goes on in the products of the base.

use crate::support::{adapter, options};
use compiler::{AdapterOptions, CompileOptions, compile};
use program::{Entry, EntryKind, Instruction, Launch, Machine, Phase};
use tensor::{Attrs, DType};

/// Launches of an operation in a phase.
fn launches<'a>(entry: &'a Entry, op: &str, phase: Phase) -> Vec<&'a Launch> {
    let of = |step: &'a program::Step| match &step.instruction {
        Instruction::Launch(launch) if launch.op.as_str() == op && step.provenance.phase == phase => Some(launch),
        _ => None,
    };
    entry.steps.iter().filter_map(of).collect()
}

#[test]
fn adapters_on_experts_ride_on_their_products() {
    let model = graph::from_json(include_str!("../../../train/tests/ir/olmoe.json")).unwrap();
    let with_rank = |rank: usize| {
        let parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"].map(String::from).to_vec();
        let form = model.adapters.clone();
        let own = AdapterOptions { rank, targets: vec!["q_proj".into()], parameters, form, ..adapter() };
        let options = CompileOptions { adapter: Some(own), weights: DType::BF16, compute: DType::BF16, ..options() };
        compile(&model, &options, &Machine::h200()).unwrap()
    };
    // Gate and up are one product: with down, two of the base in each of the two layers, and as many of adapters in front.
    let program = with_rank(16);
    let entry = program.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep).unwrap();
    for phase in [Phase::Forward, Phase::Backward] {
        let products = launches(entry, "grouped_linear", phase);
        let (sums, single): (Vec<&Launch>, Vec<&Launch>) = products.into_iter().partition(|of| of.inputs.len() == 5);
        assert_eq!((sums.len(), single.len()), (4, 4), "{phase:?}");
        let across = |attrs: &Attrs| attrs.flag("across").unwrap();
        assert!(sums.iter().all(|of| across(&of.attrs) == (phase == Phase::Backward)), "{phase:?}");
    }
    // Tensor cores do not read rows of four.
    let program = with_rank(4);
    let entry = program.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep).unwrap();
    assert!(launches(entry, "grouped_linear", Phase::Forward).iter().all(|of| of.inputs.len() == 3));
}
