//! Windows that a thread of their own reads ahead.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use super::place::StreamPlace;
use super::reader::Window;
use super::{Stream, is_over};
use crate::error::DataError;

/// Windows that are ready before they are requested; a further one is being read.
const READY: usize = 1;

/// The windows of a stream from a place on.
pub(super) struct Windows {
    ready: Option<Receiver<Result<Window, DataError>>>,
    over: Arc<AtomicBool>,
    worker: Option<JoinHandle<()>>,
}

impl Windows {
    /// `over` ends the thread, whatever it is waiting for.
    pub fn new(stream: Arc<Stream>, at: StreamPlace, over: Arc<AtomicBool>) -> Windows {
        let (sender, ready) = sync_channel(READY);
        let is_done = over.clone();
        let work = move || {
            let stop = || is_over(&is_done);
            let mut reader = match stream.reader(at) {
                Ok(reader) => reader,
                Err(error) => return drop(sender.send(Err(error))),
            };
            loop {
                let window = reader.window(&stop).and_then(|window| stream.count(&window).map(|()| window));
                let failed = window.is_err();
                if sender.send(window).is_err() || failed {
                    break;
                }
            }
            stream.give_back(reader);
        };
        let worker = std::thread::Builder::new().name("data-stream".to_owned()).spawn(work);
        Windows { ready: Some(ready), over, worker: Some(worker.expect("the system can start a thread")) }
    }

    /// The next window. Errors: those of reading it; nothing comes after one.
    pub fn next(&mut self) -> Result<Window, DataError> {
        let received = self.ready.as_ref().and_then(|ready| ready.recv().ok());
        received.unwrap_or_else(|| {
            if let Some(Err(panic)) = self.worker.take().map(JoinHandle::join) {
                std::panic::resume_unwind(panic);
            }
            Err(DataError::Stopped)
        })
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.ready = None;
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}
