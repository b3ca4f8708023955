//! `apply_recommended_values`: values for options that the user left out, with which the same training takes less time,
//! or fits at all. Each is found by planning with it; nothing that the user wrote is changed.
//!
//! Decides the split of a step into micro-batches, how many GPUs share one, the formats of products and of frozen weights, and
//! packing. What stays `auto`, such as offloading, is decided by the plan, with or without this.

use program::{Arch, EntryKind, Machine};
use serde_json::{Value, json};

use crate::config::{Config, MachineFacts, Reason, Reasons, Recipe};
use crate::encoded::Encoded;
use crate::error::Result;
use crate::feed::Feed;
use crate::few_steps::Steps;
use crate::plan::Plan;
use crate::preview::Preview;
use crate::source::ModelSource;
use crate::words::count;

/// Expected times that differ by less than this are the same: the smaller plan is taken.
const AS_FAST: f64 = 0.985;
/// By how much products of eight bits must be faster: other losses are not taken for less.
const WORTH_EIGHT_BITS: f64 = 1.1;
/// By how much codes of four bits for frozen weights must be faster: they are other weights.
const WORTH_CODES: f64 = 1.25;
/// The share of a card's memory that is left to a display, where it may drive one.
const OF_DISPLAY: f64 = 0.04;

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
    let (packed, rows_in_words) = fewer_rows(config.with_recommended(chosen.clone()), source, data)?;
    let with_margin = beside_display(config, machine);
    let planned = |config: &Config| Preview::new(config, source, &with_margin, data);
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
    } else if let Some(best) = best(&found).filter(|best| may_quantise(&packed) && best.waits) {
        // The plan waits for memory: fewer bytes of weights may save more than reading codes costs.
        let cuts = all.iter().filter(|of| of.recipe == best.of.recipe && of.rows >= best.of.rows);
        let codes: Vec<Candidate> = cuts.map(|of| Candidate { quantised: true, ..*of }).collect();
        found.extend(tried(&packed, &codes, planned));
    }
    // Where nothing fits, the run's own plan says what would.
    if let Some(best) = best(&found) {
        let like = |recipe: Recipe| recipe == best.of.recipe;
        let cuts = all.iter().filter(|of| like(of.recipe)).count();
        let of_kind = found.iter().filter(|of| like(of.of.recipe) && of.of.quantised == all[0].quantised);
        let refused = cuts.saturating_sub(of_kind.count());
        chosen.extend(reasons(&packed, best, &found, (refused, &rows_in_words), machine));
    }
    Ok(config.with_recommended(chosen))
}

/// The machine without the memory that a display takes, where the card may drive one and the options set no limit.
fn beside_display(config: &Config, machine: &Machine) -> Machine {
    let drives = machine.name.to_ascii_lowercase().contains("rtx") && config.offload.memory_limit.is_none();
    let left = if drives { (machine.memory as f64 * OF_DISPLAY) as usize } else { 0 };
    Machine { memory: machine.memory - left, ..machine.clone() }
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

/// The configuration with fewer rows in a step where the data would make few steps, and the rows of a step in words.
fn fewer_rows(config: Config, source: &ModelSource, data: Option<&Encoded>) -> Result<(Config, String)> {
    let own = own(&config);
    let rows = own.rows.saturating_mul(own.accumulation);
    let same = format!("the same {rows} rows per step");
    let is_open = !config.is_written(BATCH) && !config.is_written(ACCUMULATION);
    let Some(data) = data.filter(|_| is_open) else { return Ok((config, same)) };
    let plan = Plan::new(&config, source)?.with_data(data);
    let feed = Feed::new(&config, data.clone(), plan.sequence_len)?;
    let Some(steps) = Steps::of(&config, &feed).filter(|steps| steps.most_rows(rows) < rows) else {
        return Ok((config, same));
    };
    let fewer = steps.most_rows(rows);
    let all = feed.total_steps(&config);
    let config = with(&config, Candidate { rows: fewer, accumulation: 1, ..own });
    Ok((config, format!("{} per step, since {rows} would make {}", count(fewer.into(), "row"), count(all, "step"))))
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

/// A candidate that fits, with its rate.
#[derive(Clone, Copy, Debug)]
struct Tried {
    of: Candidate,
    tokens_per_second: f64,
    bytes: usize,
    /// Something is recomputed, done in parts or kept on the host, so that it fits.
    waits: bool,
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

/// The values that the run would use by itself.
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

/// True if frozen weights may be quantized: adapters are trained, and no option decides it.
fn may_quantise(config: &Config) -> bool {
    config.lora.lora && !["qlora_bnb", "qlora_fp8", "qlora_fp4"].iter().any(|name| config.is_written(name))
}

/// Recipes that the machine has the units for. FP4 is never recommended.
fn recipes(config: &Config, machine: &Machine) -> Vec<Recipe> {
    let own = config.precision.recipe;
    let mut all = vec![own];
    let fp8 = Recipe::Fp8Hybrid;
    // Ranks do not share what quantisers know yet.
    if !config.is_written("recipe") && machine.arch != Arch::Cpu && config.ranks() == 1 {
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
        let waits = preview.program.plan.iter().any(|of| of.entry == EntryKind::FirstMicroStep && of.choice.saves());
        let (tokens_per_second, bytes) = (preview.estimate().tokens_per_second, preview.memory_bytes());
        Some(Tried { of: *of, tokens_per_second, bytes, waits })
    };
    all.iter().filter_map(plan).collect()
}

/// The fastest; among those that are as fast, the smallest. Eight bits, and codes where plans without them fit, count less
/// than they gain.
fn best(found: &[Tried]) -> Option<Tried> {
    let all_in_codes = found.iter().all(|of| of.of.quantised);
    let speed = |of: &Tried| {
        let of_codes = if of.of.quantised && !all_in_codes { WORTH_CODES } else { 1.0 };
        let of_recipe = if of.of.recipe == Recipe::Bf16 { 1.0 } else { WORTH_EIGHT_BITS };
        of.tokens_per_second / of_codes / of_recipe
    };
    let most = found.iter().map(speed).fold(0.0, f64::max);
    let near = found.iter().filter(|of| speed(of) >= AS_FAST * most);
    near.min_by_key(|of| of.bytes).copied()
}

fn reasons(config: &Config, best: Tried, found: &[Tried], split: (usize, &str), machine: &Machine) -> Reasons {
    let mut chosen = Reasons::new();
    let mut choose = |name: &str, value: Value, because: &str| {
        if !config.is_written(name) {
            chosen.insert(name.to_owned(), Reason { value, because: because.to_owned() });
        }
    };
    let own = own(config);
    let because = match config.is_written(BATCH) || config.is_written(ACCUMULATION) {
        true => format!("{} rows per step, as given", own.rows * own.accumulation),
        false => cut_reason(best, own, found, split, machine),
    };
    choose(BATCH, json!(best.of.rows), &because);
    choose(ACCUMULATION, json!(best.of.accumulation), &because);
    if best.of.sequence != own.sequence {
        let because = "no split of the step fits where every GPU has rows of its own; the rows of a step stay the same";
        choose(SEQUENCE, json!(best.of.sequence), because);
    }
    let because = match best.of.recipe == own.recipe {
        true => "the fastest that is built and that this machine has the units for",
        false if machine.arch.is_hopper() => {
            "faster than bf16 by the plan, with products in 8 bits; the losses are not the same bits"
        }
        false => {
            "faster than bf16 by the plan, with products in 8 bits, which were measured on Hopper alone; the losses are not the \
             same bits"
        }
    };
    choose("recipe", json!(best.of.recipe.name()), because);
    if best.of.quantised {
        let because = match found.iter().filter(|of| !of.of.quantised).map(|of| of.tokens_per_second).reduce(f64::max) {
            None => "with frozen weights in bf16 no plan fits".to_owned(),
            Some(other) => format!(
                "faster by the plan: {:.0} tokens per second instead of {other:.0} with frozen weights in bf16",
                best.tokens_per_second
            ),
        };
        choose("qlora_bnb", json!(true), &because);
    }
    chosen
}

/// The reason for the chosen division of a step into micro-batches, in one line.
///
/// `split`: how many splits do not fit, and the rows of a step in words.
fn cut_reason(best: Tried, own: Candidate, found: &[Tried], split: (usize, &str), machine: &Machine) -> String {
    let (refused, rows) = split;
    let gib = best.bytes as f64 / (1u64 << 30) as f64;
    let mut text = format!("{rows}; {gib:.2} GiB on {}", machine.name);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Task;

    #[test]
    fn a_card_that_may_drive_a_display_is_not_filled() {
        let config = |text: &str| Config::load(text, "run.yaml", Task::Sft, &[]).unwrap();
        let left = |name: &str, text: &str| {
            let machine = Machine { name: name.to_owned(), ..Machine::h200() };
            1.0 - beside_display(&config(text), &machine).memory as f64 / machine.memory as f64
        };
        for name in ["rtx4090", "NVIDIA GeForce RTX 3090"] {
            assert!((left(name, "model: m\n") - OF_DISPLAY).abs() < 1e-6, "{name}");
            assert_eq!(left(name, "model: m\nmemory_limit: 20GiB\n"), 0.0);
        }
        assert_eq!(left("NVIDIA H200", "model: m\n"), 0.0);
    }
}
