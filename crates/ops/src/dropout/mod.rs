//! Dropout by counter: whether an element is kept is a function of (seed, stream, micro-step, index).
//! The mask is computed again wherever it is needed, so nothing is saved and recomputing changes no bit.

use graph::{Element, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;
use tensor::philox::{self, Purpose};

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, defines_for};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::seed::seed_of;

const SOURCE: &str = include_str!("dropout.cu");
const HEADERS: &[(&str, &str)] = &[
    ("types.cuh", include_str!("../cuda/types.cuh")),
    ("pack.cuh", include_str!("../cuda/pack.cuh")),
    ("philox.cuh", include_str!("../cuda/philox.cuh")),
];

const THREADS: usize = 256;
/// Elements of one block of random words.
const WORDS: usize = 4;

/// Elements of one task on the CPU.
const CHUNK: usize = 4096;

/// y = dropout(x, micro_step)
pub struct Dropout;

/// p and the factor 1/(1 − p), both rounded to f32 as the kernel sees them.
fn probability(attrs: &Attrs) -> (f32, f32) {
    let p = attrs.float("p").expect("checked by the shape rule");
    (p as f32, (1.0 / (1.0 - p)) as f32)
}

/// The key; 0 until the compiler has set one.
fn seed(attrs: &Attrs) -> Result<u64, String> {
    if attrs.get("seed").is_some() { seed_of(attrs) } else { Ok(0) }
}

fn stream(attrs: &Attrs) -> u32 {
    attrs.optional_int("stream").expect("checked by the shape rule").unwrap_or(0) as u32
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (p, scale) = probability(call.attrs);
    let (seed, stream) = (seed(call.attrs).expect("checked by the shape rule"), stream(call.attrs));
    let (x, step) = (call.inputs[0].real(), call.inputs[1].int()[0] as u32);
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).enumerate().for_each(|(chunk, (y, x))| {
        for (i, (y, x)) in y.chunks_mut(WORDS).zip(x.chunks(WORDS)).enumerate() {
            let block = (chunk * CHUNK / WORDS + i) as u64;
            let words = philox::words(seed, Purpose::Dropout, stream, step, block);
            for ((y, x), word) in y.iter_mut().zip(x).zip(words) {
                *y = if philox::unit(word) >= p { *x * T::from_f32(scale) } else { T::default() };
            }
        }
    });
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn class(&self) -> Class {
        // Reads the element's index, which no expression does: not fused with neighbours.
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "x/(1 − p) where kept, else 0; kept is decided by (seed, stream, micro_step, index of the element). Its own \
         gradient. x […], micro_step i32 [1] → like x."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "p", kind: "float", doc: "probability of dropping an element, in [0, 1)" },
            Attribute { name: "seed", kind: "int?", doc: "key of the random numbers; models leave it to the compiler" },
            Attribute { name: "stream", kind: "int?", doc: "keeps the masks of different places apart; likewise" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, step] = inputs else { return Err("takes x and the micro-step".into()) };
        if !x.dtype.is_float() || *step != ValueType::new(Element::I32, [1.into()]) {
            return Err("x must be floating point, the micro-step i32[1]".into());
        }
        let p = attrs.float("p").map_err(|e| e.0)?;
        if !(0.0..1.0).contains(&p) {
            return Err(format!("attribute `p` is {p}, expected a number in [0, 1)"));
        }
        seed(attrs)?;
        match attrs.optional_int("stream").map_err(|e| e.0)? {
            Some(stream) if u32::try_from(stream).is_err() => {
                return Err(format!("`stream` is {stream}, expected u32"));
            }
            _ => {}
        }
        Ok(vec![x.clone()])
    }

    fn unchanged(&self, attrs: &Attrs) -> bool {
        attrs.float("p").is_ok_and(|p| p == 0.0)
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (step, dy, attrs) = (call.input(1), call.dy(), call.node.attrs.clone());
        Gradients::Inputs(vec![call.wanted(0, "dropout", &[dy, step], attrs), None])
    }

    /// A block of random words costs about 60 integer operations.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let elements = outputs[0].len() as f64;
        Cost { flops: 17.0 * elements, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let (p, scale) = probability(call.attrs);
        let columns = x.shape.last().copied().unwrap_or(1);
        let width = if row_width(&[x, y]) >= WORDS { WORDS } else { 1 };
        let seed = seed(call.attrs).expect("checked by the shape rule");
        let mut defines: Vec<(String, String)> = [
            ("COUNT", format!("{}ull", x.len())),
            ("COLUMNS", columns.to_string()),
            ("WIDTH", width.to_string()),
            ("P", format!("{p:e}f")),
            ("SCALE", format!("{scale:e}f")),
            ("SEED", format!("{seed}ull")),
            ("STREAM", format!("{}u", stream(call.attrs))),
            ("THREADS", THREADS.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        defines.extend(defines_for("X", x));
        defines.extend(defines_for("Y", y));
        Lowered::Kernels(vec![KernelSpec {
            entry: "dropout",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [x.len().div_ceil(THREADS * WORDS) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: &[usize], p: f64, seed: u64| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            let step = ExampleInput::Ints { shape: vec![1], values: vec![7] };
            let attrs = Attrs::new().with("p", p).with("seed", seed).with("stream", 5);
            Example::new(vec![x, step], attrs).differentiate(&[0])
        };
        vec![example(&[2, 3, 64], 0.25, 42), example(&[5, 33], 0.5, u64::MAX), example(&[9], 0.0, 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    fn kept(step: i32, stream: u64) -> Vec<bool> {
        let n = 40_000;
        let attrs = Attrs::new().with("p", 0.1).with("seed", 9).with("stream", stream);
        let (x, step) = (Array::Real(vec![1.0f32; n]), Array::Int(vec![step]));
        let mut y = [(vec![n], Array::Real(vec![0.0; n]))];
        apply(&Dropout, &attrs, &[(&[n], &x), (&[1], &step)], &mut y);
        assert!(y[0].1.real().iter().all(|v| *v == 0.0 || *v == (1.0f64 / 0.9) as f32));
        y[0].1.real().iter().map(|v| *v != 0.0).collect()
    }

    #[test]
    fn drops_the_asked_share_and_masks_are_independent() {
        let (first, again, next, other) = (kept(3, 0), kept(3, 0), kept(4, 0), kept(3, 1));
        assert_eq!(first, again);
        let share = |mask: &[bool]| mask.iter().filter(|k| !**k).count() as f64 / mask.len() as f64;
        for mask in [&first, &next, &other] {
            assert!((share(mask) - 0.1).abs() < 0.006, "{}", share(mask));
        }
        for mask in [&next, &other] {
            let both = first.iter().zip(mask.iter()).filter(|(a, b)| !**a && !**b).count() as f64 / 40_000.0;
            assert!((both - 0.01).abs() < 0.002, "{both}");
        }
    }

    #[test]
    fn a_place_decides_and_nothing_else() {
        let word = philox::word(9, Purpose::Dropout, 0, 3, 1234);
        assert_eq!(kept(3, 0)[1234], philox::unit(word) >= 0.1);
    }
}
