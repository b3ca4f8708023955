//! Folders that appear atomically: written under a temporary name, synced, then renamed, and removed the same way.
//! Small files that are replaced atomically.
//!
//! Knows paths and [`Written`]; not what a result or a checkpoint contains.

use std::cell::OnceCell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use data::in_making::InMaking;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

use crate::error::{Result, TrainError};
use crate::files::digest;
use crate::files::written::{Record, Written, names};

/// A folder in progress. Dropped without [`Staged::commit`], it is removed.
#[derive(Debug)]
pub struct Staged {
    target: PathBuf,
    temporary: PathBuf,
    _in_making: InMaking,
    digest: OnceCell<String>,
    committed: bool,
    /// Locked as long as the folder is written: the lock ends with the process, however that ends.
    _lock: Option<File>,
}

impl Staged {
    /// Starts a folder that will be `target`; parents are made. What is there already is an error,
    /// unless it is empty or was written by the same run.
    pub fn begin(written: &Written, target: &Path) -> Result<Staged> {
        let name = target
            .file_name()
            .ok_or_else(|| TrainError::Usage(format!("{} is not a valid folder name", target.display())))?;
        written.check(target)?;
        let parent = parent(target);
        fs::create_dir_all(&parent).map_err(|e| TrainError::io("create", &parent, e))?;
        let (temporary, ()) = free_name(&parent, name, &written.owner, |path| fs::create_dir(path))?;
        let (lock, in_making) = (lock(&temporary), InMaking::new(&temporary));
        Ok(Staged {
            target: target.to_owned(),
            temporary,
            _in_making: in_making,
            digest: OnceCell::new(),
            committed: false,
            _lock: lock,
        })
    }

    /// Removes what earlier processes of the same `owner` that were killed left of `target`, and says which folders. One
    /// that another process is writing is locked and stays; so does a new and empty one, which may be about to be locked.
    pub fn clear_abandoned(owner: &str, target: &Path) -> Result<Vec<PathBuf>> {
        let (parent, Some(name)) = (parent(target), target.file_name()) else { return Ok(Vec::new()) };
        let begin = format!(".{}.{owner}.", name.to_string_lossy());
        let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let of_this_form = |text: &str| {
            let middle = text.strip_prefix(&begin).and_then(|rest| rest.strip_suffix(".tmp"));
            middle
                .and_then(|rest| rest.split_once('.'))
                .is_some_and(|(process, attempt)| number(process) && number(attempt))
        };
        let mut removed = Vec::new();
        let found = if parent.is_dir() { names(&parent) } else { return Ok(removed) };
        for entry in found.map_err(|e| TrainError::io("read", &parent, e))? {
            let path = parent.join(&entry);
            let Ok(data) = fs::symlink_metadata(&path) else { continue };
            let is_empty = || names(&path).is_ok_and(|inside| inside.is_empty());
            let is_new = || data.modified().ok().and_then(|made| made.elapsed().ok()).is_none_or(|age| age < NEW);
            if !data.is_dir() || !of_this_form(&entry.to_string_lossy()) || (is_new() && is_empty()) {
                continue;
            }
            if let Some(_held) = lock(&path) {
                fs::remove_dir_all(&path).map_err(|e| TrainError::io("remove", &path, e))?;
                removed.push(path);
            }
        }
        Ok(removed)
    }

    /// The folder to write to.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Writes and syncs a small file.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        write_synced(&self.temporary.join(name), text.as_bytes())
    }

    /// The entry of the folder in a manifest; the folder is complete from now on. To be kept before [`Staged::commit`]:
    /// a process that is killed between the two finds the folder as its own afterwards.
    pub fn record(&self) -> Result<Record> {
        let folder = parent(&self.target);
        let place = folder.canonicalize().map_err(|e| TrainError::io("read", &folder, e))?;
        let digest = match self.digest.get() {
            Some(digest) => digest.clone(),
            None => digest::of_folder(&self.temporary).map_err(|e| TrainError::io("read", &self.temporary, e))?,
        };
        let _ = self.digest.set(digest.clone());
        Ok(Record { path: place.join(self.target.file_name().expect("a target has a name")), digest })
    }

    /// Gives the folder its name. An earlier folder of the same run is exchanged for it and removed; an
    /// error if something else has come there meanwhile.
    pub fn commit(mut self, written: &mut Written) -> Result<()> {
        sync(&self.temporary)?;
        let record = self.record()?;
        let replaces = written.check(&self.target)?;
        if replaces { exchange(&self.temporary, &self.target) } else { fs::rename(&self.temporary, &self.target) }
            .map_err(|e| TrainError::io("write", &self.target, e))?;
        self.committed = true;
        sync(&parent(&self.target))?;
        written.add(&self.target, record.digest)?;
        if replaces {
            fs::remove_dir_all(&self.temporary).map_err(|e| TrainError::io("remove", &self.temporary, e))?;
        }
        Ok(())
    }
}

/// The time within which a folder that was made is locked.
const NEW: Duration = Duration::from_secs(60);

/// A folder's lock, if it is free and its file system has locks.
pub fn lock(folder: &Path) -> Option<File> {
    let file = File::open(folder).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(file)
}

/// A free name next to `name`, taken by `take`, with what that gives: hidden, with the run (`owner`) in it, so that a
/// later process of the run finds its remains.
pub fn free_name<T>(
    parent: &Path,
    name: &OsStr,
    owner: &str,
    take: impl Fn(&Path) -> io::Result<T>,
) -> Result<(PathBuf, T)> {
    let mut attempt = 0;
    loop {
        let temporary = format!(".{}.{owner}.{}.{attempt}.tmp", name.to_string_lossy(), std::process::id());
        let path = parent.join(temporary);
        match take(&path) {
            Ok(taken) => return Ok((path, taken)),
            Err(error) if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty) => {
                attempt += 1;
            }
            Err(error) => return Err(TrainError::io("create", &path, error)),
        }
    }
}

/// Removes a folder of the run: it vanishes whole under its name, also when the process is killed meanwhile.
pub fn remove(written: &Written, path: &Path) -> Result<()> {
    let name = path.file_name().expect("a written folder has a name");
    let (aside, ()) = free_name(&parent(path), name, &written.owner, |aside| fs::rename(path, aside))?;
    fs::remove_dir_all(&aside).map_err(|e| TrainError::io("remove", &aside, e))
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}

/// Exchanges two folders in one step. A file system that has no such step gets three renames, of which
/// the first is taken back if the second fails.
fn exchange(new: &Path, old: &Path) -> io::Result<()> {
    match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => exchange_by_renames(new, old),
        result => Ok(result?),
    }
}

fn exchange_by_renames(new: &Path, old: &Path) -> io::Result<()> {
    let aside = new.with_extension("old");
    fs::rename(old, &aside)?;
    if let Err(error) = fs::rename(new, old) {
        fs::rename(&aside, old)?;
        return Err(error);
    }
    fs::rename(&aside, new)
}

/// The folder that a path is in.
fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| TrainError::io("sync", folder, e))
}

/// A file that was not there: neither a file nor the target of a link is written to.
pub fn create_new(path: &Path) -> io::Result<File> {
    File::create_new(path)
}

/// Writes a file that was not there, and waits until it is on the disk.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || fill(&mut create_new(path)?, bytes);
    write().map_err(|e| TrainError::io("write", path, e))
}

fn fill(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.sync_all()
}

/// Gives a small file new content in one step: a reader finds the old or the new, never a part.
///
/// `owner` is the run, part of the name under which the file is written first.
pub fn replace_file(path: &Path, owner: &str, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().expect("a file to replace has a name");
    let (temporary, mut file) = free_name(&parent(path), name, owner, create_new)?;
    let replaced = fill(&mut file, bytes).and_then(|()| fs::rename(&temporary, path));
    if replaced.is_err() {
        // What could not be written whole is of no use, and its place may be what is lacking.
        let _ = fs::remove_file(&temporary);
    }
    replaced.map_err(|e| TrainError::io("write", path, e))?;
    sync(&parent(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(written: &mut Written, target: &Path, text: &str) -> Result<()> {
        let staged = Staged::begin(written, target)?;
        staged.write("config.json", text)?;
        staged.commit(written)
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("merged");
        let written = Written::by("merge");
        let alive = Staged::begin(&written, &target).unwrap();
        alive.write("config.json", "{}").unwrap();
        let folder = |name: &str, file: Option<&str>| {
            let path = place.path().join(name);
            fs::create_dir(&path).unwrap();
            if let Some(file) = file {
                fs::write(path.join(file), "half").unwrap();
            }
            path
        };
        let dead = folder(".merged.merge.17.0.tmp", Some(".model.safetensors.17-0.tmp"));
        let kept = [
            folder(".merged.merge.18.0.tmp", None),
            folder(".merged.merge.notes.0.tmp", Some("mine")),
            folder(".merged.other.17.0.tmp", Some("model.safetensors")),
            folder(".another.merge.17.0.tmp", Some("model.safetensors")),
        ];
        std::os::unix::fs::symlink(&kept[2], place.path().join(".merged.merge.19.0.tmp")).unwrap();
        // Killed before it wrote anything: of the same age as one that has just been made, and older.
        let empty = folder(".merged.merge.20.0.tmp", None);
        File::open(&empty).unwrap().set_modified(std::time::SystemTime::now() - 2 * NEW).unwrap();
        let mut removed = Staged::clear_abandoned("merge", &target).unwrap();
        removed.sort();
        assert_eq!(removed, [dead.clone(), empty.clone()]);
        assert!(!dead.exists() && !empty.exists() && alive.path().join("config.json").exists());
        assert!(kept.iter().all(|path| path.exists()) && kept[2].join("model.safetensors").exists());
        assert!(Staged::clear_abandoned("merge", &place.path().join("absent/merged")).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_cannot_be_replaced_leaves_nothing_beside_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("manifest.json");
        replace_file(&path, "run", b"old").unwrap();
        replace_file(&path, "run", b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        // What is under the name that is written first is not written to.
        let mine = place.path().join("mine");
        fs::write(&mine, "important").unwrap();
        for name in [".manifest.json.run.tmp".to_owned(), format!(".manifest.json.run.{}.0.tmp", std::process::id())] {
            std::os::unix::fs::symlink(&mine, place.path().join(name)).unwrap();
        }
        replace_file(&path, "run", b"newer").unwrap();
        assert_eq!((fs::read(&path).unwrap(), fs::read(&mine).unwrap()), (b"newer".to_vec(), b"important".to_vec()));
        // A folder is not replaced by a file.
        let taken = place.path().join("taken");
        fs::create_dir(&taken).unwrap();
        assert!(replace_file(&taken, "run", b"new").is_err());
        let left: Vec<_> = names(place.path()).unwrap().into_iter().collect();
        assert_eq!(left.len(), 5, "{left:?}");
    }

    fn read(target: &Path) -> String {
        fs::read_to_string(target.join("config.json")).unwrap()
    }

    #[test]
    fn a_folder_appears_when_it_is_committed() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("a/result");
        let mut written = Written::default();
        let staged = Staged::begin(&written, &target).unwrap();
        staged.write("config.json", "1").unwrap();
        assert!(!target.exists());
        staged.commit(&mut written).unwrap();
        assert_eq!(read(&target), "1");
        drop(Staged::begin(&written, &target).unwrap());
        write(&mut written, &target, "2").unwrap();
        assert_eq!(read(&target), "2");
        assert_eq!(names(target.parent().unwrap()).unwrap().len(), 1, "nothing is left over");
        assert_eq!(written.paths(), [target.canonicalize().unwrap()]);
    }

    #[test]
    fn what_others_wrote_survives() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("model");
        write(&mut Written::default(), &target, "theirs").unwrap();
        let mut written = Written::default();
        let error = write(&mut written, &target, "mine").unwrap_err().to_string();
        assert!(error.contains("model is a model (`config.json`), expected nothing") && error.contains("hint: "));
        assert_eq!(read(&target), "theirs");

        for name in ["thesis.tex", "file", "link"] {
            let path = place.path().join(name);
            match name {
                "file" => fs::write(&path, "important").unwrap(),
                "link" => std::os::unix::fs::symlink(&target, &path).unwrap(),
                _ => fs::create_dir(&path).and_then(|()| fs::write(path.join(name), "important")).unwrap(),
            }
            let error = write(&mut written, &path, "mine").unwrap_err();
            assert!(error.exit_code() == 2 && error.to_string().contains("nothing is overwritten"), "{error}");
        }
        assert_eq!(fs::read_to_string(place.path().join("thesis.tex/thesis.tex")).unwrap(), "important");
        assert_eq!(names(place.path()).unwrap().len(), 4, "nothing is left over");
    }

    #[test]
    fn what_was_changed_since_or_comes_meanwhile_survives() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("model");
        let (mut mine, mut theirs) = (Written::default(), Written::default());
        write(&mut mine, &target, "mine").unwrap();
        fs::rename(&target, place.path().join("kept")).unwrap();
        write(&mut theirs, &target, "theirs").unwrap();
        assert!(write(&mut mine, &target, "again").is_err(), "the name is mine, the folder is not");
        fs::write(target.join("notes.txt"), "by hand").unwrap();
        assert!(write(&mut theirs, &target, "again").is_err(), "a file was added to it");
        assert_eq!((read(&target), read(&place.path().join("kept"))), ("theirs".into(), "mine".into()));

        let late = place.path().join("late");
        let staged = Staged::begin(&mine, &late).unwrap();
        write(&mut theirs, &late, "theirs").unwrap();
        assert!(staged.commit(&mut mine).is_err());
        assert_eq!(read(&late), "theirs");
    }

    #[test]
    fn folders_are_exchanged_without_help_of_the_file_system() {
        let place = tempfile::tempdir().unwrap();
        let (new, old) = (place.path().join("new.tmp"), place.path().join("old"));
        for path in [&new, &old] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("config.json"), path.file_name().unwrap().to_str().unwrap()).unwrap();
        }
        exchange_by_renames(&new, &old).unwrap();
        assert_eq!((read(&new).as_str(), read(&old).as_str()), ("old", "new.tmp"));
        fs::remove_dir_all(&new).unwrap();
        assert!(exchange_by_renames(&new, &old).is_err());
        assert_eq!(read(&old), "new.tmp", "the old folder is back in its place");
    }

    #[test]
    fn a_later_process_takes_back_what_is_unchanged() {
        let place = tempfile::tempdir().unwrap();
        let (kept, changed, gone) =
            (place.path().join("kept"), place.path().join("changed"), place.path().join("gone"));
        let mut first = Written::by("run");
        for target in [&kept, &changed, &gone] {
            write(&mut first, target, "mine").unwrap();
        }
        let staged = Staged::begin(&first, &place.path().join("late")).unwrap();
        staged.write("config.json", "mine").unwrap();
        let mut records = first.records();
        records.push(staged.record().unwrap());
        std::mem::forget(staged);
        std::mem::forget(Staged::begin(&Written::by("other"), &place.path().join("late")).unwrap());
        fs::write(changed.join("config.json"), "else").unwrap();
        remove(&first, &gone).unwrap();

        let mut second = Written::by("run");
        second.take_back(&records).unwrap();
        second.clear_unfinished(place.path()).unwrap();
        assert_eq!(second.paths(), [kept.canonicalize().unwrap()]);
        let left: Vec<String> =
            names(place.path()).unwrap().into_iter().map(|name| name.into_string().unwrap()).collect();
        assert!(left.len() == 3 && left[0].starts_with(".late.other.") && left[1..] == ["changed", "kept"], "{left:?}");
        write(&mut second, &kept, "again").unwrap();
        assert!(write(&mut second, &changed, "again").is_err(), "it was changed");
    }

    #[test]
    fn a_folder_that_appeared_after_its_record_is_the_runs_own() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("model");
        let mut first = Written::by("run");
        write(&mut first, &target, "1").unwrap();
        let staged = Staged::begin(&first, &target).unwrap();
        staged.write("config.json", "2").unwrap();
        let records = [first.records(), vec![staged.record().unwrap()]].concat();
        let resumed = |records: &[Record]| {
            let mut written = Written::by("run");
            written.take_back(records).unwrap();
            written.paths().len()
        };
        assert_eq!(resumed(&records), 1, "killed before the folder appeared");
        staged.commit(&mut first).unwrap();
        assert_eq!(resumed(&records), 1, "killed after it");
        assert_eq!(resumed(&records[..1]), 0, "without the record it would be another's");
    }
}
