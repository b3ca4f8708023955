//! Views between a row of H·D columns and H heads of D columns.

use graph::{Dim, OpId, ValueType};
use program::TensorRef;
use tensor::Attrs;

use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;
use crate::view::{apart, check_float, copy, together};

/// […, H·D] → […, H, D]
pub struct SplitHeads;

impl Op for SplitHeads {
    fn id(&self) -> OpId {
        id::SPLIT_HEADS
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "x […, H·D] seen as heads → […, H, D]. A view."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "head_dim", kind: "int", doc: "D, the columns of one head" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        check_float(x)?;
        let head_dim = attrs.size("head_dim")?;
        if head_dim == 1 && !x.shape.is_empty() {
            let shape: Vec<Dim> = x.shape.iter().cloned().chain([Dim::Fixed(1)]).collect();
            return Ok(vec![ValueType::new(x.dtype, shape)]);
        }
        let columns = x.last().ok_or("the last axis must be known")?;
        if head_dim == 0 || columns % head_dim != 0 {
            return Err(format!("{columns} columns are no multiple of head_dim {head_dim}"));
        }
        let mut heads = x.clone();
        *heads.shape.last_mut().expect("the last axis is known") = Dim::Fixed(columns / head_dim);
        heads.shape.push(Dim::Fixed(head_dim));
        Ok(vec![heads])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::MERGE_HEADS, &[dy], Attrs::new())])
    }

    fn alias(&self, inputs: &[TensorRef], attrs: &Attrs) -> Vec<TensorRef> {
        let head_dim = attrs.size("head_dim").expect("checked by the shape rule");
        vec![apart(&inputs[0], inputs[0].shape.len() - 1, head_dim)]
    }

    /// Returns the layout of the input that makes this output a view; nothing when no layout does.
    fn parts(&self, output: &TensorRef, _inputs: &[Vec<usize>], _attrs: &Attrs) -> Vec<TensorRef> {
        together(output, output.shape.len() - 2).into_iter().collect()
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("a view is never an instruction")
    }

    crate::reference!(copy);

    fn examples(&self) -> Vec<Example> {
        let x = vec![ExampleInput::Normal { shape: vec![2, 3, 24], scale: 1.0 }];
        vec![Example::new(x, Attrs::new().with("head_dim", 8)).differentiate(&[0])]
    }
}

/// […, H, D] → […, H·D]
pub struct MergeHeads;

impl Op for MergeHeads {
    fn id(&self) -> OpId {
        id::MERGE_HEADS
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "x […, H, D] seen as rows → […, H·D]. A view."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        check_float(x)?;
        // One column a head is the head itself, be its number known or not.
        if let [heads @ .., Dim::Fixed(1)] = x.shape.as_slice()
            && !heads.is_empty()
        {
            return Ok(vec![ValueType::new(x.dtype, heads.to_vec())]);
        }
        let [rows @ .., Dim::Fixed(heads), Dim::Fixed(head_dim)] = x.shape.as_slice() else {
            return Err("the input must be […, heads, head_dim], both known, or one column a head".into());
        };
        let shape: Vec<Dim> = rows.iter().cloned().chain([Dim::Fixed(heads * head_dim)]).collect();
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let head_dim = *call.emit.value(call.input(0)).shape.last().expect("checked by the shape rule");
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::SPLIT_HEADS, &[dy], Attrs::new().with("head_dim", head_dim))])
    }

    /// Returns nothing when the heads of a token are not contiguous.
    fn alias(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Vec<TensorRef> {
        together(&inputs[0], inputs[0].shape.len() - 2).into_iter().collect()
    }

    /// Returns the layout of the input that makes this output a view.
    fn parts(&self, output: &TensorRef, inputs: &[Vec<usize>], _attrs: &Attrs) -> Vec<TensorRef> {
        let head_dim = *inputs[0].last().expect("checked by the shape rule");
        vec![apart(output, output.shape.len() - 1, head_dim)]
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("a view is never an instruction")
    }

    crate::reference!(copy);

    fn examples(&self) -> Vec<Example> {
        let of = |shape: &[usize]| {
            let x = vec![ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 }];
            Example::new(x, Attrs::new()).differentiate(&[0])
        };
        vec![of(&[2, 3, 3, 8]), of(&[2, 5, 1])]
    }
}

#[cfg(test)]
mod tests {
    use program::ArenaId;
    use tensor::DType;

    use super::*;

    #[test]
    fn heads_of_a_slice_keep_its_row_stride_and_come_back() {
        let slice = TensorRef { strides: vec![768, 96, 1], ..TensorRef::dense(ArenaId(0), 64, DType::F32, [2, 8, 32]) };
        let heads = SplitHeads.alias(std::slice::from_ref(&slice), &Attrs::new().with("head_dim", 8)).remove(0);
        assert_eq!(
            (heads.shape.as_slice(), heads.strides.as_slice()),
            ([2, 8, 4, 8].as_slice(), [768, 96, 8, 1].as_slice())
        );
        assert_eq!(MergeHeads.alias(std::slice::from_ref(&heads), &Attrs::new()), std::slice::from_ref(&slice));
        assert_eq!(
            MergeHeads.parts(&slice, std::slice::from_ref(&heads.shape), &Attrs::new()),
            std::slice::from_ref(&heads)
        );
        let by_head = TensorRef { strides: vec![1024, 8, 256, 1], ..heads };
        assert!(MergeHeads.alias(&[by_head], &Attrs::new()).is_empty());
    }
}
