//! The choice of the modules that get a low-rank adapter, with its rank and scale: the rules of PEFT, over names of
//! modules.
//!
//! Knows names and patterns; not what a module computes.

use fancy_regex::{Regex, RegexBuilder};
use graph::{AdapterForm, AdapterPlace};
use tensor::DType;

use crate::CompileError;

/// The module that PEFT's `all-linear` leaves out.
pub(crate) const HEAD: &str = "lm_head";

/// The head of a reward model, which it leaves out as well.
const SCORE: &str = "score";

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
    /// Parameters by their names or the ends of these, which begin at a component (PEFT's `target_parameters`).
    pub parameters: Vec<String>,
    /// Ends of the names of modules that are trained in full (PEFT's `modules_to_save`).
    pub saved: Vec<String>,
    pub exceptions: AdapterExceptions,
    /// Adapters that are side by side in the matrices, each with an equal share of the ranks: every token names its own in
    /// the input [`SLOT_OF_TOKEN`]. None: one adapter, for all tokens.
    pub slots: Option<usize>,
    /// The model's description of its weights for adapters.
    pub form: AdapterForm,
}

/// The input that has the slot of each token's adapter, i32 [B, T]: from 1 on, 0 for none.
pub const SLOT_OF_TOKEN: &str = "adapter_slots";

/// The parameter that has the ranks of each slot, [slots + 1, ranks]: 1 in its own, 0 elsewhere; all 0 in the first row.
pub const RANKS_OF_SLOTS: &str = "adapter_slots.ranks";

impl AdapterOptions {
    /// Returns the index in [`AdapterOptions::saved`] of the entry that a parameter belongs to: one whose text its
    /// module's name ends with, or the name of a module around that one, as PEFT matches them.
    pub fn saves(&self, parameter: &str) -> Option<usize> {
        self.saved.iter().position(|name| is_in(parameter, name))
    }
}

/// True if a parameter is in a module whose name ends with this one.
pub(crate) fn is_in(parameter: &str, saved: &str) -> bool {
    parameter.match_indices('.').any(|(end, _)| parameter[..end].ends_with(saved))
}

/// The settings that differ from module to module. Patterns are regular expressions over the end of a module's name
/// that begins at a component; the first that matches holds.
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
    /// The targets of modules as they are written.
    texts: Vec<String>,
    parameters: Vec<String>,
    form: AdapterForm,
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

/// Patterns of an adapter: those that are names with dots, of which mixtures may have one for each expert, and others,
/// which take long to compile.
const MOST_NAMES: usize = 1 << 14;
const MOST_PATTERNS: usize = 512;

/// Bytes of a pattern, and of what it is compiled to.
const LONGEST_PATTERN: usize = 4096;
const MOST_COMPILED: usize = 1 << 20;

fn is_plain(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

/// Errors: more patterns than can be compiled in a moment. The adapter may come from an untrusted source.
fn check_patterns(options: &AdapterOptions) -> Result<(), CompileError> {
    let of = &options.exceptions;
    let by_name = of.rank_pattern.iter().map(|(name, _)| name).chain(of.alpha_pattern.iter().map(|(name, _)| name));
    let compiled = by_name.chain(&of.layers_pattern);
    let targets = options.targets.iter().chain(&of.excluded).filter(|text| !is_plain(text));
    let (mut names, mut patterns) = (0, 0);
    for text in compiled.chain(targets) {
        if text.len() > LONGEST_PATTERN {
            let text = format!("a pattern of the adapter has {} bytes, expected at most {LONGEST_PATTERN}", text.len());
            return Err(CompileError::Options(text));
        }
        *if is_plain(text) { &mut names } else { &mut patterns } += 1;
    }
    if names <= MOST_NAMES && patterns <= MOST_PATTERNS {
        return Ok(());
    }
    Err(CompileError::Options(format!(
        "the adapter has {names} names and {patterns} regular expressions as patterns, expected at most {MOST_NAMES} and \
         {MOST_PATTERNS}"
    )))
}

fn regex(pattern: &str, whole: &str) -> Result<Regex, CompileError> {
    let wrong = |e| CompileError::Options(format!("adapter target `{pattern}` is not a regular expression: {e}"));
    RegexBuilder::new(whole).delegate_size_limit(MOST_COMPILED).build().map_err(wrong)
}

fn is_match(pattern: &Regex, module: &str) -> Result<bool, CompileError> {
    pattern.is_match(module).map_err(|e| {
        CompileError::Options(format!("adapter target `{pattern}` gives no answer for the module `{module}`: {e}"))
    })
}

impl Target {
    fn new(text: &str) -> Result<Target, CompileError> {
        Ok(match text {
            "all-linear" => Target::AllLinear,
            name if is_plain(name) => Target::Suffix(name.to_owned()),
            pattern => Target::Pattern(regex(pattern, &format!("^(?:{pattern})$"))?),
        })
    }

    fn is_match(&self, module: &str) -> Result<bool, CompileError> {
        match self {
            Target::AllLinear => Ok(module != HEAD && module != SCORE),
            Target::Suffix(name) => Ok(module == name || module.ends_with(&format!(".{name}"))),
            Target::Pattern(pattern) => is_match(pattern, module),
        }
    }

    /// True if this target may be in a part next to the language model: a pattern, or a name with a dot.
    fn reaches_parts(&self) -> bool {
        match self {
            Target::AllLinear => false,
            Target::Suffix(name) => name.contains('.'),
            Target::Pattern(_) => true,
        }
    }

    /// True if a list of layers restricts this target: it does not for whole names and for patterns.
    fn minds_layers(&self, module: &str) -> bool {
        match self {
            Target::AllLinear => true,
            Target::Suffix(name) => module != name,
            Target::Pattern(_) => false,
        }
    }
}

/// The adapter of one weight.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterOf {
    /// The module that its matrices are named after.
    pub module: String,
    pub rank: usize,
    /// The factor of the product B·A.
    pub scale: f64,
    /// True if it is a target as a parameter, not as a module.
    pub by_parameter: bool,
    /// The place of a weight that lies in a parameter of three axes; none where the weight is a matrix of its own.
    pub stack: Option<Stacked>,
}

/// The place of a weight in a parameter of three axes. A is [groups·rank, inputs], B [outputs, rank·groups] with the
/// group last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stacked {
    /// Number of parts that are stacked in the outputs; 1 where the weight has all of them.
    pub parts: usize,
    /// The group and the part of a weight that files keep by itself; none for the whole parameter.
    pub member: Option<[usize; 2]>,
    /// True if the matrices are [inputs, outputs].
    pub transposed: bool,
}

impl AdapterRules {
    /// Errors: a pattern that is not a regular expression, and targets that PEFT would not take together.
    pub fn new(options: &AdapterOptions) -> Result<AdapterRules, CompileError> {
        check_patterns(options)?;
        let options = &converted(options)?;
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
            texts: options.targets.clone(),
            parameters: options.parameters.clone(),
            form: options.form.clone(),
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

    /// Returns a count for each of [`AdapterRules::targets`], all 0.
    pub fn hits(&self) -> Vec<usize> {
        vec![0; self.targets.len() + self.parameters.len()]
    }

    /// Returns the requested targets as texts: those of modules, then those of parameters.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        let parameters = self.parameters.iter().map(String::as_str);
        self.texts.iter().map(String::as_str).chain(parameters)
    }

    /// The adapter of a weight by its name in the parameter table; none where it gets none.
    pub fn of(&self, parameter: &str) -> Result<Option<AdapterOf>, CompileError> {
        self.counted(parameter, &mut self.hits())
    }

    /// The adapter that a module has whatever the targets say: its file has matrices for it.
    pub fn of_module(&self, module: &str) -> Result<AdapterOf, CompileError> {
        let (rank, scale) = (self.rank(module)?, self.scale(module)?);
        Ok(AdapterOf { module: module.to_owned(), rank, scale, by_parameter: false, stack: None })
    }

    /// [`AdapterRules::of`] that counts which targets hit, first those of modules, then those of parameters, so that one that
    /// never does can be named.
    pub fn counted(&self, parameter: &str, hits: &mut [usize]) -> Result<Option<AdapterOf>, CompileError> {
        match self.form.place(parameter) {
            None => Ok(None),
            Some(AdapterPlace::Matrix { module }) => self.of_matrix(module, hits),
            Some(AdapterPlace::Stacked { container, stack, member }) => {
                self.of_stacked(&container, stack, member, hits)
            }
        }
    }

    fn of_matrix(&self, module: String, hits: &mut [usize]) -> Result<Option<AdapterOf>, CompileError> {
        let (modules, parameters) = hits.split_at_mut(self.targets.len());
        let key = format!("{module}.weight");
        let named = self.names(&key, parameters);
        let is_target = self.form.is_linear(&module) && self.matches(&module, modules)?;
        let key = match (is_target, named) {
            (false, false) => return Ok(None),
            (true, false) => &module,
            (false, true) => &key,
            (true, true) => {
                let text =
                    format!("`{module}` is a target as a module and its weight one as a parameter: leave one out");
                return Err(CompileError::Options(text));
            }
        };
        let (rank, scale) = (self.rank(key)?, self.scale(key)?);
        Ok(Some(AdapterOf { module, rank, scale, by_parameter: named, stack: None }))
    }

    fn of_stacked(
        &self,
        container: &str,
        stack: usize,
        member: Option<[usize; 2]>,
        hits: &mut [usize],
    ) -> Result<Option<AdapterOf>, CompileError> {
        let key = |stack: usize| format!("{container}.{}", self.form.stacks[stack].name);
        if !self.names(&key(stack), &mut hits[self.targets.len()..]) {
            return Ok(None);
        }
        let others = &mut vec![0; self.parameters.len()];
        // PEFT wraps a module once for each of its parameters, the first inside.
        let around = (stack + 1..self.form.stacks.len()).filter(|other| self.names(&key(*other), others)).count();
        let module = format!("{container}{}", ".base_layer".repeat(around));
        let (rank, scale, of) = (self.rank(&key(stack))?, self.scale(&key(stack))?, &self.form.stacks[stack]);
        let stack = Stacked { parts: of.parts.len().max(1), member, transposed: of.transposed };
        Ok(Some(AdapterOf { module, rank, scale, by_parameter: true, stack: Some(stack) }))
    }

    /// True if a parameter, by the name that adapters have for it, is a target. Adds to the hits of each target.
    fn names(&self, key: &str, hits: &mut [usize]) -> bool {
        let mut any = false;
        for (target, hits) in self.parameters.iter().zip(hits) {
            let hit = key == target || key.ends_with(&format!(".{target}"));
            *hits += hit as usize;
            any |= hit;
        }
        any
    }

    /// Parameters that are targets, those included that names of modules mean.
    pub fn parameters(&self) -> &[String] {
        &self.parameters
    }

    /// Rank of an adapter, by the name of its module or parameter.
    fn rank(&self, name: &str) -> Result<usize, CompileError> {
        Ok(first(&self.ranks, name)?.unwrap_or(self.rank))
    }

    fn scale(&self, name: &str) -> Result<f64, CompileError> {
        let (rank, alpha) = (self.rank(name)? as f64, first(&self.alphas, name)?.unwrap_or(self.alpha));
        Ok(if self.rank_stabilised { alpha / rank.sqrt() } else { alpha / rank })
    }

    /// True if a linear module gets an adapter. Adds to the hits of each target.
    fn matches(&self, module: &str, hits: &mut [usize]) -> Result<bool, CompileError> {
        let mut any = false;
        let is_apart = self.form.apart.iter().any(|part| module.starts_with(part.as_str()));
        for (target, hits) in self.targets.iter().zip(hits) {
            let reaches = !is_apart || target.reaches_parts();
            let hit =
                reaches && target.is_match(module)? && (!target.minds_layers(module) || self.in_layers(module)?);
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

/// The options as PEFT changes them for models whose modules have become parameters: targets that are names of such modules
/// become parameters, with the rank and alpha of all modules that are parts of one.
pub fn converted(options: &AdapterOptions) -> Result<AdapterOptions, CompileError> {
    let (form, mut of) = (&options.form, options.clone());
    if form.converted.is_empty() {
        return Ok(of);
    }
    let every = options.targets.iter().any(|target| target == "all-linear");
    let means = |target: &str, name: &str| target == name || target.ends_with(&format!(".{name}"));
    let is_named = |name: &str| every || options.targets.iter().any(|target| means(target, name));
    of.targets.retain(|target| !form.converted.iter().any(|[name, _]| means(target, name)));
    let mut done: Vec<&String> = Vec::new();
    for [_, parameter] in &form.converted {
        let parts: Vec<&String> =
            form.converted.iter().filter(|[_, to]| to == parameter).map(|[name, _]| name).collect();
        let (named, missing): (Vec<&String>, Vec<&String>) = parts.iter().partition(|name| is_named(name));
        let is_saved = options.saved.iter().any(|saved| parts.iter().any(|name| means(saved, name)));
        if named.is_empty() || done.contains(&parameter) || is_saved {
            continue;
        }
        done.push(parameter);
        if !missing.is_empty() {
            let list = |names: &[&String]| names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
            let (named, missing) = (list(&named), list(&missing));
            let text = format!("adapter target `{named}` needs `{missing}` with it: both are parts of `{parameter}`");
            return Err(CompileError::Options(text));
        }
        if !of.parameters.contains(parameter) {
            of.parameters.push(parameter.clone());
        }
        if parts.len() > 1 {
            let pattern = format!(r".*\.{}", fancy_regex::escape(parameter));
            set(&mut of.exceptions.rank_pattern, &pattern, options.rank * parts.len());
            set(&mut of.exceptions.alpha_pattern, &pattern, options.alpha * parts.len() as f64);
        }
    }
    Ok(of)
}

fn set<T>(patterns: &mut Vec<(String, T)>, pattern: &str, value: T) {
    match patterns.iter_mut().find(|(name, _)| name == pattern) {
        Some((_, old)) => *old = value,
        None => patterns.push((pattern.to_owned(), value)),
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
            parameters: Vec::new(),
            saved: Vec::new(),
            exceptions: AdapterExceptions::default(),
            slots: None,
            form: AdapterForm::default(),
        }
    }

    fn hit(options: &AdapterOptions, module: &str) -> bool {
        AdapterRules::new(options).unwrap().of(&format!("{module}.weight")).unwrap().is_some()
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
    fn patterns_are_bounded() {
        let refused = |change: &dyn Fn(&mut AdapterOptions)| {
            let mut of = options(&["q_proj"]);
            change(&mut of);
            AdapterRules::new(&of).unwrap_err().to_string()
        };
        let ranks = |n: usize, name: &dyn Fn(usize) -> String| (0..n).map(|i| (name(i), 4)).collect::<Vec<_>>();
        let many = refused(&|of| of.exceptions.rank_pattern = ranks(200_000, &|i| format!("q{i}")));
        assert!(many.contains("200000 names and 0 regular expressions"), "{many}");
        let many = refused(&|of| of.exceptions.rank_pattern = ranks(3000, &|i| format!("\\w{{5}}x{i}")));
        assert!(many.contains("3000 regular expressions"), "{many}");
        let targets = (0..600).map(|i| format!("(q|{i})")).collect::<Vec<_>>();
        assert!(refused(&|of| of.targets = targets.clone()).contains("600 regular expressions"));
        assert!(refused(&|of| of.exceptions.excluded = targets.clone()).contains("600 regular expressions"));
        assert!(refused(&|of| of.targets = vec!["x|".repeat(3000)]).contains("6000 bytes, expected at most 4096"));
        let large = refused(&|of| of.targets = vec!["(\\w{99}){99}".to_owned()]);
        assert!(large.contains("not a regular expression"), "{large}");
        // A name for each expert of the largest mixtures is no attack.
        let mut of = options(&["q_proj"]);
        of.exceptions.rank_pattern = ranks(12_000, &|i| format!("layers.{i}.q_proj"));
        AdapterRules::new(&of).unwrap();
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
        assert!(AdapterRules::new(&of).unwrap_err().to_string().contains("`(` is not a regular expression"));
    }
}
