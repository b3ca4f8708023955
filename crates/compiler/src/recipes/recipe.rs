//! The formats of matrix products, as options name them. What they make of a graph is in the file of each.

use graph::{OpId, Parameter};
use ops::id;
use tensor::DType;
use tensor::compressed::{Codes, Extent, Form};

/// The formats of matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Recipe {
    /// All products in the compute type.
    #[default]
    Uniform,
    /// The layers' linears in eight bits.
    Fp8Hybrid(Fp8Hybrid),
    /// The layers' linears in four bits.
    Nvfp4(Nvfp4),
    /// The layers' linears with the values that their weights will have in another format.
    QuantizeAware(QuantizeAware),
}

impl Recipe {
    /// True if products read codes of weights or their values, which are made next to them; those of experts, too.
    pub fn quantises_weights(&self) -> bool {
        match self {
            Recipe::Uniform => false,
            Recipe::Fp8Hybrid(_) | Recipe::Nvfp4(_) | Recipe::QuantizeAware(_) => true,
        }
    }

    /// Returns the operations that it adds to a program, with the attribute that calls of units of four bits have if
    /// not all have it. Empty where it needs no units whose results were never checked on hardware.
    pub fn calls(&self) -> &'static [(OpId, Option<&'static str>)] {
        match self {
            Recipe::Uniform | Recipe::Fp8Hybrid(_) | Recipe::QuantizeAware(_) => &[],
            Recipe::Nvfp4(_) => NVFP4_CALLS,
        }
    }

    /// Steps whose magnitudes its quantisers remember; none where scales follow from the tensors alone.
    pub fn history(&self) -> Option<usize> {
        match self {
            Recipe::Uniform | Recipe::Nvfp4(_) | Recipe::QuantizeAware(_) => None,
            Recipe::Fp8Hybrid(recipe) => Some(recipe.amax_history),
        }
    }
}

/// E4M3 forward, another format for gradients, powers of two from the magnitudes of earlier steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Hybrid {
    pub gradient: GradientFormat,
    /// Steps that a power of two follows from; 0: the tensor's own magnitude, in every step.
    pub amax_history: usize,
    /// Number of first layers in the compute type; `skip_last` is that of last ones.
    pub skip_first: usize,
    pub skip_last: usize,
}

/// E2M1 in blocks with E4M3 scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nvfp4 {
    /// Products are those of the numbers that codes stand for, also where the machine has units of four bits. On a CPU they
    /// always are.
    pub emulate: bool,
    /// Gradients are rounded up or down at random.
    pub stochastic: bool,
    /// Number of first layers in the compute type; `skip_last` is that of last ones.
    pub skip_first: usize,
    pub skip_last: usize,
}

/// The format of gradients in products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientFormat {
    E5M2,
    E4M3,
    /// In the compute type, with the numbers that the codes of the other factor stand for.
    Unquantised,
}

/// The number format of weights, and of what they are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizeAware {
    pub weights: Form,
    /// The type that scales of weights are rounded to.
    pub scales: DType,
    /// The format of activations, where engines quantize them.
    pub activations: Option<Form>,
    /// Last parts of the names of modules whose matrices engines compute as one: they share the scale of scales of NVFP4.
    pub fused: &'static [&'static [&'static str]],
}

impl QuantizeAware {
    /// True if the format has codes for a matrix: its rows are whole groups.
    pub(super) fn fits(&self, parameter: &Parameter) -> bool {
        let [first, last] = parameter.shape[..] else { return false };
        let columns = if parameter.transposed { first } else { last };
        let of = |form: Form| match form.extent {
            Extent::Group(n) | Extent::Tile(_, n) => columns.is_multiple_of(n),
            Extent::Tensor | Extent::Row => true,
        };
        of(self.weights) && self.activations.is_none_or(of)
    }

    /// True if codes of matrices that lie one after another are those of each by itself.
    pub(super) fn joins(&self, one: &Parameter, other: &Parameter) -> bool {
        match self.weights.extent {
            _ if self.weights.codes == Codes::Nvfp4 => self.shared(one) == self.shared(other),
            Extent::Tensor => false,
            Extent::Tile(rows, _) => [one, other].iter().all(|of| of.shape[0].is_multiple_of(rows)),
            Extent::Row | Extent::Group(_) => true,
        }
    }

    /// The matrices that share a scale of scales: a module, and the place of a list of its parts; one by itself has its name.
    pub(super) fn shared<'p>(&self, parameter: &'p Parameter) -> (&'p str, Option<usize>) {
        let module = parameter.name.strip_suffix(".weight").unwrap_or(&parameter.name);
        let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
        match self.fused.iter().position(|names| names.contains(&last)) {
            Some(list) => (parent, Some(list)),
            None => (module, None),
        }
    }
}

/// The operations that prepare operands for units of four bits, and their products.
const NVFP4_CALLS: &[(OpId, Option<&str>)] = &[
    (id::OWN_AMAX, None),
    (id::ROTATE, None),
    (id::QUANTISE_BLOCKS, Some("operand")),
    (id::MATMUL_CODES, Some("blocks")),
];
