//! Codes of eight bits, exponents and histories against recorded numbers, through the operations that programs run.

use crate::golden::Golden;
use ops::evaluate::{Array, apply};
use tensor::{Attrs, HostTensor};

const FILE: &str = "precision/ops.safetensors";

fn ints(golden: &Golden, name: &str) -> Vec<i32> {
    golden.bytes(name).chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}

fn real(array: &Array<f32>) -> &[f32] {
    match array {
        Array::Real(values) => values,
        _ => panic!("numbers were expected"),
    }
}

fn run(op: &str, attrs: &Attrs, inputs: &[(&[usize], &Array<f32>)], outputs: &mut [(Vec<usize>, Array<f32>)]) {
    apply(ops::find(op).unwrap(), attrs, inputs, outputs);
}

/// The exponent of a power of two.
fn exponent(factor: f32) -> i32 {
    assert_eq!(factor.to_bits() & 0x007f_ffff, 0, "{factor} is a power of two");
    (factor.to_bits() >> 23) as i32 - 127
}

#[test]
fn tensors_have_the_recorded_codes() {
    let golden = Golden::open(FILE);
    for (name, format, top) in [("e4m3", "e4m3", 7), ("e5m2", "e5m2", 11), ("e4m3_weight", "e4m3", 8)] {
        let x = Array::Real(golden.f32(&format!("{name}.x")));
        let (shape, columns) = ([48, 96], 96);
        let mut parts = [(vec![1, ops::quantise::PARTS], Array::Real(vec![9.0; ops::quantise::PARTS]))];
        run("own_amax", &Attrs::new(), &[(&shape, &x)], &mut parts);
        let dtype = format.parse().unwrap();
        for (kept, k, codes) in [(false, "k", "codes"), (true, "saturating_k", "saturating_codes")] {
            let k = ints(&golden, &format!("{name}.{k}"))[0];
            let factor = Array::Real(vec![2f32.powi(k)]);
            let mut outputs = vec![
                (shape.to_vec(), Array::Real(vec![0.0; 48 * columns])),
                (vec![1], Array::Real(vec![0.0])),
                (vec![columns, 48], Array::Real(vec![0.0; 48 * columns])),
            ];
            let attrs =
                Attrs::new().with("format", format).with("top", top).with("transposed", true).with("factor", kept);
            let inputs = [(&shape[..], &x), (&parts[0].0[..], &parts[0].1), (&[1][..], &factor)];
            run("quantise", &attrs, &inputs[..2 + usize::from(kept)], &mut outputs);
            let stored =
                |at: usize| HostTensor::from_f32(outputs[at].0.clone(), real(&outputs[at].1)).cast(dtype).bytes;
            let expected = golden.bytes(&format!("{name}.{codes}"));
            assert!(stored(0) == expected, "{name}.{codes}");
            let turned = stored(2);
            let same = |i: usize| turned[i % columns * 48 + i / columns] == expected[i];
            assert!((0..48 * columns).all(same), "{name}.{codes} transposed");
            assert_eq!(exponent(real(&outputs[1].1)[0]), -k, "{name}");
            if !kept {
                let codes = Array::Real(HostTensor::new(dtype, shape, expected.to_vec()).to_f32());
                let mut numbers = [(shape.to_vec(), Array::Real(vec![0.0; 48 * columns]))];
                run("decode", &Attrs::new(), &[(&shape, &codes), (&[1], &outputs[1].1)], &mut numbers);
                assert_eq!(real(&numbers[0].1), golden.f32(&format!("{name}.value")), "{name}.value");
            }
        }
    }
}

/// Half of the smallest E4M3 number is the largest that becomes 0. What is 0 itself counts nowhere, and nothing is counted
/// where a factor is known.
#[test]
fn numbers_that_become_zero_are_counted() {
    // The largest magnitude gives 2^7: 2^-17 is on the border.
    let border = 2f32.powi(-17);
    let above = f32::from_bits(border.to_bits() + 1);
    let row = [1.75, border, -border, above, -above, 1e-30, 0.0, -0.0];
    let values = [row, [1.0; 8]].concat();
    let x = Array::Real(values);
    let parts = (vec![1, ops::quantise::PARTS], Array::Real(vec![1.75; ops::quantise::PARTS]));
    for (known, nonzero, flushed) in [(0.0, 14.0, 3.0), (128.0, 0.0, 0.0)] {
        let factor = Array::Real(vec![known]);
        let single = |value: f32| (vec![1], Array::Real(vec![value]));
        let mut outputs = vec![(vec![1, 16], Array::Real(vec![0.0; 16])), single(0.0), single(0.0)];
        // Added to what was counted before.
        outputs.extend([single(100.0), single(10.0)]);
        let attrs = Attrs::new().with("format", "e4m3").with("top", 7).with("factor", true);
        let attrs = attrs.with("record", true).with("count", true);
        let inputs = [(&[1, 16][..], &x), (&parts.0[..], &parts.1), (&[1][..], &factor)];
        run("quantise", &attrs, &inputs, &mut outputs);
        let codes = HostTensor::from_f32([16], real(&outputs[0].1)).cast(tensor::DType::E4M3).to_f32();
        assert_eq!(codes.iter().filter(|x| **x == 0.0).count(), 5, "{codes:?}");
        assert_eq!([real(&outputs[3].1)[0], real(&outputs[4].1)[0]], [100.0 + nonzero, 10.0 + flushed], "{known}");
    }
}

#[test]
fn histories_are_the_recorded_ones() {
    let golden = Golden::open(FILE);
    let amax = golden.f32("delayed.amax");
    let (steps, micro_steps, quantisers) = (14, 3, 6);
    assert_eq!(amax.len(), steps * micro_steps * quantisers);
    let limits = Array::Real(vec![448.0; quantisers]);
    let tops = Array::Int(vec![7; quantisers]);
    for window in [0, 1, 3, 1024] {
        let expected = ints(&golden, &format!("delayed.k.window_{window}"));
        let columns = window.max(1);
        let zeros = |shape: &[usize]| (shape.to_vec(), Array::Real(vec![0.0; shape.iter().product()]));
        let mut state = vec![
            zeros(&[quantisers]),
            zeros(&[quantisers, columns]),
            zeros(&[quantisers]),
            (vec![1], Array::Int(vec![0])),
            zeros(&[1]),
            zeros(&[1]),
        ];
        for step in 0..steps {
            let factors = real(&state[2].1).to_vec();
            for micro_step in 0..micro_steps {
                for q in 0..quantisers {
                    let at = (step * micro_steps + micro_step) * quantisers + q;
                    let own = tensor::small::scaling_exponent(amax[at], 7);
                    let k = if factors[q] == 0.0 { own } else { exponent(factors[q]) };
                    assert_eq!(k, expected[at], "window {window}, step {step}.{micro_step}, quantiser {q}");
                    let Array::Real(kept) = &mut state[0].1 else { unreachable!("magnitudes are numbers") };
                    kept[q] = kept[q].max(amax[at]);
                }
            }
            let attrs = Attrs::new().with("quantisers", quantisers).with("window", window);
            run("amax_history", &attrs, &[(&[quantisers], &limits), (&[quantisers], &tops)], &mut state);
        }
        if window > 0 {
            let recorded = golden.f32(&format!("delayed.history.window_{window}"));
            let width = recorded.len() / quantisers;
            for (row, expected) in real(&state[1].1).chunks(columns).zip(recorded.chunks(width)) {
                let found: Vec<f32> = row[..width].iter().map(|x| if *x > 0.0 { *x } else { -1.0 }).collect();
                assert_eq!(found, expected, "window {window}");
                assert!(row[width..].iter().all(|x| *x == 0.0));
            }
        }
    }
}

/// Bytes of a packed tensor as the recordings have them: a code to a byte, then the scales.
fn unpacked(packing: tensor::storage::Packing, shape: &[usize], bytes: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let planes = packing.planes(shape);
    let codes = bytes[..planes.codes.bytes].iter().flat_map(|pair| [pair & 15, pair >> 4]).collect();
    (codes, bytes[planes.scales.offset..][..planes.scales.bytes].to_vec())
}

#[test]
fn codes_of_four_bits_are_the_recorded_ones() {
    let golden = Golden::open(FILE);
    let shape = [48, 64];
    let x = Array::Real(golden.f32("nv.x"));
    let mut parts = [(vec![1, ops::quantise::PARTS], Array::Real(vec![0.0; ops::quantise::PARTS]))];
    run("own_amax", &Attrs::new(), &[(&shape, &x)], &mut parts);
    for (name, tiles) in [("rows", false), ("tiles", true)] {
        let packing = if tiles { tensor::storage::NVFP4_TILES } else { tensor::storage::NVFP4 };
        let bytes = packing.bytes(&shape);
        let mut outputs = vec![(vec![bytes], Array::Byte(vec![9; bytes])), (vec![1], Array::Real(vec![0.0]))];
        let inputs = [(&shape[..], &x), (&parts[0].0[..], &parts[0].1)];
        run("quantise_blocks", &Attrs::new().with("tiles", tiles), &inputs, &mut outputs);
        let Array::Byte(packed) = &outputs[0].1 else { panic!("bytes were expected") };
        let (codes, scales) = unpacked(packing, &shape, packed);
        assert!(codes == golden.bytes(&format!("nv.{name}.codes")), "{name}: codes");
        assert!(scales == golden.bytes(&format!("nv.{name}.scales")), "{name}: scales");
        assert_eq!(real(&outputs[1].1), golden.f32(&format!("nv.{name}.g")), "{name}: g");
        let mut values = [(shape.to_vec(), Array::Real(vec![0.0; 48 * 64]))];
        let attrs = ops::dequantise::attributes(packing, &shape);
        run("dequantise", &attrs.clone().with("unscaled", true), &[(&[bytes], &outputs[0].1)], &mut values);
        let g = real(&outputs[1].1)[0];
        let scaled: Vec<f32> = real(&values[0].1).iter().map(|x| x * g).collect();
        assert_eq!(scaled, golden.f32(&format!("nv.{name}.value")), "{name}: values");
        let narrow = |x: f32| tensor::bf16_to_f32(tensor::f32_to_bf16(x)) == x;
        assert!(real(&values[0].1).iter().all(|x| narrow(*x)), "code·scale is a bf16 number");
    }
}

/// Units of four bits get the recorded codes and scales, each where they look for it, and zeros beyond the matrix: with
/// `transposed` those of the transpose.
#[test]
fn operands_of_units_have_the_recorded_codes_and_scales() {
    use tensor::packed::operand;
    let golden = Golden::open(FILE);
    // 48 rows make a tile of scales that is not full, 48 columns of the transpose a row of codes that is filled up.
    let (rows, columns) = (48, 64);
    let x = Array::Real(golden.f32("nv.x"));
    let mut parts = [(vec![1, ops::quantise::PARTS], Array::Real(vec![0.0; ops::quantise::PARTS]))];
    run("own_amax", &Attrs::new(), &[(&[rows, columns], &x)], &mut parts);
    for (name, tiles, transposed) in [("rows", false, false), ("tiles", true, false), ("tiles", true, true)] {
        let (codes, scales) = (golden.bytes(&format!("nv.{name}.codes")), golden.bytes(&format!("nv.{name}.scales")));
        let (high, wide) = if transposed { (columns, rows) } else { (rows, columns) };
        let (line, blocks) = (operand::width(wide) / 2, operand::width(wide) / operand::BLOCK);
        let bytes = operand::scale_bytes(high, blocks);
        let filled = |shape: Vec<usize>| (shape.clone(), Array::Byte(vec![9; shape.iter().product()]));
        let mut outputs = vec![filled(vec![high, line]), filled(vec![bytes]), (vec![1], Array::Real(vec![0.0]))];
        let inputs = [(&[rows, columns][..], &x), (&parts[0].0[..], &parts[0].1)];
        let attrs = Attrs::new().with("tiles", tiles).with("operand", true).with("transposed", transposed);
        run("quantise_blocks", &attrs, &inputs, &mut outputs);
        let [Array::Byte(found), Array::Byte(found_scales)] = [&outputs[0].1, &outputs[1].1] else { panic!("bytes") };
        let (mut expected, mut expected_scales) = (vec![0; high * line], vec![0; bytes]);
        let height = if tiles { operand::BLOCK } else { 1 };
        for (row, column) in (0..high).flat_map(|row| (0..wide).map(move |column| (row, column))) {
            let (r, c) = if transposed { (column, row) } else { (row, column) };
            expected[row * line + column / 2] |= codes[r * columns + c] << (4 * (column % 2));
            let at = operand::scale_at(row, column / operand::BLOCK, blocks);
            expected_scales[at] = scales[r / height * (columns / operand::BLOCK) + c / operand::BLOCK];
        }
        assert!(*found == expected, "{name} {transposed}: codes");
        assert!(*found_scales == expected_scales, "{name} {transposed}: scales");
        assert_eq!(real(&outputs[2].1), golden.f32(&format!("nv.{name}.g")), "{name} {transposed}: g");
    }
}

#[test]
fn rotations_are_the_recorded_ones() {
    let golden = Golden::open(FILE);
    let x = Array::Real(golden.f32("nv.x"));
    let mut y = [(vec![64, 48], Array::Real(vec![9.0; 48 * 64]))];
    run("rotate", &Attrs::new(), &[(&[48, 64], &x)], &mut y);
    assert_eq!(real(&y[0].1), golden.f32("nv.rht.f32"));
    let rounded = HostTensor::from_f32(vec![64, 48], real(&y[0].1)).cast(tensor::DType::BF16);
    assert!(rounded.bytes == golden.bytes("nv.rht.bf16"));
    let mut one = [0.0; 256];
    for i in 0..16 {
        let mut unit = vec![0.0; 16];
        unit[i] = 1.0;
        let mut row = [(vec![1, 16], Array::Real(vec![0.0; 16]))];
        run("rotate", &Attrs::new(), &[(&[16, 1], &Array::Real(unit))], &mut row);
        one[i * 16..][..16].copy_from_slice(real(&row[0].1));
    }
    assert_eq!(one.to_vec(), golden.f32("nv.rht.matrix"));
}

#[test]
fn stochastic_codes_are_the_recorded_ones() {
    use tensor::packed::{Target, block_scale, reciprocal, tensor_scale};
    let golden = Golden::open(FILE);
    let (x, bytes) = (golden.f32("nv.x"), golden.bytes("nv.sr.bytes").to_vec());
    let s = tensor_scale(tensor::small::amax(&x), Target::Six);
    let codes = x.chunks(16).zip(bytes.chunks(16)).flat_map(|(x, random)| {
        let r = reciprocal(block_scale(tensor::small::amax(x), s), 1.0 / s);
        let code = move |(x, random): (&f32, &u8)| tensor::small::e2m1_code_stochastic(x * r, *random);
        x.iter().zip(random).map(code).collect::<Vec<u8>>()
    });
    assert!(codes.collect::<Vec<u8>>() == golden.bytes("nv.sr.codes"));
    let drawn = (0..63).flat_map(|block| {
        let of = tensor::philox::words(0x1234_5678_90AB_CDEF, tensor::philox::Purpose::Codes, 7, 3, block);
        of.into_iter().flat_map(u32::to_le_bytes)
    });
    assert!(drawn.take(1000).collect::<Vec<u8>>() == golden.bytes("philox.bytes"));
    // A piece of a matrix has the random bytes of its place there.
    let whole = stochastic(&x, [48, 64], [0, 64]);
    let piece: Vec<f32> = x.chunks(64).skip(16).flat_map(|row| row[32..48].to_vec()).collect();
    let expected: Vec<u8> = whole.chunks(64).skip(16).flat_map(|row| row[32..48].to_vec()).collect();
    assert!(stochastic(&piece, [32, 16], [16 * 64 + 32, 64]) == expected);
    assert!(stochastic(&piece, [32, 16], [0, 64]) != expected);
}

/// Codes of a piece of `nv.x`, whose largest magnitude scales it.
fn stochastic(x: &[f32], shape: [usize; 2], [first, width]: [usize; 2]) -> Vec<u8> {
    let most = tensor::small::amax(&Golden::open(FILE).f32("nv.x"));
    let (parts, step) = (Array::Real(vec![most; ops::quantise::PARTS]), Array::Int(vec![5]));
    let bytes = tensor::storage::NVFP4.bytes(&shape);
    let mut outputs = vec![(vec![bytes], Array::Byte(vec![9; bytes])), (vec![1], Array::Real(vec![0.0]))];
    let attrs = Attrs::new().with("stream", 3).with("seed", 11).with("first", first).with("width", width);
    let x = Array::Real(x.to_vec());
    let inputs = [(&shape[..], &x), (&[1, ops::quantise::PARTS][..], &parts), (&[1][..], &step)];
    run("quantise_blocks", &attrs, &inputs, &mut outputs);
    let Array::Byte(packed) = &outputs[0].1 else { panic!("bytes were expected") };
    unpacked(tensor::storage::NVFP4, &shape, packed).0
}
