//! Measures this device with probes through its own backend, and makes a machine of the times.
//!
//! A step runs for minutes at the power limit, so what counts is measured there: the probes one after another, over and over, of
//! which the last minute is timed. Knows a clock and a backend; what the probes are is the compiler's, how times become
//! rates stands in `fit.rs`.

mod fit;

use std::sync::Arc;
use std::time::{Duration, Instant};

use compiler::{links, probes};
use fit::{Other, Sample};
use program::{Arch, Link, Machine, Origin, Program, Session, TensorRef};
use tensor::{DType, HostTensor};

use crate::engine::device::Device;
use crate::error::Result;

/// Durations of the parts of a calibration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Work before anything is timed that counts.
    pub heat: Duration,
    /// Time for rounds over all probes.
    pub measure: Duration,
    /// Nothing but the largest product.
    pub products: Duration,
    /// Few and small probes: to try out the way.
    pub least: bool,
}

impl Plan {
    /// The durations for a machine: a GPU's clock falls for a minute under load, a CPU keeps its own. With compiling
    /// under four minutes. `least`: a trial that measures little.
    pub fn of(machine: &Machine, least: bool) -> Plan {
        let seconds = |heat, measure, products| Plan {
            heat: Duration::from_secs(heat),
            measure: Duration::from_secs(measure),
            products: Duration::from_secs(products),
            least,
        };
        match machine.arch {
            _ if least => seconds(0, 0, 0),
            Arch::Cpu => seconds(0, 20, 0),
            _ => seconds(40, 60, 10),
        }
    }
}

/// The measurements, and the machine description that is fitted to them.
pub struct Calibration {
    pub machine: Machine,
    /// Each probe's times compared with what the machine's rates give, for people.
    pub table: String,
}

/// A probe that is loaded.
struct Loaded {
    session: Box<dyn Session>,
    sample: Sample,
    /// Seconds of an instruction, time after time.
    warm: Vec<f64>,
}

/// A timed run of a probe takes at least so long.
const LEAST: f64 = 2e-3;

impl Loaded {
    /// Seconds of one instruction, over as many runs as take a while.
    fn time(&mut self) -> Result<f64> {
        let mut runs = 1;
        loop {
            let begin = Instant::now();
            for _ in 0..runs {
                self.session.run(0)?;
            }
            self.session.synchronize()?;
            let seconds = begin.elapsed().as_secs_f64();
            if seconds >= LEAST || runs >= 1 << 12 {
                return Ok(seconds / f64::from(runs) / self.sample.repeats as f64);
            }
            runs *= 4;
        }
    }
}

/// Measures. `progress` receives progress messages.
pub fn calibrate(device: &Device, plan: Plan, progress: &mut dyn FnMut(&str)) -> Result<Calibration> {
    let found = probes(&device.machine, plan.least);
    progress(&format!("{} probes are prepared", found.len()));
    let mut loaded = Vec::new();
    for probe in found {
        let program = Arc::new(probe.program);
        let mut session = device.backend.load(program.clone())?;
        for (index, (_, at)) in program.entries[0].inputs.iter().enumerate() {
            fill(&mut *session, at, index as u32, &probe.starts)?;
        }
        let sample = Sample { work: probe.work, repeats: probe.repeats, cool: 0.0, warm: 0.0 };
        loaded.push(Loaded { session, sample, warm: Vec::new() });
    }
    progress("times of short runs");
    for of in &mut loaded {
        of.session.run(0)?;
        of.session.synchronize()?;
        of.sample.cool = of.time()?;
    }
    progress(&format!("warming up for {} s, then timing for {} s", plan.heat.as_secs(), plan.measure.as_secs()));
    let mut turns = Turns(1);
    let begin = Instant::now();
    while begin.elapsed() < plan.heat {
        for index in turns.next(loaded.len()) {
            loaded[index].time()?;
        }
    }
    let begin = Instant::now();
    while begin.elapsed() < plan.measure || loaded.iter().any(|of| of.warm.is_empty()) {
        for index in turns.next(loaded.len()) {
            let seconds = loaded[index].time()?;
            loaded[index].warm.push(seconds);
        }
    }
    for of in &mut loaded {
        of.warm.sort_by(f64::total_cmp);
        of.sample.warm = of.warm[of.warm.len() / 2];
    }
    let other = Other {
        hot: hot_rate(&mut loaded, plan.products)?,
        entry: entry_seconds(&mut loaded)?,
        link: if plan.least { None } else { link(device)? },
    };
    let samples: Vec<Sample> = loaded.into_iter().map(|of| of.sample).collect();
    let date = jiff::Zoned::now().strftime("%Y-%m-%d").to_string();
    let machine = fit::machine(&device.machine, &samples, other);
    let mut table = fit::table(&machine, &samples);
    if other.link.is_some() {
        let (one, both) = (machine.link.one_way / 1e9, machine.link.both_ways / 1e9);
        table += &format!("host memory: {one:.1} GB/s one way, {both:.1} GB/s both ways at once\n");
    }
    Ok(Calibration { machine: Machine { origin: Origin::Calibrated { date }, ..machine }, table })
}

/// Orders of probes, each another: the clock follows the power of the last milliseconds, and what runs before a probe should
/// not be the same each time.
struct Turns(u32);

impl Turns {
    fn next(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 17;
            self.0 ^= self.0 << 5;
            order.swap(last, self.0 as usize % (last + 1));
        }
        order
    }
}

/// Rates of the way to host memory: the slower direction, and both at once. None on a CPU, which has none.
fn link(device: &Device) -> Result<Option<Link>> {
    if device.machine.arch == Arch::Cpu {
        return Ok(None);
    }
    let probes = links(&device.machine);
    let rate = |program: Program, bytes: usize| -> Result<f64> {
        let mut session = device.backend.load(Arc::new(program))?;
        let mut least = f64::INFINITY;
        for _ in 0..10 {
            let begin = Instant::now();
            session.run(0)?;
            session.synchronize()?;
            least = least.min(begin.elapsed().as_secs_f64());
        }
        Ok(bytes as f64 / least)
    };
    let (come, go) = (rate(probes.to_device, probes.bytes)?, rate(probes.to_host, probes.bytes)?);
    Ok(Some(Link { one_way: come.min(go), both_ways: rate(probes.both, 2 * probes.bytes)? }))
}

/// FLOP/s of the largest product where nothing else runs; none where that is too short to measure.
fn hot_rate(loaded: &mut [Loaded], duration: Duration) -> Result<Option<f64>> {
    if duration.is_zero() {
        return Ok(None);
    }
    let flops = |of: &&mut Loaded| of.sample.product_flops();
    let largest = loaded.iter_mut().max_by(|a, b| flops(a).total_cmp(&flops(b))).expect("there are products");
    let begin = Instant::now();
    let mut last = f64::INFINITY;
    while begin.elapsed() < duration {
        last = largest.time()?;
    }
    Ok(Some(largest.sample.product_flops() / last))
}

/// Seconds of an entry besides its kernels: the smallest one, by itself and with its result awaited.
fn entry_seconds(loaded: &mut [Loaded]) -> Result<f64> {
    let least = loaded.iter_mut().min_by(|a, b| a.sample.cool.total_cmp(&b.sample.cool)).expect("there are probes");
    let mut times = Vec::new();
    for _ in 0..50 {
        let begin = Instant::now();
        least.session.run(0)?;
        least.session.synchronize()?;
        times.push(begin.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2] - least.sample.cool * least.sample.repeats as f64).max(0.0))
}

/// Numbers as they lie in a model: products of zeros take no power. Integers are the documents' `starts`, or zeros.
fn fill(session: &mut dyn Session, at: &TensorRef, seed: u32, starts: &[i32]) -> Result<()> {
    if !at.dtype.is_float() {
        let mut bytes: Vec<u8> = starts.iter().flat_map(|start| start.to_ne_bytes()).collect();
        bytes.resize(at.bytes(), 0);
        return Ok(session.write(at, &bytes)?);
    }
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    // A few thousand distinct ones, again and again.
    let block: Vec<f32> = (0..at.len().min(1 << 14)).map(|_| next()).collect();
    let block = HostTensor::from_f32(vec![block.len()], &block).cast(at.dtype);
    let bytes: Vec<u8> = block.bytes.iter().copied().cycle().take(at.len() * at.dtype.size()).collect();
    debug_assert!(at.dtype != DType::I32);
    Ok(session.write(at, &bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::device::DeviceRequest;

    #[test]
    fn turns_are_orders_of_all_probes() {
        let mut turns = Turns(1);
        let orders: Vec<Vec<usize>> = (0..4).map(|_| turns.next(9)).collect();
        assert!(orders.windows(2).all(|pair| pair[0] != pair[1]));
        for mut order in orders {
            order.sort_unstable();
            assert_eq!(order, (0..9).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_cpu_is_measured_through_its_backend() {
        let cpu = options::Setting::Value(crate::config::Device::Cpu);
        let device = Device::open(&DeviceRequest { device: cpu, ..DeviceRequest::default() }).unwrap();
        let mut reported = 0;
        let found = calibrate(&device, Plan::of(&device.machine, true), &mut |_| reported += 1).unwrap();
        let machine = found.machine;
        assert!(reported > 1 && found.table.lines().count() > 5, "{}", found.table);
        assert!(matches!(machine.origin, Origin::Calibrated { .. }));
        assert!(machine.f32_flops > 1e8 && machine.bandwidth > 1e7, "{machine:?}");
        assert_eq!((machine.memory, machine.arch), (device.machine.memory, device.machine.arch));
    }
}
