//! The last step of NorMuon (Li et al. 2025): orthogonalized momentum, normalized row by row and subtracted from the
//! weights. The momentum is orthogonalized by `unit_matrices`, products and `newton_schulz_polynomial`.

mod cpu;

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use super::newton_schulz::matrices;
use super::rule;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;
use crate::seed::seed_of;

const SOURCE: &str = include_str!("normuon.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../../cuda/types.cuh")),
    ("reduce.cuh", include_str!("../../cuda/reduce.cuh")),
    ("pack.cuh", include_str!("../../cuda/pack.cuh")),
    ("philox.cuh", include_str!("../../cuda/philox.cuh")),
];

const THREADS: usize = 256;
/// Elements of one thread of the step.
const ELEMENTS: usize = 4;

/// weight, rows ← normuon(direction, learning_rate, applied, step)
pub struct NorMuon;

impl Op for NorMuon {
    fn id(&self) -> OpId {
        id::NORMUON
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "lr = learning_rate·rate. For each matrix O [m, n]: v ← β₂v + (1 − β₂)·mean of O² over each row; Ô = O/(√v + epsilon); w ← w(1 − \
         lr·weight_decay), with `cautious` only where Ô·w ≥ 0; w ← w − scale·lr·√(mn)/‖Ô‖·Ô, nothing where Ô is 0. \
         Nothing changes when applied is 0. direction (O) [count, m, n], learning_rate, applied f32 [1], step i32 [1] \
         → weight [count, m, n], rows (v) f32 [count, m]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "beta2", kind: "float", doc: "decay of the mean of the squares" },
            Attribute { name: "epsilon", kind: "float", doc: "added to the root of the mean" },
            Attribute { name: "scale", kind: "float", doc: "root mean square of a step, in learning rates" },
            Attribute {
                name: "weight_decay",
                kind: "float",
                doc: "decoupled: each step takes learning_rate·weight_decay",
            },
            rule::RATE,
            Attribute {
                name: "cautious",
                kind: "bool?",
                doc: "decay only the weights that the step makes smaller anyway",
            },
            Attribute {
                name: "stochastic_rounding",
                kind: "bool?",
                doc: "round a weight stored as bf16 up or down with a probability given by the distance",
            },
            Attribute { name: "seed", kind: "int", doc: "key of the random numbers" },
            Attribute { name: "stream", kind: "int", doc: "keeps the random numbers of different tensors apart" },
            Attribute {
                name: "start",
                kind: "int?",
                doc: "random numbers that matrices before these take, a multiple of four",
            },
            rule::START_PER_RANK,
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [direction, rate, applied, step] = inputs else {
            return Err("takes the direction and three step scalars".into());
        };
        let one = |element| ValueType::new(element, [1.into()]);
        if *rate != one(Element::F32) || *applied != one(Element::F32) || *step != one(Element::I32) {
            return Err("learning_rate and applied must be f32[1], the step i32[1]".into());
        }
        let [count, rows, _] = matrices(direction)?;
        for name in ["beta2", "epsilon", "scale", "weight_decay"] {
            attrs.float(name)?;
        }
        rule::rate(attrs)?;
        for name in ["cautious", "stochastic_rounding"] {
            attrs.flag(name)?;
        }
        seed_of(attrs)?;
        attrs.size("stream")?;
        rule::check_start(attrs)?;
        let weight = ValueType::new(Element::Float, direction.shape.clone());
        Ok(vec![weight, ValueType::new(Element::F32, [count.into(), rows.into()])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    /// The direction is read for the rows and for the step; weights and means are read and written.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let state: usize = outputs.iter().map(TensorRef::bytes).sum();
        Cost { flops: 8.0 * outputs[0].len() as f64, bytes: (2 * inputs[0].bytes() + 2 * state) as f64 }
    }

    /// Returns the bytes of scratch: for each row 1/(√v + epsilon) and its part of ‖Ô‖², for each matrix the factor of
    /// its step. All f32.
    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        let [count, rows] = [call.inputs[0].shape[0], call.inputs[0].shape[1]];
        count * (2 * rows + 1) * 4
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let [weight, means] = call.outputs else { unreachable!("the shape rule gives two results") };
        let (count, rows, columns) = (weight.shape[0], weight.shape[1], weight.shape[2]);
        let elements = rows * columns;
        let squares = Arg::Scratch(count * rows * 4);
        let factors = Arg::Scratch(2 * count * rows * 4);
        let kernel = |entry: &'static str, grid: [usize; 2], args: Vec<Arg>| KernelSpec {
            entry,
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: defines(call, weight, means),
            grid: [grid[0] as u32, grid[1] as u32, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args,
        };
        let [direction, rate, applied, step] = [0, 1, 2, 3].map(Arg::Input);
        let inverse = Arg::Scratch(0);
        let tiles = elements.div_ceil(THREADS * ELEMENTS);
        Lowered::Kernels(vec![
            kernel(
                "normuon_rows",
                [rows, count],
                vec![direction.clone(), applied.clone(), Arg::Output(1), inverse.clone(), squares.clone()],
            ),
            kernel("normuon_factors", [1, count], vec![squares, rate.clone(), factors.clone()]),
            kernel(
                "normuon_step",
                [tiles, count],
                vec![direction, rate, applied, step, inverse, factors, Arg::Output(0), rule::before(call.attrs)],
            ),
        ])
    }

    crate::reference!(cpu::reference);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: [usize; 3], flags: &[&str], applied: f32| {
            let scalar = |value: f32| ExampleInput::F32 { shape: vec![1], values: vec![value] };
            let step = ExampleInput::Ints { shape: vec![1], values: vec![2] };
            let direction = ExampleInput::Normal { shape: shape.to_vec(), scale: 0.1 };
            let attrs = Attrs::new()
                .with("beta2", 0.95)
                .with("epsilon", 1e-8)
                .with("scale", 0.2)
                .with("weight_decay", 0.1)
                .with("seed", u64::MAX - 5)
                .with("stream", 3);
            let attrs = flags.iter().fold(attrs, |attrs, flag| attrs.with(flag, true));
            let state = vec![
                ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 },
                ExampleInput::UniformF32 { shape: shape[..2].to_vec(), low: 0.0, high: 0.02 },
            ];
            Example::new(vec![direction, scalar(1e-2), scalar(applied), step], attrs).with_state(state)
        };
        let mut later = example([1, 64, 24], &["stochastic_rounding"], 1.0);
        later.attrs = later.attrs.with("start", 3072u64).with("rate", 0.3);
        vec![
            example([2, 48, 80], &["cautious"], 1.0),
            example([3, 7, 33], &[], 1.0),
            example([2, 64, 24], &["cautious", "stochastic_rounding"], 1.0),
            example([1, 5, 8], &["cautious"], 0.0),
            later,
        ]
    }
}

fn defines(call: &LowerCall<'_>, weight: &TensorRef, means: &TensorRef) -> Vec<(String, String)> {
    let direction = &call.inputs[0];
    let inside = |t: &TensorRef| t.strides[2] == 1 && t.strides[1] == t.shape[2];
    assert!(inside(weight) && direction.is_dense() && means.strides[1] == 1, "matrices lie densely: {weight}");
    let number = |name: &str| call.attrs.float(name).expect("checked by the shape rule");
    let flag = |name: &str| call.attrs.flag(name).expect("checked by the shape rule");
    let float = |x: f64| format!("{:e}f", x as f32);
    let (rows, columns) = (weight.shape[1], weight.shape[2]);
    // Rows that are no multiple of four share packs with their neighbours; a matrix begins with one.
    let aligned = (rows * columns).is_multiple_of(4)
        && weight.strides[0].is_multiple_of(4)
        && [direction, weight].iter().all(|t| t.offset.is_multiple_of(16));
    [
        ("ROWS", rows.to_string()),
        ("COLUMNS", columns.to_string()),
        ("ELEMENTS", (rows * columns).to_string()),
        ("WEIGHT_STRIDE", format!("{}ull", weight.strides[0])),
        ("MEANS_STRIDE", format!("{}ull", means.strides[0])),
        ("DIRECTION_T", device_type(direction.dtype).to_owned()),
        ("WEIGHT_T", device_type(weight.dtype).to_owned()),
        ("BETA2", float(number("beta2"))),
        ("REST2", float(1.0 - number("beta2"))),
        ("EPSILON", float(number("epsilon"))),
        ("SCALE", float(number("scale") * ((rows * columns) as f64).sqrt())),
        ("WEIGHT_DECAY", float(number("weight_decay"))),
        ("RATE", float(rule::rate(call.attrs).expect("checked by the shape rule"))),
        ("CAUTIOUS", u32::from(flag("cautious")).to_string()),
        ("STOCHASTIC", u32::from(flag("stochastic_rounding") && weight.dtype == DType::BF16).to_string()),
        ("SEED", format!("{}ull", seed_of(call.attrs).expect("checked by the shape rule"))),
        ("STREAM", format!("{}u", call.attrs.size("stream").expect("checked by the shape rule"))),
        ("ALIGNED", aligned.to_string()),
        ("THREADS", THREADS.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}
