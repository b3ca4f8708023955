//! What an operation computes of one row, as expressions: the form that chains of operations are composed in. An
//! element-wise operation has it too. Does not know shapes, layouts, or who evaluates it.

use tensor::Attrs;

use crate::elementwise::Expr;

/// How often an operand or a result has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// One for each element.
    Element,
    /// One for each row: a statistic.
    Row,
    /// One for each column. An operand: a weight that every row reads. A result: summed over the rows, in f32.
    Column,
}

const NAMES: [(&str, Extent); 3] = [("element", Extent::Element), ("row", Extent::Row), ("column", Extent::Column)];

impl Extent {
    fn name(self) -> &'static str {
        NAMES.iter().find(|(_, extent)| *extent == self).expect("the table names all").0
    }
}

/// Results of one row, as expressions of its operands.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    pub operands: Vec<Extent>,
    pub results: Vec<(Extent, Expr)>,
}

impl Form {
    /// Every operand and every result has a value for each element.
    pub fn of_elements(operands: usize, expressions: Vec<Expr>) -> Form {
        let results = expressions.into_iter().map(|e| (Extent::Element, e)).collect();
        Form { operands: vec![Extent::Element; operands], results }
    }

    /// Whether each element is computed from the elements at its place.
    pub fn is_elementwise(&self) -> bool {
        let elements = |extent: &Extent| *extent == Extent::Element;
        self.operands.iter().all(elements)
            && self.results.iter().all(|(extent, e)| elements(extent) && !e.any(&|e| matches!(e, Expr::Mean(_))))
    }

    /// Whether something is summed over rows.
    pub fn sums_rows(&self) -> bool {
        self.results.iter().any(|(extent, _)| *extent == Extent::Column)
    }

    /// Operands that every row reads as a whole.
    pub fn whole(&self) -> Vec<usize> {
        (0..self.operands.len()).filter(|i| self.operands[*i] == Extent::Column).collect()
    }

    /// Whether an expression has one value for a row.
    pub fn is_uniform(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Input(index) => self.operands[*index] == Extent::Row,
            Expr::Mean(_) => true,
            _ => expr.parts().into_iter().all(|part| self.is_uniform(part)),
        }
    }

    /// What is wrong with it, if anything is.
    pub fn check(&self) -> Result<(), String> {
        if self.results.is_empty() || self.operands.first() != Some(&Extent::Element) {
            return Err("takes a tensor of rows first and gives at least one result".into());
        }
        for (extent, expr) in &self.results {
            if expr.operands() > self.operands.len() {
                return Err(format!("`{expr}` reads more than {} operands", self.operands.len()));
            }
            if *extent == Extent::Row && !self.is_uniform(expr) {
                return Err(format!("`{expr}` has no single value for a row"));
            }
        }
        Ok(())
    }

    /// As attributes: what a composed operation carries, without the types of its results.
    pub fn attrs(&self) -> Attrs {
        let texts: Vec<String> = self.results.iter().map(|(_, e)| e.to_string()).collect();
        let results: Vec<&str> = self.results.iter().map(|(extent, _)| extent.name()).collect();
        let operands: Vec<&str> = self.operands.iter().map(|extent| extent.name()).collect();
        Attrs::new().with("expressions", texts).with("operands", operands).with("results", results)
    }

    /// From the attributes of a composed operation.
    pub fn parse(attrs: &Attrs) -> Result<Form, String> {
        let extents = |name: &str| -> Result<Vec<Extent>, String> {
            let known = |text: &String| NAMES.iter().find(|(name, _)| name == text).map(|(_, extent)| *extent);
            let list = texts(attrs, name)?;
            list.iter().map(|text| known(text).ok_or(format!("attribute `{name}`: `{text}`"))).collect()
        };
        let expressions: Vec<Expr> = texts(attrs, "expressions")?
            .iter()
            .map(|t| t.parse().map_err(|e| format!("{e}")))
            .collect::<Result<_, _>>()?;
        let (operands, results) = (extents("operands")?, extents("results")?);
        if results.len() != expressions.len() {
            return Err(format!("{} expressions for {} results", expressions.len(), results.len()));
        }
        Ok(Form { operands, results: results.into_iter().zip(expressions).collect() })
    }
}

/// An attribute that is a list of strings.
pub fn texts(attrs: &Attrs, name: &str) -> Result<Vec<String>, String> {
    let list = attrs.get(name).and_then(|v| v.as_array()).ok_or(format!("attribute `{name}` must be a list"))?;
    let text = |v: &serde_json::Value| v.as_str().map(str::to_owned);
    list.iter().map(|v| text(v).ok_or(format!("attribute `{name}` must hold strings"))).collect()
}
