//! A whole run: its folder, its first and its last step, and the files that remain.

pub(crate) mod ending;
pub(crate) mod folder;
pub(crate) mod follow;
pub(crate) mod journal;
pub(crate) mod lifecycle;
pub(crate) mod observer;
pub(crate) mod opening;
pub(crate) mod record;
pub(crate) mod rendezvous;
pub(crate) mod resume;
pub(crate) mod room;

pub use lifecycle::run;
pub use observer::{Observer, Outcome};
