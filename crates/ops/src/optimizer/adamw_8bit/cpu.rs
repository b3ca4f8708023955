//! CPU reference of 8-bit AdamW: block by block, so the bits do not depend on the number of threads.

use rayon::prelude::*;

use super::BLOCK;
use crate::call::Call;
use crate::optimizer::rule::Rule;
use crate::real::Real;

/// The code whose value is nearest to `x`, the lower one of two that are equally near. `map` ascends.
fn nearest<T: Real>(map: &[T], x: T) -> usize {
    let low = map.partition_point(|value| *value <= x).saturating_sub(1);
    match map.get(low + 1) {
        Some(above) if *above - x < x - map[low] => low + 1,
        _ => low,
    }
}

fn relative<T: Real>(x: T, largest: T) -> T {
    if largest > T::default() { x / largest } else { T::default() }
}

/// A negative value never takes the code of 0: its sign would be lost.
fn nearest_signed<T: Real>(map: &[T], x: T, largest: T) -> usize {
    let code = nearest(map, relative(x, largest));
    if x < T::default() && map[code] >= T::default() { code - 1 } else { code }
}

/// The data of one block of elements.
struct Block<'a, T> {
    weight: &'a mut [T],
    first: &'a mut [u8],
    second: &'a mut [u8],
    first_scale: &'a mut T,
    second_scale: &'a mut T,
    gradient: &'a [T],
}

pub fn update<T: Real>(call: &mut Call<'_, T>) {
    let rule = Rule::new(call.attrs, call.inputs, call.outputs[0].storage());
    if !rule.applied {
        return;
    }
    let (gradient, maps) = (call.inputs[0].real(), [call.inputs[7].real(), call.inputs[8].real()]);
    let [weight, first, second, first_scale, second_scale] = call.outputs_mut();
    let codes = first.byte().par_chunks_mut(BLOCK).zip(second.byte().par_chunks_mut(BLOCK));
    let scales = first_scale.real().par_iter_mut().zip(second_scale.real());
    let values = weight.real().par_chunks_mut(BLOCK).zip(gradient.par_chunks(BLOCK));
    values.zip(codes).zip(scales).enumerate().for_each(
        |(index, (((weight, gradient), (first, second)), (first_scale, second_scale)))| {
            let block = Block { weight, first, second, first_scale, second_scale, gradient };
            update_block(&rule, &maps, index * BLOCK, block);
        },
    );
}

fn update_block<T: Real>(rule: &Rule<T>, maps: &[&[T]; 2], start: usize, block: Block<'_, T>) {
    let (mut m, mut v) = ([T::default(); BLOCK], [T::default(); BLOCK]);
    let (mut largest1, mut largest2) = (T::default(), T::default());
    for (i, g) in block.gradient.iter().enumerate() {
        let g = *g * rule.gradient_scale;
        let (m0, v0) = (
            maps[0][block.first[i] as usize] * *block.first_scale,
            maps[1][block.second[i] as usize] * *block.second_scale,
        );
        m[i] = rule.beta1 * m0 + rule.rest1 * g;
        v[i] = rule.beta2 * v0 + rule.rest2 * (g * g);
        largest1 = largest1.max(m[i].abs());
        largest2 = largest2.max(v[i]);
    }
    let root = rule.correction2.sqrt();
    let size = rule.learning_rate * root / rule.correction1;
    let least = root * rule.epsilon;
    let kept = T::from_f64(1.0) - rule.learning_rate * rule.weight_decay;
    for (i, w) in block.weight.iter_mut().enumerate() {
        *w = (*w - size * (m[i] / (v[i].sqrt() + least))) * kept;
        block.first[i] = nearest_signed(maps[0], m[i], largest1) as u8;
        block.second[i] = nearest(maps[1], relative(v[i], largest2)) as u8;
    }
    rule.round(block.weight, start);
    (*block.first_scale, *block.second_scale) = (largest1, largest2);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_codes_and_the_sign_of_small_values() {
        let map = [-1.0, -0.5, 0.0, 0.5, 1.0];
        assert_eq!([-2.0, -0.8, -0.7, -0.25, 0.2, 0.75, 3.0].map(|x| nearest(&map, x)), [0, 0, 1, 1, 2, 3, 4]);
        assert_eq!(nearest_signed(&map, -0.01, 1.0), 1);
        assert_eq!(nearest_signed(&map, 0.01, 1.0), 2);
        assert_eq!(nearest_signed(&map, 0.0, 0.0), 2);
    }
}
