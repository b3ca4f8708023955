//! Decisions of the plan in words for people and as JSON for scripts, and the options that each decision answers.
//!
//! The only place that has words for decisions: the plan, the console, the manifest, the log with its pages and
//! `resolved.yaml` take theirs from here. Knows no plan and decides nothing.

use program::{Choice, EntryKind, Layer, LayerPart, Obstacle, PlanDecision, Reason, Subject};
use serde_json::{Value, json};

use crate::config::ShardScope;
use crate::engine::time::number;
use crate::words::time;

/// Options of recomputation, and the parts of a layer that each of them stands for.
const RECOMPUTE: [(&str, &[LayerPart]); 6] = [
    ("recompute_swiglu", &[LayerPart::Activation]),
    ("recompute_rmsnorm", &[LayerPart::Norms]),
    ("recompute_ffn", &[LayerPart::Activation, LayerPart::FeedForward]),
    ("recompute_qkv", &[LayerPart::Rotation, LayerPart::Projections]),
    ("recompute_att", &[LayerPart::Rotation, LayerPart::Projections, LayerPart::Attention]),
    ("recompute_block", &[LayerPart::Residual]),
];

/// Options of one value, and what they are about.
const SINGLE: [(&str, Subject); 10] = [
    ("lmhead_chunks", Subject::OutputHead),
    ("attn_bwd_chunks", Subject::AttentionBackward),
    ("offload_residual", Subject::ResidualStream),
    ("offload_optimizer", Subject::OptimizerStates),
    ("offload_master", Subject::MasterCopies),
    ("offload_grads", Subject::Gradients),
    ("offload_quants", Subject::FrozenCodes),
    ("zero_level", Subject::Sharding),
    ("shard_scope", Subject::Scope),
    ("gradient_compression", Subject::Exchange),
];

/// An option with what the plan answers and why.
pub(crate) struct Answer {
    pub option: &'static str,
    pub value: Value,
    pub because: String,
}

/// The plan's answers to options, whether they were left open or not. An option without a decision is absent.
pub(crate) fn answers(plan: &[PlanDecision]) -> Vec<Answer> {
    let of_layers = RECOMPUTE.iter().filter_map(|(option, parts)| {
        let is_of = |of: &PlanDecision| matches!(of.subject, Subject::Layer(part) if parts.contains(&part));
        let reported = |of: &PlanDecision| {
            let (subject, layers) = (subject(of.subject), layers(&of.layers));
            format!("{subject} of {layers} {}: {}", chosen(of.choice), because(&of.reason))
        };
        answer(option, plan, is_of, reported)
    });
    let single = SINGLE.iter().filter_map(|(option, subject)| {
        let reported = |of: &PlanDecision| match of.entry {
            EntryKind::FirstMicroStep if differ(plan, *subject) => {
                let (rows, tokens) = (of.variant.batch, of.variant.seq_len);
                format!("{} for {rows} × {tokens} tokens: {}", chosen(of.choice), because(&of.reason))
            }
            _ => because(&of.reason),
        };
        answer(option, plan, |of| of.subject == *subject, reported)
    });
    of_layers.chain(single).collect()
}

/// True if a subject is decided one way for one shape of batches, and another way for the next.
fn differ(plan: &[PlanDecision], subject: Subject) -> bool {
    let mut of = plan.iter().filter(|of| is_of_step(of) && of.subject == subject);
    let first = of.next();
    of.any(|of| Some(of.choice) != first.map(|first| first.choice))
}

/// True for decisions on the entries that options concern.
fn is_of_step(of: &PlanDecision) -> bool {
    matches!(of.entry, EntryKind::FirstMicroStep | EntryKind::Update)
}

/// One value where it is one for all layers and shapes, else `auto`; all decisions in words.
fn answer(
    option: &'static str,
    plan: &[PlanDecision],
    is_of: impl Fn(&PlanDecision) -> bool,
    reported: impl Fn(&PlanDecision) -> String,
) -> Option<Answer> {
    let all: Vec<&PlanDecision> = plan.iter().filter(|of| is_of_step(of) && is_of(of)).collect();
    let first = all.first()?.choice;
    let value = if all.iter().all(|of| of.choice == first) { value(first) } else { json!("auto") };
    Some(Answer { option, value, because: distinct(all.into_iter().map(reported)).join("; ") })
}

fn distinct(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen: Vec<String> = Vec::new();
    for text in all {
        if !seen.contains(&text) {
            seen.push(text);
        }
    }
    seen
}

/// Tensors that the plan moved to the host though no option requested it: a sentence each, with the option that keeps
/// them on the device.
pub(crate) fn moved_unasked(plan: &[PlanDecision]) -> Vec<String> {
    let unasked = |of: &&PlanDecision| of.choice == Choice::Offload(true) && of.reason != Reason::Requested;
    let reported = |of: &PlanDecision| {
        let (subject, because) = (subject(of.subject), because(&of.reason));
        let option = option(of.subject).expect("every offload has an option");
        format!("{subject} in host memory: {because}; `{option}: false` keeps it on the device")
    };
    distinct(plan.iter().filter(unasked).map(reported))
}

/// A decision in one line, without what it frees and costs.
pub(crate) fn sentence(of: &PlanDecision) -> String {
    with_cost(of, "")
}

/// A decision in one line, with the time that it costs.
pub(crate) fn priced(of: &PlanDecision) -> String {
    let cost = if of.seconds > 0.0 { format!(" in {}", time(of.seconds)) } else { String::new() };
    with_cost(of, &cost)
}

fn with_cost(of: &PlanDecision, cost: &str) -> String {
    let layers = if of.layers.is_empty() { String::new() } else { format!(", {}", layers(&of.layers)) };
    // What the plan moved by itself can be forbidden by an option.
    let by = option(of.subject).filter(|_| of.choice == Choice::Offload(true) && of.reason != Reason::Requested);
    let by = by.map_or(String::new(), |option| format!(": `{option}`"));
    format!("{}{cost}: {}{layers} ({}{by})", chosen(of.choice), subject(of.subject), because(&of.reason))
}

/// A decision for scripts, with the words for pages.
pub(crate) fn to_json(of: &PlanDecision) -> Value {
    let (obstacle, up_to) = match &of.reason {
        Reason::Impossible(obstacle) => (Some(obstacle.name()), None),
        Reason::NeededUpTo(layer) => (None, Some(number(layer))),
        Reason::Requested
        | Reason::NeededToFit
        | Reason::Negligible
        | Reason::Free
        | Reason::Fastest
        | Reason::RecomputeSource
        | Reason::FasterThanRecompute => (None, None),
    };
    json!({
        "entry": of.entry.name(),
        "rows": of.variant.batch,
        "tokens": of.variant.seq_len,
        "subject": of.subject.name(),
        "layers": ranges(&of.layers).into_iter().map(|(a, b)| [number(a), number(b)]).collect::<Vec<_>>(),
        "kind": of.choice.kind(),
        "value": value(of.choice),
        "reason": of.reason.name(),
        "needed_up_to_layer": up_to,
        "obstacle": obstacle,
        "bytes": of.bytes,
        "seconds": of.seconds,
        "words": {
            "subject": subject(of.subject),
            "layers": if of.layers.is_empty() { String::new() } else { numbers(&of.layers) },
            "decision": chosen(of.choice),
            "reason": because(&of.reason),
            "sentence": sentence(of),
        },
    })
}

/// The answer alone, as options have it.
fn value(of: Choice) -> Value {
    match of {
        Choice::Recompute(yes) | Choice::Offload(yes) => json!(yes),
        Choice::Chunks(parts) | Choice::Level(parts) => json!(parts),
        Choice::AllNodes(yes) => json!(if yes { ShardScope::World.name() } else { ShardScope::Node.name() }),
        Choice::Rounded(dtype) => json!(dtype.name()),
        Choice::Compressed(name) => json!(name),
    }
}

/// The option of one value that decides the same.
fn option(of: Subject) -> Option<&'static str> {
    SINGLE.iter().find(|(_, subject)| *subject == of).map(|(option, _)| *option)
}

fn subject(of: Subject) -> &'static str {
    match of {
        Subject::Layer(LayerPart::Norms) => "norms",
        Subject::Layer(LayerPart::Activation) => "feed-forward activation",
        Subject::Layer(LayerPart::Rotation) => "QK norms and rotary embedding",
        Subject::Layer(LayerPart::FeedForward) => "feed-forward matrix multiplications",
        Subject::Layer(LayerPart::Projections) => "query, key and value projections",
        Subject::Layer(LayerPart::Attention) => "attention",
        Subject::Layer(LayerPart::Residual) => "residual stream inside the layer",
        Subject::ResidualStream => "residual stream between layers",
        Subject::OutputHead => "LM head",
        Subject::AttentionBackward => "attention backward pass",
        Subject::OptimizerStates => "optimizer states",
        Subject::MasterCopies => "f32 master weights",
        Subject::Gradients => "gradients",
        Subject::FrozenCodes => "frozen weights in codes",
        Subject::Sharding => "ZeRO sharding",
        Subject::Scope => "shards",
        Subject::Exchange => "gradients on their way to the other ranks",
    }
}

fn chosen(of: Choice) -> String {
    match of {
        Choice::Recompute(true) => "recomputed".to_owned(),
        Choice::Offload(true) => "offloaded".to_owned(),
        Choice::Recompute(false) => "saved".to_owned(),
        Choice::Offload(false) => "kept on the device".to_owned(),
        Choice::Chunks(1) => "whole".to_owned(),
        Choice::Chunks(parts) => format!("{parts} chunks"),
        Choice::Level(level) => format!("level {level}"),
        Choice::AllNodes(true) => "shared by all nodes".to_owned(),
        Choice::AllNodes(false) => "shared inside each node".to_owned(),
        Choice::Rounded(dtype) => format!("rounded to {}", dtype.name()),
        Choice::Compressed(name) => format!("compressed between nodes: {name}"),
    }
}

fn because(of: &Reason) -> String {
    let words = match of {
        Reason::Requested => "requested",
        Reason::NeededToFit => "needed to fit",
        Reason::NeededUpTo(layer) => {
            return format!("needed to fit up to layer {layer}; the rest costs next to nothing");
        }
        Reason::Negligible => "costs next to nothing",
        Reason::Free => "costs nothing",
        Reason::Fastest => "fits, and is fastest",
        Reason::RecomputeSource => "everything else is computed from it",
        Reason::FasterThanRecompute => "faster than recomputing more to fit",
        Reason::Impossible(Obstacle::LogitsAreRead) => "not possible otherwise: not only the loss reads the logits",
        Reason::Impossible(Obstacle::Indivisible) => "not possible otherwise: a micro-batch has a single row",
    };
    words.to_owned()
}

/// `layer 3`, `layers 0–3, 7`.
fn layers(of: &[Layer]) -> String {
    format!("{} {}", if of.len() == 1 { "layer" } else { "layers" }, numbers(of))
}

/// `0–3, 7` for 0, 1, 2, 3 and 7; after the name of their stack where there are several.
fn numbers(layers: &[Layer]) -> String {
    let text = |(a, b): (&Layer, &Layer)| if a == b { a.to_string() } else { format!("{a}–{}", b.index) };
    ranges(layers).into_iter().map(text).collect::<Vec<_>>().join(", ")
}

/// First and last of all that follow each other.
fn ranges(layers: &[Layer]) -> Vec<(&Layer, &Layer)> {
    let follows = |a: &Layer, b: &Layer| a.stack == b.stack && a.index + 1 == b.index;
    layers.chunk_by(follows).map(|of| (&of[0], &of[of.len() - 1])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(tokens: usize, choice: Choice, reason: Reason) -> PlanDecision {
        let variant =
            program::Variant { batch: 2, seq_len: tokens, documents: program::Documents::Rows, patches: 0, logits: 0 };
        let entry = EntryKind::FirstMicroStep;
        let (subject, layers) = (Subject::OutputHead, Vec::new());
        PlanDecision { entry, variant, subject, layers, choice, reason, bytes: 0, seconds: 0.0 }
    }

    #[test]
    fn an_option_has_one_answer_only_where_all_shapes_have_the_same() {
        let parts = |of: &[PlanDecision]| answers(of).into_iter().map(|of| (of.value, of.because)).next().unwrap();
        let short = decision(128, Choice::Chunks(1), Reason::Fastest);
        let long = decision(512, Choice::Chunks(4), Reason::NeededToFit);
        assert_eq!(parts(&[short.clone(), short.clone()]), (json!(1), "fits, and is fastest".to_owned()));
        let both = "whole for 2 × 128 tokens: fits, and is fastest; 4 chunks for 2 × 512 tokens: needed to fit";
        assert_eq!(parts(&[short, long.clone()]), (json!("auto"), both.to_owned()));
        // What an evaluation does answers no option.
        assert!(answers(&[PlanDecision { entry: EntryKind::Evaluate, ..long }]).is_empty());
    }

    #[test]
    fn layers_are_told_as_ranges() {
        let of = |stack: &str, numbers: &[usize]| -> Vec<Layer> {
            numbers.iter().map(|index| Layer { stack: stack.into(), index: *index }).collect()
        };
        assert_eq!(layers(&of("", &[0, 1, 2, 3, 7, 9, 10])), "layers 0–3, 7, 9–10");
        assert_eq!(layers(&of("", &[3])), "layer 3");
        assert_eq!(numbers(&[]), "");
        let both = [of("tower", &[2, 3]), of("text", &[4, 5, 7])].concat();
        assert_eq!(layers(&both), "layers tower.2–3, text.4–5, text.7");
    }
}
