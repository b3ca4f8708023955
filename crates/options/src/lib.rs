//! The machinery of option tables: what an option is, how YAML becomes typed values, how mistakes are reported.
//!
//! An option is one row of an [`options!`] table: name, type, default, limits, doc comment. The struct field, the
//! reader, the JSON schema, the reference page and the rows of `--help` are generated from the row. All problems of a
//! text are collected; nothing stops at the first one.
//!
//! It also has the default location of caches, the escaping of untrusted text, and the hiding of passwords.
//!
//! Does not know which options exist and what they mean.

mod bytes;
pub mod cache;
mod choice;
mod collections;
pub mod home;
mod kind;
mod nearest;
mod overrides;
mod page;
mod problem;
mod reader;
mod row;
mod schema;
mod secret;
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
pub use problem::{Availability, Location, OptionPosition, Problem, render_problems};
pub use reader::{Fields, Reader, Written};
pub use row::Row;
pub use schema::{help_rows, object_schema};
pub use secret::{hide_userinfo, hides, without_userinfo};
pub use serde_json;
pub use setting::Setting;
pub use source::{Source, Span};
pub use table::{Section, Table, read_table};
pub use tree::{Key, Node, Tree};
pub use value::{Fault, OptionValue};
pub use visible::{visible, visible_text};
