//! The operators of a template within what a rendering may take: each that compares, searches or makes a value is put
//! between filters that look through its operands and bound its result. The engine's operators cannot be replaced, so
//! the tree of the template is copied with the filters in it; its text and its white space are untouched.
//!
//! Knows the syntax tree, not what the filters do.

use minijinja::Value;
use minijinja::machinery::Span;
use minijinja::machinery::ast::{
    AutoEscape, BinOp, BinOpKind, Block, Break, Call, CallArg, CallBlock, Compare, CompareOp, CompareOpKind, Const,
    Continue, Do, EmitExpr, Expr, Extends, Filter, FilterBlock, ForLoop, FromImport, GetAttr, GetItem, IfCond, IfExpr,
    Import, Include, List, Macro, Map, Set, SetBlock, Slice, Spanned, Stmt, Template, Test, Tuple, UnaryOp,
    UnaryOpKind, Var, WithBlock,
};

/// Function that charges for an operand.
pub(super) const OPERAND: &str = "surogate_operand";
/// Makes a list of a tuple, which would be repeated at once.
pub(super) const FACTOR: &str = "surogate_factor";
/// Looks through what is searched.
pub(super) const SEARCHED: &str = "surogate_searched";
/// Function that bounds the size of a result.
pub(super) const RESULT: &str = "surogate_result";
/// Bounds a part of a value.
pub(super) const PART: &str = "surogate_part";
/// Looks whether a value that is kept in a namespace holds the namespace.
pub(super) const KEPT: &str = "surogate_kept";

fn spanned<T>(node: T, span: Span) -> Spanned<T> {
    Spanned::new(node, span)
}

fn filter<'a>(name: &'a str, expr: Expr<'a>, args: Vec<CallArg<'a>>) -> Expr<'a> {
    let span = expr.span();
    Expr::Filter(spanned(Filter { name, expr: Some(expr), args }, span))
}

fn result(expr: Expr<'_>) -> Expr<'_> {
    filter(RESULT, expr, Vec::new())
}

/// Constants of a template are as small as it is.
fn operand(expr: Expr<'_>) -> Expr<'_> {
    if matches!(expr, Expr::Const(_)) { expr } else { filter(OPERAND, expr, Vec::new()) }
}

fn text(raw: &str, span: Span) -> Stmt<'_> {
    let expr = Expr::Const(spanned(Const { value: Value::from(raw) }, span));
    Stmt::EmitExpr(spanned(EmitExpr { expr }, span))
}

fn all<'a>(body: &[Stmt<'a>]) -> Vec<Stmt<'a>> {
    body.iter().map(statement).collect()
}

fn maybe<'a>(of: &Option<Expr<'a>>) -> Option<Expr<'a>> {
    of.as_ref().map(expression)
}

/// The right side of `in`.
fn searched(expr: Expr<'_>) -> Expr<'_> {
    if matches!(expr, Expr::Const(_)) { expr } else { filter(SEARCHED, expr, Vec::new()) }
}

/// A copy of a statement with the filters in it. What the template writes as it is goes the way of values, where its
/// length is counted.
pub(super) fn statement<'a>(of: &Stmt<'a>) -> Stmt<'a> {
    match of {
        Stmt::Template(s) => Stmt::Template(spanned(Template { children: all(&s.children) }, s.span())),
        Stmt::EmitExpr(s) => Stmt::EmitExpr(spanned(EmitExpr { expr: emitted(&s.expr) }, s.span())),
        Stmt::EmitRaw(s) => text(s.raw, s.span()),
        Stmt::ForLoop(s) => {
            let (target, iter) = (target(&s.target), expression(&s.iter));
            let (body, else_body) = (all(&s.body), all(&s.else_body));
            let filter_expr = maybe(&s.filter_expr);
            Stmt::ForLoop(spanned(
                ForLoop { target, iter, filter_expr, recursive: s.recursive, body, else_body },
                s.span(),
            ))
        }
        Stmt::IfCond(s) => {
            let (true_body, false_body) = (all(&s.true_body), all(&s.false_body));
            Stmt::IfCond(spanned(IfCond { expr: expression(&s.expr), true_body, false_body }, s.span()))
        }
        Stmt::WithBlock(s) => {
            let assignments = s.assignments.iter().map(|(to, expr)| (target(to), expression(expr))).collect();
            Stmt::WithBlock(spanned(WithBlock { assignments, body: all(&s.body) }, s.span()))
        }
        Stmt::Set(s) => {
            let expr = match &s.target {
                Expr::GetAttr(attr) => filter(KEPT, expression(&s.expr), vec![CallArg::Pos(expression(&attr.expr))]),
                _ => expression(&s.expr),
            };
            Stmt::Set(spanned(Set { target: target(&s.target), expr }, s.span()))
        }
        Stmt::SetBlock(s) => {
            let (target, filter) = (target(&s.target), s.filter.as_ref().map(applied));
            Stmt::SetBlock(spanned(SetBlock { target, filter, body: all(&s.body) }, s.span()))
        }
        Stmt::AutoEscape(s) => {
            let enabled = expression(&s.enabled);
            Stmt::AutoEscape(spanned(AutoEscape { enabled, body: all(&s.body) }, s.span()))
        }
        Stmt::FilterBlock(s) => {
            Stmt::FilterBlock(spanned(FilterBlock { filter: applied(&s.filter), body: all(&s.body) }, s.span()))
        }
        Stmt::Block(s) => {
            Stmt::Block(spanned(Block { name: s.name, required: s.required, body: all(&s.body) }, s.span()))
        }
        Stmt::Import(s) => Stmt::Import(spanned(Import { expr: expression(&s.expr), name: target(&s.name) }, s.span())),
        Stmt::FromImport(s) => {
            let names = s.names.iter().map(|(name, alias)| (target(name), alias.as_ref().map(target))).collect();
            Stmt::FromImport(spanned(FromImport { expr: expression(&s.expr), names }, s.span()))
        }
        Stmt::Extends(s) => Stmt::Extends(spanned(Extends { name: expression(&s.name) }, s.span())),
        Stmt::Include(s) => {
            let name = expression(&s.name);
            Stmt::Include(spanned(Include { name, ignore_missing: s.ignore_missing }, s.span()))
        }
        Stmt::Macro(s) => Stmt::Macro(spanned(macro_of(s), s.span())),
        Stmt::CallBlock(s) => {
            let call = spanned(call(&s.call), s.call.span());
            let macro_decl = spanned(macro_of(&s.macro_decl), s.macro_decl.span());
            Stmt::CallBlock(spanned(CallBlock { call, macro_decl }, s.span()))
        }
        Stmt::Continue(s) => Stmt::Continue(spanned(Continue, s.span())),
        Stmt::Break(s) => Stmt::Break(spanned(Break, s.span())),
        Stmt::Do(s) => Stmt::Do(spanned(Do { call: spanned(call(&s.call), s.call.span()) }, s.span())),
    }
}

fn macro_of<'a>(of: &Macro<'a>) -> Macro<'a> {
    let defaults = of.defaults.iter().map(expression).collect();
    Macro { name: of.name, args: of.args.iter().map(target).collect(), defaults, body: all(&of.body) }
}

/// Converts the target of an assignment: names stay as they are.
fn target<'a>(of: &Expr<'a>) -> Expr<'a> {
    match of {
        Expr::List(list) => Expr::List(spanned(List { items: list.items.iter().map(target).collect() }, list.span())),
        Expr::Tuple(tuple) => {
            Expr::Tuple(spanned(Tuple { items: tuple.items.iter().map(target).collect() }, tuple.span()))
        }
        Expr::GetAttr(attr) => {
            Expr::GetAttr(spanned(GetAttr { expr: target(&attr.expr), name: attr.name }, attr.span()))
        }
        Expr::Var(var) => Expr::Var(spanned(Var { id: var.id }, var.span())),
        other => expression(other),
    }
}

/// A filter that is applied to a block: the innermost has no operand in the tree.
fn applied<'a>(of: &Expr<'a>) -> Expr<'a> {
    match of {
        Expr::Filter(f) => {
            let expr = f.expr.as_ref().map(applied);
            Expr::Filter(spanned(Filter { name: f.name, expr, args: arguments(&f.args) }, f.span()))
        }
        other => expression(other),
    }
}

/// Calls that the engine writes out itself keep their form.
fn emitted<'a>(of: &Expr<'a>) -> Expr<'a> {
    match of {
        Expr::Call(c) if matches!(&c.expr, Expr::Var(var) if matches!(var.id, "loop" | "super" | "caller")) => {
            Expr::Call(spanned(call(c), c.span()))
        }
        other => expression(other),
    }
}

fn is_own_block(of: &Call<'_>) -> bool {
    matches!(&of.expr, Expr::GetAttr(attr) if matches!(&attr.expr, Expr::Var(var) if var.id == "self"))
}

fn call<'a>(of: &Call<'a>) -> Call<'a> {
    // The form shows what is called.
    let expr = match &of.expr {
        Expr::GetAttr(attr) if !is_own_block(of) => {
            Expr::GetAttr(spanned(GetAttr { expr: expression(&attr.expr), name: attr.name }, attr.span()))
        }
        Expr::GetAttr(_) | Expr::Var(_) => target(&of.expr),
        other => expression(other),
    };
    Call { expr, args: arguments(&of.args) }
}

fn arguments<'a>(of: &[CallArg<'a>]) -> Vec<CallArg<'a>> {
    let argument = |of: &CallArg<'a>| match of {
        CallArg::Pos(expr) => CallArg::Pos(expression(expr)),
        CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, expression(expr)),
        CallArg::PosSplat(expr) => CallArg::PosSplat(operand(expression(expr))),
        CallArg::KwargSplat(expr) => CallArg::KwargSplat(operand(expression(expr))),
    };
    of.iter().map(argument).collect()
}

/// A copy of an expression with the filters in it.
fn expression<'a>(of: &Expr<'a>) -> Expr<'a> {
    match of {
        Expr::Var(e) => Expr::Var(spanned(Var { id: e.id }, e.span())),
        Expr::Const(e) => Expr::Const(spanned(Const { value: e.value.clone() }, e.span())),
        Expr::Slice(e) => {
            let [start, stop, step] = [&e.start, &e.stop, &e.step].map(maybe);
            let slice = Expr::Slice(spanned(Slice { expr: expression(&e.expr), start, stop, step }, e.span()));
            filter(PART, slice, Vec::new())
        }
        Expr::UnaryOp(e) => {
            let op = if matches!(e.op, UnaryOpKind::Not) { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            Expr::UnaryOp(spanned(UnaryOp { op, expr: expression(&e.expr) }, e.span()))
        }
        Expr::BinOp(e) => binary(e),
        Expr::Compare(e) => compare(e),
        Expr::IfExpr(e) => {
            let (test_expr, true_expr) = (expression(&e.test_expr), expression(&e.true_expr));
            Expr::IfExpr(spanned(IfExpr { test_expr, true_expr, false_expr: maybe(&e.false_expr) }, e.span()))
        }
        Expr::Filter(e) => {
            Expr::Filter(spanned(Filter { name: e.name, expr: maybe(&e.expr), args: arguments(&e.args) }, e.span()))
        }
        Expr::Test(e) => {
            Expr::Test(spanned(Test { name: e.name, expr: expression(&e.expr), args: arguments(&e.args) }, e.span()))
        }
        Expr::GetAttr(e) => Expr::GetAttr(spanned(GetAttr { expr: expression(&e.expr), name: e.name }, e.span())),
        Expr::GetItem(e) => {
            let subscript_expr = operand(expression(&e.subscript_expr));
            Expr::GetItem(spanned(GetItem { expr: expression(&e.expr), subscript_expr }, e.span()))
        }
        Expr::Call(e) => result(Expr::Call(spanned(call(e), e.span()))),
        Expr::List(e) => {
            result(Expr::List(spanned(List { items: e.items.iter().map(expression).collect() }, e.span())))
        }
        Expr::Tuple(e) => {
            result(Expr::Tuple(spanned(Tuple { items: e.items.iter().map(expression).collect() }, e.span())))
        }
        Expr::Map(e) => {
            let keys = e.keys.iter().map(|key| operand(expression(key))).collect();
            let values = e.values.iter().map(expression).collect();
            result(Expr::Map(spanned(Map { keys, values }, e.span())))
        }
    }
}

fn binary<'a>(of: &BinOp<'a>) -> Expr<'a> {
    let (left, right) = (expression(&of.left), expression(&of.right));
    let span = of.left.span();
    let with = |left, right| Expr::BinOp(spanned(BinOp { op: of.op, left, right }, span));
    match of.op {
        BinOpKind::ScAnd | BinOpKind::ScOr => with(left, right),
        BinOpKind::Add => result(with(left, right)),
        BinOpKind::Mul => result(with(filter(FACTOR, left, Vec::new()), filter(FACTOR, right, Vec::new()))),
        BinOpKind::Concat => result(with(operand(left), operand(right))),
        BinOpKind::Sub | BinOpKind::Div | BinOpKind::FloorDiv | BinOpKind::Rem | BinOpKind::Pow => with(left, right),
        BinOpKind::Eq | BinOpKind::Ne | BinOpKind::Lt | BinOpKind::Lte | BinOpKind::Gt | BinOpKind::Gte => {
            with(operand(left), operand(right))
        }
        BinOpKind::In => with(operand(left), searched(right)),
    }
}

fn compare<'a>(of: &Compare<'a>) -> Expr<'a> {
    let span = of.expr.span();
    let is_search = |op: &CompareOpKind| matches!(op, CompareOpKind::In | CompareOpKind::NotIn);
    // A comparison with a constant takes as long as the constant is.
    let is_short = of.ops.len() == 1
        && !is_search(&of.ops[0].op)
        && [&of.expr, &of.ops[0].expr].into_iter().any(|expr| matches!(expr, Expr::Const(_)));
    let side = |expr: &Expr<'a>| if is_short { expression(expr) } else { operand(expression(expr)) };
    let right = |next: &CompareOp<'a>| match of.ops.len() {
        1 if is_search(&next.op) => searched(expression(&next.expr)),
        _ => side(&next.expr),
    };
    let ops = of.ops.iter().map(|next| CompareOp { op: next.op, expr: right(next) }).collect();
    Expr::Compare(spanned(Compare { expr: side(&of.expr), ops }, span))
}
