//! The next token from the scores of all: the order of the steps is that of transformers (penalty, temperature, top-k,
//! top-p, min-p). Does not know where scores come from.

use std::borrow::Cow;
use std::cmp::Ordering;

use tensor::philox::{Purpose, unit, word};

use super::settings::{Drawing, Settings};
use super::whole::Weights;

/// A token with its score, later its probability.
type Candidate = (f32, u32);

/// So many of the likeliest are found while the scores are looked through.
const FEW: usize = 256;

/// Candidates that are sorted at first where a sum decides how many are wanted.
const FIRST: usize = 1024;

/// The token that follows a sequence, of which the first `prompt` ids are the prompt and which may have `most`; with its
/// log-probability where the settings keep it, that among all tokens at the temperature and before any bound of it.
pub fn next_token(
    logits: &[f32],
    (ids, prompt): (&[i32], usize),
    most: usize,
    settings: &Settings,
) -> (u32, Option<f32>) {
    let number = || unit(word(settings.seed, Purpose::Generation, 0, 0, ids.len() as u64));
    let temperature = settings.drawing.map_or(1.0, |drawing| drawing.temperature);
    let is_changed = settings.repetition_penalty != 1.0 || !settings.masks.is_empty();
    if settings.drawing.is_some_and(|drawing| drawing.is_of_all()) && !is_changed {
        let weights = Weights::new(logits, temperature);
        let id = weights.draw(number());
        return (id, settings.keeps_logps.then(|| weights.log_probability(id)));
    }
    let id = bounded(logits, (ids, prompt), most, settings, number);
    (id, settings.keeps_logps.then(|| Weights::new(logits, temperature).log_probability(id)))
}

/// The same where something bounds or changes what is drawn from.
fn bounded(
    logits: &[f32],
    (ids, prompt): (&[i32], usize),
    most: usize,
    settings: &Settings,
    number: impl Fn() -> f32,
) -> u32 {
    let mut changed = Cow::Borrowed(logits);
    if settings.repetition_penalty != 1.0 {
        changed = Cow::Owned(penalise(logits, ids, settings.repetition_penalty));
    }
    if !settings.masks.is_empty() {
        settings.masks.apply(changed.to_mut(), (ids, prompt), &settings.end_tokens, most);
    }
    match &settings.drawing {
        None => likeliest(&changed),
        Some(drawing) => draw(candidates(&changed, drawing), number()),
    }
}

fn penalise(logits: &[f32], there: &[i32], penalty: f32) -> Vec<f32> {
    let mut changed = logits.to_vec();
    for id in there {
        let (from, to) = (logits[*id as usize], &mut changed[*id as usize]);
        *to = if from > 0.0 { from / penalty } else { from * penalty };
    }
    changed
}

/// The first of the largest.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (id, logit) in logits.iter().enumerate() {
        if *logit > best.0 {
            best = (*logit, id);
        }
    }
    best.1 as u32
}

/// The likelier first, then the lower id.
fn order(a: &Candidate, b: &Candidate) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// What is drawn from, with weights in no particular scale, the likeliest first where a sum or a number bounds them.
fn candidates(logits: &[f32], drawing: &Drawing) -> Vec<Candidate> {
    let scores = logits.iter().zip(0..).map(|(logit, id)| (logit / drawing.temperature, id));
    let mut all: Vec<Candidate> = match drawing.top_k {
        few @ 1..=FEW if few < logits.len() => likeliest_few(scores, few),
        many if (1..logits.len()).contains(&many) => {
            let mut all: Vec<Candidate> = scores.collect();
            all.select_nth_unstable_by(many - 1, order);
            all.truncate(many);
            all.sort_unstable_by(order);
            all
        }
        _ => scores.collect(),
    };
    let top = all.iter().map(|(score, _)| *score).fold(f32::NEG_INFINITY, f32::max);
    all.iter_mut().for_each(|(score, _)| *score = (*score - top).exp());
    if drawing.top_p < 1.0 {
        keep_sum(&mut all, drawing.top_p);
    }
    all.retain(|(weight, _)| *weight >= drawing.min_p);
    all
}

/// So many of the likeliest, in order. Few scores are among the best of those before them, so nearly all are only compared.
fn likeliest_few(mut scores: impl Iterator<Item = Candidate>, few: usize) -> Vec<Candidate> {
    let mut best: Vec<Candidate> = scores.by_ref().take(few).collect();
    best.sort_unstable_by(order);
    for score in scores {
        if order(&score, best.last().expect("at least one is kept")).is_lt() {
            best.pop();
            best.insert(best.partition_point(|known| order(known, &score).is_lt()), score);
        }
    }
    best
}

/// The likeliest whose weights reach a share of the sum of all, at least one.
fn keep_sum(all: &mut Vec<Candidate>, share: f32) {
    let wanted = f64::from(share) * total(all);
    let mut sorted = FIRST.min(all.len());
    loop {
        if sorted < all.len() {
            all.select_nth_unstable_by(sorted, order);
        }
        all[..sorted].sort_unstable_by(order);
        let mut sum = 0.0;
        let reached = all[..sorted].iter().position(|(weight, _)| {
            sum += f64::from(*weight);
            sum >= wanted
        });
        match reached {
            Some(last) => return all.truncate(last + 1),
            None if sorted == all.len() => return,
            None => sorted = (sorted * 8).min(all.len()),
        }
    }
}

fn total(all: &[Candidate]) -> f64 {
    all.iter().map(|(weight, _)| f64::from(*weight)).sum()
}

/// The candidate in whose stretch of the sum the number lies.
fn draw(candidates: Vec<Candidate>, u: f32) -> u32 {
    let mut rest = f64::from(u) * total(&candidates);
    for (weight, id) in &candidates {
        rest -= f64::from(*weight);
        if rest < 0.0 {
            return *id;
        }
    }
    candidates.iter().rev().find(|(weight, _)| *weight > 0.0).map_or(0, |(_, id)| *id)
}

#[cfg(test)]
mod tests {
    use super::super::defaults::Defaults;
    use super::super::settings::GenerationOptions;
    use super::*;

    fn settings(drawing: Option<Drawing>) -> Settings {
        let options = GenerationOptions::read(&[("seed".into(), "3".into())]).unwrap();
        Settings { drawing, ..Settings::of(&options, &Defaults::default(), vec![]).unwrap() }
    }

    /// The token behind so many others, none of which plays a part.
    fn at(logits: &[f32], position: usize, of: &Settings) -> u32 {
        next_token(logits, (&vec![0; position], 0), usize::MAX, of).0
    }

    const ALL: Drawing = Drawing { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

    /// Shares of 20 000 draws.
    fn shares(logits: &[f32], drawing: Drawing) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        for position in 0..20_000 {
            counts[at(logits, position, &settings(Some(drawing))) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    fn near(found: &[f64], expected: &[f64]) {
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.012), "{found:?} {expected:?}");
        assert!(found.iter().zip(expected).all(|(a, b)| *b > 0.0 || *a == 0.0), "{found:?} {expected:?}");
    }

    #[test]
    fn draws_follow_the_probabilities_and_their_bounds() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits = [2f32.ln(), 4f32.ln(), 1f32.ln(), 1f32.ln()];
        near(&shares(&logits, ALL), &[0.25, 0.5, 0.125, 0.125]);
        near(&shares(&logits, Drawing { temperature: 0.5, ..ALL }), &[4.0 / 22.0, 16.0 / 22.0, 1.0 / 22.0, 1.0 / 22.0]);
        near(&shares(&logits, Drawing { top_k: 2, ..ALL }), &[1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        near(&shares(&logits, Drawing { top_p: 0.6, ..ALL }), &[1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        near(&shares(&logits, Drawing { top_p: 0.5, ..ALL }), &[0.0, 1.0, 0.0, 0.0]);
        near(&shares(&logits, Drawing { min_p: 0.3, ..ALL }), &[1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        near(&shares(&logits, Drawing { top_k: 3, top_p: 0.99, ..ALL }), &[2.0 / 7.0, 4.0 / 7.0, 1.0 / 7.0, 0.0]);
    }

    /// As a sort of everything gives it, for a vocabulary of which the sum takes more than the first part.
    #[test]
    fn a_sum_of_many_tokens_takes_the_likeliest() {
        let logits: Vec<f32> = (0..5000).map(|i| ((i * 37 % 5000) as f32) * 1e-4).collect();
        let found = candidates(&logits, &Drawing { top_p: 0.5, ..ALL });
        let mut sorted: Vec<Candidate> = logits.iter().zip(0..).map(|(x, id)| (*x, id)).collect();
        sorted.sort_unstable_by(order);
        assert!(found.len() > FIRST && found.len() < 2500, "{}", found.len());
        assert!(found.iter().zip(&sorted).all(|(a, b)| a.1 == b.1));
    }

    /// As a sort of everything gives them, equal scores by their ids.
    #[test]
    fn a_few_of_the_likeliest_are_those_of_a_sort() {
        let logits: Vec<f32> = (0..3000).map(|i| (i * 37 % 500) as f32).collect();
        let mut sorted: Vec<Candidate> = logits.iter().zip(0..).map(|(x, id)| (*x, id)).collect();
        sorted.sort_unstable_by(order);
        for top_k in [1, 2, 50, FEW, FEW + 1, 2999] {
            let found = candidates(&logits, &Drawing { top_k, ..ALL });
            let ids = |of: &[Candidate]| of.iter().map(|(_, id)| *id).collect::<Vec<_>>();
            assert_eq!(ids(&found), ids(&sorted[..top_k]), "{top_k}");
        }
    }

    #[test]
    fn log_probabilities_are_of_all_tokens_at_the_temperature() {
        let logits = [2.0, 4.0, 0.0];
        let total = 1f64.exp() + 2f64.exp() + 1.0;
        for top_k in [0, 1, 2] {
            let of = Settings { keeps_logps: true, ..settings(Some(Drawing { temperature: 2.0, top_k, ..ALL })) };
            let (id, logp) = next_token(&logits, (&[], 0), 9, &of);
            let expected = f64::from(logits[id as usize]) / 2.0 - total.ln();
            assert!((f64::from(logp.unwrap()) - expected).abs() < 1e-6, "{top_k}");
        }
        assert_eq!(next_token(&logits, (&[], 0), 9, &settings(None)), (1, None));
    }

    #[test]
    fn repeated_tokens_become_less_likely() {
        let mut of = settings(None);
        of.repetition_penalty = 2.0;
        let next = |logits: &[f32], ids: &[i32], of: &Settings| next_token(logits, (ids, 0), 9, of).0;
        assert_eq!(next(&[3.0, 2.0, -1.0], &[], &of), 0);
        assert_eq!(next(&[3.0, 2.0, -1.0], &[0, 0], &of), 1);
        assert_eq!(next(&[-3.0, -2.0, -2.5], &[1], &of), 2);
        assert_eq!(next(&[1.0, 1.0], &[], &settings(None)), 0);
        of.masks.never = vec![1];
        assert_eq!(next(&[3.0, 2.0, -1.0], &[0], &of), 0, "what is taken out stays out");
    }

    #[test]
    fn a_number_belongs_to_seed_and_position() {
        let logits = vec![0.0; 1000];
        let of = settings(Some(ALL));
        let sequence: Vec<u32> = (0..50).map(|position| at(&logits, position, &of)).collect();
        assert_eq!(sequence, (0..50).map(|position| at(&logits, position, &of)).collect::<Vec<_>>());
        let other = Settings { seed: 4, ..of };
        assert_ne!(sequence, (0..50).map(|position| at(&logits, position, &other)).collect::<Vec<_>>());
    }
}
