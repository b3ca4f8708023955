//! The processes of one run, on one or several machines: how they find each other, prove that they belong together, and
//! send each other bytes. Every pair has one TCP connection. A process that ends, fails or is cut off ends it for all.
//!
//! Knows neither programs nor options: what is compared when nodes meet are pairs of texts, what is sent are bytes. Nothing
//! is encrypted: the network between the nodes is trusted, strangers on it are not.

mod facts;
mod frame;
mod join;
mod nodes;
mod owner;
mod proof;

pub use facts::Facts;
pub use frame::Channel;
pub use join::{JoinError, Place, join};
pub use nodes::{Failure, LOST, Nodes};
pub use proof::Token;
