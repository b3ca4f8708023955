//! An image of a shown document, and a small copy of it.

use crate::boxes::ImageObject;
use crate::error::DataError;
use crate::image::{Limits, decode, jpeg, within};
use crate::image_source::{ImageRef, ImageSource, jpeg_uri};

/// Pixels of the longer side of a small copy.
const SIDE: usize = 256;

/// An image of a shown document.
#[derive(Clone, Debug, PartialEq)]
pub struct ShownImage {
    of: ImageRef,
    /// Height and width, as EXIF turns it.
    pub size: [usize; 2],
    /// Tokens that stand for it.
    pub tokens: usize,
    pub copy: Option<Thumbnail>,
}

/// A small copy of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Thumbnail {
    pub size: [usize; 2],
    /// Its file, as a `data:` URI.
    pub uri: String,
}

impl ShownImage {
    pub fn new(of: ImageRef, size: [usize; 2], tokens: usize) -> ShownImage {
        ShownImage { of, size, tokens, copy: None }
    }

    /// The name of its file.
    pub fn name(&self) -> String {
        match &self.of.source {
            ImageSource::Path(_) => self.of.source.name(),
            ImageSource::Bytes(bytes) => format!("{} bytes in the row", bytes.len()),
        }
    }

    /// Its file, size and tokens; `number` counts from 1.
    pub fn caption(&self, number: usize) -> String {
        let ([height, width], name) = (self.size, self.name());
        format!("image {number}: {name}, {width} × {height} pixels, {} tokens", self.tokens)
    }

    /// The objects that the row names in it.
    pub fn objects(&self) -> &[ImageObject] {
        &self.of.objects
    }

    pub(super) fn wrong(&self, problem: String) -> DataError {
        DataError::invalid(self.of.source.name(), problem)
    }

    /// Makes a small copy. An error where the file was changed since the row was read.
    pub fn thumbnail(&self) -> Result<Thumbnail, DataError> {
        let pixels = self.of.read().and_then(|bytes| decode(&bytes, &Limits::default()));
        let small = within(&pixels.map_err(|problem| self.wrong(problem))?, SIDE);
        Ok(Thumbnail { size: [small.height, small.width], uri: jpeg_uri(&jpeg(&small)) })
    }
}
