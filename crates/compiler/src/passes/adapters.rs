//! LoRA: y = x·Wᵀ + scale·dropout(x)·Aᵀ·Bᵀ on every targeted linear. A is [rank, in], B is
//! [out, rank], named as PEFT names them. Linears that share an input share one dropout mask.

use std::collections::HashMap;

use graph::{AdapterForm, AdapterPlace, Graph, Node, Origin, Parameter, ValueId};
use ops::{Append, Emit, id};
use program::EntryKind;
use tensor::Attrs;

use super::adapter_slots::Slots;
use super::embedding_noise::scalar_of_step;
use super::stacked_adapters::matrix;
use super::{magnitude, stacked_adapters as stacks};
use crate::adapter::{AdapterOf, AdapterOptions, AdapterRules, HEAD, is_in};
use crate::{CompileError, CompileOptions, EntryOptions};

pub fn run(graph: &mut Graph, options: &CompileOptions, entry: &EntryOptions) -> Result<(), CompileError> {
    let Some(adapter) = &options.adapter else { return Ok(()) };
    check_saved(graph, options, adapter)?;
    let rules = AdapterRules::new(adapter)?;
    if adapter.magnitudes {
        magnitude::check(options)?;
    }
    let dropout = if entry.kind == EntryKind::FirstMicroStep { adapter.dropout } else { 0.0 };
    let mut masks = Masks::new(graph, dropout, options.seed);
    let mut hits = rules.hits();
    let mut stacks = stacks::Stacks::of(graph);
    let uses = graph.use_counts();
    let mut slots = adapter.slots.map(|count| Slots::new(graph, count, adapter)).transpose()?;
    let nodes = std::mem::take(&mut graph.nodes);
    let mut result = Vec::with_capacity(nodes.len() * 2);
    for mut node in nodes {
        if node.op == id::GROUPED_LINEAR {
            result.extend(stacks.adapted(graph, node, (&rules, &mut hits), (adapter, options, entry))?);
            continue;
        }
        if let Some(of) = target_module(graph, &node, &uses, &rules, &mut hits)? {
            let mut append = Append::new(graph, node.phase);
            append.place_like(&node);
            let source = masks.source(&mut append, node.inputs[0]);
            let shape = &append.graph.value(node.inputs[1]).shape;
            let transposed = node.attrs.flag("transposed").unwrap_or(false);
            let (rows, columns) = if transposed { (shape[1], shape[0]) } else { (shape[0], shape[1]) };
            let AdapterOf { module, rank, scale, .. } = of;
            let a = matrix(append.graph, &module, "lora_A", [rank, columns], adapter, options);
            let b = matrix(append.graph, &module, "lora_B", [rows, rank], adapter, options);
            let mut t = append.emit(id::LINEAR, &[source, a], Attrs::new())[0];
            match &mut slots {
                Some(slots) => t = slots.keep_own(append, &node, t, result.len())?,
                None => result.append(&mut append.nodes),
            }
            let plain = node.clone();
            node.inputs.extend([t, b]);
            node.attrs = node.attrs.with("scale", scale).with("columns", vec![0, rows]);
            if adapter.magnitudes {
                let of = magnitude::Adapted { module: &module, plain, source, matrices: [a, b], scale, rank };
                result.extend(magnitude::scaled(graph, node, of, options, entry)?);
                continue;
            }
        }
        result.push(node);
    }
    graph.nodes = match slots {
        Some(slots) => slots.placed(result),
        None => result,
    };
    match rules.targets().zip(hits).find(|(_, hits)| *hits == 0) {
        Some((target, _)) => Err(CompileError::Options(unmatched(graph, target, &adapter.form))),
        None => Ok(()),
    }
}

/// The inputs that adapters read: those of their linears, with elements dropped where dropout is requested.
struct Masks {
    dropout: f64,
    seed: u64,
    micro_step: Option<ValueId>,
    /// The dropped value of each input.
    dropped: HashMap<ValueId, ValueId>,
}

impl Masks {
    fn new(graph: &mut Graph, dropout: f64, seed: u64) -> Masks {
        let micro_step = (dropout > 0.0).then(|| scalar_of_step(graph));
        Masks { dropout, seed, micro_step, dropped: HashMap::new() }
    }

    fn source(&mut self, append: &mut Append<'_>, x: ValueId) -> ValueId {
        let Some(micro_step) = self.micro_step else { return x };
        let stream = self.dropped.len() as u64;
        *self.dropped.entry(x).or_insert_with(|| {
            let attrs = Attrs::new().with("p", self.dropout).with("seed", self.seed).with("stream", stream);
            append.emit(id::DROPOUT, &[x, micro_step], attrs)[0]
        })
    }
}

/// The module name of a targeted linear. A weight with other uses is a tied embedding, not a linear
/// module of the model.
fn target_module(
    graph: &Graph,
    node: &Node,
    uses: &[usize],
    rules: &AdapterRules,
    hits: &mut [usize],
) -> Result<Option<AdapterOf>, CompileError> {
    if node.op != id::LINEAR {
        return Ok(None);
    }
    let Some(weight) = node.inputs.get(1) else { return Ok(None) };
    let Origin::Parameter(id) = graph.value(*weight).origin else { return Ok(None) };
    if uses[weight.0 as usize] > 1 {
        return Ok(None);
    }
    if graph.parameter(id).saved {
        return Ok(None);
    }
    rules.counted(&graph.parameter(id).name, hits)
}

/// Every module that is to be trained as a whole is there, and no entry wants what it was before.
fn check_saved(graph: &Graph, options: &CompileOptions, adapter: &AdapterOptions) -> Result<(), CompileError> {
    let uses = graph.use_counts();
    let is_shared = |p: &Parameter| p.saved && p.table && uses[p.value.0 as usize] > 1;
    let head_is_saved = graph.parameters.iter().any(is_shared);
    for name in &adapter.saved {
        // PEFT lists a tied embedding under several names, all of which mean it.
        let is_there = graph.parameters.iter().any(|p| is_in(&p.name, name)) || name == HEAD && head_is_saved;
        if !is_there {
            return Err(CompileError::Saved(no_module(graph, name)));
        }
    }
    if !adapter.saved.is_empty() && options.entries.iter().any(|entry| !entry.adapter) {
        let text = "the model without its adapter cannot be computed together with modules that are trained in full";
        return Err(CompileError::Saved(text.into()));
    }
    Ok(())
}

fn no_module(graph: &Graph, name: &str) -> String {
    let modules = graph.parameters.iter().filter_map(|p| p.name.rsplit_once('.')?.0.rsplit('.').next());
    let mut names: Vec<&str> = modules.collect();
    names.sort_unstable();
    names.dedup();
    let tied = match name {
        HEAD => " (the head may be the embedding: name that)",
        _ => "",
    };
    format!("`{name}` matches no module of the model{tied}; its modules are: {}", names.join(", "))
}

fn unmatched(graph: &Graph, target: &str, form: &AdapterForm) -> String {
    let mut names: Vec<String> = Vec::new();
    for parameter in graph.parameters.iter().filter(|p| !p.adapter && p.shape.len() > 1) {
        let last = |module: &str| module.rsplit('.').next().unwrap_or(module).to_owned();
        match form.place(&parameter.name) {
            Some(AdapterPlace::Matrix { module }) if form.is_linear(&module) => names.push(last(&module)),
            Some(AdapterPlace::Matrix { module }) => names.push(format!("{}.weight", last(&module))),
            Some(AdapterPlace::Stacked { stack, .. }) => names.push(form.stacks[stack].name.clone()),
            None => {}
        }
    }
    names.sort_unstable();
    names.dedup();
    let (parameters, modules): (Vec<String>, Vec<String>) =
        names.into_iter().partition(|name| name.contains('.') || form.stacks.iter().any(|stack| stack.name == *name));
    let more = match parameters.is_empty() {
        true => String::new(),
        false => format!("; its parameters: {}", parameters.join(", ")),
    };
    format!("adapter target `{target}` matches no linear of the model; its modules are: {}{more}", modules.join(", "))
}
