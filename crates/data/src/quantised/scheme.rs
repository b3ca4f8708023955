//! The form of a folder's quantised weights, as its `config.json` says. Forms that are not read are refused by
//! their names.

use serde_json::Value;

/// Advice about a form that is not read.
pub const HINT: &str = "take the model's unquantised repository; with `qlora_bnb: true` its weights are quantised while \
                        they are loaded";

/// Keys of `config.json` that speak of quantisation.
pub(super) const KEYS: [&str; 2] = ["quantization_config", "compression_config"];

/// A form that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// NF4 or FP4 of bitsandbytes; blocks, and whether their scales are quantised too, stand next to each weight.
    BitsAndBytes,
    /// E4M3 with a scale for each tile, or for the tensor.
    Fp8 { block: Option<[usize; 2]> },
    /// E4M3 of compressed-tensors, with a scale for the tensor, for each row or for each tile.
    CompressedFp8 { block: Option<[usize; 2]> },
    /// NVFP4 of compressed-tensors.
    CompressedNvfp4,
    /// MXFP4 of compressed-tensors.
    CompressedMxfp4,
    /// Whole numbers of compressed-tensors, one to a byte, with a scale for each row or for the tensor.
    CompressedInt8,
    /// Whole numbers of 4 or 8 bits of compressed-tensors in words of 32, with a scale for each row or for groups of a row.
    CompressedPacked { bits: u32, zeros: bool },
    /// E4M3 of ModelOpt, with one scale.
    ModelOptFp8,
    /// NVFP4 of ModelOpt.
    ModelOptNvfp4,
    /// E2M1 with powers of two for 32 elements.
    Mxfp4,
}

impl Scheme {
    /// Reads the quantization of a `config.json`; `None` for plain weights. The error names what is not supported.
    pub fn of(config: &Value) -> Result<Option<Scheme>, String> {
        let Some(of) = KEYS.iter().find_map(|key| config.get(key).filter(|value| !value.is_null())) else {
            return Ok(None);
        };
        let method = text(of, "quant_method");
        match method {
            "bitsandbytes" => bitsandbytes(of),
            "fp8" => fp8(of),
            "compressed-tensors" => compressed(of),
            "modelopt" | "modelopt_fp4" => modelopt(text(of, "quant_algo")),
            "mxfp4" => Ok(Scheme::Mxfp4),
            "" if of.get("load_in_4bit").or(of.get("load_in_8bit")).is_some() => bitsandbytes(of),
            "" => Err("`quantization_config` names no `quant_method`".to_owned()),
            other => Err(format!("the model is quantised by `{other}`, which is not read")),
        }
        .map(Some)
    }

    /// Reads the quantization of ModelOpt's own `hf_quant_config.json`.
    pub fn of_modelopt(config: &Value) -> Result<Option<Scheme>, String> {
        match config.get("quantization").map(|of| text(of, "quant_algo")) {
            None | Some("") => Ok(None),
            Some(algorithm) => modelopt(algorithm).map(Some),
        }
    }

    /// Returns the form in the words of an error.
    pub const fn name(&self) -> &'static str {
        match self {
            Scheme::BitsAndBytes => "bitsandbytes, 4 bits",
            Scheme::Fp8 { .. } => "fine-grained FP8",
            Scheme::CompressedFp8 { .. } => "compressed-tensors, FP8",
            Scheme::CompressedNvfp4 => "compressed-tensors, NVFP4",
            Scheme::CompressedMxfp4 => "compressed-tensors, MXFP4",
            Scheme::CompressedInt8 => "compressed-tensors, 8-bit integers",
            Scheme::CompressedPacked { bits: 4, .. } => "compressed-tensors, packed 4-bit integers",
            Scheme::CompressedPacked { .. } => "compressed-tensors, packed 8-bit integers",
            Scheme::ModelOptFp8 => "ModelOpt, FP8",
            Scheme::ModelOptNvfp4 => "ModelOpt, NVFP4",
            Scheme::Mxfp4 => "MXFP4",
        }
    }
}

fn text<'v>(of: &'v Value, key: &str) -> &'v str {
    of.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// Two whole numbers from 1.
fn block(of: Option<&Value>) -> Result<Option<[usize; 2]>, String> {
    let Some(value) = of.filter(|value| !value.is_null()) else { return Ok(None) };
    let number = |index: usize| value.get(index)?.as_u64().filter(|n| (1..=1 << 20).contains(n));
    match (value.as_array().map(Vec::len), number(0), number(1)) {
        (Some(2), Some(rows), Some(columns)) => Ok(Some([rows as usize, columns as usize])),
        _ => Err(format!("the block size {value} of `quantization_config` is not a pair of numbers from 1")),
    }
}

fn bitsandbytes(of: &Value) -> Result<Scheme, String> {
    if of.get("load_in_8bit") == Some(&Value::Bool(true)) {
        return Err("the model is quantised to 8 bits by bitsandbytes, which is not read".to_owned());
    }
    match text(of, "bnb_4bit_quant_type") {
        "nf4" | "fp4" | "" => Ok(Scheme::BitsAndBytes),
        other => Err(format!("the model is quantised by bitsandbytes as `{other}`, expected `nf4` or `fp4`")),
    }
}

fn fp8(of: &Value) -> Result<Scheme, String> {
    match text(of, "fmt") {
        "e4m3" | "float8_e4m3fn" | "" => Ok(Scheme::Fp8 { block: block(of.get("weight_block_size"))? }),
        other => Err(format!("the model is quantised to FP8 in the format `{other}`, expected `e4m3`")),
    }
}

fn compressed(of: &Value) -> Result<Scheme, String> {
    let groups: Vec<&Value> =
        of.get("config_groups").and_then(Value::as_object).into_iter().flat_map(|g| g.values()).collect();
    let formats = groups.iter().map(|group| text(group, "format")).chain([text(of, "format")]);
    let mut formats: Vec<&str> = formats.filter(|name| !name.is_empty()).collect();
    formats.sort_unstable();
    formats.dedup();
    let format = match formats[..] {
        [one] => one,
        _ => return Err(format!("the model is compressed in the formats {formats:?}, expected one")),
    };
    let is_sparse = |of: &Value| !matches!(text(of, "format"), "" | "dense");
    if of.get("sparsity_config").is_some_and(is_sparse) {
        return Err("the model is sparse (`sparsity_config`), which is not read".to_owned());
    }
    let transforms = of.pointer("/transform_config/config_groups").and_then(Value::as_object);
    if transforms.is_some_and(|groups| !groups.is_empty()) {
        return Err("the weights are rotated (`transform_config`), which is not read".to_owned());
    }
    let weights: Vec<&Value> =
        groups.iter().filter_map(|group| group.get("weights")).filter(|of| !of.is_null()).collect();
    let zeros = weights.iter().any(|of| of.get("symmetric") == Some(&Value::Bool(false)));
    if zeros && format != "pack-quantized" {
        return Err(format!("the model is compressed as `{format}` with zero points, which are not read"));
    }
    match format {
        "float-quantized" => {
            let blocks = weights.iter().map(|of| block(of.get("block_structure"))).collect::<Result<Vec<_>, _>>()?;
            let blocks: Vec<[usize; 2]> = blocks.into_iter().flatten().collect();
            if blocks.windows(2).any(|pair| pair[0] != pair[1]) {
                return Err(format!("the model is compressed with the blocks {blocks:?}, expected one size"));
            }
            Ok(Scheme::CompressedFp8 { block: blocks.first().copied() })
        }
        "nvfp4-pack-quantized" => Ok(Scheme::CompressedNvfp4),
        "mxfp4-pack-quantized" => Ok(Scheme::CompressedMxfp4),
        "int-quantized" => Ok(Scheme::CompressedInt8),
        "pack-quantized" => {
            let mut forms: Vec<_> = weights.iter().map(|of| (of.get("num_bits"), of.get("symmetric"))).collect();
            forms.dedup();
            match forms[..] {
                [(Some(bits), _)] if bits == 4 || bits == 8 => {
                    Ok(Scheme::CompressedPacked { bits: if bits == 4 { 4 } else { 8 }, zeros })
                }
                _ => Err(format!(
                    "the model is compressed as `pack-quantized` with (num_bits, symmetric) {forms:?}, expected one form of 4 \
                     or 8 bits"
                )),
            }
        }
        other => Err(format!("the model is compressed by compressed-tensors as `{other}`, which is not read")),
    }
}

fn modelopt(algorithm: &str) -> Result<Scheme, String> {
    match algorithm {
        "NVFP4" => Ok(Scheme::ModelOptNvfp4),
        "FP8" => Ok(Scheme::ModelOptFp8),
        other => Err(format!("the model is quantised by ModelOpt as `{other}`, which is not read")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_read_is_named() {
        for (config, what) in [
            (json!({"quant_method": "gptq", "bits": 4}), "`gptq`"),
            (json!({"quant_method": "awq"}), "`awq`"),
            (json!({"quant_method": "hqq"}), "`hqq`"),
            (json!({"quant_method": "aqlm"}), "`aqlm`"),
            (json!({"quant_method": "quark"}), "`quark`"),
            (json!({"quant_method": "torchao"}), "`torchao`"),
            (json!({"quant_method": "bitsandbytes", "load_in_8bit": true}), "8 bits by bitsandbytes"),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "`e5m2`"),
            (json!({"quant_method": "fp8", "weight_block_size": [0, 128]}), "[0,128]"),
            (json!({"quant_method": "fp8", "weight_block_size": 128}), "the block size 128"),
            (json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}), "`pack-quantized`"),
            (
                json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
                    "config_groups": {"a": {"weights": {"num_bits": 3}}}}),
                "Number(3)",
            ),
            (json!({"quant_method": "compressed-tensors", "format": "marlin-24"}), "`marlin-24`"),
            (
                json!({"quant_method": "compressed-tensors", "format": "int-quantized",
                    "config_groups": {"a": {"weights": {"num_bits": 8, "symmetric": false}}}}),
                "zero points",
            ),
            (json!({"quant_method": "compressed-tensors"}), "the formats []"),
            (
                json!({"quant_method": "compressed-tensors", "format": "float-quantized",
                    "sparsity_config": {"format": "sparse-24-bitmask"}}),
                "sparse",
            ),
            (
                json!({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                    "transform_config": {"config_groups": {"u": {}}}}),
                "rotated",
            ),
            (json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}), "`NVFP4_AWQ`"),
            (json!({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}), "`NVFP4_SVD`"),
            (json!({}), "names no `quant_method`"),
        ] {
            let error = Scheme::of(&json!({"quantization_config": config})).unwrap_err();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn what_is_read_is_recognised() {
        let of = |config: Value| Scheme::of(&json!({"quantization_config": config})).unwrap().unwrap();
        let block = Some([128, 64]);
        assert_eq!(of(json!({"quant_method": "fp8", "weight_block_size": [128, 64]})), Scheme::Fp8 { block });
        assert_eq!(of(json!({"quant_method": "fp8", "weight_block_size": null})), Scheme::Fp8 { block: None });
        assert_eq!(of(json!({"load_in_4bit": true, "bnb_4bit_quant_type": "fp4"})), Scheme::BitsAndBytes);
        let weights = json!({"weights": {"block_structure": [128, 64]}, "format": "float-quantized"});
        let compressed = json!({"quant_method": "compressed-tensors", "config_groups": {"a": weights, "b": weights}});
        assert_eq!(of(compressed), Scheme::CompressedFp8 { block });
        let packed = json!({"weights": {"num_bits": 4, "symmetric": false}, "format": "pack-quantized"});
        let compressed = json!({"quant_method": "compressed-tensors", "config_groups": {"a": packed}});
        assert_eq!(of(compressed), Scheme::CompressedPacked { bits: 4, zeros: true });
        assert_eq!(of(json!({"quant_method": "modelopt", "quant_algo": "FP8"})), Scheme::ModelOptFp8);
        assert_eq!(of(json!({"quant_method": "mxfp4"})), Scheme::Mxfp4);
        let of_its_own = json!({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}});
        assert_eq!(Scheme::of_modelopt(&of_its_own), Ok(Some(Scheme::ModelOptNvfp4)));
        for plain in [json!({}), json!({"quantization_config": null})] {
            assert_eq!(Scheme::of(&plain), Ok(None));
        }
    }
}
