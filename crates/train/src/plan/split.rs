//! The split of a step into micro-steps: how many rows a device works on at once. Where the options leave it open, the split
//! that fits and that the plan expects to be fastest; each is found by planning with it.
//!
//! Decides nothing but that number. Values for other options are those of `recommend.rs`.

use std::thread;

use program::{Arch, EntryKind, Machine};
use serde_json::json;

use crate::config::{Config, Reason};
use crate::error::{Result, TrainError};
use crate::input::encoded::Encoded;
use crate::model::source::ModelSource;
use crate::plan::Plan;
use crate::plan::preview::Preview;

/// Expected rates that differ by less than this are the same: the smaller plan is taken.
const AS_FAST: f64 = 0.995;
/// Products of this number of tokens gain nothing by more of them.
const ENOUGH_TOKENS: usize = 32768;
/// The reason for a split that a checkpoint recorded.
const KEPT: &str = "as the run began";

/// The rate and the size of a plan that fits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    pub tokens_per_second: f64,
    pub bytes: usize,
    /// Something is recomputed, done in parts or kept on the host, so that it fits.
    pub waits: bool,
}

/// Plans with options. None where they do not fit or do not go together.
pub(crate) fn fit(config: &Config, source: &ModelSource, machine: &Machine, data: Option<&Encoded>) -> Option<Fit> {
    let preview = Preview::new(config, source, machine, data).ok()?;
    let waits = preview.program.plan.iter().any(|of| of.entry == EntryKind::FirstMicroStep && of.choice.saves());
    let tokens_per_second = preview.tokens_per_second();
    Some(Fit { tokens_per_second, bytes: preview.memory_bytes(), waits })
}

/// Plans with each of several options, at the same time.
pub(crate) fn fits(
    all: &[Config],
    source: &ModelSource,
    machine: &Machine,
    data: Option<&Encoded>,
) -> Vec<Option<Fit>> {
    thread::scope(|scope| {
        let started: Vec<_> =
            all.iter().map(|config| scope.spawn(move || fit(config, source, machine, data))).collect();
        started.into_iter().map(|plan| plan.join().expect("planning does not panic")).collect()
    })
}

/// The position of the fastest of `all`; among those that are as fast, of the smallest.
pub(crate) fn best(all: &[Fit]) -> Option<usize> {
    let most = all.iter().map(|of| of.tokens_per_second).fold(0.0, f64::max);
    let near = all.iter().enumerate().filter(|(_, of)| of.tokens_per_second >= AS_FAST * most);
    near.min_by_key(|(_, of)| of.bytes).map(|(index, _)| index)
}

/// The same options with a split of their step.
pub(crate) fn with_rows(config: &Config, rows: u32, because: String) -> Config {
    let mut config = config.clone();
    config.micro_batch = Some(Reason { value: json!(rows), because });
    config
}

/// Numbers of rows of a micro-step that are worth a plan: the written one, and those that are at least twice as large or half as
/// small as the one before, written first.
pub(crate) fn candidates(config: &Config, row: usize) -> (Vec<u32>, Vec<u32>) {
    let written = config.training.per_device_train_batch_size;
    let possible = config.possible_micro_rows();
    let (mut larger, mut smaller) = (vec![written], Vec::new());
    for rows in possible.iter().filter(|rows| **rows > written) {
        let last = larger[larger.len() - 1];
        if *rows >= 2 * last && last as usize * row < ENOUGH_TOKENS {
            larger.push(*rows);
        }
    }
    for rows in possible.iter().rev().filter(|rows| **rows < written) {
        if 2 * rows <= smaller.last().copied().unwrap_or(written) {
            smaller.push(*rows);
        }
    }
    (larger, smaller)
}

/// The options with the rows of a micro-step, where they leave them to the plan; `data`: the documents, where they are
/// available.
pub(crate) fn with_split(
    config: &Config,
    source: &ModelSource,
    machine: &Machine,
    data: Option<&Encoded>,
) -> Result<Config> {
    // The time of a CPU's products says nothing on how to split a step there.
    if !config.splits_freely() || config.device_rows() == 1 || machine.arch == Arch::Cpu {
        return Ok(config.clone());
    }
    // Nodes read different documents, and all have to choose the same.
    let data = data.filter(|_| config.nodes() == 1);
    if config.micro_batch.is_some() {
        let kept = Preview::new(config, source, machine, data);
        if !matches!(kept, Err(TrainError::Memory(_))) {
            return Ok(config.clone());
        }
    }
    let row = data.into_iter().fold(Plan::new(config, source)?, Plan::with_data).sequence_len;
    let (larger, smaller) = candidates(config, row);
    let mut found = tried(config, &larger, source, machine, data);
    let written = found.iter().find(|(rows, _)| *rows == larger[0]).map(|(_, fit)| *fit);
    // A pipeline idles less with more micro-steps, and fewer rows may be faster than recomputing.
    if config.stages() > 1 || written.is_none_or(|of| of.waits) {
        found.extend(tried(config, &smaller, source, machine, data));
    }
    let fits: Vec<Fit> = found.iter().map(|(_, fit)| *fit).collect();
    let Some(best) = best(&fits) else {
        let mut config = config.clone();
        config.micro_batch = None;
        return Ok(config);
    };
    let (rows, fit) = found[best];
    Ok(with_rows(config, rows, because(fit, written, larger[0])))
}

fn tried(
    config: &Config,
    rows: &[u32],
    source: &ModelSource,
    machine: &Machine,
    data: Option<&Encoded>,
) -> Vec<(u32, Fit)> {
    let all: Vec<Config> = rows.iter().map(|rows| with_rows(config, *rows, String::new())).collect();
    let fits = fits(&all, source, machine, data);
    rows.iter().copied().zip(fits).filter_map(|(rows, fit)| Some((rows, fit?))).collect()
}

/// The reason for a split, next to the written one.
fn because(chosen: Fit, written: Option<Fit>, rows: u32) -> String {
    let gib = |bytes: usize| format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64);
    match written {
        None => format!("{} at once do not fit", crate::words::count(rows.into(), "row")),
        Some(other) => {
            let gain = 100.0 * (chosen.tokens_per_second / other.tokens_per_second - 1.0);
            let sign = if gain < 0.0 { '−' } else { '+' };
            let gain = gain.abs();
            format!(
                "{sign}{gain:.0} % tokens per second expected, {} instead of {}",
                gib(chosen.bytes),
                gib(other.bytes)
            )
        }
    }
}

/// The options of a run that goes on, with the split that it began with. A split that the options change is not kept.
pub(crate) fn kept(config: &mut Config, options: &serde_json::Value, resolved: &serde_json::Value) {
    let of = &config.training;
    let same = options["per_device_train_batch_size"] == json!(of.per_device_train_batch_size)
        && options["gradient_accumulation_steps"] == json!(of.gradient_accumulation_steps);
    let rows = resolved["micro_batch_size"].as_u64().and_then(|rows| u32::try_from(rows).ok());
    if let Some(rows) = rows.filter(|rows| same && config.possible_micro_rows().contains(rows)) {
        *config = with_rows(config, rows, KEPT.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Task;

    fn config(text: &str) -> Config {
        Config::load(&format!("model: m\n{text}"), "run.yaml", Task::Sft, &[]).unwrap()
    }

    #[test]
    fn candidates_double_up_to_the_rows_of_a_step() {
        let of = |text: &str, row: usize| candidates(&config(text), row);
        assert_eq!(of("", 512), (vec![2, 4, 8], vec![1]));
        assert_eq!(of("", 32768), (vec![2], vec![1]), "two rows are enough tokens");
        let odd = "per_device_train_batch_size: 3\ngradient_accumulation_steps: 10\n";
        assert_eq!(of(odd, 512), (vec![3, 6, 15, 30], vec![1]));
    }

    #[test]
    fn a_resumed_run_keeps_its_split_unless_another_is_written() {
        let rows = |text: &str, rows: u32| {
            let mut config = config(text);
            let options = json!({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4});
            kept(&mut config, &options, &json!({"micro_batch_size": rows}));
            config.micro_rows()
        };
        assert_eq!(rows("", 8), 8);
        assert_eq!(rows("", 3), 2, "another number of rows");
        assert_eq!(rows("per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n", 8), 4);
        assert_eq!(rows("per_device_train_batch_size: 2\nmicro_batch_size: 4\n", 8), 4);
    }
}
