//! The whole pass list on a small model: gradients against finite differences, every rewrite
//! against the graph as traced, and the lowered program against the graph.

use std::collections::HashMap;

use crate::support::{self, VARIANT, adapter, contents, fill, loaded, model, numbers, options};
use compiler::{CompileOptions, EntryOptions, Pass, Passes, compile, entry_graph};
use graph::{Graph, ValueId};
use ops::evaluate::{Array, Evaluate, evaluate};
use ops::id;
use program::{EntryKind, Machine, Session};
use tensor::DType;

fn train_graph(options: &CompileOptions, limit: Option<usize>) -> Graph {
    let mut passes = Passes::limited(limit.or(Some(Pass::OPTIONAL.len())));
    entry_graph(&model(), options, &machine(), &options.entries[0], VARIANT, &mut passes).unwrap()
}

fn machine() -> Machine {
    Machine::cpu(1 << 30, 2)
}

/// Loss and summed gradients by parameter name.
fn loss_and_gradients<T: Evaluate>(
    graph: &Graph,
    given: &HashMap<ValueId, Array<T>>,
) -> (f64, HashMap<String, Vec<f64>>) {
    let values = evaluate(graph, given);
    let loss = values[&graph.output("loss_sum").unwrap()].real()[0].to_f64();
    let mut gradients: HashMap<String, Vec<f64>> = HashMap::new();
    for (parameter, value) in &graph.gradients {
        let name = graph.parameter(*parameter).name.clone();
        let contribution = values[value].real().iter().map(|x| x.to_f64());
        match gradients.get_mut(&name) {
            Some(sum) => sum.iter_mut().zip(contribution).for_each(|(s, c)| *s += c),
            None => {
                gradients.insert(name, contribution.collect());
            }
        }
    }
    (loss, gradients)
}

fn check_finite_differences(options: &CompileOptions) {
    let graph = train_graph(options, None);
    let given = contents::<f64>(&graph);
    let (_, gradients) = loss_and_gradients(&graph, &given);
    assert_eq!(gradients.len(), graph.parameters.iter().filter(|p| p.trainable).count());
    for parameter in graph.parameters.iter().filter(|p| p.trainable) {
        let gradient = &gradients[&parameter.name];
        for index in [0, gradient.len() / 3, gradient.len() - 1] {
            let step = 1e-5;
            let loss = |delta: f64| {
                let mut moved = given.clone();
                let Some(Array::Real(values)) = moved.get_mut(&parameter.value) else { panic!("parameters are real") };
                values[index] += delta;
                loss_and_gradients(&graph, &moved).0
            };
            let difference = (loss(step) - loss(-step)) / (2.0 * step);
            let error = (difference - gradient[index]).abs() / (difference.abs() + 1e-3);
            // A tied head and the embedding share one weight; row 0 is the padding row, whose
            // input side gets no gradient by definition, so the difference quotient is no judge.
            if parameter.name == "embed.weight" && index < support::HIDDEN {
                continue;
            }
            assert!(
                error < 1e-6,
                "{}[{index}]: {} by rule, {difference} by differences",
                parameter.name,
                gradient[index]
            );
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    check_finite_differences(&options());
}

#[test]
fn adapter_gradients_match_finite_differences() {
    check_finite_differences(&CompileOptions { adapter: Some(adapter()), ..options() });
}

#[test]
fn rewrites_keep_loss_and_gradients() {
    for adapter in [None, Some(adapter())] {
        let options = CompileOptions { adapter, ..options() };
        let plain = train_graph(&options, Some(0));
        let expected = loss_and_gradients(&plain, &contents::<f64>(&plain));
        for limit in 1..=4 {
            let graph = train_graph(&options, Some(limit));
            let found = loss_and_gradients(&graph, &contents::<f64>(&graph));
            assert!((expected.0 - found.0).abs() < 1e-9 * expected.0.abs());
            for (name, gradient) in &expected.1 {
                let worst = gradient.iter().zip(&found.1[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(worst < 1e-9, "{name} differs by {worst} with {limit} passes");
            }
        }
    }
}

#[test]
fn rewrites_find_what_they_are_for() {
    let full = train_graph(&options(), None);
    assert!(full.nodes.iter().all(|n| n.op != id::ADD), "every addition rides in a neighbour:\n{full}");
    let graph = train_graph(&CompileOptions { adapter: Some(adapter()), ..options() }, None);
    let count = |op: &str| graph.nodes.iter().filter(|n| ops::rowwise::names(n).join("+") == op).count();
    assert_eq!(count("add+rmsnorm"), 2, "the residual additions ride in the norms:\n{graph}");
    // Per layer: gate|up, its A matrices, down, its A matrix; and the head.
    assert_eq!(count("linear"), 2 * 4 + 1, "gate and up are one product:\n{graph}");
}

fn load(options: &CompileOptions, machine: &Machine) -> (Graph, Box<dyn Session>) {
    let mut session = loaded(compile(&model(), options, machine).unwrap());
    fill(session.as_mut(), 0);
    (train_graph(options, None), session)
}

#[test]
fn the_program_computes_what_the_graph_says() {
    for adapter in [None, Some(adapter())] {
        let options = CompileOptions { adapter, ..options() };
        let (graph, mut session) = load(&options, &machine());
        let program = session.program().clone();
        let (loss, gradients) = loss_and_gradients(&graph, &contents::<f32>(&graph));
        let first = program.entry(EntryKind::FirstMicroStep, Some(VARIANT)).unwrap();
        let next = program.entry(EntryKind::NextMicroStep, Some(VARIANT)).unwrap();
        for (entry, times) in [(first, 1.0), (next, 2.0), (next, 3.0), (first, 1.0)] {
            session.run(entry).unwrap();
            let found = numbers(session.as_mut(), program.scalar("loss_sum").unwrap())[0] as f64;
            assert!((found - times * loss).abs() < 1e-4 * times * loss, "loss {found}, expected {times} × {loss}");
            for slot in program.layout.parameters.iter().filter(|p| p.trainable) {
                let found = numbers(session.as_mut(), slot.gradient.as_ref().unwrap());
                let expected = &gradients[&slot.name];
                let norm = expected.iter().map(|g| g * g).sum::<f64>().sqrt();
                let error =
                    found.iter().zip(expected).map(|(f, e)| (*f as f64 - times * e).powi(2)).sum::<f64>().sqrt();
                assert!(error <= 1e-5 * times * norm, "{}: relative error {}", slot.name, error / norm);
            }
        }
    }
}

#[test]
fn buffers_that_live_together_are_apart() {
    let program = compile(&model(), &options(), &machine()).unwrap();
    for entry in &program.entries {
        for step in &entry.steps {
            let (reads, writes) = (step.instruction.reads(), step.instruction.writes());
            for (index, write) in writes.iter().enumerate() {
                let others = reads.iter().chain(&writes[index + 1..]);
                let in_place = ops::find(step.provenance.op.as_str()).ok().and_then(|op| op.in_place());
                let replaced = in_place.is_some_and(|(from, to)| to == index && reads[from] == *write);
                for other in others.filter(|o| o.arena == write.arena && !(replaced && o == &write)) {
                    let apart =
                        write.offset + write.span() <= other.offset || other.offset + other.span() <= write.offset;
                    assert!(apart || !write.is_dense() || !other.is_dense(), "{step}");
                }
            }
        }
    }
}

#[test]
fn updates_follow_the_loss_down() {
    let (_, mut session) = load(&options(), &machine());
    let program = session.program().clone();
    let first = program.entry(EntryKind::FirstMicroStep, Some(VARIANT)).unwrap();
    let update = program.entry(EntryKind::Update, None).unwrap();
    let set = |session: &mut dyn Session, name: &str, value: f32| {
        let at = program.scalar(name).unwrap().clone();
        session.write(&at, &value.to_le_bytes()).unwrap();
    };
    let mut losses = Vec::new();
    for step in 1..=20 {
        session.run(first).unwrap();
        losses.push(numbers(session.as_mut(), program.scalar("loss_sum").unwrap())[0]);
        set(session.as_mut(), "learning_rate", 1e-2);
        set(session.as_mut(), "bias_correction_1", 1.0 - 0.9f32.powi(step));
        set(session.as_mut(), "bias_correction_2", 1.0 - 0.999f32.powi(step));
        session.run(update).unwrap();
        assert_eq!(numbers(session.as_mut(), program.scalar("update_applied").unwrap())[0], 1.0);
    }
    assert!(losses[19] < 0.5 * losses[0], "{losses:?}");
}

#[test]
fn mistakes_name_their_place() {
    let mut wrong = model();
    if let graph::Item::Node(node) = &mut wrong.body[0] {
        node.types[0].shape[2] = graph::Dim::Fixed(31);
    }
    let message = compile(&wrong, &options(), &machine()).unwrap_err().to_string();
    assert!(message.contains("gated.py:embedding") && message.contains("31"), "{message}");
    let adapter = compiler::AdapterOptions { targets: vec!["q_proj".into()], ..adapter() };
    let message = compile(&model(), &CompileOptions { adapter: Some(adapter), ..options() }, &machine());
    let message = message.unwrap_err().to_string();
    assert!(message.contains("`q_proj`") && message.contains("gate_proj"), "{message}");
}

/// The entries of one program may compute different values, but share weights and adapters.
#[test]
fn dropout_is_computed_in_training_alone() {
    let adapter = Some(compiler::AdapterOptions { dropout: 0.25, ..adapter() });
    let mut options = CompileOptions { adapter, ..options() };
    options.entries.push(EntryOptions::forward().keeping(["logits"]));
    let program = compile(&model(), &options, &machine()).unwrap();
    for entry in &program.entries {
        let dropped = entry.steps.iter().filter(|step| step.to_string().contains("dropout")).count();
        let trains = matches!(entry.kind, EntryKind::FirstMicroStep | EntryKind::NextMicroStep);
        assert_eq!(dropped > 0, trains, "{:?}: {dropped} steps with dropout", entry.kind);
    }
}

/// On a GPU the masks are made inside the products: as many instructions as without dropout, and the same numbers as
/// the operations one by one.
#[test]
fn dropout_of_adapters_costs_no_instruction_on_a_gpu() {
    let text = include_str!("../fixtures/gated.json").replace(" 32", " 64").replace(" 48", " 128");
    let wide = graph::from_json(&text).unwrap();
    let options = |dropout: f64| {
        let adapter = Some(compiler::AdapterOptions { dropout, ..adapter() });
        CompileOptions { adapter, weights: DType::BF16, compute: DType::BF16, ..options() }
    };
    let steps = |dropout: f64| {
        let program = compile(&wide, &options(dropout), &Machine::h200()).unwrap();
        let entry = program.entry(EntryKind::NextMicroStep, Some(VARIANT)).unwrap();
        program.entries[entry].steps.iter().map(|step| step.provenance.op.clone()).collect::<Vec<_>>()
    };
    assert!(steps(0.25).iter().any(|op| op == "dropout_linear_backward"), "{:?}", steps(0.25));
    assert_eq!(steps(0.25).len(), steps(0.0).len(), "{:?}\n{:?}", steps(0.25), steps(0.0));
    let found = |machine: &Machine| {
        let mut passes = Passes::limited(Some(Pass::OPTIONAL.len()));
        let options = options(0.25);
        let graph = entry_graph(&wide, &options, machine, &options.entries[0], VARIANT, &mut passes);
        let graph = graph.unwrap();
        loss_and_gradients(&graph, &contents::<f64>(&graph))
    };
    let (here, there) = (found(&machine()), found(&Machine::h200()));
    assert!((here.0 - there.0).abs() < 1e-14 * here.0.abs(), "{} and {}", here.0, there.0);
    for (name, gradient) in &here.1 {
        let norm = |values: &[f64]| values.iter().map(|v| v * v).sum::<f64>().sqrt();
        let difference: Vec<f64> = gradient.iter().zip(&there.1[name]).map(|(a, b)| a - b).collect();
        // The sum with the base weight's part is rounded in one of them alone.
        assert!(norm(&difference) < 0.01 * norm(gradient), "{name}: {} of {}", norm(&difference), norm(gradient));
    }
}

/// Patterns are Python's, which PEFT reads: they may look ahead.
#[test]
fn adapter_patterns_may_look_ahead() {
    let adapted = |pattern: &str| -> Vec<String> {
        let adapter = Some(compiler::AdapterOptions { targets: vec![pattern.into()], ..adapter() });
        let program = compile(&model(), &CompileOptions { adapter, ..options() }, &machine()).unwrap();
        program.layout.parameters.iter().filter(|slot| slot.adapter).map(|slot| slot.name.clone()).collect()
    };
    let (all, some) = (adapted(r".*_proj"), adapted(r"^(?!.*gate).*_proj$"));
    assert!(all.iter().any(|name| name.contains("gate_proj")) && !some.is_empty());
    assert_eq!(some, all.into_iter().filter(|name| !name.contains("gate_proj")).collect::<Vec<_>>());
}

/// A program for a GPU carries kernels and other choices; the CPU runs it all the same.
#[test]
fn a_program_for_an_h200_runs_on_the_cpu() {
    let options = CompileOptions { adapter: Some(adapter()), ..options() };
    let (_, mut here) = load(&options, &machine());
    let (_, mut there) = load(&options, &Machine::h200());
    assert!(!there.program().kernels.is_empty() && here.program().kernels.is_empty());
    for session in [&mut here, &mut there] {
        let first = session.program().entry(EntryKind::FirstMicroStep, Some(VARIANT)).unwrap();
        session.run(first).unwrap();
    }
    for (name, at) in here.program().clone().scalars.iter().filter(|(_, at)| at.dtype == tensor::DType::F32) {
        assert_eq!(numbers(here.as_mut(), at), numbers(there.as_mut(), at), "{name}");
    }
    let slots = here.program().clone();
    for slot in slots.layout.parameters.iter().filter(|p| p.trainable) {
        let other = there.program().parameter(&slot.name).unwrap().gradient.clone().unwrap();
        let (a, b) = (numbers(here.as_mut(), slot.gradient.as_ref().unwrap()), numbers(there.as_mut(), &other));
        assert_eq!(a, b, "{}", slot.name);
    }
}

#[test]
fn an_f32_copy_is_updated_and_the_weight_is_its_rounding() {
    let program = |master: bool, lora: bool| {
        let mut options = CompileOptions { weights: DType::BF16, compute: DType::BF16, ..options() };
        options.adapter = lora.then(|| compiler::AdapterOptions { dtype: DType::BF16, ..adapter() });
        options.training.as_mut().unwrap().optimizer.as_mut().unwrap().master = master;
        compile(&model(), &options, &Machine::cpu(1 << 34, 2)).unwrap()
    };
    let (without, with) = (program(false, false), program(true, false));
    let elements: usize = with.layout.parameters.iter().map(|slot| slot.weight.len().next_multiple_of(256)).sum();
    let bytes = |p: &program::Program| p.arenas.iter().map(|arena| arena.bytes).sum::<usize>();
    assert_eq!(bytes(&with) - bytes(&without), 4 * elements);
    let ops = |p: &program::Program| -> Vec<(String, DType)> {
        let update = &p.entries[p.entry(EntryKind::Update, None).unwrap()];
        let launches = update.steps.iter().filter_map(|step| match &step.instruction {
            program::Instruction::Launch(launch) => Some((launch.op.clone(), launch.outputs[0].dtype)),
            _ => None,
        });
        launches.filter(|(op, _)| op.starts_with("adamw") || op == "cast").collect()
    };
    assert!(ops(&without).iter().all(|(op, dtype)| op != "cast" && *dtype == DType::BF16));
    for pair in ops(&with).chunks(2) {
        assert!(pair[0].0.starts_with("adamw") && pair[0].1 == DType::F32, "{pair:?}");
        assert_eq!(pair[1], ("cast".to_owned(), DType::BF16));
    }
    for slot in &program(true, true).layout.parameters {
        let master = slot.master.as_ref().map(|at| (at.dtype, at.shape.clone()));
        assert_eq!(master, slot.adapter.then(|| (DType::F32, slot.weight.shape.clone())), "{}", slot.name);
    }
}

#[test]
fn normuon_takes_matrices_of_equal_extents_together_and_leaves_the_rest_to_adamw() {
    use program::Instruction;
    let model = graph::from_json(include_str!("../fixtures/qwen3.json")).unwrap();
    let mut options = options();
    let optimizer = options.training.as_mut().unwrap().optimizer.as_mut().unwrap();
    optimizer.kind = compiler::OptimizerKind::NorMuon { momentum: 0.95, beta2: 0.95, cautious: true };
    let program = compile(&model, &options, &Machine::cpu(1 << 34, 2)).unwrap();
    for slot in &program.layout.parameters {
        let by_matrices = slot.states.iter().any(|state| state.name == "rows");
        let expected = slot.name.contains("_proj");
        assert_eq!(by_matrices, expected, "{}: vectors, embeddings and head are left to AdamW", slot.name);
    }
    let update = &program.entries[program.entry(EntryKind::Update, None).unwrap()];
    let updated = |op: &str| -> Vec<(usize, usize)> {
        let launches = update.steps.iter().filter_map(|step| match &step.instruction {
            Instruction::Launch(launch) if launch.op == op => Some(&launch.outputs[0]),
            _ => None,
        });
        launches.map(|at| (at.shape[0], at.len())).collect()
    };
    let sum = |name: &str| -> usize {
        program.layout.parameters.iter().filter(|slot| slot.name.contains(name)).map(|slot| slot.weight.len()).sum()
    };
    assert_eq!(updated("normuon").iter().map(|(_, elements)| elements).sum::<usize>(), sum("_proj"));
    let layers = program.layout.parameters.iter().filter(|slot| slot.name.ends_with("q_proj.weight")).count();
    assert!(layers > 1 && updated("normuon").iter().all(|(count, _)| count % layers == 0), "{:?}", updated("normuon"));
    // Products of a whole batch; with one round's three for each of the different extents.
    let batches: Vec<usize> = update
        .steps
        .iter()
        .filter_map(|step| match &step.instruction {
            Instruction::Gemm(gemm) => Some(gemm.batch),
            _ => None,
        })
        .collect();
    let mut extents: Vec<_> =
        program.layout.parameters.iter().filter(|s| s.name.contains("_proj")).map(|s| s.weight.shape.clone()).collect();
    let matrices = extents.len();
    extents.sort();
    extents.dedup();
    assert_eq!(batches.len(), 15 * extents.len());
    assert_eq!(batches.iter().sum::<usize>(), 15 * matrices);
}
