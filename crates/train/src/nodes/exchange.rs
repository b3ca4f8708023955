//! Exchanges between nodes: facts that must be equal, the least of their machines, the failure of one.

use net::{Channel, Facts, Failure, LOST, Nodes};

use crate::error::{Result, TrainError};

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

/// The least of memory and threads over all nodes.
pub fn least(nodes: &Nodes, own: (usize, usize)) -> std::result::Result<(usize, usize), Failure> {
    let bytes = |of: (usize, usize)| [(of.0 as u64).to_le_bytes(), (of.1 as u64).to_le_bytes()].concat();
    let numbers = |from: &[u8]| {
        let number = |at: usize| from.get(at..at + 8).map_or(0, |of| u64::from_le_bytes(of.try_into().expect("eight")));
        (number(0) as usize, number(8) as usize)
    };
    if nodes.node != 0 {
        nodes.send(0, Channel::Reply, &[&bytes(own)])?;
        return Ok(numbers(&nodes.receive(0, Channel::Command, "the description of the machines")?));
    }
    let mut least = own;
    for node in nodes.others() {
        let of = numbers(&nodes.receive(node, Channel::Reply, "the description of the machines")?);
        least = (least.0.min(of.0), least.1.min(of.1));
    }
    nodes.tell(Channel::Command, &[&bytes(least)])?;
    Ok(least)
}
