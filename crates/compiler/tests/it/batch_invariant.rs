//! Programs whose results of a token follow from its own sequence alone.

use compiler::{CompileError, CompileOptions, EntryOptions, RecomputeOptions, compile};
use program::{Instruction, Machine, Phase, Program};
use tensor::DType;

use crate::support::{TASK, adapter, model, options};

fn asked() -> CompileOptions {
    let recompute = RecomputeOptions { block: Some(true), ..Default::default() };
    CompileOptions {
        adapter: Some(adapter()),
        weights: DType::BF16,
        compute: DType::BF16,
        plan: compiler::PlanOptions { recompute, ..options().plan },
        entries: vec![EntryOptions::train(TASK), EntryOptions::evaluate(TASK)],
        batch_invariant: true,
        ..options()
    }
}

/// For every product and attention, whether its phase is of the forward pass, and whether its bits do not depend on the batch.
fn found(program: &Program) -> Vec<(bool, bool)> {
    let steps = program.entries.iter().flat_map(|entry| &entry.steps);
    let of = |step: &program::Step| {
        let is_asked = match &step.instruction {
            Instruction::Gemm(gemm) => gemm.batch_invariant,
            Instruction::Launch(launch) if launch.op == "attention" => launch.attrs.flag("batch_invariant") == Ok(true),
            _ => return None,
        };
        Some((matches!(step.provenance.phase, Phase::Forward | Phase::Recompute), is_asked))
    };
    steps.filter_map(of).collect()
}

#[test]
fn products_and_attention_of_the_forward_pass_are_asked_also_where_they_are_recomputed() {
    let program = compile(&model(), &asked(), &Machine::h200()).unwrap();
    let found = found(&program);
    assert!(found.iter().all(|(forward, asked)| forward == asked), "{found:?}");
    assert!(found.contains(&(true, true)) && found.contains(&(false, false)));
}

#[test]
fn the_loss_is_that_of_the_sampler() {
    let joined = |options: &CompileOptions| {
        let program = compile(&model(), options, &Machine::h200()).unwrap();
        let steps = program.entries.iter().flat_map(|entry| &entry.steps);
        let is_joined = |step: &program::Step| match &step.instruction {
            Instruction::Launch(launch) => launch.op == "cross_entropy_with_gradient",
            _ => false,
        };
        steps.filter(|step| is_joined(step)).count()
    };
    assert!(joined(&CompileOptions { batch_invariant: false, ..asked() }) > 0);
    assert_eq!(joined(&asked()), 0);
}

#[test]
fn nothing_is_asked_without_the_option_or_on_a_cpu() {
    for (options, machine) in
        [(CompileOptions { batch_invariant: false, ..asked() }, Machine::h200()), (asked(), Machine::cpu(1 << 30, 2))]
    {
        let found = found(&compile(&model(), &options, &machine).unwrap());
        assert!(!found.is_empty() && found.iter().all(|(_, asked)| !asked), "{}: {found:?}", machine.name);
    }
}

#[test]
fn operands_without_a_kernel_are_refused_by_their_option() {
    let rank = |rank: usize| {
        let adapter = compiler::AdapterOptions { rank, ..adapter() };
        CompileOptions { adapter: Some(adapter), ..asked() }
    };
    let cases = [
        (rank(4), "lora_rank", "not 4"),
        (rank(72), "lora_rank", "not 72"),
        (
            CompileOptions { weights: DType::F32, compute: DType::F32, ..asked() },
            "exact_sampling",
            "not all of bfloat16",
        ),
    ];
    for (options, path, expected) in cases {
        match compile(&model(), &options, &Machine::h200()) {
            Err(CompileError::Option { option, message, .. }) => {
                assert!(option == path && message.contains(expected), "{option}: {message}");
            }
            other => panic!("{expected}: {:?}", other.err()),
        }
    }
}
