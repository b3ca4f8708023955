//! Bounds on untrusted tokenizers: numbers of tokens that tables can have, and texts that do not grow without end
//! before they are encoded or when tokens become text.
//!
//! Knows the parts of a tokenizer, not what they do to any text.

use serde_json::Value;
use tokenizers::PostProcessor;
use tokenizers::models::ModelWrapper;

use crate::error::{RowError, RowReason};

/// The largest number of a token: vocabularies have less than a million, and tables are as long as the largest number.
pub const MOST_IDS: u32 = 1 << 24;

/// By how much the steps before the encoding may lengthen a text, all together. The known ones write three bytes for
/// one.
const MOST_GROWTH: f64 = 4096.0;

/// Up to this growth, the size of a text decides alone whether it is encoded: steps of published tokenizers write `▁` for
/// a blank, or two bytes for one.
const ORDINARY_GROWTH: f64 = 3.0;

/// Bytes of a text with more growth before it is encoded. The library takes about 130 bytes for each.
const MOST_GROWN: f64 = 8.0 * 1024.0 * 1024.0;

/// Bytes of the text that tokens become.
const MOST_DECODED: f64 = 256.0 * 1024.0 * 1024.0;

/// Tokens that a tokenizer may add to each text.
const MOST_ADDED: usize = 4096;

/// Steps of normalizers, pre-tokenizers and decoders, all together: published tokenizers have less than a dozen, and each goes
/// over the whole text or all pieces of it.
const MOST_STEPS: usize = 64;

/// Bytes of a piece of a model that tries all pieces at each place, and characters of a word that is tried in all its parts:
/// published ones have less than 64, and words of up to 200.
const LONGEST_PIECE: usize = 256;

/// Bytes for which a table of characters may write one, without counting as growth: that of NFKC has one of 33.
const LONGEST_NORMALIZED: usize = 64;

/// The maximal length that a text may reach: a factor for its bytes, and bytes besides them.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Growth {
    factor: f64,
    more: f64,
}

impl Growth {
    const NONE: Growth = Growth { factor: 1.0, more: 0.0 };

    fn by(factor: f64) -> Growth {
        Growth { factor: factor.max(1.0), more: 0.0 }
    }

    fn then(self, next: Growth) -> Growth {
        Growth { factor: self.factor * next.factor, more: self.more * next.factor + next.more }
    }

    fn of(self, bytes: usize) -> f64 {
        bytes as f64 * self.factor + self.more
    }
}

/// The bounds of one tokenizer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    encoding: Growth,
    decoding: Growth,
    longest_token: usize,
}

impl Bounds {
    /// Errors: the tokenizer is out of bounds for any text.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Result<Bounds, String> {
        let vocabulary = tokenizer.get_vocab(true);
        if let Some((token, id)) = vocabulary.iter().find(|(_, id)| **id >= MOST_IDS) {
            return Err(format!("the token {token:?} has the number {id}, more than the {MOST_IDS} that there may be"));
        }
        let added = tokenizer.get_post_processor().map_or(0, |processor| processor.added_tokens(false));
        if added > MOST_ADDED {
            return Err(format!("it adds {added} tokens to each text, more than the {MOST_ADDED} that there may be"));
        }
        let json = |part: serde_json::Result<Value>| part.map_err(|e| e.to_string());
        check_model(tokenizer)?;
        let copies = copies(&json(serde_json::to_value(tokenizer.get_post_processor()))?);
        if copies > 1 {
            return Err(format!("its post-processor writes each text {copies} times, where it may write it once"));
        }
        let steps = [
            json(serde_json::to_value(tokenizer.get_normalizer()))?,
            json(serde_json::to_value(tokenizer.get_pre_tokenizer()))?,
        ];
        let decoder = json(serde_json::to_value(tokenizer.get_decoder()))?;
        let number: usize = steps.iter().chain([&decoder]).map(count).sum();
        if number > MOST_STEPS {
            return Err(format!(
                "it has {number} steps around the encoding, more than the {MOST_STEPS} that there may be"
            ));
        }
        let encoding = steps.iter().map(growth).fold(Growth::NONE, Growth::then);
        let decoding = growth(&decoder);
        for (what, growth) in [("normalizers", encoding), ("decoders", decoding)] {
            if growth.of(1) > MOST_GROWTH {
                return Err(format!("its {what} may make a text {:.0} times as long", growth.of(1)));
            }
        }
        let longest_token = vocabulary.keys().map(String::len).max().unwrap_or(0);
        Ok(Bounds { encoding, decoding, longest_token })
    }

    /// Errors: the text may become too long before it is encoded.
    pub(super) fn check_text(self, text: &str) -> Result<(), RowError> {
        let most = self.encoding.of(text.len());
        if self.encoding.factor <= ORDINARY_GROWTH || most <= MOST_GROWN {
            return Ok(());
        }
        let problem = format!(
            "the tokenizer may make {most:.0} bytes of a text of {}, more than the {MOST_GROWN} that are encoded",
            text.len()
        );
        Err(RowError::new(RowReason::TooLarge, problem))
    }

    /// Errors: the tokens may become too long a text. `length` gives the bytes of a token.
    pub(super) fn check_ids(self, ids: &[u32], length: impl Fn(u32) -> usize) -> Result<(), RowError> {
        if self.decoding.of(ids.len().saturating_mul(self.longest_token)) <= MOST_DECODED {
            return Ok(());
        }
        let most = self.decoding.of(ids.iter().map(|&id| length(id)).sum());
        if most <= MOST_DECODED {
            return Ok(());
        }
        let problem = format!("{} tokens may become {most:.0} bytes, more than {MOST_DECODED}", ids.len());
        Err(RowError::new(RowReason::TooLarge, problem))
    }
}

/// Errors: a model whose tokens are random, or whose time grows faster than the text.
fn check_model(tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
    match tokenizer.get_model() {
        ModelWrapper::BPE(model) => match model.dropout.filter(|share| *share > 0.0) {
            Some(dropout) => {
                let text = "leaves out merges at random, so the same text would have other tokens each time";
                Err(format!("its model {text} (`dropout: {dropout}`; set it to null)"))
            }
            None => Ok(()),
        },
        ModelWrapper::WordPiece(model) if model.max_input_chars_per_word > LONGEST_PIECE => Err(format!(
            "its model takes words of {} characters (`max_input_chars_per_word`), more than the {LONGEST_PIECE} that there may be",
            model.max_input_chars_per_word
        )),
        ModelWrapper::Unigram(_) => {
            let longest = tokenizer.get_vocab(false).keys().map(String::len).max().unwrap_or(0);
            match longest > LONGEST_PIECE {
                true => Err(format!(
                    "its model has a piece of {longest} bytes, more than the {LONGEST_PIECE} that there may be"
                )),
                false => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// The number of times that a post-processor writes a text.
fn copies(of: &Value) -> usize {
    if let Some(list) = of.get("processors").and_then(Value::as_array) {
        return list.iter().map(copies).fold(1, usize::saturating_mul);
    }
    let single = of.get("single").and_then(Value::as_array);
    single.map_or(1, |pieces| pieces.iter().filter(|piece| piece.get("Sequence").is_some()).count())
}

/// The number of steps in a step, those of sequences each.
fn count(of: &Value) -> usize {
    let lists = ["normalizers", "pretokenizers", "decoders"].map(|name| of.get(name).and_then(Value::as_array));
    match lists.into_iter().flatten().next() {
        Some(list) => list.iter().map(count).sum::<usize>() + 1,
        None => usize::from(of.is_object()),
    }
}

/// By how much a step of a tokenizer may lengthen a text.
fn growth(of: &Value) -> Growth {
    let text = |name: &str| of.get(name).and_then(Value::as_str).unwrap_or_default();
    match text("type") {
        "Sequence" => {
            let lists = ["normalizers", "pretokenizers", "decoders"].iter().filter_map(|name| of.get(*name));
            lists.filter_map(Value::as_array).flatten().map(growth).fold(Growth::NONE, Growth::then)
        }
        "Replace" => {
            let content = text("content").len();
            let pattern = of.pointer("/pattern/String").and_then(Value::as_str).map_or(0, str::len);
            match pattern {
                // An expression may match nothing, before and after each character.
                0 => Growth { factor: content as f64 + 1.0, more: content as f64 },
                _ => Growth::by(content as f64 / pattern as f64),
            }
        }
        "Prepend" => Growth { factor: 1.0, more: text("prepend").len() as f64 },
        "Precompiled" => match longest_normalized(text("precompiled_charsmap")) {
            0..=LONGEST_NORMALIZED => Growth::NONE,
            longest => Growth::by(longest as f64),
        },
        "ByteLevel" => Growth::by(2.0),
        "Metaspace" => Growth::by(3.0),
        _ => Growth::NONE,
    }
}

/// Bytes of the longest text in a table of characters, given in base 64: after the tree of characters, whose size is in
/// the first four bytes, its texts end with zeros.
fn longest_normalized(table: &str) -> usize {
    let value = |sign: u8| match sign {
        b'A'..=b'Z' => Some(sign - b'A'),
        b'a'..=b'z' => Some(sign - b'a' + 26),
        b'0'..=b'9' => Some(sign - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let signs: Vec<u8> = table.bytes().filter_map(value).collect();
    let bytes = signs.chunks(4).flat_map(|four| {
        let bits = four.iter().fold(0_u32, |bits, &sign| bits << 6 | u32::from(sign)) << (6 * (4 - four.len()));
        let [_, bytes @ ..] = bits.to_be_bytes();
        bytes.into_iter().take(four.len() * 3 / 4)
    });
    let bytes: Vec<u8> = bytes.collect();
    let Some((head, rest)) = bytes.split_first_chunk() else { return 0 };
    let texts = rest.get(u32::from_le_bytes(*head) as usize..).unwrap_or(rest);
    texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn growth_is_that_of_all_steps() {
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let of = |steps: Vec<Value>| growth(&json!({"type": "Sequence", "normalizers": steps}));
        assert_eq!(growth(&Value::Null), Growth::NONE);
        assert_eq!(of(vec![json!({"type": "NFC"}), replace(json!({"String": " "}), "\u{2581}")]).of(1), 3.0);
        assert_eq!(of(vec![replace(json!({"String": "aa"}), "a")]).of(1), 1.0);
        assert_eq!(of(vec![replace(json!({"Regex": "x*"}), "abc"); 2]), Growth { factor: 16.0, more: 15.0 });
        assert!(of(vec![replace(json!({"String": "a"}), "aa"); 40]).of(1) > MOST_GROWTH);
        let prepend = json!({"type": "Prepend", "prepend": "abc"});
        assert_eq!(of(vec![prepend, replace(json!({"String": "a"}), "xx")]), Growth { factor: 2.0, more: 6.0 });
        let decoders = json!({"type": "Sequence", "decoders": [replace(json!({"String": "a"}), &"x".repeat(50))]});
        assert_eq!(growth(&decoders).of(1), 50.0);
    }

    #[test]
    fn a_tokenizer_of_more_steps_than_any_needs_is_out_of_bounds() {
        let split = json!({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": false});
        let of = |steps: usize| {
            let inner = json!({"type": "Sequence", "pretokenizers": vec![split.clone(); steps]});
            let model = json!({"type": "BPE", "vocab": {"a": 0}, "merges": []});
            let pre = json!({"type": "Sequence", "pretokenizers": [inner, split]});
            let whole = json!({"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": pre});
            Bounds::of(&whole.to_string().parse().unwrap())
        };
        of(MOST_STEPS - 3).unwrap();
        assert!(of(1000).unwrap_err().starts_with("it has 1003 steps around the encoding"));
    }

    #[test]
    fn a_tokenizer_whose_tokens_are_random_is_refused() {
        let of = |dropout: Value| {
            let model = json!({"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": dropout});
            let whole = json!({"version": "1.0", "added_tokens": [], "model": model});
            Bounds::of(&whole.to_string().parse().unwrap())
        };
        of(json!(null)).unwrap();
        of(json!(0.0)).unwrap();
        assert!(of(json!(0.5)).unwrap_err().contains("`dropout: 0.5`; set it to null"));
    }

    #[test]
    fn models_whose_time_grows_faster_than_a_text_are_refused() {
        let of = |model: Value| {
            let whole = json!({"version": "1.0", "added_tokens": [], "model": model});
            Bounds::of(&whole.to_string().parse().unwrap()).map(|_| ())
        };
        let words = |most: usize| {
            json!({"type": "WordPiece", "vocab": {"z": 0, "##z": 1}, "unk_token": "z", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": most})
        };
        let pieces = |longest: usize| json!({"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["a".repeat(longest), -1.0]]});
        assert_eq!([of(words(200)), of(pieces(64))], [Ok(()), Ok(())]);
        assert!(of(words(1_000_000)).unwrap_err().contains("takes words of 1000000 characters"));
        assert!(of(pieces(3000)).unwrap_err().contains("a piece of 3000 bytes"));
    }

    #[test]
    fn a_tokenizer_that_writes_a_text_again_and_again_is_out_of_bounds() {
        let of = |times: usize, nested: usize| {
            let single = vec![json!({"Sequence": {"id": "A", "type_id": 0}}); times];
            let one = json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}});
            let post = json!({"type": "Sequence", "processors": vec![one; nested]});
            let model = json!({"type": "BPE", "vocab": {"a": 0}, "merges": []});
            let whole = json!({"version": "1.0", "added_tokens": [], "model": model, "post_processor": post});
            Bounds::of(&whole.to_string().parse().unwrap())
        };
        of(1, 2).unwrap();
        assert!(of(2, 10).unwrap_err().contains("writes each text 1024 times"));
    }

    #[test]
    fn a_text_is_measured_with_its_growth() {
        let bounds =
            |factor: f64| Bounds { encoding: Growth::by(factor), decoding: Growth::by(factor), longest_token: 9 };
        let text = "a".repeat(1 << 20);
        bounds(ORDINARY_GROWTH).check_text(&text.repeat(9)).unwrap();
        bounds(8.0).check_text(&text).unwrap();
        let error = bounds(9.0).check_text(&text).unwrap_err();
        assert!(error.reason == RowReason::TooLarge && error.detail.contains("9437184 bytes"), "{error}");
        let ids = [7; 1000];
        bounds(4096.0).check_ids(&ids, |_| panic!("few and short")).unwrap();
        let long = Bounds { longest_token: 1 << 30, ..bounds(1.0) };
        long.check_ids(&ids, |_| 200).unwrap();
        assert_eq!(long.check_ids(&ids, |_| 1 << 30).unwrap_err().reason, RowReason::TooLarge);
    }

    #[test]
    fn a_table_of_characters_is_measured() {
        // A tree of two bytes, then `ab`, `abcd` and nothing.
        assert_eq!(longest_normalized("AgAAAHh4YWIAYWJjZAAA"), 4);
        assert_eq!(longest_normalized("AgAAAHh4YWI="), 2);
        assert_eq!((longest_normalized(""), longest_normalized("////")), (0, 0));
    }
}
