//! Documents that several nodes hold: every node deals its own, all in step, none is lost or dealt twice in an epoch, also
//! where the number of nodes changes in the middle of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use data::{
    Batch, DataError, DatasetKind, DatasetSpec, DialogueOptions, DocumentSet, Held, Layout, Loader, LoaderSpec,
    Padding, Position, PrepareOptions, RowShard, Share, Truncation, extent, join, remaining,
};

const DOCUMENTS: usize = 131;
const LONGEST: usize = 24;

/// Rows of token ids, the first of which says which row it is. Every seventh is longer than a row, and cut out.
fn file(folder: &std::path::Path) -> std::path::PathBuf {
    let row = |i: usize| {
        let length = if i % 7 == 3 { LONGEST + 9 } else { 2 + (i * 37) % (LONGEST - 2) };
        let ids: Vec<String> = (0..length).map(|t| if t == 0 { i + 1 } else { 1 + t % 5 }.to_string()).collect();
        format!("{{\"input_ids\": [{}]}}\n", ids.join(","))
    };
    let path = folder.join("rows.jsonl");
    std::fs::write(&path, (0..DOCUMENTS).map(row).collect::<String>()).unwrap();
    path
}

fn encoded(path: &std::path::Path, shard: RowShard) -> Result<data::EncodedCorpus, DataError> {
    let options = PrepareOptions {
        max_length: LONGEST,
        truncation: Truncation::Delete,
        vocab_size: 1000,
        positions: None,
        workers: 0,
        dialogue: DialogueOptions::default(),
        preference: data::PreferenceOptions::default(),
    };
    data::prepare(&[DatasetSpec { shard, ..DatasetSpec::new(path, DatasetKind::Tokens) }], None, &options)
}

/// Returns the documents as each of `of` nodes knows them.
fn nodes(path: &std::path::Path, of: usize) -> Vec<DocumentSet> {
    let own: Vec<_> = (0..of).map(|number| encoded(path, RowShard { number, of }).unwrap()).collect();
    let held: Vec<Held> = own.iter().map(|own| Held::of(&own.corpus, &own.summary)).collect();
    let held: Vec<Held> = held.iter().map(|held| Held::from_bytes(&held.to_bytes()).unwrap()).collect();
    let joined = own.iter().enumerate().map(|(number, own)| {
        let (corpus, summary) = join(&own.corpus, &held, number).unwrap();
        assert_eq!(summary.datasets[0].rows_read, DOCUMENTS);
        DocumentSet::all(Arc::new(corpus))
    });
    joined.collect()
}

fn spec(layout: Layout, ranks: usize) -> LoaderSpec {
    LoaderSpec {
        batch_size: 2,
        share: Share::among(ranks),
        seq_len: LONGEST,
        layout,
        padding: Padding::End,
        shuffle: true,
        seed: 3,
        epochs: Some(2),
        pad_id: 0,
        longest_padding: 8,
        prefetch: 0,
        logits: Vec::new(),
        images: None,
    }
}

fn layouts() -> [Layout; 3] {
    [Layout::Packed, Layout::Padded(vec![8, 16, 24]), Layout::Joined(vec![24, 48])]
}

/// Rows of the file that a batch has.
fn rows(batch: &Batch) -> Vec<usize> {
    let begins = |t: &usize| batch.document_start[*t] as usize == t % batch.seq_len;
    let real = |t: &usize| batch.input_ids[*t] > 0 && batch.position_ids[*t] == 0 && begins(t);
    (0..batch.input_ids.len()).filter(real).map(|t| batch.input_ids[t] as usize - 1).collect()
}

/// Returns at most `most` rounds of all nodes from a position on, as rows of the file by node, and the position after them.
fn deal(sets: &[DocumentSet], spec: &LoaderSpec, from: &Position, most: usize) -> (Vec<Vec<Vec<usize>>>, Position) {
    let in_part = spec.share.ranks / sets.len();
    let mut loaders: Vec<Loader> =
        sets.iter().map(|set| Loader::new(set.clone(), spec.clone(), from.clone()).unwrap()).collect();
    let mut rounds = Vec::new();
    while rounds.len() < most {
        let round: Vec<Vec<Batch>> = loaders
            .iter_mut()
            .map(|loader| loader.by_ref().take(spec.share.ranks).map(Result::unwrap).collect())
            .collect();
        if round[0].is_empty() {
            assert!(round.iter().all(Vec::is_empty), "nodes end together");
            break;
        }
        for (node, batches) in round.iter().enumerate() {
            assert_eq!(batches.len(), spec.share.ranks);
            for (rank, batch) in batches.iter().enumerate() {
                assert_eq!(batch.remote.is_none(), rank / in_part == node, "node {node}, rank {rank}");
                let there = &round[rank / in_part][rank];
                assert_eq!((batch.batch, batch.seq_len), (there.batch, there.seq_len), "nodes step together");
                let tokens = there.input_ids.iter().filter(|id| **id > 0).count();
                assert!(batch.remote.is_none_or(|remote| remote == tokens), "{:?} of {tokens}", batch.remote);
            }
        }
        let own = round.iter().map(|of| of.iter().filter(|batch| batch.remote.is_none()).flat_map(rows).collect());
        rounds.push(own.collect());
        let position = loaders[0].position();
        assert!(loaders.iter().all(|loader| loader.position() == position));
    }
    (rounds, loaders[0].position())
}

/// Counts how often each row was distributed.
fn times<'a>(rounds: impl IntoIterator<Item = &'a Vec<Vec<usize>>>) -> BTreeMap<usize, usize> {
    let mut times = BTreeMap::new();
    rounds.into_iter().flatten().flatten().for_each(|row| *times.entry(*row).or_default() += 1);
    times
}

fn kept() -> Vec<usize> {
    (0..DOCUMENTS).filter(|row| row % 7 != 3).collect()
}

#[test]
fn every_node_deals_its_own_rows_and_all_of_them_twice_in_two_epochs() {
    let place = tempfile::tempdir().unwrap();
    let path = file(place.path());
    for (count, in_part) in [(2, 1), (3, 2), (5, 1)] {
        let sets = nodes(&path, count);
        for layout in layouts() {
            let spec = spec(layout, count * in_part);
            let (rounds, _) = deal(&sets, &spec, &Position::default(), usize::MAX);
            for round in &rounds {
                for (node, rows) in round.iter().enumerate() {
                    assert!(rows.iter().all(|row| row % count == node), "node {node} of {count}: {rows:?}");
                }
            }
            let expected: BTreeMap<usize, usize> = kept().into_iter().map(|row| (row, 2)).collect();
            assert_eq!(times(&rounds), expected);
            let extent = extent(&sets[0], &spec).unwrap();
            assert_eq!(extent.micro_batches, rounds.len() as u64);
            // An epoch ends for all nodes at once.
            let first = extent.ends[0] as usize;
            assert!(times(&rounds[..first]).values().all(|times| *times == 1) && first < rounds.len());
            assert_eq!(times(&rounds[..first]).len(), expected.len());
        }
    }
}

#[test]
fn another_number_of_nodes_deals_what_is_left_of_the_epoch() {
    let place = tempfile::tempdir().unwrap();
    let path = file(place.path());
    for layout in layouts() {
        // One node, then three, then two, then one, then two again, each a few rounds into the epoch.
        let (mut all, mut position) = (Vec::new(), Position::default());
        for (count, most) in [(1, 5), (3, 4), (2, 3), (1, 2), (2, usize::MAX)] {
            let spec = LoaderSpec { epochs: Some(1), ..spec(layout.clone(), count) };
            let sets = if count == 1 { vec![alone(&path)] } else { nodes(&path, count) };
            let left: u64 = remaining(&sets[0], &spec, position.clone()).unwrap().iter().sum();
            let (rounds, after) = deal(&sets, &spec, &position, most);
            assert!(rounds.len() == most || rounds.len() as u64 == left, "{left} rounds were left");
            assert!(!rounds.is_empty(), "{count} nodes have nothing left to do");
            all.extend(rounds);
            // As a checkpoint keeps it.
            position = serde_json::from_value(serde_json::to_value(&after).unwrap()).unwrap();
            assert_eq!(position, after);
        }
        let expected: BTreeMap<usize, usize> = kept().into_iter().map(|row| (row, 1)).collect();
        assert_eq!(times(&all), expected, "{layout:?}");
    }
}

fn alone(path: &std::path::Path) -> DocumentSet {
    DocumentSet::all(encoded(path, RowShard::ALL).unwrap().corpus)
}

#[test]
fn a_place_of_one_node_is_written_as_ever() {
    let position: Position = serde_json::from_str(r#"{"epoch": 1, "window": 2, "bin": 3}"#).unwrap();
    assert_eq!((position.epoch, position.first.window, position.first.bin, position.parts()), (1, 2, 3, 1));
    assert_eq!(serde_json::to_string(&position).unwrap(), r#"{"epoch":1,"window":2,"bin":3}"#);
}

#[test]
fn all_numbers_of_nodes_know_the_same_documents() {
    let place = tempfile::tempdir().unwrap();
    let path = file(place.path());
    let alone = alone(&path);
    for count in [2, 3, 5] {
        for set in nodes(&path, count) {
            assert_eq!(set.outline(), alone.outline());
            assert_ne!(set.digest(), alone.digest());
            let lengths = |of: &DocumentSet| (0..of.corpus.len()).map(|i| of.corpus.length(i)).collect::<Vec<_>>();
            assert_eq!(lengths(&set), lengths(&alone));
        }
    }
}

#[test]
fn nodes_that_read_something_else_are_told() {
    let place = tempfile::tempdir().unwrap();
    let path = file(place.path());
    let of = |number: usize, of: usize| {
        let own = encoded(&path, RowShard { number, of }).unwrap();
        (Held::of(&own.corpus, &own.summary), own.corpus)
    };
    // The rows of another division.
    let ((first, corpus), (second, _)) = (of(0, 2), of(1, 3));
    let error = join(&corpus, &[first, second], 0).unwrap_err().to_string();
    assert!(error.contains("did not read the same sets of rows"), "{error}");
    assert!(Held::from_bytes(b"12345678nothing").is_none());
}
