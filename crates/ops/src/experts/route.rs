//! The choice of experts for each token, and their weights: a router's scores to top-k weights.
//!
//! `softmax` scores (Shazeer et al. 2017; Mixtral, Qwen) or `sigmoid` scores, with a correction that counts in the choice
//! alone and groups of experts (DeepSeek-V2, DeepSeek-V3). Everything in f32.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use super::{kernel, normal};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered, defines_for};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

pub(super) const SOURCE: &str = include_str!("route.cu");

/// Threads of a block: a warp for each token.
const THREADS: usize = 128;

/// Experts that a router may have.
const MOST: usize = 1024;

const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "top_k", kind: "int", doc: "experts of a token" },
    Attribute { name: "scores", kind: "string", doc: "softmax or sigmoid" },
    Attribute { name: "normalise", kind: "bool?", doc: "weights of a token are divided by their sum" },
    Attribute { name: "epsilon", kind: "float?", doc: "added to that sum; if absent 1e-20 for sigmoid, 0 for softmax" },
    Attribute { name: "factor", kind: "float?", doc: "of all weights, 1 if absent" },
    Attribute { name: "groups", kind: "int?", doc: "groups of neighbouring experts" },
    Attribute { name: "kept_groups", kind: "int?", doc: "groups of a token, from which its experts are chosen" },
    Attribute { name: "counted", kind: "int?", doc: "best scores of a group that count, 1 or 2; 2 if absent" },
];

/// weights, index = the experts of each token
pub struct Route;

/// d_logits of the weights of `route`
pub struct RouteBackward;

/// The attributes of a call, read.
struct Rule {
    top_k: usize,
    sigmoid: bool,
    normalise: bool,
    epsilon: f64,
    factor: f64,
    groups: usize,
    kept: usize,
    counted: usize,
}

impl Rule {
    fn of(attrs: &Attrs, experts: usize) -> Result<Rule, String> {
        let size = |name: &str| -> Result<Option<usize>, String> {
            let value = attrs.optional_int(name)?;
            value.map(|n| usize::try_from(n).map_err(|_| format!("`{name}` is {n}, expected above 0"))).transpose()
        };
        let sigmoid = match attrs.text("scores")? {
            "softmax" => false,
            "sigmoid" => true,
            other => return Err(format!("scores `{other}` are not known; known are softmax, sigmoid")),
        };
        let groups = size("groups")?.unwrap_or(1);
        let rule = Rule {
            top_k: attrs.size("top_k")?,
            sigmoid,
            normalise: attrs.flag("normalise")?,
            epsilon: attrs.optional_float("epsilon")?.unwrap_or(if sigmoid { 1e-20 } else { 0.0 }),
            factor: attrs.optional_float("factor")?.unwrap_or(1.0),
            groups,
            kept: size("kept_groups")?.unwrap_or(groups),
            counted: size("counted")?.unwrap_or(2),
        };
        if experts > MOST {
            return Err(format!("{experts} experts are more than {MOST}"));
        }
        if !matches!(rule.counted, 1 | 2) {
            return Err(format!("`counted` is {}, expected 1 or 2", rule.counted));
        }
        let least = if rule.groups > 1 { rule.counted } else { 1 };
        if rule.groups == 0 || !experts.is_multiple_of(rule.groups) || experts / rule.groups < least {
            return Err(format!(
                "{} groups of {experts} experts do not have {least} experts or more each",
                rule.groups
            ));
        }
        if rule.kept == 0 || rule.kept > rule.groups {
            return Err(format!("`kept_groups` is {}, expected 1 to {}", rule.kept, rule.groups));
        }
        if rule.top_k == 0 || rule.top_k > experts / rule.groups * rule.kept {
            return Err(format!("`top_k` is {}, more than there is to choose from", rule.top_k));
        }
        Ok(rule)
    }

    fn numbers(&self, experts: usize, tokens: usize) -> Vec<(&'static str, usize)> {
        vec![
            ("TOKENS", tokens),
            ("EXPERTS", experts),
            ("TOP_K", self.top_k),
            ("SIGMOID", self.sigmoid as usize),
            ("NORMALISE", self.normalise as usize),
            ("GROUPS", self.groups),
            ("KEPT", self.kept),
            ("COUNTED", self.counted),
        ]
    }

    /// Definitions of the kernels' numbers with fractions.
    fn fractions(&self) -> [(String, String); 2] {
        [("FACTOR", self.factor), ("EPSILON", self.epsilon)]
            .map(|(name, value)| (name.to_owned(), format!("{value:e}f")))
    }
}

pub(super) fn experts_of(logits: &ValueType) -> Result<usize, String> {
    if !logits.dtype.is_float() || logits.shape.len() < 2 {
        return Err("the logits must be floating point […, experts]".into());
    }
    logits.last().ok_or_else(|| "the number of experts must be known".into())
}

impl Op for Route {
    fn id(&self) -> OpId {
        id::ROUTE
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "The experts of each token. s = softmax or sigmoid of the logits, in f32; the k experts with the largest s + bias \
         are taken, the first of equal ones, with groups only from the kept_groups whose `counted` largest s + bias have the \
         largest sums; weight = s, divided by the sum of the token's + epsilon if `normalise`, times factor. \
         logits […, E] (, bias f32 [E] or [1, E]) → weights f32 […, k], index i32 […, k], the best first."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (logits, bias) = match inputs {
            [logits] => (logits, None),
            [logits, bias] => (logits, Some(bias)),
            _ => return Err("takes logits and perhaps a bias".into()),
        };
        let experts = experts_of(logits)?;
        let row = [Dim::Fixed(1), Dim::Fixed(experts)];
        if bias.is_some_and(|b| !b.dtype.is_float() || b.shape != row && b.shape != row[1..]) {
            return Err(format!("the bias must be [{experts}] or [1, {experts}]"));
        }
        let rule = Rule::of(attrs, experts)?;
        let tokens = &logits.shape[..logits.shape.len() - 1];
        let shape: Vec<Dim> = tokens.iter().cloned().chain([Dim::Fixed(rule.top_k)]).collect();
        Ok(vec![ValueType::new(Element::F32, shape.clone()), ValueType::new(Element::I32, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let inputs = [call.input(0), call.output(1), call.dy()];
        let attrs = call.node.attrs.clone();
        let d = call.wanted(0, id::ROUTE_BACKWARD, &inputs, attrs);
        Gradients::Inputs(std::iter::once(d).chain(call.node.inputs[1..].iter().map(|_| None)).collect())
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 8.0 * inputs[0].len() as f64, bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let logits = &call.inputs[0];
        let experts = logits.shape[logits.shape.len() - 1];
        let (rule, tokens) =
            (Rule::of(call.attrs, experts).expect("checked by the shape rule"), logits.len() / experts);
        let mut numbers = rule.numbers(experts, tokens);
        let biased = call.inputs.len() == 2;
        numbers.push(("BIASED", biased as usize));
        let args = vec![Arg::Input(0), Arg::Input(biased as usize), Arg::Output(0), Arg::Output(1)];
        let warps = THREADS / 32;
        let mut kernel = kernel("route", SOURCE, [tokens.div_ceil(warps), 1, 1], THREADS, &numbers, args);
        kernel.defines.extend(defines_for("LOGITS", logits));
        kernel.defines.extend(defines_for("BIAS", &call.inputs[biased as usize]));
        kernel.defines.extend(rule.fractions());
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(route);

    fn examples(&self) -> Vec<Example> {
        let plain = |k: usize, scores: &str| Attrs::new().with("top_k", k).with("scores", scores);
        let example = |shape: &[usize], attrs: Attrs| Example::new(vec![normal(shape)], attrs).differentiate(&[0]);
        let bias = |n: usize| ExampleInput::UniformF32 { shape: vec![n], low: -0.3, high: 0.3 };
        let grouped = plain(3, "sigmoid").with("normalise", true).with("factor", 2.5);
        let grouped = grouped.with("groups", 4).with("kept_groups", 2);
        let by_maximum =
            plain(3, "softmax").with("factor", 16.0).with("groups", 4).with("kept_groups", 2).with("counted", 1);
        let row = ExampleInput::UniformF32 { shape: vec![1, 8], low: -0.3, high: 0.3 };
        vec![
            example(&[2, 3, 8], plain(2, "softmax")),
            example(&[1, 5, 8], plain(3, "softmax").with("normalise", true)),
            example(&[1, 4, 6], plain(2, "sigmoid").with("factor", 1.5)),
            Example::new(vec![normal(&[1, 6, 16]), bias(16)], grouped).differentiate(&[0]),
            example(&[1, 6, 16], by_maximum),
            Example::new(vec![normal(&[1, 5, 8]), row], plain(2, "softmax").with("normalise", true))
                .differentiate(&[0]),
            example(&[1, 4, 6], plain(2, "sigmoid").with("normalise", true).with("epsilon", 0.25)),
            example(&[1, 9, 128], plain(8, "softmax").with("normalise", true)),
        ]
    }
}

/// Returns the scores of one token.
pub(super) fn scores<T: Real>(logits: &[T], sigmoid: bool) -> Vec<T> {
    let one = T::from_f64(1.0);
    if sigmoid {
        return logits.iter().map(|x| one / (one + (-*x).exp())).collect();
    }
    let most = logits.iter().fold(T::negative_infinity(), |a, b| a.max(*b));
    let powers: Vec<T> = logits.iter().map(|x| (*x - most).exp()).collect();
    let sum: T = powers.iter().copied().sum();
    powers.into_iter().map(|p| p / sum).collect()
}

/// The places of the `count` largest values that are allowed, the largest first, of equal ones the first.
fn largest<T: Real>(values: &[T], allowed: impl Fn(usize) -> bool, count: usize) -> Vec<usize> {
    let mut taken: Vec<usize> = Vec::with_capacity(count);
    for _ in 0..count {
        let open = (0..values.len()).filter(|i| allowed(*i) && !taken.contains(i));
        let best = open.reduce(|a, b| if values[b] > values[a] { b } else { a });
        taken.extend(best);
    }
    taken
}

fn chosen<T: Real>(choice: &[T], rule: &Rule) -> Vec<usize> {
    if rule.kept == rule.groups {
        return largest(choice, |_| true, rule.top_k);
    }
    let size = choice.len() / rule.groups;
    let best = |group: &[T]| largest(group, |_| true, rule.counted).into_iter().map(|i| group[i]).sum::<T>();
    let sums: Vec<T> = choice.chunks(size).map(best).collect();
    let kept = largest(&sums, |_| true, rule.kept);
    largest(choice, |i| kept.contains(&(i / size)), rule.top_k)
}

/// Returns the divisor of a token's weights.
fn divisor<T: Real>(scores: &[T], index: impl Iterator<Item = usize>, rule: &Rule) -> T {
    if !rule.normalise {
        return T::from_f64(1.0);
    }
    index.map(|i| scores[i]).sum::<T>() + T::from_f64(rule.epsilon)
}

fn route<T: Real>(call: &mut Call<'_, T>) {
    let logits = call.inputs[0];
    let experts = logits.columns();
    let rule = Rule::of(call.attrs, experts).expect("checked by the shape rule");
    let (logits, bias) = (logits.real(), call.inputs.get(1).map(|b| b.real()));
    let [weights, index] = call.outputs_mut();
    let rows = weights.real().par_chunks_mut(rule.top_k).zip(index.int().par_chunks_mut(rule.top_k));
    rows.zip(logits.par_chunks(experts)).for_each(|((weights, index), logits)| {
        let s = scores(logits, rule.sigmoid);
        let choice: Vec<T> = s.iter().enumerate().map(|(i, s)| bias.map_or(*s, |b| *s + b[i])).collect();
        let found = chosen(&choice, &rule);
        let scale = T::from_f64(rule.factor) / divisor(&s, found.iter().copied(), &rule);
        for ((weight, index), expert) in weights.iter_mut().zip(index).zip(found) {
            (*weight, *index) = (s[expert] * scale, expert as i32);
        }
    });
}

impl Op for RouteBackward {
    fn id(&self) -> OpId {
        id::ROUTE_BACKWARD
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Gradient of `route`, the choice being what it is. logits […, E], index i32 […, k], d_weights f32 […, k] → like \
         logits."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [logits, index, d] = inputs else { return Err("takes logits, index and d_weights".into()) };
        let rule = Rule::of(attrs, experts_of(logits)?)?;
        let tokens = &logits.shape[..logits.shape.len() - 1];
        let shape: Vec<Dim> = tokens.iter().cloned().chain([Dim::Fixed(rule.top_k)]).collect();
        if index.shape != shape || index.dtype != Element::I32 || d.shape != shape {
            return Err("index and d_weights must have a number for each choice".into());
        }
        Ok(vec![logits.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("second derivatives are not supported")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (logits, d) = (&call.inputs[0], &call.outputs[0]);
        let experts = logits.shape[logits.shape.len() - 1];
        let (rule, tokens) =
            (Rule::of(call.attrs, experts).expect("checked by the shape rule"), logits.len() / experts);
        let args = vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Output(0)];
        let grid = [tokens.div_ceil(THREADS / 32), 1, 1];
        let mut kernel = kernel("route_backward", SOURCE, grid, THREADS, &rule.numbers(experts, tokens), args);
        kernel.defines.extend(defines_for("LOGITS", logits));
        kernel.defines.extend(defines_for("D", d));
        kernel.defines.extend(rule.fractions());
        Lowered::Kernels(vec![kernel])
    }

    crate::reference!(backward);

    fn examples(&self) -> Vec<Example> {
        let index = |tokens: usize, k: usize, n: usize| -> Vec<i32> {
            (0..tokens).flat_map(|t| (0..k).map(move |j| ((t * 3 + j * 5 + j) % n) as i32)).collect()
        };
        let example = |tokens: usize, k: usize, n: usize, attrs: Attrs| {
            let of = vec![1, tokens, k];
            let index = ExampleInput::Ints { shape: of.clone(), values: index(tokens, k, n) };
            let d = ExampleInput::NormalF32 { shape: of, scale: 1.0 };
            Example::new(vec![normal(&[1, tokens, n]), index, d], attrs.with("top_k", k))
        };
        vec![
            example(5, 2, 7, Attrs::new().with("scores", "softmax")),
            example(5, 2, 7, Attrs::new().with("scores", "softmax").with("normalise", true)),
            example(6, 2, 64, Attrs::new().with("scores", "sigmoid").with("normalise", true).with("factor", 2.0)),
            example(5, 2, 7, Attrs::new().with("scores", "sigmoid").with("normalise", true).with("epsilon", 0.25)),
        ]
    }
}

fn backward<T: Real>(call: &mut Call<'_, T>) {
    let [logits, index, d] = call.inputs else { unreachable!("the shape rule requires three inputs") };
    let experts = logits.columns();
    let rule = Rule::of(call.attrs, experts).expect("checked by the shape rule");
    let (logits, index, d) = (logits.real(), index.int(), d.real());
    let [out] = call.outputs_mut();
    let rows = out.real().par_chunks_mut(experts).zip(logits.par_chunks(experts));
    rows.zip(index.par_chunks(rule.top_k).zip(d.par_chunks(rule.top_k))).for_each(|((out, logits), (index, d))| {
        let s = scores(logits, rule.sigmoid);
        let at = |j: usize| index[j] as usize;
        let sum = divisor(&s, index.iter().map(|i| *i as usize), &rule);
        let scale = T::from_f64(rule.factor) / sum;
        // The weights' part that their sum takes.
        let along: T = (0..index.len()).map(|j| d[j] * s[at(j)]).sum();
        let along = if rule.normalise { along / sum } else { T::default() };
        let ds: Vec<T> = d.iter().map(|d| (*d - along) * scale).collect();
        let all: T = (0..index.len()).map(|j| ds[j] * s[at(j)]).sum();
        let one = T::from_f64(1.0);
        for (i, out) in out.iter_mut().enumerate() {
            let own = index.iter().position(|e| *e as usize == i).map_or(T::default(), |j| ds[j]);
            *out = if rule.sigmoid { own * s[i] * (one - s[i]) } else { s[i] * (own - all) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_limit_the_choice_and_equal_scores_take_the_first() {
        let rule = |groups: usize, kept: usize, top_k: usize| Rule {
            top_k,
            sigmoid: true,
            normalise: false,
            epsilon: 0.0,
            factor: 1.0,
            groups,
            kept,
            counted: 2,
        };
        let scores = [0.9, 0.1, 0.5, 0.6, 0.2, 0.2];
        assert_eq!(chosen(&scores, &rule(1, 1, 2)), [0, 3]);
        assert_eq!(chosen(&scores, &rule(3, 1, 2)), [3, 2], "the second group has the largest sum");
        let by_maximum = Rule { counted: 1, ..rule(3, 1, 2) };
        assert_eq!(chosen(&scores, &by_maximum), [0, 1], "the first group has the largest score");
        assert_eq!(chosen(&[0.5, 0.5, 0.5], &rule(1, 1, 2)), [0, 1]);
    }
}
