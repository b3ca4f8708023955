//! Images and their processor, for Python.

use std::path::PathBuf;

use data::image::{Limits, PixelLimits, Pixels, Processor, decode, png};
use data::image_source::data_uri;
use numpy::{PyArray1, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::DataError;

/// An image: uint8 [H, W, 3], or the bytes of a file, with its name or without.
#[derive(FromPyObject)]
pub enum Image<'py> {
    Array(PyReadonlyArrayDyn<'py, u8>),
    Named(String, Vec<u8>),
    File(Vec<u8>),
}

fn refused(number: usize, problem: impl std::fmt::Display) -> PyErr {
    DataError::new_err(format!("image {}: {problem}", number + 1))
}

fn one(number: usize, image: &Image<'_>) -> PyResult<Pixels> {
    match image {
        Image::File(bytes) => decode(bytes, &Limits::default()).map_err(|problem| refused(number, problem)),
        Image::Named(name, bytes) => decode(bytes, &Limits::default())
            .map_err(|problem| refused(number, format!("{}: {problem}", options::visible(name)))),
        Image::Array(array) => {
            let &[height, width, 3] = array.shape() else {
                let problem = format!("an array of shape {:?}, expected [height, width, 3]", array.shape());
                return Err(refused(number, problem));
            };
            if height == 0 || width == 0 {
                return Err(refused(number, "has no pixels"));
            }
            let rgb = array.as_slice().map_err(|_| PyValueError::new_err("arrays must be row-major and dense"))?;
            Ok(Pixels { height, width, rgb: rgb.to_vec() })
        }
    }
}

/// The bytes of images as files; arrays become PNG.
pub fn files(images: &[Image<'_>]) -> PyResult<Vec<Vec<u8>>> {
    let of = |(number, image): (usize, &Image<'_>)| match image {
        Image::File(bytes) | Image::Named(_, bytes) => Ok(bytes.clone()),
        Image::Array(_) => Ok(png(&one(number, image)?)),
    };
    images.iter().enumerate().map(of).collect()
}

/// Images as `data:` URIs, in their order: the writing of images in messages, which are JSON. Arrays become PNG.
#[pyfunction]
pub fn image_uris(images: Vec<Image<'_>>) -> PyResult<Vec<String>> {
    Ok(files(&images)?.iter().map(|file| data_uri(file)).collect())
}

/// Decodes images, in their order.
pub fn pixels(images: &[Image<'_>]) -> PyResult<Vec<Pixels>> {
    images.iter().enumerate().map(|(number, image)| one(number, image)).collect()
}

/// (views uint8 [n, H, W, 3], tokens, (rows, columns), (height, width)) of an image.
type PreparedImage<'py> = (Bound<'py, PyArrayDyn<u8>>, usize, (usize, usize), (usize, usize));

/// The image processor of a model.
#[pyclass(frozen, module = "surogate._native")]
pub struct ImageProcessor(Processor);

#[pymethods]
impl ImageProcessor {
    /// Reads the processor of a folder; none if it has none.
    #[staticmethod]
    fn read(folder: PathBuf) -> PyResult<Option<ImageProcessor>> {
        let found = Processor::read(&folder).map_err(|error| DataError::new_err(error.to_string()))?;
        Ok(found.map(ImageProcessor))
    }

    /// Reads the processor of a configuration as JSON.
    #[staticmethod]
    fn of(config: &str) -> PyResult<ImageProcessor> {
        let value = serde_json::from_str(config).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let made = Processor::of("the configuration", &value);
        made.map(ImageProcessor).map_err(|error| DataError::new_err(error.to_string()))
    }

    /// The same with bounds of an image's area, in pixels.
    fn bounded(&self, min_pixels: Option<u64>, max_pixels: Option<u64>) -> PyResult<ImageProcessor> {
        let limits = PixelLimits { least: min_pixels, most: max_pixels };
        self.0.clone().bounded(limits).map(ImageProcessor).map_err(PyValueError::new_err)
    }

    /// The mean and the deviation of each channel, by which pixels from 0 to 1 are normalized.
    fn normalization(&self) -> ([f64; 3], [f64; 3]) {
        let [mean, deviation] = self.0.normalization();
        (mean, deviation)
    }

    /// The longest edge that an image gets before it is cut in tiles, and the edge of a tile; none where images are not cut.
    fn tiles(&self) -> Option<(usize, usize)> {
        self.0.tiles()
    }

    /// True if long images are also seen in crops.
    fn has_crops(&self) -> bool {
        self.0.has_crops()
    }

    /// Heights and widths of the views of an image, and its rows and columns of tiles.
    fn layout(&self, height: usize, width: usize) -> PyResult<(Vec<(usize, usize)>, (usize, usize))> {
        let (views, [rows, columns]) = self.0.layout([height, width]).map_err(DataError::new_err)?;
        Ok((views.into_iter().map(|[h, w]| (h, w)).collect(), (rows, columns)))
    }

    /// The images as the model takes them.
    fn prepare<'py>(&self, py: Python<'py>, images: Vec<Image<'py>>) -> PyResult<Vec<PreparedImage<'py>>> {
        let mut made = Vec::new();
        for (number, image) in images.iter().enumerate() {
            let image = one(number, image)?;
            let size = (image.height, image.width);
            let prepared = py.detach(|| self.0.prepare(image)).map_err(|problem| refused(number, problem))?;
            let sizes: Vec<[usize; 2]> = prepared.views.iter().map(|view| [view.height, view.width]).collect();
            let shape = vec![sizes.len(), sizes[0][0], sizes[0][1], 3];
            let rgb: Vec<u8> = prepared.views.into_iter().flat_map(|view| view.rgb).collect();
            let views = PyArray1::from_vec(py, rgb).reshape(shape)?;
            let [rows, columns] = self.0.grid(&sizes, prepared.tiles);
            made.push((views, self.0.tokens(&sizes), (rows, columns), size));
        }
        Ok(made)
    }
}
