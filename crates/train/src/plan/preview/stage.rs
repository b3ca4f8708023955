//! The stages of a run that can be shown without running it.

use program::Machine;

use super::{Across, Preview, documents, graph, resolved};
use crate::config::Config;
use crate::engine::machines;
use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;
use crate::plan::recommend::recommended;

/// The stage of compilation that is shown of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Config,
    Graph,
    Program,
    Memory,
    Plan,
    /// The plan as JSON, for scripts.
    PlanJson,
}

impl Stage {
    const NAMES: [(&str, Stage); 6] = [
        ("config", Stage::Config),
        ("graph", Stage::Graph),
        ("program", Stage::Program),
        ("memory", Stage::Memory),
        ("plan", Stage::Plan),
        ("plan.json", Stage::PlanJson),
    ];

    /// By its name on the command line.
    pub fn named(name: &str) -> Result<Stage> {
        let found = Stage::NAMES.iter().find(|(of, _)| *of == name);
        found.map(|(_, stage)| *stage).ok_or_else(|| {
            let names = Stage::NAMES.map(|(of, _)| format!("`{of}`")).join(", ");
            TrainError::Usage(format!("`{name}` is not a stage of a run; expected one of {names}"))
        })
    }
}

/// A stage as text, for a machine that need not be this one; `of` is the name by which it was requested, which may
/// mean several nodes. `unavailable`: why datasets are not available, which are read otherwise.
pub fn show(
    stage: Stage,
    config: &Config,
    source: &ModelSource,
    machine: &Machine,
    of: Option<&str>,
    unavailable: &[String],
) -> Result<String> {
    let nodes = of.map(machines::requested).transpose()?;
    let nodes = nodes.and_then(|of| of.nodes.map(|(count, rate)| (count, of.gpus, rate)));
    let one_node = |config: &Config| if nodes.is_some() { config.of_one_node() } else { config.clone() };
    let data = documents(&one_node(config), source, unavailable)?;
    let alone = &recommended(&one_node(config), source, machine, data.as_ref().ok(), &|| false)?;
    let mut whole = alone.clone();
    whole.sharding.gradient_compression = config.sharding.gradient_compression;
    let config = &whole;
    let preview = || Preview::advised(alone, source, machine, data.as_ref().ok());
    let planned = || {
        let mut preview = preview()?;
        if let Some(shape) = nodes {
            preview.across = Some(Across::new(config, source, machine, data.as_ref().ok(), shape)?);
        }
        preview.unavailable = data.as_ref().err().cloned();
        Ok::<Preview, TrainError>(preview)
    };
    Ok(match stage {
        Stage::Config => resolved(config, source, machine, data.as_ref().ok())?,
        Stage::Graph => graph(config, source, machine, data.as_ref().ok())?.to_string(),
        Stage::Program => preview()?.program.to_string(),
        Stage::Memory => preview()?.memory_text(),
        Stage::Plan => planned()?.plan_text(),
        Stage::PlanJson => format!("{:#}\n", planned()?.to_json()),
    })
}
