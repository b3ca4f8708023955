//! Packed forms against recorded numbers, bit for bit: codes, scales and values of eight and four bits.

use crate::golden::Golden;
use ops::optimizer::dynamic_map;
use tensor::packed::{Packed, Scaled, Target, nested, normal, nvfp4, scaled, tiles};
use tensor::small::{Small, amax, scaling_exponent};
use tensor::storage::{Code, MXFP4, NVFP4, NVFP4_TILES};

const OPS: &str = "precision/ops.safetensors";

fn i32s(golden: &Golden, name: &str) -> Vec<i32> {
    golden.bytes(name).chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// The largest exponent of a scaled tensor.
const TOPS: [(&str, i32); 3] = [("448", 8), ("224", 7), ("3584", 11)];

#[test]
fn exponents_are_the_recorded_ones() {
    let golden = Golden::open(OPS);
    let amax = golden.f32("exponent.amax");
    for (name, top) in TOPS {
        let found: Vec<i32> = amax.iter().map(|a| scaling_exponent(*a, top)).collect();
        assert_eq!(found, i32s(&golden, &format!("exponent.k_{name}")), "{name}");
    }
}

#[test]
fn codes_of_eight_bits_are_the_recorded_ones() {
    let golden = Golden::open(OPS);
    for (name, small, top) in [("e4m3", Small::E4M3, 7), ("e5m2", Small::E5M2, 11), ("e4m3_weight", Small::E4M3, 8)] {
        let x = golden.f32(&format!("{name}.x"));
        let k = i32s(&golden, &format!("{name}.k"))[0];
        assert_eq!(scaling_exponent(amax(&x), top), k, "{name}");
        let packed = scaled(small, &x, &[48, 96], k);
        assert!(packed.packed_codes() == golden.bytes(&format!("{name}.codes")), "{name}");
        assert_eq!(bits(&packed.values()), bits(&golden.f32(&format!("{name}.value"))), "{name}");
        // An exponent that is too large saturates.
        let k = i32s(&golden, &format!("{name}.saturating_k"))[0];
        let packed = scaled(small, &x, &[48, 96], k);
        assert!(packed.codes == golden.bytes(&format!("{name}.saturating_codes")), "{name}");
    }
    let x = golden.f32("tiles.w");
    let packed = tiles(&x, &[200, 150], 64);
    assert!(packed.codes == golden.bytes("tiles.64.codes"));
    let Scaled::Single(scales) = &packed.scales else { panic!("f32 scales") };
    assert_eq!(bits(scales), bits(&golden.f32("tiles.64.scale_inv")));
    assert_eq!(bits(&packed.values()), bits(&golden.f32("tiles.64.value")));
}

#[test]
fn nvfp4_is_the_recorded_one() {
    let golden = Golden::open(OPS);
    let x = golden.f32("nv.x");
    let forms = [
        ("rows", NVFP4, Target::Six),
        ("tiles", NVFP4_TILES, Target::Six),
        ("weight", NVFP4, Target::Six),
        ("weight_46", NVFP4, Target::FourOrSix),
    ];
    for (name, packing, target) in forms {
        let packed = nvfp4(packing, &x, &[48, 64], target);
        let Scaled::E4M3 { codes, tensor } = &packed.scales else { panic!("scales of E4M3") };
        assert_eq!(tensor.to_bits(), golden.f32(&format!("nv.{name}.g"))[0].to_bits(), "{name}");
        assert!(codes == golden.bytes(&format!("nv.{name}.scales")), "{name}");
        assert!(packed.codes == golden.bytes(&format!("nv.{name}.codes")), "{name}");
        assert_eq!(bits(&packed.values()), bits(&golden.f32(&format!("nv.{name}.value"))), "{name}");
    }
}

#[test]
fn nf4_is_the_recorded_one() {
    let golden = Golden::open(OPS);
    let (x, map) = (golden.f32("nf4.w"), dynamic_map(true));
    for (block, inner) in [(64, false), (64, true), (512, false), (512, true)] {
        let name = format!("nf4.{block}{}", if inner { ".nested" } else { "" });
        let packed = if inner { nested(&x, &[40, 96], block, &map) } else { normal(&x, &[40, 96], block) };
        assert!(packed.codes == golden.bytes(&format!("{name}.codes")), "{name}");
        match &packed.scales {
            Scaled::Single(scales) => assert_eq!(bits(scales), bits(&golden.f32(&format!("{name}.absmax")))),
            Scaled::Mapped { codes, outer, offset, .. } => {
                assert!(codes == golden.bytes(&format!("{name}.absmax_u8")), "{name}");
                assert_eq!(bits(outer), bits(&golden.f32(&format!("{name}.absmax2"))), "{name}");
                assert_eq!(offset.to_bits(), golden.f32(&format!("{name}.offset"))[0].to_bits(), "{name}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(bits(&packed.values()), bits(&golden.f32(&format!("{name}.value"))), "{name}");
    }
}

/// MXFP4 of recorded checkpoints: low nibble first, one power of two for 32 elements of a row, recorded transposed.
#[test]
fn mxfp4_is_read_as_recorded() {
    let golden = Golden::open("quant/fp4.safetensors");
    let blocks = golden.bytes("mxfp4.blocks");
    let codes = blocks.iter().flat_map(|pair| [pair & 15, pair >> 4]).collect();
    let scales = Scaled::E8M0(golden.bytes("mxfp4.scales").to_vec());
    let packed = Packed { packing: MXFP4, shape: vec![2, 24, 96], codes, scales };
    assert_eq!(packed.packing.code, Code::Small(Small::E2M1));
    assert!(packed.packed_codes() == blocks);
    assert_eq!(packed.packing.blocks(&packed.shape), golden.bytes("mxfp4.scales").len());
    let (values, wanted) = (packed.values(), golden.f32("mxfp4.dequant"));
    for (index, wanted) in wanted.iter().enumerate() {
        let (matrix, row, column) = (index / (96 * 24), index / 24 % 96, index % 24);
        assert_eq!(values[(matrix * 24 + column) * 96 + row].to_bits(), wanted.to_bits(), "{matrix} {row} {column}");
    }
}
