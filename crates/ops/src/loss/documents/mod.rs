//! Sums of token values over the documents of a micro-batch, and their way back to the tokens: each is the other's
//! gradient. Documents are numbered over the micro-batch, and a sum takes every n-th of them: of pairs the first sides,
//! or the second.

use graph::{Element, OpId, ValueType};
use tensor::Attrs;

use super::batch_kernel;
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("documents.cu");
const THREADS: usize = 256;
const WARP: usize = 32;

const ATTRIBUTES: &[Attribute] = &[
    Attribute { name: "every", kind: "int", doc: "documents from one that is summed to the next" },
    Attribute { name: "at", kind: "int", doc: "number of the first document that is summed, below `every`" },
];

fn steps(attrs: &Attrs) -> Result<[usize; 2], String> {
    let [every, at] = [attrs.size("every")?, attrs.size("at")?];
    if every == 0 || at >= every {
        return Err(format!("`every` is {every} and `at` {at}, expected `at` below `every`"));
    }
    Ok([every, at])
}

fn infer(inputs: &[ValueType], attrs: &Attrs, names: &str) -> Result<Vec<ValueType>, String> {
    let [x, documents] = inputs else { return Err(format!("takes {names}")) };
    steps(attrs)?;
    if x.dtype != Element::F32 || documents.dtype != Element::I32 || x.shape != documents.shape {
        return Err(format!("{names} must be f32 and i32 of the same shape"));
    }
    Ok(vec![x.clone()])
}

/// The place of a document's sum among `count`; none for padding and for documents that are not summed.
fn place(document: i32, [every, at]: [usize; 2], count: usize) -> Option<usize> {
    let document = usize::try_from(document).ok()?;
    (document % every == at).then_some(document / every).filter(|place| *place < count)
}

fn numbers(call: &LowerCall<'_>) -> [(&'static str, usize); 4] {
    let [every, at] = steps(call.attrs).expect("checked by the shape rule");
    [("COUNT", call.inputs[0].len()), ("EVERY", every), ("AT", at), ("THREADS", THREADS)]
}

fn examples() -> Vec<Example> {
    // Documents of several lengths over two rows, each followed by padding.
    let documents = vec![0, 0, 0, 1, 2, 2, -1, -1, 3, 3, 3, 3, 3, 4, 4, -1];
    let long: Vec<i32> = (0..300).map(|t| if t < 290 { t / 70 } else { -1 }).collect();
    let example = |shape: &[usize], documents: &[i32], every: usize, at: usize| {
        let shape = shape.to_vec();
        Example::new(
            vec![
                ExampleInput::NormalF32 { shape: shape.clone(), scale: 1.0 },
                ExampleInput::Ints { shape, values: documents.to_vec() },
            ],
            Attrs::new().with("every", every).with("at", at),
        )
        .differentiate(&[0])
    };
    vec![
        example(&[2, 8], &documents, 1, 0),
        example(&[2, 8], &documents, 2, 0),
        example(&[2, 8], &documents, 2, 1),
        example(&[3, 100], &long, 2, 1),
    ]
}

/// sums = document_sum(x, documents)
pub struct DocumentSum;

fn sum<T: Real>(call: &mut Call<'_, T>) {
    let steps = steps(call.attrs).expect("checked by the shape rule");
    let (x, documents) = (call.inputs[0].real(), call.inputs[1].int());
    let [sums] = call.outputs_mut();
    let sums = sums.real();
    // In f64: the sum should not depend on how long the document is.
    let mut totals = vec![0.0; sums.len()];
    for (x, document) in x.iter().zip(documents) {
        if let Some(place) = place(*document, steps, totals.len()) {
            totals[place] += x.to_f64();
        }
    }
    sums.iter_mut().zip(totals).for_each(|(sum, total)| *sum = T::from_f64(total));
}

impl Op for DocumentSum {
    fn id(&self) -> OpId {
        id::DOCUMENT_SUM
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "sums[p] = Σ x over the tokens of document every·p + at, p counted over all rows; 0 where there is none. Tokens of a \
         document are consecutive. x f32 […], documents i32 […], below 0 for tokens of none → like x."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        infer(inputs, attrs, "x and documents")
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (documents, dy, attrs) = (call.input(1), call.dy(), call.node.attrs.clone());
        Gradients::Inputs(vec![call.wanted(0, id::DOCUMENT_SPREAD, &[dy, documents], attrs), None])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (numbers, count) = (numbers(call), call.inputs[0].len());
        let kernel = |entry, threads: usize| {
            batch_kernel(entry, SOURCE, &[], [threads.div_ceil(THREADS), THREADS], &numbers, call)
        };
        Lowered::Kernels(vec![kernel("clear_sums", count), kernel("document_sum", count * WARP)])
    }

    crate::reference!(sum);

    fn examples(&self) -> Vec<Example> {
        examples()
    }
}

/// x = document_spread(sums, documents)
pub struct DocumentSpread;

fn spread<T: Real>(call: &mut Call<'_, T>) {
    let steps = steps(call.attrs).expect("checked by the shape rule");
    let (sums, documents) = (call.inputs[0].real(), call.inputs[1].int());
    let [x] = call.outputs_mut();
    for (x, document) in x.real().iter_mut().zip(documents) {
        *x = place(*document, steps, sums.len()).map_or(T::default(), |place| sums[place]);
    }
}

impl Op for DocumentSpread {
    fn id(&self) -> OpId {
        id::DOCUMENT_SPREAD
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Each token's x = sums[p] of its document every·p + at; 0 for tokens of others. sums f32 […], documents i32 […] → \
         like sums."
    }

    fn attributes(&self) -> &'static [Attribute] {
        ATTRIBUTES
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        infer(inputs, attrs, "sums and documents")
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (documents, dy, attrs) = (call.input(1), call.dy(), call.node.attrs.clone());
        Gradients::Inputs(vec![call.wanted(0, id::DOCUMENT_SUM, &[dy, documents], attrs), None])
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let grid = [call.inputs[0].len().div_ceil(THREADS), THREADS];
        Lowered::Kernels(vec![batch_kernel("document_spread", SOURCE, &[], grid, &numbers(call), call)])
    }

    crate::reference!(spread);

    fn examples(&self) -> Vec<Example> {
        examples()
    }
}
