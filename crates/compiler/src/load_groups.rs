//! Frozen weights that no entry reads, because products read codes of them instead: they take memory only while they are
//! loaded. Those whose codes depend on one another, such as the weights of a group that shares its scale, are loaded together.
//!
//! Knows who reads what; not where anything lies.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use graph::{Graph, Node, Origin, ParameterId, ValueId};
use program::{EntryKind, ParameterSlot, Variant};

use crate::options::CompileOptions;

/// For each parameter the number of the group that it is loaded with; none for resident parameters.
#[derive(Clone, Debug)]
pub(crate) struct LoadGroups(Vec<Option<u32>>);

impl LoadGroups {
    /// Finds the groups from the graphs of all entries, which have the same parameters and the same preparation. A
    /// group is loaded as a whole: it is resident if anything of it is trained, or read by an entry.
    pub fn find(graphs: &[(EntryKind, Variant, Graph)], options: &CompileOptions) -> LoadGroups {
        let table = &graphs.first().expect("at least one entry is requested").2;
        if options.sharding.cuts_weights() {
            // Then layers make codes of them.
            return LoadGroups(vec![None; table.parameters.len()]);
        }
        let mut stays: Vec<bool> = table.parameters.iter().map(|of| of.trainable || of.adapter).collect();
        for (_, _, graph) in graphs {
            let read = graph.nodes.iter().flat_map(|node| &node.inputs).chain(graph.outputs.iter().map(|(_, id)| id));
            for id in read {
                if let Origin::Parameter(ParameterId(index)) = graph.value(*id).origin {
                    stays[index as usize] = true;
                }
            }
        }
        let group_of = groups(&table.prepared);
        let of = |parameter: &graph::Parameter| group_of.get(&parameter.value).copied();
        let kept =
            table.parameters.iter().zip(&stays).filter(|(_, stays)| **stays).filter_map(|(parameter, _)| of(parameter));
        let kept: BTreeSet<usize> = kept.collect();
        let loaded: BTreeSet<usize> = group_of.values().copied().filter(|group| !kept.contains(group)).collect();
        let numbers: BTreeMap<usize, u32> = loaded.into_iter().zip(0..).collect();
        LoadGroups(table.parameters.iter().map(|parameter| numbers.get(&of(parameter)?).copied()).collect())
    }

    /// The group of a parameter, by its place in the table.
    pub fn of(&self, parameter: usize) -> Option<u32> {
        self.0[parameter]
    }
}

/// Returns, for every value that nodes touch, the first of the nodes that depend on one another.
fn groups(nodes: &[Node]) -> HashMap<ValueId, usize> {
    let mut group_of: HashMap<ValueId, usize> = HashMap::new();
    for (number, node) in nodes.iter().enumerate() {
        let touched = || node.inputs.iter().chain(&node.outputs);
        let known: BTreeSet<usize> = touched().filter_map(|id| group_of.get(id).copied()).collect();
        let group = known.first().copied().unwrap_or(number);
        group_of.values_mut().filter(|of| known.contains(of)).for_each(|of| *of = group);
        group_of.extend(touched().map(|id| (*id, group)));
    }
    group_of
}

/// Returns the preparing nodes by the load group of their parameters; none for those of resident parameters.
pub(crate) fn by_group(graph: &Graph, slots: &[ParameterSlot]) -> BTreeMap<Option<u32>, Vec<Node>> {
    let mut known: HashMap<ValueId, u32> = HashMap::new();
    let mut result: BTreeMap<Option<u32>, Vec<Node>> = BTreeMap::new();
    for node in &graph.nodes {
        let of = |id: &ValueId| match graph.value(*id).origin {
            Origin::Parameter(ParameterId(index)) => slots[index as usize].load_group,
            _ => known.get(id).copied(),
        };
        let group = node.inputs.iter().find_map(of);
        known.extend(group.iter().flat_map(|group| node.outputs.iter().map(|id| (*id, *group))));
        result.entry(group).or_default().push(node.clone());
    }
    result
}
