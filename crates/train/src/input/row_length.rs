//! Tokens per row: as set by the options, else as the model and the documents allow.
//!
//! Knows options, the model's positions and counts of documents; not how documents are read or packed.

use data::{DatasetSummary, RowReason, Summary};
use options::Setting;

use crate::config::reason;
use crate::config::{Config, Problem, Reasons};
use crate::model::source::ModelSource;

/// Smallest and largest length of rows in tokens if no option sets it, as far as the model's positions go.
const LEAST: usize = 2048;
const MOST: usize = 8192;

/// The row length that options and model determine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLength {
    pub tokens: usize,
    /// The documents decide: `tokens` is the most that they may come to.
    pub is_open: bool,
}

/// A length that followed from the documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfData {
    pub tokens: usize,
    /// For the options with every value.
    pub because: String,
    /// A sentence on it for the user.
    pub note: String,
}

impl RowLength {
    /// Decides before any document is known.
    pub fn new(config: &Config, source: &ModelSource, reasons: &mut Reasons, problems: &mut Vec<Problem>) -> RowLength {
        let (length, path) = match (config.model.sequence_len, config.model.max_model_len) {
            (Setting::Value(length), _) => (length as usize, "sequence_len"),
            (Setting::Auto, Setting::Value(length)) => {
                reasons.insert("sequence_len".into(), reason(length, "`max_model_len`"));
                (length as usize, "max_model_len")
            }
            (Setting::Auto, Setting::Auto) => {
                let tokens = source.max_positions().unwrap_or(MOST).min(MOST);
                return RowLength { tokens: tokens.max(config.kept_sequence_len.unwrap_or(0)), is_open: true };
            }
        };
        if let Some(allowed) = source.position_limit().filter(|allowed| length > *allowed) {
            let message = format!("`{path}: {length}` is longer than the model's {allowed} positions");
            problems.push(config.mistake(path, message, Some(format!("set `{path}` to {allowed} or less"))));
        }
        RowLength { tokens: length, is_open: false }
    }
}

/// The length of rows for a stream, whose longest document is not known: the most that they may come to.
pub fn of_stream(most: usize) -> OfData {
    let because = "the longest document of a stream is not known".to_owned();
    let note = format!("`sequence_len` is not set: rows have {most} tokens, since {because}");
    OfData { tokens: most, because, note }
}

/// The length of rows for documents that were encoded with `most` tokens at most: a power of two that holds the
/// longest.
pub fn of_data(config: &Config, summary: &Summary, most: usize) -> OfData {
    let limit = config.template.max_length.map_or(most, |limit| (limit as usize).min(most));
    let longest = summary.datasets.iter().map(|of| of.longest).max().unwrap_or(0);
    let too_long = |of: &DatasetSummary| of.dropped.get(&RowReason::TooLong).map_or(0, |of| of.rows);
    let (dropped, cut) = summary.datasets.iter().fold((0, 0), |sum, of| (sum.0 + too_long(of), sum.1 + of.at_limit));
    if limit < most || dropped + cut == 0 {
        let tokens = longest.next_power_of_two().max(LEAST).min(most);
        let note = format!("`sequence_len` is not set: rows have {tokens} tokens, the longest document has {longest}");
        let because =
            format!("holds the longest document, of {longest} tokens; automatic lengths are from {LEAST} to {MOST}");
        return OfData { tokens, because, note };
    }
    let bound = if most < MOST { "the number of positions of the model" } else { "the automatic maximum" };
    let mut fates = Vec::new();
    if dropped > 0 {
        fates.push(format!("{dropped} longer documents are dropped"));
    }
    if cut > 0 {
        fates.push(format!("{cut} documents fill a row completely or are truncated"));
    }
    let help = if most < MOST { "" } else { "; set `sequence_len` for longer rows" };
    let note = format!("`sequence_len` is not set: rows have {most} tokens, {bound}; {}{help}", fates.join(" and "));
    OfData { tokens: most, because: bound.to_owned(), note }
}

/// The length that a run began with.
pub fn of_checkpoint(tokens: usize) -> OfData {
    let because = "the run began with it".to_owned();
    OfData { tokens, note: format!("`sequence_len` is not set: rows have {tokens} tokens, as the run began"), because }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Task;

    /// (tokens, note) for a set whose longest document has `longest` tokens, of `cut` that fill the limit.
    fn length(options: serde_json::Value, longest: usize, cut: usize, most: usize) -> (usize, String) {
        let mut all = serde_json::json!({"model": "m"});
        options.as_object().unwrap().iter().for_each(|(name, value)| all[name] = value.clone());
        let config = Config::load_json(&all.to_string(), Task::Sft, &[]).unwrap();
        let set = DatasetSummary { longest, at_limit: cut, ..DatasetSummary::default() };
        let found = of_data(&config, &Summary { datasets: vec![DatasetSummary::default(), set] }, most);
        (found.tokens, found.note)
    }

    #[test]
    fn the_longest_document_decides_between_two_bounds() {
        let none = || serde_json::json!({});
        for (longest, tokens) in [(1, 2048), (2048, 2048), (2049, 4096), (4097, 8192), (8191, 8192)] {
            assert_eq!(length(none(), longest, 0, MOST).0, tokens, "{longest}");
        }
        // The model's positions.
        assert_eq!(length(none(), 700, 0, 1024).0, 1024);
        assert_eq!(length(none(), 2500, 0, 3000).0, 3000);
        let (tokens, note) = length(none(), MOST, 3, MOST);
        assert_eq!(tokens, MOST);
        assert!(
            note.contains("3 documents fill a row") && note.ends_with("set `sequence_len` for longer rows"),
            "{note}"
        );
        // Where documents are kept short by an option, they do not ask for more.
        assert_eq!(length(serde_json::json!({"max_length": 500}), 500, 9, MOST).0, 2048);
    }
}
