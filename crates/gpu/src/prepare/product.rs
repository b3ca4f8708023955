//! Gemm instructions as cuBLASLt calls. Low-rank addends follow: in one pass over D with the backend's own kernel, or
//! as further GEMMs onto it. The factors of numbers and of four-bit elements are multiplied on the device, before the
//! product. Products of few rows have a kernel of their own. On Hopper the backend's own GEMM kernel, which needs no
//! second pass, competes with the library, and timing decides.
#![allow(unsafe_code, reason = "runs products on addresses that the program describes")]

use super::launch::{Arguments, BoundLaunch};
use super::{Memory, Preparation, addends, few_rows, hopper};
use crate::algorithms::{Contest, Operands};
use crate::cublaslt::{Operand, Product, Scales, alignment};
use crate::driver::{Function, LaunchShape};
use crate::engine::{Engine, ProductId};
use crate::error::Result;
use crate::kernels::{self, HopperProduct};
use program::{Gemm, LowRank, TensorRef};
use tensor::DType;

struct LibraryCall {
    plan: ProductId,
    addresses: [u64; 3],
    bias: Option<u64>,
    scales: Option<Scales>,
}

/// The kernel that computes alpha and beta of a product whose factors are numbers or have four bits, with a scale each:
/// they lie before the library's workspace.
enum Factor {
    /// Planned, with the addresses of the scales of A and B.
    Planned(Function, [u64; 2]),
    /// Bound to a known workspace.
    Bound(BoundLaunch),
}

/// Bytes before the library's workspace, which is aligned.
const FACTOR: usize = 256;

/// The library's product and the addends, in order.
struct Library {
    factor: Option<Factor>,
    parts: Vec<LibraryCall>,
    addends: Option<BoundLaunch>,
}

/// The implementation of a product.
enum Way {
    Library(Library),
    Own(BoundLaunch),
}

/// A product with its implementation.
pub(crate) struct PlannedGemm {
    way: Way,
    workspace: usize,
}

/// A [`PlannedGemm`] with its workspace.
pub(crate) struct BoundGemm {
    way: Way,
    workspace: u64,
}

/// The name of the library in the record of choices; variants of the own kernel are named by the width of their tiles.
const LIBRARY: &str = "library";

pub(super) fn plan(p: &mut Preparation, gemm: &Gemm) -> Result<PlannedGemm> {
    if gemm.batch_invariant {
        let way = Way::Own(hopper::invariant(p, gemm)?);
        return Ok(PlannedGemm::new(p, way));
    }
    if let Some(call) = few_rows::call(p, gemm)? {
        return Ok(PlannedGemm::new(p, Way::Own(call)));
    }
    let variants = hopper::variants(p, gemm);
    if variants.is_empty() {
        let way = Way::Library(library(p, gemm)?);
        return Ok(PlannedGemm::new(p, way));
    }
    let widths = variants.iter().map(|variant| format!("own {}", variant.wide));
    let contest = Contest {
        name: description(p, gemm),
        ways: [LIBRARY.to_owned()].into_iter().chain(widths).collect(),
        texts: &HopperProduct::text(),
    };
    let way = match p.engine.chooser.settled(&p.engine.stream, &contest)? {
        Some(0) => Way::Library(library(p, gemm)?),
        Some(own) => Way::Own(hopper::call(p, gemm, variants[own - 1])?),
        None => race(p, gemm, &variants, &contest)?,
    };
    Ok(PlannedGemm::new(p, way))
}

fn library(p: &mut Preparation, gemm: &Gemm) -> Result<Library> {
    let mut parts = vec![main_part(p, gemm)?];
    let addends = addends::plan(p, gemm)?;
    for addend in gemm.low_rank.iter().filter(|_| addends.is_none()) {
        parts.push(part(
            p,
            &addend_product(gemm, addend),
            [&addend.t, &addend.b, &gemm.d],
            addend.columns.0,
            None,
            None,
        )?);
    }
    Ok(Library { factor: factor(p, gemm)?, parts, addends })
}

fn factor(p: &mut Preparation, gemm: &Gemm) -> Result<Option<Factor>> {
    let Some(scales) = gemm.scales.as_ref().filter(|_| !is_of_codes(gemm)) else { return Ok(None) };
    let scales = scales.of.each_ref().map(|at| p.memory.address(at));
    let function = p.engine.own_function(kernels::factor(gemm.scale, beta(gemm)), "factor")?;
    Ok(Some(Factor::Planned(function, scales)))
}

fn is_of_codes(gemm: &Gemm) -> bool {
    gemm.a.dtype.small().is_some()
}

fn beta(gemm: &Gemm) -> f32 {
    if gemm.accumulate { 1.0 } else { 0.0 }
}

/// Returns the fastest of all candidates.
fn race(p: &mut Preparation, gemm: &Gemm, variants: &[HopperProduct], contest: &Contest) -> Result<Way> {
    p.engine.load_own(variants.iter().map(|variant| variant.kernel()).collect())?;
    let mut ways = vec![Way::Library(library(p, gemm)?)];
    for variant in variants {
        ways.push(Way::Own(hopper::call(p, gemm, *variant)?));
    }
    let free = p.memory.free();
    let best = p.engine.race(contest, &free, |engine, way, workspace| ways[way].queue(engine, workspace))?;
    Ok(ways.swap_remove(best))
}

/// Returns everything that decides how fast each candidate is.
fn description(p: &Preparation, gemm: &Gemm) -> String {
    let addresses = [&gemm.a, &gemm.b, &gemm.d].map(|at| alignment(p.memory.address(at)));
    let product = Product { alignment: addresses, ..main_product(gemm) }.description();
    let addends = gemm.low_rank.iter().map(|a| {
        let (_, rank, row) = matrix("T", &a.t);
        format!(", addend {rank} by {row} on {}+{} times {}", a.columns.0, a.columns.1, a.scale)
    });
    addends.fold(format!("way of {product}"), |text, addend| text + &addend)
}

fn main_part(p: &mut Preparation, gemm: &Gemm) -> Result<LibraryCall> {
    let addresses = |of: &[TensorRef; 2]| of.each_ref().map(|at| p.memory.address(at));
    // The address of alpha is not known yet; any number does for timing.
    let scales = gemm.scales.as_ref().map(|scales| match (addresses(&scales.of), &scales.blocks) {
        (both, Some(blocks)) => Scales::Blocks { both: both[0], of: addresses(blocks) },
        (of, None) if is_of_codes(gemm) => Scales::Each(of),
        (both, None) => Scales::Both(both[0]),
    });
    part(p, &main_product(gemm), [&gemm.a, &gemm.b, &gemm.d], 0, gemm.bias.as_ref(), scales)
}

fn part(
    p: &mut Preparation,
    product: &Product,
    [a, b, d]: [&TensorRef; 3],
    first_column: usize,
    bias: Option<&TensorRef>,
    scales: Option<Scales>,
) -> Result<LibraryCall> {
    let memory: &Memory = p.memory;
    let d_address = memory.address(d) + (first_column * d.dtype.size()) as u64;
    let addresses = [memory.address(a), memory.address(b), d_address];
    let bias = bias.map(|at| memory.address(at));
    let operands = Operands { addresses, bias, scales, arenas: &memory.free() };
    let plan = p.engine.product(Product { alignment: addresses.map(alignment), ..*product }, operands)?;
    Ok(LibraryCall { plan, addresses, bias, scales })
}

fn main_product(gemm: &Gemm) -> Product {
    let Gemm { batch, m, n, k, .. } = *gemm;
    if let Some(bias) = &gemm.bias {
        assert!(bias.is_dense() && bias.len() == n, "a bias is a dense vector of {n} elements, not {bias}");
    }
    Product {
        m,
        n,
        k,
        batch,
        a: batched("A", &gemm.a, batch, gemm.transpose_a, (m, k)),
        b: batched("B", &gemm.b, batch, gemm.transpose_b, (k, n)),
        d: batched("D", &gemm.d, batch, false, (m, n)),
        alpha: gemm.scale,
        beta: beta(gemm),
        bias: gemm.bias.as_ref().map(|at| at.dtype),
        fast_sum: gemm.scales.as_ref().is_some_and(|scales| scales.fast_sum),
        factor: gemm.scales.is_some() && !is_of_codes(gemm),
        alignment: [0; 3],
    }
}

fn addend_product(gemm: &Gemm, addend: &LowRank) -> Product {
    let (first, count) = addend.columns;
    assert!(first + count <= gemm.n, "columns {first}..+{count} of an addend lie outside D's {}", gemm.n);
    let (_, rank, _) = matrix("T", &addend.t);
    Product {
        m: gemm.m,
        n: count,
        k: rank,
        batch: 1,
        a: operand("T", &addend.t, false, (gemm.m, rank)),
        b: operand("B of an addend", &addend.b, addend.transpose_b, (rank, count)),
        d: operand("D", &gemm.d, false, (gemm.m, gemm.n)),
        alpha: addend.scale,
        beta: 1.0,
        bias: None,
        fast_sum: false,
        factor: false,
        alignment: [0; 3],
    }
}

fn matrix(what: &str, at: &TensorRef) -> (usize, usize, usize) {
    at.as_matrix().unwrap_or_else(|| panic!("{what} of a Gemm is a matrix with evenly spaced rows, not {at}"))
}

/// An operand of a batch, whose matrices are evenly spaced.
fn batched(what: &str, at: &TensorRef, batch: usize, transposed: bool, extents: (usize, usize)) -> Operand {
    if batch == 1 {
        return operand(what, at, transposed, extents);
    }
    assert_eq!(at.shape.len(), 3, "{what} of a batch of products is [batch, rows, columns], not {at}");
    let matrix = TensorRef { shape: at.shape[1..].to_vec(), strides: at.strides[1..].to_vec(), ..at.clone() };
    Operand { batch_stride: at.strides[0], ..operand(what, &matrix, transposed, extents) }
}

/// Returns an operand. `extents` are those in the product; the stored matrix has them exchanged when transposed. Bytes
/// hold two four-bit elements each.
fn operand(what: &str, at: &TensorRef, transposed: bool, extents: (usize, usize)) -> Operand {
    let (rows, columns, row_stride) = matrix(what, at);
    let each = if at.dtype == DType::U8 { 2 } else { 1 };
    let (columns, row_stride) = (each * columns, each * row_stride);
    let stored = if transposed { (extents.1, extents.0) } else { extents };
    assert_eq!((rows, columns), stored, "{what} of a Gemm is stored as {stored:?}, but is {at}");
    Operand::new(at.dtype, row_stride, transposed)
}

impl PlannedGemm {
    fn new(p: &Preparation, way: Way) -> PlannedGemm {
        let workspace = way.workspace(p.engine);
        PlannedGemm { way, workspace }
    }

    pub fn workspace(&self) -> usize {
        self.workspace
    }

    pub fn bind(mut self, workspace: u64) -> BoundGemm {
        if let Way::Library(library) = &mut self.way {
            library.bind(workspace);
        }
        BoundGemm { way: self.way, workspace }
    }
}

impl BoundGemm {
    pub fn queue(&mut self, engine: &Engine) -> Result<()> {
        self.way.queue(engine, self.workspace)
    }
}

impl Way {
    fn workspace(&self, engine: &Engine) -> usize {
        match self {
            Way::Library(library) => {
                let parts = library.parts.iter().map(|part| engine.product_plan(part.plan).workspace());
                parts.max().unwrap_or(0) + library.own_bytes()
            }
            Way::Own(_) => 0,
        }
    }

    fn queue(&mut self, engine: &Engine, workspace: u64) -> Result<()> {
        match self {
            Way::Library(library) => library.queue(engine, workspace),
            Way::Own(call) => call.queue(&engine.stream),
        }
    }
}

impl Library {
    /// Bytes before the library's workspace.
    fn own_bytes(&self) -> usize {
        if self.factor.is_some() { FACTOR } else { 0 }
    }

    /// Sets the addresses of alpha and beta.
    fn bind(&mut self, workspace: u64) {
        let Some(Factor::Planned(function, [of_a, of_b])) = self.factor.take() else { return };
        let arguments = Arguments::new().word(workspace).word(of_a).word(of_b);
        let shape = LaunchShape { grid: [1; 3], block: [1; 3], shared_bytes: 0, early: false };
        self.factor = Some(Factor::Bound(BoundLaunch::new(function, "factor", shape, arguments)));
        self.parts[0].scales = match self.parts[0].scales {
            Some(Scales::Blocks { of, .. }) => Some(Scales::Blocks { both: workspace, of }),
            _ => Some(Scales::Both(workspace)),
        };
    }

    fn queue(&mut self, engine: &Engine, workspace: u64) -> Result<()> {
        match &mut self.factor {
            Some(Factor::Bound(call)) => call.queue(&engine.stream)?,
            Some(Factor::Planned(..)) => panic!("a product with a factor is bound before it runs"),
            None => {}
        }
        let workspace = workspace + self.own_bytes() as u64;
        for part in &self.parts {
            // SAFETY: the operands are in the session's arenas with the layouts that were planned,
            // and the workspace is as large as the plans ask.
            unsafe {
                let plan = engine.product_plan(part.plan);
                plan.run(&engine.stream, part.addresses, part.bias, part.scales, workspace)?;
            }
        }
        self.addends.iter_mut().try_for_each(|call| call.queue(&engine.stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::{ArenaId, Scales};

    fn dense(shape: [usize; 2]) -> TensorRef {
        TensorRef::dense(ArenaId(0), 0, DType::BF16, shape)
    }

    fn gemm() -> Gemm {
        let qkv = dense([6, 96]);
        Gemm {
            batch: 1,
            m: 6,
            n: 32,
            k: 8,
            a: dense([6, 8]),
            b: dense([32, 8]),
            d: TensorRef { shape: vec![6, 32], ..qkv },
            transpose_a: false,
            transpose_b: true,
            scale: 1.0,
            scales: None,
            bias: None,
            accumulate: true,
            batch_invariant: false,
            low_rank: vec![],
        }
    }

    #[test]
    fn a_slice_keeps_the_row_stride_of_its_buffer() {
        let product = main_product(&gemm());
        assert_eq!((product.a.row_stride, product.b.row_stride, product.d.row_stride), (8, 8, 96));
        assert!(product.b.transposed && product.beta == 1.0);
    }

    /// Two elements in a byte: extents and strides count elements.
    #[test]
    fn factors_of_four_bits_are_counted_in_codes() {
        let bytes = |shape: [usize; 2]| TensorRef::dense(ArenaId(0), 0, DType::U8, shape);
        let scales = Scales { blocks: Some([bytes([1, 512]), bytes([1, 512])]), ..of_tensors() };
        let gemm =
            Gemm { k: 64, a: bytes([6, 32]), b: bytes([32, 32]), accumulate: false, scales: Some(scales), ..gemm() };
        let product = main_product(&gemm);
        assert_eq!((product.a.row_stride, product.b.row_stride, product.d.row_stride), (64, 64, 96));
        assert!(product.factor && product.is_of_blocks() && !product.is_of_codes());
    }

    fn of_tensors() -> Scales {
        let one = TensorRef::dense(ArenaId(0), 0, DType::F32, [1]);
        Scales::of_tensors([one.clone(), one], false)
    }

    #[test]
    fn an_addend_is_a_product_onto_columns_of_d() {
        let addend = LowRank { t: dense([6, 4]), b: dense([16, 4]), transpose_b: true, scale: 2.0, columns: (16, 16) };
        let product = addend_product(&gemm(), &addend);
        assert_eq!((product.m, product.n, product.k), (6, 16, 4));
        assert_eq!((product.alpha, product.beta, product.d.row_stride), (2.0, 1.0, 96));
    }

    #[test]
    fn matrices_of_a_batch_are_evenly_spaced() {
        let spaced = |shape: [usize; 3], stride: usize| {
            let dense = TensorRef::dense(ArenaId(0), 0, DType::BF16, shape);
            TensorRef { strides: vec![stride, shape[2], 1], ..dense }
        };
        let (a, b, d) = (spaced([5, 6, 8], 64), spaced([5, 32, 8], 256), spaced([5, 6, 32], 192));
        let product = main_product(&Gemm { batch: 5, a, b, d, ..gemm() });
        assert_eq!((product.batch, product.a.batch_stride, product.b.batch_stride), (5, 64, 256));
        assert_eq!((product.d.batch_stride, product.d.row_stride), (192, 32));
    }

    #[test]
    #[should_panic(expected = "B of a Gemm is stored as (8, 32)")]
    fn extents_that_disagree_are_our_mistake() {
        main_product(&Gemm { transpose_b: false, ..gemm() });
    }
}
