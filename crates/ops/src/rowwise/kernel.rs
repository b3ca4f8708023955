//! A form as a kernel over rows: the partition of rows over threads, and the launch. The text is `text.rs`'s.
//!
//! Threads hold a row in registers: it is read once. Where nothing is summed over rows, a warp takes a row of up to 256
//! packs, a block a longer one; where a row is not looked at as a whole, warps take slices of it. Sums over rows are
//! kept in registers while blocks walk over the rows, and each block leaves a part of them in scratch memory.
//!
//! Where a power of two may have to follow from the magnitude of what is computed, a first kernel computes that, the
//! same way; it ends at once where a factor is known.

use program::{Arg, TensorRef};

use super::form::{Extent, Form};
use super::text;
use crate::elementwise::{Expr, LOGISTIC};
use crate::kernel::{KernelSpec, LowerCall, follows};
use crate::layout::row_width;
use crate::quantise::PARTS;

const HEADERS: &[(&str, &str)] = &[
    ("rows.cuh", include_str!("../cuda/rows.cuh")),
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("pack.cuh", include_str!("../cuda/pack.cuh")),
    ("reduce.cuh", include_str!("../cuda/reduce.cuh")),
    LOGISTIC,
];

/// The header for values that a tensor has one of.
const OF_TENSOR: (&str, &str) = ("codes.cuh", include_str!("../quantise/codes.cuh"));

const SUM: &str = include_str!("sum.cu");

/// Number of threads in a block.
const THREADS: usize = 256;
/// Up to this many packs a row belongs to one warp; longer rows take a whole block.
const PACKS_OF_A_WARP: usize = 256;
/// The number of tensors up to which a thread reads two packs where warps take slices of rows; of more it reads one. On
/// an H200 the gradients of silu(gate)·up with their codes move 4.0 TB/s with one, 3.7 with two, 2.7 with four;
/// silu(gate)·up itself 3.6, 3.9, 3.9.
const FEW_TENSORS: usize = 2;
/// Threads that run at once on 132 multiprocessors when each keeps a few packs and its part of a sum in registers;
/// every block leaves a part of the sum.
const RESIDENT: usize = 132 * 1024;
/// Threads of one row at most, where sums over rows are kept: one pack each is faster than two in half the threads
/// (4096 columns: 44 µs, not 52).
const MOST_LANES: usize = 512;

/// The partition of rows over threads.
pub struct Deal {
    pub rows: usize,
    pub columns: usize,
    /// Number of elements in an access.
    pub width: usize,
    /// Number of threads in a row.
    pub lanes: usize,
    /// Number of threads in a block.
    pub threads: usize,
    pub blocks: usize,
    /// Blocks walk over the rows and keep sums.
    pub walks: bool,
    /// Parts of a row that different warps have.
    pub slices: usize,
    /// True where only the magnitudes of parts are computed, one part for each block, and only where a factor is not
    /// known.
    pub finds: bool,
}

impl Deal {
    fn new(form: &Form, call: &LowerCall<'_>) -> Deal {
        let x = &call.inputs[0];
        let columns = *x.shape.last().expect("the shape rule asks for an axis");
        let rows: usize = x.shape.iter().rev().skip(1).product();
        let inputs = call
            .inputs
            .iter()
            .zip(&form.operands)
            .filter(|(_, extent)| matches!(extent, Extent::Element | Extent::Column));
        let outputs = call.outputs.iter().zip(&form.results).filter(|(_, (extent, _))| *extent == Extent::Element);
        let packed: Vec<&TensorRef> = inputs.map(|(t, _)| t).chain(outputs.map(|(t, _)| t)).collect();
        let (width, walks) = (row_width(&packed), form.sums_rows());
        let packs = columns / width;
        let whole = form.results.iter().any(|(_, e)| e.any(&|e| matches!(e, Expr::Mean(_))));
        let tensors = form.operands.iter().filter(|extent| **extent == Extent::Element).count();
        let packs_of_a_thread = if tensors > FEW_TENSORS { 1 } else { 2 };
        let slices = match form.spans_tensor() && !walks && !whole {
            true => packs.div_ceil(32 * packs_of_a_thread).max(1),
            false => 1,
        };
        let lanes = match walks {
            _ if slices > 1 => 32,
            true => lanes_of(packs, MOST_LANES),
            false if packs <= PACKS_OF_A_WARP => 32,
            false => lanes_of(packs, THREADS),
        };
        let threads = if lanes == 32 { THREADS } else { lanes };
        let blocks = (rows * slices).div_ceil(threads / lanes);
        let blocks = if walks { blocks.min(RESIDENT / threads) } else { blocks };
        Deal { rows, columns, width, lanes, threads, blocks, walks, slices, finds: false }
    }

    /// Returns the same partition of rows over threads, so that the same bits are computed, for blocks that each find
    /// the largest magnitudes of a part.
    fn finding(self) -> Deal {
        Deal { walks: true, blocks: PARTS, finds: true, ..self }
    }

    fn defines(&self) -> Vec<(String, String)> {
        let numbers = [
            ("COLUMNS", self.columns),
            ("ROWS", self.rows),
            ("WIDTH", self.width),
            ("LANES", self.lanes),
            ("THREADS", self.threads),
        ];
        let slices = (self.slices > 1).then_some(("SLICES", self.slices));
        defines(&numbers.into_iter().chain(slices).collect::<Vec<_>>())
    }

    /// For the compiler of the device code: threads of a block, and where a block has a row of few packs for each
    /// thread, how many of them are to fit on a multiprocessor: 1024 threads.
    pub fn bounds(&self) -> String {
        let packs = (self.columns / self.width).div_ceil(self.lanes);
        let few = !self.walks && self.lanes > 32 && packs <= 2;
        if few { format!("THREADS, {}", 1024 / self.threads) } else { "THREADS".to_owned() }
    }

    /// True if the kernel keeps its place on the stream itself.
    pub fn follows(&self) -> bool {
        !self.walks && follows(self.blocks)
    }
}

/// Returns the threads in whole warps of a row, at most `most` of them, with nearly equal numbers of packs.
fn lanes_of(packs: usize, most: usize) -> usize {
    packs.div_ceil(packs.div_ceil(most).max(1)).next_multiple_of(32).max(32)
}

/// The kernels of a form, in order.
pub fn kernels(form: &Form, call: &LowerCall<'_>) -> Vec<KernelSpec> {
    let deal = Deal::new(form, call);
    let (source, read) = text::text(form, call, &deal);
    let sums: Vec<usize> = (0..form.results.len()).filter(|i| form.results[*i].0 == Extent::Column).collect();
    let written = (0..form.results.len()).filter(|i| !sums.contains(i)).map(Arg::Output);
    let partial = (!sums.is_empty()).then_some(Arg::Scratch(0));
    let after = sums.len() * deal.blocks * deal.columns * 4;
    let parts = (!form.powers().is_empty()).then_some(Arg::Scratch(after));
    let kernel = KernelSpec {
        entry: "rowwise",
        source,
        headers: headers(form).into_iter().chain(deal.follows().then_some(device::DEPENDENT_LAUNCH)).collect(),
        defines: deal.defines(),
        grid: [deal.blocks as u32, 1, 1],
        block: [deal.threads as u32, 1, 1],
        shared_bytes: 0,
        args: read.into_iter().map(Arg::Input).chain(written).chain(partial).chain(parts).collect(),
    };
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let summed = sums.into_iter().enumerate().map(|(place, result)| {
        let partial = Arg::Scratch(place * deal.blocks * deal.columns * 4);
        sum_partials(deal.columns, deal.blocks, accumulate, partial, Arg::Output(result))
    });
    let mut kernels: Vec<KernelSpec> = [kernel].into_iter().chain(summed).collect();
    if !form.powers().is_empty() {
        kernels.insert(0, magnitudes(form, call, after));
    }
    kernels
}

fn headers(form: &Form) -> Vec<(&'static str, &'static str)> {
    HEADERS.iter().copied().chain(form.spans_tensor().then_some(OF_TENSOR)).collect()
}

/// The first kernel: the largest magnitudes of 256 parts for each power of two, where a factor is not known.
fn magnitudes(form: &Form, call: &LowerCall<'_>, scratch: usize) -> KernelSpec {
    let deal = Deal::new(form, call).finding();
    let of = |power: &Expr| match power {
        Expr::Power(_, amax, _) => (Extent::Tensor, (**amax).clone()),
        _ => unreachable!("only powers are collected"),
    };
    let amaxes = Form { operands: form.operands.clone(), results: form.powers().into_iter().map(of).collect() };
    let (source, read) = text::text_of_magnitudes(form, &amaxes, call, &deal);
    KernelSpec {
        entry: "rowwise",
        source,
        headers: headers(form),
        defines: deal.defines(),
        grid: [deal.blocks as u32, 1, 1],
        block: [deal.threads as u32, 1, 1],
        shared_bytes: 0,
        args: read.into_iter().map(Arg::Input).chain([Arg::Scratch(scratch)]).collect(),
    }
}

/// Bytes of the parts of sums over rows, and of magnitudes.
pub fn scratch(form: &Form, call: &LowerCall<'_>) -> usize {
    let sums = form.results.iter().filter(|(extent, _)| *extent == Extent::Column).count();
    let parts = form.powers().len() * PARTS * 4;
    if sums == 0 {
        return parts;
    }
    let deal = Deal::new(form, call);
    sums * deal.blocks * deal.columns * 4 + parts
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

#[cfg(test)]
mod tests {
    use program::{ArenaId, Documents, Machine};
    use tensor::{Attrs, DType};

    use super::*;

    fn call(columns: usize, whole: bool) -> (Form, Vec<KernelSpec>) {
        let (x, factor) = (Expr::Input(0), Expr::Input(1));
        let y = if whole { x.clone() * (x.clone() * x).mean().rsqrt() } else { x.silu() };
        let y = y.stored_as(DType::BF16);
        let power = || factor.clone().power(Expr::Amax(vec![y.clone()]), 7);
        let results = vec![
            (Extent::Element, y.clone() * power()),
            (Extent::Tensor, Expr::Constant(1.0) / power()),
            (Extent::Tensor, Expr::Amax(vec![y.clone()])),
        ];
        let form = Form { operands: vec![Extent::Element, Extent::Tensor], results };
        form.check().expect("codes of what is computed");
        let of = |dtype: DType, shape: &[usize]| TensorRef::dense(ArenaId(0), 0, dtype, shape);
        let inputs = [of(DType::BF16, &[64, columns]), of(DType::F32, &[1])];
        let outputs = [of(DType::E4M3, &[64, columns]), of(DType::F32, &[1]), of(DType::F32, &[1])];
        let attrs = Attrs::new();
        let machine = Machine::h200();
        let documents = Documents::Rows;
        let call = LowerCall { inputs: &inputs, outputs: &outputs, attrs: &attrs, machine: &machine, documents };
        let kernels = kernels(&form, &call);
        assert_eq!(scratch(&form, &call), PARTS * 4, "parts of one magnitude");
        (form, kernels)
    }

    fn defined(kernel: &KernelSpec, name: &str) -> Option<String> {
        kernel.defines.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    }

    /// The magnitudes of the first kernel have the bits of what the second one stores: both partition rows alike.
    #[test]
    fn magnitudes_are_those_of_the_same_deal() {
        for (columns, whole, lanes, slices) in [
            (1024, true, "32", None),
            (2560, true, "160", None),
            (4096, true, "256", None),
            (4096, false, "32", Some("8")),
        ] {
            let (_, kernels) = call(columns, whole);
            let [front, main] = &kernels[..] else { panic!("two kernels, not {}", kernels.len()) };
            for kernel in [front, main] {
                assert_eq!(defined(kernel, "LANES").as_deref(), Some(lanes), "{columns}");
                assert_eq!(defined(kernel, "SLICES").as_deref(), slices, "{columns}");
            }
            assert_eq!(front.grid, [PARTS as u32, 1, 1]);
            assert_eq!(front.args, [Arg::Input(0), Arg::Input(1), Arg::Scratch(0)]);
            let outputs = (0..3).map(Arg::Output);
            let all: Vec<Arg> =
                [Arg::Input(0), Arg::Input(1)].into_iter().chain(outputs).chain([Arg::Scratch(0)]).collect();
            assert_eq!(main.args, all);
            assert!(front.source.contains("if (q1 != 0.0f) return;"), "{}", front.source);
            assert!(main.source.contains("tensor_power(q1, parts + 0, 7)"), "{}", main.source);
            assert!(!main.source.contains("return;"), "all threads leave magnitudes: {}", main.source);
        }
    }

    #[test]
    fn magnitudes_are_read_in_powers_only() {
        let amax = || Expr::Amax(vec![Expr::Input(0)]);
        let form = |extent: Extent, e: Expr| Form {
            operands: vec![Extent::Element, Extent::Tensor],
            results: vec![(extent, e)],
        };
        assert!(form(Extent::Tensor, amax()).check().is_ok());
        assert!(form(Extent::Element, Expr::Input(0) * amax()).check().is_err());
        assert!(form(Extent::Tensor, Expr::Input(0) * Expr::Input(1)).check().is_err());
        assert!(form(Extent::Element, Expr::Input(0).power(amax(), 7)).check().is_err(), "not a factor of the tensor");
    }
}
