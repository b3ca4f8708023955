//! The facts that all nodes of a run must have in common, by name. Knows texts only.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// Pairs of name and value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts(pub BTreeMap<String, String>);

impl Facts {
    /// Returns the facts as a JSON object of texts.
    pub fn to_json(&self) -> Value {
        Value::Object(self.0.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect::<Map<_, _>>())
    }

    /// Reads an object of texts; anything else has no facts.
    pub fn from_json(value: &Value) -> Facts {
        let pair = |(name, value): (&String, &Value)| Some((name.clone(), value.as_str()?.to_owned()));
        Facts(value.as_object().into_iter().flatten().filter_map(pair).collect())
    }

    /// Returns the differences of another node, a line each.
    pub fn differences(&self, node: usize, other: &Facts) -> Vec<String> {
        let none = "nothing".to_owned();
        let names: std::collections::BTreeSet<&String> = self.0.keys().chain(other.0.keys()).collect();
        let differs = |name: &&String| self.0.get(*name) != other.0.get(*name);
        let line = |name: &String| {
            let value = |of: &Facts| of.0.get(name).unwrap_or(&none).clone();
            format!("{name}: {} on node 0, {} on node {node}", value(self), value(other))
        };
        names.into_iter().filter(differs).map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named() {
        let facts = |pairs: &[(&str, &str)]| Facts(pairs.iter().map(|(n, v)| ((*n).into(), (*v).into())).collect());
        let (a, b) = (facts(&[("same", "1"), ("rate", "0.1")]), facts(&[("same", "1"), ("rate", "0.2"), ("new", "x")]));
        assert_eq!(Facts::from_json(&a.to_json()), a);
        let lines = ["new: nothing on node 0, x on node 2", "rate: 0.1 on node 0, 0.2 on node 2"];
        assert_eq!(a.differences(2, &b), lines);
        assert!(a.differences(1, &a).is_empty());
    }
}
