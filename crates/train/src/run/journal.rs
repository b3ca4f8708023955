//! The log of a trainer driven by its caller: the same events as those of a command-line run, for the same readers. It
//! begins with the first step, when the caller has shown the shape of a batch.
//!
//! Knows what is logged; the caller decides when.

use std::path::Path;

use serde_json::{Value, json};

use crate::config::Config;
use crate::engine::instruments::Instruments;
use crate::error::Result;
use crate::files::log::Log;
use crate::run::folder::RunFolder;
use crate::run::opening::opening;
use crate::run::record::manifest;
use crate::trainer::Trainer;
use crate::trainer::metrics::{EvaluationMetrics, StepMetrics};

/// The log of a trainer that Python drives.
pub struct Journal {
    place: RunFolder,
    log: Log,
    instruments: Instruments,
    is_open: bool,
}

impl Journal {
    /// Begins a log where the options ask for someone who reads it, or name its file. A log that cannot be written is
    /// reported now.
    pub fn begin(config: &Config, trainer: &Trainer) -> Result<Option<Journal>> {
        if config.logging.trackers().is_empty() && config.logging.log_file.value().is_none() {
            return Ok(None);
        }
        let place = RunFolder::of_caller(config, &trainer.name)?;
        let log = place.open_log()?;
        let instruments = Instruments::new(Instruments::interval(config, trainer.total_steps()));
        Ok(Some(Journal { place, log, instruments, is_open: false }))
    }

    /// Path of the log file.
    pub fn path(&self) -> &Path {
        &self.place.log
    }

    /// The folder of the run.
    pub fn output(&self) -> &Path {
        &self.place.output
    }

    /// Reports a step; the first is reported after what it is a step of. Gives the sentence that there is to say, if
    /// any.
    pub fn step(&mut self, trainer: &mut Trainer, metrics: &StepMetrics) -> Result<Option<String>> {
        self.open(trainer, metrics.step)?;
        if let Some(mut startup) = trainer.startup.take() {
            startup.done("first step");
            self.log.write(startup.to_json())?;
        }
        if let Some(event) = trainer.take_samples(metrics.step + 1) {
            self.log.write(event)?;
        }
        self.log.write(metrics.to_json())?;
        Ok(match self.instruments.look(metrics.step + 1, &trainer.device) {
            Some(Ok(event)) => self.log.write(event).map(|_| None)?,
            Some(Err(why)) => Some(why),
            None => None,
        })
    }

    /// Writes an evaluation to the log.
    pub fn evaluation(&mut self, trainer: &mut Trainer, metrics: &EvaluationMetrics) -> Result<()> {
        self.open(trainer, metrics.step)?;
        self.log.write(metrics.to_json()).map(drop)
    }

    /// Reports a checkpoint that is there.
    pub fn checkpoint(&mut self, trainer: &mut Trainer, folder: &Path) -> Result<()> {
        let step = trainer.steps_done();
        self.open(trainer, step)?;
        self.log.write(json!({"event": "checkpoint", "step": step, "path": folder})).map(drop)
    }

    /// Reports that the caller has done: with an error, if something went wrong. A trainer that never stepped leaves no
    /// log.
    pub fn close(self, error: Option<&str>) -> Result<()> {
        let Journal { mut log, is_open, .. } = self;
        if !is_open {
            log.withdraw();
            return Ok(());
        }
        let event = match error {
            None => json!({"event": "finished", "result": Value::Null}),
            Some(error) => json!({"event": "failed", "error": error, "exit_code": 1}),
        };
        log.write(event).map(drop)
    }

    fn open(&mut self, trainer: &mut Trainer, step: u64) -> Result<()> {
        if !std::mem::replace(&mut self.is_open, true) {
            let manifest = manifest(&self.place, trainer)?;
            self.log.write(opening(&self.place, trainer, &manifest, step)?)?;
        }
        Ok(())
    }

    /// True if the log's opening, which names its run, is written.
    pub fn is_open(&self) -> bool {
        self.is_open
    }
}
