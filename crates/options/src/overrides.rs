//! `--set key=value`: one option of a tree replaced from the command line. Does not know which options exist.

use crate::reader::Reader;
use crate::source::Span;
use crate::tree::{Key, Node, Tree};

/// Puts `value` at `key` (`lora_rank`, `distributed.num_nodes`, `datasets.0.samples`; dashes count as underscores) into
/// the tree, in place of what is there.
///
/// A value that begins with `[`, `{`, `"` or `'` is YAML; any other is one word, whatever signs are in it.
/// A key that leads through something that is no group is recorded as a problem.
pub fn apply_override(reader: &mut Reader, root: &mut Node, key: &str, value: &str) {
    let text = format!("{key}={value}");
    let source = reader.add_source("command line", &text);
    let key_span = Span { source, start: 0, end: key.len() };
    let Some(node) = parse_value(reader, source, key.len() + 1, value) else { return };
    let path = key.trim().replace('-', "_");
    let mut place = root;
    let segments: Vec<&str> = path.split('.').collect();
    for (depth, segment) in segments.iter().enumerate() {
        place = match step(place, segment, key_span) {
            Ok(next) => next,
            Err(message) => {
                let before = segments[..depth].join(".");
                let message = format!("`{path}` cannot be set: `{before}` {message}");
                reader.report_at(Some(key_span), &path, message, None);
                return;
            }
        };
    }
    *place = node;
}

/// Returns the place of `segment` in `node`; groups are made where there is nothing.
fn step<'n>(node: &'n mut Node, segment: &str, span: Span) -> Result<&'n mut Node, String> {
    if let Tree::Null = node.tree {
        node.tree = Tree::Map(Vec::new());
    }
    match &mut node.tree {
        Tree::Map(entries) => {
            let index = entries.iter().position(|(key, _)| key.name == segment).unwrap_or_else(|| {
                let key = Key { name: segment.to_string(), span: Some(span) };
                entries.push((key, Node { tree: Tree::Null, span: Some(span) }));
                entries.len() - 1
            });
            Ok(&mut entries[index].1)
        }
        Tree::List(items) => {
            let count = items.len();
            let index = segment.parse::<usize>().ok().filter(|index| *index < count);
            index.map(|index| &mut items[index]).ok_or_else(|| format!("is a list of {count} without `{segment}`"))
        }
        _ => Err("is a single value".into()),
    }
}

fn parse_value(reader: &mut Reader, source: usize, start: usize, value: &str) -> Option<Node> {
    let word = value.trim();
    let span = Some(Span { source, start, end: start + value.len() });
    if word.starts_with(['[', '{', '"', '\'']) {
        let mut own = Reader::new(&[]);
        let node = own.read_yaml("value", value);
        for problem in own.problems() {
            reader.report_at(span, "", problem.message.clone(), problem.hint.clone());
        }
        return node.filter(|_| own.problems().is_empty()).map(|node| with_span(node, span));
    }
    let tree = match word {
        "" | "~" | "null" => Tree::Null,
        text => Tree::Scalar { text: text.to_string(), quoted: false },
    };
    Some(Node { tree, span })
}

/// Every part of a value from the command line is shown as the whole argument.
fn with_span(node: Node, span: Option<Span>) -> Node {
    let tree = match node.tree {
        Tree::List(items) => Tree::List(items.into_iter().map(|item| with_span(item, span)).collect()),
        Tree::Map(entries) => {
            Tree::Map(entries.into_iter().map(|(key, value)| (Key { span, ..key }, with_span(value, span))).collect())
        }
        tree => tree,
    };
    Node { tree, span }
}
