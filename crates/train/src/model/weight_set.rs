//! The two sets of parameters that files hold: those of the base model, and those of an adapter.

use program::{ParameterSlot, Program};

use crate::model::peft;

/// The set of parameters that a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightSet {
    Base,
    Adapter,
}

impl WeightSet {
    pub(crate) fn holds(self, slot: &ParameterSlot) -> bool {
        match self {
            WeightSet::Base => !slot.adapter,
            WeightSet::Adapter => slot.adapter || slot.saved,
        }
    }

    /// The name of a parameter in the files of this set.
    pub fn name(self, slot: &ParameterSlot) -> String {
        match self {
            WeightSet::Adapter if slot.saved => format!("{}{}", peft::PREFIX, slot.name),
            _ => slot.name.clone(),
        }
    }

    /// The slots of this part.
    pub fn of(self, program: &Program) -> impl Iterator<Item = &ParameterSlot> {
        program.layout.parameters.iter().filter(move |slot| self.holds(slot))
    }
}
