//! Graph → instructions over arenas. Nothing is optimised here: the order of the nodes is the
//! order of the instructions.

use std::collections::HashSet;

use graph::{Graph, Node, Origin, Parameter, ParameterId, ValueId};
use ops::id;
use program::{
    Arena, ArenaKind, Cluster, Cost, Documents, Entry, EntryKind, Instruction, LAST, Layout, Machine, MemoryClass,
    MemoryLine, PlanDecision, Program, Provenance, Step, StreamId, TensorRef, Variant, check_group, check_order,
    scalar,
};
use tensor::{Attrs, DType};

use crate::lowering::{Lowering, fixed_places, program_layer};
use crate::memory::{ParameterPlan, SCALARS, Squares, arena, is_view, scalar_ref};
use crate::reduce::Reduction;
use crate::residency::{Homes, Move, Outline, Streams, Transfers, waiting_bytes};
use crate::{CompileError, CompileOptions, load_groups, update};

/// Lowers all graphs over one arena plan.
pub(crate) fn program(
    name: &str,
    graphs: Vec<(EntryKind, Variant, Graph)>,
    parameters: &ParameterPlan,
    plan: Vec<PlanDecision>,
    options: &CompileOptions,
    machine: &Machine,
) -> Result<Program, CompileError> {
    let table = &graphs.first().expect("at least one entry is requested").2;
    let homes = Homes::new(&options.plan.offload);
    let mut lowering = Lowering::new(machine);
    let mut entries = Vec::new();
    for (kind, variant, graph) in &graphs {
        assert!(same_table(graph, table), "all entries share one parameter table");
        for of in forms(*kind, parameters) {
            entries.push(entry(graph, of, *variant, parameters, &homes, &mut lowering));
        }
    }
    let (prepared, of_groups) = preparations(&graphs, parameters, &homes, &mut lowering);
    if let Some(optimizer) = options.training.as_ref().and_then(|t| t.optimizer.as_ref()) {
        let scales_loss = options.scales_loss();
        let changed =
            |id: &ValueId| matches!(table.value(*id).origin, Origin::Parameter(id) if table.parameter(id).trainable);
        let again = table.prepared.iter().flat_map(|node| &node.inputs).any(changed);
        for name in update::names(parameters) {
            let seed = options.seed;
            let mut update = update::entry(name, parameters, optimizer, scales_loss, seed, &homes, &mut lowering);
            if let Some(prepared) = prepared.as_ref().filter(|_| again) {
                update.steps.extend(after(&update, prepared));
            }
            entries.push(update);
        }
    }
    entries.extend(prepared.into_iter().chain(of_groups));
    fits_blocks(&entries, machine)?;
    let mut program = assemble(name, entries, parameters, lowering, plan, options, &homes);
    if options.plan.reserved > 0 {
        let (class, bytes) = (MemoryClass::Reference, options.plan.reserved);
        program.memory.push(MemoryLine {
            class,
            bytes,
            note: "weights that a loss compares with, and their forward pass",
        });
    }
    let needed: usize = program.memory.iter().map(|line| line.bytes).sum();
    let available = machine.memory.min(options.plan.memory_limit.unwrap_or(usize::MAX));
    if needed > available {
        return Err(CompileError::DoesNotFit { needed, available, limited: available < machine.memory });
    }
    Ok(program)
}

/// Checks that every kernel has the shared memory that it asks for.
fn fits_blocks(entries: &[Entry], machine: &Machine) -> Result<(), CompileError> {
    let limit = machine.arch.shared_per_block();
    for step in entries.iter().flat_map(|entry| &entry.steps) {
        let Instruction::Launch(launch) = &step.instruction else { continue };
        if let Some(call) = launch.calls.iter().find(|call| call.shared_bytes as usize > limit) {
            let (bytes, arch) = (call.shared_bytes, machine.arch);
            let at = step.provenance.at.as_ref().map(|at| format!(" ({at})")).unwrap_or_default();
            return Err(CompileError::Model(format!(
                "`{}`{at}: a block needs {bytes} bytes of shared memory, {arch} has {limit}; heads are too wide for it, or rows \
                 too long",
                launch.op
            )));
        }
    }
    Ok(())
}

/// Returns the entries that make states from parameters: one for resident parameters, if there are such states, and one
/// for each load group.
fn preparations(
    graphs: &[(EntryKind, Variant, Graph)],
    parameters: &ParameterPlan,
    homes: &Homes,
    lowering: &mut Lowering<'_>,
) -> (Option<Entry>, Vec<Entry>) {
    let (_, any, table) = graphs.first().expect("at least one entry is requested");
    let Some(mut graph) = table.preparation() else { return (None, Vec::new()) };
    let (mut stay, mut loaded) = (None, Vec::new());
    let results = std::mem::take(&mut graph.outputs);
    for (group, nodes) in load_groups::by_group(&graph, &parameters.slots) {
        graph.nodes = nodes;
        // Initial values of parameters are made of resident ones.
        graph.outputs = if group.is_none() { results.clone() } else { Vec::new() };
        let form = Form { kind: EntryKind::Prepare, leaves: false, name: "" };
        let made = Entry { variant: None, ..entry(&graph, form, *any, parameters, homes, lowering) };
        match group {
            None => stay = Some(made),
            Some(number) => loaded.push(Entry { name: number.to_string(), ..made }),
        }
    }
    (stay, loaded)
}

/// The number of the event that an instruction records or waits for.
fn event_of(instruction: &Instruction) -> Option<u32> {
    match instruction {
        Instruction::Record { event, .. } | Instruction::Wait { event, .. } => Some(event.0),
        Instruction::Launch(_)
        | Instruction::Gemm(_)
        | Instruction::AttentionForward(_)
        | Instruction::Copy { .. }
        | Instruction::Zero { .. }
        | Instruction::Transfer { .. }
        | Instruction::Collective(_) => None,
    }
}

/// Returns the steps of an entry for use after those of another, with events numbered from that entry's last on: an
/// entry records each of its events once.
fn after(before: &Entry, of: &Entry) -> Vec<Step> {
    let taken = before.steps.iter().filter_map(|step| event_of(&step.instruction)).max().map_or(0, |e| e + 1);
    let moved = |step: &Step| {
        let provenance = Provenance { phase: program::Phase::Update, ..step.provenance.clone() };
        Step { provenance, instruction: with_events_from(taken, &step.instruction), cost: step.cost }
    };
    of.steps.iter().map(moved).collect()
}

/// The same instruction, its event numbered from another one on.
fn with_events_from(first: u32, instruction: &Instruction) -> Instruction {
    let mut moved = instruction.clone();
    if let Instruction::Record { event, .. } | Instruction::Wait { event, .. } = &mut moved {
        event.0 += first;
    }
    moved
}

/// The properties of the entry that a graph is lowered to.
#[derive(Clone, Copy)]
struct Form {
    kind: EntryKind,
    /// True if its gradients go to the other ranks.
    leaves: bool,
    /// Added to the name of the entry.
    name: &'static str,
}

/// The entries of a graph. A micro-step that adds to the gradients of others exchanges them only where it is the last: then
/// it is another entry.
fn forms(kind: EntryKind, parameters: &ParameterPlan) -> Vec<Form> {
    if kind != EntryKind::FirstMicroStep {
        return vec![Form { kind, leaves: false, name: "" }];
    }
    let micro_steps = [EntryKind::FirstMicroStep, EntryKind::NextMicroStep];
    let forms = |leaves: bool, name: &'static str| micro_steps.map(|kind| Form { kind, leaves, name });
    match parameters.sharding.exchanges_last() {
        true => [forms(false, ""), forms(true, LAST)].concat(),
        false => forms(parameters.shards > 1, "").to_vec(),
    }
}

/// Checks that no entry of a program has a race or a deadlock. Panics if one has.
pub(crate) fn check(program: &Program) {
    for entry in &program.entries {
        if let Err(race) = check_entry(entry, program.cluster) {
            panic!("lowering orders transfers, collectives and computation by events: {race}");
        }
    }
}

/// Checks that an entry has no race and, where ranks meet in it, no deadlock.
fn check_entry(entry: &Entry, cluster: Cluster) -> Result<(), String> {
    match entry.steps.iter().any(|step| step.instruction.stream() == StreamId::Exchange) {
        true => {
            let all = cluster.ranks * cluster.stages;
            check_group(&(0..all).map(|rank| entry.of_rank(rank, cluster)).collect::<Vec<_>>())
        }
        false => check_order(entry),
    }
}

/// True if two graphs hold the same parameters in the same order. Numbers of values may differ: dropout
/// is computed in training alone.
fn same_table(a: &Graph, b: &Graph) -> bool {
    let described = |parameter: &Parameter| Parameter { value: ValueId(0), ..parameter.clone() };
    a.parameters.len() == b.parameters.len()
        && a.parameters.iter().zip(&b.parameters).all(|(a, b)| described(a) == described(b))
}

fn assemble(
    name: &str,
    entries: Vec<Entry>,
    parameters: &ParameterPlan,
    lowering: Lowering<'_>,
    plan: Vec<PlanDecision>,
    options: &CompileOptions,
    homes: &Homes,
) -> Program {
    let bytes = |kind: ArenaKind| parameters.bytes(kind).unwrap_or_else(|| lowering.bytes(kind));
    let arena = |kind: ArenaKind| {
        let shards = parameters.shards(kind.id());
        Arena { kind, bytes: bytes(kind), place: homes.of(kind.id()), shards }
    };
    let mut arenas = ArenaKind::ALL.map(arena).to_vec();
    while arenas.len() > arena::MASTERS.0 as usize && arenas.last().is_some_and(|arena| arena.bytes == 0) {
        arenas.pop();
    }
    let line = |arena: &Arena| MemoryLine {
        class: MemoryClass::Arena(arena.kind),
        bytes: arena.bytes,
        note: arena.kind.words(),
    };
    let mut memory: Vec<MemoryLine> = arenas.iter().filter(|arena| !arena.is_on_host()).map(line).collect();
    if lowering.machine.context_bytes > 0 {
        memory.push(MemoryLine {
            class: MemoryClass::Context,
            bytes: lowering.machine.context_bytes,
            note: "driver context, modules, library workspaces",
        });
    }
    Program {
        name: name.to_owned(),
        machine: lowering.machine.clone(),
        cluster: parameters.sharding.cluster(),
        arenas,
        layout: Layout {
            parameters: parameters.slots.clone(),
            extra: extra_state(options, parameters),
            scaling: parameters.states.histories.as_ref().map(|of| of.scaling.clone()),
        },
        constants: lowering.constants,
        scalars: SCALARS
            .iter()
            .map(|(name, _)| ((*name).to_owned(), scalar_ref(name)))
            .chain(parameters.reports().into_iter().map(|(name, at)| (name.to_owned(), at)))
            .collect(),
        kernels: lowering.kernels,
        entries,
        memory,
        activations: lowering.activations,
        phases: lowering.phases,
        plan,
        seed: options.seed,
    }
}

/// Returns the state that persists from step to step besides parameters, by name.
fn extra_state(options: &CompileOptions, parameters: &ParameterPlan) -> Vec<(String, TensorRef)> {
    let of_loss_scale = [scalar::LOSS_SCALE, scalar::LOSS_SCALE_COUNT].map(|name| (name.to_owned(), scalar_ref(name)));
    let of_loss_scale = if options.scales_loss() { of_loss_scale.to_vec() } else { Vec::new() };
    let errors = parameters.all_errors().map(|at| (scalar::GRADIENT_ERRORS.to_owned(), at));
    of_loss_scale.into_iter().chain(errors).collect()
}

/// The nodes whose results are added to what is there, instead of overwriting it. `leave`: gradients of micro-steps before
/// are elsewhere.
fn accumulating(graph: &Graph, kind: EntryKind, leave: bool) -> HashSet<usize> {
    let mut seen: HashSet<ParameterId> = HashSet::new();
    let mut result = Vec::new();
    for (parameter, value) in &graph.gradients {
        if !seen.insert(*parameter) || kind == EntryKind::NextMicroStep && !leave {
            result.push(*value);
        }
    }
    if kind != EntryKind::FirstMicroStep {
        let sums = [scalar::LOSS_SUM, scalar::WEIGHT_SUM].into_iter().chain(scalar::REPORTS);
        result.extend(sums.filter_map(|name| graph.output(name)));
    }
    let producers = graph.producers();
    let node = |id: ValueId| producers[id.0 as usize].expect("gradients and sums are computed");
    let computing = |id: ValueId| {
        // The gradient of a merged weight is computed as one and taken apart by a view.
        let mut index = node(id);
        while is_view(&graph.nodes[index]) {
            index = node(graph.nodes[index].inputs[0]);
        }
        index
    };
    result.into_iter().map(computing).collect()
}

fn entry(
    graph: &Graph,
    form: Form,
    variant: Variant,
    parameters: &ParameterPlan,
    homes: &Homes,
    lowering: &mut Lowering<'_>,
) -> Entry {
    let kind = form.kind;
    let fixed = fixed_places(graph, parameters, lowering);
    let (documents, machine) = (variant.documents, lowering.machine);
    let buffers = Outline::new(graph, &fixed, documents, machine, homes, parameters, form.leaves).pack();
    lowering.uses(buffers.usage(graph, kind), buffers.bytes);
    lowering.waiting_bytes = lowering.waiting_bytes.max(waiting_bytes(&buffers.live_ranges));
    let at = |id: &ValueId, node: usize| buffers.value(*id, node);
    let accumulating = accumulating(graph, kind, parameters.sharding.gradients);

    let mut streams = Streams::default();
    let mut transfers = Transfers::new(&buffers.live_ranges, kind);
    let mut reduction = Reduction::new(&buffers.gradient_buckets, parameters, kind);
    if let Some(shadow) = &buffers.shadow {
        let first = graph.nodes.iter().enumerate().find(|(index, _)| shadow.nodes.contains(index));
        let node = first.expect("a shadow replaces at least one node").1;
        let origin = Provenance { layer: None, at: None, ..provenance(graph, node) };
        streams.push(copy(buffers.place(&shadow.from, 0), buffers.place(&shadow.to, 0), origin));
    }
    let replaced = |index: usize| buffers.shadow.as_ref().is_some_and(|s| s.nodes.contains(&index));
    for (index, node) in graph.nodes.iter().enumerate() {
        let from = provenance(graph, node);
        transfers.before(index, &from, &mut streams);
        reduction.blank(index, &mut streams);
        reduction.send(index, &mut streams, lowering);
        for copied in buffers.copies(index) {
            streams.push(copy(buffers.place(&copied.from, index), buffers.place(&copied.to, index), from.clone()));
        }
        if !is_view(node) && !replaced(index) {
            let op = ops::get(node.op);
            let outputs: Vec<TensorRef> = node.outputs.iter().map(|id| at(id, index)).collect();
            let mut attrs = node.attrs.clone();
            if accumulating.contains(&index) {
                let supported = op.attributes().iter().any(|a| a.name == "accumulate");
                assert!(supported, "`{}` computes a gradient or a sum but cannot accumulate", node.op);
                attrs = attrs.with("accumulate", true);
            }
            let scratch = buffers.scratch[index]
                .map(|(offset, bytes)| TensorRef::dense(arena::ACTIVATIONS, offset, DType::U8, [bytes]));
            let inputs = node.inputs.iter().map(|id| at(id, index)).collect();
            let (instruction, cost) = lowering.instruction(op, &attrs, inputs, outputs, scratch, variant.documents);
            match instruction {
                // Between two nodes of the computation, which waits for it.
                Instruction::Collective(of) => {
                    streams.follow(StreamId::Exchange, &from);
                    streams.collective(of, &from);
                    let done = streams.record(StreamId::Exchange, &from);
                    streams.wait(StreamId::Compute, done, &from);
                }
                instruction => streams.push(Step { instruction, provenance: from.clone(), cost }),
            }
        }
        reduction.sum_before(index + 1, &mut streams, lowering);
        for (number, live_range) in transfers.due(index) {
            // Of several ranks they are not the sums of all yet, or have been squared.
            if live_range.closes && live_range.moves[0].home.arena == arena::GRADIENTS && parameters.shards == 1 {
                streams.steps.extend(squares(&live_range.moves[0], parameters, &from, lowering));
            }
            transfers.store(number, &from, &mut streams);
        }
    }
    let end = graph.nodes.len();
    let from = graph.nodes.last().map(|node| provenance(graph, node)).unwrap_or_default();
    let last = buffers.gradient_buckets.end(end);
    for after in end..last {
        transfers.before(after, &from, &mut streams);
        reduction.send(after, &mut streams, lowering);
        reduction.sum_before(after + 1, &mut streams, lowering);
        for (number, _) in transfers.due(after) {
            transfers.store(number, &from, &mut streams);
        }
    }
    transfers.end(last, &from, &mut streams);
    let named = |(name, id): &(String, ValueId)| (name.clone(), at(id, end));
    // State is no part of a batch: the update writes it.
    let batch = graph.inputs.iter().filter(|id| graph.value(**id).name != scalar::LOSS_SCALE);
    Entry {
        kind,
        name: [graph.entry.as_str(), form.name].concat(),
        variant: Some(variant),
        steps: streams.steps,
        inputs: batch.map(|id| (graph.value(*id).name.clone(), at(id, 0))).collect(),
        outputs: graph.outputs.iter().map(named).collect(),
        stage: Default::default(),
    }
}

/// Sums the squares of gradients while they are on the device: the norm need not read them again.
fn squares(
    gradients: &Move,
    parameters: &ParameterPlan,
    from: &Provenance,
    lowering: &mut Lowering<'_>,
) -> Option<Step> {
    let Move { home, device, .. } = gradients;
    let Squares { blocks, sums } = parameters.squares(home.offset..home.offset + home.bytes());
    if sums.is_empty() {
        return None;
    }
    let elements = device.bytes() / DType::F32.size();
    let gradients = TensorRef::dense(device.arena, device.offset, DType::F32, [elements]);
    let inputs = vec![gradients, lowering.constant(&blocks)];
    let op = ops::get(id::BLOCK_SQUARES);
    let (instruction, cost) = lowering.instruction(op, &Attrs::new(), inputs, vec![sums], None, Documents::Rows);
    Some(Step { instruction, provenance: Provenance { op: op.name().to_owned(), ..from.clone() }, cost })
}

fn copy(from: TensorRef, to: TensorRef, provenance: Provenance) -> Step {
    let cost = Cost { flops: 0.0, bytes: (from.bytes() + to.bytes()) as f64 };
    Step { instruction: Instruction::Copy { from, to }, provenance, cost }
}

fn phase(node: &Node) -> program::Phase {
    match node.phase {
        graph::Phase::Forward => program::Phase::Forward,
        graph::Phase::Recompute => program::Phase::Recompute,
        graph::Phase::Backward => program::Phase::Backward,
    }
}

fn provenance(graph: &Graph, node: &Node) -> Provenance {
    let layer = node.layer.map(|layer| program_layer(graph, layer));
    Provenance { op: ops::rowwise::names(node).join("+"), phase: phase(node), layer, at: node.at.clone() }
}
