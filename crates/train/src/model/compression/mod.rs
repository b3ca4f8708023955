//! Number formats of served models: which matrices of a model become codes, in which format, with which ranges.

pub(crate) mod chosen;
pub(crate) mod observer;
pub(crate) mod scheme;
