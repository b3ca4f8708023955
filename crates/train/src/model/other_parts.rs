//! Tensors of an adapter for parts of the model that are not computed, such as a vision tower: they are left out when
//! the adapter is loaded, and handed on to the adapter that is trained further.
//!
//! Knows names; merging, which goes by the model's files, needs none of this.

use std::collections::HashMap;
use std::path::Path;

use compiler::{AdapterOptions, AdapterRules};
use data::safetensors::Weights;
use graph::{FileForm, Model};
use tensor::DType;

use crate::error::{Result, TrainError};
use crate::model::peft::{self, PREFIX};

/// The end of the name of an adapter's first matrix.
const FIRST: &str = ".lora_A.weight";

/// True if a tensor of an adapter's file is on a part that is not computed.
pub fn is_other(name: &str, form: &FileForm) -> bool {
    let Some(name) = name.strip_prefix(PREFIX) else { return false };
    let renamed = |[from, to]: &[String; 2]| Some(format!("{to}{}", name.strip_prefix(from.as_str())?));
    let own = form.renamed.iter().find_map(renamed);
    form.carries(own.as_deref().unwrap_or(name))
}

/// Modules of an adapter that are on such parts, as targets name them.
pub fn modules(files: &Weights, form: &FileForm) -> Vec<String> {
    let others = files.names().into_iter().filter(|name| is_other(name, form));
    others.filter_map(|name| Some(name.strip_prefix(PREFIX)?.strip_suffix(FIRST)?.to_owned())).collect()
}

/// The options of an adapter folder for the part of the model that is computed: without the targets and whole modules that
/// the adapter has only elsewhere. Errors: an adapter that is on other parts alone.
pub fn read_options(folder: &Path, dtype: DType, model: &Model) -> Result<AdapterOptions> {
    let mut options = peft::read_options(folder, dtype, &model.adapters)?;
    if !model.adapters.apart.is_empty() {
        reach_parts(&mut options, &peft::weights(folder)?)?;
    }
    if model.files.carried.is_empty() {
        return Ok(options);
    }
    let files = peft::weights(folder)?;
    let (others, own): (Vec<&str>, Vec<&str>) = files
        .names()
        .into_iter()
        .filter_map(|name| name.strip_prefix(PREFIX))
        .partition(|name| is_other(&format!("{PREFIX}{name}"), &model.files));
    if others.is_empty() {
        return Ok(options);
    }
    let mut targets = Vec::new();
    for target in &options.targets {
        let alone = AdapterOptions { targets: vec![target.clone()], parameters: Vec::new(), ..options.clone() };
        let rules = AdapterRules::new(&alone)?;
        let hits = |names: &[&str]| {
            let mut weights = names.iter().filter_map(|name| name.strip_suffix(FIRST));
            weights.any(|module| matches!(rules.of(&format!("{module}.weight")), Ok(Some(_))))
        };
        if hits(&own) || !hits(&others) {
            targets.push(target.clone());
        }
    }
    options.targets = targets;
    let alone = |saved: &String| AdapterOptions { saved: vec![saved.clone()], ..options.clone() };
    let is_in = |saved: &String, names: &[&str]| names.iter().any(|name| alone(saved).saves(name).is_some());
    let saved: Vec<String> =
        options.saved.iter().filter(|name| is_in(name, &own) || !is_in(name, &others)).cloned().collect();
    options.saved = saved;
    if options.targets.is_empty() && options.parameters.is_empty() {
        let text = format!(
            "{}: all that it adapts is in parts of the model that are not computed here: {}",
            folder.display(),
            model.files.carried.join(", ")
        );
        return Err(TrainError::Usage(text));
    }
    Ok(options)
}

/// Adds the modules of parts other than the text that an adapter holds matrices for and that its targets do not reach: for PEFT
/// every name reaches all parts, here only names with dots do. Targets without a module in the adapter are left out.
fn reach_parts(options: &mut AdapterOptions, files: &Weights) -> Result<()> {
    let module = |name: &str| Some(name.strip_prefix(PREFIX)?.strip_suffix(FIRST)?.to_owned());
    let modules: Vec<String> = files.names().into_iter().filter_map(module).collect();
    let hits = |rules: &AdapterRules, module: &String| matches!(rules.of(&format!("{module}.weight")), Ok(Some(_)));
    let is_apart = |module: &String| options.form.apart.iter().any(|part| module.starts_with(part.as_str()));
    let rules = AdapterRules::new(options)?;
    let missing: Vec<_> = modules.iter().filter(|of| is_apart(of) && !hits(&rules, of)).cloned().collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut targets = Vec::new();
    for target in &options.targets {
        let alone = AdapterOptions { targets: vec![target.clone()], parameters: Vec::new(), ..options.clone() };
        let rules = AdapterRules::new(&alone)?;
        targets.extend(modules.iter().any(|of| hits(&rules, of)).then(|| target.clone()));
    }
    targets.extend(missing);
    options.targets = targets;
    Ok(())
}

/// The weights of an adapter folder on the part of the model that is computed.
pub fn weights(folder: &Path, form: &FileForm) -> Result<Weights> {
    let files = peft::weights(folder)?.filtered(|name| !is_other(name, form));
    // PEFT gives the matrices of convolutions, such as that of patches, the axes of the convolution.
    let of_matrix = |name: &str| {
        let shape = files.get(name).ok().filter(|_| name.contains(".lora_"))?.shape;
        (shape.len() > 2).then(|| (name.to_owned(), vec![shape[0], shape[1..].iter().product()]))
    };
    let flat: HashMap<String, Vec<usize>> = files.names().into_iter().filter_map(of_matrix).collect();
    Ok(files.reshaped(|name| flat.get(name).map(Vec::as_slice)))
}
