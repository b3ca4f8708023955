//! `cargo xtask kernels [--vendor nvidia|amd] [--all] [ARCHITECTURE|OPERATION…]`: compiles the kernels of every
//! operation's examples, in f32, bf16 and f16, with NVRTC, or for AMD GPUs as `amd.rs` says. Needs no GPU.
//!
//! A text that several architectures share is compiled for the lowest and the newest of them if it reads `__CUDA_ARCH__`,
//! and else for one of the two, alternately. Of an operation whose kernels take long, every third text of a kernel is compiled, for
//! one of its architectures, each time the next. `--all` compiles every text for every architecture. What has compiled is kept in
//! `target/kernels` and not compiled again. Without NVRTC it says so and fails. The CUDA backend's own kernels are compiled
//! by that crate's tests.

mod amd;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use gpu::disk_cache::DiskCache;
use gpu::kernel_cache;
use gpu::library::{Search, open_nvrtc};
use gpu::nvrtc::{Compiler, KernelSource};
use ops::examples::{Instance, instantiate};
use ops::{Class, LowerCall, Lowered, Op};
use program::{Arch, ArenaId, Documents, Machine, TensorRef};
use tensor::{DType, HostTensor};

/// The architectures that the product promises to run on.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"];

/// The variable of a process that compiles a part of the kernels: its number, and the number of all. NVRTC compiles one
/// program at a time in a process, however many threads ask.
const PART: &str = "SUROGATE_KERNELS_PART";

/// Folders with pip wheels, colon-separated.
const WHEELS: &str = "SUROGATE_SITE_PACKAGES";

/// One translation unit. Ordered, so that equal ones are compiled once.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Unit {
    name: String,
    text: String,
    headers: Vec<(&'static str, &'static str)>,
    options: Vec<String>,
}

impl Unit {
    fn source(&self) -> KernelSource<'_> {
        KernelSource { name: &self.name, text: &self.text, headers: &self.headers, options: &self.options }
    }

    /// True if the preprocessor may leave another program on another architecture.
    fn reads_architecture(&self) -> bool {
        let headers = self.headers.iter().map(|(_, text)| *text);
        let reads = |text: &str| ["__CUDA_ARCH__", "HAS_FP8_CONVERSION"].iter().any(|word| text.contains(word));
        headers.chain([self.text.as_str()]).any(reads)
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.options.join(" "))
    }
}

/// Compiles for the architectures and the operations among `words`, of each kind for all where none is named.
///
/// # Errors
/// NVRTC is missing; the kernels that do not compile, with the compiler's words.
pub fn run(words: &[&str]) -> Result<(), String> {
    let crossing = words.contains(&"--all");
    let mut words: Vec<&str> = words.iter().filter(|word| **word != "--all").copied().collect();
    if let Some(at) = words.iter().position(|word| *word == "--vendor") {
        let vendor = words.drain(at..words.len().min(at + 2)).nth(1);
        match vendor {
            Some("nvidia") => {}
            Some("amd") => return amd::run(crossing, &words),
            other => return Err(format!("--vendor is nvidia or amd, and not {}", other.unwrap_or("empty"))),
        }
    }
    let (architectures, names): (Vec<&str>, Vec<&str>) = words.iter().partition(|word| ARCHITECTURES.contains(word));
    let operations = match names.iter().find(|name| ops::find(name).is_err()) {
        Some(unknown) => {
            return Err(format!("`{unknown}` is no operation, and not among {}", ARCHITECTURES.join(", ")));
        }
        None => ops::all().iter().filter(|op| names.is_empty() || names.contains(&op.id().name())),
    };
    let asked = |known: &&str| architectures.is_empty() || architectures.contains(known);
    let architectures: Vec<&'static str> = ARCHITECTURES.into_iter().filter(asked).collect();
    let Ok(part) = std::env::var(PART) else { return compile_in_processes() };
    let (number, parts) = part.split_once('/').ok_or("a part is written as 0/2")?;
    let parsed = |text: &str| text.parse::<usize>().map_err(|e| e.to_string());
    let (number, parts) = (parsed(number)?, parsed(parts)?);
    let targets = targets(operations.copied(), &architectures);
    let mut turns = BTreeMap::<&str, usize>::new();
    let mut jobs: Vec<(&Unit, &str)> = Vec::new();
    for (unit, target) in &targets {
        let turn = turns.entry(&unit.name).or_default();
        let chosen = if crossing { target.architectures.clone() } else { target.sampled(unit, *turn) };
        jobs.extend(chosen.into_iter().map(|architecture| (unit, architecture)));
        *turn += 1;
    }
    compile(jobs.iter().skip(number).step_by(parts).copied())?;
    if number == 0 {
        println!("{} kernels, {} compilations for {}", targets.len(), jobs.len(), architectures.join(", "));
    }
    Ok(())
}

/// The architectures on which operations lower to one text, in the order of `ARCHITECTURES`.
#[derive(Default)]
struct Target {
    architectures: Vec<&'static str>,
    takes_long: bool,
}

impl Target {
    /// Returns the architectures that stand for the others: each side of an `#if __CUDA_ARCH__ >= N` is compiled. `turn` is the
    /// number of the text among those of its kernel: it spreads them over the architectures.
    fn sampled(&self, unit: &Unit, turn: usize) -> Vec<&'static str> {
        match self.architectures.as_slice() {
            _ if self.takes_long && !turn.is_multiple_of(LONG_EVERY) => Vec::new(),
            all if self.takes_long => vec![all[turn / LONG_EVERY % all.len()]],
            [lowest, .., newest] if unit.reads_architecture() => vec![lowest, newest],
            [lowest, .., newest] => vec![if turn.is_multiple_of(2) { lowest } else { newest }],
            all => all.to_vec(),
        }
    }
}

/// A process for each core compiles its part. The error has the messages of all of them.
fn compile_in_processes() -> Result<(), String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let parts = std::thread::available_parallelism().map_or(1, usize::from);
    let started = (0..parts).map(|number| {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).env(PART, format!("{number}/{parts}")).stderr(Stdio::piped());
        command.spawn().map_err(|e| e.to_string())
    });
    let children = started.collect::<Result<Vec<_>, _>>()?;
    let mut failures = String::new();
    for child in children {
        let done = child.wait_with_output().map_err(|e| e.to_string())?;
        if !done.status.success() {
            failures += &format!("{}: {}", done.status, String::from_utf8_lossy(&done.stderr));
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(failures) }
}

fn compile<'a>(jobs: impl Iterator<Item = (&'a Unit, &'a str)>) -> Result<(), String> {
    let roots = std::env::var_os(WHEELS).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default();
    let opened = open_nvrtc(&Search::from_environment(roots));
    let opened = opened.map_err(|e| format!("{e} ({WHEELS} names the folder of its wheel)"))?;
    let compiler = Compiler::new(opened).map_err(|e| e.to_string())?;
    let compiled = DiskCache::new(Some(PathBuf::from("target/kernels")));
    let mut failures = Vec::new();
    for (unit, architecture) in jobs {
        let key = kernel_cache::key(&unit.source(), compiler.version(), architecture);
        if compiled.read(&key).is_some() {
            continue;
        }
        match compiler.compile(&unit.source(), architecture) {
            Ok(_) => compiled.write(&key, &[]),
            Err(error) => failures.push(format!("{unit}\n  {architecture}: {error}")),
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

/// The kernels that the operations' examples lower to, each with its architectures.
fn targets(operations: impl Iterator<Item = &'static dyn Op>, known: &[&'static str]) -> BTreeMap<Unit, Target> {
    let mut targets = BTreeMap::<Unit, Target>::new();
    for op in operations {
        let takes_long = op.class() == Class::Attention || LONG.contains(&op.id().name());
        for instance in instances(op) {
            for architecture in known {
                let arch: Arch = architecture.parse().expect("one of the supported");
                for unit in units_of(&instance, &Machine { arch, ..Machine::h200() }) {
                    let target = targets.entry(unit).or_default();
                    target.takes_long |= takes_long;
                    if !target.architectures.contains(architecture) {
                        target.architectures.push(architecture);
                    }
                }
            }
        }
    }
    targets
}

/// The element types that stand for the activation type.
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Operations besides attention whose kernels take seconds each.
const LONG: [&str; 7] = [
    "cached_attention",
    "cached_delta",
    "gated_delta",
    "gated_delta_backward",
    "grouped_codes",
    "grouped_linear",
    "grouped_weight_gradient",
];

/// The interval at which texts of their kernels are compiled.
const LONG_EVERY: usize = 3;

/// The examples of an operation in every element type; none of one that has no kernels.
fn instances(op: &'static dyn Op) -> impl Iterator<Item = Instance> {
    let examples = if matches!(op.class(), Class::View | Class::Constant) { Vec::new() } else { op.examples() };
    let crossed = examples.into_iter().flat_map(|example| DTYPES.map(|dtype| (example.clone(), dtype)));
    crossed.map(move |(example, dtype)| instantiate(&example, op, dtype, 0))
}

/// The kernels that an example lowers to on a machine.
fn units_of(instance: &Instance, machine: &Machine) -> Vec<Unit> {
    let mut units = lower(instance, &dense, machine);
    // Only elementwise operations take any layout; the others say what they need.
    if instance.op.class() == Class::Elementwise {
        units.extend(lower(instance, &padded_rows, machine));
    }
    units
}

fn dense(tensor: &HostTensor) -> TensorRef {
    TensorRef::dense(ArenaId(0), 0, tensor.dtype, tensor.shape.clone())
}

/// Returns the tensor in the layout of a slice of a wider matrix.
fn padded_rows(tensor: &HostTensor) -> TensorRef {
    let mut at = dense(tensor);
    let outer = at.strides.len().saturating_sub(1);
    at.strides[..outer].iter_mut().for_each(|stride| *stride *= 3);
    at
}

fn lower(instance: &Instance, place: &dyn Fn(&HostTensor) -> TensorRef, machine: &Machine) -> Vec<Unit> {
    let placed = |list: &[HostTensor]| -> Vec<TensorRef> { list.iter().map(place).collect() };
    let (inputs, outputs) = (placed(&instance.inputs), placed(&instance.outputs));
    let documents = Documents::Rows;
    let call = LowerCall { inputs: &inputs, outputs: &outputs, attrs: &instance.attrs, machine, documents };
    match instance.op.lower(&call) {
        Lowered::Kernels(kernels) => kernels
            .into_iter()
            .map(|kernel| Unit {
                name: format!("{}.cu", kernel.entry),
                text: kernel.source,
                headers: kernel.headers,
                options: kernel.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect(),
            })
            .collect(),
        _ => Vec::new(),
    }
}
