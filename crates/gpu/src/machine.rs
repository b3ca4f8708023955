//! A live GPU as the value that programs are planned for.
//!
//! A known GPU has its measured rates. The rates of others follow from clock and SM count, with the H200's
//! efficiencies: good enough for plans, but not accurate.

use crate::driver::Properties;
use program::{Arch, Architecture, Efficiency, FP8, Gfx, Machine, Origin, PRODUCTS};

/// Share of the bus rate that copies reach, as measured on an H200 (4.27 of 4.9 TB/s).
const COPY_SHARE: f64 = 0.87;

/// Returns the GPU as the machine that plans are made for; memory is the driver's number.
pub fn machine(properties: &Properties) -> Machine {
    let memory = properties.memory;
    let arch = properties.architecture;
    // Kernels of another architecture do not change the rates of the GPU or of the libraries' kernels.
    let of_device = properties.of_device;
    let own_products = arch.is_hopper();
    if let Some(known) = Machine::of_card(&properties.name).filter(|known| known.arch == of_device) {
        let efficiency =
            Efficiency { addend_pass: known.efficiency.addend_pass || arch != of_device, ..known.efficiency.clone() };
        return Machine { memory, arch, efficiency, units: properties.multiprocessors as usize, ..known };
    }
    let cycles = properties.multiprocessors as f64 * properties.clock;
    Machine {
        name: properties.name.clone(),
        arch,
        memory,
        bandwidth: COPY_SHARE * properties.memory_bandwidth,
        bf16_flops: PRODUCTS * cycles * bf16_flops_per_cycle(properties.of_device),
        fp8_flops: FP8 * PRODUCTS * cycles * bf16_flops_per_cycle(properties.of_device),
        fp4_flops: fp4_share(properties.of_device) * PRODUCTS * cycles * bf16_flops_per_cycle(properties.of_device),
        f32_flops: PRODUCTS * cycles * f32_flops_per_cycle(properties.of_device),
        units: properties.multiprocessors as usize,
        efficiency: Efficiency { addend_pass: !own_products, ..Efficiency::H200 },
        origin: Origin::DataSheet,
        ..Machine::h200()
    }
}

/// Dense bf16 FLOPs of matrix units of one multiprocessor in one cycle, f32 accumulation.
fn bf16_flops_per_cycle(arch: Arch) -> f64 {
    match arch {
        Arch::Cuda(Architecture { major: 8, minor: 0 }) => 2048.0,
        Arch::Cuda(Architecture { major: 9, .. }) => 4096.0,
        Arch::Cuda(Architecture { major: 10, .. }) => 8192.0,
        Arch::Rocm(Gfx::CDNA2) => 1024.0,
        Arch::Rocm(Gfx::CDNA3) => 2048.0,
        Arch::Rocm(Gfx::CDNA4) => 4096.0,
        // The driver counts pairs of RDNA's units.
        Arch::Rocm(Gfx { major: 12, .. }) => 2048.0,
        Arch::Rocm(_) => 1024.0,
        _ => 512.0,
    }
}

/// Returns the rate of four-bit products relative to bf16, by the data sheets.
fn fp4_share(arch: Arch) -> f64 {
    match arch {
        Arch::Cuda(Architecture { major: 10 | 11, .. }) => 4.0,
        Arch::Cuda(Architecture { major: 12.., .. }) => 8.0,
        _ => 1.0,
    }
}

fn f32_flops_per_cycle(arch: Arch) -> f64 {
    if arch == Arch::Cuda(Architecture { major: 8, minor: 0 }) { 128.0 } else { 256.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a100() -> Properties {
        Properties {
            name: "NVIDIA A100-PCIE-80GB".into(),
            architecture: Arch::Cuda(Architecture { major: 8, minor: 0 }),
            of_device: Arch::Cuda(Architecture { major: 8, minor: 0 }),
            multiprocessors: 108,
            memory: 80 << 30,
            l2_cache: 40 << 20,
            clock: 1.41e9,
            memory_bandwidth: 2.04e12,
            shared_memory_per_block: 163 << 10,
        }
    }

    #[test]
    fn an_unmeasured_gpu_is_estimated_below_its_data_sheet() {
        let machine = machine(&a100());
        assert_eq!(machine.arch, Arch::Cuda(Architecture { major: 8, minor: 0 }));
        assert_eq!(machine.memory, 80 << 30);
        assert!(machine.bf16_flops > 0.5 * 312e12 && machine.bf16_flops < 312e12);
        assert!(machine.f32_flops < 19.5e12 && machine.bandwidth < 2.04e12);
    }

    #[test]
    fn an_h200_has_its_measured_rates_and_its_own_memory() {
        let h200 = Properties {
            name: "NVIDIA H200".into(),
            architecture: Arch::Cuda(Architecture::HOPPER),
            of_device: Arch::Cuda(Architecture::HOPPER),
            memory: 140 << 30,
            multiprocessors: 132,
            ..a100()
        };
        assert_eq!(machine(&h200), Machine { memory: 140 << 30, ..Machine::h200() });
    }
}
