//! Frozen linears of the layers are kept in codes where the options ask for it, or where their files hold them so: marks
//! their weights. What reads them still reads numbers; `plan/dequantise.rs` makes these.

use graph::{Graph, Origin, ParameterId};
use ops::id;
use tensor::Storage;
use tensor::packed::Quantisation;

use crate::{CompileError, CompileOptions};

pub fn run(graph: &mut Graph, options: &CompileOptions) -> Result<(), CompileError> {
    if options.quantised.is_none() && options.stored.is_empty() {
        return Ok(());
    }
    if options.adapter.is_none() && options.training.is_some() {
        return Err(CompileError::Options("quantised weights are frozen: only adapters on them are trained".into()));
    }
    if options.quantised.is_some() && graph.nodes.iter().any(|node| node.op == id::GROUPED_LINEAR) {
        return Err(CompileError::Options("the matrices of experts cannot be quantised yet".into()));
    }
    let linears = graph.nodes.iter().filter(|node| node.op == id::LINEAR && node.layer.is_some());
    let weights = linears.filter_map(|node| match graph.value(*node.inputs.get(1)?).origin {
        Origin::Parameter(id) => Some(id),
        _ => None,
    });
    let mut any = false;
    for ParameterId(index) in weights.collect::<Vec<_>>() {
        let parameter = &mut graph.parameters[index as usize];
        let fitting = options.quantised.filter(|quantised| quantised.fits(&parameter.shape));
        let packing = options.stored.get(&parameter.name).copied().or(fitting.map(Quantisation::packing));
        if let Some(packing) = packing.filter(|_| !parameter.table && !parameter.saved) {
            parameter.storage = Storage::Packed(packing);
            any = true;
        }
    }
    match any || options.quantised.is_none() {
        true => Ok(()),
        false => Err(CompileError::Options(format!("{}: no linear of a layer can be quantised", graph.name))),
    }
}
