//! Which modules get a low-rank adapter, of which rank and scale: the rules of PEFT, over names of modules.
//!
//! Knows names and patterns; not what a module computes.

use fancy_regex::Regex;
use tensor::DType;

use crate::CompileError;

/// The module that PEFT's `all-linear` leaves out.
pub(crate) const HEAD: &str = "lm_head";

/// LoRA (Hu et al. 2021), as PEFT builds it.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterOptions {
    pub rank: usize,
    pub alpha: f64,
    /// Divide by the root of the rank instead of the rank (Kalajdzievski 2023).
    pub rank_stabilised: bool,
    /// Scale outputs to trained magnitudes (DoRA, Liu et al. 2024).
    pub magnitudes: bool,
    pub dropout: f64,
    pub dtype: DType,
    /// Module names (last component, or a dotted suffix), `all-linear`, or regular expressions
    /// over the whole module name.
    pub targets: Vec<String>,
    /// Ends of the names of modules that are trained in full (PEFT's `modules_to_save`).
    pub saved: Vec<String>,
    pub exceptions: AdapterExceptions,
}

impl AdapterOptions {
    /// Which of [`AdapterOptions::saved`] a parameter belongs to: one whose text its module's name ends with, or the name of
    /// a module around that one, as PEFT matches them.
    pub fn saves(&self, parameter: &str) -> Option<usize> {
        let modules = || parameter.match_indices('.').map(|(end, _)| &parameter[..end]);
        self.saved.iter().position(|name| modules().any(|module| module.ends_with(name.as_str())))
    }
}

/// What differs from module to module. Patterns are regular expressions over the end of a module's name that begins at
/// a component; the first that matches holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdapterExceptions {
    pub rank_pattern: Vec<(String, usize)>,
    pub alpha_pattern: Vec<(String, f64)>,
    /// Modules that get none: names as in `targets`, but without `all-linear`.
    pub excluded: Vec<String>,
    /// Only these layers, for targets that are no patterns and no whole names.
    pub layers: Option<Vec<usize>>,
    /// Names of the lists of layers; the first number of a module's name where none is given.
    pub layers_pattern: Vec<String>,
}

/// [`AdapterOptions`] with their patterns compiled.
#[derive(Debug)]
pub struct AdapterRules {
    rank: usize,
    alpha: f64,
    rank_stabilised: bool,
    targets: Vec<Target>,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
    excluded: Vec<Target>,
    layers: Option<Vec<usize>>,
    layer_patterns: Vec<Regex>,
}

#[derive(Debug)]
enum Target {
    AllLinear,
    /// The last components of the module name.
    Suffix(String),
    /// The whole module name, in the syntax that PEFT's users know from Python: look-around too.
    Pattern(Regex),
}

fn regex(pattern: &str, whole: &str) -> Result<Regex, CompileError> {
    let wrong = |e| CompileError::Options(format!("adapter target `{pattern}` is no regular expression: {e}"));
    Regex::new(whole).map_err(wrong)
}

fn is_match(pattern: &Regex, module: &str) -> Result<bool, CompileError> {
    pattern.is_match(module).map_err(|e| {
        CompileError::Options(format!("adapter target `{pattern}` gives no answer for the module `{module}`: {e}"))
    })
}

impl Target {
    fn new(text: &str) -> Result<Target, CompileError> {
        let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'));
        Ok(match text {
            "all-linear" => Target::AllLinear,
            name if plain => Target::Suffix(name.to_owned()),
            pattern => Target::Pattern(regex(pattern, &format!("^(?:{pattern})$"))?),
        })
    }

    fn is_match(&self, module: &str) -> Result<bool, CompileError> {
        match self {
            Target::AllLinear => Ok(module != HEAD),
            Target::Suffix(name) => Ok(module == name || module.ends_with(&format!(".{name}"))),
            Target::Pattern(pattern) => is_match(pattern, module),
        }
    }

    /// Whether a list of layers has a say: it has none for whole names and for patterns.
    fn minds_layers(&self, module: &str) -> bool {
        match self {
            Target::AllLinear => true,
            Target::Suffix(name) => module != name,
            Target::Pattern(_) => false,
        }
    }
}

impl AdapterRules {
    /// Errors: a pattern that is no regular expression.
    pub fn new(options: &AdapterOptions) -> Result<AdapterRules, CompileError> {
        let of = &options.exceptions;
        let targets = |texts: &[String]| texts.iter().map(|t| Target::new(t)).collect::<Result<Vec<_>, _>>();
        let ending = |pattern: &String| regex(pattern, &format!(r"^(?:.*\.)?(?:{pattern})$"));
        let ranks = of.rank_pattern.iter().map(|(pattern, rank)| Ok((ending(pattern)?, *rank)));
        let alphas = of.alpha_pattern.iter().map(|(pattern, alpha)| Ok((ending(pattern)?, *alpha)));
        let lists = of.layers_pattern.iter().map(|name| regex(name, &format!(r"^(?:|.*?\.)(?:{name})\.(\d+)\.")));
        let any_list = || regex("layers", r"^.*?\.[^.]*\.(\d+)\.").map(|any| vec![any]);
        Ok(AdapterRules {
            rank: options.rank,
            alpha: options.alpha,
            rank_stabilised: options.rank_stabilised,
            targets: targets(&options.targets)?,
            ranks: ranks.collect::<Result<_, CompileError>>()?,
            alphas: alphas.collect::<Result<_, CompileError>>()?,
            excluded: targets(&of.excluded)?,
            layers: of.layers.clone(),
            layer_patterns: match of.layers_pattern.is_empty() {
                true => any_list()?,
                false => lists.collect::<Result<_, _>>()?,
            },
        })
    }

    /// Rank of a module's adapter.
    pub fn rank(&self, module: &str) -> Result<usize, CompileError> {
        Ok(first(&self.ranks, module)?.unwrap_or(self.rank))
    }

    /// What the product B·A of a module is multiplied with.
    pub fn scale(&self, module: &str) -> Result<f64, CompileError> {
        let (rank, alpha) = (self.rank(module)? as f64, first(&self.alphas, module)?.unwrap_or(self.alpha));
        Ok(if self.rank_stabilised { alpha / rank.sqrt() } else { alpha / rank })
    }

    /// Whether a linear module gets an adapter. Counts which targets hit, so that one that never does can be named.
    pub fn matches(&self, module: &str, hits: &mut [usize]) -> Result<bool, CompileError> {
        let mut any = false;
        for (target, hits) in self.targets.iter().zip(hits) {
            let hit = target.is_match(module)? && (!target.minds_layers(module) || self.in_layers(module)?);
            *hits += hit as usize;
            any |= hit;
        }
        for excluded in &self.excluded {
            any &= !excluded.is_match(module)?;
        }
        Ok(any)
    }

    fn in_layers(&self, module: &str) -> Result<bool, CompileError> {
        let Some(layers) = &self.layers else { return Ok(true) };
        for pattern in &self.layer_patterns {
            if is_match(pattern, module)? {
                let captures = pattern.captures(module).ok().flatten().expect("it has just matched");
                let number = captures.get(1).and_then(|n| n.as_str().parse::<usize>().ok());
                return Ok(number.is_some_and(|n| layers.contains(&n)));
            }
        }
        Ok(false)
    }
}

fn first<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Result<Option<T>, CompileError> {
    for (pattern, value) in patterns {
        if is_match(pattern, module)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(targets: &[&str]) -> AdapterOptions {
        AdapterOptions {
            rank: 4,
            alpha: 8.0,
            rank_stabilised: false,
            magnitudes: false,
            dropout: 0.0,
            dtype: DType::F32,
            targets: targets.iter().map(|t| (*t).to_owned()).collect(),
            saved: Vec::new(),
            exceptions: AdapterExceptions::default(),
        }
    }

    fn hit(options: &AdapterOptions, module: &str) -> bool {
        AdapterRules::new(options).unwrap().matches(module, &mut vec![0; options.targets.len()]).unwrap()
    }

    const Q0: &str = "model.layers.0.self_attn.q_proj";
    const Q10: &str = "model.layers.10.self_attn.q_proj";

    #[test]
    fn names_are_matched_from_a_component_on_and_patterns_as_a_whole() {
        assert!(hit(&options(&["q_proj"]), Q0) && hit(&options(&["self_attn.q_proj"]), Q0));
        assert!(!hit(&options(&["proj"]), Q0) && !hit(&options(&["attn.q_proj"]), Q0));
        assert!(hit(&options(&[r".*\.0\..*_proj"]), Q0) && !hit(&options(&[r".*\.0\..*_proj"]), Q10));
        assert!(!hit(&options(&["all-linear"]), "lm_head") && hit(&options(&["lm_head"]), "lm_head"));
    }

    #[test]
    fn saved_modules_are_matched_by_the_end_of_their_names_and_with_what_is_in_them() {
        let of = AdapterOptions { saved: vec!["norm".into(), "mlp".into()], ..options(&["q_proj"]) };
        assert_eq!(of.saves("model.norm.weight"), Some(0));
        assert_eq!(of.saves("model.layers.0.input_layernorm.weight"), Some(0), "as PEFT does");
        assert_eq!(of.saves("model.layers.0.mlp.up_proj.weight"), Some(1));
        assert_eq!((of.saves("model.layers.0.self_attn.q_proj.bias"), of.saves("mlp")), (None, None));
    }

    #[test]
    fn exceptions_are_peft_s() {
        let mut of = options(&["q_proj", "model.layers.3.mlp.up_proj"]);
        of.exceptions.layers = Some(vec![0]);
        assert!(hit(&of, Q0) && !hit(&of, Q10), "the number of a layer is a number, not a prefix");
        assert!(hit(&of, "model.layers.3.mlp.up_proj"), "a whole name holds in any layer");
        of.exceptions.layers_pattern = vec!["blocks".into()];
        assert!(!hit(&of, Q0), "the list has another name");
        of.exceptions = AdapterExceptions { excluded: vec!["q_proj".into()], ..Default::default() };
        assert!(!hit(&of, Q0));

        of.exceptions.rank_pattern =
            vec![("0.self_attn.q_proj".into(), 16), ("^q_proj".into(), 3), ("q_proj".into(), 9)];
        of.exceptions.alpha_pattern = vec![(".*10.*".into(), 27.0)];
        let rules = AdapterRules::new(&of).unwrap();
        assert_eq!((rules.rank(Q0).unwrap(), rules.rank(Q10).unwrap(), rules.rank("lm_head").unwrap()), (16, 9, 4));
        assert_eq!((rules.scale(Q0).unwrap(), rules.scale(Q10).unwrap()), (0.5, 3.0));
        of.rank_stabilised = true;
        assert_eq!(AdapterRules::new(&of).unwrap().scale(Q10).unwrap(), 9.0);
        of.exceptions.rank_pattern = vec![("(".into(), 1)];
        assert!(AdapterRules::new(&of).unwrap_err().to_string().contains("`(` is no regular expression"));
    }
}
