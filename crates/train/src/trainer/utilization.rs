//! The arithmetic that a step requires of the model, whatever a program does: what model FLOPs utilization counts.

use std::ops::Range;
use std::sync::Arc;

use compiler::{Keys, ModelFlops, model_flops};
use data::{Batch, IGNORE, Patches};
use program::Variant;

use crate::engine::variant_of;
use crate::plan::reference;
use crate::trainer::Trainer;
use crate::trainer::in_flight::Fed;

/// The parts of a micro-batch that are no padding.
struct Parts {
    /// Shares of the tokens and of the patches that the shape has room for.
    tokens: f64,
    patches: f64,
    /// The share of tokens with a target.
    logits: f64,
    /// For each token of documents the number of tokens from it on that see it: those of its document, of an answer after a
    /// shared prompt those of the answer.
    seen_by: Vec<usize>,
    /// Pairs of patches of an image, and of a window.
    pairs: [usize; 2],
}

impl Trainer {
    /// FLOPs of a step on one rank; none where the model cannot be counted, or batches of other nodes alone have documents.
    pub(super) fn flops_of(&mut self, fed: &Fed) -> Option<f64> {
        let passes = reference::passes(&self.config, self.plan.reference.as_ref());
        let (mut sum, mut counted, mut elsewhere) = (0.0, 0, 0);
        for batch in &fed.batches {
            // Of a batch of another node only the tokens are known.
            if let Some(tokens) = batch.remote {
                elsewhere += tokens;
                continue;
            }
            let parts = Parts::of(batch);
            counted += parts.seen_by.len();
            sum += parts.flops(&*self.model_flops(batch, fed.one_per_row)?, passes);
        }
        let ranks = self.config.ranks() * self.config.stages();
        (counted > 0).then(|| sum * (counted + elsewhere) as f64 / counted as f64 / ranks as f64)
    }

    /// FLOPs of the micro-step of a batch's shape.
    fn model_flops(&mut self, batch: &Batch, one_per_row: bool) -> Option<Arc<ModelFlops>> {
        // Required are the logits of trained tokens, whatever the program computes.
        let logits = batch.batch * batch.seq_len;
        let variant = Variant { logits, ..variant_of(std::slice::from_ref(batch), one_per_row) };
        let engine = self.engine.as_ref()?;
        let count = || model_flops(&self.source.model, engine.options(), &self.device.machine, variant).ok().flatten();
        self.flops.entry(variant).or_insert_with(|| count().map(Arc::new)).clone()
    }
}

impl Parts {
    fn of(batch: &Batch) -> Parts {
        let (patches, pairs) = real_patches(&batch.patches);
        let last = data::inputs::last_queries(batch);
        let seen_by = documents(batch).into_iter().flat_map(|document| {
            let (row, last) = (document.start / batch.seq_len * batch.seq_len, &last);
            document.clone().map(move |at| (row + last[at] as usize).min(document.end - 1) + 1 - at)
        });
        let seen_by: Vec<usize> = seen_by.collect();
        let room = (batch.batch * batch.seq_len) as f64;
        let tokens = seen_by.len() as f64 / room;
        let logits = batch.trained_tokens() as f64 / room;
        Parts { tokens, logits, patches: patches as f64 / batch.patches.count().max(1) as f64, seen_by, pairs }
    }

    /// FLOPs of the micro-step, and of `passes` forward passes more.
    fn flops(&self, of: &ModelFlops, passes: f64) -> f64 {
        let pairs = |keys: Keys| match keys {
            Keys::Tokens { window } => {
                self.seen_by.iter().map(|queries| (*queries).min(window.unwrap_or(usize::MAX))).sum()
            }
            Keys::Image => self.pairs[0],
            Keys::Window => self.pairs[1],
        };
        let products = [(self.tokens, of.tokens), (self.logits, of.logits), (self.patches, of.patches)];
        let attention = of.pairs.iter().map(|(keys, of)| (pairs(*keys) as f64, *of));
        products.into_iter().chain(attention).map(|(count, of)| count * (of.all + passes * of.forward)).sum()
    }
}

/// The places of the documents of a batch in which something is trained: padding is none.
fn documents(batch: &Batch) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    for (row, starts) in batch.document_start.chunks(batch.seq_len).enumerate() {
        let mut begin = row * batch.seq_len;
        for document in starts.chunk_by(|a, b| a == b) {
            let end = begin + document.len();
            if batch.targets[begin..end].iter().any(|target| *target != IGNORE) {
                found.push(begin..end);
            }
            begin = end;
        }
    }
    found
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
    use compiler::{CompileOptions, Flops};
    use data::patches::Form;
    use data::{Mark, Placed};
    use program::{Documents, Machine};
    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Config, Task};
    use crate::model::source::ModelSource;
    use crate::plan::Plan;

    const SHAPE: Variant = Variant { batch: 2, seq_len: 128, documents: Documents::Rows, patches: 0, logits: 0 };

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
            assert_eq!((found[0].patches, found[0].pairs.len()), (Default::default(), 1));
        }
        let [full, adapters] = [false, true].map(|lora| of(&source, &[&json!({"lora": lora, "lora_rank": 16})]));
        assert_eq!(of(&source, &[&json!({"qlora_bnb": true, "lora_rank": 16})]), adapters);
        // What a larger rank adds takes three passes, but for the first layer's factors of what has no gradient.
        let wide = of(&source, &[&json!({"lora_rank": 32})]).tokens;
        let (all, forward) = (wide.all - adapters.tokens.all, wide.forward - adapters.tokens.forward);
        assert!(all > 2.7 * forward && all < 3.0 * forward, "{all} {forward}");
        let dora = json!({"lora_rank": 16, "lora_dora": true});
        let [with, without] = [0.1, 0.0].map(|dropout| of(&source, &[&dora, &json!({"lora_dropout": dropout})]));
        assert_eq!(with, without);
        assert_eq!(full.tokens.all, 3.0 * full.tokens.forward);
        let [(_, whole), (_, frozen)] = [&full, &adapters].map(|of| of.pairs[0]);
        assert_eq!((whole.all, whole.forward), (3.0 * whole.forward, frozen.forward));
        // Frozen weights have no gradients of their own, and nothing before the first layer has any.
        let (tokens, base) = (adapters.tokens, full.tokens.forward);
        assert!(tokens.all < 2.0 * tokens.forward + base / 4.0 && tokens.all > 1.5 * tokens.forward, "{tokens:?}");
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
        let found = of(&source, &[&json!({"lora": false})]);
        assert_eq!(found.tokens.all, 256.0 * 6.0 * (layers * layer + hidden * vocabulary));
        let of_pair = Flops { all: 12.0 * layers * hidden, forward: 4.0 * layers * hidden };
        assert_eq!(found.pairs, [(Keys::Tokens { window: None }, of_pair)]);
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
        assert_eq!((parts.patches, parts.pairs), (12.0 / 64.0, [80, 48]));
        let one = Flops { all: 64.0, forward: 32.0 };
        let pairs =
            vec![(Keys::Image, Flops { all: 1.0, forward: 0.5 }), (Keys::Window, Flops { all: 2.0, forward: 1.0 })];
        let of = ModelFlops { patches: one, pairs, ..Default::default() };
        assert_eq!(parts.flops(&of, 0.0), 12.0 + 80.0 + 96.0);
        assert_eq!(parts.flops(&of, 1.0), 1.5 * parts.flops(&of, 0.0));
    }

    #[test]
    fn pairs_are_those_inside_of_documents_and_windows() {
        let labels = [1, 1, 1, 1, 1, -100, -100, -100];
        let batch = Batch::from_labels(1, 8, vec![1; 8], &labels, Some(vec![0, 1, 2, 0, 1, 0, 1, 2]), None).unwrap();
        let parts = Parts::of(&batch);
        assert_eq!((parts.tokens, &parts.seen_by[..]), (5.0 / 8.0, &[3, 2, 1, 2, 1][..]));
        let one = Flops { all: 1.0, forward: 1.0 };
        let pairs = |window| {
            let of = ModelFlops { pairs: vec![(Keys::Tokens { window }, one)], ..Default::default() };
            parts.flops(&of, 0.0)
        };
        assert_eq!([None, Some(8), Some(2), Some(1)].map(pairs), [9.0, 9.0, 8.0, 5.0]);
    }

    #[test]
    fn answers_that_share_a_prompt_do_not_see_each_other() {
        // A prompt of two tokens, answers of three and two.
        let labels = [-100, -100, 1, 1, 1, 1, 1, -100];
        let batch = Batch::from_labels(1, 8, vec![1; 8], &labels, Some(vec![0, 1, 2, 3, 4, 5, 6, 0]), None).unwrap();
        let mark = Mark::Pair { chosen: 5, shared: 2, margin: None };
        let batch = Batch { marks: vec![Placed { begin: 0, tokens: 7, mark }], ..batch };
        assert_eq!(Parts::of(&batch).seen_by, [7, 6, 3, 2, 1, 2, 1]);
    }
}
