//! The model card of a pruned model.

use std::fmt::Write;
use std::path::Path;

use super::request::Pruned;
use crate::artifacts::card::{FILE, hub_name, licence, public_name};
use crate::artifacts::compress::Compared;
use crate::error::Result;
use crate::files::staged::write_synced;
use crate::words::count;

/// Writes the card of a smaller model into its folder. `name`: the model that it was made from, as the user calls it, in `from`.
pub fn write(from: &Path, name: &str, of: &Pruned, folder: &Path) -> Result<()> {
    let mut text = String::from("---\n");
    if let Some(name) = hub_name(name) {
        let _ = writeln!(text, "base_model: {name}\nbase_model_relation: finetune");
    }
    let _ = writeln!(text, "library_name: transformers\npipeline_tag: text-generation");
    text += &licence(from);
    let _ = writeln!(text, "tags:\n- surogate\n- pruned\n---");
    let (base, version) = (public_name(name), env!("CARGO_PKG_VERSION"));
    let _ = writeln!(text, "\n# {base}, pruned\n\nA part of {base}, made with Surogate {version}.");
    let _ = writeln!(text, "\n| | before | after |\n|---|--:|--:|");
    let _ = writeln!(text, "| parameters | {} | {} |", of.parameters.0, of.parameters.1);
    if let Some((request, before, after)) = &of.latency {
        let (prompt, answer, machine) = (request.prompt, request.answer, &request.machine.name);
        let _ = write!(text, "| planned ms for {prompt} + {answer} tokens on {machine} ");
        let _ = writeln!(text, "| {:.3} | {:.3} |", 1e3 * before, 1e3 * after);
    }
    for (name, before, after) in &of.sizes {
        let _ = writeln!(text, "| `{name}` | {before} | {after} |");
    }
    let Compared { before, after, divergence, tokens, are_held_out, .. } = of.compared;
    let _ = writeln!(text, "| perplexity | {:.4} | {:.4} |", before.exp(), after.exp());
    let _ = writeln!(text, "| KL divergence from the model before, nats | | {divergence:.5} |");
    let rows = if are_held_out { "the validation data" } else { "further rows of the data" };
    let measured = count(of.measured as u64, "token");
    let compared = count(tokens as u64, "token");
    let _ = writeln!(text, "\nActivations were measured on {measured}; perplexities are of {compared} of {rows}.");
    write_synced(&folder.join(FILE), text.as_bytes())
}
