//! Finds a vendor's libraries on this machine and opens them by absolute path.
//!
//! The search order is: the folders in `SUROGATE_CUDA_PATH` (AMD: `SUROGATE_ROCM_PATH`), the pip wheels in the site-packages
//! folders that the caller names, the system (toolkit folders, then the loader's own search). `LD_LIBRARY_PATH` does not
//! have to be set.
//! No library is loaded from the working directory: relative paths in variables are ignored, and a loader that would
//! search there is not used. Missing libraries are reported, not guessed; the caller decides whether that matters.
#![allow(unsafe_code, reason = "opening a shared library runs its initialisers")]

use crate::error::{Error, Result};
use crate::sys::{amdsmi::AmdSmiTable, cublaslt::CublasLtTable, cudnn::CudnnTable, driver::DriverTable};
use crate::sys::{nccl::NcclTable, nvml::NvmlTable, nvrtc::NvrtcTable};
use crate::vendor::Vendor;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use program::Program;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Colon-separated folders that win over every other place, of NVIDIA's libraries and of AMD's.
pub const PATH_VARIABLE: &str = "SUROGATE_CUDA_PATH";
pub const ROCM_PATH_VARIABLE: &str = "SUROGATE_ROCM_PATH";

/// The variable that names the folder of a ROCm installation.
const ROCM_VARIABLE: &str = "ROCM_PATH";

/// Names the architecture that kernels are chosen and compiled for, such as `sm_80`.
pub const ARCHITECTURE_VARIABLE: &str = "SUROGATE_CUDA_ARCH";

/// The dynamic loader's variable. It separates with semicolons, too.
const LOADER_VARIABLE: &str = "LD_LIBRARY_PATH";

/// Library folders of distributions, containers and WSL.
const SYSTEM: [&str; 4] = ["/usr/lib/x86_64-linux-gnu", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib", "/usr/lib64"];

/// A library that the backend can use, by what it does: each vendor has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Driver,
    /// The compiler at run time.
    Nvrtc,
    /// The library of matrix products.
    CublasLt,
    /// Attention, NVIDIA's alone.
    Cudnn,
    /// The library of collectives between ranks.
    Nccl,
    /// The GPU's instruments.
    Nvml,
}

/// The names of a library, and of its files.
struct Names {
    /// In one word, for programs.
    name: &'static str,
    /// The name that messages have for users.
    title: &'static str,
    /// File names, the preferred major version first.
    files: &'static [&'static str],
}

const fn names(name: &'static str, title: &'static str, files: &'static [&'static str]) -> Names {
    Names { name, title, files }
}

impl Kind {
    /// The libraries that a vendor has.
    pub const fn all(vendor: Vendor) -> &'static [Kind] {
        use Kind::{CublasLt, Cudnn, Driver, Nccl, Nvml, Nvrtc};
        match vendor {
            Vendor::Nvidia => &[Driver, Nvrtc, CublasLt, Cudnn, Nccl, Nvml],
            Vendor::Amd => &[Driver, Nvrtc, CublasLt, Nccl, Nvml],
        }
    }

    const fn names(self, vendor: Vendor) -> Names {
        match (vendor, self) {
            (Vendor::Nvidia, Kind::Driver) => names("driver", "the CUDA driver (libcuda)", &["libcuda.so.1"]),
            (Vendor::Nvidia, Kind::Nvrtc) => names("nvrtc", "NVRTC", &["libnvrtc.so.13", "libnvrtc.so.12"]),
            (Vendor::Nvidia, Kind::CublasLt) => {
                names("cublaslt", "cuBLASLt", &["libcublasLt.so.13", "libcublasLt.so.12"])
            }
            (_, Kind::Cudnn) => names("cudnn", "cuDNN", &["libcudnn.so.9"]),
            (Vendor::Nvidia, Kind::Nccl) => names("nccl", "NCCL", &["libnccl.so.2"]),
            (Vendor::Nvidia, Kind::Nvml) => names("nvml", "NVML, the GPU's instruments", &["libnvidia-ml.so.1"]),
            (Vendor::Amd, Kind::Driver) => {
                names("hip", "HIP (libamdhip64)", &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"])
            }
            (Vendor::Amd, Kind::Nvrtc) => {
                names("hiprtc", "hiprtc", &["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"])
            }
            (Vendor::Amd, Kind::CublasLt) => {
                names("hipblaslt", "hipBLASLt", &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"])
            }
            (Vendor::Amd, Kind::Nccl) => names("rccl", "RCCL", &["librccl.so.1", "librccl.so"]),
            (Vendor::Amd, Kind::Nvml) => {
                let files = &["libamd_smi.so.26", "libamd_smi.so.25", "libamd_smi.so.24", "libamd_smi.so"];
                names("amdsmi", "AMD SMI, the GPU's instruments", files)
            }
        }
    }

    /// The name in one word, for programs.
    pub const fn name(self, vendor: Vendor) -> &'static str {
        self.names(vendor).name
    }

    /// The function that does not work without it.
    pub const fn needed_for(self) -> &'static str {
        match self {
            Kind::Driver | Kind::Nvrtc | Kind::CublasLt => "every run on a GPU",
            Kind::Cudnn => "attention in bfloat16 on a GPU",
            Kind::Nccl => "GPUs of several nodes",
            Kind::Nvml => "load, clocks and power of a GPU in the log",
        }
    }

    /// The library's name for people.
    pub const fn title(self, vendor: Vendor) -> &'static str {
        self.names(vendor).title
    }

    /// File names, the preferred major version first.
    pub const fn files(self, vendor: Vendor) -> &'static [&'static str] {
        self.names(vendor).files
    }

    /// Folders below a site-packages root into which pip wheels install it. ROCm has none on the usual registry.
    const fn wheel_folders(self, vendor: Vendor) -> &'static [&'static str] {
        match (vendor, self) {
            (Vendor::Amd, _) | (_, Kind::Driver | Kind::Nvml) => &[],
            (_, Kind::Nvrtc) => &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
            (_, Kind::CublasLt) => &["nvidia/cu13/lib", "nvidia/cublas/lib"],
            (_, Kind::Cudnn) => &["nvidia/cudnn/lib"],
            (_, Kind::Nccl) => &["nvidia/nccl/lib"],
        }
    }

    /// The pip package that contains it; `None` for the driver and for AMD's.
    pub const fn package(self, vendor: Vendor) -> Option<&'static str> {
        match (vendor, self) {
            (Vendor::Amd, _) | (_, Kind::Driver | Kind::Nvml) => None,
            (_, Kind::Nvrtc) => Some("nvidia-cuda-nvrtc"),
            (_, Kind::CublasLt) => Some("nvidia-cublas"),
            (_, Kind::Cudnn) => Some("nvidia-cudnn-cu13"),
            (_, Kind::Nccl) => Some("nvidia-nccl-cu13"),
        }
    }

    fn hint(self, vendor: Vendor) -> String {
        match self.package(vendor) {
            None if vendor == Vendor::Amd => {
                format!("install ROCm 6 or newer, or name its folder in {ROCM_VARIABLE} or {ROCM_PATH_VARIABLE}")
            }
            None => "install the NVIDIA driver (in a container: start it with the GPU runtime)".into(),
            Some(package) if self == Kind::Nccl => {
                format!("pip install {package}, or name its folder in {PATH_VARIABLE}")
            }
            Some(package) => {
                format!("pip install 'surogate[cuda]' (it brings {package}), or name its folder in {PATH_VARIABLE}")
            }
        }
    }
}

/// The place where a library was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The variable of this program that names the folder.
    Variable(&'static str),
    Wheel,
    System,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Variable(name) => name,
            Origin::Wheel => "pip wheel",
            Origin::System => "system",
        })
    }
}

/// The places to look at. Built once, from the environment or by a test.
#[derive(Clone, Debug, Default)]
pub struct Search {
    pub vendor: Vendor,
    pub named: Vec<PathBuf>,
    pub site_packages: Vec<PathBuf>,
    pub system: Vec<PathBuf>,
    /// True if the dynamic loader's own search (`ldconfig`, `LD_LIBRARY_PATH`) is tried last.
    pub ask_loader: bool,
    /// Remarks on the search for messages about missing libraries.
    pub remarks: Vec<String>,
    /// The architecture that kernels are chosen and compiled for in place of the GPU's own.
    pub architecture: Option<String>,
    /// Functions that are used in place of any library.
    pub given: Option<Given>,
}

impl Search {
    /// Returns the environment's places of NVIDIA's libraries and the site-packages folders of the Python that runs this
    /// process.
    pub fn from_environment(site_packages: Vec<PathBuf>) -> Search {
        Search::of(Vendor::Nvidia, site_packages)
    }

    /// Returns the environment's places of a vendor's libraries.
    pub fn of(vendor: Vendor, site_packages: Vec<PathBuf>) -> Search {
        Search::from_variables(vendor, site_packages, |name| std::env::var_os(name))
    }

    fn from_variables(
        vendor: Vendor,
        site_packages: Vec<PathBuf>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Search {
        let parts = |name: &str| -> Vec<PathBuf> {
            let value = variable(name).filter(|value| !value.is_empty()).unwrap_or_default();
            let separates = |byte: &u8| *byte == b':' || (name == LOADER_VARIABLE && *byte == b';');
            let parts = value.as_bytes().split(separates).map(|part| PathBuf::from(OsStr::from_bytes(part)));
            if value.is_empty() { Vec::new() } else { parts.collect() }
        };
        // Relative paths are dropped: they would mean the working directory, as does an empty part of the loader's variable.
        let absolute = |name: &str| parts(name).into_iter().filter(|path| path.is_absolute());
        let ask_loader = parts(LOADER_VARIABLE).iter().all(|path| path.is_absolute());
        let (mut system, mut remarks) = (Vec::new(), Vec::new());
        if !ask_loader {
            system.extend(absolute(LOADER_VARIABLE));
            remarks
                .push(format!("not by the loader's search: {LOADER_VARIABLE} has a part that is not an absolute path"));
        }
        let (homes, own, place, name) = match vendor {
            Vendor::Nvidia => (["CUDA_HOME", "CUDA_PATH"], PATH_VARIABLE, "/usr/local", "cuda"),
            Vendor::Amd => ([ROCM_VARIABLE, "HIP_PATH"], ROCM_PATH_VARIABLE, "/opt", "rocm"),
        };
        for home in homes {
            system.extend(absolute(home).flat_map(|root| toolkit_folders(vendor, &root)));
        }
        system.extend(absolute("CONDA_PREFIX").map(|root| root.join("lib")));
        let installed = toolkits(Path::new(place), name);
        system.extend(installed.iter().flat_map(|root| toolkit_folders(vendor, root)));
        system.extend(SYSTEM.map(PathBuf::from));
        // A relative path in this program's own variable is intended; an empty part is not.
        let named = parts(own).into_iter().filter(|path| !path.as_os_str().is_empty());
        let named = named.filter_map(|path| std::path::absolute(path).ok()).collect();
        let text = |value: OsString| value.to_string_lossy().into_owned();
        let architecture = variable(ARCHITECTURE_VARIABLE).filter(|value| !value.is_empty()).map(text);
        let architecture = architecture.filter(|_| vendor == Vendor::Nvidia);
        Search { vendor, named, site_packages, system, ask_loader, remarks, architecture, given: None }
    }

    /// This program's own variable for folders of libraries.
    const fn variable(&self) -> &'static str {
        match self.vendor {
            Vendor::Nvidia => PATH_VARIABLE,
            Vendor::Amd => ROCM_PATH_VARIABLE,
        }
    }

    /// Returns the folders for one library, best first. Folders that do not exist are kept: they are part of the answer
    /// to "where did you look".
    fn folders(&self, kind: Kind) -> Vec<(Origin, PathBuf)> {
        let mut folders = Vec::new();
        for root in &self.named {
            folders.push((Origin::Variable(self.variable()), root.clone()));
            folders.push((
                Origin::Variable(self.variable()),
                root.join(if self.vendor == Vendor::Amd { "lib" } else { "lib64" }),
            ));
            folders.extend(
                kind.wheel_folders(self.vendor).iter().map(|f| (Origin::Variable(self.variable()), root.join(f))),
            );
        }
        for root in &self.site_packages {
            folders.extend(kind.wheel_folders(self.vendor).iter().map(|f| (Origin::Wheel, root.join(f))));
        }
        folders.extend(self.system.iter().map(|f| (Origin::System, f.clone())));
        folders
    }

    /// Returns the file to open, or the list of folders that do not have it.
    pub fn locate(&self, kind: Kind) -> std::result::Result<(Origin, PathBuf), Vec<String>> {
        let folders = self.folders(kind);
        for (origin, folder) in &folders {
            for file in kind.files(self.vendor) {
                let path = folder.join(file);
                if path.is_file() {
                    return Ok((*origin, path));
                }
            }
        }
        let file = kind.files(self.vendor)[0];
        Err(folders.into_iter().map(|(_, folder)| folder.join(file).display().to_string()).collect())
    }
}

/// The library folders of a toolkit.
fn toolkit_folders(vendor: Vendor, root: &Path) -> [PathBuf; 2] {
    match vendor {
        Vendor::Nvidia => [root.join("lib64"), root.join("targets/x86_64-linux/lib")],
        Vendor::Amd => [root.join("lib"), root.join("lib64")],
    }
}

/// Toolkits below a folder: `cuda`, which the system's owner chose, then `cuda-13.1` and the like, newest first.
fn toolkits(folder: &Path, name: &str) -> Vec<PathBuf> {
    let version = |path: &Path| -> Option<Vec<u32>> {
        let text = path.file_name()?.to_str()?.strip_prefix(name)?.strip_prefix('-')?;
        text.split('.').map(|number| number.parse().ok()).collect()
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let mut versions: Vec<(Vec<u32>, PathBuf)> = entries.filter_map(|path| Some((version(&path)?, path))).collect();
    versions.sort_by(|a, b| b.0.cmp(&a.0));
    std::iter::once(folder.join(name)).chain(versions.into_iter().map(|(_, path)| path)).collect()
}

/// An opened library: its functions, and the place where it was found.
pub struct Opened<T> {
    pub table: T,
    pub path: PathBuf,
    pub origin: Origin,
}

/// Tables of functions that stand in for libraries: a test's, which then needs neither libraries nor a GPU.
#[derive(Clone, Copy, Default)]
pub struct Given {
    pub driver: Option<DriverTable>,
    pub nvrtc: Option<NvrtcTable>,
    pub cublaslt: Option<CublasLtTable>,
    pub cudnn: Option<CudnnTable>,
    pub nccl: Option<NcclTable>,
    pub nvml: Option<NvmlTable>,
    pub amdsmi: Option<AmdSmiTable>,
    /// Is shown every program as its rank runs it, with the addresses of its arenas, before anything of it is queued.
    pub program: Option<fn(&Program, &[u64])>,
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("functions of this process")
    }
}

fn missing(vendor: Vendor, kind: Kind) -> Error {
    let (library, hint) = (kind.title(vendor), kind.hint(vendor));
    Error::LibraryMissing { library, tried: vec!["functions of this process".into()], hint, context: String::new() }
}

/// Opens by absolute path, or by bare name through the loader. The driver belongs to the system, so there the loader is
/// tried before the system's folders.
fn open(search: &Search, kind: Kind) -> Result<(Library, PathBuf, Origin)> {
    let found = search.locate(kind);
    let of_driver = search.vendor == Vendor::Nvidia && matches!(kind, Kind::Driver | Kind::Nvml);
    let loader_first = of_driver && !matches!(found, Ok((Origin::Variable(_), _)));
    if loader_first && let Some(opened) = ask_loader(search, kind) {
        return Ok(opened);
    }
    match found {
        Ok((origin, path)) => {
            if kind == Kind::Nvrtc && search.vendor == Vendor::Nvidia {
                preload_nvrtc_builtins(&path)?;
            }
            Ok((load(&path)?, path, origin))
        }
        Err(mut tried) => ask_loader(search, kind).ok_or_else(|| {
            if search.ask_loader {
                tried.extend(kind.files(search.vendor).iter().map(|file| format!("{file} by the loader's search")));
            }
            tried.extend(search.remarks.iter().cloned());
            let (library, hint) = (kind.title(search.vendor), kind.hint(search.vendor));
            Error::LibraryMissing { library, tried, hint, context: String::new() }
        }),
    }
}

fn ask_loader(search: &Search, kind: Kind) -> Option<(Library, PathBuf, Origin)> {
    let files = kind.files(search.vendor).iter().filter(|_| search.ask_loader);
    let mut opened = files.filter_map(|file| Some((load(Path::new(file)).ok()?, PathBuf::from(file), Origin::System)));
    opened.next()
}

/// NVRTC opens its builtins by bare name and has no run path: they must be in the process before.
fn preload_nvrtc_builtins(nvrtc: &Path) -> Result<()> {
    let folder = nvrtc.parent().expect("an absolute path to a file has a folder");
    let mut builtins: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(|e| Error::LibraryBroken { path: folder.to_owned(), reason: e.to_string() })?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc-builtins.so.")))
        .collect();
    builtins.sort();
    match builtins.last() {
        Some(path) => load(path).map(std::mem::forget),
        None => Err(Error::LibraryBroken {
            path: nvrtc.to_owned(),
            reason: "there is no libnvrtc-builtins.so next to it; the installation is incomplete".into(),
        }),
    }
}

fn load(path: &Path) -> Result<Library> {
    // SAFETY: the vendors' libraries have no initializers with preconditions. RTLD_GLOBAL because they look for each other
    // by SONAME among the libraries of the process.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|e| Error::LibraryBroken { path: path.to_owned(), reason: e.to_string() })
}

macro_rules! opener {
    ($(#[$meta:meta])* $name:ident, $kind:expr, $table:ty, $given:ident) => {
        $(#[$meta])*
        pub fn $name(search: &Search) -> Result<Opened<$table>> {
            if let Some(given) = &search.given {
                let found = given.$given.ok_or_else(|| missing(search.vendor, $kind))?;
                return Ok(Opened { table: found, path: PathBuf::from("imitated"), origin: Origin::System });
            }
            let (library, path, origin) = open(search, $kind)?;
            let table = <$table>::load(&library, &path, search.vendor)?;
            // Never closed: the library's threads and exit handlers outlive any owner of ours.
            std::mem::forget(library);
            Ok(Opened { table, path, origin })
        }
    };
}

opener!(
    /// Opens `libcuda` or `libamdhip64`. Success says that a driver is installed, not that a GPU is there.
    open_driver, Kind::Driver, DriverTable, driver
);
opener!(
    /// Opens NVRTC with its builtins, or hiprtc.
    open_nvrtc, Kind::Nvrtc, NvrtcTable, nvrtc
);
opener!(
    /// Opens cuBLASLt or hipBLASLt, the library of matrix products.
    open_cublaslt, Kind::CublasLt, CublasLtTable, cublaslt
);
opener!(
    /// Opens cuDNN. It plans with the driver and NVRTC: open those before.
    open_cudnn, Kind::Cudnn, CudnnTable, cudnn
);
opener!(
    /// Opens NCCL or RCCL, the library of collectives.
    open_nccl, Kind::Nccl, NcclTable, nccl
);
opener!(
    /// Opens NVML. It belongs to the driver.
    open_nvml, Kind::Nvml, NvmlTable, nvml
);
opener!(
    /// Opens AMD SMI, the library of instruments.
    open_amdsmi, Kind::Nvml, AmdSmiTable, amdsmi
);

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(root: &Path, file: &str) -> PathBuf {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, b"not a library").unwrap();
        path
    }

    fn search(named: &[&Path], site: &[&Path]) -> Search {
        Search {
            named: named.iter().map(|p| p.to_path_buf()).collect(),
            site_packages: site.iter().map(|p| p.to_path_buf()).collect(),
            ..Search::default()
        }
    }

    #[test]
    fn named_folders_win_over_wheels_and_newer_layouts_over_older() {
        let (named, site) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let old = touch(site.path(), "nvidia/cublas/lib/libcublasLt.so.12");
        assert_eq!(search(&[], &[site.path()]).locate(Kind::CublasLt), Ok((Origin::Wheel, old)));
        let new = touch(site.path(), "nvidia/cu13/lib/libcublasLt.so.13");
        assert_eq!(search(&[], &[site.path()]).locate(Kind::CublasLt), Ok((Origin::Wheel, new)));
        let own = touch(named.path(), "lib64/libcublasLt.so.13");
        assert_eq!(
            search(&[named.path()], &[site.path()]).locate(Kind::CublasLt),
            Ok((Origin::Variable(PATH_VARIABLE), own))
        );
    }

    #[test]
    fn nothing_is_taken_from_the_working_directory() {
        let search = |values: &'static [(&str, &str)]| {
            let value = |name: &str| values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            Search::from_variables(Vendor::Nvidia, vec![], value)
        };
        let empty = search(&[]);
        assert!(empty.ask_loader && empty.named.is_empty());
        for values in [
            &[(PATH_VARIABLE, ""), ("CUDA_HOME", ""), ("CUDA_PATH", "."), ("CONDA_PREFIX", "here")][..],
            &[(PATH_VARIABLE, ":"), ("CUDA_HOME", "cuda"), (LOADER_VARIABLE, "")],
        ] {
            let found = search(values);
            assert_eq!((found.named, found.system), (vec![], empty.system.clone()), "{values:?}");
            assert!(found.ask_loader);
        }
        let here = std::env::current_dir().unwrap();
        let own = search(&[(PATH_VARIABLE, ":/own:libs"), ("CUDA_HOME", "/cuda"), (LOADER_VARIABLE, "/a:/b")]);
        assert!(
            own.ask_loader
                && own.named == [Path::new("/own"), &here.join("libs")]
                && own.system[0] == Path::new("/cuda/lib64")
        );
        for value in ["/a:", ":/a", "/a::/a", "/a:here", "/a;"] {
            let found =
                Search::from_variables(Vendor::Nvidia, vec![], |name| (name == LOADER_VARIABLE).then(|| value.into()));
            assert!(!found.ask_loader && found.system[0] == Path::new("/a"), "{value}");
        }
        assert!(search(&[(LOADER_VARIABLE, ":")]).remarks[0].contains(LOADER_VARIABLE));
    }

    #[test]
    fn the_newest_of_several_toolkits_is_looked_at_first() {
        let root = tempfile::tempdir().unwrap();
        for name in ["cuda-12.9", "cuda-13.0", "cuda-13.10", "cuda-x", "curl"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let names = ["cuda", "cuda-13.10", "cuda-13.0", "cuda-12.9"];
        assert_eq!(toolkits(root.path(), "cuda"), names.map(|name| root.path().join(name)));
        let found = touch(root.path(), "cuda-13.0/targets/x86_64-linux/lib/libnvrtc.so.13");
        let folders =
            toolkits(root.path(), "cuda").iter().flat_map(|root| toolkit_folders(Vendor::Nvidia, root)).collect();
        let search = Search { system: folders, ..Search::default() };
        assert_eq!(search.locate(Kind::Nvrtc), Ok((Origin::System, found)));
    }

    #[test]
    fn what_is_missing_says_where_it_was_looked_for_and_what_to_do() {
        let site = tempfile::tempdir().unwrap();
        let error = open_cudnn(&search(&[], &[site.path()])).err().unwrap().to_string();
        assert!(error.starts_with("cuDNN was not found; looked for "), "{error}");
        assert!(error.contains("nvidia/cudnn/lib/libcudnn.so.9"), "{error}");
        assert!(error.contains("pip install 'surogate[cuda]' (it brings nvidia-cudnn-cu13)"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let site = tempfile::tempdir().unwrap();
        let path = touch(site.path(), "nvidia/cu13/lib/libcublasLt.so.13");
        let error = open_cublaslt(&search(&[], &[site.path()])).err().unwrap();
        assert!(matches!(&error, Error::LibraryBroken { path: p, .. } if *p == path), "{error}");
    }

    #[test]
    fn nvrtc_without_its_builtins_is_refused() {
        let site = tempfile::tempdir().unwrap();
        touch(site.path(), "nvidia/cu13/lib/libnvrtc.so.13");
        let error = open_nvrtc(&search(&[], &[site.path()])).err().unwrap().to_string();
        assert!(error.contains("libnvrtc-builtins"), "{error}");
    }
}
