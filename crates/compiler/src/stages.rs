//! The program of a pipeline: layers are partitioned into stages so that the slowest takes least, each stage is
//! compiled by itself as a model of its layers, and the programs become one. Knows what is expected of layers, not what
//! they compute.
//!
//! A stage before the last keeps of a micro-step only what it received, and recomputes its forward pass before the
//! backward pass: the number of micro-steps in flight is that of the stages from it on.

use graph::{Graph, Layer, Model, Phase};
use program::{Choice, Entry, EntryKind, Machine, Program, STAGE, Variant, check_stages};
use tensor::DType;

use crate::entry::{entry_graph, graph_of, whole_graph};
use crate::error::CompileError;
use crate::options::{CompileOptions, EntryOptions, OffloadOptions};
use crate::pass::Passes;
use crate::passes::stage::{Cut, GRADIENT, RECEIVED, RETURNED, SENT, owners, refused};
use crate::programs::compile_graphs;
use crate::recipes::Recipe;
use crate::time;

/// Compiles every entry that the options ask for, for all stages.
pub(crate) fn compile(
    model: &Model,
    options: &CompileOptions,
    machine: &Machine,
    passes: &mut Passes<'_>,
) -> Result<Program, CompileError> {
    let stages = options.sharding.stages;
    check(model, options)?;
    let trains = options.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep);
    let trains = trains.expect("a pipeline trains");
    let tokens = |variant: &&Variant| (variant.batch * variant.seq_len, variant.batch);
    let largest = *options.variants.iter().max_by_key(tokens).expect("there is a shape");
    // Passes are shown with the graphs of the stages.
    let mut unseen = Passes::limited(options.plan.passes);
    let whole = entry_graph(model, options, machine, trains, largest, &mut unseen)?;
    let first = Costs::of(&whole, largest, machine).deal(stages).ok_or_else(|| {
        let layers = whole.layers().len();
        refused(stages, &format!("{} has {layers} layers, and every GPU needs one", model.architecture))
    })?;
    let table = whole_graph(model, options, machine, trains, largest, &mut unseen)?;
    let owners = owners(&table, &first)?;
    let names: Vec<String> = table.parameters.iter().map(|of| of.name.clone()).collect();

    let mut parts = Vec::new();
    for stage in 0..stages {
        let own = of_stage(options, stage);
        let trained = |of: &&graph::Parameter| of.trainable && owners[&of.name] == stage;
        if table.parameters.iter().find(trained).is_none() {
            return Err(refused(stages, &format!("nothing is trained in the layers of stage {stage}")));
        }
        let mut graphs = Vec::new();
        for variant in &options.variants {
            for (entry, forward_alone) in entries(options, stage) {
                let cut = Cut { stage, first: first.clone(), owners: owners.clone(), forward_alone };
                let mut graph = graph_of(model, &own, machine, entry, *variant, Some(&cut), passes)?;
                let kind = if forward_alone { EntryKind::Forward } else { entry.kind };
                if forward_alone {
                    graph.entry = STAGE.to_owned();
                }
                graphs.push((kind, *variant, graph));
            }
        }
        let mut part = compile_graphs(&model.architecture, &graphs, &own, machine, passes)?;
        part.entries.iter_mut().for_each(cross);
        keep_received(&mut part);
        // Stages never offload, so this is no choice to report.
        part.plan.retain(|of| of.choice != Choice::Offload(false));
        parts.push(part);
    }
    let program = program::join(parts, &names);
    if let Err(why) = check_stages(&program) {
        panic!("stages hand on what the next one expects: {why}");
    }
    Ok(program)
}

/// Returns the entries of a stage: those of the options, and the forward pass of a micro-step where stages follow it.
fn entries(options: &CompileOptions, stage: usize) -> impl Iterator<Item = (&EntryOptions, bool)> {
    let ahead = stage + 1 < options.sharding.stages;
    let own = options.entries.iter().map(|entry| (entry, false));
    let ahead = options.entries.iter().filter(move |entry| ahead && entry.kind == EntryKind::FirstMicroStep);
    own.chain(ahead.map(|entry| (entry, true)))
}

/// Returns the options that one stage is compiled with.
fn of_stage(options: &CompileOptions, stage: usize) -> CompileOptions {
    let mut own = options.clone();
    own.sharding.stage = stage;
    if stage + 1 < options.sharding.stages {
        own.plan.head_chunks = None;
    }
    let no = Some(false);
    let stays =
        OffloadOptions { residual: no, master: no, optimizer: no, gradients: no, quants: no, ..own.plan.offload };
    own.plan.offload = stays;
    own
}

/// Names what crosses instead of listing it with the batch and the results.
fn cross(entry: &mut Entry) {
    let of = &mut entry.stage;
    let take = |from: &mut Vec<(String, program::TensorRef)>, beginning: &str, to: &mut Vec<_>| {
        let (crossing, others) = std::mem::take(from).into_iter().partition(|(name, _)| name.starts_with(beginning));
        *from = others;
        let crossing: Vec<(String, program::TensorRef)> = crossing;
        to.extend(crossing.into_iter().map(|(_, at)| at));
    };
    take(&mut entry.inputs, RECEIVED, &mut of.from_previous);
    take(&mut entry.inputs, GRADIENT, &mut of.from_next);
    take(&mut entry.outputs, SENT, &mut of.to_next);
    take(&mut entry.outputs, RETURNED, &mut of.to_previous);
}

/// Keeps what a stage before the last received for a forward pass where the backward pass reads it.
fn keep_received(part: &mut Program) {
    let ahead: Vec<Entry> = part.entries.iter().filter(|entry| entry.name == STAGE).cloned().collect();
    for entry in part.entries.iter_mut().filter(|entry| entry.kind.trains()) {
        let Some(ahead) = ahead.iter().find(|ahead| ahead.variant == entry.variant) else { continue };
        let same = ahead.stage.from_previous == entry.stage.from_previous;
        assert!(same && ahead.inputs.iter().all(|of| entry.inputs.contains(of)), "both passes read at the same places");
        entry.stage.from_previous.clear();
    }
}

/// Refuses options that are not available with stages.
fn check(model: &Model, options: &CompileOptions) -> Result<(), CompileError> {
    let of = &options.sharding;
    let offload = &options.plan.offload;
    let moved = [offload.residual, offload.master, offload.optimizer, offload.gradients, offload.quants];
    let kinds = [EntryKind::FirstMicroStep, EntryKind::Evaluate];
    let problems = [
        (of.ranks > 1 || of.nodes > 1 || of.sequence > 1, "stages with several GPUs each are not available yet"),
        (of.gradients || of.weights, "`zero_level` 2 and 3 are not available with it"),
        (options.recipe != Recipe::default(), "it needs `recipe: bf16`"),
        (options.compute == DType::F16, "float16, whose loss scale changes, is not available with it"),
        (options.quantised.is_some() || !options.stored.is_empty(), "quantised weights are not available with it yet"),
        (options.adapter.as_ref().is_some_and(|of| of.magnitudes), "`lora_dora` is not available with it yet"),
        (moved.contains(&Some(true)), "offloading is not available with it yet"),
        (
            options.entries.iter().any(|entry| !kinds.contains(&entry.kind) || entry.cache.is_some()),
            "generating text is not available with it yet",
        ),
    ];
    if let Some((_, why)) = problems.into_iter().find(|(found, _)| *found) {
        return Err(refused(of.stages, why));
    }
    match crate::tied(model) {
        Some(table) => Err(refused(
            of.stages,
            &format!(
                "the embeddings of {} are its output head, too: `{table}` would be on two GPUs",
                model.architecture
            ),
        )),
        None => Ok(()),
    }
}

/// Seconds of each layer, and of the nodes before and after all of them: forward and backward.
struct Costs {
    layers: Vec<[f64; 2]>,
    front: [f64; 2],
    end: [f64; 2],
}

impl Costs {
    fn of(graph: &Graph, variant: Variant, machine: &Machine) -> Costs {
        let layers: Vec<Layer> = graph.layers();
        let mut costs = Costs { layers: vec![[0.0; 2]; layers.len()], front: [0.0; 2], end: [0.0; 2] };
        let mut seen = [false; 2];
        for node in &graph.nodes {
            let pass = usize::from(node.phase != Phase::Forward);
            let seconds = time::node_seconds(graph, node, variant.documents, machine);
            let place = match node.layer {
                Some(layer) => {
                    seen[pass] = true;
                    &mut costs.layers[layers.binary_search(&layer).expect("it is one of them")]
                }
                // The backward pass begins after the layers.
                None if seen[pass] == (pass == 1) => &mut costs.front,
                None => &mut costs.end,
            };
            place[pass] += seconds;
        }
        costs
    }

    /// Returns the first layer of each of `stages` stages, so that the slowest takes least; none where there are fewer
    /// layers.
    fn deal(&self, stages: usize) -> Option<Vec<usize>> {
        let layers = self.layers.len();
        if stages > layers {
            return None;
        }
        // For the stages up to one: the seconds of the slowest when they have the layers up to `end`, and the first
        // layer of the last of them.
        let mut best: Vec<(f64, usize)> = (0..=layers).map(|end| (self.seconds(0, end, stages == 1), 0)).collect();
        let mut begins = vec![best.iter().map(|(_, begin)| *begin).collect::<Vec<_>>()];
        for stage in 1..stages {
            let slowest = |end: usize| {
                let of = |begin: usize| (best[begin].0.max(self.seconds(begin, end, stage + 1 == stages)), begin);
                (stage..end).map(of).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, 0))
            };
            best = (0..=layers).map(slowest).collect();
            begins.push(best.iter().map(|(_, begin)| *begin).collect());
        }
        let mut end = layers;
        let mut first: Vec<usize> = begins
            .iter()
            .rev()
            .map(|begins| {
                end = begins[end];
                end
            })
            .collect();
        first.reverse();
        Some(first)
    }

    /// Returns the seconds of the layers from `begin` up to `end`. A stage before the last does its forward pass twice.
    fn seconds(&self, begin: usize, end: usize, last: bool) -> f64 {
        let mut all = self.layers[begin..end].to_vec();
        all.extend((begin == 0).then_some(self.front));
        all.extend(last.then_some(self.end));
        let times = if last { 1.0 } else { 2.0 };
        all.iter().map(|[forward, backward]| times * forward + backward).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(layers: usize, end: f64) -> Costs {
        Costs { layers: vec![[1.0, 2.0]; layers], front: [0.1, 0.2], end: [end, 2.0 * end] }
    }

    #[test]
    fn the_slowest_stage_takes_least() {
        assert_eq!(costs(8, 0.0).deal(2), Some(vec![0, 3]), "the last one does nothing twice");
        assert_eq!(costs(8, 2.0).deal(2), Some(vec![0, 4]));
        assert_eq!(costs(4, 100.0).deal(3), Some(vec![0, 1, 3]));
        assert_eq!(costs(4, 0.0).deal(4), Some(vec![0, 1, 2, 3]));
        assert_eq!(costs(4, 0.0).deal(5), None);
    }

    #[test]
    fn every_division_is_at_least_as_slow() {
        let costs = Costs {
            layers: (0..9).map(|layer| [1.0 + (layer * 7 % 5) as f64, 2.0]).collect(),
            front: [3.0, 1.0],
            end: [2.0, 4.0],
        };
        let slowest = |first: &[usize]| {
            let ends = first[1..].iter().copied().chain([9]);
            let of = first.iter().zip(ends).enumerate();
            of.map(|(stage, (begin, end))| costs.seconds(*begin, end, stage == 2)).fold(0.0, f64::max)
        };
        let least = (1..8).flat_map(|a| (a + 1..9).map(move |b| [0, a, b]));
        let least = least.map(|first| slowest(&first)).fold(f64::INFINITY, f64::min);
        assert_eq!(slowest(&costs.deal(3).unwrap()), least);
    }
}
