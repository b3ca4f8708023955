//! Best-fit packing: whole documents into rows of a fixed length.
//!
//! Knows lengths only.

use std::collections::{BTreeMap, BTreeSet};

/// Distributes documents of the given lengths over rows of `capacity` tokens: the longest document first, each into the
/// fullest row that still holds it. Rows come in the order of their earliest document, documents inside a row in their
/// given order, so that the order of the data decides the order of training. The result depends on nothing else.
///
/// Panics if a document is longer than `capacity`.
pub fn best_fit(lengths: &[usize], capacity: usize) -> Vec<Vec<u32>> {
    let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(lengths[i as usize]), i));
    let mut rows: Vec<Vec<u32>> = Vec::new();
    // Rows by the room that is left in them.
    let mut room: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for i in order {
        let length = lengths[i as usize];
        assert!(length <= capacity, "a document of {length} tokens was not cut to the row length {capacity}");
        let tightest = room.range(length..).next().map(|(&left, rows)| (left, *rows.first().expect("never empty")));
        let (left, row) = match tightest {
            Some((left, row)) => {
                let peers = room.get_mut(&left).expect("just found");
                peers.remove(&row);
                if peers.is_empty() {
                    room.remove(&left);
                }
                (left, row)
            }
            None => {
                rows.push(Vec::new());
                (capacity, rows.len() - 1)
            }
        };
        rows[row].push(i);
        room.entry(left - length).or_default().insert(row);
    }
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows.sort_unstable_by_key(|row| row[0]);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensor::philox::{Purpose, word};

    fn random_lengths(seed: u64, count: u64, capacity: usize) -> Vec<usize> {
        (0..count)
            .map(|i| {
                let u = word(seed, Purpose::Shuffle, 9, 0, i) as usize;
                // Skewed as real data is: mostly short, some as long as the row.
                let bound = if u.is_multiple_of(7) { capacity } else { capacity / 4 + 1 };
                1 + (u / 7) % bound
            })
            .collect()
    }

    #[test]
    fn every_document_lies_whole_in_exactly_one_row() {
        for seed in 0..200 {
            let capacity = 1 + (word(seed, Purpose::Shuffle, 8, 0, 0) % 300) as usize;
            let lengths = random_lengths(seed, seed * 3, capacity);
            let rows = best_fit(&lengths, capacity);
            let mut seen = vec![0; lengths.len()];
            for row in &rows {
                assert!(!row.is_empty() && row.is_sorted());
                assert!(row.iter().map(|&i| lengths[i as usize]).sum::<usize>() <= capacity);
                row.iter().for_each(|&i| seen[i as usize] += 1);
            }
            assert!(seen.iter().all(|&times| times == 1), "seed {seed}");
            assert!(rows.is_sorted_by_key(|row| row[0]));
            assert_eq!(rows, best_fit(&lengths, capacity));
        }
    }

    #[test]
    fn rows_are_nearly_full() {
        let lengths = random_lengths(1, 4000, 2048);
        let rows = best_fit(&lengths, 2048);
        let fill = lengths.iter().sum::<usize>() as f64 / (rows.len() * 2048) as f64;
        assert!(fill > 0.97, "{fill}");
    }

    #[test]
    fn the_tightest_row_is_taken() {
        assert_eq!(best_fit(&[4, 7, 6, 3], 10), [vec![0, 2], vec![1, 3]]);
        assert!(best_fit(&[], 10).is_empty());
    }

    #[test]
    #[should_panic(expected = "was not cut")]
    fn a_document_longer_than_a_row_is_our_mistake() {
        best_fit(&[11], 10);
    }
}
