//! The flat graph: values in a table, nodes in execution order.

use std::collections::HashSet;

use tensor::{Attrs, DType, HostTensor, Shape, Storage};

use crate::dim::{Axis, Dim, Element, ValueType};
use crate::model::Init;
use crate::op_id::OpId;

/// The number of a value: an index into [`Graph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// The number of a parameter: an index into [`Graph::parameters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParameterId(pub u32);

/// A layer: the stack that it is of, as an index into [`Graph::stacks`], and its number in it, both from 0. Ordered as
/// they are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Layer {
    pub stack: u32,
    pub index: u32,
}

/// The number of a state: an index into [`Graph::states`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateId(pub u32);

/// The origin of a value's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A batch tensor or a step scalar.
    Input,
    Parameter(ParameterId),
    /// The output of a node.
    Node,
    /// Computed while compiling; the contents are in [`Graph::constants`].
    Constant,
    /// A state: kept from step to step, but no parameter.
    State(StateId),
}

/// A tensor that is quantised with a power of two, which follows from its magnitudes in earlier steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantiser {
    /// The tensor's name; empty where nothing is quantized by it.
    pub name: String,
    /// The largest number of the format.
    pub limit: f32,
    /// Magnitudes are scaled to at most 1.75·2^top.
    pub top: i32,
}

/// A tensor of the graph. Written once.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// For people; parameters and inputs carry their public names.
    pub name: String,
    pub element: Element,
    pub shape: Shape,
    /// Names of the axes, one for each of the shape's.
    pub axes: Vec<Option<Axis>>,
    pub origin: Origin,
}

impl Value {
    /// The type as the shape rules see it.
    pub fn value_type(&self) -> ValueType {
        let dim = |(n, axis): (&usize, &Option<Axis>)| axis.map_or(Dim::Fixed(*n), |axis| Dim::Named(axis, *n));
        ValueType::new(self.element, self.shape.iter().zip(&self.axes).map(dim).collect::<Vec<_>>())
    }

    /// Returns the place of an axis in the shape, if the value has it.
    pub fn axis(&self, axis: Axis) -> Option<usize> {
        self.axes.iter().position(|known| *known == Some(axis))
    }

    /// The extent of an axis.
    pub fn extent(&self, axis: Axis) -> Option<usize> {
        self.axis(axis).map(|at| self.shape[at])
    }
}

/// The part of the step that a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    Forward,
    /// A forward node that is recomputed for the backward pass, which then needs nothing kept for it.
    Recompute,
    Backward,
}

impl Phase {
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Recompute => "recompute",
            Phase::Backward => "backward",
        }
    }
}

/// One operation on values, with its place in the step and in the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: OpId,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
    pub attrs: Attrs,
    pub phase: Phase,
    /// The iteration of the repeat that the node came from.
    pub layer: Option<Layer>,
    pub region: Option<String>,
    /// `file:line` in the model's source.
    pub at: Option<String>,
}

/// One row of the parameter table.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Name in the Hugging Face or PEFT file.
    pub name: String,
    pub value: ValueId,
    pub shape: Shape,
    pub init: Init,
    pub residual_projection: bool,
    /// The matrix of a linear layer, kept as [inputs, outputs].
    pub transposed: bool,
    /// A bias, whatever its axes.
    pub bias: bool,
    /// A row for each id: an embedding, or the output head.
    pub table: bool,
    /// True for a value that is kept in f32 and that no gradient of the loss moves.
    pub buffer: bool,
    pub trainable: bool,
    /// Factor of the learning rate.
    pub rate: f64,
    /// An adapter matrix: kept apart from the base weights, exported in PEFT form.
    pub adapter: bool,
    /// A base weight that is trained in full alongside adapters, and kept with them.
    pub saved: bool,
    /// The storage of the weight between steps.
    pub storage: Storage,
    /// (group, position): the parameters of a group are contiguous in the order of their positions and can be used as
    /// one tensor.
    pub merge_group: Option<(u32, u32)>,
    /// The group of weights in codes that are scaled by the largest magnitude of them all; none for weights scaled by
    /// their own.
    pub magnitude_group: Option<u32>,
}

impl Parameter {
    /// True for matrices and stacks of them: the parameters that weight decay and the optimizers of matrices take.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() >= 2 && !self.bias
    }
}

/// A whole computation. Nodes are in execution order: every input is defined before its use.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    pub name: String,
    /// Names of the stacks of layers.
    pub stacks: Vec<String>,
    /// Numbers of the stacks of parts other than the text, such as vision towers, whose products are never quantized.
    pub apart: Vec<u32>,
    /// A name that distinguishes its entry from others of its kind; empty for the usual one.
    pub entry: String,
    pub values: Vec<Value>,
    pub parameters: Vec<Parameter>,
    pub inputs: Vec<ValueId>,
    pub constants: Vec<(ValueId, HostTensor)>,
    pub nodes: Vec<Node>,
    /// The results, each with its name.
    pub outputs: Vec<(String, ValueId)>,
    /// Contributions to parameter gradients, in the order in which they are computed. A parameter
    /// that is used twice has two rows; they are summed in this order.
    pub gradients: Vec<(ParameterId, ValueId)>,
    /// Values that enter an iteration of a repeat from the one before it: the residual stream.
    pub carried: Vec<ValueId>,
    /// Values that may wait in host memory where nothing reads them for long.
    pub waiting: Vec<ValueId>,
    /// The states: values that persist from step to step and are no parameters, the same in all entries.
    pub states: Vec<ValueId>,
    /// Results that are written into a state.
    pub stored: Vec<(ValueId, StateId)>,
    /// The states that hold what is kept of earlier tokens.
    pub cached: Vec<StateId>,
    /// Nodes that compute states from parameters: part of no entry, they run whenever parameters were written.
    pub prepared: Vec<Node>,
    /// The quantizers. With n of them, and states counted after those in `cached`, state i holds the factor of
    /// quantizer i and state n + i its magnitude in this step; states 2n + i and 3n + i count the elements that were
    /// not 0, and those of them that became 0.
    pub quantisers: Vec<Quantiser>,
}

impl Graph {
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    pub fn value_mut(&mut self, id: ValueId) -> &mut Value {
        &mut self.values[id.0 as usize]
    }

    pub fn parameter(&self, id: ParameterId) -> &Parameter {
        &self.parameters[id.0 as usize]
    }

    /// Adds a value. Names are for people: the verifier does not ask them to be unique.
    pub fn add(&mut self, value: Value) -> ValueId {
        let id = ValueId(self.values.len() as u32);
        self.values.push(value);
        id
    }

    /// Adds a value of a type whose extents are all known.
    pub fn add_typed(&mut self, name: &str, of: &ValueType, origin: Origin) -> ValueId {
        let shape = of.extents().expect("flat graphs have no symbols");
        let axes = of.shape.iter().map(Dim::axis).collect();
        self.add(Value { name: name.to_owned(), element: of.dtype, shape, axes, origin })
    }

    /// Gives a value another type. The types of its readers must be inferred again.
    pub fn retype(&mut self, id: ValueId, of: &ValueType) {
        let value = &mut self.values[id.0 as usize];
        value.shape = of.extents().expect("flat graphs have no symbols");
        (value.element, value.axes) = (of.dtype, of.shape.iter().map(Dim::axis).collect());
    }

    /// Adds a value whose axes have no names.
    pub fn add_value(&mut self, name: &str, element: Element, shape: Shape, origin: Origin) -> ValueId {
        let axes = vec![None; shape.len()];
        self.add(Value { name: name.to_owned(), element, shape, axes, origin })
    }

    pub fn add_input(&mut self, name: &str, element: Element, shape: Shape) -> ValueId {
        let id = self.add_value(name, element, shape, Origin::Input);
        self.inputs.push(id);
        id
    }

    /// Adds a state, filled elsewhere.
    pub fn add_state(&mut self, name: &str, element: Element, shape: Shape) -> StateId {
        let id = self.add_value(name, element, shape, Origin::Node);
        self.keep(id, name)
    }

    /// Makes a value a state: a node of [`Graph::prepared`] or of another entry computes it.
    pub fn keep(&mut self, id: ValueId, name: &str) -> StateId {
        let state = StateId(self.states.len() as u32);
        let value = self.value_mut(id);
        (value.origin, value.name) = (Origin::State(state), name.to_owned());
        self.states.push(id);
        state
    }

    pub fn state(&self, id: StateId) -> &Value {
        self.value(self.states[id.0 as usize])
    }

    /// States that nodes compute from parameters and that no parameter begins as: whoever has the parameters can compute
    /// them where they are read.
    pub fn derived(&self) -> HashSet<ValueId> {
        let computed = self.prepared.iter().flat_map(|node| &node.outputs).copied();
        computed.filter(|id| matches!(self.value(*id).origin, Origin::State(_)) && !self.is_first_value(*id)).collect()
    }

    /// True if a parameter is initialized from a state.
    fn is_first_value(&self, state: ValueId) -> bool {
        let name = &self.value(state).name;
        self.parameters.iter().any(|of| of.init == Init::Prepared && of.name == *name)
    }

    /// The nodes that compute states from parameters as a graph of their own, whose outputs are the states that parameters
    /// begin as; none where there are none.
    pub fn preparation(&self) -> Option<Graph> {
        if self.prepared.is_empty() {
            return None;
        }
        let mut values = self.values.clone();
        for value in values.iter_mut().filter(|value| !matches!(value.origin, Origin::Parameter(_))) {
            value.origin = Origin::Node;
        }
        let begins = |id: &ValueId| self.is_first_value(*id).then(|| (self.value(*id).name.clone(), *id));
        Some(Graph {
            outputs: self.states.iter().filter_map(begins).collect(),
            name: self.name.clone(),
            stacks: self.stacks.clone(),
            apart: self.apart.clone(),
            values,
            parameters: self.parameters.clone(),
            nodes: self.prepared.clone(),
            states: self.states.clone(),
            ..Graph::default()
        })
    }

    /// Adds a row to the parameter table together with its value.
    pub fn add_parameter(&mut self, name: &str, shape: Shape, init: Init, storage: DType) -> ParameterId {
        let id = ParameterId(self.parameters.len() as u32);
        let value = self.add_value(name, Element::Float, shape.clone(), Origin::Parameter(id));
        self.parameters.push(Parameter {
            name: name.to_owned(),
            value,
            shape,
            init,
            residual_projection: false,
            transposed: false,
            bias: false,
            table: false,
            buffer: false,
            trainable: false,
            rate: 1.0,
            adapter: false,
            saved: false,
            storage: Storage::Plain(storage),
            merge_group: None,
            magnitude_group: None,
        });
        id
    }

    /// All layers, in the order in which they are run.
    pub fn layers(&self) -> Vec<Layer> {
        let mut layers: Vec<Layer> = self.nodes.iter().filter_map(|node| node.layer).collect();
        // Nodes of a layer stand together.
        layers.dedup();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// Returns true if a layer is of a part other than the text.
    pub fn is_apart(&self, layer: Layer) -> bool {
        self.apart.contains(&layer.stack)
    }

    /// Returns the name that distinguishes the stack of a layer from others; empty where there is one stack only.
    pub fn stack_name(&self, layer: Layer) -> &str {
        match self.stacks.as_slice() {
            [_, _, ..] => &self.stacks[layer.stack as usize],
            _ => "",
        }
    }

    /// True when the value is computed by a node.
    pub fn is_computed(&self, id: ValueId) -> bool {
        self.value(id).origin == Origin::Node
    }

    pub fn input(&self, name: &str) -> Option<ValueId> {
        self.inputs.iter().copied().find(|id| self.value(*id).name == name)
    }

    pub fn output(&self, name: &str) -> Option<ValueId> {
        self.outputs.iter().find(|(n, _)| n == name).map(|(_, id)| *id)
    }

    /// For every value the index of the node that computes it.
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut producers = vec![None; self.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for output in &node.outputs {
                producers[output.0 as usize] = Some(index);
            }
        }
        producers
    }

    /// For every value how often it is read: by nodes, as a named output, as a gradient.
    pub fn use_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.values.len()];
        let reads = self.nodes.iter().flat_map(|n| &n.inputs);
        let results = self.outputs.iter().map(|(_, id)| id);
        let gradients = self.gradients.iter().map(|(_, id)| id);
        for id in reads.chain(results).chain(gradients) {
            counts[id.0 as usize] += 1;
        }
        counts
    }
}
