//! The images of one sequence that a model reads part by part: where each may be cut off, the positions of its tokens, and
//! the patches of a part. Files are decoded when their part is read. Knows no model and no cache.

use std::ops::Range;
use std::sync::Arc;

use crate::batch::Batch;
use crate::error::DataError;
use crate::image::{decode, size};
use crate::image_source::ImageRef;
use crate::patches::Picture;
use crate::pictures::ImageReader;
use crate::show::ShownImage;

/// The images of a sequence, in the order of their tokens.
#[derive(Clone, Debug)]
pub struct SequenceImages {
    reader: Arc<ImageReader>,
    images: Vec<Shown>,
    /// Time, row and column of each token of the beginning that has the images.
    axes: Vec<i32>,
    /// The position of the token after them, on all axes.
    next: i32,
}

/// An image with its place among the tokens.
#[derive(Clone, Debug)]
struct Shown {
    of: ImageRef,
    size: [usize; 2],
    /// Tokens and patches of all its views.
    count: usize,
    patches: usize,
    /// From its first token to its last; text may stand between those of its views.
    tokens: Range<usize>,
}

impl SequenceImages {
    /// Finds the images of a beginning with these tokens. Errors: an image that cannot be read, and another number of tokens.
    pub fn new(reader: Arc<ImageReader>, ids: &[i32], images: Vec<ImageRef>) -> Result<SequenceImages, DataError> {
        let form = reader.form;
        let mut places = (0..ids.len()).filter(|t| ids[*t] == form.token);
        let (mut shown, mut blank) = (Vec::with_capacity(images.len()), Vec::new());
        for (number, of) in images.into_iter().enumerate() {
            let wrong = |problem: String| DataError::invalid(format!("image {}", number + 1), problem);
            let size = of.read().and_then(|bytes| size(&bytes, &reader.limits)).map_err(wrong)?;
            let grids = reader.grids(size).map_err(wrong)?;
            let own: Vec<usize> = places.by_ref().take(reader.tokens(&grids)).collect();
            let tokens = own.first().map_or(0..0, |first| *first..own.last().map_or(0, |last| last + 1));
            let patches = grids.iter().map(|[rows, columns]| rows * columns).sum();
            shown.push(Shown { of, size, count: own.len(), patches, tokens });
            blank.extend(grids.into_iter().map(Picture::blank));
        }
        let batch = Batch::from_labels(1, ids.len(), ids.to_vec(), ids, None, None)?;
        let axes = form.lay_out(&batch, &blank)?.axes;
        let next = axes.iter().max().map_or(0, |last| last + 1);
        Ok(SequenceImages { reader, images: shown, axes, next })
    }

    /// The same with the bytes of all files in memory. Errors: a file that has changed since.
    pub fn in_memory(mut self) -> Result<SequenceImages, DataError> {
        for Shown { of, .. } in &mut self.images {
            of.hold().map_err(|problem| DataError::invalid(of.source.name(), problem))?;
        }
        Ok(self)
    }

    /// The images as people see them.
    pub fn shown(&self) -> Vec<ShownImage> {
        self.images.iter().map(|image| ShownImage::new(image.of.clone(), image.size, image.count)).collect()
    }

    /// Time, row and column of each of these tokens, one after the other.
    pub fn axes(&self, tokens: Range<usize>) -> Vec<i32> {
        let of_text = |t: usize| [self.next + (t - self.axes.len() / 3) as i32; 3];
        let of = |t: usize| match self.axes.get(3 * t..3 * t + 3) {
            Some(axes) => [axes[0], axes[1], axes[2]],
            None => of_text(t),
        };
        tokens.flat_map(of).collect()
    }

    /// The end of a part from `begin` that cuts no image: at most `end`, unless the first image is longer.
    pub fn end_of_part(&self, begin: usize, end: usize) -> usize {
        let cut = self.images.iter().map(|of| &of.tokens).find(|tokens| tokens.start < end && end < tokens.end);
        match cut {
            Some(tokens) if tokens.start > begin => tokens.start,
            Some(tokens) => tokens.end,
            None => end,
        }
    }

    /// A part of the sequence with its images laid out, as one row of `seq_len` tokens; none where it has no image. Errors: a
    /// file that has changed since.
    pub fn lay_out(&self, ids: &[i32], part: Range<usize>, seq_len: usize) -> Result<Option<Batch>, DataError> {
        let inside = |of: &&Shown| part.start <= of.tokens.start && of.tokens.end <= part.end && !of.tokens.is_empty();
        let shown: Vec<&Shown> = self.images.iter().filter(inside).collect();
        if shown.is_empty() {
            return Ok(None);
        }
        let form = self.reader.form;
        let mut pictures = Vec::new();
        for of in &shown {
            let wrong = |problem: String| DataError::invalid(of.of.source.name(), problem);
            let image = of.of.read().and_then(|bytes| decode(&bytes, &self.reader.limits)).map_err(wrong)?;
            pictures.extend(self.reader.pictures(image).map_err(wrong)?);
        }
        let mut row = ids[part].to_vec();
        // Padding that stands for no image.
        row.resize(seq_len, i32::from(form.token == 0));
        let batch = Batch::from_labels(1, seq_len, row.clone(), &row, None, None)?;
        let room = form.roomy(shown.iter().map(|of| of.patches).sum());
        let patches = form.lay_out_among(&batch, &pictures, room)?;
        Ok(Some(Batch { patches, ..batch }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boxes::{BoxForm, Units};
    use crate::image::{Limits, Pixels, Processor, png};
    use crate::image_source::ImageSource;
    use crate::patches::Form;

    const TOKEN: i32 = 9;

    /// A reader of images of patches of 4 × 4 pixels, of which 2 × 2 are a token.
    fn reader() -> Arc<ImageReader> {
        let config = serde_json::json!({
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 4096}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        });
        let form =
            Form { token: TOKEN, width: 48, side: 2, window: 0, table: 0, stretched: false, breaks: false, pad: 0 };
        let processor = Processor::of("a test", &config).unwrap();
        let boxes = BoxForm { units: Units::Pixels, marked: false };
        Arc::new(ImageReader { form, processor, limits: Limits::default(), boxes, rooms: Vec::new() })
    }

    fn image(height: usize, width: usize) -> ImageRef {
        let bytes = png(&Pixels { height, width, rgb: vec![7; 3 * height * width] });
        ImageRef::new(ImageSource::Bytes(bytes.as_slice().into()), &bytes)
    }

    #[test]
    fn parts_cut_no_image_and_positions_go_on_after_its_longer_side() {
        // An image of 2 × 3 tokens, one of 1 × 2.
        let ids = [&[1, 2][..], &[TOKEN; 6], &[3], &[TOKEN; 2], &[4]].concat();
        let of = SequenceImages::new(reader(), &ids, vec![image(16, 24), image(8, 16)]).unwrap();
        assert_eq!(
            [(0, 5), (2, 5), (2, 8), (8, 10), (9, 10), (3, 4)].map(|(a, b)| of.end_of_part(a, b)),
            [2, 8, 8, 9, 11, 8]
        );
        let axes = of.axes(0..14);
        let rows: Vec<&[i32]> = axes.chunks(3).collect();
        assert_eq!(rows[..3], [[0, 0, 0], [1, 1, 1], [2, 2, 2]]);
        assert_eq!(rows[7], [2, 3, 4]);
        assert_eq!(rows[8..], [[5, 5, 5], [6, 6, 6], [6, 6, 7], [8, 8, 8], [9, 9, 9], [10, 10, 10]]);
        assert!(of.lay_out(&ids, 0..2, 2).unwrap().is_none());
        let part = of.lay_out(&ids, 8..12, 8).unwrap().unwrap();
        assert_eq!((part.seq_len, &part.input_ids[..5]), (8, &[3, TOKEN, TOKEN, 4, 0][..]));
        assert_eq!((&part.patches.rows[..4], part.patches.count()), (&[-1, 0, 1, -1][..], 64));
    }

    #[test]
    fn other_numbers_of_tokens_are_refused() {
        let error = SequenceImages::new(reader(), &[1, TOKEN], vec![image(16, 24)]).unwrap_err().to_string();
        assert!(error.contains("1 images have 6 tokens"), "{error}");
    }
}
