//! Options made of other options' types: optional, automatic, lists, maps. Knows no particular element.

use crate::kind::Kind;
use crate::reader::Reader;
use crate::setting::Setting;
use crate::tree::{Node, Tree};
use crate::value::{Fault, OptionValue};
use serde_json::{Value, json};
use std::collections::BTreeMap;

impl<T: OptionValue> OptionValue for Option<T> {
    const KIND: Kind = Kind::Nullable(&T::KIND);

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        match node.tree {
            Tree::Null => Ok(None),
            _ => T::read(node, reader).map(Some).map_err(|fault| match (fault, &node.tree) {
                // Python's and Hugging Face's word for it.
                (Fault::Mismatch { .. }, Tree::Scalar { text, .. }) if text.eq_ignore_ascii_case("none") => {
                    Fault::Mismatch { hint: Some("write `null`, or remove the line".to_string()) }
                }
                (fault, _) => fault,
            }),
        }
    }

    fn write(&self) -> Value {
        self.as_ref().map_or(Value::Null, T::write)
    }

    fn placeholder() -> Self {
        None
    }
}

impl<T: OptionValue> OptionValue for Setting<T> {
    const KIND: Kind = Kind::Auto(&T::KIND);

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        match &node.tree {
            Tree::Null => Ok(Setting::Auto),
            Tree::Scalar { text, .. } if text == "auto" => Ok(Setting::Auto),
            _ => T::read(node, reader).map(Setting::Value),
        }
    }

    fn write(&self) -> Value {
        self.value().map_or(json!("auto"), T::write)
    }

    fn placeholder() -> Self {
        Setting::Auto
    }
}

impl<T: OptionValue> OptionValue for Vec<T> {
    const KIND: Kind = Kind::List(&T::KIND);

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        // A single item stands for a list of it, unless it looks like several.
        if let (Tree::Scalar { text, .. }, false) = (&node.tree, matches!(T::KIND, Kind::Table(_)))
            && !text.is_empty()
            && !text.contains(',')
        {
            let item = reader.inside("[0]", |reader| reader.read_part::<T>(node));
            return Ok(vec![item.unwrap_or_else(T::placeholder)]);
        }
        let Tree::List(items) = &node.tree else {
            let hint = match (&T::KIND, &node.tree) {
                (Kind::Table(_), Tree::Map(_)) => Some("begin each item with `- `".to_string()),
                (Kind::Table(rows), Tree::Scalar { text, .. }) => {
                    rows.first().map(|first| format!("write `[{{{}: {text}, …}}]`: each item is a group", first.name))
                }
                (_, Tree::Scalar { text, .. }) => Some(format!("write `[{text}]`")),
                _ => None,
            };
            return Err(Fault::Mismatch { hint });
        };
        let read = items.iter().enumerate().map(|(index, item)| {
            let item = reader.inside(&format!("[{index}]"), |reader| reader.read_part::<T>(item));
            // A placeholder keeps the numbers of the items after a faulty one.
            item.unwrap_or_else(T::placeholder)
        });
        Ok(read.collect())
    }

    fn write(&self) -> Value {
        Value::Array(self.iter().map(T::write).collect())
    }

    fn placeholder() -> Self {
        Vec::new()
    }
}

impl<T: OptionValue> OptionValue for BTreeMap<String, T> {
    const KIND: Kind = Kind::Map(&T::KIND);

    fn read(node: &Node, reader: &mut Reader) -> Result<Self, Fault> {
        let Tree::Map(entries) = &node.tree else { return Err(Fault::MISMATCH) };
        let read = entries.iter().map(|(key, value)| {
            let value = reader.inside(&format!(".{}", key.name), |reader| reader.read_part::<T>(value));
            value.map(|value| (key.name.clone(), value))
        });
        read.collect::<Vec<_>>().into_iter().collect::<Option<BTreeMap<_, _>>>().ok_or(Fault::Reported)
    }

    fn write(&self) -> Value {
        Value::Object(self.iter().map(|(name, value)| (name.clone(), value.write())).collect())
    }

    fn placeholder() -> Self {
        BTreeMap::new()
    }
}
