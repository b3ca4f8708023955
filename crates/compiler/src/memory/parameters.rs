//! The flat parameter arenas: weights, adapters, gradients, optimizer states.
//!
//! What is trained lies sorted by how the optimizer treats it, so that one launch covers a whole
//! run; members of a merge group lie behind one another. Gradients are laid out like the weights.

use std::ops::Range;

use graph::{Graph, Init, Parameter};
use ops::optimizer::{block_count, blocks_of};
use program::{ArenaId, Initializer, OptimizerState, PackedWeight, ParameterSlot, TensorRef};
use tensor::{DType, HostTensor, Storage};

use super::matrices::{self, Matrices};
use super::{ALIGNMENT_ELEMENTS, SCALAR_BYTES, StatePlan, align, arena};
use crate::options::CompileOptions;
use crate::rule::{Per, Rule, State};

/// A stretch of a flat arena that the optimizer treats alike.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Weights, gradients and states of the stretch as flat tensors.
    pub weight: TensorRef,
    pub gradient: TensorRef,
    /// How it is updated, where there is an optimizer.
    pub rule: Rule,
    /// What is kept of it, in the order of the rule; nothing without an optimizer.
    pub states: Vec<OptimizerState>,
    /// The f32 copy that the optimizer updates in the weights' place.
    pub master: Option<TensorRef>,
    pub decay: bool,
    /// Rows of all its matrices, as they are laid out.
    rows: usize,
    /// Of a rule of matrices: what the run consists of.
    pub matrices: Vec<Matrices>,
}

/// Where every parameter lies, and how large the arenas are.
#[derive(Clone, Debug)]
pub(crate) struct ParameterPlan {
    /// In the order of the graph's table.
    pub slots: Vec<ParameterSlot>,
    pub runs: Vec<Run>,
    pub weights_bytes: usize,
    pub adapters_bytes: usize,
    pub gradients_bytes: usize,
    pub optimizer_bytes: usize,
    pub masters_bytes: usize,
    /// What is kept from step to step beside them.
    pub states: StatePlan,
    /// First element and number of elements of every gradient in its arena, in order.
    gradients: Vec<(usize, usize)>,
}

/// Gradients that lie behind one another, as the sum of their squares takes them.
pub(crate) struct Squares {
    /// Their blocks, counted from the first of them.
    pub blocks: HostTensor,
    /// f32 [blocks]: where their sums lie from their computation until the update.
    pub sums: TensorRef,
}

impl ParameterPlan {
    /// Those of the gradients in a range of bytes of their arena, which cuts none.
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
        let at = SCALAR_BYTES + before * DType::F32.size();
        let sums = TensorRef::dense(arena::SCALARS, at, DType::F32, [blocks.shape[0]]);
        Squares { blocks, sums }
    }

    /// The arenas of parameters and states, and their bytes.
    pub fn arenas(&self) -> [(ArenaId, usize); 6] {
        [
            (arena::WEIGHTS, self.weights_bytes),
            (arena::ADAPTERS, self.adapters_bytes),
            (arena::GRADIENTS, self.gradients_bytes),
            (arena::OPTIMIZER, self.optimizer_bytes),
            (arena::MASTERS, self.masters_bytes),
            (arena::STATES, self.states.bytes),
        ]
    }

    /// Bytes of the step scalars and of the sums of squares behind them.
    pub fn scalar_bytes(&self) -> usize {
        let blocks: usize = self.gradients.iter().map(|(_, elements)| block_count(*elements)).sum();
        SCALAR_BYTES + blocks * DType::F32.size()
    }
}

/// How the optimizer treats a parameter: the sort key of the arenas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Treatment {
    adapter: bool,
    trainable: bool,
    no_decay: bool,
    rule: Rule,
}

fn treatment(parameter: &Parameter, options: &CompileOptions) -> Treatment {
    let optimizer = options.training.as_ref().and_then(|t| t.optimizer.as_ref());
    // Without an optimizer all are alike.
    let rule = optimizer.map_or(Rule::AdamW, |optimizer| Rule::of(optimizer.kind, parameter));
    Treatment { adapter: parameter.adapter, trainable: parameter.trainable, no_decay: parameter.shape.len() < 2, rule }
}

/// Parameter indices in arena order: units (merge groups and single parameters) sorted by the
/// treatment of their first member. Units of matrices with equal shapes are neighbours, so that these lie evenly
/// spaced.
fn arena_order(graph: &Graph, options: &CompileOptions) -> Vec<usize> {
    let mut units: Vec<Vec<usize>> = Vec::new();
    let mut unit_of_group = std::collections::HashMap::new();
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
    units.sort_by_key(|unit| {
        let treatment = treatment(&graph.parameters[unit[0]], options);
        let shapes = || unit.iter().map(|index| graph.parameters[*index].shape.clone()).collect::<Vec<_>>();
        (treatment, if treatment.rule.takes_matrices() { shapes() } else { Vec::new() })
    });
    units.into_iter().flatten().collect()
}

/// Lays out everything that belongs to parameters.
pub(crate) fn plan_parameters(graph: &Graph, states: StatePlan, options: &CompileOptions) -> ParameterPlan {
    let mut cursor = Cursor::default();
    let mut slots: Vec<Option<ParameterSlot>> = vec![None; graph.parameters.len()];
    let mut runs: Vec<(Treatment, Run)> = Vec::new();
    let order = arena_order(graph, options);
    for index in &order {
        let parameter = &graph.parameters[*index];
        let slot = cursor.slot(parameter, options);
        if parameter.trainable {
            extend_runs(&mut runs, &slot, treatment(parameter, options));
        }
        slots[*index] = Some(slot);
    }
    let mut slots: Vec<ParameterSlot> = slots.into_iter().map(|s| s.expect("every parameter was placed")).collect();
    let optimizer = options.training.as_ref().and_then(|t| t.optimizer.as_ref());
    let mut runs_with_state = Vec::new();
    for (_, mut run) in runs {
        if let Some(optimizer) = optimizer {
            run.states = cursor.states(&run);
            if optimizer.master && run.weight.dtype != DType::F32 {
                let elements = run.weight.len();
                run.master = Some(take(&mut cursor.masters, arena::MASTERS, DType::F32, elements, &[elements]));
            }
        }
        runs_with_state.push(run);
    }
    // Rows of the run before the slot that is next.
    let mut rows = vec![0; runs_with_state.len()];
    for index in order {
        let slot = &mut slots[index];
        let Some((number, start)) = run_of(slot, &runs_with_state) else { continue };
        let run = &mut runs_with_state[number];
        let states = run.rule.states().iter().zip(&run.states);
        slot.states = states.map(|(kind, whole)| state_of(slot, kind.per, whole, start, rows[number])).collect();
        slot.master = run.master.as_ref().map(|whole| part_of(whole, start, &slot.weight.shape));
        rows[number] += rows_of(slot);
        if optimizer.is_some() && run.rule.takes_matrices() {
            let position = graph.parameters[index].merge_group.map_or(0, |(_, position)| position);
            matrices::add(&mut run.matrices, slot, position);
        }
    }
    let size = DType::F32.size();
    let in_arena = |at: &TensorRef| (at.offset / size, at.len());
    let mut gradients: Vec<_> = slots.iter().filter_map(|slot| slot.gradient.as_ref().map(in_arena)).collect();
    gradients.sort_unstable();
    if optimizer.is_none() {
        gradients.clear();
    }
    ParameterPlan {
        gradients,
        slots,
        runs: runs_with_state,
        weights_bytes: cursor.weights,
        adapters_bytes: cursor.adapters,
        gradients_bytes: cursor.gradients,
        optimizer_bytes: cursor.optimizer,
        masters_bytes: cursor.masters,
        states,
    }
}

/// Ends of the arenas so far, in bytes.
#[derive(Default)]
struct Cursor {
    weights: usize,
    adapters: usize,
    gradients: usize,
    optimizer: usize,
    masters: usize,
}

impl Cursor {
    fn slot(&mut self, parameter: &Parameter, options: &CompileOptions) -> ParameterSlot {
        let elements = align(parameter.shape.iter().product(), ALIGNMENT_ELEMENTS);
        let (arena_id, end) = match parameter.adapter {
            true => (arena::ADAPTERS, &mut self.adapters),
            false => (arena::WEIGHTS, &mut self.weights),
        };
        let (weight, packed) = match parameter.storage {
            Storage::Plain(dtype) => (take(end, arena_id, dtype, elements, &parameter.shape), None),
            Storage::Packed(packing) => {
                assert!(!parameter.trainable, "packed weights are frozen");
                let (shape, bytes) = (parameter.shape.clone(), packing.bytes(&parameter.shape));
                (
                    take(end, arena_id, DType::U8, bytes, &[bytes]),
                    Some(PackedWeight { packing, shape, dtype: options.compute, made: options.quantised }),
                )
            }
        };
        let gradient = parameter
            .trainable
            .then(|| take(&mut self.gradients, arena::GRADIENTS, DType::F32, elements, &parameter.shape));
        ParameterSlot {
            name: parameter.name.clone(),
            weight,
            packed,
            init: initializer(parameter.init),
            adapter: parameter.adapter,
            transposed: parameter.transposed,
            trainable: parameter.trainable,
            decay: parameter.shape.len() >= 2,
            gradient,
            states: Vec::new(),
            master: None,
        }
    }

    fn states(&mut self, run: &Run) -> Vec<OptimizerState> {
        let mut laid_out = |kind: &State| {
            let count = match kind.per {
                Per::Element => run.gradient.len(),
                Per::Block => run.gradient.len() / ALIGNMENT_ELEMENTS,
                Per::Row => run.rows,
            };
            let at = take(&mut self.optimizer, arena::OPTIMIZER, kind.dtype, count, &[count]);
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
    let (rule, decay) = (treatment.rule, slot.decay);
    let run = Run { weight, gradient, rule, states: Vec::new(), master: None, decay, rows, matrices: Vec::new() };
    runs.push((treatment, run));
}

/// Rows of a parameter's matrices, as many as are laid out for them.
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
