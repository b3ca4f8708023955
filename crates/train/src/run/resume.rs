//! Resuming a run: which checkpoint, and whether the options still mean the same run.
//!
//! Knows checkpoints and options; the trainer restores its own state.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use crate::config::{Config, GradientCompression, Problem, Resume, rows};
use crate::engine::device::Device;
use crate::error::{Result, TrainError};
use crate::files::written::Record;
use crate::model::base_format;
use crate::model::source::ModelSource;
use crate::plan::split;
use crate::run::folder::RunFolder;
use crate::trainer::checkpoint::{Checkpoint, State, step_of};
use crate::trainer::{Trainer, is_run_id};

/// Options that may change as long as their product is the same: rows of a step.
const SPLIT: [&str; 3] = ["per_device_train_batch_size", "gradient_accumulation_steps", "gpus"];

/// The message on a run that is resumed with another model or other data.
const SAME_BEGINNING: &str = "a run can only be resumed with the model and data that it started with";

/// The point at which a run begins.
#[derive(Debug, Default)]
pub struct Start {
    /// None: at step 0.
    pub checkpoint: Option<Checkpoint>,
    /// The run that is gone on with.
    pub run_id: Option<String>,
    /// Folders that it wrote, oldest first.
    pub written: Vec<Record>,
    /// Notes for the user, a sentence each.
    pub notes: Vec<String>,
}

impl Start {
    /// Finds the checkpoint that the options ask for.
    ///
    /// `true` takes the checkpoint that the run wrote last. Damaged ones are set aside under another name, and
    /// it says so; if all are damaged, that is an error. A checkpoint that is requested by its path must be
    /// whole.
    pub fn find(config: &Config, place: &RunFolder) -> Result<Start> {
        match &config.run.resume_from_checkpoint {
            Resume::No => Ok(Start::default()),
            Resume::Newest => newest(config, place),
            Resume::From(folder) => named(config, place, Path::new(folder)),
        }
    }
}

fn newest(config: &Config, place: &RunFolder) -> Result<Start> {
    let mut start = Start::default();
    let mut candidates: Vec<PathBuf> = match &place.earlier {
        Some(earlier) => {
            start.run_id = Some(earlier.run_id.clone());
            start.written = earlier.written.clone();
            let paths = earlier.written.iter().map(|record| record.path.clone());
            paths.filter(|path| step_of(path).is_some() && path.exists()).collect()
        }
        None => adopt(config, place, &mut start)?,
    };
    // One path may be listed twice: before and after it was replaced.
    candidates.reverse();
    let mut seen = Vec::new();
    candidates.retain(|path| !seen.contains(path) && (seen.push(path.clone()), true).1);
    let mut damaged: Vec<(PathBuf, String)> = Vec::new();
    for folder in candidates {
        match Checkpoint::open(&folder) {
            Ok(found) => {
                for (folder, why) in &damaged {
                    start.notes.push(set_aside(folder, why)?);
                }
                start.checkpoint = Some(found);
                return Ok(start);
            }
            Err(why) => damaged.push((folder, why)),
        }
    }
    if damaged.is_empty() {
        let place = place.checkpoints.display();
        start.notes.push(format!("there is no checkpoint of this run in `{place}`: it starts at step 0"));
        return Ok(start);
    }
    let list: String = damaged.iter().map(|(folder, why)| format!("\n  {}: {why}", folder.display())).collect();
    Err(TrainError::Failed(format!("every checkpoint of this run is damaged:{list}")))
}

/// Without a manifest: the checkpoints that are there, if they are of one run.
fn adopt(config: &Config, place: &RunFolder, start: &mut Start) -> Result<Vec<PathBuf>> {
    let mut found: Vec<(u64, PathBuf, String)> = Vec::new();
    for (step, path) in place.checkpoint_folders()? {
        let text = data::small_file::read_text(&path.join(crate::trainer::checkpoint::STATE)).unwrap_or_default();
        let state: Value = serde_json::from_str(&text).unwrap_or_default();
        // What a link leads to is not this run's, and neither is a checkpoint of no run.
        let own = state["run_id"].as_str().filter(|id| is_run_id(id) && !path.is_symlink());
        found.extend(own.map(|id| (step, path.clone(), id.to_owned())));
    }
    let Some((_, _, run_id)) = found.first() else { return Ok(Vec::new()) };
    if found.iter().any(|(_, _, id)| id != run_id) {
        let message = format!("`{}` holds checkpoints of several runs", place.checkpoints.display());
        let hint = Some("name the checkpoint: `resume_from_checkpoint: PATH`".to_owned());
        return Err(TrainError::Config(vec![config.mistake("resume_from_checkpoint", message, hint)]));
    }
    start.run_id = Some(run_id.clone());
    for (_, path, _) in &found {
        let failed = |e| TrainError::io("read", path, e);
        let digest = crate::files::digest::of_folder(path).map_err(failed)?;
        start.written.push(Record { path: path.canonicalize().map_err(failed)?, digest });
    }
    Ok(found.into_iter().map(|(_, path, _)| path).collect())
}

/// A damaged checkpoint keeps its content and loses its name, which the run may need again.
fn set_aside(folder: &Path, why: &str) -> Result<String> {
    let name = folder.file_name().expect("a checkpoint has a name").to_string_lossy();
    let free = |n: &u32| folder.with_file_name(format!("damaged-{name}-{n}")).symlink_metadata().is_err();
    let number = (1..).find(free).expect("there is a free number");
    let aside = folder.with_file_name(format!("damaged-{name}-{number}"));
    fs::rename(folder, &aside).map_err(|e| TrainError::io("rename", folder, e))?;
    Ok(format!(
        "{} is damaged ({why}): it was renamed to {} and an earlier one is used",
        folder.display(),
        aside.display()
    ))
}

fn named(config: &Config, place: &RunFolder, folder: &Path) -> Result<Start> {
    let mistake = |message: String, hint: Option<String>| {
        Err(TrainError::Config(vec![config.mistake("resume_from_checkpoint", message, hint)]))
    };
    let checkpoint = match Checkpoint::open(folder) {
        Ok(checkpoint) => checkpoint,
        Err(_) if folder.to_string_lossy().contains("://") => {
            let hint =
                "set `resume_from_checkpoint: true`: it fetches the newest checkpoint of an `output_dir` in a bucket";
            return mistake(
                format!("`{}` is an address, expected `true` or a local folder", folder.display()),
                Some(hint.to_owned()),
            );
        }
        Err(why) => {
            let hint = "name a folder such as `output/checkpoint-50`; `true` uses the newest complete one";
            return mistake(
                format!("`{}` is not a complete checkpoint: {why}", folder.display()),
                Some(hint.to_owned()),
            );
        }
    };
    let mut start = Start::default();
    match &place.earlier {
        Some(earlier) if earlier.run_id != checkpoint.state.run_id => {
            let message = format!("`{}` holds another run than `{}`", place.output.display(), folder.display());
            let hint = Some("choose an empty `output_dir`, or a checkpoint of that run".to_owned());
            return Err(TrainError::Config(vec![config.mistake("output_dir", message, hint)]));
        }
        Some(earlier) => {
            start.run_id = Some(earlier.run_id.clone());
            start.written = earlier.written.clone();
        }
        // Another folder: a run of its own that begins at this checkpoint.
        None => {
            let text = format!("this run begins at {} of the run {}", folder.display(), checkpoint.state.run);
            start.notes.push(text);
        }
    }
    start.checkpoint = Some(checkpoint);
    Ok(start)
}

/// The options with what was chosen when the run began, by `apply_recommended_values`, for the length of rows and for the
/// split of a step: a resumed run does not choose again.
pub fn as_begun(config: &Config, checkpoint: &Checkpoint) -> Arc<Config> {
    let state = &checkpoint.state;
    let mut config = match config.run.apply_recommended_values {
        true => config.with_recommended(state.recommended.clone()),
        false => config.clone(),
    };
    config.kept_sequence_len = state.resolved["sequence_len"].as_u64().map(|tokens| tokens as usize);
    split::kept(&mut config, &state.options, &state.resolved);
    Arc::new(config)
}

/// Checks that the trainer's run is the one of the checkpoint: every option that may not change, the model's
/// configuration, the data. Returns the changes that are allowed, a sentence each. Weights take longer:
/// [`check_weights`] is for them.
pub fn check(trainer: &mut Trainer, checkpoint: &Checkpoint) -> Result<Vec<String>> {
    let resolved = trainer.config.resolved_json(&trainer.reasons());
    let (mut problems, mut notes) = compare(&trainer.config, &resolved, &checkpoint.state);
    let state = &checkpoint.state;
    problems.extend(check_moments(&trainer.config, state));
    problems.extend(check_base(trainer, checkpoint)?);
    if trainer.source.config_digest()? != state.model.config {
        problems.push(not_the_models(trainer, "`config.json`"));
    }
    let hint = Some(SAME_BEGINNING.to_owned());
    if let (Some(then), Some(now)) = (&state.data, trainer.data_digest())
        && !then.is_of(&now)
    {
        let message = format!(
            "the documents are not those of the checkpoint ({} then, {} now; contents are compared, too)",
            then.documents, now.documents
        );
        problems.push(trainer.config.mistake("datasets", message, hint));
    }
    if !problems.is_empty() {
        return Err(TrainError::Config(problems));
    }
    let held_out = trainer.feed.as_ref().and_then(|feed| feed.validation_digest());
    if let (Some(then), Some(now)) = (&state.validation, held_out)
        && !then.is_of(&now)
    {
        notes.push(format!(
            "the documents held out for evaluation are not those of the checkpoint ({} then, {} now; contents are \
             compared, too): losses on them do not go on from those before",
            then.documents, now.documents
        ));
    }
    let then = state.position.as_ref().map(|position| position.parts());
    if let (Some(then), Some(now)) = (then, trainer.data_digest().map(|now| now.parts))
        && then != now
    {
        notes.push(format!(
            "the data were in {} and are in {now} now: what is left of the epoch is dealt again, no document of it twice",
            crate::words::count(then as u64, "part")
        ));
    }
    if state.surogate != env!("CARGO_PKG_VERSION") {
        notes.push(format!(
            "the checkpoint was written by surogate {}, this is {}",
            state.surogate,
            env!("CARGO_PKG_VERSION")
        ));
    }
    let arithmetic = &trainer.device.arithmetic;
    if let Some(then) = state.arithmetic.as_ref().filter(|then| *then != arithmetic) {
        notes.push(format!(
            "the checkpoint was written on {then}, this is {arithmetic}: sums are rounded in another order, so the run does \
             not go on with the same bits"
        ));
    }
    Ok(notes)
}

/// The problem that second moments stay as they are in the checkpoint, and the options would change them again.
fn check_moments(config: &Config, state: &State) -> Option<Problem> {
    let (frozen, of) = (state.progress.frozen?, config.sharding.gradient_compression);
    (of != GradientCompression::OneBit).then(|| {
        let message = format!(
            "`gradient_compression` is `{}`, but in the checkpoint second moments stay as they were after {}",
            of.name(),
            crate::words::count(frozen, "update")
        );
        let hint = "a run can only leave `onebit` before the end of its warm-up, `compression_warmup_steps`";
        config.mistake("gradient_compression", message, Some(hint.into()))
    })
}

/// The problem that weights under the adapter would be quantised in another form than those that it was trained on: a
/// recipe has a say in that, and may change otherwise.
fn check_base(trainer: &Trainer, checkpoint: &Checkpoint) -> Result<Option<Problem>> {
    let Some(now) = trainer.plan.compile.quantised else { return Ok(None) };
    let Some(then) = base_format::read(&checkpoint.folder)?.filter(|then| then.made != now) else { return Ok(None) };
    let [now, then] = [now, then.made].map(base_format::text);
    let message = format!("frozen weights would be quantised as `{now}`, but the checkpoint's are `{then}`");
    let hint = "set `recipe` to what it was: an adapter belongs to the weights that it was trained on";
    Ok(Some(trainer.config.mistake("recipe", message, Some(hint.into()))))
}

/// Checks that the weights under an adapter are those that the run began with; a run that trains its weights has its
/// own. Waits until they are read, concurrently with compiling and loading: called after those, and before anything is
/// trained or written.
pub fn check_weights(trainer: &mut Trainer, checkpoint: &Checkpoint) -> Result<()> {
    let adapted = trainer.plan.compile.adapter.is_some();
    if !adapted || trainer.model_digest()?.weights == checkpoint.state.model.weights {
        return Ok(());
    }
    Err(TrainError::Config(vec![not_the_models(trainer, "weights")]))
}

fn not_the_models(trainer: &Trainer, what: &str) -> Problem {
    let message = format!("the model's {what} are not those of the checkpoint");
    trainer.config.mistake("model", message, Some(SAME_BEGINNING.to_owned()))
}

impl Trainer {
    /// A trainer that is driven by its caller: new, or at the checkpoint that the options name.
    ///
    /// Errors: those of [`Trainer::new`], a damaged checkpoint, and one of another run: other options, model or data.
    pub fn begin(config: Arc<Config>, source: Arc<ModelSource>, device: Arc<Device>) -> Result<Trainer> {
        let config = Arc::new(config.with_visible_gpus(device.gpus).map_err(TrainError::Config)?);
        let folder = match &config.run.resume_from_checkpoint {
            Resume::No => return Trainer::new(config, source, device),
            Resume::From(folder) => PathBuf::from(folder),
            Resume::Newest => {
                let message = "a trainer that is driven by its caller has no folder in which to look for checkpoints";
                let hint = Some("name one: `resume_from_checkpoint: PATH`".to_owned());
                return Err(TrainError::Config(vec![config.mistake("resume_from_checkpoint", message, hint)]));
            }
        };
        let checkpoint = whole(&folder)?;
        let mut trainer = Trainer::new(as_begun(&config, &checkpoint), source, device)?;
        trainer.differences = trainer.go_on(&checkpoint)?;
        Ok(trainer)
    }

    /// Resumes from a checkpoint, before the first step. Gives what differs from it where it may, a sentence each.
    ///
    /// Errors: a damaged checkpoint, and one of another run: other options, model or data.
    pub fn resume(&mut self, folder: &Path) -> Result<Vec<String>> {
        self.go_on(&whole(folder)?)
    }

    fn go_on(&mut self, checkpoint: &Checkpoint) -> Result<Vec<String>> {
        self.begin_digest();
        let mut notes = check(self, checkpoint)?;
        notes.extend(self.restore(checkpoint)?);
        check_weights(self, checkpoint)?;
        Ok(notes)
    }
}

fn whole(folder: &Path) -> Result<Checkpoint> {
    let damaged = |why| TrainError::Usage(format!("{} is not a complete checkpoint: {why}", folder.display()));
    Checkpoint::open(folder).map_err(damaged)
}

/// Fields of options that say where a process was started.
const OF_START: [&str; 2] = ["node_rank", "rendezvous"];

/// The options against those of a checkpoint: problems, and what differs where it may.
fn compare(config: &Config, resolved: &Value, state: &State) -> (Vec<Problem>, Vec<String>) {
    let (mut problems, mut notes) = (Vec::new(), Vec::new());
    let now = Options::new(config.recorded_json(), resolved.clone());
    let then = Options::new(state.options.clone(), state.resolved.clone()).with_defaults();
    if state.task != config.task.name() {
        let message =
            format!("the checkpoint is of `surogate {}`, this is `surogate {}`", state.task, config.task.name());
        problems.push(config.mistake("resume_from_checkpoint", message, None));
    }
    for row in rows().filter(|row| row.name != "resume_from_checkpoint") {
        let (given, before) = (now.spelled(row.name), then.spelled(row.name));
        if SPLIT.contains(&row.name) || now.resolved[row.name] == then.resolved[row.name] {
            continue;
        }
        if now.given[row.name] == then.given[row.name] {
            // Left open both times, and chosen again: by another machine, for another length of the run.
            if !row.changes_on_resume {
                notes.push(format!("`{}` is {given}, it was {before}", row.name));
            }
            continue;
        }
        if row.changes_on_resume {
            let (fields, then) = (now.given[row.name].as_object(), &then.given[row.name]);
            let changed =
                |(name, value): &(&String, &Value)| then[*name] != **value && !OF_START.contains(&name.as_str());
            match fields.filter(|_| then.is_object()) {
                None => notes.push(format!("`{}` is {given}, it was {before}", row.name)),
                Some(fields) => notes.extend(
                    fields
                        .iter()
                        .filter(changed)
                        .map(|(name, value)| format!("`{}.{name}` is `{value}`, it was `{}`", row.name, then[name])),
                ),
            }
        } else {
            let message = format!("`{}` is {given}, but the checkpoint was written with {before}", row.name);
            let hint = Some("set it back: a resumed run may only change what docs/config.md marks with ↻".to_owned());
            problems.push(config.mistake(row.name, message, hint));
        }
    }
    let split_of = |of: &Options| {
        let nodes = &of.given["distributed"];
        let number = |value: &Value| value.as_u64().unwrap_or(1).max(1);
        let [rows, accumulation, gpus] = SPLIT.map(|name| number(&of.given[name]));
        let of_node = nodes["gpus_per_node"].as_u64().filter(|gpus| *gpus > 0).unwrap_or(gpus);
        let sequence = number(&of.given["sequence_parallel_size"]);
        let stages = number(&of.given["pipeline_parallel_size"]);
        [rows, accumulation, of_node * number(&nodes["num_nodes"]) / sequence / stages]
    };
    let (split_now, split_then) = (split_of(&now), split_of(&then));
    let [rows_now, rows_then] = [split_now, split_then].map(|of| of.iter().product::<u64>());
    let sizes = |of: [u64; 3]| {
        let factors = if split_now[2] == 1 && split_then[2] == 1 { &of[..2] } else { &of[..] };
        factors.iter().map(u64::to_string).collect::<Vec<_>>().join(" × ")
    };
    if rows_now != rows_then {
        let message = format!(
            "a step has {} = {rows_now} rows, but the checkpoint was written with {} = {rows_then}",
            sizes(split_now),
            sizes(split_then)
        );
        let factors = SPLIT.map(|name| format!("`{name}`"));
        let factors = if split_now[2] == 1 && split_then[2] == 1 { &factors[..2] } else { &factors[..] };
        let hint = format!("{} must stay the same; the split may change", factors.join(" × "));
        problems.push(config.mistake(SPLIT[0], message, Some(hint)));
    } else if split_now[0] != split_then[0] || split_now[2] != split_then[2] {
        notes.push(format!(
            "a step has {} rows, it had {}: the sums are rounded in another order",
            sizes(split_now),
            sizes(split_then)
        ));
    }
    (problems, notes)
}

/// Options as given, and with what was chosen for those left open.
struct Options {
    given: Value,
    resolved: Value,
}

impl Options {
    /// Both pass through text, so that numbers are read the same way as those of a checkpoint.
    fn new(given: Value, resolved: Value) -> Options {
        let read = |value: Value| serde_json::from_str(&value.to_string()).expect("JSON is read as it was written");
        Options { given: read(given), resolved: read(resolved) }
    }

    /// Adds options that an earlier version of the program did not know, with their defaults.
    fn with_defaults(mut self) -> Options {
        for row in rows() {
            for values in [&mut self.given, &mut self.resolved] {
                if values.get(row.name).is_none() {
                    values[row.name] = row.default_json();
                }
            }
        }
        self
    }

    fn spelled(&self, name: &str) -> String {
        match (&self.given[name], &self.resolved[name]) {
            (given, resolved) if given == "auto" && resolved != "auto" => format!("`auto` ({resolved})"),
            (given, _) => format!("`{}`", given.as_str().map_or_else(|| given.to_string(), str::to_owned)),
        }
    }
}
