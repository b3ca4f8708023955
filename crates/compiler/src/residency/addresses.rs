//! Live ranges by the tensors that nodes address: thousands of tensors ask for theirs, and an entry has hundreds.

use std::collections::HashMap;

use program::{ArenaId, TensorRef};

use super::LiveRange;

/// An index of live ranges. It holds numbers, not live ranges: these may move after it was made, but keep their homes.
#[derive(Default)]
pub(super) struct Addresses {
    /// Numbers by the buffer of the placement, in their order.
    buffers: HashMap<usize, Vec<usize>>,
    homes: HashMap<ArenaId, Homes>,
}

/// The homes in one arena.
#[derive(Default)]
struct Homes {
    /// Start, end and number of each, sorted.
    ranges: Vec<(usize, usize, usize)>,
    /// Bytes of the longest one, which bounds how far before a tensor its home can begin.
    longest: usize,
}

impl Addresses {
    pub fn new(live_ranges: &[LiveRange]) -> Addresses {
        let mut addresses = Addresses::default();
        for (number, live_range) in live_ranges.iter().enumerate() {
            if let Some(buffer) = live_range.buffer {
                addresses.buffers.entry(buffer).or_default().push(number);
                continue;
            }
            for home in live_range.moves.iter().map(|of| &of.home) {
                let homes = addresses.homes.entry(home.arena).or_default();
                homes.ranges.push((home.offset, home.offset + home.span(), number));
                homes.longest = homes.longest.max(home.span());
            }
        }
        addresses.homes.values_mut().for_each(|homes| homes.ranges.sort_unstable());
        addresses
    }

    /// Returns the first live range that holds a tensor and for which `wanted` is true. `buffer`: the buffer of the
    /// placement that the tensor lies in, if it lies in one.
    pub fn find<'a>(
        &self,
        live_ranges: &'a [LiveRange],
        tensor: &TensorRef,
        buffer: Option<usize>,
        wanted: impl Fn(&LiveRange) -> bool,
    ) -> Option<&'a LiveRange> {
        let holds = |number: &usize| live_ranges[*number].holds(tensor, buffer) && wanted(&live_ranges[*number]);
        let number = match buffer {
            Some(buffer) => self.buffers.get(&buffer)?.iter().copied().find(holds),
            None => {
                let Homes { ranges, longest } = self.homes.get(&tensor.arena)?;
                let (start, end) = (tensor.offset, tensor.offset + tensor.span());
                let first = ranges.partition_point(|(from, ..)| from + longest <= start);
                let near = ranges[first..].iter().take_while(|(from, ..)| *from < end);
                near.filter(|(_, to, _)| *to > start).map(|(.., number)| *number).filter(holds).min()
            }
        };
        number.map(|number| &live_ranges[number])
    }
}

#[cfg(test)]
mod tests {
    use tensor::DType;

    use super::*;
    use crate::residency::{Follows, Move};

    fn live_range(moves: Vec<(u32, usize, usize)>, buffer: Option<usize>, begin: usize) -> LiveRange {
        let dense = |arena, offset, bytes| TensorRef::dense(ArenaId(arena), offset, DType::U8, [bytes]);
        let moved = |(arena, offset, bytes)| {
            let home = dense(arena, offset, bytes);
            Move { device: dense(9, 0, bytes), home, written: false }
        };
        LiveRange {
            moves: moves.into_iter().map(moved).collect(),
            buffer,
            shards: Vec::new(),
            arrives: begin,
            fetched: true,
            opens: false,
            closes: false,
            begin,
            last: begin + 3,
            stored: None,
            released: begin + 3,
            follows: Follows::Computation,
        }
    }

    #[test]
    fn an_index_finds_the_live_range_that_a_scan_finds() {
        // Homes of several lengths that overlap, in two arenas, some moved together; buffers that come several times.
        let mut live_ranges: Vec<LiveRange> = (0..40usize)
            .map(|i| {
                let homes = (0..1 + i % 2).map(|part| ((i % 3 / 2) as u32, 37 * i % 90 + 50 * part, 5 + 11 * i % 40));
                live_range(homes.collect(), None, 13 * i % 20)
            })
            .collect();
        live_ranges.extend((0..12).map(|i| live_range(vec![(2, 8 * i, 8)], Some(i % 4), 2 * i)));
        let addresses = Addresses::new(&live_ranges);
        let mut found = 0;
        for node in 0..26 {
            let wanted = |of: &LiveRange| (of.begin..=of.last).contains(&node);
            for buffer in [None, Some(0), Some(3), Some(7)] {
                for (arena, offset, bytes) in
                    (0..3).flat_map(|arena| (0..150).map(move |offset| (arena, offset, 1 + offset % 9)))
                {
                    let tensor = TensorRef::dense(ArenaId(arena), offset, DType::U8, [bytes]);
                    let scanned = live_ranges.iter().position(|of| of.holds(&tensor, buffer) && wanted(of));
                    let indexed = addresses.find(&live_ranges, &tensor, buffer, wanted);
                    assert_eq!(indexed.map(std::ptr::from_ref), scanned.map(|at| std::ptr::from_ref(&live_ranges[at])));
                    found += usize::from(scanned.is_some());
                }
            }
        }
        assert!(found > 1000, "{found}");
    }
}
