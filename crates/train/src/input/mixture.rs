//! The number of times that an epoch takes each training document: as its set says, or by given shares of the sets.
//!
//! Knows options and numbers of documents; not what is in them.

use data::DocumentSet;

use crate::config::{Config, Dataset, Stopping};
use crate::words;

/// The training documents with each as often as the options ask for. `counts` are the documents of the sets, one after the
/// other in the corpus. Which of them a part of a set takes follows from the seed.
pub(crate) fn mixed(
    config: &Config,
    of: DocumentSet,
    datasets: &[Dataset],
    counts: &[usize],
    notes: &mut Vec<String>,
) -> DocumentSet {
    let shares = config.data.interleave_probs.as_deref();
    if shares.is_none() && datasets.iter().all(|set| set.repeats == 1.0) {
        return of;
    }
    let ends = counts.iter().scan(0, |end, count| {
        *end += count;
        Some(*end)
    });
    let own = |end: usize, count: usize| -> Vec<u32> {
        let inside = |member: &u32| (end - count..end).contains(&(*member as usize));
        of.members.iter().copied().filter(inside).collect()
    };
    let sets: Vec<Vec<u32>> = ends.zip(counts).map(|(end, count)| own(end, *count)).collect();
    let wanted: Vec<Repeats> = match shares {
        None => datasets.iter().map(|set| Repeats::of_repeats(set.repeats)).collect(),
        Some(shares) => {
            let sizes: Vec<usize> = sets.iter().map(Vec::len).collect();
            let numbers = interleaved(&sizes, shares, config.data.interleave_stopping);
            notes.push(said(datasets, &sizes, &numbers));
            sizes.iter().zip(numbers).map(|(size, number)| Repeats::of_number(number, *size)).collect()
        }
    };
    let mut members = Vec::new();
    for (index, (own, Repeats { whole, part })) in sets.into_iter().zip(wanted).enumerate() {
        let seed = config.data.train_seed.wrapping_add(index as u64);
        let (_, chosen) = data::order::split(own.len(), part, seed);
        let mut chosen = chosen.into_iter().peekable();
        for (place, member) in own.into_iter().enumerate() {
            let more = usize::from(chosen.next_if_eq(&(place as u32)).is_some());
            members.extend(std::iter::repeat_n(member, whole + more));
        }
    }
    DocumentSet { corpus: of.corpus, members: members.into() }
}

/// The documents that an epoch takes of a set: all of them a number of times, and a part of them once more.
struct Repeats {
    whole: usize,
    part: f64,
}

impl Repeats {
    fn of_repeats(repeats: f64) -> Repeats {
        Repeats { whole: repeats.floor() as usize, part: repeats.fract() }
    }

    /// A number of documents of a set of `size`.
    fn of_number(number: usize, size: usize) -> Repeats {
        match size {
            0 => Repeats { whole: 0, part: 0.0 },
            size => Repeats { whole: number / size, part: (number % size) as f64 / size as f64 },
        }
    }
}

/// The documents that an epoch takes of each set, so that these have the given shares: at least one of each that has some.
fn interleaved(sizes: &[usize], shares: &[f64], stopping: Stopping) -> Vec<usize> {
    // Documents of an epoch by which a set is exhausted.
    let exhausted = sizes.iter().zip(shares).filter(|(size, _)| **size > 0).map(|(size, share)| *size as f64 / share);
    let epoch = match stopping {
        Stopping::FirstExhausted => exhausted.fold(f64::INFINITY, f64::min),
        Stopping::AllExhausted => exhausted.fold(0.0, f64::max),
    };
    let number = |(size, share): (&usize, &f64)| if *size > 0 { ((epoch * share).round() as usize).max(1) } else { 0 };
    sizes.iter().zip(shares).map(number).collect()
}

/// Describes in a sentence how the sets are mixed.
fn said(datasets: &[Dataset], sizes: &[usize], numbers: &[usize]) -> String {
    let sets = datasets.iter().zip(sizes.iter().zip(numbers));
    let of = sets.map(|(set, (size, number))| match number > size {
        true => format!("{} from the {size} of {}", words::count(*number as u64, "document"), set.path),
        false => format!("{number} of the {} of {}", words::count(*size as u64, "document"), set.path),
    });
    format!("`interleave_probs`: an epoch takes {}", of.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_have_their_shares() {
        let first = |sizes: &[usize], shares: &[f64]| interleaved(sizes, shares, Stopping::FirstExhausted);
        let all = |sizes: &[usize], shares: &[f64]| interleaved(sizes, shares, Stopping::AllExhausted);
        assert_eq!(first(&[300, 80], &[0.6, 0.4]), [120, 80]);
        assert_eq!(all(&[300, 80], &[0.6, 0.4]), [300, 200]);
        assert_eq!(first(&[100, 100], &[0.5, 0.5]), [100, 100]);
        assert_eq!(all(&[7, 1000, 30], &[0.1, 0.2, 0.7]), [500, 1000, 3500]);
        assert_eq!(first(&[1_000_000, 3], &[0.999_999, 0.000_001]), [1_000_000, 1]);
        assert_eq!(first(&[0, 10], &[0.5, 0.5]), [0, 10], "a set without documents ends nothing");
    }

    #[test]
    fn a_number_is_all_documents_so_often_and_a_part() {
        let of = |number, size| {
            let Repeats { whole, part } = Repeats::of_number(number, size);
            (whole, (part * size as f64).round() as usize)
        };
        assert_eq!([of(7, 3), of(3, 3), of(2, 3), of(0, 3), of(3, 0)], [(2, 1), (1, 0), (0, 2), (0, 0), (0, 0)]);
    }
}
