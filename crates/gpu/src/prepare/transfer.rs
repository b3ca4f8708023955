//! Transfers between device and host memory on their own streams, and the events between streams. Does not know what is
//! moved or why.
#![allow(unsafe_code, reason = "copies between addresses that the program describes")]

use super::Preparation;
use crate::driver::{Device, Event};
use crate::engine::Engine;
use crate::error::Result;
use program::{EventId, StreamId, TensorRef};
use std::collections::HashMap;
use std::sync::Arc;

/// The events of one entry.
pub(crate) struct Events {
    device: Arc<Device>,
    known: HashMap<EventId, Arc<Event>>,
}

impl Events {
    pub fn new(device: &Arc<Device>) -> Events {
        Events { device: device.clone(), known: HashMap::new() }
    }

    fn get(&mut self, id: EventId) -> Result<Arc<Event>> {
        if let Some(event) = self.known.get(&id) {
            return Ok(event.clone());
        }
        let event = Arc::new(Event::without_time(&self.device)?);
        self.known.insert(id, event.clone());
        Ok(event)
    }
}

/// Work that is queued on a stream.
pub(crate) struct OnStream {
    stream: StreamId,
    what: What,
}

enum What {
    ToHost { host: *mut u8, device: u64, bytes: usize },
    ToDevice { device: u64, host: *const u8, bytes: usize },
    Record(Arc<Event>),
    Wait(Arc<Event>),
}

// SAFETY: the pointers lead to page-locked memory of the session that owns this.
unsafe impl Send for What {}

pub(super) fn transfer(p: &mut Preparation, from: &TensorRef, to: &TensorRef, stream: StreamId) -> OnStream {
    assert!(
        from.is_dense() && to.is_dense() && from.dtype == to.dtype && from.len() == to.len(),
        "a transfer moves dense bytes as they are: {from} to {to}"
    );
    let bytes = from.bytes();
    let what = match (stream, p.memory.host(from), p.memory.host(to)) {
        (StreamId::ToHost, None, Some(host)) => {
            What::ToHost { host: host.slice(to.offset, bytes), device: p.memory.address(from), bytes }
        }
        (StreamId::ToDevice, Some(host), None) => {
            What::ToDevice { device: p.memory.address(to), host: host.slice(from.offset, bytes), bytes }
        }
        _ => panic!("a transfer is on the stream of its direction: {from} to {to} is not {}", stream.name()),
    };
    OnStream { stream, what }
}

pub(super) fn record(p: &mut Preparation, event: EventId, stream: StreamId) -> Result<OnStream> {
    Ok(OnStream { stream, what: What::Record(p.events.get(event)?) })
}

pub(super) fn wait(p: &mut Preparation, event: EventId, stream: StreamId) -> Result<OnStream> {
    Ok(OnStream { stream, what: What::Wait(p.events.get(event)?) })
}

impl OnStream {
    pub fn queue(&self, engine: &Engine) -> Result<()> {
        let stream = engine.stream_of(self.stream);
        match &self.what {
            // SAFETY: both ranges are in the session's arenas; the host reads and writes these only after it
            // has waited for every stream.
            What::ToHost { host, device, bytes } => unsafe { stream.copy_to_host(*host, *device, *bytes) },
            // SAFETY: as above.
            What::ToDevice { device, host, bytes } => unsafe { stream.copy_to_device(*device, *host, *bytes) },
            What::Record(event) => event.record(stream),
            What::Wait(event) => stream.wait(event),
        }
    }
}
