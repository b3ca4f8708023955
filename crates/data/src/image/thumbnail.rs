//! Small copies of images, for people to look at. No model reads them.

use std::borrow::Cow;
use std::io::Cursor;

use ::image::codecs::jpeg::JpegEncoder;
use ::image::{ExtendedColorType, ImageEncoder};

use super::Pixels;
use super::resize::{Filter, resize};

/// The quality of copies, of 100: small files in which edges are still sharp.
const QUALITY: u8 = 80;

/// The image with both sides of at most `side` pixels, at least one, and its proportions.
pub fn within(image: &Pixels, side: usize) -> Pixels {
    let longest = image.height.max(image.width);
    if longest <= side {
        return image.clone();
    }
    let scaled = |of: usize| ((of * side + longest / 2) / longest).max(1);
    resize(Cow::Borrowed(image), scaled(image.height), scaled(image.width), Filter::Bilinear)
}

/// The file of an image as JPEG, which is small and not exact.
pub fn jpeg(image: &Pixels) -> Vec<u8> {
    let (width, height) = (image.width as u32, image.height as u32);
    let mut bytes = Vec::new();
    let encoder = JpegEncoder::new_with_quality(Cursor::new(&mut bytes), QUALITY);
    let written = encoder.write_image(&image.rgb, width, height, ExtendedColorType::Rgb8);
    written.expect("memory takes every image within the sides of a JPEG");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{Limits, decode};

    #[test]
    fn a_small_copy_keeps_proportions_and_colors() {
        let image = Pixels { height: 300, width: 100, rgb: [200, 100, 50].repeat(30_000) };
        let small = within(&image, 60);
        assert_eq!((small.height, small.width), (60, 20));
        assert_eq!(within(&small, 60), small);
        let line = Pixels { height: 1, width: 9000, rgb: vec![7; 27_000] };
        assert_eq!((within(&line, 60).height, within(&line, 60).width), (1, 60));
        let read = decode(&jpeg(&small), &Limits::default()).unwrap();
        let far = read.rgb.iter().zip(&small.rgb).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(far <= Some(4) && (read.height, read.width) == (60, 20), "{far:?}");
    }
}
