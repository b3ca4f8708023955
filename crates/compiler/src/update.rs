//! The update entry: gradient norm, clipping, optimizer. One launch for each run of the flat
//! arenas, or for each slice of one; nothing here knows a parameter's name. What matrices need besides stands in
//! `update/matrices.rs`, what ranks do together in `update/exchange.rs`, sums over nodes in `update/nodes.rs`.

mod exchange;
mod matrices;
mod nodes;
mod slices;
mod steps;

use nodes::Summed;
use ops::id;
use program::{COMPRESSED, Entry, EntryKind, Step, StreamId, TensorRef, scalar};
use slices::{Slices, Work};
use steps::{provenance, push_behind};
use tensor::{Attrs, DType};

use crate::lowering::Lowering;
use crate::memory::{Histories, ParameterPlan, Run, SUM_SQUARES, Squares, arena, scalar_ref};
use crate::options::{LOSS_SCALE_INTERVAL, OptimizerOptions};
use crate::residency::{Homes, Streams, Transfers};
use crate::rule::Rule;

/// The names of the updates of a program.
pub(crate) fn names(parameters: &ParameterPlan) -> &'static [&'static str] {
    if parameters.sharding.compresses_momentum() { &["", COMPRESSED] } else { &[""] }
}

pub(crate) fn entry(
    name: &'static str,
    parameters: &ParameterPlan,
    optimizer: &OptimizerOptions,
    scales_loss: bool,
    seed: u64,
    homes: &Homes,
    lowering: &mut Lowering<'_>,
) -> Entry {
    let sharded = parameters.sharding.ranks > 1;
    let slices = Slices::new(&parameters.runs, &parameters.sharding, homes);
    let taken = slices.bytes;
    lowering.update_workspace(taken);
    let mut streams = Streams::default();
    let mut transfers = Transfers::new(&slices.live_ranges, EntryKind::Update);
    let from = provenance("update");
    transfers.before(0, &from, &mut streams);
    // Compressed first moments are summed when the norm is known: it says how much of them gradients are.
    let momentum = name == COMPRESSED;
    let summed = if momentum { Summed::Momentum { beta1: optimizer.beta1 } } else { Summed::Gradients };
    if momentum {
        nodes::own_squares(&mut streams.steps, lowering, taken, parameters);
    } else if parameters.sharding.inter_node_group().size > 1 {
        assert!(homes.on_device(arena::GRADIENTS), "sums of nodes are added up on the device");
        nodes::sum(&mut streams, lowering, taken, parameters, summed);
    }
    let gathered = sharded.then(|| exchange::agree(&mut streams, lowering, taken, parameters, homes));
    norm(&mut streams, lowering, taken, parameters, optimizer, scales_loss, homes, gathered, momentum);
    if momentum {
        nodes::sum(&mut streams, lowering, taken, parameters, summed);
    }
    if scales_loss {
        next_loss_scale(&mut streams.steps, lowering, taken);
    }
    let mut orthogonal = matrices::Orthogonal::new(&slices.batches, taken, optimizer, seed, sharded);
    let mut weights = None;
    for (position, slice) in (1..).zip(&slices.all) {
        transfers.before(position, &from, &mut streams);
        let steps = &mut streams.steps;
        match &slice.work {
            Work::Elements { run, start } => {
                update_run(steps, lowering, taken, run, *start, optimizer, seed, slice.number, momentum);
                if let Some(master) = &run.master {
                    round(steps, lowering, taken, master, &run.weight);
                }
            }
            Work::Matrices(run) => {
                matrices::update(steps, lowering, run, taken, optimizer, seed, slice.number);
                if let Some(master) = &run.master {
                    round(steps, lowering, taken, master, &run.weight);
                }
            }
            Work::Momentum { batch, index, gradient, first } => {
                orthogonal.momentum(steps, lowering, (*batch, *index), gradient, first);
            }
            Work::Step { batch, from, matrices, pace, rounded } => {
                orthogonal.step(steps, lowering, (*batch, *from), matrices, *pace, slice.number);
                if let Some(weight) = rounded {
                    let flat = matrices.weight.reshape(&[weight.len()]).expect("a matrix that moves lies densely");
                    let taken = orthogonal.end(*batch);
                    round(steps, lowering, taken, &flat, weight);
                }
            }
            Work::Rounding { master, weight } => round(steps, lowering, taken, master, weight),
        }
        for (number, _) in transfers.due(position) {
            transfers.store(number, &from, &mut streams);
        }
        if let Some(updated) = &slice.updated {
            weights = Some(exchange::gather_weights(updated, &mut streams));
        }
    }
    nodes::clear(&mut streams.steps, parameters, summed);
    if let Some(gathered) = weights {
        streams.wait(StreamId::Compute, gathered, &from);
    }
    transfers.end(slices.all.len() + 1, &from, &mut streams);
    Entry {
        kind: EntryKind::Update,
        name: name.to_owned(),
        variant: None,
        steps: streams.steps,
        inputs: Vec::new(),
        outputs: Vec::new(),
        stage: Default::default(),
    }
}

/// The norm of all gradients and what follows from it. Squares of gradients on the host were summed before these were
/// stored, those of several ranks when they were summed: `gathered` are the sums of their blocks. `of_nodes`: each node
/// has gradients of its own; then the norm is the root of the mean square of theirs, each times the number of nodes: a
/// bound of the norm of the sum.
#[expect(clippy::too_many_arguments, reason = "what a norm consists of")]
fn norm(
    streams: &mut Streams,
    lowering: &mut Lowering<'_>,
    taken: usize,
    parameters: &ParameterPlan,
    optimizer: &OptimizerOptions,
    scales_loss: bool,
    homes: &Homes,
    gathered: Option<TensorRef>,
    of_nodes: bool,
) {
    let sums = gathered.unwrap_or_else(|| {
        let bytes = parameters.gradients_bytes;
        let Squares { blocks, sums } = parameters.squares(0..bytes);
        if homes.on_device(arena::GRADIENTS) {
            let all = TensorRef::dense(arena::GRADIENTS, 0, DType::F32, [bytes / DType::F32.size()]);
            let inputs = vec![all, lowering.constant(&blocks)];
            let steps = &mut streams.steps;
            push_behind(steps, lowering, taken, id::BLOCK_SQUARES, Attrs::new(), inputs, vec![sums.clone()]);
        }
        sums
    });
    let total = scalar_ref(SUM_SQUARES);
    let steps = &mut streams.steps;
    push_behind(steps, lowering, taken, id::TOTAL_SQUARES, Attrs::new(), vec![sums], vec![total.clone()]);
    let mut attrs = Attrs::new().with("max_norm", optimizer.max_grad_norm);
    if of_nodes {
        nodes::total(streams, lowering, taken, parameters, &total);
        attrs = attrs.with("parts", parameters.sharding.inter_node_group().size as u64);
    }
    if parameters.sharding.stages > 1 {
        exchange::agree_stages(streams, lowering, taken, parameters);
    }
    let steps = &mut streams.steps;
    if let Some(Histories { scaling, amax, limits, tops }) = &parameters.states.histories {
        // Before the norm is used: magnitudes that are not finite suppress the update.
        let attrs = Attrs::new().with("quantisers", scaling.quantisers.len()).with("window", scaling.window);
        let inputs = vec![lowering.constant(limits), lowering.constant(tops)];
        let outputs = [amax, &scaling.history, &scaling.factors, &scaling.steps].map(Clone::clone);
        let outputs = outputs.into_iter().chain([scalar_ref(scalar::FP8_CLIPPED), total.clone()]).collect();
        push_behind(steps, lowering, taken, id::AMAX_HISTORY, attrs, inputs, outputs);
    }
    let divisors = [scalar::WEIGHT_SUM].into_iter().chain(scales_loss.then_some(scalar::LOSS_SCALE));
    push_behind(
        steps,
        lowering,
        taken,
        id::GRADIENT_SCALE,
        attrs,
        std::iter::once(total).chain(divisors.map(scalar_ref)).collect(),
        [scalar::GRADIENT_NORM, scalar::GRADIENT_SCALE, scalar::UPDATE_APPLIED].map(scalar_ref).to_vec(),
    );
}

/// Queues the update of the loss scale, which the next step multiplies its loss by.
fn next_loss_scale(steps: &mut Vec<Step>, lowering: &mut Lowering<'_>, taken: usize) {
    let attrs = Attrs::new().with("growth_interval", LOSS_SCALE_INTERVAL);
    let outputs = [scalar::LOSS_SCALE, scalar::LOSS_SCALE_COUNT, scalar::LOSS_SCALE_USED].map(scalar_ref).to_vec();
    push_behind(steps, lowering, taken, id::NEXT_LOSS_SCALE, attrs, vec![scalar_ref(scalar::UPDATE_APPLIED)], outputs);
}

/// Queues the rounding of weights from their f32 copies.
fn round(steps: &mut Vec<Step>, lowering: &mut Lowering<'_>, taken: usize, master: &TensorRef, weight: &TensorRef) {
    let attrs = Attrs::new().with("dtype", weight.dtype.name());
    push_behind(steps, lowering, taken, id::CAST, attrs, vec![master.clone()], vec![weight.clone()]);
}

#[expect(clippy::too_many_arguments, reason = "what an update of elements consists of")]
fn update_run(
    steps: &mut Vec<Step>,
    lowering: &mut Lowering<'_>,
    taken: usize,
    run: &Run,
    start: Option<usize>,
    optimizer: &OptimizerOptions,
    seed: u64,
    stream: usize,
    frozen: bool,
) {
    let updated = run.master.as_ref().unwrap_or(&run.weight);
    let mut attrs = run.rule.attributes(optimizer);
    if frozen {
        assert_eq!(run.rule, Rule::AdamW, "1-bit Adam keeps the second moments of AdamW");
        attrs = attrs.with("frozen", true);
    }
    if run.rule.descends() {
        attrs = (run.pace.on(attrs, optimizer))
            .with("stochastic_rounding", updated.dtype == DType::BF16)
            .with("seed", seed)
            .with("stream", stream as u64);
        attrs = match (run.start, start) {
            (None, None) => attrs,
            (None, Some(start)) => attrs.with("start", start as u64),
            (Some(of), start) => {
                let first = of.first + start.unwrap_or(0);
                attrs.with("start", first as u64).with("start_per_rank", of.per_rank as u64)
            }
        };
    }
    let scalars = run.rule.scalars().iter().map(|name| scalar_ref(name));
    let tables = run.rule.tables();
    let tables = tables.iter().map(|table| lowering.constant(table));
    let inputs = std::iter::once(run.gradient.clone()).chain(scalars).chain(tables).collect();
    let states = run.states.iter().map(|state| state.at.clone());
    let outputs = std::iter::once(updated.clone()).chain(states).collect();
    push_behind(steps, lowering, taken, run.rule.operation(), attrs, inputs, outputs);
}
