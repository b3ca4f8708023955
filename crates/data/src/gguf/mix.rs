//! Encodings of a file's matrices: one for all, or a mixture that gives more bits to the tensors whose errors cost
//! most, as llama.cpp mixes them. Knows the names that the format gives tensors.

use super::Encoding;

/// The rule that gives each matrix of a file its encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// The same encoding for every matrix.
    All(Encoding),
    /// `Q4_K`, and `Q6_K` for the head, half of the values and half of the projections out of the feed-forward part.
    Q4M,
    /// The same with `Q5_K`.
    Q5M,
    /// `Q6_K`.
    Q6,
    /// `MXFP4` for stacks of experts, `Q8_0` for the other matrices.
    Mxfp4,
}

impl Mix {
    pub const ALL: [Mix; 8] = [
        Mix::All(Encoding::F32),
        Mix::All(Encoding::F16),
        Mix::All(Encoding::BF16),
        Mix::All(Encoding::Q8_0),
        Mix::Q6,
        Mix::Q5M,
        Mix::Q4M,
        Mix::Mxfp4,
    ];

    /// `f32`, `f16`, `bf16`, `q8_0`, `q6_k`, `q5_k_m`, `q4_k_m`, `mxfp4`.
    pub const fn name(self) -> &'static str {
        match self {
            Mix::All(encoding) => encoding.name(),
            Mix::Q4M => "q4_k_m",
            Mix::Q5M => "q5_k_m",
            Mix::Q6 => "q6_k",
            Mix::Mxfp4 => "mxfp4",
        }
    }

    pub fn named(name: &str) -> Option<Mix> {
        Mix::ALL.into_iter().find(|mix| mix.name() == name)
    }

    /// The format's number for such a file.
    ///
    /// # Panics
    /// For an encoding that no kind of file has for all matrices.
    pub const fn file_type(self) -> u32 {
        match self {
            Mix::All(Encoding::F32) => 0,
            Mix::All(Encoding::F16) => 1,
            Mix::All(Encoding::Q8_0) => 7,
            Mix::Q4M => 15,
            Mix::Q5M => 17,
            Mix::Q6 => 18,
            Mix::Mxfp4 => 38,
            Mix::All(Encoding::BF16) => 32,
            Mix::All(_) => panic!("only the kinds of ALL are files"),
        }
    }

    /// True if matrices are quantized, false for floating-point encodings.
    pub const fn is_quantised(self) -> bool {
        match self {
            Mix::All(encoding) => encoding.is_quantised(),
            _ => true,
        }
    }

    /// The encoding of a tensor of two or more axes.
    pub fn wanted(self, name: &str, rules: &Rules) -> Encoding {
        if is_exact(name) {
            return Encoding::F32;
        }
        let base = match self {
            Mix::All(encoding) if !encoding.is_quantised() => return encoding,
            // As llama.cpp keeps it: it is small, and every layer's embedding comes through it.
            _ if name == "per_layer_model_proj.weight" => return Encoding::BF16,
            Mix::All(encoding) => return encoding,
            Mix::Q6 => return Encoding::Q6_K,
            Mix::Mxfp4 if name.ends_with("_exps.weight") => return Encoding::MXFP4,
            Mix::Mxfp4 => return Encoding::Q8_0,
            Mix::Q4M => Encoding::Q4_K,
            Mix::Q5M => Encoding::Q5_K,
        };
        let head = if rules.has_head { "output.weight" } else { "token_embd.weight" };
        // Of the few experts of a model of eight, these matrices are small, and all tokens go through them.
        let eight = rules.experts == 8;
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        match layer.and_then(|(layer, part)| Some((layer.parse::<usize>().ok()?, part))) {
            None if name == head => Encoding::Q6_K,
            Some((_, "attn_v.weight" | "attn_k.weight")) if eight => Encoding::Q8_0,
            Some((layer, "attn_v.weight")) if rules.is_sensitive_value(layer) => Encoding::Q6_K,
            Some((layer, part)) if part.starts_with("ffn_down") && is_sensitive(layer, rules.layers) => Encoding::Q6_K,
            Some((_, "attn_output.weight")) if eight && self == Mix::Q4M => Encoding::Q5_K,
            Some((_, "attn_qkv.weight")) if self == Mix::Q4M => Encoding::Q5_K,
            Some((_, "attn_qkv.weight")) => Encoding::Q6_K,
            _ => base,
        }
    }

    /// The encoding for rows of a length that the wanted one may not divide: the next larger one that does.
    pub fn fitting(wanted: Encoding, row: usize) -> Encoding {
        let larger = match wanted {
            Encoding::Q4_K => Encoding::Q5_0,
            Encoding::Q5_K => Encoding::Q5_1,
            Encoding::Q6_K => Encoding::Q8_0,
            other => other,
        };
        let fits = |encoding: &Encoding| row.is_multiple_of(encoding.block());
        [wanted, larger].into_iter().find(fits).unwrap_or(Encoding::F16)
    }
}

/// The facts about all tensors of a file that the encoding of one depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    layers: usize,
    /// The output head is a matrix of its own, not the embedding's.
    has_head: bool,
    /// Experts of a layer that has some; zero without.
    experts: usize,
    /// Layers with a matrix of values, in order.
    values: Vec<usize>,
}

impl Rules {
    /// The facts about tensors with these names and shapes.
    pub fn of<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Rules {
        let mut rules = Rules::default();
        for (name, shape) in tensors {
            rules.has_head |= name == "output.weight";
            let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else { continue };
            let Ok(layer) = layer.parse::<usize>() else { continue };
            rules.layers = rules.layers.max(layer + 1);
            match part {
                "ffn_down_exps.weight" => rules.experts = shape[0],
                "attn_v.weight" => rules.values.push(layer),
                _ => {}
            }
        }
        rules.values.sort_unstable();
        rules
    }

    fn is_sensitive_value(&self, layer: usize) -> bool {
        let place = self.values.iter().position(|other| *other == layer);
        place.is_some_and(|place| is_sensitive(place, self.values.len()))
    }
}

/// True for tensors that readers take as f32 alone, or that are too small and too sensitive for less: norms, biases, routers,
/// convolutions, what decays states, tables of positions.
fn is_exact(name: &str) -> bool {
    let part = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, part)| part);
    let Some(stem) = part.strip_suffix(".weight") else { return true };
    stem.ends_with("_norm")
        || ["ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "shortconv.conv", "position_embd"].contains(&stem)
}

/// The first and the last eighth of the layers, and every third between them.
fn is_sensitive(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rules of a file of 32 layers with these tensors of each.
    fn rules(head: bool, parts: &[(&str, usize)]) -> Rules {
        let mut tensors: Vec<(String, [usize; 1])> = Vec::new();
        for layer in 0..32 {
            tensors.extend(parts.iter().map(|(part, extent)| (format!("blk.{layer}.{part}.weight"), [*extent])));
        }
        tensors.extend(head.then(|| ("output.weight".to_owned(), [1])));
        Rules::of(tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())))
    }

    #[test]
    fn mixtures_give_more_bits_where_errors_cost_most() {
        let dense = rules(true, &[("attn_v", 1), ("ffn_down", 1)]);
        let of = |mix: Mix, name: &str| mix.wanted(name, &dense);
        let downs: Vec<usize> =
            (0..32).filter(|i| of(Mix::Q4M, &format!("blk.{i}.ffn_down.weight")) == Encoding::Q6_K).collect();
        assert_eq!(downs, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
        assert_eq!(of(Mix::Q4M, "blk.6.attn_v.weight"), Encoding::Q6_K);
        assert_eq!(of(Mix::Q4M, "blk.7.attn_v.weight"), Encoding::Q4_K);
        assert_eq!(of(Mix::Q5M, "blk.7.ffn_up.weight"), Encoding::Q5_K);
        assert_eq!(
            (of(Mix::Q4M, "output.weight"), of(Mix::Q4M, "token_embd.weight")),
            (Encoding::Q6_K, Encoding::Q4_K)
        );
        let tied = rules(false, &[("attn_v", 1)]);
        assert_eq!(Mix::Q4M.wanted("token_embd.weight", &tied), Encoding::Q6_K);
        assert_eq!(of(Mix::Q4M, "blk.5.attn_qkv.weight"), Encoding::Q5_K);
        assert_eq!(of(Mix::Q5M, "blk.5.attn_qkv.weight"), Encoding::Q6_K);
        assert_eq!(of(Mix::Q6, "blk.7.attn_q.weight"), Encoding::Q6_K);
    }

    #[test]
    fn stacks_of_experts_are_encoded_as_the_layers_that_they_stand_for() {
        let many = rules(true, &[("attn_v", 1), ("ffn_down_exps", 64)]);
        let of = |name: &str| Mix::Q4M.wanted(name, &many);
        assert_eq!(
            (of("blk.6.ffn_down_exps.weight"), of("blk.7.ffn_down_exps.weight")),
            (Encoding::Q6_K, Encoding::Q4_K)
        );
        assert_eq!(of("blk.6.ffn_down_shexp.weight"), Encoding::Q6_K);
        assert_eq!(of("blk.7.attn_k.weight"), Encoding::Q4_K);
        let eight = rules(true, &[("attn_v", 1), ("ffn_down_exps", 8)]);
        let of = |mix: Mix, name: &str| mix.wanted(name, &eight);
        assert_eq!(of(Mix::Q4M, "blk.7.attn_k.weight"), Encoding::Q8_0);
        assert_eq!(of(Mix::Q5M, "blk.7.attn_v.weight"), Encoding::Q8_0);
        assert_eq!(of(Mix::Q4M, "blk.7.attn_output.weight"), Encoding::Q5_K);
        assert_eq!(of(Mix::Q5M, "blk.7.attn_output.weight"), Encoding::Q5_K);
    }

    #[test]
    fn experts_alone_are_in_floating_point_codes() {
        let rules = rules(true, &[("ffn_down_exps", 8)]);
        let of = |name: &str| Mix::Mxfp4.wanted(name, &rules);
        assert_eq!((of("blk.0.ffn_up_exps.weight"), of("blk.0.attn_q.weight")), (Encoding::MXFP4, Encoding::Q8_0));
        assert_eq!((of("output.weight"), of("blk.0.ffn_gate_inp.weight")), (Encoding::Q8_0, Encoding::F32));
    }

    #[test]
    fn values_of_models_without_attention_in_every_layer_are_counted_by_themselves() {
        let tensors = [3, 7, 11, 15, 19, 23, 27, 31].map(|layer| format!("blk.{layer}.attn_v.weight"));
        let hybrid = Rules::of(tensors.iter().map(|name| (name.as_str(), [1usize].as_slice())));
        let more = tensors.iter().map(|name| Mix::Q4M.wanted(name, &hybrid) == Encoding::Q6_K).collect::<Vec<_>>();
        assert_eq!(more, [true, false, false, true, false, false, true, true]);
    }

    #[test]
    fn small_sensitive_tensors_are_kept_exact() {
        let rules = rules(true, &[]);
        for name in [
            "position_embd.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.0.ssm_conv1d.weight",
            "blk.0.ssm_norm.weight",
            "blk.0.ssm_a",
            "blk.0.ffn_down_exps.bias",
        ] {
            assert_eq!(Mix::All(Encoding::BF16).wanted(name, &rules), Encoding::F32, "{name}");
            assert_eq!(Mix::Q4M.wanted(name, &rules), Encoding::F32, "{name}");
        }
        let of = |mix: Mix| mix.wanted("per_layer_model_proj.weight", &rules);
        assert_eq!((of(Mix::Q4M), of(Mix::All(Encoding::F16))), (Encoding::BF16, Encoding::F16));
        assert_eq!(Mix::All(Encoding::F16).wanted("blk.0.ffn_gate_exps.weight", &rules), Encoding::F16);
    }

    #[test]
    fn rows_that_are_no_whole_blocks_take_the_next_larger_encoding() {
        let rows = |wanted| [512, 96, 30].map(|row| Mix::fitting(wanted, row));
        assert_eq!(rows(Encoding::Q4_K), [Encoding::Q4_K, Encoding::Q5_0, Encoding::F16]);
        assert_eq!(rows(Encoding::Q5_K), [Encoding::Q5_K, Encoding::Q5_1, Encoding::F16]);
        assert_eq!(rows(Encoding::Q6_K), [Encoding::Q6_K, Encoding::Q8_0, Encoding::F16]);
        assert_eq!(rows(Encoding::Q8_0), [Encoding::Q8_0, Encoding::Q8_0, Encoding::F16]);
        assert_eq!(rows(Encoding::BF16), [Encoding::BF16; 3]);
    }

    #[test]
    fn kinds_of_files_have_names_and_numbers() {
        for mix in Mix::ALL {
            assert_eq!(Mix::named(mix.name()), Some(mix));
        }
        let numbers = Mix::ALL.map(Mix::file_type);
        assert_eq!(numbers, [0, 1, 32, 7, 18, 17, 15, 38]);
        assert_eq!(Mix::named("q4_k"), None);
    }
}
