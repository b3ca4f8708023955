//! The description in an adapter's file of the quantized weights that it was trained on: from these and the model's own
//! weights its function can be made again. Knows the words in the file; not how codes are made.

use std::collections::BTreeMap;
use std::path::Path;

use data::safetensors::SafeTensors;
use program::Program;
use tensor::DType;
use tensor::packed::{Quantisation, Target};
use tensor::small::Small;
use tensor::storage::{Block, Code, Packing, Scales};

use crate::error::{Result, TrainError};

/// Keys in the metadata of an adapter's file.
const FORM: &str = "surogate.base.quantised";
const DTYPE: &str = "surogate.base.dtype";
const WEIGHTS: &str = "surogate.base.weights";

/// Weights that were in codes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantisedBase {
    pub made: Quantisation,
    /// The type of the values that products read.
    pub dtype: DType,
    /// Their names: those of weights that are scaled by the largest magnitude of them all stand together.
    pub weights: Vec<Vec<String>>,
}

/// Between the names of weights that are scaled together; between others is a space.
const WITH: &str = "+";

/// After the packed form: blocks choose what their largest value becomes.
const FOUR_OVER_SIX: &str = " four-over-six";

/// A form in words: the packed form, and how blocks are scaled into it.
pub fn text(made: Quantisation) -> String {
    let chosen = matches!(made, Quantisation::Fp4 { target: Target::FourOrSix });
    format!("{}{}", made.packing(), if chosen { FOUR_OVER_SIX } else { "" })
}

fn parse(words: &str) -> Option<Quantisation> {
    let (form, target) = match words.strip_suffix(FOUR_OVER_SIX) {
        Some(form) => (form, Target::FourOrSix),
        None => (words, Target::Six),
    };
    let packing: Packing = form.parse().ok()?;
    let made = match (packing.code, packing.block) {
        (Code::Nf4, Block::Flat(block)) => {
            Quantisation::Nf4 { block, nested: matches!(packing.scales, Scales::Mapped(_)) }
        }
        (Code::Small(Small::E4M3), Block::Tile(extent, _)) => Quantisation::Fp8 { extent },
        (Code::Small(Small::E2M1), Block::Tile(..)) => Quantisation::Fp4Tiles,
        _ => Quantisation::Fp4 { target },
    };
    // Only what is written so is meant.
    (text(made) == words).then_some(made)
}

/// The metadata of an adapter that a program trains.
pub fn metadata(program: &Program) -> BTreeMap<String, String> {
    let packed = || program.layout.parameters.iter().filter_map(|slot| Some((slot, slot.packed.as_ref()?)));
    let Some((_, first)) = packed().next() else { return BTreeMap::new() };
    let Some(made) = first.made else { return BTreeMap::new() };
    let named = packed().map(|(slot, of)| (slot.name.as_str(), of.magnitude_group));
    let entries = [(FORM, text(made)), (DTYPE, first.dtype.to_string()), (WEIGHTS, names(named))];
    entries.map(|(key, text)| (key.to_owned(), text)).into()
}

/// Names of weights in words, each with the number of those that it is scaled with, if any.
fn names<'a>(weights: impl Iterator<Item = (&'a str, Option<u32>)>) -> String {
    let mut groups: Vec<(Option<u32>, Vec<&str>)> = Vec::new();
    for (name, group) in weights {
        match groups.iter_mut().find(|(known, _)| group.is_some() && *known == group) {
            Some((_, names)) => names.push(name),
            None => groups.push((group, vec![name])),
        }
    }
    groups.iter().map(|(_, names)| names.join(WITH)).collect::<Vec<_>>().join(" ")
}

fn parse_names(words: &str) -> Vec<Vec<String>> {
    words.split(' ').map(|group| group.split(WITH).map(str::to_owned).collect()).collect()
}

/// Reads the description in the file of an adapter; None if it was trained on weights that are not quantized.
pub fn read(adapter: &Path) -> Result<Option<QuantisedBase>> {
    let path = adapter.join("adapter_model.safetensors");
    let file = SafeTensors::open(&path).map_err(TrainError::model_file)?;
    let value = |key: &str| file.metadata().get(key).map(String::as_str);
    let Some(form) = value(FORM) else { return Ok(None) };
    let wrong = |key: &str| {
        let text = value(key).unwrap_or_default();
        TrainError::Usage(format!(
            "{}: the metadata `{key}` is `{text}`, which this version does not know",
            path.display()
        ))
    };
    Ok(Some(QuantisedBase {
        made: parse(form).ok_or_else(|| wrong(FORM))?,
        dtype: value(DTYPE).and_then(|name| name.parse().ok()).ok_or_else(|| wrong(DTYPE))?,
        weights: value(WEIGHTS).map(parse_names).ok_or_else(|| wrong(WEIGHTS))?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_read_as_they_are_written() {
        for made in [
            Quantisation::Nf4 { block: 64, nested: true },
            Quantisation::Nf4 { block: 512, nested: false },
            Quantisation::Fp8 { extent: 128 },
            Quantisation::Fp4 { target: Target::Six },
            Quantisation::Fp4 { target: Target::FourOrSix },
            Quantisation::Fp4Tiles,
        ] {
            assert_eq!(parse(&text(made)), Some(made));
        }
        let others = [
            "",
            "nf4 flat:64 mapped:7",
            "e4m3 tile:64x32 f32",
            "e2m1 row:32 e8m0",
            "nf4 flat:64 f32 four-over-six",
            "e2m1 tile:16x16 e4m3 four-over-six",
            "e2m1 tile:16x32 e4m3",
        ];
        for words in others {
            assert_eq!(parse(words), None, "{words}");
        }
    }

    #[test]
    fn weights_that_are_scaled_together_are_named_together() {
        let weights = [("q", Some(0)), ("o", None), ("gate", Some(2)), ("k", Some(0)), ("up", Some(2)), ("down", None)];
        let words = names(weights.into_iter());
        assert_eq!(words, "q+k o gate+up down");
        assert_eq!(parse_names(&words), [vec!["q", "k"], vec!["o"], vec!["gate", "up"], vec!["down"]]);
    }
}
