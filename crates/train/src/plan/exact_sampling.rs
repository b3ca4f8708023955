//! Exact sampling: the log-probabilities of the sampler are those of training. Says where that is so, and rejects the option
//! where it is not. Operations do it: those of a CPU sum in an order that follows from the sequence alone, those of a Hopper
//! GPU where `exact_sampling: true` asks for it ([`compiler::CompileOptions::batch_invariant`]).

use graph::{Item, NodeSpec};
use options::Setting;
use program::{Arch, Machine};
use tensor::DType;

use crate::config::{Config, Recipe, Task};
use crate::engine::device;
use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;

/// The operation whose frequencies follow from the largest position of a batch.
const OF_BATCH: &str = "rope_frequencies_of_batch";

/// Returns the reason why the sampler of a run gives other log-probabilities than training, and what to change; `None` where it
/// gives the same. `dtype`: of the computation.
fn reason(config: &Config, source: &ModelSource, dtype: DType, machine: &Machine) -> Option<(String, &'static str)> {
    const OTHERWISE: &str = "remove it: `sampling/sampling_logp_difference` shows the distance";
    if !machine.arch.is_hopper() && machine.arch != Arch::Cpu {
        let why = "on this GPU the kernels that sample round otherwise than those of training";
        return Some((why.to_owned(), OTHERWISE));
    }
    let dropout = config.lora.lora_dropout.value().copied().filter(|dropout| config.lora.lora && *dropout > 0.0);
    if let Some(dropout) = dropout {
        let why = format!("`lora_dropout: {dropout}` is on in training and off in sampling");
        return Some((why, "set `lora_dropout: 0`"));
    }
    if let Some(alpha) = config.training.neftune_noise_alpha {
        let why = format!("`neftune_noise_alpha: {alpha}` is on in training and off in sampling");
        return Some((why, "remove `neftune_noise_alpha`"));
    }
    let recipe = config.precision.recipe;
    if recipe != Recipe::Bf16 {
        let why = format!("with `recipe: {recipe}` the scales of a tensor follow from all of its tokens");
        return Some((why, "set `recipe: bf16`"));
    }
    if nodes(source).any(|node| node.op == "dropout") {
        let why = "the model's configuration has dropout, which is on in training and off in sampling";
        return Some((why.to_owned(), "set its rates in config.json to 0"));
    }
    if nodes(source).any(|node| node.op == OF_BATCH) {
        let why = "the model's rotation follows from the longest of the sequences that are computed together";
        return Some((why.to_owned(), OTHERWISE));
    }
    if machine.arch != Arch::Cpu {
        return match dtype {
            DType::BF16 => (!is_asked(config)).then(|| {
                let why = "on a GPU it takes kernels that are slower; `exact_sampling: true` takes them where a model has them";
                (why.to_owned(), OTHERWISE)
            }),
            _ => Some((
                format!("on a GPU only the kernels of bfloat16 have it, not those of {dtype}"),
                "set `torch_dtype: bfloat16`",
            )),
        };
    }
    (!device::sums_by_sequence(dtype)).then(|| {
        let why = match dtype {
            DType::F32 => "this processor lacks AVX2".to_owned(),
            DType::BF16 => "this processor lacks AVX-512 BF16, which bfloat16 needs".to_owned(),
            _ => "sums of float16 depend on what is computed together".to_owned(),
        };
        (why, "set `torch_dtype: float32`, or remove it")
    })
}

/// True if a run takes kernels whose bits follow from a token's own sequence.
pub(super) fn is_asked(config: &Config) -> bool {
    config.task == Task::Grpo && config.reinforcement.exact_sampling == Setting::Value(true)
}

/// The operations of a model, those of a block once.
pub(super) fn nodes(source: &ModelSource) -> impl Iterator<Item = &NodeSpec> {
    source.model.body.iter().flat_map(|item| match item {
        Item::Repeat(repeat) => repeat.blocks.iter().flat_map(|block| &block.nodes).collect::<Vec<_>>(),
        Item::Node(node) => vec![node],
    })
}

/// Checks `exact_sampling`. Returns what a user should know of it, a sentence; none for tasks that do not compare sampler
/// and training.
///
/// Errors: `exact_sampling: true` where sampler and training differ.
pub(crate) fn note(config: &Config, source: &ModelSource, dtype: DType, machine: &Machine) -> Result<Option<String>> {
    if config.task != Task::Grpo {
        return Ok(None);
    }
    let option = config.reinforcement.exact_sampling;
    match (reason(config, source, dtype, machine), option) {
        (Some((why, hint)), Setting::Value(true)) => {
            let message = format!("`exact_sampling: true` is not available here: {why}");
            Err(TrainError::Config(vec![config.mistake("exact_sampling", message, Some(hint.to_owned()))]))
        }
        (Some((why, _)), _) => Ok(Some(format!("sampling is not exact: {why}"))),
        (None, Setting::Value(false)) if machine.arch == Arch::Cpu => {
            Ok(Some("`exact_sampling: false` has no effect: sampling on a CPU is exact by itself".to_owned()))
        }
        (None, _) => {
            Ok(Some("exact sampling: the log-probabilities of sampler and training have the same bits".to_owned()))
        }
    }
}
