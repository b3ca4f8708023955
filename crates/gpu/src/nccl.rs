//! NCCL as a transport between ranks of this and of other processes: one communicator over all of them, a handle for
//! each rank of this process. A watch limits all calls. Knows ranks, streams and bytes; adds nothing.
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

/// The time that a communicator which ends in order waits for the other processes to end theirs.
const IN_ORDER: Duration = Duration::from_secs(30);

/// The time limit for ending all of them: after it the process ends without.
const ENDING: Duration = Duration::from_secs(40);

/// The function table of the loaded NCCL library.
pub struct Nccl {
    table: NcclTable,
}

impl Nccl {
    pub fn new(opened: Opened<NcclTable>) -> Arc<Nccl> {
        Arc::new(Nccl { table: opened.table })
    }

    /// The version of the library, such as 2.28.9.
    pub fn version(&self) -> Result<String> {
        let mut version = 0;
        // SAFETY: the pointer is to a live local.
        self.check("ncclGetVersion", unsafe { (self.table.ncclGetVersion)(&mut version) }, None)?;
        Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    }

    /// Returns a new identity of a communicator, by which its ranks find each other: they connect to the process that
    /// makes it.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: the pointer is to a live local.
        self.check("ncclGetUniqueId", unsafe { (self.table.ncclGetUniqueId)(&mut id) }, None)?;
        Ok(id)
    }

    /// Checks the status of a call. A call that goes on in the background has not failed.
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
    /// The handles. NCCL writes to them while it connects: they must not move.
    handles: Box<[sys::Comm]>,
    watch: Arc<Watch>,
}

// SAFETY: handles may be used by any thread, one at a time.
unsafe impl Send for Communicators {}

/// A handle that is passed to a thread which ends it.
struct Last(sys::Comm);

// SAFETY: as above; no other thread uses it any more.
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

    /// Queues calls of several ranks as one, and waits until the library has queued them, not until bytes have come.
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

    /// Returns an error of the library that came up in the meantime.
    pub fn check(&self) -> Result<()> {
        self.handles.iter().try_for_each(|handle| self.has_queued(*handle).map(drop))
    }

    /// All-gathers `bytes` from an address of a rank of this process; the results are concatenated in the order of the
    /// ranks.
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

    /// Begins to end the handles: in order, after all queued work has run, or by aborting it.
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

/// The communicators that are being ended; whoever drops the last reference waits for them: processes do not end at the
/// same time, and one that exits earlier would crash.
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
    /// Waits for the end. A handle that does not end is left to the end of the process.
    pub fn wait(self) {
        if !(0..self.count).all(|_| self.ended.recv_timeout(ENDING).is_ok()) {
            // A connection in progress writes to the handles.
            std::mem::forget(self.handles);
        }
    }
}

impl Nccl {
    fn end_one(&self, of: &Last, in_order: bool) {
        let ending = Watch { timeout: IN_ORDER, ended: Box::new(|| None) };
        let finished = || -> Result<bool> {
            let mut status = sys::SUCCESS;
            // SAFETY: the handle is alive.
            let asked = unsafe { (self.table.ncclCommGetAsyncError)(of.0, &mut status) };
            self.check("ncclCommGetAsyncError", asked, None)?;
            self.check("ncclCommFinalize", status, None)?;
            Ok(status == sys::SUCCESS)
        };
        let in_order = in_order && {
            // SAFETY: the handle is alive, and no other thread uses it.
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
