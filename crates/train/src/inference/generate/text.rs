//! Text from tokens as they come: a character whose bytes are spread over tokens is held back until it is whole, and so is
//! what may become a text that ends the answer. Does not know where tokens come from.

use data::Tokenizer;

use crate::error::{Result, TrainError};

/// The character that replaces bytes which form no character.
const BROKEN: char = '\u{fffd}';

/// The text of one answer.
#[derive(Clone)]
pub struct Text {
    ids: Vec<u32>,
    /// Tokens whose text was given, and those before them that give it its context.
    read: usize,
    context: usize,
    stops: Stops,
}

impl Text {
    /// `before`: tokens before the answer that its text goes on from, so that it begins with a space where they are
    /// words of one text.
    pub fn new(stop: &[String], before: &[i32]) -> Text {
        let ids: Vec<u32> = before.iter().map(|id| *id as u32).collect();
        Text { read: ids.len(), ids, context: 0, stops: Stops { stop: stop.to_vec(), held: String::new() } }
    }

    /// Takes a token; gives the text that is settled by it, and whether the answer ends before the next.
    pub fn push(&mut self, id: u32, tokenizer: &Tokenizer) -> Result<(String, bool)> {
        self.ids.push(id);
        let all = decode(tokenizer, &self.ids[self.context..])?;
        if all.ends_with(BROKEN) {
            return Ok((String::new(), false));
        }
        let new = self.after(all, tokenizer)?;
        (self.context, self.read) = (self.read, self.ids.len());
        Ok(self.stops.push(&new))
    }

    /// The text that was held back, when no more tokens come.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let all = decode(tokenizer, &self.ids[self.context..])?;
        let new = self.after(all, tokenizer)?;
        let (mut text, ended) = self.stops.push(&new);
        if !ended {
            text.push_str(&self.stops.held);
        }
        Ok(text)
    }

    /// The part of a text of all tokens from the context on that is after those that were read.
    fn after(&self, all: String, tokenizer: &Tokenizer) -> Result<String> {
        let before = decode(tokenizer, &self.ids[self.context..self.read])?;
        Ok(all.strip_prefix(&before).map_or_else(|| all.chars().skip(before.chars().count()).collect(), str::to_owned))
    }
}

fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> Result<String> {
    tokenizer.encoder().decode(ids, true).map_err(|e| TrainError::Usage(format!("tokenizer: {e}")))
}

/// Texts that end an answer.
#[derive(Clone)]
struct Stops {
    stop: Vec<String>,
    /// Text that may be the beginning of a stop text.
    held: String,
}

impl Stops {
    /// Adds text. Returns the part that is certain to be shown, and true if a stop text was found: that and the text
    /// after it is not shown.
    fn push(&mut self, new: &str) -> (String, bool) {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(new);
        if let Some(at) = self.stop.iter().filter_map(|stop| text.find(stop)).min() {
            text.truncate(at);
            return (text, true);
        }
        let may_begin = |at: &usize| self.stop.iter().any(|stop| stop.starts_with(&text[*at..]));
        let held = text.char_indices().map(|(at, _)| at).find(may_begin).unwrap_or(text.len());
        self.held = text.split_off(held);
        (text, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shown text of each piece, and whether a stop text ended it.
    fn shown(stop: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut stops = Stops { stop: stop.iter().map(|s| (*s).to_owned()).collect(), held: String::new() };
        let mut shown = Vec::new();
        for piece in pieces {
            let (text, ended) = stops.push(piece);
            shown.push(text);
            if ended {
                return (shown, true);
            }
        }
        shown.push(stops.held);
        (shown, false)
    }

    #[test]
    fn a_stop_is_found_across_pieces_and_never_shown() {
        assert_eq!(shown(&["END"], &["aE", "N", "Dx"]), (vec!["a".into(), "".into(), "".into()], true));
        assert_eq!(shown(&["END"], &["aE", "NE", "ND"]), (vec!["a".into(), "EN".into(), "".into()], true));
        assert_eq!(shown(&["END"], &["aEN"]), (vec!["a".into(), "EN".into()], false));
        assert_eq!(shown(&["\n\n", "b"], &["a\n", "bc"]), (vec!["a".into(), "\n".into()], true));
        assert_eq!(shown(&["é!"], &["xé", "é!"]), (vec!["x".into(), "é".into()], true));
        assert_eq!(shown(&[], &["ab", "c"]), (vec!["ab".into(), "c".into(), "".into()], false));
        assert_eq!(shown(&["aab"], &["aa", "ab"]), (vec!["".into(), "a".into()], true));
    }
}
