//! Matrices of equal extents that are evenly spaced in the flat arenas: what the update of matrices takes at
//! once. Knows slots; not what is computed with them.

use program::{ParameterSlot, TensorRef};

/// A row of matrices. The first axis of each tensor counts them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matrices {
    /// [count, m, n]: what is updated, the f32 copies where they are kept.
    pub weight: TensorRef,
    /// The momentum, f32 [count, m, n].
    pub first: TensorRef,
    /// The second moment of each row, f32 [count, m].
    pub rows: TensorRef,
    /// Place of the parameters in their merge group.
    position: u32,
}

impl Matrices {
    fn tensors(&mut self) -> [&mut TensorRef; 3] {
        [&mut self.weight, &mut self.first, &mut self.rows]
    }

    pub fn count(&self) -> usize {
        self.weight.shape[0]
    }

    /// Returns the same matrices of every rank, whose weights are `per_rank` bytes apart; the states are each rank's
    /// own.
    pub fn of_ranks(mut self, per_rank: usize) -> Matrices {
        self.weight.per_rank = per_rank;
        self
    }

    /// Returns the rows and columns of one matrix.
    pub fn extents(&self) -> [usize; 2] {
        [self.weight.shape[1], self.weight.shape[2]]
    }

    /// Returns `count` of the matrices, from number `from` on.
    pub fn part(&self, from: usize, count: usize) -> Matrices {
        let mut part = self.clone();
        for tensor in part.tensors() {
            tensor.offset += from * tensor.strides[0] * tensor.dtype.size();
            tensor.shape[0] = count;
        }
        part
    }
}

/// Adds the matrices of a slot to the row that they continue, or as a new row. Matrices of parameters at the same place
/// of equal groups are as far apart as a group is large.
pub(super) fn add(known: &mut Vec<Matrices>, slot: &ParameterSlot, position: u32) {
    let [first, rows] = slot.states.as_slice() else { panic!("matrices keep their momentum and their rows") };
    let updated = slot.master.as_ref().unwrap_or(&slot.weight);
    let axes = updated.shape.len();
    let (m, n) = (updated.shape[axes - 2], updated.shape[axes - 1]);
    let count = updated.len() / (m * n).max(1);
    let folded = |at: &TensorRef, inner: &[usize]| {
        let shape = [&[count], inner].concat();
        TensorRef::dense(at.arena, at.offset, at.dtype, shape)
    };
    let mut new = Matrices {
        weight: folded(updated, &[m, n]),
        first: folded(&first.at, &[m, n]),
        rows: folded(&rows.at, &[m]),
        position,
    };
    let alike = |last: &&mut Matrices| {
        last.position == position && last.extents() == [m, n] && last.weight.dtype == new.weight.dtype
    };
    let last = known.iter_mut().rev().find(alike);
    if count != 1 || !last.is_some_and(|last| extend(last, &mut new)) {
        known.push(new);
    }
}

/// Takes one matrix more, if it is where the row continues in every arena.
fn extend(row: &mut Matrices, next: &mut Matrices) -> bool {
    let distance = |row: &TensorRef, next: &TensorRef| {
        let bytes = next.offset.checked_sub(row.offset)?;
        let elements = bytes / row.dtype.size();
        (row.shape[0] == 1 || elements == row.shape[0] * row.strides[0]).then_some(elements / row.shape[0])
    };
    let pairs = row.tensors().into_iter().zip(next.tensors());
    let Some(strides) = pairs.map(|(row, next)| distance(row, next)).collect::<Option<Vec<usize>>>() else {
        return false;
    };
    for (tensor, stride) in row.tensors().into_iter().zip(strides) {
        tensor.strides[0] = stride;
        tensor.shape[0] += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use program::{ArenaId, Initializer, OptimizerState};
    use tensor::DType;

    use super::*;

    fn slot(offset: usize, shape: [usize; 2], rows: usize) -> ParameterSlot {
        let at =
            |arena: u32, offset: usize, shape: &[usize]| TensorRef::dense(ArenaId(arena), offset, DType::F32, shape);
        ParameterSlot {
            name: String::new(),
            weight: at(0, offset, &shape),
            packed: None,
            load_group: None,
            init: Initializer::Constant(0.0),
            adapter: false,
            saved: false,
            transposed: false,
            trainable: true,
            decay: true,
            gradient: None,
            states: vec![
                OptimizerState { name: "first", at: at(3, offset, &shape) },
                OptimizerState { name: "rows", at: at(3, rows, &shape[..1]) },
            ],
            master: None,
        }
    }

    #[test]
    fn members_of_merge_groups_are_as_far_apart_as_the_groups() {
        let mut known = Vec::new();
        // Two groups of a [2, 4] and two [1, 4], as three rows.
        for group in 0..2 {
            let start = group * 3072;
            add(&mut known, &slot(start, [2, 4], (1 << 20) + start), 0);
            add(&mut known, &slot(start + 1024, [1, 4], (1 << 20) + group * 3072 + 1024), 1);
            add(&mut known, &slot(start + 2048, [1, 4], (1 << 20) + group * 3072 + 2048), 2);
        }
        let found: Vec<(usize, usize, usize)> =
            known.iter().map(|of| (of.weight.offset, of.weight.strides[0], of.count())).collect();
        assert_eq!(found, [(0, 768, 2), (1024, 768, 2), (2048, 768, 2)]);
        assert_eq!(known[1].rows.strides, [768, 1]);
        let second = known[1].part(1, 1);
        assert_eq!((second.weight.offset, second.first.offset, second.count()), (4096, 4096, 1));
    }

    #[test]
    fn a_gap_begins_a_new_row() {
        let mut known = Vec::new();
        for (offset, rows) in [(0, 1 << 20), (1024, (1 << 20) + 1024), (4096, (1 << 20) + 2048)] {
            add(&mut known, &slot(offset, [1, 4], rows), 0);
        }
        assert_eq!(known.iter().map(Matrices::count).collect::<Vec<_>>(), [2, 1]);
    }
}
