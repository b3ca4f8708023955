//! `type: text`: plain text for pre-training. Everything is trained; EOS is appended.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::columns;
use super::{EncodeRow, RowForm};
use crate::document::Document;
use crate::error::{RowError, RowReason};
use crate::remarks::Remarks;
use crate::tokenizer::Tokenizer;

pub(super) struct TextRows {
    tokenizer: Arc<Tokenizer>,
    field: String,
}

impl TextRows {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, field: String) -> Self {
        TextRows { tokenizer, field }
    }
}

impl EncodeRow for TextRows {
    fn encode(&self, row: &Map<String, Value>, _: RowForm, _: &mut Remarks) -> Result<Document, RowError> {
        let text = columns::text(row, &self.field)?;
        if text.is_empty() {
            return Err(RowError::new(RowReason::Empty, format!("column `{}` is empty", self.field)));
        }
        let mut ids: Vec<i32> = self.tokenizer.encode_document(text)?.ids.into_iter().map(|id| id as i32).collect();
        if let Some(eos) = self.tokenizer.eos()
            && ids.last() != Some(&(eos.id as i32))
        {
            ids.push(eos.id as i32);
        }
        Ok(Document::all_trained(ids))
    }
}
