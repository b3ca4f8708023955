//! Streams over files of token ids: passes, places, shares, counts.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use crate::batch::Batch;
use crate::dataset::{DatasetKind, DatasetSpec};
use crate::dialogue::DialogueOptions;
use crate::document::{IGNORE, Truncation};
use crate::loader::Loader;
use crate::loader_spec::{Layout, LoaderSpec, Padding, Share};
use crate::preference::PreferenceOptions;
use crate::row_order::Position;

/// Files of rows of token ids, of which each row has its own.
struct Files {
    folder: tempfile::TempDir,
    sets: Vec<StreamSet>,
}

impl Files {
    /// A set for each list of numbers of rows.
    fn new(sets: &[&[usize]]) -> Files {
        let folder = tempfile::tempdir().unwrap();
        let mut id = 1;
        let mut set = |(number, files): (usize, &&[usize])| {
            let place = folder.path().join(format!("set{number}"));
            std::fs::create_dir(&place).unwrap();
            for (file, rows) in files.iter().enumerate() {
                let row = |_| {
                    id += 1;
                    format!("{{\"input_ids\": {:?}}}\n", vec![id; 2 + id % 5])
                };
                std::fs::write(place.join(format!("{file}.jsonl")), (0..*rows).map(row).collect::<String>()).unwrap();
            }
            StreamSet::here(DatasetSpec::new(place, DatasetKind::Tokens)).unwrap()
        };
        let sets = sets.iter().enumerate().map(&mut set).collect();
        Files { folder, sets }
    }

    fn begin(&self, buffer: usize, shares: &[f64], shuffle: bool) -> Arc<Stream> {
        self.begin_with(buffer, shares, shuffle, Arc::new(|_| {}))
    }

    fn begin_with(&self, buffer: usize, shares: &[f64], shuffle: bool, notify: Notify) -> Arc<Stream> {
        self.begin_over(buffer, shares, shuffle, notify, |shards| Box::new(shards))
    }

    fn begin_over(
        &self,
        buffer: usize,
        shares: &[f64],
        shuffle: bool,
        notify: Notify,
        over: impl Fn(LocalShards) -> Box<dyn Shards> + Send + Sync + 'static,
    ) -> Arc<Stream> {
        let files = self.sets.iter().map(|set| set.files.iter().map(|file| file.name.clone().into()).collect());
        let shards = LocalShards { files: files.collect() };
        let options = PrepareOptions {
            max_length: 8,
            truncation: Truncation::Delete,
            vocab_size: 10_000,
            positions: None,
            workers: 2,
            dialogue: DialogueOptions::default(),
            preference: PreferenceOptions::default(),
        };
        let order = StreamOptions { shuffle, seed: 7, buffer, shares: shares.to_vec() };
        let open: OpenShards = Arc::new(move || Ok(over(shards.clone())));
        Stream::begin(&self.sets, (None, &options), order, open, notify, &|| false).unwrap().0
    }
}

#[test]
fn a_file_that_cannot_be_opened_ends_the_stream() {
    let files = Files::new(&[&[3, 3]]);
    let stream = files.begin(2, &[], false);
    std::fs::remove_file(&files.sets[0].files[1].name).unwrap();
    let mut reader = stream.reader(StreamPlace::begin(1)).unwrap();
    let found = (0..4).map(|_| reader.window(&|| false)).find_map(Result::err).expect("the second file is gone");
    assert!(found.to_string().contains("1.jsonl"), "{found}");
}

#[test]
fn a_later_file_of_the_same_size_with_other_rows_is_another_stream() {
    let mut files = Files::new(&[&[3, 3]]);
    let before = files.begin(2, &[], false).digest().to_owned();
    let path = files.sets[0].files[1].name.clone();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen('5', "9", 1)).unwrap();
    assert_ne!(std::fs::read_to_string(&path).unwrap(), text);
    files.sets = vec![StreamSet::here(files.sets[0].spec.clone()).unwrap()];
    assert_ne!(files.begin(2, &[], false).digest(), before);
}

/// Files of which the second does not come before it may.
struct Late {
    files: LocalShards,
    may_come: Arc<AtomicBool>,
}

impl Shards for Late {
    fn get(&mut self, file: ShardId, next: &[ShardId], stop: Stop<'_>) -> Result<std::path::PathBuf, DataError> {
        while file.file == 1 && !is_over(&self.may_come) {
            if stop() {
                return Err(DataError::Stopped);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        self.files.get(file, next, stop)
    }

    fn release(&mut self, _: ShardId) {}
}

#[test]
fn a_wait_for_a_file_ends_when_it_is_to_and_takes_nothing() {
    let files = Files::new(&[&[6, 20]]);
    let may_come = Arc::new(AtomicBool::new(false));
    let shards = may_come.clone();
    let late = move |files| -> Box<dyn Shards> { Box::new(Late { files, may_come: shards.clone() }) };
    // The first window has the rows of the first file alone.
    let stream = files.begin_over(5, &[], false, Arc::new(|_| {}), late);
    let all: Vec<Vec<i32>> = {
        let known = files.begin(5, &[], false);
        let loader = Loader::streamed(&known, spec(Share::WHOLE, false), Position::default());
        loader.take(6).map(|batch| ids(&batch.unwrap())).collect()
    };
    let mut loader = Loader::streamed(&stream, spec(Share::WHOLE, false), Position::default());
    let mut taken = Vec::new();
    assert!(!loader.wait_for(6, &mut || true));
    assert_eq!(loader.position(), Position::default(), "what is there is not handed out");
    while loader.wait_for(1, &mut || true) {
        taken.push(ids(&loader.next().unwrap().unwrap()));
    }
    let position = loader.position();
    assert!(!taken.is_empty() && taken.len() < 5, "{taken:?}");
    // A loader that is given up while it waits ends, too.
    drop(loader);
    may_come.store(true, std::sync::atomic::Ordering::Relaxed);
    let rest = Loader::streamed(&stream, spec(Share::WHOLE, false), position);
    let rest = rest.take(6 - taken.len()).map(|batch| ids(&batch.unwrap()));
    let found: Vec<Vec<i32>> = taken.iter().cloned().chain(rest).collect();
    assert_eq!(found, all);
}

fn spec(share: Share, shuffle: bool) -> LoaderSpec {
    LoaderSpec {
        batch_size: 2,
        share,
        seq_len: 8,
        layout: Layout::Packed,
        padding: Padding::End,
        shuffle,
        seed: 7,
        epochs: None,
        pad_id: 0,
        longest_padding: 8,
        prefetch: 2,
        logits: Vec::new(),
        images: None,
    }
}

/// The ids of the documents of a batch, in their order.
fn ids(batch: &Batch) -> Vec<i32> {
    let documents = batch.input_ids.chunk_by(|a, b| a == b).map(|of| of[0]);
    documents.filter(|id| *id != 0).collect()
}

#[test]
fn each_pass_takes_every_document_once_in_another_order() {
    let files = Files::new(&[&[30, 0, 50, 20]]);
    for share in [Share::WHOLE, Share::among(2)] {
        let stream = files.begin(40, &[], true);
        let mut loader = Loader::streamed(&stream, spec(share, true), Position::default());
        let mut pass = || {
            let mut seen = Vec::new();
            loop {
                seen.extend(ids(&loader.next().unwrap().unwrap()));
                if loader.ends_epoch() {
                    return seen;
                }
            }
        };
        let (first, second) = (pass(), pass());
        assert_ne!(first, second);
        for mut seen in [first, second] {
            assert!(!seen.is_sorted());
            seen.sort_unstable();
            assert_eq!(seen, (2..102).collect::<Vec<i32>>());
        }
    }
}

#[test]
fn without_shuffling_windows_are_in_the_order_of_the_files() {
    let files = Files::new(&[&[10, 10]]);
    let stream = files.begin(1, &[], false);
    let loader = Loader::streamed(&stream, spec(Share::WHOLE, false), Position::default());
    let seen: Vec<i32> = loader.take(10).flat_map(|batch| ids(&batch.unwrap())).collect();
    assert_eq!(seen, (2..22).collect::<Vec<i32>>());
}

#[test]
fn a_stream_goes_on_at_every_position_with_the_same_batches() {
    let files = Files::new(&[&[30, 5, 50], &[7, 9]]);
    let stream = files.begin(16, &[0.7, 0.3], true);
    let share = Share::among(2);
    let mut loader = Loader::streamed(&stream, spec(share, true), Position::default());
    let mut positions = vec![loader.position()];
    let mut batches = Vec::new();
    for _ in 0..40 {
        batches.push(loader.by_ref().take(2).map(|batch| batch.unwrap().input_ids).collect::<Vec<_>>());
        positions.push(loader.position());
    }
    assert!(batches.iter().flatten().flatten().any(|id| *id != 0));
    drop(loader);
    for from in [0, 1, 7, 20, 39] {
        // A new process reads it from a checkpoint.
        let text = serde_json::to_string(&positions[from]).unwrap();
        let again = files.begin(16, &[0.7, 0.3], true);
        assert_eq!(again.digest(), stream.digest());
        let mut loader = Loader::streamed(&again, spec(share, true), serde_json::from_str(&text).unwrap());
        for expected in &batches[from..] {
            let found: Vec<_> = loader.by_ref().take(2).map(|batch| batch.unwrap().input_ids).collect();
            assert_eq!(&found, expected, "from {from}");
        }
    }
}

#[test]
fn sets_have_their_shares_and_begin_again() {
    let files = Files::new(&[&[400], &[10]]);
    let stream = files.begin(64, &[0.75, 0.25], true);
    let mut loader = Loader::streamed(&stream, spec(Share::WHOLE, true), Position::default());
    let mut counts = BTreeMap::new();
    while counts.values().sum::<usize>() < 4000 {
        let batch = loader.next().unwrap().unwrap();
        ids(&batch).into_iter().for_each(|id| *counts.entry(id).or_insert(0) += 1);
    }
    let small: usize = counts.range(402..).map(|(_, count)| count).sum();
    let share = small as f64 / counts.values().sum::<usize>() as f64;
    assert!((0.22..0.28).contains(&share), "{share}");
    let large: Vec<usize> = counts.range(..402).map(|(_, count)| *count).collect();
    assert_eq!(large.len(), 400);
    assert!(large.iter().max().unwrap() - large.iter().min().unwrap() <= 2, "{large:?}");
}

#[test]
fn targets_stay_inside_of_documents() {
    let files = Files::new(&[&[40]]);
    let stream = files.begin(16, &[], true);
    let loader = Loader::streamed(&stream, spec(Share::WHOLE, true), Position::default());
    for batch in loader.take(10) {
        let batch = batch.unwrap();
        let trained = batch.targets.iter().zip(&batch.input_ids).filter(|(target, _)| **target != IGNORE);
        assert!(trained.clone().count() > 0);
        trained.for_each(|(target, id)| assert_eq!(target, id));
    }
}

#[test]
fn what_became_of_rows_is_counted_beyond_the_first_window() {
    let files = Files::new(&[&[8, 8, 8]]);
    let bad = files.folder.path().join("set0/1.jsonl");
    let text = std::fs::read_to_string(&bad).unwrap();
    std::fs::write(&bad, text.lines().take(7).map(|line| format!("{line}\n")).collect::<String>() + "nonsense\n")
        .unwrap();
    let stream = files.begin(8, &[], false);
    let mut loader = Loader::streamed(&stream, spec(Share::WHOLE, false), Position::default());
    while !loader.ends_epoch() {
        loader.next().unwrap().unwrap();
    }
    let counted = &stream.counted().datasets[0];
    // Windows are read ahead.
    assert!(counted.rows_read >= 24 && counted.dropped.values().map(|of| of.rows).sum::<usize>() >= 1, "{counted:?}");
}

#[test]
fn rows_that_are_too_long_are_worth_a_warning_beyond_the_first_window() {
    let files = Files::new(&[&[20, 20]]);
    let path = files.folder.path().join("set0/1.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let long = format!("{{\"input_ids\": {:?}}}\n", vec![3; 20]);
    std::fs::write(&path, text.lines().take(14).map(|line| format!("{line}\n")).collect::<String>() + &long.repeat(6))
        .unwrap();
    let said = Arc::new(Mutex::new(Vec::new()));
    let heard = said.clone();
    let stream = files.begin_with(8, &[], false, Arc::new(move |text: &str| lock(&heard).push(text.to_owned())));
    let mut loader = Loader::streamed(&stream, spec(Share::WHOLE, false), Position::default());
    for _ in 0..3 {
        while !loader.ends_epoch() {
            loader.next().unwrap().unwrap();
        }
        loader.next().unwrap().unwrap();
    }
    let warnings: Vec<String> = lock(&said).iter().filter(|text| text.starts_with("Warning")).cloned().collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("are too long and dropped: `sequence_len`"), "{warnings:?}");
}

#[test]
fn sets_without_rows_are_refused() {
    let files = Files::new(&[&[0, 0]]);
    let shards = LocalShards { files: vec![files.sets[0].files.iter().map(|file| file.name.clone().into()).collect()] };
    let options = PrepareOptions {
        max_length: 8,
        truncation: Truncation::Delete,
        vocab_size: 10,
        positions: None,
        workers: 1,
        dialogue: DialogueOptions::default(),
        preference: PreferenceOptions::default(),
    };
    let order = StreamOptions { shuffle: true, seed: 1, buffer: 4, shares: Vec::new() };
    let open: OpenShards = Arc::new(move || Ok(Box::new(shards.clone())));
    let begun = Stream::begin(&files.sets, (None, &options), order, open, Arc::new(|_| {}), &|| false);
    assert!(begun.err().unwrap().to_string().contains("the dataset has no rows"));
}
