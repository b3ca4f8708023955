//! Queries that grow with their position, so that attention over long contexts stays sharp (Llama 4, Ministral 3).

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("position_scale.cu");
const HEADERS: &[(&str, &str)] = &[("types.cuh", include_str!("../cuda/types.cuh"))];

const THREADS: usize = 256;

/// y = x·(1 + beta·ln(1 + ⌊position/original⌋))
pub struct PositionScale;

fn rule(attrs: &Attrs) -> Result<(f64, usize), String> {
    let (beta, original) = (attrs.float("beta")?, attrs.size("original")?);
    if original == 0 || !beta.is_finite() {
        return Err(format!("`original` is {original}, `beta` {beta}: expected a number above 0 and a number"));
    }
    Ok((beta, original))
}

impl Op for PositionScale {
    fn id(&self) -> OpId {
        id::POSITION_SCALE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "y = x·(1 + beta·ln(1 + ⌊position/original⌋)), the factor in f32. x [B, T, heads, D], positions i32 [B, T] → like \
         x. Its own gradient."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "beta", kind: "float", doc: "how much a query grows" },
            Attribute { name: "original", kind: "int", doc: "positions of each level" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, positions] = inputs else { return Err("takes x and positions".into()) };
        rule(attrs)?;
        let [batch, tokens, Dim::Fixed(_), Dim::Fixed(_)] = x.shape.as_slice() else {
            return Err("x must be [B, T, heads, D], heads and D known".into());
        };
        if !x.dtype.is_float() || positions.dtype != Element::I32 || positions.shape != [batch.clone(), tokens.clone()]
        {
            return Err(format!("x must be floating point, the positions i32 [{batch}, {tokens}]"));
        }
        Ok(vec![x.clone()])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let inputs = [call.dy(), call.input(1)];
        let attrs = call.node.attrs.clone();
        Gradients::Inputs(vec![call.wanted(0, id::POSITION_SCALE, &inputs, attrs), None])
    }

    fn row_by_row(&self, _inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: 2, whole: Vec::new() })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, y) = (&call.inputs[0], &call.outputs[0]);
        let (beta, original) = rule(call.attrs).expect("checked by the shape rule");
        let [batch, tokens, heads, columns] = x.shape[..] else { unreachable!("the shape rule requires four axes") };
        let numbers = [
            ("BATCH", batch),
            ("TOKENS", tokens),
            ("HEADS", heads),
            ("COLUMNS", columns),
            ("ORIGINAL", original),
            ("THREADS", THREADS),
        ];
        let mut defines: Vec<(String, String)> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.push(("BETA".to_owned(), format!("{beta:e}f")));
        for (name, tensor) in [("X", x), ("Y", y)] {
            defines.push((format!("{name}_T"), device_type(tensor.dtype).to_owned()));
            for (axis, stride) in ["B", "S", "H", "C"].iter().zip(&tensor.strides) {
                defines.push((format!("{name}_{axis}"), stride.to_string()));
            }
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "position_scale",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines,
            grid: [(batch * tokens) as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(scale);

    fn examples(&self) -> Vec<Example> {
        let example = |x: [usize; 4], positions: Vec<i32>| {
            let x_input = ExampleInput::Normal { shape: x.to_vec(), scale: 1.0 };
            let positions = ExampleInput::Ints { shape: x[..2].to_vec(), values: positions };
            Example::new(vec![x_input, positions], Attrs::new().with("beta", 0.3).with("original", 12))
                .differentiate(&[0])
        };
        vec![example([2, 3, 2, 8], vec![0, 11, 12, 23, 24, 400]), example([1, 2, 5, 100], vec![35, 36])]
    }
}

fn scale<T: Real>(call: &mut Call<'_, T>) {
    let (beta, original) = rule(call.attrs).expect("checked by the shape rule");
    let [x, positions] = call.inputs else { unreachable!("the shape rule requires two inputs") };
    let row = x.shape[2] * x.shape[3];
    let (x, positions) = (x.real(), positions.int());
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(row).zip(x.par_chunks(row)).zip(positions).for_each(|((y, x), position)| {
        let level = (*position).max(0) as usize / original;
        let factor = T::from_f64(1.0) + T::from_f64(beta) * T::from_f64(1.0 + level as f64).ln();
        y.iter_mut().zip(x).for_each(|(y, x)| *y = *x * factor);
    });
}
