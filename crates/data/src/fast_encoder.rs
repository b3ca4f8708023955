//! A faster encoder for byte-level vocabularies: the pipeline of the library's next version, which has no offsets. It
//! must give the same ids and offsets as the stable library.
//!
//! A token of such a vocabulary is a byte string, and the tokens of a text concatenate to the text, so the offsets
//! follow from the ids. A text for which this is not true (changed by a normalizer, white space consumed by an added
//! token) is left to the stable library. A tokenizer whose probes differ in anything is rejected. Knows no template and
//! no labels.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use tensor::philox::{Purpose, word};
use tokenizers_next::pipeline::{EncodeOptions, Override, PipelineToken, PipelineTokenizer};
use tokenizers_next::{canonicalize_file, from_json};

use crate::encoded_text::Encoded;
use crate::guard;

/// Encodes as the library does, or not at all.
pub(crate) struct FastEncoder {
    pipeline: PipelineTokenizer,
    options: EncodeOptions,
    /// The bytes of all tokens, and where among them those of each id are.
    bytes: Vec<u8>,
    ranges: Vec<Range<u32>>,
    /// Tokens with their offsets that the tokenizer adds itself around a text; `None`: these are not the same for every
    /// text.
    around: Option<[Encoded; 2]>,
}

/// The library's encoding of a text, with its own tokens or without them.
type Reference<'a> = &'a dyn Fn(&str, bool) -> Option<Encoded>;

impl FastEncoder {
    /// Errors: why this tokenizer is left to the library.
    pub(crate) fn open(
        path: &Path,
        tokenizer: &tokenizers::Tokenizer,
        reference: Reference<'_>,
    ) -> Result<Self, String> {
        let Some(tokenizers::DecoderWrapper::ByteLevel(_)) = tokenizer.get_decoder() else {
            return Err("its vocabulary is not byte-level".to_owned());
        };
        let read = || from_json(&canonicalize_file(path).map_err(|e| e.to_string())?).map_err(|e| e.to_string());
        let pipeline = guarded(read)?;
        let (bytes, ranges) = token_bytes(tokenizer)?;
        let options =
            EncodeOptions { padding: Override::Off, truncation: Override::Off, ..EncodeOptions::no_specials() };
        let around = around(reference);
        let encoder = FastEncoder { pipeline, options, bytes, ranges, around };
        guarded(|| encoder.check(tokenizer, reference))?;
        Ok(encoder)
    }

    /// `None`: the library has to encode this text.
    pub(crate) fn encode(&self, text: &str, special: bool) -> Option<Encoded> {
        let around = if special { Some(self.around.as_ref()?) } else { None };
        let mut tokens = Vec::with_capacity(text.len() / 3);
        guard::guarded(|| self.pipeline.encode_into(text, &self.options, &mut tokens)).ok()?.ok()?;
        let plain = self.with_offsets(text, PipelineToken::cast_slice(&tokens))?;
        let Some([before, after]) = around else { return Some(plain) };
        Some(Encoded {
            ids: [&before.ids[..], &plain.ids, &after.ids].concat(),
            offsets: [&before.offsets[..], &plain.offsets, &after.offsets].concat(),
        })
    }

    /// `None`: the tokens put together are not the text.
    fn with_offsets(&self, text: &str, ids: &[u32]) -> Option<Encoded> {
        let mut at = 0;
        let mut offsets = Vec::with_capacity(ids.len());
        for &id in ids {
            let range = self.ranges.get(id as usize)?;
            let token = &self.bytes[range.start as usize..range.end as usize];
            if token.is_empty() || !text.as_bytes()[at..].starts_with(token) {
                return None;
            }
            let (mut begin, mut end) = (at, at + token.len());
            at = end;
            // A token that holds a part of a character stands for the character.
            while !text.is_char_boundary(begin) {
                begin -= 1;
            }
            while !text.is_char_boundary(end) {
                end += 1;
            }
            offsets.push((begin, end));
        }
        (at == text.len()).then(|| Encoded { ids: ids.to_vec(), offsets })
    }

    fn check(&self, tokenizer: &tokenizers::Tokenizer, reference: Reference<'_>) -> Result<(), String> {
        let mut same = 0;
        for text in probes(tokenizer) {
            for special in [false, true] {
                let Some(ours) = self.encode(&text, special) else { continue };
                if reference(&text, special) != Some(ours) {
                    let shown: String = text.chars().take(40).collect();
                    return Err(format!("a probe differs ({shown:?})"));
                }
                same += 1;
            }
        }
        if same < PROBES { Err("it changes most texts before it encodes them".to_owned()) } else { Ok(()) }
    }
}

/// The library of a version before the first may panic where it will not later.
fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    guard::guarded(work).unwrap_or_else(|panic| Err(format!("the encoder gave up: {panic}")))
}

/// The tokens that the tokenizer adds before and after texts by itself.
fn around(reference: Reference<'_>) -> Option<[Encoded; 2]> {
    let mut found = None;
    for text in ["a", "b c"] {
        let (plain, with) = (reference(text, false)?, reference(text, true)?);
        if plain.ids.is_empty() {
            return None;
        }
        let begin = with.ids.windows(plain.ids.len()).position(|window| window == plain.ids)?;
        let end = begin + plain.ids.len();
        let part = |range: Range<usize>| Encoded {
            ids: with.ids[range.clone()].to_vec(),
            offsets: with.offsets[range].to_vec(),
        };
        let now = [part(0..begin), part(end..with.ids.len())];
        if found.as_ref().is_some_and(|before| *before != now) || with.offsets[begin..end] != plain.offsets {
            return None;
        }
        found = Some(now);
    }
    found
}

/// The bytes of each token; none for ids that there are not.
fn token_bytes(tokenizer: &tokenizers::Tokenizer) -> Result<(Vec<u8>, Vec<Range<u32>>), String> {
    let alphabet: HashMap<char, u8> = alphabet();
    let added = tokenizer.get_added_tokens_decoder();
    let vocabulary = tokenizer.get_vocab(true);
    let most = vocabulary.values().max().map_or(0, |&id| id as usize + 1);
    let (mut bytes, mut ranges) = (Vec::new(), vec![0..0; most]);
    for (token, id) in vocabulary {
        let begin = bytes.len() as u32;
        match added.get(&id) {
            Some(added) => bytes.extend(added.content.bytes()),
            None => {
                for sign in token.chars() {
                    bytes.push(*alphabet.get(&sign).ok_or_else(|| format!("the token `{token}` is no bytes"))?);
                }
            }
        }
        ranges[id as usize] = begin..bytes.len() as u32;
    }
    Ok((bytes, ranges))
}

/// The signs by which byte-level vocabularies write bytes: printable ones of Latin-1 stand for themselves, the others
/// for 256, 257, … in their order.
fn alphabet() -> HashMap<char, u8> {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 256;
    let sign = |byte: u8| {
        let code = match is_printable(byte) {
            true => u32::from(byte),
            false => {
                next += 1;
                next - 1
            }
        };
        (char::from_u32(code).expect("below the surrogates"), byte)
    };
    (0..=255).map(sign).collect()
}

/// Number of probes of random text.
const PROBES: usize = 64;

/// Words, signs and gaps between which encoders like to differ.
const PIECES: [&str; 40] = [
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n ",
    "\t",
    "\r\n",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "I'll",
    "don'T",
    "'s",
    "’s",
    "it's",
    "\"'\"",
    "0",
    "12345",
    "3.14",
    "1e-5",
    "x_y",
    "CamelCase",
    "http://a.b/c?d=e",
    "!!!",
    "...",
    "{\"k\": [1]}",
    "// ",
    "naïve",
    "Straße",
    "ΣΊΣΥΦΟΣ",
    "привет",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "สวัสดี",
    "你好世界",
    "こんにちは",
    "한국어",
    "👩‍👩‍👧",
    "\u{1f1e9}\u{1f1ea}",
];

/// Blocks of characters of which random words are made.
const BLOCKS: [Range<u32>; 10] = [
    0x20..0x7f,
    0xa0..0x180,
    0x370..0x400,
    0x400..0x500,
    0x590..0x700,
    0x900..0xa00,
    0xe00..0xe80,
    0x2000..0x2070,
    0x3040..0x3100,
    0x4e00..0x9fff,
];

/// Texts that are the same for each tokenizer but for words of its own vocabulary.
fn probes(tokenizer: &tokenizers::Tokenizer) -> Vec<String> {
    let mut count = 0;
    let mut random = move |below: usize| {
        count += 1;
        word(0, Purpose::Shuffle, 3, 0, count) as usize % below
    };
    let mut added: Vec<String> = tokenizer.get_added_tokens_decoder().into_values().map(|of| of.content).collect();
    added.sort();
    let size = tokenizer.get_vocab_size(false).max(1);
    let mut texts: Vec<String> = added.iter().map(|token| format!("a {token} b{token}\n")).collect();
    for _ in 0..2 * PROBES {
        let mut text = String::new();
        for _ in 0..24 + random(40) {
            match random(8) {
                0 | 1 => text.push_str(PIECES[random(PIECES.len())]),
                2 if !added.is_empty() => text.push_str(&added[random(added.len())]),
                2..=4 => {
                    let token = tokenizer.decode(&[random(size) as u32], false).unwrap_or_default();
                    text.push_str(&token.replace('\u{fffd}', ""));
                }
                5 => {
                    let block = BLOCKS[random(BLOCKS.len())].clone();
                    let signs = (0..1 + random(9)).map(|_| block.start + random(block.len()) as u32);
                    text.extend(signs.filter_map(char::from_u32));
                }
                6 => text.push(' '),
                _ => text.push_str(PIECES[10 + random(18)]),
            }
        }
        texts.push(text);
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Library, Tokenize};
    use std::fs;

    /// The texts of a file in pieces that break words, lines and JSON.
    fn pieces(path: &Path, most: usize) -> Vec<String> {
        let text = fs::read_to_string(path).unwrap();
        let mut pieces = Vec::new();
        let mut at = 0;
        while at < text.len().min(most) {
            let mut end = (at + 1500 + at % 701).min(text.len());
            while !text.is_char_boundary(end) {
                end += 1;
            }
            pieces.push(text[at..end].to_owned());
            at = end;
        }
        pieces
    }

    /// Ids and offsets of every text are the library's; how many of the texts the fast encoder took.
    fn compare(library: &Library, texts: &[String], name: &str) -> usize {
        let fast = library.fast().as_ref().unwrap_or_else(|reason| panic!("{name} is refused: {reason}"));
        let mut taken = 0;
        for text in texts {
            for special in [false, true] {
                let expected = library.encode_slowly(text, special).unwrap();
                if let Some(found) = fast.encode(text, special) {
                    assert_eq!(found, expected, "{name}: {text:?}");
                    taken += 1;
                }
            }
        }
        taken
    }

    #[test]
    #[ignore = "reads ../shared/assets"]
    fn ids_and_offsets_are_those_of_the_library() {
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/assets");
        let scratch = tempfile::tempdir().unwrap();
        let files = [
            "tinyshakespeare.txt",
            "small/messages_multiturn_106.jsonl",
            "llama-factory/reason_tool_use_demo_50.jsonl",
        ];
        let texts: Vec<String> = files.iter().flat_map(|file| pieces(&assets.join("data").join(file), 9_000)).collect();
        for name in ["qwen3", "gpt-oss", "gpt2", "mistral-nemo"] {
            let library = open(&assets.join("tokenizers").join(name), scratch.path());
            let mut all = texts.clone();
            // Other probes than those by which tokenizers are judged, and texts as chats hold them.
            all.extend(probes(&library.0).into_iter().map(|text| text.chars().rev().collect::<String>()));
            all.extend(texts.iter().take(9).map(|text| format!("<|im_start|>user\n{text}<|im_end|>\n<s>[INST]")));
            all.extend(["", " ", "e\u{301}", "\u{212b}", "\u{ac00}\u{11a8}"].map(str::to_owned));
            let taken = compare(&library.1, &all, name);
            assert!(taken > 3 * all.len() / 2, "{name}: {taken} of {} texts", 2 * all.len());
        }
        for (name, reason) in [("mistral-7b-v0.3", "not byte-level"), ("smollm2", "")] {
            let library = open(&assets.join("tokenizers").join(name), scratch.path());
            assert!(library.1.slow_because().is_some_and(|reported| reported.contains(reason)), "{name}");
        }
    }

    /// A tokenizer's folder, its file unpacked if need be.
    fn open(folder: &Path, scratch: &Path) -> (tokenizers::Tokenizer, Library) {
        let plain = folder.join("tokenizer.json");
        let path = match plain.is_file() {
            true => plain,
            false => {
                let packed = fs::File::open(folder.join("tokenizer.json.gz")).unwrap();
                let path = scratch.join("tokenizer.json");
                let mut file = fs::File::create(&path).unwrap();
                std::io::copy(&mut flate2::read::GzDecoder::new(packed), &mut file).unwrap();
                path
            }
        };
        (tokenizers::Tokenizer::from_file(&path).unwrap(), Library::open(&path).unwrap())
    }

    /// A tokenizer that is in no folder: trained on the spot, with other numbers, splits and tokens of its own.
    #[test]
    fn a_tokenizer_that_nobody_has_seen_is_encoded_alike_or_refused() {
        use tokenizers::models::bpe::{BPE, BpeTrainer};
        use tokenizers::pre_tokenizers::byte_level::ByteLevel;
        use tokenizers::{AddedToken, TokenizerBuilder};
        let texts: Vec<String> =
            (0..400).map(|i| format!("Line {i} of {}: wörds, \"quotes\", 数字 {}…\n", i % 7, i * i)).collect();
        let mut trainer = BpeTrainer::builder()
            .vocab_size(600)
            .show_progress(false)
            .special_tokens(vec![AddedToken::from("<end>", true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let byte_level = ByteLevel::new(false, false, true);
        let mut tokenizer = TokenizerBuilder::new()
            .with_model(BPE::default())
            .with_normalizer(Some(tokenizers::normalizers::NFC))
            .with_pre_tokenizer(Some(byte_level))
            .with_post_processor(Some(byte_level))
            .with_decoder(Some(byte_level))
            .build()
            .unwrap();
        tokenizer.train(&mut trainer, texts.iter()).unwrap();
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("tokenizer.json");
        tokenizer.save(&path, false).unwrap();
        let library = Library::open(&path).unwrap();
        let mut all = texts;
        all.extend(probes(&tokenizers::Tokenizer::from_file(&path).unwrap()));
        let taken = compare(&library, &all, "trained here");
        assert!(taken > all.len(), "{taken} of {}", 2 * all.len());
    }
}
