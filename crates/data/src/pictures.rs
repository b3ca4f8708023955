//! Images as a model reads them: its processor and the form of its patches together.

use crate::batch::Batch;
use crate::boxes::BoxForm;
use crate::document::Document;
use crate::error::DataError;
use crate::image::{Kind, Limits, Pixels, Processor, size};
use crate::patches::{Form, Picture};

/// Makes patches of images: a processor and the form that the model reads.
#[derive(Clone, Debug)]
pub struct ImageReader {
    pub form: Form,
    pub processor: Processor,
    pub limits: Limits,
    /// The writing of boxes in texts.
    pub boxes: BoxForm,
    /// Patches that batches have room for, ascending; what needs more has its own size.
    pub rooms: Vec<usize>,
}

impl ImageReader {
    /// Pixels a side of a patch.
    fn patch(&self) -> usize {
        (self.form.width / 3).isqrt()
    }

    /// Rows and columns of patches of each view of an image of this size. Errors: an image that cannot have a size, or one
    /// whose size the model does not take.
    pub fn grids(&self, size: [usize; 2]) -> Result<Vec<[usize; 2]>, String> {
        let (views, _) = self.processor.layout(size)?;
        let block = self.patch() * self.form.side;
        let grid = |[h, w]: [usize; 2]| match block > 0 && h % block == 0 && w % block == 0 {
            true => Ok([h / self.patch(), w / self.patch()]),
            false => Err(format!("becomes {h} × {w} pixels, expected multiples of {block}")),
        };
        views.into_iter().map(grid).collect()
    }

    /// Returns the patches of a batch that needs at least `patches`.
    pub fn room(&self, patches: usize) -> usize {
        self.rooms.iter().copied().find(|room| *room >= patches).unwrap_or(patches)
    }

    /// Tokens of an image with such views.
    pub fn tokens(&self, grids: &[[usize; 2]]) -> usize {
        grids.iter().map(|[rows, columns]| rows * columns / self.form.group()).sum()
    }

    /// Time, row and column of each token of a document, three lists; none for families whose positions have one axis.
    /// Errors: an image that cannot be read any more.
    pub fn axes(&self, document: &Document) -> Result<Option<Vec<Vec<i32>>>, DataError> {
        if !matches!(self.processor.kind, Kind::Qwen { .. }) {
            return Ok(None);
        }
        let wrong = |problem: String| DataError::invalid("the images of a conversation", problem);
        let mut pictures = Vec::new();
        for image in &document.images {
            let size = size(&image.read().map_err(wrong)?, &self.limits).map_err(wrong)?;
            pictures.extend(self.grids(size).map_err(wrong)?.into_iter().map(Picture::blank));
        }
        let (ids, length) = (document.ids.clone(), document.len());
        let batch = Batch::from_labels(1, length, ids, &document.labels, None, None)?;
        let axes = self.form.lay_out(&batch, &pictures)?.axes;
        Ok(Some((0..3).map(|axis| axes.iter().skip(axis).step_by(3).copied().collect()).collect()))
    }

    /// The views of an image as the model takes them.
    pub fn pictures(&self, image: Pixels) -> Result<Vec<Picture>, String> {
        let views = self.processor.prepare(image)?.views;
        views.into_iter().map(|view| self.processor.patches(view, self.patch(), self.form.side)).collect()
    }
}
