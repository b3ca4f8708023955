//! The tensors that a batch brings to a model: a row each, with name, type, axes and where its numbers come from.
//!
//! Models name the rows that they read, the model language offers them, and the loop feeds them; nothing else lists
//! them. Knows no model.

use std::borrow::Cow;

use rayon::prelude::*;
use tensor::DType;

use crate::batch::Batch;
use crate::pairs;

/// The source of an input's numbers.
#[derive(Clone, Copy, Debug)]
pub enum Feed {
    /// Numbers of the micro-batch itself.
    I32(fn(&Batch) -> &[i32]),
    F32(fn(&Batch) -> &[f32]),
    U8(fn(&Batch) -> &[u8]),
    /// Numbers that are made of the preferences of the micro-batch.
    MadeI32(fn(&Batch) -> Vec<i32>),
    MadeF32(fn(&Batch) -> Vec<f32>),
    /// A scalar of the step of this name and type, which the loop writes.
    Scalar(DType),
}

/// An input that the model language may read from a batch.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    pub name: &'static str,
    /// Names of the axes, outermost first: `B` rows, `T` tokens of a row, `P` patches of images, a number as it is, `N` what
    /// the architecture says; of `P/N`, groups of patches, it says the size. A scalar has none, and one element.
    pub axes: &'static [&'static str],
    pub feed: Feed,
    pub doc: &'static str,
}

const ROWS: &[&str] = &["B", "T"];
/// Numbers of each token, of which a task says how many.
const WIDE: &[&str] = &["B", "T", "N"];
/// All patches of a batch as one row.
const PATCHES: &[&str] = &["1", "P"];

/// Every input that there is.
pub const INPUTS: [Input; 46] = [
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
        name: "last_query",
        axes: ROWS,
        feed: Feed::MadeI32(pairs::last_queries),
        doc: "index in the row of the last token that may see the token: less than the last of all where answers share a prompt",
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
        doc: "number of the token's answer: of pair p 2p if chosen, 2p + 1 if rejected, of answers with verdicts and of \
              samples their number; −1 outside",
    },
    Input {
        name: "pair_weights",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::weights),
        doc: "1 in entry p, counted over all rows, of each pair, answer with a verdict or sample p; 0 after the last",
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
        feed: Feed::MadeF32(|batch| pairs::or_zeros(batch, &batch.reference_logps)),
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
        name: "advantages",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::advantages),
        doc: "in the entry of each sample by how much it is better than others to its prompt",
    },
    Input {
        name: "old_logps",
        axes: ROWS,
        feed: Feed::MadeF32(|batch| pairs::or_zeros(batch, &batch.old_logps)),
        doc: "log-probability of the target under the policy before its updates; 0 where it is not known",
    },
    Input {
        name: "old_known",
        axes: ROWS,
        feed: Feed::MadeF32(|batch| pairs::known(batch, &batch.old_logps)),
        doc: "1 where `old_logps` has a value, else 0",
    },
    Input {
        name: "sampling_logps",
        axes: ROWS,
        feed: Feed::MadeF32(|batch| pairs::or_zeros(batch, &batch.sampling_logps)),
        doc: "log-probability of the target when it was drawn; 0 where it is not known",
    },
    Input {
        name: "sampling_known",
        axes: ROWS,
        feed: Feed::MadeF32(|batch| pairs::known(batch, &batch.sampling_logps)),
        doc: "1 where `sampling_logps` has a value, else 0",
    },
    Input {
        name: "teacher_logits",
        axes: WIDE,
        feed: Feed::F32(|batch| &batch.teacher.logits),
        doc: "logits of the teacher",
    },
    Input {
        name: "teacher_ids",
        axes: WIDE,
        feed: Feed::I32(|batch| &batch.teacher.ids),
        doc: "the tokens that the teacher finds likeliest; −1 is none",
    },
    Input {
        name: "teacher_logps",
        axes: WIDE,
        feed: Feed::F32(|batch| &batch.teacher.logps),
        doc: "the teacher's log-probabilities of `teacher_ids`",
    },
    Input {
        name: "ranks",
        axes: ROWS,
        feed: Feed::MadeF32(pairs::ranks),
        doc: "in entry i the share of the trained targets that i others come before, from 0 to 1; 2 after the last",
    },
    Input {
        name: "token_axes",
        axes: &["B", "T", "3"],
        feed: Feed::I32(|batch| &batch.patches.axes),
        doc: "time, row and column of the token",
    },
    Input {
        name: "image_rows",
        axes: ROWS,
        feed: Feed::I32(|batch| &batch.patches.rows),
        doc: "row of `image_tokens` that the token is; −1 for text",
    },
    Input {
        name: "text",
        axes: ROWS,
        feed: Feed::F32(|batch| &batch.patches.text),
        doc: "1 for text, 0 for tokens of images",
    },
    Input {
        name: "text_ids",
        axes: ROWS,
        feed: Feed::I32(|batch| &batch.patches.text_ids),
        doc: "tokens, with the architecture's padding in the place of those of images",
    },
    Input {
        name: "image_last",
        axes: ROWS,
        feed: Feed::I32(|batch| &batch.patches.last_key),
        doc: "index in the row of the last token of the image that a token belongs to, of text its own",
    },
    Input {
        name: "image_tokens",
        axes: &["1", "P/N"],
        feed: Feed::I32(|batch| &batch.patches.tokens),
        doc: "index among all tokens of the batch of each group of patches that makes a token; −1 for padding",
    },
    Input {
        name: "patches",
        axes: &["1", "P", "N"],
        feed: Feed::U8(|batch| &batch.patches.pixels),
        doc: "red, green and blue of each pixel of each patch, row by row",
    },
    Input {
        name: "pixel_values",
        axes: &["3", "256"],
        feed: Feed::F32(|batch| &batch.patches.values),
        doc: "normalized number of each value of a pixel, by channel",
    },
    Input {
        name: "patch_places",
        axes: &["1", "P", "2"],
        feed: Feed::I32(|batch| &batch.patches.places),
        doc: "row and column of the patch in its image",
    },
    Input {
        name: "patch_rows",
        axes: PATCHES,
        feed: Feed::MadeI32(|batch| batch.patches.places.iter().step_by(2).copied().collect()),
        doc: "row of the patch",
    },
    Input {
        name: "patch_columns",
        axes: PATCHES,
        feed: Feed::MadeI32(|batch| batch.patches.places.iter().skip(1).step_by(2).copied().collect()),
        doc: "column of the patch",
    },
    Input {
        name: "patch_entries",
        axes: PATCHES,
        feed: Feed::I32(|batch| &batch.patches.entries),
        doc: "entry of a square table of positions",
    },
    Input {
        name: "patch_corners",
        axes: &["1", "P", "4"],
        feed: Feed::I32(|batch| &batch.patches.corners),
        doc: "entries around the patch of a table that the image is stretched over",
    },
    Input {
        name: "patch_corner_weights",
        axes: &["1", "P", "4"],
        feed: Feed::F32(|batch| &batch.patches.corner_weights),
        doc: "weights of `patch_corners` in their mean",
    },
    Input {
        name: "image_first_patch",
        axes: PATCHES,
        feed: Feed::I32(|batch| &batch.patches.picture[0]),
        doc: "index of the first patch of the image",
    },
    Input {
        name: "image_last_patch",
        axes: PATCHES,
        feed: Feed::I32(|batch| &batch.patches.picture[1]),
        doc: "index of the last patch of the image",
    },
    Input {
        name: "window_first_patch",
        axes: PATCHES,
        feed: Feed::I32(|batch| &batch.patches.window[0]),
        doc: "index of the first patch of the window of attention",
    },
    Input {
        name: "window_last_patch",
        axes: PATCHES,
        feed: Feed::I32(|batch| &batch.patches.window[1]),
        doc: "index of the last patch of the window of attention",
    },
    Input {
        name: "micro_step",
        axes: &[],
        feed: Feed::Scalar(DType::I32),
        doc: "number of the micro-batch, for dropout",
    },
];

/// For each token the index in its row of the last token that may see it, documents aside.
pub fn last_queries(batch: &Batch) -> Vec<i32> {
    pairs::last_queries(batch)
}

/// The places of the tokens whose logits are computed, which the compiler reads where these are not all: no model does.
pub const LOGITS: [Input; 3] = [
    Input {
        name: "logit_tokens",
        axes: &["1", "N"],
        feed: Feed::MadeI32(Batch::tokens_of_logits),
        doc: "index among all tokens of the batch of each token with a target; −1 after the last",
    },
    Input {
        name: "logit_places",
        axes: ROWS,
        feed: Feed::MadeI32(Batch::places_of_logits),
        doc: "place of the token among those with a target; −1 for the others",
    },
    Input {
        name: "logit_targets",
        axes: &["1", "N"],
        feed: Feed::MadeI32(Batch::targets_of_logits),
        doc: "`targets` of the tokens that have one; −100 after the last",
    },
];

/// The row of a name.
pub fn input(name: &str) -> Option<&'static Input> {
    INPUTS.iter().chain(&LOGITS).find(|input| input.name == name)
}

impl Input {
    pub fn dtype(&self) -> DType {
        match self.feed {
            Feed::I32(_) | Feed::MadeI32(_) => DType::I32,
            Feed::F32(_) | Feed::MadeF32(_) => DType::F32,
            Feed::U8(_) => DType::U8,
            Feed::Scalar(dtype) => dtype,
        }
    }

    /// The contents that a batch brings, little-endian; none for a scalar of the step.
    pub fn bytes<'a>(&self, batch: &'a Batch) -> Option<Cow<'a, [u8]>> {
        let made = match self.feed {
            Feed::U8(of) => return Some(Cow::Borrowed(of(batch))),
            Feed::I32(of) => little_endian(of(batch), i32::to_le_bytes),
            Feed::F32(of) => little_endian(of(batch), f32::to_le_bytes),
            Feed::MadeI32(of) => little_endian(&of(batch), i32::to_le_bytes),
            Feed::MadeF32(of) => little_endian(&of(batch), f32::to_le_bytes),
            Feed::Scalar(_) => return None,
        };
        Some(Cow::Owned(made))
    }
}

/// Numbers that one thread writes at a time: patches of images are many.
const AT_A_TIME: usize = 1 << 16;

fn little_endian<T: Copy + Sync>(values: &[T], bytes_of: fn(T) -> [u8; 4]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * values.len()];
    bytes.par_chunks_mut(4 * AT_A_TIME).zip(values.par_chunks(AT_A_TIME)).for_each(|(bytes, values)| {
        for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(values) {
            *bytes = bytes_of(*value);
        }
    });
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patches::Form;

    #[test]
    fn every_row_has_the_size_of_its_axes() {
        let batch = Batch::from_labels(2, 3, vec![1; 6], &[1; 6], None, None).unwrap();
        let form = Form { token: 9, width: 12, side: 2, window: 0, table: 5, stretched: true, breaks: false, pad: 0 };
        let batch = Batch { patches: form.lay_out(&batch, &[]).unwrap(), ..batch };
        for of in INPUTS {
            if of.axes.iter().any(|axis| axis.contains(['P', 'N'])) {
                continue;
            }
            let extent = |axis: &&str| axis.parse().unwrap_or(if *axis == "B" { 2 } else { 3 });
            let size = of.axes.iter().map(extent).product::<usize>();
            match of.bytes(&batch) {
                Some(bytes) => assert_eq!(bytes.len(), size * of.dtype().size(), "{}", of.name),
                None => assert!(of.axes.is_empty(), "{}", of.name),
            }
            assert_eq!(INPUTS.iter().filter(|other| other.name == of.name).count(), 1, "{}", of.name);
        }
        assert!(input("labels").is_none() && input("targets").is_some());
    }
}
