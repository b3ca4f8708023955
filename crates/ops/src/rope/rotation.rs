//! The rotation itself, in the half-split form of Hugging Face models and in the interleaved one of the paper.

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use rayon::prelude::*;
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered, device_type, follows};
use crate::layout::row_width;
use crate::op::{Attribute, Class, Example, ExampleInput, Op, Rows};
use crate::real::Real;
use crate::registry::id;
use crate::vector::{Loop, vectorised};

const SOURCE: &str = include_str!("rope.cu");
const HEADERS: &[(&str, &str)] =
    &[("types.cuh", include_str!("../cuda/types.cuh")), ("pack.cuh", include_str!("../cuda/pack.cuh"))];

/// Threads of one block; one thread works on a few neighbouring pairs of columns of one token, over
/// all heads.
const THREADS: usize = 256;
/// Most pairs of one thread: more would leave too few threads to hide the latency of memory.
const WIDEST: usize = 4;

/// The attribute that says which columns make a pair.
pub const INTERLEAVED: Attribute =
    Attribute { name: "interleaved", kind: "bool?", doc: "pairs are neighbouring columns, not those of two halves" };

/// (y₁, y₂) = (x₁·c − x₂·s, x₂·c + x₁·s) with c, s of angle position · inv_freq
pub struct Rope;

impl Op for Rope {
    fn id(&self) -> OpId {
        id::ROPE
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Rotary position embedding: (y₁, y₂) = (x₁·c − x₂·s, x₂·c + x₁·s), with x₁, x₂ the halves of the rotated \
         columns, or the even and the odd ones if `interleaved`, c and s cosine and sine of position·inv_freq (f32) times attention_scaling. x [B, T, heads, D], \
         positions i32 [B, T], inv_freq f32 [R/2], attention_scaling f32 [1] → like x. Columns from R on are copied. With A \
         positions each, i32 [B, T, A], inv_freq is [A, R/2], and an angle is the sum over the axes."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[
            Attribute { name: "inverse", kind: "bool?", doc: "rotate back, by −angle: the gradient" },
            Attribute { name: "skip", kind: "bool?", doc: "rotate nothing: the result is x" },
            INTERLEAVED,
        ]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [x, positions, inv_freq, scaling] = inputs else {
            return Err("takes x, positions, inv_freq and attention_scaling".into());
        };
        attrs.flag("inverse")?;
        attrs.flag("skip")?;
        attrs.flag("interleaved")?;
        let [batch, tokens, Dim::Fixed(_), Dim::Fixed(head_dim)] = x.shape.as_slice() else {
            return Err("x must be [B, T, heads, D], heads and D known".into());
        };
        if !x.dtype.is_float() {
            return Err("x must be floating point".into());
        }
        let (rows, axes) = positions.shape.split_at(positions.shape.len().min(2));
        if positions.dtype != Element::I32 || rows != [batch.clone(), tokens.clone()] || axes.len() > 1 {
            return Err(format!("the positions must be i32 [{batch}, {tokens}], or have an axis more"));
        }
        let (of, pairs) = inv_freq.shape.split_at(inv_freq.shape.len().saturating_sub(1));
        if of != axes || pairs.is_empty() || inv_freq.last().is_none_or(|n| n == 0 || 2 * n > *head_dim) {
            let of: String = axes.iter().map(|n| format!("{n}, ")).collect();
            return Err(format!("inv_freq must be [{of}R/2] with R at most {head_dim}"));
        }
        if scaling.shape != [Dim::Fixed(1)] {
            return Err("attention_scaling must be [1]".into());
        }
        Ok(vec![x.clone()])
    }

    fn unchanged(&self, attrs: &Attrs) -> bool {
        attrs.flag("skip").unwrap_or(false)
    }

    fn gradient(&self, call: &mut GradientCall<'_>) -> Gradients {
        if self.unchanged(&call.node.attrs) {
            let dx = call.wanted[0].then(|| call.dy());
            return Gradients::Inputs(vec![dx, None, None, None]);
        }
        let inverse = call.node.attrs.flag("inverse").expect("checked by the shape rule");
        let inputs = [call.dy(), call.input(1), call.input(2), call.input(3)];
        let attrs = call.node.attrs.clone().with("inverse", !inverse);
        let dx = call.wanted(0, id::ROPE, &inputs, attrs);
        Gradients::Inputs(vec![dx, None, None, None])
    }

    fn cost(&self, inputs: &[TensorRef], outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        let bytes = inputs.iter().chain(outputs).map(TensorRef::bytes).sum::<usize>() as f64;
        Cost { flops: 3.0 * outputs[0].len() as f64, bytes }
    }

    fn row_by_row(&self, _inputs: &[TensorRef], _attrs: &Attrs) -> Option<Rows> {
        Some(Rows { axes: 2, whole: vec![2, 3] })
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (x, inv_freq, y) = (&call.inputs[0], &call.inputs[2], &call.outputs[0]);
        let inverse = call.attrs.flag("inverse").expect("checked by the shape rule");
        let [batch, tokens, heads, columns] = x.shape[..] else { unreachable!("the shape rule requires four axes") };
        let pairs =
            if self.unchanged(call.attrs) { 0 } else { *inv_freq.shape.last().expect("the shape rule requires one") };
        let fits = |width: &usize| pairs % width == 0;
        let width = [WIDEST, 2].into_iter().find(|w| fits(w) && row_width(&[x, y]) >= *w).unwrap_or(1);
        // Columns that are not rotated are copied, `2 · width` at a time.
        let work = pairs / width + (columns - 2 * pairs).div_ceil(2 * width);
        let blocks = (batch * tokens * work).div_ceil(THREADS);
        let numbers = [
            ("FOLLOWS", follows(blocks) as usize),
            ("BATCH", batch),
            ("TOKENS", tokens),
            ("HEADS", heads),
            ("COLUMNS", columns),
            ("PAIRS", pairs),
            ("WORK", work),
            ("WIDTH", width),
            ("INVERSE", inverse as usize),
            ("INTERLEAVED", call.attrs.flag("interleaved").expect("checked by the shape rule") as usize),
            ("THREADS", THREADS),
        ];
        let mut defines: Vec<(String, String)> = numbers.map(|(name, n)| (name.to_owned(), n.to_string())).to_vec();
        defines.extend(axes_of(inv_freq));
        for (name, tensor) in [("X", x), ("Y", y)] {
            assert!(tensor.strides[3] == 1 || columns == 1, "the columns of a head lie one after another: {tensor}");
            defines.push((format!("{name}_T"), device_type(tensor.dtype).to_owned()));
            for (axis, stride) in ["B", "S", "H"].iter().zip(&tensor.strides) {
                defines.push((format!("{name}_{axis}"), stride.to_string()));
            }
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "rope",
            source: SOURCE.to_owned(),
            headers: HEADERS.iter().copied().chain(follows(blocks).then_some(device::DEPENDENT_LAUNCH)).collect(),
            defines,
            grid: [blocks as u32, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Input(1), Arg::Input(2), Arg::Input(3), Arg::Output(0)],
        }])
    }

    crate::reference!(rotate);

    fn examples(&self) -> Vec<Example> {
        let example = |x: [usize; 4], positions: Vec<i32>, pairs: usize, attrs: Attrs| {
            let axes = positions.len() / (x[0] * x[1]);
            let more: &[usize] = if axes > 1 { &[axes] } else { &[] };
            let inv_freq: Vec<f32> = (0..pairs).map(|i| 10000f32.powf(-(i as f32) / pairs as f32)).collect();
            // Each pair has one of the axes.
            let of_axis = |axis| inv_freq.iter().enumerate().map(move |(i, f)| if i % axes == axis { *f } else { 0.0 });
            let inv_freq = (0..axes).flat_map(of_axis).collect();
            Example::new(
                vec![
                    ExampleInput::Normal { shape: x.to_vec(), scale: 1.0 },
                    ExampleInput::Ints { shape: [&x[..2], more].concat(), values: positions },
                    ExampleInput::F32 { shape: [more, &[pairs]].concat(), values: inv_freq },
                    ExampleInput::F32 { shape: vec![1], values: vec![1.25] },
                ],
                attrs,
            )
            .differentiate(&[0])
        };
        vec![
            example([2, 3, 4, 16], vec![0, 1, 2, 0, 1, 0], 8, Attrs::new()),
            example([1, 5, 1, 64], vec![7, 8, 9, 4000, 30000], 32, Attrs::new().with("inverse", true)),
            example([1, 3, 2, 24], vec![5, 6, 0], 8, Attrs::new()),
            example([1, 3, 2, 24], vec![5, 6, 0], 8, Attrs::new().with("skip", true)),
            example([2, 2, 3, 24], vec![5, 6, 0, 900], 8, Attrs::new().with("interleaved", true)),
            example([1, 2, 2, 14], vec![3, 70], 5, Attrs::new().with("interleaved", true).with("inverse", true)),
            example([1, 2, 3, 24], vec![5, 6, 900, 7, 0, 3], 12, Attrs::new()),
            example([2, 1, 2, 12], vec![50, 6, 0, 8], 4, Attrs::new().with("inverse", true)),
        ]
    }
}

/// The number of axes as a definition of the kernels, where a token has more than one position.
pub(super) fn axes_of(inv_freq: &TensorRef) -> Option<(String, String)> {
    (inv_freq.shape.len() > 1).then(|| ("AXES".to_owned(), inv_freq.shape[0].to_string()))
}

/// Cosine and sine of each pair at one position, times the scaling.
struct Turns<T> {
    cosines: Vec<T>,
    sines: Vec<T>,
}

impl<T: Real> Turns<T> {
    /// The angle is an f32 product, as transformers has it; of several axes the sum of theirs. `inv_freq`: a table for each
    /// of the positions.
    pub fn new(positions: &[i32], inv_freq: &[T], scaling: T, inverse: bool) -> Turns<T> {
        let pairs = inv_freq.len() / positions.len();
        let turn = |pair: usize| {
            let of_axes = positions.iter().zip(inv_freq[pair..].iter().step_by(pairs.max(1)));
            let angle = T::from_f32(of_axes.map(|(position, of)| *position as f32 * of.to_f32()).sum());
            let sine = angle.sin() * scaling;
            (angle.cos() * scaling, if inverse { -sine } else { sine })
        };
        let (cosines, sines) = (0..pairs).map(turn).unzip();
        Turns { cosines, sines }
    }

    /// Rotates the columns of one head.
    pub fn turn(&self, x: &[T], y: &mut [T], interleaved: bool) {
        let pairs = self.cosines.len();
        match interleaved {
            false => vectorised(Turn, (&mut *y, x, &self.cosines, &self.sines)),
            true => vectorised(TurnNeighbours, (&mut *y, x, &self.cosines, &self.sines)),
        }
        y[2 * pairs..].copy_from_slice(&x[2 * pairs..]);
    }
}

/// Rotates all heads, with one task for each token.
fn rotate<T: Real>(call: &mut Call<'_, T>) {
    let inverse = call.attrs.flag("inverse").expect("checked by the shape rule");
    let [x, positions, inv_freq, scaling] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let (head_dim, heads) = (x.columns(), x.shape[2]);
    let skip = call.attrs.flag("skip").expect("checked by the shape rule");
    let interleaved = call.attrs.flag("interleaved").expect("checked by the shape rule");
    let axes = positions.int().len() / (x.shape[0] * x.shape[1]).max(1);
    let (inv_freq, scaling) = (if skip { &[] } else { inv_freq.real() }, scaling.real()[0]);
    let [y] = call.outputs_mut();
    let tokens = y.real().par_chunks_mut(heads * head_dim).zip(x.real().par_chunks(heads * head_dim));
    tokens.zip(positions.int().par_chunks(axes.max(1))).for_each(|((y, x), positions)| {
        let turns = Turns::new(positions, inv_freq, scaling, inverse);
        for (y, x) in y.chunks_mut(head_dim).zip(x.chunks(head_dim)) {
            turns.turn(x, y, interleaved);
        }
    });
}

/// The rotated columns of one head.
struct Turn;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T], &'a [T], &'a [T])> for Turn {
    type Output = ();

    #[inline(always)]
    fn run((y, x, cosines, sines): (&'a mut [T], &'a [T], &'a [T], &'a [T])) {
        let pairs = cosines.len();
        let ((y1, y2), (x1, x2)) = (y[..2 * pairs].split_at_mut(pairs), x[..2 * pairs].split_at(pairs));
        let pairs = y1.iter_mut().zip(y2).zip(x1.iter().zip(x2)).zip(cosines.iter().zip(sines));
        for (((y1, y2), (x1, x2)), (c, s)) in pairs {
            *y1 = *x1 * *c - *x2 * *s;
            *y2 = *x2 * *c + *x1 * *s;
        }
    }
}

/// The rotated columns of one head, with pairs of neighbors.
struct TurnNeighbours;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T], &'a [T], &'a [T])> for TurnNeighbours {
    type Output = ();

    #[inline(always)]
    fn run((y, x, cosines, sines): (&'a mut [T], &'a [T], &'a [T], &'a [T])) {
        for ((y, x), (c, s)) in y.chunks_exact_mut(2).zip(x.chunks_exact(2)).zip(cosines.iter().zip(sines)) {
            y[0] = x[0] * *c - x[1] * *s;
            y[1] = x[1] * *c + x[0] * *s;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::{Array, apply};

    fn rope(x: &Array<f64>, inverse: bool) -> Array<f64> {
        rope_of(x, Attrs::new().with("inverse", inverse))
    }

    fn rope_of(x: &Array<f64>, attrs: Attrs) -> Array<f64> {
        let (positions, inv_freq) = (Array::Int(vec![0, 3]), Array::Real(vec![1.0, 0.25]));
        let one = Array::Real(vec![1.0]);
        let inputs: [(&[usize], &Array<f64>); 4] =
            [(&[1, 2, 1, 6], x), (&[1, 2], &positions), (&[2], &inv_freq), (&[1], &one)];
        let mut out = [(vec![1, 2, 1, 6], Array::Real(vec![0.0; 12]))];
        apply(&Rope, &attrs, &inputs, &mut out);
        let [(_, y)] = out;
        y
    }

    #[test]
    fn rotates_halves_by_position_and_back() {
        let x = Array::Real((0..12).map(|i| 1.0 + i as f64).collect());
        let y = rope(&x, false);
        assert_eq!(y.real()[..6], x.real()[..6], "position 0 is left alone");
        let (sin, cos) = 0.75f64.sin_cos();
        assert!((y.real()[7] - (8.0 * cos - 10.0 * sin)).abs() < 1e-12);
        assert!((y.real()[9] - (10.0 * cos + 8.0 * sin)).abs() < 1e-12);
        assert_eq!(y.real()[10..], x.real()[10..], "columns beyond the table are copied");
        for (back, x) in rope(&y, true).real().iter().zip(x.real()) {
            assert!((back - x).abs() < 1e-12);
        }
    }
    #[test]
    fn interleaved_pairs_are_neighbours() {
        let x = Array::Real((0..12).map(|i| 1.0 + i as f64).collect());
        let y = rope_of(&x, Attrs::new().with("interleaved", true));
        let (sin, cos) = 0.75f64.sin_cos();
        assert!((y.real()[8] - (9.0 * cos - 10.0 * sin)).abs() < 1e-12);
        assert!((y.real()[9] - (10.0 * cos + 9.0 * sin)).abs() < 1e-12);
        assert_eq!(y.real()[10..], x.real()[10..], "columns beyond the table are copied");
    }
}
