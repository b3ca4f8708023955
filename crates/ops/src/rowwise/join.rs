//! The composition of two nodes with forms to one, and the removal of a result that exists already from one. The choice
//! of the pairs worth it is not made here.
//!
//! A value that no longer reaches memory is rounded in the expression to the type in which it would have been stored,
//! so that joining never changes bits.

use graph::{Element, Graph, Node, ValueId};
use tensor::{Attrs, DType};

use super::form::{Extent, Form, texts};
use crate::elementwise::{Binary, Expr, Unary};
use crate::registry::{get, id};

/// The form of a node, if its operation has one.
pub fn form_of(node: &Node) -> Option<Form> {
    get(node.op).form(node.inputs.len(), &node.attrs)
}

/// Operands of the node that is being made, each once.
#[derive(Default)]
struct Operands(Vec<(ValueId, Extent)>);

impl Operands {
    fn read(&mut self, id: ValueId, extent: Extent) -> Expr {
        let place = self.0.iter().position(|known| *known == (id, extent));
        Expr::Input(place.unwrap_or_else(|| {
            self.0.push((id, extent));
            self.0.len() - 1
        }))
    }
}

/// Returns `first`, then `second`, as one node in the place of `second`. `keep` names the results of `first` that
/// others read: they are written as well. `None` when one of the two has no form, when their rows differ, when
/// something is summed over rows in between, or when the type of a value in between is still the recipe's choice.
pub fn join(graph: &Graph, first: &Node, second: &Node, keep: &[ValueId]) -> Option<Node> {
    let (one, two) = (form_of(first)?, form_of(second)?);
    if !same_rows(graph, &[(first, &one), (second, &two)]) {
        return None;
    }
    let mut operands = Operands::default();
    let read: Vec<Expr> = first.inputs.iter().zip(&one.operands).map(|(id, e)| operands.read(*id, *e)).collect();
    let made: Vec<(Extent, Expr)> =
        one.results.iter().map(|(extent, e)| (*extent, e.substitute(&|i| read[i].clone()))).collect();
    let mut read = Vec::new();
    for (id, extent) in second.inputs.iter().zip(&two.operands) {
        read.push(match first.outputs.iter().position(|o| o == id) {
            Some(result) if made[result].0 != *extent || matches!(extent, Extent::Column | Extent::Tensor) => {
                return None;
            }
            Some(result) => made[result].1.clone().stored_as(storage(graph, *id)?),
            None => operands.read(*id, *extent),
        });
    }
    let kept = first.outputs.iter().copied().zip(made).filter(|(id, _)| keep.contains(id));
    let others = two.results.iter().map(|(extent, e)| (*extent, e.substitute(&|i| read[i].clone())));
    let results: Vec<(ValueId, (Extent, Expr))> = kept.chain(second.outputs.iter().copied().zip(others)).collect();
    let names = [names(first), names(second)].concat();
    Some(node(graph, second, operands.0, results, &names))
}

/// True if the rows of both are the same: elements of one shape.
fn same_rows(graph: &Graph, nodes: &[(&Node, &Form)]) -> bool {
    let mut shapes = nodes.iter().flat_map(|(node, form)| {
        let of = |ids: &[ValueId], extents: Vec<Extent>| -> Vec<ValueId> {
            ids.iter().copied().zip(extents).filter(|(_, e)| *e == Extent::Element).map(|(id, _)| id).collect()
        };
        let results = form.results.iter().map(|(extent, _)| *extent).collect();
        [of(&node.inputs, form.operands.clone()), of(&node.outputs, results)].concat()
    });
    let Some(shape) = shapes.next().map(|id| &graph.value(id).shape) else { return false };
    !shape.is_empty() && shapes.all(|id| graph.value(id).shape == *shape)
}

/// Returns the type that a value is stored in; none for codes, which expressions do not read.
fn storage(graph: &Graph, id: ValueId) -> Option<DType> {
    match graph.value(id).element {
        Element::Fixed(dtype) => dtype.is_float().then_some(dtype),
        Element::Float => None,
    }
}

/// Returns the operations that a node was made of; its own name, where it is none of several.
pub fn names(node: &Node) -> Vec<String> {
    texts(&node.attrs, "of").unwrap_or_else(|_| vec![node.op.name().to_owned()])
}

/// The node with these results. Operands that nothing reads are dropped; the first one of elements that is left gives the
/// shape.
pub(super) fn node(
    graph: &Graph,
    like: &Node,
    operands: Vec<(ValueId, Extent)>,
    results: Vec<(ValueId, (Extent, Expr))>,
    names: &[String],
) -> Node {
    let read = |index: usize| results.iter().any(|(_, (_, e))| e.reads(index));
    let elements = || (0..operands.len()).filter(|index| operands[*index].1 == Extent::Element);
    let shape = elements().find(|index| read(*index)).or_else(|| elements().next()).expect("rows have elements");
    let others = (0..operands.len()).filter(|i| *i != shape && read(*i));
    let order: Vec<usize> = [shape].into_iter().chain(others).collect();
    let place = |old: usize| Expr::Input(order.iter().position(|i| *i == old).expect("a read operand is kept"));
    let form = Form {
        operands: order.iter().map(|i| operands[*i].1).collect(),
        results: results.iter().map(|(_, (extent, e))| (*extent, e.substitute(&place))).collect(),
    };
    let types: Vec<String> = results.iter().map(|(id, _)| graph.value(*id).element.to_string()).collect();
    let (op, attrs) = match form.is_elementwise() {
        true => {
            let texts: Vec<String> = form.results.iter().map(|(_, e)| simplified(e).to_string()).collect();
            (id::ELEMENTWISE, Attrs::new().with("of", names.to_vec()).with("expressions", texts))
        }
        false => {
            let mut attrs = Attrs::new().with("of", names.to_vec());
            attrs.extend((*form.attrs()).clone());
            (id::ROWWISE, attrs)
        }
    };
    Node {
        op,
        inputs: order.iter().map(|i| operands[*i].0).collect(),
        outputs: results.iter().map(|(id, _)| *id).collect(),
        attrs: attrs.with("dtypes", types),
        ..like.clone()
    }
}

/// Returns the expression without roundings that change nothing: to f32, the type of the arithmetic.
fn simplified(expr: &Expr) -> Expr {
    expr.replace(&|part| match part {
        Expr::Unary(Unary::Round(DType::F32), x) => Some(simplified(x)),
        _ => None,
    })
}

/// The sum of elements that a node over rows gives and that its other results are computed from.
pub fn intermediate(graph: &Graph, node: &Node) -> Option<usize> {
    let form = form_of(node).filter(|form| !form.is_elementwise())?;
    (0..form.results.len()).find(|index| {
        let (extent, expr) = &form.results[*index];
        let others = || form.results.iter().enumerate().filter(|(other, _)| other != index);
        *extent == Extent::Element
            && matches!(expr, Expr::Binary(Binary::Add, ..))
            && storage(graph, node.outputs[*index]).is_some_and(|dtype| {
                let stored = expr.clone().stored_as(dtype);
                others().any(|(_, (_, e))| e.any(&|part| *part == stored))
            })
    })
}

/// Splits a node around a result that exists already, into the part that is computed from it, which reads it, and the
/// part that is not, if there is one. Neither reads operands that only the other needs.
pub fn around(graph: &Graph, node: &Node, result: usize) -> (Node, Option<Node>) {
    let form = form_of(node).expect("only nodes with forms have intermediate results");
    let id = node.outputs[result];
    let stored = form.results[result].1.clone().stored_as(storage(graph, id).expect("types are decided"));
    let mut operands: Vec<(ValueId, Extent)> = node.inputs.iter().copied().zip(form.operands.iter().copied()).collect();
    // First, where the shape comes from.
    operands.insert(0, (id, Extent::Element));
    let read = |e: &Expr| {
        e.replace(&|part| match part {
            Expr::Input(index) => Some(Expr::Input(index + 1)),
            _ => (*part == stored).then_some(Expr::Input(0)),
        })
    };
    let results = node.outputs.iter().copied().zip(&form.results).enumerate().filter(|(index, _)| *index != result);
    let results = results.map(|(_, (id, (extent, e)))| (id, (*extent, read(e))));
    let (dependent, others): (Vec<_>, Vec<_>) = results.partition(|(_, (_, e))| e.reads(0));
    let names = names(node);
    let of = |results: Vec<_>, names: &[String]| self::node(graph, node, operands.clone(), results, names);
    // For people: what an operation other than an addition adds up is not distinguished.
    let (before, after) = match names.iter().position(|name| name == id::ADD.name()) {
        Some(sum) => (&names[..sum], &names[sum + 1..]),
        None => (&names[..], &names[..]),
    };
    let others = (!others.is_empty()).then(|| of(others, before));
    (of(dependent, after), others)
}
