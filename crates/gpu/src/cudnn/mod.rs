//! cuDNN: the handle, and graphs of operations compiled to plans.
//!
//! Used for scaled dot-product attention only. This module knows descriptors and graphs;
//! [`sdpa`] knows the attention formulas; neither knows instructions.
#![allow(unsafe_code, reason = "calls of cuDNN through its function table")]

mod descriptor;
mod graph;
pub mod sdpa;

pub use graph::{Binding, Plan, Target};

use crate::driver::{Stream, text_or};
use crate::error::{Error, Result};
use crate::library::Opened;
use crate::sys::cudnn::{self as sys, CudnnTable};
use std::ffi::c_char;
use std::sync::Arc;

/// The opened library. Plans can be described and compiled without a handle; running needs one.
pub struct Cudnn {
    table: CudnnTable,
}

impl Cudnn {
    pub fn new(opened: Opened<CudnnTable>) -> Arc<Cudnn> {
        Arc::new(Cudnn { table: opened.table })
    }

    /// The version as the library encodes it: 91900 is 9.19.0.
    pub fn version(&self) -> usize {
        // SAFETY: no arguments.
        unsafe { (self.table.cudnnGetVersion)() }
    }

    fn check(&self, call: &'static str, status: sys::Status) -> Result<()> {
        if status == sys::SUCCESS {
            return Ok(());
        }
        let mut message = [0 as c_char; 1024];
        // SAFETY: the buffer's length is passed; the library terminates the text.
        let (name, detail) = unsafe {
            (self.table.cudnnGetLastErrorString)(message.as_mut_ptr(), message.len());
            (text_or((self.table.cudnnGetErrorString)(status), "an unknown status"), text_or(message.as_ptr(), ""))
        };
        Err(Error::Call { call, code: status, name, detail, context: String::new() })
    }
}

/// A handle bound to one stream.
pub struct Handle {
    cudnn: Arc<Cudnn>,
    raw: sys::Handle,
    /// Name and architecture of the GPU.
    device: String,
}

// SAFETY: used by one thread at a time.
unsafe impl Send for Handle {}

impl Handle {
    /// Creates a handle, whose work goes to `stream`. Needs a current CUDA context.
    pub fn new(cudnn: &Arc<Cudnn>, stream: &Stream) -> Result<Handle> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        cudnn.check("cudnnCreate", unsafe { (cudnn.table.cudnnCreate)(&mut raw) })?;
        let device = stream.device.properties.to_string();
        let handle = Handle { cudnn: cudnn.clone(), raw, device };
        // SAFETY: handle and stream are alive.
        cudnn.check("cudnnSetStream", unsafe { (cudnn.table.cudnnSetStream)(raw, stream.raw()) })?;
        Ok(handle)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created by `new`. A failure at exit cannot be acted on.
        unsafe { (self.cudnn.table.cudnnDestroy)(self.raw) };
    }
}
