//! The results of lowering all entries: kernels, constants, and the used bytes of the shared arenas. Knows one
//! operation at a time; not the order of any.

use std::collections::HashMap;

use graph::{Graph, ParameterId};
use ops::{LowerCall, Lowered};
use program::{
    ArenaKind, Collective, Constant, Cost, Documents, Instruction, Kernel, KernelCall, KernelId, Launch, Layer,
    Machine, MemoryLine, Movement, ProcessGroup, TensorRef, scalar,
};
use tensor::{Attrs, DType};

use crate::memory::{ALIGNMENT_BYTES, Fixed, ParameterPlan, SCALARS, align, arena, dtype_of, scalar_ref};
use crate::residency::Usage;

/// The results of lowering, collected over all entries.
pub(crate) struct Lowering<'a> {
    pub machine: &'a Machine,
    pub kernels: Vec<Kernel>,
    kernel_ids: HashMap<Kernel, KernelId>,
    pub constants: Vec<Constant>,
    pub constants_end: usize,
    pub batch_bytes: usize,
    pub activation_bytes: usize,
    /// Bytes of activations that wait in host memory.
    pub waiting_bytes: usize,
    /// The contents of the activation arena at its fullest.
    pub activations: Vec<MemoryLine<&'static str>>,
    pub phases: Vec<MemoryLine<&'static str>>,
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
        }
    }

    /// Takes an entry's use of the activation arena into the plan.
    pub fn uses(&mut self, usage: Usage, bytes: usize) {
        if bytes >= self.activation_bytes {
            (self.activation_bytes, self.activations) = (bytes, usage.fullest);
        }
        self.phases = MemoryLine::greatest(self.phases.drain(..).chain(usage.phases));
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

    fn kernel(&mut self, kernel: Kernel) -> KernelId {
        let next = KernelId(self.kernels.len() as u32);
        let id = *self.kernel_ids.entry(kernel.clone()).or_insert(next);
        if id == next {
            self.kernels.push(kernel);
        }
        id
    }

    /// Bytes of an arena that entries fill; 0 of all others.
    pub fn bytes(&self, of: ArenaKind) -> usize {
        match of {
            ArenaKind::Batch => self.batch_bytes,
            ArenaKind::Constants => self.constants_end,
            ArenaKind::Activations => self.activation_bytes,
            ArenaKind::Waiting => self.waiting_bytes,
            ArenaKind::Weights
            | ArenaKind::Adapters
            | ArenaKind::Gradients
            | ArenaKind::Optimizer
            | ArenaKind::Scalars
            | ArenaKind::Masters
            | ArenaKind::States
            | ArenaKind::Quants
            | ArenaKind::Cache
            | ArenaKind::Errors => 0,
        }
    }

    /// Takes the first `bytes` of the activation arena for the update, when no other value occupies it.
    pub fn update_workspace(&mut self, bytes: usize) {
        let line = |class| MemoryLine { class, bytes, note: "" };
        let usage = Usage { fullest: vec![line("workspace")], phases: vec![line("update")] };
        if bytes > 0 {
            self.uses(usage, align(bytes, ALIGNMENT_BYTES));
        }
    }

    /// Scratch memory of an update instruction: in the activation arena, after the `taken` bytes that values of the
    /// update occupy.
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
            Lowered::Copy { from, to } => return (Instruction::Copy { from, to }, cost),
            Lowered::Exchange { among } => {
                let (from, to) = (inputs[0].clone(), outputs[0].clone());
                let group = ProcessGroup::row(among);
                return (Instruction::Collective(Collective { movement: Movement::AllToAll, group, from, to }), cost);
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
        let (op, arithmetic, attrs) = (op.name().to_owned(), op.arithmetic(&call), attrs.clone());
        let launch = Launch { op, attrs, inputs, outputs, scratch, arithmetic, calls };
        (Instruction::Launch(launch), cost)
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
    lowering.batch_bytes = lowering.batch_bytes.max(batch_end * parameters.sharding.slots());
    for (parameter, slot) in graph.parameters.iter().zip(&parameters.slots) {
        fixed.insert(parameter.value, slot.weight.clone());
    }
    let states = &parameters.states.places;
    for (id, at) in graph.states.iter().zip(states) {
        fixed.extend(at.clone().map(|at| (*id, at)));
    }
    for (value, state) in &graph.stored {
        let at = states[state.0 as usize].clone();
        fixed.insert(*value, at.expect("what an entry stores outlives it"));
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
    for (name, at) in parameters.reports() {
        fixed.extend(graph.output(name).map(|id| (id, at)));
    }
    fixed
}

/// A layer as programs name it.
pub(crate) fn program_layer(graph: &Graph, layer: graph::Layer) -> Layer {
    Layer { stack: graph.stack_name(layer).into(), index: layer.index as usize }
}
