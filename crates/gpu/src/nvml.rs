//! The sensors of one GPU through NVML: utilization, clocks, power, temperature, memory.
//!
//! Only reads. Knows no context, stream or program: it may be called while any of them is busy.
#![allow(unsafe_code, reason = "calls of NVML through its function table")]

use crate::driver::text_or;
use crate::error::{Error, Result};
use crate::library::Opened;
use crate::sys::nvml::{self as sys, NvmlTable};
use program::Gauges;
use std::ffi::{CStr, c_char, c_uint};

/// The function table of the loaded NVML library.
pub struct Nvml {
    table: NvmlTable,
}

/// The sensors of one GPU.
pub struct Instruments {
    nvml: Nvml,
    device: sys::Device,
}

// SAFETY: the library's calls may be made from any thread; a handle is valid until the library is shut down, which
// no one here does.
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

    /// Returns the GPU at a bus address: the numbers of CUDA and of this library need not be the same.
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
    /// Reads the sensors. A sensor that this kind of GPU lacks is `None`; it is an error if none answers.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::{Search, open_nvml};
    use std::process::Command;

    /// The source of a library with the calls of the real one: GPU 0000:01:00.0, which has no clock of its memory.
    const STANDING_IN: &str = r#"
#include <string.h>
typedef struct { unsigned gpu, memory; } load_t;
typedef struct { unsigned long long total, free, used; } memory_t;
static int gpu;
unsigned nvmlInit_v2(void) { return 0; }
const char *nvmlErrorString(unsigned status) { return status == 3 ? "Not Supported" : "Not Found"; }
unsigned nvmlSystemGetDriverVersion(char *text, unsigned length) { strncpy(text, "580.65.06", length); return 0; }
unsigned nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
  *device = &gpu;
  return strcmp(bus, "0000:01:00.0") ? 6 : 0;
}
unsigned nvmlDeviceGetUtilizationRates(void *device, load_t *of) { of->gpu = 97; of->memory = 61; return device != &gpu; }
unsigned nvmlDeviceGetClockInfo(void *device, unsigned which, unsigned *mhz) { *mhz = 1755; return which == 1 ? 0 : 3; }
unsigned nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = 650500; return 0; }
unsigned nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) { *milliwatts = 700000; return 0; }
unsigned nvmlDeviceGetTemperature(void *device, unsigned which, unsigned *degrees) { *degrees = which ? 0 : 62; return 0; }
unsigned nvmlDeviceGetMemoryInfo(void *device, memory_t *of) {
  of->total = 150000000000ull; of->free = 100000000000ull; of->used = 50000000000ull;
  return 0;
}
"#;

    #[test]
    fn the_instruments_of_the_right_gpu_are_read_with_their_units() {
        let place = tempfile::tempdir().unwrap();
        let (source, library) = (place.path().join("nvml.c"), place.path().join("libnvidia-ml.so.1"));
        std::fs::write(&source, STANDING_IN).unwrap();
        let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
        assert!(made.success());
        let search = Search { named: vec![place.path().to_owned()], ..Search::default() };
        let open = || Nvml::new(open_nvml(&search).unwrap()).unwrap();
        assert_eq!(open().driver_version().unwrap(), "580.65.06");
        let expected = Gauges {
            utilization: Some(0.97),
            memory_utilization: Some(0.61),
            clock: Some(1755.0),
            memory_clock: None,
            power: Some(650.5),
            power_limit: Some(700.0),
            temperature: Some(62.0),
            memory_used: Some(50_000_000_000),
            memory_total: Some(150_000_000_000),
        };
        assert_eq!(open().instruments(c"0000:01:00.0").unwrap().gauges().unwrap(), expected);
        let error = open().instruments(c"0000:02:00.0").err().unwrap().to_string();
        assert!(error.starts_with("nvmlDeviceGetHandleByPciBusId failed with Not Found"), "{error}");
    }
}
