//! The persistent state and its location: parameters with their gradients and optimizer states, plus other named state.
//! Entry points are exchanged over one layout; checkpoints are loops over it.

use std::collections::BTreeMap;

use crate::memory::TensorRef;
use crate::parameter::ParameterSlot;

/// The persistent part of a program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    pub parameters: Vec<ParameterSlot>,
    /// State that belongs to no single parameter, by the name that a checkpoint gives it.
    pub extra: Vec<(String, TensorRef)>,
    /// The quantizers' state from earlier steps.
    pub scaling: Option<Scaling>,
}

/// The state of tensors that are quantized with powers of two from the magnitudes of earlier steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Scaling {
    /// The quantizers, in the order of the vectors; no name where nothing is quantized.
    pub quantisers: Vec<Quantiser>,
    /// Number of steps that the history holds.
    pub window: usize,
    /// f32 \[quantizers, window\]: the largest magnitudes of steps, the oldest first; 0 where there is none yet.
    pub history: TensorRef,
    /// f32 \[quantizers\]: the power of two of this step; 0 where the tensor's own magnitude decides.
    pub factors: TensorRef,
    /// i32 \[1\]: number of steps since the state was created.
    pub steps: TensorRef,
    /// f64 \[2, quantizers\], of each rank: the number of elements that were not 0 while their own magnitude decided,
    /// and the number of these that became 0. Of values only: 0 for gradients.
    pub counts: TensorRef,
}

/// A tensor that the recipe quantizes, with the range of its scaled magnitudes.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantiser {
    pub name: String,
    /// Magnitudes are scaled to at most 1.75·2^top.
    pub top: i32,
}

impl Scaling {
    fn tensors(&self) -> [&TensorRef; 4] {
        [&self.history, &self.factors, &self.steps, &self.counts]
    }
}

impl Layout {
    pub fn parameter(&self, name: &str) -> Option<&ParameterSlot> {
        self.parameters.iter().find(|slot| slot.name == name)
    }

    /// All state that a checkpoint keeps besides the weights, by the names in its file: the optimizer's state of each
    /// parameter as `weight-name.part`, then the extra state.
    pub fn states(&self) -> impl Iterator<Item = (String, &TensorRef)> {
        let extra = self.extra.iter().map(|(name, at)| (name.clone(), at));
        self.parameters.iter().flat_map(states_of).chain(extra)
    }

    /// The parameters in an order in which they can be written: first those that stay, then by the number of the
    /// preparation that alone reads them the others, which are written and prepared before the next.
    pub fn in_order(&self) -> BTreeMap<Option<u32>, Vec<&ParameterSlot>> {
        let mut groups: BTreeMap<Option<u32>, Vec<&ParameterSlot>> = BTreeMap::new();
        self.parameters.iter().for_each(|slot| groups.entry(slot.load_group).or_default().push(slot));
        groups
    }

    /// Everything that is kept from step to step besides weights.
    pub fn others(&self) -> impl Iterator<Item = &TensorRef> {
        self.states().map(|(_, at)| at).chain(self.scaling.iter().flat_map(Scaling::tensors))
    }
}

/// The optimizer's state of one parameter.
fn states_of(slot: &ParameterSlot) -> impl Iterator<Item = (String, &TensorRef)> {
    let states = slot.states.iter().map(|state| (state.name, &state.at));
    let parts = states.chain(slot.master.as_ref().map(|at| ("master", at)));
    parts.map(|(part, at)| (format!("{}.{part}", slot.name), at))
}
