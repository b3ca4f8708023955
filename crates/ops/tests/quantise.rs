//! Codes of eight bits, exponents and histories against recorded numbers, through the operations that programs run.

mod golden;

use golden::Golden;
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
