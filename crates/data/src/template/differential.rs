//! Compares templates with limits against the unmodified engine: both render the same text, and nothing that the engine
//! renders is rejected.

use std::fs;
use std::path::{Path, PathBuf};

use minijinja::Value as Jinja;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use serde_json::{Value, json};
use tensor::philox::{Purpose, word};

use super::compiled::Compiled;
use super::{Readings, allowance, environment, generation};
use crate::guard::guarded;

fn syntax() -> SyntaxConfig {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap()
}

/// The rendering by the engine alone; `None`: it rejects.
fn plainly(source: &str, variables: &Value) -> Option<String> {
    let mut environment = environment("2026-11-20T00:00:00".parse().unwrap(), Readings::default());
    environment.set_syntax(syntax());
    environment.set_fuel(Some(5_000_000));
    environment.add_template_owned("chat", source.to_owned()).ok()?;
    let render = || environment.get_template("chat").unwrap().render(Jinja::from(Serde(variables))).ok();
    allowance::during(1 << 20, || guarded(render)).ok()?
}

/// The same with the bounds.
fn within_bounds(source: &str, variables: &Value) -> Result<String, String> {
    let mut environment = environment("2026-11-20T00:00:00".parse().unwrap(), Readings::default());
    environment.set_fuel(Some(50_000_000));
    let compiled = Compiled::new(source, &syntax()).map_err(|e| e.to_string())?;
    let render = || compiled.render(&environment, Jinja::from(Serde(variables))).map_err(|e| e.to_string());
    allowance::during(1 << 20, || guarded(render))?
}

/// Every template available: those of the tests, and those next to the checkout.
fn templates() -> Vec<String> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<PathBuf> =
        vec![here.join("tests/fixtures/templates"), here.join("../../../shared/assets/tokenizers")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "jinja") {
                found.push(fs::read_to_string(path).unwrap());
            } else if path.ends_with("tokenizer_config.json") {
                let config: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
                found.extend(config["chat_template"].as_str().map(str::to_owned));
            }
        }
    }
    found.sort();
    found.dedup();
    found.into_iter().map(|source| generation::rewrite(&source).unwrap_or(source)).collect()
}

fn conversations() -> Vec<Value> {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d \"q\" <b>", "parameters": {
        "type": "object", "properties": {"x": {"type": ["integer", "null"], "enum": [1, 2]}}, "required": ["x"]}}});
    let call = json!([{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"x": 1, "y": [1.5, null]}}}]);
    let user = |text: &str| json!({"role": "user", "content": text});
    let assistant = |text: &str| json!({"role": "assistant", "content": text});
    let talks = [
        json!([user("Hi")]),
        json!([user(" a\n"), assistant("<think>\nr\n</think>\n\nb "), user("c"), assistant("d")]),
        json!([{"role": "system", "content": "S"}, user("q"), {"role": "assistant", "content": "", "tool_calls": call},
               {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "7"}, assistant("ä 東")]),
        json!([user("q"), {"role": "assistant", "content": "a", "reasoning_content": "r", "thinking": "r"}]),
        json!([assistant("a"), user("q")]),
        json!([{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        json!([]),
    ];
    let with = |messages: &Value| {
        [(json!(null), true), (json!([tool]), false)].map(|(tools, prompt)| {
            json!({"messages": messages, "tools": tools, "documents": null, "add_generation_prompt": prompt,
                   "bos_token": "<s>", "eos_token": "</s>", "enable_thinking": prompt})
        })
    };
    talks.iter().flat_map(with).collect()
}

#[test]
fn bounds_refuse_nothing_and_change_nothing() {
    let (templates, conversations) = (templates(), conversations());
    let mut same = 0;
    let mut compare = |source: &str, conversation: &Value| {
        if let Some(plain) = plainly(source, conversation) {
            assert_eq!(within_bounds(source, conversation).as_ref(), Ok(&plain), "{source}\n{conversation}");
            same += 1;
        }
    };
    for source in &templates {
        conversations.iter().for_each(|conversation| compare(source, conversation));
    }
    // Templates with holes are templates too.
    let rounds: u64 = std::env::var("SUROGATE_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    for seed in 0..40 * rounds {
        let dice = |k: u32, below: usize| word(seed, Purpose::Shuffle, 78, k, 0) as usize % below;
        let source = &templates[dice(0, templates.len())];
        let mut lines: Vec<&str> = source.split_inclusive('\n').collect();
        for change in 0..1 + dice(1, 3) as u32 {
            let (from, to) = (dice(2 + 3 * change, lines.len()), dice(3 + 3 * change, lines.len()));
            match dice(4 + 3 * change, 3) {
                0 if lines.len() > 1 => drop(lines.remove(from)),
                1 => lines.swap(from, to),
                _ => lines.insert(to, lines[from]),
            }
        }
        compare(&lines.concat(), &conversations[dice(20, conversations.len())]);
    }
    assert!(same > 40, "only {same} renderings were compared");
}
