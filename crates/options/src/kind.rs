//! The types of options, as data: the source of messages, schema and reference page. Does not read values.

use crate::row::Row;

/// One value of an enumeration.
#[derive(Debug)]
pub struct Choice {
    /// The spelling that is written back.
    pub name: &'static str,
    /// Other spellings that are read.
    pub aliases: &'static [&'static str],
    /// The doc comment, line by line.
    pub doc: &'static [&'static str],
}

/// The type of an option.
#[derive(Debug)]
pub enum Kind {
    /// A truth value, `true` or `false`.
    Bool,
    /// A whole number, positive or negative.
    Integer {
        /// True where the type has no negative values.
        unsigned: bool,
    },
    /// A finite floating-point number in decimal digits.
    Number,
    /// A text of any content.
    Text,
    /// Text of a certain form, which the words describe: "a moment such as ...".
    Form(&'static str),
    /// A number of bytes, bare or with a unit.
    Bytes,
    /// One of a fixed set of words.
    Choice(&'static [Choice]),
    /// A sequence of values of one type.
    List(&'static Kind),
    /// A map from names to values of one type.
    Map(&'static Kind),
    /// A map of names to anything, which the words describe.
    Object(&'static str),
    /// A group of options of its own.
    Table(&'static [Row]),
    /// One of several types; the first that fits counts.
    Either(&'static [Kind]),
    /// May be null, meaning: none.
    Nullable(&'static Kind),
    /// May be `auto` or null, meaning: the system decides.
    Auto(&'static Kind),
}

/// Bounds of a number. Absent means unbounded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// The least number that is allowed.
    pub min: Option<i64>,
    /// The greatest number that is allowed.
    pub max: Option<i64>,
    /// The value must be greater than this.
    pub above: Option<i64>,
    /// The value must be less than this.
    pub below: Option<i64>,
    /// The only allowed values, unless empty.
    pub one_of: &'static [i64],
}

impl Limits {
    /// True if `value` is within every bound.
    pub fn allow(&self, value: f64) -> bool {
        self.min.is_none_or(|min| value >= min as f64)
            && self.max.is_none_or(|max| value <= max as f64)
            && self.above.is_none_or(|above| value > above as f64)
            && self.below.is_none_or(|below| value < below as f64)
            && (self.one_of.is_empty() || self.one_of.iter().any(|allowed| *allowed as f64 == value))
    }

    /// The bounds in words, with a leading space: ` from 1 to 3`, ` above 0`. Empty if there are none.
    pub fn describe(&self) -> String {
        if !self.one_of.is_empty() {
            return format!(", one of {}", self.one_of.iter().map(i64::to_string).collect::<Vec<_>>().join(", "));
        }
        let low = match (self.min, self.above) {
            (Some(min), _) => format!(" from {min}"),
            (None, Some(above)) => format!(" above {above}"),
            (None, None) => String::new(),
        };
        let high = match (self.max, self.below) {
            (Some(max), _) if self.min.is_some() => format!(" to {max}"),
            (Some(max), _) => format!(" up to {max}"),
            (None, Some(below)) => format!(" below {below}"),
            (None, None) => String::new(),
        };
        // "above 0 below 1" needs its "and"; "from 1 to 3" does not.
        let link = if !low.is_empty() && (self.below.is_some() || self.min.is_none()) && !high.is_empty() {
            " and"
        } else {
            ""
        };
        format!("{low}{link}{high}")
    }
}

impl Kind {
    /// The type in words, as in "expected a whole number".
    pub fn describe(&self, limits: &Limits) -> String {
        match self {
            Kind::Bool => "`true` or `false`".into(),
            Kind::Integer { unsigned } => {
                let bounded = limits.min.is_some() || limits.above.is_some() || !limits.one_of.is_empty();
                let limits = if *unsigned && !bounded { Limits { min: Some(0), ..*limits } } else { *limits };
                format!("a whole number{}", limits.describe())
            }
            Kind::Number => format!("a number{}", limits.describe()),
            Kind::Text => "text".into(),
            Kind::Form(words) | Kind::Object(words) => words.to_string(),
            Kind::Bytes => "a number of bytes such as `22GiB`".into(),
            Kind::Choice(choices) => {
                let names: Vec<String> = choices.iter().map(|choice| format!("`{}`", choice.name)).collect();
                match names.as_slice() {
                    [only] => only.clone(),
                    [most @ .., last] => format!("{} or {last}", most.join(", ")),
                    [] => unreachable!("an enumeration without values has no table row"),
                }
            }
            Kind::List(item) => format!("a list, each item {}", item.describe(limits)),
            Kind::Map(value) => format!("a mapping of names to {}", value.describe(limits)),
            Kind::Table(_) => "a group of settings".into(),
            Kind::Either(kinds) => kinds.iter().map(|kind| kind.describe(limits)).collect::<Vec<_>>().join(", or "),
            Kind::Nullable(inner) => inner.describe(limits),
            Kind::Auto(inner) => format!("{}, or `auto`", inner.describe(limits)),
        }
    }

    /// The type in one or two words, for tables of the reference page.
    pub fn short(&self) -> String {
        match self {
            Kind::Bool => "bool".into(),
            Kind::Integer { .. } => "int".into(),
            Kind::Number => "float".into(),
            Kind::Text | Kind::Form(_) => "string".into(),
            Kind::Bytes => "bytes".into(),
            Kind::Choice(_) => "choice".into(),
            Kind::List(item) => format!("list of {}", item.short()),
            Kind::Map(value) => format!("map to {}", value.short()),
            Kind::Object(_) => "map".into(),
            Kind::Table(_) => "group".into(),
            Kind::Either(kinds) => kinds.iter().map(Kind::short).collect::<Vec<_>>().join(" or "),
            Kind::Nullable(inner) | Kind::Auto(inner) => inner.short(),
        }
    }

    /// The words that this type takes, wherever they are inside it.
    pub fn choices(&self) -> &'static [Choice] {
        match self {
            Kind::Choice(choices) => choices,
            Kind::List(inner) | Kind::Nullable(inner) | Kind::Auto(inner) => inner.choices(),
            Kind::Either(kinds) => kinds.iter().map(Kind::choices).find(|found| !found.is_empty()).unwrap_or(&[]),
            _ => &[],
        }
    }

    /// The rows of the group or of the list of groups that this type is.
    pub fn rows(&self) -> &'static [Row] {
        match self {
            Kind::Table(rows) => rows,
            Kind::List(inner) | Kind::Nullable(inner) | Kind::Auto(inner) => inner.rows(),
            _ => &[],
        }
    }
}
