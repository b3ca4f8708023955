//! A row with its place.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::{RowError, shown};

/// The location of a row: `row` counts from 1 (for JSON lines it is the line of the file).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowLocation {
    pub file: Arc<Path>,
    pub row: usize,
}

impl fmt::Display for RowLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, row {}", shown(self.file.display()), self.row)
    }
}

/// One row; a broken one keeps its place and says why.
#[derive(Clone, Debug)]
pub struct Row {
    pub place: RowLocation,
    pub fields: Result<Map<String, Value>, RowError>,
}

/// A stream of rows in the order of the file.
pub type Rows = Box<dyn Iterator<Item = Row> + Send>;

pub(super) fn shared(path: &Path) -> Arc<Path> {
    Arc::from(PathBuf::from(path))
}
