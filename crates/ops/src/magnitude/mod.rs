//! DoRA (Liu et al. 2024): the output columns of an adapted linear are scaled to a learned magnitude, y = x·m/n with n the
//! norms of the adapted weight's rows. The norms are no function of what is trained: no gradient goes through them.
//!
//! Does not know linears: x is what one gave.

mod norms;

use graph::{Element, ValueType};
pub use norms::{AdaptedNorms, MOST_RANK};
use tensor::Attrs;

use crate::elementwise::{Binary, Expr};
use crate::gradient::Gradients;
use crate::op::{Attribute, Example, ExampleInput};
use crate::registry::id;
use crate::rowwise::{Extent, Form, Rowwise};

use Extent::{Column, Element as Each};

const BIAS: Attribute = Attribute { name: "bias", kind: "bool?", doc: "a bias that x contains and that is not scaled" };
const ACCUMULATE: Attribute =
    Attribute { name: "accumulate", kind: "bool?", doc: "add to dm instead of overwriting it" };

fn input(index: usize) -> Expr {
    Expr::Input(index)
}

fn ratio(a: Expr, b: Expr) -> Expr {
    Expr::binary(Binary::Divide, a, b)
}

fn has_bias(attrs: &Attrs) -> bool {
    attrs.flag("bias").expect("checked by the shape rule")
}

/// x without the bias that is operand `index`, where there is one.
fn without(x: Expr, index: usize, attrs: &Attrs) -> Expr {
    if has_bias(attrs) { Expr::binary(Binary::Subtract, x, input(index)) } else { x }
}

fn check_columns(x: &ValueType, columns: &[ValueType]) -> Result<(), String> {
    let fits = |of: &ValueType| of.dtype.is_float() && of.shape.len() == 1 && of.last() == x.last();
    match x.dtype.is_float() && x.last().is_some() && columns.iter().all(fits) {
        true => Ok(()),
        false => Err("x must be floating point […, N], magnitudes, norms and bias [N]".into()),
    }
}

/// y = x·m/n
pub static MAGNITUDE: Rowwise = Rowwise {
    id: id::MAGNITUDE,
    doc: "y = x·m/n, column by column; with `bias`, y = (x − b)·m/n + b. Nothing flows back to n. x […, N], m [N], n [N] (, b \
          [N]) → y like x.",
    attributes: &[BIAS],
    infer: |inputs, attrs| {
        let count = 3 + usize::from(attrs.flag("bias")?);
        if inputs.len() != count {
            return Err(format!("takes {count} inputs with these attributes, not {}", inputs.len()));
        }
        check_columns(&inputs[0], &inputs[1..])?;
        Ok(vec![inputs[0].clone()])
    },
    form: |attrs| {
        let scaled = without(input(0), 3, attrs) * ratio(input(1), input(2));
        let (y, mut operands) = if has_bias(attrs) { (scaled + input(3), vec![Column]) } else { (scaled, vec![]) };
        operands.splice(0..0, [Each, Column, Column]);
        Form { operands, results: vec![(Each, y)] }
    },
    gradient: |call| {
        let (inputs, dy, attrs) = (call.node.inputs.clone(), call.dy(), call.node.attrs.clone());
        let mut gradients = vec![None; inputs.len()];
        if call.wanted.get(3) == Some(&true) {
            let gone = "the bias under a magnitude is frozen";
            return Gradients::NoGradient(gone);
        }
        if call.wanted[1] {
            let operands: Vec<_> = inputs[..3].iter().copied().chain([dy]).chain(inputs.get(3).copied()).collect();
            let both = call.emit.emit(id::MAGNITUDE_GRADIENTS, &operands, attrs);
            gradients[0] = call.wanted[0].then_some(both[0]);
            gradients[1] = Some(both[1]);
        } else {
            gradients[0] = call.wanted(0, id::MAGNITUDE, &[dy, inputs[1], inputs[2]], Attrs::new());
        }
        Gradients::Inputs(gradients)
    },
    examples: || {
        let example = |shape: &[usize], bias: bool| {
            let columns = *shape.last().expect("x has columns");
            let mut inputs = operands(shape, columns);
            inputs.extend(bias.then(|| normal(&[columns])));
            Example::new(inputs, Attrs::new().with("bias", bias)).differentiate(&[0, 1])
        };
        vec![example(&[2, 3, 64], false), example(&[5, 33], true), example(&[3, 1024], false)]
    },
};

/// dx, dm = gradients of `magnitude`
pub static MAGNITUDE_GRADIENTS: Rowwise = Rowwise {
    id: id::MAGNITUDE_GRADIENTS,
    doc: "Gradients of `magnitude`: dx = dy·m/n, and dm = Σ rows dy·x/n, of x without its bias, in f32. x […, N], m [N], n [N], dy […, N] \
          (, b [N]) → dx like x, dm f32 [N]. With `accumulate`, dm is added to.",
    attributes: &[BIAS, ACCUMULATE],
    infer: |inputs, attrs| {
        let count = 4 + usize::from(attrs.flag("bias")?);
        if inputs.len() != count || inputs[3].shape != inputs[0].shape {
            return Err(format!("takes {count} inputs with these attributes, dy shaped like x"));
        }
        check_columns(&inputs[0], &inputs[1..3])?;
        check_columns(&inputs[0], &inputs[4..])?;
        Ok(vec![inputs[0].clone(), ValueType::new(Element::F32, inputs[1].shape.clone())])
    },
    form: |attrs| {
        let dx = input(3) * ratio(input(1), input(2));
        let dm = ratio(input(3) * without(input(0), 4, attrs), input(2));
        let mut operands = vec![Each, Column, Column, Each];
        operands.extend(has_bias(attrs).then_some(Column));
        Form { operands, results: vec![(Each, dx), (Column, dm)] }
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let example = |rows: usize, columns: usize, attrs: Attrs| {
            let mut inputs = operands(&[rows, columns], columns);
            inputs.push(normal(&[rows, columns]));
            inputs.extend(has_bias(&attrs).then(|| normal(&[columns])));
            let dm = ExampleInput::NormalF32 { shape: vec![columns], scale: 1.0 };
            Example::new(inputs, attrs).with_state(vec![normal(&[rows, columns]), dm])
        };
        vec![
            example(150, 64, Attrs::new()),
            example(7, 300, Attrs::new().with("accumulate", true).with("bias", true)),
            example(600, 2048, Attrs::new()),
        ]
    },
};

fn normal(shape: &[usize]) -> ExampleInput {
    ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }
}

/// x, m and n of an example: magnitudes and norms are f32 whatever x is.
fn operands(shape: &[usize], columns: usize) -> Vec<ExampleInput> {
    let positive = || ExampleInput::UniformF32 { shape: vec![columns], low: 0.5, high: 1.5 };
    vec![normal(shape), positive(), positive()]
}
