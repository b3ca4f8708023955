//! The choice of the tensors of a model's files that become codes. The use of a weight follows from the model's graph:
//! embeddings, LM head, routers and the matrices of towers stay as they are.

use std::collections::{BTreeMap, BTreeSet};

use compiler::{CompileOptions, EntryOptions, PlanOptions, Recipe, Sharding};
use data::safetensors::Weights;
use graph::Parameter;
use tensor::DType;

use crate::error::{Result, TrainError};
use crate::source::ModelSource;

/// A matrix that may become codes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// The name of the parameter.
    pub parameter: String,
    /// The name of its module in files.
    pub module: String,
    /// [outputs, inputs].
    pub shape: [usize; 2],
    /// The model has its transpose.
    pub transposed: bool,
}

/// A tensor that is written as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its name among the model's tensors.
    pub tensor: String,
    /// The name that it has in files.
    pub name: String,
    pub shape: Vec<usize>,
}

/// The tensors of a model's files, in the order of their names.
#[derive(Debug, Default)]
pub struct Chosen {
    pub matrices: Vec<Matrix>,
    pub kept: Vec<Kept>,
    /// Modules that other programs take for linear layers, and which stay.
    pub ignored: BTreeSet<String>,
    /// Matrices of experts that stand one after another in a parameter that stays whole.
    pub stacked: Vec<String>,
}

impl Chosen {
    /// True if the model has transposes of matrices that become codes.
    pub fn transposed(&self) -> bool {
        self.matrices.iter().any(|of| of.transposed)
    }
}

/// Divides the tensors of a model's folder.
pub fn choose(source: &ModelSource, own: &Weights) -> Result<Chosen> {
    let linears: BTreeMap<String, Parameter> = linears(source)?;
    let mut found = Chosen::default();
    let mut wholes = BTreeSet::new();
    for tensor in own.names() {
        let view = own.get(tensor).map_err(TrainError::model_file)?;
        let parameter = linears.get(tensor).filter(|_| view.dtype.is_float() && tensor.ends_with(".weight"));
        match (parameter, view.shape) {
            (Some(of), [rows, columns]) if source.stored_shape(tensor).is_none() => {
                let shape = if of.transposed { [*columns, *rows] } else { [*rows, *columns] };
                let name = name_in_files(own, tensor);
                let module = name.trim_end_matches(".weight").to_owned();
                let matrix = Matrix { parameter: tensor.to_owned(), module, shape, transposed: of.transposed };
                found.matrices.push(matrix);
                continue;
            }
            (None, [_, _, _]) if linears.contains_key(tensor) => found.stacked.push(tensor.to_owned()),
            _ => {}
        }
        // A part of a stack stays inside of the whole tensor.
        let (whole, _) = own.whole_of(tensor).unwrap_or((tensor, 0));
        if !wholes.insert(whole.to_owned()) {
            continue;
        }
        let view = own.get(whole).map_err(TrainError::model_file)?;
        let shape = source.stored_shape(whole).unwrap_or(view.shape).to_vec();
        let name = own.name_in_file(whole).unwrap_or(whole).to_owned();
        if let Some(module) = name.strip_suffix(".weight").filter(|_| shape.len() == 2 && !is_table(&name)) {
            found.ignored.insert(module.to_owned());
        }
        found.kept.push(Kept { tensor: whole.to_owned(), name, shape });
    }
    // The head of a tied model has no tensor of its own, and is a linear layer for others all the same.
    found.ignored.insert("lm_head".to_owned());
    for part in source.model.files.carried.iter().chain(&source.model.adapters.apart) {
        let part = part.trim_end_matches('.').trim_start_matches("model.");
        found.ignored.retain(|module| !format!(".{module}.").contains(&format!(".{part}.")));
        found.ignored.insert(format!("re:.*{}.*", part.replace('.', "[.]")));
    }
    Ok(found)
}

/// Embeddings by the names that all families give them.
fn is_table(name: &str) -> bool {
    ["embed_tokens.weight", "wte.weight", "wpe.weight", "embeddings.weight"].iter().any(|end| name.ends_with(end))
}

/// The name of a tensor in files; of a part of a stack that which it would have there by itself.
fn name_in_files(own: &Weights, tensor: &str) -> String {
    let there = own.name_in_file(tensor).unwrap_or(tensor);
    let Some((whole, _)) = own.whole_of(tensor).filter(|(whole, _)| *whole != tensor) else { return there.to_owned() };
    let container = |name: &str| name.rsplit_once('.').map_or(0, |(before, _)| before.len());
    let (inside, outside) = (container(whole), container(there));
    format!("{}{}", &there[..outside], &tensor[inside..])
}

/// Returns the matrices of the layers' products by name.
fn linears(source: &ModelSource) -> Result<BTreeMap<String, Parameter>> {
    let options = CompileOptions { entries: vec![EntryOptions::forward()], ..plain_options() };
    let found = compiler::layer_matrices(&source.model, &options)?;
    Ok(found.into_iter().map(|of| (of.name.clone(), of)).collect())
}

/// Options of a forward pass in f32, without entries.
pub fn plain_options() -> CompileOptions {
    CompileOptions {
        variants: Vec::new(),
        weights: DType::F32,
        quantised: None,
        stored: BTreeMap::default(),
        compute: DType::F32,
        recipe: Recipe::Uniform,
        training: None,
        adapter: None,
        entries: Vec::new(),
        seed: 0,
        plan: PlanOptions::default(),
        sharding: Sharding::default(),
    }
}
