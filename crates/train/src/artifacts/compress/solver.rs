//! The parts of GPTQ that take whole matrices, as programs on a GPU: the factor of second moments, and the numbers of matrices whose
//! nearest codes are the result.
//!
//! Knows operations by their names; not which matrices there are.

use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions};
use data::Batch;
use graph::{Element, IR_VERSION, Input, Item, Model, NodeSpec, Output, ValueType};
use program::{Arch, Choices, EntryKind, Variant};
use rayon::prelude::*;
use tensor::compressed::{Form, Scales};
use tensor::{Attrs, DType, HostTensor};

use super::encode::nearest;
use super::moments::Moments;
use super::moments::f32_bytes;
use crate::engine::device::Device;
use crate::engine::{Engine, variant_of};
use crate::error::Result;
use crate::model::compression::chosen::plain_options;
use crate::model::source::ModelSource;

/// The operations of these programs, by their names in the list of operations.
const FACTOR: &str = "inverse_cholesky";
const COMPENSATE: &str = "compensate";

/// One in this many bytes of the device may hold programs of the solver that are not used.
const KEPT: usize = 3;

/// Bytes for each element of the moments: themselves, their factor, and the matrix in f64.
const OF_MOMENT: usize = 16;

/// Bytes for each number of a matrix: itself, with its columns in order, and as its code is chosen.
const OF_NUMBER: usize = 12;

/// Numbers of a matrix [outputs, inputs], and the scales of their codes.
pub struct Scaled {
    pub x: Vec<f32>,
    pub scales: Scales,
}

/// Programs on a device for matrices of some shapes.
pub struct Solver {
    device: Arc<Device>,
    source: ModelSource,
    /// Any batch: no program reads it.
    batch: Batch,
    /// The programs that were run last, the latest at the end, with their bytes.
    programs: Vec<(Model, usize, Engine)>,
    /// The most columns for which there was no room.
    pub refused: Option<usize>,
}

impl Solver {
    /// Returns a solver on a GPU; none for a CPU, which needs no programs.
    pub fn on(device: &Arc<Device>, source: &ModelSource, batch: &Batch) -> Option<Solver> {
        let (device, source, batch) = (device.clone(), source.clone(), batch.clone());
        (device.machine.arch != Arch::Cpu).then_some(Solver {
            device,
            source,
            batch,
            programs: Vec::new(),
            refused: None,
        })
    }

    /// True if the device has room for the sums of moments with these bytes next to what else is there.
    pub fn has_room(&mut self, bytes: usize) -> bool {
        let fits = bytes <= self.device.machine.memory / 8;
        if !fits {
            self.refused = self.refused.max(Some((bytes / 4).isqrt()));
        }
        fits
    }

    /// True if the device has room for the moments of this many columns, and for matrices.
    pub fn fits(&mut self, columns: usize, matrices: &[Scaled]) -> bool {
        let fits = bytes_for(columns, matrices) <= self.device.machine.memory / 2;
        if !fits {
            self.refused = self.refused.max(Some(columns));
        }
        fits
    }

    /// The codes of matrices that are multiplied with the same values.
    pub fn codes(
        &mut self,
        form: &Form,
        matrices: &[Scaled],
        moments: &Moments,
        order: &[usize],
    ) -> Result<Vec<Vec<u8>>> {
        let columns = order.len();
        let f32 = |shape: [usize; 2]| ValueType::new(Element::F32, shape.map(Into::into).to_vec());
        let of_order = ValueType::new(Element::I32, vec![columns.into()]);
        let mut graph = Graph::default();
        let damped = HostTensor::new(DType::F32, [columns, columns], moments.damped_bytes());
        let order: Vec<i32> = order.iter().map(|column| *column as i32).collect();
        graph.input("moments", f32([columns; 2]), damped);
        graph.input("order", of_order, HostTensor::from_i32([columns], &order));
        graph.node(FACTOR, &["moments", "order"], "u", f32([columns; 2]), Attrs::new());
        let mut names = Vec::new();
        for (number, Scaled { x, scales }) in matrices.iter().enumerate() {
            let shape = [x.len() / columns, columns];
            let of_scales = form.extent.scales(shape);
            let [w, factors, zeros, y] = ["w", "scales", "zeros", "y"].map(|name| format!("{name}{number}"));
            graph.input(&w, f32(shape), HostTensor::new(DType::F32, shape, f32_bytes(x.len(), |i| x[i])));
            graph.input(&factors, f32(of_scales), HostTensor::from_f32(of_scales, &scales.factors));
            let mut inputs = vec![w.as_str(), "u", "order", factors.as_str()];
            if form.codes.has_zeros() {
                let values: Vec<f32> = scales.zeros.iter().map(|zero| f32::from(*zero)).collect();
                graph.input(&zeros, f32(of_scales), HostTensor::from_f32(of_scales, &values));
                inputs.push(&zeros);
            }
            graph.node(COMPENSATE, &inputs, &y, f32(shape), form.attrs());
            names.push(y);
        }
        let made = self.run(graph, &names, bytes_for(columns, matrices))?;
        let codes = |(y, of): (HostTensor, &Scaled)| {
            let shape = [y.shape[0], columns];
            nearest(form, &y.to_f32(), shape, &of.scales)
        };
        Ok(made.into_par_iter().zip(matrices).map(codes).collect())
    }

    fn run(&mut self, graph: Graph, results: &[String], bytes: usize) -> Result<Vec<HostTensor>> {
        let variant = variant_of(std::slice::from_ref(&self.batch), false);
        let model = graph.model(&self.source.model, results);
        let (model, bytes, mut engine) = match self.programs.iter().position(|(known, ..)| *known == model) {
            Some(at) => self.programs.remove(at),
            None => {
                // Those that were not run for the longest time make room.
                let room = self.device.machine.memory / KEPT;
                while !self.programs.is_empty() && self.programs.iter().map(|of| of.1).sum::<usize>() + bytes > room {
                    self.programs.remove(0);
                }
                let engine = self.compiled(&model, results, variant)?;
                (model, bytes, engine)
            }
        };
        let given: Vec<(&str, &HostTensor)> = graph.given.iter().map(|(name, of)| (name.as_str(), of)).collect();
        engine.run_from(variant, &vec![self.batch.clone(); engine.replicas()], &given)?;
        let result = |name: &String| engine.output_as_stored(EntryKind::Forward, variant, name);
        let made = results.iter().map(result).collect::<Result<_>>()?;
        self.programs.push((model, bytes, engine));
        Ok(made)
    }

    fn compiled(&self, model: &Model, results: &[String], variant: Variant) -> Result<Engine> {
        let entries = vec![EntryOptions::forward().keeping(results.iter().map(String::as_str))];
        let options = CompileOptions { entries, variants: vec![variant], ..plain_options() };
        let source = Arc::new(ModelSource { model: model.clone(), ..self.source.clone() });
        Engine::new(self.device.clone(), source, options, &Choices::new())
    }
}

/// Bytes of the device for the codes of matrices.
fn bytes_for(columns: usize, matrices: &[Scaled]) -> usize {
    OF_MOMENT * columns * columns + matrices.iter().map(|of| OF_NUMBER * of.x.len()).sum::<usize>()
}

/// Operations on values that are given.
#[derive(Default)]
struct Graph {
    inputs: Vec<Input>,
    given: Vec<(String, HostTensor)>,
    nodes: Vec<Item>,
}

impl Graph {
    fn input(&mut self, name: &str, of: ValueType, value: HostTensor) {
        self.inputs.push(Input { name: name.to_owned(), dtype: of.dtype, shape: of.shape });
        self.given.push((name.to_owned(), value));
    }

    fn node(&mut self, op: &str, inputs: &[&str], output: &str, of: ValueType, attrs: Attrs) {
        self.nodes.push(Item::Node(NodeSpec {
            op: op.to_owned(),
            inputs: inputs.iter().map(|name| (*name).to_owned()).collect(),
            outputs: vec![output.to_owned()],
            types: vec![of],
            attrs,
            region: None,
            at: None,
        }));
    }

    /// The operations as a model; everything else is that of another.
    fn model(&self, like: &Model, results: &[String]) -> Model {
        let output = |name: &String| Output { name: name.clone(), value: name.clone() };
        Model {
            surogate_ir: IR_VERSION,
            images: None,
            inputs: self.inputs.clone(),
            parameters: Vec::new(),
            body: self.nodes.clone(),
            outputs: results.iter().map(output).collect(),
            tasks: Vec::new(),
            ..like.clone()
        }
    }
}
