//! The `seed` attribute of operations that draw random numbers: any u64.

use tensor::Attrs;

/// The key of the random numbers; a negative number stands for its two's complement.
pub fn seed_of(attrs: &Attrs) -> Result<u64, String> {
    let value = attrs.get("seed").ok_or("attribute `seed` is missing")?;
    let signed = || value.as_i64().map(|s| s as u64);
    value.as_u64().or_else(signed).ok_or_else(|| format!("attribute `seed` is {value}, expected an integer"))
}
