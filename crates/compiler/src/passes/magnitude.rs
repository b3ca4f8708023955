//! DoRA (Liu et al. 2024), as PEFT computes it: what an adapted linear gives is scaled, column by column, to a magnitude that
//! is trained. The norms under it are states: they are made when weights were written, so once a step, and no gradient goes
//! through them.
//!
//! With dropout, PEFT scales the product of what was not dropped and leaves the rest: y = W·(x − d) + b + c·(W·d + s·B·A·d).

use graph::{Element, Graph, Init, Node, Phase, ValueId};
use ops::{Append, Emit, id};
use tensor::{Attrs, DType};

use crate::recipes::Recipe;
use crate::{CompileError, CompileOptions, EntryOptions};

/// A linear with its adapter.
pub(super) struct Adapted<'a> {
    pub module: &'a str,
    /// The linear without its adapter.
    pub plain: Node,
    /// The value that the adapter reads: the input, or the input with elements dropped.
    pub source: ValueId,
    pub matrices: [ValueId; 2],
    pub scale: f64,
    pub rank: usize,
}

/// Refuses recipes that multiply codes: the norms are those of the weights before quantization.
pub(super) fn check(options: &CompileOptions) -> Result<(), CompileError> {
    match options.recipe {
        Recipe::Uniform => Ok(()),
        Recipe::Fp8Hybrid(_) | Recipe::Nvfp4(_) | Recipe::QuantizeAware(_) => {
            let text = "adapters with magnitudes (`lora_dora: true`) are not available yet with a recipe that multiplies codes";
            Err(CompileError::option("lora_dora", text, "set `recipe: bf16`"))
        }
    }
}

/// The nodes in the place of an adapted linear. All entries get the parameter and its norms; one that wants the base model
/// gets the linear as it is.
pub(super) fn scaled(
    graph: &mut Graph,
    mut adapted: Node,
    of: Adapted<'_>,
    options: &CompileOptions,
    entry: &EntryOptions,
) -> Result<Vec<Node>, CompileError> {
    if of.rank > ops::MOST_RANK_WITH_NORMS {
        let (module, most) = (of.module, ops::MOST_RANK_WITH_NORMS);
        let text = format!("`{module}` has an adapter of rank {}, at most {most} with `lora_dora: true`", of.rank);
        return Err(CompileError::option("lora_dora", text, "lower `lora_rank`, or remove `lora_dora`"));
    }
    let norms = norms(graph, &of);
    let magnitude = magnitude(graph, &of, norms, options);
    if !entry.adapter {
        return Ok(vec![adapted]);
    }
    let result = adapted.outputs[0];
    let fresh = graph.add(graph.value(result).clone());
    let bias = of.plain.attrs.flag("bias").unwrap_or(false);
    let x = of.plain.inputs[0];
    let mut append = Append::new(graph, of.plain.phase);
    append.place_like(&of.plain);
    adapted.outputs[0] = fresh;
    if of.source == x {
        let mut inputs = vec![fresh, magnitude, norms];
        inputs.extend(bias.then(|| of.plain.inputs[2]));
        append.emit(id::MAGNITUDE, &inputs, Attrs::new().with("bias", bias));
        return Ok(ending_in(vec![adapted], append, result));
    }
    adapted.inputs[0] = of.source;
    if bias {
        adapted.inputs.remove(2);
        adapted.attrs.remove("bias");
    }
    let dropped = append.emit(id::SCALE, &[of.source], Attrs::new().with("factor", -1.0))[0];
    let rest = append.emit(id::ADD, &[x, dropped], Attrs::new())[0];
    let inputs: Vec<ValueId> = std::iter::once(rest).chain(of.plain.inputs[1..].iter().copied()).collect();
    let base = append.emit(id::LINEAR, &inputs, of.plain.attrs.clone())[0];
    let mut nodes = std::mem::take(&mut append.nodes);
    nodes.push(adapted);
    let scaled = append.emit(id::MAGNITUDE, &[fresh, magnitude, norms], Attrs::new())[0];
    append.emit(id::ADD, &[base, scaled], Attrs::new());
    Ok(ending_in(nodes, append, result))
}

/// Returns nodes followed by those that were appended, the last of which gives `result`.
fn ending_in(mut nodes: Vec<Node>, append: Append<'_>, result: ValueId) -> Vec<Node> {
    nodes.extend(append.nodes);
    nodes.last_mut().expect("something was appended").outputs[0] = result;
    nodes
}

fn name(of: &Adapted<'_>) -> String {
    format!("base_model.model.{}.lora_magnitude_vector", of.module)
}

/// The norms of the adapted weight, a state.
fn norms(graph: &mut Graph, of: &Adapted<'_>) -> ValueId {
    let [a, b] = of.matrices;
    let attrs = Attrs::new().with("scale", of.scale);
    let attrs = match of.plain.attrs.flag("transposed").unwrap_or(false) {
        true => attrs.with("transposed", true),
        false => attrs,
    };
    let mut append = Append::new(graph, Phase::Forward);
    append.place_like(&of.plain);
    let norms = append.emit(id::ADAPTED_NORMS, &[of.plain.inputs[1], a, b], attrs)[0];
    let nodes = append.nodes;
    graph.prepared.extend(nodes);
    graph.keep(norms, &name(of));
    norms
}

/// The magnitudes: f32 whatever the adapters are, so that at the beginning they are the norms.
fn magnitude(graph: &mut Graph, of: &Adapted<'_>, norms: ValueId, options: &CompileOptions) -> ValueId {
    let shape = graph.value(norms).shape.clone();
    let id = graph.add_parameter(&name(of), shape, Init::Prepared, DType::F32);
    let parameter = &mut graph.parameters[id.0 as usize];
    (parameter.adapter, parameter.trainable) = (true, options.training.is_some());
    let value = parameter.value;
    graph.value_mut(value).element = Element::F32;
    value
}
