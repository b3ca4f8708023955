//! Graph → instructions over arenas. Nothing is optimised here: the order of the nodes is the
//! order of the instructions.

use std::collections::{HashMap, HashSet};

use graph::{Graph, Node, Parameter, ParameterId, ValueId};
use ops::{LowerCall, Lowered};
use program::{
    Arena, ArenaId, ArenaKind, Constant, Cost, Documents, Entry, EntryKind, Instruction, Kernel, KernelCall, KernelId,
    Launch, Layer, Layout, Machine, MemoryLine, PlanDecision, Program, Provenance, Step, TensorRef, Variant,
    check_order, scalar,
};
use tensor::{Attrs, DType};

use crate::memory::{
    ALIGNMENT_BYTES, Buffers, Fixed, ParameterPlan, SCALARS, Squares, Usage, align, arena, dtype_of, is_view, place,
    plan_parameters, scalar_ref, shadow_adapters,
};
use crate::residency::{Homes, Move, Streams, Transfers, waiting_bytes};
use crate::{CompileError, CompileOptions, update};

/// What lowering collects over all entries.
pub(crate) struct Lowering<'a> {
    pub machine: &'a Machine,
    kernels: Vec<Kernel>,
    kernel_ids: HashMap<Kernel, KernelId>,
    pub constants: Vec<Constant>,
    constants_end: usize,
    pub batch_bytes: usize,
    activation_bytes: usize,
    /// Bytes of activations that wait in host memory.
    waiting_bytes: usize,
    /// What the activation arena holds at its fullest.
    activations: Vec<MemoryLine>,
    phases: Vec<MemoryLine>,
    plan: Vec<PlanDecision>,
}

impl<'a> Lowering<'a> {
    pub fn new(machine: &'a Machine) -> Self {
        Lowering {
            machine,
            kernels: Vec::new(),
            kernel_ids: HashMap::new(),
            constants: Vec::new(),
            constants_end: 0,
            batch_bytes: 0,
            activation_bytes: 0,
            waiting_bytes: 0,
            activations: Vec::new(),
            phases: Vec::new(),
            plan: Vec::new(),
        }
    }

    /// Bytes of the constants so far.
    pub fn constant_bytes(&self) -> usize {
        self.constants_end
    }

    /// Takes an entry's use of the activation arena into the plan.
    fn uses(&mut self, usage: Usage, bytes: usize) {
        if bytes >= self.activation_bytes {
            (self.activation_bytes, self.activations) = (bytes, usage.fullest);
        }
        for line in usage.phases {
            match self.phases.iter_mut().find(|known| known.class == line.class) {
                Some(known) => known.bytes = known.bytes.max(line.bytes),
                None => self.phases.push(line),
            }
        }
    }

    /// Places a constant; equal contents share one place.
    pub fn constant(&mut self, value: &tensor::HostTensor) -> TensorRef {
        if let Some(known) = self.constants.iter().find(|c| c.value == *value) {
            return known.at.clone();
        }
        let at = TensorRef::dense(arena::CONSTANTS, self.constants_end, value.dtype, value.shape.clone());
        self.constants_end = align(self.constants_end + at.bytes(), ALIGNMENT_BYTES);
        self.constants.push(Constant { at: at.clone(), value: value.clone() });
        at
    }

    pub fn into_kernels(self) -> Vec<Kernel> {
        self.kernels
    }

    fn kernel(&mut self, kernel: Kernel) -> KernelId {
        let next = KernelId(self.kernels.len() as u32);
        let id = *self.kernel_ids.entry(kernel.clone()).or_insert(next);
        if id == next {
            self.kernels.push(kernel);
        }
        id
    }

    /// Takes the first `bytes` of the activation arena for the update, when no other value occupies it.
    pub fn update_workspace(&mut self, bytes: usize) {
        let line = |class: &str| MemoryLine { class: class.into(), bytes, note: String::new() };
        let usage = Usage { fullest: vec![line("workspace")], phases: vec![line("update")] };
        if bytes > 0 {
            self.uses(usage, align(bytes, ALIGNMENT_BYTES));
        }
    }

    /// Scratch memory of an update instruction: in the activation arena, behind the `taken` bytes that values of
    /// the update occupy.
    pub fn update_scratch(
        &mut self,
        op: &dyn ops::Op,
        attrs: &Attrs,
        inputs: &[TensorRef],
        outputs: &[TensorRef],
        taken: usize,
    ) -> Option<TensorRef> {
        if self.machine.arch == program::Arch::Cpu {
            return None;
        }
        let call = LowerCall { inputs, outputs, attrs, machine: self.machine, documents: Documents::Rows };
        let bytes = op.scratch(&call);
        let start = align(taken, ALIGNMENT_BYTES);
        if bytes > 0 {
            self.update_workspace(start + bytes);
        }
        (bytes > 0).then(|| TensorRef::dense(arena::ACTIVATIONS, start, DType::U8, [bytes]))
    }

    /// One operation on placed tensors as an instruction. A program for the CPU carries no kernels.
    pub fn instruction(
        &mut self,
        op: &'static dyn ops::Op,
        attrs: &Attrs,
        inputs: Vec<TensorRef>,
        outputs: Vec<TensorRef>,
        scratch: Option<TensorRef>,
        documents: Documents,
    ) -> (Instruction, Cost) {
        let cost = op.cost(&inputs, &outputs, attrs);
        let call = LowerCall { inputs: &inputs, outputs: &outputs, attrs, machine: self.machine, documents };
        let specs = match op.lower(&call) {
            Lowered::Gemm(gemm) => return (Instruction::Gemm(*gemm), cost),
            Lowered::AttentionForward(mut attention) => {
                attention.scratch = scratch;
                return (Instruction::AttentionForward(*attention), cost);
            }
            Lowered::Kernels(specs) => specs,
        };
        let mut calls = Vec::new();
        if self.machine.arch != program::Arch::Cpu {
            for spec in specs {
                let owned = |pairs: Vec<(&str, &str)>| {
                    pairs.into_iter().map(|(name, text)| (name.to_owned(), text.to_owned())).collect()
                };
                let kernel = self.kernel(Kernel {
                    entry: spec.entry.to_owned(),
                    source: spec.source,
                    headers: owned(spec.headers),
                    defines: spec.defines,
                });
                let (grid, block, shared_bytes) = (spec.grid, spec.block, spec.shared_bytes);
                calls.push(KernelCall { kernel, grid, block, shared_bytes, args: spec.args });
            }
        }
        let launch = Launch { op: op.name().to_owned(), attrs: attrs.clone(), inputs, outputs, scratch, calls };
        (Instruction::Launch(launch), cost)
    }
}

/// Lowers all graphs over one arena plan.
pub(crate) fn program(
    name: &str,
    graphs: Vec<(EntryKind, Variant, Graph)>,
    plan: Vec<PlanDecision>,
    options: &CompileOptions,
    machine: &Machine,
) -> Result<Program, CompileError> {
    let table = &graphs.first().expect("at least one entry is requested").2;
    let parameters = plan_parameters(table, options);
    let homes = Homes::new(&options.plan.offload);
    let mut lowering = Lowering::new(machine);
    lowering.plan = plan;
    let mut entries = Vec::new();
    for (kind, variant, graph) in &graphs {
        assert!(same_table(graph, table), "all entries share one parameter table");
        let kinds: &[EntryKind] = match kind {
            EntryKind::FirstMicroStep => &[EntryKind::FirstMicroStep, EntryKind::NextMicroStep],
            other => std::slice::from_ref(other),
        };
        for kind in kinds {
            entries.push(entry(graph, *kind, *variant, &parameters, &homes, &mut lowering));
        }
    }
    if let Some(optimizer) = options.training.as_ref().and_then(|t| t.optimizer.as_ref()) {
        entries.push(update::entry(&parameters, optimizer, options.seed, &homes, &mut lowering));
    }
    for entry in &entries {
        if let Err(race) = check_order(entry) {
            panic!("lowering orders transfers and computation by events: {race}");
        }
    }
    let program = assemble(name, entries, parameters, lowering, options, &homes);
    let needed: usize = program.memory.iter().map(|line| line.bytes).sum();
    let available = machine.memory.min(options.plan.memory_limit.unwrap_or(usize::MAX));
    if needed > available {
        return Err(CompileError::DoesNotFit { needed, available, limited: available < machine.memory });
    }
    Ok(program)
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
    parameters: ParameterPlan,
    lowering: Lowering<'_>,
    options: &CompileOptions,
    homes: &Homes,
) -> Program {
    let mut kinds = vec![
        (ArenaKind::Weights, parameters.weights_bytes, "base weights"),
        (ArenaKind::Adapters, parameters.adapters_bytes, "LoRA matrices"),
        (ArenaKind::Gradients, parameters.gradients_bytes, "f32 gradients of what is trained"),
        (ArenaKind::Optimizer, parameters.optimizer_bytes, "optimizer states"),
        (ArenaKind::Batch, lowering.batch_bytes, "batch tensors"),
        (ArenaKind::Scalars, parameters.scalar_bytes(), "step scalars, sums of the gradients' squares"),
        (ArenaKind::Constants, lowering.constants_end, "tables computed while compiling"),
        (ArenaKind::Activations, lowering.activation_bytes, "values between operations, scratch included"),
        (ArenaKind::Masters, parameters.masters_bytes, "f32 copies of weights"),
        (ArenaKind::Waiting, lowering.waiting_bytes, "activations that wait for the backward pass"),
    ];
    while kinds.len() > arena::MASTERS.0 as usize && kinds.last().is_some_and(|(_, bytes, _)| *bytes == 0) {
        kinds.pop();
    }
    let place = |index: usize| homes.of(ArenaId(index as u32));
    let arenas: Vec<Arena> = kinds
        .iter()
        .enumerate()
        .map(|(index, (kind, bytes, _))| Arena { kind: *kind, bytes: *bytes, place: place(index) })
        .collect();
    let line = |(arena, (_, _, note)): (&Arena, &(ArenaKind, usize, &str))| MemoryLine {
        class: arena.kind.name().into(),
        bytes: arena.bytes,
        note: (*note).into(),
    };
    let mut memory: Vec<MemoryLine> =
        arenas.iter().zip(&kinds).filter(|(arena, _)| !arena.is_on_host()).map(line).collect();
    if lowering.machine.context_bytes > 0 {
        memory.push(MemoryLine {
            class: "context".into(),
            bytes: lowering.machine.context_bytes,
            note: "driver context, modules, library workspaces".into(),
        });
    }
    Program {
        name: name.to_owned(),
        machine: lowering.machine.clone(),
        arenas,
        layout: Layout { parameters: parameters.slots, extra: Vec::new() },
        constants: lowering.constants,
        scalars: SCALARS.iter().map(|(name, _)| ((*name).to_owned(), scalar_ref(name))).collect(),
        kernels: lowering.kernels,
        entries,
        memory,
        activations: lowering.activations,
        phases: lowering.phases,
        plan: lowering.plan,
        seed: options.seed,
    }
}

/// Places that are known before the walk over the graph.
pub(crate) fn fixed_places(graph: &Graph, parameters: &ParameterPlan, lowering: &mut Lowering<'_>) -> Fixed {
    let mut fixed = Fixed::new();
    let mut batch_end = 0;
    for id in &graph.inputs {
        let value = graph.value(*id);
        let tensor = match SCALARS.iter().any(|(name, _)| *name == value.name) {
            true => scalar_ref(&value.name),
            false => {
                let dtype = dtype_of(graph, *id);
                let tensor = TensorRef::dense(arena::BATCH, batch_end, dtype, value.shape.clone());
                batch_end = align(batch_end + tensor.bytes(), ALIGNMENT_BYTES);
                tensor
            }
        };
        fixed.insert(*id, tensor);
    }
    lowering.batch_bytes = lowering.batch_bytes.max(batch_end);
    for (parameter, slot) in graph.parameters.iter().zip(&parameters.slots) {
        fixed.insert(parameter.value, slot.weight.clone());
    }
    for (id, value) in &graph.constants {
        fixed.insert(*id, lowering.constant(value));
    }
    for (ParameterId(index), value) in &graph.gradients {
        let slot = parameters.slots[*index as usize].gradient.clone();
        fixed.insert(*value, slot.expect("gradients exist only for what is trained"));
    }
    for name in [scalar::LOSS_SUM, scalar::WEIGHT_SUM] {
        if let Some(id) = graph.output(name) {
            fixed.insert(id, scalar_ref(name));
        }
    }
    fixed
}

/// The nodes whose results are added to what is there, instead of overwriting it.
fn accumulating(graph: &Graph, kind: EntryKind) -> HashSet<usize> {
    let mut seen: Vec<ParameterId> = Vec::new();
    let mut result = Vec::new();
    for (parameter, value) in &graph.gradients {
        if kind == EntryKind::NextMicroStep || seen.contains(parameter) {
            result.push(*value);
        }
        seen.push(*parameter);
    }
    if kind != EntryKind::FirstMicroStep {
        result.extend([scalar::LOSS_SUM, scalar::WEIGHT_SUM].iter().filter_map(|name| graph.output(name)));
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
    kind: EntryKind,
    variant: Variant,
    parameters: &ParameterPlan,
    homes: &Homes,
    lowering: &mut Lowering<'_>,
) -> Entry {
    let fixed = fixed_places(graph, parameters, lowering);
    let mut placement = place(graph, &fixed);
    let shadow = shadow_adapters(graph, &mut placement);
    let buffers = Buffers::plan(graph, &placement, shadow.as_ref(), lowering.machine, variant.documents, homes);
    lowering.uses(buffers.usage(graph, kind), buffers.bytes);
    lowering.waiting_bytes = lowering.waiting_bytes.max(waiting_bytes(&buffers.stays));
    let resolve = |t: &TensorRef, node: usize| buffers.place(&placement, t, node);
    let at = |id: &ValueId, node: usize| resolve(placement.get(*id).expect("every value was placed"), node);
    let accumulating = accumulating(graph, kind);

    let mut streams = Streams::default();
    let mut transfers = Transfers::new(&buffers.stays, kind);
    if let Some(shadow) = &shadow {
        let first = graph.nodes.iter().enumerate().find(|(index, _)| shadow.nodes.contains(index));
        let node = first.expect("a shadow replaces at least one node").1;
        let origin = Provenance { layer: None, at: None, ..provenance(graph, node) };
        streams.push(copy(resolve(&shadow.from, 0), resolve(&shadow.to, 0), origin));
    }
    let replaced = |index: usize| shadow.as_ref().is_some_and(|s| s.nodes.contains(&index));
    for (index, node) in graph.nodes.iter().enumerate() {
        let from = provenance(graph, node);
        transfers.before(index, &from, &mut streams);
        for copied in placement.copies.get(&index).into_iter().flatten() {
            streams.push(copy(resolve(&copied.from, index), resolve(&copied.to, index), from.clone()));
        }
        if !is_view(node) && !replaced(index) {
            let op = ops::find(&node.op).expect("the verifier knows every operation");
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
            streams.push(Step { instruction, provenance: from.clone(), cost });
        }
        for (number, stay) in transfers.due(index) {
            if stay.closes && stay.moves[0].home.arena == arena::GRADIENTS {
                streams.steps.extend(squares(&stay.moves[0], parameters, &from, lowering));
            }
            transfers.store(number, &from, &mut streams);
        }
    }
    let end = graph.nodes.len();
    transfers.end(end, &graph.nodes.last().map(|node| provenance(graph, node)).unwrap_or_default(), &mut streams);
    let named = |(name, id): &(String, ValueId)| (name.clone(), at(id, end));
    Entry {
        kind,
        name: graph.entry.clone(),
        variant: Some(variant),
        steps: streams.steps,
        inputs: graph.inputs.iter().map(|id| (graph.value(*id).name.clone(), at(id, 0))).collect(),
        outputs: graph.outputs.iter().map(named).collect(),
    }
}

/// Sums the squares of gradients while they are on the device: the norm needs no second look at them.
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
    let op = ops::find("block_squares").expect("the norm needs the squares of blocks");
    let (instruction, cost) = lowering.instruction(op, &Attrs::new(), inputs, vec![sums], None, Documents::Rows);
    Some(Step { instruction, provenance: Provenance { op: op.name().to_owned(), ..from.clone() }, cost })
}

fn copy(from: TensorRef, to: TensorRef, provenance: Provenance) -> Step {
    let cost = Cost { flops: 0.0, bytes: (from.bytes() + to.bytes()) as f64 };
    Step { instruction: Instruction::Copy { from, to }, provenance, cost }
}

/// A layer as programs tell it.
pub(crate) fn told(graph: &Graph, layer: graph::Layer) -> Layer {
    Layer { stack: graph.stack_name(layer).into(), index: layer.index as usize }
}

fn provenance(graph: &Graph, node: &Node) -> Provenance {
    let layer = node.layer.map(|layer| told(graph, layer));
    Provenance { op: node.op.clone(), phase: node.phase.name(), layer, at: node.at.clone() }
}
