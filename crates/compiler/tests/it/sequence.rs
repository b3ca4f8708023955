//! Programs whose ranks share a micro-batch: what each has of it, what they exchange, and what is refused.

use crate::support::training::{cases, model};
use compiler::{CompileError, CompileOptions, Sharding, compile};
use program::{
    ArenaKind, Documents, Entry, EntryKind, Instruction, Machine, ProcessGroup, Program, Variant, check_group,
};

/// Shapes whose tokens divide by 4 and 8: one row, and rows that parts of it cross.
const SHAPES: [(usize, usize); 3] = [(1, 64), (3, 16), (2, 24)];

fn shared(ranks: usize, sequence: usize, (batch, seq_len): (usize, usize), options: &CompileOptions) -> CompileOptions {
    let sharding = Sharding { ranks, sequence, bucket_bytes: Some(64 << 10), ..Sharding::default() };
    let variants = vec![Variant { batch, seq_len, documents: Documents::Packed, patches: 0, logits: 0 }];
    CompileOptions { sharding, variants, ..options.clone() }
}

fn exchanges(entry: &Entry, among: usize) -> usize {
    let is_one = |of: &Instruction| matches!(of, Instruction::Collective(of) if of.group == ProcessGroup::row(among));
    entry.steps.iter().filter(|step| is_one(&step.instruction)).count()
}

#[test]
fn attention_has_all_tokens_and_everything_else_its_part() {
    for (case, options) in cases().into_iter().step_by(2) {
        for shape in SHAPES {
            let program = compile(&model(), &shared(8, 4, shape, &options), &Machine::h200()).unwrap();
            assert_eq!((program.cluster.ranks, program.cluster.sequence, program.cluster.replicas()), (8, 4, 2));
            let entry = program.entries.iter().find(|entry| entry.kind == EntryKind::FirstMicroStep).unwrap();
            // q, k, v and the result of five layers, and their gradients.
            assert!(exchanges(entry, 4) >= 40, "{case}: {}", exchanges(entry, 4));
            let tokens = shape.0 * shape.1;
            for (name, at) in &entry.inputs {
                let expected = match name.as_str() {
                    "document_start" => vec![shape.0, shape.1],
                    "micro_step" => vec![1],
                    _ => vec![1, tokens / 4],
                };
                assert_eq!(at.shape, expected, "{case}: {name}");
            }
        }
    }
}

#[test]
fn a_rank_that_exchanges_among_others_is_refused() {
    let (_, options) = cases().swap_remove(0);
    let program = compile(&model(), &shared(8, 2, SHAPES[0], &options), &Machine::h200()).unwrap();
    let mut tried = 0;
    for entry in &program.entries {
        let ranks: Vec<Entry> = (0..8).map(|rank| entry.of_rank(rank, program.cluster)).collect();
        assert_eq!(check_group(&ranks), Ok(()));
        for index in 0..entry.steps.len() {
            let mut changed = ranks.clone();
            let Instruction::Collective(of) = &mut changed[index % 8].steps[index].instruction else { continue };
            of.group = ProcessGroup::row(if of.group.size == 2 { 4 } else { 2 });
            assert!(check_group(&changed).is_err(), "{}", entry.steps[index]);
            tried += 1;
        }
    }
    assert!(tried > 80, "{tried} collectives");
}

#[test]
fn parts_take_a_part_of_the_memory() {
    let (_, options) = cases().pop().unwrap();
    let bytes = |sequence: usize| {
        let program = compile(&model(), &shared(4, sequence, (1, 4096), &options), &Machine::h200()).unwrap();
        let of = |program: &Program| program.arenas.iter().find(|of| of.kind == ArenaKind::Activations).unwrap().bytes;
        of(&program)
    };
    let (whole, half, quarter) = (bytes(1), bytes(2), bytes(4));
    assert!(half * 10 < whole * 6 && quarter * 10 < half * 6, "{whole}, {half}, {quarter}");
}

#[test]
fn what_cannot_be_shared_is_refused_by_name() {
    let (_, options) = cases().swap_remove(0);
    let refused = |sequence: usize, shape: (usize, usize)| match compile(
        &model(),
        &shared(sequence, sequence, shape, &options),
        &Machine::h200(),
    ) {
        Err(CompileError::Option { option: "sequence_parallel_size", message, .. }) => message,
        other => panic!("expected a refusal, not {:?}", other.map(|program| program.name)),
    };
    // Four heads of keys and values are repeated for eight ranks; those of queries are not.
    compile(&model(), &shared(8, 8, (1, 64), &options), &Machine::h200()).unwrap();
    let message = refused(32, (1, 64));
    assert!(message.contains("`sequence_parallel_size: 32`: 8 heads of attention cannot"), "{message}");
    let message = refused(4, (3, 18));
    assert!(message.contains("`sequence_parallel_size: 4`: 3 rows of 18 tokens"), "{message}");
}
