//! `apply_recommended_values`: values for options that the user left out, with which the same training takes less time,
//! or fits at all. Each is found by planning with it; nothing that the user wrote is changed.
//!
//! Decides the split of a step into micro-batches, how many GPUs share one, the formats of products and of frozen weights, and
//! packing. What stays `auto`, such as offloading, is decided by the plan, with or without this.

use program::{Arch, Machine};
use serde_json::{Value, json};

use crate::config::{Config, MachineFacts, Reason, Reasons, Recipe};
use crate::encoded::Encoded;
use crate::error::Result;
use crate::preview::Preview;
use crate::source::ModelSource;

/// Expected times that differ by less than this are the same: the smaller plan is taken.
const AS_FAST: f64 = 0.985;
/// By how much products of eight bits must be faster: other losses are not taken for less.
const WORTH_EIGHT_BITS: f64 = 1.1;

const BATCH: &str = "per_device_train_batch_size";
const ACCUMULATION: &str = "gradient_accumulation_steps";
const SEQUENCE: &str = "sequence_parallel_size";

/// The configuration with the best values for what was left out, where the options ask for it; `data`: the documents,
/// where they are available. A configuration that has recorded choices keeps them.
pub fn recommended(config: &Config, source: &ModelSource, machine: &Machine, data: Option<&Encoded>) -> Result<Config> {
    if !config.run.apply_recommended_values || config.recommended.is_some() {
        return Ok(config.clone());
    }
    let mut chosen = packing(config);
    chosen.extend(unquantised_layers(config, source));
    let packed = config.with_recommended(chosen.clone());
    let planned = |config: &Config| Preview::new(config, source, machine, data);
    let mut all = candidates(&packed, machine);
    let mut found = tried(&packed, &all, planned);
    // More GPUs to a row change no number, other weights do.
    for sequence in sequences(&packed) {
        if found.is_empty() {
            let shared = |of: &Candidate| Candidate { sequence, accumulation: of.accumulation * sequence, ..*of };
            found = tried(&packed, &all.iter().map(shared).collect::<Vec<_>>(), planned);
        }
    }
    if found.is_empty() && may_quantise(&packed) {
        all.iter_mut().for_each(|of| of.quantised = true);
        found = tried(&packed, &all, planned);
    }
    // Where nothing fits, the run's own plan says what would.
    if let Some(best) = best(&found) {
        let like = |recipe: Recipe| recipe == best.of.recipe;
        let cuts = all.iter().filter(|of| like(of.recipe)).count();
        let refused = cuts - found.iter().filter(|of| like(of.of.recipe)).count();
        chosen.extend(reasons(&packed, best, &found, refused, machine));
    }
    Ok(config.with_recommended(chosen))
}

/// Rows are filled with whole documents, unless that contradicts what was requested.
fn packing(config: &Config) -> Reasons {
    let name = "sample_packing";
    let (value, because) = match config.template.padding_free {
        true => (false, "`padding_free: true` lays rows end to end instead"),
        false => (true, "documents are packed, so nothing is computed for padding"),
    };
    let chosen = (!config.is_written(name))
        .then(|| (name.to_owned(), Reason { value: json!(value), because: because.to_owned() }));
    chosen.into_iter().collect()
}

/// The last layers stay in bf16 where all weights are trained in four bits: published runs need that to converge.
fn unquantised_layers(config: &Config, source: &ModelSource) -> Reasons {
    const SHARE: f64 = 0.15;
    let name = "skip_quant_last_layers";
    let written = config.is_written(name) || config.is_written("skip_quant_first_layers");
    if config.precision.recipe != Recipe::Nvfp4 || config.lora.lora || written {
        return Reasons::new();
    }
    let layers = source.model.layers();
    let kept = (SHARE * layers as f64).ceil() as usize;
    let because = format!("full training in four bits is steadier with the last 15 % of {layers} layers in bf16");
    Reasons::from([(name.to_owned(), Reason { value: json!(kept), because })])
}

/// One way to do the run's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    rows: u32,
    accumulation: u32,
    /// GPUs that share a micro-batch.
    sequence: u32,
    recipe: Recipe,
    /// Frozen weights in NF4, which the user did not ask for.
    quantised: bool,
}

/// A candidate that fits.
#[derive(Clone, Copy, Debug)]
struct Tried {
    of: Candidate,
    tokens_per_second: f64,
    bytes: usize,
}

/// Every cut of a step into equal micro-batches, and every recipe that this machine can do, as far as they were left
/// open.
fn candidates(config: &Config, machine: &Machine) -> Vec<Candidate> {
    let own = own(config);
    let step = own.rows.saturating_mul(own.accumulation);
    let open = !config.is_written(BATCH) && !config.is_written(ACCUMULATION);
    let cuts: Vec<(u32, u32)> = match open {
        true => (1..=step).filter(|rows| step.is_multiple_of(*rows)).map(|rows| (rows, step / rows)).collect(),
        false => vec![(own.rows, own.accumulation)],
    };
    let all = recipes(config, machine).into_iter();
    all.flat_map(|recipe| {
        let of = |(rows, accumulation): &(u32, u32)| Candidate {
            rows: *rows,
            accumulation: *accumulation,
            sequence: own.sequence,
            recipe,
            quantised: false,
        };
        cuts.iter().map(of).collect::<Vec<_>>()
    })
    .collect()
}

/// What the run would do by itself.
fn own(config: &Config) -> Candidate {
    let of = &config.training;
    Candidate {
        rows: of.per_device_train_batch_size,
        accumulation: of.gradient_accumulation_steps,
        sequence: config.template.sequence_parallel_size,
        recipe: config.precision.recipe,
        quantised: false,
    }
}

/// Numbers of GPUs that may share a micro-batch, few first: each then has so many times as many of them, so that a step keeps
/// its rows.
fn sequences(config: &Config) -> Vec<u32> {
    let open = !config.is_written(SEQUENCE) && !config.is_written(ACCUMULATION);
    let ranks = config.local_ranks() as u32;
    (2..=ranks).filter(|sequence| open && ranks.is_multiple_of(*sequence)).collect()
}

/// Whether frozen weights may be quantised: adapters are trained, and nothing was said about it.
fn may_quantise(config: &Config) -> bool {
    config.lora.lora && !["qlora_bnb", "qlora_fp8", "qlora_fp4"].iter().any(|name| config.is_written(name))
}

/// Recipes that the machine has the units for and whose times are known: those of eight bits were measured on Hopper. FP4
/// is never chosen for anybody.
fn recipes(config: &Config, machine: &Machine) -> Vec<Recipe> {
    let own = config.precision.recipe;
    let mut all = vec![own];
    let fp8 = Recipe::Fp8Hybrid;
    // Ranks do not share what quantisers know yet.
    if !config.is_written("recipe") && machine.arch.is_hopper() && config.ranks() == 1 {
        let requested = with(config, Candidate { recipe: fp8, ..self::own(config) });
        all.extend(requested.check_machine(&MachineFacts::of(machine, 1)).is_empty().then_some(fp8));
    }
    all
}

fn with(config: &Config, of: Candidate) -> Config {
    let mut config = config.clone();
    config.training.per_device_train_batch_size = of.rows;
    config.training.gradient_accumulation_steps = of.accumulation;
    config.template.sequence_parallel_size = of.sequence;
    config.precision.recipe = of.recipe;
    config.qlora.qlora_bnb |= of.quantised;
    config
}

/// Plans with each candidate: those that fit.
fn tried(config: &Config, all: &[Candidate], planned: impl Fn(&Config) -> Result<Preview>) -> Vec<Tried> {
    let plan = |of: &Candidate| {
        let preview = planned(&with(config, *of)).ok()?;
        Some(Tried { of: *of, tokens_per_second: preview.estimate().tokens_per_second, bytes: preview.memory_bytes() })
    };
    all.iter().filter_map(plan).collect()
}

/// The fastest; among those that are as fast, the smallest. Eight bits count less than they gain.
fn best(found: &[Tried]) -> Option<Tried> {
    let speed = |of: &Tried| match of.of.recipe {
        Recipe::Bf16 => of.tokens_per_second,
        Recipe::Fp8Hybrid | Recipe::Nvfp4 => of.tokens_per_second / WORTH_EIGHT_BITS,
    };
    let most = found.iter().map(speed).fold(0.0, f64::max);
    let near = found.iter().filter(|of| speed(of) >= AS_FAST * most);
    near.min_by_key(|of| of.bytes).copied()
}

fn reasons(config: &Config, best: Tried, found: &[Tried], refused: usize, machine: &Machine) -> Reasons {
    let mut chosen = Reasons::new();
    let mut choose = |name: &str, value: Value, because: &str| {
        if !config.is_written(name) {
            chosen.insert(name.to_owned(), Reason { value, because: because.to_owned() });
        }
    };
    let own = own(config);
    let because = cut_reason(best, own, found, refused, machine);
    choose(BATCH, json!(best.of.rows), &because);
    choose(ACCUMULATION, json!(best.of.accumulation), &because);
    if best.of.sequence != own.sequence {
        let because = "no split of the step fits where every GPU has rows of its own; the rows of a step stay the same";
        choose(SEQUENCE, json!(best.of.sequence), because);
    }
    let because = match best.of.recipe == own.recipe {
        true => "the fastest that is built and that this machine has the units for",
        false => "faster than bf16 by the plan, with products in 8 bits; the losses are not the same bits",
    };
    choose("recipe", json!(best.of.recipe.name()), because);
    if best.of.quantised {
        choose("qlora_bnb", json!(true), "with frozen weights in bf16 no plan fits");
    }
    chosen
}

/// Why a step is cut as it is, in one line.
fn cut_reason(best: Tried, own: Candidate, found: &[Tried], refused: usize, machine: &Machine) -> String {
    let rows = own.rows * own.accumulation;
    let gib = best.bytes as f64 / (1u64 << 30) as f64;
    let cuts = found.iter().filter(|of| of.of.recipe == best.of.recipe).count();
    if cuts + refused <= 1 {
        return format!("{rows} rows per step, as given");
    }
    let mut text = format!("the same {rows} rows per step; {gib:.2} GiB on {}", machine.name);
    // Rates of a CPU are those of another one: they put candidates in order, and are not worth a figure.
    if machine.arch != Arch::Cpu {
        text += &format!(", {:.0} tokens per second expected", best.tokens_per_second);
        if let Some(other) = found.iter().find(|of| of.of == own).filter(|other| other.of != best.of) {
            let (speed, size) = (other.tokens_per_second, other.bytes as f64 / (1u64 << 30) as f64);
            text += &match speed > best.tokens_per_second {
                true => {
                    format!(", as fast as {} × {} ({speed:.0}), which takes {size:.2} GiB", own.rows, own.accumulation)
                }
                false => format!(", {speed:.0} at {} × {}", own.rows, own.accumulation),
            };
        }
    }
    if refused > 0 {
        text += &format!("; {refused} of the possible splits do not fit");
    }
    text
}
