//! The declaration of an operation. An omitted part does not compile.

use graph::{Element, OpId, ValueType};
use program::{Arithmetic, Cost, TensorRef};
use tensor::{Attrs, DType};

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::rowwise::Form;

/// The class of an operation, which decides how the compiler may treat it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A view of the same memory; never an instruction.
    View,
    /// Each output element from the input elements at the same place; has an expression.
    Elementwise,
    /// Rows in, rows or row statistics out.
    Reduction,
    Matmul,
    /// A token's result from the tokens of its row, by scores or by a state: the costly part of a layer besides products.
    Attention,
    /// An operation whose elements are addressed by indices.
    Gather,
    Loss,
    /// Changes state in place: its outputs start with their present contents.
    Update,
    /// No inputs: evaluated while compiling.
    Constant,
}

/// One attribute, for checking and for the reference page.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    pub name: &'static str,
    /// `int`, `float`, `bool`, `string`, `list of int`, …, with `?` for optional.
    pub kind: &'static str,
    pub doc: &'static str,
}

/// The rows of an operation: the same leading axes of all operands but some inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Number of leading axes that count rows.
    pub axes: usize,
    /// Inputs that every row reads as a whole.
    pub whole: Vec<usize>,
}

/// An operation of the registry: shapes, reference, gradient, kernels and cost.
pub trait Op: Send + Sync {
    /// Returns the operation's number in `registry.rs`.
    fn id(&self) -> OpId;

    fn name(&self) -> &'static str {
        self.id().name()
    }

    fn class(&self) -> Class;

    /// Formula and shapes in a sentence or two: the reference page.
    fn doc(&self) -> &'static str;

    /// Attributes that are accepted; any other is an error.
    fn attributes(&self) -> &'static [Attribute] {
        &[]
    }

    /// Output types from input types, symbols allowed. The error says what does not fit, with the
    /// shapes; the caller adds the operation's name and source line.
    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String>;

    /// True when these attributes make the only result equal to the first input.
    fn unchanged(&self, _attrs: &Attrs) -> bool {
        false
    }

    /// True if it multiplies matrices: its work grows faster than what it reads and writes.
    fn multiplies(&self) -> bool {
        self.class() == Class::Matmul
    }

    /// True if a token's result depends on other tokens of its row: then the row cannot be shared as it is.
    fn mixes_tokens(&self) -> bool {
        self.class() == Class::Attention
    }

    /// Emits the operations that compute the input gradients. What they read is what is saved.
    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients;

    /// Returns the rows of an operation that computes them independently of one another; none for others. The reference
    /// may then be run on some rows at a time.
    fn row_by_row(&self, _inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        None
    }

    /// True if an update of flat tensors may be made for parts of them: the elements of results and of inputs as long as they
    /// are independent of one another, and the attribute `start` counts those before. Parts begin at multiples of four.
    fn divides(&self) -> bool {
        false
    }

    /// An input and the result of its shape that may take its place in memory, where nothing else reads the input:
    /// every element is read before it is written.
    fn in_place(&self) -> Option<(usize, usize)> {
        None
    }

    /// FLOPs, and bytes with inputs and outputs counted once.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 0.0, bytes }
    }

    /// Returns the arithmetic of the kernels that [`Op::lower`] gives for the same call: estimates of time read it.
    fn arithmetic(&self, _call: &LowerCall<'_>) -> Arithmetic {
        Arithmetic::default()
    }

    /// Scratch memory in bytes for the kernels that [`Op::lower`] gives for the same call.
    fn scratch(&self, _call: &LowerCall<'_>) -> usize {
        0
    }

    /// True if kernels may round what one of their products hands to the next to the type of the activations: results
    /// of every type are then no nearer than a few such roundings.
    fn rounds_between(&self) -> bool {
        false
    }

    /// Returns the form, of `operands` operands, of an operation that expressions give, over elements or rows; none for
    /// others.
    fn form(&self, _operands: usize, _attrs: &Attrs) -> Option<Form> {
        None
    }

    /// The instruction for these tensors. Not called for views and constants.
    fn lower(&self, call: &LowerCall<'_>) -> Lowered;

    /// Returns the outputs of a view as views of its inputs. `concat`-like views, whose inputs are parts of the output,
    /// give the parts from [`Op::parts`] instead.
    fn alias(&self, _inputs: &[TensorRef], _attrs: &Attrs) -> Vec<TensorRef> {
        Vec::new()
    }

    /// For a view that joins its inputs: the place of each input inside the output.
    fn parts(&self, _output: &TensorRef, _inputs: &[Vec<usize>], _attrs: &Attrs) -> Vec<TensorRef> {
        Vec::new()
    }

    /// The CPU reference in f32; `reference_f64` computes the same function in f64. Both come from
    /// one generic function through [`crate::reference!`].
    fn reference_f32(&self, call: &mut Call<'_, f32>);

    fn reference_f64(&self, call: &mut Call<'_, f64>);

    /// Small calls that cover the operation: they feed the gradient check, the comparison of CUDA
    /// with the CPU, and the reference page.
    fn examples(&self) -> Vec<Example>;

    /// Pairs of operations that this one replaces.
    fn fusions(&self) -> Vec<Fusion> {
        Vec::new()
    }

    /// Returns the pairing of an operation that may take the operands of two calls at once.
    fn pairing(&self) -> Option<Pairing> {
        None
    }
}

/// Implements both reference methods of [`Op`] with one generic function.
#[macro_export]
macro_rules! reference {
    ($function:path) => {
        fn reference_f32(&self, call: &mut $crate::Call<'_, f32>) {
            $function(call)
        }

        fn reference_f64(&self, call: &mut $crate::Call<'_, f64>) {
            $function(call)
        }
    };
}

/// "`first`, then `second` on its output" becomes this operation.
///
/// The fused operation takes the inputs of `first`, then the inputs of `second` without the one
/// that `first` computes; it gives the outputs of `first` that it keeps, then those of `second`; its
/// attributes are those of both.
#[derive(Clone, Copy, Debug)]
pub struct Fusion {
    pub first: OpId,
    pub second: OpId,
    /// The input of `second` that is the first output of `first`.
    pub operand: usize,
    pub keeps: Keeps,
}

/// Two calls of an operation with the same `shared` inputs and attributes become one of it: that takes the `own` inputs
/// of the first, those of the second, the shared ones, and gives the results of both.
#[derive(Clone, Copy, Debug)]
pub struct Pairing {
    pub own: &'static [usize],
    pub shared: &'static [usize],
}

/// The results of the first operation that the fused one still gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// All but the first, the joined one, which nothing else may read.
    Others,
    /// None of them: nothing else may read any.
    Nothing,
}

impl Keeps {
    /// Returns the number of results of the first operation that are no longer given, counted from its first, of
    /// `count`.
    pub fn dropped(self, count: usize) -> usize {
        match self {
            Keeps::Others => 1,
            Keeps::Nothing => count,
        }
    }
}

/// One input of an example. Random inputs are drawn from a seed that the user of the example picks.
#[derive(Clone, Debug)]
pub enum ExampleInput {
    /// Standard normal times `scale`, as activation type.
    Normal { shape: Vec<usize>, scale: f64 },
    /// Normal, always stored as f32 whatever the precision under test.
    NormalF32 { shape: Vec<usize>, scale: f64 },
    /// Uniform in [low, high), as f32.
    UniformF32 { shape: Vec<usize>, low: f64, high: f64 },
    /// Integers whose values are given.
    Ints { shape: Vec<usize>, values: Vec<i32> },
    /// Numbers whose values are given, as f32.
    F32 { shape: Vec<usize>, values: Vec<f32> },
    /// Codes of eight bits of normal numbers times `scale`.
    Codes { dtype: DType, shape: Vec<usize>, scale: f64 },
    /// Bytes whose values are given.
    Bytes { shape: Vec<usize>, values: Vec<u8> },
    /// The result number `result` of the reference of `op` for the example's inputs at the places `inputs`, none of
    /// them computed, and the example's attributes.
    Computed { op: OpId, inputs: Vec<usize>, result: usize, element: Element, shape: Vec<usize> },
}

/// One call of an operation with its attributes.
#[derive(Clone, Debug)]
pub struct Example {
    pub inputs: Vec<ExampleInput>,
    pub attrs: Attrs,
    /// Extra inputs for update operations: the present contents of the outputs.
    pub state: Vec<ExampleInput>,
    /// The inputs that the gradient check differentiates.
    pub differentiable: Vec<usize>,
}

impl Example {
    pub fn new(inputs: Vec<ExampleInput>, attrs: Attrs) -> Self {
        Example { inputs, attrs, state: Vec::new(), differentiable: Vec::new() }
    }

    /// Names the inputs that the finite-difference check perturbs.
    pub fn differentiate(mut self, inputs: &[usize]) -> Self {
        self.differentiable = inputs.to_vec();
        self
    }

    /// Gives the starting contents of the outputs.
    pub fn with_state(mut self, state: Vec<ExampleInput>) -> Self {
        self.state = state;
        self
    }
}
