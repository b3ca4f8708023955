//! Resampling as the processors of transformers do it: widened filters where an image shrinks, one pass over the width
//! and one over the height, rounded to 8 bits after each.

use super::Pixels;

/// A filter that weights the inputs of a resampled pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    Bilinear,
    /// Keys' cubic with a = −0.5, as Pillow has it.
    Bicubic,
    /// A windowed sinc of three lobes.
    Lanczos,
}

impl Filter {
    /// The filter of Pillow's number.
    pub fn of_number(number: u64) -> Option<Filter> {
        match number {
            1 => Some(Filter::Lanczos),
            2 => Some(Filter::Bilinear),
            3 => Some(Filter::Bicubic),
            _ => None,
        }
    }

    fn support(self) -> f64 {
        match self {
            Filter::Bilinear => 1.0,
            Filter::Bicubic => 2.0,
            Filter::Lanczos => 3.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        let x = x.abs();
        let sinc = |x: f64| if x == 0.0 { 1.0 } else { (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI) };
        match self {
            Filter::Bilinear => (1.0 - x).max(0.0),
            Filter::Bicubic if x < 1.0 => (1.5 * x - 2.5) * x * x + 1.0,
            Filter::Bicubic if x < 2.0 => ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0,
            Filter::Lanczos if x < 3.0 => sinc(x) * sinc(x / 3.0),
            Filter::Bicubic | Filter::Lanczos => 0.0,
        }
    }
}

/// The weights of the inputs that make one output: the first of them and the weight of each.
struct Taps {
    first: usize,
    weights: Vec<f32>,
}

fn taps(from: usize, to: usize, filter: Filter) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let widened = scale.max(1.0);
    let support = filter.support() * widened;
    let of = |i: usize| {
        let center = (i as f64 + 0.5) * scale;
        let first = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5) as usize).min(from);
        let weights: Vec<f64> = (first..end).map(|k| filter.weight((k as f64 - center + 0.5) / widened)).collect();
        let sum: f64 = weights.iter().sum();
        Taps { first, weights: weights.iter().map(|weight| (weight / sum) as f32).collect() }
    };
    (0..to).map(of).collect()
}

fn rounded(value: f32) -> u8 {
    (value + 0.5).floor().clamp(0.0, 255.0) as u8
}

/// The image in another size; the same where it has that size.
pub(super) fn resize(image: &Pixels, height: usize, width: usize, filter: Filter) -> Pixels {
    let narrow = if image.width == width { image.clone() } else { across(image, width, filter) };
    if narrow.height == height { narrow } else { down(&narrow, height, filter) }
}

/// The pass over the width.
fn across(image: &Pixels, width: usize, filter: Filter) -> Pixels {
    let taps = taps(image.width, width, filter);
    let mut rgb = Vec::with_capacity(3 * image.height * width);
    for row in image.rgb.chunks_exact(3 * image.width) {
        for Taps { first, weights } in &taps {
            let mut sums = [0f32; 3];
            for (pixel, weight) in row[3 * first..].chunks_exact(3).zip(weights) {
                for (sum, channel) in sums.iter_mut().zip(pixel) {
                    *sum += weight * f32::from(*channel);
                }
            }
            rgb.extend(sums.map(rounded));
        }
    }
    Pixels { height: image.height, width, rgb }
}

/// The pass over the height.
fn down(image: &Pixels, height: usize, filter: Filter) -> Pixels {
    let columns = 3 * image.width;
    let mut rgb = Vec::with_capacity(height * columns);
    let mut sums = vec![0f32; columns];
    for Taps { first, weights } in taps(image.height, height, filter) {
        sums.fill(0.0);
        for (row, weight) in image.rgb[first * columns..].chunks_exact(columns).zip(&weights) {
            for (sum, channel) in sums.iter_mut().zip(row) {
                *sum += weight * f32::from(*channel);
            }
        }
        rgb.extend(sums.iter().map(|sum| rounded(*sum)));
    }
    Pixels { height, width: image.width, rgb }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flat_image_stays_flat_and_edges_are_cut_off_at_the_range() {
        let flat = Pixels { height: 5, width: 7, rgb: vec![200; 105] };
        for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
            for (height, width) in [(11, 3), (5, 20), (2, 2)] {
                let made = resize(&flat, height, width, filter);
                assert_eq!((made.height, made.width, made.rgb.len()), (height, width, 3 * height * width));
                assert!(made.rgb.iter().all(|value| *value == 200));
            }
        }
        let edge = Pixels { height: 1, width: 4, rgb: [[0u8; 6], [255u8; 6]].concat() };
        let made = resize(&edge, 1, 16, Filter::Bicubic);
        assert!(made.rgb.is_sorted() && made.rgb[0] == 0 && made.rgb[47] == 255);
        assert_eq!(resize(&edge, 1, 4, Filter::Lanczos), edge);
    }

    #[test]
    fn halving_takes_the_mean_of_wide_filters() {
        let ramp = Pixels { height: 1, width: 8, rgb: (0..8u8).flat_map(|x| [x * 30; 3]).collect() };
        let made = resize(&ramp, 1, 4, Filter::Bilinear);
        let inner: Vec<u8> = made.rgb.chunks(3).map(|pixel| pixel[0]).collect();
        assert_eq!(inner[1..3], [75, 135], "a ramp stays a ramp away from the border");
    }
}
