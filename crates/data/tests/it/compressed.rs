//! Weights in the number formats of compressed-tensors against files that the package wrote: scales, zero points and codes to
//! the bit. The full set next to the checkout, or the repository's trimmed one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use data::quantised::{Layout, Scheme};
use data::safetensors::{PlacedWriter, RawTensor, Weights};
use serde_json::{Value, json};
use tensor::compressed::{Codes, Extent, Form, Range, global_scale};
use tensor::{DType, HostTensor};

/// Type, shape and bytes of each tensor of a file, also of types that the engine has no name for.
type Raw = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

fn raw(path: &Path) -> Raw {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    let of = |(name, entry): (&String, &Value)| {
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let shape = entry["shape"].as_array().unwrap().iter().map(number).collect();
        let [begin, end] = [0, 1].map(|index| start + number(&entry["data_offsets"][index]));
        (name.clone(), (entry["dtype"].as_str().unwrap().to_owned(), shape, bytes[begin..end].to_vec()))
    };
    header.iter().filter(|(name, _)| *name != "__metadata__").map(of).collect()
}

fn formats() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let full = root.join("../shared/golden/compress/formats");
    if full.is_dir() { full } else { root.join("tests/golden/compress/formats") }
}

const fn int(bits: u32, symmetric: bool) -> Codes {
    Codes::Int { bits, symmetric }
}

/// Name of the file, form, and whether whole numbers are packed.
const SCHEMES: [(&str, Codes, Extent, bool); 15] = [
    ("fp8_dynamic", Codes::Fp8, Extent::Row, false),
    ("fp8_static", Codes::Fp8, Extent::Tensor, false),
    ("fp8_block128", Codes::Fp8, Extent::Tile(128, 128), false),
    ("fp8_block32", Codes::Fp8, Extent::Tile(32, 32), false),
    ("int8_w8a8", int(8, true), Extent::Row, false),
    ("w4a16_g128", int(4, true), Extent::Group(128), true),
    ("w4a16_g32", int(4, true), Extent::Group(32), true),
    ("w4a16_channel", int(4, true), Extent::Row, true),
    ("w4a16_asym_g128", int(4, false), Extent::Group(128), true),
    ("w4a16_asym_g32", int(4, false), Extent::Group(32), true),
    ("w4a16_asym_channel", int(4, false), Extent::Row, true),
    ("w8a16_g128", int(8, true), Extent::Group(128), true),
    ("w8a16_channel", int(8, true), Extent::Row, true),
    ("nvfp4a16", Codes::Nvfp4, Extent::Group(16), true),
    ("mxfp4a16", Codes::Mxfp4, Extent::Group(32), true),
];

/// Matrices that share the scale of scales of NVFP4.
const FUSED: [&[&str]; 3] = [
    &["attn.q_proj", "attn.k_proj", "attn.v_proj"],
    &["experts.0.gate_proj", "experts.0.up_proj"],
    &["experts.1.gate_proj", "experts.1.up_proj"],
];

fn weight(inputs: &Weights, case: &str, dtype: DType) -> (HostTensor, Vec<f32>) {
    let weight = inputs.get(case).unwrap().to_host().unwrap().cast(dtype);
    let values = weight.to_f32();
    (weight, values)
}

#[test]
fn scales_zero_points_and_codes_are_those_of_the_package() {
    let inputs = Weights::open(&formats().join("inputs.safetensors")).unwrap();
    for (scheme, codes, extent, packed) in SCHEMES {
        let path = formats().join(format!("{scheme}.safetensors"));
        let recorded = raw(&path);
        let mut compared = 0;
        for (case, dtype) in inputs.names().into_iter().flat_map(|case| [(case, DType::F32), (case, DType::BF16)]) {
            let stem = format!("{case}.{}", dtype.name());
            let has_own = recorded.keys().any(|name| name.starts_with(&format!("{stem}.weight")));
            if case.starts_with("x.") || !has_own {
                continue;
            }
            let (tensor, x) = weight(&inputs, case, dtype);
            let shape = [tensor.shape[0], tensor.shape[1]];
            let together = FUSED.into_iter().find(|of| codes == Codes::Nvfp4 && of.contains(&case)).unwrap_or(&[]);
            let whole = together.iter().map(|other| Range::of(&weight(&inputs, other, dtype).1));
            let whole = whole.fold(Range::of(&x), Range::with);
            let form = Form { codes, extent };
            let scales = form.scales(&x, shape[1], dtype, whole);
            let made = form.encode(&x, shape[1], &scales);
            let layout = Layout { form, packed, dtype };
            let parts = layout.bytes(shape, &made, &scales, global_scale(whole.magnitude(), dtype));
            let is_half = dtype == DType::BF16 && matches!(codes, Codes::Int { .. } | Codes::Fp8);
            for (tensor, bytes) in layout.tensors(&stem, shape).into_iter().zip(parts) {
                let (dtype, shape, expected) = &recorded[&tensor.name];
                assert_eq!((dtype.as_str(), shape), (tensor.dtype, &tensor.shape), "{scheme} {}", tensor.name);
                assert_eq!(tensor.bytes, bytes.len(), "{scheme} {}", tensor.name);
                // The package divides bf16 weights in bf16 on CPUs: its codes differ by a step where ours are of a division in f32.
                let are_codes = tensor.name.ends_with("weight") || tensor.name.ends_with("weight_packed");
                if is_half && are_codes {
                    let pairs = || bytes.iter().zip(expected);
                    let same = pairs().filter(|(a, b)| a == b).count();
                    // Codes of eight bits reach so far that every eighth may be a step away, and none is further.
                    let (share, step) =
                        if matches!(codes, Codes::Int { bits: 4, .. }) { (90, u8::MAX) } else { (85, 1) };
                    let is_near = |a: u8, b: u8| a.wrapping_sub(b) <= step || b.wrapping_sub(a) <= step;
                    assert!(same * 100 >= bytes.len() * share, "{scheme} {}: {same} of {}", tensor.name, bytes.len());
                    assert!(pairs().all(|(a, b)| is_near(*a, *b)), "{scheme} {}", tensor.name);
                } else {
                    assert!(
                        bytes == *expected || are_codes && signless(&bytes) == signless(expected),
                        "{scheme} {}",
                        tensor.name
                    );
                }
                compared += 1;
            }
            let values = form.decode(&made, shape[1], &scales);
            if let Some((_, _, dequant)) = recorded.get(&format!("{stem}.dequant")).filter(|_| dtype == DType::F32) {
                let read: Vec<f32> =
                    dequant.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
                assert!(values == read, "{scheme} {case}: values");
            }
        }
        assert!(compared >= 4, "{scheme}: {compared} tensors");
    }
}

/// Codes of E2M1 without the sign of a zero.
fn signless(codes: &[u8]) -> Vec<u8> {
    let plain = |code: u8| if code == 8 { 0 } else { code };
    codes.iter().map(|pair| plain(pair & 15) | plain(pair >> 4) << 4).collect()
}

/// A folder with a weight in a form, and how `config.json` speaks of it.
fn folder(layout: Layout, x: &[f32], shape: [usize; 2]) -> (tempfile::TempDir, Vec<f32>) {
    let scales = layout.form.scales(x, shape[1], layout.dtype, Range::of(x));
    let codes = layout.form.encode(x, shape[1], &scales);
    let parts = layout.bytes(shape, &codes, &scales, global_scale(Range::of(x).magnitude(), layout.dtype));
    let place = tempfile::tempdir().unwrap();
    let plain = RawTensor { name: "plain".into(), dtype: "F32", shape: vec![3], bytes: 12 };
    let tensors = layout.tensors("m.proj", shape);
    let mut writer = PlacedWriter::new(place.path(), vec![vec![plain], tensors.clone()], 16);
    for (tensor, bytes) in tensors.iter().zip(&parts).rev() {
        writer.put(&tensor.name, bytes).unwrap();
    }
    writer.put("plain", &[0; 12]).unwrap();
    writer.finish().unwrap();
    (place, layout.form.decode(&codes, shape[1], &scales))
}

#[test]
fn what_is_written_is_read_back_from_any_element_on() {
    let shape = [37, 96 + 16 * 2];
    let x: Vec<f32> = (0..shape[0] * shape[1]).map(|i| ((i * 7919 + 13) % 10_007) as f32 / 5e3 - 0.8).collect();
    let ragged = [37, 101];
    for (codes, extent, packed, scheme, shape) in [
        (int(4, true), Extent::Group(32), true, Scheme::CompressedPacked { bits: 4, zeros: false }, shape),
        (int(4, false), Extent::Group(32), true, Scheme::CompressedPacked { bits: 4, zeros: true }, shape),
        (int(4, false), Extent::Row, true, Scheme::CompressedPacked { bits: 4, zeros: true }, ragged),
        (int(8, false), Extent::Row, true, Scheme::CompressedPacked { bits: 8, zeros: true }, ragged),
        (int(8, true), Extent::Row, false, Scheme::CompressedInt8, ragged),
        (Codes::Fp8, Extent::Row, false, Scheme::CompressedFp8 { block: None }, ragged),
        (Codes::Fp8, Extent::Tile(32, 32), false, Scheme::CompressedFp8 { block: Some([32, 32]) }, ragged),
        (Codes::Mxfp4, Extent::Group(32), true, Scheme::CompressedMxfp4, shape),
    ] {
        let layout = Layout { form: Form { codes, extent }, packed, dtype: DType::F32 };
        let (place, expected) = folder(layout, &x[..shape[0] * shape[1]], shape);
        for transposed in [false, true] {
            let weights = Weights::open(place.path()).unwrap().dequantised(scheme, transposed).unwrap();
            assert_eq!(weights.names(), ["m.proj.weight", "plain"], "{scheme:?}");
            let view = weights.get("m.proj.weight").unwrap();
            let [rows, columns] = shape;
            let wanted: Vec<f32> = match transposed {
                false => expected.clone(),
                true => (0..rows * columns).map(|i| expected[i % rows * columns + i / rows]).collect(),
            };
            assert_eq!(view.shape, if transposed { [columns, rows] } else { shape });
            let (mut read, mut begin) = (Vec::new(), 0);
            for length in [1, 3, 77, 1023, 3000].into_iter().cycle() {
                let mut bytes = vec![0; 4 * length.min(rows * columns - begin)];
                view.read(begin * 4, &mut bytes).unwrap();
                read.extend(bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())));
                begin = read.len();
                if begin == rows * columns {
                    break;
                }
            }
            assert!(read == wanted, "{scheme:?} {transposed}");
        }
    }
}

#[test]
fn packed_integers_that_do_not_fit_are_refused_by_name() {
    let form = Form { codes: int(4, false), extent: Extent::Group(8) };
    let layout = Layout { form, packed: true, dtype: DType::F32 };
    let scheme = Scheme::CompressedPacked { bits: 4, zeros: true };
    let x: Vec<f32> = (0..16 * 24).map(|i| i as f32).collect();
    let (place, _) = folder(layout, &x, [16, 24]);
    let whole = raw(&place.path().join("model-00002-of-00002.safetensors"));
    let refused = |change: &dyn Fn(&mut Raw)| {
        let mut tensors = whole.clone();
        change(&mut tensors);
        let mut header = serde_json::Map::new();
        let mut data = Vec::new();
        for (name, (dtype, shape, bytes)) in &tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
            data.extend_from_slice(bytes);
        }
        let header = serde_json::to_vec(&header).unwrap();
        let file = tempfile::tempdir().unwrap();
        let path = file.path().join("model.safetensors");
        fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
        Weights::open(file.path()).unwrap().dequantised(scheme, false).unwrap_err().to_string()
    };
    type Change<'a> = &'a dyn Fn(&mut Raw);
    let cases: [(Change<'_>, &str); 6] = [
        (&|of| drop(of.remove("m.proj.weight_shape")), "there is no `m.proj.weight_shape`"),
        (&|of| of.get_mut("m.proj.weight_shape").unwrap().2[8] = 25, "`m.proj.weight_shape` is [16, 25]"),
        (&|of| of.get_mut("m.proj.weight_shape").unwrap().2[15] = 0x80, "`m.proj.weight_shape` is [16, -"),
        (&|of| drop(of.remove("m.proj.weight_zero_point")), "there is no `m.proj.weight_zero_point`"),
        (&|of| of.get_mut("m.proj.weight_scale").unwrap().1 = vec![12, 4], "which are no scales of [16, 24]"),
        (
            &|of| drop(of.insert("m.proj.weight_g_idx".into(), ("I32".into(), vec![1], vec![0; 4]))),
            "`m.proj.weight_g_idx` gives",
        ),
    ];
    for (change, expected) in cases {
        let error = refused(change);
        assert!(error.contains(expected), "{error}");
    }
}
