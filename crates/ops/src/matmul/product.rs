//! The plain product of two matrices, used by the gradients of a linear layer.

use graph::{Dim, Element, OpId, ValueType};
use program::{Cost, Gemm, TensorRef};
use tensor::Attrs;

use super::cpu;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;

/// y = scale·op(a)·op(b)
pub struct Matmul;

/// The attributes of a call, read.
pub(super) struct Flags {
    pub transpose_a: bool,
    pub transpose_b: bool,
    f32: bool,
    pub accumulate: bool,
    pub scale: f64,
}

impl Flags {
    pub(super) fn of(attrs: &Attrs) -> Result<Self, String> {
        let flag = |name: &str| attrs.flag(name).map_err(|e| e.0);
        Ok(Flags {
            transpose_a: flag("transpose_a")?,
            transpose_b: flag("transpose_b")?,
            f32: flag("f32")?,
            accumulate: flag("accumulate")?,
            scale: attrs.optional_float("scale")?.unwrap_or(1.0),
        })
    }

    pub(super) fn checked(attrs: &Attrs) -> Self {
        Self::of(attrs).expect("checked by the shape rule")
    }
}

fn split(t: &ValueType) -> Result<(&[Dim], usize), String> {
    let columns = t.last().ok_or("the last axes must be known")?;
    Ok((&t.shape[..t.shape.len() - 1], columns))
}

/// True when two lists of axes have the same product: equal axis by axis, or all known.
fn same_rows(a: &[Dim], b: &[Dim]) -> bool {
    let product = |dims: &[Dim]| dims.iter().map(Dim::fixed).product::<Option<usize>>();
    a == b || (product(a).is_some() && product(a) == product(b))
}

fn mismatch(axis: &str) -> String {
    format!("{axis} of the first operand and of the second do not agree")
}

/// m, n, k of a call whose shapes are known.
pub(super) fn extents(a: &[usize], b: &[usize], flags: &Flags) -> (usize, usize, usize) {
    let fold = |shape: &[usize]| (shape[..shape.len() - 1].iter().product::<usize>(), shape[shape.len() - 1]);
    let ((a_rows, a_columns), (b_rows, b_columns)) = (fold(a), fold(b));
    let (m, k) = if flags.transpose_a { (a_columns, a_rows) } else { (a_rows, a_columns) };
    (m, if flags.transpose_b { b_rows } else { b_columns }, k)
}

impl Op for Matmul {
    fn id(&self) -> OpId {
        id::MATMUL
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "y = scale·op(a)·op(b), op(x) is x or its transpose; all axes but the last count as rows. a […, K]·b [K, N] → […, N]; \
         with `transpose_a` a […, M]ᵀ·b […, N] → [M, N]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "transpose_a", kind: "bool?", doc: "use the transpose of the first operand" },
            Attribute { name: "transpose_b", kind: "bool?", doc: "use the transpose of the second operand" },
            Attribute { name: "f32", kind: "bool?", doc: "the result is f32 whatever the operands are" },
            Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" },
            Attribute { name: "scale", kind: "float?", doc: "factor of the product, 1 if absent" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [a, b] = inputs else { return Err("takes two operands".into()) };
        let flags = Flags::of(attrs)?;
        if !a.dtype.is_float() || !b.dtype.is_float() {
            return Err("both operands must be floating point".into());
        }
        let ((a_rows, a_columns), (b_rows, b_columns)) = (split(a)?, split(b)?);
        let k = [Dim::Fixed(a_columns)];
        let agrees = match (flags.transpose_a, flags.transpose_b) {
            (false, false) => same_rows(&k, b_rows),
            (false, true) => a_columns == b_columns,
            (true, false) => same_rows(a_rows, b_rows),
            (true, true) => same_rows(a_rows, &[Dim::Fixed(b_columns)]),
        };
        if !agrees {
            let side = |transposed: bool| if transposed { "rows" } else { "columns" };
            return Err(mismatch(&format!("the {} and {}", side(flags.transpose_a), side(!flags.transpose_b))));
        }
        let n = match (flags.transpose_b, b_rows) {
            (false, _) => Dim::Fixed(b_columns),
            (true, [n]) => n.clone(),
            (true, _) => return Err("a transposed second operand must be a matrix".into()),
        };
        let mut shape = if flags.transpose_a { vec![Dim::Fixed(a_columns)] } else { a_rows.to_vec() };
        shape.push(n);
        Ok(vec![ValueType::new(if flags.f32 { Element::F32 } else { a.dtype }, shape)])
    }

    /// Builds the gradients. Four cases of one rule: each gradient is the product of dy and the other operand, in the
    /// layout of the operand that it belongs to.
    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let flags = Flags::checked(&call.node.attrs);
        let (a, b, dy) = (call.input(0), call.input(1), call.dy());
        let plain = || if flags.scale == 1.0 { Attrs::new() } else { Attrs::new().with("scale", flags.scale) };
        let ta = |on: bool| if on { plain().with("transpose_a", true) } else { plain() };
        let tb = |attrs: Attrs| attrs.with("transpose_b", true);
        let (da, db) = match (flags.transpose_a, flags.transpose_b) {
            (false, false) => (([dy, b], tb(ta(false))), ([a, dy], ta(true))),
            (false, true) => (([dy, b], ta(false)), ([dy, a], ta(true))),
            (true, false) => (([b, dy], tb(ta(false))), ([a, dy], ta(false))),
            (true, true) => (([b, dy], tb(ta(true))), ([dy, a], tb(ta(true)))),
        };
        Gradients::Inputs(vec![call.wanted(0, id::MATMUL, &da.0, da.1), call.wanted(1, id::MATMUL, &db.0, db.1)])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let (m, n, k) = extents(&inputs[0].shape, &inputs[1].shape, &Flags::checked(attrs));
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 2.0 * m as f64 * n as f64 * k as f64, bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let flags = Flags::checked(call.attrs);
        let (a, b) = (&call.inputs[0], &call.inputs[1]);
        let (m, n, k) = extents(&a.shape, &b.shape, &flags);
        Lowered::Gemm(Box::new(Gemm {
            batch: 1,
            m,
            n,
            k,
            a: a.clone(),
            b: b.clone(),
            d: call.outputs[0].clone(),
            transpose_a: flags.transpose_a,
            transpose_b: flags.transpose_b,
            scale: flags.scale as f32,
            scales: None,
            bias: None,
            accumulate: flags.accumulate,
            batch_invariant: false,
            low_rank: Vec::new(),
        }))
    }

    crate::reference!(cpu::matmul);

    fn examples(&self) -> Vec<Example> {
        let example = |a: &[usize], b: &[usize], flags: &[&str]| {
            let input = |shape: &[usize]| ExampleInput::Normal { shape: shape.to_vec(), scale: 0.5 };
            let attrs = flags.iter().fold(Attrs::new(), |attrs, flag| attrs.with(flag, true));
            Example::new(vec![input(a), input(b)], attrs)
        };
        let mut scaled = example(&[5, 40], &[40, 8], &[]).differentiate(&[0, 1]);
        scaled.attrs = scaled.attrs.with("scale", 2.5);
        vec![
            example(&[2, 3, 16], &[16, 24], &[]).differentiate(&[0, 1]),
            example(&[5, 40], &[8, 40], &["transpose_b"]).differentiate(&[0, 1]),
            example(&[12, 16], &[12, 24], &["transpose_a"]).differentiate(&[0, 1]),
            scaled,
            example(&[16, 8], &[24, 16], &["transpose_a", "transpose_b"]).differentiate(&[0, 1]),
            example(&[2, 6, 16], &[2, 6, 24], &["transpose_a", "f32"]),
            example(&[2, 6, 16], &[2, 6, 24], &["transpose_a", "f32", "accumulate"])
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![16, 24], scale: 1.0 }]),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_folded_with_symbols() {
        let rows = |n: usize| {
            ValueType::new(Element::Float, [Dim::Symbol("B".into()), Dim::Symbol("T".into()), Dim::Fixed(n)])
        };
        let weights = Attrs::new().with("transpose_a", true).with("f32", true);
        assert_eq!(Matmul.infer(&[rows(16), rows(24)], &weights).unwrap()[0].to_string(), "f32[16, 24]");
        let w = ValueType::new(Element::Float, [Dim::Fixed(16), Dim::Fixed(8)]);
        assert_eq!(Matmul.infer(&[rows(16), w.clone()], &Attrs::new()).unwrap()[0].to_string(), "float[B, T, 8]");
        let wrong = Matmul.infer(&[rows(16), w], &Attrs::new().with("transpose_b", true)).unwrap_err();
        assert_eq!(wrong, "the columns and columns of the first operand and of the second do not agree");
    }
}
