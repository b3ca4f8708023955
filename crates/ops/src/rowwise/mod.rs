//! Operations on rows, given by expressions as the element-wise ones are: a norm, its gradients, and every chain of
//! them with element-wise neighbours. CPU reference, CUDA text, scratch memory and cost follow from the form, and two
//! operations that have one compose: their neighbours are prologues and epilogues, and no operations of their own. Codes of
//! eight bits with their scale and magnitude are results of a form like others.

mod declared;
mod examples;
mod form;
mod fused;
mod join;
mod kernel;
mod quantised;
mod tape;
mod text;

pub use declared::Rowwise;
pub(crate) use form::texts;
pub use form::{Extent, Form};
pub use fused::Composed;
pub use join::{around, form_of, intermediate, join, names};
pub(crate) use kernel::sum_partials;
pub use quantised::{quantising, without_codes};
