//! Rotary frequencies as transformers computes them (`modeling_rope_utils`): f32 where it uses
//! tensors, f64 where it uses Python floats.
//!
//! Types: `default`, `linear`, `proportional` (Gemma 4), `yarn` (Peng et al. 2023), `llama3`. `dynamic` and `longrope` depend on
//! the positions of the batch: `of_batch`.

use std::f64::consts::PI;

use graph::{Dim, Element, OpId, ValueType};
use tensor::Attrs;

use crate::call::Call;
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op};
use crate::real::Real;
use crate::registry::id;

/// inv_freq, attention_scaling = the table of one model
pub struct RopeFrequencies;

/// The change of the frequencies for longer contexts.
enum Scaling {
    Default,
    Linear {
        factor: f32,
    },
    /// The first `pairs` are rotated, all others are not.
    Proportional {
        factor: f32,
        pairs: usize,
    },
    Llama3 {
        factor: f32,
        low: f64,
        high: f64,
        original: f64,
    },
    Yarn(Yarn),
}

struct Yarn {
    factor: f64,
    beta_fast: f64,
    beta_slow: f64,
    original: f64,
    truncate: bool,
    attention_factor: f64,
}

struct Table {
    head_dim: usize,
    theta: f64,
    scaling: Scaling,
    /// For each pair the axis of its position and its frequency, where positions have several axes.
    axes: Option<Vec<(usize, usize)>>,
}

/// Reads the attributes `axes` and `order` of a table with `frequencies` entries.
fn axes_of(attrs: &Attrs, frequencies: usize) -> Result<Option<Vec<(usize, usize)>>, String> {
    if attrs.get("axes").is_none() {
        return if attrs.get("order").is_none() { Ok(None) } else { Err("`order` needs `axes`".into()) };
    }
    let axes = attrs.sizes("axes")?;
    let order = match attrs.get("order") {
        Some(_) => attrs.sizes("order")?,
        None => (0..axes.len()).collect(),
    };
    if axes.is_empty() || order.len() != axes.len() || order.iter().any(|i| *i >= frequencies) {
        return Err(format!("`axes` and `order` must name one of {frequencies} frequencies for each pair"));
    }
    Ok(Some(axes.into_iter().zip(order).collect()))
}

/// An attribute that must be a positive number.
pub(super) fn positive(attrs: &Attrs, name: &str) -> Result<f64, String> {
    let value = attrs.float(name)?;
    if value > 0.0 && value.is_finite() { Ok(value) } else { Err(format!("`{name}` is {value}, expected above 0")) }
}

pub(super) fn optional(attrs: &Attrs, name: &str) -> Result<Option<f64>, String> {
    attrs.get(name).map(|_| positive(attrs, name)).transpose()
}

/// Returns the attribute `head_dim`; an error unless it is even and above 0.
pub(super) fn columns(attrs: &Attrs) -> Result<usize, String> {
    let head_dim = attrs.size("head_dim")?;
    if head_dim == 0 || head_dim % 2 != 0 {
        return Err(format!("`head_dim` is {head_dim}, expected an even number above 0"));
    }
    Ok(head_dim)
}

/// θ^(2i/D) for every pair, rounded to f32 as a tensor of transformers is.
pub(super) fn powers(theta: f32, head_dim: usize) -> impl Iterator<Item = f32> {
    (0..head_dim / 2).map(move |i| (theta as f64).powf(((2 * i) as f32 / head_dim as f32) as f64) as f32)
}

impl Table {
    fn of(attrs: &Attrs) -> Result<Self, String> {
        let head_dim = columns(attrs)?;
        let theta = positive(attrs, "theta")?;
        let factor = || positive(attrs, "factor");
        let original = || positive(attrs, "original_max_position_embeddings");
        let kind = attrs.optional_text("scaling_type")?.unwrap_or("default");
        let scaling = match kind {
            "default" => Scaling::Default,
            "linear" => Scaling::Linear { factor: factor()? as f32 },
            "proportional" => {
                let share = optional(attrs, "partial_rotary_factor")?.unwrap_or(1.0);
                if share > 1.0 {
                    return Err(format!("`partial_rotary_factor` is {share}, expected at most 1"));
                }
                let factor = optional(attrs, "factor")?.unwrap_or(1.0) as f32;
                // As `int(share · head_dim // 2)` of Python.
                Scaling::Proportional { factor, pairs: (share * head_dim as f64 / 2.0).floor() as usize }
            }
            "llama3" => {
                let (low, high) = (positive(attrs, "low_freq_factor")?, positive(attrs, "high_freq_factor")?);
                if high <= low {
                    return Err(format!("`high_freq_factor` {high} must be above `low_freq_factor` {low}"));
                }
                Scaling::Llama3 { factor: factor()? as f32, low, high, original: original()? }
            }
            "yarn" => Scaling::Yarn(Yarn::of(attrs, factor()?, original()?)?),
            "dynamic" | "longrope" => {
                return Err(format!(
                    "scaling_type `{kind}` depends on the positions: take `rope_frequencies_of_batch`"
                ));
            }
            other => {
                return Err(format!(
                    "scaling_type `{other}` is not known; known are default, linear, proportional, llama3, yarn"
                ));
            }
        };
        Ok(Table { head_dim, theta, scaling, axes: axes_of(attrs, head_dim / 2)? })
    }

    /// The shape of the result.
    fn shape(&self) -> Vec<usize> {
        match &self.axes {
            None => vec![self.head_dim / 2],
            Some(axes) => vec![axes.iter().map(|(axis, _)| axis + 1).max().unwrap_or(1), axes.len()],
        }
    }

    /// The result: of several axes a table each, with 0 for the pairs of the others.
    fn frequencies(&self) -> Vec<f32> {
        let (all, shape) = (self.inverse_frequencies(), self.shape());
        let Some(axes) = &self.axes else { return all };
        let of_axis = |own| axes.iter().map(move |(axis, of)| if *axis == own { *of } else { usize::MAX });
        let places = (0..shape[0]).flat_map(of_axis);
        places.map(|place| all.get(place).copied().unwrap_or(0.0)).collect()
    }

    fn powers(&self) -> impl Iterator<Item = f32> {
        powers(self.theta as f32, self.head_dim)
    }

    fn inverse_frequencies(&self) -> Vec<f32> {
        match &self.scaling {
            Scaling::Default => self.powers().map(|p| 1.0 / p).collect(),
            Scaling::Linear { factor } => self.powers().map(|p| 1.0 / p / factor).collect(),
            Scaling::Proportional { factor, pairs } => {
                self.powers().enumerate().map(|(i, p)| if i < *pairs { 1.0 / p / factor } else { 0.0 }).collect()
            }
            Scaling::Llama3 { factor, low, high, original } => {
                self.powers().map(|p| llama3(1.0 / p, *factor, *low, *high, *original)).collect()
            }
            Scaling::Yarn(yarn) => {
                let (first, last) = yarn.correction_range(self.head_dim, self.theta);
                self.powers().enumerate().map(|(i, p)| yarn.blend(p, i, first, last)).collect()
            }
        }
    }

    fn attention_scaling(&self) -> f32 {
        match &self.scaling {
            Scaling::Yarn(yarn) => yarn.attention_factor as f32,
            _ => 1.0,
        }
    }
}

/// Long waves are stretched by `factor`, short ones kept, those between blended.
fn llama3(inv_freq: f32, factor: f32, low: f64, high: f64, original: f64) -> f32 {
    let wavelength = (2.0 * PI) as f32 / inv_freq;
    if wavelength > (original / low) as f32 {
        return inv_freq / factor;
    }
    if wavelength < (original / high) as f32 {
        return inv_freq;
    }
    let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
    (1.0 - smooth) * inv_freq / factor + smooth * inv_freq
}

impl Yarn {
    fn of(attrs: &Attrs, factor: f64, original: f64) -> Result<Self, String> {
        let magnitude = |scale: f64, mscale: f64| if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 };
        let mscales = (optional(attrs, "mscale")?, optional(attrs, "mscale_all_dim")?);
        let attention_factor = match (optional(attrs, "attention_factor")?, mscales) {
            (Some(given), _) => given,
            (None, (Some(one), Some(all))) => magnitude(factor, one) / magnitude(factor, all),
            (None, _) => magnitude(factor, 1.0),
        };
        let truncate = match attrs.get("truncate") {
            Some(_) => attrs.flag("truncate")?,
            None => true,
        };
        Ok(Yarn {
            factor,
            beta_fast: optional(attrs, "beta_fast")?.unwrap_or(32.0),
            beta_slow: optional(attrs, "beta_slow")?.unwrap_or(1.0),
            original,
            truncate,
            attention_factor,
        })
    }

    /// Pairs below the first turn often enough within the original context to be kept as they are;
    /// pairs above the last are interpolated.
    fn correction_range(&self, head_dim: usize, theta: f64) -> (f64, f64) {
        let pair =
            |rotations: f64| head_dim as f64 * (self.original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut first, mut last) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        (first.max(0.0), last.min(head_dim as f64 - 1.0))
    }

    fn blend(&self, power: f32, index: usize, first: f64, mut last: f64) -> f32 {
        if first == last {
            last += 0.001;
        }
        let ramp = ((index as f32 - first as f32) / (last - first) as f32).clamp(0.0, 1.0);
        let keep = 1.0 - ramp;
        1.0 / (self.factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
    }
}

impl Op for RopeFrequencies {
    fn id(&self) -> OpId {
        id::ROPE_FREQUENCIES
    }

    fn class(&self) -> Class {
        Class::Constant
    }

    fn doc(&self) -> &'static str {
        "Rotary frequencies θ^(−2i/D), changed by the scaling type as transformers does. → inv_freq f32 [D/2], \
         attention_scaling f32 [1], the factor of cos and sin. With `axes`, of A axes and N pairs, inv_freq is [A, N]: a \
         pair has its frequency for its own axis, and 0 for the others."
    }

    fn attributes(&self) -> &'static [Attribute] {
        const fn row(name: &'static str, kind: &'static str, doc: &'static str) -> Attribute {
            Attribute { name, kind, doc }
        }
        const ROWS: &[Attribute] = &[
            row("head_dim", "int", "D, the columns that are rotated"),
            row("theta", "float", "base of the frequencies"),
            row("scaling_type", "string?", "default, linear, proportional, llama3 or yarn"),
            row("factor", "float?", "how much longer the context becomes; all types but default, 1 for proportional"),
            row(
                "partial_rotary_factor",
                "float?",
                "proportional: the share of the pairs, from the first on, that turn; 1",
            ),
            row("original_max_position_embeddings", "int?", "context of the first training; llama3, yarn"),
            row("low_freq_factor", "float?", "llama3: waves longer than original/this are stretched"),
            row("high_freq_factor", "float?", "llama3: waves shorter than original/this are kept"),
            row("beta_fast", "float?", "yarn: turns within the original context above which a pair is kept; 32"),
            row("beta_slow", "float?", "yarn: turns below which a pair is interpolated; 1"),
            row("truncate", "bool?", "yarn: round the range of blended pairs outwards; true"),
            row("attention_factor", "float?", "yarn: the factor of cos and sin, instead of the computed one"),
            row("mscale", "float?", "yarn: numerator of the computed factor"),
            row("mscale_all_dim", "float?", "yarn: denominator of the computed factor"),
            row("axes", "list of int?", "the axis of the positions that turns each pair, where they have several"),
            row("order", "list of int?", "with `axes`: the index i of each pair's frequency; that of the pair"),
        ];
        ROWS
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        if !inputs.is_empty() {
            return Err("takes no inputs".into());
        }
        let table = Table::of(attrs)?;
        let shape: Vec<Dim> = table.shape().into_iter().map(Dim::Fixed).collect();
        Ok(vec![ValueType::new(Element::F32, shape), ValueType::new(Element::F32, [Dim::Fixed(1)])])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("has no inputs")
    }

    fn lower(&self, _call: &LowerCall<'_>) -> Lowered {
        unreachable!("a constant is evaluated while compiling")
    }

    crate::reference!(evaluate);

    fn examples(&self) -> Vec<Example> {
        let base = Attrs::new().with("head_dim", 32).with("theta", 10000.0);
        let scaled = |kind: &str| base.clone().with("scaling_type", kind).with("factor", 8.0);
        let original = |kind: &str| scaled(kind).with("original_max_position_embeddings", 64);
        let llama3 = original("llama3").with("low_freq_factor", 1.0).with("high_freq_factor", 4.0);
        let yarn = original("yarn").with("truncate", false).with("mscale", 1.0).with("mscale_all_dim", 0.7);
        let proportional = base.clone().with("scaling_type", "proportional").with("partial_rotary_factor", 0.25);
        let axes = base.clone().with("axes", vec![0, 1, 2, 0, 1]).with("order", vec![0, 1, 2, 3, 3]);
        [base.clone(), axes, scaled("linear"), proportional, llama3, original("yarn"), yarn]
            .into_iter()
            .map(|attrs| Example::new(Vec::new(), attrs))
            .collect()
    }
}

fn evaluate<T: Real>(call: &mut Call<'_, T>) {
    let table = Table::of(call.attrs).expect("checked by the shape rule");
    let [inv_freq, scaling] = call.outputs_mut();
    for (out, value) in inv_freq.real().iter_mut().zip(table.frequencies()) {
        *out = T::from_f32(value);
    }
    scaling.real()[0] = T::from_f32(table.attention_scaling());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        let base = Attrs::new().with("head_dim", 32).with("theta", 10000.0);
        let infer = |attrs: Attrs| RopeFrequencies.infer(&[], &attrs);
        assert_eq!(infer(base.clone()).unwrap()[0].to_string(), "f32[16]");
        assert!(infer(base.clone().with("scaling_type", "longrope")).unwrap_err().contains("`longrope`"));
        assert!(infer(base.clone().with("scaling_type", "spiral")).unwrap_err().contains("known are default"));
        assert!(infer(base.clone().with("scaling_type", "linear")).unwrap_err().contains("`factor` is missing"));
        let proportional = base.clone().with("scaling_type", "proportional");
        assert!(infer(proportional.with("partial_rotary_factor", 1.5)).unwrap_err().contains("at most 1"));
        let axes = base.clone().with("axes", vec![0, 2]);
        assert_eq!(infer(axes.clone()).unwrap()[0].to_string(), "f32[3, 2]");
        assert!(infer(axes.with("order", vec![0, 16])).unwrap_err().contains("16 frequencies"));
        assert!(infer(base.with("head_dim", 7)).unwrap_err().contains("even number"));
    }
}
