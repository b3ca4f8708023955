//! How evenly tokens are spread over experts: choices and probabilities of each expert, and the loss that is smallest when
//! both are even (Fedus et al. 2021; Switch), as transformers computes it over all layers at once.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::route::{self, scores};
use super::{choices, example_choices, ints, kernel, normal};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

/// Threads of a block: a warp for each token.
const THREADS: usize = 256;
/// Tokens that one block sums before the sums of the blocks are added in order.
const TOKENS_PER_BLOCK: usize = 128;

/// load = choices and probabilities of each expert, over the tokens
pub struct ExpertLoad;

/// d_logits of the probabilities of `expert_load`
pub struct ExpertLoadBackward;

/// [2, E] of the experts that logits are for.
fn load_of(logits: &ValueType) -> Result<[Dim; 2], String> {
    Ok([Dim::Fixed(2), Dim::Fixed(route::experts_of(logits)?)])
}

fn plain(entry: &'static str, tokens: usize, experts: usize, blocks: usize, args: Vec<Arg>) -> KernelSpec {
    let numbers = [
        ("TOKENS", tokens),
        ("EXPERTS", experts),
        ("SIGMOID", 0),
        ("TOKENS_PER_BLOCK", TOKENS_PER_BLOCK),
        ("BLOCKS", tokens.div_ceil(TOKENS_PER_BLOCK)),
    ];
    kernel(entry, route::SOURCE, [blocks, 1, 1], THREADS, &numbers, args)
}

fn extents(logits: &TensorRef) -> (usize, usize) {
    let experts = logits.shape[logits.shape.len() - 1];
    (logits.len() / experts, experts)
}

impl Op for ExpertLoad {
    fn id(&self) -> OpId {
        id::EXPERT_LOAD
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "What experts are given: load[0, e] is the number of choices of expert e, load[1, e] the sum over the tokens of the \
         softmax of their logits. logits […, E], index i32 […, k] of `route` → load f32 [2, E]. Only the probabilities have \
         a gradient."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, index] = inputs else { return Err("takes logits and index".into()) };
        if choices(index)?.0 != &logits.shape[..logits.shape.len().saturating_sub(1)] {
            return Err("the index must have the choices of each token".into());
        }
        Ok(vec![ValueType::new(Element::F32, load_of(logits)?)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let inputs = [call.input(0), call.dy()];
        Gradients::Inputs(vec![call.wanted(0, id::EXPERT_LOAD_BACKWARD, &inputs, Attrs::new()), None])
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        let (tokens, experts) = extents(&call.inputs[0]);
        tokens.div_ceil(TOKENS_PER_BLOCK) * 2 * experts * 4
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (logits, index) = (&call.inputs[0], &call.inputs[1]);
        let (tokens, experts) = extents(logits);
        let blocks = tokens.div_ceil(TOKENS_PER_BLOCK);
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Scratch(0)];
        let mut parts = plain("expert_load_parts", tokens, experts, blocks, args);
        parts.defines.extend(defines_for("LOGITS", logits));
        parts.defines.push(("TOP_K".to_owned(), index.shape[index.shape.len() - 1].to_string()));
        let args = vec![Arg::Scratch(0), Arg::Output(0)];
        let mut total = plain("expert_load_total", tokens, experts, (2 * experts).div_ceil(THREADS), args);
        total.defines.push(("TOTAL".to_owned(), "1".to_owned()));
        parts.defines.push(("PARTS".to_owned(), "1".to_owned()));
        Lowered::Kernels(vec![parts, total])
    }

    crate::reference!(load);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, k: usize, experts: usize| {
            let index = ints(&[1, tokens, k], example_choices(tokens, k, experts));
            Example::new(vec![normal(&[1, tokens, experts]), index], Attrs::new())
        };
        vec![example(7, 2, 5).differentiate(&[0]), example(300, 3, 70)]
    }
}

fn load<T: Real>(call: &mut Call<'_, T>) {
    let [logits, index] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let (experts, logits, index) = (logits.columns(), logits.real(), index.int());
    let mut sums = vec![0.0f64; 2 * experts];
    index.iter().for_each(|expert| sums[*expert as usize] += 1.0);
    for row in logits.chunks(experts) {
        sums[experts..].iter_mut().zip(scores(row, false)).for_each(|(sum, p)| *sum += p.to_f64());
    }
    let [load] = call.outputs_mut();
    load.real().iter_mut().zip(sums).for_each(|(load, sum)| *load = T::from_f64(sum));
}

impl Op for ExpertLoadBackward {
    fn id(&self) -> OpId {
        id::EXPERT_LOAD_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Gradient of `expert_load`: with s the softmax of a token's logits, s·(d[1] − Σ s·d[1]). logits […, E], d f32 [2, E] \
         → like logits."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, d] = inputs else { return Err("takes logits and d".into()) };
        if d.dtype != Element::F32 || d.shape != load_of(logits)? {
            return Err("d must be f32 [2, E]".into());
        }
        Ok(vec![logits.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (logits, d) = (&call.inputs[0], &call.outputs[0]);
        let (tokens, experts) = extents(logits);
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)];
        let mut kernel = plain("expert_load_backward", tokens, experts, tokens.div_ceil(THREADS / 32), args);
        kernel.defines.extend(defines_for("LOGITS", logits));
        kernel.defines.extend(defines_for("DLOGITS", d));
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(backward);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, experts: usize| {
            let d = ExampleInput::NormalF32 { shape: vec![2, experts], scale: 1.0 };
            Example::new(vec![normal(&[1, tokens, experts]), d], Attrs::new())
        };
        vec![example(7, 5), example(20, 70)]
    }
}

fn backward<T: Real>(call: &mut Call<'_, T>) {
    let [logits, d] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let (experts, logits, d) = (logits.columns(), logits.real(), d.real());
    let [out] = call.outputs_mut();
    out.real().par_chunks_mut(experts).zip(logits.par_chunks(experts)).for_each(|(out, logits)| {
        let s = scores(logits, false);
        let along: T = s.iter().zip(&d[experts..]).map(|(s, d)| *s * *d).sum();
        out.iter_mut().zip(s.iter().zip(&d[experts..])).for_each(|(out, (s, d))| *out = *s * (*d - along));
    });
}

/// token_loss + factor · Σ over experts of choices · probabilities / (tokens · layers)²
pub struct BalancedLoss;

/// d_load of `balanced_loss`
pub struct BalancedLossBackward;

const BALANCE: &[Attribute] = &[
    Attribute { name: "factor", kind: "float", doc: "the coefficient times the number of experts" },
    Attribute { name: "layers", kind: "int", doc: "layers whose loads were added" },
];

/// What the products of choices and probabilities are multiplied with.
fn scale(attrs: &Attrs, tokens: usize) -> f64 {
    let layers = attrs.size("layers").expect("checked by the shape rule");
    attrs.float("factor").expect("checked by the shape rule") / ((tokens * layers) as f64).powi(2)
}

fn check_balance(inputs: &[ValueType], attrs: &Attrs) -> Result<(), String> {
    let [loss, load] = inputs else {
        return Err("takes the losses of the tokens, or their gradients, and the load".into());
    };
    attrs.float("factor")?;
    let of_load = matches!(load.shape.as_slice(), [Dim::Fixed(2), Dim::Fixed(_)]) && load.dtype == Element::F32;
    if loss.dtype != Element::F32 || !of_load || attrs.size("layers")? == 0 {
        return Err("the losses must be f32, the load f32 [2, E], and there must be layers".into());
    }
    Ok(())
}

fn balance_kernel(entry: &'static str, call: &LowerCall<'_>, blocks: usize) -> Lowered {
    let (losses, load) = (&call.inputs[0], &call.inputs[1]);
    assert!(losses.is_dense() && load.is_dense() && call.outputs[0].is_dense(), "values of a batch lie densely");
    let numbers = [("TOKENS", losses.len()), ("EXPERTS", load.len() / 2)];
    let args = vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)];
    let mut kernel = kernel(entry, BALANCE_SOURCE, [blocks, 1, 1], THREADS, &numbers, args);
    kernel.defines.push(("SCALE".to_owned(), format!("{:e}f", scale(call.attrs, losses.len()) as f32)));
    Lowered::Kernels(vec![kernel])
}

const BALANCE_SOURCE: &str = include_str!("balance.cu");

impl Op for BalancedLoss {
    fn id(&self) -> OpId {
        id::BALANCED_LOSS
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "The loss of each token with that of uneven loads added: token_loss + factor·Σ over e of load[0, e]·load[1, e] ÷ \
         (tokens·layers)². token_loss f32 […], load f32 [2, E], the sum of the layers' `expert_load` → like token_loss."
    }

    fn attributes(&self) -> &'static [Attribute] {
        BALANCE
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        check_balance(inputs, attrs)?;
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (dy, load, attrs) = (call.dy(), call.input(1), call.node.attrs.clone());
        let d_loss = call.wanted[0].then_some(dy);
        Gradients::Inputs(vec![d_loss, call.wanted(1, id::BALANCED_LOSS_BACKWARD, &[dy, load], attrs)])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        balance_kernel("balanced_loss", call, call.inputs[0].len().div_ceil(THREADS))
    }

    crate::reference!(balanced);

    fn examples(&self) -> Vec<Example> {
        balance_examples().into_iter().map(|example| example.differentiate(&[0])).collect()
    }
}

fn balance_examples() -> Vec<Example> {
    let uniform = |shape: &[usize], high: f64| ExampleInput::UniformF32 { shape: shape.to_vec(), low: 0.0, high };
    let example = |tokens: usize, experts: usize| {
        let attrs = Attrs::new().with("factor", 0.5).with("layers", 2);
        Example::new(vec![uniform(&[2, tokens], 5.0), uniform(&[2, experts], tokens as f64)], attrs)
    };
    vec![example(6, 5), example(700, 300)]
}

fn balanced<T: Real>(call: &mut Call<'_, T>) {
    let (losses, load) = (call.inputs[0].real(), call.inputs[1].real());
    let (counts, probabilities) = load.split_at(load.len() / 2);
    let sum: f64 = counts.iter().zip(probabilities).map(|(c, p)| c.to_f64() * p.to_f64()).sum();
    let added = T::from_f64(scale(call.attrs, losses.len()) * sum);
    let [y] = call.outputs_mut();
    y.real().iter_mut().zip(losses).for_each(|(y, loss)| *y = *loss + added);
}

impl Op for BalancedLossBackward {
    fn id(&self) -> OpId {
        id::BALANCED_LOSS_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Loss
    }

    fn doc(&self) -> &'static str {
        "Gradient of the load of `balanced_loss`: d[1] = Σ dy · factor·load[0] ÷ (tokens·layers)², d[0] = 0: choices have \
         none. dy f32 […], load f32 [2, E] → f32 [2, E]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        BALANCE
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        check_balance(inputs, attrs)?;
        Ok(vec![inputs[1].clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        balance_kernel("balanced_loss_backward", call, 1)
    }

    crate::reference!(balanced_backward);

    fn examples(&self) -> Vec<Example> {
        balance_examples()
    }
}

fn balanced_backward<T: Real>(call: &mut Call<'_, T>) {
    let (dy, load) = (call.inputs[0].real(), call.inputs[1].real());
    let factor = scale(call.attrs, dy.len()) * dy.iter().map(|d| d.to_f64()).sum::<f64>();
    let [d] = call.outputs_mut();
    let (counts, probabilities) = d.real().split_at_mut(load.len() / 2);
    counts.fill(T::default());
    probabilities.iter_mut().zip(load).for_each(|(d, count)| *d = T::from_f64(factor * count.to_f64()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn the_gradient_of_the_probabilities_is_that_of_the_loss() {
        let attrs = Attrs::new().with("factor", 0.5).with("layers", 2);
        let weights = Array::Real(vec![1.0, 0.0, 2.0]);
        let load = vec![3.0, 1.0, 2.0, 0.7, 0.9, 1.4];
        let loss = |load: &[f64]| {
            let (losses, load) = (Array::Real(vec![0.1, 0.2, 0.3]), Array::Real(load.to_vec()));
            let mut y = [(vec![3], Array::Real(vec![0.0; 3]))];
            apply(&BalancedLoss, &attrs, &[(&[3], &losses), (&[2, 3], &load)], &mut y);
            y[0].1.real().iter().zip([1.0, 0.0, 2.0]).map(|(y, w)| y * w).sum::<f64>()
        };
        let mut d = [(vec![2, 3], Array::Real(vec![0.0; 6]))];
        let given = Array::Real(load.clone());
        apply(&BalancedLossBackward, &attrs, &[(&[3], &weights), (&[2, 3], &given)], &mut d);
        for (i, found) in d[0].1.real().iter().enumerate() {
            let moved =
                |by: f64| load.iter().enumerate().map(|(j, x)| x + by * (i == j) as u8 as f64).collect::<Vec<_>>();
            let expected = if i < 3 { 0.0 } else { (loss(&moved(1e-3)) - loss(&moved(-1e-3))) / 2e-3 };
            assert!((found - expected).abs() < 1e-9, "{i}: {found}, expected {expected}");
        }
    }
}
