//! Values with axes, and the steps that bring a tensor of a model into the order of a file.
//!
//! Knows no name and no file.

use serde::Deserialize;

/// Values in the order of their axes, outermost first.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// A change of an array.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// The same elements with other axes.
    Reshape(Vec<usize>),
    /// Axis i of the result is axis `permute[i]` of the array.
    Permute(Vec<usize>),
    /// Only the elements `from..to` of an axis.
    Slice { axis: usize, from: usize, to: usize },
    /// Every element times a number.
    Scale(f32),
    /// Every element plus a number.
    Add(f32),
    /// −eˣ of every element.
    NegExp,
}

fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

impl Step {
    /// The shape that the step makes of one; an error where it does not fit.
    pub fn shape(&self, shape: &[usize]) -> Result<Vec<usize>, String> {
        let wrong = || Err(format!("{self:?} does not fit the shape {shape:?}"));
        match self {
            Step::Reshape(to) if to.iter().product::<usize>() == shape.iter().product::<usize>() => Ok(to.clone()),
            Step::Permute(order) => {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                if !sorted.into_iter().eq(0..shape.len()) {
                    return wrong();
                }
                Ok(order.iter().map(|axis| shape[*axis]).collect())
            }
            Step::Slice { axis, from, to } if from < to && shape.get(*axis).is_some_and(|extent| to <= extent) => {
                let mut shape = shape.to_vec();
                shape[*axis] = to - from;
                Ok(shape)
            }
            Step::Reshape(_) | Step::Slice { .. } => wrong(),
            Step::Scale(_) | Step::Add(_) | Step::NegExp => Ok(shape.to_vec()),
        }
    }

    /// The array after the step.
    ///
    /// # Panics
    /// If the step does not fit its shape.
    pub fn apply(&self, array: Array) -> Array {
        let shape = self.shape(&array.shape).expect("shapes are checked before values are read");
        let mut values = array.values;
        match self {
            Step::Reshape(_) => {}
            Step::Permute(order) => {
                let from = strides(&array.shape);
                values = gather(&values, &shape, &order.iter().map(|axis| from[*axis]).collect::<Vec<_>>(), 0);
            }
            Step::Slice { axis, from, .. } => {
                let strides = strides(&array.shape);
                values = gather(&values, &shape, &strides, from * strides[*axis]);
            }
            Step::Scale(factor) => values.iter_mut().for_each(|value| *value *= factor),
            Step::Add(term) => values.iter_mut().for_each(|value| *value += term),
            Step::NegExp => values.iter_mut().for_each(|value| *value = -value.exp()),
        }
        Array { shape, values }
    }
}

/// The elements at `first` and on, of which those along each axis of `shape` are `strides` from each other.
fn gather(values: &[f32], shape: &[usize], strides: &[usize], first: usize) -> Vec<f32> {
    let (Some((length, outer)), Some((inner, steps))) = (shape.split_last(), strides.split_last()) else {
        return vec![values[first]];
    };
    let rows: usize = outer.iter().product();
    let mut found = Vec::with_capacity(rows * length);
    let mut at = vec![0; outer.len()];
    for _ in 0..rows {
        let begin = first + at.iter().zip(steps).map(|(index, step)| index * step).sum::<usize>();
        found.extend((0..*length).map(|i| values[begin + i * inner]));
        for axis in (0..at.len()).rev() {
            at[axis] += 1;
            if at[axis] < outer[axis] {
                break;
            }
            at[axis] = 0;
        }
    }
    found
}

impl Array {
    /// [rows, columns] → [columns, rows].
    pub fn transposed(self) -> Array {
        Step::Permute(vec![1, 0]).apply(self)
    }

    /// Row h·d + j + half·d/2 becomes row h·d + 2j + half, for heads of d rows.
    pub fn interleaved(self, heads: usize) -> Array {
        let rows = self.shape[0];
        let (shape, pairs, width) = (self.shape.clone(), rows / heads / 2, self.values.len() / rows);
        let halves = Step::Reshape(vec![heads, 2, pairs, width]).apply(self);
        Step::Reshape(shape).apply(Step::Permute(vec![0, 2, 1, 3]).apply(halves))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn array(shape: &[usize]) -> Array {
        Array { shape: shape.to_vec(), values: (0..shape.iter().product::<usize>()).map(|i| i as f32).collect() }
    }

    #[test]
    fn rotated_pairs_come_to_lie_beside_each_other() {
        let found =
            Array { shape: vec![8, 1], values: vec![0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0] }.interleaved(2);
        assert_eq!(found.values, [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0]);
        assert_eq!(array(&[2, 3]).transposed().values, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    }

    #[test]
    fn steps_move_and_change_elements() {
        let permuted = Step::Permute(vec![2, 0, 1]).apply(array(&[2, 3, 4]));
        assert_eq!(permuted.shape, [4, 2, 3]);
        // Element (c, a, b) is that of (a, b, c): 12a + 4b + c.
        assert_eq!(permuted.values[..7], [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 1.0]);
        let cut = Step::Slice { axis: 1, from: 1, to: 3 }.apply(array(&[2, 3, 2]));
        assert_eq!((cut.shape, cut.values), (vec![2, 2, 2], vec![2.0, 3.0, 4.0, 5.0, 8.0, 9.0, 10.0, 11.0]));
        let one = Step::Slice { axis: 0, from: 2, to: 3 }.apply(array(&[4]));
        assert_eq!((one.shape, one.values), (vec![1], vec![2.0]));
        let changed = [Step::Scale(2.0), Step::Add(1.0)].iter().fold(array(&[3]), |of, step| step.apply(of));
        assert_eq!(changed.values, [1.0, 3.0, 5.0]);
        assert_eq!(Step::NegExp.apply(array(&[2])).values, [-1.0, -1.0f32.exp()]);
    }

    #[test]
    fn steps_that_do_not_fit_are_errors() {
        let shape = [2, 3];
        for step in [
            Step::Reshape(vec![5]),
            Step::Permute(vec![0, 0]),
            Step::Permute(vec![0]),
            Step::Slice { axis: 1, from: 1, to: 4 },
            Step::Slice { axis: 2, from: 0, to: 1 },
            Step::Slice { axis: 0, from: 1, to: 1 },
        ] {
            assert!(step.shape(&shape).unwrap_err().contains("does not fit the shape [2, 3]"));
        }
    }
}
