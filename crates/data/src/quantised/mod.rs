//! Weights that were quantised by others, as numbers: what `quantization_config` says of a folder, where the codes and
//! scales of each linear are, and their values, read range by range so that no more than a part is in memory.
//!
//! Knows the forms of files; not models, and not what the numbers are used for.

mod exclusions;
mod forms;
mod integers;
mod layout;
mod linear;
mod packed;
mod scheme;
mod turned;
mod weight;

pub use exclusions::Exclusions;
pub(crate) use forms::find;
pub use layout::Layout;
pub(crate) use linear::Linear;
pub use scheme::{HINT, Scheme};
pub(crate) use weight::{Found, Tensors};
