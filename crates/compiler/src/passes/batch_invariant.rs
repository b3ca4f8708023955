//! Asks products and attention of the forward pass for results of a token that follow from its own sequence alone, whatever
//! is computed with it. On a CPU all have them.

use graph::{Element, Graph, Node, Phase, ValueId};
use ops::{BATCH_INVARIANT, id};
use program::{Arch, Machine};
use tensor::DType;

use crate::{CompileError, CompileOptions};

/// Widest heads of the attention.
const MAX_HEAD_DIM: usize = 256;
/// Numbers of a row that are copied at once: rows of products have a multiple of them.
const STEP: usize = 8;

/// Ranks that the products of adapters may have.
const RANKS: [usize; 8] = [8, 16, 24, 32, 40, 48, 56, 64];
/// Columns of a transposed weight that are copied at once.
const BOX: usize = 64;

const HINT: &str = "remove `exact_sampling: true`: `sampling/sampling_logp_difference` shows the distance";

pub fn run(graph: &mut Graph, options: &CompileOptions, machine: &Machine) -> Result<(), CompileError> {
    if !options.batch_invariant || machine.arch == Arch::Cpu {
        return Ok(());
    }
    if let Some(rank) = options.adapter.as_ref().map(|of| of.rank).filter(|rank| !RANKS.contains(rank)) {
        let message = format!("`exact_sampling: true` takes adapters of rank {RANKS:?} on this machine, not {rank}");
        return Err(CompileError::option("lora_rank", message, "set `lora_rank` to one of these"));
    }
    let of_forward = |node: &Node| node.phase == Phase::Forward;
    let nodes = || graph.nodes.iter().filter(|node| of_forward(node));
    if let Some(why) = nodes().find_map(state).or_else(|| nodes().find_map(|node| obstacle(graph, node))) {
        let message = format!("{}: sampling cannot be exact on this machine: {why}", graph.name);
        return Err(CompileError::option("exact_sampling", message, HINT));
    }
    let asked = [id::LINEAR, id::ATTENTION, id::CACHED_ATTENTION];
    for node in graph.nodes.iter_mut().filter(|node| of_forward(node) && asked.contains(&node.op)) {
        node.attrs = std::mem::take(&mut node.attrs).with(BATCH_INVARIANT, true);
    }
    Ok(())
}

/// The reason why a node's sums depend on more than the token's sequence, whatever its operands are.
fn state(node: &Node) -> Option<String> {
    let mixes = ops::get(node.op).mixes_tokens() && ![id::ATTENTION, id::CACHED_ATTENTION].contains(&node.op);
    mixes.then(|| format!("`{}` carries a state from token to token", node.op.name()))
}

/// The reason why a node has no kernel whose sums follow from the token's sequence alone; none where it has one, or needs none.
fn obstacle(graph: &Graph, node: &Node) -> Option<String> {
    match node.op {
        op if op == id::LINEAR => of_product(graph, node),
        op if op == id::ATTENTION => of_attention(graph, node, node.inputs.get(4)),
        op if op == id::CACHED_ATTENTION => of_attention(graph, node, node.inputs.get(5)),
        op if [id::GROUPED_CODES, id::MATMUL_CODES].contains(&op) => Some("its products are of codes".to_owned()),
        _ => None,
    }
}

fn of_product(graph: &Graph, node: &Node) -> Option<String> {
    let columns = |id: &ValueId| graph.value(*id).shape.last().copied().unwrap_or_default();
    let (n, has_adapters) = (columns(&node.outputs[0]), node.attrs.get("columns").is_some());
    if node.attrs.flag("transposed") == Ok(true) && (has_adapters || !n.is_multiple_of(BOX)) {
        return Some(format!("weights that lie transposed have no adapters, and a multiple of {BOX} columns"));
    }
    let operands = || node.inputs.iter().chain(&node.outputs);
    let is_bf16 = |id: &ValueId| matches!(graph.value(*id).element, Element::Float | Element::Fixed(DType::BF16));
    if !operands().all(is_bf16) {
        return Some("its products are not all of bfloat16".to_owned());
    }
    // Few columns have a kernel of their own, which writes any number.
    let is_thin = n <= BOX && !has_adapters;
    let matrices = node.inputs.iter().filter(|id| graph.value(**id).shape.len() > 1);
    let odd = matrices.map(columns).chain((!is_thin).then_some(n)).find(|columns| !columns.is_multiple_of(STEP));
    odd.map(|columns| format!("an operand of a product has {columns} columns, expected a multiple of {STEP}"))
}

/// `limit`: the input that says what is seen, or the sink.
fn of_attention(graph: &Graph, node: &Node, limit: Option<&ValueId>) -> Option<String> {
    let limited = limit.is_some_and(|id| graph.value(*id).shape.len() == 2) && node.attrs.flag("branches") != Ok(true);
    if limited || node.attrs.flag("bidirectional") == Ok(true) {
        return Some("its attention sees later tokens".to_owned());
    }
    let columns = node.inputs[..3].iter().filter_map(|id| graph.value(*id).shape.last());
    let odd = columns.copied().find(|columns| !columns.is_multiple_of(STEP) || *columns > MAX_HEAD_DIM);
    odd.map(|columns| format!("its heads have {columns} columns, expected a multiple of {STEP} up to {MAX_HEAD_DIM}"))
}
