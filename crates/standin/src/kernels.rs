//! The backend's own kernels: copies between layouts and types, factors of products, low-rank addends. By the definitions that
//! they were compiled with.
#![allow(unsafe_code, reason = "reads and writes the imitated memory at addresses that are checked")]

use std::collections::HashMap;
use std::ffi::c_void;

use tensor::{DType, HostTensor};

use crate::launches::Function;
use crate::memory::Memory;

/// Axes of the layouts of `strided.cu`.
const AXES: usize = 6;

/// A launch of such a kernel.
pub enum Own {
    Copy { to: (u64, Element), from: (u64, Element), layout: Layout },
    Zero { to: u64, size: usize, layout: Layout },
    Factor { both: u64, of: [u64; 2], scale: f32, beta: f32 },
    Addends { d: u64, rows: usize, d_row: usize, rank: usize, scale: f32, across: bool, slices: Vec<Slice> },
}

/// The storage type of elements that are copied.
#[derive(Clone, Copy)]
pub struct Element {
    size: usize,
    /// The type of numbers that may be converted.
    number: Option<DType>,
}

/// Extents, and strides of both sides in elements.
pub struct Layout {
    count: usize,
    extent: [usize; AXES],
    from: [usize; AXES],
    to: [usize; AXES],
}

/// One addend: its factors, and the columns that it is for.
pub struct Slice {
    t: u64,
    b: u64,
    first: usize,
    count: usize,
    t_row: usize,
    b_row: usize,
}

fn element(name: &str) -> Result<Element, String> {
    let of = |size: usize, number: Option<DType>| Ok(Element { size, number });
    match name {
        "float" => of(4, Some(DType::F32)),
        "bf16" => of(2, Some(DType::BF16)),
        "f16" => of(2, Some(DType::F16)),
        "int" => of(4, None),
        "long long" | "double" => of(8, None),
        "unsigned char" => of(1, None),
        "uint4" => of(16, None),
        other => Err(format!("a copy of `{other}` is not imitated")),
    }
}

impl Layout {
    fn dense(count: usize) -> Layout {
        let (mut extent, mut one) = ([1; AXES], [0; AXES]);
        (extent[AXES - 1], one[AXES - 1]) = (count, 1);
        Layout { count, extent, from: one, to: one }
    }

    fn of_words(words: &[u64]) -> Layout {
        let part = |index: usize| std::array::from_fn(|axis| words[1 + index * AXES + axis] as usize);
        Layout { count: words[0] as usize, extent: part(0), from: part(1), to: part(2) }
    }

    /// The places of element `i` on both sides.
    fn places(&self, mut i: usize) -> (usize, usize) {
        let (mut from, mut to) = (0, 0);
        for axis in (0..AXES).rev() {
            let at = i % self.extent[axis];
            i /= self.extent[axis];
            from += at * self.from[axis];
            to += at * self.to[axis];
        }
        (from, to)
    }
}

fn read(memory: &Memory, at: u64, bytes: usize) -> Result<Vec<u8>, String> {
    if !memory.holds(at, bytes) {
        return Err(format!("{bytes} bytes at {at:#x} are not allocated"));
    }
    // SAFETY: just checked.
    Ok(unsafe { std::slice::from_raw_parts(at as *const u8, bytes) }.to_vec())
}

fn write(memory: &Memory, at: u64, bytes: &[u8]) -> Result<(), String> {
    if !memory.holds(at, bytes.len()) {
        return Err(format!("{} bytes at {at:#x} are not allocated", bytes.len()));
    }
    // SAFETY: just checked.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
    Ok(())
}

/// Reads numbers of a type.
pub fn numbers(memory: &Memory, at: u64, dtype: DType, count: usize) -> Result<Vec<f32>, String> {
    Ok(HostTensor::new(dtype, [count], read(memory, at, count * dtype.size())?).to_f32())
}

/// Writes a number, rounded to a type.
pub fn put(memory: &Memory, at: u64, dtype: DType, value: f32) -> Result<(), String> {
    write(memory, at, &HostTensor::from_f32([1], &[value]).cast(dtype).bytes)
}

impl Own {
    /// # Safety
    /// The pointers lead to the values of the kernel's parameters, in words of 8 bytes.
    pub unsafe fn new(function: &Function, values: *const *mut c_void) -> Result<Own, String> {
        // SAFETY: promised by the caller.
        let words = |index: usize, count: usize| unsafe {
            std::slice::from_raw_parts((*values.add(index)).cast::<u64>(), count)
        };
        let word = |index: usize| words(index, 1)[0];
        let pairs = function.code.options.iter().filter_map(|option| option.strip_prefix("-D")?.split_once('='));
        let options: HashMap<&str, &str> = pairs.collect();
        let text = |name: &str| options.get(name).copied().ok_or_else(|| format!("`{name}` is not defined"));
        let number = |name: &str| text(name)?.parse::<usize>().map_err(|_| format!("`{name}` is no number"));
        let float =
            |name: &str| text(name)?.trim_end_matches('f').parse::<f32>().map_err(|_| format!("`{name}` is no number"));
        let all = 1 + 3 * AXES;
        match function.entry.as_str() {
            "dense_copy" | "strided_copy" => {
                let (to, from) = ((word(0), element(text("TO")?)?), (word(1), element(text("FROM")?)?));
                let layout = match function.entry.as_str() {
                    "dense_copy" => Layout::dense(word(2) as usize),
                    _ => Layout::of_words(words(2, all)),
                };
                Ok(Own::Copy { to, from, layout })
            }
            "strided_zero" => {
                Ok(Own::Zero { to: word(0), size: element(text("TO")?)?.size, layout: Layout::of_words(words(1, all)) })
            }
            "factor" => {
                Ok(Own::Factor { both: word(0), of: [word(1), word(2)], scale: float("SCALE")?, beta: float("BETA")? })
            }
            "addends" => {
                let list = |name: &str| -> Result<Vec<usize>, String> {
                    text(name)?
                        .split(',')
                        .map(|part| part.parse().map_err(|_| format!("`{name}` is no list")))
                        .collect()
                };
                let (firsts, counts, t_rows, b_rows) =
                    (list("FIRSTS")?, list("COUNTS")?, list("T_ROWS")?, list("B_ROWS")?);
                let slice = |s: usize| Slice {
                    t: word(1 + 2 * s),
                    b: word(2 + 2 * s),
                    first: firsts[s],
                    count: counts[s],
                    t_row: t_rows[s],
                    b_row: b_rows[s],
                };
                let (rows, d_row, rank) = (number("ROWS")?, number("D_ROW")?, number("RANK")?);
                let (scale, across) = (float("SCALE")?, number("B_ACROSS")? == 1);
                let slices = (0..number("SLICES")?).map(slice).collect();
                Ok(Own::Addends { d: word(0), rows, d_row, rank, scale, across, slices })
            }
            other => {
                Err(format!("no program that was loaded has a kernel `{other}` of this text, and it is not imitated"))
            }
        }
    }

    pub fn run(&self, memory: &Memory) -> Result<(), String> {
        match self {
            Own::Copy { to: (to, wide), from: (from, narrow), layout } => (0..layout.count).try_for_each(|i| {
                let (source, target) = layout.places(i);
                let (source, target) = (from + (source * narrow.size) as u64, to + (target * wide.size) as u64);
                match (narrow.number, wide.number) {
                    (Some(a), Some(b)) if a != b => put(memory, target, b, numbers(memory, source, a, 1)?[0]),
                    _ => write(memory, target, &read(memory, source, wide.size)?),
                }
            }),
            Own::Zero { to, size, layout } => (0..layout.count).try_for_each(|i| {
                let (_, target) = layout.places(i);
                write(memory, to + (target * size) as u64, &vec![0; *size])
            }),
            Own::Factor { both, of: [a, b], scale, beta } => {
                let [a, b] = [numbers(memory, *a, DType::F32, 1)?[0], numbers(memory, *b, DType::F32, 1)?[0]];
                put(memory, *both, DType::F32, scale * a * b)?;
                put(memory, both + 4, DType::F32, *beta)
            }
            Own::Addends { .. } => self.addends(memory),
        }
    }

    /// D[:, slice] += scale·T·op(B) in bf16, summed in f32 and rounded once.
    fn addends(&self, memory: &Memory) -> Result<(), String> {
        let Own::Addends { d, rows, d_row, rank, scale, across, slices } = self else { unreachable!("the caller's") };
        for slice in slices {
            let b_rows = if *across { *rank } else { slice.count };
            let width = if *across { slice.count } else { *rank };
            let b = numbers(memory, slice.b, DType::BF16, (b_rows - 1) * slice.b_row + width)?;
            for row in 0..*rows {
                let t = numbers(memory, slice.t + (2 * row * slice.t_row) as u64, DType::BF16, *rank)?;
                for column in 0..slice.count {
                    let factor =
                        |r: usize| if *across { b[r * slice.b_row + column] } else { b[column * slice.b_row + r] };
                    let sum: f32 = (0..*rank).map(|r| t[r] * factor(r)).sum();
                    let at = d + 2 * (row * d_row + slice.first + column) as u64;
                    let was = numbers(memory, at, DType::BF16, 1)?[0];
                    put(memory, at, DType::BF16, scale.mul_add(sum, was))?;
                }
            }
        }
        Ok(())
    }
}
