//! Fills parameters from safetensors files by name, or initializes them from the seed. Loops over the parameter table;
//! no name has a special meaning.

use data::safetensors::{TensorView, Weights};
use program::{EntryKind, Initializer, ParameterSlot, Program, Session, TensorRef};
use rayon::prelude::*;
use tensor::draw::{Sequence, normals, uniforms};
use tensor::{DType, HostTensor, convert};

use crate::error::{Result, TrainError};
use crate::quantise;

/// Endings of names of tables that old checkpoints store and every engine computes itself.
const COMPUTED: &[&str] = &["rotary_emb.inv_freq", "attn.masked_bias"];

/// Whether a name is that of a table which every engine computes itself.
pub fn is_computed(name: &str) -> bool {
    COMPUTED.iter().any(|ending| name.ends_with(ending))
}

/// Which parameters a file speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightSet {
    Base,
    Adapter,
}

impl WeightSet {
    fn holds(self, slot: &ParameterSlot) -> bool {
        match self {
            WeightSet::Base => !slot.adapter,
            WeightSet::Adapter => slot.adapter || slot.saved,
        }
    }

    /// What the files of this part call a parameter.
    pub fn name(self, slot: &ParameterSlot) -> String {
        match self {
            WeightSet::Adapter if slot.saved => format!("{}{}", crate::peft::PREFIX, slot.name),
            _ => slot.name.clone(),
        }
    }

    /// The slots of this part.
    pub fn of(self, program: &Program) -> impl Iterator<Item = &ParameterSlot> {
        program.layout.parameters.iter().filter(move |slot| self.holds(slot))
    }
}

/// Reads every parameter of a part from files, converting to the type in which it is stored; and its f32 copy, where
/// the optimizer keeps one.
///
/// Errors name tensors that are missing, superfluous or of another shape, all at once. Two kinds of
/// superfluous tensors are accepted: one that equals a used base weight of the same file bit for bit, as tied weights
/// are written; with an adapter, a copy of a base weight that the session holds, as PEFT writes it
/// for an adapted head.
pub fn load(session: &mut dyn Session, program: &Program, part: WeightSet, files: &Weights, place: &str) -> Result<()> {
    check_names(session, program, part, files, place)?;
    for slot in part.of(program) {
        let view = files.get(&part.name(slot)).map_err(TrainError::model_file)?;
        match &slot.packed {
            Some(packed) if packed.made.is_some() => {
                quantise::write(session, slot, &|start, numbers| read_as_f32(&view, start, numbers))?;
                continue;
            }
            // The file has the codes themselves.
            Some(packed) => {
                assert_eq!(view.packing(), Some(packed.packing), "a weight is kept in the form that its file has");
                session.write(&slot.weight, &view.planes().map_err(TrainError::unreadable)?)?;
                continue;
            }
            None => {}
        }
        for at in std::iter::once(&slot.weight).chain(&slot.master) {
            write_as_stored(session, at, &view)?;
        }
    }
    Ok(())
}

/// Elements that are read or drawn, and converted, before they are handed on: few enough to stay in the cache between the
/// two.
const CONVERTED: usize = 1 << 20;

/// Elements that one thread reads or draws, and converts, at a time.
const BLOCK: usize = 1 << 14;

/// Writes a tensor of a file into its place in one pass over its bytes, rounding to the place's type. Threads read and
/// convert some elements each.
pub fn write_as_stored(session: &mut dyn Session, at: &TensorRef, view: &TensorView<'_>) -> Result<()> {
    let (from, to, elements) = (view.dtype, at.dtype, at.len());
    let mut buffer = vec![0; elements.min(CONVERTED) * to.size()];
    for start in (0..elements).step_by(CONVERTED) {
        let count = CONVERTED.min(elements - start);
        let target = &mut buffer[..count * to.size()];
        let blocks = target.par_chunks_mut(BLOCK * to.size()).enumerate();
        let read = blocks.try_for_each_init(Vec::new, |source, (block, target)| {
            let begin = (start + block * BLOCK) * from.size();
            if from == to {
                return view.read(begin, target);
            }
            source.resize(target.len() / to.size() * from.size(), 0);
            view.read(begin, source)?;
            convert(from, source, to, target);
            Ok(())
        });
        read.map_err(TrainError::unreadable)?;
        session.write(&TensorRef::dense(at.arena, at.offset + start * to.size(), to, [count]), target)?;
    }
    Ok(())
}

/// Elements of a file's tensor from one on, as f32.
pub fn read_as_f32(view: &TensorView<'_>, start: usize, numbers: &mut [f32]) -> Result<()> {
    let mut bytes = vec![0; numbers.len() * view.dtype.size()];
    view.read(start * view.dtype.size(), &mut bytes).map_err(TrainError::unreadable)?;
    let mut wide = vec![0; numbers.len() * DType::F32.size()];
    convert(view.dtype, &bytes, DType::F32, &mut wide);
    let values = wide.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    numbers.iter_mut().zip(values).for_each(|(number, value)| *number = value);
    Ok(())
}

fn check_names(
    session: &mut dyn Session,
    program: &Program,
    part: WeightSet,
    files: &Weights,
    place: &str,
) -> Result<()> {
    let mut problems = Vec::new();
    for slot in part.of(program) {
        let name = part.name(slot);
        if !files.contains(&name) {
            problems.push(format!("`{name}` is missing"));
            continue;
        }
        let view = files.get(&name).map_err(TrainError::model_file)?;
        if view.shape != slot.shape().as_slice() {
            problems.push(format!("`{name}` has shape {:?}, the model needs {:?}", view.shape, slot.shape()));
        } else if !view.dtype.is_float() {
            problems.push(format!("`{name}` holds {}, expected floating point", view.dtype));
        }
    }
    for name in files.names() {
        let used = part.of(program).any(|slot| part.name(slot) == name);
        if used || is_computed(name) {
            continue;
        }
        let copy = match part {
            WeightSet::Base => is_tied_copy(program, part, files, name)?,
            WeightSet::Adapter => {
                is_tied_copy(program, part, files, name)? || is_base_copy(session, program, files, name)?
            }
        };
        if !copy {
            problems.push(format!("`{name}` does not belong to the model"));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    let more = problems.len().saturating_sub(20);
    problems.truncate(20);
    let rest = if more > 0 { format!("\n  … and {more} more") } else { String::new() };
    let text = format!("{place}: the weights do not fit the model:\n  {}{rest}", problems.join("\n  "));
    Err(TrainError::Usage(text))
}

fn is_tied_copy(program: &Program, part: WeightSet, files: &Weights, name: &str) -> Result<bool> {
    let extra = files.get(name).map_err(TrainError::model_file)?;
    for slot in part.of(program).filter(|slot| !slot.adapter) {
        let Ok(view) = files.get(&part.name(slot)) else { continue };
        if view.shape == extra.shape && view.has_bytes_of(&extra).map_err(TrainError::unreadable)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_base_copy(session: &mut dyn Session, program: &Program, files: &Weights, name: &str) -> Result<bool> {
    let base = name.strip_prefix(crate::peft::PREFIX).map(|name| name.replace(".base_layer.", "."));
    let Some(slot) = WeightSet::Base.of(program).find(|slot| Some(&slot.name) == base.as_ref()) else {
        return Ok(false);
    };
    let copy = files.get(name).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)?;
    Ok(copy.shape == *slot.shape() && copy.cast(slot.dtype()).bytes == read(session, slot)?.bytes)
}

/// Gives every parameter of a part its first values: a function of the seed, the parameter's name
/// and the element's index. With an adapter, whole modules begin as in the base model, and [`take_prepared`] gives
/// the rest what follows from other weights.
pub fn draw(session: &mut dyn Session, program: &Program, part: WeightSet, seed: u64) -> Result<()> {
    let begins_here =
        |slot: &&ParameterSlot| slot.init != Initializer::Prepared && (part == WeightSet::Base || slot.adapter);
    for slot in part.of(program).filter(begins_here) {
        draw_slot(session, slot, seed)?;
    }
    Ok(())
}

/// Gives the parameters that begin as the preparation computes them their first values. Behind the preparation.
pub fn take_prepared(session: &mut dyn Session, program: &Program) -> Result<()> {
    let Some(entry) = program.entry(EntryKind::Prepare, None) else { return Ok(()) };
    for slot in program.layout.parameters.iter().filter(|slot| slot.init == Initializer::Prepared) {
        let output = program.entries[entry].outputs.iter().find(|(name, _)| *name == slot.name);
        let (_, at) = output.expect("the preparation computes what a parameter begins as");
        let mut values = HostTensor::zeros(at.dtype, at.shape.clone());
        session.read(at, &mut values.bytes)?;
        for place in std::iter::once(&slot.weight).chain(&slot.master) {
            session.write(place, &values.cast(place.dtype).bytes)?;
        }
    }
    Ok(())
}

fn draw_slot(session: &mut dyn Session, slot: &ParameterSlot, seed: u64) -> Result<()> {
    if slot.packed.is_some() {
        return quantise::write(session, slot, &|start, numbers| {
            drawn(slot, seed, start, numbers);
            Ok(())
        });
    }
    let elements = slot.weight.len();
    let places: Vec<&TensorRef> = std::iter::once(&slot.weight).chain(&slot.master).collect();
    let mut buffers: Vec<Vec<u8>> =
        places.iter().map(|at| vec![0; elements.min(CONVERTED) * at.dtype.size()]).collect();
    for start in (0..elements).step_by(CONVERTED) {
        let count = CONVERTED.min(elements - start);
        for (at, buffer) in places.iter().zip(&mut buffers) {
            let size = at.dtype.size();
            let target = &mut buffer[..count * size];
            target.par_chunks_mut(BLOCK * size).enumerate().for_each(|(block, target)| {
                let mut values = [0.0; BLOCK];
                let values = &mut values[..target.len() / size];
                drawn(slot, seed, start + block * BLOCK, values);
                let bytes: &mut Vec<u8> = &mut Vec::with_capacity(size_of_val(values));
                values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
                convert(DType::F32, bytes, at.dtype, target);
            });
            session.write(&TensorRef::dense(at.arena, at.offset + start * size, at.dtype, [count]), target)?;
        }
    }
    Ok(())
}

/// Values of a parameter from an element on, which is a multiple of 4.
fn drawn(slot: &ParameterSlot, seed: u64, start: usize, values: &mut [f32]) {
    let of = Sequence { seed, stream: stream_of(&slot.name), start };
    match slot.init {
        Initializer::Constant(value) => values.fill(value),
        Initializer::Uniform(bound) => uniforms(of, bound, values),
        Initializer::Normal(deviation) => normals(of, deviation, values),
        Initializer::Prepared => unreachable!("it is not drawn"),
    }
}

/// The random stream of a parameter: its name, hashed (FNV-1a), so that a model with one more layer
/// draws the same values for the others.
fn stream_of(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ byte as u32).wrapping_mul(0x0100_0193))
}

/// A parameter's values: as they are stored, or as products read those of a packed one.
pub fn read(session: &mut dyn Session, slot: &ParameterSlot) -> Result<HostTensor> {
    let stored = read_stored(session, slot)?;
    Ok(match &slot.packed {
        None => stored,
        Some(packed) => quantise::values(packed, &stored.bytes),
    })
}

/// A parameter as it is stored; a packed one as bytes.
pub fn read_stored(session: &mut dyn Session, slot: &ParameterSlot) -> Result<HostTensor> {
    let mut tensor = HostTensor::zeros(slot.weight.dtype, slot.weight.shape.clone());
    session.read(&slot.weight, &mut tensor.bytes)?;
    Ok(tensor)
}

/// The gradient of a parameter, each element multiplied with `scale`.
pub fn read_gradient(session: &mut dyn Session, slot: &ParameterSlot, scale: f32) -> Result<Option<HostTensor>> {
    let Some(at) = &slot.gradient else { return Ok(None) };
    assert_eq!(at.dtype, DType::F32, "gradients are kept in f32");
    let mut bytes = vec![0; at.bytes()];
    session.read(at, &mut bytes)?;
    for element in bytes.chunks_exact_mut(4) {
        let value = f32::from_le_bytes(element.try_into().expect("four bytes")) * scale;
        element.copy_from_slice(&value.to_le_bytes());
    }
    Ok(Some(HostTensor::new(DType::F32, at.shape.clone(), bytes)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use data::safetensors::{NamedTensor, write};
    use program::{ArenaId, BackendError, MemoryLine};

    use super::*;

    /// Memory of one arena, and nothing that runs.
    pub(crate) struct Memory(pub Vec<u8>);

    impl Session for Memory {
        fn program(&self) -> &Arc<Program> {
            unreachable!("no program is requested")
        }

        fn adopt(&mut self, _: Arc<Program>) -> std::result::Result<(), BackendError> {
            unreachable!("no program is given")
        }

        fn write(&mut self, at: &TensorRef, bytes: &[u8]) -> std::result::Result<(), BackendError> {
            self.0[at.offset..at.offset + at.bytes()].copy_from_slice(bytes);
            Ok(())
        }

        fn read(&mut self, at: &TensorRef, out: &mut [u8]) -> std::result::Result<(), BackendError> {
            out.copy_from_slice(&self.0[at.offset..at.offset + at.bytes()]);
            Ok(())
        }

        fn run(&mut self, _: usize) -> std::result::Result<(), BackendError> {
            unreachable!("nothing runs")
        }

        fn run_instruction(&mut self, _: usize, _: usize) -> std::result::Result<(), BackendError> {
            unreachable!("nothing runs")
        }

        fn allocated(&self) -> Vec<MemoryLine> {
            Vec::new()
        }

        fn profile(&mut self, _: usize) -> std::result::Result<Vec<f64>, BackendError> {
            unreachable!("nothing runs")
        }

        fn synchronize(&mut self) -> std::result::Result<(), BackendError> {
            Ok(())
        }
    }

    #[test]
    fn a_tensor_is_read_in_parts_into_its_place() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("model.safetensors");
        // Beyond one part, and no whole number of blocks.
        let shape = [CONVERTED / 8 + 5, 9];
        let elements = shape[0] * shape[1];
        let values: Vec<f32> = (0..elements).map(|i| i as f32 * 1e-3 - 70.0).collect();
        let tensor = HostTensor::from_f32(shape, &values);
        let (nothing, one) = (HostTensor::from_f32([0, 3], &[]), HostTensor::from_f32([1], &[2.5]));
        let named = [("a", &tensor), ("b", &nothing), ("c", &one)].map(|(name, of)| NamedTensor::new(name, of));
        write(&path, &named, &Default::default()).unwrap();
        let files = Weights::open(&path).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let mut memory = Memory(vec![0xee; 32 + 4 * elements + 8]);
            for of in [&tensor, &nothing, &one] {
                let name = if of.shape.len() == 1 {
                    "c"
                } else if of.is_empty() {
                    "b"
                } else {
                    "a"
                };
                let at = TensorRef::dense(ArenaId(0), 32, dtype, of.shape.clone());
                write_as_stored(&mut memory, &at, &files.get(name).unwrap()).unwrap();
                let expected = of.cast(dtype).bytes;
                assert!(memory.0[32..32 + expected.len()] == expected, "{name} as {dtype}");
            }
            assert!(memory.0[..32].iter().all(|byte| *byte == 0xee));
            let end = 32 + dtype.size() * elements;
            assert!(memory.0[end..].iter().all(|byte| *byte == 0xee));
        }
    }

    #[test]
    fn weights_that_are_cut_short_are_an_error() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("model.safetensors");
        let tensor = HostTensor::from_f32([CONVERTED + 3], &vec![1.0; CONVERTED + 3]);
        write(&path, &[NamedTensor::new("a", &tensor)], &Default::default()).unwrap();
        let files = Weights::open(&path).unwrap();
        let cut = std::fs::File::options().write(true).open(&path).unwrap();
        cut.set_len(4 * CONVERTED as u64).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let at = TensorRef::dense(ArenaId(0), 0, dtype, tensor.shape.clone());
            let mut memory = Memory(vec![0; at.bytes()]);
            let error = write_as_stored(&mut memory, &at, &files.get("a").unwrap()).unwrap_err();
            assert!(error.to_string().contains("was cut short while it was in use"), "{error}");
            assert_eq!(error.exit_code(), 1, "the options are right");
        }
    }

    pub(crate) fn slot(name: &str, init: Initializer) -> ParameterSlot {
        ParameterSlot {
            name: name.into(),
            weight: TensorRef::dense(ArenaId(0), 0, DType::F32, [50, 41]),
            packed: None,
            init,
            adapter: false,
            saved: false,
            transposed: false,
            trainable: true,
            decay: true,
            gradient: None,
            states: Vec::new(),
            master: None,
        }
    }

    fn drawn(slot: &ParameterSlot, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; slot.weight.len()];
        super::drawn(slot, seed, 0, &mut values);
        values
    }

    #[test]
    fn drawn_values_have_their_distribution_and_depend_on_seed_and_name() {
        let normal = drawn(&slot("a", Initializer::Normal(0.02)), 7);
        let deviation = (normal.iter().map(|x| (*x as f64).powi(2)).sum::<f64>() / normal.len() as f64).sqrt();
        assert!((deviation - 0.02).abs() < 0.001, "{deviation}");
        assert_eq!(normal, drawn(&slot("a", Initializer::Normal(0.02)), 7));
        assert_ne!(normal, drawn(&slot("a", Initializer::Normal(0.02)), 8));
        assert_ne!(normal, drawn(&slot("b", Initializer::Normal(0.02)), 7));
        let uniform = drawn(&slot("a", Initializer::Uniform(0.5)), 7);
        let largest = uniform.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let mean = uniform.iter().sum::<f32>() / uniform.len() as f32;
        assert!(largest <= 0.5 && largest > 0.49 && mean.abs() < 0.02, "{largest} {mean}");
        assert!(drawn(&slot("a", Initializer::Constant(1.0)), 7).iter().all(|x| *x == 1.0));
    }
}
