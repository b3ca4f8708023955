//! GPUs by name, from their makers' data sheets: abilities of each kind, and the machines that plans are made for. The
//! rates that were measured on two of them stand in `measured.rs`.
//!
//! A data sheet's machine has the shares of the ceilings that were measured on an H200, so that its times are a guide and no
//! promise; its memory is what the driver reports of such a card.

use crate::architecture::Architecture;
use crate::efficiency::Efficiency;
use crate::gfx::Gfx;
use crate::machine::{FP8, Link, Machine, Origin};
use crate::target::Arch;

/// The properties that all cards of a kind share.
struct Kind {
    /// The part of the driver's card name that identifies the kind.
    card: &'static str,
    /// Dense bf16 products without sparsity, f32 accumulation, TFLOP/s.
    bf16: f64,
    /// The same of four-bit operands with scales of blocks; 0 where it has no units for them.
    fp4: f64,
    /// Bytes that a card receives from others over NVLink, GB/s; 0 where it has none. Over Infinity Fabric it is the one link
    /// between two cards.
    nvlink: f64,
}

/// The table of kinds; the first that fits a name counts.
const KINDS: &[Kind] = &[
    Kind { card: "H200", bf16: 989.4, fp4: 0.0, nvlink: 450.0 },
    Kind { card: "H100 PCIe", bf16: 756.0, fp4: 0.0, nvlink: 0.0 },
    Kind { card: "H100", bf16: 989.4, fp4: 0.0, nvlink: 450.0 },
    Kind { card: "B200", bf16: 2250.0, fp4: 9000.0, nvlink: 900.0 },
    Kind { card: "A100", bf16: 312.0, fp4: 0.0, nvlink: 300.0 },
    Kind { card: "L40S", bf16: 362.0, fp4: 0.0, nvlink: 0.0 },
    Kind { card: "RTX 3090", bf16: 71.0, fp4: 0.0, nvlink: 0.0 },
    Kind { card: "RTX 4090", bf16: 165.2, fp4: 0.0, nvlink: 0.0 },
    Kind { card: "RTX 5090", bf16: 209.5, fp4: 1676.0, nvlink: 0.0 },
    Kind { card: "MI300X", bf16: 1307.4, fp4: 0.0, nvlink: 64.0 },
    Kind { card: "MI325X", bf16: 1307.4, fp4: 0.0, nvlink: 64.0 },
    // Its products of four bits have other scales than `nvfp4`.
    Kind { card: "MI355X", bf16: 2516.6, fp4: 0.0, nvlink: 76.8 },
    Kind { card: "RX 7900 XTX", bf16: 122.8, fp4: 0.0, nvlink: 0.0 },
    Kind { card: "R9700", bf16: 191.0, fp4: 0.0, nvlink: 0.0 },
];

/// The kind of a card by its name, in any case and with or without blanks.
fn kind(card: &str) -> Option<&'static Kind> {
    let plain = |name: &str| name.to_ascii_uppercase().replace(' ', "");
    let card = plain(card);
    KINDS.iter().find(|kind| card.contains(&plain(kind.card)))
}

/// Returns the bf16 peak of a card, FLOP/s, where it is known; `None` for a CPU, whose rates are only known once
/// measured.
pub fn peak(card: &str) -> Option<f64> {
    kind(card).map(|kind| kind.bf16 * 1e12)
}

/// Share of the data sheet's rate that one H200 copies from another while it is copied from: 380 of 450 GB/s, measured
/// on two.
const NVLINK: f64 = 380.0 / 450.0;

/// Returns the bytes per second that a card gets from others over NVLink while it sends them at the same rate; `None`
/// where it has no NVLink.
pub(crate) fn nvlink(card: &str) -> Option<f64> {
    // A PCIe card has the NVLink of its kind only with a bridge, which is sold separately.
    let boards = !card.to_ascii_uppercase().contains("PCIE");
    kind(card).filter(|kind| boards && kind.nvlink > 0.0).map(|kind| NVLINK * kind.nvlink * 1e9)
}

/// A GPU as its maker describes it.
struct Sheet {
    name: &'static str,
    /// The part of the driver's card name that identifies the GPU.
    card: &'static str,
    arch: Arch,
    /// Device memory as the driver reports it, MiB.
    memory: usize,
    units: usize,
    /// Matrix rate in f32, TFLOP/s.
    f32: f64,
    /// Bandwidth of device memory, GB/s.
    bandwidth: f64,
    /// Rate to host memory, one way, GB/s: measured elsewhere on PCIe of that generation.
    link: f64,
}

const SHEETS: &[Sheet] = &[
    Sheet {
        name: "a100-40",
        card: "A100-SXM4-40GB",
        arch: Arch::Cuda(Architecture { major: 8, minor: 0 }),
        memory: 40_960,
        units: 108,
        f32: 19.5,
        bandwidth: 1555.0,
        link: 25.0,
    },
    Sheet {
        name: "a100-80",
        card: "A100-SXM4-80GB",
        arch: Arch::Cuda(Architecture { major: 8, minor: 0 }),
        memory: 81_920,
        units: 108,
        f32: 19.5,
        bandwidth: 2039.0,
        link: 25.0,
    },
    Sheet {
        name: "l40s",
        card: "L40S",
        arch: Arch::Cuda(Architecture { major: 8, minor: 9 }),
        memory: 46_068,
        units: 142,
        f32: 91.6,
        bandwidth: 864.0,
        link: 25.0,
    },
    Sheet {
        name: "rtx3090",
        card: "RTX 3090",
        arch: Arch::Cuda(Architecture { major: 8, minor: 6 }),
        memory: 24_576,
        units: 82,
        f32: 35.6,
        bandwidth: 936.0,
        link: 25.0,
    },
    Sheet {
        name: "rtx4090",
        card: "RTX 4090",
        arch: Arch::Cuda(Architecture { major: 8, minor: 9 }),
        memory: 24_564,
        units: 128,
        f32: 82.6,
        bandwidth: 1008.0,
        link: 25.0,
    },
    Sheet {
        name: "rtx5090",
        card: "RTX 5090",
        arch: Arch::Cuda(Architecture { major: 12, minor: 0 }),
        memory: 32_607,
        units: 170,
        f32: 104.8,
        bandwidth: 1792.0,
        link: 55.5,
    },
    Sheet {
        name: "b200",
        card: "B200",
        arch: Arch::Cuda(Architecture { major: 10, minor: 0 }),
        memory: 183_359,
        units: 148,
        f32: 75.0,
        bandwidth: 8000.0,
        link: 55.5,
    },
    Sheet {
        name: "mi300x",
        card: "MI300X",
        arch: Arch::Rocm(Gfx::CDNA3),
        memory: 196_592,
        units: 304,
        f32: 163.4,
        bandwidth: 5300.0,
        link: 55.5,
    },
    Sheet {
        name: "mi325x",
        card: "MI325X",
        arch: Arch::Rocm(Gfx::CDNA3),
        memory: 262_128,
        units: 304,
        f32: 163.4,
        bandwidth: 6000.0,
        link: 55.5,
    },
    Sheet {
        name: "mi355x",
        card: "MI355X",
        arch: Arch::Rocm(Gfx::CDNA4),
        memory: 294_896,
        units: 256,
        f32: 157.3,
        bandwidth: 8000.0,
        link: 55.5,
    },
    Sheet {
        name: "rx7900xtx",
        card: "RX 7900 XTX",
        arch: Arch::Rocm(Gfx { major: 11, minor: 0, stepping: 0 }),
        memory: 24_560,
        units: 96,
        f32: 61.4,
        bandwidth: 960.0,
        link: 25.0,
    },
    Sheet {
        name: "r9700",
        card: "R9700",
        arch: Arch::Rocm(Gfx { major: 12, minor: 0, stepping: 1 }),
        memory: 32_624,
        units: 64,
        f32: 47.8,
        bandwidth: 640.0,
        link: 55.5,
    },
];

/// Shares of the data sheet that the ceilings are on an H200: products 808 of 989.4 TFLOP/s, copies 4.27 of 4.8 TB/s.
pub const PRODUCTS: f64 = 808.0 / 989.4;
const COPIES: f64 = 4.27 / 4.8;

impl Sheet {
    fn machine(&self) -> Machine {
        let kind = kind(self.card).expect("every card is of a kind");
        let bf16 = PRODUCTS * kind.bf16 * 1e12;
        Machine {
            name: self.name.into(),
            arch: self.arch,
            memory: self.memory << 20,
            bandwidth: COPIES * self.bandwidth * 1e9,
            link: Link { one_way: self.link * 1e9, both_ways: 1.84 * self.link * 1e9 },
            bf16_flops: bf16,
            fp8_flops: FP8 * bf16,
            fp4_flops: if kind.fp4 > 0.0 { PRODUCTS * kind.fp4 * 1e12 } else { bf16 },
            f32_flops: PRODUCTS * self.f32 * 1e12,
            units: self.units,
            efficiency: Efficiency { addend_pass: !self.arch.is_hopper(), ..Efficiency::H200 },
            origin: Origin::DataSheet,
            ..Machine::h200()
        }
    }
}

/// Names of machines that are known.
pub fn names() -> Vec<&'static str> {
    let mut names: Vec<&str> = SHEETS.iter().map(|sheet| sheet.name).chain(["h100", "h200"]).collect();
    names.sort_unstable();
    names
}

impl Machine {
    /// A machine by the name that `--machine` takes, in any case.
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        match name.as_str() {
            "h100" => Some(Self::h100()),
            "h200" => Some(Self::h200()),
            _ => SHEETS.iter().find(|sheet| sheet.name == name).map(Sheet::machine),
        }
    }

    /// Returns the machine of a card by the driver's name, where it is known.
    pub fn of_card(card: &str) -> Option<Self> {
        if card.contains("H200") {
            return Some(Self::h200());
        }
        if card.contains("H100 80GB HBM3") {
            return Some(Self::h100());
        }
        // A PCIe card differs in memory and clock from the SXM card of the same name.
        let found = SHEETS.iter().find(|sheet| card.contains(sheet.card) && !card.contains("PCIe"));
        found.map(Sheet::machine)
    }
}

impl Machine {
    /// Bytes per second that a device gets from others of its kind while it sends at the same rate: over NVLink where
    /// the kind has it, otherwise at most the rate of the link to the host.
    pub fn peer_rate(&self) -> f64 {
        nvlink(&self.name).unwrap_or(self.link.both_ways / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_known_by_the_names_of_cards() {
        assert_eq!(peak("NVIDIA H200"), Some(989.4e12));
        assert_eq!(peak("nvidia h100 80gb hbm3"), Some(989.4e12));
        assert_eq!(peak("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!((peak("rtx4090"), peak("NVIDIA GeForce RTX 4090")), (Some(165.2e12), Some(165.2e12)));
        assert_eq!(peak("cpu"), None);
    }

    #[test]
    fn machines_are_known_by_their_names_in_any_case() {
        for name in names() {
            let found = Machine::named(&name.to_ascii_uppercase()).unwrap();
            assert_eq!(found.name, name);
            assert!(found.memory > 20 << 30 && found.bandwidth > 5e11 && found.bf16_flops > found.f32_flops, "{name}");
            assert_eq!(found.origin == Origin::DataSheet, !name.starts_with('h'), "{name}");
            assert_eq!(found.fp4_flops > found.fp8_flops, found.arch.has_four_bits(), "{name}");
        }
        assert_eq!(Machine::named("a100"), None);
        assert_eq!(Machine::of_card("AMD Instinct MI300X OAM").unwrap().name, "mi300x");
        assert_eq!(Machine::of_card("AMD Radeon RX 7900 XTX").unwrap().arch, "gfx1100".parse().unwrap());
        assert_eq!(Machine::of_card("NVIDIA A100-SXM4-80GB").unwrap().name, "a100-80");
        assert_eq!(Machine::of_card("NVIDIA H100 80GB HBM3").unwrap().name, "h100");
        for other in ["NVIDIA H100 PCIe", "NVIDIA H100 NVL"] {
            assert_eq!(Machine::of_card(other), None);
        }
    }

    #[test]
    fn links_between_cards_are_known_by_their_names() {
        let host = Machine::h200().link.both_ways / 2.0;
        let rate = |name: &str| Machine { name: name.into(), ..Machine::h200() }.peer_rate();
        assert_eq!((rate("NVIDIA H200"), rate("h100"), rate("NVIDIA H100 80GB HBM3")), (380e9, 380e9, 380e9));
        assert!(rate("NVIDIA A100-SXM4-80GB") < rate("h200") && rate("NVIDIA A100-SXM4-80GB") > host);
        assert!(rate("b200") > rate("h200"));
        for name in ["NVIDIA H100 PCIe", "NVIDIA A100 80GB PCIe", "NVIDIA GeForce RTX 4090", "L40S"] {
            assert_eq!(rate(name), host, "{name}");
        }
    }
}
