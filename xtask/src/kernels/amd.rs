//! `cargo xtask kernels --vendor amd [--all] [TARGET|OPERATION…]`: compiles the same kernels for AMD GPUs. Needs no GPU.
//!
//! The compiler is clang 22 of the wheel `ziglang` with the options of hiprtc and its header, of the wheel `rocm-llvm-python`. The
//! result is assembly: functions of ROCm's device library (`expf` is one) stay calls. Of each kernel one text in 32 is compiled for
//! `SAMPLED`, others for each; `--all` compiles every text for every target. What has compiled is kept in `target/kernels` and
//! not compiled again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpu::disk_cache::{DiskCache, digest};
use gpu::kernels::{HopperProduct, OwnKernel};
use ops::Op;

use super::{ARCHITECTURES, Unit, WHEELS, targets};

/// Every target: CDNA 2, 3 and 4 with waves of 64 lanes, RDNA 3 and 4 with waves of 32.
const TARGETS: [&str; 5] = ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"];

/// A target of each width of a wave, without matrix instructions in the present headers and with them.
const SAMPLED: [&str; 2] = ["gfx942", "gfx1100"];

/// The number of texts of a kernel that one more stands for.
const SAMPLED_EVERY: usize = 32;

/// The headers of kernels that no AMD GPU runs, each with the reason. Every other kernel compiles.
const NO_COUNTERPART: [(&str, &str); 2] = [
    ("handoff.cuh", "barriers in shared memory, clusters of blocks and the copy engine of sm_90"),
    ("wgmma.cuh", "asynchronous products of a warpgroup of sm_90a"),
];

/// Names of the wheels that the compiler consists of.
const WANTED: &str = "ziglang==0.17.1 rocm-llvm-python==7.2.2.562.46";

/// The options that hiprtc sets itself, and no bundle around the result.
const OPTIONS: [&str; 10] = [
    "-x",
    "hip",
    "--offload-device-only",
    "--no-gpu-bundle-output",
    "-nogpulib",
    "-nogpuinc",
    "-D__HIPCC_RTC__",
    "-std=c++17",
    "-O3",
    "-Wno-everything",
];

/// One compilation, and whether it has to succeed.
struct Job<'a> {
    unit: &'a Unit,
    target: &'static str,
    compiles: bool,
}

/// Compiles for the targets and the operations among `words`, of each kind for all where none is named.
///
/// # Errors
/// A part of the compiler is missing; the kernels that do not compile, with the compiler's words; kernels that compile
/// though a header of theirs is in `NO_COUNTERPART`.
pub fn run(every: bool, words: &[&str]) -> Result<(), String> {
    let (named, names): (Vec<&str>, Vec<&str>) = words.iter().partition(|word| TARGETS.contains(word));
    if let Some(unknown) = names.iter().find(|name| ops::find(name).is_err()) {
        return Err(format!("`{unknown}` is no operation, and not among {}", TARGETS.join(", ")));
    }
    let chosen = match (named.is_empty(), every) {
        (true, false) => SAMPLED.to_vec(),
        (true, true) => TARGETS.to_vec(),
        (false, _) => TARGETS.into_iter().filter(|target| named.contains(target)).collect(),
    };
    let compiler = Compiler::find()?;
    let units =
        units(ops::all().iter().copied().filter(|op| names.is_empty() || names.contains(&op.id().name())), &names);
    let jobs = jobs(&units, &chosen, every);
    let failures = compile(&compiler, &jobs, &chosen)?;
    if !failures.is_empty() {
        return Err(failures.join("\n"));
    }
    println!("{} kernels, {} compilations for {}", units.len(), jobs.len(), chosen.join(", "));
    let refused = units.iter().filter(|unit| !is_portable(unit)).count();
    let reasons = NO_COUNTERPART.map(|(header, reason)| format!("{header} ({reason})"));
    println!("{refused} of them are not for AMD GPUs: {}", reasons.join(", "));
    Ok(())
}

/// The texts that operations lower to on any target of either vendor, and the backend's own unless operations are named.
fn units(operations: impl Iterator<Item = &'static dyn Op>, names: &[&str]) -> Vec<Unit> {
    let known: Vec<&'static str> = ARCHITECTURES.into_iter().chain(TARGETS).collect();
    let mut units: Vec<Unit> = targets(operations, &known).into_keys().collect();
    if names.is_empty() {
        units.extend(gpu::kernels::samples().iter().chain(&HopperProduct::samples()).map(own));
    }
    units
}

fn own(kernel: &OwnKernel) -> Unit {
    let source = kernel.source();
    Unit {
        name: source.name.to_owned(),
        text: source.text.to_owned(),
        headers: kernel.headers().to_vec(),
        options: source.options.to_vec(),
    }
}

fn is_portable(unit: &Unit) -> bool {
    let refuses = |name: &str| NO_COUNTERPART.iter().any(|(header, _)| *header == name);
    !unit.headers.iter().any(|(name, _)| refuses(name))
}

/// Chooses for each kernel and each target one text or every text, and for each kernel without counterpart one compilation.
fn jobs<'a>(units: &'a [Unit], targets: &[&'static str], every: bool) -> Vec<Job<'a>> {
    let mut kernels = BTreeMap::<(&str, bool), Vec<&Unit>>::new();
    for unit in units {
        kernels.entry((&unit.name, is_portable(unit))).or_default().push(unit);
    }
    let mut jobs = Vec::new();
    for ((_, compiles), texts) in kernels {
        let mut add = |unit, target| jobs.push(Job { unit, target, compiles });
        match (compiles, every) {
            (false, _) => add(texts[0], targets[0]),
            (true, true) => texts.iter().for_each(|unit| targets.iter().for_each(|target| add(unit, target))),
            (true, false) => {
                let all = (1 + texts.len() / SAMPLED_EVERY) * targets.len();
                (0..all).for_each(|n| add(texts[n * texts.len() / all], targets[n % targets.len()]));
            }
        }
    }
    jobs
}

/// Returns what went wrong with the jobs, on all cores.
fn compile(compiler: &Compiler, jobs: &[Job], targets: &[&str]) -> Result<Vec<String>, String> {
    let done = DiskCache::new(Some(PathBuf::from("target/kernels")));
    let left: Vec<(&Job, String)> = jobs.iter().map(|job| (job, compiler.key(job))).collect();
    let left: Vec<(&Job, String)> = left.into_iter().filter(|(_, key)| done.read(key).is_none()).collect();
    let folder = PathBuf::from("target/amd");
    let preludes = match left.is_empty() {
        true => BTreeMap::new(),
        false => {
            targets.iter().map(|t| Ok((*t, compiler.prelude(&folder.join(t), t)?))).collect::<Result<_, String>>()?
        }
    };
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = |place: PathBuf| {
        while let Some((job, key)) = left.get(next.fetch_add(1, Ordering::Relaxed)) {
            match (compiler.compile(&place, &preludes[job.target], job)?, job.compiles) {
                (Ok(()), true) | (Err(_), false) => done.write(key, &[]),
                (Err(log), true) => {
                    let message = format!("{}\n  {}: {log}", job.unit, job.target);
                    failures.lock().expect("no thread ends inside").push(message);
                }
                (Ok(()), false) => {
                    let message =
                        format!("{}: compiles for {}; NO_COUNTERPART names a header of it", job.unit, job.target);
                    failures.lock().expect("no thread ends inside").push(message);
                }
            }
        }
        Ok::<(), String>(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let places = (0..threads).map(|n| folder.join(n.to_string()));
        let workers: Vec<_> = places.map(|place| scope.spawn(|| work(place))).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })?;
    Ok(failures.into_inner().expect("no thread ended inside"))
}

/// Clang with the header that hiprtc puts before every text.
struct Compiler {
    clang: PathBuf,
    header: PathBuf,
    /// Digest of everything besides the kernel.
    version: String,
}

impl Compiler {
    fn find() -> Result<Compiler, String> {
        let roots: Vec<PathBuf> =
            std::env::var_os(WHEELS).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default();
        let found = |file: &str| {
            let path = roots.iter().map(|root| root.join(file)).find(|path| path.is_file());
            path.ok_or_else(|| format!("no `{file}` in the folders of {WHEELS}: pip install {WANTED}"))
        };
        let (clang, header) = (found("ziglang/zig")?, found("rocm/amd_comgr/hiprtc_runtime.h")?);
        let words = Command::new(&clang).args(["clang", "--version"]).output();
        let words = words.map_err(|e| format!("{}: {e}", clang.display()))?;
        let text = std::fs::read(&header).map_err(|e| format!("{}: {e}", header.display()))?;
        let own = [device::LANGUAGE_AMD.1, device::INTRINSICS_AMD.1].map(str::as_bytes);
        let version = digest(&[&OPTIONS.join(" ").into_bytes(), words.stdout.trim_ascii(), &text, own[0], own[1]]);
        Ok(Compiler { clang, header, version })
    }

    /// A name of everything that decides the result.
    fn key(&self, job: &Job) -> String {
        let unit = job.unit;
        let headers = unit.headers.iter().flat_map(|(name, text)| [name.as_bytes(), text.as_bytes()]);
        let options = unit.options.iter().map(String::as_bytes);
        let parts = [self.version.as_bytes(), job.target.as_bytes(), unit.name.as_bytes(), unit.text.as_bytes()];
        digest(&parts.into_iter().chain(headers).chain(options).collect::<Vec<_>>())
    }

    fn command(&self, target: &str) -> Command {
        let mut command = Command::new(&self.clang);
        command.arg("clang").args(OPTIONS).arg(format!("--offload-arch={target}"));
        command
    }

    /// Compiles what stands before every text, once for a target.
    fn prelude(&self, folder: &Path, target: &str) -> Result<PathBuf, String> {
        let header = std::path::absolute(&self.header).map_err(|e| e.to_string())?;
        let (name, language) = device::LANGUAGE_AMD;
        let text = format!("#include \"{}\"\n#include \"{name}\"\n", header.display());
        write(&folder.join(name), language)?;
        let (source, compiled) = (folder.join("prelude.hip"), folder.join("prelude.pch"));
        write(&source, &text)?;
        let mut command = self.command(target);
        command.args(["-Xclang", "-emit-pch", "-S", "-o"]).arg(&compiled).arg(&source);
        finished(command)?.map_err(|log| format!("hiprtc's header for {target}: {log}"))?;
        Ok(compiled)
    }

    /// Compiles a text in a folder of its own; the inner error is the compiler's refusal.
    fn compile(&self, folder: &Path, prelude: &Path, job: &Job) -> Result<Result<(), String>, String> {
        let source = folder.join(&job.unit.name);
        write(&source, &job.unit.text)?;
        for (name, text) in job.unit.headers.iter().copied().chain([device::INTRINSICS_AMD]) {
            write(&folder.join(name), text)?;
        }
        let mut command = self.command(job.target);
        command.args(["-Xclang", "-include-pch", "-Xclang"]).arg(prelude).args(&job.unit.options);
        command.args(["-S", "-o"]).arg(folder.join("result.s")).arg(&source);
        finished(command)
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    let folder = path.parent().expect("a file lies in a folder");
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(path, text));
    written.map_err(|e| format!("{}: {e}", path.display()))
}

/// Runs a compiler to its end; the inner error is the first of its messages.
fn finished(mut command: Command) -> Result<Result<(), String>, String> {
    let output = command.output().map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    if output.status.success() {
        return Ok(Ok(()));
    }
    let log = String::from_utf8_lossy(&output.stderr);
    let first: Vec<&str> = log.lines().take(12).collect();
    Ok(Err(first.join("\n  ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(name: &str, option: &str, headers: &[&'static str]) -> Unit {
        let headers = headers.iter().map(|name| (*name, "")).collect();
        Unit { name: name.into(), text: String::new(), headers, options: vec![option.into()] }
    }

    #[test]
    fn each_kernel_is_sampled_for_each_target() {
        let texts = ["-D1", "-D2", "-D3", "-D4"].map(|option| unit("a.cu", option, &["types.cuh"]));
        let others = [unit("a.cu", "-D5", &["wgmma.cuh"]), unit("b.cu", "-D6", &[])];
        let units: Vec<Unit> = texts.into_iter().chain(others).collect();
        let sampled = |every| -> Vec<(String, &str, bool)> {
            let jobs = jobs(&units, &SAMPLED, every);
            jobs.iter().map(|job| (job.unit.options[0].clone(), job.target, job.compiles)).collect()
        };
        let expected = [
            ("-D5", "gfx942", false),
            ("-D1", "gfx942", true),
            ("-D3", "gfx1100", true),
            ("-D6", "gfx942", true),
            ("-D6", "gfx1100", true),
        ];
        assert_eq!(sampled(false), expected.map(|(option, target, compiles)| (option.to_owned(), target, compiles)));
        assert_eq!(sampled(true).iter().filter(|(.., compiles)| *compiles).count(), 5 * SAMPLED.len());
    }

    #[test]
    fn kernels_without_a_counterpart_do_not_become_more() {
        assert!(NO_COUNTERPART.len() <= 2, "write the kernel with functions of intrinsics.cuh");
        let of = |op: &str| units([ops::find(op).unwrap()].into_iter(), &[op]);
        let refused = of("grouped_linear").iter().filter(|unit| !is_portable(unit)).count();
        assert!(refused > 0 && refused < of("grouped_linear").len());
        assert!(of("rmsnorm").iter().all(is_portable));
    }
}
