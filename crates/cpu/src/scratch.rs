//! Scratch memory shared by all instructions. It grows to the largest need while a program is loaded, never while it
//! runs. Knows no instruction.

use program::TensorRef;

use crate::storage::Buffer;

#[derive(Default)]
pub struct Scratch {
    /// Dense copies of the operands of one instruction.
    pub buffers: Vec<Buffer>,
    /// Packed operands of a product.
    pub packed: Vec<u32>,
    /// Sums of a product before their rounding.
    pub partial: Vec<f32>,
}

impl Scratch {
    /// One buffer for each operand, of no size yet.
    pub fn reserve_buffers(&mut self, count: usize) {
        if self.buffers.len() < count {
            self.buffers.resize_with(count, Buffer::default);
        }
    }

    /// Makes room for the dense copy of the operand with this index.
    pub fn reserve(&mut self, index: usize, at: &TensorRef) {
        self.reserve_buffers(index + 1);
        self.buffers[index].reserve(at);
    }

    pub fn bytes(&self) -> usize {
        let shared = size_of_val(self.packed.as_slice()) + size_of_val(self.partial.as_slice());
        shared + self.buffers.iter().map(Buffer::bytes).sum::<usize>()
    }

    pub fn reserve_packed(&mut self, units: usize) {
        grow(&mut self.packed, units);
    }

    pub fn reserve_partial(&mut self, elements: usize) {
        grow(&mut self.partial, elements);
    }
}

fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}
