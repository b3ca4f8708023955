//! Fixtures of the compiler's tests: a small model as IR, compile options, and contents for its values.

pub mod quantised;
pub mod training;

use std::collections::HashMap;
use std::sync::Arc;

use compiler::{
    AdapterOptions, CompileOptions, EntryOptions, OptimizerKind, OptimizerOptions, Pass, PlanOptions, Training,
};
use graph::{Graph, Model, Origin, ValueId};
use ops::Real;
use ops::evaluate::Array;
use program::{Backend, Documents, EntryKind, ParameterSlot, Program, Session, TensorRef, Variant, scalar};
use tensor::philox::{Purpose, normal_pair, word};
use tensor::{DType, HostTensor};

pub const HIDDEN: usize = 32;
pub const INNER: usize = 48;
pub const VOCABULARY: usize = 40;
/// The task of the small models.
pub const TASK: &str = "causal_lm";
/// Loss scale of loaded programs, where they have one.
pub const LOSS_SCALE: f32 = 64.0;
pub const VARIANT: Variant = Variant { batch: 2, seq_len: 8, documents: Documents::Rows, patches: 0, logits: 0 };

/// Two gated layers between an embedding and a tied head: every kind of rewrite finds something.
pub fn model() -> Model {
    let text = include_str!("../../fixtures/gated.json");
    graph::from_json(text).expect("the fixture is valid IR")
}

pub fn options() -> CompileOptions {
    CompileOptions {
        variants: vec![VARIANT],
        weights: DType::F32,
        quantised: None,
        stored: Default::default(),
        compute: DType::F32,
        recipe: Default::default(),
        training: Some(Training {
            rates: Default::default(),
            dropout: true,
            embedding_noise: 0.0,
            optimizer: Some(OptimizerOptions {
                kind: OptimizerKind::AdamW,
                beta1: 0.9,
                beta2: 0.999,
                epsilon: 1e-8,
                weight_decay: 0.1,
                max_grad_norm: 1.0,
                bias_rate: None,
                master: false,
            }),
        }),
        adapter: None,
        entries: vec![EntryOptions::train(TASK).keeping(["token_loss"]), EntryOptions::evaluate(TASK)],
        seed: 7,
        // A limit that leaves out no rewrite: the graph is verified after each.
        plan: PlanOptions { passes: Some(Pass::OPTIONAL.len()), ..PlanOptions::default() },
        sharding: Default::default(),
        branches: None,
        batch_invariant: false,
    }
}

pub fn adapter() -> AdapterOptions {
    AdapterOptions {
        parameters: Vec::new(),
        saved: Vec::new(),
        magnitudes: false,
        rank: 8,
        alpha: 16.0,
        rank_stabilised: false,
        dropout: 0.0,
        dtype: DType::F32,
        targets: vec!["all-linear".into()],
        exceptions: Default::default(),
        slots: None,
        form: Default::default(),
    }
}

/// Deterministic contents for every input and parameter, by name.
pub fn contents<T: Real>(graph: &Graph) -> HashMap<ValueId, Array<T>> {
    let mut given = HashMap::new();
    for (index, value) in graph.values.iter().enumerate() {
        let id = ValueId(index as u32);
        let len: usize = value.shape.iter().product();
        let array = match value.origin {
            Origin::Node => continue,
            Origin::State(_) => Array::Real(vec![T::default(); len]),
            Origin::Constant => {
                let (_, tensor) = graph.constants.iter().find(|(c, _)| *c == id).expect("constants have contents");
                Array::Real(tensor.to_f64().into_iter().map(T::from_f64).collect())
            }
            Origin::Input => input(&value.name, len),
            Origin::Parameter(_) => {
                let scale = if value.name.contains("norm") { 1.0 } else { 0.2 };
                let offset = if value.name.contains("norm") { 1.0 } else { 0.0 };
                Array::Real((0..len).map(|i| T::from_f64(offset + scale * normal(&value.name, i) as f64)).collect())
            }
        };
        given.insert(id, array);
    }
    given
}

fn input<T: Real>(name: &str, len: usize) -> Array<T> {
    match name {
        "input_ids" => Array::Int((0..len).map(|i| (i * 7 % VOCABULARY) as i32).collect()),
        "targets" => {
            Array::Int((0..len).map(|i| if i % 5 == 4 { -100 } else { (i * 11 % VOCABULARY) as i32 }).collect())
        }
        "position_ids" => Array::Int((0..len).map(|i| (i % VARIANT.seq_len) as i32).collect()),
        "document_start" | "micro_step" => Array::Int(vec![0; len]),
        "weights" => {
            Array::Real((0..len).map(|i| T::from_f64(if i % 5 == 4 { 0.0 } else { 0.5 + (i % 3) as f64 })).collect())
        }
        "present" => Array::Real(vec![T::from_f64(1.0); len]),
        other => panic!("no contents for the input `{other}`"),
    }
}

fn normal(name: &str, index: usize) -> f32 {
    let stream = name.bytes().fold(17u32, |h, b| h.wrapping_mul(31).wrapping_add(b as u32));
    let a = word(3, Purpose::Initialisation, stream, 0, 2 * index as u64);
    let b = word(3, Purpose::Initialisation, stream, 0, 2 * index as u64 + 1);
    normal_pair(a, b).0
}

/// A program on the CPU, its weights drawn by their names.
pub fn loaded(program: Program) -> Box<dyn Session> {
    let program = Arc::new(program);
    let mut session = cpu::CpuBackend::new(Some(2)).unwrap().load(program.clone()).unwrap();
    fill_parameters(session.as_mut(), |session, _, slot| {
        let mut graph = Graph::default();
        let id = graph.add_parameter(&slot.name, vec![slot.weight.len()], graph::Init::Ones, DType::F32);
        write(session, &slot.weight, &contents(&graph)[&graph.parameter(id).value]);
    });
    if let Some((_, at)) = program.layout.extra.iter().find(|(name, _)| name == scalar::LOSS_SCALE) {
        session.write(at, &LOSS_SCALE.to_le_bytes()).unwrap();
    }
    session
}

/// Writes the parameters, which `write` gets with their numbers, and makes what follows from them.
pub fn fill_parameters(session: &mut dyn Session, mut write: impl FnMut(&mut dyn Session, usize, &ParameterSlot)) {
    let program = session.program().clone();
    let number = |slot: &ParameterSlot| program.layout.parameters.iter().position(|of| of.name == slot.name).unwrap();
    for (group, slots) in program.layout.in_order() {
        slots.into_iter().for_each(|slot| write(session, number(slot), slot));
        if let Some(entry) = program.preparation(group) {
            session.run(entry).unwrap();
        }
    }
}

/// Runs an entry on a batch that is always the same.
pub fn run(session: &mut dyn Session, entry: usize) {
    fill(session, entry);
    session.run(entry).unwrap();
}

/// The batch of an entry that is always the same.
pub fn fill(session: &mut dyn Session, entry: usize) {
    let program = session.program().clone();
    for (name, at) in &program.entries[entry].inputs {
        let mut graph = Graph::default();
        let id = graph.add_input(name, graph::Element::F32, vec![at.len()]);
        write(session, at, &contents(&graph)[&id]);
    }
}

pub fn write(session: &mut dyn Session, at: &TensorRef, array: &Array<f32>) {
    let tensor = match array {
        Array::Real(x) => HostTensor::from_f32(at.shape.clone(), x).cast(at.dtype),
        Array::Int(x) => HostTensor::from_i32(at.shape.clone(), x),
        Array::Byte(_) => unreachable!("no byte inputs here"),
    };
    session.write(at, &tensor.bytes).unwrap();
}

pub fn read(session: &mut dyn Session, at: &TensorRef) -> Vec<u8> {
    let mut bytes = vec![0; at.bytes()];
    session.read(at, &mut bytes).unwrap();
    bytes
}

pub fn numbers(session: &mut dyn Session, at: &TensorRef) -> Vec<f32> {
    HostTensor::new(at.dtype, at.shape.clone(), read(session, at)).to_f32()
}

/// Loss and all gradients after two micro-steps, as bits.
pub fn bits(program: Program) -> Vec<(String, Vec<u8>)> {
    let mut session = loaded(program);
    let program = session.program().clone();
    for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep] {
        let entry = program.entries.iter().position(|entry| entry.kind == kind).unwrap();
        run(session.as_mut(), entry);
    }
    let mut results = vec![("loss".to_owned(), read(session.as_mut(), program.scalar("loss_sum").unwrap()))];
    for slot in program.layout.parameters.iter().filter(|slot| slot.trainable) {
        results.push((slot.name.clone(), read(session.as_mut(), slot.gradient.as_ref().unwrap())));
    }
    results
}

/// The value whose turn it is, so that a test walks through its other axes and tries each value of this one; all of them
/// under `./test.sh --all`.
pub fn in_turn<T: Clone>(values: &[T], turn: usize) -> Vec<T> {
    match std::env::var_os("SUROGATE_TEST_ALL") {
        Some(_) => values.to_vec(),
        None => vec![values[turn % values.len()].clone()],
    }
}
