//! Training on several nodes as one run. Node 0 runs the run: it decides what comes next, reads and writes the run's
//! files, and sends commands. The others carry out the same commands, each with the data and weights that it read
//! itself, and meanwhile wait, and read or write their ranks' memory when node 0 needs it for a checkpoint or a result.
//!
//! Knows the parts; what they consist of is in `trainer.rs` and `step.rs`.

use std::path::PathBuf;
use std::sync::Arc;

use net::{Channel, Facts, Failure, LOST, Nodes};
use program::{Choices, Variant};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoint, ShapeRecord, State};
use crate::config::Config;
use crate::device::Device;
use crate::digest;
use crate::engine::Engine;
use crate::error::{Result, TrainError};
use crate::resume;
use crate::run::{Observer, Outcome};
use crate::source::ModelSource;
use crate::trainer::Trainer;

/// A command that all nodes carry out at once.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Part {
    /// Read model and data; where a run is resumed, as it began.
    Begin { from: Option<Box<State>> },
    /// Compile for these shapes, and load what does not come from a checkpoint.
    Load { shapes: Vec<ShapeRecord>, choices: Choices, resumed: bool },
    /// Compares the facts that nodes have read.
    Compare,
    /// A step on the next rows.
    Step,
    /// The loss over the held-out rows.
    Evaluate,
    /// It is over; true if a user requested the end.
    End { interrupted: bool },
}

/// The first byte of a part among the orders of node 0; those to a session (`program::nodes`) and
/// documents (`data_shard`) begin with others.
const PART: u8 = 255;

impl Part {
    fn to_bytes(&self) -> Vec<u8> {
        let text = serde_json::to_vec(self).expect("a part is always representable as JSON");
        [&[PART][..], &text].concat()
    }

    /// None where the bytes are an order to a session.
    fn from_bytes(bytes: &[u8]) -> Option<Result<Part>> {
        let text = bytes.strip_prefix(&[PART])?;
        Some(serde_json::from_slice(text).map_err(|error| unexpected(&error.to_string())))
    }
}

/// Node 0 sent what does not belong here.
fn unexpected(what: &str) -> TrainError {
    TrainError::Failed(format!("node 0 sent an order out of place: {what}"))
}

pub(crate) fn failed(failure: Failure) -> TrainError {
    TrainError::Node { text: format!("the run was ended by {failure}"), code: failure.code }
}

/// The error that ended the run on any node, rather than its consequence here.
pub(crate) fn root(nodes: Option<&Nodes>, error: TrainError) -> TrainError {
    // Others may have given up this one, which was stopped for long.
    let is_root = |nodes: &Nodes, failure: &Failure| failure.node != nodes.node || failure.code == LOST;
    let cause = |nodes: &Nodes| nodes.failure().filter(|failure| is_root(nodes, failure));
    nodes.and_then(cause).map_or(error, failed)
}

/// An error on node 0 where a node has other facts.
pub(crate) fn agree(nodes: &Nodes, what: &str, facts: &Facts) -> Result<()> {
    let own = facts.to_json().to_string();
    if nodes.node != 0 {
        return nodes.send(0, Channel::Reply, &[own.as_bytes()]).map_err(failed);
    }
    let mut differences = Vec::new();
    for node in nodes.others() {
        let bytes = nodes.receive(node, Channel::Reply, what).map_err(failed)?;
        let other = Facts::from_json(&serde_json::from_slice(&bytes).unwrap_or_default());
        differences.extend(facts.differences(node, &other));
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(TrainError::Usage(format!("the nodes do not have the same run:\n  {}", differences.join("\n  "))))
}

impl Device {
    /// The other nodes, where this one leads.
    fn followers(&self) -> Option<&Arc<Nodes>> {
        self.nodes.as_ref().filter(|nodes| nodes.node == 0)
    }

    /// Sends commands to the nodes that this one leads.
    pub(crate) fn tell(&self, part: &Part) -> Result<()> {
        let Some(nodes) = self.followers() else { return Ok(()) };
        nodes.tell(Channel::Command, &[&part.to_bytes()]).map_err(failed)
    }

    /// Does a part together with the nodes that this one leads.
    pub(crate) fn together<T>(&self, part: &Part, run: impl FnOnce() -> Result<T>) -> Result<T> {
        self.tell(part)?;
        if let Some(nodes) = self.followers() {
            nodes.set_together(true);
        }
        let result = run();
        if let Some(nodes) = self.followers() {
            nodes.set_together(false);
        }
        result
    }

    /// An error where a node has other facts than node 0.
    pub(crate) fn agree(&self, what: &str, facts: &Facts) -> Result<()> {
        self.nodes.as_ref().map_or(Ok(()), |nodes| agree(nodes, what, facts))
    }

    /// An error where a node has compiled something else.
    pub(crate) fn agree_on_program(&self, engine: &Engine) -> Result<()> {
        if self.nodes.is_none() {
            return Ok(());
        }
        let digest = digest::of_bytes(engine.program().to_string().as_bytes());
        self.agree("the compilation of the model", &Facts([("compiled program".to_owned(), digest)].into()))
    }
}

impl Trainer {
    /// Facts of model and data that must be equal on every node.
    fn facts(&mut self) -> Result<Facts> {
        let model = self.model_digest()?.clone();
        let digest = |of: Option<crate::checkpoint::DataDigest>| of.map_or("none".to_owned(), |of| of.digest);
        let held_out = self.feed.as_ref().and_then(|feed| feed.validation_digest());
        let facts = [
            ("`config.json` of the model", model.config),
            ("weights of the model", model.weights.unwrap_or_else(|| "drawn".to_owned())),
            ("documents", digest(self.data_digest())),
            ("documents held out for evaluation", digest(held_out)),
        ];
        Ok(Facts(facts.map(|(name, value)| (name.to_owned(), value)).into()))
    }

    /// An error where a node has read something else.
    pub(crate) fn compare_nodes(&mut self) -> Result<()> {
        if self.device.nodes.is_none() {
            return Ok(());
        }
        self.device.tell(&Part::Compare)?;
        let facts = self.facts()?;
        self.device.agree("the reading of model and data", &facts)
    }
}

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
            match part? {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_told_from_orders_to_a_session() {
        for part in [Part::Step, Part::End { interrupted: true }] {
            let read = Part::from_bytes(&part.to_bytes()).unwrap().unwrap();
            assert_eq!(format!("{read:?}"), format!("{part:?}"));
        }
        assert!(Part::from_bytes(&[3, 0, 0, 0, 0, 0, 0, 0, 0]).is_none());
        assert!(Part::from_bytes(b"").is_none());
        assert!(Part::from_bytes(b"\xffnothing").unwrap().is_err());
    }
}
