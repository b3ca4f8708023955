//! The spread of tokens over experts: choices and probabilities of each expert, and the loss that is smallest when both
//! are even (Fedus et al. 2021; Switch), as transformers computes it over all layers at once.

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

/// Rows of a load: choices, probabilities, and what the entropy is the sum of.
const ROWS: usize = 3;

const SCORES: &[Attribute] = &[Attribute {
    name: "scores",
    kind: "string?",
    doc: "softmax, or sigmoid divided by their sum; softmax if absent",
}];

/// [3, E] of the experts that logits are for.
fn load_of(logits: &ValueType) -> Result<[Dim; 2], String> {
    Ok([Dim::Fixed(ROWS), Dim::Fixed(route::experts_of(logits)?)])
}

fn is_sigmoid(attrs: &Attrs) -> Result<bool, String> {
    match attrs.optional_text("scores").map_err(|e| e.0)? {
        None | Some("softmax") => Ok(false),
        Some("sigmoid") => Ok(true),
        Some(other) => Err(format!("scores `{other}` are not known; known are softmax, sigmoid")),
    }
}

/// Checks the operand that marks the tokens that are there.
fn check_present(logits: &ValueType, present: Option<&ValueType>) -> Result<(), String> {
    let tokens = &logits.shape[..logits.shape.len().saturating_sub(1)];
    match present {
        Some(present) if present.dtype != Element::F32 || present.shape != tokens => {
            Err("what is present must be f32, a number for each token".into())
        }
        _ => Ok(()),
    }
}

/// Probabilities of a token's experts.
fn probabilities<T: Real>(logits: &[T], sigmoid: bool) -> Vec<T> {
    let mut s = scores(logits, sigmoid);
    if sigmoid {
        let sum: T = s.iter().copied().sum();
        s.iter_mut().for_each(|s| *s = *s / sum);
    }
    s
}

fn plain(
    entry: &'static str,
    (tokens, experts): (usize, usize),
    sigmoid: bool,
    blocks: usize,
    args: Vec<Arg>,
) -> KernelSpec {
    let numbers = [
        ("TOKENS", tokens),
        ("EXPERTS", experts),
        ("SIGMOID", sigmoid as usize),
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
        "What experts are given: load[0, e] is the number of choices of expert e, load[1, e] the sum over the tokens of its \
         probabilities p, load[2, e] that of −p·ln p, whose sum over e is the entropy. Tokens whose `present` is 0 do not \
         count. logits […, E], index i32 […, k] of `route` (, present f32 […]) → load f32 [3, E]. Only the probabilities \
         have a gradient, and only those of a softmax."
    }

    fn attributes(&self) -> &'static [Attribute] {
        SCORES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, index, rest @ ..] = inputs else {
            return Err("takes logits, index and perhaps what is present".into());
        };
        if rest.len() > 1 {
            return Err("takes logits, index and perhaps what is present".into());
        }
        is_sigmoid(attrs)?;
        check_present(logits, rest.first())?;
        if choices(index)?.0 != &logits.shape[..logits.shape.len().saturating_sub(1)] {
            return Err("the index must have the choices of each token".into());
        }
        Ok(vec![ValueType::new(Element::F32, load_of(logits)?)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        if is_sigmoid(&call.node.attrs).expect("checked by the shape rule") {
            return Gradients::NoGradient("only probabilities of a softmax are evened out");
        }
        let inputs: Vec<_> = [call.input(0), call.dy()].into_iter().chain(call.node.inputs.get(2).copied()).collect();
        let d = call.wanted(0, id::EXPERT_LOAD_BACKWARD, &inputs, Attrs::new());
        Gradients::Inputs(std::iter::once(d).chain(call.node.inputs[1..].iter().map(|_| None)).collect())
    }

    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        let (tokens, experts) = extents(&call.inputs[0]);
        tokens.div_ceil(TOKENS_PER_BLOCK) * ROWS * experts * 4
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (logits, index) = (&call.inputs[0], &call.inputs[1]);
        let (tokens, experts) = extents(logits);
        let blocks = tokens.div_ceil(TOKENS_PER_BLOCK);
        let masked = call.inputs.len() == 3;
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(if masked { 2 } else { 1 }), Arg::Scratch(0)];
        let sigmoid = is_sigmoid(call.attrs).expect("checked by the shape rule");
        let mut parts = plain("expert_load_parts", (tokens, experts), sigmoid, blocks, args);
        parts.defines.push(("MASKED".to_owned(), (masked as usize).to_string()));
        parts.defines.extend(defines_for("LOGITS", logits));
        parts.defines.push(("TOP_K".to_owned(), index.shape[index.shape.len() - 1].to_string()));
        let args = vec![Arg::Scratch(0), Arg::Output(0)];
        let mut total =
            plain("expert_load_total", (tokens, experts), sigmoid, (ROWS * experts).div_ceil(THREADS), args);
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
        let mut masked = example(140, 2, 9);
        masked.inputs.push(present(140));
        let mut sigmoid = example(30, 2, 33);
        sigmoid.attrs = sigmoid.attrs.with("scores", "sigmoid");
        let mut differentiated = example(5, 2, 4).differentiate(&[0]);
        differentiated.inputs.push(present(5));
        vec![example(7, 2, 5).differentiate(&[0]), example(300, 3, 70), masked, sigmoid, differentiated]
    }
}

fn load<T: Real>(call: &mut Call<'_, T>) {
    let [logits, index, ..] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let sigmoid = is_sigmoid(call.attrs).expect("checked by the shape rule");
    let (experts, k, logits, index) = (logits.columns(), index.columns(), logits.real(), index.int());
    let present = call.inputs.get(2).map(|present| present.real());
    let mut sums = vec![0.0f64; ROWS * experts];
    for (token, (row, index)) in logits.chunks(experts).zip(index.chunks(k)).enumerate() {
        if present.is_some_and(|present| present[token].to_f64() == 0.0) {
            continue;
        }
        index.iter().for_each(|expert| sums[*expert as usize] += 1.0);
        for (e, p) in probabilities(row, sigmoid).into_iter().map(T::to_f64).enumerate() {
            sums[experts + e] += p;
            sums[2 * experts + e] -= if p > 0.0 { p * p.ln() } else { 0.0 };
        }
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
        "Gradient of `expert_load`: with s the softmax of a token's logits and c = d[1] − (1 + ln s)·d[2], s·(c − Σ s·c), 0 \
         for tokens that do not count. logits […, E], d f32 [3, E] (, present f32 […]) → like logits."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (logits, d, present) = match inputs {
            [logits, d] => (logits, d, None),
            [logits, d, present] => (logits, d, Some(present)),
            _ => return Err("takes logits, d and perhaps what is present".into()),
        };
        check_present(logits, present)?;
        if d.dtype != Element::F32 || d.shape != load_of(logits)? {
            return Err("d must be f32 [3, E]".into());
        }
        Ok(vec![logits.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (logits, d) = (&call.inputs[0], &call.outputs[0]);
        let (tokens, experts) = extents(logits);
        let masked = call.inputs.len() == 3;
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(if masked { 2 } else { 1 }), Arg::Output(0)];
        let blocks = tokens.div_ceil(THREADS / 32);
        let mut kernel = plain("expert_load_backward", (tokens, experts), false, blocks, args);
        kernel.defines.push(("MASKED".to_owned(), (masked as usize).to_string()));
        kernel.defines.extend(defines_for("LOGITS", logits));
        kernel.defines.extend(defines_for("DLOGITS", d));
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(backward);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, experts: usize| {
            let d = ExampleInput::NormalF32 { shape: vec![ROWS, experts], scale: 1.0 };
            Example::new(vec![normal(&[1, tokens, experts]), d], Attrs::new())
        };
        let mut masked = example(9, 40);
        masked.inputs.push(present(9));
        vec![example(7, 5), example(20, 70), masked]
    }
}

fn backward<T: Real>(call: &mut Call<'_, T>) {
    let [logits, d, ..] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let present = call.inputs.get(2).map(|present| present.real());
    let (experts, logits, d) = (logits.columns(), logits.real(), d.real());
    let (of_sums, of_entropy) = (&d[experts..2 * experts], &d[2 * experts..]);
    let [out] = call.outputs_mut();
    out.real().par_chunks_mut(experts).zip(logits.par_chunks(experts)).enumerate().for_each(
        |(token, (out, logits))| {
            if present.is_some_and(|present| present[token].to_f64() == 0.0) {
                return out.fill(T::default());
            }
            let s = scores(logits, false);
            // The derivative of −p·ln p is −ln p − 1; where p is 0, it contributes nothing.
            let of_entropy = s.iter().zip(of_entropy).map(|(s, d)| match s.to_f64() > 0.0 {
                true => T::from_f64(-1.0 - s.to_f64().ln()) * *d,
                false => T::default(),
            });
            let d: Vec<T> = of_entropy.zip(of_sums).map(|(entropy, sum)| entropy + *sum).collect();
            let along: T = s.iter().zip(&d).map(|(s, d)| *s * *d).sum();
            out.iter_mut().zip(s.iter().zip(&d)).for_each(|(out, (s, d))| *out = *s * (*d - along));
        },
    );
}

/// Returns 1 for the tokens of an example that are there, which are most, and 0 for the others.
fn present(tokens: usize) -> ExampleInput {
    ExampleInput::F32 { shape: vec![1, tokens], values: (0..tokens).map(|i| (i % 3 != 1) as u8 as f32).collect() }
}

/// token_loss + factor · Σ over experts of choices · probabilities / (tokens · layers)²
pub struct BalancedLoss;

/// The gradient of `balanced_loss` for the load.
pub struct BalancedLossBackward;

const BALANCE: &[Attribute] =
    &[Attribute { name: "factor", kind: "float", doc: "the coefficient times the number of experts" }, TOP_K];

const TOP_K: Attribute = Attribute { name: "top_k", kind: "int", doc: "experts of a token" };

/// Returns factor·top_k², the factor of the products of choices and probabilities, before they are divided by the
/// square of the number of choices, which is that of tokens and layers times `top_k`.
fn scale(attrs: &Attrs) -> f64 {
    let k = attrs.size("top_k").expect("checked by the shape rule");
    attrs.float("factor").expect("checked by the shape rule") * (k as f64).powi(2)
}

/// Σ choices·probabilities ÷ (Σ choices)²; 0 where there are no tokens.
fn unevenness<T: Real>(load: &[T]) -> f64 {
    let (counts, probabilities) = load.split_at(load.len() / ROWS);
    let all: f64 = counts.iter().map(|c| c.to_f64()).sum();
    let sum: f64 = counts.iter().zip(probabilities).map(|(c, p)| c.to_f64() * p.to_f64()).sum();
    if all > 0.0 { sum / all.powi(2) } else { 0.0 }
}

fn check_balance(inputs: &[ValueType], attrs: &Attrs) -> Result<(), String> {
    let [loss, load] = inputs else {
        return Err("takes the losses of the tokens, or their gradients, and the load".into());
    };
    attrs.float("factor")?;
    let of_load = matches!(load.shape.as_slice(), [Dim::Fixed(ROWS), Dim::Fixed(_)]) && load.dtype == Element::F32;
    if loss.dtype != Element::F32 || !of_load || attrs.size("top_k")? == 0 {
        return Err("the losses must be f32, the load f32 [3, E], and a token must have experts".into());
    }
    Ok(())
}

fn balance_kernel(entry: &'static str, call: &LowerCall<'_>, blocks: usize) -> Lowered {
    let (losses, load) = (&call.inputs[0], &call.inputs[1]);
    assert!(losses.is_dense() && load.is_dense() && call.outputs[0].is_dense(), "values of a batch lie densely");
    let numbers = [("TOKENS", losses.len()), ("EXPERTS", load.len() / ROWS), ("REPORT", 0)];
    let args = vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)];
    let mut kernel = kernel(entry, BALANCE_SOURCE, [blocks, 1, 1], THREADS, &numbers, args);
    kernel.defines.push(("SCALE".to_owned(), format!("{:e}f", scale(call.attrs) as f32)));
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
         n², where n is the number of tokens that count times that of the layers, which the choices tell. token_loss f32 \
         […], load f32 [3, E], the sum of the layers' `expert_load` → like token_loss."
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
        let attrs = Attrs::new().with("factor", 0.5).with("top_k", 2);
        Example::new(vec![uniform(&[2, tokens], 5.0), uniform(&[ROWS, experts], tokens as f64)], attrs)
    };
    vec![example(6, 5), example(700, 300)]
}

fn balanced<T: Real>(call: &mut Call<'_, T>) {
    let (losses, load) = (call.inputs[0].real(), call.inputs[1].real());
    let added = T::from_f64(scale(call.attrs) * unevenness(load));
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
        "Gradient of the load of `balanced_loss`: d[1] = Σ dy · factor·load[0] ÷ n², d[0] = d[2] = 0: choices have none. dy \
         f32 […], load f32 [3, E] → f32 [3, E]."
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
    let counts = &load[..load.len() / ROWS];
    let all: f64 = counts.iter().map(|c| c.to_f64()).sum();
    let factor =
        if all > 0.0 { scale(call.attrs) / all.powi(2) * dy.iter().map(|d| d.to_f64()).sum::<f64>() } else { 0.0 };
    let [d] = call.outputs_mut();
    let d = d.real();
    d.fill(T::default());
    d[counts.len()..].iter_mut().zip(counts).for_each(|(d, count)| *d = T::from_f64(factor * count.to_f64()));
}

/// report = what is logged of a load
pub struct RouterReport;

/// Ranks that report the same loads.
fn parts_of(attrs: &Attrs) -> usize {
    attrs.optional_int("parts").expect("checked by the shape rule").unwrap_or(1) as usize
}

impl Op for RouterReport {
    fn id(&self) -> OpId {
        id::ROUTER_REPORT
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "What is logged of loads, as sums that may be added up: the choices of each expert, then the number of routings n, \
         the sum of their entropies, and n times the loss of uneven loads, E·Σ load[0, e]·load[1, e] ÷ n². load f32 [3, E], \
         the sum of the layers' `expert_load` → f32 [E + 3]. With `parts`, a number of ranks that report the same loads, each \
         gives its share. With `accumulate`, added to."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            TOP_K,
            Attribute { name: "parts", kind: "int?", doc: "ranks that report the same loads; 1 if absent" },
            Attribute { name: "accumulate", kind: "bool?", doc: "add to the result instead of overwriting it" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [load] = inputs else { return Err("takes the load".into()) };
        attrs.flag("accumulate")?;
        if attrs.optional_int("parts")?.is_some_and(|parts| parts < 1) {
            return Err("`parts` must be 1 or more".into());
        }
        match load.shape.as_slice() {
            [Dim::Fixed(ROWS), Dim::Fixed(experts)] if load.dtype == Element::F32 && attrs.size("top_k")? > 0 => {
                Ok(vec![ValueType::new(Element::F32, [Dim::Fixed(experts + 3)])])
            }
            _ => Err("the load must be f32 [3, E], and a token must have experts".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("a report is not trained")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let load = &call.inputs[0];
        assert!(load.is_dense() && call.outputs[0].is_dense(), "loads and reports lie densely");
        let k = call.attrs.size("top_k").expect("checked by the shape rule");
        let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule") as usize;
        let numbers = [
            ("EXPERTS", load.len() / ROWS),
            ("TOP_K", k),
            ("PARTS", parts_of(call.attrs)),
            ("ACCUMULATE", accumulate),
            ("REPORT", 1),
        ];
        let args = vec![Arg::Input(0), Arg::Output(0)];
        Lowered::Kernels(vec![kernel("router_report", BALANCE_SOURCE, [1, 1, 1], THREADS, &numbers, args)])
    }

    crate::reference!(report);

    fn examples(&self) -> Vec<Example> {
        let load = |experts: usize| ExampleInput::UniformF32 { shape: vec![ROWS, experts], low: 0.0, high: 9.0 };
        let state = ExampleInput::NormalF32 { shape: vec![303], scale: 1.0 };
        let attrs = Attrs::new().with("top_k", 2);
        vec![
            Example::new(vec![load(5)], attrs.clone()),
            Example::new(vec![load(9)], attrs.clone().with("parts", 3)),
            Example::new(vec![load(300)], attrs.with("accumulate", true)).with_state(vec![state]),
        ]
    }
}

fn report<T: Real>(call: &mut Call<'_, T>) {
    let load = call.inputs[0].real();
    let k = call.attrs.size("top_k").expect("checked by the shape rule") as f64;
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let experts = load.len() / ROWS;
    let rows = load[..experts].iter().map(|c| c.to_f64()).sum::<f64>() / k;
    let entropy = load[2 * experts..].iter().map(|x| x.to_f64()).sum::<f64>();
    let uneven = experts as f64 * k.powi(2) * unevenness(load) * rows;
    let parts = parts_of(call.attrs) as f64;
    let values = load[..experts].iter().map(|c| c.to_f64()).chain([rows, entropy, uneven]).map(|value| value / parts);
    let [y] = call.outputs_mut();
    for (y, value) in y.real().iter_mut().zip(values) {
        *y = if accumulate { *y + T::from_f64(value) } else { T::from_f64(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    #[test]
    fn the_gradient_of_the_probabilities_is_that_of_the_loss() {
        let attrs = Attrs::new().with("factor", 0.5).with("top_k", 2);
        let weights = Array::Real(vec![1.0, 0.0, 2.0]);
        let load = vec![3.0, 1.0, 2.0, 0.7, 0.9, 1.4, 0.1, 0.2, 0.3];
        let loss = |load: &[f64]| {
            let (losses, load) = (Array::Real(vec![0.1, 0.2, 0.3]), Array::Real(load.to_vec()));
            let mut y = [(vec![3], Array::Real(vec![0.0; 3]))];
            apply(&BalancedLoss, &attrs, &[(&[3], &losses), (&[3, 3], &load)], &mut y);
            y[0].1.real().iter().zip([1.0, 0.0, 2.0]).map(|(y, w)| y * w).sum::<f64>()
        };
        let mut d = [(vec![3, 3], Array::Real(vec![0.0; 9]))];
        let given = Array::Real(load.clone());
        apply(&BalancedLossBackward, &attrs, &[(&[3], &weights), (&[3, 3], &given)], &mut d);
        for (i, found) in d[0].1.real().iter().enumerate() {
            let moved =
                |by: f64| load.iter().enumerate().map(|(j, x)| x + by * (i == j) as u8 as f64).collect::<Vec<_>>();
            let expected = if !(3..6).contains(&i) { 0.0 } else { (loss(&moved(1e-3)) - loss(&moved(-1e-3))) / 2e-3 };
            assert!((found - expected).abs() < 1e-9, "{i}: {found}, expected {expected}");
        }
    }
}
