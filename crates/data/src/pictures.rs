//! Images as a model reads them: its processor and the form of its patches together.

use crate::image::{Limits, Pixels, Processor};
use crate::patches::{Form, Picture};

/// Makes patches of images.
#[derive(Clone, Debug)]
pub struct ImageReader {
    pub form: Form,
    pub processor: Processor,
    pub limits: Limits,
}

impl ImageReader {
    /// Pixels a side of a patch.
    fn patch(&self) -> usize {
        let of_pixel = 3 * self.processor.frames();
        (self.form.width / of_pixel).isqrt()
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

    /// Tokens of an image with such views.
    pub fn tokens(&self, grids: &[[usize; 2]]) -> usize {
        grids.iter().map(|[rows, columns]| rows * columns / self.form.group()).sum()
    }

    /// The views of an image as the model takes them.
    pub fn pictures(&self, image: &Pixels) -> Result<Vec<Picture>, String> {
        let views = self.processor.prepare(image)?.views;
        views.iter().map(|view| self.processor.patches(view, self.patch(), self.form.side)).collect()
    }
}
