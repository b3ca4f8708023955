//! Facts of model and data in which the nodes of a run must agree.

use net::Facts;

use crate::error::Result;
use crate::input::data_digest::DataDigest;
use crate::trainer::Trainer;
use crate::trainer::command::Part;

impl Trainer {
    /// Facts of model and data that must be equal on every node.
    pub(crate) fn facts(&mut self) -> Result<Facts> {
        let model = self.model_digest()?.clone();
        let digest = |of: Option<DataDigest>| of.map_or("none".to_owned(), |of| of.digest);
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
