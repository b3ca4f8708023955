//! The inputs and results of a gradient rule. A rule is built from other operations; the values that these read are
//! saved by the forward pass.

use graph::{Node, OpId, Value, ValueId};
use tensor::Attrs;

use crate::registry::id;

/// Appends operations to the graph that is being differentiated.
pub trait Emit {
    /// Adds a node; types are inferred. Panics when they do not fit: a wrong rule is our mistake.
    fn emit(&mut self, op: OpId, inputs: &[ValueId], attrs: Attrs) -> Vec<ValueId>;

    fn value(&self, id: ValueId) -> &Value;
}

/// One node with the gradients of its outputs.
pub struct GradientCall<'a> {
    pub emit: &'a mut dyn Emit,
    pub node: &'a Node,
    /// Gradient of each output; `None` where nothing depends on it.
    pub output_gradients: &'a [Option<ValueId>],
    /// True for each input that needs a gradient. A rule should compute nothing for the others.
    pub wanted: &'a [bool],
}

impl GradientCall<'_> {
    pub fn input(&self, index: usize) -> ValueId {
        self.node.inputs[index]
    }

    pub fn output(&self, index: usize) -> ValueId {
        self.node.outputs[index]
    }

    /// The gradient of the first output. Autodiff calls a rule only when there is one.
    pub fn dy(&self) -> ValueId {
        self.output_gradients[0].expect("autodiff calls a rule only when its first output has a gradient")
    }

    /// The gradients of all outputs, zeros where nothing depends on one.
    pub fn all_dy(&mut self) -> Vec<ValueId> {
        let gradients = self.output_gradients;
        let filled = |(index, gradient): (usize, &Option<ValueId>)| {
            gradient.unwrap_or_else(|| self.one(id::FILL, &[self.output(index)], Attrs::new().with("value", 0.0)))
        };
        gradients.iter().enumerate().map(filled).collect()
    }

    /// Emits an operation with one output.
    pub fn one(&mut self, op: OpId, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        self.emit.emit(op, inputs, attrs)[0]
    }

    /// Emits `op` only when input `index` wants a gradient.
    pub fn wanted(&mut self, index: usize, op: OpId, inputs: &[ValueId], attrs: Attrs) -> Option<ValueId> {
        self.wanted[index].then(|| self.one(op, inputs, attrs))
    }
}

/// The result of a gradient rule.
pub enum Gradients {
    /// One entry for each input; `None` where no gradient flows.
    Inputs(Vec<Option<ValueId>>),
    /// The operation stops gradients, for this reason.
    NoGradient(&'static str),
}
