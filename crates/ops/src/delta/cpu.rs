//! The reference of the gated delta rule: token by token, as it is written. Its gradients go back from state to state;
//! the states before the tokens of a chunk are recomputed from the one at its start.

use rayon::prelude::*;

use super::{CHUNK, Extents, additive, scale};
use crate::call::{Call, Input};
use crate::real::Real;
use crate::vector::{Loop, vectorised};

/// The operands of one head, its tokens one after another.
pub(super) struct Head<T> {
    key_dim: usize,
    value_dim: usize,
    additive: bool,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    /// e^g, 0 where a document starts.
    decay: Vec<T>,
    beta: Vec<T>,
}

/// Rows of head `head` in row `row` of the batch, of an operand [B, T, heads, columns].
fn rows_of<T: Real>(x: &[T], [row, tokens, heads, head, columns]: [usize; 5]) -> Vec<T> {
    let at = |t: usize| ((row * tokens + t) * heads + head) * columns;
    (0..tokens).flat_map(|t| &x[at(t)..at(t) + columns]).copied().collect()
}

impl<T: Real> Head<T> {
    /// Reads head `head` of row `row`; queries times `scale`, and whether values are only added. `begins`: true if the state is empty before a token, from
    /// its place in the row and the operand after `beta`.
    pub fn of(
        inputs: &[Input<'_, T>],
        e: &Extents,
        [row, head]: [usize; 2],
        begins: fn(usize, i32) -> bool,
        (scale, additive): (T, bool),
    ) -> Head<T> {
        let key_head = head / (e.heads / e.key_heads);
        let of_key = |x: &Input<'_, T>| rows_of(x.real(), [row, e.tokens, e.key_heads, key_head, e.key_dim]);
        let of_value = |x: &Input<'_, T>, columns: usize| rows_of(x.real(), [row, e.tokens, e.heads, head, columns]);
        let starts = &inputs[5].int()[row * e.tokens..(row + 1) * e.tokens];
        let decay = of_value(&inputs[3], 1).into_iter().zip(starts).enumerate();
        Head {
            key_dim: e.key_dim,
            value_dim: e.value_dim,
            additive,
            q: of_key(&inputs[0]).into_iter().map(|q| q * scale).collect(),
            k: of_key(&inputs[1]),
            v: of_value(&inputs[2], e.value_dim),
            decay: decay.map(|(t, (g, start))| if begins(t, *start) { T::default() } else { g.exp() }).collect(),
            beta: of_value(&inputs[4], 1),
        }
    }

    fn key(&self, t: usize) -> &[T] {
        &self.k[t * self.key_dim..][..self.key_dim]
    }

    fn query(&self, t: usize) -> &[T] {
        &self.q[t * self.key_dim..][..self.key_dim]
    }

    fn value(&self, t: usize) -> &[T] {
        &self.v[t * self.value_dim..][..self.value_dim]
    }

    /// S ← decay·S; returns v − kᵀS, or v where it is only added.
    fn miss(&self, t: usize, state: &mut [T]) -> Vec<T> {
        if self.additive {
            vectorised(Decay, (state, self.decay[t]));
            return self.value(t).to_vec();
        }
        vectorised(Miss, (state, self.decay[t], self.key(t), self.value(t)))
    }

    /// S ← S + k·(beta·miss)
    fn correct(&self, t: usize, miss: &[T], state: &mut [T]) {
        vectorised(AddOuter, (state, self.key(t), miss, self.beta[t]));
    }

    fn zeros(&self) -> Vec<T> {
        vec![T::default(); self.key_dim * self.value_dim]
    }

    /// Returns the results of the first `tokens` tokens, and takes the state from the one before them to the one after
    /// them.
    pub fn forward(&self, tokens: usize, state: &mut [T]) -> Vec<T> {
        let mut o = Vec::with_capacity(tokens * self.value_dim);
        for t in 0..tokens {
            let miss = self.miss(t, state);
            self.correct(t, &miss, state);
            o.extend(vectorised(Product, (&*state, self.query(t), self.value_dim)));
        }
        o
    }
}

/// S ← decay·S for a state S [DK, DV].
struct Decay;

impl<'a, T: Real> Loop<(&'a mut [T], T)> for Decay {
    type Output = ();

    #[inline(always)]
    fn run((state, decay): (&'a mut [T], T)) {
        // Not 0·S where nothing is left: S may be infinite.
        state.iter_mut().for_each(|s| *s = if decay == T::default() { decay } else { decay * *s });
    }
}

/// S ← decay·S for a state S [DK, DV]; v − kᵀS.
struct Miss;

impl<'a, T: Real> Loop<(&'a mut [T], T, &'a [T], &'a [T])> for Miss {
    type Output = Vec<T>;

    #[inline(always)]
    fn run((state, decay, k, v): (&'a mut [T], T, &'a [T], &'a [T])) -> Vec<T> {
        let mut miss = v.to_vec();
        for (row, k) in state.chunks_exact_mut(v.len()).zip(k) {
            for (s, miss) in row.iter_mut().zip(&mut miss) {
                // Not 0·S where nothing is left: S may be infinite.
                *s = if decay == T::default() { decay } else { decay * *s };
                *miss -= *k * *s;
            }
        }
        miss
    }
}

/// S ← S + a·(factor·b)ᵀ
struct AddOuter;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T], &'a [T], T)> for AddOuter {
    type Output = ();

    #[inline(always)]
    fn run((state, a, b, factor): (&'a mut [T], &'a [T], &'a [T], T)) {
        for (row, a) in state.chunks_exact_mut(b.len()).zip(a) {
            for (s, b) in row.iter_mut().zip(b) {
                *s += *a * (factor * *b);
            }
        }
    }
}

/// The product aᵀS of a vector and a state.
struct Product;

impl<'a, T: Real> Loop<(&'a [T], &'a [T], usize)> for Product {
    type Output = Vec<T>;

    #[inline(always)]
    fn run((state, a, columns): (&'a [T], &'a [T], usize)) -> Vec<T> {
        let mut sums = vec![T::default(); columns];
        for (row, a) in state.chunks_exact(columns).zip(a) {
            for (s, sum) in row.iter().zip(&mut sums) {
                *sum += *a * *s;
            }
        }
        sums
    }
}

/// y ← y + factor·S·b for a state S [DK, DV].
struct AddProduct;

impl<'a, T: Real> Loop<(&'a mut [T], &'a [T], &'a [T], T)> for AddProduct {
    type Output = ();

    #[inline(always)]
    fn run((y, state, b, factor): (&'a mut [T], &'a [T], &'a [T], T)) {
        for (y, row) in y.iter_mut().zip(state.chunks_exact(b.len())) {
            *y += factor * crate::vector::dot(row, b);
        }
    }
}

/// True if a document that starts at `start` starts with token `t`.
fn starts_there(t: usize, start: i32) -> bool {
    start as usize == t
}

pub fn forward<T: Real>(call: &mut Call<'_, T>) {
    let e = Extents::of(call.inputs[1].shape, call.inputs[2].shape);
    let scale = T::from_f64(scale(call.attrs, e.key_dim).expect("checked by the shape rule"));
    let (inputs, additive) = (call.inputs, additive(call.attrs));
    let of_head = |at: usize| {
        let head = Head::of(inputs, &e, [at / e.heads, at % e.heads], starts_there, (scale, additive));
        head.forward(e.tokens, &mut head.zeros())
    };
    let heads: Vec<Vec<T>> = (0..e.batch * e.heads).into_par_iter().map(of_head).collect();
    let [o] = call.outputs_mut();
    write(o.real(), |at| heads[at].as_slice(), e.heads, e.tokens, e.value_dim);
}

/// Results of all heads of all rows, [columns] for each token, into an operand [B, T, heads, columns].
pub(super) fn write<'a, T: Real>(
    to: &mut [T],
    of_head: impl Fn(usize) -> &'a [T],
    heads: usize,
    tokens: usize,
    columns: usize,
) {
    for (at, to) in to.chunks_mut(columns).enumerate() {
        let (row, t, head) = (at / heads / tokens, at / heads % tokens, at % heads);
        to.copy_from_slice(&of_head(row * heads + head)[t * columns..][..columns]);
    }
}

/// Gradients of one head's operands.
struct HeadGradients<T> {
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
    dg: Vec<T>,
    dbeta: Vec<T>,
}

impl<T: Real> Head<T> {
    fn tokens(&self) -> usize {
        self.beta.len()
    }

    /// Returns the state before the first token of every chunk.
    fn states(&self) -> Vec<Vec<T>> {
        let (mut state, mut states) = (self.zeros(), Vec::new());
        for t in 0..self.tokens() {
            if t.is_multiple_of(CHUNK) {
                states.push(state.clone());
            }
            let miss = self.miss(t, &mut state);
            self.correct(t, &miss, &mut state);
        }
        states
    }

    fn gradients(&self, d_o: &[T], scale: T) -> HeadGradients<T> {
        let zeros = |of: &[T]| vec![T::default(); of.len()];
        let [dq, dk, dv, dg, dbeta] = [&self.q, &self.k, &self.v, &self.beta, &self.beta].map(|of| zeros(of));
        let mut result = HeadGradients { dq, dk, dv, dg, dbeta };
        let mut d_state = self.zeros();
        for (chunk, mut state) in self.states().into_iter().enumerate().rev() {
            let tokens = chunk * CHUNK..self.tokens().min((chunk + 1) * CHUNK);
            let mut decayed = Vec::with_capacity(tokens.len());
            for t in tokens.clone() {
                let miss = self.miss(t, &mut state);
                decayed.push((state.clone(), miss.clone()));
                self.correct(t, &miss, &mut state);
            }
            for (t, (decayed, miss)) in tokens.zip(decayed).rev() {
                self.back(
                    t,
                    (decayed, miss),
                    &d_o[t * self.value_dim..][..self.value_dim],
                    scale,
                    &mut d_state,
                    &mut result,
                );
            }
        }
        result
    }

    /// Goes back over one token: from the gradient of the state after it to that of the state before it. `decayed`: the
    /// state that is corrected, and what it misses.
    fn back(
        &self,
        t: usize,
        (decayed, miss): (Vec<T>, Vec<T>),
        d_o: &[T],
        scale: T,
        d_state: &mut [T],
        result: &mut HeadGradients<T>,
    ) {
        let (one, (k, beta)) = (T::from_f64(1.0), (self.key(t), self.beta[t]));
        let mut state = decayed.clone();
        self.correct(t, &miss, &mut state);
        vectorised(AddProduct, (&mut result.dq[t * self.key_dim..][..self.key_dim], state.as_slice(), d_o, scale));
        vectorised(AddOuter, (&mut *d_state, self.query(t), d_o, one));
        // The correction is beta·miss.
        let d_correction = vectorised(Product, (&*d_state, k, self.value_dim));
        let dk = &mut result.dk[t * self.key_dim..][..self.key_dim];
        vectorised(AddProduct, (&mut *dk, &*d_state, miss.as_slice(), beta));
        result.dbeta[t] = crate::vector::dot(&d_correction, &miss);
        if !self.additive {
            vectorised(AddProduct, (dk, decayed.as_slice(), d_correction.as_slice(), -beta));
            vectorised(AddOuter, (&mut *d_state, k, d_correction.as_slice(), -beta));
        }
        let dv = &mut result.dv[t * self.value_dim..][..self.value_dim];
        dv.iter_mut().zip(&d_correction).for_each(|(dv, d)| *dv = beta * *d);
        result.dg[t] = crate::vector::dot(d_state, &decayed);
        vectorised(Decay, (d_state, self.decay[t]));
    }
}

pub fn backward<T: Real>(call: &mut Call<'_, T>) {
    let e = Extents::of(call.inputs[1].shape, call.inputs[2].shape);
    let scale = T::from_f64(scale(call.attrs, e.key_dim).expect("checked by the shape rule"));
    let (inputs, group, additive) = (call.inputs, e.heads / e.key_heads, additive(call.attrs));
    let of_key_head = |at: usize| {
        let (row, key_head) = (at / e.key_heads, at % e.key_heads);
        let of_head = |head: usize| {
            let d_o = rows_of(inputs[6].real(), [row, e.tokens, e.heads, head, e.value_dim]);
            Head::of(inputs, &e, [row, head], starts_there, (scale, additive)).gradients(&d_o, scale)
        };
        (key_head * group..(key_head + 1) * group).map(of_head).collect::<Vec<_>>()
    };
    let heads: Vec<HeadGradients<T>> =
        (0..e.batch * e.key_heads).into_par_iter().map(of_key_head).collect::<Vec<_>>().into_iter().flatten().collect();
    let shared = |of: fn(&HeadGradients<T>) -> &[T]| -> Vec<Vec<T>> {
        let sum = |heads: &[HeadGradients<T>]| {
            let mut sum = of(&heads[0]).to_vec();
            for head in &heads[1..] {
                sum.iter_mut().zip(of(head)).for_each(|(sum, x)| *sum += *x);
            }
            sum
        };
        heads.chunks(group).map(sum).collect()
    };
    let (of_q, of_k) = (shared(|head| &head.dq), shared(|head| &head.dk));
    let [dq, dk, dv, dg, dbeta] = call.outputs_mut();
    write(dq.real(), |at| of_q[at].as_slice(), e.key_heads, e.tokens, e.key_dim);
    write(dk.real(), |at| of_k[at].as_slice(), e.key_heads, e.tokens, e.key_dim);
    write(dv.real(), |at| heads[at].dv.as_slice(), e.heads, e.tokens, e.value_dim);
    write(dg.real(), |at| heads[at].dg.as_slice(), e.heads, e.tokens, 1);
    write(dbeta.real(), |at| heads[at].dbeta.as_slice(), e.heads, e.tokens, 1);
}
