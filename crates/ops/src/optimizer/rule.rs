//! Common parts of the optimizers: the step scalars that they read, their attributes, and the rounding of a new weight
//! to its storage type. The formulas are with the optimizers.

use graph::{Element, ValueType};
use program::{Arg, TensorRef};
use tensor::philox::{self, Purpose};
use tensor::{Attrs, DType, bf16_to_f32, f32_to_bf16_stochastic};

use crate::call::Input;
use crate::kernel::device_type;
use crate::op::{Attribute, ExampleInput};
use crate::real::Real;
use crate::seed::seed_of;
use crate::vector::{Loop, vectorised};

pub const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "beta1", kind: "float", doc: "decay of the first moment" },
    Attribute { name: "beta2", kind: "float", doc: "decay of the second moment" },
    Attribute { name: "epsilon", kind: "float", doc: "added to the root of the second moment" },
    Attribute { name: "weight_decay", kind: "float", doc: "decoupled: each step takes learning_rate·weight_decay" },
    RATE,
    Attribute {
        name: "stochastic_rounding",
        kind: "bool?",
        doc: "round a weight stored as bf16 up or down with a probability given by the distance",
    },
    Attribute { name: "seed", kind: "int", doc: "key of the random numbers" },
    Attribute { name: "stream", kind: "int", doc: "keeps the random numbers of different tensors apart" },
    Attribute {
        name: START,
        kind: "int?",
        doc: "elements of the whole tensor before these, a multiple of four: the random numbers go on from there",
    },
    START_PER_RANK,
];

/// The attribute of tensors that have a learning rate of their own.
pub const RATE: Attribute = Attribute { name: "rate", kind: "float?", doc: "factor of learning_rate, 1 by default" };

/// Returns the factor of the learning rate.
pub fn rate(attrs: &Attrs) -> Result<f64, String> {
    Ok(attrs.optional_float(RATE.name)?.unwrap_or(1.0))
}

/// The distance between the starts of consecutive ranks of a cluster, which share a tensor.
pub const START_PER_RANK: Attribute =
    Attribute { name: "start_per_rank", kind: "int?", doc: "`start` is so much larger on each next rank" };

/// Inputs: gradient, learning_rate, bias_correction_1, bias_correction_2, gradient_scale, applied, step.
pub const INPUTS: usize = 7;

/// Checks gradient, scalars and attributes; returns the number of elements.
pub fn check(inputs: &[ValueType], attrs: &Attrs) -> Result<usize, String> {
    let [gradient, scalars @ .., step] = &inputs[..INPUTS.min(inputs.len())] else {
        return Err("takes the gradient and six step scalars".into());
    };
    if scalars.len() + 2 != INPUTS {
        return Err("takes the gradient and six step scalars".into());
    }
    let one = |element| ValueType::new(element, [1.into()]);
    if scalars.iter().any(|s| *s != one(Element::F32)) || *step != one(Element::I32) {
        return Err("step scalars must be f32[1], the step i32[1]".into());
    }
    if gradient.dtype != Element::F32 || gradient.shape.len() != 1 {
        return Err("the gradient must be f32 and flat".into());
    }
    for name in ["beta1", "beta2", "epsilon", "weight_decay"] {
        attrs.float(name)?;
    }
    rate(attrs)?;
    attrs.flag("stochastic_rounding")?;
    seed_of(attrs)?;
    attrs.size("stream")?;
    check_start(attrs)?;
    gradient.last().ok_or_else(|| "the number of elements must be known".into())
}

/// The attribute that says where the random numbers of a call begin.
pub const START: &str = "start";

/// Elements of the whole tensor before those of a call, on the first rank.
pub fn start(attrs: &Attrs) -> Result<usize, String> {
    optional_size(attrs, START)
}

fn optional_size(attrs: &Attrs, name: &str) -> Result<usize, String> {
    let given = attrs.get(name).map(|_| attrs.size(name));
    Ok(given.transpose()?.unwrap_or(0))
}

/// Checks where the random numbers of a call begin.
pub fn check_start(attrs: &Attrs) -> Result<(), String> {
    for name in [START, "start_per_rank"] {
        if optional_size(attrs, name)? % 4 != 0 {
            return Err(format!("`{name}` must be a multiple of four"));
        }
    }
    Ok(())
}

/// Attributes and scalars of one call as numbers.
#[derive(Clone, Copy)]
pub struct Rule<T> {
    pub beta1: T,
    pub beta2: T,
    /// 1 − β, taken in f64: 1 − 0.999 has no digits to lose in f32.
    pub rest1: T,
    pub rest2: T,
    pub epsilon: T,
    pub weight_decay: T,
    pub learning_rate: T,
    pub correction1: T,
    pub correction2: T,
    pub gradient_scale: T,
    /// False when the update is suppressed: nothing may change.
    pub applied: bool,
    rounding: Option<Rounding>,
}

/// The sequence of random numbers of one tensor in one step.
#[derive(Clone, Copy)]
pub struct Rounding {
    seed: u64,
    stream: u32,
    step: u32,
    /// Blocks of four elements before those of the call.
    before: usize,
}

impl Rounding {
    /// Returns the sequence; `None` where the backend rounds. `storage` is the type in which the weights are kept.
    pub fn of(attrs: &Attrs, step: i32, storage: DType) -> Option<Rounding> {
        let stochastic = attrs.flag("stochastic_rounding").expect("checked by the shape rule");
        (stochastic && storage == DType::BF16).then(|| Rounding {
            seed: seed_of(attrs).expect("checked by the shape rule"),
            stream: attrs.size("stream").expect("checked by the shape rule") as u32,
            step: step as u32,
            before: start(attrs).expect("checked by the shape rule") / 4,
        })
    }

    /// Rounds new weights to what will be stored. The first is element `start` of the call, a multiple of four.
    pub fn round<T: Real>(&self, weights: &mut [T], start: usize) {
        vectorised(RoundAll, (self, weights, start));
    }
}

struct RoundAll;

impl<'a, T: Real> Loop<(&'a Rounding, &'a mut [T], usize)> for RoundAll {
    type Output = ();

    #[inline(always)]
    fn run((of, weights, start): (&'a Rounding, &'a mut [T], usize)) {
        let mut block = (of.before + start / 4) as u64;
        for run in weights.chunks_mut(4 * philox::BLOCKS) {
            let words = philox::run_of_words(of.seed, Purpose::StochasticRounding, of.stream, of.step, block);
            for (weight, word) in run.iter_mut().zip(words) {
                *weight = T::from_f32(bf16_to_f32(f32_to_bf16_stochastic(weight.to_f32(), word)));
            }
            block += philox::BLOCKS as u64;
        }
    }
}

impl<T: Real> Rule<T> {
    /// `storage` is the type in which the weights are kept.
    pub fn new(attrs: &Attrs, inputs: &[Input<'_, T>], storage: DType) -> Rule<T> {
        let number = |name: &str| attrs.float(name).expect("checked by the shape rule");
        let scalar = |index: usize| inputs[index].real()[0];
        Rule {
            beta1: T::from_f64(number("beta1")),
            beta2: T::from_f64(number("beta2")),
            rest1: T::from_f64(1.0 - number("beta1")),
            rest2: T::from_f64(1.0 - number("beta2")),
            epsilon: T::from_f64(number("epsilon")),
            weight_decay: T::from_f64(number("weight_decay")),
            learning_rate: scalar(1) * T::from_f64(rate(attrs).expect("checked by the shape rule")),
            correction1: scalar(2),
            correction2: scalar(3),
            gradient_scale: scalar(4),
            applied: scalar(5) != T::default(),
            rounding: Rounding::of(attrs, inputs[6].int()[0], storage),
        }
    }

    /// Rounds new weights to what will be stored, when that is decided by random numbers; otherwise
    /// the backend rounds. The first is element `start` of the call, a multiple of four.
    pub fn round(&self, weights: &mut [T], start: usize) {
        if let Some(rounding) = self.rounding {
            rounding.round(weights, start);
        }
    }
}

/// Definitions that `optimizer` kernels take from attributes and from the weights' layout.
pub fn defines(attrs: &Attrs, weight: &TensorRef, tensors: &[&TensorRef], threads: u32) -> Vec<(String, String)> {
    let number = |name: &str| attrs.float(name).expect("checked by the shape rule");
    let float = |x: f64| format!("{:e}f", x as f32);
    let stochastic = attrs.flag("stochastic_rounding").expect("checked by the shape rule");
    let aligned = tensors.iter().all(|t| t.offset.is_multiple_of(16));
    for tensor in tensors {
        assert!(tensor.is_dense(), "what an optimizer updates lies densely: {tensor}");
    }
    let seed = seed_of(attrs).expect("checked by the shape rule");
    [
        ("BETA1", float(number("beta1"))),
        ("BETA2", float(number("beta2"))),
        ("REST1", float(1.0 - number("beta1"))),
        ("REST2", float(1.0 - number("beta2"))),
        ("EPSILON", float(number("epsilon"))),
        ("WEIGHT_DECAY", float(number("weight_decay"))),
        ("RATE", float(rate(attrs).expect("checked by the shape rule"))),
        ("SEED", format!("{seed}ull")),
        ("STREAM", format!("{}u", attrs.size("stream").expect("checked by the shape rule"))),
        ("STOCHASTIC", ((stochastic && weight.dtype == DType::BF16) as u32).to_string()),
        ("WEIGHT_T", device_type(weight.dtype).to_owned()),
        ("COUNT", format!("{}ull", weight.len())),
        ("ALIGNED", aligned.to_string()),
        ("THREADS", threads.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// The blocks of four elements before those of a call, as `optimizer` kernels take them after all tensors.
pub fn before(attrs: &Attrs) -> Arg {
    let blocks = |name: &str| (optional_size(attrs, name).expect("checked by the shape rule") / 4) as i64;
    match blocks("start_per_rank") {
        0 => Arg::I64(blocks(START)),
        step => Arg::PerRank { first: blocks(START), step },
    }
}

/// Gradient and scalars of an example with `n` elements.
pub fn example_inputs(n: usize, applied: bool) -> Vec<ExampleInput> {
    let scalar = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
    vec![
        ExampleInput::NormalF32 { shape: vec![n], scale: 0.3 },
        scalar(1e-2),
        scalar(1.0 - 0.9f32.powi(3)),
        scalar(1.0 - 0.99f32.powi(3)),
        scalar(0.4),
        scalar(applied as u32 as f32),
        ExampleInput::Ints { shape: vec![1], values: vec![2] },
    ]
}

/// Returns the attributes of the examples.
pub fn example_attrs(stochastic: bool) -> Attrs {
    Attrs::new()
        .with("beta1", 0.9)
        .with("beta2", 0.99)
        .with("epsilon", 1e-8)
        .with("weight_decay", 0.1)
        .with("stochastic_rounding", stochastic)
        .with("seed", u64::MAX - 5)
        .with("stream", 3)
}
