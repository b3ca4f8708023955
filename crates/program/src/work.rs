//! The limits of one piece of work on a machine; the time that follows from them is in `times.rs`.
//!
//! Knows extents and what an operation says of its arithmetic; not what it computes.

mod rates;
mod times;

use tensor::DType;

use crate::arithmetic::Arithmetic;
use crate::efficiency::{Hidden, Realisation};
use crate::instruction::{Cost, Instruction, Step};
use crate::machine::Machine;
use crate::memory::TensorRef;
use crate::program::{Entry, Program};
use crate::target::Arch;
pub use times::{Times, clock, expected_times};

/// The part of a row that attention sees, as the data of a batch decide it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// The share of the pairs of a token and an earlier one of its row that lie in one document: 1 where every row is one
    /// document.
    pub documents: f64,
    /// Patches that a patch sees in the mean, padding included; none where nothing is known of images.
    pub patches: Option<OfPatch>,
}

/// Patches that one sees where all of an image see one another, and where those of a window do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OfPatch {
    pub image: f64,
    pub window: f64,
}

impl Default for Seen {
    fn default() -> Seen {
        Seen::of_documents(1.0)
    }
}

impl Seen {
    /// Rows of text with this share of pairs inside documents.
    pub fn of_documents(documents: f64) -> Seen {
        Seen { documents, patches: None }
    }

    /// The keys of a query whose first key is the input `first` of a launch, where the batch's images decide them.
    fn keys(&self, first: &TensorRef, program: &Program) -> Option<f64> {
        let of = self.patches?;
        let is = |name: &str| {
            let mut inputs = program.entries.iter().flat_map(|entry| &entry.inputs);
            inputs.any(|(known, at)| known == name && at == first)
        };
        match () {
            () if is("image_first_patch") => Some(of.image),
            () if is("window_first_patch") => Some(of.window),
            () => None,
        }
    }
}

/// The reason why an instruction takes longer than at the ceilings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Gaps between consecutive kernels, in seconds.
    Launches,
    /// Products: tiles that fill the device in part, small extents, the power limit.
    Products,
    /// Attention on matrix units: few keys for a query, small heads.
    Attention,
    /// Attention on scalar units, without tensor cores.
    ScalarAttention,
    /// Passes that read and write memory.
    Memory,
    /// Waits for transfers with host memory.
    Waiting,
}

impl Cause {
    pub const ALL: [Cause; 6] =
        [Cause::Launches, Cause::Products, Cause::Attention, Cause::ScalarAttention, Cause::Memory, Cause::Waiting];

    /// The cause as words for people.
    pub const fn words(self) -> &'static str {
        match self {
            Cause::Launches => "starting kernels, each of which has little to do: larger micro-batches give them more",
            Cause::Products => "products whose extents are too small for the device: larger micro-batches fill it",
            Cause::Attention => "attention, whose heads are small or whose queries see few keys",
            Cause::ScalarAttention => "attention without tensor cores: there is no faster kernel for it here",
            Cause::Memory => "passes over memory that are too small to reach its rate",
            Cause::Waiting => "waiting for host memory: what is offloaded does not come as fast as it is needed",
        }
    }
}

/// A piece of work, by the properties that decide how much of the machine's ceilings it reaches.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Kernels of the project's own. `left`: bytes of scratch memory, which one writes and the next reads.
    Kernel {
        cost: Cost,
        dtype: Option<DType>,
        launches: usize,
        blocks: Option<usize>,
        left: f64,
    },
    /// `batch` products of [m, k] and [k, n]; `extra` bytes are moved besides the cost's.
    Product {
        cost: Cost,
        dtype: Option<DType>,
        extents: Extents,
        launches: usize,
        extra: f64,
    },
    Attention {
        cost: Cost,
        dtype: Option<DType>,
        backward: bool,
        by: Realisation,
        head_dim: usize,
        of: Spread,
    },
}

/// The division of attention's work into pieces that one multiprocessor does each: 128 queries of a head forward, 128
/// keys of a key head backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub hidden: Hidden,
    /// Mean number of keys that a query sees.
    pub keys: f64,
    pub pieces: f64,
    /// The length of the longest piece, relative to the mean one.
    pub longest: f64,
    /// Two multiprocessors may do one piece, each with half of its query heads.
    pub halves: bool,
}

impl Spread {
    /// Returns the spread for queries [B, T, heads, D] and keys [B, T, key heads, D] whose mask leaves `unhidden` keys
    /// for a query in whole rows.
    fn of(q: &TensorRef, k: &TensorRef, backward: bool, unhidden: f64, seen: Seen) -> Spread {
        let extent = |of: &TensorRef, axis: usize| of.shape.get(axis).map_or(1.0, |extent| *extent as f64);
        let (rows, tokens) = (extent(q, 0), extent(q, 1));
        let heads = extent(if backward { k } else { q }, 2);
        let causal = (tokens + 1.0) / 2.0;
        // A window of w leaves w − w² / 2T keys in the mean; without a mask it is all of them.
        let window = match unhidden {
            all if all > causal * 1.001 => tokens,
            all => tokens * (1.0 - (1.0 - all / causal).max(0.0).sqrt()),
        };
        // A window that is shorter than the documents hides more than they do.
        let of_documents = if seen.documents < 1.0 { seen.documents * causal } else { f64::INFINITY };
        let keys = unhidden.min(of_documents);
        let hidden = match () {
            () if of_documents < unhidden => Hidden::Documents,
            () if unhidden < 0.999 * causal => Hidden::Window,
            () => Hidden::None,
        };
        let most = if hidden == Hidden::Documents { LONGEST_DOCUMENT * keys } else { window };
        let longest = (most.min(window) / keys.max(1.0)).max(1.0);
        Spread { hidden, keys, pieces: rows * heads * (tokens / PIECE).ceil(), longest, halves: false }
    }

    /// Returns the factor by which the work takes longer than if all multiprocessors were busy to the end. `alone`: the
    /// rate of the longest piece, relative to the mean rate of all of them.
    pub fn tail(&self, alone: f64, machine: &Machine) -> f64 {
        if machine.arch == Arch::Cpu {
            return 1.0;
        }
        let whole = self.longest * machine.units.max(1) as f64 / self.pieces.max(1.0);
        let longest = if self.halves && whole > 1.0 { whole / 2.0 } else { whole };
        (1.0 + TAIL * longest).max(longest / alone.max(1.0))
    }
}

/// Number of queries or keys of a piece.
const PIECE: f64 = 128.0;

/// Share of the time of the longest piece that the others wait for it at the end.
const TAIL: f64 = 0.35;

/// The longest of some dozens of documents of log-normal lengths (σ 0.8), relative to the mean number of keys that a
/// query sees.
const LONGEST_DOCUMENT: f64 = 3.5;

/// Extents of a batch of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extents {
    pub batch: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// Operations per byte from which a kernel counts as one that multiplies.
const MULTIPLIES: f64 = 8.0;

impl Work {
    /// Returns the kind of work of an instruction of the computation; `None` for transfers.
    pub fn of(step: &Step, program: &Program, seen: Seen) -> Option<Work> {
        let machine = &program.machine;
        let cost = step.cost;
        Some(match &step.instruction {
            Instruction::Gemm(gemm) => {
                let pass = !gemm.low_rank.is_empty() && machine.efficiency.addend_pass;
                let extra = if pass { 2.0 * gemm.d.bytes() as f64 } else { 0.0 };
                let extents = Extents { batch: gemm.batch, m: gemm.m, n: gemm.n, k: gemm.k };
                Work::Product { cost, dtype: Some(gemm.a.dtype), extents, launches: 1 + usize::from(pass), extra }
            }
            Instruction::AttentionForward(of) => {
                Work::attention(cost, [&of.q, &of.k], false, Realisation::Library, seen)
            }
            Instruction::Launch(launch) => {
                let calls = &launch.calls;
                if let Arithmetic::Attention { backward, by } = launch.arithmetic
                    && let Some(keys) = seen.keys(&launch.inputs[if backward { 6 } else { 3 }], program)
                {
                    return Some(Work::of_images(cost, [&launch.inputs[0], &launch.inputs[1]], backward, by, keys));
                }
                match Work::of_operation(cost, launch.arithmetic, [&launch.inputs, &launch.outputs], seen) {
                    Work::Kernel { cost, dtype, .. } => Work::Kernel {
                        cost,
                        dtype,
                        launches: calls.len().max(1),
                        blocks: calls.iter().map(|call| call.grid.iter().map(|n| *n as usize).product()).max(),
                        left: launch.scratch.as_ref().map_or(0.0, |at| at.bytes() as f64),
                    },
                    work @ (Work::Product { .. } | Work::Attention { .. }) => work,
                }
            }
            Instruction::Copy { .. } | Instruction::Zero { .. } => {
                Work::Kernel { cost, dtype: None, launches: 1, blocks: None, left: 0.0 }
            }
            Instruction::Transfer { .. }
            | Instruction::Collective(_)
            | Instruction::Record { .. }
            | Instruction::Wait { .. } => return None,
        })
    }

    /// Kernels of an operation on these operands, of which nothing else is known yet.
    pub fn of_operation(cost: Cost, arithmetic: Arithmetic, [inputs, outputs]: [&[TensorRef]; 2], seen: Seen) -> Work {
        let dtype = match arithmetic {
            Arithmetic::Attention { backward, by } => {
                return Work::attention(cost, [&inputs[0], &inputs[1]], backward, by, seen);
            }
            Arithmetic::Grouped { gradient, by: Realisation::Hopper } => {
                let (extents, extra) = grouped(cost, gradient, inputs, outputs);
                return Work::Product { cost, dtype: Some(inputs[0].dtype), extents, launches: 1, extra };
            }
            Arithmetic::Single => Some(DType::F32),
            // Kernels other than Hopper's multiply the numbers that quantized elements stand for.
            Arithmetic::Grouped { .. } if inputs[0].dtype.small().is_some() => Some(outputs[0].dtype),
            Arithmetic::OfOperands | Arithmetic::Grouped { .. } => inputs.first().map(|operand| operand.dtype),
        };
        Work::Kernel { cost, dtype, launches: 1, blocks: None, left: 0.0 }
    }

    /// Attention of queries [B, T, heads, D] and keys at a cost that counts all pairs that mask and window leave in whole
    /// rows.
    pub fn attention(cost: Cost, [q, k]: [&TensorRef; 2], backward: bool, by: Realisation, seen: Seen) -> Work {
        let head_dim = *q.shape.last().expect("queries have heads");
        let operations = if backward { 10.0 } else { 4.0 } * q.len() as f64;
        let all = cost.flops / operations;
        let mut of = Spread::of(q, k, backward, all, seen);
        // The division of the backward pass in Hopper's kernels.
        let group = q.shape.get(2).unwrap_or(&1) / k.shape.get(2).unwrap_or(&1).max(&1);
        of.halves = backward && by == Realisation::Hopper && group.is_multiple_of(2) && of.hidden != Hidden::Window;
        let cost = Cost { flops: cost.flops * if all > 0.0 { of.keys / all } else { 1.0 }, ..cost };
        Work::Attention { cost, dtype: Some(q.dtype), backward, by, head_dim, of }
    }

    /// Attention of patches that see this many others.
    fn of_images(cost: Cost, operands: [&TensorRef; 2], backward: bool, by: Realisation, keys: f64) -> Work {
        let mut work = Work::attention(cost, operands, backward, by, Seen::default());
        if let Work::Attention { cost, of, .. } = &mut work {
            cost.flops *= keys / of.keys.max(1.0);
            *of = Spread { hidden: Hidden::None, keys, longest: 1.0, ..*of };
        }
        work
    }

    /// True for a kernel of the project's own that multiplies.
    pub fn multiplies(&self) -> bool {
        matches!(self, Work::Kernel { cost, .. } if cost.flops > MULTIPLIES * cost.bytes)
    }

    pub fn cost(&self) -> Cost {
        match self {
            Work::Kernel { cost, .. } | Work::Product { cost, .. } | Work::Attention { cost, .. } => *cost,
        }
    }

    /// The ceiling of its arithmetic, FLOP/s.
    pub(crate) fn rate(&self, machine: &Machine) -> f64 {
        match self {
            Work::Product { dtype: Some(dtype), .. } => rates::product_rate(*dtype, machine),
            _ => rates::rate(self.dtype(), machine),
        }
    }

    /// The type of the arithmetic.
    pub fn dtype(&self) -> Option<DType> {
        match self {
            Work::Kernel { dtype, .. } | Work::Product { dtype, .. } | Work::Attention { dtype, .. } => *dtype,
        }
    }
}

/// Returns the extents of a product of each group, if all have the same number of rows (only the device knows the real
/// ones), and the bytes that move while nothing is computed. Blocks come in pairs; narrower columns leave a part of a
/// pair idle.
fn grouped(cost: Cost, gradient: bool, inputs: &[TensorRef], outputs: &[TensorRef]) -> (Extents, f64) {
    let columns = |of: &TensorRef| *of.shape.last().expect("rows have columns");
    let whole = |n: usize| n.next_multiple_of(PAIR);
    let longer = |k: usize| (k as f64 / GROUPED_SHARE) as usize;
    let (left, right, result) = (&inputs[0], &inputs[1], &outputs[0]);
    let batch = inputs[2].len() - 1;
    let rows = (left.len() / columns(left)).div_ceil(batch.max(1));
    if !gradient {
        return (Extents { batch, m: rows, n: whole(columns(result)), k: longer(columns(left)) }, 0.0);
    }
    let read: usize = inputs.iter().map(TensorRef::bytes).sum();
    let extents = Extents { batch, m: whole(columns(left)), n: whole(columns(right)), k: longer(rows) };
    (extents, GRADIENT_ALONE * (cost.bytes - read as f64).max(0.0))
}

/// Number of columns that a pair of blocks computes.
const PAIR: usize = 256;

/// Share of the rate of a product with the same tiles that products of groups reach, and share of the gradient's writes
/// and additions that happen while nothing is multiplied: an H200 at 256 to 2048 rows a group.
const GROUPED_SHARE: f64 = 0.87;
const GRADIENT_ALONE: f64 = 0.35;

/// Returns the highest rate of a machine for the products of an entry, each in its type, FLOP/s; `None` where there are
/// no products.
pub fn products_ceiling(entry: &Entry, machine: &Machine) -> Option<f64> {
    let products = entry.steps.iter().filter_map(|step| match &step.instruction {
        Instruction::Gemm(gemm) => {
            Some((step.cost.flops, step.cost.flops / rates::product_rate(gemm.a.dtype, machine)))
        }
        Instruction::Launch(_)
        | Instruction::AttentionForward(_)
        | Instruction::Copy { .. }
        | Instruction::Zero { .. }
        | Instruction::Transfer { .. }
        | Instruction::Collective(_)
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => None,
    });
    let (flops, seconds) = products.fold((0.0, 0.0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    (seconds > 0.0).then(|| flops / seconds)
}
