//! Capturing a stream's work once and replaying it. No knowledge of what was captured.
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
        // SAFETY: the stream is alive.
        let status = unsafe { (t.cuStreamBeginCapture_v2)(stream.raw(), sys::CAPTURE_MODE_THREAD_LOCAL) };
        device.check("cuStreamBeginCapture", status)?;
        let queued = queue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is capturing since the call above.
        let ended = unsafe { (t.cuStreamEndCapture)(stream.raw(), &mut graph) };
        queued?;
        device.check("cuStreamEndCapture", ended)?;
        let (mut nodes, mut executable) = (0, std::ptr::null_mut());
        // SAFETY: the graph is alive until it is destroyed here; a null array asks for the count.
        let (counted, instantiated) = unsafe {
            let counted = (t.cuGraphGetNodes)(graph, std::ptr::null_mut(), &mut nodes);
            let instantiated = (t.cuGraphInstantiateWithFlags)(&mut executable, graph, 0);
            (t.cuGraphDestroy)(graph);
            (counted, instantiated)
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

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `capture`. A failure at exit cannot be acted on.
        unsafe { (self.device.table().cuGraphExecDestroy)(self.executable) };
    }
}
