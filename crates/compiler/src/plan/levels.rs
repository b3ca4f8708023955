//! The choice of the ZeRO level, as far as the options leave it open: ranks share the optimizer states, unless a higher
//! level makes the run fit, or takes less time than the other ways to make it fit; among the ranks of a node, unless
//! only all ranks make it fit. Knows programs and their expected times; not how one is made.

use program::{Choice, EntryKind, PlanDecision, Program, Reason, Subject};

use super::MARGIN;
use super::states::{recompute_seconds, step_seconds};
use crate::CompileError;
use crate::options::{CompileOptions, Compression, Scope};

/// The program of [`lowest_level`] that shares among the ranks of a node, or of all where nothing of that fits.
pub(crate) fn nearest_scope(
    options: &CompileOptions,
    mut compiled: impl FnMut(&CompileOptions) -> Result<Program, CompileError>,
) -> Result<Program, CompileError> {
    let scopes = options.sharding.scopes();
    let mut result = None;
    for sharding in &scopes {
        let mut found = lowest_level(&CompileOptions { sharding: *sharding, ..options.clone() }, &mut compiled);
        if let Some(program) = found.as_mut().ok().filter(|_| sharding.nodes > 1) {
            let reason = match (scopes.len(), sharding.scope) {
                (1, _) => Reason::Requested,
                (_, Scope::Node) => Reason::Fastest,
                (_, Scope::World) => Reason::NeededToFit,
            };
            let choice = Choice::AllNodes(sharding.scope == Scope::World);
            program.plan.insert(0, line(Subject::Scope, choice, reason, options));
        }
        let is_small = !matches!(found, Err(CompileError::DoesNotFit { .. }));
        result = Some(found);
        if is_small {
            break;
        }
    }
    result.expect("there is at least one scope")
}

/// The program of the lowest level whose expected step is within [`MARGIN`] of the shortest.
fn lowest_level(
    options: &CompileOptions,
    mut compiled: impl FnMut(&CompileOptions) -> Result<Program, CompileError>,
) -> Result<Program, CompileError> {
    let levels = options.sharding.levels();
    let micro_steps = options.plan.micro_steps.max(1) as f64;
    let mut best: Option<(f64, Program)> = None;
    let mut failed = None;
    for sharding in &levels {
        let mut program = match compiled(&CompileOptions { sharding: *sharding, ..options.clone() }) {
            Ok(program) => program,
            Err(error @ CompileError::DoesNotFit { .. }) => {
                failed = Some(error);
                continue;
            }
            Err(other) => return Err(other),
        };
        let (step, nothing_more) = (step_seconds(&program, micro_steps), recompute_seconds(&program) == 0.0);
        if best.as_ref().is_none_or(|(least, _)| step < least / (1.0 + MARGIN)) {
            let reason = match &best {
                _ if levels.len() == 1 => Reason::Requested,
                Some(_) => Reason::FasterThanRecompute,
                None if failed.is_some() => Reason::NeededToFit,
                None => Reason::Fastest,
            };
            if sharding.ranks > 1 && sharding.compression != Compression::None {
                let choice = match sharding.compression {
                    Compression::Blocks(blocks) => Choice::Compressed(blocks.name()),
                    Compression::None | Compression::Bf16 => Choice::Rounded(sharding.sent()),
                };
                program.plan.insert(0, line(Subject::Exchange, choice, Reason::Requested, options));
            }
            if let Some(level) = sharding.level().filter(|_| sharding.ranks > 1) {
                let bytes = freed(&program);
                let line = line(Subject::Sharding, Choice::Level(level), reason, options);
                program.plan.insert(0, PlanDecision { bytes, ..line });
            }
            best = Some((step, program));
        }
        if nothing_more {
            break;
        }
    }
    match (best, failed) {
        (Some((_, program)), _) => Ok(program),
        (None, failed) => Err(failed.expect("there is at least one level")),
    }
}

/// Bytes that a rank need not keep because others of its group do.
fn freed(program: &Program) -> usize {
    let cut = program.arenas.iter().filter(|arena| !arena.kind.is_of_rank());
    let pieces: usize = cut.flat_map(|arena| &arena.shards).map(|shard| shard.piece).sum();
    pieces * (program.cluster.shards - 1)
}

fn line(subject: Subject, choice: Choice, reason: Reason, options: &CompileOptions) -> PlanDecision {
    PlanDecision {
        entry: EntryKind::Update,
        variant: options.variants[0],
        subject,
        layers: Vec::new(),
        choice,
        reason,
        bytes: 0,
        seconds: 0.0,
    }
}
