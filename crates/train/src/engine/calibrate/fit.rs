//! From times of probes to the rates of a machine.
//!
//! Each group of probes is limited by one thing: passes by memory, products by their tiles, attention by its own
//! points. What no probe measures stays what it was.

use std::borrow::Cow;

use program::{Arch, AttentionRate, Efficiency, Hidden, Link, Machine, Products, Work, clock, expected_times};

/// A probe's times.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Work of one instruction.
    pub work: Work,
    pub repeats: usize,
    /// Seconds of one instruction: in a short run, and in the middle of the others' load.
    pub cool: f64,
    pub warm: f64,
}

impl Sample {
    /// Operations of a product; 0 of anything else.
    pub fn product_flops(&self) -> f64 {
        if matches!(self.work, Work::Product { .. }) { self.work.cost().flops } else { 0.0 }
    }
}

/// Measurements besides those of the probes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Other {
    /// FLOP/s of products where nothing else runs.
    pub hot: Option<f64>,
    /// Seconds that starting an entry takes.
    pub entry: f64,
    pub link: Option<Link>,
}

/// The machine that the times describe.
pub fn machine(before: &Machine, samples: &[Sample], other: Other) -> Machine {
    let of = |test: fn(&Work) -> bool| samples.iter().filter(|of| test(&of.work)).collect::<Vec<&Sample>>();
    let passes = of(|work| matches!(work, Work::Kernel { .. }) && !work.multiplies());
    let products = of(|work| matches!(work, Work::Product { .. }));
    let adapters = of(Work::multiplies);
    let bandwidth = passes.iter().map(|of| of.work.cost().bytes / of.cool).fold(0.0, f64::max);
    let flops = products.iter().map(|of| of.product_flops() / of.cool).fold(0.0, f64::max);
    let (launch, streaming) = line(&passes);
    let on_cpu = before.arch == Arch::Cpu;
    let mut machine = Machine {
        bandwidth,
        bf16_flops: if on_cpu { before.bf16_flops / before.f32_flops * flops } else { flops },
        fp8_flops: if on_cpu { flops } else { before.fp8_flops / before.bf16_flops * flops },
        fp4_flops: if on_cpu { flops } else { before.fp4_flops / before.bf16_flops * flops },
        f32_flops: if on_cpu { flops } else { before.f32_flops },
        link: other.link.unwrap_or(before.link),
        ..before.clone()
    };
    machine.efficiency = Efficiency {
        launch,
        entry: other.entry,
        bandwidth: (streaming / bandwidth).min(1.0),
        products: Products { hot: other.hot.map_or(1.0, |hot| (hot / flops).min(1.0)), ..before.efficiency.products },
        ..before.efficiency.clone()
    };
    let all: f64 = samples.iter().map(|of| of.warm).sum();
    let share = products.iter().map(|of| of.warm).sum::<f64>() / all;
    machine.efficiency.products = tiles(&machine, &products, share);
    machine.efficiency.attention = attention(&machine, samples, share);
    if !adapters.is_empty() {
        (machine.efficiency.kernels, machine.efficiency.kernel_bandwidth) = multiplying(&machine, &adapters);
    }
    machine
}

/// The rate and the bandwidth with which kernels that multiply come nearest to the times.
fn multiplying(machine: &Machine, samples: &[&Sample]) -> (f64, f64) {
    let error = |kernels: f64, kernel_bandwidth: f64| -> f64 {
        let efficiency = Efficiency { kernels, kernel_bandwidth, ..machine.efficiency.clone() };
        let machine = Machine { efficiency, ..machine.clone() };
        samples.iter().map(|of| (expected_times(&of.work, &machine).seconds() / of.warm).ln().powi(2)).sum()
    };
    let shares = || (1..=50).map(|part| f64::from(part) / 50.0);
    let all = shares().flat_map(|kernels| shares().map(move |bandwidth| (kernels, bandwidth)));
    all.min_by(|a, b| error(a.0, a.1).total_cmp(&error(b.0, b.1))).expect("there are shares")
}

/// Seconds of an empty pass and bytes a second, of the line that is nearest to the times in proportion.
fn line(passes: &[&Sample]) -> (f64, f64) {
    let points: Vec<(f64, f64)> = passes.iter().map(|of| (of.work.cost().bytes, of.warm)).collect();
    let least = points.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let fit = |launch: f64| {
        let (above, below) = points.iter().fold((0.0, 0.0), |(above, below), (bytes, seconds)| {
            (above + bytes * (seconds - launch) / seconds.powi(2), below + (bytes / seconds).powi(2))
        });
        let slope = (above / below).max(1e-18);
        let error = |(bytes, seconds): &(f64, f64)| ((launch + bytes * slope) / seconds - 1.0).powi(2);
        (points.iter().map(error).sum::<f64>(), launch, 1.0 / slope)
    };
    let tried = (0..=100).map(|part| fit(least * f64::from(part) / 100.0));
    let best = tried.min_by(|a, b| a.0.total_cmp(&b.0)).expect("there are some");
    (best.1, best.2)
}

/// The values with which tiles come nearest to the times, one after the other, a few times over.
fn tiles(machine: &Machine, samples: &[&Sample], share: f64) -> Products {
    let with = |products: Products| Machine {
        efficiency: Efficiency { products, ..machine.efficiency.clone() },
        ..machine.clone()
    };
    let error = |products: Products| -> f64 {
        let machine = with(products);
        samples
            .iter()
            .map(|of| (expected_times(&of.work, &machine).within(share, &machine) / of.warm).ln().powi(2))
            .sum()
    };
    let mut best = (error(machine.efficiency.products), machine.efficiency.products);
    type Set = fn(&mut Products, f64);
    let axes: [(Set, &[f64]); 5] = [
        (|of, value| of.launch = value, &[0.0, 1e-6, 1.5e-6, 2e-6, 2.5e-6, 3e-6, 4e-6, 6e-6, 1e-5, 2e-5]),
        (|of, value| of.small_tiles = value, &[0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0]),
        (|of, value| of.wave = value, &[0.0, 0.25, 0.5, 0.75, 1.0]),
        (|of, value| of.depth = value, &[0.0, 32.0, 64.0, 96.0, 128.0, 192.0, 256.0]),
        (|of, value| of.bandwidth = value, &[0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0]),
    ];
    for _ in 0..4 {
        for (set, values) in axes {
            for value in values {
                let mut products = best.1;
                set(&mut products, *value);
                let found = error(products);
                if found < best.0 {
                    best = (found, products);
                }
            }
        }
    }
    best.1
}

/// The points that were measured, and for passes and realisations that were not those of before.
fn attention(machine: &Machine, samples: &[Sample], products: f64) -> Cow<'static, [AttentionRate]> {
    let mut points: Vec<AttentionRate> = samples.iter().filter_map(|of| point(machine, of, products)).collect();
    let class = |of: &AttentionRate| (of.backward, of.by, of.hidden, of.head_dim);
    let is_measured = |old: &AttentionRate| points.iter().any(|new| class(new) == class(old));
    let kept: Vec<AttentionRate> = machine
        .efficiency
        .attention
        .iter()
        .filter(|old| machine.arch != Arch::Cpu && !is_measured(old))
        .copied()
        .collect();
    points.extend(kept);
    Cow::Owned(points)
}

/// The attention rate that a sample shows, at the clock that is left at this share of `products`.
fn point(machine: &Machine, of: &Sample, products: f64) -> Option<AttentionRate> {
    let Work::Attention { backward, by, head_dim, of: spread, cost, .. } = &of.work else { return None };
    let launches = expected_times(&of.work, machine).launches;
    let own = (of.warm - launches).max(0.1 * of.warm);
    let rate = match machine.arch {
        Arch::Cpu => machine.f32_flops,
        _ => machine.bf16_flops * clock(products, machine),
    };
    let share = spread.tail(1.0, machine) * cost.flops / own / rate;
    let (hidden, keys) = (spread.hidden, spread.keys);
    Some(AttentionRate { backward: *backward, by: *by, hidden, head_dim: *head_dim, keys, share })
}

/// Times compared with what the machine's rates give.
pub fn table(machine: &Machine, samples: &[Sample]) -> String {
    let products: f64 = samples.iter().filter(|of| of.product_flops() > 0.0).map(|of| of.warm).sum();
    let share = products / samples.iter().map(|of| of.warm).sum::<f64>();
    let row = |of: &Sample| {
        let expected = expected_times(&of.work, machine).within(share, machine);
        let cost = of.work.cost();
        format!(
            "{:<58} {:>10.1} {:>10.1} {:>10.1} {:>+7.1} % {:>9.1} {:>9.1}\n",
            words(&of.work),
            of.cool * 1e6,
            of.warm * 1e6,
            expected * 1e6,
            100.0 * (expected / of.warm - 1.0),
            cost.flops / of.warm / 1e12,
            cost.bytes / of.warm / 1e9,
        )
    };
    let head = format!(
        "{:<58} {:>10} {:>10} {:>10} {:>9} {:>9} {:>9}\n",
        "µs of one instruction", "cool", "warm", "expected", "off by", "TFLOP/s", "GB/s"
    );
    head + &samples.iter().map(row).collect::<String>()
}

fn words(work: &Work) -> String {
    match work {
        Work::Kernel { cost, .. } if work.multiplies() => {
            format!("gradients of adapters, {:.2} MB, {:.1} GFLOP", cost.bytes / 1e6, cost.flops / 1e9)
        }
        Work::Kernel { cost, .. } => format!("pass over {:.2} MB", cost.bytes / 1e6),
        Work::Product { extents: of, .. } => format!("product {} × {} × {}", of.m, of.n, of.k),
        Work::Attention { backward, by, head_dim, of, .. } => {
            let pass = if *backward { "backward" } else { "forward" };
            let hidden = match of.hidden {
                Hidden::None => "",
                Hidden::Window => " in a window",
                Hidden::Documents => " in documents",
            };
            format!("attention {pass}, {}, heads of {head_dim}, {:.0} keys{hidden}", by.name(), of.keys)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::probes;

    /// Times as a machine would give them.
    fn made_up(of: &Machine) -> Vec<Sample> {
        let sample = |probe: compiler::Probe| {
            let times = expected_times(&probe.work, of);
            let (cool, warm) = (times.within(0.0, of), times.within(0.6, of));
            Sample { work: probe.work, repeats: probe.repeats, cool, warm }
        };
        probes(of, false).into_iter().map(sample).collect()
    }

    #[test]
    fn rates_that_made_the_times_are_found_again() {
        let mut truth = Machine::h200();
        truth.efficiency.launch = 1.4e-6;
        truth.bandwidth *= 0.8;
        truth.bf16_flops *= 0.9;
        truth.efficiency.products = Products { launch: 2e-6, wave: 0.75, depth: 96.0, ..truth.efficiency.products };
        let samples = made_up(&truth);
        let hot = truth.bf16_flops * truth.efficiency.products.hot;
        let link = Link { one_way: 40e9, both_ways: 70e9 };
        let found = machine(&Machine::h200(), &samples, Other { hot: Some(hot), entry: 30e-6, link: Some(link) });
        assert_eq!(found.link, link);
        assert!((found.efficiency.launch / 1.4e-6 - 1.0).abs() < 0.1, "{:?}", found.efficiency);
        assert!((found.bandwidth * found.efficiency.bandwidth / (truth.bandwidth * 0.93) - 1.0).abs() < 0.03);
        for of in &samples {
            let share = samples.iter().filter(|of| of.product_flops() > 0.0).map(|of| of.warm).sum::<f64>()
                / samples.iter().map(|of| of.warm).sum::<f64>();
            let ratio = expected_times(&of.work, &found).within(share, &found) / of.warm;
            assert!((0.9..1.1).contains(&ratio), "{}: {ratio}", words(&of.work));
        }
        assert_eq!(found.efficiency.entry, 30e-6);
        assert!(table(&found, &samples).lines().count() == samples.len() + 1);
    }
}
