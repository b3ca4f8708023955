//! Images of prompts: what reads them, and the tokens of a conversation with images. Does not know in which parts a model
//! reads them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use data::Tokenizer;
use data::image::PixelLimits;
use data::image_folders::ImageFolders;
use data::image_source::ImageSource;
use data::image_texts::ImageTexts;
use data::sequence_images::SequenceImages;
use serde_json::Value;

use super::request::{Messages, Prompt, Request};
use super::settings::GenerationOptions;
use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;

/// The reader of the images of the prompts of one call.
pub(super) struct PromptImages {
    texts: ImageTexts,
    reader: Arc<data::pictures::ImageReader>,
    /// The folder that relative paths of images begin in.
    folder: PathBuf,
}

/// A conversation in which each image is one mark, and its images.
pub(super) struct Marked {
    pub messages: Messages,
    sources: Vec<ImageSource>,
}

impl PromptImages {
    /// Returns the reader, none if no prompt has an image. Errors: bounds of images without images, a model that reads none, or has no
    /// processor, and bounds that it does not go by.
    pub fn of(
        source: &ModelSource,
        tokenizer: Option<&Tokenizer>,
        requests: &[Result<Request>],
        options: &GenerationOptions,
        folder: PathBuf,
    ) -> Result<Option<PromptImages>> {
        let has_images = |request: &Result<Request>| matches!(request, Ok(Request { prompt: Prompt::Messages(of), .. }) if of.has_images());
        let limits = PixelLimits { least: options.min_pixels, most: options.max_pixels };
        if !requests.iter().any(has_images) {
            let given = [("max_pixels", limits.most), ("min_pixels", limits.least)];
            return match given.into_iter().find(|(_, given)| given.is_some()) {
                Some((name, _)) => Err(TrainError::Usage(format!("{name}: no prompt has an image (remove it)"))),
                None => Ok(None),
            };
        }
        // Each prompt with images has this error, the others are answered.
        let (Some(_), Some(tokenizer)) = (source.model.images, tokenizer) else { return Ok(None) };
        let mut reader = source.image_reader()?;
        reader.processor = reader.processor.bounded(limits).map_err(TrainError::Usage)?;
        let texts = ImageTexts::new(reader.clone(), tokenizer).map_err(TrainError::Usage)?;
        Ok(Some(PromptImages { texts, reader: Arc::new(reader), folder }))
    }

    /// The messages with marks in the place of images. Errors: messages that are none, and images that are not there.
    pub fn mark(&self, of: &Messages) -> Result<Marked> {
        let list: Vec<Value> = of.messages.iter().cloned().map(Value::Object).collect();
        let wrong = |error: data::RowError| TrainError::Usage(error.to_string());
        let mut messages = data::dataset::messages(&list, &BTreeMap::new()).map_err(wrong)?;
        let folders = ImageFolders::from(vec![self.folder.clone()]);
        let sources = self.texts.place(&mut messages, of.images.as_deref(), &folders).map_err(wrong)?;
        let messages = messages.into_iter().map(|message| message.fields).collect();
        Ok(Marked { messages: Messages { messages, images: None, ..of.clone() }, sources })
    }

    /// The tokens of a rendered conversation, and its images. Errors: an image that cannot be read, with its number, and a
    /// template that does not write one place for each.
    pub fn encode(
        &self,
        text: &str,
        marked: Marked,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<i32>, Option<SequenceImages>)> {
        let wrong = |error: data::RowError| TrainError::Usage(error.to_string());
        let (text, images) = self.texts.fill_in(text, marked.sources).map_err(wrong)?;
        let ids = tokenizer.encoder().encode(&text, false).map_err(wrong)?;
        let ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
        if images.is_empty() {
            return Ok((ids, None));
        }
        let images = SequenceImages::new(self.reader.clone(), &ids, images);
        let images = images.map_err(|error| TrainError::Usage(error.to_string()))?;
        Ok((ids, Some(images)))
    }
}
