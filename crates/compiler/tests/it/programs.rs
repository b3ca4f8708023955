//! Whole programs as text: what a layer costs in launches, and that nothing changes unseen.
//! `SUROGATE_UPDATE=1` rewrites the stored texts.

use std::fmt::Write;
use std::path::PathBuf;

use crate::support::{VARIANT, adapter, options};
use compiler::{CompileOptions, compile};
use program::{Entry, EntryKind, Instruction, Machine, Program, Step};
use tensor::DType;

fn compiled(model: &str, lora: bool, compute: DType) -> Program {
    let text = match model {
        "llama" => include_str!("../fixtures/llama.json"),
        _ => include_str!("../fixtures/qwen3.json"),
    };
    let model = graph::from_json(text).unwrap();
    let adapter = lora.then(adapter);
    let options = CompileOptions { adapter, compute, weights: compute, ..options() };
    compile(&model, &options, &Machine::h200()).unwrap()
}

fn kind(step: &Step) -> String {
    match &step.instruction {
        Instruction::Launch(launch) => launch.op.clone(),
        Instruction::Gemm(gemm) if gemm.low_rank.is_empty() => "gemm".into(),
        Instruction::Gemm(gemm) => format!("gemm+{}", gemm.low_rank.len()),
        Instruction::AttentionForward(_) => "attention".into(),
        _ => program::kind_of(step).into(),
    }
}

/// The instructions of one layer in one phase.
fn layer(entry: &Entry, layer: usize, phase: &str) -> Vec<String> {
    let steps = entry.steps.iter().filter(|s| {
        s.provenance.layer.as_ref().is_some_and(|of| of.index == layer) && s.provenance.phase.name() == phase
    });
    steps.map(kind).collect()
}

fn micro_step(program: &Program) -> &Entry {
    &program.entries[program.entry(EntryKind::FirstMicroStep, Some(VARIANT)).unwrap()]
}

/// A lost fusion or merge shows as one more launch.
#[test]
fn launches_of_a_qwen3_layer() {
    let count =
        |lora: bool, compute: DType, phase: &str| layer(micro_step(&compiled("qwen3", lora, compute)), 1, phase).len();
    let counts = [
        count(false, DType::BF16, "forward"),
        count(false, DType::BF16, "backward"),
        count(true, DType::BF16, "forward"),
        count(true, DType::BF16, "backward"),
    ];
    let texts = |lora, phase| layer(micro_step(&compiled("qwen3", lora, DType::BF16)), 1, phase).join("\n  ");
    assert_eq!(
        counts,
        [9, 12, 13, 25],
        "full forward:\n  {}\nfull backward:\n  {}\nLoRA forward:\n  {}\nLoRA backward:\n  {}",
        texts(false, "forward"),
        texts(false, "backward"),
        texts(true, "forward"),
        texts(true, "backward"),
    );
}

#[test]
fn programs_are_as_stored() {
    for (model, lora) in [("llama", false), ("llama", true), ("qwen3", false), ("qwen3", true)] {
        let program = compiled(model, lora, DType::BF16);
        let mut text = program.to_string();
        for kernel in &program.kernels {
            writeln!(text, "kernel {} {:?}", kernel.entry, kernel.defines).unwrap();
        }
        let name = format!("{model}{}.program.txt", if lora { "_lora" } else { "" });
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        if std::env::var_os("SUROGATE_UPDATE").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let stored = std::fs::read_to_string(&path).unwrap_or_default();
        let line = stored.lines().zip(text.lines()).position(|(a, b)| a != b);
        assert!(
            stored == text,
            "{} differs at line {:?}; SUROGATE_UPDATE=1 stores the new text",
            path.display(),
            line.map(|l| l + 1)
        );
    }
}
