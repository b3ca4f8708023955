//! The processor of a model's folder: which size an image gets, which views of it, and its patches.
//!
//! Reads `preprocessor_config.json`, or `image_processor` of `processor_config.json`, in the spellings of transformers 4
//! and 5.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Map, Value};

use super::resize::resize;
use super::sizes::{self, Area};
use super::{Filter, Pixels};
use crate::error::DataError;
use crate::patched_view::PatchedView;
use crate::patches::Picture;
use crate::small_file;

/// Names of the files of a folder, and the place of the settings in them.
const FILES: [(&str, Option<&str>); 2] =
    [("preprocessor_config.json", None), ("processor_config.json", Some("image_processor"))];

/// The largest numbers that configurations may have: edges, areas, patches, and patches a side of a block, in pixels.
const EDGE: u64 = 1 << 16;
const AREA: u64 = 1 << 40;
const PATCH: u64 = 1 << 12;
const BLOCK: u64 = 1 << 6;

const CLIP: [[f64; 3]; 2] = [[0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]];
const HALF: [[f64; 3]; 2] = [[0.5; 3]; 2];
const NONE: [[f64; 3]; 2] = [[0.0; 3], [1.0; 3]];

/// The rule by which a processor gives an image its size.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// Qwen2-VL and later: an area within bounds, sides of whole blocks.
    Qwen { merge: usize, frames: usize },
    /// SigLIP: one size for all images.
    Fixed { size: [usize; 2] },
    /// Gemma 3: one size, and crops of long images where that is on: ratio, least side, most crops.
    Gemma3 { size: [usize; 2], crops: Option<(f64, usize, usize)> },
    /// Gemma 4: as large as the tokens allow.
    Gemma4 { pool: usize, tokens: usize },
    /// Pixtral: at most so long, up to whole patches.
    Pixtral { longest: usize, patch: [usize; 2] },
    /// Idefics3 and SmolVLM: tiles of one size, and the whole image in that size.
    Tiles { longest: usize, tile: usize, splits: bool },
}

/// Bounds of an image's area that the user sets, in pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PixelLimits {
    pub least: Option<u64>,
    pub most: Option<u64>,
}

/// A model's image processor: the rule of its sizes, and its normalization.
#[derive(Clone, Debug, PartialEq)]
pub struct Processor {
    pub kind: Kind,
    /// Pixels a side of a patch; 0 where the configuration of the processor does not say it.
    pub patch: usize,
    filter: Filter,
    resizes: bool,
    area: Area,
    mean: [f64; 3],
    deviation: [f64; 3],
    /// Tokens of a view, where all views have as many.
    per_view: Option<usize>,
}

/// An image as a model takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    pub views: Vec<Pixels>,
    /// Rows and columns of tiles, without the view of the whole.
    pub tiles: [usize; 2],
}

/// The settings of one object, with the problems found in it.
struct Settings<'a> {
    place: String,
    fields: &'a Map<String, Value>,
}

impl Settings<'_> {
    fn problem(&self, name: &str, expected: &str) -> DataError {
        let found = self.fields.get(name).map_or("nothing".to_owned(), Value::to_string);
        DataError::invalid(&self.place, format!("`{name}` is {found}, expected {expected}"))
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// A whole number above 0, at most `most`: products of sizes stay within 64 bits.
    fn count(&self, name: &str, default: usize, most: u64) -> Result<usize, DataError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        let count = value.as_u64().filter(|n| (1..=most).contains(n));
        count.map(|n| n as usize).ok_or_else(|| self.problem(name, &format!("a whole number above 0, at most {most}")))
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, DataError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.problem(name, "true or false"))
    }

    fn number(&self, name: &str, default: f64) -> Result<f64, DataError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.problem(name, "a number"))
    }

    /// A number for each channel.
    fn channels(&self, name: &str, default: [f64; 3]) -> Result<[f64; 3], DataError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        let list = value.as_array().filter(|list| list.len() == 3);
        let numbers: Option<Vec<f64>> = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        let numbers = numbers.ok_or_else(|| self.problem(name, "three numbers"))?;
        Ok([numbers[0], numbers[1], numbers[2]])
    }

    /// A part of an object of sizes, such as `size.longest_edge`.
    fn inside(&self, name: &str, part: &str, most: u64) -> Result<Option<usize>, DataError> {
        let Some(value) = self.get(name).and_then(|of| of.get(part)).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let count = value.as_u64().filter(|n| (1..=most).contains(n));
        let expected = format!("an object with a whole number above 0 as `{part}`, at most {most}");
        let problem = || self.problem(name, &expected);
        count.map(|n| Some(n as usize)).ok_or_else(problem)
    }

    /// `size` as height and width.
    fn fixed(&self, name: &str, default: usize) -> Result<[usize; 2], DataError> {
        if let Some(side) = self.get(name).and_then(Value::as_u64).filter(|side| (1..=EDGE).contains(side)) {
            return Ok([side as usize; 2]);
        }
        if self.get(name).is_some_and(|value| !value.is_object()) {
            return Err(
                self.problem(name, &format!("a whole number up to {EDGE}, or an object with `height` and `width`"))
            );
        }
        let [height, width] = ["height", "width"].map(|part| self.inside(name, part, EDGE));
        Ok([height?.unwrap_or(default), width?.unwrap_or(default)])
    }
}

impl Processor {
    /// The processor of a folder; `None` where it has none. Errors: a file that is no such configuration, or one of a kind
    /// or with settings that are not known.
    pub fn read(folder: &Path) -> Result<Option<Processor>, DataError> {
        for (name, part) in FILES {
            let path = folder.join(name);
            if !path.is_file() {
                continue;
            }
            let place = path.display().to_string();
            let bytes = small_file::read(&path).map_err(|error| DataError::io("read", &path, error))?;
            let value: Value = serde_json::from_slice(&bytes)
                .map_err(|error| DataError::invalid(&place, format!("no JSON: {error}")))?;
            let of_images = match part {
                None => Some(&value),
                Some(part) => value.get(part),
            };
            match of_images {
                Some(fields) if fields.get("image_processor_type").is_some() => {
                    let config = small_file::read(&folder.join("config.json")).unwrap_or_default();
                    let config = serde_json::from_slice(&config).unwrap_or_default();
                    return Ok(Some(Processor::of(&place, fields)?.with_model(&config)));
                }
                // Such a file may hold settings of the tokenizer alone.
                _ => continue,
            }
        }
        Ok(None)
    }

    /// The processor of a configuration, which stands at `place`.
    pub fn of(place: &str, value: &Value) -> Result<Processor, DataError> {
        let Some(fields) = value.as_object() else {
            return Err(DataError::invalid(place, "expected an object of settings"));
        };
        let of = Settings { place: place.to_owned(), fields };
        let name = of.get("image_processor_type").and_then(Value::as_str).unwrap_or_default();
        let class = name.strip_suffix("Fast").unwrap_or(name);
        if of.flag("do_center_crop", false)? {
            return Err(of.problem("do_center_crop", "false: it is not available yet"));
        }
        let mut area = Area { least: 0, most: u64::MAX };
        let mut patch = 0;
        let (kind, filter, [mean, deviation]) = match class {
            "Qwen2VLImageProcessor" | "Qwen3VLImageProcessor" => {
                patch = of.count("patch_size", 14, PATCH)?;
                let bound = |own: &str, part: &str, default: u64| -> Result<u64, DataError> {
                    match of.get(own) {
                        Some(_) => of.count(own, 1, AREA).map(|n| n as u64),
                        None => Ok(of.inside("size", part, AREA)?.map_or(default, |n| n as u64)),
                    }
                };
                area.least = bound("min_pixels", "shortest_edge", 3136)?;
                area.most = bound("max_pixels", "longest_edge", 1_003_520)?;
                let kind = Kind::Qwen {
                    merge: of.count("merge_size", 2, BLOCK)?,
                    frames: of.count("temporal_patch_size", 2, BLOCK)?,
                };
                (kind, Filter::Bicubic, CLIP)
            }
            "Gemma3ImageProcessor" => {
                let size = of.fixed("size", 224)?;
                let crops = of.flag("do_pan_and_scan", false)?.then_some(());
                let crops = match crops {
                    Some(()) => Some((
                        of.number("pan_and_scan_min_ratio_to_activate", 1.2)?,
                        of.count("pan_and_scan_min_crop_size", 256, EDGE)?,
                        of.count("pan_and_scan_max_num_crops", 4, 256)?,
                    )),
                    None => None,
                };
                (Kind::Gemma3 { size, crops }, Filter::Bilinear, HALF)
            }
            "Gemma4ImageProcessor" => {
                patch = of.count("patch_size", 16, PATCH)?;
                let (pool, tokens) =
                    (of.count("pooling_kernel_size", 3, BLOCK)?, of.count("max_soft_tokens", 280, EDGE)?);
                (Kind::Gemma4 { pool, tokens }, Filter::Bicubic, NONE)
            }
            // Its patches are as large as those of a token.
            "Gemma4UnifiedImageProcessor" => {
                patch = of.count("patch_size", 16, PATCH)? * of.count("pooling_kernel_size", 3, BLOCK)?;
                let tokens = of.count("max_soft_tokens", 280, EDGE)?;
                (Kind::Gemma4 { pool: 1, tokens }, Filter::Bicubic, NONE)
            }
            "PixtralImageProcessor" => {
                let longest = of.inside("size", "longest_edge", EDGE)?.unwrap_or(1024);
                let patch = of.fixed("patch_size", 16)?;
                (Kind::Pixtral { longest, patch }, Filter::Bicubic, CLIP)
            }
            "SmolVLMImageProcessor" | "Idefics3ImageProcessor" => {
                let longest = of.inside("size", "longest_edge", EDGE)?.unwrap_or(4 * 364);
                let tile = of.inside("max_image_size", "longest_edge", EDGE)?.unwrap_or(364);
                let splits = of.flag("do_image_splitting", true)?;
                (Kind::Tiles { longest, tile, splits }, Filter::Lanczos, HALF)
            }
            "SiglipImageProcessor" => (Kind::Fixed { size: of.fixed("size", 224)? }, Filter::Bicubic, HALF),
            _ => {
                let known = "Qwen2VL-, Gemma3-, Gemma4-, Gemma4Unified-, Pixtral-, SmolVLM-, Idefics3- and SiglipImageProcessor";
                let what = format!("`image_processor_type` is `{name}`, which is not available yet; there are {known}");
                return Err(DataError::invalid(place, what));
            }
        };
        let filter = match of.get("resample") {
            None => filter,
            Some(value) => {
                let number = value.as_u64().and_then(Filter::of_number);
                number.ok_or_else(|| of.problem("resample", "1 (Lanczos), 2 (bilinear) or 3 (bicubic)"))?
            }
        };
        let normalizes = of.flag("do_normalize", !class.starts_with("Gemma4"))?;
        let own = [of.channels("image_mean", mean)?, of.channels("image_std", deviation)?];
        let [mean, deviation] = if normalizes { own } else { NONE };
        if deviation.contains(&0.0) {
            return Err(of.problem("image_std", "numbers other than 0"));
        }
        if !of.flag("do_rescale", true)? || (of.number("rescale_factor", 1.0 / 255.0)? - 1.0 / 255.0).abs() > 1e-9 {
            return Err(of.problem("rescale_factor", "values of 8 bits divided by 255"));
        }
        let per_view = match class {
            "Gemma3ImageProcessor" => Some(of.count("image_seq_length", 256, EDGE)?),
            "SmolVLMImageProcessor" => Some(of.count("image_seq_len", 64, EDGE)?),
            "Idefics3ImageProcessor" => Some(of.count("image_seq_len", 169, EDGE)?),
            _ => None,
        };
        Ok(Processor { kind, patch, filter, resizes: of.flag("do_resize", true)?, area, mean, deviation, per_view })
    }

    /// Returns the mean and the deviation of each channel, by which pixels from 0 to 1 are normalized.
    pub fn normalization(&self) -> [[f64; 3]; 2] {
        [self.mean, self.deviation]
    }

    /// Returns the longest edge that an image gets before it is cut in tiles, and the edge of a tile; none where images are
    /// not cut.
    pub fn tiles(&self) -> Option<(usize, usize)> {
        match self.kind {
            Kind::Tiles { longest, tile, splits: true } => Some((longest, tile)),
            _ => None,
        }
    }

    /// Returns true if long images are also seen in crops.
    pub fn has_crops(&self) -> bool {
        matches!(self.kind, Kind::Gemma3 { crops: Some(_), .. })
    }

    /// Returns how often a patch has each channel.
    pub fn frames(&self) -> usize {
        if let Kind::Qwen { frames, .. } = self.kind { frames } else { 1 }
    }

    /// The same with the tokens of a view that the model's own configuration makes.
    fn with_model(mut self, config: &Value) -> Processor {
        let count = |value: &Value| value.as_u64().filter(|n| (1..=1 << 20).contains(n)).map(|n| n as usize);
        let vision = &config["vision_config"];
        let of_model = match self.kind {
            Kind::Gemma3 { .. } => count(&config["mm_tokens_per_image"]),
            Kind::Tiles { .. } => {
                let sizes =
                    (count(&vision["image_size"]), count(&vision["patch_size"]), count(&config["scale_factor"]));
                let tokens = |(size, patch, side): (usize, usize, usize)| (size / patch / side).pow(2);
                sizes.0.zip(sizes.1).zip(sizes.2).map(|((size, patch), side)| tokens((size, patch, side)))
            }
            _ => None,
        };
        self.per_view = self.per_view.map(|of| of_model.unwrap_or(of));
        self
    }

    /// Tokens of an image with such views.
    pub fn tokens(&self, views: &[[usize; 2]]) -> usize {
        let of_view = |[h, w]: &[usize; 2]| match &self.kind {
            Kind::Qwen { merge, .. } => h * w / (self.patch * merge).pow(2),
            Kind::Gemma4 { pool, .. } => h * w / (self.patch * pool).pow(2),
            Kind::Pixtral { patch, .. } => h * w / (patch[0] * patch[1]),
            Kind::Fixed { .. } | Kind::Gemma3 { .. } | Kind::Tiles { .. } => self.per_view.unwrap_or(1),
        };
        views.iter().map(of_view).sum()
    }

    /// Rows and columns of an image with such views: of patches for Qwen, of tokens for Pixtral and Gemma 4, else of tiles.
    pub fn grid(&self, views: &[[usize; 2]], tiles: [usize; 2]) -> [usize; 2] {
        let by = |unit: [usize; 2]| [views[0][0] / unit[0], views[0][1] / unit[1]];
        match &self.kind {
            Kind::Qwen { .. } => by([self.patch; 2]),
            Kind::Gemma4 { pool, .. } => by([self.patch * pool; 2]),
            Kind::Pixtral { patch, .. } => by(*patch),
            Kind::Fixed { .. } | Kind::Gemma3 { .. } | Kind::Tiles { .. } => tiles,
        }
    }

    /// The same with bounds that the user sets. An error where images of this processor have no bounds.
    pub fn bounded(mut self, limits: PixelLimits) -> Result<Processor, String> {
        if limits == PixelLimits::default() {
            return Ok(self);
        }
        if !matches!(self.kind, Kind::Qwen { .. }) {
            return Err("`min_pixels` and `max_pixels` have no effect: the processor does not go by areas".to_owned());
        }
        self.area.least = limits.least.unwrap_or(self.area.least.min(limits.most.unwrap_or(u64::MAX)));
        self.area.most = limits.most.unwrap_or(self.area.most.max(self.area.least));
        match self.area.least <= self.area.most {
            true => Ok(self),
            false => Err(format!("`min_pixels` {} is above `max_pixels` {}", self.area.least, self.area.most)),
        }
    }

    /// The sizes of the views of an image of this size, and its rows and columns of tiles. Errors: an image that cannot
    /// have a size.
    pub fn layout(&self, size: [usize; 2]) -> Result<(Vec<[usize; 2]>, [usize; 2]), String> {
        let one = |of: [usize; 2]| (vec![of], [1, 1]);
        let (views, tiles) = match &self.kind {
            _ if !self.resizes => one(size),
            Kind::Qwen { merge, .. } => one(sizes::smart(size, self.patch * merge, self.area)?),
            Kind::Fixed { size } => one(*size),
            Kind::Gemma3 { size: fixed, .. } => (vec![*fixed; 1 + self.crops(size).len()], [1, 1]),
            Kind::Gemma4 { pool, tokens } => one(sizes::filled(size, self.patch * pool, *tokens)),
            Kind::Pixtral { longest, patch } => one(sizes::bounded(size, *longest, *patch)),
            Kind::Tiles { tile, splits: false, .. } => one([*tile; 2]),
            Kind::Tiles { longest, tile, splits: true } => {
                let [h, w] = sizes::to_tiles(sizes::to_longest(size, *longest), *tile);
                let tiles = [h / tile, w / tile];
                match tiles {
                    [1, 1] => one([*tile; 2]),
                    [rows, columns] if rows * columns >= 1024 => {
                        return Err(format!("becomes {rows} × {columns} tiles, more than a model takes"));
                    }
                    [rows, columns] => (vec![[*tile; 2]; rows * columns + 1], tiles),
                }
            }
        };
        if views.len() > 1024 || views.iter().any(|[h, w]| h.checked_mul(*w).is_none_or(|area| area > 1 << 28)) {
            return Err(format!("{} × {} pixels become more than a model takes", size[0], size[1]));
        }
        Ok((views, tiles))
    }

    fn crops(&self, size: [usize; 2]) -> Vec<[usize; 4]> {
        match self.kind {
            Kind::Gemma3 { crops: Some((ratio, least, most)), .. } => sizes::crops(size, ratio, least, most),
            _ => Vec::new(),
        }
    }

    /// The views of an image in the size that the model takes.
    pub fn prepare(&self, image: Pixels) -> Result<Prepared, String> {
        let size = [image.height, image.width];
        let (targets, tiles) = self.layout(size)?;
        let resized = |image: Cow<'_, Pixels>, [height, width]: [usize; 2]| resize(image, height, width, self.filter);
        let to = |image: &Pixels, size: [usize; 2]| resized(Cow::Borrowed(image), size);
        let views = match &self.kind {
            Kind::Tiles { longest, tile, splits } if self.resizes => {
                let first = to(&image, sizes::to_longest(size, *longest));
                let whole =
                    if *splits { to(&first, sizes::to_tiles([first.height, first.width], *tile)) } else { first };
                let [rows, columns] = tiles;
                let mut views = Vec::new();
                if targets.len() > 1 {
                    let places = (0..rows).flat_map(|row| (0..columns).map(move |column| [row * tile, column * tile]));
                    views.extend(places.map(|[top, left]| whole.part(top, left, *tile, *tile)));
                }
                views.push(to(&whole, [*tile; 2]));
                views
            }
            _ => {
                let parts = self.crops(size).into_iter().map(|[top, left, h, w]| image.part(top, left, h, w));
                let parts: Vec<Pixels> = parts.collect();
                let all = std::iter::once(image).chain(parts);
                all.zip(targets).map(|(of, target)| resized(Cow::Owned(of), target)).collect()
            }
        };
        Ok(Prepared { views, tiles })
    }

    /// The numbers of a channel, x/255 normalized, by the values of 8 bits.
    fn normalized(&self, channel: usize) -> [f32; 256] {
        std::array::from_fn(|x| ((x as f64 / 255.0 - self.mean[channel]) / self.deviation[channel]) as f32)
    }

    /// The patches of a view in blocks of `side` × `side`. An error unless whole blocks cover the view.
    pub fn patches(&self, view: Pixels, patch: usize, side: usize) -> Result<Picture, String> {
        let block = patch * side;
        if block == 0 || !view.height.is_multiple_of(block) || !view.width.is_multiple_of(block) {
            let (h, w) = (view.height, view.width);
            return Err(format!("has {h} × {w} pixels, expected multiples of {block}"));
        }
        let grid = [view.height / patch, view.width / patch];
        let values = Box::new([0, 1, 2].map(|channel| self.normalized(channel)));
        let Pixels { width: pixels, rgb, .. } = view;
        Ok(Picture::of(grid, PatchedView { pixels, rgb, values, patch, side }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(value: Value) -> Result<Processor, String> {
        Processor::of("preprocessor_config.json", &value).map_err(|error| error.to_string())
    }

    #[test]
    fn spellings_of_bounds_mean_the_same() {
        let size = json!({"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 3136, "longest_edge": 50176}});
        let top = json!({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 50176});
        assert_eq!(of(size.clone()), of(top));
        let limits = PixelLimits { least: None, most: Some(784) };
        let bounded = of(size).unwrap().bounded(limits).unwrap();
        assert_eq!(bounded.layout([100, 100]).unwrap().0, [[28, 28]]);
        let other = of(json!({"image_processor_type": "SiglipImageProcessor"})).unwrap();
        assert!(other.bounded(limits).unwrap_err().contains("no effect"));
    }

    #[test]
    fn unknown_kinds_and_wrong_values_are_named() {
        let kind = |name: &str| json!({"image_processor_type": name});
        assert!(
            of(kind("MllamaImageProcessor")).unwrap_err().contains("`MllamaImageProcessor`, which is not available")
        );
        let wrong = json!({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 0});
        assert!(of(wrong).unwrap_err().contains("`patch_size` is 0, expected a whole number above 0"));
        for (kind, more) in [
            ("Siglip", json!({"size": 1u64 << 40})),
            ("SmolVLM", json!({"max_image_size": {"longest_edge": 1u64 << 40}})),
            ("Qwen2VL", json!({"merge_size": 1u64 << 32})),
            ("Gemma4", json!({"pooling_kernel_size": 1u64 << 32})),
            ("Siglip", json!({"do_center_crop": true})),
        ] {
            let mut fields = json!({"image_processor_type": format!("{kind}ImageProcessor")});
            fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            assert!(of(fields).is_err(), "{kind} {more}");
        }
        let wrong = json!({"image_processor_type": "SiglipImageProcessor", "image_std": [1, 0, 1]});
        assert!(of(wrong).unwrap_err().contains("`image_std`"));
        let wrong = json!({"image_processor_type": "SiglipImageProcessor", "resample": 4});
        assert!(of(wrong).unwrap_err().contains("`resample` is 4"));
        assert!(of(json!([])).unwrap_err().contains("expected an object"));
    }

    #[test]
    fn patches_come_block_by_block() {
        let processor = of(json!({"image_processor_type": "SiglipImageProcessor", "image_mean": [0, 0, 0],
            "image_std": [1, 1, 1]}))
        .unwrap();
        let rgb = (0..16u8).flat_map(|place| [place, 100, 200]).collect();
        let view = Pixels { height: 4, width: 4, rgb };
        let picture = processor.patches(view.clone(), 1, 2).unwrap();
        let first: Vec<u8> = picture.bytes(3).chunks(3).map(|patch| patch[0]).collect();
        assert_eq!((picture.grid, first), ([4, 4], vec![0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]));
        assert!(processor.patches(view, 3, 1).unwrap_err().contains("multiples of 3"));
    }
}
