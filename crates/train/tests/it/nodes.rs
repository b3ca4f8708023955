//! Training on several nodes is training on as many ranks of one process: the same bits, files and counts; a checkpoint goes
//! on with any number of nodes; what differs between nodes is named, and the end of one is the end of all. Nodes are
//! threads here, with a connection of their own to each other; `tests/python/test_nodes.py` has processes.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::stories::{self, Lines, in_turn, losses, source};
use compiler::{Blocks, Compression, Scope};
use net::{Facts, Place, Token};
use program::{Backend, Documents, Instruction, Machine, Variant};
use serde_json::{Value, json};
use train::config::Config;
use train::{Device, DeviceRequest, Outcome, Result, Trainer};

fn merged(mut base: Value, more: &Value) -> Value {
    let (object, more) = (base.as_object_mut().unwrap(), more.as_object().unwrap());
    object.extend(more.iter().map(|(name, value)| (name.clone(), value.clone())));
    base
}

/// An address of this machine with a free port.
fn rendezvous() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn options(ranks: usize, more: &Value) -> Value {
    let options = json!({
        "device": "cpu", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 6 / ranks,
        "torch_dtype": "float32", "data_cache": "off",
    });
    merged(options, more)
}

fn begin(config: Arc<Config>, observer: &mut Lines) -> Result<Outcome> {
    let request = DeviceRequest { threads: Some(2), ..DeviceRequest::of(&config, Vec::new()) };
    let nodes = train::come_together(&config, &request, observer)?;
    let mut device = Device::open(&DeviceRequest { nodes, ..request })?;
    if config.hardware.device.is_auto() {
        // The program of GPUs, run on the CPU.
        (device.machine, device.gpus) = (Machine::h200(), config.local_ranks());
    }
    train::run(config, source(), Arc::new(device), observer)
}

/// The runs of all nodes, each with a folder and options of its own: those of node 0 first.
fn nodes(
    output: &Path,
    nodes: usize,
    gpus: usize,
    more: &Value,
    own: impl Fn(usize) -> (Value, Option<usize>) + Sync,
) -> Vec<(Result<Outcome>, Vec<String>)> {
    let rendezvous = rendezvous();
    let node = |node: usize| {
        let (more_own, stop_after) = own(node);
        let distributed = json!({"num_nodes": nodes, "node_rank": node, "rendezvous": rendezvous, "timeout": 60});
        let distributed = merged(distributed, &more_own["distributed"].as_object().map_or(json!({}), |of| json!(of)));
        let mut options = merged(options(nodes * gpus, more), &more_own);
        options = merged(options, &json!({"gpus": gpus, "distributed": distributed}));
        // Node 0 writes; the others leave nothing.
        let folder = if node == 0 { output.to_owned() } else { output.join(format!("of-node-{node}")) };
        let mut observer = Lines { stop_after, ..Lines::default() };
        let outcome = begin(stories::config(&folder, &options), &mut observer);
        assert!(node == 0 || !folder.exists(), "{}", folder.display());
        (outcome, observer.lines)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..nodes).map(|number| scope.spawn(move || node(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Loss, norm and tokens of every step, by their bits, and the losses of the evaluations.
fn recorded(output: &Path) -> (Vec<[f64; 3]>, Vec<f64>) {
    let events = stories::events(output);
    let number = |event: &Value, name: &str| event[name].as_f64().unwrap();
    let steps = events.iter().filter(|event| event["event"] == "step");
    let steps = steps.map(|event| ["loss", "grad_norm", "tokens"].map(|name| number(event, name))).collect();
    (steps, losses(&events, "evaluation"))
}

/// The run of one process.
fn alone(output: &Path, gpus: usize, more: &Value, stop_after: Option<usize>) -> Outcome {
    let config = stories::config(output, &merged(options(gpus, more), &json!({"gpus": gpus})));
    begin(config, &mut Lines { stop_after, ..Lines::default() }).unwrap()
}

fn nothing(_: usize) -> (Value, Option<usize>) {
    (json!({}), None)
}

/// The files of a folder with their bytes, but those that say when and where.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let names = stories::names(folder).into_iter().filter(|name| name.ends_with(".safetensors"));
    names.map(|name| (name.clone(), std::fs::read(folder.join(name)).unwrap())).collect()
}

/// A file of rows of tokens: as long as rows of a batch may be, or of any length up to that.
fn rows_of_tokens(folder: &Path, name: &str, rows: usize, full: bool) -> Value {
    let row = |row: usize| {
        let length = if full { 64 } else { 8 + (row * 29) % 57 };
        let ids: Vec<String> = (0..length).map(|i| (3 + (row * 7919 + i * 104_729) % 500).to_string()).collect();
        format!("{{\"input_ids\": [{}]}}\n", ids.join(","))
    };
    let path = folder.join(name);
    std::fs::write(&path, (0..rows).map(row).collect::<String>()).unwrap();
    json!([{"path": path, "type": "tokens"}])
}

/// Runs with every row of the data for itself and in the order of the data, so that steps have the rows that they have in one
/// process: equal to the bit, or where ranks have other rows of them to `most`.
#[track_caller]
fn same_as_ranks(count: usize, gpus: usize, most: Option<f64>, more: &Value) {
    let place = tempfile::tempdir().unwrap();
    let full = more["sample_packing"] != false;
    let data = json!({
        "max_steps": 4, "eval_steps": 2, "save_steps": 100, "shuffle": false,
        "datasets": rows_of_tokens(place.path(), "train.jsonl", 200, full),
        "validation_datasets": rows_of_tokens(place.path(), "validation.jsonl", 20, full),
    });
    let data = if most.is_none() {
        merged(data, &json!({"per_device_train_batch_size": 1, "micro_batch_size": 1}))
    } else {
        data
    };
    let more = merged(data, more);
    let (one, several) = (place.path().join("one"), place.path().join("several"));
    alone(&one, count * gpus, &more, None);
    for (node, (outcome, lines)) in nodes(&several, count, gpus, &more, nothing).into_iter().enumerate() {
        let outcome = outcome.unwrap_or_else(|error| panic!("node {node}: {error}\n{lines:?}"));
        assert_eq!(matches!(outcome, Outcome::Finished(_)), node == 0, "node {node}: {outcome:?}");
        assert!(node == 0 || outcome == Outcome::Followed);
    }
    let (expected, found) = (recorded(&one), recorded(&several));
    assert!(expected.0.len() == 4 && expected.1.len() == 2, "{expected:?}");
    let what = format!("{count} nodes of {gpus} ranks, {more}");
    let answers = |of: &Path| -> Vec<Value> {
        stories::events(of).iter().filter(|of| of["event"] == "samples").map(|of| of["samples"].clone()).collect()
    };
    assert_eq!(answers(&several).len(), if more["sample_prompts"].is_null() { 0 } else { 2 }, "{what}");
    let Some(most) = most else {
        assert_eq!(found, expected, "{what}");
        assert_eq!(answers(&several), answers(&one), "{what}");
        for part in ["checkpoint-4", if more["lora"] == false { "model" } else { "adapter" }] {
            let expected = files(&one.join(part));
            assert!(!expected.is_empty());
            assert!(files(&several.join(part)) == expected, "{part}: {what}");
        }
        return;
    };
    // Sums of nodes may come to the same numbers by chance.
    let differ = found.0.iter().zip(&expected.0).any(|(found, expected)| found != expected);
    assert!(differ || more["shard_scope"] == "node", "{what}: ranks have the same rows");
    let close =
        |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < most, "{what}: {found} {expected}");
    for (found, expected) in found.0.iter().zip(&expected.0) {
        close(found[0], expected[0]);
        close(found[1], expected[1]);
        assert_eq!(found[2], expected[2], "{what}: tokens");
    }
    found.1.iter().zip(&expected.1).for_each(|(found, expected)| close(*found, *expected));
}

#[test]
fn two_nodes_train_all_weights_as_two_ranks() {
    same_as_ranks(2, 1, None, &json!({"lora": false, "learning_rate": 1e-3, "shard_scope": "world"}));
}

#[test]
fn three_nodes_train_adapters_with_dropout_as_three_ranks() {
    same_as_ranks(3, 1, None, &json!({"lora_dropout": 0.1, "shard_scope": "world"}));
}

/// Node 0 reads what the others have counted while these wait, and says it once.
#[test]
fn nodes_tell_together_what_becomes_zero() {
    let place = tempfile::tempdir().unwrap();
    let more = json!({
        "recipe": "fp8_hybrid", "max_steps": 3, "eval_steps": 1, "shuffle": false, "per_device_train_batch_size": 1,
        "datasets": rows_of_tokens(place.path(), "train.jsonl", 200, true),
    });
    let flushed = |output: &Path| -> Vec<Value> {
        stories::events(output).iter().filter_map(|event| event.get("fp8_flushed").cloned()).collect()
    };
    let (here, apart) = (place.path().join("here"), place.path().join("apart"));
    alone(&here, 2, &more, None);
    let lines: Vec<Vec<String>> =
        nodes(&apart, 2, 1, &more, nothing).into_iter().map(|(outcome, lines)| (outcome.unwrap(), lines).1).collect();
    assert_eq!((flushed(&here).len(), flushed(&apart)), (1, flushed(&here)));
    let said = |lines: &[String]| lines.iter().filter(|line| line.contains("became 0 in 8 bits")).count();
    assert_eq!(lines.iter().map(|lines| said(lines)).collect::<Vec<_>>(), [1, 0]);
}

#[test]
fn nodes_of_several_ranks_train_as_all_of_them() {
    // A row has another mask of dropout on another rank.
    let more = json!({"sample_packing": false, "optimizer": "adamw_8bit", "lora_dropout": 0.0, "shard_scope": "world"});
    same_as_ranks(3, 2, Some(1e-4), &more);
    same_as_ranks(2, 3, Some(1e-5), &json!({"lora": false, "learning_rate": 1e-3, "shard_scope": "world"}));
}

#[test]
fn nodes_answer_prompts_as_ranks() {
    let prompts = json!({"sample_prompts": ["Once upon a time", "Lily"], "sample_tokens": 6, "lora_dropout": 0.0});
    same_as_ranks(2, 2, Some(1e-5), &prompts);
    let whole = json!({"lora": false, "learning_rate": 1e-3, "shard_scope": "world", "zero_level": 3});
    same_as_ranks(2, 1, None, &merged(prompts, &whole));
}

#[test]
fn gradients_of_nodes_may_lie_in_host_memory() {
    let more = json!({"device": "auto", "lora": false, "learning_rate": 1e-3, "offload_grads": true});
    same_as_ranks(2, 1, None, &merged(more.clone(), &json!({"zero_level": 1})));
    same_as_ranks(3, 1, None, &merged(more, &json!({"zero_level": 2, "optimizer": "adamw_8bit"})));
}

/// Shards of each node, over connections.
#[test]
fn nodes_that_share_inside_train_as_all_ranks() {
    let full = json!({"lora": false, "learning_rate": 1e-3, "shard_scope": "node"});
    same_as_ranks(2, 2, Some(1e-5), &merged(full.clone(), &json!({"zero_level": 3, "gradient_accumulation_steps": 3})));
    same_as_ranks(3, 2, Some(1e-5), &full);
    same_as_ranks(3, 2, Some(1e-4), &json!({"lora_dropout": 0.0, "optimizer": "adamw_8bit", "zero_level": 2}));
}

#[test]
fn gradients_in_bf16_travel_between_nodes_as_between_ranks() {
    let more = json!({"lora": false, "learning_rate": 1e-3, "gradient_compression": "bf16", "shard_scope": "world"});
    same_as_ranks(2, 1, None, &more);
    same_as_ranks(3, 1, None, &merged(more, &json!({"zero_level": 2, "optimizer": "adamw_8bit"})));
}

/// Bytes that a message of a collective takes besides what ranks show.
const HEADER: usize = 9;

/// Two nodes of two ranks each send in a step of one micro-step the bytes that the program states.
#[test]
fn nodes_send_what_the_plan_says() {
    let place = tempfile::tempdir().unwrap();
    let config = stories::config(place.path(), &options(4, &json!({"gpus": 4, "lora": false})));
    let request = DeviceRequest { threads: Some(2), ..DeviceRequest::of(&config, Vec::new()) };
    let trainer = Trainer::begin(config, source(), Arc::new(Device::open(&request).unwrap())).unwrap();
    let mut options = trainer.plan.compile.clone();
    options.variants = vec![Variant { batch: 1, seq_len: 16, documents: Documents::Rows, patches: 0, logits: 0 }];
    let blocks = [Blocks::Int8, Blocks::TopK, Blocks::OneBit].map(Compression::Blocks);
    let kinds = [Compression::None, Compression::Bf16, blocks[0], blocks[1], blocks[2]];
    let scopes = [(Scope::Node, false), (Scope::Node, true), (Scope::World, false), (Scope::World, true)];
    for ((scope, cut), compression) in scopes.into_iter().flat_map(|of| kinds.map(|compression| (of, compression))) {
        let of = &mut options.sharding;
        (of.nodes, of.scope, of.open, of.open_scope) = (2, scope, false, false);
        (of.gradients, of.weights, of.compression) = (cut, cut, compression);
        let program = Arc::new(compiler::compile(&source().model, &options, &Machine::cpu(1 << 30, 2)).unwrap());
        let update = program.update(true).unwrap();
        let run = [program.micro_step(true, true, None).unwrap(), update];
        let planned = run.iter().flat_map(|entry| &program.entries[*entry].steps).filter_map(|step| {
            let Instruction::Collective(of) = &step.instruction else { return None };
            Some(program.cluster.between(of)).filter(|bytes| *bytes > 0)
        });
        let planned: Vec<usize> = planned.collect();
        let expected = 2 * planned.iter().sum::<usize>() + HEADER * planned.len();
        let rendezvous = rendezvous();
        let node = |node: usize| {
            let place = Place { node, nodes: 2, rendezvous: rendezvous.clone(), timeout: Duration::from_secs(60) };
            let joined = net::join(&place, &Token::new(""), &Facts::default(), &mut |_| {}, &mut || false);
            let nodes = joined.unwrap_or_else(|error| panic!("node {node}: {error}"));
            let backend = cpu::CpuBackend::new(Some(2)).unwrap().with_nodes(Some(nodes.clone()));
            let mut session = backend.load(program.clone()).unwrap();
            nodes.set_together(true);
            run.iter().for_each(|entry| session.run(*entry).unwrap());
            let sent = nodes.exchanged();
            nodes.leave();
            sent as usize
        };
        let node = &node;
        let sent: Vec<usize> = thread::scope(|scope| {
            let threads = [0, 1].map(|number| scope.spawn(move || node(number)));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(sent, [expected; 2], "{scope:?}, {cut}, {compression:?}");
    }
}

/// 1-bit Adam: as without compression up to the end of the warm-up, which the options say; a checkpoint on either side of it
/// goes on with the same bits.
#[test]
fn first_moments_are_compressed_behind_a_warm_up() {
    let place = tempfile::tempdir().unwrap();
    let data = json!({
        "max_steps": 6, "eval_steps": 100, "save_steps": 100, "logging_steps": 1, "shuffle": false, "optimizer": "adamw",
        "datasets": rows_of_tokens(place.path(), "train.jsonl", 200, true), "shard_scope": "node",
    });
    let kinds = [json!({"lora": false, "learning_rate": 1e-3}), json!({"lora_dropout": 0.1})];
    for (turn, more) in kinds.into_iter().enumerate() {
        let place = place.path().join(format!("lora-{}", more["lora"]));
        let more = merged(data.clone(), &more);
        let run = |name: &str, more: &Value, stop_after: Option<usize>| {
            let ended = nodes(&place.join(name), 2, 1, more, |node| (json!({}), stop_after.filter(|_| node == 0)));
            assert!(ended.iter().all(|(outcome, _)| outcome.is_ok()), "{ended:?}");
            recorded(&place.join(name)).0
        };
        let whole = run("whole", &more, None);
        let one_bit = |warm_up: usize| {
            merged(more.clone(), &json!({"gradient_compression": "onebit", "compression_warmup_steps": warm_up}))
        };
        for (number, warm_up) in [2, 4].into_iter().enumerate() {
            let name = format!("straight-{warm_up}");
            let straight = run(&name, &one_bit(warm_up), None);
            assert_eq!(straight[..warm_up], whole[..warm_up], "the losses of the warm-up, and the norms");
            // What an update did shows a step later; the norm is one of nodes at once, and no less than that of their mean.
            assert!(straight[warm_up][0] == whole[warm_up][0] && straight[warm_up][1] > whole[warm_up][1]);
            assert!(straight[warm_up + 1][0] != whole[warm_up + 1][0]);
            for stopped in in_turn(&[1, 5], turn + number) {
                let name = format!("broken-{warm_up}-{stopped}");
                run(&name, &one_bit(warm_up), Some(stopped));
                let again = merged(one_bit(warm_up), &json!({"resume_from_checkpoint": true}));
                assert_eq!(run(&name, &again, None), straight, "from step {stopped}");
            }
        }
    }
}

/// One pass over data whose rows are packed and shuffled: every token once, whoever trains on it, also where the number of nodes
/// changes on the way.
#[test]
fn nodes_train_on_every_document_once() {
    let place = tempfile::tempdir().unwrap();
    let data = json!({
        "max_steps": -1, "num_epochs": 1, "eval_steps": 100, "save_steps": 100, "logging_steps": 1,
        "datasets": rows_of_tokens(place.path(), "train.jsonl", 301, false),
    });
    let tokens = |output: &Path| recorded(output).0.iter().map(|step| step[2]).sum::<f64>();
    for more in [json!({}), json!({"sample_packing": false})] {
        let more = merged(data.clone(), &more);
        let place = place.path().join(format!("packed-{}", more["sample_packing"]));
        let (straight, broken) = (place.join("straight"), place.join("broken"));
        alone(&straight, 1, &more, None);
        let ended = nodes(&place.join("two"), 2, 1, &more, nothing);
        assert!(matches!(ended[0].0, Ok(Outcome::Finished(_))), "{ended:?}");
        assert_eq!(tokens(&place.join("two")), tokens(&straight));
        // Two nodes, then three, then one process.
        let stopped = |node: usize| if node == 0 { (json!({}), Some(2)) } else { nothing(node) };
        let ended = nodes(&broken, 2, 1, &more, stopped);
        assert!(matches!(ended[0].0, Ok(Outcome::Interrupted(_))), "{ended:?}");
        assert!(matches!(ended[1].0, Ok(Outcome::NotBegun)), "{ended:?}");
        let again = merged(more.clone(), &json!({"resume_from_checkpoint": true}));
        let ended = nodes(&broken, 3, 1, &again, stopped);
        assert!(matches!(ended[0].0, Ok(Outcome::Interrupted(_))), "{ended:?}");
        let said = ended[0].1.join("\n");
        assert!(
            said.contains("the data were in 2 parts and are in 3 now: what is left of the epoch is dealt again"),
            "{said}"
        );
        let options = said.lines().filter(|line| line.contains("`distributed"));
        assert!(options.eq(["Note: `distributed.num_nodes` is `3`, it was `2`"]), "{said}");
        let finished = alone(&broken, 1, &again, None);
        assert!(matches!(finished, Outcome::Finished(_)), "{finished:?}");
        assert_eq!(tokens(&broken), tokens(&straight), "{more}");
    }
}

/// With the rows of steps as they are in one process, a run goes on with any number of nodes as if nothing had been.
#[test]
fn a_run_goes_on_with_another_number_of_nodes() {
    let place = tempfile::tempdir().unwrap();
    let data = json!({
        "max_steps": 6, "eval_steps": 3, "save_steps": 100, "logging_steps": 1, "shuffle": false,
        "datasets": rows_of_tokens(place.path(), "train.jsonl", 200, true),
        "validation_datasets": rows_of_tokens(place.path(), "validation.jsonl", 20, true),
    });
    for more in [json!({"lora": false, "learning_rate": 1e-3}), json!({"lora_dropout": 0.0})] {
        let more = merged(data.clone(), &more);
        let place = place.path().join(format!("lora-{}", more["lora"]));
        let (straight, broken) = (place.join("straight"), place.join("broken"));
        alone(&straight, 1, &more, None);
        // From shards of all nodes to shards of each.
        let world = merged(more.clone(), &json!({"shard_scope": "world"}));
        let ended = nodes(&broken, 2, 1, &world, |node| if node == 0 { (json!({}), Some(2)) } else { nothing(node) });
        assert!(matches!(ended[0].0, Ok(Outcome::Interrupted(_))), "{ended:?}");
        let again = merged(more.clone(), &json!({"resume_from_checkpoint": true, "shard_scope": "node"}));
        let ended = nodes(&broken, 3, 1, &again, nothing);
        assert!(matches!(ended[0].0, Ok(Outcome::Finished(_))), "{ended:?}");
        let (found, expected) = (recorded(&broken), recorded(&straight));
        assert_eq!(found.0.len(), 6);
        for (found, expected) in found.0.iter().zip(&expected.0) {
            assert!((found[0] / expected[0] - 1.0).abs() < 1e-5 && found[2] == expected[2], "{found:?} {expected:?}");
        }
    }
}

#[test]
fn what_differs_between_nodes_is_named_on_all_of_them() {
    let place = tempfile::tempdir().unwrap();
    let differ = |more: Value| {
        let own = |node: usize| (if node == 1 { more.clone() } else { json!({}) }, None);
        let ended = nodes(place.path(), 2, 1, &json!({"max_steps": 2}), own);
        let texts = ended.into_iter().map(|(outcome, _)| outcome.unwrap_err().to_string());
        texts.collect::<Vec<_>>()
    };
    for text in differ(json!({"learning_rate": 0.5, "lora_rank": 4})) {
        assert!(text.contains("`learning_rate`: 0.01 on node 0, 0.5 on node 1"), "{text}");
        assert!(text.contains("`lora_rank`: 8 on node 0, 4 on node 1"), "{text}");
    }
    let data = place.path().join("other.txt");
    std::fs::write(&data, "Once there was another text than the one that node 0 reads. ".repeat(40)).unwrap();
    for text in differ(json!({"datasets": [{"path": data, "type": "text", "samples": 200}]})) {
        assert!(text.contains("documents") && text.contains("on node 1"), "{text}");
    }
    assert!(!place.path().join("adapter").exists());
}

#[test]
fn a_node_that_fails_ends_the_others_by_name() {
    let place = tempfile::tempdir().unwrap();
    let missing = json!({"datasets": [{"path": place.path().join("not-there.txt"), "type": "text"}]});
    let own = |node: usize| (if node == 1 { missing.clone() } else { json!({}) }, None);
    let begun = Instant::now();
    let ended = nodes(&place.path().join("run"), 3, 1, &json!({}), own);
    assert!(begun.elapsed() < Duration::from_secs(50));
    for (node, (outcome, _)) in ended.into_iter().enumerate() {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("not-there.txt"), "node {node}: {text}");
        assert!(node == 1 || text.contains("node 1"), "node {node}: {text}");
    }
}

#[test]
fn each_node_keeps_its_rows_in_a_folder_of_its_own() {
    let place = tempfile::tempdir().unwrap();
    let rows = place.path().join("rows");
    let own = |_: usize| (json!({"distributed": {"worker_output_dir": rows}}), None);
    for (outcome, lines) in nodes(&place.path().join("run"), 2, 1, &json!({"max_steps": 1}), own) {
        assert!(outcome.is_ok(), "{outcome:?} {lines:?}");
    }
    for node in ["node-0", "node-1"] {
        let folder = rows.join(node);
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&folder).unwrap());
        assert!(!stories::names(&folder).is_empty() && mode & 0o77 == 0, "{node}: {mode:o}");
    }
}

#[test]
fn nodes_that_do_not_come_are_named() {
    let place = tempfile::tempdir().unwrap();
    let distributed = json!({"num_nodes": 3, "node_rank": 0, "rendezvous": rendezvous(), "timeout": 1});
    let config = stories::config(place.path(), &json!({"device": "cpu", "distributed": distributed}));
    let text = begin(config, &mut Lines::default()).unwrap_err().to_string();
    assert!(text.contains("node 1 and node 2 did not come to 127.0.0.1:"), "{text}");
    let distributed = json!({"num_nodes": 3, "node_rank": 1, "rendezvous": rendezvous(), "timeout": 1});
    let config = stories::config(place.path(), &json!({"device": "cpu", "distributed": distributed}));
    let text = begin(config, &mut Lines::default()).unwrap_err().to_string();
    assert!(text.contains("node 0 cannot be reached at `rendezvous: 127.0.0.1:"), "{text}");
}
