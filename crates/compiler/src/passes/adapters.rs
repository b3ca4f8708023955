//! LoRA: y = x·Wᵀ + scale·dropout(x)·Aᵀ·Bᵀ on every targeted linear. A is [rank, in], B is
//! [out, rank], named as PEFT names them. Linears that share an input share one dropout mask.

use std::collections::HashMap;

use graph::{Element, Graph, Init, Node, Origin, ParameterId, ValueId};
use ops::{Append, Emit, id};
use program::EntryKind;
use tensor::Attrs;

use crate::adapter::{AdapterOptions, AdapterRules};
use crate::{CompileError, CompileOptions};

pub fn run(graph: &mut Graph, options: &CompileOptions, kind: EntryKind) -> Result<(), CompileError> {
    let Some(adapter) = &options.adapter else { return Ok(()) };
    if adapter.targets.iter().any(|target| target == "all-linear")
        && graph.nodes.iter().any(|node| node.op == id::GROUPED_LINEAR)
    {
        let text = "`all-linear` would put adapters on the experts and their router too, which is not available yet: name \
                    the modules of attention, such as q_proj, k_proj, v_proj and o_proj";
        return Err(CompileError::Options(text.into()));
    }
    let rules = AdapterRules::new(adapter)?;
    let dropout = if kind == EntryKind::FirstMicroStep { adapter.dropout } else { 0.0 };
    let micro_step = (dropout > 0.0)
        .then(|| graph.input("micro_step").unwrap_or_else(|| graph.add_input("micro_step", Element::I32, vec![1])));
    let mut dropped: HashMap<ValueId, ValueId> = HashMap::new();
    let mut hits = vec![0usize; adapter.targets.len()];
    let uses = graph.use_counts();
    let nodes = std::mem::take(&mut graph.nodes);
    let mut result = Vec::with_capacity(nodes.len() * 2);
    for mut node in nodes {
        if let Some(module) = target_module(graph, &node, &uses, &rules, &mut hits)? {
            let mut append = Append::new(graph, node.phase);
            append.place_like(&node);
            let x = node.inputs[0];
            let source = match micro_step {
                None => x,
                Some(micro_step) => match dropped.get(&x) {
                    Some(masked) => *masked,
                    None => {
                        let attrs = Attrs::new()
                            .with("p", dropout)
                            .with("seed", options.seed)
                            .with("stream", dropped.len() as u64);
                        let masked = append.emit(id::DROPOUT, &[x, micro_step], attrs)[0];
                        dropped.insert(x, masked);
                        masked
                    }
                },
            };
            let shape = &append.graph.value(node.inputs[1]).shape;
            let transposed = node.attrs.flag("transposed").unwrap_or(false);
            let (rows, columns) = if transposed { (shape[1], shape[0]) } else { (shape[0], shape[1]) };
            let rank = rules.rank(&module)?;
            let a = matrix(append.graph, &module, "lora_A", [rank, columns], adapter, options);
            let b = matrix(append.graph, &module, "lora_B", [rows, rank], adapter, options);
            let t = append.emit(id::LINEAR, &[source, a], Attrs::new())[0];
            result.append(&mut append.nodes);
            node.inputs.extend([t, b]);
            node.attrs = node.attrs.with("scale", rules.scale(&module)?).with("columns", vec![0, rows]);
        }
        result.push(node);
    }
    graph.nodes = result;
    for (target, hits) in adapter.targets.iter().zip(hits) {
        if hits == 0 {
            return Err(CompileError::Options(unmatched(graph, target)));
        }
    }
    Ok(())
}

/// Adds an adapter matrix to the parameter table. A starts Kaiming-uniform, B at zero: the adapted
/// model starts as the base model.
fn matrix(
    graph: &mut Graph,
    module: &str,
    which: &str,
    shape: [usize; 2],
    adapter: &AdapterOptions,
    options: &CompileOptions,
) -> ValueId {
    let name = format!("base_model.model.{module}.{which}.weight");
    let init = if which == "lora_B" { Init::Zeros } else { Init::Uniform { bound: 1.0 / (shape[1] as f64).sqrt() } };
    let ParameterId(index) = graph.add_parameter(&name, shape.to_vec(), init, adapter.dtype);
    let parameter = &mut graph.parameters[index as usize];
    parameter.trainable = options.training.is_some();
    parameter.adapter = true;
    parameter.value
}

/// The module name of a targeted linear. A weight with other uses is a tied embedding, not a linear
/// module of the model.
fn target_module(
    graph: &Graph,
    node: &Node,
    uses: &[usize],
    rules: &AdapterRules,
    hits: &mut [usize],
) -> Result<Option<String>, CompileError> {
    if node.op != id::LINEAR {
        return Ok(None);
    }
    let Some(weight) = node.inputs.get(1) else { return Ok(None) };
    let Origin::Parameter(id) = graph.value(*weight).origin else { return Ok(None) };
    if uses[weight.0 as usize] > 1 {
        return Ok(None);
    }
    let Some(module) = graph.parameter(id).name.strip_suffix(".weight") else { return Ok(None) };
    Ok(rules.matches(module, hits)?.then(|| module.to_owned()))
}

fn unmatched(graph: &Graph, target: &str) -> String {
    let weights = graph.parameters.iter().filter(|p| !p.adapter && p.shape.len() == 2);
    let mut names: Vec<&str> = weights.filter_map(|p| p.name.strip_suffix(".weight")?.rsplit('.').next()).collect();
    names.sort_unstable();
    names.dedup();
    format!("adapter target `{target}` matches no linear of the model; its modules are: {}", names.join(", "))
}
