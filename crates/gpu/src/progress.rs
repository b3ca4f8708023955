//! The progress of each rank, for the message when one of them does not answer: a word in its memory, which its own
//! stream writes at every collective. Knows numbers, not what they stand for.
#![allow(unsafe_code, reason = "a fill and a copy of one word, whose memory outlives them")]

use std::sync::Arc;
use std::time::Duration;

use crate::driver::{Device, DeviceBuffer, PinnedBuffer, Stream, Watch};
use crate::error::Result;

/// The timeout of a GPU's answer about its progress.
const ANSWER: Duration = Duration::from_secs(2);

/// One rank's word, and a stream that nothing else waits in.
struct Word {
    on_device: DeviceBuffer,
    on_host: PinnedBuffer,
    stream: Stream,
}

/// The words of the ranks of this process.
pub(crate) struct Progress {
    words: Vec<Word>,
}

/// A rank's place: an entry, and an instruction of it.
type Place = (usize, usize);

/// Maximal number of instructions of an entry, so that both fit in a word.
const INSTRUCTIONS: u32 = 1 << 20;

impl Progress {
    pub fn new(devices: &[Arc<Device>]) -> Result<Progress> {
        let word = |device: &Arc<Device>| {
            device.bind()?;
            let (on_device, on_host) = (DeviceBuffer::new(device, 4)?, PinnedBuffer::new(device, 4)?);
            let stream = Stream::new(device)?;
            on_device.zero(&stream)?;
            stream.synchronise()?;
            Ok(Word { on_device, on_host, stream })
        };
        Ok(Progress { words: devices.iter().map(word).collect::<Result<_>>()? })
    }

    /// Queues that a rank has come to an instruction.
    pub fn mark(&self, rank: usize, stream: &Stream, (entry, index): Place) -> Result<()> {
        let word = (entry as u32 * INSTRUCTIONS).wrapping_add(index as u32 + 1);
        // SAFETY: the word is an allocation of this device.
        unsafe { stream.fill(self.words[rank].on_device.address(), 4, word, 1) }
    }

    /// Returns the place where a rank came last, `None` if it has come to nothing yet; an error if its GPU does not
    /// answer.
    pub fn of(&self, rank: usize) -> std::result::Result<Option<Place>, ()> {
        let Word { on_device, on_host, stream } = &self.words[rank];
        let watch = Watch { timeout: ANSWER, ended: Box::new(|| None) };
        let read = || {
            stream.device.bind()?;
            // SAFETY: both words outlive the wait, or the process ends with them.
            unsafe { stream.copy_to_host(on_host.slice(0, 4), on_device.address(), 4)? };
            watch.wait(String::new, || stream.has_run())
        };
        read().map_err(|_| ())?;
        let word = u32::from_ne_bytes(on_host.bytes().try_into().expect("four bytes"));
        Ok(word.checked_sub(1).map(|place| ((place / INSTRUCTIONS) as usize, (place % INSTRUCTIONS) as usize)))
    }
}
