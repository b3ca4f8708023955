//! The dynamic code book of 8-bit numbers (Dettmers et al. 2022): seven decades, each with twice the values of the one
//! below, evenly spaced inside a decade; and 0 and 1. Knows nothing of what is coded.

/// Number of decades that the code book spans.
const DECADES: i32 = 7;

/// `points` values from 0.1 to 1 in f32, counted from the nearer end and rounded once: the values that the
/// published books were made of.
fn spaced(points: usize) -> Vec<f32> {
    let step = (1.0f32 - 0.1) / (points - 1) as f32;
    let at = |i: usize| {
        if i < points / 2 { step.mul_add(i as f32, 0.1) } else { (-step).mul_add((points - 1 - i) as f32, 1.0) }
    };
    (0..points).map(at).collect()
}

/// Returns the 256 values, ascending. A signed book has both signs of every value but 0 and 1; an unsigned one has
/// twice the values in each decade instead.
pub fn dynamic_map(signed: bool) -> Vec<f32> {
    let mut values = vec![0.0, 1.0];
    for decade in 0..DECADES {
        let points = (1usize << (decade + if signed { 0 } else { 1 })) + 1;
        let unit = 10f64.powi(decade - (DECADES - 1)) as f32;
        for pair in spaced(points).windows(2) {
            let value = unit * ((pair[0] + pair[1]) / 2.0);
            values.push(value);
            if signed {
                values.push(-value);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    values
}
