//! Hand-declared tables of the C functions that the backend calls, one per library.
//!
//! A table is filled by `dlsym` when its library is opened, so a missing symbol is an error with the
//! library's path in it and never a crash at the first call. Everything that C calls an enum is a
//! `u32` here: a value that this crate has never heard of is a number, not undefined behavior.
//! This module knows signatures and constants; it does not know what the calls are for.
#![allow(unsafe_code, reason = "foreign functions are looked up by name and cast to their C signatures")]

pub mod cublaslt;
pub mod cudnn;
pub mod driver;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;

use crate::error::Error;
use libloading::os::unix::Library;
use std::path::Path;

/// Declares a struct of function pointers and the loader that fills it.
macro_rules! function_table {
    ($(#[$meta:meta])* $table:ident: $($name:ident($($argument:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        pub struct $table { $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl $table {
            /// Names of all functions of the table.
            pub const SYMBOLS: &[&str] = &[$(stringify!($name)),*];

            /// Looks every symbol up. The library is never closed: CUDA keeps threads and exit handlers.
            pub fn load(library: &libloading::os::unix::Library, path: &std::path::Path) -> Result<Self, crate::error::Error> {
                Ok(Self { $(
                    // SAFETY: the signature is the one that the library's own header declares.
                    $name: unsafe { super::symbol(library, path, stringify!($name))? },
                )* })
            }

            /// A table for tests to put their own functions into: any other ends the process.
            #[cfg(test)]
            #[allow(dead_code, reason = "not every library is imitated")]
            pub fn unavailable() -> Self {
                Self { $(
                    $name: {
                        unsafe extern "C" fn unavailable($(_: $argument),*) $(-> $result)? {
                            panic!("{} is called, which the test does not imitate", stringify!($name))
                        }
                        unavailable
                    },
                )* }
            }
        }
    };
}
use function_table;

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
