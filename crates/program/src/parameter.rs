//! The flat parameter table: weight decay, checkpoints, export and sharding are loops over it.

use tensor::packed::Quantisation;
use tensor::storage::Packing;
use tensor::{DType, Shape};

use crate::memory::TensorRef;

/// A tensor that the optimizer keeps of a parameter from step to step, by the name that a checkpoint gives it.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerState {
    pub name: &'static str,
    pub at: TensorRef,
}

/// A weight that is kept quantized; products read its values.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedWeight {
    pub packing: Packing,
    /// The shape as in the file.
    pub shape: Shape,
    /// The type of the values.
    pub dtype: DType,
    /// The quantization of unquantized numbers in a file; `None` where the file has them quantized.
    pub made: Option<Quantisation>,
    /// Weights with the same number are scaled by the largest magnitude of all of them; the others by their own.
    pub magnitude_group: Option<u32>,
}

/// One parameter: where it comes from and where everything that belongs to it is.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSlot {
    /// Name of the tensor in the Hugging Face or PEFT file.
    pub name: String,
    /// The weight as it is stored: of a packed weight all its planes, as bytes.
    pub weight: TensorRef,
    pub packed: Option<PackedWeight>,
    /// The number of the preparation that alone reads the weight, and the others loaded with it: its place, which
    /// entries use for other things, holds it until that preparation has run. `None` where the weight stays.
    pub load_group: Option<u32>,
    pub init: Initializer,
    pub adapter: bool,
    /// A base weight that is trained in full alongside adapters: part of their files, too.
    pub saved: bool,
    /// The matrix of a linear layer, kept as [inputs, outputs].
    pub transposed: bool,
    pub trainable: bool,
    /// Decoupled weight decay applies (tensors of two or more axes).
    pub decay: bool,
    /// f32, shaped like the weight; only for what is trained.
    pub gradient: Option<TensorRef>,
    pub states: Vec<OptimizerState>,
    /// f32 copy that the optimizer updates, when one is kept.
    pub master: Option<TensorRef>,
}

impl ParameterSlot {
    /// The shape of the tensor in its file.
    pub fn shape(&self) -> &Shape {
        self.packed.as_ref().map_or(&self.weight.shape, |packed| &packed.shape)
    }

    /// Returns the type of the weight's values.
    pub fn dtype(&self) -> DType {
        self.packed.as_ref().map_or(self.weight.dtype, |packed| packed.dtype)
    }

    /// Number of elements in the file's shape.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }
}

/// The initial value of a weight that no file provides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initializer {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// Uniform in [−bound, bound): PEFT's Kaiming start of LoRA A has bound 1/√in.
    Uniform(f32),
    Constant(f32),
    /// The output of the same name of the preparation.
    Prepared,
}
