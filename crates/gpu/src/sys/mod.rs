//! Hand-declared tables of the C functions that the backend calls, one per library. HIP's libraries have CUDA's functions
//! under other names, mostly with the same signature: both fill the same table.
//!
//! A table is filled by `dlsym` when its library is opened, so a missing symbol is an error with the
//! library's path in it and never a crash at the first call. Everything that C calls an enum is a
//! `u32` here: a value that this crate has never heard of is a number, not undefined behavior.
//! This module knows signatures and constants; it does not know what the calls are for.
#![allow(unsafe_code, reason = "foreign functions are looked up by name and cast to their C signatures")]

pub mod amdsmi;
pub mod cublaslt;
pub mod cudnn;
pub mod driver;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;

use crate::error::Error;
use crate::vendor::Vendor;
use libloading::os::unix::Library;
use std::path::Path;

/// Declares a struct of function pointers and the loader that fills it for each vendor. `name(..)` has the same name in both
/// interfaces, `name = twin(..)` is called `twin` by AMD's, and `name = none(..)` is NVIDIA's alone. A name that begins with
/// `hip` is AMD's alone.
macro_rules! function_table {
    (
        $(#[$meta:meta])* $table:ident:
        $($name:ident $(= $twin:ident)? ($($argument:ty),* $(,)?) $(-> $result:ty)?;)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[allow(non_snake_case)]
        pub struct $table {
            pub vendor: crate::vendor::Vendor,
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $table {
            /// The functions of the table: the field, and AMD's name if it is another.
            pub const SYMBOLS: &[super::Names] =
                &[$(super::Names { field: stringify!($name), twin: super::last(&["" $(, stringify!($twin))?]) }),*];

            /// Looks every symbol up. The library is never closed: drivers keep threads and exit handlers.
            pub fn load(
                library: &libloading::os::unix::Library,
                path: &std::path::Path,
                vendor: crate::vendor::Vendor,
            ) -> Result<Self, crate::error::Error> {
                let mut table = Self::unavailable(vendor);
                let mut names = Self::SYMBOLS.iter();
                $(
                    if let Some(symbol) = names.next().and_then(|names| names.of(vendor)) {
                        // SAFETY: the signature is the one that the library's own header declares.
                        table.$name = unsafe { super::symbol(library, path, symbol)? };
                    }
                )*
                Ok(table)
            }

            /// A table whose functions end the process: what a vendor has no function for, and what a test does not imitate.
            pub fn unavailable(vendor: crate::vendor::Vendor) -> Self {
                Self { vendor, $(
                    $name: {
                        unsafe extern "C" fn unavailable($(_: $argument),*) $(-> $result)? {
                            panic!("{} is called, which this library does not have", stringify!($name))
                        }
                        unavailable
                    },
                )* }
            }

            /// The name of a call for people, which the caller knows by NVIDIA's name, with or without its version.
            #[allow(dead_code, reason = "not every library's calls differ in name")]
            pub fn call_name(&self, call: &'static str) -> &'static str {
                super::call_name(Self::SYMBOLS, self.vendor, call)
            }
        }
    };
}
use function_table;

/// The names of one function.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// The name of the field, which is NVIDIA's, or AMD's where NVIDIA has no such function.
    pub field: &'static str,
    /// AMD's name where it is another; `none` where there is no such function.
    pub twin: &'static str,
}

impl Names {
    /// Returns the symbol in a vendor's library; `None` where it has no such function.
    pub fn of(self, vendor: Vendor) -> Option<&'static str> {
        match vendor {
            Vendor::Nvidia => (!self.field.starts_with("hip")).then_some(self.field),
            Vendor::Amd if self.twin.is_empty() => Some(self.field),
            Vendor::Amd => (self.twin != "none").then_some(self.twin),
        }
    }
}

const fn last(of: &[&'static str]) -> &'static str {
    of[of.len() - 1]
}

fn call_name(symbols: &[Names], vendor: Vendor, call: &'static str) -> &'static str {
    let same = |names: &&Names| {
        let version = names.field.strip_prefix(call);
        version.is_some_and(|rest| rest.is_empty() || rest.starts_with("_v"))
    };
    let found = symbols.iter().find(same).filter(|_| vendor == Vendor::Amd);
    found.and_then(|names| names.of(vendor)).unwrap_or(call)
}

/// One symbol as a function pointer.
///
/// # Safety
/// `F` must be the function-pointer type of that symbol.
unsafe fn symbol<F: Copy>(library: &Library, path: &Path, name: &'static str) -> Result<F, Error> {
    // SAFETY: promised by the caller.
    match unsafe { library.get::<F>(name) } {
        Ok(found) => Ok(*found),
        Err(reason) => {
            Err(Error::SymbolMissing { path: path.to_owned(), symbol: name.to_owned(), reason: reason.to_string() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::driver::DriverTable;
    use super::*;

    #[test]
    fn calls_have_the_names_of_the_vendor() {
        let of = |vendor: Vendor, call| call_name(DriverTable::SYMBOLS, vendor, call);
        assert_eq!(of(Vendor::Nvidia, "cuMemAlloc"), "cuMemAlloc");
        assert_eq!(of(Vendor::Amd, "cuMemAlloc"), "hipMalloc");
        assert_eq!(of(Vendor::Amd, "cuLaunchKernel"), "hipModuleLaunchKernel");
        assert_eq!(of(Vendor::Amd, "hipSetDevice"), "hipSetDevice");
    }

    #[test]
    fn each_vendor_has_its_own_functions() {
        let count = |vendor| DriverTable::SYMBOLS.iter().filter_map(|names| names.of(vendor)).count();
        let all = DriverTable::SYMBOLS;
        assert!(all.iter().all(|names| names.of(Vendor::Nvidia).is_none_or(|name| name.starts_with("cu"))));
        assert!(all.iter().all(|names| names.of(Vendor::Amd).is_none_or(|name| name.starts_with("hip"))));
        assert_eq!((count(Vendor::Nvidia), count(Vendor::Amd)), (all.len() - 4, all.len() - 8));
    }
}
