//! The names and places of a model's weights in PEFT's adapters, where they differ from the files. Knows names; not
//! what an adapter computes.

use serde::{Deserialize, Serialize};

/// A model's description of its weights for adapters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterForm {
    /// Components of names: each as the parameters have it, and as adapters have it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renamed: Vec<[String; 2]>,
    /// Last components of modules that are no linear modules, such as routers: an adapter takes their weight as a parameter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bare: Vec<String>,
    /// Ends of the names of the modules that send tokens to experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routers: Vec<String>,
    /// Targets that are names of modules and mean parameters: each module and its parameter.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub converted: Vec<[String; 2]>,
    /// Beginnings of the names of parts that get adapters only by patterns and names with dots, as vision towers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apart: Vec<String>,
    /// Beginnings of the names of the parts that make tokens of what a tower gives: each one of `apart`, or inside of one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub projectors: Vec<String>,
    /// Parameters of three axes, a matrix for each group, in the order in which their module has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<MatrixStack>,
}

/// A parameter of three axes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatrixStack {
    /// The last component of its name.
    pub name: String,
    /// Linears whose outputs are stacked in each of its matrices, kept one by one under the number of the group; none
    /// where files have the parameter itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<String>,
    /// True if its matrices are [inputs, outputs].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub transposed: bool,
    /// True if files may also hold its matrices with the two axes exchanged.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub swapped: bool,
    /// The end of its whole name in files, and of its module's name in adapters, where adapters know it by another name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<[String; 2]>,
}

/// The place of a weight among the parameters that adapters know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterPlace {
    /// The matrix of a module.
    Matrix { module: String },
    /// All or a part of a parameter of three axes.
    Stacked {
        /// The module that has the parameter, and its place in [`AdapterForm::stacks`].
        container: String,
        stack: usize,
        /// The group of a weight that files keep by itself, and its index in [`MatrixStack::parts`]; none for the whole
        /// parameter.
        member: Option<[usize; 2]>,
    },
}

impl AdapterForm {
    /// True for a parameter, by its name, whose matrices files may hold with exchanged axes.
    pub fn may_be_swapped(&self, name: &str) -> bool {
        self.stacks.iter().any(|stack| stack.swapped && name.rsplit('.').next() == Some(&stack.name))
    }

    pub fn is_plain(&self) -> bool {
        *self == AdapterForm::default()
    }

    /// A module's or parameter's name as adapters have it.
    pub fn renamed(&self, name: &str) -> String {
        let other = |part: &str| self.renamed.iter().find(|[from, _]| from == part).map(|[_, to]| to.clone());
        let parts: Vec<String> = name.split('.').map(|part| other(part).unwrap_or_else(|| part.to_owned())).collect();
        parts.join(".")
    }

    /// Returns the name in files of a module or parameter that adapters name.
    pub fn in_files(&self, name: &str) -> String {
        let other = |part: &str| self.renamed.iter().find(|[_, to]| to == part).map(|[from, _]| from.clone());
        let parts: Vec<String> = name.split('.').map(|part| other(part).unwrap_or_else(|| part.to_owned())).collect();
        parts.join(".")
    }

    /// Returns the place of the parameter of this name; none for vectors and other parameters that are no matrices, by
    /// name.
    pub fn place(&self, parameter: &str) -> Option<AdapterPlace> {
        let stacked =
            |container: &str, stack| AdapterPlace::Stacked { container: container.into(), stack, member: None };
        for (number, stack) in self.stacks.iter().enumerate().filter(|(_, stack)| stack.parts.is_empty()) {
            if let Some([end, container]) = &stack.held {
                if let Some(before) = parameter.strip_suffix(end.as_str()) {
                    return Some(stacked(&format!("{before}{container}"), number));
                }
            } else if let Some((container, _)) = parameter.rsplit_once('.').filter(|(_, last)| *last == stack.name) {
                return Some(stacked(&self.renamed(container), number));
            }
        }
        let module = parameter.strip_suffix(".weight")?;
        let member = || {
            let (rest, name) = module.rsplit_once('.')?;
            let (container, group) = rest.rsplit_once('.')?;
            let group = group.parse().ok()?;
            let of = |stack: &MatrixStack| stack.parts.iter().position(|part| part == name);
            let (stack, part) = self.stacks.iter().enumerate().find_map(|(i, stack)| Some((i, of(stack)?)))?;
            Some(AdapterPlace::Stacked { container: self.renamed(container), stack, member: Some([group, part]) })
        };
        Some(member().unwrap_or_else(|| AdapterPlace::Matrix { module: self.renamed(module) }))
    }

    /// True if adapters treat the module of this name as a linear one.
    pub fn is_linear(&self, module: &str) -> bool {
        let last = module.rsplit('.').next().unwrap_or(module);
        !self.bare.iter().any(|name| name == last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form() -> AdapterForm {
        let stack = |name: &str, parts: &[&str]| MatrixStack {
            name: name.into(),
            parts: parts.iter().map(|part| (*part).to_owned()).collect(),
            transposed: false,
            swapped: false,
            held: None,
        };
        AdapterForm {
            renamed: vec![["block".into(), "mlp".into()]],
            bare: vec!["gate".into()],
            routers: Vec::new(),
            converted: Vec::new(),
            apart: Vec::new(),
            projectors: Vec::new(),
            stacks: vec![stack("gate_up", &["w1", "w3"]), stack("down", &["w2"]), stack("both", &[])],
        }
    }

    #[test]
    fn weights_are_found_in_the_parameters_that_adapters_know() {
        let of = |name: &str| form().place(name);
        let stacked = |stack, member| AdapterPlace::Stacked { container: "l.0.mlp.experts".into(), stack, member };
        assert_eq!(of("l.0.block.experts.3.w3.weight"), Some(stacked(0, Some([3, 1]))));
        assert_eq!(of("l.0.block.experts.11.w2.weight"), Some(stacked(1, Some([11, 0]))));
        assert_eq!(of("l.0.mlp.experts.both"), Some(stacked(2, None)));
        let matrix = |module: &str| Some(AdapterPlace::Matrix { module: module.into() });
        assert_eq!(of("l.0.block.gate.weight"), matrix("l.0.mlp.gate"));
        assert_eq!(of("l.0.shared.w1.weight"), matrix("l.0.shared.w1"), "it has no number of a group");
        assert_eq!(of("l.0.experts.both_bias"), None);
        assert!(!form().is_linear("l.0.mlp.gate") && form().is_linear("l.0.mlp.gate_proj"));
    }
}
