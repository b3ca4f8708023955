//! The hard errors of the data check, each made to fire by whole datasets, and its neighbour that passes.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use data::{
    ConversationColumns, DataError, DatasetKind, DatasetSpec, DialogueOptions, EncodedCorpus, PrepareOptions,
    Tokenizer, Truncation, prepare,
};
use serde_json::{Value, json};

const SOUND: &str = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}";

fn tokenizer() -> Arc<Tokenizer> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/stories/model");
    Arc::new(Tokenizer::from_folder(&folder).unwrap())
}

fn options(template: &str, truncation: Truncation, max_length: usize) -> PrepareOptions {
    let dialogue = DialogueOptions {
        template: Some(template.to_owned()),
        keeps_system: truncation == Truncation::Left,
        ..DialogueOptions::default()
    };
    PrepareOptions {
        max_length,
        truncation,
        vocab_size: 512,
        positions: None,
        workers: 1,
        dialogue,
        preference: data::PreferenceOptions::default(),
    }
}

fn prepared(rows: &[Value], options: &PrepareOptions) -> Result<EncodedCorpus, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("talk.jsonl");
    fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    let columns = ConversationColumns { messages: "messages".to_owned(), ..ConversationColumns::default() };
    prepare(&[DatasetSpec::new(path, DatasetKind::Conversation(columns))], Some(&tokenizer()), options)
}

fn talk(answer: Value) -> Value {
    json!({"messages": [{"role": "user", "content": "Hi."}, answer]})
}

fn answer(text: &str) -> Value {
    talk(json!({"role": "assistant", "content": text}))
}

fn check(rows: &[Value], template: &str) -> Result<EncodedCorpus, String> {
    prepared(rows, &options(template, Truncation::Delete, 128)).map_err(|e| e.to_string())
}

#[test]
fn sound_rows_pass() {
    let prepared = check(&[answer("Yes."), answer("No.")], SOUND).unwrap();
    let of = &prepared.summary.datasets[0];
    assert_eq!((of.rows_kept, of.with_end, of.doubled_bos), (2, Some(2), 0));
}

#[test]
fn nothing_trained_is_an_error() {
    let silent = talk(json!({"role": "assistant", "content": "Yes.", "train": false}));
    let error = check(&[silent.clone(), silent.clone()], SOUND).unwrap_err();
    assert!(error.contains("2 of 2 rows fail: 2 x nothing trained, first at") && error.contains("row 1"), "{error}");
    // Rows that settings leave out are no failures, but then there is nothing left.
    let long = answer(&"word ".repeat(200));
    let error = check(&[long], SOUND).unwrap_err();
    assert!(error.contains("no token of 1 rows is trained: 1 x too long"), "{error}");
    assert!(check(&[silent, answer("Yes."), answer("No.")], SOUND).is_ok());
}

#[test]
fn an_end_of_turn_that_is_never_a_label_is_an_error() {
    let endless = SOUND.replace("{{ eos_token }}", "");
    let error = check(&[answer("Yes."), answer("No.")], &endless).unwrap_err();
    assert!(error.contains("no token that ends a turn is trained in any of 2 documents"), "{error}");
    assert!(error.contains("never learn to stop"), "{error}");
}

#[test]
fn bos_that_stands_twice_is_an_error() {
    let twice = format!("{{{{ bos_token }}}}{SOUND}");
    let error = check(&[answer("Yes."), answer("No.")], &twice).unwrap_err();
    assert!(error.contains("2 of 2 documents begin with BOS twice"), "{error}");
}

#[test]
fn a_template_that_fails_on_most_rows_is_an_error() {
    let strict = format!("{{% if messages|length > 2 %}}{{{{ raise_exception('too many') }}}}{{% endif %}}{SOUND}");
    let more = json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ]});
    let error = check(&[answer("Yes."), more.clone(), more.clone()], &strict).unwrap_err();
    assert!(error.contains("2 of 3 rows fail: 2 x template error, first at"), "{error}");
    assert!(error.contains("row 2") && error.contains("too many"), "{error}");
    assert!(error.contains("the model's chat template rejects") && !error.contains("column names"), "{error}");
    let half = check(&[answer("Yes."), more], &strict).unwrap();
    assert_eq!((half.summary.datasets[0].rows_kept, half.summary.datasets[0].failures()), (1, 1));
}

#[test]
fn broken_rows_are_named_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("talk.jsonl");
    let mut bytes = format!("{}\n{}\n{}\n", answer("1"), answer("2"), answer("3")).into_bytes();
    bytes.extend(b"{\"messages\": \xff}\n{\"other\": 1}\n");
    bytes.extend(format!("{}\n", json!({"messages": [{"role": "user", "content": ["x", 1]}]})).bytes());
    bytes.extend(format!("{}\n", answer("4")).bytes());
    fs::write(&path, bytes).unwrap();
    let columns = ConversationColumns { messages: "messages".to_owned(), ..ConversationColumns::default() };
    let spec = DatasetSpec::new(path, DatasetKind::Conversation(columns));
    let prepared = prepare(&[spec], Some(&tokenizer()), &options(SOUND, Truncation::Delete, 128)).unwrap();
    let of = &prepared.summary.datasets[0];
    assert_eq!((of.rows_read, of.rows_kept), (7, 4), "{}", prepared.summary);
    let examples: Vec<String> = of.dropped.values().map(|of| format!("row {}: {}", of.row, of.detail)).collect();
    for place in ["row 4: ", "row 5: no column `messages`", "row 6: "] {
        assert!(examples.iter().any(|example| example.contains(place)), "{place}: {examples:?}");
    }
}

/// Rows that are too long are worth a warning from 5 % on, and end the work above half.
#[test]
fn truncation_is_reported_with_the_length_that_avoids_it() {
    let long = answer(&"word ".repeat(100));
    let rows = |long_ones: usize, all: usize| -> Vec<Value> {
        (0..all).map(|n| if n < long_ones { long.clone() } else { answer("Yes.") }).collect()
    };
    let warning = |long_ones: usize, all: usize, truncation: Truncation| {
        let encoded = prepared(&rows(long_ones, all), &options(SOUND, truncation, 128)).unwrap();
        let of = &encoded.summary.datasets[0];
        of.check_lengths().map(|()| of.warning()).map_err(|e| e.to_string())
    };
    let length = {
        let encoded = prepared(&rows(1, 1), &options(SOUND, Truncation::Delete, 4096)).unwrap();
        encoded.corpus.length(0)
    };
    assert!(length > 128, "{length}");
    assert_eq!(warning(4, 100, Truncation::Delete), Ok(None));
    let said = warning(5, 100, Truncation::Delete).unwrap().unwrap();
    assert!(said.starts_with("5.0 % of the rows of") && said.contains("are too long and dropped"), "{said}");
    let enough: usize = said.split(" at least ").find_map(|part| part.split(' ').next()?.parse().ok()).unwrap();
    assert!(enough >= length && enough * 100 <= length * 107, "{said}: {length}");
    assert!(said.contains("keeps 99 % of them; `truncation_strategy`: `split` or `right`"), "{said}");
    let few = PrepareOptions { positions: Some(128), ..options(SOUND, Truncation::Delete, 128) };
    let encoded =
        prepared(&(0..20).map(|n| if n < 2 { long.clone() } else { answer("Yes.") }).collect::<Vec<_>>(), &few);
    let said = encoded.unwrap().summary.datasets[0].warning().unwrap();
    assert!(said.contains("the model has no more than 128 positions; `truncation_strategy`"), "{said}");
    let error = warning(51, 100, Truncation::Delete).unwrap_err();
    assert!(
        error.contains("51 of 100 rows are too long") && error.contains(&format!("of at least {enough} keeps 99 %")),
        "{error}"
    );
    assert!(warning(50, 100, Truncation::Delete).unwrap().is_some());
    let said = warning(60, 100, Truncation::Right).unwrap().unwrap();
    assert!(said.starts_with("60.0 % of the rows of") && said.contains("are too long and cut"), "{said}");
    assert!(said.ends_with("`truncation_strategy: split` makes several rows of each"), "{said}");
    let error = prepared(&rows(20, 20), &options(SOUND, Truncation::Delete, 128)).unwrap_err().to_string();
    assert!(error.contains("no token of 20 rows is trained") && error.contains("keeps 99 %"), "{error}");
    // Broken rows and those that are too long are lost together.
    let mut mixed = rows(8, 20);
    mixed[10..14].fill(json!({"messages": 3}));
    let lost = prepared(&mixed, &options(SOUND, Truncation::Delete, 128)).unwrap();
    let error = lost.summary.datasets[0].check_lengths().unwrap_err().to_string();
    assert!(error.contains("8 of 20 rows are too long") && error.contains("4 x wrong type"), "{error}");
    assert_eq!(warning(60, 100, Truncation::Split), Ok(None));
}

/// Cut at the beginning, a conversation keeps BOS and its system prompt, here with the templates of real models.
#[test]
fn the_system_prompt_survives_left_truncation_with_real_templates() {
    let prompt = "Be brief, kind and true.";
    let mut messages = vec![json!({"role": "system", "content": prompt})];
    for i in 0..40 {
        messages.push(json!({"role": "user", "content": format!("Tell me of number {i}.")}));
        messages.push(json!({"role": "assistant", "content": format!("It is {i}, and nothing else.")}));
    }
    let tokenizer = tokenizer();
    // That of mistral-nemo writes a system prompt only where the conversation ends with a question.
    for name in ["qwen3", "smollm2", "gpt-oss"] {
        let file = format!("tests/fixtures/templates/{name}/chat_template.jinja");
        let template = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        // Of these tokens the tokenizer of the test knows only its own, so the turns end with that.
        let template = ["<|im_end|>", "<|end|>", "<|return|>"].iter().fold(template, |t, end| t.replace(end, "</s>"));
        let limit = 700;
        let options = options(&template, Truncation::Left, limit);
        let prepared = prepared(&[json!({ "messages": messages })], &options).unwrap();
        let view = prepared.corpus.document(0).unwrap();
        assert_eq!(view.ids.len(), limit, "{name}: it was cut");
        let ids: Vec<u32> = view.ids.iter().map(|&id| id as u32).collect();
        let text = tokenizer.encoder().decode(&ids, false).unwrap();
        assert!(text.contains(prompt), "{name}: {}", &text[..200]);
        assert!(!text.contains("number 0.") && text.contains("It is 39"), "{name}: {text}");
    }
}
