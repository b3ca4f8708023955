//! YAML text to a tree with spans. The only file that knows the YAML library.
//!
//! Anchors and aliases are resolved; a second document, an unknown tag, a duplicate key and a key that is not a plain
//! word are problems. What a scalar means is not decided here.

use crate::reader::Reader;
use crate::source::Span;
use crate::tree::{Key, Node, Tree};
use granit_parser::{Event, Parser, ScalarStyle, ScanError, Tag};
use std::borrow::Cow;
use std::collections::HashMap;

/// Aliases may repeat a part of a document; this many nodes in all is far more than any configuration has.
const MOST_NODES: usize = 100_000;

impl Reader {
    /// Parses source number `source`. None if the text is not YAML (the problem is recorded); an empty text is an empty
    /// map.
    pub(crate) fn parse_yaml(&mut self, source: usize) -> Option<Node> {
        let text = self.sources()[source].text.clone();
        let mut builder =
            Builder { reader: self, source, parser: Parser::new_from_str(&text), anchors: HashMap::new(), nodes: 0 };
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
    anchors: HashMap<usize, (Node, usize)>,
    nodes: usize,
}

impl<'t> Builder<'_, 't> {
    /// The next event that carries content, with its byte range.
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
        let before = self.nodes;
        self.count(1, span)?;
        let (tree, anchor, end) = match event {
            Event::Alias(id) => return self.alias(id, span),
            Event::Scalar(text, style, anchor, tag) => (self.scalar(text, style, tag, span), anchor, span.end),
            Event::SequenceStart(_, anchor, tag) => {
                self.refuse_tag(tag, span);
                let (items, end) = self.list()?;
                (Tree::List(items), anchor, end)
            }
            Event::MappingStart(_, anchor, tag) => {
                self.refuse_tag(tag, span);
                let (entries, end) = self.map()?;
                (Tree::Map(entries), anchor, end)
            }
            event => unreachable!("{event:?} cannot begin a node"),
        };
        let node = Node { tree, span: Some(Span { end: end.max(span.end), ..span }) };
        if anchor != 0 {
            self.anchors.insert(anchor, (node.clone(), self.nodes - before));
        }
        Ok(node)
    }

    fn alias(&mut self, id: usize, span: Span) -> Result<Node, Stop> {
        let Some((node, size)) = self.anchors.get(&id).cloned() else {
            self.reader.report_at(Some(span), "", "this alias stands inside its own anchor".into(), None);
            return Err(Stop::Reported);
        };
        self.count(size, span)?;
        Ok(Node { span: Some(span), ..node })
    }

    fn count(&mut self, more: usize, span: Span) -> Result<(), Stop> {
        self.nodes += more;
        if self.nodes > MOST_NODES {
            let message = format!("the document has more than {MOST_NODES} values once its aliases are written out");
            self.reader.report_at(Some(span), "", message, None);
            return Err(Stop::Reported);
        }
        Ok(())
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
        loop {
            let (event, span) = match self.next()? {
                (Event::MappingEnd, span) => return Ok((entries, span.start)),
                next => next,
            };
            let name = self.node(event, span)?;
            let (event, value_span) = self.next()?;
            let value = self.node(event, value_span)?;
            let Tree::Scalar { text: name, .. } = name.tree else {
                self.reader.report_at(Some(span), "", "the name of a setting must be a plain word".into(), None);
                continue;
            };
            match entries.iter().find(|(key, _)| key.name == name) {
                None => entries.push((Key { name, span: Some(span) }, value)),
                Some((first, _)) => {
                    let line = first.span.map(|first| self.reader.locate(first).line);
                    let first = line.map_or(String::new(), |line| format!(", first on line {line}"));
                    let message = format!("`{name}` is given twice{first}");
                    self.reader.report_at(Some(span), &name, message, Some("keep one of the two".into()));
                }
            }
        }
    }

    fn scalar(&mut self, text: Cow<'t, str>, style: ScalarStyle, tag: Option<Cow<'t, Tag>>, span: Span) -> Tree {
        let quoted = match tag.as_deref().and_then(Tag::core_suffix) {
            Some("str") => true,
            _ => {
                self.refuse_tag(tag, span);
                !matches!(style, ScalarStyle::Plain)
            }
        };
        if !quoted && matches!(&*text, "" | "~" | "null" | "Null" | "NULL") {
            return Tree::Null;
        }
        Tree::Scalar { text: text.into_owned(), quoted }
    }

    fn refuse_tag(&mut self, tag: Option<Cow<'t, Tag>>, span: Span) {
        if let Some(tag) = tag {
            let message = format!("the YAML tag `{}` has no meaning here", tag.original());
            self.reader.report_at(Some(span), "", message, Some("remove the tag".into()));
        }
    }
}
