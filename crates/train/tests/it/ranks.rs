//! Training on several ranks is training on one: the same losses and norms for every number of ranks, the same bits for
//! one and for the same number twice, and checkpoints that any number goes on from. With `SUROGATE_TEST_DEVICE=cuda` they are
//! on GPUs, or on one that they share (`SUROGATE_ONE_GPU=1`).

use std::path::Path;
use std::sync::Arc;

use crate::stories::{self, Lines, assert_close, events, in_turn, losses, names, root, source};
use compiler::{Blocks, Compression};
use data::Batch;
use data::safetensors::Weights;
use program::Machine;
use serde_json::{Value, json};
use train::config::{Config, GradientCompression, Task};
use train::{Device, DeviceRequest, Outcome, Preview, Trainer};

/// A multiple of every number of ranks.
const ROWS: usize = 24;
const LENGTH: usize = 12;
/// A difference in the first update shows in all later losses.
const STEPS: usize = 6;

fn merged(mut base: Value, more: &Value) -> Value {
    let (object, more) = (base.as_object_mut().unwrap(), more.as_object().unwrap());
    object.extend(more.iter().map(|(name, value)| (name.clone(), value.clone())));
    base
}

/// A trainer of `ranks` ranks on the CPU, whose gradients are exchanged in buckets of 64 KiB.
fn trainer(ranks: usize, more: &Value) -> Trainer {
    try_trainer(ranks, more).unwrap()
}

fn config(ranks: usize, more: &Value) -> Config {
    let model = root().join("examples/stories/model");
    let options = json!({
        "model": model, "lora": false, "optimizer": "adamw", "learning_rate": 1e-3, "device": stories::device_name(),
        "gpus": ranks,
        "torch_dtype": "float32",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS / ranks,
    });
    Config::load_json(&merged(options, more).to_string(), Task::Sft, &[]).unwrap()
}

fn try_trainer(ranks: usize, more: &Value) -> train::Result<Trainer> {
    let config = config(ranks, more);
    let request = DeviceRequest { threads: Some(2), ..DeviceRequest::of(&config, Vec::new()) };
    let mut trainer = Trainer::begin(Arc::new(config), source(), Arc::new(Device::open(&request).unwrap()))?;
    trainer.plan.compile.sharding.bucket_bytes = Some(64 << 10);
    Ok(trainer)
}

/// The rows for a step as micro-batches of one, some labels untrained so that ranks weigh differently; a row of
/// `packed` holds two documents.
fn rows(step: usize, packed: bool) -> Vec<Batch> {
    let number = |i: usize| (step * 7919 + i * 104_729) % 509;
    let row = |row: usize| {
        let ids: Vec<i32> = (0..LENGTH).map(|i| 3 + number(row * LENGTH + i) as i32).collect();
        let untrained = |i: usize| (row + i).is_multiple_of(3) && row > 2 || row == 6;
        let labels: Vec<i32> = (0..LENGTH).map(|i| if untrained(i) { -100 } else { ids[i] }).collect();
        let weights: Vec<f32> = (0..LENGTH).map(|i| 0.5 + (i % 4) as f32 * 0.25).collect();
        let begins = if packed { 4 + row % 3 } else { LENGTH };
        let positions = (0..LENGTH).map(|i| (if i < begins { i } else { i - begins }) as i32).collect();
        Batch::from_labels(1, LENGTH, ids, &labels, Some(positions), Some(&weights)).unwrap()
    };
    (0..ROWS).map(row).collect()
}

fn curve_of(trainer: &mut Trainer, steps: std::ops::Range<usize>, packed: bool) -> Vec<(f64, f64)> {
    let step = |step: usize| {
        let metrics = trainer.step(&rows(step, packed), Some(1e-3)).unwrap();
        (metrics.loss, metrics.grad_norm)
    };
    steps.map(step).collect()
}

fn curve(ranks: usize, steps: usize, packed: bool, more: &Value) -> Vec<(f64, f64)> {
    curve_of(&mut trainer(ranks, more), 0..steps, packed)
}

#[track_caller]
fn assert_same(found: &[(f64, f64)], expected: &[(f64, f64)], what: &str) {
    assert_close(found, expected, 1e-5, what);
}

/// The curve of one device on several ranks, of alternating numbers; the same bits when run again.
#[track_caller]
fn agree(turn: usize, packed: bool, more: &Value) {
    agree_within(1e-5, turn, packed, more);
}

#[track_caller]
fn agree_within(most: f64, turn: usize, packed: bool, more: &Value) {
    let alone = curve(1, STEPS, packed, more);
    for ranks in in_turn(&[2, 3, 4, 8], turn) {
        let found = curve(ranks, STEPS, packed, more);
        assert_close(&found, &alone, most, &format!("{ranks} ranks, {more}"));
        if ranks == 3 {
            assert_eq!(curve(ranks, STEPS, packed, more), found, "run again");
        }
    }
}

#[test]
fn full_training_is_the_same_on_any_number_of_ranks() {
    let alone = curve(1, 20, false, &json!({}));
    assert!(alone[19].0 < alone[0].0, "{alone:?}");
    for ranks in [2, 3, 4, 8] {
        assert_same(&curve(ranks, 20, false, &json!({})), &alone, &format!("{ranks} ranks"));
    }
}

#[test]
fn packed_rows_are_the_same_on_any_number_of_ranks() {
    agree(1, true, &json!({"max_grad_norm": 0.05}));
}

#[test]
fn adapters_with_dropout_are_the_same_on_any_number_of_ranks() {
    agree(2, true, &json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2}));
}

#[test]
fn modules_trained_in_full_are_the_same_on_any_number_of_ranks() {
    let more = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.0, "modules_to_save": ["embed_tokens", "norm"]});
    agree(3, true, &more);
    agree(4, true, &merged(more, &json!({"zero_level": 3})));
}

#[test]
fn magnitudes_of_dora_are_the_same_on_any_number_of_ranks() {
    let more = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "lora_dora": true, "learning_rate": 1e-2});
    agree(5, true, &more);
    agree(6, true, &merged(more, &json!({"zero_level": 3, "lora_dropout": 0.0})));
}

#[test]
fn noise_on_embeddings_is_the_same_on_any_number_of_ranks() {
    agree(7, true, &json!({"neftune_noise_alpha": 5.0}));
}

#[test]
fn matrices_under_normuon_are_the_same_on_any_number_of_ranks() {
    agree(8, false, &json!({"optimizer": "normuon"}));
}

/// Codes of eight bits make a difference of the last bit one of a code, now and then.
#[test]
fn quantized_states_are_close_on_any_number_of_ranks() {
    agree_within(2e-4, 0, true, &json!({"optimizer": "adamw_8bit"}));
}

/// ZeRO levels 2 and 3 on all numbers of ranks: one device's curve, each other's bits, the same when run again.
#[test]
fn gradients_and_weights_may_be_cut() {
    let adapters = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2});
    let cases = [json!({"max_grad_norm": 0.05}), json!({"optimizer": "normuon", "recompute_block": true}), adapters];
    for (turn, more) in cases.into_iter().enumerate() {
        let alone = curve(1, STEPS, true, &more);
        for ranks in in_turn(&[2, 3, 4, 8], turn) {
            let level = |level: usize| curve(ranks, STEPS, true, &merged(more.clone(), &json!({"zero_level": level})));
            let found = level(3);
            assert_same(&found, &alone, &format!("{ranks} ranks, {more}"));
            if ranks < 4 {
                assert_eq!(level(2), found, "{ranks} ranks, {more}: levels 2 and 3");
            }
            if ranks == 2 {
                assert_eq!(level(3), found, "run again");
            }
        }
    }
}

/// Each alone, next to what else may lie elsewhere or in another type.
#[test]
fn what_is_cut_goes_with_other_options() {
    let quantised = json!({"lora": true, "qlora_bnb": true, "lora_dropout": 0.0});
    for (more, most) in [
        (json!({"shard_gradients": true}), 1e-5),
        (json!({"shard_weights": true}), 1e-5),
        (json!({"zero_level": 3, "optimizer": "adamw_8bit"}), 1e-4),
        (merged(quantised, &json!({"zero_level": 3})), 1e-5),
        // Magnitudes are the largest of all ranks, so that all quantise alike, with the powers of two of one device.
        (json!({"zero_level": 2, "recipe": "fp8_hybrid"}), 2e-2),
        // Small matrices have f32 states, so not all of a group are merged.
        (json!({"zero_level": 2, "recipe": "fp8_hybrid", "optimizer": "adamw_8bit"}), 2e-2),
        (json!({"zero_level": 2, "recipe": "nvfp4", "fp4_backend": "emulate", "optimizer": "adamw_8bit"}), 5e-2),
        (json!({"recipe": "fp8_hybrid", "lora": true, "fp8_amax_history": 2}), 2e-2),
        (json!({"zero_level": 2, "recipe": "nvfp4", "fp4_backend": "emulate"}), 5e-2),
        (json!({"zero_level": 3, "torch_dtype": "float16", "master_dtype": "float32"}), 5e-3),
        (json!({"zero_level": 2, "torch_dtype": "bfloat16", "master_dtype": "float32"}), 5e-3),
    ] {
        let alone = curve(1, 4, true, &more);
        assert_close(&curve(3, 4, true, &more), &alone, most, &more.to_string());
    }
}

/// The share of values that became 0 in 8 bits is that of the micro-batches of all ranks.
#[test]
fn ranks_count_together_what_becomes_zero() {
    let of = |ranks: usize| {
        let mut trainer = trainer(ranks, &json!({"recipe": "fp8_hybrid"}));
        let said = (0..2).map(|step| trainer.step(&rows(step, true), Some(0.0)).unwrap().fp8_flushed);
        said.collect::<Vec<_>>()
    };
    let alone = of(1);
    assert!(alone[0].as_ref().is_some_and(|of| of.share > 0.0) && alone[1].is_none(), "{alone:?}");
    for ranks in [2, 3] {
        assert_eq!(of(ranks), alone, "{ranks} ranks");
    }
}

/// Options of runs whose weights are cut and have codes: a recipe with every kind of training, and how far its curves are
/// from those of one rank.
fn runs_in_codes() -> [(Vec<Value>, f64); 2] {
    let fp8 = json!({"recipe": "fp8_hybrid", "fp8_amax_history": 2, "recompute_block": true});
    let fp4 = json!({"recipe": "nvfp4", "fp4_backend": "emulate", "skip_quant_last_layers": 1});
    let adapters = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2});
    let bf16 = json!({"torch_dtype": "bfloat16", "master_dtype": "float32", "recompute_block": false});
    [(fp8, "qlora_fp8", 2e-2), (fp4, "qlora_fp4", 5e-2)].map(|(recipe, form, most)| {
        let packed = merged(adapters.clone(), &json!({form: true}));
        let kinds = [json!({"max_grad_norm": 0.05}), adapters.clone(), packed, bf16.clone()];
        (kinds.iter().map(|kind| merged(recipe.clone(), kind)).collect(), most)
    })
}

/// Codes of weights that are cut are made in the layers that read them: they have the bits of codes that are whole on every
/// rank.
#[test]
fn codes_of_cut_weights_are_those_of_whole_ones() {
    for (kinds, most) in runs_in_codes() {
        for (turn, more) in kinds.iter().enumerate() {
            for ranks in in_turn(&[2, 3], turn) {
                let of = |sharding: Value| curve(ranks, 4, true, &merged(more.clone(), &sharding));
                let what = format!("{ranks} ranks, {more}");
                let cut = of(json!({"zero_level": 3}));
                assert_eq!(of(json!({"zero_level": 2})), cut, "{what}: levels 2 and 3");
                assert_eq!(of(json!({"shard_weights": true})), of(json!({"zero_level": 1})), "{what}: weights alone");
                assert_close(&cut, &curve(1, 4, true, more), most, &what);
            }
        }
    }
}

/// A checkpoint of cut weights in codes goes on at another level.
#[test]
fn runs_in_codes_go_on_at_another_level() {
    for (turn, (kinds, most)) in runs_in_codes().into_iter().enumerate() {
        for more in in_turn(&kinds, 1 + 2 * turn) {
            let at = |level: usize| trainer(2, &merged(more.clone(), &json!({"zero_level": level})));
            let place = tempfile::tempdir().unwrap();
            let straight = curve_of(&mut at(3), 0..6, true);
            let mut found = Vec::new();
            for (number, level) in [3, 2, 3].into_iter().enumerate() {
                let mut trainer = at(level);
                if number > 0 {
                    trainer.resume(&place.path().join(format!("checkpoint-{}", 2 * number))).unwrap();
                }
                found.extend(curve_of(&mut trainer, 2 * number..2 * number + 2, true));
                trainer.save(&place.path().join(format!("checkpoint-{}", 2 * number + 2))).unwrap();
            }
            assert_eq!(found, straight, "{more}: from level 3 to 2 to 3");
            // Level 1 adds up gradients in another order.
            let mut whole = at(1);
            whole.resume(&place.path().join("checkpoint-4")).unwrap();
            assert_close(&curve_of(&mut whole, 4..6, true), &straight[4..], most, &format!("{more}: at level 1"));
        }
    }
}

/// Weights in bf16, rounded stochastically or from copies: rounding lets curves part, but not far.
#[test]
fn rounded_weights_stay_close() {
    for (more, most) in
        [(json!({}), 2e-3), (json!({"master_dtype": "float32"}), 2e-3), (json!({"optimizer": "normuon"}), 1e-2)]
    {
        let more = merged(json!({"torch_dtype": "bfloat16"}), &more);
        let alone = curve(1, 6, true, &more);
        for ranks in [2, 3] {
            let found = curve(ranks, 6, true, &more);
            for (step, (found, expected)) in found.iter().zip(&alone).enumerate() {
                let far = (found.0 / expected.0 - 1.0).abs();
                assert!(far < most, "{ranks} ranks, {more}, step {step}: {found:?} instead of {expected:?}");
            }
            assert_eq!(curve(ranks, 6, true, &more), found, "run again");
        }
    }
}

/// Shards of each node: one device's curve, whatever the nodes and the level, the same bits of levels 2 and 3 and when run
/// again.
#[test]
fn nodes_may_share_inside() {
    let adapters = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2});
    let of = |ranks: usize, nodes: usize, steps: usize, more: &Value| {
        let mut trainer = trainer(ranks, more);
        trainer.plan.compile.sharding.nodes = nodes;
        curve_of(&mut trainer, 0..steps, true)
    };
    let cases = [json!({"max_grad_norm": 0.05}), json!({"optimizer": "normuon"}), adapters];
    for (turn, more) in cases.into_iter().enumerate() {
        let alone = curve(1, STEPS, true, &more);
        for (ranks, nodes) in in_turn(&[(2, 2), (4, 2), (6, 3)], turn) {
            let level = |level: usize| of(ranks, nodes, STEPS, &merged(more.clone(), &json!({"zero_level": level})));
            let (found, what) = (level(1), format!("{ranks} ranks of {nodes} nodes, {more}"));
            assert_same(&found, &alone, &what);
            if ranks == 4 {
                assert_eq!(level(1), found, "{what}: run again");
            }
            if ranks > nodes {
                let cut = level(2);
                assert_same(&cut, &alone, &what);
                assert_eq!(level(3), cut, "{what}: levels 2 and 3");
            }
        }
    }
    for (more, most) in
        [(json!({"optimizer": "adamw_8bit"}), 1e-4), (json!({"recipe": "fp8_hybrid", "zero_level": 3}), 2e-2)]
    {
        assert_close(&of(4, 2, 4, &more), &curve(1, 4, true, &more), most, &more.to_string());
    }
}

/// Losses within 0.1 %, norms within 2 %.
#[track_caller]
fn assert_near(found: &[(f64, f64)], expected: &[(f64, f64)], what: &str) {
    let twice = |of: &[(f64, f64)]| of.iter().map(|step| (step.0, step.0)).collect::<Vec<_>>();
    assert_close(&twice(found), &twice(expected), 1e-3, what);
    assert_close(found, expected, 2e-2, what);
}

/// Gradients that travel in bf16: another curve, as close as that rounding gives; the same bits when run again, and of levels
/// 2 and 3.
#[test]
fn gradients_may_travel_in_bf16() {
    let adapters = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2});
    let cases = [json!({"max_grad_norm": 0.05}), json!({"optimizer": "normuon"}), adapters];
    for (turn, more) in cases.into_iter().enumerate() {
        for ranks in in_turn(&[2, 3, 4], turn) {
            let of = |level: usize, compression: &str| {
                let wire = json!({"zero_level": level, "gradient_compression": compression});
                curve(ranks, STEPS, true, &merged(more.clone(), &wire))
            };
            let (whole, found) = (of(1, "none"), of(1, "bf16"));
            let what = format!("{ranks} ranks, {more}");
            assert_near(&found, &whole, &what);
            assert!(found.iter().zip(&whole).all(|(found, whole)| found.1 != whole.1), "{what}: nothing was rounded");
            let cut = of(2, "bf16");
            assert_near(&cut, &whole, &what);
            if ranks == 3 {
                assert_eq!(of(1, "bf16"), found, "{what}: run again");
                assert_eq!(of(3, "bf16"), cut, "{what}: levels 2 and 3");
            }
        }
    }
}

#[test]
fn gradients_that_do_not_travel_are_not_compressed() {
    let error = try_trainer(1, &json!({"gradient_compression": "bf16"})).err().expect("one rank sends nothing");
    let text = error.to_string();
    assert!(text.contains("`gradient_compression: bf16` needs several GPUs") && error.exit_code() == 2, "{text}");
    let nodes = |more: Value| merged(json!({"distributed": {"num_nodes": 2}}), &more);
    let one_bit = |more: Value| merged(nodes(json!({"gradient_compression": "onebit"})), &more);
    for (ranks, more, expected) in [
        (4, json!({}), "`gradient_compression: int8` needs several nodes"),
        (2, nodes(json!({"shard_scope": "world"})), "`gradient_compression: int8` needs shards of each node"),
        (1, nodes(json!({"zero_level": 2})), "`gradient_compression: int8` needs shards of each node"),
        (2, nodes(json!({"torch_dtype": "float16"})), "is not available yet with weights in float16"),
        (2, one_bit(json!({"optimizer": "adamw_8bit"})), "not `optimizer: adamw_8bit`"),
        (2, one_bit(json!({"optimizer": "normuon"})), "not `optimizer: normuon`"),
        (2, one_bit(json!({"offload_optimizer": true, "device": "cuda"})), "they must be on the device"),
        (2, one_bit(json!({"distributed": {"num_nodes": 1}})), "`gradient_compression: onebit` needs several nodes"),
    ] {
        let config = config(ranks, &merged(json!({"gradient_compression": "int8", "device": "cpu"}), &more));
        let machine = if more["device"] == "cuda" { Machine::h200() } else { Machine::cpu(1 << 30, 2) };
        let error = Preview::new(&config, &source(), &machine, None).err().expect("refused");
        assert!(error.to_string().contains(expected) && error.exit_code() == 2, "{error}");
    }
}

#[test]
fn a_warm_up_of_compression_is_part_of_the_run() {
    let refused = |more: Value| {
        let options = merged(json!({"model": "m", "distributed": {"num_nodes": 2}, "optimizer": "adamw"}), &more);
        let problems = Config::load_json(&options.to_string(), Task::Sft, &[]).expect_err("refused");
        problems.iter().map(ToString::to_string).collect::<String>()
    };
    let text = refused(json!({"gradient_compression": "int8", "compression_warmup_steps": 3}));
    assert!(text.contains("`compression_warmup_steps: 3` has no effect with `gradient_compression: int8`"), "{text}");
    let text = refused(json!({"gradient_compression": "onebit", "compression_warmup_steps": 20, "max_steps": 20}));
    assert!(text.contains("nothing is compressed in 20 steps: the warm-up of `onebit` has 20"), "{text}");
    let text = refused(json!({"gradient_compression": "onebit", "warmup_steps": 9, "max_steps": 9}));
    assert!(text.contains("nothing is compressed in 9 steps: the warm-up of `onebit` has 9"), "{text}");
}

/// A run of 60 steps comes as far with gradients in bf16 as in float32.
#[test]
#[ignore = "long; ./test.sh --all runs it"]
fn gradients_in_bf16_learn_as_much() {
    let end = |compression: &str| {
        let of = json!({"gradient_compression": compression, "optimizer": "adamw_8bit"});
        let curve = curve(4, 60, true, &of);
        (curve[0].0, curve[50..].iter().map(|step| step.0).sum::<f64>() / 10.0)
    };
    let (whole, rounded) = (end("none"), end("bf16"));
    assert!(whole.1 < 0.8 * whole.0, "{whole:?}");
    assert!((rounded.1 / whole.1 - 1.0).abs() < 5e-3, "{rounded:?}, {whole:?}");
}

/// A trainer whose nodes send each other blocks.
fn compressed(ranks: usize, nodes: usize, compression: Compression, more: &Value) -> Trainer {
    let mut trainer = trainer(ranks, more);
    let sharding = &mut trainer.plan.compile.sharding;
    (sharding.nodes, sharding.compression) = (nodes, compression);
    if compression == ONE_BIT {
        // Options of one process name no nodes.
        Arc::make_mut(&mut trainer.config).sharding.gradient_compression = GradientCompression::OneBit;
    }
    trainer
}

const ONE_BIT: Compression = Compression::Blocks(Blocks::OneBit);
const BLOCKS: [Compression; 3] = [Compression::Blocks(Blocks::Int8), Compression::Blocks(Blocks::TopK), ONE_BIT];

/// The same bits when run again, and of levels 2 and 3; another curve than without, as what is not sent comes later.
#[test]
fn nodes_may_send_blocks() {
    let adapters = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2});
    let cases = [json!({"max_grad_norm": 0.05}), json!({"optimizer": "normuon"}), adapters];
    for (turn, more) in cases.into_iter().enumerate() {
        for (ranks, nodes) in in_turn(&[(6, 3), (2, 2)], turn) {
            let whole = curve_of(&mut compressed(ranks, nodes, Compression::None, &more), 0..6, true);
            for compression in BLOCKS.into_iter().filter(|of| *of != ONE_BIT || more["optimizer"].is_null()) {
                let of = |level: usize| {
                    let more = merged(more.clone(), &json!({"zero_level": level, "max_steps": 6}));
                    curve_of(&mut compressed(ranks, nodes, compression, &more), 0..6, true)
                };
                let (found, what) = (of(1), format!("{ranks} ranks of {nodes} nodes, {compression:?}, {more}"));
                assert_eq!(of(1), found, "{what}: run again");
                // A fifth of the steps, rounded up, is as without.
                let (same, found_behind) = found.split_at(if compression == ONE_BIT { 2 } else { 0 });
                assert_eq!(same, &whole[..same.len()], "{what}: warm-up");
                assert!(
                    found_behind.iter().zip(&whole[same.len()..]).all(|(found, whole)| found.1 != whole.1),
                    "{what}"
                );
                if compression == BLOCKS[0] {
                    assert_close(&found, &whole, 5e-2, &what);
                }
                if ranks > nodes {
                    assert_eq!(of(2), of(3), "{what}: levels 2 and 3");
                }
            }
        }
    }
}

/// The mean of the last ten losses of a run on two nodes.
fn comes_to(compression: Compression, steps: usize, rate: f64) -> f64 {
    let mut trainer = compressed(4, 2, compression, &json!({"max_steps": steps}));
    let losses = (0..steps).map(|step| trainer.step(&rows(step, true), Some(rate)).unwrap().loss);
    losses.skip(steps - 10).sum::<f64>() / 10.0
}

/// A run of 60 steps comes as far with blocks of eight bits between nodes.
#[test]
#[ignore = "long; ./test.sh --all runs it"]
fn blocks_of_eight_bits_between_nodes_learn_as_much() {
    let [whole, found] = [Compression::None, BLOCKS[0]].map(|of| comes_to(of, 60, 1e-3));
    assert!(whole < 5.0, "{whole}");
    assert!((found / whole - 1.0).abs() < 5e-3, "{found}, {whole}");
}

/// After a warm-up of a fifth of the run, with first moments of one bit between nodes, a run of 60 steps comes about as far.
#[test]
#[ignore = "long; ./test.sh --all runs it"]
fn first_moments_of_one_bit_between_nodes_learn_as_much() {
    let [whole, found] = [Compression::None, ONE_BIT].map(|of| comes_to(of, 60, 1e-3));
    assert!(whole < 5.0 && (found / whole - 1.0).abs() < 3e-2, "{found}, {whole}");
}

#[test]
#[ignore = "long; ./test.sh --all runs it"]
fn first_moments_of_one_bit_between_nodes_learn_no_less_in_a_long_run() {
    let [whole, found] = [Compression::None, ONE_BIT].map(|of| comes_to(of, 240, 1e-3));
    assert!(found < whole && whole < 0.2, "{found}, {whole}");
}

/// With weights in bf16 and rounded stochastically, with copies in f32, with magnitudes that are recorded, and DoRA.
#[test]
fn first_moments_of_one_bit_go_with_other_options() {
    let adapters = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.0, "lora_dora": true});
    let bf16 = json!({"torch_dtype": "bfloat16"});
    let copies = merged(bf16.clone(), &json!({"master_dtype": "float32"}));
    for more in [bf16, copies, json!({"recipe": "fp8_hybrid"}), adapters] {
        let of = |level: usize, compression: Compression| {
            let more = merged(more.clone(), &json!({"zero_level": level, "max_steps": 20}));
            curve_of(&mut compressed(4, 2, compression, &more), 0..8, true)
        };
        let found = of(1, ONE_BIT);
        assert_eq!(of(1, ONE_BIT), found, "{more}: run again");
        // After 4 updates some second moments are close to 0: without a bound the loss of the next step is 3 times as high.
        let whole = of(1, Compression::None);
        let near = found.iter().zip(&whole).all(|(found, whole)| found.0 < 1.05 * whole.0);
        assert!(near, "{more}: {found:?}, {whole:?}");
        assert_eq!(of(2, ONE_BIT), of(3, ONE_BIT), "{more}: levels 2 and 3");
    }
}

/// Sparse gradient blocks train as far as full gradients with 4 times the learning rate, and less far with the same
/// rate. An element is sent about every 16th step and is then 16 times as large: the root of AdamW's second moment is 4
/// times as large, and steps are shorter by that.
#[test]
#[ignore = "long; ./test.sh --all runs it"]
fn sparse_blocks_between_nodes_learn_as_much_with_larger_steps() {
    let whole = comes_to(Compression::None, 240, 1e-3);
    let [same, larger] = [1e-3, 4e-3].map(|rate| comes_to(BLOCKS[1], 240, rate));
    assert!(whole < 0.2 && larger < whole && same > 2.0 * whole, "{whole}, {same}, {larger}");
}

/// Gradients that are not sent yet are part of a checkpoint; another number of ranks begins without them, and reports
/// it.
#[test]
fn what_is_left_of_gradients_is_in_checkpoints() {
    for compression in BLOCKS {
        let place = tempfile::tempdir().unwrap();
        let of = |nodes: usize| compressed(4, nodes, compression, &json!({"zero_level": 2, "max_steps": 8}));
        let straight = curve_of(&mut of(2), 0..8, true);
        let mut first = of(2);
        assert_eq!(curve_of(&mut first, 0..5, true), straight[..5]);
        first.save(place.path().join("checkpoint-5").as_path()).unwrap();
        let resumed = |nodes: usize| {
            let mut trainer = of(nodes);
            let notes = trainer.resume(&place.path().join("checkpoint-5")).unwrap();
            (curve_of(&mut trainer, 5..8, true), notes.join("\n"))
        };
        let (again, notes) = resumed(2);
        assert_eq!(again, straight[5..], "{compression:?}");
        assert!(!notes.contains("compression"), "{notes}");
        let (others, notes) = resumed(4);
        assert!(notes.contains("what compression had left of gradients is dropped"), "{notes}");
        assert!(others != straight[5..] && others.iter().all(|step| step.0.is_finite()));
        if compression == ONE_BIT {
            let mut other = compressed(4, 2, BLOCKS[0], &json!({"zero_level": 2, "max_steps": 8}));
            let text = other.resume(&place.path().join("checkpoint-5")).unwrap_err().to_string();
            assert!(text.contains("second moments stay as they were after 2 updates"), "{text}");
        }
    }
}

/// Parts of a row on several ranks: one device's curve, the same bits when run again, and at every level.
#[test]
fn ranks_may_share_a_row() {
    let adapters = json!({"lora": true, "lora_rank": 4, "lora_dropout": 0.1, "learning_rate": 1e-2});
    let cases = [
        (true, json!({"max_grad_norm": 0.05})),
        (false, json!({"optimizer": "normuon", "recompute_block": true})),
        (true, adapters),
    ];
    for (turn, (packed, more)) in cases.into_iter().enumerate() {
        let alone = curve(1, STEPS, packed, &more);
        for (ranks, sequence, level) in in_turn(&[(2, 2, 1), (4, 4, 2), (6, 2, 3)], turn) {
            let options = json!({
                "sequence_parallel_size": sequence, "zero_level": level,
                "gradient_accumulation_steps": ROWS * sequence / ranks,
            });
            let options = merged(more.clone(), &options);
            let found = curve(ranks, STEPS, packed, &options);
            assert_same(&found, &alone, &format!("{sequence} of {ranks} ranks, level {level}, {more}"));
            if ranks == 2 {
                assert_eq!(curve(ranks, STEPS, packed, &options), found, "run again");
            }
        }
    }
}

/// In codes: the magnitudes of a step are those of all parts.
#[test]
fn ranks_may_share_a_row_in_codes() {
    let emulated = json!({"recipe": "nvfp4", "fp4_backend": "emulate"});
    for (recipe, most) in [(json!({"recipe": "fp8_hybrid"}), 2e-2), (emulated, 5e-2)] {
        let more = merged(recipe, &json!({"lora": true, "lora_dropout": 0.1}));
        let options = json!({"sequence_parallel_size": 2, "gradient_accumulation_steps": ROWS});
        assert_close(
            &curve(2, 4, true, &merged(more.clone(), &options)),
            &curve(1, 4, true, &more),
            most,
            &more.to_string(),
        );
    }
}

#[test]
fn a_checkpoint_goes_on_with_any_number_of_ranks() {
    for more in [json!({"optimizer": "adamw_8bit"}), json!({"optimizer": "normuon"}), json!({"lora": true})] {
        let place = tempfile::tempdir().unwrap();
        let straight = curve(1, 9, true, &more);
        let mut folder = None;
        // From one to three to eight to two ranks, from level to level.
        for (number, (ranks, level)) in [(1, 1), (3, 3), (8, 2), (2, 3)].into_iter().enumerate() {
            let more = merged(more.clone(), &json!({"zero_level": level}));
            let options = match &folder {
                Some(folder) => merged(more.clone(), &json!({"resume_from_checkpoint": folder})),
                None => more.clone(),
            };
            let mut trainer = trainer(ranks, &options);
            let steps = number * 2..(number * 2 + 2).min(9);
            let found = curve_of(&mut trainer, steps.clone(), true);
            assert_same(&found, &straight[steps], &format!("{ranks} ranks, {more}"));
            let saved = place.path().join(format!("checkpoint-{number}"));
            trainer.save(&saved).unwrap();
            folder = Some(saved);
        }
    }
}

#[test]
fn a_checkpoint_of_ranks_is_that_of_one() {
    let place = tempfile::tempdir().unwrap();
    let more = json!({"optimizer": "adamw_8bit", "max_grad_norm": 0.0});
    let more = merged(more, &json!({"zero_level": 3}));
    let saved = |ranks: usize| {
        let (folder, model) = (place.path().join(ranks.to_string()), place.path().join(format!("model-{ranks}")));
        let mut trainer = trainer(ranks, &more);
        curve_of(&mut trainer, 0..3, true);
        trainer.save(&folder).unwrap();
        trainer.export(&model).unwrap();
        (folder, model)
    };
    let (one, three) = (saved(1), saved(3));
    for (one, three) in [(&one.0, &three.0), (&one.1, &three.1)] {
        assert_eq!(names(one), names(three));
        for name in names(one).iter().filter(|name| name.ends_with(".safetensors")) {
            let [one, three] = [one, three].map(|folder| Weights::open(&folder.join(name)).unwrap());
            assert_eq!(one.names(), three.names());
            for tensor in one.names() {
                let (one, three) = (one.get(tensor).unwrap(), three.get(tensor).unwrap());
                assert_eq!((one.dtype, one.shape), (three.dtype, three.shape), "{tensor}");
            }
        }
    }
}

#[test]
fn batches_that_are_no_rounds_are_refused() {
    let mut trainer = trainer(3, &json!({}));
    let error = trainer.step(&rows(0, false)[..4], Some(1e-3)).unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("no whole number of rounds of 3"), "{error}");
    let mut mixed = rows(0, false)[..3].to_vec();
    mixed[1] = Batch::from_labels(1, 8, vec![1; 8], &[1; 8], None, None).unwrap();
    let error = trainer.step(&mixed, Some(1e-3)).unwrap_err();
    assert!(error.to_string().contains("1 × 12, 1 × 8, 1 × 12"), "{error}");
}

/// A run of the command line: what its steps and evaluations say.
fn run(output: &Path, ranks: usize, more: &Value, stop_after: Option<usize>) -> (Outcome, Vec<[f64; 3]>, Vec<f64>) {
    let options = json!({
        "device": stories::device_name(), "gpus": ranks, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 6 / ranks,
        "torch_dtype": "float32",
    });
    let config = stories::config(output, &merged(options, more));
    let device = Arc::new(Device::open(&DeviceRequest::of(&config, Vec::new())).unwrap());
    let mut observer = Lines { stop_after, ..Lines::default() };
    let outcome = train::run(config, source(), device, &mut observer).unwrap();
    let events = events(output);
    let number = |event: &Value, name: &str| event[name].as_f64().unwrap();
    let steps = events.iter().filter(|event| event["event"] == "step");
    let steps = steps.map(|event| ["loss", "grad_norm", "tokens"].map(|name| number(event, name))).collect();
    (outcome, steps, losses(&events, "evaluation"))
}

/// One pass over data whose end fills neither the ranks nor the micro-steps.
#[test]
fn a_run_deals_its_data_without_loss_or_repetition() {
    let cases = [json!({}), json!({"sample_packing": false}), json!({"sample_packing": false, "padding_free": true})];
    for (turn, more) in cases.into_iter().enumerate() {
        let more = merged(json!({"max_steps": -1, "num_epochs": 1, "eval_steps": 4, "save_steps": 100}), &more);
        let more = merged(more, &json!({"sequence_len": 120}));
        let place = tempfile::tempdir().unwrap();
        let (_, alone, evaluated) = run(&place.path().join("1"), 1, &more, None);
        assert!(alone.len() > 3 && !evaluated.is_empty(), "{alone:?}");
        let last = alone.last().unwrap()[2];
        assert!(alone[0][2] != last, "the last step is short: {alone:?}");
        for (ranks, sequence, level) in in_turn(&[(2, 1, 1), (3, 1, 3), (4, 2, 2)], turn) {
            let options = json!({
                "zero_level": level, "sequence_parallel_size": sequence,
                "gradient_accumulation_steps": 6 * sequence / ranks,
            });
            let more = merged(more.clone(), &options);
            let (_, found, checked) = run(&place.path().join(ranks.to_string()), ranks, &more, None);
            let tokens = |of: &[[f64; 3]]| of.iter().map(|step| step[2]).collect::<Vec<_>>();
            assert_eq!(tokens(&found), tokens(&alone), "{ranks} ranks, {more}");
            let pairs = |of: &[[f64; 3]]| of.iter().map(|step| (step[0], step[1])).collect::<Vec<_>>();
            assert_same(&pairs(&found), &pairs(&alone), &format!("{ranks} ranks, {more}"));
            let twice = |of: &[f64]| of.iter().map(|loss| (*loss, *loss)).collect::<Vec<_>>();
            assert_same(&twice(&checked), &twice(&evaluated), "evaluations");
        }
    }
}

#[test]
fn a_run_that_was_stopped_goes_on_with_other_ranks() {
    let place = tempfile::tempdir().unwrap();
    let more = json!({"max_steps": 6, "eval_steps": 3, "lora_dropout": 0.1});
    let (_, straight, evaluated) = run(&place.path().join("straight"), 1, &more, None);
    let broken = place.path().join("broken");
    let (outcome, _, _) = run(&broken, 3, &more, Some(2));
    assert!(matches!(outcome, Outcome::Interrupted(_)));
    let again = merged(more, &json!({"resume_from_checkpoint": true}));
    assert!(matches!(run(&broken, 2, &again, Some(2)).0, Outcome::Interrupted(_)));
    let (outcome, found, checked) = run(&broken, 1, &again, None);
    assert!(matches!(outcome, Outcome::Finished(_)));
    let pairs = |of: &[[f64; 3]]| of.iter().map(|step| (step[0], step[1])).collect::<Vec<_>>();
    assert_same(&pairs(&found), &pairs(&straight), "from three ranks to two to one");
    assert_eq!(
        (checked.len(), names(&broken.join("adapter"))),
        (evaluated.len(), names(&place.path().join("straight/adapter")))
    );
    // Another number of rows a step is another run.
    let wrong = merged(again, &json!({"gradient_accumulation_steps": 1, "gpus": 2}));
    let options = json!({"device": stories::device_name(), "per_device_train_batch_size": 2});
    let config = stories::config(&broken, &merged(options, &wrong));
    let device = Arc::new(Device::open(&DeviceRequest::of(&config, Vec::new())).unwrap());
    let error = train::run(config, source(), device, &mut Lines::default()).unwrap_err().to_string();
    assert!(error.contains("a step has 2 × 1 × 2 = 4 rows") && error.contains(" = 12"), "{error}");
}
