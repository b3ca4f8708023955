//! The rows of a run's data that activations are measured on, and those that a result is compared on.

use data::{Batch, Purpose, Stop};

use crate::config::Config;
use crate::error::{Result, TrainError, go_on};
use crate::input::encoded::Encoded;
use crate::input::feed::Feed;
use crate::model::source::ModelSource;
use crate::plan::Plan;

/// Rows that a result is compared on, and the tokens from which fewer are enough.
const COMPARED: usize = 32;
const COMPARED_TOKENS: usize = 1 << 15;

/// Rows of a run's data, laid out for the model that is quantized.
#[derive(Debug, Default)]
pub struct Rows {
    /// Rows over which activations are measured.
    pub calibration: Vec<Batch>,
    /// For comparing: of the validation data, or the rows after the others.
    pub compared: Vec<Batch>,
    /// The latter are of the validation data.
    pub are_held_out: bool,
}

impl Rows {
    /// The same with batches of calibration whose rows have one length as one, of up to this many tokens; 0: as they are.
    pub fn joined(mut self, tokens: usize) -> Rows {
        if tokens == 0 {
            return self;
        }
        // Sorting is stable: rows of one length keep their order.
        self.calibration.sort_by_key(|batch| batch.seq_len);
        let of = |batches: &[Batch]| {
            let each = (tokens / (batches[0].batch * batches[0].seq_len).max(1)).max(1);
            batches.chunks(each).map(Batch::joined).collect::<Vec<Batch>>()
        };
        let calibration = self.calibration.chunk_by(|a, b| a.seq_len == b.seq_len).flat_map(of).collect();
        Rows { calibration, ..self }
    }

    /// Reads rows as the run would train on them: `most` for measuring at most.
    pub fn read(config: &Config, source: &ModelSource, most: usize, stop: Stop<'_>) -> Result<Rows> {
        let problems = config.check_datasets();
        if !problems.is_empty() {
            return Err(TrainError::Config(problems));
        }
        let has = match config.task.purpose() {
            Purpose::Documents => None,
            Purpose::Pairs | Purpose::Scores => Some("pairs of answers"),
            Purpose::Answers => Some("answers with verdicts"),
            Purpose::Prompts => Some("prompts without answers"),
        };
        if let Some(has) = has {
            let text =
                format!("--calibration: the run has {has}\n  hint: give a run of texts or conversations (`task: sft`)");
            return Err(TrainError::Usage(text));
        }
        if source.config.is_classifier() {
            let folder = source.folder.display();
            let text = format!(
                "--calibration: {folder}: this is a reward model, whose scores are not compared yet\n  hint: leave out \
                 `--calibration`, or take a model with an output head"
            );
            return Err(TrainError::Usage(text));
        }
        let plan = Plan::new(config, source)?;
        let encoded = Encoded::read(config, source, plan.rows(), None, stop)?;
        let row = encoded.sequence_len;
        let mut feed = Feed::new(config, encoded, (row, false), stop)?;
        let mut rows = Rows::default();
        let of = |batches: &[Batch]| batches.iter().map(|batch| batch.batch).sum::<usize>();
        let are_enough = |batches: &[Batch]| {
            let tokens = batches.iter().map(|batch| batch.batch * batch.seq_len).sum::<usize>();
            of(batches) >= COMPARED || tokens >= COMPARED_TOKENS
        };
        let mut is_over = false;
        if let Some(validation) = feed.validation()? {
            rows.are_held_out = true;
            for batch in validation {
                go_on(stop)?;
                rows.compared.push(batch.map_err(TrainError::Data)?);
                if are_enough(&rows.compared) {
                    break;
                }
            }
        }
        // One pass: no row is measured twice, or compared after it was measured.
        while let Some(batch) = feed.train.next().filter(|_| !is_over) {
            go_on(stop)?;
            let batch = batch.map_err(TrainError::Data)?;
            is_over = feed.train.ends_epoch();
            match of(&rows.calibration) < most {
                true => rows.calibration.push(batch),
                false if !are_enough(&rows.compared) => rows.compared.push(batch),
                false => break,
            }
        }
        if rows.compared.is_empty() && rows.calibration.len() > 1 {
            // Of few rows the last are left for comparing.
            let kept = rows.calibration.len() - rows.calibration.len().div_ceil(8);
            rows.compared = rows.calibration.split_off(kept);
        }
        if rows.calibration.is_empty() || rows.compared.is_empty() {
            let text = "--calibration: the data are less than two batches\n  hint: give more rows, or a smaller \
                        `per_device_train_batch_size`";
            return Err(TrainError::Usage(text.to_owned()));
        }
        Ok(rows)
    }

    /// Tokens of the rows for measuring.
    pub fn tokens(&self) -> usize {
        let of = |batch: &Batch| batch.present.iter().filter(|present| **present != 0.0).count();
        self.calibration.iter().map(of).sum()
    }
}
