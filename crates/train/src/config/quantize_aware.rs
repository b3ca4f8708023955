//! Contradictions between options of training for a number format and others.

use options::Reader;

use super::{Config, QuantizeAware};

/// Training for a number format, next to what has other weights or rounds them otherwise.
pub(super) fn check_quantize_aware(config: &Config, reader: &mut Reader) {
    let of = &config.precision;
    let details = [
        ("quantize_aware_group_size", of.quantize_aware_group_size.is_some()),
        ("quantize_aware_asymmetric", of.quantize_aware_asymmetric),
    ];
    if reader.is_faulty("quantize_aware") {
        return;
    }
    let Some(scheme) = of.quantize_aware else {
        for (detail, _) in details.into_iter().filter(|(_, given)| *given) {
            if !reader.is_faulty(detail) {
                let message = format!("`{detail}` has no effect without `quantize_aware`");
                reader.report(detail, message, Some(format!("remove `{detail}`, or set `quantize_aware: w4a16`")));
            }
        }
        return;
    };
    let given = format!("quantize_aware: {scheme}");
    let has_groups = matches!(scheme, QuantizeAware::W4A16 | QuantizeAware::W8A16);
    let tiles = scheme == QuantizeAware::Fp8Block;
    for (detail, takes) in
        [("quantize_aware_group_size", has_groups || tiles), ("quantize_aware_asymmetric", has_groups)]
    {
        let is_given = details.iter().any(|(name, given)| *name == detail && *given);
        if is_given && !takes && !reader.is_faulty(detail) {
            let message = format!("`{detail}` has no effect on `{given}`");
            reader.report(detail, message, Some(format!("remove `{detail}`, or set `quantize_aware: w4a16`")));
        }
    }
    if of.quantize_aware_group_size == Some(0) || tiles && of.quantize_aware_group_size == Some(-1) {
        let message = format!("`quantize_aware_group_size` is {}", of.quantize_aware_group_size.unwrap_or_default());
        reader.report("quantize_aware_group_size", message, Some("give a number from 1, or remove it".to_owned()));
    }
}
