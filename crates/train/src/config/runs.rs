//! Several runs of one file: the list `runs` says what each changes of the other options. Rewrites the tree before any
//! table reads it: a run is chosen by its name, and what is left is a file of one run.

use options::{Key, Node, Reader, Tree};

use super::names::use_first_names;

/// The list's key.
pub const RUNS: &str = "runs";

/// The option that names a run.
const NAME: &str = "run_name";

/// The folder of what a run writes; of several runs each has a folder in it.
const OUTPUT: &str = "output_dir";

/// The names of the runs of a file, in order; none where it is one run. Wrong lists are problems.
pub fn names_of(reader: &mut Reader, root: &Node) -> Vec<String> {
    let Tree::Map(entries) = &root.tree else { return Vec::new() };
    let Some((_, list)) = entries.iter().find(|(key, _)| key.name == RUNS) else { return Vec::new() };
    let mut names: Vec<String> = Vec::new();
    let items = match &list.tree {
        Tree::List(items) if !items.is_empty() => items.as_slice(),
        _ => {
            let found = if matches!(list.tree, Tree::List(_)) { "empty".to_owned() } else { list.describe() };
            let message =
                format!("`{RUNS}` is {found}, expected a list of runs, each with `{NAME}` and what it changes");
            reader.report_at(list.span, RUNS, message, None);
            &[]
        }
    };
    for (index, item) in items.iter().enumerate() {
        let place = format!("{RUNS}[{index}]");
        match entry(item, NAME).map(|node| &node.tree) {
            Some(Tree::Scalar { text, .. }) if is_folder(text) && !names.contains(text) => names.push(text.clone()),
            Some(Tree::Scalar { text, .. }) if names.contains(text) => {
                reader.report_at(item.span, &place, format!("`{place}` has the name `{text}` of an earlier run"), None);
            }
            _ => {
                let message = format!("`{place}` has no `{NAME}` that can be the name of a folder");
                let hint = format!("each run is a group of options with a name of its own, such as `{NAME}: rank-8`");
                reader.report_at(item.span, &place, message, Some(hint));
            }
        }
        if entry(item, RUNS).is_some() {
            reader.report_at(item.span, &place, format!("`{place}` has `{RUNS}` of its own"), None);
        }
    }
    names
}

/// Makes the tree that of one run. `wanted`: its name, for a file of several.
pub fn choose(reader: &mut Reader, root: &mut Node, wanted: Option<&str>) {
    let names = names_of(reader, root);
    let Tree::Map(entries) = &mut root.tree else { return };
    let index = entries.iter().position(|(key, _)| key.name == RUNS);
    let removed = index.map(|index| entries.remove(index));
    let (span, items) = match removed {
        Some((key, Node { tree: Tree::List(items), .. })) => (key.span, items),
        Some(_) => return,
        None => (None, Vec::new()),
    };
    let item = wanted.and_then(|wanted| items.iter().find(|item| text(item, NAME).as_deref() == Some(wanted)));
    match (wanted, item) {
        (Some(wanted), Some(item)) => change(reader, root, item.clone(), wanted),
        (Some(wanted), None) if names.is_empty() => {
            let hint = format!("several runs of one file are a list `{RUNS}`");
            reader.report_at(span, RUNS, format!("there is no run `{wanted}`: the file is one run"), Some(hint));
        }
        (Some(wanted), None) => {
            let message = format!("`{RUNS}` has no run `{wanted}`");
            reader.report_at(span, RUNS, message, Some(format!("it has {}", names.join(", "))));
        }
        (None, _) if names.is_empty() => {}
        (None, _) => {
            let message = format!("`{RUNS}` are several runs, and here one is expected");
            reader.report_at(span, RUNS, message, Some(format!("choose one with `--run`: {}", names.join(", "))));
        }
    }
}

/// Puts what a run changes in place of what stands next to the list.
fn change(reader: &mut Reader, root: &mut Node, mut item: Node, name: &str) {
    use_first_names(reader, &mut item);
    let above = text(root, OUTPUT).unwrap_or_else(|| "output".into());
    let Tree::Map(changes) = item.tree else { return };
    let Tree::Map(entries) = &mut root.tree else { return };
    if !changes.iter().any(|(key, _)| key.name == OUTPUT) {
        let place = format!("{}/{name}", above.trim_end_matches('/'));
        let node = Node { tree: Tree::Scalar { text: place, quoted: true }, span: item.span };
        put(entries, Key { name: OUTPUT.into(), span: item.span }, node);
    }
    for (key, node) in changes {
        put(entries, key, node);
    }
}

fn put(entries: &mut Vec<(Key, Node)>, key: Key, node: Node) {
    match entries.iter_mut().find(|(known, _)| known.name == key.name) {
        Some(known) => *known = (key, node),
        None => entries.push((key, node)),
    }
}

fn entry<'n>(node: &'n Node, name: &str) -> Option<&'n Node> {
    let Tree::Map(entries) = &node.tree else { return None };
    entries.iter().find(|(key, _)| key.name == name).map(|(_, node)| node)
}

fn text(node: &Node, name: &str) -> Option<String> {
    match &entry(node, name)?.tree {
        Tree::Scalar { text, .. } => Some(text.clone()),
        _ => None,
    }
}

/// True for a name that is one component of a path.
fn is_folder(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Look, Task};

    const FILE: &str = "model: m\noutput_dir: out\nlora_rank: 4\nruns:\n  - run_name: a\n  - run_name: b\n    lora_rank: 8\n    \
                        output_dir: elsewhere\n";

    fn load(text: &str, overrides: &[(&str, &str)], run: Option<&str>) -> Result<Config, String> {
        let overrides: Vec<_> = overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        Config::load_run(text, "run.yaml", Task::Sft, &overrides, Look::Nowhere, run)
            .map_err(|problems| options::render_problems(&problems))
    }

    #[test]
    fn a_run_is_the_file_with_its_changes() {
        assert_eq!(Config::run_names(FILE, "run.yaml").unwrap(), ["a", "b"]);
        assert!(Config::run_names("model: m\n", "run.yaml").unwrap().is_empty());
        let of = |overrides: &[(&str, &str)], name| {
            let config = load(FILE, overrides, Some(name)).unwrap();
            (config.run.run_name.value().cloned(), config.run.output_dir, config.lora.lora_rank)
        };
        assert_eq!(of(&[], "a"), (Some("a".into()), "out/a".into(), 4));
        assert_eq!(of(&[], "b"), (Some("b".into()), "elsewhere".into(), 8));
        // What is said on the command line holds for every run; each keeps a folder of its own.
        assert_eq!(of(&[("lora_rank", "2"), ("output-dir", "new")], "a"), (Some("a".into()), "new/a".into(), 2));
        assert_eq!(load(FILE, &[("lora_rank", "2")], Some("b")).unwrap().lora.lora_rank, 2);
    }

    #[test]
    fn mistakes_have_a_place() {
        let said = |text: &str, run| load(text, &[], run).err().unwrap_or_default();
        let error = said(FILE, None);
        assert!(error.contains("run.yaml:4:1") && error.contains("choose one with `--run`: a, b"), "{error}");
        assert!(said(FILE, Some("c")).contains("it has a, b"));
        assert!(said("model: m\n", Some("c")).contains("the file is one run"));
        assert!(said("model: m\nruns: 3\n", None).contains("expected a list of runs"));
        assert!(said("model: m\nruns: []\n", None).contains("`runs` is empty, expected a list of runs"));
        for (name, expected) in [("", "no `run_name`"), ("x/y", "no `run_name`"), ("a", "of an earlier run")] {
            let text = format!("model: m\nruns:\n  - run_name: a\n  - run_name: {name}\n");
            let error = Config::run_names(&text, "run.yaml").map_err(|p| options::render_problems(&p)).unwrap_err();
            assert!(error.contains("run.yaml:4") && error.contains(expected), "{error}");
        }
        let error = said("model: m\nruns:\n  - run_name: a\n    lora_rnk: 3\n", Some("a"));
        assert!(error.contains("run.yaml:4:5") && error.contains("lora_rank"), "{error}");
    }
}
