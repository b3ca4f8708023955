//! Encodings of tensor elements in a GGUF file, in both directions.

use tensor::{DType, convert};

use super::{blocks, mxfp4, super_blocks};

/// An encoding of elements, by the format's names.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    F32,
    F16,
    BF16,
    /// Blocks of 32: a scale, signed bytes.
    Q8_0,
    /// Blocks of 32: a scale, codes of five bits.
    Q5_0,
    /// Blocks of 32: a scale and the least number, codes of five bits.
    Q5_1,
    /// Blocks of 32: a power of two, codes of four bits that are floating-point numbers.
    MXFP4,
    /// Super-blocks of 256: scales and offsets of 32 elements each, codes of four bits.
    Q4_K,
    /// The same with codes of five bits.
    Q5_K,
    /// Super-blocks of 256: scales of 16 elements each, codes of six bits.
    Q6_K,
}

impl Encoding {
    pub const ALL: [Encoding; 10] = [
        Encoding::F32,
        Encoding::F16,
        Encoding::BF16,
        Encoding::Q8_0,
        Encoding::Q5_0,
        Encoding::Q5_1,
        Encoding::MXFP4,
        Encoding::Q4_K,
        Encoding::Q5_K,
        Encoding::Q6_K,
    ];

    /// Lower case, as in `q4_k`.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::F32 => "f32",
            Encoding::F16 => "f16",
            Encoding::BF16 => "bf16",
            Encoding::Q8_0 => "q8_0",
            Encoding::Q5_0 => "q5_0",
            Encoding::Q5_1 => "q5_1",
            Encoding::MXFP4 => "mxfp4",
            Encoding::Q4_K => "q4_k",
            Encoding::Q5_K => "q5_k",
            Encoding::Q6_K => "q6_k",
        }
    }

    /// The format's number for it in the table of tensors.
    pub const fn number(self) -> u32 {
        match self {
            Encoding::F32 => 0,
            Encoding::F16 => 1,
            Encoding::Q5_0 => 6,
            Encoding::Q5_1 => 7,
            Encoding::Q8_0 => 8,
            Encoding::Q4_K => 12,
            Encoding::Q5_K => 13,
            Encoding::Q6_K => 14,
            Encoding::BF16 => 30,
            Encoding::MXFP4 => 39,
        }
    }

    pub fn numbered(number: u32) -> Option<Encoding> {
        Encoding::ALL.into_iter().find(|encoding| encoding.number() == number)
    }

    /// Elements that are encoded together: rows must be a multiple of it.
    pub const fn block(self) -> usize {
        match self {
            Encoding::F32 | Encoding::F16 | Encoding::BF16 => 1,
            Encoding::Q8_0 | Encoding::Q5_0 | Encoding::Q5_1 | Encoding::MXFP4 => blocks::ELEMENTS,
            Encoding::Q4_K | Encoding::Q5_K | Encoding::Q6_K => super_blocks::ELEMENTS,
        }
    }

    /// Bytes of an encoded block.
    const fn block_bytes(self) -> usize {
        match self {
            Encoding::F32 => 4,
            Encoding::F16 | Encoding::BF16 => 2,
            Encoding::Q8_0 => blocks::Q8_0_BYTES,
            Encoding::Q5_0 => blocks::Q5_0_BYTES,
            Encoding::Q5_1 => blocks::Q5_1_BYTES,
            Encoding::MXFP4 => mxfp4::BYTES,
            Encoding::Q4_K => super_blocks::Q4_BYTES,
            Encoding::Q5_K => super_blocks::Q5_BYTES,
            Encoding::Q6_K => super_blocks::Q6_BYTES,
        }
    }

    /// Bytes of a number of elements, which are whole blocks.
    pub const fn bytes(self, elements: usize) -> usize {
        elements / self.block() * self.block_bytes()
    }

    /// True for codes with scales, false for floating-point numbers.
    pub const fn is_quantised(self) -> bool {
        self.dtype().is_none()
    }

    const fn dtype(self) -> Option<DType> {
        match self {
            Encoding::F32 => Some(DType::F32),
            Encoding::F16 => Some(DType::F16),
            Encoding::BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    /// Encodes values, a multiple of the block's elements.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let mut out = vec![0; self.bytes(values.len())];
        if let Some(dtype) = self.dtype() {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            convert(DType::F32, &bytes, dtype, &mut out);
            return out;
        }
        for (x, out) in values.chunks_exact(self.block()).zip(out.chunks_exact_mut(self.block_bytes())) {
            match self {
                Encoding::Q8_0 => blocks::encode_q8_0(x, out),
                Encoding::Q5_0 => blocks::encode_q5_0(x, out),
                Encoding::Q5_1 => blocks::encode_q5_1(x, out),
                Encoding::MXFP4 => mxfp4::encode(x, out),
                Encoding::Q4_K => super_blocks::encode_offset(x, false, out),
                Encoding::Q5_K => super_blocks::encode_offset(x, true, out),
                Encoding::Q6_K => super_blocks::encode_q6(x, out),
                Encoding::F32 | Encoding::F16 | Encoding::BF16 => unreachable!("these have an element type"),
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
        let mut values = vec![0.0; bytes.len() / self.block_bytes() * self.block()];
        for (bytes, out) in bytes.chunks_exact(self.block_bytes()).zip(values.chunks_exact_mut(self.block())) {
            match self {
                Encoding::Q8_0 => blocks::decode_q8_0(bytes, out),
                Encoding::Q5_0 => blocks::decode_q5_0(bytes, out),
                Encoding::Q5_1 => blocks::decode_q5_1(bytes, out),
                Encoding::MXFP4 => mxfp4::decode(bytes, out),
                Encoding::Q4_K => super_blocks::decode_offset(bytes, false, out),
                Encoding::Q5_K => super_blocks::decode_offset(bytes, true, out),
                Encoding::Q6_K => super_blocks::decode_q6(bytes, out),
                Encoding::F32 | Encoding::F16 | Encoding::BF16 => unreachable!("these have an element type"),
            }
        }
        values
    }

    /// Largest distance between a value and what is read back for it, `largest` being the largest magnitude of its
    /// block.
    pub fn error(self, value: f32, largest: f32) -> f32 {
        const F16_LEAST: f32 = 1.0 / (1 << 24) as f32;
        // With an offset the range is up to twice the largest magnitude. A step, half a unit of the scale at each code and
        // half a unit of the offset, and the rounding of both units.
        let offset = |most: f32| largest * (2.0 / most + 3.0 / 126.0 + 3.0 / 1024.0) + 64.0 * most * F16_LEAST;
        match self {
            Encoding::F32 => 0.0,
            Encoding::F16 => value.abs() / 2048.0 + F16_LEAST,
            Encoding::BF16 => value.abs() / 256.0,
            // Half a step, and the rounding of the scale.
            Encoding::Q8_0 => largest / 127.0 * 0.51 + largest / 2048.0 + 127.0 * F16_LEAST,
            // The largest number of the other sign is one step away: there is one code less for it.
            Encoding::Q5_0 => largest / 16.0 * 1.01 + largest / 1024.0 + 16.0 * F16_LEAST,
            Encoding::Q5_1 => largest / 31.0 * 1.01 + largest / 512.0 + 32.0 * F16_LEAST,
            // Half of the largest step, which is a third of the largest number, or what is cut off above that.
            Encoding::MXFP4 => largest * 0.26 + mxfp4::LEAST,
            Encoding::Q4_K => offset(15.0),
            Encoding::Q5_K => offset(31.0),
            Encoding::Q6_K => largest * (1.0 / 31.0 + 1.0 / 256.0 + 1.0 / 512.0) + 4096.0 * F16_LEAST,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of several distributions: even, with a long tail, of one sign, tiny, with zeros.
    fn samples() -> Vec<Vec<f32>> {
        let draw = |i: usize| ((i * 7919 % 257) as f32 - 128.0) / 128.0;
        let of = |f: &dyn Fn(usize) -> f32| (0..1024).map(f).collect();
        vec![
            of(&|i| draw(i) / 3.0),
            of(&|i| draw(i).powi(5) * 2.0),
            of(&|i| 1.0 + draw(i) / 50.0),
            of(&|i| -draw(i).abs()),
            of(&|i| draw(i) * 1e-6),
            of(&|i| if i % 3 == 0 { 0.0 } else { draw(i) * if i % 64 < 32 { 1e-3 } else { 1.0 } }),
            of(&|i| if i % 256 == 7 { 9.0 } else { draw(i) / 100.0 }),
            vec![0.0; 1024],
            vec![0.25; 1024],
        ]
    }

    #[test]
    fn every_encoding_keeps_values_to_its_error() {
        for (sample, values) in samples().iter().enumerate() {
            for encoding in Encoding::ALL {
                let bytes = encoding.encode(values);
                assert_eq!(bytes.len(), encoding.bytes(values.len()));
                let block = encoding.block();
                for (block, decoded) in values.chunks(block).zip(encoding.decode(&bytes).chunks(block)) {
                    let largest = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                    for (x, y) in block.iter().zip(decoded) {
                        let most = encoding.error(*x, largest);
                        assert!((x - y).abs() <= most, "{encoding:?}, sample {sample}: {x} {y}, {most}");
                    }
                }
            }
        }
        for encoding in Encoding::ALL {
            assert_eq!(Encoding::numbered(encoding.number()), Some(encoding));
            assert!(encoding.decode(&encoding.encode(&[0.0; 256])).iter().all(|x| *x == 0.0), "{encoding:?}");
        }
    }

    #[test]
    fn more_bits_are_nearer() {
        let error = |encoding: Encoding, values: &[f32]| {
            let decoded = encoding.decode(&encoding.encode(values));
            values.iter().zip(decoded).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>()
        };
        let values = &samples()[1];
        let ordered = [Encoding::Q4_K, Encoding::Q5_K, Encoding::Q6_K, Encoding::Q8_0, Encoding::F16];
        let errors = ordered.map(|encoding| error(encoding, values));
        assert!(errors.windows(2).all(|pair| pair[1] < pair[0] * 0.6), "{errors:?}");
    }
}
