//! Files of a run, whatever is in them: digests, folders that appear at once, ownership, the log.

pub(crate) mod digest;
pub(crate) mod log;
pub(crate) mod room;
pub(crate) mod staged;
pub(crate) mod written;
