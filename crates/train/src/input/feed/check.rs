//! The data check as JSON, for the log: what became of the rows of each dataset, and how they fill the batches.

use data::Layout;
use data::summary::DatasetSummary;
use serde_json::{Value, json};

use super::Feed;

impl Feed {
    /// Counts as in [`Feed::check_table`].
    pub fn check_json(&self) -> Value {
        let extent = &self.train_extent;
        let layout = match &self.spec.layout {
            Layout::Packed => "packed",
            Layout::Padded(_) => "padded",
            Layout::Joined(_) => "joined",
        };
        json!({
            "datasets": self.encoded.summary.datasets.iter().map(dataset).collect::<Vec<Value>>(),
            "documents": self.documents.len(),
            "held_out": self.validation.as_ref().map_or(0, |(documents, _)| documents.len()),
            "rows": extent.rows,
            "row_tokens": self.spec.seq_len,
            "micro_batches": extent.micro_batches,
            "layout": layout,
            "fill": extent.fill,
        })
    }
}

fn dataset(of: &DatasetSummary) -> Value {
    let dropped = of.dropped.iter().map(
        |(reason, dropped)| json!({"reason": reason.name(), "rows": dropped.rows, "example": of.example(dropped)}),
    );
    json!({
        "name": of.name,
        "rows_read": of.rows_read,
        "rows_kept": of.rows_kept,
        "documents": of.documents,
        "tokens": of.tokens,
        "trained_tokens": of.trained_tokens,
        "longest": of.longest,
        "over_length": of.over,
        "unused_columns": of.unused,
        "remarks": of.remarks.lines(),
        "dropped": dropped.collect::<Vec<Value>>(),
    })
}
