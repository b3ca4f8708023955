//! The identifier of an operation. The list of operations is elsewhere: here an id is a place in it and a name to
//! print.

use std::fmt;
use std::hash::{Hash, Hasher};

/// An operation: its place in the list of all. Ids are equal where the places are.
#[derive(Clone, Copy)]
pub struct OpId {
    index: u16,
    name: &'static str,
}

impl OpId {
    pub const fn new(index: u16, name: &'static str) -> Self {
        OpId { index, name }
    }

    pub const fn index(self) -> usize {
        self.index as usize
    }

    pub const fn name(self) -> &'static str {
        self.name
    }
}

impl PartialEq for OpId {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
    }
}

impl Eq for OpId {}

impl Hash for OpId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.index.hash(state);
    }
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Debug for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
