//! The parts that this machine provides for running programs, those that are missing, and the command that installs
//! them: for `surogate doctor` and the choice of a device. Never fails: missing parts are reported. Loads no program.

use crate::driver::{Device, Driver, Properties};
use crate::error::{Error, Result};
use crate::library::{
    ARCHITECTURE_VARIABLE, Kind, Opened, Origin, Search, open_amdsmi, open_cublaslt, open_cudnn, open_driver,
    open_nccl, open_nvml, open_nvrtc,
};
use crate::nvml::Nvml;
use crate::nvrtc::Compiler;
use crate::vendor::Vendor;
use std::fmt;
use std::path::{Path, PathBuf};

/// The first driver release that takes the machine code of CUDA 13.
const DRIVER_FOR_13: &str = "580";

/// A library that can be used.
#[derive(Clone, Debug, PartialEq)]
pub struct UsableLibrary {
    pub path: PathBuf,
    pub origin: Origin,
    pub version: String,
    /// The (major, minor) version of CUDA that it is made for; `None` where it does not depend on one.
    cuda: Option<(u32, u32)>,
}

/// The reason why something cannot be used, and its remedy.
#[derive(Clone, Debug, PartialEq)]
pub struct Missing {
    pub reason: String,
    /// The places where it was looked for, if it is not there at all.
    pub looked_for: Vec<String>,
    /// The remedy: a command, or words where no command does it.
    pub mend: String,
}

/// The state of one library.
#[derive(Clone, Debug)]
pub struct LibraryReport {
    pub kind: Kind,
    pub state: std::result::Result<UsableLibrary, Missing>,
}

/// Everything that the backend finds on this machine of one vendor.
#[derive(Clone, Debug)]
pub struct Report {
    pub vendor: Vendor,
    pub libraries: Vec<LibraryReport>,
    /// The visible GPUs, or the reason why there are none.
    pub devices: std::result::Result<Vec<Properties>, Missing>,
    /// Conflicts between installed libraries: no program runs with them.
    pub conflicts: Vec<Missing>,
    /// Release of the installed driver, such as 580.65.06, where the system reports it.
    pub driver_release: Option<String>,
}

/// Returns the GPUs that programs can run on, in their order. An error names the missing part of the driver.
pub fn devices(search: &Search) -> Result<Vec<Properties>> {
    let driver = Driver::new(open_driver(search)?.table)?;
    (0..driver.device_count()?)
        .map(|index| Device::properties(&driver, index, search.architecture.as_deref()))
        .collect()
}

impl Report {
    /// Looks for every library and every GPU.
    pub fn new(search: &Search) -> Report {
        Report::of(search, Kind::all(search.vendor))
    }

    /// Looks for what a run on one GPU may need.
    pub fn for_one_gpu(search: &Search) -> Report {
        Report::of(search, &[Kind::Driver, Kind::Nvrtc, Kind::CublasLt, Kind::Cudnn])
    }

    /// Looks for what a run on GPUs of several nodes may need.
    pub fn for_nodes(search: &Search) -> Report {
        Report::of(search, &[Kind::Driver, Kind::Nvrtc, Kind::CublasLt, Kind::Cudnn, Kind::Nccl])
    }

    /// The version of a library that can be used.
    pub fn version(&self, kind: Kind) -> Option<&str> {
        let of = self.libraries.iter().find(|library| library.kind == kind)?;
        of.state.as_ref().ok().map(|usable| usable.version.as_str())
    }

    fn of(search: &Search, kinds: &[Kind]) -> Report {
        let vendor = search.vendor;
        let library = |kind: &Kind| LibraryReport {
            kind: *kind,
            state: describe(search, *kind).map_err(|error| missing(vendor, *kind, error)),
        };
        let has = |kind: &&Kind| Kind::all(vendor).contains(kind);
        let libraries: Vec<LibraryReport> = kinds.iter().filter(has).map(library).collect();
        Report {
            vendor,
            conflicts: conflicts(vendor, &libraries),
            libraries,
            devices: devices(search).map_err(|error| missing(vendor, Kind::Driver, error)),
            driver_release: driver_release(vendor),
        }
    }

    /// True if programs can run here. Those with bf16 attention also need cuDNN: loading one without it is rejected.
    pub fn usable(&self) -> bool {
        let found = |kind| self.libraries.iter().any(|l| l.kind == kind && l.state.is_ok());
        let needed = [Kind::Driver, Kind::Nvrtc, Kind::CublasLt];
        let devices = self.devices.as_ref().is_ok_and(|devices| !devices.is_empty());
        needed.into_iter().all(found) && devices && self.conflicts.is_empty()
    }
}

/// The version of a library that has no call for it without a GPU, from the name of the file that the usual name leads to:
/// `libhipblaslt.so.1` to `libhipblaslt.so.1.0.70000`.
fn version_in_name(path: &Path) -> String {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = real.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    name.split_once(".so.").map_or_else(|| "unknown".to_owned(), |(_, version)| version.to_owned())
}

fn describe(search: &Search, kind: Kind) -> Result<UsableLibrary> {
    let of_nvidia = search.vendor == Vendor::Nvidia;
    let text = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    Ok(match kind {
        Kind::Driver => {
            let opened = open_driver(search)?;
            let (path, origin) = (opened.path, opened.origin);
            let cuda = Driver::new(opened.table)?.version()?;
            let name = if of_nvidia { "CUDA" } else { "HIP" };
            UsableLibrary { path, origin, version: format!("{name} {}", text(cuda)), cuda: Some(cuda) }
        }
        Kind::Nvrtc => {
            let opened = open_nvrtc(search)?;
            let (path, origin) = (opened.path.clone(), opened.origin);
            let cuda = Compiler::new(opened)?.version();
            UsableLibrary { path, origin, version: text(cuda), cuda: Some(cuda) }
        }
        Kind::CublasLt if !of_nvidia => {
            let Opened { path, origin, .. } = open_cublaslt(search)?;
            UsableLibrary { version: version_in_name(&path), path, origin, cuda: None }
        }
        Kind::Nvml if !of_nvidia => {
            let Opened { path, origin, .. } = open_amdsmi(search)?;
            UsableLibrary { version: version_in_name(&path), path, origin, cuda: None }
        }
        Kind::CublasLt => {
            let opened = open_cublaslt(search)?;
            let version = crate::cublaslt::version(&opened.table);
            // cuBLAS 13.1 belongs to a CUDA 13, not necessarily to CUDA 13.1.
            let major = version.split('.').next().and_then(|major| major.parse().ok());
            UsableLibrary { path: opened.path, origin: opened.origin, version, cuda: major.map(|major| (major, 0)) }
        }
        Kind::Cudnn => {
            let opened = open_cudnn(search)?;
            let (path, origin) = (opened.path.clone(), opened.origin);
            let version = crate::cudnn::Cudnn::new(opened).version();
            UsableLibrary { path, origin, version: dotted(version as u64), cuda: None }
        }
        Kind::Nccl => {
            let opened = open_nccl(search)?;
            UsableLibrary { version: nccl_version(&opened.table), path: opened.path, origin: opened.origin, cuda: None }
        }
        Kind::Nvml => {
            let opened = open_nvml(search)?;
            let (path, origin) = (opened.path.clone(), opened.origin);
            UsableLibrary {
                path,
                origin,
                version: format!("driver {}", Nvml::new(opened)?.driver_version()?),
                cuda: None,
            }
        }
    })
}

fn dotted(version: u64) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[allow(unsafe_code, reason = "one call through NCCL's function table")]
fn nccl_version(table: &crate::sys::nccl::NcclTable) -> String {
    let mut version = 0;
    // SAFETY: the pointer is to a live local.
    let status = unsafe { (table.ncclGetVersion)(&mut version) };
    match status {
        crate::sys::nccl::SUCCESS => dotted(version as u64),
        status => format!("unknown (ncclGetVersion answered {status})"),
    }
}

/// Returns the conflicts of versions: code of CUDA 13 does not load on a driver for CUDA 12; the reverse does.
fn conflicts(vendor: Vendor, libraries: &[LibraryReport]) -> Vec<Missing> {
    if vendor == Vendor::Amd {
        return Vec::new();
    }
    let cuda = |kind: Kind| libraries.iter().find(|l| l.kind == kind).and_then(|l| l.state.as_ref().ok()?.cuda);
    let Some(driver) = cuda(Kind::Driver) else { return Vec::new() };
    let newer = [Kind::Nvrtc, Kind::CublasLt].into_iter().filter_map(|kind| {
        let of = cuda(kind).filter(|of| of.0 > driver.0)?;
        Some(Missing {
            looked_for: Vec::new(),
            reason: format!(
                "{} is of CUDA {}, and the driver takes programs up to CUDA {}.{}",
                kind.title(vendor),
                of.0,
                driver.0,
                driver.1
            ),
            mend: format!("update the driver to {DRIVER_FOR_13} or newer"),
        })
    });
    newer.collect()
}

/// Splits an error into its reason and its hint.
fn missing(vendor: Vendor, kind: Kind, error: Error) -> Missing {
    let reinstall = kind.package(vendor).map(|package| format!("pip install --force-reinstall --upgrade {package}"));
    let driver = || match vendor {
        Vendor::Amd => {
            "install ROCm 6 or newer with the kernel driver amdgpu, or name its folder in ROCM_PATH (in a container: \
                        start it with `--device /dev/kfd --device /dev/dri`)"
                .to_owned()
        }
        Vendor::Nvidia => format!(
            "install NVIDIA's driver, {DRIVER_FOR_13} or newer (in a container: start it with the GPU runtime, as \
             `docker run --gpus all` does)"
        ),
    };
    let mend = match (&error, kind) {
        (Error::LibraryMissing { .. }, Kind::Driver | Kind::Nvml) => driver(),
        (Error::LibraryMissing { .. }, _) if vendor == Vendor::Amd => driver(),
        (Error::Call { .. } | Error::Unsupported { .. }, Kind::Driver) if vendor == Vendor::Amd => {
            "see what `rocminfo` says: no GPU may be visible (HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES, a container without \
             /dev/kfd, a user outside of the groups render and video), or none that kernels are written for"
                .into()
        }
        (Error::LibraryMissing { .. }, Kind::Nccl) => "pip install nvidia-nccl-cu13".into(),
        (Error::LibraryMissing { .. }, _) => "pip install 'surogate[cuda]'".into(),
        (Error::Call { .. }, Kind::Driver) => {
            "see what `nvidia-smi` says: no GPU may be visible (CUDA_VISIBLE_DEVICES, \
             a container without the GPU runtime), or the driver was updated without a restart"
                .into()
        }
        _ => reinstall.unwrap_or_else(driver),
    };
    let (reason, looked_for) = match error {
        Error::LibraryMissing { tried, .. } => ("not found".to_owned(), tried),
        other => (other.to_string(), Vec::new()),
    };
    Missing { reason, looked_for, mend }
}

/// Reads the release of the loaded kernel module; AMD's has one where it does not come with the kernel.
fn driver_release(vendor: Vendor) -> Option<String> {
    match vendor {
        Vendor::Nvidia => release_in(&std::fs::read_to_string("/proc/driver/nvidia/version").ok()?),
        Vendor::Amd => Some(std::fs::read_to_string("/sys/module/amdgpu/version").ok()?.trim().to_owned()),
    }
}

fn release_in(text: &str) -> Option<String> {
    let is_release = |word: &&str| {
        word.contains('.') && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
    };
    text.lines().next()?.split_whitespace().find(is_release).map(str::to_owned)
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  to fix it: {}", self.reason, self.mend)
    }
}

/// Libraries that are not there at all are reported together, by what fixes it: a machine without a GPU lacks most of
/// them.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut absent: Vec<(&str, Vec<&LibraryReport>)> = Vec::new();
        for library in &self.libraries {
            let title = library.kind.title(self.vendor);
            match &library.state {
                Ok(found) => {
                    let release = self.driver_release.as_ref().filter(|_| library.kind == Kind::Driver);
                    let release = release.map(|release| format!(", release {release}")).unwrap_or_default();
                    writeln!(f, "{title}: {}{release}, {} ({})", found.version, found.path.display(), found.origin)?;
                }
                Err(missing) if !missing.looked_for.is_empty() => {
                    match absent.iter_mut().find(|(mend, _)| *mend == missing.mend) {
                        Some((_, libraries)) => libraries.push(library),
                        None => absent.push((&missing.mend, vec![library])),
                    }
                }
                Err(missing) => {
                    writeln!(f, "{title}: not usable: {missing}")?;
                    writeln!(f, "  needed for {}", library.kind.needed_for())?;
                }
            }
        }
        for (mend, libraries) in absent {
            let reported =
                libraries.iter().map(|of| format!("{} (for {})", of.kind.title(self.vendor), of.kind.needed_for()));
            writeln!(f, "Not found: {}\n  to fix it: {mend}", reported.collect::<Vec<_>>().join("; "))?;
        }
        self.conflicts.iter().try_for_each(|conflict| writeln!(f, "Conflict: {conflict}"))?;
        match &self.devices {
            Ok(devices) if devices.is_empty() => writeln!(f, "GPUs: none")?,
            Ok(devices) => {
                for (index, d) in devices.iter().enumerate() {
                    let gib = d.memory as f64 / (1u64 << 30) as f64;
                    writeln!(f, "GPU {index}: {}, {}, {gib:.0} GiB", d.name, d.of_device)?;
                    if d.architecture != d.of_device {
                        writeln!(f, "  kernels are compiled for {}, set by {ARCHITECTURE_VARIABLE}", d.architecture)?;
                    }
                }
            }
            Err(missing) if !missing.looked_for.is_empty() => writeln!(f, "GPUs: none: no driver was found")?,
            Err(missing) => writeln!(f, "GPUs: none: {missing}")?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::{
        Names, amdsmi::AmdSmiTable, cublaslt::CublasLtTable, cudnn::CudnnTable, driver::DriverTable, nccl::NcclTable,
        nvrtc::NvrtcTable,
    };
    use std::io::Write;
    use std::path::Path;
    use std::process::{Command, Stdio};

    /// NVIDIA's names of a table's functions.
    fn of(symbols: &[Names]) -> Vec<&'static str> {
        symbols.iter().filter_map(|names| names.of(Vendor::Nvidia)).collect()
    }

    /// AMD's names of them.
    fn of_amd(symbols: &[Names]) -> Vec<&'static str> {
        symbols.iter().filter_map(|names| names.of(Vendor::Amd)).collect()
    }

    /// A library with these functions, whose bodies answer 0 unless given.
    fn stub(path: &Path, symbols: &[&str], bodies: &[(&str, &str)]) {
        let body = |name: &str| bodies.iter().find(|(of, _)| *of == name).map_or("() { return 0; }", |(_, body)| body);
        let text: String = symbols.iter().map(|name| format!("long {name}{}\n", body(name))).collect();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-w", "-x", "c", "-", "-o"]).arg(path).stdin(Stdio::piped());
        let mut running = compiler.spawn().unwrap();
        running.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let built = running.wait().unwrap();
        assert!(built.success());
    }

    /// A fake tree of site-packages and a fake driver for CUDA `driver`.0, without a GPU.
    fn machine(root: &Path, driver: u32, wheels: u32) -> Search {
        let lib = root.join("nvidia/cu13/lib");
        let version = format!("(int *v) {{ *v = {driver}000; return 0; }}");
        let own = root.join("driver");
        stub(&own.join("libcuda.so.1"), &of(DriverTable::SYMBOLS), &[("cuDriverGetVersion", &version)]);
        let version = format!("(int *a, int *b) {{ *a = {wheels}; *b = 2; return 0; }}");
        stub(&lib.join("libnvrtc.so.13"), &of(NvrtcTable::SYMBOLS), &[("nvrtcVersion", &version)]);
        stub(&lib.join("libnvrtc-builtins.so.13.2"), &["nothing"], &[]);
        let version = format!("() {{ return {wheels}0304; }}");
        stub(&lib.join("libcublasLt.so.13"), &of(CublasLtTable::SYMBOLS), &[("cublasLtGetVersion", &version)]);
        let cudnn = root.join("nvidia/cudnn/lib/libcudnn.so.9");
        stub(&cudnn, &of(CudnnTable::SYMBOLS), &[("cudnnGetVersion", "() { return 91900; }")]);
        let nccl = root.join("nvidia/nccl/lib/libnccl.so.2");
        stub(&nccl, &of(NcclTable::SYMBOLS), &[("ncclGetVersion", "(int *v) { *v = 22809; return 0; }")]);
        Search { named: vec![own], site_packages: vec![root.to_owned()], ..Search::default() }
    }

    fn state(report: &Report, kind: Kind) -> &std::result::Result<UsableLibrary, Missing> {
        &report.libraries.iter().find(|library| library.kind == kind).unwrap().state
    }

    #[test]
    fn an_empty_machine_is_reported_and_not_usable() {
        let report = Report::new(&Search::default());
        assert!(!report.usable());
        let text = report.to_string();
        for kind in Kind::all(Vendor::Nvidia) {
            assert!(text.contains(&format!("{}: not usable: not found", kind.title(Vendor::Nvidia))), "{text}");
        }
        assert!(text.contains("to fix it: pip install 'surogate[cuda]'"), "{text}");
        assert!(text.contains("to fix it: install NVIDIA's driver, 580 or newer"), "{text}");
        assert!(text.contains("GPUs: none: not found"), "{text}");
    }

    #[test]
    fn wheels_are_found_with_their_versions() {
        let root = tempfile::tempdir().unwrap();
        let report = Report::new(&machine(root.path(), 13, 13));
        let of = |kind| state(&report, kind).clone().unwrap();
        let kinds = [Kind::Driver, Kind::Nvrtc, Kind::CublasLt, Kind::Cudnn, Kind::Nccl];
        let versions = kinds.map(|kind| of(kind).version);
        assert_eq!(versions, ["CUDA 13.0", "13.2", "13.3.4", "9.19.0", "2.28.9"].map(str::to_owned));
        assert_eq!(of(Kind::Driver).origin, Origin::Variable("SUROGATE_CUDA_PATH"));
        assert_eq!(of(Kind::Cudnn).origin, Origin::Wheel);
        assert_eq!(of(Kind::Cudnn).path, root.path().join("nvidia/cudnn/lib/libcudnn.so.9"));
        assert!(report.conflicts.is_empty());
        // Everything is there except a GPU.
        assert_eq!(report.devices, Ok(vec![]));
        assert!(!report.usable());
        assert!(report.to_string().contains("GPUs: none"));
    }

    #[test]
    fn libraries_that_are_newer_than_the_driver_are_a_conflict() {
        let root = tempfile::tempdir().unwrap();
        let report = Report::new(&machine(root.path(), 12, 13));
        assert_eq!(report.conflicts.len(), 2);
        let text = report.to_string();
        assert!(text.contains("NVRTC is of CUDA 13, and the driver takes programs up to CUDA 12.0"), "{text}");
        assert!(text.contains("update the driver to 580 or newer"), "{text}");
        let older = tempfile::tempdir().unwrap();
        assert!(Report::new(&machine(older.path(), 13, 12)).conflicts.is_empty(), "an older toolkit is fine");
    }

    #[test]
    fn an_old_library_and_a_broken_one_say_how_to_replace_them() {
        let root = tempfile::tempdir().unwrap();
        let search = machine(root.path(), 13, 13);
        stub(&root.path().join("nvidia/cudnn/lib/libcudnn.so.9"), &["cudnnGetVersion"], &[]);
        std::fs::write(root.path().join("nvidia/cu13/lib/libcublasLt.so.13"), b"no library").unwrap();
        let report = Report::new(&search);
        let old = state(&report, Kind::Cudnn).clone().unwrap_err();
        assert!(old.reason.contains("has no function"), "{old}");
        assert_eq!(old.mend, "pip install --force-reinstall --upgrade nvidia-cudnn-cu13");
        let broken = state(&report, Kind::CublasLt).clone().unwrap_err();
        assert!(broken.reason.contains("cannot be loaded"), "{broken}");
        assert_eq!(broken.mend, "pip install --force-reinstall --upgrade nvidia-cublas");
        assert!(state(&report, Kind::Nvrtc).is_ok() && state(&report, Kind::Nccl).is_ok());
    }

    #[test]
    fn a_driver_that_does_not_start_is_not_called_absent() {
        let root = tempfile::tempdir().unwrap();
        let search = machine(root.path(), 13, 13);
        let name = "(int code, char **text) { *text = \"CUDA_ERROR_NO_DEVICE\"; return 0; }";
        let driver = root.path().join("driver/libcuda.so.1");
        stub(&driver, &of(DriverTable::SYMBOLS), &[("cuInit", "() { return 100; }"), ("cuGetErrorName", name)]);
        let found = devices(&search).map_err(|error| missing(Vendor::Nvidia, Kind::Driver, error)).unwrap_err();
        assert!(found.reason.contains("CUDA_ERROR_NO_DEVICE"), "{found}");
        assert!(found.mend.contains("nvidia-smi"), "{found}");
    }

    /// A fake installation of ROCm with HIP `hip`, whose driver shows `gpus` GPUs of an architecture.
    fn rocm(root: &Path, gpus: usize, architecture: &str) -> Search {
        let lib = root.join("lib");
        let set = |body: &str| format!("(int *v) {{ *v = {body}; return 0; }}");
        let (version, count) = (set("70152211"), set(&gpus.to_string()));
        let name = "(char *t, int n, int d) { t[0] = 'M'; t[1] = 0; return 0; }";
        let properties = format!(
            "(char *p, int d) {{ const char *n = \"{architecture}\"; for (int i = 0; n[i]; i++) p[1160 + i] = n[i]; return 0; }}"
        );
        let attribute = "(int *v, int which, int d) { *v = which == 63 ? 304 : which == 74 ? 65536 : 1000; return 0; }";
        let bodies = [
            ("hipDriverGetVersion", version.as_str()),
            ("hipGetDeviceCount", &count),
            ("hipDeviceGetName", name),
            ("hipGetDevicePropertiesR0600", &properties),
            ("hipDeviceGetAttribute", attribute),
        ];
        stub(&lib.join("libamdhip64.so.7"), &of_amd(DriverTable::SYMBOLS), &bodies);
        let version = "(int *a, int *b) { *a = 7; *b = 1; return 0; }";
        stub(&lib.join("libhiprtc.so.7"), &of_amd(NvrtcTable::SYMBOLS), &[("hiprtcVersion", version)]);
        stub(&lib.join("libhipblaslt.so.1.1.70152"), &of_amd(CublasLtTable::SYMBOLS), &[]);
        std::os::unix::fs::symlink("libhipblaslt.so.1.1.70152", lib.join("libhipblaslt.so.1")).unwrap();
        let version = "(int *v) { *v = 22707; return 0; }";
        stub(&lib.join("librccl.so.1"), &of_amd(NcclTable::SYMBOLS), &[("ncclGetVersion", version)]);
        stub(&lib.join("libamd_smi.so.26"), &of_amd(AmdSmiTable::SYMBOLS), &[]);
        Search { vendor: Vendor::Amd, named: vec![root.to_owned()], ..Search::default() }
    }

    #[test]
    fn an_installation_of_rocm_is_found_with_its_versions_and_gpus() {
        let root = tempfile::tempdir().unwrap();
        let report = Report::new(&rocm(root.path(), 2, "gfx942:sramecc+:xnack-"));
        let versions: Vec<String> =
            report.libraries.iter().map(|of| of.state.clone().unwrap_or_else(|e| panic!("{e}")).version).collect();
        assert_eq!(versions, ["HIP 7.1", "7.1", "1.1.70152", "2.27.7", "26"]);
        let devices = report.devices.clone().unwrap();
        assert_eq!((devices.len(), devices[1].to_string()), (2, "M, gfx942, 304 multiprocessors".to_owned()));
        assert_eq!(devices[0].shared_memory_per_block, 65_536);
        assert!(report.usable() && report.conflicts.is_empty());
        let text = report.to_string();
        assert!(text.contains("hipBLASLt: 1.1.70152, ") && text.contains("(SUROGATE_ROCM_PATH)"), "{text}");
        assert!(!text.contains("cuDNN") && !text.contains("CUDA"), "{text}");
    }

    #[test]
    fn an_amd_gpu_that_kernels_are_not_written_for_is_named() {
        let root = tempfile::tempdir().unwrap();
        let report = Report::new(&rocm(root.path(), 1, "gfx1030"));
        let why = report.devices.clone().unwrap_err();
        assert!(why.reason.starts_with("M, gfx1030: expected gfx90a, gfx942"), "{why}");
        assert!(!report.usable());
    }

    #[test]
    fn a_machine_without_rocm_says_what_to_install() {
        let report = Report::new(&Search { vendor: Vendor::Amd, ..Search::default() });
        assert!(report.libraries.len() == 5 && !report.usable());
        let text = report.to_string();
        assert!(text.contains("HIP (libamdhip64): not usable: not found"), "{text}");
        assert!(text.contains("to fix it: install ROCm 6 or newer"), "{text}");
    }

    #[test]
    fn the_release_is_read_from_the_kernel_module() {
        let text =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0";
        assert_eq!(release_in(text).as_deref(), Some("580.159.04"));
        assert_eq!(release_in("nothing"), None);
    }
}
