//! One record batch: its buffers in the file, assigned to columns and checked against their lengths.
//!
//! Knows where values are, not what they mean.

use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::sync::Arc;

use super::super::RowLimit;
use super::flat::Table;
use super::schema::{Field, Kind};

/// Rows that a batch may claim.
const MOST: usize = 1 << 31;

/// Rows that a batch may claim besides those for which it has a bit.
const MOST_EMPTY: usize = 1 << 16;

/// A part of a message's body, or a buffer that was unpacked.
#[derive(Clone, Debug, Default)]
pub(super) struct Buffer {
    bytes: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl std::ops::Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }
}

/// A column of a batch.
#[derive(Clone, Debug, Default)]
pub(super) struct Column {
    pub(super) length: usize,
    /// A bit for each value; empty: none is null.
    pub(super) valid: Buffer,
    /// Offsets, then values, as far as the type has them; the texts of views follow.
    pub(super) buffers: Vec<Buffer>,
    pub(super) children: Vec<Column>,
    /// The column that the values are indices into.
    pub(super) dictionary: Option<Arc<Column>>,
}

/// Decoded dictionaries by their ids.
pub(super) type Dictionaries = HashMap<i64, Arc<Column>>;

/// Takes nodes and buffers in the order of the fields.
struct Dealer<'a> {
    nodes: std::vec::IntoIter<[i64; 2]>,
    buffers: std::vec::IntoIter<[i64; 2]>,
    views: std::vec::IntoIter<[i64; 1]>,
    body: Arc<Vec<u8>>,
    packing: Packing,
    /// Bytes that buffers may still be unpacked to.
    left: u64,
    limit: RowLimit,
    dictionaries: &'a Dictionaries,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Packing {
    None,
    Zstd,
}

/// The columns of a record batch.
pub(super) fn columns(
    of: Table<'_>,
    fields: &[Field],
    body: Vec<u8>,
    dictionaries: &Dictionaries,
    limit: RowLimit,
) -> Result<(usize, Vec<Column>), String> {
    let packing = match of.table(3)? {
        None => Packing::None,
        Some(compression) if compression.byte(0)? == 1 => Packing::Zstd,
        Some(_) => {
            return Err("its buffers are packed with LZ4, which is not read (write it with zstd, or unpacked)".into());
        }
    };
    let mut dealer = Dealer {
        nodes: of.longs::<2>(1)?.into_iter(),
        buffers: of.longs::<2>(2)?.into_iter(),
        views: of.longs::<1>(4)?.into_iter(),
        body: Arc::new(body),
        packing,
        left: limit.of_a_batch(),
        limit,
        dictionaries,
    };
    let size = dealer.body.len();
    let rows = length(of.long(0)?)?;
    let columns = fields.iter().map(|field| dealer.column(field)).collect::<Result<Vec<_>, _>>()?;
    let unpacked = size + (limit.of_a_batch() - dealer.left) as usize;
    if rows > unpacked.saturating_mul(8).saturating_add(MOST_EMPTY) {
        return Err(format!("damaged: {rows} rows in {unpacked} bytes"));
    }
    match columns.iter().find(|column| column.length < rows) {
        Some(column) => Err(format!("damaged: {rows} rows, but a column of {}", column.length)),
        None => Ok((rows, columns)),
    }
}

fn length(n: i64) -> Result<usize, String> {
    usize::try_from(n).ok().filter(|&n| n <= MOST).ok_or_else(|| format!("damaged: a length of {n}"))
}

impl Dealer<'_> {
    fn buffer(&mut self) -> Result<Buffer, String> {
        let [offset, size] = self.buffers.next().ok_or("damaged: a buffer is missing")?;
        let begin = length(offset)?;
        let range = begin..begin + length(size)?;
        if range.end > self.body.len() {
            return Err("damaged: a buffer lies outside of its batch".to_owned());
        }
        if self.packing == Packing::None || range.is_empty() {
            return Ok(Buffer { bytes: self.body.clone(), range });
        }
        let packed = &self.body[range.clone()];
        let (head, packed) = packed.split_first_chunk::<8>().ok_or("damaged: a packed buffer of no length")?;
        let size = i64::from_le_bytes(*head);
        if size == -1 {
            return Ok(Buffer { bytes: self.body.clone(), range: range.start + 8..range.end });
        }
        let size = length(size)?;
        self.left = self.left.checked_sub(size as u64).ok_or_else(|| {
            let most = options::ByteSize(self.limit.of_a_batch());
            format!("a batch unpacks to more than {most} (write it in smaller batches, or raise `max_row_size`)")
        })?;
        let mut bytes = Vec::new();
        let decoder = zstd::Decoder::new(packed).map_err(|e| e.to_string())?;
        decoder.take(size as u64 + 1).read_to_end(&mut bytes).map_err(|e| format!("damaged: {e}"))?;
        if bytes.len() != size {
            return Err(format!("damaged: a buffer of {size} bytes unpacks to {}", bytes.len()));
        }
        Ok(Buffer { bytes: Arc::new(bytes), range: 0..size })
    }

    fn column(&mut self, field: &Field) -> Result<Column, String> {
        let [rows, _] = self.nodes.next().ok_or("damaged: a column is missing")?;
        let mut column = Column { length: length(rows)?, ..Column::default() };
        let kind = field.dictionary.map_or(field.kind, |(_, index)| index);
        if kind != Kind::Null {
            column.valid = self.buffer()?;
        }
        let more = match kind {
            Kind::Bytes { .. } => 2,
            Kind::View => 1 + length(self.views.next().map_or(0, |[count]| count))?,
            Kind::Null | Kind::Struct | Kind::FixedList { .. } => 0,
            _ => 1,
        };
        for _ in 0..more {
            column.buffers.push(self.buffer()?);
        }
        if let Some((number, _)) = field.dictionary {
            column.dictionary = self.dictionaries.get(&number).cloned();
        } else {
            column.children = field.children.iter().map(|child| self.column(child)).collect::<Result<_, _>>()?;
        }
        match holds(kind, &column) {
            true => Ok(column),
            false => Err(format!("damaged: column `{}` is shorter than its {} values", field.name, column.length)),
        }
    }
}

/// True if the buffers have room for the values that the column claims.
fn holds(kind: Kind, column: &Column) -> bool {
    let n = column.length;
    let room = |i: usize, bytes: usize| column.buffers[i].len() >= bytes;
    let offsets = |width: usize| n == 0 || room(0, (n + 1) * width);
    let valid = column.valid.is_empty() || column.valid.len() >= n.div_ceil(8);
    let children = |each: usize| column.children.iter().all(|child| child.length >= n.saturating_mul(each));
    valid
        && match kind {
            Kind::Null => true,
            Kind::Bool => room(0, n.div_ceil(8)),
            Kind::Bytes { offset } | Kind::List { offset } => offsets(offset),
            Kind::Map => offsets(4),
            Kind::Struct => children(1),
            Kind::FixedList { size } => children(size),
            other => room(0, n.saturating_mul(other.width().expect("the others have a width"))),
        }
}
