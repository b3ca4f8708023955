//! A form as a kernel over rows: how rows are dealt to threads, and the launch. The text is `text.rs`'s.
//!
//! Threads hold a row in registers: it is read once. Where nothing is summed over rows, a warp takes a row of up to 256
//! packs, a block a longer one. Sums over rows stay in registers while blocks walk over the rows, and each block
//! leaves a part of them in scratch memory.

use program::{Arg, TensorRef};

use super::form::{Extent, Form};
use super::text;
use crate::kernel::{KernelSpec, LowerCall, follows};
use crate::layout::row_width;

const HEADERS: &[(&str, &str)] = &[
    ("rows.cuh", include_str!("../cuda/rows.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("pack.cuh", include_str!("../cuda/pack.cuh")),
    ("reduce.cuh", include_str!("../cuda/reduce.cuh")),
];

const SUM: &str = include_str!("sum.cu");

/// Threads of one block.
const THREADS: usize = 256;
/// Up to this many packs a row belongs to one warp; longer rows take a whole block.
const PACKS_OF_A_WARP: usize = 256;
/// Threads that run at once on 132 multiprocessors when each keeps a few packs and its part of a sum in registers;
/// every block leaves a part of the sum.
const RESIDENT: usize = 132 * 1024;
/// Threads of one row at most, where sums over rows are kept: one pack each is faster than two in half as many (4096
/// columns: 44 µs, not 52).
const MOST_LANES: usize = 512;

/// How rows are dealt to threads.
pub struct Deal {
    pub rows: usize,
    pub columns: usize,
    /// Elements of one access.
    pub width: usize,
    /// Threads of one row.
    pub lanes: usize,
    /// Threads of one block.
    pub threads: usize,
    pub blocks: usize,
    /// Blocks walk over the rows and keep sums.
    pub walks: bool,
}

impl Deal {
    fn new(form: &Form, call: &LowerCall<'_>) -> Deal {
        let x = &call.inputs[0];
        let columns = *x.shape.last().expect("the shape rule asks for an axis");
        let rows: usize = x.shape.iter().rev().skip(1).product();
        let inputs = call.inputs.iter().zip(&form.operands).filter(|(_, extent)| **extent != Extent::Row);
        let outputs = call.outputs.iter().zip(&form.results).filter(|(_, (extent, _))| *extent == Extent::Element);
        let packed: Vec<&TensorRef> = inputs.map(|(t, _)| t).chain(outputs.map(|(t, _)| t)).collect();
        let (width, walks) = (row_width(&packed), form.sums_rows());
        let packs = columns / width;
        let lanes = match walks {
            true => packs.next_power_of_two().clamp(32, MOST_LANES),
            false if packs <= PACKS_OF_A_WARP => 32,
            false => THREADS,
        };
        let threads = if lanes == 32 { THREADS } else { lanes };
        let blocks = rows.div_ceil(threads / lanes);
        let blocks = if walks { blocks.min(RESIDENT / threads) } else { blocks };
        Deal { rows, columns, width, lanes, threads, blocks, walks }
    }

    /// For the compiler of the device code: threads of a block, and where a block has a row of few packs for each
    /// thread, that four of them are to fit on a multiprocessor.
    pub fn bounds(&self) -> &'static str {
        let packs = (self.columns / self.width).div_ceil(self.lanes);
        if !self.walks && self.lanes == THREADS && packs <= 2 { "THREADS, 4" } else { "THREADS" }
    }

    /// Whether the kernel keeps its place on the stream itself.
    pub fn follows(&self) -> bool {
        !self.walks && follows(self.blocks)
    }
}

/// The kernels of a form, in order.
pub fn kernels(form: &Form, call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let deal = Deal::new(form, call);
    let numbers = [
        ("COLUMNS", deal.columns),
        ("ROWS", deal.rows),
        ("WIDTH", deal.width),
        ("LANES", deal.lanes),
        ("THREADS", deal.threads),
    ];
    let (source, read) = text::text(form, call, &deal);
    let sums: Vec<usize> = (0..form.results.len()).filter(|i| form.results[*i].0 == Extent::Column).collect();
    let written = (0..form.results.len()).filter(|i| !sums.contains(i)).map(Arg::Output);
    let partial = deal.walks.then_some(Arg::Scratch(0));
    let kernel = KernelSpec {
        entry: "rowwise",
        source,
        headers: HEADERS.iter().copied().chain(deal.follows().then_some(device::FOLLOW)).collect(),
        defines: defines(&numbers),
        grid: [deal.blocks as u32, 1, 1],
        block: [deal.threads as u32, 1, 1],
        shared_bytes: 0,
        args: read.into_iter().map(Arg::Input).chain(written).chain(partial).collect(),
    };
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let summed = sums.into_iter().enumerate().map(|(place, result)| {
        let partial = Arg::Scratch(place * deal.blocks * deal.columns * 4);
        sum_partials(deal.columns, deal.blocks, accumulate, partial, Arg::Output(result))
    });
    [kernel].into_iter().chain(summed).collect()
}

/// Bytes of the parts of sums over rows.
pub fn scratch(form: &Form, call: &LowerCall<'_>) -> usize {
    let sums = form.results.iter().filter(|(extent, _)| *extent == Extent::Column).count();
    if sums == 0 {
        return 0;
    }
    let deal = Deal::new(form, call);
    sums * deal.blocks * deal.columns * 4
}

/// sum = Σ over `parts` of partial f32 [parts, columns], or sum + it.
pub fn sum_partials(columns: usize, parts: usize, accumulate: bool, partial: Arg, sum: Arg) -> KernelSpec {
    let numbers = [("COLUMNS", columns), ("PARTS", parts), ("ACCUMULATE", accumulate as usize)];
    KernelSpec {
        entry: "sum_partials",
        source: SUM.to_owned(),
        headers: Vec::new(),
        defines: defines(&numbers),
        grid: [columns.div_ceil(32) as u32, 1, 1],
        block: [1024, 1, 1],
        shared_bytes: 0,
        args: vec![partial, sum],
    }
}

fn defines(numbers: &[(&str, usize)]) -> Vec<(String, String)> {
    numbers.iter().map(|(name, n)| ((*name).to_owned(), n.to_string())).collect()
}
