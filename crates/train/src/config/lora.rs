//! Options of low-rank adapters and of the quantized weights under them.

use options::{Setting, options};

use super::dtype::Dtype;
use super::precision::Recipe;

options! {
    /// Low-rank adapters on frozen weights.
    pub struct Lora: "LoRA" {
        /// Train adapters instead of the weights. `surogate pt` has `false` as its default.
        lora: bool = true;
        /// Rank of the adapters.
        lora_rank: u32 = 16, min = 1, max = 262144;
        /// Scale of the adapters: their output is multiplied by alpha divided by rank.
        lora_alpha: u32 = 32, min = 1, max = 16777216;
        /// rsLoRA: divide alpha by the square root of the rank instead of the rank, so that a higher rank does not make
        /// the steps of the adapters smaller.
        lora_rslora: bool = false;
        /// LoRA+: learning rate of the second matrices (B) of the adapters, as a multiple of that of the first ones. 16 is
        /// a common value. Null trains both at `learning_rate`.
        loraplus_lr_ratio: Option<f64> = null, above = 0;
        /// Dropout probability of the adapters' inputs. `auto` is 0.05, and 0 if parameters get adapters, which as in PEFT have
        /// none: with `all-linear` those of most mixtures of experts.
        lora_dropout: Setting<f64> = auto, min = 0, below = 1;
        /// Element type of the adapters.
        lora_dtype: Dtype = "float32";
        /// Linear layers that get an adapter: names, patterns, or `all-linear` for all except the LM head. For mixtures
        /// of experts, PEFT's rules apply: if experts were modules before transformers 5, `all-linear` and their names
        /// select their parameters.
        lora_target_modules: Vec<String> = ["all-linear"];
        /// Parameters that get an adapter, by the ends of their names, as in PEFT's `target_parameters`: expert
        /// matrices, such as `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`, and routers, such as
        /// `gate.weight`. `lora_dropout` must be 0 or `auto`.
        lora_target_parameters: Vec<String> = [];
        /// Train the routers of mixtures of experts in full alongside the adapters, as `modules_to_save` does.
        train_router: bool = false;
        /// Train the vision tower in full, on data with images: alongside the adapters, as `modules_to_save` does, or with the
        /// text. `auto` is false with `lora: true`, else true.
        train_vision: Setting<bool> = auto;
        /// Train the projector in full, the part that makes tokens of what the vision tower gives, as `train_vision` does.
        train_projector: Setting<bool> = auto;
        /// DoRA: also train a magnitude for each output of an adapted linear layer, to which its adapted weights are
        /// scaled. With `lora_dropout`, each adapted layer is multiplied twice.
        lora_dora: bool = false;
        /// Modules that are trained in full alongside the adapters, and saved with them, as PEFT does: all modules
        /// whose names end with one of these, such as `embed_tokens`, `lm_head`, `norm`. They keep `torch_dtype`.
        modules_to_save: Vec<String> = [];
        /// Also write the merged model to `merged` in `output_dir`.
        merge_adapter: bool = false, resumable;
        /// Folder of an adapter to continue training. Its rank, scale and targets apply.
        adapter: Option<String> = null, path;
    }
}

options! {
    /// Quantized frozen weights under the adapters: the linears of the layers, each tensor by itself, quantized while they are
    /// loaded. Embedding, LM head and norms keep their format. At most one of the three formats, and only with
    /// `lora: true`. On any device: products read the dequantized values.
    pub struct Qlora: "QLoRA" {
        /// FP4 (NVFP4): E2M1 in blocks of 16 elements of a row; with `recipe: nvfp4` in the tiles of 16 by 16 that the recipe
        /// makes of weights, so that nothing is rounded twice. A weight whose rows are not a multiple of 16 keeps its
        /// format.
        qlora_fp4: bool = false;
        /// FP8: E4M3 in square tiles whose scales are powers of two.
        qlora_fp8: bool = false;
        /// NF4 as in bitsandbytes.
        qlora_bnb: bool = false;
        /// Rows and columns of a tile of FP8.
        qlora_block_size: u32 = 128, one_of = &[64, 128, 256];
        /// Block size of NF4.
        qlora_bnb_block_size: u32 = 64, one_of = &[64, 128, 256, 512];
        /// Quantize the scales of NF4 blocks too.
        qlora_bnb_double_quant: bool = true;
        /// FP4: for each block, try both 4 and 6 as the largest value and keep the one with the smaller error. `auto` is
        /// true, but with `recipe: nvfp4` false: the largest value of its tiles is 6, and `true` is an error.
        qlora_four_over_six: Setting<bool> = auto;
    }
}

impl Qlora {
    /// True if blocks of FP4 choose between the largest values 4 and 6.
    pub fn chooses_four(&self, recipe: Recipe) -> bool {
        self.qlora_four_over_six.unwrap_or_else(|| recipe != Recipe::Nvfp4)
    }
}
