//! The schemes by their names: number formats of weights and activations, and how `config.json` speaks of them.
//!
//! Knows the words of compressed-tensors; not models.

use serde_json::{Value, json};
use tensor::compressed::{Codes, Extent, Form, Range, global_scale, round_to};
use tensor::{DType, HostTensor};

use crate::error::{Result, TrainError};
use crate::model::compression::chosen::IncludedPart;
use crate::model::compression::observer::RangeObserver;

/// The version of compressed-tensors whose files these are.
const VERSION: &str = "0.19.0";

/// Sizes of groups that are tried where none is given, the first that divides every width.
const GROUPS: [usize; 5] = [128, 64, 32, 16, 8];

/// Rows and columns of the tiles of `fp8-block`, and elements of its groups of activations.
const TILE: usize = 128;

/// A scheme with the options that are given for it.
#[derive(Clone, Debug, PartialEq)]
pub struct CompressRequest {
    /// Its name, such as `w4a16`.
    pub scheme: String,
    /// Elements of a row that share a scale; -1: a whole row.
    pub group_size: Option<i64>,
    /// True if groups have zero points.
    pub asymmetric: bool,
    pub method: Method,
    pub observer: RangeObserver,
    /// The share of the ranges of activations in the factors of SmoothQuant; a half where it is not given.
    pub smoothing_strength: Option<f64>,
    /// Parts that become codes besides the layers' matrices.
    pub included: Vec<IncludedPart>,
}

/// The choice of codes, and of factors that are moved between weights before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// The nearest codes of the numbers as they are.
    #[default]
    Rtn,
    Gptq,
    Awq,
    SmoothQuant,
    /// Codes and scales of GPTQ, moved in turns, for the results of the model as it was.
    Refine,
}

impl Method {
    pub const ALL: [Method; 5] = [Method::Rtn, Method::Gptq, Method::Awq, Method::SmoothQuant, Method::Refine];

    /// Returns the name that users give it.
    pub const fn name(self) -> &'static str {
        match self {
            Method::Rtn => "rtn",
            Method::Gptq => "gptq",
            Method::Awq => "awq",
            Method::SmoothQuant => "smoothquant",
            Method::Refine => "refine",
        }
    }

    /// True if codes are chosen by the moments of activations, layer by layer.
    pub const fn chooses_codes(self) -> bool {
        matches!(self, Method::Gptq | Method::Refine)
    }

    /// True if channels are scaled before codes are made.
    pub const fn scales_channels(self) -> bool {
        matches!(self, Method::Awq | Method::SmoothQuant)
    }
}

/// A scheme by the name that users give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    Fp8Dynamic,
    Fp8Static,
    Fp8Block,
    Int8W8A8,
    W4A16,
    W8A16,
    Nvfp4,
    Nvfp4A16,
    Mxfp4A16,
}

impl Name {
    const fn leaves_activations(self) -> bool {
        matches!(self, Name::W4A16 | Name::W8A16 | Name::Nvfp4A16 | Name::Mxfp4A16)
    }

    const fn measures_activations(self) -> bool {
        matches!(self, Name::Fp8Static | Name::Nvfp4)
    }
}

/// All schemes, as users name them.
const SCHEMES: [(&str, Name); 9] = [
    ("fp8-dynamic", Name::Fp8Dynamic),
    ("fp8-static", Name::Fp8Static),
    ("fp8-block", Name::Fp8Block),
    ("int8-w8a8", Name::Int8W8A8),
    ("w4a16", Name::W4A16),
    ("w8a16", Name::W8A16),
    ("nvfp4", Name::Nvfp4),
    ("nvfp4a16", Name::Nvfp4A16),
    ("mxfp4a16", Name::Mxfp4A16),
];

/// A scheme whose groups are decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    pub name: Name,
    pub form: Form,
    /// True if whole numbers share words of 32 bits.
    pub packed: bool,
}

impl CompressRequest {
    /// The request of a scheme without options.
    pub fn plain(scheme: &str) -> CompressRequest {
        CompressRequest {
            scheme: scheme.to_owned(),
            group_size: None,
            asymmetric: false,
            method: Method::Rtn,
            observer: RangeObserver::MinMax,
            smoothing_strength: None,
            included: Vec::new(),
        }
    }

    /// True if activations are measured before the matrices are written.
    pub(crate) fn measures(&self, scheme: &Scheme) -> bool {
        self.method != Method::Rtn || scheme.measures_activations()
    }

    /// Errors: an unknown name, options that the scheme does not have, and data that are missing.
    pub fn check(&self, has_data: bool) -> Result<()> {
        let name = self.name()?;
        let hint = "give a run whose rows activations are measured on, --calibration run.yaml";
        if self.method != Method::Rtn && !has_data {
            let method = self.method.name();
            return Err(TrainError::Usage(format!("--method {method}: it needs data\n  hint: {hint}")));
        }
        if self.method == Method::SmoothQuant && name.leaves_activations() {
            return Err(TrainError::Usage(format!(
                "--method smoothquant: `{}` does not quantize activations, whose ranges it evens out\n  hint: take --method \
                 awq, or a scheme such as int8-w8a8",
                self.scheme
            )));
        }
        if self.observer == RangeObserver::Mse && matches!(name, Name::Fp8Block | Name::Mxfp4A16) {
            return Err(TrainError::Usage(format!(
                "--observer mse: `{}` has scales of whole ranges only\n  hint: leave it out",
                self.scheme
            )));
        }
        if self.observer == RangeObserver::Mse && self.method == Method::Refine {
            let text = "--observer mse: --method refine searches scales by itself\n  hint: leave it out";
            return Err(TrainError::Usage(text.to_owned()));
        }
        if let Some(strength) = self.smoothing_strength {
            if self.method != Method::SmoothQuant {
                let text = "--smoothing-strength: without --method smoothquant it has no effect";
                return Err(TrainError::Usage(text.to_owned()));
            }
            if !(0.0..=1.0).contains(&strength) {
                return Err(TrainError::Usage(format!("--smoothing-strength {strength}: expected 0 to 1")));
            }
        }
        if let Some(part) = self.included.iter().find(|part| name.measures_activations() && !part.is_measured()) {
            let other = if name == Name::Nvfp4 { "nvfp4a16" } else { "fp8-dynamic" };
            return Err(TrainError::Usage(format!(
                "--include {}: `{}` stores scales of activations, which are measured in the text's layers alone\n  hint: take {other}",
                part.name(),
                self.scheme
            )));
        }
        if name.measures_activations() && !has_data {
            let other = if name == Name::Nvfp4 { "nvfp4a16" } else { "fp8-dynamic" };
            return Err(TrainError::Usage(format!(
                "--scheme {}: it stores scales of activations, which are measured on data\n  hint: {hint}, or take {other}",
                self.scheme
            )));
        }
        Ok(())
    }

    /// The share of the ranges of activations in the factors of SmoothQuant.
    pub fn strength(&self) -> f64 {
        self.smoothing_strength.unwrap_or(0.5)
    }

    /// The scheme that is named. Errors: an unknown name, and options that it does not have.
    fn name(&self) -> Result<Name> {
        let found = SCHEMES.iter().find(|(name, _)| *name == self.scheme);
        let Some((_, name)) = found else {
            let known = SCHEMES.map(|(name, _)| name).join(", ");
            return Err(TrainError::Usage(format!("--scheme {}: expected one of {known}", self.scheme)));
        };
        let has_groups = matches!(name, Name::W4A16 | Name::W8A16 | Name::Fp8Block);
        if self.group_size.is_some() && !has_groups {
            let text = format!(
                "--group-size: `{}` has groups of a fixed size\n  hint: w4a16, w8a16 and fp8-block take it",
                self.scheme
            );
            return Err(TrainError::Usage(text));
        }
        if self.asymmetric && !matches!(name, Name::W4A16 | Name::W8A16) {
            let text = format!("--asymmetric: `{}` has no zero points\n  hint: w4a16 and w8a16 take it", self.scheme);
            return Err(TrainError::Usage(text));
        }
        Ok(*name)
    }

    /// The scheme for matrices of these widths, each with a name. Errors: groups that do not divide a width.
    pub fn scheme(&self, widths: &[(&str, usize)]) -> Result<Scheme> {
        let name = self.name()?;
        let int = |bits| Codes::Int { bits, symmetric: !self.asymmetric };
        let (codes, extent, packed) = match name {
            Name::Fp8Dynamic => (Codes::Fp8, Extent::Row, false),
            Name::Fp8Static => (Codes::Fp8, Extent::Tensor, false),
            Name::Fp8Block => {
                let tile = self.given_group()?.unwrap_or(TILE);
                (Codes::Fp8, Extent::Tile(tile, tile), false)
            }
            Name::Int8W8A8 => (int(8), Extent::Row, false),
            Name::W4A16 => (int(4), self.groups(widths)?, true),
            Name::W8A16 => (int(8), self.groups(widths)?, true),
            Name::Nvfp4 | Name::Nvfp4A16 => (Codes::Nvfp4, Extent::Group(16), true),
            Name::Mxfp4A16 => (Codes::Mxfp4, Extent::Group(32), true),
        };
        Ok(Scheme { name, form: Form { codes, extent }, packed })
    }

    fn given_group(&self) -> Result<Option<usize>> {
        match self.group_size {
            None | Some(-1) => Ok(None),
            Some(size) => usize::try_from(size).ok().filter(|size| *size > 0).map(Some).ok_or_else(|| {
                TrainError::Usage(format!("--group-size {size}: expected a number from 1, or -1 for one scale a row"))
            }),
        }
    }

    /// Groups of the size that is given, else of the largest usual one that divides all widths.
    fn groups(&self, widths: &[(&str, usize)]) -> Result<Extent> {
        if self.group_size == Some(-1) {
            return Ok(Extent::Row);
        }
        let unfit = |size: usize| widths.iter().find(|(_, width)| !width.is_multiple_of(size));
        if let Some(size) = self.given_group()? {
            return match unfit(size) {
                None => Ok(Extent::Group(size)),
                Some((name, width)) => Err(TrainError::Usage(format!(
                    "--group-size {size}: `{name}` has rows of {width} elements, which are no whole groups\n  hint: leave it out \
                     for the largest size of up to {} that divides all rows, or give -1 for one scale a row",
                    GROUPS[0]
                ))),
            };
        }
        let fitting = GROUPS.into_iter().find(|size| unfit(*size).is_none());
        fitting.map(Extent::Group).ok_or_else(|| {
            let (name, width) = unfit(GROUPS[GROUPS.len() - 1]).expect("the last size does not fit");
            TrainError::Usage(format!(
                "`{name}` has rows of {width} elements, which no group of 8 to 128 divides\n  hint: --group-size -1 takes one \
                 scale a row"
            ))
        })
    }
}

impl Scheme {
    /// True if the weights are of bfloat16 whatever the model's type: readers have no other values of these codes.
    pub const fn is_of_bf16(&self) -> bool {
        matches!(self.form.codes, Codes::Nvfp4 | Codes::Mxfp4)
    }

    /// True if files hold scales of activations, which are measured.
    pub const fn measures_activations(&self) -> bool {
        self.name.measures_activations()
    }

    /// The ending and the type of the tensor with the scale of a matrix's activations, where there is one.
    pub const fn tensor_of_activations(&self, dtype: DType) -> Option<(&'static str, DType)> {
        match self.name {
            Name::Fp8Static => Some(("input_scale", dtype)),
            Name::Nvfp4 => Some(("input_global_scale", DType::F32)),
            _ => None,
        }
    }

    /// The bytes of that tensor, for activations of this range in this type.
    pub fn scale_of_activations(&self, range: Range, dtype: DType) -> Vec<u8> {
        let magnitude = round_to(dtype, range.magnitude());
        if self.name == Name::Nvfp4 {
            return global_scale(magnitude, dtype).to_le_bytes().to_vec();
        }
        let tensor = Form { codes: Codes::Fp8, extent: Extent::Tensor };
        let range = Range { least: -magnitude, most: magnitude };
        HostTensor::from_f32([1], &tensor.scales(&[], 1, dtype, range).factors).cast(dtype).bytes
    }

    /// Returns the reason for which a matrix [outputs, inputs] stays as it is; none where it becomes codes.
    pub fn refuses(&self, [_, columns]: [usize; 2]) -> Option<String> {
        let divisor = match (self.form.codes, self.form.extent) {
            (_, Extent::Group(size)) => size,
            // Readers quantise activations in groups as wide as a tile.
            (_, Extent::Tile(_, width)) => width,
            _ => 1,
        };
        (!columns.is_multiple_of(divisor)).then(|| format!("rows of {columns} are no whole groups of {divisor}"))
    }

    /// The format that engines round activations to; none where they leave them.
    pub const fn form_of_activations(&self) -> Option<Form> {
        let (codes, extent) = match (self.name, self.form.extent) {
            (Name::Fp8Dynamic, _) => (Codes::Fp8, Extent::Row),
            (Name::Int8W8A8, _) => (Codes::Int { bits: 8, symmetric: true }, Extent::Row),
            (Name::Fp8Block, Extent::Tile(_, n)) => (Codes::Fp8, Extent::Group(n)),
            (Name::Fp8Static, _) => (Codes::Fp8, Extent::Tensor),
            (Name::Nvfp4, _) => (Codes::Nvfp4, Extent::Group(16)),
            _ => return None,
        };
        Some(Form { codes, extent })
    }

    /// The type of a weight's numbers and scales, by that of the model's.
    pub const fn dtype(&self, own: DType) -> DType {
        match own {
            _ if self.is_of_bf16() => DType::BF16,
            DType::BF16 | DType::F16 => own,
            _ => DType::F32,
        }
    }

    pub const fn format(&self) -> &'static str {
        match self.form.codes {
            Codes::Fp8 => "float-quantized",
            Codes::Int { .. } if !self.packed => "int-quantized",
            Codes::Int { .. } => "pack-quantized",
            Codes::Nvfp4 => "nvfp4-pack-quantized",
            Codes::Mxfp4 => "mxfp4-pack-quantized",
        }
    }

    /// `quantization_config` of a model; `ignored`: modules that stay as they are. `gptq`: columns went in the order of their
    /// activations.
    pub fn config(&self, ignored: &[String], transposed: bool, request: &CompressRequest) -> Value {
        let format = self.format();
        let group = json!({
            "format": format,
            "input_activations": self.activations(),
            "output_activations": null,
            "targets": ["Linear"],
            "weights": self.weights(),
        });
        let mut config = json!({
            "config_groups": { "group_0": group },
            "format": format,
            "global_compression_ratio": null,
            "ignore": ignored,
            "kv_cache_scheme": null,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": VERSION,
        });
        if request.method == Method::Gptq {
            config["config_groups"]["group_0"]["weights"]["actorder"] = "static".into();
        }
        config["config_groups"]["group_0"]["weights"]["observer"] =
            format!("memoryless_{}", request.observer.name()).into();
        if transposed {
            config["transposed"] = true.into();
        }
        config
    }

    fn weights(&self) -> Value {
        let (bits, kind, symmetric) = match self.form.codes {
            Codes::Int { bits, symmetric } => (bits, "int", symmetric),
            Codes::Fp8 => (8, "float", true),
            Codes::Nvfp4 | Codes::Mxfp4 => (4, "float", true),
        };
        let (strategy, group, block) = match self.form.extent {
            Extent::Tensor => ("tensor", Value::Null, Value::Null),
            Extent::Row => ("channel", Value::Null, Value::Null),
            Extent::Group(n) if self.form.codes == Codes::Nvfp4 => ("tensor_group", n.into(), Value::Null),
            Extent::Group(n) => ("group", n.into(), Value::Null),
            Extent::Tile(r, c) => ("block", Value::Null, json!([r, c])),
        };
        let mut of = arguments(bits, kind, symmetric, strategy, group);
        of["block_structure"] = block;
        of["scale_dtype"] = self.scale_type();
        if !symmetric {
            of["zp_dtype"] = "torch.int8".into();
        }
        of
    }

    fn scale_type(&self) -> Value {
        match self.form.codes {
            Codes::Nvfp4 => "torch.float8_e4m3fn".into(),
            Codes::Mxfp4 => "torch.uint8".into(),
            Codes::Int { .. } | Codes::Fp8 => Value::Null,
        }
    }

    /// Returns the description of how engines quantise activations; null where they do not.
    fn activations(&self) -> Value {
        let mut of = match (self.name, self.form.extent) {
            (Name::Fp8Dynamic, _) => arguments(8, "float", true, "token", Value::Null),
            (Name::Int8W8A8, _) => arguments(8, "int", true, "token", Value::Null),
            (Name::Fp8Block, Extent::Tile(_, n)) => arguments(8, "float", true, "group", n.into()),
            (Name::Fp8Static, _) => arguments(8, "float", true, "tensor", Value::Null),
            (Name::Nvfp4, _) => arguments(4, "float", true, "tensor_group", 16.into()),
            _ => return Value::Null,
        };
        of["dynamic"] = match self.name {
            Name::Fp8Static => false.into(),
            Name::Nvfp4 => "local".into(),
            _ => true.into(),
        };
        if self.measures_activations() {
            of["observer"] = "static_minmax".into();
        }
        if self.name == Name::Nvfp4 {
            of["scale_dtype"] = self.scale_type();
        }
        of
    }
}

/// The arguments of a quantiser with the rest as compressed-tensors has them by itself.
fn arguments(bits: u32, kind: &str, symmetric: bool, strategy: &str, group: Value) -> Value {
    json!({
        "actorder": null, "block_structure": null, "dynamic": false, "group_size": group, "num_bits": bits,
        "observer": null, "observer_kwargs": {}, "scale_dtype": null, "strategy": strategy, "symmetric": symmetric,
        "type": kind, "zp_dtype": null,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_the_largest_that_divide_every_width() {
        let scheme = |widths: &[usize], size| {
            let widths: Vec<(&str, usize)> = widths.iter().map(|width| ("m.proj", *width)).collect();
            CompressRequest { group_size: size, ..CompressRequest::plain("w4a16") }.scheme(&widths)
        };
        assert_eq!(scheme(&[256, 1024], None).unwrap().form.extent, Extent::Group(128));
        assert_eq!(scheme(&[576, 1536], None).unwrap().form.extent, Extent::Group(64));
        assert_eq!(scheme(&[64, 72], None).unwrap().form.extent, Extent::Group(8));
        assert_eq!(scheme(&[64, 100], Some(-1)).unwrap().form.extent, Extent::Row);
        for (widths, size, what) in [
            (vec![64, 100], None, "`m.proj` has rows of 100 elements, which no group of 8 to 128 divides"),
            (vec![64, 96], Some(64), "--group-size 64: `m.proj` has rows of 96"),
            (vec![64], Some(0), "--group-size 0: expected a number from 1"),
            (vec![64], Some(-2), "--group-size -2: expected"),
        ] {
            let error = scheme(&widths, size).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn options_that_a_scheme_does_not_have_are_refused() {
        for (request, what) in [
            (CompressRequest::plain("w3a16"), "--scheme w3a16: expected one of fp8-dynamic, "),
            (
                CompressRequest { group_size: Some(32), ..CompressRequest::plain("nvfp4a16") },
                "`nvfp4a16` has groups of a fixed size",
            ),
            (
                CompressRequest { asymmetric: true, ..CompressRequest::plain("int8-w8a8") },
                "`int8-w8a8` has no zero points",
            ),
        ] {
            let error = request.name().unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
