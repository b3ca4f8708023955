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
}

impl Mix {
    pub const ALL: [Mix; 7] = [
        Mix::All(Encoding::F32),
        Mix::All(Encoding::F16),
        Mix::All(Encoding::BF16),
        Mix::All(Encoding::Q8_0),
        Mix::Q6,
        Mix::Q5M,
        Mix::Q4M,
    ];

    /// `f32`, `f16`, `bf16`, `q8_0`, `q6_k`, `q5_k_m`, `q4_k_m`.
    pub const fn name(self) -> &'static str {
        match self {
            Mix::All(encoding) => encoding.name(),
            Mix::Q4M => "q4_k_m",
            Mix::Q5M => "q5_k_m",
            Mix::Q6 => "q6_k",
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
            Mix::All(Encoding::BF16) => 32,
            Mix::All(_) => panic!("only the kinds of ALL are files"),
        }
    }

    /// True if matrices are quantized, false for floating-point encodings.
    pub const fn is_quantised(self) -> bool {
        !matches!(self, Mix::All(Encoding::F32 | Encoding::F16 | Encoding::BF16))
    }

    /// The encoding of a matrix. `layers`: how many the model has; `has_head`: the output head is a matrix of its own, not
    /// the embedding's.
    pub fn wanted(self, name: &str, layers: usize, has_head: bool) -> Encoding {
        let base = match self {
            Mix::All(encoding) => return encoding,
            Mix::Q6 => return Encoding::Q6_K,
            Mix::Q4M => Encoding::Q4_K,
            Mix::Q5M => Encoding::Q5_K,
        };
        let head = if has_head { "output.weight" } else { "token_embd.weight" };
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        match layer.and_then(|(layer, part)| Some((layer.parse().ok()?, part))) {
            None if name == head => Encoding::Q6_K,
            Some((layer, "attn_v.weight" | "ffn_down.weight")) if is_sensitive(layer, layers) => Encoding::Q6_K,
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

/// The first and the last eighth of the layers, and every third between them.
fn is_sensitive(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixtures_give_more_bits_where_errors_cost_most() {
        let of = |mix: Mix, name: &str| mix.wanted(name, 32, true);
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
        assert_eq!(Mix::Q4M.wanted("token_embd.weight", 32, false), Encoding::Q6_K);
        assert_eq!(of(Mix::Q4M, "blk.5.attn_qkv.weight"), Encoding::Q5_K);
        assert_eq!(of(Mix::Q5M, "blk.5.attn_qkv.weight"), Encoding::Q6_K);
        assert_eq!(of(Mix::Q6, "blk.7.attn_q.weight"), Encoding::Q6_K);
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
        assert_eq!(numbers, [0, 1, 32, 7, 18, 17, 15]);
        assert_eq!(Mix::named("q4_k"), None);
    }
}
