//! The exchange between ranks that share a sequence: each gives its tokens of the heads that another has, for its own
//! heads of that one's tokens. A collective; what one rank does with itself is a copy.

use graph::{Dim, OpId, ValueType};
use program::{Cost, TensorRef};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;
use crate::sequence::rows_of;

/// Bytes of memory that take as long as one that crosses a link between GPUs (NVLink: 3.4 TB/s against 390 GB/s).
const BYTES_OF_MEMORY: f64 = 9.0;

/// y = the pieces that all ranks have for this one
pub struct Exchange;

impl Op for Exchange {
    fn id(&self) -> OpId {
        id::EXCHANGE
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Piece s of x of every one of S ranks in a row goes to rank s, which has them one after another in the order of the \
         ranks. With `rows` x [S, T, H, D] → y [rows, S·T/rows, H, D], all tokens of some heads; without it x [B, T, H, D] → \
         y [S, B·T/S, H, D], the own tokens of all heads, or x [S, D] → like x, a row from every rank."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "among", kind: "int", doc: "S" },
            Attribute { name: "rows", kind: "int?", doc: "rows of the batch, where the result has all tokens" },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x] = inputs else { return Err("takes one input".into()) };
        let among = attrs.size("among")?;
        let rows = attrs.optional_int("rows")?.map(|rows| usize::try_from(rows).unwrap_or(0));
        if let ([Dim::Fixed(pieces), Dim::Fixed(_)], None) = (x.shape.as_slice(), rows) {
            return match x.dtype.is_float() && *pieces == among {
                true => Ok(vec![x.clone()]),
                false => Err(format!("x must be floating point, a row for each of {among} ranks")),
            };
        }
        let [outer, tokens, Dim::Fixed(heads), Dim::Fixed(columns)] = x.shape.as_slice() else {
            return Err("x must be [·, T, H, D], H and D known".into());
        };
        let (Some(first), Some(count)) = (outer.fixed(), tokens.fixed()) else {
            return Err("the extents of x must be known".into());
        };
        let (wide, parts) = (first * count, rows.unwrap_or(among));
        let fits = among > 0 && parts > 0 && wide.is_multiple_of(parts) && (rows.is_none() || first == among);
        if !x.dtype.is_float() || !fits {
            return Err(format!("x must be floating point, with tokens in {parts} equal parts from {among} ranks"));
        }
        let outer = if rows.is_some() { rows_of(tokens, parts) } else { Dim::Fixed(parts) };
        let shape = [outer, tokens.with_extent(wide / parts), Dim::Fixed(*heads), Dim::Fixed(*columns)];
        Ok(vec![ValueType::new(x.dtype, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let (attrs, dy) = (call.node.attrs.clone(), call.dy());
        let among = attrs.size("among").expect("checked by the shape rule");
        let back = Attrs::new().with("among", among);
        let back = match (attrs.get("rows"), &call.emit.value(call.input(0)).shape[..]) {
            (None, [rows, _, _, _]) => back.with("rows", *rows),
            _ => back,
        };
        Gradients::Inputs(vec![call.wanted(0, id::EXCHANGE, &[dy], back)])
    }

    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let among = attrs.size("among").expect("checked by the shape rule");
        let remote = 1.0 - 1.0 / among as f64;
        Cost { flops: 0.0, bytes: inputs[0].bytes() as f64 * (2.0 + BYTES_OF_MEMORY * remote) }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let flat = |at: &TensorRef| TensorRef::dense(at.arena, at.offset, at.dtype, [at.len()]);
        match call.attrs.size("among").expect("checked by the shape rule") {
            1 => Lowered::Copy { from: flat(&call.inputs[0]), to: flat(&call.outputs[0]) },
            among => Lowered::Exchange { among },
        }
    }

    crate::reference!(copy);

    fn examples(&self) -> Vec<Example> {
        let example = |shape: &[usize], attrs: Attrs| {
            let x = ExampleInput::Normal { shape: shape.to_vec(), scale: 1.0 };
            Example::new(vec![x], attrs.with("among", 1)).differentiate(&[0])
        };
        vec![
            example(&[1, 6, 2, 16], Attrs::new().with("rows", 2)),
            example(&[2, 3, 2, 16], Attrs::new()),
            example(&[1, 24], Attrs::new()),
        ]
    }
}

fn copy<T: Real>(call: &mut Call<'_, T>) {
    assert_eq!(call.attrs.size("among"), Ok(1), "several ranks exchange in an instruction of their own");
    let x = call.inputs[0].real();
    let [y] = call.outputs_mut();
    y.real().copy_from_slice(x);
}
