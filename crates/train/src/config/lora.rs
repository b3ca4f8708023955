//! Options of low-rank adapters and of the quantised weights below them.

use super::dtype::Dtype;
use options::options;

options! {
    /// Low-rank adapters beside frozen weights.
    pub struct Lora: "LoRA" {
        /// Train adapters instead of the weights. `surogate pt` has `false` as its default.
        lora: bool = true;
        /// Rank of the adapters.
        lora_rank: u32 = 16, min = 1;
        /// Scale of the adapters: their product is multiplied by this over the rank.
        lora_alpha: u32 = 32, min = 1;
        /// Share of an adapter's inputs that is zeroed in training.
        lora_dropout: f64 = 0.05, min = 0, below = 1;
        /// Format of the adapters.
        lora_dtype: Dtype = "float32", pending_words = &["float16"];
        /// Linears that get an adapter: names, patterns, or `all-linear` for every one but the head.
        lora_target_modules: Vec<String> = ["all-linear"];
        /// Also write the model with the adapters added to its weights, to `merged` in `output_dir`.
        merge_adapter: bool = false, resumable;
        /// Folder of an adapter to go on with. Its rank, scale and targets hold.
        adapter: Option<String> = null;
    }
}

options! {
    /// Quantised frozen weights below the adapters. At most one of the three formats, and only with `lora: true`.
    pub struct Qlora: "QLoRA" {
        /// FP4 (NVFP4). Blackwell.
        qlora_fp4: bool = false, pending;
        /// FP8 with a scale for each block.
        qlora_fp8: bool = false, pending;
        /// NF4 as in bitsandbytes.
        qlora_bnb: bool = false, pending;
        /// Size of an FP8 block.
        qlora_block_size: u32 = 128, one_of = &[64, 128, 256], pending;
        /// Size of an NF4 block.
        qlora_bnb_block_size: u32 = 64, one_of = &[64, 128, 256, 512], pending;
        /// Quantise the scales of NF4 blocks too.
        qlora_bnb_double_quant: bool = true, pending;
        /// FP4: try the two largest values 4 and 6 for each block and take the one with the smaller error.
        qlora_four_over_six: bool = true, pending;
    }
}
