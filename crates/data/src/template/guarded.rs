//! Filters, tests, functions and methods of templates, each within what a rendering may take: what goes in is looked
//! through, what would come out too large is rejected before it is made, what comes out is bounded.
//!
//! Knows how much each can make of its arguments, not what it is for.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters, functions, tests};

use super::allowance::{Size, bounded, charge, check_length, count, measure, refused};

/// Numbers above this are no widths and no sizes of groups.
const MOST: usize = 10_000;

/// Puts the guarded ones in the place of the engine's own.
pub(super) fn install(environment: &mut Environment<'static>) {
    for (name, own) in all_filters() {
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            before_filter(name, &args)?;
            bounded(own.call(state, &args)?)
        });
    }
    for (name, own) in all_tests() {
        environment.add_test(name, move |state: &mut State, args: Rest<ValueOrKwargs>| -> Result<bool, Error> {
            let args = args.into_values();
            args.iter().try_for_each(|value| measure(value).map(drop))?;
            Ok(own.call(state, &args)?.is_true())
        });
    }
    for (name, own) in
        [("dict", Value::from_function(functions::dict)), ("namespace", Value::from_function(functions::namespace))]
    {
        environment.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            bounded(own.call(state, &args.into_values())?)
        });
    }
    environment.remove_global("debug");
    environment.set_unknown_method_callback(|state, value, method, args| {
        before_method(value, method, args)?;
        bounded(minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)?)
    });
}

fn all_filters() -> Vec<(&'static str, Value)> {
    macro_rules! table {
        ($($name:literal: $function:ident),* $(,)?) => { vec![$(($name, Value::from_function(filters::$function))),*] };
    }
    table! {
        "safe": safe, "escape": escape, "e": escape, "lower": lower, "upper": upper, "title": title,
        "capitalize": capitalize, "replace": replace, "dictsort": dictsort, "items": items, "reverse": reverse,
        "trim": trim, "join": join, "split": split, "lines": lines, "default": default, "d": default, "round": round,
        "abs": abs, "int": int, "float": float, "attr": attr, "first": first, "last": last, "min": min, "max": max,
        "sort": sort, "list": list, "bool": bool, "batch": batch, "slice": slice, "sum": sum, "indent": indent,
        "select": select, "reject": reject, "selectattr": selectattr, "rejectattr": rejectattr, "map": map,
        "groupby": groupby, "unique": unique, "chain": chain, "zip": zip, "pprint": pprint, "format": format,
    }
}

fn all_tests() -> Vec<(&'static str, Value)> {
    macro_rules! table {
        ($($($name:literal),+ : $function:ident);* $(;)?) => {
            vec![$($(($name, Value::from_function(tests::$function))),+),*]
        };
    }
    table! {
        "eq", "equalto", "==": is_eq; "ne", "!=": is_ne; "lt", "lessthan", "<": is_lt; "le", "<=": is_le;
        "gt", "greaterthan", ">": is_gt; "ge", ">=": is_ge; "in": is_in; "startingwith": is_startingwith;
        "endingwith": is_endingwith; "lower": is_lower; "upper": is_upper; "sameas": is_sameas;
        "divisibleby": is_divisibleby;
    }
}

/// Charges for a value that is read without a look inside: the number of its elements, or its text.
fn touch(value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => charge(text.len()),
        None => charge(16 * count(value)),
    }
}

fn before_filter(name: &str, args: &[Value]) -> Result<(), Error> {
    const SHALLOW: [&str; 19] = [
        "default",
        "d",
        "first",
        "last",
        "list",
        "map",
        "select",
        "selectattr",
        "reject",
        "rejectattr",
        "items",
        "reverse",
        "attr",
        "bool",
        "chain",
        "zip",
        "batch",
        "slice",
        "int",
    ];
    let numbers = || args.iter().skip(1).flat_map(numbers_of).max().unwrap_or(0);
    if matches!(name, "batch" | "slice") && numbers() > 100 * MOST {
        return Err(refused(format!("`{name}` takes groups of up to {}", 100 * MOST)));
    }
    if SHALLOW.contains(&name) {
        // A text becomes a list of its characters.
        return args.iter().try_for_each(|value| match value.as_str() {
            Some(text) if !matches!(name, "default" | "d" | "bool" | "int") => charge(32 * text.len()),
            _ => touch(value),
        });
    }
    let size = measure_all(args)?;
    let text = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
    match name {
        "join" => check_join(size, args.first(), text(1)),
        "replace" => check_replace(text(0), text(1), text(2)),
        "split" => check_split(text(0), args.get(1)),
        "lines" => charge(64 * text(0).matches('\n').count()),
        "indent" => {
            let width = numbers().max(text(1).len());
            check_length(text(0).len().saturating_add((text(0).matches('\n').count() + 1).saturating_mul(width)))
        }
        "format" => check_format(text(0), '%', &args[1..]),
        "pprint" => check_length(size.bytes.saturating_add(size.nodes.saturating_mul(800))),
        "sort" | "unique" | "groupby" | "dictsort" | "min" | "max" => charge(20 * (size.bytes / 8 + 16 * size.nodes)),
        _ => check_length(3 * size.written()),
    }
}

fn before_method(value: &Value, method: &str, args: &[Value]) -> Result<(), Error> {
    let size = measure_all(args)?;
    let text = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
    match (value.as_str(), method) {
        (Some(own), "join") => check_join(size, args.first(), own),
        (Some(own), "replace") => check_replace(own, text(0), text(1)),
        (Some(own), "split") => check_split(own, args.first()),
        (Some(own), "splitlines") => charge(64 * own.matches('\n').count()),
        (Some(own), "format") => check_format(own, '{', args),
        (Some(own), _) => charge(own.len()),
        (None, "get" | "items" | "keys" | "values") => touch(value),
        (None, _) => measure(value).map(drop),
    }
}

fn measure_all(args: &[Value]) -> Result<Size, Error> {
    args.iter().try_fold(Size::default(), |all, value| {
        let of = measure(value)?;
        Ok(Size { bytes: all.bytes + of.bytes, nodes: all.nodes + of.nodes })
    })
}

/// The whole numbers among arguments, those given by name too.
fn numbers_of(value: &Value) -> Vec<usize> {
    let named = || value.try_iter().into_iter().flatten().filter_map(|key| value.get_item(&key).ok());
    let number = |value: &Value| {
        let is_number = value.kind() == ValueKind::Number;
        is_number.then(|| f64::try_from(value.clone()).map_or(usize::MAX, |x| x.abs() as usize))
    };
    match value.kind() {
        ValueKind::Map => named().filter_map(|value| number(&value)).collect(),
        _ => number(value).into_iter().collect(),
    }
}

fn check_join(size: Size, items: Option<&Value>, between: &str) -> Result<(), Error> {
    let items = items.map_or(0, |items| items.as_str().map_or_else(|| count(items), str::len));
    check_length(size.written().saturating_add(items.saturating_mul(between.len())))
}

fn check_replace(text: &str, old: &str, new: &str) -> Result<(), Error> {
    charge(text.len())?;
    let times = if old.is_empty() { text.len() + 1 } else { text.matches(old).count() };
    check_length(text.len().saturating_add(times.saturating_mul(new.len())))
}

fn check_split(text: &str, by: Option<&Value>) -> Result<(), Error> {
    let parts = match by.and_then(Value::as_str) {
        Some("") => text.len(),
        Some(by) => text.matches(by).count(),
        None => text.split_whitespace().count(),
    };
    charge(text.len().saturating_add(64 * parts))
}

/// Widths in a format, and those that arguments give.
fn check_format(format: &str, sign: char, args: &[Value]) -> Result<(), Error> {
    let too_wide = || refused(format!("a width in a format is larger than {MOST}"));
    let mut given = false;
    for part in format.split(sign).skip(1) {
        let end = if sign == '{' {
            part.find('}').unwrap_or(part.len())
        } else {
            part.find(char::is_alphabetic).unwrap_or(part.len())
        };
        let spec = &part[..end];
        given |= spec.contains('*') || spec.is_empty() || spec.ends_with(':');
        let widths = spec.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
        for width in widths {
            width.parse::<usize>().ok().filter(|width| *width <= MOST).ok_or_else(too_wide)?;
        }
    }
    let is_nested = sign == '{' && format.split('{').any(|part| part.contains(':') && !part.contains('}'));
    let is_wide = args.iter().flat_map(numbers_of).any(|number| number > MOST);
    let stars = sign == '%' && format.contains('*');
    if given && is_wide && (is_nested || stars) { Err(too_wide()) } else { Ok(()) }
}
