//! Ceilings of arithmetic by element type.

use tensor::DType;

use crate::machine::Machine;

/// Arithmetic of a type, FLOP/s.
pub(super) fn rate(dtype: Option<DType>, machine: &Machine) -> f64 {
    match dtype {
        Some(DType::BF16 | DType::F16) => machine.bf16_flops,
        Some(DType::E4M3 | DType::E5M2) => machine.fp8_flops,
        Some(DType::F64 | DType::F32 | DType::I64 | DType::I32 | DType::U8) | None => machine.f32_flops,
    }
}

/// The rate of products of a type, FLOP/s; bytes are pairs of four-bit elements.
pub(super) fn product_rate(dtype: DType, machine: &Machine) -> f64 {
    if dtype == DType::U8 { machine.fp4_flops } else { rate(Some(dtype), machine) }
}
