//! Weights into codes while they are read or drawn: some rows at a time, quantised by threads of the host and handed on
//! piece by piece, so that neither the host nor a device ever has a tensor in numbers as a whole. Knows packed forms;
//! not where numbers come from.

use program::{PackedWeight, ParameterSlot, Session, TensorRef};
use rayon::prelude::*;
use tensor::packed::{
    Quantisation, Scaled, Stored, Target, dynamic_map, flat_blocks, nest, row_blocks, tensor_scale, tile_blocks,
    tile_rows,
};
use tensor::storage::{Plane, Planes};
use tensor::{DType, HostTensor, bf16_to_f32, convert, f16_to_f32, f32_to_bf16, f32_to_f16};

use crate::error::Result;

/// Gives a tensor's numbers from an element on, which is a multiple of 4, in row-major order.
pub type Numbers<'a> = dyn Fn(usize, &mut [f32]) -> Result<()> + Sync + 'a;

/// Elements that one thread takes at a time: whole blocks of every flat form.
const BLOCK: usize = 1 << 14;

/// Elements that are in memory as numbers, about: rows of tiles are taken whole.
const PIECE: usize = 1 << 22;

/// Writes a packed weight from its numbers. `shared` is the magnitude by which it is scaled, where that is not its own.
pub fn write(
    session: &mut dyn Session,
    slot: &ParameterSlot,
    numbers: &Numbers<'_>,
    shared: Option<f32>,
) -> Result<()> {
    let packed = slot.packed.as_ref().expect("only packed weights are quantised");
    let weight = &slot.weight;
    let mut put = |at: usize, bytes: &[u8]| {
        let place = TensorRef::dense(weight.arena, weight.offset + at, DType::U8, [bytes.len()]);
        Ok(session.write(&place, bytes)?)
    };
    quantise(packed, numbers, shared, &mut put)
}

/// The bytes of a packed weight from its numbers; `shared` as in [`write`].
pub fn bytes(packed: &PackedWeight, numbers: &Numbers<'_>, shared: Option<f32>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; packed.packing.bytes(&packed.shape)];
    quantise(packed, numbers, shared, &mut |at, part| {
        bytes[at..at + part.len()].copy_from_slice(part);
        Ok(())
    })?;
    Ok(bytes)
}

/// The largest magnitude of a weight's numbers.
pub fn largest(packed: &PackedWeight, numbers: &Numbers<'_>) -> Result<f32> {
    let mut largest = 0;
    Source { packed, numbers }.pieces(PIECE, |_, x| {
        largest = x.par_iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0).max(largest);
        Ok(())
    })?;
    Ok(f32::from_bits(largest))
}

/// Takes bytes at their place in the tensor's.
type Put<'a> = dyn FnMut(usize, &[u8]) -> Result<()> + 'a;

fn quantise(packed: &PackedWeight, numbers: &Numbers<'_>, shared: Option<f32>, put: &mut Put<'_>) -> Result<()> {
    let made = packed.made.expect("a weight whose file has numbers says how they become codes");
    let mut place = Place { source: Source { packed, numbers }, put };
    // A tensor's own magnitude is found first: its numbers are read twice.
    let scale = |target: Target| -> Result<f32> {
        Ok(tensor_scale(shared.map_or_else(|| largest(packed, numbers), Ok)?, target))
    };
    match made {
        Quantisation::Nf4 { block, nested } => place.nf4(block, nested),
        Quantisation::Fp8 { extent } => place.tiles(extent),
        Quantisation::Fp4 { target } => {
            let s = scale(target)?;
            place.nvfp4(s, 1, &|x, codes, scales| row_blocks(x, s, target, codes, scales))
        }
        Quantisation::Fp4Tiles => {
            let (s, columns) = (scale(Target::Six)?, place.source.columns());
            place.nvfp4(s, 16, &|x, codes, scales| tile_blocks(x, columns, s, codes, scales))
        }
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

/// The numbers of a weight.
#[derive(Clone, Copy)]
struct Source<'a> {
    packed: &'a PackedWeight,
    numbers: &'a Numbers<'a>,
}

impl Source<'_> {
    fn elements(self) -> usize {
        self.packed.shape.iter().product()
    }

    fn columns(self) -> usize {
        *self.packed.shape.last().expect("a packed weight has columns")
    }

    /// Numbers from an element on, by several threads: in the type of the values, as they would be without codes.
    fn read(self, start: usize, out: &mut [f32]) -> Result<()> {
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

    /// Calls `use_piece` with the first element of every piece of equal length, and the piece.
    fn pieces(self, length: usize, mut use_piece: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let elements = self.elements();
        let mut piece = vec![0.0; length.min(elements)];
        for start in (0..elements).step_by(length) {
            let piece = &mut piece[..length.min(elements - start)];
            self.read(start, piece)?;
            use_piece(start, piece)?;
        }
        Ok(())
    }
}

/// Writes the codes of some rows, and the scales of their blocks.
type Coder<'a> = dyn Fn(&[f32], &mut [u8], &mut [u8]) + Sync + 'a;

struct Place<'a, 'p> {
    source: Source<'a>,
    put: &'a mut Put<'p>,
}

impl Place<'_, '_> {
    fn planes(&self) -> Planes {
        self.source.packed.packing.planes(&self.source.packed.shape)
    }

    /// Writes bytes of a plane from its `at`-th on.
    fn put(&mut self, plane: Plane, at: usize, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() <= plane.bytes, "what is written lies in its plane");
        (self.put)(plane.offset + at, bytes)
    }

    fn nf4(&mut self, block: usize, nested: bool) -> Result<()> {
        let (source, planes) = (self.source, self.planes());
        let mut scales = vec![0.0f32; source.elements().div_ceil(block)];
        let mut codes = vec![0; PIECE.min(source.elements()).div_ceil(2)];
        source.pieces(PIECE, |start, x| {
            let codes = &mut codes[..x.len().div_ceil(2)];
            let scales = &mut scales[start / block..(start + x.len()).div_ceil(block)];
            let outputs = codes.par_chunks_mut(BLOCK / 2).zip(scales.par_chunks_mut(BLOCK / block));
            x.par_chunks(BLOCK).zip(outputs).for_each(|(x, (codes, scales))| flat_blocks(x, block, codes, scales));
            self.put(planes.codes, start / 2, codes)
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

    /// In a tensor of scale S, whose blocks have `rows` rows.
    fn nvfp4(&mut self, s: f32, rows: usize, code: &Coder<'_>) -> Result<()> {
        let (source, planes, packing) = (self.source, self.planes(), self.source.packed.packing);
        let columns = source.columns();
        let band = rows * columns;
        let whole = |elements: usize| band * (elements / band).max(1);
        let blocks = |elements: usize| packing.blocks(&[elements / columns, columns]);
        let (length, chunk) = (whole(PIECE), whole(BLOCK));
        let most = length.min(source.elements());
        let (mut codes, mut scales) = (vec![0; most / 2], vec![0; blocks(most)]);
        source.pieces(length, |start, x| {
            let (codes, scales) = (&mut codes[..x.len() / 2], &mut scales[..blocks(x.len())]);
            let outputs = codes.par_chunks_mut(chunk / 2).zip(scales.par_chunks_mut(blocks(chunk)));
            x.par_chunks(chunk).zip(outputs).for_each(|(x, (codes, scales))| code(x, codes, scales));
            self.put(planes.codes, start / 2, codes)?;
            self.put(planes.scales, blocks(start), scales)
        })?;
        self.put(planes.tensor, 0, &(1.0 / s).to_le_bytes())
    }

    fn tiles(&mut self, extent: usize) -> Result<()> {
        let (source, planes, packing) = (self.source, self.planes(), self.source.packed.packing);
        let columns = source.columns();
        let (band, across) = (extent * columns, columns.div_ceil(extent));
        let mut scales = vec![0.0f32; packing.blocks(&source.packed.shape)];
        let length = band * (PIECE / band).max(1);
        let mut codes = vec![0; length.min(source.elements())];
        source.pieces(length, |start, x| {
            let codes = &mut codes[..x.len()];
            let scales = &mut scales[start / band * across..];
            let outputs = codes.par_chunks_mut(band).zip(scales.par_chunks_mut(across));
            let bands = x.par_chunks(band).zip(outputs);
            bands.for_each(|(x, (codes, scales))| tile_rows(x, columns, extent, codes, scales));
            self.put(planes.codes, start, codes)
        })?;
        self.put(planes.scales, 0, &floats(&scales))
    }
}

#[cfg(test)]
mod tests {
    use program::{ArenaId, Initializer};
    use tensor::packed::{nested, normal, nvfp4_within, tiles};
    use tensor::small::amax;
    use tensor::storage::{NVFP4, NVFP4_TILES};

    use super::*;
    use crate::model::weight_source::tests::{Memory, slot};

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
                &[
                    Quantisation::Fp4 { target: Target::FourOrSix },
                    Quantisation::Fp4 { target: Target::Six },
                    Quantisation::Fp4Tiles,
                ],
            ),
            ([3, 7], &[Quantisation::Nf4 { block: 64, nested: true }, Quantisation::Fp8 { extent: 128 }]),
        ] {
            let x: Vec<f32> =
                (0..shape[0] * shape[1]).map(|i| ((i * 7919 + 13) % 10_007) as f32 / 5e5 - 0.01).collect();
            // Scaled by its own magnitude, or by a larger one that it shares.
            for (form, shared) in forms.iter().flat_map(|form| [(form, None), (form, Some(0.3))]) {
                let largest = shared.unwrap_or_else(|| amax(&x));
                let whole = match *form {
                    Quantisation::Nf4 { block, nested: false } => normal(&x, &shape, block),
                    Quantisation::Nf4 { block, nested: true } => nested(&x, &shape, block, &dynamic_map(true)),
                    Quantisation::Fp8 { extent } => tiles(&x, &shape, extent),
                    Quantisation::Fp4 { target } => nvfp4_within(NVFP4, &x, &shape, largest, target),
                    Quantisation::Fp4Tiles => nvfp4_within(NVFP4_TILES, &x, &shape, largest, Target::Six),
                };
                let expected = whole.to_bytes();
                let weight = TensorRef::dense(ArenaId(0), 256, DType::U8, [expected.len()]);
                let packed = PackedWeight {
                    packing: form.packing(),
                    shape: shape.to_vec(),
                    dtype: DType::F32,
                    made: Some(*form),
                    magnitude_group: None,
                };
                let of =
                    ParameterSlot { weight, packed: Some(packed.clone()), ..slot("a", Initializer::Constant(0.0)) };
                let mut memory = Memory(vec![0; 256 + expected.len() + 1]);
                let numbers = |start: usize, out: &mut [f32]| {
                    out.copy_from_slice(&x[start..start + out.len()]);
                    Ok(())
                };
                write(&mut memory, &of, &numbers, shared).unwrap();
                assert!(memory.0[256..256 + expected.len()] == expected, "{form:?} {shape:?}");
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert!(bits(&values(&packed, &expected).to_f32()) == bits(&whole.values()), "{form:?}");
            }
        }
    }
}
