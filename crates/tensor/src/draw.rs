//! Random initial values of tensors, vectorized. A value is a function of (seed, stream, position) alone. Does not know
//! what is filled with them.

use crate::philox::{Purpose, normal_pair, unit, words};

/// Values that are drawn side by side.
const WIDTH: usize = 64;

/// A run of values of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    pub seed: u64,
    pub stream: u32,
    /// Position of the first value, a multiple of 4.
    pub start: usize,
}

/// Normal values with mean 0 and a standard deviation.
pub fn normals(of: Sequence, deviation: f32, values: &mut [f32]) {
    pulp::Arch::new().dispatch(Drawing { of, values, make: Normal { deviation } });
}

/// Uniform values in [−bound, bound).
pub fn uniforms(of: Sequence, bound: f32, values: &mut [f32]) {
    pulp::Arch::new().dispatch(Drawing { of, values, make: Uniform { bound } });
}

/// The conversion of random words to values, four at a time.
trait Make {
    fn four(&self, words: [u32; 4]) -> [f32; 4];
}

struct Normal {
    deviation: f32,
}

impl Make for Normal {
    #[inline(always)]
    fn four(&self, [a, b, c, d]: [u32; 4]) -> [f32; 4] {
        let ((w, x), (y, z)) = (normal_pair(a, b), normal_pair(c, d));
        [w * self.deviation, x * self.deviation, y * self.deviation, z * self.deviation]
    }
}

struct Uniform {
    bound: f32,
}

impl Make for Uniform {
    #[inline(always)]
    fn four(&self, [a, b, c, d]: [u32; 4]) -> [f32; 4] {
        let bound = self.bound;
        [
            (2.0 * unit(a) - 1.0) * bound,
            (2.0 * unit(b) - 1.0) * bound,
            (2.0 * unit(c) - 1.0) * bound,
            (2.0 * unit(d) - 1.0) * bound,
        ]
    }
}

struct Drawing<'a, M> {
    of: Sequence,
    values: &'a mut [f32],
    make: M,
}

impl<M: Make> pulp::NullaryFnOnce for Drawing<'_, M> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Sequence { seed, stream, start } = self.of;
        assert!(start.is_multiple_of(4), "a sequence begins with a block of four, not at {start}");
        let mut first = (start / 4) as u64;
        for values in self.values.chunks_mut(WIDTH) {
            let mut drawn = [[0; 4]; WIDTH / 4];
            for (four, block) in drawn.iter_mut().zip(first..) {
                *four = words(seed, Purpose::Initialisation, stream, 0, block);
            }
            let mut made = [[0.0; 4]; WIDTH / 4];
            for (made, four) in made.iter_mut().zip(&drawn) {
                *made = self.make.four(*four);
            }
            values.copy_from_slice(&made.as_flattened()[..values.len()]);
            first += (WIDTH / 4) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_depends_on_its_place_alone() {
        let of = Sequence { seed: 7, stream: 3, start: 0 };
        for draw in [normals, uniforms] {
            let mut whole = vec![0.0; 1001];
            draw(of, 0.5, &mut whole);
            let mut after = vec![0.0; 101];
            draw(Sequence { start: 100, ..of }, 0.5, &mut after);
            assert_eq!(after, whole[100..201]);
        }
    }

    #[test]
    fn normal_values_are_pairs_of_words() {
        let mut values = [0.0; 8];
        normals(Sequence { seed: 7, stream: 3, start: 0 }, 1.0, &mut values);
        let [a, b, c, d] = words(7, Purpose::Initialisation, 3, 0, 1);
        let ((w, x), (y, z)) = (normal_pair(a, b), normal_pair(c, d));
        assert_eq!(values[4..], [w, x, y, z]);
    }
}
