//! Compiles a template: checked for size and nesting, and compiled on its own stack, because the engine recurses on
//! nesting.
//!
//! Knows the engine's parts, not what a template is for.

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;

use minijinja::machinery::{CodeGenerator, Instructions, Token, eval, make_string_output, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, Value};

use super::allowance::refused;
use super::operators;
use crate::guard::guarded;

/// Bytes of a template; the largest known have 40 thousand.
const MOST_SOURCE: usize = 1 << 19;

/// Words and signs inside of one pair of delimiters.
const MOST_TOKENS: usize = 4096;

/// Branches of conditions: each is inside of the one before it.
const MOST_BRANCHES: usize = 4096;

/// Bytes of stack for the deepest text that passes.
const STACK: usize = 256 << 20;

/// The name of the template in messages.
const NAME: &str = "chat";

/// A compiled template with its blocks.
pub(super) struct Compiled {
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl Compiled {
    /// Errors: the text is no Jinja, or larger or deeper than any template is.
    pub(super) fn new(source: &str, syntax: &SyntaxConfig) -> Result<Self, Error> {
        if source.len() > MOST_SOURCE {
            return Err(refused(format!("{} bytes are more than the {MOST_SOURCE} that are read", source.len())));
        }
        check_nesting(source, syntax)?;
        let source = kept(source);
        let compile = || guarded(|| compile(source, syntax)).unwrap_or_else(|panic| Err(refused(panic)));
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("template".into()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, compile).map_err(|e| refused(format!("no thread: {e}")))?;
            thread.join().unwrap_or_else(|_| Err(refused("it cannot be compiled")))
        })
    }

    /// The text that the template makes of some variables.
    pub(super) fn render(&self, environment: &Environment<'static>, variables: Value) -> Result<String, Error> {
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        eval(environment, &self.instructions, variables, &self.blocks, &mut output, AutoEscape::None)?;
        Ok(text)
    }
}

/// The engine borrows the text for as long as it is used; a process sees few different ones.
fn kept(source: &str) -> &'static str {
    static KEPT: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);
    let mut kept = KEPT.lock().expect("no holder of the lock panics");
    let kept = kept.get_or_insert_default();
    match kept.get(source) {
        Some(known) => known,
        None => {
            let own: &'static str = Box::leak(source.into());
            kept.insert(own);
            own
        }
    }
}

fn check_nesting(source: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    let (mut tokens, mut branches) = (0, 0);
    for token in tokenize(source, false, syntax.clone()) {
        // What is wrong with it is reported by the parser, with its place.
        let Ok((token, span)) = token else { return Ok(()) };
        match token {
            Token::TemplateData(_) | Token::BlockStart | Token::VariableStart => tokens = 0,
            Token::Ident("elif") => branches += 1,
            _ => {}
        }
        tokens += 1;
        if tokens > MOST_TOKENS || branches > MOST_BRANCHES {
            return Err(refused(format!("line {}: nested deeper than any template is", span.start_line)));
        }
    }
    Ok(())
}

fn compile(source: &'static str, syntax: &SyntaxConfig) -> Result<Compiled, Error> {
    let tree = parse(source, NAME, syntax.clone())?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&operators::statement(&tree));
    let (instructions, blocks) = generator.finish();
    Ok(Compiled { instructions, blocks })
}
