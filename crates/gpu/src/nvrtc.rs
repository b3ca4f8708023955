//! Compiles CUDA C++ to machine code, at run time, in memory, with NVRTC or hiprtc.
//!
//! A kernel's headers come with it as text; nothing is read from disk and no toolkit headers are needed. The target is
//! a real architecture and the result a CUBIN or a code object, so the driver compiles nothing at load; for a virtual
//! architecture the result is PTX. Does not know what a kernel computes.
#![allow(unsafe_code, reason = "calls of the compiler through its function table")]

use crate::driver::text_or;
use crate::error::{Error, Result};
use crate::library::Opened;
use crate::sys::nvrtc::{self as sys, NvrtcTable};
use crate::vendor::Vendor;
use std::borrow::Cow;
use std::ffi::{CString, c_char, c_int};

/// The text of one translation unit and all inputs of its compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSource<'a> {
    /// Shown as the file name in messages.
    pub name: &'a str,
    pub text: &'a str,
    /// (name as written between the quotes of `#include`, text).
    pub headers: &'a [(&'a str, &'a str)],
    /// Compiler options besides the architecture and the language standard.
    pub options: &'a [String],
}

impl<'a> KernelSource<'a> {
    /// Returns all headers of the compilation: those of the kernel, and the vendor's.
    pub(crate) fn all_headers(&self, vendor: Vendor) -> impl Iterator<Item = (&'a str, &'a str)> {
        let of_vendor: &[device::Header] = match vendor {
            Vendor::Nvidia => &[device::INTRINSICS],
            Vendor::Amd => &[device::INTRINSICS_AMD, device::LANGUAGE_AMD],
        };
        self.headers.iter().copied().chain(of_vendor.iter().copied())
    }
}

/// Machine code, or PTX with a NUL at its end, and the compiler's remarks (warnings, registers).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    pub code: Vec<u8>,
    pub log: String,
}

/// The loaded library NVRTC or hiprtc, the runtime compiler of CUDA C++.
pub struct Compiler {
    table: NvrtcTable,
    version: (u32, u32),
}

impl Compiler {
    pub fn new(opened: Opened<NvrtcTable>) -> Result<Compiler> {
        let table = opened.table;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are to live locals.
        let status = unsafe { (table.nvrtcVersion)(&mut major, &mut minor) };
        let compiler = Compiler { table, version: (major as u32, minor as u32) };
        compiler.check("nvrtcVersion", status)?;
        Ok(compiler)
    }

    /// The version as (major, minor).
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The vendor whose GPUs it compiles for.
    pub fn vendor(&self) -> Vendor {
        self.table.vendor
    }

    /// Compiles for one architecture, e.g. `sm_90a` or `gfx942`; for a virtual one, e.g. `compute_80`, to PTX that the driver
    /// translates. A rejection carries the log with file and line.
    pub fn compile(&self, source: &KernelSource, architecture: &str) -> Result<Compiled> {
        let program = self.create(source)?;
        let options: Vec<CString> =
            standard_options(architecture).iter().chain(source.options).map(|o| text(o)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program is alive; the options outlive the call.
        let status =
            unsafe { (self.table.nvrtcCompileProgram)(program.raw, pointers.len() as c_int, pointers.as_ptr()) };
        let log = program.log();
        if status == sys::ERROR_COMPILATION {
            let architecture = architecture.to_owned();
            return Err(Error::Compile { kernel: source.name.to_owned(), architecture, log });
        }
        // Other failures (a bad option, missing builtins) have their reason in the log as well.
        self.check("nvrtcCompileProgram", status).map_err(|e| with_log(e, &log))?;
        Ok(Compiled { code: program.code(is_virtual(architecture))?, log })
    }

    fn create(&self, source: &KernelSource) -> Result<Program<'_>> {
        let vendor = self.vendor();
        let (name, body) = (text(source.name), text(&in_language(vendor, source.text)));
        let names: Vec<CString> = source.all_headers(vendor).map(|(name, _)| text(name)).collect();
        let bodies: Vec<CString> = source.all_headers(vendor).map(|(_, body)| text(body)).collect();
        let name_pointers: Vec<*const c_char> = names.iter().map(|n| n.as_ptr()).collect();
        let body_pointers: Vec<*const c_char> = bodies.iter().map(|b| b.as_ptr()).collect();
        let mut raw = std::ptr::null_mut();
        // SAFETY: every string is terminated and outlives the call; NVRTC copies them.
        let status = unsafe {
            (self.table.nvrtcCreateProgram)(
                &mut raw,
                body.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                body_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        Ok(Program { compiler: self, raw })
    }

    fn check(&self, call: &'static str, status: sys::Status) -> Result<()> {
        if status == sys::SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a static string for every status.
        let name = unsafe { text_or((self.table.nvrtcGetErrorString)(status), "an unknown status") };
        let call = self.table.call_name(call);
        Err(Error::Call { call, code: status, name, detail: String::new(), context: String::new() })
    }
}

/// The options that every kernel is compiled with, for one architecture.
pub fn standard_options(architecture: &str) -> Vec<String> {
    // No fast-math: rounding points belong to the program. FMA contraction is the architecture's default.
    match architecture.starts_with("gfx") {
        true => vec![format!("--offload-arch={architecture}"), "-std=c++17".into(), "-O3".into()],
        false => vec![format!("--gpu-architecture={architecture}"), "--std=c++17".into()],
    }
}

/// Returns a kernel's text as a vendor's compiler gets it: AMD's reads first what HIP lacks of CUDA C++.
fn in_language(vendor: Vendor, text: &str) -> Cow<'_, str> {
    match vendor {
        Vendor::Nvidia => text.into(),
        Vendor::Amd => format!("#include \"{}\"\n#line 1\n{text}", device::LANGUAGE_AMD.0).into(),
    }
}

/// True if the architecture is virtual: no GPU runs code for it as it is.
fn is_virtual(architecture: &str) -> bool {
    architecture.starts_with("compute_")
}

fn text(value: &str) -> CString {
    CString::new(value).expect("kernel text, names and options have no NUL in them")
}

fn with_log(error: Error, log: &str) -> Error {
    match error {
        Error::Call { call, code, name, context, .. } => {
            Error::Call { call, code, name, detail: log.to_owned(), context }
        }
        other => other,
    }
}

struct Program<'a> {
    compiler: &'a Compiler,
    raw: sys::Program,
}

impl Program<'_> {
    fn code(&self, ptx: bool) -> Result<Vec<u8>> {
        let t = &self.compiler.table;
        let mut size = 0;
        // SAFETY: the program is alive and compiled; the buffer has the size that NVRTC requested.
        unsafe {
            let reported =
                if ptx { (t.nvrtcGetPTXSize)(self.raw, &mut size) } else { (t.nvrtcGetCUBINSize)(self.raw, &mut size) };
            self.compiler.check("the size of the code", reported)?;
            let mut code = vec![0u8; size];
            let to = code.as_mut_ptr().cast();
            let given = if ptx { (t.nvrtcGetPTX)(self.raw, to) } else { (t.nvrtcGetCUBIN)(self.raw, to) };
            self.compiler.check("the code", given)?;
            Ok(code)
        }
    }

    /// Returns the log; empty when NVRTC has none or cannot give it.
    fn log(&self) -> String {
        let t = &self.compiler.table;
        let mut size = 0;
        // SAFETY: as in `cubin`; the text is terminated within the size.
        let bytes = unsafe {
            if (t.nvrtcGetProgramLogSize)(self.raw, &mut size) != sys::SUCCESS {
                return String::new();
            }
            let mut bytes = vec![0u8; size];
            (t.nvrtcGetProgramLog)(self.raw, bytes.as_mut_ptr().cast());
            bytes
        };
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').trim_end().to_owned()
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `create`. A failure to free cannot be acted on.
        unsafe { (self.compiler.table.nvrtcDestroyProgram)(&mut self.raw) };
    }
}
