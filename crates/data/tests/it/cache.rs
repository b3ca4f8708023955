//! The cache of encoded rows: the same documents with and without it, never stale, never damaged unseen, one writer at
//! a time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use data::boxes::{BoxForm, Units};
use data::image::{Limits, Pixels, Processor, png};
use data::image_texts::ImageTexts;
use data::patches::Form;
use data::pictures::ImageReader;
use data::{
    ConversationColumns, DatasetKind, DatasetSpec, DialogueOptions, DocumentSet, EncodedCorpus, Keeping, Layout,
    Loader, LoaderSpec, Padding, Position, PrepareOptions, RowCache, Share, Tokenizer, Truncation, prepare,
    prepare_cached,
};
use tempfile::TempDir;

struct Bench {
    place: TempDir,
    tokenizer: Arc<Tokenizer>,
}

fn bench() -> Bench {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    let bench =
        Bench { place: tempfile::tempdir().unwrap(), tokenizer: Arc::new(Tokenizer::from_folder(&model).unwrap()) };
    bench.write("a.jsonl", 40);
    bench
}

impl Bench {
    /// `count` texts, and a line that is none.
    fn write(&self, name: &str, count: usize) -> PathBuf {
        let path = self.place.path().join(name);
        let lines = (0..count).map(|i| format!("{{\"text\": \"Text number {i} of a few.\"}}\n"));
        fs::write(&path, lines.collect::<String>() + "{broken\n").unwrap();
        path
    }

    fn cache(&self) -> RowCache {
        RowCache::new(self.place.path().join("rows"))
    }

    fn spec(&self) -> DatasetSpec {
        DatasetSpec::new(self.place.path().join("a.jsonl"), DatasetKind::Text { field: "text".to_owned() })
    }

    fn prepare(&self, spec: &DatasetSpec, options: &PrepareOptions) -> EncodedCorpus {
        let cache = self.cache();
        let keeping = Keeping { cache: &cache, notify: &|_| {} };
        prepare_cached(std::slice::from_ref(spec), Some(&self.tokenizer), options, Some(keeping), &|| false).unwrap()
    }

    /// The files of entries, by their ends.
    fn files(&self, end: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.place.path().join("rows")).into_iter().flatten().flatten();
        let inside = entries.flat_map(|entry| fs::read_dir(entry.path()).into_iter().flatten().flatten());
        let mut files: Vec<PathBuf> = inside.map(|file| file.path()).collect();
        files.retain(|path| path.to_str().unwrap().ends_with(end));
        files
    }
}

fn options() -> PrepareOptions {
    PrepareOptions {
        max_length: 64,
        truncation: Truncation::Delete,
        vocab_size: 1 << 20,
        positions: None,
        workers: 2,
        dialogue: DialogueOptions::default(),
        preference: data::PreferenceOptions::default(),
    }
}

fn is_taken(prepared: &EncodedCorpus) -> bool {
    prepared.notes.iter().any(|note| note.contains("from the cache"))
}

fn assert_same(a: &EncodedCorpus, b: &EncodedCorpus) {
    assert_eq!(a.summary, b.summary);
    assert_eq!((a.corpus.len(), a.corpus.digest()), (b.corpus.len(), b.corpus.digest()));
    for i in 0..a.corpus.len() {
        let (x, y) = (a.corpus.document(i).unwrap(), b.corpus.document(i).unwrap());
        assert_eq!(x, y, "document {i}");
    }
}

#[test]
fn rows_are_the_same_encoded_or_taken() {
    let bench = bench();
    let plain = prepare(&[bench.spec()], Some(&bench.tokenizer), &options()).unwrap();
    assert!(plain.corpus.len() >= 40 && plain.summary.datasets[0].failures() == 1);
    let kept = bench.prepare(&bench.spec(), &options());
    assert!(
        kept.notes.iter().any(|n| n.contains("the rows of 1 set were encoded and are kept in")),
        "{:?}",
        kept.notes
    );
    let taken = bench.prepare(&bench.spec(), &PrepareOptions { workers: 0, ..options() });
    assert!(taken.notes[0].contains("the rows of 1 set are from the cache in"), "{:?}", taken.notes);
    assert_same(&plain, &kept);
    assert_same(&plain, &taken);
    let set = DocumentSet::all(taken.corpus);
    assert_eq!(set.split(0.1, 3).0.digest(), DocumentSet::all(plain.corpus).split(0.1, 3).0.digest());
}

#[test]
fn everything_that_matters_makes_other_rows() {
    let bench = bench();
    let (spec, usual) = (bench.spec(), options());
    bench.prepare(&spec, &usual);
    let taken = |spec: &DatasetSpec, options: &PrepareOptions| is_taken(&bench.prepare(spec, options));
    let dialogue = DialogueOptions { system: Some("You are terse.".to_owned()), ..DialogueOptions::default() };
    let others = [
        PrepareOptions { max_length: 32, ..usual.clone() },
        PrepareOptions { truncation: Truncation::Right, ..usual.clone() },
        PrepareOptions { vocab_size: 1 << 21, ..usual.clone() },
        PrepareOptions { dialogue, ..usual.clone() },
    ];
    for other in &others {
        assert!(!taken(&spec, other), "{other:?}");
        assert!(taken(&spec, other), "{other:?}");
    }
    assert!(!taken(&DatasetSpec { samples: Some(7), ..spec.clone() }, &usual));
    assert!(taken(&spec, &usual));

    // Other content of the same length.
    let path = bench.place.path().join("a.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("number 7 of", "number 8 of")).unwrap();
    assert!(!taken(&spec, &usual));
    fs::write(&path, &text).unwrap();
    assert!(taken(&spec, &usual), "content counts, not time");

    // Another tokenizer: the same files but for one word of the template.
    let folder = bench.place.path().join("model");
    fs::create_dir(&folder).unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    fs::copy(model.join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    fs::write(folder.join("chat_template.jinja"), "{{ messages }}").unwrap();
    let other = Bench { tokenizer: Arc::new(Tokenizer::from_folder(&folder).unwrap()), ..bench };
    assert!(!is_taken(&other.prepare(&spec, &usual)));
}

#[test]
fn the_same_content_elsewhere_is_taken_and_reported_by_its_own_name() {
    let bench = bench();
    bench.prepare(&bench.spec(), &options());
    let moved = DatasetSpec { path: bench.write("b.jsonl", 40), ..bench.spec() };
    let taken = bench.prepare(&moved, &options());
    assert!(is_taken(&taken));
    let table = taken.summary.to_string();
    assert!(table.contains("b.jsonl, row 41") && !table.contains("a.jsonl"), "{table}");
}

/// Turns one bit in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn damage_is_found_reported_and_repaired() {
    let bench = bench();
    let good = prepare(&[bench.spec()], Some(&bench.tokenizer), &options()).unwrap();
    bench.prepare(&bench.spec(), &options());
    let may_be_written = |path: &Path| {
        let others = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(path.parent().unwrap(), others).unwrap();
    };
    let damages: [(&str, &dyn Fn(&Path)); 7] = [
        ("entry", &may_be_written),
        (".rows", &damage),
        (".rows", &|path| fs::File::options().write(true).open(path).unwrap().set_len(40).unwrap()),
        (".rows", &|path| fs::remove_file(path).unwrap()),
        ("entry", &damage),
        ("entry", &|path| fs::write(path, "").unwrap()),
        ("entry", &|path| fs::remove_file(path).unwrap()),
    ];
    for (number, (end, damage)) in damages.into_iter().enumerate() {
        let files = bench.files(end);
        assert_eq!(files.len(), 1, "{files:?}");
        damage(&files[0]);
        let again = bench.prepare(&bench.spec(), &options());
        assert!(again.notes[0].contains("the cache holds damaged rows of"), "{number}: {:?}", again.notes);
        assert_same(&good, &again);
        let taken = bench.prepare(&bench.spec(), &options());
        assert!(is_taken(&taken) && taken.notes.len() == 1, "{number}: {:?}", taken.notes);
        assert_same(&good, &taken);
    }
    // The list of stamps saves work; it decides nothing.
    fs::write(&bench.files("verified")[0], "other").unwrap();
    assert!(is_taken(&bench.prepare(&bench.spec(), &options())));
}

#[test]
fn one_of_several_writes_and_the_others_wait() {
    let bench = bench();
    bench.write("a.jsonl", 4000);
    let waited = AtomicUsize::new(0);
    let barrier = std::sync::Barrier::new(4);
    let all: Vec<EncodedCorpus> = std::thread::scope(|scope| {
        let prepare = || {
            let cache = bench.cache();
            let notify = |text: &str| {
                assert!(text.contains("waiting for another process"), "{text}");
                waited.fetch_add(1, Ordering::Relaxed);
            };
            barrier.wait();
            let keeping = Some(Keeping { cache: &cache, notify: &notify });
            prepare_cached(&[bench.spec()], Some(&bench.tokenizer), &options(), keeping, &|| false).unwrap()
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(prepare)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(all.iter().filter(|prepared| is_taken(prepared)).count(), 3);
    assert_eq!(waited.load(Ordering::Relaxed), 3);
    all.iter().for_each(|prepared| assert_same(prepared, &all[0]));
}

#[test]
fn a_set_that_is_given_up_leaves_nothing() {
    let bench = bench();
    bench.write("a.jsonl", 4000);
    let cache = bench.cache();
    let asked = AtomicUsize::new(0);
    let begin = |most: usize| {
        asked.store(0, Ordering::Relaxed);
        let stop = || asked.fetch_add(1, Ordering::Relaxed) >= most;
        let keeping = Some(Keeping { cache: &cache, notify: &|_| {} });
        prepare_cached(&[bench.spec()], Some(&bench.tokenizer), &options(), keeping, &stop)
    };
    let stopped = begin(1000).unwrap_err();
    assert!(matches!(stopped, data::DataError::Stopped), "{stopped}");
    let left: Vec<_> = fs::read_dir(cache.folder()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "files" || name.to_str().unwrap().ends_with(".lock")), "{left:?}");

    // While another process holds the lock, too.
    let lock = left.iter().find(|name| *name != "files").unwrap();
    let held = fs::File::open(cache.folder().join(lock)).unwrap();
    held.lock().unwrap();
    assert!(matches!(begin(3).unwrap_err(), data::DataError::Stopped));
    drop(held);
    assert!(!is_taken(&begin(usize::MAX).unwrap()));
    assert!(is_taken(&begin(usize::MAX).unwrap()));
}

#[test]
fn what_a_dead_process_left_is_removed() {
    let bench = bench();
    bench.prepare(&bench.spec(), &options());
    let entry = bench.files("entry").remove(0).parent().unwrap().to_owned();
    fs::remove_dir_all(&entry).unwrap();
    let left = entry.with_extension("99999999-0.partial");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("0.rows"), "half").unwrap();
    assert!(!is_taken(&bench.prepare(&bench.spec(), &options())));
    assert!(!left.exists() && entry.exists());
}

/// Sets the time of a file back by a year.
fn age(path: &Path) {
    let year = std::time::Duration::from_secs(60 * 60 * 24 * 365);
    let file = fs::File::options().append(true).open(path).unwrap();
    file.set_modified(std::time::SystemTime::now() - year).unwrap();
}

#[test]
fn only_entries_of_the_cache_are_ever_removed() {
    let bench = bench();
    let folder = bench.place.path().join("rows");
    bench.prepare(&bench.spec(), &options());
    let old = bench.files("entry").remove(0).parent().unwrap().to_owned();
    let text = fs::read_to_string(old.join("entry")).unwrap();
    // A thesis, under names that a cache might have, each with an old file that is called `entry`.
    let digest = "ab".repeat(32);
    let partial = format!("{}.1-0.partial", old.file_name().unwrap().to_str().unwrap());
    let mut foreign = Vec::new();
    for (name, entry) in [
        ("thesis", "my first entry"),
        ("diary.partial", "my first entry"),
        (&digest[..], "my first entry"),
        ("cdcd", &text),
        // The list of another entry.
        (&"cd".repeat(32), &text),
        (&partial, "an entry in the making, with a file that the cache does not know"),
    ] {
        let place = folder.join(name);
        fs::create_dir_all(place.join("chapters")).unwrap();
        for (file, text) in [("entry", entry), ("0.rows.bak", "2"), ("chapters/1.txt", "3"), ("notes.txt", "4")] {
            fs::write(place.join(file), text).unwrap();
        }
        age(&place.join("entry"));
        let kept = if name == partial { 1 } else { 0 };
        foreign.extend(["entry", "0.rows.bak", "chapters/1.txt", "notes.txt"][kept..].iter().map(|f| place.join(f)));
    }
    // A link to an entry, and something of the user's inside of one.
    let aside = bench.place.path().join("aside");
    fs::create_dir(&aside).unwrap();
    fs::write(aside.join("entry"), &text).unwrap();
    age(&aside.join("entry"));
    std::os::unix::fs::symlink(&aside, folder.join("ef".repeat(32))).unwrap();
    foreign.push(aside.join("entry"));
    fs::write(old.join("mine.txt"), "5").unwrap();
    foreign.push(old.join("mine.txt"));
    age(&old.join("entry"));
    // Another set: what is old is removed after it is kept.
    let other = DatasetSpec::new(bench.write("b.jsonl", 9), DatasetKind::Text { field: "text".to_owned() });
    bench.prepare(&other, &options());
    bench.prepare(&bench.spec(), &PrepareOptions { max_length: 63, ..options() });
    foreign.iter().for_each(|path| assert!(path.is_file(), "{} is gone", path.display()));
    assert!(!old.join("entry").exists() && !old.join("0.rows").exists(), "an old entry goes");

    fs::remove_file(old.join("mine.txt")).unwrap();
    bench.prepare(&bench.spec(), &options());
    assert!(old.join("entry").exists());
    age(&old.join("entry"));
    bench.prepare(&other, &PrepareOptions { max_length: 62, ..options() });
    assert!(!old.exists() && !old.with_extension("lock").exists(), "an old entry goes with its lock");
}

/// A list that names a file elsewhere leads to no file elsewhere.
#[test]
fn an_entry_names_its_own_files() {
    let bench = bench();
    bench.prepare(&bench.spec(), &options());
    let list = bench.files("entry").remove(0);
    let outside = bench.place.path().join("outside.rows");
    fs::copy(&bench.files(".rows")[0], &outside).unwrap();
    let text = fs::read_to_string(&list).unwrap();
    let body = text.split_once('\n').unwrap().1.trim_end().replace("0.rows", "../../outside.rows");
    fs::write(&list, format!("{}\n{body}\n", blake3::hash(body.as_bytes()).to_hex())).unwrap();
    let again = bench.prepare(&bench.spec(), &options());
    assert!(again.notes[0].contains("its list is damaged"), "{:?}", again.notes);
    assert!(outside.exists());
}

#[test]
fn a_folder_that_cannot_be_written_is_named_and_the_rows_stay_in_memory() {
    let bench = bench();
    let plain = prepare(&[bench.spec()], Some(&bench.tokenizer), &options()).unwrap();
    fs::write(bench.place.path().join("rows"), "a file").unwrap();
    let prepared = bench.prepare(&bench.spec(), &options());
    assert!(prepared.notes[0].contains("are not kept, because"), "{:?}", prepared.notes);
    assert_same(&plain, &prepared);
}

/// A mapped file would end the process.
#[test]
fn kept_rows_that_are_cut_short_while_they_are_read_are_an_error() {
    let bench = bench();
    bench.prepare(&bench.spec(), &options());
    let taken = bench.prepare(&bench.spec(), &options());
    assert!(is_taken(&taken));
    let documents = DocumentSet::all(taken.corpus);
    for prefetch in [0, 2] {
        let spec = LoaderSpec {
            batch_size: 1,
            share: Share::WHOLE,
            seq_len: 64,
            layout: Layout::Packed,
            padding: Padding::End,
            shuffle: true,
            seed: 1,
            epochs: None,
            pad_id: 0,
            longest_padding: 64,
            prefetch,
            logits: Vec::new(),
            images: None,
        };
        let mut loader = Loader::new(documents.clone(), spec, Position::default()).unwrap();
        if prefetch == 0 {
            assert!(loader.next().unwrap().is_ok());
            let file = fs::File::options().write(true).open(&bench.files(".rows")[0]).unwrap();
            file.set_len(40).unwrap();
        }
        let error = loader.find_map(Result::err).unwrap().to_string();
        assert!(error.contains("0.rows: the file was cut short while it was in use"), "{error}");
    }
}

#[test]
fn a_date_that_templates_write_makes_rows_old() {
    let bench = bench();
    let path = bench.place.path().join("a.jsonl");
    let talk = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}"#;
    fs::write(&path, format!("{talk}\n")).unwrap();
    let columns = ConversationColumns { messages: "messages".to_owned(), ..ConversationColumns::default() };
    let spec = DatasetSpec::new(path, DatasetKind::Conversation(columns));
    let template = |date: &str| {
        let eos = &bench.tokenizer.eos().unwrap().text;
        format!("{date}{{% for m in messages %}}{{{{ m.role + ': ' + m.content + '{eos}' }}}}{{% endfor %}}")
    };
    let dated = |format: &str, clock: Option<&str>| {
        let template = Some(template(&format!("{{{{ strftime_now('{format}') }}}} ")));
        let dialogue = DialogueOptions { template, clock: clock.map(str::to_owned), ..DialogueOptions::default() };
        is_taken(&bench.prepare(&spec, &PrepareOptions { dialogue, ..options() }))
    };
    assert!(!dated("%Y", Some("2026-11-20")) && dated("%Y", Some("2026-11-20")));
    assert!(!dated("%Y", Some("2027-11-20")));
    // Without a clock, what was read of it decides: the year is the same a moment later, the nanosecond is not.
    assert!(!dated("%Y", None) && dated("%Y", None));
    assert!(!dated("%S %N", None) && !dated("%S %N", None));
}

/// Conversations with an image each, `0.png`, `1.png` and so on, one of which is in another folder.
struct Images {
    bench: Bench,
    options: PrepareOptions,
    spec: DatasetSpec,
}

const IMAGES: usize = 4;

fn write_image(path: &Path, value: u8) {
    let (height, width) = (8, 8);
    fs::write(path, png(&Pixels { height, width, rgb: vec![value; 3 * height * width] })).unwrap();
}

fn images() -> Images {
    let bench = bench();
    let elsewhere = bench.place.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let name = |i: usize| match i {
        0 => elsewhere.join("0.png").to_str().unwrap().to_owned(),
        _ => format!("{i}.png"),
    };
    let talk = |i: usize| {
        write_image(&bench.place.path().join(name(i)), 40 * i as u8);
        let asked =
            serde_json::json!([{"type": "image", "image": name(i)}, {"type": "text", "text": format!("Number {i}?")}]);
        let turns = serde_json::json!([{"role": "user", "content": asked}, {"role": "assistant", "content": "Yes."}]);
        format!("{}\n", serde_json::json!({ "messages": turns }))
    };
    let path = bench.place.path().join("talks.jsonl");
    fs::write(&path, (0..IMAGES).map(talk).collect::<String>()).unwrap();
    let columns = ConversationColumns { messages: "messages".to_owned(), ..ConversationColumns::default() };
    let spec = DatasetSpec::new(path, DatasetKind::Conversation(columns));

    let (unk, eos) = ("<unk>", &bench.tokenizer.eos().unwrap().text);
    let template = format!(
        "{{% for m in messages %}}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for part in m.content %}}\
         {{% if part.type == 'image' %}}{unk}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}\
         {eos}{{% endfor %}}"
    );
    let config = serde_json::json!({"image_processor_type": "SiglipImageProcessor", "size": 8});
    let form = Form { token: 0, width: 48, side: 1, window: 0, table: 0, stretched: false, breaks: false, pad: 0 };
    let reader = ImageReader {
        form,
        processor: Processor::of("a test", &config).unwrap(),
        limits: Limits::default(),
        boxes: BoxForm { units: Units::Pixels, marked: false },
        rooms: Vec::new(),
    };
    let texts = ImageTexts::new(reader, &bench.tokenizer).unwrap();
    let dialogue =
        DialogueOptions { template: Some(template), images: Some(Arc::new(texts)), ..DialogueOptions::default() };
    Images { bench, options: PrepareOptions { dialogue, ..options() }, spec }
}

impl Images {
    fn path(&self, name: &str) -> PathBuf {
        self.bench.place.path().join(name)
    }

    /// Prepares the rows with the cache, compares them with those without one, and returns whether they were taken.
    fn is_taken(&self) -> bool {
        is_taken(&self.prepared())
    }

    fn prepared(&self) -> EncodedCorpus {
        let plain = prepare(std::slice::from_ref(&self.spec), Some(&self.bench.tokenizer), &self.options).unwrap();
        let prepared = self.bench.prepare(&self.spec, &self.options);
        assert_same(&plain, &prepared);
        prepared
    }
}

#[test]
fn rows_with_images_are_kept_while_the_files_of_the_images_stay() {
    let images = images();
    assert!(!images.is_taken());
    let taken = images.prepared();
    assert!(is_taken(&taken));
    assert_eq!((taken.corpus.len(), taken.corpus.document(1).unwrap().images.len()), (IMAGES, 1));

    // Another content, be its size and time those of before.
    for name in ["2.png", "elsewhere/0.png"] {
        let modified = fs::metadata(images.path(name)).unwrap().modified().unwrap();
        write_image(&images.path(name), 201);
        fs::File::options().write(true).open(images.path(name)).unwrap().set_modified(modified).unwrap();
        let again = images.prepared();
        assert!(again.notes.iter().any(|note| note.contains(name) && note.contains("has changed since")), "{again:?}");
        assert!(!is_taken(&again) && images.is_taken());
    }
    // Another time of the same content.
    write_image(&images.path("2.png"), 201);
    assert!(images.is_taken());
}

#[test]
fn images_that_come_and_go_make_rows_with_them_old() {
    let images = images();
    assert!(!images.is_taken());
    fs::remove_file(images.path("3.png")).unwrap();
    let without = images.prepared();
    assert!(!is_taken(&without));
    assert_eq!((without.corpus.len(), without.summary.datasets[0].failures()), (IMAGES - 1, 1));
    assert!(images.is_taken());
    // A file that is no image makes the same row an error, which is kept, too.
    for content in [&b"no image"[..], b"still none"] {
        fs::write(images.path("3.png"), content).unwrap();
        assert!(!images.is_taken() && images.is_taken());
    }
    write_image(&images.path("3.png"), 7);
    let whole = images.prepared();
    assert_eq!((is_taken(&whole), whole.corpus.len(), whole.summary.datasets[0].failures()), (false, IMAGES, 0));
    assert!(images.is_taken());
}

#[test]
fn the_same_rows_elsewhere_have_images_of_their_own() {
    let mut images = images();
    assert!(!images.is_taken());
    let other = images.path("other");
    fs::create_dir(&other).unwrap();
    for name in ["talks.jsonl", "1.png", "2.png", "3.png"] {
        fs::copy(images.path(name), other.join(name)).unwrap();
    }
    let spec = DatasetSpec { path: other.join("talks.jsonl"), ..images.spec.clone() };
    let before = std::mem::replace(&mut images.spec, spec);
    assert!(!images.is_taken() && images.is_taken());
    write_image(&other.join("1.png"), 9);
    assert!(!images.is_taken() && images.is_taken());
    images.spec = before;
    assert!(images.is_taken());
}

#[test]
fn a_list_of_images_that_was_changed_or_lost_is_damaged() {
    let images = images();
    for spoil in [
        |list: &Path| fs::remove_file(list).unwrap(),
        |list: &Path| {
            let text = fs::read_to_string(list).unwrap();
            fs::write(list, text.replace("3.png", "2.png")).unwrap();
        },
    ] {
        images.prepared();
        spoil(&images.bench.files("/images")[0]);
        let again = images.prepared();
        assert!(again.notes.iter().any(|note| note.contains("its list of images is damaged")), "{:?}", again.notes);
        assert!(images.is_taken());
    }
}
