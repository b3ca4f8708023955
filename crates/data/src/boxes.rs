//! Objects in images: the words of a conversation that stand for names and boxes, and boxes as a model writes them.
//!
//! A row has them in the column [`OBJECTS`], as ms-swift does: `ref` lists names, `bbox` boxes or points in pixels of the
//! images, `bbox_type: norm1` says that these are parts of 1, `image_id` the image of each.

use serde_json::{Map, Value, json};

use crate::error::{RowError, RowReason};
use crate::spans::Message;

/// The column of the objects of a row.
pub(crate) const OBJECTS: &str = "objects";

/// The words that stand for a name and for a box.
const NAME: &str = "<ref-object>";
const BOX: &str = "<bbox>";

/// The units of a box's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Units {
    /// Thousandths of the sides of the image.
    #[default]
    Thousandths,
    /// Pixels of the image as the model reads it.
    Pixels,
}

/// The writing of boxes for a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BoxForm {
    pub units: Units,
    /// True if tokens mark names and boxes (Qwen2-VL); else a box is a list of numbers.
    pub marked: bool,
}

/// Signs of an object's name that are kept with its box.
const MOST_OF_NAME: usize = 64;

/// An object in an image, as it is shown to people.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageObject {
    /// Its name where the row has one for it; else empty.
    pub name: String,
    /// x1, y1, x2, y2 in parts of the sides of the image; a point has both corners in one place.
    pub corners: [f32; 4],
}

/// Height and width of an image, and of its only view; none for an image of several views.
pub(crate) struct Sizes {
    pub image: [usize; 2],
    pub view: Option<[usize; 2]>,
}

/// Returns true if a text has a word that stands for an object.
pub(crate) fn has_words(text: &str) -> bool {
    text.contains(NAME) || text.contains(BOX)
}

/// Puts the names and boxes of a row's objects in the place of their words, in their order. Contents without such words
/// stay as they are. Returns the objects of each image. Errors: another number of words than of objects, and boxes that are
/// none.
pub(crate) fn fill(
    messages: &mut [Message],
    objects: &Map<String, Value>,
    form: BoxForm,
    sizes: &[Sizes],
) -> Result<Vec<Vec<ImageObject>>, RowError> {
    let names = names(objects)?;
    let boxes = boxes(objects, form, sizes)?;
    let mut of_images = vec![Vec::new(); sizes.len()];
    for (number, of) in boxes.iter().enumerate() {
        // One name stands for all boxes.
        let own =
            if names.len() == boxes.len() { names.get(number) } else { names.first().filter(|_| names.len() == 1) };
        let name = own.map_or(String::new(), |name| name.chars().take(MOST_OF_NAME).collect());
        of_images[of.image].push(ImageObject { name, corners: of.corners });
    }
    let written = |name: &&str| match form.marked {
        true => format!("<|object_ref_start|>{name}<|object_ref_end|>"),
        false => (*name).to_owned(),
    };
    let mut names = Words::new(NAME, names.iter().map(written).collect());
    let mut boxes = Words::new(BOX, boxes.into_iter().map(|of| of.text).collect());
    for message in messages {
        let Some(Value::String(text)) = message.fields.get("content").filter(|of| of.as_str().is_some_and(has_words))
        else {
            continue;
        };
        let (mut filled, mut rest) = (String::with_capacity(text.len()), text.as_str());
        while let Some((at, words)) = first_of(rest, &mut names, &mut boxes) {
            filled.push_str(&rest[..at]);
            filled.push_str(&words.next()?);
            rest = &rest[at + words.word.len()..];
        }
        filled.push_str(rest);
        message.fields.insert("content".to_owned(), json!(filled));
    }
    names.finish()?;
    boxes.finish()?;
    Ok(of_images)
}

/// The texts for one word, and how many are used.
struct Words {
    word: &'static str,
    texts: Vec<String>,
    used: usize,
}

impl Words {
    fn new(word: &'static str, texts: Vec<String>) -> Words {
        Words { word, texts, used: 0 }
    }

    fn next(&mut self) -> Result<String, RowError> {
        self.used += 1;
        let text = self.texts.get(self.used - 1).cloned();
        text.ok_or_else(|| {
            problem(format!("word {} `{}` has no object, of {}", self.used, self.word, self.texts.len()))
        })
    }

    /// An error where texts are left.
    fn finish(self) -> Result<(), RowError> {
        match self.texts.len() == self.used {
            true => Ok(()),
            false => Err(problem(format!(
                "{} objects for the word `{}`, which stands {} times in the messages",
                self.texts.len(),
                self.word,
                self.used
            ))),
        }
    }
}

/// The first word in a text: its place, and the texts for it.
fn first_of<'w>(text: &str, names: &'w mut Words, boxes: &'w mut Words) -> Option<(usize, &'w mut Words)> {
    match (text.find(NAME), text.find(BOX)) {
        (Some(name), Some(of_box)) if name < of_box => Some((name, names)),
        (_, Some(of_box)) => Some((of_box, boxes)),
        (Some(name), None) => Some((name, names)),
        (None, None) => None,
    }
}

fn problem(problem: String) -> RowError {
    RowError::new(RowReason::WrongType, format!("column `{OBJECTS}`: {problem}"))
}

fn list<'o>(objects: &'o Map<String, Value>, name: &str) -> Result<&'o [Value], RowError> {
    match objects.get(name) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(list)) => Ok(list),
        Some(other) => Err(problem(format!("`{name}` is {other}, expected a list"))),
    }
}

/// The names of the objects.
fn names(objects: &Map<String, Value>) -> Result<Vec<&str>, RowError> {
    let of_all = list(objects, "ref")?.iter();
    of_all.map(|value| value.as_str().ok_or_else(|| problem(format!("the name {value} is no text")))).collect()
}

/// A box as a model writes it, with its place.
struct Written {
    text: String,
    image: usize,
    corners: [f32; 4],
}

/// The boxes of the objects.
fn boxes(objects: &Map<String, Value>, form: BoxForm, sizes: &[Sizes]) -> Result<Vec<Written>, RowError> {
    let of_one = match objects.get("bbox_type") {
        None | Some(Value::Null) => false,
        Some(Value::String(kind)) if kind == "real" => false,
        Some(Value::String(kind)) if kind == "norm1" => true,
        Some(other) => return Err(problem(format!("`bbox_type` is {other}, expected \"real\" or \"norm1\""))),
    };
    let images = match objects.get("image_id") {
        Some(Value::Number(one)) => vec![Value::Number(one.clone())],
        _ => list(objects, "image_id")?.to_vec(),
    };
    let all = list(objects, "bbox")?;
    if images.len() > 1 && images.len() != all.len() {
        return Err(problem(format!("`image_id` has {} numbers for {} boxes", images.len(), all.len())));
    }
    let write = |(number, value): (usize, &Value)| {
        let wrong = |what: String| problem(format!("box {} {what}", number + 1));
        let image = match images.get(number).or(images.first()) {
            None => 0,
            Some(id) => id.as_u64().ok_or_else(|| wrong(format!("is of the image {id}, expected a number from 0")))?,
        };
        let count = sizes.len();
        let found = usize::try_from(image).ok().and_then(|image| Some((image, sizes.get(image)?)));
        let (image, sizes) =
            found.ok_or_else(|| wrong(format!("is of image {image}, counted from 0, but there are {count}")))?;
        let numbers: Option<Vec<f64>> = value.as_array().and_then(|of| of.iter().map(Value::as_f64).collect());
        let numbers = numbers.filter(|of| [2, 4].contains(&of.len()));
        let numbers = numbers.ok_or_else(|| wrong(format!("is {value}, expected [x, y] or [x1, y1, x2, y2]")))?;
        let text = text(&scaled(&numbers, of_one, form.units, sizes).map_err(wrong)?, form.marked);
        let part = |at: usize| {
            let side = if of_one { 1.0 } else { sizes.image[1 - at % 2] as f64 };
            (numbers[at % numbers.len()] / side).clamp(0.0, 1.0) as f32
        };
        Ok(Written { text, image, corners: [part(0), part(1), part(2), part(3)] })
    };
    all.iter().enumerate().map(write).collect()
}

/// The numbers of a box or a point in the units of a model. An error for what is no box, or lies outside of its image; what
/// protrudes is cut off.
fn scaled(numbers: &[f64], of_one: bool, units: Units, sizes: &Sizes) -> Result<Vec<i64>, String> {
    let sides = [sizes.image[1] as f64, sizes.image[0] as f64];
    let at = |number: usize| numbers[number] * if of_one { sides[number % 2] } else { 1.0 };
    let pixels: Vec<f64> = (0..numbers.len()).map(at).collect();
    let (first, last) = (&pixels[..2], &pixels[pixels.len() - 2..]);
    for (axis, side) in sides.iter().enumerate() {
        if !(first[axis] <= last[axis] && first[axis] <= *side && last[axis] >= 0.0) {
            let [width, height] = sides;
            return Err(format!("{numbers:?} is no box in an image of {width} × {height} pixels (x1, y1, x2, y2)"));
        }
    }
    let view = || {
        let [height, width] =
            sizes.view.ok_or("needs `norm_bbox: norm1000`: the model reads its image in several views")?;
        Ok([width, height])
    };
    let limits: [f64; 2] = match units {
        Units::Thousandths => [1000.0; 2],
        Units::Pixels => view().map_err(str::to_owned)?.map(|side| side as f64),
    };
    let scale = |(number, pixel): (usize, &f64)| {
        let (side, limit) = (sides[number % 2], limits[number % 2]);
        match units {
            Units::Thousandths => (pixel / side * limit).round_ties_even().clamp(0.0, limit) as i64,
            Units::Pixels => (pixel * (limit / side)).round_ties_even().clamp(0.0, limit - 1.0) as i64,
        }
    };
    Ok(pixels.iter().enumerate().map(scale).collect())
}

fn text(numbers: &[i64], marked: bool) -> String {
    if !marked {
        return format!("{numbers:?}");
    }
    let points: Vec<String> = numbers.chunks(2).map(|point| format!("({},{})", point[0], point[1])).collect();
    format!("<|box_start|>{}<|box_end|>", points.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [Sizes; 2] =
        [Sizes { image: [1200, 1600], view: Some([1204, 1596]) }, Sizes { image: [100, 200], view: None }];

    fn filled(content: &str, objects: &Value, form: BoxForm) -> Result<String, String> {
        let mut messages = [Message::new("assistant", content)];
        let objects = objects.as_object().expect("an object");
        fill(&mut messages, objects, form, &SIZES).map_err(|error| error.detail)?;
        Ok(messages[0].fields["content"].as_str().expect("a text").to_owned())
    }

    #[test]
    fn names_and_boxes_take_the_places_of_their_words() {
        let objects = json!({"ref": ["a cat"], "bbox": [[1073, 27, 1288, 970], [50, 25]], "image_id": [0, 1]});
        let content = "<ref-object> at <bbox> and <bbox>.";
        let form = |units, marked| BoxForm { units, marked };
        let thousandths = filled(content, &objects, form(Units::Thousandths, false)).unwrap();
        assert_eq!(thousandths, "a cat at [671, 22, 805, 808] and [250, 250].");
        let marked = filled(content, &objects, form(Units::Thousandths, true)).unwrap();
        let name = "<|object_ref_start|>a cat<|object_ref_end|>";
        let boxes = "<|box_start|>(671,22),(805,808)<|box_end|> and <|box_start|>(250,250)<|box_end|>";
        assert_eq!(marked, format!("{name} at {boxes}."));
        let pixels = json!({"bbox": [[0.5, 0, 1, 1]], "bbox_type": "norm1"});
        assert_eq!(filled("<bbox>", &pixels, form(Units::Pixels, false)).unwrap(), "[798, 0, 1595, 1203]");
    }

    #[test]
    fn objects_of_each_image_keep_their_names_and_places() {
        let of = |objects: Value, content: &str| {
            let mut messages = [Message::new("assistant", content)];
            fill(&mut messages, objects.as_object().unwrap(), BoxForm::default(), &SIZES).unwrap()
        };
        let object = |name: &str, corners| ImageObject { name: name.to_owned(), corners };
        let two = json!({"ref": ["a", "b"], "bbox": [[400, 300, 1700, 1200], [50, 25]], "image_id": [0, 1]});
        let found = of(two, "<ref-object><bbox><ref-object><bbox>");
        assert_eq!(found, [[object("a", [0.25, 0.25, 1.0, 1.0])], [object("b", [0.25; 4])]]);
        let one = json!({"ref": ["a"], "bbox": [[0, 0.5, 1, 1], [0, 0, 1, 1]], "bbox_type": "norm1"});
        let found = of(one, "<ref-object><bbox><bbox>");
        assert_eq!(found[0], [object("a", [0.0, 0.5, 1.0, 1.0]), object("a", [0.0, 0.0, 1.0, 1.0])]);
        let none =
            of(json!({"ref": ["a", "b", "c"], "bbox": [[0, 0, 1, 1]]}), "<ref-object><ref-object><ref-object><bbox>");
        assert_eq!((none[0][0].name.as_str(), none[1].len()), ("", 0));
    }

    #[test]
    fn objects_that_do_not_fit_are_named() {
        let form = BoxForm::default();
        for (content, objects, problem) in [
            ("<bbox>", json!({"bbox": []}), "word 1 `<bbox>` has no object, of 0"),
            ("x", json!({"bbox": [[1, 2, 3, 4]]}), "1 objects for the word `<bbox>`, which stands 0 times"),
            ("<bbox>", json!({"bbox": [[3, 2, 1, 4]]}), "box 1 [3.0, 2.0, 1.0, 4.0] is no box"),
            ("<bbox>", json!({"bbox": [[1700, 2, 1800, 4]]}), "is no box in an image of 1600 × 1200 pixels"),
            ("<bbox>", json!({"bbox": [[1, 2, 3]]}), "box 1 is [1,2,3], expected [x, y]"),
            (
                "<bbox>",
                json!({"bbox": [[1, 2]], "image_id": [2]}),
                "box 1 is of image 2, counted from 0, but there are 2",
            ),
            ("<bbox>", json!({"bbox": [[1, 2]], "bbox_type": "cm"}), "`bbox_type` is \"cm\""),
            ("<ref-object>", json!({"ref": [4]}), "the name 4 is no text"),
        ] {
            let found = filled(content, &objects, form).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
        let second = json!({"bbox": [[1, 2]], "image_id": 1});
        let pixels = filled("<bbox>", &second, BoxForm { units: Units::Pixels, marked: false });
        assert!(pixels.unwrap_err().contains("needs `norm_bbox: norm1000`"));
    }
}
