//! Preferences to ids: every recorded row of `shared/golden/preference`, the forms of other tools, and what the data check
//! says of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data::{
    Cut, DatasetKind, DatasetSpec, DialogueOptions, Document, EncodedCorpus, IGNORE, PreferenceColumns,
    PreferenceOptions, PrepareOptions, Purpose, Split, Tokenizer, Truncation, UnpairedColumns, prepare,
};
use serde_json::{Value, json};

use crate::shared::{assets, tokenizer_folder};

fn options(preference: PreferenceOptions, max_length: usize, vocab_size: usize) -> PrepareOptions {
    let dialogue = DialogueOptions::default();
    PrepareOptions {
        max_length,
        truncation: Truncation::Delete,
        vocab_size,
        positions: None,
        workers: 1,
        dialogue,
        preference,
    }
}

fn for_purpose(purpose: Purpose, split: Split) -> PreferenceOptions {
    PreferenceOptions { purpose, split, ..PreferenceOptions::default() }
}

fn file(folder: &Path, rows: &[Value]) -> PathBuf {
    let path = folder.join("rows.jsonl");
    let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
    fs::write(&path, lines.join("\n")).unwrap();
    path
}

fn auto() -> DatasetKind {
    DatasetKind::Auto(Box::default())
}

/// A copy of a tokenizer folder that cuts texts as the recorded ids were cut: `GPT2Tokenizer` of transformers 5 takes nothing
/// but vocabulary and merges out of `tokenizer.json`, and so does not separate digits.
fn as_recorded(source: &Path, scratch: &Path) -> PathBuf {
    let unpacked = tokenizer_folder(source, scratch);
    let folder = scratch.join("recorded");
    fs::create_dir(&folder).unwrap();
    for entry in fs::read_dir(&unpacked).unwrap().flatten().filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let settings = fs::read_to_string(folder.join("tokenizer_config.json")).unwrap();
    if settings.contains("GPT2Tokenizer") {
        let path = folder.join("tokenizer.json");
        let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        tokenizer["pre_tokenizer"] = tokenizer["pre_tokenizer"]["pretokenizers"][1].clone();
        fs::write(&path, tokenizer.to_string()).unwrap();
    }
    folder
}

/// One tokenizer with its recorded rows.
struct Recorded {
    tokenizer: Arc<Tokenizer>,
    rows: Vec<(String, Value)>,
    place: tempfile::TempDir,
}

impl Recorded {
    fn open(name: &str) -> Recorded {
        let place = tempfile::tempdir().unwrap();
        let folder = as_recorded(&assets().join("tokenizers").join(name), place.path());
        let path = assets().join(format!("../golden/preference/datasets_{name}.json"));
        let recorded: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let rows = recorded["rows"].as_object().unwrap().clone().into_iter().collect();
        Recorded { tokenizer: Arc::new(Tokenizer::from_folder(&folder).unwrap()), rows, place }
    }

    /// The documents of a row; an error's text where there are none.
    fn documents(
        &self,
        row: &Value,
        kind: DatasetKind,
        preference: PreferenceOptions,
        limit: usize,
    ) -> Result<Vec<Document>, String> {
        let path = file(self.place.path(), std::slice::from_ref(row));
        let options = options(preference, limit, 1 << 20);
        let prepared = prepare(&[DatasetSpec::new(path, kind)], Some(&self.tokenizer), &options);
        let corpus = prepared.map_err(|error| error.to_string())?.corpus;
        Ok((0..corpus.len()).map(|i| corpus.document(i).unwrap()).collect())
    }
}

fn ids(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

/// Ids, and how many of them at the end are trained; all others are not.
fn split(document: &Document) -> (Vec<i32>, usize) {
    let trained = document.labels.iter().filter(|label| **label != IGNORE).count();
    let at = document.len() - trained;
    assert!(document.labels[..at].iter().all(|label| *label == IGNORE));
    assert_eq!(document.labels[at..], document.ids[at..]);
    (document.ids.clone(), trained)
}

fn recorded(prompt: &Value, answer: &Value) -> (Vec<i32>, usize) {
    ([ids(prompt), ids(answer)].concat(), ids(answer).len())
}

fn pair(document: &Document) -> [Document; 2] {
    let pair = data::Preference::of(document.clone()).expect("a pair");
    [pair.chosen, pair.rejected]
}

fn paired(split: Split) -> PreferenceOptions {
    for_purpose(Purpose::Pairs, split)
}

/// True for a row of the unpaired form.
fn is_unpaired(row: &Value) -> bool {
    row.get("label").is_some()
}

fn kind_of(row: &Value) -> DatasetKind {
    match is_unpaired(row) {
        true => DatasetKind::Unpaired(UnpairedColumns::default()),
        false => DatasetKind::Preference(PreferenceColumns::default()),
    }
}

fn check_row(of: &Recorded, name: &str, recorded_row: &Value) {
    let row = &recorded_row["row"];
    for kind in [kind_of(row), auto()] {
        if let Some(dpo) = recorded_row.get("dpo") {
            let found = of.documents(row, kind.clone(), paired(Split::CommonPrefix), 8192);
            match dpo.get("error") {
                Some(_) => assert!(found.is_err(), "{name}: TRL refuses it"),
                None => {
                    let found = pair(&found.unwrap_or_else(|error| panic!("{name}: {error}"))[0]);
                    let sides = ["chosen_ids", "rejected_ids"].map(|side| recorded(&dpo["prompt_ids"], &dpo[side]));
                    assert_eq!(found.each_ref().map(split), sides, "{name}, dpo");
                }
            }
        }
        for split in [Split::CommonPrefix, Split::Spans] {
            let of = |share_prompts| {
                of.documents(row, kind.clone(), PreferenceOptions { share_prompts, ..paired(split) }, 8192)
            };
            if let (Ok(apart), Ok(shared)) = (of(false), of(true)) {
                assert_eq!(pair(&shared[0]), pair(&apart[0]), "{name}: a shared prompt belongs to both sides");
                assert!(shared[0].len() <= apart[0].len(), "{name}");
            }
        }
        let kto = for_purpose(Purpose::Answers, Split::CommonPrefix);
        let found = of.documents(row, kind.clone(), kto, 8192);
        match recorded_row["kto"].as_array() {
            None => assert!(found.is_err(), "{name}: TRL refuses it"),
            Some(answers) => {
                let found = found.unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(found.len(), answers.len(), "{name}");
                for (document, answer) in found.into_iter().zip(answers) {
                    let unpaired = data::Unpaired::of(document).expect("an answer with a verdict");
                    let expected = recorded(&answer["prompt_ids"], &answer["completion_ids"]);
                    assert_eq!(split(&unpaired.document), expected, "{name}, kto");
                    assert_eq!(unpaired.prompt, ids(&answer["prompt_ids"]).len(), "{name}");
                    assert_eq!(json!(unpaired.desirable), answer["label"], "{name}");
                }
            }
        }
        if let Some(reward) = recorded_row.get("reward").filter(|reward| reward.get("error").is_none()) {
            let scores = for_purpose(Purpose::Scores, Split::CommonPrefix);
            let found = of.documents(row, kind.clone(), scores, 8192).unwrap();
            let found = data::Preference::of(found[0].clone()).unwrap();
            let sides = ["chosen_ids", "rejected_ids"].map(|side| ids(&reward[side]));
            assert_eq!([found.chosen.ids, found.rejected.ids], sides, "{name}, reward");
            assert_eq!(found.margin.map(f64::from), reward.get("margin").and_then(Value::as_f64), "{name}");
        }
    }
}

#[test]
#[ignore = "reads ../shared/assets"]
fn every_recorded_row_comes_to_its_ids_and_splits() {
    let mut count = 0;
    for name in ["qwen3", "smollm2"] {
        let of = Recorded::open(name);
        for (row_name, row) in &of.rows {
            check_row(&of, &format!("{name}, {row_name}"), row);
            count += 1;
        }
    }
    assert_eq!(count, 50);
}

/// The token ids that the older path of ORPO and CPO makes of a row in place of these: BOS before plain text, EOS after
/// every conversation whose template ends otherwise, and no tools.
fn of_older_path(tokenizer: &Tokenizer, row: &Value, ids: &[i32]) -> Vec<i32> {
    let eos = tokenizer.eos().unwrap().id as i32;
    let bos = tokenizer.bos().map(|bos| bos.id as i32).filter(|bos| ids.first() != Some(bos));
    let end = (ids.last() != Some(&eos)).then_some(eos);
    let is_text = row["chosen"].is_string();
    bos.filter(|_| is_text).into_iter().chain(ids.iter().copied()).chain(end).collect()
}

#[test]
#[ignore = "reads ../shared/assets"]
fn the_older_path_differs_by_bos_eos_and_tools_alone() {
    let mut count = 0;
    for name in ["qwen3", "smollm2"] {
        let of = Recorded::open(name);
        for (row_name, recorded_row) in &of.rows {
            let row = &recorded_row["row"];
            let Some(orpo) = recorded_row.get("orpo").filter(|_| name != "qwen3" || row.get("tools").is_none()) else {
                continue;
            };
            // TRL's other trainers refuse a text next to whole conversations; the older path and we take what both begin with.
            let split =
                if row_name == "prompt_string_with_full_conversations" { Split::Spans } else { Split::CommonPrefix };
            let found = of.documents(row, kind_of(row), paired(split), 8192).unwrap();
            for (side, document) in ["chosen", "rejected"].into_iter().zip(pair(&found[0])) {
                let expected = ids(&orpo[format!("{side}_input_ids")]);
                assert_eq!(of_older_path(&of.tokenizer, row, &document.ids), expected, "{name}, {row_name}, {side}");
                count += 1;
            }
        }
    }
    assert!(count > 80, "{count}");
}

#[test]
#[ignore = "reads ../shared/assets"]
fn spans_train_the_answer_without_what_the_template_writes() {
    let of = Recorded::open("qwen3");
    for (row_name, trained) in [
        ("messages", ["It is blue.<|im_end|>", "It is green.<|im_end|>"]),
        ("thinking", ["<think>\n3*4=12\n</think>\n\n12<|im_end|>", "11<|im_end|>"]),
        ("thinking_off", ["12<|im_end|>", "11<|im_end|>"]),
        ("multi_turn_completion", ["7?<|im_end|>9?<|im_end|>", "I won't.<|im_end|>"]),
    ] {
        let row = &of.rows.iter().find(|(name, _)| name == row_name).unwrap().1;
        let found = of.documents(&row["row"], auto(), paired(Split::Spans), 8192).unwrap();
        let by_prefix = ["chosen_ids", "rejected_ids"]
            .map(|side| [ids(&row["dpo"]["prompt_ids"]), ids(&row["dpo"][side])].concat());
        let found = pair(&found[0]);
        assert_eq!(found.each_ref().map(|side| side.ids.clone()), by_prefix, "{row_name}: the same ids");
        let texts = found.map(|side| {
            let labels: Vec<u32> = side.labels.iter().filter(|label| **label != IGNORE).map(|id| *id as u32).collect();
            of.tokenizer.encoder().decode(&labels, false).unwrap()
        });
        assert_eq!(texts, trained, "{row_name}");
    }
}

#[test]
#[ignore = "reads ../shared/assets"]
fn every_recorded_row_is_cut_as_recorded() {
    let mut count = 0;
    for name in ["qwen3", "smollm2"] {
        let of = Recorded::open(name);
        for (row_name, row) in &of.rows {
            let limits = row.as_object().unwrap().iter().filter_map(|(key, expected)| {
                let (limit, mode) = key.strip_prefix("dpo_max_length_")?.split_once('_')?;
                Some((limit.parse::<usize>().unwrap(), mode.to_owned(), expected))
            });
            for (limit, mode, expected) in limits {
                let place = format!("{name}, {row_name}, {limit}, {mode}");
                let cut = if mode == "keep_start" { Cut::End } else { Cut::Beginning };
                let options = PreferenceOptions { cut, ..paired(Split::CommonPrefix) };
                let found = of.documents(&row["row"], kind_of(&row["row"]), options, limit);
                count += 1;
                if expected.get("dropped").is_some() {
                    assert!(found.unwrap_err().contains("the prompt alone has"), "{place}");
                    continue;
                }
                let found = pair(&found.unwrap_or_else(|error| panic!("{place}: {error}"))[0]);
                for (side, document) in ["chosen", "rejected"].into_iter().zip(&found) {
                    let tokens = expected[side]["completion_tokens"].as_u64().unwrap() as usize;
                    assert_eq!(split(document), (ids(&expected[side]["input_ids"]), tokens), "{place}, {side}");
                }
            }
        }
    }
    assert!(count > 100, "{count}");
}

/// The folder of the example's tokenizer, which has no template of its own.
fn stories() -> Arc<Tokenizer> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    Arc::new(Tokenizer::from_folder(&folder).unwrap())
}

/// A template that opens every turn with the role and ends it with EOS.
const CHAT: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

/// Reads rows for a purpose, with [`CHAT`].
fn read(rows: &[Value], kind: DatasetKind, preference: PreferenceOptions) -> Result<EncodedCorpus, String> {
    let place = tempfile::tempdir().unwrap();
    let mut options = options(preference, 512, 512);
    options.dialogue.template = Some(CHAT.to_owned());
    let spec = DatasetSpec::new(file(place.path(), rows), kind);
    prepare(&[spec], Some(&stories()), &options).map_err(|error| error.to_string())
}

fn text(ids: &[i32]) -> String {
    let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
    stories().encoder().decode(&ids, false).unwrap()
}

/// The trained tokens of a document as text, and all of them.
fn shown(document: &Document) -> [String; 2] {
    let trained: Vec<i32> = document.labels.iter().copied().filter(|label| *label != IGNORE).collect();
    [text(&trained).trim().to_owned(), text(&document.ids).trim().to_owned()]
}

/// The trained text of both sides of the only row, and the whole chosen side.
fn sides(row: &Value) -> [String; 3] {
    let prepared =
        read(std::slice::from_ref(row), auto(), paired(Split::Spans)).unwrap_or_else(|e| panic!("{row}: {e}"));
    let pair = prepared.corpus.preference(0).unwrap().expect("a pair");
    let ([chosen, whole], [rejected, _]) = (shown(&pair.chosen), shown(&pair.rejected));
    [chosen, rejected, whole]
}

#[test]
fn pairs_of_other_tools_come_to_the_same_tokens() {
    let user = json!({"role": "user", "content": "Which?"});
    let (good, bad) =
        (json!({"role": "assistant", "content": "This."}), json!({"role": "assistant", "content": "That."}));
    let asked = "user: Which?</s> assistant: This.</s>";
    let with_system = format!("system: Be kind.</s> {asked}");
    for row in [
        json!({"prompt": [user], "chosen": [good], "rejected": [bad]}),
        json!({"chosen": [user, good], "rejected": [user, bad]}),
        json!({"prompt": [user], "chosen": [user, good], "rejected": [user, bad]}),
        json!({"prompt": "Which?", "chosen": [user, good], "rejected": [user, bad], "messages": [user, good]}),
        json!({"prompt": "Which?", "chosen": [good], "rejected": [bad]}),
        json!({"prompt": [user], "chosen": "This.", "rejected": "That."}),
        json!({"prompt": json!([user]).to_string(), "chosen": good.to_string(), "rejected": bad.to_string()}),
        json!({"conversations": [{"from": "human", "value": "Which?"}], "chosen": {"from": "gpt", "value": "This."},
            "rejected": {"from": "gpt", "value": "That."}}),
        json!({"messages": [user], "chosen": good, "rejected": bad}),
        json!({"messages": [user, good], "rejected_response": "That."}),
        json!({"messages": [user, good], "rejected_messages": [user, bad]}),
        json!({"query": "Which?", "response": "This.", "rejected_response": "That."}),
        json!({"instruction": "Which?", "chosen_response": "This.", "rejected_response": "That."}),
        json!({"instruction": "Which?", "input": "", "chosen": "This.", "rejected": "That."}),
        json!({"question": "Which?", "chosen": "This.", "rejected": "That."}),
        json!({"question": "Which?", "response_j": "This.", "response_k": "That."}),
        json!({"input": {"messages": [user]}, "preferred_output": [good], "non_preferred_output": [bad]}),
    ] {
        assert_eq!(sides(&row), ["This.</s>", "That.</s>", asked], "{row}");
    }
    let system = json!({"role": "system", "content": "Be kind."});
    for row in [
        json!({"prompt": [system, user], "chosen": [good], "rejected": [bad]}),
        json!({"system": "Be kind.", "input": "Which?", "chosen": "This.", "rejected": "That."}),
        json!({"system": "Be kind.", "prompt": "Which?", "chosen": "This.", "rejected": "That."}),
        json!({"chosen": [system, user, good], "rejected": [system, user, bad]}),
    ] {
        assert_eq!(sides(&row), ["This.</s>", "That.</s>", with_system.as_str()], "{row}");
    }
}

#[test]
fn plain_texts_end_with_eos_and_transcripts_train_what_the_assistant_says() {
    let row = json!({"prompt": "The sky is", "chosen": " blue.", "rejected": " green.</s>"});
    assert_eq!(sides(&row), ["blue.</s>", "green.</s>", "<s> The sky is blue.</s>"]);
    let row =
        json!({"chosen": "\n\nHuman: hi\n\nAssistant: I am well", "rejected": "\n\nHuman: hi\n\nAssistant: I am ill"});
    let found = sides(&row);
    assert_eq!(found[..2], ["I am well</s>", "I am ill</s>"]);
    assert!(found[2].ends_with("Human: hi\n\nAssistant: I am well</s>"), "{found:?}");
    let row = json!({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
        "rejected": "\n\nHuman: a\n\nAssistant: e"});
    let found = sides(&row);
    assert!(!found[0].contains("Human") && found[0].starts_with('b') && found[0].ends_with("d</s>"), "{found:?}");
}

#[test]
fn turns_of_the_user_in_an_answer_are_not_trained() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let row = json!({"prompt": [turn("user", "Guess.")], "rejected": [turn("assistant", "No.")],
        "chosen": [turn("assistant", "7?"), turn("user", "Higher."), turn("assistant", "9?")]});
    assert_eq!(sides(&row)[..2], ["7?</s>9?</s>", "No.</s>"]);
}

#[test]
fn verdicts_come_in_several_words() {
    let kto = for_purpose(Purpose::Answers, Split::Spans);
    let user = json!({"role": "user", "content": "Which?"});
    let good = json!({"role": "assistant", "content": "This."});
    let verdict = |row: Value| {
        let prepared = read(std::slice::from_ref(&row), auto(), kto.clone()).unwrap_or_else(|e| panic!("{row}: {e}"));
        let unpaired = prepared.corpus.unpaired(0).unwrap().expect("an answer");
        assert_eq!(shown(&unpaired.document)[0], "This.</s>", "{row}");
        assert!(unpaired.document.labels[unpaired.prompt] != IGNORE, "{row}");
        unpaired.desirable
    };
    for (label, desirable) in [
        (json!(true), true),
        (json!(false), false),
        (json!(1), true),
        (json!(0), false),
        (json!(-1), false),
        (json!("desirable"), true),
        (json!("Undesirable"), false),
        (json!("false"), false),
    ] {
        assert_eq!(verdict(json!({"prompt": [user], "completion": [good], "label": label})), desirable, "{label}");
    }
    assert!(verdict(json!({"messages": [user, good], "label": true})));
    assert!(!verdict(json!({"messages": [user, good], "kto_tag": false})));
    assert!(verdict(json!({"instruction": "Which?", "input": "", "output": "This.", "kto_tag": true})));
    assert!(verdict(json!({"prompt": "Which?", "completion": "This.", "label": true})));
    let unclear = [
        json!({"prompt": "a", "completion": "b", "label": true}),
        json!({"prompt": "a", "completion": "b", "label": 7}),
    ];
    let unpaired = DatasetKind::Unpaired(UnpairedColumns { label: "label".to_owned(), ..Default::default() });
    let prepared = read(&unclear, unpaired, kto).unwrap();
    assert!(prepared.summary.to_string().contains("column `label`: expected true or false"), "{}", prepared.summary);
}

#[test]
fn a_pair_gives_two_answers_where_verdicts_are_wanted() {
    let row = json!({"prompt": "a", "chosen": "b", "rejected": "c"});
    let prepared = read(&[row], auto(), for_purpose(Purpose::Answers, Split::Spans)).unwrap();
    let verdicts = [0, 1].map(|i| prepared.corpus.unpaired(i).unwrap().unwrap().desirable);
    assert_eq!((prepared.corpus.len(), verdicts), (2, [true, false]));
    assert!(prepared.summary.to_string().contains("1 answer desirable, 1 undesirable"), "{}", prepared.summary);
}

#[test]
fn rows_of_another_task_are_refused_with_the_task_that_takes_them() {
    let pair = json!({"prompt": "a", "chosen": "b", "rejected": "c"});
    let verdict = json!({"prompt": "a", "completion": "b", "label": true});
    let question = json!({"instruction": "a", "output": "b"});
    for (row, purpose, problem, hint) in [
        (&pair, Purpose::Documents, "preference pairs (`chosen` and `rejected`)", "`task: dpo`"),
        (&verdict, Purpose::Documents, "answers with a verdict in `label`", "`task: kto`"),
        (&verdict, Purpose::Pairs, "answers with a verdict in `label`", "`task: kto`"),
        (&question, Purpose::Pairs, "hold no pairs", "`task: sft`"),
        (&question, Purpose::Scores, "hold no pairs", "`task: sft`"),
        (&question, Purpose::Answers, "hold no verdicts", "`task: sft`"),
    ] {
        let error = read(std::slice::from_ref(row), auto(), for_purpose(purpose, Split::Spans)).unwrap_err();
        assert!(error.contains(problem) && error.contains(hint), "{error}");
    }
    let written = DatasetKind::Preference(PreferenceColumns::default());
    let error = read(&[pair], written.clone(), PreferenceOptions::default()).unwrap_err();
    assert!(error.contains("`task: dpo`"), "{error}");
    let error = read(&[question], written, paired(Split::Spans)).unwrap_err();
    assert!(error.contains("no pairs of a better and a worse answer") && error.contains("`instruction`"), "{error}");
}

#[test]
fn columns_that_the_user_names_are_read() {
    let row = json!({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.0, "other": "d", "more": "e", "worse": "f",
        "by": 2.0, "completion": "g", "label": true, "verdict": false});
    let question = data::Question { prompt: Some("other".to_owned()), ..Default::default() };
    let named = PreferenceColumns {
        question: question.clone(),
        chosen: Some("more".to_owned()),
        rejected: "worse".to_owned(),
        margin: Some("by".to_owned()),
        scores: None,
    };
    let found = |columns| {
        let kind = DatasetKind::Preference(columns);
        let prepared = read(std::slice::from_ref(&row), kind, paired(Split::Spans)).unwrap();
        let pair = prepared.corpus.preference(0).unwrap().unwrap();
        ([shown(&pair.chosen), shown(&pair.rejected)].map(|[_, whole]| whole), pair.margin)
    };
    let texts = |texts: [&str; 2]| texts.map(str::to_owned);
    assert_eq!(found(PreferenceColumns::default()), (texts(["<s> ab</s>", "<s> ac</s>"]), Some(1.0)));
    assert_eq!(found(named), (texts(["<s> de</s>", "<s> df</s>"]), Some(2.0)));
    let named = UnpairedColumns { question, completion: Some("more".to_owned()), label: "verdict".to_owned() };
    let found = |columns| {
        let kind = DatasetKind::Unpaired(columns);
        let prepared = read(std::slice::from_ref(&row), kind, for_purpose(Purpose::Answers, Split::Spans)).unwrap();
        let unpaired = prepared.corpus.unpaired(0).unwrap().unwrap();
        (shown(&unpaired.document)[1].clone(), unpaired.desirable)
    };
    assert_eq!(found(UnpairedColumns::default()), ("<s> ag</s>".to_owned(), true));
    assert_eq!(found(named), ("<s> de</s>".to_owned(), false));
}

#[test]
fn labels_that_are_no_verdicts_leave_text_as_it_is() {
    let talk = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    for row in [
        json!({"instruction": "a", "output": "b", "label": true}),
        json!({"messages": talk, "label": true}),
        json!({"messages": talk, "label": "news"}),
        json!({"prompt": "a", "completion": "b", "label": 1}),
    ] {
        let prepared = read(std::slice::from_ref(&row), auto(), PreferenceOptions::default());
        let shown = prepared.unwrap_or_else(|error| panic!("{row}: {error}")).summary.to_string();
        assert!(!shown.contains("verdict"), "{shown}");
    }
}

#[test]
fn weights_of_tokens_are_refused_where_they_mean_nothing() {
    let of = |loss: data::LossRule, split: Split| {
        let place = tempfile::tempdir().unwrap();
        let rows = [json!({"prompt": "a", "chosen": "b", "rejected": "c"})];
        let mut options = options(paired(split), 512, 512);
        options.dialogue.loss = loss;
        let spec = DatasetSpec::new(file(place.path(), &rows), auto());
        prepare(&[spec], Some(&stories()), &options).map(|_| ()).map_err(|error| error.to_string())
    };
    assert!(of(data::LossRule::Everything, Split::Spans).unwrap_err().contains("loss_scale: `loss_scale: all`"));
    assert!(of(data::LossRule::LastRound, Split::CommonPrefix).unwrap_err().contains("`preference_split: trl`"));
    assert_eq!(of(data::LossRule::LastRound, Split::Spans), Ok(()));
}

#[test]
fn the_data_check_counts_what_is_wrong_with_pairs() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let rows = [
        json!({"chosen": [turn("user", "q"), turn("assistant", "a")], "rejected": [turn("user", "q"), turn("assistant", "a")]}),
        json!({"chosen": [turn("system", "s"), turn("user", "q"), turn("assistant", "a")],
            "rejected": [turn("system", "s"), turn("user", "r"), turn("assistant", "a")]}),
        json!({"chosen": [turn("user", "q"), turn("assistant", "a")], "rejected": [turn("user", "q"), turn("assistant", "b")],
            "score_chosen": 1.0, "score_rejected": 2.5, "note": "of several words"}),
        json!({"chosen": [turn("user", "q")], "rejected": [turn("user", "r")]}),
    ];
    let shown = read(&rows, auto(), paired(Split::Spans)).unwrap().summary.to_string();
    for line in [
        "recognised as preference pairs (conversations) in `chosen` and `rejected`, prompt in what both sides begin with; not \
         used: `note`",
        "3 pairs: ",
        "1 pair with equal sides",
        "1 pair whose sides are answers to different prompts",
        "1 pair whose rejected side has the higher score",
        "dropped 1 row: missing field",
        "there is no prompt",
    ] {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    let long = "word ".repeat(40);
    let rows = vec![json!({"prompt": "a", "chosen": long, "rejected": "c"}); 30];
    let prepared = read(&rows, auto(), paired(Split::Spans)).unwrap();
    let bias = prepared.summary.datasets[0].length_bias().unwrap();
    assert!(bias.contains("the longer one in 100 % of the pairs"), "{bias}");
}

#[test]
fn margins_reach_the_pair_and_long_rows_are_cut_or_dropped() {
    let long = "word ".repeat(60);
    let row = json!({"prompt": "a", "chosen": long, "rejected": "c", "margin": 2.5});
    let of = |preference: PreferenceOptions| read(std::slice::from_ref(&row), auto(), preference);
    let pair = of(paired(Split::Spans)).unwrap().corpus.preference(0).unwrap().unwrap();
    assert_eq!(pair.margin, Some(2.5));
    let whole = pair.chosen.len() + pair.rejected.len();
    // A row that holds fewer tokens than both sides: the longer one gives way.
    let cut = of(PreferenceOptions { pair_length: whole - 20, ..paired(Split::Spans) }).unwrap();
    assert_eq!(cut.corpus.sides(0), Some([pair.chosen.len() - 20, pair.rejected.len()]));
    assert!(cut.summary.to_string().contains("1 answer truncated"), "{}", cut.summary);
    let scores =
        PreferenceOptions { pair_length: whole - 20, cut: Cut::Nothing, ..for_purpose(Purpose::Scores, Split::Spans) };
    let error = of(scores).unwrap_err();
    assert!(error.contains("both sides have"), "{error}");
}

#[test]
fn a_shared_prompt_counts_once_where_rows_are_short() {
    let row = json!({"prompt": "a b c d e f g h", "chosen": "word ".repeat(20), "rejected": "c"});
    let of = |preference: PreferenceOptions| read(std::slice::from_ref(&row), auto(), preference).unwrap();
    let apart = of(paired(Split::Spans)).corpus.document(0).unwrap();
    let shared = PreferenceOptions { share_prompts: true, ..paired(Split::Spans) };
    let prepared = of(shared.clone());
    let document = prepared.corpus.document(0).unwrap();
    let Some(data::Mark::Pair { shared: saved, .. }) = document.mark else { panic!("a pair") };
    assert!(saved > 4 && document.len() + saved == apart.len(), "{saved} of {}", apart.len());
    assert!(prepared.summary.to_string().contains(&format!("{saved} tokens of prompts are shared")));
    // Room for the shared form alone: nothing is cut. One token less, and the longer answer gives way.
    let fits = of(PreferenceOptions { pair_length: document.len(), ..shared.clone() });
    assert_eq!(fits.corpus.document(0).unwrap(), document);
    let cut = of(PreferenceOptions { pair_length: document.len() - 1, ..shared }).corpus.document(0).unwrap();
    assert_eq!(cut.len(), document.len() - 1);
    let [long, short] = pair(&document);
    assert_eq!(pair(&cut).map(|side| side.len()), [long.len() - 1, short.len()]);
}

#[test]
fn the_loader_lays_answers_after_their_shared_prompt() {
    let rows = [json!({"prompt": "a b c d", "chosen": "b c", "rejected": "d"})];
    let shared = PreferenceOptions { share_prompts: true, ..paired(Split::Spans) };
    let prepared = read(&rows, auto(), shared).unwrap();
    let pair = prepared.corpus.preference(0).unwrap().unwrap();
    let spec = data::LoaderSpec { batch_size: 1, seq_len: 32, ..loader_spec() };
    let documents = data::DocumentSet::all(prepared.corpus.clone());
    let batch = data::Loader::new(documents, spec, data::Position::default()).unwrap().next().unwrap().unwrap();
    let data::Mark::Pair { chosen, shared, .. } = batch.marks[0].mark else { panic!("a pair") };
    let end = batch.marks[0].tokens;
    assert!(shared > 0 && end == pair.chosen.len() + pair.rejected.len() - shared);
    let positions: Vec<i32> = (0..chosen as i32).chain(shared as i32..(shared + end - chosen) as i32).collect();
    assert_eq!(batch.position_ids[..end], positions, "the rejected side goes on after the prompt");
    assert!(batch.document_start[..end].iter().all(|start| *start == 0), "one document");
    let last_query = data::inputs::input("last_query").unwrap().bytes(&batch).unwrap();
    let last_query: Vec<i32> = last_query.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
    for (t, last) in last_query.into_iter().enumerate() {
        let is_chosen_alone = (shared..chosen).contains(&t);
        assert_eq!(last, if is_chosen_alone { chosen as i32 - 1 } else { 31 }, "token {t}");
    }
    // Each side predicts what it predicts alone.
    let predicted = |ids: &[i32], labels: &[i32]| -> Vec<(i32, i32)> {
        let pairs = ids.iter().zip(&labels[1..]).filter(|(_, label)| **label != IGNORE);
        pairs.map(|(id, label)| (*id, *label)).collect()
    };
    let trained = |range: std::ops::Range<usize>| -> Vec<(i32, i32)> {
        let targets = batch.input_ids[range.clone()].iter().zip(&batch.targets[range]);
        targets.filter(|(_, target)| **target != IGNORE).map(|(id, target)| (*id, *target)).collect()
    };
    assert_eq!(trained(0..chosen), predicted(&pair.chosen.ids, &pair.chosen.labels));
    assert_eq!(trained(chosen..end), predicted(&pair.rejected.ids, &pair.rejected.labels));
    let next_tokens = data::inputs::input("next_tokens").unwrap().bytes(&batch).unwrap();
    assert_eq!(next_tokens.as_chunks::<4>().0[chosen - 1], IGNORE.to_le_bytes(), "sides do not follow one another");
}

fn loader_spec() -> data::LoaderSpec {
    data::LoaderSpec {
        batch_size: 2,
        share: data::Share::WHOLE,
        seq_len: 64,
        layout: data::Layout::Packed,
        padding: data::Padding::End,
        shuffle: true,
        seed: 1,
        epochs: Some(1),
        pad_id: 0,
        longest_padding: usize::MAX,
        prefetch: 0,
        logits: Vec::new(),
        images: None,
    }
}

#[test]
fn the_loader_keeps_both_sides_together_as_documents_of_their_own() {
    let rows: Vec<Value> = (0..20)
        .map(|i| json!({"prompt": "a", "chosen": "b ".repeat(1 + i % 7), "rejected": "c ".repeat(1 + i % 5)}))
        .collect();
    let prepared = read(&rows, auto(), paired(Split::Spans)).unwrap();
    let documents = data::DocumentSet::all(prepared.corpus.clone());
    let mut seen = Vec::new();
    for batch in data::Loader::new(documents, loader_spec(), data::Position::default()).unwrap() {
        let batch = batch.unwrap();
        for placed in &batch.marks {
            let data::Mark::Pair { chosen, .. } = placed.mark else { panic!("a pair") };
            let range = placed.begin..placed.begin + placed.tokens;
            let second = placed.begin + chosen;
            assert_eq!((batch.position_ids[placed.begin], batch.position_ids[second]), (0, 0));
            assert_eq!(batch.document_start[second] as usize, second % 64);
            assert_eq!(batch.targets[second - 1], IGNORE, "the chosen side does not predict the rejected one");
            assert_eq!(batch.targets[second - 2], 2, "each side predicts its EOS");
            seen.push(batch.input_ids[range].to_vec());
        }
    }
    let mut all: Vec<Vec<i32>> = (0..20).map(|i| prepared.corpus.document(i).unwrap().ids).collect();
    seen.sort();
    all.sort();
    assert_eq!(seen, all);
}

#[test]
#[ignore = "reads ../shared/assets"]
fn published_pairs_are_read_whole() {
    let of = Recorded::open("smollm2");
    let path = assets().join("data/llama-factory/dpo_en_demo.json");
    for purpose in [Purpose::Pairs, Purpose::Scores, Purpose::Answers] {
        let spec = DatasetSpec::new(path.clone(), auto());
        let options = options(for_purpose(purpose, Split::Spans), 8192, 1 << 20);
        let prepared = prepare(&[spec], Some(&of.tokenizer), &options).unwrap();
        let summary = &prepared.summary.datasets[0];
        assert_eq!((summary.rows_read, summary.rows_kept), (300, 300), "{}", prepared.summary);
        println!("{}", prepared.summary);
    }
}

/// One side beyond `max_length` counts, also where both together are within twice of it; advice names options that the task has.
#[test]
fn pairs_that_are_too_long_are_worth_a_warning_with_options_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    let tokenizer = Arc::new(Tokenizer::from_folder(&model).unwrap());
    let pair = |long: bool| json!({"prompt": "Hi.", "chosen": if long { "a b ".repeat(30) } else { "a".to_owned() }, "rejected": "b"});
    let rows: Vec<Value> = (0..20).map(|n| pair(n < 2)).collect();
    let path = file(folder.path(), &rows);
    let said = |preference: PreferenceOptions| {
        let prepared = prepare(&[DatasetSpec::new(&path, auto())], Some(&tokenizer), &options(preference, 40, 512));
        prepared.unwrap().summary.datasets[0].warning().unwrap_or_default()
    };
    for (purpose, fate, advice) in [
        (Purpose::Pairs, "cut", "; `truncation_mode: keep_end` keeps those whose prompt alone is too long"),
        (Purpose::Answers, "cut", "; `truncation_mode: keep_end` keeps those whose prompt alone is too long"),
        (Purpose::Scores, "dropped", "keeps 99 % of them"),
    ] {
        let cut = if purpose == Purpose::Scores { Cut::Nothing } else { Cut::End };
        let of = said(PreferenceOptions { cut, ..for_purpose(purpose, Split::Spans) });
        assert!(of.starts_with("10.0 % of the rows") && of.contains(&format!("too long and {fate}")), "{of}");
        assert!(of.ends_with(advice) && !of.contains("truncation_strategy"), "{of}");
    }
}
