//! The operations of GPTQ (Frantar et al. 2022, 2210.17323) for whole matrices: the factor by which a column's error is made up
//! for in the columns after it, and the numbers of a matrix once that is done.
//!
//! Does not know where second moments come from, or how codes are stored.

mod compensate;
mod inverse_cholesky;

pub use compensate::Compensate;
pub use inverse_cholesky::InverseCholesky;
