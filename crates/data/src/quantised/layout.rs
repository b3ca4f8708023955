//! The tensors that a weight in a number format of compressed-tensors is in a file: their endings, types, shapes and bytes.
//! Knows how codes are laid out; not how they are made.

use tensor::compressed::{Codes, Extent, Form, Scales};
use tensor::{DType, f32_to_bf16, f32_to_f16};

use crate::safetensors::{RawTensor, header_name};

/// A number format as files hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub form: Form,
    /// Whole numbers share words of 32 bits; else each is a byte.
    pub packed: bool,
    /// The type of the scales that are numbers: that of the weights.
    pub dtype: DType,
}

impl Layout {
    const fn bits(&self) -> usize {
        match self.form.codes {
            Codes::Int { bits, .. } => bits as usize,
            Codes::Fp8 => 8,
            Codes::Nvfp4 | Codes::Mxfp4 => 4,
        }
    }

    /// The tensors of a module's weight [rows, columns], without what belongs to activations.
    pub fn tensors(&self, module: &str, shape: [usize; 2]) -> Vec<RawTensor> {
        let [rows, columns] = shape;
        let scales = match self.form.extent {
            Extent::Tensor => vec![1],
            _ => self.form.extent.scales(shape).to_vec(),
        };
        let of = |ending: &str, dtype: &'static str, size: usize, shape: Vec<usize>| {
            let bytes = shape.iter().product::<usize>() * size;
            RawTensor { name: format!("{module}.{ending}"), dtype, shape, bytes }
        };
        let numbers = |ending: &str, shape| of(ending, header_name(self.dtype), self.dtype.size(), shape);
        match self.form.codes {
            Codes::Fp8 => {
                vec![of("weight", "F8_E4M3", 1, vec![rows, columns]), numbers("weight_scale", scales)]
            }
            Codes::Int { .. } if !self.packed => {
                vec![of("weight", "I8", 1, vec![rows, columns]), numbers("weight_scale", scales)]
            }
            Codes::Int { .. } => {
                let each = 32 / self.bits();
                let mut tensors = vec![
                    of("weight_packed", "I32", 4, vec![rows, columns.div_ceil(each)]),
                    numbers("weight_scale", scales.clone()),
                    of("weight_shape", "I64", 8, vec![2]),
                ];
                if self.form.codes.has_zeros() {
                    tensors.push(of("weight_zero_point", "I32", 4, vec![rows.div_ceil(each), scales[1]]));
                }
                tensors
            }
            Codes::Nvfp4 => vec![
                of("weight_packed", "U8", 1, vec![rows, columns / 2]),
                of("weight_scale", "F8_E4M3", 1, scales),
                of("weight_global_scale", "F32", 4, vec![1]),
            ],
            Codes::Mxfp4 => {
                vec![of("weight_packed", "U8", 1, vec![rows, columns / 2]), of("weight_scale", "U8", 1, scales)]
            }
        }
    }

    /// The bytes of the same tensors. `codes`: one to a byte; `global`: the scale of scales of NVFP4.
    pub fn bytes(&self, shape: [usize; 2], codes: &[u8], scales: &Scales, global: f32) -> Vec<Vec<u8>> {
        let columns = shape[1];
        match self.form.codes {
            Codes::Fp8 => vec![codes.to_vec(), self.numbers(&scales.factors)],
            Codes::Int { .. } if !self.packed => vec![codes.to_vec(), self.numbers(&scales.factors)],
            Codes::Int { .. } => {
                let rows = codes.chunks(columns).flat_map(|row| self.words(row));
                let mut parts = vec![rows.collect(), self.numbers(&scales.factors)];
                parts.push(shape.iter().flat_map(|n| (*n as i64).to_le_bytes()).collect());
                if self.form.codes.has_zeros() {
                    parts.push(self.zeros(&scales.zeros, self.form.extent.scales(shape)[1]));
                }
                parts
            }
            Codes::Nvfp4 => vec![pairs(codes), scales.codes.clone(), global.to_le_bytes().to_vec()],
            Codes::Mxfp4 => vec![pairs(codes), scales.codes.clone()],
        }
    }

    fn numbers(&self, values: &[f32]) -> Vec<u8> {
        match self.dtype {
            DType::BF16 => values.iter().flat_map(|x| f32_to_bf16(*x).to_le_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|x| f32_to_f16(*x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// Whole numbers in words of 32 bits, the first in the lowest bits; the last word is filled with zeros.
    fn words(&self, codes: &[u8]) -> Vec<u8> {
        let bits = self.bits();
        codes.chunks(32 / bits).flat_map(|of| word(of.iter().copied(), bits).to_le_bytes()).collect()
    }

    /// Zero points of rows of `across` blocks: those of neighbouring rows in a word.
    fn zeros(&self, zeros: &[i8], across: usize) -> Vec<u8> {
        let bits = self.bits();
        let band = |band: &[i8]| -> Vec<u8> {
            let column = |column: usize| word(band.iter().skip(column).step_by(across).map(|zero| *zero as u8), bits);
            (0..across).flat_map(|of| column(of).to_le_bytes()).collect()
        };
        zeros.chunks(across * (32 / bits)).flat_map(band).collect()
    }
}

/// Numbers in two's complement from half of their range on.
fn word(codes: impl Iterator<Item = u8>, bits: usize) -> u32 {
    let middle = 1u32 << (bits - 1);
    let place = |(place, code): (usize, u8)| {
        let moved = u32::from(code).wrapping_add(middle) & ((1 << bits) - 1);
        moved << (bits * place)
    };
    codes.enumerate().map(place).fold(0, |word, of| word | of)
}

/// Codes of four bits, the first of two in the low half.
fn pairs(codes: &[u8]) -> Vec<u8> {
    codes.chunks(2).map(|of| of[0] & 15 | of.get(1).copied().unwrap_or(0) << 4).collect()
}
