//! The flat parameter arenas: weights, adapters, gradients, optimizer states.
//!
//! What is trained lies sorted by how the optimizer treats it, so that one launch covers a whole run; members of a
//! merge group are contiguous. Gradients are laid out like the weights.

use std::collections::HashMap;
use std::ops::Range;

use graph::{Graph, Init, Parameter};
use ops::optimizer::{block_count, blocks_of};
use program::{ArenaId, ArenaKind, Initializer, OptimizerState, PackedWeight, ParameterSlot, Shard, TensorRef, scalar};
use tensor::{DType, HostTensor, Shape, Storage};

use super::matrices::{self, Matrices};
use super::shards::{Bucket, GRANULE, Group, Stretch, frozen_group, frozen_unit, group_bytes};
use super::{ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, SCALAR_BYTES, StatePlan, align, arena};
use crate::load_groups::LoadGroups;
use crate::options::{CompileOptions, Sharding};
use crate::rule::{Pace, Per, Rule, State};

/// A stretch of a flat arena that the optimizer treats alike.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Weights, gradients and states of the stretch as flat tensors.
    pub weight: TensorRef,
    pub gradient: TensorRef,
    /// The rule of its update, where there is an optimizer.
    pub rule: Rule,
    /// The optimizer states, in the order of the rule; empty without an optimizer.
    pub states: Vec<OptimizerState>,
    /// The f32 copy that the optimizer updates in the weights' place.
    pub master: Option<TensorRef>,
    pub pace: Pace,
    /// Rows of all its matrices, as they are laid out.
    pub(super) rows: usize,
    /// Units in it since its last bucket.
    pub(super) open: usize,
    /// Elements in it that belong to no parameter, before its last bucket's end.
    pub(super) filled: usize,
    /// The matrices of the run; empty unless its rule is one of matrices.
    pub matrices: Vec<Matrices>,
    /// The buckets that it is cut into over the ranks that share it; empty where there is one rank.
    pub buckets: Vec<Bucket>,
    /// The place in the run, for a piece of a bucket.
    pub start: Option<Start>,
}

/// The first element of the first rank's piece, and the distance to that of the next rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    pub first: usize,
    pub per_rank: usize,
}

/// The places of all parameters, and the sizes of the arenas.
#[derive(Clone, Debug)]
pub(crate) struct ParameterPlan {
    /// The places of the parameters, in the order of the graph's table.
    pub slots: Vec<ParameterSlot>,
    pub runs: Vec<Run>,
    pub weights_bytes: usize,
    pub adapters_bytes: usize,
    pub gradients_bytes: usize,
    /// Bytes of optimizer states on one rank.
    pub optimizer_bytes: usize,
    /// Bytes of f32 copies on one rank.
    pub masters_bytes: usize,
    /// Number of ranks that have a piece each of what is sharded.
    pub shards: usize,
    pub sharding: Sharding,
    /// Frozen weights that are cut over the ranks.
    frozen: Vec<Group>,
    /// Bytes of frozen weights in codes that are not among the weights.
    pub quants_bytes: usize,
    /// The other states that persist from step to step.
    pub states: StatePlan,
    /// Lengths of the reports, 0 for those that there are not.
    reports: [usize; scalar::REPORTS.len()],
    /// First element and number of elements of every gradient in its arena that counts in the norm, in order.
    gradients: Vec<(usize, usize)>,
}

/// Contiguous gradients, as the sum of their squares reads them.
pub(crate) struct Squares {
    /// Their blocks, counted from the first of them.
    pub blocks: HostTensor,
    /// f32 [blocks]: where their sums lie from their computation until the update.
    pub sums: TensorRef,
}

impl ParameterPlan {
    /// Returns the squares of the gradients in a range of bytes of their arena. The range cuts no gradient.
    pub fn squares(&self, bytes: Range<usize>) -> Squares {
        let [start, end] = [bytes.start, bytes.end].map(|at| at / DType::F32.size());
        let number = self.gradients.partition_point(|(first, _)| *first < start);
        let inside = self.gradients[number..].iter().take_while(|(first, _)| *first < end);
        let whole = |(first, elements): &(usize, usize)| {
            assert!(first + elements <= end, "a gradient is written as a whole");
            (first - start, *elements)
        };
        let blocks = blocks_of(inside.map(whole));
        let before: usize = self.gradients[..number].iter().map(|(_, elements)| block_count(*elements)).sum();
        let at = self.counted_bytes() + before * DType::F32.size();
        let sums = TensorRef::dense(arena::SCALARS, at, DType::F32, [blocks.shape[0]]);
        Squares { blocks, sums }
    }

    /// Bytes of an arena whose contents outlive an entry; none of those that entries fill.
    pub fn bytes(&self, of: ArenaKind) -> Option<usize> {
        match of {
            ArenaKind::Weights => Some(self.weights_bytes),
            ArenaKind::Adapters => Some(self.adapters_bytes),
            ArenaKind::Gradients => Some(self.gradients_bytes),
            ArenaKind::Optimizer => Some(self.optimizer_bytes),
            ArenaKind::Masters => Some(self.masters_bytes),
            ArenaKind::Scalars => Some(self.scalar_bytes()),
            ArenaKind::States => Some(self.states.bytes),
            ArenaKind::Quants => Some(self.quants_bytes),
            ArenaKind::Cache => Some(self.states.cache_bytes),
            ArenaKind::Errors => Some(self.errors_bytes()),
            ArenaKind::Batch | ArenaKind::Constants | ArenaKind::Activations | ArenaKind::Waiting => None,
        }
    }

    /// All buckets, with the runs that they are of.
    pub fn buckets(&self) -> impl Iterator<Item = (&Run, &Bucket)> {
        self.runs.iter().flat_map(|run| run.buckets.iter().map(move |bucket| (run, bucket)))
    }

    /// Returns the shards of an arena over the ranks.
    pub fn shards(&self, of: ArenaId) -> Vec<Shard> {
        if of == arena::ERRORS && self.errors_bytes() > 0 {
            return vec![Shard { start: 0, piece: self.errors_bytes(), at: 0 }];
        }
        let mut shards = Vec::new();
        for run in self.runs.iter().filter(|run| !run.buckets.is_empty()) {
            let states = run.rule.states().iter().zip(&run.states).map(|(kind, state)| (&state.at, kind.per));
            let weight = run.shards_weights(&self.sharding).then_some(&run.weight);
            let gradient = self.sharding.gradients.then_some(&run.gradient);
            let whole = run.master.iter().chain(weight).chain(gradient).map(|whole| (whole, Per::Element));
            for (whole, per) in states.chain(whole).filter(|(whole, _)| whole.arena == of) {
                shards.extend(run.buckets.iter().map(|bucket| bucket.shard(whole, per, self.shards)));
            }
        }
        shards.extend(self.frozen.iter().filter(|group| group.arena == of).flat_map(|group| &group.shards));
        shards.sort_by_key(|shard| shard.start);
        shards
    }

    /// The gradients of several ranks, in the groups in which they are exchanged.
    pub fn gradient_groups(&self) -> Vec<Group> {
        self.runs.iter().flat_map(|run| run.groups(&run.gradient, self.shards)).collect()
    }

    /// Weights that are cut over the ranks, in the groups in which they are gathered.
    pub fn weight_groups(&self) -> Vec<Group> {
        let runs = self.runs.iter().filter(|run| run.shards_weights(&self.sharding));
        self.frozen.iter().cloned().chain(runs.flat_map(|run| run.groups(&run.weight, self.shards))).collect()
    }

    /// Returns the reports that there are, which follow the step scalars without gaps.
    pub fn reports(&self) -> Vec<(&'static str, TensorRef)> {
        let mut offset = SCALAR_BYTES;
        let place = |(name, length): (&'static str, usize)| {
            let at = TensorRef::dense(arena::SCALARS, offset, DType::F32, [length]);
            offset += at.bytes();
            (name, at)
        };
        scalar::REPORTS.into_iter().zip(self.reports).filter(|(_, length)| *length > 0).map(place).collect()
    }

    /// Returns the number of values in all reports.
    pub fn reported(&self) -> usize {
        self.reports.iter().sum()
    }

    /// Returns the bytes of the step scalars and of the reports.
    fn counted_bytes(&self) -> usize {
        SCALAR_BYTES + align(self.reported() * DType::F32.size(), ALIGNMENT_BYTES)
    }

    /// Returns, for several ranks, the sums of the squares of all shards, f32 [shards · blocks], and each rank's own
    /// part of them.
    pub fn gathered_squares(&self) -> [TensorRef; 2] {
        let squared = self.buckets().filter(|(run, _)| run.rule.descends());
        let blocks = squared.map(|(_, bucket)| block_count(bucket.piece)).sum::<usize>();
        let all = TensorRef::dense(arena::SCALARS, self.counted_bytes(), DType::F32, [self.shards * blocks]);
        let own = TensorRef { shape: vec![blocks], per_rank: blocks * DType::F32.size(), ..all.clone() };
        [all, own]
    }

    /// Returns `count` numbers of each rank, which follow the gathered squares: f32 [ranks, count].
    pub fn gathered_scalars(&self, count: usize) -> TensorRef {
        let [squares, _] = self.gathered_squares();
        let start = align(squares.offset + squares.bytes(), ALIGNMENT_BYTES);
        TensorRef::dense(arena::SCALARS, start, DType::F32, [self.sharding.ranks, count])
    }

    /// Returns the magnitudes of a step of all ranks, which follow the gathered scalars: f32 [ranks, quantizers]. None
    /// where nothing records any.
    pub fn gathered_magnitudes(&self) -> Option<TensorRef> {
        let histories = self.states.histories.as_ref()?;
        let scalars = self.gathered_scalars(self.counted_bytes() / DType::F32.size());
        let start = align(scalars.offset + scalars.bytes(), ALIGNMENT_BYTES);
        Some(TensorRef::dense(arena::SCALARS, start, DType::F32, [self.sharding.ranks, histories.amax.len()]))
    }

    /// Returns the squares of the gradients of all nodes, which follow the gathered magnitudes: f32 [nodes]. Used where
    /// each node has its own.
    pub fn gathered_totals(&self) -> TensorRef {
        let scalars = self.gathered_scalars(self.counted_bytes() / DType::F32.size());
        let gathered = self.gathered_magnitudes().unwrap_or(scalars);
        let start = align(gathered.offset + gathered.bytes(), ALIGNMENT_BYTES);
        TensorRef::dense(arena::SCALARS, start, DType::F32, [self.sharding.inter_node_group().size])
    }

    /// Bytes of the step scalars and of the sums of squares after them.
    pub fn scalar_bytes(&self) -> usize {
        if self.sharding.ranks > 1 {
            let scalars = self.gathered_scalars(self.counted_bytes() / DType::F32.size());
            let gathered = self.gathered_magnitudes().unwrap_or(scalars);
            let last = if self.sharding.compresses_momentum() { self.gathered_totals() } else { gathered };
            return last.offset + last.bytes();
        }
        if self.sharding.stages > 1 {
            let [_, squares] = self.of_stages();
            return squares.offset + squares.bytes();
        }
        self.own_scalar_bytes()
    }

    fn own_scalar_bytes(&self) -> usize {
        let blocks: usize = self.gradients.iter().map(|(_, elements)| block_count(*elements)).sum();
        self.counted_bytes() + blocks * DType::F32.size()
    }

    /// Returns, for a pipeline, the step scalars of all stages, f32 [stages, n], and the sums of the squares of each,
    /// f32 [stages]. They follow all that a stage has by itself.
    pub fn of_stages(&self) -> [TensorRef; 2] {
        let (stages, start) = (self.sharding.stages, align(self.own_scalar_bytes(), ALIGNMENT_BYTES));
        let numbers = TensorRef::dense(arena::SCALARS, start, DType::F32, [stages, SCALAR_BYTES / DType::F32.size()]);
        let after = align(start + numbers.bytes(), ALIGNMENT_BYTES);
        [numbers, TensorRef::dense(arena::SCALARS, after, DType::F32, [stages])]
    }
}

/// The optimizer's treatment of a parameter: the sort key of the arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Treatment {
    adapter: bool,
    trainable: bool,
    no_decay: bool,
    /// The bits of a factor, which are ordered as positive factors are.
    rate: u64,
    rule: Rule,
}

fn treatment(parameter: &Parameter, options: &CompileOptions) -> Treatment {
    let optimizer = options.training.as_ref().and_then(|t| t.optimizer.as_ref());
    // Without an optimizer all are alike.
    let rule = optimizer.map_or(Rule::AdamW, |optimizer| Rule::of(optimizer.kind, parameter));
    let (no_decay, rate) = (!parameter.is_matrix(), parameter.rate.to_bits());
    Treatment { adapter: parameter.adapter, trainable: parameter.trainable, no_decay, rate, rule }
}

/// True if the optimizer treats two parameters alike.
pub(crate) fn updated_alike(a: &Parameter, b: &Parameter, options: &CompileOptions) -> bool {
    treatment(a, options) == treatment(b, options)
}

/// Units in arena order (merge groups and single parameters, as parameter indices), sorted by the
/// treatment of their first member. Units of matrices with equal shapes are neighbours, so that these lie evenly
/// spaced.
fn arena_units(graph: &Graph, options: &CompileOptions) -> Vec<Vec<usize>> {
    let mut units: Vec<Vec<usize>> = Vec::new();
    let mut unit_of_group = HashMap::new();
    for (index, parameter) in graph.parameters.iter().enumerate() {
        match parameter.merge_group {
            None => units.push(vec![index]),
            Some((group, _)) => {
                let unit = *unit_of_group.entry(group).or_insert_with(|| {
                    units.push(Vec::new());
                    units.len() - 1
                });
                units[unit].push(index);
            }
        }
    }
    for unit in &mut units {
        unit.sort_by_key(|i| graph.parameters[*i].merge_group.map(|(_, position)| position));
    }
    units.sort_by_cached_key(|unit| class_of(unit, graph, options));
    units
}

/// Returns the key that units which are cut together have in common: the treatment, and the shapes for a rule of
/// matrices.
fn class_of(unit: &[usize], graph: &Graph, options: &CompileOptions) -> (Treatment, Vec<Shape>) {
    let treatment = treatment(&graph.parameters[unit[0]], options);
    let shapes = || unit.iter().map(|index| graph.parameters[*index].shape.clone()).collect::<Vec<_>>();
    (treatment, if treatment.rule.takes_matrices() { shapes() } else { Vec::new() })
}

/// Lays out everything that belongs to parameters.
pub(crate) fn plan_parameters(
    graph: &Graph,
    states: StatePlan,
    load_groups: &LoadGroups,
    options: &CompileOptions,
) -> ParameterPlan {
    let sharding = Sharding {
        weights: options.sharding.cuts_weights(),
        gradients: options.sharding.gradients && options.sharding.shards() > 1,
        ..options.sharding
    };
    let mut cursor = Cursor { ranks: sharding.shards(), ..Cursor::default() };
    let mut slots: Vec<Option<ParameterSlot>> = vec![None; graph.parameters.len()];
    let mut rows: Vec<usize> = vec![0; slots.len()];
    let mut runs: Vec<(Treatment, Run)> = Vec::new();
    let units = arena_units(graph, options);
    for (number, unit) in units.iter().enumerate() {
        for index in unit {
            let parameter = &graph.parameters[*index];
            let slot = cursor.slot(parameter, load_groups.of(*index), options);
            if parameter.trainable {
                extend_runs(&mut runs, &slot, treatment(parameter, options));
                let run = &runs.last().expect("the parameter is in the last run").1;
                // Rows of the run before this slot.
                rows[*index] = run.rows - rows_of(&slot);
            }
            slots[*index] = Some(slot);
        }
        let class = |unit: &Vec<usize>| {
            let parameter = &graph.parameters[unit[0]];
            (class_of(unit, graph, options), parameter.storage)
        };
        let is_last = units.get(number + 1).is_none_or(|next| class(next) != class(unit));
        if let Some((of, run)) = runs.last_mut().filter(|_| graph.parameters[unit[0]].trainable && sharding.ranks > 1) {
            run.open += 1;
            cursor.seal(run, of.rule.takes_matrices(), &sharding, is_last);
        } else if sharding.weights {
            let ends = units.get(number + 1).is_none_or(|next| {
                let next = &graph.parameters[next[0]];
                next.trainable || next.adapter
            });
            cursor.seal_frozen(&sharding, ends);
        }
    }
    let slots: Vec<ParameterSlot> = slots.into_iter().map(|s| s.expect("every parameter was placed")).collect();
    let runs = runs.into_iter().map(|(_, run)| cursor.with_states(run, options)).collect();
    let optimizer = options.training.as_ref().and_then(|t| t.optimizer.as_ref());
    let size = DType::F32.size();
    let in_arena = |at: &TensorRef| (at.offset / size, at.len());
    let squared = slots.iter().zip(&graph.parameters).filter(|(_, parameter)| !parameter.buffer);
    let mut gradients: Vec<_> = squared.filter_map(|(slot, _)| slot.gradient.as_ref().map(in_arena)).collect();
    gradients.sort_unstable();
    if optimizer.is_none() {
        gradients.clear();
    }
    let ranks = cursor.ranks;
    let kept = |bytes: usize, sharded: bool| if sharded { bytes / ranks } else { bytes };
    let mut plan = ParameterPlan {
        gradients,
        slots,
        runs,
        weights_bytes: kept(cursor.weights, sharding.weights),
        adapters_bytes: cursor.adapters,
        gradients_bytes: kept(cursor.gradients, sharding.gradients),
        optimizer_bytes: cursor.optimizer / ranks,
        masters_bytes: cursor.masters / ranks,
        shards: ranks,
        sharding,
        frozen: cursor.frozen,
        quants_bytes: cursor.quants,
        states,
        reports: scalar::REPORTS.map(|name| graph.output(name).map_or(0, |id| graph.value(id).shape[0])),
    };
    for index in units.into_iter().flatten() {
        let position = graph.parameters[index].merge_group.map_or(0, |(_, position)| position);
        plan.place_states(index, rows[index], optimizer.is_some().then_some(position));
    }
    plan
}

impl ParameterPlan {
    /// Places the optimizer states of a slot, and adds its matrix to the run where it is updated as one.
    fn place_states(&mut self, index: usize, row: usize, position: Option<u32>) {
        let slot = &mut self.slots[index];
        let Some((number, start)) = run_of(slot, &self.runs) else { return };
        let (run, ranks) = (&mut self.runs[number], self.shards);
        let states = run.rule.states().iter().zip(&run.states);
        slot.states = states.map(|(kind, whole)| state_of(slot, kind.per, whole, start, row)).collect();
        slot.master = run.master.as_ref().map(|whole| part_of(whole, start, &slot.weight.shape));
        let Some(position) = position.filter(|_| run.rule.takes_matrices()) else { return };
        if self.sharding.ranks == 1 {
            matrices::add(&mut run.matrices, slot, position);
            return;
        }
        let (kinds, shards_weights) = (run.rule.states(), run.shards_weights(&self.sharding));
        // The first rank's matrices stand for those of all.
        let of_first = |bucket: &&mut Bucket| (bucket.start..bucket.start + bucket.piece).contains(&start);
        let Some(bucket) = run.buckets.iter_mut().find(of_first) else { return };
        let mut kept = slot.clone();
        for ((state, kind), whole) in kept.states.iter_mut().zip(kinds).zip(&run.states) {
            state.at = bucket.kept_part(&state.at, &whole.at, kind.per, ranks);
        }
        if let (Some(master), Some(whole)) = (&mut kept.master, &run.master) {
            *master = bucket.kept_part(master, whole, Per::Element, ranks);
        }
        if shards_weights {
            kept.weight = bucket.kept_part(&kept.weight, &run.weight, Per::Element, ranks);
        }
        matrices::add(&mut bucket.matrices, &kept, position);
        if run.master.is_none() && !shards_weights {
            let apart = bucket.piece * run.weight.dtype.size();
            bucket.matrices = std::mem::take(&mut bucket.matrices).into_iter().map(|of| of.of_ranks(apart)).collect();
        }
    }
}

/// Ends of the arenas so far, in bytes: of all ranks, where an arena is sharded.
#[derive(Default)]
struct Cursor {
    ranks: usize,
    weights: usize,
    adapters: usize,
    gradients: usize,
    optimizer: usize,
    masters: usize,
    quants: usize,
    /// Ends of the groups of loaded weights, each from the beginning of the activation arena on.
    loaded: HashMap<u32, usize>,
    /// The sealed groups of frozen weights.
    frozen: Vec<Group>,
}

impl Cursor {
    fn slot(&mut self, parameter: &Parameter, load_group: Option<u32>, options: &CompileOptions) -> ParameterSlot {
        let elements = align(parameter.shape.iter().product(), ALIGNMENT_ELEMENTS);
        let is_quant = matches!(parameter.storage, Storage::Packed(_));
        let (arena_id, end) = match load_group {
            Some(group) => (arena::ACTIVATIONS, self.loaded.entry(group).or_default()),
            None if parameter.adapter => (arena::ADAPTERS, &mut self.adapters),
            None if is_quant && options.plan.offload.quants == Some(true) => (arena::QUANTS, &mut self.quants),
            None => (arena::WEIGHTS, &mut self.weights),
        };
        let (weight, packed) = match parameter.storage {
            Storage::Plain(dtype) => (take(end, arena_id, dtype, elements, &parameter.shape), None),
            Storage::Packed(packing) => {
                assert!(!parameter.trainable, "packed weights are frozen");
                let (shape, bytes) = (parameter.shape.clone(), packing.bytes(&parameter.shape));
                let (dtype, made, magnitude_group) = (options.compute, options.quantised, parameter.magnitude_group);
                let packed = PackedWeight { packing, shape, dtype, made, magnitude_group };
                (take(end, arena_id, DType::U8, bytes, &[bytes]), Some(packed))
            }
        };
        let gradient = parameter
            .trainable
            .then(|| take(&mut self.gradients, arena::GRADIENTS, DType::F32, elements, &parameter.shape));
        ParameterSlot {
            name: parameter.name.clone(),
            weight,
            packed,
            load_group,
            init: initializer(parameter.init),
            adapter: parameter.adapter,
            saved: parameter.saved,
            transposed: parameter.transposed,
            trainable: parameter.trainable,
            decay: parameter.is_matrix(),
            gradient,
            states: Vec::new(),
            master: None,
        }
    }

    /// Closes a group of frozen weights if it is large enough, or the last.
    fn seal_frozen(&mut self, sharding: &Sharding, is_last: bool) {
        let start = self.frozen.last().map_or(0, |group| group.bytes.end);
        if self.weights > start && (is_last || self.weights - start >= group_bytes(sharding)) {
            self.weights = align(self.weights, frozen_unit(sharding));
            self.frozen.push(frozen_group(start..self.weights, sharding));
        }
    }

    /// Cuts what lies in a run since its last bucket, and fills it up to whole pieces: if it is a group by its size, or the
    /// last of its kind.
    fn seal(&mut self, run: &mut Run, takes_matrices: bool, sharding: &Sharding, is_last: bool) {
        let last = run.buckets.last();
        let (start, row) =
            last.map_or((0, 0), |of| (of.start + of.elements(self.ranks), of.rows.0 + of.rows.1 * self.ranks));
        let units = if takes_matrices { run.open } else { 0 };
        let mut stretch = Stretch { elements: run.gradient.len() - start, rows: run.rows - row, units };
        if !is_last && !stretch.is_group(sharding) {
            return;
        }
        if !is_last && !takes_matrices {
            // The next group begins where pieces may.
            stretch.elements = align(stretch.elements, self.ranks * GRANULE);
        }
        let group = last.map_or(0, |of| of.group + 1);
        let filled = run.filled;
        let place = |of: Bucket| Bucket { group, counted: of.start - filled, ..of };
        run.buckets.extend(stretch.cut(start, row, sharding).into_iter().map(place));
        let last = run.buckets.last().expect("a run has elements");
        let added = last.start + last.elements(self.ranks) - run.gradient.len();
        if takes_matrices {
            run.rows = last.rows.0 + last.rows.1 * self.ranks;
        }
        run.open = 0;
        run.filled += added;
        for tensor in [&mut run.weight, &mut run.gradient] {
            tensor.shape[0] += added;
        }
        self.gradients += added * DType::F32.size();
        let weights = if run.weight.arena == arena::ADAPTERS { &mut self.adapters } else { &mut self.weights };
        *weights += added * run.weight.dtype.size();
    }

    /// Returns the run with its optimizer states.
    fn with_states(&mut self, mut run: Run, options: &CompileOptions) -> Run {
        let cut: usize = run.buckets.iter().map(|bucket| bucket.elements(self.ranks)).sum();
        assert!(run.buckets.is_empty() || cut == run.gradient.len(), "what is merged is updated alike");
        let Some(optimizer) = options.training.as_ref().and_then(|t| t.optimizer.as_ref()) else { return run };
        run.states = self.states(&run);
        if optimizer.master && run.weight.dtype != DType::F32 {
            let elements = run.weight.len();
            let unit = self.ranks * ALIGNMENT_ELEMENTS;
            let padded = align(elements, unit);
            run.master = Some(take(&mut self.masters, arena::MASTERS, DType::F32, padded, &[elements]));
        }
        run
    }

    fn states(&mut self, run: &Run) -> Vec<OptimizerState> {
        let unit = self.ranks * ALIGNMENT_ELEMENTS;
        let mut laid_out = |kind: &State| {
            let count = match kind.per {
                Per::Element => run.gradient.len(),
                Per::Block => run.gradient.len() / ALIGNMENT_ELEMENTS,
                Per::Row => run.rows,
            };
            let at = take(&mut self.optimizer, arena::OPTIMIZER, kind.dtype, align(count, unit), &[count]);
            OptimizerState { name: kind.name, at }
        };
        run.rule.states().iter().map(&mut laid_out).collect()
    }
}

fn take(end: &mut usize, arena: ArenaId, dtype: DType, elements: usize, shape: &[usize]) -> TensorRef {
    let tensor = TensorRef::dense(arena, *end, dtype, shape);
    *end += align(elements, ALIGNMENT_ELEMENTS) * dtype.size();
    tensor
}

fn initializer(init: Init) -> Initializer {
    match init {
        Init::Normal { std } => Initializer::Normal(std as f32),
        Init::Uniform { bound } => Initializer::Uniform(bound as f32),
        Init::Ones => Initializer::Constant(1.0),
        Init::Zeros => Initializer::Constant(0.0),
        Init::Constant { value } => Initializer::Constant(value as f32),
        Init::Infinity => Initializer::Constant(f32::INFINITY),
        Init::NegativeInfinity => Initializer::Constant(f32::NEG_INFINITY),
        Init::Prepared => Initializer::Prepared,
    }
}

/// Lengthens the last run when the parameter is treated alike and follows it without a gap.
fn extend_runs(runs: &mut Vec<(Treatment, Run)>, slot: &ParameterSlot, treatment: Treatment) {
    let gradient = slot.gradient.as_ref().expect("only what is trained has a run");
    let (elements, rows) = (align(slot.weight.len(), ALIGNMENT_ELEMENTS), rows_of(slot));
    if let Some((last, run)) = runs.last_mut() {
        let follows = run.weight.offset + run.weight.bytes() == slot.weight.offset
            && run.gradient.offset + run.gradient.bytes() == gradient.offset;
        if *last == treatment && follows && run.weight.dtype == slot.weight.dtype {
            for tensor in [&mut run.weight, &mut run.gradient] {
                tensor.shape[0] += elements;
            }
            run.rows += rows;
            return;
        }
    }
    let flat = |t: &TensorRef| TensorRef::dense(t.arena, t.offset, t.dtype, [elements]);
    let (weight, gradient) = (flat(&slot.weight), flat(gradient));
    let (rule, pace) = (treatment.rule, Pace { decay: slot.decay, rate: f64::from_bits(treatment.rate) });
    runs.push((
        treatment,
        Run {
            weight,
            gradient,
            rule,
            states: Vec::new(),
            master: None,
            pace,
            rows,
            open: 0,
            filled: 0,
            matrices: Vec::new(),
            buckets: Vec::new(),
            start: None,
        },
    ));
}

/// Returns the rows of a parameter's matrices, rounded up to the alignment of their layout.
fn rows_of(slot: &ParameterSlot) -> usize {
    let shape = &slot.weight.shape;
    align(shape[..shape.len().saturating_sub(1)].iter().product(), ALIGNMENT_ELEMENTS)
}

/// The run that a parameter lies in, and the number of elements before it.
fn run_of(slot: &ParameterSlot, runs: &[Run]) -> Option<(usize, usize)> {
    let gradient = slot.gradient.as_ref()?;
    let inside = |r: &Run| (r.gradient.offset..r.gradient.offset + r.gradient.bytes()).contains(&gradient.offset);
    let number = runs.iter().position(inside)?;
    Some((number, (gradient.offset - runs[number].gradient.offset) / DType::F32.size()))
}

fn part_of(whole: &TensorRef, start: usize, shape: &[usize]) -> TensorRef {
    TensorRef::dense(whole.arena, whole.offset + start * whole.dtype.size(), whole.dtype, shape)
}

/// The part of a state of its run that belongs to one parameter, which begins at element `start` and with row `row`.
fn state_of(slot: &ParameterSlot, per: Per, whole: &OptimizerState, start: usize, row: usize) -> OptimizerState {
    let shape = &slot.weight.shape;
    let at = match per {
        Per::Element => part_of(&whole.at, start, shape),
        Per::Row => part_of(&whole.at, row, &shape[..shape.len() - 1]),
        Per::Block => {
            let blocks = slot.weight.len().div_ceil(ALIGNMENT_ELEMENTS);
            part_of(&whole.at, start / ALIGNMENT_ELEMENTS, &[blocks])
        }
    };
    OptimizerState { name: whole.name, at }
}
