//! The model card of a model in a number format.

use std::fmt::Write;
use std::path::Path;

use super::result::Compressed;
use crate::artifacts::card::{FILE, hub_name, licence, public_name};
use crate::error::Result;
use crate::files::staged::write_synced;
use crate::model::compression::scheme::CompressRequest;
use crate::words::count;

/// Writes the card of a model in a number format into its folder. `name`: the model that it was made from, as the user calls
/// it, in `from`.
pub fn write(from: &Path, name: &str, request: &CompressRequest, of: &Compressed, folder: &Path) -> Result<()> {
    let scheme = &request.scheme;
    let mut text = String::from("---\n");
    if let Some(name) = hub_name(name) {
        let _ = writeln!(text, "base_model: {name}\nbase_model_relation: quantized");
    }
    let _ = writeln!(text, "library_name: transformers\npipeline_tag: text-generation");
    text += &licence(from);
    let _ = writeln!(text, "tags:\n- surogate\n- compressed-tensors\n- {scheme}\n---");
    let (base, version) = (public_name(name), env!("CARGO_PKG_VERSION"));
    let _ = writeln!(text, "\n# {base}, {scheme}\n\n{base} in {scheme}, made with Surogate {version}.");
    let _ = writeln!(text, "\n| | |\n|---|--:|\n| scheme | `{scheme}` |\n| matrices in codes | {} |", of.matrices);
    if of.group_size > 0 {
        let _ = writeln!(text, "| elements of a group | {} |", of.group_size);
    }
    let _ = writeln!(text, "| bytes of weights, before | {} |\n| bytes of weights | {} |", of.bytes.0, of.bytes.1);
    let _ = writeln!(text, "| method | `{}` |", request.method.name());
    if of.measured > 0 {
        let _ = writeln!(text, "| tokens that activations were measured on | {} |", of.measured);
    }
    if let Some(of) = of.compared {
        let rows = if of.are_held_out { "the validation data" } else { "further rows of the data" };
        let _ = writeln!(
            text,
            "\n## Loss\n\n| {} of {rows} | before | after |\n|---|--:|--:|",
            count(of.tokens as u64, "token")
        );
        let _ = writeln!(text, "| perplexity | {:.4} | {:.4} |", of.before.exp(), of.after.exp());
        let _ = writeln!(text, "| KL divergence from the model before, nats | | {:.5} |", of.divergence);
    }
    for note in &of.notes {
        let _ = writeln!(text, "\nNote: {note}.");
    }
    write_synced(&folder.join(FILE), text.as_bytes())
}
