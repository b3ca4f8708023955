//! A quantised weight as an engine keeps it in memory: the planes of a packed tensor, filled from the file without a
//! detour through numbers. Forms whose values a packed tensor does not have to the bit have none.

use tensor::packed::NF4;
use tensor::small::Small;
use tensor::storage::{Code, Packing, Plane, Scales as Kept};

use super::forms::e2m1;
use super::linear::{Codes, Linear, Number, Scales, Whole};
use crate::error::DataError;
use crate::safetensors::SafeTensors;

/// The number of a map's entries.
const BOOK: usize = tensor::storage::BOOK;

impl Linear {
    /// The packed form with the same values. `None`: FP4 of bitsandbytes, other maps than NF4's, whole numbers, and tensors
    /// whose values are divided by a number.
    pub fn packing(&self) -> Option<Packing> {
        let code = match &self.codes {
            Codes::Bytes(values) if are(&values[..], &Small::E4M3.values()) => Code::Small(Small::E4M3),
            Codes::HighFirst(values) if are(values, &NF4) => Code::Nf4,
            Codes::LowFirst(values) if are(values, &e2m1()) => Code::Small(Small::E2M1),
            Codes::Bytes(_) | Codes::HighFirst(_) | Codes::LowFirst(_) => return None,
        };
        let scales = match (&self.scales, self.whole) {
            (Scales::Nested { block, .. }, Whole::Nothing) => Kept::Mapped(*block),
            (Scales::Plain { number: Number::E4M3, .. }, Whole::Times(_)) => Kept::E4M3,
            (Scales::Plain { number: Number::E8M0, .. }, Whole::Nothing) if self.codes_are_of_four_bits() => Kept::E8M0,
            (Scales::Plain { .. }, Whole::Nothing) => Kept::Single,
            _ => return None,
        };
        // Of more than two axes only stacks of matrices have a form, which are read as their transposes.
        let transposed = self.turned.is_some();
        (self.shape.len() == if transposed { 3 } else { 2 }).then_some(Packing {
            code,
            block: self.block,
            scales,
            transposed,
        })
    }

    fn codes_are_of_four_bits(&self) -> bool {
        !matches!(self.codes, Codes::Bytes(_))
    }

    /// The planes of that form one after another; what is between them is zero.
    ///
    /// # Panics
    /// If there is no such form.
    pub fn planes(&self, files: &[SafeTensors]) -> Result<Vec<u8>, DataError> {
        let packing = self.packing().expect("the form was requested before");
        let planes = packing.planes(self.shape());
        let mut bytes = vec![0; packing.bytes(self.shape())];
        let mut put = |plane: Plane, from: &[u8]| bytes[plane.offset..][..plane.bytes].copy_from_slice(from);
        put(planes.codes, &self.at.read(files, 0, self.at.length)?);
        let blocks = packing.blocks(self.shape());
        match &self.scales {
            Scales::Plain { at, .. } if packing.scales != Kept::Single => {
                put(planes.scales, &at.read(files, 0, at.length)?);
            }
            Scales::Plain { .. } => put(planes.scales, &floats(&self.scales(files, 0, blocks)?)),
            Scales::Nested { at, map, outer, offset, .. } => {
                put(planes.scales, &at.read(files, 0, at.length)?);
                put(planes.outer, &floats(outer));
                let mut book = Vec::with_capacity(1 + BOOK);
                book.push(*offset);
                book.extend_from_slice(&map[..]);
                put(planes.tensor, &floats(&book));
            }
        }
        if let Whole::Times(factor) = self.whole {
            put(planes.tensor, &factor.to_le_bytes());
        }
        Ok(bytes)
    }
}

fn are(values: &[f32], others: &[f32]) -> bool {
    values.iter().zip(others).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
