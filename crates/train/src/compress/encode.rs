//! A matrix as the tensors of its format, made band by band on all threads. The bits do not depend on the number of threads.

use data::quantised::Layout;
use rayon::prelude::*;
use tensor::compressed::{Codes, Extent, Range, Scales, global_scale};
use tensor::small::Small;

use super::gptq::{self, Moments};

/// Elements that one thread works on at a time, about.
const BAND: usize = 1 << 17;

/// A matrix in its format.
pub struct Encoded {
    /// The bytes of its tensors, in the order of [`Layout::tensors`].
    pub parts: Vec<Vec<u8>>,
    /// The values as readers have them, f32.
    pub values: Vec<f32>,
}

/// The range of all numbers.
pub fn range(x: &[f32]) -> Range {
    x.par_chunks(BAND).map(Range::of).reduce(Range::default, Range::with)
}

/// Encodes a matrix [outputs, inputs]; `whole` is the range of all that shares its scale. With moments of what it is multiplied
/// with, GPTQ chooses the codes.
pub fn encode(layout: Layout, x: &[f32], shape: [usize; 2], whole: Range, moments: Option<&Moments>) -> Encoded {
    let (form, columns) = (layout.form, shape[1]);
    let rows = form.extent.block(shape)[0];
    let global = global_scale(whole.magnitude(), layout.dtype);
    // Bands are whole rows of blocks.
    let rows = if form.extent == Extent::Tensor { 1 } else { rows };
    let band = rows * (BAND / (rows * columns)).max(1) * columns;
    let made: Vec<(Scales, Vec<u8>, Vec<f32>)> = x
        .par_chunks(band)
        .map(|x| {
            let scales = form.scales(x, columns, layout.dtype, whole);
            let codes = form.encode(x, columns, &scales);
            let values = match form.codes {
                Codes::Nvfp4 => values_of_nvfp4(&codes, columns, &scales, global),
                _ => form.decode(&codes, columns, &scales),
            };
            (scales, codes, values)
        })
        .collect();
    let mut scales = Scales { factors: Vec::new(), zeros: Vec::new(), codes: Vec::new() };
    let (mut codes, mut values) = (Vec::with_capacity(x.len()), Vec::with_capacity(x.len()));
    for (of, mut of_codes, mut of_values) in made {
        codes.append(&mut of_codes);
        values.append(&mut of_values);
        if form.extent == Extent::Tensor && !scales.factors.is_empty() {
            continue;
        }
        scales.factors.extend(of.factors);
        scales.zeros.extend(of.zeros);
        scales.codes.extend(of.codes);
    }
    if let Some(moments) = moments {
        codes = gptq::codes(&form, x, &scales, moments);
        values = match form.codes {
            Codes::Nvfp4 => values_of_nvfp4(&codes, columns, &scales, global),
            _ => form.decode(&codes, columns, &scales),
        };
    }
    Encoded { parts: layout.bytes(shape, &codes, &scales, global), values }
}

/// Values of NVFP4 in the order of its reader: a code times its scale, then divided by the scale of scales.
fn values_of_nvfp4(codes: &[u8], columns: usize, scales: &Scales, global: f32) -> Vec<f32> {
    let group = columns / (scales.codes.len() / (codes.len() / columns));
    let of = |(codes, scale): (&[u8], &u8)| {
        let scale = Small::E4M3.value(*scale);
        codes.iter().map(move |code| Small::E2M1.value(*code) * scale / global).collect::<Vec<_>>()
    };
    codes.chunks(group).zip(&scales.codes).flat_map(of).collect()
}
