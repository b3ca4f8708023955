//! Options of number formats: recipe, master weights, gradients.

use super::dtype::{Dtype, MatmulDtype};
use options::{Setting, choices, options};

options! {
    /// The number formats of computation.
    pub struct Precision: "Precision" {
        /// Formats of the matrix products.
        recipe: Recipe = "bf16", pending_words = &["fp8_hybrid", "nvfp4"];
        /// Format of the backward products' gradients. Null follows the recipe.
        gradient_dtype: Option<MatmulDtype> = null, pending_words = &["float8_e4m3", "float8_e5m2"];
        /// Format of the copy of the trained weights that the optimizer updates; the weights are its rounding. `auto` is
        /// their own format: there is no copy, and bf16 weights are rounded stochastically.
        master_dtype: Setting<Dtype> = auto, pending_words = &["float16"];
        /// Format in which gradients are summed over micro-batches.
        grad_accumulation_dtype: Dtype = "float32", pending;
        /// Permission to compute rotary angles inside the kernel that applies them. It always does: no tables are stored.
        use_fused_rope: bool = false, resumable;
        /// Steps over which `fp8_hybrid` looks back for the greatest value of a tensor.
        fp8_amax_history: u32 = 1024, min = 1, pending;
        /// Library of the FP4 products of `nvfp4`.
        fp4_backend: Fp4Backend = "cutlass", pending, resumable;
        /// Layers at the beginning that are not quantised.
        skip_quant_first_layers: u32 = 0, pending;
        /// Layers at the end that are not quantised.
        skip_quant_last_layers: u32 = 0, pending;
    }
}

choices! {
    /// The formats of matrix products, forward and backward.
    pub enum Recipe {
        /// The weights' own format, on any device.
        Bf16 = "bf16",
        /// FP8: E4M3 forward, E5M2 backward. Ada, Hopper, Blackwell.
        Fp8Hybrid = "fp8_hybrid",
        /// FP4: E2M1 in scaled blocks. Blackwell.
        Nvfp4 = "nvfp4",
    }
}

choices! {
    /// A library of FP4 matrix products.
    pub enum Fp4Backend {
        /// Kernels after CUTLASS.
        Cutlass = "cutlass",
        /// cuDNN.
        Cudnn = "cudnn",
    }
}
