//! The arithmetic that a step requires of the model, whatever a program does: what model FLOPs utilization counts.

use compiler::{ModelFlops, PassFlops, model_flops};
use data::{Batch, Patches};

use crate::engine::variant_of;
use crate::input::feed::{seen_share, tokens_of};
use crate::plan::reference;
use crate::trainer::Trainer;
use crate::trainer::in_flight::Fed;

/// The parts of a micro-batch of one shape that are no padding.
struct Parts {
    /// Tokens, as a share of all that the shape has room for.
    tokens: f64,
    /// The share of the pairs of a token and an earlier one of its row that lie in one document.
    seen: f64,
    /// The same as `tokens` of patches, of the pairs of patches of an image, and of a window, relative to causal pairs.
    patches: f64,
    pairs: [f64; 2],
}

impl Trainer {
    /// FLOPs of a step on one rank; none where the model cannot be counted.
    pub(super) fn flops_of(&mut self, fed: &Fed) -> Option<f64> {
        let passes = reference::passes(&self.config, self.plan.reference.as_ref());
        let (mut sum, mut counted, mut all) = (0.0, 0, 0);
        for batch in &fed.batches {
            all += tokens_of(batch);
            // Of a batch of another node only the tokens are known.
            if batch.remote.is_none() {
                counted += tokens_of(batch);
                sum += Parts::of(batch).flops(&self.model_flops(batch, fed.one_per_row)?, passes);
            }
        }
        let ranks = self.config.ranks() * self.config.stages();
        Some(sum * all as f64 / counted.max(1) as f64 / ranks as f64)
    }

    /// FLOPs of the micro-step of a batch's shape.
    fn model_flops(&mut self, batch: &Batch, one_per_row: bool) -> Option<ModelFlops> {
        let variant = variant_of(std::slice::from_ref(batch), one_per_row);
        let engine = self.engine.as_ref()?;
        let count = || model_flops(&self.source.model, engine.options(), &self.device.machine, variant).ok().flatten();
        *self.flops.entry(variant).or_insert_with(count)
    }
}

impl Parts {
    fn of(batch: &Batch) -> Parts {
        let (patches, pairs) = real_patches(&batch.patches);
        let (count, room) = (batch.patches.count().max(1) as f64, batch.batch * batch.seq_len);
        Parts {
            tokens: tokens_of(batch) as f64 / room as f64,
            seen: seen_share(batch),
            patches: patches as f64 / count,
            pairs: pairs.map(|pairs| pairs as f64 / (count * (count + 1.0) / 2.0)),
        }
    }

    /// FLOPs of the micro-step, and of `passes` forward passes more.
    fn flops(&self, of: &ModelFlops, passes: f64) -> f64 {
        let part = |of: &PassFlops, products: f64, attention: f64| {
            products * (of.products + passes * of.forward_products)
                + attention * (of.attention + passes * of.forward_attention)
        };
        let [image, window] = self.pairs;
        part(&of.tokens, self.tokens, self.seen)
            + part(&of.patches, self.patches, image)
            + part(&of.windows, 0.0, window)
    }
}

/// Returns the number of patches of images, and of pairs of them in one image, and in one window.
fn real_patches(of: &Patches) -> (usize, [usize; 2]) {
    let group = of.count() / of.tokens.len().max(1);
    let real: Vec<usize> = (0..of.count()).filter(|patch| of.tokens[patch / group] >= 0).collect();
    let pairs = |[first, last]: &[Vec<i32>; 2]| real.iter().map(|at| (last[*at] - first[*at] + 1) as usize).sum();
    (real.len(), [pairs(&of.picture), pairs(&of.window)])
}

#[cfg(test)]
mod tests {
    use compiler::CompileOptions;
    use data::patches::Form;
    use program::{Documents, Machine, Variant};
    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Config, Task};
    use crate::model::source::ModelSource;
    use crate::plan::Plan;

    const SHAPE: Variant = Variant { batch: 2, seq_len: 128, documents: Documents::Rows, patches: 0 };

    fn of(source: &ModelSource, options: &[&Value]) -> ModelFlops {
        let mut all = json!({"model": "m", "sequence_len": 128});
        options.iter().for_each(|more| all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone()));
        let config = Config::load_json(&all.to_string(), Task::Sft, &[]).unwrap();
        let entries = reference::entries(&config, None);
        let options = CompileOptions { entries, ..Plan::new(&config, source).unwrap().compile };
        model_flops(&source.model, &options, &Machine::h200(), SHAPE).unwrap().unwrap()
    }

    #[test]
    fn the_arithmetic_of_a_model_depends_on_what_is_trained_alone() {
        let (_folder, source) = ModelSource::of_two_layers();
        let layouts = [
            json!({}),
            json!({"gpus": 2, "zero_level": 3}),
            json!({"gpus": 2, "sequence_parallel_size": 2}),
            json!({"gpus": 2, "pipeline_parallel_size": 2}),
            json!({"recipe": "fp8_hybrid"}),
            json!({"recipe": "nvfp4", "fp4_backend": "emulate"}),
            json!({"recompute_att": true, "lmhead_chunks": 2}),
        ];
        for lora in [json!({"lora": false}), json!({"lora": true})] {
            let found: Vec<ModelFlops> = layouts.iter().map(|layout| of(&source, &[&lora, layout])).collect();
            assert!(found.iter().all(|of| *of == found[0]), "{lora}: {found:?}");
            assert_eq!((found[0].patches, found[0].windows), Default::default());
        }
        let [full, adapters] = [false, true].map(|lora| of(&source, &[&json!({"lora": lora, "lora_rank": 16})]).tokens);
        assert_eq!(of(&source, &[&json!({"qlora_bnb": true, "lora_rank": 16})]).tokens, adapters);
        assert_eq!(full.products, 3.0 * full.forward_products);
        assert_eq!(full.attention, 3.0 * full.forward_attention);
        assert_eq!(adapters.forward_attention, full.forward_attention);
        // Frozen weights have no gradients of their own, and nothing before the first layer has any.
        assert!(adapters.products < 2.0 * adapters.forward_products + full.forward_products / 4.0);
        assert!(adapters.products > 1.5 * adapters.forward_products);
    }

    #[test]
    fn a_token_is_multiplied_with_the_experts_that_it_visits() {
        let folder = tempfile::tempdir().unwrap();
        let (hidden, inner, layers, experts, visited, vocabulary) = (256.0, 512.0, 2.0, 8.0, 2.0, 1024.0);
        let fields = json!({
            "model_type": "olmoe", "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512, "num_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
        });
        std::fs::write(folder.path().join("config.json"), fields.to_string()).unwrap();
        let source = ModelSource::open(folder.path(), include_str!("../../tests/ir/olmoe.json")).unwrap();
        let layer: f64 = hidden * (4.0 * hidden + experts + visited * 3.0 * inner);
        let found = of(&source, &[&json!({"lora": false})]).tokens;
        assert_eq!(found.products, 256.0 * 6.0 * (layers * layer + hidden * vocabulary));
        // A token sees half of its row, and itself.
        assert_eq!(found.attention, 256.0 * 6.0 * layers * hidden * 129.0);
        // In codes or not, whether the experts have adapters or not.
        let modules = json!({"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "lora_dropout": 0});
        for targets in [json!({}), json!({"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]})] {
            let plain = of(&source, &[&modules, &targets]);
            for form in [json!({"qlora_bnb": true}), json!({"recipe": "fp8_hybrid"})] {
                assert_eq!(of(&source, &[&modules, &targets, &form]), plain, "{form} {targets}");
            }
        }
    }

    #[test]
    fn patches_of_padding_do_not_count() {
        let form = Form { token: 9, width: 12, side: 2, window: 1, table: 0, stretched: false, breaks: false, pad: 8 };
        let ids = vec![1, 9, 9, 2, 9, 3, 0, 0];
        let labels = [-100, -100, -100, 2, -100, 3, -100, -100];
        let batch = Batch::from_labels(1, 8, ids, &labels, None, None).unwrap();
        let pictures = [[2, 4], [2, 2]].map(data::patches::Picture::blank);
        let batch = Batch { patches: form.lay_out(&batch, &pictures).unwrap(), ..batch };
        assert_eq!((batch.patches.count(), real_patches(&batch.patches)), (64, (12, [8 * 8 + 4 * 4, 12 * 4])));
        let parts = Parts::of(&batch);
        assert_eq!((parts.seen, parts.patches), (1.0, 12.0 / 64.0));
        let one = PassFlops { products: 64.0, attention: 2080.0, forward_products: 32.0, forward_attention: 1040.0 };
        let of = ModelFlops { patches: one, windows: PassFlops { products: 0.0, ..one }, ..Default::default() };
        assert_eq!(parts.flops(&of, 0.0), 12.0 + 80.0 + 48.0);
        assert_eq!(parts.flops(&of, 1.0), 1.5 * parts.flops(&of, 0.0));
    }
}
