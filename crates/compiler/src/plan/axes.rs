//! The kinds of savings, each with levels, and the search for the levels that are needed. Knows numbers of levels and functions of
//! them; not what a saving does to a graph.

use super::parts::Parts;

/// More parts than this cost more in instructions than they free.
pub(super) const MOST_PARTS: usize = 256;

/// One kind of saving, with levels from nothing to all.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Axis {
    /// Parts of the layers from the first on; a level is a number of layers.
    Layers(Parts, usize),
    /// Numbers of parts of the head; a level is an index, 0 none of them.
    Head(Vec<usize>),
    /// The same of the attention's backward pass.
    Attention(Vec<usize>),
    /// The residual stream waits on the host.
    Waiting,
}

impl Axis {
    pub fn levels(&self) -> usize {
        match self {
            Axis::Layers(_, layers) => *layers,
            Axis::Head(parts) | Axis::Attention(parts) => parts.len(),
            Axis::Waiting => 1,
        }
    }

    /// True if it may be taken only to need less memory.
    fn is_cheap(&self) -> bool {
        !matches!(self, Axis::Attention(_) | Axis::Waiting)
    }
}

/// Returns twice `from`, twice that, and so on, while it is allowed and there are not too many.
pub(super) fn doubled(from: usize, allowed: impl Fn(usize) -> bool) -> Vec<usize> {
    let parts = std::iter::successors(Some(from * 2), |parts| Some(parts * 2));
    parts.take_while(|parts| *parts <= MOST_PARTS && allowed(*parts)).collect()
}

/// Returns the levels with which `size` is within the available bytes: no savings if that fits, else as few of the expensive ones
/// as possible. All savings where nothing fits. A size that does not fit may be a bound.
pub(super) fn fewest_savings(axes: &[Axis], available: usize, size: impl Fn(&[usize]) -> usize) -> Vec<usize> {
    let none = vec![0; axes.len()];
    let mut levels: Vec<usize> = axes.iter().map(Axis::levels).collect();
    if size(&none) <= available {
        return none;
    }
    if size(&levels) > available {
        return levels;
    }
    for index in (0..axes.len()).rev() {
        let with = |level: usize| {
            let mut changed = levels.clone();
            changed[index] = level;
            size(&changed)
        };
        levels[index] = least_level(levels[index], available, with);
    }
    levels
}

/// The least level with a size within the available bytes, where sizes fall with levels and that of the last is within. Levels of
/// layers are worth about the same each, so the search begins where a line through both ends would be. Where sizes do not fall
/// throughout, what is found is within all the same.
fn least_level(last: usize, available: usize, size: impl Fn(usize) -> usize) -> usize {
    let most = size(0);
    if most <= available {
        return 0;
    }
    let share = (most - available) as f64 / most.saturating_sub(size(last)).max(1) as f64;
    let guess = (share * last as f64).ceil() as usize;
    let (mut no, mut yes, mut step) = (0, last, 1);
    let mut at = guess;
    // Away from the guess in growing steps, until it is enclosed.
    while yes - no > 1 && (no == 0 || yes == last) && step < last {
        let level = at.clamp(no + 1, yes - 1);
        if size(level) <= available {
            yes = level;
            at = level.saturating_sub(step);
        } else {
            no = level;
            at = level + step;
        }
        step *= 2;
    }
    while yes - no > 1 {
        let middle = no + (yes - no) / 2;
        if size(middle) <= available { yes = middle } else { no = middle }
    }
    yes
}

/// Raises the levels of cheap axes while that is allowed, up to the first axis that cannot be raised to its end.
pub(super) fn save_while_cheap(axes: &[Axis], levels: &mut [usize], allowed: impl Fn(&[usize]) -> bool) {
    for index in (0..axes.len()).filter(|index| axes[*index].is_cheap()) {
        let with = |level: usize| {
            let mut changed = levels.to_vec();
            changed[index] = level;
            changed
        };
        let (from, last) = (levels[index], axes[index].levels());
        let beyond = first(last - from, |more| !allowed(&with(from + more)));
        levels[index] = beyond.map_or(last, |more| (from + more).saturating_sub(1).max(from));
        if levels[index] < last {
            return;
        }
    }
}

/// The first number from 0 to `last` for which `holds`, where it holds for all greater ones too.
fn first(last: usize, holds: impl Fn(usize) -> bool) -> Option<usize> {
    if holds(0) {
        return Some(0);
    }
    if !holds(last) {
        return None;
    }
    let (mut no, mut yes) = (0, last);
    while yes - no > 1 {
        let middle = no + (yes - no) / 2;
        if holds(middle) { yes = middle } else { no = middle }
    }
    Some(yes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_level_is_found_wherever_it_is() {
        for last in 1..20 {
            for threshold in 0..=last {
                for bent in [1, 7] {
                    // Sizes that fall, in a line or not, and are within 100 from the threshold on.
                    let size = |level: usize| match level < threshold {
                        true => 101 + (threshold - level).pow(bent),
                        false => 100 - (level - threshold).min(90),
                    };
                    assert_eq!(least_level(last, 100, size), threshold, "{last} {bent}");
                }
            }
        }
    }

    #[test]
    fn the_first_number_is_found() {
        for threshold in 0..20 {
            assert_eq!(first(15, |n| n >= threshold), (threshold <= 15).then_some(threshold));
        }
    }
}
