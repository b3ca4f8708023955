//! The data of several nodes: which rows each of them reads, and what all tell one another of the documents that came
//! of them. Knows nodes and documents; not how rows are read.

use std::sync::Arc;

use data::{EncodedCorpus, Held, RowShard};
use net::{Channel, Facts, Nodes};

use crate::error::{Result, TrainError};
use crate::nodes::exchange::{agree, failed};

/// Tag of node 0's message on all documents: no command begins with it.
const DOCUMENTS: u8 = 0;

/// The part of the data that a node reads, together with others of its host.
pub(crate) struct DataShard<'a> {
    nodes: &'a Nodes,
    /// Nodes in a row that have the same part.
    together: usize,
}

impl<'a> DataShard<'a> {
    pub fn new(nodes: &'a Nodes, together: usize) -> DataShard<'a> {
        assert!(nodes.count.is_multiple_of(together), "every host has as many nodes");
        DataShard { nodes, together }
    }

    /// The rows that are read here.
    pub fn shard(&self) -> RowShard {
        RowShard { number: self.nodes.node / self.together, of: self.nodes.count / self.together }
    }

    /// An error unless the rows of all nodes follow from the same files and options.
    pub fn compare(&self, origin: String) -> Result<()> {
        agree(self.nodes, "the reading of the data", &Facts([("files of the documents".to_owned(), origin)].into()))
    }

    /// The documents of all nodes as one corpus.
    pub fn join(&self, own: EncodedCorpus) -> Result<EncodedCorpus> {
        let parts = self.gather(Held::of(&own.corpus, &own.summary).to_bytes())?;
        let parts: Option<Vec<Held>> = parts.iter().map(|bytes| Held::from_bytes(bytes)).collect();
        let parts = parts.ok_or_else(|| TrainError::Failed("a node's report of its documents is damaged".into()))?;
        if parts.len() == 1 {
            return Ok(own);
        }
        let (corpus, summary) = data::join(&own.corpus, &parts, self.shard().number).map_err(TrainError::data)?;
        Ok(EncodedCorpus { corpus: Arc::new(corpus), summary, notes: own.notes })
    }

    /// Gathers the messages of all parts, in their order, on all nodes.
    fn gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let DataShard { nodes, together } = self;
        if nodes.node != 0 {
            nodes.send(0, Channel::Reply, &[&own]).map_err(failed)?;
            let order = nodes.next_command(&mut || {}).map_err(failed)?;
            // Anything else is the end of the run.
            return unframed(&order).ok_or(TrainError::Stopped);
        }
        let mut parts = vec![own];
        for node in nodes.others() {
            let held = nodes.next_reply(node).map_err(failed)?;
            if node % together == 0 {
                parts.push(held);
            } else if parts.last() != Some(&held) {
                let text = format!("node {node} did not read the same rows as node {}, of the same host", node - 1);
                return Err(TrainError::Usage(text));
            }
        }
        nodes.tell(Channel::Command, &[&framed(&parts)]).map_err(failed)?;
        Ok(parts)
    }
}

fn framed(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![DOCUMENTS];
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part);
    }
    bytes
}

fn unframed(bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut rest = bytes.strip_prefix(&[DOCUMENTS])?;
    let mut parts = Vec::new();
    while let Some((length, after)) = rest.split_first_chunk::<8>() {
        let (part, after) = after.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        parts.push(part.to_vec());
        rest = after;
    }
    rest.is_empty().then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_as_they_were_sent() {
        let parts = vec![vec![1, 2, 3], Vec::new(), vec![0; 300]];
        let bytes = framed(&parts);
        assert_eq!(unframed(&bytes), Some(parts));
        assert_eq!(unframed(&bytes[..bytes.len() - 1]), None);
        assert_eq!(unframed(b"{\"end\": true}"), None);
    }
}
