//! The imitated library of products: what cuBLASLt and hipBLASLt compute, column-major, with the numbers of each. Units of FNUZ
//! codes read codes as they do: half of the value, and NaN for 0x80.
#![allow(unsafe_code, reason = "implements a C interface")]

use std::ffi::{c_char, c_int, c_void};
use std::rc::Rc;

use gpu::Vendor;
use gpu::sys::cublaslt::{self as sys, Algorithm, CublasLtTable, HeuristicResult, HipHeuristicResult, Numbers};
use tensor::DType;

use crate::kernels::{numbers, put};
use crate::launches::Task;
use crate::memory::Memory;
use crate::status::INVALID_VALUE;
use crate::world::{Work, world};

/// Attributes by their numbers, each as the bytes that were set.
#[derive(Default)]
struct Attributes(Vec<(u32, u64)>);

impl Attributes {
    /// # Safety
    /// `value` leads to `bytes` bytes.
    unsafe fn set(&mut self, which: u32, value: *const c_void, bytes: usize) -> u32 {
        let mut word = [0u8; 8];
        // SAFETY: promised by the caller; no attribute in use is longer.
        unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), word.as_mut_ptr(), bytes.min(8)) };
        self.0.retain(|(known, _)| *known != which);
        self.0.push((which, u64::from_le_bytes(word)));
        0
    }

    fn get(&self, which: u32) -> Option<u64> {
        self.0.iter().find(|(known, _)| *known == which).map(|(_, value)| *value)
    }
}

/// The layout of a matrix whose columns are dense.
#[derive(Clone, Copy)]
struct Matrix {
    kind: u32,
    rows: usize,
    columns: usize,
    leading: usize,
}

struct Layout {
    matrix: Matrix,
    attributes: Attributes,
}

/// A product that was queued.
pub struct Product {
    a: (u64, Matrix, bool, u64),
    b: (u64, Matrix, bool, u64),
    d: (u64, Matrix, u64),
    batch: usize,
    factors: Factors,
    bias: Option<(u64, DType)>,
    /// Addresses of a scale for each factor.
    scales: Option<[u64; 2]>,
}

/// The factors of the product and of the present result.
enum Factors {
    Here([f32; 2]),
    OnDevice([u64; 2]),
}

/// Reads an element as matrix units do.
fn element(memory: &Memory, at: u64, kind: u32, index: usize) -> Result<f32, String> {
    let of = |dtype: DType| Ok(numbers(memory, at + (index * dtype.size()) as u64, dtype, 1)?[0]);
    let halved = |dtype: DType| {
        let code = numbers(memory, at + index as u64, dtype, 1)?[0];
        // The code of negative zero is the only NaN.
        Ok(if code == 0.0 && code.is_sign_negative() { f32::NAN } else { code / 2.0 })
    };
    match kind {
        sys::R_32F => of(DType::F32),
        sys::R_16F => of(DType::F16),
        sys::R_16BF => of(DType::BF16),
        sys::R_8F_E4M3 => of(DType::E4M3),
        sys::R_8F_E5M2 => of(DType::E5M2),
        sys::R_8F_E4M3_FNUZ => halved(DType::E4M3),
        sys::R_8F_E5M2_FNUZ => halved(DType::E5M2),
        other => Err(format!("a product of elements {other} is not imitated")),
    }
}

fn dtype(kind: u32) -> Option<DType> {
    match kind {
        sys::R_32F => Some(DType::F32),
        sys::R_16F => Some(DType::F16),
        sys::R_16BF => Some(DType::BF16),
        _ => None,
    }
}

impl Product {
    pub fn run(&self, memory: &Memory) -> Result<(), String> {
        let [alpha, beta] = match &self.factors {
            Factors::Here(both) => *both,
            Factors::OnDevice([alpha, beta]) => {
                [numbers(memory, *alpha, DType::F32, 1)?[0], numbers(memory, *beta, DType::F32, 1)?[0]]
            }
        };
        let scale = match self.scales {
            None => 1.0,
            Some([a, b]) => numbers(memory, a, DType::F32, 1)?[0] * numbers(memory, b, DType::F32, 1)?[0],
        };
        for batch in 0..self.batch as u64 {
            let factor = |(at, of, transposed, stride): &(u64, Matrix, bool, u64)| -> Result<Vec<f32>, String> {
                let size = dtype(of.kind).map_or(1, DType::size) as u64;
                let (rows, columns) = if *transposed { (of.columns, of.rows) } else { (of.rows, of.columns) };
                let index = |r: usize, c: usize| if *transposed { r * of.leading + c } else { c * of.leading + r };
                let all = (0..rows).flat_map(|r| (0..columns).map(move |c| (r, c)));
                all.map(|(r, c)| element(memory, at + batch * stride * size, of.kind, index(r, c))).collect()
            };
            let (a, b) = (factor(&self.a)?, factor(&self.b)?);
            self.write(memory, batch, [&a, &b], [alpha * scale, beta])?;
        }
        Ok(())
    }

    /// D = alpha·A·B + beta·D + bias, for one of a batch.
    fn write(&self, memory: &Memory, batch: u64, [a, b]: [&[f32]; 2], [alpha, beta]: [f32; 2]) -> Result<(), String> {
        let (at, d, stride) = &self.d;
        let of = dtype(d.kind).ok_or("results are numbers")?;
        let inner = a.len() / d.rows.max(1);
        for (row, column) in (0..d.columns).flat_map(|column| (0..d.rows).map(move |row| (row, column))) {
            let term = |k: usize| f64::from(a[row * inner + k]) * f64::from(b[k * d.columns + column]);
            let sum: f64 = (0..inner).map(term).sum();
            let place = at + (batch * stride + (column * d.leading + row) as u64) * of.size() as u64;
            let mut value = alpha * sum as f32;
            if beta != 0.0 {
                value += beta * numbers(memory, place, of, 1)?[0];
            }
            if let Some((bias, dtype)) = self.bias {
                value += numbers(memory, bias + (row * dtype.size()) as u64, dtype, 1)?[0];
            }
            put(memory, place, of, value)?;
        }
        Ok(())
    }
}

unsafe fn layout<'a>(at: *mut c_void) -> &'a Layout {
    // SAFETY: made by `create_layout` and alive, as the caller promises.
    unsafe { &*at.cast::<Layout>() }
}

unsafe extern "C" fn create(to: *mut sys::Handle) -> u32 {
    // SAFETY: the caller's local. The address is only passed on.
    unsafe { *to = std::ptr::dangling_mut::<u8>().cast() };
    world(|world| world.outside_of_captures())
}
unsafe extern "C" fn fine(_: *mut c_void) -> u32 {
    0
}
unsafe extern "C" fn version() -> usize {
    130_100
}
unsafe extern "C" fn hip_version(_: *mut c_void, to: *mut c_int) -> u32 {
    // SAFETY: the caller's local.
    unsafe { *to = 100_100 };
    0
}
unsafe extern "C" fn name(_: u32) -> *const c_char {
    c"CUBLAS_STATUS_INVALID_VALUE".as_ptr()
}
unsafe extern "C" fn create_descriptor(to: *mut *mut c_void, _: u32, _: u32) -> u32 {
    // SAFETY: the caller's local; freed by `destroy_attributes`.
    unsafe { *to = Box::into_raw(Box::<Attributes>::default()).cast() };
    0
}
unsafe extern "C" fn create_preference(to: *mut *mut c_void) -> u32 {
    // SAFETY: as above.
    unsafe { create_descriptor(to, 0, 0) }
}
unsafe extern "C" fn destroy_attributes(of: *mut c_void) -> u32 {
    // SAFETY: made by `create_descriptor`.
    unsafe { drop(Box::from_raw(of.cast::<Attributes>())) };
    0
}
unsafe extern "C" fn set_attribute(of: *mut c_void, which: u32, value: *const c_void, bytes: usize) -> u32 {
    // SAFETY: made by `create_descriptor`; the caller's value.
    unsafe { (*of.cast::<Attributes>()).set(which, value, bytes) }
}
unsafe extern "C" fn create_layout(to: *mut *mut c_void, kind: u32, rows: u64, columns: u64, leading: i64) -> u32 {
    let matrix = Matrix { kind, rows: rows as usize, columns: columns as usize, leading: leading as usize };
    // SAFETY: the caller's local; freed by `destroy_layout`.
    unsafe { *to = Box::into_raw(Box::new(Layout { matrix, attributes: Attributes::default() })).cast() };
    0
}
unsafe extern "C" fn destroy_layout(of: *mut c_void) -> u32 {
    // SAFETY: made by `create_layout`.
    unsafe { drop(Box::from_raw(of.cast::<Layout>())) };
    0
}
unsafe extern "C" fn set_layout(of: *mut c_void, which: u32, value: *const c_void, bytes: usize) -> u32 {
    // SAFETY: made by `create_layout`; the caller's value.
    unsafe { (*of.cast::<Layout>()).attributes.set(which, value, bytes) }
}

/// Writes one answer of the heuristic for the caller.
unsafe fn offer<R>(result: R, results: *mut c_void, found: *mut c_int) -> u32 {
    // SAFETY: the caller has room for at least one answer.
    unsafe {
        *results.cast::<R>() = result;
        *found = 1;
    }
    0
}
unsafe extern "C" fn heuristic(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: c_int,
    results: *mut c_void,
    found: *mut c_int,
) -> u32 {
    let algorithm = Algorithm { data: [7; 8] };
    // SAFETY: the caller's array and local.
    unsafe { offer(HeuristicResult { algorithm, workspace_size: 1024, ..HeuristicResult::default() }, results, found) }
}
unsafe extern "C" fn hip_heuristic(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: c_int,
    results: *mut c_void,
    found: *mut c_int,
) -> u32 {
    let result = HipHeuristicResult { algorithm: [7; 3], workspace_size: 1024, ..HipHeuristicResult::default() };
    // SAFETY: the caller's array and local.
    unsafe { offer(result, results, found) }
}
unsafe extern "C" fn check(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    algorithm: *const Algorithm,
    result: *mut HeuristicResult,
) -> u32 {
    // SAFETY: the caller's locals.
    unsafe {
        *result = HeuristicResult { workspace_size: 1024, ..HeuristicResult::default() };
        if (*algorithm).data == [7; 8] { 0 } else { INVALID_VALUE }
    }
}

/// Queues a product whose descriptor has the numbers of a vendor.
unsafe fn queue(
    vendor: Vendor,
    descriptor: *mut c_void,
    operands: [(u64, *mut c_void); 3],
    both: [*const c_void; 2],
    stream: usize,
) -> u32 {
    let numbers = Numbers::of(vendor);
    let of = &numbers.descriptor;
    // SAFETY: made by `create_descriptor` and `create_layout`, and alive.
    let (attributes, [a, b, d]) =
        unsafe { (&*descriptor.cast::<Attributes>(), operands.map(|(at, of)| (at, layout(of)))) };
    let stride = |of: &Layout| of.attributes.get(numbers.strided_batch_offset).unwrap_or(0);
    let transposed =
        |which: u32| attributes.get(which).is_some_and(|value| value as u32 as i32 == numbers.operations[1]);
    let on_device = attributes.get(of.pointer_mode).is_some_and(|mode| mode == sys::POINTER_MODE_DEVICE as u64);
    let factors = match on_device {
        true => Factors::OnDevice(both.map(|at| at as u64)),
        // SAFETY: the caller's numbers.
        false => Factors::Here(both.map(|at| unsafe { *at.cast::<f32>() })),
    };
    let bias = attributes.get(of.bias_pointer).zip(attributes.get(of.bias_data_type));
    let scales = attributes.get(of.a_scale_pointer).zip(attributes.get(of.b_scale_pointer));
    let product = Product {
        a: (a.0, a.1.matrix, transposed(of.transa), stride(a.1)),
        b: (b.0, b.1.matrix, transposed(of.transb), stride(b.1)),
        d: (d.0, d.1.matrix, stride(d.1)),
        batch: d.1.attributes.get(numbers.batch_count).unwrap_or(1) as usize,
        factors,
        bias: bias.and_then(|(at, kind)| Some((at, dtype(kind as u32)?))),
        scales: scales.map(|(a, b)| [a, b]),
    };
    world(|world| world.put(stream, Work::Task(Rc::new(Task::Product(product)))))
}

macro_rules! matmul {
    ($name:ident, $vendor:expr) => {
        unsafe extern "C" fn $name(
            _: *mut c_void,
            descriptor: *mut c_void,
            alpha: *const c_void,
            a: *const c_void,
            of_a: *mut c_void,
            b: *const c_void,
            of_b: *mut c_void,
            beta: *const c_void,
            _: *const c_void,
            _: *mut c_void,
            d: *mut c_void,
            of_d: *mut c_void,
            _: *const Algorithm,
            _: *mut c_void,
            _: usize,
            stream: *mut c_void,
        ) -> u32 {
            let operands = [(a as u64, of_a), (b as u64, of_b), (d as u64, of_d)];
            // SAFETY: the caller's descriptors and numbers.
            unsafe { queue($vendor, descriptor, operands, [alpha, beta], stream as usize) }
        }
    };
}
matmul!(cuda_matmul, Vendor::Nvidia);
matmul!(hip_matmul, Vendor::Amd);

pub fn table(vendor: Vendor) -> CublasLtTable {
    let common = CublasLtTable {
        cublasLtCreate: create,
        cublasLtDestroy: fine,
        cublasLtMatmulDescCreate: create_descriptor,
        cublasLtMatmulDescDestroy: destroy_attributes,
        cublasLtMatmulDescSetAttribute: set_attribute,
        cublasLtMatrixLayoutCreate: create_layout,
        cublasLtMatrixLayoutDestroy: destroy_layout,
        cublasLtMatrixLayoutSetAttribute: set_layout,
        cublasLtMatmulPreferenceCreate: create_preference,
        cublasLtMatmulPreferenceDestroy: destroy_attributes,
        cublasLtMatmulPreferenceSetAttribute: set_attribute,
        ..CublasLtTable::unavailable(vendor)
    };
    match vendor {
        Vendor::Nvidia => CublasLtTable {
            cublasLtGetVersion: version,
            cublasLtGetStatusName: name,
            cublasLtMatmulAlgoGetHeuristic: heuristic,
            cublasLtMatmulAlgoCheck: check,
            cublasLtMatmul: cuda_matmul,
            ..common
        },
        Vendor::Amd => CublasLtTable {
            hipblasLtGetVersion: hip_version,
            cublasLtMatmulAlgoGetHeuristic: hip_heuristic,
            cublasLtMatmul: hip_matmul,
            ..common
        },
    }
}
