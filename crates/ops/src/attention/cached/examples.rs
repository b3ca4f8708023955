//! Calls that cover both operations: pages in any order, sequences of different lengths, padding, every kind of score
//! and head.

use tensor::Attrs;

use crate::op::{Example, ExampleInput};

/// A call of either operation.
struct Given {
    /// (B, T, heads, kv_heads, D, DV)
    shape: [usize; 6],
    page: usize,
    /// Position of the first new token of each row; the row is padding after `new` tokens.
    starts: Vec<usize>,
    new: Vec<usize>,
    attrs: Attrs,
    has_sink: bool,
    /// Neighboring new tokens that see each other.
    span: Option<usize>,
}

impl Given {
    fn new(shape: [usize; 6], page: usize, starts: &[usize]) -> Given {
        let (starts, new) = (starts.to_vec(), vec![shape[1]; shape[0]]);
        Given { shape, page, starts, new, attrs: Attrs::new(), has_sink: false, span: None }
    }

    fn with(self, name: &str, value: impl Into<serde_json::Value>) -> Given {
        Given { attrs: self.attrs.with(name, value), ..self }
    }

    fn with_sink(self) -> Given {
        Given { has_sink: true, ..self }
    }

    /// Lets every `span` new tokens see each other, and all before them.
    fn in_spans(self, span: usize) -> Given {
        Given { span: Some(span), ..self }
    }

    /// Leaves only the first `new` tokens of each row, the others are padding.
    fn padded(self, new: &[usize]) -> Given {
        Given { new: new.to_vec(), ..self }
    }

    fn normal(shape: &[usize]) -> ExampleInput {
        ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }
    }

    /// Pages of the longest sequence.
    fn width(&self) -> usize {
        let ends = self.starts.iter().zip(&self.new).map(|(start, new)| start + new);
        ends.max().expect("at least one row").max(1).div_ceil(self.page)
    }

    /// Returns the number of pages, one more than the sequences have.
    fn pages(&self) -> usize {
        self.shape[0] * self.width() + 1
    }

    /// Returns positions and table: the pages of a sequence lie backwards, alternating with those of the others.
    fn places(&self) -> [ExampleInput; 2] {
        let [batch, tokens, ..] = self.shape;
        let position = |row: usize, t: usize| if t < self.new[row] { (self.starts[row] + t) as i32 } else { -1 };
        let positions = (0..batch * tokens).map(|i| position(i / tokens, i % tokens)).collect();
        let (width, last) = (self.width(), self.pages() - 1);
        let table = (0..batch * width).map(|i| (last - 1 - (i % width * batch + i / width)) as i32).collect();
        [
            ExampleInput::Ints { shape: vec![batch, tokens], values: positions },
            ExampleInput::Ints { shape: vec![batch, width], values: table },
        ]
    }

    /// Returns the positions of the last tokens that new ones see, where they see later ones.
    fn last_keys(&self) -> Option<ExampleInput> {
        let (span, [batch, tokens, ..]) = (self.span?, self.shape);
        let last = |row: usize, t: usize| (t / span * span + span).min(self.new[row]) - 1;
        let of = |row: usize, t: usize| if t < self.new[row] { (self.starts[row] + last(row, t)) as i32 } else { -1 };
        let values = (0..batch * tokens).map(|i| of(i / tokens, i % tokens)).collect();
        Some(ExampleInput::Ints { shape: vec![batch, tokens], values })
    }

    fn caches(&self) -> [ExampleInput; 2] {
        let [_, _, _, kv_heads, head_dim, value_dim] = self.shape;
        [head_dim, value_dim].map(|columns| Self::normal(&[self.pages(), self.page, kv_heads, columns]))
    }

    fn reading(self) -> Example {
        let [batch, tokens, heads, _, head_dim, _] = self.shape;
        let q = Self::normal(&[batch, tokens, heads, head_dim]);
        let sink = self.has_sink.then(|| Self::normal(&[heads]));
        let places = self.places().into_iter().chain(self.last_keys());
        let inputs = [q].into_iter().chain(self.caches()).chain(places).chain(sink).collect();
        Example::new(inputs, self.attrs)
    }

    fn writing(self) -> Example {
        let [batch, tokens, _, kv_heads, head_dim, value_dim] = self.shape;
        let new = [head_dim, value_dim].map(|columns| Self::normal(&[batch, tokens, kv_heads, columns]));
        let attrs = self.attrs.clone().with("pages", self.pages()).with("page", self.page);
        let f32 = |cache: ExampleInput| match cache {
            ExampleInput::Normal { shape, scale } if attrs.get("dtype").is_some() => {
                ExampleInput::NormalF32 { shape, scale }
            }
            cache => cache,
        };
        let state = self.caches().map(f32).to_vec();
        Example::new(new.into_iter().chain(self.places()).collect(), attrs).with_state(state)
    }
}

pub fn of_writing() -> Vec<Example> {
    let calls = [
        Given::new([1, 1, 2, 2, 8, 8], 4, &[0]),
        Given::new([3, 1, 2, 1, 16, 24], 4, &[9, 0, 3]).padded(&[1, 0, 1]),
        Given::new([2, 7, 4, 3, 5, 3], 2, &[3, 0]).padded(&[7, 4]),
        Given::new([1, 3, 2, 2, 8, 8], 16, &[20]).with("dtype", "f32"),
    ];
    calls.into_iter().map(Given::writing).collect()
}

pub fn of_reading() -> Vec<Example> {
    let calls = [
        Given::new([1, 1, 2, 2, 8, 8], 4, &[0]),
        Given::new([3, 1, 8, 2, 64, 64], 16, &[37, 0, 700]).padded(&[1, 0, 1]),
        Given::new([2, 5, 4, 1, 128, 128], 16, &[0, 90]).padded(&[5, 3]),
        Given::new([1, 1, 14, 2, 128, 128], 16, &[1500]),
        Given::new([2, 2, 3, 3, 5, 7], 2, &[4, 1]),
        Given::new([1, 3, 4, 2, 80, 72], 16, &[200]).with("window", 33),
        Given::new([2, 1, 4, 4, 96, 96], 8, &[130, 20]).with("soft_cap", 5.0).with("scale", 0.3),
        Given::new([2, 1, 4, 2, 64, 64], 16, &[300, 7]).with_sink().with("window", 128),
        Given::new([1, 2, 2, 1, 256, 256], 16, &[70]).with("soft_cap", 30.0),
        Given::new([1, 1, 4, 2, 512, 512], 16, &[95]).with_sink(),
        Given::new([2, 40, 4, 2, 32, 32], 16, &[0, 0]).padded(&[40, 21]),
        Given::new([1, 1, 2, 1, 300, 1], 3, &[20]),
        Given::new([1, 150, 8, 2, 64, 64], 16, &[300]),
        Given::new([2, 33, 6, 2, 128, 64], 16, &[170, 0]).padded(&[33, 20]).with("window", 60).with_sink(),
        Given::new([3, 1, 32, 2, 128, 128], 16, &[900, 64, 63]),
        Given::new([2, 9, 4, 2, 8, 12], 4, &[5, 0]).in_spans(4).padded(&[9, 6]),
        Given::new([1, 40, 4, 2, 64, 64], 16, &[30]).in_spans(16).with("window", 9),
        Given::new([2, 33, 6, 2, 128, 64], 16, &[170, 0]).in_spans(11).padded(&[33, 20]).with("window", 60).with_sink(),
    ];
    let invariant = [
        Given::new([3, 1, 32, 2, 128, 128], 16, &[900, 64, 63]),
        Given::new([2, 33, 6, 2, 128, 64], 16, &[170, 0]).padded(&[33, 20]).with("window", 60).with_sink(),
        Given::new([1, 5, 4, 4, 40, 40], 4, &[130]).with("soft_cap", 5.0),
    ];
    let invariant = invariant.map(|of| of.with("batch_invariant", true));
    calls.into_iter().chain(invariant).map(Given::reading).collect()
}
