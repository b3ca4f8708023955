//! On a machine with a GPU: every operation's examples on CUDA against the reference. Runs where
//! SUROGATE_GPU_TESTS=1 is set, and fails there without a GPU; elsewhere it says that it did not run.

use train::device::{Device, DeviceRequest};

#[test]
fn every_operation_agrees_with_its_reference() {
    if std::env::var_os("SUROGATE_GPU_TESTS").is_none() {
        println!("not run: SUROGATE_GPU_TESTS is not set");
        return;
    }
    let sites = std::env::var_os("SUROGATE_SITE_PACKAGES").unwrap_or_default();
    let request = DeviceRequest {
        device: options::Setting::Value(train::config::Device::Cuda),
        site_packages: std::env::split_paths(&sites).collect(),
        ..DeviceRequest::default()
    };
    let device = Device::open(&request).unwrap();
    let rows = train::conformance::check(device.backend.as_ref(), &device.machine, 1).unwrap();
    for row in &rows {
        let verdict = if row.passed() { "ok" } else { "FAILED" };
        println!("{:26} {} {:4} result {} {:9.2e} {verdict}", row.op, row.example, row.dtype, row.result, row.error);
    }
    let failed: Vec<_> = rows.iter().filter(|row| !row.passed()).collect();
    assert!(failed.is_empty(), "{} of {} results differ: {failed:?}", failed.len(), rows.len());
}
