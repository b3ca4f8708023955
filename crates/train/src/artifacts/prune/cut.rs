//! Tensors with some of their rows or columns, and names with other numbers of layers.
//!
//! Knows bytes and names; not what the channels are.

use tensor::HostTensor;

use super::axes::Axes;
use super::kept::Kept;

/// A tensor with these indices of an axis.
pub fn cut(of: &HostTensor, axis: usize, kept: &[usize]) -> HostTensor {
    let inner = of.shape[axis + 1..].iter().product::<usize>() * of.dtype.size();
    let whole = of.shape[axis] * inner;
    let mut shape = of.shape.clone();
    shape[axis] = kept.len();
    let mut bytes = Vec::with_capacity(of.bytes.len() / of.shape[axis].max(1) * kept.len());
    for part in of.bytes.chunks(whole) {
        kept.iter().for_each(|index| bytes.extend_from_slice(&part[index * inner..][..inner]));
    }
    HostTensor::new(of.dtype, shape, bytes)
}

/// The beginning of a name up to the number of its layer, and the number; none for tensors outside of the layers.
fn layer_of<'n>(name: &'n str, stack: &str) -> Option<(&'n str, usize, &'n str)> {
    let rest = name.strip_prefix(stack)?.strip_prefix('.')?;
    let (number, after) = rest.split_once('.')?;
    Some((&name[..=stack.len()], number.parse().ok()?, after))
}

/// The expert that a parameter of a layer belongs to.
fn expert_of(name: &str, layer: usize, axes: &Axes) -> Option<usize> {
    let experts = axes.layers.get(layer)?.experts.as_ref()?;
    experts.parameters.iter().position(|of| of.iter().any(|of| of == name))
}

/// A parameter's name in the result; none where its layer or expert is left out.
pub fn new_name(name: &str, axes: &Axes, kept: &Kept) -> Option<String> {
    let Some((before, layer, after)) = layer_of(name, &axes.stack) else { return Some(name.to_owned()) };
    let number = kept.layers.iter().position(|of| *of == layer)?;
    let after = match expert_of(name, layer, axes) {
        Some(expert) => {
            let new = kept.experts[layer].iter().position(|of| *of == expert)?;
            after.replacen(&format!("experts.{expert}."), &format!("experts.{new}."), 1)
        }
        None => after.to_owned(),
    };
    Some(format!("{before}{number}.{after}"))
}

/// The name in files of the result of a parameter that has one in those of the model.
pub fn renumbered(in_file: &str, parameter: &str, axes: &Axes, kept: &Kept) -> String {
    let Some((_, layer, after)) = layer_of(parameter, &axes.stack) else { return in_file.to_owned() };
    let number = kept.layers.iter().position(|of| *of == layer).expect("the layer stays");
    let (old, new) = (format!(".{layer}.{after}"), format!(".{number}.{after}"));
    let renamed = match in_file.strip_suffix(&old) {
        Some(before) => format!("{before}{new}"),
        // Files without the first component, whose names begin with the number or another prefix.
        None => in_file.replacen(&format!(".{layer}."), &format!(".{number}."), 1),
    };
    let Some(expert) = expert_of(parameter, layer, axes) else { return renamed };
    let new = kept.experts[layer].iter().position(|of| *of == expert).expect("the expert stays");
    renamed.replacen(&format!("experts.{expert}."), &format!("experts.{new}."), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_stay_in_their_order() {
        let of = HostTensor::from_f32([2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(cut(&of, 1, &[0, 2]), HostTensor::from_f32([2, 2], &[0.0, 2.0, 3.0, 5.0]));
        assert_eq!(cut(&of, 0, &[1]), HostTensor::from_f32([1, 3], &[3.0, 4.0, 5.0]));
    }
}
