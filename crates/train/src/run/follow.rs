//! Training on several nodes as one run. Node 0 runs the run: it decides what comes next, reads and writes the run's
//! files, and sends commands. The others carry out the same commands, each with the data and weights that it read
//! itself, and meanwhile wait, and read or write their ranks' memory when node 0 needs it for a checkpoint or a result.
//!
//! Knows the parts; what they consist of is in `trainer/`.

use std::path::PathBuf;
use std::sync::Arc;

use net::Nodes;
use program::Variant;

use crate::config::Config;
use crate::engine::device::Device;
use crate::error::Result;
use crate::model::source::ModelSource;
use crate::nodes::exchange::{failed, root};
use crate::run::observer::{Observer, Outcome};
use crate::run::resume;
use crate::trainer::Trainer;
use crate::trainer::checkpoint::Checkpoint;
use crate::trainer::command::{Part, unexpected};

/// The run as a node other than 0 sees it, from the first step to the end.
pub fn follow(
    config: Arc<Config>,
    source: Arc<ModelSource>,
    device: Arc<Device>,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let nodes = device.nodes.clone().expect("a node that follows has others");
    let outcome = Follower { config, source, device, nodes: nodes.clone(), wished: false }.run(observer);
    match (&outcome, nodes.failure()) {
        (Ok(_), _) => nodes.leave(),
        (Err(_), Some(_)) => {}
        (Err(error), None) => nodes.abort(&error.to_string(), error.exit_code()),
    }
    outcome.map_err(|error| root(Some(&nodes), error))
}

struct Follower {
    config: Arc<Config>,
    source: Arc<ModelSource>,
    device: Arc<Device>,
    nodes: Arc<Nodes>,
    /// A user requested the end on node 0.
    wished: bool,
}

impl Follower {
    /// Waits for the next command of node 0.
    fn next(&mut self, observer: &mut dyn Observer) -> Result<Vec<u8>> {
        let Follower { nodes, wished, .. } = self;
        let mut idle = || {
            if !*wished && observer.interrupted() {
                *wished = true;
                nodes.wish();
            }
        };
        idle();
        nodes.next_command(&mut idle).map_err(failed)
    }

    fn run(&mut self, observer: &mut dyn Observer) -> Result<Outcome> {
        let order = self.next(observer)?;
        let from = match Part::from_bytes(&order).unwrap_or_else(|| Err(unexpected("no run has begun")))? {
            Part::Begin { from } => from.map(|state| Checkpoint { folder: PathBuf::new(), state: *state }),
            Part::End { .. } => return Ok(Outcome::NotBegun),
            other => return Err(unexpected(&format!("{other:?} before a run has begun"))),
        };
        let config = from.as_ref().map_or(self.config.clone(), |from| resume::as_begun(&self.config, from));
        let over = || self.nodes.failure().is_some();
        let mut trainer = Trainer::unless_stopped(config, self.source.clone(), self.device.clone(), &over)?;
        trainer.begin_digest();
        observer.line(&format!("Node {} follows node 0", self.nodes.node));
        loop {
            let order = self.next(observer)?;
            let Some(part) = Part::from_bytes(&order) else {
                trainer.engine()?.session().serve(&order)?;
                continue;
            };
            let part = part?;
            if matches!(part, Part::Step | Part::Evaluate) {
                observer.begun();
            }
            match part {
                Part::Begin { .. } => return Err(unexpected("the run has begun before")),
                Part::Load { shapes, choices, resumed } => {
                    let variants: Vec<Variant> = shapes.iter().map(Variant::from).collect();
                    trainer.load(variants, &choices, resumed)?;
                    if let Some(from) = &from {
                        trainer.take_up(&from.state)?;
                    }
                }
                Part::Compare => {
                    let facts = trainer.facts()?;
                    self.device.agree("", &facts)?;
                }
                Part::Step => {
                    trainer.advance()?;
                }
                Part::Evaluate => {
                    trainer.evaluate()?;
                }
                Part::End { interrupted: false } => return Ok(Outcome::Followed),
                Part::End { interrupted: true } => return Ok(Outcome::NotBegun),
            }
        }
    }
}
