//! Products in which every group of rows has a matrix of its own. The sizes of the groups are data: a kernel finds the
//! group of its rows from the offsets.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Arithmetic, Cost, Realisation, TensorRef};
use rayon::prelude::*;
use tensor::{Attrs, DType};

use super::{ACCESS, MMA_HEADERS, example_groups, hopper, ints, kernel, normal};
use crate::call::{Call, Input};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::quantise;
use crate::real::Real;
use crate::registry::id;
use crate::vector::{Loop, add_scaled, dot, vectorised};

pub(super) const SOURCE: &str = include_str!("grouped.cu");
const MMA_SOURCE: &str = include_str!("grouped_mma.cu");

pub(super) const THREADS: usize = 256;
/// Rows and columns of a block's tile, of the plain kernels and of those on tensor cores.
pub(super) const TILE: usize = 64;
pub(super) const MMA_TILE: usize = 128;
/// Shared memory of the kernels on tensor cores: three stages of two tiles of 128 rows of 80 bytes.
const MMA_SHARED: usize = 3 * 2 * 128 * 80;

pub(super) const TRANSPOSED: Attribute =
    Attribute { name: "transposed", kind: "bool?", doc: "the matrices are [K, N]: y = x·w, not x·wᵀ" };
pub(super) const GROUPS: Attribute = Attribute { name: "groups", kind: "int", doc: "G, the number of matrices" };

pub(super) const ACROSS: Attribute = Attribute { name: "across", kind: "bool?", doc: "the second matrices are [R, N]" };

/// y = x·w[group]ᵀ, or with a second product in the same sum.
pub struct GroupedLinear;

pub(super) fn columns(t: &ValueType) -> Result<usize, String> {
    t.last().ok_or_else(|| "the last axis must be known".into())
}

/// Returns the rows of all stacked matrices together, and their columns.
fn matrices(w: &ValueType) -> Result<(usize, usize), String> {
    let fixed: Option<Vec<usize>> = w.shape.iter().map(Dim::fixed).collect();
    match fixed.as_deref() {
        Some([leading @ .., columns]) if !leading.is_empty() => Ok((leading.iter().product(), *columns)),
        _ => Err("the matrices must be [G·N, K] or [G, N, K], all extents known".into()),
    }
}

/// Columns of x·w[g]ᵀ, or of x·w[g] if `transposed`.
pub(super) fn columns_of_product(
    x: &ValueType,
    w: &ValueType,
    groups: usize,
    transposed: bool,
) -> Result<usize, String> {
    let (k, (rows, width)) = (columns(x)?, matrices(w)?);
    if groups == 0 || !rows.is_multiple_of(groups) {
        return Err(format!("{rows} rows of matrices are not those of {groups} groups"));
    }
    let (inner, n) = if transposed { (rows / groups, width) } else { (width, rows / groups) };
    if inner != k {
        return Err(format!("the matrices take {inner} columns, x has {k}"));
    }
    Ok(n)
}

/// Checks that a second product has the rows of x and n columns, too.
pub(super) fn check_second(
    x: &ValueType,
    n: usize,
    [t, b]: [&ValueType; 2],
    groups: usize,
    across: bool,
) -> Result<(), String> {
    if t.shape[..t.shape.len() - 1] != x.shape[..x.shape.len() - 1] {
        return Err("both products must have the same rows".into());
    }
    if !t.dtype.is_float() || !b.dtype.is_float() {
        return Err("the factors of the second product must be floating point".into());
    }
    match columns_of_product(t, b, groups, across)? {
        columns if columns == n => Ok(()),
        columns => Err(format!("the products have {n} and {columns} columns")),
    }
}

pub(super) fn check_offsets(offsets: &ValueType, groups: usize) -> Result<(), String> {
    if offsets.dtype != Element::I32 || offsets.shape != [Dim::Fixed(groups + 1)] {
        return Err(format!("the offsets must be i32 [{}]", groups + 1));
    }
    Ok(())
}

/// True if tensor cores take the tensors of a call: bf16, f16, or codes with bf16, whose rows divide into pieces and
/// begin at one.
pub(super) fn suits_tensor_cores(call: &LowerCall<'_>, tensors: &[&TensorRef]) -> bool {
    let pieces = |at: &TensorRef| {
        let (last, leading) = at.strides.split_last().expect("tensors have axes");
        let (columns, piece) = (at.shape.last().expect("tensors have axes"), ACCESS / at.dtype.size());
        let even = leading.iter().zip(&at.shape).all(|(stride, extent)| *extent == 1 || stride.is_multiple_of(piece));
        *last == 1 && columns.is_multiple_of(piece) && even && at.offset.is_multiple_of(ACCESS)
    };
    let all_are =
        |number: DType, codes: bool| tensors.iter().all(|at| at.dtype == number || codes && at.dtype.small().is_some());
    let taken = all_are(DType::BF16, true) || all_are(DType::F16, false);
    taken && tensors.iter().all(|at| pieces(at)) && call.machine.arch.is_gpu()
}

/// The same kernel on tensor cores, of numbers of a type.
pub(super) fn on_tensor_cores(plain: KernelSpec, number: DType, grid: [usize; 3]) -> KernelSpec {
    let defines = plain.defines.into_iter().filter(|(name, _)| name != "TILE");
    KernelSpec {
        source: MMA_SOURCE.to_owned(),
        headers: [MMA_HEADERS, &[quantise::CODES_HEADER]].concat(),
        defines: defines.chain([("NUMBER".to_owned(), device_type(number).to_owned())]).collect(),
        grid: grid.map(|n| n as u32),
        shared_bytes: MMA_SHARED as u32,
        ..plain
    }
}

pub(super) fn flag(attrs: &Attrs, name: &str) -> bool {
    attrs.flag(name).expect("checked by the shape rule")
}

/// The tensors of a call that are multiplied, of which a second product's begin at an input, and its result.
pub(super) fn factors<'a>(call: &LowerCall<'a>, second: usize) -> Vec<&'a TensorRef> {
    let of_sum = call.inputs[..2].iter().chain(call.inputs.iter().skip(second));
    of_sum.chain([&call.outputs[0]]).collect()
}

/// The kernel of a product, whose sum is `scaled` or not; the factors of a second one begin at an input.
pub(super) fn lowered(call: &LowerCall<'_>, second: usize, scaled: bool) -> Lowered {
    let (x, w, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
    let groups = call.inputs[2].len() - 1;
    let (k, n) = (x.shape[x.shape.len() - 1], y.shape[y.shape.len() - 1]);
    let rows = y.len() / n;
    // Each group ends in a tile that may not be full.
    let tiles = rows.div_ceil(TILE) + groups.min(rows);
    let all = factors(call, second);
    let suits = suits_tensor_cores(call, &all);
    if suits && hopper::takes(call, &all) {
        return Lowered::Kernels(vec![hopper::linear(call, second, scaled)]);
    }
    let second = call.inputs.get(second..second + 2).map(|of| (&of[0], &of[1]));
    let numbers = [
        ("GROUPS", groups),
        ("K", k),
        ("N", n),
        ("R", second.map_or(0, |(t, _)| t.shape[t.shape.len() - 1])),
        ("TILE", TILE),
        ("TRANSPOSED", flag(call.attrs, "transposed") as usize),
        ("ACROSS", flag(call.attrs, "across") as usize),
        ("CODES", x.dtype.small().is_some() as usize),
        ("SCALED", scaled as usize),
    ];
    let inputs = (0..call.inputs.len()).map(Arg::Input);
    let grid = [tiles, n.div_ceil(TILE), 1];
    let mut kernel =
        kernel("grouped_linear", SOURCE, grid, THREADS, &numbers, inputs.chain([Arg::Output(0)]).collect());
    kernel.headers.push(quantise::CODES_HEADER);
    let named =
        [("X", x), ("W", w), ("Y", y)].into_iter().chain(second.into_iter().flat_map(|(t, b)| [("T", t), ("B", b)]));
    kernel.defines.extend(named.flat_map(|(name, t)| defines_for(name, t)));
    for (name, t) in [("X_T", x), ("W_T", w)].into_iter().filter(|(_, t)| t.dtype.small().is_some()) {
        kernel.defines.retain(|(known, _)| known != name);
        kernel.defines.push((name.to_owned(), t.dtype.name().to_owned()));
    }
    if suits {
        let tiles = rows.div_ceil(MMA_TILE) + groups.min(rows);
        kernel = on_tensor_cores(kernel, y.dtype, [n.div_ceil(MMA_TILE), tiles, 1]);
    }
    Lowered::Kernels(vec![kernel])
}

/// Returns the arithmetic of a call, and the kernels that do it.
pub(super) fn products(call: &LowerCall<'_>, tensors: &[&TensorRef], gradient: bool) -> Arithmetic {
    let by = match suits_tensor_cores(call, tensors) {
        true if hopper::takes(call, tensors) => Realisation::Hopper,
        true => Realisation::Portable,
        false => Realisation::Scalar,
    };
    Arithmetic::Grouped { gradient, by }
}

impl Op for GroupedLinear {
    fn id(&self) -> OpId {
        id::GROUPED_LINEAR
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn multiplies(&self) -> bool {
        true
    }

    fn doc(&self) -> &'static str {
        "y = x·w[g]ᵀ for the rows of each group g, those from offsets[g] to offsets[g + 1]. x […, K], whose rows are all \
         axes but the last, w [G·N, K] or [G, N, K] ([G·K, N] if `transposed`), offsets i32 [G + 1] → […, N]. Two more \
         inputs t […, R], b [G·N, R] ([G·R, N] if `across`) add t·b[g]ᵀ before the sum is rounded: adapters, and what \
         they add to the gradient of their input."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[GROUPS, TRANSPOSED, ACROSS]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (x, w, offsets, second) = match inputs {
            [x, w, offsets] => (x, w, offsets, None),
            [x, w, offsets, t, b] => (x, w, offsets, Some((t, b))),
            _ => return Err("takes x, the matrices, the offsets, and nothing or a second product".into()),
        };
        let (groups, across) = (attrs.size("groups")?, attrs.flag("across")?);
        check_offsets(offsets, groups)?;
        if across && second.is_none() {
            return Err("`across` is of the second product, which is missing".into());
        }
        if !x.dtype.is_float() || !w.dtype.is_float() {
            return Err("x and the matrices must be floating point".into());
        }
        let n = columns_of_product(x, w, groups, attrs.flag("transposed")?)?;
        if let Some((t, b)) = second {
            check_second(x, n, [t, b], groups, across)?;
        }
        let mut result = x.clone();
        *result.shape.last_mut().expect("x has columns") = Dim::Fixed(n);
        Ok(vec![result])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (offsets, dy, is_sum) = (call.input(2), call.dy(), call.node.inputs.len() > 3);
        let attrs = Attrs::new().with("groups", call.node.attrs.size("groups").expect("checked by the shape rule"));
        let mut product = |x: usize, name: &str| {
            let (turned, of_x, of_w) = (flag(&call.node.attrs, name), call.input(x), call.input(x + 1));
            let to_x = attrs.clone().with("transposed", !turned);
            let dx = call.wanted(x, id::GROUPED_LINEAR, &[dy, of_w, offsets], to_x);
            let (left, right) = if turned { (of_x, dy) } else { (dy, of_x) };
            let to_w = attrs.clone().with("shape", call.emit.value(of_w).shape.clone());
            let dw = call.wanted(x + 1, id::GROUPED_WEIGHT_GRADIENT, &[left, right, offsets], to_w);
            [dx, dw]
        };
        let [dx, dw] = product(0, "transposed");
        let mut all = vec![dx, dw, None];
        if is_sum {
            all.extend(product(3, "across"));
        }
        Gradients::Inputs(all)
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        let terms: usize = inputs.iter().step_by(3).map(|x| x.shape[x.shape.len() - 1]).sum();
        Cost { flops: 2.0 * outputs[0].len() as f64 * terms as f64, bytes }
    }

    fn arithmetic(&self, call: &LowerCall<'_>) -> Arithmetic {
        products(call, &factors(call, 3), false)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        lowered(call, 3, false)
    }

    crate::reference!(linear);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, each: usize, groups: usize, k: usize, n: usize, transposed: bool| {
            let (_, _, offsets) = example_groups(tokens, each, groups);
            let w = if transposed { [groups, k, n] } else { [groups, n, k] };
            let attrs = Attrs::new().with("groups", groups).with("transposed", transposed);
            let inputs = vec![normal(&[1, tokens, each, k]), normal(&w), ints(&[groups + 1], offsets)];
            Example::new(inputs, attrs).differentiate(&[0, 1])
        };
        // Groups of more than a tile, and more groups than a warp reads at once.
        let large = |tokens: usize, each: usize, groups: usize, k: usize, n: usize, transposed: bool| {
            let Example { inputs, attrs, .. } = example(tokens, each, groups, k, n, transposed);
            Example::new(inputs, attrs)
        };
        let mut flat = example(7, 2, 4, 6, 5, false);
        flat.inputs[1] = normal(&[20, 6]);
        // A second product of r terms, with matrices in one orientation or the other.
        let with = |mut first: Example, r: usize, n: usize, across: bool| {
            let groups = first.attrs.size("groups").expect("an example has groups");
            let ExampleInput::Normal { shape, .. } = &first.inputs[0] else { unreachable!("x is drawn") };
            let rows = [&shape[..shape.len() - 1], &[r]].concat();
            let b = if across { [groups, r, n] } else { [groups, n, r] };
            first.inputs.extend([normal(&rows), normal(&b)]);
            first.attrs = first.attrs.with("across", across);
            first
        };
        vec![
            example(6, 2, 4, 8, 5, false),
            example(5, 2, 3, 4, 9, true),
            flat,
            example(80, 4, 3, 70, 65, false),
            example(90, 2, 5, 33, 130, true),
            // Tensor cores take these in bf16.
            example(150, 2, 3, 104, 136, false),
            example(70, 4, 5, 40, 264, true),
            large(530, 2, 3, 72, 320, false),
            large(300, 4, 70, 136, 72, true),
            with(example(6, 2, 4, 8, 5, false), 3, 5, false).differentiate(&[0, 1, 3, 4]),
            with(example(7, 2, 3, 4, 9, true), 5, 9, true).differentiate(&[0, 1, 3, 4]),
            with(large(80, 4, 3, 70, 65, true), 18, 65, true),
            with(large(150, 2, 3, 104, 136, false), 8, 136, false),
            with(large(530, 2, 3, 72, 320, false), 16, 320, true),
            with(large(300, 4, 70, 136, 72, true), 72, 72, true),
            with(large(300, 4, 7, 136, 72, true), 136, 72, false),
        ]
    }
}

/// The group of each row.
pub(super) fn groups_of(offsets: &[i32]) -> Vec<usize> {
    let of = |(group, ends): (usize, &[i32])| std::iter::repeat_n(group, (ends[1] - ends[0]) as usize);
    offsets.windows(2).enumerate().flat_map(of).collect()
}

/// The rows of x, the matrices of all groups, and whether these are [K, N].
pub(super) struct Factors<'a, T> {
    columns: usize,
    x: &'a [T],
    w: &'a [T],
    transposed: bool,
}

impl<'a, T: Real> Factors<'a, T> {
    pub fn of(x: &Input<'a, T>, w: &Input<'a, T>, transposed: bool) -> Factors<'a, T> {
        Factors { columns: x.columns(), x: x.real(), w: w.real(), transposed }
    }

    /// Adds row `r` times the matrix of its group to y.
    pub fn add(&self, y: &mut [T], r: usize, group: usize) {
        let (n, k) = (y.len(), self.columns);
        let (x, own) = (&self.x[r * k..(r + 1) * k], &self.w[group * n * k..(group + 1) * n * k]);
        vectorised(AddProduct, (y, x, own, self.transposed));
    }
}

/// Adds x·wᵀ to y, or x·w where the matrix is transposed.
struct AddProduct;

impl<T: Real> Loop<(&mut [T], &[T], &[T], bool)> for AddProduct {
    type Output = ();

    #[inline(always)]
    fn run((y, x, w, transposed): (&mut [T], &[T], &[T], bool)) {
        if transposed {
            let columns = y.len();
            for (x, row) in x.iter().zip(w.chunks(columns)) {
                add_scaled(y, *x, row);
            }
        } else {
            for (y, row) in y.iter_mut().zip(w.chunks(x.len())) {
                *y += dot(x, row);
            }
        }
    }
}

fn linear<T: Real>(call: &mut Call<'_, T>) {
    let group_of = groups_of(call.inputs[2].int());
    let of = |x: usize, name: &str| Factors::of(&call.inputs[x], &call.inputs[x + 1], flag(call.attrs, name));
    let mut products = vec![of(0, "transposed")];
    if call.inputs.len() > 3 {
        products.push(of(3, "across"));
    }
    let [y] = call.outputs_mut();
    let n = *y.shape().last().expect("y has columns");
    y.real().par_chunks_mut(n).zip(&group_of).enumerate().for_each(|(r, (y, group))| {
        y.fill(T::default());
        products.iter().for_each(|factors| factors.add(y, r, *group));
    });
}
