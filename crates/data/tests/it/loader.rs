//! The stream of batches: every document once an epoch, positions that can be sought, padding that is not trained.

use std::collections::BTreeMap;
use std::sync::Arc;

use tensor::philox::{Purpose, word};

use data::boxes::{BoxForm, Units};
use data::image::{Limits, Pixels, Processor, png};
use data::image_source::{ImageRef, ImageSource};
use data::patches::Form;
use data::pictures::ImageReader;
use data::{
    Batch, Corpus, Document, DocumentSet, IGNORE, Layout, Loader, LoaderSpec, Padding, Position, Share, extent,
};

const PAD: i32 = 0;

/// Document `d` is the tokens 1000·(d+1) + 0, 1, 2, …; its first token is not trained.
fn corpus(count: usize) -> DocumentSet {
    let document = |d: usize| {
        let length = 2 + (d * 37) % 23;
        Document::all_trained((0..length as i32).map(|t| 1000 * (d as i32 + 1) + t).collect())
    };
    DocumentSet::all(Arc::new(Corpus::of((0..count).map(document))))
}

fn spec(layout: Layout, prefetch: usize) -> LoaderSpec {
    let padding = Padding::End;
    LoaderSpec {
        batch_size: 3,
        share: Share::WHOLE,
        seq_len: 32,
        layout,
        padding,
        shuffle: true,
        seed: 11,
        epochs: Some(2),
        pad_id: PAD,
        longest_padding: usize::MAX,
        prefetch,
        logits: Vec::new(),
        images: None,
    }
}

fn batches(documents: &DocumentSet, spec: &LoaderSpec, from: Position) -> Vec<Batch> {
    Loader::new(documents.clone(), spec.clone(), from).unwrap().map(Result::unwrap).collect()
}

/// Checks every invariant of a batch against the corpus; counts how often each document appears.
fn check(batch: &Batch, documents: &DocumentSet, seen: &mut BTreeMap<usize, usize>) {
    let size = batch.batch * batch.seq_len;
    for (length, name) in [
        (batch.input_ids.len(), "input_ids"),
        (batch.position_ids.len(), "position_ids"),
        (batch.targets.len(), "targets"),
        (batch.weights.len(), "weights"),
        (batch.document_start.len(), "document_start"),
    ] {
        assert_eq!(length, size, "{name}");
    }
    for row in 0..batch.batch {
        let at = |t: usize| row * batch.seq_len + t;
        let mut t = 0;
        while t < batch.seq_len {
            let id = batch.input_ids[at(t)];
            let length = if id == PAD { batch.seq_len - t } else { documents.corpus.length(id as usize / 1000 - 1) };
            for k in 0..length {
                let i = at(t + k);
                assert_eq!(batch.document_start[i] as usize, t, "row {row}, token {t}+{k}");
                assert_eq!(batch.position_ids[i] as usize, k);
                let trained = id != PAD && k + 1 < length;
                assert_eq!(batch.input_ids[i], if id == PAD { PAD } else { id + k as i32 });
                assert_eq!(batch.targets[i], if trained { id + k as i32 + 1 } else { IGNORE });
                assert_eq!(batch.weights[i], if trained { 1.0 } else { 0.0 });
            }
            if id != PAD {
                *seen.entry(id as usize / 1000 - 1).or_default() += 1;
            }
            t += length;
        }
    }
}

#[test]
fn every_document_comes_once_an_epoch_whole() {
    let documents = corpus(100);
    for layout in [Layout::Packed, Layout::Padded(vec![8, 16, 32]), Layout::Padded(vec![32])] {
        let spec = spec(layout, 0);
        let mut seen = BTreeMap::new();
        let all = batches(&documents, &spec, Position::default());
        all.iter().for_each(|batch| check(batch, &documents, &mut seen));
        assert_eq!(seen.len(), 100);
        assert!(seen.values().all(|&times| times == 2), "{seen:?}");
        assert_eq!(all.len() as u64, extent(&documents, &spec).unwrap().micro_batches);
    }
}

/// Attention is compiled for the longest document: padding must not be longer.
#[test]
fn padding_of_packed_rows_is_no_longer_than_asked() {
    let documents = corpus(7);
    let whole = spec(Layout::Packed, 0);
    let cut = LoaderSpec { longest_padding: 5, ..whole.clone() };
    let (whole, cut) =
        (batches(&documents, &whole, Position::default()), batches(&documents, &cut, Position::default()));
    let mut pieces = 0;
    for (a, b) in whole.iter().zip(&cut) {
        assert_eq!((&a.input_ids, &a.targets, &a.weights), (&b.input_ids, &b.targets, &b.weights));
        for t in (0..b.input_ids.len()).filter(|t| b.input_ids[*t] == PAD) {
            assert!(b.position_ids[t] < 5);
            assert_eq!(b.document_start[t] + b.position_ids[t], (t % b.seq_len) as i32);
            pieces += usize::from(b.position_ids[t] == 0);
        }
    }
    assert!(pieces > whole.len() * 3, "{pieces} pieces");
}

#[test]
fn padded_rows_take_the_smallest_bucket() {
    let documents = corpus(40);
    let all = batches(&documents, &spec(Layout::Padded(vec![8, 16, 32]), 0), Position::default());
    let mut lengths: Vec<usize> = all.iter().map(|batch| batch.seq_len).collect();
    lengths.sort_unstable();
    lengths.dedup();
    assert_eq!(lengths, [16, 32]);
    for batch in &all {
        let longest = batch.document_start.chunks(batch.seq_len).map(|row| row[batch.seq_len - 1] as usize).max();
        assert!(
            batch.seq_len == 8 || longest.unwrap() > batch.seq_len / 2 || batch.input_ids.iter().all(|&id| id != PAD)
        );
    }
}

#[test]
fn epochs_differ_and_repeat_exactly() {
    let documents = corpus(100);
    let all = batches(&documents, &spec(Layout::Packed, 0), Position::default());
    assert_eq!(all, batches(&documents, &spec(Layout::Packed, 2), Position::default()));
    let other = LoaderSpec { seed: 12, ..spec(Layout::Packed, 0) };
    assert_ne!(all, batches(&documents, &other, Position::default()));
    let half = all.len() / 2;
    assert_ne!(all[0], all[half]);
}

#[test]
fn a_stored_position_continues_exactly() {
    let documents = corpus(100);
    for prefetch in [0, 4] {
        let spec = spec(Layout::Packed, prefetch);
        let all = batches(&documents, &spec, Position::default());
        let mut loader = Loader::new(documents.clone(), spec.clone(), Position::default()).unwrap();
        for taken in 0..all.len() {
            let text = serde_json::to_string(&loader.position()).unwrap();
            let rest = batches(&documents, &spec, serde_json::from_str(&text).unwrap());
            assert_eq!(rest, all[taken..], "after {taken} batches");
            loader.next().unwrap().unwrap();
        }
        assert!(loader.next().is_none());
    }
}

#[test]
fn without_shuffling_the_order_is_that_of_the_data() {
    let documents = corpus(50);
    let spec = LoaderSpec { shuffle: false, ..spec(Layout::Padded(vec![32]), 0) };
    let firsts: Vec<i32> = batches(&documents, &spec, Position::default())
        .iter()
        .flat_map(|batch| batch.input_ids.chunks(batch.seq_len).map(|row| row[0]).collect::<Vec<_>>())
        .filter(|&id| id != PAD)
        .collect();
    let once: Vec<i32> = (1..=50).map(|d| 1000 * d).collect();
    assert_eq!(firsts, [once.clone(), once].concat());
}

#[test]
fn counting_many_epochs_ends_when_it_is_asked_to() {
    let asked = std::cell::Cell::new(0);
    let stop = || {
        asked.set(asked.get() + 1);
        asked.get() > 3
    };
    let spec = LoaderSpec { epochs: Some(u64::MAX), ..spec(Layout::Packed, 0) };
    let stopped = data::extent_unless(&corpus(64), &spec, &stop);
    assert!(matches!(stopped, Err(data::DataError::Stopped)) && asked.get() == 4);
}

#[test]
fn the_extent_counts_what_the_loader_gives() {
    let documents = corpus(64);
    let spec = spec(Layout::Packed, 0);
    let extent = extent(&documents, &spec).unwrap();
    let mut rows = 0;
    for batch in batches(&documents, &spec, Position::default()) {
        rows += batch.input_ids.chunks(batch.seq_len).filter(|row| row[0] != PAD).count() as u64;
    }
    assert_eq!(extent.rows, rows);
    assert!(extent.fill > 0.9 && extent.fill <= 1.0, "{}", extent.fill);
}

/// The numbers of the documents of a batch.
fn documents_of(batch: &Batch) -> Vec<i32> {
    let first = |(id, position): (&i32, &i32)| (*position == 0 && *id != PAD).then_some(*id / 1000 - 1);
    batch.input_ids.iter().zip(&batch.position_ids).filter_map(first).collect()
}

#[test]
fn a_step_ends_with_its_epoch_and_has_no_document_twice() {
    for (count, layout, prefetch) in [
        (7, Layout::Packed, 0),
        (64, Layout::Packed, 3),
        (100, Layout::Packed, 0),
        (13, Layout::Padded(vec![16, 32]), 2),
        (9, Layout::Joined(vec![64, 96]), 0),
    ] {
        let documents = corpus(count);
        let spec = spec(layout, prefetch);
        let extent = extent(&documents, &spec).unwrap();
        for accumulation in [1, 3, 50] {
            let mut loader = Loader::new(documents.clone(), spec.clone(), Position::default()).unwrap();
            let (mut steps, mut epochs) = (0, 0);
            loop {
                let mut seen = Vec::new();
                for _ in 0..accumulation {
                    seen.extend(loader.next().map(|batch| documents_of(&batch.unwrap())).unwrap_or_default());
                    if loader.ends_epoch() {
                        break;
                    }
                }
                if seen.is_empty() {
                    break;
                }
                steps += 1;
                let all = seen.len();
                seen.sort_unstable();
                seen.dedup();
                assert_eq!(seen.len(), all, "{count} documents, {accumulation} micro-batches to a step");
                epochs += u64::from(loader.ends_epoch());
                assert_eq!(loader.position().epoch, epochs);
            }
            assert_eq!((steps, epochs), (extent.steps(accumulation), 2));
            assert_eq!(extent.steps_by_epoch(accumulation).count(), 2);
        }
    }
}

#[test]
fn own_positions_and_inner_borders_survive() {
    let own = Document { positions: Some(vec![3, 4, 0, 1]), ..Document::all_trained(vec![5, 6, 7, 8]) };
    let corpus = Corpus::of([own]);
    let spec = LoaderSpec { batch_size: 1, seq_len: 6, ..spec(Layout::Packed, 0) };
    let batch = batches(&DocumentSet::all(Arc::new(corpus)), &spec, Position::default()).remove(0);
    assert_eq!(batch.position_ids, [3, 4, 0, 1, 0, 1]);
    assert_eq!(batch.document_start, [0, 0, 2, 2, 4, 4]);
    assert_eq!(batch.targets, [6, IGNORE, 8, IGNORE, IGNORE, IGNORE]);
}

#[test]
fn batches_equal_those_made_from_labels() {
    for layout in [Layout::Packed, Layout::Padded(vec![16, 32])] {
        for batch in batches(&corpus(60), &spec(layout, 0), Position::default()) {
            let size = batch.input_ids.len();
            let mut labels = vec![IGNORE; size];
            let mut weights = vec![1.0; size];
            for t in (0..size).filter(|&t| batch.targets[t] != IGNORE) {
                labels[t + 1] = batch.targets[t];
                weights[t + 1] = batch.weights[t];
            }
            let (ids, positions) = (batch.input_ids.clone(), Some(batch.position_ids.clone()));
            let again =
                Batch::from_labels(batch.batch, batch.seq_len, ids, &labels, positions, Some(&weights)).unwrap();
            // Labels do not say where a row is filled up; ids of tokens here are at least 1000.
            let present = batch.input_ids.iter().map(|id| f32::from(u8::from(*id >= 1000))).collect();
            assert_eq!(Batch { present, ..again }, batch);
        }
    }
}

#[test]
fn documents_must_fit_and_exist() {
    let documents = corpus(10);
    let short = LoaderSpec { seq_len: 16, ..spec(Layout::Packed, 0) };
    let error = Loader::new(documents, short, Position::default()).err().unwrap();
    assert!(error.to_string().contains("a document has"), "{error}");
    let empty = DocumentSet::all(Arc::new(Corpus::default()));
    assert!(Loader::new(empty, spec(Layout::Packed, 0), Position::default()).is_err());
}

#[test]
fn an_endless_loader_stops_when_it_is_dropped() {
    let spec = LoaderSpec { epochs: None, ..spec(Layout::Packed, 3) };
    let mut loader = Loader::new(corpus(20), spec, Position::default()).unwrap();
    let taken = (0..50).map(|_| loader.next().unwrap()).count();
    assert_eq!(taken, 50);
    assert!(loader.position().epoch > 5);
    drop(loader);
}

/// Every trained (token, target, position), whatever is around it.
fn trained(batches: &[Batch]) -> Vec<(i32, i32, i32)> {
    let of = |batch: &Batch| {
        let tokens = batch.input_ids.iter().zip(&batch.targets).zip(&batch.position_ids);
        let trained = tokens.filter(|((_, target), _)| **target != IGNORE);
        trained.map(|((id, target), position)| (*id, *target, *position)).collect::<Vec<_>>()
    };
    batches.iter().flat_map(of).collect()
}

#[test]
fn padding_in_front_and_no_padding_train_the_same_tokens() {
    let documents = corpus(100);
    let plain = spec(Layout::Padded(vec![16, 32]), 0);
    let right = batches(&documents, &plain, Position::default());
    let front = LoaderSpec { padding: Padding::Beginning, ..plain.clone() };
    let left = batches(&documents, &front, Position::default());
    assert_eq!(trained(&right), trained(&left));
    assert!(left.iter().zip(&right).all(|(a, b)| (a.batch, a.seq_len) == (b.batch, b.seq_len)));
    for batch in &left[..left.len() - 1] {
        for (ids, starts) in batch.input_ids.chunks(batch.seq_len).zip(batch.document_start.chunks(batch.seq_len)) {
            let padding = ids.iter().take_while(|&&id| id == PAD).count();
            assert!(
                ids[padding..].iter().all(|&id| id != PAD) && starts[padding..].iter().all(|&s| s as usize == padding)
            );
        }
    }
    let joined = LoaderSpec { layout: Layout::Joined(vec![24, 48, 96]), ..plain };
    let joined = batches(&documents, &joined, Position::default());
    assert_eq!(trained(&right), trained(&joined));
    assert_eq!(joined.len(), right.len());
    let size = |all: &[Batch]| all.iter().map(|batch| batch.input_ids.len()).sum::<usize>();
    assert!(joined.iter().all(|batch| batch.batch == 1) && size(&joined) < size(&right));
    let half = joined.len() / 2;
    let mut loader =
        Loader::new(documents.clone(), spec(Layout::Joined(vec![24, 48, 96]), 0), Position::default()).unwrap();
    loader.by_ref().take(half).for_each(drop);
    assert_eq!(batches(&documents, &spec(Layout::Joined(vec![24, 48, 96]), 0), loader.position()), joined[half..]);
}

/// Concatenates the rows that the loaders of all ranks return for one micro-batch, as one loader of all rows would.
fn below_each_other(parts: &[Batch]) -> Batch {
    let mut all = Batch {
        batch: 0,
        input_ids: vec![],
        position_ids: vec![],
        targets: vec![],
        weights: vec![],
        document_start: vec![],
        present: vec![],
        ..parts[0].clone()
    };
    for part in parts {
        assert_eq!(part.seq_len, all.seq_len, "ranks step together");
        all.batch += part.batch;
        all.input_ids.extend(&part.input_ids);
        all.position_ids.extend(&part.position_ids);
        all.targets.extend(&part.targets);
        all.weights.extend(&part.weights);
        all.document_start.extend(&part.document_start);
        all.present.extend(&part.present);
    }
    all
}

#[test]
fn ranks_deal_one_packing_among_themselves() {
    let documents = corpus(150);
    for layout in [Layout::Packed, Layout::Padded(vec![8, 16, 32])] {
        let alone = LoaderSpec { batch_size: 6, ..spec(layout.clone(), 0) };
        let whole = batches(&documents, &alone, Position::default());
        for ranks in [2, 3, 6] {
            let of = |rank: usize, from: Position| {
                let share = Share { rank, here: 1, ranks };
                let of = LoaderSpec { batch_size: 6 / ranks, share, ..spec(layout.clone(), 2) };
                assert_eq!(extent(&documents, &of).unwrap(), extent(&documents, &alone).unwrap());
                Loader::new(documents.clone(), of, from).unwrap()
            };
            let mut loaders: Vec<Loader> = (0..ranks).map(|rank| of(rank, Position::default())).collect();
            for (number, expected) in whole.iter().enumerate() {
                let parts: Vec<Batch> = loaders.iter_mut().map(|loader| loader.next().unwrap().unwrap()).collect();
                assert_eq!(&below_each_other(&parts), expected, "{ranks} ranks");
                let position = loaders[0].position();
                assert!(loaders.iter().all(|loader| loader.position() == position));
                // Another number of ranks continues where these are.
                if number == whole.len() / 2 {
                    assert_eq!(batches(&documents, &alone, position), whole[number + 1..]);
                }
            }
            assert!(loaders.iter_mut().all(|loader| loader.next().is_none()));
        }
    }
}

#[test]
fn one_loader_serves_all_ranks_in_turn() {
    let documents = corpus(150);
    for layout in [Layout::Packed, Layout::Padded(vec![8, 16, 32]), Layout::Joined(vec![32, 64])] {
        for (ranks, prefetch) in [(2, 0), (3, 2), (4, 5)] {
            let of = |share: Share, epochs: u64| LoaderSpec {
                batch_size: 2,
                share,
                epochs: Some(epochs),
                ..spec(layout.clone(), prefetch)
            };
            let each: Vec<Vec<Batch>> = (0..ranks)
                .map(|rank| batches(&documents, &of(Share { rank, here: 1, ranks }, 2), Position::default()))
                .collect();
            let rounds = each[0].len();
            let expected: Vec<&Batch> = (0..rounds).flat_map(|round| each.iter().map(move |of| &of[round])).collect();
            let mut all = Loader::new(documents.clone(), of(Share::among(ranks), 2), Position::default()).unwrap();
            let (mut number, mut begun) = (0, Position::default());
            while let Some(batch) = all.next() {
                assert_eq!(&batch.unwrap(), expected[number], "{ranks} ranks, batch {number}");
                number += 1;
                // In the middle of a round its beginning is what is known.
                if number.is_multiple_of(ranks) {
                    assert!(all.position() > begun);
                    begun = all.position();
                } else {
                    assert_eq!(all.position(), begun);
                }
            }
            assert_eq!(number, expected.len());
        }
    }
}

/// Lengths of conversations, questions and texts as datasets have them: packing wastes little of any.
#[test]
fn rows_are_full_for_lengths_of_many_kinds() {
    let random = |i: u64, k: u32| f64::from(word(3, Purpose::Shuffle, 6, k, i)) / f64::from(u32::MAX);
    let normal = |i| (-2.0 * random(i, 0).max(1e-9).ln()).sqrt() * (std::f64::consts::TAU * random(i, 1)).cos();
    let seq_len = 2048.0;
    let kinds: [(&str, &dyn Fn(u64) -> f64); 3] = [
        ("conversations", &|i| 600.0 * (0.9 * normal(i)).exp()),
        ("questions", &|i| 150.0 * (0.5 * normal(i)).exp()),
        ("texts in pieces", &|i| if random(i, 2) < 0.6 { seq_len } else { seq_len * random(i, 3) }),
    ];
    for (name, length) in kinds {
        let document = |i: u64| Document::all_trained(vec![1; (length(i).min(seq_len) as usize).max(2)]);
        let documents = DocumentSet::all(Arc::new(Corpus::of((0..12_000).map(document))));
        let spec = LoaderSpec { seq_len: seq_len as usize, epochs: Some(1), ..spec(Layout::Packed, 0) };
        let fill = extent(&documents, &spec).unwrap().fill;
        println!("{name}: {:.2} % full", 100.0 * fill);
        assert!(fill >= 0.97, "{name}: {fill}");
    }
}

/// Documents of up to two images in files of this folder, and what reads them: patches of 4 × 4 pixels, of which 2 × 2 are a
/// token.
fn documents_with_images(folder: &std::path::Path) -> (DocumentSet, Arc<ImageReader>) {
    const TOKEN: i32 = 9;
    let config = serde_json::json!({
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    });
    let form = Form { token: TOKEN, width: 48, side: 2, window: 0, table: 0, stretched: false, breaks: false, pad: 0 };
    let processor = Processor::of("a test", &config).unwrap();
    let boxes = BoxForm { units: Units::Pixels, marked: false };
    let reader = ImageReader { form, processor, limits: Limits::default(), boxes, rooms: Vec::new() };
    let document = |d: usize| {
        let mut made = Document::all_trained(vec![1000 + d as i32]);
        for number in 0..d % 3 {
            let (height, width) = (8 * (1 + d % 2), 8 + 5 * number);
            let rgb = (0..3 * height * width).map(|at| (at * (7 * d + number + 1)) as u8).collect();
            let bytes = png(&Pixels { height, width, rgb });
            let path = folder.join(format!("{d}-{number}.png"));
            std::fs::write(&path, &bytes).unwrap();
            let tokens = reader.tokens(&reader.grids([height, width]).unwrap());
            made.ids.extend(std::iter::repeat_n(TOKEN, tokens).chain([2]));
            made.images.push(ImageRef::new(ImageSource::Path(path), &bytes));
        }
        Document { images: made.images, ..Document::all_trained(made.ids) }
    };
    (DocumentSet::all(Arc::new(Corpus::of((0..24).map(document)))), Arc::new(reader))
}

#[test]
fn images_that_are_read_ahead_are_those_of_their_batches() {
    let folder = tempfile::tempdir().unwrap();
    let (documents, reader) = documents_with_images(folder.path());
    let of = |prefetch: usize| LoaderSpec {
        batch_size: 1,
        share: Share { rank: 0, here: 2, ranks: 2 },
        images: Some(reader.clone()),
        ..spec(Layout::Packed, prefetch)
    };
    let plain = batches(&documents, &of(0), Position::default());
    assert!(plain.iter().any(|batch| batch.patches.pixels.iter().any(|byte| *byte != 0)));
    let mut loader = Loader::new(documents.clone(), of(3), Position::default()).unwrap();
    let mut places = vec![loader.position()];
    for (number, batch) in plain.iter().enumerate() {
        assert_eq!(loader.next().unwrap().unwrap(), *batch, "{number}");
        places.push(loader.position());
    }
    assert!(loader.next().is_none());
    // The place is that of the batch that was handed out, not of the one that is read ahead.
    for (taken, place) in places.into_iter().enumerate().step_by(2) {
        assert_eq!(batches(&documents, &of(3), place), plain[taken..], "{taken}");
    }
}

#[test]
fn an_image_that_changes_is_an_error_of_its_batch() {
    let folder = tempfile::tempdir().unwrap();
    let (documents, reader) = documents_with_images(folder.path());
    let of = |prefetch: usize| LoaderSpec {
        batch_size: 1,
        shuffle: false,
        images: Some(reader.clone()),
        ..spec(Layout::Padded(vec![32]), prefetch)
    };
    std::fs::write(folder.path().join("10-0.png"), b"another").unwrap();
    for prefetch in [0, 2] {
        let loader = Loader::new(documents.clone(), of(prefetch), Position::default()).unwrap();
        let wrong: Vec<(usize, String)> =
            loader.take(20).enumerate().filter_map(|(at, made)| Some((at, made.err()?.to_string()))).collect();
        assert_eq!(wrong.len(), 1, "{wrong:?}");
        assert!(wrong[0].0 == 10 && wrong[0].1.contains("10-0.png has changed since the row was read"), "{wrong:?}");
    }
}
