//! The folders and files of a run, and what an earlier process left in them.
//!
//! Decides what belongs to the run; knows nothing of models or steps.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jiff::Zoned;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::Value;

use crate::config::{Config, Resume};
use crate::error::{Result, TrainError};
use crate::files::log::{self, Log};
use crate::files::staged::{create_new, free_name};
use crate::files::written::{Record, Written, names, occupant};
use crate::model::source::ModelSource;
use crate::trainer::checkpoint;
use crate::trainer::{is_run_id, run_name};
use crate::words::count;

/// The manifest's file name, in every folder that a run wrote to.
pub const MANIFEST: &str = "manifest.json";

/// The options with every value, next to it.
pub const RESOLVED: &str = "resolved.yaml";

/// The manifest of an earlier process of the run.
#[derive(Clone, Debug)]
pub struct Earlier {
    pub run_id: String,
    /// The manifest itself, as JSON.
    pub manifest: Value,
    /// Folders that it wrote, oldest first.
    pub written: Vec<Record>,
}

/// Folders and files of a run.
pub struct RunFolder {
    pub output: PathBuf,
    pub checkpoints: PathBuf,
    pub log: PathBuf,
    /// The run's name.
    pub name: String,
    pub earlier: Option<Earlier>,
    /// Notes for the user, a sentence each.
    pub notes: Vec<String>,
    /// File system and inode of the folder of checkpoints.
    identity: (u64, u64),
    /// Keep other processes out of `output` and `checkpoints` for as long as they are open; none where others may write
    /// there, too.
    _locks: Vec<File>,
    /// Dropped last, when nothing is written any more.
    made_folders: MadeFolders,
}

impl RunFolder {
    /// Decides them, and checks that they can be written to and that no other process is in them.
    ///
    /// Errors: another run in `output_dir`, unless the options say that this one continues with it.
    pub fn open(config: &Config, source: &ModelSource) -> Result<RunFolder> {
        RunFolder::open_named(config, run_name(config, source))
    }

    /// Opens as [`RunFolder::open`], with the name that a new run has.
    fn open_named(config: &Config, run_name: String) -> Result<RunFolder> {
        let output = PathBuf::from(&config.run.output_dir);
        let checkpoints = config.run.checkpoint_dir.value().map_or_else(|| output.clone(), PathBuf::from);
        let earlier = read_manifest(&output)?;
        if earlier.is_some() && config.run.resume_from_checkpoint == Resume::No {
            let message = format!("`{}` holds another run", output.display());
            let hint = "set `resume_from_checkpoint: true` to go on with it, choose another `output_dir`, or remove that \
                        folder";
            return Err(TrainError::Config(vec![config.mistake("output_dir", message, Some(hint.to_owned()))]));
        }
        let made = MadeFolders::new([output.as_path(), checkpoints.as_path()]);
        for folder in [&output, &checkpoints] {
            try_writing(folder)?;
        }
        let mut notes = Vec::new();
        let mut locks = vec![lock(config, "output_dir", &output, &mut notes)?];
        let checkpoint_identity = identity(&checkpoints)?;
        if checkpoint_identity != identity(&output)? {
            // Two runs that write checkpoints of the same names would meet only at the first of them.
            locks.push(lock(config, "checkpoint_dir", &checkpoints, &mut notes)?);
        }
        if earlier.is_none() && notes.is_empty() {
            clear_begun(&output)?;
        }
        let said = |key: &str| earlier.as_ref().and_then(|of| of.manifest[key].as_str());
        let name = match (&config.run.run_name, said("run")) {
            (options::Setting::Auto, Some(name)) => name.to_owned(),
            _ => run_name,
        };
        let log = match (config.logging.log_file.value(), said("log")) {
            (Some(path), _) => PathBuf::from(path),
            (None, Some(path)) => own_log(config, &output, Path::new(path))?,
            (None, None) => unused_log(&output).unwrap_or_else(|| output.join(log_name(&name))),
        };
        let mut earlier = earlier;
        notes.extend(earlier.as_mut().and_then(|earlier| earlier.forget_outside([&output, &checkpoints])));
        let place = RunFolder {
            output,
            checkpoints,
            log,
            name,
            earlier,
            notes,
            identity: checkpoint_identity,
            _locks: locks,
            made_folders: made,
        };
        place.check_log(config)?;
        Ok(place)
    }

    /// The log of this place. Errors: something else is there, or it cannot be written.
    pub fn open_log(&self) -> Result<Log> {
        Log::open(&self.log, self.names_log())
    }

    /// True if the manifest of an earlier process names the log as the run's.
    fn names_log(&self) -> bool {
        let said = self.earlier.as_ref().and_then(|of| of.manifest["log"].as_str());
        said.is_some_and(|said| Path::new(said) == self.log)
    }

    fn check_log(&self, config: &Config) -> Result<()> {
        let own = [MANIFEST, RESOLVED].map(|name| self.output.join(name));
        let problem = match own.contains(&self.log) {
            true => format!("`{}` is written by the run itself, expected a file of its own", self.log.display()),
            false => match log::check(&self.log, self.names_log()) {
                Ok(()) => return Ok(()),
                Err(problem) => problem,
            },
        };
        let hint = Some("choose another `log_file`, or move away what is there".to_owned());
        Err(TrainError::Config(vec![config.mistake("log_file", problem, hint)]))
    }

    /// The place of a trainer that is driven by its caller: a log, and nothing that another run could miss.
    pub fn of_caller(config: &Config, name: &str) -> Result<RunFolder> {
        let output = PathBuf::from(&config.run.output_dir);
        fs::create_dir_all(&output).map_err(|e| TrainError::io("create", &output, e))?;
        let checkpoints = config.run.checkpoint_dir.value().map_or_else(|| output.clone(), PathBuf::from);
        let log = config.logging.log_file.value().map_or_else(|| output.join(log_name(name)), PathBuf::from);
        let (name, identity) = (name.to_owned(), identity(&output)?);
        let place = RunFolder {
            output,
            checkpoints,
            log,
            name,
            earlier: None,
            notes: Vec::new(),
            identity,
            _locks: Vec::new(),
            made_folders: MadeFolders::default(),
        };
        place.check_log(config)?;
        Ok(place)
    }

    /// Checks before the first step that nothing of others is where the run will write: options, results,
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

    /// The paths that are named as checkpoints, by steps.
    pub fn checkpoint_folders(&self) -> Result<Vec<(u64, PathBuf)>> {
        let entries = fs::read_dir(&self.checkpoints).map_err(|e| TrainError::io("read", &self.checkpoints, e))?;
        let paths = entries.flatten().map(|entry| entry.path());
        let mut found: Vec<(u64, PathBuf)> =
            paths.filter_map(|path| Some((checkpoint::step_of(&path)?, path))).collect();
        found.sort_unstable();
        Ok(found)
    }

    /// Checks that the folder of checkpoints is the one that was there at the start: files written to a folder that
    /// takes the place of a vanished mount are lost with it.
    pub fn check_present(&self) -> Result<()> {
        if identity(&self.checkpoints).is_ok_and(|found| found == self.identity) {
            return Ok(());
        }
        let text =
            "the folder of checkpoints is no longer there, or another one has taken its place: is something unmounted?";
        Err(TrainError::Failed(format!("cannot write to {}: {text}", self.checkpoints.display())))
    }
}

impl Earlier {
    /// Keeps the folders that are below one of these: a manifest that someone else wrote may name any folder. Returns a
    /// sentence on what is forgotten.
    fn forget_outside(&mut self, places: [&Path; 2]) -> Option<String> {
        let outside = |record: &Record| !places.iter().any(|place| is_inside(place, &record.path));
        let forgotten: Vec<Record> = self.written.extract_if(.., |record| outside(record)).collect();
        let first = forgotten.first()?.path.display();
        let count = count(forgotten.len() as u64, "folder");
        Some(format!(
            "the manifest names {count} outside of `output_dir` and `checkpoint_dir`, such as {first}: left alone"
        ))
    }
}

/// Returns true if a path is below a folder by its own name, not through a link.
fn is_inside(folder: &Path, path: &Path) -> bool {
    let parent = path.parent().and_then(|parent| parent.canonicalize().ok());
    let inside = folder.canonicalize().is_ok_and(|folder| parent.is_some_and(|parent| parent.starts_with(folder)));
    inside && path.file_name().is_some() && !path.is_symlink()
}

/// The log that a manifest names, if it is in the run's folder: the path may be that of another machine, or of a stranger.
fn own_log(config: &Config, output: &Path, named: &Path) -> Result<PathBuf> {
    if is_inside(output, named) {
        return Ok(named.to_owned());
    }
    if let Some(moved) =
        named.file_name().map(|name| output.join(name)).filter(|path| path.is_file() && is_inside(output, path))
    {
        return Ok(moved);
    }
    let message = format!("the manifest names the log `{}`, which is not in `{}`", named.display(), output.display());
    let hint = "set `log_file` to this path if it is the run's log, or to another one".to_owned();
    Err(TrainError::Config(vec![config.mistake("log_file", message, Some(hint))]))
}

/// Folders that were not there before the run. A run that is refused leaves none: those that are still empty in the end
/// are removed.
#[derive(Default)]
struct MadeFolders(Vec<PathBuf>);

impl MadeFolders {
    /// The folders among these paths and their parents that will have to be made; inner folders first.
    fn new<const N: usize>(paths: [&Path; N]) -> MadeFolders {
        let missing = paths.iter().flat_map(|path| path.ancestors()).filter(|path| !path.as_os_str().is_empty());
        let mut missing: Vec<PathBuf> = missing.filter(|path| !path.exists()).map(Path::to_owned).collect();
        missing.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
        MadeFolders(missing)
    }
}

impl RunFolder {
    /// The run begins: what was made for it stays, even if it is emptied.
    pub fn keep_folders(&mut self) {
        self.made_folders.0.clear();
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        for folder in &self.0 {
            // Only one that is empty can be removed so.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// The name of a run that was named for it ends with the time already.
fn log_name(run: &str) -> String {
    let name = run.replace(['/', '\\'], "-");
    match has_time(&name) {
        true => format!("log-{name}.json"),
        false => format!("log-{name}-{}.json", Zoned::now().strftime("%Y%m%d-%H%M%S")),
    }
}

/// True if a name ends like `-20260131-235959`.
fn has_time(name: &str) -> bool {
    let Some(end) = name.len().checked_sub(16).and_then(|start| name.get(start..)) else { return false };
    end.bytes().enumerate().all(|(i, byte)| if [0, 9].contains(&i) { byte == b'-' } else { byte.is_ascii_digit() })
}

/// An empty log: a process made it in this folder, which it had locked, and was killed before its first word.
fn unused_log(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let is_log = |name: &str| name.starts_with("log-") && name.ends_with(".json");
    let logs = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_log));
    logs.filter(|entry| entry.metadata().is_ok_and(|of| of.is_file() && of.len() == 0)).map(|entry| entry.path()).min()
}

/// Removes the first manifest of a process that had locked this folder and was killed while it wrote it: no later one has its
/// identity.
fn clear_begun(folder: &Path) -> Result<()> {
    for name in names(folder).map_err(|e| TrainError::io("read", folder, e))? {
        let text = name.to_string_lossy();
        let is_of = |file: &str| {
            let owner = text.strip_prefix(&format!(".{file}.")).and_then(|rest| rest.split_once('.'));
            owner.is_some_and(|(owner, _)| is_run_id(owner))
        };
        if text.ends_with(".tmp") && [MANIFEST, RESOLVED].into_iter().any(is_of) {
            let path = folder.join(&name);
            fs::remove_file(&path).map_err(|e| TrainError::io("remove", &path, e))?;
        }
    }
    Ok(())
}

fn identity(folder: &Path) -> Result<(u64, u64)> {
    let data = fs::metadata(folder).map_err(|e| TrainError::io("read", folder, e))?;
    Ok((data.dev(), data.ino()))
}

/// The manifest of an earlier process, with its paths as they are now, should the folder have moved.
fn read_manifest(output: &Path) -> Result<Option<Earlier>> {
    let path = output.join(MANIFEST);
    match fs::symlink_metadata(&path) {
        // A folder that cannot be made is reported when it is made.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        // It would be replaced by a file.
        Ok(data) if data.is_symlink() => {
            return Err(TrainError::Failed(format!("{} is a link, expected a file or nothing", path.display())));
        }
        _ => {}
    }
    let text = data::small_file::read_text(&path).map_err(|e| TrainError::io("read", &path, e))?;
    let damaged =
        |why: String| TrainError::Failed(format!("{}: {why}; it is not a manifest of this program", path.display()));
    let mut manifest: Value =
        serde_json::from_str(&text).map_err(|e| damaged(format!("this is not valid JSON: {e}")))?;
    let run_id = manifest["run_id"].as_str().ok_or_else(|| damaged("there is no `run_id`".into()))?.to_owned();
    if !is_run_id(&run_id) {
        return Err(damaged(format!("`run_id` is {run_id:?}, expected 16 hexadecimal digits")));
    }
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
fn lock(config: &Config, option: &str, folder: &Path, notes: &mut Vec<String>) -> Result<File> {
    let file = File::open(folder).map_err(|e| TrainError::io("open", folder, e))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => {
            let message = format!("another process is running in `{}`", folder.display());
            let hint = Some(format!("wait for it, end it, or choose another `{option}`"));
            Err(TrainError::Config(vec![config.mistake(option, message, hint)]))
        }
        Err(error) => {
            let text = "cannot be locked, so nothing keeps a second process of this run out of it";
            notes.push(format!("`{}` {text} ({error})", folder.display()));
            Ok(file)
        }
    }
}

/// A trial before the first step: a full or read-only disk is reported now. The file loses its name before anything is
/// written to it, so that a process that is killed leaves nothing.
fn try_writing(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| TrainError::io("create", folder, e))?;
    let (trial, mut file) = free_name(folder, "trial".as_ref(), "", create_new)?;
    fs::remove_file(&trial).map_err(|e| TrainError::io("remove", &trial, e))?;
    let tried = file.write_all(&[0; 4096]).and_then(|()| file.sync_all());
    tried.map_err(|e| TrainError::io("write", folder, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_touches_nothing_and_leaves_nothing() {
        let place = tempfile::tempdir().unwrap();
        let (mine, folder) = (place.path().join("mine"), place.path().join("run"));
        fs::create_dir(&folder).unwrap();
        fs::write(&mine, "important").unwrap();
        let process = std::process::id();
        for name in [".trial".to_owned(), format!(".trial..{process}.0.tmp"), format!(".trial..{process}.1.tmp")] {
            std::os::unix::fs::symlink(&mine, folder.join(name)).unwrap();
        }
        try_writing(&folder).unwrap();
        assert_eq!(fs::read_to_string(&mine).unwrap(), "important");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3);
        assert!(try_writing(&mine).is_err());
    }

    #[test]
    fn a_log_has_the_time_once() {
        assert_eq!(log_name("tiny-20260131-235959"), "log-tiny-20260131-235959.json");
        let named = log_name("a/b");
        assert!(named.starts_with("log-a-b-2") && has_time(named.strip_suffix(".json").unwrap()), "{named}");
        assert!(!has_time("tiny-2026013x-235959") && !has_time("x") && !has_time("ääääääääääääääää1"));
    }

    #[test]
    fn folders_that_stay_empty_are_removed_and_no_others() {
        let place = tempfile::tempdir().unwrap();
        let inner = place.path().join("a/b/c");
        let made = MadeFolders::new([inner.as_path()]);
        fs::create_dir_all(&inner).unwrap();
        drop(made);
        assert!(!place.path().join("a").exists() && place.path().exists());
        let made = MadeFolders::new([inner.as_path()]);
        fs::create_dir_all(&inner).unwrap();
        fs::write(place.path().join("a/mine"), "words").unwrap();
        drop(made);
        assert!(!place.path().join("a/b").exists() && place.path().join("a/mine").exists());
    }

    #[test]
    fn a_folder_of_checkpoints_has_one_run_at_a_time() {
        let place = tempfile::tempdir().unwrap();
        let open = |output: &str, checkpoints: &str| {
            let at = |name: &str| place.path().join(name).display().to_string();
            let options =
                serde_json::json!({"model": "m", "output_dir": at(output), "checkpoint_dir": at(checkpoints)});
            let config = Config::load_json(&options.to_string(), crate::config::Task::Sft, &[]).unwrap();
            RunFolder::open_named(&config, "name".to_owned())
        };
        let first = open("a", "checkpoints").unwrap();
        let reported = open("b", "checkpoints").err().unwrap().to_string();
        assert!(reported.contains("another process is running in"), "{reported}");
        assert!(reported.contains("choose another `checkpoint_dir`"), "{reported}");
        let reported = open("checkpoints", "c").err().unwrap().to_string();
        assert!(reported.contains("choose another `output_dir`"), "{reported}");
        open("d", "d").unwrap();
        drop(first);
        open("b", "checkpoints").unwrap();
    }

    /// Manifests of a stranger's run: nothing outside of the folder is the run's.
    #[test]
    fn a_manifest_gives_nothing_outside_of_the_folder() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name).display().to_string();
        let output = place.path().join("run");
        for folder in ["run/checkpoint-1", "run/sub", "mine/checkpoint-2"] {
            fs::create_dir_all(place.path().join(folder)).unwrap();
        }
        std::os::unix::fs::symlink(at("mine/checkpoint-2"), output.join("checkpoint-3")).unwrap();
        fs::write(at("settings.json"), "{\"precious\": true}").unwrap();
        std::os::unix::fs::symlink(at("settings.json"), output.join("link.json")).unwrap();
        let records: Vec<Value> =
            ["run/checkpoint-1", "mine/checkpoint-2", "run/checkpoint-3", "run/../mine/checkpoint-2"]
                .map(|name| serde_json::json!({"path": at(name), "digest": "0"}))
                .to_vec();
        let open = |log: &str, run_id: &str, option: Option<String>| {
            let manifest = serde_json::json!({"run_id": run_id, "output": at("run"), "log": log, "written": records});
            fs::write(output.join(MANIFEST), manifest.to_string()).unwrap();
            let options = serde_json::json!({
                "model": "m", "output_dir": at("run"), "log_file": option, "resume_from_checkpoint": true,
            });
            let config = Config::load_json(&options.to_string(), crate::config::Task::Sft, &[]).unwrap();
            RunFolder::open_named(&config, "name".to_owned()).map_err(|error| error.to_string())
        };
        let id = "0123456789abcdef";
        let found = open(&at("run/sub/log.json"), id, None).unwrap();
        let written: Vec<_> = found.earlier.unwrap().written.into_iter().map(|record| record.path).collect();
        assert_eq!(written, [output.join("checkpoint-1")]);
        assert!(found.notes.iter().any(|note| note.contains("3 folders outside of `output_dir`")), "{:?}", found.notes);
        // The folder of a run that goes on is locked.
        drop(found._locks);
        for log in
            [at("settings.json"), at("run/../settings.json"), at("run/link.json"), at("new/log.json"), "/".into()]
        {
            let error = open(&log, id, None).err().expect(&log);
            assert!(error.contains("`log_file`") && error.contains("set `log_file` to this path"), "{error}");
        }
        // Nor is a file that is no log cut where the option names it.
        let error = open(&at("settings.json"), id, Some(at("settings.json"))).err().unwrap();
        assert!(error.contains("holds something else"), "{error}");
        assert_eq!(fs::read_to_string(at("settings.json")).unwrap(), "{\"precious\": true}");
        assert!(!place.path().join("new").exists());
        for id in ["", "0", "../../../../../x", "0123456789ABCDEF", "0123456789abcde\n"] {
            let error = open(&at("run/log.json"), id, None).err().expect(id);
            assert!(error.contains("expected 16 hexadecimal digits"), "{error}");
        }
    }

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
