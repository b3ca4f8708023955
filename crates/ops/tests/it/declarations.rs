//! Declarations that every operation makes besides its arithmetic: a unique name, text for the reference page,
//! documented attributes, and examples that its own rules admit.

use std::collections::HashSet;

use graph::{Element, ValueType};
use ops::evaluate::Array;
use ops::examples::{instantiate, type_of};
use ops::id;
use tensor::DType;

#[test]
fn names_are_unique_and_found() {
    let names: HashSet<&str> = ops::all().iter().map(|op| op.name()).collect();
    assert_eq!(names.len(), ops::all().len());
    for op in ops::all() {
        assert_eq!(ops::find(op.name()).map(|op| op.id()), Ok(op.id()));
        assert_eq!(ops::get(op.id()).name(), op.name());
    }
    assert_eq!(ops::find("no_such_operation").err(), Some("there is no operation `no_such_operation`".to_owned()));
}

#[test]
fn operations_and_attributes_are_documented() {
    for op in ops::all() {
        assert!(op.doc().ends_with('.') && op.doc().len() > 10, "{}: `{}`", op.name(), op.doc());
        for attribute in op.attributes() {
            assert!(!attribute.doc.is_empty() && !attribute.kind.is_empty(), "{}: {}", op.name(), attribute.name);
        }
    }
}

/// A required attribute that is missing, or any unknown one, is rejected by the shape rule.
#[test]
fn attributes_are_checked() {
    for op in ops::all() {
        for example in op.examples() {
            let types: Vec<ValueType> = example.inputs.iter().map(type_of).collect();
            let with_unknown = example.attrs.clone().with("no_such_attribute", 1);
            assert!(ops::infer(op.id(), &types, &with_unknown).is_err(), "{}", op.name());
            for attribute in op.attributes().iter().filter(|a| !a.kind.ends_with('?')) {
                let mut attrs = example.attrs.clone();
                attrs.remove(attribute.name);
                let name = attribute.name;
                assert!(ops::infer(op.id(), &types, &attrs).is_err(), "{}: missing `{name}` passes", op.name());
            }
        }
    }
}

/// Examples run, and what they give is finite wherever the operation does not report otherwise.
#[test]
fn examples_run_in_both_precisions() {
    for op in ops::all() {
        assert!(!op.examples().is_empty(), "{} has no examples", op.name());
        for example in op.examples() {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let instance = instantiate(&example, *op, dtype, 5);
                let expected = instance.expected();
                assert_eq!(expected.len(), instance.outputs.len());
                let finite = expected.iter().all(|t| t.to_f64().iter().all(|x| x.is_finite()));
                let given = instance.inputs.iter().all(|t| t.to_f64().iter().all(|x| x.is_finite()));
                let reports = ["gradient_scale", "amax_history"].contains(&op.name());
                assert!(finite || !given || reports, "{} {}", op.name(), example.attrs);
            }
        }
    }
}

/// Updates that are suppressed, and results that nothing asks for, stay as they are.
#[test]
fn a_suppressed_update_changes_nothing() {
    for (op, applied) in [(id::ADAMW, 5), (id::ADAMW_8BIT, 5), (id::MOMENTUM, 2), (id::NORMUON, 2)] {
        let op = ops::get(op);
        let examples = op.examples();
        let suppressed = examples
            .iter()
            .map(|e| instantiate(e, op, DType::BF16, 3))
            .find(|i| matches!(ops::examples::array_of::<f32>(&i.inputs[applied]), Array::Real(x) if x == [0.0]));
        let instance = suppressed.expect("one example is suppressed");
        assert_eq!(instance.expected(), instance.outputs, "{}", op.name());
    }
}

#[test]
fn shape_rules_refuse_what_they_do_not_take() {
    let float = |shape: &[usize]| ValueType::new(Element::Float, shape.iter().map(|n| (*n).into()).collect::<Vec<_>>());
    let attrs = tensor::Attrs::new();
    for (op, inputs, message) in [
        (id::ADD, vec![float(&[2]), float(&[3])], "add(float[2], float[3]): operands must have the same shape"),
        (id::SWIGLU, vec![float(&[2])], "swiglu(float[2]): takes gate and up"),
        (
            id::ADD,
            vec![ValueType::new(Element::I32, [2.into()]); 2],
            "add(i32[2], i32[2]): i32[2] is not floating point",
        ),
        (
            id::CROSS_ENTROPY,
            vec![float(&[2, 9]); 2],
            "cross_entropy(float[2, 9], float[2, 9]): the targets must be i32",
        ),
    ] {
        let error = ops::infer(op, &inputs, &attrs).unwrap_err();
        assert!(error.starts_with(message), "{error}");
    }
}
