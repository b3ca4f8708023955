//! The columns of an Arrow file and the types of their values.
//!
//! Knows headers, not values.

use super::flat::Table;

/// Largest depth of nested values.
const DEEPEST: usize = 32;

/// Columns that a file may have, nested ones counted.
const MOST: usize = 1 << 16;

/// A column's name and type.
#[derive(Clone, Debug)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) children: Vec<Field>,
    /// The values are indices of this type into the dictionary of this number.
    pub(super) dictionary: Option<(i64, Kind)>,
}

/// The type of a value. Widths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Null,
    Bool,
    Int {
        width: usize,
        signed: bool,
    },
    Float {
        width: usize,
    },
    /// Text or bytes after offsets of this width.
    Bytes {
        offset: usize,
    },
    /// Text or bytes that are in the value itself if they are short.
    View,
    Fixed {
        width: usize,
    },
    List {
        offset: usize,
    },
    FixedList {
        size: usize,
    },
    Map,
    Struct,
    Decimal {
        scale: i32,
    },
    /// Days since 1970 (4 bytes), or milliseconds (8 bytes).
    Date {
        width: usize,
    },
    /// Parts of a second, and whether the time is bound to a zone.
    Timestamp {
        parts: i64,
        zoned: bool,
    },
    /// Values that JSON does not know.
    Opaque {
        width: usize,
    },
}

impl Kind {
    /// Bytes of a value, where all have the same.
    pub(super) fn width(self) -> Option<usize> {
        match self {
            Kind::Int { width, .. } | Kind::Float { width } | Kind::Fixed { width } => Some(width),
            Kind::Date { width } | Kind::Opaque { width } => Some(width),
            Kind::View | Kind::Decimal { .. } => Some(16),
            Kind::Timestamp { .. } => Some(8),
            _ => None,
        }
    }
}

/// The columns that a schema names.
pub(super) fn fields(schema: Table<'_>) -> Result<Vec<Field>, String> {
    if schema.short(0, 0)? != 0 {
        return Err("its numbers are in big-endian order, which is not read".to_owned());
    }
    let mut count = 0;
    schema.tables(1)?.into_iter().map(|of| field(of, 0, &mut count)).collect()
}

fn field(of: Table<'_>, depth: usize, count: &mut usize) -> Result<Field, String> {
    *count += 1;
    if depth > DEEPEST || *count > MOST {
        return Err(format!("more than {MOST} columns, or nested deeper than {DEEPEST}"));
    }
    let name = of.text(0)?.to_owned();
    let kind = kind(of).map_err(|e| format!("column `{name}`: {e}"))?;
    let children = of.tables(5)?.into_iter().map(|of| field(of, depth + 1, count)).collect::<Result<Vec<_>, _>>()?;
    let wanted = match kind {
        Kind::List { .. } | Kind::FixedList { .. } | Kind::Map => 1,
        Kind::Struct => children.len(),
        _ => 0,
    };
    let is_map = |of: &Field| of.kind == Kind::Struct && of.children.len() == 2;
    if children.len() != wanted || (kind == Kind::Map && !is_map(&children[0])) {
        return Err(format!("damaged: column `{name}` has {} columns inside", children.len()));
    }
    let dictionary = match of.table(4)? {
        None => None,
        Some(of) => {
            let index = of.table(1)?.map_or(Ok(Kind::Int { width: 4, signed: true }), int)?;
            Some((of.long(0)?, index))
        }
    };
    Ok(Field { name, kind, children, dictionary })
}

fn int(of: Table<'_>) -> Result<Kind, String> {
    match of.int(0, 0)? {
        bits @ (8 | 16 | 32 | 64) => Ok(Kind::Int { width: bits as usize / 8, signed: of.byte(1)? != 0 }),
        bits => Err(format!("damaged: integers of {bits} bits")),
    }
}

fn size(n: i32) -> Result<usize, String> {
    usize::try_from(n).map_err(|_| "damaged: a negative size".to_owned())
}

/// The numbers are those of the format's union of types.
fn kind(of: Table<'_>) -> Result<Kind, String> {
    let number = of.byte(2)?;
    let details = of.table(3)?.ok_or("damaged: a column without a type")?;
    Ok(match number {
        1 => Kind::Null,
        2 => int(details)?,
        3 => Kind::Float { width: 2 << details.short(0, 0)?.clamp(0, 2) },
        4 | 5 => Kind::Bytes { offset: 4 },
        6 => Kind::Bool,
        7 if details.int(2, 128)? == 128 => Kind::Decimal { scale: details.int(1, 0)? },
        7 => Kind::Opaque { width: size(details.int(2, 128)?)? / 8 },
        8 => Kind::Date { width: if details.short(0, 1)? == 0 { 4 } else { 8 } },
        9 => Kind::Opaque { width: size(details.int(1, 32)?)? / 8 },
        10 => {
            let parts = *[1, 1_000, 1_000_000, 1_000_000_000]
                .get(size(details.short(0, 0)?.into())?)
                .ok_or("damaged: an unknown unit of time")?;
            Kind::Timestamp { parts, zoned: details.has(1)? }
        }
        11 => Kind::Opaque { width: 4 << details.short(0, 0)?.clamp(0, 2) },
        12 => Kind::List { offset: 4 },
        13 => Kind::Struct,
        15 => Kind::Fixed { width: size(details.int(0, 0)?)? },
        16 => Kind::FixedList { size: size(details.int(0, 0)?)? },
        17 => Kind::Map,
        18 => Kind::Opaque { width: 8 },
        19 | 20 => Kind::Bytes { offset: 8 },
        21 => Kind::List { offset: 8 },
        23 | 24 => Kind::View,
        14 => return Err("unions are not read".to_owned()),
        22 => return Err("run-end encoded columns are not read".to_owned()),
        25 | 26 => return Err("list views are not read".to_owned()),
        other => return Err(format!("type number {other} of the format is not known")),
    })
}
