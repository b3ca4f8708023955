//! The cost of sampling the answers of a step: their number at a time, the memory of their pages, seconds. The program
//! is that of generation over the run's parameters, for prompts and answers of the lengths that the plan assumes.

use compiler::CompileOptions;
use data::Purpose;
use program::{ArenaKind, EntryKind, Machine, MemoryClass, Program, Seen};
use serde_json::{Value, json};

use super::shapes::prompt_and_answer;
use crate::config::Config;
use crate::engine::in_evaluation;
use crate::engine::in_place;
use crate::error::{Result, TrainError};
use crate::inference::generate::{Capacity, LOGITS, Need, variant};
use crate::model::source::ModelSource;
use crate::plan::Plan;
use crate::plan::sampled_shapes::{AT_ONCE, answers_of_step};
use crate::words::{size, time};

/// Factor of the time of a token with kernels whose bits do not depend on the batch: 1.00 to 1.28 times (Qwen3-0.6B and 8B, 32 to
/// 512 answers at a time, one H200).
const INVARIANT: f64 = 1.15;

/// The sampling of one round of answers.
pub struct Sampling {
    /// Answers of a round, and those that are sampled at a time.
    pub answers: usize,
    pub at_once: usize,
    /// Bytes of keys, values and states of the sequences of a device.
    pub page_bytes: usize,
    /// Bytes of everything on a device while answers are sampled; memory of training is freed for it where it has to
    /// be.
    pub memory_bytes: usize,
    /// One token of all sequences that run, half-way through an answer.
    pub token_seconds: f64,
    /// All prompts and answers of a round, each answer as long as it may be.
    pub seconds: f64,
    pub tokens_per_second: f64,
}

impl Sampling {
    /// Returns the cost for a run that samples, none for others and for rows or layers shared by devices. Errors: not
    /// even one sequence fits.
    pub fn new(
        config: &Config,
        plan: &Plan,
        source: &ModelSource,
        program: &Program,
        machine: &Machine,
    ) -> Result<Option<Sampling>> {
        if config.task.purpose() != Purpose::Prompts || config.sequence() > 1 || config.stages() > 1 {
            return Ok(None);
        }
        let (prompt, answer) = prompt_and_answer(config, plan.sequence_len);
        let (answers, ranks) = (answers_of_step(config), config.replicas());
        let share = answers / ranks;
        let options = in_place(in_evaluation(plan.compile.clone(), program), program);
        let compiled = |capacity: &Capacity| {
            let entry = capacity.entry().keeping([LOGITS]);
            let others = options.entries.iter().map(|other| other.clone().keeping_cache(capacity.cache));
            let entries = others.chain([entry]).collect();
            let options = CompileOptions { variants: capacity.variants(), entries, ..options.clone() };
            compiler::compile(&source.model, &options, machine).map_err(TrainError::from)
        };
        let needs = |tokens| vec![Need { prompt, tokens }; share];
        let mut rows = share.min(AT_ONCE);
        let (capacity, program) = loop {
            let capacity = Capacity::of(&needs(prompt + answer), rows, source.position_limit(), false).in_one_shape();
            match compiled(&capacity) {
                Ok(program) => break (capacity, program),
                Err(TrainError::Memory(_)) if rows > 1 => rows = rows.div_ceil(2),
                Err(error) => return Err(error),
            }
        };
        // Costs take half of the longest sequence: with this table it is the mean of prompt and answer so far.
        let even = Capacity::of(&needs(2 * prompt + answer), rows, None, false).in_one_shape();
        let cache = compiler::KeyValueCache { pages: capacity.cache.pages, ..even.cache };
        let timed = compiled(&Capacity { cache, ..capacity.clone() }).unwrap_or_else(|_| program.clone());
        let of = |batch, tokens| {
            let index = timed.entry(EntryKind::Forward, Some(variant(batch, tokens)));
            let entry = &timed.entries[index.expect("the shapes of a capacity are compiled")];
            program::estimate(entry, &timed, Seen::default()).seconds
        };
        let of_kernels = if options.batch_invariant && machine.arch.is_gpu() { INVARIANT } else { 1.0 };
        let (token, chunk) = (of_kernels * of(capacity.batch(rows), 1), capacity.chunk(prompt));
        let prompts = share.div_ceil(config.reinforcement.num_generations as usize);
        let reading = (prompts * prompt.div_ceil(chunk)) as f64 * of(1, chunk);
        let seconds = reading + (share.div_ceil(rows) * answer) as f64 * token;
        let class = MemoryClass::Arena(ArenaKind::Cache);
        let pages = program.memory.iter().filter(|line| line.class == class).map(|line| line.bytes).sum();
        Ok(Some(Sampling {
            answers,
            at_once: rows * ranks,
            page_bytes: pages,
            memory_bytes: program.memory.iter().map(|line| line.bytes).sum(),
            token_seconds: token,
            seconds,
            tokens_per_second: (answers * answer) as f64 / seconds,
        }))
    }

    pub(super) fn lines(&self) -> [(String, String); 2] {
        let at_once = match self.at_once == self.answers {
            true => format!("all {} at a time", self.answers),
            false => format!("{} of {} at a time", self.at_once, self.answers),
        };
        let rate = format!("{:.0} tokens per second if none ends early", self.tokens_per_second);
        [
            (time(self.seconds), format!("sampling the answers of a step, {at_once}, {rate}; rewards come on top")),
            (
                size(self.page_bytes),
                format!("their keys, values and states, {} in all while sampling", size(self.memory_bytes)),
            ),
        ]
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "answers": self.answers,
            "at_once": self.at_once,
            "page_bytes": self.page_bytes,
            "memory_bytes": self.memory_bytes,
            "token_seconds": self.token_seconds,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        })
    }
}
