//! Precision: which element type every value has. One file per recipe.

mod uniform;

use graph::Graph;

use crate::{CompileError, CompileOptions};

/// Decides every element type that the graph left open.
pub fn run(graph: &mut Graph, options: &CompileOptions) -> Result<(), CompileError> {
    uniform::run(graph, options.compute)
}
