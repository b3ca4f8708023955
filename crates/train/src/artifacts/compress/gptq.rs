//! GPTQ (Frantar et al. 2022, 2210.17323): codes column by column, each column's error made up for by the columns after it, by
//! the second moments of what the matrix is multiplied with. Columns go in the order of these moments, the largest first;
//! scales are those of the original numbers, so groups stay as they lie. On the host all is in f64 but sums over 256 rows; a device sums batches in f32, and chooses codes in f32.

use rayon::prelude::*;
use tensor::compressed::{Form, Scales};

use super::factor::Upper;
use super::moments::Moments;
use super::solver::{Scaled, Solver};
use crate::engine::device::products::{Part, add_product};
use crate::error::Result;

/// Rows of a matrix that go through the columns together.
const BAND: usize = 32;

/// Columns whose errors are made up for in the columns after them at once.
const BLOCK: usize = 128;

/// The codes of matrices [outputs, inputs] that are multiplied with the same values, on a device if there is one with room for them.
pub fn codes(
    form: &Form,
    matrices: &mut [Scaled],
    moments: &Moments,
    solver: Option<&mut Solver>,
) -> Result<Vec<Vec<u8>>> {
    let order = order(moments);
    if let Some(solver) = solver
        && solver.fits(moments.size, matrices)
    {
        let unused: Vec<usize> = (0..moments.size).filter(|column| moments.at(*column, *column) == 0.0).collect();
        for of in matrices.iter_mut() {
            of.x.par_chunks_mut(moments.size).for_each(|row| unused.iter().for_each(|column| row[*column] = 0.0));
        }
        return solver.codes(form, matrices, moments, &order);
    }
    let factor = factor(moments, &order);
    Ok(matrices.iter().map(|of| coded(form, &of.x, &of.scales, moments, &order, &factor)).collect())
}

/// The codes of a matrix [outputs, inputs] with these scales, in an order and with the factor that belongs to it.
pub(super) fn coded(
    form: &Form,
    x: &[f32],
    scales: &Scales,
    moments: &Moments,
    order: &[usize],
    factor: &Upper,
) -> Vec<u8> {
    let columns = moments.size;
    let shape = [x.len() / columns, columns];
    let [block_rows, block_columns] = form.extent.block(shape);
    let across = form.extent.scales(shape)[1];
    let mut made = vec![0u8; x.len()];
    let bands = made.par_chunks_mut(BAND * columns).zip(x.par_chunks(BAND * columns)).enumerate();
    bands.for_each(|(band, (made, x))| {
        let count = x.len() / columns;
        let of_row = |row: &'_ [f32], column: usize| -> f64 {
            if moments.at(column, column) == 0.0 { 0.0 } else { f64::from(row[column]) }
        };
        let mut rows: Vec<f64> =
            x.chunks(columns).flat_map(|row| order.iter().map(move |column| of_row(row, *column))).collect();
        let mut errors = vec![0.0; count * BLOCK];
        for first in (0..columns).step_by(BLOCK) {
            let last = columns.min(first + BLOCK);
            let width = last - first;
            for (index, row) in rows.chunks_mut(columns).enumerate() {
                for place in first..last {
                    let (column, factor) = (order[place], factor.row(place));
                    let block = (band * BAND + index) / block_rows * across + column / block_columns;
                    let (scale, zero) = (scales.factors[block], scales.zeros.get(block).copied().unwrap_or(0));
                    let code = form.code(row[place] as f32, scale, zero);
                    made[index * columns + column] = code;
                    let error = (row[place] - f64::from(form.value(code, scale, zero))) / factor[0];
                    errors[index * width + place - first] = error;
                    row[place..last].iter_mut().zip(factor).for_each(|(x, factor)| *x -= error * factor);
                }
            }
            if last < columns {
                let errors = Part::new(&errors, count, width, width);
                add_product(&mut rows[last..], columns, -1.0, errors, factor.part(first..last, last));
            }
        }
    });
    made
}

/// Columns in the order in which their codes are chosen: the largest moments first.
pub(super) fn order(moments: &Moments) -> Vec<usize> {
    let mut order: Vec<usize> = (0..moments.size).collect();
    order.sort_by(|a, b| moments.at(*b, *b).total_cmp(&moments.at(*a, *a)));
    order
}

/// The upper Cholesky factor U of the inverse of the damped moments H in this order, UᵀU = H⁻¹.
pub(super) fn factor(moments: &Moments, order: &[usize]) -> Upper {
    let damping = moments.damping();
    Upper::of_inverse(order.len(), |row, column| match row == column {
        true => moments.own(order[row]) + damping,
        false => moments.at(order[row], order[column]),
    })
}

/// The codes of a matrix with these scales, on the host.
#[cfg(test)]
pub(super) fn codes_of_one(form: &Form, x: &[f32], scales: &Scales, moments: &Moments) -> Vec<u8> {
    let order = order(moments);
    coded(form, x, scales, moments, &order, &factor(moments, &order))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use data::safetensors::SafeTensors;
    use tensor::DType;
    use tensor::compressed::{Codes, Extent, Range};

    use super::*;
    use crate::artifacts::compress::moments::DAMPING;

    fn moments_of(x: &[f32], size: usize) -> Moments {
        let mut moments = Moments::new(size);
        moments.add(x);
        moments
    }

    /// Activations whose columns depend on each other and differ in size.
    fn correlated(rows: usize, size: usize) -> Vec<f32> {
        let noise = |i: usize| ((i * 7919 + 13) % 10_007) as f32 / 5e3 - 1.0;
        let of = |i: usize| {
            let (row, column) = (i / size, i % size);
            (noise(row * 31 + column / 8) + 0.3 * noise(i)) * (1.0 + (column % 5) as f32)
        };
        (0..rows * size).map(of).collect()
    }

    #[test]
    fn the_factor_is_that_of_the_inverse() {
        let size = 24;
        let moments = moments_of(&correlated(100, size), size);
        let order: Vec<usize> = (0..size).rev().collect();
        let upper = factor(&moments, &order);
        let damping = DAMPING * (0..size).map(|i| moments.at(i, i)).sum::<f64>() / size as f64;
        // UᵀU·H is the identity.
        let inverse =
            |a: usize, b: usize| (0..=a.min(b)).map(|k| upper.row(k)[a - k] * upper.row(k)[b - k]).sum::<f64>();
        for a in 0..size {
            for b in 0..size {
                let of = |k: usize| moments.at(order[k], order[b]) + if k == b { damping } else { 0.0 };
                let product: f64 = (0..size).map(|k| inverse(a, k) * of(k)).sum();
                assert!((product - f64::from(u8::from(a == b))).abs() < 1e-8, "{a} {b}: {product}");
            }
        }
    }

    #[test]
    fn outputs_are_nearer_than_those_of_the_nearest_codes() {
        let (rows, size) = (8, 64);
        let x = correlated(200, size);
        let w: Vec<f32> = (0..rows * size).map(|i| ((i * 104_729 + 7) % 2_003) as f32 / 1e3 - 1.0).collect();
        let form = Form { codes: Codes::Int { bits: 4, symmetric: false }, extent: Extent::Group(32) };
        let scales = form.scales(&w, size, DType::F32, Range::default());
        let error = |codes: &[u8]| {
            let values = form.decode(codes, size, &scales);
            let of_row = |x: &[f32], row: usize| -> f64 {
                let range = row * size..(row + 1) * size;
                let parts = w[range.clone()].iter().zip(&values[range]).zip(x);
                parts.map(|((w, q), x)| f64::from((w - q) * x)).sum::<f64>().powi(2)
            };
            x.chunks(size).flat_map(|x| (0..rows).map(move |row| of_row(x, row))).sum::<f64>()
        };
        let nearest = error(&form.encode(&w, size, &scales));
        let found = error(&codes_of_one(&form, &w, &scales, &moments_of(&x, size)));
        assert!(found < 0.5 * nearest, "{found} against {nearest}");
    }

    #[test]
    fn codes_are_the_recorded_ones() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        let files = SafeTensors::open(&root.join("crates/train/tests/recorded/gptq.safetensors")).unwrap();
        let read = |name: &str| files.get(name).unwrap().to_host().unwrap();
        for (layer, case, bits, symmetric, extent) in [
            ("even", "w4_g64_static", 4, true, Extent::Group(64)),
            ("ragged", "w4_asym_g32_static", 4, false, Extent::Group(32)),
        ] {
            let w = read(&format!("{layer}.W"));
            let (size, x) = (w.shape[1], read(&format!("{layer}.X")).to_f32());
            let form = Form { codes: Codes::Int { bits, symmetric }, extent };
            let w = w.to_f32();
            let scales = form.scales(&w, size, DType::F32, Range::of(&w));
            assert_eq!(scales.factors, read(&format!("{layer}.{case}.scale")).to_f32(), "{layer} {case}");
            let found = form.decode(&codes_of_one(&form, &w, &scales, &moments_of(&x, size)), size, &scales);
            let wanted = read(&format!("{layer}.{case}.dequant")).to_f32();
            let same = found.iter().zip(&wanted).filter(|(a, b)| a == b).count();
            assert!(same * 100 >= found.len() * 99, "{layer} {case}: {same} of {}", found.len());
        }
    }
}
