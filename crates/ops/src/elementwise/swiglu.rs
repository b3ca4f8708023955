//! SwiGLU's product: silu(gate)·up (Shazeer 2020), and its gradients with σ = 1/(1 + e^−gate):
//! d_gate = dy·up·σ·(1 + gate·(1 − σ)), d_up = dy·gate·σ.

use tensor::Attrs;

use super::arithmetic::examples_of;
use super::expression::Expr;
use super::pointwise::{Pointwise, check_operands};
use crate::gradient::Gradients;
use crate::registry::id;

/// silu(gate) · up
pub static SWIGLU: Pointwise = Pointwise {
    id: id::SWIGLU,
    doc: "silu(gate)·up with silu(x) = x/(1 + e^−x). gate, up […] → like gate.",
    attributes: &[],
    infer: |inputs, _| {
        check_operands(inputs, 2, "gate and up")?;
        Ok(vec![inputs[0].clone()])
    },
    expressions: |_| vec![Expr::Input(0).silu() * Expr::Input(1)],
    gradient: |call| {
        let (gate, up, dy) = (call.input(0), call.input(1), call.dy());
        if !call.wanted.contains(&true) {
            return Gradients::Inputs(vec![None, None]);
        }
        let both = call.emit.emit(id::SWIGLU_BACKWARD, &[gate, up, dy], Attrs::new());
        Gradients::Inputs(both.into_iter().zip(call.wanted).map(|(d, wanted)| wanted.then_some(d)).collect())
    },
    examples: || examples_of(2, &Attrs::new()),
};

/// Both gradients of the operation `swiglu`.
pub static SWIGLU_BACKWARD: Pointwise = Pointwise {
    id: id::SWIGLU_BACKWARD,
    doc: "Gradients of `swiglu`: d_gate = dy·up·σ·(1 + gate·(1 − σ)), d_up = dy·gate·σ, σ = 1/(1 + e^−gate). \
          gate, up, dy […] → d_gate, d_up.",
    attributes: &[],
    infer: |inputs, _| {
        check_operands(inputs, 3, "gate, up and dy")?;
        Ok(vec![inputs[0].clone(), inputs[1].clone()])
    },
    expressions: |_| {
        let (gate, up, dy) = (|| Expr::Input(0), Expr::Input(1), || Expr::Input(2));
        let one = || Expr::Constant(1.0);
        let sigmoid = || gate().sigmoid();
        let slope = sigmoid() * (one() + gate() * (one() - sigmoid()));
        vec![dy() * up * slope, dy() * (gate() * sigmoid())]
    },
    gradient: |_| Gradients::NoGradient("second derivatives are not supported"),
    examples: || {
        let mut examples = examples_of(3, &Attrs::new());
        examples.iter_mut().for_each(|e| e.differentiable.clear());
        examples
    },
};
