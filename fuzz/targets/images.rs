//! Files of images, and configurations of their processors.

use data::image::{Limits, Pixels, Processor, decode, png, size};
use serde_json::{Value, json};

/// A file of an image: measured, then decoded.
pub fn image(bytes: &[u8]) -> bool {
    let limits = Limits { pixels: 1 << 22, side: 1 << 13, bytes: 1 << 24 };
    let measured = size(bytes, &limits);
    let Ok(pixels) = decode(bytes, &limits) else { return false };
    assert_eq!(measured, Ok([pixels.height, pixels.width]), "an image has the size that its head says");
    assert_eq!(pixels.rgb.len(), 3 * pixels.height * pixels.width);
    true
}

pub fn image_seeds() -> Vec<Vec<u8>> {
    let ramp = |height: usize, width: usize| Pixels {
        height,
        width,
        rgb: (0..3 * height * width).map(|at| (at * 7) as u8).collect(),
    };
    let gif = b"GIF89a\x02\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x02\0\x01\0\0\x02\x02D\n\0;".to_vec();
    vec![png(&ramp(3, 5)), png(&ramp(40, 30)), gif]
}

/// `preprocessor_config.json`: read, then sizes and one image.
pub fn processor(bytes: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return false };
    let Ok(processor) = Processor::of("preprocessor_config.json", &value) else { return false };
    for size in [[1, 1], [3, 2000], [777, 333], [4000, 3000]] {
        if let Ok((views, _)) = processor.layout(size) {
            assert!(!views.is_empty() && views.iter().all(|[h, w]| *h > 0 && *w > 0), "a view has pixels");
            let _ = (processor.tokens(&views), processor.frames());
        }
    }
    let small = Pixels { height: 6, width: 9, rgb: vec![100; 162] };
    let fits = |(views, _): (Vec<[usize; 2]>, _)| views.iter().map(|[h, w]| h * w).sum::<usize>() < 1 << 20;
    if processor.layout([6, 9]).is_ok_and(fits) {
        let _ = processor.prepare(small);
    }
    true
}

pub fn processor_seeds() -> Vec<Vec<u8>> {
    let of = |kind: &str, more: Value| {
        let mut fields =
            json!({"image_processor_type": format!("{kind}ImageProcessor"), "image_mean": [0.5, 0.5, 0.5]});
        fields.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        fields.to_string().into_bytes()
    };
    vec![
        of("Qwen2VL", json!({"patch_size": 8, "min_pixels": 256, "max_pixels": 4096})),
        of(
            "Gemma3",
            json!({"size": {"height": 64, "width": 64}, "do_pan_and_scan": true, "pan_and_scan_min_crop_size": 16}),
        ),
        of("Gemma4", json!({"max_soft_tokens": 70, "patch_size": 4})),
        of("Pixtral", json!({"size": {"longest_edge": 96}, "patch_size": {"height": 16, "width": 16}})),
        of("SmolVLM", json!({"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}, "resample": 1})),
        of("Siglip", json!({"size": 56})),
    ]
}
