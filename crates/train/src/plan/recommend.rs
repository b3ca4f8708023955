//! `apply_recommended_values`: values for options that the user left out, with which the same training takes less time,
//! or fits at all. Each is found by planning with it; nothing that the user wrote is changed.
//!
//! Decides how many GPUs share a row, the formats of products and of frozen weights, packing, and fewer rows in a step where the
//! data would make few steps. What stays `auto`, such as offloading, is decided by the plan, with or without this; the split of a
//! step into micro-steps is, too (`split.rs`), and each value here is tried with each split.

use data::Stop;
use program::{Arch, Machine};
use serde_json::{Value, json};

use crate::config::{Config, MachineFacts, Reason, Reasons, Recipe};
use crate::error::Result;
use crate::input::encoded::Encoded;
use crate::input::feed::Feed;
use crate::input::few_steps::Steps;
use crate::model::source::ModelSource;
use crate::plan::Plan;
use crate::plan::split::{self, Fit};
use crate::words::count;

/// By how much products of eight bits must be faster: other losses are not taken for less.
const WORTH_EIGHT_BITS: f64 = 1.1;
/// By how much codes of four bits for frozen weights must be faster: they are other weights.
const WORTH_CODES: f64 = 1.25;
/// The share of a card's memory that is left to a display, where it may drive one.
const OF_DISPLAY: f64 = 0.04;

const BATCH: &str = "per_device_train_batch_size";
const ACCUMULATION: &str = "gradient_accumulation_steps";
const SEQUENCE: &str = "sequence_parallel_size";

/// The configuration with the best values for what was left out, where the options ask for it, and with the split of its steps;
/// `data`: the documents, where they are available. A configuration that has recorded choices keeps them.
pub fn recommended(
    config: &Config,
    source: &ModelSource,
    machine: &Machine,
    data: Option<&Encoded>,
    stop: Stop<'_>,
) -> Result<Config> {
    if !config.run.apply_recommended_values || config.recommended.is_some() {
        return split::with_split(config, source, machine, data);
    }
    let mut chosen = packing(config);
    chosen.extend(unquantised_layers(config, source));
    let (packed, fewer) = fewer_rows(config.with_recommended(chosen.clone()), source, data, stop)?;
    chosen.extend(fewer);
    let with_margin = beside_display(config, machine);
    let row = data.into_iter().fold(Plan::new(&packed, source)?, Plan::with_data).sequence_len;
    let mut all = candidates(&packed, machine, row);
    let tried = |all: &[Candidate]| tried(&packed, all, |of| split::fits(of, source, &with_margin, data));
    let mut found = tried(&all);
    // More GPUs to a row change no number, other weights do.
    for sequence in sequences(&packed) {
        if found.is_empty() {
            found = tried(&all.iter().map(|of| Candidate { sequence, ..*of }).collect::<Vec<_>>());
        }
    }
    if found.is_empty() && may_quantise(&packed) {
        all.iter_mut().for_each(|of| of.quantised = true);
        found = tried(&all);
    } else if let Some(best) = best(&found).filter(|best| may_quantise(&packed) && best.fit.waits) {
        // The plan waits for memory: fewer bytes of weights may save more than reading codes costs.
        let cuts = all.iter().filter(|of| of.recipe == best.of.recipe && of.rows >= best.of.rows);
        let codes: Vec<Candidate> = cuts.map(|of| Candidate { quantised: true, ..*of }).collect();
        found.extend(tried(&codes));
    }
    // Where nothing fits, the run's own plan says what would.
    let Some(best) = best(&found) else { return Ok(config.with_recommended(chosen)) };
    let like = |recipe: Recipe| recipe == best.of.recipe;
    let cuts = all.iter().filter(|of| like(of.recipe)).count();
    let of_kind = found.iter().filter(|of| like(of.of.recipe) && of.of.quantised == all[0].quantised);
    let refused = cuts.saturating_sub(of_kind.count());
    chosen.extend(reasons(&packed, best, &found, machine));
    let config = config.with_recommended(chosen);
    let because = cut_reason(best, own(&packed), &found, refused, machine);
    Ok(if packed.splits_freely() { split::with_rows(&config, best.of.rows, because) } else { config })
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

/// The configuration with fewer rows in a step where the data would make few steps, and the values with their reason.
fn fewer_rows(
    config: Config,
    source: &ModelSource,
    data: Option<&Encoded>,
    stop: Stop<'_>,
) -> Result<(Config, Reasons)> {
    let rows = config.device_rows();
    let is_open = [BATCH, ACCUMULATION, "batch_size"].iter().all(|name| !config.is_written(name));
    let Some(data) = data.filter(|_| is_open) else { return Ok((config, Reasons::new())) };
    let plan = Plan::new(&config, source)?.with_data(data);
    let feed = Feed::new(&config, data.clone(), (plan.sequence_len, false), stop)?;
    let Some(steps) =
        Steps::of(&config, feed.rows_in_epoch(), feed.documents() as u64).filter(|steps| steps.most_rows(rows) < rows)
    else {
        return Ok((config, Reasons::new()));
    };
    let fewer = steps.most_rows(rows);
    let all = feed.total_steps(&config);
    let because = format!("{} per step, since {rows} would make {}", count(fewer.into(), "row"), count(all, "step"));
    let values = [(BATCH, fewer), (ACCUMULATION, 1)];
    let reason = |value: u32| Reason { value: json!(value), because: because.clone() };
    let mut config = config;
    config.training.per_device_train_batch_size = fewer;
    config.training.gradient_accumulation_steps = 1;
    Ok((config, values.map(|(name, value)| (name.to_owned(), reason(value))).into()))
}

/// One way to do the run's steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    /// Rows that a device works on at once.
    rows: u32,
    /// GPUs that share a micro-batch.
    sequence: u32,
    recipe: Recipe,
    /// Frozen weights in NF4, which the user did not ask for.
    quantised: bool,
}

/// The plan of a candidate that fits.
#[derive(Clone, Copy, Debug)]
struct Tried {
    of: Candidate,
    fit: Fit,
}

/// Splits of a step, and every recipe that this machine can do, as far as they were left open; `row`: tokens of a row.
fn candidates(config: &Config, machine: &Machine, row: usize) -> Vec<Candidate> {
    let own = own(config);
    let cuts = match config.splits_freely() {
        true => {
            let (larger, smaller) = split::candidates(config, row);
            [larger, smaller].concat()
        }
        false => vec![own.rows],
    };
    let of = |recipe| cuts.iter().map(move |rows| Candidate { rows: *rows, recipe, ..own });
    recipes(config, machine).into_iter().flat_map(of).collect()
}

/// The values that the run would use by itself.
fn own(config: &Config) -> Candidate {
    Candidate {
        rows: config.micro_rows(),
        sequence: config.template.sequence_parallel_size,
        recipe: config.precision.recipe,
        quantised: false,
    }
}

/// Numbers of GPUs that may share a micro-batch, few first: `gradient_accumulation_steps` grows
/// by the same factor, so that a step keeps its rows.
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
    let is_open = !config.is_written("recipe") && config.precision.quantize_aware.is_none();
    if is_open && machine.arch != Arch::Cpu && config.ranks() == 1 {
        let requested = with(config, Candidate { recipe: fp8, ..self::own(config) });
        all.extend(requested.check_machine(&MachineFacts::of(machine, 1)).is_empty().then_some(fp8));
    }
    all
}

/// The options of a candidate. Where several GPUs share a row, a step of each has as many more.
fn with(config: &Config, of: Candidate) -> Config {
    let mut config = config.clone();
    if config.splits_freely() {
        config = split::with_rows(&config, of.rows, String::new());
    }
    config.training.gradient_accumulation_steps *= of.sequence / config.template.sequence_parallel_size;
    config.template.sequence_parallel_size = of.sequence;
    config.precision.recipe = of.recipe;
    config.qlora.qlora_bnb |= of.quantised;
    config
}

/// Plans with each candidate: those that fit.
fn tried(config: &Config, all: &[Candidate], fits: impl Fn(&[Config]) -> Vec<Option<Fit>>) -> Vec<Tried> {
    let options: Vec<Config> = all.iter().map(|of| with(config, *of)).collect();
    all.iter().zip(fits(&options)).filter_map(|(of, fit)| Some(Tried { of: *of, fit: fit? })).collect()
}

/// The fastest; among those that are as fast, the smallest. Eight bits, and codes where plans without them fit, count less
/// than they gain.
fn best(found: &[Tried]) -> Option<Tried> {
    let all_in_codes = found.iter().all(|of| of.of.quantised);
    let worth = |of: &Tried| {
        let of_codes = if of.of.quantised && !all_in_codes { WORTH_CODES } else { 1.0 };
        let of_recipe = if of.of.recipe == Recipe::Bf16 { 1.0 } else { WORTH_EIGHT_BITS };
        Fit { tokens_per_second: of.fit.tokens_per_second / of_codes / of_recipe, ..of.fit }
    };
    split::best(&found.iter().map(worth).collect::<Vec<_>>()).map(|index| found[index])
}

fn reasons(config: &Config, best: Tried, found: &[Tried], machine: &Machine) -> Reasons {
    let mut chosen = Reasons::new();
    let mut choose = |name: &str, value: Value, because: &str| {
        if !config.is_written(name) {
            chosen.insert(name.to_owned(), Reason { value, because: because.to_owned() });
        }
    };
    let own = own(config);
    if best.of.sequence != own.sequence {
        let because = "no split of the step fits where every GPU has rows of its own; the rows of a step stay the same";
        choose(SEQUENCE, json!(best.of.sequence), because);
        choose(ACCUMULATION, json!(with(config, best.of).training.gradient_accumulation_steps), because);
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
        let without = found.iter().filter(|of| !of.of.quantised).map(|of| of.fit.tokens_per_second);
        let because = match without.reduce(f64::max) {
            None => "with frozen weights in bf16 no plan fits".to_owned(),
            Some(other) => format!(
                "faster by the plan: {:.0} tokens per second instead of {other:.0} with frozen weights in bf16",
                best.fit.tokens_per_second
            ),
        };
        choose("qlora_bnb", json!(true), &because);
    }
    chosen
}

/// The reason for the chosen split of a step, in one line; `refused`: how many splits do not fit.
fn cut_reason(best: Tried, own: Candidate, found: &[Tried], refused: usize, machine: &Machine) -> String {
    let gib = |of: Fit| of.bytes as f64 / (1u64 << 30) as f64;
    let mut text = format!("{:.2} GiB on {}", gib(best.fit), machine.name);
    // Rates of a CPU are those of another one: they put candidates in order, and are not worth a figure.
    if machine.arch != Arch::Cpu {
        let speed = best.fit.tokens_per_second;
        text += &format!(", {speed:.0} tokens per second expected");
        if let Some(other) = found.iter().find(|of| of.of == own).filter(|other| other.of != best.of) {
            let before = other.fit.tokens_per_second;
            text += &match before > speed {
                true => {
                    format!(", as fast as {} at once ({before:.0}), which take {:.2} GiB", own.rows, gib(other.fit))
                }
                false => format!(", {before:.0} with {} at once", count(own.rows.into(), "row")),
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
