//! Decisions about memory: they change how much there is, never a bit of a result.

use crate::support::{TASK, adapter, bits, options};
use compiler::{
    AdapterOptions, CompileError, CompileOptions, EntryOptions, Pass, PassTrace, Passes, PlanOptions, RecomputeOptions,
    compile, compile_observed,
};
use program::{EntryKind, Machine, Program};
use serde_json::{Value, json};
use tensor::DType;

/// The loss where its gradient is wanted.
const LOSS: &str = "cross_entropy_with_gradient";

fn model(name: &str) -> graph::Model {
    let text = match name {
        "llama" => include_str!("../fixtures/llama.json"),
        "qwen3" => include_str!("../fixtures/qwen3.json"),
        _ => include_str!("../fixtures/gated.json"),
    };
    graph::from_json(text).unwrap()
}

fn cpu(memory: usize) -> Machine {
    Machine::cpu(memory, 2)
}

/// Everything kept, whatever it costs.
fn keep() -> PlanOptions {
    let no = Some(false);
    let recompute = RecomputeOptions { swiglu: no, rmsnorm: no, ffn: no, qkv: no, att: no, block: no, lora: no };
    PlanOptions { recompute, head_chunks: Some(1), attention_chunks: Some(1), memory_limit: None, ..options().plan }
}

fn only(set: impl Fn(&mut RecomputeOptions)) -> PlanOptions {
    let mut recompute =
        RecomputeOptions { rmsnorm: Some(false), swiglu: Some(false), qkv: Some(false), ..Default::default() };
    set(&mut recompute);
    PlanOptions { recompute, head_chunks: Some(1), attention_chunks: Some(1), memory_limit: None, ..options().plan }
}

fn cases() -> Vec<(&'static str, CompileOptions)> {
    let dropout = AdapterOptions { dropout: 0.25, ..adapter() };
    let mut cases = Vec::new();
    for name in ["llama", "qwen3"] {
        for adapter in [None, Some(adapter()), Some(dropout.clone())] {
            for compute in [DType::F32, DType::BF16, DType::F16] {
                let options = options();
                let entries = vec![EntryOptions::train(TASK), EntryOptions::evaluate(TASK)];
                cases.push((
                    name,
                    CompileOptions { adapter: adapter.clone(), compute, weights: compute, entries, ..options },
                ));
            }
        }
    }
    cases
}

fn with(options: &CompileOptions, plan: PlanOptions) -> CompileOptions {
    CompileOptions { plan, ..options.clone() }
}

fn steps(program: &Program) -> usize {
    program.entries[0].steps.len()
}

fn activations(program: &Program) -> usize {
    program.arenas.iter().find(|arena| arena.kind == program::ArenaKind::Activations).unwrap().bytes
}

#[test]
fn computing_again_changes_no_bit() {
    let yes = Some(true);
    let choices: Vec<(&str, PlanOptions)> = vec![
        ("swiglu", only(|o| o.swiglu = yes)),
        ("rmsnorm", only(|o| o.rmsnorm = yes)),
        ("ffn", only(|o| (o.ffn, o.swiglu) = (yes, None))),
        ("qkv", only(|o| o.qkv = yes)),
        ("att", only(|o| (o.att, o.qkv) = (yes, None))),
        ("block", only(|o| *o = RecomputeOptions { block: yes, ..Default::default() })),
        (
            "block without the adapters' inputs",
            only(|o| *o = RecomputeOptions { block: yes, lora: Some(false), ..Default::default() }),
        ),
    ];
    for (name, options) in cases() {
        let kept = compile(&model(name), &with(&options, keep()), &cpu(1 << 30)).unwrap();
        let (kept_steps, kept_bytes) = (steps(&kept), activations(&kept));
        let expected = bits(kept);
        for (choice, plan) in &choices {
            let program = compile(&model(name), &with(&options, plan.clone()), &cpu(1 << 30)).unwrap();
            let steps_of = |holds: &dyn Fn(&program::Provenance) -> bool| {
                program.entries[0].steps.iter().filter(|s| holds(&s.provenance)).count()
            };
            let again = steps_of(&|step| step.phase.name() == "recompute");
            // A gradient that reads the same does it on the way.
            let fused = steps_of(&|step| {
                step.phase.name() == "backward" && ["swiglu+", "rmsnorm+"].iter().any(|of| step.op.starts_with(of))
            });
            assert!(
                again + fused > 0 && steps(&program) == kept_steps + again,
                "{name}, {choice}: {again} and {fused} of {}",
                steps(&program)
            );
            assert!(activations(&program) < kept_bytes, "{name}, {choice}: {} of {kept_bytes}", activations(&program));
            assert!(!program.plan.is_empty());
            assert!(bits(program) == expected, "{name}, {choice}, {:?}: other bits", options.compute);
        }
    }
}

/// With the head frozen each part does what the whole does; the gradient of a trained head is summed
/// in another order.
#[test]
fn parts_of_the_head_give_what_the_whole_gives() {
    for (name, options) in cases().into_iter().filter(|(_, o)| o.compute == DType::F32) {
        let whole = bits(compile(&model(name), &with(&options, keep()), &cpu(1 << 30)).unwrap());
        for parts in [2, 3, 4] {
            let plan = PlanOptions { head_chunks: Some(parts), ..keep() };
            let program = compile(&model(name), &with(&options, plan), &cpu(1 << 30)).unwrap();
            let losses = program.entries[0].steps.iter().filter(|s| s.provenance.op == LOSS).count();
            assert!(losses >= parts, "{losses} parts for {parts}");
            for ((name, found), (_, expected)) in bits(program).iter().zip(&whole) {
                let close = options.adapter.is_none() && close(found, expected);
                assert!(found == expected || close, "{name} differs in {parts} parts");
            }
        }
    }
}

fn close(a: &[u8], b: &[u8]) -> bool {
    let floats = |bytes: &[u8]| -> Vec<f64> {
        bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap()) as f64).collect()
    };
    let (a, b) = (floats(a), floats(b));
    let norm = b.iter().map(|x| x * x).sum::<f64>().sqrt();
    a.iter().zip(&b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt() <= 1e-6 * norm
}

/// The small Llama with a soft cap on its logits.
fn capped() -> graph::Model {
    let mut ir: Value = serde_json::from_str(include_str!("../fixtures/llama.json")).unwrap();
    let body = ir["body"].as_array_mut().unwrap();
    let mut node = body.last().unwrap().clone();
    body.last_mut().unwrap()["outputs"] = json!(["raw"]);
    let chain = [
        ("scale", json!({"factor": 0.25}), "raw", "quarter"),
        ("activation", json!({"function": "tanh"}), "quarter", "bent"),
        ("scale", json!({"factor": 4.0}), "bent", "lm_head"),
    ];
    for (op, attrs, input, output) in chain {
        (node["op"], node["attrs"]) = (json!(op), attrs);
        (node["inputs"], node["outputs"]) = (json!([input]), json!([output]));
        body.push(node.clone());
    }
    graph::from_json(&ir.to_string()).unwrap()
}

#[test]
fn a_head_with_a_soft_cap_is_done_in_parts() {
    for options in [options(), CompileOptions { adapter: Some(adapter()), ..options() }] {
        let in_parts = |parts: usize| {
            let plan = PlanOptions { head_chunks: Some(parts), ..keep() };
            compile(&capped(), &with(&options, plan), &cpu(1 << 30)).unwrap()
        };
        let (whole, program) = (in_parts(1), in_parts(4));
        let losses = program.entries[0].steps.iter().filter(|s| s.provenance.op == LOSS).count();
        assert!(losses >= 4, "{losses} parts for 4");
        assert!(activations(&program) < activations(&whole));
        let uncapped = bits(compile(&model("llama"), &with(&options, keep()), &cpu(1 << 30)).unwrap());
        let whole = bits(whole);
        assert!(whole != uncapped, "the cap is at work");
        for ((name, found), (_, expected)) in bits(program).iter().zip(&whole) {
            assert!(found == expected || close(found, expected), "{name} differs in 4 parts");
        }
    }
}

#[test]
fn parts_of_the_attention_give_what_the_whole_gives() {
    for (name, options) in cases() {
        let whole = bits(compile(&model(name), &with(&options, keep()), &cpu(1 << 30)).unwrap());
        for parts in [2, 3, 4] {
            let plan = PlanOptions { attention_chunks: Some(parts), ..keep() };
            let program = compile(&model(name), &with(&options, plan), &cpu(1 << 30)).unwrap();
            let count = program.entries[0].steps.iter().filter(|s| s.provenance.op == "attention_backward").count();
            assert!(count > 2, "{count}");
            assert!(bits(program) == whole, "{name}: other bits in {parts} parts");
        }
    }
}

/// Under ever less memory the plan shrinks, with the same bits, until it says that it does not fit.
#[test]
fn less_memory_gives_smaller_plans_with_the_same_bits() {
    for (name, options) in cases().into_iter().filter(|(_, o)| o.compute == DType::F32 && o.adapter.is_some()) {
        let limited = |limit: usize| {
            let plan = PlanOptions { memory_limit: Some(limit), ..options.plan.clone() };
            compile(&model(name), &with(&options, plan), &cpu(1 << 30))
        };
        let kept = compile(&model(name), &with(&options, keep()), &cpu(1 << 30)).unwrap();
        let total = |program: &Program| program.memory.iter().map(|line| line.bytes).sum::<usize>();
        let largest = total(&kept);
        let Err(CompileError::DoesNotFit { needed: smallest, limited: true, .. }) = limited(1) else {
            panic!("one byte is not enough")
        };
        assert!(smallest < largest);
        let expected = bits(kept);
        let mut sizes = Vec::new();
        for fifth in (0..5).rev() {
            let limit = smallest + (largest - smallest) * fifth / 5;
            let program = limited(limit).unwrap();
            assert!(total(&program) <= limit);
            sizes.push(total(&program));
            assert!(bits(program) == expected, "{name}: other bits under {limit} bytes");
        }
        assert!(sizes.windows(2).all(|pair| pair[1] <= pair[0]), "{sizes:?}");
        sizes.dedup();
        assert!(sizes.len() >= 4, "{sizes:?}");
        assert!(limited(smallest - 1).is_err() && limited(smallest).is_ok());
    }
}

/// The lines below the arena account for all of it, and phases stay inside it.
#[test]
fn the_plan_accounts_for_every_byte() {
    for machine in [cpu(1 << 30), Machine::h200()] {
        for (name, options) in cases() {
            let program = compile(&model(name), &options, &machine).unwrap();
            let arena = activations(&program);
            assert_eq!(program.activations.iter().map(|line| line.bytes).sum::<usize>(), arena);
            let phases: Vec<&str> = program.phases.iter().map(|line| line.class).collect();
            assert_eq!(phases, ["forward", "backward", "evaluate"]);
            assert!(program.phases.iter().all(|line| line.bytes > 0 && line.bytes <= arena));
        }
    }
}

/// On a GPU the parts of an attention are rows of the batch.
#[test]
fn more_parts_than_there_are_of_an_attention_are_refused() {
    let of = |machine: Machine, parts: usize| {
        let plan = PlanOptions { attention_chunks: Some(parts), ..keep() };
        compile(&model("qwen3"), &with(&options(), plan), &machine).map(|program| program.entries.len())
    };
    assert!(of(Machine::h200(), 2).is_ok() && of(cpu(1 << 30), 4).is_ok());
    for (machine, parts) in [(Machine::h200(), 3), (cpu(1 << 30), 5)] {
        let message = of(machine, parts).unwrap_err().to_string();
        assert!(message.contains(&format!("attn_bwd_chunks: {parts}")) && message.contains("rows"), "{message}");
    }
}

/// A micro-step's rewrites by name, whether each ran, and whether the graph after it recomputes anything.
fn rewrites(model: &graph::Model, options: &CompileOptions) -> Vec<(Pass, bool, bool)> {
    let mut seen = Vec::new();
    let observe = |trace: PassTrace<'_>| {
        if trace.entry == EntryKind::FirstMicroStep {
            let recomputes = trace.graph.nodes.iter().any(|node| node.phase == graph::Phase::Recompute);
            seen.push((trace.pass, trace.ran, recomputes));
        }
    };
    let mut passes = Passes::limited(options.plan.passes).observed(Box::new(observe));
    compile_observed(model, options, &cpu(1 << 30), &mut passes).unwrap();
    drop(passes);
    seen
}

/// Rewrites that carry out the memory plan run, are verified and are listed as passes, and can be left out from the
/// end: the rest of the program computes the same.
#[test]
fn rewrites_of_the_plan_are_passes() {
    let recompute = RecomputeOptions { block: Some(true), ..Default::default() };
    let plan = PlanOptions { recompute, head_chunks: Some(2), attention_chunks: Some(2), ..Default::default() };
    let options =
        CompileOptions { entries: vec![EntryOptions::train(TASK), EntryOptions::evaluate(TASK)], plan, ..options() };
    let model = model("qwen3");
    let whole = bits(compile(&model, &with(&options, keep()), &cpu(1 << 30)).unwrap());
    let place = |pass: Pass| Pass::OPTIONAL.iter().position(|optional| *optional == pass).unwrap();
    for limit in (0..=Pass::OPTIONAL.len()).rev() {
        let limited = with(&options, PlanOptions { passes: Some(limit), ..options.plan.clone() });
        let seen = rewrites(&model, &limited);
        let optional: Vec<(Pass, bool)> = seen
            .iter()
            .filter(|(pass, ..)| Pass::OPTIONAL.contains(pass))
            .map(|(pass, ran, _)| (*pass, *ran))
            .collect();
        let expected: Vec<(Pass, bool)> =
            Pass::OPTIONAL.iter().enumerate().map(|(i, pass)| (*pass, i < limit)).collect();
        assert_eq!(optional, expected, "each once, in its order");
        let first = seen.iter().find(|(_, _, recomputes)| *recomputes).map(|(pass, ..)| *pass);
        assert_eq!(first, (limit > place(Pass::Recompute)).then_some(Pass::Recompute), "{limit}: {seen:?}");
        let program = compile(&model, &limited, &cpu(1 << 30)).unwrap();
        let chunks = program.plan.iter().filter(|of| of.choice.saves()).count();
        assert!(limit > place(Pass::SplitHead) || chunks == 0, "{limit}: what is left out is not decided");
        for ((name, found), (_, expected)) in bits(program).iter().zip(&whole) {
            let close =
                floats(found).iter().zip(floats(expected)).all(|(a, b)| (a - b).abs() <= 1e-5 * (1.0 + b.abs()));
            assert!(close, "{name} with {limit} rewrites");
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|of| f32::from_le_bytes(of.try_into().unwrap())).collect()
}
