//! The cost of a program on its machine: operations, bytes and time of an entry point. Two times: the bound at the
//! machine's ceilings, where an instruction takes the longer of its arithmetic and its traffic, and the estimate with
//! the share of these that a step reaches. Transfers run concurrently with the computation; an instruction that waits
//! for one waits in the estimate, too.

use std::collections::HashMap;

use crate::instruction::{Instruction, Step, StreamId};
use crate::memory::TensorRef;
use crate::program::{Entry, Program};
use crate::target::Arch;
use crate::work::{Cause, Seen, Times, Work, expected_times};

/// Totals of one run of an entry point.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Arithmetic operations, recomputation counted as well.
    pub flops: f64,
    /// Bytes moved, inputs and outputs of each instruction counted once.
    pub bytes: f64,
    /// Expected seconds of one run.
    pub seconds: f64,
    /// Seconds at the machine's ceilings, which no run beats.
    pub ceiling: f64,
    pub instructions: usize,
    /// Seconds, of `seconds`, in which the computation waits for transfers.
    pub waiting: f64,
    /// Bytes between device and host that transfers move.
    pub transferred: f64,
    /// Bytes that a rank gets from the others.
    pub exchanged: f64,
    /// Bytes of `exchanged` that come from other nodes.
    pub between: f64,
    /// Seconds above the ceilings, part of `seconds`, by what limits the kernels.
    pub above: [f64; Cause::ALL.len()],
}

/// Slowdown of products as a share of the time of concurrent copies between GPUs: 1.7 ms of 2.6 for a GB each way
/// between two H200 at their power limit.
const SLOWED: f64 = 0.65;

/// Bytes that a rank gets from others in a collective; none for any other instruction.
fn received(step: &Step) -> f64 {
    match &step.instruction {
        Instruction::Collective(of) => of.to.bytes() as f64 * (1.0 - 1.0 / of.group.size as f64),
        Instruction::Launch(_)
        | Instruction::Gemm(_)
        | Instruction::AttentionForward(_)
        | Instruction::Copy { .. }
        | Instruction::Zero { .. }
        | Instruction::Transfer { .. }
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => 0.0,
    }
}

/// Bytes that a transfer moves; none for any other instruction.
fn transferred(step: &Step) -> f64 {
    match &step.instruction {
        Instruction::Transfer { from, .. } => from.bytes() as f64,
        Instruction::Launch(_)
        | Instruction::Gemm(_)
        | Instruction::AttentionForward(_)
        | Instruction::Copy { .. }
        | Instruction::Zero { .. }
        | Instruction::Collective(_)
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => 0.0,
    }
}

/// Seconds of a transfer with the other direction in flight, or of a collective; none for any other instruction.
fn transfer(step: &Step, program: &Program) -> f64 {
    let machine = &program.machine;
    transferred(step) / (machine.link.both_ways / 2.0) + received(step) / machine.peer_rate()
}

/// Seconds in which an instruction of the computation reads and writes operands in host memory.
fn reaching(step: &Step, program: &Program) -> f64 {
    let on_host = |at: &&&TensorRef| program.arenas[at.arena.0 as usize].is_on_host();
    let bytes = |of: &[&TensorRef]| of.iter().filter(on_host).map(|at| at.bytes()).sum::<usize>() as f64;
    // What an update writes it has read before.
    let (read, written) = (bytes(&step.instruction.reads()), bytes(&step.instruction.writes()));
    let link = &program.machine.link;
    ((read + written) / link.one_way).max((read + 2.0 * written) / link.both_ways)
}

/// Seconds that one instruction is expected to take in a step of which products take the usual share; none for marks
/// and waits, whose time is that of others.
pub fn seconds(step: &Step, program: &Program, seen: Seen) -> f64 {
    let machine = &program.machine;
    match Work::of(step, program, seen) {
        Some(work) => expected_times(&work, machine).seconds().max(reaching(step, program)),
        None => transfer(step, program),
    }
}

/// Seconds that one instruction takes at the machine's ceilings.
pub fn ceiling(step: &Step, program: &Program, seen: Seen) -> f64 {
    let machine = &program.machine;
    let Some(work) = Work::of(step, program, seen) else { return transfer(step, program) };
    let rate = work.rate(machine);
    (work.cost().flops / rate).max(work.cost().bytes / machine.bandwidth).max(reaching(step, program))
}

/// Adds up an entry point of a program.
pub fn estimate(entry: &Entry, program: &Program, seen: Seen) -> Estimate {
    let machine = &program.machine;
    let times: Vec<Option<Times>> = entry
        .steps
        .iter()
        .map(|step| Work::of(step, program, seen).map(|work| expected_times(&work, machine)))
        .collect();
    let share = share_of_products(&times);
    let of = |index: usize, step: &Step| match &times[index] {
        Some(times) => times.within(share, machine).max(reaching(step, program)),
        None => transfer(step, program),
    };
    let (seconds, waiting) = run(entry, of);
    let exchanged: f64 = entry.steps.iter().map(received).sum();
    let between = entry.steps.iter().filter_map(|step| {
        let Instruction::Collective(of) = &step.instruction else { return None };
        Some(program.cluster.between(of) as f64)
    });
    let hidden = (exchanged / machine.peer_rate() - waiting).max(0.0);
    let slowed = if machine.arch == Arch::Cpu { 0.0 } else { SLOWED * hidden };
    let (bound, _) = run(entry, |_, step| ceiling(step, program, seen));
    let mut above = [0.0; Cause::ALL.len()];
    for (index, step) in entry.steps.iter().enumerate() {
        let Some(times) = &times[index] else { continue };
        let (took, least) = (of(index, step), ceiling(step, program, seen));
        let launches = times.launches.min(took - least).max(0.0);
        above[Cause::Launches as usize] += launches;
        above[times.cause as usize] += (took - least - launches).max(0.0);
    }
    above[Cause::Waiting as usize] += waiting + slowed;
    above[Cause::Launches as usize] += machine.efficiency.entry;
    let start = Estimate {
        seconds: seconds + slowed + machine.efficiency.entry,
        ceiling: bound,
        waiting,
        above,
        exchanged,
        between: between.sum(),
        ..Estimate::default()
    };
    entry.steps.iter().fold(start, |sum, step| {
        let cost = Work::of(step, program, seen).map_or(step.cost, |work| work.cost());
        Estimate {
            flops: sum.flops + cost.flops,
            bytes: sum.bytes + cost.bytes,
            instructions: sum.instructions + 1,
            transferred: sum.transferred + transferred(step),
            ..sum
        }
    })
}

/// Share of an entry's time that products take, as they would run by themselves for a short while.
fn share_of_products(times: &[Option<Times>]) -> f64 {
    let (products, all) = times.iter().flatten().fold((0.0, 0.0), |(products, all), of| {
        let seconds = of.seconds();
        (products + if of.cause == Cause::Products { seconds } else { 0.0 }, all + seconds)
    });
    if all > 0.0 { products / all } else { 0.0 }
}

/// Simulates the streams of an entry: seconds until the computation is done, and the part of them in which it waits.
fn run(entry: &Entry, seconds: impl Fn(usize, &Step) -> f64) -> (f64, f64) {
    let mut clocks = [0.0f64; StreamId::ALL.len()];
    let mut marks = HashMap::new();
    let mut waiting = 0.0;
    for (index, step) in entry.steps.iter().enumerate() {
        let clock = &mut clocks[step.instruction.stream() as usize];
        match &step.instruction {
            Instruction::Record { event, .. } => {
                marks.insert(*event, *clock);
            }
            Instruction::Wait { event, stream } => {
                let wait = marks.get(event).map_or(0.0, |mark: &f64| (mark - *clock).max(0.0));
                *clock += wait;
                waiting += if *stream == StreamId::Compute { wait } else { 0.0 };
            }
            Instruction::Launch(_)
            | Instruction::Gemm(_)
            | Instruction::AttentionForward(_)
            | Instruction::Copy { .. }
            | Instruction::Zero { .. }
            | Instruction::Transfer { .. }
            | Instruction::Collective(_) => *clock += seconds(index, step),
        }
    }
    (clocks[StreamId::Compute as usize], waiting)
}

/// The kind of an instruction for tables: `gemm`, `attention`, or the names of its operations.
pub fn kind_of(step: &Step) -> &str {
    match &step.instruction {
        Instruction::Gemm(_) => "gemm",
        Instruction::AttentionForward(_) => "attention",
        Instruction::Launch(_) => &step.provenance.op,
        Instruction::Copy { .. } => "copy",
        Instruction::Zero { .. } => "zero",
        Instruction::Transfer { .. } => "transfer",
        Instruction::Collective(of) => of.movement.name(),
        Instruction::Record { .. } => "record",
        Instruction::Wait { .. } => "wait",
    }
}
