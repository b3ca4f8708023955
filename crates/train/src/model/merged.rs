//! A weight with its adapter added: W + scale·B·A in f32, rounded once to the type of W.

use rayon::prelude::*;
use tensor::HostTensor;

use crate::model::rounding::Rounding;

/// A weight with its adapter added, in the weight's type; what that rounds is added to `rounding`. A is [r, in], B is [out, r]; the weight is [out, in], or
/// [in, out] if `transposed`. With a magnitude for each output (DoRA), the sum is scaled to it.
///
/// # Panics
/// If the shapes do not belong together.
pub fn merged(
    weight: &HostTensor,
    [a, b]: [&HostTensor; 2],
    magnitude: Option<&HostTensor>,
    scale: f64,
    transposed: bool,
    rounding: &mut Rounding,
) -> HostTensor {
    let (rank, inputs, outputs) = (a.shape[0], a.shape[1], b.shape[0]);
    let shape = if transposed { [inputs, outputs] } else { [outputs, inputs] };
    assert_eq!((weight.shape.as_slice(), b.shape[1]), (shape.as_slice(), rank), "an adapter has its weight's sizes");
    let (left, right) = match transposed {
        false => (b.to_f32(), a.to_f32()),
        true => (transpose(&a.to_f32(), rank), transpose(&b.to_f32(), outputs)),
    };
    let columns = shape[1];
    let mut sum = weight.to_f32();
    sum.par_chunks_mut(columns).zip(left.par_chunks(rank)).for_each(|(row, factors)| {
        let mut delta = vec![0.0f32; columns];
        for (factor, values) in factors.iter().zip(right.chunks(columns)) {
            delta.iter_mut().zip(values).for_each(|(delta, value)| *delta += factor * value);
        }
        row.iter_mut().zip(&delta).for_each(|(x, delta)| *x += scale as f32 * delta);
    });
    if let Some(magnitude) = magnitude {
        rescale(&mut sum, &magnitude.to_f32(), transposed);
    }
    rounding.cast(HostTensor::from_f32(shape, &sum), weight.dtype)
}

/// Scales what belongs to each output of an adapted weight to its magnitude.
fn rescale(sum: &mut [f32], magnitude: &[f32], transposed: bool) {
    let (outputs, inputs) = (magnitude.len(), sum.len() / magnitude.len());
    if transposed {
        let mut squares = vec![0.0f64; outputs];
        for row in sum.chunks(outputs) {
            squares.iter_mut().zip(row).for_each(|(square, x)| *square += f64::from(*x).powi(2));
        }
        let factor = |(magnitude, square): (&f32, &f64)| (f64::from(*magnitude) / square.sqrt()) as f32;
        let factors: Vec<f32> = magnitude.iter().zip(&squares).map(factor).collect();
        sum.par_chunks_mut(outputs).for_each(|row| row.iter_mut().zip(&factors).for_each(|(x, factor)| *x *= factor));
        return;
    }
    sum.par_chunks_mut(inputs).zip(magnitude).for_each(|(row, magnitude)| {
        let norm = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let factor = (f64::from(*magnitude) / norm) as f32;
        row.iter_mut().for_each(|x| *x *= factor);
    });
}

/// [rows, columns] → [columns, rows].
fn transpose(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}

#[cfg(test)]
mod tests {
    use tensor::DType;

    use super::*;

    #[test]
    fn the_product_is_added_in_f32_and_rounded_once() {
        let weight = HostTensor::from_f32([2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let a = HostTensor::from_f32([2, 3], &[1.0, 0.0, -1.0, 0.5, 2.0, 0.25]);
        let b = HostTensor::from_f32([2, 2], &[2.0, 1.0, -1.0, 4.0]);
        let expected = [1.0 + 1.25, 2.0 + 1.0, 3.0 - 0.875, 4.0 + 0.5, 5.0 + 4.0, 6.0 + 1.0];
        assert_eq!(merged(&weight, [&a, &b], None, 0.5, false, &mut Rounding::default()).to_f32(), expected);
        let flipped = HostTensor::from_f32([3, 2], &transpose(&weight.to_f32(), 2));
        assert_eq!(
            transpose(&merged(&flipped, [&a, &b], None, 0.5, true, &mut Rounding::default()).to_f32(), 3),
            expected
        );

        // Scaled to magnitudes, rows have these norms, and their directions.
        let magnitudes = HostTensor::from_f32([2], &[3.0, 5.0]);
        let scaled = merged(&weight, [&a, &b], Some(&magnitudes), 0.5, false, &mut Rounding::default()).to_f32();
        for (row, (found, of)) in scaled.chunks(3).zip(expected.chunks(3)).enumerate() {
            let norm = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
            let factor = [3.0, 5.0][row] / norm(of);
            assert!(found.iter().zip(of).all(|(found, of)| (found - factor * of).abs() < 1e-5), "{scaled:?}");
        }
        let other = merged(&flipped, [&a, &b], Some(&magnitudes), 0.5, true, &mut Rounding::default()).to_f32();
        assert!(transpose(&other, 3).iter().zip(&scaled).all(|(a, b)| (a - b).abs() < 1e-5));

        // 1 + 2⁻⁸ + 2⁻⁸ is a bf16 number; rounded after each term it would stay 1.
        let small = 2f32.powi(-8);
        let one = HostTensor::from_f32([1, 1], &[1.0]).cast(DType::BF16);
        let (a, b) = (HostTensor::from_f32([2, 1], &[small; 2]), HostTensor::from_f32([1, 2], &[1.0; 2]));
        assert_eq!(merged(&one, [&a, &b], None, 1.0, false, &mut Rounding::default()).to_f32(), [1.0 + 2.0 * small]);
    }
}
