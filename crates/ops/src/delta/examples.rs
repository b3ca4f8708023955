//! The calls that examples of both passes share.

use tensor::Attrs;

use crate::op::ExampleInput;

/// A call: (B, T, key_heads, heads, DK, DV), where documents of a row start, the logarithm of the strongest decay, attributes.
pub struct Given {
    pub shape: [usize; 6],
    pub starts: Vec<i32>,
    pub least: f64,
    pub attrs: Attrs,
}

impl Given {
    /// Rows that hold documents of these lengths.
    fn new([batch, key_heads, heads, key_dim, value_dim]: [usize; 5], documents: &[usize]) -> Given {
        let starts = starts(documents);
        let shape = [batch, starts.len(), key_heads, heads, key_dim, value_dim];
        Given { shape, starts: starts.repeat(batch), least: -2.0, attrs: Attrs::new() }
    }

    /// q, k, v, g, beta: keys of about length 1, as rows that were normalised have, decays of every size.
    pub fn tensors(&self) -> Vec<ExampleInput> {
        let [batch, tokens, key_heads, heads, key_dim, value_dim] = self.shape;
        let normal = |heads: usize, columns: usize, scale: f64| ExampleInput::Normal {
            shape: vec![batch, tokens, heads, columns],
            scale,
        };
        let length = (key_dim as f64).powf(-0.5);
        let gate = |low: f64, high: f64| ExampleInput::UniformF32 { shape: vec![batch, tokens, heads], low, high };
        vec![
            normal(key_heads, key_dim, length),
            normal(key_heads, key_dim, length),
            normal(heads, value_dim, 1.0),
            gate(self.least, 0.0),
            gate(0.05, 1.0),
        ]
    }

    pub fn document_start(&self) -> ExampleInput {
        ExampleInput::Ints { shape: self.shape[..2].to_vec(), values: self.starts.clone() }
    }
}

/// `document_start` of a row with documents of these lengths.
pub fn starts(documents: &[usize]) -> Vec<i32> {
    let mut first = 0;
    let mut row = Vec::new();
    for length in documents {
        row.extend(vec![first; *length]);
        first += *length as i32;
    }
    row
}

/// Rows below, at and above the length of a chunk, documents that end within and between them, shared key heads, heads of
/// every width, strong and weak decays.
pub fn calls() -> Vec<Given> {
    vec![
        Given::new([2, 2, 4, 8, 8], &[5, 1, 6]),
        Given::new([1, 1, 2, 5, 7], &[3, 64, 3]),
        Given { attrs: Attrs::new().with("scale", 0.3), ..Given::new([1, 2, 2, 16, 16], &[64, 64]) },
        Given::new([3, 1, 2, 3, 40], &[1]),
        Given::new([2, 1, 2, 16, 16], &[200]),
        Given::new([1, 1, 2, 128, 128], &[37, 60, 40]),
        Given::new([1, 3, 3, 66, 33], &[130]),
        // Far tokens of a chunk, and chunks, depend on each other where little decays.
        Given { least: -0.02, ..Given::new([1, 1, 2, 64, 128], &[100, 2, 40]) },
        Given { least: -0.02, ..Given::new([1, 1, 1, 128, 64], &[64, 65]) },
        Given { attrs: Attrs::new().with("additive", true), ..Given::new([2, 2, 4, 8, 8], &[5, 1, 6]) },
        Given {
            attrs: Attrs::new().with("additive", true).with("scale", 1.0),
            least: -0.05,
            ..Given::new([1, 1, 4, 128, 64], &[37, 60, 40])
        },
        Given { attrs: Attrs::new().with("additive", true), ..Given::new([1, 3, 3, 66, 33], &[130]) },
        Given { attrs: Attrs::new().with("additive", true), ..Given::new([2, 2, 4, 64, 128], &[64, 64, 5]) },
    ]
}
