//! The source of a session's weights: files, or the seed. Writes any of them into a session, and gives to the host what
//! a session holds only while it is loaded. Knows how weights are stored; not which are loaded when.

use std::sync::Mutex;

use data::safetensors::{TensorView, Weights};
use program::{Initializer, ParameterSlot, Program, Session, TensorRef};
use rayon::prelude::*;
use tensor::draw::{Sequence, normals, uniforms};
use tensor::{DType, HostTensor, convert};

use crate::error::{Result, TrainError};
use crate::model::packed_weights::PackedWeights;
use crate::model::rounding::Rounding;
use crate::model::weight_set::WeightSet;

/// Weights that can be read as often as they are needed.
pub enum WeightSource {
    /// Values from these files.
    Files(Weights),
    /// A function of the seed, the parameter's name and the element's index.
    Drawn { seed: u64 },
}

/// Takes the bytes of one part of a tensor after the other.
type Put<'a> = dyn FnMut(&TensorRef, &[u8]) -> Result<()> + 'a;

impl WeightSource {
    /// Writes a parameter, converted to the type in which it is stored; and its f32 copy, where the optimizer keeps one.
    /// What becomes codes is written by `packed_weights`, whose numbers are those of this source. `rounding` takes in how far
    /// other numbers of files are moved.
    pub fn write(
        &self,
        session: &mut dyn Session,
        part: WeightSet,
        slot: &ParameterSlot,
        packed_weights: &mut PackedWeights<'_>,
        rounding: &mut Rounding,
    ) -> Result<()> {
        match &slot.packed {
            Some(packed) if packed.made.is_some() => packed_weights.write(session, slot),
            Some(_) => Ok(session.write(&slot.weight, &self.codes(part, slot)?)?),
            None => {
                let places: Vec<&TensorRef> = std::iter::once(&slot.weight).chain(&slot.master).collect();
                self.parts(part, slot, &places, Some(rounding), &mut |at, bytes| Ok(session.write(at, bytes)?))
            }
        }
    }

    /// A base weight as a session of the program stores it; a packed one as bytes.
    pub fn stored(&self, program: &Program, slot: &ParameterSlot) -> Result<HostTensor> {
        let part = WeightSet::Base;
        let (at, shape) = (&slot.weight, slot.weight.shape.clone());
        let bytes = match &slot.packed {
            Some(packed) if packed.made.is_some() => {
                let numbers = |name: &str, start: usize, out: &mut [f32]| self.numbers(program, name, start, out);
                PackedWeights::of(program, &numbers).bytes(&slot.name)?
            }
            Some(_) => self.codes(part, slot)?,
            None => {
                let mut all = vec![0; at.bytes()];
                self.parts(part, slot, &[at], None, &mut |of, bytes| {
                    all[of.offset - at.offset..][..bytes.len()].copy_from_slice(bytes);
                    Ok(())
                })?;
                all
            }
        };
        Ok(HostTensor::new(at.dtype, shape, bytes))
    }

    /// Elements of a base weight of a program, by its name, from one on: of those that become codes, which no adapter's file
    /// calls otherwise.
    pub fn numbers(&self, program: &Program, name: &str, start: usize, numbers: &mut [f32]) -> Result<()> {
        match self {
            WeightSource::Files(files) => {
                read_as_f32(&files.get(name).map_err(TrainError::model_file)?, start, numbers)
            }
            WeightSource::Drawn { seed } => {
                drawn(program.parameter(name).expect("it is the program's"), *seed, start, numbers);
                Ok(())
            }
        }
    }

    /// A weight whose file has the codes themselves.
    fn codes(&self, part: WeightSet, slot: &ParameterSlot) -> Result<Vec<u8>> {
        let WeightSource::Files(files) = self else { unreachable!("what is drawn are numbers") };
        let view = files.get(&part.name(slot)).map_err(TrainError::model_file)?;
        let packing = slot.packed.as_ref().map(|packed| packed.packing);
        assert_eq!(view.packing(), packing, "a weight is kept in the form that its file has");
        view.planes().map_err(TrainError::unreadable)
    }

    /// The numbers of a parameter in the types of its places. `rounding`: how far those of files are moved in the first.
    fn parts(
        &self,
        part: WeightSet,
        slot: &ParameterSlot,
        places: &[&TensorRef],
        mut rounding: Option<&mut Rounding>,
        put: &mut Put<'_>,
    ) -> Result<()> {
        match self {
            WeightSource::Files(files) => {
                let view = files.get(&part.name(slot)).map_err(TrainError::model_file)?;
                places.iter().try_for_each(|at| read_parts(at, &view, rounding.take(), put))
            }
            WeightSource::Drawn { seed } => draw_parts(slot, *seed, places, put),
        }
    }
}

/// Elements that are read or drawn, and converted, before they are handed on: few enough to stay in the cache between the
/// two.
const CONVERTED: usize = 1 << 20;

/// Elements that one thread reads or draws, and converts, at a time.
const BLOCK: usize = 1 << 14;

/// Some elements of a dense tensor, from one on.
fn part_of(at: &TensorRef, start: usize, count: usize) -> TensorRef {
    TensorRef::dense(at.arena, at.offset + start * at.dtype.size(), at.dtype, [count])
}

/// Writes a tensor of a file into its place in one pass over its bytes, rounding to the place's type.
pub fn write_as_stored(session: &mut dyn Session, at: &TensorRef, view: &TensorView<'_>) -> Result<()> {
    read_parts(at, view, None, &mut |of, bytes| Ok(session.write(of, bytes)?))
}

/// A tensor of a file in the type of its place. Threads read and convert some elements each.
fn read_parts(at: &TensorRef, view: &TensorView<'_>, rounding: Option<&mut Rounding>, put: &mut Put<'_>) -> Result<()> {
    let (from, to, elements) = (view.dtype, at.dtype, at.len());
    let rounding = rounding.filter(|_| is_lossy(from, to)).map(Mutex::new);
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
            if let Some(rounding) = &rounding {
                let of = Rounding::of(&as_f32(from, source), &as_f32(to, target));
                rounding.lock().expect("no thread panics while it holds this").join(of);
            }
            Ok(())
        });
        read.map_err(TrainError::unreadable)?;
        put(&part_of(at, start, count), target)?;
    }
    Ok(())
}

/// Elements of a file's tensor from one on, as f32.
pub fn read_as_f32(view: &TensorView<'_>, start: usize, numbers: &mut [f32]) -> Result<()> {
    let mut bytes = vec![0; numbers.len() * view.dtype.size()];
    view.read(start * view.dtype.size(), &mut bytes).map_err(TrainError::unreadable)?;
    numbers.copy_from_slice(&as_f32(view.dtype, &bytes));
    Ok(())
}

/// Elements of a type as f32.
fn as_f32(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut wide = vec![0; bytes.len() / dtype.size() * DType::F32.size()];
    convert(dtype, bytes, DType::F32, &mut wide);
    wide.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// True if a type lacks some of the values that f32 and another one have.
fn is_lossy(from: DType, to: DType) -> bool {
    from != to && ![DType::F32, DType::F64].contains(&to)
}

/// The first values of a parameter in the types of its places.
fn draw_parts(slot: &ParameterSlot, seed: u64, places: &[&TensorRef], put: &mut Put<'_>) -> Result<()> {
    let elements = slot.weight.len();
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
            put(&part_of(at, start, count), target)?;
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
            load_group: None,
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
