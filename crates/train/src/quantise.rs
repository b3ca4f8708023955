//! Weights into codes while they are read or drawn: some rows at a time, quantised by threads of the host and handed on
//! piece by piece, so that neither the host nor a device ever has a tensor in numbers as a whole. Knows packed forms;
//! not where numbers come from.

use program::{PackedWeight, ParameterSlot, Session, TensorRef};
use rayon::prelude::*;
use tensor::packed::{
    Quantisation, Scaled, Stored, Target, dynamic_map, flat_blocks, nest, row_blocks, tensor_scale, tile_rows,
};
use tensor::storage::Plane;
use tensor::{DType, HostTensor, bf16_to_f32, convert, f16_to_f32, f32_to_bf16, f32_to_f16};

use crate::error::Result;

/// Gives a tensor's numbers from an element on, which is a multiple of 4, in row-major order.
pub type Numbers<'a> = dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a;

/// Elements that one thread takes at a time: whole blocks of every flat form.
const BLOCK: usize = 1 << 14;

/// Elements that are in memory as numbers, about: rows of tiles are taken whole.
const PIECE: usize = 1 << 22;

/// Writes a packed weight from its numbers.
pub fn write(session: &mut dyn Session, slot: &ParameterSlot, numbers: &Numbers<'_>) -> Result<()> {
    let packed = slot.packed.as_ref().expect("only packed weights are quantised");
    let weight = &slot.weight;
    let mut put = |at: usize, bytes: &[u8]| {
        let place = TensorRef::dense(weight.arena, weight.offset + at, DType::U8, [bytes.len()]);
        Ok(session.write(&place, bytes)?)
    };
    quantise(packed, numbers, &mut put)
}

/// The bytes of a packed weight from its numbers.
pub fn bytes(packed: &PackedWeight, numbers: &Numbers<'_>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; packed.packing.bytes(&packed.shape)];
    quantise(packed, numbers, &mut |at, part| {
        bytes[at..at + part.len()].copy_from_slice(part);
        Ok(())
    })?;
    Ok(bytes)
}

/// Takes bytes at their place in the tensor's.
type Put<'a> = dyn FnMut(usize, &[u8]) -> Result<()> + 'a;

fn quantise(packed: &PackedWeight, numbers: &Numbers<'_>, put: &mut Put<'_>) -> Result<()> {
    let made = packed.made.expect("a weight whose file has numbers says how they become codes");
    let mut place = Place { packed, numbers, put };
    match made {
        Quantisation::Nf4 { block, nested } => place.nf4(block, nested),
        Quantisation::Fp8 { extent } => place.tiles(extent),
        Quantisation::Fp4 { target } => place.nvfp4(target),
    }
}

/// The values of a packed weight, from its bytes.
pub fn values(packed: &PackedWeight, bytes: &[u8]) -> HostTensor {
    let stored = Stored::new(packed.packing, &packed.shape, bytes);
    let mut tensor = HostTensor::zeros(packed.dtype, packed.shape.clone());
    let size = packed.dtype.size();
    tensor.bytes.par_chunks_mut(BLOCK * size).enumerate().for_each_init(
        Vec::new,
        |values: &mut Vec<f32>, (index, out)| {
            values.resize(out.len() / size, 0.0);
            stored.values(index * BLOCK, values);
            convert(DType::F32, &floats(values), packed.dtype, out);
        },
    );
    tensor
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

struct Place<'a, 'p> {
    packed: &'a PackedWeight,
    numbers: &'a Numbers<'a>,
    put: &'a mut Put<'p>,
}

impl Place<'_, '_> {
    fn elements(&self) -> usize {
        self.packed.shape.iter().product()
    }

    /// Writes bytes of a plane from its `at`-th on.
    fn put(&mut self, plane: Plane, at: usize, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() <= plane.bytes, "what is written lies in its plane");
        (self.put)(plane.offset + at, bytes)
    }

    /// Numbers from an element on, by several threads: in the type of the values, as they would be without codes.
    fn read(&self, start: usize, out: &mut [f32]) -> Result<()> {
        let blocks = out.par_chunks_mut(BLOCK).enumerate();
        let read = |(index, out): (usize, &mut [f32])| {
            (self.numbers)(start + index * BLOCK, out)?;
            match self.packed.dtype {
                DType::BF16 => out.iter_mut().for_each(|x| *x = bf16_to_f32(f32_to_bf16(*x))),
                DType::F16 => out.iter_mut().for_each(|x| *x = f16_to_f32(f32_to_f16(*x))),
                _ => {}
            }
            Ok(())
        };
        blocks.map(read).collect()
    }

    /// Calls `use_piece` with every piece of the tensor and its first element.
    fn pieces(
        &mut self,
        length: usize,
        mut use_piece: impl FnMut(&mut Self, usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let elements = self.elements();
        let mut piece = vec![0.0; length.min(elements)];
        for start in (0..elements).step_by(length) {
            let piece = &mut piece[..length.min(elements - start)];
            self.read(start, piece)?;
            use_piece(self, start, piece)?;
        }
        Ok(())
    }

    fn nf4(&mut self, block: usize, nested: bool) -> Result<()> {
        let planes = self.packed.packing.planes(&self.packed.shape);
        let mut scales = vec![0.0f32; self.elements().div_ceil(block)];
        let mut codes = vec![0; PIECE.min(self.elements()).div_ceil(2)];
        self.pieces(PIECE, |place, start, x| {
            let codes = &mut codes[..x.len().div_ceil(2)];
            let scales = &mut scales[start / block..(start + x.len()).div_ceil(block)];
            let outputs = codes.par_chunks_mut(BLOCK / 2).zip(scales.par_chunks_mut(BLOCK / block));
            x.par_chunks(BLOCK).zip(outputs).for_each(|(x, (codes, scales))| flat_blocks(x, block, codes, scales));
            place.put(planes.codes, start / 2, codes)
        })?;
        if !nested {
            return self.put(planes.scales, 0, &floats(&scales));
        }
        let Scaled::Mapped { codes, outer, offset, map } = nest(&scales, &dynamic_map(true)) else {
            unreachable!("nested scales are codes of a book")
        };
        self.put(planes.scales, 0, &codes)?;
        self.put(planes.outer, 0, &floats(&outer))?;
        self.put(planes.tensor, 0, &floats(&[vec![offset], map].concat()))
    }

    fn nvfp4(&mut self, target: Target) -> Result<()> {
        let planes = self.packed.packing.planes(&self.packed.shape);
        // The largest magnitude first: the file is read twice.
        let mut largest = 0;
        self.pieces(PIECE, |_, _, x| {
            largest = x.par_iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0).max(largest);
            Ok(())
        })?;
        let s = tensor_scale(f32::from_bits(largest), target);
        let (mut codes, mut scales) = (vec![0; PIECE / 2], vec![0; PIECE / 16]);
        self.pieces(PIECE, |place, start, x| {
            let (codes, scales) = (&mut codes[..x.len() / 2], &mut scales[..x.len() / 16]);
            let outputs = codes.par_chunks_mut(BLOCK / 2).zip(scales.par_chunks_mut(BLOCK / 16));
            x.par_chunks(BLOCK).zip(outputs).for_each(|(x, (codes, scales))| row_blocks(x, s, target, codes, scales));
            place.put(planes.codes, start / 2, codes)?;
            place.put(planes.scales, start / 16, scales)
        })?;
        self.put(planes.tensor, 0, &(1.0 / s).to_le_bytes())
    }

    fn tiles(&mut self, extent: usize) -> Result<()> {
        let planes = self.packed.packing.planes(&self.packed.shape);
        let columns = *self.packed.shape.last().expect("a packed weight has columns");
        let (band, across) = (extent * columns, columns.div_ceil(extent));
        let mut scales = vec![0.0f32; self.packed.packing.blocks(&self.packed.shape)];
        let length = band * (PIECE / band).max(1);
        let mut codes = vec![0; length.min(self.elements())];
        self.pieces(length, |place, start, x| {
            let codes = &mut codes[..x.len()];
            let scales = &mut scales[start / band * across..];
            let outputs = codes.par_chunks_mut(band).zip(scales.par_chunks_mut(across));
            let bands = x.par_chunks(band).zip(outputs);
            bands.for_each(|(x, (codes, scales))| tile_rows(x, columns, extent, codes, scales));
            place.put(planes.codes, start, codes)
        })?;
        self.put(planes.scales, 0, &floats(&scales))
    }
}

#[cfg(test)]
mod tests {
    use program::{ArenaId, Initializer};
    use tensor::packed::{nested, normal, nvfp4, tiles};
    use tensor::storage::NVFP4;

    use super::*;
    use crate::weight_source::tests::{Memory, slot};

    #[test]
    fn pieces_give_the_bytes_of_the_whole() {
        // More than a piece, ragged at both edges; rows of whole blocks for NVFP4.
        for (shape, forms) in [
            (
                [2101, 2010],
                &[
                    Quantisation::Nf4 { block: 64, nested: true },
                    Quantisation::Nf4 { block: 512, nested: false },
                    Quantisation::Fp8 { extent: 64 },
                    Quantisation::Fp8 { extent: 256 },
                ][..],
            ),
            (
                [2101, 2000],
                &[Quantisation::Fp4 { target: Target::FourOrSix }, Quantisation::Fp4 { target: Target::Six }],
            ),
            ([3, 7], &[Quantisation::Nf4 { block: 64, nested: true }, Quantisation::Fp8 { extent: 128 }]),
        ] {
            let x: Vec<f32> =
                (0..shape[0] * shape[1]).map(|i| ((i * 7919 + 13) % 10_007) as f32 / 5e5 - 0.01).collect();
            for form in forms {
                let whole = match *form {
                    Quantisation::Nf4 { block, nested: false } => normal(&x, &shape, block),
                    Quantisation::Nf4 { block, nested: true } => nested(&x, &shape, block, &dynamic_map(true)),
                    Quantisation::Fp8 { extent } => tiles(&x, &shape, extent),
                    Quantisation::Fp4 { target } => nvfp4(NVFP4, &x, &shape, target),
                };
                let expected = whole.to_bytes();
                let weight = TensorRef::dense(ArenaId(0), 256, DType::U8, [expected.len()]);
                let packed = PackedWeight {
                    packing: form.packing(),
                    shape: shape.to_vec(),
                    dtype: DType::F32,
                    made: Some(*form),
                };
                let of =
                    ParameterSlot { weight, packed: Some(packed.clone()), ..slot("a", Initializer::Constant(0.0)) };
                let mut memory = Memory(vec![0; 256 + expected.len() + 1]);
                let numbers = |start: usize, out: &mut [f32]| {
                    out.copy_from_slice(&x[start..start + out.len()]);
                    Ok(())
                };
                write(&mut memory, &of, &numbers).unwrap();
                assert!(memory.0[256..256 + expected.len()] == expected, "{form:?} {shape:?}");
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(&values(&packed, &expected).to_f32()) == bits(&whole.values()), "{form:?}");
            }
        }
    }
}
