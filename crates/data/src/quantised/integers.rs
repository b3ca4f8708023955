//! Whole numbers of compressed-tensors in files: one to a byte, or packed into words of 32 bits.

use tensor::storage::Block;

use super::linear::{Codes, Linear, Scales, Zeros};
use super::weight::{Parsed, Weight, product};

/// `weight` in I8 with `weight_scale`: one number, or one for each row.
pub(super) fn bytes(mut of: Weight<'_, '_>) -> Parsed {
    if !of.name.ends_with(".weight") {
        return Ok(None);
    }
    let Some((shape, at)) = of.of_type(of.name, "I8") else { return Ok(None) };
    let weight = of.name.to_owned();
    let [rows, columns] = shape[..] else {
        return Err(format!("`{weight}` has the shape {shape:?}, expected a matrix"));
    };
    if product(&shape) != Some(at.length) || at.length == 0 {
        return Err(format!("`{weight}` of shape {shape:?} has {} bytes, expected a matrix of bytes", at.length));
    }
    let name = format!("{weight}_scale");
    let found = of.raw(&name).map(|(raw, _)| raw.shape.to_vec()).unwrap_or_default();
    let (block, count) = match found[..] {
        [n] | [n, 1] if n == rows => (Block::Tile(1, columns), rows),
        [] | [1] | [1, 1] => (Block::Tensor, 1),
        _ => return Err(format!("`{name}` has the shape {found:?}, which are no scales of {shape:?}")),
    };
    let (scales, number) = of.numbers(&name, count)?;
    let values = Box::new(std::array::from_fn(|code| f32::from(code as u8 as i8)));
    Ok(Some((weight, Linear::new(shape, at, Codes::Bytes(values), block, Scales::Plain { at: scales, number }))))
}

/// `weight_packed` [rows, words], `weight_scale` [rows, groups], `weight_shape`, and `weight_zero_point` where there are
/// zero points: [words, groups], the numbers of neighbouring rows in a word.
pub(super) fn words(mut of: Weight<'_, '_>, bits: u32, has_zeros: bool) -> Parsed {
    let Some(module) = of.name.strip_suffix("weight_packed").filter(|module| module.ends_with('.')) else {
        return Ok(None);
    };
    let Some((packed, at)) = of.of_type(of.name, "I32") else { return Ok(None) };
    let (module, name) = (module.to_owned(), of.name.to_owned());
    let each = 32 / bits as usize;
    let [rows, words] = packed[..] else { return Err(format!("`{name}` has the shape {packed:?}, expected a matrix")) };
    if at.length == 0 || product(&packed).and_then(|n| n.checked_mul(4)) != Some(at.length) {
        return Err(format!("`{name}` of shape {packed:?} has {} bytes, expected words of 32 bits", at.length));
    }
    if of.raw(&format!("{module}weight_g_idx")).is_some() {
        return Err(format!(
            "`{module}weight_g_idx` gives the columns of groups in an order of its own, which is not read"
        ));
    }
    let columns = columns(&mut of, &module, rows, words, each)?;
    let name_of_scale = format!("{module}weight_scale");
    let found = of.raw(&name_of_scale).map(|(raw, _)| raw.shape.to_vec()).unwrap_or_default();
    let groups = match found[..] {
        [n, groups] if n == rows && groups > 0 && columns.is_multiple_of(groups) => groups,
        [n] if n == rows => 1,
        _ => {
            return Err(format!(
                "`{name_of_scale}` has the shape {found:?}, which are no scales of {:?}",
                [rows, columns]
            ));
        }
    };
    let (scales, number) = of.numbers(&name_of_scale, rows * groups)?;
    let zeros = if has_zeros {
        let name = format!("{module}weight_zero_point");
        let (at, dtype, shape) = of.take(&name)?;
        let wanted = [rows.div_ceil(each), groups];
        if dtype != "I32" || shape != wanted || at.length != wanted[0] * groups * 4 {
            return Err(format!("`{name}` is {dtype}{shape:?}, expected I32{wanted:?}"));
        }
        Some(Zeros { at, bits, across: groups })
    } else {
        None
    };
    of.found.parts.insert(name);
    let codes = match bits {
        4 => Codes::LowFirst(std::array::from_fn(|code| code as f32 - 8.0)),
        _ => Codes::Bytes(Box::new(std::array::from_fn(|code| code as f32 - 128.0))),
    };
    let block = Block::Row(columns / groups);
    let linear = Linear::new(vec![rows, columns], at, codes, block, Scales::Plain { at: scales, number });
    let padded = (words * each != columns).then_some(words * each);
    Ok(Some((format!("{module}weight"), Linear { padded, zeros, ..linear })))
}

/// The columns of a matrix in words, as `weight_shape` says.
fn columns(of: &mut Weight<'_, '_>, module: &str, rows: usize, words: usize, each: usize) -> Result<usize, String> {
    let name = format!("{module}weight_shape");
    let (at, dtype, shape) = of.take(&name)?;
    if dtype != "I64" || at.length != 16 {
        return Err(format!("`{name}` is {dtype}{shape:?}, expected two whole numbers"));
    }
    let mut bytes = [0; 16];
    of.tensors.files[at.file].read(at.begin, &mut bytes).map_err(|e| e.to_string())?;
    let number = |from: usize| i64::from_le_bytes(bytes[from..from + 8].try_into().expect("eight bytes"));
    let columns = usize::try_from(number(8)).ok().filter(|n| n.div_ceil(each) == words);
    match columns {
        Some(columns) if number(0) == rows as i64 => Ok(columns),
        _ => {
            let found = [number(0), number(8)];
            Err(format!("`{name}` is {found:?}, expected {rows} rows of up to {} columns", words * each))
        }
    }
}
