//! Streams and events of one device. Does not know what runs on them.
#![allow(unsafe_code, reason = "calls of the CUDA driver through its function table")]

use super::Device;
use crate::error::Result;
use crate::sys::driver as sys;
use crate::vendor::Vendor;
use std::ffi::c_void;
use std::sync::Arc;

/// A queue of work in order. Non-blocking: it does not wait for the legacy stream.
pub struct Stream {
    pub(crate) device: Arc<Device>,
    raw: sys::Stream,
}

// SAFETY: the driver allows a stream to be used from any thread whose context is current.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(device: &Arc<Device>) -> Result<Stream> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let status = unsafe { (device.table().cuStreamCreate)(&mut raw, sys::STREAM_NON_BLOCKING) };
        device.check("cuStreamCreate", status)?;
        Ok(Stream { device: device.clone(), raw })
    }

    /// The handle for the libraries that queue work on this stream.
    pub fn raw(&self) -> *mut c_void {
        self.raw
    }

    /// Blocks until everything queued has run, or the device's watch gives up. An error may belong to any earlier work
    /// of the stream.
    pub fn synchronise(&self) -> Result<()> {
        if let Some(watch) = self.device.watch() {
            return watch.wait(|| self.device.name(), || self.has_run());
        }
        // SAFETY: the stream is alive.
        self.device.check("cuStreamSynchronize", unsafe { (self.device.table().cuStreamSynchronize)(self.raw) })
    }

    /// True if everything queued has run.
    pub fn has_run(&self) -> Result<bool> {
        // SAFETY: the stream is alive.
        self.device.has_passed("cuStreamQuery", unsafe { (self.device.table().cuStreamQuery)(self.raw) })
    }

    /// Copies device memory to device memory, of this GPU and its peers; does nothing if source and target are the
    /// same.
    pub fn copy_between(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        if to == from || bytes == 0 {
            return Ok(());
        }
        // SAFETY: both ranges are in arenas of sessions that wait for all streams before they free any.
        let status = unsafe { (self.device.table().cuMemcpyDtoDAsync_v2)(to, from, bytes, self.raw) };
        self.device.check("cuMemcpyDtoDAsync", status)
    }

    /// Copies memory of this GPU to one that is no peer: through host memory, by the driver.
    pub fn copy_across(&self, to: (&Device, u64), from: u64, bytes: usize) -> Result<()> {
        let (own, (other, to), t) = (&self.device, to, self.device.table());
        // SAFETY: both ranges are in arenas of sessions that wait for all streams before they free any.
        let (call, status) = unsafe {
            match own.vendor() {
                Vendor::Nvidia => {
                    let copied = (t.cuMemcpyPeerAsync)(to, other.context, from, own.context, bytes, self.raw);
                    ("cuMemcpyPeerAsync", copied)
                }
                Vendor::Amd => {
                    let copied = (t.hipMemcpyPeerAsync)(to, other.ordinal, from, own.ordinal, bytes, self.raw);
                    ("hipMemcpyPeerAsync", copied)
                }
            }
        };
        own.check(call, status)
    }

    /// Work queued from now on waits for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: stream and event are alive.
        let status = unsafe { (self.device.table().cuStreamWaitEvent)(self.raw, event.raw, 0) };
        self.device.check("cuStreamWaitEvent", status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new`. A failure at exit cannot be acted on.
        unsafe { (self.device.table().cuStreamDestroy_v2)(self.raw) };
    }
}

/// A mark in a stream; with a time stamp unless it was made without.
pub struct Event {
    device: Arc<Device>,
    raw: sys::Event,
}

// SAFETY: the driver allows an event to be used from any thread whose context is current.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(device: &Arc<Device>) -> Result<Event> {
        Self::with_flags(device, sys::EVENT_DEFAULT)
    }

    /// Creates an event without a time stamp: cheaper, for order only.
    pub fn without_time(device: &Arc<Device>) -> Result<Event> {
        Self::with_flags(device, sys::EVENT_DISABLE_TIMING)
    }

    fn with_flags(device: &Arc<Device>, flags: u32) -> Result<Event> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        device.check("cuEventCreate", unsafe { (device.table().cuEventCreate)(&mut raw, flags) })?;
        Ok(Event { device: device.clone(), raw })
    }

    /// Marks the stream's present end.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: stream and event are alive.
        self.device.check("cuEventRecord", unsafe { (self.device.table().cuEventRecord)(self.raw, stream.raw) })
    }

    /// Blocks until the event has passed, or the device's watch gives up.
    pub fn synchronise(&self) -> Result<()> {
        if let Some(watch) = self.device.watch() {
            // SAFETY: the event is alive.
            let ask = || unsafe { (self.device.table().cuEventQuery)(self.raw) };
            return watch.wait(|| self.device.name(), || self.device.has_passed("cuEventQuery", ask()));
        }
        // SAFETY: the event is alive.
        self.device.check("cuEventSynchronize", unsafe { (self.device.table().cuEventSynchronize)(self.raw) })
    }

    /// Milliseconds from `earlier` to this event; both must have passed.
    pub fn since(&self, earlier: &Event) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive, the pointer is to a live local.
        let status = unsafe { (self.device.table().cuEventElapsedTime)(&mut milliseconds, earlier.raw, self.raw) };
        self.device.check("cuEventElapsedTime", status)?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`. A failure at exit cannot be acted on.
        unsafe { (self.device.table().cuEventDestroy_v2)(self.raw) };
    }
}
