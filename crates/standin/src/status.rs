//! Status codes with the names that each vendor gives them. CUDA's and HIP's numbers are the same.

use std::ffi::c_char;

use gpu::Vendor;

pub const SUCCESS: u32 = 0;
pub const INVALID_VALUE: u32 = 1;
pub const OUT_OF_MEMORY: u32 = 2;
pub const INVALID_HANDLE: u32 = 400;
pub const NOT_FOUND: u32 = 500;
pub const NOT_READY: u32 = 600;
pub const ILLEGAL_ADDRESS: u32 = 700;
pub const LAUNCH_FAILED: u32 = 719;
pub const CAPTURE_UNSUPPORTED: u32 = 900;
pub const CAPTURE_UNJOINED: u32 = 904;
pub const CAPTURE_ISOLATION: u32 = 905;

/// Returns the name of a status; null for one that is not known.
pub fn name(vendor: Vendor, status: u32) -> *const c_char {
    let names = match status {
        INVALID_VALUE => [c"CUDA_ERROR_INVALID_VALUE", c"hipErrorInvalidValue"],
        OUT_OF_MEMORY => [c"CUDA_ERROR_OUT_OF_MEMORY", c"hipErrorOutOfMemory"],
        INVALID_HANDLE => [c"CUDA_ERROR_INVALID_HANDLE", c"hipErrorInvalidHandle"],
        NOT_FOUND => [c"CUDA_ERROR_NOT_FOUND", c"hipErrorNotFound"],
        ILLEGAL_ADDRESS => [c"CUDA_ERROR_ILLEGAL_ADDRESS", c"hipErrorIllegalAddress"],
        LAUNCH_FAILED => [c"CUDA_ERROR_LAUNCH_FAILED", c"hipErrorLaunchFailure"],
        CAPTURE_UNSUPPORTED => [c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"hipErrorStreamCaptureUnsupported"],
        CAPTURE_UNJOINED => [c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"hipErrorStreamCaptureUnjoined"],
        CAPTURE_ISOLATION => [c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"hipErrorStreamCaptureIsolation"],
        _ => return std::ptr::null(),
    };
    names[(vendor == Vendor::Amd) as usize].as_ptr()
}
