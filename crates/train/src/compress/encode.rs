//! A matrix as the tensors of its format, made band by band on all threads. The bits do not depend on the number of threads.

use data::quantised::Layout;
use rayon::prelude::*;
use tensor::compressed::{Codes, Extent, Form, Range, Scales, global_scale};
use tensor::small::Small;

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

/// Elements of whole rows of blocks of a matrix that one thread works on.
fn band(form: &Form, shape: [usize; 2]) -> usize {
    let rows = if form.extent == Extent::Tensor { 1 } else { form.extent.block(shape)[0] };
    rows * (BAND / (rows * shape[1])).max(1) * shape[1]
}

/// The scales of a matrix [outputs, inputs]; `whole` is the range of all that shares its scale.
pub fn scales(layout: Layout, x: &[f32], shape: [usize; 2], whole: Range) -> Scales {
    let form = layout.form;
    let made: Vec<Scales> =
        x.par_chunks(band(&form, shape)).map(|x| form.scales(x, shape[1], layout.dtype, whole)).collect();
    let mut all = Scales { factors: Vec::new(), zeros: Vec::new(), codes: Vec::new() };
    made.into_iter().for_each(|of| join(&form, &mut all, of));
    all
}

/// Adds the scales of further rows: a tensor has one.
fn join(form: &Form, all: &mut Scales, of: Scales) {
    if form.extent == Extent::Tensor && !all.factors.is_empty() {
        return;
    }
    all.factors.extend(of.factors);
    all.zeros.extend(of.zeros);
    all.codes.extend(of.codes);
}

/// Encodes a matrix [outputs, inputs]; `whole` is the range of all that shares its scale. `codes`: those in the place of the
/// nearest.
pub fn encode(layout: Layout, x: &[f32], shape: [usize; 2], whole: Range, codes: Option<Vec<u8>>) -> Encoded {
    let (form, columns) = (layout.form, shape[1]);
    let global = global_scale(whole.magnitude(), layout.dtype);
    if let Some(codes) = codes {
        let scales = scales(layout, x, shape, whole);
        let values = match form.codes {
            Codes::Nvfp4 => values_of_nvfp4(&codes, columns, &scales, global),
            _ => form.decode(&codes, columns, &scales),
        };
        return Encoded { parts: layout.bytes(shape, &codes, &scales, global), values };
    }
    let made: Vec<(Scales, Vec<u8>, Vec<f32>)> = x
        .par_chunks(band(&form, shape))
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
        join(&form, &mut scales, of);
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
