//! Memory of the imitated GPUs and page-locked memory of the host: what is allocated, and whose it is.
#![allow(unsafe_code, reason = "memory that lives as long as it is in the table")]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

const ALIGNMENT: usize = 4096;

/// Contents of new memory: NaN in every type of floats.
const UNDEFINED: u8 = 0xff;

struct Block {
    layout: Layout,
    bytes: usize,
    /// `None` for page-locked memory of the host.
    device: Option<usize>,
}

/// All blocks that are allocated, by their addresses.
#[derive(Default)]
pub struct Memory {
    blocks: BTreeMap<u64, Block>,
}

impl Memory {
    /// Allocates with contents that no program may rely on.
    pub fn allocate(&mut self, bytes: usize, device: Option<usize>) -> u64 {
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("a test's sizes are small");
        // SAFETY: the layout has at least a byte.
        let at = unsafe { alloc(layout) };
        assert!(!at.is_null(), "the host has room for a test's memory");
        // SAFETY: freshly allocated with this size.
        unsafe { std::ptr::write_bytes(at, UNDEFINED, layout.size()) };
        self.blocks.insert(at as u64, Block { layout, bytes, device });
        at as u64
    }

    /// Frees a block that begins at an address; false if there is none.
    pub fn free(&mut self, at: u64) -> bool {
        let Some(block) = self.blocks.remove(&at) else { return false };
        // SAFETY: allocated above with this layout, and in no table any more.
        unsafe { dealloc(at as *mut u8, block.layout) };
        true
    }

    /// Bytes that are allocated on a GPU.
    pub fn used(&self, device: usize) -> usize {
        self.blocks.values().filter(|block| block.device == Some(device)).map(|block| block.bytes).sum()
    }

    /// True if `bytes` from an address lie in one block.
    pub fn holds(&self, at: u64, bytes: usize) -> bool {
        let block = self.blocks.range(..=at).next_back();
        block.is_some_and(|(start, block)| at + bytes as u64 <= start + block.layout.size() as u64)
    }

    /// True if the address is in page-locked memory.
    pub fn is_pinned(&self, at: u64) -> bool {
        let block = self.blocks.range(..=at).next_back();
        block.is_some_and(|(start, block)| block.device.is_none() && at < start + block.layout.size() as u64)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let all: Vec<u64> = self.blocks.keys().copied().collect();
        for at in all {
            self.free(at);
        }
    }
}
