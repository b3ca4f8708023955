//! `cargo xtask kernels [ARCHITECTURE|OPERATION…]`: compiles every kernel of every operation's examples, in f32, bf16 and
//! f16, with NVRTC for every supported architecture. Needs no GPU.
//!
//! Without NVRTC it says so and skips. It knows no kernel by name. The CUDA backend's own kernels are compiled by that
//! crate's tests.

use std::collections::BTreeSet;
use std::fmt;
use std::process::{Command, Stdio};

use cuda::library::{Search, open_nvrtc};
use cuda::nvrtc::{Compiler, KernelSource};
use ops::examples::{Instance, instantiate};
use ops::{Class, LowerCall, Lowered, Op};
use program::{Arch, ArenaId, Documents, Machine, TensorRef};
use tensor::{DType, HostTensor};

/// What the product promises to run on.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"];

/// Of a process that compiles a part of the kernels: its number and how many there are. NVRTC compiles one program at a time
/// in a process, however many threads ask.
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
    let (architectures, names): (Vec<&str>, Vec<&str>) = words.iter().partition(|word| ARCHITECTURES.contains(word));
    let operations = match names.iter().find(|name| ops::find(name).is_err()) {
        Some(unknown) => {
            return Err(format!("`{unknown}` is no operation, and not among {}", ARCHITECTURES.join(", ")));
        }
        None => ops::all().iter().filter(|op| names.is_empty() || names.contains(&op.id().name())),
    };
    let operations: Vec<&'static dyn Op> = operations.copied().collect();
    let architectures = if architectures.is_empty() { ARCHITECTURES.to_vec() } else { architectures };
    let jobs: BTreeSet<(Unit, &str)> =
        architectures.iter().flat_map(|architecture| jobs_of(&operations, architecture)).collect();
    if let Ok(part) = std::env::var(PART) {
        let (number, parts) = part.split_once('/').ok_or("a part is written as 0/2")?;
        let parsed = |text: &str| text.parse::<usize>().map_err(|e| e.to_string());
        let (number, parts) = (parsed(number)?, parsed(parts)?);
        return compile(jobs.iter().skip(number).step_by(parts));
    }
    compile_in_processes(words)?;
    let units: BTreeSet<&Unit> = jobs.iter().map(|(unit, _)| unit).collect();
    println!("{} kernels compile for {}, {} times", units.len(), architectures.join(", "), jobs.len());
    Ok(())
}

/// A process for each core compiles its part. The error has what all of them say.
fn compile_in_processes(words: &[&str]) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let parts = std::thread::available_parallelism().map_or(1, usize::from);
    let started = (0..parts).map(|number| {
        let mut command = Command::new(&program);
        command.arg("kernels").args(words).env(PART, format!("{number}/{parts}")).stderr(Stdio::piped());
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

fn compile<'a>(jobs: impl Iterator<Item = &'a (Unit, &'a str)>) -> Result<(), String> {
    let roots = std::env::var_os(WHEELS).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default();
    let opened = open_nvrtc(&Search::from_environment(roots));
    let opened = opened.map_err(|e| format!("{e} ({WHEELS} names the folder of its wheel)"))?;
    let compiler = Compiler::new(opened).map_err(|e| e.to_string())?;
    let mut failures = Vec::new();
    for (unit, architecture) in jobs {
        let source =
            KernelSource { name: &unit.name, text: &unit.text, headers: &unit.headers, options: &unit.options };
        if let Err(error) = compiler.compile(&source, architecture) {
            failures.push(format!("{unit}\n  {architecture}: {error}"));
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

/// What the operations' examples become on one architecture.
fn jobs_of<'a>(operations: &[&'static dyn Op], architecture: &'a str) -> Vec<(Unit, &'a str)> {
    let machine = Machine { arch: Arch::Cuda(architecture.parse().expect("one of the supported")), ..Machine::h200() };
    let units = operations.iter().flat_map(|op| units_of(*op, &machine));
    units.map(|unit| (unit, architecture)).collect()
}

/// The element types that stand for the activation type.
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Kernels of attention take long to compile: an example in one type goes to one architecture of so many, in turn. No
/// multiple of the types, so that every architecture sees each of them.
const ATTENTION_TURNS: usize = 5;

fn is_skipped(op: &dyn Op, index: usize, machine: &Machine) -> bool {
    let place = ARCHITECTURES.iter().position(|known| *known == machine.arch.to_string()).unwrap_or(0);
    op.class() == Class::Attention && !(index + place).is_multiple_of(ATTENTION_TURNS)
}

/// The kernels that an operation lowers its examples to on a machine.
fn units_of(op: &'static dyn Op, machine: &Machine) -> Vec<Unit> {
    if matches!(op.class(), Class::View | Class::Constant) {
        return Vec::new();
    }
    let mut units = Vec::new();
    let examples = op.examples();
    for (index, (example, dtype)) in examples.iter().flat_map(|e| DTYPES.iter().map(move |d| (e, d))).enumerate() {
        if is_skipped(op, index, machine) {
            continue;
        }
        let instance = instantiate(example, op, *dtype, 0);
        for padded in [false, true] {
            let place = |t: &HostTensor| if padded { padded_rows(t) } else { dense(t) };
            units.extend(lower(&instance, &place, machine));
            // Only elementwise operations take any layout; the others say what they need.
            if op.class() != Class::Elementwise {
                break;
            }
        }
    }
    units
}

fn dense(tensor: &HostTensor) -> TensorRef {
    TensorRef::dense(ArenaId(0), 0, tensor.dtype, tensor.shape.clone())
}

/// As a slice of a wider matrix is in memory.
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
