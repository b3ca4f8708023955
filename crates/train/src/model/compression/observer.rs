//! The ranges that scales follow from: of all numbers of a block, or a narrower one with which its codes are nearer to the numbers.
//!
//! Knows blocks and errors; not files.

use data::quantised::Layout;
use rayon::prelude::*;
use tensor::compressed::{Extent, Range};

/// The choice of ranges, with the names that llm-compressor has for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RangeObserver {
    /// The least and the largest number.
    #[default]
    MinMax,
    /// The share of both with the smallest error.
    Mse,
}

/// Shares that are tried: 1, 0.99, … 0.81.
const SHARES: usize = 20;

/// The power of an error.
const POWER: f32 = 2.4;

/// Shares in a row that improve no block, after which the search ends.
const PATIENCE: usize = 5;

/// Elements that one thread works on, about.
const BAND: usize = 1 << 15;

impl RangeObserver {
    pub const ALL: [RangeObserver; 2] = [RangeObserver::MinMax, RangeObserver::Mse];

    /// Returns the name that users give it.
    pub const fn name(self) -> &'static str {
        match self {
            RangeObserver::MinMax => "minmax",
            RangeObserver::Mse => "mse",
        }
    }
}

/// The ranges of all blocks of a matrix [outputs, inputs] that lie in one piece of a row, or are the whole matrix.
pub fn narrowed(layout: Layout, x: &[f32], shape: [usize; 2]) -> Vec<Range> {
    let (form, dtype) = (layout.form, layout.dtype);
    let size = match form.extent {
        Extent::Tensor => x.len(),
        Extent::Row => shape[1],
        Extent::Group(size) => size,
        Extent::Tile(..) => unreachable!("a scheme with tiles has no search"),
    };
    let blocks: Vec<&[f32]> = x.chunks(size.max(1)).collect();
    let whole: Vec<Range> = blocks.par_iter().map(|block| Range::of(block)).collect();
    let mut best: Vec<(f32, Range)> = whole.iter().map(|range| (f32::INFINITY, *range)).collect();
    let mut idle = 0;
    for step in 0..SHARES {
        let share = (1.0 - step as f64 / 100.0) as f32;
        let tries = best.par_iter_mut().zip(&blocks).zip(&whole).with_min_len((BAND / size.max(1)).max(1));
        let improved = tries.map(|((best, block), range)| {
            let range = range.shrunk(share, dtype);
            let error = form.error(block, range, dtype, POWER);
            let is_better = error < best.0;
            if is_better {
                *best = (error, range);
            }
            is_better
        });
        idle = if improved.reduce(|| false, |a, b| a | b) { 0 } else { idle + 1 };
        if idle == PATIENCE {
            break;
        }
    }
    best.into_iter().map(|(_, range)| range).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use data::safetensors::SafeTensors;
    use tensor::DType;
    use tensor::compressed::{Codes, Form};

    use super::*;

    #[test]
    fn searched_scales_are_those_of_the_package() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let files = SafeTensors::open(&root.join("crates/train/tests/recorded/mse.safetensors")).unwrap();
        let read = |name: &str| files.get(name).unwrap().to_host().unwrap();
        for (name, codes, extent) in [
            ("w4a16_g32", Codes::Int { bits: 4, symmetric: true }, Extent::Group(32)),
            ("w4a16_asym_g32", Codes::Int { bits: 4, symmetric: false }, Extent::Group(32)),
            ("int8_w8a8", Codes::Int { bits: 8, symmetric: true }, Extent::Row),
            ("fp8_dynamic", Codes::Fp8, Extent::Row),
        ] {
            let w = read("a");
            let (shape, x) = ([w.shape[0], w.shape[1]], w.to_f32());
            let layout = Layout { form: Form { codes, extent }, packed: true, dtype: DType::F32 };
            let ranges = narrowed(layout, &x, shape);
            let found = layout.form.scales_of(&ranges, DType::F32, Range::of(&x)).factors;
            let wanted = read(&format!("{name}.scale")).to_f32();
            let same = found.iter().zip(&wanted).filter(|(a, b)| (*a / *b - 1.0).abs() < 1e-6).count();
            assert!(found.len() == wanted.len() && same * 100 >= found.len() * 98, "{name}: {same} of {}", found.len());
            let plain = layout.form.scales(&x, shape[1], DType::F32, Range::of(&x)).factors;
            assert!(found.iter().zip(&plain).any(|(a, b)| a < b), "{name}: nothing was narrowed");
        }
    }

    #[test]
    fn errors_are_smaller_than_those_of_whole_ranges() {
        let x: Vec<f32> = (0..256 * 64).map(|i| (((i * 7919 + 13) % 10_007) as f32 / 5e3 - 1.0).powi(3)).collect();
        let layout =
            Layout { form: Form { codes: Codes::Nvfp4, extent: Extent::Group(16) }, packed: true, dtype: DType::F32 };
        let error = |ranges: &[Range]| -> f32 {
            x.chunks(16).zip(ranges).map(|(x, range)| layout.form.error(x, *range, DType::F32, 2.0)).sum()
        };
        let (plain, found) = (layout.form.ranges(&x, 64), narrowed(layout, &x, [256, 64]));
        assert!(error(&found) < 0.95 * error(&plain));
    }
}
