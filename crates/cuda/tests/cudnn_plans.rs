//! cuDNN's plans for a GPU that is not there: a graph that no engine takes fails here, not in a run.
//!
//! Needs cuDNN 9 (a pip wheel) and a `libcuda.so.1`, which may be one that answers every call with
//! an error. Says so where they are missing.

use cuda::cudnn::sdpa::{Gradients, Sdpa, Strides};
use cuda::cudnn::{Cudnn, Target};
use cuda::disk_cache::DiskCache;
use cuda::library::{Search, open_cudnn, open_driver, open_nvrtc};
use std::sync::Arc;

/// The keys that cuDNN asks of a device description; values of an H200.
const H200: &str = r#"{"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
"regsPerBlock": 65536, "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
"maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
"maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
"supportCoopLaunch": 1, "totalGlobalMem": 150754820096, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
"memoryBusWidth": 6144, "l2CacheSize": 62914560, "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000,
"deviceName": "NVIDIA H200"}"#;

fn cudnn() -> Option<Arc<Cudnn>> {
    let roots = std::env::var_os("SUROGATE_SITE_PACKAGES").map(|v| std::env::split_paths(&v).collect());
    let search = Search::from_environment(roots.unwrap_or_default());
    // cuDNN plans with these two; it finds them in the process by their SONAME.
    let opened = open_driver(&search).map(|_| ()).and(open_nvrtc(&search).map(|_| ())).and(open_cudnn(&search));
    match opened {
        Ok(opened) => Some(Cudnn::new(opened)),
        Err(missing) => {
            println!("SKIPPED, no cuDNN that could plan: {missing}");
            None
        }
    }
}

fn dense(heads: i64, head_dim: i64, length: i64) -> Strides {
    Strides { row: length * heads * head_dim, token: heads * head_dim, head: head_dim }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    length: i64,
    heads: (i64, i64),
    head_dim: i64,
    slots: Option<i64>,
    /// V and dV lie in merged q|k|v buffers, as the projection writes them.
    merged: bool,
}

fn attention(case: Case) -> (Sdpa, Gradients) {
    let Case { length, heads: (query_heads, kv_heads), head_dim, .. } = case;
    let (q, k) = (dense(query_heads, head_dim, length), dense(kv_heads, head_dim, length));
    let token = (query_heads + 2 * kv_heads) * head_dim;
    let v = if case.merged { Strides { row: length * token, token, head: head_dim } } else { k };
    let batch = case.slots.unwrap_or(2);
    let ragged = case.slots.is_some();
    let sdpa = Sdpa { batch, length, query_heads, kv_heads, head_dim, scale: 0.1, ragged, q, k, v, o: q };
    (sdpa, Gradients { d_o: q, d_q: q, d_k: k, d_v: v, deterministic: true })
}

#[test]
fn an_h200_gets_plans_for_full_and_packed_rows() {
    let Some(cudnn) = cudnn() else { return };
    let target = Target::Described(H200);
    let shapes = [(192, (4, 2), 128), (130, (4, 4), 64), (32, (4, 2), 16), (40, (8, 4), 8), (512, (9, 3), 64)];
    for (length, heads, head_dim) in shapes {
        for (slots, merged) in [(None, false), (None, true), (Some(16), false), (Some(16), true)] {
            let case = Case { length, heads, head_dim, slots, merged };
            let (sdpa, gradients) = attention(case);
            let forward =
                sdpa.forward(&cudnn, &target, &DiskCache::default()).unwrap_or_else(|e| panic!("{case:?}: {e}"));
            assert_eq!(forward.offsets.is_empty(), slots.is_none());
            for deterministic in [true, false] {
                let gradients = Gradients { deterministic, ..gradients };
                let backward = sdpa.backward(&gradients, &cudnn, &target, &DiskCache::default());
                let plan = backward.unwrap_or_else(|e| panic!("{case:?} deterministic {deterministic}: {e}"));
                println!("{case:?} deterministic {deterministic}: workspace {}", plan.plan.workspace());
            }
        }
    }
}

/// (slots, longest, heads, kv_heads, head_dim), packed, bytes of the forward and of the deterministic
/// backward plan: what the attention operation's scratch is an upper bound of.
const WORKSPACES: [([i64; 5], bool, usize, usize); 11] = [
    ([2, 2048, 16, 8, 128], false, 256, 301_990_144),
    ([8, 2048, 32, 8, 128], false, 256, 2_415_919_360),
    ([1, 16384, 32, 8, 128], false, 256, 17_448_304_896),
    ([64, 512, 16, 8, 128], true, 17_152, 536_896_512),
    ([256, 2048, 32, 8, 128], true, 66_304, 68_719_576_064),
    ([2, 2048, 16, 8, 64], false, 256, 285_212_928),
    ([64, 512, 9, 3, 64], true, 17_152, 302_015_488),
    ([2, 2000, 16, 8, 96], false, 256, 293_011_712),
    ([2, 40, 4, 2, 8], false, 256, 141_568),
    ([16, 130, 4, 4, 64], true, 17_152, 6_298_624),
    ([4, 1025, 8, 2, 120], true, 17_152, 80_218_624),
];

#[test]
fn plans_ask_for_no_more_workspace_than_operations_plan_for() {
    let Some(cudnn) = cudnn() else { return };
    let target = Target::Described(H200);
    for ([slots, length, query_heads, kv_heads, head_dim], packed, forward, backward) in WORKSPACES {
        let heads = (query_heads, kv_heads);
        let case = Case { length, heads, head_dim, slots: packed.then_some(slots), merged: false };
        let (sdpa, gradients) = attention(case);
        let sdpa = Sdpa { batch: slots, ..sdpa };
        let plans = [
            sdpa.forward(&cudnn, &target, &DiskCache::default()),
            sdpa.backward(&gradients, &cudnn, &target, &DiskCache::default()),
        ];
        let asked = plans.map(|plan| plan.unwrap_or_else(|e| panic!("{case:?}: {e}")).plan.workspace());
        assert!(asked[0] <= forward && asked[1] <= backward, "{case:?}: {asked:?}, not {forward} and {backward}");
    }
}

/// A single token, two, and one head: the smallest calls that an operation may hand over.
#[test]
fn the_smallest_attentions_have_plans() {
    let Some(cudnn) = cudnn() else { return };
    for length in [1, 2, 7] {
        for slots in [None, Some(2)] {
            let case = Case { length, heads: (1, 1), head_dim: 8, slots, merged: false };
            let (sdpa, gradients) = attention(case);
            sdpa.forward(&cudnn, &Target::Described(H200), &DiskCache::default())
                .unwrap_or_else(|e| panic!("{case:?}: {e}"));
            let plan = sdpa.backward(&gradients, &cudnn, &Target::Described(H200), &DiskCache::default());
            plan.unwrap_or_else(|e| panic!("{case:?}: {e}"));
        }
    }
}

#[test]
fn a_stored_plan_is_taken_for_the_same_attention_only() {
    let Some(cudnn) = cudnn() else { return };
    let folder = tempfile::tempdir().unwrap();
    let plans = DiskCache::new(Some(folder.path().to_owned()));
    let target = Target::Described(H200);
    for slots in [None, Some(4)] {
        let case = Case { length: 64, heads: (4, 2), head_dim: 64, slots, merged: false };
        let (sdpa, gradients) = attention(case);
        let plan = |gradients: &Gradients| sdpa.backward(gradients, &cudnn, &target, &plans).unwrap().plan;
        let (built, stored) = (plan(&gradients), plan(&gradients));
        assert_eq!((built.from_disk(), stored.from_disk()), (false, true), "{case:?}");
        assert_eq!(built.workspace(), stored.workspace());
        let other = Gradients { d_v: Strides { token: 1024, row: 65536, ..gradients.d_v }, ..gradients };
        assert!(!plan(&other).from_disk(), "{case:?}");
    }
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        std::fs::write(entry.unwrap().path(), b"damaged").unwrap();
    }
    let (sdpa, gradients) = attention(Case { length: 64, heads: (4, 2), head_dim: 64, slots: None, merged: false });
    assert!(!sdpa.backward(&gradients, &cudnn, &target, &plans).unwrap().plan.from_disk());
}

#[test]
fn what_no_engine_takes_is_refused_in_the_librarys_words() {
    let Some(cudnn) = cudnn() else { return };
    let case = Case { length: 64, heads: (4, 2), head_dim: 512, slots: None, merged: false };
    let (sdpa, gradients) = attention(case);
    let refused = sdpa.backward(&gradients, &cudnn, &Target::Described(H200), &DiskCache::default()).err();
    let text = refused.expect("heads of 512 have no backward pass").to_string();
    println!("{text}");
    assert!(text.starts_with("attention backward Sdpa") && text.contains("engine"), "{text}");
}
