//! Row-major GEMMs with cuBLASLt or hipBLASLt.
//!
//! The libraries are column-major: the row-major D = op(A)·op(B) is computed as Dᵀ = op(B)ᵀ·op(A)ᵀ, without a copy. A plan is
//! created once per shape, layout and alignment; running it needs no lookups. Does not know which product of the model
//! it computes.
#![allow(unsafe_code, reason = "calls of the library through its function table")]

use crate::driver::{Stream, text_or};
use crate::error::{During, Error, Result};
use crate::library::Opened;
use crate::sys::cublaslt::{
    self as sys, Algorithm, CublasLtTable, HeuristicResult, HipHeuristicResult, Numbers, cublaslt_attribute,
};
use crate::vendor::Vendor;
use program::Codes;
use std::ffi::c_void;
use std::sync::Arc;
use tensor::DType;

/// One matrix operand and its layout in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// f32, bf16, f16, or an eight-bit type for a factor; u8 for four-bit elements, two in a byte.
    pub dtype: DType,
    /// Elements from one stored row to the next, four-bit elements counted singly.
    pub row_stride: usize,
    /// The stored matrix is the transpose of the one in the product.
    pub transposed: bool,
    /// Elements from one matrix of a batch to the next; unused when the batch is 1.
    pub batch_stride: usize,
}

impl Operand {
    pub fn new(dtype: DType, row_stride: usize, transposed: bool) -> Operand {
        Operand { dtype, row_stride, transposed, batch_stride: 0 }
    }
}

/// D[m, n] = alpha · A[m, k] · B[k, n] + beta · D (+ bias[n]), accumulated in f32.
///
/// f32 operands are multiplied as f32: TF32 is never used. Eight-bit factors have a scale each, whose addresses are
/// arguments of a run; the tensor cores read both along k, and their sums are promoted to f32 unless the caller allows
/// less. Unquantized factors may have alpha and beta on the device. Four-bit factors always do, and a scale for every 16
/// elements along k.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub batch: usize,
    pub a: Operand,
    pub b: Operand,
    /// The result, which is never transposed.
    pub d: Operand,
    pub alpha: f32,
    pub beta: f32,
    pub bias: Option<DType>,
    /// True if sums of quantized factors are not promoted to f32 during the sum.
    pub fast_sum: bool,
    /// True if factors are numbers or have four bits, and alpha and beta are on the device: those here are not read.
    pub factor: bool,
    /// The largest power of two, up to 256, that divides the addresses of A, B and D.
    pub alignment: [u32; 3],
}

/// The scales that a run reads besides the elements of a product's factors: addresses of f32 on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// Scales of A and of B, which have eight bits.
    Each([u64; 2]),
    /// The address of alpha, followed by beta.
    Both(u64),
    /// The address of alpha, followed by beta; and the tiles of scales of A and of B, which have four bits.
    Blocks { both: u64, of: [u64; 2] },
}

/// The largest power of two up to 256 that divides an address.
pub fn alignment(address: u64) -> u32 {
    1 << (address | 256).trailing_zeros()
}

/// The version of cuBLASLt, such as `13.1.1`; needs no GPU.
pub fn version(table: &CublasLtTable) -> String {
    // SAFETY: no arguments.
    let version = unsafe { (table.cublasLtGetVersion)() };
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// A library handle with its workspace limit.
pub struct CublasLt {
    table: CublasLtTable,
    handle: sys::Handle,
    /// Bytes that a plan's algorithm may use.
    pub workspace_limit: usize,
    numbers: Numbers,
    /// The codes of eight bits that the matrix units multiply.
    codes: Option<Codes>,
}

// SAFETY: the library's handles hold no per-thread state.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    /// Creates a handle. Needs a current context. `codes`: those of the device's matrix units.
    pub fn new(opened: Opened<CublasLtTable>, workspace_limit: usize, codes: Option<Codes>) -> Result<Arc<CublasLt>> {
        let (table, numbers) = (opened.table, Numbers::of(opened.table.vendor));
        let mut library = CublasLt { table, handle: std::ptr::null_mut(), workspace_limit, numbers, codes };
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a live local.
        library.check("cublasLtCreate", unsafe { (library.table.cublasLtCreate)(&mut handle) })?;
        library.handle = handle;
        Ok(Arc::new(library))
    }

    /// The library's version, such as `13.1.1`.
    pub(crate) fn version(&self) -> String {
        match self.table.vendor {
            Vendor::Nvidia => version(&self.table),
            Vendor::Amd => {
                let mut version = 0;
                // SAFETY: the handle is alive, and the pointer is to a live local.
                unsafe { (self.table.hipblasLtGetVersion)(self.handle, &mut version) };
                format!("{}.{}.{}", version / 100_000, version / 100 % 1000, version % 100)
            }
        }
    }

    /// The name of the library in messages.
    pub(crate) fn name(&self) -> &'static str {
        self.table.vendor.products()
    }

    /// The library's number for a type of elements.
    fn data_type(&self, dtype: DType) -> Result<u32> {
        Ok(match (data_type(dtype)?, self.codes) {
            (sys::R_8F_E4M3, Some(Codes::Fnuz)) => sys::R_8F_E4M3_FNUZ,
            (sys::R_8F_E5M2, Some(Codes::Fnuz)) => sys::R_8F_E5M2_FNUZ,
            (same, _) => same,
        })
    }

    /// The number that a product is multiplied with besides its own: units read each code as half of its value.
    fn of_codes(&self, product: &Product) -> f32 {
        if product.is_of_codes() && self.codes == Some(Codes::Fnuz) { 4.0 } else { 1.0 }
    }

    fn check(&self, call: &'static str, status: sys::Status) -> Result<()> {
        if status == sys::SUCCESS {
            return Ok(());
        }
        let (call, name) = (self.table.call_name(call), self.name_of(status));
        Err(Error::Call { call, code: status, name, detail: String::new(), context: String::new() })
    }
}

impl CublasLt {
    fn name_of(&self, status: sys::Status) -> String {
        match self.table.vendor {
            // SAFETY: the library returns a static string for every status.
            Vendor::Nvidia => unsafe { text_or((self.table.cublasLtGetStatusName)(status), "an unknown status") },
            Vendor::Amd => sys::hipblas_status(status).to_owned(),
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: created by `new`. A failure at exit cannot be acted on.
            unsafe { (self.table.cublasLtDestroy)(self.handle) };
        }
    }
}

/// A product with its descriptors and a chosen algorithm.
pub struct ProductPlan {
    library: Arc<CublasLt>,
    product: Product,
    descriptor: MatmulDescriptor,
    left: Layout,
    right: Layout,
    out: Layout,
    /// The factor of the product as the library gets it.
    alpha: f32,
    choice: HeuristicResult,
}

// SAFETY: descriptors are plain memory with one owner.
unsafe impl Send for ProductPlan {}

impl ProductPlan {
    /// Plans with the heuristic's first algorithm.
    pub fn new(library: &Arc<CublasLt>, product: Product) -> Result<ProductPlan> {
        let mut plan = Self::candidates(library, product, 1)?;
        Ok(plan.swap_remove(0))
    }

    /// Returns up to `count` plans of the same product, the heuristic's favorite first: the candidates for a choice by
    /// timing.
    pub fn candidates(library: &Arc<CublasLt>, product: Product, count: usize) -> Result<Vec<ProductPlan>> {
        check_types(&product)?;
        let choices = Self::described_alone(library, product)?.heuristic(count)?;
        choices
            .into_iter()
            .map(|choice| Ok(ProductPlan { choice, ..Self::describe(library, product)? }))
            .collect::<Result<Vec<_>>>()
    }

    /// Plans with an algorithm that an earlier plan of the same product had; an error if the library does not accept it
    /// or it needs more workspace than the limit.
    pub fn with_algorithm(library: &Arc<CublasLt>, product: Product, algorithm: Algorithm) -> Result<ProductPlan> {
        check_types(&product)?;
        let plan = Self::described_alone(library, product)?;
        if library.table.vendor == Vendor::Amd {
            // There is no check: the heuristic offers what it takes.
            let offered = plan.heuristic(OFFERED)?;
            let known = offered.into_iter().find(|choice| choice.algorithm == algorithm);
            let choice =
                known.ok_or_else(|| unsupported(&product, "hipBLASLt does not offer this algorithm any more"))?;
            return Ok(ProductPlan { choice, ..plan });
        }
        let mut choice = HeuristicResult::default();
        // SAFETY: every descriptor is alive, the result is a live local.
        let status = unsafe {
            (library.table.cublasLtMatmulAlgoCheck)(
                library.handle,
                plan.descriptor.raw,
                plan.left.raw,
                plan.right.raw,
                plan.out.raw,
                plan.out.raw,
                &algorithm,
                &mut choice,
            )
        };
        let context = || format!("checking an algorithm of {product}");
        library.check("cublasLtMatmulAlgoCheck", status).during(context)?;
        library.check("cublasLtMatmulAlgoCheck", choice.state).during(context)?;
        if choice.workspace_size > library.workspace_limit {
            return Err(unsupported(&product, &format!("its algorithm wants {} bytes", choice.workspace_size)));
        }
        Ok(ProductPlan { choice: HeuristicResult { algorithm, ..choice }, ..plan })
    }

    /// Bytes of workspace that [`ProductPlan::run`] needs.
    pub fn workspace(&self) -> usize {
        self.choice.workspace_size
    }

    /// The chosen algorithm, to be recorded next to a run.
    pub fn algorithm(&self) -> Algorithm {
        self.choice.algorithm
    }

    /// Queues the product. `bias` and the scales of A and B are read where the product has them.
    ///
    /// # Safety
    /// The addresses hold what the product describes, `workspace` holds [`ProductPlan::workspace`]
    /// bytes aligned to 256, and all stay allocated until the work has run.
    pub unsafe fn run(
        &self,
        stream: &Stream,
        [a, b, d]: [u64; 3],
        bias: Option<u64>,
        scales: Option<Scales>,
        workspace: u64,
    ) -> Result<()> {
        assert_eq!(bias.is_some(), self.product.bias.is_some(), "a bias is given exactly where it was planned");
        if let Some(bias) = bias {
            self.descriptor.set(self.library.numbers.descriptor.bias_pointer, bias)?;
        }
        let (of_codes, factor, of_blocks) =
            (self.product.is_of_codes(), self.product.factor, self.product.is_of_blocks());
        let (alpha, beta) = (&raw const self.alpha, &raw const self.product.beta);
        let (mut alpha, mut beta): (*const c_void, *const c_void) = (alpha.cast(), beta.cast());
        match scales {
            None => assert!(!of_codes && !factor, "scales are given where a product has some"),
            Some(Scales::Each(of)) => {
                assert!(of_codes, "each of two factors has a scale where they are codes of eight bits");
                self.descriptor.set_scales(of)?;
            }
            Some(Scales::Both(at)) => {
                assert!(factor && !of_blocks, "alpha and beta are on the device where that was planned");
                (alpha, beta) = (at as *const c_void, (at + 4) as *const c_void);
            }
            Some(Scales::Blocks { both, of }) => {
                assert!(of_blocks, "blocks have scales where factors are codes of four bits");
                self.descriptor.set_scales(of)?;
                (alpha, beta) = (both as *const c_void, (both + 4) as *const c_void);
            }
        }
        // SAFETY: promised by the caller; in columns the right operand comes first.
        let status = unsafe {
            (self.library.table.cublasLtMatmul)(
                self.library.handle,
                self.descriptor.raw,
                alpha,
                b as *const c_void,
                self.left.raw,
                a as *const c_void,
                self.right.raw,
                beta,
                d as *const c_void,
                self.out.raw,
                d as *mut c_void,
                self.out.raw,
                &self.choice.algorithm,
                workspace as *mut c_void,
                self.choice.workspace_size,
                stream.raw(),
            )
        };
        self.library.check("cublasLtMatmul", status).during(|| self.product.to_string())
    }

    /// Describes a product for queries before addresses are known: for four-bit factors the library answers only if
    /// their scales have an address, and does not read it.
    fn described_alone(library: &Arc<CublasLt>, product: Product) -> Result<ProductPlan> {
        let plan = Self::describe(library, product)?;
        if product.is_of_blocks() {
            plan.descriptor.set_scales([UNREAD; 2])?;
        }
        Ok(plan)
    }

    fn describe(library: &Arc<CublasLt>, product: Product) -> Result<ProductPlan> {
        let Product { m, n, k, batch, a, b, d, .. } = product;
        let descriptor = MatmulDescriptor::new(library)?;
        let (numbers, of) = (&library.numbers, &library.numbers.descriptor);
        let operation = |transposed: bool| numbers.operations[transposed as usize];
        descriptor.set(of.transa, operation(b.transposed))?;
        descriptor.set(of.transb, operation(a.transposed))?;
        if product.factor {
            descriptor.set(of.pointer_mode, sys::POINTER_MODE_DEVICE)?;
        }
        if product.is_of_blocks() {
            descriptor.set(of.a_scale_mode, sys::SCALE_VEC16_UE4M3)?;
            descriptor.set(of.b_scale_mode, sys::SCALE_VEC16_UE4M3)?;
        }
        if let Some(bias) = product.bias {
            descriptor.set(of.epilogue, sys::EPILOGUE_BIAS)?;
            descriptor.set(of.bias_data_type, data_type(bias)? as i32)?;
        }
        // hipBLASLt has no such choice.
        if product.fast_sum && library.table.vendor == Vendor::Nvidia {
            descriptor.set(cublaslt_attribute::FAST_ACCUM, 1i8)?;
        }
        Ok(ProductPlan {
            left: Layout::new(library, b, k, n, batch)?,
            right: Layout::new(library, a, m, k, batch)?,
            out: Layout::new(library, d, m, n, batch)?,
            alpha: library.of_codes(&product) * product.alpha,
            library: library.clone(),
            product,
            descriptor,
            choice: HeuristicResult::default(),
        })
    }

    fn heuristic(&self, count: usize) -> Result<Vec<HeuristicResult>> {
        let library = &self.library;
        let preference = Preference::new(library)?;
        let [a, b, d] = self.product.alignment;
        preference.set(library.numbers.max_workspace_bytes, library.workspace_limit as u64)?;
        let mut results: Vec<HeuristicResult> = match library.table.vendor {
            Vendor::Nvidia => {
                let set = |attribute: u32, value: u32| preference.set(attribute, value);
                set(cublaslt_attribute::REDUCTION_SCHEME_MASK, sys::REDUCTION_SCHEME_COMPUTE_TYPE)?;
                set(cublaslt_attribute::MIN_ALIGNMENT_A_BYTES, b)?;
                set(cublaslt_attribute::MIN_ALIGNMENT_B_BYTES, a)?;
                set(cublaslt_attribute::MIN_ALIGNMENT_C_BYTES, d)?;
                set(cublaslt_attribute::MIN_ALIGNMENT_D_BYTES, d)?;
                self.answers::<HeuristicResult>(&preference, count)?
            }
            Vendor::Amd => {
                let answers = self.answers::<HipHeuristicResult>(&preference, count)?.into_iter();
                let fits = |answer: &HipHeuristicResult| answer.workspace_size <= library.workspace_limit;
                answers.filter(fits).map(HeuristicResult::from).collect()
            }
        };
        results.retain(|result| result.state == sys::SUCCESS);
        if results.is_empty() {
            return Err(unsupported(&self.product, &format!("{} offers no algorithm for it", library.name())));
        }
        Ok(results)
    }

    /// Asks the heuristic for up to `count` answers, of the type that the vendor's library writes.
    fn answers<R: Clone + Default>(&self, preference: &Preference, count: usize) -> Result<Vec<R>> {
        let library = &self.library;
        let mut results = vec![R::default(); count];
        let mut found = 0;
        // SAFETY: every descriptor is alive; the array has room for the requested number of results.
        let status = unsafe {
            (library.table.cublasLtMatmulAlgoGetHeuristic)(
                library.handle,
                self.descriptor.raw,
                self.left.raw,
                self.right.raw,
                self.out.raw,
                self.out.raw,
                preference.raw,
                count as i32,
                results.as_mut_ptr().cast(),
                &mut found,
            )
        };
        library.check("cublasLtMatmulAlgoGetHeuristic", status).during(|| self.product.to_string())?;
        results.truncate(found as usize);
        Ok(results)
    }
}

impl Product {
    /// True if the factors have eight bits.
    pub fn is_of_codes(&self) -> bool {
        self.a.dtype.small().is_some()
    }

    /// True if the factors have four bits and scales of blocks.
    pub fn is_of_blocks(&self) -> bool {
        self.a.dtype == DType::U8
    }

    /// Returns everything that decides which algorithms exist and how fast they are.
    pub fn description(&self) -> String {
        let Product { a, b, d, alignment, beta, .. } = self;
        let [rows, batches] = [|o: &Operand| o.row_stride, |o: &Operand| o.batch_stride].map(|f| [f(a), f(b), f(d)]);
        let batches = if self.batch == 1 { String::new() } else { format!(", batches {batches:?}") };
        let bias = self.bias.map(|dtype| format!(", bias {dtype}")).unwrap_or_default();
        let fast = if self.fast_sum { ", fast sum" } else { "" };
        let factor = if self.factor { ", factor on the device" } else { "" };
        format!("{self}, rows {rows:?}{batches}, aligned {alignment:?}, beta {beta}{bias}{fast}{factor}")
    }
}

impl std::fmt::Display for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let letter = |o: Operand| if o.transposed { 't' } else { 'n' };
        write!(f, "product {}{} {}×{}×{}", letter(self.a), letter(self.b), self.m, self.n, self.k)?;
        if self.batch != 1 {
            write!(f, " ×{}", self.batch)?;
        }
        match self.is_of_blocks() {
            true => write!(f, " nvfp4·nvfp4→{}", self.d.dtype),
            false => write!(f, " {}·{}→{}", self.a.dtype, self.b.dtype, self.d.dtype),
        }
    }
}

fn unsupported(product: &Product, reason: &str) -> Error {
    Error::Unsupported { what: product.to_string(), reason: reason.to_owned(), context: String::new() }
}

fn check_types(product: &Product) -> Result<()> {
    if product.factor && product.is_of_codes() {
        return Err(unsupported(product, "codes of eight bits have a scale each"));
    }
    if product.d.transposed {
        return Err(unsupported(product, "the result is never stored transposed"));
    }
    if product.is_of_blocks() || product.b.dtype == DType::U8 {
        return check_blocks(product);
    }
    if product.is_of_codes() && product.b.dtype.small().is_some() {
        let Product { a, b, n, k, .. } = product;
        let both = [a.dtype, b.dtype].contains(&DType::E4M3);
        let along = !a.transposed && b.transposed;
        let whole = [*n, *k, a.row_stride, b.row_stride].iter().all(|extent| extent.is_multiple_of(CODES));
        return match (both, along, whole) {
            (false, _, _) => Err(unsupported(product, "one of two factors of eight bits must be e4m3")),
            (_, false, _) => Err(unsupported(product, "factors of eight bits must both lie along the sum")),
            (_, _, false) => Err(unsupported(product, "extents of eight-bit products must be multiples of 16")),
            _ => data_type(product.d.dtype).map(|_| ()),
        };
    }
    if product.a.dtype != product.b.dtype {
        return Err(unsupported(product, "both factors must have one type"));
    }
    [product.a.dtype, product.d.dtype].iter().try_for_each(|dtype| data_type(*dtype).map(|_| ()))
}

/// Checks a product of four-bit factors: both along the sum, rows of whole 16 bytes, results and biases of whole 16
/// bytes too, alpha on the device.
fn check_blocks(product: &Product) -> Result<()> {
    let Product { a, b, d, n, k, batch, factor, .. } = product;
    let refuse = |reason: &str| Err(unsupported(product, reason));
    if a.dtype != b.dtype {
        return refuse("both factors must be codes of four bits");
    }
    if a.transposed || !b.transposed {
        return refuse("factors of four bits must both lie along the sum");
    }
    if ![*k, a.row_stride, b.row_stride].iter().all(|extent| extent.is_multiple_of(FOURS)) {
        return refuse("rows of codes of four bits must be multiples of 32");
    }
    if !(n * d.dtype.size()).is_multiple_of(16) || *batch != 1 || !factor {
        return refuse("products of four bits are single, of columns in whole 16 bytes, and have alpha on the device");
    }
    match d.dtype {
        DType::BF16 | DType::F32 => Ok(()),
        _ => refuse("products of four bits give bf16 or f32"),
    }
}

/// The number of four-bit elements in a row is a multiple of this: 16 bytes.
const FOURS: usize = 32;

/// A placeholder for the address of scales where nothing is read.
const UNREAD: u64 = 4096;

/// Answers of a heuristic among which an earlier algorithm is looked for, where the library has no other check.
const OFFERED: usize = 64;

/// Extents of products of eight bits are multiples of this.
const CODES: usize = 16;

fn data_type(dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(sys::R_32F),
        DType::BF16 => Ok(sys::R_16BF),
        DType::F16 => Ok(sys::R_16F),
        DType::E4M3 => Ok(sys::R_8F_E4M3),
        DType::E5M2 => Ok(sys::R_8F_E5M2),
        DType::U8 => Ok(sys::R_4F_E2M1),
        other => Err(Error::Unsupported {
            what: format!("a product with {other}"),
            reason: "products are of f32, bf16, f16 and codes of eight and four bits".into(),
            context: String::new(),
        }),
    }
}

/// Wraps one of the library's descriptor kinds: created, given attributes, destroyed on drop.
macro_rules! owned {
    ($name:ident, $raw:ty, $create:literal, $set_call:literal, $destroy:ident, $set:ident) => {
        struct $name {
            library: Arc<CublasLt>,
            raw: $raw,
        }

        impl $name {
            fn create(library: &Arc<CublasLt>, create: impl FnOnce(&mut $raw) -> sys::Status) -> Result<Self> {
                let mut raw = std::ptr::null_mut();
                library.check($create, create(&mut raw))?;
                Ok(Self { library: library.clone(), raw })
            }

            fn set<T: Copy>(&self, attribute: u32, value: T) -> Result<()> {
                // SAFETY: the value is alive, its size is passed.
                let status = unsafe {
                    (self.library.table.$set)(self.raw, attribute, (&raw const value).cast(), size_of::<T>())
                };
                self.library.check($set_call, status).during(|| format!("setting attribute {attribute}"))
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: created once. A failure to free cannot be acted on.
                unsafe { (self.library.table.$destroy)(self.raw) };
            }
        }
    };
}

owned!(
    MatmulDescriptor,
    sys::MatmulDescriptor,
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescSetAttribute",
    cublasLtMatmulDescDestroy,
    cublasLtMatmulDescSetAttribute
);
owned!(
    Layout,
    sys::MatrixLayout,
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutSetAttribute",
    cublasLtMatrixLayoutDestroy,
    cublasLtMatrixLayoutSetAttribute
);
owned!(
    Preference,
    sys::Preference,
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceSetAttribute",
    cublasLtMatmulPreferenceDestroy,
    cublasLtMatmulPreferenceSetAttribute
);

impl MatmulDescriptor {
    fn new(library: &Arc<CublasLt>) -> Result<Self> {
        // SAFETY: the pointer is to a live local.
        Self::create(library, |raw| unsafe {
            (library.table.cublasLtMatmulDescCreate)(raw, library.numbers.compute_32f, sys::R_32F)
        })
    }

    /// Sets the scales of A and of B. In columns the right operand comes first.
    fn set_scales(&self, [of_a, of_b]: [u64; 2]) -> Result<()> {
        let of = &self.library.numbers.descriptor;
        self.set(of.a_scale_pointer, of_b)?;
        self.set(of.b_scale_pointer, of_a)
    }
}

impl Layout {
    /// Describes the operand [rows, columns] of the product in columns, as it is stored.
    fn new(library: &Arc<CublasLt>, operand: Operand, rows: usize, columns: usize, batch: usize) -> Result<Self> {
        let (stored_rows, stored_columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
        let dtype = library.data_type(operand.dtype)?;
        // SAFETY: the pointer is to a live local. A stored row is a column here.
        let layout = Self::create(library, |raw| unsafe {
            (library.table.cublasLtMatrixLayoutCreate)(
                raw,
                dtype,
                stored_columns as u64,
                stored_rows as u64,
                operand.row_stride as i64,
            )
        })?;
        if batch != 1 {
            layout.set(library.numbers.batch_count, batch as i32)?;
            layout.set(library.numbers.strided_batch_offset, operand.batch_stride as i64)?;
        }
        Ok(layout)
    }
}

impl Preference {
    fn new(library: &Arc<CublasLt>) -> Result<Self> {
        // SAFETY: the pointer is to a live local.
        Self::create(library, |raw| unsafe { (library.table.cublasLtMatmulPreferenceCreate)(raw) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_the_largest_power_of_two_up_to_256() {
        assert_eq!([alignment(0), alignment(512), alignment(48), alignment(2), alignment(7)], [256, 256, 16, 2, 1]);
    }

    fn operand(dtype: DType) -> Operand {
        Operand::new(dtype, 8, false)
    }

    fn product() -> Product {
        Product {
            m: 4,
            n: 8,
            k: 8,
            batch: 1,
            a: operand(DType::BF16),
            b: operand(DType::F32),
            d: operand(DType::F32),
            alpha: 1.0,
            beta: 0.0,
            bias: None,
            fast_sum: false,
            factor: false,
            alignment: [256; 3],
        }
    }

    /// Products that the library is known to refuse are refused by name before it is asked.
    #[test]
    fn factors_of_four_bits_lie_along_the_sum_in_whole_packs() {
        let of = |k: usize, transposed: bool| Operand::new(DType::U8, k, transposed);
        let (a, b, d) = (of(64, false), of(64, true), Operand::new(DType::BF16, 48, false));
        let good = Product { m: 5, n: 48, k: 64, a, b, d, factor: true, ..product() };
        check_types(&good).unwrap();
        check_types(&Product { d: Operand::new(DType::F32, 48, false), ..good }).unwrap();
        assert_eq!(good.to_string(), "product nt 5×48×64 nvfp4·nvfp4→bf16");
        let refused = [
            Product { k: 48, ..good },
            Product { b: of(64, false), ..good },
            Product { a: of(64, true), ..good },
            Product { a: of(80, false), ..good },
            Product { b: Operand::new(DType::E4M3, 64, true), ..good },
            Product { a: Operand::new(DType::BF16, 64, false), ..good },
            Product { d: Operand::new(DType::F16, 48, false), ..good },
            Product { n: 44, ..good },
            Product { factor: false, ..good },
            Product { batch: 2, ..good },
        ];
        for product in refused {
            assert!(matches!(check_types(&product), Err(Error::Unsupported { .. })), "{product}");
        }
    }

    #[test]
    fn a_description_tells_apart_what_is_timed_apart() {
        let base = product();
        let others = [
            Product { beta: 1.0, ..base },
            Product { bias: Some(DType::BF16), ..base },
            Product { alignment: [256, 16, 256], ..base },
            Product { d: Operand { row_stride: 16, ..base.d }, ..base },
            Product { a: Operand { transposed: true, ..base.a }, ..base },
            Product { batch: 2, ..base },
            Product { fast_sum: true, ..base },
            Product { factor: true, ..base },
        ];
        assert_eq!(
            base.description(),
            "product nn 4×8×8 bf16·f32→f32, rows [8, 8, 8], aligned [256, 256, 256], beta 0"
        );
        assert_eq!(Product { alpha: 2.0, ..base }.description(), base.description());
        let mut all: Vec<String> = others.iter().chain([&base]).map(Product::description).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), others.len() + 1);
    }

    #[test]
    fn mixed_factors_are_refused_by_name() {
        let product = product();
        let text = check_types(&product).unwrap_err().to_string();
        assert_eq!(text, "product nn 4×8×8 bf16·f32→f32: both factors must have one type");
        assert!(check_types(&Product { b: operand(DType::I32), a: operand(DType::I32), ..product }).is_err());
    }

    #[test]
    fn codes_are_taken_along_the_sum_and_in_whole_sixteens() {
        let codes = |dtype: DType, transposed: bool| Operand::new(dtype, 32, transposed);
        let of = |a: DType, b: DType| Product {
            m: 5,
            n: 48,
            k: 32,
            a: codes(a, false),
            b: codes(b, true),
            d: Operand::new(DType::BF16, 48, false),
            ..product()
        };
        let good = of(DType::E5M2, DType::E4M3);
        check_types(&good).unwrap();
        for (wrong, reason) in [
            (of(DType::E5M2, DType::E5M2), "must be e4m3"),
            (of(DType::E4M3, DType::BF16), "must have one type"),
            (Product { b: codes(DType::E4M3, false), ..good }, "along the sum"),
            (Product { n: 40, ..good }, "multiples of 16"),
            (Product { k: 24, ..good }, "multiples of 16"),
        ] {
            assert!(check_types(&wrong).unwrap_err().to_string().contains(reason), "{wrong}");
        }
    }
}
