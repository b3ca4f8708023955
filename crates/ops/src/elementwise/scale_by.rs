//! `scale_by`: elements times one number that a model keeps, such as the factor of a layer's result.

use graph::Dim;
use tensor::Attrs;

use super::expression::Expr;
use crate::gradient::Gradients;
use crate::op::{Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

/// y = s·x
pub static SCALE_BY: Rowwise = Rowwise {
    id: id::SCALE_BY,
    doc: "s·x, element by element; nothing flows back to s. x […, H], s [1] → like x.",
    attributes: &[],
    infer: |inputs, _| {
        let [x, s] = inputs else { return Err("takes x and a number".into()) };
        if !x.dtype.is_float() || x.last().is_none() {
            return Err("x must be floating point with a known last axis".into());
        }
        if !s.dtype.is_float() || s.shape != [Dim::Fixed(1)] {
            return Err("the number must be floating point [1]".into());
        }
        Ok(vec![x.clone()])
    },
    form: |_| Form {
        operands: vec![Extent::Element, Extent::Tensor],
        results: vec![(Extent::Element, Expr::Input(0) * Expr::Input(1))],
    },
    gradient: |call| {
        let inputs = [call.dy(), call.input(1)];
        Gradients::Inputs(vec![call.wanted(0, id::SCALE_BY, &inputs, Attrs::new()), None])
    },
    examples: || {
        let example = |shape: &[usize]| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            let s = ExampleInput::UniformF32 { shape: vec![1], low: 0.2, high: 0.9 };
            Example::new(vec![x, s], Attrs::new()).differentiate(&[0])
        };
        vec![example(&[2, 3, 64]), example(&[7, 33])]
    },
};
