//! Programs of single instructions at a grid of extents: what a machine is measured with, through its own backend.
//!
//! Knows which instructions limit a step; neither clocks nor what is made of the times.

mod links;

use ops::{OpId, id};
use program::{Arch, Documents, EntryKind, Extents, Machine, Program, Seen, Work};
use tensor::philox::{normal_pair, philox4x32};
use tensor::{Attrs, DType};

use crate::call::compile_call;

pub use links::{Links, links};

/// A program that measures one instruction.
pub struct Probe {
    /// The work of one instruction of it.
    pub work: Work,
    /// The same instruction several times in a row, on data of its own each time where these would stay in a cache.
    pub program: Program,
    pub repeats: usize,
    /// The place in its row where the document of each token begins, for the input of integers; empty: rows are whole.
    pub starts: Vec<i32>,
}

/// Bytes that a probe's data have, so that no cache holds them.
const SPREAD: usize = 256 << 20;

/// Instructions of a probe, and of one that takes long: what is run in one piece should not change the clock by itself.
const REPEATS: usize = 16;
const FEW: usize = 4;
/// Seconds at the ceilings from which an instruction takes long.
const LONG: f64 = 3e-4;

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
    [16, 2048, 16384],
    [16384, 8, 256],
    [16384, 768, 256],
];

/// Gradients of adapters: rows, columns, rank.
const ADAPTERS: &[[usize; 3]] =
    &[[4096, 4096, 16], [16384, 4096, 8], [16384, 1024, 32], [16384, 2048, 64], [16384, 12288, 16]];

/// The mask of keys in a probe of attention.
#[derive(Clone, Copy, PartialEq)]
enum Mask {
    Causal,
    /// Keys that a query sees at most.
    Window(usize),
    /// The median of documents of log-normal lengths.
    Documents(usize),
}

/// The calls of attention: (head_dim, heads, key heads, tokens of a row, mask).
const ATTENTION: &[(usize, usize, usize, usize, Mask)] = &[
    (64, 16, 8, 512, Mask::Causal),
    (64, 16, 8, 2048, Mask::Causal),
    (64, 16, 8, 8192, Mask::Causal),
    (128, 16, 8, 512, Mask::Causal),
    (128, 16, 8, 2048, Mask::Causal),
    (128, 16, 8, 8192, Mask::Causal),
    (256, 8, 4, 512, Mask::Causal),
    (256, 8, 4, 2048, Mask::Causal),
    (256, 8, 4, 8192, Mask::Causal),
    (64, 16, 8, 8192, Mask::Window(256)),
    (64, 16, 8, 8192, Mask::Window(4096)),
    (128, 16, 8, 8192, Mask::Window(256)),
    (128, 16, 8, 8192, Mask::Window(1024)),
    (128, 16, 8, 8192, Mask::Window(4096)),
    (256, 8, 4, 8192, Mask::Window(1024)),
    (64, 16, 8, 4096, Mask::Documents(100)),
    (64, 16, 8, 4096, Mask::Documents(600)),
    (128, 16, 8, 4096, Mask::Documents(100)),
    (128, 16, 8, 4096, Mask::Documents(300)),
    (128, 16, 8, 8192, Mask::Documents(1200)),
    (256, 8, 4, 4096, Mask::Documents(300)),
];

/// Elements of passes over memory.
const PASSES: &[usize] = &[1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 24, 1 << 26];

/// Every probe of a machine. `least`: few and small ones, which try out the measurement and measure little.
pub fn probes(machine: &Machine, least: bool) -> Vec<Probe> {
    let on_cpu = machine.arch == Arch::Cpu;
    // A CPU takes a hundredth of the work; f32 is its type.
    let (dtype, divisor) = if on_cpu { (DType::F32, if least { 64 } else { 16 }) } else { (DType::BF16, 1) };
    let some = |count: usize| if least { count.min(2) } else { count };
    let cut = |rows: usize| (rows / divisor).max(1);
    let passes = PASSES.iter().take(some(PASSES.len())).map(|n| pass(*n, dtype, machine));
    let products = PRODUCTS.iter().take(some(PRODUCTS.len()));
    let products = products.map(|[m, n, k]| product(cut(*m), cut(*n).max(16), cut(*k).max(16), dtype, machine));
    let adapters = ADAPTERS.iter().take(if on_cpu { 0 } else { some(ADAPTERS.len()) });
    let adapters = adapters.map(|[rows, columns, rank]| adapter(*rows, *columns, *rank, machine));
    let attention = ATTENTION.iter().filter(|of| !on_cpu || of.3 <= 512).take(some(ATTENTION.len()));
    let attention =
        attention.flat_map(|of| [false, true].map(|pass| self::attention(*of, pass, cut(TOKENS), dtype, machine)));
    passes.chain(products).chain(adapters).chain(attention).collect()
}

fn probe(
    op: OpId,
    attrs: &Attrs,
    inputs: &[(DType, Vec<usize>)],
    outputs: &[(DType, Vec<usize>)],
    machine: &Machine,
) -> Probe {
    probe_of(op, attrs, inputs, outputs, machine, Vec::new())
}

/// Returns a probe of one operation. `starts`: the document start of each token, in rows of the length of the first
/// input's; empty for whole rows.
fn probe_of(
    op: OpId,
    attrs: &Attrs,
    inputs: &[(DType, Vec<usize>)],
    outputs: &[(DType, Vec<usize>)],
    machine: &Machine,
    starts: Vec<i32>,
) -> Probe {
    let documents = if starts.is_empty() { Documents::Rows } else { Documents::Packed };
    let mut program = compile_call(ops::get(op), attrs, inputs, outputs, machine, documents);
    let step = program.entries[0].steps[0].clone();
    let seen = if starts.is_empty() { Seen::default() } else { seen(&starts, inputs[0].1[1]) };
    let mut work = Work::of(&step, &program, seen).expect("an instruction of the computation");
    if let Work::Attention { of, .. } = &mut work
        && let Some(most) = starts.iter().enumerate().map(|(at, start)| at % inputs[0].1[1] - *start as usize + 1).max()
    {
        of.longest = most as f64 / of.keys;
    }
    let long = work.cost().flops / machine.bf16_flops.max(1.0) > LONG;
    let repeats = if long && machine.arch != Arch::Cpu { FEW } else { REPEATS };
    let batch = crate::memory::arena::BATCH;
    let bytes = program.arenas[batch.0 as usize].bytes;
    // Attention is limited by its arithmetic: the same data serve again.
    let places = if matches!(work, Work::Attention { .. }) { 1 } else { (SPREAD / bytes.max(1)).clamp(1, repeats) };
    program.arenas[batch.0 as usize].bytes = bytes * places;
    program.entries[0].steps = (0..repeats)
        .map(|index| {
            let mut step = step.clone();
            let by = index % places * bytes;
            step.instruction.tensors_mut().into_iter().filter(|at| at.arena == batch).for_each(|at| at.offset += by);
            step
        })
        .collect();
    debug_assert_eq!(program.entries[0].kind, EntryKind::Forward);
    Probe { work, program, repeats, starts }
}

/// Returns the share of the pairs of a token and an earlier one of its row that lie within documents.
fn seen(starts: &[i32], row: usize) -> Seen {
    let pairs: f64 = starts.iter().enumerate().map(|(at, start)| (at % row - *start as usize + 1) as f64).sum();
    Seen::of_documents(pairs / (starts.len() / row) as f64 / (row * (row + 1) / 2) as f64)
}

/// Documents of log-normal lengths (σ 0.8), packed into rows: the start of each token's, in its row.
fn packed(rows: usize, row: usize, median: usize) -> Vec<i32> {
    let mut count = 0;
    let mut normal = || {
        count += 1;
        let [a, b, ..] = philox4x32([count, 0, 0, 0], [0; 2]);
        f64::from(normal_pair(a, b).0)
    };
    let mut starts = Vec::with_capacity(rows * row);
    for _ in 0..rows {
        let mut at = 0;
        while at < row {
            let length = ((0.8 * normal()).exp() * median as f64) as usize;
            let end = (at + length.max(1)).min(row);
            starts.resize(starts.len() + end - at, at as i32);
            at = end;
        }
    }
    starts
}

fn pass(elements: usize, dtype: DType, machine: &Machine) -> Probe {
    let tensor = (dtype, vec![elements / 256, 256]);
    probe(id::ADD, &Attrs::new(), &[tensor.clone(), tensor.clone()], &[tensor], machine)
}

fn product(m: usize, n: usize, k: usize, dtype: DType, machine: &Machine) -> Probe {
    let attrs = Attrs::new().with("transpose_b", true);
    let found = probe(id::MATMUL, &attrs, &[(dtype, vec![m, k]), (dtype, vec![n, k])], &[(dtype, vec![m, n])], machine);
    debug_assert!(matches!(found.work, Work::Product { extents: Extents { batch: 1, .. }, .. }));
    found
}

/// Returns a probe of the backward pass of one linear's adapters.
fn adapter(rows: usize, columns: usize, rank: usize, machine: &Machine) -> Probe {
    let attrs = Attrs::new().with("scale", 2.0).with("columns", vec![0, columns]);
    let of = |a: usize, b: usize| (DType::BF16, vec![a, b]);
    let inputs = [of(rows, columns), of(rows, rank), of(columns, rank)];
    let found =
        probe(id::LOW_RANK_BACKWARD, &attrs, &inputs, &[of(rows, rank), (DType::F32, vec![columns, rank])], machine);
    debug_assert!(found.work.multiplies());
    found
}

fn attention(
    (head_dim, heads, key_heads, row, mask): (usize, usize, usize, usize, Mask),
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
    let attrs = if let Mask::Window(window) = mask { attrs.with("window", window as i64) } else { attrs };
    let documents = if let Mask::Documents(median) = mask { packed(rows, row, median) } else { Vec::new() };
    match backward {
        false => {
            let inputs = [q.clone(), k.clone(), k, starts];
            probe_of(id::ATTENTION, &attrs, &inputs, &[q, statistics], machine, documents)
        }
        true => {
            let inputs = [q.clone(), k.clone(), k.clone(), q.clone(), statistics, q.clone(), starts];
            probe_of(id::ATTENTION_BACKWARD, &attrs, &inputs, &[q, k.clone(), k], machine, documents)
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
            assert!(products >= 20 && attention >= 6, "{} {products} {attention}", machine.name);
            for of in &all {
                assert_eq!(of.program.entries[0].steps.len(), of.repeats);
                assert!(of.program.arena_bytes() < 6 << 30, "{} bytes", of.program.arena_bytes());
                let documents = of.program.entries[0].variant.unwrap().documents;
                assert_eq!(documents == Documents::Packed, !of.starts.is_empty());
            }
        }
        assert!(probes(&Machine::cpu(8 << 30, 2), true).len() < 10);
    }

    #[test]
    fn documents_of_probes_fill_their_rows() {
        let starts = packed(2, 4096, 300);
        assert_eq!(starts.len(), 8192);
        assert!(starts.iter().enumerate().all(|(at, start)| *start as usize <= at % 4096));
        // Keys that a query sees in the mean: 1.8 medians, less what rows cut off.
        let keys = seen(&starts, 4096).documents * 4097.0 / 2.0;
        assert!((250.0..800.0).contains(&keys), "{keys}");
        assert_eq!(seen(&[0; 64], 32).documents, 1.0);
    }
}
