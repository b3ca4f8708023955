//! The choice of the tensors of a model's files that become codes. The use of a weight follows from the model's graph:
//! embeddings, LM head, routers and the matrices of towers stay as they are unless they are included.

use std::collections::{BTreeMap, BTreeSet};

use compiler::{CompileOptions, EntryOptions, MatrixUse, PlanOptions, Recipe, Sharding};
use data::safetensors::Weights;
use graph::Parameter;
use tensor::DType;

use crate::error::{Result, TrainError};
use crate::model::source::ModelSource;

/// Matrices of one module that engines compute as one, so that they share the scale of scales of NVFP4.
pub const FUSED: &[&[&str]] = &[&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"], &["w1", "w3"]];

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
    /// The included part that it is of; none for the matrices of layers.
    pub part: Option<IncludedPart>,
}

/// A part of the model that becomes codes where a user asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IncludedPart {
    Head,
    Routers,
    Towers,
}

impl IncludedPart {
    pub const ALL: [IncludedPart; 3] = [IncludedPart::Head, IncludedPart::Routers, IncludedPart::Towers];

    /// Returns the name that users give it.
    pub const fn name(self) -> &'static str {
        match self {
            IncludedPart::Head => "lm_head",
            IncludedPart::Routers => "routers",
            IncludedPart::Towers => "towers",
        }
    }

    const fn matrices(self) -> MatrixUse {
        match self {
            IncludedPart::Head => MatrixUse::Head,
            IncludedPart::Routers => MatrixUse::Router,
            IncludedPart::Towers => MatrixUse::Tower,
        }
    }

    /// True if what its matrices are multiplied with is measured, layer by layer.
    pub const fn is_measured(self) -> bool {
        matches!(self, IncludedPart::Routers)
    }
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

/// Divides the tensors of a model's folder. Errors: an included part that the model has not, or that shares its matrix.
pub fn choose(source: &ModelSource, own: &Weights, included: &[IncludedPart]) -> Result<Chosen> {
    let linears = wanted(source, own, included)?;
    let mut found = Chosen::default();
    let mut wholes = BTreeSet::new();
    for tensor in own.names() {
        let view = own.get(tensor).map_err(TrainError::model_file)?;
        let parameter = linears.get(tensor).filter(|_| view.dtype.is_float() && tensor.ends_with(".weight"));
        match (parameter, view.shape) {
            (Some((of, part)), [rows, columns]) if source.stored_shape(tensor).is_none() => {
                let shape = if of.transposed { [*columns, *rows] } else { [*rows, *columns] };
                let name = name_in_files(own, tensor);
                let module = name.trim_end_matches(".weight").to_owned();
                let (parameter, transposed) = (tensor.to_owned(), of.transposed);
                let matrix = Matrix { parameter, module, shape, transposed, part: *part };
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
    if let Some(of) = found.matrices.iter().find(|of| of.part.is_some() && !of.transposed && found.transposed()) {
        let name = of.part.map_or("", IncludedPart::name);
        return Err(TrainError::Usage(format!(
            "--include {name}: the matrices of layers are stored as their transposes and `{}` is not, and files say so of all\n  hint: \
             leave it out",
            of.module
        )));
    }
    // The head of a tied model has no tensor of its own, and is a linear layer for others all the same.
    if !included.contains(&IncludedPart::Head) {
        found.ignored.insert("lm_head".to_owned());
    }
    let towers = source.model.adapters.apart.iter().filter(|_| !included.contains(&IncludedPart::Towers));
    for part in source.model.files.carried.iter().chain(towers) {
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

/// Parameters by name, with the included part that each is of.
type Wanted = BTreeMap<String, (Parameter, Option<IncludedPart>)>;

/// Returns the matrices that become codes by name: those of the layers' products, and of included parts.
fn wanted(source: &ModelSource, own: &Weights, included: &[IncludedPart]) -> Result<Wanted> {
    let options = CompileOptions { entries: vec![EntryOptions::forward()], ..plain_options() };
    let mut all = compiler::matrices(&source.model, &options)?;
    all.retain(|(of, _)| own.get(&of.name).is_ok());
    for part in included {
        if all.iter().any(|(_, of)| *of == part.matrices()) {
            continue;
        }
        let name = part.name();
        let is_tied = |of: MatrixUse| *part == IncludedPart::Head && of == MatrixUse::Tied;
        let text = match all.iter().find(|(_, of)| is_tied(*of)).map(|(table, _)| &table.name) {
            Some(table) => format!(
                "--include {name}: it is `{table}`, the table of embeddings, of which readers of this format take numbers\n  hint: \
                 leave it out"
            ),
            None => format!("--include {name}: the model has none in matrices of their own\n  hint: leave it out"),
        };
        return Err(TrainError::Usage(text));
    }
    let chosen = all.into_iter().filter_map(|(parameter, of)| {
        let part = included.iter().copied().find(|part| part.matrices() == of);
        (of == MatrixUse::Layer || part.is_some()).then(|| (parameter.name.clone(), (parameter, part)))
    });
    Ok(chosen.collect())
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
        branches: None,
        batch_invariant: false,
    }
}
