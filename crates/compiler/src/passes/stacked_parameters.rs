//! Parameters that the model stacks itself, such as the matrices of experts that files keep one by one: they are
//! contiguous, in the order of the stack.

use graph::{Graph, Origin, ParameterId};
use ops::id;

use crate::CompileError;
use crate::memory::ALIGNMENT_ELEMENTS;

pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let groups = graph.parameters.iter().filter_map(|of| of.merge_group);
    let mut next = groups.map(|(group, _)| group + 1).max().unwrap_or(0);
    for index in 0..graph.nodes.len() {
        let node = &graph.nodes[index];
        let parameter = |value| match graph.value(value).origin {
            Origin::Parameter(ParameterId(id)) => Some(id as usize),
            Origin::Input | Origin::Node | Origin::Constant | Origin::State(_) => None,
        };
        let Some(members) = node.inputs.iter().map(|id| parameter(*id)).collect::<Option<Vec<usize>>>() else {
            continue;
        };
        let free = members.iter().all(|id| graph.parameters[*id].merge_group.is_none());
        if node.op != id::STACK || !free {
            continue;
        }
        for id in &members {
            let of = &graph.parameters[*id];
            if !of.shape.iter().product::<usize>().is_multiple_of(ALIGNMENT_ELEMENTS) {
                let place = node.at.as_deref().unwrap_or("the model");
                let text = format!(
                    "{place}: `{}` has {:?} elements, and matrices that lie one after another need a multiple of \
                     {ALIGNMENT_ELEMENTS}",
                    of.name, of.shape
                );
                return Err(CompileError::Model(text));
            }
        }
        for (position, id) in members.into_iter().enumerate() {
            graph.parameters[id].merge_group = Some((next, position as u32));
        }
        next += 1;
    }
    Ok(())
}
