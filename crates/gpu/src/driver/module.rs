//! Loaded kernels and their launches. Does not know what a kernel computes.
#![allow(unsafe_code, reason = "calls of the CUDA driver through its function table")]

use super::{Device, Stream};
use crate::error::{During, Error, Result};
use crate::sys::driver as sys;
use crate::vendor::Vendor;
use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

fn too_much(bytes: usize, most: usize) -> Error {
    let what = format!("{bytes} bytes of shared memory for a block");
    Error::Unsupported { what, reason: format!("this GPU has {most}"), context: String::new() }
}

/// Code loaded into a context; unloaded when the last of its functions is dropped.
pub struct Module {
    device: Arc<Device>,
    raw: sys::Module,
}

// SAFETY: the driver allows a module to be used from any thread whose context is current.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads machine code of this device's architecture, or PTX with a NUL at its end, which NVIDIA's driver translates.
    pub fn new(device: &Arc<Device>, code: &[u8]) -> Result<Arc<Module>> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a CUBIN or code object is an ELF file and carries its own length, PTX is terminated; the driver copies either.
        let status = unsafe { (device.table().cuModuleLoadData)(&mut raw, code.as_ptr().cast()) };
        device.check("cuModuleLoadData", status)?;
        Ok(Arc::new(Module { device: device.clone(), raw }))
    }

    /// A kernel by its `extern "C"` name.
    pub fn function(self: &Arc<Module>, name: &str) -> Result<Function> {
        let c_name = CString::new(name).expect("a kernel's name has no NUL in it");
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is alive, the string is terminated.
        let status = unsafe { (self.device.table().cuModuleGetFunction)(&mut raw, self.raw, c_name.as_ptr()) };
        self.device.check("cuModuleGetFunction", status).during(|| format!("looking for kernel `{name}`"))?;
        Ok(Function { module: self.clone(), raw })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `new`. A failure at exit cannot be acted on.
        unsafe { (self.device.table().cuModuleUnload)(self.raw) };
    }
}

/// Grid and block extents, and dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    /// True to launch before earlier work of the stream has ended: the kernel waits for it (`dependent_launch.cuh`).
    pub early: bool,
}

/// A kernel that can be launched.
pub struct Function {
    module: Arc<Module>,
    raw: sys::Function,
}

// SAFETY: as for the module.
unsafe impl Send for Function {}
// SAFETY: as for the module.
unsafe impl Sync for Function {}

impl Function {
    /// Allows launches with up to `bytes` of dynamic shared memory; needed above 48 KiB.
    pub fn allow_shared_memory(&self, bytes: usize) -> Result<()> {
        let device = &self.module.device;
        if device.vendor() == Vendor::Amd {
            // HIP has no such call: a block may have all of it, or the launch fails.
            let most = device.properties.shared_memory_per_block;
            return if bytes <= most { Ok(()) } else { Err(too_much(bytes, most)) };
        }
        let which = sys::function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is alive.
        let status = unsafe { (device.table().cuFuncSetAttribute)(self.raw, which, bytes as c_int) };
        device.check("cuFuncSetAttribute", status).during(|| format!("asking for {bytes} bytes of shared memory"))
    }

    /// Queues one launch. `arguments` point to the parameter values; the driver copies them at once.
    ///
    /// # Safety
    /// The pointers match the kernel's parameter list, and the addresses among the values stay
    /// allocated until the launch has run.
    pub unsafe fn launch(&self, stream: &Stream, shape: LaunchShape, arguments: &mut [*mut c_void]) -> Result<()> {
        let ([gx, gy, gz], [bx, by, bz]) = (shape.grid, shape.block);
        let device = &self.module.device;
        if shape.early {
            let id = sys::LaunchAttribute::PROGRAMMATIC_STREAM_SERIALIZATION;
            let mut value = [0; 16];
            value[0] = 1;
            let mut attribute = sys::LaunchAttribute { id, padding: 0, value };
            let config = sys::LaunchConfig {
                grid: shape.grid,
                block: shape.block,
                shared_bytes: shape.shared_bytes,
                stream: stream.raw(),
                attributes: &mut attribute,
                attribute_count: 1,
            };
            // SAFETY: promised by the caller; configuration and attribute live as long as the call.
            let status = unsafe {
                (device.table().cuLaunchKernelEx)(&config, self.raw, arguments.as_mut_ptr(), std::ptr::null_mut())
            };
            return device.check("cuLaunchKernelEx", status).during(|| format!("launching {shape:?}"));
        }
        // SAFETY: promised by the caller.
        let status = unsafe {
            (device.table().cuLaunchKernel)(
                self.raw,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                shape.shared_bytes,
                stream.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        device.check("cuLaunchKernel", status).during(|| format!("launching {shape:?}"))
    }
}
