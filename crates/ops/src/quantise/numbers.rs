//! The numbers that codes of eight bits stand for.

use graph::{Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::{Attrs, DType};

use super::HEADERS;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type};
use crate::op::{Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("decode.cu");
const PACK_HEADER: (&str, &str) = ("pack.cuh", include_str!("../cuda/pack.cuh"));

const THREADS: u32 = 256;

/// Codes that a thread reads at once, and bytes.
const PACK: usize = 16;

/// Number of elements in a block.
const BLOCK: usize = 16 * THREADS as usize;

/// x = decode(codes, scale)
pub struct Decode;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let (codes, scales) = (call.inputs[0].real(), call.inputs[1].real());
    let each = (codes.len() / scales.len()).max(1);
    let [x] = call.outputs_mut();
    for ((x, codes), scale) in x.real().chunks_mut(each).zip(codes.chunks(each)).zip(scales) {
        x.iter_mut().zip(codes).for_each(|(x, code)| *x = *code * *scale);
    }
}

impl Op for Decode {
    fn id(&self) -> OpId {
        id::DECODE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "The numbers that codes stand for: code·scale, exact. codes […], scale f32 [1], or f32 [G] for G matrices one after \
         another → float […]."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        match inputs {
            [codes, scales] if is_codes(codes) && scales.dtype == Element::F32 && scales.last().is_some() => {
                super::check_groups(codes, scales.last().unwrap_or(1))?;
                Ok(vec![ValueType::new(Element::Float, codes.shape.clone())])
            }
            _ => Err("takes codes of eight bits and their f32 scales".into()),
        }
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of a precision recipe, after differentiation")
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: (inputs[0].bytes() + outputs[0].bytes()) as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (codes, x) = (&call.inputs[0], &call.outputs[0]);
        assert!(codes.is_dense() && x.is_dense(), "codes and numbers lie densely: {codes}, {x}");
        let each = (x.len() / call.inputs[1].len()).max(1);
        let mut defines = vec![
            ("X_T".to_owned(), device_type(x.dtype).to_owned()),
            ("COUNT".to_owned(), x.len().to_string()),
            ("EACH".to_owned(), each.to_string()),
            ("FORMAT".to_owned(), u32::from(codes.dtype == DType::E5M2).to_string()),
            ("THREADS".to_owned(), THREADS.to_string()),
        ];
        if each.is_multiple_of(PACK) && [codes, x].iter().all(|at| at.offset.is_multiple_of(PACK)) {
            defines.push(("PACKS".to_owned(), "1".to_owned()));
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "decode",
            source: SOURCE.to_owned(),
            headers: [HEADERS, &[PACK_HEADER]].concat(),
            defines,
            grid: [x.len().div_ceil(BLOCK) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Output(0)],
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |dtype: DType, shape: &[usize], scales: &[f32]| {
            let codes = ExampleInput::Codes { dtype, shape: shape.to_vec(), scale: 20.0 };
            let scales = ExampleInput::F32 { shape: vec![scales.len()], values: scales.to_vec() };
            Example::new(vec![codes, scales], Attrs::new())
        };
        vec![
            example(DType::E4M3, &[3, 5, 32], &[0.125]),
            example(DType::E5M2, &[70, 67], &[2.0]),
            example(DType::E4M3, &[3, 70, 32], &[0.125, 4.0, 0.5]),
        ]
    }
}

/// True if a value is codes of eight bits.
pub(crate) fn is_codes(of: &ValueType) -> bool {
    matches!(of.dtype, Element::Fixed(DType::E4M3 | DType::E5M2))
}
