//! The linear layer, with low-rank adapters included in its GEMM.

use graph::{Dim, Element, OpId, ValueId, ValueType};
use program::{Cost, Gemm, LowRank, TensorRef};
use tensor::Attrs;

use super::cpu;
use crate::gradient::{GradientCall, Gradients};
use crate::invariance::{self, BATCH_INVARIANT};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::registry::id;

/// y = x·wᵀ (+ bias), then y[…, columnsᵢ] += scale·tᵢ·bᵢᵀ for each adapter
pub struct Linear;

/// One adapter of a call: its inputs, and its columns of the result.
struct Adapter {
    t: usize,
    b: usize,
    first: usize,
    count: usize,
}

/// The attributes of a call, read.
pub(super) struct Reading {
    pub bias: bool,
    /// The weight is [K, N].
    pub transposed: bool,
    /// The result is f32, and not rounded.
    f32: bool,
    batch_invariant: bool,
    pub scale: f64,
    /// First column and number of columns of each adapter.
    pub columns: Vec<(usize, usize)>,
}

impl Reading {
    pub(super) fn of(attrs: &Attrs) -> Result<Self, String> {
        let bias = attrs.flag("bias")?;
        let (transposed, f32) = (attrs.flag("transposed")?, attrs.flag("f32")?);
        let batch_invariant = attrs.flag(BATCH_INVARIANT)?;
        if f32 && bias {
            return Err("a result in f32 takes no bias".into());
        }
        let scale = attrs.optional_float("scale")?.unwrap_or(1.0);
        let columns = match attrs.get("columns") {
            Some(_) => attrs.sizes("columns")?,
            None => Vec::new(),
        };
        if columns.len() % 2 != 0 {
            return Err("`columns` lists a first column and a number of columns for each adapter".into());
        }
        Ok(Reading {
            bias,
            transposed,
            f32,
            batch_invariant,
            scale,
            columns: columns.chunks(2).map(|pair| (pair[0], pair[1])).collect(),
        })
    }

    fn checked(attrs: &Attrs) -> Self {
        Self::of(attrs).expect("checked by the shape rule")
    }

    /// Index of the first adapter input.
    pub(super) fn first_adapter(&self) -> usize {
        2 + self.bias as usize
    }

    fn adapters(&self) -> impl Iterator<Item = Adapter> + '_ {
        let start = self.first_adapter();
        self.columns.iter().enumerate().map(move |(index, (first, count))| Adapter {
            t: start + 2 * index,
            b: start + 2 * index + 1,
            first: *first,
            count: *count,
        })
    }
}

fn matrix(t: &ValueType) -> Option<(usize, usize)> {
    match t.shape.as_slice() {
        [Dim::Fixed(rows), Dim::Fixed(columns)] => Some((*rows, *columns)),
        _ => None,
    }
}

fn rows_of(t: &ValueType) -> &[Dim] {
    t.shape.split_last().map(|(_, rows)| rows).unwrap_or_default()
}

fn check_adapter(inputs: &[ValueType], adapter: &Adapter, columns: usize) -> Result<(), String> {
    let (t, b) = (&inputs[adapter.t], &inputs[adapter.b]);
    let (first, count) = (adapter.first, adapter.count);
    if count == 0 || first + count > columns {
        return Err(format!("an adapter on columns {first}..{} of {columns}", first + count));
    }
    if rows_of(t) != rows_of(&inputs[0]) || matrix(b).is_none_or(|b| b.0 != count || Some(b.1) != t.last()) {
        return Err(format!("the adapter on {count} columns needs t […, r] with the rows of x, and b [{count}, r]"));
    }
    Ok(())
}

impl Op for Linear {
    fn id(&self) -> OpId {
        id::LINEAR
    }

    fn class(&self) -> Class {
        Class::Matmul
    }

    fn doc(&self) -> &'static str {
        "y = x·wᵀ (+ bias), then y[…, start:start+len] += scale·t·bᵀ for each adapter. x […, K], w [N, K], or [K, N] if \
         `transposed`, bias [N] if `bias`, then for each adapter t […, r] and b [len, r] → y […, N]."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "bias", kind: "bool?", doc: "the third input is a bias" },
            Attribute { name: "transposed", kind: "bool?", doc: "the weight is [K, N]: y = x·w" },
            Attribute { name: "f32", kind: "bool?", doc: "the result is f32 whatever x and w are; without a bias" },
            Attribute { name: BATCH_INVARIANT, kind: "bool?", doc: invariance::DOC },
            Attribute { name: "scale", kind: "float?", doc: "factor of the adapters, 1 if absent" },
            Attribute {
                name: "columns",
                kind: "list of int?",
                doc: "first column and number of columns of each adapter; they may not overlap; absent for none",
            },
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let reading = Reading::of(attrs)?;
        let expected = reading.first_adapter() + 2 * reading.columns.len();
        if inputs.len() != expected {
            return Err(format!("takes {expected} inputs with these attributes, not {}", inputs.len()));
        }
        let (x, w) = (&inputs[0], &inputs[1]);
        let (rows, columns) = matrix(w).ok_or("the weight must be a matrix")?;
        let (n, k) = if reading.transposed { (columns, rows) } else { (rows, columns) };
        if x.last() != Some(k) {
            let has = if reading.transposed { "rows" } else { "columns" };
            return Err(format!("x must have {k} columns, the {has} of the weight"));
        }
        if reading.bias && inputs[2].shape != [Dim::Fixed(n)] {
            return Err(format!("the bias must be [{n}]"));
        }
        if inputs.iter().any(|t| !t.dtype.is_float()) {
            return Err("all inputs must be floating point".into());
        }
        for adapter in reading.adapters() {
            check_adapter(inputs, &adapter, n)?;
        }
        let mut ranges = reading.columns.clone();
        ranges.sort_unstable();
        if ranges.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
            return Err("the columns of two adapters overlap".into());
        }
        let shape: Vec<Dim> = rows_of(x).iter().cloned().chain([Dim::Fixed(n)]).collect();
        Ok(vec![ValueType::new(if reading.f32 { Element::F32 } else { x.dtype }, shape)])
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        let reading = Reading::checked(&call.node.attrs);
        let (x, w) = (call.input(0), call.input(1));
        let mut dy = call.dy();
        if reading.f32 {
            // The operands of a product have one type.
            let element = call.emit.value(x).element;
            dy = call.one(id::CAST, &[dy], Attrs::new().with("dtype", element.to_string()));
        }
        let weight = Attrs::new().with("transpose_a", true).with("f32", true);
        let (input, factors) = match reading.transposed {
            true => (Attrs::new().with("transpose_b", true), [x, dy]),
            false => (Attrs::new(), [dy, x]),
        };
        let mut gradients = vec![None; call.node.inputs.len()];
        gradients[0] = call.wanted(0, id::MATMUL, &[dy, w], input);
        gradients[1] = call.wanted(1, id::MATMUL, &factors, weight);
        if reading.bias {
            gradients[2] = call.wanted(2, id::SUM_ROWS, &[dy], Attrs::new());
        }
        adapter_gradients(call, dy, &reading, &mut gradients);
        Gradients::Inputs(gradients)
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], attrs: &Attrs) -> Cost {
        let reading = Reading::checked(attrs);
        let y = &outputs[0];
        let rows = y.len() / y.shape[y.shape.len() - 1];
        let adapters: usize = reading.adapters().map(|a| 2 * rows * inputs[a.b].len()).sum();
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: (2 * rows * inputs[1].len() + adapters) as f64, bytes }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let reading = Reading::checked(call.attrs);
        let (x, w, y) = (&call.inputs[0], &call.inputs[1], &call.outputs[0]);
        let low_rank = reading
            .adapters()
            .map(|adapter| LowRank {
                t: call.inputs[adapter.t].clone(),
                b: call.inputs[adapter.b].clone(),
                transpose_b: true,
                scale: reading.scale as f32,
                columns: (adapter.first, adapter.count),
            })
            .collect();
        let (n, k) = if reading.transposed { (w.shape[1], w.shape[0]) } else { (w.shape[0], w.shape[1]) };
        Lowered::Gemm(Box::new(Gemm {
            batch: 1,
            m: y.len() / n,
            n,
            k,
            a: x.clone(),
            b: w.clone(),
            d: y.clone(),
            transpose_a: false,
            transpose_b: !reading.transposed,
            scale: 1.0,
            scales: None,
            bias: reading.bias.then(|| call.inputs[2].clone()),
            accumulate: false,
            batch_invariant: reading.batch_invariant,
            low_rank,
        }))
    }

    crate::reference!(cpu::linear);

    fn examples(&self) -> Vec<Example> {
        let example = |shapes: &[&[usize]], attrs: Attrs| {
            let inputs = shapes.iter().map(|s| ExampleInput::Normal { shape: s.to_vec(), scale: 0.5 }).collect();
            Example::new(inputs, attrs).differentiate(&(0..shapes.len()).collect::<Vec<_>>())
        };
        // Few rows and long sums, as when token follows token.
        let long = |shapes: &[&[usize]], attrs: Attrs| {
            let inputs = shapes.iter().map(|s| ExampleInput::Normal { shape: s.to_vec(), scale: 0.5 }).collect();
            Example::new(inputs, attrs)
        };
        let adapters = Attrs::new().with("scale", 2.0).with("columns", vec![0, 16, 24, 8]);
        vec![
            example(&[&[2, 3, 16], &[24, 16]], Attrs::new()),
            example(&[&[5, 40], &[8, 40], &[8]], Attrs::new().with("bias", true)),
            example(&[&[2, 3, 16], &[32, 16], &[2, 3, 8], &[16, 8], &[2, 3, 8], &[8, 8]], adapters.clone()),
            example(
                &[&[6, 16], &[32, 16], &[32], &[6, 4], &[16, 4], &[6, 8], &[8, 8]],
                adapters.clone().with("bias", true),
            ),
            example(&[&[2, 3, 16], &[16, 24], &[24]], Attrs::new().with("bias", true).with("transposed", true)),
            example(&[&[6, 40], &[40, 32], &[6, 4], &[16, 4], &[6, 8], &[8, 8]], adapters.with("transposed", true)),
            example(&[&[2, 3, 40], &[16, 40]], Attrs::new().with("f32", true)),
            example(
                &[&[6, 16], &[16, 16], &[6, 8], &[16, 8]],
                Attrs::new().with("f32", true).with("columns", vec![0, 16]),
            ),
            long(&[&[1, 1, 4104], &[130, 4104]], Attrs::new()),
            long(&[&[3, 1, 777], &[1030, 777], &[1030]], Attrs::new().with("bias", true)),
        ]
    }
}

/// dtᵢ = scale·dyᵢ·bᵢ and dbᵢ = scale·dyᵢᵀ·tᵢ, with dyᵢ the adapter's columns of dy.
fn adapter_gradients(call: &mut GradientCall<'_>, dy: ValueId, reading: &Reading, gradients: &mut [Option<ValueId>]) {
    let wanted: Vec<Adapter> = reading.adapters().filter(|a| call.wanted[a.t] || call.wanted[a.b]).collect();
    if wanted.is_empty() {
        return;
    }
    let pieces = column_pieces(call, dy, reading);
    for adapter in wanted {
        let dy = pieces.iter().find(|(first, _)| *first == adapter.first).expect("cut at every adapter").1;
        let (t, b) = (call.input(adapter.t), call.input(adapter.b));
        if call.wanted[adapter.t] {
            gradients[adapter.t] = Some(call.one(id::MATMUL, &[dy, b], scaled(Attrs::new(), reading.scale)));
        }
        if call.wanted[adapter.b] {
            let attrs = scaled(Attrs::new().with("transpose_a", true).with("f32", true), reading.scale);
            gradients[adapter.b] = Some(call.one(id::MATMUL, &[dy, t], attrs));
        }
    }
}

fn scaled(attrs: Attrs, factor: f64) -> Attrs {
    if factor == 1.0 { attrs } else { attrs.with("scale", factor) }
}

/// dy cut where adapters begin and end: (first column, piece).
fn column_pieces(call: &mut GradientCall<'_>, dy: ValueId, reading: &Reading) -> Vec<(usize, ValueId)> {
    let columns = *call.emit.value(dy).shape.last().expect("checked by the shape rule");
    let mut cuts: Vec<usize> = reading.columns.iter().flat_map(|(first, count)| [*first, first + count]).collect();
    cuts.extend([0, columns]);
    cuts.sort_unstable();
    cuts.dedup();
    if cuts.len() == 2 {
        return vec![(0, dy)];
    }
    let sizes: Vec<usize> = cuts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let pieces = call.emit.emit(id::SPLIT, &[dy], Attrs::new().with("sizes", sizes));
    cuts.into_iter().zip(pieces).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn float(shape: &[usize]) -> ValueType {
        ValueType::new(Element::Float, shape.iter().map(|n| Dim::Fixed(*n)).collect::<Vec<_>>())
    }

    #[test]
    fn rows_may_be_symbols() {
        let x = ValueType::new(Element::Float, [Dim::Symbol("B".into()), Dim::Symbol("T".into()), Dim::Fixed(16)]);
        let y = Linear.infer(&[x, float(&[24, 16])], &Attrs::new()).unwrap();
        assert_eq!(y[0].to_string(), "float[B, T, 24]");
    }

    #[test]
    fn adapters_that_do_not_fit_are_refused() {
        let infer = |columns: Vec<usize>, b: &[usize]| {
            let inputs = [float(&[5, 16]), float(&[24, 16]), float(&[5, 4]), float(b), float(&[5, 4]), float(b)];
            Linear.infer(&inputs, &Attrs::new().with("columns", columns))
        };
        assert!(infer(vec![0, 8, 8, 8], &[8, 4]).is_ok());
        assert!(infer(vec![0, 8, 7, 8], &[8, 4]).unwrap_err().contains("overlap"));
        assert!(infer(vec![0, 8, 17, 8], &[8, 4]).unwrap_err().contains("17..25 of 24"));
        assert!(infer(vec![0, 8, 8, 8], &[8, 5]).unwrap_err().contains("b [8, r]"));
        assert!(infer(vec![0, 8, 8], &[8, 4]).unwrap_err().contains("for each adapter"));
    }
}
