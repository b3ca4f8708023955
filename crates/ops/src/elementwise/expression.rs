//! Expressions over one element of every operand, over one row, or over a whole tensor: a tree, and its text form
//! `mul(silu(in0), in1)`. It does not know shapes, layouts or who evaluates it.

use std::fmt;
use std::str::FromStr;

use tensor::DType;

/// A function of one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unary {
    Negate,
    Exp,
    Tanh,
    /// 2/√π · ∫₀ˣ e^−t² dt
    Erf,
    /// max(x, 0)
    Relu,
    /// 1 above 0, else 0
    Step,
    /// 1 / (1 + e^−x)
    Sigmoid,
    /// x / (1 + e^−x)
    Silu,
    /// ln(1 + e^x)
    Softplus,
    /// ln x
    Log,
    /// e^x − 1
    ExpMinusOne,
    /// 1/√x
    Rsqrt,
    /// The same value. Inside, down to what is rounded or reduced, a device may contract products with sums and
    /// multiply what is the same for a whole row first; the reference computes as written.
    Relaxed,
    /// Rounds to a storage type and back, as writing a value to memory and reading it would.
    Round(DType),
}

/// A function of two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    /// The second value where it is below the first, else the first, so that a first NaN stays.
    Minimum,
    /// The second value where it is above the first, else the first, so that a first NaN stays.
    Maximum,
}

/// One value, computed from the elements of the operands at one place.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// The element of this operand, widened to the arithmetic's type.
    Input(usize),
    Constant(f64),
    Unary(Unary, Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    /// The mean over a row. An expression with one is of rows and no longer of elements.
    Mean(Box<Expr>),
    /// The largest magnitude in the tensors of these values, by bits: NaN above infinity above what is finite.
    Amax(Vec<Expr>),
    /// The power of two that scales a tensor: the first value, where it is not 0, else the largest that takes the
    /// second, a magnitude, to 1.75·2^top at most. A device computes the second only where it must.
    Power(Box<Expr>, Box<Expr>, i32),
    /// The number of elements of the tensors of these values that are not 0, or of those of them that the power makes 0
    /// in E4M3. Only counted where the factor of the power is 0, so that later steps do not pay for it.
    Count(Counted, Box<Expr>, Vec<Expr>),
}

/// The elements that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    Nonzero,
    /// The nonzero elements that become 0.
    Flushed,
}

const COUNTED: &[(&str, Counted)] = &[("nonzero", Counted::Nonzero), ("flushed", Counted::Flushed)];

const MEAN: &str = "mean";
const AMAX: &str = "amax";
const POWER: &str = "power";

const UNARY: &[(&str, Unary)] = &[
    ("neg", Unary::Negate),
    ("exp", Unary::Exp),
    ("tanh", Unary::Tanh),
    ("erf", Unary::Erf),
    ("relu", Unary::Relu),
    ("step", Unary::Step),
    ("sigmoid", Unary::Sigmoid),
    ("silu", Unary::Silu),
    ("softplus", Unary::Softplus),
    ("log", Unary::Log),
    ("expm1", Unary::ExpMinusOne),
    ("rsqrt", Unary::Rsqrt),
    ("relaxed", Unary::Relaxed),
    ("round_f32", Unary::Round(DType::F32)),
    ("round_bf16", Unary::Round(DType::BF16)),
    ("round_f16", Unary::Round(DType::F16)),
];

const BINARY: &[(&str, Binary)] = &[
    ("add", Binary::Add),
    ("sub", Binary::Subtract),
    ("mul", Binary::Multiply),
    ("div", Binary::Divide),
    ("min", Binary::Minimum),
    ("max", Binary::Maximum),
];

impl Expr {
    pub fn unary(function: Unary, x: Expr) -> Expr {
        Expr::Unary(function, Box::new(x))
    }

    pub fn binary(function: Binary, a: Expr, b: Expr) -> Expr {
        Expr::Binary(function, Box::new(a), Box::new(b))
    }

    pub fn sigmoid(self) -> Expr {
        Expr::unary(Unary::Sigmoid, self)
    }

    pub fn silu(self) -> Expr {
        Expr::unary(Unary::Silu, self)
    }

    pub fn rsqrt(self) -> Expr {
        Expr::unary(Unary::Rsqrt, self)
    }

    pub fn relaxed(self) -> Expr {
        Expr::unary(Unary::Relaxed, self)
    }

    pub fn mean(self) -> Expr {
        Expr::Mean(Box::new(self))
    }

    /// The power of two with this factor, or for this magnitude.
    pub fn power(self, amax: Expr, top: i32) -> Expr {
        Expr::Power(Box::new(self), Box::new(amax), top)
    }

    /// Returns the value rounded as storage in memory as `dtype` would round it.
    pub fn stored_as(self, dtype: DType) -> Expr {
        Expr::unary(Unary::Round(dtype), self)
    }

    /// Returns the direct operands of an expression.
    pub fn parts(&self) -> Vec<&Expr> {
        match self {
            Expr::Input(_) | Expr::Constant(_) => Vec::new(),
            Expr::Unary(_, x) | Expr::Mean(x) => vec![x],
            Expr::Binary(_, a, b) | Expr::Power(a, b, _) => vec![a, b],
            Expr::Amax(all) => all.iter().collect(),
            Expr::Count(_, power, all) => [&**power].into_iter().chain(all).collect(),
        }
    }

    /// Returns the expression with every subexpression, from the top, replaced for which `with` gives another.
    pub fn replace(&self, with: &dyn Fn(&Expr) -> Option<Expr>) -> Expr {
        with(self).unwrap_or_else(|| match self {
            Expr::Input(_) | Expr::Constant(_) => self.clone(),
            Expr::Unary(function, x) => Expr::unary(*function, x.replace(with)),
            Expr::Binary(function, a, b) => Expr::binary(*function, a.replace(with), b.replace(with)),
            Expr::Mean(x) => x.replace(with).mean(),
            Expr::Amax(all) => Expr::Amax(all.iter().map(|x| x.replace(with)).collect()),
            Expr::Power(known, amax, top) => known.replace(with).power(amax.replace(with), *top),
            Expr::Count(which, power, all) => {
                Expr::Count(*which, Box::new(power.replace(with)), all.iter().map(|x| x.replace(with)).collect())
            }
        })
    }

    /// Returns the expression with every operand replaced by what `with` gives for its index.
    pub fn substitute(&self, with: &dyn Fn(usize) -> Expr) -> Expr {
        self.replace(&|part| match part {
            Expr::Input(index) => Some(with(*index)),
            _ => None,
        })
    }

    /// True if `what` holds for the expression or anything that it is made of.
    pub fn any(&self, what: &dyn Fn(&Expr) -> bool) -> bool {
        what(self) || self.parts().into_iter().any(|part| part.any(what))
    }

    pub fn reads(&self, operand: usize) -> bool {
        self.any(&|part| *part == Expr::Input(operand))
    }

    /// One more than the largest operand index; 0 when no operand is read.
    pub fn operands(&self) -> usize {
        match self {
            Expr::Input(index) => index + 1,
            _ => self.parts().into_iter().map(Expr::operands).max().unwrap_or(0),
        }
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $function:ident)*) => {
        $(impl std::ops::$trait for Expr {
            type Output = Expr;
            fn $method(self, other: Expr) -> Expr {
                Expr::binary(Binary::$function, self, other)
            }
        })*
    };
}

operators! {
    Add add Add
    Sub sub Subtract
    Mul mul Multiply
    Div div Divide
}

fn name_of<F: PartialEq>(table: &[(&'static str, F)], function: &F) -> &'static str {
    table.iter().find(|(_, f)| f == function).map(|(name, _)| *name).expect("the table names every function")
}

fn joined(all: &[Expr]) -> String {
    all.iter().map(Expr::to_string).collect::<Vec<String>>().join(", ")
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expr::Input(index) => write!(f, "in{index}"),
            Expr::Constant(value) => write!(f, "{value:?}"),
            Expr::Unary(function, x) => write!(f, "{}({x})", name_of(UNARY, function)),
            Expr::Binary(function, a, b) => write!(f, "{}({a}, {b})", name_of(BINARY, function)),
            Expr::Mean(x) => write!(f, "{MEAN}({x})"),
            Expr::Amax(all) => write!(f, "{AMAX}({})", joined(all)),
            Expr::Count(which, power, all) => write!(f, "{}({power}, {})", name_of(COUNTED, which), joined(all)),
            Expr::Power(known, amax, top) => write!(f, "{POWER}({known}, {amax}, {top})"),
        }
    }
}

/// The reason why a text is no expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExprError(pub String);

impl fmt::Display for ExprError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ExprError {}

impl FromStr for Expr {
    type Err = ExprError;

    fn from_str(text: &str) -> Result<Expr, ExprError> {
        let mut reader = Reader { text, at: 0 };
        let expr = reader.expression()?;
        reader.skip_space();
        if reader.at < text.len() { Err(reader.error("the end of the text")) } else { Ok(expr) }
    }
}

/// Recursive descent over `name(argument, …)`, `inN` and numbers.
struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn error(&self, expected: &str) -> ExprError {
        ExprError(format!("`{}`, byte {}: expected {expected}", self.text, self.at))
    }

    fn skip_space(&mut self) {
        let rest = &self.text[self.at..];
        self.at += rest.len() - rest.trim_start().len();
    }

    fn expect(&mut self, token: char) -> Result<(), ExprError> {
        self.skip_space();
        if !self.text[self.at..].starts_with(token) {
            return Err(self.error(&format!("`{token}`")));
        }
        self.at += token.len_utf8();
        Ok(())
    }

    fn word(&mut self) -> &str {
        self.skip_space();
        let rest = &self.text[self.at..];
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_.+-".contains(c))).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    fn expression(&mut self) -> Result<Expr, ExprError> {
        let word = self.word().to_owned();
        if let Some(index) = word.strip_prefix("in").and_then(|n| n.parse().ok()) {
            return Ok(Expr::Input(index));
        }
        let unary = UNARY.iter().find(|(name, _)| *name == word);
        if unary.is_some() || word == MEAN {
            self.expect('(')?;
            let x = self.expression()?;
            self.expect(')')?;
            return Ok(unary.map_or_else(|| x.clone().mean(), |(_, function)| Expr::unary(*function, x.clone())));
        }
        if let Some((_, function)) = BINARY.iter().find(|(name, _)| *name == word) {
            self.expect('(')?;
            let a = self.expression()?;
            self.expect(',')?;
            let b = self.expression()?;
            self.expect(')')?;
            return Ok(Expr::binary(*function, a, b));
        }
        match word.as_str() {
            AMAX => return Ok(Expr::Amax(self.list()?)),
            POWER => return self.power(),
            _ => {}
        }
        if let Some((_, which)) = COUNTED.iter().find(|(name, _)| *name == word) {
            let mut all = self.list()?;
            let power = all.remove(0);
            return match all.is_empty() {
                true => Err(self.error("a power and values before here")),
                false => Ok(Expr::Count(*which, Box::new(power), all)),
            };
        }
        match word.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(Expr::Constant(value)),
            _ => Err(self.error("a function, `inN` or a number before here")),
        }
    }

    fn list(&mut self) -> Result<Vec<Expr>, ExprError> {
        self.expect('(')?;
        let mut all = vec![self.expression()?];
        while self.expect(',').is_ok() {
            all.push(self.expression()?);
        }
        self.expect(')')?;
        Ok(all)
    }

    fn power(&mut self) -> Result<Expr, ExprError> {
        self.expect('(')?;
        let known = self.expression()?;
        self.expect(',')?;
        let amax = self.expression()?;
        self.expect(',')?;
        let top = self.word().parse().map_err(|_| self.error("an integer before here"))?;
        self.expect(')')?;
        Ok(known.power(amax, top))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        let expr = (Expr::Input(0).silu() * Expr::Input(1)).stored_as(DType::BF16) + Expr::Constant(1e-6);
        let text = "add(round_bf16(mul(silu(in0), in1)), 1e-6)";
        assert_eq!(expr.to_string(), text);
        assert_eq!(text.parse(), Ok(expr));
        for (name, function) in UNARY {
            assert_eq!(format!("{name}(in12)").parse(), Ok(Expr::unary(*function, Expr::Input(12))));
        }
        assert_eq!("mean(in0)".parse(), Ok(Expr::Input(0).mean()));
        let power = Expr::Input(1).power(Expr::Amax(vec![Expr::Input(0).mean(), Expr::Input(2)]), 11);
        assert_eq!(power.to_string(), "power(in1, amax(mean(in0), in2), 11)");
        let count = Expr::Count(Counted::Flushed, Box::new(power.clone()), vec![Expr::Input(0), Expr::Input(2)]);
        assert_eq!(count.to_string(), format!("flushed({power}, in0, in2)"));
        assert_eq!(count.to_string().parse(), Ok(count));
        assert!("nonzero(in0)".parse::<Expr>().is_err());
        assert_eq!(power.to_string().parse(), Ok(power));
        assert_eq!("-2.5".parse(), Ok(Expr::Constant(-2.5)));
    }

    #[test]
    fn errors_say_where() {
        let error = "add(in0 in1)".parse::<Expr>().unwrap_err();
        assert_eq!(error.0, "`add(in0 in1)`, byte 8: expected `,`");
        assert!("gelu(in0)".parse::<Expr>().is_err());
        assert!("in0)".parse::<Expr>().is_err());
        assert!("add(in0, nan)".parse::<Expr>().is_err());
        assert!("power(in0, in1)".parse::<Expr>().is_err());
        assert!("power(in0, in1, 0.5)".parse::<Expr>().is_err());
    }
}
