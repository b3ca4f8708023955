//! Copies between host and device through page-locked memory: batches and scalars to the device, results to the host.
//! All in the order of one stream.
//!
//! Knows bytes and addresses, not what they are.
#![allow(unsafe_code, reason = "copies from and to page-locked memory that outlives them")]

use crate::driver::{Device, DeviceBuffer, Event, PinnedBuffer, Stream};
use crate::error::Result;
use rayon::prelude::*;
use std::sync::Arc;

/// Bytes of one part of the upload memory.
const PART: usize = 4 << 20;
/// Bytes of one part of the memory that larger writes go through.
const LARGE_PART: usize = 16 << 20;
/// Number of parts, which are filled alternately.
const PARTS: usize = 2;

/// Bytes of a write that a thread copies: one thread copies slower than the device takes them.
const SHARE: usize = 128 << 10;

/// Page-locked memory through which writes go.
pub(crate) struct Uploads {
    parts: Vec<Part>,
    current: usize,
    used: usize,
    /// Filled alternately by the pieces of writes of more than [`PART`] bytes; empty before the first.
    large: Vec<Part>,
    next_large: usize,
}

/// A part of the upload memory.
struct Part {
    buffer: PinnedBuffer,
    /// Comes after the copies from it.
    event: Event,
    /// True if copies may be queued from it.
    queued: bool,
}

impl Part {
    fn new(device: &Arc<Device>, size: usize) -> Result<Part> {
        Ok(Part { buffer: PinnedBuffer::new(device, size)?, event: Event::new(device)?, queued: false })
    }

    /// Waits for the copies from it.
    fn wait(&mut self) -> Result<()> {
        if std::mem::take(&mut self.queued) { self.event.synchronise() } else { Ok(()) }
    }

    /// Marks the end of the copies from it.
    fn record(&mut self, stream: &Stream) -> Result<()> {
        self.event.record(stream)?;
        self.queued = true;
        Ok(())
    }
}

/// Copies on as many threads as it has shares.
fn copy(place: &mut [u8], source: &[u8]) {
    let shares = place.par_chunks_mut(SHARE).zip(source.par_chunks(SHARE));
    shares.for_each(|(place, share)| place.copy_from_slice(share));
}

impl Uploads {
    pub fn new(device: &Arc<Device>) -> Result<Uploads> {
        let parts = (0..PARTS).map(|_| Part::new(device, PART)).collect::<Result<_>>()?;
        Ok(Uploads { parts, current: 0, used: 0, large: Vec::new(), next_large: 0 })
    }

    /// Copies `source` to byte `offset` of a buffer; `source` may be dropped at once.
    pub fn write(&mut self, stream: &Stream, to: &DeviceBuffer, offset: usize, source: &[u8]) -> Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        if source.len() > PART {
            return self.write_large(stream, to, offset, source);
        }
        if self.used + source.len() > PART {
            self.turn(stream)?;
        }
        let place = &mut self.parts[self.current].buffer.bytes_mut()[self.used..self.used + source.len()];
        match source.len() <= SHARE {
            true => place.copy_from_slice(source),
            false => copy(place, source),
        }
        // SAFETY: the place is written again only after `turn` has waited for what was queued from it, and
        // freed only after the session has waited for its stream.
        unsafe { to.write_pinned(stream, offset, place)? };
        // Copies start on boundaries of 16 bytes.
        self.used = (self.used + source.len()).next_multiple_of(16);
        Ok(())
    }

    /// Continues with the next part, after all copies from it have run.
    fn turn(&mut self, stream: &Stream) -> Result<()> {
        self.parts[self.current].record(stream)?;
        self.current = (self.current + 1) % PARTS;
        self.used = 0;
        self.parts[self.current].wait()
    }

    /// Copies a large source in pieces: while one goes to the device, the next is copied to the other part.
    fn write_large(&mut self, stream: &Stream, to: &DeviceBuffer, offset: usize, source: &[u8]) -> Result<()> {
        while self.large.len() < PARTS {
            self.large.push(Part::new(&stream.device, LARGE_PART)?);
        }
        for (piece, source) in source.chunks(LARGE_PART).enumerate() {
            let part = &mut self.large[self.next_large];
            part.wait()?;
            let place = &mut part.buffer.bytes_mut()[..source.len()];
            copy(place, source);
            // SAFETY: the part is written again only after `wait`, and freed only after the session has waited for its
            // stream.
            unsafe { to.write_pinned(stream, offset + piece * LARGE_PART, place)? };
            part.record(stream)?;
            self.next_large = (self.next_large + 1) % PARTS;
        }
        Ok(())
    }
}

/// Bytes of one part of the memory that large reads go through; smaller ones are copied to their target directly.
const READ_PART: usize = 16 << 20;

/// Bytes that a thread copies out of a part.
const OF_THREAD: usize = 1 << 20;

/// Page-locked memory through which large reads go: while one part is copied to the target, which may be fresh memory, the next one
/// arrives.
#[derive(Default)]
pub(crate) struct Downloads {
    parts: Vec<(PinnedBuffer, Event)>,
}

impl Downloads {
    /// Copies from byte `offset` of a buffer, and waits.
    pub fn read(&mut self, stream: &Stream, from: &DeviceBuffer, offset: usize, target: &mut [u8]) -> Result<()> {
        if target.len() <= READ_PART {
            return from.read(stream, offset, target);
        }
        while self.parts.len() < PARTS {
            self.parts.push((PinnedBuffer::new(&stream.device, READ_PART)?, Event::new(&stream.device)?));
        }
        let size = target.len();
        self.queue(stream, from, offset, size, 0)?;
        for (piece, target) in target.chunks_mut(READ_PART).enumerate() {
            self.queue(stream, from, offset, size, piece + 1)?;
            let (buffer, event) = &self.parts[piece % PARTS];
            event.synchronise()?;
            let source = buffer.bytes()[..target.len()].par_chunks(OF_THREAD);
            target.par_chunks_mut(OF_THREAD).zip(source).for_each(|(to, from)| to.copy_from_slice(from));
        }
        Ok(())
    }

    /// Queues the copy of a piece, if there is one of this number, to the part whose turn it is.
    fn queue(&mut self, stream: &Stream, from: &DeviceBuffer, offset: usize, size: usize, piece: usize) -> Result<()> {
        let first = piece * READ_PART;
        if first >= size {
            return Ok(());
        }
        let (buffer, event) = &mut self.parts[piece % PARTS];
        let part = &mut buffer.bytes_mut()[..READ_PART.min(size - first)];
        // SAFETY: the part is read after its event, and freed only after the session has waited for its stream.
        unsafe { from.read_pinned(stream, offset + first, part)? };
        event.record(stream)
    }
}

/// One set of results in transfer to the host.
struct Slot {
    buffer: PinnedBuffer,
    event: Event,
    /// The number of the reading that is in it, and its bytes.
    taken: Option<(u64, usize)>,
}

/// Results in transfer to the host.
#[derive(Default)]
pub(crate) struct Readings {
    slots: Vec<Slot>,
    last: u64,
}

impl Readings {
    /// Queues copies of (buffer, offset, bytes), which are concatenated; returns the reading's number.
    pub fn start(&mut self, stream: &Stream, from: &[(&DeviceBuffer, usize, usize)]) -> Result<u64> {
        let bytes: usize = from.iter().map(|(_, _, bytes)| bytes).sum();
        let fits = |slot: &Slot| slot.taken.is_none() && slot.buffer.bytes().len() >= bytes;
        let index = match self.slots.iter().position(fits) {
            Some(index) => index,
            None => {
                let (buffer, event) = (PinnedBuffer::new(&stream.device, bytes)?, Event::new(&stream.device)?);
                self.slots.push(Slot { buffer, event, taken: None });
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[index];
        let mut rest = &mut slot.buffer.bytes_mut()[..bytes];
        for (buffer, offset, bytes) in from {
            let (part, after) = rest.split_at_mut(*bytes);
            // SAFETY: the slot is taken: it is read after its event, and freed after the session has waited
            // for its stream.
            unsafe { buffer.read_pinned(stream, *offset, part)? };
            rest = after;
        }
        slot.event.record(stream)?;
        self.last += 1;
        slot.taken = Some((self.last, bytes));
        Ok(self.last)
    }

    /// Waits for a reading. Panics if there is none of this number.
    pub fn finish(&mut self, number: u64) -> Result<Vec<u8>> {
        let is_it = |slot: &&mut Slot| slot.taken.is_some_and(|(taken, _)| taken == number);
        let slot = self.slots.iter_mut().find(is_it).expect("a reading is finished once, by the session that began it");
        slot.event.synchronise()?;
        let (_, bytes) = slot.taken.take().expect("just seen");
        Ok(slot.buffer.bytes()[..bytes].to_vec())
    }
}
