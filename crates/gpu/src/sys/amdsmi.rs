//! AMD's management library (`libamd_smi.so`), as far as it is used, with the structs of ROCm 7 and later. No policy.

use super::function_table;
use std::ffi::{c_char, c_void};

pub type Status = u32;
pub type Processor = *mut c_void;

pub const SUCCESS: Status = 0;
/// `AMDSMI_INIT_AMD_GPUS`.
pub const INIT_GPUS: u64 = 2;
pub const CLOCK_GFX: u32 = 0;
pub const CLOCK_MEMORY: u32 = 4;
/// `AMDSMI_TEMPERATURE_TYPE_HOTSPOT`, the hottest place of the die.
pub const TEMPERATURE_HOTSPOT: u32 = 1;
pub const TEMPERATURE_CURRENT: u32 = 0;

/// `amdsmi_engine_usage_t`, in percent.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct EngineUsage {
    pub gfx: u32,
    pub memory: u32,
    pub media: u32,
    reserved: [u32; 13],
}

/// `amdsmi_clk_info_t`, in MHz.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Clock {
    pub now: u32,
    pub least: u32,
    pub most: u32,
    pub locked: u8,
    pub deep_sleep: u8,
    reserved: [u32; 4],
}

/// `amdsmi_power_info_t`, in W and mV.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Power {
    pub socket: u64,
    pub current_socket: u32,
    pub average_socket: u32,
    pub gfx_voltage: u64,
    pub soc_voltage: u64,
    pub memory_voltage: u64,
    pub limit: u32,
    pub board: u32,
    reserved: [u64; 18],
}

/// `amdsmi_vram_usage_t`, in MiB.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct MemoryUsage {
    pub total: u32,
    pub used: u32,
    reserved: [u32; 2],
}

/// `amdsmi_power_cap_info_t`, in µW.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct PowerCap {
    pub cap: u64,
    pub default_cap: u64,
    pub dpm_cap: u64,
    pub least: u64,
    pub most: u64,
    reserved: [u64; 3],
}

/// `amdsmi_driver_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DriverInfo {
    pub version: [c_char; 256],
    pub date: [c_char; 256],
    pub name: [c_char; 256],
}

function_table! {
    /// Entry points of `libamd_smi.so`. A bus address is passed as its bits: function 3, device 5, bus 8, domain 48.
    AmdSmiTable:
    amdsmi_init(u64) -> Status;
    amdsmi_status_code_to_string(Status, *mut *const c_char) -> Status;
    amdsmi_get_processor_handle_from_bdf(u64, *mut Processor) -> Status;
    amdsmi_get_gpu_activity(Processor, *mut EngineUsage) -> Status;
    amdsmi_get_clock_info(Processor, u32, *mut Clock) -> Status;
    amdsmi_get_power_info(Processor, *mut Power) -> Status;
    amdsmi_get_power_cap_info(Processor, u32, *mut PowerCap) -> Status;
    amdsmi_get_temp_metric(Processor, u32, u32, *mut i64) -> Status;
    amdsmi_get_gpu_vram_usage(Processor, *mut MemoryUsage) -> Status;
    amdsmi_get_gpu_driver_info(Processor, *mut DriverInfo) -> Status;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_have_the_layout_of_the_header() {
        assert_eq!((size_of::<EngineUsage>(), size_of::<Clock>(), size_of::<Power>()), (64, 32, 192));
        assert_eq!((size_of::<MemoryUsage>(), size_of::<PowerCap>(), size_of::<DriverInfo>()), (16, 64, 768));
    }
}
