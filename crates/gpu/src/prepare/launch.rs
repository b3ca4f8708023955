//! Kernel launches with their arguments resolved to bytes. Does not know what kernels compute.
#![allow(unsafe_code, reason = "launches kernels with arguments that the program describes")]

use super::Preparation;
use crate::driver::{Described, Function, LaunchShape, Module, Stream};
use crate::engine::Engine;
use crate::error::{During, Result};
use crate::nvrtc::KernelSource;
use crate::sys::driver::TENSOR_MAP_WORDS;
use program::{Arg, Kernel, KernelCall, KernelId, Launch, TensorRef};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use tensor::DType;

/// Bytes above which a kernel must request its dynamic shared memory.
const SHARED_BYTES_WITHOUT_ASKING: u32 = 48 << 10;

/// The program's kernels, compiled and loaded.
pub(crate) struct Kernels {
    entries: Vec<String>,
    modules: Vec<Arc<Module>>,
    /// True for each kernel that waits by itself for earlier work (programmatic dependent launch).
    dependent: Vec<bool>,
}

impl Kernels {
    pub fn new(engine: &Engine, kernels: &[Kernel]) -> Result<Kernels> {
        let mut new = Kernels { entries: Vec::new(), modules: Vec::new(), dependent: Vec::new() };
        new.adopt(engine, &[], kernels)?;
        Ok(new)
    }

    /// Loads the kernels of another program in place of those of `before`, which are loaded. Loads only new ones.
    pub fn adopt(&mut self, engine: &Engine, before: &[Kernel], kernels: &[Kernel]) -> Result<()> {
        let known: HashMap<&Kernel, &Arc<Module>> = before.iter().zip(&self.modules).collect();
        let new: Vec<&Kernel> = kernels.iter().filter(|kernel| !known.contains_key(kernel)).collect();
        let texts: Vec<Texts> = new.iter().map(|kernel| Texts::new(kernel)).collect();
        let sources: Vec<KernelSource> = new.iter().zip(&texts).map(|(kernel, t)| t.source(kernel)).collect();
        let mut loaded = engine.modules(&sources)?.into_iter();
        let module = |kernel| match known.get(kernel) {
            Some(module) => Arc::clone(module),
            None => loaded.next().expect("every new kernel was loaded"),
        };
        self.modules = kernels.iter().map(module).collect();
        self.entries = kernels.iter().map(|kernel| kernel.entry.clone()).collect();
        let follows = |kernel: &Kernel| kernel.headers.iter().any(|(name, _)| name == device::DEPENDENT_LAUNCH.0);
        self.dependent = kernels.iter().map(follows).collect();
        Ok(())
    }

    fn function(&self, id: KernelId) -> Result<(Function, &str)> {
        let entry = &self.entries[id.0 as usize];
        Ok((self.modules[id.0 as usize].function(entry)?, entry))
    }
}

/// The texts that a [`KernelSource`] borrows and a [`Kernel`] does not hold in that form.
struct Texts<'a> {
    name: String,
    headers: Vec<(&'a str, &'a str)>,
    options: Vec<String>,
}

impl<'a> Texts<'a> {
    fn new(kernel: &'a Kernel) -> Texts<'a> {
        Texts {
            name: format!("{}.cu", kernel.entry),
            headers: kernel.headers.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect(),
            options: kernel.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect(),
        }
    }

    fn source(&'a self, kernel: &'a Kernel) -> KernelSource<'a> {
        KernelSource { name: &self.name, text: &kernel.source, headers: &self.headers, options: &self.options }
    }
}

/// Values of kernel parameters, each in 8-byte words of its own.
pub(super) struct Arguments {
    words: Vec<u64>,
    /// Start of each parameter, in words.
    starts: Vec<usize>,
    pointers: Vec<*mut c_void>,
}

// SAFETY: the pointers are rebuilt from the owned words before every use.
unsafe impl Send for Arguments {}

impl Arguments {
    pub fn new() -> Arguments {
        Arguments { words: vec![], starts: vec![], pointers: vec![] }
    }

    /// A parameter of up to 8 bytes: an address, or a number in the low bytes.
    pub fn word(mut self, value: u64) -> Arguments {
        self.starts.push(self.words.len());
        self.words.push(value);
        self
    }

    /// A struct parameter, as the words that its fields fill.
    pub fn structure(mut self, words: &[u64]) -> Arguments {
        self.starts.push(self.words.len());
        self.words.extend_from_slice(words);
        self
    }

    fn pointers(&mut self) -> &mut [*mut c_void] {
        let base: *mut u64 = self.words.as_mut_ptr();
        self.pointers.clear();
        // SAFETY: every start is an index into the words.
        self.pointers.extend(self.starts.iter().map(|start| unsafe { base.add(*start) }.cast::<c_void>()));
        &mut self.pointers
    }
}

/// A kernel call ready to be queued.
pub(crate) struct BoundLaunch {
    function: Function,
    shape: LaunchShape,
    arguments: Arguments,
    name: String,
}

impl BoundLaunch {
    pub(super) fn new(function: Function, name: &str, shape: LaunchShape, arguments: Arguments) -> BoundLaunch {
        BoundLaunch { function, shape, arguments, name: name.to_owned() }
    }

    pub fn queue(&mut self, stream: &Stream) -> Result<()> {
        // A grid without blocks is an operation on an empty tensor: there is nothing to run.
        if self.shape.grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: the program's lowering matched arguments and signature; arenas outlive the session.
        unsafe { self.function.launch(stream, self.shape, self.arguments.pointers()) }
            .during(|| format!("kernel {}", self.name))
    }
}

/// Prepares the kernel calls of one operation.
pub(super) fn prepare(p: &mut Preparation, launch: &Launch) -> Result<Vec<BoundLaunch>> {
    assert!(!launch.calls.is_empty(), "operation `{}` was lowered without kernel calls for a GPU", launch.op);
    launch.calls.iter().map(|call| prepare_call(p, launch, call)).collect()
}

fn prepare_call(p: &mut Preparation, launch: &Launch, call: &KernelCall) -> Result<BoundLaunch> {
    let (function, name) = p.kernels.function(call.kernel)?;
    if call.shared_bytes > SHARED_BYTES_WITHOUT_ASKING {
        function.allow_shared_memory(call.shared_bytes as usize)?;
    }
    let scratch = launch.scratch.as_ref().map(|at| p.memory.address(at));
    let mut arguments = Arguments::new();
    for arg in &call.args {
        let word = match *arg {
            Arg::Input(i) => p.memory.address(&launch.inputs[i]),
            Arg::Output(i) => p.memory.address(&launch.outputs[i]),
            Arg::Scratch(offset) => scratch.expect("a call with a scratch argument has scratch memory") + offset as u64,
            Arg::Boxes { input, extents, matrices } => {
                arguments = arguments.structure(&described(p, &launch.inputs[input], extents, matrices)?);
                continue;
            }
            Arg::OutputBoxes { output, extents, matrices } => {
                arguments = arguments.structure(&described(p, &launch.outputs[output], extents, matrices)?);
                continue;
            }
            Arg::I32(value) => value as u32 as u64,
            Arg::U32(value) => value as u64,
            Arg::I64(value) => value as u64,
            Arg::PerRank { .. } | Arg::PerPart { .. } => panic!("a session runs the program of one rank"),
            Arg::F32(value) => value.to_bits() as u64,
        };
        arguments = arguments.word(word);
    }
    let early = p.kernels.dependent[call.kernel.0 as usize] && p.early;
    let shape = LaunchShape { grid: call.grid, block: call.block, shared_bytes: call.shared_bytes, early };
    Ok(BoundLaunch::new(function, name, shape, arguments))
}

/// A tensor as the copy engine sees it.
fn described(
    p: &Preparation,
    tensor: &TensorRef,
    boxes: [u32; 4],
    matrices: Option<usize>,
) -> Result<[u64; TENSOR_MAP_WORDS]> {
    // The engine moves 16 bits an element, and adds f32; the meaning of 16 bits is the kernel's: eight-bit elements are
    // moved in pairs.
    let pairs = tensor.dtype.small().is_some();
    let (size, address) = (if pairs { 2 } else { tensor.dtype.size() }, p.memory.address(tensor));
    assert!(size == 2 || tensor.dtype == DType::F32, "boxes are cut out of tensors of codes, halves or f32: {tensor}");
    let (mut shape, mut strides) = match matrices {
        None => {
            let four =
                |of: &[usize]| -> [usize; 4] { of.try_into().expect("boxes are cut out of tensors of four axes") };
            (four(&tensor.shape), four(&tensor.strides))
        }
        Some(count) => {
            let (rows, columns, stride) = tensor.as_matrix().expect("matrices lie evenly");
            let each = rows / count;
            ([1, count, each, columns], [rows * stride, each * stride, stride, 1])
        }
    };
    if pairs {
        shape[3] /= 2;
        strides[..3].iter_mut().for_each(|stride| *stride /= 2);
    }
    Described { size, address, shape, strides, boxes }.encode(&p.engine.device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_lie_where_the_driver_looks_for_them() {
        let mut arguments = Arguments::new()
            .word(0x1234)
            .structure(&[9 << 32 | 7, 0xffff_ffff_0000_0001])
            .word(1.5f32.to_bits() as u64);
        let pointers = arguments.pointers().to_vec();
        // SAFETY: the pointers lead to the arguments' own words.
        unsafe {
            assert_eq!(*pointers[0].cast::<u64>(), 0x1234);
            assert_eq!(*pointers[1].cast::<[u32; 2]>(), [7, 9]);
            assert_eq!(*pointers[1].cast::<u64>().add(1), 0xffff_ffff_0000_0001);
            assert_eq!(*pointers[2].cast::<f32>(), 1.5);
        }
    }
}
