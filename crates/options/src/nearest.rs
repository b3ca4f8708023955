//! The search for the name that a misspelled one was meant to be. Knows names only.

/// Returns the candidate that looks most like `name`, if one looks alike enough to be worth a hint.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// The likeness below which a hint would puzzle more than it helps; `lora_rnk` to `lora_rank` has 0.98.
    const ALIKE: f64 = 0.85;
    let folded = name.to_lowercase().replace('-', "_");
    candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(&folded, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn typing_mistakes_find_their_name_and_strangers_find_nothing() {
        let names = ["learning_rate", "lora_rank", "lr_scheduler_type", "model"];
        assert_eq!(nearest("lerning_rate", names), Some("learning_rate"));
        assert_eq!(nearest("lora-rank", names), Some("lora_rank"));
        assert_eq!(nearest("Model", names), Some("model"));
        assert_eq!(nearest("temperature", names), None);
    }
}
