//! A view of an image as patches, which are written where they are wanted: no copy of them in 32 bits is kept.

/// A view that whole blocks cover, and the numbers that its patches have.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PatchedView {
    /// Pixels of a row, and [height, width, 3] of all.
    pub pixels: usize,
    pub rgb: Vec<u8>,
    /// The number of each value of 8 bits, by channel.
    pub values: Box<[[f32; 256]; 3]>,
    /// Pixels a side of a patch, and patches a side of a block.
    pub patch: usize,
    pub side: usize,
    /// Times that each channel stands in a patch, one after another.
    pub frames: usize,
    /// True if the channels of a pixel are neighbors.
    pub channel_last: bool,
}

impl PatchedView {
    /// Numbers that a patch has in all channels and frames.
    pub fn width(&self) -> usize {
        3 * self.frames * self.patch * self.patch
    }

    /// Writes a patch, counted block by block, as bytes: its numbers, little-endian.
    pub fn write(&self, index: usize, bytes: &mut [u8]) {
        let PatchedView { pixels, rgb, values, patch, side, frames, channel_last } = self;
        let [red, green, blue] = &**values;
        let number_of = |[r, g, b]: [u8; 3]| [red[usize::from(r)], green[usize::from(g)], blue[usize::from(b)]];
        let (number, inside) = (index / (side * side), index % (side * side));
        let blocks = pixels / patch / side;
        let top = (number / blocks * side + inside / side) * patch;
        let left = (number % blocks * side + inside % side) * patch;
        let rows = rgb.chunks_exact(3 * pixels).skip(top).take(*patch);
        let rows = rows.map(|row| row[3 * left..][..3 * patch].as_chunks::<3>().0);
        let numbers = bytes.as_chunks_mut::<4>().0;
        if *channel_last {
            for (pixel, to) in rows.flatten().zip(numbers.as_chunks_mut::<3>().0) {
                *to = number_of(*pixel).map(f32::to_le_bytes);
            }
            return;
        }
        let plane = patch * patch;
        let (first, others) = numbers.split_at_mut(frames * plane);
        let (second, third) = others.split_at_mut(frames * plane);
        let planes = [&mut *first, &mut *second, &mut *third].map(|of| of.chunks_exact_mut(*patch));
        let [reds, greens, blues] = planes;
        for (((row, reds), greens), blues) in rows.zip(reds).zip(greens).zip(blues) {
            for (((pixel, red), green), blue) in row.iter().zip(reds).zip(greens).zip(blues) {
                [*red, *green, *blue] = number_of(*pixel).map(f32::to_le_bytes);
            }
        }
        // All frames of an image are the same.
        for channel in [first, second, third] {
            (1..*frames).for_each(|frame| channel.copy_within(..plane, frame * plane));
        }
    }
}
