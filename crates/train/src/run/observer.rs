//! The receiver of a run's output, and the ways in which a run ends.

use std::path::PathBuf;

use serde_json::Value;

/// Receives a run's output while it goes on, and can end it.
pub trait Observer {
    /// Receives one line for the user.
    fn line(&mut self, text: &str);

    /// Receives a line for the user that quotes prose, such as the answer of a model.
    fn prose(&mut self, text: &str) {
        self.line(text);
    }

    /// Receives the word that the run is about to write its first file: an end before that loses nothing.
    fn begun(&mut self) {}

    /// Receives an event that was just written to the log.
    fn event(&mut self, _event: &Value) {}

    /// Steps that are done, of all.
    fn progress(&mut self, _done: u64, _total: u64) {}

    /// Asked after every step and by what takes long besides the steps: by the reading of data and between the stages
    /// before the first step, where nothing is kept; before every batch of an evaluation and every tensor of a result,
    /// which are given up. True ends the run, after a checkpoint if a step was done.
    fn interrupted(&mut self) -> bool;

    /// Asked after every checkpoint that is written in the course of the run. True ends the run there.
    fn ends_at_checkpoint(&mut self) -> bool {
        false
    }
}

/// The way in which a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The result lies in this folder.
    Finished(PathBuf),
    /// Stopped on request; the checkpoint lies in this folder.
    Interrupted(PathBuf),
    /// Stopped on request before the first step: nothing was written.
    NotBegun,
    /// This process was one of several, of which node 0 has finished the run.
    Followed,
}
