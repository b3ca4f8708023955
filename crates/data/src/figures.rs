//! Benchmarks, run on demand; they assert only what must hold on any machine. Reading cached rows: tokens per second and
//! memory, for a cache of 2 GiB (`bench/data/from_cache.py`). Laying out images: images per second (`bench/data/images.py`).
//!
//! The first uses internals of the cache, because encoding 500 million tokens would take too long.

use std::fs;
use std::sync::Arc;
use std::time::Instant;

use tensor::philox::{Purpose, word};

use crate::boxes::{BoxForm, Units};
use crate::cache::{ImageFiles, Key, Lookup, RowCache};
use crate::corpus::{Corpus, DocumentSet};
use crate::document::Document;
use crate::document::IGNORE;
use crate::gather::Gathering;
use crate::image::{Limits, Processor, size};
use crate::image_source::{ImageRef, ImageSource};
use crate::loader::{Loader, extent};
use crate::loader_spec::{Layout, LoaderSpec, Padding, Share};
use crate::patches::Form;
use crate::pictures::ImageReader;
use crate::row_order::Position;
use crate::summary::DatasetSummary;

const SEQ_LEN: usize = 2048;
/// Tokens of the cache if the variable says nothing: 2 GiB of ids.
const TOKENS: usize = 1 << 29;
const VARIABLE: &str = "SUROGATE_FIGURE_TOKENS";

/// A conversation: its length is log-normal around 300 tokens, a quarter of it is the question.
fn document(i: u64) -> Document {
    let uniform = |k: u64| f64::from(word(5, Purpose::Shuffle, 7, k as u32, i)) / f64::from(u32::MAX);
    let normal = (-2.0 * uniform(0).max(1e-9).ln()).sqrt() * (std::f64::consts::TAU * uniform(1)).cos();
    let n = ((300.0 * (0.8 * normal).exp()) as usize).clamp(8, SEQ_LEN);
    let mut document = Document::all_trained((0..n).map(|t| ((i as usize * 31 + t * 7) % 50_000) as i32).collect());
    document.labels[..n / 4].fill(IGNORE);
    document.weights[..n / 4].fill(0.0);
    document
}

/// Seconds that this thread has run.
fn processor_seconds() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts the time of threads");
    let nanoseconds = text.split(' ').next().and_then(|n| n.parse::<u64>().ok());
    nanoseconds.expect("its first number is the time") as f64 * 1e-9
}

/// Resident bytes of the process.
fn resident() -> usize {
    let text = fs::read_to_string("/proc/self/status").expect("Linux describes processes");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("with their memory");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("in kB") << 10
}

#[test]
#[ignore = "writes 2 GiB and measures; bench/data/from_cache.py runs it"]
fn reading_kept_rows() {
    let wanted: usize = std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(TOKENS);
    let place = tempfile::tempdir().unwrap();
    let cache = RowCache::new(place.path().to_owned());
    let key = Key { text: "figures".to_owned(), digest: "f".repeat(64) };
    let mut gathering = Gathering::new(Some(cache.begin(&key, &|| {}, &|| false).unwrap()));
    let mut written = 0;
    for i in 0.. {
        let document = document(i);
        written += document.len();
        gathering.push(&document).unwrap();
        if written >= wanted {
            break;
        }
    }
    let (_, writer, failed) = gathering.finish().unwrap();
    assert!(failed.is_none(), "{failed:?}");
    writer.unwrap().commit(&key, &DatasetSummary::default(), (Vec::new(), &ImageFiles::default())).unwrap();

    let before = resident();
    let start = processor_seconds();
    let Lookup::Rows(corpus, _) = cache.find(&key, &|_| None) else { panic!("the entry was written") };
    let spec = LoaderSpec {
        batch_size: 8,
        share: Share::WHOLE,
        seq_len: SEQ_LEN,
        layout: Layout::Packed,
        padding: Padding::End,
        shuffle: true,
        seed: 1,
        epochs: Some(1),
        pad_id: 0,
        longest_padding: SEQ_LEN,
        prefetch: 0,
        logits: Vec::new(),
        images: None,
    };
    let documents = DocumentSet::all(Arc::new(corpus));
    let fill = extent(&documents, &spec).unwrap().fill;
    let ready = processor_seconds();
    let count = documents.len();
    let loader = Loader::new(documents, spec, Position::default()).unwrap();
    let (mut tokens, mut most) = (0, 0);
    for (number, batch) in loader.enumerate() {
        tokens += batch.unwrap().input_ids.len();
        if number % 64 == 0 {
            most = most.max(resident());
        }
    }
    let seconds = processor_seconds() - ready;
    let bytes: u64 =
        fs::read_dir(place.path().join(&key.digest)).unwrap().flatten().map(|f| f.metadata().unwrap().len()).sum();
    assert!(fill > 0.97, "{fill}");
    println!(
        "FIGURES {{\"cache_bytes\": {bytes}, \"documents\": {count}, \"tokens\": {written}, \"tokens_per_second\": {:.0}, \
         \"opening_seconds\": {:.3}, \"memory_bytes\": {}, \"fill\": {fill:.4}}}",
        tokens as f64 * fill / seconds,
        ready - start,
        most.saturating_sub(before),
    );
}

/// The folder of the images that [`laying_out_images`] reads, and batches that are made ahead.
const IMAGES: &str = "SUROGATE_FIGURE_IMAGES";
const AHEAD: &str = "SUROGATE_FIGURE_AHEAD";
/// The token of images, and images of a batch.
const OF_IMAGE: i32 = 9;
const AT_ONCE: usize = 8;

/// Seconds that all threads of the process have run.
fn seconds_of_all() -> f64 {
    let text = fs::read_to_string("/proc/self/stat").expect("Linux counts the time of processes");
    let after = text.rsplit(')').next().expect("the name is in brackets");
    let ticks = |n: usize| after.split_whitespace().nth(n).and_then(|of| of.parse::<f64>().ok()).expect("a number");
    (ticks(11) + ticks(12)) / 100.0
}

#[test]
#[ignore = "measures; bench/data/images.py runs it"]
fn laying_out_images() {
    let folder = std::env::var_os(IMAGES).expect("a folder of images is named");
    let prefetch: usize = std::env::var(AHEAD).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let config = serde_json::json!({
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    });
    let form =
        Form { token: OF_IMAGE, width: 768, side: 2, window: 0, table: 48, stretched: true, breaks: false, pad: 0 };
    let processor = Processor::of("the figures", &config).unwrap();
    let boxes = BoxForm { units: Units::Pixels, marked: false };
    let reader = ImageReader { form, processor, limits: Limits::default(), boxes, rooms: Vec::new() };
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    let documents: Vec<Document> = files
        .iter()
        .map(|path| {
            let bytes = fs::read(path).unwrap();
            let grids = reader.grids(size(&bytes, &reader.limits).unwrap()).unwrap();
            let ids = [vec![1], vec![OF_IMAGE; reader.tokens(&grids)], vec![2; 8]].concat();
            let images = vec![ImageRef::new(ImageSource::Path(path.clone()), &bytes)];
            Document { images, ..Document::all_trained(ids) }
        })
        .collect();
    let longest = documents.iter().map(Document::len).max().unwrap();
    let epochs = 64usize.div_ceil(documents.len()).max(1);
    let spec = LoaderSpec {
        batch_size: 1,
        share: Share::WHOLE,
        seq_len: AT_ONCE * longest,
        layout: Layout::Packed,
        padding: Padding::End,
        shuffle: false,
        seed: 1,
        epochs: Some(epochs as u64),
        pad_id: 0,
        longest_padding: 128,
        prefetch,
        logits: Vec::new(),
        images: Some(Arc::new(reader)),
    };
    let images = epochs * documents.len();
    let loader = Loader::new(DocumentSet::all(Arc::new(Corpus::of(documents))), spec, Position::default()).unwrap();
    let (begun, before) = (Instant::now(), seconds_of_all());
    let mut sum = 0;
    for batch in loader {
        let batch = batch.unwrap();
        sum += batch.patches.pixels.len();
    }
    let (wall, own) = (begun.elapsed().as_secs_f64(), seconds_of_all() - before);
    assert!(sum > 0);
    println!(
        "FIGURES {{\"images\": {images}, \"images_per_second\": {:.1}, \"images_per_core_second\": {:.1}}}",
        images as f64 / wall,
        images as f64 / own
    );
}
