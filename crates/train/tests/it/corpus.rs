//! Regression tests of fuzzing: every file of `fuzz/corpus`, and the fuzzer's seeds, through the same functions.
//!
//! Knows limits of time and memory; what is read, and how, is in `fuzz/targets`.

#[path = "../../../../fuzz/targets/mod.rs"]
mod targets;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use targets::{TARGETS, Target};

/// Time and memory that the fuzzer allows an input.
const LONGEST: Duration = Duration::from_secs(10);
const MOST_KIB: u64 = 2 << 20;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

/// One input at a time: a target has one folder, and a process one peak.
static ONE: Mutex<()> = Mutex::new(());

/// The most memory that this process has had, in KiB.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("the kernel reports a process's memory");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it reports the peak");
    line.trim().trim_end_matches("kB").trim().parse().expect("the peak is a number")
}

/// Reads one input; whether it was taken, or what is wrong with that.
fn read(target: &Target, bytes: &[u8]) -> Result<bool, String> {
    let _one = ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let begin = Instant::now();
    let taken = catch_unwind(AssertUnwindSafe(|| (target.read)(bytes))).map_err(|_| "it panics".to_owned())?;
    match begin.elapsed() {
        seconds if seconds > LONGEST => Err(format!("it takes {} s", seconds.as_secs())),
        _ if peak() > MOST_KIB => Err(format!("the process has taken {} MiB", peak() >> 10)),
        _ => Ok(taken),
    }
}

#[test]
fn seeds_are_taken() {
    let mut problems = Vec::new();
    for target in TARGETS {
        for (number, seed) in (target.seeds)().iter().enumerate() {
            match read(target, seed) {
                Ok(true) => {}
                Ok(false) => problems.push(format!("{}, seed {number}: it is refused and tests nothing", target.name)),
                Err(problem) => problems.push(format!("{}, seed {number}: {problem}", target.name)),
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn what_fuzzing_found_is_refused_or_read() {
    let mut problems = Vec::new();
    for target in TARGETS {
        let Ok(entries) = fs::read_dir(folder().join(target.name)) else { continue };
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            if let Err(problem) = read(target, &fs::read(&path).unwrap()) {
                problems.push(format!("{}: {problem}", path.display()));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_folder_of_the_corpus_has_its_target() {
    let Ok(entries) = fs::read_dir(folder()) else { panic!("there is no corpus") };
    let (mut files, mut bytes) = (0, 0);
    for entry in entries.map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        assert!(TARGETS.iter().any(|target| target.name == name), "fuzz/corpus/{name} is of no target");
        for file in fs::read_dir(entry.path()).unwrap().map(Result::unwrap) {
            files += 1;
            bytes += file.metadata().unwrap().len();
        }
    }
    assert!(
        files > 0 && bytes < 1 << 20,
        "{files} files of {bytes} bytes: a corpus in the repository stays below 1 MiB"
    );
}
