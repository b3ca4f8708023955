//! cuBLASLt (`libcublasLt.so.13`) and hipBLASLt (`libhipblaslt.so`): the matmul calls, the numbers of each, and two structs.
//! No policy.

use super::function_table;
use crate::vendor::Vendor;
use std::ffi::{c_char, c_int, c_void};

pub type Status = u32;
pub type Handle = *mut c_void;
pub type MatmulDescriptor = *mut c_void;
pub type MatrixLayout = *mut c_void;
pub type Preference = *mut c_void;

pub const SUCCESS: Status = 0;
pub const R_32F: u32 = 0;
pub const R_16F: u32 = 2;
pub const R_16BF: u32 = 14;
pub const R_8F_E4M3: u32 = 28;
pub const R_8F_E5M2: u32 = 29;
/// AMD's codes without infinities and negative zero, with another bias: `HIP_R_8F_E4M3_FNUZ`, `HIP_R_8F_E5M2_FNUZ`.
pub const R_8F_E4M3_FNUZ: u32 = 1000;
pub const R_8F_E5M2_FNUZ: u32 = 1001;
/// Two four-bit elements in a byte, the first in the low half.
pub const R_4F_E2M1: u32 = 33;
pub const EPILOGUE_BIAS: u32 = 4;
/// alpha and beta are each one f32 on the device.
pub const POINTER_MODE_DEVICE: i32 = 1;
/// The scales of a factor: one E4M3 for every 16 elements along the sum, in tiles of 128 rows by 4.
pub const SCALE_VEC16_UE4M3: i32 = 1;
/// Split-K partial sums meet in the compute type (f32), never in the output type.
pub const REDUCTION_SCHEME_COMPUTE_TYPE: u32 = 2;

/// The values of enumerations, which differ between the two libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// f32 accumulation; f32 inputs are multiplied as f32 (TF32 is another compute type).
    pub compute_32f: u32,
    /// The operations: as it is, transposed.
    pub operations: [i32; 2],
    pub descriptor: DescriptorAttributes,
    pub batch_count: u32,
    pub strided_batch_offset: u32,
    pub max_workspace_bytes: u32,
}

/// Numbers of the attributes that describe a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorAttributes {
    pub pointer_mode: u32,
    pub transa: u32,
    pub transb: u32,
    pub epilogue: u32,
    pub bias_pointer: u32,
    pub bias_data_type: u32,
    pub a_scale_pointer: u32,
    pub b_scale_pointer: u32,
    pub a_scale_mode: u32,
    pub b_scale_mode: u32,
}

impl Numbers {
    pub const fn of(vendor: Vendor) -> Numbers {
        match vendor {
            Vendor::Nvidia => Numbers {
                compute_32f: 68,
                operations: [0, 1],
                descriptor: DescriptorAttributes {
                    pointer_mode: 2,
                    transa: 3,
                    transb: 4,
                    epilogue: 7,
                    bias_pointer: 8,
                    bias_data_type: 26,
                    a_scale_pointer: 17,
                    b_scale_pointer: 18,
                    a_scale_mode: 31,
                    b_scale_mode: 32,
                },
                batch_count: 5,
                strided_batch_offset: 6,
                max_workspace_bytes: 1,
            },
            Vendor::Amd => Numbers {
                compute_32f: 2,
                operations: [111, 112],
                descriptor: DescriptorAttributes {
                    pointer_mode: 13,
                    transa: 0,
                    transb: 1,
                    epilogue: 2,
                    bias_pointer: 3,
                    bias_data_type: 4,
                    a_scale_pointer: 5,
                    b_scale_pointer: 6,
                    a_scale_mode: 31,
                    b_scale_mode: 32,
                },
                batch_count: 0,
                strided_batch_offset: 1,
                max_workspace_bytes: 1,
            },
        }
    }
}

/// The name of a status of hipBLASLt (`hipblasStatus_t`), which has no call for it.
pub fn hipblas_status(status: Status) -> &'static str {
    const NAMES: [&str; 12] = [
        "HIPBLAS_STATUS_SUCCESS",
        "HIPBLAS_STATUS_NOT_INITIALIZED",
        "HIPBLAS_STATUS_ALLOC_FAILED",
        "HIPBLAS_STATUS_INVALID_VALUE",
        "HIPBLAS_STATUS_MAPPING_ERROR",
        "HIPBLAS_STATUS_EXECUTION_FAILED",
        "HIPBLAS_STATUS_INTERNAL_ERROR",
        "HIPBLAS_STATUS_NOT_SUPPORTED",
        "HIPBLAS_STATUS_ARCH_MISMATCH",
        "HIPBLAS_STATUS_HANDLE_IS_NULLPTR",
        "HIPBLAS_STATUS_INVALID_ENUM",
        "HIPBLAS_STATUS_UNKNOWN",
    ];
    NAMES.get(status as usize).copied().unwrap_or("an unknown status")
}

/// Attributes that cuBLASLt alone has.
pub mod cublaslt_attribute {
    /// The attribute of a product for sums that are not promoted.
    pub const FAST_ACCUM: u32 = 25;
    /// Attributes of a preference from here on.
    pub const REDUCTION_SCHEME_MASK: u32 = 3;
    pub const MIN_ALIGNMENT_A_BYTES: u32 = 5;
    pub const MIN_ALIGNMENT_B_BYTES: u32 = 6;
    pub const MIN_ALIGNMENT_C_BYTES: u32 = 7;
    pub const MIN_ALIGNMENT_D_BYTES: u32 = 8;
}

/// An algorithm with its configuration: opaque words that may be stored and given back. hipBLASLt's fills the first three.
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

/// One answer of hipBLASLt's heuristic: `hipblasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct HipHeuristicResult {
    pub algorithm: [u64; 3],
    pub workspace_size: usize,
    pub state: Status,
    pub waves_count: f32,
    pub reserved: [c_int; 4],
}

impl From<HipHeuristicResult> for HeuristicResult {
    fn from(of: HipHeuristicResult) -> HeuristicResult {
        let mut algorithm = Algorithm::default();
        algorithm.data[..3].copy_from_slice(&of.algorithm);
        let HipHeuristicResult { workspace_size, state, waves_count, reserved, .. } = of;
        HeuristicResult { algorithm, workspace_size, state, waves_count, reserved }
    }
}

function_table! {
    /// Entry points of the libraries `libcublasLt` and `libhipblaslt`.
    CublasLtTable:
    cublasLtCreate = hipblasLtCreate(*mut Handle) -> Status;
    cublasLtDestroy = hipblasLtDestroy(Handle) -> Status;
    cublasLtGetVersion = none() -> usize;
    hipblasLtGetVersion(Handle, *mut c_int) -> Status;
    cublasLtGetStatusName = none(Status) -> *const c_char;
    cublasLtMatmulDescCreate = hipblasLtMatmulDescCreate(*mut MatmulDescriptor, u32, u32) -> Status;
    cublasLtMatmulDescDestroy = hipblasLtMatmulDescDestroy(MatmulDescriptor) -> Status;
    cublasLtMatmulDescSetAttribute = hipblasLtMatmulDescSetAttribute(MatmulDescriptor, u32, *const c_void, usize) -> Status;
    cublasLtMatrixLayoutCreate = hipblasLtMatrixLayoutCreate(*mut MatrixLayout, u32, u64, u64, i64) -> Status;
    cublasLtMatrixLayoutDestroy = hipblasLtMatrixLayoutDestroy(MatrixLayout) -> Status;
    cublasLtMatrixLayoutSetAttribute = hipblasLtMatrixLayoutSetAttribute(MatrixLayout, u32, *const c_void, usize) -> Status;
    cublasLtMatmulPreferenceCreate = hipblasLtMatmulPreferenceCreate(*mut Preference) -> Status;
    cublasLtMatmulPreferenceDestroy = hipblasLtMatmulPreferenceDestroy(Preference) -> Status;
    cublasLtMatmulPreferenceSetAttribute = hipblasLtMatmulPreferenceSetAttribute(Preference, u32, *const c_void, usize) -> Status;
    cublasLtMatmulAlgoGetHeuristic = hipblasLtMatmulAlgoGetHeuristic(
        Handle, MatmulDescriptor, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, Preference, c_int,
        *mut c_void, *mut c_int,
    ) -> Status;
    cublasLtMatmulAlgoCheck = none(
        Handle, MatmulDescriptor, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, *const Algorithm,
        *mut HeuristicResult,
    ) -> Status;
    cublasLtMatmul = hipblasLtMatmul(
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
        assert_eq!(size_of::<HipHeuristicResult>(), 56);
        assert_eq!(offset_of!(HipHeuristicResult, workspace_size), 24);
    }
}
