//! A model as operations on values.
//!
//! Two forms: [`Model`] is what the Python DSL writes (JSON, symbolic batch dimensions, `repeat`
//! blocks); [`Graph`] is the flat list that the compiler rewrites. Both print as text.
//!
//! Invariant: nothing here knows what any operation means. Shapes that depend on an operation are
//! inferred and checked one floor up, in `ops`.

mod adapter_form;
mod dim;
mod flat;
mod model;
mod op_id;
mod text;
mod verify;

pub use adapter_form::{AdapterForm, AdapterPlace, MatrixStack};
pub use dim::{Axis, Bindings, Dim, Element, ValueType};
pub use flat::{Graph, Layer, Node, Origin, Parameter, ParameterId, Phase, Quantiser, StateId, Value, ValueId};
pub use model::{
    Block, Carried, Carry, Each, FileForm, IR_VERSION, ImageForm, Init, Input, Item, Model, ModelError, NodeSpec,
    Output, ParameterSpec, Repeat, Task, TaskEntries, TaskEntry, from_json,
};
pub use op_id::OpId;
pub use verify::verify;
