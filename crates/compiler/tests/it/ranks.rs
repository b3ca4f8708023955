//! Programs of several ranks: the bits of one where only one has something to do, for everything that is sharded; the
//! order of what they do together is proved for every program, and a rank that departs from it is refused.

use crate::support::in_turn;
use crate::support::training::{assert_same, bits, bits_after, cases, model};
use compiler::{
    Blocks, CompileError, CompileOptions, Compression, OffloadOptions, OptimizerKind, PlanOptions, Sharding, compile,
};
use program::{
    ArenaKind, Choice, Entry, EntryKind, Instruction, LAST, Machine, Movement, Program, Reason, StreamId, Subject,
    check_group,
};
use tensor::DType;

const RANKS: [usize; 3] = [2, 3, 8];

/// Pairs of (gradients sharded, weights sharded): ZeRO levels 1, 2, 3, and weights alone.
const CUTS: [(bool, bool); 4] = [(false, false), (true, false), (true, true), (false, true)];

/// Small buckets, so that every run has several.
fn on(ranks: usize, options: &CompileOptions) -> CompileOptions {
    cut(ranks, CUTS[0], options)
}

fn cut(ranks: usize, (gradients, weights): (bool, bool), options: &CompileOptions) -> CompileOptions {
    let sharding = Sharding { ranks, bucket_bytes: Some(64 << 10), gradients, weights, ..Sharding::default() };
    CompileOptions { sharding, ..options.clone() }
}

/// The cases without clipping, because the norm adds up other blocks, and without merged linears, because sharding leaves
/// those apart that the optimizer treats differently: sums in another order.
fn unclipped() -> Vec<(String, CompileOptions)> {
    let mut cases = cases();
    for (_, options) in &mut cases {
        options.training.as_mut().unwrap().optimizer.as_mut().unwrap().max_grad_norm = 0.0;
        options.plan.passes = compiler::Pass::OPTIONAL.iter().position(|pass| *pass == compiler::Pass::MergeLinears);
        assert!(options.plan.passes.is_some());
    }
    cases
}

#[test]
fn ranks_of_which_one_has_rows_give_the_bits_of_one() {
    for (turn, (case, options)) in unclipped().into_iter().enumerate() {
        let optimizer = options.training.as_ref().unwrap().optimizer.clone().unwrap();
        // Matrices are rounded stochastically with numbers by batches of matrices, which ranks have of their own.
        let dice = matches!(optimizer.kind, OptimizerKind::NorMuon { .. }) && !optimizer.master;
        let dice = dice && options.adapter.is_none();
        let machine = Machine::cpu(1 << 30, 2);
        let alone = |micro_steps: usize| bits_after(compile(&model(), &options, &machine).unwrap(), micro_steps);
        let alone = [alone(1), alone(2)];
        // The norm's last bits are another's.
        let but_norm = |of: &[(String, Vec<u8>)]| -> Vec<(String, Vec<u8>)> {
            of.iter().filter(|(name, _)| name != program::scalar::GRADIENT_NORM).cloned().collect()
        };
        for ranks in in_turn(&RANKS, turn) {
            let found = CUTS.map(|of| {
                let program = compile(&model(), &cut(ranks, of, &options), &machine).unwrap();
                [1, 2].map(|micro_steps| bits_after(program.clone(), micro_steps))
            });
            for (number, of) in CUTS.iter().enumerate() {
                let what = format!("{case}, {ranks} ranks, cut {of:?}");
                for (several, alone) in alone.iter().enumerate() {
                    // Gradients that leave with every micro-step are added up in another order.
                    if !(dice || of.0 && several == 1) {
                        assert_same(but_norm(&found[number][several]), &but_norm(alone), &what);
                    }
                    let like = if of.0 { 1 } else { 0 };
                    assert_same(found[number][several].clone(), &found[like][several], &format!("{what}, levels"));
                }
                assert_same(found[number][0].clone(), &found[0][0], &format!("{what}, one micro-step"));
            }
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
    for (number, (case, options)) in cases().into_iter().enumerate() {
        let of = |offload: OffloadOptions| {
            let plan = PlanOptions { offload, ..options.plan.clone() };
            let options = CompileOptions { plan, ..options.clone() };
            compile(&model(), &cut(3, CUTS[number % CUTS.len()], &options), &Machine::h200()).unwrap()
        };
        let (expected, program) = (bits(of(stays)), of(moved));
        let update = program.entries.iter().find(|entry| entry.kind == EntryKind::Update).unwrap();
        assert!(update.steps.iter().any(|step| step.instruction.stream() == StreamId::ToDevice), "{case}");
        assert_same(bits(program), &expected, &case);
    }
}

/// The sums of gradients, and where ranks keep whole ones, what micro-steps have added up to: alone, with everything else,
/// and read where it lies. After the last micro-step a rank has of whole gradients the sums of its pieces alone.
#[test]
fn gradients_of_ranks_may_be_on_the_host() {
    let stays = OffloadOptions {
        optimizer: Some(false),
        master: Some(false),
        gradients: Some(false),
        slice_bytes: Some(32 << 10),
        ..OffloadOptions::default()
    };
    let alone = OffloadOptions { gradients: Some(true), ..stays };
    let all = OffloadOptions { optimizer: Some(true), master: Some(true), ..alone };
    let choices = [alone, all, OffloadOptions { zero_copy: true, ..alone }];
    for (number, (case, options)) in cases().into_iter().enumerate() {
        for (index, of_cut) in CUTS.into_iter().enumerate() {
            let ranks = RANKS[(number + index) % 2];
            let of = |offload: OffloadOptions| {
                let plan = PlanOptions { offload, ..options.plan.clone() };
                let options = CompileOptions { plan, ..options.clone() };
                compile(&model(), &cut(ranks, of_cut, &options), &Machine::h200()).unwrap()
            };
            let moved = of(choices[(number + index) % choices.len()]);
            let arena = |program: &Program| {
                program.arenas.iter().find(|arena| arena.kind == ArenaKind::Gradients).unwrap().clone()
            };
            let what = format!("{case}, {ranks} ranks, cut {of_cut:?}");
            assert!(arena(&moved).is_on_host() && arena(&of(stays)).bytes == arena(&moved).bytes, "{what}");
            for micro_steps in [1, 3] {
                let bits = |program: Program| {
                    let gradients: Vec<String> = program
                        .layout
                        .parameters
                        .iter()
                        .filter_map(|slot| Some(format!("{}: {}", slot.name, slot.gradient.as_ref()?)))
                        .filter(|_| !of_cut.0)
                        .collect();
                    let mut bits = bits_after(program, micro_steps);
                    bits.retain(|(name, _)| !gradients.contains(name));
                    bits
                };
                assert_same(bits(moved.clone()), &bits(of(stays)), &format!("{what}, {micro_steps} micro-steps"));
            }
        }
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

#[test]
fn a_rank_keeps_its_share_of_what_is_cut() {
    let bytes = |program: &Program, kind: ArenaKind| {
        program.arenas.iter().filter(|arena| arena.kind == kind).map(|arena| arena.bytes).sum::<usize>()
    };
    for (case, options) in cases() {
        let of = |gradients: bool, weights: bool| {
            compile(&model(), &cut(4, (gradients, weights), &options), &Machine::h200()).unwrap()
        };
        let whole = of(false, false);
        for (gradients, weights) in CUTS {
            let program = of(gradients, weights);
            for (kind, is_cut) in [(ArenaKind::Gradients, gradients), (ArenaKind::Weights, weights)] {
                let (all, share) = (bytes(&whole, kind), bytes(&program, kind));
                // Groups of frozen weights are filled up, too.
                let expected = if is_cut { all / 4..all / 4 + all / 16 + 1 } else { all..all + 1 };
                assert!(expected.contains(&share), "{case}: {share} of {all} bytes of {}", kind.name());
                let arena = program.arenas.iter().find(|arena| arena.kind == kind).unwrap();
                assert_eq!(!arena.shards.is_empty(), is_cut, "{case}: {}", kind.name());
            }
        }
    }
}

/// Gradients leave, and weights come, while the backward pass still computes.
#[test]
fn what_is_cut_moves_beside_the_computation() {
    let (_, options) = cases().swap_remove(0);
    for (of, entry) in [((false, false), LAST), ((true, true), "")] {
        let program = compile(&model(), &cut(2, of, &options), &Machine::h200()).unwrap();
        for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep] {
            let entry = &program.entries[program.named(kind, entry, None).unwrap()];
            let of = |movement: Movement| {
                let is_it = |instruction: &Instruction| matches!(instruction, Instruction::Collective(of) if of.movement == movement);
                let places = (0..entry.steps.len()).filter(|index| is_it(&entry.steps[*index].instruction));
                places.collect::<Vec<usize>>()
            };
            let products = |from: usize| {
                let is_it = |step: &&program::Step| matches!(step.instruction, Instruction::Gemm(_));
                entry.steps[from..].iter().filter(is_it).count()
            };
            let (exchanged, gathered) = (of(Movement::AllToAllOthers), of(Movement::AllGather));
            assert!(exchanged.len() > 4 && products(exchanged[0]) > 8, "{exchanged:?}");
            match program.arenas[0].shards.is_empty() {
                true => assert_eq!(gathered, Vec::<usize>::new()),
                false => assert!(gathered.len() > 8 && products(gathered[gathered.len() - 1]) > 1, "{gathered:?}"),
            }
        }
    }
}

/// Half the bytes, in places that are no larger, for a cast before each exchange; and the estimate knows it.
#[test]
fn gradients_in_bf16_are_half_the_bytes() {
    let (_, options) = cases().swap_remove(0);
    for of in CUTS {
        let compiled = |compression: Compression| {
            let mut options = cut(4, of, &options);
            options.sharding.compression = compression;
            compile(&model(), &options, &Machine::h200()).unwrap()
        };
        let (whole, rounded) = (compiled(Compression::None), compiled(Compression::Bf16));
        let last = |program: &Program| {
            let entry = &program.entries[program.micro_step(true, true, None).unwrap()];
            let collectives = entry.steps.iter().filter_map(|step| match &step.instruction {
                Instruction::Collective(of) if of.movement == Movement::AllToAllOthers => {
                    Some((of.from.dtype, of.to.bytes()))
                }
                _ => None,
            });
            let collectives: Vec<_> = collectives.collect();
            let casts = entry.steps.iter().filter(|step| step.provenance.op == "cast").count();
            (collectives, casts, program::estimate(entry, program, program::Seen::default()).exchanged)
        };
        let (before, after) = (last(&whole), last(&rounded));
        assert!(before.0.len() > 4 && before.0.len() == after.0.len(), "{of:?}");
        for ((a, more), (b, less)) in before.0.iter().zip(&after.0) {
            assert_eq!((a.name(), b.name(), *more), ("f32", "bf16", 2 * less), "{of:?}");
        }
        assert_eq!(after.1 - before.1, after.0.len(), "{of:?}");
        let exchanged: usize = before.0.iter().map(|(_, bytes)| bytes).sum();
        let saved = before.2 - after.2;
        assert!((saved / (exchanged as f64 * 0.75 * 0.5) - 1.0).abs() < 1e-9, "{of:?}: {saved} of {exchanged}");
        assert!(rounded.arena_bytes() <= whole.arena_bytes(), "{of:?}");
        let line = rounded.plan.iter().find(|line| line.subject == Subject::Exchange).unwrap();
        assert_eq!((line.choice, &line.reason), (Choice::Rounded(DType::BF16), &Reason::Requested));
        assert!(whole.plan.iter().all(|line| line.subject != Subject::Exchange));
        assert!(bits(rounded) != bits(whole), "{of:?}");
    }
}

/// The level is the plan's where it is left open: the lowest, unless only another fits.
#[test]
fn the_lowest_level_that_fits_is_chosen() {
    let (_, mut options) = cases().swap_remove(0);
    let stays = Some(false);
    options.plan.offload =
        OffloadOptions { optimizer: stays, master: stays, gradients: stays, residual: stays, ..Default::default() };
    let compiled = |of: Option<(bool, bool)>, limit: Option<usize>| {
        let mut options = cut(8, of.unwrap_or_default(), &options);
        options.sharding.open = of.is_none();
        options.plan.memory_limit = limit;
        compile(&model(), &options, &Machine::h200())
    };
    let needed = |of: Option<(bool, bool)>| match compiled(of, Some(1)) {
        Err(CompileError::DoesNotFit { needed, .. }) => needed,
        other => panic!("one byte is too little: {:?}", other.map(|program| program.name)),
    };
    let least = [CUTS[0], CUTS[1], CUTS[2]].map(|of| needed(Some(of)));
    assert!(least[0] > least[1] && least[1] > least[2], "{least:?}");
    assert_eq!(needed(None), least[2]);
    let chosen = |limit: Option<usize>| {
        let program = compiled(None, limit).unwrap();
        let line = program.plan.iter().find(|line| line.subject == Subject::Sharding).unwrap();
        (line.choice, line.reason.clone())
    };
    assert_eq!(chosen(None), (Choice::Level(1), Reason::Fastest));
    // What fits may be beaten by what need not recompute. Which level that is, is the machine's affair.
    let (choice, reason) = chosen(Some(least[1] + (least[0] - least[1]) / 8));
    assert!(choice.saves() && reason != Reason::Fastest, "{choice:?}, {reason:?}");
    let (choice, reason) = chosen(Some(least[2] + (least[1] - least[2]) / 8));
    assert!(choice == Choice::Level(3) && reason != Reason::Fastest, "{reason:?}");
    // A level that is written is obeyed.
    let written = compiled(Some(CUTS[1]), None).unwrap().plan[0].clone();
    assert_eq!((written.choice, written.reason), (Choice::Level(2), Reason::Requested));
}

/// With everything else decided, as little memory as with gradients on the host moves them there, at every level.
#[test]
fn gradients_of_ranks_are_moved_where_nothing_else_fits() {
    let (_, mut options) = cases().swap_remove(0);
    let stays = Some(false);
    options.plan.offload = OffloadOptions { optimizer: stays, master: stays, residual: stays, ..Default::default() };
    for of_cut in &CUTS[..3] {
        let compiled = |gradients: Option<bool>, limit: usize| {
            let mut options = cut(2, *of_cut, &options);
            options.plan.offload.gradients = gradients;
            options.plan.memory_limit = Some(limit);
            compile(&model(), &options, &Machine::h200())
        };
        let needed = |gradients: bool| match compiled(Some(gradients), 1) {
            Err(CompileError::DoesNotFit { needed, .. }) => needed,
            other => panic!("one byte is too little: {:?}", other.map(|program| program.name)),
        };
        let (most, least) = (needed(false), needed(true));
        assert!(least < most, "{of_cut:?}: {least} of {most} bytes");
        let program = compiled(None, least).unwrap();
        let line = program.plan.iter().find(|line| line.subject == Subject::Gradients).unwrap();
        assert_eq!((line.choice, &line.reason), (Choice::Offload(true), &Reason::NeededToFit), "{of_cut:?}");
        assert!(line.bytes > 0 && line.seconds > 0.0);
    }
}

/// The entries as every rank runs them.
fn of_ranks(program: &Program) -> Vec<Vec<Entry>> {
    let of = |entry: &Entry| (0..program.cluster.ranks).map(|rank| entry.of_rank(rank, program.cluster)).collect();
    program.entries.iter().map(of).collect()
}

#[test]
fn a_rank_that_departs_from_the_order_is_refused() {
    let (_, options) = cases().swap_remove(0);
    let mut tried = 0;
    let nodes = |of| {
        [
            (of, 3, 1, Compression::None),
            (of, 3, 1, Compression::Bf16),
            (of, 6, 3, Compression::Bf16),
            (of, 6, 3, Compression::Blocks(Blocks::Int8)),
            (of, 6, 3, Compression::Blocks(Blocks::OneBit)),
        ]
    };
    for (of, ranks, nodes, compression) in CUTS.into_iter().flat_map(nodes) {
        let mut options = cut(ranks, of, &options);
        (options.sharding.nodes, options.sharding.compression) = (nodes, compression);
        let program = compile(&model(), &options, &Machine::h200()).unwrap();
        tried += of_ranks(&program).into_iter().map(|ranks| departing(&ranks)).sum::<usize>();
    }
    assert!(tried > 100, "{tried} collectives");
}

/// Changes each collective of a rank in one of four ways, alternately, and returns their number.
fn departing(ranks: &[Entry]) -> usize {
    assert_eq!(check_group(ranks), Ok(()));
    let is_collective =
        |entry: &Entry, index: &usize| matches!(entry.steps[*index].instruction, Instruction::Collective(_));
    let places: Vec<usize> = (0..ranks[0].steps.len()).filter(|index| is_collective(&ranks[0], index)).collect();
    for (number, place) in places.iter().enumerate() {
        let rank = number % 3;
        let refused = |change: &dyn Fn(&mut Entry)| {
            let mut changed = ranks.to_vec();
            change(&mut changed[rank]);
            let message = check_group(&changed).expect_err("a rank does something else");
            assert!(message.contains("rank"), "{message}");
        };
        let changes: [&dyn Fn(&mut Entry); 4] = [
            &|entry| drop(entry.steps.remove(*place)),
            &|entry| {
                let Instruction::Collective(of) = &mut entry.steps[*place].instruction else {
                    unreachable!("it is one")
                };
                of.movement = if of.movement == Movement::AllGather { Movement::AllToAll } else { Movement::AllGather };
            },
            &|entry| {
                let Instruction::Collective(of) = &mut entry.steps[*place].instruction else {
                    unreachable!("it is one")
                };
                of.to.shape[0] -= 1;
            },
            &|entry| {
                let again = entry.steps[*place].clone();
                entry.steps.insert(*place, again);
            },
        ];
        in_turn(&changes, number).into_iter().for_each(refused);
    }
    places.len()
}
