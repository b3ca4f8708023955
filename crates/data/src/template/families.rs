//! Chat templates by name: the common formats, and the names of model families.
//!
//! A family's name means the model's own template if it has one, because generations of a family differ; a format's
//! name always means the template below. Knows no tokenizer: the tokens that a template needs are listed with it.

/// A name of the option, and the template that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: &'static str,
    /// Prefixes of the `model_type`s whose own template is meant; none: a format.
    pub family: &'static [&'static str],
    /// The Jinja text; none where only models bring it.
    pub text: Option<&'static str>,
    /// Tokens that the text writes and a tokenizer must know as one.
    pub tokens: &'static [&'static str],
}

const CHATML: &str = "\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

const QWEN2: &str = "\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

const LLAMA3: &str = "\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}";

const LLAMA2: &str = "\
{%- set turns = messages -%}
{%- set opening = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set turns = messages[1:] -%}
{%- set opening = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{- bos_token + '[INST] ' + (opening if loop.first else '') + message.content | trim + ' [/INST]' -}}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content | trim + ' ' + eos_token -}}
{%- else -%}
{{- raise_exception('this format has no role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}";

const MISTRAL: &str = "\
{{- bos_token -}}
{%- set turns = messages -%}
{%- set opening = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set turns = messages[1:] -%}
{%- set opening = messages[0].content + '\\n\\n' -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{- '[INST] ' + (opening if loop.first else '') + message.content + '[/INST]' -}}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content + eos_token -}}
{%- else -%}
{{- raise_exception('this format has no role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}";

const MISTRAL_NEMO: &str = "\
{{- bos_token -}}
{%- set turns = messages -%}
{%- set opening = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set turns = messages[1:] -%}
{%- set opening = messages[0].content + '\\n\\n' -%}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{{- '[INST]' + (opening if loop.last else '') + message.content + '[/INST]' -}}
{%- elif message.role == 'assistant' -%}
{{- message.content + eos_token -}}
{%- else -%}
{{- raise_exception('this format has no role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}";

const GEMMA: &str = "\
{{- bos_token -}}
{%- set turns = messages -%}
{%- set opening = '' -%}
{%- if messages[0].role == 'system' -%}
{%- set turns = messages[1:] -%}
{%- set opening = messages[0].content + '\\n\\n' -%}
{%- endif -%}
{%- for message in turns -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' + (opening if loop.first else '') + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}";

const PHI3: &str = "\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}";

const PHI4: &str = "\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|im_sep|>' -}}{%- endif -%}";

const ZEPHYR: &str = "\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}";

const DEEPSEEK: &str = "\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- message.content -}}
{%- elif message.role == 'user' -%}{{- '<｜User｜>' + message.content -}}
{%- elif message.role == 'assistant' -%}{{- '<｜Assistant｜>' + message.content + eos_token -}}
{%- else -%}{{- raise_exception('this format has no role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}";

const VICUNA: &str = "\
{%- if bos_token is defined -%}{{- bos_token -}}{%- endif -%}
{%- if messages[0].role != 'system' -%}
{{- 'A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and \
polite answers to the user\\'s questions. ' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- message.content + ' ' -}}
{%- elif message.role == 'user' -%}{{- 'USER: ' + message.content + ' ' -}}
{%- elif message.role == 'assistant' -%}{{- 'ASSISTANT: ' + message.content + eos_token -}}
{%- else -%}{{- raise_exception('this format has no role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}";

const ALPACA: &str = "\
{%- if bos_token is defined -%}{{- bos_token -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{- message.content + '\\n\\n' -}}
{%- elif message.role == 'user' -%}{{- '### Instruction:\\n' + message.content + '\\n\\n' -}}
{%- elif message.role == 'assistant' -%}{{- '### Response:\\n' + message.content + eos_token + '\\n\\n' -}}
{%- else -%}{{- raise_exception('this format has no role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### Response:\\n' -}}{%- endif -%}";

const IM: &[&str] = &["<|im_start|>", "<|im_end|>"];
const HEADERS: &[&str] = &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"];
const TURNS: &[&str] = &["<start_of_turn>", "<end_of_turn>"];
const PHI3_TOKENS: &[&str] = &["<|user|>", "<|assistant|>", "<|end|>"];
const DEEPSEEK_TOKENS: &[&str] = &["<｜User｜>", "<｜Assistant｜>"];

const fn family(
    name: &'static str,
    family: &'static [&'static str],
    text: Option<&'static str>,
    tokens: &'static [&'static str],
) -> Named {
    Named { name, family, text, tokens }
}

const fn format(name: &'static str, text: &'static str, tokens: &'static [&'static str]) -> Named {
    Named { name, family: &[], text: Some(text), tokens }
}

/// Every known name, families first.
pub const NAMES: &[Named] = &[
    family("qwen", &["qwen"], Some(CHATML), IM),
    family("llama", &["llama"], Some(LLAMA3), HEADERS),
    family("mistral", &["mistral", "mixtral", "ministral"], Some(MISTRAL), &[]),
    family("gemma", &["gemma"], Some(GEMMA), TURNS),
    family("phi", &["phi"], Some(PHI3), PHI3_TOKENS),
    family("deepseek", &["deepseek"], Some(DEEPSEEK), DEEPSEEK_TOKENS),
    family("smollm3", &["smollm3"], Some(CHATML), IM),
    family("gpt-oss", &["gpt_oss"], None, &[]),
    format("chatml", CHATML, IM),
    format("qwen2", QWEN2, IM),
    format("llama2", LLAMA2, &[]),
    format("llama3", LLAMA3, HEADERS),
    format("mistral-nemo", MISTRAL_NEMO, &[]),
    format("phi3", PHI3, PHI3_TOKENS),
    format("phi4", PHI4, &["<|im_start|>", "<|im_sep|>", "<|im_end|>"]),
    format("zephyr", ZEPHYR, &[]),
    format("vicuna", VICUNA, &[]),
    format("alpaca", ALPACA, &[]),
];

/// Looks up a family or format by its name.
pub fn named(name: &str) -> Option<&'static Named> {
    NAMES.iter().find(|known| known.name == name)
}

impl Named {
    /// True if the model belongs to the family; every model does to a format.
    pub fn suits(&self, model_type: &str) -> bool {
        self.family.is_empty() || self.family.iter().any(|prefix| model_type.starts_with(prefix))
    }

    /// True if the model's own template is used where it has one.
    pub fn is_family(&self) -> bool {
        !self.family.is_empty()
    }
}
