//! Element types as words of the configuration. What a type means for storage is decided by the tensor crate.

use options::choices;

choices! {
    /// An element type of stored tensors.
    pub enum Dtype {
        /// 32-bit IEEE.
        Float32 = "float32" | "fp32",
        /// 16-bit with the range of float32.
        BFloat16 = "bfloat16" | "bf16",
        /// 16-bit IEEE.
        Float16 = "float16" | "fp16",
    }
}

choices! {
    /// An element type of matrix multiplications in the backward pass.
    pub enum MatmulDtype {
        /// 16-bit with the range of float32.
        BFloat16 = "bfloat16" | "bf16",
        /// 8-bit, 3 mantissa bits.
        Float8E4M3 = "float8_e4m3" | "e4m3",
        /// 8-bit, 2 mantissa bits.
        Float8E5M2 = "float8_e5m2" | "e5m2",
    }
}
