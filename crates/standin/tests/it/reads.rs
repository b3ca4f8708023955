//! Results that arrive in the host in several parts.

use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions, compile};
use gpu::{GpuBackend, Vendor};
use graph::{Element, Input, Item, Model, NodeSpec, Output, ValueType};
use program::{Backend, EntryKind, Machine};
use tensor::Attrs;

use crate::support::training::model;
use crate::support::{VARIANT, options};

/// Elements of more than two parts of 16 MiB, and no whole number of them.
const ELEMENTS: usize = 11_000_003;

/// y = 2·x
fn doubled() -> Model {
    let of = ValueType::new(Element::F32, vec![ELEMENTS.into()]);
    let node = NodeSpec {
        op: "scale".into(),
        inputs: vec!["x".into()],
        outputs: vec!["y".into()],
        types: vec![of.clone()],
        attrs: Attrs::new().with("factor", 2.0),
        region: None,
        at: None,
    };
    Model {
        inputs: vec![Input { name: "x".into(), dtype: of.dtype, shape: of.shape }],
        parameters: Vec::new(),
        body: vec![Item::Node(node)],
        outputs: vec![Output { name: "y".into(), value: "y".into() }],
        tasks: Vec::new(),
        ..model()
    }
}

#[test]
fn large_results_arrive_whole() {
    let entries = vec![EntryOptions::forward().keeping(["y"])];
    let options = CompileOptions { entries, training: None, adapter: None, ..options() };
    let machine = Machine { arch: "sm_80".parse().unwrap(), ..Machine::h200() };
    let program = Arc::new(compile(&doubled(), &options, &machine).unwrap());
    standin::start(standin::machine(machine.arch, 1), 1);
    let mut session = GpuBackend::new(standin::options(Vendor::Nvidia)).load(program.clone()).unwrap();
    let index = program.named(EntryKind::Forward, "", Some(VARIANT)).unwrap();
    let entry = &program.entries[index];
    let at =
        |of: &[(String, program::TensorRef)], name: &str| of.iter().find(|(known, _)| known == name).unwrap().1.clone();
    let bytes: Vec<u8> = (0..ELEMENTS).flat_map(|i| (i as f32).to_le_bytes()).collect();
    session.write(&at(&entry.inputs, "x"), &bytes).unwrap();
    session.run(index).unwrap();
    let mut found = vec![0; 4 * ELEMENTS];
    session.read(&at(&entry.outputs, "y"), &mut found).unwrap();
    let wrong = found.as_chunks::<4>().0.iter().enumerate().find(|(i, x)| f32::from_le_bytes(**x) != 2.0 * *i as f32);
    assert!(wrong.is_none(), "{wrong:?}");
}
