//! A model that goes on where its sequences were: what the rewrite leaves, what it costs, what it refuses.

use crate::support::{adapter, options};
use compiler::{
    AdapterOptions, CompileError, CompileOptions, EntryOptions, KeyValueCache, PlanOptions, SLOT_OF_TOKEN, compile,
};
use graph::Model;
use program::{ArenaKind, Documents, EntryKind, Instruction, Machine, MemoryClass, Program, Variant};
use serde_json::{Value, json};

const CACHE: KeyValueCache = KeyValueCache { sequences: 3, pages: 12, page: 4, pages_per_sequence: 5 };

fn model() -> Model {
    graph::from_json(include_str!("../fixtures/llama.json")).expect("the fixture is valid IR")
}

/// A model of three layers, two of which use a gated delta net.
fn hybrid() -> Model {
    graph::from_json(include_str!("../fixtures/hybrid.json")).expect("the fixture is valid IR")
}

fn asked(shapes: &[(usize, usize)]) -> CompileOptions {
    let variant = |(batch, seq_len): &(usize, usize)| Variant {
        batch: *batch,
        seq_len: *seq_len,
        documents: Documents::Rows,
        patches: 0,
        logits: 0,
    };
    CompileOptions {
        variants: shapes.iter().map(variant).collect(),
        training: None,
        entries: vec![EntryOptions::generate(CACHE).keeping(["logits"])],
        ..options()
    }
}

fn compiled(shapes: &[(usize, usize)]) -> Program {
    compile(&model(), &asked(shapes), &Machine::cpu(1 << 30, 2)).unwrap()
}

/// The names of the operations that an entry launches.
fn operations(program: &Program, entry: usize) -> Vec<&str> {
    let launched = |step: &'_ program::Step| matches!(step.instruction, Instruction::Launch(_));
    let steps = program.entries[entry].steps.iter().filter(|step| launched(step));
    steps.map(|step| step.provenance.op.as_str()).collect()
}

#[test]
fn attention_reads_pages_and_one_token_of_a_row_reaches_the_head() {
    let program = compiled(&[(1, 8), (3, 1)]);
    for (entry, rows) in [(0, 1), (1, 3)] {
        let operations = operations(&program, entry);
        let count = |name: &str| operations.iter().filter(|op| **op == name).count();
        let layers = count("cache_write");
        assert!(layers > 1, "{operations:?}");
        assert_eq!((count("cached_attention"), count("attention")), (layers, 0), "{operations:?}");
        assert_eq!((count("pick_token"), count("sample_token")), (usize::from(entry == 0), 1));
        let logits = program.entries[entry].outputs.iter().find(|(name, _)| name == "logits").unwrap();
        assert_eq!(logits.1.shape[..2], [rows, 1]);
        let names: Vec<&str> = program.entries[entry].inputs.iter().map(|(name, _)| name.as_str()).collect();
        assert!(["cache_positions", "page_table"].iter().all(|name| names.contains(name)), "{names:?}");
        assert_eq!(names.contains(&"last_token"), entry == 0);
    }
}

#[test]
fn pages_are_planned_and_shared_by_all_shapes() {
    let (one, both) = (compiled(&[(3, 1)]), compiled(&[(1, 8), (3, 1)]));
    let line = |program: &Program| {
        program.memory.iter().find(|line| line.class == MemoryClass::Arena(ArenaKind::Cache)).map(|line| line.bytes)
    };
    let bytes = line(&one).unwrap();
    assert!(bytes > 0 && bytes.is_multiple_of(CACHE.pages * CACHE.page * 4), "{bytes}");
    assert_eq!(line(&both), Some(bytes));
    assert!(one.has_layout_of(&both));
    let plain = CompileOptions { entries: vec![EntryOptions::forward().keeping(["logits"])], ..asked(&[(3, 1)]) };
    let plain = compile(&model(), &plain, &Machine::cpu(1 << 30, 2)).unwrap();
    assert_eq!((line(&plain), plain.entry(EntryKind::Forward, None)), (None, Some(0)));
}

#[test]
fn gated_delta_nets_go_on_from_the_slots_of_their_sequences() {
    let of = |cache| {
        let entries = vec![EntryOptions::generate(cache).keeping(["logits"])];
        compile(&hybrid(), &CompileOptions { entries, ..asked(&[(1, 8), (3, 1)]) }, &Machine::cpu(1 << 30, 2)).unwrap()
    };
    let program = of(CACHE);
    for entry in [0, 1] {
        let operations = operations(&program, entry);
        let count = |name: &str| operations.iter().filter(|op| **op == name).count();
        assert_eq!(["cached_conv", "cached_delta", "cache_write"].map(count), [2, 2, 1], "{operations:?}");
        assert_eq!(["causal_conv", "gated_delta", "attention"].map(count), [0, 0, 0], "{operations:?}");
        let names: Vec<&str> = program.entries[entry].inputs.iter().map(|(name, _)| name.as_str()).collect();
        assert!(["page_table", "sequence_slots"].iter().all(|name| names.contains(name)), "{names:?}");
    }
    let bytes = |program: &Program| {
        let line = program.memory.iter().find(|line| line.class == MemoryClass::Arena(ArenaKind::Cache));
        line.expect("something is kept").bytes
    };
    // Of two layers: 4 tokens of 2·2·8 + 4·12 channels, states [4, 8, 12].
    let slot = 2 * (4 * 80 + 4 * 8 * 12) * 4;
    assert_eq!(bytes(&of(KeyValueCache { sequences: 67, ..CACHE })) - bytes(&program), 64 * slot);
}

/// The model with adapters of this many ranks, in slots or one for all.
fn adapted(of: AdapterOptions) -> Result<Program, CompileError> {
    let options = CompileOptions { adapter: Some(of), ..asked(&[(1, 8), (3, 1)]) };
    compile(&model(), &options, &Machine::cpu(1 << 30, 2))
}

#[test]
fn adapters_in_slots_are_planned_and_products_of_one_value_stay_one() {
    let of = |slots, rank| adapted(AdapterOptions { slots, rank, ..adapter() }).unwrap();
    let (one, two, four) = (of(None, 16), of(Some(2), 16), of(Some(4), 32));
    for entry in [0, 1] {
        let products = |program: &Program| {
            let steps = program.entries[entry].steps.iter();
            steps.filter(|step| matches!(step.instruction, Instruction::Gemm(_))).count()
        };
        assert_eq!(products(&one), products(&two));
        let reads = |program: &Program| program.entries[entry].inputs.iter().any(|(name, _)| name == SLOT_OF_TOKEN);
        assert!(reads(&two) && !reads(&one));
    }
    let bytes = |program: &Program| {
        let line = program.memory.iter().find(|line| line.class == MemoryClass::Arena(ArenaKind::Adapters));
        line.expect("there are adapters").bytes
    };
    // The table of ranks is all that slots add; it is far smaller than a matrix of each layer.
    assert!((bytes(&one)..=bytes(&one) + 1024).contains(&bytes(&two)), "{} {}", bytes(&one), bytes(&two));
    assert!((2 * bytes(&one)..=2 * bytes(&one) + 1024).contains(&bytes(&four)), "{} {}", bytes(&one), bytes(&four));
}

#[test]
fn what_slots_do_not_support_is_refused() {
    let refused = |of: AdapterOptions| adapted(AdapterOptions { slots: Some(2), ..of }).unwrap_err().to_string();
    let head = refused(AdapterOptions { targets: vec!["lm_head".into()], ..adapter() });
    assert!(head.contains("`lm_head.weight` is in no layer"), "{head}");
    for of in [AdapterOptions { rank: 7, ..adapter() }, AdapterOptions { magnitudes: true, ..adapter() }] {
        let why = refused(of);
        assert!(why.contains("2 adapters cannot share matrices"), "{why}");
    }
}

/// The model whose second layer attends to the keys and values of the first.
fn sharing() -> Model {
    let mut text = serde_json::to_value(model()).unwrap();
    let items = text["body"].as_array_mut().unwrap();
    let stack = items.iter_mut().find(|item| item["repeat"].is_u64()).unwrap();
    let attention = |node: &&Value| node["op"] == "attention";
    let node = stack["blocks"][0]["nodes"].as_array().unwrap().iter().find(attention).unwrap().clone();
    let layers = stack["repeat"].as_u64().unwrap() as usize;
    stack["pattern"] = json!((0..layers).map(|layer| layer.min(1)).collect::<Vec<_>>());
    let block = stack["blocks"][0].clone();
    stack["blocks"].as_array_mut().unwrap().push(block);
    for place in [1, 2] {
        let kept = format!("kept.{place}");
        stack["carry"].as_array_mut().unwrap().push(json!({"result": format!("layers.{kept}")}));
        for (block, next) in [(0, node["inputs"][place].clone()), (1, json!(kept))] {
            let block = &mut stack["blocks"][block];
            block["carry"].as_array_mut().unwrap().push(json!({"inside": kept, "next": next}));
        }
        let nodes = stack["blocks"][1]["nodes"].as_array_mut().unwrap();
        nodes.iter_mut().find(|node| node["op"] == "attention").unwrap()["inputs"][place] = json!(kept);
    }
    graph::from_json(&text.to_string()).unwrap()
}

#[test]
fn layers_that_share_keys_and_values_share_pages() {
    let program = |model: &Model| compile(model, &asked(&[(1, 8), (3, 1)]), &Machine::cpu(1 << 30, 2)).unwrap();
    let (own, shared) = (program(&model()), program(&sharing()));
    let count = |program: &Program, name: &str| operations(program, 0).iter().filter(|op| **op == name).count();
    let layers = count(&own, "cache_write");
    assert_eq!((count(&shared, "cache_write"), count(&shared, "cached_attention")), (1, layers));
    let bytes = |program: &Program| {
        program.memory.iter().find(|line| line.class == MemoryClass::Arena(ArenaKind::Cache)).unwrap().bytes
    };
    assert_eq!(bytes(&shared) * layers, bytes(&own));
}

#[test]
fn what_trains_and_what_generates_share_a_program() {
    for model in [model(), hybrid(), sharing()] {
        shared(&model);
    }
}

fn shared(model: &Model) {
    let shape = |batch, seq_len| Variant { batch, seq_len, documents: Documents::Rows, patches: 0, logits: 0 };
    let entries = |generates: bool| {
        let usual = options().entries.into_iter().map(|entry| entry.keeping_cache(CACHE));
        let own = EntryOptions::generate(CACHE).keeping(["logits"]).in_shapes(vec![shape(1, 8), shape(3, 1)]);
        usual.chain(generates.then_some(own)).collect()
    };
    let of = |variant, generates| {
        let options = CompileOptions { variants: vec![variant], entries: entries(generates), ..options() };
        compile(model, &options, &Machine::cpu(1 << 30, 2)).unwrap()
    };
    let both = of(shape(2, 8), true);
    let count = |kind, variant| both.entries.iter().filter(|of| of.kind == kind && of.variant == Some(variant)).count();
    assert_eq!((count(EntryKind::FirstMicroStep, shape(2, 8)), count(EntryKind::FirstMicroStep, shape(1, 8))), (1, 0));
    assert_eq!((count(EntryKind::Forward, shape(1, 8)), count(EntryKind::Forward, shape(2, 8))), (1, 0));
    assert!(both.memory.iter().any(|line| line.class == MemoryClass::Arena(ArenaKind::Cache) && line.bytes > 0));
    // A shape that comes later keeps the pages where they are.
    assert!(of(shape(2, 16), false).has_layout_of(&both));
    assert!(operations(&both, 0).iter().all(|op| !op.contains("cache")));
}

#[test]
fn the_plan_of_a_training_leaves_room_for_pages() {
    let shape = Variant { batch: 2, seq_len: 32, documents: Documents::Rows, patches: 0, logits: 0 };
    let entries: Vec<EntryOptions> = options().entries.into_iter().map(|entry| entry.keeping_cache(CACHE)).collect();
    let of = |memory_limit| {
        let plan = PlanOptions { memory_limit, ..options().plan };
        let options = CompileOptions { variants: vec![shape], entries: entries.clone(), plan, ..options() };
        compile(&model(), &options, &Machine::cpu(1 << 30, 2))
    };
    let total = |program: &Program| program.memory.iter().map(|line| line.bytes).sum::<usize>();
    let most = total(&of(None).unwrap());
    let limited = of(Some(most - 1)).unwrap();
    assert!(total(&limited) < most, "something is recomputed");
}

#[test]
fn a_model_whose_tokens_see_later_ones_is_refused() {
    let mut text = serde_json::to_value(model()).unwrap();
    let mut changed = 0;
    visit(&mut text, &mut |node| {
        if node["op"] == "attention" {
            node["attrs"]["bidirectional"] = json!(true);
            changed += 1;
        }
    });
    assert!(changed > 0);
    let seeing = graph::from_json(&text.to_string()).unwrap();
    let error = compile(&seeing, &asked(&[(1, 8)]), &Machine::cpu(1 << 30, 2)).unwrap_err();
    assert!(matches!(error, CompileError::Options(_)) && error.to_string().contains("see later ones"), "{error}");
}

/// Every object of a value.
fn visit(value: &mut Value, change: &mut impl FnMut(&mut Value)) {
    if value.is_object() {
        change(value);
    }
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| visit(item, change)),
        Value::Object(fields) => fields.values_mut().for_each(|field| visit(field, change)),
        _ => {}
    }
}
