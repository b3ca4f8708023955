//! The templates that have a name: rendered as the formats are, and as the models' own where these are available.

use crate::shared;
use data::template::{ChatTemplate, Conversation, families};
use serde_json::{Map, Value, json};

fn render(name: &str, messages: &Value, prompt: bool, tokens: [&str; 2]) -> Result<String, String> {
    let text = families::named(name).unwrap().text.unwrap();
    let variables = [("bos_token", tokens[0]), ("eos_token", tokens[1])];
    let variables: Map<String, Value> =
        variables.map(|(name, token)| (name.to_owned(), json!(token))).into_iter().collect();
    let template = ChatTemplate::new(text, variables, data::template::clock_now()).unwrap();
    let messages: Vec<Map<String, Value>> = serde_json::from_value(messages.clone()).unwrap();
    let rendered = template.render(Conversation { messages: &messages, tools: None }, prompt);
    rendered.map(|rendered| rendered.text).map_err(|error| error.detail)
}

#[test]
fn formats_are_written_as_they_are_known() {
    let talk = json!([
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "R"},
    ]);
    for (name, expected) in [
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n\
          <|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n\
          Q<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n\
          R<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A </s><s>[INST] R [/INST]"),
        ("mistral", "<s>[INST] S\n\nQ[/INST] A</s>[INST] R[/INST]"),
        (
            "gemma",
            "<s><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n\
          <start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "phi3",
            "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nR<|end|>\n<|assistant|>\n",
        ),
        (
            "phi4",
            "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>Q<|im_end|><|im_start|>assistant\
          <|im_sep|>A<|im_end|><|im_start|>user<|im_sep|>R<|im_end|><|im_start|>assistant<|im_sep|>",
        ),
        ("zephyr", "<|system|>\nS</s>\n<|user|>\nQ</s>\n<|assistant|>\nA</s>\n<|user|>\nR</s>\n<|assistant|>\n"),
        ("deepseek", "<s>S<｜User｜>Q<｜Assistant｜>A</s><｜User｜>R<｜Assistant｜>"),
        ("vicuna", "<s>S USER: Q ASSISTANT: A</s>USER: R ASSISTANT:"),
        ("alpaca", "<s>S\n\n### Instruction:\nQ\n\n### Response:\nA</s>\n\n### Instruction:\nR\n\n### Response:\n"),
    ] {
        assert_eq!(render(name, &talk, true, ["<s>", "</s>"]).as_deref(), Ok(expected), "{name}");
    }
    let plain = json!([{"role": "user", "content": "Q"}]);
    let qwen = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n";
    assert_eq!(render("qwen2", &plain, false, ["", ""]).as_deref(), Ok(qwen));
    let tool = json!([{"role": "tool", "content": "Q"}]);
    assert!(render("llama2", &tool, false, ["", ""]).unwrap_err().contains("no role tool"));
}

/// A format renders what a model's own template does, as long as the template keeps to the format.
#[test]
#[ignore = "reads ../shared/assets"]
fn formats_equal_the_models_own_templates() {
    let assets = shared::assets();
    for (model, name, tokens, cases) in [
        ("smollm2", "chatml", ["", ""], 1),
        ("qwen3", "chatml", ["", ""], 2),
        ("mistral-nemo", "mistral-nemo", ["<s>", "</s>"], 2),
    ] {
        let mut compared = 0;
        for case in shared::json_lines(&assets.join("tokenizers").join(model).join("golden_chat.jsonl")) {
            let messages = case["messages"].as_array().unwrap();
            let has_system = messages[0]["role"] == "system";
            let plain = messages.iter().all(|m| m["content"].is_string() && m.get("tool_calls").is_none());
            // One of the models writes a system prompt of its own, another an empty thought into a last answer.
            let beyond = (model == "smollm2" && !has_system)
                || (model == "qwen3" && messages.last().unwrap()["role"] == "assistant");
            if !plain || beyond || case["kwargs"].get("tools").is_some() || messages.iter().any(|m| m["role"] == "tool")
            {
                continue;
            }
            let prompt = case["kwargs"]["add_generation_prompt"] == true;
            let rendered = render(name, &case["messages"], prompt, tokens).unwrap();
            assert_eq!(rendered, case["rendered"].as_str().unwrap(), "{model}: {}", case["case"]);
            compared += 1;
        }
        assert!(compared >= cases, "{model}: {compared} cases compared");
    }
}
