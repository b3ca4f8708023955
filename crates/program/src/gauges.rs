//! Readings of a device's sensors. Knows names and units, not how they are read.

/// The sensors at one moment; `None` for each that the device does not report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gauges {
    /// Share of the time, from 0 to 1, in which anything ran.
    pub utilization: Option<f64>,
    /// Share of the time, from 0 to 1, in which memory was read or written.
    pub memory_utilization: Option<f64>,
    /// Clock of the SMs, MHz.
    pub clock: Option<f64>,
    /// Clock of the memory, MHz.
    pub memory_clock: Option<f64>,
    /// Power draw of the device, watts.
    pub power: Option<f64>,
    /// The most that the device may draw, watts.
    pub power_limit: Option<f64>,
    /// Temperature of the GPU, degrees Celsius.
    pub temperature: Option<f64>,
    /// Bytes in use by all processes.
    pub memory_used: Option<usize>,
    /// Bytes of device memory in total.
    pub memory_total: Option<usize>,
}
