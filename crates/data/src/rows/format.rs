//! The format of a file by its name.

use std::path::Path;

/// The compression of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    Gzip,
    Zstd,
}

/// Extensions of the formats that are read.
pub(super) const DATA: [&str; 7] = ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "txt"];

/// Extensions that say how a file is packed.
const PACKINGS: [(&str, Packing); 3] = [("gz", Packing::Gzip), ("zst", Packing::Zstd), ("zstd", Packing::Zstd)];

/// A file's format by its name, without the packing around it.
pub(crate) fn format_of(path: &Path) -> Option<(&'static str, Option<Packing>)> {
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    let (inner, packing) = PACKINGS
        .iter()
        .find_map(|(suffix, packing)| Some((name.strip_suffix(suffix)?.strip_suffix('.')?, Some(*packing))))
        .unwrap_or((&name, None));
    let (_, extension) = inner.rsplit_once('.')?;
    let extension = if extension == "ndjson" { "jsonl" } else { extension };
    DATA.into_iter().find(|format| *format == extension).map(|format| (format, packing))
}

/// Returns true for a file whose rows have the same structs throughout, with nulls where one lacks a field of another.
pub(crate) fn is_columnar(path: &Path) -> bool {
    matches!(format_of(path), Some(("parquet" | "arrow", _)))
}
