//! Matrices of experts that files keep one after another in tensors of three axes, seen one by one under the names that they
//! would have in files of their own. Knows names and shapes; the bytes are read elsewhere.

use std::collections::BTreeMap;

/// Tensors [groups, Σ rows of the parts, columns] in files.
#[derive(Clone, Copy, Debug)]
pub struct Stack<'a> {
    /// The last component of their names.
    pub name: &'a str,
    /// Last components of the modules whose matrices each group has, in their order.
    pub parts: &'a [String],
}

/// One matrix of a stack.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// The tensor that it is a part of.
    pub whole: String,
    /// The matrix's first element in the stack.
    pub first: usize,
    pub shape: Vec<usize>,
}

/// The matrices of a tensor with this name and shape, by their names; none where it is no stack.
pub(super) fn members(stacks: &[Stack<'_>], whole: &str, shape: &[usize]) -> Option<BTreeMap<String, Member>> {
    let (container, last) = whole.rsplit_once('.')?;
    let stack = stacks.iter().find(|stack| stack.name == last && !stack.parts.is_empty())?;
    let [groups, rows, columns] = *shape else { return None };
    if rows * columns == 0 || !rows.is_multiple_of(stack.parts.len()) {
        return None;
    }
    let rows = rows / stack.parts.len();
    let numbered = (0..groups).flat_map(|group| stack.parts.iter().enumerate().map(move |part| (group, part)));
    let member = |(group, (place, part)): (usize, (usize, &String))| {
        let first = (group * stack.parts.len() + place) * rows * columns;
        let member = Member { whole: whole.to_owned(), first, shape: vec![rows, columns] };
        (format!("{container}.{group}.{part}.weight"), member)
    };
    Some(numbered.map(member).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_of_a_group_lie_behind_one_another() {
        let parts = ["gate_proj".to_owned(), "up_proj".to_owned()];
        let stacks = [Stack { name: "gate_up_proj", parts: &parts }];
        let found = members(&stacks, "m.0.experts.gate_up_proj", &[3, 8, 5]).unwrap();
        assert_eq!(found.len(), 6);
        let of = &found["m.0.experts.2.up_proj.weight"];
        assert_eq!((of.first, of.shape.as_slice()), (2 * 8 * 5 + 4 * 5, [4, 5].as_slice()));
        // Of two axes it is a linear's, and rows that cannot be parted are another's.
        assert!(members(&stacks, "m.0.mlp.gate_up_proj", &[8, 5]).is_none());
        assert!(members(&stacks, "m.0.experts.gate_up_proj", &[3, 7, 5]).is_none());
        assert!(members(&stacks, "m.0.experts.down_proj", &[3, 8, 5]).is_none());
        assert!(members(&stacks, "m.0.experts.gate_up_proj", &[usize::MAX, 0, 5]).is_none());
    }
}
