//! The calls that examples of both passes share: every kind of interval, score and head.

use tensor::Attrs;

use crate::op::ExampleInput;

/// A call of either pass.
pub struct Given {
    /// (B, T, heads, kv_heads, D, DV)
    pub shape: [usize; 6],
    pub starts: Vec<i32>,
    /// `last_key`, with `branches` `last_query`.
    pub limit: Option<Vec<i32>>,
    pub has_sink: bool,
    pub attrs: Attrs,
}

impl Given {
    /// Full causal rows, heads of one size.
    fn new([batch, tokens, heads, kv_heads, head_dim]: [usize; 5]) -> Given {
        Given {
            shape: [batch, tokens, heads, kv_heads, head_dim, head_dim],
            starts: vec![0; batch * tokens],
            limit: None,
            has_sink: false,
            attrs: Attrs::new(),
        }
    }

    fn with(self, name: &str, value: impl Into<serde_json::Value>) -> Given {
        Given { attrs: self.attrs.with(name, value), ..self }
    }

    fn values_of(mut self, value_dim: usize) -> Given {
        self.shape[5] = value_dim;
        self
    }

    fn with_sink(self) -> Given {
        Given { has_sink: true, ..self }
    }

    /// Every row holds documents of these lengths.
    fn documents(mut self, lengths: &[usize]) -> Given {
        assert_eq!(lengths.iter().sum::<usize>(), self.shape[1], "documents fill the row");
        let mut first = 0;
        let mut row = Vec::new();
        for length in lengths {
            row.extend(vec![first; *length]);
            first += *length as i32;
        }
        self.starts = row.repeat(self.shape[0]);
        self
    }

    /// One of the rows holds one document.
    fn whole(mut self, row: usize) -> Given {
        let tokens = self.shape[1];
        self.starts[row * tokens..(row + 1) * tokens].fill(0);
        self
    }

    /// Lets the queries of each of these stretches (first, end) see one another whole.
    fn spans(mut self, spans: &[(usize, usize)]) -> Given {
        let last =
            |i: usize| spans.iter().find(|(first, end)| (*first..*end).contains(&i)).map_or(i, |(_, end)| end - 1);
        self.limit = Some((0..self.shape[1]).map(|i| last(i) as i32).collect::<Vec<_>>().repeat(self.shape[0]));
        self
    }

    /// Every row holds documents of these lengths, each of which sees itself whole.
    fn images(self, lengths: &[usize]) -> Given {
        let begins = lengths.iter().scan(0, |first, length| Some(std::mem::replace(first, *first + length)));
        let spans: Vec<(usize, usize)> = begins.zip(lengths).map(|(first, length)| (first, first + length)).collect();
        self.documents(lengths).spans(&spans)
    }

    /// Every row holds documents of a common beginning and branches after it, of these lengths.
    fn branches(mut self, documents: &[(usize, &[usize])]) -> Given {
        let lengths: Vec<usize> =
            documents.iter().map(|(common, branches)| common + branches.iter().sum::<usize>()).collect();
        self = self.documents(&lengths).with("branches", true);
        let mut last_query = Vec::new();
        for ((common, branches), length) in documents.iter().zip(&lengths) {
            let begin = last_query.len();
            last_query.resize(begin + common, begin + length - 1);
            for branch in *branches {
                let end = last_query.len() + branch;
                last_query.resize(end, end - 1);
            }
        }
        self.limit = Some(last_query.iter().map(|last| *last as i32).collect::<Vec<_>>().repeat(self.shape[0]));
        self
    }

    /// Inputs whose gradients are checked by differences.
    pub fn differentiable(&self) -> Vec<usize> {
        match self.shape[1] {
            // The weight of a single key is 1, whatever q and k.
            1 => vec![2],
            _ if matches!(self.attrs.optional_int("window"), Ok(Some(1))) => vec![2],
            2..=DIFFERENTIATED => (0..3).chain(self.has_sink.then(|| 3 + self.optional().len())).collect(),
            _ => vec![],
        }
    }

    /// Returns the tensors q, k, v and document_start.
    pub fn tensors(&self) -> Vec<ExampleInput> {
        let [batch, tokens, heads, kv_heads, head_dim, value_dim] = self.shape;
        let normal = |heads: usize, columns: usize| ExampleInput::Normal {
            shape: vec![batch, tokens, heads, columns],
            scale: 1.0,
        };
        vec![normal(heads, head_dim), normal(kv_heads, head_dim), normal(kv_heads, value_dim), self.ints(&self.starts)]
    }

    /// The limit and the sink, where there are any.
    pub fn optional(&self) -> Vec<ExampleInput> {
        let limit = self.limit.iter().map(|last| self.ints(last));
        let sink = self.has_sink.then(|| ExampleInput::Normal { shape: vec![self.shape[2]], scale: 1.0 });
        limit.chain(sink).collect()
    }

    fn ints(&self, values: &[i32]) -> ExampleInput {
        ExampleInput::Ints { shape: self.shape[..2].to_vec(), values: values.to_vec() }
    }
}

/// Tokens of a row up to which a call is differentiated numerically: many evaluations of the whole.
const DIFFERENTIATED: usize = 100;

/// Masks, scores and head sizes, small.
pub fn calls() -> Vec<Given> {
    vec![
        Given::new([2, 5, 4, 2, 8]).with("scale", 0.35),
        Given::new([1, 1, 2, 1, 8]),
        Given { starts: vec![0, 0, 0, 3, 3, 5, 0, 1, 1, 1, 4, 4], ..Given::new([2, 6, 2, 1, 16]).with("scale", 0.25) },
        Given::new([1, 9, 3, 3, 8]).documents(&[5, 4]).with("scale", 0.4).with("window", 3),
        Given::new([1, 70, 2, 1, 40]).documents(&[37, 33]).with("scale", 0.2),
        // Five tiles of keys, whose sums of dq wait for one another, and two heads that share them.
        Given::new([1, 600, 2, 1, 128]),
        Given::new([1, 20, 2, 1, 132]).documents(&[11, 9]).with("scale", 0.1).with("window", 6),
        // A prefix that sees itself whole, image spans, a whole row without a mask.
        Given::new([1, 70, 2, 1, 16]).spans(&[(0, 30)]),
        Given::new([2, 65, 2, 2, 24]).documents(&[40, 25]).spans(&[(3, 9), (20, 40), (64, 65)]).with("window", 7),
        Given::new([2, 63, 2, 1, 16]).with("bidirectional", true),
        Given::new([1, 33, 2, 1, 8]).with("bidirectional", true).with("window", 4),
        // Images, whose patches see one another whole, shorter and longer than a block's queries and a tile of keys.
        Given::new([1, 900, 2, 2, 64]).images(&[64, 300, 5, 531]),
        Given::new([2, 600, 2, 2, 72]).images(&[150, 450]),
        Given::new([1, 400, 1, 1, 112]).images(&[1, 399]),
        // Capped scores, sinks, values of another size.
        Given::new([1, 40, 2, 1, 16]).with("soft_cap", 2.0),
        Given::new([1, 33, 4, 2, 16]).documents(&[1, 31, 1]).with_sink().with("window", 8),
        Given::new([1, 30, 4, 2, 24]).values_of(16),
        Given::new([1, 21, 2, 1, 16]).values_of(40).spans(&[(2, 11)]).with_sink().with("soft_cap", 3.0),
        Given::new([1, 35, 8, 1, 64]).documents(&[1, 2, 32]),
        Given::new([1, 34, 1, 1, 192]).values_of(128),
        Given::new([1, 34, 2, 1, 256]).with("window", 9),
        Given::new([1, 34, 1, 1, 512]),
        // Several tiles and blocks of every kernel, edges one off, windows of one key and of more than a row.
        Given::new([1, 64, 3, 1, 80]).with("window", 1),
        Given::new([1, 130, 3, 3, 96]).documents(&[1, 128, 1]),
        Given::new([2, 65, 8, 1, 128]).documents(&[64, 1]).with_sink(),
        Given::new([1, 2049, 3, 1, 16]).documents(&[700, 1, 1, 347, 1000]).with("window", 128),
        Given::new([1, 2049, 1, 1, 64]).with("window", 2049),
        Given::new([1, 300, 2, 1, 192]).values_of(128).spans(&[(0, 70), (129, 260)]).with("soft_cap", 5.0),
        Given::new([1, 200, 2, 1, 256]).documents(&[100, 63, 37]).spans(&[(90, 100), (110, 130)]),
        Given::new([1, 150, 1, 1, 512]).documents(&[33, 117]).with_sink().with("window", 70),
        Given::new([1, 260, 4, 1, 40]).with("bidirectional", true).with("window", 7),
        // Branches: inside a tile, over tiles that others hide, next to documents without any, of one token, many.
        Given::new([1, 30, 2, 1, 8]).branches(&[(6, &[5, 7]), (12, &[])]).with("scale", 0.4),
        Given::new([2, 41, 4, 2, 16]).branches(&[(1, &[3, 1, 9]), (20, &[3, 4])]).with_sink().with("soft_cap", 2.0),
        Given::new([1, 700, 2, 1, 64]).branches(&[(150, &[250, 300])]),
        Given::new([2, 1000, 4, 2, 128]).branches(&[(70, &[300, 5, 200]), (25, &[]), (130, &[129, 141])]),
        Given::new([1, 600, 2, 1, 256]).branches(&[(64, &[192, 64, 280])]).with_sink(),
        Given::new([1, 400, 1, 1, 512]).branches(&[(60, &[130, 210])]),
        Given::new([1, 513, 2, 2, 40]).values_of(24).branches(&[(33, &[160, 160, 160])]),
        // One order of sums for each document, wherever it lies: tiles that begin inside others, windows, branches, heads of
        // one key head in a block's rows.
        Given::new([1, 70, 2, 1, 40]).documents(&[37, 33]).with("scale", 0.2).with("batch_invariant", true),
        Given::new([2, 700, 14, 2, 64]).documents(&[1, 2, 63, 64, 65, 505]).with("batch_invariant", true),
        Given::new([1, 300, 4, 2, 128])
            .documents(&[100, 200])
            .with_sink()
            .with("window", 70)
            .with("batch_invariant", true),
        Given::new([1, 90, 1, 1, 256]).values_of(64).with("soft_cap", 5.0).with("batch_invariant", true),
        Given::new([2, 1000, 4, 2, 128])
            .branches(&[(70, &[300, 5, 200]), (25, &[]), (130, &[129, 141])])
            .with("batch_invariant", true),
        Given::new([1, 513, 2, 2, 40])
            .values_of(24)
            .branches(&[(33, &[160, 160, 160])])
            .with_sink()
            .with("batch_invariant", true),
        // A row of one document between rows of short ones: on Hopper their gradients are made in different ways.
        Given::new([3, 1100, 2, 1, 72]).values_of(16).documents(&[100; 11]).whole(1),
    ]
}
