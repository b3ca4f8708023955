//! Rotary frequencies that follow from the largest position of the batch, as transformers computes
//! them (`modeling_rope_utils`): decided on the device, by each micro-batch alone.
//!
//! Types: `dynamic` (NTK-aware: the base grows with the length) and `longrope` (Ding et al. 2024: one
//! table up to the original length, another beyond it).

use graph::{Dim, Element, OpId, ValueType};
use program::{Arg, Cost, TensorRef};
use tensor::Attrs;

use super::frequencies::{columns, optional, positive, powers};
use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{KernelSpec, LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, ExampleInput, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("of_batch.cu");

const THREADS: usize = 256;

/// inv_freq, attention_scaling = the table for these positions
pub struct RopeFrequenciesOfBatch;

enum Scaling {
    Dynamic {
        factor: f32,
    },
    /// Divisors of the frequencies of each pair.
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        attention_factor: f32,
    },
}

struct Rule {
    head_dim: usize,
    theta: f32,
    original: usize,
    scaling: Scaling,
}

impl Rule {
    fn of(attrs: &Attrs) -> Result<Self, String> {
        let (head_dim, theta) = (columns(attrs)?, positive(attrs, "theta")?);
        let original = attrs.size("original_max_position_embeddings")?;
        if original == 0 {
            return Err("`original_max_position_embeddings` is 0, expected above 0".into());
        }
        let factor = positive(attrs, "factor")?;
        let scaling = match attrs.text("scaling_type")? {
            "dynamic" if head_dim == 2 => return Err("`dynamic` needs a `head_dim` above 2".into()),
            "dynamic" => Scaling::Dynamic { factor: factor as f32 },
            "longrope" => {
                let list = |name: &str| divisors(attrs, name, head_dim / 2);
                let computed = || if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
                let attention_factor = optional(attrs, "attention_factor")?.unwrap_or_else(computed) as f32;
                Scaling::LongRope { short: list("short_factor")?, long: list("long_factor")?, attention_factor }
            }
            other => return Err(format!("scaling_type `{other}` is not known here; known are dynamic, longrope")),
        };
        Ok(Rule { head_dim, theta: theta as f32, original, scaling })
    }

    fn checked(attrs: &Attrs) -> Self {
        Self::of(attrs).expect("checked by the shape rule")
    }

    /// The table of batches within the original length.
    fn short(&self) -> Vec<f32> {
        let powers = powers(self.theta, self.head_dim);
        match &self.scaling {
            Scaling::Dynamic { .. } => powers.map(|p| 1.0 / p).collect(),
            Scaling::LongRope { short, .. } => powers.zip(short).map(|(p, d)| 1.0 / (d * p)).collect(),
        }
    }

    /// The table of batches of `length` positions, which is more than the original length.
    fn long(&self, length: usize) -> Vec<f32> {
        match &self.scaling {
            Scaling::Dynamic { factor } => {
                let stretch = factor * length as f32 / self.original as f32 - (factor - 1.0);
                let exponent = self.head_dim as f64 / (self.head_dim as f64 - 2.0);
                let grown = (stretch as f64).powf(exponent as f32 as f64) as f32;
                powers(self.theta * grown, self.head_dim).map(|p| 1.0 / p).collect()
            }
            Scaling::LongRope { long, .. } => {
                powers(self.theta, self.head_dim).zip(long).map(|(p, d)| 1.0 / (d * p)).collect()
            }
        }
    }

    fn attention_scaling(&self) -> f32 {
        match &self.scaling {
            Scaling::Dynamic { .. } => 1.0,
            Scaling::LongRope { attention_factor, .. } => *attention_factor,
        }
    }
}

fn divisors(attrs: &Attrs, name: &str, pairs: usize) -> Result<Vec<f32>, String> {
    let list = attrs.floats(name)?;
    if list.len() != pairs || list.iter().any(|d| !(*d > 0.0 && d.is_finite())) {
        return Err(format!("`{name}` must hold {pairs} numbers above 0"));
    }
    Ok(list.into_iter().map(|d| d as f32).collect())
}

/// The numbers as the elements of an array of CUDA C.
fn literals(table: &[f32]) -> String {
    table.iter().map(|x| format!("{x:e}f")).collect::<Vec<_>>().join(",")
}

impl Op for RopeFrequenciesOfBatch {
    fn id(&self) -> OpId {
        id::ROPE_FREQUENCIES_OF_BATCH
    }

    fn class(&self) -> Class {
        Class::Reduction
    }

    fn doc(&self) -> &'static str {
        "Rotary frequencies as transformers changes them by the length n of the batch, its largest position + 1. Up to \
         the original length N, `dynamic` has θ^(−2i/D), beyond it the base θ·(factor·n/N − factor + 1)^(D/(D−2)); \
         `longrope` has θ^(−2i/D)/dᵢ with dᵢ of short_factor or of long_factor. positions i32 [B, T] → inv_freq f32 \
         [D/2], attention_scaling f32 [1], the factor of cos and sin."
    }

    fn attributes(&self) -> &'static [Attribute] {
        const fn row(name: &'static str, kind: &'static str, doc: &'static str) -> Attribute {
            Attribute { name, kind, doc }
        }
        const ROWS: &[Attribute] = &[
            row("head_dim", "int", "D, the columns that are rotated"),
            row("theta", "float", "base of the frequencies"),
            row("scaling_type", "string", "dynamic or longrope"),
            row("factor", "float", "how much longer the context becomes"),
            row("original_max_position_embeddings", "int", "N, the length from which on the frequencies change"),
            row("attention_factor", "float?", "longrope: the factor of cos and sin, instead of the computed one"),
            row("short_factor", "list of float?", "longrope: divisors of the frequencies up to N"),
            row("long_factor", "list of float?", "longrope: divisors of the frequencies beyond N"),
        ];
        ROWS
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [positions] = inputs else { return Err("takes the positions".into()) };
        if positions.dtype != Element::I32 || positions.shape.is_empty() {
            return Err("the positions must be i32 [B, T]".into());
        }
        let rule = Rule::of(attrs)?;
        let f32 = |n: usize| ValueType::new(Element::F32, [Dim::Fixed(n)]);
        Ok(vec![f32(rule.head_dim / 2), f32(1)])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("depends on positions alone")
    }

    fn cost(&self, inputs: &[TensorRef], _outputs: &[TensorRef], _attrs: &Attrs) -> Cost {
        Cost { flops: 0.0, bytes: inputs[0].bytes() as f64 }
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (rule, positions) = (Rule::checked(call.attrs), &call.inputs[0]);
        assert!(positions.is_dense(), "batch values lie densely: {positions}");
        let mut defines = vec![
            ("COUNT", positions.len().to_string()),
            ("PAIRS", (rule.head_dim / 2).to_string()),
            ("ORIGINAL", rule.original.to_string()),
            ("SCALING", format!("{:e}f", rule.attention_scaling())),
            ("SHORT", literals(&rule.short())),
            ("THREADS", THREADS.to_string()),
        ];
        match &rule.scaling {
            Scaling::Dynamic { factor } => {
                let exponent = (rule.head_dim as f64 / (rule.head_dim as f64 - 2.0)) as f32;
                defines.push(("FACTOR", format!("{factor:e}f")));
                defines.push(("THETA", format!("{:e}f", rule.theta)));
                defines.push(("GROWTH", format!("{exponent:e}f")));
            }
            Scaling::LongRope { .. } => defines.push(("LONG", literals(&rule.long(rule.original + 1)))),
        }
        Lowered::Kernels(vec![KernelSpec {
            entry: "rope_frequencies_of_batch",
            source: SOURCE.to_owned(),
            headers: Vec::new(),
            defines: defines.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            grid: [1, 1, 1],
            block: [THREADS as u32, 1, 1],
            shared_bytes: 0,
            args: vec![Arg::Input(0), Arg::Output(0), Arg::Output(1)],
        }])
    }

    crate::reference!(evaluate);

    fn examples(&self) -> Vec<Example> {
        let base = Attrs::new().with("head_dim", 16).with("theta", 10000.0).with("factor", 4.0);
        let list = |first: f64| (0..8).map(|i| first + 0.25 * i as f64).collect::<Vec<f64>>();
        let dynamic = base.clone().with("scaling_type", "dynamic").with("original_max_position_embeddings", 32);
        let longrope = base
            .with("scaling_type", "longrope")
            .with("original_max_position_embeddings", 32)
            .with("short_factor", list(1.0))
            .with("long_factor", list(3.0));
        let example = |length: i32, attrs: &Attrs| {
            let values: Vec<i32> = (0..2 * length).map(|i| i * 7 % length).collect();
            let positions = ExampleInput::Ints { shape: vec![2, length as usize], values };
            Example::new(vec![positions], attrs.clone())
        };
        vec![
            example(32, &dynamic),
            example(33, &dynamic),
            example(900, &dynamic),
            example(32, &longrope),
            example(33, &longrope),
            example(40, &longrope.clone().with("attention_factor", 1.5)),
        ]
    }
}

fn evaluate<T: Real>(call: &mut Call<'_, T>) {
    let rule = Rule::checked(call.attrs);
    let length = call.inputs[0].int().iter().max().map_or(0, |last| (*last + 1).max(0)) as usize;
    let table = if length > rule.original { rule.long(length) } else { rule.short() };
    let [inv_freq, scaling] = call.outputs_mut();
    for (out, value) in inv_freq.real().iter_mut().zip(table) {
        *out = T::from_f32(value);
    }
    scaling.real()[0] = T::from_f32(rule.attention_scaling());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        let positions = ValueType::new(Element::I32, [Dim::Symbol("B".into()), Dim::Symbol("T".into())]);
        let base = Attrs::new().with("head_dim", 4).with("theta", 1e4).with("factor", 2.0);
        let base = base.with("original_max_position_embeddings", 8);
        let infer = |attrs: Attrs| RopeFrequenciesOfBatch.infer(std::slice::from_ref(&positions), &attrs);
        assert_eq!(infer(base.clone().with("scaling_type", "dynamic")).unwrap()[0].to_string(), "f32[2]");
        assert!(infer(base.clone().with("scaling_type", "linear")).unwrap_err().contains("known are dynamic"));
        let short = base.clone().with("scaling_type", "longrope").with("short_factor", vec![1.0, 2.0]);
        assert!(infer(short.clone()).unwrap_err().contains("`long_factor`"));
        assert!(infer(short.with("long_factor", vec![1.0])).unwrap_err().contains("must hold 2 numbers"));
        let narrow = base.with("scaling_type", "dynamic").with("head_dim", 2);
        assert!(infer(narrow).unwrap_err().contains("above 2"));
    }
}
