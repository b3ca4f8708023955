//! The reference that a task compares with: which model it is, its entries, and the memory that it takes next to training.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::{CompileOptions, EntryOptions, PlanOptions, Recipe, Sharding};
use data::Purpose;
use graph::TaskEntry;
use program::{EntryKind, Machine};

use crate::config::{Config, Init};
use crate::error::{Result, TrainError};
use crate::inference::model::TOKEN_LOSS;
use crate::model::source::ModelSource;
use crate::plan::teacher::Teacher;

/// The model whose log-probabilities a task compares with.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Reference {
    /// The model in training without its adapter.
    WithoutAdapter,
    /// The weights of a folder, which stay as they are.
    Folder(PathBuf),
}

/// The reference of a run. Errors: weights that are drawn, whose beginning no folder has.
pub(crate) fn choose(config: &Config, source: &ModelSource) -> Result<Option<Reference>> {
    let task = source.model.tasks.iter().find(|task| task.name == config.task.loss());
    if !task.is_some_and(|task| task.entries.0.contains(&TaskEntry::Reference)) {
        return Ok(None);
    }
    Ok(Some(match &config.preferences.reference {
        Some(folder) => {
            check_folder(config, Path::new(folder), source)?;
            Reference::Folder(PathBuf::from(folder))
        }
        None if config.lora.lora => Reference::WithoutAdapter,
        None if config.model.init == Init::Random => {
            let message = format!(
                "`task: {}` compares with the weights that training starts from, and these are drawn",
                config.task
            );
            let hint = "set `reference`, `lora: true` or `init: pretrained`";
            return Err(TrainError::Config(vec![config.mistake("init", message, Some(hint.into()))]));
        }
        None => Reference::Folder(source.folder.clone()),
    }))
}

/// Errors: no folder of a model with the architecture in training.
fn check_folder(config: &Config, folder: &Path, source: &ModelSource) -> Result<()> {
    let wrong = |message: String, hint: &str| {
        TrainError::Config(vec![config.mistake("reference", message, Some(hint.to_owned()))])
    };
    let shown = folder.display();
    let has = |file: &str| folder.join(file).is_file();
    if !has("config.json") {
        let message = format!("`reference: {shown}` has no `config.json`");
        return Err(match () {
            () if has("adapter_config.json") => {
                wrong(format!("{message}: it is an adapter"), "merge it with `surogate merge`, and name the result")
            }
            () if has("model/config.json") => wrong(message, "name its folder `model`"),
            () if has("adapter/adapter_config.json") => wrong(
                format!("{message}: it is a run with an adapter"),
                "merge it with `surogate merge`, and name the result",
            ),
            () => wrong(message, "name a folder with the files of a model"),
        });
    }
    let of = crate::model::source::config_of(folder)?;
    if let Some((name, [its, ours])) = of.other_size(&source.config) {
        let message = format!("`reference: {shown}` has `{name}` {its}, and the model in training {ours}");
        return Err(wrong(message, "name a model of the same architecture"));
    }
    Ok(())
}

/// The note on a reference that does not have what a continued adapter has learned.
pub(crate) fn note(config: &Config, reference: Option<&Reference>) -> Option<String> {
    let without = reference == Some(&Reference::WithoutAdapter) && config.lora.adapter.is_some();
    without.then(|| {
        "the reference is the model without `adapter`, so that ratios begin with what the adapter has learned; `reference` names \
         another folder, such as that of the merged adapter"
            .to_owned()
    })
}

/// The forward pass of the model without its adapter, or of another model.
pub(crate) const REFERENCE: &str = "reference";

/// The forward pass of the model as it is, for answers that do not belong to their prompts.
pub(crate) const POLICY: &str = "policy";

/// Forward passes of the reference and of the policy before each micro-step, in the mean.
pub(crate) fn passes(config: &Config, reference: Option<&Reference>) -> f64 {
    let of = &config.preferences;
    let of_reference = match reference {
        Some(_) if of.precompute_ref_log_probs => 0.0,
        // Answers to the prompts of others, by the reference and by the policy.
        Some(_) if config.task.purpose() == Purpose::Answers && of.estimates_divergence() => 3.0,
        Some(_) => 1.0,
        None => 0.0,
    };
    let iterations = config.reinforcement.num_iterations;
    let samples_again = config.task.purpose() == Purpose::Prompts && iterations > 1;
    of_reference + if samples_again { 1.0 / iterations as f64 } else { 0.0 }
}

/// The entries of a task: training first, which has what all of them report.
pub(crate) fn entries(config: &Config, reference: Option<&Reference>) -> Vec<EntryOptions> {
    let (task, scoring) = (config.task, config.scoring());
    let mut entries = vec![EntryOptions::train(task.loss()), EntryOptions::evaluate(task.loss())];
    if reference == Some(&Reference::WithoutAdapter) {
        entries.push(EntryOptions { adapter: false, ..forward(REFERENCE, scoring) });
    }
    if reference.is_some() && task.purpose() == Purpose::Answers || task.purpose() == Purpose::Prompts {
        entries.push(forward(POLICY, scoring));
    }
    entries
}

/// The forward pass of a name that gives the losses of targets.
fn forward(name: &str, scoring: &str) -> EntryOptions {
    let of = EntryOptions { name: name.to_owned(), ..EntryOptions::new(EntryKind::Forward, Some(scoring)) };
    of.keeping([TOKEN_LOSS])
}

/// The options of the program of a reference with weights of its own, next to those of the training.
pub(crate) fn options(training: &CompileOptions, scoring: &str) -> CompileOptions {
    CompileOptions {
        variants: Vec::new(),
        weights: training.weights,
        quantised: None,
        stored: Default::default(),
        compute: training.compute,
        // The same rounding on both sides: the log-ratio of the beginning is 0. A model that is trained for another format is
        // compared with what it was.
        recipe: match training.recipe {
            Recipe::QuantizeAware(_) => Recipe::Uniform,
            recipe => recipe,
        },
        training: None,
        adapter: None,
        entries: vec![forward(REFERENCE, scoring)],
        seed: 0,
        plan: PlanOptions::default(),
        sharding: Sharding { gradients: false, open: false, compression: Default::default(), ..training.sharding },
        branches: training.branches,
        batch_invariant: training.batch_invariant,
    }
}

/// The architecture in training with the weights of another folder.
pub(crate) fn source_of(folder: &Path, training: &ModelSource) -> Result<Arc<ModelSource>> {
    let config = crate::model::source::config_of(folder)?;
    Ok(Arc::new(ModelSource {
        folder: folder.to_owned(),
        config,
        model: training.model.clone(),
        pixels: training.pixels,
    }))
}

/// The options of a training that leaves room for a reference or a teacher with weights of its own.
pub(crate) fn reserved(
    mut training: CompileOptions,
    config: &Config,
    (reference, teacher): (Option<&Reference>, Option<&Teacher>),
    source: &ModelSource,
    machine: &Machine,
) -> Result<CompileOptions> {
    if let Some(teacher) = teacher.filter(|_| !config.distillation.precompute_teacher) {
        training.plan.reserved = teacher.bytes(&training, machine)?;
    }
    let stays = !config.preferences.precompute_ref_log_probs;
    if let Some(Reference::Folder(_)) = reference.filter(|_| stays) {
        let options = CompileOptions { variants: training.variants.clone(), ..options(&training, config.scoring()) };
        let program = compiler::compile(&source.model, &options, machine)?;
        let own = program.memory.iter().filter(|line| line.class.is_per_program());
        training.plan.reserved = own.map(|line| line.bytes).sum();
    }
    Ok(training)
}
