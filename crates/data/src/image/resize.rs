//! Resampling as the processors of transformers do it: widened filters where an image shrinks, one pass over the width
//! and one over the height, rounded to 8 bits after each.

use std::borrow::Cow;

use super::Pixels;

/// Rows that the pass over the width takes at a time, and numbers of a row that the pass over the height does: vectors of a
/// processor hold them. Each number is still added up by itself, tap by tap, so that they do not change a bit.
const ROWS: usize = 8;
const NUMBERS: usize = 32;

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

/// The nearest number of 8 bits, halves up: the conversion cuts off the fraction, and ends at the range.
fn rounded(value: f32) -> u8 {
    (value + 0.5) as u8
}

/// The image in another size; the same where it has that size.
pub(super) fn resize(image: Cow<'_, Pixels>, height: usize, width: usize, filter: Filter) -> Pixels {
    let narrow = if image.width == width { image } else { Cow::Owned(across(&image, width, filter)) };
    if narrow.height == height { narrow.into_owned() } else { down(&narrow, height, filter) }
}

/// The pass over the width.
fn across(image: &Pixels, width: usize, filter: Filter) -> Pixels {
    let taps = taps(image.width, width, filter);
    let mut rgb = vec![0; 3 * image.height * width];
    // Channels of several rows, one column after another.
    let mut columns = vec![[[0f32; ROWS]; 3]; image.width];
    let given = image.rgb.chunks(ROWS * 3 * image.width);
    for (given, made) in given.zip(rgb.chunks_mut(ROWS * 3 * width)) {
        for (number, row) in given.chunks_exact(3 * image.width).enumerate() {
            for (column, pixel) in columns.iter_mut().zip(row.as_chunks::<3>().0) {
                column[0][number] = f32::from(pixel[0]);
                column[1][number] = f32::from(pixel[1]);
                column[2][number] = f32::from(pixel[2]);
            }
        }
        for (x, Taps { first, weights }) in taps.iter().enumerate() {
            let mut sums = [[0f32; ROWS]; 3];
            for (column, weight) in columns[*first..].iter().zip(weights) {
                for (sums, channel) in sums.iter_mut().zip(column) {
                    for (sum, value) in sums.iter_mut().zip(channel) {
                        *sum += weight * value;
                    }
                }
            }
            let [red, green, blue] = sums.map(|sums| sums.map(rounded));
            let pixels = red.into_iter().zip(green).zip(blue);
            for (row, ((red, green), blue)) in made.chunks_exact_mut(3 * width).zip(pixels) {
                row[3 * x..][..3].copy_from_slice(&[red, green, blue]);
            }
        }
    }
    Pixels { height: image.height, width, rgb }
}

/// The pass over the height.
fn down(image: &Pixels, height: usize, filter: Filter) -> Pixels {
    let columns = 3 * image.width;
    let mut rgb = vec![0; height * columns];
    for (made, Taps { first, weights }) in rgb.chunks_exact_mut(columns).zip(taps(image.height, height, filter)) {
        let rows = &image.rgb[first * columns..];
        let (blocks, rest) = made.as_chunks_mut::<NUMBERS>();
        let begin_of_rest = columns - rest.len();
        for (number, block) in blocks.iter_mut().enumerate() {
            let mut sums = [0f32; NUMBERS];
            for (row, weight) in rows.chunks_exact(columns).zip(&weights) {
                let values = row[number * NUMBERS..].first_chunk::<NUMBERS>().expect("rows are as long");
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum += weight * f32::from(*value);
                }
            }
            *block = sums.map(rounded);
        }
        for (at, made) in (begin_of_rest..).zip(rest) {
            let sum = rows.chunks_exact(columns).zip(&weights);
            *made = rounded(sum.fold(0.0, |sum, (row, weight)| sum + weight * f32::from(row[at])));
        }
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
                let made = resize(Cow::Borrowed(&flat), height, width, filter);
                assert_eq!((made.height, made.width, made.rgb.len()), (height, width, 3 * height * width));
                assert!(made.rgb.iter().all(|value| *value == 200));
            }
        }
        let edge = Pixels { height: 1, width: 4, rgb: [[0u8; 6], [255u8; 6]].concat() };
        let made = resize(Cow::Borrowed(&edge), 1, 16, Filter::Bicubic);
        assert!(made.rgb.is_sorted() && made.rgb[0] == 0 && made.rgb[47] == 255);
        assert_eq!(resize(Cow::Borrowed(&edge), 1, 4, Filter::Lanczos), edge);
    }

    #[test]
    fn halving_takes_the_mean_of_wide_filters() {
        let ramp = Pixels { height: 1, width: 8, rgb: (0..8u8).flat_map(|x| [x * 30; 3]).collect() };
        let made = resize(Cow::Borrowed(&ramp), 1, 4, Filter::Bilinear);
        let inner: Vec<u8> = made.rgb.chunks(3).map(|pixel| pixel[0]).collect();
        assert_eq!(inner[1..3], [75, 135], "a ramp stays a ramp away from the border");
    }

    /// The plain form of both passes: one output after another.
    fn plainly(image: &Pixels, height: usize, width: usize, filter: Filter) -> Pixels {
        let nearest = |value: f32| (value + 0.5).floor().clamp(0.0, 255.0) as u8;
        let sum = |of: &Taps, value: &dyn Fn(usize) -> u8| {
            let taps = (of.first..).zip(&of.weights);
            nearest(taps.fold(0.0, |sum, (place, weight)| sum + weight * f32::from(value(place))))
        };
        let (along, up) = (taps(image.width, width, filter), taps(image.height, height, filter));
        let mut narrow = Vec::new();
        for row in image.rgb.chunks_exact(3 * image.width) {
            let of = |(tap, channel): (&Taps, usize)| sum(tap, &|x| row[3 * x + channel]);
            narrow.extend(along.iter().flat_map(|tap| (0..3).map(move |channel| (tap, channel))).map(of));
        }
        let of = |(tap, column): (&Taps, usize)| sum(tap, &|y| narrow[3 * width * y + column]);
        let rgb = up.iter().flat_map(|tap| (0..3 * width).map(move |column| (tap, column))).map(of).collect();
        Pixels { height, width, rgb }
    }

    #[test]
    fn several_rows_at_a_time_have_the_bits_of_one() {
        let noise = |n: u32| (n.wrapping_mul(2_654_435_761) >> 13) as u8 & if n.is_multiple_of(3) { 255 } else { 192 };
        for (height, width) in [(1, 1), (7, 9), (8, 16), (19, 37)] {
            let image = Pixels { height, width, rgb: (0..(3 * height * width) as u32).map(noise).collect() };
            for (to_height, to_width) in [(5, 11), (16, 32), (23, 40), (3, 64)] {
                for filter in [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos] {
                    let made = resize(Cow::Borrowed(&image), to_height, to_width, filter);
                    // Where a side stays, no pass goes over it.
                    if to_height != height && to_width != width {
                        assert!(made == plainly(&image, to_height, to_width, filter), "{height} {width} {filter:?}");
                    }
                }
            }
        }
    }
}
