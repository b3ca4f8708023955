//! The arithmetic that training a token requires, independent of what the program does: what model FLOPs utilization (MFU)
//! counts.
//!
//! Reads weights from the program's products and sizes from the model's configuration; knows no operation.

use std::collections::BTreeSet;

use program::{Arithmetic, EntryKind, Instruction, ParameterSlot, Phase, Program};

use crate::model::source::ModelSource;
use crate::plan::origins::Origins;

/// FLOPs of causal attention for one token of a row, 6·layers·heads·head_dim·T; none where the configuration does not say how
/// wide attention is.
pub fn of_attention(source: &ModelSource, sequence_len: usize) -> Option<f64> {
    Some(6.0 * source.attention_width()? as f64 * sequence_len as f64)
}

/// FLOPs of the weights for one token, the same for rows of any length: 6N when the base weights are trained; 4N + 6·(adapter
/// elements) when they are frozen. N are the elements of matrices that tokens are multiplied with: the head counts, looking
/// up an embedding does not, of experts and their adapters those that a token visits. Recomputing does not count.
pub fn of_weights(program: &Program) -> Option<f64> {
    let first = program.entries.iter().position(|entry| entry.kind == EntryKind::FirstMicroStep)?;
    // What a stage hands on, its backward pass does not compute again: both passes together have all products.
    let passes = if program.cluster.stages > 1 { program.passes(first) } else { Vec::new() };
    let mut entry = program.entries[first].clone();
    let others = passes.iter().filter(|pass| **pass != first);
    entry.steps.extend(others.flat_map(|pass| program.entries[*pass].steps.iter().cloned()));
    let tokens = entry.variant.map_or(1, |variant| variant.batch * variant.seq_len) as f64;
    let mut read = Multiplied::default();
    Origins::new(program).follow(&entry, |number, origins| {
        let step = &entry.steps[number];
        match &step.instruction {
            _ if step.provenance.phase != Phase::Forward => {}
            Instruction::Gemm(gemm) => {
                read.matrices.extend([&gemm.a, &gemm.b].into_iter().filter_map(|factor| origins.of(factor)).flatten());
            }
            Instruction::Launch(launch) if matches!(launch.arithmetic, Arithmetic::Grouped { gradient: false, .. }) => {
                // The factors of a product, and of a second one that is added: after the offsets, and the scales of codes,
                // which are no matrices.
                let has_scales = launch.inputs.get(4).is_some_and(|of| of.shape.len() == 1);
                let after = if has_scales { 5 } else { 3 };
                let second = launch.inputs.get(after..after + 2);
                for factors in [launch.inputs.get(..2), second].into_iter().flatten() {
                    let of = origins.of(&factors[1]).unwrap_or_default();
                    let of_adapter = of.iter().any(|number| program.layout.parameters[*number].adapter);
                    let columns = factors[0].shape[factors[0].shape.len() - 1];
                    let visited = (launch.outputs[0].len() * columns) as f64 / tokens;
                    *(if of_adapter { &mut read.expert_adapters } else { &mut read.expert_elements }) += visited;
                    read.experts.extend(of);
                }
            }
            _ => {}
        }
    });
    Some(read.flops(&program.layout.parameters))
}

/// The parameters that the products of the forward pass read.
#[derive(Default)]
struct Multiplied {
    /// Parameters by their numbers in the layout: those that every token is multiplied with, and those of experts.
    matrices: BTreeSet<usize>,
    experts: BTreeSet<usize>,
    /// Elements of experts, and of their adapters, that a token is multiplied with in the mean.
    expert_elements: f64,
    expert_adapters: f64,
}

impl Multiplied {
    fn flops(&self, parameters: &[ParameterSlot]) -> f64 {
        let sum = |wanted: &dyn Fn(usize, &ParameterSlot) -> bool| -> f64 {
            let slots = parameters.iter().enumerate().filter(|(number, slot)| wanted(*number, slot));
            slots.map(|(_, slot)| slot.elements()).sum::<usize>() as f64
        };
        let adapter = sum(&|number, slot| slot.adapter && !self.experts.contains(&number)) + self.expert_adapters;
        let every = |number: usize| self.matrices.contains(&number) && !self.experts.contains(&number);
        let weights = sum(&|number, slot| !slot.adapter && every(number)) + self.expert_elements;
        // Of base weights that are trained alongside an adapter, the gradient's product.
        let saved = sum(&|number, slot| slot.saved && self.matrices.contains(&number));
        match adapter {
            0.0 => 6.0 * weights,
            _ => 4.0 * weights + 2.0 * saved + 6.0 * adapter,
        }
    }
}

#[cfg(test)]
mod tests {
    use program::Machine;
    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Config, Task};
    use crate::plan::preview::Preview;

    fn per_token(program: &Program, source: &ModelSource, sequence_len: usize) -> Option<f64> {
        Some(of_weights(program)? + of_attention(source, sequence_len)?)
    }

    #[test]
    fn the_arithmetic_of_a_model_does_not_depend_on_stages() {
        let folder = tempfile::tempdir().unwrap();
        let fields = json!({
            "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 8,
            "num_key_value_heads": 4, "intermediate_size": 172, "max_position_embeddings": 512,
        });
        std::fs::write(folder.path().join("config.json"), fields.to_string()).unwrap();
        let mut ir: Value = serde_json::from_str(include_str!("../../tests/ir/stories.json")).unwrap();
        let mut head = ir["parameters"][0].clone();
        head["name"] = json!("lm_head.weight");
        ir["parameters"].as_array_mut().unwrap().push(head);
        ir["body"].as_array_mut().unwrap().last_mut().unwrap()["inputs"][1] = json!("lm_head.weight");
        let source = ModelSource::open(folder.path(), &ir.to_string()).unwrap();
        for lora in [false, true] {
            let of = |stages: usize| {
                let options = json!({
                    "model": "m", "init": "random", "sequence_len": 64, "lora": lora, "gpus": stages,
                    "pipeline_parallel_size": stages,
                });
                let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
                let preview = Preview::new(&config, &source, &Machine::h200(), None).unwrap();
                per_token(&preview.program, &source, 64).unwrap()
            };
            assert_eq!([2, 3, 5].map(of), [of(1); 3], "lora: {lora}");
        }
    }

    #[test]
    fn the_arithmetic_of_a_model_does_not_depend_on_ranks() {
        let (_folder, source) = ModelSource::of_two_layers();
        let full = json!({"lora": false});
        let packed = json!({"lora": true, "qlora_bnb": true});
        for options in [full, json!({"lora": true}), packed] {
            let of = |ranks: Value| {
                let mut all = json!({"model": "m", "sequence_len": 128});
                for more in [&options, &ranks] {
                    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                }
                let config = Config::load_json(&all.to_string(), Task::Sft, &[]).unwrap();
                let preview = Preview::new(&config, &source, &Machine::h200(), None).unwrap();
                per_token(&preview.program, &source, 128).unwrap()
            };
            let one = of(json!({}));
            for level in 1..=3 {
                let found = of(json!({"gpus": 2, "zero_level": level}));
                assert!(one > 0.0 && found == one, "{options}: {one}, and {found} at level {level}");
            }
        }
    }

    #[test]
    fn the_arithmetic_of_a_model_does_not_depend_on_formats() {
        let (_folder, source) = ModelSource::of_two_layers();
        let on = |options: Value, machine: &Machine| {
            let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
            let preview = Preview::new(&config, &source, machine, None).unwrap();
            let codes = preview.program.entries.iter().flat_map(|entry| &entry.steps);
            let codes = codes.filter(|step| matches!(&step.instruction, Instruction::Gemm(of) if of.scales.is_some()));
            (per_token(&preview.program, &source, 128).unwrap(), codes.count())
        };
        let of = |options: Value| on(options, &Machine::h200());
        for lora in [false, true] {
            let [(numbers, none), (codes, some)] = ["bf16", "fp8_hybrid"]
                .map(|recipe| of(json!({"model": "m", "sequence_len": 128, "recipe": recipe, "lora": lora})));
            assert!(
                numbers == codes && numbers > 0.0 && none == 0 && some > 0,
                "{lora}: {numbers} {codes} {none} {some}"
            );
        }
        for lora in [false, true] {
            let of = |more: Value| {
                let mut options = json!({"model": "m", "sequence_len": 128, "lora": lora, "fp4_backend": "emulate"});
                options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                of(options).0
            };
            let four = of(json!({"recipe": "nvfp4", "skip_quant_first_layers": 1}));
            assert_eq!(four, of(json!({"recipe": "bf16", "fp4_backend": "cutlass"})), "{lora}");
        }
        let units = json!({"model": "m", "sequence_len": 128, "recipe": "nvfp4"});
        assert_eq!(
            on(units, &Machine::named("b200").unwrap()).0,
            of(json!({"model": "m", "sequence_len": 128, "recipe": "bf16"})).0
        );
        let both = json!({"model": "m", "sequence_len": 128, "qlora_bnb": true, "recipe": "fp8_hybrid"});
        assert_eq!(of(both).0, of(json!({"model": "m", "sequence_len": 128})).0);
    }

    /// Products read gathered weights, or codes that a layer makes of them.
    #[test]
    fn the_arithmetic_of_a_model_does_not_depend_on_zero_levels() {
        let (_folder, source) = ModelSource::of_two_layers();
        for (recipe, lora) in [("bf16", false), ("bf16", true), ("fp8_hybrid", false), ("fp8_hybrid", true)] {
            let of = |gpus: usize, level: usize| {
                let options = json!({
                    "model": "m", "sequence_len": 128, "recipe": recipe, "lora": lora, "gpus": gpus, "zero_level": level,
                });
                let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
                let preview = Preview::new(&config, &source, &Machine::h200(), None).unwrap();
                per_token(&preview.program, &source, 128).unwrap()
            };
            assert_eq!([of(2, 1), of(2, 2), of(2, 3)], [of(1, 1); 3], "{recipe}, lora: {lora}");
        }
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
        let of = |options: Value, machine: Machine| {
            let config = Config::load_json(&options.to_string(), Task::Sft, &[]).unwrap();
            let preview = Preview::new(&config, &source, &machine, None).unwrap();
            per_token(&preview.program, &source, 128)
        };
        let layer: f64 = hidden * (4.0 * hidden + experts + visited * 3.0 * inner);
        let expected = 6.0 * (layers * layer + hidden * vocabulary) + 6.0 * layers * hidden * 128.0;
        let full = json!({"model": "m", "sequence_len": 128, "lora": false});
        assert_eq!(of(full.clone(), Machine::h200()), Some(expected));
        assert_eq!(of(full, Machine::cpu(64 << 30, 8)), Some(expected));
        // In codes or not, whether the experts have adapters or not.
        let all = ["experts.gate_up_proj", "experts.down_proj"];
        let modules = ["q_proj", "k_proj", "v_proj", "o_proj"];
        for targets in [json!({}), json!({"lora_target_parameters": all})] {
            let of = |form: Value| {
                let mut options = json!({
                    "model": "m", "sequence_len": 128, "lora_target_modules": modules, "lora_dropout": 0,
                });
                for of in [&form, &targets] {
                    options.as_object_mut().unwrap().extend(of.as_object().unwrap().clone());
                }
                of(options, Machine::h200())
            };
            for form in [
                json!({"qlora_bnb": true}),
                json!({"recipe": "fp8_hybrid"}),
                json!({"recipe": "nvfp4", "fp4_backend": "emulate"}),
            ] {
                assert_eq!(of(form.clone()), of(json!({})), "{form} {targets}");
            }
        }
    }
}
