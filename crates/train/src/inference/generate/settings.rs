//! The options of generation, and what they come to with the model's own defaults. Does not know how a token is drawn.

use compiler::sampling::Draw;
use options::{Fault, Node, Problem, Reader, Section, Setting, Tree, options, read_table};

use super::defaults::Defaults;
use super::masks::Masks;
use super::request::Request;
use crate::error::{self, TrainError};

options! {
    /// Generation of text. `auto` is the value in the model's `generation_config.json`, else the default of transformers.
    pub struct GenerationOptions: "Generation" {
        /// Maximum tokens of an answer. `auto` is the model's value, else 256, and no more than its `max_length` leaves.
        max_new_tokens: Setting<u64> = auto, min = 1;
        /// Divides the logits before sampling: below 1, likely tokens become likelier. 0 takes the most likely token each
        /// time, as `auto` does unless the model asks for sampling.
        temperature: Setting<f64> = auto, min = 0;
        /// Sample from the k most likely tokens; 0 is all. `auto` is the model's value, else 50.
        top_k: Setting<u64> = auto;
        /// Sample from the most likely tokens whose probabilities add up to this.
        top_p: Setting<f64> = auto, above = 0, max = 1;
        /// Sample from tokens at least this times as probable as the most likely one.
        min_p: Setting<f64> = auto, min = 0, max = 1;
        /// Divides positive logits of tokens that occurred before, and multiplies negative ones: above 1, repetitions become
        /// rarer.
        repetition_penalty: Setting<f64> = auto, above = 0;
        /// Key of the random numbers. A prompt gets the same ones alone and in a batch.
        seed: u64 = 0;
        /// Texts that end an answer, which is cut before them; those of the model (`stop_strings`) do too.
        stop: Vec<String> = [];
        /// Continue after end tokens, up to `max_new_tokens`.
        ignore_end_tokens: bool = false;
        /// Maximum sequences at a time.
        batch_size: u64 = 64, min = 1;
        /// Images: largest area in pixels, in place of that of the model's processor. Only for models whose processor goes by
        /// areas (Qwen).
        max_pixels: Option<u64> = null, min = 1;
        /// Images: smallest area in pixels, as `max_pixels`.
        min_pixels: Option<u64> = null, min = 1;
    }
}

/// The option table of generation.
pub fn section() -> Section {
    Section::of::<GenerationOptions>()
}

impl GenerationOptions {
    /// Reads pairs of name and value, each as in YAML; the last of a name counts.
    pub fn read(given: &[(String, String)]) -> error::Result<GenerationOptions> {
        let mut reader = Reader::new(&[]);
        let mut entries = Vec::new();
        for (name, value) in given {
            let Some(node) = reader.read_yaml(name, value) else { continue };
            entries.retain(|(known, _): &(options::Key, Node)| known.name != *name);
            entries.push((options::Key { name: name.clone(), span: None }, node));
        }
        let root = Node { tree: Tree::Map(entries), span: None };
        let read: Result<GenerationOptions, Fault> = read_table(&root, &mut reader);
        let problems: Vec<Problem> = reader.finish().1;
        match read {
            Ok(options) if problems.is_empty() => Ok(options),
            _ => Err(TrainError::Config(problems)),
        }
    }
}

/// The settings that decide the next token.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub max_new_tokens: usize,
    /// Tokens of prompt and answer at most, if no number of new ones was requested.
    pub max_length: Option<usize>,
    /// The distribution that tokens are drawn from; its number is that of no token.
    pub draw: Draw,
    pub repetition_penalty: f32,
    pub seed: u64,
    pub stop: Vec<String>,
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
    pub masks: Masks,
    pub batch_size: usize,
    /// Log-probabilities of tokens that are drawn are kept.
    pub keeps_logps: bool,
}

/// Tokens of an answer where neither the options nor the model say how many.
const MOST_NEW_TOKENS: usize = 256;

impl Settings {
    /// True if logits are changed before a token is sampled, which the host does.
    pub fn changes_logits(&self) -> bool {
        self.repetition_penalty != 1.0 || !self.masks.is_empty()
    }

    /// The same for one prompt, with what is its own.
    pub fn with(&self, request: &Request) -> Settings {
        let mut own = self.clone();
        if let Some(most) = request.max_new_tokens {
            (own.max_new_tokens, own.max_length) = (most, None);
        }
        if let Some(temperature) = request.temperature {
            own.draw.temperature = temperature as f32;
        }
        own.seed = request.seed.unwrap_or(own.seed);
        own.keeps_logps = request.keeps_logps;
        own
    }

    /// The options with the model's defaults. Errors: an option of drawing where nothing is drawn.
    pub fn of(options: &GenerationOptions, defaults: &Defaults, end_tokens: Vec<u32>) -> error::Result<Settings> {
        let narrowing = [
            ("top_k", options.top_k.value().is_some()),
            ("top_p", options.top_p.value().is_some()),
            ("min_p", options.min_p.value().is_some()),
        ];
        let narrowed = narrowing.iter().find(|(_, given)| *given).map(|(name, _)| *name);
        let temperature = match (options.temperature.value(), narrowed) {
            (Some(temperature), _) => *temperature,
            (None, None) if !defaults.draws => 0.0,
            (None, _) => defaults.temperature.unwrap_or(1.0),
        };
        if let (true, Some(name)) = (temperature == 0.0, narrowed) {
            let text = format!(
                "{name} narrows what is drawn, but with temperature 0 the likeliest token is taken (give a temperature \
                 above 0, or leave {name} out)"
            );
            return Err(TrainError::Usage(text));
        }
        let draw = Draw {
            temperature: temperature as f32,
            top_k: options.top_k.value().map_or(defaults.top_k.unwrap_or(50), |k| *k as usize),
            top_p: options.top_p.value().copied().or(defaults.top_p).unwrap_or(1.0) as f32,
            min_p: options.min_p.value().copied().or(defaults.min_p).unwrap_or(0.0) as f32,
            number: 0.0,
        };
        let penalty = options.repetition_penalty.value().copied().or(defaults.repetition_penalty).unwrap_or(1.0);
        let asked = options.max_new_tokens.value().map(|most| *most as usize).or(defaults.max_new_tokens);
        let stop = options.stop.iter().chain(&defaults.stop).filter(|text| !text.is_empty());
        let mut masks = defaults.masks.clone();
        if options.ignore_end_tokens {
            // An answer that goes on after its end is not made to have one.
            masks.last.clear();
        }
        // A token that ends an answer is no word to be left out, as in transformers.
        masks.words.retain(|word| !matches!(word[..], [id] if end_tokens.contains(&id)));
        Ok(Settings {
            max_new_tokens: asked.unwrap_or(MOST_NEW_TOKENS).max(1),
            max_length: defaults.max_length.filter(|_| asked.is_none()),
            draw,
            repetition_penalty: penalty as f32,
            seed: options.seed,
            stop: stop.cloned().collect(),
            end_tokens: if options.ignore_end_tokens { Vec::new() } else { end_tokens },
            masks,
            batch_size: options.batch_size as usize,
            keeps_logps: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(given: &[(&str, &str)], defaults: &Defaults) -> error::Result<Settings> {
        let given: Vec<_> = given.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Settings::of(&GenerationOptions::read(&given)?, defaults, vec![2])
    }

    #[test]
    fn nothing_is_drawn_unless_the_model_or_the_user_asks_for_it() {
        let plain = Defaults::default();
        let draws = Defaults { draws: true, temperature: Some(0.6), top_p: Some(0.9), ..Defaults::default() };
        assert_eq!(settings(&[], &plain).unwrap().draw.temperature, 0.0);
        let of_model = Draw { temperature: 0.6, top_k: 50, top_p: 0.9, ..Draw::ALL };
        assert_eq!(settings(&[], &draws).unwrap().draw, of_model);
        assert_eq!(settings(&[("temperature", "0")], &draws).unwrap().draw.temperature, 0.0);
        let own = settings(&[("top_p", "0.5"), ("top_k", "0"), ("min_p", "0.1")], &plain).unwrap().draw;
        assert_eq!(own, Draw { top_p: 0.5, min_p: 0.1, ..Draw::ALL });
    }

    #[test]
    fn options_that_would_do_nothing_or_do_not_exist_are_refused() {
        let plain = Defaults::default();
        let error = settings(&[("temperature", "0"), ("top_k", "5")], &plain).unwrap_err().to_string();
        assert!(error.contains("top_k narrows what is drawn"), "{error}");
        let error = settings(&[("temprature", "1"), ("max_new_tokens", "0")], &plain).unwrap_err().to_string();
        assert!(error.contains("temperature") && error.contains("max_new_tokens"), "{error}");
    }

    #[test]
    fn lengths_and_stop_texts_are_the_models_unless_somebody_asks() {
        let defaults = Defaults {
            max_new_tokens: None,
            max_length: Some(20),
            stop: vec!["END".into()],
            top_k: Some(7),
            ..Defaults::default()
        };
        let of = settings(&[("stop", r#"["a"]"#)], &defaults).unwrap();
        assert_eq!((of.max_new_tokens, of.max_length), (256, Some(20)));
        assert_eq!(of.stop, ["a", "END"]);
        let of = settings(&[("max_new_tokens", "9")], &defaults).unwrap();
        assert_eq!((of.max_new_tokens, of.max_length), (9, None));
        let defaults = Defaults { max_new_tokens: Some(12), ..defaults };
        let of = settings(&[], &defaults).unwrap();
        assert_eq!((of.max_new_tokens, of.max_length, of.draw.temperature), (12, None, 0.0));
        let row = serde_json::json!({"text": "a", "temperature": 0.5, "max_new_tokens": 3});
        let own = of.with(&Request::from_json(&row).unwrap());
        let draw = Draw { temperature: 0.5, top_k: 7, ..Draw::ALL };
        assert_eq!((own.max_new_tokens, own.draw), (3, draw));
        let row = serde_json::json!({"text": "a", "temperature": 0});
        assert_eq!(own.with(&Request::from_json(&row).unwrap()).draw.temperature, 0.0);
    }

    #[test]
    fn ends_are_ignored_on_request() {
        let plain = Defaults::default();
        assert_eq!(settings(&[], &plain).unwrap().end_tokens, [2]);
        assert!(settings(&[("ignore_end_tokens", "true")], &plain).unwrap().end_tokens.is_empty());
        assert_eq!(settings(&[("stop", r#"["a", ""]"#)], &plain).unwrap().stop, ["a"]);
        let masks = Masks { words: vec![vec![2], vec![2, 3], vec![4]], last: vec![2], ..Masks::default() };
        let of = Defaults { masks, ..Defaults::default() };
        let kept = settings(&[], &of).unwrap().masks;
        assert_eq!((kept.words, kept.last), (vec![vec![2, 3], vec![4]], vec![2]), "an end token may follow");
        assert!(settings(&[("ignore_end_tokens", "true")], &of).unwrap().masks.last.is_empty());
    }
}
