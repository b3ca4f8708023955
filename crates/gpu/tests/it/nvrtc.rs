//! The runtime compiler without a GPU: every architecture, messages, the disk cache. Needs NVRTC
//! (a pip wheel in a folder named in SUROGATE_SITE_PACKAGES, or a folder named in SUROGATE_CUDA_PATH): ignored unless asked
//! for, `cargo test --release --workspace --test it -- --ignored nvrtc::`.

use gpu::Error;
use gpu::disk_cache::DiskCache;
use gpu::kernel_cache::KernelCache;
use gpu::library::{Search, open_nvrtc};
use gpu::nvrtc::{Compiler, KernelSource};

const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"];
const HEADER: &str =
    "__device__ inline float bf16_to_f32(unsigned short b) { return __int_as_float((unsigned)b << 16); }";
const KERNEL: &str = r#"
#include "bf16.cuh"
extern "C" __global__ void widen(float* y, const unsigned short* x, long n) {
  long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = SCALE * bf16_to_f32(x[i]);
}
"#;

fn compiler() -> Compiler {
    let roots = std::env::var_os("SUROGATE_SITE_PACKAGES").map(|v| std::env::split_paths(&v).collect());
    let opened = open_nvrtc(&Search::from_environment(roots.unwrap_or_default())).unwrap_or_else(|e| panic!("{e}"));
    Compiler::new(opened).expect("an opened NVRTC reports its version")
}

#[test]
#[ignore = "needs NVRTC"]
fn compiles_for_every_architecture_without_any_file() {
    let compiler = compiler();
    let options = ["-DSCALE=2.0f".to_owned()];
    let source = KernelSource { name: "widen.cu", text: KERNEL, headers: &[("bf16.cuh", HEADER)], options: &options };
    for architecture in ARCHITECTURES {
        let compiled = compiler.compile(&source, architecture).unwrap_or_else(|e| panic!("{architecture}: {e}"));
        assert_eq!(&compiled.code[..4], b"\x7fELF", "{architecture}");
    }
    // For a virtual architecture: text, as the driver takes it.
    let ptx = compiler.compile(&source, "compute_80").unwrap().code;
    let (end, text) = ptx.split_last().expect("PTX is not empty");
    assert!(*end == 0 && std::str::from_utf8(text).unwrap().contains(".target sm_80"));
}

#[test]
#[ignore = "needs NVRTC"]
fn the_backends_own_kernels_compile_for_every_architecture() {
    let compiler = compiler();
    for kernel in gpu::kernels::samples() {
        for architecture in ARCHITECTURES {
            let compiled = compiler.compile(&kernel.source(), architecture).unwrap_or_else(|e| panic!("{e}"));
            assert!(!compiled.log.contains("warning"), "{}", compiled.log);
        }
    }
}

/// Products that the compiler lets wait for each other are slow and right: no other test sees it.
#[test]
#[ignore = "needs NVRTC"]
fn hoppers_product_compiles_without_waits_between_its_steps() {
    let compiler = compiler();
    for kernel in gpu::kernels::HopperProduct::samples() {
        let mut source = kernel.source();
        let options: Vec<String> = source.options.iter().cloned().chain(["--ptxas-options=-v".to_owned()]).collect();
        source.options = &options;
        let compiled = compiler.compile(&source, "sm_90a").unwrap_or_else(|e| panic!("{e}"));
        assert!(!compiled.log.contains("serialized"), "{options:?}: {}", compiled.log);
        // One word in some variants of codes, outside of the loops.
        let few = [0, 4].iter().any(|bytes| compiled.log.contains(&format!(" {bytes} bytes spill stores")));
        assert!(few, "{options:?}: {}", compiled.log);
    }
}

#[test]
#[ignore = "needs NVRTC"]
fn a_refusal_names_kernel_file_and_line() {
    let compiler = compiler();
    let source = KernelSource { name: "widen.cu", text: KERNEL, headers: &[("bf16.cuh", HEADER)], options: &[] };
    let error = compiler.compile(&source, "sm_90a").unwrap_err();
    let Error::Compile { kernel, log, .. } = &error else { panic!("{error}") };
    assert_eq!(kernel, "widen.cu");
    assert!(log.contains("widen.cu(5)") && log.contains("SCALE"), "{log}");
}

#[test]
#[ignore = "needs NVRTC"]
fn the_cache_compiles_once_and_mends_itself() {
    let compiler = compiler();
    let folder = tempfile::tempdir().unwrap();
    let cache = KernelCache::new(DiskCache::new(Some(folder.path().join("kernels"))));
    let options = ["-DSCALE=1.0f".to_owned()];
    let source = KernelSource { name: "widen.cu", text: KERNEL, headers: &[("bf16.cuh", HEADER)], options: &options };
    let first = cache.fetch(&compiler, &source, "sm_80").unwrap();
    let second = cache.fetch(&compiler, &source, "sm_80").unwrap();
    assert!(first.compiled && !second.compiled);
    assert_eq!(first.code, second.code);
    let entry = std::fs::read_dir(folder.path().join("kernels")).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&entry, b"damaged").unwrap();
    assert!(cache.fetch(&compiler, &source, "sm_80").unwrap().compiled);
}
