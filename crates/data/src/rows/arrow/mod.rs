//! `.arrow`: files and streams of the Arrow IPC format, batch by batch; rows become JSON objects.
//!
//! Lists, structs and maps nest as in JSON. Binary values that are not text, such as images, are left out of the row.
//! Not supported, and rejected by name: unions, run-end encoding, list views, LZ4-compressed buffers, big-endian files.
//! Knows no dataset library: which files of a folder belong together is decided elsewhere.

mod batch;
mod flat;
mod schema;
mod value;

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use self::batch::{Column, Dictionaries};
use self::flat::Table;
use self::schema::Field;
use super::limit::RowLimit;
use super::row::{Row, RowLocation, Rows, shared};
use crate::error::{DataError, RowError, RowReason};

/// The first and last bytes of a file; a stream has none.
const MAGIC: &[u8; 6] = b"ARROW1";

/// Stands before the length of a header.
const CONTINUES: u32 = u32::MAX;

/// Kinds of messages, by the numbers of the format.
const SCHEMA: u8 = 1;
const DICTIONARY: u8 = 2;
const BATCH: u8 = 3;

pub(super) fn open(path: &Path, limit: RowLimit) -> Result<Rows, DataError> {
    let failed = |e| DataError::io("read", path, e);
    let invalid = |e: String| DataError::invalid(path.display(), format!("no readable arrow file: {e}"));
    let mut file = File::open(path).map_err(|e| DataError::io("open", path, e))?;
    let size = file.metadata().map_err(failed)?.len();
    let mut head = [0; 6];
    if size >= 16 {
        file.read_exact(&mut head).map_err(failed)?;
        if &head == MAGIC {
            file.seek(SeekFrom::End(-6)).map_err(failed)?;
            file.read_exact(&mut head).map_err(failed)?;
            if &head != MAGIC {
                return Err(invalid("it has no end: it was cut short".to_owned()));
            }
            file.seek(SeekFrom::Start(8)).map_err(failed)?;
        } else {
            file.rewind().map_err(failed)?;
        }
    }
    let mut messages = Messages { reader: BufReader::with_capacity(1 << 18, file) };
    let fields = match messages.next().map_err(invalid)? {
        Some(message) if message.kind == SCHEMA => message.header(schema::fields).map_err(invalid)?,
        _ => return Err(invalid("it does not begin with a schema".to_owned())),
    };
    let rows = ArrowRows {
        messages,
        limit,
        fields,
        dictionaries: Dictionaries::new(),
        columns: Vec::new(),
        rows: 0,
        next: 0,
        file: shared(path),
        read: 0,
        ended: false,
    };
    Ok(Box::new(rows))
}

/// A header and what follows it.
struct Message {
    kind: u8,
    metadata: Vec<u8>,
    body: Vec<u8>,
}

impl Message {
    fn header<T>(&self, read: impl FnOnce(Table<'_>) -> Result<T, String>) -> Result<T, String> {
        read(Table::root(&self.metadata)?.table(2)?.ok_or("damaged: a message without content")?)
    }
}

struct Messages {
    reader: BufReader<File>,
}

impl Messages {
    /// `size` bytes, or fewer at the end. Memory grows with what is there, not with what is claimed.
    fn bytes(&mut self, size: usize) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        (&mut self.reader).take(size as u64).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
        Ok(bytes)
    }

    fn word(&mut self) -> Result<Option<u32>, String> {
        let bytes = self.bytes(4)?;
        match bytes.as_slice() {
            [] => Ok(None),
            [a, b, c, d] => Ok(Some(u32::from_le_bytes([*a, *b, *c, *d]))),
            _ => Err("it ends inside of a message: it was cut short".to_owned()),
        }
    }

    fn whole(&mut self, size: usize) -> Result<Vec<u8>, String> {
        let bytes = self.bytes(size)?;
        match bytes.len() == size {
            true => Ok(bytes),
            false => Err(format!("a message of {size} bytes ends after {}: the file was cut short", bytes.len())),
        }
    }

    /// The next message; `None` at the end.
    fn next(&mut self) -> Result<Option<Message>, String> {
        // Files of before 2019 have the length alone.
        let size = match self.word()? {
            None => return Ok(None),
            Some(CONTINUES) => self.word()?.ok_or("it ends inside of a message: it was cut short")?,
            Some(size) => size,
        };
        if size == 0 {
            return Ok(None);
        }
        let metadata = self.whole(size as usize)?;
        let root = Table::root(&metadata)?;
        let kind = root.byte(1)?;
        let size = usize::try_from(root.long(3)?).map_err(|_| "damaged: a body of negative length")?;
        let body = self.whole(size)?;
        Ok(Some(Message { kind, metadata, body }))
    }
}

struct ArrowRows {
    messages: Messages,
    limit: RowLimit,
    fields: Vec<Field>,
    dictionaries: Dictionaries,
    /// The batch that is read.
    columns: Vec<Column>,
    rows: usize,
    /// Row of the batch that comes next.
    next: usize,
    file: Arc<Path>,
    read: usize,
    ended: bool,
}

impl ArrowRows {
    /// Takes in messages up to the next batch with rows; `false` at the end.
    fn advance(&mut self) -> Result<bool, String> {
        loop {
            let Some(mut message) = self.messages.next()? else { return Ok(false) };
            let body = std::mem::take(&mut message.body);
            match message.kind {
                DICTIONARY => message.header(|header| self.dictionary(header, body))?,
                BATCH => {
                    let (fields, dictionaries, limit) = (&self.fields, &self.dictionaries, self.limit);
                    let columns = message.header(|header| batch::columns(header, fields, body, dictionaries, limit))?;
                    (self.rows, self.columns) = columns;
                    self.next = 0;
                    if self.rows > 0 {
                        return Ok(true);
                    }
                }
                _ => {}
            }
        }
    }

    /// Keeps a dictionary for the batches that follow.
    fn dictionary(&mut self, header: Table<'_>, body: Vec<u8>) -> Result<(), String> {
        let number = header.long(0)?;
        if header.byte(2)? != 0 {
            return Err("dictionaries that grow are not read".to_owned());
        }
        let field = find(&self.fields, number).ok_or("damaged: a dictionary of no column")?;
        let values = Field { dictionary: None, ..field.clone() };
        let data = header.table(1)?.ok_or("damaged: a dictionary without values")?;
        let (_, mut columns) = batch::columns(data, &[values], body, &self.dictionaries, self.limit)?;
        self.dictionaries.insert(number, Arc::new(columns.remove(0)));
        Ok(())
    }
}

/// The field whose values are indices into a dictionary.
fn find(fields: &[Field], number: i64) -> Option<&Field> {
    fields.iter().find_map(|field| match field.dictionary {
        Some((of, _)) if of == number => Some(field),
        _ => find(&field.children, number),
    })
}

impl Iterator for ArrowRows {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        if self.ended {
            return None;
        }
        let more = if self.next < self.rows { Ok(true) } else { self.advance() };
        let fields = match more {
            Ok(true) => {
                self.next += 1;
                value::object(&self.fields, &self.columns, self.next - 1, &mut self.limit.budget())
            }
            Ok(false) => {
                self.ended = true;
                return None;
            }
            Err(e) => {
                self.ended = true;
                Err(RowError::new(RowReason::Unreadable, e))
            }
        };
        self.read += 1;
        Some(Row { place: RowLocation { file: self.file.clone(), row: self.read }, fields })
    }
}
