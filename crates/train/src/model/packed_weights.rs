//! Weights whose numbers become codes, by name. Some are scaled by the largest magnitude of several: it is found once, when
//! the first of them is quantised. Knows groups; not where numbers come from, or how they become codes.

use std::collections::{BTreeMap, HashMap};

use program::{PackedWeight, ParameterSlot, Program, Session};
use tensor::HostTensor;

use crate::error::Result;
use crate::model::quantizer;

/// Gives numbers of a weight, by its name, from an element on, which is a multiple of 4, in row-major order.
pub type NumbersOf<'a> = dyn Fn(&str, usize, &mut [f32]) -> Result<()> + Sync + 'a;

pub struct PackedWeights<'a> {
    weights: BTreeMap<&'a str, &'a PackedWeight>,
    numbers: &'a NumbersOf<'a>,
    /// Magnitudes of groups, as far as they are known.
    magnitudes: HashMap<u32, f32>,
}

impl<'a> PackedWeights<'a> {
    pub fn new(
        weights: impl IntoIterator<Item = (&'a str, &'a PackedWeight)>,
        numbers: &'a NumbersOf<'a>,
    ) -> PackedWeights<'a> {
        PackedWeights { weights: weights.into_iter().collect(), numbers, magnitudes: HashMap::new() }
    }

    /// The quantized weights of a program.
    pub fn of(program: &'a Program, numbers: &'a NumbersOf<'a>) -> PackedWeights<'a> {
        let named = |slot: &'a ParameterSlot| Some((slot.name.as_str(), slot.packed.as_ref()?));
        PackedWeights::new(program.layout.parameters.iter().filter_map(named), numbers)
    }

    /// Writes the codes of one of them to its place.
    pub fn write(&mut self, session: &mut dyn Session, slot: &ParameterSlot) -> Result<()> {
        let shared = self.shared_magnitude(&slot.name)?;
        quantizer::write(session, slot, &self.numbers_of(&slot.name), shared)
    }

    /// The codes of one of them, as they are in memory.
    pub fn bytes(&mut self, name: &str) -> Result<Vec<u8>> {
        let shared = self.shared_magnitude(name)?;
        quantizer::bytes(self.weights[name], &self.numbers_of(name), shared)
    }

    /// The values of its codes.
    pub fn values(&mut self, name: &str) -> Result<HostTensor> {
        let bytes = self.bytes(name)?;
        Ok(quantizer::values(self.weights[name], &bytes))
    }

    fn numbers_of(&self, name: &str) -> impl Fn(usize, &mut [f32]) -> Result<()> + Sync {
        move |start, numbers| (self.numbers)(name, start, numbers)
    }

    /// The magnitude that scales a weight; None if it is its own.
    fn shared_magnitude(&mut self, name: &str) -> Result<Option<f32>> {
        let Some(group) = self.weights[name].magnitude_group else { return Ok(None) };
        if let Some(known) = self.magnitudes.get(&group) {
            return Ok(Some(*known));
        }
        let members = self.weights.iter().filter(|(_, of)| of.magnitude_group == Some(group));
        let largest = members.map(|(name, of)| quantizer::largest(of, &self.numbers_of(name)));
        let largest = largest.collect::<Result<Vec<f32>>>()?.into_iter().map(f32::to_bits).max();
        let largest = f32::from_bits(largest.expect("a weight is in its group"));
        self.magnitudes.insert(group, largest);
        Ok(Some(largest))
    }
}
