//! The update of the biases by which experts are chosen (loss-free balancing, Wang et al. 2024, arXiv 2408.15664): those of
//! experts with more than an even load fall by one rate, those of the others rise by it. Does not know what a load is.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("even_bias.cu");
const THREADS: u32 = 256;

/// bias ← even_bias(excess, applied)
pub struct EvenBias;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let rate = T::from_f64(call.attrs.float("rate").expect("checked by the shape rule"));
    let (excess, applied) = (call.inputs[0].real(), call.inputs[1].real()[0].to_f64() != 0.0);
    let [bias] = call.outputs_mut();
    for (bias, excess) in bias.real().iter_mut().zip(excess).filter(|_| applied) {
        let excess = excess.to_f64();
        if excess > 0.0 {
            *bias -= rate;
        } else if excess < 0.0 {
            *bias += rate;
        }
    }
}

impl Op for EvenBias {
    fn id(&self) -> OpId {
        id::EVEN_BIAS
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "bias ← bias − rate·sign(excess), as it is where the excess is 0 and where applied is 0. excess f32 [n] (the sum of \
         `load_excess` over a step), applied f32 [1] → bias f32 [n]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "rate", kind: "float", doc: "how far a bias moves in a step" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [excess, applied] = inputs else { return Err("takes the excess and applied".into()) };
        attrs.float("rate")?;
        let is_flat = excess.dtype == Element::F32 && excess.shape.len() == 1;
        if !is_flat || *applied != ValueType::new(Element::F32, [1.into()]) {
            return Err("the excess must be f32 and flat, applied f32[1]".into());
        }
        Ok(vec![excess.clone()])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    /// Biases are read and written.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: outputs[0].len() as f64, bytes: (inputs[0].bytes() + 2 * outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (excess, bias) = (&call.inputs[0], &call.outputs[0]);
        assert!(excess.is_dense() && bias.is_dense(), "flat arenas have no gaps: {excess}, {bias}");
        let rate = call.attrs.float("rate").expect("checked by the shape rule");
        Lowered::Kernels(vec![KernelSpec {
            entry: "even_bias",
            source: SOURCE.to_owned(),
            headers: Vec::new(),
            defines: vec![
                ("COUNT".to_owned(), bias.len().to_string()),
                ("RATE".to_owned(), format!("{:e}f", rate as f32)),
                ("THREADS".to_owned(), THREADS.to_string()),
            ],
            grid: [(bias.len() as u32).div_ceil(THREADS), 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |n: usize, applied: f32| {
            let values = (0..n).map(|i| [3.0, -2.0, 0.0, 1e-3, -7e5][i % 5]).collect();
            let inputs = vec![
                ExampleInput::F32 { shape: vec![n], values },
                ExampleInput::F32 { shape: vec![1], values: vec![applied] },
            ];
            let state = ExampleInput::NormalF32 { shape: vec![n], scale: 1.0 };
            Example::new(inputs, Attrs::new().with("rate", 0.001)).with_state(vec![state])
        };
        vec![example(5, 1.0), example(300, 1.0), example(9, 0.0)]
    }
}
