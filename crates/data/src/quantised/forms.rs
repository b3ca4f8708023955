//! Locations of the codes and scales of each linear layer, format by format, by names and shapes. Everything that a
//! value is made of is checked here: a weight that was found can be read without further checks.

use serde_json::Value;
use tensor::small::Small;
use tensor::storage::Block;

use super::integers;
use super::linear::{Codes, Linear, Number, Scales, Whole};
use super::scheme::Scheme;
use super::turned::Turned;
use super::weight::{Found, Parsed, Tensors, Weight, product};
use crate::error::DataError;

/// Endings of tensors that belong to activations, caches and calibration: no value of a weight depends on them.
const IGNORED: [&str; 9] = [
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
];

/// Bytes of a description next to a weight, at most.
const LONGEST_STATE: usize = 1 << 12;

/// Finds all quantized weights and checks their parts.
pub(crate) fn find(scheme: Scheme, tensors: &Tensors<'_>) -> Result<Found, DataError> {
    let mut found = Found::default();
    let mut names: Vec<&String> = tensors.place.keys().collect();
    names.sort_unstable();
    for name in names {
        if IGNORED.iter().any(|ending| name.ends_with(ending)) {
            found.parts.insert(name.clone());
            continue;
        }
        let of = Weight { tensors, name, found: &mut found };
        let linear = match scheme {
            Scheme::BitsAndBytes => bitsandbytes(of),
            Scheme::Fp8 { block } => eight_bits(of, block, &["weight_scale_inv", "weight_scale"]),
            Scheme::CompressedFp8 { block } => eight_bits(of, block, &["weight_scale"]),
            Scheme::ModelOptFp8 => eight_bits(of, None, &["weight_scale"]),
            Scheme::CompressedNvfp4 => four_bits(of, "weight_packed", "weight_global_scale", Whole::Over),
            Scheme::ModelOptNvfp4 => four_bits(of, "weight", "weight_scale_2", Whole::Times),
            Scheme::Mxfp4 => mxfp4(of),
            Scheme::CompressedInt8 => integers::bytes(of),
            Scheme::CompressedPacked { bits, zeros } => integers::words(of, bits, zeros),
            Scheme::CompressedMxfp4 => mxfp4_of_rows(of),
        };
        if let Some((weight, linear)) = linear.map_err(|problem| DataError::invalid(tensors.folder, problem))? {
            found.linears.insert(weight, linear);
        }
    }
    if found.linears.is_empty() {
        let problem = format!("`config.json` says that weights are quantised ({}), but none is", scheme.name());
        return Err(DataError::invalid(tensors.folder, problem));
    }
    Ok(found)
}

/// All values of a small format of eight bits.
fn table(small: Small) -> Box<[f32; 256]> {
    Box::new(std::array::from_fn(|code| small.value(code as u8)))
}

pub(super) fn e2m1() -> [f32; 16] {
    std::array::from_fn(|code| Small::E2M1.value(code as u8))
}

/// Codes of four bits in flat blocks; what else they are stands in JSON next to them.
fn bitsandbytes(mut of: Weight<'_, '_>) -> Parsed {
    let Some((weight, _)) = of.name.split_once(".quant_state.bitsandbytes__") else {
        let is_of_eight = of.name.ends_with(".SCB");
        return if is_of_eight { Err(format!("`{}` belongs to a weight of 8 bits", of.name)) } else { Ok(None) };
    };
    let (weight, state) = (weight.to_owned(), of.name.to_owned());
    let (part, ..) = of.take(&state)?;
    if part.length > LONGEST_STATE {
        return Err(format!("`{state}` has {} bytes, expected a short description", part.length));
    }
    let mut text = vec![0; part.length];
    of.tensors.files[part.file].read(part.begin, &mut text).map_err(|e| e.to_string())?;
    let described: Value = serde_json::from_slice(&text).map_err(|e| format!("`{state}` is not valid JSON: {e}"))?;
    let size = |key: &str| described[key].as_u64().filter(|n| (1..=1 << 20).contains(n)).map(|n| n as usize);
    let wrong = |key: &str| format!("`{state}` has `{key}: {}`, expected a number from 1", described[key]);
    let block = size("blocksize").ok_or_else(|| wrong("blocksize"))?;
    let extents =
        described["shape"].as_array().map(|shape| shape.iter().map(|n| n.as_u64().map(|n| n as usize)).collect());
    let shape: Vec<usize> = extents.flatten().ok_or_else(|| format!("`{state}` has no `shape`"))?;
    let elements = product(&shape).filter(|n| *n > 0).ok_or_else(|| format!("`{state}` has the shape {shape:?}"))?;
    let (_, at) = of.raw(&weight).ok_or_else(|| format!("there is no `{weight}`, which `{state}` describes"))?;
    if at.length != elements.div_ceil(2) {
        return Err(format!("`{weight}` has {} bytes, its shape {shape:?} needs {}", at.length, elements.div_ceil(2)));
    }
    let values = of.values(&format!("{weight}.quant_map"), 16)?;
    let blocks = elements.div_ceil(block);
    let absmax = format!("{weight}.absmax");
    let scales = if described.get("nested_offset").is_some_and(|offset| !offset.is_null()) {
        let nested = size("nested_blocksize").ok_or_else(|| wrong("nested_blocksize"))?;
        let offset = described["nested_offset"].as_f64().ok_or_else(|| wrong("nested_offset"))? as f32;
        let (at, dtype, found) = of.take(&absmax)?;
        if dtype != "U8" || at.length != blocks {
            return Err(format!("`{absmax}` is {dtype}{found:?}, expected {blocks} bytes"));
        }
        let map = of.values(&format!("{weight}.nested_quant_map"), 256)?;
        let outer = of.values(&format!("{weight}.nested_absmax"), blocks.div_ceil(nested))?;
        let map = Box::new(std::array::from_fn(|code| map[code]));
        Scales::Nested { at, map, outer, block: nested, offset }
    } else {
        let (at, number) = of.numbers(&absmax, blocks)?;
        Scales::Plain { at, number }
    };
    let codes = Codes::HighFirst(std::array::from_fn(|code| values[code]));
    Ok(Some((weight, Linear::new(shape, at, codes, Block::Flat(block), scales))))
}

/// E4M3 with scales under one of these names: one, one for each row, or one for each tile.
fn eight_bits(mut of: Weight<'_, '_>, block: Option<[usize; 2]>, scales: &[&str]) -> Parsed {
    let Some(module) = of.name.strip_suffix("weight") else { return Ok(None) };
    let Some((shape, at)) = of.of_type(of.name, "F8_E4M3") else { return Ok(None) };
    let (module, weight) = (module.to_owned(), of.name.to_owned());
    if product(&shape) != Some(at.length) || shape.len() != 2 || at.length == 0 {
        return Err(format!("`{weight}` of shape {shape:?} has {} bytes, expected a matrix of bytes", at.length));
    }
    let known = scales.iter().map(|name| format!("{module}{name}"));
    let name = known.clone().find(|name| of.raw(name).is_some());
    let name = name.ok_or_else(|| {
        let names: Vec<String> = known.map(|name| format!("`{name}`")).collect();
        format!("`{weight}` is quantised, but there is no {}", names.join(" and no "))
    })?;
    let found = of.raw(&name).map(|(raw, _)| raw.shape.to_vec()).unwrap_or_default();
    let (rows, columns) = (shape[0], shape[1]);
    let tiles = |[r, c]: [usize; 2]| (rows.div_ceil(r), columns.div_ceil(c));
    let (block, count) = match (&found[..], block) {
        ([] | [1] | [1, 1], _) => (Block::Tensor, 1),
        ([n] | [n, 1], None) if *n == rows => (Block::Tile(1, columns), rows),
        ([m, n], Some(extents)) if (*m, *n) == tiles(extents) => (Block::Tile(extents[0], extents[1]), m * n),
        _ => {
            let blocks = block.map(|extents| format!(" in blocks of {extents:?}")).unwrap_or_default();
            return Err(format!("`{name}` has the shape {found:?}, which are no scales of {shape:?}{blocks}"));
        }
    };
    let (scales, number) = of.numbers(&name, count)?;
    let scales = Scales::Plain { at: scales, number };
    Ok(Some((weight, Linear::new(shape, at, Codes::Bytes(table(Small::E4M3)), block, scales))))
}

/// Elements of NVFP4 that share a scale.
const NVFP4_BLOCK: usize = 16;

/// Elements of MXFP4 that share a power of two.
const MXFP4_BLOCK: usize = 32;

/// E2M1 with an E4M3 for each 16 elements of a row, and one number for the tensor.
fn four_bits(mut of: Weight<'_, '_>, packed: &str, whole: &str, with: fn(f32) -> Whole) -> Parsed {
    let Some(module) = of.name.strip_suffix(packed).filter(|module| module.ends_with('.')) else { return Ok(None) };
    let Some((bytes, at)) = of.of_type(of.name, "U8") else { return Ok(None) };
    let (module, name) = (module.to_owned(), of.name.to_owned());
    let [rows, half] = bytes[..] else { return Err(format!("`{name}` has the shape {bytes:?}, expected a matrix")) };
    let columns = half.checked_mul(2).filter(|n| n.is_multiple_of(NVFP4_BLOCK) && *n > 0);
    let Some(columns) = columns.filter(|_| rows > 0 && product(&bytes) == Some(at.length)) else {
        return Err(format!("`{name}` has the shape {bytes:?}, expected rows of whole blocks of {NVFP4_BLOCK} codes"));
    };
    if of.raw(&format!("{module}pre_quant_scale")).is_some() {
        return Err(format!("`{module}pre_quant_scale` scales activations, which is not computed"));
    }
    let (scales, number) = of.numbers(&format!("{module}weight_scale"), rows * columns / NVFP4_BLOCK)?;
    let whole = with(of.value(&format!("{module}{whole}"))?);
    of.found.parts.insert(name);
    let scales = Scales::Plain { at: scales, number };
    let linear = Linear::new(vec![rows, columns], at, Codes::LowFirst(e2m1()), Block::Row(NVFP4_BLOCK), scales);
    Ok(Some((format!("{module}weight"), Linear { whole, ..linear })))
}

/// E2M1 with a power of two for each 32 elements of a row: `X_blocks` […, 16] and `X_scales`. Of stacked matrices the
/// rows are the columns of those in other types.
fn mxfp4(mut of: Weight<'_, '_>) -> Parsed {
    let Some(weight) = of.name.strip_suffix("_blocks").map(str::to_owned) else { return Ok(None) };
    let Some((bytes, at)) = of.of_type(of.name, "U8") else { return Ok(None) };
    let name = of.name.to_owned();
    let blocks = bytes.split_last().filter(|(last, _)| **last == 16).map(|(_, blocks)| blocks.to_vec());
    let wrong = || format!("`{name}` has the shape {bytes:?}, expected blocks of 16 bytes");
    let mut shape = blocks.filter(|_| product(&bytes) == Some(at.length) && at.length > 0).ok_or_else(wrong)?;
    let count = product(&shape).ok_or_else(wrong)?;
    *shape.last_mut().ok_or_else(wrong)? *= MXFP4_BLOCK;
    let scales = format!("{weight}_scales");
    let (scales, dtype, found) = of.take(&scales)?;
    if scales.length != count || !matches!(dtype.as_str(), "U8" | "F8_E8M0") {
        return Err(format!("`{weight}_scales` is {dtype}{found:?}, expected {count} bytes"));
    }
    of.found.parts.insert(name);
    let scales = Scales::Plain { at: scales, number: Number::E8M0 };
    let codes = Codes::LowFirst(e2m1());
    let turned = (shape.len() > 2).then(|| Turned::of(&shape));
    let linear = Linear::new(shape, at, codes, Block::Row(MXFP4_BLOCK), scales);
    Ok(Some((weight, Linear { turned, ..linear })))
}

/// MXFP4 of compressed-tensors: `weight_packed` [rows, columns ÷ 2] and `weight_scale` [rows, columns ÷ 32].
fn mxfp4_of_rows(mut of: Weight<'_, '_>) -> Parsed {
    let Some(module) = of.name.strip_suffix("weight_packed").filter(|module| module.ends_with('.')) else {
        return Ok(None);
    };
    let Some((bytes, at)) = of.of_type(of.name, "U8") else { return Ok(None) };
    let (module, name) = (module.to_owned(), of.name.to_owned());
    let wrong = || format!("`{name}` has the shape {bytes:?}, expected rows of whole blocks of {MXFP4_BLOCK} codes");
    let [rows, half] = bytes[..] else { return Err(wrong()) };
    let columns = half.checked_mul(2).filter(|n| n.is_multiple_of(MXFP4_BLOCK) && *n > 0).ok_or_else(wrong)?;
    if rows == 0 || product(&bytes) != Some(at.length) {
        return Err(wrong());
    }
    let (scales, dtype, found) = of.take(&format!("{module}weight_scale"))?;
    if scales.length != rows * columns / MXFP4_BLOCK || !matches!(dtype.as_str(), "U8" | "F8_E8M0") {
        let expected = rows * columns / MXFP4_BLOCK;
        return Err(format!("`{module}weight_scale` is {dtype}{found:?}, expected {expected} bytes"));
    }
    of.found.parts.insert(name);
    let scales = Scales::Plain { at: scales, number: Number::E8M0 };
    let codes = Codes::LowFirst(e2m1());
    let linear = Linear::new(vec![rows, columns], at, codes, Block::Row(MXFP4_BLOCK), scales);
    Ok(Some((format!("{module}weight"), linear)))
}
