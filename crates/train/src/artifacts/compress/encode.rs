//! A matrix as the tensors of its format, made band by band on all threads. The bits do not depend on the number of threads.

use data::quantised::Layout;
use rayon::prelude::*;
use tensor::compressed::{Extent, Form, Range, Scales, global_scale};

use crate::model::compression::observer::{RangeObserver, narrowed};

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
pub fn scales(layout: Layout, x: &[f32], shape: [usize; 2], whole: Range, observer: RangeObserver) -> Scales {
    let form = layout.form;
    if observer == RangeObserver::Mse {
        return form.scales_of(&narrowed(layout, x, shape), layout.dtype, whole);
    }
    let made: Vec<Scales> =
        x.par_chunks(band(&form, shape)).map(|x| form.scales(x, shape[1], layout.dtype, whole)).collect();
    let mut all = Scales { factors: Vec::new(), zeros: Vec::new(), codes: Vec::new() };
    made.into_iter().for_each(|of| join(&form, &mut all, of));
    all
}

/// The scales of rows of a matrix: of the band with this number, which has this many elements.
fn of_band(form: &Form, shape: [usize; 2], scales: &Scales, place: usize, elements: usize) -> Scales {
    let (height, across) = (form.extent.block(shape)[0], form.extent.scales(shape)[1]);
    let first = place * band(form, shape) / shape[1];
    let blocks = match form.extent {
        Extent::Tensor => 0..1,
        _ => first / height * across..(first + elements / shape[1]).div_ceil(height) * across,
    };
    let zeros = if scales.zeros.is_empty() { Vec::new() } else { scales.zeros[blocks.clone()].to_vec() };
    let codes = if scales.codes.is_empty() { Vec::new() } else { scales.codes[blocks.clone()].to_vec() };
    Scales { factors: scales.factors[blocks].to_vec(), zeros, codes }
}

/// The nearest codes of a matrix.
pub fn nearest(form: &Form, x: &[f32], shape: [usize; 2], scales: &Scales) -> Vec<u8> {
    let bands = x.par_chunks(band(form, shape).max(1)).enumerate();
    bands.flat_map_iter(|(at, x)| form.encode(x, shape[1], &of_band(form, shape, scales, at, x.len()))).collect()
}

/// The values of the codes of a matrix; `global`: the scale of scales.
pub fn values(form: &Form, codes: &[u8], shape: [usize; 2], scales: &Scales, global: f32) -> Vec<f32> {
    let bands = codes.par_chunks(band(form, shape).max(1)).enumerate();
    let of = |(at, codes): (usize, &[u8])| {
        form.values(codes, shape[1], &of_band(form, shape, scales, at, codes.len()), global)
    };
    bands.flat_map_iter(of).collect()
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

/// Codes that were chosen in the place of the nearest.
#[derive(Clone, Debug, Default)]
pub struct Decided {
    pub codes: Option<Vec<u8>>,
    /// Their scales, where they are not those of the numbers.
    pub scales: Option<Scales>,
}

/// Encodes a matrix [outputs, inputs]; `whole` is the range of all that shares its scale. `decided`: what was chosen before.
pub fn encode(
    layout: Layout,
    x: &[f32],
    shape: [usize; 2],
    whole: Range,
    decided: Decided,
    observer: RangeObserver,
) -> Encoded {
    let (form, columns) = (layout.form, shape[1]);
    let global = global_scale(whole.magnitude(), layout.dtype);
    if decided.codes.is_some() || observer == RangeObserver::Mse {
        let scales = decided.scales.unwrap_or_else(|| scales(layout, x, shape, whole, observer));
        let codes = decided.codes.unwrap_or_else(|| nearest(&form, x, shape, &scales));
        let values = values(&form, &codes, shape, &scales, global);
        return Encoded { parts: layout.bytes(shape, &codes, &scales, global), values };
    }
    let made: Vec<(Scales, Vec<u8>, Vec<f32>)> = x
        .par_chunks(band(&form, shape))
        .map(|x| {
            let scales = form.scales(x, columns, layout.dtype, whole);
            let codes = form.encode(x, columns, &scales);
            let values = form.values(&codes, columns, &scales, global);
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
