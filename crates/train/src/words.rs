//! Sizes and times formatted for people.

const KIB: f64 = 1024.0;

/// `31.20 GiB`, `9.81 MiB`.
pub fn size(bytes: usize) -> String {
    let bytes = bytes as f64;
    match bytes {
        _ if bytes >= KIB.powi(3) => format!("{:.2} GiB", bytes / KIB.powi(3)),
        _ if bytes >= 0.01 * KIB.powi(2) => format!("{:.2} MiB", bytes / KIB.powi(2)),
        _ => format!("{bytes} bytes"),
    }
}

/// `0.22 ms`, `1.43 s`, `3 min 20 s`, `5 h 12 min`, `2 days 4 h`.
pub fn time(seconds: f64) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    let whole = seconds.round() as u64;
    match seconds {
        _ if seconds < 0.1 => format!("{:.2} ms", seconds * 1e3),
        _ if seconds < 1.0 => format!("{:.0} ms", seconds * 1e3),
        _ if seconds < 100.0 => format!("{seconds:.2} s"),
        _ if whole < 2 * HOUR => format!("{} min {} s", whole / MINUTE, whole % MINUTE),
        _ if whole < 2 * DAY => format!("{} h {} min", whole / HOUR, whole % HOUR / MINUTE),
        _ => format!("{} days {} h", whole / DAY, whole % DAY / HOUR),
    }
}

/// `1 step`, `2 steps`.
pub fn count(number: u64, what: &str) -> String {
    let end = match number {
        1 => "",
        _ if what.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {what}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_have_the_unit_that_fits() {
        let sizes = [0, 4 << 10, 512 << 20, 41_908 << 20].map(size);
        assert_eq!(sizes, ["0 bytes", "4096 bytes", "512.00 MiB", "40.93 GiB"]);
        let times = [0.000_22, 0.125, 1.432, 99.0, 200.4, 1946.38, 18_750.0, 187_300.0].map(time);
        let expected =
            ["0.22 ms", "125 ms", "1.43 s", "99.00 s", "3 min 20 s", "32 min 26 s", "5 h 12 min", "2 days 4 h"];
        assert_eq!(times, expected);
        let counts = [(1, "batch"), (2, "batch"), (0, "step")].map(|(n, what)| count(n, what));
        assert_eq!(counts, ["1 batch", "2 batches", "0 steps"]);
    }
}
