//! The option table: `options!` turns rows into a struct, its reader and its description.

use crate::reader::{Fields, Reader};
use crate::row::Row;
use crate::tree::{Node, Tree};
use crate::value::Fault;
use serde_json::Value;

/// A struct whose fields are options. Made by [`options!`](crate::options).
pub trait Table: Sized {
    /// Heading on the reference page.
    const TITLE: &'static str;
    /// The doc comment of the table, by lines.
    const ABOUT: &'static [&'static str];
    /// One row for each field, in order.
    const ROWS: &'static [Row];

    /// Takes this table's options out of the fields of a map. Always returns a struct; it holds placeholders where
    /// problems were recorded.
    fn read_fields(fields: &mut Fields) -> Self;

    /// The values in the order of the rows.
    fn values(&self) -> Vec<Value>;

    /// Resets an option to its default; an option of another name is left alone.
    fn reset(&mut self, name: &str);

    /// Resets to `auto` each option that may be automatic and was set otherwise, as far as `of` says of the value.
    /// Returns their names.
    fn leave_open(&mut self, of: impl Fn(&Value) -> bool) -> Vec<&'static str> {
        let open = Self::ROWS
            .iter()
            .zip(self.values())
            .filter(|(row, value)| row.default_json() == "auto" && *value != "auto" && of(value));
        let names: Vec<&'static str> = open.map(|(row, _)| row.name).collect();
        names.iter().for_each(|name| self.reset(name));
        names
    }
}

/// A table as data, without its Rust type.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// Heading on the reference page.
    pub title: &'static str,
    /// The introduction, line by line.
    pub about: &'static [&'static str],
    /// The rows of the table.
    pub rows: &'static [Row],
}

impl Section {
    /// The description of table `T`.
    pub const fn of<T: Table>() -> Section {
        Section { title: T::TITLE, about: T::ABOUT, rows: T::ROWS }
    }
}

/// Reads a map that holds the options of `T` and nothing else. Problems inside do not stop it: the table holds
/// placeholders there, so that what surrounds it can still be checked.
pub fn read_table<T: Table>(node: &Node, reader: &mut Reader) -> Result<T, Fault> {
    let Tree::Map(entries) = &node.tree else { return Err(Fault::MISMATCH) };
    let mut fields = Fields::new(reader, entries, node.span);
    let table = T::read_fields(&mut fields);
    fields.refuse_unknown(T::ROWS.iter().map(|row| row.name), |_, _| None);
    Ok(table)
}

/// Declares a table of options.
///
/// A row is a doc comment, `name: Type = default`, and the words of [`Row`] (`min = 1`, `pending`, ...). The default is
/// written as in YAML and read like the user's text: `auto`, `null`, `"text"`, `[a, "list"]`, or `required`.
///
/// ```
/// options::options! {
///     /// How far and how fast.
///     pub struct Walk: "Walking" {
///         /// Steps to take.
///         steps: u32 = 100, min = 1;
///         /// Length of a step in metres.
///         stride: f64 = 0.7, above = 0;
///         /// Where to.
///         goal: String = required;
///     }
/// }
/// ```
#[macro_export]
macro_rules! options {
    (
        $(#[doc = $about:literal])+
        $vis:vis struct $table:ident: $title:literal {
            $( $(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:expr $(, $word:ident $(= $argument:expr)?)*; )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $table {
            $( $(#[doc = $doc])+ pub $name: $type, )+
        }

        impl $crate::Table for $table {
            const TITLE: &'static str = $title;
            const ABOUT: &'static [&'static str] = &[$($about),+];
            const ROWS: &'static [$crate::Row] = &[
                $(
                    $crate::Row::new(
                        stringify!($name),
                        <$type as $crate::OptionValue>::KIND,
                        stringify!($default),
                        &[$($doc),+],
                    )
                    $(.$word($($argument)?))*,
                )+
            ];

            fn read_fields(fields: &mut $crate::Fields) -> Self {
                let mut rows = Self::ROWS.iter();
                $( let $name = fields.read::<$type>(rows.next().expect("one row for each field")); )+
                Self { $($name),+ }
            }

            fn values(&self) -> Vec<$crate::serde_json::Value> {
                vec![$( $crate::OptionValue::write(&self.$name) ),+]
            }

            fn reset(&mut self, name: &str) {
                let defaults = <Self as $crate::OptionValue>::placeholder();
                $( if name == stringify!($name) { self.$name = defaults.$name.clone(); } )+
            }
        }

        impl $crate::OptionValue for $table {
            const KIND: $crate::Kind = $crate::Kind::Table(<$table as $crate::Table>::ROWS);

            fn read(node: &$crate::Node, reader: &mut $crate::Reader) -> Result<Self, $crate::Fault> {
                $crate::read_table(node, reader)
            }

            fn write(&self) -> $crate::serde_json::Value {
                let names = <$table as $crate::Table>::ROWS.iter().map(|row| row.name.to_string());
                names.zip($crate::Table::values(self)).collect::<$crate::serde_json::Map<_, _>>().into()
            }

            fn placeholder() -> Self {
                let mut reader = $crate::Reader::new(&[]);
                <$table as $crate::Table>::read_fields(&mut $crate::Fields::new(&mut reader, &[], None))
            }
        }
    };
}
