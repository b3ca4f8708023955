//! cuBLASLt (`libcublasLt.so.13`): the matmul calls, constants and two structs. No policy.

use super::function_table;
use std::ffi::{c_char, c_int, c_void};

pub type Status = u32;
pub type Handle = *mut c_void;
pub type MatmulDescriptor = *mut c_void;
pub type MatrixLayout = *mut c_void;
pub type Preference = *mut c_void;

pub const SUCCESS: Status = 0;
/// f32 accumulation; f32 inputs are multiplied as f32 (TF32 is another compute type).
pub const COMPUTE_32F: u32 = 68;
pub const R_32F: u32 = 0;
pub const R_16F: u32 = 2;
pub const R_16BF: u32 = 14;
pub const R_8F_E4M3: u32 = 28;
pub const R_8F_E5M2: u32 = 29;
/// Two four-bit elements in a byte, the first in the low half.
pub const R_4F_E2M1: u32 = 33;
pub const EPILOGUE_BIAS: u32 = 4;
/// alpha and beta are each one f32 on the device.
pub const POINTER_MODE_DEVICE: i32 = 1;
/// The scales of a factor: one E4M3 for every 16 elements along the sum, in tiles of 128 rows by 4.
pub const SCALE_VEC16_UE4M3: i32 = 1;
/// Split-K partial sums meet in the compute type (f32), never in the output type.
pub const REDUCTION_SCHEME_COMPUTE_TYPE: u32 = 2;

/// Values of the C enumeration `cublasLtMatmulDescAttributes_t`.
pub mod descriptor_attribute {
    pub const POINTER_MODE: u32 = 2;
    pub const TRANSA: u32 = 3;
    pub const TRANSB: u32 = 4;
    pub const EPILOGUE: u32 = 7;
    pub const BIAS_POINTER: u32 = 8;
    pub const A_SCALE_POINTER: u32 = 17;
    pub const B_SCALE_POINTER: u32 = 18;
    pub const FAST_ACCUM: u32 = 25;
    pub const BIAS_DATA_TYPE: u32 = 26;
    pub const A_SCALE_MODE: u32 = 31;
    pub const B_SCALE_MODE: u32 = 32;
}

/// Values of the C enumeration `cublasLtMatrixLayoutAttribute_t`.
pub mod layout_attribute {
    pub const BATCH_COUNT: u32 = 5;
    pub const STRIDED_BATCH_OFFSET: u32 = 6;
}

/// Values of the C enumeration `cublasLtMatmulPreferenceAttributes_t`.
pub mod preference_attribute {
    pub const MAX_WORKSPACE_BYTES: u32 = 1;
    pub const REDUCTION_SCHEME_MASK: u32 = 3;
    pub const MIN_ALIGNMENT_A_BYTES: u32 = 5;
    pub const MIN_ALIGNMENT_B_BYTES: u32 = 6;
    pub const MIN_ALIGNMENT_C_BYTES: u32 = 7;
    pub const MIN_ALIGNMENT_D_BYTES: u32 = 8;
}

/// An algorithm with its configuration: opaque words that may be stored and given back.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Algorithm {
    pub data: [u64; 8],
}

/// One answer of the heuristic.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct HeuristicResult {
    pub algorithm: Algorithm,
    pub workspace_size: usize,
    pub state: Status,
    pub waves_count: f32,
    pub reserved: [c_int; 4],
}

function_table! {
    /// Entry points of the library `libcublasLt`.
    CublasLtTable:
    cublasLtCreate(*mut Handle) -> Status;
    cublasLtDestroy(Handle) -> Status;
    cublasLtGetVersion() -> usize;
    cublasLtGetStatusName(Status) -> *const c_char;
    cublasLtMatmulDescCreate(*mut MatmulDescriptor, u32, u32) -> Status;
    cublasLtMatmulDescDestroy(MatmulDescriptor) -> Status;
    cublasLtMatmulDescSetAttribute(MatmulDescriptor, u32, *const c_void, usize) -> Status;
    cublasLtMatrixLayoutCreate(*mut MatrixLayout, u32, u64, u64, i64) -> Status;
    cublasLtMatrixLayoutDestroy(MatrixLayout) -> Status;
    cublasLtMatrixLayoutSetAttribute(MatrixLayout, u32, *const c_void, usize) -> Status;
    cublasLtMatmulPreferenceCreate(*mut Preference) -> Status;
    cublasLtMatmulPreferenceDestroy(Preference) -> Status;
    cublasLtMatmulPreferenceSetAttribute(Preference, u32, *const c_void, usize) -> Status;
    cublasLtMatmulAlgoGetHeuristic(
        Handle, MatmulDescriptor, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, Preference, c_int,
        *mut HeuristicResult, *mut c_int,
    ) -> Status;
    cublasLtMatmulAlgoCheck(
        Handle, MatmulDescriptor, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, *const Algorithm,
        *mut HeuristicResult,
    ) -> Status;
    cublasLtMatmul(
        Handle, MatmulDescriptor, *const c_void, *const c_void, MatrixLayout, *const c_void, MatrixLayout,
        *const c_void, *const c_void, MatrixLayout, *mut c_void, MatrixLayout, *const Algorithm, *mut c_void, usize,
        *mut c_void,
    ) -> Status;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// The sizes in cublasLt.h: 64 bytes of algorithm, then size_t, status, float, int[4].
    #[test]
    fn structs_have_the_c_layout() {
        assert_eq!(size_of::<Algorithm>(), 64);
        assert_eq!(offset_of!(HeuristicResult, workspace_size), 64);
        assert_eq!(offset_of!(HeuristicResult, state), 72);
        assert_eq!(offset_of!(HeuristicResult, waves_count), 76);
        assert_eq!(size_of::<HeuristicResult>(), 96);
    }
}
