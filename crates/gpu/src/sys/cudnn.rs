//! cuDNN's backend-descriptor API (`libcudnn.so.9`) and the constants of the graphs built here. No policy.

use super::function_table;
use std::ffi::{c_char, c_void};

pub type Status = u32;
pub type Handle = *mut c_void;
pub type Descriptor = *mut c_void;

pub const SUCCESS: Status = 0;
pub const HEURISTIC_MODE_A: u32 = 3;

/// Values of the C enumeration `cudnnBackendDescriptorType_t`.
pub mod descriptor {
    pub const POINTWISE: u32 = 0;
    pub const ENGINECFG: u32 = 3;
    pub const ENGINEHEUR: u32 = 4;
    pub const EXECUTION_PLAN: u32 = 5;
    pub const OPERATION_POINTWISE: u32 = 13;
    pub const OPERATIONGRAPH: u32 = 15;
    pub const VARIANT_PACK: u32 = 16;
    pub const TENSOR: u32 = 17;
    pub const MATMUL: u32 = 18;
    pub const OPERATION_MATMUL: u32 = 19;
    pub const REDUCTION: u32 = 21;
    pub const OPERATION_REDUCTION: u32 = 22;
    pub const DEVICEPROP: u32 = 38;
}

/// Values of the C enumeration `cudnnBackendAttributeName_t`.
pub mod attribute {
    pub const POINTWISE_MODE: u32 = 0;
    pub const POINTWISE_MATH_PREC: u32 = 1;
    pub const POINTWISE_AXIS: u32 = 9;
    pub const ENGINEHEUR_MODE: u32 = 200;
    pub const ENGINEHEUR_OPERATION_GRAPH: u32 = 201;
    pub const ENGINEHEUR_RESULTS: u32 = 202;
    pub const ENGINEHEUR_DEVICEPROP: u32 = 204;
    pub const EXECUTION_PLAN_HANDLE: u32 = 400;
    pub const EXECUTION_PLAN_ENGINE_CONFIG: u32 = 401;
    pub const EXECUTION_PLAN_WORKSPACE_SIZE: u32 = 402;
    pub const EXECUTION_PLAN_JSON_REPRESENTATION: u32 = 405;
    pub const EXECUTION_PLAN_DEVICEPROP: u32 = 407;
    pub const OPERATION_POINTWISE_PW_DESCRIPTOR: u32 = 750;
    pub const OPERATION_POINTWISE_XDESC: u32 = 751;
    pub const OPERATION_POINTWISE_BDESC: u32 = 752;
    pub const OPERATION_POINTWISE_YDESC: u32 = 753;
    pub const OPERATION_POINTWISE_TDESC: u32 = 758;
    pub const OPERATIONGRAPH_HANDLE: u32 = 800;
    pub const OPERATIONGRAPH_OPS: u32 = 801;
    pub const TENSOR_BYTE_ALIGNMENT: u32 = 900;
    pub const TENSOR_DATA_TYPE: u32 = 901;
    pub const TENSOR_DIMENSIONS: u32 = 902;
    pub const TENSOR_STRIDES: u32 = 903;
    pub const TENSOR_UNIQUE_ID: u32 = 906;
    pub const TENSOR_IS_VIRTUAL: u32 = 907;
    pub const TENSOR_IS_BY_VALUE: u32 = 908;
    pub const VARIANT_PACK_UNIQUE_IDS: u32 = 1000;
    pub const VARIANT_PACK_DATA_POINTERS: u32 = 1001;
    pub const VARIANT_PACK_WORKSPACE: u32 = 1003;
    pub const MATMUL_COMP_TYPE: u32 = 1500;
    pub const OPERATION_MATMUL_ADESC: u32 = 1520;
    pub const OPERATION_MATMUL_BDESC: u32 = 1521;
    pub const OPERATION_MATMUL_CDESC: u32 = 1522;
    pub const OPERATION_MATMUL_DESC: u32 = 1523;
    pub const REDUCTION_OPERATOR: u32 = 1600;
    pub const REDUCTION_COMP_TYPE: u32 = 1601;
    pub const OPERATION_REDUCTION_XDESC: u32 = 1610;
    pub const OPERATION_REDUCTION_YDESC: u32 = 1611;
    pub const OPERATION_REDUCTION_DESC: u32 = 1612;
    pub const DEVICEPROP_JSON_REPRESENTATION: u32 = 2702;
}

/// Values of the C enumeration `cudnnBackendAttributeType_t`.
pub mod value_type {
    pub const HANDLE: u32 = 0;
    pub const DATA_TYPE: u32 = 1;
    pub const BOOLEAN: u32 = 2;
    pub const INT64: u32 = 3;
    pub const VOID_PTR: u32 = 6;
    pub const HEUR_MODE: u32 = 8;
    pub const POINTWISE_MODE: u32 = 14;
    pub const BACKEND_DESCRIPTOR: u32 = 15;
    pub const REDUCTION_OPERATOR: u32 = 18;
    pub const CHAR: u32 = 24;
}

/// Values of the C enumeration `cudnnDataType_t`.
pub mod data_type {
    pub const FLOAT: u32 = 0;
    pub const INT32: u32 = 4;
    pub const BFLOAT16: u32 = 9;
    pub const INT64: u32 = 10;
    pub const BOOLEAN: u32 = 11;
}

/// Values of the C enumeration `cudnnPointwiseMode_t`.
pub mod pointwise {
    pub const ADD: u32 = 0;
    pub const MUL: u32 = 1;
    pub const DIV: u32 = 6;
    pub const SUB: u32 = 9;
    pub const EXP: u32 = 13;
    pub const LOG: u32 = 15;
    pub const CMP_GE: u32 = 303;
    pub const GEN_INDEX: u32 = 501;
    pub const BINARY_SELECT: u32 = 601;
}

/// Values of the C enumeration `cudnnReduceTensorOp_t`.
pub mod reduction {
    pub const ADD: u32 = 0;
    pub const MAX: u32 = 3;
}

function_table! {
    /// Entry points of the library `libcudnn`.
    CudnnTable:
    cudnnGetVersion() -> usize;
    cudnnGetErrorString(Status) -> *const c_char;
    cudnnGetLastErrorString(*mut c_char, usize);
    cudnnCreate(*mut Handle) -> Status;
    cudnnDestroy(Handle) -> Status;
    cudnnSetStream(Handle, *mut c_void) -> Status;
    cudnnBackendCreateDescriptor(u32, *mut Descriptor) -> Status;
    cudnnBackendDestroyDescriptor(Descriptor) -> Status;
    cudnnBackendSetAttribute(Descriptor, u32, u32, i64, *const c_void) -> Status;
    cudnnBackendGetAttribute(Descriptor, u32, u32, i64, *mut i64, *mut c_void) -> Status;
    cudnnBackendFinalize(Descriptor) -> Status;
    cudnnBackendExecute(Handle, Descriptor, Descriptor) -> Status;
}
