//! The processes that train together: the place of this one among them, and the facts that they exchange.

pub(crate) mod exchange;
pub(crate) mod place;
