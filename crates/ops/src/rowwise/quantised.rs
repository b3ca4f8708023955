//! Codes of eight bits as results of rows: the results of `quantise` as a form that neighbors are joined with, so that
//! a kernel that gives a tensor gives its codes, their scale and its magnitude, too.
//!
//! Transposed codes are none of a row: they are made from the codes (`transpose_codes`). Does not know which tensors are
//! quantised.

use graph::{Element, Graph, Node, ValueId};
use tensor::{Attrs, DType};

use super::form::{Extent, Form};
use super::join::{form_of, names, node};
use crate::elementwise::{Counted, Expr};
use crate::registry::id;

/// Attributes of the node (x, …, factor) → (codes, …, scale(, amax)(, nonzero, flushed)), with one power of two for all x, as
/// that of `quantise` and `own_amax` of the same.
pub fn quantising(tensors: usize, format: DType, top: i32, record: bool, count: bool) -> Attrs {
    let amax = || Expr::Amax((0..tensors).map(Expr::Input).collect());
    let power = || Expr::Input(tensors).power(amax(), top);
    let mut results: Vec<(Extent, Expr)> = (0..tensors).map(|x| (Extent::Element, Expr::Input(x) * power())).collect();
    results.push((Extent::Tensor, Expr::Constant(1.0) / power()));
    if record {
        results.push((Extent::Tensor, amax()));
    }
    if count {
        let counted = |which| Expr::Count(which, Box::new(power()), (0..tensors).map(Expr::Input).collect());
        results.extend([Counted::Nonzero, Counted::Flushed].map(|which| (Extent::Tensor, counted(which))));
    }
    let operands = [vec![Extent::Element; tensors], vec![Extent::Tensor]].concat();
    let of = |(extent, e): &(Extent, Expr)| match (extent, e) {
        (Extent::Tensor, Expr::Count(..)) => DType::F64.name(),
        (Extent::Tensor, _) => DType::F32.name(),
        _ => format.name(),
    };
    let types: Vec<&str> = results.iter().map(of).collect();
    let mut attrs = Attrs::new().with("of", vec![id::QUANTISE.name()]);
    attrs.extend((*Form { operands, results }.attrs()).clone());
    attrs.with("dtypes", types)
}

/// The node without codes, scales and magnitudes, where it gives such and nothing reads any of them.
pub fn without_codes(graph: &Graph, of: &Node, is_read: impl Fn(ValueId) -> bool) -> Option<Node> {
    let form = form_of(of).filter(Form::spans_tensor)?;
    let codes = |id: ValueId| matches!(graph.value(id).element, Element::Fixed(dtype) if dtype.small().is_some());
    let results = of.outputs.iter().copied().zip(form.results.iter().cloned());
    let (quantised, others): (Vec<_>, Vec<_>) =
        results.partition(|(id, (extent, _))| *extent == Extent::Tensor || codes(*id));
    if others.is_empty() || quantised.iter().any(|(id, _)| is_read(*id)) {
        return None;
    }
    let operands = of.inputs.iter().copied().zip(form.operands.iter().copied()).collect();
    let names: Vec<String> = names(of).into_iter().filter(|name| name != id::QUANTISE.name()).collect();
    Some(node(graph, of, operands, others, &names))
}
