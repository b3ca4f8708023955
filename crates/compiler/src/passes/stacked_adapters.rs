//! Adapters on parameters of three axes, a matrix for each group of rows: y = x·w[g]ᵀ + scale·(x·A[g]ᵀ)·B[g]ᵀ. As PEFT keeps
//! them, A is [groups·rank, inputs] and B [outputs, rank·groups] with the number of the group last, so B is turned over once in
//! each micro-step. A parameter whose outputs are those of several products, such as gate and up, has one adapter for all.

use std::collections::HashMap;

use graph::{Graph, Init, Node, Origin, ParameterId, ValueId};
use ops::{Append, Emit, id};
use tensor::Attrs;

use crate::adapter::{AdapterOf, AdapterOptions, AdapterRules};
use crate::{CompileError, CompileOptions, EntryOptions};

/// The products with matrices of groups that have been met.
pub(super) struct Stacks {
    /// Parameters whose matrices are contiguous, by the value that they make.
    members: HashMap<ValueId, Vec<ParameterId>>,
    /// The values that adapters add, by their names: one for each part.
    added: HashMap<String, Added>,
}

/// The values that an adapter adds to the products of one input.
struct Added {
    x: ValueId,
    parts: Vec<ValueId>,
}

fn parameter(graph: &Graph, value: ValueId) -> Option<ParameterId> {
    match graph.value(value).origin {
        Origin::Parameter(id) => Some(id),
        Origin::Input | Origin::Node | Origin::Constant | Origin::State(_) => None,
    }
}

impl Stacks {
    pub fn of(graph: &Graph) -> Stacks {
        let stacks = graph.nodes.iter().filter(|node| node.op == id::STACK);
        let members = stacks.filter_map(|node| {
            let of = node.inputs.iter().map(|value| parameter(graph, *value)).collect::<Option<Vec<_>>>()?;
            Some((node.outputs[0], of))
        });
        Stacks { members: members.collect(), added: HashMap::new() }
    }

    /// The nodes in the place of a product with matrices of groups: itself where it gets no adapter. All entries get the
    /// adapter's parameters.
    pub fn adapted(
        &mut self,
        graph: &mut Graph,
        node: Node,
        (rules, hits): (&AdapterRules, &mut [usize]),
        (adapter, options, entry): (&AdapterOptions, &CompileOptions, &EntryOptions),
    ) -> Result<Vec<Node>, CompileError> {
        let weight = node.inputs[1];
        let members = match parameter(graph, weight) {
            Some(id) => vec![id],
            None => self.members.get(&weight).cloned().unwrap_or_default(),
        };
        let mut found: Vec<AdapterOf> = Vec::new();
        for id in &members {
            let of = graph.parameter(*id);
            if of.saved {
                continue;
            }
            found.extend(rules.counted(&of.name, hits)?);
        }
        let Some(first) = found.first().cloned() else { return Ok(vec![node]) };
        let module = &first.module;
        let stack = first.stack.ok_or_else(|| {
            let place = node.at.as_deref().unwrap_or("the model");
            let parameter = &graph.parameter(members[0]).name;
            CompileError::Model(format!(
                "{place}: an adapter would lie on `{parameter}`, which has matrices of groups, but the model does not say \
                 which of its parameters are stacked; name them in its `adapters`"
            ))
        })?;
        let of_all = check_members(&node, &found, members.len())?;
        let part = stack.member.map_or(0, |[_, part]| part);
        let mut nodes = Vec::new();
        if !self.added.contains_key(module) {
            let parts = if of_all { 1 } else { stack.parts };
            let (made, parts) = added(graph, &node, &first, parts, (adapter, options, entry));
            nodes.extend(made);
            self.added.insert(module.clone(), Added { x: node.inputs[0], parts });
        }
        if !entry.adapter {
            return Ok(vec![node]);
        }
        let of = &self.added[module];
        if of.x != node.inputs[0] {
            let place = node.at.as_deref().unwrap_or("the model");
            return Err(CompileError::Model(format!("{place}: products with `{module}` read different rows")));
        }
        let (mut base, result) = (node.clone(), node.outputs[0]);
        base.outputs[0] = graph.add(graph.value(result).clone());
        let mut append = Append::new(graph, base.phase);
        append.place_like(&base);
        append.emit(id::ADD, &[base.outputs[0], of.parts[part]], Attrs::new());
        let mut sum = append.nodes.pop().expect("something was appended");
        sum.outputs[0] = result;
        nodes.extend([base, sum]);
        Ok(nodes)
    }
}

/// Checks that matrices which files keep one by one are those of all groups, in their order: of one part, or of all
/// parts, with those of a group contiguous. Returns true for all parts.
fn check_members(node: &Node, found: &[AdapterOf], count: usize) -> Result<bool, CompileError> {
    let member = |of: &AdapterOf| of.stack.and_then(|stack| stack.member);
    let parts = found[0].stack.map_or(1, |stack| stack.parts);
    let groups = node.attrs.size("groups").expect("checked by the shape rule");
    let is = |(place, of): (usize, &AdapterOf), parts: usize, first: usize| {
        member(of) == Some([place / parts, first + place % parts])
    };
    let each = |parts: usize, first: usize| {
        found.len() == groups * parts && found.iter().enumerate().all(|all| is(all, parts, first))
    };
    match member(&found[0]) {
        None if count == 1 => Ok(true),
        Some([_, part]) if found.len() == count && each(1, part) => Ok(parts == 1),
        Some(_) if found.len() == count && each(parts, 0) => Ok(true),
        _ => {
            let place = node.at.as_deref().unwrap_or("the model");
            let module = &found[0].module;
            Err(CompileError::Model(format!(
                "{place}: the matrices of `{module}` are not those of its groups in order"
            )))
        }
    }
}

/// The adapter's parameters, and the nodes that give what it adds, a value for each part.
fn added(
    graph: &mut Graph,
    node: &Node,
    of: &AdapterOf,
    parts: usize,
    (adapter, options, entry): (&AdapterOptions, &CompileOptions, &EntryOptions),
) -> (Vec<Node>, Vec<ValueId>) {
    let groups = node.attrs.size("groups").expect("checked by the shape rule");
    let columns = |graph: &Graph, id: ValueId| *graph.value(id).shape.last().expect("checked by the shape rule");
    let (inputs, outputs) = (columns(graph, node.inputs[0]), columns(graph, node.outputs[0]));
    let all = outputs * parts;
    let a = matrix(graph, &of.module, "lora_A", [groups * of.rank, inputs], adapter, options);
    let b = matrix(graph, &of.module, "lora_B", [all, of.rank * groups], adapter, options);
    if !entry.adapter {
        return (Vec::new(), Vec::new());
    }
    let mut append = Append::new(graph, node.phase);
    append.place_like(node);
    let (x, offsets) = (node.inputs[0], node.inputs[2]);
    let product = |append: &mut Append<'_>, x: ValueId, w: ValueId| {
        append.emit(id::GROUPED_LINEAR, &[x, w, offsets], Attrs::new().with("groups", groups))[0]
    };
    let inner = product(&mut append, x, a);
    let inner = append.emit(id::SCALE, &[inner], Attrs::new().with("factor", of.scale))[0];
    let turned = Attrs::new().with("columns", groups).with("shape", vec![groups * all, of.rank]);
    let turned = append.emit(id::TRANSPOSE, &[b], turned)[0];
    let whole = product(&mut append, inner, turned);
    let parts = match parts {
        1 => vec![whole],
        count => append.emit(id::SPLIT, &[whole], Attrs::new().with("sizes", vec![outputs; count])),
    };
    (append.nodes, parts)
}

/// Adds an adapter matrix to the parameter table. A starts Kaiming-uniform, B at zero: the adapted
/// model starts as the base model.
pub(super) fn matrix(
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
