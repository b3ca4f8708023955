//! Commands of node 0 to the other nodes of a run, and the facts in which all must agree.
//!
//! Knows the parts of a run; what they consist of is in `state.rs` and `step.rs`.

use std::sync::Arc;

use net::{Channel, Facts, Nodes};
use program::Choices;
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::engine::device::Device;
use crate::error::{Result, TrainError};
use crate::files::digest;
use crate::nodes::exchange::{agree, failed};
use crate::trainer::checkpoint::{ShapeRecord, State};

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
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Result<Part>> {
        let text = bytes.strip_prefix(&[PART])?;
        Some(serde_json::from_slice(text).map_err(|error| unexpected(&error.to_string())))
    }
}

/// Node 0 sent what does not belong here.
pub(crate) fn unexpected(what: &str) -> TrainError {
    TrainError::Failed(format!("node 0 sent an order out of place: {what}"))
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
