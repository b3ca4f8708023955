//! Packing of lifetimes into one arena: buffers that live at the same time do not overlap.

use super::{ALIGNMENT_BYTES, align};

/// One buffer: its size and the instructions between which it must be kept, both included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    pub bytes: usize,
    pub first: usize,
    pub last: usize,
}

/// A buffer with its place.
#[derive(Clone, Copy)]
struct Placed {
    start: usize,
    end: usize,
    first: usize,
    last: usize,
}

/// Offsets for all buffers, and the size of the arena. The largest are placed first, each at the
/// lowest place that is free during its life.
pub(crate) fn pack(intervals: &[Interval]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..intervals.len()).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(intervals[*i].bytes), intervals[*i].first, *i));
    let mut offsets = vec![0; intervals.len()];
    // In the order of their starts.
    let mut placed: Vec<Placed> = Vec::with_capacity(intervals.len());
    let mut size = 0;
    for index in order {
        let Interval { bytes, first, last } = intervals[index];
        let bytes = align(bytes, ALIGNMENT_BYTES);
        let mut offset = 0;
        for other in &placed {
            // All others start further on.
            if offset + bytes <= other.start {
                break;
            }
            if first <= other.last && other.first <= last {
                offset = offset.max(other.end);
            }
        }
        let end = offset + bytes;
        offsets[index] = offset;
        size = size.max(end);
        let place = placed.partition_point(|other| other.start <= offset);
        placed.insert(place, Placed { start: offset, end, first, last });
    }
    (offsets, size)
}

/// The most bytes that are live at one time: no packing has a smaller arena.
pub(crate) fn peak(intervals: &[Interval]) -> usize {
    let mut changes = vec![0isize; intervals.iter().map(|of| of.last + 2).max().unwrap_or(0)];
    for Interval { bytes, first, last } in intervals {
        let bytes = align(*bytes, ALIGNMENT_BYTES) as isize;
        changes[*first] += bytes;
        changes[last + 1] -= bytes;
    }
    let live = changes.iter().scan(0, |live, change| {
        *live += change;
        Some(*live)
    });
    live.max().unwrap_or(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_that_live_together_do_not_overlap() {
        // A fixed sequence of sizes and lifetimes, checked pair by pair.
        let intervals: Vec<Interval> = (0..200usize)
            .map(|i| {
                let first = (i * 37) % 100;
                Interval { bytes: (i * 7919) % 5000 + 1, first, last: first + (i * 13) % 20 }
            })
            .collect();
        let (offsets, size) = pack(&intervals);
        assert!(peak(&intervals) <= size && 10 * peak(&intervals) > 9 * size, "{} of {size}", peak(&intervals));
        for a in 0..intervals.len() {
            assert!(offsets[a] + intervals[a].bytes <= size && offsets[a] % ALIGNMENT_BYTES == 0);
            for b in 0..a {
                let apart =
                    offsets[a] + intervals[a].bytes <= offsets[b] || offsets[b] + intervals[b].bytes <= offsets[a];
                let meet = intervals[a].first <= intervals[b].last && intervals[b].first <= intervals[a].last;
                assert!(apart || !meet, "{a} and {b} overlap");
            }
        }
    }

    #[test]
    fn memory_is_reused_after_a_life_ends() {
        let chain: Vec<Interval> = (0..10).map(|i| Interval { bytes: 1000, first: i, last: i + 1 }).collect();
        assert_eq!((pack(&chain).1, peak(&chain)), (2 * 1024, 2 * 1024));
        assert_eq!((pack(&[]).1, peak(&[])), (0, 0));
    }
}
