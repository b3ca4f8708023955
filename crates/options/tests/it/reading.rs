//! Trees, tables and problems on a small table of its own.

use options::{
    ByteSize, Fault, Node, OptionValue, Problem, Reader, Section, Setting, Table, Tree, choices, object_schema,
    options, read_table, section_page,
};
use std::collections::BTreeMap;

choices! {
    /// A colour.
    pub enum Colour {
        /// Red, the color of blood.
        Red = "red" | "rouge",
        /// Green, the color of grass.
        Green = "green",
    }
}

options! {
    /// A brush.
    pub struct Brush: "Brush" {
        /// Hairs.
        hairs: u32 = 100, min = 1, max = 500;
        /// The color of its paint.
        colour: Setting<Colour> = auto, pending_words = &["green"];
    }
}

options! {
    /// A box of paint.
    pub struct Paint: "Paint" {
        /// Strokes in a second.
        speed: f64 = 1.5, above = 0, below = 10;
        /// The brushes.
        brushes: Vec<Brush> = [];
        /// Shares by colour.
        shares: BTreeMap<String, f64> = {};
        /// Room for it.
        room: Option<ByteSize> = null;
        /// The name of the painter.
        r#type: String = required;
        /// A thing of tomorrow.
        robot: bool = false, pending;
        /// Never more than this.
        arms: u32 = 1, pending_over = 2;
        /// Counts down.
        countdown: i64 = -1, min = -1;
    }
}

fn read(text: &str) -> (Option<Paint>, Vec<Problem>) {
    let mut reader = Reader::new(&[]);
    let node = reader.read_yaml("p.yaml", text);
    let paint = node.and_then(|node| read_table::<Paint>(&node, &mut reader).ok());
    (paint, reader.finish().1)
}

fn good(text: &str) -> Paint {
    let (paint, problems) = read(text);
    assert!(problems.is_empty(), "{}", options::render_problems(&problems));
    paint.unwrap()
}

/// `line:column path message`
fn reported(text: &str) -> Vec<String> {
    let problems = read(text).1.into_iter();
    problems
        .map(|problem| {
            let at = problem.place.location.map_or("-".into(), |at| format!("{}:{}", at.line, at.column));
            format!("{at} {}", problem.message)
        })
        .collect()
}

#[test]
fn defaults_are_read_from_the_rows() {
    let paint = good("type: anna\n");
    assert_eq!((paint.speed, paint.countdown, paint.room, paint.robot), (1.5, -1, None, false));
    assert_eq!(paint.r#type, "anna");
    assert!(paint.brushes.is_empty() && paint.shares.is_empty());
}

#[test]
fn flow_and_block_style_say_the_same() {
    let block = good("type: a\nbrushes:\n  - hairs: 7\n    colour: rouge\nshares:\n  red: .5\nroom: 2KiB\n");
    let flow =
        good(r#"{"type": "a", "brushes": [{"hairs": 7, "colour": "red"}], "shares": {"red": 5e-1}, "room": 2048}"#);
    assert_eq!(block, flow);
    assert_eq!(block.brushes[0].colour, Setting::Value(Colour::Red));
}

#[test]
fn windows_line_ends_and_letters_of_two_bytes_do_not_move_places() {
    assert_eq!(
        reported("type: ä\r\nbrushes: [{hairs: ü}]\r\n"),
        ["2:19 `brushes[0].hairs` is `ü`, expected a whole number from 1 to 500"]
    );
}

#[test]
fn the_byte_range_is_that_of_the_value() {
    let text = "type: a\nspeed: \"fast\"  # now\n";
    let problems = read(text).1;
    let at = problems[0].place.location.as_ref().unwrap();
    assert_eq!(&text[at.bytes.clone()], "\"fast\"");
    let json = problems[0].to_json();
    assert_eq!(
        (json["line"].as_u64(), json["column"].as_u64(), json["path"].as_str()),
        (Some(2), Some(8), Some("speed"))
    );
}

#[test]
fn bounds_hold_at_their_ends() {
    good("type: a\nbrushes: [{hairs: 1}, {hairs: 500}]\ncountdown: -1\n");
    assert_eq!(reported("type: a\nbrushes: [{hairs: 501}]\n").len(), 1);
    assert_eq!(reported("type: a\nspeed: 0\n"), ["2:8 `speed` is `0`, expected a number above 0 and below 10"]);
    assert_eq!(reported("type: a\nspeed: 10\n").len(), 1);
    assert_eq!(reported("type: a\nspeed: .inf\n").len(), 1);
    assert_eq!(reported("type: a\nspeed: nan\n").len(), 1);
    assert_eq!(reported("type: a\ncountdown: -2\n").len(), 1);
    assert_eq!(reported("type: a\narms: 99999999999999999999\n").len(), 1);
}

#[test]
fn what_is_not_built_is_distinguished_from_what_is_wrong() {
    let (paint, problems) = read("type: a\nrobot: true\narms: 3\nbrushes: [{colour: green}, {colour: blue}]\n");
    assert!(paint.is_some());
    let reported: Vec<_> = problems.iter().map(|problem| (problem.availability, problem.message.as_str())).collect();
    use options::Availability::{Mistake, NotYet};
    assert_eq!(
        reported,
        [
            (NotYet, "`brushes[0].colour: green` is not available yet"),
            (Mistake, "`brushes[1].colour` is `blue`, expected `red` or `green`, or `auto`"),
            (NotYet, "`robot: true` is not available yet"),
            (NotYet, "`arms: 3` is not available yet"),
        ]
    );
    assert_eq!(problems[0].hint.as_deref(), Some("available: `red`"));
}

#[test]
fn keys_are_checked_at_every_depth() {
    assert_eq!(
        reported("type: a\nbrushes:\n- hairs: 1\n  hairs: 2\n  hars: 3\n? [x]\n: 4\n"),
        [
            "4:3 `hairs` is given twice, first on line 3",
            "6:3 the name of a setting must be a plain word",
            "5:3 there is no option `brushes[0].hars`",
        ]
    );
}

#[test]
fn broken_texts_end_in_one_problem() {
    for text in ["a: [", "a: b: c", "a:\n\tb: 1", "a: *unknown", "&a [*a]", "a: 1\n--- \nb: 2\n", "- ]", "\"\\q\": 1"] {
        let reported = reported(text);
        assert_eq!(reported.len(), 1, "{text:?}: {reported:?}");
        assert!(!reported[0].starts_with('-'), "{text:?} has a place: {reported:?}");
    }
}

#[test]
fn aliases_cannot_blow_up() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let before = format!("*a{}", level - 1);
        text.push_str(&format!("a{level}: &a{level} [{}]\n", [before.as_str(); 10].join(", ")));
    }
    assert!(reported(&text)[0].contains("more than 100000 values"));
}

#[test]
fn an_alias_is_read_as_its_anchor_but_reported_at_its_own_place() {
    let paint = good("type: a\nbrushes:\n- &big {hairs: 400}\n- *big\n");
    assert_eq!(paint.brushes[0], paint.brushes[1]);
}

#[test]
fn values_written_back_are_read_as_the_same() {
    let paint = good("type: 'null'\nbrushes: [{colour: rouge}, {hairs: 2}]\nshares: {x: 1e-9}\nroom: 3GB\n");
    let mut reader = Reader::new(&[]);
    let again = read_table::<Paint>(&Node::from_json(&paint.write()), &mut reader).unwrap();
    assert_eq!(again, paint);
    assert!(reader.problems().is_empty());
}

#[test]
fn trees_without_a_text_have_no_places() {
    let node = Node::from_json(&serde_json::json!({ "type": 7, "speed": true }));
    assert!(matches!(node.tree, Tree::Map(_)));
    let mut reader = Reader::new(&[]);
    let paint = read_table::<Paint>(&node, &mut reader).unwrap();
    assert_eq!(paint.r#type, "7");
    assert_eq!(reader.problems()[0].to_string(), "`speed` is `true`, expected a number above 0 and below 10");
    assert!(matches!(
        read_table::<Paint>(&Node::from_json(&serde_json::json!([])), &mut reader),
        Err(Fault::Mismatch { .. })
    ));
}

#[test]
fn the_description_follows_from_the_rows() {
    let section = Section::of::<Paint>();
    let schema = object_schema(&[section]);
    assert_eq!(schema["required"], serde_json::json!(["type"]));
    assert_eq!(schema["properties"]["speed"]["exclusiveMaximum"], 10);
    assert_eq!(schema["properties"]["brushes"]["items"]["properties"]["hairs"]["maximum"], 500);
    assert_eq!(schema["properties"]["countdown"]["default"], -1);
    let page = section_page(&section);
    assert!(
        page.contains("| `speed` | float | `1.5` | Strokes in a second. Allowed: above 0 and below 10. |"),
        "{page}"
    );
    assert!(
        page.contains(
            "`red` (also `rouge`): Red, the color of blood; `green`: Green, the color of grass, *not available yet*."
        ),
        "{page}"
    );
    assert_eq!(Paint::ROWS.len(), 8);
}
