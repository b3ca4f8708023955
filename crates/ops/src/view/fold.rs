//! Views that take the axis before the last apart into groups of neighbors, and put it together again: patches of an
//! image as blocks that make one token each.

use graph::{Dim, OpId, ValueType};
use program::TensorRef;
use tensor::Attrs;

use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;
use crate::view::{apart, check_float, copy, together};

const SIZE: Attribute = Attribute { name: "size", kind: "int", doc: "neighbors of a group" };

fn size_of(attrs: &Attrs) -> usize {
    attrs.size("size").expect("checked by the shape rule")
}

/// […, N, C] → […, N/size, size, C]
pub struct FoldRows;

impl Op for FoldRows {
    fn id(&self) -> OpId {
        id::FOLD_ROWS
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "x […, N, C] seen as groups of neighbors → […, N/size, size, C]. A view."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[SIZE]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        check_float(x)?;
        let size = attrs.size("size")?;
        let [before @ .., rows, columns] = x.shape.as_slice() else { return Err("x must be […, N, C]".into()) };
        let grouped = rows.grouped(size).ok_or_else(|| format!("{rows} rows do not make groups of {size}"))?;
        let shape: Vec<Dim> = [before, &[grouped, Dim::Fixed(size), columns.clone()]].concat();
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::UNFOLD_ROWS, &[dy], Attrs::new())])
    }

    fn alias(&self, inputs: &[TensorRef], attrs: &Attrs) -> Vec<TensorRef> {
        vec![apart(&inputs[0], inputs[0].shape.len() - 2, size_of(attrs))]
    }

    /// Returns the layout of the input that makes this output a view; nothing when no layout does.
    fn parts(&self, output: &TensorRef, _inputs: &[Vec<usize>], _attrs: &Attrs) -> Vec<TensorRef> {
        together(output, output.shape.len() - 3).into_iter().collect()
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("a view is never an instruction")
    }

    crate::reference!(copy);

    fn examples(&self) -> Vec<Example> {
        let x = vec![ExampleInput::Normal { shape: vec![2, 12, 8], scale: 1.0 }];
        vec![Example::new(x, Attrs::new().with("size", 4)).differentiate(&[0])]
    }
}

/// […, N, size, C] → […, N·size, C]
pub struct UnfoldRows;

impl Op for UnfoldRows {
    fn id(&self) -> OpId {
        id::UNFOLD_ROWS
    }

    fn class(&self) -> Class {
        Class::View
    }

    fn doc(&self) -> &'static str {
        "x […, N, size, C] with its groups one after another → […, N·size, C]: the inverse of `fold_rows`. A view."
    }

    fn infer(&self, inputs: &[ValueType], _attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        check_float(x)?;
        let [before @ .., rows, Dim::Fixed(size), columns] = x.shape.as_slice() else {
            return Err("x must be […, N, size, C], the size known".into());
        };
        let rows = rows.ungrouped(*size).ok_or_else(|| format!("{rows} are no groups of {size}"))?;
        let shape: Vec<Dim> = [before, &[rows, columns.clone()]].concat();
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let shape = &call.emit.value(call.input(0)).shape;
        let size = shape[shape.len() - 2];
        let dy = call.dy();
        Gradients::Inputs(vec![call.wanted(0, id::FOLD_ROWS, &[dy], Attrs::new().with("size", size))])
    }

    /// Returns nothing when neighboring groups have a gap between them.
    fn alias(&self, inputs: &[TensorRef], _attrs: &Attrs) -> Vec<TensorRef> {
        together(&inputs[0], inputs[0].shape.len() - 3).into_iter().collect()
    }

    /// Returns the layout of the input that makes this output a view.
    fn parts(&self, output: &TensorRef, inputs: &[Vec<usize>], _attrs: &Attrs) -> Vec<TensorRef> {
        vec![apart(output, output.shape.len() - 2, inputs[0][inputs[0].len() - 2])]
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("a view is never an instruction")
    }

    crate::reference!(copy);

    fn examples(&self) -> Vec<Example> {
        let x = vec![ExampleInput::Normal { shape: vec![2, 3, 4, 8], scale: 1.0 }];
        vec![Example::new(x, Attrs::new()).differentiate(&[0])]
    }
}
