//! Files of a model's folder, of an adapter's, and GGUF.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use data::Tokenizer;
use data::gguf::{Encoding, GgufFile, GgufTensor, GgufValue, GgufWriter};
use data::quantised::Scheme;
use data::safetensors::Weights;
use serde_json::{Value, json};
use train::config::{Config, Task};
use train::{Device, DeviceRequest, ModelSource, Trainer, adapter_base, merge};

use super::{file, root, scratch, stories, written};

/// Texts that a tokenizer encodes: special tokens, many blanks, bytes that no word has.
const TEXTS: [&str; 5] =
    ["Once upon a time", "<s>a</s> <|im_end|>\n", "", "  \t\r\n ü \u{fdd0}🙂 don't", "aaaaaaaaaaaaaaaa"];

/// `tokenizer.json`: loaded, then texts there and back.
pub fn tokenizer(bytes: &[u8]) -> bool {
    written("tokenizer", "tokenizer.json", bytes);
    written("tokenizer", "tokenizer_config.json", &file("examples/stories/model/tokenizer_config.json"));
    use_tokenizer("tokenizer")
}

fn use_tokenizer(folder: &str) -> bool {
    let Ok(tokenizer) = Tokenizer::from_folder(&scratch(folder)) else { return false };
    for text in TEXTS {
        let Ok(encoded) = tokenizer.encode_document(text) else { continue };
        assert_eq!(encoded.ids.len(), encoded.offsets.len(), "every token has its bytes");
        let _ = tokenizer.encoder().decode(&encoded.ids, false);
    }
    let _ = (tokenizer.pad_id(), tokenizer.encoder().id_to_token(7), tokenizer.encoder().vocab_size());
    true
}

pub fn tokenizer_seeds() -> Vec<Vec<u8>> {
    let byte_level = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "NFC"},
        "added_tokens": [{"id": 5, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": true,
            "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\s+|[a-z]+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [5], "tokens": ["</s>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "vocab": {"a": 0, "b": 1, "aa": 2, "Ġ": 3, "Ġa": 4},
            "merges": [["a", "a"], ["Ġ", "a"]]}
    });
    let unigram = json!({
        "added_tokens": [], "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, {"type": "Strip", "strip_left": true, "strip_right": false}]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true},
        "decoder": {"type": "Fuse"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁", -1.0], ["a", -2.0]], "byte_fallback": false}
    });
    let words = json!({
        "added_tokens": [], "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true}, "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 10, "vocab": {"[UNK]": 0, "a": 1, "##a": 2}}
    });
    let mut seeds = vec![file("examples/stories/model/tokenizer.json")];
    seeds.extend([byte_level, unigram, words].map(|value| value.to_string().into_bytes()));
    seeds
}

/// `tokenizer_config.json` next to a whole tokenizer.
pub fn tokenizer_config(bytes: &[u8]) -> bool {
    written("tokenizer_config", "tokenizer.json", &file("examples/stories/model/tokenizer.json"));
    written("tokenizer_config", "tokenizer_config.json", bytes);
    use_tokenizer("tokenizer_config")
}

pub fn tokenizer_config_seeds() -> Vec<Vec<u8>> {
    let named = json!({"bos_token": {"content": "<s>", "special": true}, "eos_token": "</s>", "pad_token": null,
        "added_tokens_decoder": {"1": {"content": "<s>", "special": true}},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]});
    vec![file("examples/stories/model/tokenizer_config.json"), named.to_string().into_bytes()]
}

static CPU: LazyLock<Arc<Device>> = LazyLock::new(|| {
    let device = options::Setting::Value(train::config::Device::Cpu);
    Arc::new(Device::open(&DeviceRequest { device, ..DeviceRequest::default() }).expect("a CPU is always there"))
});

pub(super) fn cpu() -> Arc<Device> {
    CPU.clone()
}

/// A graph to go with the example's folder.
pub(super) const IR: &str = include_str!("../../crates/train/tests/ir/stories.json");

pub(super) fn options(more: &Value) -> Arc<Config> {
    let mut options = json!({"model": stories(), "sequence_len": 32, "torch_dtype": "float32", "max_steps": 2,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "lora_rank": 2});
    for (key, value) in more.as_object().into_iter().flatten() {
        options[key] = value.clone();
    }
    Arc::new(Config::load_json(&options.to_string(), Task::Sft, &[]).expect("these options are right"))
}

/// `config.json`, with what the options do to it and what a trainer asks of it.
pub fn config(bytes: &[u8]) -> bool {
    written("config", "config.json", bytes);
    let Ok(source) = ModelSource::open(&scratch("config"), IR) else { return false };
    let _ = (source.vocab_size(), source.max_positions(), source.position_limit());
    let _ = (source.model_type(), source.dtype());
    for method in ["linear", "dynamic", "yarn"] {
        let stretched = options(&json!({"rope_scaling": method, "max_model_len": 8192}));
        let _ = source.clone().configured(&stretched).map(|source| source.position_limit());
    }
    // The folder has no weights.
    Trainer::new(options(&json!({"init": "random"})), Arc::new(source), cpu()).is_ok()
}

pub fn config_seeds() -> Vec<Vec<u8>> {
    ["examples/stories/model/config.json", "tests/golden/llama/config.json", "tests/golden/qwen3/config_v4.json"]
        .map(file)
        .into()
}

/// Every tensor of a folder or file of weights. True if there are any.
fn read_all(path: PathBuf) -> bool {
    Weights::open(&path).is_ok_and(|weights| read_tensors(&weights))
}

fn read_tensors(weights: &Weights) -> bool {
    let views = weights.names().into_iter().filter_map(|name| weights.get(name).ok()).collect::<Vec<_>>();
    for view in &views {
        let bytes = view.bytes().expect("what the header says lies in the file");
        assert_eq!(bytes.len(), view.shape.iter().product::<usize>() * view.dtype.size(), "bytes fit the shape");
    }
    !views.is_empty()
}

/// One `.safetensors` file.
pub fn safetensors(bytes: &[u8]) -> bool {
    read_all(written("safetensors", "model.safetensors", bytes))
}

fn safetensors_file(header: &Value, data: usize) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![1; data]].concat()
}

pub fn safetensors_seeds() -> Vec<Vec<u8>> {
    let header = json!({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]}, "c": {"dtype": "I64", "shape": [0], "data_offsets": [26, 26]}});
    vec![
        safetensors_file(&header, 26),
        safetensors_file(&json!({"x": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}), 8),
    ]
}

/// Forms of quantised weights, one for each first byte.
const SCHEMES: [Scheme; 12] = [
    Scheme::BitsAndBytes,
    Scheme::Fp8 { block: Some([2, 3]) },
    Scheme::Fp8 { block: None },
    Scheme::CompressedFp8 { block: None },
    Scheme::CompressedNvfp4,
    Scheme::ModelOptFp8,
    Scheme::ModelOptNvfp4,
    Scheme::Mxfp4,
    Scheme::CompressedMxfp4,
    Scheme::CompressedInt8,
    Scheme::CompressedPacked { bits: 4, zeros: true },
    Scheme::CompressedPacked { bits: 8, zeros: false },
];

/// A form by a byte, then a `.safetensors` file with weights of it.
pub fn quantised(bytes: &[u8]) -> bool {
    let Some((form, bytes)) = bytes.split_first() else { return false };
    let path = written("quantised", "model.safetensors", bytes);
    let scheme = SCHEMES[usize::from(*form) % SCHEMES.len()];
    Weights::open(&path)
        .and_then(|weights| weights.dequantised(scheme, false))
        .is_ok_and(|weights| read_tensors(&weights))
}

pub fn quantised_seeds() -> Vec<Vec<u8>> {
    /// Tensors by name, type, shape and bytes.
    type Tensors = Vec<(&'static str, &'static str, Vec<usize>, Vec<u8>)>;
    let file = |form: u8, tensors: Tensors| {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in tensors {
            let begin = data.len();
            data.extend(bytes);
            header.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]}));
        }
        let header = Value::Object(header).to_string();
        [&[form], &(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
    };
    let floats = |n: usize| 1.5f32.to_le_bytes().repeat(n);
    let state = |more: Value| {
        let mut state = json!({"quant_type": "nf4", "blocksize": 4, "dtype": "bfloat16", "shape": [3, 5]});
        more.as_object().into_iter().flatten().for_each(|(key, value)| state[key] = value.clone());
        state.to_string().into_bytes()
    };
    let (plain, nested) = (state(json!({})), state(json!({"nested_blocksize": 2, "nested_offset": 0.25})));
    const STATE: &str = "a.weight.quant_state.bitsandbytes__nf4";
    vec![
        file(
            0,
            vec![
                ("a.weight", "U8", vec![8, 1], vec![0x7f; 8]),
                ("a.weight.absmax", "F32", vec![4], floats(4)),
                ("a.weight.quant_map", "F32", vec![16], floats(16)),
                (STATE, "U8", vec![plain.len()], plain),
            ],
        ),
        file(
            0,
            vec![
                ("a.weight", "U8", vec![8, 1], vec![0x7f; 8]),
                ("a.weight.absmax", "U8", vec![4], vec![9; 4]),
                ("a.weight.nested_absmax", "F32", vec![2], floats(2)),
                ("a.weight.quant_map", "F32", vec![16], floats(16)),
                ("a.weight.nested_quant_map", "F32", vec![256], floats(256)),
                (STATE, "U8", vec![nested.len()], nested),
            ],
        ),
        file(
            1,
            vec![
                ("a.weight", "F8_E4M3", vec![3, 5], vec![0x38; 15]),
                ("a.weight_scale_inv", "BF16", vec![2, 2], vec![0x3f; 8]),
            ],
        ),
        file(
            2,
            vec![("a.weight", "F8_E4M3", vec![3, 5], vec![0x38; 15]), ("a.weight_scale", "F8_E8M0", vec![], vec![127])],
        ),
        file(
            3,
            vec![("a.weight", "F8_E4M3", vec![3, 5], vec![0x38; 15]), ("a.weight_scale", "F32", vec![3, 1], floats(3))],
        ),
        file(
            4,
            vec![
                ("a.weight_packed", "U8", vec![3, 16], vec![0x5a; 48]),
                ("a.weight_scale", "F8_E4M3", vec![3, 2], vec![0x38; 6]),
                ("a.weight_global_scale", "F32", vec![1], floats(1)),
            ],
        ),
        file(
            6,
            vec![
                ("a.weight", "U8", vec![3, 16], vec![0x5a; 48]),
                ("a.weight_scale", "F8_E4M3", vec![3, 2], vec![0x38; 6]),
                ("a.weight_scale_2", "F32", vec![], floats(1)),
                ("a.input_scale", "F32", vec![], floats(1)),
            ],
        ),
        file(
            7,
            vec![
                ("a_blocks", "U8", vec![2, 3, 1, 16], vec![0x5a; 96]),
                ("a_scales", "U8", vec![2, 3, 1], vec![127; 6]),
            ],
        ),
        file(
            8,
            vec![
                ("a.weight_packed", "U8", vec![3, 16], vec![0x5a; 48]),
                ("a.weight_scale", "U8", vec![3, 1], vec![127; 3]),
            ],
        ),
        file(9, vec![("a.weight", "I8", vec![3, 5], vec![0x9a; 15]), ("a.weight_scale", "F32", vec![3, 1], floats(3))]),
        file(
            10,
            vec![
                ("a.weight_packed", "I32", vec![9, 2], vec![0x5a; 72]),
                ("a.weight_scale", "F32", vec![9, 2], floats(18)),
                ("a.weight_shape", "I64", vec![2], [9i64, 10].iter().flat_map(|n| n.to_le_bytes()).collect()),
                ("a.weight_zero_point", "I32", vec![2, 2], vec![0x77; 16]),
            ],
        ),
        file(
            11,
            vec![
                ("a.weight_packed", "I32", vec![3, 2], vec![0x5a; 24]),
                ("a.weight_scale", "BF16", vec![3, 1], vec![0x3f; 6]),
                ("a.weight_shape", "I64", vec![2], [3i64, 5].iter().flat_map(|n| n.to_le_bytes()).collect()),
            ],
        ),
    ]
}

/// `model.safetensors.index.json` next to two shards.
pub fn shards(bytes: &[u8]) -> bool {
    for (name, tensor) in [("model-1.safetensors", "a"), ("model-2.safetensors", "b")] {
        let header = json!({tensor: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}});
        written("shards", name, &safetensors_file(&header, 2));
    }
    written("shards", "model.safetensors.index.json", bytes);
    read_all(scratch("shards"))
}

pub fn shards_seeds() -> Vec<Vec<u8>> {
    let both =
        json!({"metadata": {"total_size": 4}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}});
    vec![both.to_string().into_bytes()]
}

/// `adapter_config.json` next to the matrices of a real adapter, merged into its model.
pub fn adapter(bytes: &[u8]) -> bool {
    written("adapter", "adapter_config.json", bytes);
    let matrices = scratch("adapter").join("adapter_model.safetensors");
    if !matrices.exists() {
        fs::copy(root().join("tests/golden/llama/lora/adapter_model.safetensors"), matrices)
            .expect("a fixture is copied");
    }
    let _ = adapter_base(&scratch("adapter"));
    let output = scratch("merged").join("model");
    let _ = fs::remove_dir_all(&output);
    merge(&root().join("tests/golden/llama"), &scratch("adapter"), &output, &Default::default(), false, &|| false)
        .is_ok()
}

pub fn adapter_seeds() -> Vec<Vec<u8>> {
    let patterns = json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ".*(q|v)_proj", "bias": "none",
        "use_rslora": true, "rank_pattern": {"^x.*": 4}, "alpha_pattern": {"v_proj": 3.5}, "layers_to_transform": [0, 1],
        "layers_pattern": "layers", "exclude_modules": ["o_proj"], "lora_dropout": 0.1});
    vec![file("tests/golden/llama/lora/adapter_config.json"), patterns.to_string().into_bytes()]
}

/// A GGUF file: its texts and the bytes of its tensors.
pub fn gguf(bytes: &[u8]) -> bool {
    let Ok(read) = GgufFile::open(&written("gguf", "model.gguf", bytes)) else { return false };
    let _ = read.text("general.architecture");
    for tensor in read.tensors() {
        assert!(read.bytes(&tensor.name).is_ok(), "a tensor of the table lies in the file");
    }
    true
}

pub fn gguf_seeds() -> Vec<Vec<u8>> {
    let path = scratch("gguf").join("seed.gguf");
    // Of an earlier run: a file that is there is not written to.
    let _ = fs::remove_file(&path);
    let metadata = [
        ("general.architecture".to_owned(), GgufValue::Text("llama".into())),
        ("llama.block_count".to_owned(), GgufValue::U32(1)),
    ];
    let tensor = |name: &str, shape: Vec<usize>, encoding| GgufTensor { name: name.to_owned(), shape, encoding };
    let tensors = vec![tensor("a", vec![2, 32], Encoding::F32), tensor("b", vec![1, 64], Encoding::Q8_0)];
    let bytes: Vec<usize> = tensors.iter().map(GgufTensor::bytes).collect();
    let mut writer = GgufWriter::create(&path, &metadata, tensors).expect("a seed can be written");
    for bytes in bytes {
        writer.put(&vec![0; bytes]).expect("a seed can be written");
    }
    writer.finish().expect("a seed can be written");
    vec![fs::read(&path).expect("a seed can be read")]
}
