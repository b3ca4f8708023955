//! The machine that a plan is for: `--machine`, and files of measured values.
//!
//! Knows names and files; `program` defines what the values mean.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use program::{AttentionRate, Efficiency, Hidden, Link, Machine, Origin, Products, Realisation, machine_names};
use serde_json::{Value, json};

use crate::error::{Result, TrainError};
use crate::files::staged::replace_file;

/// Version of the file format.
const VERSION: u64 = 4;

/// The parsed value of `--machine`: `[NODESx][GPUSx]NAME[@GB/s]`.
#[derive(Clone, Debug, PartialEq)]
struct Request<'a> {
    nodes: usize,
    /// GPUs of each node.
    gpus: usize,
    /// A name, or a file.
    name: &'a str,
    /// Between nodes, bytes a second for each GPU.
    network: Option<f64>,
}

/// The machine that `--machine` asks for, and how many of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Requested {
    pub machine: Machine,
    /// GPUs of each node.
    pub gpus: usize,
    /// The number of nodes, if there are several, and the bytes a second between them for each GPU.
    pub nodes: Option<(usize, f64)>,
}

/// Reads what `--machine` says.
///
/// Errors: a form that cannot be read, an unknown name, a file that is none of these, nodes without a rate between them.
pub fn requested(text: &str) -> Result<Requested> {
    if Path::new(text).is_file() {
        return Ok(Requested { machine: read(Path::new(text))?, gpus: 1, nodes: None });
    }
    let Request { nodes, gpus, name, network } = request(text)?;
    let machine = match Machine::named(name) {
        Some(machine) => machine,
        None if Path::new(name).is_file() => read(Path::new(name))?,
        None => return Err(unknown(text, name)),
    };
    let wrong = |why: String| Err(TrainError::Usage(format!("`--machine {text}` {why}")));
    match (nodes, network) {
        (1, None) => Ok(Requested { machine, gpus, nodes: None }),
        (1, Some(_)) => {
            wrong("names a network, but one node; remove the part after `@`: it is the rate between nodes".into())
        }
        (nodes, None) => wrong(format!(
            "asks for {nodes} nodes; expected the rate between them in GB/s for each GPU, such as `{text}@12.5`"
        )),
        (nodes, Some(rate)) => Ok(Requested { machine, gpus, nodes: Some((nodes, rate)) }),
    }
}

/// Reads what `--machine` says where one device is meant. Errors: those of [`requested`], and more than one device.
pub fn alone(text: &str) -> Result<Machine> {
    match requested(text)? {
        Requested { machine, gpus: 1, nodes: None } => Ok(machine),
        _ => Err(TrainError::Usage(format!("`--machine {text}`: expected one device, such as h100"))),
    }
}

fn request(text: &str) -> Result<Request<'_>> {
    let wrong = |why: &str| {
        let form = "expected [NODESx][GPUSx]NAME[@GB/s], such as h100, 8xh200 or 2x8xh200@12.5";
        TrainError::Usage(format!("`--machine {text}`: {why}; {form}"))
    };
    let (mut name, network) = match text.rsplit_once('@') {
        None => (text, None),
        Some((name, rate)) => match rate.parse::<f64>() {
            Ok(rate) if rate > 0.0 && rate.is_finite() => (name, Some(rate * 1e9)),
            _ => return Err(wrong(&format!("`{rate}` after `@` is not a rate"))),
        },
    };
    let mut counts = Vec::new();
    while let Some((count, rest)) = name.split_once(['x', 'X'])
        && !count.is_empty()
        && count.bytes().all(|byte| byte.is_ascii_digit())
    {
        let count: usize = count.parse().map_err(|_| wrong("too large a number"))?;
        if count == 0 {
            return Err(wrong("expected at least one GPU"));
        }
        counts.push(count);
        name = rest;
    }
    let (nodes, gpus) = match counts[..] {
        [] => (1, 1),
        [gpus] => (1, gpus),
        [nodes, gpus] => (nodes, gpus),
        _ => return Err(wrong("more than two numbers")),
    };
    if name.is_empty() {
        return Err(wrong("there is no name"));
    }
    Ok(Request { nodes, gpus, name, network })
}

fn unknown(text: &str, name: &str) -> TrainError {
    let names = machine_names();
    let near = options::nearest(&name.to_ascii_lowercase(), names.iter().copied());
    let near = near.map_or(String::new(), |near| format!("; did you mean `{near}`?"));
    let known = names.join(", ");
    TrainError::Usage(format!(
        "`--machine {text}`: there is no machine and no file `{name}`{near}\n  known: {known}, and files that `surogate doctor \
         --calibrate` writes"
    ))
}

/// A machine of a file.
pub fn read(path: &Path) -> Result<Machine> {
    let text = data::small_file::read(path).map_err(|e| TrainError::io("read", path, e))?;
    parse(&text).map_err(|why| TrainError::Usage(format!("{}: this is not a machine: {why}", path.display())))
}

pub(crate) fn parse(text: &[u8]) -> std::result::Result<Machine, String> {
    let value: Value = serde_json::from_slice(text).map_err(|e| format!("no JSON: {e}"))?;
    from_json(&value)
}

/// Writes a file that [`read`] reads.
pub fn write(machine: &Machine, path: &Path) -> Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| TrainError::io("create", folder, e))?;
    }
    replace_file(path, "measured", format!("{:#}\n", to_json(machine)).as_bytes())
}

/// The file with a device's measured values, by its name and the version of its driver; None without a folder for
/// caches.
pub fn kept_at(device: &str, driver: &str) -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("SUROGATE_MACHINES").or_else(|| options::cache::folder_of_user("machines").ok())?;
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c.to_ascii_lowercase() } else { '-' };
    Some(folder.join(format!("{device} {driver}.json").chars().map(plain).collect::<String>()))
}

/// The measured machine of this device, with the current values of its driver; None if nothing was measured, or if
/// others could have written the file.
pub fn calibrated(present: &Machine, device: &str, driver: &str) -> Option<Machine> {
    let kept = parse(&options::cache::read_trusted(&kept_at(device, driver)?)?).ok()?;
    (kept.arch == present.arch && kept.units == present.units).then(|| Machine {
        name: present.name.clone(),
        memory: present.memory,
        context_bytes: present.context_bytes,
        ..kept
    })
}

pub(crate) fn to_json(machine: &Machine) -> Value {
    let Machine { efficiency, link, .. } = machine;
    let products = &efficiency.products;
    let (origin, date) = match &machine.origin {
        Origin::Calibrated { date } => ("calibrated", Some(date)),
        Origin::Kind => ("kind", None),
        Origin::DataSheet => ("data sheet", None),
        Origin::Other => ("other", None),
    };
    let point = |of: &AttentionRate| {
        json!({
            "pass": if of.backward { "backward" } else { "forward" }, "by": of.by.name(), "hidden": of.hidden.name(),
            "head_dim": of.head_dim, "keys": of.keys, "share": of.share,
        })
    };
    json!({
        "surogate_machine": VERSION,
        "name": machine.name,
        "arch": machine.arch.to_string(),
        "memory": machine.memory,
        "context_bytes": machine.context_bytes,
        "units": machine.units,
        "origin": origin,
        "date": date,
        "bandwidth": machine.bandwidth,
        "link_one_way": link.one_way,
        "link_both_ways": link.both_ways,
        "bf16_flops": machine.bf16_flops,
        "fp8_flops": machine.fp8_flops,
        "fp4_flops": machine.fp4_flops,
        "f32_flops": machine.f32_flops,
        "efficiency": {
            "launch": efficiency.launch,
            "entry": efficiency.entry,
            "bandwidth": efficiency.bandwidth,
            "kernels": efficiency.kernels,
            "kernel_bandwidth": efficiency.kernel_bandwidth,
            "addend_pass": efficiency.addend_pass,
            "products": {
                "launch": products.launch, "hot": products.hot, "small_tiles": products.small_tiles,
                "wave": products.wave, "depth": products.depth, "bandwidth": products.bandwidth,
            },
            "attention": efficiency.attention.iter().map(point).collect::<Vec<_>>(),
        },
    })
}

fn from_json(value: &Value) -> std::result::Result<Machine, String> {
    if value["surogate_machine"] != VERSION {
        return Err(format!("`surogate_machine` is {}, expected {VERSION}", value["surogate_machine"]));
    }
    let found = |name: &str| value.pointer(name).ok_or_else(|| format!("there is no `{name}`"));
    let text = |name: &str| found(name)?.as_str().map(str::to_owned).ok_or_else(|| format!("`{name}` is not a string"));
    let number = |name: &str| {
        let of = found(name)?.as_f64().filter(|of| *of >= 0.0 && of.is_finite());
        of.ok_or_else(|| format!("`{name}` is not a number from 0"))
    };
    let rate = |name: &str| {
        let of = number(name)?;
        if of > 0.0 { Ok(of) } else { Err(format!("`{name}` is 0")) }
    };
    let count =
        |name: &str| found(name)?.as_u64().map(|of| of as usize).ok_or_else(|| format!("`{name}` is not a count"));
    let product = |name: &str| rate(&format!("/efficiency/products/{name}"));
    let arch = text("/arch")?;
    let points = found("/efficiency/attention")?.as_array().ok_or("`/efficiency/attention` is no list")?;
    let attention = points.iter().map(point).collect::<Option<Vec<_>>>().ok_or("a point of attention is incomplete")?;
    Ok(Machine {
        name: text("/name")?,
        arch: arch.parse().map_err(|expected| format!("`/arch` is `{arch}`, {expected}"))?,
        memory: count("/memory")?,
        context_bytes: count("/context_bytes")?,
        units: count("/units")?,
        origin: match text("/origin")?.as_str() {
            "calibrated" => Origin::Calibrated { date: text("/date")? },
            "kind" => Origin::Kind,
            "data sheet" => Origin::DataSheet,
            "other" => Origin::Other,
            word => return Err(format!("`/origin` is `{word}`")),
        },
        bandwidth: rate("/bandwidth")?,
        link: Link { one_way: rate("/link_one_way")?, both_ways: rate("/link_both_ways")? },
        bf16_flops: rate("/bf16_flops")?,
        fp8_flops: rate("/fp8_flops")?,
        // Files of devices without such units may lack it.
        fp4_flops: if value.get("fp4_flops").is_some() { rate("/fp4_flops")? } else { rate("/bf16_flops")? },
        f32_flops: rate("/f32_flops")?,
        efficiency: Efficiency {
            launch: number("/efficiency/launch")?,
            entry: number("/efficiency/entry")?,
            bandwidth: rate("/efficiency/bandwidth")?,
            kernels: rate("/efficiency/kernels")?,
            kernel_bandwidth: rate("/efficiency/kernel_bandwidth")?,
            addend_pass: found("/efficiency/addend_pass")?
                .as_bool()
                .ok_or("`addend_pass` is neither true nor false")?,
            products: Products {
                launch: number("/efficiency/products/launch")?,
                hot: product("hot")?,
                small_tiles: product("small_tiles")?,
                wave: number("/efficiency/products/wave")?,
                depth: number("/efficiency/products/depth")?,
                bandwidth: product("bandwidth")?,
            },
            attention: Cow::Owned(attention),
        },
    })
}

fn point(value: &Value) -> Option<AttentionRate> {
    let (by, hidden) = (value["by"].as_str()?, value["hidden"].as_str()?);
    Some(AttentionRate {
        backward: match value["pass"].as_str()? {
            "forward" => false,
            "backward" => true,
            _ => return None,
        },
        by: Realisation::ALL.into_iter().find(|of| of.name() == by)?,
        hidden: Hidden::ALL.into_iter().find(|of| of.name() == hidden)?,
        head_dim: value["head_dim"].as_u64()? as usize,
        keys: value["keys"].as_f64().filter(|keys| *keys > 0.0)?,
        share: value["share"].as_f64().filter(|share| *share > 0.0)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_nodes_gpus_name_rate() {
        let of = |text| request(text).map(|of| (of.nodes, of.gpus, of.name.to_owned(), of.network)).ok();
        assert_eq!(of("H100"), Some((1, 1, "H100".into(), None)));
        assert_eq!(of("8xh200"), Some((1, 8, "h200".into(), None)));
        assert_eq!(of("2x8Xrtx4090@12.5"), Some((2, 8, "rtx4090".into(), Some(12.5e9))));
        assert_eq!(of("rtx4090"), Some((1, 1, "rtx4090".into(), None)));
        for wrong in ["", "8x", "0xh100", "2x2x2xh100", "h100@", "h100@fast", "h100@-3", "99999999999999999999xh100"] {
            assert!(request(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn several_nodes_are_planned_for_with_the_rate_between_them() {
        let found = |text: &str| requested(text).map(|of| (of.machine.name, of.gpus, of.nodes)).unwrap();
        assert_eq!(found("RTX4090"), ("rtx4090".to_owned(), 1, None));
        assert_eq!(found("1x8xh100"), ("h100".to_owned(), 8, None));
        assert_eq!(found("2x8xh200@12.5"), ("h200".to_owned(), 8, Some((2, 12.5e9))));
        let refused = |text: &str| requested(text).unwrap_err().to_string();
        assert!(refused("2x8xh200").contains("2 nodes; expected the rate between them"));
        assert!(refused("h100@50").contains("one node"));
        let unknown = refused("h20");
        assert!(unknown.contains("did you mean `h200`?") && unknown.contains("a100-80"), "{unknown}");
    }

    fn close(a: &Value, b: &Value) {
        match (a, b) {
            (Value::Array(a), Value::Array(b)) => {
                assert_eq!(a.len(), b.len());
                a.iter().zip(b).for_each(|(a, b)| close(a, b));
            }
            (Value::Object(a), Value::Object(b)) => {
                assert_eq!(a.len(), b.len());
                a.iter().for_each(|(name, a)| close(a, &b[name]));
            }
            (Value::Number(a), Value::Number(b)) => {
                let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
                assert!((a - b).abs() <= 1e-12 * b.abs(), "{a} {b}");
            }
            (a, b) => assert_eq!(a, b),
        }
    }

    #[test]
    fn what_others_may_write_is_not_believed() {
        use std::os::unix::fs::PermissionsExt;
        let device = format!("test of {}", std::process::id());
        let (present, path) = (Machine::h200(), kept_at(&device, "1").unwrap());
        write(&Machine { bandwidth: 1e12, ..Machine::h200() }, &path).unwrap();
        let found = || calibrated(&present, &device, "1").map(|machine| machine.bandwidth);
        assert_eq!(found(), Some(1e12));
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(found(), None);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_machine_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.json");
        let date = "2026-11-22".to_owned();
        for machine in [
            Machine::cpu(8 << 30, 4),
            Machine { origin: Origin::Calibrated { date }, ..Machine::h200() },
            Machine::named("b200").unwrap(),
        ] {
            // A process of a container has the number of the one before it, which was killed.
            let left = format!(".m.json.measured.{}.0.tmp", std::process::id());
            std::fs::write(folder.path().join(left), "left").unwrap();
            write(&machine, &path).unwrap();
            let found = requested(path.to_str().unwrap()).unwrap().machine;
            assert_eq!((&found.name, &found.arch, found.memory), (&machine.name, &machine.arch, machine.memory));
            assert_eq!((found.units, &found.origin), (machine.units, &machine.origin));
            // Numbers pass through text.
            close(&to_json(&found), &to_json(&machine));
        }
        let damaged = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path).unwrap_err().to_string()
        };
        assert!(damaged("{").contains("no JSON"));
        assert!(damaged("{}").contains("surogate_machine"));
        let text = format!("{:#}", to_json(&Machine::h200()));
        assert!(damaged(&text.replace("\"bandwidth\": 0.93", "\"bandwidth\": 0")).contains("/efficiency/bandwidth"));
        assert!(damaged(&text.replace("sm_90a", "sm_9b")).contains("`/arch` is `sm_9b`, expected an architecture"));
        assert!(damaged(&text.replace("\"scalar\"", "\"abacus\"")).contains("point of attention"));
    }
}
