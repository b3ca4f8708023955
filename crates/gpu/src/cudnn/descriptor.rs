//! Backend descriptors: cuDNN's untyped objects with typed setters. Does not know their meaning.
#![allow(unsafe_code, reason = "calls of cuDNN through its function table")]

use super::Cudnn;
use crate::error::{During, Result};
use crate::sys::cudnn::{self as sys, value_type};
use std::ffi::c_void;
use std::sync::Arc;

/// One descriptor: attributes are set, then it is finalized and read-only.
pub(super) struct Descriptor {
    cudnn: Arc<Cudnn>,
    raw: sys::Descriptor,
}

// SAFETY: a descriptor is plain memory with one owner.
unsafe impl Send for Descriptor {}

impl Descriptor {
    pub fn new(cudnn: &Arc<Cudnn>, kind: u32) -> Result<Descriptor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let status = unsafe { (cudnn.table.cudnnBackendCreateDescriptor)(kind, &mut raw) };
        cudnn.check("cudnnBackendCreateDescriptor", status).during(|| format!("creating descriptor kind {kind}"))?;
        Ok(Descriptor { cudnn: cudnn.clone(), raw })
    }

    pub fn raw(&self) -> sys::Descriptor {
        self.raw
    }

    /// Sets an array attribute; `T` has the size that `kind` stands for.
    pub fn set<T: Copy>(self, attribute: u32, kind: u32, values: &[T]) -> Result<Descriptor> {
        // SAFETY: the array is alive and its length is passed.
        let status = unsafe {
            (self.cudnn.table.cudnnBackendSetAttribute)(
                self.raw,
                attribute,
                kind,
                values.len() as i64,
                values.as_ptr().cast(),
            )
        };
        self.cudnn
            .check("cudnnBackendSetAttribute", status)
            .during(|| format!("setting attribute {attribute}"))
            .map(|()| self)
    }

    pub fn int64(self, attribute: u32, values: &[i64]) -> Result<Descriptor> {
        self.set(attribute, value_type::INT64, values)
    }

    pub fn data_type(self, attribute: u32, value: u32) -> Result<Descriptor> {
        self.set(attribute, value_type::DATA_TYPE, &[value])
    }

    pub fn flag(self, attribute: u32, value: bool) -> Result<Descriptor> {
        self.set(attribute, value_type::BOOLEAN, &[value as u8])
    }

    pub fn descriptor(self, attribute: u32, value: &Descriptor) -> Result<Descriptor> {
        self.set(attribute, value_type::BACKEND_DESCRIPTOR, &[value.raw])
    }

    /// Ends the setting of attributes; `what` is named when cuDNN rejects.
    pub fn finalise(self, what: &str) -> Result<Descriptor> {
        // SAFETY: the descriptor is alive.
        let status = unsafe { (self.cudnn.table.cudnnBackendFinalize)(self.raw) };
        self.cudnn.check("cudnnBackendFinalize", status).during(|| format!("building {what}")).map(|()| self)
    }

    pub fn get_int64(&self, attribute: u32) -> Result<i64> {
        let (mut value, mut count) = (0i64, 0i64);
        // SAFETY: room for one value is promised and given.
        let status = unsafe {
            (self.cudnn.table.cudnnBackendGetAttribute)(
                self.raw,
                attribute,
                value_type::INT64,
                1,
                &mut count,
                (&raw mut value).cast::<c_void>(),
            )
        };
        self.cudnn.check("cudnnBackendGetAttribute", status).during(|| format!("reading attribute {attribute}"))?;
        Ok(value)
    }

    /// Returns a text attribute as bytes.
    pub fn get_text(&self, attribute: u32) -> Result<Vec<u8>> {
        let get = |room: usize, into: *mut c_void| {
            let mut count = 0i64;
            // SAFETY: the buffer has the promised room; the length is not queried.
            let status = unsafe {
                (self.cudnn.table.cudnnBackendGetAttribute)(
                    self.raw,
                    attribute,
                    value_type::CHAR,
                    room as i64,
                    &mut count,
                    into,
                )
            };
            self.cudnn.check("cudnnBackendGetAttribute", status).during(|| format!("reading attribute {attribute}"))?;
            Ok(count.max(0) as usize)
        };
        let mut text = vec![0u8; get(0, std::ptr::null_mut())?];
        let count = get(text.len(), text.as_mut_ptr().cast())?;
        text.truncate(count);
        Ok(text)
    }

    /// Fills descriptors that the caller made; returns how many there were to fill.
    pub fn get_descriptors(&self, attribute: u32, into: &[Descriptor]) -> Result<usize> {
        let mut raw: Vec<sys::Descriptor> = into.iter().map(|d| d.raw).collect();
        let mut count = 0i64;
        // SAFETY: the array holds the promised number of descriptors.
        let status = unsafe {
            (self.cudnn.table.cudnnBackendGetAttribute)(
                self.raw,
                attribute,
                value_type::BACKEND_DESCRIPTOR,
                raw.len() as i64,
                &mut count,
                raw.as_mut_ptr().cast::<c_void>(),
            )
        };
        self.cudnn.check("cudnnBackendGetAttribute", status).during(|| format!("reading attribute {attribute}"))?;
        Ok((count.max(0) as usize).min(into.len()))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by `new`. A failure to free cannot be acted on.
        unsafe { (self.cudnn.table.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}
