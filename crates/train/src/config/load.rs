//! The loading of a configuration: from YAML, JSON and the command line, with all problems at once.

use options::{Fields, Node, Problem, Reader, Tree};

use super::{Config, Look, Task, checks, foreign, local, names, preference_checks, rows, runs};

impl Config {
    /// Loads a YAML text. `source_name` is before line and column in messages; `overrides` are pairs from the
    /// command line (`--set key=value`, `--key value`) and win over the text, the last over the first.
    ///
    /// # Errors
    /// Every problem of the text and of the overrides, in the order in which they were found.
    pub fn load(
        text: &str,
        source_name: &str,
        task: Task,
        overrides: &[(String, String)],
    ) -> Result<Config, Vec<Problem>> {
        Config::load_looking(text, source_name, task, overrides, Look::Nowhere)
    }

    /// Loads as [`Config::load`], and reports problems of the local files that the options name.
    ///
    /// # Errors
    /// Every problem of [`Config::load`], and each file that is not there.
    pub fn load_looking(
        text: &str,
        source_name: &str,
        task: Task,
        overrides: &[(String, String)],
        look: Look,
    ) -> Result<Config, Vec<Problem>> {
        Config::load_run(text, source_name, task, overrides, look, None)
    }

    /// Loads as [`Config::load_looking`], one run of a text that lists several.
    ///
    /// # Errors
    /// Every problem of [`Config::load_looking`], and a name that no run has.
    pub fn load_run(
        text: &str,
        source_name: &str,
        task: Task,
        overrides: &[(String, String)],
        look: Look,
        run: Option<&str>,
    ) -> Result<Config, Vec<Problem>> {
        let mut reader = Reader::new(task.defaults());
        match reader.read_yaml(source_name, text) {
            Some(root) => Config::from_tree(reader, root, task, overrides, look, run),
            None => Err(reader.finish().1),
        }
    }

    /// The names of the runs that a text lists; none where it is one run.
    ///
    /// # Errors
    /// Every problem of the text as YAML, and of the list.
    pub fn run_names(text: &str, source_name: &str) -> Result<Vec<String>, Vec<Problem>> {
        let mut reader = Reader::new(&[]);
        let names =
            reader.read_yaml(source_name, text).map_or_else(Vec::new, |root| runs::names_of(&mut reader, &root));
        let problems = reader.finish().1;
        if problems.is_empty() { Ok(names) } else { Err(problems) }
    }

    /// Loads options that are given as a JSON object (a Python dict); problems have no line then.
    ///
    /// # Errors
    /// Every problem of the options and of the overrides. A text that is not JSON is one.
    pub fn load_json(text: &str, task: Task, overrides: &[(String, String)]) -> Result<Config, Vec<Problem>> {
        Config::load_json_looking(text, task, overrides, Look::Nowhere)
    }

    /// Loads as [`Config::load_json`], and reports problems of the local files that the options name.
    ///
    /// # Errors
    /// Every problem of [`Config::load_json`], and each file that is not there.
    pub fn load_json_looking(
        text: &str,
        task: Task,
        overrides: &[(String, String)],
        look: Look,
    ) -> Result<Config, Vec<Problem>> {
        let mut reader = Reader::new(task.defaults());
        match serde_json::from_str(text) {
            Ok(value) => Config::from_tree(reader, Node::from_json(&value), task, overrides, look, None),
            Err(error) => {
                reader.report_at(None, "", format!("the options are not JSON: {error}"), None);
                Err(reader.finish().1)
            }
        }
    }

    fn from_tree(
        mut reader: Reader,
        mut root: Node,
        task: Task,
        overrides: &[(String, String)],
        look: Look,
        run: Option<&str>,
    ) -> Result<Config, Vec<Problem>> {
        if let Tree::Null = root.tree {
            root.tree = Tree::Map(Vec::new());
        }
        if !matches!(root.tree, Tree::Map(_)) {
            let message =
                format!("a configuration is a list of `option: value` lines, but this is {}", root.describe());
            reader.report_at(root.span, "", message, None);
            return Err(reader.finish().1);
        }
        names::use_first_names(&mut reader, &mut root);
        // The folder that is said for several runs is that in which each has its own.
        let of_all = |key: &str| run.is_some() && key.replace('-', "_") == "output_dir";
        let (before, after): (Vec<_>, Vec<_>) = overrides.iter().partition(|(key, _)| of_all(key));
        for (key, value) in before {
            names::override_option(&mut reader, &mut root, key, value);
        }
        runs::choose(&mut reader, &mut root, run);
        for (key, value) in after {
            names::override_option(&mut reader, &mut root, key, value);
        }
        let Tree::Map(entries) = &root.tree else { unreachable!("overrides change entries of the root, not the root") };
        let task = preference_checks::task_of(entries, task, &mut reader);
        let mut fields = Fields::new(&mut reader, entries, root.span);
        let mut config = Config::read(task, &mut fields);
        let second = names::SECOND_NAMES.iter().map(|(second, _)| *second);
        fields.refuse_unknown(rows().map(|row| row.name).chain(second), foreign::hint);
        foreign::explain_datasets(&root, &mut reader);
        checks::check_options(&config, &mut reader);
        local::check(&config, &mut reader, look);
        let (written, problems) = reader.finish();
        if !problems.is_empty() {
            return Err(problems);
        }
        config.written = written;
        Ok(config)
    }

    /// The options with `gpus: 0` as the number of GPUs that are visible. Errors: what does not go with several.
    pub fn with_visible_gpus(&self, visible: usize) -> Result<Config, Vec<Problem>> {
        let gpus = if self.hardware.gpus == 0 { visible.max(1) as u32 } else { self.hardware.gpus };
        self.with_gpus(gpus)
    }

    /// The options with as many GPUs as `--machine` names, if it names several and the options leave that open. Errors:
    /// the options name others, or what does not go with several.
    pub fn with_planned_gpus(&self, named: usize, machine: &str) -> Result<Config, Vec<Problem>> {
        let gpus = self.hardware.gpus;
        if named == 1 || gpus as usize == named {
            return self.with_gpus(gpus);
        }
        if self.is_written("gpus") && gpus > 0 {
            let message = format!("`gpus: {gpus}`, but `--machine {machine}` has {named}");
            let hint = "remove `gpus`, or name as many in `--machine`".to_owned();
            return Err(vec![self.mistake("gpus", message, Some(hint))]);
        }
        self.with_gpus(u32::try_from(named).unwrap_or(u32::MAX))
    }

    pub(crate) fn with_gpus(&self, gpus: u32) -> Result<Config, Vec<Problem>> {
        let mut config = self.clone();
        config.hardware.gpus = gpus;
        let refused = checks::refused_with_ranks(&config).into_iter();
        let mut problems: Vec<Problem> =
            refused.map(|(path, message, hint)| config.mistake(path, message, Some(hint))).collect();
        let wrong = config.divide_rows();
        problems.extend(wrong.map(|(path, message, hint)| config.mistake(path, message, Some(hint))));
        if problems.is_empty() { Ok(config) } else { Err(problems) }
    }
}
