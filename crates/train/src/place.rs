//! The folders and files of a run, and what an earlier process of it left there.
//!
//! Decides what is the run's own; knows nothing of models or steps.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jiff::Zoned;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::Value;

use crate::checkpoint;
use crate::config::{Config, Resume};
use crate::error::{Result, TrainError};
use crate::record::{MANIFEST, RESOLVED};
use crate::source::ModelSource;
use crate::staged::write_synced;
use crate::trainer::run_name;
use crate::written::{Record, Written, occupant};

/// What the manifest of an earlier process of the run says.
#[derive(Clone, Debug)]
pub struct Earlier {
    pub run_id: String,
    /// The manifest itself.
    pub manifest: Value,
    /// Folders that it wrote, oldest first.
    pub written: Vec<Record>,
}

/// Folders and files of a run.
pub struct Place {
    pub output: PathBuf,
    pub checkpoints: PathBuf,
    pub log: PathBuf,
    /// The run's name.
    pub name: String,
    pub earlier: Option<Earlier>,
    /// What the user should know, a sentence each.
    pub notes: Vec<String>,
    /// File system and inode of the folder of checkpoints.
    identity: (u64, u64),
    /// Keeps other processes out of `output` for as long as it is open; none where others may write there, too.
    _lock: Option<File>,
}

impl Place {
    /// Decides them, and checks that they can be written to and that no other process is in them.
    ///
    /// Errors: another run in `output_dir`, unless the options say that this one goes on with it.
    pub fn open(config: &Config, source: &ModelSource) -> Result<Place> {
        let output = PathBuf::from(&config.run.output_dir);
        let checkpoints = config.run.checkpoint_dir.value().map_or_else(|| output.clone(), PathBuf::from);
        let earlier = read_manifest(&output)?;
        if earlier.is_some() && config.run.resume_from_checkpoint == Resume::No {
            let message = format!("`{}` holds another run", output.display());
            let hint = "set `resume_from_checkpoint: true` to go on with it, choose another `output_dir`, or remove that \
                        folder";
            return Err(TrainError::Config(vec![config.mistake("output_dir", message, Some(hint.to_owned()))]));
        }
        for folder in [&output, &checkpoints] {
            try_writing(folder)?;
        }
        let mut notes = Vec::new();
        let lock = lock(config, &output, &mut notes)?;
        let said = |key: &str| earlier.as_ref().and_then(|of| of.manifest[key].as_str());
        let name = match (&config.run.run_name, said("run")) {
            (options::Setting::Auto, Some(name)) => name.to_owned(),
            _ => run_name(config, source),
        };
        let log = match (config.logging.log_file.value(), said("log")) {
            (Some(path), _) => PathBuf::from(path),
            (None, Some(path)) => PathBuf::from(path),
            (None, None) => unused_log(&output).unwrap_or_else(|| output.join(log_name(&name))),
        };
        let identity = identity(&checkpoints)?;
        Ok(Place { output, checkpoints, log, name, earlier, notes, identity, _lock: Some(lock) })
    }

    /// The place of a trainer that is driven by its caller: a log, and nothing that another run could miss.
    pub fn of_caller(config: &Config, name: &str) -> Result<Place> {
        let output = PathBuf::from(&config.run.output_dir);
        fs::create_dir_all(&output).map_err(|e| TrainError::io("create", &output, e))?;
        let checkpoints = config.run.checkpoint_dir.value().map_or_else(|| output.clone(), PathBuf::from);
        let log = config.logging.log_file.value().map_or_else(|| output.join(log_name(name)), PathBuf::from);
        let (name, identity) = (name.to_owned(), identity(&output)?);
        Ok(Place { output, checkpoints, log, name, earlier: None, notes: Vec::new(), identity, _lock: None })
    }

    /// Checks before the first step that nothing of others stands where the run will write: options, results,
    /// and checkpoints of the steps after `from`.
    pub fn check_free(&self, config: &Config, written: &Written, results: &[PathBuf], from: u64) -> Result<()> {
        let mut checkpoints = self.checkpoint_folders()?;
        checkpoints.retain(|(step, _)| *step > from || self.earlier.is_none());
        let option = if config.run.checkpoint_dir.value().is_some() { "checkpoint_dir" } else { "output_dir" };
        let mut paths: Vec<(&str, PathBuf)> = results.iter().map(|path| ("output_dir", path.clone())).collect();
        if self.earlier.is_none() {
            paths.insert(0, ("output_dir", self.output.join(RESOLVED)));
        }
        paths.extend(checkpoints.into_iter().map(|(_, path)| (option, path)));
        let mut problems = Vec::new();
        for (option, path) in paths {
            if let Some(found) = occupant(&path)?.filter(|_| !written.holds(&path)) {
                let message = format!("`{}` is {found} that this run did not write, expected nothing", path.display());
                let hint = format!("choose another `{option}`, or move away what is there");
                problems.push(config.mistake(option, message, Some(hint)));
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(TrainError::Config(problems)) }
    }

    /// Whatever is named as a checkpoint, by steps.
    pub fn checkpoint_folders(&self) -> Result<Vec<(u64, PathBuf)>> {
        let entries = fs::read_dir(&self.checkpoints).map_err(|e| TrainError::io("read", &self.checkpoints, e))?;
        let paths = entries.flatten().map(|entry| entry.path());
        let mut found: Vec<(u64, PathBuf)> =
            paths.filter_map(|path| Some((checkpoint::step_of(&path)?, path))).collect();
        found.sort_unstable();
        Ok(found)
    }

    /// Whether the folder of checkpoints is the one that was there at the start: what is written to a folder
    /// that takes the place of a vanished mount is lost with it.
    pub fn check_present(&self) -> Result<()> {
        if identity(&self.checkpoints).is_ok_and(|found| found == self.identity) {
            return Ok(());
        }
        let text =
            "the folder of checkpoints is no longer there, or another one has taken its place: is something unmounted?";
        Err(TrainError::Failed(format!("cannot write to {}: {text}", self.checkpoints.display())))
    }
}

fn log_name(run: &str) -> String {
    format!("log-{}-{}.json", run.replace(['/', '\\'], "-"), Zoned::now().strftime("%Y%m%d-%H%M%S"))
}

/// An empty log: a process made it in this folder, which it had locked, and was killed before its first word.
fn unused_log(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let is_log = |name: &str| name.starts_with("log-") && name.ends_with(".json");
    let logs = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_log));
    logs.filter(|entry| entry.metadata().is_ok_and(|of| of.is_file() && of.len() == 0)).map(|entry| entry.path()).min()
}

fn identity(folder: &Path) -> Result<(u64, u64)> {
    let data = fs::metadata(folder).map_err(|e| TrainError::io("read", folder, e))?;
    Ok((data.dev(), data.ino()))
}

/// The manifest of an earlier process, with its paths as they are now, should the folder have moved.
fn read_manifest(output: &Path) -> Result<Option<Earlier>> {
    let path = output.join(MANIFEST);
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&path).map_err(|e| TrainError::io("read", &path, e))?;
    let damaged =
        |why: String| TrainError::Failed(format!("{}: {why}; it is not a manifest of this program", path.display()));
    let mut manifest: Value = serde_json::from_str(&text).map_err(|e| damaged(format!("this is no JSON: {e}")))?;
    let run_id = manifest["run_id"].as_str().ok_or_else(|| damaged("there is no `run_id`".into()))?.to_owned();
    let now = output.canonicalize().map_err(|e| TrainError::io("read", output, e))?;
    let then = manifest["output"].as_str().map_or_else(|| now.clone(), PathBuf::from);
    let moved = |path: &Path| path.strip_prefix(&then).map_or_else(|_| path.to_owned(), |inside| now.join(inside));
    let written = serde_json::from_value::<Vec<Record>>(manifest["written"].take());
    let mut written = written.map_err(|e| damaged(format!("`written`: {e}")))?;
    written.iter_mut().for_each(|record| record.path = moved(&record.path));
    if let Some(log) = manifest["log"].as_str().map(|log| moved(Path::new(log))) {
        manifest["log"] = log.to_string_lossy().into();
    }
    Ok(Some(Earlier { run_id, manifest, written }))
}

/// Keeps a second process out: two writers of one run would destroy it.
fn lock(config: &Config, output: &Path, notes: &mut Vec<String>) -> Result<File> {
    let file = File::open(output).map_err(|e| TrainError::io("open", output, e))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => {
            let message = format!("another process is running in `{}`", output.display());
            let hint = Some("wait for it, end it, or choose another `output_dir`".to_owned());
            Err(TrainError::Config(vec![config.mistake("output_dir", message, hint)]))
        }
        Err(error) => {
            let text = "cannot be locked, so nothing keeps a second process of this run out of it";
            notes.push(format!("`{}` {text} ({error})", output.display()));
            Ok(file)
        }
    }
}

/// A trial before the first step: a full or read-only disk is told now. The name is always the same,
/// so that what a killed process left is taken away by the next.
fn try_writing(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| TrainError::io("create", folder, e))?;
    let trial = folder.join(".trial");
    let tried = write_synced(&trial, &[0; 4096]);
    let removed = fs::remove_file(&trial).map_err(|e| TrainError::io("remove", &trial, e));
    tried.and(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_empty_log_is_taken_over() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::write(at("log-a-20260101-000000.json"), "{}\n").unwrap();
        fs::write(at("notes.json"), "").unwrap();
        assert_eq!(unused_log(place.path()), None);
        fs::write(at("log-a-20260101-000001.json"), "").unwrap();
        assert_eq!(unused_log(place.path()), Some(at("log-a-20260101-000001.json")));
    }
}
