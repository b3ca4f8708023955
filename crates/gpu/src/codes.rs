//! Codes of eight bits as a GPU stores them.

use std::borrow::Cow;

use program::{Arch, Codes};
use tensor::DType;

/// The code of negative zero, which units of FNUZ codes read as NaN.
const NEGATIVE_ZERO: u8 = 0x80;

/// Returns the bytes of a tensor that comes from the host as `arch` stores them: on units of FNUZ codes, negative zeros
/// become zeros. All other bytes stay.
pub(crate) fn stored(arch: Arch, dtype: DType, bytes: &[u8]) -> Cow<'_, [u8]> {
    let is_code = matches!(dtype, DType::E4M3 | DType::E5M2);
    if !is_code || arch.codes() != Some(Codes::Fnuz) || !bytes.contains(&NEGATIVE_ZERO) {
        return bytes.into();
    }
    bytes.iter().map(|code| if *code == NEGATIVE_ZERO { 0 } else { *code }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_zeros_are_stored_as_zeros_on_units_that_read_them_as_nan() {
        let bytes = [0x80, 0x00, 0x81, 0x7e];
        let on = |target: &str, dtype| stored(target.parse().unwrap(), dtype, &bytes).into_owned();
        for dtype in [DType::E4M3, DType::E5M2] {
            assert_eq!(on("gfx942", dtype), [0x00, 0x00, 0x81, 0x7e]);
            assert_eq!(on("gfx950", dtype), bytes);
            assert_eq!(on("sm_90a", dtype), bytes);
        }
        assert_eq!(on("gfx942", DType::U8), bytes);
    }
}
