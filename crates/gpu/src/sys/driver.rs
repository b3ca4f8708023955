//! The CUDA driver API (`libcuda.so.1`) and HIP (`libamdhip64.so`), as far as they are used. Constants are the same in both
//! but for attributes of devices. No policy.

use super::function_table;
use crate::vendor::Vendor;
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

/// Numbers of a device's attributes: `CUdevice_attribute`, `hipDeviceAttribute_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub shared_memory_per_block_optin: u32,
    pub clock_rate_khz: u32,
    pub multiprocessor_count: u32,
    pub compute_capability_major: u32,
    pub compute_capability_minor: u32,
    pub memory_clock_rate_khz: u32,
    pub global_memory_bus_width_bits: u32,
    pub l2_cache_size: u32,
}

impl Attributes {
    pub const fn of(vendor: Vendor) -> Attributes {
        match vendor {
            Vendor::Nvidia => Attributes {
                shared_memory_per_block_optin: 97,
                clock_rate_khz: 13,
                multiprocessor_count: 16,
                compute_capability_major: 75,
                compute_capability_minor: 76,
                memory_clock_rate_khz: 36,
                global_memory_bus_width_bits: 37,
                l2_cache_size: 38,
            },
            Vendor::Amd => Attributes {
                // What a block may have without asking; HIP has nothing to ask for.
                shared_memory_per_block_optin: 74,
                clock_rate_khz: 5,
                multiprocessor_count: 63,
                compute_capability_major: 23,
                compute_capability_minor: 61,
                memory_clock_rate_khz: 60,
                global_memory_bus_width_bits: 59,
                l2_cache_size: 19,
            },
        }
    }
}

/// `hipDeviceProp_tR0600`, of which only the name of the instruction set (`gcnArchName`) is read.
#[repr(C)]
pub struct HipProperties {
    before: [u64; 145],
    pub architecture: [c_char; 256],
    after: [u64; 7],
}

impl HipProperties {
    pub const EMPTY: HipProperties = HipProperties { before: [0; 145], architecture: [0; 256], after: [0; 7] };
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
    /// Entry points of `libcuda.so.1`, whose `_v2` suffixes are part of the ABI names, and of `libamdhip64.so`.
    DriverTable:
    cuInit = hipInit(c_uint) -> Result32;
    cuDriverGetVersion = hipDriverGetVersion(*mut c_int) -> Result32;
    cuGetErrorName = hipDrvGetErrorName(Result32, *mut *const c_char) -> Result32;
    cuGetErrorString = hipDrvGetErrorString(Result32, *mut *const c_char) -> Result32;
    cuDeviceGetCount = hipGetDeviceCount(*mut c_int) -> Result32;
    cuDeviceGet = hipDeviceGet(*mut c_int, c_int) -> Result32;
    cuDeviceGetName = hipDeviceGetName(*mut c_char, c_int, c_int) -> Result32;
    cuDeviceGetAttribute = hipDeviceGetAttribute(*mut c_int, u32, c_int) -> Result32;
    cuDeviceGetPCIBusId = hipDeviceGetPCIBusId(*mut c_char, c_int, c_int) -> Result32;
    cuDeviceTotalMem_v2 = hipDeviceTotalMem(*mut usize, c_int) -> Result32;
    cuDevicePrimaryCtxRetain = none(*mut Context, c_int) -> Result32;
    cuDevicePrimaryCtxRelease_v2 = none(c_int) -> Result32;
    cuCtxSetCurrent = none(Context) -> Result32;
    cuDeviceCanAccessPeer = hipDeviceCanAccessPeer(*mut c_int, c_int, c_int) -> Result32;
    cuCtxEnablePeerAccess = none(Context, c_uint) -> Result32;
    cuMemGetInfo_v2 = hipMemGetInfo(*mut usize, *mut usize) -> Result32;
    cuMemAlloc_v2 = hipMalloc(*mut DevicePointer, usize) -> Result32;
    cuMemFree_v2 = hipFree(DevicePointer) -> Result32;
    cuMemHostAlloc = hipHostMalloc(*mut *mut c_void, usize, c_uint) -> Result32;
    cuMemFreeHost = hipHostFree(*mut c_void) -> Result32;
    cuMemHostGetDevicePointer_v2 = hipHostGetDevicePointer(*mut DevicePointer, *mut c_void, c_uint) -> Result32;
    cuMemcpyHtoDAsync_v2 = hipMemcpyHtoDAsync(DevicePointer, *const c_void, usize, Stream) -> Result32;
    cuMemcpyDtoHAsync_v2 = hipMemcpyDtoHAsync(*mut c_void, DevicePointer, usize, Stream) -> Result32;
    cuMemcpyDtoDAsync_v2 = hipMemcpyDtoDAsync(DevicePointer, DevicePointer, usize, Stream) -> Result32;
    cuMemcpyPeerAsync = none(DevicePointer, Context, DevicePointer, Context, usize, Stream) -> Result32;
    cuMemsetD8Async = hipMemsetD8Async(DevicePointer, u8, usize, Stream) -> Result32;
    cuMemsetD16Async = hipMemsetD16Async(DevicePointer, u16, usize, Stream) -> Result32;
    cuMemsetD32Async = hipMemsetD32Async(DevicePointer, c_uint, usize, Stream) -> Result32;
    cuStreamCreate = hipStreamCreateWithFlags(*mut Stream, c_uint) -> Result32;
    cuStreamDestroy_v2 = hipStreamDestroy(Stream) -> Result32;
    cuStreamSynchronize = hipStreamSynchronize(Stream) -> Result32;
    cuStreamQuery = hipStreamQuery(Stream) -> Result32;
    cuStreamWaitEvent = hipStreamWaitEvent(Stream, Event, c_uint) -> Result32;
    cuStreamBeginCapture_v2 = hipStreamBeginCapture(Stream, c_uint) -> Result32;
    cuStreamEndCapture = hipStreamEndCapture(Stream, *mut Graph) -> Result32;
    cuEventCreate = hipEventCreateWithFlags(*mut Event, c_uint) -> Result32;
    cuEventDestroy_v2 = hipEventDestroy(Event) -> Result32;
    cuEventRecord = hipEventRecord(Event, Stream) -> Result32;
    cuEventSynchronize = hipEventSynchronize(Event) -> Result32;
    cuEventQuery = hipEventQuery(Event) -> Result32;
    cuEventElapsedTime = hipEventElapsedTime(*mut f32, Event, Event) -> Result32;
    cuModuleLoadData = hipModuleLoadData(*mut Module, *const c_void) -> Result32;
    cuModuleUnload = hipModuleUnload(Module) -> Result32;
    cuModuleGetFunction = hipModuleGetFunction(*mut Function, Module, *const c_char) -> Result32;
    cuFuncSetAttribute = none(Function, u32, c_int) -> Result32;
    cuLaunchKernel = hipModuleLaunchKernel(
        Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void, *mut *mut c_void,
    ) -> Result32;
    cuLaunchKernelEx = none(*const LaunchConfig, Function, *mut *mut c_void, *mut *mut c_void) -> Result32;
    cuTensorMapEncodeTiled = none(
        *mut c_void, u32, u32, DevicePointer, *const u64, *const u64, *const u32, *const u32, u32, u32, u32, u32,
    ) -> Result32;
    cuGraphGetNodes = hipGraphGetNodes(Graph, *mut *mut c_void, *mut usize) -> Result32;
    cuGraphInstantiateWithFlags = hipGraphInstantiateWithFlags(*mut GraphExec, Graph, u64) -> Result32;
    cuGraphUpload = hipGraphUpload(GraphExec, Stream) -> Result32;
    cuGraphLaunch = hipGraphLaunch(GraphExec, Stream) -> Result32;
    cuGraphDestroy = hipGraphDestroy(Graph) -> Result32;
    cuGraphExecDestroy = hipGraphExecDestroy(GraphExec) -> Result32;
    hipSetDevice(c_int) -> Result32;
    hipDeviceEnablePeerAccess(c_int, c_uint) -> Result32;
    hipMemcpyPeerAsync(DevicePointer, c_int, DevicePointer, c_int, usize, Stream) -> Result32;
    hipGetDevicePropertiesR0600(*mut HipProperties, c_int) -> Result32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_properties_of_hip_have_the_layout_of_its_header() {
        assert_eq!((size_of::<HipProperties>(), std::mem::offset_of!(HipProperties, architecture)), (1472, 1160));
    }
}
