//! The time in which a model answers a request on a machine, as the program of its generation is planned.
//!
//! Knows the lengths of prompts and answers; not which sizes are tried.

use compiler::CompileOptions;
use graph::Model;
use program::{Arch, EntryKind, Machine, Seen};
use tensor::DType;

use crate::error::Result;
use crate::inference::generate::{Capacity, LOGITS, Need, variant};
use crate::model::compression::chosen::plain_options;

/// A limit of the time of one request that is answered alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Latency {
    /// The largest number of seconds that is allowed.
    pub limit: f64,
    /// Tokens of the prompt, and of the answer.
    pub prompt: usize,
    pub answer: usize,
    /// The machine on which a request is answered.
    pub machine: Machine,
}

impl Latency {
    /// Seconds from the prompt to the last token of the answer. `dtype`: that of the model's files. Errors: a model that the
    /// compiler refuses, or that the machine has no memory for.
    pub fn of(&self, model: &Model, dtype: DType) -> Result<f64> {
        let dtype = match dtype {
            DType::BF16 | DType::F16 if self.machine.arch != Arch::Cpu => DType::BF16,
            _ => DType::F32,
        };
        // Costs take half of the longest sequence: with this one it is the mean of prompt and answer so far.
        let need = Need { prompt: self.prompt, tokens: 2 * self.prompt + self.answer };
        let capacity = Capacity::of(&[need], 1, None, false).in_one_shape();
        let options = CompileOptions {
            variants: capacity.variants(),
            weights: dtype,
            compute: dtype,
            entries: vec![capacity.entry().keeping([LOGITS])],
            ..plain_options()
        };
        let program = compiler::compile(model, &options, &self.machine)?;
        let seconds = |tokens: usize| {
            let index = program.entry(EntryKind::Forward, Some(variant(1, tokens)));
            let entry = &program.entries[index.expect("the shapes of a capacity are compiled")];
            program::estimate(entry, &program, Seen::default()).seconds
        };
        let chunk = capacity.chunk(self.prompt);
        // The first token of the answer follows from the prompt.
        let tokens = self.answer.saturating_sub(1) as f64;
        Ok(self.prompt.div_ceil(chunk) as f64 * seconds(chunk) + tokens * seconds(1))
    }
}
