//! Counter-based dropout: whether an element is kept is a function of (seed, stream, micro-step, index). The mask is
//! recomputed wherever it is needed, so nothing is saved and recomputation does not change a bit.

use graph::{Element, OpId, ValueType};
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
use crate::registry::id;
use crate::seed::seed_of;
use crate::sequence::{FIRST, FIRST_PER_PART};
use crate::vector::{Loop, vectorised};

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

/// The operation y = dropout(x, micro_step).
pub struct Dropout;

/// Returns the key; 0 until the compiler has set one.
fn seed(attrs: &Attrs) -> Result<u64, String> {
    if attrs.get("seed").is_some() { seed_of(attrs) } else { Ok(0) }
}

/// The numbers that decide in one micro-step which elements of one place are dropped.
pub(crate) struct Dice {
    /// The probability and the factor 1/(1 − p), both rounded to f32 as the kernels see them.
    p: f32,
    pub scale: f32,
    pub seed: u64,
    pub stream: u32,
    step: u32,
    /// Index of the first element in the tensor of which this is a part.
    first: u64,
}

impl Dice {
    /// The attributes of operations that drop elements.
    pub const ATTRIBUTES: &'static [Attribute] = &Dice::OWN;

    const OWN: [Attribute; 3] = [
        Attribute { name: "p", kind: "float", doc: "probability of dropping an element, in [0, 1)" },
        Attribute { name: "seed", kind: "int?", doc: "key of the random numbers; models leave it to the compiler" },
        Attribute { name: "stream", kind: "int?", doc: "keeps the masks of different places apart; likewise" },
    ];

    /// Returns its own attributes, and one more.
    pub const fn attributes_and(other: Attribute) -> [Attribute; 4] {
        let [p, seed, stream] = Dice::OWN;
        [p, seed, stream, other]
    }

    /// Checks the tensor that is dropped from, the micro-step and the attributes, as part of a shape rule.
    pub fn check(x: &ValueType, step: &ValueType, attrs: &Attrs) -> Result<(), String> {
        if !x.dtype.is_float() || *step != ValueType::new(Element::I32, [1.into()]) {
            return Err("x must be floating point, the micro-step i32[1]".into());
        }
        let p = attrs.float("p")?;
        if !(0.0..1.0).contains(&p) {
            return Err(format!("attribute `p` is {p}, expected a number in [0, 1)"));
        }
        seed(attrs)?;
        for name in ["first", "first_per_part"] {
            if attrs.optional_int(name)?.is_some_and(|first| first < 0) {
                return Err(format!("`{name}` is negative"));
            }
        }
        match attrs.optional_int("stream")? {
            Some(stream) if u32::try_from(stream).is_err() => Err(format!("`stream` is {stream}, expected u32")),
            _ => Ok(()),
        }
    }

    pub fn of(attrs: &Attrs, micro_step: i32) -> Dice {
        let p = attrs.float("p").expect("checked by the shape rule");
        Dice {
            p: p as f32,
            scale: (1.0 / (1.0 - p)) as f32,
            seed: seed(attrs).expect("checked by the shape rule"),
            stream: attrs.optional_int("stream").expect("checked by the shape rule").unwrap_or(0) as u32,
            step: micro_step as u32,
            first: attrs.optional_int("first").expect("checked by the shape rule").unwrap_or(0) as u64,
        }
    }

    #[inline(always)]
    fn kept(&self, word: u32) -> bool {
        philox::unit(word) >= self.p
    }

    /// The smallest random word that keeps an element; none where nothing is kept. A word's top 24 bits decide.
    pub fn least(&self) -> Option<u32> {
        let least = (self.p as f64 * (1u64 << 24) as f64).ceil() as u64;
        u32::try_from(least << 8).ok()
    }

    /// Writes zeros for the dropped ones of `values`, which begin at index `first` of the tensor.
    pub fn drop<T: Real>(&self, first: usize, values: &mut [T]) {
        vectorised(DropAll, (self, self.first + first as u64, values));
    }
}

struct DropAll;

impl<'a, T: Real> Loop<(&'a Dice, u64, &'a mut [T])> for DropAll {
    type Output = ();

    #[inline(always)]
    fn run((dice, place, values): (&'a Dice, u64, &'a mut [T])) {
        let (mut block, mut skip) = (place / WORDS as u64, (place % WORDS as u64) as usize);
        let mut rest = values;
        while !rest.is_empty() {
            let words = philox::run_of_words(dice.seed, Purpose::Dropout, dice.stream, dice.step, block);
            let count = (words.len() - skip).min(rest.len());
            let (values, after) = rest.split_at_mut(count);
            for (value, word) in values.iter_mut().zip(&words[skip..]) {
                *value = if dice.kept(*word) { *value } else { T::default() };
            }
            (block, skip, rest) = (block + philox::BLOCKS as u64, 0, after);
        }
    }
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let x = call.inputs[0].real();
    let dice = Dice::of(call.attrs, call.inputs[1].int()[0]);
    let scale = T::from_f32(dice.scale);
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).enumerate().for_each(|(chunk, (y, x))| {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = *x * scale);
        dice.drop(chunk * CHUNK, y);
    });
}

impl Op for Dropout {
    fn id(&self) -> OpId {
        id::DROPOUT
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
        const OF_DICE: [Attribute; 3] = Dice::OWN;
        const ALL: &[Attribute] = &[OF_DICE[0], OF_DICE[1], OF_DICE[2], FIRST, FIRST_PER_PART];
        ALL
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, step] = inputs else { return Err("takes x and the micro-step".into()) };
        Dice::check(x, step, attrs)?;
        Ok(vec![x.clone()])
    }

    fn unchanged(&self, attrs: &Attrs) -> bool {
        attrs.float("p").is_ok_and(|p| p == 0.0)
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (step, dy, attrs) = (call.input(1), call.dy(), call.node.attrs.clone());
        Gradients::Inputs(vec![call.wanted(0, id::DROPOUT, &[dy, step], attrs), None])
    }

    /// A block of random words costs about 60 integer operations.
    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let elements = outputs[0].len() as f64;
        Cost { flops: 17.0 * elements, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let dice = Dice::of(call.attrs, 0);
        let columns = x.shape.last().copied().unwrap_or(1);
        let per_part = call.attrs.optional_int("first_per_part").expect("checked by the shape rule");
        let first = match per_part {
            Some(step) => Arg::PerPart { step },
            None => Arg::I64(dice.first as i64),
        };
        // A block of random words is one access where parts begin with a block.
        let whole = [per_part.unwrap_or(0), dice.first as i64].iter().all(|first| first % WORDS as i64 == 0);
        let width = if whole && row_width(&[x, y]) >= WORDS { WORDS } else { 1 };
        let mut defines: Vec<(String, String)> = [
            ("COUNT", format!("{}ull", x.len())),
            ("COLUMNS", columns.to_string()),
            ("WIDTH", width.to_string()),
            ("P", format!("{:e}f", dice.p)),
            ("SCALE", format!("{:e}f", dice.scale)),
            ("SEED", format!("{}ull", dice.seed)),
            ("STREAM", format!("{}u", dice.stream)),
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
            // One block of random words more where the part begins within one.
            grid: [(x.len() + WORDS - width).div_ceil(THREADS * WORDS) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0), first],
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
        let part = |first: u64| {
            let mut part = example(&[1, 6, 64], 0.25, 3);
            part.attrs = part.attrs.with("first", first);
            part
        };
        vec![
            example(&[2, 3, 64], 0.25, 42),
            example(&[5, 33], 0.5, u64::MAX),
            example(&[9], 0.0, 1),
            part(384),
            part(387),
        ]
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
