//! The memory of each arena. Knows arenas and options; not when anything is moved.

use program::{ArenaId, ArenaKind, MemorySpace};

use crate::options::OffloadOptions;

/// Device memory of one slice of the update, bytes: 0.6 ms of the link of an H200, long against what queueing a
/// transfer takes and short against the whole.
const SLICE_BYTES: usize = 32 << 20;

/// The home of every arena, by the options with everything decided, and how the update gets at those on the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Homes(OffloadOptions);

impl Homes {
    pub fn new(options: &OffloadOptions) -> Homes {
        Homes(*options)
    }

    /// Returns the memory of an arena. What the host reads for a checkpoint is never write-combined.
    pub fn of(&self, of: ArenaId) -> MemorySpace {
        let Homes(options) = self;
        let (offloaded, write_combined) = match ArenaKind::at(of) {
            ArenaKind::Optimizer => (options.optimizer, false),
            ArenaKind::Masters => (options.master, false),
            ArenaKind::Gradients => (options.gradients, false),
            ArenaKind::Quants => (options.quants, false),
            ArenaKind::Waiting => (Some(true), options.write_combined),
            ArenaKind::Weights
            | ArenaKind::Adapters
            | ArenaKind::Batch
            | ArenaKind::Scalars
            | ArenaKind::Constants
            | ArenaKind::Activations
            | ArenaKind::States
            | ArenaKind::Cache
            | ArenaKind::Errors => (None, false),
        };
        if offloaded == Some(true) { MemorySpace::Host { write_combined } } else { MemorySpace::Device }
    }

    /// Bytes of one slice of the update.
    pub fn slice_bytes(&self) -> usize {
        self.0.slice_bytes.unwrap_or(SLICE_BYTES)
    }

    pub fn on_device(&self, of: ArenaId) -> bool {
        self.of(of) == MemorySpace::Device
    }

    /// True if the update moves the tensors of an arena to the device, instead of reaching them in their home.
    pub fn streams(&self, of: ArenaId) -> bool {
        !self.on_device(of) && !self.0.zero_copy
    }
}
