//! Captures a stream's work once and replays it. Does not know what was captured.
#![allow(unsafe_code, reason = "calls of the CUDA driver through its function table")]

use super::{Device, Stream};
use crate::error::Result;
use crate::sys::driver as sys;
use std::sync::Arc;

/// Captured and instantiated work. The memory that it reads and writes must stay allocated.
pub struct Graph {
    device: Arc<Device>,
    executable: sys::GraphExec,
    nodes: usize,
}

// SAFETY: a graph may be launched from any thread whose context is current; it has one owner.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs `queue` with the stream in capture mode: nothing is executed, everything is recorded.
    /// An error of `queue` ends the capture and is returned.
    pub fn capture(stream: &Stream, queue: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let device = stream.device.clone();
        let t = device.table();
        let mut capture = Capture::begin(stream)?;
        queue()?;
        let captured = capture.end()?;
        let (mut nodes, mut executable) = (0, std::ptr::null_mut());
        // SAFETY: the captured work is alive until `capture` is dropped; a null array asks for the count.
        let (counted, instantiated) = unsafe {
            let counted = (t.cuGraphGetNodes)(captured, std::ptr::null_mut(), &mut nodes);
            (counted, (t.cuGraphInstantiateWithFlags)(&mut executable, captured, 0))
        };
        device.check("cuGraphInstantiateWithFlags", instantiated)?;
        let graph = Graph { device: device.clone(), executable, nodes };
        device.check("cuGraphGetNodes", counted)?;
        Ok(graph)
    }

    /// Number of kernels, copies and fills that one replay runs.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Uploads the graph to the device before its first replay.
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        // SAFETY: graph and stream are alive.
        self.device
            .check("cuGraphUpload", unsafe { (self.device.table().cuGraphUpload)(self.executable, stream.raw()) })
    }

    /// Queues one replay of the graph.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: graph and stream are alive.
        self.device
            .check("cuGraphLaunch", unsafe { (self.device.table().cuGraphLaunch)(self.executable, stream.raw()) })
    }
}

/// A stream in capture mode, and then the captured graph. On every exit, by an error or a panic too, the stream leaves
/// that mode and the graph is freed.
struct Capture<'a> {
    stream: &'a Stream,
    captured: sys::Graph,
    has_ended: bool,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Stream) -> Result<Capture<'a>> {
        let table = stream.device.table();
        // SAFETY: the stream is alive.
        let status = unsafe { (table.cuStreamBeginCapture_v2)(stream.raw(), sys::CAPTURE_MODE_THREAD_LOCAL) };
        stream.device.check("cuStreamBeginCapture", status)?;
        Ok(Capture { stream, captured: std::ptr::null_mut(), has_ended: false })
    }

    fn end(&mut self) -> Result<sys::Graph> {
        self.has_ended = true;
        // SAFETY: the stream is capturing since `begin`. A failed capture returns no graph.
        let ended = unsafe { (self.stream.device.table().cuStreamEndCapture)(self.stream.raw(), &mut self.captured) };
        self.stream.device.check("cuStreamEndCapture", ended)?;
        Ok(self.captured)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            // The error that ended the capture is reported by its cause.
            let _ = self.end();
        }
        if !self.captured.is_null() {
            // SAFETY: given by the end of the capture, and has no other owner.
            unsafe { (self.stream.device.table().cuGraphDestroy)(self.captured) };
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `capture`. A failure at exit cannot be acted on.
        unsafe { (self.device.table().cuGraphExecDestroy)(self.executable) };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ffi::{c_char, c_int, c_uint, c_void};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::ptr::null_mut;

    use super::*;
    use crate::error::Error;
    use crate::vendor::Vendor;

    /// The state of an imitated driver, and the call that it is to refuse.
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    struct State {
        refuses: Option<&'static str>,
        capturing: bool,
        graphs: usize,
        executables: usize,
    }

    thread_local! {
        static STATE: RefCell<State> = const { RefCell::new(State { refuses: None, capturing: false, graphs: 0, executables: 0 }) };
    }

    /// Runs the action of a call, unless it is to be refused.
    fn call(name: &str, act: impl FnOnce(&mut State)) -> sys::Result32 {
        STATE.with_borrow_mut(|state| {
            if state.refuses == Some(name) {
                return 900;
            }
            act(state);
            sys::SUCCESS
        })
    }

    unsafe extern "C" fn error_text(_: sys::Result32, _: *mut *const c_char) -> sys::Result32 {
        sys::SUCCESS
    }

    unsafe extern "C" fn stream_create(stream: *mut sys::Stream, _: c_uint) -> sys::Result32 {
        // SAFETY: given by `Stream::new`.
        unsafe { *stream = null_mut() };
        sys::SUCCESS
    }

    unsafe extern "C" fn stream_destroy(_: sys::Stream) -> sys::Result32 {
        sys::SUCCESS
    }

    unsafe extern "C" fn release(_: c_int) -> sys::Result32 {
        sys::SUCCESS
    }

    unsafe extern "C" fn begin(_: sys::Stream, _: c_uint) -> sys::Result32 {
        call("begin", |state| {
            assert!(!state.capturing);
            state.capturing = true;
        })
    }

    /// Ends the capture; a failed capture ends too, and returns no graph.
    unsafe extern "C" fn end(_: sys::Stream, graph: *mut sys::Graph) -> sys::Result32 {
        STATE.with_borrow_mut(|state| assert!(std::mem::take(&mut state.capturing)));
        call("end", |state| {
            state.graphs += 1;
            // SAFETY: given by `Capture::end`. The address is only compared.
            unsafe { *graph = std::ptr::dangling_mut::<c_void>() };
        })
    }

    unsafe extern "C" fn nodes(_: sys::Graph, _: *mut *mut c_void, count: *mut usize) -> sys::Result32 {
        // SAFETY: given by `Graph::capture`.
        call("nodes", |_| unsafe { *count = 3 })
    }

    unsafe extern "C" fn instantiate(executable: *mut sys::GraphExec, _: sys::Graph, _: u64) -> sys::Result32 {
        call("instantiate", |state| {
            state.executables += 1;
            // SAFETY: given by `Graph::capture`.
            unsafe { *executable = std::ptr::dangling_mut::<c_void>() };
        })
    }

    unsafe extern "C" fn destroy(_: sys::Graph) -> sys::Result32 {
        call("destroy", |state| state.graphs -= 1)
    }

    unsafe extern "C" fn destroy_executable(_: sys::GraphExec) -> sys::Result32 {
        call("destroy_executable", |state| state.executables -= 1)
    }

    fn stream() -> Stream {
        let table = sys::DriverTable {
            cuGetErrorName: error_text,
            cuGetErrorString: error_text,
            cuStreamCreate: stream_create,
            cuStreamDestroy_v2: stream_destroy,
            cuDevicePrimaryCtxRelease_v2: release,
            cuStreamBeginCapture_v2: begin,
            cuStreamEndCapture: end,
            cuGraphGetNodes: nodes,
            cuGraphInstantiateWithFlags: instantiate,
            cuGraphDestroy: destroy,
            cuGraphExecDestroy: destroy_executable,
            ..sys::DriverTable::unavailable(Vendor::Nvidia)
        };
        Stream::new(&Device::imitated(table, 0)).unwrap()
    }

    #[test]
    fn a_capture_leaves_nothing_behind_however_it_ends() {
        let stream = stream();
        let failing = || Err(Error::LibraryBroken { path: "library".into(), reason: "queued".into() });
        let graph = Graph::capture(&stream, || Ok(())).unwrap();
        assert_eq!(graph.nodes(), 3);
        assert_eq!(STATE.take(), State { executables: 1, ..State::default() }, "what is replayed stays");
        STATE.set(State { executables: 1, ..State::default() });
        drop(graph);
        assert_eq!(STATE.take(), State::default());

        assert!(Graph::capture(&stream, failing).err().unwrap().to_string().contains("queued"));
        assert_eq!(STATE.take(), State::default(), "an error of what is captured");
        let panics = || -> Result<()> { panic!("in the middle") };
        assert!(catch_unwind(AssertUnwindSafe(|| Graph::capture(&stream, panics))).is_err());
        assert_eq!(STATE.take(), State::default(), "a panic");
        for refused in ["begin", "end", "nodes", "instantiate"] {
            STATE.set(State { refuses: Some(refused), ..State::default() });
            assert!(Graph::capture(&stream, || Ok(())).is_err(), "{refused}");
            assert_eq!(STATE.take(), State { refuses: Some(refused), ..State::default() }, "{refused}");
        }
        STATE.set(State { refuses: Some("end"), ..State::default() });
        assert!(
            Graph::capture(&stream, failing).err().unwrap().to_string().contains("queued"),
            "the first error is reported"
        );
    }
}
