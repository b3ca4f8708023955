//! Programs of several nodes that share inside each node: the bits of one rank where only one has something to do, sums over
//! all nodes once a step, and as many bytes between nodes as that takes.

use std::sync::Arc;

use crate::support::training::{assert_same, bits, bits_after, cases, fill, model, numbers, read, write};
use crate::support::{self, VARIANT, in_turn};
use compiler::{
    AdapterOptions, Blocks, CompileError, CompileOptions, Compression, OffloadOptions, OptimizerKind, Scope, Sharding,
    compile,
};
use program::{
    ArenaKind, Backend, Choice, EntryKind, Instruction, Machine, ProcessGroup, Program, Reason, Session, Subject,
    TensorRef, scalar,
};

/// Ranks and nodes: parts of a bucket fill it, and do not.
const CLUSTERS: [(usize, usize); 4] = [(2, 2), (3, 3), (4, 2), (6, 3)];

/// Levels 1, 2 and 3.
const LEVELS: [(bool, bool); 3] = [(false, false), (true, false), (true, true)];

fn on((ranks, nodes): (usize, usize), (gradients, weights): (bool, bool), options: &CompileOptions) -> CompileOptions {
    let bucket_bytes = Some(64 << 10);
    let sharding = Sharding { ranks, nodes, bucket_bytes, gradients, weights, ..Sharding::default() };
    CompileOptions { sharding, ..options.clone() }
}

fn compiled(options: &CompileOptions) -> Program {
    compile(&model(), options, &Machine::cpu(1 << 30, 2)).unwrap()
}

#[test]
fn nodes_of_which_one_rank_has_rows_give_the_bits_of_one() {
    for (turn, (case, mut options)) in cases().into_iter().enumerate() {
        let optimizer = options.training.as_mut().unwrap().optimizer.as_mut().unwrap();
        // The norm adds up other blocks.
        optimizer.max_grad_norm = 0.0;
        // Matrices are rounded stochastically with numbers by batches of matrices, which ranks have of their own.
        let dice = matches!(optimizer.kind, OptimizerKind::NorMuon { .. }) && !optimizer.master;
        let dice = dice && options.adapter.is_none();
        // Sharding leaves linears apart that the optimizer treats differently.
        options.plan.passes = compiler::Pass::OPTIONAL.iter().position(|pass| *pass == compiler::Pass::MergeLinears);
        let but_norm = |of: Vec<(String, Vec<u8>)>| -> Vec<(String, Vec<u8>)> {
            of.into_iter().filter(|(name, _)| name != program::scalar::GRADIENT_NORM).collect()
        };
        let alone = but_norm(bits_after(compiled(&options), 1));
        for cluster in in_turn(&CLUSTERS, turn) {
            let found = LEVELS.map(|of| bits_after(compiled(&on(cluster, of, &options)), 1));
            let what = format!("{case}, {cluster:?}");
            if !dice {
                assert_same(but_norm(found[0].clone()), &alone, &what);
            }
            assert_same(found[1].clone(), &found[0], &format!("{what}, levels 1 and 2"));
            assert_same(found[2].clone(), &found[0], &format!("{what}, levels 1 and 3"));
            let [second, third] = [1, 2].map(|level| bits_after(compiled(&on(cluster, LEVELS[level], &options)), 3));
            assert_same(third, &second, &format!("{what}, levels 2 and 3, three micro-steps"));
        }
    }
}

/// A rank keeps the share of a node, as much as without the other nodes.
#[test]
fn a_rank_keeps_its_share_of_a_node() {
    for (case, options) in cases() {
        let node = compiled(&on((2, 1), LEVELS[2], &options));
        let several = compiled(&on((6, 3), LEVELS[2], &options));
        for kind in [ArenaKind::Weights, ArenaKind::Gradients, ArenaKind::Optimizer, ArenaKind::Masters] {
            let bytes = |of: &Program| of.arenas.iter().find(|arena| arena.kind == kind).map(|arena| arena.bytes);
            assert_eq!(bytes(&several), bytes(&node), "{case}: {}", kind.name());
        }
    }
}

/// Bytes that a rank gets from other nodes in the entries of a step, by what kind of entry; after a warm-up.
fn between(program: &Program, kind: EntryKind) -> usize {
    let update = program.update(true).map(|index| &program.entries[index]);
    let entries = program.entries.iter().filter(|entry| entry.kind == kind);
    let entries = entries.filter(|entry| kind != EntryKind::Update || Some(*entry) == update);
    let all = entries.flat_map(|entry| &entry.steps).filter_map(|step| match &step.instruction {
        Instruction::Collective(of) => Some(program.cluster.between(of)),
        _ => None,
    });
    all.sum()
}

/// One value of every kind of gradient compression.
const COMPRESSIONS: [Compression; 5] = [
    Compression::None,
    Compression::Bf16,
    Compression::Blocks(Blocks::Int8),
    Compression::Blocks(Blocks::TopK),
    Compression::Blocks(Blocks::OneBit),
];

/// Bytes that come of an element: from all other nodes, and once or twice a part of each.
fn bytes(of: Compression, nodes: usize) -> f64 {
    let others = (nodes - 1) as f64;
    let twice = 2.0 * others / nodes as f64;
    match of {
        Compression::None => twice * 4.0,
        Compression::Bf16 => twice * 2.0,
        Compression::Blocks(Blocks::Int8) => twice * 260.0 / 256.0,
        Compression::Blocks(Blocks::TopK) => others * 80.0 / 256.0,
        Compression::Blocks(Blocks::OneBit) => twice * 36.0 / 256.0,
    }
}

/// The share of a rank goes through its inter-node group twice, or those of all nodes once, whatever the level and the
/// number of micro-steps; of all ranks' pieces far more do.
#[test]
fn a_share_goes_between_nodes_once_a_step() {
    let (_, options) = cases().swap_remove(0);
    for (ranks, nodes) in [(2, 2), (4, 2), (6, 3), (8, 2)] {
        for of in LEVELS {
            for compression in COMPRESSIONS {
                let mut options = on((ranks, nodes), of, &options);
                options.sharding.compression = compression;
                let program = compiled(&options);
                let gradients = program.arenas.iter().find(|arena| arena.kind == ArenaKind::Gradients).unwrap();
                let cut =
                    program.arenas.iter().any(|arena| arena.kind == ArenaKind::Gradients && !arena.shards.is_empty());
                let share = gradients.bytes / 4 / if cut { 1 } else { ranks / nodes };
                let exact = share as f64 * bytes(compression, nodes);
                let found = between(&program, EntryKind::Update) as f64;
                assert!((1.0..1.1).contains(&(found / exact)), "{ranks} of {nodes}, {of:?}: {found} of {exact}");
                for kind in [EntryKind::FirstMicroStep, EntryKind::NextMicroStep] {
                    assert_eq!(between(&program, kind), 0);
                }
                options.sharding.scope = Scope::World;
                let world = compiled(&options);
                let all: usize =
                    [EntryKind::FirstMicroStep, EntryKind::Update].map(|kind| between(&world, kind)).iter().sum();
                assert!(nodes == ranks || all as f64 > found, "{ranks} of {nodes}, {of:?}: {all}, {found}");
            }
        }
    }
}

/// Ranks with the same share are as many apart as a node has.
#[test]
fn sums_are_those_of_an_inter_node_group() {
    let (_, options) = cases().swap_remove(0);
    let program = compiled(&on((6, 3), LEVELS[1], &options));
    let groups = program.entries.iter().flat_map(|entry| &entry.steps).filter_map(|step| match &step.instruction {
        Instruction::Collective(of) => Some(of.group),
        _ => None,
    });
    let groups: Vec<ProcessGroup> = groups.collect();
    let between = ProcessGroup { size: 3, stride: 2 };
    assert!(
        groups.contains(&between) && groups.contains(&ProcessGroup::row(2)) && groups.contains(&ProcessGroup::row(6))
    );
    assert_eq!([0, 1, 2].map(|number| between.member(3, number)), [1, 3, 5]);
    assert_eq!([1, 3, 5].map(|rank| between.number(rank)), [0, 1, 2]);
    assert!(between.divides(6) && !between.divides(9));
}

#[test]
fn gradients_in_bf16_travel_between_nodes() {
    let (_, options) = cases().swap_remove(0);
    for cluster in CLUSTERS {
        let of = |compression: Compression| {
            let mut options = on(cluster, LEVELS[0], &options);
            options.sharding.compression = compression;
            bits(compiled(&options))
        };
        assert!(of(Compression::Bf16) != of(Compression::None), "{cluster:?}: nothing was rounded");
        assert_same(of(Compression::Bf16), &of(Compression::Bf16), "run again");
    }
}

/// A step whose targets have this weight each. Of 1-bit Adam the first is the warm-up.
fn step(session: &mut dyn Session, program: &Program, number: usize, weight: f32) {
    let entry = program.micro_step(true, true, Some(VARIANT)).unwrap();
    for (name, at) in &program.entries[entry].inputs {
        match name.as_str() {
            "weights" => write(session, at, std::iter::repeat(weight)),
            _ => fill(session, name, at, number),
        }
    }
    session.run(entry).unwrap();
    let scalars = [(scalar::LEARNING_RATE, 1e-2), (scalar::BIAS_CORRECTION_1, 0.1), (scalar::BIAS_CORRECTION_2, 1e-3)];
    scalars.iter().for_each(|(name, value)| write(session, program.scalar(name).unwrap(), std::iter::once(*value)));
    session.run(program.update(number > 0).unwrap()).unwrap();
}

/// The tensors that a checkpoint of the program saves.
fn states(program: &Program) -> Vec<TensorRef> {
    let of = program.layout.parameters.iter();
    let of = of.flat_map(|slot| std::iter::once(&slot.weight).chain(slot.states.iter().map(|state| &state.at)));
    of.chain(program.layout.extra.iter().map(|(_, at)| at)).cloned().collect()
}

/// Runs whose gradients do not lie without gaps.
fn with_gaps(blocks: Blocks) -> Vec<(String, Arc<Program>)> {
    let (_, mut options) = cases().swap_remove(0);
    (options.weights, options.compute) = (tensor::DType::F32, tensor::DType::F32);
    options.adapter = Some(AdapterOptions { rank: 4, ..support::adapter() });
    let clusters = CLUSTERS.into_iter().flat_map(|cluster| LEVELS.map(|level| (cluster, level)));
    let compiled = |(cluster, level)| {
        let mut options = on(cluster, level, &options);
        options.sharding.compression = Compression::Blocks(blocks);
        (format!("{blocks:?}, {cluster:?}, {level:?}"), Arc::new(compiled(&options)))
    };
    clusters.map(compiled).collect()
}

fn begun(program: &Arc<Program>) -> Box<dyn Session> {
    let mut session = cpu::CpuBackend::new(Some(2)).unwrap().load(program.clone()).unwrap();
    for (index, slot) in program.layout.parameters.iter().enumerate() {
        write(session.as_mut(), &slot.weight, numbers(index));
    }
    session
}

/// Only what a checkpoint holds says what comes next.
#[test]
fn what_was_summed_is_no_part_of_the_next_norm() {
    for (what, program) in [Blocks::Int8, Blocks::TopK, Blocks::OneBit].into_iter().flat_map(with_gaps) {
        let mut straight = begun(&program);
        (0..4).for_each(|number| step(straight.as_mut(), &program, number, 0.01));
        let mut again = begun(&program);
        for at in states(&program) {
            again.write(&at, &read(straight.as_mut(), &at)).unwrap();
        }
        let [expected, found] = [&mut straight, &mut again].map(|session| {
            step(session.as_mut(), &program, 4, 0.01);
            let scalars = [scalar::GRADIENT_NORM, scalar::LOSS_SUM].map(|name| program.scalar(name).unwrap().clone());
            let all = scalars.into_iter().chain(states(&program));
            all.map(|at| (at.to_string(), read(session.as_mut(), &at))).collect::<Vec<_>>()
        });
        assert_same(found, &expected, &what);
    }
}

#[test]
fn an_update_that_was_suppressed_leaves_nothing() {
    for (what, program) in [Blocks::Int8, Blocks::TopK, Blocks::OneBit].into_iter().flat_map(with_gaps) {
        let mut session = begun(&program);
        let applied = [0.01, 0.01, f32::NAN, 0.01, 0.01].into_iter().enumerate().map(|(number, weight)| {
            step(session.as_mut(), &program, number, weight);
            read(session.as_mut(), program.scalar(scalar::UPDATE_APPLIED).unwrap()) != [0; 4]
        });
        assert_eq!(applied.collect::<Vec<_>>(), [true, true, false, true, true], "{what}");
    }
}

/// Shards are those of a node unless only those of all fit.
#[test]
fn all_nodes_share_where_nothing_else_fits() {
    let (_, mut options) = cases().swap_remove(0);
    let stays = Some(false);
    options.plan.offload =
        OffloadOptions { optimizer: stays, master: stays, gradients: stays, residual: stays, ..Default::default() };
    let compiled = |scope: Option<Scope>, limit: Option<usize>| {
        let mut options = on((8, 4), LEVELS[0], &options);
        options.sharding.open = true;
        (options.sharding.scope, options.sharding.open_scope) = (scope.unwrap_or_default(), scope.is_none());
        options.plan.memory_limit = limit;
        compile(&model(), &options, &Machine::h200())
    };
    let needed = |scope: Option<Scope>| match compiled(scope, Some(1)) {
        Err(CompileError::DoesNotFit { needed, .. }) => needed,
        other => panic!("one byte is too little: {:?}", other.map(|program| program.name)),
    };
    let (node, world) = (needed(Some(Scope::Node)), needed(Some(Scope::World)));
    assert!(node > world && needed(None) == world, "{node}, {world}");
    let chosen = |scope: Option<Scope>, limit: Option<usize>| {
        let program = compiled(scope, limit).unwrap();
        let line = program.plan.iter().find(|line| line.subject == Subject::Scope).unwrap();
        assert_eq!(line.choice == Choice::AllNodes(true), program.cluster.shards == 8);
        (line.choice, line.reason.clone())
    };
    assert_eq!(chosen(None, None), (Choice::AllNodes(false), Reason::Fastest));
    assert_eq!(chosen(None, Some(node - 1)), (Choice::AllNodes(true), Reason::NeededToFit));
    assert_eq!(chosen(Some(Scope::World), None), (Choice::AllNodes(true), Reason::Requested));
}
