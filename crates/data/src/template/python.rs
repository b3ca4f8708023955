//! Values printed as Python prints them: `str()` for output, `json.dumps` for `tojson`. Templates are written for
//! jinja2, and a model was trained on exactly that text.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::allowance::{DEEPEST, check_length, measure, refused};

/// Largest number of characters of an indent.
const MOST_INDENT: usize = 256;

/// Python's `repr` of a float: `1.0`, `1e-07`, `1e+16`.
pub(super) fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() { "nan".to_owned() } else { format!("{}inf", if x < 0.0 { "-" } else { "" }) };
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').expect("the format has an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is an integer");
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// The text that `{{ value }}` writes: strings as they are, undefined as nothing, the rest as `repr`.
pub(super) fn print(value: &Value) -> Result<Cow<'_, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Cow::Borrowed(text));
    }
    let mut out = String::new();
    if !value.is_undefined() {
        repr(value, 0, &mut out)?;
    }
    Ok(Cow::Owned(out))
}

fn too_deep() -> Error {
    refused(format!("a value is nested deeper than {DEEPEST}, or in itself"))
}

fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(too_deep());
    }
    check_length(out.len())?;
    match value.kind() {
        ValueKind::Number if is_float(value) => out.push_str(&float(f64::try_from(value.clone())?)),
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&key, depth + 1, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        ValueKind::Seq if !value.is_tuple() => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&item, depth + 1, out)?;
            }
            out.push(']');
        }
        ValueKind::String => write!(out, "{value:?}").expect("writing to a string succeeds"),
        _ => {
            check_length(measure(value)?.written())?;
            write!(out, "{value}").expect("writing to a string succeeds");
        }
    }
    Ok(())
}

/// The options of `json.dumps` that templates use.
struct Dump {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// The `tojson` filter of transformers: `json.dumps(x, ensure_ascii=False, …)`, no HTML escapes.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(v) if v.is_none() => None,
        Some(v) => Some(match v.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(v)?.min(MOST_INDENT + 1)),
        }),
    };
    if indent.as_ref().is_some_and(|indent| indent.len() > MOST_INDENT) {
        return Err(refused(format!("tojson: an indent of more than {MOST_INDENT}")));
    }
    let separators = options.get::<Option<Value>>("separators")?.filter(|v| !v.is_none());
    let (item_separator, key_separator) = match separators {
        Some(pair) => {
            let text = |i| pair.get_item_by_index(i).map(|v| v.as_str().unwrap_or_default().to_owned());
            (text(0)?, text(1)?)
        }
        None => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
    };
    let dump = Dump {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    dump.value(value, 0, &mut out)?;
    Ok(out)
}

/// `json.dumps(x, ensure_ascii=False)`.
pub(super) fn dumps(value: &serde_json::Value) -> Result<String, Error> {
    tojson(&Value::from(Serde(value)), Kwargs::from_iter(std::iter::empty::<(String, Value)>()))
}

impl Dump {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(too_deep());
        }
        check_length(out.len())?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container('[', ']', items.len(), depth, out, |this, i, out| {
                    this.value(&items[i], depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((json_key(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container('{', '}', entries.len(), depth, out, |this, i, out| {
                    this.string(&entries[i].0, out);
                    out.push_str(&this.key_separator);
                    this.value(&entries[i].1, depth + 1, out)
                })?;
            }
            kind => {
                let problem = format!("a value of kind {kind} cannot be written as JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        }
        Ok(())
    }

    fn container(
        &self,
        open: char,
        close: char,
        count: usize,
        depth: usize,
        out: &mut String,
        mut item: impl FnMut(&Self, usize, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        check_length(self.item_separator.len().saturating_mul(count))?;
        for i in 0..count {
            if i > 0 {
                out.push_str(&self.item_separator);
            }
            self.line(depth + 1, out);
            item(self, i, out)?;
        }
        if count > 0 {
            self.line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && (c as u32) > 0x7e) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(out, "\\u{unit:04x}").expect("writing to a string succeeds");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value) -> Result<String, Error> {
    if !is_float(value) {
        return Ok(value.to_string());
    }
    let x = f64::try_from(value.clone())?;
    Ok(match float(x).as_str() {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        text => text.to_owned(),
    })
}

fn json_key(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => key.is_true().to_string(),
        ValueKind::Number => number(key)?,
        kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("a {kind} cannot be a JSON key"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.5, "0.5"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-2.5e100, "-2.5e+100"),
            (0.0, "0.0"),
        ] {
            assert_eq!(float(x), text);
        }
    }
}
