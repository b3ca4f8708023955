//! Merging of adapters into weights: W + scale·B·A in f32, rounded once to the type of W.
//!
//! [`merge`] goes from folder to folder, tensor by tensor, and compiles nothing. Knows tensor names; no model.

use std::collections::BTreeMap;
use std::path::Path;

use compiler::{AdapterOf, AdapterOptions, AdapterRules, Stacked};
use data::Stop;
use data::safetensors::{TensorInfo, Weights};
use graph::AdapterForm;
use program::PackedWeight;
use tensor::DType;

use crate::artifacts::card::{self, Form};
use crate::error::{Result, TrainError, go_on};
use crate::files::staged::Staged;
use crate::files::written::Written;
use crate::inference::generate::{follow_end_tokens, write_end_tokens};
use crate::model::adapted::{self, Pairs};
use crate::model::base_format::{self, QuantisedBase};
use crate::model::folder::{handed_on, write_companions_of_adapter, write_files, write_weights};
use crate::model::hf_config::HfConfig;
use crate::model::json_files::TOKENIZER_FILE;
use crate::model::packed_weights::PackedWeights;
use crate::model::peft;
use crate::model::quantized_checkpoint;
use crate::model::rounding::Rounding;
use crate::model::source::{SCORE, config_of, stacks};
use crate::model::tokenizer_class;
use crate::model::weight_source::read_as_f32;

/// The result of [`merge`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Tensors that an adapter was added to.
    pub adapted: usize,
    /// Number of tensors in all.
    pub tensors: usize,
    /// Bytes of the weights that were written.
    pub bytes: usize,
    /// The form of the quantised weights that the adapter was trained on, if these were made again.
    pub quantised: Option<String>,
    /// Notes for the user who merges: rounding, a class of the tokenizer.
    pub notes: Vec<String>,
}

/// Writes a model with an adapter in PEFT's form added to its weights. Every weight keeps its type. One tensor is in
/// memory at a time. The folder appears whole; asked to stop, there is nothing. What a killed merge left is removed first.
///
/// An adapter that was trained on quantised weights is added to their values, which are made again from the model's
/// weights and have the type that products read. `as_is`: it is added to the weights as they are all the same.
///
/// `names`: what the model's architecture says of names.
///
/// Errors: an adapter of a variant that is not computed, one whose matrices do not fit the model's weights, and
/// anything that stands at `output` already.
pub fn merge(
    model: &Path,
    adapter: &Path,
    output: &Path,
    names: &ModelNames,
    as_is: bool,
    stop: Stop<'_>,
) -> Result<Merged> {
    let options = peft::read_options(adapter, DType::F32, &names.adapters)?;
    let renamed = names.renamed.as_slice();
    let rules = AdapterRules::new(&options)?;
    let config = config_of(model)?;
    handed_on(model)?;
    handed_on(adapter)?;
    let base =
        quantized_checkpoint::weights(model)?.unstacked(&stacks(&names.adapters)).map_err(TrainError::model_file)?;
    let adapters = peft::weights(adapter)?;
    // The adapter of a reward model brings the head that the model does not have.
    let score = format!("{}{SCORE}", peft::PREFIX);
    let new_head = (adapters.contains(&score) && !base.contains(SCORE))
        .then(|| adapters.get(&score).and_then(|view| view.to_host()).map_err(TrainError::model_file))
        .transpose()?;
    let (config, base) = match &new_head {
        Some(_) => (config.as_reward_model(), base.without(&["lm_head.weight".to_owned()])),
        None => (config, base),
    };
    let transposed = peft::says_transposed(adapter)?;
    let targets = targets(&base, &adapters, (&options, &rules), renamed, transposed).map_err(|problems| {
        let place = adapter.display();
        TrainError::Usage(format!("{place}: the adapter does not fit the model:\n  {}", problems.join("\n  ")))
    })?;
    let trained_on = if as_is { None } else { base_format::read(adapter)? };
    let packed =
        trained_on.as_ref().map(|of| packed_weights(&base, of, renamed, adapter)).transpose()?.unwrap_or_default();
    // What was quantised is written in the type of the rest.
    let saved = config.dtype().unwrap_or(DType::BF16);
    let dtype_of = |name: &str| {
        let view = base.get(name).map_err(TrainError::model_file)?;
        let dtype = if view.is_dequantised() { saved } else { view.dtype };
        Ok::<_, TrainError>(packed.get(name).map_or(dtype, |of| of.dtype))
    };
    // Tensors, and what lies one after another in each: itself, or the matrices of a stack.
    let mut parts: BTreeMap<&str, BTreeMap<usize, &str>> = BTreeMap::new();
    for name in base.names() {
        let (whole, first) = base.whole_of(name).unwrap_or((name, 0));
        parts.entry(whole).or_default().insert(first, name);
    }
    let info = |(name, of): (&&str, &BTreeMap<usize, &str>)| {
        let (shape, first) = (base.get(name).map_err(TrainError::model_file)?.shape.to_vec(), of[&0]);
        Ok(TensorInfo { name: (*name).to_owned(), dtype: dtype_of(first)?, shape })
    };
    let mut tensors = parts.iter().map(info).collect::<Result<Vec<_>>>()?;
    let floats = tensors.iter().filter(|t| t.dtype.is_float());
    let dtype = floats.max_by_key(|t| t.bytes()).map_or(DType::F32, |t| t.dtype);
    let new_head = new_head.map(|head| head.cast(dtype));
    tensors.extend(new_head.iter().map(|head| TensorInfo { name: SCORE.to_owned(), dtype, shape: head.shape.clone() }));
    let mut done = Merged {
        adapted: parts.values().filter(|of| of.values().any(|name| is_added(&targets, name))).count(),
        tensors: tensors.len(),
        bytes: tensors.iter().map(TensorInfo::bytes).sum(),
        quantised: trained_on.map(|of| base_format::text(of.made)),
        notes: Vec::new(),
    };
    let mut rounding = Rounding::default();
    let mut written = Written::by("merge");
    Staged::clear_abandoned(&written.owner, output)?;
    let staged = Staged::begin(&written, output)?;
    let numbers = |name: &str, start: usize, out: &mut [f32]| {
        read_as_f32(&base.get(name).map_err(TrainError::model_file)?, start, out)
    };
    let named = packed.iter().map(|(name, of)| (name.as_str(), of));
    let (mut packed_weights, mut pairs) = (PackedWeights::new(named, &numbers), Pairs::default());
    let mut bytes_of = |name: &str| -> Result<Vec<u8>> {
        let dtype = dtype_of(name)?;
        if let Some(Change::Replaced(name)) = targets.get(name) {
            let whole = adapters.get(name).map_err(TrainError::model_file)?;
            return Ok(rounding.cast(whole.to_host().map_err(TrainError::unreadable)?, dtype).bytes);
        }
        let weight = match packed.contains_key(name) {
            true => packed_weights.values(name)?,
            false => base.get(name).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)?,
        };
        let weight = rounding.cast(weight, dtype);
        let Some(Change::Added(of)) = targets.get(name) else { return Ok(weight.bytes) };
        let read = |which: &str| {
            let name = format!("{}{}.{which}", peft::PREFIX, of.module);
            adapters.get(&name).map_err(TrainError::model_file)?.to_host().map_err(TrainError::unreadable)
        };
        let pair = pairs.of(&of.module, |which| read(&format!("{which}.weight")))?;
        let magnitude = options.magnitudes.then(|| read("lora_magnitude_vector")).transpose()?;
        Ok(adapted::added(&weight, of, pair, magnitude.as_ref(), transposed, &mut rounding).bytes)
    };
    write_weights(staged.path(), tensors, |tensor| {
        if let Some(head) = new_head.as_ref().filter(|_| tensor.name == SCORE) {
            return Ok(head.bytes.clone());
        }
        let mut bytes = Vec::with_capacity(tensor.bytes());
        for name in parts[tensor.name.as_str()].values() {
            go_on(stop)?;
            bytes.append(&mut bytes_of(name)?);
        }
        Ok(bytes)
    })?;
    if rounding.beyond() > 0 {
        let (count, name) = (rounding.beyond(), dtype.name());
        return Err(TrainError::Failed(format!(
            "{}: with the adapter, {count} of its weights would be larger than {name} holds, the type of the model's files\n  hint: merge \
             into a copy of the model in bfloat16 or float32",
            model.display()
        )));
    }
    write_files(&config, dtype, model, None, staged.path())?;
    write_companions_of_adapter(adapter, staged.path())?;
    name_end_tokens(model, adapter, staged.path(), &config)?;
    card::hand_on(adapter, Form::Merged, staged.path())?;
    done.notes.extend(rounding.text(dtype.name()));
    let tokenizer = if adapter.join(TOKENIZER_FILE).is_file() { adapter } else { model };
    done.notes.extend(tokenizer_class::note(tokenizer, model));
    staged.commit(&mut written)?;
    Ok(done)
}

/// Makes a merged model name the end tokens that its adapter was trained with: those that it brings along; of an adapter of
/// another program, which brings a tokenizer alone, the end of an answer in its chat template.
fn name_end_tokens(model: &Path, adapter: &Path, merged: &Path, config: &HfConfig) -> Result<()> {
    let tokenizer = adapter.join(TOKENIZER_FILE);
    match () {
        () if !tokenizer.is_file() => Ok(()),
        () if adapter.join("generation_config.json").is_file() => follow_end_tokens(merged, model),
        () => {
            let of_adapter = data::Tokenizer::from_folder(adapter);
            write_end_tokens(merged, config, of_adapter.is_ok_and(|of| of.chat_template(false).is_some()))
        }
    }
}

/// The weights of a model that were in codes when its adapter was trained.
fn packed_weights(
    base: &Weights,
    of: &QuantisedBase,
    renamed: &[[String; 2]],
    adapter: &Path,
) -> Result<BTreeMap<String, PackedWeight>> {
    let mut packed = BTreeMap::new();
    let groups = of.weights.iter().zip(0u32..);
    let weights =
        groups.flat_map(|(group, number)| group.iter().map(move |whole| (whole, (group.len() > 1).then_some(number))));
    for (whole, magnitude_group) in weights {
        let Some(name) = name_in_files(base, whole, renamed) else {
            let place = adapter.display();
            return Err(TrainError::Usage(format!(
                "{place}: it was trained on `{whole}`, which the model does not have"
            )));
        };
        let view = base.get(&name).map_err(TrainError::model_file)?;
        if !of.made.fits(view.shape) || !view.dtype.is_float() {
            let text = format!(
                "`{name}` is {} {:?}, which is not kept as {}",
                view.dtype,
                view.shape,
                base_format::text(of.made)
            );
            return Err(TrainError::Usage(text));
        }
        let (packing, shape) = (of.made.packing(), view.shape.to_vec());
        packed.insert(name, PackedWeight { packing, shape, dtype: of.dtype, made: Some(of.made), magnitude_group });
    }
    Ok(packed)
}

/// The change that an adapter makes to a weight.
enum Change {
    /// It adds the product of this adapter's matrices.
    Added(AdapterOf),
    /// It has the whole weight under this name.
    Replaced(String),
}

fn is_added(targets: &BTreeMap<String, Change>, weight: &str) -> bool {
    matches!(targets.get(weight), Some(Change::Added(_)))
}

/// Each weight that an adapter changes, by its name in the model's files; or what does not fit.
fn targets(
    base: &Weights,
    adapters: &Weights,
    (options, rules): (&AdapterOptions, &AdapterRules),
    renamed: &[[String; 2]],
    transposed: bool,
) -> std::result::Result<BTreeMap<String, Change>, Vec<String>> {
    let mut problems = Vec::new();
    let mut found = BTreeMap::new();
    let stacked = stacked(base, rules, renamed).map_err(|problem| vec![problem])?;
    for name in adapters.names() {
        let module = name.strip_prefix(peft::PREFIX).and_then(|name| name.strip_suffix(".lora_A.weight"));
        let is_saved = |whole: &&str| options.saves(whole).is_some() || name == peft::TIED_HEAD;
        let whole = name.strip_prefix(peft::PREFIX).filter(is_saved);
        if let (Some(whole), None) = (whole, module) {
            if whole == SCORE && !base.contains(SCORE) {
                continue;
            }
            match replaced(base, adapters, name, whole, renamed) {
                Ok(Some(weight)) => drop(found.insert(weight, Change::Replaced(name.to_owned()))),
                Ok(None) => {}
                Err(problem) => problems.push(problem),
            }
            continue;
        }
        let Some(module) = module else {
            // PEFT writes the whole head next to an adapted one: its values are the model's own.
            let is_magnitude = options.magnitudes && name.ends_with(peft::MAGNITUDE);
            let known = is_magnitude || name.ends_with(".lora_B.weight") || name.contains(".base_layer.");
            if !known {
                problems.push(format!("`{name}` is not a matrix of a LoRA adapter on a linear layer"));
            }
            continue;
        };
        let found_weights = match stacked.get(module).or_else(|| stacked.get(module.split_once('.')?.1)) {
            Some(of_module) => Ok(of_module.clone()),
            None => matrix(base, module, rules, &options.form, renamed).map(|one| vec![one]),
        };
        for (weight, mut of) in found_weights.unwrap_or_else(|problem| {
            problems.push(problem);
            Vec::new()
        }) {
            if options.form.may_be_swapped(&weight) && check(base, adapters, &weight, &of, options, transposed).is_err()
            {
                of.stack = of.stack.map(|stack| Stacked { transposed: !stack.transposed, ..stack });
            }
            match check(base, adapters, &weight, &of, options, transposed) {
                Ok(()) => drop(found.insert(weight, Change::Added(of))),
                Err(problem) => problems.push(problem),
            }
        }
    }
    if found.is_empty() && problems.is_empty() {
        problems.push("it has no matrices".to_owned());
    }
    if problems.is_empty() { Ok(found) } else { Err(problems) }
}

/// The weights in parameters of three axes that each adapter is for, by their names in the files.
fn stacked(
    base: &Weights,
    rules: &AdapterRules,
    renamed: &[[String; 2]],
) -> std::result::Result<BTreeMap<String, Vec<(String, AdapterOf)>>, String> {
    let mut found: BTreeMap<String, Vec<(String, AdapterOf)>> = BTreeMap::new();
    for name in base.names() {
        let own =
            renamed.iter().find_map(|[there, here]| Some(format!("{here}{}", name.strip_prefix(there.as_str())?)));
        let of = rules.of(own.as_deref().unwrap_or(name)).map_err(|e| e.to_string())?;
        if let Some(of) = of.filter(|of| of.stack.is_some()) {
            found.entry(of.module.clone()).or_default().push((name.to_owned(), of));
        }
    }
    Ok(found)
}

/// The weight of a module and its adapter.
fn matrix(
    base: &Weights,
    module: &str,
    rules: &AdapterRules,
    form: &AdapterForm,
    renamed: &[[String; 2]],
) -> std::result::Result<(String, AdapterOf), String> {
    let whole = format!("{module}.weight");
    let name = name_in_files(base, &whole, renamed).or_else(|| name_in_files(base, &form.in_files(&whole), renamed));
    let name = name.ok_or_else(|| format!("the model has no `{whole}`, which the adapter is for"))?;
    let of = rules.of(&whole).transpose().unwrap_or_else(|| rules.of_module(module));
    Ok((name, of.map_err(|e| e.to_string())?))
}

/// The name of a module's weight in the files. Old files of some models leave out the first component of their names,
/// and some architectures have other names for their parts there.
fn name_in_files(base: &Weights, whole: &str, renamed: &[[String; 2]]) -> Option<String> {
    let short = whole.split_once('.').map(|(_, rest)| rest.to_owned());
    let other = |[there, here]: &[String; 2]| Some(format!("{there}{}", whole.strip_prefix(here.as_str())?));
    let names = std::iter::once(whole.to_owned()).chain(renamed.iter().filter_map(other)).chain(short);
    names.into_iter().find(|name| base.contains(name))
}

/// The weight that an adapter's file has as a whole; none where it is the copy of another, as tied weights are written.
fn replaced(
    base: &Weights,
    adapters: &Weights,
    name: &str,
    whole: &str,
    renamed: &[[String; 2]],
) -> std::result::Result<Option<String>, String> {
    let view = adapters.get(name).map_err(|e| e.to_string())?;
    let Some(there) = name_in_files(base, whole, renamed) else {
        for other in adapters.names().iter().filter(|other| **other != name) {
            let other = adapters.get(other).map_err(|e| e.to_string())?;
            if other.shape == view.shape && other.has_bytes_of(&view).map_err(|e| e.to_string())? {
                return Ok(None);
            }
        }
        return Err(format!("the model has no `{whole}`, which the adapter has as a whole"));
    };
    let weight = base.get(&there).map_err(|e| e.to_string())?;
    match weight.shape == view.shape && view.dtype.is_float() {
        true => Ok(Some(there)),
        false => Err(format!("`{there}` is {:?}; `{name}` is {} {:?}", weight.shape, view.dtype, view.shape)),
    }
}

/// Checks that an adapter's matrices fit weights of the files.
fn check(
    base: &Weights,
    adapters: &Weights,
    name: &str,
    of: &AdapterOf,
    options: &AdapterOptions,
    transposed: bool,
) -> std::result::Result<(), String> {
    let module = &of.module;
    let shape = |which: &str| {
        let name = format!("{}{module}.{which}", peft::PREFIX);
        adapters.get(&name).map(|view| view.shape.to_vec()).map_err(|e| e.to_string())
    };
    let (a, b) = (shape("lora_A.weight")?, shape("lora_B.weight")?);
    let weight = base.get(name).map_err(|e| e.to_string())?;
    if !adapted::fits([&a, &b], of, weight.shape, transposed) {
        return Err(format!("`{name}` is {:?}; A {a:?} and B {b:?} do not fit it", weight.shape));
    }
    if options.magnitudes && shape("lora_magnitude_vector")? != b[..1] {
        return Err(format!("`{module}`: the magnitudes must be [{}]", b[0]));
    }
    if !weight.dtype.is_float() {
        return Err(format!("`{name}` holds {}: an adapter cannot be added to it", weight.dtype));
    }
    Ok(())
}

/// The naming rules of a model's architecture.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelNames {
    /// Beginnings of names: as the model's files may have them, and as modules are called.
    #[serde(default)]
    pub renamed: Vec<[String; 2]>,
    #[serde(default)]
    pub adapters: AdapterForm,
}
