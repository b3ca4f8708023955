//! The images of shown rows: the document and the tokens of each, and their copies.

use std::ops::Range;

use rayon::prelude::*;

use super::row::{ShownRow, ShownToken};
use super::shown_image::ShownImage;
use crate::boxes::ImageObject;
use crate::error::DataError;
use crate::image::size;
use crate::image_source::ImageRef;
use crate::pictures::ImageReader;

/// Adds small copies of the first `most` images of rows. Errors: a file that was changed since the row was read.
pub fn draw(rows: &mut [ShownRow], most: usize) -> Result<(), DataError> {
    let all = rows.iter_mut().flat_map(|row| &mut row.images).flatten().take(most).collect::<Vec<_>>();
    all.into_par_iter().try_for_each(|image| {
        image.copy = Some(image.thumbnail()?);
        Ok(())
    })
}

/// The images of a batch that were not shown yet, in the order of their tokens.
pub(super) struct Images<'a> {
    left: std::slice::Iter<'a, ImageRef>,
    reader: &'a ImageReader,
}

impl<'a> Images<'a> {
    pub(super) fn of(images: &'a [ImageRef], reader: &'a ImageReader) -> Images<'a> {
        Images { left: images.iter(), reader }
    }

    /// The images that the tokens of the next document stand for. Errors: a file that was changed since the row was read.
    pub(super) fn next(&mut self, ids: &[i32]) -> Result<Vec<ShownImage>, DataError> {
        let wanted = ids.iter().filter(|id| **id == self.reader.form.token).count();
        let (mut shown, mut found) = (Vec::new(), 0);
        while found < wanted {
            let Some(of) = self.left.next() else { break };
            let mut image = ShownImage::new(of.clone(), [0; 2], 0);
            let read = of.read().and_then(|bytes| size(&bytes, &self.reader.limits));
            image.size = read.map_err(|problem| image.wrong(problem))?;
            let grids = self.reader.grids(image.size).map_err(|problem| image.wrong(problem))?;
            image.tokens = self.reader.tokens(&grids);
            found += image.tokens;
            shown.push(image);
        }
        Ok(shown)
    }

    /// The same tokens with each run of those of images as one.
    pub(super) fn folded(&self, tokens: Vec<ShownToken>) -> Vec<ShownToken> {
        let mut folded: Vec<ShownToken> = Vec::with_capacity(tokens.len());
        for token in tokens {
            match folded.last_mut() {
                Some(last) if token.id == self.reader.form.token && last.id == token.id => last.times += 1,
                _ => folded.push(token),
            }
        }
        folded
            .iter_mut()
            .filter(|of| of.times > 1)
            .for_each(|of| of.text = format!("{} × {}", of.text.trim(), of.times));
        folded
    }
}

/// The corners of an object in a small copy of its image, in its pixels.
pub(super) fn corners(object: &ImageObject, [height, width]: [usize; 2]) -> [Range<f32>; 2] {
    let [x1, y1, x2, y2] = object.corners;
    [x1 * width as f32..x2 * width as f32, y1 * height as f32..y2 * height as f32]
}
