//! The instruments of AMD GPUs, by AMD SMI. Knows no context, stream or program: it may be called while any of them is busy.
#![allow(unsafe_code, reason = "calls of AMD SMI through its function table")]

use crate::driver::text_or;
use crate::error::{Error, Result};
use crate::library::Opened;
use crate::sys::amdsmi::{self as sys, AmdSmiTable};
use program::Gauges;
use std::ffi::{CStr, c_char};

/// The function table of the loaded AMD SMI library.
pub struct AmdSmi {
    table: AmdSmiTable,
}

/// The sensors of one GPU.
pub struct AmdInstruments {
    library: AmdSmi,
    processor: sys::Processor,
}

// SAFETY: the library locks its calls, which may be made from any thread; a handle is valid until the library is shut
// down, which no one here does.
unsafe impl Send for AmdInstruments {}
// SAFETY: as above.
unsafe impl Sync for AmdInstruments {}

/// Returns the bits of a bus address such as `0000:01:00.0`: function 3, device 5, bus 8, domain from bit 16 on.
fn bits(bus: &str) -> Option<u64> {
    let (rest, function) = bus.split_once('.')?;
    let mut parts = rest.split(':').map(|part| u64::from_str_radix(part, 16).ok());
    let (domain, bus, device) = (parts.next()??, parts.next()??, parts.next()??);
    let function = u64::from_str_radix(function, 16).ok()?;
    let fits = function < 8 && device < 32 && bus < 256 && parts.next().is_none();
    fits.then_some(domain << 16 | bus << 8 | device << 3 | function)
}

impl AmdSmi {
    pub fn new(opened: Opened<AmdSmiTable>) -> Result<AmdSmi> {
        let library = AmdSmi { table: opened.table };
        // SAFETY: no pointers; later calls of it only count.
        library.check("amdsmi_init", unsafe { (library.table.amdsmi_init)(sys::INIT_GPUS) })?;
        Ok(library)
    }

    /// Returns the GPU at a bus address.
    pub fn instruments(self, bus: &CStr) -> Result<AmdInstruments> {
        let address = bus.to_string_lossy();
        let bits = bits(&address).ok_or_else(|| Error::Unsupported {
            what: format!("the GPU at {address}"),
            reason: "its bus address is not in the form 0000:01:00.0".into(),
            context: String::new(),
        })?;
        let mut processor = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let status = unsafe { (self.table.amdsmi_get_processor_handle_from_bdf)(bits, &mut processor) };
        self.check("amdsmi_get_processor_handle_from_bdf", status)?;
        Ok(AmdInstruments { library: self, processor })
    }

    fn check(&self, call: &'static str, status: sys::Status) -> Result<()> {
        if status == sys::SUCCESS {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the library gives a static text for every status it knows, and leaves null otherwise.
        let name = unsafe {
            (self.table.amdsmi_status_code_to_string)(status, &mut name);
            text_or(name, "an unknown status")
        };
        Err(Error::Call { call, code: status, name, detail: String::new(), context: String::new() })
    }
}

impl AmdInstruments {
    /// Reads the sensors. A sensor that this kind of GPU lacks is `None`; it is an error if none answers.
    pub fn gauges(&self) -> Result<Gauges> {
        let (t, processor) = (&self.library.table, self.processor);
        let (mut memory, mut load) = (sys::MemoryUsage::default(), sys::EngineUsage::default());
        // SAFETY: in all calls the handle is valid and the pointers are to live locals.
        let status = unsafe { (t.amdsmi_get_gpu_vram_usage)(processor, &mut memory) };
        self.library.check("amdsmi_get_gpu_vram_usage", status)?;
        // SAFETY: as above.
        let load = (unsafe { (t.amdsmi_get_gpu_activity)(processor, &mut load) } == sys::SUCCESS).then_some(load);
        let clock = |which: u32| {
            let mut of = sys::Clock::default();
            // SAFETY: as above.
            let status = unsafe { (t.amdsmi_get_clock_info)(processor, which, &mut of) };
            (status == sys::SUCCESS).then_some(f64::from(of.now))
        };
        let (mut power, mut cap) = (sys::Power::default(), sys::PowerCap::default());
        // SAFETY: as above.
        let (power, cap) = unsafe {
            let power = ((t.amdsmi_get_power_info)(processor, &mut power) == sys::SUCCESS).then_some(power);
            let cap = ((t.amdsmi_get_power_cap_info)(processor, 0, &mut cap) == sys::SUCCESS).then_some(cap);
            (power, cap)
        };
        let mut degrees = 0;
        let (which, now) = (sys::TEMPERATURE_HOTSPOT, sys::TEMPERATURE_CURRENT);
        // SAFETY: as above.
        let answered = unsafe { (t.amdsmi_get_temp_metric)(processor, which, now, &mut degrees) } == sys::SUCCESS;
        // A sensor that is not there has all bits set.
        let share = |percent: u32| (percent <= 100).then(|| f64::from(percent) / 100.0);
        let watts =
            |of: sys::Power| [of.current_socket, of.average_socket].into_iter().find(|w| *w != 0 && *w < 65_535);
        let mebibytes = |count: u32| Some((count as usize) << 20);
        Ok(Gauges {
            utilization: load.and_then(|load| share(load.gfx)),
            memory_utilization: load.and_then(|load| share(load.memory)),
            clock: clock(sys::CLOCK_GFX),
            memory_clock: clock(sys::CLOCK_MEMORY),
            power: power.and_then(watts).map(f64::from),
            power_limit: cap.filter(|cap| cap.cap > 0).map(|cap| cap.cap as f64 / 1e6),
            temperature: answered.then_some(degrees as f64),
            memory_used: mebibytes(memory.used),
            memory_total: mebibytes(memory.total),
        })
    }

    /// The version of the GPU's kernel driver.
    pub fn driver_version(&self) -> Result<String> {
        let mut info = Box::new(sys::DriverInfo { version: [0; 256], date: [0; 256], name: [0; 256] });
        // SAFETY: the handle is valid and the pointer is to a live local; the library ends its texts with NUL.
        unsafe {
            let status = (self.library.table.amdsmi_get_gpu_driver_info)(self.processor, &mut *info);
            self.library.check("amdsmi_get_gpu_driver_info", status)?;
            Ok(text_or(info.version.as_ptr(), ""))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::{Search, open_amdsmi};
    use crate::vendor::Vendor;
    use std::process::Command;

    #[test]
    fn bus_addresses_become_bits() {
        assert_eq!(bits("0000:01:00.0"), Some(0x100));
        assert_eq!(bits("0001:e3:1f.7"), Some(0x1_0000 | 0xe300 | 0x1f << 3 | 7));
        for wrong in ["", "01:00.0", "0000:01:00", "0000:01:20.0", "0000:01:00.8", "0:0:0:0.0"] {
            assert_eq!(bits(wrong), None, "{wrong}");
        }
    }

    /// The source of a library with the calls of the real one: GPU 0000:01:00.0, which has no clock of its memory.
    const STANDING_IN: &str = r#"
typedef unsigned u; typedef unsigned long long ull;
static int gpu;
u amdsmi_init(ull flags) { return flags != 2; }
u amdsmi_status_code_to_string(u status, const char **text) { *text = status == 2 ? "NOT_SUPPORTED" : "NOT_FOUND"; return 0; }
u amdsmi_get_processor_handle_from_bdf(ull bdf, void **handle) { *handle = &gpu; return bdf == 0x100 ? 0 : 31; }
u amdsmi_get_gpu_activity(void *h, u *of) { of[0] = 97; of[1] = 61; of[2] = 0; return h != &gpu; }
u amdsmi_get_clock_info(void *h, u which, u *of) { of[0] = 2100; return which == 0 ? 0 : 2; }
u amdsmi_get_power_info(void *h, u *of) { of[2] = 650; of[3] = 640; return 0; }
u amdsmi_get_power_cap_info(void *h, u sensor, ull *of) { of[0] = 750000000; return sensor; }
u amdsmi_get_temp_metric(void *h, u which, u metric, long long *of) { *of = which == 1 && metric == 0 ? 62 : 0; return 0; }
u amdsmi_get_gpu_vram_usage(void *h, u *of) { of[0] = 196592; of[1] = 1024; return 0; }
u amdsmi_get_gpu_driver_info(void *h, char *of) { of[0] = '6'; of[1] = 0; return 0; }
"#;

    #[test]
    fn the_instruments_of_the_right_gpu_are_read_with_their_units() {
        let place = tempfile::tempdir().unwrap();
        let (source, library) = (place.path().join("smi.c"), place.path().join("libamd_smi.so.26"));
        std::fs::write(&source, STANDING_IN).unwrap();
        let made = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
        assert!(made.success());
        let search = Search { vendor: Vendor::Amd, named: vec![place.path().to_owned()], ..Search::default() };
        let open = || AmdSmi::new(open_amdsmi(&search).unwrap()).unwrap();
        let of = open().instruments(c"0000:01:00.0").unwrap();
        let expected = Gauges {
            utilization: Some(0.97),
            memory_utilization: Some(0.61),
            clock: Some(2100.0),
            memory_clock: None,
            power: Some(650.0),
            power_limit: Some(750.0),
            temperature: Some(62.0),
            memory_used: Some(1 << 30),
            memory_total: Some(196_592 << 20),
        };
        assert_eq!((of.gauges().unwrap(), of.driver_version().unwrap()), (expected, "6".to_owned()));
        let error = open().instruments(c"0000:02:00.0").err().unwrap().to_string();
        assert!(error.starts_with("amdsmi_get_processor_handle_from_bdf failed with NOT_FOUND"), "{error}");
    }
}
