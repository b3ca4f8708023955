//! The order of choices by expert: a stable counting sort, so that the choices of an expert are in the order of the tokens.

use graph::{Dim, Element, OpId, ValueType};
use program::Arg;
use tensor::Attrs;

use super::{choices, example_choices, ints, kernel, slots};
use crate::call::{Call, Output};
use crate::gradient::{GradientCall, Gradients};
use crate::kernel::{LowerCall, Lowered};
use crate::op::{Attribute, Class, Example, Op};
use crate::real::Real;
use crate::registry::id;

const SOURCE: &str = include_str!("order.cu");

/// Choices that one block counts and places.
const CHUNK: usize = 256;

/// order, places, offsets = the choices by group
pub struct GroupRows;

impl Op for GroupRows {
    fn id(&self) -> OpId {
        id::GROUP_ROWS
    }

    fn class(&self) -> Class {
        Class::Gather
    }

    fn doc(&self) -> &'static str {
        "Choices by group, those of a group in the order of the tokens. index i32 […, k] → order i32 […, k]: which choice \
         is at a place; places i32 […, k]: the place of a choice; offsets i32 [groups + 1]: where the places of a group \
         begin."
    }

    fn attributes(&self) -> &'static [Attribute] {
        &[Attribute { name: "groups", kind: "int", doc: "the number of groups" }]
    }

    fn infer(&self, inputs: &[ValueType], attrs: &Attrs) -> Result<Vec<ValueType>, String> {
        let [index] = inputs else { return Err("takes the choices".into()) };
        choices(index)?;
        let groups = attrs.size("groups")?;
        if groups == 0 {
            return Err("`groups` is 0, expected above 0".into());
        }
        let offsets = ValueType::new(Element::I32, [Dim::Fixed(groups + 1)]);
        Ok(vec![index.clone(), index.clone(), offsets])
    }

    fn gradient(&self, _call: &mut GradientCall<'_>) -> Gradients {
        Gradients::NoGradient("an order has no derivative")
    }

    /// Choices of each group in each chunk.
    fn scratch(&self, call: &LowerCall<'_>) -> usize {
        let groups = call.outputs[2].len() - 1;
        4 * groups * slots(call, 0).div_ceil(CHUNK)
    }

    fn lower(&self, call: &LowerCall<'_>) -> Lowered {
        let (count, groups) = (slots(call, 0), call.outputs[2].len() - 1);
        let chunks = count.div_ceil(CHUNK);
        let numbers = [("CHOICES", count), ("GROUPS", groups), ("CHUNKS", chunks), ("CHUNK", CHUNK)];
        let make = |entry, grid: usize, threads, args| kernel(entry, SOURCE, [grid, 1, 1], threads, &numbers, args);
        Lowered::Kernels(vec![
            make("group_count", chunks, CHUNK, vec![Arg::Input(0), Arg::Scratch(0)]),
            make("group_starts", 1, 1024, vec![Arg::Scratch(0), Arg::Output(2)]),
            make("group_places", chunks, CHUNK, vec![Arg::Input(0), Arg::Scratch(0), Arg::Output(0), Arg::Output(1)]),
        ])
    }

    crate::reference!(reference);

    fn examples(&self) -> Vec<Example> {
        let example = |tokens: usize, k: usize, groups: usize| {
            let index = ints(&[1, tokens, k], example_choices(tokens, k, groups));
            Example::new(vec![index], Attrs::new().with("groups", groups))
        };
        vec![example(6, 2, 4), example(300, 4, 7), example(1000, 8, 128), example(1, 1, 3)]
    }
}

/// Order, places and offsets of choices.
pub(super) fn sorted(index: &[i32], groups: usize) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let mut offsets = vec![0; groups + 1];
    index.iter().for_each(|group| offsets[*group as usize + 1] += 1);
    for group in 0..groups {
        offsets[group + 1] += offsets[group];
    }
    let mut next = offsets.clone();
    let (mut order, mut places) = (vec![0; index.len()], vec![0; index.len()]);
    for (choice, group) in index.iter().enumerate() {
        let place = next[*group as usize];
        next[*group as usize] += 1;
        (order[place as usize], places[choice]) = (choice as i32, place);
    }
    (order, places, offsets)
}

fn reference<T: Real>(call: &mut Call<'_, T>) {
    let groups = call.attrs.size("groups").expect("checked by the shape rule");
    let (order, places, offsets) = sorted(call.inputs[0].int(), groups);
    let write = |out: &mut Output<'_, T>, values: &[i32]| out.int().copy_from_slice(values);
    let [a, b, c] = call.outputs_mut();
    write(a, &order);
    write(b, &places);
    write(c, &offsets);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_a_group_keep_the_order_of_the_tokens() {
        let (order, places, offsets) = sorted(&[2, 0, 2, 3, 0, 2], 5);
        assert_eq!(offsets, [0, 2, 2, 5, 6, 6]);
        assert_eq!(order, [1, 4, 0, 2, 5, 3]);
        assert_eq!(places, [2, 0, 3, 5, 1, 4]);
    }
}
