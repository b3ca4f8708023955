//! The limits of libraries that run an [`crate::AttentionForward`], taken from its plans (cuDNN 9.19), and products of
//! eight and four bits: one table for the compiler, which may run where there is no library, and for the backend that
//! calls it.
//!
//! Knows layouts and architectures; neither what an attention computes nor how the library is called.

use tensor::DType;

use crate::memory::TensorRef;
use crate::target::Arch;

/// Largest head that the library's fast plans take; heads have a multiple of [`HEAD_STEP`] elements.
const MAX_HEAD_DIM: usize = 128;
const HEAD_STEP: usize = 8;

/// Alignment that the library asks of every tensor: bytes of addresses, and of strides.
pub const ALIGNMENT: usize = 16;

/// Scratch of the forward pass, an upper bound.
pub const ATTENTION_SCRATCH: usize = 8 << 10;

/// True if the library is the best attention on this architecture: its kernels are made for the tensor cores.
pub fn has_fast_attention(arch: &Arch) -> bool {
    matches!(arch, Arch::Cuda(architecture) if architecture.is_large())
}

/// True if heads of this number of elements have a fast plan.
pub const fn takes_heads_of(head_dim: usize) -> bool {
    head_dim.is_multiple_of(HEAD_STEP) && head_dim <= MAX_HEAD_DIM
}

/// True if the library reads an operand [rows, tokens, heads, head_dim] where it is: bf16, dense heads, address and
/// strides on its boundary. Arenas and buffers start on larger boundaries, so the offset suffices.
pub fn reads(operand: &TensorRef) -> bool {
    let size = DType::BF16.size();
    let aligned = |axis: usize| operand.shape[axis] == 1 || (operand.strides[axis] * size).is_multiple_of(ALIGNMENT);
    operand.dtype == DType::BF16
        && operand.strides[3] == 1
        && operand.offset.is_multiple_of(ALIGNMENT)
        && (0..3).all(aligned)
}

/// True if products of eight bits are taken: where the tensor cores have them, and with a bias in bf16 only, whatever
/// the result's type is.
pub fn multiplies_codes(arch: &Arch, bias: Option<DType>) -> bool {
    !arch.is_gpu() || arch.codes().is_some() && bias.is_none_or(|of| of == DType::BF16)
}

/// True if products of four bits with scales of blocks are taken: where the tensor cores have them, with a bias in bf16
/// only, and a result in bf16 or f32.
pub fn multiplies_blocks(arch: &Arch, bias: Option<DType>, result: DType) -> bool {
    let on_units = bias.is_none_or(|of| of == DType::BF16) && matches!(result, DType::BF16 | DType::F32);
    !arch.is_gpu() || arch.has_four_bits() && on_units
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::architecture::Architecture;
    use crate::gfx::Gfx;
    use crate::memory::ArenaId;

    #[test]
    fn codes_need_units_and_their_bias_is_bf16() {
        let of = |major, minor| Arch::Cuda(Architecture { major, minor });
        assert!([of(8, 9), of(9, 0), of(12, 0), Arch::Cpu].iter().all(|arch| multiplies_codes(arch, None)));
        assert!(![of(8, 0), of(8, 6)].iter().any(|arch| multiplies_codes(arch, None)));
        assert!(multiplies_codes(&of(9, 0), Some(DType::BF16)) && !multiplies_codes(&of(9, 0), Some(DType::F32)));
        assert!(multiplies_codes(&Arch::Rocm(Gfx::CDNA3), None) && !multiplies_codes(&Arch::Rocm(Gfx::CDNA2), None));
    }

    #[test]
    fn four_bits_need_blackwell() {
        let of = |major, minor| Arch::Cuda(Architecture { major, minor });
        assert!([of(10, 0), of(10, 3), of(12, 0)].into_iter().all(Arch::has_four_bits));
        assert!(![of(8, 9), of(9, 0), Arch::Cpu].into_iter().any(Arch::has_four_bits));
        let blackwell = |bias: Option<DType>, result: DType| multiplies_blocks(&of(10, 0), bias, result);
        assert!(multiplies_blocks(&Arch::Cpu, Some(DType::F32), DType::F16) && blackwell(None, DType::F32));
        assert!(blackwell(Some(DType::BF16), DType::BF16) && !blackwell(Some(DType::F32), DType::F32));
        assert!(!blackwell(None, DType::F16) && !multiplies_blocks(&of(9, 0), None, DType::BF16));
    }

    #[test]
    fn operands_are_bf16_on_boundaries_of_16_bytes() {
        let of = |dtype| TensorRef::dense(ArenaId(0), 256, dtype, [2, 64, 4, 64]);
        assert!(reads(&of(DType::BF16)) && !reads(&of(DType::F16)));
        assert!(!reads(&TensorRef { offset: 8, ..of(DType::BF16) }));
        let merged = |width: usize| TensorRef { strides: vec![64 * width, width, 64, 1], ..of(DType::BF16) };
        assert!(reads(&merged(512)) && !reads(&merged(516)));
        // The stride of an axis with one element means nothing.
        let single = TensorRef { shape: vec![1, 64, 4, 64], strides: vec![3, 256, 64, 1], ..of(DType::BF16) };
        assert!(reads(&single));
        assert_eq!([8, 64, 128, 60, 136].map(takes_heads_of), [true, true, true, false, false]);
    }
}
