//! CPU references of matrix products. Each row of a result is computed by one thread in a fixed order.

use rayon::prelude::*;

use super::linear::Reading;
use super::product::{Flags, extents};
use crate::call::Call;
use crate::real::Real;
use crate::vector::{add_scaled, dot};

/// Rows of one chunk of a sum over rows.
const CHUNK: usize = 64;

pub fn linear<T: Real>(call: &mut Call<'_, T>) {
    let reading = Reading::of(call.attrs).expect("checked by the shape rule");
    let inputs = call.inputs;
    let (x, w, k) = (inputs[0].real(), inputs[1].real(), inputs[0].columns());
    let n = w.len() / k;
    let scale = T::from_f64(reading.scale);
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(n).zip(x.par_chunks(k)).enumerate().for_each(|(row, (y, x))| {
        if reading.transposed {
            y.fill(T::default());
            x.iter().zip(w.chunks(n)).for_each(|(x, w)| add_scaled(y, *x, w));
        } else {
            y.iter_mut().zip(w.chunks(k)).for_each(|(y, w)| *y = dot(x, w));
        }
        if reading.bias {
            add_scaled(y, T::from_f64(1.0), inputs[2].real());
        }
        let adapters = inputs[reading.first_adapter()..].chunks(2).zip(&reading.columns);
        for (adapter, (first, count)) in adapters {
            let rank = adapter[0].columns();
            let t = &adapter[0].real()[row * rank..(row + 1) * rank];
            for (y, b) in y[*first..first + count].iter_mut().zip(adapter[1].real().chunks(rank)) {
                *y += scale * dot(t, b);
            }
        }
    });
}

pub fn matmul<T: Real>(call: &mut Call<'_, T>) {
    let flags = Flags::checked(call.attrs);
    let (m, n, k) = extents(call.inputs[0].shape, call.inputs[1].shape, &flags);
    let (a, b) = (call.inputs[0].real(), call.inputs[1].real());
    let scale = T::from_f64(flags.scale);
    let [y] = call.outputs_mut();
    y.real().par_chunks_mut(n).enumerate().for_each(|(row, y)| {
        let a: Vec<T> = (0..k).map(|i| if flags.transpose_a { a[i * m + row] } else { a[row * k + i] }).collect();
        if !flags.accumulate {
            y.fill(T::default());
        }
        if flags.transpose_b {
            for (y, b) in y.iter_mut().zip(b.chunks(k)) {
                *y += scale * dot(&a, b);
            }
        } else {
            for (a, b) in a.iter().zip(b.chunks(n)) {
                add_scaled(y, scale * *a, b);
            }
        }
    });
}

/// y = a·b + t·c
pub fn matmul_sum<T: Real>(call: &mut Call<'_, T>) {
    let [a, b, t, c] = call.inputs else { unreachable!("the shape rule requires four inputs") };
    let n = b.columns();
    let (k, r) = (a.columns(), t.columns());
    let [y] = call.outputs_mut();
    let rows = y.real().par_chunks_mut(n).zip(a.real().par_chunks(k)).zip(t.real().par_chunks(r));
    rows.for_each(|((y, a), t)| {
        y.fill(T::default());
        for (factor, row) in a.iter().zip(b.real().chunks(n)).chain(t.iter().zip(c.real().chunks(n))) {
            add_scaled(y, *factor, row);
        }
    });
}

pub fn sum_rows<T: Real>(call: &mut Call<'_, T>) {
    let accumulate = call.attrs.flag("accumulate").expect("checked by the shape rule");
    let (x, columns) = (call.inputs[0].real(), call.inputs[0].columns());
    let partials: Vec<Vec<T>> = x
        .par_chunks(columns * CHUNK)
        .map(|rows| {
            let mut sum = vec![T::default(); columns];
            rows.chunks(columns).for_each(|row| add_scaled(&mut sum, T::from_f64(1.0), row));
            sum
        })
        .collect();
    let [out] = call.outputs_mut();
    for (column, out) in out.real().iter_mut().enumerate() {
        let total: T = partials.iter().map(|part| part[column]).sum();
        *out = if accumulate { *out + total } else { total };
    }
}
