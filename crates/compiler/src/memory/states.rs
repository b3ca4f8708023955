//! The places of states other than parameters: factors and magnitudes of quantizers, each kind contiguous, codes of
//! weights, the histories that only the update sees; and the cache of earlier tokens.

use std::collections::HashSet;

use graph::{Graph, StateId, ValueId};
use program::{EntryKind, Quantiser, Scaling, TensorRef, Variant};
use tensor::{DType, HostTensor};

use super::{ALIGNMENT_BYTES, align, arena, dtype_of};
use crate::options::CompileOptions;

/// The places of all states.
#[derive(Clone, Debug, Default)]
pub(crate) struct StatePlan {
    /// The places in the order of the graph's list; none for states that are made in the layers that read them.
    pub places: Vec<Option<TensorRef>>,
    pub bytes: usize,
    /// Bytes of what is kept of earlier tokens, in an arena of its own.
    pub cache_bytes: usize,
    /// The histories that an update adds magnitudes to; none where nothing records any.
    pub histories: Option<Histories>,
}

/// Quantisers as the update sees them.
#[derive(Clone, Debug)]
pub(crate) struct Histories {
    pub scaling: Scaling,
    /// f32 [quantisers]: the magnitudes of this step.
    pub amax: TensorRef,
    /// f32 and i32 [quantisers]: the largest number of each format, the exponents of targets.
    pub limits: HostTensor,
    pub tops: HostTensor,
}

/// Lays out the states, which all entries share.
pub(crate) fn plan_states(graphs: &[(EntryKind, Variant, Graph)], options: &CompileOptions) -> StatePlan {
    let table = &graphs.first().expect("at least one entry is requested").2;
    let types = |graph: &Graph| {
        graph.states.iter().map(|id| (graph.value(*id).shape.clone(), graph.value(*id).element)).collect::<Vec<_>>()
    };
    let alike = |(_, _, graph): &(EntryKind, Variant, Graph)| types(graph) == types(table);
    assert!(graphs.iter().all(alike), "all entries share one list of states");
    let mut bytes = 0;
    let mut take = |dtype: DType, shape: &[usize]| {
        // Numbers by themselves are contiguous, so that they can be used as a vector.
        let start = if shape == [1] { bytes } else { align(bytes, ALIGNMENT_BYTES) };
        let at = TensorRef::dense(arena::STATES, start, dtype, shape);
        bytes = start + at.bytes();
        at
    };
    let mut cache_bytes = 0;
    let mut take_cached = |dtype: DType, shape: &[usize]| {
        let at = TensorRef::dense(arena::CACHE, cache_bytes, dtype, shape);
        cache_bytes = align(cache_bytes + at.bytes(), ALIGNMENT_BYTES);
        at
    };
    let is_cached = |state: usize| table.cached.contains(&StateId(state as u32));
    let in_layers = if options.sharding.cuts_weights() { table.derived() } else { HashSet::new() };
    let place = |(index, id): (usize, &ValueId)| {
        let (dtype, shape) = (dtype_of(table, *id), &table.value(*id).shape);
        match is_cached(index) {
            true => Some(take_cached(dtype, shape)),
            false => (!in_layers.contains(id)).then(|| take(dtype, shape)),
        }
    };
    let places: Vec<Option<TensorRef>> = table.states.iter().enumerate().map(place).collect();
    let records = |graph: &Graph| graph.stored.iter().any(|(_, state)| !graph.cached.contains(state));
    let recording = graphs.iter().map(|(_, _, graph)| graph).find(|graph| records(graph));
    let histories = recording.map(|graph| {
        let window = options.recipe.history().expect("only recipes with a history record magnitudes");
        let quantisers = &graph.quantisers;
        let count = quantisers.len();
        // Caches of keys and values come before what a recipe keeps.
        let first = (0..places.len()).find(|state| !is_cached(*state)).expect("quantisers have states");
        let of = |state: usize| places[first + state].as_ref().expect("what quantisers keep is no part of a layer");
        let place = |state: usize| of(state).offset;
        let vector = |first: usize| TensorRef::dense(arena::STATES, place(first), DType::F32, [count]);
        let scaling = Scaling {
            quantisers: quantisers.iter().map(|of| Quantiser { name: of.name.clone(), top: of.top }).collect(),
            window,
            history: take(DType::F32, &[count, window.max(1)]),
            factors: vector(0),
            counts: TensorRef::dense(arena::STATES, place(2 * count), DType::F64, [2, count]),
            steps: take(DType::I32, &[1]),
        };
        let limits: Vec<f32> = quantisers.iter().map(|of| of.limit).collect();
        let tops: Vec<i32> = quantisers.iter().map(|of| of.top).collect();
        let (limits, tops) = (HostTensor::from_f32([count], &limits), HostTensor::from_i32([count], &tops));
        Histories { scaling, amax: vector(count), limits, tops }
    });
    StatePlan { places, histories, bytes, cache_bytes }
}
