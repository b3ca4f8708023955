//! Results of a token that do not depend on what is computed with it (batch invariance): the attribute that asks for them.

/// The attribute of operations whose sums may have an order that follows from a token's own sequence alone.
pub const BATCH_INVARIANT: &str = "batch_invariant";

pub const DOC: &str = "the bits of a token's result follow from its own sequence, whatever is computed with it; on a GPU, which \
                       may be slower so";
