//! `--method refine`: codes and scales with which the results of a matrix are nearest to those of the model, by the second moments
//! of what it is multiplied with. Scales are searched first, then GPTQ chooses codes; in turns each code is then moved to the
//! number that is best next to all others, and each scale to the factor that is best for its codes.
//!
//! A matrix may have to compute other results than its own: those of the model before anything was in codes. Then its
//! numbers are moved first, by a regression on its present inputs ([`moved`]).
//!
//! All in f64, rows independent of one another. Knows no layers and files.

use rayon::prelude::*;
use tensor::DType;
use tensor::compressed::{Codes, Extent, Form, Range, Scales, round_to};
use tensor::small::{Small, e4m3_code};

use super::factor::Upper;
use super::gptq;
use super::moments::Moments;
use crate::engine::device::products::{Part, add_product};

/// Rows that are worked on together: a row of the moments is read once for them.
const BAND: usize = 16;

/// Shares of the ranges of blocks that scales are searched among: from the first down to the last.
const SHARES: (f32, f32, f32) = (1.1, 0.02, 0.6);

/// Turns of codes and scales.
const TURNS: usize = 4;

/// Passes over the codes in a turn, at most.
const PASSES: usize = 4;

/// Codes of a matrix with their scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Refined {
    pub codes: Vec<u8>,
    pub scales: Scales,
}

/// A matrix [outputs, inputs], and what its codes are judged by.
pub struct Wanted<'a> {
    pub form: Form,
    /// The type of the scales.
    pub dtype: DType,
    /// The range of all that shares a scale of scales.
    pub whole: Range,
    /// The numbers that the values of the codes are to be near to.
    pub x: &'a [f32],
    pub moments: &'a Moments,
}

/// The moments with their damping, as rows in one piece, and the factor of their inverse.
pub struct Solved {
    size: usize,
    rows: Vec<f64>,
    order: Vec<usize>,
    factor: Upper,
}

impl Solved {
    pub fn new(moments: &Moments) -> Solved {
        let size = moments.size;
        let damping = moments.damping();
        let mut rows = vec![0.0; size * size];
        rows.par_chunks_mut(size).enumerate().for_each(|(row, to)| {
            for (column, to) in to.iter_mut().enumerate() {
                *to = if row == column { moments.own(row) + damping } else { moments.at(row, column) };
            }
        });
        let order = gptq::order(moments);
        let factor = gptq::factor(moments, &order);
        Solved { size, rows, order, factor }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.rows[row * self.size..(row + 1) * self.size]
    }

    /// Solves H·z = b for each of the rows of b in place.
    fn solve(&self, b: &mut [f64]) {
        let size = self.size;
        let factor = self.factor.part(0..size, 0);
        b.par_chunks_mut(BAND * size).for_each(|b| {
            let count = b.len() / size;
            let ordered: Vec<f64> =
                b.chunks(size).flat_map(|row| self.order.iter().map(move |column| row[*column])).collect();
            // H⁻¹ = UᵀU: first U·b, then its product with Uᵀ.
            let mut half = vec![0.0; b.len()];
            add_product(&mut half, size, 1.0, Part::new(&ordered, count, size, size), factor.transposed());
            let mut made = vec![0.0; b.len()];
            add_product(&mut made, size, 1.0, Part::new(&half, count, size, size), factor);
            for (row, made) in b.chunks_mut(size).zip(made.chunks(size)) {
                self.order.iter().zip(made).for_each(|(column, z)| row[*column] = *z);
            }
        });
    }
}

/// The numbers of a matrix [outputs, inputs] with which it gives, of what it is multiplied with now, most nearly what it is
/// wanted to give. `wanted`: [outputs, inputs], for each output the moments of what it lacks with what the matrix is multiplied with.
pub fn moved(x: &[f32], solved: &Solved, mut wanted: Vec<f64>) -> Vec<f32> {
    solved.solve(&mut wanted);
    x.iter().zip(&wanted).map(|(x, change)| (f64::from(*x) + change) as f32).collect()
}

/// Chooses codes and scales: searched scales, codes of GPTQ, then both in turns.
pub fn refined(of: &Wanted<'_>, solved: &Solved) -> Refined {
    let columns = solved.size;
    let has_own_scales = matches!(of.form.extent, Extent::Row | Extent::Group(_));
    let mut scales = match has_own_scales {
        true => searched(of),
        false => of.form.scales(of.x, columns, of.dtype, of.whole),
    };
    let mut codes = gptq::coded(&of.form, of.x, &scales, of.moments, &solved.order, &solved.factor);
    let block = if let Extent::Group(size) = of.form.extent { size } else { columns };
    let across = columns / block;
    if !has_own_scales {
        // Blocks of several rows: codes alone, with the scale of each element.
        let shape = [of.x.len() / columns, columns];
        let [block_rows, block_columns] = of.form.extent.block(shape);
        let across = of.form.extent.scales(shape)[1];
        let bands = codes.par_chunks_mut(BAND * columns).zip(of.x.par_chunks(BAND * columns)).enumerate();
        bands.for_each(|(band, (codes, x))| {
            let scale_of = |row: usize, column: usize| {
                let at = (band * BAND + row) / block_rows * across + column / block_columns;
                (scales.factors[at], scales.zeros.get(at).copied().unwrap_or(0))
            };
            let mut rows = Rows::new(&of.form, x, codes, solved, &scale_of);
            for _ in 0..TURNS {
                if !rows.improve_codes(codes, solved, &scale_of) {
                    break;
                }
            }
        });
        return Refined { codes, scales };
    }
    let per_band = BAND * across;
    let zeros: Vec<i8> = if scales.zeros.is_empty() { vec![0; scales.factors.len()] } else { scales.zeros.clone() };
    let mut stored = if scales.codes.is_empty() { vec![0; scales.factors.len()] } else { scales.codes.clone() };
    let global = tensor::compressed::global_scale(of.whole.magnitude(), of.dtype);
    codes
        .par_chunks_mut(BAND * columns)
        .zip(of.x.par_chunks(BAND * columns))
        .zip(scales.factors.par_chunks_mut(per_band))
        .zip(stored.par_chunks_mut(per_band))
        .zip(zeros.par_chunks(per_band))
        .for_each(|((((codes, x), factors), stored), zeros)| {
            let mut rows = Rows::new(&of.form, x, codes, solved, &|row, column| {
                let at = row * across + column / block;
                (factors[at], zeros[at])
            });
            for _ in 0..TURNS {
                let moved = rows.improve_scales(&of.form, codes, factors, stored, zeros, solved, block, |factor| {
                    rounded(of.form.codes, factor, of.dtype, global)
                });
                let changed = rows.improve_codes(codes, solved, &|row, column| {
                    let at = row * across + column / block;
                    (factors[at], zeros[at])
                });
                if !moved && !changed {
                    break;
                }
            }
        });
    if !scales.codes.is_empty() {
        scales.codes = stored;
    }
    Refined { codes, scales }
}

/// The nearest scale that the format stores, and its code where it stores one.
fn rounded(codes: Codes, factor: f64, dtype: DType, global: f32) -> Option<(f32, u8)> {
    let factor = factor as f32;
    let (factor, code) = match codes {
        Codes::Int { .. } | Codes::Fp8 => (round_to(dtype, factor), 0),
        Codes::Nvfp4 => {
            let code = e4m3_code(factor * global);
            (Small::E4M3.value(code) / global, code)
        }
        // A power of two stays as it was searched.
        Codes::Mxfp4 => return None,
    };
    (factor.is_finite() && factor > 0.0).then_some((factor, code))
}

/// Scales of blocks in one piece of a row with the least squares of errors, each weighed by the moment of its column.
fn searched(of: &Wanted<'_>) -> Scales {
    let columns = of.moments.size;
    let block = if let Extent::Group(size) = of.form.extent { size } else { columns };
    let weights: Vec<f64> = (0..columns).map(|column| of.moments.at(column, column)).collect();
    let (first, step, last) = SHARES;
    let steps = ((first - last) / step).round() as usize;
    let search = |(index, x): (usize, &[f32])| -> Scales {
        let weights = &weights[index * block % columns..][..block];
        let range = Range::of(x);
        let mut best: (f64, Option<Scales>) = (f64::INFINITY, None);
        for share in (0..=steps).map(|at| first - step * at as f32) {
            let scales = of.form.scales_of(&[range.shrunk(share, of.dtype)], of.dtype, of.whole);
            let (factor, zero) = (scales.factors[0], scales.zeros.first().copied().unwrap_or(0));
            let error = |(x, weight): (&f32, &f64)| {
                let value = of.form.value(of.form.code(*x, factor, zero), factor, zero);
                weight * f64::from(x - value).powi(2)
            };
            let error: f64 = x.iter().zip(weights).map(error).sum();
            if error < best.0 || best.1.is_none() {
                best = (error, Some(scales));
            }
        }
        best.1.expect("a share was tried")
    };
    let made: Vec<Scales> = of.x.par_chunks(block).enumerate().with_min_len(64).map(search).collect();
    let mut all = Scales { factors: Vec::new(), zeros: Vec::new(), codes: Vec::new() };
    for scales in made {
        all.factors.extend(scales.factors);
        all.zeros.extend(scales.zeros);
        all.codes.extend(scales.codes);
    }
    all
}

/// Rows of a matrix in codes, with how the error of their results changes with each value.
struct Rows<'f> {
    form: &'f Form,
    columns: usize,
    /// The values of the codes.
    values: Vec<f64>,
    /// Half of the slopes: H times the differences of the values from the numbers.
    slopes: Vec<f64>,
}

impl<'f> Rows<'f> {
    fn new(
        form: &'f Form,
        x: &[f32],
        codes: &[u8],
        solved: &Solved,
        scale_of: &dyn Fn(usize, usize) -> (f32, i8),
    ) -> Rows<'f> {
        let columns = solved.size;
        let value = |(index, code): (usize, &u8)| {
            let (factor, zero) = scale_of(index / columns, index % columns);
            f64::from(form.value(*code, factor, zero))
        };
        let values: Vec<f64> = codes.iter().enumerate().map(value).collect();
        let errors: Vec<f64> = values.iter().zip(x).map(|(value, x)| value - f64::from(*x)).collect();
        let mut slopes = vec![0.0; x.len()];
        for column in 0..columns {
            let moments = solved.row(column);
            for (errors, slopes) in errors.chunks(columns).zip(slopes.chunks_mut(columns)) {
                let error = errors[column];
                if error != 0.0 {
                    slopes.iter_mut().zip(moments).for_each(|(slope, moment)| *slope += error * moment);
                }
            }
        }
        Rows { form, columns, values, slopes }
    }

    /// Moves each code to the one whose value is best next to all others. True if any was moved.
    fn improve_codes(
        &mut self,
        codes: &mut [u8],
        solved: &Solved,
        scale_of: &dyn Fn(usize, usize) -> (f32, i8),
    ) -> bool {
        let columns = self.columns;
        let mut any = false;
        for _ in 0..PASSES {
            let mut moved = false;
            for column in &solved.order {
                let moments = solved.row(*column);
                let own = moments[*column];
                for row in 0..codes.len() / columns {
                    let at = row * columns + column;
                    let (factor, zero) = scale_of(row, *column);
                    let best = self.values[at] - self.slopes[at] / own;
                    let code = self.form.code(best as f32, factor, zero);
                    if code == codes[at] {
                        continue;
                    }
                    let value = f64::from(self.form.value(code, factor, zero));
                    let change = value - self.values[at];
                    // Ties of codes may be no improvement.
                    if change * (2.0 * self.slopes[at] + change * own) >= 0.0 {
                        continue;
                    }
                    (codes[at], self.values[at], moved) = (code, value, true);
                    let slopes = &mut self.slopes[row * columns..(row + 1) * columns];
                    slopes.iter_mut().zip(moments).for_each(|(slope, moment)| *slope += change * moment);
                }
            }
            any |= moved;
            if !moved {
                break;
            }
        }
        any
    }

    /// Moves the scale of each block to the best for its codes. True if any was moved.
    #[expect(clippy::too_many_arguments, reason = "rows of everything that a scale belongs to")]
    fn improve_scales(
        &mut self,
        form: &Form,
        codes: &[u8],
        factors: &mut [f32],
        stored: &mut [u8],
        zeros: &[i8],
        solved: &Solved,
        block: usize,
        rounded: impl Fn(f64) -> Option<(f32, u8)>,
    ) -> bool {
        let columns = self.columns;
        let across = columns / block;
        let mut any = false;
        let mut change = vec![0.0; columns];
        for at in 0..factors.len() {
            let (row, first) = (at / across, at % across * block);
            let own = row * columns + first;
            let steps: Vec<f64> =
                codes[own..own + block].iter().map(|code| f64::from(form.value(*code, 1.0, zeros[at]))).collect();
            // H times the codes of the block, from its columns alone and for all.
            change.fill(0.0);
            for (offset, step) in steps.iter().enumerate().filter(|(_, step)| **step != 0.0) {
                change.iter_mut().zip(solved.row(first + offset)).for_each(|(to, moment)| *to += step * moment);
            }
            let curve: f64 = steps.iter().zip(&change[first..]).map(|(a, b)| a * b).sum();
            let slope: f64 = steps.iter().zip(&self.slopes[own..]).map(|(a, b)| a * b).sum();
            if curve <= 0.0 {
                continue;
            }
            let Some((factor, code)) = rounded(f64::from(factors[at]) - slope / curve) else { continue };
            let by = f64::from(factor) - f64::from(factors[at]);
            if by * (2.0 * slope + by * curve) >= 0.0 {
                continue;
            }
            (factors[at], stored[at], any) = (factor, code, true);
            let slopes = &mut self.slopes[row * columns..(row + 1) * columns];
            slopes.iter_mut().zip(&change).for_each(|(slope, change)| *slope += by * change);
            for (value, code) in self.values[own..own + block].iter_mut().zip(&codes[own..]) {
                *value = f64::from(form.value(*code, factor, zeros[at]));
            }
        }
        any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(i: usize) -> f32 {
        ((i * 7919 + 13) % 10_007) as f32 / 5e3 - 1.0
    }

    /// Activations whose columns depend on each other and differ in size.
    fn correlated(rows: usize, size: usize) -> Vec<f32> {
        let of = |i: usize| {
            let (row, column) = (i / size, i % size);
            (noise(row * 31 + column / 8) + 0.3 * noise(i)) * (1.0 + (column % 5) as f32)
        };
        (0..rows * size).map(of).collect()
    }

    /// Σ‖(a - b)x‖² of two matrices over rows of activations.
    fn error(a: &[f32], b: &[f32], x: &[f32], size: usize) -> f64 {
        let of_row = |x: &[f32], row: usize| -> f64 {
            let range = row * size..(row + 1) * size;
            let parts = a[range.clone()].iter().zip(&b[range]).zip(x);
            parts.map(|((a, b), x)| f64::from((a - b) * x)).sum::<f64>().powi(2)
        };
        x.chunks(size).flat_map(|x| (0..a.len() / size).map(move |row| of_row(x, row))).sum()
    }

    fn matrix(rows: usize, size: usize) -> Vec<f32> {
        (0..rows * size).map(|i| ((i * 104_729 + 7) % 2_003) as f32 / 1e3 - 1.0).collect()
    }

    #[test]
    fn results_are_nearer_than_those_of_gptq() {
        let (rows, size) = (24, 64);
        let (x, w) = (correlated(400, size), matrix(rows, size));
        let mut moments = Moments::new(size);
        moments.add(&x);
        let solved = Solved::new(&moments);
        let (codes, extent) = (Codes::Int { bits: 4, symmetric: true }, Extent::Group(32));
        let (form, dtype, whole) = (Form { codes, extent }, DType::BF16, Range::of(&w));
        let global = tensor::compressed::global_scale(whole.magnitude(), dtype);
        let plain = form.scales(&w, size, dtype, whole);
        let of_gptq = form.values(&gptq::codes_of_one(&form, &w, &plain, &moments), size, &plain, global);
        let found = refined(&Wanted { form, dtype, whole, x: &w, moments: &moments }, &solved);
        let values = form.values(&found.codes, size, &found.scales, global);
        let (own, other) = (error(&w, &values, &x, size), error(&w, &of_gptq, &x, size));
        assert!(own < 0.9 * other, "{own} against {other}");
        let is_stored = |factor: &f32| round_to(dtype, *factor) == *factor;
        assert!(found.scales.factors.iter().all(is_stored), "scales are numbers of their type");
    }

    #[test]
    fn scales_have_the_codes_that_files_store() {
        let (rows, size) = (8, 64);
        let (x, w) = (correlated(200, size), matrix(rows, size));
        let mut moments = Moments::new(size);
        moments.add(&x);
        let (whole, dtype) = (Range::of(&w), DType::BF16);
        let form = Form { codes: Codes::Nvfp4, extent: Extent::Group(16) };
        let found = refined(&Wanted { form, dtype, whole, x: &w, moments: &moments }, &Solved::new(&moments));
        let global = tensor::compressed::global_scale(whole.magnitude(), dtype);
        for (factor, code) in found.scales.factors.iter().zip(&found.scales.codes) {
            assert_eq!(*factor, Small::E4M3.value(*code) / global);
        }
    }

    #[test]
    fn a_matrix_makes_up_for_what_it_reads() {
        let (rows, size) = (8, 48);
        let (x, w) = (correlated(600, size), matrix(rows, size));
        // What is read now lacks a part of the other columns.
        let now: Vec<f32> =
            x.chunks(size).flat_map(|x| (0..size).map(|i| 0.9 * x[i] + 0.05 * x[(i + 7) % size])).collect();
        let mut moments = Moments::new(size);
        moments.add(&now);
        let mut cross = super::super::cross::Cross::new([size, size]);
        let lost: Vec<f32> = x.iter().zip(&now).map(|(a, b)| a - b).collect();
        cross.add(&now, &lost);
        let mut wanted = vec![0.0; rows * size];
        cross.times(&w, &mut wanted);
        let found = moved(&w, &Solved::new(&moments), wanted);
        let results = |w: &[f32], x: &[f32]| -> Vec<f32> {
            let of = |x: &[f32], row: usize| w[row * size..][..size].iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
            x.chunks(size).flat_map(|x| (0..rows).map(move |row| of(x, row))).collect()
        };
        let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        let exact = results(&w, &x);
        let (before, after) = (distance(&results(&w, &now), &exact), distance(&results(&found, &now), &exact));
        assert!(after < 0.05 * before, "{after} against {before}");
    }
}
