//! The preparation of a run's data without training: `surogate check`.

use data::{Purpose, Stop};

use crate::config::Config;
use crate::error::{Result, TrainError};
use crate::input::encoded::Encoded;
use crate::input::feed::{CheckedData, Feed};
use crate::model::source::ModelSource;
use crate::plan::Plan;
use crate::trainer::rollout;

/// Prepares the data of a run without training. `rows`: how many rows are wanted to be looked at.
pub fn check_data(config: &Config, source: &ModelSource, rows: usize, stop: Stop<'_>) -> Result<CheckedData> {
    let problems = config.check_datasets();
    if !problems.is_empty() {
        return Err(TrainError::Config(problems));
    }
    let plan = Plan::new(config, source)?;
    if config.task.purpose() == Purpose::Prompts {
        return rollout::check_data(config, source, plan.sequence_len);
    }
    let encoded = Encoded::read(config, source, plan.rows(), None, stop)?;
    let row = encoded.sequence_len;
    let feed = Feed::new(config, encoded, (row, false), stop)?;
    let few: Vec<String> = feed.note_on_steps(config).into_iter().chain(feed.note_on_judges(config)).collect();
    let notes: String = feed.encoded.notes.iter().chain(&few).map(|note| format!("Note: {note}\n")).collect();
    let rows = if rows == 0 { Vec::new() } else { feed.first_rows(source, rows)? };
    let mut counts = feed.check_json();
    counts["steps"] = feed.total_steps(config).into();
    Ok(CheckedData { table: notes + &feed.check_table(config), rows, counts })
}
