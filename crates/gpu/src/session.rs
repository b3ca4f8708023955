//! A loaded program on one GPU: its memory, its bound instructions, and running an entry point.

use crate::algorithms::Algorithms;
use crate::codes;
use crate::driver::{DeviceBuffer, Event, Graph};
use crate::engine::{Engine, Options};
use crate::error::{During, Error, Result};
use crate::prepare::{BoundInstruction, Events, Kernels, Memory, PlannedInstruction, Preparation};
use crate::transfer::{Downloads, Readings, Uploads};
use program::{
    BackendError, Choices, Entry, EntryKind, Instruction, MemoryClass, MemoryLine, Movement, ProcessGroup, Program,
    Reading, Session, Step, TensorRef,
};
use std::sync::Arc;
use std::time::Instant;

/// The note of the memory line of an arena that is not on the device.
const ON_HOST: &str = "on the host";

/// One entry point, ready to run.
struct BoundEntry {
    steps: Vec<BoundInstruction>,
    runs: usize,
    graph: Option<Graph>,
}

/// A program loaded onto a GPU. The fields are dropped in order: users of memory are dropped before it.
pub struct GpuSession {
    program: Arc<Program>,
    entries: Vec<BoundEntry>,
    readings: Readings,
    uploads: Uploads,
    downloads: Downloads,
    kernels: Kernels,
    memory: Memory,
    workspace: DeviceBuffer,
    engine: Engine,
    check_each: bool,
    graphs: bool,
    load_times: Vec<(&'static str, f64)>,
    /// The function that is shown programs, where functions of this process replace libraries.
    shown: Option<fn(&Program, &[u64])>,
}

impl GpuSession {
    /// Opens the GPU, allocates the arenas (zeroed), writes the constants, prepares every instruction.
    pub fn new(program: Arc<Program>, options: &Options) -> std::result::Result<GpuSession, BackendError> {
        Self::load(program, options).map_err(backend_error)
    }

    pub(crate) fn load(program: Arc<Program>, options: &Options) -> Result<GpuSession> {
        let mut clock = Clock::start();
        let mut engine = Engine::new(options)?;
        check_architecture(&program, &engine)?;
        clock.stop("device and libraries");
        let memory = Memory::allocate(&program.arenas, &engine.device)?;
        let shown = options.search.given.and_then(|given| given.program);
        shown.inspect(|show| show(&program, &memory.addresses()));
        clock.stop("memory");
        let kernels = Kernels::new(&engine, &program.kernels)?;
        clock.stop("kernels");
        let planned = plan_entries(&program, &mut engine, &memory, &kernels, |_| true)?;
        clock.stop("products and attention");
        // After planning, which uses the arenas for its measurements.
        memory.zero(&engine.stream, |_| true)?;
        write_constants(&program, &engine, &memory)?;
        let workspace = workspace_for(&planned, &engine)?;
        let entries = bind_entries(planned, &engine, &workspace)?;
        engine.stream.synchronise()?;
        clock.stop("zeros and constants");
        let load_times = clock.times;
        let (check_each, graphs) = (options.check_each, options.graphs && !options.check_each);
        let (readings, uploads) = (Readings::default(), Uploads::new(&engine.device)?);
        Ok(GpuSession {
            program,
            entries,
            readings,
            uploads,
            downloads: Downloads::default(),
            kernels,
            memory,
            workspace,
            engine,
            check_each,
            graphs,
            load_times,
            shown,
        })
    }

    /// Prepares the entries of another program over the same layout. Kernels are kept, and so are entries with their
    /// graphs, unless memory that they use has to grow. Returns for each entry the one before that was kept.
    pub(crate) fn replace_entries(&mut self, program: Arc<Program>) -> Result<Vec<Option<usize>>> {
        assert!(program.has_layout_of(&self.program), "a session goes on over the layout that it was loaded with");
        self.engine.device.bind()?;
        self.engine.synchronise()?;
        let mut known = self.known_entries(&program);
        let mut before: Vec<_> = std::mem::take(&mut self.entries).into_iter().map(Some).collect();
        let mut found: Vec<Option<BoundEntry>> = known.iter().map(|index| before[(*index)?].take()).collect();
        // Graphs of dropped entries are dropped before their memory.
        drop(before);
        self.memory.adopt(&program.arenas, &self.engine.device)?;
        self.shown.inspect(|show| show(&program, &self.memory.addresses()));
        self.kernels.adopt(&self.engine, &self.program.kernels, &program.kernels)?;
        let (engine, memory, kernels) = (&mut self.engine, &self.memory, &self.kernels);
        let mut planned = plan_entries(&program, engine, memory, kernels, |i| found[i].is_none())?;
        if workspace_of(&planned) > self.workspace.len() {
            known.fill(None);
            found.iter_mut().for_each(|entry| *entry = None);
            planned = plan_entries(&program, engine, memory, kernels, |_| true)?;
            self.workspace = workspace_for(&planned, engine)?;
        }
        write_constants(&program, &self.engine, &self.memory)?;
        let new = bind_entries(planned, &self.engine, &self.workspace)?;
        self.entries = found.into_iter().zip(new).map(|(known, new)| known.unwrap_or(new)).collect();
        self.engine.stream.synchronise()?;
        self.program = program;
        Ok(known)
    }

    /// Returns for each entry of another program over the same layout the one that is here; none where memory has to
    /// grow, because entries and graphs hold its addresses.
    pub(crate) fn known_entries(&self, program: &Program) -> Vec<Option<usize>> {
        match self.memory.holds(&program.arenas) {
            // After a change that failed there is none.
            true if self.entries.len() == self.program.entries.len() => program.entries_of(&self.program),
            _ => vec![None; program.entries.len()],
        }
    }

    /// Returns the algorithm of every product: given to [`Options::algorithms`], a later session has the same.
    pub fn algorithms(&self) -> &Algorithms {
        self.engine.chooser.chosen()
    }

    /// Bytes that libraries use besides the arenas, one instruction at a time.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.len()
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the movement and the process groups of a collective; `None` for any other instruction.
    pub(crate) fn joint(&self, entry: usize, index: usize) -> Option<(Movement, ProcessGroup)> {
        match &self.program.entries[entry].steps[index].instruction {
            Instruction::Collective(of) => Some((of.movement, of.group)),
            _ => None,
        }
    }

    /// Returns the addresses of a collective's input and result on this rank, and the bytes of the input.
    pub(crate) fn joint_places(&self, entry: usize, index: usize) -> (u64, u64, usize) {
        let Instruction::Collective(of) = &self.program.entries[entry].steps[index].instruction else {
            panic!("ranks have one program");
        };
        (self.memory.address(&of.from), self.memory.address(&of.to), of.from.bytes())
    }

    /// Returns the address of a tensor of the program.
    pub(crate) fn address(&self, at: &TensorRef) -> u64 {
        self.memory.address(at)
    }

    /// Prefers these algorithms for products that have none yet.
    pub(crate) fn prefer(&mut self, algorithms: &Algorithms) {
        self.engine.chooser.prefer(algorithms);
    }

    /// Waits for the bytes of a reading.
    pub(crate) fn wait_for(&mut self, reading: Reading) -> Result<Vec<u8>> {
        match reading {
            Reading::Done(bytes) => Ok(bytes),
            Reading::Pending(number) => {
                let wait = self.engine.device.bind().and_then(|()| self.readings.finish(number));
                wait.during(|| "waiting for the results of a step".into())
            }
        }
    }

    /// Queues one instruction of an entry.
    pub(crate) fn queue_step(&mut self, entry: usize, index: usize) -> Result<()> {
        self.engine.device.bind()?;
        self.entries[entry].steps[index].queue(&self.engine)
    }

    /// Describes an instruction in words.
    pub(crate) fn place_of(&self, entry: usize, index: usize) -> String {
        let of = &self.program.entries[entry];
        place(of.kind.name(), index, &of.steps[index])
    }

    /// Runs an entry point with a time stamp around every instruction. Gaps between launches count for the instruction
    /// after them.
    fn profile_steps(&mut self, entry: usize) -> Result<Vec<f64>> {
        let GpuSession { entries, engine, .. } = self;
        engine.device.bind()?;
        let steps = &mut entries[entry].steps;
        let mut marks = vec![Event::new(&engine.device)?];
        marks[0].record(&engine.stream)?;
        for step in steps {
            step.queue(engine)?;
            let mark = Event::new(&engine.device)?;
            mark.record(&engine.stream)?;
            marks.push(mark);
        }
        engine.synchronise()?;
        marks.windows(2).map(|pair| Ok(f64::from(pair[1].since(&pair[0])?) / 1e3)).collect()
    }

    fn run_entry(&mut self, index: usize) -> Result<()> {
        self.engine.device.bind()?;
        let entry = &mut self.entries[index];
        let (steps, name) = (&self.program.entries[index].steps, self.program.entries[index].kind.name());
        let runs = entry.runs;
        entry.runs += 1;
        if self.graphs && entry.graph.is_none() && runs > 0 {
            // The first run was eager: every library has done its one-time work.
            let (engine, prepared) = (&self.engine, &mut entry.steps);
            let graph = Graph::capture(&engine.stream, || queue(engine, prepared, steps, name, false));
            entry.graph = Some(graph.during(|| format!("capturing entry {name}"))?);
        }
        match &entry.graph {
            Some(graph) => graph.launch(&self.engine.stream).during(|| format!("replaying entry {name}")),
            None => queue(&self.engine, &mut entry.steps, steps, name, self.check_each),
        }
    }
}

impl Session for GpuSession {
    fn program(&self) -> &Arc<Program> {
        &self.program
    }

    fn profile(&mut self, entry: usize) -> std::result::Result<Vec<f64>, BackendError> {
        self.profile_steps(entry).map_err(backend_error)
    }

    fn adopt(&mut self, program: Arc<Program>) -> std::result::Result<(), BackendError> {
        let replaced = self.replace_entries(program).map(drop);
        replaced.during(|| "making other entries ready".into()).map_err(backend_error)
    }

    fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> std::result::Result<(), BackendError> {
        let GpuSession { program, engine, memory, uploads, .. } = self;
        let mut write = || {
            engine.device.bind()?;
            let bytes = &codes::stored(program.machine.arch, at.dtype, bytes);
            if let Some(place) = on_host(memory, at, bytes.len()) {
                engine.synchronise()?;
                place.copy_from_slice(bytes);
                return Ok(());
            }
            let (buffer, offset) = place_of(memory, at, bytes.len());
            uploads.write(&engine.stream, buffer, offset, bytes)
        };
        write().during(|| format!("writing {at}")).map_err(backend_error)
    }

    fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> std::result::Result<(), BackendError> {
        let mut read = || {
            self.engine.device.bind()?;
            if let Some(place) = on_host(&mut self.memory, at, out.len()) {
                self.engine.synchronise()?;
                out.copy_from_slice(place);
                return Ok(());
            }
            let (buffer, offset) = place_of(&self.memory, at, out.len());
            self.downloads.read(&self.engine.stream, buffer, offset, out)
        };
        read().during(|| format!("reading {at}")).map_err(backend_error)
    }

    fn run(&mut self, entry: usize) -> std::result::Result<(), BackendError> {
        self.run_entry(entry).map_err(backend_error)
    }

    fn read_later(&mut self, at: &[TensorRef]) -> std::result::Result<Reading, BackendError> {
        let GpuSession { engine, memory, readings, .. } = self;
        let mut start = || {
            engine.device.bind()?;
            let place = |tensor: &TensorRef| {
                let (buffer, offset) = place_of(memory, tensor, tensor.bytes());
                (buffer, offset, tensor.bytes())
            };
            readings.start(&engine.stream, &at.iter().map(place).collect::<Vec<_>>())
        };
        start().map(Reading::Pending).map_err(backend_error)
    }

    fn finish(&mut self, reading: Reading) -> std::result::Result<Vec<u8>, BackendError> {
        self.wait_for(reading).map_err(backend_error)
    }

    fn run_instruction(&mut self, entry: usize, index: usize) -> std::result::Result<(), BackendError> {
        let GpuSession { program, entries, engine, .. } = self;
        let (steps, name) = (&program.entries[entry].steps, program.entries[entry].kind.name());
        let mut run = || {
            engine.device.bind()?;
            entries[entry].steps[index].queue(engine)?;
            engine.synchronise()
        };
        run().during(|| place(name, index, &steps[index])).map_err(backend_error)
    }

    fn allocated(&self) -> Vec<MemoryLine> {
        let line = |class, bytes, note| MemoryLine { class, bytes, note };
        let arenas = self.memory.kinds.iter().zip(self.memory.arenas.iter().zip(&self.memory.hosts));
        let arenas = arenas.map(|(kind, (buffer, host))| match host {
            Some((host, _)) => line(MemoryClass::Arena(*kind), host.bytes().len(), ON_HOST),
            None => line(MemoryClass::Arena(*kind), buffer.len(), ""),
        });
        let note = "of libraries, one instruction at a time";
        arenas.chain([line(MemoryClass::Workspace, self.workspace.len(), note)]).collect()
    }

    fn load_times(&self) -> Vec<(&'static str, f64)> {
        self.load_times.clone()
    }

    fn notes(&self) -> Vec<String> {
        self.engine.notes.clone()
    }

    fn memory_in_use(&self) -> std::result::Result<Option<usize>, BackendError> {
        let requested = self.engine.device.bind().and_then(|()| self.engine.device.memory());
        requested.map(|(free, total)| Some(total - free)).map_err(backend_error)
    }

    fn choices(&self) -> Choices {
        self.algorithms().clone()
    }

    fn synchronize(&mut self) -> std::result::Result<(), BackendError> {
        let wait = || {
            self.engine.device.bind()?;
            self.engine.synchronise()
        };
        wait().map_err(backend_error)
    }
}

impl Drop for GpuSession {
    fn drop(&mut self) {
        // Memory is freed next: nothing may still be using it. A failure at exit cannot be acted on.
        let _ = self.engine.device.bind().and_then(|()| self.engine.synchronise());
    }
}

/// Returns the bytes of a dense tensor in host memory, if it is there.
fn on_host<'a>(memory: &'a mut Memory, at: &TensorRef, host_bytes: usize) -> Option<&'a mut [u8]> {
    let (buffer, _) = memory.hosts[at.arena.0 as usize].as_mut()?;
    assert!(at.is_dense() && at.bytes() == host_bytes, "the host reads and writes dense tensors as a whole, not {at}");
    Some(&mut buffer.bytes_mut()[at.offset..at.offset + host_bytes])
}

/// Returns the buffer and byte offset of a dense tensor in device memory, whose size is checked against the host side.
fn place_of<'a>(memory: &'a Memory, at: &TensorRef, host_bytes: usize) -> (&'a DeviceBuffer, usize) {
    assert!(at.is_dense(), "the host reads and writes dense tensors, not {at}");
    assert_eq!(at.bytes(), host_bytes, "the host side has exactly the size of {at}");
    (&memory.arenas[at.arena.0 as usize], at.offset)
}

/// A stop watch for the parts of loading.
struct Clock {
    last: Instant,
    times: Vec<(&'static str, f64)>,
}

impl Clock {
    fn start() -> Clock {
        Clock { last: Instant::now(), times: vec![] }
    }

    fn stop(&mut self, name: &'static str) {
        let now = Instant::now();
        self.times.push((name, now.duration_since(self.last).as_secs_f64()));
        self.last = now;
    }
}

/// Returns a plan for every instruction of the wanted entries, nothing for the others. May overwrite the buffers of
/// [`Memory::free`].
fn plan_entries(
    program: &Program,
    engine: &mut Engine,
    memory: &Memory,
    kernels: &Kernels,
    wanted: impl Fn(usize) -> bool,
) -> Result<Vec<Vec<PlannedInstruction>>> {
    let mut planned = vec![];
    for (number, entry) in program.entries.iter().enumerate() {
        let (mut steps, mut events) = (vec![], Events::new(&engine.device));
        let early = launches_early(entry, program.cluster.ranks, engine);
        for (index, step) in entry.steps.iter().enumerate().filter(|_| wanted(number)) {
            let context = || format!("preparing {}", place(entry.kind.name(), index, step));
            let p = Preparation { engine, memory, kernels, events: &mut events, early };
            steps.push(plan(p, step).during(context)?);
        }
        planned.push(steps);
    }
    engine.chooser.finish();
    engine.note_cache();
    Ok(planned)
}

/// Bytes of workspace that the largest instruction asks for.
fn workspace_of(planned: &[Vec<PlannedInstruction>]) -> usize {
    planned.iter().flatten().map(PlannedInstruction::workspace).max().unwrap_or(0)
}

fn workspace_for(planned: &[Vec<PlannedInstruction>], engine: &Engine) -> Result<DeviceBuffer> {
    DeviceBuffer::new(&engine.device, workspace_of(planned)).during(|| "allocating the workspace of libraries".into())
}

fn bind_entries(
    planned: Vec<Vec<PlannedInstruction>>,
    engine: &Engine,
    workspace: &DeviceBuffer,
) -> Result<Vec<BoundEntry>> {
    let bind = |steps: Vec<PlannedInstruction>| {
        let steps = steps.into_iter().map(|step| step.bind(engine, workspace.address()));
        Ok(BoundEntry { steps: steps.collect::<Result<_>>()?, runs: 0, graph: None })
    };
    planned.into_iter().map(bind).collect()
}

fn plan(mut p: Preparation, step: &Step) -> Result<PlannedInstruction> {
    PlannedInstruction::new(&mut p, &step.instruction)
}

/// True if an entry gains by launching kernels before earlier ones have ended: one that computes the model alone, as in
/// generating token after token, in kernels that follow each other on one stream of one GPU.
fn launches_early(entry: &Entry, ranks: usize, engine: &Engine) -> bool {
    let is_kernel = |step: &Step| match step.instruction {
        Instruction::Launch(_) | Instruction::Gemm(_) | Instruction::AttentionForward(_) | Instruction::Copy { .. } => {
            true
        }
        Instruction::Zero { .. }
        | Instruction::Transfer { .. }
        | Instruction::Collective(_)
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => false,
    };
    entry.kind == EntryKind::Forward
        && ranks == 1
        && engine.architecture().starts_early()
        && entry.steps.iter().all(is_kernel)
}

fn queue(engine: &Engine, prepared: &mut [BoundInstruction], steps: &[Step], entry: &str, check: bool) -> Result<()> {
    for (index, (prepared, step)) in prepared.iter_mut().zip(steps).enumerate() {
        let queued = prepared.queue(engine);
        let done = if check { queued.and_then(|()| engine.synchronise()) } else { queued };
        done.during(|| place(entry, index, step))?;
    }
    Ok(())
}

/// Describes an instruction in words: entry, index, kind and origin.
fn place(entry: &str, index: usize, step: &Step) -> String {
    let origin = &step.provenance;
    let layer = origin.layer.as_ref().map(|layer| format!(", layer {layer}")).unwrap_or_default();
    let at = origin.at.as_ref().map(|at| format!(", {at}")).unwrap_or_default();
    format!("instruction {index} of {entry}: {} ({}{layer}{at}): {step}", origin.op, origin.phase.name())
}

fn check_architecture(program: &Program, engine: &Engine) -> Result<()> {
    let here = engine.architecture();
    match program.machine.arch {
        planned if planned == here => Ok(()),
        planned => Err(Error::Unsupported {
            what: format!("program {}", program.name),
            reason: format!("it was compiled for {planned}, this GPU ({}) is {here}", engine.device.properties.name),
            context: String::new(),
        }),
    }
}

fn write_constants(program: &Program, engine: &Engine, memory: &Memory) -> Result<()> {
    for constant in &program.constants {
        let at = &constant.at;
        assert!(at.is_dense() && at.bytes() == constant.value.bytes.len(), "a constant fills its place {at}");
        memory.arenas[at.arena.0 as usize].write(&engine.stream, at.offset, &constant.value.bytes)?;
    }
    Ok(())
}

/// Converts to the errors of the backend contract.
pub(crate) fn backend_error(error: Error) -> BackendError {
    match error {
        Error::OutOfMemory { wanted, free, context, .. } => {
            BackendError::OutOfMemory { what: context, needed: wanted, available: free }
        }
        Error::Call { call, code, name, detail, context } => BackendError::Failed {
            call: call.to_owned(),
            message: if detail.is_empty() { format!("{name} ({code})") } else { format!("{name} ({code}): {detail}") },
            context: (!context.is_empty()).then_some(context),
        },
        other => BackendError::Unavailable(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::{ArenaId, Cost, Provenance};
    use tensor::DType;

    #[test]
    fn an_instruction_is_named_with_its_source_line() {
        let at = TensorRef::dense(ArenaId(1), 0, DType::F32, [4]);
        let provenance = Provenance {
            op: "rmsnorm".into(),
            phase: program::Phase::Backward,
            layer: Some(program::Layer { stack: "".into(), index: 3 }),
            at: Some("llama.py:41".into()),
        };
        let step = Step { instruction: Instruction::Zero { at }, provenance, cost: Cost::default() };
        let text = place("first_micro_step", 7, &step);
        assert!(text.starts_with("instruction 7 of first_micro_step: rmsnorm (backward, layer 3, llama.py:41): zero"));
    }

    #[test]
    fn errors_keep_their_call_and_context() {
        let error = Error::Call {
            call: "cuLaunchKernel",
            code: 1,
            name: "CUDA_ERROR_INVALID_VALUE".into(),
            detail: "invalid argument".into(),
            context: "kernel x".into(),
        };
        let text = backend_error(error).to_string();
        assert_eq!(text, "cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument (in kernel x)");
    }
}
