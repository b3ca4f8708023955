//! The imitated driver: each call of CUDA or HIP as a change of this thread's world.
#![allow(unsafe_code, reason = "implements a C interface")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::rc::Rc;

use gpu::Vendor;
use gpu::sys::driver::{Attributes, DriverTable, HipProperties};
use program::Arch;

use crate::capture::Capture;
use crate::compiler::Code;
use crate::launches::{Function, Shape};
use crate::status::{
    CAPTURE_UNJOINED, CAPTURE_UNSUPPORTED, INVALID_HANDLE, INVALID_VALUE, LAUNCH_FAILED, NOT_FOUND, SUCCESS, name,
};
use crate::world::{Event, Stream, Work, World, world};

/// The context of a device, which is its number and one more.
fn context(device: usize) -> *mut c_void {
    (device + 1) as *mut c_void
}

/// # Safety
/// `to` is the caller's.
unsafe fn give<T>(to: *mut T, value: T) -> u32 {
    // SAFETY: promised by the caller.
    unsafe { to.write(value) };
    SUCCESS
}

fn handle(number: usize) -> *mut c_void {
    number as *mut c_void
}

unsafe extern "C" fn init(_: c_uint) -> u32 {
    SUCCESS
}
unsafe extern "C" fn cuda_version(to: *mut c_int) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, 13_000) }
}
unsafe extern "C" fn hip_version(to: *mut c_int) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, 70_100_000) }
}
unsafe extern "C" fn cuda_name(status: u32, to: *mut *const c_char) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, name(Vendor::Nvidia, status)) }
}
unsafe extern "C" fn hip_name(status: u32, to: *mut *const c_char) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, name(Vendor::Amd, status)) }
}
unsafe extern "C" fn detail(_: u32, to: *mut *const c_char) -> u32 {
    // SAFETY: the caller's local, which it reads before the next call.
    world(|world| unsafe { give(to, world.detail.as_ptr()) })
}
unsafe extern "C" fn count(to: *mut c_int) -> u32 {
    // SAFETY: the caller's local.
    world(|world| unsafe { give(to, world.machine().gpus as c_int) })
}
unsafe extern "C" fn device(to: *mut c_int, ordinal: c_int) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, ordinal) }
}
unsafe extern "C" fn device_name(to: *mut c_char, length: c_int, _: c_int) -> u32 {
    let text = c"Stand-in".to_bytes_with_nul();
    // SAFETY: the caller's buffer, whose length is passed.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len().min(length as usize)) };
    SUCCESS
}
unsafe extern "C" fn bus(to: *mut c_char, length: c_int, _: c_int) -> u32 {
    let text = c"0000:01:00.0".to_bytes_with_nul();
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len().min(length as usize)) };
    SUCCESS
}
unsafe extern "C" fn total(to: *mut usize, _: c_int) -> u32 {
    // SAFETY: the caller's local.
    world(|world| unsafe { give(to, world.limit()) })
}
fn attribute(vendor: Vendor, which: u32) -> c_int {
    let of = Attributes::of(vendor);
    let arch = world(|world| world.machine().arch);
    let (major, minor) = match arch {
        Arch::Cuda(of) => (of.major, of.minor),
        Arch::Rocm(of) => (of.major, of.minor),
        Arch::Cpu => panic!("a stand-in is of a GPU"),
    };
    match which {
        _ if which == of.shared_memory_per_block_optin => arch.shared_per_block() as c_int,
        _ if which == of.multiprocessor_count => 8,
        _ if which == of.compute_capability_major => major as c_int,
        _ if which == of.compute_capability_minor => minor as c_int,
        _ if which == of.l2_cache_size => 1 << 20,
        _ => 1_000_000,
    }
}
unsafe extern "C" fn cuda_attribute(to: *mut c_int, which: u32, _: c_int) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, attribute(Vendor::Nvidia, which)) }
}
unsafe extern "C" fn hip_attribute(to: *mut c_int, which: u32, _: c_int) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, attribute(Vendor::Amd, which)) }
}
unsafe extern "C" fn hip_properties(to: *mut HipProperties, _: c_int) -> u32 {
    let text = world(|world| format!("{}:sramecc+:xnack-", world.machine().arch));
    // SAFETY: the caller's struct, which is zero.
    unsafe { (*to).architecture.iter_mut().zip(text.bytes()).for_each(|(to, byte)| *to = byte as c_char) };
    SUCCESS
}
unsafe extern "C" fn retain(to: *mut *mut c_void, device: c_int) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, context(device as usize)) }
}
unsafe extern "C" fn release(_: c_int) -> u32 {
    SUCCESS
}
unsafe extern "C" fn set_context(of: *mut c_void) -> u32 {
    world(|world| world.current = of as usize - 1);
    SUCCESS
}
unsafe extern "C" fn set_device(device: c_int) -> u32 {
    world(|world| world.current = device as usize);
    SUCCESS
}
unsafe extern "C" fn can_reach(to: *mut c_int, _: c_int, _: c_int) -> u32 {
    // SAFETY: the caller's local.
    world(|world| unsafe { give(to, world.machine().reach as c_int) })
}
unsafe extern "C" fn reach(_: *mut c_void, _: c_uint) -> u32 {
    SUCCESS
}
unsafe extern "C" fn hip_reach(_: c_int, _: c_uint) -> u32 {
    SUCCESS
}
unsafe extern "C" fn memory(free: *mut usize, total: *mut usize) -> u32 {
    world(|world| {
        let limit = world.limit();
        // SAFETY: the caller's locals.
        unsafe { give(free, limit.saturating_sub(world.memory.used(world.current))) };
        // SAFETY: as above.
        unsafe { give(total, limit) }
    })
}
unsafe extern "C" fn allocate(to: *mut u64, bytes: usize) -> u32 {
    let device = world(|world| world.current);
    match world(|world| world.allocate(bytes, Some(device))) {
        // SAFETY: the caller's local.
        Ok(at) => unsafe { give(to, at) },
        Err(status) => status,
    }
}
/// Frees after all work that is queued, as drivers do.
unsafe extern "C" fn free(at: u64) -> u32 {
    world(|world| {
        world.run_until(World::is_idle);
        if world.memory.free(at) { SUCCESS } else { INVALID_VALUE }
    })
}
unsafe extern "C" fn pin(to: *mut *mut c_void, bytes: usize, _: c_uint) -> u32 {
    match world(|world| world.allocate(bytes, None)) {
        // SAFETY: the caller's local.
        Ok(at) => unsafe { give(to, at as *mut c_void) },
        Err(status) => status,
    }
}
unsafe extern "C" fn unpin(at: *mut c_void) -> u32 {
    // SAFETY: as for memory of a device.
    unsafe { free(at as u64) }
}
unsafe extern "C" fn pinned_address(to: *mut u64, at: *mut c_void, _: c_uint) -> u32 {
    // SAFETY: the caller's local.
    unsafe { give(to, at as u64) }
}

fn copy(stream: *mut c_void, to: u64, from: u64, bytes: usize) -> u32 {
    world(|world| world.put(stream as usize, Work::Copy { to, from, bytes }))
}
/// Copies pageable memory at once, as drivers do, and reads page-locked memory when the copy's turn comes.
unsafe extern "C" fn to_device(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void) -> u32 {
    world(|world| {
        if world.memory.is_pinned(from as u64) {
            return world.put(stream as usize, Work::Copy { to, from: from as u64, bytes });
        }
        if world.capture.as_ref().is_some_and(|capture| capture.has(stream as usize)) {
            return CAPTURE_UNSUPPORTED;
        }
        // SAFETY: the caller's slice.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.into();
        world.put(stream as usize, Work::Put { to, bytes })
    })
}
unsafe extern "C" fn to_host(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void) -> u32 {
    copy(stream, to as u64, from, bytes)
}
unsafe extern "C" fn between(to: u64, from: u64, bytes: usize, stream: *mut c_void) -> u32 {
    copy(stream, to, from, bytes)
}
unsafe extern "C" fn across(
    to: u64,
    _: *mut c_void,
    from: u64,
    _: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
) -> u32 {
    copy(stream, to, from, bytes)
}
unsafe extern "C" fn hip_across(to: u64, _: c_int, from: u64, _: c_int, bytes: usize, stream: *mut c_void) -> u32 {
    copy(stream, to, from, bytes)
}
fn fill(stream: *mut c_void, to: u64, width: usize, value: u32, count: usize) -> u32 {
    world(|world| world.put(stream as usize, Work::Fill { to, width, value, count }))
}
unsafe extern "C" fn fill_1(to: u64, value: u8, count: usize, stream: *mut c_void) -> u32 {
    fill(stream, to, 1, u32::from(value), count)
}
unsafe extern "C" fn fill_2(to: u64, value: u16, count: usize, stream: *mut c_void) -> u32 {
    fill(stream, to, 2, u32::from(value), count)
}
unsafe extern "C" fn fill_4(to: u64, value: c_uint, count: usize, stream: *mut c_void) -> u32 {
    fill(stream, to, 4, value, count)
}

unsafe extern "C" fn create_stream(to: *mut *mut c_void, _: c_uint) -> u32 {
    world(|world| {
        let (number, device) = (world.number(), world.current);
        world.streams.insert(number, Stream::of(device));
        // SAFETY: the caller's local.
        unsafe { give(to, handle(number)) }
    })
}
unsafe extern "C" fn destroy_stream(stream: *mut c_void) -> u32 {
    world(|world| {
        world.run_until(|world| world.is_empty(stream as usize));
        world.streams.remove(&(stream as usize));
        SUCCESS
    })
}
unsafe extern "C" fn synchronise(stream: *mut c_void) -> u32 {
    world(|world| world.run_until(|world| world.is_empty(stream as usize)))
}
unsafe extern "C" fn query_stream(stream: *mut c_void) -> u32 {
    world(|world| world.query(|world| world.is_empty(stream as usize)))
}
unsafe extern "C" fn wait(stream: *mut c_void, event: *mut c_void, _: c_uint) -> u32 {
    world(|world| world.wait(stream as usize, event as usize))
}
unsafe extern "C" fn begin_capture(stream: *mut c_void, _: c_uint) -> u32 {
    world(|world| {
        let status = world.outside_of_captures();
        if status == SUCCESS {
            world.capture = Some(Capture::new(stream as usize));
        }
        status
    })
}
unsafe extern "C" fn end_capture(stream: *mut c_void, to: *mut *mut c_void) -> u32 {
    world(|world| {
        let Some(capture) = world.capture.take_if(|capture| capture.began_on(stream as usize)) else {
            return INVALID_HANDLE;
        };
        let Some(graph) = capture.end() else { return CAPTURE_UNJOINED };
        let number = world.number();
        world.graphs.insert(number, Rc::new(graph));
        // SAFETY: the caller's local.
        unsafe { give(to, handle(number)) }
    })
}
unsafe extern "C" fn create_event(to: *mut *mut c_void, _: c_uint) -> u32 {
    world(|world| {
        let (number, device) = (world.number(), world.current);
        world.events.insert(number, Event::of(device));
        // SAFETY: the caller's local.
        unsafe { give(to, handle(number)) }
    })
}
/// Events that are waited for stay: only the number goes.
unsafe extern "C" fn destroy_event(_: *mut c_void) -> u32 {
    SUCCESS
}
unsafe extern "C" fn record(event: *mut c_void, stream: *mut c_void) -> u32 {
    world(|world| world.record(event as usize, stream as usize))
}
unsafe extern "C" fn wait_for_event(event: *mut c_void) -> u32 {
    world(|world| world.run_until(|world| world.has_passed(event as usize)))
}
unsafe extern "C" fn query_event(event: *mut c_void) -> u32 {
    world(|world| world.query(|world| world.has_passed(event as usize)))
}
unsafe extern "C" fn elapsed(to: *mut f32, _: *mut c_void, _: *mut c_void) -> u32 {
    // SAFETY: the caller's local. There is no time here.
    unsafe { give(to, 1.0) }
}

unsafe extern "C" fn load(to: *mut *mut c_void, code: *const c_void) -> u32 {
    // SAFETY: the imitated compiler's code.
    let Some(code) = (unsafe { Code::read(code) }) else { return INVALID_VALUE };
    world(|world| {
        let number = world.number();
        world.launches.modules.insert(number, code);
        // SAFETY: the caller's local.
        unsafe { give(to, handle(number)) }
    })
}
unsafe extern "C" fn unload(module: *mut c_void) -> u32 {
    world(|world| world.launches.modules.remove(&(module as usize)));
    SUCCESS
}
unsafe extern "C" fn function(to: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> u32 {
    // SAFETY: the caller's text ends with NUL.
    let entry = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    world(|world| {
        let Some(code) = world.launches.modules.get(&(module as usize)).cloned() else { return NOT_FOUND };
        let number = world.number();
        world.launches.functions.insert(number, Function { entry, code });
        // SAFETY: the caller's local.
        unsafe { give(to, handle(number)) }
    })
}
unsafe extern "C" fn set_function(_: *mut c_void, _: u32, bytes: c_int) -> u32 {
    let most = world(|world| world.machine().arch.shared_per_block());
    if bytes as usize <= most { SUCCESS } else { INVALID_VALUE }
}
unsafe extern "C" fn launch(
    function: *mut c_void,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    stream: *mut c_void,
    values: *mut *mut c_void,
    _: *mut *mut c_void,
) -> u32 {
    let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared };
    let stream = stream as usize;
    world(|world| {
        let Some(function) = world.launches.functions.get(&(function as usize)) else { return INVALID_HANDLE };
        let most = world.machine().arch.shared_per_block();
        if shared as usize > most || bx * by * bz > 1024 {
            return INVALID_VALUE;
        }
        if world.refuses(&function.entry) {
            return LAUNCH_FAILED;
        }
        let before = world.streams.get(&stream).map_or(&[][..], |stream| &stream.last);
        // SAFETY: the caller's values.
        match unsafe { world.launches.resolve(function, shape, values, before) } {
            Ok((task, places)) => {
                if let Some(of) = world.streams.get_mut(&stream) {
                    of.last = places;
                }
                world.put(stream, Work::Task(Rc::new(task)))
            }
            Err(why) => world.fail(LAUNCH_FAILED, why),
        }
    })
}

unsafe extern "C" fn nodes(graph: *mut c_void, _: *mut *mut c_void, to: *mut usize) -> u32 {
    world(|world| match world.graphs.get(&(graph as usize)) {
        // SAFETY: the caller's local.
        Some(graph) => unsafe { give(to, graph.nodes()) },
        None => INVALID_HANDLE,
    })
}
unsafe extern "C" fn instantiate(to: *mut *mut c_void, graph: *mut c_void, _: u64) -> u32 {
    world(|world| {
        let Some(graph) = world.graphs.get(&(graph as usize)).cloned() else { return INVALID_HANDLE };
        let number = world.number();
        world.graphs.insert(number, graph);
        // SAFETY: the caller's local.
        unsafe { give(to, handle(number)) }
    })
}
unsafe extern "C" fn upload(_: *mut c_void, _: *mut c_void) -> u32 {
    SUCCESS
}
unsafe extern "C" fn launch_graph(graph: *mut c_void, stream: *mut c_void) -> u32 {
    world(|world| match world.graphs.get(&(graph as usize)).cloned() {
        Some(graph) => world.replay(&graph, stream as usize),
        None => INVALID_HANDLE,
    })
}
unsafe extern "C" fn destroy_graph(graph: *mut c_void) -> u32 {
    world(|world| world.graphs.remove(&(graph as usize)));
    SUCCESS
}

pub fn table(vendor: Vendor) -> DriverTable {
    let common = DriverTable {
        cuInit: init,
        cuGetErrorString: detail,
        cuDeviceGetCount: count,
        cuDeviceGet: device,
        cuDeviceGetName: device_name,
        cuDeviceGetPCIBusId: bus,
        cuDeviceTotalMem_v2: total,
        cuDeviceCanAccessPeer: can_reach,
        cuMemGetInfo_v2: memory,
        cuMemAlloc_v2: allocate,
        cuMemFree_v2: free,
        cuMemHostAlloc: pin,
        cuMemFreeHost: unpin,
        cuMemHostGetDevicePointer_v2: pinned_address,
        cuMemcpyHtoDAsync_v2: to_device,
        cuMemcpyDtoHAsync_v2: to_host,
        cuMemcpyDtoDAsync_v2: between,
        cuMemsetD8Async: fill_1,
        cuMemsetD16Async: fill_2,
        cuMemsetD32Async: fill_4,
        cuStreamCreate: create_stream,
        cuStreamDestroy_v2: destroy_stream,
        cuStreamSynchronize: synchronise,
        cuStreamQuery: query_stream,
        cuStreamWaitEvent: wait,
        cuStreamBeginCapture_v2: begin_capture,
        cuStreamEndCapture: end_capture,
        cuEventCreate: create_event,
        cuEventDestroy_v2: destroy_event,
        cuEventRecord: record,
        cuEventSynchronize: wait_for_event,
        cuEventQuery: query_event,
        cuEventElapsedTime: elapsed,
        cuModuleLoadData: load,
        cuModuleUnload: unload,
        cuModuleGetFunction: function,
        cuLaunchKernel: launch,
        cuGraphGetNodes: nodes,
        cuGraphInstantiateWithFlags: instantiate,
        cuGraphUpload: upload,
        cuGraphLaunch: launch_graph,
        cuGraphDestroy: destroy_graph,
        cuGraphExecDestroy: destroy_graph,
        ..DriverTable::unavailable(vendor)
    };
    of_vendor(vendor, common)
}

/// Adds the functions that one vendor has, or has otherwise.
fn of_vendor(vendor: Vendor, common: DriverTable) -> DriverTable {
    match vendor {
        Vendor::Nvidia => DriverTable {
            cuDriverGetVersion: cuda_version,
            cuGetErrorName: cuda_name,
            cuDeviceGetAttribute: cuda_attribute,
            cuDevicePrimaryCtxRetain: retain,
            cuDevicePrimaryCtxRelease_v2: release,
            cuCtxSetCurrent: set_context,
            cuCtxEnablePeerAccess: reach,
            cuMemcpyPeerAsync: across,
            cuFuncSetAttribute: set_function,
            ..common
        },
        Vendor::Amd => DriverTable {
            cuDriverGetVersion: hip_version,
            cuGetErrorName: hip_name,
            cuDeviceGetAttribute: hip_attribute,
            hipSetDevice: set_device,
            hipDeviceEnablePeerAccess: hip_reach,
            hipMemcpyPeerAsync: hip_across,
            hipGetDevicePropertiesR0600: hip_properties,
            ..common
        },
    }
}
