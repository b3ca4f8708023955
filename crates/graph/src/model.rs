//! The model as the DSL records it: the JSON form of the IR.
//!
//! A `repeat` stands for a stack of layers of one kind or of a pattern of kinds: values carried from one layer to the
//! next, parameter names with `{i}`, and attributes that may differ per layer (`{"each": [...]}`).

use serde::{Deserialize, Serialize};
use tensor::Attrs;
use thiserror::Error;

use crate::adapter_form::AdapterForm;
use crate::dim::{Dim, Element, ValueType};

/// The version that this crate reads and writes.
pub const IR_VERSION: u32 = 3;

/// A whole model as its IR file describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pub surogate_ir: u32,
    /// The Hugging Face architecture name, for people; nothing is decided by it.
    pub architecture: String,
    /// Largest number of positions in a row. Absent where there is no limit, as with rotary positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_positions: Option<usize>,
    #[serde(default, skip_serializing_if = "FileForm::is_plain")]
    pub files: FileForm,
    #[serde(default, skip_serializing_if = "AdapterForm::is_plain")]
    pub adapters: AdapterForm,
    /// The reading of images, where the model computes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<ImageForm>,
    /// The batch tensors that the model reads.
    pub inputs: Vec<Input>,
    /// Parameters used outside of repeats; those of a repeat are in its block.
    #[serde(default)]
    pub parameters: Vec<ParameterSpec>,
    pub body: Vec<Item>,
    #[serde(default)]
    pub outputs: Vec<Output>,
    /// The tasks that can be computed from the model's values to train it. An entry has one of them, or none.
    #[serde(default)]
    pub tasks: Vec<Task>,
}

/// Returns the default of a count of frames.
fn one() -> usize {
    1
}

/// The reading of images by a vision tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageForm {
    /// The token that stands for a part of an image.
    pub token: i32,
    /// Bytes of a patch: pixels times channels.
    pub width: usize,
    /// Frames of a patch, which an image has alike.
    #[serde(default = "one")]
    pub frames: usize,
    /// Rows and columns of patches that become one token.
    pub side: usize,
    /// Tokens a side of the windows of attention inside the tower; 0 without windows.
    #[serde(default)]
    pub window: usize,
    /// Rows and columns of the table of positions; 0 without one.
    #[serde(default)]
    pub table: usize,
    /// True if an image is stretched over the whole table.
    #[serde(default)]
    pub stretched: bool,
    /// True if text stands between the rows of an image.
    #[serde(default)]
    pub breaks: bool,
    /// The numbers of boxes in texts are pixels of the image as the tower reads it, else thousandths of its sides.
    #[serde(default)]
    pub boxes_in_pixels: bool,
    /// True if tokens mark the names and boxes of objects.
    #[serde(default)]
    pub boxes_marked: bool,
    /// The token that tables other than that of tokens read in the place of parts of images.
    #[serde(default)]
    pub pad: i32,
}

/// A loss, separate from the model: nodes after its body, which may use every value of the body.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    pub name: String,
    /// The batch tensors that it reads and the model does not.
    pub inputs: Vec<Input>,
    #[serde(default)]
    pub parameters: Vec<ParameterSpec>,
    pub nodes: Vec<NodeSpec>,
    /// The results, with `loss_sum` and `weight_sum` among them where it can be trained.
    pub outputs: Vec<Output>,
    /// Names of the metrics whose sums are in the result `task_report`, in this order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub metrics: Vec<String>,
    /// Metrics that are the difference of two of these: (name, minuend, subtrahend).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differences: Vec<[String; 3]>,
    /// The entries of a step in the order in which they run; training alone where it is not said.
    #[serde(default, skip_serializing_if = "TaskEntries::are_usual")]
    pub entries: TaskEntries,
}

/// The entries of a task's step in the order in which they run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TaskEntries(pub Vec<TaskEntry>);

/// An entry of a task's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskEntry {
    /// Log-probabilities of the targets as the model gave them before training: the input `reference_logps` of the others.
    Reference,
    /// The loss and its gradients, which micro-steps add up.
    Train,
    /// The loss alone, in evaluations.
    Evaluate,
}

impl Default for TaskEntries {
    fn default() -> TaskEntries {
        TaskEntries(vec![TaskEntry::Train, TaskEntry::Evaluate])
    }
}

impl TaskEntries {
    fn are_usual(&self) -> bool {
        *self == TaskEntries::default()
    }
}

/// The differences of published files from the names of the parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileForm {
    /// A file in which no name starts with this was written without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_prefix: Option<String>,
    /// Endings of the names of stored tables that every engine computes itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub computed: Vec<String>,
    /// Beginnings of names: how they may be in files, and how the parameters have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renamed: Vec<[String; 2]>,
    /// Beginnings of the names of tensors that belong to a part which is not computed: results take them over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carried: Vec<String>,
}

impl FileForm {
    /// True if a tensor, by the name that parameters have, is only taken over into results.
    pub fn carries(&self, name: &str) -> bool {
        self.carried.iter().any(|part| name.starts_with(part.as_str()))
    }

    fn is_plain(&self) -> bool {
        *self == FileForm::default()
    }
}

/// A named batch tensor, for example `input_ids` i32 [B, T].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    pub name: String,
    pub dtype: Element,
    pub shape: Vec<Dim>,
}

/// The initial contents of a parameter when the model is trained from scratch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Normal with the config's `initializer_range`.
    Normal {
        std: f64,
    },
    /// Uniform over the interval [−bound, bound).
    Uniform {
        bound: f64,
    },
    Ones,
    Zeros,
    /// One number in every element of the parameter.
    Constant {
        value: f64,
    },
    /// A bound that nothing is above, or below.
    #[serde(rename = "inf")]
    Infinity,
    #[serde(rename = "-inf")]
    NegativeInfinity,
    /// The contents of the state of the same name, once everything else is initialized. Only passes set it.
    #[serde(skip)]
    Prepared,
}

/// One weight, named as in the Hugging Face file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParameterSpec {
    /// Name of the tensor in the file; `{i}` is the iteration inside a repeat.
    pub name: String,
    pub shape: Vec<usize>,
    pub init: Init,
    /// Writes into the residual stream (FFN down, attention out): what
    /// `init_projections_to_zero` zeroes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub residual_projection: bool,
    /// The matrix of a linear layer that the file keeps as [inputs, outputs].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub transposed: bool,
    /// A bias whatever its axes: biases of experts have two.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bias: bool,
    /// Counts in the forward pass, is kept in f32 and has no gradient.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub buffer: bool,
    /// The shape in files, where it is another than the model's: a matrix whose rows or columns they have as several axes, a
    /// number without axes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<Vec<usize>>,
}

impl ParameterSpec {
    /// Returns true if the name is that of this weight, in whichever layer.
    pub fn is_named(&self, name: &str) -> bool {
        let Some((before, after)) = self.name.split_once("{i}") else { return self.name == name };
        let layer = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
        layer.is_some_and(|layer| !layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit()))
    }
}

/// One step of the body.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Item {
    Repeat(Repeat),
    Node(NodeSpec),
}

/// One operation. Values are named; a parameter is used by its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    pub op: String,
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    /// Types of the outputs as inferred while tracing; checked again when the model is compiled.
    pub types: Vec<ValueType>,
    #[serde(default, skip_serializing_if = "Attrs::is_empty")]
    pub attrs: Attrs,
    /// Named part of the layer, for save/recompute decisions: `attention`, `mlp`, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
    /// `file:line` of the user's Python.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
}

/// A stack of N layers: each is one iteration of the block of its kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repeat {
    pub repeat: usize,
    /// Its name: the path to the layers in the files.
    pub stack: String,
    /// For each layer the index of its block; absent where all are of the first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pattern: Vec<usize>,
    pub carry: Vec<Carry>,
    /// Outer values of which each layer reads its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub each: Vec<Each>,
    pub blocks: Vec<Block>,
}

impl Repeat {
    /// The block of a layer.
    pub fn block(&self, layer: usize) -> Option<&Block> {
        match self.pattern.is_empty() {
            true => self.blocks.first(),
            false => self.blocks.get(*self.pattern.get(layer)?),
        }
    }
}

/// A value handed from layer to layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Carry {
    /// The value outside that the first layer starts from; absent where a layer gives the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial: Option<String>,
    /// The name outside of the last layer's result.
    pub result: String,
}

/// A name inside of all blocks that stands for another outer value in each layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Each {
    pub inside: String,
    /// The outer value of each layer.
    pub values: Vec<String>,
}

/// The names inside a block of a value that is handed from layer to layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Carried {
    /// The value's name inside the block.
    pub inside: String,
    /// The value inside that the next layer starts from.
    pub next: String,
}

/// One kind of layer. Values of the outer body may be used by name; nodes cannot nest repeats.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// One entry for each carry of the repeat.
    pub carry: Vec<Carried>,
    #[serde(default)]
    pub parameters: Vec<ParameterSpec>,
    pub nodes: Vec<NodeSpec>,
    /// Values that can be requested by name, with `{i}` in the name.
    #[serde(default)]
    pub outputs: Vec<Output>,
}

/// A value that callers can ask for: `logits`, `hidden.layer.{i}`, `token_loss`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    pub name: String,
    pub value: String,
}

/// The reason why a model could not be read.
#[derive(Debug, Error)]
pub enum ModelError {
    #[error("the model is not valid IR: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the model is IR version {found}, this engine reads version {IR_VERSION}")]
    Version { found: u32 },
}

/// Reads the JSON form. Structure only: operations, shapes and names are checked by later stages.
pub fn from_json(text: &str) -> Result<Model, ModelError> {
    let model: Model = serde_json::from_str(text)?;
    if model.surogate_ir != IR_VERSION {
        return Err(ModelError::Version { found: model.surogate_ir });
    }
    Ok(model)
}

impl Model {
    /// Returns the number of layers of all stacks.
    pub fn layers(&self) -> usize {
        let of = |item: &Item| match item {
            Item::Repeat(repeat) => repeat.repeat,
            Item::Node(_) => 0,
        };
        self.body.iter().map(of).sum()
    }

    /// Returns all weights, those of a block once.
    pub fn weights(&self) -> impl Iterator<Item = &ParameterSpec> {
        let blocks = self.body.iter().flat_map(|item| match item {
            Item::Repeat(repeat) => repeat.blocks.as_slice(),
            Item::Node(_) => &[],
        });
        self.parameters.iter().chain(blocks.flat_map(|block| &block.parameters))
    }

    /// Lets the weights that write into the residual stream begin at zero; gives how many there are, a layer's once.
    pub fn zero_residual_projections(&mut self) -> usize {
        let blocks = self.body.iter_mut().flat_map(|item| match item {
            Item::Repeat(repeat) => repeat.blocks.as_mut_slice(),
            Item::Node(_) => &mut [],
        });
        let of_blocks = blocks.map(|block| &mut block.parameters);
        let specs = std::iter::once(&mut self.parameters).chain(of_blocks).flatten();
        let marked: Vec<&mut ParameterSpec> = specs.filter(|spec| spec.residual_projection).collect();
        let count = marked.len();
        marked.into_iter().for_each(|spec| spec.init = Init::Zeros);
        count
    }

    /// The extent of the last axis of a public value.
    pub fn columns_of(&self, output: &str) -> Option<usize> {
        let value = &self.outputs.iter().find(|of| of.name == output)?.value;
        let made = self.body.iter().find_map(|item| match item {
            Item::Node(node) => Some(&node.types[node.outputs.iter().position(|name| name == value)?]),
            Item::Repeat(_) => None,
        });
        made?.shape.last()?.fixed()
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a model is always representable as JSON")
    }
}
