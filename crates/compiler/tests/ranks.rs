//! Programs of several ranks: the bits of one where only one has something to do, for everything that is sharded; the
//! order of what they do together is proved for every program, and a rank that departs from it is refused.

mod support;

use compiler::{CompileOptions, OffloadOptions, OptimizerKind, PlanOptions, Sharding, compile};
use program::{ArenaKind, Entry, EntryKind, Instruction, Machine, Movement, Program, StreamId, check_group};
use support::training::{assert_same, bits, cases, model};

const RANKS: [usize; 4] = [2, 3, 4, 8];

/// Small buckets, so that every run has several.
fn on(ranks: usize, options: &CompileOptions) -> CompileOptions {
    CompileOptions { sharding: Sharding { ranks, bucket_bytes: Some(64 << 10) }, ..options.clone() }
}

/// The cases without clipping, because the norm adds up other blocks, and without merged linears, because sharding leaves
/// those apart that the optimizer treats differently: sums in another order.
fn unclipped() -> Vec<(String, CompileOptions)> {
    let mut cases = cases();
    for (_, options) in &mut cases {
        options.training.as_mut().unwrap().optimizer.as_mut().unwrap().max_grad_norm = 0.0;
        options.plan.passes = compiler::OPTIONAL.iter().position(|pass| *pass == "merge_linears");
        assert!(options.plan.passes.is_some());
    }
    cases
}

#[test]
fn ranks_of_which_one_has_rows_give_the_bits_of_one() {
    for (case, options) in unclipped() {
        let optimizer = options.training.as_ref().unwrap().optimizer.clone().unwrap();
        // Matrices are rounded stochastically with numbers by batches of matrices, which ranks have of their own.
        let dice = matches!(optimizer.kind, OptimizerKind::NorMuon { .. }) && !optimizer.master;
        let dice = dice && options.adapter.is_none();
        let machine = Machine::cpu(1 << 30, 2);
        let alone = bits(compile(&model(), &options, &machine).unwrap());
        for ranks in RANKS.into_iter().filter(|_| !dice) {
            let program = compile(&model(), &on(ranks, &options), &machine).unwrap();
            let found = bits(program);
            // The norm's last bits are another's.
            let but_norm = |of: &[(String, Vec<u8>)]| -> Vec<(String, Vec<u8>)> {
                of.iter().filter(|(name, _)| name != program::scalar::GRADIENT_NORM).cloned().collect()
            };
            assert_same(but_norm(&found), &but_norm(&alone), &format!("{case}, {ranks} ranks"));
        }
    }
}

#[test]
fn what_ranks_keep_may_be_on_the_host() {
    let moved = OffloadOptions {
        optimizer: Some(true),
        master: Some(true),
        gradients: Some(false),
        slice_bytes: Some(32 << 10),
        ..OffloadOptions::default()
    };
    let stays = OffloadOptions { optimizer: Some(false), master: Some(false), ..moved };
    for (case, options) in cases() {
        let of = |offload: OffloadOptions| {
            let plan = PlanOptions { offload, ..options.plan.clone() };
            compile(&model(), &on(3, &CompileOptions { plan, ..options.clone() }), &Machine::h200()).unwrap()
        };
        let (expected, program) = (bits(of(stays)), of(moved));
        let update = program.entries.iter().find(|entry| entry.kind == EntryKind::Update).unwrap();
        assert!(update.steps.iter().any(|step| step.instruction.stream() == StreamId::ToDevice), "{case}");
        assert_same(bits(program), &expected, &case);
    }
}

#[test]
fn a_rank_keeps_its_share_of_the_states() {
    let bytes = |program: &Program, kind: ArenaKind| {
        program.arenas.iter().filter(|arena| arena.kind == kind).map(|arena| arena.bytes).sum::<usize>()
    };
    for (case, options) in cases() {
        let machine = Machine::cpu(1 << 30, 2);
        let alone = compile(&model(), &options, &machine).unwrap();
        let shared = compile(&model(), &on(4, &options), &machine).unwrap();
        for kind in [ArenaKind::Optimizer, ArenaKind::Masters] {
            let (all, share) = (bytes(&alone, kind), bytes(&shared, kind));
            // Runs are filled up to whole pieces, matrices to as many for each.
            assert!(4 * (share + 1024) >= all && share <= all / 2, "{case}: {share} of {all} bytes of {}", kind.name());
        }
    }
}

/// The update as every rank runs it.
fn update_of(program: &Program) -> Vec<Entry> {
    let update = program.entries.iter().find(|entry| entry.kind == EntryKind::Update).unwrap();
    (0..program.cluster.ranks).map(|rank| update.of_rank(rank)).collect()
}

#[test]
fn a_rank_that_departs_from_the_order_is_refused() {
    let (_, options) = cases().swap_remove(0);
    let program = compile(&model(), &on(3, &options), &Machine::h200()).unwrap();
    let ranks = update_of(&program);
    assert_eq!(check_group(&ranks), Ok(()));
    let is_collective =
        |entry: &Entry, index: &usize| matches!(entry.steps[*index].instruction, Instruction::Collective(_));
    let places: Vec<usize> = (0..ranks[0].steps.len()).filter(|index| is_collective(&ranks[0], index)).collect();
    assert!(places.len() > 8, "{places:?}");
    for (number, place) in places.iter().enumerate() {
        let rank = number % 3;
        let refused = |change: &dyn Fn(&mut Entry)| {
            let mut changed = ranks.clone();
            change(&mut changed[rank]);
            let message = check_group(&changed).expect_err("a rank does something else");
            assert!(message.contains("rank"), "{message}");
        };
        refused(&|entry| drop(entry.steps.remove(*place)));
        refused(&|entry| {
            let Instruction::Collective(of) = &mut entry.steps[*place].instruction else { unreachable!("it is one") };
            of.movement = if of.movement == Movement::Gather { Movement::Exchange } else { Movement::Gather };
        });
        refused(&|entry| {
            let Instruction::Collective(of) = &mut entry.steps[*place].instruction else { unreachable!("it is one") };
            of.to.shape[0] -= 1;
        });
        refused(&|entry| {
            let again = entry.steps[*place].clone();
            entry.steps.insert(*place, again);
        });
    }
}
