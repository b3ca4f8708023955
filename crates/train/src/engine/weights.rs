//! Fills parameters from safetensors files by name, or initializes them from the seed. Loops over the parameter table;
//! no name has a special meaning.

use data::safetensors::Weights;
use program::{Initializer, ParameterSlot, Program, Session};
use tensor::{DType, HostTensor};

use crate::engine::Engine;
use crate::engine::fill::fill;
use crate::error::{Result, TrainError};
use crate::model::packed_weights::PackedWeights;
use crate::model::quantizer;
use crate::model::rounding::Rounding;
use crate::model::weight_set::WeightSet;
use crate::model::weight_source::WeightSource;

/// Endings of names of tables that old checkpoints store and every engine computes itself.
const COMPUTED: &[&str] = &["rotary_emb.inv_freq", "attn.masked_bias"];

/// True for the name of a table that every engine computes itself.
pub fn is_computed(name: &str) -> bool {
    COMPUTED.iter().any(|ending| name.ends_with(ending))
}

/// Reads every parameter of a part from files, converting to the type in which it is stored; and its f32 copy, where
/// the optimizer keeps one.
///
/// Errors name tensors that are missing, superfluous or of another shape, all at once. Two kinds of
/// superfluous tensors are accepted: one that equals a used base weight of the same file bit for bit, as tied weights
/// are written; with an adapter, a copy of a base weight that the session holds, as PEFT writes it
/// for an adapted head.
pub fn load(engine: &mut Engine, part: WeightSet, files: Weights, place: &str) -> Result<()> {
    load_but(engine, part, files, place, None)
}

/// The same of a base model that lacks one parameter, or not: that is drawn then.
pub fn load_and_draw(engine: &mut Engine, files: Weights, place: &str, lacking: &str, seed: u64) -> Result<()> {
    let is_lacking = !files.contains(lacking);
    if is_lacking {
        write(engine, WeightSet::Base, |slot| slot.name == lacking, WeightSource::Drawn { seed })?;
    }
    load_but(engine, WeightSet::Base, files, place, is_lacking.then_some(lacking))
}

fn load_but(engine: &mut Engine, part: WeightSet, files: Weights, place: &str, lacking: Option<&str>) -> Result<()> {
    check_names(engine, part, &files, place, lacking)?;
    let is_there = |slot: &ParameterSlot| lacking != Some(slot.name.as_str());
    write(engine, part, is_there, WeightSource::Files(files))
}

/// Writes what is `wanted` of a part. Base weights that are in memory only until codes are made of them are read from there
/// again.
fn write(
    engine: &mut Engine,
    part: WeightSet,
    wanted: impl Fn(&ParameterSlot) -> bool,
    source: WeightSource,
) -> Result<()> {
    let program = engine.program().clone();
    let wanted = |slot: &ParameterSlot| part.holds(slot) && wanted(slot);
    let numbers = |name: &str, start: usize, out: &mut [f32]| source.numbers(&program, name, start, out);
    let mut packed_weights = PackedWeights::of(&program, &numbers);
    let mut rounding = Rounding::default();
    fill(engine.session(), &program, wanted, |session, slot| {
        source.write(session, part, slot, &mut packed_weights, &mut rounding)
    })?;
    if part == WeightSet::Base {
        engine.set_rounding(rounding);
        engine.set_origin(source);
    }
    Ok(())
}

fn check_names(
    engine: &mut Engine,
    part: WeightSet,
    files: &Weights,
    place: &str,
    lacking: Option<&str>,
) -> Result<()> {
    let program = &*engine.program().clone();
    let mut problems = Vec::new();
    for slot in part.of(program).filter(|slot| lacking != Some(slot.name.as_str())) {
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
            WeightSet::Adapter => is_tied_copy(program, part, files, name)? || is_base_copy(engine, files, name)?,
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

fn is_base_copy(engine: &mut Engine, files: &Weights, name: &str) -> Result<bool> {
    let program = engine.program().clone();
    let base = name.strip_prefix(crate::model::peft::PREFIX).map(|name| name.replace(".base_layer.", "."));
    let Some(slot) = WeightSet::Base.of(&program).find(|slot| Some(&slot.name) == base.as_ref()) else {
        return Ok(false);
    };
    let copy = files.get(name).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)?;
    Ok(copy.shape == *slot.shape() && copy.cast(slot.dtype()).bytes == read(engine, slot)?.bytes)
}

/// Gives every parameter of a part its first values: a function of the seed, the parameter's name
/// and the element's index. With an adapter, whole modules begin as in the base model, and [`take_prepared`] gives
/// the rest what follows from other weights.
pub fn draw(engine: &mut Engine, part: WeightSet, seed: u64) -> Result<()> {
    let begins_here =
        |slot: &ParameterSlot| slot.init != Initializer::Prepared && (part == WeightSet::Base || slot.adapter);
    write(engine, part, begins_here, WeightSource::Drawn { seed })
}

/// Gives the parameters that begin as the preparation computes them their first values. After the preparation.
pub fn take_prepared(session: &mut dyn Session, program: &Program) -> Result<()> {
    let Some(entry) = program.preparation(None) else { return Ok(()) };
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

/// A parameter's values: as they are stored, or as products read those of a packed one.
pub fn read(engine: &mut Engine, slot: &ParameterSlot) -> Result<HostTensor> {
    let stored = read_stored(engine, slot)?;
    Ok(match &slot.packed {
        None => stored,
        Some(packed) => quantizer::values(packed, &stored.bytes),
    })
}

/// A parameter as it is stored; a packed one as bytes. What is in memory no more comes from where it was loaded from.
pub fn read_stored(engine: &mut Engine, slot: &ParameterSlot) -> Result<HostTensor> {
    match slot.load_group {
        None => engine.tensor(&slot.weight),
        Some(_) => engine.origin().stored(&engine.program().clone(), slot),
    }
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
