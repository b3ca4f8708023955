//! The inputs of a model's matrices, layer by layer, over rows of a run's data. For a layer, only the model up to it is
//! computed; weights can be replaced between two layers.

use std::collections::BTreeSet;
use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions};
use data::Batch;
use graph::{Item, Output};
use program::{Arch, Choices, EntryKind};
use tensor::{DType, HostTensor};

use super::chosen::plain_options;
use crate::device::Device;
use crate::engine::{Engine, variant_of};
use crate::error::Result;
use crate::model::load_weights;
use crate::source::ModelSource;

/// The beginning of the names of the outputs that are added to a model.
const PREFIX: &str = "calibration.";

/// A value of a layer, and the matrices that it is multiplied with.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Input {
    output: String,
    parameters: Vec<String>,
}

/// A model that gives the inputs of its products.
pub struct Capture<'b> {
    engine: Engine,
    options: CompileOptions,
    batches: &'b [Batch],
    layers: Vec<Vec<Input>>,
}

impl<'b> Capture<'b> {
    /// Loads a model on a device, with the outputs that are added to it.
    pub fn open(device: Arc<Device>, source: &ModelSource, batches: &'b [Batch]) -> Result<Capture<'b>> {
        let mut source = source.clone();
        let layers = add_outputs(&mut source);
        let dtype = match source.dtype() {
            Some(DType::BF16 | DType::F16) if device.machine.arch != Arch::Cpu => DType::BF16,
            _ => DType::F32,
        };
        let mut options = CompileOptions { weights: dtype, compute: dtype, ..plain_options() };
        options.entries = vec![entry(&layers, 0)];
        options.variants = vec![variant_of(&batches[..1], false)];
        let source = Arc::new(source);
        let mut engine = Engine::new(device, source.clone(), options.clone(), &Choices::new())?;
        load_weights(&mut engine, &source, None)?;
        Ok(Capture { engine, options, batches, layers })
    }

    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the names of the matrices of which inputs are given.
    pub fn parameters(&self) -> BTreeSet<String> {
        self.layers.iter().flatten().flat_map(|input| input.parameters.iter().cloned()).collect()
    }

    /// Runs all rows up to a layer. `take` gets, batch by batch, the matrices that read a value, and its rows: those of
    /// tokens, not of padding.
    pub fn run(&mut self, layer: usize, take: &mut dyn FnMut(&[String], &[f32]) -> Result<()>) -> Result<()> {
        if self.layers[layer].is_empty() {
            return Ok(());
        }
        self.options.entries = vec![entry(&self.layers, layer)];
        self.engine.replace(self.options.clone())?;
        for batch in self.batches {
            let round = std::slice::from_ref(batch);
            let variant = self.engine.prepare(variant_of(round, false))?;
            self.engine.run(EntryKind::Forward, variant, &vec![batch.clone(); self.engine.replicas()])?;
            for input in &self.layers[layer] {
                let value = self.engine.output(EntryKind::Forward, variant, &input.output)?;
                take(&input.parameters, &rows_of_tokens(&value, batch))?;
            }
        }
        Ok(())
    }

    /// Writes another matrix in the place of a parameter.
    pub fn replace(&mut self, parameter: &str, values: HostTensor) -> Result<()> {
        let program = self.engine.program().clone();
        let slot = program.parameter(parameter).expect("the matrices are the model's");
        let bytes = values.cast(slot.weight.dtype).bytes;
        self.engine.session().write(&slot.weight, &bytes)?;
        self.engine.weights_written()
    }
}

fn entry(layers: &[Vec<Input>], layer: usize) -> EntryOptions {
    EntryOptions::forward().keeping(layers[layer].iter().map(|input| input.output.as_str()))
}

/// The rows of a value [B, T, width] that belong to tokens.
fn rows_of_tokens(value: &HostTensor, batch: &Batch) -> Vec<f32> {
    let values = value.to_f32();
    let width = values.len() / batch.present.len();
    let rows = values.chunks(width).zip(&batch.present).filter(|(_, present)| **present != 0.0);
    rows.flat_map(|(row, _)| row.iter().copied()).collect()
}

/// The name of the operation of a linear layer.
const LINEAR: &str = "linear";

/// Makes what linear layers read outputs of the model; gives those of each layer.
fn add_outputs(source: &mut ModelSource) -> Vec<Vec<Input>> {
    let mut layers = Vec::new();
    for item in &mut source.model.body {
        let Item::Repeat(repeat) = item else { continue };
        let mut of_blocks = Vec::new();
        for block in &mut repeat.blocks {
            let mut inputs: Vec<(String, Vec<String>)> = Vec::new();
            for node in block.nodes.iter().filter(|node| node.op == LINEAR) {
                let [value, weight, ..] = node.inputs.as_slice() else { continue };
                if !block.parameters.iter().any(|of| of.name == *weight) {
                    continue;
                }
                match inputs.iter_mut().find(|(known, _)| known == value) {
                    Some((_, weights)) => weights.push(weight.clone()),
                    None => inputs.push((value.clone(), vec![weight.clone()])),
                }
            }
            let mut named = Vec::new();
            for (number, (value, weights)) in inputs.into_iter().enumerate() {
                let name = format!("{PREFIX}{}.{{i}}.{number}", repeat.stack);
                block.outputs.push(Output { name: name.clone(), value });
                named.push((name, weights));
            }
            of_blocks.push(named);
        }
        for layer in 0..repeat.repeat {
            let block = if repeat.pattern.is_empty() { 0 } else { repeat.pattern[layer] };
            let at = |name: &String| name.replace("{i}", &layer.to_string());
            let inputs = of_blocks[block].iter();
            layers.push(
                inputs.map(|(name, of)| Input { output: at(name), parameters: of.iter().map(at).collect() }).collect(),
            );
        }
    }
    layers
}
