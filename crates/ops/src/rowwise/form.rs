//! The expressions that an operation computes for one row: the form that chains of operations are composed in. An
//! elementwise operation has it too. Does not know shapes, layouts, or who evaluates it.

use std::sync::Arc;

use tensor::{Attrs, Parsed};

use crate::elementwise::Expr;

/// The extent of an operand or a result: the unit for which it has one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extent {
    /// One value for each element.
    Element,
    /// One for each row: a statistic.
    Row,
    /// One for each column. An operand: a weight that every row reads. A result: summed over the rows, in f32.
    Column,
    /// One for the tensor, f32 [1]: a factor, a scale. A result that is an `amax` is raised to it; a number of elements,
    /// f64 [1], is added to it.
    Tensor,
}

const NAMES: [(&str, Extent); 4] =
    [("element", Extent::Element), ("row", Extent::Row), ("column", Extent::Column), ("tensor", Extent::Tensor)];

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

    /// True if each element is computed from the elements at its place.
    pub fn is_elementwise(&self) -> bool {
        let elements = |extent: &Extent| *extent == Extent::Element;
        let reduces = |e: &Expr| matches!(e, Expr::Mean(_) | Expr::Amax(_) | Expr::Power(..) | Expr::Count(..));
        self.operands.iter().all(elements)
            && self.results.iter().all(|(extent, e)| elements(extent) && !e.any(&reduces))
    }

    /// True if an operand or a result has one value for the tensor: then no part of the rows can be computed by itself.
    pub fn spans_tensor(&self) -> bool {
        let of = |extent: &Extent| *extent == Extent::Tensor;
        self.operands.iter().any(of) || self.results.iter().any(|(extent, _)| of(extent))
    }

    /// True if results are magnitudes, which are raised and not overwritten.
    pub fn records(&self) -> bool {
        self.results.iter().any(|(extent, e)| *extent == Extent::Tensor && matches!(e, Expr::Amax(_)))
    }

    /// The powers of two in its results, each once.
    pub fn powers(&self) -> Vec<&Expr> {
        let mut all = Vec::new();
        self.results.iter().for_each(|(_, e)| collect_powers(e, &mut all));
        all
    }

    /// True if a result is summed over rows.
    pub fn sums_rows(&self) -> bool {
        self.results.iter().any(|(extent, _)| *extent == Extent::Column)
    }

    /// Operands that every row reads as a whole.
    pub fn whole(&self) -> Vec<usize> {
        (0..self.operands.len()).filter(|i| self.operands[*i] == Extent::Column).collect()
    }

    /// True if an expression has one value for a row.
    pub fn is_uniform(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Input(index) => matches!(self.operands[*index], Extent::Row | Extent::Tensor),
            Expr::Mean(_) | Expr::Amax(_) | Expr::Power(..) | Expr::Count(..) => true,
            _ => expr.parts().into_iter().all(|part| self.is_uniform(part)),
        }
    }

    /// True if an expression has one value for the tensor.
    fn is_of_tensor(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Input(index) => self.operands[*index] == Extent::Tensor,
            Expr::Mean(_) => false,
            Expr::Amax(_) | Expr::Power(..) | Expr::Count(..) => true,
            _ => expr.parts().into_iter().all(|part| self.is_of_tensor(part)),
        }
    }

    /// Checks that the form is valid. The error says what is wrong.
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
            if *extent == Extent::Tensor && !self.is_of_tensor(expr) {
                return Err(format!("`{expr}` has no single value for the tensor"));
            }
            // The values of a magnitude are computed in a kernel of their own, before the results.
            let known = |e: &Expr| {
                matches!(e, Expr::Power(known, amax, _)
                if matches!(**known, Expr::Input(i) if self.operands[i] == Extent::Tensor)
                    && matches!(**amax, Expr::Amax(_)))
            };
            let bare = expr.replace(&|part| known(part).then_some(Expr::Constant(1.0)));
            let reduced =
                |e: &Expr| matches!(e, Expr::Amax(_) | Expr::Count(..)) && !(*extent == Extent::Tensor && *e == bare);
            if bare.any(&|e| reduced(e) || matches!(e, Expr::Power(..))) {
                return Err(format!("in `{expr}` a magnitude is read elsewhere than in a power of a tensor's factor"));
            }
            if matches!(expr, Expr::Count(_, power, _) if !matches!(**power, Expr::Power(..))) {
                return Err(format!("`{expr}` counts without a power"));
            }
        }
        Ok(())
    }

    /// Returns the form as attributes of a composed operation, without the types of its results.
    pub fn attrs(&self) -> Attrs {
        let texts: Vec<String> = self.results.iter().map(|(_, e)| e.to_string()).collect();
        let results: Vec<&str> = self.results.iter().map(|(extent, _)| extent.name()).collect();
        let operands: Vec<&str> = self.operands.iter().map(|extent| extent.name()).collect();
        Attrs::new().with("expressions", texts).with("operands", operands).with("results", results)
    }

    /// Returns the valid form of the attributes of a composed operation. They keep it, so that it is read once.
    pub fn of(attrs: &Attrs) -> Result<Arc<Form>, String> {
        attrs.parsed()
    }
}

impl Parsed for Form {
    /// Reads a form from the attributes of a composed operation.
    fn parse(attrs: &Attrs) -> Result<Form, String> {
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
        let form = Form { operands, results: results.into_iter().zip(expressions).collect() };
        form.check()?;
        Ok(form)
    }
}

fn collect_powers<'a>(expr: &'a Expr, into: &mut Vec<&'a Expr>) {
    match expr {
        Expr::Power(..) if into.contains(&expr) => {}
        Expr::Power(..) => into.push(expr),
        _ => expr.parts().into_iter().for_each(|part| collect_powers(part, into)),
    }
}

/// An attribute that is a list of strings.
pub fn texts(attrs: &Attrs, name: &str) -> Result<Vec<String>, String> {
    let list = attrs.get(name).and_then(|v| v.as_array()).ok_or(format!("attribute `{name}` must be a list"))?;
    let text = |v: &serde_json::Value| v.as_str().map(str::to_owned);
    list.iter().map(|v| text(v).ok_or(format!("attribute `{name}` must hold strings"))).collect()
}
