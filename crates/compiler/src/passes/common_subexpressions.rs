//! Computes equal things once: a node with the same operation, inputs and attributes as an earlier
//! one is replaced by it. Gradients of two parameters stay two values, since each has its own place: two biases of terms of
//! one sum have equal ones.

use std::collections::{HashMap, HashSet};

use graph::{Graph, OpId, ValueId};

use crate::CompileError;

pub fn run(graph: &mut Graph) -> Result<(), CompileError> {
    let mut seen: HashMap<(OpId, Vec<ValueId>, String), Vec<ValueId>> = HashMap::new();
    let mut replacement: HashMap<ValueId, ValueId> = HashMap::new();
    let mut kept = Vec::with_capacity(graph.nodes.len());
    let mut gradients: HashSet<ValueId> = graph.gradients.iter().map(|(_, id)| *id).collect();
    for mut node in std::mem::take(&mut graph.nodes) {
        replace(&mut node.inputs, &replacement);
        let key = (node.op, node.inputs.clone(), node.attrs.to_string());
        match seen.get(&key) {
            Some(earlier) if both_gradients(&gradients, &node.outputs, earlier) => kept.push(node),
            Some(earlier) => {
                let pairs = || node.outputs.iter().copied().zip(earlier.iter().copied());
                gradients
                    .extend(pairs().filter(|(id, _)| gradients.contains(id)).map(|(_, id)| id).collect::<Vec<_>>());
                replacement.extend(pairs());
            }
            None => {
                seen.insert(key, node.outputs.clone());
                kept.push(node);
            }
        }
    }
    graph.nodes = kept;
    for (_, id) in graph.outputs.iter_mut() {
        *id = *replacement.get(id).unwrap_or(id);
    }
    for (_, id) in graph.gradients.iter_mut() {
        *id = *replacement.get(id).unwrap_or(id);
    }
    replace(&mut graph.carried, &replacement);
    Ok(())
}

/// Returns true if a value and its equal both are gradients of parameters.
fn both_gradients(gradients: &HashSet<ValueId>, outputs: &[ValueId], earlier: &[ValueId]) -> bool {
    outputs.iter().zip(earlier).any(|(id, equal)| gradients.contains(id) && gradients.contains(equal))
}

fn replace(ids: &mut [ValueId], replacement: &HashMap<ValueId, ValueId>) {
    for id in ids {
        *id = *replacement.get(id).unwrap_or(id);
    }
}

#[cfg(test)]
mod tests {
    use graph::{Element, Init, Phase};
    use ops::{Append, Emit, id};
    use tensor::{Attrs, DType};

    use super::*;

    #[test]
    fn equal_gradients_of_two_parameters_stay_two_values() {
        let mut graph = Graph::default();
        let dy = graph.add_input("dy", Element::Float, vec![4, 8]);
        let biases = ["a", "b"].map(|name| graph.add_parameter(name, vec![8], Init::Zeros, DType::F32));
        let mut append = Append::new(&mut graph, Phase::Backward);
        let sums: Vec<ValueId> = (0..3).map(|_| append.emit(id::SUM_ROWS, &[dy], Attrs::new())[0]).collect();
        graph.nodes = append.nodes;
        graph.gradients = vec![(biases[0], sums[1]), (biases[1], sums[2])];
        graph.outputs.push(("sum".to_owned(), sums[0]));
        run(&mut graph).unwrap();
        let of = |place: usize| graph.gradients[place].1;
        assert_eq!((graph.nodes.len(), of(0)), (2, sums[0]));
        assert_ne!(of(0), of(1));
    }
}
