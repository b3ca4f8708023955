//! The engine's side: libFuzzer calls one of the targets, which the environment names.
//!
//! `FUZZ_TARGET` is the target; with `FUZZ_SEEDS=FOLDER` the seeds of all targets are written there and nothing is run.
//! A panic that the program catches is none; one that reaches this file is a finding. Memory beyond a limit is rejected
//! as if the machine had no more, so that a size from a file cannot go unnoticed because no page is touched.

#![no_main]

mod targets;

use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

// The engine is linked for its own sake: it holds `main`.
use libfuzzer_sys as _;
use targets::{TARGETS, Target};

/// Bytes that a target may hold.
const MOST_BYTES: usize = 2 << 30;

struct Bounded;

static HELD: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is the system allocator's; the count next to it decides only whether there is a call.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if HELD.fetch_add(layout.size(), Ordering::Relaxed).saturating_add(layout.size()) > MOST_BYTES {
            HELD.fetch_sub(layout.size(), Ordering::Relaxed);
            return std::ptr::null_mut();
        }
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static MEMORY: Bounded = Bounded;

/// The message of the last panic.
static LAST: Mutex<String> = Mutex::new(String::new());

/// None: the seeds are written, and there is nothing to run.
static TARGET: LazyLock<Option<&'static Target>> = LazyLock::new(|| {
    panic::set_hook(Box::new(|panic| {
        let text = format!("{panic}\n{}", std::backtrace::Backtrace::force_capture());
        *LAST.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = text;
    }));
    if let Ok(folder) = std::env::var("FUZZ_SEEDS") {
        write_seeds(Path::new(&folder));
        return None;
    }
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    let found = TARGETS.iter().find(|target| target.name == name);
    Some(found.unwrap_or_else(|| panic!("FUZZ_TARGET={name}: the targets are {}", names.join(" "))))
});

fn write_seeds(folder: &Path) {
    for target in TARGETS {
        let place = folder.join(target.name);
        std::fs::create_dir_all(&place).expect("the folder for seeds can be made");
        for (number, bytes) in (target.seeds)().iter().enumerate() {
            std::fs::write(place.join(format!("seed-{number}")), bytes).expect("a seed can be written");
        }
    }
}

#[unsafe(no_mangle)]
fn rust_fuzzer_test_input(input: &[u8]) -> i32 {
    let Some(target) = *TARGET else { return 0 };
    if panic::catch_unwind(AssertUnwindSafe(|| (target.read)(input))).is_err() {
        eprintln!("{}", LAST.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        std::process::abort();
    }
    0
}
