//! RMS normalisation: y = x·r·w with r = 1/√(mean(x²) + eps), over the last axis (Zhang & Sennrich 2019;
//! Hugging Face's Llama and Qwen layers). Statistics in f32. With r as a result, the gradients need no second sum.
//!
//! With `offset`, the weight acts as (1 + w), as Gemma stores it.

use graph::{Element, ValueType};
use tensor::Attrs;

use super::{ACCUMULATE, check_eps, check_gradient, check_weight, normal, row_shape, scales};
use crate::elementwise::{Binary, Expr};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

const EPS: Attribute = Attribute { name: "eps", kind: "float", doc: "added to the mean of squares" };
const OFFSET: Attribute = Attribute { name: "offset", kind: "bool?", doc: "multiply with 1 + w instead of w" };

use Extent::{Column, Element as Each, Row};

fn input(index: usize) -> Expr {
    Expr::Input(index)
}

/// The factor that a weight acts as.
fn factor(weight: usize, attrs: &Attrs) -> Expr {
    match attrs.flag("offset").expect("checked by the shape rule") {
        true => Expr::Constant(1.0) + input(weight),
        false => input(weight),
    }
}

/// y, r = rmsnorm(x, w)
pub static RMSNORM: Rowwise = Rowwise {
    id: id::RMSNORM,
    doc: "y = x·r·w, r = 1/√(mean(x²) + eps) over the last axis. x […, H], w [H] → y […, H], r f32 […].",
    attributes: &[EPS, OFFSET],
    infer: |inputs, attrs| {
        let [x, weight] = inputs else { return Err("takes x and the weight".into()) };
        check_weight(x, weight)?;
        check_eps(attrs)?;
        attrs.flag("offset")?;
        Ok(vec![x.clone(), ValueType::new(Element::F32, row_shape(x))])
    },
    form: |attrs| {
        let eps = Expr::Constant(attrs.float("eps").expect("checked by the shape rule"));
        let r = ((input(0) * input(0)).mean() + eps).relaxed().rsqrt();
        let y = input(0) * r.clone() * factor(1, attrs);
        Form { operands: vec![Each, Column], results: vec![(Each, y), (Row, r)] }
    },
    gradient: |call| {
        let (x, w, r, dy) = (call.input(0), call.input(1), call.output(1), call.dy());
        let offset = Attrs::new().with("offset", call.node.attrs.flag("offset").unwrap_or(false));
        if call.wanted == [true, true] {
            let both = call.emit.emit(id::RMSNORM_GRADIENTS, &[x, w, r, dy], offset);
            return Gradients::Inputs(both.into_iter().map(Some).collect());
        }
        let dx = call.wanted(0, id::RMSNORM_BACKWARD, &[x, w, r, dy], offset);
        let dw = call.wanted(1, id::RMSNORM_WEIGHT_GRADIENT, &[x, r, dy], Attrs::new());
        Gradients::Inputs(vec![dx, dw])
    },
    examples: || {
        let example = |shape: &[usize], attrs: Attrs| {
            let weight = normal(&shape[shape.len() - 1..]);
            Example::new(vec![normal(shape), weight], attrs).differentiate(&[0, 1])
        };
        vec![
            example(&[2, 3, 64], Attrs::new().with("eps", 1e-6)),
            example(&[5, 40], Attrs::new().with("eps", 1e-5).with("offset", true)),
            example(&[3, 1024], Attrs::new().with("eps", 1e-6)),
        ]
    },
};

/// dx of x, w, r, dy.
fn input_gradient(attrs: &Attrs) -> Expr {
    let (x, r, dy) = (|| input(0), || input(2), || input(3));
    let along = (dy() * factor(1, attrs) * x()).mean();
    (r() * Expr::binary(Binary::Subtract, dy() * factor(1, attrs), x() * r() * r() * along)).relaxed()
}

fn infer_backward(inputs: &[ValueType], attrs: &Attrs) -> Result<ValueType, String> {
    let [x, weight, r, dy] = inputs else { return Err("takes x, the weight, r and dy".into()) };
    check_weight(x, weight)?;
    check_gradient(x, dy, &[r])?;
    attrs.flag("offset")?;
    Ok(x.clone())
}

/// x, w, r and dy of an example.
fn backward_inputs(rows: usize, columns: usize) -> Vec<ExampleInput> {
    vec![normal(&[rows, columns]), normal(&[columns]), scales(rows), normal(&[rows, columns])]
}

/// dx = r·(dy·w − x·r²·mean(dy·w·x))
pub static RMSNORM_BACKWARD: Rowwise = Rowwise {
    id: id::RMSNORM_BACKWARD,
    doc: "Input gradient of `rmsnorm`: dx = r·(dy·w − x·r²·mean(dy·w·x)). x, w, r, dy → dx like x.",
    attributes: &[OFFSET],
    infer: |inputs, attrs| Ok(vec![infer_backward(inputs, attrs)?]),
    form: |attrs| Form { operands: vec![Each, Column, Row, Each], results: vec![(Each, input_gradient(attrs))] },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |rows: usize, columns: usize, offset: bool| {
            Example::new(backward_inputs(rows, columns), Attrs::new().with("offset", offset))
        };
        vec![example(6, 64, false), example(3, 40, true), example(2, 2048, false)]
    },
};

/// dw = Σ over rows of dy·x·r
pub static RMSNORM_WEIGHT_GRADIENT: Rowwise = Rowwise {
    id: id::RMSNORM_WEIGHT_GRADIENT,
    doc: "Weight gradient of `rmsnorm`: dw = Σ rows dy·x·r, in f32. x, r, dy → dw f32 [H]. With `accumulate`, added to.",
    attributes: &[ACCUMULATE],
    infer: |inputs, _| {
        let [x, r, dy] = inputs else { return Err("takes x, r and dy".into()) };
        check_gradient(x, dy, &[r])?;
        Ok(vec![ValueType::new(Element::F32, [x.shape[x.shape.len() - 1].clone()])])
    },
    form: |_| Form { operands: vec![Each, Row, Each], results: vec![(Column, input(2) * input(0) * input(1))] },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |rows: usize, columns: usize, attrs: Attrs| {
            let matrix = || normal(&[rows, columns]);
            Example::new(vec![matrix(), scales(rows), matrix()], attrs)
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 }])
        };
        vec![
            example(150, 64, Attrs::new()),
            example(7, 300, Attrs::new().with("accumulate", true)),
            example(5000, 24, Attrs::new()),
            example(40, 33, Attrs::new()),
        ]
    },
};

/// dx, dw = gradients of `rmsnorm`
pub static RMSNORM_GRADIENTS: Rowwise = Rowwise {
    id: id::RMSNORM_GRADIENTS,
    doc: "`rmsnorm_backward` and `rmsnorm_weight_gradient` from one reading. x […, H], w [H], r f32 […], dy […, H] → dx \
          like x, dw f32 [H]. With `accumulate`, dw is added to.",
    attributes: &[OFFSET, ACCUMULATE],
    infer: |inputs, attrs| {
        let dx = infer_backward(inputs, attrs)?;
        Ok(vec![dx, ValueType::new(Element::F32, inputs[1].shape.clone())])
    },
    form: |attrs| Form {
        operands: vec![Each, Column, Row, Each],
        results: vec![(Each, input_gradient(attrs)), (Column, input(3) * input(0) * input(2))],
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |rows: usize, columns: usize, attrs: Attrs| {
            let dw = ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 };
            Example::new(backward_inputs(rows, columns), attrs).with_state(vec![normal(&[rows, columns]), dw])
        };
        vec![
            example(150, 64, Attrs::new()),
            example(7, 300, Attrs::new().with("accumulate", true).with("offset", true)),
            example(5000, 24, Attrs::new()),
            example(40, 33, Attrs::new()),
            example(600, 2048, Attrs::new()),
        ]
    },
};
