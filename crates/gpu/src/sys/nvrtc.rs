//! NVRTC (`libnvrtc.so.13`): the runtime compiler's calls. No policy.

use super::function_table;
use std::ffi::{c_char, c_int, c_void};

pub type Status = u32;
pub type Program = *mut c_void;

pub const SUCCESS: Status = 0;
pub const ERROR_COMPILATION: Status = 6;

function_table! {
    /// Entry points of the library `libnvrtc`.
    NvrtcTable:
    nvrtcVersion = hiprtcVersion(*mut c_int, *mut c_int) -> Status;
    nvrtcGetErrorString = hiprtcGetErrorString(Status) -> *const c_char;
    nvrtcCreateProgram = hiprtcCreateProgram(
        *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
    ) -> Status;
    nvrtcDestroyProgram = hiprtcDestroyProgram(*mut Program) -> Status;
    nvrtcCompileProgram = hiprtcCompileProgram(Program, c_int, *const *const c_char) -> Status;
    nvrtcGetCUBINSize = hiprtcGetCodeSize(Program, *mut usize) -> Status;
    nvrtcGetCUBIN = hiprtcGetCode(Program, *mut c_char) -> Status;
    nvrtcGetPTXSize = none(Program, *mut usize) -> Status;
    nvrtcGetPTX = none(Program, *mut c_char) -> Status;
    nvrtcGetProgramLogSize = hiprtcGetProgramLogSize(Program, *mut usize) -> Status;
    nvrtcGetProgramLog = hiprtcGetProgramLog(Program, *mut c_char) -> Status;
}
