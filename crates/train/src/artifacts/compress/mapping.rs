//! Values of a layer whose channels can be scaled without changing what the layer computes: columns of the matrices that
//! read them take the factors, and what makes the values is divided by them. Found in the layer's graph.
//!
//! Knows operations by their names; not how factors are chosen.

use std::collections::BTreeMap;

use graph::{Block, Dim, NodeSpec, ValueType};

use super::reads::{GROUPED, LINEAR, maker, matrices_of, readers};

/// A value whose channels can be scaled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub value: String,
    /// Matrices that read it and become codes, parameters with `{i}`.
    pub balanced: Vec<String>,
    /// Matrices that read it and stay, such as routers.
    pub others: Vec<String>,
    pub made: Made,
    /// The result of the smallest module that holds the balanced matrices.
    pub output: String,
}

/// The weights that are divided by the factors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Made {
    /// The weight of a norm; y = x · (1 + weight) with `offset`.
    Norm { weight: String, bias: Option<String>, offset: bool },
    /// Rows of a matrix from `first` on, and of its bias.
    Rows { weight: String, bias: Option<String>, first: usize },
}

impl Mapping {
    pub const fn is_of_norm(&self) -> bool {
        matches!(self.made, Made::Norm { .. })
    }

    /// The weights that are divided.
    pub fn weights(&self) -> impl Iterator<Item = &String> {
        let (Made::Norm { weight, bias, .. } | Made::Rows { weight, bias, .. }) = &self.made;
        std::iter::once(weight).chain(bias)
    }
}

/// The mappings of a layer, in the order of its graph. `is_coded`: whether a parameter becomes codes.
pub fn mappings(block: &Block, types: &BTreeMap<String, ValueType>, is_coded: &dyn Fn(&str) -> bool) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for node in block.nodes.iter().filter(|node| node.op == LINEAR || node.op == GROUPED) {
        let value = match grouped_from(block, node) {
            Some(tokens) => tokens,
            None if node.op == LINEAR => node.inputs[0].clone(),
            None => continue,
        };
        if found.iter().any(|of| of.value == value) {
            continue;
        }
        found.extend(mapping(block, types, is_coded, value));
    }
    found
}

fn mapping(
    block: &Block,
    types: &BTreeMap<String, ValueType>,
    is_coded: &dyn Fn(&str) -> bool,
    value: String,
) -> Option<Mapping> {
    let matrices = all_matrices(block, &value)?;
    let is_transposed = |name: &String| block.parameters.iter().any(|of| of.name == *name && of.transposed);
    let (balanced, others): (Vec<String>, Vec<String>) = matrices.into_iter().partition(|name| is_coded(name));
    if balanced.is_empty() || others.iter().any(is_transposed) {
        return None;
    }
    let width = types.get(&value)?.last()?;
    let made = made_by(block, types, &value, width)?;
    let output = output_of(block, types, &balanced)?;
    Some(Mapping { value, balanced, others, made, output })
}

/// All matrices that read a value, directly or as rows of experts; none where something else reads it.
fn all_matrices(block: &Block, value: &str) -> Option<Vec<String>> {
    if block.carry.iter().any(|of| of.next == value) {
        return None;
    }
    let mut all = Vec::new();
    for node in readers(block, value) {
        match node.op.as_str() {
            LINEAR | GROUPED if node.inputs.iter().filter(|name| *name == value).count() == 1 => {
                let matrices = matrices_of(block, node);
                if matrices.is_empty() || node.inputs[0] != value {
                    return None;
                }
                all.extend(matrices);
            }
            "to_groups" if node.inputs.len() == 3 => all.extend(all_matrices(block, &node.outputs[0])?),
            _ => return None,
        }
    }
    let reads_of = |name: &String| readers(block, name).count();
    (!all.is_empty() && all.iter().all(|name| reads_of(name) == 1)).then_some(all)
}

/// The value of tokens whose rows experts read.
fn grouped_from(block: &Block, node: &NodeSpec) -> Option<String> {
    let by = maker(block, node.inputs.first()?).filter(|by| by.op == "to_groups" && by.inputs.len() == 3)?;
    Some(by.inputs[0].clone())
}

fn made_by(block: &Block, types: &BTreeMap<String, ValueType>, value: &str, width: usize) -> Option<Made> {
    let node = maker(block, value)?;
    match node.op.as_str() {
        "rmsnorm" | "layernorm" if node.outputs[0] == value => {
            let weight = own(block, node.inputs.get(1)?)?;
            let bias = match node.inputs.get(2) {
                Some(bias) => Some(own(block, bias)?),
                None => None,
            };
            let offset = node.attrs.flag("offset").ok()?;
            Some(Made::Norm { weight, bias, offset })
        }
        "merge_heads" => {
            let attention = only(block, &node.inputs[0]).filter(|node| node.op == "attention")?;
            let split = only(block, attention.inputs.get(2)?).filter(|node| node.op == "split_heads")?;
            rows(block, types, &split.inputs[0], width)
        }
        "swiglu" if node.attrs.is_empty() => rows(block, types, node.inputs.get(1)?, width),
        "mul" => rows(block, types, &node.inputs[1], width).or_else(|| rows(block, types, &node.inputs[0], width)),
        _ => None,
    }
}

/// The node that makes a value which one node alone reads.
fn only<'b>(block: &'b Block, value: &str) -> Option<&'b NodeSpec> {
    let is_handed_on = block.carry.iter().any(|of| of.next == value);
    if is_handed_on || readers(block, value).count() != 1 {
        return None;
    }
    maker(block, value)
}

/// A parameter of the layer that one node alone reads.
fn own(block: &Block, name: &str) -> Option<String> {
    let is_there = block.parameters.iter().any(|of| of.name == name);
    (is_there && readers(block, name).count() == 1).then(|| name.to_owned())
}

/// The rows of a linear layer that are a value of this width, whole or a part of its result.
fn rows(block: &Block, types: &BTreeMap<String, ValueType>, value: &str, width: usize) -> Option<Made> {
    if types.get(value)?.last()? != width {
        return None;
    }
    let node = only(block, value)?;
    let (linear, first) = match node.op.as_str() {
        "split" => {
            let before = node.outputs.iter().take_while(|name| *name != value);
            let first = before.map(|name| types.get(name).and_then(ValueType::last)).sum::<Option<usize>>()?;
            (only(block, &node.inputs[0])?, first)
        }
        _ => (node, 0),
    };
    if linear.op != LINEAR {
        return None;
    }
    let weight = own(block, linear.inputs.get(1)?)?;
    let bias = match linear.inputs.get(2) {
        Some(bias) => Some(own(block, bias)?),
        None => None,
    };
    Some(Made::Rows { weight, bias, first })
}

/// The result, of tokens, of the smallest module that holds these matrices: names of values begin with their modules'.
fn output_of(block: &Block, types: &BTreeMap<String, ValueType>, matrices: &[String]) -> Option<String> {
    if let [one] = matrices {
        return readers(block, one).next().map(|node| node.outputs[0].clone());
    }
    let path = |name: &String| -> Vec<String> {
        let module = name.replace(".{i}", "");
        module.trim_end_matches(".weight").split('.').map(str::to_owned).collect()
    };
    let mut common = path(&matrices[0]);
    for other in &matrices[1..] {
        let same = common.iter().zip(path(other)).take_while(|(a, b)| **a == *b).count();
        common.truncate(same);
    }
    while !common.is_empty() {
        let module = common.join(".");
        let is_inside =
            |name: &String| name.strip_prefix(&module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let leaves = |name: &String| {
            is_inside(name)
                && (readers(block, name).any(|node| !node.outputs.iter().any(is_inside))
                    || block.carry.iter().any(|of| of.next == *name))
        };
        let is_of_tokens = |name: &String| {
            let axes =
                types.get(name).map_or(0, |of| of.shape.iter().filter(|dim| matches!(dim, Dim::Symbol(_))).count());
            types.get(name).is_some_and(|of| of.shape.len() == 3 && of.dtype.is_float() && axes == 2)
        };
        let made = block.nodes.iter().rev().flat_map(|node| &node.outputs);
        let inside = made.filter(|name| leaves(name));
        if let Some(name) = inside.clone().next().filter(|name| is_of_tokens(name)) {
            return Some(name.clone());
        }
        common.pop();
    }
    None
}
