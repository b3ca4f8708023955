//! Launches of compiled kernels, and which operation of which program each of them is part of. A launch is identified by its
//! kernel (the text, its headers and definitions), its shape, and its arguments: numbers, and addresses of operands in the
//! program's arenas. The operation is computed at its last launch.
#![allow(unsafe_code, reason = "reads the values that a launch's arguments point to")]

use std::cell::OnceCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::rc::Rc;

use program::{Arg, Instruction, Kernel, Launch, Program, TensorRef};

use crate::compiler::{Code, identity};
use crate::kernels::Own;
use crate::memory::Memory;
use crate::products::Product;
use crate::reference::Reference;
use crate::world::world;

/// An operation that a program has, or a product that the backend's own kernel may compute.
struct Site {
    instruction: Instruction,
    /// Addresses of the program's arenas.
    arenas: Rc<[u64]>,
    reference: OnceCell<Result<Rc<Reference>, String>>,
}

/// One launch of an operation.
struct Call {
    site: usize,
    number: usize,
    is_last: bool,
    args: Vec<Arg>,
    shape: Shape,
}

/// Grid, block and dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
}

/// A launch of an operation: the operation's index, and the number of the launch in it.
pub type Place = (usize, usize);

/// A function of a loaded module.
#[derive(Clone)]
pub struct Function {
    pub entry: String,
    pub code: Code,
}

/// The computation of a launch, or of a call of the library of products.
pub enum Task {
    Operation {
        reference: Rc<Reference>,
        arenas: Rc<[u64]>,
    },
    Own(Own),
    Product(Product),
    /// A launch before the last one of an operation.
    Nothing,
}

impl Task {
    pub fn run(&self, memory: &Memory) -> Result<(), String> {
        match self {
            Task::Operation { reference, arenas } => reference.run(memory, arenas),
            Task::Own(own) => own.run(memory),
            Task::Product(product) => product.run(memory),
            Task::Nothing => Ok(()),
        }
    }
}

/// The instructions of the programs that were loaded.
#[derive(Default)]
pub struct Launches {
    sites: Vec<Site>,
    calls: HashMap<(u64, String), Vec<Call>>,
    products: Vec<usize>,
    pub functions: HashMap<usize, Function>,
    pub modules: HashMap<usize, Code>,
}

/// Takes note of a program's instructions.
pub fn show(program: &Program, arenas: &[u64]) {
    world(|world| world.launches.add(program, arenas.into()));
}

impl Launches {
    fn add(&mut self, program: &Program, arenas: Rc<[u64]>) {
        let identities: Vec<u64> = program.kernels.iter().map(of_kernel).collect();
        for step in program.entries.iter().flat_map(|entry| &entry.steps) {
            let site = self.sites.len();
            match &step.instruction {
                Instruction::Launch(launch) => {
                    // A grid without blocks is not launched.
                    let calls: Vec<_> = launch.calls.iter().filter(|call| !call.grid.contains(&0)).collect();
                    for (number, call) in calls.iter().enumerate() {
                        let kernel = call.kernel.0 as usize;
                        let key = (identities[kernel], program.kernels[kernel].entry.clone());
                        let shape = Shape { grid: call.grid, block: call.block, shared: call.shared_bytes };
                        let is_last = number + 1 == calls.len();
                        let call = Call { site, number, is_last, args: call.args.clone(), shape };
                        self.calls.entry(key).or_default().push(call);
                    }
                }
                Instruction::Gemm(_) => self.products.push(site),
                _ => continue,
            }
            let (instruction, arenas) = (step.instruction.clone(), arenas.clone());
            self.sites.push(Site { instruction, arenas, reference: OnceCell::new() });
        }
    }

    /// Returns what a launch after the places `before` of its stream computes, and its own places.
    ///
    /// # Safety
    /// The pointers lead to the values of the kernel's parameters, each in 8 bytes.
    pub unsafe fn resolve(
        &self,
        function: &Function,
        shape: Shape,
        values: *const *mut c_void,
        before: &[Place],
    ) -> Result<(Task, Vec<Place>), String> {
        let Some(calls) = self.calls.get(&(function.code.identity, function.entry.clone())) else {
            // SAFETY: promised by the caller.
            return unsafe { self.own(function, values) }.map(|task| (task, Vec::new()));
        };
        // SAFETY: promised by the caller.
        let word = |index: usize| unsafe { (*values.add(index)).cast::<u64>().read_unaligned() };
        let is_it = |call: &&Call| {
            let site = &self.sites[call.site];
            let Instruction::Launch(launch) = &site.instruction else { unreachable!("calls are of launches") };
            let follows = call.number == 0 || before.contains(&(call.site, call.number - 1));
            follows && call.shape == shape && has_values(launch, &call.args, word, &site.arenas)
        };
        let found: Vec<&Call> = calls.iter().filter(is_it).collect();
        if found.is_empty() {
            let entry = &function.entry;
            return Err(format!(
                "kernel `{entry}` was launched with {shape:?} and arguments that no instruction has here"
            ));
        }
        let task = match found.iter().rev().find(|call| call.is_last) {
            Some(call) => self.operation(call.site)?,
            None => Task::Nothing,
        };
        Ok((task, found.iter().map(|call| (call.site, call.number)).collect()))
    }

    fn operation(&self, site: usize) -> Result<Task, String> {
        let site = &self.sites[site];
        let made = site.reference.get_or_init(|| Reference::new(&site.instruction).map(Rc::new));
        Ok(Task::Operation { reference: made.clone()?, arenas: site.arenas.clone() })
    }

    /// A kernel of the backend itself.
    ///
    /// # Safety
    /// Requires what [`Launches::resolve`] requires.
    unsafe fn own(&self, function: &Function, values: *const *mut c_void) -> Result<Task, String> {
        if function.entry != "few_rows" {
            // SAFETY: promised by the caller.
            return unsafe { Own::new(function, values) }.map(Task::Own);
        }
        // SAFETY: promised by the caller.
        let word = |index: usize| unsafe { (*values.add(index)).cast::<u64>().read_unaligned() };
        let is_it = |site: &&usize| {
            let Site { instruction, arenas, .. } = &self.sites[**site];
            let Instruction::Gemm(gemm) = instruction else { unreachable!("products are") };
            let operands = [&gemm.a, &gemm.b, &gemm.d].into_iter().chain(&gemm.bias);
            let factors = gemm.low_rank.iter().flat_map(|addend| [&addend.t, &addend.b]);
            // The kernel is made for two rows at most.
            gemm.m <= 2 && operands.chain(factors).enumerate().all(|(index, at)| word(index) == address(at, arenas))
        };
        // The newest: others may be of sessions whose memory is this one's now.
        let site = self.products.iter().rev().find(is_it);
        self.operation(*site.ok_or("kernel `few_rows` was launched with addresses that no product has")?)
    }
}

fn address(at: &TensorRef, arenas: &[u64]) -> u64 {
    arenas[at.arena.0 as usize] + at.offset as u64
}

/// True if the values of a launch are those of a call.
fn has_values(launch: &Launch, args: &[Arg], word: impl Fn(usize) -> u64, arenas: &[u64]) -> bool {
    args.iter().enumerate().all(|(index, arg)| {
        let value = word(index);
        match arg {
            Arg::Input(input) => value == address(&launch.inputs[*input], arenas),
            Arg::Output(output) => value == address(&launch.outputs[*output], arenas),
            Arg::Scratch(within) => {
                launch.scratch.as_ref().is_some_and(|at| value == address(at, arenas) + *within as u64)
            }
            Arg::I32(number) => value as u32 == *number as u32,
            Arg::U32(number) => value as u32 == *number,
            Arg::I64(number) => value == *number as u64,
            Arg::F32(number) => value as u32 == number.to_bits(),
            Arg::PerRank { .. } | Arg::PerPart { .. } | Arg::Boxes { .. } | Arg::OutputBoxes { .. } => false,
        }
    })
}

fn of_kernel(kernel: &Kernel) -> u64 {
    let headers = kernel.headers.iter().map(|(name, text)| (name.as_str(), text.as_str()));
    let options: Vec<String> = kernel.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    identity(&kernel.source, headers, options.iter().map(String::as_str))
}
