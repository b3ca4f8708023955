//! GEMMs on Hopper with the backend's own kernels, low-rank addends included: which products they support, and their
//! launches. `product.rs` decides whether they are used instead of the library.

use super::Preparation;
use super::launch::{Arguments, BoundLaunch};
use crate::driver::{Described, LaunchShape};
use crate::error::{Error, Result};
use crate::kernels::{HopperCodes, HopperProduct, Thin};
use program::{Gemm, LowRank, TensorRef};
use tensor::DType;

/// Alignment in bytes that the copy engine requires of addresses and of rows.
const ALIGNMENT: usize = 16;
/// Number of columns of a box of the copy engine.
const BOX: usize = 64;

/// Returns the variants of the kernel that support a product, the likely best first; none where it is not supported.
pub(super) fn variants(p: &Preparation, gemm: &Gemm) -> Vec<HopperProduct> {
    if p.engine.architecture().is_hopper() && takes(gemm) { shapes(gemm) } else { vec![] }
}

/// Returns the variants for products of any number of rows, those with the widest tiles first: few rows need many tiles, and
/// blocks that share them.
fn invariant_variants(p: &Preparation, gemm: &Gemm) -> Vec<HopperProduct> {
    let variants = variants(p, gemm);
    let narrow = variants.last().map(|last| HopperProduct { wide: HopperProduct::NARROW, ..*last });
    let flat = gemm.m <= HopperProduct::TALL;
    variants.into_iter().chain(narrow).map(|variant| HopperProduct { flat, ..variant }).collect()
}

fn shapes(gemm: &Gemm) -> Vec<HopperProduct> {
    let rank = gemm.low_rank.iter().map(|a| rank_of(a).expect("a product that the kernel takes")).max().unwrap_or(0);
    let scaled = gemm.low_rank.first().is_some_and(|a| a.scale != 1.0);
    let codes = gemm
        .scales
        .as_ref()
        .map(|scales| HopperCodes { types: [gemm.a.dtype, gemm.b.dtype], promoted: !scales.fast_sum });
    // A second sum leaves no registers for the widest tiles.
    let widths: &[usize] = if codes.is_some_and(|codes| codes.promoted) { &[192, 128] } else { &[256, 128] };
    let across = across(gemm);
    widths.iter().map(|wide| HopperProduct { wide: *wide, flat: false, across, rank, scaled, codes }).collect()
}

/// True if the addends' second factors are [rank, columns], and B is [k, n] unless it is quantized.
fn across(gemm: &Gemm) -> bool {
    match gemm.scales {
        Some(_) => gemm.low_rank.first().is_some_and(|a| !a.transpose_b),
        None => !gemm.transpose_b,
    }
}

/// True if the kernel supports a product: bf16 or eight-bit factors, a result of bf16, nothing added to it but addends
/// of one kind and a bias.
fn takes(gemm: &Gemm) -> bool {
    let plain = gemm.batch == 1 && !gemm.transpose_a && !gemm.accumulate && gemm.scale == 1.0;
    let across = across(gemm);
    let of_factors = match gemm.scales {
        Some(_) => {
            let codes = [&gemm.a, &gemm.b].iter().all(|at| at.dtype.small().is_some() && evenly_spaced(at));
            // The sum is divided by the addends' factor before they are added.
            codes && gemm.transpose_b && gemm.low_rank.iter().all(|a| a.scale != 0.0)
        }
        None => described(&gemm.a) && described(&gemm.b),
    };
    let factors = of_factors && described(&gemm.d);
    let bias = gemm
        .bias
        .as_ref()
        .is_none_or(|b| b.dtype == DType::BF16 && b.offset.is_multiple_of(4) && gemm.n.is_multiple_of(2));
    let ordered = gemm.low_rank.windows(2).all(|pair| pair[0].columns.0 + pair[0].columns.1 <= pair[1].columns.0);
    let columns = !across || gemm.n.is_multiple_of(BOX);
    let few = gemm.low_rank.len() <= HopperProduct::SLICES;
    plain && factors && bias && ordered && columns && few && gemm.low_rank.iter().all(|a| takes_addend(gemm, a))
}

fn takes_addend(gemm: &Gemm, a: &LowRank) -> bool {
    let alike = a.transpose_b != across(gemm) && a.scale == gemm.low_rank[0].scale;
    let rank = rank_of(a).is_some_and(|rank| rank <= BOX);
    let columns = a.transpose_b || (a.columns.0.is_multiple_of(BOX) && a.columns.1.is_multiple_of(BOX));
    alike && rank && columns && described(&a.t) && described(&a.b)
}

fn rank_of(a: &LowRank) -> Option<usize> {
    a.t.as_matrix().map(|(_, rank, _)| rank)
}

/// True if the copy engine can move boxes of a matrix of bf16.
fn described(at: &TensorRef) -> bool {
    at.dtype == DType::BF16 && evenly_spaced(at)
}

/// True if every row begins where the copy engine can start.
fn evenly_spaced(at: &TensorRef) -> bool {
    let rows = at.as_matrix().is_some_and(|(_, _, row)| (row * at.dtype.size()).is_multiple_of(ALIGNMENT));
    at.offset.is_multiple_of(ALIGNMENT) && rows
}

/// Returns eight-bit elements as pairs, which have the size of bf16: the copy engine only moves them.
fn as_pairs(at: &TensorRef) -> TensorRef {
    let (rows, columns, row) = at.as_matrix().expect("checked to be a matrix");
    TensorRef { dtype: DType::BF16, shape: vec![rows, columns / 2], strides: vec![row / 2, 1], ..at.clone() }
}

/// Returns the number of tiles of D.
fn tiles(gemm: &Gemm, variant: &HopperProduct) -> usize {
    gemm.m.div_ceil(HopperProduct::TALL) * gemm.n.div_ceil(variant.wide)
}

/// Returns the call of a variant.
pub(super) fn call(p: &mut Preparation, gemm: &Gemm, variant: HopperProduct) -> Result<BoundLaunch> {
    let function = p.engine.own_function(variant.kernel(), "product")?;
    function.allow_shared_memory(variant.shared_bytes())?;
    let maps = Maps { p, variant };
    let (tall, span) = match variant.flat {
        true => (HopperProduct::TALL, 2 * variant.wide),
        false => (2 * HopperProduct::TALL, variant.wide),
    };
    let (pairs, across) = (gemm.m.div_ceil(tall), gemm.n.div_ceil(span));
    // A product without addends still has the places of their descriptions, whose contents are not read.
    let factors = match gemm.scales {
        Some(_) => [maps.left(&as_pairs(&gemm.a))?, maps.along(&as_pairs(&gemm.b))?],
        None => [maps.left(&gemm.a)?, maps.right(&gemm.b)?],
    };
    let (mut ts, mut us) = ([factors[0]; HopperProduct::SLICES], [factors[1]; HopperProduct::SLICES]);
    let (mut firsts, mut counts) = ([0; HopperProduct::SLICES], [0; HopperProduct::SLICES]);
    for (s, a) in gemm.low_rank.iter().enumerate() {
        (ts[s], us[s]) = (maps.left(&a.t)?, maps.right(&a.b)?);
        (firsts[s], counts[s]) = (a.columns.0 as u32, a.columns.1 as u32);
    }
    let slices: Vec<u32> = firsts.into_iter().chain(counts).collect();
    let slices: Vec<u64> = slices.chunks(2).map(|pair| pair[0] as u64 | (pair[1] as u64) << 32).collect();
    let scale = gemm.low_rank.first().map_or(1.0, |a| a.scale);
    let deep = HopperProduct::DEEP * if gemm.scales.is_some() { 2 } else { 1 };
    let arguments = Arguments::new()
        .structure(&factors[0])
        .structure(&factors[1])
        .structure(&maps.result(&gemm.d)?)
        .structure([ts, us].as_flattened().as_flattened())
        .structure(&slices)
        .word(gemm.low_rank.len() as u64)
        .word(scale.to_bits() as u64)
        .word(gemm.bias.as_ref().map_or(0, |bias| p.memory.address(bias)))
        .word(gemm.n as u64)
        .word(pairs as u64)
        .word(across as u64)
        .word(gemm.k.div_ceil(deep) as u64);
    let scales = gemm.scales.iter().flat_map(|scales| &scales.of);
    let arguments = scales.fold(arguments, |arguments, at| arguments.word(p.memory.address(at)));
    let clusters = (p.engine.device.properties.multiprocessors as usize / 2).min(pairs * across);
    let shape = LaunchShape {
        grid: [2 * clusters as u32, 1, 1],
        block: [HopperProduct::THREADS, 1, 1],
        shared_bytes: variant.shared_bytes() as u32,
        early: false,
    };
    Ok(BoundLaunch::new(function, "product", shape, arguments))
}

/// Returns the call of a product: few columns have a kernel of their own, all others Hopper's, with the widest tiles that give
/// every multiprocessor one, or the narrowest. Neither of these widths, nor what a row is computed with, changes a bit.
pub(super) fn invariant(p: &mut Preparation, gemm: &Gemm) -> Result<BoundLaunch> {
    if let Some(product) = thin(gemm) {
        return call_of_thin(p, gemm, product);
    }
    let variants = invariant_variants(p, gemm);
    let units = p.engine.device.properties.multiprocessors as usize;
    let fills = |variant: &&HopperProduct| tiles(gemm, variant) >= units;
    let Some(variant) = variants.iter().find(fills).or(variants.last()) else {
        return Err(Error::Unsupported {
            what: format!("the product of {} and {}", gemm.a, gemm.b),
            reason: "no kernel sums it in one order for any number of rows; remove `exact_sampling: true`".into(),
            context: String::new(),
        });
    };
    call(p, gemm, *variant)
}

fn call_of_thin(p: &mut Preparation, gemm: &Gemm, product: Thin) -> Result<BoundLaunch> {
    let function = p.engine.own_function(product.kernel(), "thin")?;
    let operands = [&gemm.a, &gemm.b, &gemm.d].map(|at| p.memory.address(at));
    let bias = gemm.bias.as_ref().map_or(0, |bias| p.memory.address(bias));
    let arguments = operands.into_iter().fold(Arguments::new(), Arguments::word).word(bias);
    let blocks = product.rows.div_ceil(Thin::TALL) as u32;
    let shape = LaunchShape { grid: [blocks, 1, 1], block: [Thin::THREADS, 1, 1], shared_bytes: 0, early: p.early };
    Ok(BoundLaunch::new(function, "thin", shape, arguments))
}

/// Returns a product of few columns as its kernel sees it; `None` where it does not support it.
fn thin(gemm: &Gemm) -> Option<Thin> {
    let plain = gemm.batch == 1 && !gemm.transpose_a && gemm.transpose_b && !gemm.accumulate && gemm.scale == 1.0;
    let operands = [&gemm.a, &gemm.b, &gemm.d];
    let of_bf16 = operands.into_iter().chain(&gemm.bias).all(|at| at.dtype == DType::BF16);
    if !plain || !of_bf16 || gemm.n > Thin::COLUMNS || gemm.scales.is_some() || !gemm.low_rank.is_empty() {
        return None;
    }
    let rows = operands.map(|at| at.as_matrix().map(|(_, _, row)| row));
    let [Some(a), Some(b), Some(d)] = rows else { return None };
    let step = ALIGNMENT / DType::BF16.size();
    let aligned = |at: &TensorRef, row: usize| at.offset.is_multiple_of(ALIGNMENT) && row.is_multiple_of(step);
    let reads = gemm.k.is_multiple_of(step) && aligned(&gemm.a, a) && aligned(&gemm.b, b);
    reads.then_some(Thin { rows: gemm.m, n: gemm.n, k: gemm.k, row: [a, b, d], has_bias: gemm.bias.is_some() })
}

/// Descriptions of a product's matrices for the copy engine.
struct Maps<'a, 'p> {
    p: &'a Preparation<'p>,
    variant: HopperProduct,
}

type Map = [u64; 16];

impl Maps<'_, '_> {
    /// A, or T of an addend: rows of one block, half of them where two blocks share them.
    fn left(&self, at: &TensorRef) -> Result<Map> {
        self.rows(at, HopperProduct::TALL / if self.variant.flat { 2 } else { 1 })
    }

    fn result(&self, at: &TensorRef) -> Result<Map> {
        self.rows(at, BOX)
    }

    /// B, or U of an addend: half the columns of a tile, all of them where the other block has others.
    fn right(&self, at: &TensorRef) -> Result<Map> {
        if !self.variant.across {
            return self.along(at);
        }
        let (rows, columns, row) = at.as_matrix().expect("checked to be a matrix");
        let boxes = [1, (self.columns() / BOX).max(1) as u32, HopperProduct::DEEP as u32, BOX as u32];
        self.describe(at, [1, columns / BOX, rows, BOX], [0, BOX, row, 1], boxes)
    }

    /// A second factor whose rows are summed over.
    fn along(&self, at: &TensorRef) -> Result<Map> {
        self.rows(at, self.columns())
    }

    /// Columns of B that a block fetches.
    fn columns(&self) -> usize {
        self.variant.wide / if self.variant.flat { 1 } else { 2 }
    }

    fn rows(&self, at: &TensorRef, tall: usize) -> Result<Map> {
        let (rows, columns, row) = at.as_matrix().expect("checked to be a matrix");
        self.describe(at, [1, 1, rows, columns], [0, 0, row, 1], [1, 1, tall as u32, BOX as u32])
    }

    fn describe(&self, at: &TensorRef, shape: [usize; 4], strides: [usize; 4], boxes: [u32; 4]) -> Result<Map> {
        let described = Described { size: 2, address: self.p.memory.address(at), shape, strides, boxes };
        described.encode(&self.p.engine.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::ArenaId;

    fn dense(shape: [usize; 2]) -> TensorRef {
        TensorRef::dense(ArenaId(0), 0, DType::BF16, shape)
    }

    fn gemm() -> Gemm {
        let addend = |first, count| LowRank {
            t: dense([512, 16]),
            b: dense([count, 16]),
            transpose_b: true,
            scale: 2.0,
            columns: (first, count),
        };
        Gemm {
            batch: 1,
            m: 512,
            n: 200,
            k: 128,
            a: dense([512, 128]),
            b: dense([200, 128]),
            d: dense([512, 200]),
            transpose_a: false,
            transpose_b: true,
            scale: 1.0,
            scales: None,
            bias: None,
            accumulate: false,
            batch_invariant: false,
            low_rank: vec![addend(0, 120), addend(120, 80)],
        }
    }

    #[test]
    fn only_what_the_kernel_computes_is_taken() {
        assert!(takes(&gemm()));
        assert_eq!(
            shapes(&gemm())[0],
            HopperProduct { wide: 256, flat: false, across: false, rank: 16, scaled: true, codes: None }
        );
        assert!(!takes(&Gemm { accumulate: true, ..gemm() }));
        assert!(!takes(&Gemm { scale: 0.5, ..gemm() }));
        assert!(!takes(&Gemm { d: TensorRef { dtype: DType::F32, ..gemm().d }, ..gemm() }));
        assert!(!takes(&Gemm { a: TensorRef { offset: 8, ..gemm().a }, ..gemm() }));
        let mut unordered = gemm();
        unordered.low_rank.reverse();
        assert!(!takes(&unordered));
        let mut unlike = gemm();
        unlike.low_rank[1].scale = 1.0;
        assert!(!takes(&unlike));
    }

    #[test]
    fn factors_across_come_in_whole_boxes() {
        let across = |n: usize| Gemm {
            n,
            b: dense([128, n]),
            d: dense([512, n]),
            transpose_b: false,
            low_rank: vec![],
            ..gemm()
        };
        assert!(takes(&across(192)));
        assert!(!takes(&across(200)));
    }
}
