//! A compiled model in a backend's memory: batches and scalars in, entries run, tensors out. When a batch has a shape
//! that was not compiled yet, entries for it are added to the session; parameters and optimizer states stay where they
//! are.
//!
//! Knows entries, slots and scalars; not what a run is.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use compiler::{AdapterOptions, CompileError, CompileOptions, EntryOptions, Training};
use data::Batch;
use program::{ArenaKind, Choices, Documents, EntryKind, Program, Reading, Session, TensorRef, Variant, scalar};
use tensor::{DType, HostTensor};

use crate::engine::device::Device;
use crate::engine::fill::fill;
use crate::engine::programs;
use crate::engine::units;
use crate::error::Result;
use crate::model::packed_weights::PackedWeights;
use crate::model::rounding::Rounding;
use crate::model::source::ModelSource;
use crate::model::weight_set::WeightSet;
use crate::model::weight_source::WeightSource;

/// Shapes that a program keeps compiled when batches bring new ones; the one that was used least recently goes first.
const MAX_VARIANTS: usize = 16;

/// The entries and shapes that an engine is compiled for, to come back to.
pub(crate) struct Compiled {
    options: CompileOptions,
    parts: Vec<Arc<Program>>,
    program: Arc<Program>,
}

/// A compiled model in a session of a device.
pub struct Engine {
    device: Arc<Device>,
    source: Arc<ModelSource>,
    /// With the shapes that are compiled, the one that was used last at the end.
    options: CompileOptions,
    /// The programs that the program is united from; the first has the update.
    parts: Vec<Arc<Program>>,
    program: Arc<Program>,
    /// Absent only while it is replaced.
    session: Option<Box<dyn Session>>,
    /// The source of the base weights: weights that are quantized may be in memory only while they are loaded. None
    /// before loading, and without such weights.
    origin: Option<Arc<WeightSource>>,
    /// Times of the instructions that ran while timing was on.
    timed: Option<Vec<(usize, Vec<f64>)>>,
    /// Phases of making the engine, with seconds.
    load_times: Vec<(&'static str, f64)>,
    /// The largest changes of base weights by rounding when they were loaded.
    rounding: Rounding,
    /// Host memory of a result that was given back: pages of new memory cost more than the copy into them.
    spare: Vec<u8>,
}

fn compile(source: &ModelSource, options: &CompileOptions, device: &Device) -> Result<Arc<Program>> {
    Ok(programs::compiled(&source.model, options, &device.machine)?)
}

impl Engine {
    /// Compiles and loads, with what an earlier session chose by timing. The parameters are zero until they
    /// are written.
    pub fn new(
        device: Arc<Device>,
        source: Arc<ModelSource>,
        options: CompileOptions,
        choices: &Choices,
    ) -> Result<Engine> {
        let begin = Instant::now();
        let program = compile(&source, &options, &device)?;
        programs::forget();
        let mut load_times = vec![("plan", begin.elapsed().as_secs_f64())];
        let begin = Instant::now();
        if units::check(device.backend.as_ref(), &program, &options.recipe)? {
            load_times.push(("check of 4-bit operations", begin.elapsed().as_secs_f64()));
        }
        let session = device.backend.load_with(program.clone(), choices)?;
        load_times.extend(session.load_times());
        let parts = vec![program.clone()];
        let (session, origin, timed) = (Some(session), None, None);
        Ok(Engine {
            device,
            source,
            options,
            parts,
            program,
            session,
            origin,
            timed,
            load_times,
            rounding: Rounding::default(),
            spare: Vec::new(),
        })
    }

    /// Phases of making the engine, with seconds.
    pub fn load_times(&self) -> &[(&'static str, f64)] {
        &self.load_times
    }

    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    pub fn options(&self) -> &CompileOptions {
        &self.options
    }

    /// True if the loss of a step is scaled; the update keeps the scale.
    pub fn scales_loss(&self) -> bool {
        self.program.layout.extra.iter().any(|(name, _)| name == scalar::LOSS_SCALE)
    }

    pub fn session(&mut self) -> &mut dyn Session {
        &mut **self.session.as_mut().expect("a session is replaced within one call")
    }

    /// Takes how far base weights were moved when they were loaded.
    pub(crate) fn set_rounding(&mut self, rounding: Rounding) {
        self.rounding = rounding;
    }

    /// Returns a sentence on how far base weights of files were moved when they were loaded, if any was.
    pub fn rounded(&self) -> Option<String> {
        let text = self.rounding.text(self.options.weights.name())?;
        Some(format!("as the model was loaded, {text}"))
    }

    /// Says where the base weights came from.
    pub(crate) fn set_origin(&mut self, origin: WeightSource) {
        self.origin = self.options.recipe.quantises_weights().then(|| Arc::new(origin));
    }

    /// The source of base weights that are no longer in memory.
    pub(crate) fn origin(&self) -> Arc<WeightSource> {
        self.origin.clone().expect("the origin is set before weights that do not stay are read")
    }

    /// Number of devices that work together.
    pub fn ranks(&self) -> usize {
        self.program.cluster.ranks
    }

    /// Batches of a round, which they work on at once.
    pub fn replicas(&self) -> usize {
        self.program.cluster.replicas()
    }

    /// The shape of a round of batches as the compiler is requested it: all run the same entry.
    pub fn variant_of(&self, round: &[Batch], one_per_row: bool) -> Variant {
        variant_of(round, one_per_row)
    }

    /// True if batches of the wanted shape run without compiling.
    pub fn has(&self, wanted: Variant) -> bool {
        self.options.variants.iter().any(|known| fits(known, &wanted))
    }

    /// The compiled variant that takes batches of the wanted one; compiles it where there is none.
    pub fn prepare(&mut self, wanted: Variant) -> Result<Variant> {
        Ok(self.prepare_all(&[wanted])?[0])
    }

    /// The compiled variants that take batches of the wanted ones, all at the same time; compiles those that nothing takes.
    pub fn prepare_all(&mut self, wanted: &[Variant]) -> Result<Vec<Variant>> {
        for variant in wanted {
            if let Some(index) = taking(&self.options.variants, variant) {
                let known = self.options.variants.remove(index);
                self.options.variants.push(known);
                continue;
            }
            let mut variants = self.options.variants.clone();
            make_room(&mut variants, wanted);
            variants.push(*variant);
            self.extend(*variant, variants)?;
        }
        let known = &self.options.variants;
        let of = |variant| known[taking(known, variant).expect("it was compiled, or is known")];
        Ok(wanted.iter().map(of).collect())
    }

    /// Adds entries for a shape to the session; only those for `variants` are kept.
    fn extend(&mut self, wanted: Variant, variants: Vec<Variant>) -> Result<()> {
        // Stages are dealt layers by what all shapes are expected to take.
        if self.program.cluster.stages > 1 {
            return self.replace(CompileOptions { variants, ..self.options.clone() });
        }
        // What has shapes of its own is in the first part.
        let usual = self.options.entries.iter().filter(|entry| entry.shapes.is_empty()).cloned().collect();
        let alone = CompileOptions { variants: vec![wanted], entries: usual, ..self.options.clone() };
        let options = CompileOptions { variants, ..self.options.clone() };
        let part = match compiler::compile(&self.source.model, &in_place(alone, &self.program), &self.device.machine) {
            Ok(part) => Arc::new(part),
            // Where the states are leaves no room for the shape: they move to where it has.
            Err(CompileError::DoesNotFit { .. }) => return self.replace(options),
            Err(error) => return Err(error.into()),
        };
        let own: Vec<Variant> = options.entries.iter().flat_map(|entry| entry.shapes.iter().copied()).collect();
        let serves = |part: &Program| {
            let mut shapes = part.entries.iter().filter_map(|entry| entry.variant);
            shapes.any(|shape| options.variants.contains(&shape))
        };
        let (first, others) = self.parts.split_first().expect("a program has at least one part");
        let kept = others.iter().filter(|part| serves(part)).cloned();
        let parts: Vec<Arc<Program>> = std::iter::once(first.clone()).chain(kept).chain([part]).collect();
        let references: Vec<&Program> = parts.iter().map(|part| &**part).collect();
        let program = Arc::new(program::unite(&references, |variant| {
            options.variants.contains(variant) || own.contains(variant)
        }));
        self.session().adopt(program.clone())?;
        (self.parts, self.program, self.options) = (parts, program, options);
        Ok(())
    }

    /// Compiles with other options and keeps parameters and optimizer states. The options have the
    /// same parameters.
    pub fn replace(&mut self, options: CompileOptions) -> Result<()> {
        let program = Arc::new(compiler::compile(&self.source.model, &options, &self.device.machine)?);
        self.resume(Compiled { options, parts: vec![program.clone()], program })
    }

    /// The entries and shapes that it is compiled for.
    pub(crate) fn compiled(&self) -> Compiled {
        Compiled { options: self.options.clone(), parts: self.parts.clone(), program: self.program.clone() }
    }

    /// Comes back to what it was compiled for, or goes on with something else of the same parameters.
    pub(crate) fn resume(&mut self, of: Compiled) -> Result<()> {
        if of.program.has_layout_of(&self.program) {
            self.session().adopt(of.program.clone())?;
        } else {
            self.move_to(of.program.clone())?;
        }
        (self.parts, self.program, self.options) = (of.parts, of.program, of.options);
        Ok(())
    }

    /// Loads a program with another layout, with what the present one keeps from step to step, through host memory. Weights
    /// that do not stay are loaded again.
    fn move_to(&mut self, program: Arc<Program>) -> Result<()> {
        let present = self.program.clone();
        let stay = present.layout.parameters.iter().filter(|slot| slot.load_group.is_none());
        let weights = stay.map(|slot| Ok((slot.name.as_str(), self.tensor(&slot.weight)?)));
        let weights: HashMap<&str, HostTensor> = weights.collect::<Result<_>>()?;
        let before: Vec<&TensorRef> = present.layout.others().collect();
        let contents = before.iter().map(|at| self.tensor(at)).collect::<Result<Vec<_>>>()?;
        // What was timed stays as it was chosen: the run's bits do not depend on when a shape came up.
        let choices = self.session().choices();
        self.session = None;
        let mut session = self.device.backend.load_with(program.clone(), &choices)?;
        let write = |session: &mut dyn Session, at: &TensorRef, content: &HostTensor| {
            assert_eq!((at.dtype, &at.shape), (content.dtype, &content.shape), "a parameter keeps its form");
            Ok(session.write(at, &content.bytes)?)
        };
        let origin = || self.origin.as_deref().expect("weights that do not stay were loaded before");
        let numbers = |name: &str, start: usize, out: &mut [f32]| origin().numbers(&program, name, start, out);
        let mut packed_weights = PackedWeights::of(&program, &numbers);
        fill(
            &mut *session,
            &program,
            |_| true,
            |session, slot| match weights.get(slot.name.as_str()) {
                Some(content) => write(session, &slot.weight, content),
                None => origin().write(session, WeightSet::Base, slot, &mut packed_weights, &mut Rounding::default()),
            },
        )?;
        let after: Vec<&TensorRef> = program.layout.others().collect();
        assert_eq!(before.len(), after.len(), "recompiling does not change what is kept between steps");
        for (at, content) in after.into_iter().zip(&contents) {
            write(&mut *session, at, content)?;
        }
        if let Some(entry) = program.preparation(None) {
            session.run(entry)?;
        }
        self.session = Some(session);
        Ok(())
    }

    /// Makes again what follows from weights that stay: called wherever they were written.
    pub fn weights_written(&mut self) -> Result<()> {
        match self.program.preparation(None) {
            Some(entry) => Ok(self.session().run(entry)?),
            None => Ok(()),
        }
    }

    /// Writes a batch for each rank and runs an entry on them.
    pub fn run(&mut self, kind: EntryKind, variant: Variant, round: &[Batch]) -> Result<()> {
        let entry = self.entry(kind, Some(variant));
        self.load_batches(entry, round)?;
        self.run_entry(entry)
    }

    /// Writes a batch for each rank and values that no batch brings, the same on every rank, and runs a forward pass on them.
    pub fn run_from(&mut self, variant: Variant, round: &[Batch], values: &[(&str, &HostTensor)]) -> Result<()> {
        let entry = self.entry(EntryKind::Forward, Some(variant));
        self.load_batches(entry, round)?;
        let program = self.program.clone();
        let inputs = program.parts(entry).into_iter().flat_map(|part| program.entries[part].inputs.clone());
        for (name, at) in inputs {
            let Some((_, value)) = values.iter().find(|(known, _)| *known == name) else { continue };
            match value.dtype == at.dtype {
                true => self.session().write(&at, &value.bytes)?,
                false => self.session().write(&at, &(*value).clone().cast(at.dtype).bytes)?,
            }
        }
        self.run_entry(entry)
    }

    /// Runs a forward pass of a name, a batch for each replica; returns a result of it as f32, that of each replica.
    pub fn forward(&mut self, name: &str, variant: Variant, round: &[Batch], output: &str) -> Result<Vec<Vec<f32>>> {
        let found = self.forward_all(name, variant, round, &[output])?;
        Ok(found.iter().map(|results| results[0].to_f32()).collect())
    }

    /// The same for several results, in their own types.
    pub fn forward_all(
        &mut self,
        name: &str,
        variant: Variant,
        round: &[Batch],
        outputs: &[&str],
    ) -> Result<Vec<Vec<HostTensor>>> {
        let entry = self.program.named(EntryKind::Forward, name, Some(variant));
        let entry = entry.unwrap_or_else(|| panic!("the forward pass `{name}` was not compiled for {variant:?}"));
        self.load_batches(entry, round)?;
        self.run_entry(entry)?;
        let of_rank = |rank| outputs.iter().map(|output| self.output_of_rank(rank, entry, output)).collect();
        (0..round.len()).map(of_rank).collect()
    }

    /// Writes a batch for each rank and runs the micro-step that begins a step, ends it, both or neither.
    pub fn run_micro_step(&mut self, first: bool, last: bool, variant: Variant, round: &[Batch]) -> Result<()> {
        let entry = self.micro_step(first, last, variant);
        self.load_batches(entry, round)?;
        self.run_entry(entry)
    }

    /// The index of the micro-step that begins a step, ends it, both or neither.
    pub fn micro_step(&self, first: bool, last: bool, variant: Variant) -> usize {
        let found = self.program.micro_step(first, last, Some(variant));
        found.unwrap_or_else(|| panic!("a micro-step was not compiled for {variant:?}"))
    }

    /// Writes the batches of a round to where an entry reads them: each rank has a whole one, or its part.
    pub fn load_batches(&mut self, entry: usize, round: &[Batch]) -> Result<()> {
        assert_eq!(round.len(), self.replicas(), "a round has a batch for each replica");
        let program = self.program.clone();
        let cluster = program.cluster;
        let parts = program.parts(entry);
        let inputs = parts.iter().flat_map(|part| &program.entries[*part].inputs);
        for (name, at) in inputs {
            // Others are written by who runs a part of a model.
            let Some(input) = data::inputs::input(name) else { continue };
            let here = round.iter().zip((0..).step_by(cluster.sequence)).filter(|(batch, _)| batch.remote.is_none());
            for (batch, ranks) in here {
                let Some(bytes) = input.bytes(batch) else { continue };
                for rank in ranks..ranks + cluster.sequence {
                    // What only attention reads is whole on every rank.
                    let first = if bytes.len() == at.bytes() { 0 } else { cluster.part(rank) * at.bytes() };
                    self.session().write_rank(rank, at, &bytes[first..][..at.bytes()])?;
                }
            }
        }
        Ok(())
    }

    /// Runs an entry, timing its instructions where that is requested.
    fn run_entry(&mut self, entry: usize) -> Result<()> {
        let Some(timed) = &mut self.timed else { return Ok(self.session().run(entry)?) };
        let mut timed = std::mem::take(timed);
        timed.push((entry, self.session().profile(entry)?));
        self.timed = Some(timed);
        Ok(())
    }

    /// From now on every entry that runs is timed.
    pub fn begin_timing(&mut self) {
        self.timed = Some(Vec::new());
    }

    /// Entries that ran since, by index, with the seconds of each instruction.
    pub fn end_timing(&mut self) -> Vec<(usize, Vec<f64>)> {
        self.timed.take().unwrap_or_default()
    }

    /// Runs the update; after a warm-up that of compressed sums, where there is one.
    pub fn update(&mut self, warm: bool) -> Result<()> {
        let entry = self.program.update(warm).expect("an update is compiled with everything that trains");
        self.run_entry(entry)
    }

    fn entry(&self, kind: EntryKind, variant: Option<Variant>) -> usize {
        let found = self.program.entry(kind, variant);
        found.unwrap_or_else(|| panic!("{} was not compiled for {variant:?}", kind.name()))
    }

    pub fn set_f32(&mut self, scalar: &str, value: f32) -> Result<()> {
        let at = self.scalar(scalar);
        Ok(self.session().write(&at, &value.to_le_bytes())?)
    }

    pub fn set_i32(&mut self, scalar: &str, value: i32) -> Result<()> {
        let at = self.scalar(scalar);
        Ok(self.session().write(&at, &value.to_le_bytes())?)
    }

    /// Numbers the micro-steps of a round, as a single rank would take the batches.
    pub fn number_micro_steps(&mut self, first: u64) -> Result<()> {
        let at = self.scalar(scalar::MICRO_STEP);
        for rank in 0..self.ranks() {
            let number = first + (rank / self.program.cluster.sequence) as u64;
            self.session().write_rank(rank, &at, &(number as i32).to_le_bytes())?;
        }
        Ok(())
    }

    /// A scalar as every rank has it, added up in the order of the ranks.
    pub fn sum_f32(&mut self, scalar: &str) -> Result<f64> {
        let at = self.scalar(scalar);
        let mut sum = 0.0;
        for rank in 0..self.ranks() {
            let mut bytes = [0; 4];
            self.session().read_rank(rank, &at, &mut bytes)?;
            sum += f64::from(f32::from_le_bytes(bytes));
        }
        Ok(sum)
    }

    /// Begins to read scalars, as they are after all that was started before.
    pub fn read_scalars(&mut self, names: &[&str]) -> Result<Reading> {
        let at: Vec<TensorRef> = names.iter().map(|name| self.scalar(name)).collect();
        Ok(self.session().read_later(&at)?)
    }

    /// Waits for scalars of four bytes.
    pub fn finish_scalars(&mut self, reading: Reading) -> Result<Vec<f32>> {
        let bytes = self.session().finish(reading)?;
        Ok(bytes.chunks_exact(4).map(|part| f32::from_le_bytes(part.try_into().expect("four bytes"))).collect())
    }

    fn scalar(&self, name: &str) -> TensorRef {
        self.program.scalar(name).unwrap_or_else(|| panic!("there is no scalar `{name}`")).clone()
    }

    /// A dense tensor in host memory.
    pub fn tensor(&mut self, at: &TensorRef) -> Result<HostTensor> {
        let (mut bytes, size) = (std::mem::take(&mut self.spare), at.len() * at.dtype.size());
        match bytes.capacity() < size {
            // Fresh memory is zero, and touched by the copy alone.
            true => bytes = vec![0; size],
            false => bytes.resize(size, 0),
        }
        let mut tensor = HostTensor { dtype: at.dtype, shape: at.shape.clone(), bytes };
        self.session().read(at, &mut tensor.bytes)?;
        Ok(tensor)
    }

    /// Takes the host memory of a result that is used up, for the next one.
    pub(crate) fn give_back(&mut self, tensor: HostTensor) {
        self.spare = tensor.bytes;
    }

    /// A result of the entry that ran last, as f32.
    pub fn output(&mut self, kind: EntryKind, variant: Variant, name: &str) -> Result<HostTensor> {
        Ok(self.output_as_stored(kind, variant, name)?.cast(DType::F32))
    }

    /// A result, as one rank has it, of the entry that ran last, in its own type.
    pub(crate) fn output_of_rank(&mut self, rank: usize, entry: usize, name: &str) -> Result<HostTensor> {
        let outputs = &self.program.entries[entry].outputs;
        let at = outputs.iter().find(|(known, _)| known == name).map(|(_, at)| at.clone());
        let at = at.unwrap_or_else(|| panic!("`{name}` was not requested when the program was compiled"));
        let mut tensor = HostTensor::zeros(at.dtype, at.shape.clone());
        self.session().read_rank(rank, &at, &mut tensor.bytes)?;
        Ok(tensor)
    }

    /// The sums of a report over all ranks, as an evaluation leaves them; none where the program has no such report.
    pub fn sum_report(&mut self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(at) = self.program.scalar(name).cloned() else { return Ok(None) };
        let mut sums = vec![0.0; at.len()];
        for rank in 0..self.ranks() {
            let mut bytes = vec![0; at.bytes()];
            self.session().read_rank(rank, &at, &mut bytes)?;
            let values = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(value));
        }
        Ok(Some(sums))
    }

    /// Sets the sums of a report to 0, if the program has that report.
    pub fn clear_report(&mut self, name: &str) -> Result<()> {
        let Some(at) = self.program.scalar(name).cloned() else { return Ok(()) };
        Ok(self.session().write(&at, &vec![0; at.bytes()])?)
    }

    /// A result of the entry that ran last in its own type.
    pub fn output_as_stored(&mut self, kind: EntryKind, variant: Variant, name: &str) -> Result<HostTensor> {
        let entry = self.entry(kind, Some(variant));
        let outputs = &self.program.entries[entry].outputs;
        let at = outputs.iter().find(|(known, _)| known == name).map(|(_, at)| at.clone());
        let at = at.unwrap_or_else(|| panic!("`{name}` was not requested when the program was compiled"));
        self.tensor(&at)
    }
}

/// The shape of batches of equal extents as the compiler is requested it. `one_per_row`: what follows the document of a row
/// is padding, which may see it.
pub fn variant_of(round: &[Batch], one_per_row: bool) -> Variant {
    let (rows, length) = (round[0].batch, round[0].seq_len);
    let (patches, logits) = (round[0].patches.count(), round[0].logits);
    let extents = |of: &Batch| (of.batch, of.seq_len, of.patches.count(), of.logits);
    let is_alike = |of: &Batch| extents(of) == (rows, length, patches, logits);
    assert!(round.iter().all(is_alike), "ranks run one shape");
    let mut starts = round.iter().flat_map(|batch| &batch.document_start);
    let documents = match one_per_row || starts.all(|start| *start == 0) {
        true => Documents::Rows,
        false => Documents::Packed,
    };
    Variant { batch: rows, seq_len: length, documents, patches, logits }
}

/// The options with every state where it is in a program, and cut as there.
pub(crate) fn in_place(mut options: CompileOptions, program: &Program) -> CompileOptions {
    let of = &mut options.plan.offload;
    let settings = [
        (ArenaKind::Optimizer, &mut of.optimizer),
        (ArenaKind::Masters, &mut of.master),
        (ArenaKind::Gradients, &mut of.gradients),
    ];
    for (kind, setting) in settings {
        let arena = program.arenas.iter().find(|arena| arena.kind == kind && arena.bytes > 0);
        *setting = arena.map(|arena| arena.is_on_host()).or(*setting);
    }
    let cut = |kind: ArenaKind| program.arenas.iter().any(|arena| arena.kind == kind && !arena.shards.is_empty());
    let sharding = &mut options.sharding;
    (sharding.gradients, sharding.weights) = (cut(ArenaKind::Gradients), cut(ArenaKind::Weights));
    sharding.open = false;
    options
}

/// The place of the variant that takes batches of the wanted one: the same, where there is one. What evaluation compiled
/// then changes nothing for training.
fn taking(known: &[Variant], wanted: &Variant) -> Option<usize> {
    let same = known.iter().position(|known| known == wanted);
    same.or_else(|| known.iter().position(|known| fits(known, wanted)))
}

/// Drops the variants that were not used for longest, but none that takes a wanted one.
fn make_room(variants: &mut Vec<Variant>, wanted: &[Variant]) {
    while variants.len() >= MAX_VARIANTS {
        let unused = |known: &Variant| !wanted.iter().any(|wanted| fits(known, wanted));
        let Some(index) = variants.iter().position(unused) else { return };
        variants.remove(index);
    }
}

/// True if a program for `known` takes batches of `wanted`.
fn fits(known: &Variant, wanted: &Variant) -> bool {
    // Packed rows say where their documents start, one or many.
    let documents = known.documents != Documents::Rows || wanted.documents == Documents::Rows;
    let extents = |of: &Variant| (of.batch, of.seq_len, of.patches, of.logits);
    extents(known) == extents(wanted) && documents
}

/// The options of a program over the same parameters and states in which nothing is drawn.
pub(crate) fn in_evaluation(options: CompileOptions, program: &Program) -> CompileOptions {
    // What a micro-step reports or records has places among the states.
    let reports = program.layout.scaling.is_some() || scalar::REPORTS.iter().any(|name| program.scalar(name).is_some());
    let is_kept = |entry: &EntryOptions| reports && entry.kind == EntryKind::FirstMicroStep;
    let entries = options.entries.into_iter().filter(is_kept).map(|entry| EntryOptions { cache: None, ..entry });
    CompileOptions {
        variants: Vec::new(),
        entries: entries.collect(),
        branches: None,
        training: options.training.map(|of| Training { dropout: false, embedding_noise: 0.0, ..of }),
        adapter: options.adapter.map(|of| AdapterOptions { dropout: 0.0, ..of }),
        ..options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(batch: usize, documents: Documents) -> Variant {
        Variant { batch, seq_len: 8, documents, patches: 0, logits: 0 }
    }

    #[test]
    fn one_packed_shape_serves_every_packing() {
        let (packed, rows) = (variant(2, Documents::Packed), variant(2, Documents::Rows));
        assert!(fits(&packed, &packed) && fits(&packed, &rows));
        assert!(!fits(&rows, &packed));
        assert!(!fits(&variant(1, Documents::Rows), &rows));
    }

    #[test]
    fn a_variant_of_its_own_goes_before_one_that_takes_it_too() {
        let (packed, rows) = (variant(2, Documents::Packed), variant(2, Documents::Rows));
        assert_eq!(taking(&[packed, rows], &rows), Some(1));
        assert_eq!(taking(&[packed], &rows), Some(0));
        assert_eq!(taking(&[rows], &packed), None);
    }

    #[test]
    fn what_a_step_needs_makes_no_room() {
        let all: Vec<Variant> = (0..MAX_VARIANTS).map(|batch| variant(batch + 1, Documents::Packed)).collect();
        let mut kept = all.clone();
        make_room(&mut kept, &[variant(1, Documents::Rows), variant(99, Documents::Rows)]);
        assert_eq!(kept, [&all[..1], &all[2..]].concat(), "the first one takes what is wanted");
        let mut kept = all.clone();
        make_room(&mut kept, &all);
        assert_eq!(kept, all);
    }

    #[test]
    fn what_follows_the_document_of_a_row_is_no_document_where_rows_hold_one() {
        let batch = Batch::from_labels(2, 4, vec![1; 8], &[1; 8], Some(vec![0, 1, 0, 1, 0, 0, 0, 1]), None).unwrap();
        let whole = Batch::from_labels(2, 4, vec![1; 8], &[1; 8], None, None).unwrap();
        // One rank with several documents in a row is enough: all run the same entry.
        for round in [vec![batch.clone()], vec![whole.clone(), batch.clone()]] {
            assert_eq!(variant_of(&round, false).documents, Documents::Packed);
            assert_eq!(variant_of(&round, true).documents, Documents::Rows);
        }
        assert_eq!(variant_of(&[whole.clone(), whole], false).documents, Documents::Rows);
    }
}
