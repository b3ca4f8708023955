//! Device and pinned host memory: allocation, asynchronous copies and fills. Knows no layout.
#![allow(unsafe_code, reason = "calls of the CUDA driver through its function table")]

use super::{Device, Stream};
use crate::error::{During, Error, Result};
use crate::sys::driver as sys;
use std::ffi::c_void;
use std::sync::Arc;

/// A block of device memory, freed on drop. The base address is a multiple of 256.
pub struct DeviceBuffer {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates memory with undefined contents. Zero bytes are allowed and give a valid address.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<DeviceBuffer> {
        let mut address = 0;
        // SAFETY: the pointer is to a live local.
        let status = unsafe { (device.table().cuMemAlloc_v2)(&mut address, bytes.max(256)) };
        if status == sys::ERROR_OUT_OF_MEMORY {
            let (free, total) = device.memory()?;
            return Err(Error::OutOfMemory { wanted: bytes, free, total, context: String::new() });
        }
        device.check("cuMemAlloc", status)?;
        Ok(DeviceBuffer { device: device.clone(), address, bytes })
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size of the buffer in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The address of byte `offset`; panics when `bytes` from there are not inside.
    pub fn slice(&self, offset: usize, bytes: usize) -> u64 {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "bytes {offset}..+{bytes} lie outside a buffer of {} bytes",
            self.bytes
        );
        self.address + offset as u64
    }

    /// Sets every byte to zero.
    pub fn zero(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the range is this buffer.
        unsafe { stream.fill(self.address, 1, 0, self.bytes) }
    }

    /// Copies `source` to byte `offset`. The host memory is pageable: the driver copies it to a staging buffer before
    /// it returns, so `source` may be dropped at once.
    pub fn write(&self, stream: &Stream, offset: usize, source: &[u8]) -> Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        let target = self.slice(offset, source.len());
        // SAFETY: `slice` checked the range on the device; the source is a live slice.
        let status = unsafe {
            (self.device.table().cuMemcpyHtoDAsync_v2)(target, source.as_ptr().cast(), source.len(), stream.raw())
        };
        self.device.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies `source`, which is page-locked, to byte `offset`: returns at once.
    ///
    /// # Safety
    /// `source` stays as it is until the stream has come past the copy.
    pub unsafe fn write_pinned(&self, stream: &Stream, offset: usize, source: &[u8]) -> Result<()> {
        let target = self.slice(offset, source.len());
        // SAFETY: `slice` checked the range on the device; the caller keeps the source.
        let status = unsafe {
            (self.device.table().cuMemcpyHtoDAsync_v2)(target, source.as_ptr().cast(), source.len(), stream.raw())
        };
        self.device.check("cuMemcpyHtoDAsync", status)
    }

    /// Copies bytes from `offset` on into `target`, which is page-locked: returns at once.
    ///
    /// # Safety
    /// `target` is neither read nor freed until the stream has come past the copy.
    pub unsafe fn read_pinned(&self, stream: &Stream, offset: usize, target: &mut [u8]) -> Result<()> {
        let source = self.slice(offset, target.len());
        // SAFETY: `slice` checked the range on the device; the caller keeps the target.
        let status = unsafe {
            (self.device.table().cuMemcpyDtoHAsync_v2)(target.as_mut_ptr().cast(), source, target.len(), stream.raw())
        };
        self.device.check("cuMemcpyDtoHAsync", status)
    }

    /// Copies bytes from `offset` on into `target` and waits for them.
    pub fn read(&self, stream: &Stream, offset: usize, target: &mut [u8]) -> Result<()> {
        if !target.is_empty() {
            let source = self.slice(offset, target.len());
            // SAFETY: `slice` checked the range on the device; the target outlives the wait below.
            let status = unsafe {
                (self.device.table().cuMemcpyDtoHAsync_v2)(
                    target.as_mut_ptr().cast(),
                    source,
                    target.len(),
                    stream.raw(),
                )
            };
            self.device.check("cuMemcpyDtoHAsync", status)?;
        }
        stream.synchronise()
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`. A failure at exit cannot be acted on.
        unsafe { (self.device.table().cuMemFree_v2)(self.address) };
    }
}

impl Stream {
    /// Copies `bytes` from one device address to another.
    ///
    /// # Safety
    /// Both ranges are inside live allocations of this device and do not overlap.
    pub unsafe fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: promised by the caller.
        let status = unsafe { (self.device.table().cuMemcpyDtoDAsync_v2)(target, source, bytes, self.raw()) };
        self.device.check("cuMemcpyDtoDAsync", status)
    }

    /// Copies `bytes` from a device address to page-locked host memory: returns at once.
    ///
    /// # Safety
    /// Both ranges are inside live allocations; the host leaves its side alone until the stream has come past the copy.
    pub unsafe fn copy_to_host(&self, target: *mut u8, source: u64, bytes: usize) -> Result<()> {
        // SAFETY: promised by the caller.
        let status = unsafe { (self.device.table().cuMemcpyDtoHAsync_v2)(target.cast(), source, bytes, self.raw()) };
        self.device.check("cuMemcpyDtoHAsync", status)
    }

    /// Copies `bytes` from page-locked host memory to a device address: returns at once.
    ///
    /// # Safety
    /// As for [`Stream::copy_to_host`].
    pub unsafe fn copy_to_device(&self, target: u64, source: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: promised by the caller.
        let status = unsafe { (self.device.table().cuMemcpyHtoDAsync_v2)(target, source.cast(), bytes, self.raw()) };
        self.device.check("cuMemcpyHtoDAsync", status)
    }

    /// Sets `count` elements of `width` bytes (1, 2 or 4) to the low bits of `value`.
    ///
    /// # Safety
    /// The range is inside a live allocation of this device and is aligned to `width`.
    pub unsafe fn fill(&self, target: u64, width: usize, value: u32, count: usize) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let t = self.device.table();
        // SAFETY: promised by the caller.
        let (call, status) = unsafe {
            match width {
                1 => ("cuMemsetD8Async", (t.cuMemsetD8Async)(target, value as u8, count, self.raw())),
                2 => ("cuMemsetD16Async", (t.cuMemsetD16Async)(target, value as u16, count, self.raw())),
                4 => ("cuMemsetD32Async", (t.cuMemsetD32Async)(target, value, count, self.raw())),
                _ => panic!("fills are of 1, 2 or 4 bytes, not {width}"),
            }
        };
        self.device.check(call, status)
    }
}

/// Page-locked host memory: copies from and to it are asynchronous (55 GB/s on an H200).
pub struct PinnedBuffer {
    device: Arc<Device>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates zeroed memory. Cached by the CPU (not write-combined), so it may be read back at full speed.
    pub fn new(device: &Arc<Device>, bytes: usize) -> Result<PinnedBuffer> {
        Self::with_flags(device, bytes, sys::HOST_ALLOC_DEVICE_MAP)
    }

    /// Allocates zeroed write-combined memory. The CPU writes it as fast as any, and reads it at a fraction of its
    /// speed.
    pub fn write_combined(device: &Arc<Device>, bytes: usize) -> Result<PinnedBuffer> {
        Self::with_flags(device, bytes, sys::HOST_ALLOC_DEVICE_MAP | sys::HOST_ALLOC_WRITE_COMBINED)
    }

    fn with_flags(device: &Arc<Device>, bytes: usize, flags: u32) -> Result<PinnedBuffer> {
        let mut pointer: *mut c_void = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        let status = unsafe { (device.table().cuMemHostAlloc)(&mut pointer, bytes.max(1), flags) };
        device.check("cuMemHostAlloc", status).during(|| format!("page-locking {bytes} bytes of host memory"))?;
        // SAFETY: freshly allocated with at least `bytes`.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
        Ok(PinnedBuffer { device: device.clone(), pointer: pointer.cast(), bytes })
    }

    /// The address of the buffer for kernels.
    pub fn device_address(&self) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the pointer is to a live local; the memory was allocated for the device to reach.
        let status =
            unsafe { (self.device.table().cuMemHostGetDevicePointer_v2)(&mut address, self.pointer.cast(), 0) };
        self.device.check("cuMemHostGetDevicePointer", status)?;
        Ok(address)
    }

    /// The host address of byte `offset`; panics when `bytes` from there are not inside.
    pub fn slice(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "bytes {offset}..+{bytes} lie outside a buffer of {} bytes",
            self.bytes
        );
        // SAFETY: inside the allocation.
        unsafe { self.pointer.add(offset) }
    }

    /// The contents. Meaningful only after the copies into it have been waited for.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length and initialized.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The contents, to be written before a copy is queued and left alone until it has run.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length, initialized, borrowed uniquely.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`. A failure at exit cannot be acted on.
        unsafe { (self.device.table().cuMemFreeHost)(self.pointer.cast()) };
    }
}
