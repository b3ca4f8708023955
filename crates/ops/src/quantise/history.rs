//! The update of the histories: the largest magnitudes of a step enter them, and the factors of the next step follow
//! from them. Magnitudes that are not finite enter nothing and suppress the update.

use graph::{Element, OpId, ValueType};
use program::Arg;
use tensor::Attrs;
use tensor::small::{OWN_STEPS, kept_factor};

use super::HEADERS;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("history.cu");

const THREADS: u32 = 512;

/// amax, history, factors, steps, clipped, sum_squares = amax_history(limits, tops)
pub struct AmaxHistory;

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let window = call.attrs.size("window").expect("checked by the shape rule");
    let (limits, tops) = (call.inputs[0].real(), call.inputs[1].int());
    let [amax, history, factors, steps, clipped, squares] = call.outputs_mut::<6>();
    let (amax, factors) = (amax.real(), factors.real());
    clipped.real()[0] = T::default();
    if amax.iter().any(|amax| !amax.is_finite()) {
        (squares.real()[0], clipped.real()[0]) = (T::from_f32(f32::NAN), T::from_f32(f32::NAN));
        amax.fill(T::default());
        return;
    }
    let over = (0..amax.len()).filter(|q| factors[*q] > T::default() && amax[*q] * factors[*q] > limits[*q]).count();
    clipped.real()[0] = T::from_f64(over as f64);
    steps.int()[0] = steps.int()[0].saturating_add(1);
    let history = history.real();
    let columns = history.len() / amax.len().max(1);
    for (q, row) in history.chunks_mut(columns.max(1)).enumerate().filter(|_| window > 0) {
        if amax[q] > T::default() {
            match row.iter().position(|entry| *entry == T::default()) {
                Some(free) => row[free] = amax[q],
                None => {
                    row.rotate_left(1);
                    row[columns - 1] = amax[q];
                }
            }
        }
        let most = row.iter().fold(T::default(), |most, entry| most.max(*entry));
        factors[q] = T::from_f32(kept_factor(most.to_f32(), tops[q], steps.int()[0]));
    }
    amax.fill(T::default());
}

impl Op for AmaxHistory {
    fn id(&self) -> OpId {
        id::AMAX_HISTORY
    }

    fn class(&self) -> Class {
        Class::Update
    }

    fn doc(&self) -> &'static str {
        "Each amax above 0 enters its history after the entries that are there, the oldest goes where all are taken; \
         factor = 2^k for the largest k with the history's largest·2^k ≤ 1.75·2^top, without entries 0 in the first two \
         steps and 1 later; amax = 0, steps + 1, clipped = number of amax·factor above their limits. An amax that is not \
         finite enters nothing and makes clipped and sum_squares NaN. limits f32 [Q], tops i32 [Q] → amax f32 [Q], history f32 [Q, n], \
         factors f32 [Q], steps i32 [1], clipped f32 [1], sum_squares f32 [1]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "quantisers", kind: "int", doc: "Q" },
            Attribute { name: "window", kind: "int", doc: "entries of a history; 0 keeps none, and all factors 0" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let (count, window) = (attrs.size("quantisers").map_err(|e| e.0)?, attrs.size("window").map_err(|e| e.0)?);
        let of = |element: Element, shape: &[usize]| {
            ValueType::new(element, shape.iter().map(|n| (*n).into()).collect::<Vec<_>>())
        };
        if inputs != [of(Element::F32, &[count]), of(Element::I32, &[count])] {
            return Err("takes limits f32 [Q] and tops i32 [Q]".into());
        }
        let one = of(Element::F32, &[1]);
        let history = of(Element::F32, &[count, window.max(1)]);
        let all = of(Element::F32, &[count]);
        Ok(vec![all.clone(), history, all, of(Element::I32, &[1]), one.clone(), one])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("part of the update")
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let window = call.attrs.size("window").expect("checked by the shape rule");
        let args = (0..2).map(Arg::Input).chain((0..6).map(Arg::Output)).collect();
        Lowered::Kernels(vec![KernelSpec {
            entry: "amax_history",
            source: SOURCE.to_owned(),
            headers: HEADERS.to_vec(),
            defines: vec![
                ("COUNT".to_owned(), call.outputs[0].len().to_string()),
                ("WINDOW".to_owned(), window.to_string()),
                ("OWN_STEPS".to_owned(), OWN_STEPS.to_string()),
                ("THREADS".to_owned(), THREADS.to_string()),
                ("FORMAT".to_owned(), "0".to_owned()),
            ],
            grid: [1, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            args,
        }])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let f32s = |shape: &[usize], values: Vec<f32>| ExampleInput::F32 { shape: shape.to_vec(), values };
        let example = |window: usize, steps: i32, amax: [f32; 4]| {
            let columns = window.max(1);
            // Full, half full, empty, one entry.
            let fill = [columns, columns / 2, 0, 1.min(window)];
            let history = fill.iter().enumerate().flat_map(|(q, filled)| {
                (0..columns).map(move |i| if i < *filled { (1 + q + i % 7) as f32 / 3.0 } else { 0.0 })
            });
            let inputs = vec![
                f32s(&[4], vec![448.0, 57_344.0, 448.0, 448.0]),
                ExampleInput::Ints { shape: vec![4], values: vec![7, 11, 7, 7] },
            ];
            let attrs = Attrs::new().with("quantisers", 4).with("window", window);
            Example::new(inputs, attrs).with_state(vec![
                f32s(&[4], amax.to_vec()),
                f32s(&[4, columns], history.collect()),
                f32s(&[4], vec![32.0, 1024.0, 0.0, 1.0]),
                ExampleInput::Ints { shape: vec![1], values: vec![steps] },
                f32s(&[1], vec![7.0]),
                f32s(&[1], vec![2.5]),
            ])
        };
        vec![
            example(1, 0, [3.0, 0.0, 0.5, 0.25]),
            example(3, 1, [20.0, 60.0, 0.0, 1e-40]),
            example(70, 5, [0.0, 1.0, 2.0, 500.0]),
            example(0, 3, [1.0, 2.0, 3.0, 4.0]),
            example(3, 1, [20.0, f32::INFINITY, 0.0, 1.0]),
        ]
    }
}
