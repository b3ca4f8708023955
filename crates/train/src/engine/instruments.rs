//! Samples the device's sensors for the log: utilization, clocks, power, memory.
//!
//! On the CPU the device is this process: the share of CPU time that it used, and its memory. Knows when to sample, not
//! who reads the log.

use std::time::Instant;

use program::Gauges;
use serde_json::{Value, json};

use crate::config::Config;
use crate::engine::device::Device;

/// Ticks of the process's clock in a second, as Linux counts them for programs.
const TICKS: f64 = 100.0;

/// Intervals of looking at the devices, and the last readings.
pub struct Instruments {
    /// Steps from one look to the next; 0 never looks.
    every: u64,
    /// The time of the last look, and the seconds that the process's threads had run by then.
    last: Option<(Instant, f64)>,
}

/// Steps between samples where the options leave it open, and samples of a run with fewer than that times as many.
const USUAL: u64 = 100;

impl Instruments {
    pub fn new(every: u64) -> Instruments {
        Instruments { every, last: process_seconds().map(|ran| (Instant::now(), ran)) }
    }

    /// Steps from one sample to the next in a run of `total` steps: those of the options, else the usual ones, or fewer,
    /// so that the curves of a short run have points.
    pub fn interval(config: &Config, total: Option<u64>) -> u64 {
        let open = || total.map_or(USUAL, |total| (total / USUAL).clamp(1, USUAL));
        config.logging.log_gpu_util.unwrap_or_else(open)
    }

    /// An event for the log after `done` steps, where it is time for one. Where the instruments cannot be read, a
    /// sentence that says so; after it nothing is asked any more.
    pub fn look(&mut self, done: u64, device: &Device) -> Option<Result<Value, String>> {
        if self.every == 0 || !done.is_multiple_of(self.every) {
            return None;
        }
        let read = match device.backend.gauges() {
            Ok(Some(gauges)) => Ok(gauges),
            Ok(None) => Ok(self.of_process(device)),
            Err(error) => Err(error),
        };
        Some(match read {
            Ok(gauges) => Ok(event(done - 1, &gauges)),
            Err(error) => {
                self.every = 0;
                Err(format!("load, clocks and power of the device are not recorded: {error}"))
            }
        })
    }

    fn of_process(&mut self, device: &Device) -> Gauges {
        let now = process_seconds().map(|ran| (Instant::now(), ran));
        let share = self.last.zip(now).map(|((then, ran_then), (now, ran))| {
            let could = now.duration_since(then).as_secs_f64() * device.machine.units as f64;
            ((ran - ran_then) / could.max(1e-9)).clamp(0.0, 1.0)
        });
        self.last = now;
        let (memory_used, memory_total) = (resident(), Some(device.machine.memory));
        Gauges { utilization: share, memory_used, memory_total, ..Gauges::default() }
    }
}

fn event(step: u64, of: &Gauges) -> Value {
    json!({
        "event": "device",
        "step": step,
        "utilization": of.utilization,
        "memory_utilization": of.memory_utilization,
        "clock_mhz": of.clock,
        "memory_clock_mhz": of.memory_clock,
        "power_watts": of.power,
        "power_limit_watts": of.power_limit,
        "temperature_celsius": of.temperature,
        "memory_used": of.memory_used,
        "memory_total": of.memory_total,
    })
}

/// Seconds that the threads of this process have run, all together; none where the system does not say.
fn process_seconds() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name in parentheses may hold anything; the state after it is the third field, the times are 14 and 15.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
    Some((ticks(14)? + ticks(15)?) / TICKS)
}

/// Bytes of host memory that this process holds; none where the system does not say.
pub(crate) fn resident() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse::<usize>().ok().map(|kilobytes| kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_works_has_run() {
        let begin = process_seconds().unwrap();
        let (mut sum, start) = (0u64, Instant::now());
        while start.elapsed().as_millis() < 60 {
            sum = sum.wrapping_mul(31).wrapping_add(std::hint::black_box(7));
        }
        std::hint::black_box(sum);
        assert!(process_seconds().unwrap() > begin);
    }

    #[test]
    fn this_process_holds_memory() {
        assert!(resident().is_some_and(|bytes| bytes > 1 << 20));
    }
}
