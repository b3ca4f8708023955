//! Normalisation without a weight: y = factor·x·r with r = 1/√(mean(x²) + eps), over the last axis. With factor 1/√H it
//! gives rows of length 1.

use graph::{Element, ValueType};
use tensor::Attrs;

use super::{check_eps, check_gradient, normal, row_shape, scales};
use crate::elementwise::{Binary, Expr};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

use Extent::{Element as Each, Row};

const EPS: Attribute = Attribute { name: "eps", kind: "float", doc: "added to the mean of squares" };
const FACTOR: Attribute = Attribute { name: "factor", kind: "float?", doc: "of the result; absent for 1" };

fn factor(attrs: &Attrs) -> Result<f64, String> {
    let factor = attrs.optional_float("factor")?.unwrap_or(1.0);
    if factor.is_finite() { Ok(factor) } else { Err(format!("`factor` is {factor}, expected a finite number")) }
}

fn constant(attrs: &Attrs) -> Expr {
    Expr::Constant(factor(attrs).expect("checked by the shape rule"))
}

/// y, r = unit_norm(x)
pub static UNIT_NORM: Rowwise = Rowwise {
    id: id::UNIT_NORM,
    doc: "y = factor·x·r, r = 1/√(mean(x²) + eps) over the last axis. x […, H] → y like x, r f32 […].",
    attributes: &[EPS, FACTOR],
    infer: |inputs, attrs| {
        let [x] = inputs else { return Err("takes one input".into()) };
        if !x.dtype.is_float() || x.last().is_none() {
            return Err("x must be floating point with a known last axis".into());
        }
        check_eps(attrs)?;
        factor(attrs)?;
        Ok(vec![x.clone(), ValueType::new(Element::F32, row_shape(x))])
    },
    form: |attrs| {
        let eps = Expr::Constant(attrs.float("eps").expect("checked by the shape rule"));
        let r = ((Expr::Input(0) * Expr::Input(0)).mean() + eps).relaxed().rsqrt();
        let y = Expr::Input(0) * r.clone() * constant(attrs);
        Form { operands: vec![Each], results: vec![(Each, y), (Row, r)] }
    },
    gradient: |call| {
        let (inputs, attrs) = ([call.input(0), call.output(1), call.dy()], call.node.attrs.clone());
        let factor = factor(&attrs).expect("checked by the shape rule");
        let attrs = Attrs::new().with("factor", factor);
        Gradients::Inputs(vec![call.wanted(0, id::UNIT_NORM_BACKWARD, &inputs, attrs)])
    },
    examples: || {
        let example = |shape: &[usize], attrs: Attrs| Example::new(vec![normal(shape)], attrs).differentiate(&[0]);
        vec![
            example(&[2, 3, 4, 16], Attrs::new().with("eps", 1e-6)),
            example(&[5, 40], Attrs::new().with("eps", 1e-2).with("factor", 0.15)),
            example(&[3, 1024], Attrs::new().with("eps", 1e-6)),
        ]
    },
};

/// dx = r·(factor·dy − x·r²·mean(factor·dy·x))
pub static UNIT_NORM_BACKWARD: Rowwise = Rowwise {
    id: id::UNIT_NORM_BACKWARD,
    doc: "Input gradient of `unit_norm`: dx = factor·r·(dy − x·r²·mean(dy·x)). x, r, dy → dx like x.",
    attributes: &[FACTOR],
    infer: |inputs, attrs| {
        let [x, r, dy] = inputs else { return Err("takes x, r and dy".into()) };
        check_gradient(x, dy, &[r])?;
        factor(attrs)?;
        Ok(vec![x.clone()])
    },
    form: |attrs| {
        let (x, r, dy) = (|| Expr::Input(0), || Expr::Input(1), || Expr::Input(2) * constant(attrs));
        let along = (dy() * x()).mean();
        let dx = (r() * Expr::binary(Binary::Subtract, dy(), x() * r() * r() * along)).relaxed();
        Form { operands: vec![Each, Row, Each], results: vec![(Each, dx)] }
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |rows: usize, columns: usize, attrs: Attrs| {
            Example::new(vec![normal(&[rows, columns]), scales(rows), normal(&[rows, columns])], attrs)
        };
        vec![
            example(6, 64, Attrs::new()),
            example(3, 40, Attrs::new().with("factor", 0.2)),
            example(2, 2048, Attrs::new()),
        ]
    },
};
