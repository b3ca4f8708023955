//! Columns times or plus numbers of their own: weights of a norm over parts of a row, biases of convolutions and of time
//! steps. Rows of a table, as [`crate::rowwise`] has it.

use graph::{Element, ValueType};
use tensor::Attrs;

use super::expression::Expr;
use super::standardize::{examples, infer};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

use Extent::{Column, Element as Each};

const ACCUMULATE: Attribute =
    Attribute { name: "accumulate", kind: "bool?", doc: "add to dscale instead of overwriting it" };

/// Calls of an operation on x and one number a column, differentiated by both.
fn differentiable() -> Vec<Example> {
    examples(1).into_iter().map(|example| example.differentiate(&[0, 1])).collect()
}

/// Columns times numbers of their own: y = x·scale.
pub static SCALE_COLUMNS: Rowwise = Rowwise {
    id: id::SCALE_COLUMNS,
    doc: "x·scale, by column. x […, H], scale [H] → like x.",
    attributes: &[],
    infer: |inputs, _| infer(inputs, 1),
    form: |_| Form { operands: vec![Each, Column], results: vec![(Each, Expr::Input(0) * Expr::Input(1))] },
    gradient: |call| {
        let (x, scale, dy) = (call.input(0), call.input(1), call.dy());
        if call.wanted[1] {
            let both = call.emit.emit(id::SCALE_COLUMNS_GRADIENTS, &[x, scale, dy], Attrs::new());
            return Gradients::Inputs(vec![call.wanted[0].then_some(both[0]), Some(both[1])]);
        }
        Gradients::Inputs(vec![call.wanted(0, id::SCALE_COLUMNS, &[dy, scale], Attrs::new()), None])
    },
    examples: differentiable,
};

/// dx, dscale = gradients of `scale_columns`
pub static SCALE_COLUMNS_GRADIENTS: Rowwise = Rowwise {
    id: id::SCALE_COLUMNS_GRADIENTS,
    doc: "Gradients of `scale_columns`: dx = dy·scale, dscale = Σ rows dy·x, in f32. x […, H], scale [H], dy […, H] → dx like \
          x, dscale f32 [H]. With `accumulate`, dscale is added to.",
    attributes: &[ACCUMULATE],
    infer: |inputs, _| {
        let [x, scale, dy] = inputs else { return Err("takes x, scale and dy".into()) };
        let dx = infer(&inputs[..2], 1)?;
        if dy.shape != x.shape || !dy.dtype.is_float() {
            return Err("dy must be shaped like x".into());
        }
        Ok(vec![dx[0].clone(), ValueType::new(Element::F32, scale.shape.clone())])
    },
    form: |_| Form {
        operands: vec![Each, Column, Each],
        results: vec![(Each, Expr::Input(2) * Expr::Input(1)), (Column, Expr::Input(2) * Expr::Input(0))],
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |rows: usize, columns: usize, attrs: Attrs| {
            let normal = || ExampleInput::Normal { shape: vec![rows, columns], scale: 1.0 };
            let of_columns = || ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 };
            Example::new(vec![normal(), of_columns(), normal()], attrs).with_state(vec![normal(), of_columns()])
        };
        vec![example(150, 64, Attrs::new()), example(7, 300, Attrs::new().with("accumulate", true))]
    },
};

/// Columns plus numbers of their own: y = x + shift.
pub static SHIFT_COLUMNS: Rowwise = Rowwise {
    id: id::SHIFT_COLUMNS,
    doc: "x + shift, by column. x […, H], shift [H] → like x.",
    attributes: &[],
    infer: |inputs, _| infer(inputs, 1),
    form: |_| Form { operands: vec![Each, Column], results: vec![(Each, Expr::Input(0) + Expr::Input(1))] },
    gradient: |call| {
        let dy = call.dy();
        let dx = call.wanted[0].then_some(dy);
        Gradients::Inputs(vec![dx, call.wanted(1, id::SUM_ROWS, &[dy], Attrs::new())])
    },
    examples: differentiable,
};
