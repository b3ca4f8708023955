//! Images in conversations: the marks of parts that are images, and the tokens that stand for an image.
//!
//! In the content of a message an image is [`MARK`]; templates get lists of parts in its place. Each placeholder that a
//! template writes becomes as many tokens as the image has, framed as the family frames it.

use serde_json::{Map, Value, json};

use crate::boxes::{self, ImageObject, Sizes};
use crate::error::{RowError, RowReason};
use crate::image::{Kind, decode, size};
use crate::image_folders::ImageFolders;
use crate::image_parts::is_image;
use crate::image_source::{ImageRef, ImageSource};
use crate::pictures::ImageReader;
use crate::spans::{Message, TrainedSpan};
use crate::template::parts::MARK;
use crate::tokenizer::Tokenizer;

/// The word for an image in texts of rows that have a column of images.
const WORD: &str = "<image>";

/// The texts that stand for images, and what makes them.
#[derive(Clone, Debug)]
pub struct ImageTexts {
    pub reader: ImageReader,
    /// Written by the template for an image, and the token of a part of one.
    placeholder: String,
    token: String,
    /// Texts that frame the tokens of images.
    frame: Vec<String>,
    /// The frame and the token as ids, of which none is trained.
    untrained: Vec<i32>,
}

/// The frames of families: the placeholder, and further tokens that belong to images.
const QWEN: &[&str] = &["<|vision_start|>", "<|vision_end|>"];
const GEMMA3: &[&str] = &["<start_of_image>", "<end_of_image>"];
const GEMMA4: &[&str] = &["<|image>", "<image|>"];
const PIXTRAL: &[&str] = &["[IMG_BREAK]", "[IMG_END]"];
const TILES: &[&str] = &["<fake_token_around_image>", "<global-img>"];

impl ImageTexts {
    /// Finds the tokens of a model's images in its tokenizer. An error where it lacks a token.
    pub fn new(reader: ImageReader, tokenizer: &Tokenizer) -> Result<ImageTexts, String> {
        let id = reader.form.token;
        let token = u32::try_from(id).ok().and_then(|id| tokenizer.encoder().id_to_token(id));
        let token = token.ok_or_else(|| format!("the tokenizer has no token {id}, which stands for images"))?;
        let frame = match reader.processor.kind {
            Kind::Qwen { .. } => QWEN,
            Kind::Gemma3 { .. } => GEMMA3,
            Kind::Gemma4 { .. } => GEMMA4,
            Kind::Pixtral { .. } => PIXTRAL,
            Kind::Tiles { .. } => TILES,
            Kind::Fixed { .. } => &[],
        };
        let mut untrained = vec![id];
        for text in frame {
            let id = tokenizer.encoder().token_to_id(text);
            untrained
                .push(id.ok_or_else(|| format!("the tokenizer has no token `{text}`, which frames images"))? as i32);
        }
        let placeholder =
            if matches!(reader.processor.kind, Kind::Gemma3 { .. }) { GEMMA3[0].to_owned() } else { token.clone() };
        let frame = frame.iter().map(|text| (*text).to_owned()).collect();
        Ok(ImageTexts { reader, placeholder, token, frame, untrained })
    }

    /// Returns true if a token belongs to images.
    pub(crate) fn is_of_image(&self, id: i32) -> bool {
        self.untrained.contains(&id)
    }

    /// The text by which a row may write an image itself.
    fn raw(&self) -> String {
        match self.reader.processor.kind {
            Kind::Qwen { .. } => format!("{}{}{}", self.frame[0], self.placeholder, self.frame[1]),
            _ => self.placeholder.clone(),
        }
    }

    /// The text of an image with such views, of which the first `tiles` are tiles.
    fn expansion(&self, grids: &[[usize; 2]], tiles: [usize; 2]) -> String {
        let tokens = |number: usize| self.token.repeat(self.reader.tokens(&grids[number..=number]));
        match self.reader.processor.kind {
            Kind::Qwen { .. } | Kind::Fixed { .. } => tokens(0),
            Kind::Gemma4 { .. } => format!("{}{}{}", self.frame[0], tokens(0), self.frame[1]),
            Kind::Gemma3 { .. } => {
                let of = |number| format!("\n\n{}{}{}\n\n", self.frame[0], tokens(number), self.frame[1]);
                let crops: Vec<String> = (1..grids.len()).map(of).collect();
                match crops.is_empty() {
                    true => of(0),
                    false => {
                        let crops = crops.join(" ");
                        format!(
                            "Here is the original image {} and here are some crops to help you see better {crops}",
                            of(0)
                        )
                    }
                }
            }
            Kind::Pixtral { .. } => {
                let [rows, columns] = grids[0].map(|n| n / self.reader.form.side);
                let row = self.token.repeat(columns);
                let (inner, last) = (format!("{row}{}", self.frame[0]), format!("{row}{}", self.frame[1]));
                inner.repeat(rows - 1) + &last
            }
            Kind::Tiles { .. } => {
                let (around, global) = (&self.frame[0], &self.frame[1]);
                let whole = format!("{around}{global}{}{around}", tokens(grids.len() - 1));
                if grids.len() == 1 {
                    return whole;
                }
                let [rows, columns] = tiles;
                let tile = |row: usize, column: usize| {
                    format!("{around}<row_{}_col_{}>{}", row + 1, column + 1, tokens(row * columns + column))
                };
                let of_row = |row: usize| (0..columns).map(|column| tile(row, column)).collect::<String>() + "\n";
                (0..rows).map(of_row).collect::<String>() + "\n" + &whole
            }
        }
    }

    /// Puts the objects of a row in the place of their words; returns those of each image. Errors: what [`boxes::fill`]
    /// refuses, and an image that cannot be read.
    pub(crate) fn fill(
        &self,
        messages: &mut [Message],
        objects: &Map<String, Value>,
        images: &[ImageSource],
    ) -> Result<Vec<Vec<ImageObject>>, RowError> {
        let sizes_of = |(number, source): (usize, &ImageSource)| {
            let image = source.read().and_then(|bytes| size(&bytes, &self.reader.limits))?;
            let (views, _) = self.reader.processor.layout(image)?;
            let view = if let [view] = views[..] { Some(view) } else { None };
            Ok(Sizes { image, view }).map_err(|problem: String| format!("image {}: {problem}", number + 1))
        };
        let sizes = images.iter().enumerate().map(sizes_of).collect::<Result<Vec<_>, String>>();
        let sizes = sizes.map_err(|problem| RowError::new(RowReason::WrongType, problem))?;
        boxes::fill(messages, objects, self.reader.boxes, &sizes)
    }

    /// The text that a template makes of a conversation, with the tokens of its images, and what is kept of these. Errors: an
    /// image that cannot be read, with its number, and a template that does not write one place for each.
    pub fn fill_in(&self, text: &str, sources: Vec<ImageSource>) -> Result<(String, Vec<ImageRef>), RowError> {
        let (texts, images) = self.read(sources)?;
        Ok((self.expand(text, &mut [], &texts)?, images))
    }

    /// Reads the images of a row; the text of each, and what is kept of it. Errors: an image that cannot be read, with its
    /// number.
    pub(crate) fn read(&self, sources: Vec<ImageSource>) -> Result<(Vec<String>, Vec<ImageRef>), RowError> {
        let mut texts = Vec::new();
        let mut kept = Vec::new();
        for (number, source) in sources.into_iter().enumerate() {
            let refused = |problem: String| {
                RowError::new(RowReason::WrongType, format!("image {}, {}: {problem}", number + 1, source.name()))
            };
            let bytes = source.read().map_err(|problem| RowError::new(RowReason::WrongType, problem))?;
            let limits = &self.reader.limits;
            let size = size(&bytes, limits).map_err(refused)?;
            // A broken file is an error of its row, not of a step.
            decode(&bytes, limits).map_err(refused)?;
            let grids = self.reader.grids(size).map_err(refused)?;
            let (_, tiles) = self.reader.processor.layout(size).map_err(refused)?;
            texts.push(self.expansion(&grids, tiles));
            kept.push(ImageRef::new(source, &bytes));
        }
        Ok((texts, kept))
    }

    /// The text with each placeholder replaced by the text of its image; the spans move with it. An error where the template
    /// does not write one for each image.
    pub(crate) fn expand(&self, text: &str, spans: &mut [TrainedSpan], images: &[String]) -> Result<String, RowError> {
        let found: Vec<usize> = text.match_indices(&self.placeholder).map(|(at, _)| at).collect();
        if found.len() != images.len() {
            let problem = format!(
                "the template writes {} of {} images: it does not show images in every role",
                found.len(),
                images.len()
            );
            return Err(RowError::new(RowReason::Template, problem));
        }
        let longer: Vec<usize> = images.iter().map(|image| image.len() - self.placeholder.len()).collect();
        // A span begins and ends between characters of the template, never inside of a placeholder.
        let moved = |at: usize| {
            at + found.iter().zip(&longer).filter(|(place, _)| **place < at).map(|(_, by)| by).sum::<usize>()
        };
        for span in spans {
            span.range = moved(span.range.start)..moved(span.range.end);
        }
        let mut whole = String::with_capacity(text.len() + longer.iter().sum::<usize>());
        let mut at = 0;
        for (place, image) in found.iter().zip(images) {
            whole.push_str(&text[at..*place]);
            whole.push_str(image);
            at = place + self.placeholder.len();
        }
        whole.push_str(&text[at..]);
        Ok(whole)
    }

    /// The images of a conversation in their order. `column` holds the images of a row that has such a column: they take the
    /// places of parts without an image of their own and of the word `<image>`; without any of these they stand before the
    /// first user's text.
    pub fn place(
        &self,
        messages: &mut [Message],
        column: Option<&[Value]>,
        folders: &ImageFolders,
    ) -> Result<Vec<ImageSource>, RowError> {
        let wrong = |problem: String| RowError::new(RowReason::WrongType, problem);
        if let Some(column) = column {
            let raw = self.raw();
            for message in messages.iter_mut() {
                mark(message, &[WORD, &raw]);
            }
            if !column.is_empty() && messages.iter().all(|message| message.images.is_empty()) {
                let first = messages.iter_mut().find(|message| message.role() == "user");
                let first = first.ok_or_else(|| wrong("a column of images, and no message of a user".to_owned()))?;
                if let Some(Value::String(text)) = first.fields.get_mut("content") {
                    text.insert_str(0, &MARK.to_string().repeat(column.len()));
                    first.images = vec![Value::Null; column.len()];
                }
            }
        }
        let mut given = column.unwrap_or_default().iter();
        let mut sources = Vec::new();
        for value in messages.iter().flat_map(|message| &message.images) {
            let number = sources.len() + 1;
            let value = match value {
                Value::Null => given.next().ok_or_else(|| {
                    wrong(format!("image {number}: the row has no image for it (a column `images` may hold them)"))
                })?,
                own => own,
            };
            let source =
                ImageSource::of(value, folders).map_err(|problem| wrong(format!("image {number}: {problem}")))?;
            sources.push(source);
        }
        match given.len() {
            0 => Ok(sources),
            left => Err(wrong(format!("the row has {left} more images than places for them"))),
        }
    }
}

/// Replaces words of a content by marks of images that the row's column brings.
fn mark(message: &mut Message, words: &[&str]) {
    let Some(Value::String(text)) = message.fields.get("content") else { return };
    let (mut marked, mut images, mut own) = (String::new(), Vec::new(), message.images.iter());
    let mut rest = text.as_str();
    let mut changed = false;
    while !rest.is_empty() {
        if let Some(word) = words.iter().find(|word| rest.starts_with(**word)) {
            marked.push(MARK);
            images.push(Value::Null);
            rest = &rest[word.len()..];
            changed = true;
            continue;
        }
        let first = rest.chars().next().expect("there is a rest");
        if first == MARK {
            images.extend(own.next().cloned());
        }
        marked.push(first);
        rest = &rest[first.len_utf8()..];
    }
    if changed {
        message.fields.insert("content".to_owned(), json!(marked));
        message.images = images;
    }
}

/// A text with a word in the place of each image.
pub fn in_words(text: &str) -> String {
    text.replace(MARK, WORD)
}

/// Returns true if the content of a message has a part that is an image.
pub fn shows_image(message: &Map<String, Value>) -> bool {
    message.get("content").and_then(Value::as_array).is_some_and(|parts| parts.iter().any(is_image))
}
