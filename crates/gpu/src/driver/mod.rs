//! The driver API of either vendor with Results: devices, and below them streams, memory, modules, graphs.
//!
//! Everything here happens on one device's primary context (CUDA), or on the device that is current (HIP). Calls that need the context are made on
//! a thread that has called [`Device::bind`]; copies and fills are asynchronous on the given stream,
//! never on the legacy stream (which does not order against ours). No policy, no instruction.
#![allow(unsafe_code, reason = "calls of the CUDA driver through its function table")]

mod graph;
mod memory;
mod module;
mod stream;
mod tensor_map;
mod watch;

pub use graph::Graph;
pub use memory::{DeviceBuffer, PinnedBuffer};
pub use module::{Function, LaunchShape, Module};
pub use stream::{Event, Stream};
pub use tensor_map::Described;
pub use watch::Watch;

use crate::error::{Error, Result};
use crate::library::ARCHITECTURE_VARIABLE;
use crate::sys::driver::{self as sys, DriverTable};
use crate::vendor::Vendor;
use program::{Arch, Architecture, Gfx, UnknownArchitecture, UnknownGfx};
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::sync::{Arc, OnceLock};

/// The opened and initialized driver.
pub struct Driver {
    pub(crate) table: DriverTable,
}

impl Driver {
    /// Calls `cuInit` or `hipInit`. Fails where there is no GPU or no permission to use it.
    pub fn new(table: DriverTable) -> Result<Arc<Driver>> {
        let driver = Driver { table };
        // SAFETY: no arguments to get wrong.
        driver.check("cuInit", unsafe { (driver.table.cuInit)(0) })?;
        Ok(Arc::new(driver))
    }

    /// The vendor whose driver this is.
    pub fn vendor(&self) -> Vendor {
        self.table.vendor
    }

    /// The version of CUDA that the driver supports, or of HIP, as (major, minor).
    pub fn version(&self) -> Result<(u32, u32)> {
        let mut version = 0;
        // SAFETY: the pointer is to a live local.
        self.check("cuDriverGetVersion", unsafe { (self.table.cuDriverGetVersion)(&mut version) })?;
        let version = version as u32;
        Ok(match self.vendor() {
            Vendor::Nvidia => (version / 1000, version % 1000 / 10),
            Vendor::Amd => (version / 10_000_000, version / 100_000 % 100),
        })
    }

    pub fn device_count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the pointer is to a live local.
        self.check("cuDeviceGetCount", unsafe { (self.table.cuDeviceGetCount)(&mut count) })?;
        Ok(count as usize)
    }

    /// Turns a status into a Result with the driver's own words.
    pub(crate) fn check(&self, call: &'static str, status: sys::Result32) -> Result<()> {
        if status == sys::SUCCESS {
            return Ok(());
        }
        let (mut name, mut detail): (*const c_char, *const c_char) = (std::ptr::null(), std::ptr::null());
        // SAFETY: the driver writes pointers to static strings, or leaves null for an unknown status.
        let (name, detail) = unsafe {
            (self.table.cuGetErrorName)(status, &mut name);
            (self.table.cuGetErrorString)(status, &mut detail);
            (text_or(name, "an unknown status"), text_or(detail, ""))
        };
        let call = self.table.call_name(call);
        Err(Error::Call { call, code: status, name, detail, context: String::new() })
    }
}

/// # Safety
/// `text` is null or a NUL-terminated string that stays alive during the call.
pub(crate) unsafe fn text_or(text: *const c_char, otherwise: &str) -> String {
    if text.is_null() {
        return otherwise.to_owned();
    }
    // SAFETY: promised by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Returns the architecture that `text` names, such as `sm_80`, for an NVIDIA GPU of `own` architecture; an error for a
/// later one.
fn in_place(own: Architecture, text: &str) -> Result<Architecture> {
    let refused = |reason: String| Error::Unsupported {
        what: format!("{ARCHITECTURE_VARIABLE}={text}"),
        reason,
        context: String::new(),
    };
    let named: Architecture = text.parse().map_err(|expected: UnknownArchitecture| refused(expected.to_string()))?;
    match named <= own {
        true => Ok(named),
        false => Err(refused(format!("this GPU is {own}, which does not run code of later ones"))),
    }
}

/// The properties of a device, for plans and for `surogate doctor`.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    pub name: String,
    /// The architecture that kernels are chosen and compiled for: the device's own, or an older one that was requested.
    pub architecture: Arch,
    pub of_device: Arch,
    pub multiprocessors: u32,
    /// Size of the device memory, bytes.
    pub memory: usize,
    /// Size of the L2 cache, bytes.
    pub l2_cache: usize,
    /// Highest clock of the multiprocessors, Hz; 0 where the driver does not report it.
    pub clock: f64,
    /// Bytes per second by bus width and clock; 0 where the driver does not report it.
    pub memory_bandwidth: f64,
    /// Dynamic shared memory that one block may ask for, in bytes.
    pub shared_memory_per_block: usize,
}

/// Prints the properties that distinguish one kind of GPU from another.
impl fmt::Display for Properties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}, {} multiprocessors", self.name, self.architecture, self.multiprocessors)
    }
}

/// One GPU with its primary context retained.
pub struct Device {
    pub(crate) driver: Arc<Driver>,
    ordinal: c_int,
    /// Null on AMD GPUs, where a device is current by its number.
    context: sys::Context,
    /// The limit on waits for the device.
    watch: OnceLock<Arc<Watch>>,
    pub properties: Properties,
}

// SAFETY: a context handle may be used from any thread; the driver locks internally.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Retains the primary context of GPU `ordinal` and binds it to this thread. `architecture`: the target of kernels
    /// in place of the GPU's own.
    pub fn open(driver: &Arc<Driver>, ordinal: usize, architecture: Option<&str>) -> Result<Arc<Device>> {
        let count = driver.device_count()?;
        if ordinal >= count {
            return Err(Error::Unsupported {
                what: format!("GPU {ordinal}"),
                reason: format!("this machine shows {count} GPU(s), numbered from 0"),
                context: String::new(),
            });
        }
        let (mut raw, mut context) = (0, std::ptr::null_mut());
        let t = &driver.table;
        // SAFETY: both pointers are to live locals.
        driver.check("cuDeviceGet", unsafe { (t.cuDeviceGet)(&mut raw, ordinal as c_int) })?;
        let properties = properties(driver, raw, architecture)?;
        if driver.vendor() == Vendor::Nvidia {
            // SAFETY: as above; the context is released on drop.
            driver.check("cuDevicePrimaryCtxRetain", unsafe { (t.cuDevicePrimaryCtxRetain)(&mut context, raw) })?;
        }
        let device = Device { driver: driver.clone(), ordinal: raw, context, watch: OnceLock::new(), properties };
        device.bind()?;
        Ok(Arc::new(device))
    }

    /// Returns the properties of GPU `ordinal` without opening it.
    pub fn properties(driver: &Driver, ordinal: usize, architecture: Option<&str>) -> Result<Properties> {
        let mut raw = 0;
        // SAFETY: the pointer is to a live local.
        let status = unsafe { (driver.table.cuDeviceGet)(&mut raw, ordinal as c_int) };
        driver.check("cuDeviceGet", status)?;
        properties(driver, raw, architecture)
    }

    /// Returns the bus address of GPU `ordinal`, such as `0000:01:00.0`: its name in other libraries.
    pub fn bus(driver: &Driver, ordinal: usize) -> Result<CString> {
        let mut raw = 0;
        let mut text = [0 as c_char; 32];
        // SAFETY: the pointers are to live locals, and the buffer's length is passed.
        unsafe {
            driver.check("cuDeviceGet", (driver.table.cuDeviceGet)(&mut raw, ordinal as c_int))?;
            let status = (driver.table.cuDeviceGetPCIBusId)(text.as_mut_ptr(), text.len() as c_int, raw);
            driver.check("cuDeviceGetPCIBusId", status)?;
            Ok(CStr::from_ptr(text.as_ptr()).to_owned())
        }
    }

    /// Makes the context, or the device, current on the calling thread.
    pub fn bind(&self) -> Result<()> {
        if self.vendor() == Vendor::Amd {
            // SAFETY: no pointers.
            return self.check("hipSetDevice", unsafe { (self.table().hipSetDevice)(self.ordinal) });
        }
        // SAFETY: the context is retained as long as `self` lives.
        self.check("cuCtxSetCurrent", unsafe { (self.table().cuCtxSetCurrent)(self.context) })
    }

    pub(crate) fn vendor(&self) -> Vendor {
        self.driver.vendor()
    }

    /// Gives waits for this GPU up when the watch says so, from now on.
    pub fn watch_with(&self, watch: &Arc<Watch>) {
        self.watch.get_or_init(|| watch.clone());
    }

    pub(crate) fn watch(&self) -> Option<&Watch> {
        self.watch.get().map(|watch| &**watch)
    }

    /// The name of the device for people.
    pub(crate) fn name(&self) -> String {
        format!("GPU {}", self.ordinal)
    }

    /// True if the queried work has passed; an error if the query failed.
    pub(crate) fn has_passed(&self, call: &'static str, status: sys::Result32) -> Result<bool> {
        match status {
            sys::ERROR_NOT_READY => Ok(false),
            status => self.check(call, status).map(|()| true),
        }
    }

    /// Enables peer access to the memory of another GPU; false where the link does not allow it.
    pub fn reach(&self, other: &Device) -> Result<bool> {
        self.bind()?;
        if self.ordinal == other.ordinal {
            return Ok(true);
        }
        let mut reaches = 0;
        // SAFETY: the pointer is to a live local.
        let asked = unsafe { (self.table().cuDeviceCanAccessPeer)(&mut reaches, self.ordinal, other.ordinal) };
        self.check("cuDeviceCanAccessPeer", asked)?;
        if reaches == 0 {
            return Ok(false);
        }
        let (t, vendor) = (self.table(), self.vendor());
        // SAFETY: both contexts are retained; AMD's function has no pointers.
        let (call, status) = unsafe {
            match vendor {
                Vendor::Nvidia => ("cuCtxEnablePeerAccess", (t.cuCtxEnablePeerAccess)(other.context, 0)),
                Vendor::Amd => ("hipDeviceEnablePeerAccess", (t.hipDeviceEnablePeerAccess)(other.ordinal, 0)),
            }
        };
        match status {
            sys::ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            status => self.check(call, status).map(|()| true),
        }
    }

    /// (free, total) bytes of device memory now.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to live locals.
        self.check("cuMemGetInfo", unsafe { (self.table().cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((free, total))
    }

    pub(crate) fn table(&self) -> &DriverTable {
        &self.driver.table
    }

    pub(crate) fn check(&self, call: &'static str, status: sys::Result32) -> Result<()> {
        self.driver.check(call, status)
    }
}

#[cfg(test)]
impl Device {
    /// Returns a device whose calls are a test's functions.
    pub(crate) fn imitated(table: DriverTable, ordinal: c_int) -> Arc<Device> {
        let architecture = Arch::Cuda(Architecture::HOPPER);
        let properties = Properties {
            name: "imitated".into(),
            architecture,
            of_device: architecture,
            multiprocessors: 1,
            memory: 0,
            l2_cache: 0,
            clock: 0.0,
            memory_bandwidth: 0.0,
            shared_memory_per_block: 0,
        };
        let (driver, context) = (Arc::new(Driver { table }), std::ptr::null_mut());
        Arc::new(Device { driver, ordinal, context, watch: OnceLock::new(), properties })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.vendor() == Vendor::Nvidia {
            // SAFETY: retained once in `open`. A failure at exit cannot be acted on.
            unsafe { (self.table().cuDevicePrimaryCtxRelease_v2)(self.ordinal) };
        }
    }
}

/// Returns the instruction set of an AMD GPU; an error for one that kernels are not written for.
fn instruction_set(driver: &Driver, device: c_int, name: &str) -> Result<Gfx> {
    let mut properties = Box::new(sys::HipProperties::EMPTY);
    // SAFETY: the pointer is to a live local of the size that this version of the function fills.
    let status = unsafe { (driver.table.hipGetDevicePropertiesR0600)(&mut *properties, device) };
    driver.check("hipGetDeviceProperties", status)?;
    // SAFETY: the library ends the text with NUL, and the field is longer than any.
    let text = unsafe { text_or(properties.architecture.as_ptr(), "") };
    text.parse().map_err(|expected: UnknownGfx| Error::Unsupported {
        what: format!("{name}, {text}"),
        reason: expected.to_string(),
        context: String::new(),
    })
}

fn properties(driver: &Driver, device: c_int, architecture: Option<&str>) -> Result<Properties> {
    let t = &driver.table;
    let attribute = |which: u32| -> Result<u32> {
        let mut value = 0;
        // SAFETY: the pointer is to a live local.
        driver.check("cuDeviceGetAttribute", unsafe { (t.cuDeviceGetAttribute)(&mut value, which, device) })?;
        Ok(value as u32)
    };
    let mut name = [0 as c_char; 256];
    let mut memory = 0;
    // SAFETY: the buffer's length is passed; the driver terminates the string.
    let name = unsafe {
        driver.check("cuDeviceGetName", (t.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int, device))?;
        text_or(name.as_ptr(), "")
    };
    // SAFETY: the pointer is to a live local.
    driver.check("cuDeviceTotalMem", unsafe { (t.cuDeviceTotalMem_v2)(&mut memory, device) })?;
    let of = sys::Attributes::of(driver.vendor());
    let memory_clock = attribute(of.memory_clock_rate_khz).unwrap_or(0) as f64 * 1e3;
    let bus_bytes = attribute(of.global_memory_bus_width_bits).unwrap_or(0) as f64 / 8.0;
    let (architecture, of_device) = match driver.vendor() {
        Vendor::Nvidia => {
            let major = attribute(of.compute_capability_major)?;
            let own = Architecture { major, minor: attribute(of.compute_capability_minor)? };
            (Arch::Cuda(architecture.map_or(Ok(own), |text| in_place(own, text))?), Arch::Cuda(own))
        }
        Vendor::Amd => {
            let own = Arch::Rocm(instruction_set(driver, device, &name)?);
            (own, own)
        }
    };
    Ok(Properties {
        name,
        architecture,
        of_device,
        multiprocessors: attribute(of.multiprocessor_count)?,
        memory,
        l2_cache: attribute(of.l2_cache_size)? as usize,
        clock: attribute(of.clock_rate_khz).unwrap_or(0) as f64 * 1e3,
        memory_bandwidth: 2.0 * memory_clock * bus_bytes,
        shared_memory_per_block: attribute(of.shared_memory_per_block_optin)? as usize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_architecture_may_stand_in_for_the_gpus() {
        let hopper = Architecture::HOPPER;
        let ampere = in_place(hopper, "sm_80").unwrap();
        assert_eq!((ampere.to_string(), ampere.virtual_target()), ("sm_80".into(), "compute_80".into()));
        assert_eq!(in_place(hopper, "sm_90a").unwrap(), hopper);
        let refused = |text: &str| in_place(hopper, text).unwrap_err().to_string();
        assert!(refused("sm_100a").contains("does not run code of later ones"), "{}", refused("sm_100a"));
        for wrong in ["80", "sm_75", "sm_", "ampere", "sm_8x", "sm_+80"] {
            assert!(refused(wrong).contains(&format!("SUROGATE_CUDA_ARCH={wrong}")), "{}", refused(wrong));
            assert!(refused(wrong).contains("such as sm_80"), "{}", refused(wrong));
        }
    }
}
