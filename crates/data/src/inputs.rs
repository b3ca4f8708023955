//! The tensors that a batch brings to a model: a row each, with name, type, axes and where its numbers come from.
//!
//! Models name the rows that they read, the model language offers them, and the loop feeds them; nothing else lists
//! them. Knows no model.

use tensor::DType;

use crate::batch::Batch;
use crate::pairs;

/// Where an input's numbers come from.
#[derive(Clone, Copy, Debug)]
pub enum Feed {
    /// Numbers of the micro-batch.
    I32(fn(&Batch) -> &[i32]),
    F32(fn(&Batch) -> &[f32]),
    /// Numbers that are made of the preferences of the micro-batch.
    MadeI32(fn(&Batch) -> Vec<i32>),
    MadeF32(fn(&Batch) -> Vec<f32>),
    /// A scalar of the step of this name and type, which the loop writes.
    Scalar(DType),
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    pub name: &'static str,
    /// Names of the axes, outermost first: `B` rows, `T` tokens of a row. A scalar has none, and one element.
    pub axes: &'static [&'static str],
    pub feed: Feed,
    pub doc: &'static str,
}

const ROWS: &[&str] = &["B", "T"];

/// Every input that there is.
pub const INPUTS: [Input; 18] = [
    Input { name: "input_ids", axes: ROWS, feed: Feed::I32(|batch| &batch.input_ids), doc: "tokens" },
    Input {
        name: "position_ids",
        axes: ROWS,
        feed: Feed::I32(|batch| &batch.position_ids),
        doc: "position within the document",
    },
    Input {
        name: "document_start",
        axes: ROWS,
        feed: Feed::I32(|batch| &batch.document_start),
        doc: "index in the row at which the token's document starts",
    },
    Input {
        name: "targets",
        axes: ROWS,
        feed: Feed::I32(|batch| &batch.targets),
        doc: "the next token of the same document; −100 is not trained",
    },
    Input {
        name: "weights",
        axes: ROWS,
        feed: Feed::F32(|batch| &batch.weights),
        doc: "weight of the target in the loss",
    },
    Input {
        name: "present",
        axes: ROWS,
        feed: Feed::F32(|batch| &batch.present),
        doc: "1 for tokens of documents, 0 for padding",
    },
    Input {
        name: "documents",
        axes: ROWS,
        feed: Feed::MadeI32(pairs::documents),
        doc: "number of the token's answer: of pair p 2p if chosen, 2p + 1 if rejected, of answers with verdicts their \
              number; −1 outside",
    },
    Input {
        name: "pair_weights",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::weights),
        doc: "1 in entry p, counted over all rows, of each pair or answer with a verdict p; 0 after the last",
    },
    Input {
        name: "common",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::common),
        doc: "1 for targets of an answer that are within the length of the shorter answer of the pair",
    },
    Input {
        name: "reference_logps",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::reference),
        doc: "log-probability of the target under the reference; 0 where nothing is trained",
    },
    Input {
        name: "desirable",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::desirable),
        doc: "1 in the entry of each answer that is good, as `pair_weights`; else 0",
    },
    Input {
        name: "divergence",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::divergence),
        doc: "in the entry of each answer the estimate of the KL divergence from the reference, from mismatched answers",
    },
    Input {
        name: "next_tokens",
        axes: ROWS,
        feed: Feed::MadeI32(pairs::next_tokens),
        doc: "the next token of the same document, be it trained or not; −100 after its last",
    },
    Input {
        name: "followed",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::followed),
        doc: "1 where `next_tokens` has a token, else 0",
    },
    Input {
        name: "last",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::last),
        doc: "1 at the last token of both sides of each pair, else 0",
    },
    Input {
        name: "first_pair",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::first),
        doc: "1 in the first entry of a micro-batch that has pairs, else 0",
    },
    Input {
        name: "margins",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::margins),
        doc: "in the entry of each pair by how much its chosen side is better, 0 where the data do not say",
    },
    Input {
        name: "micro_step",
        axes: &[],
        feed: Feed::Scalar(DType::I32),
        doc: "number of the micro-batch, for dropout",
    },
];

/// The row of a name.
pub fn input(name: &str) -> Option<&'static Input> {
    INPUTS.iter().find(|input| input.name == name)
}

impl Input {
    pub fn dtype(&self) -> DType {
        match self.feed {
            Feed::I32(_) | Feed::MadeI32(_) => DType::I32,
            Feed::F32(_) | Feed::MadeF32(_) => DType::F32,
            Feed::Scalar(dtype) => dtype,
        }
    }

    /// The contents that a batch brings, little-endian; none for a scalar of the step.
    pub fn bytes(&self, batch: &Batch) -> Option<Vec<u8>> {
        match self.feed {
            Feed::I32(of) => Some(of(batch).iter().flat_map(|v| v.to_le_bytes()).collect()),
            Feed::F32(of) => Some(of(batch).iter().flat_map(|v| v.to_le_bytes()).collect()),
            Feed::MadeI32(of) => Some(of(batch).iter().flat_map(|v| v.to_le_bytes()).collect()),
            Feed::MadeF32(of) => Some(of(batch).iter().flat_map(|v| v.to_le_bytes()).collect()),
            Feed::Scalar(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_the_size_of_its_axes() {
        let batch = Batch::from_labels(2, 3, vec![1; 6], &[1; 6], None, None).unwrap();
        for of in INPUTS {
            let size = of.axes.iter().map(|axis| if *axis == "B" { 2 } else { 3 }).product::<usize>();
            match of.bytes(&batch) {
                Some(bytes) => assert_eq!(bytes.len(), size * of.dtype().size(), "{}", of.name),
                None => assert!(of.axes.is_empty(), "{}", of.name),
            }
            assert_eq!(INPUTS.iter().filter(|other| other.name == of.name).count(), 1, "{}", of.name);
        }
        assert!(input("labels").is_none() && input("targets").is_some());
    }
}
