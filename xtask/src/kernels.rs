//! `cargo xtask kernels [ARCHITECTURE…]`: every kernel of every operation's examples, in f32 and bf16,
//! compiled by NVRTC for every architecture that is supported. Needs no GPU.
//!
//! Where there is no NVRTC it says so and skips. It knows no kernel by name. The CUDA backend's own
//! kernels are compiled by that crate's tests.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use cuda::Error;
use cuda::library::{Search, open_nvrtc};
use cuda::nvrtc::{Compiler, KernelSource};
use ops::examples::{Instance, instantiate};
use ops::{Class, LowerCall, Lowered, Op};
use program::{ArenaId, Documents, Machine, TensorRef};
use tensor::{DType, HostTensor};

/// What the product promises to run on.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"];

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

/// Compiles for `architectures`, all supported ones when none is named.
///
/// # Errors
/// The kernels that do not compile, with the compiler's words.
pub fn run(architectures: &[&str]) -> Result<(), String> {
    if let Some(unknown) = architectures.iter().find(|a| !ARCHITECTURES.contains(a)) {
        return Err(format!("`{unknown}` is not among {}", ARCHITECTURES.join(", ")));
    }
    let architectures = if architectures.is_empty() { &ARCHITECTURES[..] } else { architectures };
    let roots = std::env::var_os(WHEELS).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default();
    let compiler = match open_nvrtc(&Search::from_environment(roots)) {
        Ok(opened) => Compiler::new(opened).map_err(|e| e.to_string())?,
        Err(missing @ Error::LibraryMissing { .. }) => {
            println!("SKIPPED, no NVRTC (name the folder of its wheel in {WHEELS}): {missing}");
            return Ok(());
        }
        Err(other) => return Err(other.to_string()),
    };
    let units: BTreeSet<Unit> = ops::all().iter().flat_map(|op| units_of(*op)).collect();
    let jobs: Vec<(&Unit, &str)> = units.iter().flat_map(|u| architectures.iter().map(move |a| (u, *a))).collect();
    let failures = compile_all(&compiler, &jobs);
    if failures.is_empty() {
        println!("{} kernels compile for {}", units.len(), architectures.join(", "));
        return Ok(());
    }
    Err(format!("{} of {} compilations failed\n{}", failures.len(), jobs.len(), failures.join("\n")))
}

/// On all cores; gives the failures in the order of the jobs.
fn compile_all(compiler: &Compiler, jobs: &[(&Unit, &str)]) -> Vec<String> {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some((index, (unit, architecture))) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            jobs.get(index).map(|job| (index, job))
        } {
            let source =
                KernelSource { name: &unit.name, text: &unit.text, headers: &unit.headers, options: &unit.options };
            if let Err(error) = compiler.compile(&source, architecture) {
                let message = format!("{unit}\n  {architecture}: {error}");
                failures.lock().expect("no thread panics while it holds the list").push((index, message));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut failures = failures.into_inner().expect("no thread panics while it holds the list");
    failures.sort();
    failures.into_iter().map(|(_, message)| message).collect()
}

/// The kernels that an operation lowers its examples to.
fn units_of(op: &'static dyn Op) -> Vec<Unit> {
    if matches!(op.class(), Class::View | Class::Constant) {
        return Vec::new();
    }
    let mut units = Vec::new();
    for example in op.examples() {
        for dtype in [DType::F32, DType::BF16] {
            let instance = instantiate(&example, op, dtype, 0);
            for padded in [false, true] {
                let place = |t: &HostTensor| if padded { padded_rows(t) } else { dense(t) };
                units.extend(lower(&instance, &place));
                // Only elementwise operations take any layout; the others say what they need.
                if op.class() != Class::Elementwise {
                    break;
                }
            }
        }
    }
    units
}

fn dense(tensor: &HostTensor) -> TensorRef {
    TensorRef::dense(ArenaId(0), 0, tensor.dtype, tensor.shape.clone())
}

/// As a slice of a wider matrix lies in memory.
fn padded_rows(tensor: &HostTensor) -> TensorRef {
    let mut at = dense(tensor);
    let outer = at.strides.len().saturating_sub(1);
    at.strides[..outer].iter_mut().for_each(|stride| *stride *= 3);
    at
}

fn lower(instance: &Instance, place: &dyn Fn(&HostTensor) -> TensorRef) -> Vec<Unit> {
    let placed = |list: &[HostTensor]| -> Vec<TensorRef> { list.iter().map(place).collect() };
    let (inputs, outputs, machine) = (placed(&instance.inputs), placed(&instance.outputs), Machine::h200());
    let call = LowerCall {
        inputs: &inputs,
        outputs: &outputs,
        attrs: &instance.attrs,
        machine: &machine,
        documents: Documents::Rows,
    };
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
