//! Tensor maps for the copy engine (TMA) of Hopper and later GPUs. Does not know what is copied.
#![allow(unsafe_code, reason = "calls of the CUDA driver through its function table")]

use super::Device;
use crate::error::{During, Result};
use crate::sys::driver as sys;
use std::ffi::c_void;
use std::sync::Arc;

/// Number of axes of a described tensor.
pub const AXES: usize = 4;

/// A tensor in device memory, outermost axis first; the last axis is dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// Size of an element in bytes: 2 or 4.
    pub size: usize,
    pub address: u64,
    pub shape: [usize; AXES],
    /// Elements from one index of an axis to the next.
    pub strides: [usize; AXES],
    /// Extents of the boxes that are copied.
    pub boxes: [u32; AXES],
}

#[repr(C, align(64))]
struct Aligned([u64; sys::TENSOR_MAP_WORDS]);

impl Described {
    /// Encodes the map for a kernel: boxes in the 128-byte swizzle, zeros outside the tensor.
    pub fn encode(&self, device: &Arc<Device>) -> Result<[u64; sys::TENSOR_MAP_WORDS]> {
        let mut map = Aligned([0; sys::TENSOR_MAP_WORDS]);
        // The driver counts axes from the innermost; strides are in bytes, without that of the innermost axis. An axis
        // of one index gets a stride that keeps the alignment.
        let extents: [u64; AXES] = std::array::from_fn(|i| self.shape[AXES - 1 - i] as u64);
        let strides: [u64; AXES - 1] = std::array::from_fn(|i| {
            let axis = AXES - 2 - i;
            if self.shape[axis] == 1 { 16 } else { (self.strides[axis] * self.size) as u64 }
        });
        let boxes: [u32; AXES] = std::array::from_fn(|i| self.boxes[AXES - 1 - i]);
        let steps = [1u32; AXES];
        // SAFETY: the map is aligned and as large as the driver asks; the arrays have one entry for each axis. The
        // driver reads no device memory.
        let status = unsafe {
            (device.table().cuTensorMapEncodeTiled)(
                std::ptr::from_mut(&mut map).cast::<c_void>(),
                if self.size == 4 { sys::tensor_map::F32 } else { sys::tensor_map::BF16 },
                AXES as u32,
                self.address,
                extents.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::tensor_map::NO_INTERLEAVE,
                sys::tensor_map::SWIZZLE_128_BYTES,
                sys::tensor_map::PROMOTE_TO_128_BYTES,
                sys::tensor_map::ZEROS_OUTSIDE,
            )
        };
        device.check("cuTensorMapEncodeTiled", status).during(|| format!("describing {self:?}"))?;
        Ok(map.0)
    }
}
