//! The CUDA driver API (`libcuda.so.1`), as far as it is used. No policy.

use super::function_table;
use std::ffi::{c_char, c_int, c_uint, c_void};

pub type Result32 = u32;
pub type DevicePointer = u64;
pub type Context = *mut c_void;
pub type Stream = *mut c_void;
pub type Event = *mut c_void;
pub type Module = *mut c_void;
pub type Function = *mut c_void;
pub type Graph = *mut c_void;
pub type GraphExec = *mut c_void;

pub const SUCCESS: Result32 = 0;
pub const ERROR_OUT_OF_MEMORY: Result32 = 2;
pub const ERROR_NOT_READY: Result32 = 600;
pub const ERROR_PEER_ACCESS_ALREADY_ENABLED: Result32 = 704;
pub const STREAM_NON_BLOCKING: c_uint = 1;
pub const EVENT_DEFAULT: c_uint = 0;
pub const EVENT_DISABLE_TIMING: c_uint = 2;
pub const HOST_ALLOC_DEVICE_MAP: c_uint = 2;
pub const HOST_ALLOC_WRITE_COMBINED: c_uint = 4;
pub const CAPTURE_MODE_THREAD_LOCAL: c_uint = 1;

/// Values of the C enumeration `CUdevice_attribute`.
pub mod attribute {
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: u32 = 97;
    pub const CLOCK_RATE_KHZ: u32 = 13;
    pub const MULTIPROCESSOR_COUNT: u32 = 16;
    pub const COMPUTE_CAPABILITY_MAJOR: u32 = 75;
    pub const COMPUTE_CAPABILITY_MINOR: u32 = 76;
    pub const MEMORY_CLOCK_RATE_KHZ: u32 = 36;
    pub const GLOBAL_MEMORY_BUS_WIDTH_BITS: u32 = 37;
    pub const L2_CACHE_SIZE: u32 = 38;
}

/// Values of the C enumeration `CUfunction_attribute`.
pub mod function_attribute {
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: u32 = 8;
}

/// 8-byte words of a `CUtensorMap`.
pub const TENSOR_MAP_WORDS: usize = 16;

/// Values of the enumerations of `cuTensorMapEncodeTiled`.
pub mod tensor_map {
    pub const F32: u32 = 7;
    pub const BF16: u32 = 9;
    pub const NO_INTERLEAVE: u32 = 0;
    pub const SWIZZLE_128_BYTES: u32 = 3;
    pub const PROMOTE_TO_128_BYTES: u32 = 2;
    pub const ZEROS_OUTSIDE: u32 = 0;
}

/// The C struct `CUlaunchConfig`, with the fields in its order.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: Stream,
    pub attributes: *mut LaunchAttribute,
    pub attribute_count: c_uint,
}

/// `CUlaunchAttribute`: an id, and a union of 64 bytes.
#[repr(C)]
pub struct LaunchAttribute {
    pub id: c_uint,
    pub padding: c_uint,
    pub value: [c_int; 16],
}

impl LaunchAttribute {
    /// Allows the launch of the kernel before the one it follows has ended.
    pub const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;
}

function_table! {
    /// Entry points of `libcuda.so.1`; the `_v2` suffixes are part of the ABI names.
    DriverTable:
    cuInit(c_uint) -> Result32;
    cuDriverGetVersion(*mut c_int) -> Result32;
    cuGetErrorName(Result32, *mut *const c_char) -> Result32;
    cuGetErrorString(Result32, *mut *const c_char) -> Result32;
    cuDeviceGetCount(*mut c_int) -> Result32;
    cuDeviceGet(*mut c_int, c_int) -> Result32;
    cuDeviceGetName(*mut c_char, c_int, c_int) -> Result32;
    cuDeviceGetAttribute(*mut c_int, u32, c_int) -> Result32;
    cuDeviceGetPCIBusId(*mut c_char, c_int, c_int) -> Result32;
    cuDeviceTotalMem_v2(*mut usize, c_int) -> Result32;
    cuDevicePrimaryCtxRetain(*mut Context, c_int) -> Result32;
    cuDevicePrimaryCtxRelease_v2(c_int) -> Result32;
    cuCtxSetCurrent(Context) -> Result32;
    cuDeviceCanAccessPeer(*mut c_int, c_int, c_int) -> Result32;
    cuCtxEnablePeerAccess(Context, c_uint) -> Result32;
    cuMemGetInfo_v2(*mut usize, *mut usize) -> Result32;
    cuMemAlloc_v2(*mut DevicePointer, usize) -> Result32;
    cuMemFree_v2(DevicePointer) -> Result32;
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint) -> Result32;
    cuMemFreeHost(*mut c_void) -> Result32;
    cuMemHostGetDevicePointer_v2(*mut DevicePointer, *mut c_void, c_uint) -> Result32;
    cuMemcpyHtoDAsync_v2(DevicePointer, *const c_void, usize, Stream) -> Result32;
    cuMemcpyDtoHAsync_v2(*mut c_void, DevicePointer, usize, Stream) -> Result32;
    cuMemcpyDtoDAsync_v2(DevicePointer, DevicePointer, usize, Stream) -> Result32;
    cuMemcpyPeerAsync(DevicePointer, Context, DevicePointer, Context, usize, Stream) -> Result32;
    cuMemsetD8Async(DevicePointer, u8, usize, Stream) -> Result32;
    cuMemsetD16Async(DevicePointer, u16, usize, Stream) -> Result32;
    cuMemsetD32Async(DevicePointer, c_uint, usize, Stream) -> Result32;
    cuStreamCreate(*mut Stream, c_uint) -> Result32;
    cuStreamDestroy_v2(Stream) -> Result32;
    cuStreamSynchronize(Stream) -> Result32;
    cuStreamQuery(Stream) -> Result32;
    cuStreamWaitEvent(Stream, Event, c_uint) -> Result32;
    cuStreamBeginCapture_v2(Stream, c_uint) -> Result32;
    cuStreamEndCapture(Stream, *mut Graph) -> Result32;
    cuEventCreate(*mut Event, c_uint) -> Result32;
    cuEventDestroy_v2(Event) -> Result32;
    cuEventRecord(Event, Stream) -> Result32;
    cuEventSynchronize(Event) -> Result32;
    cuEventQuery(Event) -> Result32;
    cuEventElapsedTime(*mut f32, Event, Event) -> Result32;
    cuModuleLoadData(*mut Module, *const c_void) -> Result32;
    cuModuleUnload(Module) -> Result32;
    cuModuleGetFunction(*mut Function, Module, *const c_char) -> Result32;
    cuFuncSetAttribute(Function, u32, c_int) -> Result32;
    cuLaunchKernel(
        Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void, *mut *mut c_void,
    ) -> Result32;
    cuLaunchKernelEx(*const LaunchConfig, Function, *mut *mut c_void, *mut *mut c_void) -> Result32;
    cuTensorMapEncodeTiled(
        *mut c_void, u32, u32, DevicePointer, *const u64, *const u64, *const u32, *const u32, u32, u32, u32, u32,
    ) -> Result32;
    cuGraphGetNodes(Graph, *mut *mut c_void, *mut usize) -> Result32;
    cuGraphInstantiateWithFlags(*mut GraphExec, Graph, u64) -> Result32;
    cuGraphUpload(GraphExec, Stream) -> Result32;
    cuGraphLaunch(GraphExec, Stream) -> Result32;
    cuGraphDestroy(Graph) -> Result32;
    cuGraphExecDestroy(GraphExec) -> Result32;
}
