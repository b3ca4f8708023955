//! Views along the last axis: `split` divides a tensor into column ranges, `concat` joins tensors side by side. Used
//! for merged projections (q|k|v, gate|up).

use graph::{Dim, OpId, ValueType};
use program::TensorRef;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::view::check_float;

/// The columns of `whole` cut at `sizes`.
fn column_parts(whole: &TensorRef, sizes: &[usize]) -> Vec<TensorRef> {
    let last = whole.shape.len() - 1;
    let mut start = 0;
    sizes
        .iter()
        .map(|n| {
            let mut part = whole.clone();
            part.offset += start * whole.strides[last] * whole.dtype.size();
            part.shape[last] = *n;
            start += n;
            part
        })
        .collect()
}

fn with_last(x: &ValueType, columns: usize) -> ValueType {
    let mut result = x.clone();
    *result.shape.last_mut().expect("checked by the shape rule") = Dim::Fixed(columns);
    result
}

/// parts = the columns of x, cut at `sizes`
pub struct Split;

impl Op for Split {
    fn id(&self) -> OpId {
        id::SPLIT
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "x […, N] taken apart along the last axis → one part […, sizeᵢ] for each size. A view: the parts lie inside x."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "sizes", kind: "list of int", doc: "columns of each part; their sum is N" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        check_float(x)?;
        let sizes = attrs.sizes("sizes")?;
        let columns = x.last().ok_or("the last axis must be known")?;
        if sizes.is_empty() || sizes.contains(&0) || sizes.iter().sum::<usize>() != columns {
            return Err(format!("the sizes {sizes:?} must be positive and add up to {columns}"));
        }
        Ok(sizes.into_iter().map(|n| with_last(x, n)).collect())
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        if !call.wanted[0] {
            return Gradients::Inputs(vec![None]);
        }
        let parts = call.all_dy();
        Gradients::Inputs(vec![Some(call.one(id::CONCAT, &parts, Attrs::new()))])
    }

    fn alias(&self, inputs: &[TensorRef], attrs: &Attrs) -> Vec<TensorRef> {
        column_parts(&inputs[0], &attrs.sizes("sizes").expect("checked by the shape rule"))
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("a view is never an instruction")
    }

    crate::reference!(split);

    fn examples(&self) -> Vec<Example> {
        let x = |shape: Vec<usize>| vec![ExampleInput::Normal { shape, scale: 1.0 }];
        vec![
            Example::new(x(vec![2, 3, 24]), Attrs::new().with("sizes", vec![16, 4, 4])).differentiate(&[0]),
            Example::new(x(vec![5, 8]), Attrs::new().with("sizes", vec![8])).differentiate(&[0]),
        ]
    }
}

fn split<T: Real>(call: &mut Call<'_, T>) {
    let (x, columns) = (call.inputs[0].real(), call.inputs[0].columns());
    let mut start = 0;
    for output in call.outputs.iter_mut() {
        let n = output.shape()[output.shape().len() - 1];
        for (part, row) in output.real().chunks_mut(n).zip(x.chunks(columns)) {
            part.copy_from_slice(&row[start..start + n]);
        }
        start += n;
    }
}

/// y = the inputs side by side
pub struct Concat;

impl Op for Concat {
    fn id(&self) -> OpId {
        id::CONCAT
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "The inputs […, nᵢ] side by side → […, Σ nᵢ]. A view: the inputs lie inside the result."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [first, ..] = inputs else { return Err("takes at least one input".into()) };
        check_float(first)?;
        let rows = |t: &ValueType| t.shape.split_last().map(|(_, rows)| rows.to_vec());
        if first.shape.is_empty() || inputs.iter().any(|t| rows(t) != rows(first) || t.dtype != first.dtype) {
            return Err("the inputs must agree in element type and in all axes but the last".into());
        }
        let columns = inputs.iter().map(ValueType::last).sum::<Option<usize>>();
        Ok(vec![with_last(first, columns.ok_or("the last axes must be known")?)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let columns = |call: &GradientCall<'_>, index: usize| {
            *call.emit.value(call.input(index)).shape.last().expect("checked by the shape rule")
        };
        let sizes: Vec<usize> = (0..call.node.inputs.len()).map(|index| columns(call, index)).collect();
        let dy = call.dy();
        let parts = call.emit.emit(id::SPLIT, &[dy], Attrs::new().with("sizes", sizes));
        Gradients::Inputs(parts.into_iter().zip(call.wanted).map(|(part, wanted)| wanted.then_some(part)).collect())
    }

    fn parts(&self, output: &TensorRef, inputs: &[Vec<usize>], _attrs: &Attrs) -> Vec<TensorRef> {
        let sizes: Vec<usize> = inputs.iter().map(|shape| shape[shape.len() - 1]).collect();
        column_parts(output, &sizes)
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("a view is never an instruction")
    }

    crate::reference!(concat);

    fn examples(&self) -> Vec<Example> {
        let inputs = |shapes: &[&[usize]]| {
            shapes.iter().map(|shape| ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }).collect()
        };
        vec![
            Example::new(inputs(&[&[2, 3, 8], &[2, 3, 16], &[2, 3, 8]]), Attrs::new()).differentiate(&[0, 1, 2]),
            Example::new(inputs(&[&[7, 5]]), Attrs::new()).differentiate(&[0]),
        ]
    }
}

fn concat<T: Real>(call: &mut Call<'_, T>) {
    let inputs = call.inputs;
    let [y] = call.outputs_mut();
    let columns = y.shape()[y.shape().len() - 1];
    let mut start = 0;
    for part in inputs {
        let n = part.columns();
        for (row, part) in y.real().chunks_mut(columns).zip(part.real().chunks(n)) {
            row[start..start + n].copy_from_slice(part);
        }
        start += n;
    }
}

#[cfg(test)]
mod tests {
    use program::ArenaId;
    use tensor::DType;

    use super::*;

    #[test]
    fn parts_lie_side_by_side_inside_the_whole() {
        let whole = TensorRef::dense(ArenaId(0), 128, DType::BF16, [2, 4, 24]);
        let attrs = Attrs::new().with("sizes", vec![16, 8]);
        let parts = Split.alias(std::slice::from_ref(&whole), &attrs);
        assert_eq!((parts[1].offset, parts[1].shape.as_slice()), (128 + 16 * 2, [2, 4, 8].as_slice()));
        assert_eq!(parts[1].as_matrix(), Some((8, 8, 24)));
        assert_eq!(Concat.parts(&whole, &[vec![2, 4, 16], vec![2, 4, 8]], &Attrs::new()), parts);
    }

    #[test]
    fn sizes_must_cover_the_axis() {
        let x = ValueType::new(graph::Element::Float, [Dim::Symbol("B".into()), Dim::Fixed(24)]);
        let infer = |sizes: Vec<usize>| Split.infer(std::slice::from_ref(&x), &Attrs::new().with("sizes", sizes));
        assert_eq!(infer(vec![20, 4]).unwrap()[1].to_string(), "float[B, 4]");
        assert!(infer(vec![20, 5]).unwrap_err().contains("add up to 24"));
    }
}
