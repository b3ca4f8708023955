//! Modules that a folder's `config.json` says were left as they were. Which are quantised the files say themselves, by
//! their tensors: where both disagree, one of them is wrong, and it is unknown which.

use regex::Regex;
use serde_json::Value;

use super::scheme::KEYS;

/// Keys of lists of modules, of all methods.
const LISTS: [&str; 4] = ["modules_to_not_convert", "llm_int8_skip_modules", "ignore", "exclude_modules"];

/// Marks an entry of compressed-tensors as a regular expression.
const EXPRESSION: &str = "re:";

/// One entry of a list.
#[derive(Debug)]
struct Entry {
    list: &'static str,
    text: String,
    /// A pattern for the beginning of module names; none if the entry is a name, whole or as a part of others.
    pattern: Option<Regex>,
}

impl Entry {
    fn new(list: &'static str, text: &str) -> Result<Entry, String> {
        let written = match text.strip_prefix(EXPRESSION) {
            Some(expression) => Some(format!("^(?:{expression})")),
            None if text.contains('*') => {
                let parts: Vec<String> = text.split('*').map(regex::escape).collect();
                Some(format!("^{}$", parts.join(".*")))
            }
            None => None,
        };
        let pattern = written.map(|of| Regex::new(&of)).transpose();
        let pattern =
            pattern.map_err(|_| format!("`{list}` of the configuration: `{text}` is not a regular expression"))?;
        Ok(Entry { list, text: text.to_owned(), pattern })
    }

    /// A name holds for the module, for what is in it, and for what is called so at any depth.
    fn excludes(&self, module: &str) -> bool {
        match &self.pattern {
            Some(pattern) => pattern.is_match(module),
            None => format!(".{module}.").contains(&format!(".{}.", self.text)),
        }
    }
}

/// The modules that a folder's quantization leaves in full precision.
#[derive(Debug, Default)]
pub struct Exclusions(Vec<Entry>);

impl Exclusions {
    /// Reads the exclusions of a `config.json`, or of ModelOpt's own file.
    pub fn of(config: &Value) -> Result<Exclusions, String> {
        let sections = KEYS.iter().chain(&["quantization"]).filter_map(|key| config.get(key));
        let lists = sections.flat_map(|section| LISTS.iter().filter_map(|list| Some((*list, section.get(list)?))));
        let mut entries = Vec::new();
        for (list, value) in lists {
            for text in value.as_array().into_iter().flatten().filter_map(Value::as_str).filter(|text| !text.is_empty())
            {
                entries.push(Entry::new(list, text)?);
            }
        }
        Ok(Exclusions(entries))
    }

    /// The error names the first quantised weight that should not be.
    pub fn check<'w>(&self, weights: impl IntoIterator<Item = &'w str>) -> Result<(), String> {
        for weight in weights {
            let module = weight.strip_suffix(".weight").unwrap_or(weight);
            if let Some(Entry { list, text, .. }) = self.0.iter().find(|entry| entry.excludes(module)) {
                return Err(format!("`{weight}` is quantised, but `{list}` says by `{text}` that it is not"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const WEIGHT: &str = "model.layers.1.mlp.gate_proj.weight";

    #[test]
    fn lists_of_all_methods_are_read() {
        for (key, entry) in [
            ("modules_to_not_convert", "model.layers.1.mlp.gate_proj"),
            ("modules_to_not_convert", "gate_proj"),
            ("llm_int8_skip_modules", "mlp"),
            ("ignore", "model.layers.1"),
            ("ignore", "re:.*gate_proj$"),
            ("ignore", "re:model[.]layers"),
            ("exclude_modules", "model.layers.1.mlp*"),
            ("exclude_modules", "*gate_proj"),
        ] {
            let config = json!({"quantization_config": {key: ["lm_head", entry]}});
            let error = Exclusions::of(&config).unwrap().check(["lm.weight", WEIGHT]).unwrap_err();
            let expected = format!("`{WEIGHT}` is quantised, but `{key}` says by `{entry}`");
            assert!(error.starts_with(&expected), "{error}");
        }
        let of_modelopt = json!({"quantization": {"exclude_modules": ["*mlp*"]}});
        assert!(Exclusions::of(&of_modelopt).unwrap().check([WEIGHT]).is_err());
    }

    #[test]
    fn parts_of_names_are_whole_names() {
        for entry in ["gate", "mlp.gate", "model.layers.11", "layers.1.mlp.gate", "re:layers", "mlp*", "Linear"] {
            let config = json!({"quantization_config": {"ignore": [entry], "exclude_modules": null}});
            assert_eq!(Exclusions::of(&config).unwrap().check([WEIGHT]), Ok(()), "{entry}");
        }
        assert!(Exclusions::of(&json!({})).unwrap().check([WEIGHT]).is_ok());
        let wrong = json!({"quantization_config": {"ignore": ["re:("]}});
        assert!(Exclusions::of(&wrong).unwrap_err().contains("`re:(` is not a regular expression"));
    }
}
