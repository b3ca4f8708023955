//! A program as one of its ranks runs it: the same instructions with the rank's own tensors and numbers.

use tensor::DType;

use crate::cluster::Cluster;
use crate::instruction::{Arg, Instruction, Launch};
use crate::memory::{Piece, TensorRef};
use crate::program::{Entry, Program};

/// The suffix of attributes that say by how much another attribute grows from rank to rank.
const PER_RANK: &str = "_per_rank";

/// The suffix of attributes that say by how much another attribute grows from one part of a sequence to the next.
const PER_PART: &str = "_per_part";

impl Program {
    /// Returns the program as a rank runs it: nothing in it depends on the rank any more.
    pub fn of_rank(&self, rank: usize) -> Program {
        assert!(rank < self.cluster.ranks, "a rank is one of {}", self.cluster.ranks);
        let entries = self.entries.iter().map(|entry| entry.of_rank(rank, self.cluster)).collect();
        Program { entries, ..self.clone() }
    }

    /// Returns the pieces of a dense tensor of the whole, each with its place on the first rank that has it; `None`
    /// where every rank has the whole tensor. The other [`Program::holders`] have them at the same places.
    pub fn pieces(&self, at: &TensorRef) -> Option<Vec<(Piece, TensorRef)>> {
        let arena = &self.arenas[at.arena.0 as usize];
        let place = |of: &Piece| TensorRef::dense(at.arena, of.at, DType::U8, [of.bytes]);
        let count = if arena.kind.is_of_rank() { self.cluster.ranks } else { self.cluster.shards };
        let pieces = || arena.pieces(at, count).into_iter().map(|piece| (piece, place(&piece)));
        (!arena.shards.is_empty()).then(|| pieces().collect())
    }
}

impl Program {
    /// The ranks that hold the same piece of a sharded tensor as `first`.
    pub fn holders(&self, at: &TensorRef, first: usize) -> impl Iterator<Item = usize> + use<> {
        let alone = self.arenas[at.arena.0 as usize].kind.is_of_rank();
        (first..self.cluster.ranks).step_by(if alone { self.cluster.ranks } else { self.cluster.shards })
    }
}

impl Entry {
    /// The entry as a rank of a cluster runs it.
    pub fn of_rank(&self, rank: usize, cluster: Cluster) -> Entry {
        let mut entry = self.clone();
        for step in &mut entry.steps {
            step.instruction.settle(cluster.share(rank), cluster.part(rank));
        }
        for (_, at) in entry.inputs.iter_mut().chain(&mut entry.outputs) {
            *at = at.of_share(cluster.share(rank));
        }
        entry
    }
}

impl Instruction {
    /// Puts in the places and numbers of a rank, by its shard and its part of the sequence.
    fn settle(&mut self, share: usize, part: usize) {
        for at in self.tensors_mut().into_iter().filter(|at| at.per_rank != 0) {
            *at = at.of_share(share);
        }
        let Instruction::Launch(launch) = self else { return };
        settle_numbers(launch, PER_RANK, share);
        settle_numbers(launch, PER_PART, part);
        settle_arguments(launch, share, part);
    }
}

/// Adds `number` times the increment to each attribute that has one, an attribute of the same name with `suffix`.
fn settle_numbers(launch: &mut Launch, suffix: &str, number: usize) {
    let steps: Vec<(String, u64)> = launch
        .attrs
        .iter()
        .filter_map(|(name, value)| Some((name.strip_suffix(suffix)?.to_owned(), value.as_u64()?)))
        .collect();
    for (name, step) in steps {
        launch.attrs.remove(&format!("{name}{suffix}"));
        let first = launch.attrs.get(&name).and_then(|value| value.as_u64()).unwrap_or(0);
        launch.attrs.insert(name, (first + number as u64 * step).into());
    }
}

fn settle_arguments(launch: &mut Launch, share: usize, part: usize) {
    for arg in launch.calls.iter_mut().flat_map(|call| &mut call.args) {
        match *arg {
            Arg::PerRank { first, step } => *arg = Arg::I64(first + share as i64 * step),
            Arg::PerPart { step } => *arg = Arg::I64(part as i64 * step),
            Arg::Input(_)
            | Arg::Output(_)
            | Arg::Scratch(_)
            | Arg::Boxes { .. }
            | Arg::OutputBoxes { .. }
            | Arg::I32(_)
            | Arg::U32(_)
            | Arg::I64(_)
            | Arg::F32(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use tensor::{Attrs, DType};

    use super::*;
    use crate::arithmetic::Arithmetic;
    use crate::memory::{Arena, ArenaId, ArenaKind, Shard};

    #[test]
    fn a_rank_finds_its_places_and_numbers() {
        let at = TensorRef { per_rank: 64, ..TensorRef::dense(ArenaId(0), 256, DType::F32, [16]) };
        let mut launch = Instruction::Launch(Launch {
            op: "adamw".into(),
            attrs: Attrs::new().with("start", 1024u64).with("start_per_rank", 512u64).with("first_per_part", 7u64),
            inputs: vec![at.clone()],
            outputs: vec![],
            scratch: None,
            arithmetic: Arithmetic::default(),
            calls: vec![],
        });
        launch.settle(3, 1);
        let Instruction::Launch(launch) = launch else { unreachable!("it was one") };
        assert_eq!((launch.inputs[0].offset, launch.inputs[0].per_rank), (448, 0));
        assert_eq!(launch.attrs, Attrs::new().with("start", 2560u64).with("first", 7u64));
    }

    #[test]
    fn a_tensor_of_a_sharded_arena_is_put_together_from_its_pieces() {
        let shards = vec![Shard { start: 0, piece: 8, at: 0 }, Shard { start: 16, piece: 4, at: 8 }];
        let arena = Arena { shards, ..Arena::on_device(ArenaKind::Optimizer, 12) };
        let tensor = TensorRef::dense(ArenaId(0), 4, DType::U8, [18]);
        let piece = |rank, at, from, bytes| Piece { rank, at, from, bytes };
        let expected = [piece(0, 4, 0, 4), piece(1, 0, 4, 8), piece(0, 8, 12, 4), piece(1, 8, 16, 2)];
        assert_eq!(arena.pieces(&tensor, 2), expected);
    }
}
