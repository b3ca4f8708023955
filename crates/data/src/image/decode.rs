//! Decoding: JPEG, PNG, WebP and GIF to 8-bit RGB, turned as EXIF says, transparency on white.

use std::io::Cursor;

use ::image::metadata::Orientation;
use ::image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader};

use crate::guard::guarded;

/// Limits of an image, checked before it is decoded.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most pixels of an image, height times width.
    pub pixels: u64,
    /// Most pixels of the height or the width.
    pub side: u32,
    /// Most bytes of a file, before it is decoded.
    pub bytes: usize,
}

/// Bytes of what stands before the pixels, when it is unpacked: a color profile has less than a few million.
const MOST_OF_HEAD: u64 = 16 << 20;

impl Default for Limits {
    fn default() -> Limits {
        Limits { pixels: 100_000_000, side: 32_768, bytes: 256 << 20 }
    }
}

/// An image of 8-bit RGB.
#[derive(Clone, PartialEq, Eq)]
pub struct Pixels {
    pub height: usize,
    pub width: usize,
    /// [height, width, 3].
    pub rgb: Vec<u8>,
}

impl std::fmt::Debug for Pixels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pixels({} × {})", self.height, self.width)
    }
}

impl Pixels {
    /// A part of the image.
    pub(crate) fn part(&self, top: usize, left: usize, height: usize, width: usize) -> Pixels {
        let row = |y: usize| &self.rgb[3 * ((top + y) * self.width + left)..][..3 * width];
        Pixels { height, width, rgb: (0..height).flat_map(row).copied().collect() }
    }
}

/// Decodes the bytes of a file. Errors say what is wrong with it, and not which file it is.
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Pixels, String> {
    guarded(|| decode_unguarded(bytes, limits)).map_err(|panic| format!("cannot be decoded: {panic}"))?
}

fn decode_unguarded(bytes: &[u8], limits: &Limits) -> Result<Pixels, String> {
    let (decoder, orientation) = open(bytes, limits)?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(|error| format!("cannot be decoded: {error}"))?;
    image.apply_orientation(orientation);
    let (width, height) = (image.width() as usize, image.height() as usize);
    let rgb = match image.color().has_alpha() {
        false => image.into_rgb8().into_raw(),
        true => {
            let rgba = image.into_rgba8().into_raw();
            let mut rgb = vec![0; rgba.len() / 4 * 3];
            for (to, pixel) in rgb.as_chunks_mut().0.iter_mut().zip(rgba.as_chunks().0) {
                *to = on_white(*pixel);
            }
            rgb
        }
    };
    Ok(Pixels { height, width, rgb })
}

/// Height and width of an image after turning, without decoding it.
pub fn size(bytes: &[u8], limits: &Limits) -> Result<[usize; 2], String> {
    let opened = guarded(|| open(bytes, limits).map(|(decoder, orientation)| (decoder.dimensions(), orientation)));
    let ((width, height), orientation) = opened.map_err(|panic| format!("cannot be decoded: {panic}"))??;
    Ok(match swaps_sides(orientation) {
        true => [width as usize, height as usize],
        false => [height as usize, width as usize],
    })
}

/// The file of an image, without loss.
pub fn png(pixels: &Pixels) -> Vec<u8> {
    let (width, height) = (pixels.width as u32, pixels.height as u32);
    let image = ::image::RgbImage::from_raw(width, height, pixels.rgb.clone()).expect("a pixel has three bytes");
    let mut bytes = Vec::new();
    let written = DynamicImage::from(image).write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png);
    written.expect("memory takes every image");
    bytes
}

fn open<'a>(bytes: &'a [u8], limits: &Limits) -> Result<(impl ImageDecoder + 'a, Orientation), String> {
    if bytes.len() > limits.bytes {
        return Err(format!("has {} bytes, more than the limit of {}", bytes.len(), limits.bytes));
    }
    let format = ::image::guess_format(bytes)
        .ok()
        .filter(|format| [ImageFormat::Jpeg, ImageFormat::Png, ImageFormat::WebP, ImageFormat::Gif].contains(format));
    let Some(format) = format else {
        let what = if bytes.is_empty() { "is empty" } else { "is no image of a known format" };
        return Err(format!("{what}, expected JPEG, PNG, WebP or GIF"));
    };
    if format == ImageFormat::Jpeg && !is_whole_jpeg(bytes) {
        return Err("is cut off: the JPEG has no end".to_owned());
    }
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut of_head = ::image::Limits::no_limits();
    of_head.max_alloc = Some(MOST_OF_HEAD);
    reader.limits(of_head);
    let mut decoder = reader.into_decoder().map_err(|error| format!("cannot be decoded: {error}"))?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err("has no pixels".to_owned());
    }
    if width.max(height) > limits.side || u64::from(width) * u64::from(height) > limits.pixels {
        let Limits { pixels, side, .. } = limits;
        return Err(format!("has {height} × {width} pixels, more than the limit of {pixels}, or {side} a side"));
    }
    let mut allowed = ::image::Limits::no_limits();
    allowed.max_alloc = Some(16 * limits.pixels);
    decoder.set_limits(allowed).map_err(|error| format!("cannot be decoded: {error}"))?;
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    Ok((decoder, orientation))
}

fn swaps_sides(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}

/// A pixel on a white ground, rounded to the nearest.
fn on_white([r, g, b, alpha]: [u8; 4]) -> [u8; 3] {
    let alpha = u32::from(alpha);
    [r, g, b].map(|channel| ((u32::from(channel) * alpha + 255 * (255 - alpha) + 127) / 255) as u8)
}

/// Returns true if the segments of a JPEG reach its end: decoders fill up what is missing.
fn is_whole_jpeg(bytes: &[u8]) -> bool {
    let mut at = 2;
    loop {
        // A marker: 0xFF, as often as you like, and its number.
        let Some(marker) = bytes.get(at..).and_then(|rest| rest.iter().position(|byte| *byte != 0xff)) else {
            return false;
        };
        if marker == 0 {
            return false;
        }
        let number = bytes[at + marker];
        at += marker + 1;
        match number {
            0xd9 => return true,
            0x01 | 0xd0..=0xd8 => continue,
            _ => {}
        }
        let Some(length) = bytes.get(at..at + 2).map(|of| usize::from(of[0]) << 8 | usize::from(of[1])) else {
            return false;
        };
        at += length.max(2);
        if number != 0xda {
            continue;
        }
        // Entropy-coded data go on to a marker that is no restart; 0xFF inside of them is followed by 0.
        loop {
            let Some(found) = bytes.get(at..).and_then(|rest| rest.iter().position(|byte| *byte == 0xff)) else {
                return false;
            };
            at += found;
            match bytes.get(at + 1) {
                None => return false,
                Some(0x00 | 0xd0..=0xd7) => at += 2,
                Some(0xff) => at += 1,
                Some(_) => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(image: &DynamicImage) -> Vec<u8> {
        let mut bytes = Vec::new();
        image.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png).unwrap();
        bytes
    }

    #[test]
    fn transparent_pixels_lie_on_white() {
        let image = ::image::RgbaImage::from_raw(2, 1, vec![10, 20, 30, 0, 10, 20, 30, 128]).unwrap();
        let pixels = decode(&file(&image.into()), &Limits::default()).unwrap();
        assert_eq!((pixels.height, pixels.width), (1, 2));
        assert_eq!(pixels.rgb, [255, 255, 255, 132, 137, 142]);
    }

    #[test]
    fn sixteen_bits_are_scaled_to_eight() {
        let image = ::image::ImageBuffer::<::image::Luma<u16>, _>::from_raw(3, 1, vec![0u16, 32768, 65535]).unwrap();
        let pixels = decode(&file(&image.into()), &Limits::default()).unwrap();
        assert_eq!(pixels.rgb, [0, 0, 0, 128, 128, 128, 255, 255, 255]);
    }

    #[test]
    fn files_that_are_no_images_or_too_large_are_refused() {
        let image = file(&::image::RgbImage::new(40, 30).into());
        assert_eq!(size(&image, &Limits::default()), Ok([30, 40]));
        let few = Limits { pixels: 1000, ..Limits::default() };
        assert!(decode(&image, &few).unwrap_err().contains("30 × 40 pixels"));
        assert!(decode(&image, &Limits { bytes: 10, ..few }).unwrap_err().contains("more than the limit of 10"));
        assert!(decode(b"", &few).unwrap_err().contains("is empty"));
        assert!(decode(b"GIF8 but not really", &few).unwrap_err().contains("expected JPEG"));
        assert!(decode(&image[..image.len() / 2], &Limits::default()).unwrap_err().contains("cannot be decoded"));
    }

    #[test]
    fn a_color_profile_that_unpacks_to_a_flood_is_left_out() {
        let with_profile = |bytes: usize| {
            let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::best());
            std::io::Write::write_all(&mut packed, &vec![0; bytes]).unwrap();
            let content = [&b"x\0\0"[..], &packed.finish().unwrap()].concat();
            let mut sum = flate2::Crc::new();
            sum.update(&[b"iCCP", &content[..]].concat());
            let length = (content.len() as u32).to_be_bytes();
            let chunk = [&length[..], b"iCCP", &content, &sum.sum().to_be_bytes()].concat();
            let image = file(&::image::RgbImage::new(4, 3).into());
            // After the signature and the header.
            [&image[..33], &chunk, &image[33..]].concat()
        };
        let profile = |bytes: &[u8]| open(bytes, &Limits::default()).unwrap().0.icc_profile().unwrap();
        assert_eq!(profile(&with_profile(4 << 20)).map(|of| of.len()), Some(4 << 20));
        let flood = with_profile(64 << 20);
        assert_eq!((flood.len() < 100_000, profile(&flood)), (true, None));
        assert_eq!(decode(&flood, &Limits::default()).unwrap().rgb.len(), 36);
    }

    #[test]
    fn a_jpeg_without_its_end_is_refused() {
        let mut bytes = Vec::new();
        let image = DynamicImage::from(::image::RgbImage::from_fn(64, 64, |x, y| ::image::Rgb([(x * y) as u8; 3])));
        image.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Jpeg).unwrap();
        assert!(decode(&bytes, &Limits::default()).is_ok());
        for length in [bytes.len() - 2, bytes.len() / 2, 30, 3] {
            let error = decode(&bytes[..length], &Limits::default()).unwrap_err();
            assert!(error.contains("is cut off"), "{length}: {error}");
        }
        bytes.extend(b"something after it");
        assert!(decode(&bytes, &Limits::default()).is_ok());
    }
}
