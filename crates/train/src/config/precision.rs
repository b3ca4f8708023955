//! Options of number formats: recipe, master weights, gradients.

use options::{Setting, choices, options};

use super::dtype::{Dtype, MatmulDtype};

options! {
    /// Number formats.
    pub struct Precision: "Precision" {
        /// Formats of matrix multiplications.
        recipe: Recipe = "bf16", resumable;
        /// Format of the gradients in backward matrix multiplications. Null follows the recipe: E5M2 with `fp8_hybrid`,
        /// which accepts every value; other recipes accept only the format of the weights.
        gradient_dtype: Option<MatmulDtype> = null;
        /// Format of the master weights that the optimizer updates; the weights are rounded from them. `auto` is the
        /// weights' own format: there are no separate master weights, and bf16 weights are updated with stochastic
        /// rounding. With `torch_dtype: float16`, and for adapters in float16, it is always float32.
        master_dtype: Setting<Dtype> = auto;
        /// Format in which gradients are accumulated over micro-batches.
        grad_accumulation_dtype: Dtype = "float32", pending;
        /// Allow computing rotary angles inside the kernel that applies them. The engine always does this and stores no
        /// tables.
        use_fused_rope: bool = false, resumable;
        /// Number of steps whose largest magnitudes set the scales of `fp8_hybrid`. 0 uses the magnitudes of the
        /// tensors themselves, which reads each of them once more.
        fp8_amax_history: u32 = 1024, resumable;
        /// Implementation of products of `nvfp4` codes; the codes are the same. `cutlass` and `cudnn` need a GPU with
        /// the tensor cores of Blackwell, on which neither has run yet; on a CPU, and for the matrices of experts, they
        /// are `emulate`.
        fp4_backend: Fp4Backend = "cutlass", resumable;
        /// Round gradients up or down at random with `nvfp4`, so that their expected values are right.
        fp4_stochastic_rounding: bool = true;
        /// Train for a scheme of `surogate quantize`: the matrices of the layers, and where the scheme quantizes them the activations,
        /// are rounded to its codes in every product, and gradients go straight through. Quantizing the result has the
        /// values that were trained. Needs `lora: false` and `recipe: bf16`.
        quantize_aware: Option<QuantizeAware> = null;
        /// Elements of a row that share a scale, of `quantize_aware: w4a16` and `w8a16`, rows and columns of a tile of `fp8-block`;
        /// -1: the whole row. Null is what `surogate quantize` takes without `--group-size`.
        quantize_aware_group_size: Option<i64> = null, min = -1;
        /// Groups of `quantize_aware: w4a16` and `w8a16` have a zero point.
        quantize_aware_asymmetric: bool = false;
        /// Number of first layers that are not quantized by the recipe.
        skip_quant_first_layers: u32 = 0;
        /// Number of last layers that are not quantized by the recipe.
        skip_quant_last_layers: u32 = 0;
    }
}

choices! {
    /// Formats of matrix multiplications, forward and backward.
    pub enum Recipe {
        /// The weights' own format, on any device.
        Bf16 = "bf16",
        /// FP8: E4M3 forward, E5M2 backward. Ada, Hopper, Blackwell.
        Fp8Hybrid = "fp8_hybrid",
        /// FP4: E2M1 with block scales. Blackwell; with `fp4_backend: emulate` any device.
        Nvfp4 = "nvfp4",
    }
}

impl Recipe {
    /// True if products read codes of weights, which the recipe makes next to the weights.
    pub const fn quantises_weights(self) -> bool {
        match self {
            Recipe::Bf16 => false,
            Recipe::Fp8Hybrid | Recipe::Nvfp4 => true,
        }
    }
}

choices! {
    /// Number formats that a model is trained for: the schemes of `surogate quantize`.
    pub enum QuantizeAware {
        /// FP8 with a scale for each row, and for each token of activations.
        Fp8Dynamic = "fp8-dynamic",
        /// FP8 with a scale for each matrix; activations with one for all that a matrix is multiplied with.
        Fp8Static = "fp8-static",
        /// FP8 with a scale for tiles of 128 by 128, and for 128 elements of a token.
        Fp8Block = "fp8-block",
        /// 8-bit integers with a scale for each row, and for each token of activations.
        Int8W8A8 = "int8-w8a8",
        /// 4-bit integers with a scale for a group of a row.
        W4A16 = "w4a16",
        /// 8-bit integers with a scale for a group of a row.
        W8A16 = "w8a16",
        /// FP4 with a scale for 16 elements of a row and for 16 of a token, and one for each tensor.
        Nvfp4 = "nvfp4",
        /// The weights of `nvfp4`.
        Nvfp4A16 = "nvfp4a16",
        /// FP4 with a power of two for 32 elements of a row.
        Mxfp4A16 = "mxfp4a16",
    }
}

choices! {
    /// Implementation of FP4 matrix multiplications.
    pub enum Fp4Backend {
        /// The 4-bit tensor cores of Blackwell, through the block-scaled products of cuBLASLt.
        Cutlass = "cutlass",
        /// The same as `cutlass`: accepted for the sake of existing configurations.
        Cudnn = "cudnn",
        /// Products of the numbers that the codes stand for, in the weights' format: for judging the accuracy on any
        /// device, no faster than `bf16`.
        Emulate = "emulate",
    }
}
