//! Frozen linears of the layers are kept in codes where the options ask for it: marks their weights. What reads them
//! still reads numbers; `plan/dequantise.rs` makes these.

use graph::{Graph, Origin, ParameterId};
use ops::id;
use tensor::Storage;

use crate::{CompileError, CompileOptions};

pub fn run(graph: &mut Graph, options: &CompileOptions) -> Result<(), CompileError> {
    let Some(quantised) = options.quantised else { return Ok(()) };
    if options.adapter.is_none() && options.training.is_some() {
        return Err(CompileError::Options("quantised weights are frozen: only adapters on them are trained".into()));
    }
    let linears = graph.nodes.iter().filter(|node| node.op == id::LINEAR && node.layer.is_some());
    let weights = linears.filter_map(|node| match graph.value(*node.inputs.get(1)?).origin {
        Origin::Parameter(id) => Some(id),
        _ => None,
    });
    let mut any = false;
    for ParameterId(index) in weights.collect::<Vec<_>>() {
        let parameter = &mut graph.parameters[index as usize];
        if !parameter.table && quantised.fits(&parameter.shape) {
            parameter.storage = Storage::Packed(quantised.packing());
            any = true;
        }
    }
    match any {
        true => Ok(()),
        false => Err(CompileError::Options(format!("{}: no linear of a layer can be quantised", graph.name))),
    }
}
