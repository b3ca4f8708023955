//! NVIDIA's management library (`libnvidia-ml.so.1`), which comes with the driver, as far as it is used. No policy.

use super::function_table;
use std::ffi::{c_char, c_uint, c_void};

pub type Status = u32;
pub type Device = *mut c_void;

pub const SUCCESS: Status = 0;

/// Values of the C enumeration `nvmlClockType_t`.
pub mod clock {
    pub const MULTIPROCESSOR: u32 = 1;
    pub const MEMORY: u32 = 2;
}

/// The sensor `NVML_TEMPERATURE_GPU`, on the GPU's die.
pub const TEMPERATURE_GPU: u32 = 0;

/// `nvmlUtilization_t`: percent of the time of the last sampling period.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Utilization {
    pub gpu: c_uint,
    pub memory: c_uint,
}

/// The C struct `nvmlMemory_t`, all in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Memory {
    pub total: u64,
    pub free: u64,
    pub used: u64,
}

function_table! {
    /// Entry points of `libnvidia-ml.so.1`; the `_v2` suffixes are part of the ABI names.
    NvmlTable:
    nvmlInit_v2() -> Status;
    nvmlErrorString(Status) -> *const c_char;
    nvmlSystemGetDriverVersion(*mut c_char, c_uint) -> Status;
    nvmlDeviceGetHandleByPciBusId_v2(*const c_char, *mut Device) -> Status;
    nvmlDeviceGetUtilizationRates(Device, *mut Utilization) -> Status;
    nvmlDeviceGetClockInfo(Device, u32, *mut c_uint) -> Status;
    nvmlDeviceGetPowerUsage(Device, *mut c_uint) -> Status;
    nvmlDeviceGetEnforcedPowerLimit(Device, *mut c_uint) -> Status;
    nvmlDeviceGetTemperature(Device, u32, *mut c_uint) -> Status;
    nvmlDeviceGetMemoryInfo(Device, *mut Memory) -> Status;
}
