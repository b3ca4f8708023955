//! Packed tensors as bytes in memory: what lies in an arena, and the values that it stands for. Knows planes; not how
//! numbers became codes.

use super::{NF4, Packed, Scaled};
use crate::small::{Small, e8m0_value};
use crate::storage::{BOOK, Block, Code, Packing, Plane, Planes, Scales};

/// A packed tensor in memory.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    packing: Packing,
    /// Rows and columns as they lie in memory.
    rows: usize,
    columns: usize,
    bytes: &'a [u8],
    planes: Planes,
    /// Values are multiplied with the tensor's own scale, where the form has one.
    whole: bool,
}

impl Packed {
    /// Returns its planes one after another; the bytes between them are zero.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.packing.bytes(&self.shape)];
        let planes = self.packing.planes(&self.shape);
        let mut put = |plane: Plane, from: &[u8]| bytes[plane.offset..][..plane.bytes].copy_from_slice(from);
        put(planes.codes, &self.packed_codes());
        match &self.scales {
            Scaled::Single(scales) => put(planes.scales, &floats(scales)),
            Scaled::E8M0(scales) => put(planes.scales, scales),
            Scaled::E4M3 { codes, tensor } => {
                put(planes.scales, codes);
                put(planes.tensor, &tensor.to_le_bytes());
            }
            Scaled::Mapped { codes, outer, offset, map } => {
                put(planes.scales, codes);
                put(planes.outer, &floats(outer));
                put(planes.tensor, &floats(&[std::slice::from_ref(offset), map].concat()));
            }
        }
        bytes
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl<'a> Stored<'a> {
    /// # Panics If the number of bytes is not that of a tensor of this form.
    pub fn new(packing: Packing, shape: &[usize], bytes: &'a [u8]) -> Stored<'a> {
        assert_eq!(bytes.len(), packing.bytes(shape), "a tensor {shape:?} of {packing}");
        let (rows, columns) = match packing.in_memory(shape)[..] {
            [.., rows, columns] => (rows, columns),
            [columns] => (1, columns),
            [] => (1, 1),
        };
        Stored { packing, rows, columns, bytes, planes: packing.planes(shape), whole: true }
    }

    /// Returns the same tensor without the tensor's own factor: values are codes times the scales of their blocks.
    pub fn unscaled(self) -> Stored<'a> {
        Stored { whole: false, ..self }
    }

    /// Values in f32 from an element on, in row-major order: those of [`Packed::values`].
    pub fn values(&self, first: usize, out: &mut [f32]) {
        let (table, book) = (self.table(), self.book());
        if self.packing.transposed {
            // Neighbours of a row lie a row of the memory apart.
            let elements = self.rows * self.columns;
            for (index, value) in (first..).zip(out) {
                let (matrix, inside) = (index / elements, index % elements);
                let at = matrix * elements + inside % self.rows * self.columns + inside / self.rows;
                self.neighbours(at, std::slice::from_mut(value), &table, &book);
            }
            return;
        }
        self.neighbours(first, out, &table, &book);
    }

    /// Writes the values of elements that are contiguous in memory, from `first` on, to `out`.
    fn neighbours(&self, first: usize, out: &mut [f32], table: &[f32], book: &[f32]) {
        let mut at = first;
        let mut rest = out;
        while !rest.is_empty() {
            let (block, length) = self.run(at);
            let (part, after) = rest.split_at_mut(length.min(rest.len()));
            let (scale, tensor) = self.scale(block, book);
            for (index, value) in part.iter_mut().enumerate() {
                *value = table[usize::from(self.code(at + index))] * scale;
                if let Some(tensor) = tensor {
                    *value *= tensor;
                }
            }
            at += part.len();
            rest = after;
        }
    }

    /// The values of the codes.
    fn table(&self) -> Vec<f32> {
        match self.packing.code {
            Code::Nf4 => NF4.to_vec(),
            Code::Small(small) => (0..1u16 << small.bits()).map(|code| small.value(code as u8)).collect(),
        }
    }

    fn code(&self, index: usize) -> u8 {
        let codes = &self.bytes[self.planes.codes.offset..];
        if self.packing.code.bits() == 8 {
            return codes[index];
        }
        let high = (index.is_multiple_of(2)) == (self.packing.code == Code::Nf4);
        if high { codes[index / 2] >> 4 } else { codes[index / 2] & 15 }
    }

    /// Returns the block of an element, and the number of elements from it on that are contiguous in that block.
    fn run(&self, index: usize) -> (usize, usize) {
        let columns = self.columns;
        let (row, column) = (index / columns, index % columns);
        let in_row = |extent: usize| (extent - column % extent).min(columns - column);
        match self.packing.block {
            Block::Tensor => (0, usize::MAX),
            Block::Flat(n) => (index / n, n - index % n),
            Block::Row(n) => (row * columns.div_ceil(n) + column / n, in_row(n)),
            Block::Tile(r, c) => (row / r * columns.div_ceil(c) + column / c, in_row(c)),
        }
    }

    fn float(&self, plane: Plane, index: usize) -> f32 {
        let at = &self.bytes[plane.offset + 4 * index..][..4];
        f32::from_le_bytes(at.try_into().expect("four bytes"))
    }

    fn book(&self) -> Vec<f32> {
        match self.packing.scales {
            Scales::Mapped(_) => (0..BOOK).map(|index| self.float(self.planes.tensor, 1 + index)).collect(),
            Scales::Single | Scales::E8M0 | Scales::E4M3 => Vec::new(),
        }
    }

    /// Returns the factor of the values of a block's codes, and the second factor that is applied after it, if there is
    /// one.
    fn scale(&self, block: usize, book: &[f32]) -> (f32, Option<f32>) {
        let code = self.planes.scales.offset + block;
        match self.packing.scales {
            Scales::Single => (self.float(self.planes.scales, block), None),
            Scales::E8M0 => (e8m0_value(self.bytes[code]), None),
            Scales::E4M3 => {
                let tensor = self.whole.then(|| self.float(self.planes.tensor, 0));
                (Small::E4M3.value(self.bytes[code]), tensor)
            }
            Scales::Mapped(n) => {
                let mapped = book[usize::from(self.bytes[code])] * self.float(self.planes.outer, block / n);
                (mapped + self.float(self.planes.tensor, 0), None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::{Target, nested, normal, nvfp4, scaled, tiles};
    use crate::storage::{MXFP4, NVFP4, NVFP4_TILES};

    #[test]
    fn values_of_bytes_are_those_of_the_tensor_from_any_element_on() {
        let x: Vec<f32> = (0..37 * 96).map(|i| ((i * 7919 + 13) % 10_007) as f32 / 5e3 - 1.0).collect();
        let shape = [37, 96];
        let map: Vec<f32> = (0..256).map(|i| i as f32 / 128.0 - 1.0).collect();
        let mx = Packed {
            packing: MXFP4,
            shape: shape.to_vec(),
            codes: (0..x.len()).map(|i| (i * 5 % 16) as u8).collect(),
            scales: Scaled::E8M0((0..37 * 3).map(|i| 120 + (i % 9) as u8).collect()),
        };
        let forms = [
            normal(&x, &shape, 64),
            nested(&x, &shape, 64, &map),
            normal(&x[..33 * 7], &[7, 33], 64),
            tiles(&x, &shape, 64),
            tiles(&x[..35 * 50], &[35, 50], 32),
            scaled(Small::E5M2, &x, &shape, 3),
            nvfp4(NVFP4, &x, &shape, Target::FourOrSix),
            nvfp4(NVFP4_TILES, &x, &shape, Target::Six),
            mx,
            Packed {
                packing: Packing { transposed: true, ..MXFP4 },
                shape: vec![3, 64, 12],
                codes: (0..3 * 64 * 12).map(|i| (i * 5 % 16) as u8).collect(),
                scales: Scaled::E8M0((0..3 * 2 * 12).map(|i| 120 + (i % 9) as u8).collect()),
            },
        ];
        for packed in forms {
            let (bytes, values) = (packed.to_bytes(), packed.values());
            let stored = Stored::new(packed.packing, &packed.shape, &bytes);
            for first in [0, 1, 31, 64, values.len() - 1, values.len()] {
                let mut found = vec![f32::NAN; values.len() - first];
                stored.values(first, &mut found);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(&found) == bits(&values[first..]), "{} from {first}", packed.packing);
            }
        }
    }
}
