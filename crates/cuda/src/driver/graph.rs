//! Captures a stream's work once and replays it. Does not know what was captured.
#![allow(unsafe_code, reason = "calls of the CUDA driver through its function table")]

use super::{Device, Stream};
use crate::error::Result;
use crate::sys::driver as sys;
use std::sync::Arc;

/// Work that was captured and instantiated. What it reads and writes must stay allocated.
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

    /// How many kernels, copies and fills one replay runs.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Queues one replay.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: graph and stream are alive.
        self.device
            .check("cuGraphLaunch", unsafe { (self.device.table().cuGraphLaunch)(self.executable, stream.raw()) })
    }
}

/// A stream in capture mode, and then what was captured. However it is left, by an error or a panic too, the stream is
/// out of that mode and the work is freed.
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
        // SAFETY: the stream is capturing since `begin`. Of a capture that failed nothing is given.
        let ended = unsafe { (self.stream.device.table().cuStreamEndCapture)(self.stream.raw(), &mut self.captured) };
        self.stream.device.check("cuStreamEndCapture", ended)?;
        Ok(self.captured)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            // What ended the capture is reported by whoever did.
            let _ = self.end();
        }
        if !self.captured.is_null() {
            // SAFETY: given by the end of the capture, and owned by nobody else.
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
