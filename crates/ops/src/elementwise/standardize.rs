//! `standardize`: each column minus a number of its own, times another, as a model keeps them for its features.

use graph::{Dim, ValueType};
use tensor::Attrs;

use super::expression::Expr;
use crate::gradient::Gradients;
use crate::op::{Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

/// Checks x and `columns` numbers a column.
pub(super) fn infer(inputs: &[ValueType], columns: usize) -> Result<Vec<ValueType>, String> {
    let Some((x, of_columns)) = inputs.split_first().filter(|(_, rest)| rest.len() == columns) else {
        return Err(format!("takes a tensor and {columns} numbers a column"));
    };
    let Some(last) = x.last().filter(|_| x.dtype.is_float()) else {
        return Err("x must be floating point with a known last axis".into());
    };
    let fits = |of: &ValueType| of.dtype.is_float() && of.shape == [Dim::Fixed(last)];
    if !of_columns.iter().all(fits) {
        return Err(format!("the numbers of columns must be floating point [{last}]"));
    }
    Ok(vec![x.clone()])
}

/// Calls with x and `columns` numbers a column, differentiated by x.
pub(super) fn examples(columns: usize) -> Vec<Example> {
    let example = |shape: &[usize]| {
        let last = *shape.last().expect("shapes have axes");
        let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
        let of_columns = || ExampleInput::UniformF32 { shape: vec![last], low: 0.2, high: 0.9 };
        let inputs = std::iter::once(x).chain((0..columns).map(|_| of_columns())).collect();
        Example::new(inputs, Attrs::new()).differentiate(&[0])
    };
    vec![example(&[2, 3, 64]), example(&[7, 33])]
}

/// Columns less numbers of their own, times others: y = (x − shift)·scale.
pub static STANDARDIZE: Rowwise = Rowwise {
    id: id::STANDARDIZE,
    doc: "(x − shift)·scale, by column; nothing flows back to either. x […, H], shift [H], scale [H] → like x.",
    attributes: &[],
    infer: |inputs, _| infer(inputs, 2),
    form: |_| Form {
        operands: vec![Extent::Element, Extent::Column, Extent::Column],
        results: vec![(Extent::Element, (Expr::Input(0) - Expr::Input(1)) * Expr::Input(2))],
    },
    gradient: |call| {
        let inputs = [call.dy(), call.input(2)];
        Gradients::Inputs(vec![call.wanted(0, id::SCALE_COLUMNS, &inputs, Attrs::new()), None, None])
    },
    examples: || examples(2),
};
