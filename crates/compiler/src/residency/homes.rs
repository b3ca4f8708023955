//! Which memory each arena is in. Knows arenas and options; not when anything is moved.

use program::{ArenaId, Place};

use crate::memory::arena;
use crate::options::OffloadOptions;

/// Device memory of one slice of the update, bytes: 0.6 ms of the link of an H200, long beside what queueing a
/// transfer takes and short beside the whole.
const SLICE_BYTES: usize = 32 << 20;

/// The home of every arena, and how the update gets at those on the host: the options, with everything decided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Homes {
    master: bool,
    optimizer: bool,
    gradients: bool,
    zero_copy: bool,
    write_combined: bool,
    /// Bytes of one slice of the update.
    pub slice_bytes: usize,
}

impl Homes {
    pub fn new(of: &OffloadOptions) -> Homes {
        Homes {
            master: of.master.unwrap_or(false),
            optimizer: of.optimizer.unwrap_or(false),
            gradients: of.gradients.unwrap_or(false),
            zero_copy: of.zero_copy,
            write_combined: of.write_combined,
            slice_bytes: of.slice_bytes.unwrap_or(SLICE_BYTES),
        }
    }

    /// Whose memory an arena is. What the host reads for a checkpoint is never write-combined.
    pub fn of(&self, of: ArenaId) -> Place {
        let host = |on: bool, write_combined: bool| if on { Place::Host { write_combined } } else { Place::Device };
        match of {
            arena::OPTIMIZER => host(self.optimizer, false),
            arena::MASTERS => host(self.master, false),
            arena::GRADIENTS => host(self.gradients, false),
            arena::WAITING => host(true, self.write_combined),
            _ => Place::Device,
        }
    }

    pub fn on_device(&self, of: ArenaId) -> bool {
        self.of(of) == Place::Device
    }

    /// Whether the update moves what lies in an arena to the device, instead of reaching it at home.
    pub fn streams(&self, of: ArenaId) -> bool {
        !self.on_device(of) && !self.zero_copy
    }
}
