//! Number formats of compressed-tensors as attributes of operations and definitions of kernels.

use tensor::Attrs;
use tensor::compressed::{Codes, Extent, Form};

use crate::op::Attribute;

/// The header of kernels that round numbers to those of a format; it includes [`super::CODES_HEADER`].
pub(crate) const FORMS_HEADER: (&str, &str) = ("forms.cuh", include_str!("forms.cuh"));

pub(crate) const CODES: Attribute = Attribute {
    name: "codes",
    kind: "string",
    doc: "int4, int4_asymmetric, int8, int8_asymmetric, fp8, nvfp4 or mxfp4",
};

pub(crate) const BLOCK: Attribute = Attribute {
    name: "block",
    kind: "list of int?",
    doc: "rows and columns that share a scale; 0: all columns. The whole tensor if absent",
};

/// Returns the format of attributes.
pub(crate) fn form_of(attrs: &Attrs) -> Result<Form, String> {
    let name = attrs.text("codes").map_err(|e| e.0)?;
    let Some(codes) = Codes::named(name) else {
        let known = Codes::NAMES.map(|(name, _)| name).join(", ");
        return Err(format!("`codes` is `{name}`, expected one of {known}"));
    };
    let block = match attrs.get("block") {
        Some(_) => attrs.sizes("block").map_err(|e| e.0)?,
        None => Vec::new(),
    };
    let extent = match *block.as_slice() {
        [] => Extent::Tensor,
        [1, 0] => Extent::Row,
        [1, n] => Extent::Group(n),
        [rows, columns] if rows > 0 && columns > 0 => Extent::Tile(rows, columns),
        _ => return Err(format!("`block` is {block:?}, expected rows and columns")),
    };
    let fits = match codes {
        Codes::Int { .. } => !matches!(extent, Extent::Tensor),
        Codes::Fp8 => true,
        Codes::Nvfp4 | Codes::Mxfp4 => matches!(extent, Extent::Group(_)),
    };
    if !fits {
        return Err(format!("`{name}` has no scales of blocks {block:?}"));
    }
    Ok(Form { codes, extent })
}

/// Returns what [`FORMS_HEADER`] needs defined.
pub(crate) fn form_defines(codes: Codes) -> Vec<(String, String)> {
    let (kind, bits) = match codes {
        Codes::Int { bits, symmetric: true } => (0, bits),
        Codes::Int { bits, symmetric: false } => (1, bits),
        Codes::Fp8 => (2, 8),
        Codes::Nvfp4 => (3, 4),
        Codes::Mxfp4 => (4, 4),
    };
    let defines = [("KIND", kind.to_string()), ("BITS", bits.to_string()), ("FORMAT", "0".to_owned())];
    defines.map(|(name, value)| (name.to_owned(), value)).to_vec()
}
