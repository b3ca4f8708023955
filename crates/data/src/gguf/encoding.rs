//! Encodings of tensor elements in a GGUF file, in both directions.

use tensor::{DType, convert, f16_to_f32, f32_to_f16};

/// An encoding of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    F32,
    F16,
    BF16,
    /// Blocks of 32 elements: a scale in f16, then 32 signed bytes.
    Q8_0,
}

/// Elements and bytes of a block of `Q8_0`.
const Q8_ELEMENTS: usize = 32;
const Q8_BYTES: usize = 2 + Q8_ELEMENTS;

impl Encoding {
    pub const ALL: [Encoding; 4] = [Encoding::F32, Encoding::F16, Encoding::BF16, Encoding::Q8_0];

    /// `f32`, `f16`, `bf16`, `q8_0`.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "f32",
            Encoding::F16 => "f16",
            Encoding::BF16 => "bf16",
            Encoding::Q8_0 => "q8_0",
        }
    }

    pub fn named(name: &str) -> Option<Encoding> {
        Encoding::ALL.into_iter().find(|encoding| encoding.name() == name)
    }

    /// The format's number for it in the table of tensors.
    pub const fn number(self) -> u32 {
        match self {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Q8_0 => 8,
            Encoding::BF16 => 30,
        }
    }

    pub fn numbered(number: u32) -> Option<Encoding> {
        Encoding::ALL.into_iter().find(|encoding| encoding.number() == number)
    }

    /// The format's number for a file whose matrices have it.
    pub const fn file_type(self) -> u32 {
        match self {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Q8_0 => 7,
            Encoding::BF16 => 32,
        }
    }

    /// Elements that are encoded together: rows must be a multiple of it.
    pub const fn block(self) -> usize {
        match self {
            Encoding::Q8_0 => Q8_ELEMENTS,
            _ => 1,
        }
    }

    /// Bytes of so many elements, which are whole blocks.
    pub const fn bytes(self, elements: usize) -> usize {
        match self {
            Encoding::F32 => elements * 4,
            Encoding::F16 | Encoding::BF16 => elements * 2,
            Encoding::Q8_0 => elements / Q8_ELEMENTS * Q8_BYTES,
        }
    }

    const fn dtype(self) -> Option<DType> {
        match self {
            Encoding::F32 => Some(DType::F32),
            Encoding::F16 => Some(DType::F16),
            Encoding::BF16 => Some(DType::BF16),
            Encoding::Q8_0 => None,
        }
    }

    /// Encodes whole blocks. `Q8_0` takes the block's largest magnitude over 127 as scale and rounds halves away from
    /// zero, as ggml does.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let mut out = vec![0; self.bytes(values.len())];
        match self.dtype() {
            Some(dtype) => {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                convert(DType::F32, &bytes, dtype, &mut out);
            }
            None => {
                for (block, out) in values.chunks_exact(Q8_ELEMENTS).zip(out.chunks_exact_mut(Q8_BYTES)) {
                    let scale = block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
                    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                    out[..2].copy_from_slice(&f32_to_f16(scale).to_le_bytes());
                    for (x, code) in block.iter().zip(&mut out[2..]) {
                        *code = (x * inverse).round() as i8 as u8;
                    }
                }
            }
        }
        out
    }

    /// The values that encoded elements stand for.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        if let Some(dtype) = self.dtype() {
            let mut out = vec![0; bytes.len() / dtype.size() * 4];
            convert(dtype, bytes, DType::F32, &mut out);
            return out.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        }
        let block = |bytes: &[u8]| {
            let scale = f16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]));
            bytes[2..].iter().map(|code| f32::from(*code as i8) * scale).collect::<Vec<_>>()
        };
        bytes.chunks_exact(Q8_BYTES).flat_map(block).collect()
    }

    /// Largest distance between a value and what is read back for it, `largest` being the largest magnitude of its
    /// block.
    pub fn error(self, value: f32, largest: f32) -> f32 {
        const F16_LEAST: f32 = 1.0 / (1 << 24) as f32;
        match self {
            Encoding::F32 => 0.0,
            Encoding::F16 => value.abs() / 2048.0 + F16_LEAST,
            Encoding::BF16 => value.abs() / 256.0,
            // Half a step, and the rounding of the scale.
            Encoding::Q8_0 => largest / 127.0 * 0.51 + largest / 2048.0 + 127.0 * F16_LEAST,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_encoding_keeps_values_to_its_error() {
        let values: Vec<f32> = (0..128).map(|i| ((i * 7919 % 257) as f32 - 128.0) / 300.0).collect();
        for encoding in Encoding::ALL {
            let bytes = encoding.encode(&values);
            assert_eq!(bytes.len(), encoding.bytes(values.len()));
            for (block, decoded) in values.chunks(32).zip(encoding.decode(&bytes).chunks(32)) {
                let largest = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                for (x, y) in block.iter().zip(decoded) {
                    assert!((x - y).abs() <= encoding.error(*x, largest), "{encoding:?}: {x} {y}");
                }
            }
            assert_eq!(Encoding::named(encoding.name()), Some(encoding));
            assert_eq!(Encoding::numbered(encoding.number()), Some(encoding));
        }
        assert!(Encoding::Q8_0.decode(&Encoding::Q8_0.encode(&[0.0; 32])).iter().all(|x| *x == 0.0));
    }
}
