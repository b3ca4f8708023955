//! The live ranges of an update: what each of its pieces touches passes through a ring of slots on the device, so that
//! one piece's is fetched and another's stored while a third is updated. Knows which tensors a piece touches; not what
//! it is.

use program::TensorRef;

use super::{Follows, Homes, LiveRange, Move};
use crate::memory::{ALIGNMENT_BYTES, align, arena};

/// Pieces on the device at a time: one being fetched, one in use, one being stored.
const SLOTS: usize = 3;

/// Tensors and whether they are written.
type Touched<'a> = Vec<(&'a mut TensorRef, bool)>;

/// Replaces tensors that are streamed by those on the device. Piece `i` is position `i + 1`; the beginning of the ring
/// is position 0. Returns the live ranges, and the bytes of the ring at the start of the activation arena.
pub(crate) fn ring(mut pieces: Vec<Touched<'_>>, homes: &Homes) -> (Vec<LiveRange>, usize) {
    pieces.iter_mut().for_each(|piece| piece.retain(|(tensor, _)| homes.streams(tensor.arena)));
    let bytes = |piece: &Touched<'_>| piece.iter().map(|(tensor, _)| align(tensor.bytes(), ALIGNMENT_BYTES)).sum();
    let slot: usize = pieces.iter().map(bytes).max().unwrap_or(0);
    let mut live_ranges: Vec<LiveRange> = Vec::new();
    for (index, piece) in pieces.into_iter().enumerate().filter(|(_, piece)| !piece.is_empty()) {
        let (number, position) = (live_ranges.len(), index + 1);
        let mut end = number % SLOTS * slot;
        let mut moves = Vec::new();
        for (tensor, written) in piece {
            let device = TensorRef::dense(arena::ACTIVATIONS, end, tensor.dtype, tensor.shape.clone());
            end += align(device.bytes(), ALIGNMENT_BYTES);
            let home = std::mem::replace(tensor, device.clone());
            let parts = dense_parts(&home, &home).into_iter().zip(dense_parts(&device, &home));
            moves.extend(parts.map(|(home, device)| Move { home, device, written }));
        }
        let before = number.checked_sub(SLOTS);
        live_ranges.push(LiveRange {
            buffer: None,
            shards: Vec::new(),
            arrives: before.map_or(0, |before| live_ranges[before].last + 1),
            fetched: true,
            opens: true,
            closes: true,
            begin: position,
            last: position,
            stored: moves.iter().any(|moved| moved.written).then_some(position),
            released: position,
            follows: before.map_or(Follows::Nothing, Follows::LiveRange),
            moves,
        });
    }
    let bytes = slot * live_ranges.len().min(SLOTS);
    (live_ranges, bytes)
}

/// A tensor in dense parts, as transfers take them: cut along its first axis where one of its shape has gaps there.
fn dense_parts(of: &TensorRef, like: &TensorRef) -> Vec<TensorRef> {
    if like.is_dense() {
        let per_rank = of.per_rank;
        return vec![TensorRef { per_rank, ..TensorRef::dense(of.arena, of.offset, of.dtype, of.shape.clone()) }];
    }
    let part = |at: usize| {
        let offset = of.offset + at * of.strides[0] * of.dtype.size();
        TensorRef { per_rank: of.per_rank, ..TensorRef::dense(of.arena, offset, of.dtype, of.shape[1..].to_vec()) }
    };
    (0..of.shape[0]).map(part).collect()
}
