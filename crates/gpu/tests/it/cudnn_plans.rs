//! cuDNN's plans for a GPU that is not there: a graph that no engine takes fails here, not in a run.
//!
//! Needs cuDNN 9 (a pip wheel) and a `libcuda.so.1`, which may be one that answers every call with
//! an error: ignored unless requested, `cargo test --release --workspace --test it -- --ignored cudnn_plans::`.

use gpu::cudnn::sdpa::{Sdpa, Strides};
use gpu::cudnn::{Cudnn, Target};
use gpu::disk_cache::DiskCache;
use gpu::library::{Search, open_cudnn, open_driver, open_nvrtc};
use std::sync::Arc;

/// The keys that cuDNN asks of a device description; values of an H200.
const H200: &str = r#"{"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
"regsPerBlock": 65536, "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
"maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
"maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
"supportCoopLaunch": 1, "totalGlobalMem": 150754820096, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
"memoryBusWidth": 6144, "l2CacheSize": 62914560, "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000,
"deviceName": "NVIDIA H200"}"#;

fn cudnn() -> Arc<Cudnn> {
    let roots = std::env::var_os("SUROGATE_SITE_PACKAGES").map(|v| std::env::split_paths(&v).collect());
    let search = Search::from_environment(roots.unwrap_or_default());
    // cuDNN plans with these two; it finds them in the process by their SONAME.
    let opened = open_driver(&search).map(|_| ()).and(open_nvrtc(&search).map(|_| ())).and(open_cudnn(&search));
    Cudnn::new(opened.unwrap_or_else(|missing| panic!("no cuDNN that could plan: {missing}")))
}

fn dense(heads: i64, head_dim: i64, length: i64) -> Strides {
    Strides { row: length * heads * head_dim, token: heads * head_dim, head: head_dim }
}

/// `merged`: V is in the merged q|k|v buffer, as the projection writes it.
fn attention([batch, length, query_heads, kv_heads, head_dim]: [i64; 5], merged: bool) -> Sdpa {
    let (q, k) = (dense(query_heads, head_dim, length), dense(kv_heads, head_dim, length));
    let token = (query_heads + 2 * kv_heads) * head_dim;
    let v = if merged { Strides { row: length * token, token, head: head_dim } } else { k };
    Sdpa { batch, length, query_heads, kv_heads, head_dim, scale: 0.1, q, k, v, o: q }
}

/// Workspace bytes that the attention operation reserves for cuDNN's forward pass.
const PLANNED: usize = 8 << 10;

#[test]
#[ignore = "needs cuDNN"]
fn an_h200_gets_plans_that_fit_the_planned_scratch() {
    let cudnn = cudnn();
    let shapes = [
        [2, 192, 4, 2, 128],
        [2, 130, 4, 4, 64],
        [2, 32, 4, 2, 16],
        [2, 40, 8, 4, 8],
        [2, 512, 9, 3, 64],
        [1, 1, 1, 1, 8],
        [1, 2, 1, 1, 8],
        [1, 7, 1, 1, 8],
        [8, 2048, 32, 8, 128],
        [1, 16384, 32, 8, 128],
        [2, 2000, 16, 8, 96],
        [4, 1025, 8, 2, 120],
    ];
    for shape in shapes {
        for merged in [false, true] {
            let plan = attention(shape, merged).forward(&cudnn, &Target::Described(H200), &DiskCache::default());
            let plan = plan.unwrap_or_else(|e| panic!("{shape:?}: {e}"));
            assert!(plan.workspace() <= PLANNED, "{shape:?}: {} bytes", plan.workspace());
        }
    }
}
