//! Frozen parameters and learning rates of single parameters, chosen by patterns over their names.
//!
//! Knows names and patterns; the optimizer's rules take the factors.

use fancy_regex::Regex;
use graph::{Graph, Parameter};

use crate::CompileError;

/// The prefix of parameter names of adapters, as PEFT writes them.
const ADAPTER: &str = "base_model.model.";
/// The suffix of names of the second matrix of an adapter.
const SECOND: &str = ".lora_B.weight";

/// Names of a model that a message lists, at most.
const SHOWN: usize = 8;

/// Learning rates of single parameters. A pattern is the end of a parameter's name, or of that of a module around it, which
/// begins at a component; or a regular expression for the whole of one of these names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// Patterns of parameters that are not trained.
    pub frozen: Vec<String>,
    /// Patterns of parameters, and factors of their learning rate.
    pub factors: Vec<(String, f64)>,
    /// A further factor for the second matrices of adapters (LoRA+, Hayou et al. 2024).
    pub second_matrices: Option<f64>,
}

/// A pattern of an option.
struct Pattern<'a> {
    text: &'a str,
    /// None for the end of a name.
    regex: Option<Regex>,
    hits: usize,
}

impl<'a> Pattern<'a> {
    fn new(option: &'static str, text: &'a str) -> Result<Pattern<'a>, CompileError> {
        let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
        let regex = (!plain).then(|| Regex::new(&format!("^(?:{text})$"))).transpose();
        let wrong =
            |e| CompileError::option(option, format!("`{option}`: `{text}` is not a regular expression: {e}"), HINT);
        Ok(Pattern { text, regex: regex.map_err(wrong)?, hits: 0 })
    }

    /// True if it means a parameter, which is counted.
    fn takes(&mut self, parameter: &Parameter) -> bool {
        let name = parameter.name.strip_prefix(ADAPTER).unwrap_or(&parameter.name);
        let mut names = name.match_indices('.').map(|(end, _)| &name[..end]).chain([name]);
        let found = match &self.regex {
            Some(regex) => names.any(|name| regex.is_match(name).unwrap_or(false)),
            None => names.any(|name| {
                name.strip_suffix(self.text).is_some_and(|before| before.is_empty() || before.ends_with('.'))
            }),
        };
        self.hits += usize::from(found);
        found
    }
}

const HINT: &str = "a pattern is the end of a name, such as `embed_tokens` or `layers.0`, or a regular expression for a whole \
                    name, such as `model\\.layers\\.[0-3]`";

/// Takes the frozen parameters out of training, and gives the others their factors.
pub(crate) fn run(graph: &mut Graph, rates: &Rates) -> Result<(), CompileError> {
    const FROZEN: &str = "frozen_parameters";
    const RATES: &str = "learning_rates";
    let mut frozen = rates.frozen.iter().map(|text| Pattern::new(FROZEN, text)).collect::<Result<Vec<_>, _>>()?;
    let mut factors = rates.factors.iter().map(|(text, _)| Pattern::new(RATES, text)).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<String> = graph.parameters.iter().filter(|of| of.trainable).map(|of| of.name.clone()).collect();
    for parameter in graph.parameters.iter_mut().filter(|parameter| parameter.trainable) {
        // Every pattern counts its matches, also where one is enough.
        let mut stays = false;
        for pattern in &mut frozen {
            stays |= pattern.takes(parameter);
        }
        parameter.trainable = !stays;
        if stays || parameter.buffer {
            continue;
        }
        let mut own: Option<(&str, f64)> = None;
        for (pattern, (text, factor)) in factors.iter_mut().zip(&rates.factors) {
            if !pattern.takes(parameter) {
                continue;
            }
            if let Some((other, _)) = own.filter(|(_, other)| other != factor) {
                let message = format!("`{RATES}`: `{other}` and `{text}` give `{}` different rates", parameter.name);
                return Err(CompileError::option(RATES, message, "make one of the patterns narrower"));
            }
            own = Some((text, *factor));
        }
        let second = rates.second_matrices.filter(|_| parameter.adapter && parameter.name.ends_with(SECOND));
        parameter.rate = own.map_or(1.0, |(_, factor)| factor) * second.unwrap_or(1.0);
    }
    for (option, pattern) in frozen.iter().map(|of| (FROZEN, of)).chain(factors.iter().map(|of| (RATES, of))) {
        if pattern.hits == 0 {
            let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
            let text = pattern.text;
            let message = format!(
                "`{option}`: `{text}` matches no parameter that is trained: {}{}",
                shown.join(", "),
                if names.len() > SHOWN { format!(" and {} more", names.len() - SHOWN) } else { String::new() }
            );
            return Err(CompileError::option(option, message, HINT));
        }
    }
    if !rates.frozen.is_empty() && !graph.parameters.iter().any(|parameter| parameter.trainable && !parameter.buffer) {
        let message = format!("`{FROZEN}` leaves nothing to train");
        return Err(CompileError::option(FROZEN, message, "remove a pattern"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use graph::Init;
    use tensor::DType;

    use super::*;

    fn graph() -> Graph {
        let mut graph = Graph::default();
        let names = [
            "model.embed_tokens.weight",
            "model.layers.1.input_layernorm.weight",
            "model.layers.11.mlp.up_proj.weight",
            "model.norm.weight",
            "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight",
            "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight",
        ];
        for name in names {
            let id = graph.add_parameter(name, vec![2, 2], Init::Ones, DType::F32);
            let parameter = &mut graph.parameters[id.0 as usize];
            (parameter.trainable, parameter.adapter) = (true, name.starts_with(ADAPTER));
        }
        graph
    }

    fn of(rates: &Rates) -> Vec<f64> {
        let mut graph = graph();
        run(&mut graph, rates).unwrap();
        graph.parameters.iter().map(|of| if of.trainable { of.rate } else { 0.0 }).collect()
    }

    #[test]
    fn patterns_are_ends_of_names_and_whole_names() {
        let frozen = |patterns: &[&str]| {
            let frozen = patterns.iter().map(|text| (*text).to_owned()).collect();
            of(&Rates { frozen, ..Rates::default() })
        };
        assert_eq!(frozen(&["embed_tokens", "norm"]), [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
        assert_eq!(frozen(&["layers.1"]), [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]);
        assert_eq!(frozen(&[r"model\.layers\.\d+"]), [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
        assert_eq!(frozen(&[r".*\.weight(?<!norm\.weight)"]), [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
        assert_eq!(frozen(&["lora_A"]), [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]);
    }

    #[test]
    fn factors_of_patterns_and_of_second_matrices_multiply() {
        let factors = vec![("up_proj".to_owned(), 0.5), ("model.norm".to_owned(), 3.0)];
        let rates = Rates { factors, second_matrices: Some(16.0), ..Rates::default() };
        assert_eq!(of(&rates), [1.0, 1.0, 0.5, 3.0, 0.5, 8.0]);
    }

    #[test]
    fn mistakes_are_named() {
        let refused = |frozen: &[&str], factors: &[(&str, f64)]| {
            let frozen = frozen.iter().map(|text| (*text).to_owned()).collect();
            let factors = factors.iter().map(|(text, factor)| ((*text).to_owned(), *factor)).collect();
            run(&mut graph(), &Rates { frozen, factors, ..Rates::default() }).unwrap_err().to_string()
        };
        assert!(refused(&["layer"], &[]).contains("`layer` matches no parameter that is trained: model.embed_tokens"));
        assert!(refused(&["[", "norm"], &[]).contains("`[` is not a regular expression"));
        assert!(refused(&[".*"], &[]).contains("leaves nothing to train"));
        assert!(refused(&[], &[("up_proj", 1.0), ("layers.11", 2.0)]).contains("different rates"));
        assert!(refused(&["norm"], &[("norm", 2.0)]).contains("`learning_rates`: `norm` matches no parameter"));
    }
}
