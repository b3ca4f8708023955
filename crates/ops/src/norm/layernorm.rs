//! Layer normalisation: y = (x − mean)·r·w + b with r = 1/√(var + eps), over the last axis (Ba, Kiros &
//! Hinton 2016; `torch.nn.LayerNorm`). Statistics in f32, the variance from the differences.

use graph::{Element, ValueType};
use tensor::Attrs;

use super::{ACCUMULATE, check_eps, check_gradient, check_weight, normal, row_shape, scales};
use crate::elementwise::Expr;
use crate::gradient::Gradients;
use crate::op::{Attribute, Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

use Extent::{Column, Element as Each, Row};

fn input(index: usize) -> Expr {
    Expr::Input(index)
}

/// y, mean, r = layernorm(x, w, b)
pub static LAYERNORM: Rowwise = Rowwise {
    id: id::LAYERNORM,
    doc: "y = (x − mean)·r·w + b, r = 1/√(var + eps), mean and variance over the last axis. x […, H], w, b [H] → y […, \
          H], mean f32 […], r f32 […].",
    attributes: &[Attribute { name: "eps", kind: "float", doc: "added to the variance" }],
    infer: |inputs, attrs| {
        let [x, weight, bias] = inputs else { return Err("takes x, the weight and the bias".into()) };
        check_weight(x, weight)?;
        if bias.shape != weight.shape {
            return Err("the bias must have the shape of the weight".into());
        }
        check_eps(attrs)?;
        let statistic = ValueType::new(Element::F32, row_shape(x));
        Ok(vec![x.clone(), statistic.clone(), statistic])
    },
    form: |attrs| {
        let eps = Expr::Constant(attrs.float("eps").expect("checked by the shape rule"));
        let mean = input(0).mean();
        let off = || input(0) - mean.clone();
        let r = ((off() * off()).mean() + eps).relaxed().rsqrt();
        let y = (off() * r.clone() * input(1) + input(2)).relaxed();
        Form { operands: vec![Each, Column, Column], results: vec![(Each, y), (Row, mean), (Row, r)] }
    },
    gradient: |call| {
        let (x, w, mean, r, dy) = (call.input(0), call.input(1), call.output(1), call.output(2), call.dy());
        let dx = call.wanted(0, id::LAYERNORM_BACKWARD, &[x, w, mean, r, dy], Attrs::new());
        let dw = call.wanted(1, id::LAYERNORM_WEIGHT_GRADIENT, &[x, mean, r, dy], Attrs::new());
        let db = call.wanted(2, id::SUM_ROWS, &[dy], Attrs::new());
        Gradients::Inputs(vec![dx, dw, db])
    },
    examples: || {
        let example = |shape: &[usize], eps: f64| {
            let columns = &shape[shape.len() - 1..];
            let inputs = vec![normal(shape), normal(columns), normal(columns)];
            Example::new(inputs, Attrs::new().with("eps", eps)).differentiate(&[0, 1, 2])
        };
        vec![example(&[2, 3, 64], 1e-5), example(&[5, 40], 1e-3), example(&[3, 1024], 1e-5), example(&[2, 33], 1e-6)]
    },
};

/// Returns an example's means of rows.
fn means(rows: usize) -> ExampleInput {
    ExampleInput::UniformF32 { shape: vec![rows], low: -0.5, high: 0.5 }
}

/// dx = r·(g − mean(g) − n·mean(g·n)) with g = dy·w and n = (x − mean)·r
pub static LAYERNORM_BACKWARD: Rowwise = Rowwise {
    id: id::LAYERNORM_BACKWARD,
    doc: "Input gradient of `layernorm`: dx = r·(g − mean(g) − n·mean(g·n)) with g = dy·w and n = (x − mean)·r. x, w, \
          mean, r, dy → dx like x.",
    attributes: &[],
    infer: |inputs, _| {
        let [x, weight, mean, r, dy] = inputs else { return Err("takes x, the weight, mean, r and dy".into()) };
        check_weight(x, weight)?;
        check_gradient(x, dy, &[mean, r])?;
        Ok(vec![x.clone()])
    },
    form: |_| {
        let (w, mean, r, dy) = (input(1), input(2), input(3), input(4));
        // Each a value of its own: it is needed for the sums and after them.
        let (g, n) = ((dy * w).relaxed(), ((input(0) - mean) * r.clone()).relaxed());
        let (along_ones, along_x) = (g.clone().mean(), (g.clone() * n.clone()).mean());
        let dx = (r * (g - along_ones - n * along_x)).relaxed();
        Form { operands: vec![Each, Column, Row, Row, Each], results: vec![(Each, dx)] }
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |rows: usize, columns: usize| {
            let matrix = || normal(&[rows, columns]);
            Example::new(vec![matrix(), normal(&[columns]), means(rows), scales(rows), matrix()], Attrs::new())
        };
        vec![example(6, 64), example(3, 40), example(2, 2048)]
    },
};

/// dw = Σ over rows of dy·(x − mean)·r
pub static LAYERNORM_WEIGHT_GRADIENT: Rowwise = Rowwise {
    id: id::LAYERNORM_WEIGHT_GRADIENT,
    doc: "Weight gradient of `layernorm`: dw = Σ rows dy·(x − mean)·r, in f32. x, mean, r, dy → dw f32 [H]. With \
          `accumulate`, added to.",
    attributes: &[ACCUMULATE],
    infer: |inputs, _| {
        let [x, mean, r, dy] = inputs else { return Err("takes x, mean, r and dy".into()) };
        check_gradient(x, dy, &[mean, r])?;
        Ok(vec![ValueType::new(Element::F32, [x.shape[x.shape.len() - 1].clone()])])
    },
    form: |_| {
        let dw = input(3) * (input(0) - input(1)) * input(2);
        Form { operands: vec![Each, Row, Row, Each], results: vec![(Column, dw)] }
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |rows: usize, columns: usize, attrs: Attrs| {
            let matrix = || normal(&[rows, columns]);
            Example::new(vec![matrix(), means(rows), scales(rows), matrix()], attrs)
                .with_state(vec![ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 }])
        };
        vec![
            example(150, 64, Attrs::new()),
            example(7, 300, Attrs::new().with("accumulate", true)),
            example(40, 33, Attrs::new()),
        ]
    },
};
