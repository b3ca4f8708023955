//! Limits of one rendering: work, text length, depth of values. Templates are untrusted, and a short loop can need more
//! than any machine has.
//!
//! Counted, not timed, so that a rendering ends the same way on every machine. Knows values, no template.

use std::cell::Cell;

use minijinja::value::{Enumerator, Object, ObjectExt, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::sync::Arc;

use crate::pipeline::is_over;

/// Levels of values inside of values. JSON has 128 at most.
pub(super) const DEEPEST: usize = 160;

/// Bytes of work for a value, besides those of its text.
const NODE: usize = 16;
/// Bytes that an element of a list takes.
const ELEMENT: usize = 64;

/// Work of one rendering, and of each byte of its conversation.
const WORK: (usize, usize) = (64 << 20, 256);
const LONGEST: (usize, usize) = (16 << 20, 16);

/// Instructions of one rendering: some for each byte, and for each pair of messages, because templates look ahead. A
/// conversation of a thousand messages needs about a million.
const FUEL: (u64, u64, u64) = (5_000_000, 64, 16);
const MOST_FUEL: u64 = 50_000_000;

#[derive(Clone, Copy, Debug, Default)]
struct Left {
    /// Bytes that may still be written, compared or searched.
    work: usize,
    /// Bytes of the longest text.
    longest: usize,
}

thread_local! {
    static LEFT: Cell<Left> = const { Cell::new(Left { work: 0, longest: 0 }) };
}

/// The number of instructions for a conversation of these messages and bytes.
pub(super) fn fuel(messages: usize, bytes: usize) -> u64 {
    let (messages, bytes) = (messages as u64, bytes as u64);
    let more = FUEL.1.saturating_mul(bytes).saturating_add(FUEL.2.saturating_mul(messages.saturating_mul(messages)));
    FUEL.0.saturating_add(more).min(MOST_FUEL)
}

/// Renders with the limits of a conversation of `bytes` bytes.
pub(super) fn during<T>(bytes: usize, render: impl FnOnce() -> T) -> T {
    let of = |(base, each): (usize, usize)| base.saturating_add(bytes.saturating_mul(each));
    let before = LEFT.replace(Left { work: of(WORK), longest: of(LONGEST) });
    let rendered = render();
    LEFT.set(before);
    rendered
}

pub(super) fn refused(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.into())
}

/// Errors: no thread waits for the text any more.
pub(super) fn go_on() -> Result<(), Error> {
    if is_over() { Err(refused("stopped")) } else { Ok(()) }
}

/// Charges for `bytes` bytes of work.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    go_on()?;
    let left = LEFT.get();
    let work = left.work.checked_sub(bytes).ok_or_else(|| refused("the template takes too much work"))?;
    LEFT.set(Left { work, ..left });
    Ok(())
}

/// Rejects a text of `bytes` bytes if it is too long, before or after it is made.
pub(super) fn check_length(bytes: usize) -> Result<(), Error> {
    let longest = LEFT.get().longest;
    if bytes <= longest {
        Ok(())
    } else {
        Err(refused(format!("the template makes a text of more than {longest} bytes")))
    }
}

/// The same for a text that is made.
pub(super) fn check_text(bytes: usize) -> Result<(), Error> {
    check_length(bytes)?;
    charge(bytes)
}

/// The size of a value.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    pub(super) bytes: usize,
    pub(super) nodes: usize,
}

impl Size {
    /// Bytes of the value as text, at most; quotes and escapes counted.
    pub(super) fn written(self) -> usize {
        self.bytes.saturating_add(self.nodes.saturating_mul(8))
    }
}

/// Looks through a value, whose depth is bounded then: it can be compared, written and dropped.
pub(super) fn measure(value: &Value) -> Result<Size, Error> {
    let mut size = Size::default();
    look_through(value, 0, &mut size)?;
    Ok(size)
}

fn look_through(value: &Value, depth: usize, size: &mut Size) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(refused(format!("the template nests values deeper than {DEEPEST}, or in themselves")));
    }
    size.nodes += 1;
    if let Some(text) = value.as_str() {
        size.bytes += text.len();
        return charge(text.len() / 8 + 1);
    }
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                look_through(&key, depth + 1, size)?;
                look_through(&value.get_item(&key)?, depth + 1, size)?;
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                look_through(&item, depth + 1, size)?;
            }
        }
        _ => return Ok(()),
    }
    charge(NODE)
}

/// Elements of a list or entries of a map, where they are known.
pub(super) fn count(value: &Value) -> usize {
    value.as_object().and_then(|object| object.enumerator_len()).unwrap_or(0)
}

/// A value that was made: bounded in size and depth.
pub(super) fn bounded(value: Value) -> Result<Value, Error> {
    let value = part(value)?;
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        measure(&value)?;
    }
    Ok(value)
}

/// A part of a value: as [`bounded`], but its elements are not looked through again, because each was when it was made.
/// What would be read lazily is read now, or else a chain of a million such values is followed at once.
pub(super) fn part(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        check_text(text.len())?;
        return Ok(value);
    }
    match value.kind() {
        ValueKind::Iterable if value.downcast_object_ref::<Items>().is_none() => {
            let mut items = Vec::new();
            for item in value.try_iter()? {
                charge(ELEMENT)?;
                items.push(item);
            }
            Ok(Value::from_object(Items(items)))
        }
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            charge(ELEMENT.saturating_mul(count(&value)))?;
            Ok(value)
        }
        _ => Ok(value),
    }
}

/// Charges for the values that `in` searches: a mapping finds a key without a look at its values, all else is compared.
pub(super) fn searched(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => charge(NODE)?,
        _ => drop(measure(&value)?),
    }
    Ok(value)
}

/// The items of what was read lazily.
#[derive(Debug)]
struct Items(Vec<Value>);

impl Object for Items {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|this| Box::new(this.0.iter().cloned()))
    }
}
