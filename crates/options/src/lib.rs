//! The machinery of option tables: what an option is, how a YAML text becomes typed values, how mistakes are reported.
//!
//! An option is one row of an [`options!`] table: name, type, default, limits, doc comment. From the row follow the
//! struct field, the reader, the JSON schema, the reference page and the rows of `--help`. All problems of a text are
//! collected; nothing stops at the first one.
//!
//! Beside it stand the place that is taken where no option names one for a cache, and texts of others made visible.
//!
//! Deliberately unknown here: which options exist and what any of them means.

mod bytes;
pub mod cache;
mod choice;
mod collections;
mod kind;
mod nearest;
mod overrides;
mod page;
mod problem;
mod reader;
mod row;
mod schema;
mod setting;
mod source;
mod table;
mod tree;
mod value;
mod visible;
mod yaml;

pub use bytes::ByteSize;
pub use kind::{Choice, Kind, Limits};
pub use nearest::nearest;
pub use overrides::apply_override;
pub use page::{reference_page, section_page};
pub use problem::{Availability, Location, Place, Problem, render_problems};
pub use reader::{Fields, Reader, Written};
pub use row::Row;
pub use schema::{help_rows, object_schema};
pub use serde_json;
pub use setting::Setting;
pub use source::{Source, Span};
pub use table::{Section, Table, read_table};
pub use tree::{Key, Node, Tree};
pub use value::{Fault, OptionValue};
pub use visible::visible;
