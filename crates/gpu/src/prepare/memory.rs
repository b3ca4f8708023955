//! The arenas of a session: allocated once; those of single entries are reallocated for larger entries. Knows which
//! contents persist, not what they are.

use crate::driver::{Device, DeviceBuffer, PinnedBuffer, Stream};
use crate::error::{During, Result};
use program::{Arena, ArenaKind, MemorySpace, TensorRef};
use std::sync::Arc;

/// The arenas, in the program's order.
pub(crate) struct Memory {
    pub kinds: Vec<ArenaKind>,
    /// Arenas in device memory; empty for those on the host.
    pub arenas: Vec<DeviceBuffer>,
    /// Arenas in host memory, each with its address for kernels.
    pub hosts: Vec<Option<(PinnedBuffer, u64)>>,
    /// True while nothing in the arenas is needed.
    is_new: bool,
}

impl Memory {
    /// Allocates the arenas with undefined contents.
    pub fn allocate(arenas: &[Arena], device: &Arc<Device>) -> Result<Memory> {
        Ok(Memory {
            kinds: arenas.iter().map(|arena| arena.kind).collect(),
            arenas: arenas.iter().map(|arena| on_device(arena, device)).collect::<Result<_>>()?,
            hosts: arenas.iter().map(|arena| on_host(arena, device)).collect::<Result<_>>()?,
            is_new: true,
        })
    }

    /// Takes arenas of other sizes. Those that live from entry to entry stay as they are; the others are reallocated
    /// where they are too small, and where the device has no room for the rest, also where they are too large. Nothing may
    /// be using these any more.
    pub fn adopt(&mut self, arenas: &[Arena], device: &Arc<Device>) -> Result<()> {
        self.is_new = false;
        for index in arenas.len()..self.kinds.len() {
            self.free_pages(index, device)?;
        }
        for (index, arena) in arenas.iter().enumerate() {
            if self.changes(index, arena) {
                self.free_pages(index, device)?;
            }
        }
        let grows = |(index, arena): &(usize, &Arena)| {
            !arena.is_on_host() && (*index >= self.kinds.len() || self.bytes(*index) < arena.bytes)
        };
        let growing = arenas.iter().enumerate().filter(grows);
        let wanted: usize =
            growing.map(|(index, arena)| arena.bytes - self.arenas.get(index).map_or(0, DeviceBuffer::len)).sum();
        if wanted > device.memory()?.0 {
            self.shrink(arenas, device)?;
        }
        for (index, arena) in arenas.iter().enumerate() {
            match self.kinds.get(index) {
                None => {
                    self.kinds.push(arena.kind);
                    self.arenas.push(on_device(arena, device)?);
                    self.hosts.push(on_host(arena, device)?);
                }
                Some(_) if self.bytes(index) >= arena.bytes => {}
                Some(kind) => {
                    assert!(*kind == arena.kind && !kind.is_persistent(), "one layout has one size");
                    // The old memory is freed first: there may be no room for both.
                    let nothing = Arena { bytes: 0, ..arena.clone() };
                    (self.arenas[index], self.hosts[index]) = (on_device(&nothing, device)?, None);
                    (self.arenas[index], self.hosts[index]) = (on_device(arena, device)?, on_host(arena, device)?);
                }
            }
        }
        Ok(())
    }

    /// Frees arenas of single entries that are larger than these.
    fn shrink(&mut self, arenas: &[Arena], device: &Arc<Device>) -> Result<()> {
        for (index, kind) in self.kinds.iter().enumerate() {
            let wanted = arenas.get(index).map_or(0, |arena| arena.bytes);
            if !kind.is_persistent() && *kind != ArenaKind::Cache && self.arenas[index].len() > wanted {
                self.arenas[index] = DeviceBuffer::new(device, 0)?;
            }
        }
        Ok(())
    }

    /// True if arenas of these sizes need no new memory.
    pub fn holds(&self, arenas: &[Arena]) -> bool {
        let fits = |(index, arena): (usize, &Arena)| {
            index < self.kinds.len() && self.bytes(index) >= arena.bytes && !self.changes(index, arena)
        };
        arenas.iter().enumerate().all(fits)
    }

    /// True for a cache of another size: pages take much of the memory, so their number is exactly the program's.
    fn changes(&self, index: usize, arena: &Arena) -> bool {
        self.kinds.get(index) == Some(&ArenaKind::Cache) && self.bytes(index) != arena.bytes
    }

    fn free_pages(&mut self, index: usize, device: &Arc<Device>) -> Result<()> {
        if self.kinds.get(index) == Some(&ArenaKind::Cache) && self.bytes(index) > 0 {
            self.arenas[index] = DeviceBuffer::new(device, 0)?;
        }
        Ok(())
    }

    fn bytes(&self, index: usize) -> usize {
        self.hosts[index].as_ref().map_or(self.arenas[index].len(), |(host, _)| host.bytes().len())
    }

    /// Zeros the arenas of some kinds in device memory.
    pub fn zero(&self, stream: &Stream, of: impl Fn(ArenaKind) -> bool) -> Result<()> {
        for (buffer, kind) in self.arenas.iter().zip(&self.kinds).filter(|(_, kind)| of(**kind)) {
            buffer.zero(stream).during(|| format!("zeroing the arena of {}", kind.name()))?;
        }
        Ok(())
    }

    /// The buffers that measurements may overwrite: all before a session runs, afterwards those of single entries. A program
    /// that gains a shape while sequences are continued keeps their pages.
    pub fn free(&self) -> Vec<&DeviceBuffer> {
        let arenas = self.arenas.iter().zip(&self.kinds);
        let is_kept = |kind: &ArenaKind| kind.is_persistent() || *kind == ArenaKind::Cache;
        arenas.filter(|(_, kind)| self.is_new || !is_kept(kind)).map(|(buffer, _)| buffer).collect()
    }

    /// Returns the page-locked memory that a tensor is in, if it is in any.
    pub fn host(&self, at: &TensorRef) -> Option<&PinnedBuffer> {
        self.hosts[at.arena.0 as usize].as_ref().map(|(buffer, _)| buffer)
    }

    /// The addresses of the arenas for kernels.
    pub fn addresses(&self) -> Vec<u64> {
        let of = |(device, host): (&DeviceBuffer, &Option<(PinnedBuffer, u64)>)| {
            host.as_ref().map_or(device.address(), |(_, address)| *address)
        };
        self.arenas.iter().zip(&self.hosts).map(of).collect()
    }

    /// The address of a tensor's first element for kernels. The whole span is inside its arena.
    pub fn address(&self, at: &TensorRef) -> u64 {
        if let Some((buffer, address)) = &self.hosts[at.arena.0 as usize] {
            buffer.slice(at.offset, at.span());
            return address + at.offset as u64;
        }
        self.arenas[at.arena.0 as usize].slice(at.offset, at.span())
    }
}

fn on_device(arena: &Arena, device: &Arc<Device>) -> Result<DeviceBuffer> {
    let bytes = if arena.is_on_host() { 0 } else { arena.bytes };
    DeviceBuffer::new(device, bytes).during(|| format!("allocating the arena of {}", arena.kind.name()))
}

fn on_host(arena: &Arena, device: &Arc<Device>) -> Result<Option<(PinnedBuffer, u64)>> {
    let buffer = match arena.place {
        MemorySpace::Device => return Ok(None),
        MemorySpace::Host { write_combined: false } => PinnedBuffer::new(device, arena.bytes),
        MemorySpace::Host { write_combined: true } => PinnedBuffer::write_combined(device, arena.bytes),
    };
    let buffer = buffer.during(|| format!("allocating the arena of {} on the host", arena.kind.name()))?;
    let address = buffer.device_address()?;
    Ok(Some((buffer, address)))
}
