//! The arithmetic that training a token requires, independent of what the program does: what model FLOPs utilization (MFU)
//! counts.
//!
//! Reads weights from the program's products and sizes from the model's configuration; knows no operation.

use program::{ArenaKind, Arithmetic, Entry, EntryKind, Instruction, ParameterSlot, Phase, Program, Step, TensorRef};

use crate::source::ModelSource;

/// FLOPs of training one token: 6N when the base weights are trained; 4N + 6·(adapter elements) when they are
/// frozen; plus 6·layers·heads·head_dim·T for causal attention. N are the elements of matrices that tokens are
/// multiplied with: the head counts, looking up an embedding does not, of experts and their adapters as many as a token
/// visits. Recomputing does not count.
pub fn per_token(program: &Program, source: &ModelSource, sequence_len: usize) -> Option<f64> {
    let first = program.entries.iter().position(|entry| entry.kind == EntryKind::FirstMicroStep)?;
    // What a stage hands on, its backward pass does not compute again: both passes together have all products.
    let passes = if program.cluster.stages > 1 { program.passes(first) } else { Vec::new() };
    let mut entry = program.entries[first].clone();
    let others = passes.iter().filter(|pass| **pass != first);
    entry.steps.extend(others.flat_map(|pass| program.entries[*pass].steps.iter().cloned()));
    let entry = &entry;
    let parameters = &program.layout.parameters;
    let experts = Experts::of(program, entry);
    let adapters = parameters.iter().filter(|slot| slot.adapter && !experts.have(slot));
    let adapter = adapters.map(ParameterSlot::elements).sum::<usize>() as f64 + experts.adapters;
    let weights = multiplied(program, entry, &experts) as f64 + experts.base;
    let attention = 6.0 * source.attention_width()? as f64 * sequence_len as f64;
    // Of base weights that are trained alongside an adapter, the gradient's product.
    let read: Vec<&TensorRef> = forward_operands(entry).collect();
    let is_read = |slot: &&ParameterSlot| slot.saved && read.iter().any(|operand| operand.overlaps(&slot.weight));
    let saved: usize = parameters.iter().filter(is_read).map(ParameterSlot::elements).sum();
    let linear = match adapter {
        0.0 => 6.0 * weights,
        _ => 4.0 * weights + 2.0 * saved as f64 + 6.0 * adapter,
    };
    Some(linear + attention)
}

/// The matrices of experts, and how many of their elements a token is multiplied with in the mean.
struct Experts<'a> {
    parameters: Vec<&'a ParameterSlot>,
    base: f64,
    adapters: f64,
}

impl<'a> Experts<'a> {
    /// From the products of groups of the forward pass, which count the rows that were routed.
    fn of(program: &'a Program, entry: &Entry) -> Experts<'a> {
        let tokens = entry.variant.map_or(1, |variant| variant.batch * variant.seq_len) as f64;
        let mut experts = Experts { parameters: Vec::new(), base: 0.0, adapters: 0.0 };
        for (index, step) in entry.steps.iter().enumerate() {
            let Instruction::Launch(launch) = &step.instruction else { continue };
            let is_product = matches!(launch.arithmetic, Arithmetic::Grouped { gradient: false, .. });
            if !is_product || step.provenance.phase != Phase::Forward {
                continue;
            }
            let (columns, result) = (|of: &TensorRef| of.shape[of.shape.len() - 1], &launch.outputs[0]);
            // The factors of a product, and of a second one that is added.
            for factors in [launch.inputs.get(..2), launch.inputs.get(3..5)].into_iter().flatten() {
                let before = experts.parameters.len();
                made_of(program, &entry.steps[..index], &factors[1], &mut experts.parameters);
                let of_adapter = experts.parameters[before..].iter().any(|slot| slot.adapter);
                let visited = (result.len() * columns(&factors[0])) as f64 / tokens;
                *(if of_adapter { &mut experts.adapters } else { &mut experts.base }) += visited;
            }
        }
        experts
    }

    fn have(&self, slot: &ParameterSlot) -> bool {
        self.parameters.iter().any(|of| std::ptr::eq(*of, slot))
    }
}

/// The parameters that a tensor was made of: those that it lies in, or that the steps which wrote it were given, such as
/// the codes of a weight.
fn made_of<'a>(program: &'a Program, before: &[Step], tensor: &TensorRef, found: &mut Vec<&'a ParameterSlot>) {
    let held = program.layout.parameters.iter().filter(|slot| slot.weight.overlaps(tensor));
    let known = found.len();
    found.extend(held);
    let mut missing = if found.len() > known { 0 } else { tensor.span() };
    for (index, step) in before.iter().enumerate().rev() {
        let writes = step.instruction.writes();
        let Some(written) = writes.into_iter().find(|at| missing > 0 && at.overlaps(tensor)) else { continue };
        missing = missing.saturating_sub(written.span());
        for read in step.instruction.reads() {
            made_of(program, &before[..index], read, found);
        }
    }
}

/// Factors of the products of the forward pass.
fn forward_operands(entry: &Entry) -> impl Iterator<Item = &TensorRef> {
    let forward = entry.steps.iter().filter(|step| step.provenance.phase == Phase::Forward);
    forward.flat_map(|step| match &step.instruction {
        Instruction::Gemm(gemm) => vec![&gemm.a, &gemm.b],
        _ => Vec::new(),
    })
}

/// Elements of the base weights, those of experts apart, that products of the forward pass read, each once, whatever they
/// read of them.
fn multiplied(program: &Program, entry: &Entry, experts: &Experts<'_>) -> usize {
    // By arena: each stage has its own.
    let mut spans: Vec<(u32, usize, usize, usize)> = Vec::new();
    let is_weight = |at: &&TensorRef| program.arenas[at.arena.0 as usize].kind == ArenaKind::Weights;
    let operands = forward_operands(entry).filter(is_weight);
    spans.extend(operands.map(|at| (at.arena.0, at.offset, at.offset + at.span(), at.dtype.size())));
    spans.sort_unstable();
    // Products read the values of packed weights, or codes that were prepared from weights, which lie elsewhere.
    let prepares = program.entries.iter().filter(|entry| entry.kind == EntryKind::Prepare);
    let prepared: Vec<&TensorRef> =
        prepares.flat_map(|entry| &entry.steps).flat_map(|step| step.instruction.reads()).collect();
    let is_prepared = |slot: &&ParameterSlot| prepared.iter().any(|read| read.overlaps(&slot.weight));
    let is_elsewhere = |slot: &&ParameterSlot| (slot.packed.is_some() || is_prepared(slot)) && !experts.have(slot);
    let elsewhere = program.layout.parameters.iter().filter(is_elsewhere);
    let (mut elements, mut end) = (elsewhere.map(ParameterSlot::elements).sum(), (0, 0));
    for (arena, from, to, size) in spans {
        let known = if end.0 == arena { end.1 } else { 0 };
        elements += to.saturating_sub(from.max(known)) / size;
        end = (arena, known.max(to));
    }
    elements
}

#[cfg(test)]
mod tests {
    use program::Machine;
    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Config, Task};
    use crate::preview::Preview;

    #[test]
    fn the_arithmetic_of_a_model_does_not_depend_on_stages() {
        let folder = tempfile::tempdir().unwrap();
        let fields = json!({
            "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 8,
            "num_key_value_heads": 4, "intermediate_size": 172, "max_position_embeddings": 512,
        });
        std::fs::write(folder.path().join("config.json"), fields.to_string()).unwrap();
        let mut ir: Value = serde_json::from_str(include_str!("../tests/ir/stories.json")).unwrap();
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
        let source = ModelSource::open(folder.path(), include_str!("../tests/ir/olmoe.json")).unwrap();
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
            let of = |codes: bool| {
                let mut options = json!({
                    "model": "m", "sequence_len": 128, "qlora_bnb": codes, "lora_target_modules": modules,
                    "lora_dropout": 0,
                });
                options.as_object_mut().unwrap().extend(targets.as_object().unwrap().clone());
                of(options, Machine::h200())
            };
            assert_eq!(of(true), of(false), "{targets}");
        }
    }
}
