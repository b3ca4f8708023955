//! Whole datasets: counts, labels and errors, with the tokenizer and data that are shipped in `examples/stories`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::{
    ConversationColumns, DatasetKind, DatasetSpec, DialogueOptions, DocumentSet, EncodedCorpus, IGNORE,
    InstructionColumns, Layout, LoaderSpec, PrepareOptions, RowReason, SystemPrompt, Tokenizer, Truncation, extent,
    prepare,
};

fn stories() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories")
}

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_folder(&stories().join("model")).unwrap())
}

fn options(max_length: usize, truncation: Truncation) -> PrepareOptions {
    PrepareOptions {
        max_length,
        truncation,
        vocab_size: 512,
        positions: None,
        workers: 2,
        dialogue: DialogueOptions::default(),
        preference: data::PreferenceOptions::default(),
    }
}

fn dataset(path: PathBuf, kind: DatasetKind) -> DatasetSpec {
    DatasetSpec::new(path, kind)
}

fn text(path: PathBuf) -> DatasetSpec {
    dataset(path, DatasetKind::Text { field: "text".to_owned() })
}

fn questions(format: &str) -> DatasetKind {
    DatasetKind::Instruction(InstructionColumns {
        instruction: "question".to_owned(),
        output: "answer".to_owned(),
        prompt_format: Some(format.to_owned()),
        ..InstructionColumns::default()
    })
}

/// The trained text of document `i`, and all of its text.
fn decoded(prepared: &EncodedCorpus, tokenizer: &Tokenizer, i: usize) -> (String, String) {
    let view = prepared.corpus.document(i).unwrap();
    let labels = view.labels;
    let trained = view.ids.iter().zip(labels.iter()).filter(|(_, label)| **label != IGNORE);
    let trained: Vec<u32> = trained.map(|(id, _)| *id as u32).collect();
    let all: Vec<u32> = view.ids.iter().map(|id| *id as u32).collect();
    let decode = |ids: &[u32]| tokenizer.encoder().decode(ids, false).unwrap();
    (decode(&trained), decode(&all))
}

fn file(folder: &Path, name: &str, content: &str) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    path
}

#[test]
fn a_text_file_is_one_document_split_into_rows() {
    let tokenizer = tokenizer();
    let path = stories().join("data/shakespeare.txt");
    let prepared = prepare(&[text(path.clone())], Some(&tokenizer), &options(256, Truncation::Delete)).unwrap();
    let summary = &prepared.summary.datasets[0];
    assert_eq!((summary.rows_read, summary.rows_kept, summary.longest), (1, 1, 256));
    let whole = tokenizer.encoder().encode(&fs::read_to_string(path).unwrap(), true).unwrap();
    // BOS comes from the tokenizer, EOS from us, and every piece's first token has no predecessor.
    assert_eq!(summary.tokens, whole.len() + 1);
    assert_eq!(summary.trained_tokens, summary.tokens - summary.documents);
    assert_eq!(prepared.corpus.document(0).unwrap().ids[0], 1);
    assert_eq!(prepared.corpus.document(summary.documents - 1).unwrap().ids.last(), Some(&2));
}

#[test]
fn instructions_train_the_answer_and_the_end_token() {
    let tokenizer = tokenizer();
    let path = stories().join("data/gsm8k.jsonl");
    let spec = dataset(path.clone(), questions("Question: {instruction}\nAnswer: {output}"));
    let prepared = prepare(&[spec], Some(&tokenizer), &options(1024, Truncation::Delete)).unwrap();
    let summary = &prepared.summary.datasets[0];
    assert_eq!((summary.rows_read, summary.rows_kept), (200, 200), "{summary:?}");
    for (i, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let (trained, all) = decoded(&prepared, &tokenizer, i);
        let (question, answer) = (row["question"].as_str().unwrap(), row["answer"].as_str().unwrap());
        assert_eq!(all, format!("<s> Question: {question}\nAnswer: {answer}</s>"));
        // The blank before the answer is part of its first token.
        assert_eq!(trained.trim_start(), format!("{}</s>", answer.trim_start()), "row {i}");
        assert_eq!(prepared.corpus.document(i).unwrap().ids.iter().filter(|&&id| id == 1).count(), 1, "one BOS");
    }
    let documents = DocumentSet::all(prepared.corpus);
    let spec = LoaderSpec {
        batch_size: 2,
        share: data::Share::WHOLE,
        seq_len: 1024,
        layout: Layout::Packed,
        padding: data::Padding::End,
        shuffle: true,
        seed: 1,
        epochs: Some(1),
        pad_id: 0,
        longest_padding: usize::MAX,
        prefetch: 1,
        logits: Vec::new(),
        images: None,
    };
    let fill = extent(&documents, &spec).unwrap().fill;
    assert!(fill > 0.96, "{fill}");
}

#[test]
fn limits_and_samples_are_counted() {
    let tokenizer = tokenizer();
    let kind = questions("{instruction}");
    let mut spec = dataset(stories().join("data/gsm8k.jsonl"), kind);
    spec.samples = Some(50);
    let deleted = prepare(&[spec.clone()], Some(&tokenizer), &options(300, Truncation::Delete)).unwrap();
    let summary = &deleted.summary.datasets[0];
    let long = summary.dropped[&RowReason::TooLong].rows;
    assert!(long > 0 && summary.rows_kept + long == 50, "{summary:?}");
    assert!(deleted.summary.to_string().contains(&format!("dropped {long} rows: too long")));
    let cut = prepare(&[spec.clone()], Some(&tokenizer), &options(300, Truncation::Right)).unwrap();
    assert_eq!(cut.summary.datasets[0].documents + untrained(&cut), 50);
    let split = prepare(&[spec], Some(&tokenizer), &options(300, Truncation::Split)).unwrap();
    assert!(split.summary.datasets[0].documents > 50 - untrained(&split));
    assert_eq!(split.summary.datasets[0].longest, 300);
}

fn untrained(prepared: &EncodedCorpus) -> usize {
    prepared.summary.datasets[0].dropped.get(&RowReason::Untrained).map_or(0, |dropped| dropped.rows)
}

#[test]
fn an_end_token_of_the_format_is_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    let path = file(folder.path(), "rows.jsonl", "{\"q\": \"cat\", \"a\": \"dog\", \"s\": \"be\"}\n");
    let columns = InstructionColumns {
        instruction: "q".to_owned(),
        output: "a".to_owned(),
        system: SystemPrompt::Field("s".to_owned()),
        prompt_format: Some("<s>{system} {instruction}\n{output}</s>\n".to_owned()),
        ..InstructionColumns::default()
    };
    let spec = dataset(path, DatasetKind::Instruction(columns));
    let prepared = prepare(&[spec], Some(&tokenizer), &options(64, Truncation::Delete)).unwrap();
    let (trained, all) = decoded(&prepared, &tokenizer, 0);
    assert_eq!(trained, "dog</s>");
    assert!(all.starts_with("<s>") && !all.starts_with("<s><s>") && all.matches("</s>").count() == 1, "{all:?}");
}

#[test]
fn without_format_and_template_instructions_are_refused_with_a_hint() {
    let columns = InstructionColumns { instruction: "question".into(), output: "answer".into(), ..Default::default() };
    let spec = dataset(stories().join("data/gsm8k.jsonl"), DatasetKind::Instruction(columns));
    let error = prepare(&[spec], Some(&tokenizer()), &options(64, Truncation::Delete)).unwrap_err().to_string();
    assert!(error.contains("chat template") && error.contains("prompt_format"), "{error}");
}

const CHAT: &str = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

#[test]
fn conversations_come_in_both_forms() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    let openai = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "One day"}]}"#;
    let sharegpt = r#"{"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "One day"}]}"#;
    let untrained = r#"{"messages": [{"role": "user", "content": "hi"}]}"#;
    let path = file(folder.path(), "chat.jsonl", &format!("{openai}\n\n{sharegpt}\n{untrained}\nbroken\n{openai}"));
    let columns = ConversationColumns { messages: "messages".to_owned(), ..Default::default() };
    let mut options = options(64, Truncation::Delete);
    options.dialogue.template = Some(CHAT.to_owned());
    options.dialogue.system = Some("be good".to_owned());
    let spec = dataset(path, DatasetKind::Conversation(columns));
    let prepared = prepare(&[spec], Some(&tokenizer), &options).unwrap();
    let summary = &prepared.summary.datasets[0];
    assert_eq!((summary.rows_read, summary.rows_kept), (5, 3));
    assert_eq!(summary.dropped[&RowReason::Untrained].rows, 1);
    let broken = &summary.dropped[&RowReason::Unreadable];
    assert!(broken.rows == 1 && (broken.file, broken.row) == (0, 5), "{broken:?}");
    for i in 0..3 {
        let (trained, all) = decoded(&prepared, &tokenizer, i);
        assert_eq!(trained.trim_start(), "One day</s>");
        assert!(all.contains("system: be good</s>") && all.matches("<s>").count() == 1, "{all}");
    }
}

#[test]
fn token_rows_keep_what_they_bring() {
    let folder = tempfile::tempdir().unwrap();
    let rows = r#"{"input_ids": [5, 6, 7]}
{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 70, -100], "weights": [1, 0.5, 2, 3], "position_ids": [0, 1, 0, 1]}
{"input_ids": [5, 6], "labels": [1]}
{"input_ids": [5, -6]}
{"ids": [5]}"#;
    let path = file(folder.path(), "tokens.jsonl", rows);
    let spec = dataset(path, DatasetKind::Tokens);
    let error = prepare(std::slice::from_ref(&spec), None, &options(8, Truncation::Delete)).unwrap_err().to_string();
    assert!(error.contains("3 of 5 rows fail") && error.contains("no column `input_ids`"), "{error}");
    let spec = DatasetSpec { samples: Some(4), ..spec };
    let prepared = prepare(std::slice::from_ref(&spec), None, &options(8, Truncation::Delete)).unwrap();
    let view = prepared.corpus.document(1).unwrap();
    assert_eq!(view.labels, [-100, 6, 70, -100]);
    assert_eq!(view.weights, [0.0, 0.5, 2.0, 0.0]);
    assert_eq!(view.positions.as_deref(), Some(&[0, 1, 0, 1][..]));
    let small = PrepareOptions { vocab_size: 70, ..options(8, Truncation::Delete) };
    let error = prepare(&[spec], None, &small).unwrap_err().to_string();
    assert!(error.contains("row 2") && error.contains("token id 70"), "{error}");
}

#[test]
fn impossible_datasets_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    let fail = |spec: DatasetSpec| prepare(&[spec], Some(&tokenizer), &options(64, Truncation::Delete)).unwrap_err();
    let nothing = file(folder.path(), "nothing.jsonl", r#"{"input_ids": [1, 2], "labels": [1, -100]}"#);
    assert!(fail(dataset(nothing, DatasetKind::Tokens)).to_string().contains("1 of 1 rows fail: 1 x nothing trained"));
    let long = file(folder.path(), "long.jsonl", &format!("{{\"input_ids\": {:?}}}", [7; 65]));
    assert!(fail(dataset(long, DatasetKind::Tokens)).to_string().contains("no token of 1 rows is trained"));
    let empty = file(folder.path(), "empty.jsonl", "\n");
    assert!(fail(text(empty)).to_string().contains("has no rows"));
    let csv = file(folder.path(), "table.xlsx", "a,b");
    assert!(fail(text(csv)).to_string().contains("this file format is not supported"));
    assert!(fail(text(folder.path().join("absent.jsonl"))).to_string().contains("no such file"));
    let list = file(folder.path(), "list.jsonl", "{\"text\": [\"x\"]}");
    assert!(fail(text(list)).to_string().contains("column `text`: expected a string, found a list"));
    let latin = folder.path().join("latin.jsonl");
    fs::write(&latin, b"{\"text\": \"caf\xe9\"}\n").unwrap();
    assert!(fail(text(latin)).to_string().contains("unreadable"));
}

#[test]
fn a_directory_is_read_in_order_of_names_and_json_may_be_a_list() {
    let folder = tempfile::tempdir().unwrap();
    file(folder.path(), "b.json", "[{\"input_ids\": [3, 4]}, {\"input_ids\": [5, 6]}]");
    file(folder.path(), "a.jsonl", "\u{feff}{\"input_ids\": [1, 2]}");
    file(folder.path(), "c.json", "{\"input_ids\": [7, 8]}\n{\"input_ids\": [9, 9]}\n");
    file(folder.path(), "d.jsonl", " \n[{\"input_ids\": [11, 2]},\n {\"input_ids\": [13, 4]}]\n");
    file(folder.path(), "notes.md", "no data");
    let spec = dataset(folder.path().to_owned(), DatasetKind::Tokens);
    let prepared = prepare(&[spec], None, &options(8, Truncation::Delete)).unwrap();
    let firsts: Vec<i32> = (0..prepared.corpus.len()).map(|i| prepared.corpus.document(i).unwrap().ids[0]).collect();
    assert_eq!(firsts, [1, 3, 5, 7, 9, 11, 13]);
    let lists = file(folder.path(), "lists.jsonl", "[1, 2]\n[3]\n");
    let error = prepare(&[dataset(lists, DatasetKind::Tokens)], None, &options(8, Truncation::Delete)).unwrap_err();
    assert!(error.to_string().contains("expected an object, found a list"), "{error}");
}

#[test]
fn threads_do_not_change_the_documents() {
    let tokenizer = tokenizer();
    let spec = dataset(stories().join("data/gsm8k.jsonl"), questions("{instruction}\n"));
    let with = |workers| {
        let options = PrepareOptions { workers, ..options(512, Truncation::Split) };
        let prepared = prepare(std::slice::from_ref(&spec), Some(&tokenizer), &options).unwrap();
        let all: Vec<Vec<i32>> =
            (0..prepared.corpus.len()).map(|i| prepared.corpus.document(i).unwrap().ids.to_vec()).collect();
        (all, prepared.summary)
    };
    assert_eq!(with(0), with(3));
}

#[test]
fn every_format_gives_the_same_rows() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    let lines = "{\"q\": \"a \\\"cat\\\",\\nhere\", \"a\": \"dog\"}\n{\"q\": \"\", \"a\": \"owl\"}\n";
    let packed = |name: &str, text: &str| {
        let bytes = if name.ends_with(".gz") {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
            encoder.finish().unwrap()
        } else {
            zstd::encode_all(text.as_bytes(), 1).unwrap()
        };
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let table = "q,a\r\n\"a \"\"cat\"\",\nhere\",dog\r\n,owl\r\n";
    let files = [
        file(folder.path(), "rows.jsonl", lines),
        file(folder.path(), "rows.csv", table),
        file(
            folder.path(),
            "rows.tsv",
            &table.replace("q,a", "q\ta").replace("\",dog", "\"\tdog").replace(",owl", "\towl"),
        ),
        packed("rows.jsonl.gz", lines),
        packed("rows.csv.zst", table),
        file(
            folder.path(),
            "semicolons.csv",
            &table.replace("q,a", "q;a").replace("\",dog", "\";dog").replace(",owl", ";owl"),
        ),
        file(folder.path(), "commas.tsv", table),
        file(folder.path(), "named.csv", &format!("sep=,\r\n{table}")),
    ];
    let columns = InstructionColumns {
        instruction: "q".to_owned(),
        output: "a".to_owned(),
        prompt_format: Some("{instruction}: {output}".to_owned()),
        ..InstructionColumns::default()
    };
    let texts = files.map(|path| {
        let spec = dataset(path, DatasetKind::Instruction(columns.clone()));
        let prepared = prepare(&[spec], Some(&tokenizer), &options(64, Truncation::Delete)).unwrap();
        (0..prepared.corpus.len()).map(|i| decoded(&prepared, &tokenizer, i)).collect::<Vec<_>>()
    });
    assert_eq!(texts[0].len(), 2);
    assert!(texts[0][0].1.contains("a \"cat\",\nhere: dog"), "{texts:?}");
    texts.iter().for_each(|of| assert_eq!(of, &texts[0]));
}

#[test]
fn damaged_tables_and_packed_files_are_counted_with_their_rows() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "rows.csv", "text,n\nOne day,1\nonly\nTwo,2\nThree,3\n");
    let tokenizer = tokenizer();
    let options = options(64, Truncation::Delete);
    let prepared = prepare(&[text(path)], Some(&tokenizer), &options).unwrap();
    let broken = &prepared.summary.datasets[0].dropped[&RowReason::Unreadable];
    assert!(broken.rows == 1 && broken.row == 2 && broken.detail.contains("1 fields"), "{broken:?}");
    let twice = file(folder.path(), "twice.csv", "text,text\na,b\n");
    let error = prepare(&[text(twice)], Some(&tokenizer), &options).unwrap_err().to_string();
    assert!(error.contains("two columns are called `text`"), "{error}");
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for n in 0..2000 {
        std::io::Write::write_all(&mut encoder, format!("{{\"text\": \"Once upon {n}\"}}\n").as_bytes()).unwrap();
    }
    let mut bytes = encoder.finish().unwrap();
    bytes.truncate(bytes.len() - 20);
    let cut = folder.path().join("cut.jsonl.gz");
    fs::write(&cut, bytes).unwrap();
    let prepared = prepare(&[text(cut)], Some(&tokenizer), &options).unwrap();
    let broken = &prepared.summary.datasets[0].dropped[&RowReason::Unreadable];
    assert!(broken.rows >= 1 && prepared.summary.datasets[0].rows_kept > 100, "{}", prepared.summary);
}

#[test]
fn the_type_is_recognised_and_said() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer();
    let auto = |path| dataset(path, DatasetKind::Auto(Box::default()));
    let mut options = options(1024, Truncation::Delete);
    options.dialogue.template = Some(CHAT.to_owned());
    let path = stories().join("data/gsm8k.jsonl");
    let prepared = prepare(&[auto(path)], Some(&tokenizer), &options).unwrap();
    assert_eq!(prepared.summary.datasets[0].rows_kept, 200);
    let shown = prepared.summary.to_string();
    assert!(shown.contains("recognised as instruction (question and answer): `question` and `answer`"), "{shown}");
    let pairs = file(folder.path(), "dpo.jsonl", r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#);
    let error = prepare(&[auto(pairs)], Some(&tokenizer), &options).unwrap_err().to_string();
    assert!(error.contains("preference pairs (`chosen` and `rejected`)") && error.contains("`task: dpo`"), "{error}");
}

#[test]
fn a_split_and_a_pattern_choose_files() {
    let folder = tempfile::tempdir().unwrap();
    for (name, id) in [("train-1.jsonl", 1), ("train-2.jsonl", 2), ("test.jsonl", 3)] {
        file(folder.path(), name, &format!("{{\"input_ids\": [{id}, 9]}}"));
    }
    let firsts = |spec: DatasetSpec| {
        let prepared = prepare(&[spec], None, &options(8, Truncation::Delete)).map_err(|error| error.to_string())?;
        Ok((0..prepared.corpus.len()).map(|i| prepared.corpus.document(i).unwrap().ids[0]).collect::<Vec<i32>>())
    };
    let of =
        |split: &str| DatasetSpec { split: split.to_owned(), ..dataset(folder.path().to_owned(), DatasetKind::Tokens) };
    assert_eq!(firsts(of("train")), Ok(vec![1, 2]));
    assert_eq!(firsts(of("test")), Ok(vec![3]));
    let error: String = firsts(of("validation")).unwrap_err();
    assert!(error.contains("no split `validation`") && error.contains("splits here: test, train"), "{error}");
    assert_eq!(firsts(dataset(folder.path().join("t*[12t].jsonl"), DatasetKind::Tokens)), Ok(vec![3, 1, 2]));
    let error = firsts(dataset(folder.path().join("x*.jsonl"), DatasetKind::Tokens)).unwrap_err();
    assert!(error.contains("no file matches"), "{error}");
    let one =
        DatasetSpec { split: "test".to_owned(), ..dataset(folder.path().join("test.jsonl"), DatasetKind::Tokens) };
    assert!(firsts(one).unwrap_err().contains("a file has no split"));
}

/// Each node reads its own rows; together they read all, none twice; broken rows are counted where they are.
#[test]
fn parts_of_a_set_are_rows_in_turn() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.jsonl");
    let rows =
        (0..50).map(|i| if i == 31 { "broken\n".to_owned() } else { format!("{{\"input_ids\": [{i}, 400]}}\n") });
    fs::write(&path, rows.collect::<String>()).unwrap();
    let spec = DatasetSpec { samples: Some(40), ..dataset(path, DatasetKind::Tokens) };
    let firsts = |number: usize, of: usize| {
        let spec = DatasetSpec { shard: data::RowShard { number, of }, ..spec.clone() };
        let prepared = prepare(&[spec], None, &options(8, Truncation::Delete)).unwrap();
        let firsts =
            (0..prepared.corpus.len()).map(|i| prepared.corpus.document(i).unwrap().ids[0]).collect::<Vec<_>>();
        (firsts, prepared.summary.datasets[0].rows_read, prepared.summary.datasets[0].failures())
    };
    for of in [1, 3, 4] {
        let parts: Vec<_> = (0..of).map(|number| firsts(number, of)).collect();
        assert_eq!(parts.iter().map(|part| (part.1, part.2)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1)), (40, 1));
        for (number, (firsts, ..)) in parts.iter().enumerate() {
            assert!(firsts.iter().all(|&i| i as usize % of == number));
        }
        let mut all: Vec<i32> = parts.into_iter().flat_map(|part| part.0).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq((0..40).filter(|&i| i != 31)), "{of} parts");
    }
}

#[test]
fn files_of_a_folder_in_formats_that_are_not_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("train.jsonl"), "{\"text\": \"a b\"}\n").unwrap();
    (0..12).for_each(|n| fs::write(folder.path().join(format!("part-{n:02}.XLSX")), "x").unwrap());
    fs::write(folder.path().join("notes.md"), "x").unwrap();
    let spec = DatasetSpec::new(folder.path(), DatasetKind::Text { field: "text".into() });
    let shown = prepare(&[spec], Some(&tokenizer()), &options(64, Truncation::Split)).unwrap().summary.to_string();
    assert!(shown.contains("part-00.XLSX has a format that is not read and is left out\n"), "{shown}");
    assert!(shown.contains("  … as are 4 more of these\n") && !shown.contains("notes.md"), "{shown}");
}
