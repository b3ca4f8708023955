//! The imitated compiler: its result names the text, and the definitions that it was compiled with.
#![allow(unsafe_code, reason = "implements a C interface")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};

use gpu::Vendor;
use gpu::sys::nvrtc::NvrtcTable;

const MAGIC: &[u8; 8] = b"STANDIN1";

/// The result of a compilation: which text it was, and its definitions.
#[derive(Clone, Debug, PartialEq)]
pub struct Code {
    pub identity: u64,
    /// Options of the form `-DNAME=VALUE`.
    pub options: Vec<String>,
}

struct Source {
    text: String,
    headers: Vec<(String, String)>,
    code: Vec<u8>,
}

/// A number of a text with everything that decides what it means. The vendor's headers are not part of it.
pub fn identity<'a>(
    text: &str,
    headers: impl Iterator<Item = (&'a str, &'a str)>,
    options: impl Iterator<Item = &'a str>,
) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    headers.collect::<Vec<_>>().hash(&mut hasher);
    options.collect::<Vec<_>>().hash(&mut hasher);
    hasher.finish()
}

impl Code {
    fn to_bytes(&self) -> Vec<u8> {
        let options = self.options.join("\n");
        let length = (options.len() as u64).to_le_bytes();
        [&MAGIC[..], &self.identity.to_le_bytes(), &length, options.as_bytes()].concat()
    }

    /// # Safety
    /// The address leads to bytes that [`Code::to_bytes`] gave, or to at least 8 others.
    pub unsafe fn read(at: *const c_void) -> Option<Code> {
        let at = at.cast::<u8>();
        // SAFETY: promised by the caller; what follows the magic is this crate's.
        unsafe {
            if std::slice::from_raw_parts(at, 8) != MAGIC {
                return None;
            }
            let identity = at.add(8).cast::<u64>().read_unaligned();
            let length = at.add(16).cast::<u64>().read_unaligned() as usize;
            let options = std::str::from_utf8(std::slice::from_raw_parts(at.add(24), length)).ok()?;
            Some(Code { identity, options: options.lines().map(str::to_owned).collect() })
        }
    }
}

unsafe fn owned(text: *const c_char) -> String {
    // SAFETY: the caller's strings end with NUL.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

unsafe extern "C" fn version(major: *mut c_int, minor: *mut c_int) -> u32 {
    // SAFETY: the caller's locals.
    unsafe { (*major, *minor) = (13, 0) };
    0
}
unsafe extern "C" fn words(_: u32) -> *const c_char {
    c"refused".as_ptr()
}
unsafe extern "C" fn create(
    to: *mut *mut c_void,
    text: *const c_char,
    _: *const c_char,
    count: c_int,
    bodies: *const *const c_char,
    names: *const *const c_char,
) -> u32 {
    // SAFETY: the caller's strings and arrays; the program is freed by `destroy`.
    unsafe {
        let header = |i: usize| (owned(*names.add(i)), owned(*bodies.add(i)));
        let of_vendor = |name: &str| ["intrinsics.cuh", "language.cuh"].contains(&name);
        let headers = (0..count as usize).map(header).filter(|(name, _)| !of_vendor(name)).collect();
        let whole = owned(text);
        let text = whole.strip_prefix("#include \"language.cuh\"\n#line 1\n").unwrap_or(&whole).to_owned();
        *to = Box::into_raw(Box::new(Source { text, headers, code: Vec::new() })).cast();
    }
    0
}
unsafe extern "C" fn destroy(of: *mut *mut c_void) -> u32 {
    // SAFETY: made by `create`.
    unsafe { drop(Box::from_raw((*of).cast::<Source>())) };
    0
}
unsafe extern "C" fn compile(of: *mut c_void, count: c_int, options: *const *const c_char) -> u32 {
    // SAFETY: made by `create`; the caller's strings.
    unsafe {
        let source = &mut *of.cast::<Source>();
        let all: Vec<String> = (0..count as usize).map(|i| owned(*options.add(i))).collect();
        let options: Vec<String> = all.into_iter().filter(|option| option.starts_with("-D")).collect();
        let headers = source.headers.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let identity = identity(&source.text, headers, options.iter().map(String::as_str));
        source.code = Code { identity, options }.to_bytes();
    }
    0
}
unsafe extern "C" fn size(of: *mut c_void, to: *mut usize) -> u32 {
    // SAFETY: made by `create`; the caller's local.
    unsafe { *to = (*of.cast::<Source>()).code.len() };
    0
}
unsafe extern "C" fn code(of: *mut c_void, to: *mut c_char) -> u32 {
    // SAFETY: made by `create`; the caller's buffer has the length that `size` wrote.
    unsafe {
        let code = &(*of.cast::<Source>()).code;
        std::ptr::copy_nonoverlapping(code.as_ptr(), to.cast(), code.len());
    }
    0
}
unsafe extern "C" fn no_log(_: *mut c_void, to: *mut usize) -> u32 {
    // SAFETY: the caller's local.
    unsafe { *to = 0 };
    0
}

unsafe extern "C" fn nothing(_: *mut c_void, _: *mut c_char) -> u32 {
    0
}

pub fn table(vendor: Vendor) -> NvrtcTable {
    NvrtcTable {
        nvrtcVersion: version,
        nvrtcGetErrorString: words,
        nvrtcCreateProgram: create,
        nvrtcDestroyProgram: destroy,
        nvrtcCompileProgram: compile,
        nvrtcGetCUBINSize: size,
        nvrtcGetCUBIN: code,
        nvrtcGetPTXSize: size,
        nvrtcGetPTX: code,
        nvrtcGetProgramLogSize: no_log,
        nvrtcGetProgramLog: nothing,
        ..NvrtcTable::unavailable(vendor)
    }
}
