//! Stacks of layers side by side, and patterns of kinds inside one.

use crate::support::{TASK, adapter, bits, model, options};
use compiler::{CompileOptions, EntryOptions, PlanOptions, RecomputeOptions, compile};
use program::{Machine, Program};
use serde_json::{Value, json};

fn machine() -> Machine {
    Machine::cpu(1 << 30, 2)
}

fn compiled(model: &Value, options: &CompileOptions) -> Program {
    compile(&graph::from_json(&model.to_string()).unwrap(), options, &machine()).unwrap()
}

fn stack_of(model: &Value) -> usize {
    model["body"].as_array().unwrap().iter().position(|item| item["repeat"].is_u64()).unwrap()
}

/// A model of one stack, whose two layers are said to be of two kinds.
fn patterned() -> Value {
    let mut model = serde_json::to_value(model()).unwrap();
    let at = stack_of(&model);
    let stack = &mut model["body"][at];
    stack["pattern"] = json!([1, 0]);
    let block = stack["blocks"][0].clone();
    stack["blocks"].as_array_mut().unwrap().push(block);
    model
}

/// The same layers in two stacks of one layer each.
fn parted() -> Value {
    let mut model = serde_json::to_value(model()).unwrap();
    let at = stack_of(&model);
    let whole = model["body"][at].clone();
    let stack = |name: &str, initial: &Value, result: &Value| {
        let text = whole.to_string().replace("layers.{i}.", &format!("{name}.{{i}}."));
        let mut stack: Value = serde_json::from_str(&text.replace("hidden.layer", &format!("hidden.{name}"))).unwrap();
        stack["repeat"] = json!(1);
        stack["stack"] = json!(name);
        stack["carry"] = json!([{"initial": initial, "result": result}]);
        stack
    };
    let (initial, result) = (&whole["carry"][0]["initial"], &whole["carry"][0]["result"]);
    let stacks = [stack("tower", initial, &json!("between")), stack("text", &json!("between"), result)];
    model["body"].as_array_mut().unwrap().splice(at..=at, stacks);
    model
}

fn cases() -> Vec<CompileOptions> {
    let recompute = RecomputeOptions { block: Some(true), ..Default::default() };
    let again = PlanOptions { recompute, ..options().plan };
    let mut cases = Vec::new();
    for adapter in [None, Some(adapter())] {
        for plan in [options().plan, again.clone()] {
            let entries = vec![EntryOptions::train(TASK)];
            cases.push(CompileOptions { adapter: adapter.clone(), plan, entries, ..options() });
        }
    }
    cases
}

#[test]
fn a_pattern_of_equal_kinds_is_the_same_program() {
    let plain = serde_json::to_value(model()).unwrap();
    for options in cases() {
        assert_eq!(compiled(&patterned(), &options).to_string(), compiled(&plain, &options).to_string());
    }
}

/// Two stacks compute the same bits as one, and their layers keep the name of their stack.
#[test]
fn two_stacks_are_planned_apart() {
    let plain = serde_json::to_value(model()).unwrap();
    for options in cases() {
        let (one, two) = (compiled(&plain, &options), compiled(&parted(), &options));
        let steps = |program: &Program| program.entries[0].steps.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        assert_eq!(steps(&one), steps(&two));
        let text = two.to_string();
        assert!(text.contains("  tower.0 ") && text.contains("  text.0 "), "{text}");
        let names = |of: &program::PlanDecision| of.layers.iter().map(|layer| layer.to_string()).collect::<Vec<_>>();
        assert!(two.plan.iter().any(|of| names(of) == ["tower.0", "text.0"]), "{:?}", two.plan);
        assert!(!bits(two).is_empty());
    }
}

#[test]
fn what_a_pattern_lacks_is_said() {
    let message = |change: &dyn Fn(&mut Value)| {
        let mut model = patterned();
        let at = stack_of(&model);
        change(&mut model["body"][at]);
        let model = graph::from_json(&model.to_string()).unwrap();
        compile(&model, &options(), &machine()).unwrap_err().to_string()
    };
    let short = message(&|stack| stack["pattern"] = json!([0]));
    assert_eq!(short, "the layers of `layers`: the pattern has 1 entries for 2 layers");
    let unknown = message(&|stack| stack["pattern"] = json!([0, 2]));
    assert_eq!(unknown, "the layers of `layers`: layer 1 is of a kind that is not among the 2 blocks");
    let loose = message(&|stack| stack["blocks"][1]["carry"] = json!([]));
    assert_eq!(loose, "the layers of `layers`: a block hands on 0 values, the repeat 1");
}

/// The model with a second value that layer 0 gives and layer 1 reads, and with an outer value of its own for each layer.
fn handing_on() -> Value {
    let mut model = patterned();
    let at = stack_of(&model);
    let initial = model["body"][at]["carry"][0]["initial"].clone();
    let stack = &mut model["body"][at];
    stack["carry"].as_array_mut().unwrap().push(json!({"result": "layers.output_2"}));
    stack["each"] = json!([{"inside": "layers.each", "values": [initial, initial]}]);
    for (block, reads) in [(1, false), (0, true)] {
        let block = &mut stack["blocks"][block];
        let [inside, next] = ["inside", "next"].map(|key| block["carry"][0][key].clone());
        let nodes = block["nodes"].as_array_mut().unwrap();
        let types = nodes.iter().find(|node| node["outputs"][0] == next).unwrap()["types"].clone();
        let inputs = if reads { json!([next, "layers.second"]) } else { json!([inside, "layers.each"]) };
        nodes.push(json!({"op": "add", "inputs": inputs, "outputs": ["layers.sum"], "types": types}));
        let handed = if reads { "layers.second" } else { "layers.sum" };
        block["carry"].as_array_mut().unwrap().push(json!({"inside": "layers.second", "next": handed}));
        if reads {
            block["carry"][0]["next"] = json!("layers.sum");
        }
    }
    model
}

#[test]
fn a_layer_reads_what_an_earlier_one_gives() {
    for options in cases() {
        assert!(!bits(compiled(&handing_on(), &options)).is_empty());
    }
    let message = |change: &dyn Fn(&mut Value)| {
        let mut model = handing_on();
        let at = stack_of(&model);
        change(&mut model["body"][at]);
        let model = graph::from_json(&model.to_string()).unwrap();
        compile(&model, &options(), &machine()).unwrap_err().to_string()
    };
    let early = message(&|stack| stack["pattern"] = json!([0, 1]));
    assert!(early.ends_with("add of layer 0 reads `layers.second`, which no layer before it gives"), "{early}");
    let short = message(&|stack| stack["each"][0]["values"] = json!(["one"]));
    assert_eq!(short, "the layers of `layers`: `layers.each` has 1 values for 2 layers");
    let unknown = message(&|stack| stack["each"][0]["values"] = json!(["one", "two"]));
    assert_eq!(unknown, "a repeat carries `one`, which is not defined");
}
