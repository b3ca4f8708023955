//! A view of an image as patches, which are written where they are wanted: no copy of them is kept.

/// A view that whole blocks cover.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PatchedView {
    /// Pixels of a row, and [height, width, 3] of all.
    pub pixels: usize,
    pub rgb: Vec<u8>,
    /// The number that each value of 8 bits is for the model, by channel.
    pub values: Box<[[f32; 256]; 3]>,
    /// Pixels a side of a patch, and patches a side of a block.
    pub patch: usize,
    pub side: usize,
}

impl PatchedView {
    /// Returns the bytes of a patch.
    pub fn width(&self) -> usize {
        3 * self.patch * self.patch
    }

    /// Writes a patch, counted block by block: its pixels row by row.
    pub fn write(&self, index: usize, bytes: &mut [u8]) {
        let PatchedView { pixels, rgb, patch, side, .. } = self;
        let (number, inside) = (index / (side * side), index % (side * side));
        let blocks = pixels / patch / side;
        let top = (number / blocks * side + inside / side) * patch;
        let left = (number % blocks * side + inside % side) * patch;
        let rows = rgb.chunks_exact(3 * pixels).skip(top).take(*patch);
        for (row, to) in rows.zip(bytes.chunks_exact_mut(3 * patch)) {
            to.copy_from_slice(&row[3 * left..][..3 * patch]);
        }
    }
}
