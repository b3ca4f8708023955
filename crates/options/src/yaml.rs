//! YAML text to a tree with spans. The only file that uses the YAML library.
//!
//! Anchors and aliases are resolved; a second document, an unknown tag, a duplicate key and a key that is not a plain
//! word are problems. The meaning of scalars is not decided here.

use crate::reader::Reader;
use crate::source::Span;
use crate::tree::{Key, Node, Tree};
use granit_parser::{Event, Parser, ScalarStyle, ScanError, Tag};
use std::borrow::Cow;
use std::collections::HashMap;

/// Maximal number of nodes with the repetitions of aliases: far more than any configuration has.
const MOST_NODES: usize = 100_000;

/// Maximal number of bytes that aliases may add to those of the text.
const MOST_REPEATED: usize = 16 << 20;

/// Maximal depth of nested values.
const DEEPEST: usize = 100;

/// Number of mistakes after which no more are looked for.
const MOST_PROBLEMS: usize = 200;

impl Reader {
    /// Parses source number `source`. `None` if the text is not YAML (the problem is recorded); an empty text is an
    /// empty map.
    pub(crate) fn parse_yaml(&mut self, source: usize) -> Option<Node> {
        let text = self.sources()[source].text.clone();
        let mut builder = Builder::new(self, source, &text);
        match builder.document() {
            Ok(node) => node,
            Err(Stop::Syntax(error)) => {
                let at = error.marker().byte_offset().unwrap_or(text.len());
                let span = Span { source, start: at, end: at + 1 };
                self.report_at(Some(span), "", format!("this is not YAML: {}", error.info()), None);
                None
            }
            Err(Stop::Reported) => None,
        }
    }
}

enum Stop {
    Syntax(ScanError),
    Reported,
}

impl From<ScanError> for Stop {
    fn from(error: ScanError) -> Self {
        Stop::Syntax(error)
    }
}

struct Builder<'r, 't> {
    reader: &'r mut Reader,
    source: usize,
    parser: Parser<'t, granit_parser::StrInput<'t>>,
    anchors: HashMap<usize, (Node, Size)>,
    /// The size of everything so far.
    size: Size,
    depth: usize,
    problems: usize,
}

/// The size of a part of a document.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    nodes: usize,
    /// Bytes of the texts that aliases repeat.
    bytes: usize,
}

impl<'r, 't> Builder<'r, 't> {
    fn new(reader: &'r mut Reader, source: usize, text: &'t str) -> Self {
        let (parser, anchors) = (Parser::new_from_str(text), HashMap::new());
        Builder { reader, source, parser, anchors, size: Size::default(), depth: 0, problems: 0 }
    }

    /// Returns the next event that carries content, with its byte range.
    fn next(&mut self) -> Result<(Event<'t>, Span), Stop> {
        loop {
            let (event, span) = match self.parser.next_event() {
                Some(next) => next?,
                None => unreachable!("the parser ends every stream with StreamEnd, and nothing is read after it"),
            };
            if matches!(event, Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd) {
                continue;
            }
            let (start, end) = (span.start.byte_offset(), span.end.byte_offset());
            let start = start.expect("a parser over a str knows byte offsets");
            return Ok((event, Span { source: self.source, start, end: end.unwrap_or(start).max(start) }));
        }
    }

    fn document(&mut self) -> Result<Option<Node>, Stop> {
        let (event, span) = self.next()?;
        if matches!(event, Event::StreamEnd) {
            return Ok(Some(Node { tree: Tree::Map(Vec::new()), span: None }));
        }
        let root = self.node(event, span)?;
        match self.next()? {
            (Event::StreamEnd, _) => Ok(Some(root)),
            (_, span) => {
                self.reader.report_at(
                    Some(span),
                    "",
                    "a second YAML document begins here, but a configuration is one document".into(),
                    Some("remove the `---` line or the text after it".into()),
                );
                Err(Stop::Reported)
            }
        }
    }

    fn node(&mut self, event: Event<'t>, span: Span) -> Result<Node, Stop> {
        let before = self.size;
        self.depth += 1;
        if self.depth > DEEPEST {
            return self.stop(span, format!("values are nested deeper than {DEEPEST} here"));
        }
        self.count(Size { nodes: 1, bytes: 0 }, span)?;
        let (tree, anchor, end) = match event {
            Event::Alias(id) => {
                self.depth -= 1;
                return self.alias(id, span);
            }
            Event::Scalar(text, style, anchor, tag) => {
                self.size.bytes += text.len();
                (self.scalar(text, style, tag, span)?, anchor, span.end)
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.refuse_tag(tag, span)?;
                let (items, end) = self.list()?;
                (Tree::List(items), anchor, end)
            }
            Event::MappingStart(_, anchor, tag) => {
                self.refuse_tag(tag, span)?;
                let (entries, end) = self.map()?;
                (Tree::Map(entries), anchor, end)
            }
            event => unreachable!("{event:?} cannot begin a node"),
        };
        self.depth -= 1;
        let node = Node { tree, span: Some(Span { end: end.max(span.end), ..span }) };
        if anchor != 0 {
            let own = Size { nodes: self.size.nodes - before.nodes, bytes: self.size.bytes - before.bytes };
            // The copy that is kept takes the same amount again.
            self.count(own, span)?;
            self.anchors.insert(anchor, (node.clone(), own));
        }
        Ok(node)
    }

    fn alias(&mut self, id: usize, span: Span) -> Result<Node, Stop> {
        let Some(size) = self.anchors.get(&id).map(|(_, size)| *size) else {
            return self.stop(span, "this alias stands inside its own anchor".into());
        };
        self.count(size, span)?;
        Ok(Node { span: Some(span), ..self.anchors[&id].0.clone() })
    }

    /// Adds to the counts before anything is copied.
    fn count(&mut self, more: Size, span: Span) -> Result<(), Stop> {
        self.size = Size { nodes: self.size.nodes + more.nodes, bytes: self.size.bytes + more.bytes };
        if self.size.nodes > MOST_NODES {
            let message = format!("the document has more than {MOST_NODES} values once its aliases are written out");
            return self.stop(span, message);
        }
        let text = self.reader.sources()[self.source].text.len();
        if self.size.bytes > text + MOST_REPEATED {
            return self.stop(span, "the document has too much text once its aliases are written out".into());
        }
        Ok(())
    }

    fn stop<T>(&mut self, span: Span, message: String) -> Result<T, Stop> {
        self.reader.report_at(Some(span), "", message, None);
        Err(Stop::Reported)
    }

    /// Records a mistake after which reading continues, unless there are very many.
    fn mistake(&mut self, span: Span, path: &str, message: String, hint: Option<String>) -> Result<(), Stop> {
        self.reader.report_at(Some(span), path, message, hint);
        self.problems += 1;
        if self.problems < MOST_PROBLEMS { Ok(()) } else { self.stop(span, "and there are more mistakes".into()) }
    }

    fn list(&mut self) -> Result<(Vec<Node>, usize), Stop> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, span) => return Ok((items, span.start)),
                (event, span) => items.push(self.node(event, span)?),
            }
        }
    }

    fn map(&mut self) -> Result<(Vec<(Key, Node)>, usize), Stop> {
        let mut entries: Vec<(Key, Node)> = Vec::new();
        let mut seen: HashMap<String, Span> = HashMap::new();
        loop {
            let (event, span) = match self.next()? {
                (Event::MappingEnd, span) => return Ok((entries, span.start)),
                next => next,
            };
            let name = self.node(event, span)?;
            let (event, value_span) = self.next()?;
            let value = self.node(event, value_span)?;
            let Tree::Scalar { text: name, .. } = name.tree else {
                self.mistake(span, "", "the name of a setting must be a plain word".into(), None)?;
                continue;
            };
            match seen.get(&name) {
                None => {
                    seen.insert(name.clone(), span);
                    entries.push((Key { name, span: Some(span) }, value));
                }
                Some(first) => {
                    let line = self.reader.locate(*first).line;
                    let message = format!("`{name}` is given twice, first on line {line}");
                    self.mistake(span, &name, message, Some("keep one of the two".into()))?;
                }
            }
        }
    }

    fn scalar(
        &mut self,
        text: Cow<'t, str>,
        style: ScalarStyle,
        tag: Option<Cow<'t, Tag>>,
        span: Span,
    ) -> Result<Tree, Stop> {
        let quoted = match tag.as_deref().and_then(Tag::core_suffix) {
            Some("str") => true,
            _ => {
                self.refuse_tag(tag, span)?;
                !matches!(style, ScalarStyle::Plain)
            }
        };
        if !quoted && matches!(&*text, "" | "~" | "null" | "Null" | "NULL") {
            return Ok(Tree::Null);
        }
        Ok(Tree::Scalar { text: text.into_owned(), quoted })
    }

    fn refuse_tag(&mut self, tag: Option<Cow<'t, Tag>>, span: Span) -> Result<(), Stop> {
        let Some(tag) = tag else { return Ok(()) };
        let message = format!("the YAML tag `{}` has no meaning here", tag.original());
        self.mistake(span, "", message, Some("remove the tag".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the problems of a text, whose last says why parsing stopped.
    fn reported(text: &str) -> Vec<String> {
        let mut reader = Reader::new(&[]);
        let node = reader.read_yaml("run.yaml", text);
        assert_eq!(node.is_none(), !reader.problems().is_empty());
        reader.problems().iter().map(|problem| problem.message.clone()).collect()
    }

    #[test]
    fn what_aliases_repeat_is_bounded_before_it_is_copied() {
        let laughs = |i: usize| format!("a{i}: &a{i} [{}]\n", vec![format!("*a{}", i.max(1) - 1); 10].join(", "));
        let bomb: String = "a0: &a0 ha\n".to_owned() + &(1..12).map(laughs).collect::<String>();
        assert!(reported(&bomb)[0].contains("more than 100000 values once its aliases"), "{:?}", reported(&bomb));
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), vec!["*a"; 9000].join(", "));
        assert!(reported(&long)[0].contains("too much text once its aliases"), "{:?}", reported(&long));
        // Anchors inside of anchors are copied as often as they are deep.
        let nested = "&a [".repeat(90) + &"x, ".repeat(20_000) + &"]".repeat(90);
        assert!(reported(&nested)[0].contains("more than 100000 values"), "{:?}", reported(&nested));
        assert!(reported("base: &base {x: 1}\nfirst: *base\nsecond: *base\n").is_empty());
    }

    #[test]
    fn depth_and_problems_are_bounded() {
        for (open, close) in [("[", "]"), ("{a: ", "}")] {
            let deep = open.repeat(50_000) + &close.repeat(50_000);
            // The parser has a limit of its own for nested brackets.
            let why = reported(&deep).remove(0);
            assert!(why.contains("nested deeper than 100") || why.contains("recursion limit"), "{why}");
        }
        assert!(reported(&("[".repeat(99) + &"]".repeat(99))).is_empty());
        let block: String = (0..300).map(|depth| " ".repeat(depth) + "a:\n").collect();
        assert!(reported(&block)[0].contains("nested deeper than 100"));
        let twice = "a: 1\n".repeat(40_000);
        assert_eq!(reported(&twice).len(), MOST_PROBLEMS + 1);
    }
}
