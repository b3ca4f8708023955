//! Products with a matrix for each expert, from the definition: every expert by itself, with the codes of dense tensors.

use std::collections::HashMap;

use graph::{Init, Layer, OpId, Origin, ParameterId, Phase};
use ops::evaluate::{Array, evaluate};
use ops::{Append, Emit};
use tensor::packed::{Target, block_scale, nvfp4, reciprocal, tensor_scale};
use tensor::philox::{Purpose, words};
use tensor::small::{Small, amax, e2m1_code, e2m1_code_stochastic};

use super::*;

const SEED: u64 = 0x5eed_0000_0007;
const STEP: i32 = 5;
/// Rows of each expert: none, less than a block, whole blocks, more.
const SIZES: [usize; 5] = [5, 0, 32, 1, 23];
const ROWS: usize = 61;
const K: usize = 32;
const N: [usize; 2] = [48, 16];

/// Multiples of 1/64 that sums of 16 keep exactly, with other magnitudes for every expert.
fn drawn(elements: usize, seed: usize) -> Vec<f32> {
    let mut state = seed as u32 * 747_796_405 + 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 20) as i32 % 257 - 128
    };
    (0..elements).map(|i| (next() * (1 + (i / 512 % 5) as i32)) as f32 / 64.0).collect()
}

fn offsets() -> Vec<usize> {
    SIZES.iter().fold(vec![0], |mut all, size| {
        all.push(all.last().unwrap() + size);
        all
    })
}

/// Codes of a block as code times scale.
fn block(x: &[f32], s: f32, random: Option<[u8; 16]>) -> Vec<f32> {
    let scale = block_scale(amax(x), s);
    let r = reciprocal(scale, 1.0 / s);
    let code = |(i, x): (usize, &f32)| match random {
        Some(random) => e2m1_code_stochastic(x * r, random[i]),
        None => e2m1_code(x * r),
    };
    x.iter().enumerate().map(code).map(|code| Small::E2M1.value(code) * Small::E4M3.value(scale)).collect()
}

/// Values of matrices in blocks of their rows, which share a factor. Random numbers: those of a stream, by the place of the
/// first element of a row of a matrix.
fn in_blocks(
    matrices: &[(&[f32], usize)],
    stream: Option<u32>,
    place: impl Fn(usize, usize) -> usize,
) -> (Vec<Vec<f32>>, f32) {
    let most = matrices.iter().map(|(x, _)| amax(x)).fold(0.0, f32::max);
    let s = tensor_scale(most, Target::Six);
    let of = |(number, (x, columns)): (usize, &(&[f32], usize))| {
        let blocks = x.chunks(16).enumerate().flat_map(|(index, x)| {
            let (row, column) = (16 * index / columns, 16 * index % columns);
            let random = stream.map(|stream| {
                let element = place(number, row) + column;
                let drawn = words(SEED, Purpose::Codes, stream, STEP as u32, (element / 16) as u64);
                std::array::from_fn(|i| drawn[i / 4].to_le_bytes()[i % 4])
            });
            block(x, s, random)
        });
        blocks.collect()
    };
    (matrices.iter().enumerate().map(of).collect(), 1.0 / s)
}

/// Returns sixteen values times diag(σ)·H16/4.
fn rotation(x: [f32; 16]) -> [f32; 16] {
    const NEGATIVE: [usize; 10] = [3, 5, 6, 7, 8, 9, 10, 12, 14, 15];
    let sign = |odd: bool| if odd { -1.0 } else { 1.0 };
    std::array::from_fn(|column| {
        let of = |i: usize| sign((i & column).count_ones() % 2 == 1) * sign(NEGATIVE.contains(&i)) * x[i];
        (0..16).map(of).sum::<f32>() / 4.0
    })
}

/// Columns of the rotated tensors: room for all experts, however rows fall on them.
const WIDTH: usize = (ROWS + 15 * SIZES.len()).next_multiple_of(16);

/// x along its rows' axis: those of an expert fill whole blocks.
fn rotated(x: &[f32], columns: usize) -> Vec<f32> {
    let offsets = offsets();
    let mut y = vec![0.0; columns * WIDTH];
    for (column, y) in y.chunks_mut(WIDTH).enumerate() {
        let mut at = 0;
        for ends in offsets.windows(2) {
            for first in (ends[0]..ends[1]).step_by(16) {
                let of = |i: usize| if first + i < ends[1] { x[(first + i) * columns + column] } else { 0.0 };
                y[at..at + 16].copy_from_slice(&rotation(std::array::from_fn(of)));
                at += 16;
            }
        }
    }
    y
}

/// Returns the ranges of each expert's blocks in a rotated tensor.
fn places() -> Vec<std::ops::Range<usize>> {
    let mut at = 0;
    SIZES
        .map(|size| {
            let from = at;
            at += size.next_multiple_of(16);
            from..at
        })
        .to_vec()
}

/// Two products of the same rows, and those of their gradients; matrices lie one way or the other.
struct Layers {
    graph: Graph,
    given: HashMap<ValueId, Array<f32>>,
    x: Vec<f32>,
    weights: [Vec<f32>; 2],
    gradients: [Vec<f32>; 2],
    /// y, dx, dW of each.
    results: Vec<[ValueId; 3]>,
}

fn layers(transposed: bool) -> Layers {
    let (mut graph, f32) = (Graph::default(), Element::Fixed(DType::F32));
    let (x, groups) = (drawn(ROWS * K, 1), SIZES.len());
    let of_x = graph.add_input("x", f32, vec![1, ROWS, K]);
    let of_offsets = graph.add_input("offsets", Element::I32, vec![groups + 1]);
    let of_step = graph.add_input("micro_step", Element::I32, vec![1]);
    let weights = [0, 1].map(|of| drawn(groups * N[of] * K, 2 + of));
    let gradients = [0, 1].map(|of| drawn(ROWS * N[of], 4 + of).into_iter().map(|x| x / 1024.0).collect::<Vec<f32>>());
    let ints = offsets().into_iter().map(|at| at as i32).collect();
    let mut given = HashMap::from([
        (of_x, Array::Real(x.clone())),
        (of_offsets, Array::Int(ints)),
        (of_step, Array::Int(vec![STEP])),
    ]);
    let mut results = Vec::new();
    let mut nodes = Vec::new();
    for of in 0..2 {
        let shape = if transposed { vec![groups, K, N[of]] } else { vec![groups, N[of], K] };
        let id = graph.add_parameter(&format!("w{of}"), shape.clone(), Init::Ones, DType::F32);
        let weight = graph.parameter(id).value;
        graph.value_mut(weight).element = f32;
        given.insert(weight, Array::Real(weights[of].clone()));
        let dy = graph.add_input(&format!("dy{of}"), f32, vec![1, ROWS, N[of]]);
        given.insert(dy, Array::Real(gradients[of].clone()));
        let attrs = Attrs::new().with("groups", groups);
        let mut emit = |graph: &mut Graph, phase: Phase, op: OpId, inputs: &[ValueId], attrs: Attrs| {
            let mut append = Append::new(graph, phase);
            append.layer = Some(Layer { stack: 0, index: 0 });
            let result = append.emit(op, inputs, attrs)[0];
            nodes.append(&mut append.nodes);
            result
        };
        let [forward, backward] = [transposed, !transposed].map(|turned| attrs.clone().with("transposed", turned));
        let y = emit(&mut graph, Phase::Forward, id::GROUPED_LINEAR, &[of_x, weight, of_offsets], forward);
        let dx = emit(&mut graph, Phase::Backward, id::GROUPED_LINEAR, &[dy, weight, of_offsets], backward);
        let (a, b) = if transposed { (of_x, dy) } else { (dy, of_x) };
        let inputs = [a, b, of_offsets];
        let attrs = attrs.with("shape", shape);
        let dw = emit(&mut graph, Phase::Backward, id::GROUPED_WEIGHT_GRADIENT, &inputs, attrs);
        graph.gradients.push((ParameterId(of as u32), dw));
        results.push([y, dx, dw]);
    }
    nodes.sort_by_key(|node| node.phase != Phase::Forward);
    graph.nodes = nodes;
    Layers { graph, given, x, weights, gradients, results }
}

/// Asserts that numbers are the expected ones, but for the order of sums.
fn assert_near(found: &Array<f32>, expected: &[f32], what: &str) {
    let largest = amax(expected);
    assert!(largest > 0.0 && found.real().len() == expected.len(), "{what}");
    for (index, (found, expected)) in found.real().iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= 1e-5 * largest, "{what}, {index}: {found} is not {expected}");
    }
}

#[test]
fn every_expert_has_the_products_that_it_has_alone() {
    for (transposed, stochastic) in [(false, false), (false, true), (true, true)] {
        let Layers { mut graph, mut given, x, weights, gradients, results } = layers(transposed);
        let groups = groups::find(&graph, "nvfp4", (0, 0), &Machine::cpu(1 << 30, 1)).unwrap();
        assert_eq!((groups.len(), groups[0].members.len()), (1, 2));
        let step = stochastic.then(|| graph.input("micro_step").unwrap());
        let (compute, replaced) = (DType::F32, HashMap::new());
        let mut rewrite =
            Rewrite { graph: &mut graph, compute, seed: SEED, units: false, trains: true, step, replaced };
        rewrite.group(0, &groups[0]);
        rewrite.finish();
        let prepared = std::mem::take(&mut graph.prepared);
        graph.nodes.splice(0..0, prepared);
        for index in 0..graph.values.len() {
            let value = &graph.values[index];
            if matches!(value.origin, Origin::State(_)) {
                given.entry(ValueId(index as u32)).or_insert(Array::Real(Vec::new()));
            }
        }
        let values = evaluate(&graph, &given);

        let (of_x, g_x) = in_blocks(&[(&x, K)], None, |_, _| 0);
        let [side, after] = [0, 1].map(|stream| stochastic.then_some(stream));
        let tensors = [0, 1].map(|of| (gradients[of].as_slice(), N[of]));
        let (dys, g_dy) = in_blocks(&tensors, side, |of, row| row * (N[0] + N[1]) + of * N[0]);
        let turned_x = rotated(&x, K);
        let (turned_x, g_turned_x) = in_blocks(&[(&turned_x, WIDTH)], None, |_, _| 0);
        let turned = [0, 1].map(|of| rotated(&gradients[of], N[of]));
        let turned: Vec<(&[f32], usize)> = turned.iter().map(|of| (of.as_slice(), WIDTH)).collect();
        let (turned, g_turned) = in_blocks(&turned, after, |of, row| (row + of * N[0]) * WIDTH);
        for of in 0..2 {
            let n = N[of];
            let (mut y, mut dx) = (vec![0.0; ROWS * n], vec![0.0; ROWS * K]);
            let mut dw = vec![0.0; SIZES.len() * n * K];
            for (expert, (ends, place)) in offsets().windows(2).zip(places()).enumerate() {
                let matrix = &weights[of][expert * n * K..][..n * K];
                let shape = if transposed { [K, n] } else { [n, K] };
                let matrix = nvfp4(NVFP4_TILES, matrix, &shape, Target::Six).values();
                let w =
                    |row: usize, column: usize| matrix[if transposed { column * n + row } else { row * K + column }];
                for r in ends[0]..ends[1] {
                    for row in 0..n {
                        y[r * n + row] = g_x * (0..K).map(|k| of_x[0][r * K + k] * w(row, k)).sum::<f32>();
                    }
                    for k in 0..K {
                        dx[r * K + k] = g_dy * (0..n).map(|row| dys[of][r * n + row] * w(row, k)).sum::<f32>();
                    }
                }
                for (row, k) in (0..n).flat_map(|row| (0..K).map(move |k| (row, k))) {
                    let term = |at: usize| turned[of][row * WIDTH + at] * turned_x[0][k * WIDTH + at];
                    let at = if transposed { k * n + row } else { row * K + k };
                    dw[expert * n * K + at] = g_turned_x * g_turned * place.clone().map(term).sum::<f32>();
                }
            }
            let what = format!("product {of}, transposed {transposed}, stochastic {stochastic}");
            for (id, (expected, name)) in results[of].iter().zip([(y, "y"), (dx, "dx"), (dw, "dW")]) {
                assert_near(&values[id], &expected, &format!("{name} of {what}"));
            }
        }
    }
}
