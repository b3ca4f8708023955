//! The instruments of one GPU, as NVIDIA's management library tells them: load, clocks, power, temperature, memory.
//!
//! Reads, and sets nothing. Knows no context, stream or program: it may be asked while any of them is busy.
#![allow(unsafe_code, reason = "calls of NVML through its function table")]

use crate::driver::text_or;
use crate::error::{Error, Result};
use crate::library::Opened;
use crate::sys::nvml::{self as sys, NvmlTable};
use program::Gauges;
use std::ffi::{CStr, c_char, c_uint};

/// The opened library.
pub struct Nvml {
    table: NvmlTable,
}

/// One GPU of it.
pub struct Instruments {
    nvml: Nvml,
    device: sys::Device,
}

// SAFETY: the library's calls may be made from any thread; a handle is valid until the library is shut down, which
// nobody here does.
unsafe impl Send for Instruments {}
// SAFETY: as above.
unsafe impl Sync for Instruments {}

impl Nvml {
    pub fn new(opened: Opened<NvmlTable>) -> Result<Nvml> {
        let nvml = Nvml { table: opened.table };
        // SAFETY: no arguments to get wrong; later calls of it only count.
        nvml.check("nvmlInit", unsafe { (nvml.table.nvmlInit_v2)() })?;
        Ok(nvml)
    }

    /// The driver's version, such as `580.159.03`.
    pub fn driver_version(&self) -> Result<String> {
        let mut text = [0 as c_char; 96];
        // SAFETY: the buffer's length is passed, and the library ends the text with NUL.
        unsafe {
            let status = (self.table.nvmlSystemGetDriverVersion)(text.as_mut_ptr(), text.len() as c_uint);
            self.check("nvmlSystemGetDriverVersion", status)?;
            Ok(text_or(text.as_ptr(), ""))
        }
    }

    /// The GPU at a place on the bus: the numbers of CUDA and of this library need not be the same.
    pub fn instruments(self, bus: &CStr) -> Result<Instruments> {
        let mut device = std::ptr::null_mut();
        // SAFETY: the text ends with NUL and the pointer is to a live local.
        let status = unsafe { (self.table.nvmlDeviceGetHandleByPciBusId_v2)(bus.as_ptr(), &mut device) };
        self.check("nvmlDeviceGetHandleByPciBusId", status)?;
        Ok(Instruments { nvml: self, device })
    }

    fn check(&self, call: &'static str, status: sys::Status) -> Result<()> {
        if status == sys::SUCCESS {
            return Ok(());
        }
        // SAFETY: the library gives a static text for every status.
        let name = unsafe { text_or((self.table.nvmlErrorString)(status), "an unknown status") };
        Err(Error::Call { call, code: status, name, detail: String::new(), context: String::new() })
    }
}

impl Instruments {
    /// What they say now. An instrument that this kind of GPU does not have is none; that none answers is an error.
    pub fn gauges(&self) -> Result<Gauges> {
        let (t, device) = (&self.nvml.table, self.device);
        let mut memory = sys::Memory::default();
        // SAFETY: the handle is valid and the pointer is to a live local.
        self.nvml.check("nvmlDeviceGetMemoryInfo", unsafe { (t.nvmlDeviceGetMemoryInfo)(device, &mut memory) })?;
        let mut load = sys::Utilization::default();
        // SAFETY: as above.
        let load = (unsafe { (t.nvmlDeviceGetUtilizationRates)(device, &mut load) } == sys::SUCCESS).then_some(load);
        let share = |percent: u32| f64::from(percent) / 100.0;
        let number = |read: &dyn Fn(*mut c_uint) -> sys::Status| {
            let mut value = 0;
            (read(&mut value) == sys::SUCCESS).then_some(f64::from(value))
        };
        // SAFETY: in all of these the handle is valid, and the pointer is to a local of `number` that is alive.
        let [clock, memory_clock, power, limit, temperature] = unsafe {
            [
                number(&|at| (t.nvmlDeviceGetClockInfo)(device, sys::clock::MULTIPROCESSOR, at)),
                number(&|at| (t.nvmlDeviceGetClockInfo)(device, sys::clock::MEMORY, at)),
                number(&|at| (t.nvmlDeviceGetPowerUsage)(device, at)),
                number(&|at| (t.nvmlDeviceGetEnforcedPowerLimit)(device, at)),
                number(&|at| (t.nvmlDeviceGetTemperature)(device, sys::TEMPERATURE_GPU, at)),
            ]
        };
        Ok(Gauges {
            utilization: load.map(|load| share(load.gpu)),
            memory_utilization: load.map(|load| share(load.memory)),
            clock,
            memory_clock,
            power: power.map(|milliwatts| milliwatts / 1e3),
            power_limit: limit.map(|milliwatts| milliwatts / 1e3),
            temperature,
            memory_used: Some(memory.used as usize),
            memory_total: Some(memory.total as usize),
        })
    }
}
