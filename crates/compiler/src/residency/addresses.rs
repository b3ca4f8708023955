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
