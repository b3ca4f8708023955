//! NCCL as a way to move bytes between ranks of this and of other processes: one communicator over all of them, a handle
//! for each rank of this process. All calls are given up when a watch says so. Knows ranks, streams and bytes; adds nothing.
#![allow(unsafe_code, reason = "calls of NCCL through its function table")]

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use crate::driver::{Device, Stream, Watch, text_or};
use crate::error::{Error, Result};
use crate::library::Opened;
use crate::sys::nccl::{self as sys, NcclTable};

pub use sys::UniqueId;

/// How long a communicator that ends in order waits for the other processes to end theirs.
const IN_ORDER: Duration = Duration::from_secs(30);

/// What ending it may take in all: the process goes to its end without.
const ENDING: Duration = Duration::from_secs(40);

/// The opened library.
pub struct Nccl {
    table: NcclTable,
}

impl Nccl {
    pub fn new(opened: Opened<NcclTable>) -> Arc<Nccl> {
        Arc::new(Nccl { table: opened.table })
    }

    /// Such as 2.28.9.
    pub fn version(&self) -> Result<String> {
        let mut version = 0;
        // SAFETY: the pointer is to a live local.
        self.check("ncclGetVersion", unsafe { (self.table.ncclGetVersion)(&mut version) }, None)?;
        Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    }

    /// What the ranks of one communicator find each other by. The process that makes it is the one that they ask.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: the pointer is to a live local.
        self.check("ncclGetUniqueId", unsafe { (self.table.ncclGetUniqueId)(&mut id) }, None)?;
        Ok(id)
    }

    /// A call that goes on in the background has not failed.
    fn check(&self, call: &'static str, status: sys::Status, of: Option<sys::Comm>) -> Result<()> {
        if status == sys::SUCCESS || status == sys::IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the library gives static texts, and the last error of a communicator that is alive, or of the process.
        let (name, detail) = unsafe {
            let last = (self.table.ncclGetLastError)(of.unwrap_or(std::ptr::null_mut()));
            (text_or((self.table.ncclGetErrorString)(status), "an unknown status"), text_or(last, ""))
        };
        Err(Error::Call { call, code: status, name, detail, context: String::new() })
    }
}

/// The handles of the ranks of this process.
pub struct Communicators {
    nccl: Arc<Nccl>,
    /// NCCL writes them while it connects: they stay where they are.
    handles: Box<[sys::Comm]>,
    watch: Arc<Watch>,
}

// SAFETY: handles may be used by any thread, one at a time.
unsafe impl Send for Communicators {}

/// A handle on its way to a thread that ends it.
struct Last(sys::Comm);

// SAFETY: as above; nobody else uses it any more.
unsafe impl Send for Last {}

impl Communicators {
    /// Connects the ranks `here`, on a device each, with the others of `ranks`, which do the same.
    pub fn join(
        nccl: &Arc<Nccl>,
        id: UniqueId,
        ranks: usize,
        here: Range<usize>,
        devices: &[Arc<Device>],
        watch: &Arc<Watch>,
    ) -> Result<Communicators> {
        let handles = vec![std::ptr::null_mut(); here.len()].into_boxed_slice();
        let mut all = Communicators { nccl: nccl.clone(), handles, watch: watch.clone() };
        let mut config = sys::Config::without_blocking();
        let places: Vec<*mut sys::Comm> = all.handles.iter_mut().map(|handle| &raw mut *handle).collect();
        let joined = all.grouped(|| {
            for ((rank, place), device) in here.clone().zip(&places).zip(devices) {
                device.bind()?;
                // SAFETY: the place outlives the wait of `grouped`, or is given up with what connects; the rest is copied.
                let status = unsafe {
                    (nccl.table.ncclCommInitRankConfig)(*place, ranks as c_int, id, rank as c_int, &mut config)
                };
                nccl.check("ncclCommInitRankConfig", status, None)?;
            }
            Ok(())
        });
        match joined {
            Ok(()) => Ok(all),
            Err(error) => {
                all.end(false).wait();
                Err(error)
            }
        }
    }

    /// Queues calls of several ranks as one, and waits until the library has: not until bytes have come.
    pub fn grouped(&self, queue: impl FnOnce() -> Result<()>) -> Result<()> {
        let table = &self.nccl.table;
        // SAFETY: no arguments to get wrong; every start has its end.
        let (queued, ended) = unsafe {
            self.nccl.check("ncclGroupStart", (table.ncclGroupStart)(), None)?;
            (queue(), (table.ncclGroupEnd)())
        };
        queued?;
        self.nccl.check("ncclGroupEnd", ended, None)?;
        let what = || "NCCL".to_owned();
        self.handles.iter().try_for_each(|handle| self.watch.wait(what, || self.has_queued(*handle)))
    }

    fn has_queued(&self, handle: sys::Comm) -> Result<bool> {
        let mut status = sys::SUCCESS;
        // SAFETY: the handle is alive and the pointer is to a live local.
        let asked = unsafe { (self.nccl.table.ncclCommGetAsyncError)(handle, &mut status) };
        self.nccl.check("ncclCommGetAsyncError", asked, Some(handle))?;
        self.nccl.check("NCCL", status, Some(handle))?;
        Ok(status != sys::IN_PROGRESS)
    }

    /// An error of the library that came up meanwhile.
    pub fn check(&self) -> Result<()> {
        self.handles.iter().try_for_each(|handle| self.has_queued(*handle).map(drop))
    }

    /// Gives `bytes` from an address of a rank of this process to all ranks, which lie one behind the other in the end.
    pub fn gather(&self, own: usize, stream: &Stream, from: u64, to: u64, bytes: usize) -> Result<()> {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the caller's addresses are of arenas, which are freed after all streams have been waited for.
        let status =
            unsafe { (self.nccl.table.ncclAllGather)(from, to, bytes, sys::BYTES, self.handles[own], stream.raw()) };
        self.nccl.check("ncclAllGather", status, Some(self.handles[own]))
    }

    pub fn send(&self, own: usize, stream: &Stream, from: u64, bytes: usize, peer: usize) -> Result<()> {
        let (from, peer) = (from as *const c_void, peer as c_int);
        // SAFETY: as in `gather`.
        let status =
            unsafe { (self.nccl.table.ncclSend)(from, bytes, sys::BYTES, peer, self.handles[own], stream.raw()) };
        self.nccl.check("ncclSend", status, Some(self.handles[own]))
    }

    pub fn receive(&self, own: usize, stream: &Stream, to: u64, bytes: usize, peer: usize) -> Result<()> {
        let (to, peer) = (to as *mut c_void, peer as c_int);
        // SAFETY: as in `gather`.
        let status =
            unsafe { (self.nccl.table.ncclRecv)(to, bytes, sys::BYTES, peer, self.handles[own], stream.raw()) };
        self.nccl.check("ncclRecv", status, Some(self.handles[own]))
    }

    /// Begins to end the handles: in order, when all that was queued has run, or what runs as well.
    pub fn end(mut self, in_order: bool) -> Ending {
        let (sender, ended) = mpsc::channel();
        let handles: Vec<_> = self.handles.iter().filter(|handle| !handle.is_null()).map(|of| Last(*of)).collect();
        let count = handles.len();
        for last in handles {
            let (nccl, sender) = (self.nccl.clone(), sender.clone());
            let end = move || {
                nccl.end_one(&last, in_order);
                let _ = sender.send(());
            };
            let _ = thread::Builder::new().name("nccl-end".into()).spawn(end);
        }
        Ending { ended, count, handles: std::mem::take(&mut self.handles) }
    }
}

/// What is being ended, and waited for by whoever lets go of it last: processes do not come to their ends at once, and one
/// that exits meanwhile would crash.
#[derive(Default)]
pub struct Endings(Mutex<Vec<Ending>>);

impl Endings {
    pub fn add(&self, ending: Ending) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(ending);
    }
}

impl Drop for Endings {
    fn drop(&mut self) {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..).for_each(Ending::wait);
    }
}

/// Handles that are being ended. NCCL waits for graphs that use them, and for other processes.
pub struct Ending {
    ended: mpsc::Receiver<()>,
    count: usize,
    handles: Box<[sys::Comm]>,
}

// SAFETY: its handles are only kept, never used.
unsafe impl Send for Ending {}

impl Ending {
    /// Waits for the end. A handle that does not come to it is left to that of the process.
    pub fn wait(self) {
        if !(0..self.count).all(|_| self.ended.recv_timeout(ENDING).is_ok()) {
            // What still connects writes to them.
            std::mem::forget(self.handles);
        }
    }
}

impl Nccl {
    fn end_one(&self, of: &Last, in_order: bool) {
        let ending = Watch { patience: IN_ORDER, ended: Box::new(|| None) };
        let finished = || -> Result<bool> {
            let mut status = sys::SUCCESS;
            // SAFETY: the handle is alive.
            let asked = unsafe { (self.table.ncclCommGetAsyncError)(of.0, &mut status) };
            self.check("ncclCommGetAsyncError", asked, None)?;
            self.check("ncclCommFinalize", status, None)?;
            Ok(status == sys::SUCCESS)
        };
        let in_order = in_order && {
            // SAFETY: the handle is alive, and nobody else uses it.
            let begun = self.check("ncclCommFinalize", unsafe { (self.table.ncclCommFinalize)(of.0) }, None);
            begun.and_then(|()| ending.wait(String::new, finished)).is_ok()
        };
        // SAFETY: as above; it is used no more. A failure at the end cannot be acted on.
        unsafe {
            match in_order {
                true => (self.table.ncclCommDestroy)(of.0),
                false => (self.table.ncclCommAbort)(of.0),
            };
        }
    }
}
