//! Second spellings of options: `model_name: X` is `model: X`, and `dataset: Y` is one set of type `auto`.
//! Rewrites the tree before any table reads it; both spellings at once are a problem.

use options::{Key, Node, Reader, Tree, apply_override};

/// Pairs of second spelling and option.
pub const SECOND_NAMES: &[(&str, &str)] = &[("model_name", "model"), ("dataset", "datasets")];

/// Applies an override whose key may be a second spelling; it wins over either spelling in the text.
pub fn override_option(reader: &mut Reader, root: &mut Node, key: &str, value: &str) {
    let plain = key.replace('-', "_");
    match SECOND_NAMES.iter().find(|(second, _)| *second == plain) {
        None => apply_override(reader, root, key, value),
        Some((_, first)) => {
            apply_override(reader, root, first, value);
            let Tree::Map(entries) = &mut root.tree else { return };
            if let Some((_, node)) = entries.iter_mut().find(|(key, _)| *first == "datasets" && key.name == *first) {
                *node = one_dataset(node.clone());
            }
        }
    }
}

/// Gives every entry of the map its first name.
pub fn use_first_names(reader: &mut Reader, root: &mut Node) {
    let Tree::Map(entries) = &mut root.tree else { return };
    for (second, first) in SECOND_NAMES {
        let Some(index) = entries.iter().position(|(key, _)| key.name == *second) else { continue };
        if entries.iter().any(|(key, _)| key.name == *first) {
            let (key, _) = entries.remove(index);
            let message = format!("`{second}` and `{first}` say the same, so only one of them may be given");
            reader.report_at(key.span, second, message, Some(format!("remove `{second}`")));
            continue;
        }
        let (key, node) = &mut entries[index];
        key.name = first.to_string();
        if *first == "datasets" {
            let value = std::mem::replace(node, Node { tree: Tree::Null, span: node.span });
            *node = one_dataset(value);
        }
    }
}

/// The list of one dataset that `dataset: PATH` means. What is no path is left to be rejected as a list.
fn one_dataset(path: Node) -> Node {
    if !matches!(path.tree, Tree::Scalar { .. }) {
        return path;
    }
    let span = path.span;
    let word = |text: &str| Node { tree: Tree::Scalar { text: text.into(), quoted: false }, span };
    let key = |name: &str| Key { name: name.into(), span };
    let fields = vec![(key("path"), path), (key("type"), word("auto"))];
    Node { tree: Tree::List(vec![Node { tree: Tree::Map(fields), span }]), span }
}
