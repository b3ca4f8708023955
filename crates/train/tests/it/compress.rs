//! Models in codes that a GPU chose, against those of the host.

use std::path::Path;
use std::sync::Arc;

use data::safetensors::Weights;
use serde_json::json;
use tempfile::TempDir;
use train::{Calibration, CompressRequest, Device, Method, compress};

use crate::standin::device;
use crate::stories;

/// Writes the example's model in codes; returns its folder.
fn compressed(place: &Path, request: &CompressRequest, device: Arc<Device>) -> std::path::PathBuf {
    // Documents of different lengths, a row each, end in padding, which is not measured.
    let text = std::fs::read_to_string(stories::root().join("examples/stories/data/shakespeare.txt")).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).take(200).collect();
    let row = |lines: &[&str]| json!({"text": lines.concat()}).to_string() + "\n";
    let rows: String = (0..60).map(|number| row(&lines[number..number + 1 + number % 3])).collect();
    let path = place.join("rows.jsonl");
    std::fs::write(&path, rows).unwrap();
    let options = json!({"datasets": [{"path": path, "type": "text"}], "sample_packing": false, "sequence_len": 48,
        "per_device_train_batch_size": 2});
    let config = stories::config(&place.join("run"), &options);
    let data = Calibration { config: &config, rows: 8, device };
    let output = place.join("out");
    compress(&stories::source(), "stories", request, Some(&data), &output, &|_, _| (), &|| false).unwrap();
    output
}

#[test]
fn codes_that_a_gpu_chooses_are_those_of_the_host() {
    let of = |scheme: &str, asymmetric: bool| CompressRequest {
        method: Method::Gptq,
        asymmetric,
        // Rows of 172 elements have no groups.
        group_size: (scheme == "w4a16").then_some(-1),
        ..CompressRequest::plain(scheme)
    };
    for (target, request) in [("sm_80", of("w4a16", true)), ("gfx942", of("fp8-static", false))] {
        let (here, there) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let found = compressed(here.path(), &request, device(target, true));
        let expected = compressed(there.path(), &request, stories::device());
        let (found, expected) = (Weights::open(&found).unwrap(), Weights::open(&expected).unwrap());
        assert_eq!(found.names(), expected.names());
        // A code that falls the other way changes what the layers after it read.
        let (mut first, mut later) = ([0, 0], [0, 0]);
        for name in found.names() {
            let bytes = |files: &Weights| files.get(name).unwrap().bytes().unwrap();
            let (a, b) = (bytes(&found), bytes(&expected));
            match a.len() > 1000 {
                true => {
                    let [same, all] = if name.contains(".layers.0.") { &mut first } else { &mut later };
                    *same += a.iter().zip(&b).filter(|(a, b)| a == b).count();
                    *all += a.len();
                }
                // Scales of weights follow from the weights; those of activations differ by rounding.
                false => assert!(a == b || name.ends_with("input_scale"), "{target} {}: {name}", request.scheme),
            }
        }
        let same = |[same, all]: [usize; 2]| same as f64 / all as f64;
        let what = format!("{target} {}: {first:?}, {later:?}", request.scheme);
        assert!(same(first) > 0.999 && same(later) > 0.9, "{what}");
    }
}
