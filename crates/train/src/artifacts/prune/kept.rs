//! The choice of what stays: sizes that are requested, and the most important channels, heads and layers of these sizes.
//!
//! Knows scores and sizes; not files.

use std::collections::{BTreeMap, BTreeSet};

use graph::Model;
use serde_json::{Value, json};

use super::axes::mlp_size;
use super::axes::{Axes, Axis};
use super::scores::Scores;
use crate::error::{Result, TrainError};

/// Sizes of the result; those that are not given stay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sizes {
    pub layers: Option<usize>,
    pub hidden: Option<usize>,
    pub intermediate: Option<usize>,
    pub heads: Option<usize>,
    pub key_value_heads: Option<usize>,
    pub experts: Option<usize>,
    /// Parameters at most; below 1 a share of those of the model.
    pub parameters: Option<f64>,
}

/// The indices that stay, ascending.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept {
    pub layers: Vec<usize>,
    pub hidden: Vec<usize>,
    /// By layer of the model.
    pub mlp: Vec<Vec<usize>>,
    pub heads: Vec<Vec<usize>>,
    pub key_value_heads: Vec<Vec<usize>>,
    pub experts: Vec<Vec<usize>>,
}

impl Kept {
    /// For people and other programs: indices of the parent, by layer that stays.
    pub fn to_json(&self) -> Value {
        let of = |all: &Vec<Vec<usize>>| -> Vec<Vec<usize>> {
            self.layers.iter().map(|layer| all[*layer].clone()).collect()
        };
        json!({
            "layers": self.layers, "hidden": self.hidden, "intermediate": of(&self.mlp), "heads": of(&self.heads),
            "key_value_heads": of(&self.key_value_heads), "experts": of(&self.experts),
        })
    }

    /// The indices of each axis that are kept, where some are removed.
    pub fn cuts(&self, axes: &Axes) -> BTreeMap<Axis, Vec<usize>> {
        let mut cuts = BTreeMap::new();
        let mut cut = |of: &[Axis], kept: Vec<usize>, size: usize| {
            if kept.len() < size {
                cuts.extend(of.iter().map(|axis| (axis.clone(), kept.clone())));
            }
        };
        cut(&axes.hidden, self.hidden.clone(), axes.hidden_size);
        for (number, of) in axes.layers.iter().enumerate() {
            if let Some((_, axes)) = &of.mlp {
                cut(axes, self.mlp[number].clone(), usize::MAX);
            }
            if let Some(experts) = &of.experts {
                cut(&experts.routers, self.experts[number].clone(), experts.count);
            }
            if let Some(heads) = &of.heads {
                let channels = |kept: &[usize]| -> Vec<usize> {
                    kept.iter().flat_map(|head| head * heads.head_dim..(head + 1) * heads.head_dim).collect()
                };
                cut(&heads.queries, channels(&self.heads[number]), heads.count * heads.head_dim);
                cut(&heads.keys, channels(&self.key_value_heads[number]), heads.key_count * heads.head_dim);
            }
        }
        cuts
    }
}

/// The indices of the largest scores, ascending.
fn top(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// Rejects sizes that the model does not have, and kinds of channels that cannot be removed.
pub fn check(sizes: &Sizes, axes: &Axes) -> Result<()> {
    let wrong = |flag: &str, what: String| Err(TrainError::Usage(format!("{flag}: {what}")));
    let experts = axes.layers.iter().find_map(|of| of.experts.as_ref()).map(|of| of.count);
    let first_heads = axes.layers.iter().find_map(|of| of.heads.as_ref());
    let mlp = axes.layers.iter().any(|of| of.mlp.is_some());
    let known = [
        ("--experts", sizes.experts, experts, ""),
        ("--layers", sizes.layers, Some(axes.layers.len()), ""),
        ("--hidden-size", sizes.hidden, Some(axes.hidden_size), "hidden"),
        ("--intermediate-size", sizes.intermediate, mlp.then_some(usize::MAX), "mlp"),
        ("--heads", sizes.heads, first_heads.map(|of| of.count), "heads"),
        ("--key-value-heads", sizes.key_value_heads, first_heads.map(|of| of.key_count), "heads"),
    ];
    for (flag, wanted, size, kind) in known {
        let Some(wanted) = wanted else { continue };
        let Some(size) = size else {
            return wrong(flag, "they are not matrices of their own in this model, so none can be removed".to_owned());
        };
        if wanted == 0 || wanted > size {
            return wrong(flag, format!("{wanted} is not supported, expected 1 to {size}"));
        }
        if let Some(why) = axes.fixed.get(kind) {
            return wrong(flag, format!("{why} of the model needs all of them, so none can be removed"));
        }
    }
    if let (Some(heads), Some(first)) = (sizes.heads, first_heads) {
        let groups = sizes.key_value_heads.unwrap_or(first.key_count);
        if heads % groups != 0 || heads / groups > first.count / first.key_count {
            let most = first.count / first.key_count * groups;
            let text =
                format!("{heads} heads, expected a multiple of the {groups} heads of keys and values, {most} at most");
            return wrong("--heads", text);
        }
    }
    Ok(())
}

/// Sizes with those that follow from a limit of the number of parameters: residual stream and feed-forward layers shrink alike.
pub fn within(sizes: &Sizes, axes: &Axes, model: &Model) -> Result<Sizes> {
    let Some(limit) = sizes.parameters else { return Ok(*sizes) };
    let all = count(&Sizes::default(), axes, model);
    let written = limit;
    let limit = if limit < 1.0 { limit * all as f64 } else { limit };
    let found = widest("--parameters", sizes, axes, model, &mut |sizes| Ok(count(sizes, axes, model) as f64 <= limit))?;
    found.ok_or_else(|| {
        let text = format!(
            "--parameters {written}: no hidden size leaves as few: the model has {all}\n  hint: below 1 it is a share of them, from 1 \
             on their number; `--layers` removes layers"
        );
        TrainError::Usage(text)
    })
}

/// The widest sizes that fit, with residual stream and feed-forward layers shrunk alike; none if no size does. `flag`: the
/// option that limits them; `fits` is true for every smaller size, too.
pub fn widest(
    flag: &str,
    sizes: &Sizes,
    axes: &Axes,
    model: &Model,
    fits: &mut dyn FnMut(&Sizes) -> Result<bool>,
) -> Result<Option<Sizes>> {
    let mlp = mlp_size(axes, model);
    if sizes.hidden.is_some() || sizes.intermediate.is_some() || mlp == 0 {
        let text = format!("{flag}: it chooses --hidden-size and --intermediate-size, which are given or not there");
        return Err(TrainError::Usage(text));
    }
    let step = |size: usize| {
        (0..=6).rev().map(|power| 1 << power).find(|n| size.is_multiple_of(*n) && size / n >= 16).unwrap_or(1)
    };
    let shrunk = |size: usize, thousandths: usize| {
        let step = step(size);
        ((size as f64 * (thousandths as f64 / 1000.0) / step as f64).round() as usize * step).clamp(step, size)
    };
    let alike = |thousandths: usize| Sizes {
        hidden: Some(shrunk(axes.hidden_size, thousandths)),
        intermediate: Some(shrunk(mlp, thousandths)),
        ..*sizes
    };
    let Some(share) = largest(1, 1000, &mut |share| fits(&alike(share)))? else { return Ok(None) };
    let found = alike(share);
    // The feed-forward layers take what rounding leaves.
    let first = found.intermediate.unwrap_or(mlp);
    let wider = |steps: usize| Sizes { intermediate: Some(first + steps * step(mlp)), ..found };
    let steps = largest(1, (mlp - first) / step(mlp), &mut |steps| fits(&wider(steps)))?;
    Ok(Some(steps.map_or(found, wider)))
}

/// The largest number from `first` to `last` that fits, where all below it do.
fn largest(first: usize, last: usize, fits: &mut dyn FnMut(usize) -> Result<bool>) -> Result<Option<usize>> {
    let (mut below, mut above) = (first, last + 1);
    while below < above {
        let middle = below + (above - below) / 2;
        if fits(middle)? { below = middle + 1 } else { above = middle }
    }
    Ok((below > first).then(|| below - 1))
}

/// The parameters of a model of these sizes.
pub fn count(sizes: &Sizes, axes: &Axes, model: &Model) -> usize {
    let mut left: BTreeMap<Axis, usize> = BTreeMap::new();
    let mut cut = |of: &[Axis], size: Option<usize>| {
        left.extend(size.into_iter().flat_map(|size| of.iter().map(move |axis| (axis.clone(), size))));
    };
    cut(&axes.hidden, sizes.hidden);
    for of in &axes.layers {
        of.mlp.iter().for_each(|(_, axes)| cut(axes, sizes.intermediate));
        of.experts.iter().for_each(|of| cut(&of.routers, sizes.experts));
        if let Some(heads) = &of.heads {
            let groups = sizes.key_value_heads.unwrap_or(heads.key_count);
            let count = sizes.heads.unwrap_or(heads.count / heads.key_count * groups);
            cut(&heads.queries, Some(count * heads.head_dim));
            cut(&heads.keys, Some(groups * heads.head_dim));
        }
    }
    let size = |name: &str, shape: &[usize]| -> usize {
        let of =
            |(axis, size): (usize, &usize)| left.get(&(name.to_owned(), axis)).map_or(*size, |left| *left.min(size));
        shape.iter().enumerate().map(of).product()
    };
    let outside = model.parameters.iter().map(|of| size(&of.name, &of.shape));
    let layers = axes.layers.iter().take(sizes.layers.unwrap_or(axes.layers.len()));
    let inside = layers.flat_map(|of| {
        let left_out: BTreeSet<&String> = match (&of.experts, sizes.experts) {
            (Some(experts), Some(count)) => experts.parameters.iter().skip(count).flatten().collect(),
            _ => BTreeSet::new(),
        };
        let names = of.place.block(model).parameters.iter().map(|spec| (of.place.numbered(&spec.name), &spec.shape));
        names
            .filter(move |(name, _)| !left_out.contains(name))
            .map(|(name, shape)| size(&name, shape))
            .collect::<Vec<_>>()
    });
    outside.chain(inside).sum()
}

/// Chooses what stays by the scores.
pub fn choose(sizes: &Sizes, axes: &Axes, scores: &Scores) -> Kept {
    let of_layers = if scores.losses.is_empty() { &scores.influence } else { &scores.losses };
    let layers = sizes.layers.map_or_else(|| (0..axes.layers.len()).collect(), |count| top(of_layers, count));
    let experts = scores.experts.iter().map(|scores| top(scores, sizes.experts.unwrap_or(scores.len()))).collect();
    let hidden = match sizes.hidden {
        Some(count) => top(&scores.hidden, count),
        None => (0..axes.hidden_size).collect(),
    };
    let mlp = scores.mlp.iter().map(|scores| top(scores, sizes.intermediate.unwrap_or(scores.len()))).collect();
    let (mut heads, mut key_value_heads) = (Vec::new(), Vec::new());
    for (of, scores) in axes.layers.iter().zip(&scores.heads) {
        let Some(of) = &of.heads else {
            heads.push(Vec::new());
            key_value_heads.push(Vec::new());
            continue;
        };
        let of_group = of.count / of.key_count;
        let groups: Vec<f64> = scores.chunks(of_group).map(|scores| scores.iter().sum()).collect();
        let kept = top(&groups, sizes.key_value_heads.unwrap_or(of.key_count));
        let each = sizes.heads.map_or(of_group, |heads| heads / kept.len());
        let of_kept = kept.iter().flat_map(|group| {
            let first = group * of_group;
            top(&scores[first..first + of_group], each).into_iter().map(move |head| first + head)
        });
        heads.push(of_kept.collect());
        key_value_heads.push(kept);
    }
    Kept { layers, hidden, mlp, heads, key_value_heads, experts }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_number_that_fits_is_found() {
        let found = |first, last, most| largest(first, last, &mut |n| Ok(n <= most)).unwrap();
        for most in 1..=9 {
            assert_eq!(found(1, 9, most), Some(most));
        }
        assert_eq!((found(1, 9, 0), found(1, 9, 20), found(1, 0, 5)), (None, Some(9), None));
    }

    #[test]
    fn the_largest_scores_stay_in_their_order() {
        assert_eq!(top(&[0.1, 3.0, 2.0, 5.0], 2), [1, 3]);
        assert_eq!(top(&[1.0, 1.0, 1.0], 2), [0, 1]);
    }
}
