//! Programs of single instructions at a grid of extents: what a machine is measured with, through its own backend.
//!
//! Knows which instructions limit a step; neither clocks nor what is made of the times.

use ops::Op;
use program::{Arch, Documents, EntryKind, Extents, Instruction, Machine, Program, Seen, TensorRef, Work};
use tensor::{Attrs, DType};

use crate::call::compile_call;

/// One measurement.
pub struct Probe {
    /// The work of one instruction of it.
    pub work: Work,
    /// The same instruction so many times in a row, on data of its own where these would stay in a cache.
    pub program: Program,
    pub repeats: usize,
}

/// Bytes that a probe's data have, so that no cache holds them.
const SPREAD: usize = 256 << 20;

/// Instructions of a probe.
const REPEATS: usize = 16;

/// Tokens of a GPU's products and attention; a CPU takes a part of them.
const TOKENS: usize = 16_384;

/// Extents of products, [m, n, k]: those of layers from 0.1 to 8 billion weights, with many and few rows, gradients of
/// weights, narrow ones of adapters.
const PRODUCTS: &[[usize; 3]] = &[
    [16384, 4096, 4096],
    [16384, 12288, 4096],
    [16384, 4096, 12288],
    [16384, 6144, 1024],
    [16384, 1024, 3072],
    [16384, 2048, 2048],
    [16384, 576, 1536],
    [4096, 6144, 1024],
    [4096, 1024, 3072],
    [4096, 4096, 2560],
    [4096, 2560, 9728],
    [4096, 1536, 576],
    [1024, 4096, 4096],
    [1024, 1024, 1024],
    [256, 4096, 4096],
    [2048, 2048, 16384],
    [576, 1536, 16384],
    [4096, 16, 4096],
    [4096, 48, 1024],
    [16384, 32, 2048],
];

/// Of attention: (head_dim, heads, key heads, tokens of a row).
const ATTENTION: &[(usize, usize, usize, usize)] = &[
    (64, 16, 8, 128),
    (64, 16, 8, 512),
    (64, 16, 8, 2048),
    (64, 16, 8, 8192),
    (128, 16, 8, 128),
    (128, 16, 8, 512),
    (128, 16, 8, 2048),
    (128, 16, 8, 8192),
    (256, 8, 4, 512),
    (256, 8, 4, 2048),
    (256, 8, 4, 8192),
];

/// Elements of passes over memory.
const PASSES: &[usize] = &[1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 24, 1 << 26];

/// Every probe of a machine. `least`: few and small ones, which try out the way and measure little.
pub fn probes(machine: &Machine, least: bool) -> Vec<Probe> {
    let on_cpu = machine.arch == Arch::Cpu;
    // A CPU takes a hundredth of the work; f32 is its type.
    let (dtype, divisor) = if on_cpu { (DType::F32, if least { 64 } else { 16 }) } else { (DType::BF16, 1) };
    let some = |count: usize| if least { count.min(2) } else { count };
    let cut = |rows: usize| (rows / divisor).max(1);
    let passes = PASSES.iter().take(some(PASSES.len())).map(|n| pass(*n, dtype, machine));
    let products = PRODUCTS.iter().take(some(PRODUCTS.len()));
    let products = products.map(|[m, n, k]| product(cut(*m), cut(*n).max(16), cut(*k).max(16), dtype, machine));
    let attention = ATTENTION.iter().filter(|of| !on_cpu || of.3 <= 512).take(some(ATTENTION.len()));
    let attention =
        attention.flat_map(|of| [false, true].map(|pass| self::attention(*of, pass, cut(TOKENS), dtype, machine)));
    passes.chain(products).chain(attention).collect()
}

fn operation(name: &str) -> &'static dyn Op {
    ops::find(name).expect("the operations of probes are in the list")
}

fn probe(
    name: &str,
    attrs: &Attrs,
    inputs: &[(DType, Vec<usize>)],
    outputs: &[(DType, Vec<usize>)],
    machine: &Machine,
) -> Probe {
    let mut program = compile_call(operation(name), attrs, inputs, outputs, machine, Documents::Rows);
    let step = program.entries[0].steps[0].clone();
    let work = Work::of(&step, &program, Seen::default()).expect("an instruction of the computation");
    let batch = crate::memory::arena::BATCH;
    let bytes = program.arenas[batch.0 as usize].bytes;
    // Attention is limited by its arithmetic: the same data serve again.
    let places = if matches!(work, Work::Attention { .. }) { 1 } else { (SPREAD / bytes.max(1)).clamp(1, REPEATS) };
    program.arenas[batch.0 as usize].bytes = bytes * places;
    program.entries[0].steps = (0..REPEATS)
        .map(|index| {
            let mut step = step.clone();
            let by = index % places * bytes;
            tensors(&mut step.instruction).into_iter().filter(|at| at.arena == batch).for_each(|at| at.offset += by);
            step
        })
        .collect();
    debug_assert_eq!(program.entries[0].kind, EntryKind::Forward);
    Probe { work, program, repeats: REPEATS }
}

/// The tensors of an instruction that lies in several places.
fn tensors(of: &mut Instruction) -> Vec<&mut TensorRef> {
    match of {
        Instruction::Launch(launch) => launch.inputs.iter_mut().chain(&mut launch.outputs).collect(),
        Instruction::Gemm(gemm) => vec![&mut gemm.a, &mut gemm.b, &mut gemm.d],
        Instruction::AttentionForward(_)
        | Instruction::Copy { .. }
        | Instruction::Zero { .. }
        | Instruction::Transfer { .. }
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => Vec::new(),
    }
}

fn pass(elements: usize, dtype: DType, machine: &Machine) -> Probe {
    let tensor = (dtype, vec![elements / 256, 256]);
    probe("add", &Attrs::new(), &[tensor.clone(), tensor.clone()], &[tensor], machine)
}

fn product(m: usize, n: usize, k: usize, dtype: DType, machine: &Machine) -> Probe {
    let attrs = Attrs::new().with("transpose_b", true);
    let found = probe("matmul", &attrs, &[(dtype, vec![m, k]), (dtype, vec![n, k])], &[(dtype, vec![m, n])], machine);
    debug_assert!(matches!(found.work, Work::Product { extents: Extents { batch: 1, .. }, .. }));
    found
}

fn attention(
    (head_dim, heads, key_heads, row): (usize, usize, usize, usize),
    backward: bool,
    tokens: usize,
    dtype: DType,
    machine: &Machine,
) -> Probe {
    let rows = (tokens / row).max(1);
    let of = |heads: usize| (dtype, vec![rows, row, heads, head_dim]);
    let (q, k, statistics) = (of(heads), of(key_heads), (DType::F32, vec![rows, heads, row]));
    let starts = (DType::I32, vec![rows, row]);
    let attrs = Attrs::new().with("scale", 1.0 / (head_dim as f64).sqrt());
    match backward {
        false => {
            let inputs = [q.clone(), k.clone(), k, starts];
            probe("attention", &attrs, &inputs, &[q, statistics], machine)
        }
        true => {
            let inputs = [q.clone(), k.clone(), k.clone(), q.clone(), statistics, q.clone(), starts];
            probe("attention_backward", &attrs, &inputs, &[q, k.clone(), k], machine)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_of_every_machine_are_programs() {
        for machine in [Machine::h200(), Machine::named("a100-80").unwrap(), Machine::cpu(8 << 30, 2)] {
            let all = probes(&machine, false);
            let count = |test: fn(&Work) -> bool| all.iter().filter(|of| test(&of.work)).count();
            let products = count(|work| matches!(work, Work::Product { .. } | Work::Kernel { .. }));
            let attention = count(|work| matches!(work, Work::Attention { .. }));
            assert!(products >= 20 && attention >= 8, "{} {products} {attention}", machine.name);
            for of in &all {
                assert_eq!(of.program.entries[0].steps.len(), of.repeats);
                assert!(of.program.arena_bytes() < 6 << 30, "{} bytes", of.program.arena_bytes());
                assert_eq!(of.program.entries[0].variant.unwrap().documents, program::Documents::Rows);
            }
        }
        assert!(probes(&Machine::cpu(8 << 30, 2), true).len() < 10);
    }
}
