//! A model that is run layer by layer over rows of a run's data, each layer once the one before it is done: what a layer
//! reads is kept for all rows, and one layer's weights are on the device. Weights of the layer may be written in between.
//!
//! Knows parts of graphs, weights and batches; not what is done with the values.

use std::collections::{BTreeMap, BTreeSet};
use std::slice::from_ref;
use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions};
use data::Batch;
use data::safetensors::Weights;
use graph::{Block, Item, Model};
use program::{Arch, Choices, EntryKind, ParameterSlot};
use tensor::{DType, HostTensor};

use super::part::{self, Place};
use super::solver::Solver;
use crate::engine::device::Device;
use crate::engine::{Engine, variant_of};
use crate::error::{Result, TrainError};
use crate::model::compression::chosen::plain_options;
use crate::model::source::ModelSource;
use crate::model::weight_source::write_as_stored;

/// The number of parts of a model that stay compiled on the device.
const PARTS: usize = 12;

/// Takes the wanted values of a batch, in the order in which they were named, each in its own type.
pub type Take<'a> = dyn FnMut(usize, Vec<HostTensor>) -> Result<()> + 'a;

/// Values inside of a layer for all batches.
pub type Given = BTreeMap<String, Vec<HostTensor>>;

/// A model at one of its layers.
pub struct Layers<'b> {
    device: Arc<Device>,
    source: ModelSource,
    weights: Weights,
    dtype: DType,
    pub batches: &'b [Batch],
    places: Vec<Place>,
    /// The number of the layer that is next.
    at: usize,
    /// True if values after the last layer are computed, too.
    to_the_end: bool,
    /// Values that the layer reads of the one before it, by their place among those that the stack hands on; for each batch.
    carried: Vec<Option<Vec<HostTensor>>>,
    /// Results of stacks that are done.
    results: Given,
    /// Values of the layer that are known for all batches.
    known: Given,
    /// Other values of the layer's weights, with the number of the change.
    replaced: BTreeMap<String, (u64, HostTensor)>,
    changes: u64,
    /// The parts that were run last, the latest at the end.
    parts: Vec<Part>,
}

/// The type of values in the layers of a model.
pub fn type_of(source: &ModelSource, device: &Device) -> DType {
    match source.dtype() {
        Some(DType::BF16 | DType::F16) if device.machine.arch != Arch::Cpu => DType::BF16,
        _ => DType::F32,
    }
}

/// A part of the model on the device.
struct Part {
    model: Model,
    engine: Engine,
    /// For each parameter the weight that it holds, and the number of its change.
    holds: Vec<Option<(String, u64)>>,
}

impl<'b> Layers<'b> {
    /// Begins before the first layer that has one of these parameters.
    pub fn open(
        device: Arc<Device>,
        source: &ModelSource,
        parameters: &BTreeSet<&str>,
        batches: &'b [Batch],
    ) -> Result<Layers<'b>> {
        let dtype = type_of(source, &device);
        let source = source.clone();
        let weights = source.weights(&source.folder)?;
        let mut places = Vec::new();
        for (item, of) in source.model.body.iter().enumerate() {
            let Item::Repeat(repeat) = of else { continue };
            let of_layer = |layer| Place { item, layer };
            let all = (0..repeat.repeat).map(of_layer);
            let is_there = |place: &Place| {
                let block = place.block(&source.model);
                block.parameters.iter().any(|of| parameters.contains(place.numbered(&of.name).as_str()))
            };
            if all.clone().any(|place| is_there(&place)) {
                places.extend(all);
            }
        }
        let mut layers = Layers {
            device,
            source,
            weights,
            dtype,
            batches,
            places,
            at: 0,
            to_the_end: false,
            carried: Vec::new(),
            results: Given::new(),
            known: Given::new(),
            replaced: BTreeMap::new(),
            changes: 0,
            parts: Vec::new(),
        };
        layers.begin_stack()?;
        Ok(layers)
    }

    /// The same, going on after the last layer: see [`Layers::after`].
    pub fn reaching_the_end(self) -> Layers<'b> {
        Layers { to_the_end: true, ..self }
    }

    /// Returns the number of layers.
    pub fn count(&self) -> usize {
        self.places.len()
    }

    /// The place of the layer.
    pub fn place(&self) -> Place {
        self.places[self.at]
    }

    /// Returns the type of the values in the layers, and of weights there.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the bytes of the moments of values of the layer; none if some are not of tokens in rows.
    pub fn bytes_of_moments(&self, values: &[String]) -> Option<usize> {
        let types = part::types(&self.source.model);
        let of = |value: &String| Some(4 * part::columns_of_tokens(types.get(value)?)?.pow(2));
        values.iter().map(of).sum()
    }

    /// Returns a solver on the device, if it is a GPU.
    pub fn solver(&self) -> Option<Solver> {
        Solver::on(&self.device, &self.source, self.batches.first()?)
    }

    pub fn block(&self) -> &Block {
        self.place().block(&self.source.model)
    }

    pub fn model(&self) -> &Model {
        &self.source.model
    }

    /// Gives a weight of the layer other values.
    pub fn replace(&mut self, parameter: &str, values: HostTensor) {
        self.changes += 1;
        self.replaced.insert(parameter.to_owned(), (self.changes, values));
    }

    /// Gives a weight of the layer its own values again.
    pub fn restore(&mut self, parameter: &str) {
        self.replaced.remove(parameter);
    }

    /// Computes values of the layer for all batches, from what the layer before it gives.
    pub fn run(&mut self, wanted: &[String], take: &mut Take<'_>) -> Result<()> {
        self.with_given(|layers, given| layers.run_from(given, wanted, take))
    }

    /// Computes Σ xᵀx over the tokens of each batch for values x of the layer, in the order in which they are named: f32.
    pub fn moments(&mut self, values: &[String], take: &mut Take<'_>) -> Result<()> {
        self.with_given(|layers, given| {
            let names = given.keys().cloned().collect();
            let (model, wanted) = part::of_moments(&layers.source.model, layers.place(), &names, values);
            layers.compute(model, given, &wanted, take)
        })
    }

    /// Does something with the values of the layer that are known.
    fn with_given(&mut self, run: impl FnOnce(&mut Self, &Given) -> Result<()>) -> Result<()> {
        let names: Vec<String> = self.block().carry.iter().map(|of| of.inside.clone()).collect();
        let mut given = std::mem::take(&mut self.results);
        let known: Vec<String> = self.known.keys().cloned().collect();
        given.append(&mut self.known);
        for (name, value) in names.iter().zip(&mut self.carried) {
            given.extend(value.take().map(|value| (name.clone(), value)));
        }
        let done = run(self, &given);
        for (name, value) in names.iter().zip(&mut self.carried) {
            *value = given.remove(name);
        }
        self.known.extend(known.into_iter().filter_map(|name| given.remove_entry(&name)));
        self.results = given;
        done
    }

    /// Computes values of the layer and keeps them.
    pub fn keep_values(&mut self, names: &[String]) -> Result<()> {
        let mut wanted: Vec<String> = Vec::new();
        for name in names.iter().filter(|name| self.value(name).is_none()) {
            if !wanted.contains(name) {
                wanted.push(name.clone());
            }
        }
        let mut made: Vec<Vec<HostTensor>> = vec![Vec::new(); wanted.len()];
        self.run(&wanted, &mut |_, values| {
            made.iter_mut().zip(values).for_each(|(of, value)| of.push(value));
            Ok(())
        })?;
        self.known.extend(wanted.into_iter().zip(made));
        Ok(())
    }

    /// A value of the layer for all batches, where it is known: kept, or handed on to the layer.
    pub fn value(&self, name: &str) -> Option<&[HostTensor]> {
        let carried = self.block().carry.iter().position(|of| of.inside == name);
        let known = self.known.get(name).or_else(|| carried.and_then(|at| self.carried[at].as_ref()));
        known.or_else(|| self.results.get(name)).map(Vec::as_slice)
    }

    /// Computes values of the layer from others of it.
    pub fn run_from(&mut self, given: &Given, wanted: &[String], take: &mut Take<'_>) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let names = given.keys().cloned().collect();
        let model = part::of_layer(&self.source.model, self.place(), &names, wanted);
        self.compute(model, given, wanted, take)
    }

    /// Goes to the next layer, which reads what this one makes with its weights as they are. False after the last one.
    pub fn advance(&mut self) -> Result<bool> {
        let is_last = self.at + 1 == self.places.len();
        if is_last && !self.to_the_end {
            self.known.clear();
            self.at += 1;
            return Ok(false);
        }
        let carry = self.block().carry.clone();
        let moved: Vec<usize> = (0..carry.len()).filter(|index| carry[*index].next != carry[*index].inside).collect();
        let wanted: Vec<String> = moved.iter().map(|index| carry[*index].next.clone()).collect();
        let mut next: Vec<Vec<HostTensor>> = vec![Vec::new(); moved.len()];
        self.run(&wanted, &mut |_, values| {
            next.iter_mut().zip(values).for_each(|(of, value)| of.push(value));
            Ok(())
        })?;
        for (index, values) in moved.into_iter().zip(next) {
            self.carried[index] = Some(values);
        }
        self.replaced.clear();
        self.known.clear();
        self.next()
    }

    /// Goes to the next layer as if this one were not there.
    pub fn pass_over(&mut self) -> Result<bool> {
        self.replaced.clear();
        self.known.clear();
        self.next()
    }

    /// Goes back to before the first layer.
    pub fn restart(&mut self) -> Result<()> {
        self.replaced.clear();
        self.known.clear();
        self.at = 0;
        self.results.clear();
        self.begin_stack()
    }

    /// Takes what was computed to the next layer. False after the last one.
    fn next(&mut self) -> Result<bool> {
        let is_last = self.at + 1 == self.places.len();
        let before = self.place();
        self.at += 1;
        if is_last || self.place().item != before.item {
            let results = before.stack(&self.source.model).carry.iter().map(|of| of.result.clone());
            let values = std::mem::take(&mut self.carried);
            self.results.extend(results.zip(values).filter_map(|(name, values)| Some((name, values?))));
            self.begin_stack()?;
        }
        Ok(!is_last)
    }

    /// A value that the layer reads of the one before it for a batch, by its place among what the stack hands on.
    pub fn carried(&self, index: usize, batch: usize) -> Option<&HostTensor> {
        self.carried.get(index)?.as_ref()?.get(batch)
    }

    /// Computes values after the last layer, which was left by [`Layers::advance`].
    pub fn after(&mut self, wanted: &[String], take: &mut Take<'_>) -> Result<()> {
        let given = self.results.keys().cloned().collect();
        let model = part::before_stack(&self.source.model, self.source.model.body.len(), &given, wanted);
        let results = std::mem::take(&mut self.results);
        let done = self.compute(model, &results, wanted, take);
        self.results = results;
        done
    }

    /// Computes what the first layer of a stack reads.
    fn begin_stack(&mut self) -> Result<()> {
        let Some(place) = self.places.get(self.at).copied() else { return Ok(()) };
        let initial: Vec<Option<String>> =
            place.stack(&self.source.model).carry.iter().map(|of| of.initial.clone()).collect();
        let is_made = |name: &&String| !self.results.contains_key(*name);
        let wanted: Vec<String> = initial.iter().flatten().filter(is_made).cloned().collect();
        let mut values: Given = wanted.iter().map(|name| (name.clone(), Vec::new())).collect();
        if !wanted.is_empty() {
            let given = self.results.keys().cloned().collect();
            let model = part::before_stack(&self.source.model, place.item, &given, &wanted);
            let results = std::mem::take(&mut self.results);
            let done = self.compute(model, &results, &wanted, &mut |_, made| {
                for (name, value) in wanted.iter().zip(made) {
                    values.get_mut(name).expect("it is wanted").push(value);
                }
                Ok(())
            });
            self.results = results;
            done?;
            // The table of tokens is needed no more.
            self.parts.pop();
        }
        let of = |name: &String| values.get(name).or_else(|| self.results.get(name)).cloned();
        self.carried = initial.iter().map(|name| name.as_ref().and_then(of)).collect();
        Ok(())
    }

    /// Runs a part of the model on all batches.
    fn compute(&mut self, model: Model, given: &Given, wanted: &[String], take: &mut Take<'_>) -> Result<()> {
        let mut part = self.part(model, wanted)?;
        self.write_weights(&mut part)?;
        for (index, batch) in self.batches.iter().enumerate() {
            let engine = &mut part.engine;
            let variant = engine.prepare(variant_of(from_ref(batch), false))?;
            let values: Vec<(&str, &HostTensor)> =
                given.iter().map(|(name, values)| (name.as_str(), &values[index])).collect();
            engine.run_from(variant, &vec![batch.clone(); engine.replicas()], &values)?;
            let made = wanted.iter().map(|name| engine.output_as_stored(EntryKind::Forward, variant, name));
            take(index, made.collect::<Result<_>>()?)?;
        }
        self.parts.push(part);
        Ok(())
    }

    /// The part on the device: as it was compiled before, or new.
    fn part(&mut self, model: Model, wanted: &[String]) -> Result<Part> {
        if let Some(known) = self.parts.iter().position(|of| of.model == model) {
            return Ok(self.parts.remove(known));
        }
        if self.parts.len() == PARTS {
            self.parts.remove(0);
        }
        let mut options = CompileOptions { weights: self.dtype, compute: self.dtype, ..plain_options() };
        options.entries = vec![EntryOptions::forward().keeping(wanted.iter().map(String::as_str))];
        options.variants = vec![variant_of(&self.batches[..1], false)];
        let source = Arc::new(ModelSource { model: model.clone(), ..self.source.clone() });
        let engine = Engine::new(self.device.clone(), source, options, &Choices::new())?;
        let holds = vec![None; engine.program().layout.parameters.len()];
        Ok(Part { model, engine, holds })
    }

    /// Writes the weights that a part does not hold yet.
    fn write_weights(&self, part: &mut Part) -> Result<()> {
        let program = part.engine.program().clone();
        let mut is_new = false;
        for (slot, holds) in program.layout.parameters.iter().zip(&mut part.holds) {
            let name = self.name_of(&part.model, slot);
            let replaced = self.replaced.get(&name);
            let wanted = Some((name.clone(), replaced.map_or(0, |(change, _)| *change)));
            if *holds == wanted {
                continue;
            }
            match replaced {
                Some((_, values)) => match values.dtype == slot.weight.dtype {
                    true => part.engine.session().write(&slot.weight, &values.bytes)?,
                    false => part.engine.session().write(&slot.weight, &values.cast(slot.weight.dtype).bytes)?,
                },
                None => {
                    let view = self.weights.get(&name).map_err(TrainError::model_file)?;
                    write_as_stored(part.engine.session(), &slot.weight, &view)?;
                }
            }
            (*holds, is_new) = (wanted, true);
        }
        if is_new { part.engine.weights_written() } else { Ok(()) }
    }

    /// The weight that a parameter of a part stands for: those of a layer have the number 0 there.
    fn name_of(&self, part: &Model, slot: &ParameterSlot) -> String {
        let is_outside = part.parameters.iter().any(|of| of.name == slot.name);
        let names = (self.at < self.places.len() && !is_outside).then(|| &self.block().parameters);
        let own = names.and_then(|of| of.iter().find(|of| of.name.replace("{i}", "0") == slot.name));
        own.map_or_else(|| slot.name.clone(), |of| self.place().numbered(&of.name))
    }
}

/// The rows of a value [B, T, width] that belong to tokens, f32.
pub fn rows_of_tokens(value: &HostTensor, batch: &Batch) -> Vec<f32> {
    let values = value.to_f32();
    let width = values.len() / batch.present.len();
    if batch.present.iter().all(|present| *present != 0.0) {
        return values;
    }
    let rows = values.chunks(width).zip(&batch.present).filter(|(_, present)| **present != 0.0);
    rows.flat_map(|(row, _)| row.iter().copied()).collect()
}
