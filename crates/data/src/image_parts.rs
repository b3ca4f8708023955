//! Parts of a content that are images, in the spellings of other tools.
//!
//! Knows parts; no images and no texts.

use serde_json::{Value, json};

/// The image of a part of a content, if it is one: null where the row's column has it.
pub(crate) fn image_of(part: &Value) -> Option<Value> {
    let held = |name: &str| part.get(name).filter(|value| !value.is_null());
    let kind = part.get("type").and_then(Value::as_str);
    let keys = ["image", "image_url", "input_image", "url", "path", "base64", "bytes"];
    let is_image = matches!(kind, Some("image" | "image_url" | "input_image"))
        || (kind.is_none() && ["image", "image_url"].iter().any(|name| held(name).is_some()));
    if !is_image {
        return None;
    }
    let (name, value) = keys.iter().find_map(|name| Some((*name, held(name)?)))?;
    Some(match (name, value) {
        ("base64", Value::String(text)) => json!({ "bytes": text }),
        ("bytes", value) => json!({ "bytes": value }),
        (_, Value::Object(fields)) if fields.contains_key("url") => fields["url"].clone(),
        (_, value) => value.clone(),
    })
}

/// Returns true if a part is an image, be it here or in the row's column.
pub(crate) fn is_image(part: &Value) -> bool {
    let kind = part.get("type").and_then(Value::as_str);
    matches!(kind, Some("image" | "image_url" | "input_image")) || (kind.is_none() && image_of(part).is_some())
}
