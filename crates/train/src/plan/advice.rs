//! Suggestions for a run that does not fit: changes of options, tried by planning again with each, cheap ones first.
//! Nothing is changed in the run itself.

use std::fmt;

use options::{Setting, Table};
use program::{Machine, MemoryClass, MemoryLine};
use serde_json::Value;

use crate::config::{Config, Dtype, OptimizerKind, Recipe};
use crate::error::TrainError;
use crate::input::encoded::Encoded;
use crate::model::source::ModelSource;
use crate::plan::Plan;
use crate::plan::preview::Preview;
use crate::words::size;

/// Rows are not cut below this many tokens.
const SHORTEST_ROWS: usize = 128;

/// The most changes that are reported.
const MOST: usize = 4;

/// A memory error with the changes that would make the run fit; any other error as it is.
pub fn with_advice(
    error: TrainError,
    config: &Config,
    source: &ModelSource,
    machine: &Machine,
    data: Option<&Encoded>,
) -> TrainError {
    let TrainError::Memory(message) = error else { return error };
    let changes = changes(config, &Known { source, machine, data });
    TrainError::Memory(match changes {
        Changes::None => {
            format!("{message}; no change of options makes it fit here: use a smaller model or a larger machine")
        }
        Changes::Any(single) => format!("{message}; any of these makes it fit: {}", single.join("; or ")),
        Changes::Together(all, need) => {
            format!("{message}; together these make it fit: {} ({need})", all.join(" and "))
        }
    })
}

/// The inputs that planning again needs.
struct Known<'a> {
    source: &'a ModelSource,
    machine: &'a Machine,
    data: Option<&'a Encoded>,
}

impl Known<'_> {
    /// The memory of the plan, where it fits.
    fn need(&self, config: &Config) -> Option<Need> {
        let found = Preview::new(config, self.source, self.machine, self.data).ok()?;
        Some(Need { device: found.memory_bytes(), host: found.program.host_memory() })
    }

    /// Tokens of a row as the options are.
    fn row(&self, config: &Config) -> usize {
        let own = match (config.model.sequence_len, config.model.max_model_len) {
            (Setting::Value(length), _) | (Setting::Auto, Setting::Value(length)) => Some(length as usize),
            (Setting::Auto, Setting::Auto) => None,
        };
        let of_data = || self.data.map(|data| data.sequence_len);
        own.or_else(of_data).or_else(|| Plan::new(config, self.source).ok().map(|plan| plan.sequence_len)).unwrap_or(0)
    }
}

/// The bytes that a plan comes to.
struct Need {
    device: usize,
    /// The contents of page-locked memory of each rank.
    host: Vec<MemoryLine>,
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", size(self.device))?;
        if self.host.is_empty() {
            return Ok(());
        }
        let all = self.host.iter().map(|line| line.bytes).sum();
        let contents = self.host.iter().filter_map(|line| match line.class {
            MemoryClass::Arena(kind) => Some(kind.words()),
            _ => None,
        });
        write!(f, ", and {} of host memory for {}", size(all), contents.collect::<Vec<_>>().join(" and "))
    }
}

/// Changes that make a run fit.
enum Changes {
    None,
    /// Each by itself, with what the plan comes to.
    Any(Vec<String>),
    /// Only all of them, and what the plan comes to then.
    Together(Vec<String>, Need),
}

/// Single changes that suffice; where none does, the shortest list of them that does.
fn changes(config: &Config, known: &Known<'_>) -> Changes {
    let single = CHANGES.iter().filter_map(|change| least(*change, config, known));
    let enough: Vec<String> = single.take(MOST).map(|(text, need)| format!("{text} ({need})")).collect();
    if !enough.is_empty() {
        return Changes::Any(enough);
    }
    let (mut changed, mut reported) = (config.clone(), Vec::new());
    for change in CHANGES {
        if let Some((text, need)) = least(*change, &changed, known) {
            reported.push(text);
            return Changes::Together(reported, need);
        }
        if let Some((all, text)) = steps(*change, &changed, known).pop() {
            changed = all;
            reported.push(text);
        }
    }
    Changes::None
}

/// The variants of a change, from a little to all of it, each with its description.
fn steps(change: Change, config: &Config, known: &Known<'_>) -> Vec<(Config, String)> {
    let mut changed = config.clone();
    std::iter::from_fn(|| change(&mut changed, known).map(|text| (changed.clone(), text))).collect()
}

/// The least of a change that fits, if any of it does, and what it comes to.
fn least(change: Change, config: &Config, known: &Known<'_>) -> Option<(String, Need)> {
    let mut steps = steps(change, config, known);
    steps.last().and_then(|(all, _)| known.need(all))?;
    let enough = steps[..steps.len() - 1].partition_point(|(some, _)| known.need(some).is_none());
    let (found, text) = steps.swap_remove(enough);
    known.need(&found).map(|need| (text, need))
}

/// Takes one step of a change and says how far it has come; `None` when there is nothing more to take.
type Change = fn(&mut Config, &Known<'_>) -> Option<String>;

/// Changes in the order in which they are tried: those that keep the numbers of training come first.
const CHANGES: &[Change] = &[
    planned,
    smaller_batch,
    shared_rows,
    raised_limit,
    smaller_states,
    half_precision,
    unquantised_products,
    unpacked,
    shorter_rows,
    adapters,
    quantised_weights,
];

/// Parts that are kept by order are left to the plan.
fn planned(config: &mut Config, _: &Known<'_>) -> Option<String> {
    let kept = |value: &Value| *value == false;
    let mut freed = config.recompute.leave_open(kept);
    freed.extend(config.offload.leave_open(kept));
    freed.extend(config.memory.leave_open(|_| true));
    let freed: Vec<String> = freed.iter().map(|name| format!("`{name}`")).collect();
    (!freed.is_empty()).then(|| format!("leave {} to the plan", freed.join(", ")))
}

/// Fewer rows in a micro-batch, as many more micro-batches: the same step.
fn smaller_batch(config: &mut Config, _: &Known<'_>) -> Option<String> {
    let rows = config.micro_rows();
    let divisor = (2..=rows).take_while(|n| n * n <= rows).find(|n| rows.is_multiple_of(*n)).unwrap_or(rows);
    config.micro_batch = None;
    let of = &mut config.training;
    (rows > 1).then(|| {
        if let Setting::Value(written) = &mut of.micro_batch_size {
            *written /= divisor;
            return format!("`micro_batch_size: {written}`");
        }
        of.per_device_train_batch_size /= divisor;
        of.gradient_accumulation_steps = of.gradient_accumulation_steps.saturating_mul(divisor);
        format!(
            "`per_device_train_batch_size: {}` with `gradient_accumulation_steps: {}`",
            of.per_device_train_batch_size, of.gradient_accumulation_steps
        )
    })
}

/// More GPUs to a micro-batch, as many more micro-batches: the same step.
fn shared_rows(config: &mut Config, known: &Known<'_>) -> Option<String> {
    let (own, ranks) = (config.template.sequence_parallel_size, config.local_ranks() as u32);
    let more = (own + 1..=ranks).filter(|sequence| ranks.is_multiple_of(*sequence) && sequence.is_multiple_of(own));
    let shared = |sequence: u32| {
        let mut changed = config.clone();
        changed.template.sequence_parallel_size = sequence;
        let accumulation = &mut changed.training.gradient_accumulation_steps;
        *accumulation = accumulation.saturating_mul(sequence / own);
        changed
    };
    // The model may have too few heads for it, or need all tokens of a row.
    let possible = |of: &Config| {
        let found = Preview::new(of, known.source, known.machine, known.data);
        matches!(found, Ok(_) | Err(TrainError::Memory(_)))
    };
    *config = more.map(shared).find(possible)?;
    Some(format!(
        "`sequence_parallel_size: {}` with `gradient_accumulation_steps: {}`",
        config.template.sequence_parallel_size, config.training.gradient_accumulation_steps
    ))
}

fn raised_limit(config: &mut Config, _: &Known<'_>) -> Option<String> {
    config.offload.memory_limit.take().map(|limit| format!("a `memory_limit` of that much instead of {limit}, or none"))
}

fn smaller_states(config: &mut Config, _: &Known<'_>) -> Option<String> {
    (config.optimizer.optimizer == OptimizerKind::AdamW).then(|| {
        config.optimizer.optimizer = OptimizerKind::AdamW8bit;
        "`optimizer: adamw_8bit`".to_owned()
    })
}

fn half_precision(config: &mut Config, known: &Known<'_>) -> Option<String> {
    let wide = match config.model.torch_dtype {
        Setting::Value(dtype) => dtype == Dtype::Float32,
        Setting::Auto => known.source.dtype() == Some(tensor::DType::F32),
    };
    wide.then(|| {
        config.model.torch_dtype = Setting::Value(Dtype::BFloat16);
        "`torch_dtype: bfloat16`".to_owned()
    })
}

/// A recipe with codes keeps them next to the weights that they are made from.
fn unquantised_products(config: &mut Config, _: &Known<'_>) -> Option<String> {
    config.precision.recipe.quantises_weights().then(|| {
        config.precision.recipe = Recipe::Bf16;
        "`recipe: bf16`".to_owned()
    })
}

/// Rows as long as the longest document, where packed ones are much longer.
fn unpacked(config: &mut Config, known: &Known<'_>) -> Option<String> {
    let longest = known.data?.longest();
    let shorter = config.data.sample_packing && 2 * longest <= known.row(config);
    shorter.then(|| {
        config.data.sample_packing = false;
        format!("`sample_packing: false`, with rows of {longest} tokens at most, as the longest document has")
    })
}

fn shorter_rows(config: &mut Config, known: &Known<'_>) -> Option<String> {
    let half = known.row(config) / 2;
    (half >= SHORTEST_ROWS).then(|| {
        config.model.sequence_len = Setting::Value(half as u32);
        let longer = known.data.map_or(0, |data| data.longer_than(half));
        let longer = if longer > 0 { format!(", less than {longer} documents have") } else { String::new() };
        format!("`sequence_len: {half}`{longer}")
    })
}

fn adapters(config: &mut Config, _: &Known<'_>) -> Option<String> {
    (!config.lora.lora).then(|| {
        config.lora.lora = true;
        "`lora: true`".to_owned()
    })
}

fn quantised_weights(config: &mut Config, _: &Known<'_>) -> Option<String> {
    let of = &mut config.qlora;
    (config.lora.lora && !(of.qlora_bnb || of.qlora_fp8 || of.qlora_fp4)).then(|| {
        of.qlora_bnb = true;
        "`qlora_bnb: true`".to_owned()
    })
}

impl Preview {
    /// [`Preview::new`], whose rejection for lack of memory says what would fit.
    pub fn advised(
        config: &Config,
        source: &ModelSource,
        machine: &Machine,
        data: Option<&Encoded>,
    ) -> crate::error::Result<Preview> {
        Preview::new(config, source, machine, data).map_err(|error| with_advice(error, config, source, machine, data))
    }
}
